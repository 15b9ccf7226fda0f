"""Gradients that wait for their update are part of a checkpoint."""

import torch
from torch import nn

from amp_recipes.state.outstanding_gradients import OutstandingGradients


def made():
    torch.manual_seed(0)
    modules, apart = nn.ModuleDict({"net": nn.Linear(2, 1)}), nn.Parameter(torch.ones(2))
    optimizers = {"one": torch.optim.SGD([*modules.parameters(), apart], 0.1)}
    return modules, apart, OutstandingGradients(modules, lambda: optimizers, str)


def test_they_come_back_also_of_a_parameter_that_is_in_no_module():
    modules, apart, gradients = made()
    (modules.net(torch.ones(1, 2)).sum() * apart.sum()).backward()
    saved = {name: value.clone() for name, value in gradients.state_dict().items()}
    assert set(saved) == {"net.weight", "net.bias", "one[2]"}
    other, other_apart, fresh = made()
    fresh.load_state_dict(saved)
    assert torch.equal(other.net.weight.grad, modules.net.weight.grad) and torch.equal(other_apart.grad, apart.grad)


def test_none_are_saved_where_there_are_none_and_a_load_clears_what_is_there():
    modules, _, gradients = made()
    assert gradients.state_dict() == {}
    modules.net(torch.ones(1, 2)).sum().backward()
    gradients.load_state_dict({})
    assert modules.net.weight.grad is None
