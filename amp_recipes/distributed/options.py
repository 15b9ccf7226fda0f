"""Declares the run options of devices and processes."""

from __future__ import annotations

from typing import Literal

from amp_recipes.options import AT_LEAST_ONE, POSITIVE, option, option_group


@option_group("Devices and processes", changes_training=False)
class ProcessOptions:
    """The device of a run, and how several processes share the model."""

    device: str | None = option(
        None, "Device to run on: `cpu`, `cuda`, `cuda:1`, `mps`. Absent: the fastest one of this machine."
    )
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp",
        "How several processes share the model. `ddp`: each process holds the whole model; `fsdp`: each holds a part "
        "of every parameter, gradient and optimizer state.",
    )
    distributed_backend: str | None = option(None, "Process group backend. Absent: the one for the device.", rare=True)
    distributed_timeout_minutes: float = option(
        10.0, "Minutes that a process waits for the others before it ends with an error.", POSITIVE, rare=True
    )
    find_unused_parameters: bool = option(
        False, "Search for parameters that a forward does not use, in some processes or in all; costs time."
    )
    static_graph: bool = option(
        False, "Promise ddp that every step uses the same parameters in the same order.", rare=True
    )
    gradient_compression: Literal["off", "bf16", "fp16"] = option(
        "off",
        "Dtype in which ddp sends gradients. A 2-byte dtype halves the traffic; the gradients are rounded to it.",
        changes_training=True,
        rare=True,
    )
    sync_batchnorm: bool = option(
        False,
        "Normalise BatchNorm over the batches of all processes together (on GPUs only).",
        changes_training=True,
        rare=True,
    )
    shard_modules: list[str] = option(
        [],
        "Modules that fsdp gathers one at a time: patterns as for `fp32_modules`. Empty: the repeated blocks.",
        rare=True,
    )
    shard_replicas: int = option(
        1,
        "Number of groups of processes. Each group shards the model among its processes, and averages gradients with "
        "the other groups.",
        AT_LEAST_ONE,
        rare=True,
    )
    reshard_after_forward: bool = option(
        True, "Let fsdp free gathered parameters after each forward, and gather them again for the backward.", rare=True
    )
    cpu_offload: bool = option(
        False, "Let fsdp keep parameters, gradients and optimizer state in host memory.", rare=True
    )
    activation_checkpointing: list[str] = option(
        [],
        "Modules whose forward is computed again during the backward, to save memory (activation checkpointing): "
        "patterns as for `fp32_modules`, or `blocks` for the repeated blocks.",
        rare=True,
    )
    tensor_parallel: int = option(
        1,
        "Number of processes that share each layer. The YAML key `tensor_parallel_plan` says how (pattern of module "
        "names: `colwise` or `rowwise`).",
        AT_LEAST_ONE,
        rare=True,
    )
