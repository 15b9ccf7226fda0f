"""Sums the metrics of a stage: a metric is the sum of its totals divided by the sum of its counts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_recipes.precision.host_copy import HostCopy, HostFuture

Sums = tuple[float, ...]  # total, count, and how many contributions were left out
Contribution = tuple[str, "float | Tensor", "float | Tensor"]  # the metric's name, a total and a count (0-d)


class StageMetrics:
    """Adds up what batches contribute; a metric is the sum of its totals over the sum of its counts.

    The device does no more than to sum a contribution's tensors. What it found travels to the host, where the sums are
    float64, in the order of the batches, so that a resumed stage adds up to the same bits.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._added: list[Contribution] = []
        self._under_way: deque[tuple[list[Contribution], HostFuture]] = deque()

    def add(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to both sums of `name`. total, count: a number, or a tensor of any shape, which is summed.

        Where either sum is not finite, this contribution is left out as a whole. Nothing waits for the device.
        """
        self._added.append((name, _summed(total), _summed(count)))

    def send(self, host: HostCopy) -> None:
        """Send what was added to the host."""
        vector = _tensors_of(self._added)
        if vector is not None:
            self._under_way.append((self._added, host.post(vector)))
            self._added = []

    def take_in(self, but_newest: int) -> None:
        """Add up what was sent, and has long arrived, but for as many of the latest."""
        while len(self._under_way) > but_newest:
            self._arrive()

    def merge(self, other: StageMetrics) -> None:
        """Add all that `other` added up."""
        self._settle()
        for name, sums in other.sums().items():
            self._add(name, sums)

    def sums(self) -> dict[str, Sums]:
        """Return for each metric its total, its count and the number of values left out; waits for the device."""
        self._settle()
        return {name: tuple(sums) for name, sums in self._sums.items()}

    def _settle(self) -> None:
        self.take_in(but_newest=0)
        vector = _tensors_of(self._added)
        self._take(self._added, [] if vector is None else vector.tolist())
        self._added = []

    def _arrive(self) -> None:
        added, future = self._under_way.popleft()
        self._take(added, future.read())

    def _take(self, added: Sequence[Contribution], of_tensors: Iterable[float]) -> None:
        """Add up contributions; of_tensors: the numbers of those that are tensors, in their order."""
        numbers = iter(of_tensors)
        for name, *pair in added:
            total, count = (next(numbers) if isinstance(number, Tensor) else number for number in pair)
            finite = math.isfinite(total) and math.isfinite(count)
            self._add(name, (total, count, 0) if finite else (0.0, 0.0, 1))

    def _add(self, name: str, sums: Sums) -> None:
        known = self._sums.get(name)
        self._sums[name] = [*sums] if known is None else [old + new for old, new in zip(known, sums, strict=True)]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state for a run that resumes inside the stage."""
        return {name: list(sums) for name, sums in self.sums().items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore a state that `state_dict` returned."""
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


def _tensors_of(added: Iterable[Contribution]) -> Tensor | None:
    """The numbers of contributions that are tensors, in a vector (on the device if one is); None if there are none."""
    tensors = [number for _, *pair in added for number in pair if isinstance(number, Tensor)]
    if not tensors:
        return None
    # Those of the host go to the device: the other way, the host would wait for it.
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return torch.stack([tensor.to(device, non_blocking=True) for tensor in tensors])
