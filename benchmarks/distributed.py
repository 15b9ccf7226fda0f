"""What `Brain.fit` costs in two processes over loops written by hand, and what a step sends; writes a Markdown page.

    python benchmarks/distributed.py

Starts itself under torchrun, two processes with one thread each. A small Llama is trained with DDP and with FSDP2
(`fully_shard`); all contenders run in the same processes, in turn, and each round gives each contender the ratio of
its time to that of the loop by hand in the same round. Reported: the median over rounds, and the quartiles. Beside it
the bytes that a step gives to collectives, counted, and what `_scaling_model.py` says. With `--device cuda` each takes
a GPU, or both the same one where there is one, and then over gloo.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from _scaling_counts import by_torch, count_fit, count_step, make_brain, make_optimizer, micro_batch_context
from _scaling_model import BF16, FP32, Run, Shape, collectives
from _workload import MAX_GRAD_NORM, Contender, TimedBatches
from overhead import AGAIN, BRAIN, BY_HAND, Measured, count, machine, measure, positive, quartiles
from torch import nn

RESULT = Path(__file__).parent / "results" / "distributed.md"
TARGET = 1.03
GUARDED = "the loop, whose ranks talk before and after each window"
STRATEGIES = ("ddp", "fsdp")
PROCESSES = 2
LARGE = Shape(layers=4, hidden=128, inner=344, heads=4, tokens=512)
SMALL = Shape(layers=2, hidden=32, inner=64, heads=2, tokens=64)


@dataclass(frozen=True)
class Case:
    """What is trained, and how: `run` holds strategy, batch, precision and window; `steps` are timed in a round."""

    name: str
    shape: Shape
    run: Run
    steps: int
    device: torch.device

    @property
    def sharded(self) -> bool:
        return self.run.strategy == "fsdp"

    def batches(self) -> TimedBatches:
        """Each rank's own micro-batches of token numbers and the next ones; a window before and behind the timed."""
        size = (self.run.batch, self.run.length + 1)

        def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
            numbers = torch.randint(0, self.shape.tokens, size, generator=generator)
            return numbers[:, :-1], numbers[:, 1:]

        window = self.run.micro_batches
        return TimedBatches(
            self.steps * window, self.device, around=window, seed=dist.get_rank(), make_batch=make_batch
        )


def cases(strategies: Sequence[str], quick: bool, device: torch.device) -> list[Case]:
    """Steps of some tens of milliseconds, at fp32, bf16 and with a window; and small ones, where all else shows."""
    large = Run("ddp", PROCESSES, batch=2, length=64, compute=FP32)
    small = replace(large, batch=1, length=16)
    found = []
    for strategy in strategies:
        runs = {
            "fp32": (LARGE, large, 12),
            "bf16": (LARGE, replace(large, compute=BF16), 12),
            "fp32, windows of 4": (LARGE, replace(large, micro_batches=4), 3),
            "fp32, small steps": (SMALL, small, 40),
        }
        if strategy == "fsdp":
            runs["bf16, by torch's plain policy"] = (LARGE, replace(large, compute=BF16, residual=BF16), 12)
        for name, (shape, run, steps) in runs.items():
            if not quick or name == "fp32, small steps":
                steps = 4 if quick else steps // 2 if strategy == "fsdp" else steps  # they take twice as long
                found.append(Case(f"{strategy}, {name}", shape, replace(run, strategy=strategy), max(2, steps), device))
    return found


# ---------------------------------------------------------------------- the contenders


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(case: Case, between: Callable[[], None] = lambda: None) -> Contender:
    """What a careful user writes with torch's own DDP or fully_shard; `between` is called before each update."""
    model = by_torch(case.shape, case.run, case.device)
    optimizer = make_optimizer(model.parameters())
    window = case.run.micro_batches

    def fit(batches: TimedBatches) -> None:
        model.train()
        total = torch.zeros((), device=case.device)
        for number, (inputs, targets) in enumerate(batches, start=1):
            inputs, targets = inputs.to(case.device, non_blocking=True), targets.to(case.device, non_blocking=True)
            last = number % window == 0
            with micro_batch_context(model, case.run, last):
                with torch.autocast(case.device.type, torch.bfloat16, enabled=case.run.compute == BF16):
                    loss = loss_of(model(inputs), targets)
                (loss / window).backward()
            total += loss.detach()
            if last:
                between()
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return Contender(model, fit)


