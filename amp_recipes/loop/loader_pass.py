"""Holds the state of one pass over a loader: its place, its average loss and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from amp_recipes import distributed
from amp_recipes.loop.loss_average import LossAverage
from amp_recipes.loop.metrics import StageMetrics, ratios
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)


class Pass:
    """One pass over a loader: the training of an epoch, its validation, or a test.

    step: batches done in it; average: of the losses; sums: of the metrics; results: once it has ended, the loss, the
    metrics and what `on_stage_end` returned, as the main process has them.
    at_place: the loader gives the next batch to train on (a resumed one may have to find its place first).
    asked_to_end: a signal asks the run to end, and all processes know.
    """

    def __init__(self, stage: Stage, epoch: int | None = None) -> None:
        self.stage = stage
        self.epoch = epoch
        self.step = 0
        self.average = LossAverage()
        self.sums = StageMetrics()
        self.results: dict[str, float] = {}
        self.at_place = self.asked_to_end = False

    def where(self, step: int | None = None) -> str:
        """The place in words: `train epoch 2, batch 7`."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch}, "
        return f"{self.stage.name.lower()} {epoch}batch {self.step if step is None else step}"

    def added_metrics(self, warn: bool = False) -> dict[str, float]:
        """Return the metrics, from the sums of all processes; warn: log how many values were left out."""
        sums = distributed.sums(self.sums.sums())
        for name, (_, _, left_out) in sums.items():
            if warn and left_out:
                logger.warning("metric %s: %d values of the stage were not finite and were left out", name, left_out)
        return ratios(sums)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Inside this context, `add_metric` drops its values."""
        sums, self.sums = self.sums, StageMetrics()
        try:
            yield
        finally:
            self.sums = sums
