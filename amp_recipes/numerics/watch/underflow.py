"""Estimates, from one step in bf16, the share of gradients that fp16 would lose at each loss scale.

bf16 has fp32's exponents, so the gradients that flow in its backward show the range that fp16 would need. Of a value
with exponent e (2^e <= |g| < 2^(e+1)), scaled by 2^k, fp16 keeps nothing if e + k < -25, since half of its smallest
subnormal, 2^-24, rounds to zero; it keeps a part of the digits if -25 <= e + k < -14; and |g| 2^k > 65504 overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.trial import Trial, Window
from amp_recipes.numerics.watch.observe import Attribution, OpWatch, op_name
from amp_recipes.numerics.watch.op_kinds import names
from amp_recipes.precision.torch_private import Op

_LARGEST = torch.finfo(torch.float16).max
_SCALES = range(0, 33)  # log2
_MOST = 24  # log2 of the largest scale to begin with: more has no use, and overflows when the loss is large for once
_FLUSHED_BELOW, _NORMAL_FROM = -25, -14
_BIAS, _BINS = 160, 320  # of the histogram: exponents from -160 to 159
# The scale begins at an eighth of what overflows: gradients are larger on other batches.
_HEADROOM = 8
# The window opens where fp16 flushes less than this share beyond what is zero in bf16 already.
_ACCEPTED = 1e-3
_MOVED = names(
    "view t transpose detach _unsafe_view permute expand unbind select clone slice as_strided stack unsqueeze squeeze "
    "zeros zeros_like reshape alias split chunk"
)


@dataclass
class Underflow:
    """The effect of fp16 on the gradients that flow in the backward.

    scales: loss scales, powers of two; flushed, subnormal: shares of all gradients at each; energy_lost: the flushed
    ones' share of the sum of squares; overflows: whether the largest is beyond 65504 at that scale; exact_zeros: share
    that is zero in bf16 (ReLU, masks); largest: the largest |g|; init_scale: the scale to begin with; window_octaves:
    from the scale where less than 0.1 % are flushed to the one that overflows (None: there is no such scale, or nothing
    flows); counted: gradients that were looked at, 0 if nothing ran in low precision in the backward.
    """

    scales: list[float]
    flushed: list[float]
    subnormal: list[float]
    energy_lost: list[float]
    overflows: list[bool]
    exact_zeros: float
    largest: float
    init_scale: float
    window_octaves: float | None
    counted: int

    def as_dict(self) -> dict[str, Any]:
        """Return the results as in `diagnosis.json`."""
        return dict(vars(self))


def underflow(trial: Trial, windows: Sequence[Window], pins: Iterable[str] | None = None) -> Underflow:
    """Estimate the effect of fp16 on the gradients of these windows, from one run of each in bf16.

    pins: as for `Trial.run`. Every gradient that is computed in low precision counts: those that flow between modules,
    and those of weights, which lose small values before they are cast to fp32.
    """
    histogram = _Histogram(trial.modules)
    for window in windows:
        trial.run(window, torch.bfloat16, pins=pins, watch=[OpWatch(histogram.at, histogram.saw)])
    return histogram.result()


class _Histogram:
    """Counts the exponents of the low-precision values that the backward creates."""

    def __init__(self, modules: nn.Module) -> None:
        self.at = Attribution(modules)
        self._counts = torch.zeros(_BINS, dtype=torch.int64)
        self._squares = torch.zeros(_BINS, dtype=torch.float64)
        self._zeros = self._all = 0
        self._largest = 0.0

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.at.here.phase != "backward" or op.is_view or op_name(op).removeprefix("aten::") in _MOVED:
            return
        for tensor in tensors_in(output):
            if tensor.dtype == torch.bfloat16 and tensor.numel():
                self._count(tensor.detach().float().abs())

    def _count(self, magnitudes: torch.Tensor) -> None:
        counted = magnitudes[(magnitudes > 0) & torch.isfinite(magnitudes)]
        self._all += magnitudes.numel()
        self._zeros += int((magnitudes == 0).sum())
        if not counted.numel():
            return
        self._largest = max(self._largest, float(counted.max()))
        bins = (torch.frexp(counted).exponent.long() - 1 + _BIAS).clamp_(0, _BINS - 1)
        self._counts += torch.bincount(bins, minlength=_BINS).cpu()
        squares = torch.zeros(_BINS, dtype=torch.float64, device=counted.device)
        self._squares += squares.index_add_(0, bins, counted.double().square()).cpu()

    def result(self) -> Underflow:
        exponents = torch.arange(_BINS) - _BIAS
        everything, energy = max(1, self._all), max(float(self._squares.sum()), 1e-300)
        flushed, subnormal, lost = [], [], []
        for k in _SCALES:
            gone = exponents + k < _FLUSHED_BELOW
            part = ~gone & (exponents + k < _NORMAL_FROM)
            flushed.append((self._zeros + int(self._counts[gone].sum())) / everything)
            subnormal.append(int(self._counts[part].sum()) / everything)
            lost.append(float(self._squares[gone].sum()) / energy)
        zeros = self._zeros / everything
        init_scale, octaves = 2.0**16, None
        if self._largest > 0:
            ceiling = math.log2(_LARGEST / self._largest)
            init_scale = 2.0 ** min(_MOST, max(0, math.floor(ceiling - math.log2(_HEADROOM))))
            opens = next((k for k, share in zip(_SCALES, flushed, strict=True) if share - zeros < _ACCEPTED), None)
            octaves = None if opens is None or opens >= ceiling else ceiling - opens
        return Underflow(
            scales=[2.0**k for k in _SCALES],
            flushed=flushed,
            subnormal=subnormal,
            energy_lost=lost,
            overflows=[self._largest * 2.0**k > _LARGEST for k in _SCALES],
            exact_zeros=zeros,
            largest=self._largest,
            init_scale=init_scale,
            window_octaves=octaves,
            counted=self._all,
        )
