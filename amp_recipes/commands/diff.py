"""Compares the files of two runs: settings, overrides, versions, git state, results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_recipes.commands.run_records import cut
from amp_recipes.commands.tables import columns
from amp_recipes.config.changes import differences, read_settings
from amp_recipes.config.experiment import ENVIRONMENT_FILE, OVERRIDES_FILE, RESOLVED_FILE
from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import read_json, refuse_irregular, refuse_link
from amp_recipes.files.strict_json import encode
from amp_recipes.loggers.summary import FILE_NAME as SUMMARY_FILE
from amp_recipes.loggers.text import format_value

# Parts of environment.json that differ between starts of the same run, or have a section of their own.
_NOT_VERSIONS = frozenset({"time", "argv", "cwd", "git", "trust"})
# Parts of summary.json that describe the run: shown where they differ.
_ABOUT_RUN = ("precision", "eval_precision", "float32_precision", "device", "fp32_modules")
# Parts of summary.json that always differ and say nothing about the results.
_MEASURED = ("seconds", "training_seconds", "samples_per_second", "peak_memory_bytes")
_LAST_OF_RESULTS = (*_ABOUT_RUN, *_MEASURED)
_NOT_RESULTS = frozenset({"schema_version", "peak_memory_of", "last", "best", *_LAST_OF_RESULTS})

_RUNS_NAMED = 5


@dataclass(frozen=True)
class Difference:
    """One thing that two runs need not have in common; None: the run has none."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class RunDiff:
    """The differences between two runs, by section, and their results side by side.

    results: of both runs, equal ones too. notes: what could not be compared, or not wholly.
    """

    run_a: Path
    run_b: Path
    sections: dict[str, list[Difference]]
    results: list[Difference]
    notes: list[str]

    @property
    def differ(self) -> bool:
        """Whether anything differs, times and memory left aside."""
        learned = (result for result in self.results if result.name not in _MEASURED)
        return any(self.sections.values()) or any(result.a != result.b for result in learned)

    def as_json(self) -> str:
        """One JSON object: `runs`, `differ`, each section as `{name: [a, b]}`, `results` likewise, and `notes`."""
        parts = {**self.sections, "results": self.results}
        pairs = {name: {row.name: [row.a, row.b] for row in found} for name, found in parts.items()}
        runs = [str(self.run_a), str(self.run_b)]
        return encode({"runs": runs, "differ": self.differ, **pairs, "notes": self.notes}, indent=2)

    def report(self) -> str:
        """The same for people: `name: a -> b`, and a table of the results with the change of each number."""
        lines = [one_line(f"a  {self.run_a}"), one_line(f"b  {self.run_b}")]
        for name, found in self.sections.items():
            if found:
                rows = (f"  {cut(row.name)}: {_shown(row.a)} -> {_shown(row.b)}" for row in found)
                lines += ["", f"{name} (a -> b)", *rows]
        if self.results:
            lines += ["", _table(self.results)]
        if same := [name for name, found in self.sections.items() if not found]:
            lines += ["", f"the same: {', '.join(same)}"]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])


def compare_runs(run_a: str | Path, run_b: str | Path) -> RunDiff:
    """Return the differences between two runs, each given by its output folder.

    All settings count, run options that are absent with their defaults; the output folder, and paths that differ only
    in it, do not. Results are those of `summary.json`, or, of a run that only tried out, of `debug/summary.json`.
    Raises ConfigError for a folder that is no run, or a file in it that cannot be read.
    """
    try:
        a, b = _Run(Path(run_a)), _Run(Path(run_b))
    except OSError as error:  # a folder that may not be entered
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}.") from error
    sections = {**_changed_settings(a, b), **_changed_environment(a, b)}
    results = [row for row in _pairs(a.results(), b.results()) if row.name not in _ABOUT_RUN or row.a != row.b]
    notes = [*a.notes, *b.notes]
    if a.about("git").get("dirty") and b.about("git").get("dirty"):
        notes.append("Both ran from a work tree with changes that were not committed; these are not compared.")
    return RunDiff(a.folder, b.folder, sections, results, notes)


def _changed_settings(a: _Run, b: _Run) -> dict[str, list[Difference]]:
    """Return the differences in settings and overrides, if both runs saved them."""
    pairs = {"settings": (a.settings, b.settings), "overrides": (a.overrides, b.overrides)}
    return {
        name: [Difference(change.name, change.was, change.now) for change in differences(old, new)]
        for name, (old, new) in pairs.items()
        if old is not None and new is not None
    }


def _changed_environment(a: _Run, b: _Run) -> dict[str, list[Difference]]:
    """Return the differences in trust, versions and git, if both runs saved them."""
    if not a.environment or not b.environment:
        return {}
    pairs = {name: _pairs(a.about(name), b.about(name)) for name in ("trust", "versions", "git")}
    return {name: [pair for pair in found if pair.a != pair.b] for name, found in pairs.items()}


