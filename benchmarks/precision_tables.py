"""What loss scaling and fp32 master weights are worth: the ablation of Micikevicius et al. 2018, at small scale.

    python benchmarks/precision_tables.py

Each network is trained in seven ways from the same weights on the same batches, over some seeds. The literature says
which ways should end where fp32 ends and which worse; the table shows what comes out, and beside it the two causes:
how many gradients fp16 flushes to zero, and how many updates are too small to change a weight. All arithmetic in fp16
is the device's own.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _small_networks import Batch, Task, language, plate
from overhead import count, machine, positive
from torch import nn

from amp_recipes.precision import AMPConfig, LossScaler, TorchAutocast, UpdateOwner

RESULT = Path(__file__).parent / "results" / "precision_tables.md"
FIRST_SCALE = 2.0**16  # GradScaler's default
PROBES = 8  # steps of a run, evenly spread, at which gradients and updates are looked at
HELD_OUT = 8  # batches that the final loss is measured on


@dataclass(frozen=True)
class Way:
    """How to train. weights: the precision that parameters are kept and updated in; scaled: whether the loss is."""

    name: str
    precision: str
    scaled: bool = False
    weights: str = "fp32"


FP32 = Way("fp32", "fp32")
WAYS = (
    FP32,
    Way("fp16, loss scaling, fp32 weights", "fp16", scaled=True),
    Way("bf16, no scaling, fp32 weights", "bf16"),
    Way("fp16, **no scaling**, fp32 weights", "fp16"),
    Way("fp16, loss scaling, **fp16 weights**", "fp16", scaled=True, weights="fp16"),
    Way("bf16, no scaling, **bf16 weights**", "bf16", weights="bf16"),
    Way("fp16, **no scaling**, **fp16 weights**", "fp16", weights="fp16"),
)
SAME, WORSE, OPEN = "as fp32", "worse", ""
_, FP16, BF16, UNSCALED, FP16_WEIGHTS, BF16_WEIGHTS, NEITHER = WAYS


@dataclass(frozen=True)
class Network:
    """What is trained, and what the literature lets one expect of it.

    before: what it was trained on first, in fp32, `steps_before` steps at `learning_rate_before`; smaller: the share
    of all steps that `--small` takes.
    """

    name: str
    about: str
    task: Task
    learning_rate: float
    steps: int
    expected: Mapping[Way, str]
    loss: str
    before: Task | None = None
    steps_before: int = 0
    learning_rate_before: float = 3e-3
    smaller: float = 0.15


EXPECTED_ALWAYS = {FP16: SAME, BF16: SAME}
EXPECTED_OF_SMALL_UPDATES = {
    **EXPECTED_ALWAYS,
    UNSCALED: SAME,
    FP16_WEIGHTS: WORSE,
    BF16_WEIGHTS: WORSE,
    NEITHER: WORSE,
}


def networks() -> dict[str, Network]:
    """By the name that the command line knows."""
    return {
        "plate": Network(
            name="A plate's deflection in metres, from scratch",
            about="An MLP (3-32-32-576, 20,000 weights) learns the deflection of a steel plate at 576 points under a "
            "load of 100 to 500 N. The targets are left in their SI unit, as physics gives them: 0.4 mm in the root "
            "mean square. The loss is the mean over batch and points, so that the gradient of one output is about "
            "2 * 0.0004 / 36,864 = 2e-8, below what fp16 holds (6e-8). Adam at its default rate of 1e-3. Which weights "
            "are kept in fp32 is not what this network is for: its updates are large",
            task=plate(unit=1.0),
            learning_rate=1e-3,
            steps=400,
            expected={**EXPECTED_ALWAYS, UNSCALED: WORSE, NEITHER: WORSE},
            loss="share of the variance that is not explained",
        ),
        "plate-tuned": Network(
            name="A plate's deflection in millimetres, tuned to plates on an elastic bed",
            about="The same MLP, in millimetres, was trained in fp32 and is fine-tuned to a plate that lies on an "
            "elastic bed (3e5 N/m^3). Adam at 2e-5, the lowest of the rates that BERT's authors advise for fine-tuning "
            "(Devlin et al. 2019). Its gradients are large enough for fp16, so that scaling should make no difference; "
            "but a weight is thousands of times its update, where fp16 can tell 2048 steps and bf16 256",
            task=plate(unit=1e3, bed=3e5),
            before=plate(unit=1e3),
            steps_before=600,
            learning_rate=2e-5,
            steps=400,
            expected=EXPECTED_OF_SMALL_UPDATES,
            loss="share of the variance that is not explained",
        ),
        "language": Network(
            name="A small language model, tuned to another dialect",
            about="A transformer (width 32, 2 layers, 28,000 weights) was trained in fp32 on a made-up text of 150 "
            "words and is fine-tuned to one with the same words in another order. Adam at 5e-5, the highest rate of "
            "the same advice. What is to be expected is the same as above",
            task=language(dialect=1),
            before=language(dialect=0),
            steps_before=800,
            learning_rate=5e-5,
            steps=200,
            expected=EXPECTED_OF_SMALL_UPDATES,
            loss="nats per character",
        ),
    }


# ---------------------------------------------------------------------- training


class CountingAdam(torch.optim.Optimizer):
    """Adam in fp32 over parameters of any floating dtype, which counts the updates that do not change a weight.

    `scale`: what the gradients are divided by (fp32) before they are used. The moments are fp32, so that the dtype of
    the weights is all that ways of training differ in. Updates are counted at each step, `ratio` (median of |w / dw|
    over elements that have an update) is noted where `watch` is set.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.scale = 1.0
        self.watch = False
        self.updates = self.lost = 0
        self.ratios: list[float] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have a gradient."""
        found = []
        for group in self.param_groups:
            (slow_1, slow_2), lr, eps = group["betas"], group["lr"], group["eps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.float() / self.scale
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
                state["step"] += 1
                mean = state["mean"].lerp_(gradient, 1 - slow_1)
                square = state["square"].mul_(slow_2).addcmul_(gradient, gradient, value=1 - slow_2)
                unbiased = (square / (1 - slow_2 ** state["step"])).sqrt_().add_(eps)
                update = mean / unbiased * (-lr / (1 - slow_1 ** state["step"]))
                # Added in fp32, rounded once: the best that weights of a low dtype can be given.
                changed = (parameter.float() + update).to(parameter.dtype)
                moves = update != 0
                self.updates += int(moves.sum())
                self.lost += int((moves & (changed == parameter)).sum())
                if self.watch:
                    found.append((parameter.float() / update)[moves].abs())
                parameter.copy_(changed)
        if self.watch:
            self.ratios.append(float(torch.cat(found).median()) if found else math.nan)


@dataclass
class Run:
    """How one training ended. flushed, lost: shares of gradients and updates; ratio: median of |w / dw|."""

    loss: float
    flushed: float
    lost: float
    ratio: float
    skipped: int


@dataclass
class Flushed:
    """Counts the gradients that are zero, but are not in fp32 at the same weights."""

    model: nn.Module
    objective: Callable[[nn.Module, Any], torch.Tensor]
    zeros: int = 0
    seen: int = 0

    def look(self, batch: Batch) -> None:
        """The model has its gradients of `batch`, scaled or not."""
        reference = copy.deepcopy(self.model).float()
        self.objective(reference, batch).backward()
        for ours, wanted in zip(self.model.parameters(), reference.parameters(), strict=True):
            there = wanted.grad != 0
            self.zeros += int((there & (ours.grad == 0)).sum())
            self.seen += int(there.sum())


def train(
    model: nn.Module,
    task: Task,
    way: Way,
    steps: int,
    learning_rate: float,
    generator: torch.Generator,
    device: torch.device,
) -> Run:
    """Train `model` in place; its loss is then measured on held-out batches, in fp32."""
    model.to(device, AMPConfig.from_name(way.weights).dtype)
    optimizer = CountingAdam(model.parameters(), learning_rate)
    step = by_framework(model, optimizer, way, device) if way.weights == "fp32" else by_hand(model, optimizer, way)
    autocast = TorchAutocast(device.type, dtype=AMPConfig.from_name(way.precision).dtype)
    flushed = Flushed(model, task.objective)
    skipped = 0
    for number in range(steps):
        batch = to_device(task.draw(generator), device)
        optimizer.watch = number % max(1, steps // PROBES) == 0
        with autocast:
            loss = task.objective(model, batch)
        skipped += not step(loss, lambda batch=batch: flushed.look(batch) if optimizer.watch else None)
    return Run(
        loss=held_out_loss(model, task, device),
        flushed=flushed.zeros / max(1, flushed.seen),
        lost=optimizer.lost / max(1, optimizer.updates),
        ratio=statistics.median(optimizer.ratios or [math.nan]),
        skipped=skipped,
    )


Step = Callable[[torch.Tensor, Callable[[], None]], bool]


def by_framework(model: nn.Module, optimizer: CountingAdam, way: Way, device: torch.device) -> Step:
    """The framework's own update, with or without its loss scaler; returns whether it was taken."""
    updates = UpdateOwner(model, LossScaler(device.type, init_scale=FIRST_SCALE, enabled=way.scaled), device)

    def step(loss: torch.Tensor, look: Callable[[], None]) -> bool:
        updates.begin()
        updates.backward(loss)
        look()
        pending = updates.step({"adam": optimizer}, max_grad_norm=0.0)
        updates.update_scale()
        updates.drop_losses()
        optimizer.zero_grad()
        return pending is not None and pending.read().taken

    return step


