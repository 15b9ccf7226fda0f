"""Small networks and their data, made from seeds: what the benchmarks on numerics train and examine.

Legend: B batch, T time, D width, V vocabulary, P points of a plate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """What is learned.

    make: a new model, drawn from torch's global generator; objective: `objective(model, batch)`, the loss (0-d, fp32);
    draw: a batch, drawn from a generator; spread: what a held-out loss is divided by, to be read (1: as it is).
    """

    make: Callable[[], nn.Module]
    objective: Callable[[nn.Module, Any], torch.Tensor]
    draw: Callable[[torch.Generator], Batch]
    spread: float = 1.0


# ---------------------------------------------------------------------- a steel plate

SIDE = 24  # points along each side of the plate
# A square of steel of 1 m and 5 mm: E h^3 / (12 (1 - nu^2)), in N m.
STIFFNESS = 210e9 * 0.005**3 / (12 * (1 - 0.3**2))
MODES = 8  # of the series, in each direction


def deflection(loads: torch.Tensor, bed: float) -> torch.Tensor:
    """Deflections (B, P) in metres of a simply supported plate under point loads: Navier's series.

    loads: (B, 3), place x and y in metres and force in newton; bed: stiffness of an elastic bed under the plate in
    N/m^3 (0: none). Timoshenko and Woinowsky-Krieger, Theory of Plates and Shells, chapters 5 and 8.
    """
    waves = torch.arange(1, MODES + 1) * math.pi
    points = (torch.arange(SIDE) + 0.5) / SIDE
    shapes_MP = torch.sin(waves[:, None] * points)
    at_x, at_y = torch.sin(waves * loads[:, 0:1]), torch.sin(waves * loads[:, 1:2])
    resistance = STIFFNESS * (waves[:, None] ** 2 + waves**2) ** 2 + bed
    amplitudes = 4 * loads[:, 2, None, None] * at_x[:, :, None] * at_y[:, None, :] / resistance
    return torch.einsum("bmn,mx,ny->bxy", amplitudes, shapes_MP, shapes_MP).flatten(1)


def plate(unit: float, bed: float = 0.0, width: int = 32, batch: int = 64) -> Task:
    """Predict the deflection of a plate at all its points from one point load of 100 to 500 N.

    unit: how many of the target's units a metre has (1: metres, 1000: millimetres).
    """

    def make() -> nn.Module:
        model = nn.Sequential(
            nn.Linear(3, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, SIDE * SIDE)
        )
        nn.init.zeros_(model[-1].weight)  # a head that starts at zero, as regressions have
        nn.init.zeros_(model[-1].bias)
        return model

    def draw(generator: torch.Generator) -> Batch:
        place_and_force = torch.rand(batch, 3, generator=generator)
        loads = torch.tensor([0.1, 0.1, 100.0]) + torch.tensor([0.8, 0.8, 400.0]) * place_and_force
        return 2 * place_and_force - 1, deflection(loads, bed) * unit

    def objective(model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs).float(), targets)

    variance = draw(torch.Generator().manual_seed(0))[1].var()
    return Task(make, objective, draw, spread=float(variance))


# ---------------------------------------------------------------------- a small language model


class Block(nn.Module):
    """A transformer block that normalises before attention and before the feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor, mask_TT: torch.Tensor) -> torch.Tensor:
        """`mask_TT` is true where a position may not look."""
        y = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.attention(y, y, y, attn_mask=mask_TT, need_weights=False, is_causal=True)[0]
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class LanguageModel(nn.Module):
    """Logits (B, T, V) of the next character."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask_TT", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, characters_BT: torch.Tensor) -> torch.Tensor:
        """`characters_BT` has the full length."""
        x_BTD = self.embedding(characters_BT) + self.position
        for block in self.blocks:
            x_BTD = block(x_BTD, self.mask_TT)
        return self.head(self.norm(x_BTD))


VOCABULARY = 27  # a space and 26 letters


def text(dialect: int, characters: int = 60_000) -> torch.Tensor:
    """A text of 150 made-up words, each followed by one of four; the dialects share the words, not who follows whom."""
    generator = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    words = [[pick(1, VOCABULARY) for _ in range(pick(2, 7))] + [0] for _ in range(150)]
    generator.manual_seed(1 + dialect)
    followers = torch.randint(len(words), (len(words), 4), generator=generator).tolist()
    written: list[int] = []
    word = 0
    while len(written) < characters:
        written += words[word]
        word = followers[word][pick(0, 4)]
    return torch.tensor(written[:characters])


def language(
    dialect: int,
    width: int = 32,
    layers: int = 2,
    length: int = 32,
    batch: int = 16,
    make: Callable[[], nn.Module] | None = None,
) -> Task:
    """Predict the next character of a made-up text. make: default, a transformer of that width and depth."""
    characters = text(dialect)

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(characters) - length - 1, (batch, 1), generator=generator)
        at = starts + torch.arange(length)
        return characters[at], characters[at + 1]

    def objective(model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())

    return Task(make or (lambda: LanguageModel(VOCABULARY, width, 2, layers, length)), objective, draw)


class RecurrentLayer(nn.Module):
    """Adds what an LSTM and a layer behind it make of the normalised input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.back = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        return x_BTD + self.back(nn.functional.gelu(self.lstm(self.norm(x_BTD))[0]))


