"""Planted networks whose fault is hidden: in layers that no module registers, or by an op that swallows an infinity.

A layer in a Python list, a dict, a closure or on the recipe's own object is computed, and torch does not know of it.
Divided by, in a tanh, an exp or a clamp, an infinity leaves all finite, and wrong. Times zero it becomes NaN somewhere
else, and the gradient in fp32, which is zero there, says nothing.
All show on a CPU and in fp16, but for one in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from device import DEVICE
from planted_faults import (
    Apply,
    Batch,
    BilinearPool,
    Block,
    Chain,
    blocks,
    classified,
    draws,
    head,
    normal,
    optimizer_of,
)
from torch import nn

from amp_recipes.data import to_device
from amp_recipes.numerics.trial import Trial, plain_trial


@dataclass(frozen=True)
class Hidden:
    """A network, and where its fault is.

    culprit: as drift is to name it; pins: what the search is to find (empty: no pin can cure it); op: the one in which
    low precision parts from fp32 first, without its namespace; place: where that runs; advice: words that the search's
    notes must hold.
    """

    name: str
    trial: Callable[[], Trial]
    draw: Callable[[int], Batch]
    culprit: str
    pins: tuple[str, ...]
    op: str
    place: str
    advice: str = ""
    dtype: torch.dtype = torch.float16
    scale: float = 256.0

    def windows(self, count: int, seed: int = 0) -> list[list[Batch]]:
        """`count` windows of one batch; other seeds give others."""
        return to_device([[self.draw(1000 * seed + i)] for i in range(count)], DEVICE)


HIDDEN: dict[str, Hidden] = {}


def hide(culprit: str, draw: Callable[[int], Batch], op: str, **what: Any) -> Callable:
    """Decorates a function that builds a network, or a pair of network and objective: puts it into HIDDEN."""

    def register(build: Callable) -> Callable:
        def trial() -> Trial:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made = build()
            if isinstance(made, Trial):
                return made
            return plain_trial(made.to(DEVICE), classified, optimizer_of(made, 1e-3))

        name = build.__name__
        options = {"pins": (culprit,), "place": culprit, **what}
        HIDDEN[name] = Hidden(name, trial, draw, culprit, op=op, **options)
        return build

    return register


UNREGISTERED = " (not registered)"

# ------------------------------------------------------------------------------------- layers that nobody registers


class InList(nn.Module):
    """Runs the layers of a Python list one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = [layer.to(DEVICE) for layer in layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@hide(
    f"encoder.layers[1].pool{UNREGISTERED}",
    normal(4, 16, 10, scale=100.0),
    "bmm",
    pins=("encoder",),
    advice="nn.ModuleList",
)
def a_list_of_layers() -> nn.Module:
    """The pooling in a list overflows."""
    return Chain(
        frames=nn.Linear(10, 8),
        encoder=InList(nn.LayerNorm(8), Chain(gain=Apply(lambda x: x * 100), pool=BilinearPool()), nn.Linear(64, 16)),
        blocks=blocks(16),
        head=head(16),
    )


class InDict(nn.Module):
    """Adds what two experts of a dict say."""

    def __init__(self, **experts: nn.Module) -> None:
        super().__init__()
        self.experts = {name: expert.to(DEVICE) for name, expert in experts.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts.values())


class Centered(nn.Module):
    """Adds 300 and takes it away again: bf16 holds every second number there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 300.0 - 300.0


@hide(
    f"mixture.experts['fine']{UNREGISTERED}",
    normal(8, 12),
    "add",
    pins=("mixture",),
    advice="nn.ModuleDict",
    dtype=torch.bfloat16,
    scale=1.0,
)
def a_dict_of_layers_bf16() -> nn.Module:
    """A sum and a difference that cancel, in a dict."""
    return Chain(
        embed=nn.Linear(12, 16), mixture=InDict(coarse=Block(16), fine=Centered()), blocks=blocks(16), head=head(16)
    )


def squares_of_large(x: torch.Tensor) -> torch.Tensor:
    """The squares of values of about 600, in the dtype that is given, brought back."""
    return (x * 600).square().float() / 3.6e5


@hide(f"mix.function.scorer{UNREGISTERED}", normal(8, 12), "pow", pins=("mix",), advice="scorer")
def a_layer_in_a_closure() -> nn.Module:
    """The function that a module calls has the layer."""
    scorer = Apply(squares_of_large)
    return Chain(
        embed=nn.Linear(12, 16),
        mix=Apply(lambda x: x + scorer(x)),
        norm=nn.LayerNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


GLOBAL_LAYER = Apply(squares_of_large)


@hide("mix", normal(8, 12), "pow", place="<Apply>")
def a_layer_of_the_file() -> nn.Module:
    """A layer that stands at the top of a file: only that it ran is known."""
    return Chain(
        embed=nn.Linear(12, 16),
        mix=Apply(lambda x: x + GLOBAL_LAYER(x)),
        norm=nn.LayerNorm(16),
        blocks=blocks(16),
        head=head(16),
    )


class Holder:
    """As a recipe: what it computes with hangs on itself."""

    def __init__(self) -> None:
        self.modules = nn.ModuleDict({"embed": nn.Linear(12, 16), "body": Chain(blocks=blocks(16), head=head(16))})
        self.modules.to(DEVICE)
        self.adapter = Apply(lambda x: ((x * 600) @ (x * 600).mT).mean(-1, keepdim=True) / 1e6)

    def objective(self, modules: nn.Module, batch: Batch) -> torch.Tensor:
        x = modules["embed"](batch[0])
        x = nn.functional.layer_norm(x + self.adapter(x), (16,))
        return nn.functional.cross_entropy(modules["body"](x), batch[1])


@hide(f"self.adapter{UNREGISTERED}", normal(8, 12), "mm", pins=(), advice="`modules`")
def a_layer_on_the_recipe() -> Trial:
    """A layer that the recipe calls, and no module has."""
    holder = Holder()
    trial = plain_trial(holder.modules, holder.objective, optimizer_of(holder.modules, 1e-3))
    trial.holders = {"self": holder}
    return trial


# ------------------------------------------------------------------------------------- what becomes of an infinity


class Large(nn.Module):
    """A linear layer whose channels lie between `low` and `high`."""

    def __init__(self, width: int, low: float = 150.0, high: float = 390.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        with torch.no_grad():
            self.up.weight *= 20
            self.up.bias.copy_(torch.linspace(low, high, width))


class Energies(Large):
    """Squares, of which those of the last channels are beyond fp16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square()


class Swallow(nn.Module):
    """Brings the energies of a channel back to about 1 by `function`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 16) -> None:
        super().__init__()
        self.function, self.out = function, nn.Linear(width, width)

    def forward(self, energies: torch.Tensor) -> torch.Tensor:
        return self.out(self.function(energies))


def swallowed(function: Callable[[torch.Tensor], torch.Tensor], energies: nn.Module | None = None) -> nn.Module:
    return Chain(
        embed=nn.Linear(12, 16),
        block=Block(16),
        energies=energies or Energies(16),
        swallow=Swallow(function),
        blocks=blocks(16),
        head=head(16),
    )


OFF = torch.linspace(0, 1, 16) < 0.3  # the channels whose energies fp16 can hold


@hide("energies", normal(8, 12), "pow")
def times_zero() -> nn.Module:
    """What overflows is multiplied by zero afterwards: NaN, which the gradient in fp32 knows nothing of."""
    return swallowed(lambda energies: energies * OFF.to(energies) / 6e4)


@hide("energies", normal(8, 12), "pow")
def divided_by() -> nn.Module:
    """One over infinity is 0."""
    return swallowed(lambda energies: 1e5 / energies)


@hide("energies", normal(8, 12), "pow")
def in_a_tanh() -> nn.Module:
    """The tanh of infinity is 1."""
    return swallowed(lambda energies: torch.tanh(energies / 1e5))


@hide("energies", normal(8, 12), "pow")
def in_a_clamp() -> nn.Module:
    """Cut at 3, infinity is 3."""
    return swallowed(lambda energies: (energies / 1e5).clamp(max=3.0))


@hide("energies", normal(8, 12), "pow")
def in_an_exponential() -> nn.Module:
    """exp of minus infinity is 0."""
    return swallowed(lambda energies: torch.exp(-energies / 1e5))


@hide("energies", normal(8, 12), "pow")
def in_a_softmax() -> nn.Module:
    """The softmax is saturated: its gradient is 0 in fp32. In fp16 it is that of infinities, and NaN."""
    return swallowed(lambda energies: energies.softmax(-1))


# ------------------------------------------------------------------------------------- decoys


class Unheard(nn.Module):
    """A decoy: overflows, and an op that follows brings that to what it is in fp32 as well."""

    def __init__(self) -> None:
        super().__init__()
        self.energies = Energies(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.energies(x))


@hide("energies", normal(8, 12), "pow")
def behind_a_decoy() -> nn.Module:
    """Beside infinities that do no harm (tanh of 3e4 is 1, too), one that does."""
    return Chain(
        embed=nn.Linear(12, 16),
        unheard=Unheard(),
        energies=Energies(16),
        swallow=Swallow(lambda energies: 1e5 / energies),
        blocks=blocks(16),
        head=head(16),
    )


def padded(generator: torch.Generator) -> Batch:
    """The last two steps of each sequence are padding: large values that nobody looked at."""
    x = torch.randn(4, 6, 12, generator=generator)
    x[:, 4:] *= 3e3
    return x, x[:, 0, :4].argmax(-1)


class Padding(nn.Module):
    """The sum over the steps, the padding times zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(x.shape[1], device=x.device) < 4).to(x.dtype)
        return (x * mask[:, None]).sum(1)


class Squared(nn.Module):
    """A linear layer's square."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square()


@hide("features", draws(padded), "pow")
def in_the_padding() -> nn.Module:
    """The padding overflows before it is masked by a product with zero."""
    return Chain(features=Squared(), pooled=Padding(), blocks=blocks(16), head=head(16))
