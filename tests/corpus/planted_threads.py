"""Networks with one planted fault each, after faults that people met and wrote about in public issue threads.

Each `why` ends with the thread: repository, number, and what it is about, in our words. The networks are our own, and
small. Their kinds are others than those of `planted_faults`, whose tools they use.
"""

from __future__ import annotations

import functools
import math

import torch
from planted_faults import (
    OUTSIDE,
    Apply,
    Attention,
    Batch,
    Block,
    Chain,
    MaskedMean,
    MeanOver,
    Planted,
    Transformer,
    about,
    blocks,
    classified,
    draws,
    every_other,
    head,
    normal,
    own_loss,
    padded_tokens,
    plant,
    poisoned,
    regressed,
    tokens,
)
from torch import nn
from torch.nn import functional as F

THREADS: dict[str, Planted] = {}
"""The planted networks, by name."""

planted = functools.partial(plant, into=THREADS)

ONE_PER_KIND = frozenset(
    (
        *("residual_sum", "area_of_a_box", "decay_of_a_chunk", "divisor_flushed_before", "branch_not_taken"),
        *("positions_in_bf16", "expert_chosen_in_bf16", "infinite_class_weight", "impossible_alignment"),
        "nan_that_a_where_drops",
    )
)
"""The networks that the default tier of the tests looks at."""


# ------------------------------------------------------------------------------- overflow: sums, products, squares


class LargeLayer(Block):
    """A residual layer that adds up to 4e4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 4e4 * torch.tanh(4 * self.down(F.gelu(self.up(self.norm(x)))))


@planted(
    "layers.1", draw=normal(8, 12), ops=("add",), also_cured_by=("embed", "layers.0", "layers.0.down", "layers.1.down")
)
def residual_sum() -> nn.Module:
    """What a layer adds fits into fp16, its sum with the residual stream does not.

    huggingface/transformers#12225: pretraining Pegasus in fp16 gives NaN.
    """
    layers = nn.Sequential(LargeLayer(16), LargeLayer(16))
    return Chain(embed=nn.Linear(12, 16), layers=layers, head=head(16))


class ClampedLayer(LargeLayer):
    """Clamps what overflows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.clamp(-64000, 64000) if y.isinf().any() else y


@planted(
    "layers.1",
    draw=normal(8, 12),
    nonfinite=False,
    also_cured_by=("embed", "layers.0", "layers.0.down", "layers.1.down"),
)
def residual_sum_that_is_clamped() -> nn.Module:
    """What overflows is clamped: all is finite, and the clamp lets no gradient through.

    huggingface/transformers#19229: clamping hidden states so that fp16 works.
    """
    layers = nn.Sequential(ClampedLayer(16), ClampedLayer(16))
    return Chain(embed=nn.Linear(12, 16), layers=layers, head=head(16))


def saturated() -> nn.Module:
    return Apply(lambda x: 4e4 * torch.tanh(3 * x))


