"""Reads whole numbers from the command line, and says what the machine is."""

from __future__ import annotations

import argparse
import platform
from contextlib import suppress
from pathlib import Path


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def count(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def cpu_model() -> str:
    """What the processor calls itself, where the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()
