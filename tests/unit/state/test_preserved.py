"""What is tried is undone: in the same objects, bit for bit."""

from collections import deque

import torch
from torch import nn

from amp_recipes.state.preserved import module_state_kept, preserved

CPU = torch.device("cpu")


class Holder(nn.Module):
    """Holds state of all kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("cache", torch.ones(3))
        self.register_buffer("nothing", None)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.state, self.count, self.recent = torch.zeros(2), 0, deque([1])
        self.table, self.names = {"a": 1}, ["x"]

    def change(self):
        self.cache.add_(1)
        self.nothing = torch.ones(1)
        self.register_buffer("new", torch.ones(1))
        self.state += 1
        self.state = torch.ones(5)
        self.count += 1
        self.recent.append(2)
        self.table["b"] = 2
        self.names.append("y")
        self.extra = torch.ones(1)
        self.train(not self.training)


def check(holder, objects):
    cache, state, recent, table, names = objects
    assert holder.cache is cache and cache.tolist() == [1, 1, 1]
    assert holder.nothing is None and "new" not in holder._buffers
    assert holder.state is state and state.tolist() == [0, 0]
    assert holder.count == 0 and not hasattr(holder, "extra")
    assert holder.recent is recent and list(recent) == [1]
    assert holder.table is table == {"a": 1} and holder.names is names == ["x"]


def objects_of(holder):
    return holder.cache, holder.state, holder.recent, holder.table, holder.names


def test_modules_are_as_they_were():
    holder = Holder()
    objects = objects_of(holder)
    for context in (preserved(holder, [], CPU), module_state_kept(holder)):
        training = holder.training
        with context:
            holder.change()
        check(holder, objects)
        holder.train(training)
    with preserved(holder, [], CPU):
        holder.eval()
    assert holder.training and holder.layer.training


def test_also_after_an_error():
    holder = Holder()
    objects = objects_of(holder)
    try:
        with preserved(holder, [], CPU):
            holder.change()
            raise KeyError
    except KeyError:
        check(holder, objects)


def test_weights_and_optimizers_on_demand():
    holder = Holder()
    optimizer = torch.optim.Adam(holder.parameters(), lr=0.1)
    gradient = torch.ones(2, 2)
    holder.layer.weight.grad = gradient

    def step():
        holder.layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    step()
    holder.layer.weight.grad = gradient
    before = {name: it.clone() for name, it in holder.state_dict().items()}
    moments = {name: it.clone() for name, it in optimizer.state[holder.layer.weight].items()}
    random = torch.get_rng_state()
    with preserved(holder, [optimizer], CPU, weights=True):
        assert holder.layer.weight.grad is None
        torch.rand(3)
        for _ in range(3):
            step()
    assert all(torch.equal(before[name], it) for name, it in holder.state_dict().items())
    assert all(torch.equal(moments[name], it) for name, it in optimizer.state[holder.layer.weight].items())
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert holder.layer.weight.grad is gradient and torch.equal(random, torch.get_rng_state())


def test_a_hidden_state_that_grows_in_place_is_as_it_was():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys = torch.zeros(1, 2)

    growing = Growing()
    keys = growing.keys
    with module_state_kept(growing):
        keys.resize_(4, 2).fill_(1.0)
    assert growing.keys is keys and keys.tolist() == [[0.0, 0.0]]
