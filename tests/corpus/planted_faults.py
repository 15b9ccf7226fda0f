"""Networks with one planted fault each, whose place and cause are known: what the instruments of numerics must find.

Each is small, trains in fp32, and has healthy modules before, behind and beside the culprit; some hold decoys: a causal
-inf mask, a log of 0 that nobody uses, a module that is all wrong in low precision and has no say in the loss.
Pinning the culprit, or a module around it, is the only cure; where it follows the dtype of its input (an exp, a norm by
hand), pinning what feeds it is another.
The faults show on a CPU, where autocast leaves exp, softmax, sums and norms in the dtype that they are given.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cpu import recurrent_in_bf16
from device import DEVICE
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_recipes.data import to_device
from amp_recipes.numerics.trial import Trial, plain_trial
from amp_recipes.numerics.watch.observe import OUTSIDE

Batch = tuple[torch.Tensor, ...]
CONVOLUTION = ("convolution", "mkldnn_convolution", "_convolution")


@dataclass(frozen=True)
class Planted:
    """One network and what is wrong with it.

    make: builds the model, the same at each call; objective: `objective(model, batch) -> loss`; draw: `draw(seed)`
    gives a batch; culprit: the module's name, or OUTSIDE; why: in a sentence; cause: "precision" (all is well in fp32),
    "scale" (all is well at scale 1), "model" or "data"; nonfinite: whether something gets nonfinite, or is just wrong;
    phase, ops: where and in which op it is born; also_cured_by: other modules whose pin helps; samples: those that do
    it, where only some do; dtype, scale: where the fault shows; window: batches of one update; learning_rate: at which
    it trains in fp32; make_trial: its step, where that is not one forward and one backward; cured_by: the module whose
    pin cures it, where that is not the culprit.
    """

    name: str
    make: Callable[[], nn.Module]
    objective: Callable[[nn.Module, Any], torch.Tensor]
    draw: Callable[[int], Batch]
    culprit: str
    why: str
    cause: str = "precision"
    nonfinite: bool = True
    phase: str = "forward"
    ops: tuple[str, ...] = ()
    also_cured_by: tuple[str, ...] = ()
    samples: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float16
    scale: float = 1024.0
    window: int = 1
    learning_rate: float = 1e-3
    make_trial: Callable[[Planted], Trial] | None = None
    cured_by: str | None = None

    @property
    def cure(self) -> str:
        """The module whose pin cures it: the culprit, unless it only suffers from what another one rounded away."""
        return self.cured_by or self.culprit

    @property
    def tolerance(self) -> float:
        """Of the gradient error: ten eps of the dtype."""
        return 10 * torch.finfo(self.dtype).eps

    def trial(self) -> Trial:
        """Its training step, on a new model."""
        if self.make_trial is not None:
            return self.make_trial(self)
        model = self.make()
        return plain_trial(model, self.objective, optimizer_of(model, self.learning_rate))

    def windows(self, count: int, seed: int = 0) -> list[list[Batch]]:
        """`count` windows; other seeds give others."""
        made = [[self.draw(1000 * seed + 10 * i + j) for j in range(self.window)] for i in range(count)]
        return to_device(made, DEVICE)

    def __str__(self) -> str:
        return self.name


ZOO: dict[str, Planted] = {}
ONE_PER_KIND = frozenset(
    (
        *("matmul_overflow", "cast_overflow", "reduction_overflow", "silent_zero_of_squares", "tiny_eps"),
        *("cancellation_in_a_variance", "cancellation_in_a_convolution_bf16", "softplus_by_hand", "two_optimizers"),
        *("backward_of_an_inverse_root", "forward_under_checkpointing", "lstm_on_an_offset_bf16", "wrong_scale"),
        *("accumulation_of_gradients", "inf_sample_under_accumulation", "nan_samples", "nan_target", "inf_weight"),
        *("nan_weight_of_an_lstm", "root_of_zero", "overflow_in_the_loss"),
    )
)
"""The networks that the default tier of the tests looks at."""


def plant(
    culprit: str,
    objective: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    into: dict[str, Planted] = ZOO,
    **what: Any,
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Decorates the function that builds a network: puts it into a zoo under the function's name.

    objective: default: `classified`; what: the other fields of `Planted`.
    """

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        @functools.wraps(build)
        def make() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return build().to(DEVICE)

        assert build.__doc__ is not None
        planted = Planted(build.__name__, make, objective or classified, culprit=culprit, why=build.__doc__, **what)
        assert planted.name not in into
        into[planted.name] = planted
        return make

    return register


def zoo(networks: dict[str, Planted] = ZOO, /, **wanted: Any) -> list[Planted]:
    """The planted networks whose fields have these values."""
    return [it for it in networks.values() if all(getattr(it, key) == value for key, value in wanted.items())]


def cases(networks: list[Planted], in_default_tier: frozenset[str] = ONE_PER_KIND) -> list[Any]:
    """One case of a test for each network; only those named in `in_default_tier` are not marked extended."""
    return [pytest.param(it, id=it.name, marks=_tier(it.name in in_default_tier)) for it in networks]


def _tier(is_default: bool) -> tuple[Any, ...]:
    return () if is_default else (pytest.mark.extended,)


# ---------------------------------------------------------------------------------------------- training and data


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([it for it in model.parameters() if it.requires_grad], lr=learning_rate)


def classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy of (batch..., classes)."""
    *inputs, target = batch
    return F.cross_entropy(model(*inputs).flatten(0, -2), target.flatten())


def regressed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    *inputs, target = batch
    return F.mse_loss(model(*inputs), target)


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of a model that returns its loss."""
    return model(*batch)


def draws(function: Callable[[torch.Generator], Batch]) -> Callable[[int], Batch]:
    """`function` of a generator as a function of a seed."""
    return lambda seed: function(torch.Generator().manual_seed(seed))


def normal(*shape: int, scale: float = 1.0, classes: int = 4) -> Callable[[int], Batch]:
    """Normal inputs of this shape and a class for each sample."""

    def draw(generator: torch.Generator) -> Batch:
        x = torch.randn(*shape, generator=generator)
        return x * scale, (x.flatten(1)[:, :classes]).argmax(1)

    return draws(draw)


def tokens(samples: int = 4, length: int = 12, vocabulary: int = 20) -> Callable[[int], Batch]:
    """Token numbers and a class for each: the token before."""

    def draw(generator: torch.Generator) -> Batch:
        x = torch.randint(1, vocabulary, (samples, length), generator=generator)
        return x, x.roll(1, 1) % 5

    return draws(draw)


def poisoned(draw: Callable[[int], Batch], samples: tuple[int, ...], value: float, part: int = 0) -> Callable:
    """Batches in which the part (-1: the target) of some samples has one such value."""

    def poison(seed: int) -> Batch:
        batch = list(draw(seed))
        batch[part] = batch[part].clone()
        for sample in samples:
            batch[part][sample].view(-1)[0] = value
        return tuple(batch)

    return poison


# ---------------------------------------------------------------------------------------------- healthy modules


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ConvBlock(nn.Module):
    """Convolution, norm, activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x)))


class Attention(nn.Module):
    """Causal self-attention of two heads, with its harmless -inf."""

    heads = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (it.unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in self.qkv(x).chunk(3, -1))
        weights = self.masked(self.scores(q, k)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q / math.sqrt(q.shape[-1])) @ k.mT

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(future, -math.inf)


class TransformerLayer(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.feed_forward = nn.LayerNorm(width), attention, Block(width)

    def forward(self, x: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(x + self.attention(self.norm(x), *masks))


class Transformer(nn.Module):
    """Tokens in, classes for each out. masks, if there are any, go to the attention of the layers that want them."""

    def __init__(self, *attentions: nn.Module, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList(TransformerLayer(width, attention) for attention in attentions)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h, *masks) if getattr(layer.attention, "wants_mask", False) else layer(h)
        return self.head(self.norm(h))


class Watcher(nn.Module):
    """A decoy: keeps a statistic that is -inf, and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistic", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.statistic = (x - x).abs().mean().log().float()
        return x


