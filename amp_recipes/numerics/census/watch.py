"""Counts the ops of a step and their casts: who asked for each cast, and what became of its values.

What happens per op is kept as small as it can be: a record of objects that are at hand. They are turned into places,
counts and words when all is over.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import is_grad_enabled, nn

from amp_recipes.files.user_code import Line
from amp_recipes.modules.nested import tensors_in
from amp_recipes.modules.torch_private import sparse_values, storage_id, version_of
from amp_recipes.numerics.watch.observe import ACCUMULATE_GRAD, Attribution, Place
from amp_recipes.numerics.watch.op_kinds import KINDS, OpKind, names, op_kind
from amp_recipes.precision import autocast
from amp_recipes.precision.torch_private import (
    COMPILER_FRAMES,
    DispatchMode,
    free_weak_storage,
    kernel_of,
    node_number,
    running_node,
    weak_storage,
)

Asker = Literal["autocast", "user", "pin", "script", "backward"]

_describe = attrgetter("dtype", "nbytes")
_MOST_RECORDS = 50_000  # before they are counted: some megabytes
# Where `dtype=` casts the input apart from the op; on a CPU autocast has no rule for them.
_TAKE_DTYPE = names("_softmax _log_softmax")
_PASS_DTYPE = names("softmax log_softmax softmin")  # functions of torch.nn.functional that pass it on
_DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
_IS_INEXACT = {dtype: dtype.is_floating_point or dtype.is_complex for dtype in _DTYPES}
_PINS_BORDER = autocast.__file__
_TORCH = str(Path(torch.__file__).parent)


class CastKey(NamedTuple):
    """Casts of one kind at one place. weight: the parameter or buffer whose values they are, if of one."""

    place: Place
    by: Asker
    from_: torch.dtype
    to: torch.dtype
    line: Line | None
    weight: str | None


class RoundTrip(NamedTuple):
    """Values that were cast from `dtype` to `through` at one place, and back at another, untouched."""

    there: Place
    back: Place
    dtype: torch.dtype
    through: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """The inputs and outputs of an op: dtypes, and the bytes read and written; one object for all equal ops."""

    kind: OpKind
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    moved: int


@dataclass
class Tally:
    """The number of times that something happened, and the bytes read and written."""

    calls: int = 0
    bytes: int = 0

    def add(self, bytes_: int, calls: int = 1) -> None:
        self.calls += calls
        self.bytes += bytes_


# A running call of torch: its frame's id, and the place of its code.
_Call = tuple[int, CodeType, int]


class _SeenCast(NamedTuple):
    """A cast as it was seen. place: or the number of its node in the backward; call: None there."""

    place: Place | int
    call: _Call | None
    asked_at: _Call | None  # `call`, but outside of torch.nn.functional
    has_dtype: bool  # whether the function that is called there was given `dtype=`
    is_on_cpu: bool
    weight: str | None
    from_: torch.dtype
    to: torch.dtype
    elements: int
    came_from: tuple[int, int] | None  # address and version of the storage
    goes_to: tuple[int, int] | None  # of a storage of its own; the address is held: no other gets it


class CensusWatch(DispatchMode):
    """Inside its `with`, counts; afterwards it has `counts`, `casts`, `round_trips` and `cast_sizes`.

    counts: (Place, Signature) -> calls. Views move no bytes, all else those of its elements, whatever the layout in
    memory. cast_sizes: (elements, from, to) -> calls, of dense tensors.
    Casts are those between floating-point or complex dtypes. Who asked: "backward" in the backward; else "user" where
    the call of torch that is under way does nothing but cast (`.to`, `.float`, `copy_` ...) or has a `dtype=` of its
    own, "pin" where the border of a pin or of `fwd_default_precision` does; "script" inside TorchScript, where these
    cannot be told apart; else "autocast": what is cast for an op is cast within that op's call. (So is what an op made
    of others casts for itself, as attention with dropout on a CPU does: that looks alike.)
    expects_autocast: whether there is one; else what would be its casts are the user's.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: nn.Module, expects_autocast: bool = True) -> None:
        super().__init__()
        self.at = Attribution(modules)
        self.counts: dict[tuple[Place, Signature], int] = {}
        self.casts: defaultdict[CastKey, Tally] = defaultdict(Tally)
        self.round_trips: defaultdict[RoundTrip, Tally] = defaultdict(Tally)
        self.cast_sizes: Counter[tuple[int, torch.dtype, torch.dtype]] = Counter()
        self._expects_autocast = expects_autocast
        self._records: list[tuple[Any, ...]] = []
        self._signatures: dict[tuple[Any, ...], Signature] = {}
        # The fields of a _SeenCast, for casts of a forward: the next op shows who asked for them.
        self._pending: list[tuple[Any, ...]] = []
        self._settled: list[tuple[Sequence[tuple[Any, ...]], OpKind | None]] = []  # and the op that did, if one did
        self._pending_call: _Call | None = None
        self._served: tuple[_Call | None, OpKind] | None = None  # the last call with an op that casts were made for
        self._origins: dict[int, tuple[Place, torch.dtype, int]] = {}  # what storages were cast from, by address
        self._scripts = scripted(modules)
        self._weights, self._weight_storages = _weights_of(modules)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as OpWatch

    def __enter__(self) -> CensusWatch:
        self.at.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.at.__exit__(*exception)
        if self._pending:
            self._close(None)
        self._count()
        for address in self._origins:
            free_weak_storage(address)
        self._origins.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            call = kernel_of(func)
            kind = KINDS.get(call) or op_kind(func)
        except AttributeError:  # a higher-order op
            call, kind = func, op_kind(func)
        output = call(*args, **kwargs) if kwargs else call(*args)
        at = self.at
        node = running_node()
        if node is None:
            place = at.place if at.is_inside else at.here
        elif at.is_inside or is_grad_enabled():
            place = at.here
        else:  # the number gives the place, later
            place = node_number(node)
            if place == ACCUMULATE_GRAD:
                place = at.here
            elif kind.is_sum:
                place = at.of_sum(node)
        if kind.is_cast:
            self._saw_cast(kind, args[kind.source], output, place)
        elif self._pending:
            self._close(kind)
        leading = kind.leading
        try:
            if kind.is_plain_view:
                record = (place, kind, args[0].dtype)
            elif leading == 1:
                record = (place, kind, _describe(args[0]), _describe(output))
            elif leading == 2:
                second = args[1]
                if type(second) is float or type(second) is int:
                    record = (place, kind, _describe(args[0]), _describe(output))
                else:
                    record = (place, kind, _describe(args[0]), _describe(second), _describe(output))
            elif leading == 3:
                record = (place, kind, _describe(args[0]), _describe(args[1]), _describe(args[2]), _describe(output))
            else:
                record = _general(place, kind, args, kwargs, output)
                if len(self._records) > _MOST_RECORDS:
                    self._count()
        except (AttributeError, RuntimeError):  # a number where a tensor may be; a sparse tensor
            record = _general(place, kind, args, kwargs, output)
        self._records.append(record)
        return output

    def _saw_cast(self, kind: OpKind, source: torch.Tensor, output: torch.Tensor, place: Place | int) -> None:
        from_, to = source.dtype, output.dtype
        if from_ is to:
            return
        if len(self._records) > _MOST_RECORDS:
            self._count()
        came_from = goes_to = None
        weight = self._weights.get(id(source))
        try:
            address = storage_id(source)
            if weight is None:
                weight = self._weight_storages.get(address)
            came_from = (address, version_of(source))
            if kind.source == 0:
                version = version_of(output)
                goes_to = (weak_storage(output), version)
        except RuntimeError:  # sparse tensors have no storage, those of inference mode no version
            pass
        what = (source.is_cpu, weight, from_, to, _elements(output), came_from, goes_to)
        if type(place) is int or place.phase == "backward":
            if self._pending:
                self._close(None)
            self._settled.append((((place, None, None, False, *what),), None))
            return
        frame = _calling_frame(sys._getframe(2))
        code = frame.f_code
        call = asked_at = (id(frame), code, frame.f_lasti)
        has_dtype = False
        if code.co_filename == F.__file__ and frame.f_back is not None:
            asked_at = (id(frame.f_back), frame.f_back.f_code, frame.f_back.f_lasti)
            has_dtype = code.co_name in _PASS_DTYPE and frame.f_locals.get("dtype") is not None
        seen = (place, call, asked_at, has_dtype, *what)
        if self._pending and self._pending_call != call:
            self._close(None)
        if not self._pending and self._served is not None and self._served[0] == call:
            self._settled.append(((seen,), self._served[1]))  # its result is cast
        else:
            self._pending.append(seen)
            self._pending_call = call

    def _close(self, kind: OpKind | None) -> None:
        """Pending casts are over, as an op of this kind came: it has asked for them if it is of the same call."""
        if kind is not None:
            if not kind.is_counted:  # fake tensors ask for devices amid a cast
                return
            frame = _calling_frame(sys._getframe(2))
            if self._pending_call != (id(frame), frame.f_code, frame.f_lasti):
                kind = None
        self._served = None if kind is None else (self._pending_call, kind)
        self._settled.append((self._pending, kind))
        self._pending = []

    def _count(self) -> None:
        """Turn what was seen into counts."""
        place_of, signatures, counts = self.at.place_of, self._signatures, self.counts
        for record in self._records:
            place, described = record[0], record[1:]
            if not described[0].is_counted:
                continue
            if type(place) is int:
                place = place_of(place)
            signature = signatures.get(described)
            if signature is None:
                signature = signatures[described] = _signature(*described)
            key = (place, signature)
            counts[key] = counts.get(key, 0) + 1
        self._records.clear()
        for casts, kind in self._settled:
            for seen in map(_SeenCast._make, casts):
                if _IS_INEXACT[seen.from_] and _IS_INEXACT[seen.to]:
                    self._count_cast(seen, kind)
        self._settled.clear()

    def _count_cast(self, seen: _SeenCast, kind: OpKind | None) -> None:
        place = self.at.place_of(seen.place) if type(seen.place) is int else seen.place
        by = self._asker(seen, place, kind)
        line = _line(seen.asked_at) if by == "user" else None
        key = CastKey(place, by, seen.from_, seen.to, line, seen.weight)
        moved = seen.elements * (seen.from_.itemsize + seen.to.itemsize)
        self.casts[key].add(moved)
        self.cast_sizes[seen.elements, seen.from_, seen.to] += 1
        if seen.came_from is not None:
            address, version = seen.came_from
            origin = self._origins.get(address)
            if origin is not None and origin[1:] == (seen.to, version):
                trip = RoundTrip(origin[0], place, seen.to, seen.from_)
                self.round_trips[trip].add(2 * moved)
        if seen.goes_to is not None:
            address, version = seen.goes_to
            self._origins[address] = (place, seen.from_, version)

    def _asker(self, seen: _SeenCast, place: Place, kind: OpKind | None) -> Asker:
        if seen.call is None:
            return "backward"
        if place.module in self._scripts:
            return "script"
        _, code, _ = seen.call
        if kind is None:
            return "pin" if code.co_filename == _PINS_BORDER else "user"
        has_dtype = kind.base in _TAKE_DTYPE and seen.is_on_cpu and code.co_filename != F.__file__
        return "user" if has_dtype or seen.has_dtype or not self._expects_autocast else "autocast"


