"""Which process this is, which device is its own, and the group that it belongs to."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

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


def start(
    device: torch.device, backend: str | None = None, timeout_minutes: float = 10.0, tensor_parallel: int = 1
) -> None:
    """Join the process group that the launcher's environment describes, unless one is up already.

    backend: default nccl for CUDA devices, gloo for others.
    """
    if launched() and not dist.is_initialized():
        dist.init_process_group(backend or ("nccl" if device.type == "cuda" else "gloo"))


def host_group() -> dist.ProcessGroup | None:
    """The group for numbers in host memory; None: the default one."""
    return None


def data_rank() -> int:
    """This process's number among those that read data of their own."""
    return rank()


def data_world_size() -> int:
    """How many processes read data of their own."""
    return world_size()
