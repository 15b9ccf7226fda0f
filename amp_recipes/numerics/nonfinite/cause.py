"""Finds the cause of a nonfinite step: repeats it, watched, at other scales and precisions.

The first replay, at the current scale, shows where the value first appeared. If the step is finite at scale 1, the
cause is the scale. If it is finite in float32, the cause is the precision. If it is finite without the nonfinite values
of a batch or of a weight, these are the cause. Otherwise it is the model.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from amp_recipes.data import SampleName
from amp_recipes.numerics.nonfinite.batch_samples import Inseparable, is_list_of_samples, samples_in, take_samples
from amp_recipes.numerics.nonfinite.history import NO_HISTORY, History
from amp_recipes.numerics.nonfinite.report import NonfiniteReport
from amp_recipes.numerics.nonfinite.samples import samples_by_parts, samples_in_rows
from amp_recipes.numerics.nonfinite.trace import NonfiniteTrace
from amp_recipes.numerics.nonfinite.values import External, plain_tensors, range_of
from amp_recipes.numerics.nonfinite.walk import Origin, find_origin
from amp_recipes.numerics.nonfinite.words import message_of, norm_overflows, not_replayable
from amp_recipes.numerics.trial import Outcome, Trial, Window, first_line
from amp_recipes.numerics.watch.observe import dtype_name
from amp_recipes.precision import pinned_modules
from amp_recipes.state.randomness import GENERATORS

SampleNames = Sequence[Sequence[SampleName] | None]
_PINS = 6  # modules that are tried as a pin
_PARTS = 16  # runs of parts of a batch that a search for samples may take


def locate(
    trial: Trial,
    window: Window,
    dtype: torch.dtype,
    scale: float = 1.0,
    known_generators: Mapping[str, Any] | None = None,
    most_parts: int = _PARTS,
    history: History = NO_HISTORY,
    names: SampleNames = (),
) -> NonfiniteReport:
    """Find the value that makes the step on `window` nonfinite at `dtype` and `scale`, and its cause.

    known_generators: by name, those that the trial puts back to where they stood before the step, whenever it takes it.
    Of others that the step draws from (Python's and NumPy's global ones, attributes of modules) the report says that a
    replay drew otherwise. most_parts: runs of parts of the batch that may be taken to find the samples,
    where the birth itself does not tell. history: of the fit before the step.
    names: of the samples of each batch, where they are known (`data.sample_names`).
    Weights, buffers, gradients and generators are afterwards as they were.
    """
    return _Search(trial, window, dtype, scale, known_generators or {}, most_parts, history, names).report()


class _Raised(Exception):
    """The recipe's code raised; says what."""


