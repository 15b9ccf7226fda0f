"""Trains a recipe at each precision and several seeds, and says whether one is worse (`amp-recipes compare`)."""
