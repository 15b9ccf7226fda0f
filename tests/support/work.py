"""Bounds the work of a piece of code by the calls that it makes, which are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    """Fail the test as soon as the block has made more than `calls` calls of Python and C functions.

    It counts this thread alone. What takes long inside one call (a regular expression, a product of long numbers) is
    not seen, but for the seconds that a default test may take.
    """
    left = calls

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal left
        if event in ("call", "c_call"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                pytest.fail(f"more than {calls:,} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
    if left < 0:  # the block has caught the failure
        pytest.fail(f"more than {calls:,} calls")
