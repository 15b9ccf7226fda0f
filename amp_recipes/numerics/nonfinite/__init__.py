"""Finds where a NaN or Inf first appeared and why, and repeats that step."""

from amp_recipes.numerics.nonfinite.batch_samples import samples_in
from amp_recipes.numerics.nonfinite.cause import locate
from amp_recipes.numerics.nonfinite.history import History
from amp_recipes.numerics.nonfinite.report import NonfiniteReport, Replay, read_command, read_replay, write_report
from amp_recipes.numerics.nonfinite.trace import NonfiniteTrace

__all__ = [
    "History",
    "NonfiniteReport",
    "NonfiniteTrace",
    "Replay",
    "locate",
    "read_command",
    "read_replay",
    "samples_in",
    "write_report",
]