class _Run:
    """The files of one run. Raises ConfigError for a folder that is no run, and for files that are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []
        summary, debug = folder / SUMMARY_FILE, folder / "debug"
        if not _stands(summary) and _stands(debug / SUMMARY_FILE):
            refuse_link(debug)
            summary = debug / SUMMARY_FILE
            self.notes.append(f"{folder}: the results are those of a short run with --debug.")
        if not any(map(_stands, (folder / RESOLVED_FILE, folder / ENVIRONMENT_FILE, summary))):
            raise ConfigError(_no_run(folder))
        resolved, overrides = folder / RESOLVED_FILE, folder / OVERRIDES_FILE
        self.settings = read_settings(resolved) if self._has(resolved, "the run saved no settings") else None
        refuse_irregular(overrides)
        given = _stands(overrides) and overrides.stat().st_size > 0
        self.overrides = read_settings(overrides) if given else None
        environment = folder / ENVIRONMENT_FILE
        self.environment = _json(environment) if self._has(environment, "the run saved no versions") else {}
        self.summary = _json(summary) if self._has(summary, "the run has not finished") else {}

    def about(self, section: str) -> dict[str, Any]:
        """The part of environment.json that is compared under this name."""
        if section in ("git", "trust"):
            part = self.environment.get(section)
            return part if isinstance(part, dict) else {} if part is None else {section: part}
        versions = {name: value for name, value in self.environment.items() if name not in _NOT_VERSIONS}
        return _flat(versions, unwrap="packages")

    def results(self) -> dict[str, Any]:
        """The numbers of summary.json by name: metrics of each stage, the best, steps, times."""
        last, best = self.summary.get("last"), self.summary.get("best")
        rest = {name: value for name, value in self.summary.items() if name not in _NOT_RESULTS}
        shown = {name: self.summary[name] for name in _LAST_OF_RESULTS if name in self.summary}
        return _flat({"last": last, "best": best, **rest, **shown}, unwrap="last")

    def _has(self, file: Path, otherwise: str) -> bool:
        there = _stands(file)
        if not there:
            self.notes.append(f"{self.folder}: no {file.name}: {otherwise}.")
        return there


def _stands(file: Path) -> bool:
    """Whether anything has that name: what is not a file is an error when it is read, and does not count as missing."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _json(file: Path) -> dict[str, Any]:
    found = read_json(file)
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found a {type(found).__name__}.")
    return found


def _no_run(folder: Path) -> str:
    """Return why a folder is not a run, and which run may be meant."""
    expected = "expected the output folder of a run"
    if not folder.exists():
        return f"{folder}: there is no such folder; {expected}."
    if not folder.is_dir():
        return f"{folder}: is a file; {expected}."
    for above in list(folder.absolute().parents)[:2]:
        if (above / ENVIRONMENT_FILE).is_file():
            return f"{folder}: belongs to the run {above}; {expected}."
    below = sorted({file.parent for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/{ENVIRONMENT_FILE}")})
    listed = one_line(", ".join(map(str, below[:_RUNS_NAMED]))) + (", ..." if len(below) > _RUNS_NAMED else "")
    hint = f" It contains the runs {listed}." if below else ""
    return f"{folder}: {expected}, but it has none of {RESOLVED_FILE}, {ENVIRONMENT_FILE}, {SUMMARY_FILE}.{hint}"


# ---------------------------------------------------------------------- values


def _flat(tree: dict[str, Any], unwrap: str, above: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names, without the name `unwrap` itself."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, "", above if name == unwrap else f"{above}{name}.")
        elif name != unwrap or value is not None:
            flat[f"{above}{name}"] = value
    return flat


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    return [Difference(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]


def _shown(value: Any) -> str:
    """A value in one line."""
    if value is None:
        return "(absent)"
    if isinstance(value, list):
        value = ", ".join(map(str, value)) or "none"
    return cut(str(value).lower() if isinstance(value, bool) else str(value))


def _table(results: list[Difference]) -> str:
    """Aligned columns: name, both values, and the second less the first where both are numbers and differ."""
    rows = [(f"  {cut(row.name)}", _number(row.a), _number(row.b), _change(row)) for row in results]
    return "\n".join(map(str.rstrip, columns([("results", "a", "b", "b - a"), *rows]).splitlines()))


def _number(value: Any) -> str:
    return cut(format_value(value)) if isinstance(value, int | float) else "-" if value is None else _shown(value)


def _change(result: Difference) -> str:
    a, b = result.a, result.b
    if a == b or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b)):
        return ""
    try:
        return ("+" if b > a else "") + cut(format_value(b - a))
    except (OverflowError, ValueError):  # whole numbers of thousands of digits
        return ""
