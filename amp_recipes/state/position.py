"""Stores the position of a fit: the epoch, the part of it, and the rest after a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Snapshot = dict[str, Any]
"""States of the global generators (`random`), of the loaders' generators (`loaders`) and of the recipe."""


@dataclass(frozen=True)
class Place:
    """The place inside an epoch's training from which a run resumes.

    step: batches that are done; data: the loader's own state, if it has one; stage_start: the snapshot taken just
    before the loader was first asked, for loaders whose order comes from the global generators; now: that of the save.
    """

    step: int
    data: Any
    stage_start: Snapshot
    now: Snapshot


class Position:
    """The place of one fit, from its first epoch or from the checkpoint that it resumes from.

    snapshot: takes the present `Snapshot`, of the generators alone if its argument is false.
    epoch_loss_due: loss of an epoch whose end has not followed yet (its schedulers have not moved); None otherwise.
    done: the last epoch that was trained whole.
    only_validation: whether the epoch that comes first after a resume is trained already, and is to be validated only.
    """

    def __init__(self, snapshot: Callable[[bool], Snapshot]) -> None:
        self._snapshot = snapshot
        self.epoch_loss_due: float | None = None
        self.done: int | None = None
        self._done_before: int | None = None  # the last one that was over before the resume
        self._one_before_done: int | None = None
        self._training = False  # an epoch's batches are asked for, also where none has come yet
        self._validating = False  # `done` is trained, but its validation is under way
        self.only_validation = False
        self._stage_start: Snapshot | None = None
        self._place: Place | None = None
        self._at_save: Snapshot | None = None

    # ------------------------------------------------------------------ while the loop runs

    def training_begins(self, resumed: Place | None = None) -> None:
        """The epoch's batches are about to be asked for, for the first time or, resumed, after those that are done."""
        self._training = True
        self._stage_start = self._snapshot(False) if resumed is None else resumed.stage_start

    def epoch_done(self, epoch: int) -> None:
        """An epoch was trained whole."""
        self._training = False
        self._one_before_done, self.done = self.done, epoch

    def validation_begins(self) -> None:
        """The epoch's validation begins; a save inside it goes back to here."""
        self._validating = True
        self._stage_start = self._snapshot(True)

    def validation_ends(self) -> None:
        """The last batch of the epoch's validation is done."""
        self._validating = False

    # ------------------------------------------------------------------ after a resume

    def is_done(self, epoch: int) -> bool:
        """Whether `epoch` was over before the resume, for counters that do not know it themselves."""
        return self._done_before is not None and epoch <= self._done_before

    @property
    def inside_epoch(self) -> bool:
        """Whether the checkpoint was saved inside an epoch, which is then not over."""
        return self._place is not None or self.only_validation

    @property
    def steps_done(self) -> int:
        """Batches of the epoch that begins that were done before the resume."""
        return 0 if self._place is None else self._place.step

    def take_snapshot(self) -> Snapshot | None:
        """The snapshot of the save, once; None without a resume."""
        snapshot, self._at_save = self._at_save, None
        return snapshot

    def take_place(self) -> Place | None:
        """Return where the epoch that begins is resumed, once; None if at its first batch."""
        place, self._place = self._place, None
        return place

    def take_only_validation(self) -> bool:
        """`only_validation`, once."""
        only, self.only_validation = self.only_validation, False
        return only

    # ------------------------------------------------------------------ in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The place, with the snapshot to put back."""
        return {
            "done": self._one_before_done if self._validating else self.done,
            "training": self._training,
            "validating": self._validating,
            "epoch_loss_due": self.epoch_loss_due,
            "stage_start": self._stage_start,
            "now": self._stage_start if self._validating else self._snapshot(True),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; `state` also has the `epoch`, `step` and `data` of the save."""
        self.done = self._done_before = state["done"]
        self.epoch_loss_due = state["epoch_loss_due"]
        self.only_validation = state["validating"]
        if self.only_validation:
            self._one_before_done, self.done = state["done"], state["epoch"]
        self._at_save = state["now"]
        if state["training"]:
            self._place = Place(state["step"], state["data"], state["stage_start"], state["now"])