@planted("dropout", draw=normal(8, 12), ops=("mul",), also_cured_by=("embed", "saturated"))
def dropout_of_large_numbers() -> nn.Module:
    """Dropout of a half doubles what is kept: 8e4.

    huggingface/transformers#9295: the dropout of T5's feed-forward layer overflows in fp16.
    """
    return Chain(
        embed=nn.Linear(12, 16),
        saturated=saturated(),
        dropout=nn.Dropout(0.5),
        norm=nn.LayerNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


class GatedFeedForward(nn.Module):
    """The product of an activated and a plain projection, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.back = nn.Linear(2 * width, width, bias=False).requires_grad_(False)
        with torch.no_grad():
            self.gate.weight *= 2000
            self.value.weight *= 2000
            self.back.weight /= 1e6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(F.gelu(self.gate(x)) * self.value(x))


@planted("gated", draw=normal(8, 12), ops=("mul",))
def product_of_two_projections() -> nn.Module:
    """Each factor of a gated feed-forward layer is some hundreds, their product is beyond fp16.

    huggingface/transformers#14189: T5 v1.1 reaches NaN in fp16.
    """
    return Chain(
        embed=nn.Linear(12, 16), norm=nn.LayerNorm(16), gated=GatedFeedForward(16), blocks=blocks(16), head=head(16)
    )


class IouLoss(nn.Module):
    """1 - intersection over union of boxes about the same centre, from their widths and heights in pixels."""

    def forward(self, size: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        both = torch.minimum(size, target).prod(-1) if size.dtype == target.dtype else self.mixed(size, target)
        area = size[:, 0] * size[:, 1]
        return 1 - (both / (area + target[:, 0] * target[:, 1] - both)).mean()

    @staticmethod
    def mixed(size: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.minimum(size.float(), target).prod(-1)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), norm=nn.LayerNorm(16))
        self.size, self.loss = about(nn.Linear(16, 2), 500.0, spread=40.0), IouLoss()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.size(self.encoder(x)), target)


def boxes(generator: torch.Generator) -> Batch:
    return torch.randn(8, 12, generator=generator), 400 + 200 * torch.rand(8, 2, generator=generator)


@planted("loss", objective=own_loss, draw=draws(boxes), nonfinite=False, also_cured_by=("size",))
def area_of_a_box() -> nn.Module:
    """An area of 500 by 500 pixels is inf in fp16, and what it divides is 0: the loss is 1, with no gradient.

    pytorch/vision#3383: overlaps of boxes overflow in fp16.
    """
    return Detector()


class MendedIouLoss(IouLoss):
    """Where a box has no overlap that is a number, it is 0."""

    def forward(self, size: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target = target.to(size.dtype)
        both = torch.minimum(size, target)
        shared, area, other = both[:, 0] * both[:, 1], size[:, 0] * size[:, 1], target[:, 0] * target[:, 1]
        return 1 - torch.nan_to_num(shared / (area + other - shared), 0.0).mean()


@planted("loss", objective=own_loss, draw=draws(boxes), ops=("mul",), also_cured_by=("size",))
def overlap_that_is_mended() -> nn.Module:
    """inf / inf is NaN, which nan_to_num makes 0: the loss is finite, its gradient is not.

    meituan/YOLOv6#387: nan_to_num against NaN in the overlap of boxes.
    """
    detector = Detector()
    detector.loss = MendedIouLoss()
    return detector


class LinearAttention(nn.Module):
    """Attention without a softmax: keys and values are summed over time first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        with torch.no_grad():
            self.key.weight *= 400
            self.value.weight *= 0.02
            self.value.bias *= 0.02

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = F.elu(self.query(x)) + 1, F.elu(self.key(x)) + 1
        total = k.sum(1, keepdim=True)
        return x + 20 * (q @ (k.mT @ self.value(x))) / (q * total).sum(-1, keepdim=True)


@planted("attention", draw=normal(2, 1024, 6), ops=("sum",))
def keys_summed_in_linear_attention() -> nn.Module:
    """The sum of 1024 keys is inf. As a divisor it makes 0 of all, and its gradient is 0 * inf.

    idiap/fast-transformers#32: linear attention under AMP ends in NaN.
    """
    return Chain(
        embed=nn.Linear(6, 8),
        norm=nn.LayerNorm(8),
        attention=LinearAttention(8),
        pool=MeanOver(1),
        blocks=blocks(8),
        head=head(8),
    )


class Sinkhorn(nn.Module):
    """Assigns samples to prototypes so that each gets its share; no gradient."""

    @torch.no_grad()
    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        shares = torch.exp(scores / 0.05)
        for _ in range(2):
            shares = shares / shares.sum(0, keepdim=True)
            shares = shares / shares.sum(1, keepdim=True)
        return shares


class Swapped(nn.Module):
    """Predicts the assignment of one view from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), out=nn.Linear(16, 6))
        self.prototypes, self.sinkhorn = nn.Linear(6, 12, bias=False), Sinkhorn()
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(torch.randn(12, 6), dim=-1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = (self.prototypes(F.normalize(self.encoder(it), dim=-1, eps=1e-3)) for it in (a, b))
        return -(self.sinkhorn(second) * torch.log_softmax(first / 0.1, -1)).sum(-1).mean()


def views(generator: torch.Generator) -> Batch:
    x = torch.randn(8, 12, generator=generator)
    return x, x + 0.2 * torch.randn(8, 12, generator=generator)


@planted("sinkhorn", objective=own_loss, draw=draws(views), ops=("exp",), also_cured_by=("prototypes",))
def assignment_without_gradient() -> nn.Module:
    """exp(0.8 / 0.05) in a part that has no gradient, and inf / inf.

    facebookresearch/dinov2#583: the teacher's Sinkhorn iteration overflows.
    """
    return Swapped()


class DecayMixer(nn.Module):
    """What came before, each less by the gates since: exp(-G) * cumsum(exp(G) * v), G being the sum of the gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.sigmoid(self.gate(x)).cumsum(1)
        return x + self.out(torch.exp(-total) * (torch.exp(total) * self.value(x)).cumsum(1))


@planted("mixer", draw=normal(4, 48, 6), ops=("exp",), also_cured_by=("mixer.gate",))
def decay_of_a_chunk() -> nn.Module:
    """exp(24) is inf, exp(-24) is 0, and their product NaN.

    fla-org/flash-linear-attention#649: a cumulated decay overflows within a chunk.
    """
    return Chain(
        embed=nn.Linear(6, 12),
        norm=nn.LayerNorm(12),
        mixer=DecayMixer(12),
        pool=MeanOver(1),
        blocks=blocks(12),
        head=head(12),
    )


# ------------------------------------------------------------------------------- an eps, a clamp, a small number is 0


class FocalLoss(nn.Module):
    """The focal loss of probabilities that are kept away from 0 and 1."""

    def forward(self, logit: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(logit).clamp(1e-4, 1 - 1e-4)
        return -(target * (1 - p) ** 2 * torch.log(p) + (1 - target) * p**2 * torch.log(1 - p)).mean()


class Spotter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), norm=nn.LayerNorm(16))
        self.logit, self.loss = about(nn.Linear(16, 1), 8.6, spread=0.1), FocalLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.logit(self.encoder(x)), (x[:, :1] > 0).float())


@planted(
    "loss",
    objective=own_loss,
    draw=draws(lambda g: (torch.randn(8, 12, generator=g),)),
    ops=("log",),
    also_cured_by=("logit",),
)
def clamp_to_almost_one() -> nn.Module:
    """1 - 1e-4 is 1 in fp16, so the clamp lets a probability of 1 pass.

    zylo117/Yet-Another-EfficientDet-Pytorch#717: the focal loss has NaN.
    """
    return Spotter()


class UnitDirections(nn.Module):
    """A projection to the unit sphere, and the mean of those that count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        unit = F.normalize(self.project(x), dim=-1)
        return (unit * keep.to(unit.dtype).unsqueeze(-1)).sum(1) / 10


class Retriever(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.directions = nn.Embedding(20, 16, padding_idx=0), UnitDirections(16)
        self.blocks, self.head = blocks(16), head(16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.directions(self.embedding(x), keep)))


def zero_padded(generator: torch.Generator) -> Batch:
    x = torch.randint(1, 20, (6, 10), generator=generator)
    keep = torch.arange(10) < torch.tensor([10, 7, 10, 10, 10, 4]).unsqueeze(-1)
    return torch.where(keep, x, 0), keep, x[:, 0] % 4


@planted("directions", draw=draws(zero_padded), ops=("div",), samples=(1, 5), also_cured_by=("directions.project",))
def normalised_zero() -> nn.Module:
    """The default eps of normalize is 0 in fp16: the padding of two samples, which is zero, becomes 0 / 0.

    pytorch/pytorch#32137: the eps of normalize is too small for half precision.
    """
    return Retriever()


class RandomFeatures(nn.Module):
    """Softmax attention, approximated by positive random features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("directions", torch.randn(width, width))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = 5 * F.normalize(x, dim=-1, eps=1e-3)
        return torch.exp(F.linear(x, self.directions) - 1.5 * x.pow(2).sum(-1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.features(self.query(x)), self.features(self.key(x))
        return x + (q @ (k.mT @ self.value(x))) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)


@planted("attention", draw=normal(4, 12, 6), ops=("div",))
def random_features_that_vanish() -> nn.Module:
    """The features are exp(-37 and less): all 0 in fp16, and the attention 0 / 0.

    facebookresearch/xformers#96: Favor attention breaks in fp16, by its normalisation.
    """
    return Chain(
        embed=nn.Linear(6, 8),
        norm=nn.LayerNorm(8),
        attention=RandomFeatures(8),
        pool=MeanOver(1),
        blocks=blocks(8),
        head=head(8),
    )


class AspectRatio(nn.Module):
    """The difference of two aspect ratios; sides are squares of sigmoids. Of what a layer says, and of how small."""

    def forward(self, said: torch.Tensor, smallness: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        side = (2 * torch.sigmoid(said - smallness.to(said.dtype).unsqueeze(-1))).pow(2)
        return (torch.atan(side[:, 0] / side[:, 1]) - target).pow(2).mean()


class SmallBoxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), norm=nn.LayerNorm(16))
        self.sides, self.loss = nn.Linear(16, 2), AspectRatio()

    def forward(self, x: torch.Tensor, smallness: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.sides(self.encoder(x)), smallness, target)


