"""What the steps of gpu.py train: networks, their batches, a Brain and the loop that one would write by hand.

Legend of shapes: B batch, T tokens, D features, C channels, K classes, V vocabulary.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _gpu_results import DTYPES, pinned, use_recipe
from torch import nn

from amp_recipes import Brain, Stage

use_recipe("language_modeling")
from model import Transformer  # noqa: E402

Batch = tuple[torch.Tensor, torch.Tensor]
MAX_GRAD_NORM = 5.0  # Brain's default
INIT_SCALE = 1024.0
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "unfused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=False, foreach=True),
}


@dataclass(frozen=True)
class Network:
    """A network and its data: `model` makes it, `batch` draws inputs and targets."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def make(self, device: torch.device) -> nn.Module:
        """The network on the device, with the same weights at each call."""
        torch.manual_seed(0)
        return self.model().to(device)

    def batches(self, count: int, device: torch.device, seed: int = 0) -> list[Batch]:
        """Batches on the host, where the device can fetch them by itself."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [self.batch(generator) for _ in range(count)]
        return [(pinned(inputs, device), pinned(targets, device)) for inputs, targets in drawn]


class Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut, as in ResNet-18; with stride 2 the image halves."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride=stride, bias=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) to (B, out, H / stride, W / stride)."""
        return (self.inside(x_BCHW) + self.shortcut(x_BCHW)).relu()


class Mean(nn.Module):
    """The mean over the image: average pooling, whose backward CUDA has in no deterministic form."""

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) to (B, C)."""
        return x_BCHW.mean((2, 3))


def mlp(width: int, batch: int, depth: int = 2) -> Network:
    """Layers with BatchNorm: buffers that an update which is skipped must put back."""

    def model() -> nn.Module:
        layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def draw(generator: torch.Generator) -> Batch:
        inputs_BD = torch.randn(batch, width, generator=generator)
        return inputs_BD, inputs_BD[:, :10].argmax(1)

    return Network("MLP", model, draw)


def convolutions(width: int, blocks: int, image: int, batch: int) -> Network:
    """A residual network of four stages."""

    def model() -> nn.Module:
        stages, channels = [], width
        for stage in range(4):
            for block in range(blocks):
                out = width * 2**stage
                stages.append(Residual(channels, out, 2 if stage > 0 and block == 0 else 1))
                channels = out
        stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        return nn.Sequential(stem, *stages, Mean(), nn.Linear(channels, 10))

    def draw(generator: torch.Generator) -> Batch:
        inputs_BCHW = torch.randn(batch, 3, image, image, generator=generator)
        return inputs_BCHW, torch.randint(0, 10, (batch,), generator=generator)

    return Network("convolutions", model, draw)


def language_model(
    layers: int, features: int, vocabulary: int, window: int, batch: int, dropout: float = 0.0
) -> Network:
    """The recipe's transformer; GPT-2 small's size, 124 M parameters, is 12 layers of 768 features."""

    def model() -> nn.Module:
        return Transformer(vocabulary, window, layers, features, max(2, features // 64), dropout=dropout)

    def draw(generator: torch.Generator) -> Batch:
        # Each token is one of the four that follow the one before: something to learn.
        tokens_BT = torch.randint(0, 4, (batch, window + 1), generator=generator).cumsum(1) % vocabulary
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    return Network("language model", model, draw)


def language_model_124m(small: bool) -> Network:
    """The one of `configs/language_modeling_124m.yaml`, with its batch; or a tiny one."""
    if small:
        return language_model(1, 64, 256, 32, 2)
    return language_model(12, 768, 50304, 1024, 16)


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy in fp32, which CUDA's autocast would take in bf16."""
    return nn.functional.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


class Trainer(Brain):
    """Trains any of the networks."""

    def compute_forward(self, batch: Batch, stage: Stage) -> torch.Tensor:
        """The scores."""
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions: torch.Tensor, batch: Batch, stage: Stage) -> torch.Tensor:
        """The loss of the scores."""
        return loss_of(predictions, batch[1])


def make_brain(
    model: nn.Module,
    device: torch.device,
    precision: str,
    optimizer: str = "fused",
    kind: type[Trainer] = Trainer,
    hparams: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A Brain with its default options, but for these."""
    own = {"device": str(device), "precision": precision, "init_scale": INIT_SCALE, "noprogressbar": True}
    return kind({"model": model}, OPTIMIZERS[optimizer], hparams, {**own, **options})


def scratch_folder() -> str:
    """A folder for what a run writes, until the process ends."""
    folder = tempfile.mkdtemp(prefix="amp_recipes_gpu_step")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@dataclass
class HandLoop:
    """The loop that a careful user writes with torch alone."""

    model: nn.Module
    device: torch.device
    precision: str
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        enabled = self.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=INIT_SCALE, enabled=enabled)

    def fit(self, batches: Iterable[Batch]) -> torch.Tensor:
        """Go once over the batches; returns the sum of the losses (0-d, on the device)."""
        self.model.train()
        total = torch.zeros((), device=self.device)
        for batch in batches:
            inputs, targets = (each.to(self.device, non_blocking=True) for each in batch)
            with torch.autocast(self.device.type, DTYPES[self.precision], enabled=self.precision != "fp32"):
                loss = loss_of(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        return total


def by_hand(model: nn.Module, device: torch.device, precision: str, optimizer: str = "fused") -> HandLoop:
    """The loop over a network, with the optimizer that a Brain would have."""
    return HandLoop(model, device, precision, OPTIMIZERS[optimizer](model.parameters()))


def bits_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, on the host."""
    return [tensor.detach().cpu().clone() for tensor in model.state_dict().values()]


def same_bits(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether all of them are equal, bit for bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))
