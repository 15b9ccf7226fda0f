"""What checking a YAML takes, over HyperPyYAML's load of the same text; and how soon a bomb is refused.

    python benchmarks/yaml_check.py

Both ways run in one process, in turn (A B, A B, ...), on the same files; reported are the median ratio over rounds and
the median seconds. Bombs run once for the time, and once for the memory that Python takes at its peak (tracemalloc).
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import ruamel.yaml
import torch
from hyperpyyaml import load_hyperpyyaml
from overhead import cpu_model, positive

from amp_recipes.config import check, load_hparams
from amp_recipes.errors import ConfigError

RESULT = Path(__file__).parent / "results" / "yaml_check.md"

_PART = """\
lr_{n}: 0.00{n}  # at the start
sizes_{n}: [{n}, 16, !ref <width>]
width_{n}: !ref <width> * 2 + {n}
folder_{n}: !ref results/<name>/run_{n}
layer_{n}: !new:torch.nn.Linear
  in_features: !ref <width>
  out_features: !ref <width_{n}>
  bias: false
optimizer_{n}: !name:torch.optim.AdamW
  lr: !ref <lr_{n}>
  betas: (0.9, 0.99)
"""


def typical(parts: int) -> str:
    """A YAML of 11 lines for each part: objects, references, arithmetic, paths, tuples."""
    return "width: 8\nname: try\n" + "".join(_PART.format(n=n) for n in range(parts))


def doubling(link: str, levels: int) -> str:
    """A chain in which each key holds the one before twice."""
    return "a0: [x, x]\n" + "".join(link.format(n=n, m=n - 1) + "\n" for n in range(1, levels))


BOMBS = {
    "5 MB of keys": "".join(f"key_{n}: some value\n" for n in range(260_000)),
    "1 MB of brackets": "a: " + "[" * 1_000_000,
    "aliases, doubled 60 times": doubling("a{n}: &a{n} [*a{m}, *a{m}]", 60).replace("a0: ", "a0: &a0 ", 1),
    "references, doubled 60 times": doubling("a{n}: [!ref <a{m}>, !ref <a{m}>]", 60),
    "copies, doubled 40 times": doubling("a{n}: [!copy <a{m}>, !copy <a{m}>]", 40),
    "text, doubled 60 times": "a0: xx\n" + "".join(f"a{n}: !ref <a{n - 1}><a{n - 1}>\n" for n in range(1, 60)),
    "9**9**9": "a: 9\nb: !ref <a>**9**9\n",
}


def seconds_of(call: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def by_hyperpyyaml(text: str) -> Any:
    """HyperPyYAML's load, without the traces that it leaves in ruamel."""
    resolvers = list(ruamel.yaml.resolver.implicit_resolvers)
    try:
        return load_hyperpyyaml(text, loader=type("Loader", (ruamel.yaml.Loader,), {}))
    finally:
        ruamel.yaml.resolver.implicit_resolvers[:] = resolvers


def refused_after(file: Path) -> tuple[float, float, str]:
    """Seconds and megabytes (1e6 bytes) until a file is refused, and with what words."""

    def refuse() -> str:
        try:
            check(file)
        except ConfigError as error:
            return str(error).splitlines()[0].replace(str(file), "bomb.yaml")
        return "NOT REFUSED"

    seconds = seconds_of(refuse)
    tracemalloc.start()
    words = refuse()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return seconds, peak, words


def compare(file: Path, text: str, rounds: int) -> tuple[float, list[float]]:
    """Seconds of a check; ratios of a check, a load, and HyperPyYAML's load again to HyperPyYAML's load."""
    ways = [lambda: by_hyperpyyaml(text), lambda: check(file), lambda: load_hparams(file), lambda: by_hyperpyyaml(text)]
    for way in ways:  # imports, caches
        way()
    times = [[seconds_of(way) for way in ways] for _ in range(rounds)]
    ratios = [statistics.median(row[at] / row[0] for row in times) for at in (1, 2, 3)]
    return statistics.median(row[1] for row in times), ratios


def report(folder: Path, rounds: int, command: str) -> str:
    """Measure, and say it as Markdown."""
    lines = [
        "# What checking a YAML takes",
        "",
        f"`{command}`, {date.today().isoformat()}: torch {torch.__version__}, Python {platform.python_version()}, "
        f"{cpu_model()}, one thread. Seconds are this machine's; ratios are to HyperPyYAML's load in the same round.",
        "",
        "| lines | check, seconds | check | load_hparams | the same load again (noise) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for parts in (2, 18, 90):
        text = typical(parts)
        file = folder / "typical.yaml"
        file.write_text(text)
        check_seconds, ratios = compare(file, text, rounds)
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| {len(text.splitlines())} | {check_seconds:.3f} | {shown} |")
    lines += ["", "| bomb | seconds | MB at the peak | what is said |", "| --- | --- | --- | --- |"]
    for name, text in BOMBS.items():
        file = folder / "bomb.yaml"
        file.write_text(text)
        seconds, peak, words = refused_after(file)
        lines.append(f"| {name} | {seconds:.2f} | {peak:.0f} | {words} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str]) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=positive, default=15, help="how often each file is loaded (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    shown = ["--rounds", str(options.rounds)] if "--rounds" in argv else []
    with tempfile.TemporaryDirectory() as folder:
        page = report(Path(folder), options.rounds, shlex.join(["python", "benchmarks/yaml_check.py", *shown]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page)
    print(f"written to {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