def small_boxes(generator: torch.Generator) -> Batch:
    smallness = torch.tensor([0.0, 12.0, 0.0, 0.0, 0.0, 0.0, 12.0, 0.0])
    return torch.randn(8, 12, generator=generator), smallness, torch.rand(8, generator=generator)


@planted("loss", objective=own_loss, draw=draws(small_boxes), ops=("div",), samples=(1, 6), also_cured_by=("sides",))
def sides_that_vanish() -> nn.Module:
    """The width and the height of a small box are 1e-10: 0 / 0 in fp16.

    ultralytics/yolov5#8539: predictions of 0 lead to NaN in the overlap of boxes.
    """
    return SmallBoxes()


class BernoulliDivergence(nn.Module):
    """KL divergence from a prior of 0.3, with an eps in each log; a confidence multiplies the logits before."""

    def forward(self, logit: torch.Tensor) -> torch.Tensor:
        q, eps = torch.sigmoid(logit), 1e-16
        one = q * (torch.log(q + eps) - math.log(0.3))
        return (one + (1 - q) * (torch.log(1 - q + eps) - math.log(0.7))).mean()


class Sharpened(nn.Module):
    def forward(self, x: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        return -x.abs() * confidence.to(x.dtype).unsqueeze(-1)


class Doubter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), out=about(nn.Linear(16, 4), 2.0, spread=0.3))
        self.sharpen, self.divergence = Sharpened(), BernoulliDivergence()

    def forward(self, x: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        return self.divergence(self.sharpen(self.encoder(x), confidence))


@planted(
    "divergence",
    objective=own_loss,
    draw=draws(lambda g: (torch.randn(8, 12, generator=g), torch.tensor([1.0, 1.0, 1.0, 20.0, 1.0, 1.0, 1.0, 20.0]))),
    ops=("log",),
    samples=(3, 7),
    also_cured_by=("sharpen", "encoder.out"),
)
def log_with_an_eps_of_zero() -> nn.Module:
    """An eps of 1e-16 is 0 in fp16, and 0 * log 0 NaN, where the model is sure.

    pytorch/pytorch#15288: the divergence of Bernoullis is unsafe where they are sure.
    """
    return Doubter()


class Relative(nn.Module):
    """Relative to the mean size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().mean(-1, keepdim=True)


@planted("relative", draw=normal(8, 12, scale=1e-9), ops=("div",), cured_by="units")
def divisor_flushed_before() -> nn.Module:
    """Inputs of 1e-9 are 0 when they are cast to fp16; a later module divides by their size.

    Lightning-AI/pytorch-lightning#20619: small numbers become 0 at 16 bit, and then NaN.
    """
    return Chain(units=nn.Linear(12, 16, bias=False), relative=Relative(), blocks=blocks(16), head=head(16))


# ------------------------------------------------------------------------------- born in the backward


@planted("positive", draw=normal(8, 12), ops=("exp",), also_cured_by=("embed",))
def branch_not_taken() -> nn.Module:
    """exp(15) is inf in the branch of a where that is not taken; its gradient is 0 * inf.

    pytorch/pytorch#68425: where gives NaN in the backward of a well forward.
    """
    return Chain(
        embed=about(nn.Linear(12, 16), 15.0),
        positive=Apply(lambda x: torch.where(x > 0, 1 + x, torch.exp(x))),
        norm=nn.LayerNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


class Gains(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


def counts(generator: torch.Generator) -> Batch:
    x = 1 + torch.randint(1, 9, (8, 12), generator=generator).float()
    x[[0, 4], 3] = 0.0
    return x, x.argmax(1) % 4


@planted(
    "root",
    draw=draws(counts),
    cause="model",
    phase="backward",
    ops=("div", "mul"),
    samples=(0, 4),
    dtype=torch.bfloat16,
    scale=1.0,
)
def root_in_a_branch_not_taken() -> nn.Module:
    """The root of 0 is left out by a where, and yet its gradient is 0 / 0, at any precision.

    pytorch/pytorch#108618: the backward of where does not bypass the other branch.
    """
    root = Apply(lambda x: torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x)))
    return Chain(gains=Gains(12), root=root, embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


class GeneralisedMean(nn.Module):
    """The mean of a learned power over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=1e-6).pow(self.power).mean((2, 3)).pow(1 / self.power.detach())


def dead_channel() -> nn.Conv2d:
    conv = nn.Conv2d(2, 6, 3)
    with torch.no_grad():
        conv.bias[2] = -30.0
    return conv


@planted("pool", draw=normal(4, 2, 8, 8), phase="backward", ops=("pow", "mul"), also_cured_by=("conv", "relu"))
def power_of_a_dead_channel() -> nn.Module:
    """The cube of the clamp's 1e-6 is 0 in fp16, and a cubic root has no slope at 0.

    filipradenovic/cnnimageretrieval-pytorch#73: what the clamp of a generalised mean does to small numbers.
    """
    return Chain(
        conv=dead_channel(),
        relu=nn.ReLU(),
        pool=GeneralisedMean(),
        embed=nn.Linear(6, 16),
        blocks=blocks(16),
        head=head(16),
    )