class Sine(nn.Module):
    """The sine of large angles."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 500 / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(F.linear(x, self.weight))


class Hum(nn.Module):
    """A decoy: its tone is all wrong in low precision, and next to nothing is heard of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tone = Sine(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 * self.tone(x)


class Bulge(nn.Module):
    """A decoy: activations of up to 3e4, which fp16 can hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.wide(x)) * 3e4) * (1 / 3e4)


class Chain(nn.Sequential):
    """Modules by name, one after the other."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__(OrderedDict(modules))


class MeanOver(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dims)


class Apply(nn.Module):
    """A module that computes `function` of its input."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def head(width: int, classes: int = 4) -> nn.Module:
    return Chain(norm=nn.LayerNorm(width), out=nn.Linear(width, classes))


def blocks(width: int, count: int = 2) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(count)))


def about(layer: nn.Linear, center: float, spread: float = 1.0) -> nn.Linear:
    """The layer, so that its outputs lie about `center`, this much wider than otherwise."""
    with torch.no_grad():
        layer.weight *= spread
        layer.bias.fill_(center)
    return layer


# ------------------------------------------------------------------------------- overflow in products and in casts


class BilinearPool(nn.Module):
    """Second-order pooling: the products of all pairs of channels, summed over time. (B, T, C) -> (B, C * C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gram = (x.mT @ x).flatten(1)
        return F.layer_norm(gram, gram.shape[-1:])


@plant("pool", draw=normal(4, 16, 10, scale=100.0), ops=("bmm",))
def matmul_overflow() -> nn.Module:
    """A product of matrices sums 16 products of about 60 * 60."""
    return Chain(
        frames=nn.Linear(10, 8), pool=BilinearPool(), embed=nn.Linear(64, 16), blocks=blocks(16), head=head(16)
    )


def priced(generator: torch.Generator) -> Batch:
    x = torch.rand(8, 6, generator=generator) * 4e4
    x[[2, 5]] += 2e5
    return x, x.argmax(1) % 4


def whitening() -> nn.Module:
    """A fixed projection of raw values to unit size."""
    whiten = nn.Linear(6, 16).requires_grad_(False)
    whiten.weight /= 3e4
    return whiten


@plant("whiten", draw=draws(priced), ops=("_to_copy",), samples=(2, 5))
def cast_overflow() -> nn.Module:
    """Raw prices above 65504 are cast to fp16 before the weights could make them small."""
    return Chain(whiten=whitening(), hum=Hum(16), blocks=blocks(16), head=head(16))


class LocalSum(nn.Conv2d):
    """The weighted sum over 17 by 17 pixels."""

    def __init__(self) -> None:
        super().__init__(1, 4, 17, stride=2)
        nn.init.uniform_(self.weight, 1.5, 2.5)


@plant(
    "stem", draw=draws(lambda g: (torch.rand(2, 1, 24, 24, generator=g) * 255, torch.tensor([0, 1]))), ops=CONVOLUTION
)
def convolution_overflow() -> nn.Module:
    """289 pixels of 0 to 255 with weights of about 2."""
    return Chain(
        stem=LocalSum(), norm=nn.GroupNorm(2, 4), conv=ConvBlock(4, 6), pool=MeanOver(2, 3), head=nn.Linear(6, 4)
    )


class Energetic(nn.Module):
    """A linear layer whose outputs are converted to small units in place, and then made relative to their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 200 / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        y.mul_(1000.0)
        return y / y.abs().mean(-1, keepdim=True)


@plant("layers.energetic", draw=normal(8, 12), ops=("mul_",))
def overflow_in_place() -> nn.Module:
    """1000 times 200, written over its factor."""
    layers = Chain(first=Block(16), norm=nn.LayerNorm(16), energetic=Energetic(16), last=Block(16))
    return Chain(embed=nn.Linear(12, 16), layers=layers, head=head(16))


class LateScaledAttention(Attention):
    """Multiplies queries and keys first and scales then."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        with torch.no_grad():
            self.qkv.weight[: 2 * width] *= 250

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT) * 3e-5


@plant("layers.1.attention", draw=tokens(), ops=("bmm",))
def attention_overflow() -> nn.Module:
    """q @ k.T is beyond fp16 before it is scaled; beside it stand causal masks of -inf that do no harm."""
    return Transformer(Attention(16), LateScaledAttention(16))


class Repeated(nn.Module):
    """One cell, applied again and again."""

    def __init__(self, cell: nn.Module, times: int) -> None:
        super().__init__()
        self.cell, self.times = cell, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.cell(x)
        return x


class GrowingCell(nn.Module):
    """An orthogonal map with a gain of ten."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)) * 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


@plant("repeated.cell", draw=normal(8, 12), ops=("mm", "addmm", "_to_copy"))
def growth_of_a_shared_module() -> nn.Module:
    """A module that is called six times multiplies by ten each time; the norm behind it would take any size."""
    return Chain(embed=nn.Linear(12, 16), repeated=Repeated(GrowingCell(16), 6), blocks=blocks(16), head=head(16))


class Fourier(nn.Module):
    """Sines and cosines of fixed random frequencies."""

    def __init__(self, inputs: int, width: int, frequency: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(width // 2, inputs) * frequency)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = F.linear(x, self.frequencies)
        return torch.cat([angle.sin(), angle.cos()], -1)


@plant("fourier", draw=draws(lambda g: (torch.rand(8, 2, generator=g) * 100, torch.arange(8) % 4)), ops=("mm", "addmm"))
def sine_of_an_overflowing_angle() -> nn.Module:
    """Frequency times time is beyond fp16, and the sine of inf is NaN."""
    return Chain(fourier=Fourier(2, 16, 2000.0), blocks=blocks(16), head=head(16))


# ------------------------------------------------------------------------------- overflow in reductions


class LogEnergy(nn.Module):
    """The log energy of each band over all frames, without the mean over bands. (B, C, T) -> (B, C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = (x.pow(2).sum(-1) + 1e-6).log()
        return energy - energy.mean(-1, keepdim=True)


@plant("energy", draw=normal(4, 1, 2048, scale=50.0), ops=("sum",), also_cured_by=("filters",))
def reduction_overflow() -> nn.Module:
    """A sum of 255 squares of about 30."""
    return Chain(
        filters=nn.Conv1d(1, 8, 16, stride=8),
        energy=LogEnergy(),
        embed=nn.Linear(8, 16),
        blocks=blocks(16),
        head=head(16),
    )


class Cdf(nn.Module):
    """What share of the whole has come up to each moment. (B, T, C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.abs().cumsum(1)
        return x / x[:, -1:]


@plant("cdf", draw=normal(2, 1024, 3, scale=450.0), ops=("cumsum",), also_cured_by=("mix",))
def cumsum_overflow() -> nn.Module:
    """The sum over 1024 moments of about 200."""
    return Chain(
        mix=nn.Linear(3, 2),
        cdf=Cdf(),
        strided=Apply(lambda x: x[:, 100::200].flatten(1)),
        embed=nn.Linear(10, 16),
        blocks=blocks(16),
        head=head(16),
    )


class RmsNorm(nn.Module):
    """x / rms(x), with a gain."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain


@plant("scale", draw=normal(8, 12, scale=600.0), nonfinite=False, scale=1.0, also_cured_by=("embed",))
def silent_zero_of_squares() -> nn.Module:
    """Squares of more than 256 are inf, and the inverse root of inf is 0: nothing gets nonfinite, all is silent."""
    return Chain(embed=nn.Linear(12, 16), scale=RmsNorm(16), blocks=blocks(16), head=head(16))


class MaskedMean(nn.Module):
    """The mean over the cells of a map that count. (B, N, C), (B, N) -> (B, C)"""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        keep = keep.to(x.dtype).unsqueeze(-1)
        return (x * keep).sum(1) / keep.sum(1)


class AreaNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point, self.mean = Chain(mix=nn.Linear(2, 2), squash=nn.Sigmoid()), MaskedMean()
        self.embed, self.blocks, self.head = nn.Linear(2, 16), blocks(16), head(16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(self.mean(self.point(x), keep))))


def areas(generator: torch.Generator) -> Batch:
    offset = torch.randn(2, 1, 2, generator=generator)
    x = torch.randn(2, 75_000, 2, generator=generator) + offset
    return x, torch.rand(2, 75_000, generator=generator) < 0.95, offset[:, 0].argmax(1)


@plant("mean", draw=draws(areas), nonfinite=False, also_cured_by=("point.mix", "point.squash"))
def silent_count_of_ones() -> nn.Module:
    """The number of the cells, counted in fp16, is inf, and the mean 0."""
    return AreaNet()


# ------------------------------------------------------------------------------- cancellation and rounding


class StandardisedLinear(nn.Module):
    """A linear layer, made mean 0 and variance 1 by E[y^2] - E[y]^2."""

    def __init__(self, width: int, offset: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / width**0.5), nn.Parameter(torch.randn(width))
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias + self.offset)
        mean = y.mean(-1, keepdim=True)
        variance = y.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        return (y - mean) / torch.sqrt(variance + 1e-5)


