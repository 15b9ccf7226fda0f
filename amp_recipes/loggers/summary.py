"""Writes the summary of a run at its end: a table for people, `summary.json` for programs."""

from __future__ import annotations

import logging
import sys
from os import PathLike
from pathlib import Path
from typing import TextIO

from amp_recipes.files.run_files import write_atomically
from amp_recipes.files.strict_json import encode
from amp_recipes.loggers.text import QuietStream, format_bytes, format_rate, format_seconds, format_value, format_values
from amp_recipes.records import Logger, RunSummary

log = logging.getLogger(__name__)

FILE_NAME = "summary.json"
_PINS_SHOWN = 5


class SummaryLogger(Logger):
    """Writes `<folder>/summary.json` and prints the same as a table to `stream` (default: standard error).

    folder: None writes no file; table: False prints nothing. Neither a full disk nor a broken stream ends the run:
    what follows the summary (the evaluation after the training) is worth more than the summary.
    """

    def __init__(self, folder: str | PathLike[str] | None, stream: TextIO | None = None, table: bool = True) -> None:
        self.path = None if folder is None else Path(folder) / FILE_NAME
        self._stream = QuietStream(stream if stream is not None else sys.stderr)
        self._table = table

    def log_summary(self, summary: RunSummary) -> None:
        """Replace the file and print the table."""
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, (encode(summary.as_dict(), indent=2) + "\n").encode())
            except OSError as error:
                log.warning("Could not write %s (%s).", self.path, error)
        # Printed, not logged: users without a logging setup need it most.
        if self._table:
            self._stream.write_line(format_summary(summary))


def format_summary(summary: RunSummary) -> str:
    """The summary as an aligned table of plain text, without a newline at its end."""
    rows = {
        "precision": _precision(summary),
        "fp32 modules": _pins(summary.fp32_modules),
        "pinned in the run": ", ".join(f"{pin['module']} (step {pin['step']})" for pin in summary.pinned or []),
        "device": summary.device,
        "time": _time(summary),
        "updates": _updates(summary),
        "spikes": _spikes(summary),
        "underflow": _underflow(summary),
        "throughput": _throughput(summary),
        "peak memory": _memory(summary),
        **{stage: format_values(values) for stage, values in summary.last.items()},
        "best": _best(summary.best),
    }
    shown = {name: text for name, text in rows.items() if text}
    width = max(map(len, shown))
    return "\n".join(["Summary", *(f"  {name:<{width}}  {text}" for name, text in shown.items())])


def _precision(summary: RunSummary) -> str:
    return (
        f"{summary.precision}, evaluation {summary.eval_precision}, fp32 matrix products in {summary.float32_precision}"
    )


def _pins(names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:_PINS_SHOWN])
    more = len(names) - _PINS_SHOWN
    return f"{len(names)} ({shown}, and {more} more)" if more > 0 else f"{len(names)} ({shown})"


def _time(summary: RunSummary) -> str:
    if not summary.epochs:
        return format_seconds(summary.seconds)
    epochs = "1 epoch" if summary.epochs == 1 else f"{summary.epochs:,} epochs"
    return f"{format_seconds(summary.seconds)} for {epochs}"


def _updates(summary: RunSummary) -> str:
    tried = summary.optimizer_steps + summary.skipped_steps
    if not tried:
        return ""
    skips = "none skipped"
    if summary.skipped_steps:
        skips = f"{summary.skipped_steps:,} skipped ({summary.skipped_steps / tried:.2%})"
    if summary.skipped_steps and summary.backed_off_steps is not None:
        faults = summary.skipped_steps - summary.backed_off_steps
        skips += f": {summary.backed_off_steps:,} by the loss scale, {faults:,} not finite"
    return f"{summary.optimizer_steps:,}, {skips}"


def _spikes(summary: RunSummary) -> str:
    if not summary.spikes:
        return ""
    return f"{summary.spikes:,}, went back {'once' if summary.went_back == 1 else f'{summary.went_back:,} times'}"


def _underflow(summary: RunSummary) -> str:
    found = summary.underflow
    if not found or not found["share"]:
        return ""
    return (
        f"at most {found['share']:.2%} of the gradients (update {found['optimizer_step']:,}, loss scale "
        f"{found['scale']:g}); {found['parameter_share']:.2%} of {found['parameter']}"
    )


def _throughput(summary: RunSummary) -> str:
    if not summary.samples:
        return ""
    return f"{format_rate(summary.samples_per_second)} over {summary.samples:,} training samples"


def _memory(summary: RunSummary) -> str:
    if summary.peak_memory_bytes is None:
        return ""
    return f"{format_bytes(summary.peak_memory_bytes)} ({summary.peak_memory_of})"


def _best(best: dict[str, float | int] | None) -> str:
    if not best:
        return ""
    metrics = format_values({name: value for name, value in best.items() if name != "epoch"})
    return f"{metrics} in epoch {format_value(best['epoch'])}" if "epoch" in best else metrics