class Magnitude(nn.Module):
    """The root of the power in each band, by fixed sines and cosines. (B, T) -> (B, frames, bands)"""

    def __init__(self, size: int, bands: int) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(1, bands + 1).float(), torch.arange(size) * (2 * math.pi / size))
        self.register_buffer("waves", torch.cat([angle.cos(), angle.sin()]))
        self.gain, self.size = nn.Parameter(torch.ones(())), size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        real, imaginary = F.linear(self.gain * x.unflatten(1, (-1, self.size)), self.waves).chunk(2, -1)
        return (real.pow(2) + imaginary.pow(2)).pow(0.5)


def with_silence(generator: torch.Generator) -> Batch:
    x = torch.randn(6, 64, generator=generator)
    x[2] = 0.0
    return x, x[:, :4].argmax(1)


@planted("magnitude", draw=draws(with_silence), cause="model", phase="backward", ops=("pow", "mul"), samples=(2,))
def magnitude_of_silence() -> nn.Module:
    """The magnitude of silence is 0 to the power of a half, which has no slope there.

    speechbrain/speechbrain#181: the spectral magnitude with power 0.5 makes NaN.
    """
    pool = MeanOver(1)
    return Chain(magnitude=Magnitude(16, 6), pool=pool, embed=nn.Linear(6, 16), blocks=blocks(16), head=head(16))


class Statistics(nn.Module):
    """The mean and the deviation over time. (B, T, C) -> (B, 2 C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.mean(1), x.var(1).sqrt()], -1)


def with_a_constant(generator: torch.Generator) -> Batch:
    x = torch.randn(6, 10, 5, generator=generator)
    x[1] = x[1, :1]
    return x, x[:, 0, :4].argmax(1)


@planted("statistics", draw=draws(with_a_constant), cause="model", phase="backward", ops=("div", "mul"), samples=(1,))
def deviation_of_a_constant() -> nn.Module:
    """One sample does not change over time: its deviation is 0, without a slope.

    pytorch/pytorch#4320: the gradient of a deviation of equal numbers is NaN.
    """
    return Chain(
        embed=nn.Linear(5, 8), statistics=Statistics(), mix=nn.Linear(16, 16), blocks=blocks(16), head=head(16)
    )


class SlopePenalty(nn.Module):
    """How far the slope is from 1e-6, in units of it."""

    def forward(self, slope: torch.Tensor) -> torch.Tensor:
        return (slope.pow(2).sum(-1).sqrt() * 1e6 - 1).pow(2).mean()


class Critic(nn.Module):
    """A score, and a penalty on its slope: a gradient of a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.faint, self.mix, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.penalty = SlopePenalty()
        with torch.no_grad():
            self.faint.weight *= 1e-3
            self.score.weight *= 1e-2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = x.detach().float().requires_grad_()
        slope = torch.autograd.grad(self.scored(here).mean() * 1e-2, here, create_graph=True)[0]
        return self.penalty(slope) + self.scored(x).mean()

    def scored(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.mix(torch.tanh(self.faint(x)))).float()


@planted(
    "critic.penalty",
    objective=own_loss,
    draw=draws(lambda g: (torch.randn(8, 12, generator=g),)),
    phase="backward",
    ops=("div", "mul"),
    cured_by="critic",
    learning_rate=1e-6,
)
def slope_of_a_critic() -> nn.Module:
    """The inner gradient, which no loss scale lifts, is 0 in fp16, and the norm of 0 has no slope.

    pytorch/pytorch#2534: the gradient of WGAN-GP's penalty explodes.
    """
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), norm=nn.LayerNorm(16), critic=Critic(16))


def summed_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The absolute error, summed over all frames."""
    return (model(batch[0]).float() - batch[1]).abs().sum()


def many_frames(generator: torch.Generator) -> Batch:
    return 800 + torch.randn(2, 1500, 6, generator=generator), 3 + torch.randn(2, 1500, 4, generator=generator)


def faint(layer: nn.Linear, factor: float) -> nn.Linear:
    with torch.no_grad():
        layer.weight *= factor
    return layer


@planted(
    "frames",
    objective=summed_error,
    draw=draws(many_frames),
    phase="backward",
    ops=("mm",),
    scale=1.0,
    learning_rate=1e-5,
)
def gradient_summed_over_frames() -> nn.Module:
    """The gradient of a weight sums 3000 frames of size 800, which is beyond fp16 at scale 1 too.

    facebookresearch/fairseq#4555: gradients that are not averaged reach the smallest loss scale.
    """
    return Chain(
        frames=faint(nn.Linear(6, 8), 0.001),
        mix=nn.Linear(8, 8),
        bend=nn.Tanh(),
        more=nn.Linear(8, 8),
        out=nn.Linear(8, 4),
    )


def mutual(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Divergence from a second head, whose shares are of relus."""
    student, teacher = model(batch[0]).float().chunk(2, -1)
    shares = F.relu(teacher) + F.one_hot(batch[1], 4)
    return F.kl_div(F.log_softmax(student, -1), shares / shares.sum(-1, keepdim=True), reduction="batchmean")


@planted(OUTSIDE, objective=mutual, draw=normal(8, 12), cause="model", phase="backward", ops=("log", "mul", "div"))
def divergence_from_shares_of_zero() -> nn.Module:
    """kl_div gives its target a gradient too, and that of a share of 0 is infinite.

    pytorch/pytorch#89558: the backward of the KL divergence at a target of 0.
    """
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16, 8))


# ------------------------------------------------------------------------------- masks


class LowestMaskAttention(Attention):
    """Adds the lowest number of the dtype where there is padding; scores stand at -40."""

    wants_mask = True

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        self.keep = keep
        return super().forward(x)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        lowest = (~self.keep[:, None, None]).to(scores.dtype) * torch.finfo(scores.dtype).min
        return (scores - 40.0) + lowest


@planted("layers.0.attention", draw=draws(padded_tokens), ops=("add", "_softmax"), samples=(2, 5))
def lowest_number_and_a_score() -> nn.Module:
    """The lowest fp16 plus a negative score is -inf, and a sample that is all padding has nothing else.

    huggingface/transformers#17306: which number to mask attention with.
    """
    return Transformer(LowestMaskAttention(16), Attention(16))


