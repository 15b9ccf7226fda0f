"""`amp-recipes compare`: trains a recipe at each precision and several seeds, and says whether one is worse."""

from amp_recipes.compare.command import add_arguments, run

__all__ = ["add_arguments", "run"]