class _Search:
    def __init__(
        self,
        trial: Trial,
        window: Window,
        dtype: torch.dtype,
        scale: float,
        generators: Mapping[str, Any],
        most_parts: int,
        history: History,
        names: SampleNames,
    ) -> None:
        self._trial, self._window, self._dtype, self._scale = trial, list(window), dtype, scale
        known = set(map(id, generators.values()))
        own = _generators_in(trial.modules)
        others = {name: generator for name, generator in own.items() if id(generator) not in known}
        self._put_back = list(generators)
        self._generators = {**others, **generators}
        self._most_parts, self._history, self._names = most_parts, history, names
        self._bad_at = scale  # the scale at which it is known to be bad
        self._drawn: list[str] = []
        self._drawn_again: list[str] = []  # from those that are put back
        self._notes: list[str] = []
        self._replays = 0
        self._seconds = 0.0
        self._times: dict[tuple[torch.dtype, bool], float] = {}

    def _run(
        self,
        dtype: torch.dtype,
        scale: float,
        window: Window | None = None,
        watch: Sequence = (),
        pins: Sequence[str] | None = None,
    ) -> Outcome:
        began = time.perf_counter()
        self._replays += 1
        try:
            outcome = self._trial.run(self._window if window is None else window, dtype, scale, pins, watch)
        except Exception as error:
            raise _Raised(f"{type(error).__name__}: {first_line(error)[:300]}") from error
        finally:
            self._seconds += time.perf_counter() - began
        if window is None and pins is None:
            self._times.setdefault((dtype, bool(watch)), outcome.seconds)
        return outcome

    def _watched(self, dtype: torch.dtype, scale: float) -> tuple[Outcome, Origin | None]:
        trace = NonfiniteTrace(self._trial.modules, self._window, self._parameters(), self._generators)
        outcome = self._run(dtype, scale, watch=[trace])
        self._drawn = [name for name in trace.drawn if name not in self._put_back]
        self._drawn_again = [name for name in trace.drawn if name in self._put_back]
        return outcome, find_origin(trace, outcome)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Each once, by name: those of the modules, and what optimizers hold beside them."""
        found = dict(self._trial.modules.named_parameters())
        known = set(map(id, found.values()))
        for key, optimizer in self._trial.optimizers().items():
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            found |= {f"{key}[{i}]": parameter for i, parameter in enumerate(held) if id(parameter) not in known}
        return found

    def report(self) -> NonfiniteReport:
        try:
            outcome, origin = self._watched(self._dtype, self._scale)
        except _Raised as error:
            return self._unplaced("not replayable", f"The step cannot be repeated: {error}.")
        if outcome.is_finite:
            return self._of_finite(outcome)
        if origin is None:
            message = "The repeated step is nonfinite too, but the place where this began was not found."
            return self._unplaced("not replayable", message)
        try:
            cause, origin = self._cause(origin)
        except _Raised as error:
            self._notes.append(
                "The cause was not found, because the step raised an error when it was repeated under other "
                f"conditions: {error}."
            )
            cause = "not replayable"
        samples, all_samples = self._samples(origin, cause)
        if self._drawn:
            self._notes.append(
                f"The step draws from {' and '.join(self._drawn)}, which a replay cannot restore: it drew other "
                "numbers."
            )
        names = self._names_of(origin, samples)
        message = message_of(origin, cause, samples, names, all_samples, self._notes, self._history)
        report = self._report(cause, message, origin, samples)
        if any(name.index is not None for name in names):
            report.dataset_indices = [name.index for name in names]
        if any(name.file is not None for name in names):
            report.sample_files = [name.file for name in names]
        return report

    def _cause(self, origin: Origin) -> tuple[str, Origin]:
        """The cause, and the origin that goes with it."""
        if origin.external is not None and origin.external.kind != "tensor":
            return self._of_external(origin)
        # A loss made of gradients (a penalty on them) depends on the scale as gradients do.
        if (origin.is_gradient or origin.place.phase == "backward") and self._scale != 1.0:
            if self._run(self._dtype, 1.0).is_finite:
                return "scale", origin
            self._bad_at = 1.0
        if self._dtype == torch.float32:
            return "model", origin
        wide = self._run(torch.float32, 1.0)
        if wide.is_finite:
            self._history = self._history.with_loss(statistics.fmean(map(float, wide.losses)))
            if self._bad_at != self._scale:  # what overflows at the scale may hide what is wrong at any scale
                origin = self._watched(self._dtype, 1.0)[1] or origin
            return "precision", replace(origin, pin=self._pin_that_cures(origin))
        return self._in_any_precision(origin)

    def _pin_that_cures(self, origin: Origin) -> str | None:
        """The module that makes the step finite if it runs in float32: where it began, what made that, or around it.

        Empty if none of the few that are tried does; None where there is no module to try.
        """
        own = origin.place.module
        around = [own.rpartition(".")[0]] if "." in own else []
        known = dict(self._trial.modules.named_modules())
        candidates = [name for name in dict.fromkeys((own, *origin.makers, *around)) if name and name in known]
        if own not in candidates:
            return None
        pinned = pinned_modules(self._trial.modules)
        for name in candidates[:_PINS]:
            if self._run(self._dtype, 1.0, pins=[*pinned, name]).is_finite:
                return name
        return ""

    def _in_any_precision(self, origin: Origin) -> tuple[str, Origin]:
        wide = self._watched(torch.float32, 1.0)[1]
        if wide is None:
            return "model", origin
        if wide.dtype in ("float16", "bfloat16"):
            self._notes.append(
                f"Even when the step runs in float32, this op computes in {wide.dtype}, because the code casts its "
                "inputs."
            )
        if (wide.place, wide.op) == (origin.place, origin.op):
            return "model", origin
        if wide.external is not None and wide.external.kind != "tensor":
            return self._of_external(wide)
        return "model", wide

    def _of_external(self, origin: Origin) -> tuple[str, Origin]:
        """The cause, if a nonfinite parameter, buffer or part of a batch is on the way to what is nonfinite."""
        cause = "data" if origin.external.kind == "batch" else "model"
        with _repaired(origin.external):
            outcome = self._run(self._dtype, self._bad_at)
            if outcome.is_finite or (self._bad_at != 1.0 and self._run(self._dtype, 1.0).is_finite):
                return cause, origin
            if not origin.is_gradient and outcome.loss_is_finite:
                note = "With 0 in its place the loss is finite, but the gradients are not: there is a second problem."
                self._notes.append(note)
                return cause, origin
            other = self._watched(self._dtype, self._bad_at)[1]
        if other is None or other.external is not None:
            return cause, origin
        self._notes.append(f"{origin.external} is nonfinite too, but replacing it with 0 does not help.")
        return self._cause(other)

    def _of_finite(self, outcome: Outcome) -> NonfiniteReport:
        if not math.isfinite(outcome.gradient_norm):
            return self._of_norm(outcome)
        others = len(self._trial.optimizers()) > 1
        return self._unplaced("not replayable", not_replayable(self._drawn, others, self._trial.device.type))

    def _of_norm(self, outcome: Outcome) -> NonfiniteReport:
        """Every gradient is finite, and yet their norm is not: squares of more than 1.8e19 are beyond float32."""
        ranges = {name: range_of(gradient) for name, gradient in outcome.gradients.items()}
        name = max(ranges, key=lambda name: ranges[name].largest or 0.0)
        widest = ranges[name]
        cause = "model"
        if self._dtype != torch.float32:
            wide = self._run(torch.float32, 1.0)
            cause = "precision" if wide.is_finite and math.isfinite(wide.gradient_norm) else "model"
        report = self._unplaced(cause, norm_overflows(name, widest, cause, dtype_name(self._dtype), self._history))
        report.module, report.op, report.phase = name.rpartition(".")[0], "gradient norm", "backward"
        report.dtype, report.range, report.target = widest.dtype, [widest], "gradient norm"
        return report

    def _samples(self, origin: Origin, cause: str) -> tuple[list[Any], bool]:
        """The samples that do it, and whether these are all."""
        if origin.batch is None:
            return [], False
        batch = self._window[origin.batch]
        length = samples_in(batch)
        shapes = frozenset(tuple(parameter.shape) for parameter in self._parameters().values())
        born = _told_samples(origin) or samples_in_rows(origin, length, is_list_of_samples(batch), shapes)
        found = born and self._that_matter(origin, batch, born, length)
        if found is None and cause in ("precision", "model") and origin.external is None:

            def is_bad(samples: list[int]) -> bool:
                # Each weighs what it does in the whole, where the loss is a mean.
                scale = self._bad_at * len(samples) / length / len(self._window)
                return self._is_bad(origin, take_samples(batch, samples, length), scale)

            found = samples_by_parts(is_bad, length, self._most_parts)
        named: list[Any] = found or []
        if len(self._window) > 1:
            named = [[origin.batch, sample] for sample in named]
        return named, len(named) == length > 1

    def _names_of(self, origin: Origin, samples: list[Any]) -> list[SampleName]:
        """The names of the samples, if the names of their batch are known."""
        of_batch = self._names[origin.batch] if samples and origin.batch < len(self._names) else None
        if of_batch is None:
            return []
        return [of_batch[sample[1] if isinstance(sample, list) else sample] for sample in samples]

    def _that_matter(self, origin: Origin, batch: Any, born: list[int], length: int) -> list[int]:
        """Those in which the value was not left out again, if with others in their place all is well indeed."""
        left = origin.passage.of(born)
        innocent = [sample for sample in range(length) if sample not in left]
        if left == born or not innocent:
            return born
        others = [innocent[sample % len(innocent)] if sample in left else sample for sample in range(length)]
        try:
            changed = take_samples(batch, others, length)
            return born if self._is_bad(origin, changed, self._bad_at / len(self._window)) else left
        except Inseparable:
            return born

    def _is_bad(self, origin: Origin, batch: Any, scale: float) -> bool:
        """Whether what is nonfinite in the step is so in a step on this batch."""
        try:
            outcome = self._run(self._dtype, scale, [batch])
        except _Raised as error:  # batch normalisation refuses a single sample
            raise Inseparable from error
        return not (outcome.is_finite if origin.is_gradient else outcome.loss_is_finite)

    def _unplaced(self, cause: str, message: str) -> NonfiniteReport:
        report = NonfiniteReport(cause, message, self._dtype, self._scale)
        report.drawn, report.put_back = self._drawn, self._drawn_again
        report.replays, report.seconds = self._replays, self._seconds
        return report

    def _report(self, cause: str, message: str, origin: Origin, samples: list[Any]) -> NonfiniteReport:
        report = self._unplaced(cause, message)
        report.module, report.op, report.phase = origin.place.module, origin.op, origin.place.phase
        report.dtype, report.samples, report.target, report.chain = origin.dtype, samples, origin.target, origin.chain
        report.line = None if origin.line is None else str(origin.line)
        report.external = None if origin.external is None else str(origin.external)
        if origin.external is not None and origin.external.tensor is not None:
            report.range = [range_of(plain.detach()) for plain in plain_tensors(origin.external.tensor)]
        if origin.birth is not None:
            report.range, report.made = origin.birth.inputs, origin.birth.outputs
            report.function, report.node = origin.birth.function, origin.birth.node
        watched = self._times[self._dtype, True]
        bare = self._times.get((self._dtype, False)) or self._times.get((torch.float32, False))
        report.ratio = watched / bare if bare else None
        return report


def _told_samples(origin: Origin) -> list[int] | None:
    """The samples that the arguments of the op show."""
    return None if origin.fault is None or origin.fault.samples is None else list(origin.fault.samples)


@contextmanager
def _repaired(external: External) -> Iterator[None]:
    """Inside this context, the nonfinite values of the tensor are 0."""
    plain = [tensor.detach() for tensor in plain_tensors(external.tensor)]
    kept = [tensor.clone() for tensor in plain]
    try:
        for tensor in plain:
            # .data: what the recipe keeps of the tensor's graph may still be differentiated
            tensor.data.copy_(tensor.nan_to_num(0.0, 0.0, 0.0))
        yield
    finally:
        for tensor, value in zip(plain, kept, strict=True):
            tensor.data.copy_(value)


def _generators_in(modules: nn.Module) -> dict[str, Any]:
    """The generators that modules have as attributes, by name."""
    return {
        f"the generator {name}.{key}".replace(" .", " "): value
        for name, module in modules.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, GENERATORS)
    }
