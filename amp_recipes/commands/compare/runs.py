"""Makes the runs of a comparison, one process and one folder each, and remembers how each of them ended."""

from __future__ import annotations

import hashlib
import itertools
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_recipes.commands.child_runs import OUTPUT_FILE, ChildRuns, EndedChild, killed_by
from amp_recipes.commands.compare.plan import Plan, PlannedRun, setting_differences
from amp_recipes.commands.run_records import as_number, cut, read_object, write_object
from amp_recipes.errors import ConfigError
from amp_recipes.interrupts import SIGNALS
from amp_recipes.loggers.text import format_seconds

RECORD_FILE = "compare_run.json"
SCHEMA_VERSION = 1
"""Version of the layout of `compare_run.json`."""

_MESSAGE_CHARACTERS = 300
_CHANGES_SHOWN = 5
# The last line of a traceback, or of an exception that is shown without one.
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Interrupted))(?::\s*(.*))?")
_ASKED_TO_END = {status for signum in SIGNALS for status in (-signum, 128 + signum)}


class CannotCompare(Exception):
    """Raised if there is nothing to compare, or not yet; the message says why."""


@dataclass(frozen=True)
class Ended:
    """The end of a run.

    message: why it did not finish; empty if it did. diverged: it ended because its losses or gradients stayed
    nonfinite, which is a result, and not tried again.
    """

    run: PlannedRun
    message: str = ""
    diverged: bool = False
    seconds: float = 0.0
    script: str = field(default="", repr=False)

    @property
    def is_result(self) -> bool:
        """Whether the same command would end so again, and so need not run again."""
        return not self.message or self.diverged


@dataclass(frozen=True)
class _Earlier:
    """The record of a run from an earlier call. changes: of its settings since; ended: None if it did not."""

    changes: Sequence[str] = ()
    ended: Ended | None = None

    @property
    def is_there(self) -> bool:
        """Whether the run need not be made."""
        return self.ended is not None and self.ended.is_result


