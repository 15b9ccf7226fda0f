"""Which epoch is best, and when waiting ends."""

import math

import pytest

from amp_recipes.errors import ConfigError
from amp_recipes.loop.stopping import MetricWatch


def watch(values, mode="max", patience=2):
    found = MetricWatch("accuracy", mode, patience)
    for epoch, value in enumerate(values, start=1):
        found.observe({"accuracy": value}, epoch)
    return found


def test_best_by_mode():
    for mode, best in {"max": (0.9, 2), "min": (0.1, 3)}.items():
        found = watch([0.5, 0.9, 0.1], mode)
        assert (found.best, found.best_epoch) == best


def test_nan_is_never_best():
    found = watch([math.nan, 0.5, math.nan])
    assert (found.best, found.best_epoch) == (0.5, 2)
    assert watch([math.nan] * 2).best is None and watch([math.nan] * 2).exhausted


def test_of_equals_the_newest_is_best_and_waiting_goes_on():
    found = watch([0.9, 0.9, 0.9])
    assert found.best_epoch == 3 and found.exhausted


def test_patience_counts_epochs_without_a_better_value():
    for patience, exhausted in {2: True, 3: False, None: False}.items():
        assert watch([0.9, 0.8, 0.7], patience=patience).exhausted is exhausted


def test_state_survives():
    first, second = watch([0.9, 0.8]), watch([])
    second.load_state_dict(first.state_dict())
    second.observe({"accuracy": 0.7}, 3)
    assert second.exhausted and second.best == 0.9


def test_a_metric_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'accuracy' is not among .* epoch 3: loss, error"):
        watch([]).observe({"loss": 1.0, "error": 0.1}, 3)