def by_brain(case: Case) -> Contender:
    """The case as a Brain trains it."""
    brain = make_brain(case.shape, case.run, max_grad_norm=MAX_GRAD_NORM, device=case.device.type)
    return Contender(brain.modules, lambda batches: brain.fit([1], batches, progressbar=False))


def poll() -> None:
    """What the ranks tell each other before a window: how much each has, and whether one was asked to stop."""
    own = torch.zeros(4, dtype=torch.float64)
    dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)


def agree() -> None:
    """What they tell each other before an update: whether one of them skips it."""
    dist.all_reduce(torch.zeros(()), op=dist.ReduceOp.MAX)


def poll_and_agree() -> None:
    """Both."""
    poll()
    agree()


# ---------------------------------------------------------------------- measuring


def measure_case(case: Case, rounds: int) -> dict[str, Measured]:
    """The ratios of all contenders in a case, as this rank has timed them."""
    contenders = {
        BY_HAND: by_hand(case),
        AGAIN: by_hand(case),
        GUARDED: by_hand(case, poll_and_agree),
        BRAIN: by_brain(case),
    }
    found = measure(contenders, case.batches(), rounds)
    if dist.get_rank() == 0:
        for name, result in found.items():
            print(f"{case.name}: {name}: {in_words(result)}", flush=True)
    return found


