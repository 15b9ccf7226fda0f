"""Words a verdict: every sentence that a diagnosis can say is in this file.

Each kind of sentence is said by a planted network in `tests/unit/numerics/test_verdict.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from glob import escape
from typing import Protocol

import torch

from amp_recipes.errors import listed
from amp_recipes.numerics.answers import ACCEPTED_LOSS, FLUSHED_TOLERANCE, Answer
from amp_recipes.numerics.hazards.hazards import Hazard
from amp_recipes.numerics.pins.gradient_noise import GradientError
from amp_recipes.numerics.pins.search import TENSOR_TOLERANCE, PinSearch
from amp_recipes.numerics.watch.underflow import Underflow
from amp_recipes.precision import AMPConfig

_NAMED = 4  # modules in one sentence
_HAZARDS_SHOWN = 6
_PLAIN_NAME = re.compile(r"(?!(?:true|false|yes|no|on|off|null|y|n)$)[a-z_][\w.-]*", re.IGNORECASE)

SENTENCES = {
    # The first line of a precision.
    "safe": "SAFE in {precision}.",
    "safe_pinned": "SAFE in {precision} with the pins of the run: {pins}.",
    "cured": "NOT SAFE in {precision}{at}. Safe {cure}.",
    "refuted": "NOT SAFE in {precision}{at}: the gradient is within its bounds, but {reason}.",
    "unsafe": "NOT SAFE in {precision}{at}. What makes it safe is not decided: {reason}.",
    "cannot_cured": "CANNOT RUN in {precision}. Safe {cure}.",
    "cannot_open": "CANNOT RUN in {precision}. It runs {cure}; whether that is safe is not decided: {reason}.",
    "cannot": "CANNOT RUN in {precision}. No pin that cures it was found.",
    "undecided": "NOT DECIDED in {precision}: {reason}.",
    "fp32": "NOT DECIDED: the step is not finite even in fp32, on window {window} of the training set.",
    # What was found.
    "raises": "{where} raises an error{op}{line}: {error}.",
    "overflows": "{count} of {of} modules with low-precision ops {verb}: {modules}.",
    "tried": "Tried, but not proven: {cure}.",
    "training": "Training: {text}.",
    "no_training": "Training: {text}, so only the gradient was tested. To test training too, use steps=200.",
    # What to do.
    "add": "Add to your YAML:",
    "cost": "The pins cost {time}, and {memory} of the memory that is saved for the backward.",
    "no_cost": "The cost of the pins was not measured, because the step does not run without them.",
    "superfluous": "Pinned without need: {modules}. Take them out of fp32_modules.",
    "more_time": "Give the diagnosis more time: --diagnose-minutes=20 on the command line, or minutes=20.",
    "more_windows": "Give the diagnosis more batches: --diagnose-windows=16 on the command line, or windows=16.",
    "make_repeatable": "Draw random numbers with torch only, set deterministic: true, and diagnose again.",
    "other_rate": "Diagnose again with a learning rate at which fp32 learns. If the weights are trained already, test "
    "the initial ones: --resume=never.",
    "outside": "Train in fp32, or put the code outside of modules under torch.autocast({device!r}, enabled=False).",
    "change_line": "Train in fp32, or change that line: call .float() on its inputs.",
    "compare": "Train in fp32, or test whole trainings: amp-recipes compare SCRIPT YAML --precisions=fp32,{precision}.",
    "fix_fp32": "Repair this first. {message}",
    # The loss scale of fp16.
    "scale": "Loss scale{pinned}: {lost} of the gradients become zero at init_scale {met}; {window}.",
    "scale_grows": "The scale grows from {met} to {advised} only after {updates} updates without overflow.",
    "scale_falls": "init_scale {init} is too high for these batches: about {skipped} updates are skipped while the "
    "scale falls to {met}. Nothing else is lost. init_scale: {advised} avoids it.",
    "no_scale_fits": "No loss scale fits: even at scale 1, gradients of up to {largest} are beyond fp16 (65504). "
    "Divide the loss by a constant.",
    "no_scale": "Loss scale: it does not matter, because no gradient flows in low precision.",
    # Notes.
    "lost_pin": "{module}: the pin has no effect: {reason}. Correct its name in fp32_modules, or take it out.",
    "more_hazards": "{count} more hazards are listed in diagnosis.json.",
    "weights": "The weights tested: {weights}.",
    "not_measured": "Not measured: {part}, because it raised {error}.",
    "slow": "A step in {precision} took {times:.0f} times as long as in fp32 on {device}. On a device with native "
    "{precision} arithmetic it may be fast.",
    "repeats": "Two runs of the same step in fp32, from the same state, differ: their gradients differ by {error}. "
    "No error can be measured more exactly than that. With deterministic: true they may be equal.",
    "on_cpu": "This diagnosis ran on a CPU, so its verdict is about training on a CPU. The CPU's autocast leaves "
    "softmax, layer_norm, sum, exp and pow in low precision; CUDA's runs them in fp32 (`amp-recipes ops` prints both "
    "lists).",
}


class Sentence(str):
    """A sentence of a verdict; kind: its key in `SENTENCES`."""

    kind = ""


def say(kind: str, **parts: object) -> Sentence:
    """Return the sentence of this kind with these parts."""
    said = Sentence(SENTENCES[kind].format(**parts))
    said.kind = kind
    return said


class Results(Protocol):
    """What a diagnosis found; see `Diagnosis`. in_order: its answers, those that were asked for first."""

    answers: list[Answer]
    underflow: Underflow | None
    hazards: list[Hazard]
    lost_pins: list[dict[str, str]]
    notes: list[str]
    weights: str
    device_type: str

    @property
    def in_order(self) -> list[Answer]: ...


def verdict_of(found: Results) -> list[str]:
    """The lines of a verdict: for each precision what follows, the figures, what to do; then what else is known."""
    lines: list[str] = []
    for answer in found.in_order:
        lines += [headline_of(answer), *_figures(answer), *_findings(answer), *advice_of(answer, found.device_type), ""]
    lines += _scale_lines(found)
    lines += [say("lost_pin", **lost) for lost in found.lost_pins]
    lines += _hazard_lines(found)
    if found.weights:
        lines.append(say("weights", weights=found.weights))
    return [*lines, *found.notes]


# ---------------------------------------------------------------------- the first line


def headline_of(answer: Answer) -> Sentence:
    """The line that a person acts on."""
    name, at = answer.name, _at(answer)
    if answer.decision == "safe":
        pins = answer.pins.fp32_modules
        return say("safe_pinned", precision=name, pins=listed(pins)) if pins else say("safe", precision=name)
    if answer.decision == "cannot run":
        return _cannot_run(answer)
    if answer.decision == "not decided":
        return say("undecided", precision=name, reason=_reason(answer))
    if answer.is_cured:
        return say("cured", precision=name, at=at, cure=_cure(answer))
    kind = "unsafe" if answer.advised.needed or answer.loses_gradients else "refuted"
    return say(kind, precision=name, at=at, reason=_reason(answer))


def _cannot_run(answer: Answer) -> Sentence:
    if not answer.new_pins:
        return say("cannot", precision=answer.name)
    if answer.is_cured:
        return say("cannot_cured", precision=answer.name, cure=_cure(answer))
    return say("cannot_open", precision=answer.name, cure=_cure(answer), reason=_reason(answer))


def _at(answer: Answer) -> str:
    """The run's own scale, where it is to blame."""
    if answer.at_advised is None or answer.loss_scale is None:
        return ""
    return f" at init_scale {_number(answer.loss_scale.init)}"