@plant("standardised", draw=normal(48, 12), ops=("sqrt",))
def cancellation_in_a_variance() -> nn.Module:
    """E[y^2] - E[y]^2 of values about 150 is negative in fp16, and the root of it NaN."""
    return Chain(
        embed=nn.Linear(12, 16),
        watcher=Watcher(),
        first=Block(16),
        standardised=StandardisedLinear(16, 150.0),
        blocks=blocks(16),
        head=head(16),
    )


class Distances(nn.Module):
    """Distances of points to all others of the cloud, by |a|^2 + |b|^2 - 2 ab. (B, N, 3) -> (B, N, N)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.pow(2).sum(-1)
        return torch.sqrt(square.unsqueeze(-1) + square.unsqueeze(-2) - 2 * x @ x.mT + 1e-2)


@plant(
    "distances", draw=draws(lambda g: (torch.randn(4, 8, 3, generator=g) * 0.5 + 20, torch.arange(4))), ops=("sqrt",)
)
def cancellation_in_a_distance() -> nn.Module:
    """Squares of 20 whose difference is the square of a distance of 1: negative in fp16."""
    return Chain(
        distances=Distances(),
        embed=nn.Linear(8, 16),
        first=Block(16),
        pool=MeanOver(1),
        blocks=blocks(16, 1),
        head=head(16),
    )


@plant("fourier", draw=draws(lambda g: (torch.rand(8, 2, generator=g), torch.arange(8) % 4)), nonfinite=False)
def large_angle_sine() -> nn.Module:
    """Angles of about 300 rad, of which fp16 holds every quarter."""
    return Chain(fourier=Fourier(2, 16, 300.0), hum=Hum(16), blocks=blocks(16), head=head(16))


@plant(
    "layers.fourier",
    draw=draws(lambda g: (torch.rand(8, 2, generator=g), torch.arange(8) % 4)),
    nonfinite=False,
    dtype=torch.bfloat16,
    scale=1.0,
)
def large_angle_sine_bf16() -> nn.Module:
    """Angles of about 150 rad, of which bf16 holds every whole one."""
    return Chain(layers=Chain(fourier=Fourier(2, 16, 150.0), mix=nn.Linear(16, 16)), blocks=blocks(16), head=head(16))


class Differences(nn.Conv1d):
    """The difference to the moment before, over some scales."""

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels, 4, bias=False)
        with torch.no_grad():
            self.weight -= self.weight.mean(-1, keepdim=True)


def on_an_offset(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 1, 24, generator=generator)
    return 300 + x, x[:, 0, :4].argmax(1)


@plant("delta", draw=draws(on_an_offset), nonfinite=False, dtype=torch.bfloat16, scale=1.0)
def cancellation_in_a_convolution_bf16() -> nn.Module:
    """Differences of a signal that stands at 300, where bf16 holds every second number."""
    return Chain(
        delta=Differences(6),
        norm=nn.GroupNorm(2, 6),
        conv=nn.Conv1d(6, 8, 3),
        pool=Apply(lambda x: F.silu(x).mean(-1)),
        embed=nn.Linear(8, 16),
        blocks=blocks(16),
        head=head(16),
    )


# ------------------------------------------------------------------------------- exp and log


@plant("positive", draw=normal(8, 12), ops=("exp",), also_cured_by=("embed",))
def softplus_by_hand() -> nn.Module:
    """log(1 + exp(x)) of about 15."""
    return Chain(
        embed=about(nn.Linear(12, 16), 15.0, spread=3.0),
        positive=Apply(lambda x: torch.log(1 + torch.exp(x))),
        norm=nn.LayerNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


class LogSumExp(nn.Module):
    """The free energy over each group of four states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.exp(x.unflatten(-1, (-1, 4))).sum(-1))


@plant("blocks.1.partition", draw=normal(8, 12), ops=("exp", "sum"), also_cured_by=("blocks.1.states",))
def logsumexp_by_hand() -> nn.Module:
    """The sum of four exponentials of about 11.5."""
    states = about(nn.Linear(16, 64), 11.5, spread=3.0)
    inner = Chain(states=states, partition=LogSumExp(), norm=nn.LayerNorm(16))
    return Chain(embed=nn.Linear(12, 16), blocks=nn.Sequential(Block(16), inner, Block(16)), head=head(16))


