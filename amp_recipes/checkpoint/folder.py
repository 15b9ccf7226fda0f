"""Names the parts of a checkpoint's folder, and finds damage to them.

A folder `CKPT+000012` holds one `<name>.safetensors` per recoverable, `meta.json`, and `MANIFEST.sha256`, which
`sha256sum -c` reads; where tensors lie in parts on several processes, also `<name>@00003.safetensors` with those parts
that rank 3 held. It is written under a temporary name beside its final place: the files reach the disk, then the
folder, then it is renamed, then its parent reaches the disk. So a folder with the final name is complete whenever the
process or the machine died.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_recipes.checkpoint.hashed_file import file_sha256
from amp_recipes.errors import CheckpointError, ConfigError
from amp_recipes.files.file_system import fsync_folder, reason
from amp_recipes.files.run_files import regular_only

META_FILE = "meta.json"
MANIFEST_FILE = "MANIFEST.sha256"
BEST_BY = "best_by"  # in meta: the metric that decides which checkpoint of the run is the best, and its mode
INSIDE_EPOCH = "inside_epoch"  # marks, in meta, a checkpoint that is only needed until the epoch's end
STATE_SUFFIX = ".safetensors"
RANK_MARK = "@"  # between a recoverable's name, which has none, and a process's rank
TEMPORARY_PREFIX = ".tmp-"
_FOLDER_PATTERN = re.compile(r"CKPT\+(\d+)")
_MANIFEST_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_TEXT_CHARACTERS = 1 << 26  # of a manifest or meta.json, which name every recoverable


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint on the disk."""

    path: Path
    number: int  # later ones have higher numbers, whatever the clock says
    meta: dict[str, Any]  # what was given to the save, as JSON gives it back


class Damaged(Exception):
    """A checkpoint that is not as it was written; says which file and what is wrong with it."""


def folder_name(number: int) -> str:
    """The name of the checkpoint with that number."""
    return f"CKPT+{number:06d}"


def numbered_folders(parent: Path) -> dict[int, Path]:
    """Number -> folder of every finished checkpoint in `parent`, damaged or not."""
    if not parent.is_dir():
        return {}
    matches = ((_FOLDER_PATTERN.fullmatch(path.name), path) for path in parent.iterdir())
    return {int(match[1]): path for match, path in matches if match and path.is_dir()}


def describe(number: int, meta: Mapping[str, Any]) -> str:
    """Return the name of a checkpoint for messages, with its step if it is known."""
    step = meta.get("optimizer_step")
    return folder_name(number) + (f" (step {step})" if step is not None else "")


# ---------------------------------------------------------------------- writing


def meta_as_json(version: int, names: Iterable[str], meta: Mapping[str, Any], shards: int = 0) -> str:
    """The content of `meta.json`; shards: from how many processes parts of tensors come. Raises CheckpointError."""
    content = {"format_version": version, "recoverables": list(names), "meta": dict(meta)}
    if shards:
        content["shards"] = shards
    try:
        # Metrics often come as 0-d tensors or NumPy scalars.
        return json.dumps(content, indent=1, default=lambda value: value.item())
    except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"meta {dict(meta)!r} cannot be written as JSON: {error}") from error


def plain_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """`meta` as a checkpoint gives it back. Raises CheckpointError."""
    return json.loads(meta_as_json(0, (), meta))["meta"]