def by_hand(model: nn.Module, optimizer: CountingAdam, way: Way) -> Step:
    """The same for weights in a low dtype, which the framework refuses to scale: halve the scale where it overflows."""
    optimizer.scale = FIRST_SCALE if way.scaled else 1.0

    def step(loss: torch.Tensor, look: Callable[[], None]) -> bool:
        (loss * optimizer.scale).backward()
        look()
        finite = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        if finite:
            optimizer.step()
        elif way.scaled:
            optimizer.scale /= 2
        optimizer.zero_grad()
        return finite

    return step


def held_out_loss(model: nn.Module, task: Task, device: torch.device) -> float:
    """The mean loss in fp32 on batches that are the same for all; infinite where it is not a number."""
    generator = torch.Generator().manual_seed(12345)
    judged = copy.deepcopy(model).float()
    with torch.no_grad():
        losses = [float(task.objective(judged, to_device(task.draw(generator), device))) for _ in range(HELD_OUT)]
    loss = statistics.fmean(losses) / task.spread
    return loss if math.isfinite(loss) else math.inf


def to_device(batch: Batch, device: torch.device) -> Batch:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


@dataclass
class Found:
    """All runs of a network, by way, in the order of the seeds; `before`: the losses that tuning began at."""

    runs: dict[Way, list[Run]] = field(default_factory=lambda: {way: [] for way in WAYS})
    before: list[float] = field(default_factory=list)


