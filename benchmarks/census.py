"""What a census takes, as a ratio to the same step unwatched; writes a Markdown table.

    python benchmarks/census.py

Small transformers and a larger one, forward and backward under bf16 autocast, one thread. All ways run in one process,
in turn, in another order each round; a round gives each way the ratio of its time to that of the bare step in the same
round, so that what slows the machine for longer than a round drops out. Time is the thread's time on the processor, so
that other programs do not count; on another device than a CPU it is the time until the device is done. Reported: the
median over rounds, and the quartiles.

Legend: B batch, T time, D width, V vocabulary, H heads.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _gpu_results import queues, wait_for
from overhead import count, machine, positive
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes.numerics.census.watch import CensusWatch
from amp_recipes.numerics.watch.observe import Attribution, OpWatch
from amp_recipes.precision import TorchAutocast

RESULT = Path(__file__).parent / "results" / "census.md"
REQUIRED = 1.6  # of a small step
CHARACTERS, LENGTH = 256, 64


class Attention(nn.Module):
    """Attention written out: many small ops, as an instrument likes them least."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The mixture, (B, T, D)."""
        batch, time_, width = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights_BHTT = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).softmax(-1)
        return self.output((weights_BHTT @ v).transpose(1, 2).reshape(batch, time_, width))


class Block(nn.Module):
    """A transformer block that normalises before its parts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to the same."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class LanguageModel(nn.Module):
    """Logits (B, T, V)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.position = nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, characters_BT: torch.Tensor) -> torch.Tensor:
        """`characters_BT` has the full length."""
        x_BTD = self.embedding(characters_BT) + self.position
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


@dataclass(frozen=True)
class Size:
    """A step: a transformer and its batch."""

    name: str
    width: int
    layers: int
    batch: int
    steps: int  # in one measurement


SIZES = [
    Size("smallest, width 64, 2 layers", 64, 2, 8, 4),
    Size("small, width 128, 2 layers", 128, 2, 8, 4),
    Size("larger, width 256, 6 layers", 256, 6, 8, 1),
]


class Nothing(TorchDispatchMode):
    """What any instrument in Python takes at least."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Places(OpWatch):
    """Counts ops by module and phase."""

    def __init__(self, modules: nn.Module) -> None:
        super().__init__(Attribution(modules), self.saw)
        self.counts: Counter[Any] = Counter()

    def saw(self, *_: Any) -> None:
        """One more op here."""
        self.counts[self.at.here] += 1


@dataclass
class Step:
    """Forward and backward, timed: with what happens as an instrument is entered and left, and without."""

    model: nn.Module
    inputs_BT: torch.Tensor
    targets_BT: torch.Tensor
    repeats: int

    def seconds(self, make: Callable[[nn.Module], AbstractContextManager]) -> tuple[float, float]:
        """Of one step, with the instrument's beginning and end, and without."""
        whole = inner = 0.0
        for _ in range(self.repeats):
            self.model.zero_grad()
            entered = self.now()
            with make(self.model):
                began = self.now()
                with TorchAutocast(self.inputs_BT.device.type, dtype=torch.bfloat16):
                    logits_BTV = self.model(self.inputs_BT)
                    loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), self.targets_BT.flatten())
                loss.backward()
                inner += self.now() - began
            whole += self.now() - entered
        return whole / self.repeats, inner / self.repeats

    def now(self) -> float:
        """Seconds of this thread on the processor, or of the clock when the device is done."""
        device = self.inputs_BT.device
        if not queues(device):
            return time.thread_time()
        wait_for(device)
        return time.perf_counter()


BARE = "bare step"
AGAIN = "bare step again (noise)"
AFTER = "bare step beside censuses: instruments off"
WAYS: dict[str, Callable[[nn.Module], AbstractContextManager]] = {
    BARE: lambda _: nullcontext(),
    AGAIN: lambda _: nullcontext(),
    "a dispatch mode that does nothing": lambda _: Nothing(),
    "OpWatch, ops counted by module and phase": Places,
    "census": CensusWatch,
    AFTER: lambda _: nullcontext(),
}


