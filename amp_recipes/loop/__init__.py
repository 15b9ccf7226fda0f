"""Runs the training loop."""
