"""What is computed again in the backward changes nothing but memory."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_recipes import distributed
from amp_recipes.distributed.recomputing import recompute
from amp_recipes.errors import ConfigError
from amp_recipes.precision.pins import pin_fp32, pinned_modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x, *, times=1.0):
        self.calls += 1
        return x + self.dropout(self.norm(self.linear(x))) * times


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, times=0.5)
        return x


def modules_of(pins=()):
    torch.manual_seed(0)
    modules = nn.ModuleDict({"model": Stack()})
    pin_fp32(modules, list(pins))
    return modules


def gradients(modules, dtype):
    torch.manual_seed(1)
    x = torch.randn(5, 4)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = modules["model"](x).float().square().sum()
        loss.backward()
    return [it.grad for it in modules.parameters()], [it.clone() for it in modules.buffers()]


def test_gradients_and_statistics_are_the_same_bits(subtests):
    """Through dropout (random numbers), BatchNorm (buffers that a forward changes), pins and autocast."""
    dtypes, all_pins = [torch.float32, torch.bfloat16, torch.float16], [[], ["model.blocks.1"], ["*.norm"]]
    for dtype, pins in product(dtypes, all_pins):
        with subtests.test(f"{dtype} {pins}"):
            plain, again = modules_of(pins), modules_of(pins)
            recompute(again, ["blocks"])
            names = [name for name, _ in again.named_modules()]
            assert names == [name for name, _ in plain.named_modules()]
            assert pinned_modules(again) == pinned_modules(plain)
            for here, there in zip(gradients(plain, dtype), gradients(again, dtype), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
            assert [block.calls for block in plain["model"].blocks] == [2, 2, 2]
            assert [block.calls for block in again["model"].blocks] == [4, 4, 4]


def numbers_kept(modules):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: sizes.append(it.numel()) or it, lambda it: it):
        modules["model"](torch.ones(5, 4))
    return sum(sizes)


def test_only_inputs_of_blocks_are_kept():
    kept = {}
    for again in (False, True):
        modules = modules_of()
        if again:
            recompute(modules, ["model.blocks.*.linear", "blocks"])
        kept[again] = numbers_kept(modules)
    assert kept[True] == 3 * 20 < kept[False] / 3  # each block's input, of 5 x 4 numbers


def test_an_evaluation_computes_once_and_a_second_call_changes_nothing():
    modules = modules_of()
    for _ in range(2):
        recompute(modules, ["type:Block"])
    with torch.no_grad():
        modules["model"](torch.ones(5, 4))
    assert [block.calls for block in modules["model"].blocks] == [1, 1, 1]
    gradients(modules, torch.float32)
    assert [block.calls for block in modules["model"].blocks] == [5, 5, 5]


def test_one_process_recomputes_too():
    modules = modules_of()
    options = SimpleNamespace(activation_checkpointing=["blocks"], strategy="ddp", tensor_parallel=1)
    distributed.wrap(modules, torch.device("cpu"), options)
    gradients(modules, torch.float32)
    assert [block.calls for block in modules["model"].blocks] == [4, 4, 4]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["model.block.0"],
            r"activation_checkpointing: 'model.block.0' matches no module. Did you mean model.blocks.0",
        ),
        (["type:Bloc"], "Did you mean type:Block"),
        ("blocks", r"is the string 'blocks'; expected a list of patterns: \['blocks'\]"),
    ],
)
def test_patterns_that_match_nothing_are_refused(patterns, message):
    with pytest.raises(ConfigError, match=message):
        recompute(modules_of(), patterns)


def test_no_repeated_blocks_are_refused():
    with pytest.raises(ConfigError, match="no repeated blocks"):
        recompute(nn.ModuleDict({"model": nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))}), ["blocks"])
