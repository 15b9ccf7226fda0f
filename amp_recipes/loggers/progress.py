"""Shows the progress of a run: a bar on a terminal, a plain line per interval elsewhere, or a line per epoch."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm

from amp_recipes.errors import ConfigError
from amp_recipes.loggers.text import QuietStream, format_rate, format_stage, format_value, stage_name
from amp_recipes.records import Logger, RunSummary, StageRecord, StepRecord


class ProgressLogger(Logger):
    """Writes to `stream` (default: standard error): a line per stage, and a bar if it is a terminal.

    interval_steps: on anything but a terminal, a line comes every so many updates. Below 1: ConfigError.
    A stream that is closed or breaks ends the display, not the run.
    """

    def __init__(self, interval_steps: int, stream: TextIO | None = None) -> None:
        if interval_steps < 1:
            raise ConfigError(
                f"log_interval_steps is {interval_steps}; expected 1 or more: the number of updates between two "
                "lines. For one line per epoch, set noprogressbar."
            )
        self._interval_steps = interval_steps
        self._stream = QuietStream(stream if stream is not None else sys.stderr)
        self._bar: _StageBar | None = None
        self._name = ""
        self._batches: int | None = None
        self._updates = 0

    def start_stage(self, stage: str, epoch: int | None, batches: int | None) -> None:
        """Show a new bar on a terminal."""
        self._close_bar(leave=True)
        self._name, self._batches, self._updates = stage_name(stage, epoch), batches, 0
        if self._stream.holds_a_bar():
            self._bar = _StageBar(
                desc=self._name,
                total=batches,
                file=self._stream,
                unit="batch",
                dynamic_ncols=True,
                # Read the clock at each update: guessing how many updates fit in an interval needs a
                # watching thread to correct it, and a thread is a danger to loaders that fork.
                miniters=1,
            )

    def advance(self, step: int) -> None:
        """Move the bar; it is drawn at most every tenth of a second."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log_step(self, record: StepRecord) -> None:
        """Keep the record for when the bar is drawn next, or write every `interval_steps`-th as a line."""
        if self._bar is not None:
            self._bar.latest = record
            return
        self._updates += 1
        if self._updates % self._interval_steps == 0:
            where = progress(record.step, self._batches)
            self._stream.write_line(f"{self._name} {where}: {format_step(record)}")

    def log_stage(self, record: StageRecord) -> None:
        """Replace the bar by one line with the stage's result."""
        self._close_bar(leave=False)
        self._stream.write_line(f"{stage_name(record.stage, record.epoch)}: {format_stage(record)}")

    def close(self) -> None:
        """Release the terminal. The bar of an unfinished stage stays, and shows where it stopped."""
        self._close_bar(leave=True)

    def _close_bar(self, leave: bool) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.leave = leave
            bar.close()


class EpochLogger(Logger):
    """Writes one line per epoch to `stream` (default: standard error), with the result of each of its stages.

    For a run that shows no progress. A test, which has no epoch, has a line of its own.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = QuietStream(stream if stream is not None else sys.stderr)
        self._epoch: int | None = None
        self._stages: list[str] = []

    def start_stage(self, stage: str, epoch: int | None, batches: int | None) -> None:
        """Write the line of an epoch that is over."""
        if epoch != self._epoch:
            self.close()
        self._epoch = epoch

    def log_stage(self, record: StageRecord) -> None:
        """Keep the result until the epoch is over."""
        self._stages.append(f"{record.stage} {format_stage(record)}")

    def log_summary(self, summary: RunSummary) -> None:
        """Write what is left, before others show the summary."""
        self.close()

    def close(self) -> None:
        """Write what is left."""
        if self._stages:
            epoch = "" if self._epoch is None else f"epoch {self._epoch}: "
            self._stream.write_line(epoch + "; ".join(self._stages))
        self._stages = []


class _StageBar(tqdm):
    """A bar that puts the latest record into words only when it is drawn."""

    monitor_interval = 0  # no watching thread
    latest: StepRecord | None = None

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        """Draw the bar, as tqdm does, with the latest record behind it."""
        if self.latest is not None:
            self.postfix = format_step(self.latest)
        return super().display(msg, pos)


def progress(step: int, batches: int | None) -> str:
    """`120/938`; `120` where the length is not known."""
    return f"{step}" if batches is None else f"{step}/{batches}"


def format_step(record: StepRecord) -> str:
    """Loss, learning rates, gradient norm and speed; the loss scale in fp16; skips where there were any."""
    parts = [f"loss {format_value(record.loss)}"]
    if len(record.lr) == 1:
        parts += [f"lr {format_value(rate)}" for rate in record.lr.values()]
    else:
        parts += [f"lr {name} {format_value(rate)}" for name, rate in record.lr.items()]
    if record.grad_norm is not None:
        parts.append(f"grad norm {format_value(record.grad_norm)}")
    if record.samples_per_second is not None:
        parts.append(format_rate(record.samples_per_second))
    if record.scale is not None:
        parts.append(f"scale {record.scale:.6g}")
    if record.scale is not None or record.skipped_steps:
        parts.append(f"skipped {format_value(record.skipped_steps)}")
    return ", ".join(parts)
