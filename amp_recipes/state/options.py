"""Declares the run options of randomness."""

from __future__ import annotations

from amp_recipes.options import SEED, option, option_group


@option_group("Randomness")
class RandomnessOptions:
    """The settings that make two runs equal."""

    seed: int | None = option(
        None,
        "Seed for Python, NumPy and torch, set before the YAML instantiates anything. Absent: nothing is seeded.",
        SEED,
    )
    deterministic: bool = option(False, "Use deterministic algorithms only; an operation without one raises an error.")
