"""Proves a set of pins by training steps and a census, and measures its cost in time and memory."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amp_recipes.modules.torch_private import storage_id
from amp_recipes.numerics.trial import Course, Trial, Window

# Pairs of trainings, fp32 and low precision, that differ in the order of the batches and in the random numbers.
SEEDS = 3
# Student's t, 95 %, one-sided. With SEEDS - 1 = 2 degrees of freedom the distribution is 1/2 + t / (2 sqrt(2 + t^2)):
# the quantile is a * sqrt(2 / (1 - a^2)) with a = 2 * 0.95 - 1.
_T = 0.9 * math.sqrt(2 / (1 - 0.9**2))
# Final losses that differ by less count as equal, even if all pairs agree: a few batches repeat.
_NEGLIGIBLE = 1e-3
# A loss higher by this share of what fp32 gained must have shown, or the trainings say nothing.
_RESOLVED = 0.5
_BACK_OFFS = 3  # of fp16's loss scale until it fits
_FEWEST_STEPS = 10


@dataclass
class Training:
    """The comparison of training with the pins and in fp32.

    steps: that each training took, 0 if none was; curves: loss by step, of each seed in fp32 and in low precision;
    proven: whether the loss fell and the low precision ends no worse; text: the same in words; detail: with the
    figures.
    """

    steps: int = 0
    proven: bool = False
    text: str = "no training was requested"
    detail: str = ""
    reference: list[list[float]] = field(default_factory=list)
    low: list[list[float]] = field(default_factory=list)


def train_with_pins(
    trial: Trial, windows: Sequence[Window], dtype: torch.dtype, scale: float, pins: Sequence[str], steps: int
) -> Training:
    """Train `steps` steps in fp32 and in low precision, for SEEDS seeds each; the weights stay.

    The final loss is the mean over the last quarter. A pair has the same batches and random numbers, so the difference
    of its final losses is the precision's. It is worse if the mean difference is beyond Student's one-sided 95 %, and
    more than 0.1 % of the mean |loss| (as a step may have losses that cancel). Nothing is proven where fp32's loss does
    not fall, where updates are skipped, or where half of what fp32 gains could be lost unseen. A learning rate that
    warms up begins at the rate it warms up to.
    """
    if steps < 1:
        return Training()
    if not _learns(trial):
        return Training(text="no training, since every learning rate is 0")
    reference, low = [], []
    for seed in range(SEEDS):
        reference.append(_course(trial, windows, torch.float32, 1.0, (), steps, seed))
        low.append(_course(trial, windows, dtype, scale, pins, steps, seed))
    found = Training(steps, reference=[course.losses for course in reference], low=[course.losses for course in low])
    failure = _failure(reference, low, _BACK_OFFS if dtype == torch.float16 else 0, steps)
    if failure is not None:
        found.text = failure
    else:
        _compare(found, statistics.fmean(_final(course.sizes) for course in reference))
    return found


def _learns(trial: Trial) -> bool:
    groups = (group for optimizer in trial.optimizers().values() for group in optimizer.param_groups)
    return any(float(_full_rate(group)) != 0 for group in groups)


def _failure(reference: Sequence[Course], low: Sequence[Course], allowed_skips: int, steps: int) -> str | None:
    """Return why the losses cannot be compared, if they cannot."""
    skipped = max(mine.skipped - its.skipped for mine, its in zip(low, reference, strict=True))
    if not all(course.is_finite for course in reference):
        return f"training gave no evidence: fp32 diverges within {steps} steps"
    if skipped > allowed_skips:
        return f"training skipped {skipped} of {steps} updates"
    if not all(course.is_finite for course in low):
        return f"training diverges within {steps} steps, unlike in fp32"
    return None


def _compare(found: Training, size: float) -> None:
    """Compare the final losses, and write the result to `found`; size: the mean |loss| at the end in fp32."""
    first = statistics.fmean(_first(losses) for losses in found.reference)
    last = statistics.fmean(_final(losses) for losses in found.reference)
    gains = [_final(mine) - _final(its) for mine, its in zip(found.low, found.reference, strict=True)]
    higher = statistics.fmean(gains)
    shows = max(_T * statistics.stdev(gains) / math.sqrt(SEEDS), _NEGLIGIBLE * size)
    found.detail = (
        f"loss from {first:.4g} to {last:.4g} in fp32; higher by {higher:.2g} in low precision; a difference of "
        f"{shows:.2g} would have been detected (paired t test of {SEEDS} seeds, 95 %, one-sided; mean of the last "
        "quarter)"
    )
    percent = f"{100 * shows / size:.2g} %" if size else "any"
    if last >= first:
        found.text = f"training gave no evidence: the loss did not fall in {found.steps} steps of fp32"
    elif higher > shows:
        found.text = f"{found.steps} training steps WORSE than fp32 (the loss is {100 * higher / size:.2g} % higher)"
    elif shows > _RESOLVED * (first - last):
        found.text = f"training gave no evidence: only a loss {percent} higher would have been detected"
    else:
        found.proven = True
        found.text = (
            f"{found.steps} training steps no worse than fp32 (a loss {percent} higher would have been detected)"
        )


def steps_that_fit(steps: int, fp32_seconds: float, low_seconds: float, seconds: float) -> int:
    """Return the number of steps that fit into `seconds`, at most `steps`; 0 if too few to show anything."""
    fit = int(seconds / max(1e-9, SEEDS * (fp32_seconds + low_seconds)))
    return 0 if min(steps, fit) < min(steps, _FEWEST_STEPS) else min(steps, fit)


def _course(
    trial: Trial,
    windows: Sequence[Window],
    dtype: torch.dtype,
    scale: float,
    pins: Sequence[str],
    steps: int,
    seed: int,
) -> Course:
    order = random.Random(seed)
    chosen: list[Window] = []
    while len(chosen) < steps:
        chosen += order.sample(list(windows), len(windows))

    def prepare() -> None:
        torch.manual_seed(seed)
        for optimizer in trial.optimizers().values():
            for group in optimizer.param_groups:
                group["lr"] = _full_rate(group)

    return trial.train(chosen[:steps], dtype, scale, pins, prepare=prepare)


def _full_rate(group: dict[str, Any]) -> Any:
    """The learning rate, or the one that its schedule started from if that is higher: a warm-up would show nothing."""
    rate, full = group["lr"], group.get("initial_lr", group["lr"])
    if float(full) <= float(rate):
        return rate
    return torch.full_like(rate, float(full)) if isinstance(rate, torch.Tensor) else full


def _first(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[: max(1, len(losses) // 4)])


def _final(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Inside its `with`, counts the bytes that the forward saves for the backward, without the parameters."""

    def __init__(self, modules: nn.Module) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.bytes = 0
        self._parameters = {storage_id(parameter) for parameter in modules.parameters()}
        self._seen: set[tuple[int, int]] = set()

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            storage, identity = tensor.untyped_storage(), storage_id(tensor)
            # The address as well: a storage that was freed may lend its identity to the next one.
            key = (identity, storage.data_ptr())
            if identity not in self._parameters and key not in self._seen:
                self._seen.add(key)
                self.bytes += storage.nbytes()
        return tensor


def cost(
    trial: Trial,
    window: Window,
    dtype: torch.dtype,
    scale: float,
    pins: Sequence[str],
    already: Sequence[str],
    pairs: int,
) -> tuple[float, float]:
    """Measure the cost of the pins: (time, memory) of a step with them, as ratios to one without the new ones.

    Time: median over pairs of runs, one after the other; memory: bytes that are saved for the backward.
    """
    ratios = []
    for _ in range(pairs):
        without = trial.run(window, dtype, scale, already).seconds
        ratios.append(trial.run(window, dtype, scale, pins).seconds / without)
    saved = []
    for names in (pins, already):
        with_count = SavedBytes(trial.modules)
        trial.run(window, dtype, scale, names, watch=[with_count])
        saved.append(with_count.bytes)
    return statistics.median(ratios), saved[0] / max(1, saved[1])
