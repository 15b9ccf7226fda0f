"""Goes back to the last good checkpoint after a spike of a loss or gradient norm, and trains on more carefully."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import tee
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_recipes import distributed
from amp_recipes.checkpoint import Checkpoint, find_newest, fit_of, make_newest
from amp_recipes.data import begin_again, beginning, can_begin_again, close_loader
from amp_recipes.errors import CheckpointError, ConfigError, DataError, NonfiniteError
from amp_recipes.loop.recovery.lowered_rates import LoweredRates
from amp_recipes.loop.recovery.spikes import SpikeWatch
from amp_recipes.loop.window import Window
from amp_recipes.precision import Update
from amp_recipes.records import RunSummary

logger = logging.getLogger(__name__)


class GoingBack(Exception):
    """The epoch ends here: the run continues from an earlier checkpoint, which is now the newest."""


def recovery_of(run: Any) -> SpikeRecovery | NoRecovery:
    """Return the recovery for the option `on_spike`. Raises ConfigError if the run cannot do it."""
    settings = run.settings
    if settings.on_spike == "off" or settings.test_only or not run.task.trains:
        return NoRecovery(run)
    if settings.on_spike == "wider_precision" and run.plan.training.dtype == torch.float32:
        raise ConfigError(
            f"on_spike is wider_precision, but precision {run.recipe.run_opts.precision} is fp32 already on this "
            "device, so there is no wider one. Set on_spike: lower_lr, or train in bf16 or fp16."
        )
    if settings.debug:
        logger.info("debug: on_spike has no effect, because no checkpoints are saved")
        return NoRecovery(run)
    return SpikeRecovery(run)


class NoRecovery:
    """Stands where `on_spike` is off: a run never goes back, and the watch costs nothing."""

    goes_back = going_back = False

    def __init__(self, run: Any) -> None:
        self._run = run

    def check_checkpoints(self) -> None:
        """Any checkpointer will do."""

    def adopt(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Rates are those of the schedule."""

    def rate_in_force(self, optimizer: Optimizer) -> Any:
        """The rate of the optimizer's first group in its next step; a copy where it is a tensor."""
        rate = optimizer.param_groups[0]["lr"]
        return rate.clone() if isinstance(rate, Tensor) else rate  # a scheduler may change a tensor in place

    def begin_fit(self) -> None:
        """Nothing is watched."""

    def begin(self, resumed: bool) -> None:
        """Nothing is watched."""

    def end_fit(self) -> None:
        """Nothing is watched."""

    def counters(self, epoch_counter: Iterable[int]) -> Iterator[Iterable[int]]:
        """The counter, once."""
        yield epoch_counter

    def go_back(self) -> None:
        """Never called: `going_back` is false."""

    def after_window(self) -> None:
        """Nothing is judged."""

    def allows_save(self) -> bool:
        """Whether what the run holds now may be saved."""
        return True

    def before_leaving(self) -> None:
        """Nothing is noted."""

    def numbers(self) -> dict[str, Any]:
        """Nothing for a checkpoint."""
        return {}

    def take_numbers(self, state: Mapping[str, Any]) -> None:
        """Show the counts of the run, also where it is only looked at."""
        _take_counts(self._run.summary, state.get("spikes"))


