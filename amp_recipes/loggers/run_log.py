"""Turns the events of the loop into records, and passes them to every logger."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from amp_recipes.loggers.text import format_stage, stage_name
from amp_recipes.modules.devices import queues_work
from amp_recipes.records import Logger, RunSummary, StageRecord, StepRecord

log = logging.getLogger(__name__)

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class RunLog:
    """The running stage's clock and counts, and the loggers that receive them.

    summary: filled in as stages end; memory_interval_steps: how often the device is asked for its peak memory.
    recovery: may be set to what the updates from then on are to be marked with; None: with nothing.
    """

    recovery: str | None = None

    def __init__(
        self, loggers: Sequence[Logger], summary: RunSummary, device: torch.device, memory_interval_steps: int
    ) -> None:
        self.loggers = loggers
        self.takes_updates = any(type(logger).log_step is not Logger.log_step for logger in loggers)
        self.summary = summary
        self._device = device
        self._interval = max(1, memory_interval_steps)
        self._stage = ""
        self._epoch: int | None = None
        self._began = time.perf_counter()
        self._waited = 0.0  # seconds of the stage for batches
        self._batches = 0
        self._samples = 0
        self._is_running = self._is_counted = False
        self._memory: int | None = None
        self._records = 0

    def start_stage(
        self,
        stage: str,
        epoch: int | None,
        batches: int | None,
        batches_done: int = 0,
        samples_done: int = 0,
        seconds_done: float = 0.0,
        data_seconds_done: float = 0.0,
    ) -> None:
        """A stage begins; what is `done` of it was done before an interruption."""
        self._stage, self._epoch, self._began = stage, epoch, time.perf_counter() - seconds_done
        self._batches, self._samples, self._waited = batches_done, samples_done, data_seconds_done
        self._is_running, self._is_counted = True, False
        for logger in self.loggers:
            logger.start_stage(stage, epoch, batches)

    @property
    def seconds(self) -> float:
        """The seconds of the running stage so far."""
        return time.perf_counter() - self._began

    @property
    def so_far(self) -> dict[str, float]:
        """The data that a run which resumes inside the stage passes to `start_stage`, besides the batches."""
        return {"samples_done": self._samples, "seconds_done": self.seconds, "data_seconds_done": self._waited}

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, with the time that each is waited for counted as the stage's."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - began
            yield batch

    def advance(self, batches: int, samples: int) -> None:
        """`batches` more batches with `samples` samples are done."""
        self._batches += batches
        self._samples += samples
        for logger in self.loggers:
            logger.advance(self._batches)

    def log_update(self, **update: Any) -> None:
        """One update was taken or skipped; update: what the loop knows of its `StepRecord`."""
        seconds = self.seconds
        if self._records % self._interval == 0:
            self._memory = device_peak_memory(self._device)
        self._records += 1
        record = StepRecord(
            stage=self._stage,
            epoch=self._epoch,
            **update,
            samples_per_second=self._samples / seconds if seconds > 0 else 0.0,
            seconds=seconds,
            memory_bytes=self._memory,
            wall_time=time.time(),
            recovery=self.recovery,
        )
        for logger in self.loggers:
            logger.log_step(record)

    def end_stage(self, loss: float, metrics: Mapping[str, float], optimizer_step: int) -> None:
        """The running stage is over."""
        self._is_running = False
        record = StageRecord(
            stage=self._stage,
            epoch=self._epoch,
            loss=None if math.isnan(loss) else loss,
            metrics=dict(metrics),
            seconds=self.seconds,
            batches=self._batches,
            samples=self._samples,
            optimizer_step=optimizer_step,
            data_seconds=self._waited,
            wall_time=time.time(),
        )
        self.summary.seconds += record.seconds
        self.summary.last[record.stage] = {"loss": loss, **record.metrics}
        for logger in self.loggers:
            logger.log_stage(record)
        if self.loggers:
            log.info("%s: %s", stage_name(record.stage, record.epoch), format_stage(record))

    def count_training(self) -> None:
        """Add the running stage to the summary's training totals."""
        self._is_counted = True
        self.summary.epochs += 1
        self._add_training(self.summary, self.seconds)

    def _add_training(self, summary: RunSummary, seconds: float) -> None:
        summary.samples += self._samples
        summary.training_seconds += seconds
        if summary.training_seconds > 0:
            summary.samples_per_second = summary.samples / summary.training_seconds

    def log_summary(self) -> None:
        """A fit or an evaluation is over, perhaps inside a stage, which then counts as far as it came."""
        peak = device_peak_memory(self._device)
        self.summary.peak_memory_bytes = peak if peak is not None else process_peak_memory()
        self.summary.peak_memory_of = "device" if peak is not None else "process"
        summary = replace(self.summary)
        if self._is_running:
            seconds = self.seconds
            summary.seconds += seconds
            if self._stage == "train" and not self._is_counted:
                self._add_training(summary, seconds)
        for logger in self.loggers:
            logger.log_summary(summary)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each logger, by its place and class, for a checkpoint."""
        states = {name: getattr(logger, "state_dict", dict)() for name, logger in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the logs to their state at the save of the checkpoint that the run resumes from."""
        for name, logger in self._named():
            if state := states.get(name):
                logger.load_state_dict(state)

    def _named(self) -> list[tuple[str, Logger]]:
        return [(f"{index} {type(logger).__name__}", logger) for index, logger in enumerate(self.loggers)]

    def close(self) -> None:
        """Close every logger, also where one of them fails."""
        with ExitStack() as stack:
            for logger in self.loggers:
                stack.callback(logger.close)


def device_peak_memory(device: torch.device) -> int | None:
    """Peak bytes allocated on an accelerator; None where it does not tell. Asks the allocator, not the device."""
    if not queues_work(device):
        return None
    try:
        return torch.accelerator.max_memory_allocated(device)
    except RuntimeError:  # the allocator of a device out of torch's tree need not count
        return None


def process_peak_memory() -> int | None:
    """Peak resident bytes of this process; None where the platform does not tell."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
