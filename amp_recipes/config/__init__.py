"""Turns YAML and command line into validated run options and hyperparameters."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.config.experiment import create_experiment_directory, ensure_experiment_directory
    from amp_recipes.config.hparams import Hparams, check, load_hparams, seed_everything
    from amp_recipes.config.options.arguments import Overrides, parse_arguments
    from amp_recipes.config.options.other_names import ignored_options, without_originals
    from amp_recipes.config.options.run_options import Purpose, RunOptions, near_misses, options_table

__all__ = [
    "Hparams",
    "Overrides",
    "Purpose",
    "RunOptions",
    "check",
    "create_experiment_directory",
    "ensure_experiment_directory",
    "ignored_options",
    "load_hparams",
    "near_misses",
    "options_table",
    "parse_arguments",
    "seed_everything",
    "without_originals",
]
__getattr__, __dir__ = lazy_names(__name__)
