"""An epoch counter goes on after the epoch that was saved."""

import pytest

from amp_recipes.checkpoint import EpochCounter
from amp_recipes.errors import CheckpointError, ConfigError


def resumed(state, limit):
    counter = EpochCounter(limit)
    counter.load_state_dict(state)
    return counter


def test_counts_from_1_to_limit_and_knows_the_running_epoch():
    counter = EpochCounter(3)
    assert counter.current == 0
    assert [(epoch, counter.current) for epoch in counter] == [(1, 1), (2, 2), (3, 3)]
    assert list(counter) == []


def test_limit_0_is_no_epoch():
    assert list(EpochCounter(0)) == []


def test_saved_at_the_end_of_epoch_2_it_resumes_at_3():
    counter = EpochCounter(4)
    epochs = iter(counter)
    next(epochs), next(epochs)
    assert counter.state_dict() == {"current": 2}
    assert list(resumed(counter.state_dict(), 4)) == [3, 4]


def test_a_raised_limit_continues_and_a_lowered_one_yields_nothing():
    assert list(resumed({"current": 3}, 5)) == [4, 5]
    assert list(resumed({"current": 3}, 2)) == []


def test_a_limit_that_is_no_count_is_refused():
    for limit in (-1, 2.0, "3", True, None):
        with pytest.raises(ConfigError, match=r"limit is .*expected an integer"):
            EpochCounter(limit)


def test_a_state_of_something_else_is_refused_and_changes_nothing():
    for state in ({}, {"current": -1}, {"current": "2"}):
        counter = EpochCounter(2)
        with pytest.raises(CheckpointError, match="saved state"):
            counter.load_state_dict(state)
        assert list(counter) == [1, 2]
