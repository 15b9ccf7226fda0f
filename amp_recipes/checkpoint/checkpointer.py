"""Which checkpoints are written, which stay, and which one a run goes on from.

How one gets to the disk whole is in folder.py, what its files hold in state_format.py.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from amp_recipes.checkpoint.background import background_of
from amp_recipes.checkpoint.folder import (
    STATE_SUFFIX,
    Checkpoint,
    Contents,
    Damaged,
    delete_folder,
    describe,
    folder_name,
    make_folder,
    meta_as_json,
    numbered_folders,
    read_contents,
    remove_leftovers,
    verify,
    verify_all,
    write_folder,
)
from amp_recipes.checkpoint.loading import load_all, mismatches, pack_recoverable, refuse_nonfinite, trainable_names
from amp_recipes.checkpoint.snapshot import Snapshot
from amp_recipes.checkpoint.state_format import PackedState, read_state
from amp_recipes.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Version of the folder's layout and of the states in it; raised when a reader of the previous one would misread it.
(1 was a format of the time before the first release.)"""

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Version n -> what makes states of version n+1 (recoverable -> state) of those of version n."""

_RECOVERABLE_PATTERN = re.compile(r"\w[\w.+-]*")  # safe as a file name on every platform
_MAX_NAME_BYTES = 255 - len(STATE_SUFFIX)


class Checkpointer:
    """Saves the state of its recoverables under one folder, and gives it back to them.

    checkpoints_dir: the folder; made where it is missing.
    recoverables: name -> anything with `state_dict` and `load_state_dict`. Their states may hold tensors, NumPy
        arrays and plain Python values: files are read back without running any code from them.
    Every method that reads or writes checkpoints first waits for one that is being written in the background. If that
    one failed, a save logs its error and goes on; every other method raises it.
    Raises ConfigError for a recoverable that is none, CheckpointError if the folder cannot be written. (A
    folder that already holds checkpoints may be a read-only one to evaluate; there `check_writable` or the
    first save says so.)
    """

    def __init__(self, checkpoints_dir: str | os.PathLike[str], recoverables: Mapping[str, Any] | None = None) -> None:
        self.checkpoints_dir = Path(checkpoints_dir)
        self.recoverables: dict[str, Any] = {}
        self._last_number = 0
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

        Raises ConfigError if the name is taken or no plain file name, or if `obj` has no state to save.
        """
        if not isinstance(name, str) or not _RECOVERABLE_PATTERN.fullmatch(name):
            raise ConfigError(f"Recoverable {name!r}: expected a file name of letters, digits, '_', '-', '+' and '.'.")
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(f"Recoverable {name[:20]}…: its name is longer than {_MAX_NAME_BYTES} bytes.")
        if name in self.recoverables:
            taken_by = type(self.recoverables[name]).__name__
            raise ConfigError(f"Recoverable {name!r} is already a {taken_by}; choose another name.")
        verbs = [getattr(obj, "state_dict", None), getattr(obj, "load_state_dict", None)]
        if isinstance(obj, type) or not all(map(callable, verbs)):
            what = f"the class {obj.__name__}" if isinstance(obj, type) else f"a {type(obj).__name__}"
            raise ConfigError(
                f"Recoverable {name!r} is {what}; expected an object with state_dict() and load_state_dict()."
            )
        self.recoverables[name] = obj

    def only(self, names: Iterable[str]) -> Checkpointer:
        """A checkpointer of the same folder for some of the recoverables."""
        some = {name: self.recoverables[name] for name in names if name in self.recoverables}
        return Checkpointer(self.checkpoints_dir, some)

    def holds_any(self) -> bool:
        """Whether the folder has checkpoints, damaged ones and those of other formats included."""
        return bool(numbered_folders(self.checkpoints_dir))

    def move_to(self, folder: Path) -> None:
        """Move the checkpoints to `folder`, which is made, with all that lies beside them."""
        self.checkpoints_dir.rename(folder)

    def check_writable(self) -> None:
        """Make the folder if needed and write to it once. Raises CheckpointError if that fails."""
        try:
            make_folder(self.checkpoints_dir)
            with tempfile.TemporaryFile(dir=self.checkpoints_dir):
                pass
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint folder {str(self.checkpoints_dir)!r} is not writable ({error.strerror}). "
                "Give the run an output folder that this user may write to."
            ) from error

    # ------------------------------------------------------------------ saving

    def save_checkpoint(self, meta: Mapping[str, Any] | None = None) -> Checkpoint:
        """Write the state of every recoverable; when this returns it survives a crash or a power loss.

        meta: numbers and other JSON values, such as the metrics by which `find_checkpoint` chooses; messages name
            its `optimizer_step`.
        Raises CheckpointError if it could not be written, or if a parameter that training changes is NaN or
        infinite; the checkpoints before it are then as they were.
        """
        self._go_on_after_failure()
        return self._commit(*self._collect(meta))

    def start_saving(
        self, meta: Mapping[str, Any] | None = None, then: Callable[[Checkpoint], object] | None = None
    ) -> None:
        """Copy the state of every recoverable to host memory now, and write it in the background.

        meta: as for `save_checkpoint`. then: called in the background with the finished checkpoint, to delete older
            ones for instance.
        Errors of writing, and of `then`, are logged when they happen and raised by the next call that waits. But a
        save goes on: it writes before it returns, and raises only if that fails too. It also writes before it returns
        where the host has not clearly enough free memory for the copy. Python's exit waits for what is under way.
        """
        failed = self._go_on_after_failure()
        states, trainable, meta_text = self._collect(meta)
        taken = None if failed else self._snapshot.take(states)
        if taken is None:
            self._finish(states, trainable, meta_text, then)
        else:
            copies, arrived = taken
            self._background.start(partial(self._finish, copies, trainable, meta_text, then, arrived))

    def wait(self) -> None:
        """Return when nothing is being written in the background; raises the error of what was, once."""
        self._background.wait()

    def _go_on_after_failure(self) -> bool:
        """Wait; whether the save before failed, for a reason that may have passed."""
        error = self._background.take_error()
        if error is None:
            return False
        if not isinstance(error, Exception):
            raise error
        logger.warning("the save before this one failed; the present state is written now (it was: %s)", error)
        return True

    def _finish(
        self,
        states: dict[str, PackedState],
        trainable: dict[str, frozenset[str]],
        meta_text: str,
        then: Callable[[Checkpoint], object] | None,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        if arrived is not None:
            arrived()
        saved = self._commit(states, trainable, meta_text)
        if then is not None:
            then(saved)

    def _collect(self, meta: Mapping[str, Any] | None) -> tuple[dict[str, PackedState], dict[str, frozenset[str]], str]:
        meta_text = meta_as_json(FORMAT_VERSION, self.recoverables, meta or {})
        try:
            states = {name: pack_recoverable(name, obj) for name, obj in self.recoverables.items()}
        except CheckpointError as error:
            raise self._not_written(meta_text, str(error)) from error
        return states, {name: trainable_names(obj) for name, obj in self.recoverables.items()}, meta_text

    def _commit(
        self, states: dict[str, PackedState], trainable: dict[str, frozenset[str]], meta_text: str
    ) -> Checkpoint:
        self.check_writable()
        try:
            remove_leftovers(self.checkpoints_dir)
            number = self._next_number()
            target = self.checkpoints_dir / folder_name(number)
            refuse_nonfinite(states, trainable)
            write_folder(target, states, meta_text)
        except CheckpointError as error:
            raise self._not_written(meta_text, str(error)) from error
        except OSError as error:
            raise self._not_written(meta_text, f"{error.strerror or error}.") from error
        self._last_number = number
        return Checkpoint(target, number, json.loads(meta_text)["meta"])

    def _next_number(self) -> int:
        # The number of a checkpoint that was deleted meanwhile is not given out again.
        return 1 + max([self._last_number, *numbered_folders(self.checkpoints_dir)])

    def _not_written(self, meta_text: str, why: str) -> CheckpointError:
        meta = json.loads(meta_text)["meta"]
        try:
            found, _ = self._scan()
            left = f"{describe(found[0].number, found[0].meta)} is intact." if found else "There is no other one."
            name = describe(self._next_number(), meta)
        except (OSError, CheckpointError) as error:
            left = f"What else is there cannot be read now ({error})."
            name = describe(self._last_number + 1, meta)
        return CheckpointError(f"Checkpoint {name} not written: {why} {left} Folder: {str(self.checkpoints_dir)!r}.")

    # ------------------------------------------------------------------ which ones stay

    def save_and_keep_only(
        self,
        meta: Mapping[str, Any] | None = None,
        min_keys: Iterable[str] | None = None,
        max_keys: Iterable[str] | None = None,
        num_to_keep: int = 1,
    ) -> Checkpoint:
        """Save, then delete all but the newest and, for each key, the `num_to_keep` best; see `prune`."""
        _check_num_to_keep(num_to_keep)
        saved = self.save_checkpoint(meta)
        self.prune(saved, min_keys, max_keys, num_to_keep)
        return saved

    def prune(
        self,
        saved: Checkpoint,
        min_keys: Iterable[str] | None = None,
        max_keys: Iterable[str] | None = None,
        num_to_keep: int = 1,
        newest: int = 1,
    ) -> None:
        """Delete all but `saved` and, for each key, the `num_to_keep` best.

        saved: a finished checkpoint; what `start_saving` gives to `then`.
        min_keys, max_keys: keys of meta of which lower (higher) is better. With neither: the `num_to_keep` newest
        stay. newest: how many stay for being new, `saved` being the first of them. Before one that was good is deleted
        for a better, the better one's files are compared with their sha256: if it is damaged, that is warned about,
        and the next best stays too. Raises ConfigError, and deletes nothing, for a key that no checkpoint has.
        """
        _check_num_to_keep(num_to_keep)
        if newest < 1:
            raise ConfigError(f"newest is {newest}; expected 1 or more.")
        signs = [(key, -1) for key in _as_list(min_keys)] + [(key, +1) for key in _as_list(max_keys)]
        checkpoints = self.list_checkpoints()
        for key, _ in signs:
            if not any(key in checkpoint.meta for checkpoint in [saved, *checkpoints]):
                raise ConfigError(f"No checkpoint has {key!r}; {_known_keys(checkpoints, key)}")
        rankings = [_best_first(checkpoints, key, sign) for key, sign in signs]
        others = [checkpoint.number for checkpoint in checkpoints if checkpoint.number != saved.number]
        keep = {saved.number, *others[: newest - 1]}
        if not rankings:
            keep.update(checkpoint.number for checkpoint in checkpoints[:num_to_keep])
        for ranking in rankings:
            keep.update(_best_and_spare(ranking, num_to_keep, keep, saved.number))
        for checkpoint in checkpoints:
            if checkpoint.number not in keep:
                self.delete_checkpoint(checkpoint)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Delete a finished checkpoint; one that cannot be deleted is warned about."""
        self.wait()
        try:
            delete_folder(checkpoint.path)
        except OSError as error:
            warnings.warn(f"The old checkpoint {checkpoint.path} could not be deleted: {error}", stacklevel=3)

    # ------------------------------------------------------------------ finding

    def list_checkpoints(self) -> list[Checkpoint]:
        """All finished checkpoints, newest first; one whose meta file is damaged is left out with a warning.

        Raises CheckpointError for one of a format that this version of the package does not read.
        """
        self.wait()
        found, damaged = self._scan()
        for path, what in damaged.items():
            _warn_of_damage(path, what)
        return found

    def find_checkpoint(self, min_key: str | None = None, max_key: str | None = None) -> Checkpoint | None:
        """The checkpoint with the lowest `min_key` or the highest `max_key`; without a key the newest.

        Of equals the newest. NaN is never best, nor is a checkpoint that lacks the key; None if none is left.
        Raises ConfigError if both keys are given.
        """
        return next(iter(_ranked(self.list_checkpoints(), min_key, max_key)), None)

    def _scan(self) -> tuple[list[Checkpoint], dict[Path, str]]:
        """Finished checkpoints, newest first, and those that do not say what they are with what is wrong."""
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
        """Give every recoverable its state from the chosen checkpoint; None if there is no checkpoint yet.

        min_key, max_key: as in `find_checkpoint`. The files are compared with their sha256; a damaged checkpoint is
        warned about and the next one taken (the next newest, or the next best by the key).
        Raises CheckpointError if checkpoints exist but none can be used, if a state is missing, if a module's keys
        or shapes (an optimizer's groups) are others, or if an object does not take its state; all objects are then
        as they were.
        """
        self.wait()
        found, damaged = self._scan()
        candidates = _ranked(found, min_key, max_key)
        for path, what in damaged.items():
            _warn_of_damage(path, what)
        for chosen in candidates:
            try:
                states = self._read_states(chosen, self.recoverables)
            except Damaged as error:
                damaged[chosen.path] = str(error)
                _warn_of_damage(chosen.path, str(error))
                continue
            self._load(chosen, states)
            return chosen
        self._refuse_to_start_afresh(found if not candidates else [], damaged, min_key or max_key)
        return None

    def _load(self, chosen: Checkpoint, states: dict[str, Any]) -> None:
        problems = [text for name, state in states.items() for text in mismatches(name, self.recoverables[name], state)]
        if problems:
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{chosen.path} is of another model; nothing was loaded. Give another output folder to start "
                f"afresh.\n  {listed}"
            )
        load_all(self.recoverables, states, str(chosen.path))

    def _refuse_to_start_afresh(self, lacking: list[Checkpoint], damaged: dict[Path, str], key: str | None) -> None:
        """A run that has checkpoints must not begin anew, or be evaluated untrained, without a word."""
        if not lacking and not damaged:
            return
        text = f"No checkpoint in {str(self.checkpoints_dir)!r} can be used."
        if lacking:
            text += f" None has a number (NaN is none) as {key!r}; {_known_keys(lacking, key)}"
        if damaged:
            listed = "".join(f"\n  {path.name}: {what}" for path, what in damaged.items())
            text += f" Damaged; `--resume never` sets them aside and starts afresh:{listed}"
        raise CheckpointError(text)

    def read(self, checkpoint: Checkpoint, names: Iterable[str] | None = None) -> dict[str, Any]:
        """The states in a checkpoint, without giving them to anything; names: of the recoverables (default: all).

        Tensors are on the CPU; a module's have their names without wrappers. Raises CheckpointError if a file is
        damaged or a state is missing.
        """
        self.wait()
        try:
            contents = read_contents(checkpoint.path)
            _refuse_other_formats(checkpoint.path, contents)
            return self._read_states(checkpoint, contents.names if names is None else list(names))
        except Damaged as error:
            raise CheckpointError(f"Checkpoint {checkpoint.path} is damaged: {error}.") from error

    def _read_states(self, checkpoint: Checkpoint, wanted: Iterable[str]) -> dict[str, Any]:
        """Recoverable -> its state, read from files that are as they were written. Raises Damaged."""
        contents = read_contents(checkpoint.path)
        migrate = contents.version < FORMAT_VERSION
        if not migrate:
            _refuse_missing(checkpoint, wanted, contents.names)
        # A migration may make states from others, so it sees all of them.
        names = contents.names if migrate else list(wanted)
        verify(checkpoint.path, [f"{name}{STATE_SUFFIX}" for name in names])
        try:
            states = {name: read_state(checkpoint.path / f"{name}{STATE_SUFFIX}") for name in names}
        except CheckpointError as error:  # as its manifest says, and yet no state
            raise Damaged(str(error)) from error
        for version in range(contents.version, FORMAT_VERSION):
            states = MIGRATIONS[version](states)
        _refuse_missing(checkpoint, wanted, states)
        return {name: states[name] for name in wanted}


def _refuse_missing(checkpoint: Checkpoint, wanted: Iterable[str], held: Iterable[str]) -> None:
    missing = [name for name in wanted if name not in held]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has no state of {', '.join(missing)}; nothing was loaded: was it made with "
            "other settings (precision, ema_decay)? Give another output folder to start afresh. "
            f"It holds: {', '.join(sorted(held)) or 'nothing'}."
        )


def _refuse_other_formats(path: Path, contents: Contents) -> None:
    version = contents.version
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this amp_recipes reads {FORMAT_VERSION}. Install a newer."
        )
    if not all(step in MIGRATIONS for step in range(version, FORMAT_VERSION)):
        raise CheckpointError(
            f"{path} has format version {version}, which was only used before the first release; this amp_recipes "
            f"reads {FORMAT_VERSION}. Give another output folder to start afresh."
        )


def _warn_of_damage(path: Path, what: str) -> None:
    warnings.warn(f"Checkpoint {path} is damaged and left out: {what}.", stacklevel=3)


def _check_num_to_keep(num_to_keep: int) -> None:
    if num_to_keep < 1:
        raise ConfigError(f"num_to_keep is {num_to_keep}; expected 1 or more.")


def _ranked(checkpoints: list[Checkpoint], min_key: str | None, max_key: str | None) -> list[Checkpoint]:
    if min_key is not None and max_key is not None:
        raise ConfigError(f"min_key={min_key!r} and max_key={max_key!r}: give one of them, not both.")
    if min_key is not None:
        return _best_first(checkpoints, min_key, -1)
    return checkpoints if max_key is None else _best_first(checkpoints, max_key, +1)


def _best_first(checkpoints: list[Checkpoint], key: str, sign: int) -> list[Checkpoint]:
    """Those with a number as `key`; best first, of equals the newest (the order they come in)."""
    usable = [checkpoint for checkpoint in checkpoints if _is_number(checkpoint.meta.get(key))]
    return sorted(usable, key=lambda checkpoint: -sign * checkpoint.meta[key])


def _best_and_spare(ranking: list[Checkpoint], count: int, kept: set[int], saved: int) -> list[int]:
    """The numbers of the `count` best that are as they were written, and of damaged ones among them.

    kept: those that stay anyway; saved: the one that was just written, whose files need no look. A damaged one stays:
    it may be the reading that failed.
    """
    if all(checkpoint.number in kept for checkpoint in ranking[count:]):
        return [checkpoint.number for checkpoint in ranking]  # none would go
    chosen, intact = [], 0
    for checkpoint in ranking:
        if intact == count:
            break
        chosen.append(checkpoint.number)
        try:
            if checkpoint.number != saved:
                verify_all(checkpoint.path)
            intact += 1
        except Damaged as error:
            warnings.warn(f"Checkpoint {checkpoint.path} is damaged, the next best stays too: {error}.", stacklevel=4)
    return chosen


def _known_keys(checkpoints: list[Checkpoint], key: str | None) -> str:
    known = sorted({known for checkpoint in checkpoints for known in checkpoint.meta})
    nearest = get_close_matches(str(key), [name for name in known if name != key], n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"their meta has: {', '.join(known) or 'nothing'}.{hint}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _as_list(keys: Iterable[str] | None) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or [])
