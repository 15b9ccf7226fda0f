"""How well the drift report ranks modules: its order against the truth, by Spearman's correlation.

    python benchmarks/sensitivity.py

The truth about a module is the gradient error of the whole model when the own ops of that module alone run in low
precision, which takes runs for each module. The drift report ranks by the sensitivity S, which takes two runs and a
second forward for all of them together. Beside it stands what one would look at first, the local error |d| / |y|.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _small_networks import (
    VOCABULARY,
    Batch,
    ConvNet,
    PatchTransformer,
    RecurrentModel,
    Task,
    images,
    language,
    planted,
    residual_mlp,
)
from overhead import count, machine, positive
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from amp_recipes.numerics.drift.drift import ModuleDrift, drift
from amp_recipes.numerics.trial import Outcome, Trial, Window, gradient_error, plain_trial
from amp_recipes.precision import AMPConfig, TorchAutocast, pinned_only

RESULT = Path(__file__).parent / "results" / "sensitivity.md"
REQUIRED = 0.8  # of the median correlation of S
FP16_SCALE = 2.0**10


@dataclass(frozen=True)
class Subject:
    """A network to rank the modules of. steps: how long it is trained (Adam, fp32) before; then `change` is made."""

    name: str
    task: Task
    precision: str = "bf16"
    steps: int = 0
    learning_rate: float = 3e-3
    change: Callable[[nn.Module], None] = lambda model: None


@torch.no_grad()
def add_outlier_channels(model: nn.Module) -> None:
    """As large language models have them: a few channels 60 times the rest, the function unchanged; and sharp heads."""
    block = model.blocks[1]
    block.mlp_norm.weight[::8] *= 60
    block.mlp_norm.bias[::8] *= 60
    block.mlp[0].weight[:, ::8] /= 60
    model.blocks[0].attention.in_proj_weight[: model.head.in_features] *= 4


def subjects() -> dict[str, Subject]:
    """By the name that the command line knows."""
    recurrent = language(0, make=lambda: RecurrentModel(VOCABULARY, 32))
    deep = language(0, layers=3)
    return {
        "planted": Subject("three planted faults", images(lambda: planted(3e5))),
        "planted-fp16": Subject("three planted faults, fp16", images(lambda: planted(3e5)), "fp16"),
        "planted-mild-fp16": Subject("the same without overflow, fp16", images(lambda: planted(3e3)), "fp16"),
        "lm": Subject("language model, at init", deep),
        "lm-trained": Subject("language model, trained", deep, steps=300),
        "lm-outliers": Subject("language model, with outlier channels", deep, steps=300, change=add_outlier_channels),
        "lm-fp16": Subject("language model, trained, fp16", language(0), "fp16", steps=200),
        "conv": Subject("residual conv net, at init", images(ConvNet)),
        "conv-trained": Subject("residual conv net, trained", images(ConvNet), steps=100),
        "lstm": Subject("three LSTMs, at init", recurrent),
        "lstm-trained": Subject("three LSTMs, trained", recurrent, steps=200),
        "encoder": Subject("torch's transformer encoder, trained", images(PatchTransformer), steps=150),
        "mlp": Subject("residual MLP, at init", images(residual_mlp)),
        "mlp-trained": Subject("residual MLP, trained", images(residual_mlp), steps=150),
    }


SMALL = ("planted", "lm", "mlp")

# ---------------------------------------------------------------------- the truth
#
# Written apart from what the report does to measure modules, so that a mistake there shows here.


@dataclass
class Seen:
    """In which dtypes the floating tensors went into each module and came out, in the whole low run.

    Every module of these networks is called once in a forward.
    """

    into: dict[str, list[torch.dtype]] = field(default_factory=dict)
    out_of: dict[str, list[torch.dtype]] = field(default_factory=dict)

    @contextmanager
    def watching(self, modules: nn.Module) -> Iterator[None]:
        """Within it, a run is looked at."""
        with ExitStack() as stack:
            for name, module in modules.named_modules():
                stack.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            yield

    def _before(self, name: str) -> Callable:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            assert name not in self.into, f"{name} is called twice"
            self.into[name] = [it.dtype for it in floating((args, kwargs))]

        return hook

    def _after(self, name: str) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.out_of[name] = [it.dtype for it in floating(output)]

        return hook


def floating(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in nested containers, each once."""
    tensors = {id(it): it for it in tree_leaves(value) if isinstance(it, torch.Tensor) and it.is_floating_point()}
    return list(tensors.values())


