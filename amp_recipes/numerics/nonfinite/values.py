"""Describes nonfinite values while they exist: kind, range, rows, and whether the code wrote them on purpose.

A mask writes -inf at positions that must not count, which is correct. So an infinity that the code wrote on purpose is
distinguished from one that arithmetic produced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from amp_recipes.modules.torch_private import sparse_values
from amp_recipes.numerics.nonfinite.faults import Call, Fault, fault_of
from amp_recipes.numerics.watch.observe import dtype_name, op_name
from amp_recipes.precision.torch_private import graph_task, is_wrapper, running_node, users_function

# How bad a tensor is. What holds a NaN is NAN, whatever else it holds.
FINITE, INFINITE, NAN = range(3)

_MOST_INPUTS = 8  # of an op that are described: a `cat` may have hundreds
_SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax")


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The range of a tensor. min, max: of its finite values, None if it has none; nonfinite: the number of others."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    nonfinite: int = 0
    kind: int = FINITE

    @property
    def largest(self) -> float | None:
        """The greatest magnitude among the finite values."""
        return None if self.min is None or self.max is None else max(-self.min, self.max)


@dataclass(frozen=True, slots=True)
class Rows:
    """The nonfinite rows of a tensor. along: dimension -> indices, for its first two dimensions."""

    shape: tuple[int, ...]
    along: dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class External:
    """A tensor that the step did not make. batch: its index in the window; tensor: itself, if it is not anonymous."""

    kind: Literal["parameter", "buffer", "batch", "tensor"]
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: int | None = None
    tensor: Tensor | None = None
    birth: ClassVar[None] = None
    padded: ClassVar[bool] = False
    causes: ClassVar[tuple] = ()
    sources: ClassVar[tuple] = ()

    @property
    def was_meant(self) -> bool:
        """Whether an infinity in it may be meant: in a constant, as in a mask."""
        return self.kind == "tensor"

    def __str__(self) -> str:
        return self.name if self.kind in ("batch", "tensor") else f"{self.kind} {self.name}"


@dataclass(slots=True)
class Birth:
    """Inputs and output of an op that made a nonfinite value from finite ones, or NaN from infinities.

    rows: of the outputs; told_to: a nonfinite number was among its arguments, or it made them of nothing; masked_rows:
    it took a softmax over rows of which all is -inf; node: autograd's node, in the backward; function: the user's
    autograd.Function; fault: what its arguments show.
    """

    op: str
    inputs: list[TensorRange]
    outputs: list[TensorRange]
    rows: list[Rows]
    told_to: bool
    masked_rows: bool
    node: str | None = None
    function: str | None = None
    fault: Fault | None = None


def is_float(tensor: Tensor) -> bool:
    """Whether its values can be nonfinite."""
    return tensor.is_floating_point() or tensor.is_complex()


def kind_of(tensor: Tensor) -> int:
    """FINITE, INFINITE or NAN. One pass over it, and a second one if its sum is not finite."""
    if not is_float(tensor) or not tensor.numel() or tensor.is_meta:
        return FINITE
    tensor = _comparable(tensor)
    if _has_finite_sum(tensor):
        return FINITE
    low, high = _extremes(tensor)
    if math.isnan(low):
        return NAN
    return FINITE if math.isfinite(low) and math.isfinite(high) else INFINITE


def _has_finite_sum(tensor: Tensor) -> bool:
    """Whether one sum tells that all is finite: it may overflow over finite values, but cannot hide one that is not."""
    if tensor.dtype.itemsize > 2:
        return math.isfinite(tensor.sum().item())
    # On a CPU, minimum and maximum of a 16-bit tensor cost as much as its sum. Elsewhere the sum is cheaper.
    return not tensor.is_cpu and math.isfinite(tensor.sum(dtype=torch.float32).item())


def _extremes(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest value; NaN, both, where it holds one."""
    low, high = torch.aminmax(tensor)
    return low.item(), high.item()


def has_infinity(tensor: Tensor) -> bool:
    """Whether it holds an infinity, beside NaN or not."""
    return bool(_comparable(tensor).isinf().any())