def _cure(answer: Answer) -> str:
    cure = [f"with {listed(answer.new_pins)} in fp32"] if answer.new_pins else []
    if answer.at_advised is not None and answer.loss_scale is not None:
        cure.append(f"at init_scale {_number(answer.loss_scale.advised)}")
    return " ".join(cure)


def _reason(answer: Answer) -> str:
    return answer.advised.undecided or answer.advised.proof.text


# ---------------------------------------------------------------------- the figures


def _figures(answer: Answer) -> Iterator[str]:
    """A table of what was measured, beside its bounds."""
    columns = _columns(answer)
    if not columns:
        return
    rows = [["", *columns, "bound", ""]]
    for label, bound, of in _rows(answer.advised):
        cells = [percent(of(error)) for error in columns.values()]
        named = next((error.tensor for error in columns.values() if error.tensor), "") if of is _of_tensor else ""
        rows.append([label, *cells, bound, named])
    if answer.loss_scale is not None:
        scale = answer.loss_scale
        then = scale.lost if answer.at_advised is None else scale.lost_advised
        shares = {"then": then, "tried": then}
        lost = [shares.get(column, scale.lost) for column in columns]
        rows.append(
            ["gradients that become zero", *map(percent, lost), percent(FLUSHED_TOLERANCE + scale.lost_advised), ""]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=False)),
        ]
        yield f"  {'  '.join([*cells, row[-1]])}".rstrip()


