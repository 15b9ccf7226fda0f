"""Tells which part of a diagnosis runs, measures what each costs, and lets the others go on where one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from amp_recipes.numerics.pins.unrunnable import what_raised
from amp_recipes.numerics.verdict import Sentence, say

T = TypeVar("T")


class Parts:
    """The parts of a diagnosis.

    tell: told each part when it begins; of: how many there will be; seconds: of processor time (all threads of the
    process) by part, those of one precision below its name; notes: what failed.
    """

    def __init__(self, tell: Callable[[str], None], of: int) -> None:
        self._tell, self._of, self._begun = tell, of, 0
        self._running: list[list[float]] = []
        self.seconds: dict[str, Any] = {}
        self.notes: list[Sentence] = []

    def run(self, name: str, call: Callable[[], T], precision: str = "") -> T:
        """Do a part; the time of a part inside it is not counted twice."""
        self._begun += 1
        number, of = self._begun, max(self._of, self._begun)
        self._tell(f"diagnosis, part {number} of {of}: {name}{f' in {precision}' if precision else ''}")
        began, inner = time.process_time(), [0.0]
        self._running.append(inner)
        try:
            return call()
        finally:
            self._running.pop()
            took = time.process_time() - began
            if self._running:
                self._running[-1][0] += took
            seconds = self.seconds.setdefault(precision, {}) if precision else self.seconds
            seconds[name] = round(seconds.get(name, 0.0) + took - inner[0], 3)

    def skip(self, number: int = 1) -> None:
        """Count parts that need not run."""
        self._begun += number

    def attempt(self, name: str, call: Callable[[], T], otherwise: T, precision: str = "") -> T:
        """Do a part; if it raises, note that, and return `otherwise`."""
        try:
            return self.run(name, call, precision)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the recipe's own code raises
            where = f" in {precision}" if precision else ""
            self.notes.append(say("not_measured", part=f"{name}{where}", error=what_raised(error)))
            return otherwise
