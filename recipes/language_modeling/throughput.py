"""Measures the speed of large matrix products on the device."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

_MEASURED_SECONDS = 0.05  # at least, so that the error of the clock is small
_MOST_ROWS = 8192  # more would be the run's peak of memory; a faster device takes the same product several times
_MOST_TIMES = 256


def measure_peak_flops(model: nn.Module, precision: Callable[[], AbstractContextManager]) -> float:
    """Return the floating point operations per second of a large square matrix product where the model lies.

    precision: makes the context in which training computes, which decides the dtype. It takes half a second, or less.
    What a data sheet promises is more; on a CPU it is of this process's threads, and less where others use them.
    """
    device = next(model.parameters()).device
    rows, times, best = 256, 1, 0.0
    while True:
        generator = torch.Generator(device=device).manual_seed(0)  # not the global one, which training uses
        one, other = (torch.randn(rows, rows, device=device, generator=generator) for _ in range(2))
        with torch.no_grad(), precision():
            dtype = (one[:1] @ other).dtype
            one, other = one.to(dtype), other.to(dtype)  # here, so that casts are not timed
            seconds = min(_seconds_of_products(one, other, times) for _ in range(3))
        best = max(best, times * 2 * rows**3 / seconds)
        if seconds > _MEASURED_SECONDS or times >= _MOST_TIMES:
            return best
        rows, times = (2 * rows, 1) if rows < _MOST_ROWS else (rows, 2 * times)


def _seconds_of_products(one: torch.Tensor, other: torch.Tensor, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        product = one @ other
    product[0, 0].item()  # waits for the device
    return time.perf_counter() - start
