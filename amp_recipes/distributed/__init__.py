"""What a process knows of its neighbours: rank, who writes files, whether all agree, what of the model is its own."""

from amp_recipes.distributed.collectives import agree, from_main_process, mean, means, sums, wait_for_all
from amp_recipes.distributed.ddp import no_sync
from amp_recipes.distributed.processes import (
    initialized,
    is_main_process,
    launched,
    pick_device,
    rank,
    start,
    world_size,
)
from amp_recipes.distributed.sharing import wrap

__all__ = [
    "agree",
    "from_main_process",
    "initialized",
    "is_main_process",
    "launched",
    "mean",
    "means",
    "no_sync",
    "pick_device",
    "rank",
    "start",
    "sums",
    "wait_for_all",
    "world_size",
    "wrap",
]