def microseconds(call: Callable[[], None], times: int = 300) -> float:
    """Median time of one call that all ranks make."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


@dataclass(frozen=True)
class Sent:
    """Bytes that one step gives to collectives: by theory and counted, by hand and by Brain, and what its ranks say."""

    name: str
    theory: int
    by_hand: int
    brain: int
    guards: int


def count_sent(name: str, run: Run) -> Sent:
    """The bytes of one step on the small shape."""
    theory = sum(each.bytes * each.count for each in collectives(SMALL, run))
    counted = sum(count_step(dist.get_rank(), SMALL, run).given.values())
    fit = count_fit(dist.get_rank(), SMALL, run)
    return Sent(name, round(theory), counted, sum(fit.given.values()), fit.guards)


def sent_runs(strategies: Sequence[str], quick: bool) -> dict[str, Run]:
    """The steps whose bytes are counted."""
    ddp = Run("ddp", PROCESSES, batch=1, length=16, compute=FP32)
    fsdp = replace(ddp, strategy="fsdp")
    bf16 = replace(fsdp, compute=BF16)
    found = {
        "ddp": ddp,
        "ddp, windows of 4": replace(ddp, micro_batches=4),
        "ddp, gradient_compression: bf16": replace(ddp, gradient_bytes=BF16),
        "fsdp": fsdp,
        "fsdp, bf16": bf16,
        "fsdp, bf16, reshard_after_forward: false": replace(bf16, reshard_after_forward=False),
    }
    return {
        name: run for name, run in found.items() if run.strategy in strategies and (not quick or name in STRATEGIES)
    }


# ---------------------------------------------------------------------- the page


def in_words(result: Measured) -> str:
    """A result as a cell: the median ratio and its quartiles; the loop by hand as its milliseconds."""
    if all(ratio == 1.0 for ratio in result.ratios):
        return f"1.00 ({result.microseconds / 1000:.1f} ms)"
    low, median, high = quartiles(result.ratios)
    computed = statistics.median(result.processor_ratios)
    return f"{median:.3f} ({low:.3f} to {high:.3f}), {computed:.3f}" + ("" if result.same_weights else " *")


def report(results: dict[Case, dict[str, Measured]], words: dict[str, float], sent: list[Sent], command: str) -> str:
    """The results as a Markdown page."""
    rounds = len(next(iter(next(iter(results.values())).values())).ratios)
    device = next(iter(results)).device
    worst = max(
        statistics.median(found[BRAIN].ratios)
        for case, found in results.items()
        if case.shape == LARGE or len(results) < 3
    )
    lines = [
        "# What two processes cost over loops written by hand, and what they send",
        "",
        "Quote the ratios, not the times: these are this machine's, on that day.",
        "",
        f"- Command: `{command}`",
        f"- Date: {date.today().isoformat()}",
        f"- Machine: {machine(device)}, {count(os.cpu_count(), 'core')}; two processes of one thread each, over "
        f"{dist.get_backend_config()}",
        f"- Load at the end: {os.getloadavg()[0]:.1f}. These two processes make 2; where it is more, others computed "
        "beside them, and the ratios of times say little",
        f"- Software: torch {torch.__version__}, Python {platform.python_version()}",
        f"- {count(rounds, 'round')}; cells: the median over rounds of the ratio to the loop by hand in the same "
        "round, and its quartiles; behind the comma, that of the time that the process computes, which does not count "
        "what it waits for the other one. A time is that of one micro-batch",
        f"- Network: {LARGE}; small steps: {SMALL}. Fused AdamW, gradients clipped at norm {MAX_GRAD_NORM:g}",
        f"- Target: at most {TARGET:.2f} where a step takes some tens of milliseconds; the worst of those: {worst:.3f}",
        "",
        "## Time",
        "",
        f"| | {BY_HAND} | {AGAIN} | {GUARDED} | {BRAIN} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, found in results.items():
        cells = " | ".join(in_words(found[name]) for name in (BY_HAND, AGAIN, GUARDED, BRAIN))
        lines.append(f"| {case.name} | {cells} |")
    if any(not found[BRAIN].same_weights for found in results.values()):
        lines += [
            "",
            "`*` After the same batches the weights are not bit for bit those of the loop by hand. By torch's plain "
            "policy they cannot be: it computes norms, embedding and residuals in bf16 as well. Brain leaves them in "
            "fp32, as autocast does in one process, and as the loop of the other bf16 row does by groups of their own: "
            "there only embeddings differ, by a rounding.",
        ]
    lines += [
        "",
        "What ranks would have to tell each other in each step, so that one with a batch less, a NaN or a signal of "
        "its own does not leave the others waiting, timed alone: "
        + "; ".join(f"{what}: {taken:.0f} us" for what, taken in words.items())
        + ". Brain's ranks poll once for up to 16 windows, where the loaders know their length; under ddp the averaged "
        "gradients tell of a NaN, and no verdict is asked for.",
        "",
    ]
    if not sent:
        return "\n".join([*lines, "Bytes are counted on a CPU only, where a backward runs in the calling thread.", ""])
    lines += [
        "## Bytes given to collectives in one step",
        "",
        "Counted in each process by the operators that torch calls, DDP's reducer among them; of each collective the "
        "larger side. A ring sends (N - 1) / N of it, an all-reduce twice that. Theory: `_scaling_model.py`.",
        "",
        "| | theory | loop by hand | Brain | Brain's words between the ranks, at most |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {it.name} | {it.theory:,} | {it.by_hand:,} | {it.brain:,} | {it.guards:,} |" for it in sent]
    return "\n".join([*lines, ""])


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=9, help="how often all contenders run (%(default)s)")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="both by default")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="such as cuda (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small steps only, two rounds: to see that it runs")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    return parser.parse_args(argv)


def meet(device: torch.device) -> torch.device:
    """Join the other process; returns the device of this one. Where there is one device, both take it, over gloo.

    Each then is on a machine of its own, as far as it knows: a Brain refuses a device that two processes share.
    """
    if device.type == "cpu":
        dist.init_process_group("gloo")
        return device
    backend = dist.get_default_backend_for_device(device.type)
    if torch.accelerator.device_count() < PROCESSES:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        backend = "gloo"
    own = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(own.index)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}")
    return own


def run_worker(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure everything in this process, together with the others; rank 0 writes the page."""
    # A Brain warns of a loader without a rank; here each rank's batches are its own by their seed.
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    device = meet(options.device)
    words = {"the poll before a window": microseconds(poll), "the verdict before an update": microseconds(agree)}
    counted = sent_runs(options.strategies, options.quick) if device.type == "cpu" else {}
    sent = [count_sent(name, run) for name, run in counted.items()]
    rounds = 2 if options.quick else options.rounds
    results = {case: measure_case(case, rounds) for case in cases(options.strategies, options.quick, device)}
    if dist.get_rank() == 0:
        shown = [argument for argument in argv if not argument.startswith("--output=")]
        if "--output" in shown:  # where the page lies is nobody's business
            del shown[shown.index("--output") : shown.index("--output") + 2]
        command = shlex.join(["python", "benchmarks/distributed.py", *shown])
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(report(results, words, sent, command))
        print(f"written to {options.output}")
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    """Start two processes of this file under torchrun, or be one of them."""
    options = parse(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        run_worker(options, argv)
        return 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun, __file__, *argv], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
