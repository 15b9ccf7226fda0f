"""Tells what autocast does to each op."""
