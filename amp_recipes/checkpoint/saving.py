"""Writes one checkpoint from several processes: each writes its own files, then one commit follows.

The main process writes what is not sharded. It gathers from all which parts of sharded tensors they hold and whether
these are finite, makes the folder, has all write into it, gathers the sha256 of their files, and gives the folder its
final name. So a process that dies, or a disk that is full, at any moment leaves no checkpoint that lacks a part.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amp_recipes.checkpoint.folder import (
    MANIFEST_FILE,
    META_FILE,
    RANK_MARK,
    STATE_SUFFIX,
    TEMPORARY_PREFIX,
    Checkpoint,
)
from amp_recipes.checkpoint.group import ALONE, CheckpointGroup, NoAnswer
from amp_recipes.checkpoint.hashed_file import HashedFile
from amp_recipes.checkpoint.loading import nonfinite_parameters
from amp_recipes.checkpoint.state_format import PackedState, write_state
from amp_recipes.errors import AmpRecipesError, CheckpointError, ConfigError
from amp_recipes.files.file_system import FULL, fsync_folder, out_of_inodes, size_text


def meet_to_save(recoverables: Mapping[str, Any], group: CheckpointGroup) -> None:
    """Wait until all processes are here to save; sends the results of `part_of_process` to the main one.

    They are told before any `state_dict` is asked, so that none of these asks other processes itself: where another
    raises, they would wait.
    """
    group.meet("save a checkpoint")
    for obj in recoverables.values():
        if hasattr(obj, "part_of_process"):
            obj.parts = [{}] if group.count == 1 else group.to_main(group.all_do(obj.part_of_process)) or [{}]


def own_files(states: Mapping[str, PackedState], group: CheckpointGroup) -> dict[str, PackedState]:
    """Return the states that this process writes, by the file's name without its suffix."""
    parts = {}
    for name, state in states.items():
        if state.parts:
            offsets = {key: begins for key, (_, begins) in state.parts.items()}
            tensors = {key: tensor for key, (tensor, _) in state.parts.items()}
            parts[f"{name}{RANK_MARK}{group.rank:05d}"] = PackedState({"offsets": offsets}, tensors)
    return {**states, **parts} if group.is_main else parts


@dataclass(frozen=True)
class Held:
    """Facts about a process's files, known before they are written."""

    pieces: dict[str, dict[str, tuple[list[int], list[int]]]]  # file's stem -> tensor -> where it begins, its size
    needed_bytes: int
    nonfinite: list[str]  # parameters


def held_by(files: Mapping[str, PackedState], trainable: Mapping[str, frozenset[str]]) -> Held:
    """Collect the facts about this process's files; trainable: recoverable -> its trainable parameters."""
    parts = {stem: state for stem, state in files.items() if RANK_MARK in stem}
    of_files = {stem: trainable[stem.partition(RANK_MARK)[0]] for stem in files}
    return Held(
        {
            stem: {key: (state.document["offsets"][key], list(tensor.shape)) for key, tensor in state.tensors.items()}
            for stem, state in parts.items()
        },
        sum(state.tensor_bytes for state in parts.values()),
        nonfinite_parameters(files, of_files),
    )


def note_pieces(files: Mapping[str, PackedState], of_ranks: list[Held]) -> dict[str, list[str]]:
    """Put into the main process's states where the parts of their tensors will lie.

    Returns, by the file's stem, the parts that are not to be written, since a lower rank writes the same: what fsdp
    shards beside tensor parallelism lies on several ranks that do not know it. Raises CheckpointError if processes
    have different tensors, or not all parts are there.
    """
    unwanted: dict[str, list[str]] = {}
    taken: set[tuple] = set()
    for rank, stem, pieces in [(rank, *item) for rank, held in enumerate(of_ranks) for item in held.pieces.items()]:
        name = stem.partition(RANK_MARK)[0]
        _refuse_unknown(rank, name, pieces, files.get(name))
        places = {key: (name, key, *map(tuple, box)) for key, box in pieces.items()}
        wanted = {key: box for key, box in pieces.items() if places[key] not in taken}
        taken.update(places.values())
        files[name].add_pieces(f"{stem}{STATE_SUFFIX}", wanted)
        if len(wanted) < len(pieces):
            unwanted[stem] = [key for key in pieces if key not in wanted]
    for name, state in files.items():
        lacking = state.incomplete()
        if lacking:
            raise CheckpointError(
                f"the parts of {name}[{lacking[0]!r}] from all processes do not cover the whole tensor."
            )
    return unwanted


