"""Saves and restores anything that has a state_dict, in numbered folders.

How one gets to the disk whole is in folder.py, what its files hold in state_format.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from amp_recipes import distributed
from amp_recipes.checkpoint.background import background_of
from amp_recipes.checkpoint.folder import (
    Checkpoint,
    Contents,
    Damaged,
    check_writable,
    delete_folder,
    describe,
    files_beside,
    folder_name,
    meta_as_json,
    numbered_folders,
    plain_meta,
    read_contents,
    remove_leftovers,
    verify_all,
)
from amp_recipes.checkpoint.group import ALONE, CheckpointGroup, checkpoint_group
from amp_recipes.checkpoint.loading import (
    check_recoverable,
    load_all,
    mismatches,
    pack_recoverable,
    refuse_diverged,
    refuse_nonfinite,
    trainable_names,
)
from amp_recipes.checkpoint.ranking import check_num_to_keep, known_keys, numbers_to_keep, ranked
from amp_recipes.checkpoint.reading import fill, layout_of, read_documents, refuse_missing
from amp_recipes.checkpoint.saving import (
    Held,
    OtherProcesses,
    commit_as_main,
    commit_as_other,
    held_by,
    meet_to_save,
    note_pieces,
    own_files,
    without,
    write_folder,
)
from amp_recipes.checkpoint.snapshot import Snapshot
from amp_recipes.checkpoint.state_format import PackedState
from amp_recipes.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Version of the folder and the states (1: before the first release); goes up when an older one would misread them."""

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Version n -> the function that converts states of version n (recoverable -> state) to version n+1."""


@dataclass(frozen=True)
class _Collected:
    """The data of one save: the meta, the files of this process, the trainable parameters of each state."""

    meta: dict[str, Any]
    files: dict[str, PackedState]
    trainable: dict[str, frozenset[str]]  # by the recoverable's name


class Checkpointer:
    """Saves the states of its recoverables in one folder, and restores them.

    checkpoints_dir: the folder; created if it does not exist.
    recoverables: name -> an object with `state_dict` and `load_state_dict`. The states may contain tensors, NumPy
        arrays and plain Python values; no code from the files is run when they are read.
    alone: this process saves and loads by itself. rest_of: every save copies the states of this checkpoint, except
        those of `recoverables`.
    With several processes, all of them must call the methods that save (`save_checkpoint`, `start_saving`,
    `save_and_keep_only`) and load (`recover_if_possible`). They save and load one checkpoint together: rank 0 writes
    what is not sharded, and an error of one process is raised on all. The other methods work in each process alone.
    Every method that reads or writes checkpoints first waits for a save in the background. If that save failed, the
    next save logs its error and continues; every other method raises it.
    Raises ConfigError for an object that is not a recoverable, and CheckpointError if the folder is not writable. (A
    folder with checkpoints may be read-only, for an evaluation; there `check_writable` or the first save raises.)
    """

    def __init__(
        self,
        checkpoints_dir: str | os.PathLike[str],
        recoverables: Mapping[str, Any] | None = None,
        *,
        alone: bool = False,
        rest_of: Checkpoint | None = None,
    ) -> None:
        self.checkpoints_dir = Path(checkpoints_dir)
        self._alone, self._rest_of = alone, rest_of
        self.recoverables: dict[str, Any] = {}
        self._last_number = 0
        self._warned: set[str] = set()
        self._attach()
        for name, obj in (recoverables or {}).items():
            self.add_recoverable(name, obj)
        if not numbered_folders(self.checkpoints_dir):
            self.check_writable()

    def _attach(self) -> None:
        self._background = background_of(self.checkpoints_dir)
        self._snapshot = Snapshot()

    def __getstate__(self) -> dict[str, Any]:
        # A copy shares the folder, and with it the thread that writes there, but no memory.
        return {key: value for key, value in vars(self).items() if key not in ("_background", "_snapshot")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._attach()

    def add_recoverable(self, name: str, obj: Any) -> None:
        """Save and restore `obj` from now on, in a file of that name.

        Raises ConfigError if the name is in use or is not a plain file name, or if `obj` has no state to save.
        """
        check_recoverable(name, obj, self.recoverables)
        self.recoverables[name] = obj

    def only(self, names: Iterable[str]) -> Checkpointer:
        """Return a checkpointer of the same folder for some of the recoverables."""
        some = {name: self.recoverables[name] for name in names if name in self.recoverables}
        return Checkpointer(self.checkpoints_dir, some, alone=self._alone)

    def holds_any(self) -> bool:
        """Whether the folder has checkpoints, damaged ones and those of other formats included."""
        return bool(numbered_folders(self.checkpoints_dir))

    def move_to(self, folder: Path) -> None:
        """Move the checkpoints, and all other files of their folder, to the new folder `folder`."""
        self.checkpoints_dir.rename(folder)

    def check_writable(self) -> None:
        """Make the folder if needed and write to it once. Raises CheckpointError if that fails."""
        check_writable(self.checkpoints_dir)

    # ------------------------------------------------------------------ saving

    def save_checkpoint(
        self, meta: Mapping[str, Any] | None = None, then: Callable[[Checkpoint], object] | None = None
    ) -> Checkpoint:
        """Write the state of every recoverable. After this returns, the checkpoint survives a crash or a power loss.

        meta: numbers and other JSON values, such as the metrics by which `find_checkpoint` chooses; messages name
            its `optimizer_step`. then: called with the finished checkpoint, on the main process, before any returns.
        Raises CheckpointError if it could not be written, or if a trainable parameter is NaN or infinite; the earlier
        checkpoints do not change then.
        """
        self._go_on_after_failure()
        group = self._group()
        return self._finish(group, self._collect(group, meta), then)

    def start_saving(
        self, meta: Mapping[str, Any] | None = None, then: Callable[[Checkpoint], object] | None = None
    ) -> None:
        """Copy the state of every recoverable to host memory now, and write it in the background.

        meta: as for `save_checkpoint`. then: called in the background, on the main process, with the finished
            checkpoint, to delete older ones for instance.
        Errors of writing, and of `then`, are logged at once and raised by the next call that waits. The next save does
        not raise such an error: it writes before it returns, and raises only if that fails too. It also writes before
        it returns if the host has too little free memory for the copy. Python's exit waits for a running save.
        """
        failed = self._go_on_after_failure()
        group = self._group()
        collected = self._collect(group, meta)
        taken = None if failed else self._snapshot.take(collected.files)
        if taken is None:
            self._finish(group, collected, then)
            return

        def finish() -> None:
            copies, wait_for_copies = taken
            wait_for_copies()
            self._finish(group, replace(collected, files=copies), then)

        self._background.start(finish)

    def prepare_saving(self) -> None:
        """Allocate, in the background, the pinned memory into which `start_saving` copies tensors from a device.

        Pinning gigabytes takes seconds, for which training would otherwise wait at its first save.
        """
        group = self._group()
        # What needs the other processes is small, and on the host.
        alone = {name: obj for name, obj in self.recoverables.items() if not hasattr(obj, "part_of_process")}
        try:
            states = {name: pack_recoverable(name, obj) for name, obj in alone.items()}
        except CheckpointError:
            return  # the save will say so
        self._background.start(partial(self._snapshot.prepare, own_files(states, group)))

    def wait(self) -> None:
        """Wait for a save in the background; raises its error, once."""
        self._background.wait()

    def _go_on_after_failure(self) -> bool:
        """Wait; return whether the previous save failed, for a reason that may be gone now."""
        error = self._background.take_error()
        if error is None:
            return False
        if not isinstance(error, Exception):
            raise error
        logger.warning("the previous save failed (%s); saving the current state instead", error)
        return True

    def _group(self) -> CheckpointGroup:
        return ALONE if self._alone else checkpoint_group()

    def _finish(
        self, group: CheckpointGroup, collected: _Collected, then: Callable[[Checkpoint], object] | None
    ) -> Checkpoint:
        held = held_by(collected.files, collected.trainable)
        if not group.is_main:
            saved = commit_as_other(group, held, collected.files, self.checkpoints_dir)
            self._last_number = saved.number
            return saved
        return commit_as_main(group, held, partial(self._commit, collected), then)

    def _collect(self, group: CheckpointGroup, meta: Mapping[str, Any] | None) -> _Collected:
        meet_to_save(self.recoverables, group)

        def collect() -> _Collected:
            plain = plain_meta(meta or {})
            try:
                states = {name: pack_recoverable(name, obj) for name, obj in self.recoverables.items()}
            except CheckpointError as error:
                raise self._not_written(plain, str(error)) from error
            trainable = {name: trainable_names(obj) for name, obj in self.recoverables.items()}
            return _Collected(plain, own_files(states, group), trainable)

        return group.all_do(collect)

    def _commit(self, collected: _Collected, of_ranks: list[Held], others: OtherProcesses) -> Checkpoint:
        self.check_writable()
        meta, names = collected.meta, list(collected.trainable)
        try:
            remove_leftovers(self.checkpoints_dir)
            number = self._next_number()
            target = self.checkpoints_dir / folder_name(number)
            refuse_nonfinite(name for held in of_ranks for name in held.nonfinite)
            others.unwanted = note_pieces(collected.files, of_ranks)
            files = without(collected.files, others.unwanted)
            shards = len(of_ranks) if any(held.pieces for held in of_ranks) else 0
            ready = {}
            if self._rest_of is not None:
                names, ready, shards = files_beside(self._rest_of.path, names)
            write_folder(target, files, meta_as_json(FORMAT_VERSION, names, meta, shards), others, ready)
        except CheckpointError as error:
            raise self._not_written(meta, str(error)) from error
        except OSError as error:
            raise self._not_written(meta, f"{error.strerror or error}.") from error
        self._last_number = number
        return Checkpoint(target, number, meta)

    def _next_number(self) -> int:
        # The number of a checkpoint that was deleted meanwhile is not given out again.
        return 1 + max([self._last_number, *numbered_folders(self.checkpoints_dir)])

    def _not_written(self, meta: Mapping[str, Any], why: str) -> CheckpointError:
        try:
            found, _ = self._scan()
            left = "There is no other checkpoint."
            if found:
                left = f"{describe(found[0].number, found[0].meta)} is intact."
            name = describe(self._next_number(), meta)
        except (OSError, CheckpointError) as error:
            left = f"The other checkpoints cannot be read now ({error})."
            name = describe(self._last_number + 1, meta)
        return CheckpointError(
            f"Checkpoint {name} was not written: {why} {left} Folder: {str(self.checkpoints_dir)!r}."
        )

    # ------------------------------------------------------------------ which ones stay

    def save_and_keep_only(
        self,
        meta: Mapping[str, Any] | None = None,
        min_keys: Iterable[str] | None = None,
        max_keys: Iterable[str] | None = None,
        num_to_keep: int = 1,
    ) -> Checkpoint:
        """Save, then delete all but the newest and, for each key, the `num_to_keep` best; see `prune`."""
        check_num_to_keep(num_to_keep)
        return self.save_checkpoint(meta, lambda saved: self.prune(saved, min_keys, max_keys, num_to_keep))

    def prune(
        self,
        saved: Checkpoint,
        min_keys: Iterable[str] | None = None,
        max_keys: Iterable[str] | None = None,
        num_to_keep: int = 1,
        newest: int = 1,
    ) -> None:
        """Delete all but `saved` and, for each key, the `num_to_keep` best.

        saved: a finished checkpoint, which `start_saving` passes to `then`.
        min_keys, max_keys: keys of meta of which lower (higher) is better. With neither, the `num_to_keep` newest stay.
        newest: number of newest checkpoints to keep, including `saved`. Before a good checkpoint is deleted for a
        better one, the files of the better one are compared with their sha256. If it is damaged, this warns, and the
        next best stays too. Raises ConfigError, and deletes nothing, for a key that no checkpoint has.
        """
        check_num_to_keep(num_to_keep)
        if newest < 1:
            raise ConfigError(f"newest is {newest}; expected 1 or more.")
        checkpoints = self.list_checkpoints()
        keep = numbers_to_keep(checkpoints, saved, min_keys, max_keys, num_to_keep, newest, self._is_intact)
        for checkpoint in checkpoints:
            if checkpoint.number not in keep:
                self.delete_checkpoint(checkpoint)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Delete a finished checkpoint, on rank 0 only; warns if it cannot be deleted."""
        self.wait()
        if not (self._alone or distributed.is_main_process()):
            return
        try:
            delete_folder(checkpoint.path)
        except OSError as error:
            self._warn(f"Could not delete the old checkpoint {checkpoint.path}: {error}")

    def _is_intact(self, path: Path) -> bool:
        try:
            verify_all(path)
        except Damaged as error:
            self._warn(f"Checkpoint {path} is damaged, so the next best is kept too: {error}.")
            return False
        return True

    def _warn_of_damage(self, path: Path, what: str) -> None:
        self._warn(f"Checkpoint {path} is damaged, so it is skipped: {what.rstrip('.')}.")

    def _warn(self, text: str) -> None:
        """Log a warning; the same one only once, though the folder is looked at for each save."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    # ------------------------------------------------------------------ finding

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return all finished checkpoints, newest first; skips one with a damaged meta file, with a warning.

        Raises CheckpointError for a format that this version of the package does not read.
        """
        self.wait()
        found, damaged = self._scan()
        for path, what in damaged.items():
            self._warn_of_damage(path, what)
        return found

    def find_checkpoint(self, min_key: str | None = None, max_key: str | None = None) -> Checkpoint | None:
        """Return the checkpoint with the lowest `min_key` or the highest `max_key`; without a key, the newest.

        Among equal ones, the newest. Checkpoints without the key, or with NaN, are ignored; None if none is left.
        Raises ConfigError if both keys are given.
        """
        return next(iter(ranked(self.list_checkpoints(), min_key, max_key)), None)

    def _scan(self) -> tuple[list[Checkpoint], dict[Path, str]]:
        """Return the finished checkpoints, newest first, and the unreadable ones with what is wrong."""
        found, damaged = [], {}
        try:
            folders = numbered_folders(self.checkpoints_dir)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint folder {str(self.checkpoints_dir)!r} cannot be read ({error.strerror or error})."
            ) from error
        for number, path in sorted(folders.items(), reverse=True):
            try:
                contents = read_contents(path)
            except Damaged as error:
                damaged[path] = str(error)
                continue
            _refuse_other_formats(path, contents)
            found.append(Checkpoint(path, number, contents.meta))
        return found, damaged

    # ------------------------------------------------------------------ loading

    def recover_if_possible(self, min_key: str | None = None, max_key: str | None = None) -> Checkpoint | None:
        """Restore every recoverable from the chosen checkpoint; returns None if there is no checkpoint yet.

        min_key, max_key: as in `find_checkpoint`. The files are compared with their sha256. If a checkpoint is damaged,
        or has diverged (trained weights that are not finite), this warns and uses the next newest, or next best.
        Raises CheckpointError if there are checkpoints but none is usable, if a state is missing, if the keys or shapes
        of a module (or the groups of an optimizer) differ, or if loading a state fails; no object has changed then.
        """
        self.wait()
        group = self._group()
        group.meet("load a checkpoint")

        def look() -> tuple[list[Checkpoint], list[Checkpoint], dict[Path, str]]:
            found, damaged = self._scan()
            return found, ranked(found, min_key, max_key), damaged

        found, candidates, damaged = group.on_main(look)
        for path, what in damaged.items():
            self._warn_of_damage(path, what)
        for chosen in candidates:
            # Each process knows the folder under its own path.
            chosen = Checkpoint(self.checkpoints_dir / chosen.path.name, chosen.number, chosen.meta)
            try:
                states = self._read_fitting(chosen, group)
            except Damaged as error:
                damaged[chosen.path] = str(error)
                self._warn_of_damage(chosen.path, str(error))
                continue
            self._load(chosen, states, group)
            return chosen
        self._refuse_to_start_afresh(found if not candidates else [], damaged, min_key or max_key)
        return None

    def _read_fitting(self, chosen: Checkpoint, group: CheckpointGroup) -> dict[str, Any]:
        """Return the states of all recoverables, ready to load. Raises Damaged; CheckpointError if they differ."""
        states = self._read_states(chosen, self.recoverables, group)

        def check() -> dict[str, Any]:
            problems = [
                text for name, state in states.items() for text in mismatches(name, self.recoverables[name], state)
            ]
            if problems:
                listed = "\n  ".join(problems)
                raise CheckpointError(
                    f"{chosen.path} is from a different model; nothing was loaded. To start a new run, give another "
                    f"output_folder.\n  {listed}"
                )
            return {name: layout_of(self.recoverables[name], state) for name, state in states.items()}

        states = fill(chosen.path, states, group.all_do(check), group)
        group.all_do(lambda: refuse_diverged(self.recoverables, states))
        return states

    def _load(self, chosen: Checkpoint, states: dict[str, Any], group: CheckpointGroup) -> None:
        undo: list[Callable[[], str]] = []
        try:
            group.all_do(lambda: undo.append(load_all(self.recoverables, states, str(chosen.path))))
        except CheckpointError:
            for take_back in undo:  # it was another process that could not load
                take_back()
            raise

    def _refuse_to_start_afresh(self, lacking: list[Checkpoint], damaged: dict[Path, str], key: str | None) -> None:
        """Raise if there are checkpoints: a run must not start again, or be evaluated untrained, without a message."""
        if not lacking and not damaged:
            return
        text = f"No usable checkpoint in {str(self.checkpoints_dir)!r}."
        if lacking:
            text += f" None of them has a number for {key!r} (NaN does not count); {known_keys(lacking, key)}"
        if damaged:
            listed = "".join(f"\n  {path.name}: {what}" for path, what in damaged.items())
            text += f" These are damaged; `--resume never` renames their folder and starts a new run:{listed}"
        raise CheckpointError(text)

    def read(
        self, checkpoint: Checkpoint, names: Iterable[str] | None = None, layouts: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Read the states in a checkpoint, without loading them; names: of the recoverables (default: all).

        Tensors are whole and on the CPU; those of a module have names without wrappers. layouts: states with DTensors
        where only this process's part is wanted. Raises CheckpointError if a file is damaged or a state is missing.
        """
        self.wait()
        try:
            contents = read_contents(checkpoint.path)
            _refuse_other_formats(checkpoint.path, contents)
            states = self._read_states(checkpoint, contents.names if names is None else list(names), ALONE)
            return fill(checkpoint.path, states, layouts or {}, ALONE)
        except Damaged as error:
            raise CheckpointError(f"Checkpoint {checkpoint.path} is damaged: {error}.") from error

    def _read_states(self, checkpoint: Checkpoint, wanted: Iterable[str], group: CheckpointGroup) -> dict[str, Any]:
        """Return recoverable -> state, from files that match their sha256; tensors are not read yet.

        Raises Damaged.
        """

        def look() -> tuple[int, list[str]]:
            if group.count > 1 and not checkpoint.path.is_dir():
                raise Damaged(
                    "not visible to this process: output_folder must be on a file system that all machines share"
                )
            contents = read_contents(checkpoint.path)
            migrate = contents.version < FORMAT_VERSION
            if not migrate:
                refuse_missing(checkpoint, wanted, contents.names)
            # A migration may make states from others, so it sees all of them.
            return contents.version, contents.names if migrate else list(wanted)

        version, names = group.all_do(look)
        states = read_documents(checkpoint.path, names, group)
        if version < FORMAT_VERSION:
            states = fill(checkpoint.path, states, {}, group)
            for step in range(version, FORMAT_VERSION):
                states = MIGRATIONS[step](states)
            refuse_missing(checkpoint, wanted, states)
        return {name: states[name] for name in wanted}


def is_current(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has the format of new ones. Raises CheckpointError if it is damaged."""
    try:
        return read_contents(checkpoint.path).version == FORMAT_VERSION
    except Damaged as error:
        raise CheckpointError(f"Checkpoint {checkpoint.path} is damaged: {error}.") from error


def _refuse_other_formats(path: Path, contents: Contents) -> None:
    version = contents.version
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, but this amp_recipes reads version {FORMAT_VERSION}. Install a "
            "newer amp_recipes."
        )
    if not all(step in MIGRATIONS for step in range(version, FORMAT_VERSION)):
        raise CheckpointError(
            f"{path} has format version {version}, from before the first release; this amp_recipes reads version "
            f"{FORMAT_VERSION}. To start a new run, give another output_folder."
        )
