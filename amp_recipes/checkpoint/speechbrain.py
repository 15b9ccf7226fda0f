"""Saves and restores a Brain's place in the run with SpeechBrain's Checkpointer, for older recipes."""

from __future__ import annotations

import copy
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from amp_recipes import distributed
from amp_recipes.checkpoint.folder import INSIDE_EPOCH
from amp_recipes.checkpoint.loading import pack_recoverable
from amp_recipes.checkpoint.state_format import read_state, write_state

logger = logging.getLogger(__name__)

_THEIR_FLAG = "brain_intra_epoch_ckpt"  # in the meta of what the original Brain saves inside an epoch


def is_speechbrains(checkpointer: Any) -> bool:
    """Whether it is a Checkpointer of SpeechBrain's; imports nothing."""
    theirs = sys.modules.get("speechbrain.utils.checkpoints")
    return theirs is not None and isinstance(checkpointer, theirs.Checkpointer)


class SpeechBrainCheckpointer:
    """Wraps SpeechBrain's Checkpointer, with the methods that `CheckpointPolicy` calls.

    The recipe still calls `original` itself. Every save also stores the framework's own state (place, optimizers,
    scaler) in files of our format. Checkpoints of SpeechBrain's Brain lack these files, and load nevertheless.
    elsewhere: save into a folder that is deleted at exit, as the original Brain does in debug mode.
    """

    def __init__(self, original: Any, elsewhere: bool = False) -> None:
        self.original = original
        if elsewhere:
            self.original.tempdir = tempfile.TemporaryDirectory()
            self.original.checkpoints_dir = Path(self.original.tempdir.name)
        for name, obj in original.recoverables.items():  # our EpochCounter, say
            if _needs_our_hooks(obj) and name not in original.custom_save_hooks:
                self.original.add_recoverable(name, obj, _load, _save)

    @property
    def recoverables(self) -> dict[str, Any]:
        """Name -> object, the recipe's and the framework's."""
        return self.original.recoverables

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of the checkpoints."""
        return Path(self.original.checkpoints_dir)

    def add_recoverable(self, name: str, obj: Any) -> None:
        """Save `obj` with every checkpoint from now on; one without it can still be loaded."""
        hooks = (_load, _save) if _needs_our_hooks(obj) else (None, None)
        self.original.add_recoverable(name, obj, *hooks, optional_load=True)

    def save_checkpoint(
        self, meta: Mapping[str, Any] | None = None, then: Callable[[Any], object] | None = None
    ) -> Any:
        """Save everything, and call `then` with it; meta: plain values. Counters are told if it is inside an epoch."""
        inside = bool((meta or {}).get(INSIDE_EPOCH))
        meta = {**(meta or {}), **({_THEIR_FLAG: True} if inside else {})}
        saved = self.original.save_checkpoint(meta=meta, end_of_epoch=not inside)
        if then is not None:
            then(saved)
        return saved

    def list_checkpoints(self) -> list[Any]:
        """All checkpoints, newest first."""
        return self.original.find_checkpoints()

    def find_checkpoint(self, min_key: str | None = None, max_key: str | None = None) -> Any:
        """The best by a key, or the newest; None if there is none."""
        return self.original.find_checkpoint(min_key=min_key, max_key=max_key)

    def recover_if_possible(self, min_key: str | None = None, max_key: str | None = None) -> Any:
        """Load the best by a key, or the newest; None if there is none."""
        return self.original.recover_if_possible(min_key=min_key, max_key=max_key)

    def delete_checkpoint(self, checkpoint: Any) -> None:
        """Delete one."""
        self.original.delete_checkpoints(num_to_keep=0, ckpt_predicate=lambda other: other.path == checkpoint.path)

    def only(self, names: Iterable[str]) -> SpeechBrainCheckpointer:
        """The same folder for some of the recoverables."""
        some = copy.copy(self.original)
        some.recoverables = {name: self.recoverables[name] for name in names if name in self.recoverables}
        some.allow_partial_load = True
        return SpeechBrainCheckpointer(some)

    def holds_any(self) -> bool:
        """Whether the folder has checkpoints."""
        return self.find_checkpoint() is not None

    def move_to(self, folder: Path) -> None:
        """Move the checkpoints there; what else a recipe keeps beside them (label encoders, tokenizers) stays."""
        folder.mkdir()
        for checkpoint in self.list_checkpoints():
            Path(checkpoint.path).rename(folder / Path(checkpoint.path).name)

    def check_writable(self) -> None:
        """Make the folder where it is missing."""
        os.makedirs(self.checkpoints_dir, exist_ok=True)

    def wait(self) -> None:
        """Nothing is written in the background."""


class HookedState:
    """An object that only SpeechBrain's hooks know how to save, as one with a state: the file that they write."""

    def __init__(self, save: Callable[..., Any], load: Callable[..., Any], obj: Any) -> None:
        self._save, self._load, self._obj = save, load, obj

    def state_dict(self) -> dict[str, bytes]:
        """The file; none in processes that do not write."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state")
            self._save(self._obj, path)
            return {"file": path.read_bytes()} if path.is_file() else {}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Have the object read it, as after an epoch's end."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state")
            if "file" in state:
                path.write_bytes(state["file"])
                self._load(self._obj, path, True)


def hooked_state(obj: Any) -> HookedState | None:
    """A state for `obj`, of a class with hooks of SpeechBrain's own (a scheduler, InputNormalization); else None."""
    theirs = sys.modules.get("speechbrain.utils.checkpoints")
    if theirs is None or isinstance(obj, (type, DataLoader)):
        return None
    save = theirs.get_default_hook(obj, theirs.DEFAULT_SAVE_HOOKS)
    load = theirs.get_default_hook(obj, theirs.DEFAULT_LOAD_HOOKS)
    if save is None or load is None or load is theirs.torch_recovery:  # that is load_state_dict
        return None
    return HookedState(save, load, obj)


class HookedModules:
    """The states of those among `modules` that keep more than parameters and buffers, as a recoverable."""

    def __init__(self, modules: nn.Module) -> None:
        found = {name: hooked_state(module) for name, module in modules.named_modules()}
        self.states = {name: state for name, state in found.items() if state is not None}

    def state_dict(self) -> dict[str, Any]:
        """By the module's name."""
        return {name: state.state_dict() for name, state in self.states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each its own; what is not there any more is left out."""
        for name in state.keys() & self.states.keys():
            self.states[name].load_state_dict(state[name])


def _needs_our_hooks(obj: Any) -> bool:
    """Whether SpeechBrain does not know how to save `obj`, which we do."""
    theirs = sys.modules["speechbrain.utils.checkpoints"]
    return hasattr(obj, "state_dict") and theirs.get_default_hook(obj, theirs.DEFAULT_SAVE_HOOKS) is None


def _save(obj: Any, path: Path) -> None:
    if distributed.is_main_process():  # their checkpointer calls it on all
        Path(path).unlink(missing_ok=True)  # of a checkpoint with a name, which is saved over and over
        write_state(Path(path), pack_recoverable(Path(path).stem, obj))


def _load(obj: Any, path: Path, end_of_epoch: bool) -> None:
    if Path(path).read_bytes()[:15] == b"avg_train_loss:":  # YAML; our files begin with the length of their header
        logger.warning(
            "%s was saved by SpeechBrain's Brain: weights, optimizers and epoch are restored; updates are counted "
            "from 0, and an unfinished epoch starts again",
            Path(path).parent,
        )
    else:
        obj.load_state_dict(read_state(Path(path)))