class Contrast(nn.Module):
    """InfoNCE by hand at a temperature of 0.07: the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, width) / width**0.5)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (F.normalize(F.linear(it, self.weight), dim=-1) for it in (a, b))
        similar = torch.exp(a @ b.mT / 0.07)
        return -torch.log(similar.diagonal() / similar.sum(-1)).mean()


class Twins(nn.Module):
    """One encoder for both views, and a loss that is a module."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), norm=nn.LayerNorm(16)), loss

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.loss(self.encoder(a), self.encoder(b))


def two_views(generator: torch.Generator) -> Batch:
    x = torch.randn(8, 12, generator=generator)
    return x, x + 0.6 * torch.randn(8, 12, generator=generator)


@plant("loss", objective=own_loss, draw=draws(two_views), ops=("exp",))
def exp_of_a_similarity() -> nn.Module:
    """exp(0.85 / 0.07) in a contrastive loss."""
    return Twins(Contrast(16))


class Likelihood(nn.Module):
    """Gaussian negative log-likelihood, by the precision exp(-log variance)."""

    def forward(self, mean: torch.Tensor, log_variance: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = (target - mean).to(log_variance.dtype)
        return 0.5 * (torch.exp(-log_variance) * error.pow(2) + log_variance).mean()


class Autoencoder(nn.Module):
    """Says with its reconstruction how sure it is."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), block=Block(16), bottleneck=nn.Linear(16, 4))
        self.decoder = Chain(embed=nn.Linear(4, 16), bulge=Bulge(16), block=Block(16))
        self.mean, self.log_variance, self.likelihood = nn.Linear(16, 12), nn.Linear(16, 12), Likelihood()
        nn.init.constant_(self.log_variance.bias, -12.0)
        with torch.no_grad():
            self.mean.weight *= 0.01
            self.mean.bias *= 0.01

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.decoder(self.encoder(x))
        return self.likelihood(self.mean(h), self.log_variance(h), 0.01 * x)


@plant(
    "likelihood",
    objective=own_loss,
    draw=draws(lambda g: (torch.randn(8, 12, generator=g),)),
    ops=("exp",),
    scale=16.0,
    also_cured_by=("log_variance",),
)
def exp_of_a_log_variance() -> nn.Module:
    """The precision of a standard deviation of 0.0025 is 160000."""
    return Autoencoder()


@dataclass
class Posterior:
    """What an encoder believes, and how far that is from the prior."""

    sample: torch.Tensor
    divergence: torch.Tensor


class Bottleneck(nn.Module):
    """A normal posterior of four numbers; their variance, exp(log variance), is large where nothing is known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, width) / width**0.5)
        self.register_buffer("offset", torch.tensor([0.0] * 4 + [12.0, 0.0, 0.0, 0.0]))

    def forward(self, x: torch.Tensor) -> Posterior:
        mean, log_variance = F.linear(x, self.weight, self.offset).chunk(2, -1)
        divergence = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance)
        return Posterior(mean + 0.1 * torch.randn_like(mean.float()), divergence.mean())


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), block=Block(16))
        self.bottleneck = Bottleneck(16)
        self.decoder = Chain(embed=nn.Linear(4, 16), block=Block(16), out=nn.Linear(16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        posterior = self.bottleneck(self.encoder(x))
        return F.mse_loss(self.decoder(posterior.sample), x) + 1e-5 * posterior.divergence


@plant("bottleneck", objective=own_loss, draw=draws(lambda g: (torch.randn(8, 12, generator=g),)), ops=("exp",))
def exp_in_a_module_that_returns_a_dataclass() -> nn.Module:
    """The variance of a posterior is exp(12); the noise must be the same at each precision."""
    return Variational()


class LogProbabilities(nn.Module):
    """A linear layer and the log of its softmax, one after the other."""

    def __init__(self, width: int, classes: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width) * gain / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(F.linear(x, self.weight).softmax(-1))


def mean_likelihood(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Of a model that returns log-probabilities; every class counts."""
    *inputs, target = batch
    expected = F.one_hot(target, 6).float() * 0.9 + 0.1 / 6
    return -(model(*inputs) * expected).sum(-1).mean()


@plant("classes", objective=mean_likelihood, draw=normal(8, 12, classes=6), ops=("log",))
def log_of_softmax() -> nn.Module:
    """A probability of 1e-8 is 0 in fp16, and its log -inf."""
    return Chain(
        embed=nn.Linear(12, 16), blocks=blocks(16), norm=nn.LayerNorm(16), classes=LogProbabilities(16, 6, 9.0)
    )


class Joint(nn.Module):
    """The log of the product of eight probabilities."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        product = 1.0
        for probability in torch.sigmoid(logits).unflatten(-1, (-1, 8)).unbind(-1):
            product = product * probability
        return torch.log(product)


@plant("joint", draw=normal(8, 12), ops=("log",), also_cured_by=("factors",))
def product_of_probabilities() -> nn.Module:
    """0.05 to the power of eight is 0 in fp16."""
    factors = about(nn.Linear(16, 32), -3.0)
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), factors=factors, joint=Joint())


class Judge(nn.Module):
    """log D and log(1 - D) of a logit."""

    def forward(self, logit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        truth = torch.sigmoid(logit)
        return torch.log(truth), torch.log(1 - truth)


class Gan(nn.Module):
    """A generator and a critic, which is sure of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Chain(embed=nn.Linear(4, 16), blocks=blocks(16), out=nn.Linear(16, 6))
        self.critic = Chain(embed=nn.Linear(6, 16), block=Block(16), logit=nn.Linear(16, 1), judge=Judge())
        nn.init.constant_(self.critic.logit.bias, 10.0)


def gan_trial(planted: Planted) -> Trial:
    """Updates the critic, then the generator, in each window."""
    model = planted.make()
    optimizers = {name: optimizer_of(getattr(model, name), planted.learning_rate) for name in ("critic", "generator")}

    def take(window: Any, updates: Any, context: Any) -> list[torch.Tensor]:
        updates.begin()
        losses = []
        for name, optimizer in optimizers.items():
            for noise, real in window:
                with context:
                    loss = gan_loss(model, name, noise, real)
                updates.backward(loss, of=len(window))
                losses.append(loss.detach())
            updates.step({name: optimizer}, 0.0)
            for each in optimizers.values():
                each.zero_grad()
        return losses

    return Trial(model, DEVICE, take, lambda: optimizers)


def gan_loss(model: nn.Module, player: str, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    fake = model.generator(noise)
    if player == "critic":
        return -(model.critic(real)[0] + model.critic(fake.detach())[1]).mean()
    return model.critic(fake)[1].mean()


def critic_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return gan_loss(model, "critic", *batch)


@plant(
    "critic.judge",
    objective=critic_loss,
    draw=draws(lambda g: (torch.randn(8, 4, generator=g), torch.randn(8, 6, generator=g) + 1)),
    ops=("log",),
    also_cured_by=("critic.logit",),
    make_trial=gan_trial,
)
def two_optimizers() -> nn.Module:
    """1 - sigmoid(10) is 0 in fp16; critic and generator are updated one after the other."""
    return Gan()


# ------------------------------------------------------------------------------- eps, masks, shares of nothing


class MaskedPool(nn.Module):
    """The mean of those that count, by their weights. (B, T, C), (B, T) -> (B, C)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, width) / width**0.5)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        score = torch.sigmoid(F.linear(x, self.weight))
        score = score * keep.to(score.dtype).unsqueeze(-1)
        share = score / (score.sum(1, keepdim=True) + 1e-8)
        return (share * x).sum(1)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.pool, self.head = nn.Embedding(20, 16), blocks(16), MaskedPool(16), head(16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.blocks(self.embedding(x)), keep))


