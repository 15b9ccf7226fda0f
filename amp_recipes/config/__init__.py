"""YAML and command line in; validated run options and hyperparameters out."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_recipes.config.arguments import Overrides, parse_arguments
    from amp_recipes.config.experiment import create_experiment_directory, ensure_experiment_directory
    from amp_recipes.config.hparams import Hparams, check, load_hparams, seed_everything
    from amp_recipes.config.other_names import unheeded, without_originals
    from amp_recipes.config.run_options import Purpose, RunOptions, near_misses, options_table

__all__ = [
    "Hparams",
    "Overrides",
    "Purpose",
    "RunOptions",
    "check",
    "create_experiment_directory",
    "ensure_experiment_directory",
    "load_hparams",
    "near_misses",
    "options_table",
    "parse_arguments",
    "seed_everything",
    "unheeded",
    "without_originals",
]
# Imported when they are first asked for: torch takes seconds, and `amp-recipes completion` does without.
_HOMES = {
    "arguments": ("Overrides", "parse_arguments"),
    "experiment": ("create_experiment_directory", "ensure_experiment_directory"),
    "hparams": ("Hparams", "check", "load_hparams", "seed_everything"),
    "other_names": ("unheeded", "without_originals"),
    "run_options": ("Purpose", "RunOptions", "near_misses", "options_table"),
}


def __getattr__(name: str) -> Any:
    """One of the names above; all of them are there afterwards."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home, names in _HOMES.items():
        module = importlib.import_module(f"{__name__}.{home}")
        globals().update({public: getattr(module, public) for public in names})
    return globals()[name]
