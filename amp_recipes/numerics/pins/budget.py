"""Turns a time limit into a number of steps, once, so that what is decided does not follow the clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amp_recipes.numerics.pins.equivalence import LOOKS

_PRICED_BY = 3  # steps in a dtype, whose median time is the price of each later one
_FEWEST_STEPS = 10  # of training that show anything


class Budget:
    """The seconds that a search may take, of which each step takes its price.

    A step's price is the time that the first few in its dtype took: another run of the same steps ends at the same one
    unless the machine is much slower. seconds: None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.left = math.inf if seconds is None else seconds
        self._measured: dict[torch.dtype, list[float]] = {}

    @property
    def is_spent(self) -> bool:
        return self.left <= 0

    def price(self, dtype: torch.dtype) -> float:
        """The seconds of one step in this dtype; 0 if none was taken."""
        return statistics.median(self._measured.get(dtype, [0.0]))

    @contextmanager
    def step(self, dtype: torch.dtype) -> Iterator[None]:
        """Pay for the step that is taken inside this context."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.pay(dtype, time.perf_counter() - began)

    def pay(self, dtype: torch.dtype, seconds: float) -> None:
        """Count a step that took this long."""
        measured = self._measured.setdefault(dtype, [])
        if len(measured) < _PRICED_BY:
            measured.append(seconds)
            self.left -= seconds
        else:
            self.left -= self.price(dtype)

    def training(self, steps: int, dtype: torch.dtype) -> tuple[int, int]:
        """The steps of a training, at most `steps`, and the pairs of them that fit; (0, 0) if too few do.

        Steps are halved until six pairs fit: more and shorter pairs show more than few long ones, and a number that
        is halved seldom depends on how fast the machine was.
        """
        of_pairs = self.left / max(1e-9, self.price(torch.float32) + self.price(dtype))
        fit = steps
        while fit * LOOKS[1] > of_pairs and fit >= 2 * min(steps, _FEWEST_STEPS):
            fit //= 2
        pairs = max((look for look in LOOKS if fit * look <= of_pairs), default=0)
        return (fit, pairs) if pairs else (0, 0)
