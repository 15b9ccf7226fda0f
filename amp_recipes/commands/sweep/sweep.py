"""Runs a recipe once for each combination of values, one process and one folder each, and compares the results.

The grid needs nothing else; `--sweep-trials` leaves the choice of the values to Optuna. The state of a
sweep is in its folder, so the same command continues a sweep that was stopped.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amp_recipes.commands.child_runs import OUTPUT_FILE, ChildRuns, killed_by, runs_in
from amp_recipes.commands.run_records import as_number, read_object, write_object
from amp_recipes.commands.sweep.axes import (
    Axis,
    Combination,
    covering,
    describe,
    describe_value,
    folder_name,
    grid,
    read_axes,
)
from amp_recipes.commands.sweep.trials import import_optuna, open_study, run_trials
from amp_recipes.commands.tables import markdown_table
from amp_recipes.config.yaml.mistakes import join_mistakes
from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import write_atomically

SCHEMA_VERSION = 1
"""Version of the layout of `sweep.json` and `sweep_run.json`."""

RECORD_FILE = "sweep_run.json"
# A run with `debug` or `test_only` leaves its summary in a folder of its own.
_SUMMARY_FILES = ("summary.json", "debug/summary.json")
_MISTAKES_SHOWN = 10
_TAIL_LINES = 10


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as it was typed. axes: each `key=value,value` or `key=low..high`; trials: None for the whole grid."""

    axes: tuple[str, ...]
    trials: int | None = None


@dataclass(frozen=True)
class RunSettings:
    """The settings of a checked YAML that a sweep needs.

    output_folder: None if there is none; metric and mode ("min" or "max"): what makes one run better than another;
    seed: what makes a choice of trials repeatable; fingerprint: changes when the settings do, so that what ran
    under other ones is not taken for finished.
    """

    output_folder: str | None
    metric: str
    mode: str
    seed: int | None = None
    fingerprint: str = ""


@dataclass
class Result:
    """The result of one run. last: the metrics of each stage; best: the best of the tracked metric, and its epoch."""

    number: int
    folder: Path
    values: Combination
    exit_status: int
    seconds: float = 0.0
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    interrupted: bool = False

    def value(self, metric: str) -> Any:
        """The metric in the best epoch if it was watched, else after the last; None if the run has none."""
        places = (self.best or {}, self.last.get("valid", {}), self.last.get("train", {}))
        return next((values[metric] for values in places if metric in values), None)

    def score(self, metric: str) -> float | None:
        """The metric as a number; None if the run failed, or its metric is not a finite number."""
        score = as_number(self.value(metric))
        return score if self.exit_status == 0 and math.isfinite(score) else None

    def as_dict(self) -> dict[str, Any]:
        """The result as the files of the sweep have it."""
        values = {key: choice.value for key, choice in self.values.items()}
        return {**vars(self), "folder": str(self.folder), "values": values, "seconds": round(self.seconds, 3)}

    @property
    def status(self) -> str:
        """Return a few words on how the run ended; empty if it succeeded."""
        if self.interrupted:
            return "interrupted"
        failed = f"failed with exit status {self.exit_status}" if self.exit_status else ""
        return killed_by(self.exit_status) or failed


def run_sweep(
    sweep: SweepRequest,
    script: str,
    hparams_file: str,
    options: list[str],
    check: Callable[[dict[str, Any]], RunSettings],
) -> int:
    """Run `script` for every combination and print a table; the exit status that the process should end with.

    options: other words of the command line, for every run. check: raises ConfigError if the YAML is wrong with these
    values of dotted keys, and builds nothing; called for what will run before anything does.
    0: all runs ended well; 1: one did not; 128 + n: signal n ended the sweep, and the same command continues it.
    Raises ConfigError, FolderInUseError.
    """
    if "RANK" in os.environ:
        raise ConfigError("a sweep starts its runs itself, one process each: start it with python, not with torchrun.")
    axes = read_axes(sweep.axes, sweep.trials)
    optuna = None if sweep.trials is None else import_optuna()
    settings = _check_all(axes, sweep.trials, check)
    if settings.output_folder is None:
        raise ConfigError(
            "a sweep needs a folder for its runs: give --output_folder=PATH, or output_folder in the YAML."
        )
    folder = Path(settings.output_folder) / "sweep"
    with runs_in(folder) as children:
        runs = _Runs([sys.executable, script, hparams_file, *options], options, folder, settings, children)
        if optuna is None:
            _run_grid(axes, runs)
        else:
            assert sweep.trials is not None
            study = open_study(optuna, folder, settings.mode, of=[repr(axes), settings.metric, runs.under])
            run_trials(optuna, study, axes, sweep.trials, settings.seed, runs.score, lambda: runs.interrupted)
        _report(runs, [script, hparams_file, *options], sweep)
    if children.requested is not None:
        print(f"{children.requested.name}: sweep stopped; run the same command again to continue it.", flush=True)
        return 128 + children.requested
    return int(any(result.exit_status for result in runs.results.values()))


