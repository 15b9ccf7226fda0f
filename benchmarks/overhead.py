"""What a step of `Brain.fit` costs over the loop that one would write by hand, as a ratio; writes a Markdown table.

    python benchmarks/overhead.py

A tiny MLP, batch 32, one thread: the forward and the backward are next to nothing, so that what a framework adds shows
as much as it ever can. All contenders run in one process, in turn (A B C, A B C, ...); each round gives each contender
the ratio of its time to that of the hand-written loop in the same round, so that what slows the machine for longer than
a round drops out. Reported: the median over rounds, and the quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import math
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from _peers import PEERS
from _reporting import count, cpu_model, positive
from _workload import DTYPES, MAX_GRAD_NORM, OPTIMIZERS, Case, Contender, Refused, TimedBatches
from torch import nn

from amp_recipes import Brain, Stage
from amp_recipes.precision import resolve_precision

RESULT = Path(__file__).parent / "results" / "overhead.md"
BY_HAND = "hand-written loop"
AGAIN = "the same loop again (noise)"
BRAIN = "Brain"
BRAIN_LOGGING = "Brain, writing progress and JSONL"
# An emulated fp16 may be a hundred times slower than fp32: fewer steps say as much there.
FP16_CPU_STEPS_DIVISOR = 4


def hand_written(case: Case) -> Contender:
    """What a careful user writes: clipping, loss scaling where needed, the loss summed without waiting for it."""
    model = case.make_model()
    optimizer = case.make_optimizer(model.parameters())
    scaler = case.make_scaler()

    def fit(batches: TimedBatches) -> None:
        model.train()
        total = torch.zeros((), device=case.device)
        for batch in batches:
            inputs, targets = case.to_device(batch)
            with case.autocast():
                loss = nn.functional.cross_entropy(model(inputs), targets)
            if scaler is None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()

    return Contender(model, fit)


class Classifier(Brain):
    """The same training as a Brain."""

    def compute_forward(self, batch, stage: Stage):
        """The logits of a batch."""
        inputs, _ = batch
        return self.modules.model(inputs)

    def compute_objectives(self, predictions, batch, stage: Stage):
        """The loss of the logits."""
        _, targets = batch
        return nn.functional.cross_entropy(predictions, targets)


def brain(case: Case, output_folder: str | None = None) -> Contender:
    """A Brain with its default options: every guard on. With a folder it writes there, and progress to a stream."""
    trainer = Classifier(
        modules={"model": case.make_model()},
        opt_class=case.make_optimizer,
        run_opts={
            "device": str(case.device),
            "precision": case.precision,
            "max_grad_norm": case.max_grad_norm,
            "output_folder": output_folder,
        },
    )
    shows = output_folder is not None

    def fit(batches: TimedBatches) -> None:
        # Progress goes to a stream that is no terminal: what a terminal costs is the terminal's.
        with contextlib.redirect_stderr(io.StringIO()) if shows else contextlib.nullcontext():
            trainer.fit([1], batches, progressbar=shows)

    return Contender(trainer.modules.model, fit)


# ---------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """One contender in one case."""

    ratios: list[float]  # per round, to the hand-written loop of that round
    microseconds: float  # per step, median over rounds
    same_weights: bool  # after the first round, bit for bit those of the hand-written loop
    processor_ratios: list[float]  # as `ratios`, of the time that this process computed


def measure(contenders: dict[str, Contender], batches: TimedBatches, rounds: int) -> dict[str, Measured]:
    """Run all contenders in turn, `rounds` times; the first of them is what the others are compared with."""
    for contender in contenders.values():
        contender.fit(batches)  # not counted: everything is allocated and loaded after it
    weights = {name: [p.detach().clone() for p in c.model.parameters()] for name, c in contenders.items()}
    first = next(iter(contenders))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    computed: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # what one framework has imported must not slow the collections of the others
    for _ in range(rounds):
        for name, contender in contenders.items():
            gc.collect()
            contender.fit(batches)
            assert math.isfinite(batches.seconds), f"{name} stopped before the timed steps were over"
            seconds[name].append(batches.seconds)
            computed[name].append(batches.processor_seconds)
    gc.unfreeze()
    return {
        name: Measured(
            ratios=ratios(seconds[name], seconds[first]),
            microseconds=statistics.median(seconds[name]) / batches.steps * 1e6,
            same_weights=all(map(torch.equal, weights[name], weights[first])),
            processor_ratios=ratios(computed[name], computed[first]),
        )
        for name in contenders
    }


def ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each of the numbers over the one in the same place."""
    return [number / other for number, other in zip(own, others, strict=True)]