def run_network(network: Network, seeds: Sequence[int], small: bool, device: torch.device) -> Found:
    """Train the network in every way, from the same weights on the same batches, once for each seed."""
    share = network.smaller if small else 1.0
    found = Found()
    for seed in seeds:
        torch.manual_seed(seed)
        start = network.task.make()
        if network.before is not None:
            batches = torch.Generator().manual_seed(1000 + seed)
            steps = round(network.steps_before * math.sqrt(share))  # to tune, something must have been learned
            train(start, network.before, FP32, steps, network.learning_rate_before, batches, device)
            found.before.append(held_out_loss(start, network.task, device))
        for way in WAYS:
            batches = torch.Generator().manual_seed(2000 + seed)
            steps, model = round(network.steps * share), copy.deepcopy(start)
            began = time.perf_counter()
            run = train(model, network.task, way, steps, network.learning_rate, batches, device)
            found.runs[way].append(run)
            print(f"{network.name}, seed {seed}: {way.name}: {run.loss:.4g} ({time.perf_counter() - began:.1f} s)")
    return found


# ---------------------------------------------------------------------- the table


def ratios(found: Found, way: Way) -> list[float]:
    """For each seed, the loss over that of fp32 with the same weights at the start."""
    return [run.loss / wanted.loss for run, wanted in zip(found.runs[way], found.runs[FP32], strict=True)]


def noise(found: Found) -> float:
    """By what factor seeds alone make the loss of fp32 differ: one standard deviation of its logarithm."""
    losses = [math.log(run.loss) for run in found.runs[FP32]]
    return math.exp(statistics.stdev(losses)) if len(losses) > 1 else 1.0


def outcome(found: Found, way: Way) -> str:
    """Where a way ends: the median over seeds of its ratio to fp32, against the noise."""
    ratio = statistics.median(ratios(found, way))
    if ratio > noise(found):
        return WORSE
    return "better" if ratio < 1 / noise(found) else SAME