def with_empty_samples(generator: torch.Generator) -> Batch:
    x = torch.randint(0, 20, (6, 10), generator=generator)
    keep = torch.arange(10) < torch.tensor([10, 7, 0, 4, 9, 0]).unsqueeze(-1)
    return x, keep, torch.where(keep, x, 0).sum(-1) % 4


@plant("pool", draw=draws(with_empty_samples), ops=("div",), samples=(2, 5))
def tiny_eps() -> nn.Module:
    """An eps of 1e-8 is 0 in fp16, so the mean over nothing is 0 / 0."""
    return Pooled()


class PaddedAttention(Attention):
    """Adds -1e9 where there is padding."""

    wants_mask = True

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        self.keep = keep
        return super().forward(x)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        return scores + (1.0 - self.keep[:, None, None].to(scores.dtype)) * -1e9


def padded_tokens(generator: torch.Generator) -> Batch:
    x, keep, _ = with_empty_samples(generator)
    return x, keep, x.roll(1, 1) % 5


@plant("layers.1.attention", draw=draws(padded_tokens), ops=("mul", "_softmax"), samples=(2, 5))
def mask_value() -> nn.Module:
    """-1e9 is -inf in fp16, and the softmax of a row of nothing else NaN."""
    return Transformer(Attention(16), PaddedAttention(16), Attention(16))


class Router(nn.Module):
    """What the experts that are not full get: their softmax share of each sample."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.register_buffer("popularity", torch.tensor([0.0, 30.0, 1.0]))
        self.register_buffer("full", torch.tensor([False, True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = (F.linear(x, self.weight) + self.popularity.to(x.dtype)).to(x.dtype)
        share = share.softmax(-1).masked_fill(self.full, 0.0)
        return share / share.sum(-1, keepdim=True)


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = Router(width, 3), nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x)
        return sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@plant("mixture.router", draw=normal(8, 12), ops=("div",), also_cured_by=("lower",))
def share_of_nothing() -> nn.Module:
    """The experts that are left over have 1e-12 together: 0 in fp16, and their shares 0 / 0."""
    return Chain(embed=nn.Linear(12, 16), lower=nn.Linear(16, 16), mixture=Experts(16), head=head(16))


# ------------------------------------------------------------------------------- born in the backward


def small_activations() -> nn.Module:
    small = nn.Linear(16, 16)
    with torch.no_grad():
        small.weight *= 0.004
        small.bias *= 0.004
    return small


@plant("norm", draw=normal(8, 12), phase="backward", ops=("pow", "mul"), scale=16.0, also_cured_by=("small",))
def backward_of_an_inverse_root() -> nn.Module:
    """The norm of values of 0.003: rsqrt gives 300, its gradient the cube of that."""
    return Chain(
        embed=nn.Linear(12, 16),
        block=Block(16),
        watcher=Watcher(),
        small=small_activations(),
        norm=RmsNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


class Checkpointed(nn.Module):
    """Computes its inner module again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@plant(
    "checkpointed.inner.norm",
    draw=normal(8, 12),
    phase="backward",
    ops=("pow", "mul"),
    scale=16.0,
    also_cured_by=("checkpointed.inner.small",),
)
def backward_under_checkpointing() -> nn.Module:
    """The same in a block whose activations are computed again."""
    inner = Chain(block=Block(16), small=small_activations(), norm=RmsNorm(16))
    return Chain(embed=nn.Linear(12, 16), checkpointed=Checkpointed(inner), blocks=blocks(16), head=head(16))


