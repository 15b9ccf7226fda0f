"""Measures gradients over windows: how batches differ, and how a precision changes the gradients."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from amp_recipes.files.strict_json import as_it_is_read
from amp_recipes.numerics.trial import Outcome, differences, ratio, squared

# A tensor whose gradient is smaller than this share of the model's (rms per element) is not judged alone: biases in
# front of a norm have gradients that are nothing but rounding.
_JUDGED_FROM = 1e-3
_TINY = 1e-300  # in place of a bound of 0


class GradientNoise:
    """The spread of gradients over windows, from sums: one gradient is kept, not all of them."""

    def __init__(self) -> None:
        self._windows = 0
        self._sum: dict[str, torch.Tensor] = {}
        self._squares: dict[str, float] = {}

    def add(self, outcome: Outcome) -> None:
        """Count one window's gradients."""
        self._windows += 1
        for name, gradient in outcome.gradients.items():
            self._sum[name] = self._sum[name] + gradient if name in self._sum else gradient.clone()
            self._squares[name] = self._squares.get(name, 0.0) + squared(gradient)

    @property
    def relative(self) -> float:
        """Root of E|g - E g|^2 / E|g|^2 over windows: 0 where all are alike, 1 where they have nothing in common."""
        squares = sum(self._squares.values())
        if self._windows < 2 or squares == 0.0:
            return 0.0
        of_sum = sum(map(squared, self._sum.values()))
        variance = max(0.0, squares - of_sum / self._windows) / (self._windows - 1)
        return math.sqrt(variance * self._windows / squares)

    @property
    def judged(self) -> set[str]:
        """The tensors whose rms gradient, per element and over windows, is at least 1e-3 of the whole model's."""
        elements = sum(total.numel() for total in self._sum.values())
        least = _JUDGED_FROM**2 * sum(self._squares.values()) / max(1, elements)
        return {
            name
            for name, squares in self._squares.items()
            if squares > 0 and squares / max(1, self._sum[name].numel()) >= least
        }


@dataclass(frozen=True)
class GradientError:
    """The effect of a precision on the gradients of some windows.

    error: |g_low - g| / |g| over all parameters, of the worst window; tensor, tensor_error: the parameter whose own
    gradient is changed most, as the same ratio over all windows; bias: the part of the error that is the same on every
    batch, relative to the root mean square of |g|; bias_floor: its standard error, less cannot be told. All infinite
    where a gradient is not finite.
    """

    error: float
    tensor: str = ""
    tensor_error: float = 0.0
    bias: float = 0.0
    bias_floor: float = 0.0

    def excess(self, tolerance: float, bias_tolerance: float, tensor_tolerance: float) -> float:
        """The largest of error, bias and worst tensor, each relative to its bound: at most 1 where all are kept."""
        return max(
            self.error / max(tolerance, _TINY),
            self.tensor_error / tensor_tolerance,
            self.bias / max(bias_tolerance, self.bias_floor, _TINY),
        )

    def as_dict(self) -> dict[str, Any]:
        """The worst tensor as in `diagnosis.json`."""
        return as_it_is_read({"name": self.tensor, "error": self.tensor_error})


class ErrorSums:
    """Adds up what gradients in low precision differ by from fp32's, one window after the other.

    With d = g_low - g of n windows, E the mean over them: the mean of d has the square |E d|^2, of which
    sum |d - E d|^2 / (n (n - 1)) is what independent errors leave in a mean of n. The rest is the bias' square.
    """

    def __init__(self) -> None:
        self._windows = 0
        self._worst = 0.0
        self._sum: dict[str, torch.Tensor] = {}
        self._errors: dict[str, float] = {}
        self._norms: dict[str, float] = {}

    def add(self, low: Outcome, reference: Outcome) -> float:
        """Count one window; its relative error, as `gradient_error` gives it."""
        if not (low.is_finite and reference.is_finite):
            return self.fail()
        self._windows += 1
        squared_error = squared_norm = 0.0
        for name, difference, norm in differences(low, reference):
            error = squared(difference)
            self._sum[name] = self._sum[name] + difference if name in self._sum else difference
            self._errors[name] = self._errors.get(name, 0.0) + error
            self._norms[name] = self._norms.get(name, 0.0) + norm
            squared_error, squared_norm = squared_error + error, squared_norm + norm
        found = ratio(squared_error, squared_norm)
        self._worst = max(self._worst, found)
        return found

    def fail(self) -> float:
        """Count a window whose step gives no finite gradient; its error is infinite."""
        self._worst = math.inf
        return math.inf

    def result(self, judged: Collection[str]) -> GradientError:
        """Return the errors; judged: the tensors with a bound of their own."""
        if math.isinf(self._worst):
            return GradientError(math.inf, "", math.inf, math.inf, 0.0)
        own = {name: ratio(self._errors[name], self._norms[name]) for name in judged if name in self._errors}
        tensor = max(own, key=lambda name: own[name], default="")
        count, size = self._windows, sum(self._norms.values())
        bias = floor = 0.0
        if count > 1 and size > 0:
            of_mean = sum(map(squared, self._sum.values())) / count**2
            of_scatter = max(0.0, sum(self._errors.values()) - count * of_mean) / (count * (count - 1))
            bias = math.sqrt(max(0.0, of_mean - of_scatter) * count / size)
            floor = math.sqrt(of_scatter * count / size)
        return GradientError(self._worst, tensor, own.get(tensor, 0.0), bias, floor)