def table(network: Network, found: Found) -> tuple[list[str], list[bool]]:
    """The rows of one network, and for each expectation whether it came out."""
    lines = [
        "| | final loss, median (lowest to highest) | to fp32 | gradients flushed | updates lost | expected | found | "
        "expected order |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    kept = []
    for way, runs in found.runs.items():
        losses, to_fp32 = [run.loss for run in runs], ratios(found, way)
        shown = f"{statistics.median(to_fp32):.3f}"
        if way is not FP32:
            shown += f" ({min(to_fp32):.3f} to {max(to_fp32):.3f})"
        expected, came_out, verdict = network.expected.get(way, OPEN), "", ""
        if way is not FP32:
            came_out = outcome(found, way)
        if expected != OPEN:
            kept.append(came_out == expected)
            verdict = "yes" if kept[-1] else "NO"
        cells = [
            way.name,
            f"{statistics.median(losses):.4g} ({min(losses):.4g} to {max(losses):.4g})",
            shown,
            percent(run.flushed for run in runs),
            percent(run.lost for run in runs),
            expected,
            came_out,
            verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, kept


def percent(shares: Iterable[float]) -> str:
    """The median as a percentage."""
    share = 100 * statistics.median(shares)
    return f"{share:.1f} %" if share >= 0.05 or share == 0 else "< 0.1 %"


def report(results: dict[str, Found], options: argparse.Namespace, command: str, seconds: float) -> str:
    """The results as a Markdown page."""
    all_networks = networks()
    lines = [
        "# What loss scaling and fp32 master weights are worth",
        "",
        "The ablation of Micikevicius et al. 2018 (arXiv 1710.03740), and bf16 without scaling (Kalamkar et al. 2019, "
        "arXiv 1905.12322), on networks that train in seconds. The papers found: mixed precision with loss scaling "
        "and fp32 master weights ends where fp32 ends; networks whose gradients are small stall or diverge without "
        "scaling; without fp32 master weights a speech model lost 80 % of its accuracy, as an update is lost where "
        "|w / dw| is above 2048 (bf16: 256); bf16 needs no scaling.",
        "",
        f"- Command: `{command}`",
        f"- Date: {date.today().isoformat()}; {seconds:.0f} s",
        f"- Machine: {machine(options.device)}, {count(os.cpu_count() or 1, 'core')}; "
        f"{count(options.threads, 'thread')} of torch",
        f"- Software: torch {torch.__version__}, Python {platform.python_version()}",
        f"- {count(options.seeds, 'seed')}, of the weights and of the batches. All ways of a seed begin at the same "
        "weights and see the same batches; losses are held-out, in fp32",
        "- Rows with fp32 weights are the framework's (`TorchAutocast`, `UpdateOwner`, `LossScaler`; without scaling: "
        "the scaler is off). Weights in fp16 or bf16 it does not train; those rows are a hand-written loop",
        "- One Adam for all rows, with moments in fp32; `w + dw` is rounded to the weights' dtype once. It counts "
        "every update that leaves its weight as it was. (Where gradients are flushed its mean fades, until updates are "
        "too small for fp32 as well)",
        f"- Flushed: gradients of weights that are zero, but not in fp32 at the same weights, at {PROBES} steps",
        "- To fp32: the ratio to fp32 with the same seed, median (lowest to highest). Found: whether the median is "
        "beyond the noise of seeds, which is one standard deviation of the logarithm of fp32's loss. Expected: what "
        "the papers say of such a network; empty where they say nothing",
    ]
    kept: list[bool] = []
    for name, found in results.items():
        network = all_networks[name]
        rows, came_out = table(network, found)
        kept += came_out
        ratio = statistics.median(run.ratio for run in found.runs[FP32])
        lines += ["", f"## {network.name}", "", network.about + ".", "", f"Loss: {network.loss}."]
        if found.before:
            lines.append(f"Before tuning: {statistics.median(found.before):.4g}.")
        lines += [
            f"Seeds alone move fp32 by a factor of {noise(found):.3f}. In fp32 the median of |w / dw| is {ratio:,.0f}.",
            "",
        ]
        lines += rows
    lines += ["", f"Expected order: {sum(kept)} of {len(kept)} came out."]
    return "\n".join([*lines, ""])


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    names = list(networks())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--networks", nargs="+", choices=names, default=names, help="all by default")
    parser.add_argument("--seeds", type=positive, default=3, help="how many (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the lowest (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a sixth of the steps or so")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="such as cuda (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Train everything and write the page."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    began = time.perf_counter()
    all_networks = networks()
    results = {name: run_network(all_networks[name], seeds, options.small, options.device) for name in options.networks}
    shown = [argument for argument in argv if not argument.startswith("--output=")]
    if "--output" in shown:  # where the table lies is nobody's business
        del shown[shown.index("--output") : shown.index("--output") + 2]
    command = shlex.join(["python", "benchmarks/precision_tables.py", *shown])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(results, options, command, time.perf_counter() - began))
    print(f"written to {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
