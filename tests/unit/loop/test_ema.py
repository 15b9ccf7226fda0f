"""The average of weights, and its use in evaluation."""

import pytest
import torch
from torch import nn

from amp_recipes.loop.ema import WeightAverage


def test_moves_by_the_documented_rule():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.75)
    expected = model.weight.detach().clone()
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update()
        expected = 0.75 * expected + 0.25 * value
    torch.testing.assert_close(average.state_dict()["weight"], expected)


def test_modules_hold_the_average_only_within_and_get_their_weights_back_after_an_exception():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    start = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    trained = model.weight.detach().clone()
    with pytest.raises(KeyError), average.applied():
        assert torch.equal(model.weight, start)
        raise KeyError
    assert torch.equal(model.weight, trained) and torch.equal(average.state_dict()["weight"], start)


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert list(WeightAverage(model, 0.5).state_dict()) == ["weight"]


def test_state_survives():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    average = WeightAverage(second, 0.5)
    average.load_state_dict(WeightAverage(first, 0.5).state_dict())
    with average.applied():
        assert torch.equal(second.weight, first.weight)
