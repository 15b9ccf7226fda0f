"""Declares the run options of output."""

from __future__ import annotations

from amp_recipes.options import AT_LEAST_ONE, option, option_group


@option_group("Output", changes_training=False)
class OutputOptions:
    """The output folder of a run, and what it shows on the terminal."""

    output_folder: str | None = option(None, "Folder for logs, metrics and checkpoints. Absent: nothing is written.")
    log_interval_steps: int = option(
        10, "Updates between two log lines, and between two refreshes of the progress bar.", AT_LEAST_ONE
    )
    noprogressbar: bool = option(False, "Show no progress bar, only one line per epoch.")
