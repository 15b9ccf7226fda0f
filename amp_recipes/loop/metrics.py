"""Adds up the metrics of a stage: a metric is the sum of its totals divided by the sum of its counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Sums = tuple[float, ...]  # total, count, and how many contributions were left out


class StageMetrics:
    """Adds up what batches contribute; a metric is the sum of its totals over the sum of its counts.

    Sums are float64 (float32 on a device without it), in the order of the batches, so that a resumed stage adds up to
    the same bits.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float | Tensor]] = {}

    def add(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to both sums of `name`. total, count: a number, or a tensor of any shape, which is summed.

        Where either sum is not finite, this contribution is left out as a whole. Nothing waits for the device.
        """
        total, count = _summed(total), _summed(count)
        if not isinstance(total, Tensor) and not isinstance(count, Tensor):
            finite = math.isfinite(total) and math.isfinite(count)
            self._add(name, [total, count, 0] if finite else [0.0, 0.0, 1])
            return
        like = total if isinstance(total, Tensor) else count
        total, count = (
            number.to(like.device) if isinstance(number, Tensor) else like.new_full((), number)
            for number in (total, count)
        )
        finite = (total + count).isfinite()
        self._add(name, [total.where(finite, 0.0), count.where(finite, 0.0), (~finite).long()])

    def merge(self, other: StageMetrics) -> None:
        """Add all that `other` added up."""
        for name, sums in other._sums.items():
            self._add(name, sums)

    def _add(self, name: str, sums: list[float | Tensor]) -> None:
        known = self._sums.get(name)
        self._sums[name] = sums if known is None else [old + new for old, new in zip(known, sums, strict=True)]

    def sums(self) -> dict[str, Sums]:
        """Of each metric its total, its count and how many contributions were left out, read from the device."""
        return {name: tuple(map(float, sums)) for name, sums in self._sums.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """What a run needs that resumes inside the stage."""
        return {name: list(sums) for name, sums in self.sums().items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Take a state that `state_dict` returned."""
        self._sums = {name: list(sums) for name, sums in state.items()}


def ratios(sums: Mapping[str, Sums]) -> dict[str, float]:
    """total / count of each; NaN where nothing was counted."""
    return {name: total / count if count else math.nan for name, (total, count, _) in sums.items()}


def joined_metrics(states: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """The state of one `StageMetrics` that has added up all that several have."""
    joined = StageMetrics()
    for state in states:
        one = StageMetrics()
        one.load_state_dict(state)
        joined.merge(one)
    return joined.state_dict()


def _summed(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach().sum(dtype=torch.float32 if value.device.type == "mps" else torch.float64)