def range_of(tensor: Tensor) -> TensorRange:
    """The range of a floating or complex tensor; of a complex one, that of its parts."""
    name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    tensor = _comparable(tensor)
    if not tensor.numel():
        return TensorRange(name, shape, None, None)
    low, high = _extremes(tensor)
    if math.isfinite(low) and math.isfinite(high):
        return TensorRange(name, shape, low, high)
    kind = NAN if math.isnan(low) else INFINITE
    finite = tensor[tensor.isfinite()]
    low, high = _extremes(finite) if finite.numel() else (None, None)
    return TensorRange(name, shape, low, high, tensor.numel() - finite.numel(), kind)


def bad_rows(tensor: Tensor, kind: int | None = None) -> Rows:
    """The rows that hold a NaN (kind NAN), an infinity and no NaN (INFINITE), or anything nonfinite (None)."""
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        bad = _comparable(tensor.values()).isfinite().logical_not()
        bad = bad.flatten(1).any(1) if bad.ndim > 1 else bad
        return Rows(shape, {0: tensor.indices()[0][bad].unique().tolist()})
    if tensor.layout is not torch.strided or is_wrapper(tensor) or not tensor.numel():
        return Rows(shape, {})
    tensor = _comparable(tensor)
    return Rows(shape, {dimension: _bad_along(tensor, dimension, kind) for dimension in range(min(len(shape), 2))})


def _bad_along(tensor: Tensor, dimension: int, kind: int | None) -> list[int]:
    others = [other for other in range(tensor.ndim) if other != dimension]
    # Minimum and maximum show NaN and infinity, at a twentieth of the cost of testing each element.
    high, low = (tensor.amax(others), tensor.amin(others)) if others else (tensor, tensor)
    bad = high.isnan() if kind == NAN else high.isinf() | low.isinf()
    if kind is None:
        bad |= high.isnan()
    return bad.nonzero().flatten().tolist()


def _comparable(tensor: Tensor) -> Tensor:
    """The same values where minimum and maximum are defined."""
    if tensor.is_complex():
        wide = tensor if tensor.dtype is not torch.complex32 else tensor.to(torch.complex64)
        return torch.view_as_real(wide.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """The dense tensors that hold what `value` holds: of a sparse tensor its values, of a wrapper what it wraps."""
    if not isinstance(value, Tensor):
        return
    if is_wrapper(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, name))
    elif value.layout is torch.strided:
        yield value
    elif value.layout is torch.sparse_coo:
        yield sparse_values(value)
    elif value.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        yield value.values()


def witness(
    call: Call, inputs: list[TensorRange], read: Sequence[Tensor], bad: list[Tensor], kind: int, told_to: bool
) -> Birth:
    """The record of a birth, made while the op's tensors are at hand.

    inputs: of what it read (`read`), as it was before; bad: its outputs of that kind; told_to: as in Birth.
    """
    name, arguments = op_name(call.op), call.arguments()
    short = name.rpartition("::")[2]
    node = running_node() if graph_task() != -1 else None
    of_finite = all(given.kind == FINITE for given in inputs)
    return Birth(
        name,
        inputs[:_MOST_INPUTS],
        list(map(range_of, bad)),
        # Infinities beside a NaN are as new as the NaN, unless they came in.
        [bad_rows(tensor, None if of_finite else kind) for tensor in bad],
        told_to=told_to,
        masked_rows=kind == NAN and _has_masked_rows(short, arguments, read),
        node=None if node is None else node.name(),
        function=_users_function(),
        fault=fault_of(short, arguments, kind == NAN) if node is None else None,
    )


def _has_masked_rows(name: str, arguments: Mapping[str, Any], read: Sequence[Tensor]) -> bool:
    """Whether it is a softmax, or attention, over rows that are all -inf, or that a mask of bools hides."""
    if name in _SOFTMAX and isinstance(arguments["dim"], int):
        dimension = arguments["dim"]
    elif "attention" in name or "encoder_layer" in name:
        dimension = -1
    else:
        return False
    filled = [tensor for tensor in read if tensor.ndim and tensor.numel()]
    return any(bool(_is_hidden(tensor, dimension).any()) for tensor in filled)


def _is_hidden(tensor: Tensor, dimension: int) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor.all(dimension)
    return tensor.amax(dimension) == -math.inf


def _users_function() -> str | None:
    """The name of the autograd.Function, not torch's own, whose forward or backward runs now."""
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name in ("forward", "backward", "setup_context") and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            function = users_function(context) if isinstance(context, FunctionCtx) else None
            if function is not None and not function.__module__.startswith("torch."):
                return function.__name__
    return None
