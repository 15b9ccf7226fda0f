"""Decides everything about a run's precision, from its options, in one place."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from amp_recipes.precision.amp_config import Precision, resolve_precision, set_float32_precision
from amp_recipes.precision.autocast import TorchAutocast
from amp_recipes.precision.patience import Patience
from amp_recipes.precision.pins import decorated_modules, pin_fp32
from amp_recipes.precision.scaling import LossScaler, UpdateOwner
from amp_recipes.precision.sharded_gradients import Ranks

logger = logging.getLogger(__name__)


class PrecisionPlan:
    """The contexts, the scaler, the updates and the pins of a run.

    training_ctx, evaluation_ctx: the contexts of a forward in training, and in evaluation.
    options: has the run options on precision, loss scale and nonfinite values as attributes; modules: pinned in
    place; agree, ranks: see `UpdateOwner`. Warnings about slow or emulated formats are logged here, before training.
    Raises PrecisionError for what the device cannot do, ConfigError for pins that match nothing.
    """

    def __init__(
        self,
        options: Any,
        modules: nn.Module,
        device: torch.device,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.training = resolve_precision(options.precision, device)
        self.evaluation = resolve_precision(options.eval_precision, device)
        for found in dict.fromkeys((self.training, self.evaluation)):
            _announce(found)
        self._low_ctx = TorchAutocast(device_type=device.type, dtype=self.training.dtype)
        self.training_ctx = self._low_ctx
        self.evaluation_ctx = TorchAutocast(device_type=device.type, dtype=self.evaluation.dtype)

        self._fp32_ctx = TorchAutocast(device_type=device.type, dtype=torch.float32)
        self.widened = False
        self._pins = pin_fp32(modules, options.fp32_modules)
        self.pinned = self._pins.names
        if self.pinned:
            logger.info("pinned to fp32: %s", ", ".join(self.pinned))
        self._asked_float32 = options.float32_precision
        self._follow_pins(modules)

        self.scaler = LossScaler(
            device.type,
            min_scale=options.min_scale,
            init_scale=options.init_scale,
            growth_factor=options.growth_factor,
            backoff_factor=options.backoff_factor,
            growth_interval=options.growth_interval,
            enabled=self.training.dtype == torch.float16,
        )
        self.updates = UpdateOwner(modules, self.scaler, device, agree, ranks)
        self.patience = Patience(options.nonfinite_patience, self.training.name, self.scaler.min_scale)

    def resolved_options(self) -> dict[str, str]:
        """The run options on precision, as they are in force on this device."""
        return {
            "precision": self.training.name,
            "eval_precision": self.evaluation.name,
            "float32_precision": self.float32_precision,
        }

    def widen(self, on: bool) -> None:
        """Train in fp32 from now on (`on`), when losses are not scaled and the scale stays; or as before."""
        self.widened = on
        self.scaler.pause(on)
        self.training_ctx = self._fp32_ctx if on else self._low_ctx

    def pin(self, name: str, modules: nn.Module) -> None:
        """Pin one more module to fp32 from now on. name: as in `modules.named_modules()`."""
        self._pins.add(name, modules.get_submodule(name))
        self._follow_pins(modules)

    def unpin(self, name: str, modules: nn.Module) -> None:
        """Take back what `pin` did."""
        self._pins.remove(name)
        self._follow_pins(modules)

    def _follow_pins(self, modules: nn.Module) -> None:
        self.pinned[:] = self._pins.names  # the same list, which the summary of the run holds too
        # Also those that a class pins itself, by decorating its forward.
        self.fp32_modules = [*dict.fromkeys([*self.pinned, *decorated_modules(modules)])]
        self.float32_precision = _float32_precision(self._asked_float32, self.pinned, modules)
        set_float32_precision(self.float32_precision)

    def for_trial(self, updates: UpdateOwner, context: Any) -> PrecisionPlan:
        """A plan to try a step with: these updates, and this context around its forward."""
        plan = copy.copy(self)
        plan.updates, plan.scaler, plan.training_ctx = updates, updates.scaler, context
        plan.patience = Patience(sys.maxsize, self.training.name, self.scaler.min_scale)
        return plan

    def evaluating_in(self, context: Any) -> PrecisionPlan:
        """A plan to try an evaluation with: this context around its forward."""
        plan = copy.copy(self)
        plan.evaluation_ctx = context
        return plan

    def report_missing_context(self) -> None:
        """Warn if training does not run in its precision, because `training_ctx` was not entered."""
        if self.widened:
            return
        if self.training.dtype != torch.float32 and not self._low_ctx.was_entered:
            logger.warning(
                "precision is %s, but fit_batch computed in fp32. Compute the forward and the loss under `with "
                "self.training_ctx:`.",
                self.training.name,
            )

    def report_dead_pins(self, new: Container[str] = ()) -> None:
        """Warn of pinned modules whose forward has not been called by now; new: those that could not be."""
        dead = [name for name in self._pins.never_called() if name not in new]
        if dead:
            logger.warning(
                "fp32_modules: pins on these modules have no effect, because their forward was not called: %s. Their "
                "parent uses the weights directly (as MultiheadAttention does with out_proj): pin the parent.",
                ", ".join(dead),
            )


def _announce(found: Precision) -> None:
    if found.reason:
        logger.info(found.reason)
    if found.warning:
        logger.warning(found.warning)


def _float32_precision(asked: str, pinned: list[str], modules: nn.Module) -> str:
    """Choose `float32_precision`: a pin promises ieee, in its backward too, so any pin overrides tf32."""
    pinned = pinned or decorated_modules(modules)
    if asked == "tf32" and pinned:
        logger.warning(
            "float32_precision is ieee in this run instead of tf32, because some modules are pinned to fp32 (%s).",
            ", ".join(pinned),
        )
        return "ieee"
    return asked