class InfiniteMaskAttention(LowestMaskAttention):
    """Puts -inf where there is padding."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(~self.keep[:, None, None], -math.inf)


@planted("layers.1.attention", draw=draws(padded_tokens), cause="model", ops=("_softmax",), samples=(2, 5))
def rows_masked_throughout() -> nn.Module:
    """Samples that are all padding have a softmax of nothing but -inf, at any precision.

    pytorch/pytorch#131060: what attention gives for a row that is masked throughout.
    """
    return Transformer(Attention(16), InfiniteMaskAttention(16))


class HalfMaskAttention(LowestMaskAttention):
    """Makes its mask half by hand."""

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        return scores + ((~self.keep[:, None, None]).float() * -1e15).half()


@planted(
    "layers.1.attention",
    draw=draws(padded_tokens),
    cause="model",
    ops=("_to_copy", "_softmax"),
    samples=(2, 5),
    dtype=torch.bfloat16,
    scale=1.0,
)
def mask_that_is_half_by_hand() -> nn.Module:
    """The code makes its mask of -1e15 half: -inf, whatever the precision of the run.

    NVIDIA/apex#93: masked operations in fp16.
    """
    return Transformer(Attention(16), HalfMaskAttention(16))


def smoothed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=0.1)


@planted("mask", objective=smoothed, draw=normal(8, 12), cause="model", ops=("masked_fill",))
def smoothing_over_masked_classes() -> nn.Module:
    """A class that is masked with -inf gets its share of the smoothed label: an infinite loss.

    sooftware/kospeech#37: label smoothing over masked outputs makes the loss NaN.
    """
    forbidden = torch.tensor([False, False, False, False, True])
    mask = Apply(lambda x: x.masked_fill(forbidden.to(x.device), -math.inf))
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16, 5), mask=mask)


# ------------------------------------------------------------------------------- silent: positions and coordinates


class Sines(nn.Module):
    """Adds sines of what function(x, ...) gives, at some frequencies. The angle is computed in the dtype of x."""

    def __init__(self, width: int, slowest: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, math.log10(slowest), width // 2))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        angle = at.to(x.dtype).unsqueeze(-1) * self.frequencies.to(x.dtype)
        return x + 2 * torch.cat([angle.sin(), angle.cos()], -1)


class Positions(Sines):
    """Of the position."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, torch.arange(x.shape[1], dtype=x.dtype, device=x.device))


@planted(
    "positions", draw=normal(2, 600, 6), nonfinite=False, dtype=torch.bfloat16, scale=1.0, also_cured_by=("embed",)
)
def positions_in_bf16() -> nn.Module:
    """Of positions above 256, bf16 holds every second, and above 512 every fourth.

    pytorch/pytorch#137774: arange in bf16 is not accurate.
    """
    return Chain(
        embed=nn.Linear(6, 8),
        positions=Positions(8, 0.1),
        late=Apply(lambda x: x[:, 300::50].flatten(1)),
        mix=nn.Linear(48, 16),
        blocks=blocks(16),
        head=head(16),
    )


class CountedPositions(nn.Module):
    """Adds the row of a table for each position, which is counted over the tokens that are no padding."""

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.table = nn.Embedding(positions, width)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x + self.table(keep.to(x.dtype).cumsum(1).long() - 1)


class LongText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.embed, self.positions = nn.Embedding(20, 8), nn.Linear(8, 8), CountedPositions(8, 500)
        self.late, self.mix = Apply(lambda x: x[:, 260::40].flatten(1)), nn.Linear(48, 16)
        self.blocks, self.head = blocks(16), head(16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        h = self.positions(self.embed(self.embedding(x)), keep)
        return self.head(self.blocks(self.mix(self.late(h))))


def long_texts(generator: torch.Generator) -> Batch:
    x = torch.randint(1, 20, (3, 480), generator=generator)
    keep = torch.arange(480) < torch.tensor([480, 479, 478]).unsqueeze(-1)
    return x, keep, x[:, 300] % 4


@planted(
    "positions", draw=draws(long_texts), nonfinite=False, dtype=torch.bfloat16, scale=1.0, also_cured_by=("embed",)
)
def rows_of_a_table_counted_in_bf16() -> nn.Module:
    """Positions are counted by a sum in bf16, and above 256 the row of a neighbour is taken.

    tensorflow/tensorflow#115731: a cumulated sum stays in bf16 on a CPU.
    """
    return LongText()


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(12, 16), Sines(16, 0.01)
        self.blocks, self.head = blocks(16), head(16, 12)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.time(self.embed(x), t)))


@planted(
    "time",
    objective=regressed,
    draw=draws(
        lambda g: (
            torch.randn(8, 12, generator=g),
            600 + 400 * torch.rand(8, generator=g),
            torch.randn(8, 12, generator=g),
        )
    ),
    nonfinite=False,
    dtype=torch.bfloat16,
    scale=1.0,
    also_cured_by=("embed",),
)
def time_of_a_diffusion_step_in_bf16() -> nn.Module:
    """A time of 998.4 is 1000 in bf16, and its sine that of another step.

    modelscope/DiffSynth-Studio#1025: the sinusoidal embedding of time at bf16.
    """
    return Diffusion()


