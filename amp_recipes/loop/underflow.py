"""Measures now and then which gradients a training in fp16 loses to underflow, and warns of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from amp_recipes import numerics
from amp_recipes.loop.rehearsal import training_trial, weights_kept
from amp_recipes.loop.window import Window

logger = logging.getLogger(__name__)

# From 65536 down to 1, the loss scale needs 16 skipped updates. None of them counts here.
_FIRST, _SECOND = 20, 1000


def next_check(updates: int) -> int:
    """Return the next number of updates at which to measure: 20, 1000, 2000, 4000, and so on."""
    if updates < _FIRST:
        return _FIRST
    due = _SECOND
    while due <= updates:
        due *= 2
    return due


class UnderflowWatch:
    """Repeats a window in fp32 and in fp16 after certain updates, and counts the gradients that only fp16 loses.

    When to measure depends on the number of updates alone, so a resumed run does it at the same places. Weights and
    random generators are restored. In a run of several processes, or without fp16, nothing is measured.
    is_on: whether the run measures; share: the lost share of all gradient elements, if the window at hand was measured.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        low = run.plan.training.dtype is torch.float16
        self.is_on = low and run.settings.measure_underflow and not run.processes.many
        self.share: float | None = None
        self._warned = False
        self._due: float = next_check(0) if self.is_on else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty if nothing is measured."""
        return {"underflow": {"due": self._due, "warned": self._warned}} if self.is_on else {}

    def take_numbers(self, state: Mapping[str, Any]) -> None:
        """Continue from the numbers of a checkpoint; its run may not have measured anything."""
        if self.is_on:
            known = state.get("underflow", {})
            self._due = known.get("due", next_check(state["optimizer_step"]))
            self._warned = known.get("warned", False)

    def on_window(self, window: Window) -> None:
        """Measure if it is time: the weights are still those after this window."""
        self.share = None
        if self._run.totals.optimizer_step < self._due:
            return
        self._due = next_check(self._run.totals.optimizer_step)
        if window.before is None or window.last is None or window.last.scale is None:  # in fp32 after a spike
            return
        where = window.in_pass.where(window.step)
        try:
            self._measure(window, window.last.scale, where)
        except Exception as error:  # a step that cannot be repeated; training goes on
            logger.info("%s: could not measure which gradients fp16 makes zero: %r", where, error)

    def _measure(self, window: Window, scale: float, where: str) -> None:
        run = self._run
        with weights_kept(run):
            count = numerics.FlushCount(training_trial(run, window.before, weights=False), window.before.batches)
            found = count.at(scale)
            if found is None:
                return
            self._note(found)
            if found.is_much and not self._warned:
                self._warned = True
                better = count.better_scale(found)
                if better is not None and better.scale <= run.settings.init_scale:  # it overflowed on other batches
                    better = None
                logger.warning("%s: %s", where, _text(found, better))

    def _note(self, found: numerics.Flushed) -> None:
        self.share = found.share
        summary = self._run.summary
        if summary.underflow is None or found.share > summary.underflow["share"]:
            parameter, of_parameter = found.worst
            summary.underflow = {
                "share": found.share,
                "optimizer_step": self._run.totals.optimizer_step,
                "scale": found.scale,
                "parameter": parameter,
                "parameter_share": of_parameter,
            }


def _text(found: numerics.Flushed, better: numerics.Flushed | None) -> str:
    parameter, share = found.worst
    lost = (
        f"at loss scale {found.scale:g}, fp16 makes {_percent(found.share)} of the nonzero gradients zero (most in "
        f"{parameter}: {100 * share:.3g} %), so these weights hardly learn."
    )
    if better is None:
        return (
            f"{lost} A larger loss scale is no cure, because it overflows or leaves too many of them zero. Use "
            f"--precision bf16, or pin modules with fp32_modules ({parameter.rpartition('.')[0]} first)."
        )
    return (
        f"{lost} At loss scale {better.scale:g} it would be {100 * better.share:.2g} %. Start the run anew with "
        f"--init_scale {better.scale:g}, or use --precision bf16, which needs no loss scale."
    )


def _percent(share: float) -> str:
    """In two digits, but not as 1e+02 %."""
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