class RecurrentModel(nn.Module):
    """The same by LSTMs."""

    def __init__(self, vocabulary: int, width: int, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.inward = nn.Linear(width, width)
        self.layers = nn.Sequential(*(RecurrentLayer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of the next character."""
        return self.head(self.norm(self.layers(self.inward(self.embedding(characters_BT)))))


# ---------------------------------------------------------------------- small images

CLASSES = 8


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and a path around them."""

    def __init__(self, channels: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels_out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels_out)
        self.conv_2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels_out)
        self.around = nn.Conv2d(channels, channels_out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, channels, height, width)."""
        y = nn.functional.relu(self.norm_1(self.conv_1(x)))
        return nn.functional.relu(self.norm_2(self.conv_2(y)) + self.around(x))


class ConvNet(nn.Module):
    """A small residual network; logits (B, CLASSES)."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(
            ResidualBlock(channels, channels, 1),
            ResidualBlock(channels, 2 * channels, 2),
            ResidualBlock(2 * channels, 4 * channels, 2),
        )
        self.head = nn.Linear(4 * channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, 1, 16, 16)."""
        return self.head(self.blocks(nn.functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


class PatchTransformer(nn.Module):
    """torch's own encoder layers over 16 patches; logits (B, CLASSES)."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, 1, 16, 16)."""
        x_BTD = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD).mean(1))


class ResidualLayer(nn.Module):
    """Adds what `inner` makes of the normalised input."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = inner

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """(B, D) to (B, D)."""
        return x_BD + self.inner(self.norm(x_BD))


def feed_forward(width: int) -> nn.Module:
    """A layer to twice the width and one back."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def residual_mlp(width: int = 48, layers: int = 6) -> nn.Module:
    """Residual layers over the pixels of an image; logits (B, CLASSES)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, width),
        *(ResidualLayer(width, feed_forward(width)) for _ in range(layers)),
        nn.Linear(width, CLASSES),
    )


class Cancelling(nn.Module):
    """A fault: a large common offset that a matrix product takes away again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.linear.weight.data = torch.eye(width) - 1 / width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, D) to (B, D)."""
        return self.linear(x + 300)


class Large(nn.Module):
    """A fault: hidden values `factor` times as large as they need to be."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.up.weight.data *= factor
        self.down.weight.data /= factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, D) to (B, D)."""
        return self.down(nn.functional.relu(self.up(x)))


class Phases(nn.Module):
    """A fault: the sine of large angles."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequencies = nn.Linear(width, width)
        self.frequencies.weight.data *= 400

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, D) to (B, D)."""
        return torch.sin(self.frequencies(x)) * 0.3


def planted(overflow: float, width: int = 64) -> nn.Module:
    """A residual MLP with three faults. overflow: above 1e5 the second overflows fp16."""
    faults = {1: Cancelling(width), 3: Large(width, overflow), 5: Phases(width)}
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, width),
        *(ResidualLayer(width, faults.get(at) or feed_forward(width)) for at in range(8)),
        nn.Linear(width, CLASSES),
    )


def images(make: Callable[[], nn.Module], batch: int = 32) -> Task:
    """Tell the direction of stripes under noise."""
    line = torch.linspace(-1, 1, 16)
    y, x = torch.meshgrid(line, line, indexing="ij")

    def draw(generator: torch.Generator) -> Batch:
        labels = torch.randint(CLASSES, (batch,), generator=generator)
        angle = (labels * math.pi / CLASSES)[:, None, None]
        phase = 2 * math.pi * torch.rand(batch, 1, 1, generator=generator)
        stripes = torch.sin(8 * (x * angle.cos() + y * angle.sin()) + phase)
        return (stripes + torch.randn(batch, 16, 16, generator=generator))[:, None], labels

    def objective(model: nn.Module, batch: Batch) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs).float(), labels)

    return Task(make, objective, draw)
