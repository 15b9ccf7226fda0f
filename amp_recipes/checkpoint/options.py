"""Declares the run options of saving and resuming."""

from __future__ import annotations

from typing import Literal

from amp_recipes.interrupts import SAVE_SIGNALS
from amp_recipes.options import AT_LEAST_ZERO, Range, option, option_group

_SIGNAL_NAMES = Range(lambda names: set(names) <= set(SAVE_SIGNALS), f"some of {', '.join(SAVE_SIGNALS)}")


@option_group("Checkpoints", changes_training=False)
class CheckpointOptions:
    """When a run saves, and what it begins with."""

    ckpt_interval_minutes: float = option(0.0, "Minutes between checkpoints inside an epoch. 0: off.", AT_LEAST_ZERO)
    ckpt_interval_steps: int = option(0, "Updates between checkpoints inside an epoch. 0: off.", AT_LEAST_ZERO)
    ckpt_background: bool = option(
        True,
        "Copy the state to host memory and write it while training continues. `false`: training waits for the disk.",
        rare=True,
    )
    save_signals: list[str] = option(
        [],
        f"Signals at which the run saves a checkpoint and continues: {_SIGNAL_NAMES.text}.",
        _SIGNAL_NAMES,
        rare=True,
    )
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "`auto`: resume from the newest checkpoint of the output folder, if there is one; `must`: end with an error "
        "if there is none; `never`: rename the folder of the old checkpoints and start a new run.",
    )
    init_from: str | None = option(
        None,
        "Start from the weights of another run: its output folder (the best checkpoint is used) or one of its "
        "`CKPT+` folders. Ignored when the run resumes.",
    )
    accept_changes: bool = option(
        False, "Resume even if settings differ from those that the run began with.", rare=True
    )
