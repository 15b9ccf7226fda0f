"""Writes records: to the terminal, `metrics.jsonl`, `summary.json`. A new logger is a new file here."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.loggers.jsonl import JsonlLogger
    from amp_recipes.loggers.notices import show_notices
    from amp_recipes.loggers.progress import EpochLogger, ProgressLogger
    from amp_recipes.loggers.run_log import RunLog
    from amp_recipes.loggers.standard import make_loggers
    from amp_recipes.loggers.summary import SummaryLogger, format_summary

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
__getattr__, __dir__ = lazy_names(__name__)
