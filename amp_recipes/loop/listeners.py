"""Updates everything that follows from an update's result: counters, learning rates, averages, the log, patience."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from amp_recipes.loop.window import Window
from amp_recipes.precision import Update


class Totals:
    """Counts of the whole run.

    optimizer_step: updates taken; skipped_steps: updates skipped; backed_off_steps: those of them that only the fp16
    loss scale was too high for, as a replay has shown; fits: calls of `fit` that began and did not fail; trained:
    whether this process has trained.
    """

    def __init__(self) -> None:
        self.optimizer_step = self.skipped_steps = self.backed_off_steps = self.fits = 0
        self.trained = False

    def load(self, state: Mapping[str, int]) -> None:
        """Continue counting from the totals in a checkpoint."""
        self.optimizer_step, self.skipped_steps = state["optimizer_step"], state["skipped_steps"]
        self.backed_off_steps = state.get("backed_off_steps", 0)  # absent in checkpoints of before there were any

    @contextmanager
    def fit(self) -> Iterator[None]:
        """Count a call of `fit`, unless it fails."""
        self.fits += 1
        try:
            yield
        except BaseException:
            self.fits -= 1
            raise

    def on_update(self, update: Update, window: Window) -> None:
        """Count it as taken or as skipped."""
        if update.taken:
            self.optimizer_step += 1
        else:
            self.skipped_steps += 1


class StepsByHand:
    """Counts an update that the recipe took itself, in a `fit_batch` of its own."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_hand_step(self, window: Window) -> None:
        """All optimizers may have stepped: the recipe's next step is to find the rates and averages that follow."""
        run, optimizers = self._run, self._run.recipe.optimizers_dict
        window.rates = {name: run.recovery.rate_in_force(optimizer) for name, optimizer in optimizers.items()}
        run.totals.optimizer_step += 1
        run.schedulers.after_update(optimizers)
        run.ema.update()


class Rates:
    """Moves the learning rates of the optimizers that took an update."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_update(self, update: Update, window: Window) -> None:
        """A skipped update moves none."""
        if update.taken and self._run.schedulers.by_optimizer:
            self._run.schedulers.after_update(update.grad_norms)


class Averages:
    """Moves the average weights, the average loss and the metrics."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_window(self, window: Window) -> None:
        """Count the batches of the window; a skipped update changes nothing."""
        if window.taken and not window.by_hand:
            self._run.ema.update()
        if window.taken or window.last is None:
            if window.sums is not None:
                window.in_pass.sums.merge(window.sums)
            for loss, weight in zip(window.losses, window.weights, strict=True):
                window.in_pass.average.add(loss, weight, self._run.recipe.update_average)


class StepLog:
    """Hands a record of each window to the loggers."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_window(self, window: Window) -> None:
        """Log its last update."""
        run, update = self._run, window.last
        if not run.log.takes_updates:
            return
        run.log.log_update(
            step=window.step,
            loss=run.loss_of(window),
            lr={name: float(rate) for name, rate in window.rates.items()},
            grad_norm=update.grad_norm if update is not None else None,
            scale=update.scale if update is not None else None,
            skipped=update is not None and not update.taken,
            optimizer_step=run.totals.optimizer_step,
            skipped_steps=run.totals.skipped_steps,
            samples=window.samples,
            underflow=run.underflow.share,
            pinned=window.pinned,
        )


class Skips:
    """Finds the cause of a skipped update, and ends a run whose updates stay nonfinite."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def on_update(self, update: Update, window: Window) -> None:
        """Count it; a skipped one may be replayed, to name its cause."""
        run = self._run
        patience, place = run.plan.patience, window.in_pass or run.current
        where = lambda: place.where(window.step)  # noqa: E731
        if update.taken:
            run.fit.replays.note_taken(update)
            patience.observe(update, where, run.totals.skipped_steps)
            return
        skip = run.fit.replays.judge(update, window)
        run.totals.backed_off_steps += skip.is_fault is False
        if skip.is_fault and patience.may_back_off(update):
            run.plan.scaler.put_back(update.scale)
        if skip.pin is None:
            patience.observe(update, where, run.totals.skipped_steps, skip.cause, skip.is_fault)
        else:  # its cause is gone
            window.pinned = skip.pin
            run.pinning.take(skip.pin, where())

    def on_window(self, window: Window) -> None:
        """Raise NonfiniteError if patience is exhausted: only now, so that the window is in the log.

        Several processes raise it together, in `explain_skips`.
        """
        if not self._run.processes.many:
            self._run.plan.patience.check()
