"""Handles dtypes in training: no other room does."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.precision.amp_config import (
        AMPConfig,
        Precision,
        device_capabilities,
        fp16_parameters,
        resolve_precision,
        set_float32_precision,
    )
    from amp_recipes.precision.autocast import (
        TorchAutocast,
        custom_bwd,
        custom_fwd,
        fwd_default_precision,
        has_default_precision,
        map_tensors,
    )
    from amp_recipes.precision.optimizers import check_optimizers
    from amp_recipes.precision.patience import Patience
    from amp_recipes.precision.pins import Pins, decorated_modules, pin_fp32, pinned_modules, pinned_only
    from amp_recipes.precision.plan import PrecisionPlan
    from amp_recipes.precision.scaling import LossScaler, PendingUpdate, Update, UpdateOwner, as_scalar, clear_gradients

__all__ = [
    "AMPConfig",
    "LossScaler",
    "Patience",
    "PendingUpdate",
    "Pins",
    "Precision",
    "PrecisionPlan",
    "TorchAutocast",
    "Update",
    "UpdateOwner",
    "as_scalar",
    "check_optimizers",
    "clear_gradients",
    "custom_bwd",
    "custom_fwd",
    "decorated_modules",
    "device_capabilities",
    "fp16_parameters",
    "fwd_default_precision",
    "has_default_precision",
    "map_tensors",
    "pin_fp32",
    "pinned_modules",
    "pinned_only",
    "resolve_precision",
    "set_float32_precision",
]
__getattr__, __dir__ = lazy_names(__name__)