def scripted(modules: nn.Module) -> set[str]:
    """Names of the modules that TorchScript made."""
    return {name for name, module in modules.named_modules() if isinstance(module, torch.jit.ScriptModule)}


def _signature(kind: OpKind, *described: Any) -> Signature:
    if kind.is_plain_view:
        return Signature(kind, described, described, 0)
    *inputs, outputs = described
    if outputs and type(outputs[0]) is not tuple:
        outputs = (outputs,)
    moved = 0 if kind.doing == "view" else sum([size for _, size in (*inputs, *outputs)])
    return Signature(kind, tuple([dtype for dtype, _ in inputs]), tuple([dtype for dtype, _ in outputs]), moved)


def _general(
    place: Place | int, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any
) -> tuple[Any, ...]:
    """The record of an op that takes or returns lists, optional tensors or tensors by keyword."""
    if kind.positions is None:
        inputs = list(tensors_in(args, kwargs or {}))
    else:
        inputs = []
        for position in kind.positions:
            given = args[position] if position < len(args) else None
            if isinstance(given, torch.Tensor):
                inputs.append(given)
            elif isinstance(given, (list, tuple)):
                inputs += [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    outputs: Iterable[Any] = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
    described = [[(tensor.dtype, _elements(tensor) * tensor.itemsize) for tensor in some] for some in (inputs, outputs)]
    return (place, kind, *described[0], tuple(described[1]))


def _elements(tensor: torch.Tensor) -> int:
    """Return the number of values of a tensor; of a sparse one, of the stored values."""
    if tensor.layout is torch.strided:
        return tensor.numel()
    return sparse_values(tensor).numel() if tensor.is_sparse else 0


def _calling_frame(frame: FrameType) -> FrameType:
    """The frame that calls torch: not that of another mode on the way here."""
    while _is_a_modes(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_a_modes(code: CodeType) -> bool:
    if code.co_name in ("__torch_dispatch__", "__torch_function__"):
        return True
    names, files = COMPILER_FRAMES
    return code.co_name in names and code.co_filename.endswith(files)


def _line(call: _Call | None) -> Line | None:
    """Return the line that asks for a cast: not in torch, but maybe in a library."""
    if call is None:
        return None
    _, code, offset = call
    if code.co_filename.startswith(_TORCH):
        return None
    numbers = (number for start, end, number in code.co_lines() if start <= offset < end)
    number = next(numbers, None)
    return None if number is None else Line(code.co_filename, number)


def _weights_of(modules: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
    """Names of parameters and buffers by their id, and by the address of their storage."""
    by_id: dict[int, str] = {}
    by_storage: dict[int, str] = {}
    for name, tensor in (*modules.named_parameters(), *modules.named_buffers()):
        by_id[id(tensor)] = name
        try:
            by_storage.setdefault(storage_id(tensor), name)
        except (ValueError, RuntimeError):  # sparse, or not made yet (lazy modules)
            continue
    return by_id, by_storage
