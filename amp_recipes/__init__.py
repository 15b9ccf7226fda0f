"""Training recipes for PyTorch from a YAML file, in the precision that the YAML names."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.brain import Brain, Stage
    from amp_recipes.checkpoint import Checkpointer, EpochCounter
    from amp_recipes.config import RunOptions, create_experiment_directory, load_hparams, parse_arguments
    from amp_recipes.extras import needs_extra
    from amp_recipes.precision import AMPConfig, TorchAutocast, custom_bwd, custom_fwd, fwd_default_precision
    from amp_recipes.trained import load_trained

__version__ = "0.2.0"

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
    "load_trained",
    "needs_extra",
    "parse_arguments",
]
__getattr__, __dir__ = lazy_names(__name__)
