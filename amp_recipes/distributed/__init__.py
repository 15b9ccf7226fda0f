"""Runs several processes as one training: ranks, agreement between them, and ways to share the model."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.distributed.checks import check
    from amp_recipes.distributed.collectives import (
        AsyncGather,
        agree,
        from_main_process,
        gather,
        mean,
        sums,
        wait_for_all,
    )
    from amp_recipes.distributed.ddp import averaging, differing, evaluating, start_alike
    from amp_recipes.distributed.failures import collective, show_ranks_in_errors, timeout_text
    from amp_recipes.distributed.processes import (
        alone,
        at_own_pace,
        data_rank,
        data_world_size,
        host_group,
        initialized,
        is_main_process,
        local_rank,
        main_process_first,
        pick_device,
        rank,
        start,
        world_size,
    )
    from amp_recipes.distributed.rendezvous import launched
    from amp_recipes.distributed.sharing import is_sharded, keeping_gathered, leaves, no_sync, total, wrap
    from amp_recipes.distributed.whole_model import whole, why_not_whole

__all__ = [
    "AsyncGather",
    "agree",
    "alone",
    "at_own_pace",
    "averaging",
    "check",
    "collective",
    "data_rank",
    "data_world_size",
    "differing",
    "evaluating",
    "from_main_process",
    "gather",
    "host_group",
    "initialized",
    "is_main_process",
    "is_sharded",
    "keeping_gathered",
    "launched",
    "leaves",
    "local_rank",
    "main_process_first",
    "mean",
    "no_sync",
    "pick_device",
    "rank",
    "show_ranks_in_errors",
    "start",
    "start_alike",
    "sums",
    "timeout_text",
    "total",
    "wait_for_all",
    "whole",
    "why_not_whole",
    "world_size",
    "wrap",
]
__getattr__, __dir__ = lazy_names(__name__)
