"""Draws what runs have saved. Nothing is imported for it, and nothing drawn, before it is asked to."""

from amp_recipes.commands.report.compare_page import draw_comparison
from amp_recipes.commands.report.diagnosis_page import draw_diagnosis

__all__ = ["draw_comparison", "draw_diagnosis"]
