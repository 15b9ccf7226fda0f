"""Pins the module in which a precision fault was proven, and lets the run go on."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_recipes import numerics
from amp_recipes.errors import AmpRecipesError, ConfigError
from amp_recipes.precision import pinned_modules

logger = logging.getLogger(__name__)


class Pinning:
    """The pins that the run takes by itself, as the option `on_nonfinite` asks.

    A pin is taken from where the run is: the skipped update has left weights, optimizers and buffers as they were
    after the last good one, so nothing is loaded. It is proven first: with the module pinned, the same step is finite.
    Whether it is depends on the training state alone, and the pins go into checkpoints. So a resumed run takes the same
    ones. A host that runs ahead of its device waits for each update, so that a pin holds from the very next one.

    pins: those taken so far, each with `module`, `step` (as in the name of its report), `op` and `line`.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._enabled = run.settings.on_nonfinite == "pin" and run.task.trains and not run.settings.test_only
        self._here: set[str] = set()  # pinned by this object
        self.pins: list[dict[str, Any]] = []
        if self._enabled:
            _check(run)

    def after_window(self) -> None:
        """Between two updates: wait for the last one's result."""
        if self._enabled:
            self._run.pending.settle()

    def proven(self, report: Any, trial: numerics.Trial, batches: Sequence[Any], scale: float) -> dict[str, Any] | None:
        """Return the pin that makes the reported step finite; None if there is none, or no pin may be taken.

        scale: the loss scale of the run. The step must be finite there, or at a lower one that back-off leads to.
        """
        if not self._enabled or report.cause != "precision" or len(self.pins) >= self._run.settings.pin_limit:
            return None
        if not self._can_be_pinned(report.module):
            return None
        pins = [*pinned_modules(trial.modules), report.module]
        outcome = trial.run_finite(batches, report.precision, scale, pins)
        if not (outcome.is_finite and math.isfinite(outcome.gradient_norm)):
            return None
        return {"module": report.module, "step": report.step, "op": report.op, "line": report.line}

    def _can_be_pinned(self, name: str | None) -> bool:
        """Whether it is the name of a module that is not pinned yet; code outside of modules has none."""
        if not name:
            return False
        module = dict(self._run.modules.named_modules()).get(name)
        return not (module is None or isinstance(module, torch.jit.ScriptModule) or name in self._run.plan.pinned)

    def take(self, pin: dict[str, Any], where: str) -> None:
        """Pin a module from now on, write it into the settings of the run, and say so."""
        run, module = self._run, pin["module"]
        self._set([*self.pins, pin])
        line = json.dumps(self._modules())
        logger.warning(
            "%s: %s is pinned to fp32 from now on (on_nonfinite: pin). In %s, %s is not finite%s. With the pin, the "
            "same step is finite. Training continues after the last good update. To have the pin from the start, add "
            "to your YAML: fp32_modules: %s%s",
            *(where, module, run.plan.training.name, pin["op"], f" at {pin['line']}" if pin["line"] else "", line),
            f". pin_limit ({run.settings.pin_limit}) is reached" if len(self.pins) >= run.settings.pin_limit else "",
        )

    def numbers(self) -> dict[str, Any]:
        """The pins, for a checkpoint."""
        return {"pins": self.pins} if self.pins else {}

    def take_numbers(self, state: Mapping[str, Any]) -> None:
        """Pin what was pinned when the state was saved, and nothing else that a run pins by itself."""
        pins = [dict(pin) for pin in state.get("pins", [])]
        if pins == self.pins:
            return
        try:
            self._set(pins)
        except (AttributeError, AmpRecipesError) as error:  # other modules: loading their weights will say so
            logger.warning("could not pin the modules that the run had pinned by itself: %s", error)

    def _set(self, pins: list[dict[str, Any]]) -> None:
        run = self._run
        wanted = [pin["module"] for pin in pins]
        for name in self._here.difference(wanted):
            run.plan.unpin(name, run.modules)
        new = [name for name in wanted if name not in run.plan.pinned]
        for name in new:
            run.plan.pin(name, run.modules)
        self._here = self._here.intersection(wanted) | {*new}
        self.pins = pins
        run.summary.float32_precision = run.plan.float32_precision
        if self._enabled:
            run.summary.pinned = pins
            run.write_pins(self._modules(), pins)

    def _modules(self) -> list[str]:
        """The value of `fp32_modules` that has the run's own pins, too."""
        return [*dict.fromkeys([*self._run.settings.fp32_modules, *(pin["module"] for pin in self.pins)])]


def _check(run: Any) -> None:
    """Raise ConfigError if the run cannot pin modules by itself."""
    if run.processes.many or run.shards:
        raise ConfigError(
            "on_nonfinite is pin, which works in one process: several would each have to prove the pin, and fsdp "
            "shares pinned modules in its own way from the start. Set on_nonfinite: off; the report of a nonfinite "
            "step in one process names the module to add to fp32_modules."
        )
    if not run.settings.locate_nonfinite:
        raise ConfigError(
            "on_nonfinite is pin, which needs the module that a nonfinite step began in, but locate_nonfinite is "
            "false. Set locate_nonfinite: true, or on_nonfinite: off."
        )
    if run.plan.training.dtype == torch.float32:
        raise ConfigError(
            f"on_nonfinite is pin, but precision {run.recipe.run_opts.precision} is fp32 already on this device, so "
            "there is nothing to pin. Set on_nonfinite: off, or train in bf16 or fp16."
        )
