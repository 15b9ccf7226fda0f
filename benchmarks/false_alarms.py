"""How often the proof by training calls a healthy recipe worse: its verdict on bf16 over many seeds.

    python benchmarks/false_alarms.py                          # all five recipes, 40 seeds each
    python benchmarks/false_alarms.py --recipes images --seeds 10

A seed is another start: other initial weights, batches and random numbers. Three recipes are the project's own, made
smaller, and train as their scripts say; the others are networks of `_small_networks.py` with Adam.
Each seed adds a line to `--lines`, and one that is there is not done again: it may be stopped, and done in pieces.
Writes `results/false_alarms.md` from all lines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _reporting import count, cpu_model, positive
from _small_networks import PatchTransformer, Task, images, plate

from amp_recipes import load_hparams
from amp_recipes.loop.examination import _examination, _first_windows
from amp_recipes.loop.rehearsal import training_trial
from amp_recipes.numerics.pins.equivalence import Comparison
from amp_recipes.numerics.pins.proof import Training, train_with_pins
from amp_recipes.numerics.trial import plain_trial

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "false_alarms.md"
LINES = ROOT / "build" / "false_alarms.jsonl"
WINDOWS = 32
ALLOWED = 0.05


@dataclass(frozen=True)
class Script:
    """A recipe of the project. brain: class of its `train.py`; data: key of its YAML that has the training set.

    smaller: sizes at which a seed takes seconds; else the recipe is as its YAML says.
    """

    folder: str
    configuration: str
    brain: str
    data: str
    smaller: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = True


SCRIPTS = {
    "template": Script("amp_recipes/templates/basic", "amp_recipes/templates/basic/my_task.yaml", "MyTask", "datasets"),
    "images": Script(
        "recipes/image_classification",
        "configs/image_classification.yaml",
        "ImageClassifier",
        "images",
        {"model": {"widths": [8, 16, 32]}, "loader_kwargs": {"batch_size": 16}},
    ),
    "language": Script(
        "recipes/language_modeling",
        "configs/language_modeling.yaml",
        "LanguageModel",
        "corpus",
        {"model": {"layers": 1, "features": 32, "heads": 2}, "window_tokens": 64, "peak_flops": 1e12},
        shuffle=False,  # its data set shuffles itself
    ),
}


# ---------------------------------------------------------------------- the recipes


def trained_by_brain(script: Script, seed: int, steps: int) -> Training:
    """The verdict on a recipe of the project, whose step is that of its Brain."""
    sys.path.insert(0, str(ROOT / script.folder))
    try:
        overrides = {"seed": seed, "output_folder": None, "precision": "fp32", **script.smaller}
        hparams = load_hparams(ROOT / script.configuration, overrides, trust=("data", "model", "optim"))
        brain_class = getattr(importlib.import_module("train"), script.brain)
        brain = brain_class(hparams["modules"], hparams["opt_class"], hparams, {"device": "cpu"})
        run, loader_kwargs = brain._Brain__run, dict(hparams["loader_kwargs"])
        if script.shuffle:
            loader_kwargs["shuffle"] = True
        with _examination(run):
            windows = _first_windows(run, hparams[script.data].train, loader_kwargs, WINDOWS)
            return train_with_pins(training_trial(run), windows, torch.bfloat16, 1.0, (), steps)
    finally:
        sys.path.pop(0)
        for name in ("train", "data", "model", "optim", "windows", "shards", "throughput"):  # of the next recipe
            sys.modules.pop(name, None)


def trained_by_hand(task: Task, seed: int, steps: int) -> Training:
    """The verdict on a network of `_small_networks.py`, with a loop by hand and Adam."""
    torch.manual_seed(seed)
    model = task.make()
    trial = plain_trial(model, task.objective, torch.optim.Adam(model.parameters(), lr=3e-3))
    generator = torch.Generator().manual_seed(seed)
    windows = [[task.draw(generator)] for _ in range(WINDOWS)]
    return train_with_pins(trial, windows, torch.bfloat16, 1.0, (), steps)


def small_encoder() -> torch.nn.Module:
    return PatchTransformer(width=16, layers=2)


def trained_on_fault(name: str, seed: int, steps: int) -> Training:
    """The verdict on a network of the tests with a planted fault that makes nothing nonfinite; seed: of its batches."""
    sys.path[:0] = [str(ROOT / "tests" / "corpus"), str(ROOT / "tests" / "support")]
    fault = importlib.import_module("planted_faults").ZOO[name]
    return train_with_pins(fault.trial(), fault.windows(WINDOWS, seed), fault.dtype, fault.scale, (), steps)


def trained(name: str, seed: int, steps: int) -> Training:
    """The verdict on a recipe, or on a planted fault."""
    if name in SCRIPTS:
        return trained_by_brain(SCRIPTS[name], seed, steps)
    if name in FAULTS:
        return trained_on_fault(name, seed, steps)
    return trained_by_hand(plate(unit=1000.0) if name == "plate" else images(small_encoder), seed, steps)


RECIPES = {
    "template": "`amp-recipes new my_task`",
    "images": "`image_classification`: digits, channels 8, 16, 32, batches of 16",
    "language": "`language_modeling`: one block of 32 features, windows of 64 bytes",
    "plate": "a regression: the deflection of a plate, two hidden layers",
    "patches": "torch's transformer encoder over patches of images, with dropout",
}
FAULTS = {
    "silent_zero_of_squares": "fp16: squares that become 0",
    "silent_count_of_ones": "fp16: a sum of ones that stops growing",
    "large_angle_sine_bf16": "bf16: the sine of large angles",
    "lstm_on_an_offset_bf16": "bf16: an LSTM whose input has a large offset",
}


# ---------------------------------------------------------------------- lines and table


def line_of(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, and return the line of the file."""
    began = time.process_time()
    found = trained(name, seed, steps)
    seen = {} if found.comparison is None else asdict(found.comparison)
    curves = {"reference": found.reference, "low": found.low}
    ends = {name: [f"{statistics.fmean(c[-steps // 4 :]):.6g}" for c in mine] for name, mine in curves.items()}
    what = {"recipe": name, "seed": seed, "steps": steps, "text": found.text, **seen, **ends}
    machine = {"machine": cpu_model(), "torch": torch.__version__, "date": str(date.today())}
    return {**what, "cpu_seconds": round(time.process_time() - began, 1), **machine}


