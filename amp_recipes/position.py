"""Where the loop stands, as a checkpoint keeps it, and what is left to do after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Position:
    """The place in the run: as a recoverable of the checkpoint, and what a resumed `fit` asks.

    read: returns the loop's own numbers as they are now (a dict of plain values); write: takes them back.
    epoch_loss_due: loss of an epoch whose end has not followed yet (its schedulers have not moved); None otherwise.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], write: Callable[[Mapping[str, Any]], None]) -> None:
        self._read = read
        self._write = write
        self.epoch_loss_due: float | None = None
        self.done: int | None = None  # the last whole epoch
        self._done_before: int | None = None  # the same, before the resume
        self._resumed_step = 0  # batches of the epoch after it that are done too

    def epoch_done(self, epoch: int) -> None:
        """An epoch is over."""
        self.done = epoch

    def start_afresh(self) -> None:
        """A new `fit` begins: its epochs have nothing to do with those of the last."""
        self.done = self._done_before = self.epoch_loss_due = None
        self._resumed_step = 0

    def is_done(self, epoch: int) -> bool:
        """Whether `epoch` was over before the resume, for counters that do not know it themselves."""
        return self._done_before is not None and epoch <= self._done_before

    @property
    def inside_epoch(self) -> bool:
        """Whether the checkpoint was saved inside an epoch, which is then not over."""
        return self._resumed_step > 0

    def take_step(self) -> int:
        """How many batches of the epoch that begins are done already; 0 from the second epoch on."""
        step, self._resumed_step = self._resumed_step, 0
        return step

    def state_dict(self) -> dict[str, Any]:
        """The loop's numbers and the place in the run."""
        return {**self._read(), "done": self.done, "epoch_loss_due": self.epoch_loss_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `state_dict` returned."""
        self._write(state)
        self.done = self._done_before = state["done"]
        self.epoch_loss_due = state["epoch_loss_due"]
        self._resumed_step = state["step"]
