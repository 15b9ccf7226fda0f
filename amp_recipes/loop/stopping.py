"""Tracks the best epoch so far, and decides when to stop training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from amp_recipes.errors import ConfigError, did_you_mean


class MetricWatch:
    """Follows one metric over epochs.

    metric: a name in the metrics of a stage, or "loss"; mode: "min" or "max"; patience: epochs without a new best
    after which `exhausted` turns true (None: never). A NaN is never best.
    """

    def __init__(self, metric: str, mode: str, patience: int | None) -> None:
        self.metric = metric
        self._sign = 1.0 if mode == "max" else -1.0
        self._patience = patience
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._waited = 0

    def observe(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Add one epoch's metrics; raises ConfigError if the metric is not among them."""
        if self.metric not in metrics:
            raise ConfigError(
                f"early_stop_metric '{self.metric}' is not among the metrics of epoch {epoch}: "
                f"{', '.join(metrics) or 'none'}.{did_you_mean(self.metric, metrics)} "
                f"Add it with self.add_metric('{self.metric}', total, count), or return it from on_stage_end."
            )
        value = self._sign * metrics[self.metric]
        best = -math.inf if self.best is None else self._sign * self.best
        if value >= best:  # of equals the newest is best, as for the checkpointer; False for a NaN
            self.best, self.best_epoch = metrics[self.metric], epoch
        self._waited = 0 if value > best else self._waited + 1

    @property
    def exhausted(self) -> bool:
        """Whether `patience` epochs in a row brought no new best."""
        return self._patience is not None and self._waited >= self._patience

    def __str__(self) -> str:
        best = "no value" if self.best is None else f"{self.best:g} in epoch {self.best_epoch}"
        return f"the best {self.metric} is {best}, and {self._waited} epochs have passed without a better one"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.best, self.best_epoch, self._waited = state["best"], state["best_epoch"], state["waited"]
