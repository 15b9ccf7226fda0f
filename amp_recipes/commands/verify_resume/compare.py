"""Decides whether two runs are equal bit for bit, and finds the first difference, from the files of the probe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amp_recipes.loggers.jsonl import parsed

# Before an update, in this order: what comes first is the cause of what comes after it.
SECTIONS = ("data", "random", "modules", "optimizers", "schedulers", "scaler", "ema")
UNSEEDED_SUFFIX = ".unseeded"  # of the file beside a trace that lists where generators were seeded from entropy
GENERATOR = "generator"  # how the text of a random generator begins among the remembered values
TRAIN_SET = "train_set"  # how the place of what the training set holds begins
_NOTHING = "(nothing)"


@dataclass(frozen=True)
class Window:
    """The moment before one update, and its losses; or, as the last of a run, the moment after them all.

    update: its number, from 1, counted in windows (the batches whose gradients are added up): one in which two
    optimizers step, as of a GAN, or none, counts as one. step: its first batch in the epoch; batches: how many;
    sections: name of a section -> path -> digest; losses: of its batches, as float.hex; sizes: section -> tensors,
    bytes.
    """

    update: int
    epoch: int | None
    step: int
    batches: int
    sections: Mapping[str, Mapping[str, str]]
    losses: tuple[str, ...] = ()
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    remembered: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()

    @property
    def place(self) -> str:
        """Return the place in the run as text."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch}, "
        return f"{epoch}batch {self.step}"


@dataclass(frozen=True)
class Trace:
    """The updates of a run; end: the state after the last update, None if it did not get there.

    unseeded: the places in its code that seed a generator from the machine's entropy.
    """

    windows: Sequence[Window]
    end: Window | None = None
    unseeded: Sequence[str] = ()


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ.

    section: one of SECTIONS, "place", "loss" or "length"; names: what differs in it; equal: how many there
    do not; one, other: the two values, where they say something; index: of the window; also: sections that differ in
    the same window.
    """

    section: str
    names: Sequence[str]
    update: int
    place: str
    index: int = 0
    equal: int = 0
    one: str = ""
    other: str = ""
    also: Sequence[str] = ()


def read_trace(path: Path) -> Trace:
    """The trace at `path`; a last line that the kill cut off is left out."""
    windows: list[Window] = []
    end = None
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        record = parsed(line)
        if record is None:
            break
        kind = record.pop("kind")
        if kind == "loss":
            windows[-1] = replace(windows[-1], losses=tuple(record["losses"]))
        elif kind == "window":
            windows.append(Window(**record))
        else:
            end = Window(**record)
    notes = Path(str(path) + UNSEEDED_SUFFIX)
    unseeded = sorted(set(notes.read_text(encoding="utf-8").splitlines())) if notes.is_file() else []
    return Trace(windows, end, unseeded)


def spliced(killed: Trace, resumed: Trace) -> tuple[Trace, int]:
    """The run of both processes as one, and the index of the first window after the resume."""
    first = resumed.windows[0].update if resumed.windows else resumed.end.update if resumed.end else 0
    before = [window for window in killed.windows if window.update < first]
    unseeded = sorted({*killed.unseeded, *resumed.unseeded})
    return Trace([*before, *resumed.windows], resumed.end, unseeded), len(before)


def first_difference(one: Trace, other: Trace, both_ended: bool = True) -> Difference | None:
    """Return the first difference between two runs; None if they are equal bit for bit.

    both_ended: False where `other` was killed on purpose: what it did not get to is not compared.
    """
    for index, (left, right) in enumerate(zip(one.windows, other.windows, strict=False)):
        found = _compare(left, right, index)
        if found is not None:
            return found
    if not both_ended:
        return None
    if len(one.windows) != len(other.windows):
        shorter = min(len(one.windows), len(other.windows))
        next_one = max(one.windows, other.windows, key=len)[shorter]
        counts = [f"{len(trace.windows)} updates" for trace in (one, other)]
        return Difference(
            "length", ["updates"], next_one.update, next_one.place, shorter, one=counts[0], other=counts[1]
        )
    if one.end is not None and other.end is not None:
        return _compare(one.end, other.end, len(one.windows))
    return None


def _compare(left: Window, right: Window, index: int) -> Difference | None:
    at = {"update": left.update, "place": left.place, "index": index}
    if (left.update, left.place, left.batches) != (right.update, right.place, right.batches):
        texts = [f"update {window.update}: {window.place}, {window.batches} batches" for window in (left, right)]
        return Difference("place", ["place"], **at, one=texts[0], other=texts[1])
    found = ((name, _differing(left.sections.get(name, {}), right.sections.get(name, {}))) for name in SECTIONS)
    if differing := {name: paths for name, paths in found if paths}:
        return _of_sections(left, right, differing, at)
    if left.losses != right.losses:
        return Difference("loss", ["loss"], **at, one=_shown(left.losses), other=_shown(right.losses))
    return None


def _shown(losses: Sequence[str]) -> str:
    return ", ".join(repr(float.fromhex(loss)) for loss in losses) or _NOTHING


def _of_sections(left: Window, right: Window, differing: Mapping[str, list[str]], at: Mapping[str, Any]) -> Difference:
    """The difference of the first section, which names the others."""
    (section, names), *others = differing.items()
    ours, theirs = left.sections.get(section, {}), right.sections.get(section, {})
    equal = len({*ours, *theirs}) - len(names)
    only = [_NOTHING if names[0] not in side else "" for side in (ours, theirs)]
    return Difference(section, names, **at, equal=equal, one=only[0], other=only[1], also=[name for name, _ in others])


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys under which the two differ, in their order."""
    return [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]


