"""Measures how the package hangs together: classes, attributes, rooms, the functions of a step, complexity, imports.

    python benchmarks/structure.py            # a Markdown table
    python benchmarks/structure.py --list     # and below it, what each number counts

It measures the checkout that it stands in. The numbers of complexity need radon (`pip install radon`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from _structure_of_code import (
    FILES,
    PACKAGE,
    REPOSITORY,
    Measure,
    is_private,
    measure_attributes,
    measure_classes,
    measure_private_names,
    measure_rooms,
    shown,
)
from torch import nn

sys.path.insert(0, str(REPOSITORY))  # not a package of that name that is installed

from amp_recipes import Brain

LARGEST_COMPLEXITY = 10


class Regression(Brain):
    """The least that a recipe defines."""

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        return nn.functional.mse_loss(predictions, batch[1])


def tiny_brain() -> Brain:
    options = {"device": "cpu", "noprogressbar": True}
    return Regression({"model": nn.Linear(3, 1)}, lambda parameters: torch.optim.SGD(parameters, 0.1), None, options)


def measure_private_names_of_brain() -> Iterator[Measure]:
    names = [name for name in dir(tiny_brain()) if is_private(name)]
    yield Measure("private names in `dir(brain)`", str(len(names)), [" ".join(names)])


class Profiled(torch.utils.data.Dataset):
    """Samples for batches of two; one step, from the loading of its batch to that of the next, is profiled."""

    def __init__(self) -> None:
        self.called: set[CodeType] = set()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index in (20, 22):
            sys.setprofile(self.note if index == 20 else None)
        return torch.ones(3), torch.ones(1)

    def batches(self) -> Iterator[list[torch.Tensor]]:
        """The same samples as batches, for which the framework makes no loader."""
        for index in range(0, len(self), 2):
            yield torch.utils.data.default_collate([self[index], self[index + 1]])

    def note(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            self.called.add(frame.f_code)


def measure_step() -> Iterator[Measure]:
    """Counts what is called in one step; a lambda or a comprehension counts as a function, as Python calls it."""
    of_batches, of_samples = Profiled(), Profiled()
    tiny_brain().fit(range(1), of_batches.batches())
    tiny_brain().fit(range(1), of_samples, train_loader_kwargs={"batch_size": 2})
    for kind, called in (("batches", of_batches.called), ("samples", of_samples.called)):
        places = sorted(f"{shown(Path(code.co_filename))}:{code.co_firstlineno} {code.co_name}" for code in called)
        files = {code.co_filename for code in called}
        yield Measure(f"own functions, files of a plain fp32 step, from {kind}", f"{len(called)}, {len(files)}", places)


# ------------------------------------------------------------------ size and speed


def measure_complexity() -> Iterator[Measure]:
    name = "mean complexity; share of functions over 10"
    try:
        from radon.complexity import cc_visit
        from radon.visitors import Function
    except ImportError:
        yield Measure(name, "needs radon: pip install radon", [])
        return
    blocks = [(block, path) for path in FILES for block in cc_visit(path.read_text()) if isinstance(block, Function)]
    large = [(block, path) for block, path in blocks if block.complexity > LARGEST_COMPLEXITY]
    mean = statistics.mean(block.complexity for block, _ in blocks)
    value = f"{mean:.2f}; {len(large) / len(blocks):.1%} ({len(large)} of {len(blocks)})"
    large.sort(key=lambda pair: -pair[0].complexity)
    yield Measure(name, value, [f"{block.complexity} {shown(path)}: {block.fullname}" for block, path in large])


def measure_lines() -> Iterator[Measure]:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    longest = [f"{count} {shown(path)}" for path, count in sorted(lines.items(), key=lambda item: -item[1])]
    yield Measure("lines of the package", f"{sum(lines.values()):,} in {len(lines)} files", longest)


def seconds_of(statement: str, before: str = "") -> float:
    """How long a statement takes in a fresh interpreter; before: what is imported first."""
    code = f"import time\n{before}\nstart = time.perf_counter()\n{statement}\nprint(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=True).stdout)


def measure_imports(rounds: int) -> Iterator[Measure]:
    ours = "from amp_recipes import Brain"
    cases = {
        "`import torch`": ("import torch", ""),
        "`import amp_recipes`": ("import amp_recipes", ""),
        f"`{ours}`": (ours, ""),
        f"`{ours}`, with torch imported before,": (ours, "import torch"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            seconds[name].append(seconds_of(*case))
    torchs, *others = ((name, statistics.median(times)) for name, times in seconds.items())
    for name, median in others:
        counted = [f"{median:.3f} s over {torchs[1]:.3f} s, medians of {rounds} rounds"]
        yield Measure(f"{name} over `import torch`", f"{median / torchs[1]:.2f}", counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also list what each number counts")
    parser.add_argument("--rounds", type=int, default=7, help="interpreters started for each import (default: 7)")
    arguments = parser.parse_args()
    measures: list[Callable[[], Iterator[Measure]]] = [
        *(measure_classes, measure_attributes, measure_private_names, measure_private_names_of_brain, measure_rooms),
        *(measure_step, measure_complexity, measure_lines, lambda: measure_imports(arguments.rounds)),
    ]
    rows = [row for measure in measures for row in measure()]
    print("| measure | value |", "| --- | --- |", *(f"| {row.name} | {row.value} |" for row in rows), sep="\n")
    if arguments.list:
        for row in rows:
            print(f"\n## {row.name}: {row.value}\n", *row.counted, sep="\n")


if __name__ == "__main__":
    main()
