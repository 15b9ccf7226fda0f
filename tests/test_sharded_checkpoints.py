"""Tensors that lie in parts on several processes: saved by all, loaded in any number of them and under any strategy."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from amp_recipes.checkpoint import Checkpointer, best_checkpoint, find_newest, load_weights, make_newest, model_weights
from amp_recipes.ema import WeightAverage
from amp_recipes.errors import CheckpointError
from tests.processes import in_processes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Rows that divide evenly and not (5, 3), fewer rows than ranks (1), tied weights, a 0-d buffer, a frozen part."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embedding = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.few = nn.Linear(6, 1)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.tensor(3.5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)).sum() + self.few(x).square().sum()


def made(seed, strategy):
    """A model of that seed, shared among the processes by a strategy, with an optimizer and averages."""
    torch.manual_seed(seed)
    net = Net()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
    elif strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    elif strategy == "tp+fsdp":
        whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, whole["tensor"], plan)
        mesh = whole["data"]
    if strategy != "ddp":
        ignored = set(net.frozen.parameters())
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh, ignored_params=ignored)
    optimizer = torch.optim.AdamW([it for it in net.parameters() if it.requires_grad], lr=0.01)
    return net, optimizer, WeightAverage(net, 0.9)


def train(net, optimizer, averages, steps=2):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        net(torch.randn(4, 6, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update()


def whole(value):
    """Everything in a state with the tensors whole, gathered by torch itself."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def states(net, optimizer, averages):
    return {name: whole(it.state_dict()) for name, it in named(net, optimizer, averages).items()}


def named(net, optimizer, averages):
    return {"modules": net, "optimizer": optimizer, "ema": averages}


def same(first, second):
    """Whether two states are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def save(rank, folder, strategy, background=False):
    parts = made(0, strategy)
    train(*parts)
    expected = states(*parts)
    checkpointer = Checkpointer(folder, named(*parts))
    if background:
        checkpointer.start_saving({"epoch": 1})
        train(*parts, steps=3)  # what is saved is what was
        checkpointer.wait()
    else:
        checkpointer.save_checkpoint({"epoch": 1})
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    dist.is_initialized() and dist.barrier()


def load(rank, folder, strategy):
    """What a load gives, and whether it trains on as what was saved does."""
    expected = torch.load(folder / "expected.pt")
    found = {}
    for name, steps in (("fresh", 0), ("trained", 1)):
        parts = made(7, strategy)
        train(*parts, steps=steps)
        kinds = {key: type(it) for key, it in parts[0].state_dict().items()}
        Checkpointer(folder, named(*parts)).recover_if_possible()
        assert {key: type(it) for key, it in parts[0].state_dict().items()} == kinds
        found[name] = {key: same(it, expected[key]) for key, it in states(*parts).items()}
        train(*parts, steps=1)
    return found


EQUAL = {name: {"modules": True, "optimizer": True, "ema": True} for name in ("fresh", "trained")}
# From a strategy and a number of processes to others; each is loaded from and into at least twice.
COURSES = [
    ((1, "ddp"), [(2, "fsdp"), (4, "tp+fsdp")]),
    ((2, "ddp"), [(1, "ddp"), (4, "fsdp")]),
    ((2, "fsdp"), [(1, "ddp"), (4, "fsdp"), (2, "ddp")]),
    ((4, "fsdp"), [(2, "fsdp"), (4, "hsdp")]),
    ((4, "hsdp"), [(1, "ddp"), (4, "hsdp"), (2, "tp+fsdp")]),
    ((4, "tp+fsdp"), [(1, "ddp"), (4, "tp+fsdp"), (2, "fsdp")]),
]


@pytest.mark.parametrize(("saved", "loaded"), COURSES, ids=lambda it: str(it[0]) + it[1] if type(it) is tuple else None)
def test_a_load_in_any_number_of_processes_and_strategy_is_equal_bit_for_bit(tmp_path, saved, loaded):
    count, strategy = saved
    in_processes(save, count, tmp_path, strategy, strategy == "fsdp" and count == 2)
    expected = torch.load(tmp_path / "expected.pt")
    read = Checkpointer(tmp_path).read(Checkpointer(tmp_path).find_checkpoint())
    assert all(same(whole(read[name]), expected[name]) for name in ("modules", "ema", "optimizer"))
    assert read["modules"]["head.weight"] is read["modules"]["embedding.weight"]  # tied ones are one tensor again
    for other_count, other in loaded:
        assert in_processes(load, other_count, tmp_path, other) == [EQUAL] * other_count, (other_count, other)