class Runs:
    """Makes the runs of a plan that are not there yet. say: called with each line for the user."""

    def __init__(self, plan: Plan, children: ChildRuns, say: Callable[[str], None]) -> None:
        self.plan = plan
        self._children = children
        self._say = say
        self._script = hashlib.sha256(plan.script.read_bytes()).hexdigest()
        self._seconds: dict[str, list[float]] = {}  # of runs that finished, by precision
        self._shown = max(len(str(run)) for run in plan.runs)

    def make_all(self) -> Iterator[Ended]:
        """Make each run in the plan's order; those that ended before are not run again.

        Gives each that ended, before the next begins. Ends early if a signal asks for it.
        Raises ConfigError if a folder holds a run with other settings, CannotCompare if the very first run fails.
        """
        before = {run: self._earlier(run) for run in self.plan.runs}
        _refuse_others(self.plan, before)
        for count, run in enumerate(self.plan.runs, start=1):
            if self._children.requested is not None:
                break
            is_there = before[run].is_there
            ended = before[run].ended if is_there else self._make(run, before[run])
            if ended is None:
                break
            if count == 1 and not ended.is_result:
                raise CannotCompare(
                    f"The reference run ({run}) did not finish: {ended.message}\nIts output is in "
                    f"{run.folder / OUTPUT_FILE}."
                )
            if not ended.message:
                self._seconds.setdefault(run.precision, []).append(ended.seconds)
            outcome = f"{_outcome(ended)}{', in an earlier call' if is_there else ''}{self._left(count, before)}"
            self._say(f"{f'{count}/{len(self.plan.runs)}':>7}  {run!s:<{self._shown}}  {outcome}")
            yield ended

    def _make(self, run: PlannedRun, before: _Earlier) -> Ended | None:
        """Run it to its end; None if this process was asked to end meanwhile. Raises CannotCompare."""
        if before.changes:
            _set_aside(run.folder, self._say)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._note(run, {"ended": False})
        command = [
            *(sys.executable, str(self.plan.script), str(self.plan.hparams_file)),
            *self.plan.options,
            *(f"--precision={run.precision}", f"--seed={run.seed}", f"--output_folder={run.folder}"),
            "--noprogressbar=true",
        ]
        child = self._children.run(command, run.folder / OUTPUT_FILE)
        if child.status != 0 and self._children.requested is not None:
            return None
        if child.status in _ASKED_TO_END:
            raise CannotCompare(f"{run} was stopped by a signal; run the same command again to continue it.")
        kind, message = ("", "") if child.status == 0 else why_it_failed(child)
        ended = Ended(run, message, kind == "NonfiniteError", child.seconds, self._script)
        state = {"message": message, "diverged": ended.diverged, "seconds": round(child.seconds, 3)}
        self._note(run, {"ended": True, **state})
        return ended

    def _note(self, run: PlannedRun, state: dict[str, Any]) -> None:
        record = {
            "schema_version": SCHEMA_VERSION,
            "precision": run.precision,
            "seed": run.seed,
            "settings": run.settings,
            "script": self._script,
            **state,
        }
        write_object(run.folder / RECORD_FILE, record)

    def _earlier(self, run: PlannedRun) -> _Earlier:
        if not (run.folder / RECORD_FILE).exists():
            return _Earlier()
        record = read_object(run.folder / RECORD_FILE)
        if record.get("schema_version") != SCHEMA_VERSION:
            return _Earlier([f"{RECORD_FILE} was written by another version"])
        changes = setting_differences(record.get("settings") or {}, run.settings)
        if not record.get("ended"):
            return _Earlier(changes)
        message, script = (str(record.get(name) or "") for name in ("message", "script"))
        seconds = as_number(record.get("seconds") or 0.0)
        return _Earlier(changes, Ended(run, message, bool(record.get("diverged")), seconds, script))

    def _left(self, done: int, before: dict[PlannedRun, _Earlier]) -> str:
        """About how long the other runs will take, from those that finished."""
        left = [run for run in self.plan.runs[done:] if not before[run].is_there]
        known = [sum(times) / len(times) for run in left if (times := self._seconds.get(run.precision))]
        unknown = sorted({run.precision for run in left} - self._seconds.keys(), key=self.plan.precisions.index)
        if not left:
            return ""
        parts = [f"about {format_seconds(sum(known))} left"] if known else []
        parts += [f"{' and '.join(unknown)} not measured yet"] if unknown else []
        return f"; {', '.join(parts)}"


def why_it_failed(child: EndedChild) -> tuple[str, str]:
    """Return the kind of the exception that ended a process, and one line on it."""
    if killed := killed_by(child.status):
        hint = " (the machine may have run out of memory)" if child.status == -signal.SIGKILL else ""
        return "", f"{killed}{hint}"
    lines = child.last_lines
    for found in filter(None, map(_EXCEPTION.fullmatch, reversed(lines))):
        kind, text = found.groups()
        return kind, cut(f"{kind}: {text}" if text else kind, _MESSAGE_CHARACTERS)
    last = f": {lines[-1].strip()}" if lines else ""
    return "", cut(f"exit status {child.status}{last}", _MESSAGE_CHARACTERS)


def _refuse_others(plan: Plan, before: dict[PlannedRun, _Earlier]) -> None:
    """Raise ConfigError if a folder holds a finished run with other settings: it is not mixed with or overwritten."""
    others = [found.changes for found in before.values() if found.changes and found.is_there]
    if not others:
        return
    lines = list(dict.fromkeys(itertools.chain(*others)))
    shown = "\n  ".join(lines[:_CHANGES_SHOWN]) + ("\n  ..." if len(lines) > _CHANGES_SHOWN else "")
    raise ConfigError(
        f"{plan.folder} holds {len(others)} finished runs with other settings (saved -> now):\n  {shown}\n"
        "Give another folder with --to, or delete that folder to compare again."
    )


def _set_aside(folder: Path, say: Callable[[str], None]) -> None:
    """Give an unfinished run of other settings another name."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside_{number}")).exists():
        number += 1
    folder.rename(aside)
    say(f"{folder}: an unfinished run with other settings was renamed to {aside.name}.")


def _outcome(ended: Ended) -> str:
    took = format_seconds(ended.seconds)
    return f"did not finish: {ended.message} ({took})" if ended.message else f"finished in {took}"
