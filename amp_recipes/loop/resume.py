"""What of a run goes into its checkpoints, and how a process that starts takes it up again."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn

from amp_recipes import distributed
from amp_recipes.checkpoint import best_checkpoint, fit_of, load_weights, model_weights
from amp_recipes.data import (
    EpochLoader,
    batches_from,
    close_loader,
    generator_states,
    loader_state,
    replay_reason,
    set_generator_states,
)
from amp_recipes.distributed.interrupts import RunInterrupted
from amp_recipes.errors import CheckpointError, RecipeError
from amp_recipes.loop.feed import RunData
from amp_recipes.loop.hooks import Stage
from amp_recipes.loop.loss_average import joined_averages
from amp_recipes.loop.metrics import joined_metrics
from amp_recipes.state.position import Moment
from amp_recipes.state.randomness import random_state, set_apart, set_random_state

logger = logging.getLogger(__name__)

# What a resumed run goes on counting.
_SUMMARY_TOTALS = ("seconds", "training_seconds", "epochs", "samples", "samples_per_second", "last", "best")


class ResumableRun(RunData):
    """Base of `Brain`: saves the loop's state, at intervals and when a signal asks, and goes on from it."""

    # ------------------------------------------------------------------ going on

    def _resume(self) -> None:
        """Register what else training adds to a checkpoint, and go on from the newest one, once.

        One that a later `fit` of this process's course saved waits for that `fit`.
        """
        if self.scaler.is_enabled():
            self._checkpoints.register("scaler", self.scaler)
        if hasattr(self._epoch_counter, "state_dict"):
            self._checkpoints.register("epoch_counter", self._epoch_counter, replace=True)
        self._recipe_state.begin(keep=self._goes_back)
        if self._is_over():
            return
        if self._checkpoints.resume(self.resume) is None:
            self._logs_at = {}
            self._set_records_aside()
            if self.init_from is not None and not self._trained:
                self._init_from_run()
            return
        self._warn_of_rates_at_zero()
        self._go_on()

    def _go_on(self) -> None:
        """A checkpoint was loaded: what follows from its place, before its epoch begins."""
        self._note_best()
        self._plan.updates.forget_state()
        counter = self._epoch_counter
        if self._position.inside_epoch and hasattr(counter, "state_dict") and hasattr(counter, "current"):
            counter.current -= 1  # SpeechBrain's, which has no state_dict, does so itself
        if self._position.epoch_loss_due is not None:
            # The recipe saved in on_stage_end, before what follows from the epoch's end.
            self._schedulers.after_epoch(self._position.epoch_loss_due)
            if self._watch.metric == "loss":
                self._watch.observe({"loss": self._position.epoch_loss_due}, self._position.done)
            self._position.epoch_loss_due = None

    def _is_over(self) -> bool:
        """Whether the newest checkpoint is of a later `fit` than this one, which is then over."""
        if self.resume == "never" or not self._checkpoints.resumes:
            return False
        newest = self._checkpoints.checkpointer.find_checkpoint()
        return newest is not None and fit_of(newest) > self._fits + 1

    def _warn_of_rates_at_zero(self) -> None:
        groups = [group for optimizer in self.optimizers_dict.values() for group in optimizer.param_groups]
        if groups and all(float(group["lr"]) == 0 for group in groups):
            logger.warning(
                "every learning rate is 0, as the schedule left it: nothing more will be learned. To train on with a "
                "new schedule, start a run in another output_folder with --init_from %s",
                self.output_folder,
            )

    def _set_records_aside(self) -> None:
        """Give the metrics of the run whose checkpoints were set aside the same number."""
        number, self._checkpoints.set_aside_number = self._checkpoints.set_aside_number, None
        records = Path(self.output_folder or "") / "metrics.jsonl"
        if number is not None and self.output_folder is not None and records.is_file():
            records.rename(records.with_name(f"metrics.{number}.jsonl"))

    def _init_from_run(self) -> None:
        """Begin with the weights of the run that `init_from` names."""
        checkpoint = best_checkpoint(self.init_from)
        load_weights(self._saved_modules, model_weights(checkpoint, self._saved_modules), str(checkpoint.path))
        if self._ema is not None:
            self._ema.restart()
        logger.info("begins with the weights of %s (epoch %s)", checkpoint.path, checkpoint.meta.get("epoch"))

    def _take_up(self, moment: Moment | None) -> None:
        """Put the recipe's memory and the random generators where they were at that moment of the earlier process.

        None: there is none. Then processes part ways here: until now, all have drawn the same.
        """
        if moment is None and not self._trained:
            set_apart(distributed.data_rank())
        elif moment is not None:
            self._recipe_state.load_state_dict(moment["recipe"])
            for name, loader in self._loaders.items():
                set_generator_states(loader, moment["loaders"].get(name, {}))
            self._set_random_state(moment["random"])

    def _training_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The epoch's batches that are left to train on."""
        place = self._position.take_place()
        self._position.training_begins(resumed=place)
        self._at_its_place = place is None
        if place is None:
            return self._limited(batches_from(loader, 0, None))
        reason = replay_reason(loader)
        if reason:
            logger.warning("going on inside an epoch: %s", reason)
        # A loader without an order of its own takes it from the global generators, as it did when the epoch began.
        self._set_random_state(place.stage_start["random"])
        batches = batches_from(loader, place.step, place.data)
        self.step = getattr(loader, "batches_done", place.step)  # another number of processes makes others
        self._at_its_place = True
        self._take_up(place.now)  # also what on_stage_start has just reset
        return self._limited(batches, done=place.step)

    def _limited(self, batches: Iterable[Any], done: int = 0) -> Iterator[Any]:
        """The batches; in debug mode only the first few, of which `done` were before these."""
        return islice(batches, max(0, self.debug_batches - done) if self.debug else None)

    # ------------------------------------------------------------------ what a checkpoint keeps

    def _moment(self, with_recipe: bool) -> Moment:
        return {
            "random": random_state(self.device),
            "loaders": {name: generator_states(loader) for name, loader in self._loaders.items()},
            "recipe": self._recipe_state.state_dict() if with_recipe else None,
        }

    def _numbers(self) -> dict[str, Any]:
        """The loop's own numbers, for a checkpoint."""
        self._ledger.settle()
        if len(self._ledger):
            logger.warning(
                "%s: a checkpoint in the middle of an update lacks its loss and EMA: save in on_stage_end, or with "
                "ckpt_interval_steps or ckpt_interval_minutes",
                self._where(self.step),
            )
        in_training = self._stage is Stage.TRAIN and self.step > 0
        return {
            "epoch": self._epoch,
            "step": self.step if in_training else 0,
            "data": loader_state(self._loaders.get("train")) if in_training else None,
            "stage_so_far": self._log.so_far if in_training else {},
            "optimizer_step": self._optimizer_step,
            "skipped_steps": self._skipped_steps,
            "average": self._train_average.state_dict(),
            "metrics": self._train_sums.state_dict(),
            "summary": {name: getattr(self.summary, name) for name in _SUMMARY_TOTALS},
            "total_updates": self._schedulers.total_updates,
            "watch": self._watch.state_dict(),
            "patience": self._plan.patience.state_dict(),
            "logs": self._log.state_dict(),
        }

    def _own_part(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """What this process goes on from, of the states of all processes that saved, by rank."""
        rank, saved = distributed.rank(), len(states)
        if saved == distributed.world_size():
            own = states[rank]
        else:
            logger.warning(
                "saved by %d process(es), now there are %d: the data is shared anew, and an update covers the batches "
                "of all; for updates of one size divide batch_size or grad_accumulation_factor (--accept_changes).",
                saved,
                distributed.world_size(),
            )
            own = dict(states[min(rank, saved - 1)])
            averages, metrics = [it["average"] for it in states], [it.get("metrics", {}) for it in states]
            # What all have added up so far is one process's from here on: sums are over all of them.
            own["average"] = joined_averages(averages if rank == 0 else [])
            own["metrics"] = joined_metrics(metrics if rank == 0 else [])
            self._apart = rank if rank >= saved else 0
        # A loader of the framework's tells the place of all processes together.
        return {**own, "data": states[0]["data"]} if isinstance(self._loaders.get("train"), EpochLoader) else own

    def _set_random_state(self, state: Mapping[str, Any]) -> None:
        set_random_state(state)
        set_apart(self._apart)

    def _take_numbers(self, state: Mapping[str, Any]) -> None:
        self._optimizer_step, self._skipped_steps = state["optimizer_step"], state["skipped_steps"]
        self._train_average.load_state_dict(state["average"])
        self._train_sums.load_state_dict(state.get("metrics", {}))  # absent from checkpoints of before there were any
        self._stage_so_far, self._logs_at = state["stage_so_far"], state.get("logs", {})
        for name, value in state["summary"].items():
            setattr(self.summary, name, value)
        planned, total = state.get("total_updates"), self._schedulers.total_updates
        if planned is not None and total is not None and planned != total:
            logger.warning(
                "the learning rates were planned for %d updates, and this run is to take %d: from here on they follow "
                "the new plan",
                planned,
                total,
            )
        self._watch.load_state_dict(state["watch"])
        self._plan.patience.load_state_dict(state["patience"])

    def _save_inside_epoch(self, epoch: int | None) -> None:
        meta = {"epoch": epoch, "stage": self._stage.name.lower(), "step": self.step, "fit": self._fits}
        meta["optimizer_step"] = self.optimizer_step  # after the last verdict
        signum, self._interrupts.save_requested = self._interrupts.save_requested, None
        if signum is not None:
            logger.warning("%s: %s: saving", signal.Signals(signum).name, self._where(self.step))
        self._checkpoints.save_inside_epoch(meta)

    # ------------------------------------------------------------------ ends before the end

    def _after_window(self, epoch: int) -> None:
        """Between two updates: save if it is time, and leave if a signal asks."""
        this = self._round
        asked = self._save_due() if this is None else this.save_due
        due = self._checkpoints.due(self.ckpt_interval_steps, asked)
        if self._asked_to_end(self._signal if this is None else this.signal):
            self._save_and_leave(epoch)
        if due:
            self._save_inside_epoch(epoch)

    def _save_due(self) -> bool:
        """Whether this process asks for a save: a signal asked for it, or the main process's clock."""
        signum = self._interrupts.save_requested
        if signum is not None and not self._checkpoints.saves:
            self._interrupts.save_requested = None
            logger.warning("%s: there is no output_folder to save in", signal.Signals(signum).name)
        by_clock = distributed.is_main_process() and self._checkpoints.clock_due(self.ckpt_interval_minutes)
        return by_clock or self._interrupts.save_requested is not None

    def _may_leave(self, stage: Stage) -> bool:
        """Whether a signal asks the run to end, and it stands where it can: not between the batches of a window.

        Of several processes none leaves by itself.
        """
        if not self._interrupts.requested or distributed.initialized():
            return False
        if stage is Stage.TRAIN:
            return self._at_its_place and self.grad_accumulation_factor == 1
        return stage is Stage.VALID or not self._in_fit

    def _save_and_leave(self, epoch: int | None) -> None:
        """A signal asked the run to end: save where it stands, and end. Raises RunInterrupted."""
        if not self._checkpoints.saves:
            self._interrupts.leave(f"{self._where(self.step)}: ends here; there is no output_folder to save in")
        with self._interrupts.saving():
            try:
                self._save_inside_epoch(epoch)
                self._checkpoints.wait()
            except CheckpointError as error:
                self._interrupts.leave(f"{self._where(self.step)}: NOT saved: {error}")
        self._interrupts.leave(f"{self._where(self.step)}: saved; the same command goes on from here")

    def _start_afresh(self) -> None:
        """Forget what an earlier `fit` left behind, also one that an exception ended."""
        self._ledger.clear()
        self._plan.patience.reset()
        self._position.start_afresh()
        self.step, self.should_step, self._window_size, self._stage_so_far = 0, True, 1, {}
        self._asked = False
        self._stage, self._window_sums = Stage.TRAIN, None

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """A fit is under way: signals are waited out, and what it saves is on the disk when it ends."""
        self._in_fit = True
        self._fits += 1
        try:
            with self._interrupts:
                yield
                with self._interrupts.saving():
                    self._checkpoints.finish()
                # It came after the last step: all is saved.
                if self._asked_to_end(max(distributed.gather(self._signal))):
                    self._interrupts.leave("training is over and saved")
        except BaseException as error:
            with suppress(CheckpointError):  # the first exception is the one to raise
                self._checkpoints.wait()
            # Whoever catches it and calls `fit` again goes on with this one.
            self._fits -= 1
            self._checkpoints.resume_again()
            if isinstance(error, SystemExit) and not isinstance(error, RunInterrupted) and distributed.initialized():
                raise RecipeError(f"sys.exit({error.code!r}) inside fit leaves the other processes alone") from error
            raise
        finally:
            self._in_fit = False
            for loader in self._loaders.values():
                close_loader(loader)
            self._loaders = {}

    def _where(self, step: int) -> str:
        epoch = "" if self._epoch is None else f"epoch {self._epoch}, "
        return f"{self._stage.name.lower()} {epoch}batch {step}"

    def _note_best(self) -> None:
        if self._watch.best is not None:
            self.summary.best = {self._watch.metric: self._watch.best, "epoch": self._watch.best_epoch}

    def _note_end(self) -> None:
        """Say what a user may not expect of a fit that ended without an error."""
        if not self._trained:
            logger.warning("nothing was trained: the run was over already, or the epoch counter is used up")
        elif self.skipped_steps and not self.optimizer_step:
            logger.warning("all %d updates were skipped: nothing was learned", self.skipped_steps)

    @property
    def _saved_modules(self) -> nn.Module:
        """The modules as checkpoints hold them, without the wrappers for several processes."""
        known = self._checkpoints.checkpointer.recoverables if self._checkpoints.owned else {}
        return known.get("modules", self.modules)