@plant("checkpointed.inner.standardised", draw=normal(48, 12), ops=("sqrt",))
def forward_under_checkpointing() -> nn.Module:
    """A negative variance in a block whose activations are computed again."""
    inner = Chain(block=Block(16), standardised=StandardisedLinear(16, 150.0), after=nn.Linear(16, 16))
    return Chain(embed=nn.Linear(12, 16), checkpointed=Checkpointed(inner), blocks=blocks(16), head=head(16))


class Metric(nn.Module):
    """The length of the difference of two vectors, after a learned map."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(a - b, self.weight).pow(2).sum(-1, keepdim=True).sqrt()


class Pairs(nn.Module):
    """Are two things the same?"""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.embed, self.blocks, self.head = Metric(8, 12), nn.Linear(9, 16), blocks(16), head(16, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(torch.cat([a * b, self.metric(a, b).float()], -1))))


def near_pairs(generator: torch.Generator) -> Batch:
    a, b = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    b[[1, 4]] = a[[1, 4]] + 2e-5 * b[[1, 4]]
    return a, b, torch.tensor([0, 1, 0, 0, 1, 0, 0, 0])


@plant("metric", draw=draws(near_pairs), phase="backward", ops=("div", "mul"), samples=(1, 4))
def root_of_an_underflow() -> nn.Module:
    """The square of a difference of 2e-5 is 0 in fp16; the gradient of the root of 0 is inf."""
    return Pairs()


class Geodesic(nn.Module):
    """The angle between two vectors, by the arc cosine of a product that is kept below 1."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (F.linear(it, self.weight) for it in (a, b))
        cosine = (a * b).sum(-1, keepdim=True) / (
            a.pow(2).sum(-1, keepdim=True) * b.pow(2).sum(-1, keepdim=True)
        ).sqrt()
        return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))


class Angles(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Geodesic(8, 12)


def close_pairs(generator: torch.Generator) -> Batch:
    a, noise = torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)
    return a, a + 0.01 * noise, (noise[:, 0] > 0).long()


@plant("metric", draw=draws(close_pairs), phase="backward", ops=("rsqrt", "mul", "neg"))
def arc_cosine_of_one() -> nn.Module:
    """1 - 1e-6 is 1 in fp16, where the arc cosine has no slope."""
    return Angles()


# ------------------------------------------------------------------------------- recurrent networks


class Tagger(nn.Module):
    """A class for each moment, by a cell that is called at each."""

    def __init__(self, inputs: int, cell: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.inputs, self.cell = nn.Linear(inputs, width), cell
        self.block, self.out = Block(width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.states(self.inputs(x))))

    def states(self, x: torch.Tensor) -> torch.Tensor:
        state, states = None, []
        for moment in x.unbind(1):
            state = self.cell(moment, state)
            states.append(state[0])
        return torch.stack(states, 1)


class ExponentialCell(nn.Module):
    """An LSTM cell with an exponential input gate and a state that normalises. State: output, memory, normaliser."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 4 * width)
        nn.init.constant_(self.gates.bias, 0.0)
        self.bias = bias

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...]:
        h, c, n = state or (torch.zeros_like(x),) * 3
        z, i, f, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
        i, f = torch.exp(i + self.bias), torch.sigmoid(f + 1.0)
        c, n = f * c + i * torch.tanh(z), f * n + i
        return torch.sigmoid(o) * c / n, c, n


def sequence(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 8, 6, generator=generator)
    return x, x[..., :5].argmax(-1)


@plant("cell", draw=draws(sequence), ops=("exp", "add", "mul"), also_cured_by=("cell.gates",))
def lstm_with_an_exponential_gate() -> nn.Module:
    """exp(12) is beyond fp16, and memory and normaliser are both inf."""
    return Tagger(6, ExponentialCell(12, 12.0))


class RawTagger(Tagger):
    """Its cell, torch's own, gets the counters as they are."""

    def __init__(self) -> None:
        cell = nn.LSTMCell(4, 12)
        with torch.no_grad():
            cell.weight_ih *= 1e-5
        super().__init__(4, cell)
        self.inputs = nn.Identity()


def counters(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 6, 4, generator=generator).sign() * (1e5 + 5e4 * torch.rand(4, 6, 4, generator=generator))
    return x, x.argmax(-1)


@plant("cell", draw=draws(counters), ops=("_to_copy",), learning_rate=1e-7)
def lstm_of_raw_counters() -> nn.Module:
    """Counters above 65504 into an LSTM cell whose weights are small."""
    return RawTagger()


class LstmTagger(nn.Module):
    """torch's LSTM, or GRU, over raw values; the mean over the moments is not its business."""

    def __init__(self, offset: bool) -> None:
        super().__init__()
        self.lstm = recurrent_in_bf16()(5, 12, batch_first=True)
        self.block, self.out = Block(12), nn.Linear(12, 5)
        if offset:
            with torch.no_grad():  # each gate looks at differences between features
                self.lstm.weight_ih_l0 -= self.lstm.weight_ih_l0.mean(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.lstm(x)[0]))


def offset_sequence(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 8, 5, generator=generator)
    return 300 + x, x.argmax(-1)


@plant("lstm", draw=draws(offset_sequence), nonfinite=False, dtype=torch.bfloat16, scale=1.0, learning_rate=1e-5)
def lstm_on_an_offset_bf16() -> nn.Module:
    """Differences between features that stand at 300, where bf16 holds every second number."""
    return LstmTagger(offset=True)


