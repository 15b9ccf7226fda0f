"""Declares the run options of devices and processes."""

from __future__ import annotations

from typing import Literal

from amp_recipes.options import AT_LEAST_ONE, POSITIVE, option, option_group


@option_group("Devices and processes", changes_training=False)
class ProcessOptions:
    """Where a run computes, and how processes share it."""

    device: str | None = option(None, "Where to run: `cpu`, `cuda`, `cuda:1`, `mps`. Absent: the best one.")
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp",
        "How several processes share the model. `ddp`: each holds all of it; `fsdp`: each holds a part of every "
        "parameter, gradient and optimizer state.",
    )
    distributed_backend: str | None = option(None, "Process group backend. Absent: what fits the device.", rare=True)
    distributed_timeout_minutes: float = option(
        10.0, "Minutes that a process waits for the others before it ends with an error.", POSITIVE, rare=True
    )
    find_unused_parameters: bool = option(
        False, "Look for parameters that a forward leaves unused, in some processes or in all; costs time."
    )
    static_graph: bool = option(
        False, "Promise ddp that every step uses the same parameters in the same order.", rare=True
    )
    gradient_compression: Literal["off", "bf16", "fp16"] = option(
        "off",
        "Dtype in which ddp sends gradients: half the bytes, and they are rounded to it.",
        changes_training=True,
        rare=True,
    )
    sync_batchnorm: bool = option(
        False, "BatchNorm over the batches of all processes together (on GPUs only).", changes_training=True, rare=True
    )
    shard_modules: list[str] = option(
        [],
        "Modules that fsdp gathers one at a time: patterns as for `fp32_modules`. Empty: the repeated blocks.",
        rare=True,
    )
    shard_replicas: int = option(
        1,
        "Groups of processes, each of which shards the model among its own and averages gradients with the others.",
        AT_LEAST_ONE,
        rare=True,
    )
    reshard_after_forward: bool = option(
        True, "Let fsdp free gathered parameters after each forward, to gather them again.", rare=True
    )
    cpu_offload: bool = option(
        False, "Let fsdp keep parameters, gradients and optimizer state in host memory.", rare=True
    )
    activation_checkpointing: list[str] = option(
        [],
        "Modules whose forward is computed again in the backward instead of kept: patterns as for `fp32_modules`, or "
        "`blocks` for the repeated blocks.",
        rare=True,
    )
    tensor_parallel: int = option(
        1,
        "Processes that share each layer as the key `tensor_parallel_plan` of the YAML says (pattern of module names: "
        "`colwise` or `rowwise`).",
        AT_LEAST_ONE,
        rare=True,
    )
