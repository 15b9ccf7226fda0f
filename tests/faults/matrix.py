"""Kills, damages and disturbs real runs in every way of the fault matrix; writes a Markdown table of what came of it.

    python tests/faults/matrix.py

Each row is done in a process of its own, and every run in a fork of that. A row that fails, or crashes, is reported and
the others go on; the exit code is 1 then. Needs Linux (fork, pidfd); some rows need root or strace, and say so where
they do not have it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import fault_data as data
import fault_disk as disk
import fault_kills as kills
import fault_processes as processes
import torch
from fault_runs import Amounts, Child, Tally, bury_all
from fault_torchrun import bury_all_launches

sys.path.append(str(disk.REPOSITORY / "benchmarks"))
from _reporting import count, cpu_model, positive

RESULT = disk.REPOSITORY / "benchmarks" / "results" / "faults.md"
PART_SECONDS = 3600  # after which a part of a row counts as hung

Part = Callable[[Amounts, Path], Tally]


@dataclass(frozen=True)
class Row:
    """A row of the fault matrix, in parts that can be done side by side."""

    number: int
    fault: str
    must: str
    parts: Sequence[Part]


def rows() -> list[Row]:
    """All rows, in the order of the matrix."""
    both_ways = [False, True]
    strategies = processes.STRATEGIES
    return [
        Row(
            1,
            "SIGKILL in a save",
            "the newest that verifies is used; no finished save is lost",
            [partial(kills.in_saves, background=it) for it in both_ways],
        ),
        Row(
            2,
            "SIGKILL mid-epoch, 0 and 2 loader workers",
            "same losses and samples, bitwise equal at the end",
            [partial(kills.in_epochs, workers=it) for it in (0, 2)],
        ),
        Row(
            3,
            "SIGKILL while pruning",
            "at least one good checkpoint is left",
            [partial(kills.in_deletions, background=it) for it in both_ways],
        ),
        Row(4, "two kills in an epoch", "still aligned", [partial(kills.two_in_an_epoch, workers=it) for it in (0, 2)]),
        Row(5, "the Nth I/O call fails (EIO, ENOSPC), every N", "the older one is intact", [disk.every_call_fails]),
        Row(6, "power loss (order of fsync and rename, by strace)", "no rename before fsync", [disk.order_of_calls]),
        Row(7, "disk full", "says what it needs, resumes from the step before", [disk.disk_full]),
        Row(8, "read-only folder", '"not writable" before step 1, in 5 s', [disk.read_only_folder]),
        Row(9, "TMPDIR full or on another file system", "not used", [kills.temporary_folder_elsewhere]),
        Row(10, "truncated file", "warns, falls back", [disk.truncations]),
        Row(11, "bit flip, zeroed page", "names the file, falls back", [disk.flipped_bits, disk.zeroed_pages]),
        Row(12, "every checkpoint bad", "refuses", [disk.all_bad]),
        Row(13, "two runs, one folder", "the second is refused, the first undisturbed", [kills.two_in_a_folder]),
        Row(14, "stale lock", "reclaimed", [kills.stale_lock]),
        Row(
            15,
            "SIGTERM, SIGINT in every phase",
            "finishes the step, saves, exits 143 or 130; 0 steps lost",
            [partial(kills.signals, number=it) for it in (signal.SIGTERM, signal.SIGINT)]
            + [partial(processes.terminated, strategy=it) for it in strategies],
        ),
        Row(16, "more signals inside a save", "the save completes", [kills.signals_in_saves]),
        Row(17, "loader worker killed", "names the worker in 10 s, resumes", [data.killed_worker]),
        Row(18, "loader worker hangs", "error in time, resumes", [data.hanging_worker]),
        Row(19, "bad sample", "names index and file, resumes", [data.bad_sample]),
        Row(
            20,
            "a rank killed; all of them, torchrun; a rank raises",
            "all exit in 10 s; a restart is bitwise equal",
            [partial(processes.killed, strategy=it, restarts=n) for it in strategies for n in (0, 1)]
            + [partial(processes.other_deaths, strategy=it) for it in strategies]
            + [processes.as_typed],
        ),
        Row(
            21,
            "a rank frozen or gone, a mismatched collective",
            "all exit at our own timeout, which is named",
            [partial(processes.in_vain, action=it) for it in processes.IN_VAIN],
        ),
        Row(
            22,
            "a rank killed in a sharded save, or its disk full",
            "0 torn; the older one is intact",
            [partial(processes.killed_in_sharded_save, background=it) for it in both_ways]
            + [partial(processes.disk_full_on_a_rank, strategy=it) for it in strategies],
        ),
        Row(23, "NaN loss at each precision", "skips, counts, stops after patience", [data.nan_loss]),
        Row(
            24,
            "Inf gradient on one rank",
            "all ranks skip; ranks equal, 0 bad",
            [partial(processes.inf_on_one_rank, strategy=it) for it in strategies],
        ),
        Row(25, "scaler overflow and resume", "scale sequence equal", [data.scales]),
        Row(26, "NaN parameters at a save", "refuses, the good one is kept", [disk.nan_parameters]),
        Row(27, "NaN metric", "never the best, never 0", [data.nan_metric]),
        Row(28, "empty data set", "refused before step 1", [data.empty_data_set]),
        Row(29, "zero-length epoch", "refused before step 1", [data.zero_length_epoch]),
        Row(30, "fewer batches than the accumulation window", "steps = ceil(n / window)", [data.short_windows]),
        Row(40, "malicious checkpoint", "nothing executed; a clear error", [disk.malicious]),
        Row(42, "checkpoint of another model", "lists keys and shapes, loads nothing", [disk.other_model]),
        Row(43, "older or newer format", "migrates, or refuses by version", [disk.other_formats]),
        Row(
            44,
            "2 processes, then 1, then 2",
            "each sample of the epoch once",
            [data.world_sizes, *(partial(processes.other_worlds, strategy=it) for it in strategies)],
        ),
        Row(45, "clock or file times a day off", "the newest is used", [disk.clock]),
        Row(46, "unicode, spaces, very long paths", "works, or a clear error", [disk.names_and_paths]),
        Row(47, "changed YAML on resume", "shows the difference, refuses without a flag", [data.changed_settings]),
    ]


# ---------------------------------------------------------------------- doing them


def do_all(chosen: Sequence[Row], amounts: Amounts, folder: Path, jobs: int) -> dict[int, tuple[Tally, float]]:
    """Row number -> what came of it and the seconds it took; `jobs` parts at a time."""
    waiting = [(row, number, part) for row in chosen for number, part in enumerate(row.parts)]
    under_way: list[tuple[Row, int, Child]] = []
    results = {row.number: (Tally(), 0.0) for row in chosen}
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            row, number, part = waiting.pop(0)
            under_way.append((row, number, Child(lambda part=part: _do(part, amounts, folder), PART_SECONDS)))
        time.sleep(0.05)
        for entry in list(under_way):
            row, number, child = entry
            tally = _outcome(child)
            if tally is None:
                continue
            under_way.remove(entry)
            before, seconds = results[row.number]
            before.merge(tally)
            results[row.number] = before, seconds + child.seconds
            part_of = f" (part {number + 1} of {len(row.parts)})" if len(row.parts) > 1 else ""
            print(f"row {row.number}{part_of}: {row.fault}: {verdict(tally)}; {in_words(tally)}; {child.seconds:.0f} s")
            for failure in tally.failures[:5]:
                print(f"    {on_a_line(failure)}")
            sys.stdout.flush()
    return results


def _do(part: Part, amounts: Amounts, folder: Path) -> dict:
    try:
        return vars(part(amounts, folder))
    finally:
        bury_all_launches()
        bury_all()


def _outcome(child: Child) -> Tally | None:
    """What a part that has ended came to; None while it is under way."""
    try:
        if not child.poll():
            return None
        value = child.of("value")
        if child.code == 0 and value:
            return Tally(**{**value[0][0], "counts": Counter(value[0][0]["counts"])})
        return Tally(failures=[f"the row itself failed: {child.how}\n{child.output[-3000:]}"])
    except TimeoutError as error:
        return Tally(failures=[f"the row did not end: {error}"])
    finally:
        if child.code is not None:
            child.bury()


# ---------------------------------------------------------------------- the table


def verdict(tally: Tally) -> str:
    """`pass`, `FAIL` or why it was not run."""
    if tally.not_run:
        return f"not run: {tally.not_run}"
    return "FAIL" if tally.failures or not tally.runs else "pass"


def in_words(tally: Tally) -> str:
    """The counts as a cell."""
    return ", ".join(f"{what}: {number:,}" for what, number in tally.counts.items()) or "nothing counted"


def on_a_line(failure: str) -> str:
    """A failure as one line, shortened."""
    line = " ".join(failure.split())
    return line if len(line) <= 700 else f"{line[:400]} ... {line[-290:]}"


def report(
    chosen: Sequence[Row], results: dict[int, tuple[Tally, float]], amounts: Amounts, command: str, seconds: float
) -> str:
    """The results as a Markdown page."""
    verdicts = [verdict(results[row.number][0]) for row in chosen]
    passed, failed = verdicts.count("pass"), verdicts.count("FAIL")
    runs = sum(tally.runs for tally, _ in results.values())
    lines = [
        "# What becomes of a run when something goes wrong",
        "",
        f"{passed} of {count(len(chosen), 'row')} pass, {failed} fail, {len(chosen) - passed - failed} not run; "
        f"{runs:,} disturbed runs or calls in all.",
        "",
        f"- Command: `{command}`",
        f"- Date: {date.today().isoformat()}; it took {seconds / 60:.1f} minutes",
        f"- Machine: {cpu_model()}, {count(os.cpu_count() or 1, 'core')}, {platform.system()}; "
        f"{'root' if os.geteuid() == 0 else 'not root'}",
        f"- Software: torch {torch.__version__}, Python {platform.python_version()}{_strace_version()}",
        f"- Random choices: seed {amounts.seed}",
        "- `bitwise equal`: weights, buffers, averaged weights, optimizer state, loss scale, the generators of torch, "
        "Python and NumPy, metrics, and the samples and loss of each batch are those of the same run undisturbed",
        "- `torn`: a finished checkpoint that its own manifest contradicts; `finished saves lost`: a save that was "
        "reported as done, after which neither it nor a newer one is there",
        "- What is not covered: GPUs, a real power loss (the order of fsync and rename stands in for it), network "
        "file systems",
        "",
        "| row | fault | must | runs | came of it | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in chosen:
        tally, _ = results[row.number]
        came = f"{in_words(tally)}. {tally.note}".strip()
        lines.append(f"| {row.number} | {row.fault} | {row.must} | {tally.runs:,} | {came} | {verdict(tally)} |")
    if failed:
        lines += ["", "Failures (the first five of a row):", ""]
    for row in chosen:
        for failure in results[row.number][0].failures[:5]:
            lines.append(f"- Row {row.number}: {on_a_line(failure)}")
    return "\n".join([*lines, ""])


def _strace_version() -> str:
    if shutil.which("strace") is None:
        return ""
    words = subprocess.run(["strace", "-V"], capture_output=True, text=True).stdout.split()
    return f", strace {words[3]}" if len(words) > 3 else ""


# ---------------------------------------------------------------------- command line


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--kills", type=positive, default=200, help="inside saves, and as many in epochs; at least 2 (%(default)s)"
    )
    parser.add_argument("--corrupted", type=positive, default=100, help="files of each of three kinds (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="everything else a few times, and no bounds on time")
    parser.add_argument("--rows", type=int, nargs="+", help="only these rows")
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="parts side by side (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (%(default)s)")
    parser.add_argument("--output", type=Path, default=RESULT, help="the Markdown file to write")
    parser.add_argument("--json", type=Path, help="a file for the same as JSON")
    options = parser.parse_args(argv)
    unknown = set(options.rows or ()) - {row.number for row in rows()}
    if unknown:
        there = ", ".join(str(row.number) for row in rows())
        parser.error(f"there is no row {', '.join(map(str, sorted(unknown)))} here; rows are {there}")
    return options


def main(argv: Sequence[str]) -> int:
    """Do the rows, write the table; 1 if any failed."""
    options = parse(argv)
    if not hasattr(os, "pidfd_open"):
        print("this needs Linux: every run is a fork that is waited for by a pidfd")
        return 2
    torch.set_num_threads(1)  # a fork of a process with a pool of threads may hang
    amounts = Amounts(options.kills, options.corrupted, options.quick, options.seed)
    chosen = [row for row in rows() if not options.rows or row.number in options.rows]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.monotonic()
    try:
        results = do_all(chosen, amounts, folder, options.jobs)
    finally:
        bury_all()
        _clear(folder)
    shown = [argument for argument in argv if not argument.startswith(("--output=", "--json="))]
    for name in ("--output", "--json"):  # where the table lies is nobody's business
        if name in shown:
            del shown[shown.index(name) : shown.index(name) + 2]
    command = shlex.join(["python", "tests/faults/matrix.py", *shown])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(chosen, results, amounts, command, time.monotonic() - began))
    if options.json:
        found = {row.number: vars(results[row.number][0]) for row in chosen}
        options.json.write_text(json.dumps(found))
    print(f"written to {options.output}")
    failed = [row.number for row in chosen if verdict(results[row.number][0]) == "FAIL"]
    if failed:
        print(f"FAILED: rows {', '.join(map(str, failed))}")
    return 1 if failed else 0


def _clear(folder: Path) -> None:
    """Remove the folder, with what a row that was killed has mounted in it."""
    with suppress(OSError):
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in mounts:
            if mount.startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", mount], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
