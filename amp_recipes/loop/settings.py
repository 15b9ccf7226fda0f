"""Reads the run options as the recipe has them now."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from amp_recipes.distributed.options import ProcessOptions
from amp_recipes.precision.options import LossScaleOptions, PrecisionOptions

logger = logging.getLogger(__name__)

# What a run is set up by in its constructor.
_HAVE_EFFECT_AT_ONCE = [
    name for group in (PrecisionOptions, LossScaleOptions, ProcessOptions) for name in group.__annotations__
]


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
        self._had_effect: dict[str, str] = {}

    def note_effect(self) -> None:
        """The run is set up now: what these options say has had its effect."""
        self._had_effect = {name: str(getattr(self, name)) for name in _HAVE_EFFECT_AT_ONCE}

    def warn_of_late_ones(self) -> None:
        """Say which options were assigned too late to have an effect."""
        for name, value in self._had_effect.items():
            now = str(getattr(self, name))
            if now != value:
                logger.warning(
                    "self.%s was set to %s after the run was set up with %s. It is a run option, so this has no "
                    "effect: set it in the YAML, on the command line (--%s) or in run_opts.",
                    *(name, now, value, name),
                )
        self._had_effect = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"there is no run option {name!r}")
        if name in self._hidden:
            return vars(self._recipe).get(name, self._hidden[name])
        return getattr(self._recipe, name)