def cast(value: Any, to: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """`value` with each floating-point tensor and its number given to `to`; what was one tensor stays one."""
    casts = {id(it): to(it, number) for number, it in enumerate(floating(value))}
    return tree_map(lambda it: casts.get(id(it), it), value)


@contextmanager
def alone(
    trial: Trial, name: str, candidates: Sequence[str], dtype: torch.dtype, seen: Seen | None = None, low: bool = True
) -> Iterator[None]:
    """Within it a run in fp32 computes the own ops of one module in `dtype`, and not those of candidates inside it.

    Where no candidate holds another, this is the low run in which all candidates but one are pinned; where one does,
    no set of pins leaves the inner one low and its surroundings in fp32. seen: what goes into the module, and comes
    out of those inside it, is rounded as it was there. low: False: it is only rounded so, and computed in fp32.
    """
    module = trial.modules.get_submodule(name)
    prefix = f"{name}." if name else ""
    within = [other for other in candidates if other != name and other.startswith(prefix)]
    outermost = [it for it in within if not any(it.startswith(f"{other}.") for other in within)]
    inside = {full.removeprefix(prefix): full for full in outermost}
    autocast = TorchAutocast(trial.device.type, dtype=dtype if low else torch.float32)

    def round_as(dtypes: Sequence[torch.dtype]) -> Callable[[torch.Tensor, int], torch.Tensor]:
        return lambda it, number: it.to(dtypes[number]) if low else it.to(dtypes[number]).float()

    with ExitStack() as stack:
        if inside:
            stack.enter_context(pinned_only(module, inside))
        if seen is not None:
            for path, full in inside.items():

                def as_it_came_out(child: nn.Module, args: Any, output: Any, full: str = full) -> Any:
                    return cast(output, round_as(seen.out_of[full]))

                stack.callback(module.get_submodule(path).register_forward_hook(as_it_came_out).remove)
        forward = module.forward

        def in_low(*args: Any, **kwargs: Any) -> Any:
            if seen is not None:
                args, kwargs = cast((args, kwargs), round_as(seen.into[name]))
            with autocast:
                output = forward(*args, **kwargs)
            return cast(output, lambda it, _: it.float())

        module.forward = in_low
        stack.callback(delattr, module, "forward")
        yield


@dataclass
class Truth:
    """Gradient errors of the whole model, by module and window, when the own ops of one module are low.

    pinned: all other candidates are pinned to fp32, so that it is given fp32; as_given: it is given what the whole low
    run gives it, also in the run that it is compared with.
    """

    pinned: dict[str, list[float]] = field(default_factory=dict)
    as_given: dict[str, list[float]] = field(default_factory=dict)


def true_errors(
    trial: Trial, windows: Sequence[Window], candidates: Sequence[str], dtype: torch.dtype, scale: float
) -> Truth:
    """Three runs for each module and window."""
    truth = Truth({name: [] for name in candidates}, {name: [] for name in candidates})
    for window in windows:
        reference = trial.run(window)
        seen = Seen()
        trial.run(window, dtype, scale, watch=[seen.watching(trial.modules)])
        for name in candidates:
            only_low = partial(alone, trial, name, candidates, dtype)
            truth.pinned[name].append(gradient_error(run_finite(trial, window, scale, only_low), reference))
            exact = trial.run(window, watch=[only_low(seen, low=False)])
            # Where it is given what is not finite, nothing of that is its own.
            error = gradient_error(run_finite(trial, window, scale, partial(only_low, seen)), exact)
            truth.as_given[name].append(error if exact.is_finite else 0.0)
    return truth


def run_finite(trial: Trial, window: Window, scale: float, watch: Callable[[], Any]) -> Outcome:
    """A run at a lower scale where the gradients overflow, as loss scaling would have it."""
    while True:
        outcome = trial.run(window, scale=scale, watch=[watch()])
        if outcome.is_finite or not outcome.loss_is_finite or scale <= 1.0:
            return outcome
        scale /= 16


# ---------------------------------------------------------------------- one network


@dataclass
class Correlations:
    """Spearman's, with one truth: of S, of the local error, and of the truth's halves with each other."""

    modules: int
    sensitivity: float
    local_error: float
    halves: float
    first: str  # module with the largest true error


@dataclass
class Ranked:
    """One network: what the report says of each module, and the true errors."""

    rows: list[ModuleDrift]
    truth: Truth
    seconds: dict[str, float]

    @property
    def as_given(self) -> Correlations:
        """With the truth in which a module is given what the whole low run gives it; all modules."""
        return self._correlations(self.truth.as_given, self.rows)

    @property
    def pinned(self) -> Correlations:
        """With the truth in which all others are pinned; modules that then compute anything in low precision."""
        return self._correlations(self.truth.pinned, [row for row in self.rows if any(self.truth.pinned[row.module])])

    def _correlations(self, truth: dict[str, list[float]], rows: Sequence[ModuleDrift]) -> Correlations:
        errors = [truth[row.module] for row in rows]
        true = list(map(mean_square, errors))
        return Correlations(
            modules=len(rows),
            sensitivity=spearman([row.sensitivity for row in rows], true),
            local_error=spearman([row.local_error for row in rows], true),
            halves=spearman(*([mean_square(each[half::2]) for each in errors] for half in (0, 1))),
            first=max(zip(true, [row.module for row in rows], strict=True))[1],
        )


def mean_square(errors: Sequence[float]) -> float:
    """The mean of the squares."""
    return statistics.fmean(error**2 for error in errors) if errors else math.nan


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The rank correlation; ties share their ranks."""
    try:
        from scipy.stats import spearmanr
    except ImportError as error:
        raise SystemExit(f"this benchmark needs scipy: pip install -e '.[report]' ({error})") from None
    return float(spearmanr(ours, theirs).statistic)


def rank(subject: Subject, batches: int, seed: int, device: torch.device) -> Ranked:
    """Train the subject, let the drift report rank its modules, and find the truth."""
    torch.manual_seed(seed)
    model = subject.task.make().to(device)
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw() -> Batch:
        inputs, targets = subject.task.draw(generator)
        return inputs.to(device), targets.to(device)

    optimizer = torch.optim.Adam(model.parameters(), subject.learning_rate)
    for _ in range(subject.steps):
        optimizer.zero_grad()
        subject.task.objective(model, draw()).backward()
        optimizer.step()
    subject.change(model)

    trial = plain_trial(model, subject.task.objective)
    windows = [[draw()] for _ in range(batches)]
    dtype = AMPConfig.from_name(subject.precision).dtype
    scale = FP16_SCALE if subject.precision == "fp16" else 1.0
    began = time.perf_counter()
    rows = drift(trial, windows, dtype, scale)
    ranked = time.perf_counter()
    truth = true_errors(trial, windows, [row.module for row in rows], dtype, scale)
    seconds = {"drift": ranked - began, "truth": time.perf_counter() - ranked}
    found = Ranked(rows, truth, seconds)
    for name, it in (("others pinned", found.pinned), ("as given", found.as_given)):
        print(
            f"{subject.name}, {name}: {it.modules} modules, S {it.sensitivity:.2f}, local error {it.local_error:.2f}, "
            f"halves {it.halves:.2f}",
            flush=True,
        )
    return found


# ---------------------------------------------------------------------- the table


def report(results: dict[str, Ranked], options: argparse.Namespace, command: str) -> str:
    """The results as a Markdown page."""
    costs = [found.seconds["truth"] / found.seconds["drift"] for found in results.values()]
    batches = "1 batch" if options.batches == 1 else f"{options.batches} batches"
    lines = [
        "# How well the drift report ranks modules",
        "",
        "Spearman's correlation of two figures of the report with the truth: the gradient error of the whole model "
        "when the own ops of that module alone run in low precision (root mean square over batches). 1: the same "
        "order; 0: no relation.",
        "",
        f"- Command: `{command}`",
        f"- Date: {date.today().isoformat()}",
        f"- Machine: {machine(options.device)}, {count(os.cpu_count() or 1, 'core')}; "
        f"{count(options.threads, 'thread')} of torch",
        f"- Software: torch {torch.__version__}, Python {platform.python_version()}",
        f"- {batches} for each network; bf16 where the name does not say fp16, whose loss scale begins at "
        f"{FP16_SCALE:g}. Modules: all that own ops in low precision",
        "- S: the sensitivity, by which the report ranks. Local error: |d| / |y| of the module's output",
        "- Halves: the correlation of the truth on one half of the batches with the truth on the other; what is above "
        "it is chance",
        f"- The truth took {statistics.median(costs):.0f} times the time of the report (median)",
    ]
    for title, about, view in (
        (
            "All other modules pinned",
            "Every other module is in fp32, and gives fp32. A module that has no op on autocast's list, and only "
            "follows the dtype of its input, has no error then, and is left out. A module now rounds its inputs "
            "itself, which S lays at the door of the module that gave them rounded: so the layers behind the planted "
            "faults rank high here (the matrix product behind `x + 300`; in fp16 the one that is given what "
            "overflows), and low in S.",
            lambda found: found.pinned,
        ),
        (
            "As given in the whole low run",
            "What the report measures: the module is given what the whole low run gives it, rounded, and is compared "
            "with fp32 on the same. So a rounding counts where it happens, and modules that follow their input count.",
            lambda found: found.as_given,
        ),
    ):
        lines += ["", f"## {title}", "", about, "", *table({name: view(found) for name, found in results.items()})]
    return "\n".join([*lines, ""])


def table(results: dict[str, Correlations]) -> list[str]:
    """One row per network, then the median and whether it is enough."""
    every = subjects()
    lines = ["| network | modules | S | local error | halves |", "| --- | --- | --- | --- | --- |"]
    for name, it in results.items():
        cells = [str(it.modules), *(f"{value:.2f}" for value in (it.sensitivity, it.local_error, it.halves))]
        lines.append(f"| {every[name].name} | {' | '.join(cells)} |")
    median, median_local = (
        statistics.median(getattr(it, figure) for it in results.values()) for figure in ("sensitivity", "local_error")
    )
    verdict = "yes" if median >= REQUIRED else "NO"
    return [
        *lines,
        f"| **median** | | **{median:.2f}** | **{median_local:.2f}** | |",
        "",
        f"Median of S at least {REQUIRED}: {verdict}.",
    ]


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    names = list(subjects())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--networks", nargs="+", choices=names, help="all by default")
    parser.add_argument("--batches", type=positive, default=6, help="that errors are averaged over (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and batches (%(default)s)")
    parser.add_argument("--small", action="store_true", help=f"only {', '.join(SMALL)}, 2 batches")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="such as cuda (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    options = parser.parse_args(argv)
    if options.networks is None:
        options.networks = list(SMALL) if options.small else names
    if options.small:
        options.batches = min(options.batches, 2)
    return options


def main(argv: Sequence[str]) -> None:
    """Rank every network and write the page."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    every = subjects()
    results = {name: rank(every[name], options.batches, options.seed, options.device) for name in options.networks}
    shown = [argument for argument in argv if not argument.startswith("--output=")]
    if "--output" in shown:  # where the table lies is nobody's business
        del shown[shown.index("--output") : shown.index("--output") + 2]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/sensitivity.py", *shown])
    options.output.write_text(report(results, options, command))
    print(f"written to {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