class SpikeRecovery:
    """Goes back after a spike, as the option `on_spike` asks.

    Each update's mean loss and gradient norms are judged when its result is known, so nothing more is read from the
    device. (With several processes, the means over all of them are judged, so that all decide alike: then the host
    waits for each update. It also does during a recovery.) A spike ends the epoch by `GoingBack`. The good checkpoint
    is written again as the newest one, with the recovery in it, and is then loaded: the run continues as it would after
    a kill at that moment. Checkpoints that were saved after the values left the band are deleted.

    A recovery lasts `spike_steps` updates, and at least one update more than the spike, whose batch comes again. Values
    outside the band are expected during a recovery, and have no effect. At its end the state is saved, if the values
    are inside the band. If `nonfinite_patience` runs out, that is a spike too, but during a recovery it ends the run.
    If the run cannot go back, it continues with a warning and with new bands. This happens when `spike_limit` is
    reached, or when no good checkpoint is newer than the last one that the run went back to.

    goes_back: a fit may go back to an earlier checkpoint; going_back: this one is about to.
    """

    goes_back = True

    def __init__(self, run: Any) -> None:
        settings = run.settings
        self._run = run
        self._watch = SpikeWatch(settings.spike_window, settings.spike_factor, settings.spike_patience)
        self._lowered_rates = LoweredRates(settings.spike_lr_factor)
        self._norms: list[tuple[str, float]] = []  # of the window that settles now
        self._unjudged: list[tuple[float, float, tuple[Any, ...]]] = []  # loss, its weight, what else was received
        self._out_of_patience: NonfiniteError | None = None
        self.going_back = False
        self._leaving = False  # what is saved now is not due, but the last thing before the process ends
        self._data_at_first: dict[str, Any] = {}
        self._frozen: list[str] | None = None  # parameters that did not train at the checkpoint that was loaded
        run.transient_buffers.keep()

    def check_checkpoints(self) -> None:
        """Raise ConfigError where there are no checkpoints that it could rewrite."""
        how, checkpoints = self._run.settings.on_spike, self._run.checkpoints
        if checkpoints.theirs:
            raise ConfigError(
                f"on_spike is {how}, which rewrites checkpoints, but the recipe uses SpeechBrain's Checkpointer. "
                "Leave `checkpointer` out and give an output_folder, or set on_spike: off."
            )
        if checkpoints.checkpointer is None:
            raise ConfigError(
                f"on_spike is {how}, which goes back to a checkpoint, but there is no output_folder, so no checkpoint "
                "is saved. Give --output_folder, or set on_spike: off."
            )

    def adopt(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Mind the steps of these optimizers."""
        if self._run.settings.on_spike == "lower_lr":
            self._lowered_rates.attach(optimizers)

    def rate_in_force(self, optimizer: Optimizer) -> Any:
        """The rate of the optimizer's first group in its next step; a copy where it is a tensor."""
        return self._lowered_rates.in_force(optimizer)

    # ------------------------------------------------------------------ the course of a fit

    def begin_fit(self) -> None:
        """A call of `fit` begins."""
        self._drop_readings()
        self._out_of_patience = None
        self._watch.begin(self._run.totals.fits + 1, self._run.totals.optimizer_step)
        self._spare_checkpoints()

    def _drop_readings(self) -> None:
        self._norms, self._unjudged = [], []
        self.going_back = self._leaving = False

    def begin(self, resumed: bool) -> None:
        """Training begins; a fit from its start saves first, to have something to go back to."""
        run = self._run
        train = run.fit.loaders["train"]
        if not can_begin_again(train):
            raise DataError(
                f"on_spike is {run.settings.on_spike}, which goes back in the training set, but the training set is "
                f"a {type(train).__name__}, which can be read only once. Give a torch Dataset, a list of batches, or "
                "an iterable that starts again with each iter()."
            )
        self._data_at_first = {name: beginning(loader) for name, loader in run.fit.loaders.items()}
        self._take_care(self._watch.until is not None)
        self._spare_checkpoints()
        self._note_spikes()
        if not (run.settings.ckpt_interval_steps or run.settings.ckpt_interval_minutes):
            logger.info(
                "on_spike will go back to the end of an epoch; to repeat less after a spike, set ckpt_interval_steps"
            )
        if not resumed and run.checkpoints.saves:
            run.saving.save_now(epoch=0)

    def end_fit(self) -> None:
        """The fit is over, or failed."""
        self._take_care(False)

    def counters(self, epoch_counter: Iterable[int]) -> Iterator[Iterable[int]]:
        """Yield the counter, again each time that the fit goes back; one without a state starts again."""
        if hasattr(epoch_counter, "state_dict"):
            while True:
                yield epoch_counter
        (again,) = tee(epoch_counter, 1)
        while True:
            again, counter = tee(again)
            yield counter

    def after_window(self) -> None:
        """Between two updates, on all processes: raises GoingBack if there is a spike and a place to go back to."""
        run = self._run
        if not run.in_fit:
            return
        if run.processes.many:
            run.pending.settle()
            for loss, weight, received in self._unjudged:  # norms of averaged gradients are the same in all processes
                self._judge(distributed.mean(loss, weight), *received)
            self._unjudged.clear()
        self._act()

    def allows_save(self) -> bool:
        """Whether what the run holds now may be saved; if not, the save is still due after the next update."""
        run = self._run
        run.pending.settle()
        self._act()
        if not self._is_calm() and not run.processes.is_to_end():
            return False
        if self._leaving:
            run.checkpoints.deletes = False
        return True

    def before_leaving(self) -> None:
        """Note, when a signal ends the run, whether this checkpoint would have been saved without the signal.

        A run that resumes after a signal must go back to the same place as without one. So a checkpoint outside of the
        intervals is not one to go back to, and does not begin an interval.
        """
        run = self._run
        run.pending.settle()
        due = 0 < run.settings.ckpt_interval_steps <= run.checkpoints.updates_since_save
        self._leaving = not (due and self._is_calm())

    def _is_calm(self) -> bool:
        """Whether a checkpoint of this moment would be one to go back to."""
        return self._watch.outside == 0 and self._run.plan.patience.in_a_row == 0

    # ------------------------------------------------------------------ what a checkpoint keeps

    def numbers(self) -> dict[str, Any]:
        """The state of the watch, and whether the checkpoint is one to go back to."""
        run = self._run
        # A recipe may save in the middle of an update, which has not been judged yet.
        judged = not len(run.pending) and not self._unjudged
        beside = {
            "judged": judged,
            "due": not self._leaving,
            "updates_since_save": run.checkpoints.updates_since_save if self._leaving else 0,
            "frozen": [name for name, each in run.saved_modules.named_parameters() if not each.requires_grad],
        }
        return {"spikes": {**self._watch.state_dict(), **beside}}

    def take_numbers(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `numbers` returned."""
        run = self._run
        spikes = state.get("spikes")  # None: saved before `on_spike` was set
        _take_counts(run.summary, spikes)
        if spikes is None:
            self._watch.begin(self._watch.fit, run.totals.optimizer_step)
        else:
            self._watch.load_state_dict(spikes)
            self._frozen = spikes["frozen"]
            run.checkpoints.updates_since_save = spikes["updates_since_save"]

    # ------------------------------------------------------------------ watching

    def on_update(self, update: Update, window: Window) -> None:
        """Note the norms of the gradients, and whether patience has run out."""
        run = self._run
        if update.taken:
            self._norms += update.grad_norms.items()
        if run.in_fit and run.plan.patience.exhausted and self._watch.until is None:
            self._out_of_patience = run.plan.patience.take_verdict()  # not to be raised before going back was tried

    def on_window(self, window: Window) -> None:
        """Judge the window's update, at once or with the other processes."""
        run = self._run
        norms, self._norms = self._norms, []
        if not window.taken:
            return
        received = norms, window.in_pass.where(window.step), run.totals.optimizer_step
        if run.processes.many:
            weight = sum(window.weights) if run.weighted else len(window.weights)
            self._unjudged.append((run.loss_of(window), float(weight), received))
        else:
            self._judge(run.loss_of(window), *received)

    def _judge(self, loss: float, norms: list[tuple[str, float]], where: str, update: int) -> None:
        self._watch.observe(loss, norms, where, update)
        self._spare_checkpoints()

    def _spare_checkpoints(self) -> None:
        """Until it is known whether a value outside is a spike, what was saved before it stays."""
        self._run.checkpoints.deletes = self._watch.outside == 0 or self._watch.until is not None

    # ------------------------------------------------------------------ acting

    def _act(self) -> None:
        """Do what follows from what is judged: end the recovery, or go back."""
        run, watch = self._run, self._watch
        if watch.until is not None and run.optimizer_step >= watch.until:
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
            self.going_back = True
            raise GoingBack
        if error is not None:
            raise NonfiniteError(f"{error} on_spike cannot go back: {why_not}.")
        logger.warning("%s. Training continues without going back: %s", watch.last, why_not)
        watch.accept_level()

    def _prepare(self, error: NonfiniteError | None) -> tuple[str | None, str | None]:
        """Make the last good checkpoint the newest, with a recovery in it.

        error: what the run would end with; None if a band was left. Returns why there is none to go back to, and why it
        could not be written; both None if all went well.
        """
        run, watch = self._run, self._watch
        if watch.went_back >= run.settings.spike_limit:
            return (
                f"it has already gone back {watch.went_back} times, and spike_limit is {run.settings.spike_limit}"
            ), None
        try:
            run.checkpoints.wait()
        except CheckpointError as failed:
            logger.warning("the last save failed: %s", failed)
        checkpointer = run.checkpoints.checkpointer
        try:
            found = find_newest(checkpointer, "brain", self._is_good)
            if found is None:
                return "there is no good checkpoint from before it", None
            checkpoint, states = found
            place = states["brain"]["optimizer_step"]
            if watch.went_back_to is not None and place <= watch.went_back_to:
                return f"it already went back to update {place}, and has saved no good checkpoint since", None
            again = watch.last.update if error is None else run.totals.optimizer_step + 1
            until = max(place + run.settings.spike_steps, again + 1)  # the update after it shows whether that helped
            states["brain"]["spikes"] = self._recovering(states["brain"].get("spikes"), place, until)
            newest = make_newest(checkpointer, checkpoint, states)
        except CheckpointError as failed:
            return None, str(failed)
        lowers = run.settings.on_spike == "lower_lr"
        care = f"learning rates multiplied by {run.settings.spike_lr_factor:g}" if lowers else "in fp32"
        logger.warning(
            "%s. Going back to %s (update %d), saved again as %s. Until update %d: %s",
            *(watch.last if error is None else error, checkpoint.path, place, newest.path.name, until, care),
        )
        return None, None

    def _recovering(self, saved: Mapping[str, Any] | None, place: int, until: int) -> dict[str, Any]:
        """The state of a watch at the place gone back to, in a recovery; saved: what the checkpoint had."""
        beside = {"due": True, "updates_since_save": 0, "frozen": None, **(saved or {})}
        return {**beside, **self._watch.gone_back(saved, place, until)}

    def _is_good(self, checkpoint: Checkpoint, brain: Mapping[str, Any]) -> bool:
        saved = brain.get("spikes")
        of_this_fit = saved is not None or fit_of(checkpoint) == self._run.totals.fits
        due = saved is None or saved["due"]
        calm = self._watch.is_good(brain["optimizer_step"], saved) and brain["patience"]["in_a_row"] == 0
        return of_this_fit and due and calm

    def go_back(self) -> None:
        """Restore everything from the newest checkpoint; values that it lacks are as at the beginning of the fit."""
        run = self._run
        for loader in run.fit.loaders.values():
            close_loader(loader)
        self._lowered_rates.put_back()
        self._drop_readings()
        run.forget_course()
        run.fit.restart()
        run.recipe.zero_grad(set_to_none=True)
        run.checkpoints.reload()
        for name, parameter in run.saved_modules.named_parameters() if self._frozen is not None else ():
            parameter.requires_grad_(name not in self._frozen)
        run.resume.after_restore()
        snapshot = run.fit.position.take_snapshot()
        run.recipe_state.put_back(snapshot["recipe"])
        for name, loader in run.fit.loaders.items():
            begin_again(loader, self._data_at_first[name])
        run.resume.restore(snapshot)
        self._take_care(True)
        self._spare_checkpoints()
        self._note_spikes()

    def _end_recovery(self) -> None:
        run, watch = self._run, self._watch
        watch.until = None
        self._take_care(False)
        if not self._is_calm():
            logger.warning("the recovery did not help. %s", watch.last or "The last update was not finite")
            return
        logger.info("%s: recovered; the usual settings apply again", run.current.where())
        if run.checkpoints.saves:
            run.saving.save_inside_epoch()

    def _take_care(self, on: bool) -> None:
        """Train as a recovery asks from now on, or as ever."""
        run, how = self._run, self._run.settings.on_spike
        self._lowered_rates.put_back()
        self._lowered_rates.active = on and how == "lower_lr"
        if how == "wider_precision" and run.plan.widened != on:
            run.plan.widen(on)
        run.log.recovery = how if on else None

    def _note_spikes(self) -> None:
        summary = self._run.summary
        summary.spikes, summary.went_back = self._watch.spikes, self._watch.went_back


def _take_counts(summary: RunSummary, spikes: Mapping[str, Any] | None) -> None:
    if summary.spikes is not None and spikes is not None:
        summary.spikes, summary.went_back = spikes["spikes"], spikes["went_back"]
