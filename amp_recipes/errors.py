"""Defines the errors that users meet, in one tree.

    AmpRecipesError
    ├── ConfigError (also a ValueError)       a YAML, an override or a run option is wrong
    ├── PrecisionError (also a RuntimeError)  a precision that the device, the model or the optimizer cannot do
    │   └── NonfiniteError                    losses or gradients stayed nonfinite; the run ended
    ├── DataError (also a ValueError)         a data set that is empty or has not the expected form
    ├── RecipeError (also a TypeError)        a recipe's method returned, or called, what the loop cannot use
    ├── CheckpointError (also a RuntimeError) a checkpoint that cannot be written, found or read
    ├── FolderInUseError (also a RuntimeError) another run writes in the output folder
    └── ProcessError (also a RuntimeError)    the processes of a run could not meet, or lost each other

Each message says where, what was given, what is accepted and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AmpRecipesError(Exception):
    """Every error that the framework raises on purpose."""


class ConfigError(AmpRecipesError, ValueError):
    """A YAML file, an override or a run option is wrong."""


class PrecisionError(AmpRecipesError, RuntimeError):
    """The device, the model or an optimizer cannot do what the precision asks."""


class NonfiniteError(PrecisionError):
    """Losses or gradients stayed nonfinite until patience ran out."""


class DataError(AmpRecipesError, ValueError):
    """A data set is empty, or not what the loader expects."""


class RecipeError(AmpRecipesError, TypeError):
    """A recipe's method returned, or called, what the loop cannot use."""


class CheckpointError(AmpRecipesError, RuntimeError):
    """A checkpoint cannot be written, found or read."""


class FolderInUseError(AmpRecipesError, RuntimeError):
    """Another process runs in the output folder."""


class ProcessError(AmpRecipesError, RuntimeError):
    """The processes of a run could not connect, lost each other, or waited too long for each other."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of the known names; empty if none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def listed(names: Iterable[object], most: int = 5) -> str:
    """The names in a row, as in `a, b, c`; of more than `most` the first, as in `a, b, c, d, e and 7 more`."""
    shown = list(map(str, names))
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
