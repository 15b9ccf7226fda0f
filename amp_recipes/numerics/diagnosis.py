"""Combines the results of the instruments: is a precision safe for this model, and if not, what makes it safe?"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amp_recipes import __version__
from amp_recipes.errors import PrecisionError, listed
from amp_recipes.files.run_files import write_atomically
from amp_recipes.files.strict_json import encode_findings
from amp_recipes.numerics.census.census import Census, take_census
from amp_recipes.numerics.census.neutrality import same_bits
from amp_recipes.numerics.drift.drift import ModuleDrift, drift
from amp_recipes.numerics.hazards.hazards import Hazard, find_hazards
from amp_recipes.numerics.nonfinite import locate
from amp_recipes.numerics.pins.gradient_noise import GradientError, GradientNoise
from amp_recipes.numerics.pins.lost import lost_pins
from amp_recipes.numerics.pins.search import TENSOR_TOLERANCE, PinSearch, default_tolerance, search_pins
from amp_recipes.numerics.trial import Trial, Window, first_line, gradient_error
from amp_recipes.numerics.watch.underflow import Underflow, underflow
from amp_recipes.precision import AMPConfig

# Windows that a diagnosis looks at: about three in five to search pins on, the others held out.
WINDOWS = 8
JSON_FILE, PINS_FILE = "diagnosis.json", "fp32_modules.yaml"
_NAMED = 4  # modules in one sentence of the verdict
_HAZARDS_SHOWN = 6
# An error that is another on each batch, of a fifth of what batches differ by anyway, adds 2 % to the gradient's noise:
# sqrt(1 + 0.2^2). One that is the same on every batch (a bias) adds up, and has a bound of its own.
_SHARE_OF_NOISE = 0.2
_SLOW = 5  # times as long as fp32: emulated, not slow
_ON_CPU = (
    "This diagnosis ran on a CPU, so its verdict is about training on a CPU. The CPU's autocast leaves softmax, "
    "layer_norm, sum, exp and pow in low precision; CUDA's runs them in fp32 (`amp-recipes ops` prints both lists)."
)


@dataclass(frozen=True)
class Questions:
    """The questions that a diagnosis answers.

    precisions: names of those to look at, the one that matters most last; tolerance: bound on the relative error of the
    gradient, None: see `tolerance_for`; steps: of training in the proof of pins, at most; seconds: that it may take,
    about. One precision may be given as a string.
    """

    precisions: Sequence[str]
    tolerance: float | None = None
    steps: int = 200
    seconds: float = 300.0

    def __post_init__(self) -> None:
        names = (self.precisions,) if isinstance(self.precisions, str) else tuple(self.precisions)
        object.__setattr__(self, "precisions", names)
        for name in self.precisions:
            if AMPConfig.from_name(name).dtype == torch.float32:
                raise PrecisionError(f"a diagnosis compares bf16 or fp16 with fp32; {name!r} is neither bf16 nor fp16.")


@dataclass
class Answer:
    """The results for one precision.

    scale: the loss scale of the steps; drift: the most sensitive modules first; raises: what the step raises in this
    precision, empty if it runs (census and drift are then those of bf16); noise: what the gradients of batches differ
    by, relative to their size.
    """

    name: str
    scale: float
    census: Census
    drift: list[ModuleDrift]
    pins: PinSearch
    noise: float
    raises: str = ""

    @property
    def nonfinite(self) -> list[ModuleDrift]:
        """The modules that this precision makes nonfinite."""
        return [row for row in self.drift if not (math.isfinite(row.sensitivity) and math.isfinite(row.local_error))]

    @property
    def verdict(self) -> str:
        """One paragraph that a person can act on: safe, safe with these pins, or why that is not decided."""
        found = self.pins
        if found.decision == "safe":
            said = [f"{self.name}: safe ({self._proof()})"]
        elif found.decision == "pins":
            said = [
                f"{self.name}: {self._what_is_wrong()}",
                f"Pin {', '.join(found.modules)} ({'verified: ' if found.proof.proven else ''}{self._proof()})",
                _cost(found.cost_time, found.cost_memory),
                f"Add to your YAML: fp32_modules: [{', '.join(found.fp32_modules)}]",
            ]
        elif self.raises or found.needed:
            said = [f"{self.name}: not safe as it is: {self._what_is_wrong()}"]
            said.append(f"Which pins would make it safe is not decided: {found.undecided or found.proof.text}")
        else:
            said = [f"{self.name}: not decided: {found.undecided or found.proof.text}"]
            if found.worst is not None:
                said.append(f"On the batches tested: {self._measured(found.worst)}")
            said.append("Train in fp32, or compare whole trainings with amp-recipes compare")
        return ". ".join([*said, *found.notes]) + "."

    def _proof(self) -> str:
        """Describe the evidence for the pins, or for none."""
        measured = "" if self.pins.worst is None else self._measured(self.pins.worst)
        only = "" if self.pins.proof.proven else "gradient error only: "
        return f"{only}{measured}, {self.pins.training}"

    def _measured(self, found: GradientError) -> str:
        """The errors beside their bounds."""
        if not math.isfinite(found.error):
            return "the gradient is not finite"
        bound = self.pins.bias_tolerance
        said = [f"gradient error {_beside(found.error, self.pins.tolerance)}"]
        if found.tensor:
            said.append(f"largest in {found.tensor}: {_beside(found.tensor_error, TENSOR_TOLERANCE)}")
        if bound < self.pins.tolerance:
            said.append(f"systematic part {_beside(found.bias, max(bound, found.bias_floor))}")
        return ", ".join(said)

    def _what_is_wrong(self) -> str:
        if self.raises:
            return f"the step does not run: {self.raises}"
        worst = self.nonfinite
        if not worst:
            return "an error is above its bound" if self.pins.without is None else self._measured(self.pins.without)
        largest = torch.finfo(AMPConfig.from_name(self.name).dtype).max
        bound = f" > {largest:.5g}"
        named = [f"{row.module} (|x| up to {row.largest:.2g}{bound * (row.largest > largest)})" for row in worst]
        one = "s" if len(worst) == 1 else ""
        verb = f"overflow{one}" if any(row.largest > largest for row in worst) else f"become{one} nonfinite"
        return f"{len(worst)} of {len(self.drift)} modules with low-precision ops {verb}: {listed(named, _NAMED)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the results as in `diagnosis.json`."""
        return {
            **self.census.as_dict(),
            "precision": self.name,
            "scale": self.scale,
            "raises": self.raises,
            "gradient_noise": self.noise,
            "drift": [row.as_dict() for row in self.drift],
            "pins": self.pins.as_dict(),
        }


