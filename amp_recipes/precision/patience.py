"""Ends a run whose updates stay nonfinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from amp_recipes.errors import NonfiniteError
from amp_recipes.precision.scaling import Update

logger = logging.getLogger(__name__)


class Patience:
    """Ends a run whose updates stay nonfinite.

    Back-off of the fp16 loss scale does not count: the scale was too high, and falls. Only a replay tells it from a
    fault. Without one, nonfinite gradients above the floor of the scale are taken for back-off, and a nonfinite loss
    with finite gradients is not.
    """

    def __init__(self, limit: int, precision: str, min_scale: float) -> None:
        self.limit = limit
        self._precision = precision
        self._min_scale = min_scale
        self._warned = False
        self._verdict: str | None = None
        self.reset()

    def reset(self) -> None:
        """Restart the count."""
        self._in_a_row = 0
        self._verdict = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._in_a_row = state["in_a_row"]

    def observe(
        self,
        update: Update,
        where: Callable[[], str],
        skipped_in_all: int,
        cause: str = "",
        is_fault: bool | None = None,
    ) -> None:
        """Count `update`.

        where: says which batch it was; cause: where the nonfinite value first appeared, if known; is_fault: False for
        back-off, None where no replay has told.
        """
        if update.taken:
            self._in_a_row = 0
            return
        if is_fault is None:
            is_fault = not self.takes_for_back_off(update)
        if not is_fault:
            return
        if _overflows(update) and update.scale is not None and not self.may_back_off(update):
            self._alarm(where())
        self._in_a_row += 1
        if self._in_a_row >= self.limit:
            self._skip = update, where(), skipped_in_all
            self._verdict = self._message(*self._skip, cause)

    def explain(self, cause: str) -> None:
        """Give the error that `check` would raise the cause of the last skip, where it was found only now."""
        if cause and self._verdict is not None:
            self._verdict = self._message(*self._skip, cause)

    def takes_for_back_off(self, update: Update) -> bool:
        """Whether a skipped update counts as back-off until a replay tells."""
        return _overflows(update) and self.may_back_off(update)

    def may_back_off(self, update: Update) -> bool:
        """Whether a lower loss scale could still make this skipped update finite."""
        return update.scale is not None and update.scale > self._min_scale

    @property
    def in_a_row(self) -> int:
        """The number of latest updates in a row that count."""
        return self._in_a_row

    @property
    def exhausted(self) -> bool:
        """Whether `check` would raise."""
        return self._verdict is not None

    def take_verdict(self) -> NonfiniteError:
        """Return the error that `check` would raise, and restart the count."""
        error = NonfiniteError(self._verdict)
        self.reset()
        return error

    def check(self) -> None:
        """Raise NonfiniteError if `limit` updates in a row were skipped. Apart, so that they can be logged first."""
        if self._verdict is not None:
            raise NonfiniteError(self._verdict)

    def _alarm(self, where: str) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s: the loss scale is at its minimum (%g) and the update still overflows. Gradients (or activations) "
            "are beyond the range of fp16 (65504), so a smaller scale cannot help. Use --precision bf16, or pin the "
            "modules that overflow with fp32_modules.",
            where,
            self._min_scale,
        )

    def _message(self, update: Update, where: str, skipped_in_all: int, cause: str) -> str:
        losses = " and ".join(f"{loss:g}" for loss in update.losses) or "unknown"
        norms = ", ".join(f"{name}: {norm:g}" for name, norm in update.grad_norms.items())
        advice = ["look for NaN or Inf in the data", "lower the learning rate", "lower max_grad_norm"]
        if self._precision != "fp32":
            advice.append("try --precision fp32 (if training works there, pin modules with fp32_modules)")
        return (
            f"{where}: {self._in_a_row} updates in a row were skipped because the loss or a gradient was not finite "
            f"(nonfinite_patience={self.limit}; {skipped_in_all} skipped in all). Last: loss {losses}, gradient "
            f"norm {norms or 'none'}"
            + (f", loss scale {update.scale:g}" if update.scale is not None else "")
            + f", precision {self._precision}. The weights are those of the last good update. "
            + (cause or f"What to try: {'; '.join(advice)}.")
        )


def _overflows(update: Update) -> bool:
    return not all(map(math.isfinite, update.grad_norms.values()))
