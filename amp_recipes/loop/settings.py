"""Reads the run options as the recipe has them now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from amp_recipes.distributed.options import ProcessOptions
from amp_recipes.errors import RecipeError
from amp_recipes.precision.options import LossScaleOptions, PrecisionOptions

# What a run has set up by the end of the constructor: these options have had their effect.
_HAD_EFFECT = [name for group in (PrecisionOptions, LossScaleOptions, ProcessOptions) for name in group.__annotations__]


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

    def fix(self) -> None:
        """The run is set up, by the options as they are now."""
        self._fixed = {name: getattr(self, name) for name in _HAD_EFFECT}

    def check_fixed(self) -> None:
        """Raise RecipeError if an option was assigned too late to have an effect."""
        for name, value in self._fixed.items():
            if (now := getattr(self, name)) != value:
                raise RecipeError(
                    f"self.{name} was set to {now!r} when the run was already set up with {value!r}: it would have no "
                    f"effect. Give {name} in the YAML, on the command line (--{name}) or in run_opts."
                )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"there is no run option {name!r}")
        if name in self._hidden:
            return vars(self._recipe).get(name, self._hidden[name])
        return getattr(self._recipe, name)
