"""A metric is the ratio of two sums, whatever they were made of."""

import math

import numpy as np
import torch

from amp_recipes.loop.metrics import StageMetrics, ratios


def metric_of(*contributions):
    metrics = StageMetrics()
    for contribution in contributions:
        metrics.add("it", *contribution)
    return ratios(metrics.sums())["it"]


def test_it_is_the_ratio_of_the_sums_and_not_the_mean_of_ratios():
    assert metric_of((1, 2), (9, 10), (0.5, 1)) == 10.5 / 13


def test_without_counts_it_is_the_mean():
    assert metric_of((1,), (2,), (6.0,)) == 3


def test_totals_of_any_kind_are_summed(subtests):
    for kind in (bool, torch.bool, torch.int32, torch.float32, torch.bfloat16, np.float32, np.int64):
        with subtests.test(str(kind)):
            if isinstance(kind, torch.dtype):
                contributions = [(torch.tensor([[1, 0], [1, 1]], dtype=kind), 4), (torch.tensor([0, 1], dtype=kind), 2)]
                assert metric_of(*contributions) == 4 / 6
            else:
                assert metric_of((kind(1), 4), (kind(0), 2)) == 1 / 6


def test_sums_do_not_stand_still_where_float32_would():
    """2**24 + 1 is not a float32; nor is a mean of bf16 values taken in bf16."""
    metrics = StageMetrics()
    metrics.add("it", torch.tensor(2.0**24), 0)
    for _ in range(10):
        metrics.add("it", torch.ones(()), torch.tensor(1))
    assert metrics.sums()["it"] == (2.0**24 + 10, 10, 0)
    assert metric_of((torch.full((1000,), 0.1, dtype=torch.bfloat16), 1000)) == float(torch.tensor(0.1).bfloat16())


def test_what_is_not_finite_is_left_out_with_its_count(subtests):
    for bad in (math.nan, math.inf, torch.tensor([1.0, math.nan]), torch.tensor(-math.inf)):
        with subtests.test(str(bad)):
            assert metric_of((3, 4), (bad, 100), (torch.tensor(1.0), torch.tensor(4))) == 4 / 8
            assert metric_of((3, 4), (100, bad), (torch.tensor(1.0), torch.tensor(4))) == 4 / 8
            assert math.isnan(metric_of((bad, 100)))
            metrics = StageMetrics()
            metrics.add("it", bad, 1)
            metrics.add("it", 1, 1)
            assert metrics.sums()["it"] == (1, 1, 1)


def test_numbers_and_tensors_may_follow_each_other():
    assert metric_of((1, torch.tensor(2)), (torch.tensor([1.0, 1.0]), 1), (3, 3)) == 6 / 6


def test_a_total_keeps_no_graph():
    weights = torch.ones(3, requires_grad=True)
    metrics = StageMetrics()
    metrics.add("it", weights * 2, 3)
    assert not metrics._sums["it"][0].requires_grad


def test_merged_sums_are_those_of_both():
    one, other = StageMetrics(), StageMetrics()
    one.add("a", 1, 2)
    other.add("a", torch.tensor([1.0, 2.0]), 3)
    other.add("b", 5, 1)
    one.merge(other)
    assert one.sums() == {"a": (4, 5, 0), "b": (5, 1, 0)}


def test_a_resumed_sum_has_the_same_bits():
    draws = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    whole = StageMetrics()
    for draw in draws:
        whole.add("it", draw, draw.abs())
    first, second = StageMetrics(), StageMetrics()
    for draw in draws[:17]:
        first.add("it", draw, draw.abs())
    second.load_state_dict(first.state_dict())
    for draw in draws[17:]:
        second.add("it", draw, draw.abs())
    assert second.sums() == whole.sums()