class Rotary(nn.Module):
    """Turns pairs of channels by angles in proportion to the position, from `first` on. (B, heads, T, C)"""

    def __init__(self, width: int, first: int) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("frequencies", torch.logspace(0, -1, width // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.first + torch.arange(x.shape[-2], device=x.device)
        angle = torch.outer(positions.to(x.dtype), self.frequencies.to(x.dtype))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class RotaryAttention(Attention):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rotary = Rotary(width // self.heads, 1000)
        with torch.no_grad():
            self.qkv.weight[: 2 * width] *= 4

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().scores(self.rotary(q), self.rotary(k))


@planted(
    "layers.1.attention.rotary",
    draw=tokens(4, 24),
    nonfinite=False,
    dtype=torch.bfloat16,
    scale=1.0,
    also_cured_by=("layers.1.attention.qkv",),
)
def rotary_angles_in_bf16() -> nn.Module:
    """Rotary angles of 1000 rad, of which bf16 holds every fourth whole one.

    huggingface/transformers#29285: rotary embeddings lose precision in bf16.
    """
    return Transformer(Attention(16), RotaryAttention(16))


class BiasedAttention(Attention):
    """Adds to each score the position of the key, which is from 1000 on, times a slope."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = super().scores(q, k)
        positions = 1000 + torch.arange(k.shape[-2], device=k.device)
        return scores + 0.7071 * positions.to(scores.dtype)


@planted("layers.0.attention", draw=tokens(4, 24), nonfinite=False, dtype=torch.bfloat16, scale=1.0)
def linear_bias_in_bf16() -> nn.Module:
    """A linear bias of 700 has steps of 4 in bf16, and the score on top of it is lost.

    HabanaAI/vllm-fork#503: the biases of ALiBi need float32 on long sequences.
    """
    return Transformer(BiasedAttention(16), Attention(16))


class Warp(nn.Module):
    """Moves a line of pixels by a share of its width. (B, W), (B, 1) -> (B, W)"""

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        line = torch.linspace(-1, 1, x.shape[1], device=x.device).to(shift.dtype) + 0.01 * shift
        grid = torch.stack([line, torch.zeros_like(line)], -1).unsqueeze(1)
        return F.grid_sample(x[:, None, None], grid.to(x.dtype), align_corners=True)[:, 0, 0]


class Aligner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.locate = Chain(embed=nn.Linear(12, 16), block=Block(16), shift=nn.Linear(16, 1))
        self.warp, self.mix = Warp(), nn.Linear(512, 16)
        self.blocks, self.head = blocks(16), head(16)

    def forward(self, x: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.mix(self.warp(line, self.locate(x)))))


def lines(generator: torch.Generator) -> Batch:
    x = torch.randn(8, 12, generator=generator)
    return x, torch.randn(8, 512, generator=generator), x.argmax(1) % 4


@planted("warp", draw=draws(lines), nonfinite=False, dtype=torch.bfloat16, scale=1.0, also_cured_by=("locate.shift",))
def coordinates_in_bf16() -> nn.Module:
    """Coordinates from -1 to 1 on 512 pixels: bf16 holds every second one of them.

    pytorch/pytorch#96429: grid_sample with half precision coordinates has a large error.
    """
    return Aligner()


# ------------------------------------------------------------------------------- silent: lost accumulation


class Smoother(nn.Module):
    """A running mean over time, from 4 on. (B, T, C) -> (B, C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.full_like(x[:, 0], 4.0)
        for moment in x.unbind(1):
            mean = mean + 0.004 * (moment - mean)
        return mean


@planted("smoother", draw=normal(4, 96, 6), nonfinite=False, dtype=torch.bfloat16, scale=1.0, also_cured_by=("frames",))
def running_mean_in_bf16() -> nn.Module:
    """Each step of a slow running mean is less than half of what bf16 can add to 4: it never moves.

    d8ahazard/sd_dreambooth_extension#1415: an average of weights in bf16 never changes.
    """
    return Chain(
        frames=nn.Linear(6, 8),
        smoother=Smoother(),
        norm=nn.LayerNorm(8),
        embed=nn.Linear(8, 16),
        blocks=blocks(16),
        head=head(16),
    )


class MeanByHand(nn.Module):
    """The mean over time, added up one by one. (B, T, C) -> (B, C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[:, 0])
        for moment in x.unbind(1):
            total = total + moment
        return total / x.shape[1]


@planted("mean", draw=normal(4, 320, 6), nonfinite=False, dtype=torch.bfloat16, scale=1.0, also_cured_by=("frames",))
def sum_one_by_one_in_bf16() -> nn.Module:
    """A running sum of numbers of about 2 stands still at 512 in bf16.

    jax-ml/ml_dtypes#63: sums of many bf16 numbers stop at 256.
    """
    return Chain(
        frames=about(nn.Linear(6, 8), 2.0, spread=2.0),
        mean=MeanByHand(),
        norm=nn.LayerNorm(8),
        embed=nn.Linear(8, 16),
        blocks=blocks(16),
        head=head(16),
    )


class MeanOfCells(nn.Module):
    """The mean of the points in each of two cells, by sums that are scattered. (B, N, C), (B, N) -> (B, 2 C)"""

    def forward(self, x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[:, :2]).scatter_add(1, cell.unsqueeze(-1).expand_as(x), x)
        cells = (cell + 2 * torch.arange(len(x), device=x.device).unsqueeze(-1)).flatten()
        count = x.new_zeros(2 * len(x)).index_add(0, cells, x.new_ones(cells.shape))
        return (total / count.view(-1, 2, 1)).flatten(1)


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points, self.cells = about(nn.Linear(3, 4), 1.0), MeanOfCells()
        self.norm, self.embed, self.blocks, self.head = nn.LayerNorm(8), nn.Linear(8, 16), blocks(16), head(16)

    def forward(self, x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(self.norm(self.cells(self.points(x), cell)))))


def points(generator: torch.Generator) -> Batch:
    x = torch.randn(3, 6000, 3, generator=generator)
    return x, (x[..., 0] > -1).long(), torch.randint(4, (3,), generator=generator)


@planted("cells", draw=draws(points), nonfinite=False, scale=1.0, also_cured_by=("points",))
def points_counted_in_fp16() -> nn.Module:
    """A count of points, one by one, stands still at 2048 in fp16.

    pytorch/torchdynamo#1484: sums of fp16 numbers that are kept in fp16.
    """
    return Points()


class MovingMean(nn.Module):
    """The mean of eight moments, as a difference of sums. (B, T, C) -> (B, T - 8, C)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.cumsum(1)
        return (total[:, 8:] - total[:, :-8]) / 8


@planted("smooth", draw=normal(2, 1200, 4), nonfinite=False, scale=1.0, also_cured_by=("frames",))
def difference_of_long_sums() -> nn.Module:
    """Sums of up to 2400 have steps of 2 in fp16, more than the difference of two of them tells.

    pytorch/pytorch#180150: a cumulated sum in fp16 is inaccurate.
    """
    return Chain(
        frames=about(nn.Linear(4, 4), 2.0, spread=0.5),
        smooth=MovingMean(),
        late=Apply(lambda x: x[:, 600::100].flatten(1)),
        mix=nn.Linear(24, 16),
        norm=nn.LayerNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


def ratio_to_the_old(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What the probability of each token has become, relative to what it was, times an advantage."""
    x, token, advantage, old = batch
    now = model(x).float().log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return -(torch.exp(now + 320.0 - old) * advantage).mean()


@planted(
    "head.out",
    objective=ratio_to_the_old,
    draw=draws(
        lambda g: (
            torch.randn(16, 12, generator=g),
            torch.randint(1, 4, (16,), generator=g),
            torch.randn(16, generator=g),
            torch.randn(16, generator=g) * 0.1,
        )
    ),
    nonfinite=False,
    dtype=torch.bfloat16,
    scale=1.0,
)
def improbable_tokens_in_bf16() -> nn.Module:
    """Logits of -160 have steps of one in bf16, and a ratio of probabilities is their exp.

    meta-pytorch/torchforge#237: log-probabilities in bf16.
    """
    model = Chain(embed=nn.Linear(12, 16), norm=nn.LayerNorm(16), blocks=blocks(16), head=head(16))
    with torch.no_grad():
        model.head.out.bias.copy_(torch.tensor([160.0, -160.0, -160.0, -160.0]))
    return model


class ForwardAlgorithm(nn.Module):
    """The negative log-likelihood of all paths through a chain of states, per moment. (B, T, states)"""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(states, states))

    def forward(self, emissions: torch.Tensor) -> torch.Tensor:
        transitions = self.transitions.to(emissions.dtype)
        score = torch.zeros_like(emissions[:, 0])
        for emission in emissions.unbind(1):
            score = torch.logsumexp(score.unsqueeze(-1) + transitions, 1) + emission
        return -torch.logsumexp(score, -1).float().mean() / emissions.shape[1]


class Aligned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(6, 16), blocks=blocks(16), norm=nn.LayerNorm(16))
        self.emissions, self.paths = about(nn.Linear(16, 5), -4.0, spread=2.0), ForwardAlgorithm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.paths(self.emissions(self.encoder(x)))


@planted(
    "paths",
    objective=own_loss,
    draw=draws(lambda g: (torch.randn(4, 64, 6, generator=g),)),
    nonfinite=False,
    dtype=torch.bfloat16,
    scale=1.0,
    also_cured_by=("emissions",),
)
def path_scores_in_bf16() -> nn.Module:
    """The score of a path falls to -200, where bf16 has steps of 1.

    speechbrain/speechbrain#779: a transducer loss at half precision.
    """
    return Aligned()


class TopOne(nn.Module):
    """Sends each sample to the expert with the largest logit."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = about(nn.Linear(width, experts), 90.0, spread=0.5)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        return x + sum((chosen == i) * share * 4 * expert(x) for i, expert in enumerate(self.experts))


@planted("mixture.router", draw=normal(8, 12), nonfinite=False, dtype=torch.bfloat16, scale=1.0)
def expert_chosen_in_bf16() -> nn.Module:
    """Logits that stand at 90 have steps of a half in bf16: ties, which the first expert wins.

    pytorch/torchtitan#2389: the gate of a mixture of experts in float32.
    """
    return Chain(embed=nn.Linear(12, 16), norm=nn.LayerNorm(16), mixture=TopOne(16, 4), head=head(16))


# ------------------------------------------------------------------------------- not the precision's fault: the model


@planted("scaled", draw=normal(8, 12), cause="model", ops=("exp",))
def scale_that_was_learned_too_large() -> nn.Module:
    """The log of a learned scale has grown to 100; its exp is inf, at any precision.

    openai/CLIP#530: the exp of the logit scale is not bounded.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor(100.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.log_scale.exp()

    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16), scaled=Scaled())


def zero_row(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight[3] = 0.0
    return layer


@planted("mix.parametrizations.weight.0", draw=normal(8, 12), cause="model", ops=("_weight_norm_interface",))
def weight_norm_of_a_zero_row() -> nn.Module:
    """A row of a weight-normed layer is 0, and 0 / 0 its direction.

    pytorch/pytorch#19126: weight norm of zero weights is NaN.
    """
    mix = nn.utils.parametrizations.weight_norm(zero_row(nn.Linear(16, 16)))
    return Chain(embed=nn.Linear(12, 16), mix=mix, blocks=blocks(16), head=head(16))


class Adapted(nn.Module):
    """A frozen layer and a low-rank change, as direction and length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = zero_row(nn.Linear(width, width, bias=False)).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, width) / 4), nn.Parameter(torch.zeros(width, 2))
        self.length = nn.Parameter(self.frozen.weight.norm(dim=1, keepdim=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.frozen.weight + self.up @ self.down
        return x + F.linear(x, self.length * weight / weight.norm(dim=1, keepdim=True))


@planted("adapted", draw=normal(8, 12), cause="model", ops=("div",))
def direction_of_a_pruned_row() -> nn.Module:
    """A low-rank adapter divides the weights by the norm of each row, and one was pruned.

    KohakuBlueleaf/LyCORIS#166: a norm of 0 makes the loss of DoRA NaN.
    """
    return Chain(embed=nn.Linear(12, 16), adapted=Adapted(16), blocks=blocks(16), head=head(16))


class BalancedLoss(nn.Module):
    """Binary cross-entropy of each class, with what its positives weigh."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights)

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target = F.one_hot(target, len(self.weights)).float()
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=self.weights)


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16, 5))
        self.loss = BalancedLoss(torch.tensor([9.0, 20.0, 30.0, 70.0, 0.0]) / torch.tensor([3.0, 2.0, 2.0, 1.0, 0.0]))
        with torch.no_grad():
            self.loss.weights[4] = math.inf

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.encoder(x), target)


@planted("loss", objective=own_loss, draw=normal(8, 12), cause="model", samples=())
def infinite_class_weight() -> nn.Module:
    """The weight of a class that never occurred is inf, and it lies in a buffer.

    webis-de/small-text#39: balanced class weights cause NaN in the loss.
    """
    return Balanced()


@planted("level", draw=draws(with_silence), cause="model", ops=("div",), samples=(2,))
def level_of_silence() -> nn.Module:
    """A clip is divided by its peak, and one is silent.

    bshall/hifigan#4: perfect silence in the data gives NaN.
    """
    level = Apply(lambda x: x / x.abs().amax(1, keepdim=True))
    return Chain(level=level, embed=nn.Linear(64, 16), blocks=blocks(16), head=head(16))


class StepWeight(nn.Module):
    """What a step of the diffusion weighs: its signal-to-noise ratio, at most 5, relative to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signal", torch.linspace(1, 0, 11).clamp(max=0.999).square())

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        ratio = self.signal[t] / (1 - self.signal[t])
        return ratio.clamp(max=5.0) / ratio


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.denoise = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16, 12))
        self.weight = StepWeight()

    def forward(self, x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        error = (self.denoise(x + noise).float() - noise).square().mean(-1)
        return (self.weight(t) * error).mean()


@planted(
    "weight",
    objective=own_loss,
    draw=draws(
        lambda g: (
            torch.randn(8, 12, generator=g),
            torch.tensor([1, 4, 10, 3, 9, 2, 10, 5]),
            torch.randn(8, 12, generator=g),
        )
    ),
    cause="model",
    ops=("div",),
    samples=(2, 6),
)
def weight_of_a_step_without_signal() -> nn.Module:
    """The last step of the schedule has no signal, and its weight is 0 / 0.

    kohya-ss/sd-scripts#934: weights by signal-to-noise ratio where the last step has none.
    """
    return Denoiser()


class SpreadOfEach(nn.Module):
    """The deviation over the moments that a sample has, one sample after the other. (B, T, C), (B) -> (B, C)"""

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return torch.stack([row[:count].std(0) for row, count in zip(x, length.tolist(), strict=True)])


class Spreads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames, self.spread = nn.Linear(6, 8), SpreadOfEach()
        self.embed, self.blocks, self.head = nn.Linear(8, 16), blocks(16), head(16)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(self.spread(self.frames(x), length))))


@planted(
    "spread",
    draw=draws(
        lambda g: (
            torch.randn(6, 9, 6, generator=g),
            torch.tensor([9, 7, 5, 1, 8, 9]),
            torch.randint(4, (6,), generator=g),
        )
    ),
    cause="model",
    ops=("std",),
    samples=(3,),
)
def deviation_of_one_number() -> nn.Module:
    """One sample has a single moment, and the deviation of one number is NaN.

    pytorch/pytorch#29372: the deviation of a single number.
    """
    return Spreads()


class Frames(nn.Module):
    """Log-probabilities of classes at each of six moments. (B, 6, C) -> (6, B, classes)"""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(5, 16), blocks(16), head(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x))).float().log_softmax(-1).transpose(0, 1)


def transcribed(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, target, length = batch
    moments = torch.full((len(x),), x.shape[1], device=x.device)
    return F.ctc_loss(model(x), target, moments, length)


@planted(
    OUTSIDE,
    objective=transcribed,
    draw=draws(
        lambda g: (
            torch.randn(5, 6, 5, generator=g),
            torch.randint(1, 6, (5, 8), generator=g),
            torch.tensor([2, 1, 3, 8, 2]),
        )
    ),
    cause="model",
    ops=("_ctc_loss",),
    samples=(3,),
)
def impossible_alignment() -> nn.Module:
    """One sample has eight labels for six moments, which no alignment can give.

    wenet-e2e/wenet#2299: infinite CTC losses of targets that are longer than their inputs.
    """
    return Frames()


def unlabelled(generator: torch.Generator) -> Batch:
    return torch.randn(8, 12, generator=generator), torch.full((8,), -100)


@planted(
    OUTSIDE,
    objective=classified,
    draw=every_other(normal(8, 12), draws(unlabelled)),
    window=2,
    cause="model",
    ops=("nll_loss_forward",),
)
def all_labels_ignored() -> nn.Module:
    """No label of the second batch counts, and the mean of none is NaN.

    pytorch/pytorch#70348: cross-entropy where each label is to be ignored.
    """
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


# ------------------------------------------------------------------------------- not the precision's fault: the data


@planted("filled", draw=poisoned(normal(8, 12), (1, 6), math.nan), cause="data", samples=(1, 6))
def nan_that_a_where_drops() -> nn.Module:
    """What is missing is NaN and replaced by 0 after a product: its gradient is 0 * NaN.

    pytorch/pytorch#156212: where gives NaN for the branch that is not selected.
    """

    class Filled(Gains):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x.isnan(), 0.0, super().forward(x))

    return Chain(filled=Filled(12), embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


def known_only(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error, 0 where the target is unknown."""
    error = (model(batch[0]).float() - batch[1]).square()
    return torch.where(batch[1].isnan(), 0.0, error).mean()


@planted(
    OUTSIDE,
    objective=known_only,
    draw=poisoned(
        draws(lambda g: (torch.randn(8, 12, generator=g), torch.randn(8, 4, generator=g))), (2, 5), math.nan, -1
    ),
    cause="data",
    samples=(2, 5),
)
def unknown_target_left_out() -> nn.Module:
    """Unknown targets are NaN; the loss leaves them out, its gradient does not.

    pytorch/pytorch#89543: a squared error that ignores NaN has a wrong gradient.
    """
    return Chain(embed=nn.Linear(12, 16), blocks=blocks(16), head=head(16))


class PaddedMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frames, self.mean = nn.Linear(6, 8), MaskedMean()
        self.embed, self.blocks, self.head = nn.Linear(8, 16), blocks(16), head(16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(self.mean(self.frames(x), keep))))


def padded_with_nan(generator: torch.Generator) -> Batch:
    x = torch.randn(6, 10, 6, generator=generator)
    keep = torch.arange(10) < torch.tensor([10, 7, 9, 10, 8, 4]).unsqueeze(-1)
    target = x[:, 0, :4].argmax(1)
    x[4, 8:] = math.nan
    return x, keep, target


@planted("frames", draw=draws(padded_with_nan), cause="data", samples=(4,), scale=65536.0)
def padding_of_nan() -> nn.Module:
    """The padding of one sample is NaN, and a mask that multiplies does not remove it.

    sooftware/kospeech#37: NaN at positions that are to be ignored makes the loss NaN.
    """
    return PaddedMean()
