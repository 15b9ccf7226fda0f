"""Averages the losses of a stage by weight; nonfinite losses are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


class LossAverage:
    """The average so far, and what it was made of.

    value: moved from outside, by `add`; weight: what the loss just added counts for; seen: weight of all so far, that
    one included; nonfinite: how many losses stayed out.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.weight = 1.0
        self.seen = 0.0
        self.nonfinite = 0

    def add(self, loss: float, weight: float, move: Callable[[float, float], float]) -> None:
        """Add one loss; `move(loss, average)` returns the new average."""
        if not math.isfinite(loss):
            self.nonfinite += 1
        elif weight > 0:
            self.weight = weight
            self.seen += weight
            self.value = move(loss, self.value)

    @property
    def result(self) -> float:
        """The stage's average: NaN, not 0, where nothing finite was seen."""
        return self.value if self.seen > 0 else math.nan

    def state_dict(self) -> dict[str, float]:
        """Return the state for a run that resumes inside the stage."""
        return {"value": self.value, "seen": self.seen, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state that `state_dict` returned."""
        self.value, self.seen, self.nonfinite = state["value"], state["seen"], state["nonfinite"]


def joined_averages(states: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The state of one average over all that several have seen."""
    seen = math.fsum(state["seen"] for state in states)
    total = math.fsum(state["value"] * state["seen"] for state in states)
    nonfinite = sum(state["nonfinite"] for state in states)
    return {"value": total / seen if seen > 0 else 0.0, "seen": seen, "nonfinite": nonfinite}