def not_restored(one: Trace, again: Trace, resumed: Trace, resumed_at: int, until: int) -> dict[str, tuple[str, str]]:
    """Return what the recipe remembers that is equal in both uninterrupted runs, but differs after the resume.

    until: index of the last window to look at. Returns its place -> its text in `one` and in `resumed`, at the
    first window where they differ.
    """
    found: dict[str, tuple[str, str]] = {}
    for index in range(resumed_at, until + 1):
        left, same, right = (_at(trace, index) for trace in (one, again, resumed))
        for name in _differing(left, right):
            if left.get(name) == same.get(name) and name not in found:
                found[name] = (left.get(name, _NOTHING), right.get(name, _NOTHING))
    return found


def unequal_generators(one: Trace, other: Trace, index: int) -> list[str]:
    """Return the places of random generators whose states differ before the window at `index`."""
    left, right = _at(one, index), _at(other, index)
    return [name for name in _differing(left, right) if left.get(name, "").startswith(GENERATOR)]


def _at(trace: Trace, index: int) -> Mapping[str, str]:
    if index < len(trace.windows):
        return trace.windows[index].remembered
    return trace.end.remembered if trace.end is not None else {}


def read_stages(file: Path) -> dict[str, Any]:
    """`valid accuracy of epoch 2` -> its value, from the stages in a `metrics.jsonl`; of two records the later."""
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        record = json.loads(line)
        if record.get("kind") == "stage":
            found[record["stage"], record["epoch"]] = {"loss": record["loss"], **record["metrics"]}
    return {
        f"{stage} {name}" + ("" if epoch is None else f" of epoch {epoch}"): value
        for (stage, epoch), metrics in found.items()
        for name, value in metrics.items()
    }


def differing_metrics(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The metrics that are not equal, with both values. NaN is a text in these files, and equal to itself."""
    return {name: (one.get(name), other.get(name)) for name in _differing(one, other)}


def totals(windows: Iterable[Window]) -> dict[str, tuple[int, int, int]]:
    """Per section: entries, tensors and bytes that were compared, over all windows."""
    sums = {name: [0, 0, 0] for name in SECTIONS}
    for window in windows:
        for name, section in window.sections.items():
            tensors, size = window.sizes.get(name, (0, 0))
            for position, count in enumerate((len(section), tensors, size)):
                sums[name][position] += count
    return {name: tuple(counts) for name, counts in sums.items()}
