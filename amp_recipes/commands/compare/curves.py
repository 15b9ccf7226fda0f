"""Reduces the logged values of runs to as many points as a picture can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from amp_recipes.commands.compare.outcome import Outcome

CURVE_POINTS = 200  # each the mean over its share of the updates
_ALL_POINTS = 20_000  # of all curves of a kind


def loss_curves(of: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """The training loss of each run, averaged within equal shares of the longest run's updates; None: no loss there."""
    longest = max((len(outcome.losses) for made in of.values() for outcome in made), default=0)
    points = min(longest, _points(of))
    edges = [longest * index // points for index in range(points + 1)] if points else [0]
    return {
        "updates": edges[1:],
        "by_precision": {
            name: [[_mean_between(outcome.losses, *ends) for ends in pairwise(edges)] for outcome in made]
            for name, made in of.items()
        },
    }


def metric_curves(of: Mapping[str, Sequence[Outcome]], place: str, name: str) -> dict[str, Any] | None:
    """The metric of each run after each epoch; None if it is known at the end only."""
    stage = _shown_stage([outcome for made in of.values() for outcome in made], place, name)
    if stage is None:
        return None
    found = {precision: [_by_epoch(outcome, stage, name) for outcome in made] for precision, made in of.items()}
    epochs = _shown_epochs([run for runs in found.values() for run in runs], _points(of))
    return {
        "stage": stage,
        "epochs": epochs,
        "by_precision": {precision: [list(map(run.get, epochs)) for run in runs] for precision, runs in found.items()},
    }


def _by_epoch(outcome: Outcome, stage: str, name: str) -> dict[int | None, float]:
    """The metric of a run by the number of its epoch."""
    epochs = [epoch for epoch in outcome.epochs if epoch.stage == stage and name in epoch.values]
    return {epoch.number: epoch.values[name] for epoch in epochs}


def _shown_stage(outcomes: Sequence[Outcome], place: str, name: str) -> str | None:
    """The stage whose metric is drawn, that of `place` if it was logged there; None if it is known at the end only."""
    stages = {epoch.stage for outcome in outcomes for epoch in outcome.epochs if name in epoch.values} - {"test"}
    return next((stage for stage in (place, "valid", "train") if stage in stages), None)


def _shown_epochs(runs: Sequence[Mapping[int | None, float]], points: int) -> list[int]:
    """About as many of the runs' epochs as there are points, the last one among them."""
    epochs = sorted({number for run in runs for number in run if number is not None})
    every = math.ceil(len(epochs) / points) if epochs else 1
    return epochs[::-every][::-1]


def _mean_between(losses: Sequence[float], first: int, end: int) -> float | None:
    finite = [loss for loss in losses[first:end] if math.isfinite(loss)]
    return float(f"{fmean(finite):.6g}") if finite else None


def _points(of: Mapping[str, Sequence[Outcome]]) -> int:
    """Points of a curve: fewer where there are very many curves, so that the file stays small."""
    return max(2, min(CURVE_POINTS, _ALL_POINTS // sum(map(len, of.values()))))
