"""Decides when a run saves inside an epoch, and when it ends because of a signal."""

from __future__ import annotations

import logging
import signal
from typing import Any

from amp_recipes import distributed
from amp_recipes.errors import CheckpointError
from amp_recipes.loop.window import Shares
from amp_recipes.modules.devices import queues_work

logger = logging.getLogger(__name__)


class Saving:
    """Saves between two updates: at intervals, and where a signal asks for it."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @property
    def signal(self) -> int:
        """The number of the signal that asks this process to end; 0: none does."""
        return self._run.interrupts.requested or 0

    def asked_to_end(self, signum: int) -> bool:
        """Whether a signal, which any process may have been sent, asks all of them to end; all know the same of it."""
        if signum:
            self._run.interrupts.requested = signum
        self._run.current.asked_to_end = signum != 0
        return signum != 0

    def requests(self) -> tuple[int, bool]:
        """The signal that asks this process to end (0: none does), and whether this process asks for a save.

        A signal asks for a save, or the main process's clock.
        """
        run, interrupts = self._run, self._run.interrupts
        if interrupts.save_requested is not None and not run.checkpoints.saves:
            logger.warning(
                "%s: not saved, because there is no output_folder", signal.Signals(interrupts.save_requested).name
            )
            interrupts.save_requested = None
        minutes = run.settings.ckpt_interval_minutes
        by_clock = minutes > 0 and distributed.is_main_process() and run.checkpoints.clock_due(minutes)
        return interrupts.requested or 0, by_clock or interrupts.save_requested is not None

    def after_window(self, shares: Shares) -> None:
        """Between two updates: save if it is time, and leave if a signal asks."""
        signum, save_asked = shares.requests()
        if queues_work(self._run.device):
            self._run.checkpoints.prepare()
        due = self._run.checkpoints.due(self._run.settings.ckpt_interval_steps, save_asked)
        if signum and self.asked_to_end(signum):
            self.save_and_leave()
        if due:
            self.save_inside_epoch()

    def save_inside_epoch(self) -> None:
        """Save here, unless a spike recovery finds that this is nothing to go back to."""
        if self._run.recovery.allows_save():
            self.save_now()

    def save_now(self, epoch: int | None = None) -> None:
        """Save here; epoch: to name in the checkpoint, if it is not that of the pass."""
        run, current = self._run, self._run.current
        meta = {
            "epoch": current.epoch if epoch is None else epoch,
            "stage": current.stage.name.lower(),
            "step": current.step,
            "fit": run.totals.fits,
            "optimizer_step": run.optimizer_step,  # after the last verdict
        }
        signum, run.interrupts.save_requested = run.interrupts.save_requested, None
        if signum is not None:
            logger.warning("%s: %s: saving", signal.Signals(signum).name, current.where())
        run.checkpoints.save_inside_epoch(meta)

    def save_and_leave(self) -> None:
        """A signal asked the run to end: save where it stands, and end. Raises RunInterrupted."""
        run = self._run
        where = run.current.where()
        run.recovery.before_leaving()
        if not run.checkpoints.saves:
            run.interrupts.leave(f"{where}: stopped; not saved, because there is no output_folder")
        with run.interrupts.saving():
            try:
                self.save_inside_epoch()
                run.checkpoints.wait()
            except CheckpointError as error:
                run.interrupts.leave(f"{where}: stopped; NOT saved: {error}")
        run.interrupts.leave(f"{where}: saved; run the same command again to resume")
