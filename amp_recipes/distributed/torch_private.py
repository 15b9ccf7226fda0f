"""Reaches torch's private names for several processes: DistributedDataParallel, FSDP2, groups, DTensors.

All were seen in torch 2.13.0, and but for those of FSDP2 in 2.11.0, and may change with any release:
tests/unit/distributed/test_torch_private_distributed.py says which, and `missing_for_ddp` and `missing_for_fsdp` tell a
user before training. The names of modules, tensors and nested values are in modules/torch_private.py, those of AMP in
precision/torch_private.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_OF_DDP = ("_pre_forward", "_post_forward")
_OF_REDUCER = ("_rebuild_buckets", "prepare_for_backward", "_reset_state", "_check_reducer_finalized")
_OF_FSDP = ("_init_param_group", "_get_mesh_info", "_get_post_forward_mesh_info", "_get_device_from_mesh")
_GROUPS = "_fsdp_param_groups"  # of the state of a module that is FSDP2's; one group only before torch 2.13
_GATHERED = "_unsharded_param"  # of a parameter of FSDP2's

# ---------------------------------------------------------------------- DistributedDataParallel


def missing_for_ddp() -> list[str]:
    """The private names that averaging gradients needs, and this torch does not have."""
    inside = [(DistributedDataParallel, _OF_DDP), (dist.Reducer, _OF_REDUCER)]
    return [name for kind, names in inside for name in names if not hasattr(kind, name)]


@contextmanager
def leaving_out(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Inside this context, a DistributedDataParallel made of `module` ignores the parameters with these names."""
    # torch names the module's own parameters with a dot before, in one place of two.
    module._ddp_params_and_buffers_to_ignore = [*names, *(f".{name}" for name in names)]
    try:
        yield
    finally:
        del module._ddp_params_and_buffers_to_ignore


def before_forward(wrapper: DistributedDataParallel) -> None:
    """Run what the wrapper does before it calls its module."""
    wrapper._pre_forward()


def after_forward(wrapper: DistributedDataParallel, output: Any) -> Any:
    """Run what the wrapper does with the module's output, so that the next backward averages, if it should."""
    return wrapper._post_forward(output)


def expect_gradients(wrapper: DistributedDataParallel, outputs: list[torch.Tensor]) -> None:
    """Average in the next backward; what `outputs` (if any) do not depend on counts as unused."""
    wrapper.reducer._rebuild_buckets()  # where it is due: not once it expects gradients
    wrapper.reducer.prepare_for_backward(outputs)


def expect_none(wrapper: DistributedDataParallel) -> None:
    """Leave the next backward's gradients as they are."""
    wrapper.reducer._reset_state()


def check_finished(wrapper: DistributedDataParallel) -> None:
    """Raise RuntimeError if the last backward reached some of the wrapper's parameters only."""
    wrapper.reducer._check_reducer_finalized()


def remove_hooks(wrapper: DistributedDataParallel) -> None:
    """Remove the wrapper's hooks from the parameters, so that autograd does not keep it alive."""
    wrapper.reducer._remove_autograd_hooks()


def broadcast(tensors: list[torch.Tensor], most_bytes: int) -> None:
    """Give all ranks rank 0's values, in messages of at most so many bytes."""
    dist._broadcast_coalesced(dist.group.WORLD, tensors, most_bytes, 0)


def versions_kept(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Inside this context, writes do not change the tensors' version counters, so graphs that saved them stay valid."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


# ---------------------------------------------------------------------- FSDP2 and DTensors

# What is of torch.distributed.fsdp or .tensor is imported inside: that takes 0.6 s, which only those who shard should
# pay.


def missing_for_fsdp() -> list[str]:
    """The private names that sharding needs, and this torch does not have."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    missing = [name for name in _OF_FSDP if not hasattr(_fsdp_init, name)]
    return missing if hasattr(FSDPState(), _GROUPS) else [*missing, f"FSDPState.{_GROUPS}"]


def add_group(
    unit: nn.Module,
    parameters: list[nn.Parameter],
    mesh: dist.DeviceMesh,
    reshard_after_forward: bool,
    mp_policy: Any,
    offload_policy: Any,
) -> None:
    """Shard `parameters` over the mesh as one group, gathered when `unit` (already FSDP's) is called."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    mesh_info = _fsdp_init._get_mesh_info(mesh)
    _fsdp_init._init_param_group(
        fully_shard.state(unit),
        parameters,
        (unit,),
        mesh_info,
        _fsdp_init._get_post_forward_mesh_info(reshard_after_forward, mesh_info),
        _fsdp_init._get_device_from_mesh(mesh),
        None,
        mp_policy,
        offload_policy,
    )


def device_of(mesh: dist.DeviceMesh) -> torch.device:
    """This process's device in the mesh."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    return _fsdp_init._get_device_from_mesh(mesh)


def device_of_unit(unit: nn.Module) -> torch.device:
    """The device on which a module that is FSDP's computes."""
    return unit._get_fsdp_state()._device


def state_class() -> type:
    """The class of which FSDP's hooks on a module are methods."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return FSDPState


def groups_of(unit: nn.Module) -> list[Any]:
    """The parameter groups of a module that is FSDP's."""
    return getattr(unit._get_fsdp_state(), _GROUPS)


def gathered_form(parameter: Any) -> torch.Tensor | None:
    """Return the tensor with which a module computes in place of a parameter of FSDP; None before its first call."""
    return getattr(parameter, _GATHERED, None)


def awaits_backward(group: Any) -> bool:
    """Whether a forward of a parameter group has not had its backward: torch notes each, and forgets them then."""
    return bool(group._post_forward_indices)


def free_gathered(group: Any) -> None:
    """Make a parameter group's modules hold their shards again."""
    group.wait_for_unshard()
    group._to_sharded()


def take_shells(parameter: Any) -> dict[str, Any]:
    """Take from one of FSDP's parameters the empty tensors into which it was gathered, for `put_shells`.

    Graphs refer to them; without them torch makes others, in the dtype of the policy then.
    """
    shells = {name: vars(parameter)[name] for name in ("all_gather_outputs", _GATHERED) if name in vars(parameter)}
    vars(parameter).pop(_GATHERED, None)
    parameter.all_gather_outputs = []
    return shells


def put_shells(parameter: Any, shells: dict[str, Any]) -> None:
    """Give one of FSDP's parameters back what `take_shells` took."""
    vars(parameter).update(shells)


def recompute_composably(module: nn.Module, context_fn: Callable[[], tuple[Any, Any]]) -> None:
    """Make `module` keep only its inputs and compute again in the backward; nothing changes if it does already.

    torch's composable checkpoint, which leaves names and classes as they are.
    """
    from torch.distributed._composable import checkpoint

    if checkpoint.state(module) is None:
        checkpoint(module, context_fn=context_fn)


def dtensor_like(value: Any, local: torch.Tensor) -> Any:
    """A DTensor divided as `value` is, of this process's part, which stays where it lies.

    `DTensor.from_local` would move the part to the mesh's device (cpu_offload keeps it on the host).
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(value.shape, value.stride(), local.dtype)
    spec = DTensorSpec(value.device_mesh, value.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


# ---------------------------------------------------------------------- process groups


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the group's collectives."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside this context, `group` is the default one of torch.distributed."""
    world = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = world


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives on the CPU; torch has no public function for this."""
    return group._get_backend(torch.device("cpu")).options._timeout


def default_store() -> dist.Store:
    """The store through which the processes of the default group met."""
    return dist.distributed_c10d._get_default_store()
