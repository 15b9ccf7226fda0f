"""Where the loop stands, as a checkpoint keeps it, and what is left to do after a resume."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Moment = dict[str, Any]
"""Where the global generators (`random`) and those of loaders (`loaders`) are, and what the recipe remembers."""

_EACH_ITS_OWN = ("step", "data", "stage_start", "now", "average", "metrics")  # of each process, in a checkpoint


@dataclass(frozen=True)
class Place:
    """The place inside an epoch's training that a resumed run goes on from.

    step: batches that are done; data: the loader's own state, if it has one; stage_start: the moment just before the
    loader was first asked, for loaders whose order comes from the global generators; now: the moment of the save.
    """

    step: int
    data: Any
    stage_start: Moment
    now: Moment


class Position:
    """The place in the run: as a recoverable of the checkpoint, and what a resumed `fit` asks.

    read: returns the loop's own numbers as they are now (a dict of plain values, with `step` and `data`); write: takes
    them back; moment: returns the present `Moment`, of what is drawn alone if its argument is false; choose: of the
    states of all processes that saved, by rank, the one to go on from here.
    parts: what `part_of_process` returned in each process, for the next `state_dict`.
    fit: which of the process's calls of `fit` this is, from 1.
    epoch_loss_due: loss of an epoch whose end has not followed yet (its schedulers have not moved); None otherwise.
    """

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        write: Callable[[Mapping[str, Any]], None],
        moment: Callable[[bool], Moment],
        choose: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda states: states[0],
    ) -> None:
        self._read = read
        self._write = write
        self._moment = moment
        self.parts: list[dict[str, Any]] | None = None
        self._choose = choose
        self._token = uuid.uuid4().hex
        self.start_afresh()

    def start_afresh(self) -> None:
        """A new `fit` begins: its epochs have nothing to do with those of the last."""
        self.epoch_loss_due: float | None = None
        self.done: int | None = None  # the last epoch that was trained whole
        self._done_before: int | None = None  # the last one that was over before the resume
        self._one_before_done: int | None = None
        self._training = False  # an epoch's batches are asked for, also where none has come yet
        self._validating = False  # `done` is trained, but its validation is under way
        self._only_validation = False  # of the epoch that comes first after the resume
        self._stage_start: Moment | None = None
        self._place: Place | None = None
        self._resumed_moment: Moment | None = None

    # ------------------------------------------------------------------ while the loop runs

    def training_begins(self, resumed: Place | None = None) -> None:
        """The epoch's batches are about to be asked for, for the first time or, resumed, after those that are done."""
        self._training = True
        self._stage_start = self._moment(False) if resumed is None else resumed.stage_start

    def epoch_done(self, epoch: int) -> None:
        """An epoch was trained whole."""
        self._training = False
        self._one_before_done, self.done = self.done, epoch

    def validation_begins(self) -> None:
        """The epoch's validation begins; a save inside it goes back to here."""
        self._validating = True
        self._stage_start = self._moment(True)

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
        return self._place is not None or self._only_validation

    @property
    def steps_done(self) -> int:
        """Batches of the epoch that begins that were done before the resume."""
        return 0 if self._place is None else self._place.step

    def take_moment(self) -> Moment | None:
        """The moment of the save, once; None without a resume."""
        moment, self._resumed_moment = self._resumed_moment, None
        return moment

    def take_place(self) -> Place | None:
        """Where the epoch that begins goes on, once; None if at its first batch."""
        place, self._place = self._place, None
        return place

    @property
    def only_validation(self) -> bool:
        """Whether the epoch that comes first is trained already and wants its validation only."""
        return self._only_validation

    def take_only_validation(self) -> bool:
        """`only_validation`, once."""
        only, self._only_validation = self._only_validation, False
        return only

    # ------------------------------------------------------------------ as a recoverable

    def part_of_process(self) -> dict[str, Any]:
        """What of the state differs between processes."""
        state = self._state()
        return {name: state[name] for name in _EACH_ITS_OWN if name in state}

    def state_dict(self) -> dict[str, Any]:
        """The loop's numbers and the place in the run.

        others: what differs in the processes after the first; taken_by: nobody has set `parts`, and only the process
        that this names finds itself in it.
        """
        parts, self.parts = self.parts, None
        if parts is None:
            return {**self._state(), "taken_by": self._token}
        return {**self._state(), **parts[0], "others": parts[1:]}

    def _state(self) -> dict[str, Any]:
        now = self._stage_start if self._validating else self._moment(True)
        return {
            **self._read(),
            "done": self._one_before_done if self._validating else self.done,
            "training": self._training,
            "validating": self._validating,
            "epoch_loss_due": self.epoch_loss_due,
            "stage_start": self._stage_start,
            "now": now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `state_dict` returned, also with another number of processes."""
        if state.get("taken_by") != self._token:
            state = self._choose([dict(state), *({**state, **own} for own in state.get("others", []))])
        self._write(state)
        self.done = self._done_before = state["done"]
        self.epoch_loss_due = state["epoch_loss_due"]
        self._only_validation = state["validating"]
        if self._only_validation:
            self._one_before_done, self.done = state["done"], state["epoch"]
        self._resumed_moment = state["now"]
        if state["training"]:
            self._place = Place(state["step"], state["data"], state["stage_start"], state["now"])