@dataclass(frozen=True)
class Measured:
    """Ratios to the bare step of the same round: of the step alone, and with the instrument's beginning and end."""

    step: list[float]
    whole: list[float]
    milliseconds: float


def measure(size: Size, rounds: int, device: torch.device) -> tuple[int, dict[str, Measured]]:
    """Ops of the step, and each way's times."""
    torch.manual_seed(0)
    model = LanguageModel(size.width, size.layers).to(device)
    inputs_BT = torch.randint(CHARACTERS, (size.batch, LENGTH)).to(device)
    step = Step(model, inputs_BT, inputs_BT.roll(-1, 1), size.steps)
    for make in WAYS.values():  # what is allocated and read once
        step.seconds(make)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    gc.collect()
    gc.freeze()
    ways = list(WAYS.items())
    for _ in range(rounds):
        random.shuffle(ways)  # each way leaves the caches to the next
        for name, make in ways:
            times[name].append(step.seconds(make))
    gc.unfreeze()
    places = Places(model)
    Step(model, step.inputs_BT, step.targets_BT, 1).seconds(lambda _: places)
    bare = [inner for _, inner in times[BARE]]
    return sum(places.counts.values()), {
        name: Measured(
            step=[inner / by_itself for (_, inner), by_itself in zip(own, bare, strict=True)],
            whole=[whole / by_itself for (whole, _), by_itself in zip(own, bare, strict=True)],
            milliseconds=statistics.median(inner for _, inner in own) * 1e3,
        )
        for name, own in times.items()
    }


def cell(ratios: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def report(rounds: int, device: torch.device, command: str) -> str:
    """Measure every size, and say it as Markdown."""
    results = {size: measure(size, rounds, device) for size in SIZES}
    heads = [f"{size.name}: {ops} ops, {ways[BARE].milliseconds:.0f} ms" for size, (ops, ways) in results.items()]
    lines = [
        "# What a census takes",
        "",
        f"`{command}`, {date.today().isoformat()}: torch {torch.__version__}, Python {platform.python_version()}, "
        f"{machine(device)}, {count(torch.get_num_threads(), 'thread')}, {count(rounds, 'round')}. Cells "
        "are the ratio to the bare step of the same round: median and quartiles.",
        "",
        "| the step | " + " | ".join(heads) + " |",
        "| --- |" + " --- |" * len(SIZES),
    ]
    for name in list(WAYS)[1:]:
        lines.append(f"| {name} | " + " | ".join(cell(ways[name].step) for _, ways in results.values()) + " |")
    whole = [cell(ways["census"].whole) for _, ways in results.values()]
    lines.append("| census, with its counting after the step | " + " | ".join(whole) + " |")
    lines += ["", f"Required: at most {REQUIRED} of a small step.", ""]
    for size, (_, ways) in results.items():
        watched, counted = (statistics.median(it) for it in (ways["census"].step, ways["census"].whole))
        verdict = "holds" if counted <= REQUIRED else "DOES NOT HOLD with the counting"
        verdict = verdict if watched <= REQUIRED else "DOES NOT HOLD"
        name = f"{size.name} ({ways[BARE].milliseconds:.0f} ms)"
        lines.append(f"- {name}: {verdict}, {watched:.2f}; with the counting {counted:.2f}")
    lines += ["", "Most of it is torch's way into Python at each op, which a mode that does nothing takes too.", ""]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=41, help="how often all ways run (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="such as cuda (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    shown = [f"--rounds={options.rounds}"] if options.rounds != parser.get_default("rounds") else []
    shown += [f"--device={options.device}"] if options.device.type != "cpu" else []
    page = report(options.rounds, options.device, shlex.join(["python", "benchmarks/census.py", *shown]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page)
    print(page)


if __name__ == "__main__":
    main(sys.argv[1:])
