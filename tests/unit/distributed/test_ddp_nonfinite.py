"""A loss that is nonfinite on one rank, with finite gradients: all ranks skip, and mostly need no message for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairwise import extended
from processes import in_processes
from torch import nn

from amp_recipes import Brain

WIDTH, BATCHES, BAD = 3, 6, 2


def default(brain: Any, batch: Any) -> torch.Tensor:
    return Brain.fit_batch(brain, batch)


def two_backwards(brain: Any, batch: Any) -> torch.Tensor:
    """The second reaches both modules, as without a search for unused parameters it must."""
    brain.backward(brain.loss(batch, "critic") + brain.loss(batch, "generator"))
    brain.backward(brain.loss(batch, "generator") + brain.loss(batch, "critic", bad=False))
    brain.optimizers_step()
    return batch[2]


def other_module_last(brain: Any, batch: Any) -> torch.Tensor:
    brain.backward(brain.loss(batch, "critic"))
    brain.backward(brain.loss(batch, "generator", bad=False))
    brain.optimizers_step()
    return batch[2]


def step_by_name(brain: Any, batch: Any) -> torch.Tensor:
    for name in ("critic", "generator"):
        brain.backward(brain.loss(batch, name), name)
        brain.optimizers_step(name)
    return batch[2]


def backwards_before_steps(brain: Any, batch: Any) -> torch.Tensor:
    """The first step takes gradients that were averaged before the loss that is not finite was there."""
    brain.backward(brain.loss(batch, "critic", bad=False), "critic")
    brain.backward(brain.loss(batch, "generator"), "generator")
    brain.optimizers_step("critic")
    brain.optimizers_step("generator")
    return batch[2]


def local_at_last(brain: Any, batch: Any) -> torch.Tensor:
    """A window of one backward that averages, and one that leaves gradients for another step."""
    brain.backward(brain.loss(batch, "critic", bad=False), "critic")
    with brain.no_sync():
        brain.backward(brain.loss(batch, "generator"), "generator")
    brain.optimizers_step("critic")
    brain.zero_grad()
    return batch[2]


def whole_numbers_only(brain: Any, batch: Any) -> torch.Tensor:
    """What a recipe does to gradients takes away what came with them."""
    brain.backward(brain.loss(batch, "critic") + brain.loss(batch, "generator"))
    for parameter in brain.modules.parameters():
        if parameter.grad is not None:
            parameter.grad.nan_to_num_()
    brain.optimizers_step()
    return batch[2]


class Adversaries(Brain):
    """Two modules, each with an optimizer of its own; a batch holds what is added to its losses."""

    def loss(self, batch: Any, name: str, bad: bool = True) -> torch.Tensor:
        loss = (self.modules[name](batch[0]) - batch[1]).square().mean()
        return loss + batch[2] if bad else loss

    def init_optimizers(self) -> None:
        make = self.hparams.make_optimizer
        parts = {"critic": [*self.modules.critic.parameters()], "generator": [*self.modules.generator.parameters()]}
        if self.hparams.cut:  # one optimizer has a part of a module, so that gradients are averaged by hand
            parts["generator"].append(parts["critic"].pop(0))
        trained = {name: [each for each in part if each.requires_grad] for name, part in parts.items()}
        self.optimizers_dict = {name: make(part) for name, part in trained.items()}

    def compute_forward(self, batch: Any, stage: Any) -> None:
        return None

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> torch.Tensor:
        return self.loss(batch, "critic") + self.loss(batch, "generator")

    def fit_batch(self, batch: Any) -> torch.Tensor:
        return self.hparams.flow(self, batch)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


# What is changed, and whether the ranks are asked in some updates.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "as it is": ({}, False),
    "accumulating": ({"grad_accumulation_factor": 2}, False),
    "fused": ({"make_optimizer": adamw}, False),
    "bf16": ({"precision": "bf16"}, False),
    "compressed": ({"gradient_compression": "bf16"}, False),
    "static graph": ({"static_graph": True}, False),
    "frozen first parameter": ({"frozen": True}, False),
    "channels last": ({"convolution": True}, False),
    "two backwards": ({"flow": two_backwards}, False),
    "step by name": ({"flow": step_by_name}, False),
    "nan_to_num": ({"flow": whole_numbers_only}, False),
    "fp16": ({"precision": "fp16", "init_scale": 256.0}, True),
    "looking for unused parameters": ({"find_unused_parameters": True}, True),
    "other module last": ({"flow": other_module_last}, True),
    "backwards before steps": ({"flow": backwards_before_steps}, True),
    "local at last": ({"flow": local_at_last}, True),
    "averaged by hand": ({"flow": step_by_name, "cut": True}, True),
    "complex": ({"complex": True}, True),
    "the recipe's own wrapper": ({"wrapped": True}, True),
}


EXTENDED = (
    *("as it is", "fused", "bf16", "compressed", "static graph", "frozen first parameter", "channels last"),
    *("two backwards", "other module last", "local at last", "complex"),
)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs().sum(1, keepdim=True)


def make_modules(kind: dict[str, Any]) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {}
    for name in ("critic", "generator"):
        modules[name] = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
        if kind.get("frozen"):
            modules[name][0].weight.requires_grad_(False)
        if kind.get("convolution"):
            layers = nn.Unflatten(1, (1, 1, WIDTH)), nn.Conv2d(1, 2, (1, 2)), nn.Conv2d(2, 1, 2, padding=(1, 0))
            modules[name] = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2, 1)).to(memory_format=torch.channels_last)
        if kind.get("complex"):
            modules[name] = Complex()
        if kind.get("wrapped"):
            modules[name] = nn.parallel.DistributedDataParallel(modules[name])
    return modules


def train(rank: int, case: str, added: float, of_rank: int, without: bool) -> dict[str, Any]:
    """Six batches of each rank, in one of which `added` is added to the loss on one rank; or without that window."""
    changed = dict(CASES[case][0])
    kind = {name: changed.pop(name, False) for name in ("frozen", "convolution", "complex", "wrapped")}
    hparams = {
        name: changed.pop(name, usual) for name, usual in {"flow": default, "make_optimizer": sgd, "cut": False}.items()
    }
    window = changed.get("grad_accumulation_factor", 1)
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for index in range(BATCHES - rank):  # uneven: the last window is rank 0's
        x = torch.randn(2, WIDTH, generator=generator)
        is_bad = index == BAD and rank == of_rank
        batches.append((x, x.sum(1, keepdim=True), torch.tensor(added if is_bad else 0.0)))
    if without:
        del batches[BAD : BAD + window]
    asked = []
    all_reduce = dist.all_reduce

    def counted(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        asked.append(op == dist.ReduceOp.MAX)
        return all_reduce(tensor, op, *args, **kwargs)

    dist.all_reduce = counted
    brain = Adversaries(
        make_modules(kind), hparams=hparams, run_opts={"device": "cpu", "max_grad_norm": 0.5, **changed}
    )
    brain.fit(range(1), batches, progressbar=False)
    dist.all_reduce = all_reduce
    return {
        "weights": [parameter.tolist() for parameter in brain.modules.parameters()],
        "skipped": brain.skipped_steps,
        "updates": brain.optimizer_step,
        "scale": brain.scaler.get_scale(),
        "asked": sum(asked),
    }


def train_thrice(rank: int, case: str) -> list[dict[str, Any]]:
    return [
        train(rank, case, torch.nan, of_rank=1, without=False),
        train(rank, case, torch.inf, of_rank=0, without=False),
        train(rank, case, 0.0, of_rank=0, without=True),
    ]


@pytest.mark.parametrize("case", [*(each for each in CASES if each not in EXTENDED), *map(extended, EXTENDED)])
def test_a_nonfinite_loss_of_one_rank_skips_its_update_on_all(case):
    first, second = in_processes(train_thrice, 2, case)
    assert first == second
    *skipping, without = first
    for found in skipping:
        assert found["skipped"] > 0 and without["skipped"] == 0
        assert (found["weights"], found["scale"]) == (without["weights"], without["scale"])
        assert (found["asked"] > 0) == CASES[case][1]