def enter(makers: dict[str, Callable[[Case], Contender]], case: Case) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that can run the case, each tried on a few batches; and for the others the reason."""
    contenders, refusals = {}, {}
    for name, make in makers.items():
        try:
            make(case).fit(TimedBatches(2, case.device))
            contenders[name] = make(case)
        except ImportError as error:
            refusals[name] = f"not installed ({error})"
        except Exception as error:
            if name not in PEERS:
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            refusals[name] = reason if isinstance(error, Refused) else f"{type(error).__name__}: {reason}"
    return contenders, refusals


def measure_case(case: Case, options: argparse.Namespace, folder: str) -> dict[str, Measured | str]:
    """Each contender's result in the case, or why it has none."""
    makers: dict[str, Callable[[Case], Contender]] = {
        BY_HAND: hand_written,
        AGAIN: hand_written,
        BRAIN: brain,
        BRAIN_LOGGING: lambda case: brain(case, tempfile.mkdtemp(dir=folder)),
    }
    if options.peers:
        makers |= PEERS
    contenders, refusals = enter(makers, case)
    steps = options.steps
    if case.precision == "fp16" and case.device.type == "cpu":
        steps = max(1, steps // FP16_CPU_STEPS_DIVISOR)
    measured = measure(contenders, TimedBatches(steps, case.device), options.rounds)
    for name in makers:
        print(f"{case.optimizer}, {case.precision}: {name}: {in_words(measured.get(name, refusals.get(name)))}")
    return {name: measured.get(name, refusals.get(name)) for name in makers}


# ---------------------------------------------------------------------- the table


def in_words(result: Measured | str) -> str:
    """A result as a cell: the median ratio and its quartiles."""
    if isinstance(result, str):
        return f"skipped: {result}"
    if all(ratio == 1.0 for ratio in result.ratios):
        return f"1.00 ({result.microseconds:.0f} us)"
    low, median, high = quartiles(result.ratios)
    return f"{median:.3f} ({low:.3f} to {high:.3f})" + ("" if result.same_weights else " *")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def report(results: dict[Case, dict[str, Measured | str]], options: argparse.Namespace, command: str) -> str:
    """The results as a Markdown page."""
    lines = [
        "# What a training step costs over the hand-written loop",
        "",
        "Quote the ratios, not the microseconds: these are this machine's, on that day.",
        "",
        f"- Command: `{command}`",
        f"- Date: {date.today().isoformat()}",
        f"- Machine: {machine(options.device)}; {count(options.threads, 'thread')}",
        f"- Software: torch {torch.__version__}, Python {platform.python_version()}",
        f"- {count(options.rounds, 'round')} of {count(options.steps, 'step')} each (fp16 on a CPU: a quarter of them)",
        f"- Gradients are clipped at norm {options.max_grad_norm:g}; they mostly lie between 0.4 and 4. Below it "
        "the hand-written loop multiplies them by 1, as `clip_grad_norm_` does; Brain leaves that out where the host "
        "knows the norm (on a CPU), and so can be below 1. `--max-grad-norm 0.05` makes a run that clips at each step",
        "- Cells: the median over rounds of the ratio to the hand-written loop in the same round, and its quartiles",
    ]
    for optimizer in dict.fromkeys(case.optimizer for case in results):
        lines += ["", f"## {optimizer}", "", *table({c: r for c, r in results.items() if c.optimizer == optimizer})]
    if any(isinstance(r, Measured) and not r.same_weights for found in results.values() for r in found.values()):
        lines += ["", "`*` After the same batches the weights are not bit for bit those of the hand-written loop."]
    for precision in options.precisions:
        if advice := resolve_precision(precision, options.device).warning:
            lines += ["", advice]
    return "\n".join([*lines, *notes(results), ""])


def table(results: dict[Case, dict[str, Measured | str]]) -> list[str]:
    """One row per contender, one column per precision."""
    names = dict.fromkeys(name for found in results.values() for name in found)
    rows = ["| | " + " | ".join(case.precision for case in results) + " |", "| --- " * (len(results) + 1) + "|"]
    for name in names:
        found = [results[case][name] for case in results]
        if not all(isinstance(result, str) for result in found):
            cells = ["skipped" if isinstance(result, str) else in_words(result) for result in found]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def notes(results: dict[Case, dict[str, Measured | str]]) -> list[str]:
    """Why contenders were skipped, each reason once."""
    skipped: dict[tuple[str, str], list[str]] = {}
    for case, found in results.items():
        for name, result in found.items():
            if isinstance(result, str):
                skipped.setdefault((name, result), []).append(case.precision)
    lines = [
        f"- {name} at {', '.join(dict.fromkeys(precisions))}: {reason}"
        for (name, reason), precisions in skipped.items()
    ]
    return ["", "Skipped:", "", *lines] if lines else []


def machine(device: torch.device) -> str:
    """The device in general words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, host {cpu_model()}"
    return cpu_model() if device.type == "cpu" else f"{device.type}, host {cpu_model()}"


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=41, help="how often all contenders run (%(default)s)")
    parser.add_argument("--steps", type=positive, default=120, help="timed steps in a round (%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="such as cuda (%(default)s)")
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="all by default")
    parser.add_argument("--max-grad-norm", type=float, default=MAX_GRAD_NORM, help="0.05 clips each step (%(default)s)")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave other frameworks out")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measure every optimizer at every precision and write the table."""
    options = parse(argv)
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)  # its advice on fp16 stands under the table, once
    torch.set_num_threads(options.threads)
    cases = [
        Case(name, precision, options.device, options.max_grad_norm)
        for name in OPTIMIZERS
        for precision in options.precisions
    ]
    with tempfile.TemporaryDirectory() as folder:
        results = {case: measure_case(case, options, folder) for case in cases}
    shown = [argument for argument in argv if not argument.startswith("--output=")]
    if "--output" in shown:  # where the table lies is nobody's business
        del shown[shown.index("--output") : shown.index("--output") + 2]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(results, options, shlex.join(["python", "benchmarks/overhead.py", *shown])))
    print(f"written to {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