def make_folder(path: Path) -> None:
    """Make `path`, and what is above it, where it is missing; it survives a power loss too. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_folder(folder.parent)


def check_writable(path: Path) -> None:
    """Make a folder for checkpoints if needed, and write to it once. Raises CheckpointError if that fails."""
    try:
        make_folder(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint folder {str(path)!r} is not writable ({reason(error, path)}). Give an output_folder that "
            "your user can write to."
        ) from error


def remove_leftovers(parent: Path) -> None:
    """Remove leftovers of killed saves and deletions. No other process may be writing in `parent`."""
    for path in parent.glob(f"{TEMPORARY_PREFIX}CKPT+*"):
        shutil.rmtree(path, ignore_errors=True)


def delete_folder(path: Path) -> None:
    """Delete a checkpoint. Raises OSError."""
    # Renamed first: a kill while files go must not leave half a checkpoint under a final name.
    doomed = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Contents:
    """The contents of `meta.json`."""

    version: int
    names: list[str]  # of the recoverables
    meta: dict[str, Any]
    shards: int = 0  # from how many processes parts of tensors come


def read_contents(path: Path) -> Contents:
    """Read the `meta.json` of a checkpoint. Raises Damaged."""
    try:
        content = json.loads(_text_of(path / META_FILE))
        contents = Contents(
            content["format_version"], content["recoverables"], content["meta"], content.get("shards", 0)
        )
        kinds = tuple(map(type, (contents.version, contents.names, contents.meta, contents.shards)))
        if kinds != (int, list, dict, int) or not all(type(name) is str for name in contents.names):
            raise TypeError(
                "expected a number for format_version, a list of names for recoverables and an object for meta"
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{META_FILE} cannot be read ({type(error).__name__}: {error})") from error
    # Also before a version is believed, since a bit of it may have flipped. (The first format had no manifest.)
    if contents.version > 1:
        verify(path, [META_FILE])
    return contents


def fit_of(checkpoint: Checkpoint) -> int:
    """Return the number of the `fit` that saved a checkpoint, from 1. Raises CheckpointError if it is not a number."""
    value = checkpoint.meta.get("fit", 1)
    if type(value) is float:  # a metric of that name, in a checkpoint that a recipe made itself
        return 1
    if type(value) is not int:
        raise CheckpointError(f"{checkpoint.path}: {META_FILE} was not written by amp_recipes: fit is {value!r}.")
    return value


def best_by(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """The metric that decides which checkpoint of the run is the best, and its mode; None where there is no such.

    Raises CheckpointError where it is of another kind.
    """
    found = checkpoint.meta.get(BEST_BY)
    if BEST_BY not in checkpoint.meta:
        return None
    if type(found) is dict and type(found.get("metric")) is str and found.get("mode") in ("min", "max"):
        return found["metric"], found["mode"]
    raise CheckpointError(
        f"{checkpoint.path}: {META_FILE} was not written by amp_recipes: {BEST_BY} is {found!r}; expected metric and "
        "mode."
    )


def files_beside(path: Path, names: Iterable[str]) -> tuple[list[str], dict[str, tuple[Path, str]], int]:
    """Return the files that a new checkpoint takes over from the one at `path`: all but the states `names`.

    Returns the names of the recoverables of both, file name -> the file and its sha256, and from how many processes
    parts of tensors come. Raises CheckpointError if it is damaged.
    """
    names = list(names)
    try:
        contents, sums = read_contents(path), read_manifest(path)
    except Damaged as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    rest = {
        file: (path / file, digest)
        for file, digest in sums.items()
        if file != META_FILE and file.removesuffix(STATE_SUFFIX).partition(RANK_MARK)[0] not in names
    }
    return list(dict.fromkeys([*contents.names, *names])), rest, contents.shards


def _text_of(file: Path) -> str:
    """The text of a small regular file: neither a named pipe nor a device can hold a resume up."""
    with open(file, encoding="utf-8", opener=regular_only) as stream:
        text = stream.read(_TEXT_CHARACTERS + 1)
    if len(text) > _TEXT_CHARACTERS:
        raise ValueError(f"it has more than {_TEXT_CHARACTERS:,} characters")
    return text


def read_manifest(path: Path) -> dict[str, str]:
    """File name -> sha256 of a checkpoint's files. Raises Damaged."""
    try:
        lines = _text_of(path / MANIFEST_FILE).splitlines()
    except (OSError, ValueError) as error:
        raise Damaged(f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})") from error
    matches = [_MANIFEST_LINE.fullmatch(line) for line in lines]
    if not all(matches):
        raise Damaged(f"{MANIFEST_FILE}: line {matches.index(None) + 1} is not '<sha256>  <file>'")
    return {match[2]: match[1] for match in matches}


def verify_all(path: Path) -> None:
    """Compare all files of a checkpoint with the sha256 in its manifest. Raises Damaged."""
    named = {f"{name}{STATE_SUFFIX}" for name in read_contents(path).names}
    verify(path, sorted(named | read_manifest(path).keys() - {META_FILE}))


def verify(path: Path, files: Iterable[str]) -> None:
    """Compare files of a checkpoint with the sha256 in its manifest. Raises Damaged."""
    sums = read_manifest(path)
    for file in files:
        if file not in sums:
            raise Damaged(f"{MANIFEST_FILE} does not list {file}")
        try:
            found = file_sha256(path / file)
        except OSError as error:
            raise Damaged(f"{file} cannot be read ({error.strerror or error})") from error
        except ConfigError as error:  # it is a link, a named pipe, a device
            raise Damaged(str(error)) from error
        if found != sums[file]:
            size = (path / file).stat().st_size
            raise Damaged(f"{file} ({size} bytes) has sha256 {found[:12]}…, but {MANIFEST_FILE} has {sums[file][:12]}…")
