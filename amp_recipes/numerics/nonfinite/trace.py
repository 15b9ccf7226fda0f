"""Records during a step which op read the outputs of which others, and where a value stopped being finite.

The first nonfinite value of a step says little: a causal mask is -inf, and does no harm. So everything is recorded, and
the walk back begins at a value that must be finite, a loss or a gradient. Autograd's graph is not enough: it does not
contain writes in place, or ops without gradients.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from amp_recipes.modules.torch_private import storage_id
from amp_recipes.numerics.nonfinite.batch_samples import samples_in, tensors_by_path
from amp_recipes.numerics.nonfinite.faults import Call, padded_rows
from amp_recipes.numerics.nonfinite.memory import (
    Bad,
    Cause,
    Facts,
    Memory,
    Read,
    Written,
    bytes_of,
    facts_of,
    writers_of,
)
from amp_recipes.numerics.nonfinite.values import (
    FINITE,
    INFINITE,
    NAN,
    Birth,
    External,
    bad_rows,
    has_infinity,
    is_float,
    kind_of,
    plain_tensors,
    range_of,
    witness,
)
from amp_recipes.numerics.watch.observe import Attribution, OpWatch
from amp_recipes.precision.torch_private import FIRST_GRADIENTS, Op, graph_task, without_modes
from amp_recipes.state.randomness import generator_state

_SEED = torch.ops.aten.ones_like.default  # a backward begins with the gradient of the loss by itself
_FEW = 4096  # storages that are remembered before those that are gone are forgotten


class NonfiniteTrace:
    """Watches one run of a trial; `events` then tells who wrote what.

    window: whose tensors get names; parameters: of modules and optimizers, by name; generators: whose draws `drawn`
    tells, beside Python's and NumPy's. Keeps no activation alive. Costs one number per tensor written, which the host
    reads.
    target, causes: the first nonfinite loss that the step differentiates ("loss"), or gradient that comes to a
    parameter ("gradient of head.weight"), and who had written it; from there on nothing is looked at.
    """

    def __init__(
        self,
        modules: nn.Module,
        window: Sequence[Any],
        parameters: Mapping[str, nn.Parameter],
        generators: Mapping[str, Any],
    ) -> None:
        self.at = Attribution(modules, lines=True)
        self._modules, self._window, self._parameters, self._generators = modules, window, parameters, generators
        self._lengths = frozenset(map(samples_in, window))
        self._context = ExitStack()
        self.events: list[Written | External] = []
        self.target: str | None = None
        self.causes: tuple[Cause, ...] = ()
        self.drawn: list[str] = []
        self._nonfinite_arguments: set[str] = set()  # nonfinite numbers among the arguments of the op
        self._read_out: dict[str, tuple[Cause, ...]] = {}  # and where such a number came from: `tensor.item()`
        self._memories: dict[int, Memory] = {}
        self._prune_at = _FEW
        self._named: dict[int, list[External]] = {}

    def __enter__(self) -> NonfiniteTrace:
        for external in self._nameable():
            for plain in plain_tensors(external.tensor):
                self._named.setdefault(plain.untyped_storage().data_ptr(), []).append(external)
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and parameter.is_leaf:
                note = partial(self._note_gradient, name)
                self._context.callback(parameter.register_post_accumulate_grad_hook(note).remove)
        self._before = self._states()
        self._context.enter_context(OpWatch(self.at, self.saw, self.about_to_see))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.close()
        now = self._states()
        self.drawn = [name for name, state in self._before.items() if state != now[name]]

    def about_to_see(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.target is not None:
            return
        facts = self._facts = facts_of(op)
        self._nonfinite_arguments.clear()
        self._reads = [Read(tensor, self._memory_of(tensor)) for tensor in self._tensors((*args, *kwargs.values()))]
        self._changed: list[Tensor] = []
        for position, name in facts.mutated:
            self._changed += self._tensors((args[position] if position < len(args) else kwargs.get(name),))
        if self._changed:
            self._look_at_what_changes(facts)

    def _look_at_what_changes(self, facts: Facts) -> None:
        changed = set(map(id, self._changed))
        for read in self._reads:
            if id(read.tensor) in changed:
                read.overwritten = facts.overwrites
                may_tell = read.memory.bad or not facts.is_harmless
                if not facts.overwrites and is_float(read.tensor) and may_tell:
                    read.range = range_of(read.tensor)  # now or never

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.target is not None:
            return
        if op is _SEED and _is_one_number(self._reads) and self._reads[0].memory.bad and _begins_backward():
            self._note("loss", self._reads[0].tensor)
        written = self._written(output)
        if self._only_moved(written):
            self._write(written[0], self._reads[0].memory.last, self._reads[0].kind())
            self._reads, self._changed = [], []
        elif written:
            self._remember(Call(op, args, kwargs), written)
        elif isinstance(output, float) and not math.isfinite(output):
            self._read_out[str(output)] = self._causes(NAN if math.isnan(output) else INFINITE)

    def _only_moved(self, written: list[Tensor]) -> bool:
        """Whether a tensor from outside was brought to another device as it is: a batch's, which keeps its name."""
        if len(written) != 1 or len(self._reads) != 1 or not self._facts.is_cast:
            return False
        moved, tensor = written[0], self._reads[0].tensor
        is_same = moved.dtype is tensor.dtype and moved.shape == tensor.shape and moved.device != tensor.device
        return is_same and isinstance(self.events[self._reads[0].memory.last], External)

    def _remember(self, call: Call, written: list[Tensor]) -> None:
        kinds = self._kinds(self._facts, written)
        event = self._event(call, written, kinds)
        number = len(self.events)
        self.events.append(event)
        for tensor, its_kind in zip(written, kinds, strict=True):
            self._write(tensor, number, its_kind)
        self._reads, self._changed = [], []  # they may be freed

    def _event(self, call: Call, written: list[Tensor], kinds: list[int]) -> Written:
        """Make the record of an op that wrote tensors of these kinds."""
        kind = max(kinds)
        made = written[kinds.index(kind)]
        sources = tuple({read.memory.last: None for read in self._reads})
        event = Written(call.op, self.at.here, tuple(made.shape), made.dtype, sources, kind)
        if kind != FINITE:
            self._explain(event, call, [tensor for tensor, its in zip(written, kinds, strict=True) if its == kind])
        elif self._facts.is_embedding:
            event.padded = padded_rows(call.arguments())
        return event

    def _explain(self, event: Written, call: Call, bad: list[Tensor]) -> None:
        """Note why what the op wrote is not finite. bad: the worst of it."""
        kind = event.kind
        event.causes = self._causes(kind)
        if kind not in [found for _, found in event.causes]:
            event.causes += self._unseen(kind)
            event.birth = self._witness(call, bad, kind)
        if event.birth is not None or self._come_from_outside(event.causes):
            event.line = self.at.line
        if bad[0].ndim and bad[0].shape[0] in self._lengths and graph_task() == -1:
            event.rows = bad_rows(bad[0]).along.get(0)

    def _come_from_outside(self, causes: Iterable[Cause]) -> bool:
        return any(isinstance(self.events[number], External) for number, _ in causes)

    def _tensors(self, values: Iterable[Any]) -> list[Tensor]:
        """The dense tensors in nested arguments; notes on the way which numbers among them are nonfinite."""
        found: list[Tensor] = []
        for value in values:
            if isinstance(value, Tensor):
                plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
                found += (value,) if plain else plain_tensors(value)
            elif isinstance(value, list | tuple):
                found += self._tensors(value)
            elif isinstance(value, dict):
                found += self._tensors(value.values())
            elif isinstance(value, float) and not math.isfinite(value):
                self._nonfinite_arguments.add(str(value))
        return found

    def _written(self, output: Any) -> list[Tensor]:
        """Return the tensors that the op changed, and its outputs that are not views of its inputs."""
        written, read = self._changed, {id(each.memory) for each in self._reads}
        for tensor in self._tensors((output,)):
            memory = self._memories.get(storage_id(tensor))
            if memory is None or id(memory) not in read:
                written = [*written, tensor]
        return written

    def _kinds(self, facts: Facts, written: list[Tensor]) -> list[int]:
        if facts.is_unwritten or self._keeps_finite(facts, written):
            return [FINITE] * len(written)
        return list(map(kind_of, written))

    def _keeps_finite(self, facts: Facts, written: list[Tensor]) -> bool:
        """Whether all that was read is finite, and the op keeps it finite, so that no check is needed."""
        if self._nonfinite_arguments or not (facts.is_harmless or (facts.is_cast and self._widens(written[0]))):
            return False
        reads = [read for read in self._reads if not read.overwritten]
        return not any(read.memory.bad or read.tensor.is_complex() for read in reads)

    def _widens(self, written: Tensor) -> bool:
        """Whether a cast to the dtype of `written` keeps all that it reads finite."""
        if not written.dtype.is_floating_point:
            return True
        bound = torch.finfo(written.dtype).max
        dtypes = [read.tensor.dtype for read in self._reads if not read.overwritten]
        return all(dtype.is_floating_point and torch.finfo(dtype).max <= bound for dtype in dtypes)

    def _causes(self, kind: int) -> tuple[Cause, ...]:
        """Return the events that wrote the nonfinite inputs."""
        causes = {cause: None for told in self._nonfinite_arguments for cause in self._read_out.get(told, ())}
        for read in self._reads:
            if read.memory.bad and is_float(read.tensor):
                found = _kind_for(read, kind)
                if found != FINITE:
                    causes |= {(number, found): None for number in writers_of(read.memory, read.tensor)}
        return tuple(causes)

    def _unseen(self, kind: int) -> tuple[Cause, ...]:
        """The same for memory that was changed outside of torch's ops (NumPy, an extension) or never written."""
        reads = [read for read in self._reads if not read.memory.bad and is_float(read.tensor)]
        return tuple((read.memory.last, min(found, kind)) for read in reads if (found := read.kind()) != FINITE)

    def _witness(self, call: Call, bad: list[Tensor], kind: int) -> Birth:
        reads = [read for read in self._reads if not read.overwritten]
        ranges = [read.range or range_of(read.tensor) for read in reads if is_float(read.tensor)]
        whole = [read.tensor for read in reads if read.range is None]
        birth = witness(call, ranges, whole, bad, kind, told_to=bool(self._nonfinite_arguments) or not reads)
        if birth.fault is not None:
            source = birth.fault.source
            birth.fault = birth.fault.known_as(
                next((read.memory.last for read in self._reads if read.tensor is source), None)
            )
        if self.at.here.phase == "recompute":
            birth.node = None  # that of the checkpoint, whose forward runs again
        return birth

    def _write(self, tensor: Tensor, number: int, kind: int) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        memory = self._memories.get(key)
        if memory is None:
            if len(self._memories) >= self._prune_at:
                self._forget_what_is_gone()
            memory = self._memories[key] = Memory(StorageWeakRef(storage), number)
        memory.last = number
        if memory.bad:
            first, end = bytes_of(tensor)
            if end - first == tensor.nbytes:  # without gaps
                memory.bad = [bad for bad in memory.bad if bad.first < first or end < bad.end]
        if kind != FINITE:
            memory.bad.append(Bad(number, kind, *bytes_of(tensor)))

    def _forget_what_is_gone(self) -> None:
        """Forget freed storages, which cannot be read any more; their writers stay among the events."""
        self._memories = {key: memory for key, memory in self._memories.items() if not memory.weak.expired()}
        self._prune_at = 2 * len(self._memories) + _FEW

    def _nameable(self) -> Iterator[External]:
        """The tensors of which the trace knows what they are called."""
        for name, parameter in self._parameters.items():
            yield External("parameter", name, tuple(parameter.shape), parameter.dtype, tensor=parameter)
        for name, buffer in self._modules.named_buffers():
            yield External("buffer", name, tuple(buffer.shape), buffer.dtype, tensor=buffer)
        for index, batch in enumerate(self._window):
            for path, leaf in tensors_by_path(batch, "batch"):
                if isinstance(leaf, np.ndarray):
                    leaf = _as_tensor(leaf)
                if leaf is not None:
                    yield External("batch", path, tuple(leaf.shape), leaf.dtype, index, leaf)

    def _memory_of(self, tensor: Tensor) -> Memory:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(StorageWeakRef(storage), len(self.events))
            self._take_in(tensor, storage, memory)
        return memory

    def _take_in(self, tensor: Tensor, storage: torch.UntypedStorage, memory: Memory) -> None:
        """Note a tensor that the step reads and has not written, and whether it is finite."""
        named = self._named.get(storage.data_ptr()) if storage.nbytes() else None
        if named is None:
            # A constant, or a tensor stored outside of the model: checked at each read.
            memory.bad.append(Bad(len(self.events), None))
            what = "a tensor made outside of the step"
            self.events.append(External("tensor", what, tuple(tensor.shape), tensor.dtype))
            return
        for external in named:
            for plain in plain_tensors(external.tensor):
                if (kind := kind_of(plain.detach())) != FINITE:
                    memory.last = len(self.events)
                    memory.bad.append(Bad(memory.last, kind, *bytes_of(plain)))
            self.events.append(external)

    def _note_gradient(self, name: str, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if self.target is not None or gradient is None:
            return
        if gradient.layout is torch.strided and type(gradient) is Tensor:
            memory = self._memories.get(storage_id(gradient))
            if memory is None or not memory.bad:
                return
        with without_modes(), torch.no_grad():
            self._note(f"gradient of {name}", gradient)

    def _note(self, target: str, value: Tensor) -> None:
        """If this is nonfinite, it is what is to be explained."""
        for plain in plain_tensors(value):
            memory = self._memories.get(storage_id(plain))
            if memory is not None and memory.bad and (kind := kind_of(plain)) != FINITE:
                self.target = target
                self.causes += tuple((number, kind) for number in writers_of(memory, plain))

    def causes_of(self, value: Tensor) -> tuple[Cause, ...]:
        """Return the events that wrote a nonfinite tensor that the step returned."""
        with without_modes(), torch.no_grad():
            memory = self._memories.get(storage_id(value))
            kind = kind_of(value)
        if memory is not None:
            return tuple((number, kind) for number in writers_of(memory, value))
        # It was copied where no mode could see it: take the newest number that equals it.
        for number in reversed(range(len(self.events))):
            event = self.events[number]
            if isinstance(event, Written) and event.shape == () and event.kind == kind:
                return ((number, kind),)
        return ()

    def _states(self) -> dict[str, Any]:
        states = {"Python's random": random.getstate(), "NumPy's global generator": np.random.get_state(legacy=False)}
        states |= {name: generator_state(generator) for name, generator in self._generators.items()}
        return {name: _hashable(state) for name, state in states.items()}


def _kind_for(read: Read, made: int) -> int:
    """Of what kind the read part was that something of kind `made` came of."""
    found = read.kind()
    if found == NAN and made == INFINITE:  # what held NaN made infinity of an infinity beside it
        return INFINITE if read.range is None and has_infinity(read.tensor) else FINITE
    return found


def _is_one_number(reads: Sequence[Read]) -> bool:
    return len(reads) == 1 and reads[0].tensor.numel() == 1


def _begins_backward() -> bool:
    """Whether the op that runs now is autograd's own, before a backward."""
    return any(frame.f_code.co_name == FIRST_GRADIENTS for frame, _ in walk_stack(sys._getframe(1)))


def _as_tensor(array: np.ndarray) -> Tensor | None:
    """A tensor on the array's memory, as a recipe makes one; None where there can be none."""
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # text, objects, strides below zero
        return None


def _hashable(value: Any) -> Any:
    """The state of a generator, so that two of them can be compared."""
    if isinstance(value, Tensor):
        return value.cpu().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: _hashable(item) for key, item in value.items()}
    return value
