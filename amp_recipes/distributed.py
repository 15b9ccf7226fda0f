"""What a process knows of its neighbours: rank, who writes files, whether all agree."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_recipes.errors import ConfigError


def pick_device(name: str | None) -> torch.device:
    """The device named, or this machine's accelerator (the local rank's one) where there is any, else the CPU.

    Raises ConfigError for one that cannot be used here.
    """
    if name is not None:
        device = torch.device(name)
    elif torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    else:
        device = torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK")
    if device.type != "cpu" and device.index is None and local_rank is not None:
        device = torch.device(device.type, int(local_rank))
        torch.accelerator.set_device_index(device.index)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        found = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "no accelerator"
        raise ConfigError(
            f"device '{name}' cannot be used here ({str(error).splitlines()[0]}). This machine has {found}; give "
            "--device cpu, or leave it out to take the best there is."
        ) from None
    return device


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def initialized() -> bool:
    """Whether a process group of more than one process is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's number among all; 0 where there is one process."""
    return dist.get_rank() if initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if initialized() else 1


def is_main_process() -> bool:
    """Whether this process writes files and draws progress bars."""
    return rank() == 0


def start(device: torch.device, backend: str | None = None) -> None:
    """Join the process group that the launcher's environment describes, unless one is up already.

    backend: default nccl for CUDA devices, gloo for others.
    """
    if launched() and not dist.is_initialized():
        dist.init_process_group(backend or ("nccl" if device.type == "cuda" else "gloo"))


def agree(flag: torch.Tensor) -> torch.Tensor:
    """The maximum of `flag` (0-d, on the device) over all ranks."""
    if initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


def mean(value: float, weight: float, device: torch.device) -> float:
    """The mean of `value` over all ranks, weighted; NaN where no rank has any weight."""
    if not initialized():
        return value
    total = torch.tensor([value * weight if weight > 0 else 0.0, weight], dtype=torch.float64)
    total = total.to(device) if dist.get_backend() == "nccl" else total
    dist.all_reduce(total)
    summed, weights = total.tolist()
    return summed / weights if weights > 0 else math.nan


def means(values: Sequence[float], device: torch.device) -> list[float]:
    """The mean of each of `values` over all ranks, which must give as many."""
    if not initialized():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    total = total.to(device) if dist.get_backend() == "nccl" else total
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def sums(numbers: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """The numbers of each name, each summed over all ranks in their order; a rank may lack a name."""
    of_ranks: list[Mapping[str, Sequence[float]]] = [numbers]
    if initialized():
        of_ranks = of_ranks * world_size()
        dist.all_gather_object(of_ranks, dict(numbers))
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    return {name: tuple(map(sum, zip(*(it[name] for it in of_ranks if name in it), strict=True))) for name in names}


def from_main_process(value: Any) -> Any:
    """`value` as the main process has it, on every rank."""
    if not initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def wait_for_all() -> None:
    """Go on when every rank has come here."""
    if initialized():
        dist.barrier()


def wrap(modules: nn.ModuleDict, device: torch.device, find_unused_parameters: bool = False) -> None:
    """Wrap, in place, every module that has trainable parameters in DistributedDataParallel."""
    if not initialized():
        return
    for name, module in modules.items():
        if isinstance(module, DistributedDataParallel) or not any(p.requires_grad for p in module.parameters()):
            continue
        devices = [device] if device.type == "cuda" else None
        modules[name] = DistributedDataParallel(
            module, device_ids=devices, find_unused_parameters=find_unused_parameters
        )


@contextmanager
def no_sync(modules: nn.Module, use: bool = True) -> Iterator[None]:
    """Within it, backward does not average gradients across ranks; restored also after an exception."""
    if not use or not initialized():
        yield
        return
    with ExitStack() as stack:
        for module in modules.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield
