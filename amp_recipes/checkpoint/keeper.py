"""Decides when a run saves, what goes into its checkpoints, and what it goes on from."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from amp_recipes.checkpoint.checkpointer import Checkpoint, Checkpointer

logger = logging.getLogger(__name__)

_INSIDE_EPOCH = "inside_epoch"  # marks, in meta, what only stands in until the epoch's end


class CheckpointKeeper:
    """The run's checkpointer, if it has one: the recipe's, or its own in `folder`.

    A recipe that brings a checkpointer saves at the end of epochs itself, as it did with the original Brain; what the
    framework adds (optimizers, scaler, counters) goes into those checkpoints too. Its own saves after every epoch.
    writes: whether this process is the one that writes.
    """

    def __init__(self, checkpointer: Checkpointer | None, folder: Path | None, writes: bool) -> None:
        self.owned = checkpointer is None and folder is not None
        self.checkpointer = Checkpointer(folder) if self.owned else checkpointer
        self._writes = writes
        self._resumed = False
        self._registered: set[str] = set()
        self._inside: Checkpoint | None = None  # the newest that was saved inside an epoch
        self._best_key: str | None = None
        self._note_save()

    def register(self, name: str, recoverable: Any, replace: bool = False) -> None:
        """Save `recoverable` with every checkpoint, unless the recipe does so already.

        replace: it takes the place of one that was registered here under the same name.
        """
        if self.checkpointer is None:
            return
        known = self.checkpointer.recoverables
        if replace and name in self._registered and known[name] is not recoverable:
            del known[name]
        if name not in known and all(recoverable is not other for other in known.values()):
            self.checkpointer.add_recoverable(name, recoverable)
            self._registered.add(name)

    def save_epoch(self, meta: Mapping[str, Any], metric: str, mode: str) -> None:
        """An epoch is over: keep the best by `metric` and the newest. Only for a checkpointer of its own."""
        if self.owned and self._writes:
            best = {"max_keys": [metric]} if mode == "max" else {"min_keys": [metric]}
            self.checkpointer.save_and_keep_only(meta=meta, **best)
            self._inside, self._best_key = None, metric
            self._note_save()

    def due(self, interval_steps: int, interval_minutes: float) -> bool:
        """Whether to save inside the epoch; to be asked once after each update. 0: that interval is off."""
        if self.checkpointer is None or not self._writes:
            return False
        self._updates += 1
        minutes = (time.monotonic() - self._last_save) / 60
        return 0 < interval_steps <= self._updates or 0 < interval_minutes <= minutes

    def save_inside_epoch(self, meta: Mapping[str, Any]) -> None:
        """Save, beside whatever is kept; it takes the place of the last one that was saved inside an epoch."""
        earlier, self._inside = self._inside, self.checkpointer.save_checkpoint(meta={**meta, _INSIDE_EPOCH: True})
        if earlier is not None and earlier.path.exists():
            self.checkpointer.delete_checkpoint(earlier)
        self._note_save()

    def _note_save(self) -> None:
        self._last_save, self._updates = time.monotonic(), 0

    def resume(self) -> Checkpoint | None:
        """Load the newest checkpoint, at the first call; None where there is none."""
        if self.checkpointer is None or self._resumed:
            return None
        self._resumed = True
        found = self.checkpointer.recover_if_possible()
        if found is not None:
            self._inside = found if found.meta.get(_INSIDE_EPOCH) else None
            # A warning, so that it is seen: whoever changed a setting may not expect the old run to go on.
            logger.warning(
                "going on from %s (epoch %s); another output_folder starts afresh", found.path, found.meta.get("epoch")
            )
        return found

    def load_for_evaluation(
        self,
        max_key: str | None,
        min_key: str | None,
        names: Sequence[str],
        newest: Sequence[str] = (),
        weights_only: bool = False,
    ) -> Checkpoint | None:
        """Load the best checkpoint by a key, or the newest without one, if there is any.

        names: what an evaluation needs of a checkpoint of its own; counters and optimizers stay where training left
        them. newest: what comes from the newest one whatever the key. A recipe's checkpointer restores all that the
        recipe gave it, as with the original Brain; weights_only: of that too only modules (and the EMA).
        """
        if self.checkpointer is None:
            return None
        if weights_only and not self.owned:
            known = self.checkpointer.recoverables
            names = [name for name, it in known.items() if isinstance(it, nn.Module) or name == "ema"]
        elif not self.owned:
            return self.checkpointer.recover_if_possible(max_key=max_key, min_key=min_key)
        key = max_key or min_key
        if key and self._best_key not in (None, key):
            logger.warning(
                "the best of '%s' is asked for, but training kept the best of '%s' and the newest: set "
                "early_stop_metric (with early_stop_patience: null, if it is not to stop)",
                key,
                self._best_key,
            )
        if newest:
            self._only(newest).recover_if_possible()
        return self._only(names).recover_if_possible(max_key=max_key, min_key=min_key)

    def _only(self, names: Sequence[str]) -> Checkpointer:
        """A checkpointer of the same folder for some of the recoverables."""
        known = self.checkpointer.recoverables
        return Checkpointer(self.checkpointer.checkpoints_dir, {name: known[name] for name in names if name in known})