def _columns(answer: Answer) -> dict[str, GradientError]:
    """What was measured: as the run is set, and with what cures it, or was tried."""
    as_it_is = answer.pins.without if answer.failure is None else None
    if answer.decision != "safe" and answer.is_cured:
        columns = {"as it is": as_it_is, "then": answer.advised.worst}
    elif _was_tried(answer):
        columns = {"as it is": as_it_is, "tried": answer.advised.worst}
    else:
        columns = {"measured": (answer.pins.worst or as_it_is) if answer.failure is None else None}
    return {head: error for head, error in columns.items() if error is not None}


def _was_tried(answer: Answer) -> bool:
    """Whether there are pins, or a loss scale, that were not proven to make a step safe that runs."""
    return answer.failure is None and not answer.is_cured and bool(_cure(answer))


def _rows(found: PinSearch) -> Iterator[tuple[str, str, Callable[[GradientError], float]]]:
    yield "gradient error", percent(found.tolerance), _of_all
    yield "largest of one parameter", percent(TENSOR_TOLERANCE), _of_tensor
    if found.bias_tolerance < found.tolerance:
        floor = 0.0 if found.worst is None else found.worst.bias_floor
        yield "systematic part", percent(max(found.bias_tolerance, floor)), _of_bias


def _of_all(error: GradientError) -> float:
    return error.error


def _of_tensor(error: GradientError) -> float:
    return error.tensor_error


def _of_bias(error: GradientError) -> float:
    return error.bias


def percent(share: float) -> str:
    """A share in two digits."""
    if not math.isfinite(share):
        return "not finite"
    shown = 100 * share
    return f"{shown:.2g} %" if shown < 99.5 else f"{shown:.0f} %" if shown < 1e5 else "over 100000 %"


# ---------------------------------------------------------------------- what was found


def _findings(answer: Answer) -> Iterator[str]:
    if answer.failure is not None:
        raised = answer.failure.raised
        op, line = raised.op and f" in {raised.op}", f" at {raised.line}" if raised.line is not None else ""
        where = raised.module or "Code outside of modules"
        yield say("raises", where=where, op=op, line=line, error=raised.error)
    if answer.nonfinite and answer.decision == "not safe":
        yield _overflows(answer)
    if _was_tried(answer):
        yield say("tried", cure=_cure(answer))
    proof = answer.advised.proof
    if proof.steps:
        yield say("training", text=proof.text)
    elif answer.is_cured:
        yield say("no_training", text=proof.text)
    if answer.failure is None:  # else they say again what it raises
        yield from (f"{note}." for note in answer.advised.notes)


def _overflows(answer: Answer) -> Sentence:
    worst, largest = answer.nonfinite, torch.finfo(AMPConfig.from_name(answer.name).dtype).max
    bound = f" > {largest:.5g}"
    named = [f"{row.module} (|x| up to {row.largest:.2g}{bound * (row.largest > largest)})" for row in worst]
    one = "s" if len(worst) == 1 else ""
    verb = f"overflow{one}" if any(row.largest > largest for row in worst) else f"become{one} nonfinite"
    return say("overflows", count=len(worst), of=len(answer.drift), verb=verb, modules=listed(named, _NAMED))


