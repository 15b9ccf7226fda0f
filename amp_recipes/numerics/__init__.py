"""Measures the effect of a precision on a model, with instruments that watch a step."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.numerics.answers import LossScale
    from amp_recipes.numerics.diagnosis import Diagnosis, Questions, diagnose
    from amp_recipes.numerics.nonfinite import History, locate, read_replay, samples_in, write_report
    from amp_recipes.numerics.pins.unrunnable import Unrunnable, find_unrunnable
    from amp_recipes.numerics.trial import Trial, first_line
    from amp_recipes.numerics.watch.flushed import FlushCount, Flushed

__all__ = [
    "Diagnosis",
    "FlushCount",
    "Flushed",
    "History",
    "LossScale",
    "Questions",
    "Trial",
    "Unrunnable",
    "diagnose",
    "find_unrunnable",
    "first_line",
    "locate",
    "read_replay",
    "samples_in",
    "write_report",
]
# Imported when they are first asked for: a run that stays finite, in fp32, needs none of them.
__getattr__, __dir__ = lazy_names(__name__)
