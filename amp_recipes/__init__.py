"""Training recipes for PyTorch from a YAML file, at the precision that it names."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_recipes.brain import Brain, Stage
    from amp_recipes.checkpoint import Checkpointer, EpochCounter
    from amp_recipes.config import RunOptions, create_experiment_directory, load_hparams, parse_arguments
    from amp_recipes.precision import AMPConfig, TorchAutocast, custom_bwd, custom_fwd, fwd_default_precision

__version__ = "0.1.0"

__all__ = [
    "AMPConfig",
    "Brain",
    "Checkpointer",
    "EpochCounter",
    "RunOptions",
    "Stage",
    "TorchAutocast",
    "create_experiment_directory",
    "custom_bwd",
    "custom_fwd",
    "fwd_default_precision",
    "load_hparams",
    "parse_arguments",
]
# Imported when they are first asked for: torch takes seconds, and `amp-recipes completion` does without.
_HOMES = {
    "brain": ("Brain", "Stage"),
    "checkpoint": ("Checkpointer", "EpochCounter"),
    "config": ("RunOptions", "create_experiment_directory", "load_hparams", "parse_arguments"),
    "precision": ("AMPConfig", "TorchAutocast", "custom_bwd", "custom_fwd", "fwd_default_precision"),
}


def __getattr__(name: str) -> Any:
    """One of the names above; all of them are there afterwards. Or a submodule, which is imported."""
    if name in __all__:
        for home, names in _HOMES.items():
            module = importlib.import_module(f"{__name__}.{home}")
            globals().update({public: getattr(module, public) for public in names})
        return globals()[name]
    submodule = f"{__name__}.{name}"
    try:
        return importlib.import_module(submodule)
    except ModuleNotFoundError as error:
        if error.name != submodule:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
