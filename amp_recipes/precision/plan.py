"""Everything that one run decides about precision, made from its options in one place."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
        self.training_ctx = TorchAutocast(device_type=device.type, dtype=self.training.dtype)
        self.evaluation_ctx = TorchAutocast(device_type=device.type, dtype=self.evaluation.dtype)

        self._fp32_ctx = TorchAutocast(device_type=device.type, dtype=torch.float32)
        self.widened = False
        self._context_reported = False
        self._pins = pin_fp32(modules, options.fp32_modules)
        self.pinned = self._pins.names
        self._dead_pins_reported = not self.pinned
        if self.pinned:
            logger.info("pinned to fp32: %s", ", ".join(self.pinned))
        # Also those that a class pins itself, by decorating its forward.
        self.fp32_modules = [*dict.fromkeys([*self.pinned, *decorated_modules(modules)])]
        self.float32_precision = _float32_precision(options.float32_precision, self.pinned, modules)
        set_float32_precision(self.float32_precision)

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

    def widen(self, on: bool) -> TorchAutocast:
        """The context to train in from now on: fp32 where `on`, when losses are not scaled and the scale stays."""
        self.widened = on
        self.scaler.pause(on)
        return self._fp32_ctx if on else self.training_ctx

    def report_missing_context(self) -> None:
        """Warn, once, if training does not run at its precision: nobody has entered `training_ctx`."""
        if self.widened:
            return
        if self.training.dtype != torch.float32 and not self.training_ctx.was_entered and not self._context_reported:
            self._context_reported = True
            logger.warning(
                "precision is %s, but fit_batch computed in fp32: compute the forward and the loss under "
                "`with self.training_ctx:`.",
                self.training.name,
            )

    def report_dead_pins(self) -> None:
        """Warn, once, of pinned modules whose forward has not been called by now."""
        if self._dead_pins_reported:
            return
        self._dead_pins_reported = True
        dead = self._pins.never_called()
        if dead:
            logger.warning(
                "fp32_modules: the forward of these pinned modules was not called, so pinning them does nothing: %s. "
                "Their parent uses the weights directly (as MultiheadAttention does with out_proj): pin the parent.",
                ", ".join(dead),
            )


def _announce(found: Precision) -> None:
    if found.reason:
        logger.info(found.reason)
    if found.warning:
        logger.warning(found.warning)


def _float32_precision(asked: str, pinned: list[str], modules: nn.Module) -> str:
    """What fp32 means in this run: a pin promises ieee, in its backward too, so any pin wins over tf32."""
    pinned = pinned or decorated_modules(modules)
    if asked == "tf32" and pinned:
        logger.warning(
            "float32_precision is ieee in this run, not tf32: modules pinned to fp32 (%s) ask for it.",
            ", ".join(pinned),
        )
        return "ieee"
    return asked
