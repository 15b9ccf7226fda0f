"""Makes the loggers that every run has."""

from __future__ import annotations

from os import PathLike

from amp_recipes.loggers.jsonl import JsonlLogger
from amp_recipes.loggers.progress import EpochLogger, ProgressLogger
from amp_recipes.loggers.summary import SummaryLogger
from amp_recipes.records import Logger


def make_loggers(
    folder: str | PathLike[str] | None, show_progress: bool, interval_steps: int, table: bool
) -> list[Logger]:
    """The framework's own loggers: records into `folder` where there is one, progress or else a line per epoch.

    table: whether the summary is printed.
    """
    loggers: list[Logger] = [ProgressLogger(interval_steps) if show_progress else EpochLogger()]
    if folder is not None:
        loggers.append(JsonlLogger(folder))
    if show_progress or folder is not None:
        loggers.append(SummaryLogger(folder, table=table))
    return loggers
