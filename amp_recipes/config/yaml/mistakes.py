"""Formats mistakes for people: all at once, with the nearest known name, safe for a terminal."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_TOLD = 100  # mistakes in one message
_COMPARED_CHARACTERS, _COMPARED_NAMES = 200, 3_000
_SHOWN_CHARACTERS = 80


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let the reader of standard output close it early in the block, as `head` does; the rest is discarded."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it was closed before the start
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def did_you_mean(name: Any, known: Iterable[Any], prefix: str = "") -> str:
    """` Did you mean x?` for the nearest of the `known` names; empty if none is near, or if there are thousands."""
    nearest = _nearest(str(name).replace("-", "_"), known)
    return f" Did you mean {prefix}{nearest}?" if nearest else ""


def slip_of(key: str, known: Iterable[str], cutoff: float, plurals: bool = False) -> str:
    """The known name of which `key` is probably a slip; empty if it is rather a name of its own.

    cutoff: as of `difflib.get_close_matches`, high where a name of its own must not be refused; plurals: whether
    `seeds` may be a slip of `seed`.
    """
    nearest = _nearest(key, known, cutoff)
    is_plural = nearest.rstrip("s") == key.rstrip("s") and nearest.lower() != key.lower()
    return "" if is_plural and not plurals else nearest


def _nearest(name: str, known: Iterable[Any], cutoff: float = 0.6) -> str:
    names = sorted(text for text in map(str, known) if len(text) <= _COMPARED_CHARACTERS)
    if len(name) > _COMPARED_CHARACTERS or len(names) > _COMPARED_NAMES:
        return ""  # a comparison takes 10 microseconds, and longer for long names
    same = [text for text in names if text.lower() == name.lower()]
    return next(iter(same or difflib.get_close_matches(name, names, 1, cutoff)), "")


def join_mistakes(mistakes: list[str], where: str) -> str:
    """One message for all mistakes: the mistake itself if it is alone, else a count and one per line.

    Of hundreds, only the first are shown: fixing one often fixes others. Control characters of a terminal
    (a YAML may contain them) are shown as escapes.
    """
    shown_mistakes = [printable(text) for text in mistakes[:_TOLD]]
    if len(mistakes) == 1:
        return shown_mistakes[0]
    left_off = len(mistakes) - _TOLD
    more = [f"... and {left_off} more."] if left_off > 0 else []
    return "\n  ".join([f"{len(mistakes)} mistakes in {printable(where)}:", *shown_mistakes, *more])


def one_line(text: str) -> str:
    """`text` with an escape for each character that does not just show, such as those that a terminal obeys."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """`one_line` of each line of `text`."""
    return "\n".join(map(one_line, text.split("\n")))


def short(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Text for a message: in one line, cut where it is long."""
    line = one_line(text[: characters + 1])
    return line if len(line) <= characters else f"{line[: characters - 3]}..."


def shown(value: Any, characters: int = _SHOWN_CHARACTERS) -> str:
    """A value for a message: short, whatever it is."""
    try:
        return short(repr(value), characters)
    except Exception:  # of an object that somebody else wrote, or an int too long for text
        return f"a {type(value).__name__}"
