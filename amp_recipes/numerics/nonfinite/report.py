"""Writes the report of a nonfinite step, and the folder for its replay."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_recipes.checkpoint.folder import (
    STATE_SUFFIX,
    Contents,
    Damaged,
    make_folder,
    meta_as_json,
    read_contents,
    verify,
    verify_all,
)
from amp_recipes.checkpoint.saving import write_folder
from amp_recipes.checkpoint.state_format import pack_state, read_state
from amp_recipes.data import to_device
from amp_recipes.errors import CheckpointError, listed
from amp_recipes.files.run_files import refuse_link, write_atomically
from amp_recipes.files.strict_json import as_it_is_read, encode_findings
from amp_recipes.numerics.nonfinite import command as commands
from amp_recipes.numerics.nonfinite.plain_batches import PlainBatches
from amp_recipes.numerics.nonfinite.values import TensorRange
from amp_recipes.numerics.trial import Trial
from amp_recipes.numerics.watch.observe import dtype_name
from amp_recipes.precision import pinned_modules

_VERSION = 1
_STATES = ("window", "random", "parameters", "buffers")
_HERE = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
MOST_BYTES = 1 << 30  # of a replay folder: weights, buffers and batches
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PRIVATE = 0o600  # batches may be of persons
_TEMPORARY = ".tmp-nonfinite-"

CAUSE, PROBABLY = "Cause: ", "Probably: "  # how the last part of what was found begins

Cause = Literal["scale", "precision", "model", "data", "not replayable"]


@dataclass
class NonfiniteReport:
    """Where the first nonfinite value of a step appeared, and why.

    cause: "scale" (finite at scale 1: benign), "precision" (finite in float32), "model" (nonfinite in float32 too, or
    a parameter or buffer was nonfinite before the step), "data" (the batch holds what is nonfinite), "not replayable"
    (the replay was finite, or the cause could not be tried). found: what the replays showed, in words, with what to do;
    caveats: whole sentences on what was not as in the step, which the caller appends before the report is written;
    message: both, where with caveats no cause is certain any more.
    precision, scale: of the step. module, op, phase, dtype: of the birth (or of the first to read `external`, a
    parameter, buffer or part of the batch that was nonfinite); None where it is not known. samples: indices into the
    batch that did it; pairs [batch, sample] if the window has several batches; empty where none are known to.
    dataset_indices, sample_files: of these samples, where they are known.
    range: of the op's inputs; made: of its nonfinite outputs. function: the user's autograd.Function; node: autograd's.
    line: file and line of the user's code. target: what it made nonfinite; chain: modules on the way there.
    drawn: generators from which the step drew and that no replay can set back; put_back: those that were, but that the
    folder does not hold. Torch's global ones are in neither.
    replays, seconds: runs that were taken, and their time; ratio: of the watched one to one that was not, at the same
    precision where there was one. Set by the caller: step, where; stage: "train", "valid" or "test"; rank: of the
    process that it happened in, of several; files: the name of its files, if it is not after the step;
    pinned: whether the run pinned the module to go on.
    """

    cause: Cause
    found: str
    precision: torch.dtype
    scale: float
    module: str | None = None
    op: str | None = None
    phase: str | None = None
    dtype: str | None = None
    samples: list[Any] = field(default_factory=list)
    dataset_indices: list[int | str | None] = field(default_factory=list)
    sample_files: list[str | None] = field(default_factory=list)
    range: list[TensorRange] = field(default_factory=list)
    made: list[TensorRange] = field(default_factory=list)
    external: str | None = None
    function: str | None = None
    node: str | None = None
    line: str | None = None
    target: str | None = None
    chain: list[str] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    replays: int = 0
    seconds: float = 0.0
    ratio: float | None = None
    step: int | None = None
    where: str | None = None
    stage: str = "train"
    rank: int | None = None
    files: str | None = None
    pinned: bool = False

    @property
    def message(self) -> str:
        """All of it in words: what was found, the caveats, and the cause, as certain as it is."""
        if not self.caveats:
            return self.found
        before, marked, cause = self.found.rpartition(CAUSE) if self.cause != "not replayable" else (self.found, "", "")
        return " ".join([before.rstrip(), *self.caveats, *([PROBABLY + cause] if marked else [])])

    @property
    def name(self) -> str:
        """What its files are called: `nonfinite-17`."""
        return self.files or ("nonfinite" if self.step is None else f"nonfinite-{self.step}")

    def as_dict(self) -> dict[str, Any]:
        """Return the report for strict JSON: names for dtypes, and "nan", "inf" and "-inf" for such numbers."""
        found = {name: value for name, value in vars(self).items() if name != "found"}
        found |= {"precision": dtype_name(self.precision), "message": self.message}
        for key in ("range", "made"):
            found[key] = [{k: v for k, v in asdict(described).items() if k != "kind"} for described in found[key]]
        first = ("step", "module", "op", "phase", "dtype", "cause", "samples", "range", "message", "caveats")
        return as_it_is_read({key: found[key] for key in (*first, *(name for name in found if name not in first))})


def write_report(
    folder: Path,
    report: NonfiniteReport,
    trial: Trial,
    window: Sequence[Any],
    random: Sequence[torch.Tensor],
    command: Mapping[str, Any] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Path:
    """Write `nonfinite-<step>.json`, and beside it the folder `nonfinite-<step>` from which the step can be replayed.

    trial, window: as given to `locate`, the weights and buffers as they still are; random: the states of torch's
    generators before the step (`torch_random_state`); command: how the run was started ("script", "module", "words",
    "cwd"), of which words that look like secrets are not kept; most_bytes: that the folder may have.
    Both replace what an earlier process wrote for this step, and only the user may read them. Returns the folder; or
    the JSON file, which then says why there is no folder (too large, disk full).
    Raises OSError if not even the JSON can be written, ConfigError if a link stands in the folder's place.
    """
    make_folder(folder)
    target, file = folder / report.name, folder / f"{report.name}.json"
    refuse_link(target)
    for left in folder.glob(f"{_TEMPORARY}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    # No other user can open its folder while the files get their modes.
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder, ignore_cleanup_errors=True) as private:
        if target.exists():
            os.rename(target, Path(private) / "replaced")
            shutil.rmtree(Path(private) / "replaced", ignore_errors=True)  # makes room for the new one
        try:
            contents, meta = _to_keep(report, trial, window, random, command)
            refused = _write_replay(Path(private), target, contents, meta, most_bytes)
        except (OSError, CheckpointError) as error:
            refused = str(error)
        except Exception as error:  # whatever a batch holds: what was found out is written all the same
            refused = f"{type(error).__name__}: {error}"
        content = report.as_dict() | {"replay": None if refused else target.name, "no_replay": refused}
        _put(Path(private), file, encode_findings(content))
    return file if refused else target


def _put(private: Path, file: Path, content: bytes) -> None:
    written = private / file.name
    write_atomically(written, content)
    written.chmod(_PRIVATE)
    os.replace(written, file)


def _write_replay(
    private: Path, target: Path, contents: dict[str, Any], meta: dict[str, Any], most_bytes: int
) -> str | None:
    """Write the folder; says so where it would be too large."""
    states = {name: pack_state(contents[name], f"{name} of the replay") for name in _STATES}
    size = sum(state.tensor_bytes for state in states.values())
    if size > most_bytes:
        return (
            f"weights, buffers and batches take {size / 1e9:.1f} GB, but a replay folder may take at most "
            f"{most_bytes / 1e9:.1f} GB (most_bytes)"
        )
    written = private / target.name
    write_folder(written, states, meta_as_json(_VERSION, _STATES, meta))
    for file in written.iterdir():
        file.chmod(_PRIVATE)
    os.rename(written, target)
    return None


def _to_keep(
    report: NonfiniteReport,
    trial: Trial,
    window: Sequence[Any],
    random: Sequence[torch.Tensor],
    command: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of the folder's files, and its `meta.json`."""
    batches, device = PlainBatches.of(list(window)), trial.device.type
    contents = {
        "window": {"values": batches.values, "forms": batches.forms},
        "random": list(random),
        "parameters": dict(trial.modules.named_parameters()),
        "buffers": dict(trial.modules.named_buffers()),
    }
    meta = {
        "report": report.as_dict(),
        "precision": dtype_name(report.precision),
        "scale": report.scale,
        "pins": pinned_modules(trial.modules),
        "left_out": batches.left_out,
        "command": None if command is None else commands.saved(command),
        "versions": {**_HERE, "device": device if device != "cuda" else torch.cuda.get_device_name(trial.device)},
    }
    return contents, meta


