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
        5.0, "Maximum L2 norm of each optimizer's gradients (gradient clipping). 0 or less: no clipping.", ANY_NUMBER
    )
    grad_accumulation_factor: int = option(1, "Batches per update (gradient accumulation).", AT_LEAST_ONE)
    nonfinite_patience: int = option(
        3,
        "End the run after this many nonfinite updates in a row. In fp16, those that only the loss scale was too high "
        "for do not count.",
        AT_LEAST_ONE,
        rare=True,
    )
    locate_nonfinite: bool = option(
        True,
        "Repeat a nonfinite step, or batch of an evaluation, to find where the first NaN or Inf appeared, and save it "
        "for `amp-recipes replay`. `false`: record nothing, and in fp16 take every overflow for a loss scale that is "
        "too high.",
        rare=True,
    )
    on_nonfinite: Literal["off", "pin"] = option(
        "off",
        "What to do about a nonfinite step that is finite in fp32: with `pin`, the module in which it began is pinned "
        "to fp32 from then on, if a repeated step proves that this helps. Needs one process and `locate_nonfinite`.",
    )
    pin_limit: int = option(
        5, "Maximum number of modules that `on_nonfinite: pin` pins in a run.", AT_LEAST_ONE, rare=True
    )
    optimizer_step_limit: int | None = option(
        None, "Stop training after this many updates, over all epochs.", AT_LEAST_ONE
    )
    lr_scheduler_interval: Literal["step", "epoch"] = option(
        "step", "When `lr_scheduler` advances: after each update or after each epoch."
    )
    ema_decay: float | None = option(
        None, "Decay per update of an exponential moving average of the weights. Absent: no average.", FRACTION
    )


@option_group("Spikes")
class SpikeOptions:
    """The reaction of a run to a spike."""

    on_spike: Literal["off", "lower_lr", "wider_precision"] = option(
        "off",
        "What to do when the loss or a gradient norm leaves its band (a spike): go back to the last good checkpoint, "
        "and train from there with lower learning rates, or in fp32. Needs `output_folder`; `ckpt_interval_steps` "
        "decides how far it goes back.",
    )
    spike_factor: float = option(
        8.0,
        "Width of the band above the median, in spreads (spread: 1.4826 MAD of the logarithms; at least 0.05 for the "
        "loss, 0.25 for a norm).",
        POSITIVE,
        rare=True,
    )
    spike_window: int = option(
        100,
        "Number of last updates that define the band. Until there are so many, no update is a spike.",
        AT_LEAST_FOUR,
        rare=True,
    )
    spike_patience: int = option(
        1, "Number of updates in a row outside the band that make a spike.", AT_LEAST_ONE, rare=True
    )
    spike_steps: int = option(
        100,
        "Number of updates after the checkpoint that run with lower learning rates or in fp32. It is extended to one "
        "update after the spike.",
        AT_LEAST_ONE,
        rare=True,
    )
    spike_lr_factor: float = option(0.1, "Factor on the learning rates under `lower_lr`.", FRACTION, rare=True)
    spike_limit: int = option(
        10,
        "Maximum number of times that a run goes back; later spikes are only counted and logged.",
        AT_LEAST_ONE,
        rare=True,
    )


@option_group("Early stopping")
class EarlyStoppingOptions:
    """When training ends early, and which checkpoint is the best."""

    early_stop_metric: str | None = option(
        None,
        "Validation metric to watch: one of `add_metric`, one returned by `on_stage_end`, or `loss`. Absent: no "
        "early stopping.",
    )
    early_stop_mode: Literal["min", "max"] = option(
        "min", "Whether a smaller (`min`) or a larger (`max`) metric is better."
    )
    early_stop_patience: int | None = option(
        5,
        "Stop training after this many epochs in a row without a better value. `null`: never stop; the metric only "
        "chooses the best checkpoint.",
        AT_LEAST_ONE,
    )


@option_group("Trying out", changes_training=False)
class TrialOptions:
    """Short runs that try a recipe out."""

    debug: bool = option(False, "Run only a few batches: `debug_epochs` epochs of `debug_batches` batches.")
    debug_batches: int = option(2, "Batches per stage under `debug`.", AT_LEAST_ONE)
    debug_epochs: int = option(2, "Epochs under `debug`.", AT_LEAST_ONE)
    overfit_batches: int = option(
        0, "Train and validate on the first n batches only. 0: on all.", AT_LEAST_ZERO, changes_training=True
    )
    test_only: bool = option(False, "Skip training; evaluate only.")
