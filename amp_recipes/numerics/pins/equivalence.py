"""Decides whether a difference of final losses matters: an equivalence test with a margin, in up to three looks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Pairs of trainings after which is decided; only while undecided are there more.
LOOKS = (3, 6, 12)
# Student's t with one degree of freedom less than pairs, one-sided at 5 % / 3: by Bonferroni's inequality, all three
# looks together call it wrong in at most 5 % of cases.
_T = {3: 5.3393, 6: 2.9117, 12: 2.4313}
# What a loss may be higher by. Of what fp32 gained: a curve that falls ever more slowly gives this share back for at
# least as large a share of its steps.
FALL_SHARE = 0.02
# Of the standard deviation of final losses over seeds: nobody can tell less from what another seed does.
SPREAD_SHARE = 1.0
# A margin above this share of what fp32 gained would let through a precision that does not learn.
_RESOLVED = 0.5


@dataclass(frozen=True)
class Comparison:
    """The final losses in low precision compared with those in fp32.

    higher: mean over pairs of what the low precision ends above fp32; uncertain: half of that mean's confidence
    interval; margin: what it may be higher by; fall: what fp32 gained; spread: standard deviation of the final losses
    in fp32 over seeds; size: mean |loss| at the end in fp32.
    """

    pairs: int
    higher: float
    uncertain: float
    margin: float
    fall: float
    spread: float
    size: float

    @property
    def worse(self) -> bool:
        """The whole interval lies above the margin."""
        return self.higher - self.uncertain > self.margin

    @property
    def shows_nothing(self) -> bool:
        """The loss fell by so little that a margin would be most of it."""
        return self.margin > _RESOLVED * self.fall

    @property
    def _within(self) -> bool:
        """The whole interval lies below the margin."""
        return self.higher + self.uncertain < self.margin

    @property
    def lower(self) -> bool:
        """The whole interval lies below minus the margin: no harm by itself, but it is another training."""
        return self.higher + self.uncertain < -self.margin

    @property
    def equal(self) -> bool:
        """The whole interval lies below the margin, the loss fell, and it is not `lower`."""
        return self._within and not self.lower and not self.shows_nothing

    @property
    def is_decided(self) -> bool:
        """More pairs would not change what is said."""
        return self.worse or self._within


def compare(
    first: Sequence[float], reference: Sequence[float], low: Sequence[float], size: float, rounding: float
) -> Comparison:
    """Compare pairs of trainings, as many as one of LOOKS says.

    first: loss of each at the start, in fp32; reference, low: at the end, in fp32 and in low precision; size: mean
    |loss| at the end in fp32; rounding: relative error of one rounding to the low dtype, which no loss can be told
    below. The interval is that of two one-sided tests (Schuirmann 1987), of which the upper one must hold. A loss that
    is lower by more than the margin is no harm by itself, and no proof. Where the margin is the seeds' spread, it is an
    estimate: in simulations, a difference of half of it is called worse in at most 2 % of cases, one of just its size
    in 4 to 32 %.
    """
    pairs = len(reference)
    differences = [mine - its for mine, its in zip(low, reference, strict=True)]
    fall = statistics.fmean(first) - statistics.fmean(reference)
    spread = statistics.stdev(reference)
    margin = max(FALL_SHARE * fall, SPREAD_SHARE * spread, rounding * size)
    uncertain = _T[pairs] * statistics.stdev(differences) / math.sqrt(pairs)
    return Comparison(pairs, statistics.fmean(differences), uncertain, margin, fall, spread, size)
