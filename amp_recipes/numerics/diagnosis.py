"""Combines the results of the instruments: is a precision safe for this model, and if not, what makes it safe?"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amp_recipes import __version__
from amp_recipes.errors import PrecisionError
from amp_recipes.files.run_files import write_atomically
from amp_recipes.files.strict_json import encode_findings
from amp_recipes.numerics.answers import ACCEPTED_LOSS, Answer, Failure, LossScale, ScaleFound, worst_status
from amp_recipes.numerics.census.census import take_census
from amp_recipes.numerics.census.neutrality import same_bits
from amp_recipes.numerics.drift.drift import ModuleDrift, drift
from amp_recipes.numerics.hazards.hazards import Hazard, find_hazards
from amp_recipes.numerics.nonfinite import locate
from amp_recipes.numerics.parts import Parts
from amp_recipes.numerics.pins.gradient_noise import GradientNoise
from amp_recipes.numerics.pins.lost import lost_pins
from amp_recipes.numerics.pins.proof import Training, train_with_pins
from amp_recipes.numerics.pins.search import PinSearch, default_tolerance, search_pins
from amp_recipes.numerics.pins.unrunnable import Raised, find_unrunnable, pinned_by, what_raised, where_it_raises
from amp_recipes.numerics.trial import Trial, Window, gradient_error
from amp_recipes.numerics.verdict import headline_of, percent, say, settings_of, verdict_of
from amp_recipes.numerics.watch.underflow import Underflow, underflow
from amp_recipes.precision import AMPConfig

# Windows that a diagnosis looks at: about three in five to search pins on, the others held out.
WINDOWS = 8
JSON_FILE, PINS_FILE = "diagnosis.json", "fp32_modules.yaml"
# An error that is another on each batch, of a fifth of what batches differ by anyway, adds 2 % to the gradient's noise:
# sqrt(1 + 0.2^2). One that is the same on every batch (a bias) adds up, and has a bound of its own.
_SHARE_OF_NOISE = 0.2
_SLOW = 5  # times as long as fp32: emulated, not slow
_TIMED = 3  # steps, of which the fastest counts
_LARGEST = torch.finfo(torch.float16).max
_SEARCH_FAILED = "the search for pins ended with an error"
_PARTS, _PARTS_OF_PRECISION = 4, 4  # reference, hazards, pins of the run, underflow; census, drift, pins, proof
_MORE_IN_FP16 = 2  # underflow with pins, and a proof at another scale

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Questions:
    """The questions that a diagnosis answers.

    precisions: names of those to look at, the one that matters most last; tolerance: bound on the relative error of the
    gradient, None: see `tolerance_for`; steps: of training in the proof of pins, at most; seconds: that it may take,
    about; loss_scale: of the run, for fp16; asked: the precisions that the exit status is about (default: all). One
    precision may be given as a string.
    """

    precisions: Sequence[str]
    tolerance: float | None = None
    steps: int = 100
    seconds: float = 300.0
    loss_scale: LossScale = field(default_factory=LossScale)
    asked: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = (self.precisions,) if isinstance(self.precisions, str) else tuple(self.precisions)
        object.__setattr__(self, "precisions", names)
        object.__setattr__(self, "asked", tuple(self.asked) or names)
        for name in self.precisions:
            if AMPConfig.from_name(name).dtype == torch.float32:
                raise PrecisionError(f"a diagnosis compares bf16 or fp16 with fp32; {name!r} is neither bf16 nor fp16.")


@dataclass(repr=False)
class Diagnosis:
    """The effect of a precision on a model; `str` of it is the verdict.

    answers: one per precision, in the order asked; asked: names of those that `status` is about; weights: whose they
    were; processor_seconds: of each part, those of a precision below its name; notes: what else is to be known.
    """

    answers: list[Answer] = field(default_factory=list)
    underflow: Underflow | None = None
    hazards: list[Hazard] = field(default_factory=list)
    lost_pins: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: str = ""
    asked: Sequence[str] = ()
    device: str = ""
    device_type: str = "cpu"
    seconds: float = 0.0
    processor_seconds: dict[str, Any] = field(default_factory=dict)

    @property
    def in_order(self) -> list[Answer]:
        """The answers, those that were asked for first."""
        return sorted(self.answers, key=lambda answer: answer.name not in self.asked)

    @property
    def verdict(self) -> str:
        """The verdict: what to do in the first line of each precision, the figures below, then notes."""
        return "\n".join(verdict_of(self))

    @property
    def status(self) -> int:
        """For scripts: 0 safe, 1 not safe as it is, 2 not decided; of the precisions that were asked for, the worst."""
        return worst_status([answer.status for answer in self.answers if answer.name in self.asked])

    def __str__(self) -> str:
        return self.verdict

    __repr__ = __str__  # what a notebook shows

    def as_dict(self) -> dict[str, Any]:
        """Return as in `diagnosis.json`: the last precision's results at the top, the others below `others`."""
        found = [answer.as_dict() for answer in self.answers]
        main = found[-1] if found else {"census": [], "casts": [], "drift": [], "pins": None, "precision": None}
        return {
            "verdict": self.verdict,
            "headlines": [headline_of(answer) for answer in self.in_order] or self.notes[:1],
            "settings": {answer.name: list(settings_of(answer)) for answer in self.answers if answer.is_cured},
            "status": self.status,
            **main,
            "underflow": None if self.underflow is None else self.underflow.as_dict(),
            "hazards": [hazard.as_dict() for hazard in self.hazards],
            "lost_pins": self.lost_pins,
            "others": {other["precision"]: other for other in found[:-1]},
            "weights": self.weights,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "processor_seconds": self.processor_seconds,
            "notes": self.notes,
            "versions": {"amp_recipes": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def write(self, folder: Path) -> None:
        """Write `diagnosis.json`, and `fp32_modules.yaml` if pins are verified, into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JSON_FILE, encode_findings(self.as_dict()))
        if self.answers and self.answers[-1].is_cured and self.answers[-1].new_pins:
            write_atomically(folder / PINS_FILE, _pins_file(self.answers[-1]).encode())


def _pins_file(answer: Answer) -> str:
    """The file of pins, and in its comment the loss scale that they need."""
    scale = [f"# with {line}\n" for line in settings_of(answer) if not line.startswith("fp32_modules")]
    return "".join([*scale, answer.advised.yaml()])


def diagnose(
    trial: Trial,
    windows: Sequence[Window],
    questions: Questions,
    pinned: Sequence[str] = (),
    weights: str = "",
    further: Sequence[Window] = (),
    tell: Callable[[str], None] = logger.info,
) -> Diagnosis:
    """Ask the instruments about the precisions of `questions`.

    windows: at least three, of real batches; pinned: modules that are pinned already; weights: whose they are; further:
    windows that only the proof trains on, as well; tell: told which part runs. A precision in which the step does not
    run has an answer too. Raises what the step raises in fp32, and torch.OutOfMemoryError.
    """
    result = Diagnosis(weights=weights, asked=questions.asked, device=_device_name(trial.device))
    result.device_type = trial.device.type
    tried = {*questions.precisions, "bf16"}
    count = _PARTS + len(tried) + _PARTS_OF_PRECISION * len(questions.precisions)
    parts = Parts(tell, of=count + _MORE_IN_FP16 * ("fp16" in questions.precisions))
    began = time.perf_counter()
    reference = parts.run("reference", lambda: _reference(trial, windows, result))
    if reference is not None:
        _Examiner(trial, windows, questions, pinned, result, parts, further).examine(*reference)
    result.notes += parts.notes
    if trial.device.type == "cpu" and result.answers:
        result.notes.append(say("on_cpu"))
    result.seconds, result.processor_seconds = time.perf_counter() - began, parts.seconds
    return result


def tolerance_for(dtype: torch.dtype, noise: float) -> float:
    """The bound on the gradient's relative error where none is given, from what batches differ by (`GradientNoise`).

    A fifth of that, and at least ten times the dtype's eps, which rounding alone can reach. What is the same on every
    batch is held to the latter, since no mean over batches takes it away.
    """
    return max(default_tolerance(dtype), _SHARE_OF_NOISE * noise)


def _reference(trial: Trial, windows: Sequence[Window], result: Diagnosis) -> tuple[float, float] | None:
    """Measure how the gradients of windows differ in fp32, and two runs of the same step.

    None, and a note, if fp32 itself is not finite.
    """
    noise = GradientNoise()
    for index, window in enumerate(windows):
        outcome = trial.run(window)
        if not outcome.is_finite:
            report = locate(trial, window, torch.float32, 1.0)
            result.notes += [say("fp32", window=index), say("fix_fp32", message=report.message)]
            return None
        noise.add(outcome)
    first, second = trial.run(windows[0]), trial.run(windows[0])
    if same_bits(first, second):
        return noise.relative, 0.0
    error = gradient_error(second, first)
    result.notes.append(say("repeats", error=percent(error)))
    return noise.relative, error


class _Examiner:
    """Asks the instruments about one precision after the other."""

    def __init__(
        self,
        trial: Trial,
        windows: Sequence[Window],
        questions: Questions,
        pinned: Sequence[str],
        result: Diagnosis,
        parts: Parts,
        further: Sequence[Window],
    ) -> None:
        held_out = max(1, 2 * len(windows) // 5)
        self._trial, self._questions, self._pinned, self._result = trial, questions, list(pinned), result
        self._searched, self._held_out, self._further = list(windows[:-held_out]), list(windows[-held_out:]), further
        self._parts = parts
        self._began = time.perf_counter()
        self._failures: dict[str, Failure | None] = {}

    def examine(self, noise: float, repeats_within: float) -> None:
        """Fill in the result; noise, repeats_within: what gradients of windows, and of one window twice, differ by."""
        trial, result, parts, window = self._trial, self._result, self._parts, self._searched[0]
        self._noise, self._repeats_within = noise, repeats_within
        result.hazards = parts.attempt("hazards", lambda: find_hazards(trial, window), [])
        result.lost_pins = parts.attempt("pins of the run", self._lost_pins, [])
        failure = self._failure("bf16")
        pins = None if failure is None else [*self._pinned, *failure.modules]
        if failure is None or failure.modules:
            look = lambda: underflow(trial, self._searched, pins)  # noqa: E731
            result.underflow = parts.attempt("underflow", look, None)
        else:
            parts.skip()
        precisions = self._questions.precisions
        for index, name in enumerate(precisions):
            left = self._questions.seconds - (time.perf_counter() - self._began)
            result.answers.append(self._answer(name, max(0.0, left) / (len(precisions) - index)))

    def _lost_pins(self) -> list[dict[str, str]]:
        """Pins without effect; where bf16 does not run, as seen in fp32."""
        look = partial(lost_pins, self._trial, self._searched[0], self._pinned, standing=True)
        try:
            return look(dtype=torch.bfloat16)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return look(dtype=torch.float32)

    def _answer(self, name: str, seconds: float) -> Answer:
        began = time.perf_counter()
        trial, searched, parts, dtype = self._trial, self._searched, self._parts, AMPConfig.from_name(name).dtype
        scale = self._questions.loss_scale.init if dtype == torch.float16 else 1.0
        failure = self._failure(name)
        pins = self._pinned if failure is None else [*self._pinned, *failure.modules]
        runs = failure is None or bool(failure.modules)
        tolerance = bias = self._questions.tolerance  # a bound of the user's own holds for all of the error
        if tolerance is None:
            tolerance, bias = tolerance_for(dtype, self._noise), default_tolerance(dtype)
        answer = Answer(
            name,
            scale,
            PinSearch(tolerance, bias, already=pins, undecided=_SEARCH_FAILED),
            self._noise,
            failure=failure,
        )
        if runs:
            take = lambda: take_census(trial, searched[0], dtype, scale, pins)  # noqa: E731
            answer.census = parts.attempt("census", take, None, name)
        else:
            parts.skip()
        rank = lambda: drift(trial, searched, dtype, scale, pins=pins)  # noqa: E731
        answer.drift = parts.attempt("drift", rank, [], name)
        if dtype == torch.float16:
            overflowing = tuple(dict.fromkeys(pin for row in answer.nonfinite for pin in row.pins)) if runs else ()
            if not overflowing:
                parts.skip()  # the second look at underflow
            answer.loss_scale = replace(self._scale_found(pins, overflowing), pins=overflowing)
            answer.scale = answer.loss_scale.met
        seconds = max(0.0, seconds - (time.perf_counter() - began))
        parts.attempt("pins", lambda: self._search(answer, dtype, seconds), None, name)
        return answer

    def _failure(self, name: str) -> Failure | None:
        """Find why the step does not run in this precision, once."""
        if name not in self._failures:
            dtype = AMPConfig.from_name(name).dtype
            self._failures[name] = self._parts.run("first step", lambda: self._try(dtype, name), name)
        return self._failures[name]

    def _try(self, dtype: torch.dtype, name: str) -> Failure | None:
        trial, window, pins = self._trial, self._searched[0], self._pinned
        try:
            trial.run(window, dtype, pins=pins)  # this also warms up what `_seconds_of` measures
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raised = where_it_raises(trial, window, dtype, pins) or Raised(what_raised(error))
            found = find_unrunnable(trial, window, dtype, pins, kind=Exception)
            if found is None:
                return Failure(raised)
            return Failure(raised, tuple(found.errors), tuple(pinned_by(trial.modules, found)))
        if name in self._questions.precisions:
            times = self._seconds_of(dtype, pins) / max(1e-9, self._seconds_of(torch.float32, None))
            if times > _SLOW:
                self._parts.notes.append(say("slow", precision=name, times=times, device=self._result.device))
        return None

    def _seconds_of(self, dtype: torch.dtype, pins: Sequence[str] | None) -> float:
        """The least time of a few steps; the reference has warmed up those in fp32."""
        window = self._searched[0]
        return min(self._trial.run(window, dtype, pins=pins).processor_seconds for _ in range(_TIMED))

    def _search(self, answer: Answer, dtype: torch.dtype, seconds: float) -> None:
        """Search pins at the run's own scale; where it is too low, at the scale that is advised."""
        trial, own, scale = self._trial, answer.pins, answer.loss_scale
        began = time.perf_counter()

        def prove(*asked: Any) -> Training:
            return self._parts.run("proof", lambda: train_with_pins(*asked), answer.name)

        def search(scale: float, ranked: list[ModuleDrift], share: float = 1.0) -> PinSearch:
            left = max(0.0, seconds - (time.perf_counter() - began))
            return search_pins(
                *(trial, self._searched, self._held_out, dtype, scale, own.tolerance, ranked),
                steps=self._questions.steps,
                seconds=share * left,
                already=own.already,
                bias_tolerance=own.bias_tolerance,
                repeats_within=self._repeats_within,
                further=self._further,
                prove=prove,
            )

        is_too_low = scale is not None and scale.gain > ACCEPTED_LOSS
        # At a scale that is too low, pins would cure what a higher scale cures for nothing.
        # The search at the advised scale may take as long.
        answer.pins = search(answer.scale, [], 0.5) if is_too_low else search(answer.scale, answer.drift)
        if scale is not None and is_too_low and (answer.pins.needed or answer.loses_gradients):
            answer.at_advised = search(scale.advised, answer.drift)
        elif scale is not None:
            self._parts.skip()  # the second proof

    def _scale_found(self, pins: Sequence[str], overflowing: Sequence[str]) -> ScaleFound:
        """Find what the run's loss scale meets on these batches, with these modules in fp32."""
        pins = [*pins, *overflowing]
        if overflowing:  # their gradients, too, are beyond fp16, and would hide what the others need
            look = lambda: underflow(self._trial, self._searched, pins)  # noqa: E731
            self._result.underflow = self._parts.attempt("underflow", look, self._result.underflow, "fp16")
        asked, flow = self._questions.loss_scale, self._result.underflow
        met, skipped = asked.init, 0
        if flow is None or not flow.largest * asked.init <= _LARGEST:
            for window in self._searched:
                while met > 1.0 and self._overflows(window, met, pins):
                    met, skipped = max(1.0, met * asked.backoff_factor), skipped + 1
        if flow is None or not flow.counted:
            return ScaleFound(asked.init, met, skipped, met, 0.0, 0.0, 0)
        octaves = max(0.0, math.log(flow.init_scale / met, asked.growth_factor))
        updates = asked.growth_interval * math.ceil(octaves)
        return ScaleFound(
            asked.init, met, skipped, flow.init_scale, _lost_at(flow, met), _lost_at(flow, flow.init_scale), updates
        )

    def _overflows(self, window: Window, scale: float, pins: Sequence[str]) -> bool:
        try:
            outcome = self._trial.run(window, torch.float16, scale, pins)
        except RuntimeError:
            return False
        return outcome.loss_is_finite and not outcome.is_finite


def _lost_at(flow: Underflow, scale: float) -> float:
    """The share of the gradients that fp16 flushes at this scale, and bf16 does not; of the power of two below it."""
    index = sum(known <= scale for known in flow.scales) - 1
    return flow.flushed[max(0, index)] - flow.exact_zeros


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a CPU ({torch.backends.cpu.get_cpu_capability()})" if device.type == "cpu" else device.type
