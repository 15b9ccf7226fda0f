"""Trains a recipe at every point of a sweep."""
