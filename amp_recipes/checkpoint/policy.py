"""Decides when a run saves, what its checkpoints contain, and which one it resumes from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from amp_recipes import distributed
from amp_recipes.checkpoint.checkpointer import Checkpointer
from amp_recipes.checkpoint.folder import BEST_BY, INSIDE_EPOCH, Checkpoint, numbered_folders
from amp_recipes.checkpoint.group import checkpoint_group
from amp_recipes.checkpoint.speechbrain import SpeechBrainCheckpointer, is_speechbrains
from amp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)

_NEWEST = 2  # so many are kept besides the best: one to fall back to if the newest is damaged
_THEIR_NAMES = {"optimizer.optimizer": "optimizer"}  # so that a run of SpeechBrain's Brain can be resumed


class CheckpointPolicy:
    """The run's checkpointer, if it has one: the recipe's, or its own in `folder`.

    A recipe that brings a checkpointer saves at the end of epochs itself, as it did with the original Brain; what the
    framework adds (optimizers, scaler, counters) goes into those checkpoints too. Its own saves after every epoch.
    It may be SpeechBrain's (`theirs`), which under `debug` saves into a folder that is deleted at exit.
    In several processes all of them call what saves, resumes and loads; the main one renames and deletes. writes:
    whether the run may write at all; background: whether training goes on while it does.
    saves: whether the run can save at any moment; the same in all its processes.
    set_aside_number: on the main process N, once `resume("never")` has renamed the folder of the old checkpoints to
    `save.N`; deletes: whether a save is followed by the deletion of older ones; updates_since_save: how often `due`
    was asked.
    """

    set_aside_number: int | None = None
    deletes = True

    def __init__(
        self,
        checkpointer: Checkpointer | Any | None,
        folder: Path | None,
        writes: bool,
        background: bool = True,
        debug: bool = False,
    ) -> None:
        self.owned = checkpointer is None and folder is not None
        self.theirs = is_speechbrains(checkpointer)
        if self.theirs:
            checkpointer = SpeechBrainCheckpointer(checkpointer, elsewhere=debug)
        self.checkpointer = Checkpointer(folder) if self.owned else checkpointer
        self._writes = writes
        self._background = background and not self.theirs
        self._resumed = self._may_resume_again = self._prepared = False
        self._registered: set[str] = set()
        self._save_again: Callable[[], object] | None = None  # what saved last, if that was at an epoch's end
        self._best_key: str | None = None
        # SpeechBrain's saves in all processes together, and only the recipe calls it in all.
        alone = not self.theirs or distributed.world_size() == 1
        self.saves = self.checkpointer is not None and writes and alone
        self._note_save()

    @property
    def resumes(self) -> bool:
        """Whether the next `resume` looks for a checkpoint."""
        return self.checkpointer is not None and not self._resumed

    @property
    def recoverables(self) -> list[Any]:
        """The objects that every checkpoint holds."""
        return [] if self.checkpointer is None else list(self.checkpointer.recoverables.values())

    def register(self, name: str, recoverable: Any, replace: bool = False) -> None:
        """Save `recoverable` with every checkpoint, unless the recipe does so already.

        replace: it takes the place of one that was registered here under the same name.
        """
        if self.checkpointer is None:
            return
        if self.theirs:
            name = _THEIR_NAMES.get(name, name)
        known = self.checkpointer.recoverables
        if replace and name in self._registered and known[name] is not recoverable:
            del known[name]
        if name not in known and all(recoverable is not other for other in known.values()):
            self.checkpointer.add_recoverable(name, recoverable)
            self._registered.add(name)

    def save_epoch(self, meta: Mapping[str, Any], metric: str, mode: str) -> None:
        """An epoch is over: keep the best by `metric` and the two newest. Only for a checkpointer of its own."""
        if not (self.owned and self._writes):
            return
        best = {"max_keys": [metric]} if mode == "max" else {"min_keys": [metric]}
        meta = {**meta, BEST_BY: {"metric": metric, "mode": mode}}
        self._best_key = metric
        self._save(meta, partial(self.checkpointer.prune, newest=_NEWEST, **best), at_end=True)

    def _save(self, meta: Mapping[str, Any], then: Callable[[Checkpoint], object], at_end: bool) -> None:
        delete = then if self.deletes else None
        self._save_again = partial(self.checkpointer.save_checkpoint, meta, delete) if at_end else None
        save = self.checkpointer.start_saving if self._background else self.checkpointer.save_checkpoint
        save(meta, delete)
        self._note_save()

    def prepare(self) -> None:
        """Allocate memory for the first save; to be called after an update, when the optimizers have their states.

        Only where the run saves after every epoch anyway; later calls do nothing.
        """
        if self.saves and self.owned and self._background and not self._prepared:
            self.checkpointer.prepare_saving()
        self._prepared = True

    def due(self, interval_steps: int, asked: bool) -> bool:
        """Whether to save inside the epoch; to be asked once after each update. 0: that interval is off.

        asked: whether `clock_due`, or a signal, asks for it; the same in all processes, so that all decide alike.
        """
        if not self.saves:
            return False
        self.updates_since_save += 1
        return 0 < interval_steps <= self.updates_since_save or asked

    def clock_due(self, interval_minutes: float) -> bool:
        """Whether by this process's clock it is time to save inside the epoch. 0: never."""
        return self.saves and 0 < interval_minutes <= (time.monotonic() - self._last_save) / 60

    def save_inside_epoch(self, meta: Mapping[str, Any]) -> None:
        """Save, beside whatever is kept; of those saved inside an epoch only what is among the two newest stays."""
        self._save({**meta, INSIDE_EPOCH: True}, self._delete_old_inside, at_end=False)

    def _delete_old_inside(self, saved: Checkpoint) -> None:
        for checkpoint in self.checkpointer.list_checkpoints()[_NEWEST:]:
            if checkpoint.meta.get(INSIDE_EPOCH):
                self.checkpointer.delete_checkpoint(checkpoint)

    def wait(self) -> None:
        """Return when everything is on the disk; raises CheckpointError if it could not be written, on all processes.

        Asks no other process: each one's part of a save ends when the save has ended, and with the same outcome.
        """
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def finish(self) -> None:
        """Wait as `wait` does, at the end of training: a failed save of the last epoch is tried once more.

        Not to be called where anything has moved on since that epoch's end: what is saved is the present state.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if self._save_again is None:
                raise
            logger.warning("the last save failed (%s); trying once more", error)
            self._save_again()

    def _note_save(self) -> None:
        self._last_save, self.updates_since_save = time.monotonic(), 0

    def resume(self, mode: str = "auto") -> Checkpoint | None:
        """Load the newest checkpoint, at the first call or after `resume_again`; None where there is none.

        mode: `must` raises CheckpointError where there is none; `never` sets those that there are aside. After
        `resume_again` both are `auto`: what there is then is the run's own.
        """
        if self.checkpointer is None or self._resumed:
            if self.checkpointer is None and mode == "must":
                raise CheckpointError("resume is 'must', but this run has no output_folder to resume from.")
            return None
        self._resumed = True
        if self._may_resume_again:
            mode = "auto"
        if mode == "never":
            self._set_aside()
            return None
        found = self.checkpointer.recover_if_possible()
        if found is not None:
            # A warning, so that it is seen: a user who changed a setting may not expect the old run to be resumed.
            logger.warning(
                "resuming from %s (%s); to start a new run, give another output_folder", found.path, _where(found.meta)
            )
        elif mode == "must":
            raise CheckpointError(
                f"resume is 'must', but there is no checkpoint in {str(self.checkpointer.checkpoints_dir)!r}. Give "
                "the output_folder of the run to resume, or leave resume at 'auto'."
            )
        return found

    def resume_again(self) -> None:
        """Make the next `resume` load the newest checkpoint again: for a fit after one that failed."""
        self._resumed, self._may_resume_again = False, True

    def reload(self) -> None:
        """Load the newest checkpoint during a fit, which continues from there."""
        self._save_again = None
        self._note_save()
        self.checkpointer.recover_if_possible()

    def _set_aside(self) -> None:
        """Rename the folder of the old checkpoints: a new run neither uses nor deletes them."""
        self.wait()
        if not self._writes:
            return
        # All ranks wait until it is done: none may look for a checkpoint before.
        number = checkpoint_group().on_main(self._rename_folder)
        if distributed.is_main_process():
            self.set_aside_number = number

    def _rename_folder(self) -> int | None:
        folder = self.checkpointer.checkpoints_dir
        if not self.checkpointer.holds_any():
            return None
        number = next(number for number in range(1, 10**6) if not folder.with_name(f"{folder.name}.{number}").exists())
        aside = folder.with_name(f"{folder.name}.{number}")
        self.checkpointer.move_to(aside)
        self.checkpointer.check_writable()
        logger.warning("resume is 'never': moved the old checkpoints from %s to %s", folder, aside)
        return number

    def load_for_evaluation(
        self,
        max_key: str | None,
        min_key: str | None,
        names: Sequence[str],
        newest: Sequence[str] = (),
        weights_only: bool = False,
    ) -> Checkpoint | None:
        """Load the best checkpoint by a key, or the newest without one; None if there is none.

        Those that were saved inside an epoch have no key; where there are no others, that is as if there were none.
        names: what an evaluation needs of a checkpoint of its own; counters and optimizers stay where training left
        them. newest: what comes from the newest one whatever the key. A recipe's checkpointer restores all that the
        recipe gave it, as with the original Brain; weights_only: of that too only modules (and the EMA).
        """
        if self.checkpointer is None:
            return None
        self.wait()
        key = max_key or min_key
        # The main process looks for all processes, so that they do not decide differently.
        if key and checkpoint_group().on_main(lambda: self._only_inside(key)):
            return None
        if not self.owned:
            if not weights_only:
                return self.checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)
            names = self._names_of_weights()
        if key:
            self._warn_of_another_best(key)
        if newest:
            self.checkpointer.only(newest).recover_if_possible()
        return self.checkpointer.only(names).recover_if_possible(max_key=max_key, min_key=min_key)

    def _names_of_weights(self) -> list[str]:
        known = self.checkpointer.recoverables.items()
        return [name for name, each in known if isinstance(each, nn.Module) or name == "ema"]

    def _warn_of_another_best(self, key: str) -> None:
        if self._best_key not in (None, key):
            logger.warning(
                "the best checkpoint by '%s' may be gone: training kept only the best by '%s' and the newest. Set "
                "early_stop_metric before training (with early_stop_patience: null it does not stop training)",
                key,
                self._best_key,
            )

    def _only_inside(self, key: str) -> bool:
        """Whether there are checkpoints, and none but those made inside an epoch, which lack `key`."""
        found = self.checkpointer.list_checkpoints()
        if not found or len(found) < len(numbered_folders(self.checkpointer.checkpoints_dir)):  # some are damaged
            return False
        return all(checkpoint.meta.get(INSIDE_EPOCH) and key not in checkpoint.meta for checkpoint in found)


def _where(meta: Mapping[str, Any]) -> str:
    """The moment at which a checkpoint was saved."""
    epoch = f"epoch {meta.get('epoch')}"
    if meta.get("stage") == "valid":
        return f"during the validation of {epoch}"
    return f"{epoch}, batch {meta['step']}" if meta.get("step") else epoch
