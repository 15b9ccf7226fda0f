"""Tries steps of a run beside the run: to say what precision does to it, and where a nonfinite value was born."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amp_recipes.ledger import Window
from amp_recipes.precision import Update
from amp_recipes.resumable_run import ResumableRun


class ExaminedRun(ResumableRun):
    """Base of `Brain`: diagnoses the precision, and replays the steps that went nonfinite."""

    def _done_instead(self, train_set: Any, train_loader_kwargs: Mapping[str, Any]) -> bool:
        return False

    def _before_step(self, batches: Sequence[Any]) -> Any:
        return None

    def _cause_of_skip(self, update: Update, window: Window) -> str:
        return ""
