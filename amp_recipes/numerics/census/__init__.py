"""Counts the dtypes in which a step computes."""