@dataclass(repr=False)
class Diagnosis:
    """The effect of a precision on a model; `str` of it is the verdict.

    answers: one per precision, in the order asked; weights: whose they were; notes: what else is to be known.
    """

    answers: list[Answer] = field(default_factory=list)
    underflow: Underflow | None = None
    hazards: list[Hazard] = field(default_factory=list)
    lost_pins: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: str = ""
    device: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """The verdict in a few lines: what to do."""
        lines = [answer.verdict for answer in self.answers]
        if self.underflow is not None and "fp16" in [answer.name for answer in self.answers]:
            lines.append(self.underflow.summary())
        lines += [f"{lost['module']}: the pin has no effect: {lost['reason']}" for lost in self.lost_pins]
        lines += self._hazard_lines()
        if self.weights:
            lines.append(f"The weights tested: {self.weights}.")
        return "\n".join([*lines, *self.notes])

    def _hazard_lines(self) -> list[str]:
        precisions = ("", *(answer.name for answer in self.answers))
        hazards = [hazard for hazard in self.hazards if hazard.precision in precisions and hazard.grade != "note"]
        lines = [f"{hazard.place}: {hazard.message}" for hazard in hazards[:_HAZARDS_SHOWN]]
        if len(hazards) > _HAZARDS_SHOWN:
            lines.append(f"{len(hazards) - _HAZARDS_SHOWN} more hazards are listed in {JSON_FILE}.")
        return lines

    def __str__(self) -> str:
        return self.verdict

    __repr__ = __str__  # what a notebook shows

    def as_dict(self) -> dict[str, Any]:
        """Return as in `diagnosis.json`: the last precision's results at the top, the others below `others`."""
        found = [answer.as_dict() for answer in self.answers]
        main = found[-1] if found else {"census": [], "casts": [], "drift": [], "pins": None, "precision": None}
        return {
            "verdict": self.verdict,
            **main,
            "underflow": None if self.underflow is None else self.underflow.as_dict(),
            "hazards": [hazard.as_dict() for hazard in self.hazards],
            "lost_pins": self.lost_pins,
            "others": {other["precision"]: other for other in found[:-1]},
            "weights": self.weights,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
            "versions": {"amp_recipes": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def write(self, folder: Path) -> None:
        """Write `diagnosis.json`, and `fp32_modules.yaml` if pins are verified, into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JSON_FILE, encode_findings(self.as_dict()))
        if self.answers and self.answers[-1].pins.decision == "pins":
            write_atomically(folder / PINS_FILE, self.answers[-1].pins.yaml().encode())


def diagnose(
    trial: Trial, windows: Sequence[Window], questions: Questions, pinned: Sequence[str] = (), weights: str = ""
) -> Diagnosis:
    """Ask the instruments about the precisions of `questions`.

    windows: at least three, of real batches; pinned: modules that are pinned already; weights: whose they are.
    """
    result = Diagnosis(weights=weights, device=_device_name(trial.device))
    began = time.perf_counter()
    noise = _noise_in_fp32(trial, windows, result)
    if noise is not None:
        _Examiner(trial, windows, questions, pinned, result).examine(noise)
    result.seconds = time.perf_counter() - began
    return result


def tolerance_for(dtype: torch.dtype, noise: float) -> float:
    """The bound on the gradient's relative error where none is given, from what batches differ by (`GradientNoise`).

    A fifth of that, and at least ten times the dtype's eps, which rounding alone can reach. What is the same on every
    batch is held to the latter, since no mean over batches takes it away.
    """
    return max(default_tolerance(dtype), _SHARE_OF_NOISE * noise)


def _noise_in_fp32(trial: Trial, windows: Sequence[Window], result: Diagnosis) -> float | None:
    """Measure how the gradients of windows differ; None, and a note, if fp32 itself is not finite."""
    noise = GradientNoise()
    for index, window in enumerate(windows):
        outcome = trial.run(window)
        if not outcome.is_finite:
            report = locate(trial, window, torch.float32, 1.0)
            result.notes.append(
                f"the step is not finite even in fp32, on window {index} of the training set. {report.message}"
            )
            return None
        noise.add(outcome)
    return noise.relative


def _repeats_within(trial: Trial, window: Window, result: Diagnosis) -> float:
    """Measure how two runs of the same fp32 step differ; adds a note if they are not equal bit for bit."""
    first, second = trial.run(window), trial.run(window)
    if same_bits(first, second):
        return 0.0
    error = gradient_error(second, first)
    result.notes.append(
        f"Two runs of the same step in fp32, from the same state, differ: their gradients differ by {_percent(error)}"
        ". No error can be measured more exactly than that."
    )
    return error


class _Examiner:
    """Asks the instruments about one precision after the other."""

    def __init__(
        self, trial: Trial, windows: Sequence[Window], questions: Questions, pinned: Sequence[str], result: Diagnosis
    ) -> None:
        held_out = max(1, 2 * len(windows) // 5)
        self._trial, self._questions, self._pinned, self._result = trial, questions, pinned, result
        self._searched, self._held_out = list(windows[:-held_out]), list(windows[-held_out:])

    def examine(self, noise: float) -> None:
        """Fill in the result; noise: what the gradients of windows differ by."""
        began = time.perf_counter()
        trial, result, window = self._trial, self._result, self._searched[0]
        self._noise, self._repeats_within = noise, _repeats_within(trial, window, result)
        result.hazards = find_hazards(trial, window)
        result.lost_pins = lost_pins(trial, window, self._pinned, torch.bfloat16, standing=True)
        result.underflow = underflow(trial, self._searched)
        precisions = self._questions.precisions
        for index, name in enumerate(precisions):
            left = self._questions.seconds - (time.perf_counter() - began)
            try:
                result.answers.append(self._answer(name, max(0.0, left) / (len(precisions) - index)))
            except RuntimeError as error:
                result.notes.append(f"{name}: the step does not run: {_what_raised(error)}.")
        if trial.device.type == "cpu":
            result.notes.append(_ON_CPU)

    def _answer(self, name: str, seconds: float) -> Answer:
        began = time.perf_counter()
        trial, searched, dtype = self._trial, self._searched, AMPConfig.from_name(name).dtype
        scale = self._result.underflow.init_scale if dtype == torch.float16 else 1.0
        watched, watched_scale, raises = dtype, scale, ""
        try:
            self._note_slowness(name, trial.run(searched[0], dtype, scale).seconds / trial.run(searched[0]).seconds)
        except RuntimeError as error:
            if dtype == torch.bfloat16:
                raise
            watched, watched_scale, raises = torch.bfloat16, 1.0, _what_raised(error)
        census = take_census(trial, searched[0], watched, watched_scale)
        ranked = drift(trial, searched, watched, watched_scale)
        tolerance = bias = self._questions.tolerance  # a bound of the user's own holds for all of the error
        if tolerance is None:
            tolerance, bias = tolerance_for(dtype, self._noise), default_tolerance(dtype)
        pins = search_pins(
            *(trial, searched, self._held_out, dtype, scale, tolerance, ranked),
            steps=self._questions.steps,
            seconds=max(0.0, seconds - (time.perf_counter() - began)),
            already=self._pinned,
            bias_tolerance=bias,
            repeats_within=self._repeats_within,
        )
        return Answer(name, scale, census, ranked, pins, self._noise, raises)

    def _note_slowness(self, name: str, slowness: float) -> None:
        if slowness > _SLOW:
            self._result.notes.append(
                f"A step in {name} took {slowness:.0f} times as long as in fp32 on {self._result.device}. This says "
                f"nothing about the time on a device with native {name} arithmetic."
            )


def _beside(error: float, bound: float) -> str:
    return f"{_percent(error)} {'<=' if error <= bound else '>'} {_percent(bound)}"


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.2g} %" if percent < 99.5 else f"{percent:.0f} %" if percent < 1e5 else "over 100000 %"


def _cost(time_ratio: float | None, memory_ratio: float | None) -> str:
    if time_ratio is None or memory_ratio is None:
        return "The cost of the pins could not be measured, because the step does not run without them"
    time_share, memory_share = 100 * (time_ratio - 1), 100 * (memory_ratio - 1)
    took = f"{time_share:.0f} % of the step's time" if time_share >= 1 else "no measurable time"
    return f"The pins cost {took}, and {max(0.0, memory_share):.0f} % of the memory that is saved for the backward"


def _what_raised(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a CPU ({torch.backends.cpu.get_cpu_capability()})" if device.type == "cpu" else device.type
