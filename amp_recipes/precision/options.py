"""Declares the run options of precision and of the loss scale of fp16."""

from __future__ import annotations

from typing import Literal

from amp_recipes.options import ABOVE_ONE, AT_LEAST_ONE, FRACTION, POSITIVE, option, option_group

PrecisionName = Literal["fp32", "bf16", "fp16", "auto"]


@option_group("Precision")
class PrecisionOptions:
    """In which precision a run trains and evaluates."""

    precision: PrecisionName = option(
        "fp32", "Precision of training. `auto`: bf16 if the device computes it natively, else fp16 on a GPU, else fp32."
    )
    eval_precision: PrecisionName = option("fp32", "Precision of validation and test.", changes_training=False)
    fp32_modules: list[str] = option(
        [],
        "Modules that always run in fp32 (pins): patterns of module names (`*.norm`), or of class names "
        "(`type:LayerNorm`).",
    )
    float32_precision: Literal["ieee", "tf32"] = option(
        "ieee",
        "How a GPU computes matrix products and convolutions in fp32. Modules in `fp32_modules` always use `ieee`.",
    )


@option_group("Loss scale (fp16)")
class LossScaleOptions:
    """The loss scale of fp16."""

    init_scale: float = option(65536.0, "Loss scale at the start of training.", POSITIVE, rare=True)
    growth_factor: float = option(
        2.0, "Factor by which the scale grows after `growth_interval` updates without overflow.", ABOVE_ONE, rare=True
    )
    backoff_factor: float = option(0.5, "Factor by which the scale shrinks after an overflow.", FRACTION, rare=True)
    growth_interval: int = option(
        2000, "Number of updates in a row without overflow before the scale grows.", AT_LEAST_ONE, rare=True
    )
    min_scale: float = option(1.0, "Smallest loss scale; at most `init_scale`.", POSITIVE, rare=True)
    measure_underflow: bool = option(
        True,
        "After some updates (20, 1000, 2000, 4000, ...), repeat the step in fp16 and in fp32, and warn if fp16 makes "
        "many gradients zero.",
        changes_training=False,
        rare=True,
    )
