"""The training loop: fit -> fit_epoch -> fit_batch -> optimizers_step.

`Brain` decides the order of things and delegates the things themselves: dtypes and updates to `precision`, files to
`checkpoint`, processes to `distributed`, records to `loggers`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice
from typing import Any

import torch

from amp_recipes import distributed
from amp_recipes.data import LoadingStopped, as_epochs, batch_length, length, loader_faults, set_epoch, windows
from amp_recipes.errors import CheckpointError, DataError, RecipeError
from amp_recipes.loop.hooks import Stage
from amp_recipes.loop.ledger import Window
from amp_recipes.loop.loss_average import LossAverage
from amp_recipes.loop.metrics import StageMetrics
from amp_recipes.loop.recovery.recovery import GoingBack, SpikeRecovery
from amp_recipes.precision import Update, as_scalar, clear_gradients
from amp_recipes.precision.host_copy import Ticket

logger = logging.getLogger(__name__)


class Brain(SpikeRecovery):
    """Trains and evaluates `modules`; subclass it with `compute_forward` and `compute_objectives`.

    modules: name -> nn.Module, moved to the device; opt_class: takes parameters, returns an optimizer; hparams:
    what `load_hparams` returned (keys named like run options are run options); run_opts: a dict or `RunOptions`,
    wins over `hparams`; checkpointer: the recipe's own, which then decides itself when to save. Without one, and
    with `output_folder`, the Brain keeps its own: saved after every epoch, the best and the newest kept.

    Every run option is an attribute of its name. Raises ConfigError, PrecisionError, RecipeError for what cannot run.
    """

    # ------------------------------------------------------------------ fit

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] = {},
        valid_loader_kwargs: Mapping[str, Any] = {},
    ) -> None:
        """Train over the epochs of `epoch_counter`, validating after each.

        train_set, valid_set: a torch Dataset, or a list for which loader kwargs are given, yields samples (a loader is
        made of it); a DataLoader or any other iterable yields batches. progressbar: default, not `noprogressbar`.
        """
        if self._done_instead(train_set, train_loader_kwargs):
            return
        if self.test_only:
            logger.info("test_only is set: fit does nothing")
            return
        train_loader = self._batches_of(train_set, Stage.TRAIN, train_loader_kwargs)
        valid_loader = None
        if self.overfit_batches > 0:
            train_loader = list(islice(train_loader, self.overfit_batches))
            valid_loader = train_loader if valid_set is not None else None
        elif valid_set is not None:
            valid_loader = self._batches_of(valid_set, Stage.VALID, valid_loader_kwargs)
        self._epoch_counter, self._loaders = as_epochs(epoch_counter), {"train": train_loader, "valid": valid_loader}
        self._start_afresh()
        if self._trained:
            self._warn_of_rates_at_zero()
        self.on_fit_start()
        if self._is_over():
            logger.warning("this fit was over already: a later one saved the newest checkpoint")
            self._fits += 1
            return
        with self._fitting(), self._logging(progressbar):
            self._begin()
            for epoch in self._epochs(epoch_counter):
                with suppress(GoingBack):  # `_epochs` then yields it, or an earlier one, again
                    self._trained = True
                    if not self._position.take_only_validation():
                        self.fit_epoch(train_loader, epoch)
                    if valid_loader is not None:
                        self._evaluate_stage(valid_loader, Stage.VALID, epoch)
                    self._end_epoch(epoch)
            self._note_end()

    def _epochs_left(self, epoch_counter: Iterable[int]) -> Iterator[int]:
        """The epochs that are left to train, unless one goes back; asks for the next only if there is to be one."""
        if self._finished() and not self._position.only_validation:
            return
        left = (epoch for epoch in epoch_counter if not self._position.is_done(epoch))
        for epoch in islice(left, self.debug_epochs if self.debug else None):
            yield epoch
            if self._going_back or self._finished():
                return

    def fit_epoch(self, train_loader: Iterable[Any], epoch: int) -> None:
        """Train once over the loader, window by window."""
        self.step = self._position.steps_done
        self._start_stage(Stage.TRAIN, epoch, train_loader)
        self._adopt_optimizers()  # a hook may have put in new ones
        self._plan.updates.buffers.watch()  # evaluation and hooks may have changed buffers
        try:
            with loader_faults(train_loader):
                batches = self._training_batches(train_loader)
                for window in self._in_step(windows(self._log.timed(batches), self.grad_accumulation_factor)):
                    self._fit_window(window)
                    if self._step_limit_reached():
                        break
                    self._after_window(epoch)
        except LoadingStopped:
            self._save_and_leave(epoch)
        if not any(distributed.gather(self.step)):
            raise DataError(f"epoch {epoch}: the training set yielded no batch (is it an iterator that is used up?)")
        self._settle_training()
        self._log.count_training()
        self._end_stage(Stage.TRAIN, epoch)
        self._position.epoch_done(epoch)
        self.step = 0

    def _fit_window(self, batches: Sequence[Any]) -> None:
        """One iteration: the batches whose gradients make one update."""
        weights, samples = self._weigh(batches) if self._round is None else (self._round.weights, 0)
        before = self._before_step(batches)
        self._ledger.open(weights, samples, before)
        metrics = self._window_sums = StageMetrics()
        with self._blaming_precision(batches, before):
            losses = self._take_batches(batches, weights)
        if self._round is not None:
            samples = self._round.samples
        self._plan.updates.update_scale()
        self._plan.updates.drop_losses()
        self._window_sums = None
        self._log.advance(len(losses), samples)
        self._ledger.end(losses, self.step, self._plain_losses, self._stepped_by_hand, metrics, samples)
        self._plan.report_dead_pins()
        self._reach.report(self, self.modules, self.optimizers_dict)
        if self._own_fit_batch:
            self._plan.report_missing_context()

    def _take_batches(self, batches: Sequence[Any], weights: Sequence[float]) -> list[torch.Tensor]:
        """`fit_batch` on each batch of a window; what it returned.

        weights: what each counts for; batches beyond them only keep up with other processes.
        """
        self._stepped_by_hand = False
        self._window_size, self._window_weight = len(batches), sum(weights)
        losses = []
        try:
            for index, batch in enumerate(batches):
                self._counts = index < len(weights)
                self.step += self._counts
                self.should_step = index == len(batches) - 1
                self._batch_weight = weights[index] if self._counts else 0.0
                with nullcontext() if self._counts else self._uncounted():
                    loss = self.fit_batch(self._to_device(batch))
                if self._counts:
                    losses.append(self._returned_loss(loss, "fit_batch") if self._own_fit_batch else loss)
        finally:
            self._window_size, self.should_step, self._counts = 1, True, True
        return losses

    def _overrides(self, name: str) -> bool:
        """Whether the recipe has a method of its own under this name."""
        return getattr(type(self), name) is not getattr(Brain, name)

    def _returned_loss(self, loss: Any, method: str) -> torch.Tensor:
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss))
        return as_scalar(loss, f"{type(self).__name__}.{method}").detach().to(self.device)

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Train on one batch; the update follows at the window's end. Returns the detached loss (0-d)."""
        self._plan.updates.begin()
        self.on_fit_batch_start(batch, self.should_step)
        with self.no_sync(not self.should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, self.should_step)
        return loss.detach()

    def backward(self, loss: torch.Tensor, *names: str) -> None:
        """Differentiate this batch's share of its window's loss, scaled where the precision asks for it.

        names: of the optimizers whose parameters it is for (a generator's loss goes through the critic, and would
        leave gradients there); default: all.
        """
        self._check_names(names)
        self._reach.follow(loss, names or self.optimizers_dict)
        chosen = [self.optimizers_dict[name] for name in names] or None
        if self._round is not None:
            share, of = self._share_of_round(self._round)
        elif self._window_size == 1:
            share, of = 1.0, 1.0
        elif self._own_batch_weight:
            share, of = self._batch_weight, self._window_weight
        else:
            share, of = 1.0, self._window_size
        with self._averaged(loss, chosen):
            self._plan.updates.backward(loss, share, of, chosen)

    def gradients(self, loss: torch.Tensor, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Gradients of `loss` with respect to `inputs`: unscaled and differentiable, for a gradient penalty."""
        return self._plan.updates.gradients(loss, inputs)

    def optimizers_step(self, *names: str) -> None:
        """Unscale, clip and step all optimizers, or the named ones; none of them if anything is nonfinite.

        Gradients of the optimizers that were to step are cleared; without names, those of frozen ones as well.
        """
        if not self.should_step:
            raise RecipeError(
                f"optimizers_step was called at batch {self.step}, before the last of {self._window_size} batches that "
                "accumulate (grad_accumulation_factor). In fit_batch, step only `if self.should_step:`."
            )
        self._ledger.settle()  # the learning rate may still have to move for the update before
        self._plan.patience.check()
        available = self.freeze_optimizers(self.optimizers_dict) or {}
        self._check_names(names)
        chosen = {name: available[name] for name in names if name in available} if names else available
        rates = {name: self._lowered_rates.in_force(optimizer) for name, optimizer in chosen.items()}
        pending = self._plan.updates.step(chosen, self.max_grad_norm)
        self._plan.updates.update_scale(available.values())
        if names:
            for optimizer in chosen.values():
                clear_gradients(optimizer, set_to_none=True)
        else:
            self.zero_grad()
        self._ledger.add(pending, rates, self.step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every optimizer's parameters."""
        self._plan.updates.drop_losses()
        for optimizer in self.optimizers_dict.values():
            clear_gradients(optimizer, set_to_none)

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Within it, ranks do not average gradients in backward (where `use`)."""
        return distributed.no_sync(self.modules) if use and distributed.initialized() else nullcontext()

    def init_optimizers(self) -> None:
        """Make `optimizer` from `opt_class` over all parameters, and enter it in `optimizers_dict`."""
        if self.opt_class is not None:
            self.optimizer = self.opt_class(self.modules.parameters())
            self.optimizers_dict = {"optimizer": self.optimizer}

    def on_fit_start(self) -> None:
        """Get ready to train: wrap modules, make optimizers and schedulers, go on from a checkpoint if there is one."""
        self._share_modules()
        if not self.optimizers_dict:
            self.init_optimizers()
        if not self.optimizers_dict and self.optimizer is not None:
            self.optimizers_dict = {"optimizer": self.optimizer}
        if not self.optimizers_dict and not self._own_fit_batch:
            raise RecipeError(
                f"{type(self).__name__} has no optimizer: give opt_class to the constructor, or fill optimizers_dict "
                "in init_optimizers."
            )
        self._adopt_optimizers()
        self.zero_grad(set_to_none=True)
        self._resume()

    # ------------------------------------------------------------------ evaluate

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] = {},
    ) -> float:
        """The average loss on `test_set`, weighted by `batch_weight`; NaN if no batch had a finite one.

        NaN at once, too, where the script was started with --diagnose or --replay.

        max_key, min_key: load the checkpoint that is best in that metric first. Called from a hook of `fit`, training
        goes on afterwards as if it had not been.
        """
        if self.run_opts.purpose.action != "train":
            return math.nan
        loader = self._batches_of(test_set, Stage.TEST, test_loader_kwargs)
        self._ledger.settle()
        self._share_untrained()
        # A test whose hook calls this has the averaged weights applied.
        trained = self._ema.set_aside() if self._ema is not None else nullcontext()
        with trained, self._set_aside(weights=bool(max_key or min_key)) if self._in_fit else self._interrupts:
            self.on_evaluate_start(max_key, min_key)
            with self._logging(progressbar):
                return self._evaluate_stage(loader, Stage.TEST, None)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint by a key; without one, the newest if this process has not trained."""
        if max_key or min_key or not self._trained:
            self._checkpoints.wait()
            distributed.wait_for_all()  # the others look only when the main process has written
            newest = () if self._trained else ("brain",)  # the totals of the run that is evaluated
            found = self._checkpoints.load_for_evaluation(
                max_key, min_key, ("modules", "hooked_modules", "ema"), newest, weights_only=self._in_fit
            )
            if found is None and self.init_from is not None and not self._trained:
                self._init_from_run()
                return
            if found is None and self.test_only and self._checkpoints.owned:
                raise CheckpointError(
                    f"test_only: there is no checkpoint in {self.output_folder}/save, so the model is untrained. "
                    "Train first, or give the output_folder of a run that did."
                )
            if found is None and not self.debug and (self.test_only or max_key or min_key):
                logger.warning("no checkpoint was loaded: evaluating the weights as they are")
            if not self._in_fit:  # inside fit, all is put back as it was
                self._plan.updates.forget_state()

    def _evaluate_stage(self, loader: Iterable[Any], stage: Stage, epoch: int | None) -> float:
        self.step, self._asked = 0, False
        if stage is Stage.VALID:
            self._position.validation_begins()
        self._start_stage(stage, epoch, loader)
        averaged = self._ema.applied if self._ema is not None else nullcontext
        posted: deque[tuple[Ticket, float]] = deque()
        sharing = distributed.evaluating(self.modules)
        with torch.no_grad(), averaged(), sharing, loader_faults(loader), suppress(LoadingStopped):
            for batch, counts in self._to_evaluate(self._log.timed(self._limited(loader)), stage):
                if not counts:
                    with self._uncounted():
                        self.evaluate_batch(self._to_device(batch), stage)
                    continue
                self.step += 1
                weight = float(self.batch_weight(batch))
                with self._blaming_precision([batch]):
                    loss = self._returned_loss(self.evaluate_batch(self._to_device(batch), stage), "evaluate_batch")
                posted.append((self._host.post(loss), weight))
                # Two behind, so that the host reads what has long arrived.
                if len(posted) > 2:
                    ticket, old_weight = posted.popleft()
                    self._average.add(ticket.read()[0], old_weight, self.update_average)
                self._log.advance(1, batch_length(batch))
        if self._is_to_end and stage is Stage.VALID:
            self._save_and_leave(epoch)
        if self._is_to_end and not self._in_fit:
            self._interrupts.leave(f"{self._where(self.step)}: ends here; an evaluation changes nothing")
        if stage is Stage.VALID:
            self._position.validation_ends()
        for ticket, weight in posted:
            self._average.add(ticket.read()[0], weight, self.update_average)
        if not any(distributed.gather(self.step)):
            raise DataError(f"the {stage.name.lower()} set yielded no batch")
        # Its hook sees the weights that were tested; that of a validation may save, and saves those that train.
        with averaged() if stage is Stage.TEST else nullcontext():
            loss = self._end_stage(stage, epoch)
        self.step = 0
        return loss

    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor:
        """The detached loss (0-d) of one batch, under `eval_precision`."""
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage)
            loss = self.compute_objectives(outputs, batch, stage)
        return as_scalar(loss, f"{type(self).__name__}.compute_objectives").detach()

    # ------------------------------------------------------------------ what settles after a step

    @property
    def optimizer_step(self) -> int:
        """Updates really taken, in all. Reading it waits for the last verdict."""
        self._ledger.settle()
        return self._optimizer_step

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because something was nonfinite, in all. Reading it waits for the last verdict."""
        self._ledger.settle()
        return self._skipped_steps

    @property
    def avg_train_loss(self) -> float:
        """The running average loss of the epoch, over the batches whose update was taken; waits for the last one."""
        self._ledger.settle()
        return self._train_average.value if self._train_average.seen > 0 else math.nan

    def update_average(self, loss: float, avg_loss: float) -> float:
        """The stage's running average after one more loss, weighted by `batch_weight`. Nonfinite ones never come."""
        return avg_loss + (loss - avg_loss) * (self._average.weight / (self._average.seen or self._average.weight))

    def _on_update(self, update: Update, window: Window) -> None:
        """What an update that was taken, or skipped, moves."""
        if update.taken:
            self._optimizer_step += 1
            self._schedulers.after_update(update.grad_norms)
            cause = ""
        else:
            self._skipped_steps += 1
            cause = self._cause_of_skip(update, window)
        self._plan.patience.observe(update, lambda: self._where(window.step), self._skipped_steps, cause)

    def _on_window(self, window: Window) -> None:
        """An iteration's verdicts are known: move the averages and tell the loggers."""
        if window.by_hand:
            self._optimizer_step += 1
            self._schedulers.after_update(self.optimizers_dict)
            window.taken = True
        if window.taken and self._ema is not None:
            self._ema.update()
        if window.taken or window.last is None:
            if window.metrics is not None:
                self._sums.merge(window.metrics)
            for loss, weight in zip(window.losses, window.weights, strict=True):
                self._average.add(loss, weight, self.update_average)
        if self._log.takes_updates:
            self._log_window(window)
        self._plan.patience.check()

    def _log_window(self, window: Window) -> None:
        update = window.last
        self._log.log_update(
            step=window.step,
            loss=self._loss_of(window),
            lr={name: float(rate) for name, rate in window.rates.items()},
            grad_norm=update.grad_norm if update is not None else None,
            scale=update.scale if update is not None else None,
            skipped=update is not None and not update.taken,
            optimizer_step=self._optimizer_step,
            skipped_steps=self._skipped_steps,
            samples=window.samples,
        )

    # ------------------------------------------------------------------ stages and epochs

    def _start_stage(self, stage: Stage, epoch: int | None, loader: Iterable[Any]) -> None:
        self._stage, self._epoch = stage, epoch
        self._average, self._sums, self._window_sums = LossAverage(), StageMetrics(), None
        if stage is Stage.TRAIN:
            if self.step:  # resumed inside the epoch
                self._average, self._sums = self._train_average, self._train_sums
            self._train_average, self._train_sums = self._average, self._sums
        self.modules.train(stage is Stage.TRAIN)
        set_epoch(loader, epoch or 0)
        self.on_stage_start(stage, epoch)
        if stage is Stage.TRAIN:
            self._share_modules()  # a hook may have frozen, or freed, a part of them
        batches = length(loader)
        if self.debug and batches is not None:
            batches = min(batches, self.debug_batches)
        so_far, self._stage_so_far = self._stage_so_far, {}
        self._log.start_stage(stage.name.lower(), epoch, batches, self.step, **so_far)

    def _end_stage(self, stage: Stage, epoch: int | None) -> float:
        loss = distributed.mean(self._average.result, self._average.seen)
        if self._average.nonfinite and stage is not Stage.TRAIN:
            logger.warning(
                "%s: the loss of %d of %d batches was not finite; they are left out of the average",
                self._where(self.step),
                self._average.nonfinite,
                self.step,
            )
        if stage is Stage.VALID:
            self._position.epoch_loss_due = loss
        self.stage_metrics = self._added_metrics()
        returned = self.on_stage_end(stage, loss, epoch)
        own = returned if isinstance(returned, Mapping) else {}
        added = self._added_metrics(warn=True)  # on_stage_end may have added some
        metrics = {name: float(value) for name, value in {**added, **own}.items()}
        # All ranks go by the main process's figures: they decide on stopping and on learning rates.
        self._metrics = distributed.from_main_process({"loss": loss, **metrics})
        self._log.end_stage(loss, metrics, self._optimizer_step)
        return loss

    def _end_epoch(self, epoch: int) -> None:
        """What follows from the epoch's last stage: schedulers, the best so far, a checkpoint."""
        self._warn_of_differing_weights()
        self._schedulers.after_epoch(self._metrics["loss"])
        self._position.epoch_loss_due = None
        self._watch.observe(self._metrics, epoch)
        self._note_best()
        meta = {**self._metrics, "epoch": epoch, "optimizer_step": self._optimizer_step, "fit": self._fits}
        mode = self.early_stop_mode if self.early_stop_metric else "min"
        self._checkpoints.save_epoch(meta, self._watch.metric, mode)
        distributed.wait_for_all()

    def _finished(self) -> bool:
        if self.early_stop_metric and self._watch.exhausted:
            logger.info("stopped early: %s", self._watch)
            return True
        return self._step_limit_reached()

    def _step_limit_reached(self) -> bool:
        limit = self.optimizer_step_limit
        if not limit or self._optimizer_step + len(self._ledger) < limit:
            return False  # not even if all that is under way is taken: no need to wait for it
        return self.optimizer_step >= limit
