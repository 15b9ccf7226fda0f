"""Writes records: to the terminal, `metrics.jsonl`, `summary.json`. A new logger is a new file here."""

from __future__ import annotations

from os import PathLike

from amp_recipes.loggers.jsonl import JsonlLogger
from amp_recipes.loggers.notices import show_notices
from amp_recipes.loggers.progress import EpochLogger, ProgressLogger
from amp_recipes.loggers.run_log import RunLog
from amp_recipes.loggers.summary import SummaryLogger, format_summary
from amp_recipes.records import Logger

__all__ = [
    "EpochLogger",
    "JsonlLogger",
    "ProgressLogger",
    "RunLog",
    "SummaryLogger",
    "format_summary",
    "make_loggers",
    "show_notices",
]


def make_loggers(
    folder: str | PathLike[str] | None, show_progress: bool, interval_steps: int, table: bool
) -> list[Logger]:
    """The framework's own loggers: records into `folder` where there is one, progress or else a line per epoch.

    table: whether the summary is printed where progress is shown; else it is all that tells of a test, and always is.
    """
    loggers: list[Logger] = [ProgressLogger(interval_steps) if show_progress else EpochLogger()]
    if folder is not None:
        loggers.append(JsonlLogger(folder))
    if show_progress or folder is not None:
        loggers.append(SummaryLogger(folder, table=table or not show_progress))
    return loggers
