"""Checks on a GPU what no other machine shows: right, fast, numerics; writes results as they come, and a table.

    python3 benchmarks/gpu.py --part right

Three parts, of less than ten minutes each; without `--part` all of them. Every step is a process of its own with a time
limit: one that fails, or does not end, is a line that says so, and the rest goes on. A part that runs out of time says
what it left out. `gpu.jsonl` has a line for each result as soon as it is there, `gpu.md` the same as tables, and
`gpu.log` what the steps have printed. A part that runs again takes the place of its former results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
PARTS = ("right", "fast", "numerics")
MINUTES = 9.5  # of a part; the machines are lent for ten
POLL_SECONDS = 0.1
LEAST_SECONDS = 5.0  # a step that has less is not begun
NOTE_LENGTH = 300

ABOUT_MACHINE = ("machine", "software", "device", "small")

Line = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A process that finds something out.

    words: what python is given; seconds: its limit; page: the Markdown file that it writes, if it prints no results;
    lacking: why it cannot be run on this device, if so.
    """

    name: str
    words: tuple[str, ...]
    seconds: float
    page: str = ""
    lacking: str = ""


# ---------------------------------------------------------------------- the steps


def steps(part: str, options: argparse.Namespace) -> list[Step]:
    """The steps of a part, the most important first."""
    return {"right": right_steps, "fast": fast_steps, "numerics": numerics_steps}[part](options)


def right_steps(options: argparse.Namespace) -> list[Step]:
    """Does training do what it is meant to?"""
    return [
        own_step("tests", "_gpu_tests.py", options, 200),
        own_step("waits", "_gpu_waits.py", options, 120),
        own_step("bits", "_gpu_bits.py", options, 100),
        own_step("processes", "_gpu_processes.py", options, 100),
        own_step("killed runs", "_gpu_kills.py", options, 150),
    ]


def fast_steps(options: argparse.Namespace) -> list[Step]:
    """What does the framework cost, and what does training reach?"""
    small, device = options.small, f"--device={options.device}"
    rounds = ("--rounds=2", "--steps=4", "--precisions", "fp32", "bf16") if small else ("--rounds=11",)
    sizes = ("--sizes=2", "--rounds=1") if small else ("--sizes=500", "--rounds=3")
    census_rounds = "--rounds=2" if small else "--rounds=11"
    quick = ("--quick",) if small else ("--rounds=5",)
    # Two processes on one GPU go over gloo, which has not all that fsdp calls, and takes no other devices.
    strategies = () if options.device == "cpu" else ("--strategies", "ddp")
    groups = page_step("distributed", ("distributed.py", device, *quick, *strategies), options, 90)
    if not options.device.startswith(("cpu", "cuda")):
        groups = replace(groups, lacking=f"gloo takes no tensors of {options.device}")
    return [
        own_step("language model", "_gpu_language_model.py", options, 180),
        own_step("saves", "_gpu_saves.py", options, 100),
        own_step("convolutions", "_gpu_convolutions.py", options, 60),
        page_step("overhead", ("overhead.py", device, "--no-peers", *rounds), options, 150),
        page_step("checkpoint", ("checkpoint.py", device, *sizes), options, 60),
        page_step("census", ("census.py", device, census_rounds), options, 60),
        groups,
    ]


def numerics_steps(options: argparse.Namespace) -> list[Step]:
    """What do the precisions do on this device?"""
    tables = ("--networks", "plate", "--seeds=1") if options.small else ()
    return [
        own_step("op reference", "_gpu_op_reference.py", options, 60),
        own_step("instruments", "_gpu_instruments.py", options, 150),
        *(recipe_step(config, options) for config in RECIPES),
        page_step(
            "precision tables", ("precision_tables.py", f"--device={options.device}", "--small", *tables), options, 300
        ),
    ]


def machine_step(options: argparse.Namespace) -> Step:
    """The first step of each part: it says what the machine is."""
    return Step("machine", (str(HERE / "_gpu_machine.py"), f"--device={options.device}"), 90)


def own_step(name: str, script: str, options: argparse.Namespace, seconds: float) -> Step:
    """A step whose script prints results."""
    small = ("--small",) if options.small else ()
    return Step(name, (str(HERE / script), f"--device={options.device}", *small), seconds)


