"""Explains why two runs differ, as far as the first difference shows, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from amp_recipes.commands.verify_resume.compare import TRAIN_SET, Difference
from amp_recipes.loop.resume import RESUMING_INSIDE

_MAX_NAMES = 5
KINDS = {
    "place": "place in the data",
    "data": "batches' contents",
    "random": "global random generators",
    "modules": "modules' tensors",
    "optimizers": "optimizers' state",
    "schedulers": "schedulers' state",
    "scaler": "loss scaler's state",
    "ema": "averaged weights (ema_decay)",
    "loss": "loss",
    "length": "number of updates",
}
SAVED = ("modules", "optimizers", "schedulers", "scaler", "ema")
"""The sections that a checkpoint holds."""
_REPLAY = re.compile(re.escape(RESUMING_INSIDE) + "(.+)")
_NO_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def describe(difference: Difference) -> list[str]:
    """Return the first difference as lines of text."""
    at = "at" if difference.section == "loss" else "before"
    lines = [f"First difference: the {KINDS[difference.section]}, {at} update {difference.update} ({difference.place})"]
    if difference.section not in ("place", "loss", "length"):
        names = ", ".join(_first_few(difference.names, "and {} more"))
        lines.append(f"  {names}" + (f"; {difference.equal} more are equal" if difference.equal else ""))
    if difference.one or difference.other:
        lines.append(f"  {difference.one or '(something)'} | {difference.other or '(something)'}")
    if difference.also:
        lines.append(f"  at the same point also: {', '.join(f'the {KINDS[name]}' for name in difference.also)}")
    return lines


def why_not_reproducible(difference: Difference, unseeded: Sequence[str]) -> list[str]:
    """Why two runs differ that were started alike and not interrupted; unseeded: generators that may be why."""
    found = [f"  {place}" for place in unseeded]
    if difference.section == "data":
        return _why_data_differ("random" in difference.also, found)
    return [_why_runs_differ(difference), *found]


def _why_runs_differ(difference: Difference) -> str:
    if difference.section in ("place", "length"):
        return (
            "The two runs made different batches: the number of samples, or the lengths that a sampler reads, "
            "change from start to start (a file listing that is not sorted, or a split without a seed)."
        )
    if difference.section == "random":
        return (
            "Something seeds the global generators from the clock or the machine, or draws from them more often in one "
            "run than in the other."
        )
    if difference.index == 0 and difference.section != "loss":
        return (
            "The runs start with different values: something is initialized before the seed is set, or from a "
            "generator without a seed."
        )
    return (
        "The data and the generators are equal, so the computation differs: an operation whose result changes from run "
        "to run (sums in parallel, in any order), or a value from outside (time, the order of a set)."
    )


def _why_data_differ(generators_too: bool, found: list[str]) -> list[str]:
    if found:
        return ["The dataset draws from a generator that has no seed:", *found, _DRAW_PER_SAMPLE]
    if generators_too:
        return [
            "The data are drawn from the global generators, which differ too.",
            "Something seeds them from the clock or the machine (random.seed(), numpy.random.seed(), torch.seed()), or "
            "they are used before `load_hparams` seeds them.",
        ]
    return [
        "The dataset or its loader is not a function of the seed. Look for a generator of its own without a seed "
        "(numpy.random.default_rng(), random.Random(), torch.Generator().seed()), for time or os.urandom, for the "
        "order of a set or of hash() (it changes from start to start unless PYTHONHASHSEED is set), for a file "
        "listing that is not sorted, and for a loader with an order of its own."
    ]


# A seed alone would not do: with workers each has a copy of the generator, whose place no checkpoint holds.
_DRAW_PER_SAMPLE = (
    "In a dataset draw from the global generators (`random`, `numpy.random`, torch), which the framework seeds per "
    "sample, from (seed, epoch, index), or make a generator per sample: `np.random.default_rng([seed, index])`."
)


def what_determinism_says(returncode: int, stderr: str, equal: bool | None) -> list[str]:
    """Return what a run with `--deterministic true` shows about the operation. equal: whether two such runs were."""
    operations = list(dict.fromkeys(_NO_DETERMINISTIC.findall(stderr)))
    if returncode and operations:
        return [f"With --deterministic true, torch names the operation: {', '.join(operations)}."]
    if returncode and _CUBLAS in stderr:
        return [f"With --deterministic true, torch asks for the environment variable {_CUBLAS}=:4096:8."]
    if returncode:
        return ["With --deterministic true the run fails:", *(f"  {line}" for line in stderr.splitlines()[-3:])]
    if equal:
        return ["With --deterministic true two runs are equal bit for bit: set `deterministic: true` in the YAML."]
    return ["They differ with --deterministic true too, so the cause is not an operation that torch knows."]


def why_not_resumed(
    difference: Difference, first_resumed: bool, suspects: Mapping[str, tuple[str, str]], log: str
) -> list[str]:
    """Why a resumed run differs from one that was not interrupted.

    first_resumed: whether the difference is the first after the resume; suspects: what the recipe remembers that was
    not restored; log: what the resumed run wrote to stderr.
    """
    if difference.section == "place":
        return ["The resumed run did not continue at the batch where the checkpoint was saved."]
    if difference.section == "data" and (replay := _REPLAY.search(log)):
        return [f"The loader cannot restore its position: {replay[1]}"]
    if first_resumed and difference.section in SAVED:
        return [_why_not_as_saved(difference)]
    return [_why_it_went_another_way(difference.section, first_resumed, bool(suspects)), *_kept_outside(suspects)]


def _why_not_as_saved(difference: Difference) -> str:
    if any("persistent=False" in name for name in difference.names):
        return (
            "A buffer with persistent=False is in no state_dict, so no checkpoint holds it: make it persistent, if "
            "training changes it."
        )
    return (
        f"The {KINDS[difference.section]} are not what was saved: the recipe's own checkpointer does not hold them, or "
        "the recipe changes them after the resume (in on_fit_start, say)."
    )


def _why_it_went_another_way(section: str, first_resumed: bool, remembers: bool) -> str:
    if section == "data":
        return (
            "The loader did not continue with the batch after the checkpoint, or the dataset draws or counts in a way "
            "that a new process does not repeat."
        )
    if section == "random" and first_resumed:
        return "Their state is not the saved one: something draws from them, or seeds them, after the resume."
    if section == "random":
        return "The resumed run draws more or fewer random numbers: this depends on something that was not restored."
    if remembers:
        return "Everything else that affects the update was equal; only what the recipe remembers differs."
    return (
        "Everything that this check can see was equal before the update. The recipe keeps something where neither a "
        "checkpoint nor this check can see it: in a file, in an object of a library, in a generator's frame."
    )


def why_metrics_differ(metrics: Mapping[str, tuple[Any, Any]], suspects: Mapping[str, tuple[str, str]]) -> list[str]:
    """Explain metrics that differ after a resume although every update was equal."""
    return [
        "First difference: the metrics (without interruption | resumed)",
        *(f"  {name}: {one} | {other}" for name, (one, other) in metrics.items()),
        "Every update was equal, so it is a counter that the recipe keeps where the checkpoint does not hold it.",
        *_kept_outside(suspects),
    ]


def _kept_outside(suspects: Mapping[str, tuple[str, str]]) -> list[str]:
    if not suspects:
        return []
    of_data = [name for name in suspects if name.startswith(f"{TRAIN_SET}.")]
    advice = []
    if of_data:
        advice.append(
            "What a dataset remembers is in no checkpoint (with workers each has a copy of it): make each sample a "
            f"function of its index. {_DRAW_PER_SAMPLE}"
        )
    if len(of_data) < len(suspects):
        advice.append(
            "Keep it as an attribute of the Brain, which checkpoints hold, or in an object with state_dict and "
            "load_state_dict in hparams; in modules, as a buffer."
        )
    return ["Not restored by the resume (without interruption | resumed):", *suspect_lines(suspects), *advice]


def suspect_lines(suspects: Mapping[str, tuple[str, str]]) -> list[str]:
    """Each value with its two texts."""
    return _first_few([f"  {name}: {one} | {other}" for name, (one, other) in suspects.items()], "  and {} more")


def _first_few(items: Sequence[str], more: str) -> list[str]:
    """The first items, and how many more there are."""
    left = len(items) - _MAX_NAMES
    return [*items[:_MAX_NAMES], *([more.format(left)] if left > 0 else [])]
