"""What a recipe reports of a stage, and where it may leave files of its own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from amp_recipes import distributed
from amp_recipes.config.experiment import (
    ENVIRONMENT_FILE,
    LOG_FILE,
    ORIGINAL_FILE,
    OVERRIDES_FILE,
    RESOLVED_FILE,
)
from amp_recipes.errors import ConfigError, RecipeError
from amp_recipes.loop.metrics import StageMetrics, ratios
from amp_recipes.loop.run import RunSetup

logger = logging.getLogger(__name__)

_OF_THE_RUN = {
    *(ORIGINAL_FILE, RESOLVED_FILE, OVERRIDES_FILE, ENVIRONMENT_FILE, LOG_FILE),
    *("metrics.jsonl", "metrics.taken_again.jsonl", "summary.json", "save"),
}


class RunReport(RunSetup):
    """Base of `Brain`: adds up metrics, tells the time, names files.

    stage_metrics: in `on_stage_end`, the metrics that `add_metric` added up, by name.
    """

    def _set_up_counters(self) -> None:
        super()._set_up_counters()
        self.stage_metrics: dict[str, float] = {}
        self._sums = self._train_sums = StageMetrics()
        self._window_sums: StageMetrics | None = None  # while a window's batches are taken: whether they count is open

    def add_metric(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to a metric of the running stage, which is the sum of all `total` over the sum of all `count`.

        total, count: numbers, or tensors of any shape, which are summed: `add_metric("accuracy", scores.argmax(1) ==
        labels, len(labels))`. They stay on the device: nothing waits for them before the stage ends. The stage reports
        the metric, over all processes, beside what `on_stage_end` returns (which wins). Batches whose update is skipped
        do not count, as in the average loss; a contribution that is not finite is left out as a whole, with a warning.
        Outside a stage it does nothing. Raises RecipeError for the name `loss`, which the stage's average has.
        """
        if name == "loss":
            raise RecipeError("add_metric('loss') would take the place of the stage's average loss: give another name.")
        sums = self._sums if self._window_sums is None else self._window_sums
        sums.add(name, total, count)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in the order of their ranks; of one process, a list of its own.

        Of processes that share layers, and so the data (`tensor_parallel`), the first gives for all.

        For figures that no ratio of sums gives, such as a macro F1 over all predictions. Every process must call it, as
        often and in the same order: in `on_stage_end`, say, and not for each batch, of which one may have more than
        another. `value` is pickled on the way, its tensors on the CPU.
        """
        on_cpu = tree_map(lambda it: it.detach().cpu() if isinstance(it, torch.Tensor) else it, value)
        return distributed.gather(on_cpu)[:: distributed.world_size() // distributed.data_world_size()]

    @property
    def stage_seconds(self) -> float:
        """Seconds that the running stage has taken so far; also those before an interruption."""
        return self._log.seconds

    def output_path(self, name: str | os.PathLike[str]) -> Path | None:
        """Where the recipe may write a file of that name: below `output_folder`, with the folders on the way made.

        None where nothing is to be written: without an `output_folder`, in all processes but the main one, in a folder
        that may only be read, and where the script was started with --diagnose or --replay. Raises ConfigError for a
        name that leads out of the folder, or is that of a file of the run's own.
        """
        folder = self._own_folder()
        if folder is None or not distributed.is_main_process() or self.run_opts.purpose.action != "train":
            return None
        path = folder / name
        below = Path(os.path.relpath(path.resolve(), folder.resolve())).parts
        if not below or below[0] == "..":
            raise ConfigError(f"output_path('{name}') is not below {folder}: give the name of a file in it.")
        if below[0] in _OF_THE_RUN:
            raise ConfigError(f"output_path('{name}') is where the run keeps its own {below[0]}: give another name.")
        if folder.is_dir() and not os.access(folder, os.W_OK):
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_path('{name}'): {error.strerror}: {error.filename}.") from error
        return path

    def _own_folder(self) -> Path | None:
        """Where this run's own files go: trying out (`debug`) leaves a real run's alone."""
        if self.output_folder is None:
            return None
        return Path(self.output_folder) / "debug" if self.debug else Path(self.output_folder)

    def _added_metrics(self, warn: bool = False) -> dict[str, float]:
        sums = distributed.sums(self._sums.sums())
        for name, (_, _, left_out) in sums.items():
            if warn and left_out:
                logger.warning(
                    "metric %s: %d contributions of the stage were not finite and are left out", name, left_out
                )
        return ratios(sums)