def _check_all(axes: Sequence[Axis], trials: int | None, check: Callable[[dict[str, Any]], RunSettings]) -> RunSettings:
    """The YAML's own settings, once the YAML has been checked with what will run. Raises ConfigError."""
    own = _checked(check, {})  # it may lack just what the sweep gives, as a !PLACEHOLDER does
    settings = own
    mistakes: dict[str, str] = {}
    for combination in grid(axes) if trials is None else covering(axes):
        checked = _checked(check, combination)
        if isinstance(checked, ConfigError):
            mistakes.setdefault(str(checked), f"--sweep with {describe(combination)}: {checked}")
        elif isinstance(settings, ConfigError):
            settings = checked
        if len(mistakes) == _MISTAKES_SHOWN:
            break
    if isinstance(own, ConfigError) and str(own) in mistakes:
        raise own
    if mistakes:
        raise ConfigError(join_mistakes(list(mistakes.values()), "the sweep"))
    assert isinstance(settings, RunSettings)
    return settings


def _checked(check: Callable[[dict[str, Any]], RunSettings], values: Combination) -> RunSettings | ConfigError:
    try:
        return check({key: choice.value for key, choice in values.items()})
    except ConfigError as error:
        return error


class _Runs:
    """Makes runs, one after the other, each in its folder, and keeps their results by the folder's name."""

    def __init__(
        self, command: list[str], options: list[str], folder: Path, settings: RunSettings, children: ChildRuns
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.results: dict[str, Result] = {}
        self._command = command
        self._children = children
        # A record that was made under others is not of this sweep.
        self.under = {"options": options, "fingerprint": settings.fingerprint}

    @property
    def interrupted(self) -> bool:
        """Whether no further run is to start."""
        return self._children.requested is not None

    def run(self, values: Combination, number: int, total: int) -> Result:
        """The result of the run with these values: made now, or taken from what was finished before."""
        print(f"{number}/{total}  {describe(values)} ... ", end="", flush=True)
        name = folder_name(values)
        if name in self.results:
            print(f"same values as run {self.results[name].number}", flush=True)
            return self.results[name]
        folder = self.folder / name
        record = self._record(folder)
        if record.get("exit_status") == 0:
            last, best = record.get("last") or {}, record.get("best")
            result = Result(number, folder, values, 0, record.get("seconds", 0.0), last, best)
            print(f"already finished: {self._outcome(result)}", flush=True)
        else:
            result = self._make(folder, values, number, record.get("seconds", 0.0))
        self.results[name] = result
        return result

    def score(self, values: Combination, number: int, total: int) -> float | None:
        """Return the metric of the run with these values; None if it failed, or the metric is not finite."""
        return self.run(values, number, total).score(self.settings.metric)

    def _make(self, folder: Path, values: Combination, number: int, earlier_seconds: float) -> Result:
        folder.mkdir(parents=True, exist_ok=True)
        overrides = [f"--{key}={choice.text}" for key, choice in values.items()]
        command = [*self._command, *overrides, f"--output_folder={folder}"]
        output = folder / OUTPUT_FILE
        ended = self._children.run(command, output)
        interrupted = self.interrupted and ended.status != 0
        result = Result(number, folder, values, ended.status, earlier_seconds + ended.seconds, interrupted=interrupted)
        if ended.status == 0:
            summary = _read_summary(folder)
            result.last, result.best = summary.get("last") or {}, summary.get("best")
        write_object(folder / RECORD_FILE, {"schema_version": SCHEMA_VERSION, **self.under, **result.as_dict()})
        print(self._outcome(result), flush=True)
        if ended.status != 0 and not interrupted:
            lines = ended.last_lines[-_TAIL_LINES:] or ["(nothing)"]
            print("\n".join([f"  the end of {output}:", *(f"    {line}" for line in lines)]), flush=True)
        return result

    def _outcome(self, result: Result) -> str:
        took = f"{result.seconds / 60:.1f} minutes"
        if result.status:
            return f"{result.status} after {took}"
        metric = self.settings.metric
        value = result.value(metric)
        if value is not None:
            return f"{metric} {as_number(value):.4g}, {took}"
        known = sorted(set().union(*result.last.values()))
        return f"no {metric} in its summary (which has {', '.join(known) or 'no metrics'}), {took}"

    def _record(self, folder: Path) -> dict[str, Any]:
        """Return the record of a finished run in the folder; empty if there is none, or its settings differ."""
        record = _read_json(folder / RECORD_FILE)
        return record if all(record.get(name) == value for name, value in self.under.items()) else {}


def _run_grid(axes: Sequence[Axis], runs: _Runs) -> None:
    combinations = list(grid(axes))
    for number, values in enumerate(combinations, start=1):
        if runs.interrupted:
            return
        runs.run(values, number, len(combinations))


def _report(runs: _Runs, words: list[str], sweep: SweepRequest) -> None:
    """Print the table, best run first, and write it into the sweep's folder."""
    metric, mode = runs.settings.metric, runs.settings.mode
    results = sorted(runs.results.values(), key=lambda result: _rank(result, metric, mode))
    best = results[0] if results and results[0].score(metric) is not None else None
    table = markdown_table(_rows(results, best, metric))
    better = "higher" if mode == "max" else "lower"
    stage = "validation" if any("valid" in result.last for result in results) else "training"
    ranking = f"Sorted by {metric} on the {stage} set, {better} is better; of the best epoch if the run tracked it."
    trials = [] if sweep.trials is None else ["--sweep-trials", str(sweep.trials)]
    command = shlex.join(["python", *words, "--sweep", *sweep.axes, *trials])
    page = f"# Sweep\n\n    {command}\n\n{ranking}\n\n{table}\n"
    write_atomically(runs.folder / "sweep.md", page.encode())
    listed = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "metric": metric,
        "mode": mode,
        "best": None if best is None else best.number,
        "runs": [result.as_dict() for result in results],
    }
    write_object(runs.folder / "sweep.json", listed)
    print(f"\n{table}\n\n{ranking}\nWritten to {runs.folder / 'sweep.md'} and sweep.json.", flush=True)
    if best is not None:
        print(f"The best is run {best.number}: {best.folder}", flush=True)