def page_step(name: str, words: Sequence[str], options: argparse.Namespace, seconds: float) -> Step:
    """A benchmark that writes a page, whose tables are the results."""
    script, *others = words
    page = f"gpu_{script.removesuffix('.py')}.md"  # beside the page of a CPU
    return Step(name, (str(HERE / script), *others, f"--output={options.out / page}"), seconds, page)


# The folder of each recipe's script, and the words that make it small.
RECIPES: dict[str, tuple[str, str]] = {
    "image_classification": ("image_classification", "--model.widths=[4,8] --precision=fp16"),
    "language_modeling": ("language_modeling", "--window_tokens=64 --peak_flops=1e12 --precision=bf16"),
    "adversarial": ("adversarial", "--width=4 --precision=fp16"),
    "finetuning": (
        "finetuning",
        "--pretraining_updates=2 --max_tokens=16 --batch_size=4 --tuning=lora --precision=bf16",
    ),
    "keyword_classification": (
        "speech_recognition",
        "--width=16 --model.channels=[4,4] --synthetic.counts=[30,10,10] --batches.max_total_length=3 --precision=bf16",
    ),
    "speech_recognition": (
        "speech_recognition",
        "--width=16 --model.front.channels=[4,4] --synthetic.counts=[24,4,4] --batches.max_total_length=4 "
        "--precision=fp16",
    ),
}


def recipe_step(config: str, options: argparse.Namespace) -> Step:
    """A recipe, a few batches long."""
    folder, words = RECIPES[config]
    script, settings = REPOSITORY / "recipes" / folder / "train.py", REPOSITORY / "configs" / f"{config}.yaml"
    own = (f"--device={options.device}", "--debug", f"--output_folder={options.scratch / config}")
    return Step(f"recipe {config}", (str(script), str(settings), *own, *words.split()), 90)


# ---------------------------------------------------------------------- running them


