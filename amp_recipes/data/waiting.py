"""Waits for a loader's workers until a time limit, or until the caller wants to go."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

POLL_SECONDS = 1.0  # how long a request to stop may go unseen
# The text of torch/utils/data/dataloader.py: torch has no class for this error.
TIMED_OUT = re.compile(r"DataLoader timed out after (?P<seconds>[\d.]+) seconds")


class LoadingStopped(Exception):
    """The loader's `stop` said yes while the next batch was waited for; it comes if the pass is iterated on."""


def poll_seconds(limit: float, stop: Callable[[], bool] | None, persistent: bool) -> float:
    """The timeout for torch's loader if `limit` is the user's (0: none)."""
    if stop is None or persistent:  # persistent ones wait by that timeout for the end of an earlier pass, too
        return limit
    return min(limit, POLL_SECONDS) if limit else POLL_SECONDS


def next_batch(batches: Iterator[Any], limit: float, stop: Callable[[], bool] | None) -> Any:
    """The next one of `batches`, torch's iterator, whose timeout is `poll_seconds`.

    torch takes nothing from its queue where it times out, so that it can be asked again. Raises LoadingStopped, and
    after `limit` seconds (0: never) torch's RuntimeError.
    """
    began = time.monotonic()
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not TIMED_OUT.search(str(error)):
                raise
            if stop is not None and stop():
                raise LoadingStopped from None
            if limit and time.monotonic() - began >= limit:
                raise RuntimeError(f"DataLoader timed out after {limit} seconds") from error