def read(path: Path, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    """The lines that are there already, by recipe and seed."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {(row["recipe"], row["seed"]): row for row in rows if row["steps"] == steps}


def verdict_of(row: Mapping[str, Any]) -> str:
    """The verdict on the figures of a line."""
    if "margin" not in row:  # updates were skipped, or a loss was not finite
        return "not decided"
    seen = Comparison(**{each.name: row[each.name] for each in fields(Comparison)})
    found = {"worse": seen.worse, "no worse": seen.equal, "lower": seen.lower}
    return next((verdict for verdict, holds in found.items() if holds), "not decided")


def table(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """A row for each network that has lines."""
    text = [
        "| network | seeds | no worse | lower | not decided | WORSE | pairs | interval / fall | seeds' sd / fall |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, description in names.items():
        mine = [row for row in rows if row["recipe"] == name]
        if not mine:
            continue
        verdicts = [verdict_of(row) for row in mine]
        counts = [verdicts.count(verdict) for verdict in ("no worse", "lower", "not decided", "worse")]
        compared = [row for row in mine if row.get("fall", 0) > 0]
        shares = [
            f"{100 * statistics.median(row[key] / row['fall'] for row in compared):.2g} %" if compared else "-"
            for key in ("uncertain", "spread")
        ]
        pairs = f"{statistics.fmean(row['pairs'] for row in compared):.1f}" if compared else "-"
        text.append(
            f"| {description} | {len(mine)} | {' | '.join(map(str, counts))} | {pairs} | {' | '.join(shares)} |"
        )
    return text


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of results."""
    healthy = [row for row in rows if row["recipe"] in RECIPES]
    alarms, number = sum(verdict_of(row) == "worse" for row in healthy), len(healthy)
    # With no alarm in n, a rate above 3 / n would have shown one in 95 % of cases (the rule of three).
    bound = f", so the rate is below {100 * 3 / number:.1f} % (rule of three, 95 %)" if number and not alarms else ""
    steps = rows[0]["steps"]
    days = sorted({row["date"] for row in rows})
    return "\n".join(
        [
            "# False alarms of the proof by training",
            "",
            "How often the proof by training of a diagnosis calls a network worse in low precision: healthy ones, "
            "where that is a false alarm, and ones with a planted fault, where it is right.",
            "",
            f"- Command: `python benchmarks/false_alarms.py --steps {steps}`",
            f"- Date: {' to '.join(sorted({days[0], days[-1]}))}",
            f"- Machine: {', '.join(sorted({row['machine'] for row in rows}))}; 1 thread of torch",
            f"- Software: torch {', '.join(sorted({row['torch'] for row in rows}))}",
            f"- {count(steps, 'step')} in each training, {WINDOWS} windows, bf16 unless the name says fp16",
            "- Lower: the loss ends lower by more than the margin, which proves nothing",
            "- A seed is another start: other initial weights, batches and random numbers (of faults: other batches)",
            "- Pairs: mean. Interval (half of it), seeds' sd: medians, as shares of what the loss falls by in fp32",
            f"- Processor time: {sum(row['cpu_seconds'] for row in rows) / 60:.0f} minutes",
            "",
            "## Healthy networks",
            "",
            *table(rows, RECIPES),
            "",
            f"**False alarms: {alarms} of {number}**{bound}.",
            "",
            "## Planted faults",
            "",
            "Nothing gets nonfinite here, and nothing is pinned. In a diagnosis, the bounds on the error of the "
            "gradients come before: each of these exceeds them (`tests/corpus/test_planted_pins.py`).",
            "",
            *table(rows, FAULTS),
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fill in what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, *FAULTS], default=[*RECIPES, *FAULTS])
    parser.add_argument("--seeds", type=positive, default=40, help="of each healthy network (40)")
    parser.add_argument("--fault-seeds", type=positive, default=10, help="of each planted fault (10)")
    parser.add_argument("--steps", type=positive, default=100, help="of each training (100)")
    parser.add_argument("--lines", type=Path, default=LINES, help=f"a line for each seed ({LINES.relative_to(ROOT)})")
    parser.add_argument("--output", type=Path, default=RESULT, help="the page")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    options.lines.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.lines, options.steps)
    for seed in range(max(options.seeds, options.fault_seeds)):
        for name in options.recipes:
            asked = options.seeds if name in RECIPES else options.fault_seeds
            if seed < asked and (name, seed) not in done:
                done[name, seed] = line_of(name, seed, options.steps)
                with options.lines.open("a") as lines:
                    lines.write(json.dumps(done[name, seed]) + "\n")
                print(name, seed, done[name, seed]["text"], flush=True)
    rows = [row for (name, _), row in sorted(done.items()) if name in RECIPES or name in FAULTS]
    options.output.write_text(page(rows))
    alarms = [verdict_of(row) == "worse" for row in rows if row["recipe"] in RECIPES]
    return int(sum(alarms) > ALLOWED * len(alarms))


if __name__ == "__main__":
    sys.exit(main())
