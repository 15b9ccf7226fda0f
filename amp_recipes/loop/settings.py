"""Reads the run options as the recipe has them now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Settings:
    """Every run option as an attribute.

    A recipe may assign an option in the course of a run (`self.max_grad_norm = 1.0`): then this has the new value.
    hidden: the options whose names the recipe's class uses for something of its own; these stay as they were given,
    unless the recipe assigns them.
    """

    def __init__(self, recipe: Any, options: Iterable[str], hidden: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self._names = frozenset(options)
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"there is no run option {name!r}")
        if name in self._hidden:
            return vars(self._recipe).get(name, self._hidden[name])
        return getattr(self._recipe, name)
