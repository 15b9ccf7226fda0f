"""Formats mistakes for people: all at once, with the nearest known name, safe for a terminal."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_TOLD = 100  # mistakes in one message
_COMPARED_CHARACTERS, _COMPARED_NAMES = 200, 3_000


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Within it, whoever reads standard output may have seen enough, as `head` has: the rest goes nowhere."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it was closed before the start
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def did_you_mean(name: Any, known: Any, prefix: str = "") -> str:
    """` Did you mean x?` for the nearest of the `known` names; empty if none is near, or if there are thousands."""
    candidates = sorted(text for text in map(str, known) if len(text) <= _COMPARED_CHARACTERS)
    if len(str(name)) > _COMPARED_CHARACTERS or len(candidates) > _COMPARED_NAMES:
        return ""  # a comparison takes 10 microseconds, and longer for long names
    nearest = difflib.get_close_matches(str(name).replace("-", "_"), candidates, n=1)
    return f" Did you mean {prefix}{nearest[0]}?" if nearest else ""


def slip_of(key: str, known: Iterable[str], cutoff: float, plurals: bool = False) -> str:
    """The known name of which `key` is probably a slip; empty if it is rather a name of its own.

    cutoff: as of `difflib.get_close_matches`, high where a name of its own must not be refused; plurals: whether
    `seeds` may be a slip of `seed`.
    """
    names = [name for name in known if len(name) <= _COMPARED_CHARACTERS]
    if len(key) > _COMPARED_CHARACTERS or len(names) > _COMPARED_NAMES:
        return ""
    same = [name for name in names if name.lower() == key.lower()]
    near = same or difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
    return near[0] if near and (same or plurals or near[0].rstrip("s") != key.rstrip("s")) else ""


def join_mistakes(mistakes: list[str], where: str) -> str:
    """One message for all mistakes: the mistake itself if it is alone, else a count and one per line.

    Of hundreds, the first are told: nobody reads more, and mending one often mends others. What a terminal would obey
    (a YAML may hold it) is shown as an escape.
    """
    told = [printable(text) for text in mistakes[:_TOLD]]
    if len(mistakes) == 1:
        return told[0]
    left_off = len(mistakes) - _TOLD
    more = [f"... and {left_off} more."] if left_off > 0 else []
    return "\n  ".join([f"{len(mistakes)} mistakes in {printable(where)}:", *told, *more])


def printable(text: str) -> str:
    """`text` with what a terminal would obey, and what turns the direction of writing, as escapes."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
