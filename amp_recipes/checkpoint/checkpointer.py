"""How a checkpoint reaches the disk whole, which ones stay, and how objects take their state back.

A checkpoint is a folder `CKPT+000012` with one `<name>.pt` per recoverable and a `meta.json`. It is written
under a temporary name beside its final place and renamed once everything in it is on the disk, so a folder
that has the final name is complete whenever the process or the machine died.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_recipes.errors import CheckpointError, ConfigError

FORMAT_VERSION = 1
"""Version of the folder's layout; raised when a reader of the previous one would misread it."""

META_FILE = "meta.json"
_TEMPORARY_PREFIX = ".tmp-"
_FOLDER_PATTERN = re.compile(r"CKPT\+(\d+)")
_RECOVERABLE_PATTERN = re.compile(r"\w[\w.+-]*")  # safe as a file name on every platform


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint on the disk."""

    path: Path
    number: int  # later ones have higher numbers, whatever the clock says
    meta: dict[str, Any]  # what was given to the save, as JSON gives it back


class Checkpointer:
    """Saves the state of its recoverables under one folder, and gives it back to them.

    checkpoints_dir: the folder; made where it is missing.
    recoverables: name -> anything with `state_dict` and `load_state_dict`. Their states may hold tensors and
        plain Python values: files are read back without running any pickled code.
    Raises ConfigError for a recoverable that is none, CheckpointError if the folder cannot be written. (A
    folder that already holds checkpoints may be a read-only one to evaluate; there `check_writable` or the
    first save says so.)
    """

    def __init__(self, checkpoints_dir: str | os.PathLike[str], recoverables: Mapping[str, Any] | None = None) -> None:
        self.checkpoints_dir = Path(checkpoints_dir)
        self.recoverables: dict[str, Any] = {}
        self._last_number = 0
        for name, obj in (recoverables or {}).items():
            self.add_recoverable(name, obj)
        if not self._numbered_folders():
            self.check_writable()

    def add_recoverable(self, name: str, obj: Any) -> None:
        """Save and restore `obj` from now on, in a file of that name.

        Raises ConfigError if the name is taken or no plain file name, or if `obj` has no state to save.
        """
        if not isinstance(name, str) or not _RECOVERABLE_PATTERN.fullmatch(name):
            raise ConfigError(f"Recoverable {name!r}: expected a file name of letters, digits, '_', '-', '+' and '.'.")
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

    def check_writable(self) -> None:
        """Make the folder if needed and write to it once. Raises CheckpointError if that fails."""
        try:
            self.checkpoints_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.checkpoints_dir):
                pass
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint folder {str(self.checkpoints_dir)!r} is not writable ({error.strerror}). "
                "Give the run an output folder that this user may write to."
            ) from error

    def save_checkpoint(self, meta: Mapping[str, Any] | None = None) -> Checkpoint:
        """Write the state of every recoverable; when this returns it survives a crash or a power loss.

        meta: numbers and other JSON values, such as the metrics by which `find_checkpoint` chooses.
        Raises CheckpointError if it could not be written; the checkpoints before it are then as they were.
        """
        meta_text = _meta_as_json(meta or {}, list(self.recoverables))
        self.check_writable()
        self._remove_leftovers()
        # The number of a checkpoint that was deleted meanwhile is not given out again.
        number = 1 + max([self._last_number, *self._numbered_folders()])
        target = self.checkpoints_dir / f"CKPT+{number:06d}"
        temporary = self.checkpoints_dir / f"{_TEMPORARY_PREFIX}{target.name}"
        try:
            temporary.mkdir()
            for name, obj in self.recoverables.items():
                _write_state(temporary / f"{name}.pt", name, obj)
            with open(temporary / META_FILE, "wb") as file:
                file.write(meta_text.encode())
                _flush_to_disk(file)
            _fsync_folder(temporary)
            os.rename(temporary, target)
            _fsync_folder(self.checkpoints_dir)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            cause = _cause_on_disk(error)
            if cause is None or not isinstance(error, Exception):
                raise
            raise CheckpointError(
                f"Checkpoint {str(target)!r} not written: {cause.strerror or cause}. Earlier ones are intact."
            ) from error
        self._last_number = number
        return Checkpoint(target, number, json.loads(meta_text)["meta"])

    def save_and_keep_only(
        self,
        meta: Mapping[str, Any] | None = None,
        min_keys: Iterable[str] | None = None,
        max_keys: Iterable[str] | None = None,
        num_to_keep: int = 1,
    ) -> Checkpoint:
        """Save, then delete all but the newest and, for each key, the `num_to_keep` best.

        min_keys, max_keys: keys of meta of which lower (higher) is better. With neither: the `num_to_keep`
        newest stay. Nothing is deleted before the new checkpoint is whole on the disk.
        Raises ConfigError, and deletes nothing, for a key that no checkpoint has.
        """
        if num_to_keep < 1:
            raise ConfigError(f"num_to_keep is {num_to_keep}; expected 1 or more.")
        signs = [(key, -1) for key in _as_list(min_keys)] + [(key, +1) for key in _as_list(max_keys)]
        saved = self.save_checkpoint(meta)
        checkpoints = self.list_checkpoints()
        for key, _ in signs:
            if not any(key in checkpoint.meta for checkpoint in checkpoints):
                raise ConfigError(f"No checkpoint has {key!r}; {_known_keys(checkpoints, key)}")
        rankings = [_best_first(checkpoints, key, sign) for key, sign in signs]
        keep = {saved.number}
        for ranking in rankings or [checkpoints]:
            keep.update(checkpoint.number for checkpoint in ranking[:num_to_keep])
        for checkpoint in checkpoints:
            if checkpoint.number not in keep:
                self.delete_checkpoint(checkpoint)
        return saved

    def list_checkpoints(self) -> list[Checkpoint]:
        """All finished checkpoints, newest first; one whose meta file is damaged is left out with a warning.

        Raises CheckpointError for one that a newer version of the package wrote.
        """
        folders = self._numbered_folders()
        found = (_read_checkpoint(folders[number], number) for number in sorted(folders, reverse=True))
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def find_checkpoint(self, min_key: str | None = None, max_key: str | None = None) -> Checkpoint | None:
        """The checkpoint with the lowest `min_key` or the highest `max_key`; without a key the newest.

        Of equals the newest. NaN is never best, nor is a checkpoint that lacks the key; None if none is left.
        Raises ConfigError if both keys are given.
        """
        return self._choose(self.list_checkpoints(), min_key, max_key)

    def recover_if_possible(self, min_key: str | None = None, max_key: str | None = None) -> Checkpoint | None:
        """Give every recoverable its state from the chosen checkpoint; None if there is no checkpoint yet.

        min_key, max_key: as in `find_checkpoint`.
        Raises CheckpointError if checkpoints exist but none can be used, if a state is missing or cannot be
        read, or if a module's keys or shapes (an optimizer's groups) are others. All this is known before any
        object is changed.
        """
        checkpoints = self.list_checkpoints()
        chosen = self._choose(checkpoints, min_key, max_key)
        if chosen is None:
            self._refuse_to_start_afresh(checkpoints, min_key or max_key)
            return None
        states = self._read_states(chosen)
        problems = [
            text for name, state in states.items() for text in _mismatches(name, self.recoverables[name], state)
        ]
        if problems:
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{chosen.path} is of another model; nothing was loaded. Give another output folder to start "
                f"afresh.\n  {listed}"
            )
        for name, state in states.items():
            try:
                self.recoverables[name].load_state_dict(state)
            except Exception as error:
                kind = type(self.recoverables[name]).__name__
                raise CheckpointError(
                    f"{chosen.path}: {name!r} ({kind}) does not take its state: {error}. "
                    "The objects are now partly restored: do not train on."
                ) from error
        return chosen

    def _choose(self, checkpoints: list[Checkpoint], min_key: str | None, max_key: str | None) -> Checkpoint | None:
        if min_key is not None and max_key is not None:
            raise ConfigError(f"min_key={min_key!r} and max_key={max_key!r}: give one of them, not both.")
        if min_key is not None:
            checkpoints = _best_first(checkpoints, min_key, -1)
        elif max_key is not None:
            checkpoints = _best_first(checkpoints, max_key, +1)
        return checkpoints[0] if checkpoints else None

    def _refuse_to_start_afresh(self, checkpoints: list[Checkpoint], key: str | None) -> None:
        """A run that has checkpoints must not begin anew, or be evaluated untrained, without a word."""
        if checkpoints:
            raise CheckpointError(
                f"No checkpoint in {str(self.checkpoints_dir)!r} has a number (NaN is none) as {key!r}; "
                + _known_keys(checkpoints, key)
            )
        if self._numbered_folders():
            raise CheckpointError(
                f"No checkpoint in {str(self.checkpoints_dir)!r} can be read. Move them away to start afresh."
            )

    def _read_states(self, checkpoint: Checkpoint) -> dict[str, Any]:
        files = {name: checkpoint.path / f"{name}.pt" for name in self.recoverables}
        missing = [name for name, path in files.items() if not path.is_file()]
        if missing:
            held = sorted(path.stem for path in checkpoint.path.glob("*.pt"))
            raise CheckpointError(
                f"{checkpoint.path} has no state of {', '.join(missing)}; nothing was loaded: was it made with "
                "other settings (precision, ema_decay)? Give another output folder to start afresh. "
                f"It holds: {', '.join(held) or 'nothing'}."
            )
        return {name: _read_state(path, name) for name, path in files.items()}

    def _numbered_folders(self) -> dict[int, Path]:
        if not self.checkpoints_dir.is_dir():
            return {}
        matches = ((_FOLDER_PATTERN.fullmatch(path.name), path) for path in self.checkpoints_dir.iterdir())
        return {int(match[1]): path for match, path in matches if match and path.is_dir()}

    def _remove_leftovers(self) -> None:
        for path in self.checkpoints_dir.glob(f"{_TEMPORARY_PREFIX}CKPT+*"):
            shutil.rmtree(path, ignore_errors=True)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        # Renamed first: a kill while files go must not leave half a checkpoint under a final name.
        doomed = checkpoint.path.with_name(f"{_TEMPORARY_PREFIX}{checkpoint.path.name}")
        try:
            os.rename(checkpoint.path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(f"The old checkpoint {checkpoint.path} could not be deleted: {error}", stacklevel=3)


def _meta_as_json(meta: Mapping[str, Any], names: list[str]) -> str:
    content = {"format_version": FORMAT_VERSION, "recoverables": names, "meta": dict(meta)}
    try:
        # Metrics often come as 0-d tensors or NumPy scalars.
        return json.dumps(content, indent=1, default=lambda value: value.item())
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"meta {dict(meta)!r} cannot be written as JSON: {error}") from error


def _read_checkpoint(path: Path, number: int) -> Checkpoint | None:
    try:
        content = json.loads((path / META_FILE).read_text(encoding="utf-8"))
        version, meta = content["format_version"], content["meta"]
        newer = version > FORMAT_VERSION
        if not isinstance(meta, dict):
            raise TypeError("meta is no mapping")
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"Checkpoint {path} is left out: its {META_FILE} cannot be read ({error}).", stacklevel=3)
        return None
    if newer:
        raise CheckpointError(
            f"{path} has format version {version}; this amp_recipes reads {FORMAT_VERSION}. Install a newer."
        )
    return Checkpoint(path, number, meta)


def _write_state(path: Path, name: str, obj: Any) -> None:
    try:
        with open(path, "wb") as file:
            torch.save(obj.state_dict(), file)
            _flush_to_disk(file)
        # A state that only a pickle with code could restore must fail now, not when a run resumes.
        # Memory-mapped, so that the tensors themselves are not read.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if _cause_on_disk(error):
            raise
        raise CheckpointError(
            f"State of recoverable {name!r} ({type(obj).__name__}) would not load again: its state_dict() "
            f"may hold tensors and plain Python values only. {_what_is_not_plain(path, error)}"
        ) from error


def _what_is_not_plain(path: Path, error: Exception) -> str:
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the file is not whole: the state could not even be pickled
        found = []
    return f"It holds {', '.join(sorted(found))}." if found else str(error)


def _read_state(path: Path, name: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path}: the state of {name!r} cannot be read ({type(error).__name__}); nothing was loaded. "
            "The file is damaged, or holds more than tensors and plain Python values."
        ) from error


def _mismatches(name: str, obj: Any, state: Any) -> list[str]:
    """What in `state` does not fit `obj`, where one can tell without loading it."""
    if not isinstance(obj, nn.Module | torch.optim.Optimizer):
        return []
    live = obj.state_dict()
    if not isinstance(state, Mapping):
        return [f"{name}: a {type(state).__name__} in the checkpoint, expected a state dict"]
    if isinstance(obj, nn.Module):
        return _module_mismatches(name, live, state)
    here, there = _parameters_per_group(live), _parameters_per_group(state)
    return [] if here == there else [f"{name}: parameters per group are {here} here, {there} in the checkpoint"]


def _parameters_per_group(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state.get("param_groups", [])]


def _module_mismatches(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    problems = [f"{name}.{key}: not in the checkpoint" for key in live if key not in saved]
    problems += [f"{name}.{key}: only in the checkpoint" for key in saved if key not in live]
    for key in live.keys() & saved.keys():
        here, there = live[key], saved[key]
        if not (isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor)) or is_lazy(here):
            continue
        if here.shape != there.shape:
            problems.append(f"{name}.{key}: shape {tuple(here.shape)} here, {tuple(there.shape)} in the checkpoint")
    return sorted(problems)


def _best_first(checkpoints: list[Checkpoint], key: str, sign: int) -> list[Checkpoint]:
    """Those with a number as `key`; best first, of equals the newest (the order they come in)."""
    usable = [checkpoint for checkpoint in checkpoints if _is_number(checkpoint.meta.get(key))]
    return sorted(usable, key=lambda checkpoint: -sign * checkpoint.meta[key])


def _known_keys(checkpoints: list[Checkpoint], key: str | None) -> str:
    known = sorted({known for checkpoint in checkpoints for known in checkpoint.meta})
    nearest = get_close_matches(str(key), [name for name in known if name != key], n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"their meta has: {', '.join(known) or 'nothing'}.{hint}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _as_list(keys: Iterable[str] | None) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or [])


def _cause_on_disk(error: BaseException | None) -> OSError | None:
    """The OSError behind an error: torch reports a full disk as a RuntimeError about its own writer."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fsync_folder(path: Path) -> None:
    if os.name != "posix":  # Windows cannot open a folder, and orders its metadata itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
