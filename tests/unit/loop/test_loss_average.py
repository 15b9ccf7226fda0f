"""The running average equals the weighted mean of the finite losses."""

import json
import math

import numpy as np
import pytest

from amp_recipes.loop.loss_average import LossAverage


def weighted(average):
    """The move that `Brain.update_average` makes by default."""
    return lambda loss, value: value + (loss - value) * average.weight / average.seen


def added(pairs, average=None):
    average = average or LossAverage()
    for loss, weight in pairs:
        average.add(loss, weight, weighted(average))
    return average


PAIRS = [(2.0, 8), (0.5, 8), (7.25, 3), (1.0, 8), (100.0, 0.25)]


def test_it_is_the_weighted_mean():
    losses, weights = zip(*PAIRS, strict=True)
    average = added(PAIRS)
    assert average.result == pytest.approx(np.average(losses, weights=weights), rel=1e-12)
    assert average.seen == sum(weights)


def test_nonfinite_losses_stay_out_and_are_counted():
    for bad in (math.nan, math.inf, -math.inf):
        average = added([PAIRS[0], (bad, 8), PAIRS[1], (bad, 8)])
        assert average.result == added(PAIRS[:2]).result
        assert (average.nonfinite, average.seen) == (2, 16)


def test_a_batch_of_no_weight_moves_nothing():
    average = added([(3.0, 2), (9.0, 0)])
    assert (average.result, average.seen, average.nonfinite) == (3.0, 2, 0)


def test_move_gets_the_loss_and_the_average_and_sees_the_loss_counted_already():
    average, calls = LossAverage(), []

    def move(loss, value):
        calls.append((loss, value, average.weight, average.seen))
        return loss * 10

    average.add(1.0, 4, move)
    average.add(2.0, 6, move)
    assert calls == [(1.0, 0.0, 4, 4), (2.0, 10.0, 6, 10)]
    assert average.result == 20.0


def test_where_nothing_finite_was_seen_the_result_is_nan_not_0():
    for pairs in ([], [(math.nan, 1)], [(5.0, 0)]):
        assert math.isnan(added(pairs).result)


def test_resumed_anywhere_it_ends_bit_for_bit_as_uninterrupted(subtests):
    pairs = [*PAIRS[:2], (math.nan, 8), *PAIRS[2:]]
    whole = added(pairs)
    for cut in range(len(pairs) + 1):
        with subtests.test(cut):
            resumed = LossAverage()
            resumed.load_state_dict(json.loads(json.dumps(added(pairs[:cut]).state_dict())))
            added(pairs[cut:], resumed)
            assert (resumed.result, resumed.seen, resumed.nonfinite) == (whole.result, whole.seen, whole.nonfinite)
