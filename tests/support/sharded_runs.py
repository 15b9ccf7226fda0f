"""A small model and a recipe of it, trained sharded, and by hand in one process over the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from amp_recipes import Brain
from amp_recipes.precision.pins import pin_fp32

WIDTH, SYMBOLS = 6, 11


class Block(nn.Module):
    """The branch of a transformer's block that has a norm and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Predicts each symbol from itself; the head's weight is the embedding's where `tied`."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))  # fewer rows than ranks
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Symbols(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return loss_of(predictions, batch)


def loss_of(predictions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(predictions.flatten(0, 1).float(), batch.flatten().roll(1))


def batches_of(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, SYMBOLS, (2, 5), generator=generator) for _ in range(count)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def model_of(seed: int, tied: bool = False) -> Net:
    torch.manual_seed(seed)
    return Net(tied)


def train_sharded(
    rank: int,
    options: dict[str, Any],
    batches: int,
    optimizer: Callable = adamw,
    hparams: dict[str, Any] | None = None,
    tied: bool = False,
    recipe: type[Brain] = Symbols,
    data_rank: int | None = None,
) -> Brain:
    """A fit of one epoch under fsdp; only the first process has the initial weights of `by_hand`."""
    brain = recipe(
        {"model": model_of(rank, tied)}, optimizer, hparams, {"device": "cpu", "strategy": "fsdp", **options}
    )
    data = batches_of(rank if data_rank is None else data_rank, batches)
    brain.fit(range(1), data, progressbar=False)
    return brain


def whole(modules: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, put together from all processes."""
    named = ((name, it.detach()) for name, it in modules.named_parameters())
    return {name: (it.full_tensor() if hasattr(it, "full_tensor") else it).clone() for name, it in named}


def by_hand(
    ranks: int,
    batches: int,
    accumulation: int = 1,
    max_grad_norm: float = 5.0,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    pins: Sequence[str] = (),
    optimizer: Callable = adamw,
    tied: bool = False,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain torch in one process: the parameters after an epoch over the micro-batches of all ranks, and the norms."""
    modules = nn.ModuleDict({"model": model_of(0, tied)})
    pin_fp32(modules, list(pins))
    stepper = optimizer(modules.parameters())
    data = [batches_of(rank, batches) for rank in range(ranks)]
    norms = []
    for start in range(0, batches, accumulation):
        for of_rank in data:
            for batch in of_rank[start : start + accumulation]:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    loss = loss_of(modules["model"](batch), batch)
                (loss / accumulation * scale).backward()
        for parameter in modules.parameters():
            parameter.grad /= scale * ranks
        norms.append(nn.utils.clip_grad_norm_(modules.parameters(), max_grad_norm).item())
        stepper.step()
        stepper.zero_grad()
    return whole(modules), norms


def furthest(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """The largest |found - expected| of any parameter, over the parameter's norm."""
    assert found.keys() == expected.keys()
    return max(
        ((torch.as_tensor(found[name]) - expected[name]).norm() / expected[name].norm()).item() for name in expected
    )
