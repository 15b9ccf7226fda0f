"""Goes back to the last good checkpoint when a loss or a gradient norm has left its band, and on with more care."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import tee
from typing import Any

import torch

from amp_recipes import distributed
from amp_recipes.checkpoint import Checkpoint, Checkpointer, find_newest, fit_of, make_newest
from amp_recipes.data import begin_again, beginning, can_begin_again, close_loader
from amp_recipes.errors import CheckpointError, ConfigError, DataError, NonfiniteError
from amp_recipes.loop.ledger import Ledger, Window
from amp_recipes.loop.recovery.lowered_rates import LoweredRates
from amp_recipes.loop.recovery.spikes import SpikeWatch
from amp_recipes.loop.rehearsal import ExaminedRun
from amp_recipes.precision import Update

logger = logging.getLogger(__name__)


class GoingBack(Exception):
    """The epoch ends here: the run goes on from an earlier checkpoint, which is the newest now."""


class SpikeRecovery(ExaminedRun):
    """Base of `Brain`: what the option `on_spike` asks for. Off, it costs nothing.

    Each update's mean loss and gradient norms are judged when the ledger has settled them, so nothing more is read from
    the device. (With several processes the means over all of them are judged, so that all decide alike: then the host
    waits for each update. In a recovery it does so too.) A spike ends the epoch by `GoingBack`. The checkpoint gone
    back to is written again as the newest, with the recovery in it, and then loaded: the run goes on as it would after
    a kill at that moment. What was saved since the band was left is deleted.

    A recovery lasts `spike_steps` updates, and at least one past that which spiked, whose batch comes again. What lies
    outside meanwhile is expected, and leads nowhere until it ends; then the state is saved, if it lies in its band.
    `nonfinite_patience` that runs out is a spike too, but in a recovery it ends the run. The run goes on as it is, with
    a warning and with new bands, where it cannot go back: `spike_limit` is reached, or no good checkpoint is newer than
    the place gone back to before.
    """

    # ------------------------------------------------------------------ set-up

    def _set_up_counters(self) -> None:
        super()._set_up_counters()
        self._spikes: SpikeWatch | None = None
        self._lowered_rates = LoweredRates(self.spike_lr_factor)
        self._norms: list[tuple[str, float]] = []  # of the window that settles now
        self._unjudged: list[tuple[float, float, tuple[Any, ...]]] = []  # loss, its weight, what else was heard
        self._out_of_patience: NonfiniteError | None = None
        self._going_back = False
        self._data_at_first: dict[str, Any] = {}
        self._leaving = False  # what is saved now is not due, but the last thing before the process ends
        self._frozen: list[str] | None = None  # parameters that did not train at the checkpoint that was loaded
        if self.on_spike == "off" or self.test_only or self.run_opts.purpose.action != "train":
            return
        if self.on_spike == "wider_precision" and self._plan.training.dtype == torch.float32:
            raise ConfigError(
                f"on_spike is wider_precision, but precision is {self.run_opts.precision}, which is fp32 here: there "
                "is no wider one. Set on_spike: lower_lr, or train in bf16 or fp16."
            )
        if self.debug:
            logger.info("debug: on_spike does nothing, since no checkpoints are saved")
            return
        self._spikes = SpikeWatch(self.spike_window, self.spike_factor, self.spike_patience)
        self._ledger = Ledger(self.device, self._hear_update, self._hear_window)
        self._transient_buffers.keep()
        self._goes_back = True

    def _set_up_checkpoints(self, checkpointer: Checkpointer | None) -> None:
        super()._set_up_checkpoints(checkpointer)
        if self._spikes is not None and self._checkpoints.theirs:
            raise ConfigError(
                f"on_spike is {self.on_spike}, which rewrites checkpoints, but the recipe brings SpeechBrain's "
                "Checkpointer: leave `checkpointer` out and give an output_folder, or leave on_spike off."
            )
        if self._spikes is not None and self.checkpointer is None:
            raise ConfigError(
                f"on_spike is {self.on_spike}, which goes back to a checkpoint, but there is no output_folder to save "
                "any in: give --output_folder, or leave on_spike off."
            )

    def _adopt_optimizers(self) -> None:
        schedulers = self._schedulers
        super()._adopt_optimizers()
        if self._spikes is not None and self.on_spike == "lower_lr" and self._schedulers is not schedulers:
            self._lowered_rates.attach(self.optimizers_dict)

    # ------------------------------------------------------------------ the course of a fit

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._norms, self._unjudged, self._out_of_patience = [], [], None
        self._going_back = self._leaving = False
        if self._spikes is not None:
            self._spikes.begin(self._fits + 1, self._optimizer_step)
            self._spare_checkpoints()

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            with super()._fitting():
                yield
        finally:
            self._take_care(False)

    def _begin(self) -> None:
        """Take up what was resumed; a fit from its start saves first, to have something to go back to."""
        moment = self._position.take_moment()
        self._take_up(moment)
        self._log.load_state_dict(self._logs_at)
        if self._spikes is None:
            return
        train = self._loaders["train"]
        if not can_begin_again(train):
            raise DataError(
                f"on_spike is {self.on_spike}, which goes back in the training set, but that is a "
                f"{type(train).__name__}, which can be read once. Give a torch Dataset, a list of batches, or an "
                "iterable that begins anew with each iter()."
            )
        self._data_at_first = {name: beginning(loader) for name, loader in self._loaders.items()}
        self._take_care(self._spikes.until is not None)
        self._spare_checkpoints()
        self._note_spikes()
        if not (self.ckpt_interval_steps or self.ckpt_interval_minutes):
            logger.info("on_spike goes back to the end of an epoch: with ckpt_interval_steps less is to be done again")
        if moment is None and self._checkpoints.saves:
            super()._save_inside_epoch(0)

    def _epochs(self, epoch_counter: Iterable[int]) -> Iterator[int]:
        """The epochs that are left to train, some of them again; asks for the next only if there is to be one."""
        remembers = self._spikes is not None and not hasattr(epoch_counter, "state_dict")
        if remembers:
            (again,) = tee(epoch_counter, 1)
        while True:
            if remembers:
                again, epoch_counter = tee(again)
            yield from self._epochs_left(epoch_counter)
            if not self._going_back:
                return
            self._go_back()

    def _after_window(self, epoch: int) -> None:
        self._look_for_spike()
        super()._after_window(epoch)

    def _settle_training(self) -> None:
        """The epoch's last update is known, and judged."""
        self._ledger.settle()
        self._look_for_spike()

    def _save_inside_epoch(self, epoch: int | None) -> None:
        if self._spikes is not None:
            self._ledger.settle()
            self._act()
            if not self._is_calm() and not self._is_to_end:
                return  # it is still due after the next update
            if self._leaving:
                self._checkpoints.deletes = False
        super()._save_inside_epoch(epoch)

    def _save_and_leave(self, epoch: int | None) -> None:
        # A run that goes on after a signal must go back to where it would have without one: what is saved beside the
        # intervals is no checkpoint to go back to, and does not begin an interval.
        if self._spikes is not None:
            self._ledger.settle()
            due = 0 < self.ckpt_interval_steps <= self._checkpoints.updates_since_save
            self._leaving = not (due and self._is_calm())
        super()._save_and_leave(epoch)

    def _is_calm(self) -> bool:
        """Whether a checkpoint of this moment would be one to go back to."""
        return self._spikes.outside == 0 and self._plan.patience.in_a_row == 0

    # ------------------------------------------------------------------ what a checkpoint keeps

    def _numbers(self) -> dict[str, Any]:
        numbers = super()._numbers()
        if self._spikes is None:
            return numbers
        # A recipe may save in the middle of an update, which nobody has judged yet.
        judged = not len(self._ledger) and not self._unjudged
        beside = {
            "judged": judged,
            "due": not self._leaving,
            "updates_since_save": self._checkpoints.updates_since_save if self._leaving else 0,
            "frozen": [name for name, it in self._saved_modules.named_parameters() if not it.requires_grad],
        }
        return {**numbers, "spikes": {**self._spikes.state_dict(), **beside}}

    def _take_numbers(self, state: Mapping[str, Any]) -> None:
        super()._take_numbers(state)
        spikes = state.get("spikes")  # None: saved before `on_spike` was set
        if self.on_spike != "off" and spikes is not None:
            self.summary.spikes, self.summary.went_back = spikes["spikes"], spikes["went_back"]
        if self._spikes is None:
            return
        if spikes is None:
            self._spikes.begin(self._spikes.fit, self._optimizer_step)
        else:
            self._spikes.load_state_dict(spikes)
            self._frozen = spikes["frozen"]
            self._checkpoints.updates_since_save = spikes["updates_since_save"]

    # ------------------------------------------------------------------ watching

    def _hear_update(self, update: Update, window: Window) -> None:
        self._on_update(update, window)
        if update.taken:
            self._norms += update.grad_norms.items()
        if self._in_fit and self._plan.patience.exhausted and self._spikes.until is None:
            self._out_of_patience = self._plan.patience.take_verdict()  # not to be raised before going back was tried

    def _hear_window(self, window: Window) -> None:
        norms, self._norms = self._norms, []
        self._on_window(window)
        if window.taken:
            heard = norms, self._where(window.step), self._optimizer_step
            if distributed.initialized():
                weight = sum(window.weights) if self._own_batch_weight else len(window.weights)
                self._unjudged.append((self._loss_of(window), float(weight), heard))
            else:
                self._judge(self._loss_of(window), *heard)

    def _judge(self, loss: float, norms: list[tuple[str, float]], where: str, update: int) -> None:
        self._spikes.observe(loss, norms, where, update)
        self._spare_checkpoints()

    def _spare_checkpoints(self) -> None:
        """Until it is known whether a value outside is a spike, what was saved before it stays."""
        self._checkpoints.deletes = self._spikes.outside == 0 or self._spikes.until is not None

    def _loss_of(self, window: Window) -> float:
        """The loss that the window's update was made from: the mean over its batches."""
        losses = window.losses
        shares = window.weights if self._own_batch_weight else [1.0] * len(losses)
        total = sum(loss * share for loss, share in zip(losses, shares, strict=True))
        return total / (sum(shares) or float("nan"))

    def _look_for_spike(self) -> None:
        """Between two updates, on all processes: raises GoingBack if there is one and a checkpoint to go back to."""
        if self._spikes is None or not self._in_fit:
            return
        if distributed.initialized():
            self._ledger.settle()
            for loss, weight, heard in self._unjudged:  # norms are of averaged gradients: the same everywhere
                self._judge(distributed.mean(loss, weight), *heard)
            self._unjudged.clear()
        self._act()

    # ------------------------------------------------------------------ acting

    def _act(self) -> None:
        """Do what follows from what is judged: end the recovery, or go back."""
        watch = self._spikes
        if watch.until is not None:
            self._ledger.settle()
            if self._optimizer_step >= watch.until:
                self._end_recovery()
        if not watch.spiked and self._out_of_patience is None:
            return
        watch.spikes += 1
        self._note_spikes()
        error, self._out_of_patience = self._out_of_patience, None
        prepared = self._prepare(error) if distributed.is_main_process() else None
        why_not, failed = distributed.from_main_process(prepared)
        if failed:
            raise CheckpointError(failed)
        if why_not is None:
            self._going_back = True
            raise GoingBack
        if error is not None:
            raise NonfiniteError(f"{error} on_spike does not go back: {why_not}.")
        logger.warning("%s. Training goes on as it is: %s", watch.last, why_not)
        watch.accept_level()

    def _prepare(self, error: NonfiniteError | None) -> tuple[str | None, str | None]:
        """Make the last good checkpoint the newest, with a recovery in it.

        error: what the run would end with; None if a band was left. Returns why there is none to go back to, and why it
        could not be written; both None if all went well.
        """
        watch = self._spikes
        if watch.went_back >= self.spike_limit:
            return f"it has gone back {watch.went_back} times, and spike_limit is {self.spike_limit}", None
        try:
            self._checkpoints.wait()
        except CheckpointError as failed:
            logger.warning("the last save failed: %s", failed)
        try:
            found = find_newest(self.checkpointer, "brain", self._is_good)
            if found is None:
                return "no checkpoint is from before it", None
            checkpoint, states = found
            brain = states["brain"]
            place = brain["optimizer_step"]
            if watch.went_back_to is not None and place <= watch.went_back_to:
                return f"it went back to update {place} before, and has saved no good state since", None
            again = watch.last.update if error is None else self._optimizer_step + 1
            until = max(place + self.spike_steps, again + 1)  # the update after it tells whether that has helped
            saved = brain.get("spikes")
            beside = {"due": True, "updates_since_save": 0, "frozen": None, **(saved or {})}
            brain["spikes"] = {**beside, **watch.gone_back(saved, place, until)}
            newest = make_newest(self.checkpointer, checkpoint, states)
        except CheckpointError as failed:
            return None, str(failed)
        care = f"learning rates times {self.spike_lr_factor:g}" if self.on_spike == "lower_lr" else "in fp32"
        logger.warning(
            "%s. Going back to %s (update %d), now also %s; until update %d: %s",
            *(watch.last if error is None else error, checkpoint.path, place, newest.path.name, until, care),
        )
        return None, None

    def _is_good(self, checkpoint: Checkpoint, brain: Mapping[str, Any]) -> bool:
        saved = brain.get("spikes")
        of_this_fit = saved is not None or fit_of(checkpoint) == self._fits
        due = saved is None or saved["due"]
        calm = self._spikes.is_good(brain["optimizer_step"], saved) and brain["patience"]["in_a_row"] == 0
        return of_this_fit and due and calm

    def _go_back(self) -> None:
        """Take everything from the newest checkpoint; what it knows nothing of is as it was when the fit began."""
        self._going_back = self._leaving = False
        for loader in self._loaders.values():
            close_loader(loader)
        self._lowered_rates.put_back()
        super()._start_afresh()
        self._norms, self._unjudged = [], []
        self.zero_grad(set_to_none=True)
        self._checkpoints.reload()
        for name, parameter in self._saved_modules.named_parameters() if self._frozen is not None else ():
            parameter.requires_grad_(name not in self._frozen)
        self._go_on()
        moment = self._position.take_moment()
        self._recipe_state.put_back(moment["recipe"])
        for name, loader in self._loaders.items():
            begin_again(loader, self._data_at_first[name])
        self._take_up(moment)
        self._take_care(True)
        self._spare_checkpoints()
        self._note_spikes()

    def _end_recovery(self) -> None:
        watch = self._spikes
        watch.until = None
        self._take_care(False)
        if not self._is_calm():
            logger.warning("the recovery has not helped. %s", watch.last or "The last update was not finite")
            return
        logger.info("%s: recovered; from here on as before", self._where(self.step))
        if self._checkpoints.saves:
            self._save_inside_epoch(self._epoch)

    def _take_care(self, on: bool) -> None:
        """Train as a recovery asks from now on, or as ever."""
        self._lowered_rates.put_back()
        self._lowered_rates.active = on and self.on_spike == "lower_lr"
        if self.on_spike == "wider_precision" and self._plan.widened != on:
            self.training_ctx = self._plan.widen(on)
        self._log.recovery = self.on_spike if on else None

    def _note_spikes(self) -> None:
        self.summary.spikes, self.summary.went_back = self._spikes.spikes, self._spikes.went_back
