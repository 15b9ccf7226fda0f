"""Makes the table of results of each recipe: every precision, three seeds, one run after another.

    python benchmarks/recipes.py                                    # all tables; an hour or more, on an idle machine
    python benchmarks/recipes.py image_classification adversarial   # some of them
    python benchmarks/recipes.py --small                            # one short run of each precision, to try it

Each table is an `amp-recipes compare`. A run that is there already is not made again, so the same command goes on
after a stop. Needs the recipes' packages: pip install -e '.[recipes]'
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from _reporting import cpu_model

REPOSITORY = Path(__file__).resolve().parent.parent
RESULT = REPOSITORY / "benchmarks" / "results" / "recipe_tables.md"
RUNS = REPOSITORY / "build" / "recipe_tables"
ALL = "fp32,bf16,fp16"


@dataclass(frozen=True)
class Table:
    """A comparison of precisions. options: how its runs differ from the YAML; small: the same for a trial."""

    config: str
    options: str = ""
    small: str = ""
    precisions: str = ALL
    recipe: str = ""  # the folder below recipes/, where it is not called as the YAML

    @property
    def files(self) -> list[str]:
        """The script and the YAML."""
        return [f"recipes/{self.recipe or self.config}/train.py", f"configs/{self.config}.yaml"]


_SPEECH = (
    "--width=64 '--model.front.channels=[8, 16]' '--synthetic.counts=[500, 60, 100]' --number_of_epochs=8 --lr=0.005 "
    "'--synthetic.words=[zero, one, two, three, four, five, six, seven, eight, nine]'"
)
_SMALL_SPEECH = (
    "--width=16 '--model.front.channels=[4, 4]' '--synthetic.counts=[24, 4, 4]' --number_of_epochs=1 "
    "--batches.max_total_length=4"
)
_TEXT = "--max_valid_windows=64"
_SMALL_TEXT = (
    "--model.layers=1 --model.features=32 --model.heads=2 --window_tokens=32 --number_of_epochs=1 --steps_per_epoch=5 "
    "--max_valid_windows=8 --data_path=README.md --peak_flops=1e11"
)
TABLES = {
    "image_classification": Table("image_classification", small="'--model.widths=[4, 8]' --number_of_epochs=1"),
    "adversarial": Table("adversarial", "--number_of_epochs=40 --width=8 --lr=0.003", "--width=4 --number_of_epochs=1"),
    "finetuning": Table(
        "finetuning",
        "--max_tokens=32 --number_of_epochs=3",
        "--max_tokens=16 --number_of_epochs=1 --pretraining_updates=2 --cache_folder=build/recipe_tables/cache",
    ),
    "language_modeling": Table(
        "language_modeling",
        f"{_TEXT} --model.features=128 --model.heads=2 --window_tokens=128 --number_of_epochs=2 --steps_per_epoch=150",
        _SMALL_TEXT,
        "fp32,bf16",
    ),
    "language_modeling_smallest": Table(
        "language_modeling",
        f"{_TEXT} --model.layers=1 --model.features=64 --model.heads=1 --window_tokens=64 --number_of_epochs=1 "
        "--steps_per_epoch=100",
        _SMALL_TEXT,
    ),
    "speech_recognition": Table("speech_recognition", _SPEECH, _SMALL_SPEECH),
    "speech_recognition_unpinned": Table(
        "speech_recognition",
        f"{_SPEECH} --pin_features=False --pin_loss=False",
        f"{_SMALL_SPEECH} --pin_features=False --pin_loss=False",
    ),
}


def command(name: str, small: bool) -> list[str]:
    """Return the words after `amp-recipes` that make a table."""
    table = TABLES[name]
    folder = RUNS / ("small" if small else "whole") / name
    seeds = "1" if small else "3"
    words = ["compare", *table.files, "--precisions", table.precisions, "--seeds", seeds]
    words += ["--to", str(folder.relative_to(REPOSITORY)), "--"]
    return [*words, "--noprogressbar", *shlex.split(table.small if small else table.options)]


def make_table(name: str, small: bool) -> str:
    """Make the runs of a table; return its section of the page. Raises RuntimeError where no table came out."""
    words = command(name, small)
    print(f"== {name}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a core each: what the times of a table have in common
    subprocess.run([sys.executable, "-m", "amp_recipes", *words], cwd=REPOSITORY, env=environment, check=False)
    made = REPOSITORY / words[words.index("--to") + 1] / "compare.md"
    if not made.is_file():
        raise RuntimeError(f"{name}: the comparison made no {made.name}")
    return f"## {name}\n\n    amp-recipes {shlex.join(words)}\n\n{made.read_text(encoding='utf-8').strip()}\n"


def head(small: bool) -> str:
    """Return how the page opens: what was measured where."""
    told = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(told, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
    trial = "\nA trial of the command with tiny runs (`--small`): these are no results.\n" if small else ""
    return (
        "# The recipes at each precision\n\nMade by `python benchmarks/recipes.py"
        f"{' --small' if small else ''}` on {date.today()}: commit {commit or 'unknown'}, torch {torch.__version__}, "
        f"{cpu_model()}, {os.environ.get('OMP_NUM_THREADS', '1')} thread(s) for each run.\n{trial}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; return 1 if a table could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"which: {', '.join(TABLES)} (default: all)")
    parser.add_argument("--small", action="store_true", help="tiny runs, into build/: only to see that it works")
    parser.add_argument("--output", type=Path, help="file of the page")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.tables) - set(TABLES))
    if unknown:
        parser.error(f"unknown table {', '.join(unknown)}; expected {', '.join(TABLES)}")
    sections, failed = [head(options.small)], []
    for name in options.tables or TABLES:
        try:
            sections.append(make_table(name, options.small))
        except RuntimeError as error:
            failed.append(str(error))
    path = options.output or (RUNS / "small.md" if options.small else RESULT)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*sections, *(f"**{why}**\n" for why in failed)]), encoding="utf-8")
    print(f"wrote {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
