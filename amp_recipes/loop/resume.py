"""Saves the state of the loop in checkpoints, and restores it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from amp_recipes import distributed
from amp_recipes.checkpoint import best_checkpoint, fit_of, load_weights, model_weights
from amp_recipes.data import (
    EpochLoader,
    batches_from,
    generator_states,
    loader_state,
    replay_reason,
    set_generator_states,
)
from amp_recipes.loop.loss_average import joined_averages
from amp_recipes.loop.metrics import joined_metrics
from amp_recipes.stage import Stage
from amp_recipes.state.position import Snapshot
from amp_recipes.state.randomness import random_state, set_apart, set_random_state

logger = logging.getLogger(__name__)

RESUMING_INSIDE = "resuming inside an epoch: "
"""Opens the log line that says why a loader's batches are read again."""

_OF_EACH_PROCESS = ("step", "data", "stage_start", "now", "average", "metrics")  # in a checkpoint


class LoopState:
    """The recoverable `brain` of a checkpoint: the loop's numbers, and the place of the fit.

    parts: what `part_of_process` returned in each process, for the next `state_dict`.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._token = uuid.uuid4().hex
        self.parts: list[dict[str, Any]] | None = None
        self.rng_offset = 0  # not 0: this process draws from a state that another one saved

    def part_of_process(self) -> dict[str, Any]:
        """Return the part of the state that differs between processes."""
        state = self._state()
        return {name: state[name] for name in _OF_EACH_PROCESS if name in state}

    def state_dict(self) -> dict[str, Any]:
        """The loop's numbers and the place.

        others: what differs in the processes after the first; taken_by: nobody has set `parts`, and only the process
        that this names finds itself in it.
        """
        parts, self.parts = self.parts, None
        if parts is None:
            return {**self._state(), "taken_by": self._token}
        return {**self._state(), **parts[0], "others": parts[1:]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, also with another number of processes."""
        if state.get("taken_by") != self._token:
            state = self._own_part([dict(state), *({**state, **own} for own in state.get("others", []))])
        self._take_numbers(state)
        self._run.fit.load_state_dict(state)

    def _state(self) -> dict[str, Any]:
        return {**self._numbers(), **self._run.fit.position.state_dict()}

    def _numbers(self) -> dict[str, Any]:
        run, current = self._run, self._run.current
        run.pending.settle()
        if len(run.pending):
            logger.warning(
                "%s: this checkpoint is saved in the middle of an update, without its loss and EMA. Save in "
                "on_stage_end, or set ckpt_interval_steps or ckpt_interval_minutes",
                current.where(),
            )
        in_training = current.stage is Stage.TRAIN and current.step > 0
        return {
            "epoch": current.epoch,
            "step": current.step if in_training else 0,
            "data": loader_state(run.fit.loaders.get("train")) if in_training else None,
            "stage_so_far": run.log.so_far if in_training else {},
            "optimizer_step": run.totals.optimizer_step,
            "skipped_steps": run.totals.skipped_steps,
            "backed_off_steps": run.totals.backed_off_steps,
            "average": run.train_pass.average.state_dict(),
            "metrics": run.train_pass.sums.state_dict(),
            "summary": run.summary.totals(),
            "total_updates": run.schedulers.total_updates,
            "watch": run.best.state_dict(),
            "patience": run.plan.patience.state_dict(),
            "replays": run.fit.replays.state_dict(),
            "logs": run.log.state_dict(),
            **run.underflow.state_dict(),
            **run.recovery.numbers(),
            **run.pinning.numbers(),
            **run.task.watch.state_dict(),
        }

    def _take_numbers(self, state: Mapping[str, Any]) -> None:
        run = self._run
        run.totals.load(state)
        train_pass = run.new_train_pass(state["epoch"])
        train_pass.average.load_state_dict(state["average"])
        train_pass.sums.load_state_dict(state.get("metrics", {}))  # absent in checkpoints of before there were any
        run.summary.take_totals(state["summary"])
        planned, total = state.get("total_updates"), run.schedulers.total_updates
        if planned is not None and total is not None and planned != total:
            logger.warning(
                "the learning rates were planned for %d updates, but this run takes %d: from here on they follow the "
                "new plan",
                planned,
                total,
            )
        run.best.load_state_dict(state["watch"])
        run.plan.patience.load_state_dict(state["patience"])
        run.fit.replays.load_state_dict(state.get("replays", {"count": 0}))  # absent in older checkpoints
        run.underflow.take_numbers(state)
        run.recovery.take_numbers(state)
        run.pinning.take_numbers(state)
        run.task.watch.load_state_dict(state)

    def _own_part(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state from which this process resumes, from the states of all processes that saved, by rank."""
        rank, saved = distributed.rank(), len(states)
        if saved == distributed.world_size():
            own = states[rank]
        else:
            logger.warning(
                "the checkpoint was saved by %d process(es), and now there are %d: the data is divided again, and an "
                "update now covers the batches of all of them. To keep the size of an update, multiply "
                "batch_size or grad_accumulation_factor by %d/%d (with --accept_changes).",
                *(2 * (saved, distributed.world_size())),
            )
            own = dict(states[min(rank, saved - 1)])
            # What all have added up so far is one process's from here on: sums are over all of them.
            joined = states if rank == 0 else []
            own["average"] = joined_averages([state["average"] for state in joined])
            own["metrics"] = joined_metrics([state.get("metrics", {}) for state in joined])
            self.rng_offset = rank if rank >= saved else 0
        # A loader of the framework's stores the place of all processes together.
        is_our_loader = isinstance(self._run.fit.loaders.get("train"), EpochLoader)
        return {**own, "data": states[0]["data"]} if is_our_loader else own


class Resume:
    """Resumes from the newest checkpoint, or starts from the weights of another run."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._state = LoopState(run)
        run.checkpoints.register("brain", self._state)

    def from_newest(self) -> None:
        """Register training's own state for checkpoints, and resume from the newest one, once.

        One that a later `fit` of this process's course saved waits for that `fit`.
        """
        run = self._run
        if run.plan.scaler.is_enabled():
            run.checkpoints.register("scaler", run.plan.scaler)
        if hasattr(run.fit.epoch_counter, "state_dict"):
            run.checkpoints.register("epoch_counter", run.fit.epoch_counter, replace=True)
        run.recipe_state.begin(keep=run.recovery.goes_back)
        if self.fit_is_over():
            return
        if run.checkpoints.resume(run.settings.resume) is None:
            self._set_records_aside()
            if run.settings.init_from is not None and not run.totals.trained:
                self.init_from_run()
            return
        run.warn_of_rates_at_zero()
        self.after_restore()

    def after_restore(self) -> None:
        """A checkpoint was loaded: what follows from its place, before its epoch begins."""
        run, position, counter = self._run, self._run.fit.position, self._run.fit.epoch_counter
        run.note_best()
        run.plan.updates.forget_state()
        run.restore_kernels()
        if position.inside_epoch and hasattr(counter, "state_dict") and hasattr(counter, "current"):
            counter.current -= 1  # SpeechBrain's, which has no state_dict, does so itself
        if position.epoch_loss_due is not None:
            # The recipe saved in on_stage_end, before what follows from the epoch's end.
            run.schedulers.after_epoch(position.epoch_loss_due)
            if run.best.metric == "loss":
                run.best.observe({"loss": position.epoch_loss_due}, position.done)
            position.epoch_loss_due = None

    def fit_is_over(self) -> bool:
        """Whether the newest checkpoint is of a later `fit` than this one, which is then over."""
        run = self._run
        if run.settings.resume == "never" or not run.checkpoints.resumes:
            return False
        newest = run.checkpoints.checkpointer.find_checkpoint()
        return newest is not None and fit_of(newest) > run.totals.fits + 1

    def init_from_run(self) -> None:
        """Begin with the weights of the run that `init_from` names."""
        run = self._run
        checkpoint = best_checkpoint(run.settings.init_from)
        load_weights(run.saved_modules, model_weights(checkpoint, run.saved_modules), str(checkpoint.path))
        run.ema.restart()
        logger.info("starting from the weights of %s (epoch %s)", checkpoint.path, checkpoint.meta.get("epoch"))

    def _set_records_aside(self) -> None:
        """Give the metrics of the run whose checkpoints were set aside the same number."""
        checkpoints, folder = self._run.checkpoints, self._run.settings.output_folder
        number, checkpoints.set_aside_number = checkpoints.set_aside_number, None
        records = Path(folder or "") / "metrics.jsonl"
        if number is not None and folder is not None and records.is_file():
            records.rename(records.with_name(f"metrics.{number}.jsonl"))

    # ------------------------------------------------------------------ random generators and the recipe's memory

    def snapshot(self, with_recipe: bool) -> Snapshot:
        """Return the states of the generators, and the recipe's state if asked."""
        run = self._run
        return {
            "random": random_state(run.device),
            "loaders": {name: generator_states(loader) for name, loader in run.fit.loaders.items()},
            "recipe": run.recipe_state.state_dict() if with_recipe else None,
        }

    def restore(self, snapshot: Snapshot | None) -> None:
        """Put the recipe's memory and the random generators where they were when the snapshot was taken.

        None: there is none. Then processes part ways here: until now, all have drawn the same.
        """
        run = self._run
        if snapshot is not None:
            run.recipe_state.load_state_dict(snapshot["recipe"])
            for name, loader in run.fit.loaders.items():
                set_generator_states(loader, snapshot["loaders"].get(name, {}))
            self._set_random_state(snapshot["random"])
        elif not run.totals.trained:
            set_apart(distributed.data_rank())

    def _set_random_state(self, state: Mapping[str, Any]) -> None:
        set_random_state(state)
        set_apart(self._state.rng_offset)

    def training_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The epoch's batches that are left to train on."""
        run, current, position = self._run, self._run.current, self._run.fit.position
        place = position.take_place()
        position.training_begins(resumed=place)
        current.at_place = place is None
        if place is None:
            return run.feed.limited(batches_from(loader, 0, None))
        reason = replay_reason(loader)
        if reason:
            logger.warning("%s%s", RESUMING_INSIDE, reason)
        # A loader without an order of its own takes it from the global generators, as it did when the epoch began.
        self._set_random_state(place.stage_start["random"])
        batches = batches_from(loader, place.step, place.data)
        current.step = getattr(loader, "batches_done", place.step)  # another number of processes makes others
        current.at_place = True
        self.restore(place.now)  # also what on_stage_start has just reset
        return run.feed.limited(batches, done=place.step)