@dataclass
class Replay:
    """A nonfinite step as saved in a folder.

    window: its batches; random: the states of torch's generators before it; parameters, buffers: by name;
    dtype, scale, pins, command, versions, report: as they were written; changed: files of the command that are not
    what they were.
    """

    folder: Path
    window: list[Any]
    random: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    dtype: torch.dtype
    scale: float
    pins: list[str]
    command: dict[str, Any] | None
    versions: dict[str, str]
    report: dict[str, Any]
    changed: list[str]

    @torch.no_grad()
    def load_into(self, modules: nn.Module) -> None:
        """Give `modules` the weights and buffers of the step.

        Raises CheckpointError, and changes nothing, if they have others.
        """
        parameters, buffers = dict(modules.named_parameters()), dict(modules.named_buffers())
        problems = [*_misfits("parameter", parameters, self.parameters), *_misfits("buffer", buffers, self.buffers)]
        if problems:
            raise CheckpointError(
                f"{self.folder}: this is not the model of the saved step: {listed(problems)}. Use the script and the "
                "YAML of that run."
            )
        for name, parameter in parameters.items():
            parameter.data.copy_(self.parameters[name])
        for name, buffer in buffers.items():
            if buffer.shape == self.buffers[name].shape:
                buffer.data.copy_(self.buffers[name])
            else:  # a cache that grows
                buffer.data = self.buffers[name].to(buffer.device)

    def compared_with(self, report: NonfiniteReport, words: Sequence[str] | None = None) -> str:
        """Describe the new result, and compare it with the saved report.

        words: of the command line of this replay; None: it was not started by one.
        """
        then = self.report
        # Earlier doubts remain: the folder holds the data of the replays, not of the step itself.
        report = replace(report, caveats=list(dict.fromkeys([*report.caveats, *then.get("caveats", [])])))
        lines = [report.message, *_differences(report.as_dict(), then)]
        if then.get("dataset_indices") and report.samples == then.get("samples"):
            files = ", ".join(filter(None, then.get("sample_files") or []))
            named = ", ".join(map(str, then["dataset_indices"]))
            lines.append(f"In the dataset these samples have the index {named}{f' ({files})' if files else ''}.")
        lines += [f"{name} has changed since the run." for name in self.changed]
        if words is not None and self.command is not None:
            lines += _other_words(self.command.get("words", []), words)
        if then.get("put_back"):
            drawn = " and ".join(then["put_back"])
            lines.append(
                f"The step draws from {drawn}, but the folder has no state of it: the random numbers may differ."
            )
        if self.command is not None and self.command.get("masked"):
            masked = ", ".join(self.command["masked"])
            lines.append(f"The folder contains no secrets: if the step needs {masked}, give them again.")
        for name, version in _HERE.items():
            if self.versions.get(name) != version:
                lines.append(f"{name} is {version} here; it was {self.versions.get(name)} in the run.")
        return "\n".join(lines)


