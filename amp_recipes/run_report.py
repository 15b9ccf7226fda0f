"""What a recipe reports of a stage, and where it may leave files of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from amp_recipes import distributed
from amp_recipes.errors import ConfigError
from amp_recipes.run_setup import RunSetup
from amp_recipes.stage_metrics import StageMetrics, ratios


class RunReport(RunSetup):
    """Base of `Brain`: adds up metrics, tells the time, names files.

    stage_metrics: in `on_stage_end`, the metrics that `add_metric` added up, by name.
    """

    def _set_up_counters(self) -> None:
        super()._set_up_counters()
        self.stage_metrics: dict[str, float] = {}
        self._sums = self._train_sums = StageMetrics()

    def add_metric(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to a metric of the running stage, which is the sum of all `total` over the sum of all `count`.

        total, count: numbers, or tensors of any shape, which are summed: `add_metric("accuracy", scores.argmax(1) ==
        labels, len(labels))`. They stay on the device: nothing waits for them before the stage ends. What is not finite
        is left out. The stage reports the metric, over all processes, beside what `on_stage_end` returns (which wins).
        """
        self._sums.add(name, total, count)

    @property
    def stage_seconds(self) -> float:
        """Seconds that the running stage has taken so far; also those before an interruption."""
        return self._log.seconds

    def output_path(self, name: str | os.PathLike[str]) -> Path | None:
        """Where the recipe may write a file of that name: below `output_folder`, with the folders on the way made.

        None where nothing is to be written: without an `output_folder`, in all processes but the main one, in a folder
        that may only be read, and where the script was started with --diagnose or --replay. Raises ConfigError for a
        name that leads out of the folder.
        """
        folder = self._own_folder()
        if folder is None or not distributed.is_main_process() or self.run_opts.purpose.action != "train":
            return None
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"output_path('{name}') leads out of {folder}: give a name below it.")
        if folder.is_dir() and not os.access(folder, os.W_OK):
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _own_folder(self) -> Path | None:
        """Where this run's own files go: trying out (`debug`) leaves a real run's alone."""
        if self.output_folder is None:
            return None
        return Path(self.output_folder) / "debug" if self.debug else Path(self.output_folder)

    def _added_metrics(self) -> dict[str, float]:
        return ratios(distributed.sums(self._sums.sums()))
