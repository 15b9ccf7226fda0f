"""The options of a run: name, type, default and meaning of each."""

# ruff: noqa: RUF009  (`option` makes a dataclass field, as `dataclasses.field` does)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from amp_recipes.config.options.described import (
    ABOVE_ONE,
    ANY_NUMBER,
    AT_LEAST_FOUR,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    FRACTION,
    POSITIVE,
    SEED,
    SIGNAL_NAMES,
    option,
)

PrecisionName = Literal["fp32", "bf16", "fp16", "auto"]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class OptionFields:
    """Each option with its type, default and meaning; a Brain has them as attributes of the same names."""

    precision: PrecisionName = option(
        "fp32",
        "Precision",
        "Precision of training. `auto`: bf16 if the device does it natively, else fp16 on a GPU, else fp32.",
    )
    eval_precision: PrecisionName = option(
        "fp32", "Precision", "Precision of validation and test.", changes_training=False
    )
    fp32_modules: list[str] = option(
        [],
        "Precision",
        "Modules that run in fp32 whatever the precision: patterns of module names (`*.norm`), or of "
        "class names (`type:LayerNorm`).",
    )
    float32_precision: Literal["ieee", "tf32"] = option(
        "ieee",
        "Precision",
        "What fp32 means in matrix products and convolutions on a GPU. Modules in `fp32_modules` always use `ieee`.",
    )
    init_scale: float = option(65536.0, "Loss scale (fp16)", "Loss scale at the start.", POSITIVE)
    growth_factor: float = option(
        2.0,
        "Loss scale (fp16)",
        "Factor on the scale after `growth_interval` updates without overflow.",
        ABOVE_ONE,
    )
    backoff_factor: float = option(0.5, "Loss scale (fp16)", "Factor on the scale after an overflow.", FRACTION)
    growth_interval: int = option(
        2000, "Loss scale (fp16)", "Updates in a row without overflow before the scale grows.", AT_LEAST_ONE
    )
    min_scale: float = option(1.0, "Loss scale (fp16)", "Floor of the loss scale; at most `init_scale`.", POSITIVE)
    max_grad_norm: float = option(
        5.0,
        "Optimization",
        "Bound on the L2 norm of each optimizer's gradients. 0 or less: no clipping.",
        ANY_NUMBER,
    )
    grad_accumulation_factor: int = option(1, "Optimization", "Batches per update.", AT_LEAST_ONE)
    nonfinite_patience: int = option(
        3,
        "Optimization",
        "Nonfinite updates in a row that end the run (in fp16 only those at the scale's floor count).",
        AT_LEAST_ONE,
    )
    locate_nonfinite: bool = option(
        True,
        "Optimization",
        "Take a step that went nonfinite again to say where the value was born, and keep it for `amp-recipes replay`. "
        "`false`: nothing is noted for it.",
        changes_training=False,
    )
    optimizer_step_limit: int | None = option(
        None, "Optimization", "Updates after which training stops, over all epochs.", AT_LEAST_ONE
    )
    lr_scheduler_interval: Literal["step", "epoch"] = option(
        "step", "Optimization", "When the hparam `lr_scheduler` advances: after each update or each epoch."
    )
    ema_decay: float | None = option(
        None,
        "Optimization",
        "Decay per update of an exponential moving average of the weights. Absent: no average.",
        FRACTION,
    )
    on_spike: Literal["off", "lower_lr", "wider_precision"] = option(
        "off",
        "Spikes",
        "What to do when the loss or a gradient norm leaves its band: go back to the last good checkpoint, and on from "
        "there with lower learning rates, or in fp32. Needs `output_folder`; how far it goes back depends on "
        "`ckpt_interval_steps`.",
    )
    spike_factor: float = option(
        8.0,
        "Spikes",
        "The band ends this many spreads above the median (spread: 1.4826 MAD of the logarithms; at least 0.05 for the "
        "loss, 0.25 for a norm).",
        POSITIVE,
    )
    spike_window: int = option(
        100, "Spikes", "Updates that make the band; before there are so many, nothing is a spike.", AT_LEAST_FOUR
    )
    spike_patience: int = option(1, "Spikes", "Updates in a row outside the band that make a spike.", AT_LEAST_ONE)
    spike_steps: int = option(
        100,
        "Spikes",
        "Updates after the checkpoint that run with lower learning rates or in fp32; at least to one past that which "
        "spiked.",
        AT_LEAST_ONE,
    )
    spike_lr_factor: float = option(0.1, "Spikes", "Factor on learning rates under `lower_lr`.", FRACTION)
    spike_limit: int = option(
        10, "Spikes", "How often the run goes back at most; later spikes are warned about and counted.", AT_LEAST_ONE
    )
    early_stop_metric: str | None = option(
        None,
        "Early stopping",
        "Metric to watch: one that `on_stage_end` returned for validation, or `loss`. Absent: no early stop.",
    )
    early_stop_mode: Literal["min", "max"] = option(
        "min", "Early stopping", "Whether the metric is better when smaller or larger."
    )
    early_stop_patience: int | None = option(
        5,
        "Early stopping",
        "Epochs in a row without a better value that end training. `null`: none do, and the metric only chooses the "
        "best checkpoint.",
        AT_LEAST_ONE,
    )
    seed: int | None = option(
        None,
        "Randomness",
        "Seeds Python, NumPy and torch before the YAML instantiates anything. Absent: nothing is seeded.",
        SEED,
    )
    deterministic: bool = option(
        False, "Randomness", "Use deterministic algorithms only; an operation that has none raises."
    )
    debug: bool = option(False, "Trying out", "Run a few batches only: `debug_epochs` epochs of `debug_batches`.")
    debug_batches: int = option(2, "Trying out", "Batches per stage under `debug`.", AT_LEAST_ONE)
    debug_epochs: int = option(2, "Trying out", "Epochs under `debug`.", AT_LEAST_ONE)
    overfit_batches: int = option(
        0,
        "Trying out",
        "Train and validate on the first n batches only. 0: off.",
        AT_LEAST_ZERO,
        changes_training=True,
    )
    test_only: bool = option(False, "Trying out", "Skip training; evaluate only.")
    output_folder: str | None = option(
        None, "Output", "Folder for logs, metrics and checkpoints. Absent: nothing is written."
    )
    log_interval_steps: int = option(10, "Output", "Updates between refreshes of progress and log.", AT_LEAST_ONE)
    noprogressbar: bool = option(False, "Output", "Show no progress: one line per epoch.")
    ckpt_interval_minutes: float = option(
        0.0, "Checkpoints", "Minutes between checkpoints inside an epoch. 0: off.", AT_LEAST_ZERO
    )
    ckpt_interval_steps: int = option(
        0, "Checkpoints", "Updates between checkpoints inside an epoch. 0: off.", AT_LEAST_ZERO
    )
    ckpt_background: bool = option(
        True,
        "Checkpoints",
        "Copy the state to host memory and write it while training goes on. `false`: training waits for the disk.",
    )
    save_signals: list[str] = option(
        [],
        "Checkpoints",
        f"Signals at which the run saves and goes on, and does not end: {SIGNAL_NAMES.text}.",
        SIGNAL_NAMES,
    )
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "Checkpoints",
        "`auto`: go on from the newest checkpoint of the output folder, if there is one; `must`: end with an error if "
        "there is none; `never`: set the old checkpoints aside and start afresh.",
    )
    init_from: str | None = option(
        None,
        "Checkpoints",
        "Begin with the weights of another run: its output folder (its best checkpoint) or one of its `CKPT+` folders. "
        "A run that resumes does not look at it.",
    )
    accept_changes: bool = option(
        False, "Checkpoints", "Resume although settings differ from those that the run began with."
    )
    device: str | None = option(
        None,
        "Devices and processes",
        "Where to run: `cpu`, `cuda`, `cuda:1`, `mps`. Absent: the best one.",
    )
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp",
        "Devices and processes",
        "How several processes share the model. `ddp`: each holds all of it; `fsdp`: each holds a part of every "
        "parameter, gradient and optimizer state.",
    )
    distributed_backend: str | None = option(
        None, "Devices and processes", "Process group backend. Absent: what fits the device."
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "Devices and processes",
        "Minutes that a process waits for the others before it ends with an error.",
        POSITIVE,
    )
    find_unused_parameters: bool = option(
        False,
        "Devices and processes",
        "Look for parameters that a forward leaves unused, in some processes or in all; costs time.",
    )
    static_graph: bool = option(
        False, "Devices and processes", "Promise ddp that every step uses the same parameters in the same order."
    )
    gradient_compression: Literal["off", "bf16", "fp16"] = option(
        "off",
        "Devices and processes",
        "Dtype in which ddp sends gradients: half the bytes, and they are rounded to it.",
        changes_training=True,
    )
    sync_batchnorm: bool = option(
        False,
        "Devices and processes",
        "BatchNorm over the batches of all processes together (on GPUs only).",
        changes_training=True,
    )
    shard_modules: list[str] = option(
        [],
        "Devices and processes",
        "Modules that fsdp gathers one at a time: patterns as for `fp32_modules`. Empty: the repeated blocks.",
    )
    shard_replicas: int = option(
        1,
        "Devices and processes",
        "Groups of processes, each of which shards the model among its own and averages gradients with the others.",
        AT_LEAST_ONE,
    )
    reshard_after_forward: bool = option(
        True, "Devices and processes", "Let fsdp free gathered parameters after each forward, to gather them again."
    )
    cpu_offload: bool = option(
        False, "Devices and processes", "Let fsdp keep parameters, gradients and optimizer state in host memory."
    )
    activation_checkpointing: list[str] = option(
        [],
        "Devices and processes",
        "Modules whose forward is computed again in the backward instead of kept: patterns as for `fp32_modules`, or "
        "`blocks` for the repeated blocks.",
    )
    tensor_parallel: int = option(
        1,
        "Devices and processes",
        "Processes that share each layer as the key `tensor_parallel_plan` of the YAML says (pattern of module names: "
        "`colwise` or `rowwise`).",
        AT_LEAST_ONE,
    )
