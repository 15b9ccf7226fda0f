"""Checks before training that the run options on processes fit together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from amp_recipes.distributed import ddp, fsdp
from amp_recipes.distributed.meshes import layout
from amp_recipes.distributed.processes import initialized, world_size
from amp_recipes.distributed.recomputing import chosen
from amp_recipes.distributed.tensor_parallel import OPTION, styles_of
from amp_recipes.errors import ConfigError
from amp_recipes.modules.blocks import chosen_blocks

logger = logging.getLogger(__name__)

# Option -> the value at which it asks for nothing. Those that only make a run faster are ignored with a warning,
# so that one YAML serves both; the others would change what is trained, or whether it fits.
_OF_FSDP = {"shard_replicas": 1, "cpu_offload": False, "tensor_parallel": 1}
_ONLY_SPEED_OF_FSDP = {"shard_modules": [], "reshard_after_forward": True}
_OF_DDP = {"gradient_compression": "off"}
_ONLY_SPEED_OF_DDP = {"static_graph": False}


def check(
    options: Any, device: torch.device, modules: nn.ModuleDict, tensor_parallel_plan: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError with all that `options` and the plan cannot mean for `modules`; warn of what does nothing.

    Patterns are looked at in one process too: a mistake is cheaper there than under torchrun.
    """
    problems = [
        *_problem(chosen, modules, options.activation_checkpointing),
        *_problem(chosen_blocks, "shard_modules", modules, options.shard_modules),
        *_problem(styles_of, modules, tensor_parallel_plan),
    ]
    if options.tensor_parallel > 1 and not tensor_parallel_plan:
        problems.append(
            f"tensor_parallel is {options.tensor_parallel}, but the YAML has no {OPTION}. It names the layers that "
            f"the processes share, as in {OPTION}: {{'*.up': colwise, '*.down': rowwise}}."
        )
    if initialized():
        problems += _problems_of_strategy(options, device, modules, tensor_parallel_plan)
    if problems:
        raise ConfigError("\n".join(problems))


def _problems_of_strategy(
    options: Any, device: torch.device, modules: nn.ModuleDict, plan: Mapping[str, str] | None
) -> list[str]:
    problems = _problem(ddp.check, options, device)
    if plan and options.tensor_parallel == 1:
        logger.warning(
            "%s has no effect without --tensor_parallel (the number of processes that share each layer)", OPTION
        )
    if options.strategy != "fsdp":
        return problems + _options_of_the_other(options, "fsdp", _OF_FSDP, _ONLY_SPEED_OF_FSDP)
    problems += _problem(layout, options, world_size())
    problems += _problem(ddp.check_ready, modules) or _problem(fsdp.check, modules)
    if options.shard_replicas == world_size() and options.tensor_parallel == 1:
        logger.warning(
            "shard_replicas equals the number of processes, so nothing is sharded: each process holds the whole "
            "model, as with ddp"
        )
    return problems + _options_of_the_other(options, "ddp", _OF_DDP, _ONLY_SPEED_OF_DDP)


def _options_of_the_other(
    options: Any, other: str, refused: Mapping[str, Any], ignored: Mapping[str, Any]
) -> list[str]:
    """List wrong options of the strategy that the run does not use; warn about those that only affect speed.

    refused, ignored: option -> the value at which it asks for nothing.
    """
    for name, nothing in ignored.items():
        if getattr(options, name) != nothing:
            logger.warning("%s is an option of --strategy %s; with %s it has no effect", name, other, options.strategy)
    return [
        f"{name} {getattr(options, name)} is an option of --strategy {other}, but this run uses {options.strategy}. "
        f"Change the strategy, or leave {name} out."
        for name, nothing in refused.items()
        if getattr(options, name) != nothing
    ]


def _problem(look: Callable[..., Any], *arguments: Any) -> list[str]:
    """Call `look`, and return the text of its ConfigError in a list."""
    try:
        look(*arguments)
    except ConfigError as error:
        return [str(error)]
    return []
