"""A metric is the ratio of two sums, whatever they were made of."""

import math
import weakref

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes.loop.metrics import StageMetrics, ratios
from amp_recipes.precision.host_copy import HostCopy


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
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kept):
            ctx.kept = kept
            return x * 2

    kept = nn.Identity()
    metrics = StageMetrics()
    metrics.add("it", Doubled.apply(torch.ones(3, requires_grad=True), kept), 3)
    in_the_graph = weakref.ref(kept)
    del kept
    assert in_the_graph() is None and metrics.sums()["it"] == (6, 3, 0)


def sent(*contributions):
    """The sums of contributions that each travelled by itself."""
    host = HostCopy(torch.device("cpu"))
    metrics = StageMetrics()
    for contribution in contributions:
        metrics.add("it", *contribution)
        metrics.send(host)
    return metrics.sums()


def test_sums_that_travelled_have_the_same_bits(host):
    generator = torch.Generator().manual_seed(0)
    draws = [(torch.randn(5, generator=generator), 5) for _ in range(9)]
    draws[3:3] = [(0.1, 1), (torch.tensor([1.0, math.inf]), 2), (1, torch.tensor(3)), (0.2, 7)]
    together = StageMetrics()
    for contribution in draws:
        together.add("it", *contribution)
    assert sent(*draws) == together.sums()


def test_a_contribution_costs_the_device_few_operations():
    class Counts(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += not function.is_view
            return function(*args, **(kwargs or {}))

    right = torch.ones(8, dtype=torch.bool)
    host, metrics = HostCopy(torch.device("cpu")), StageMetrics()
    metrics.add("warm up", right, 8)
    metrics.send(host)
    assert metrics.sums() == {"warm up": (8, 8, 0)}  # so that the memory of its copy is free
    with Counts() as counts:
        metrics.add("accuracy", right, 8)
        metrics.send(host)
    assert counts.operations <= 3  # a sum, a vector of all sums, and its copy to the host


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
