"""Combines the results of all runs: curves, times, memory, final metrics, and a verdict for each precision."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from amp_recipes.commands.compare.curves import loss_curves, metric_curves
from amp_recipes.commands.compare.outcome import PLACES, Outcome
from amp_recipes.commands.compare.plan import Metric, Plan
from amp_recipes.commands.compare.significance import ALPHA, POWER, Tested, holm, spread, worse_than
from amp_recipes.errors import ConfigError

SCHEMA_VERSION = 1
"""Version of the layout of `compare.json`."""

# What is to be the same for all runs, and where environment.json has it.
_COMPARED = {
    "torch": ("packages", "torch"),
    "amp_recipes": ("packages", "amp_recipes"),
    "git commits": ("git", "commit"),
    "CPUs": ("cpu",),
    "GPUs": ("gpus",),
}
REFERENCE, EQUAL, WORSE, NONE = "reference", "no different", "worse", "no verdict"


@dataclass(frozen=True)
class Judged:
    """The verdict on one precision. reason: the verdict's, a sentence; tested: None where nothing was tested."""

    verdict: str
    reason: str
    tested: Tested | None = None
    p: float | None = None
    detectable: float | None = None


def compared(plan: Plan, outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The comparison as `compare.json` has it, nonfinite numbers among its values.

    outcomes: of all runs of the plan. Raises ConfigError where the metric is not among what the runs logged.
    """
    place, name = find_place(plan.metric, outcomes), plan.metric.key
    outcomes = [_judgeable(outcome, place, name) for outcome in outcomes]
    of = {
        precision: [outcome for outcome in outcomes if outcome.precision == precision] for precision in plan.precisions
    }
    values = {
        precision: {outcome.seed: outcome.final(place)[name] for outcome in made if outcome.finished}
        for precision, made in of.items()
    }
    judged = judge(plan, of, values, place)
    reference = of[plan.reference]
    listed = [_of_precision(of[precision], values[precision], judged[precision], reference) for precision in of]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "script": str(plan.script),
        "yaml": str(plan.hparams_file),
        "options": list(plan.options),
        "reference": plan.reference,
        "seeds": list(plan.seeds),
        "metric": {"name": name, "place": place, "mode": plan.metric.mode},
        "eval_precision": plan.settings.get("eval_precision", "fp32"),
        "alpha": ALPHA,
        "power": POWER,
        "precisions": listed,
        "curves": {"loss": loss_curves(of), "metric": metric_curves(of, place, name)},
        "worse": _with_verdict(WORSE, judged),
        "undecided": _with_verdict(NONE, judged),
        "notes": list(_notes(plan, outcomes)),
    }


def _with_verdict(verdict: str, judged: Mapping[str, Judged]) -> list[str]:
    return [precision for precision, found in judged.items() if found.verdict == verdict]


def find_place(metric: Metric, outcomes: Iterable[Outcome]) -> str:
    """The best place in which all runs that finished have the metric: "test", "best", "valid" or "train".

    Raises ConfigError where there is none.
    """
    finished = [outcome for outcome in outcomes if outcome.finished]
    name = metric.key
    for place in _places(metric):
        if all(name in outcome.final(place) for outcome in finished):
            return place
    known = sorted({f"{place}.{found}" for place in PLACES for outcome in finished for found in outcome.final(place)})
    raise ConfigError(
        f"--metric {metric.name}: not all runs have it; expected one of {', '.join(known) or '(no metric at all)'}."
    )


def _places(metric: Metric) -> Sequence[str]:
    """Return the places to look for the metric, the best first."""
    if metric.stage:
        return (metric.stage,)
    # Without a metric to watch, the loss is that of validation: what a test has is not what was trained for.
    return PLACES if metric.chosen else ("valid", "train")


def judge(
    plan: Plan, of: Mapping[str, Sequence[Outcome]], values: Mapping[str, Mapping[int, float]], place: str
) -> dict[str, Judged]:
    """The verdict on each precision. values: the final metric of the runs that finished, by seed."""
    reference = values[plan.reference]
    found = {plan.reference: Judged(REFERENCE, "the others are compared with it")}
    held: dict[str, Tested] = {}
    for name in plan.precisions[1:]:
        tested = worse_than(reference, values[name], plan.metric.mode)
        if judged := _without_test(plan, of, name, tested):
            found[name] = judged
        elif tested is None:
            found[name] = Judged(NONE, _too_few(plan, name, len(reference), len(values[name])))
        else:
            held[name] = tested
    unit, noise = f"{place} {plan.metric.key}", spread([*reference.values()])
    for (name, tested), p in zip(held.items(), holm([tested.p for tested in held.values()]), strict=True):
        reason = _reason(plan, tested, p, len(held), unit, noise)
        verdict = WORSE if p <= ALPHA else EQUAL
        found[name] = Judged(verdict, reason, tested, p, tested.detectable(ALPHA / len(held)))
    return {name: found[name] for name in plan.precisions}


def _without_test(plan: Plan, of: Mapping[str, Sequence[Outcome]], name: str, tested: Tested | None) -> Judged | None:
    """The verdict, if it follows from runs that did not finish or that do not differ by their seeds; else None."""
    failed = [outcome for outcome in of[name] if not outcome.finished]
    failed_at_reference = sum(not outcome.finished for outcome in of[plan.reference])
    # A recipe that does not finish at the reference either is no worse for that.
    if len(failed) > failed_at_reference:
        count = f"{len(failed)} of {len(of[name])} runs did not finish"
        return Judged(WORSE, f"{count} ({failed[0].message.partition('. ')[0]})", tested)
    same = [precision for precision in (plan.reference, name) if seeds_change_nothing(of[precision])]
    if same:
        return Judged(NONE, f"all seeds give the same losses in {', '.join(same)}, so seed noise cannot be estimated")
    return None


def seeds_change_nothing(made: Sequence[Outcome]) -> bool:
    """Whether all seeds gave the same losses, bit for bit: then they are one run, and say nothing of noise."""
    curves = [outcome.losses for outcome in made if outcome.finished and any(map(math.isfinite, outcome.losses))]
    return len(curves) > 1 and len({array("d", curve).tobytes() for curve in curves}) == 1


def _judgeable(outcome: Outcome, place: str, name: str) -> Outcome:
    """The outcome, as one that did not finish where its final metric is no finite number."""
    value = outcome.final(place).get(name, math.nan)
    if not outcome.finished or math.isfinite(value):
        return outcome
    return replace(outcome, message=f"its {place} {name} is {value}")


def _reason(plan: Plan, tested: Tested, p: float, tests: int, unit: str, noise: float | None) -> str:
    """The size of the difference, and what the test says of it."""
    higher = (tested.worse_by > 0) == (plan.metric.mode == "min")
    size = f"{unit} is {abs(tested.worse_by):.2g} {'higher' if higher else 'lower'}"
    if tested.worse_by == 0:
        size = f"{unit} is the same on average"
    elif noise:
        size += f", {abs(tested.worse_by) / noise:.2g} times the spread of {plan.reference} over seeds"
    runs = f"{tested.count} seeds" if tested.pairs else f"{tested.count} runs"
    corrected = f" (Holm's correction for {tests})" if tests > 1 else ""
    found = f"p = {p:.2g}{corrected}" if tested.error else "the same difference at every seed"
    return f"{size} ({tested.name}, {runs}: {found})"


def _headline(precision: str, judged: Judged, reference: str) -> str:
    """The verdict in words: `bf16: no different from fp32 within seed noise: ...`."""
    if judged.verdict == REFERENCE:
        return f"{precision}: the reference"
    said = {EQUAL: f"no different from {reference} within seed noise", WORSE: f"worse than {reference}"}
    text = f"{precision}: {said.get(judged.verdict, judged.verdict)}: {judged.reason}."
    if judged.verdict == EQUAL and judged.detectable is not None:
        amount = f"{judged.detectable:.2g}"
        text += f" A true difference of {amount} would be found in {POWER * 100:.0f} % of such comparisons."
    return text


def _too_few(plan: Plan, name: str, reference: int, tested: int) -> str:
    """Why there is no test. reference, tested: how many runs of each finished."""
    if len(plan.seeds) == 1:
        return "seed noise cannot be estimated from 1 seed: give --seeds 3 or more"
    return (
        f"of {len(plan.seeds)} runs each, {reference} of {plan.reference} and {tested} of {name} finished; the "
        "test needs 2 of each"
    )


def _of_precision(
    made: Sequence[Outcome], values: Mapping[int, float], judged: Judged, reference: Sequence[Outcome]
) -> dict[str, Any]:
    step, of_step = (_median(outcome.step_seconds for outcome in runs) for runs in (made, reference))
    memory, of_memory = (_median(outcome.memory_bytes for outcome in runs) for runs in (made, reference))
    return {
        "precision": made[0].precision,
        "verdict": judged.verdict,
        "headline": _headline(made[0].precision, judged, reference[0].precision),
        "reason": judged.reason,
        "mean": fmean(values.values()) if values else None,
        "spread": spread([*values.values()]),
        "test": _test(judged),
        "step_seconds": step,
        "step_ratio": _ratio(step, of_step),
        "memory_bytes": memory,
        "memory_ratio": _ratio(memory, of_memory),
        "memory_of": next((outcome.memory_of for outcome in made if outcome.memory_of), None),
        "runs": [_of_run(outcome, values) for outcome in made],
    }


def _test(judged: Judged) -> dict[str, Any] | None:
    if judged.tested is None:
        return None
    return {
        "name": judged.tested.name,
        "worse_by": judged.tested.worse_by,
        "degrees_of_freedom": judged.tested.freedom,
        "p": judged.tested.p,
        "p_holm": judged.p,
        "detectable": judged.detectable,
    }


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value and reference else None


def _of_run(outcome: Outcome, values: Mapping[int, float]) -> dict[str, Any]:
    return {
        "seed": outcome.seed,
        "folder": str(outcome.folder),
        "finished": outcome.finished,
        "message": outcome.message,
        "value": values.get(outcome.seed),
        "updates": len(outcome.losses),
        "skipped": outcome.skipped,
        "step_seconds": outcome.step_seconds,
        "memory_bytes": outcome.memory_bytes,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ---------------------------------------------------------------------- notes


def _notes(plan: Plan, outcomes: Sequence[Outcome]) -> Iterable[str]:
    """Return the notes that a reader needs to judge the numbers."""
    for outcome in outcomes:
        if outcome.precision == plan.reference and not outcome.finished:
            yield f"The reference run {outcome.precision} seed {outcome.seed} did not finish: {outcome.message}"
    if len({outcome.script for outcome in outcomes}) > 1:
        yield f"{plan.script.name} changed between the runs: remove those made before, and compare again."
    for what, keys in _COMPARED.items():
        found = {repr(_entry(outcome.environment, *keys)) for outcome in outcomes if outcome.environment}
        if len(found) > 1:
            yield f"Not all runs had the same {what}: {', '.join(sorted(found))}."


def _entry(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