# ------------------------------------------------------------------------------- several batches in a window


def every_other(draw_well: Callable[[int], Batch], draw_ill: Callable[[int], Batch]) -> Callable[[int], Batch]:
    """Every second batch of a window is ill."""
    return lambda seed: draw_ill(seed) if seed % 10 == 1 else draw_well(seed)


def cheap(generator: torch.Generator) -> Batch:
    x, target = priced(generator)
    return x / 10, target


@plant("whiten", draw=every_other(draws(cheap), draws(priced)), window=3, ops=("_to_copy",), samples=(2, 5))
def accumulation() -> nn.Module:
    """A cast overflows in the second of the three batches of an update."""
    return Chain(whiten=whitening(), hum=Hum(16), blocks=blocks(16), head=head(16))


class NormedLinear(RmsNorm):
    """A linear layer, and the norm of what it gives."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.linear(x, self.weight))


@plant(
    "normed",
    draw=every_other(normal(8, 12), normal(8, 12, scale=2e-3)),
    window=2,
    phase="backward",
    ops=("pow", "mul"),
    scale=16.0,
)
def accumulation_of_gradients() -> nn.Module:
    """The second of two batches is faint, and the gradient of its norm overflows."""
    return Chain(embed=nn.Linear(12, 16, bias=False), normed=NormedLinear(16), blocks=blocks(16), head=head(16))


# ------------------------------------------------------------------------------- not the precision's fault


@plant(
    "embed",
    draw=poisoned(normal(8, 12), (3, 6), math.nan),
    cause="data",
    samples=(3, 6),
    dtype=torch.bfloat16,
    scale=1.0,
)
def nan_samples() -> nn.Module:
    """Two samples hold a NaN."""
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


@plant(
    OUTSIDE,
    objective=regressed,
    draw=poisoned(
        draws(lambda g: (torch.randn(8, 12, generator=g), torch.randn(8, 4, generator=g))), (5,), math.nan, -1
    ),
    cause="data",
    samples=(5,),
)
def nan_target() -> nn.Module:
    """The target of one sample is NaN; no module sees it."""
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


@plant(
    "embed",
    draw=every_other(normal(8, 12), poisoned(normal(8, 12), (2,), -math.inf)),
    window=3,
    cause="data",
    samples=(2,),
)
def inf_sample_under_accumulation() -> nn.Module:
    """The second of three batches has a sample that holds -inf."""
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


@plant("blocks.1.up", draw=normal(8, 12), cause="model")
def inf_weight() -> nn.Module:
    """One weight is inf."""
    model = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))
    model.blocks[1].up.weight.data[3, 3] = math.inf
    return model


@plant("lstm", draw=draws(offset_sequence), cause="model", dtype=torch.bfloat16, scale=1.0)
def nan_weight_of_an_lstm() -> nn.Module:
    """One recurrent weight is NaN."""
    model = LstmTagger(offset=False)
    model.lstm.weight_hh_l0.data[2, 5] = math.nan
    return model


class PairwiseDistances(nn.Module):
    """Of all to all, itself included. (B, T, C) -> (B, T, T)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) - x.unsqueeze(2)).pow(2).sum(-1).sqrt()


@plant(
    "distances",
    draw=normal(4, 6, 5),
    cause="model",
    phase="backward",
    ops=("div", "mul"),
    dtype=torch.bfloat16,
    scale=1.0,
)
def root_of_zero() -> nn.Module:
    """The distance of a point to itself is 0, and the root of 0 has no slope, at any precision."""
    return Chain(embed=nn.Linear(5, 8), distances=PairwiseDistances(), pool=MeanOver(1), blocks=blocks(6), head=head(6))


class Entropy(nn.Module):
    """The entropy of each row of causal weights: 0 * log 0 for what is masked. (B, T, T) -> (B, T)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = x.masked_fill(future, -math.inf).softmax(-1)
        return -(weights * weights.log()).sum(-1)


@plant("entropy", draw=normal(4, 6, 6), cause="model", ops=("log", "mul"))
def log_of_zero() -> nn.Module:
    """The entropy of weights of which some are 0, at any precision."""
    return Chain(embed=nn.Linear(6, 6), entropy=Entropy(), blocks=blocks(6), head=head(6))


class Gain(nn.Module):
    """Multiplies by 500."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 500


@plant("gain", draw=normal(8, 12), cause="scale", phase="backward", ops=("mul",), scale=2.0**14)
def wrong_scale() -> nn.Module:
    """The gradient behind a gain of 500 is beyond fp16 at this loss scale, and well at a smaller one."""
    small = small_activations()
    return Chain(
        embed=nn.Linear(12, 16),
        block=Block(16),
        small=small,
        gain=Gain(),
        mix=nn.Linear(16, 16),
        blocks=blocks(16),
        head=head(16),
    )


def summed_squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss that stays in fp16."""
    x, target = batch
    return (model(x) * 100 - target).pow(2).sum().sqrt()


@plant(
    OUTSIDE,
    objective=summed_squares,
    draw=draws(lambda g: (torch.randn(8, 12, generator=g), torch.randn(8, 4, generator=g).half() * 100)),
    ops=("pow", "sum"),
)
def overflow_in_the_loss() -> nn.Module:
    """The recipe's own loss sums squares of 100 in fp16; no module is to blame."""
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))
