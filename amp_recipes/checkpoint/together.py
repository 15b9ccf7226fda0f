"""Keeps the former name of `checkpoint_group` until keeper.py follows."""

from amp_recipes.checkpoint.group import checkpoint_group as together

__all__ = ["together"]
