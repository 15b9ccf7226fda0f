"""Arranges the processes: which hold copies, which hold shards, and which share a layer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from amp_recipes.distributed.processes import world_size
from amp_recipes.distributed.torch_private import set_timeout
from amp_recipes.errors import ConfigError

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


def layout(options: Any, processes: int) -> dict[str, int]:
    """The mesh's dimensions with their sizes; neighbours in rank are neighbours in the last one.

    So those that talk most, inside each layer, are in one machine. A dimension of size 1 is left out, but for shards.
    Raises ConfigError where `processes` cannot be laid out so.
    """
    replicas, tensor = options.shard_replicas, options.tensor_parallel
    if processes % (replicas * tensor):
        factors = " x ".join(
            f"{name} ({size})" for name, size in (("shard_replicas", replicas), ("tensor_parallel", tensor)) if size > 1
        )
        raise ConfigError(
            f"{factors} does not divide the {processes} processes of this run. Start a number of processes that is "
            "divisible by it, or choose a divisor of the present number."
        )
    sizes = {REPLICATE: replicas, SHARD: processes // (replicas * tensor), TENSOR: tensor}
    return {name: size for name, size in sizes.items() if size > 1 or name == SHARD}


def make_mesh(device: torch.device, options: Any) -> DeviceMesh:
    """The mesh of all processes, by `layout`. A collective: every process is to call it."""
    sizes = layout(options, world_size())
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():  # which torch gives timeouts of its own, 10 or 30 minutes
        set_timeout(group, timedelta(minutes=options.distributed_timeout_minutes))
    return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of `mesh` over which gradients are averaged: copies and shards."""
    names = tuple(name for name in mesh.mesh_dim_names if name != TENSOR)
    return mesh if names == mesh.mesh_dim_names else mesh[names]
