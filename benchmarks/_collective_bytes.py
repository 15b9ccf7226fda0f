"""Counts the bytes that a process gives to collectives, whoever calls them: Python, DDP's reducer in C++, DTensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators of torch.distributed by what they do. c10d's are given the tensors of both sides; those of
# _c10d_functional the tensor that goes in.
KINDS = {
    "c10d.allreduce_": "all-reduce",
    "c10d.allreduce_coalesced_": "all-reduce",
    "c10d._allgather_base_": "all-gather",
    "c10d.allgather_": "all-gather",
    "c10d.allgather_into_tensor_coalesced_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.reduce_scatter_": "reduce-scatter",
    "c10d.reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "c10d.broadcast_": "broadcast",
    "_c10d_functional.all_reduce": "all-reduce",
    "_c10d_functional.all_reduce_": "all-reduce",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
}
SILENT = {
    "c10d.barrier",
    "c10d.monitored_barrier_",
    "_c10d_functional.wait_tensor",
    "_c10d_functional._wrap_tensor_autograd",
}


@dataclass(frozen=True)
class Called:
    """One collective that was called: its kind, the bytes of its larger side, and the dtype of them."""

    kind: str
    bytes: int
    dtype: torch.dtype


class CollectiveBytes(TorchDispatchMode):
    """Within it, each collective that this process calls is noted in `calls`.

    DDP's reducer calls c10d from C++, through the dispatcher: on a CPU, where the backward runs in the calling
    thread, it is seen too. Raises KeyError at a collective that the table above does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = f"{func.namespace}.{func._opname}"
        if "c10d" in func.namespace and name not in SILENT:
            self._note(name, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple) -> None:
        kind = KINDS[name]
        sides = [list(tensors_in(each)) for each in args]
        size = max(sum(tensor.nbytes for tensor in side) for side in sides)
        if name == "_c10d_functional.all_gather_into_tensor":
            size *= args[1]
        self.calls.append(Called(kind, size, next(tensor.dtype for side in sides for tensor in side)))

    def of(self, kind: str) -> int:
        """The bytes given to all collectives of one kind."""
        return sum(call.bytes for call in self.calls if call.kind == kind)


def tensors_in(argument: Any) -> Iterable[torch.Tensor]:
    """The tensors of an argument, in lists of any depth."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for each in argument:
            yield from tensors_in(each)


def written_bytes() -> int:
    """The bytes that this process has written in all, to sockets and files, as Linux counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("wchar"))