def _rank(result: Result, metric: str, mode: str) -> tuple[bool, float, int]:
    """Return the sort key of a result: the best first, those without a score last, in the order of their numbers."""
    score = result.score(metric)
    if score is None:
        return True, 0.0, result.number
    return False, -score if mode == "max" else score, result.number


def _rows(results: Sequence[Result], best: Result | None, metric: str) -> list[list[str]]:
    """The rows of the table: values, the watched metric, the metrics of validation (or training) and test."""
    was_validated = any("valid" in result.last for result in results)
    stages = ("valid", "test") if was_validated else ("train", "test")
    cells = [_cells(result, metric, stages) for result in results]
    titles = list(dict.fromkeys(title for row in cells for title in row))
    rows = [["run", *titles, "minutes", ""]]
    for result, row in zip(results, cells, strict=True):
        note = "best" if result is best else result.status
        shown = (row.get(title, "") for title in titles)
        rows.append([str(result.number), *shown, f"{result.seconds / 60:.1f}", note])
    return rows


def _cells(result: Result, metric: str, stages: Sequence[str]) -> dict[str, str]:
    """Return the cells of a run for the optional columns, by column title."""
    values = {key: describe_value(choice) for key, choice in result.values.items()}
    watched = {f"best {metric}": value for name, value in (result.best or {}).items() if name == metric}
    last = {f"{stage} {name}": value for stage in stages for name, value in result.last.get(stage, {}).items()}
    return values | {title: f"{as_number(value):.4g}" for title, value in (watched | last).items()}


def _read_summary(folder: Path) -> dict[str, Any]:
    """Return the last summary of the run; empty if there is none."""
    files = [folder / name for name in _SUMMARY_FILES if (folder / name).is_file()]
    return _read_json(max(files, key=lambda file: file.stat().st_mtime_ns)) if files else {}


def _read_json(file: Path) -> dict[str, Any]:
    with suppress(ConfigError):  # a file that is damaged is none
        return read_object(file)
    return {}
