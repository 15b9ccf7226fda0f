"""What the declaration of a run option carries: its group, its meaning, which numbers it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amp_recipes.interrupts import SAVE_SIGNALS

MAX_SEED = 2**32 - 1  # what numpy.random.seed takes; torch and random take more


@dataclass(frozen=True)
class Range:
    """Which values an option takes, as a test and in words."""

    holds: Callable[[Any], bool]
    text: str


ANY_NUMBER = Range(math.isfinite, "a finite number")
POSITIVE = Range(lambda x: 0 < x < math.inf, "greater than 0")
ABOVE_ONE = Range(lambda x: 1 < x < math.inf, "greater than 1")
FRACTION = Range(lambda x: 0 < x < 1, "between 0 and 1, both excluded")
AT_LEAST_ZERO = Range(lambda x: 0 <= x < math.inf, "0 or more")
AT_LEAST_ONE = Range(lambda x: x >= 1, "1 or more")
AT_LEAST_FOUR = Range(lambda x: x >= 4, "4 or more")
SIGNAL_NAMES = Range(lambda names: set(names) <= set(SAVE_SIGNALS), f"some of {', '.join(SAVE_SIGNALS)}")
SEED = Range(lambda x: 0 <= x <= MAX_SEED, f"from 0 to {MAX_SEED}")


# Groups whose options say how a run is watched and where it goes, not what it computes.
_BESIDE_TRAINING = frozenset({"Trying out", "Output", "Checkpoints", "Devices and processes"})


def option(
    default: Any, group: str, text: str, within: Range | None = None, changes_training: bool | None = None
) -> Any:
    """A dataclass field that carries its group, its meaning, its range, and whether a resumed run must keep it."""
    if changes_training is None:
        changes_training = group not in _BESIDE_TRAINING
    metadata = {"group": group, "help": text, "within": within, "changes_training": changes_training}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
