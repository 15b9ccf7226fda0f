"""Proves a set of pins by training steps and a census, and measures its cost in time and memory."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amp_recipes.modules.torch_private import storage_id
from amp_recipes.numerics.pins.equivalence import LOOKS, Comparison, compare
from amp_recipes.numerics.trial import Course, Trial, Window

_BACK_OFFS = 3  # of fp16's loss scale until it fits


@dataclass
class Training:
    """The comparison of training with the pins and in fp32.

    steps: that each training took, 0 if none was; curves: loss by step, of each seed in fp32 and in low precision;
    proven: whether the loss fell and the low precision ends no worse; worse: whether it ends higher by more than the
    margin; comparison: the figures of both, None where trainings cannot be compared; text: the same in words; detail:
    with the figures; helps: what a person can do where nothing is proven, a kind of sentence in `verdict.py`.
    """

    steps: int = 0
    proven: bool = False
    text: str = "no training was requested"
    detail: str = ""
    reference: list[list[float]] = field(default_factory=list)
    low: list[list[float]] = field(default_factory=list)
    worse: bool = False
    comparison: Comparison | None = None
    helps: str = "compare"


def train_with_pins(
    trial: Trial,
    windows: Sequence[Window],
    dtype: torch.dtype,
    scale: float,
    pins: Sequence[str],
    steps: int,
    pairs: int = LOOKS[-1],
) -> Training:
    """Train `steps` steps in fp32 and in low precision, in pairs, until it is decided; the weights stay.

    pairs: at most. The final loss is the mean over the last quarter. A pair has the same batches and random numbers, so
    the difference of its final losses is the precision's; pairs differ in the order of the batches and in the random
    numbers. `compare` decides, after 3, 6 and 12 pairs. Nothing is proven where fp32's loss does not fall, or where
    updates are skipped. A learning rate that warms up begins at the rate it warms up to. Nothing here reads a clock.
    """
    if steps < 1:
        return Training()
    if not _learns(trial):
        return Training(text="no training, since every learning rate is 0", helps="other_rate")
    reference: list[Course] = []
    low: list[Course] = []
    found = Training(steps)
    for look in (LOOKS[0], *(look for look in LOOKS[1:] if look <= pairs)):
        for seed in range(len(reference), look):
            order = _order(windows, steps, seed)
            reference.append(_course(trial, order, torch.float32, 1.0, (), seed))
            low.append(_course(trial, order, dtype, scale, pins, seed))
        found = _judged(reference, low, dtype, steps)
        if found.comparison is None or found.comparison.is_decided:
            break
    return found


def _judged(reference: Sequence[Course], low: Sequence[Course], dtype: torch.dtype, steps: int) -> Training:
    found = Training(steps, reference=[course.losses for course in reference], low=[course.losses for course in low])
    if not all(course.is_finite for course in reference):
        found.text = f"training gave no evidence: the loss is not finite in fp32 either, within {steps} steps"
        found.helps = "other_rate"
        return found
    failure = _failure(reference, low, _BACK_OFFS if dtype == torch.float16 else 0, steps)
    if failure is not None:
        found.text = failure
    else:
        found.comparison = _compare(reference, low, torch.finfo(dtype).eps / 2)
        _describe(found, found.comparison)
    return found


def _learns(trial: Trial) -> bool:
    groups = (group for optimizer in trial.optimizers().values() for group in optimizer.param_groups)
    return any(float(_full_rate(group)) != 0 for group in groups)


def _failure(reference: Sequence[Course], low: Sequence[Course], allowed_skips: int, steps: int) -> str | None:
    """Return what low precision does that fp32 does not, so that the losses cannot be compared."""
    skipped = max(mine.skipped - its.skipped for mine, its in zip(low, reference, strict=True))
    if skipped > allowed_skips:
        return f"training skipped {skipped} of {steps} updates"
    if not all(course.is_finite for course in low):
        return f"training diverges within {steps} steps, unlike in fp32"
    return None


def _compare(reference: Sequence[Course], low: Sequence[Course], rounding: float) -> Comparison:
    return compare(
        [_first(course.losses) for course in reference],
        [_final(course.losses) for course in reference],
        [_final(course.losses) for course in low],
        statistics.fmean(_final(course.sizes) for course in reference),
        rounding,
    )


def _describe(found: Training, seen: Comparison) -> None:
    """Write the result to `found`."""
    found.worse, found.proven = seen.worse, seen.equal
    if seen.fall <= 0 or seen.shows_nothing:
        found.helps = "other_rate"
    found.detail = (
        f"loss falls by {seen.fall:.4g} in fp32; higher by {seen.higher:.2g} +- {seen.uncertain:.2g} in low precision; "
        f"up to {seen.margin:.2g} does not matter ({seen.pairs} pairs of {found.steps} steps; means of the last "
        "quarter; one-sided, 95 %)"
    )
    if seen.worse:
        found.text = f"{found.steps} training steps WORSE than fp32 ({_lost(seen)})"
    elif seen.fall <= 0:
        found.text = f"training gave no evidence: the loss did not fall in {found.steps} steps of fp32"
    elif seen.shows_nothing:
        found.text = (
            f"training gave no evidence: in {found.steps} steps of fp32 the loss fell by {seen.fall:.2g}, and a "
            f"difference of up to {seen.margin:.2g} does not matter, because seeds or rounding make it"
        )
    elif seen.lower:
        found.text = (
            f"training differs from fp32: the loss ends lower, by {_percent(-seen.higher / seen.fall)} of its fall, "
            f"and up to {_percent(seen.margin / seen.fall)} does not matter"
        )
    elif seen.equal:
        most = _percent(max(0.0, seen.higher + seen.uncertain) / seen.fall)
        found.text = (
            f"{found.steps} training steps no worse than fp32 (at most {most} of the loss's fall is lost, and up to "
            f"{_percent(seen.margin / seen.fall)} does not matter)"
        )
    else:
        found.text = (
            f"not decided by {seen.pairs} pairs of trainings of {found.steps} steps: only a loss of "
            f"{_percent((seen.margin + seen.uncertain) / seen.fall)} of its fall would have been seen"
        )


def _lost(seen: Comparison) -> str:
    """The loss in low precision, beside what it falls by in fp32."""
    if seen.fall <= 0:
        return f"the loss ends higher by {seen.higher:.2g}, and does not fall in fp32"
    lost, allowed = _percent(seen.higher / seen.fall), _percent(seen.margin / seen.fall)
    return f"{lost} of the loss's fall is lost, and up to {allowed} does not matter"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _order(windows: Sequence[Window], steps: int, seed: int) -> list[Window]:
    """The window of each step. The first and the last quarter take the same ones for each seed, in another order.

    So final losses of seeds differ by what was learned, not by which batches came last.
    """
    order = random.Random(seed)
    quarter = _quarter(steps)
    measured, others = windows[:quarter], windows[quarter:] or windows
    chosen: list[Window] = []
    for part, count in ((measured, quarter), (others, steps - 2 * quarter), (measured, quarter)):
        epochs = (order.sample(list(part), len(part)) for _ in itertools.count())
        chosen += itertools.islice(itertools.chain.from_iterable(epochs), max(0, count))
    return chosen[:steps]


def _course(
    trial: Trial, order: Sequence[Window], dtype: torch.dtype, scale: float, pins: Sequence[str], seed: int
) -> Course:
    def prepare() -> None:
        torch.manual_seed(seed)
        for optimizer in trial.optimizers().values():
            for group in optimizer.param_groups:
                group["lr"] = _full_rate(group)

    return trial.train(order, dtype, scale, pins, prepare=prepare)


def _full_rate(group: dict[str, Any]) -> Any:
    """The learning rate, or the one that its schedule started from if that is higher: a warm-up would show nothing."""
    rate, full = group["lr"], group.get("initial_lr", group["lr"])
    if float(full) <= float(rate):
        return rate
    return torch.full_like(rate, float(full)) if isinstance(rate, torch.Tensor) else full


def _quarter(steps: int) -> int:
    return max(1, steps // 4)


def _first(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[: _quarter(len(losses))])


def _final(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-_quarter(len(losses)) :])


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
