"""Holds what lives as long as the process: the objects that the loop uses, and the totals of the run."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes import distributed
from amp_recipes.checkpoint import (
    Checkpointer,
    CheckpointPolicy,
    HookedModules,
    clean_name,
    hooked_state,
    plain_problem,
)
from amp_recipes.data import length, set_epoch
from amp_recipes.errors import ConfigError, did_you_mean
from amp_recipes.files.file_system import check_file_system
from amp_recipes.files.folder_lock import lock_folder
from amp_recipes.files.run_files import path_below, refuse_link
from amp_recipes.interrupts import Interrupts
from amp_recipes.loggers import RunLog, make_loggers, show_notices
from amp_recipes.loop.ema import NoAverage, WeightAverage
from amp_recipes.loop.feed import Feed
from amp_recipes.loop.fit import Fit
from amp_recipes.loop.gradient_reach import GradientReach
from amp_recipes.loop.listeners import Averages, Rates, Skips, StepLog, StepsByHand, Totals
from amp_recipes.loop.loader_pass import Pass
from amp_recipes.loop.processes import ManyProcesses, OneProcess
from amp_recipes.loop.recovery.pinning import Pinning
from amp_recipes.loop.recovery.recovery import recovery_of
from amp_recipes.loop.resume import Resume
from amp_recipes.loop.saving import Saving
from amp_recipes.loop.schedulers import Schedulers
from amp_recipes.loop.settings import Settings
from amp_recipes.loop.stopping import MetricWatch
from amp_recipes.loop.underflow import UnderflowWatch
from amp_recipes.loop.window import PendingWindows, Window
from amp_recipes.modules.devices import queues_work
from amp_recipes.precision import PrecisionPlan, as_scalar, check_optimizers
from amp_recipes.precision.fused import KernelChoices, prefer_fused
from amp_recipes.precision.host_copy import HostCopy
from amp_recipes.records import Logger, RunSummary
from amp_recipes.stage import Stage
from amp_recipes.state.outstanding_gradients import OutstandingGradients
from amp_recipes.state.recipe import RecipeState
from amp_recipes.state.transient_buffers import TransientBuffers

logger = logging.getLogger(__name__)


class Run:
    """The collaborators of one Brain, and what they share.

    recipe: the Brain; settings: its run options; task: what the script was started for; overrides: tells whether the
    recipe has a method of its own under a name; place_in_yaml: see `Feed`.

    fit: the call of `fit` under way, or the last one; in_fit: whether one is under way. current: the pass over a loader
    under way, or the last one; train_pass: the last one that trained; stage_metrics: of the last one that ended;
    window: the batches under way.
    """

    def __init__(
        self,
        recipe: Any,
        settings: Settings,
        task: Any,
        overrides: Callable[[str], bool],
        place_in_yaml: Callable[[str, Any], str],
    ) -> None:
        self.recipe, self.settings, self.task, self.overrides = recipe, settings, task, overrides
        self.modules: nn.ModuleDict = recipe.modules
        self.device: torch.device = recipe.device
        self.weighted, self.own_fit_batch = overrides("batch_weight"), overrides("fit_batch")
        self.plain_losses = not (self.own_fit_batch or overrides("backward"))
        distributed.check(recipe.run_opts, self.device, self.modules, self._tensor_parallel_plan)
        if not self.shards:
            self.modules.to(self.device)
        self.processes = ManyProcesses(self) if distributed.initialized() else OneProcess(self)
        together = (distributed.agree, distributed) if self.processes.many else (None, None)
        self.plan = PrecisionPlan(recipe.run_opts, self.modules, self.device, *together)
        self.totals = Totals()
        self.fit, self.in_fit = Fit(self), False
        self.current = self.train_pass = Pass(Stage.TRAIN)
        self.stage_metrics: dict[str, float] = {}
        self.window = Window(self)
        self.interrupts = Interrupts(settings.save_signals)
        self.saving = Saving(self)
        self.feed = Feed(self, place_in_yaml)
        self.host = HostCopy(self.device)
        self.reach: GradientReach | None = GradientReach()  # until it has reported
        self.checks = [self._check_reach, self._check_pins, self._check_context]
        self.schedulers = Schedulers(None, {}, settings.lr_scheduler_interval)
        self._kernel_choices = KernelChoices({})
        saved_name = functools.partial(clean_name, self.modules)
        self.transient_buffers = TransientBuffers(self.modules, saved_name)
        self._gradients = OutstandingGradients(self.modules, lambda: recipe.optimizers_dict, saved_name)
        self.ema = WeightAverage(self.modules, settings.ema_decay, saved_name) if settings.ema_decay else NoAverage()
        metric = settings.early_stop_metric or "loss"
        self.best = MetricWatch(metric, settings.early_stop_mode, settings.early_stop_patience)
        self.summary = self._new_summary()
        self.log = self.idle_log = RunLog([], self.summary, self.device, settings.log_interval_steps)
        self.recovery = recovery_of(self)
        self.pinning = Pinning(self)
        # In the order in which they are called after an update.
        by_hand = [StepsByHand(self)] if self.own_fit_batch else []
        self.underflow = UnderflowWatch(self)
        follow = (Rates(self), Averages(self), self.underflow, StepLog(self), Skips(self), self.recovery)
        self.pending = PendingWindows(self.device, (self.totals, *by_hand, *follow))

    def _new_summary(self) -> RunSummary:
        counts = {} if self.settings.on_spike == "off" else {"spikes": 0, "went_back": 0}
        if self.plan.scaler.is_enabled() and self.settings.locate_nonfinite:
            counts["backed_off_steps"] = 0
        if self.settings.on_nonfinite == "pin":
            counts["pinned"] = []
        return RunSummary(
            precision=self.plan.training.name,
            eval_precision=self.plan.evaluation.name,
            float32_precision=self.plan.float32_precision,
            device=str(self.device),
            fp32_modules=self.plan.pinned,
            **counts,
        )

    # ------------------------------------------------------------------ what stays on the disk

    def open_folder(
        self,
        checkpointer: Checkpointer | None,
        write_settings: Callable[[], None],
        write_pins: Callable[[list[str], list[dict[str, Any]]], None],
    ) -> None:
        """Make the output folder this run's, and set up what goes into its checkpoints.

        write_pins: writes the new value of `fp32_modules` into the settings, and the pins that the run took itself.
        """
        self._lock_folder(write_settings)
        is_real = self.settings.output_folder is not None and not self.settings.debug
        self.write_pins = write_pins if is_real else lambda modules, pins: None
        self.checkpoints = self._checkpoint_policy(checkpointer)
        if self.checkpoints.owned:
            # As they are before a wrapper for several processes adds its prefix to every name.
            self.checkpoints.register("modules", nn.ModuleDict(dict(self.modules)))
            hooked = HookedModules(nn.ModuleDict(dict(self.modules)))
            if hooked.states:
                self.checkpoints.register("hooked_modules", hooked)
        self.checkpoints.register("transient_buffers", self.transient_buffers)
        self.checkpoints.register("gradients", self._gradients)
        self.resume = Resume(self)
        if isinstance(self.ema, WeightAverage):
            self.checkpoints.register("ema", self.ema)
        self.recovery.check_checkpoints()

    def _lock_folder(self, write_settings: Callable[[], None]) -> None:
        folder = self.settings.output_folder
        if folder is None or not distributed.is_main_process() or not self.task.trains:
            return
        if self.settings.test_only and os.path.isdir(folder) and not os.access(folder, os.W_OK):
            return  # another user's run, to evaluate
        lock_folder(folder)
        if not self.settings.debug:
            check_file_system(folder)
            write_settings()

    def _checkpoint_policy(self, checkpointer: Checkpointer | None) -> CheckpointPolicy:
        settings, folder = self.settings, self._checkpoint_folder()
        if folder is not None and checkpointer is None:
            refuse_link(folder)  # a copied run folder may have one, and old checkpoints are deleted
        policy = CheckpointPolicy(checkpointer, folder, self.task.trains, settings.ckpt_background, settings.debug)
        by_interval = settings.ckpt_interval_steps > 0 or settings.ckpt_interval_minutes > 0
        if by_interval and policy.theirs and distributed.world_size() > 1:
            logger.warning(
                "ckpt_interval_steps and ckpt_interval_minutes have no effect here: SpeechBrain's Checkpointer can "
                "save inside an epoch only with one process. To use them, leave `checkpointer` out and give an "
                "output_folder."
            )
        elif by_interval and checkpointer is None and folder is None and self.task.trains and not settings.debug:
            name = "ckpt_interval_steps" if settings.ckpt_interval_steps > 0 else "ckpt_interval_minutes"
            logger.warning("%s has no effect without output_folder: nothing is saved. Set output_folder, too.", name)
        return policy

    def _checkpoint_folder(self) -> Path | None:
        if self.settings.output_folder is None or self.settings.debug:
            return None
        folder = Path(self.settings.output_folder) / "save"
        return folder if self.task.trains or folder.is_dir() else None  # else it is only looked at

    def remember_recipe(self, not_the_recipes: Iterable[str]) -> None:
        """Keep in checkpoints what the recipe sets on itself, beside these names."""
        self.recipe_state = RecipeState(
            self.recipe,
            not_the_recipes,
            lambda: [self.fit.epoch_counter, *self.checkpoints.recoverables],
            plain_problem,
            hooked_state,
        )

    @property
    def own_folder(self) -> Path | None:
        """The folder for this run's own files; with `debug`, another one than that of the real run."""
        folder = self.settings.output_folder
        if folder is None:
            return None
        return Path(folder) / "debug" if self.settings.debug else Path(folder)

    def path_of_the_recipe(self, name: str | os.PathLike[str], taken: Iterable[str]) -> Path | None:
        """Return the path for a file of the recipe; None if nothing is written. taken: names that the run uses."""
        if self.own_folder is None or not distributed.is_main_process() or not self.task.trains:
            return None
        return path_below(self.own_folder, name, taken)

    @property
    def saved_modules(self) -> nn.Module:
        """The modules as checkpoints hold them, without the wrappers for several processes."""
        known = self.checkpoints.checkpointer.recoverables if self.checkpoints.owned else {}
        return known.get("modules", self.modules)

    # ------------------------------------------------------------------ modules and optimizers

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of the modules only."""
        return self.settings.strategy == "fsdp" and distributed.initialized()

    def wrap_modules(self) -> None:
        """Set up activation checkpointing in the modules, and share them among the processes."""
        options, dtype = self.recipe.run_opts, self.plan.training.dtype
        pinned, plan = self.plan.fp32_modules, self._tensor_parallel_plan
        distributed.wrap(self.modules, self.device, options, dtype, pinned, plan)

    @property
    def _tensor_parallel_plan(self) -> Mapping[str, str] | None:
        return getattr(self.recipe.hparams, "tensor_parallel_plan", None)

    def adopt_optimizers(self) -> None:
        """Check the recipe's optimizers, make their schedulers and save them with checkpoints, where they are new."""
        optimizers = self.recipe.optimizers_dict
        if self.schedulers.optimizers == optimizers:
            return
        check_optimizers(optimizers, self.modules, self.plan.scaler.is_enabled(), self.processes.many)
        self._kernel_choices = KernelChoices(optimizers)
        self.spare_waits()
        make = getattr(self.recipe.hparams, "lr_scheduler", None)
        interval = self.settings.lr_scheduler_interval
        self.schedulers = Schedulers(make, optimizers, interval, self.feed.count_updates)
        for name, optimizer in optimizers.items():
            self.checkpoints.register(f"optimizer.{name}", optimizer, replace=True)
            if self.own_fit_batch:
                optimizer.register_step_pre_hook(self._before_step)
                optimizer.register_step_post_hook(self._after_step)
        for name, scheduler in self.schedulers.by_optimizer.items():
            self.checkpoints.register(f"scheduler.{name}", scheduler, replace=True)
        self.recovery.adopt(optimizers)

    def restore_kernels(self) -> None:
        """Compute the steps as the recipe wants it now, after a checkpoint has brought the choices of another run."""
        self._kernel_choices.put_back()
        self.spare_waits()

    def spare_waits(self) -> None:
        """Make optimizers skip on the device if they can, so that the host does not wait."""
        if queues_work(self.device):
            prefer_fused(self.recipe.optimizers_dict, self.modules, self.device)

    def _before_step(self, *_: Any) -> None:
        if not self.window.updating:  # by hand: an update before it, of ours, may still have to move the rates
            self.pending.settle_updates()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.window.updating:
            return
        overflow = getattr(optimizer, "found_inf", None)  # a GradScaler's word to a fused optimizer, which then skips
        self.window.by_hand |= overflow is None or not overflow.item()

    def chosen_optimizers(self, names: Sequence[str]) -> dict[str, Optimizer]:
        """The optimizers of these names; raises ConfigError for a name that none has."""
        known = self.recipe.optimizers_dict
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"there is no optimizer '{name}'; expected one of {', '.join(known) or '(none)'}."
                    + did_you_mean(name, known)
                )
        return {name: known[name] for name in names}

    def warn_of_rates_at_zero(self) -> None:
        """Say so where a schedule that is over leaves nothing to learn."""
        groups = [group for optimizer in self.recipe.optimizers_dict.values() for group in optimizer.param_groups]
        if groups and all(float(group["lr"]) == 0 for group in groups):
            logger.warning(
                "every learning rate is 0 at the end of the schedule, so nothing more will be learned. To train "
                "further with a new schedule, start a run in another output_folder with --init_from %s",
                self.settings.output_folder,
            )

    # ------------------------------------------------------------------ passes and windows

    def begin_fit(self, fit: Fit) -> None:
        """A call of `fit` begins; what an earlier one left behind, perhaps by an exception, is forgotten."""
        self.fit = fit
        self.forget_course()
        self.recovery.begin_fit()

    def forget_course(self) -> None:
        """Drop what is known of the updates and passes so far; the totals stay."""
        self.pending.clear()
        self.plan.patience.reset()
        self.current, self.window = Pass(Stage.TRAIN), Window(self)

    def new_train_pass(self, epoch: int | None) -> Pass:
        """The pass that trains next."""
        self.train_pass = Pass(Stage.TRAIN, epoch)
        return self.train_pass

    def start_pass(self, current: Pass, loader: Iterable[Any], so_far: Mapping[str, float] = {}) -> None:
        """A pass over a loader begins; so_far: what the log knows of it from before an interruption."""
        self.current = current
        trains = current.stage is Stage.TRAIN
        self.modules.train(trains)
        set_epoch(loader, current.epoch or 0)
        self.recipe.on_stage_start(current.stage, current.epoch)
        if trains:
            self.processes.share_modules()  # a hook may have frozen, or freed, a part of them
        batches = length(loader)
        if self.settings.debug and batches is not None:
            batches = min(batches, self.settings.debug_batches)
        self.log.start_stage(current.stage.name.lower(), current.epoch, batches, current.step, **so_far)

    def end_pass(self, current: Pass) -> float:
        """The pass is over: call `on_stage_end`, and log the stage. Returns its average loss."""
        average = current.average
        loss = distributed.mean(average.result, average.seen)
        if average.nonfinite and current.stage is not Stage.TRAIN:
            logger.warning(
                "%s: the loss of %d of %d batches was not finite; the average leaves them out",
                current.where(),
                average.nonfinite,
                current.step,
            )
        if current.stage is Stage.VALID:
            self.fit.position.epoch_loss_due = loss
        self.stage_metrics = current.added_metrics()
        returned = self.recipe.on_stage_end(current.stage, loss, current.epoch)
        own = returned if isinstance(returned, Mapping) else {}
        added = current.added_metrics(warn=True)  # on_stage_end may have added some
        metrics = {name: float(value) for name, value in {**added, **own}.items()}
        # All ranks go by the main process's figures: they decide on stopping and on learning rates.
        current.results = distributed.from_main_process({"loss": loss, **metrics})
        self.log.end_stage(loss, metrics, self.totals.optimizer_step)
        return loss

    def check_first_windows(self) -> None:
        """Warn of parameters, pins and contexts that are not used as one would think; a check that is done is over."""
        self.checks = [check for check in self.checks if not check()]

    def _check_reach(self) -> bool:
        if self.reach.is_empty:  # nothing was differentiated yet
            return False
        self.reach.report(self.recipe, self.modules, self.recipe.optimizers_dict)
        self.reach = None
        return True

    def _check_pins(self) -> bool:
        self.plan.report_dead_pins(new=[pin["module"] for pin in self.pinning.pins])
        return True

    def _check_context(self) -> bool:
        if self.plan.widened:
            return False
        if self.own_fit_batch:
            self.plan.report_missing_context()
        return True

    def returned_loss(self, loss: Any, method: str) -> torch.Tensor:
        """Return the result of a method of the recipe as a detached loss (0-d) on the device."""
        if isinstance(loss, (int, float)):
            loss = torch.tensor(float(loss))
        return as_scalar(loss, f"{type(self.recipe).__name__}.{method}").detach().to(self.device)

    def loss_of(self, window: Window) -> float:
        """The loss that the window's update was made from: the mean over its batches."""
        shares = window.weights if self.weighted else [1.0] * len(window.losses)
        total = sum(loss * share for loss, share in zip(window.losses, shares, strict=True))
        return total / (sum(shares) or math.nan)

    @property
    def optimizer_step(self) -> int:
        """Updates taken in all; waits for the last verdict."""
        self.pending.settle()
        return self.totals.optimizer_step

    @property
    def skipped_steps(self) -> int:
        """Updates skipped in all; waits for the last verdict."""
        self.pending.settle()
        return self.totals.skipped_steps

    def note_best(self) -> None:
        """Show the best epoch so far in the summary."""
        if self.best.best is not None:
            self.summary.best = {self.best.metric: self.best.best, "epoch": self.best.best_epoch}

    # ------------------------------------------------------------------ for a while

    @contextmanager
    def replaced(self, **parts: Any) -> Iterator[None]:
        """Inside this context, these attributes of the run have other values."""
        kept = {name: getattr(self, name) for name in parts}
        vars(self).update(parts)
        try:
            yield
        finally:
            vars(self).update(kept)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside this context a fit runs; if it fails, the next call of `fit` continues it."""
        self.in_fit = True
        try:
            with self.totals.fit():
                yield
        except BaseException:
            self.checkpoints.resume_again()
            raise
        finally:
            self.in_fit = False

    @contextmanager
    def logging(self, progressbar: bool | None) -> Iterator[None]:
        """The loggers of one fit or evaluation, closed whatever happens."""
        show = not self.settings.noprogressbar if progressbar is None else progressbar
        if show:
            show_notices()
        outer, self.log = self.log, self._new_log(show)
        try:
            yield
            self.pending.settle()
        except BaseException:
            # What is under way has changed the weights already, so it counts; the first exception is the one to raise.
            with suppress(Exception):
                self.pending.settle()
            raise
        finally:
            self.summary.optimizer_steps = self.totals.optimizer_step
            self.summary.skipped_steps = self.totals.skipped_steps
            if self.summary.backed_off_steps is not None:
                self.summary.backed_off_steps = self.totals.backed_off_steps
            if not self.in_fit or outer is self.idle_log:
                self.log.log_summary()
            self.log.close()
            self.log = outer

    def _new_log(self, show: bool) -> RunLog:
        loggers: list[Logger] = []
        if distributed.is_main_process():
            folder = self.own_folder
            if folder is not None and self.settings.debug:
                refuse_link(folder)
            # After a fit the table has been seen; the evaluation adds one line, which progress shows.
            table = self.in_fit or not self.totals.trained
            own = make_loggers(folder, show, self.settings.log_interval_steps, table)
            loggers = [*own, *self.recipe.loggers]
        return RunLog(loggers, self.summary, self.device, self.settings.log_interval_steps)