def _refuse_unknown(rank: int, name: str, pieces: Mapping[str, Any], file: PackedState | None) -> None:
    unknown = pieces.keys() - (file.sharded.keys() if file is not None else set())
    if unknown:
        raise CheckpointError(f"rank {rank} has a part of {name}[{min(unknown)!r}], which rank 0 does not have.")


def without(files: Mapping[str, PackedState], unwanted: Mapping[str, list[str]]) -> dict[str, PackedState]:
    """The files without those parts; a file that would be empty is left out."""
    left = {}
    for stem, state in files.items():
        tensors = {key: tensor for key, tensor in state.tensors.items() if key not in unwanted.get(stem, ())}
        if tensors or RANK_MARK not in stem:
            left[stem] = replace(state, tensors=tensors)
    return left


class OtherProcesses:
    """The other processes, for the main one, once it has received the facts about their files."""

    def __init__(self, group: CheckpointGroup, of_ranks: list[Held]) -> None:
        self._group = group
        self.needed_bytes = sum(held.needed_bytes for held in of_ranks[1:])
        self.unwanted: dict[str, list[str]] = {}  # parts that they are not to write, by the file's stem
        self._writing = False

    def begin(self, temporary: Path) -> None:
        """Make the other processes write into the folder."""
        self._group.from_main(("write", temporary.name, self.unwanted))
        self._writing = True

    def end(self) -> dict[str, str]:
        """Wait until they have; file -> sha256. Raises CheckpointError, or OSError if it was their disk that failed."""
        self._writing = False
        sums: dict[str, str] = {}
        for rank, (written, failed) in enumerate(self._group.to_main(({}, None))):
            if failed is not None:
                code, text = failed
                raise OSError(code, f"rank {rank}: {text}") if code else CheckpointError(f"rank {rank}: {text}")
            sums.update(written)
        return sums

    def tell(self, saved: Checkpoint) -> None:
        """It is done."""
        self._group.from_main(("done", saved.path.name, saved.number, saved.meta))

    def tell_failure(self, error: Exception) -> None:
        """It has failed, here or on another of them."""
        if isinstance(error, NoAnswer):
            return  # and their answers would not be read now
        if self._writing:
            self._group.to_main(({}, None))
        kind = ConfigError if isinstance(error, ConfigError) else CheckpointError
        text = str(error) if isinstance(error, AmpRecipesError) else f"rank 0: {type(error).__name__}: {error}"
        self._group.from_main(("failed", kind, text))


def commit_as_main(
    group: CheckpointGroup,
    held: Held,
    commit: Callable[[list[Held], OtherProcesses], Checkpoint],
    then: Callable[[Checkpoint], object] | None,
) -> Checkpoint:
    """Save as the main process; commit: writes this process's files, given the others. Its error is raised on all."""
    of_ranks = group.to_main(held)
    others = OtherProcesses(group, of_ranks)
    try:
        saved = commit(of_ranks, others)
        if then is not None:
            then(saved)
    except Exception as error:
        others.tell_failure(error)
        raise
    others.tell(saved)
    return saved


def commit_as_other(group: CheckpointGroup, held: Held, files: Mapping[str, PackedState], folder: Path) -> Checkpoint:
    """Save as any other process: write `files` when the main one says where. Raises its CheckpointError."""
    group.to_main(held)
    while True:
        order, *what = group.from_main()
        if order == "write":
            name, unwanted = what
            group.to_main(_written(without(files, unwanted), folder / name))
        elif order == "failed":
            kind, text = what
            raise kind(text)
        else:
            name, number, meta = what
            return Checkpoint(folder / name, number, meta)