def _other_words(then: Sequence[str], now: Sequence[str]) -> list[str]:
    """Say which words of the command line only the run had, or only this replay."""
    now = _without_replay(now)
    missing = [word for word in then if word not in now and commands.MASK not in word]
    new = [word for word in now if word not in then]
    if not missing and not new:
        return []
    told = [f"{' '.join(part)} {which}" for part, which in ((missing, "is missing here"), (new, "is new")) if part]
    return [f"The command line is not that of the run ({'; '.join(told)}), so the step may be another one."]


def _without_replay(words: Sequence[str]) -> list[str]:
    """The words without `--replay FOLDER` or `--replay=FOLDER`."""
    at = words.index("--replay") if "--replay" in words else len(words)
    return [word for word in (*words[:at], *words[at + 2 :]) if not word.startswith("--replay=")]


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    keys = ("cause", "module", "op", "phase", "samples")
    differ = [key for key in keys if now[key] != then.get(key)]
    if not differ:
        return [f"The same as in step {then.get('step')}: {', '.join(keys)}."]
    told = ", ".join(f"{key} was {then.get(key)!r} then and is {now[key]!r} now" for key in differ)
    return [
        f"This differs from the report of step {then.get('step')}: {told}.",
        f"That report says: {then.get('message')}",
    ]


