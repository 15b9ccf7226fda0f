"""Shows the framework's notices on the terminal of a user who has set up no logging."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from amp_recipes import distributed

_PACKAGE = "amp_recipes"
# Its lines are for log files: the progress logger shows the same on the terminal.
_FILE_ONLY = "amp_recipes.loggers.run_log"


class _Notices(logging.Handler):
    """Writes what no other handler shows: notices, and warnings where the root logger has no handler.

    Of several processes the main one speaks; the others only of errors, with their rank.
    """

    def emit(self, record: logging.LogRecord) -> None:
        shown_elsewhere = record.levelno >= logging.WARNING and logging.getLogger().handlers
        main = distributed.is_main_process()
        if not shown_elsewhere and record.name != _FILE_ONLY and (main or record.levelno >= logging.ERROR):
            with suppress(OSError, ValueError):  # a terminal that is closed loses notices, and no run
                print(f"{'' if main else f'[rank {distributed.rank()}] '}{self.format(record)}", file=sys.stderr)


def show_notices() -> None:
    """From now on, notices (which precision `auto` chose, what is pinned) appear on standard error. Once is enough."""
    logger = logging.getLogger(_PACKAGE)
    if not any(isinstance(handler, _Notices) for handler in logger.handlers):
        logger.addHandler(_Notices())
        if distributed.is_main_process():
            logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
