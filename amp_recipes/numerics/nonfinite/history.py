"""Tells how the training went before a nonfinite step, as far as it is known."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

_GROWTH = 10.0  # of the last loss over the median of those before, at which training diverges


@dataclass(frozen=True, slots=True)
class History:
    """The steps of a fit before the one that is looked at.

    updates: how many were taken, None if that is not known; losses: the mean loss of the latest, oldest first.
    """

    updates: int | None = None
    losses: Sequence[float] = ()

    def with_loss(self, loss: float) -> History:
        """The same with the loss of one more step, if there are any."""
        return replace(self, losses=(*self.losses, loss)) if self.losses else self

    @property
    def grown(self) -> tuple[float, float] | None:
        """The median of the losses but the last, and the last; None if there are fewer than two."""
        return (statistics.median(self.losses[:-1]), self.losses[-1]) if len(self.losses) > 1 else None

    @property
    def has_diverged(self) -> bool:
        """Whether the last loss is far above those before."""
        if self.grown is None:
            return False
        median, last = self.grown
        return last - median > (_GROWTH - 1) * abs(median)


NO_HISTORY = History()
