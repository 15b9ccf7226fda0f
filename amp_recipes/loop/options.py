"""Declares the run options of the training loop."""

from __future__ import annotations

from typing import Literal

from amp_recipes.options import (
    ANY_NUMBER,
    AT_LEAST_FOUR,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    FRACTION,
    POSITIVE,
    option,
    option_group,
)


@option_group("Optimization")
class OptimizationOptions:
    """Updates, and what comes with each."""

    max_grad_norm: float = option(
        5.0, "Bound on the L2 norm of each optimizer's gradients. 0 or less: no clipping.", ANY_NUMBER
    )
    grad_accumulation_factor: int = option(1, "Batches per update.", AT_LEAST_ONE)
    nonfinite_patience: int = option(
        3,
        "Nonfinite updates in a row that end the run (in fp16 only those at the scale's floor count).",
        AT_LEAST_ONE,
        rare=True,
    )
    locate_nonfinite: bool = option(
        True,
        "Take a step that went nonfinite again to say where the value was born, and keep it for `amp-recipes replay`. "
        "`false`: nothing is noted for it.",
        changes_training=False,
        rare=True,
    )
    optimizer_step_limit: int | None = option(
        None, "Updates after which training stops, over all epochs.", AT_LEAST_ONE
    )
    lr_scheduler_interval: Literal["step", "epoch"] = option(
        "step", "When the hparam `lr_scheduler` advances: after each update or each epoch."
    )
    ema_decay: float | None = option(
        None, "Decay per update of an exponential moving average of the weights. Absent: no average.", FRACTION
    )


@option_group("Spikes")
class SpikeOptions:
    """What a run does about a spike."""

    on_spike: Literal["off", "lower_lr", "wider_precision"] = option(
        "off",
        "What to do when the loss or a gradient norm leaves its band: go back to the last good checkpoint, and on from "
        "there with lower learning rates, or in fp32. Needs `output_folder`; how far it goes back depends on "
        "`ckpt_interval_steps`.",
    )
    spike_factor: float = option(
        8.0,
        "The band ends this many spreads above the median (spread: 1.4826 MAD of the logarithms; at least 0.05 for the "
        "loss, 0.25 for a norm).",
        POSITIVE,
        rare=True,
    )
    spike_window: int = option(
        100, "Updates that make the band; before there are so many, nothing is a spike.", AT_LEAST_FOUR, rare=True
    )
    spike_patience: int = option(1, "Updates in a row outside the band that make a spike.", AT_LEAST_ONE, rare=True)
    spike_steps: int = option(
        100,
        "Updates after the checkpoint that run with lower learning rates or in fp32; at least to one past that which "
        "spiked.",
        AT_LEAST_ONE,
        rare=True,
    )
    spike_lr_factor: float = option(0.1, "Factor on learning rates under `lower_lr`.", FRACTION, rare=True)
    spike_limit: int = option(
        10, "How often the run goes back at most; later spikes are warned about and counted.", AT_LEAST_ONE, rare=True
    )


@option_group("Early stopping")
class EarlyStoppingOptions:
    """When training ends early, and which checkpoint is the best."""

    early_stop_metric: str | None = option(
        None,
        "Metric of the validation to watch: of `add_metric`, returned by `on_stage_end`, or `loss`. Absent: no early "
        "stop.",
    )
    early_stop_mode: Literal["min", "max"] = option("min", "Whether the metric is better when smaller or larger.")
    early_stop_patience: int | None = option(
        5,
        "Epochs in a row without a better value that end training. `null`: none do, and the metric only chooses the "
        "best checkpoint.",
        AT_LEAST_ONE,
    )


@option_group("Trying out", changes_training=False)
class TrialOptions:
    """Short runs that try a recipe out."""

    debug: bool = option(False, "Run a few batches only: `debug_epochs` epochs of `debug_batches`.")
    debug_batches: int = option(2, "Batches per stage under `debug`.", AT_LEAST_ONE)
    debug_epochs: int = option(2, "Epochs under `debug`.", AT_LEAST_ONE)
    overfit_batches: int = option(
        0, "Train and validate on the first n batches only. 0: off.", AT_LEAST_ZERO, changes_training=True
    )
    test_only: bool = option(False, "Skip training; evaluate only.")