def _written(files: Mapping[str, PackedState], folder: Path) -> tuple[dict[str, str], Any]:
    try:
        return _write_states(folder, files), None
    except OSError as error:
        hint = ""
        if error.errno == errno.ENOENT and not folder.is_dir():
            hint = f" {folder}: output_folder must be on a file system that all machines share"
        return {}, (error.errno or errno.EIO, f"{error.strerror or error}{hint}")
    except Exception as error:
        return {}, (None, f"{type(error).__name__}: {error}")


# ---------------------------------------------------------------------- the folder


def write_folder(
    target: Path,
    states: Mapping[str, PackedState],
    meta_text: str,
    others: OtherProcesses | None = None,
    ready: Mapping[str, tuple[Path, str]] | None = None,
) -> None:
    """Put a checkpoint under the name `target`; when this returns it survives a crash or a power loss.

    (The latter not where the file system has no fsync of folders.)
    states: what to write, by the file's name without its suffix; ready: name -> file that lies in another checkpoint,
    and its sha256: a second name of it, or a copy, does.
    Raises OSError if the disk fails or has no room for it; nothing of it is left then.
    """
    others = others or OtherProcesses(ALONE, [])
    needed = len(meta_text) + sum(len(state.header) + state.tensor_bytes for state in states.values())
    needed += others.needed_bytes
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise _disk_full(needed, free)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    renamed = False
    try:
        os.mkdir(temporary)
        _write_contents(temporary, states, meta_text, others, ready or {})
        os.rename(temporary, target)
        renamed = True
        fsync_folder(target.parent)
    except BaseException as error:
        # Asked while the half-written files are there, which have the last inodes.
        no_inodes = out_of_inodes(error, target.parent) if isinstance(error, OSError) else ""
        _withdraw(temporary, target if renamed else None)
        if no_inodes:
            raise OSError(errno.ENOSPC, no_inodes) from error
        if isinstance(error, OSError) and error.errno in FULL:
            # After the half-written files are gone, so that it shows how much space can be gained.
            raise _disk_full(needed, shutil.disk_usage(target.parent).free) from error
        raise


def _write_contents(
    folder: Path,
    states: Mapping[str, PackedState],
    meta_text: str,
    others: OtherProcesses,
    ready: Mapping[str, tuple[Path, str]],
) -> None:
    """Write all files of a checkpoint, the one with the sums of the others last; `folder` is on the disk then."""
    others.begin(folder)
    sums = _write_states(folder, states)
    for name, (file, digest) in ready.items():
        _put_copy(file, folder / name)
        sums[name] = digest
    sums.update(others.end())
    sums[META_FILE] = _write_text(folder / META_FILE, meta_text)
    _write_text(folder / MANIFEST_FILE, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    fsync_folder(folder)


def _write_states(folder: Path, states: Mapping[str, PackedState]) -> dict[str, str]:
    """Write a file for each state and have it on the disk; file name -> sha256. Raises OSError, CheckpointError."""
    files = {f"{name}{STATE_SUFFIX}": state for name, state in states.items()}
    return {file: write_state(folder / file, state) for file, state in files.items()}


def _put_copy(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, copy)
        with open(copy, "rb+") as stream:
            os.fsync(stream.fileno())


def _disk_full(needed: int, free: int) -> OSError:
    return OSError(errno.ENOSPC, f"the disk is full (needs {size_text(needed)}, free {size_text(free)})")


def _withdraw(temporary: Path, target: Path | None) -> None:
    try:
        if target is not None:  # it has its name, but maybe not on the disk
            os.rename(target, temporary)
    except OSError:
        return
    shutil.rmtree(temporary, ignore_errors=True)


def _write_text(path: Path, text: str) -> str:
    with closing(HashedFile(path)) as file:
        file.write(memoryview(text.encode()))
        return file.finish()