# ---------------------------------------------------------------------- what to do


def advice_of(answer: Answer, device_type: str) -> Iterator[str]:
    """What a person does about it: lines for the YAML if that was proven, else how to find out more."""
    superfluous = answer.advised.superfluous
    if answer.decision == "safe":
        if superfluous:
            yield say("superfluous", modules=listed(superfluous))
    elif answer.is_cured:
        yield say("add")
        yield from (f"  {line}" for line in settings_of(answer))
        if answer.new_pins:
            yield _cost(answer)
    elif answer.decision == "cannot run" and not answer.new_pins:
        yield say("change_line")
    else:
        helps = answer.advised.helps or answer.advised.proof.helps
        yield say(helps, precision=answer.name, device=device_type)


def settings_of(answer: Answer) -> Iterator[str]:
    """The lines of a YAML with which the step was shown to be safe."""
    if answer.new_pins:
        yield f"fp32_modules: [{', '.join(map(_pattern, answer.fp32_modules))}]"
    if answer.at_advised is not None and answer.loss_scale is not None:
        yield f"init_scale: {_number(answer.loss_scale.advised)}"


def _number(value: float) -> str:
    """A number as a YAML takes it: all digits of a large one."""
    return f"{value:.0f}" if value == int(value) else repr(value)


def _pattern(name: str) -> str:
    """A name for `fp32_modules`, in quotes where YAML needs them."""
    if name.startswith("type:"):
        return json.dumps(name)
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(escape(name), ensure_ascii=False)


def _cost(answer: Answer) -> Sentence:
    time, memory = answer.advised.cost_time, answer.advised.cost_memory
    if time is None or memory is None:
        return say("no_cost")
    share = 100 * (time - 1)
    took = f"{share:.0f} % of the step's time" if share >= 1 else "no measurable time"
    return say("cost", time=took, memory=f"{max(0.0, 100 * (memory - 1)):.0f} %")


# ---------------------------------------------------------------------- what else is known


def _scale_lines(found: Results) -> Iterator[Sentence]:
    scale = next((answer.loss_scale for answer in found.answers if answer.loss_scale is not None), None)
    if scale is None or found.underflow is None:
        return
    octaves = found.underflow.window_octaves
    if not found.underflow.counted:
        yield say("no_scale")
        return
    window = (
        "every scale overflows, or loses more than 0.1 % of them"
        if octaves is None
        else f"the scales between underflow and overflow span {octaves:.1f} octaves"
    )
    numbers = {name: _number(value) for name, value in vars(scale).items() if name != "pins"}
    pinned = f" with {listed(scale.pins, _NAMED)} in fp32" if scale.pins else ""
    yield say("scale", pinned=pinned, lost=percent(scale.lost), met=numbers["met"], window=window)
    if found.underflow.overflows[0]:
        yield say("no_scale_fits", largest=f"{found.underflow.largest:.2g}")
    elif scale.skipped:
        yield say("scale_falls", **numbers)
    elif scale.gain > ACCEPTED_LOSS:
        yield say("scale_grows", **numbers)


def _hazard_lines(found: Results) -> Iterator[str]:
    precisions = ("", *(answer.name for answer in found.answers))
    hazards = [hazard for hazard in found.hazards if hazard.precision in precisions and hazard.grade != "note"]
    if any(answer.failure is not None for answer in found.answers):
        hazards = [hazard for hazard in hazards if hazard.kind != "raises"]  # said above
    yield from (f"{hazard.place}: {hazard.message}" for hazard in hazards[:_HAZARDS_SHOWN])
    if len(hazards) > _HAZARDS_SHOWN:
        yield say("more_hazards", count=len(hazards) - _HAZARDS_SHOWN)
