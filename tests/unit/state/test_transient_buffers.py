"""Buffers outside the state dict come back where training changed them."""

import torch
from torch import nn

from amp_recipes.state.transient_buffers import TransientBuffers


class Net(nn.Module):
    def __init__(self, table: int = 32 * 1024):
        super().__init__()
        self.register_buffer("statistics", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.arange(float(table)), persistent=False)
        self.register_buffer("saved", torch.zeros(2))
        self.shared = self.statistics


def test_small_ones_are_kept_large_ones_once_they_change_persistent_ones_never():
    net = Net()
    buffers = TransientBuffers(nn.ModuleDict({"net": net}))
    assert set(buffers.state_dict()) == {"net.statistics"}
    net.table += 1
    assert set(buffers.state_dict()) == {"net.statistics", "net.table"}


def test_they_come_back_in_place_and_a_grown_one_replaces_the_live_one():
    net, fresh = Net(), Net()
    buffers = TransientBuffers(net)
    net.statistics += 2
    net.table = torch.arange(64 * 1024.0)
    live = fresh.statistics
    TransientBuffers(fresh).load_state_dict(buffers.state_dict())
    assert fresh.statistics is live and torch.equal(live, torch.full((3,), 2.0))
    assert fresh.table.shape == (64 * 1024,) and "table" not in fresh.state_dict()


def test_a_state_that_lacks_one_leaves_it():
    net = Net()
    TransientBuffers(net).load_state_dict({})
    assert torch.equal(net.statistics, torch.zeros(3))


def test_of_a_wrapped_module_they_have_the_plain_names():
    net = nn.ModuleDict({"net": Net()})
    assert "plain.statistics" in TransientBuffers(net, lambda name: name.replace("net", "plain")).state_dict()