class Record:
    """The results so far: a line of JSON each, as they come. Those of the steps in `part` are taken anew.

    about: the part's first line. Results of its other steps are kept if they are of the same machine and software.
    """

    def __init__(self, folder: Path, part: str, about: Line, steps: Collection[str]) -> None:
        self._part, self._folder = part, folder
        former = read_lines(folder / "gpu.jsonl")
        same = any(
            line["part"] == part and all(line.get(name) == about[name] for name in ABOUT_MACHINE) for line in former
        )
        self.lines = [
            line for line in former if line["part"] != part or (same and "step" in line and line["step"] not in steps)
        ]
        (folder / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.add({"kind": "part", **about})

    def add(self, line: Line) -> None:
        """Write one line, in the file and to the terminal."""
        line = {"part": self._part, **line}
        self.lines.append(line)
        with open(self._folder / "gpu.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        print(in_one_line(line), flush=True)

    def write_page(self) -> None:
        """Write the tables."""
        (self._folder / "gpu.md").write_text(page(self.lines))


def read_lines(path: Path) -> list[Line]:
    """The lines of a file of results; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_part(part: str, todo: Sequence[Step], options: argparse.Namespace, environment: dict[str, str]) -> bool:
    """Run the steps while there is time. Returns whether all of them ended well, and all that must hold does.

    Where the device cannot be used, nothing is run, and the results that there are stay as they are.
    """
    deadline = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "gpu.log"
    machine: Line = {}
    ended = run_step(machine_step(options), 60 * options.minutes, log, environment, machine.update)
    if ended["state"] != "done":
        print(f"{part}: the device {options.device} cannot be used: {ended['state']}: {ended['note']}")
        return False
    facts = {name: machine[name] for name in ("machine", "software")}
    about = {"device": options.device, "small": options.small, **facts, "date": date.today().isoformat()}
    names = [step.name for step in todo]
    record = Record(options.out, part, {**about, "command": command_of(options)}, names)
    for step in todo:
        if step.lacking:
            record.add({"kind": "step", "step": step.name, "state": "not here", "seconds": 0.0, "note": step.lacking})
            continue
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            note = f"the part's {options.minutes:g} minutes were over"
            record.add({"kind": "step", "step": step.name, "state": "left out", "seconds": 0.0, "note": note})
            continue

        def add(line: Line, name: str = step.name) -> None:
            record.add({"kind": "result", "step": name, **line})

        ended = run_step(step, left, log, environment, add)
        if step.page and ended["state"] == "done":
            for line in rows_of(options.out / step.page):
                add(line)
        record.add({"kind": "step", **ended})
        record.write_page()
    record.write_page()
    own = [line for line in record.lines if line["part"] == part]
    return not any(line.get("state", "done") not in ("done", "not here") or line.get("holds") is False for line in own)


def run_step(step: Step, left: float, log: Path, environment: dict[str, str], found: Callable[[Line], None]) -> Line:
    """Run one step to its end or its limit; what it prints goes to the log, and results among it to `found`.

    left: seconds of the part.
    """
    limit, began = min(step.seconds, left), time.monotonic()
    with open(log, "a") as file:
        print(f"\n== {step.name}: {shlex.join(step.words)}", file=file, flush=True)
        begin = os.path.getsize(log)
        process = subprocess.Popen(
            [sys.executable, *step.words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=REPOSITORY,
            start_new_session=True,  # so that its own processes end with it
        )
    results = new_results(log, begin)
    try:
        while process.poll() is None and time.monotonic() < began + limit:
            time.sleep(POLL_SECONDS)
            forward(results, found)
        late = process.poll() is None
    finally:
        kill_session(process)
    forward(results, found)
    ended = {"step": step.name, "seconds": round(time.monotonic() - began, 1)}
    if late:
        whose = "its own" if limit == step.seconds else "the part's"
        return {**ended, "state": "timed out", "note": f"had not ended after {limit:.0f} s, {whose} time"}
    if process.returncode != 0:
        return {**ended, **how_it_failed(process.returncode, log, begin)}
    return {**ended, "state": "done", "note": ""}


def kill_session(process: subprocess.Popen) -> None:
    """End a step with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def new_results(log: Path, begin: int) -> Iterator[Line | None]:
    """The results in the log from there on; None whenever there are no more yet."""
    with open(log, errors="replace") as file:
        file.seek(begin)
        text = ""
        while True:
            text += file.readline()
            if not text.endswith("\n"):
                yield None
                continue
            line, text = text, ""
            if line.startswith('{"what": '):
                yield json.loads(line)


def forward(results: Iterator[Line | None], found: Callable[[Line], None]) -> None:
    """Hand on all results that are there."""
    for line in iter(lambda: next(results), None):
        found(line)


def how_it_failed(status: int, log: Path, begin: int) -> Line:
    """The state of a step that ended with that exit status, and why, in one line."""
    with open(log, errors="replace") as file:
        file.seek(begin)
        lines = [line.strip() for line in file.read().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    last = (errors or lines or ["nothing was printed"])[-1]
    state = "not here" if "No module named" in last else "failed"
    return {"state": state, "note": f"exit status {status}: {last}"[:NOTE_LENGTH]}


def rows_of(path: Path) -> Iterator[Line]:
    """The cells of all tables of a Markdown page, each as a result."""
    heading, heads = "", []
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        elif not set(line) <= set("|-: "):
            for head, cell in zip(heads[1:], cells[1:], strict=False):
                yield {"what": f"{heading}: {cells[0]}: {head}", "value": cell, "holds": None, "note": ""}


# ---------------------------------------------------------------------- the page


def in_one_line(line: Line) -> str:
    """A result for the terminal."""
    if line["kind"] == "part":
        return f"{line['part']}: {line['machine']}"
    if line["kind"] == "step":
        return f"{line['part']}: {line['step']}: {line['state']} after {line['seconds']:.0f} s {line['note']}".rstrip()
    return f"{line['part']}: {line['step']}: {line['what']}: {line['value']}{verdict(line)}"


def verdict(line: Line) -> str:
    """Whether what must hold does."""
    return {True: " (holds)", False: " (DOES NOT HOLD)", None: ""}[line["holds"]]


def page(lines: Sequence[Line]) -> str:
    """All results as a Markdown page."""
    out = ["# What `make gpu` found", "", "`benchmarks/README.md` says how to read this page."]
    for part in PARTS:
        own = [line for line in lines if line["part"] == part]
        for about in [line for line in own if line["kind"] == "part"][:1]:
            out += ["", f"## {part}", "", *about_part(about), "", *summary(own)]
            for name in dict.fromkeys(line["step"] for line in own if line["kind"] != "part"):
                out += section(name, [line for line in own if line.get("step") == name])
    return "\n".join([*out, ""])


def about_part(line: Line) -> list[str]:
    """What it was measured on."""
    small = "; SMALL SIZES, A REHEARSAL" if line["small"] else ""
    return [
        f"- Command: `{line['command']}`{small}",
        f"- Date: {line['date']}",
        f"- Machine: {line['machine']} (`--device {line['device']}`)",
        f"- Software: {line['software']}",
    ]


def summary(own: Sequence[Line]) -> list[str]:
    """What is not as it should be, or that all is."""
    broken = [f"- {line['step']}: {line['what']}: {line['value']}" for line in own if line.get("holds") is False]
    broken += [
        f"- {line['step']}: {line['state']}: {line['note']}" for line in own if line.get("state", "done") != "done"
    ]
    held = sum(line.get("holds") is True for line in own)
    return [
        f"Of what must hold, {held} do." + (" These do not, or are not known:" if broken else ""),
        *([""] if broken else []),
        *map(escaped, broken),
    ]


def section(name: str, lines: Sequence[Line]) -> list[str]:
    """A step's results as a table."""
    from tabulate import tabulate  # not above: it may come with --wheels

    end = next((line for line in lines if line["kind"] == "step"), None)
    told = "under way" if end is None else f"{end['state']}, {end['seconds']:.0f} s"
    rows = [
        (escaped(line["what"]), escaped(line["value"]) + verdict(line), escaped(line["note"]))
        for line in lines
        if line["kind"] == "result"
    ]
    table = tabulate(rows, ["what", "result", "note"], tablefmt="github", disable_numparse=True) if rows else ""
    note = end["note"] if end is not None else ""
    return ["", f"### {name} ({told})", *(["", escaped(note)] if note else []), *(["", table] if rows else [])]


def escaped(text: str) -> str:
    """Text that does not end a cell, or the table."""
    return " ".join(text.replace("|", "\\|").split())


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", choices=PARTS, help="one part alone; all by default")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="these steps of the part alone")
    parser.add_argument("--device", default="cuda", help="such as cpu, for a rehearsal (%(default)s)")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--out", type=Path, help="where results go; benchmarks/results for cuda, else below build/")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of wheels that are missing here")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each part (%(default)s)")
    options = parser.parse_args(argv)
    if options.steps and not options.part:
        parser.error("--steps needs --part")
    if options.out is None:
        measures = options.device.startswith("cuda") and not options.small
        options.out = HERE / "results" if measures else REPOSITORY / "build" / f"gpu_rehearsal_{options.device}"
    options.out = options.out.resolve()
    return options


def unpack_wheels(folder: Path, target: Path) -> None:
    """Unpack wheels where they can be imported: also those with compiled parts, which no zip file can hold."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def register_simulated_device(folder: Path) -> list[str]:
    """Let torch load the device of the tests wherever it is imported, as it does with any that is out of its tree.

    Returns the paths on which it is found. folder: for the entry point by which torch knows it.
    """
    about = folder / "simulated-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nsimulated = simulated:load\n")
    return [str(folder), str(REPOSITORY / "tests" / "simulated_device")]


def command_of(options: argparse.Namespace) -> str:
    """The command line, without where things lie."""
    part = (f"--part={options.part}",) if options.part else ()
    only = ("--steps", *options.steps) if options.steps else ()
    small = ("--small",) if options.small else ()
    return shlex.join(["python3", "benchmarks/gpu.py", f"--device={options.device}", *part, *only, *small])


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """The variables of the steps: this repository, then the wheels, are found before what is installed."""
    paths = [str(REPOSITORY)]
    if options.wheels is not None:
        unpack_wheels(options.wheels, options.scratch / "wheels")
        paths.append(str(options.scratch / "wheels"))
        sys.path.insert(0, paths[-1])
    import tabulate  # noqa: F401 (the table needs it, and would miss it only after the first step)

    if options.device.startswith("simulated"):
        paths += register_simulated_device(options.scratch / "simulated")
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "TMPDIR": str(options.scratch)}
    return {**os.environ, **own}


def main(argv: Sequence[str]) -> int:
    """Run the parts; exit status 1 where anything failed or does not hold."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running step ends, too
    with tempfile.TemporaryDirectory(prefix="amp_recipes_gpu") as scratch:
        options.scratch = Path(scratch)
        environment = environment_of(options)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu.log").write_text("")
        good = True
        for part in [options.part] if options.part else PARTS:
            todo = [step for step in steps(part, options) if not options.steps or step.name in options.steps]
            good = run_part(part, todo, options, environment) and good
    if (options.out / "gpu.md").exists():
        print(f"results are in {options.out / 'gpu.md'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
