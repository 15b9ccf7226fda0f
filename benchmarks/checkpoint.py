"""What a checkpoint costs: seconds to save and to load, and how long training stands still; writes a Markdown table.

    python benchmarks/checkpoint.py

All ways to save run in one process, in turn (A B C, A B C, ...), each the same random weights to the same disk; each
round gives each way the ratio of its time to that of a plain `torch.save` in the same round, so that what slows the
disk for longer than a round drops out. Reported: the median over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _gpu_results import wait_for
from overhead import count, machine, positive
from torch import nn

from amp_recipes.checkpoint import Checkpointer
from amp_recipes.checkpoint.snapshot import free_host_memory

RESULT = Path(__file__).parent / "results" / "checkpoint.md"
TENSORS = 20  # that the state is made of, as a model's layers are
PLAIN = "torch.save"
SYNCED = "torch.save, fsync"
OURS = "save_checkpoint"
BACKGROUND = "start_saving"
FIRST = "start_saving, the first of a run"
DCP = "torch.distributed.checkpoint.save"
DCP_ASYNC = "torch.distributed.checkpoint.async_save"

# On the disk at once: what the memory of the system must take; in memory at once: the state and its copies.
DISK_PER_SIZE, MEMORY_PER_SIZE = 4, 5


class Weights(nn.Module):
    """`megabytes` (1e6 bytes) of random weights on a device."""

    def __init__(self, megabytes: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        size = megabytes * 1_000_000 // 4 // TENSORS
        self.layers = nn.ParameterList(torch.randn(size, generator=generator).to(device) for _ in range(TENSORS))


@dataclass
class Way:
    """A way to save. `begin` returns when training may go on, `finish` when the state is where it is to be."""

    begin: Callable[[Weights, Path], object]
    finish: Callable[[], object] = lambda: None
    load: Callable[[Weights, Path], object] | None = None
    prepare: Callable[[Weights, Path], object] = lambda weights, folder: None  # not counted


def ways() -> dict[str, Way]:
    """All ways, in the order of the table."""
    checkpointers: dict[str, Checkpointer] = {}
    futures: list = []

    def plain(weights: Weights, folder: Path) -> None:
        torch.save(weights.state_dict(), folder / "weights.pt")

    def synced(weights: Weights, folder: Path) -> None:
        with open(folder / "weights.pt", "wb") as file:
            torch.save(weights.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    def load_plain(weights: Weights, folder: Path) -> None:
        weights.load_state_dict(torch.load(folder / "weights.pt"))

    def make_new(weights: Weights, folder: Path) -> None:
        checkpointers["new"] = Checkpointer(folder, {"weights": weights})
        give_memory_back()

    def use_again(weights: Weights, folder: Path) -> None:
        # One for all rounds, as in a run, so that its memory is used again.
        checkpointers.setdefault("old", Checkpointer(folder, {"weights": weights})).checkpoints_dir = folder

    def load_ours(weights: Weights, folder: Path) -> None:
        assert Checkpointer(folder, {"weights": weights}).recover_if_possible() is not None

    def distributed(weights: Weights, folder: Path) -> None:
        dcp.save(weights.state_dict(), checkpoint_id=folder / "dcp")

    def distributed_async(weights: Weights, folder: Path) -> None:
        futures.append(dcp.async_save(weights.state_dict(), checkpoint_id=folder / "dcp"))

    def load_distributed(weights: Weights, folder: Path) -> None:
        state = weights.state_dict()
        dcp.load(state, checkpoint_id=folder / "dcp")
        weights.load_state_dict(state)

    def start(which: str) -> Callable[[Weights, Path], None]:
        return lambda weights, folder: checkpointers[which].start_saving()

    def wait(which: str) -> Callable[[], None]:
        return lambda: checkpointers[which].wait()

    return {
        PLAIN: Way(plain, load=load_plain),
        SYNCED: Way(synced),
        OURS: Way(lambda *_: checkpointers["new"].save_checkpoint(), load=load_ours, prepare=make_new),
        BACKGROUND: Way(start("old"), wait("old"), prepare=use_again),
        FIRST: Way(start("new"), wait("new"), prepare=make_new),
        DCP: Way(distributed, load=load_distributed),
        DCP_ASYNC: Way(distributed_async, lambda: futures.pop().result()),
    }


# ---------------------------------------------------------------------- measuring


@dataclass
class Times:
    """Seconds of each round."""

    stall: list[float]  # that training stands still
    save: list[float]  # until the state is where it is to be
    load: list[float]


def measure(megabytes: int, rounds: int, folder: Path, device: torch.device) -> dict[str, Times]:
    """Save and load in every way in turn; one round more than is counted."""
    weights = Weights(megabytes, device)
    expected = [layer.detach().clone() for layer in weights.layers]
    found = {name: Times([], [], []) for name in ways()}
    every_way = ways()
    for number in range(rounds + 1):
        for name, way in every_way.items():
            with tempfile.TemporaryDirectory(dir=folder) as place:
                way.prepare(weights, Path(place))
                os.sync()  # what others have left to write is not this one's
                began = time.perf_counter()
                way.begin(weights, Path(place))
                wait_for(device)  # training's next step comes behind what was queued
                stall = time.perf_counter() - began
                way.finish()
                save = time.perf_counter() - began
                load = None
                if way.load is not None:
                    with torch.no_grad():
                        for layer in weights.layers:
                            layer.zero_()
                    began = time.perf_counter()
                    way.load(weights, Path(place))
                    wait_for(device)
                    load = time.perf_counter() - began
                    assert all(map(torch.equal, weights.layers, expected)), f"{name} did not give the weights back"
            if number > 0:  # the first round allocates and imports
                found[name].stall.append(stall)
                found[name].save.append(save)
                if load is not None:
                    found[name].load.append(load)
        print(f"{megabytes} MB: round {number} of {rounds}", flush=True)
    return found


def give_memory_back() -> None:
    """Let the C library keep no freed memory, so that who asks for some gets new pages, as in a new process."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def room_for(megabytes: int, folder: Path) -> str | None:
    """Why that size cannot be measured here; None if it can."""
    disk, memory = shutil.disk_usage(folder).free, free_host_memory()
    if disk < megabytes * 1e6 * DISK_PER_SIZE:
        return f"needs {megabytes * DISK_PER_SIZE:,} MB of disk, free are {disk / 1e6:,.0f} MB"
    if memory is not None and memory < megabytes * 1e6 * MEMORY_PER_SIZE:
        return f"needs {megabytes * MEMORY_PER_SIZE:,} MB of memory, free are {memory / 1e6:,.0f} MB"
    return None


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo group of this process alone, which torch.distributed.checkpoint wants."""
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


# ---------------------------------------------------------------------- the table


def ratio(times: list[float], plain: list[float]) -> str:
    """The median over rounds of the ratio to the plain way in the same round, and the seconds."""
    if not times:
        return ""
    ratios = [own / other for own, other in zip(times, plain, strict=True)]
    median = statistics.median(ratios)
    return f"{median:.{2 if median >= 0.1 else 3}f} ({statistics.median(times):.3f} s)"


def report(results: dict[int, dict[str, Times] | str], options: argparse.Namespace, command: str) -> str:
    """The results as a Markdown page."""
    lines = [
        "# What a checkpoint costs, and how long training stands still for it",
        "",
        "Quote the ratios, not the seconds: these are this machine's and its disk's, on that day.",
        "",
        f"- Command: `{command}`",
        f"- Date: {date.today().isoformat()}",
        f"- Machine: {machine(options.device)}, {count(os.cpu_count() or 1, 'core')}; "
        f"{count(options.threads, 'thread')} of torch",
        f"- Software: torch {torch.__version__}, Python {platform.python_version()}",
        f"- State: {TENSORS} fp32 tensors of random weights; {count(options.rounds, 'round')}, all ways in turn",
        "- Cells: the median over rounds of the ratio to plain `torch.save` in the same round, and the median of the "
        "seconds. Stands still: until the call returns. Saved: until the state is where it is to be. The weights are "
        "compared bit for bit after each load",
    ]
    for megabytes, found in results.items():
        lines += ["", f"## {megabytes:,} MB", ""]
        if isinstance(found, str):
            lines.append(f"Not measured: {found}.")
            continue
        plain = found[PLAIN]
        lines += [
            f"| | training stands still | the same, to `{SYNCED}` | saved | loaded |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, times in found.items():
            cells = [
                ratio(times.stall, plain.stall),
                ratio(times.stall, found[SYNCED].stall).partition(" ")[0],
                ratio(times.save, plain.save),
                ratio(times.load, plain.load),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "What reaches the disk (fsync) before a save counts as done, and what is checked:",
        "",
        f"- `{PLAIN}`: nothing; the system writes it later. A power loss or a kill in the save may leave half a file",
        f"- `{SYNCED}`: the file's content; not its name in the folder. A kill in the save leaves half a file",
        f"- `{OURS}`, `{BACKGROUND}`: every file, the temporary folder, and after the rename its parent; a sha256 of "
        "each file is taken while it is written, and a save that finds a weight that is not finite is refused. A load "
        "compares the sha256 of all files before it uses them",
        f"- `{BACKGROUND}`: the copy in host memory is used again from one save to the next; the first of a run has to "
        "get that memory from the system",
        f"- `{DCP}`, `{DCP_ASYNC}`: with its defaults (one rank, gloo, FileSystemWriter), which sync the file's "
        "content (`sync_files`); no checksum. async_save's time includes its staging, as training stands still for it",
        "- Loads come right after saves: the files are still in the memory of the system, not read from the disk",
    ]
    return "\n".join([*lines, ""])


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", type=positive, nargs="+", default=[100, 1000], help="in MB (100 1000)")
    parser.add_argument("--rounds", type=positive, default=7, help="how often all ways run (%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="such as cuda (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder by default")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measure every size and write the table."""
    options = parse(argv)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.set_num_threads(options.threads)
    results: dict[int, dict[str, Times] | str] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, process_group():
        for megabytes in options.sizes:
            refusal = room_for(megabytes, Path(folder))
            results[megabytes] = refusal or measure(megabytes, options.rounds, Path(folder), options.device)
    shown = [argument for argument in argv if not argument.startswith(("--output=", "--folder="))]
    for name in ("--output", "--folder"):  # where things lie is nobody's business
        if name in shown:
            del shown[shown.index(name) : shown.index(name) + 2]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(results, options, shlex.join(["python", "benchmarks/checkpoint.py", *shown])))
    print(f"written to {options.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
