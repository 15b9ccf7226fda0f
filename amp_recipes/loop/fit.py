"""Trains the epochs of one call of `fit`, window by window."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from amp_recipes import distributed
from amp_recipes.data import LoadingStopped, as_epochs, close_loader, loader_faults, windows
from amp_recipes.errors import CheckpointError, DataError, RecipeError
from amp_recipes.interrupts import RunInterrupted
from amp_recipes.loop.evaluation import evaluate
from amp_recipes.loop.recovery.recovery import GoingBack
from amp_recipes.loop.replays import Replays
from amp_recipes.loop.runnable import Runnable
from amp_recipes.loop.window import Shares, Window
from amp_recipes.stage import Stage
from amp_recipes.state.position import Position, Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitCall:
    """What `Brain.fit` was called with."""

    epoch_counter: Iterable[int]
    train_set: Any
    valid_set: Any = None
    progressbar: bool | None = None
    train_loader_kwargs: Mapping[str, Any] = field(default_factory=dict)
    valid_loader_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Fit:
    """One call of `fit`, from its first epoch or from where a checkpoint left it.

    loaders: by name, `train` and `valid` (None without a validation set); empty before and after the fit.
    position: the place in it; replays: of its steps that went nonfinite; runnable: tells
    what the device cannot run.
    """

    def __init__(
        self, run: Any, epoch_counter: Iterable[int] = (), loaders: Mapping[str, Iterable[Any] | None] = {}
    ) -> None:
        self._run = run
        self.epoch_counter = epoch_counter
        self.loaders = dict(loaders)
        self.position = Position(self._snapshot)
        # The log's data on the stage, and the loggers' states, in the checkpoint from which the fit resumes.
        self._stage_so_far: Mapping[str, float] = {}
        self._logs_at_save: Mapping[str, Any] = {}
        self.replays = Replays(run)
        self.runnable = Runnable(run)

    @classmethod
    def of(cls, run: Any, call: FitCall) -> Fit:
        """The fit that a call asks for, with its loaders made."""
        overfit = run.settings.overfit_batches
        train = run.feed.batches_of(call.train_set, Stage.TRAIN, call.train_loader_kwargs)
        valid = None
        if overfit > 0:
            train = list(islice(train, overfit))
            valid = train if call.valid_set is not None else None
        elif call.valid_set is not None:
            valid = run.feed.batches_of(call.valid_set, Stage.VALID, call.valid_loader_kwargs)
        return cls(run, as_epochs(call.epoch_counter), {"train": train, "valid": valid})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the place in a checkpoint."""
        self.position.load_state_dict(state)
        self._stage_so_far, self._logs_at_save = state["stage_so_far"], state.get("logs", {})

    def restart(self) -> None:
        """Forget the place: a checkpoint that is about to be loaded has another."""
        self.position, self._stage_so_far = Position(self._snapshot), {}
        self.replays = Replays(self._run)

    def _snapshot(self, with_recipe: bool) -> Snapshot:
        return self._run.resume.snapshot(with_recipe)

    def train(self, progressbar: bool | None) -> None:
        """Train the epochs that are left, validating after each."""
        run = self._run
        run.begin_fit(self)
        if run.totals.trained:
            run.warn_of_rates_at_zero()
        run.recipe.on_fit_start()
        run.settings.warn_of_late_ones()
        if run.resume.fit_is_over():
            logger.warning("fit() skipped: the newest checkpoint is from a later fit() of this script")
            run.totals.fits += 1
            return
        with self._under_way(), run.logging(progressbar):
            self._begin()
            for epoch in self._epochs():
                with suppress(GoingBack):  # `_epochs` then yields it, or an earlier one, again
                    self._train_and_validate(epoch)
            self._say_what_was_done()

    def _begin(self) -> None:
        """Restore what comes last of a checkpoint: the recipe's memory, the random generators, the logs."""
        snapshot = self.position.take_snapshot()
        self._run.resume.restore(snapshot)
        self._run.log.load_state_dict(self._logs_at_save)
        self._run.recovery.begin(resumed=snapshot is not None)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """The fit is under way: signals are waited out, and what it saves is on the disk when it ends."""
        run = self._run
        with run.under_way():
            try:
                with run.interrupts:
                    yield
                    with run.interrupts.saving():
                        run.checkpoints.finish()
                    # It came after the last step: all is saved.
                    if run.saving.asked_to_end(max(distributed.gather(run.saving.signal))):
                        run.interrupts.leave("training has ended and is saved")
            except BaseException as error:
                with suppress(CheckpointError):  # the first exception is the one to raise
                    run.checkpoints.wait()
                if isinstance(error, SystemExit) and not isinstance(error, RunInterrupted) and run.processes.many:
                    raise RecipeError(
                        f"sys.exit({error.code!r}) inside fit ends this process, but the others continue"
                    ) from error
                raise
            finally:
                for loader in self.loaders.values():
                    close_loader(loader)
                self.loaders = {}
                run.recovery.end_fit()

    # ------------------------------------------------------------------ epochs

    def _epochs(self) -> Iterator[int]:
        """The epochs that are left to train, some of them again; asks for the next only if there is to be one."""
        recovery = self._run.recovery
        for counter in recovery.counters(self.epoch_counter):
            yield from self._epochs_left(counter)
            if not recovery.going_back:
                return
            recovery.go_back()

    def _epochs_left(self, counter: Iterable[int]) -> Iterator[int]:
        settings = self._run.settings
        if self._is_finished() and not self.position.only_validation:
            return
        left = (epoch for epoch in counter if not self.position.is_done(epoch))
        for epoch in islice(left, settings.debug_epochs if settings.debug else None):
            yield epoch
            if self._run.recovery.going_back or self._is_finished():
                return

    def _train_and_validate(self, epoch: int) -> None:
        run = self._run
        if run.totals.optimizer_step:
            run.schedulers.warn_if_spent(epoch)
        run.totals.trained = True
        if not self.position.take_only_validation():
            self._train_epoch(epoch)
        if self.loaders["valid"] is not None:
            evaluate(run, self.loaders["valid"], Stage.VALID, epoch)
        self._end_epoch(epoch, run.current.results)

    def _train_epoch(self, epoch: int) -> None:
        """Train once over the loader, window by window."""
        run, loader = self._run, self.loaders["train"]
        current = self._training_pass(epoch)
        so_far, self._stage_so_far = self._stage_so_far, {}
        run.start_pass(current, loader, so_far)
        run.adopt_optimizers()  # a hook may have put in new ones
        run.plan.updates.buffers.watch()  # evaluation and hooks may have changed buffers
        try:
            with loader_faults(loader):
                batches = run.log.timed(run.resume.training_batches(loader))
                size = run.settings.grad_accumulation_factor
                for of_window, shares in run.processes.windows(windows(batches, size)):
                    self._train_window(of_window, shares)
                    if self._step_limit_reached():
                        break
                    run.recovery.after_window()
                    run.saving.after_window(shares)
        except LoadingStopped:
            run.saving.save_and_leave()
        if not any(distributed.gather(current.step)):
            raise DataError(f"epoch {epoch}: the training set has no batches (is it an iterator that is used up?)")
        run.pending.settle()
        self.replays.explain_skips()
        run.recovery.after_window()
        run.log.count_training()
        run.end_pass(current)
        self.position.epoch_done(epoch)
        current.step = 0

    def _training_pass(self, epoch: int) -> Any:
        """The pass of the epoch; resumed inside it, with the average and the metrics of what is done."""
        run, done = self._run, self.position.steps_done
        current = run.train_pass if done else run.new_train_pass(epoch)
        current.epoch, current.step = epoch, done
        return current

    def _train_window(self, batches: Sequence[Any], shares: Shares) -> None:
        """One iteration: the batches whose gradients make one update."""
        run = self._run
        window = Window(run, run.current, shares, len(batches), self.replays.before_step(batches))
        run.pending.open(window)
        run.task.watch.before_window(run, batches)
        with self.runnable.blaming_precision(batches, window.before):
            losses = window.take(batches)
        window.samples = shares.samples
        run.plan.updates.update_scale()
        run.plan.updates.drop_losses()
        run.log.advance(len(losses), window.samples)
        run.pending.end(losses, run.current.step, run.plain_losses)
        self.replays.explain_skips(window)
        run.pinning.after_window()
        if run.checks:
            run.check_first_windows()
        run.task.watch.after_window(run, losses)

    def _end_epoch(self, epoch: int, results: Mapping[str, float]) -> None:
        """What follows from the epoch's last stage: schedulers, the best so far, a checkpoint."""
        run = self._run
        run.processes.warn_of_differing_weights()
        run.schedulers.after_epoch(results["loss"])
        self.position.epoch_loss_due = None
        run.best.observe(results, epoch)
        run.note_best()
        meta = {**results, "epoch": epoch, "optimizer_step": run.totals.optimizer_step, "fit": run.totals.fits}
        mode = run.settings.early_stop_mode if run.settings.early_stop_metric else "min"
        run.checkpoints.save_epoch(meta, run.best.metric, mode)
        distributed.wait_for_all()

    # ------------------------------------------------------------------ the end

    def _is_finished(self) -> bool:
        run = self._run
        if run.settings.early_stop_metric and run.best.exhausted:
            logger.info("stopped early: %s", run.best)
            return True
        return self._step_limit_reached()

    def _step_limit_reached(self) -> bool:
        run, limit = self._run, self._run.settings.optimizer_step_limit
        if run.task.watch.is_over:
            return True
        if not limit or run.totals.optimizer_step + len(run.pending) < limit:
            return False  # not even if all that is under way is taken: no need to wait for it
        return run.optimizer_step >= limit

    def _say_what_was_done(self) -> None:
        """Say what a user may not expect of a fit that ended without an error."""
        run = self._run
        if not run.totals.trained:
            logger.warning("nothing was trained: the run had already ended, or the epoch counter is at its limit")
        elif run.skipped_steps and not run.optimizer_step:
            logger.warning("nothing was learned: all %d updates were skipped", run.skipped_steps)
