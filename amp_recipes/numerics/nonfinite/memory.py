"""Records who wrote which memory, and whether it was finite: the basis of a trace.

Edges go from an op to those that wrote the storages it reads. Views, writes in place and memory that is given out again
make that more than a matter of names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amp_recipes.files.user_code import Line
from amp_recipes.numerics.nonfinite.values import FINITE, Birth, TensorRange, kind_of
from amp_recipes.numerics.watch.observe import Place, op_name
from amp_recipes.numerics.watch.op_kinds import names
from amp_recipes.precision.torch_private import Op, schema_of

# Ops that write all of what they change, and read none of it.
_OVERWRITING = names(
    """
    copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ set_
    _foreach_copy_ _foreach_zero_
    """
)
# Ops whose outputs are finite if all that they read is (and real), so no check is needed.
_HARMLESS = names(
    """
    cat clone constant_pad_nd embedding flip gather index index_select repeat roll select_backward slice_backward sort
    stack take topk tril triu where masked_fill amax amin clamp clamp_max clamp_min hardtanh max
    max_pool2d_with_indices maximum abs ceil cos erf floor min minimum neg relu round sigmoid sign sin tanh _softmax
    threshold_backward trunc arange bernoulli eye new_ones new_zeros ones zeros ones_like zeros_like rand rand_like
    randn randn_like clamp_ clamp_min_ neg_ relu_ zero_
    """
)
_UNWRITTEN = names("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
_CASTS = names("_to_copy copy_")

# An event that wrote, or a tensor from outside, by its number; and how bad that was.
Cause = tuple[int, int]


@dataclass(slots=True, eq=False)
class Written:
    """An op that wrote something. sources: all that it read; causes: of these, what was not finite.

    shape, dtype, kind: of the worst tensor that it wrote. rows: those of its output that are nonfinite, in the forward,
    where the output has as many rows as a batch. padded: it read the row of padding of an embedding, which is 0.
    """

    op: Op
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[int, ...]
    kind: int
    causes: tuple[Cause, ...] = ()
    birth: Birth | None = None
    line: Line | None = None
    rows: list[int] | None = None
    padded: bool = False
    batch: ClassVar[None] = None

    @property
    def was_meant(self) -> bool:
        """Whether the code said that it is to be infinite."""
        return self.birth is not None and self.birth.told_to


@dataclass(slots=True, eq=False)
class Bad:
    """A nonfinite write of an event, and the range of bytes of the storage.

    kind: None where it is to be looked at whenever it is read.
    """

    number: int
    kind: int | None
    first: float = 0
    end: float = math.inf


@dataclass(slots=True, eq=False)
class Memory:
    """One storage. last: the event that wrote it last; bad: who wrote what is not finite.

    The weak reference lets the memory go but keeps its address from being given to another storage.
    """

    weak: StorageWeakRef
    last: int
    bad: list[Bad] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Read:
    """A tensor that an op reads. range: what it held, where it is known; overwritten: the op does not look at it."""

    tensor: Tensor
    memory: Memory
    range: TensorRange | None = None
    overwritten: bool = False

    def kind(self) -> int:
        if self.overwritten:
            return FINITE
        if self.range is not None:
            return self.range.kind
        bad = self.memory.bad
        if len(bad) == 1 and bad[0].kind is not None:
            first, end = bytes_of(self.tensor)
            if first <= bad[0].first and bad[0].end <= end == first + self.tensor.nbytes:
                return bad[0].kind  # all of it is read, so it is as bad as when it was written
        return kind_of(self.tensor)


class Facts:
    """Facts from an op's schema and name. mutated: position and name of the arguments that it changes."""

    def __init__(self, op: Op) -> None:
        name = op_name(op).rpartition("::")[2]
        self.mutated = _changed_by(name, schema_of(op).arguments)
        changed = [schema_of(op).arguments[position] for position, _ in self.mutated]
        self.overwrites = name in _OVERWRITING or all(argument.is_out for argument in changed)
        self.is_harmless, self.is_unwritten = name in _HARMLESS, name in _UNWRITTEN
        self.is_cast, self.is_embedding = name in _CASTS, name == "embedding"


def _changed_by(name: str, arguments: Sequence[Any]) -> list[tuple[int, str]]:
    """Position and name of the arguments that an op changes."""
    aliases = [(i, argument) for i, argument in enumerate(arguments) if argument.alias_info is not None]
    changed = [(i, argument.name) for i, argument in aliases if argument.alias_info.is_write]
    if changed or "batch_norm" not in name or "backward" in name:
        return changed
    statistics = ("running_mean", "running_var")  # which it changes, though its schema does not say so
    return [(i, argument.name) for i, argument in enumerate(arguments) if argument.name in statistics]


facts_of = cache(Facts)


def writers_of(memory: Memory, tensor: Tensor) -> list[int]:
    """Return the events that wrote nonfinite values into the bytes that `tensor` spans."""
    low, high = bytes_of(tensor)
    return [bad.number for bad in memory.bad if bad.first < high and low < bad.end] or [memory.last]


def bytes_of(tensor: Tensor) -> tuple[float, float]:
    """Return the range of bytes of the elements in their storage."""
    if tensor.is_contiguous():
        first = tensor.storage_offset() * tensor.element_size()
        return first, first + tensor.nbytes
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first, size = tensor.storage_offset(), tensor.element_size()
    return first * size, (first + reach) * size
