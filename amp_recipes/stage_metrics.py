"""The metrics of a stage as ratios of two sums, which stay on the device until the stage ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class StageMetrics:
    """Adds up what batches contribute; a metric is the sum of its totals over the sum of its counts.

    Sums are float64 (float32 on a device without it), in the order of the batches, so that a resumed stage adds up to
    the same bits.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float | Tensor] = {}
        self._counts: dict[str, float | Tensor] = {}

    def add(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to both sums of `name`. total, count: a number, or a tensor of any shape, which is summed.

        A contribution that is not finite is left out, with its count. Nothing waits for the device.
        """
        total, count = _summed(total), _summed(count)
        if isinstance(total, Tensor):
            finite = total.isfinite()
            total, count = total.where(finite, 0.0), finite.to(total.dtype) * count
        elif not math.isfinite(total):
            total = count = 0.0
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def sums(self) -> dict[str, tuple[float, float]]:
        """name -> (total, count), read from the device."""
        return {name: (float(total), float(self._counts[name])) for name, total in self._totals.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """What a run needs that resumes inside the stage."""
        return {name: list(pair) for name, pair in self.sums().items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Take a state that `state_dict` returned."""
        self._totals = {name: total for name, (total, _) in state.items()}
        self._counts = {name: count for name, (_, count) in state.items()}


def ratios(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """total / count of each; NaN where nothing was counted."""
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def _summed(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(value)
    return value.detach().sum(dtype=torch.float32 if value.device.type == "mps" else torch.float64)