def _misfits(kind: str, here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]) -> list[str]:
    problems = [f"{kind} {name} is only in the folder" for name in there if name not in here]
    problems += [f"{kind} {name} is not in the folder" for name in here if name not in there]
    for name in here.keys() & there.keys():
        given, wanted = here[name], there[name]
        if is_lazy(given):
            problems.append(f"{kind} {name} has no shape before the first batch")
        elif given.dtype != wanted.dtype:
            problems.append(f"{kind} {name} is {dtype_name(given.dtype)} here and {dtype_name(wanted.dtype)} there")
        elif kind == "parameter" and given.shape != wanted.shape:
            problems.append(f"{kind} {name} has shape {list(given.shape)} here and {list(wanted.shape)} there")
    return sorted(problems)


def read_replay(folder: Path, device: torch.device | str = "cpu") -> Replay:
    """Read the folder that `write_report` wrote, and verify its checksums; runs no code from it.

    device: where the batches come to lie.
    Raises CheckpointError for what is no such folder, is damaged or holds links, and for a step whose batches could
    not all be written.
    """
    contents = _contents(folder)
    try:
        verify_all(folder)
    except Damaged as error:
        raise CheckpointError(f"{folder} is damaged: {error}.") from error
    meta = contents.meta
    if meta.get("left_out"):
        raise CheckpointError(
            f"{folder}: the step cannot be replayed, because the folder lacks parts of its batches: "
            f"{'; '.join(map(str, meta['left_out'][:5]))}. Use a collate function that returns dicts, lists and "
            "tensors."
        )
    states = {name: read_state(folder / f"{name}{STATE_SUFFIX}") for name in _STATES}
    try:
        window = PlainBatches(states["window"]["values"], states["window"]["forms"]).restored()
        return Replay(
            folder=Path(folder),
            window=[to_device(batch, device) for batch in window],
            random=states["random"],
            parameters=states["parameters"],
            buffers=states["buffers"],
            dtype=_DTYPES[meta["precision"]],
            scale=float(meta["scale"]),
            pins=meta["pins"],
            command=meta["command"],
            versions=meta["versions"],
            report=meta["report"],
            changed=commands.changed_files(meta["command"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder}: not a replay folder of this version of amp_recipes ({what}).") from error


def read_command(folder: Path) -> dict[str, Any]:
    """Read the command that started the run of the saved step.

    "script" (text), "module" (text, or None: for `python -m module`), "words" and "cwd"; "masked": names of the words
    whose values look like secrets and are *** here: they must be given again; "not_vouched_for": what only the
    folder says to be the user's own (script or module, names of --trust), each with the reason.
    Cheap: reads no weights. Raises CheckpointError for what is no such folder, or where there was no script.
    """
    return commands.checked(folder, _contents(folder).meta.get("command"))


def _contents(folder: Path) -> Contents:
    folder = Path(folder)
    if not folder.is_dir():
        expected = "expected one named nonfinite-<step>, in the run's output folder"
        raise CheckpointError(f"{folder} is not a folder; {expected}.")
    try:
        contents = read_contents(folder)
        verify(folder, ["meta.json"])
    except Damaged as error:
        raise CheckpointError(f"{folder} is not a replay folder, or it is damaged: {error}.") from error
    if contents.version != _VERSION or tuple(contents.names) != _STATES:
        raise CheckpointError(
            f"{folder}: not a replay folder of this version of amp_recipes (its version is {contents.version})."
        )
    return contents
