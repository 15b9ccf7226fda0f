"""Networks of today's kinds in which nothing is wrong at any precision: no instrument may name a fault in them.

Some hold what looks like one: masks of -inf, a row that is masked throughout and left out, an overflow that changes
nothing, a router, a learned temperature.
"""

from __future__ import annotations

import functools
import math

import torch
from planted_faults import (
    OUTSIDE,
    Attention,
    Batch,
    Block,
    Chain,
    ConvBlock,
    MeanOver,
    Planted,
    Transformer,
    blocks,
    draws,
    head,
    normal,
    own_loss,
    padded_tokens,
    plant,
    regressed,
    tokens,
)
from torch import nn
from torch.nn import functional as F

HEALTHY: dict[str, Planted] = {}
"""The networks, by name."""

healthy = functools.partial(plant, OUTSIDE, into=HEALTHY, nonfinite=False, cause="none")


@healthy(draw=tokens(6, 16))
def causal_language_model() -> nn.Module:
    """Causal attention with its -inf."""
    return Transformer(Attention(16), Attention(16))


@healthy(draw=normal(6, 3, 12, 12))
def convolutions_with_group_norm() -> nn.Module:
    """Convolutions, group norm, a mean over pixels."""
    return Chain(stem=ConvBlock(3, 8), stage=ConvBlock(8, 8), pool=MeanOver(2, 3), head=head(8))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(6, 12, batch_first=True), head(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


@healthy(draw=normal(6, 10, 6))
def gated_recurrent_unit() -> nn.Module:
    """torch's GRU, and its last state."""
    return Recurrent()


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a gated depthwise convolution, and the other half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last, self.attention = Block(width), Block(width), Attention(width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.gate = nn.Linear(width, 2 * width)
        self.depthwise, self.mix = nn.Conv1d(width, width, 5, padding=2, groups=width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.attention(self.norms[0](x))
        gated = F.glu(self.gate(self.norms[1](x)), -1).mT
        return self.norms[2](self.last(x + self.mix(F.silu(self.depthwise(gated)).mT)))


@healthy(draw=normal(4, 12, 6))
def conformer() -> nn.Module:
    """Convolution and attention over frames."""
    return Chain(embed=nn.Linear(6, 16), block=ConformerBlock(16), pool=MeanOver(1), head=head(16))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 10, 16) * 0.02)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = head(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


@healthy(draw=normal(4, 3, 12, 12))
def vision_transformer() -> nn.Module:
    """torch's own encoder layers over patches."""
    return VisionTransformer()


class Contrastive(nn.Module):
    """Each view is to find its other among all, at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), blocks=blocks(16), out=nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = (F.normalize(self.encoder(it).float(), dim=-1) for it in (a, b))
        return F.cross_entropy(self.log_scale.exp() * (a @ b.mT), torch.arange(len(a), device=a.device))


def two_views(generator: torch.Generator) -> Batch:
    x = torch.randn(12, 12, generator=generator)
    return x, x + 0.3 * torch.randn(12, 12, generator=generator)


@healthy(objective=own_loss, draw=draws(two_views))
def contrastive_with_a_temperature() -> nn.Module:
    """The similarities of normalised vectors, times a learned scale."""
    return Contrastive()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(embed=nn.Linear(12, 16), block=Block(16), out=nn.Linear(16, 8))
        self.decoder = Chain(embed=nn.Linear(4, 16), block=Block(16), out=nn.Linear(16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).float().chunk(2, -1)
        sample = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        return F.mse_loss(self.decoder(sample), x) + 0.01 * divergence.mean()


@healthy(objective=own_loss, draw=draws(lambda g: (torch.randn(16, 12, generator=g),)), learning_rate=1e-2)
def variational_autoencoder() -> nn.Module:
    """A sample by the reparametrisation trick, drawn in fp32."""
    return Variational()


class Diffusion(nn.Module):
    """Predicts the noise; the time is embedded in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -2, 8))
        self.register_buffer("kept", torch.linspace(0.999, 0.01, 100))
        self.embed, self.time = nn.Linear(12, 16), nn.Linear(16, 16)
        self.blocks, self.head = blocks(16), head(16, 12)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        kept = self.kept[t].unsqueeze(-1)
        angle = t.float().unsqueeze(-1) * self.frequencies
        h = self.embed(kept.sqrt() * x + (1 - kept).sqrt() * noise)
        h = h + self.time(torch.cat([angle.sin(), angle.cos()], -1))
        return F.mse_loss(self.head(self.blocks(h)).float(), noise)


@healthy(
    objective=own_loss,
    draw=draws(lambda g: (torch.randn(16, 12, generator=g), torch.randint(100, (16,), generator=g))),
    learning_rate=1e-2,
)
def diffusion_loss() -> nn.Module:
    """The squared error of the noise that was added."""
    return Diffusion()


class LowRank(nn.Module):
    """A frozen layer and a low-rank change that begins at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + 2 * self.up(self.down(x))


@healthy(draw=normal(12, 12))
def low_rank_adapters() -> nn.Module:
    """Adapters whose change is 0 as yet."""
    return Chain(embed=nn.Linear(12, 16), first=LowRank(16), bend=nn.GELU(), second=LowRank(16), head=head(16))


class Experts(nn.Module):
    """The two experts of each sample, by what a router says in fp32."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.experts = nn.ModuleList(Block(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router)
        best, chosen = logits.topk(2, -1)
        shares = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        return sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@healthy(draw=normal(12, 12))
def mixture_of_two_experts() -> nn.Module:
    """A mixture of experts with a router in fp32."""
    return Chain(embed=nn.Linear(12, 16), norm=nn.LayerNorm(16), experts=Experts(16, 4), head=head(16))


class FusedAttention(Attention):
    """torch's own attention, with a mask that leaves some samples nothing."""

    wants_mask = True

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q, k, v = (it.unflatten(-1, (self.heads, -1)).transpose(1, 2) for it in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
        return self.out(found.transpose(1, 2).flatten(2))


@healthy(draw=draws(padded_tokens))
def fused_attention_over_padding() -> nn.Module:
    """Rows that are masked throughout give 0 in torch's own attention."""
    return Transformer(FusedAttention(16), FusedAttention(16))


class Capped(nn.Module):
    """A linear layer with a bound: for half of its channels the bound is all that is left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, width)
        with torch.no_grad():
            self.wide.weight[width // 2 :] = 0.0
            self.wide.bias[width // 2 :] = 2e5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.wide(x))


@healthy(draw=normal(12, 12), scale=256.0)
def bound_of_an_overflow() -> nn.Module:
    """The tanh of 2e5 and of inf are the same: an overflow that does no harm."""
    return Chain(embed=nn.Linear(12, 16), norm=nn.LayerNorm(16), capped=Capped(16), blocks=blocks(16), head=head(16))


class Segmenter(nn.Module):
    """Two resolutions and a way across, as a small U-net."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = ConvBlock(2, 6), ConvBlock(6, 8)
        self.up, self.join, self.out = nn.ConvTranspose2d(8, 6, 2, stride=2), ConvBlock(12, 6), nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.fine(x)
        coarse = self.up(self.coarse(F.max_pool2d(fine, 2)))
        return self.out(self.join(torch.cat([fine, coarse], 1)))


@healthy(
    objective=regressed,
    draw=draws(lambda g: (torch.randn(3, 2, 8, 8, generator=g), torch.randn(3, 3, 8, 8, generator=g))),
)
def small_u_net() -> nn.Module:
    """Convolutions down and up, with a way across."""
    return Segmenter()
