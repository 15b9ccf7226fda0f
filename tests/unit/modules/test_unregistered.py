"""Layers in lists, dicts, closures and on other objects are found, each under one name; the rest is left alone."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_recipes.modules.unregistered import how_to_register, unregistered


class Net(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.first = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


def names(*attributes, holders=None, **named):
    return list(unregistered(Net(*attributes, **named), holders or {}))


def closure_over(layer):
    return lambda x: layer(x)


def test_lists_dicts_and_tuples_at_some_depth():
    assert names(layers=[nn.Tanh(), (nn.ReLU(), 3)]) == ["layers[0]", "layers[1][0]"]
    assert names(layers={"a": nn.Tanh(), 1: [nn.ReLU()]}) == ["layers['a']", "layers[1][0]"]
    assert names(_layers=[nn.Tanh()]) == ["_layers[0]"]


def test_what_is_inside_is_found_too():
    inner = Net(more=[nn.Tanh()])
    assert names(layers=[inner]) == ["layers[0]", "layers[0].first", "layers[0].more[0]"]


def test_closures_defaults_and_partials():
    assert names(function=closure_over(nn.Tanh())) == ["function.layer"]
    layer = nn.Tanh()
    assert names(function=lambda x, inner=layer: inner(x)) == ["function.default0"]
    assert names(function=partial(closure_over(nn.Tanh()), nn.ReLU())) == ["function.layer", "function[0]"]


def test_parameters_and_what_hangs_on_another_object():
    recipe = SimpleNamespace(adapter=nn.Tanh(), hidden=[nn.Parameter(torch.zeros(1))], step=3)
    assert names(holders={"self": recipe, "nothing": None}) == ["self.adapter", "self.hidden[0]"]


def test_what_is_registered_is_not_given_nor_anything_twice():
    shared = nn.Tanh()
    net = Net(layers=[shared, shared])
    net.known = [net.first, net.first.weight]
    assert list(unregistered(net, {"self": SimpleNamespace(modules=net, again=shared)})) == ["self.again"]


def test_long_lists_are_data_and_empty_cells_are_no_error():
    def function():
        return later

    assert names(table=[nn.Tanh()] * 1001, function=function) == []
    later = None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["encoder.layers[0]", "encoder.layers[1].up"],
            "encoder.layers\\[0\\] and 1 more are not registered.*nn.ModuleList",
        ),
        (["paths['a']"], "paths\\['a'\\] is not registered.*Make paths an nn.ModuleDict"),
        (["self.adapter"], "Add the layer to `modules` of the Brain"),
        (["mix.function.layer"], "Make it an attribute of the module that calls it"),
    ],
)
def test_the_advice_fits_the_place(given, said):
    (advice,) = how_to_register(given)
    assert re.search(said, advice)
