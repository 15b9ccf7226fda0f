"""Defines the errors that users meet, in one tree.

    AmpRecipesError
    ├── ConfigError (also a ValueError)       a YAML, an override or a run option is wrong
    ├── PrecisionError (also a RuntimeError)  the device, the model or the optimizer does not support the precision
    │   └── NonfiniteError                    losses or gradients stayed nonfinite; the run ended
    ├── DataError (also a ValueError)         a dataset is empty, or not in the expected form
    ├── RecipeError (also a TypeError)        a method of the recipe returned, or called, something wrong
    ├── CheckpointError (also a RuntimeError) a checkpoint cannot be written, found or read
    ├── FolderInUseError (also a RuntimeError) another run is using the output folder
    └── ProcessError (also a RuntimeError)    the processes of a run could not connect, or lost each other

Each message says what is wrong and where, what was given, what is accepted and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AmpRecipesError(Exception):
    """Every error that the framework raises on purpose."""


class ConfigError(AmpRecipesError, ValueError):
    """A YAML file, an override or a run option is wrong."""


class PrecisionError(AmpRecipesError, RuntimeError):
    """The device, the model or an optimizer does not support the precision."""


class NonfiniteError(PrecisionError):
    """Losses or gradients were nonfinite for `nonfinite_patience` updates in a row; the run ended."""


class DataError(AmpRecipesError, ValueError):
    """A dataset is empty, or not in the expected form."""


class RecipeError(AmpRecipesError, TypeError):
    """A method of the recipe returned something that the loop cannot use, or called something at the wrong time."""


class CheckpointError(AmpRecipesError, RuntimeError):
    """A checkpoint cannot be written, found or read."""


class FolderInUseError(AmpRecipesError, RuntimeError):
    """Another run is using the output folder."""


class ProcessError(AmpRecipesError, RuntimeError):
    """The processes of a run could not connect, lost each other, or waited too long for each other."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest of the known names; empty if none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def listed(names: Iterable[object], most: int = 5) -> str:
    """Join names, as in `a, b, c`; if there are more than `most`, as in `a, b, c, d, e and 7 more`."""
    shown = list(map(str, names))
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
