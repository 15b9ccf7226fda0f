"""Each row of the fault matrix, in quick amounts: real runs are killed, signalled, damaged and misled."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from programs import run_python
from repository import REPOSITORY

FOLDER = Path(__file__).parent
MATRIX = FOLDER / "matrix.py"
ROWS = [*range(1, 31), 40, *range(42, 48)]
# A row in which nothing was lost counts these to 0.
NEVER = [
    "torn",
    "finished saves lost",
    "the older one lost",
    "crashes on resume",
    "crashes",
    "steps lost",
    "leaked",
    "batches done twice",
    "bad parameters",
    "executed",
    "missing",
    "repeated",
    "renames before fsync",
    "deletions before commit",
]
# What each row must at least count in these amounts, so that no part of it is left out without a word.
LEAST = {
    1: {"inside a save": 2, "bitwise equal": 2},
    2: {"bitwise equal": 2},
    3: {"inside a deletion": 2, "bitwise equal": 2},
    4: {"bitwise equal": 2},
    5: {"error told": 20},
    6: {"renames": 6, "deletions": 5},
    7: {"told as it should be": 4, "bitwise equal": 4, "resumed at step M": 4},
    8: {'"not writable"': 3},
    9: {"bitwise equal": 2},
    10: {"truncated": 2, "file named": 2, "fell back": 2, "bitwise equal": 2},
    11: {"with a zeroed page": 2, "with a flipped bit": 2, "file named": 4, "fell back": 4, "bitwise equal": 4},
    12: {"refused": 1},
    13: {"second refused": 1, "first undisturbed": 1, "bitwise equal": 1},
    14: {"reclaimed": 2, "bitwise equal": 2},
    15: {"exit code 143": 3, "exit code 130": 3, "workers' exit code 143": 6, "bitwise equal": 12},
    16: {"exit code 143": 1, "bitwise equal": 1},
    17: {"worker named": 1, "sample named": 1, "bitwise equal": 1},
    18: {"worker named": 1, "sample named": 1, "bitwise equal": 1},
    19: {"index and file named": 1, "bitwise equal": 1},
    20: {"all ended in time": 13, "error told with its rank": 2, "bitwise equal": 13},
    21: {"all ended in time": 10, "those that waited failed": 10, "option named": 4, "bitwise equal": 10},
    22: {"CheckpointError": 2, "all ended alike": 2, "bitwise equal": 4},
    23: {"skipped and went on": 6, "stopped after patience": 6},
    24: {"all skipped": 6, "ranks equal": 6},
    25: {"scale sequence equal": 3, "bitwise equal": 3},
    26: {"refused": 4, "bitwise equal": 4},
    27: {"best as it should be": 2},
    28: {"refused before step 1": 4},
    29: {"refused before step 1": 2},
    30: {"steps right": 5, "weights of the hand-written loop": 5},
    40: {"fell back, or unharmed": 5, "clear error": 5},
    42: {"keys and shapes listed": 5, "live weights unchanged": 5},
    43: {"refused by version": 5, "migrated": 1, "bitwise equal": 1},
    45: {"newest used": 4, "bitwise equal": 4},
}

needs_linux = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: forks that a pidfd waits for")


def run_matrix(*arguments, **options) -> subprocess.CompletedProcess:
    return run_python(MATRIX, *arguments, timeout_seconds=850, **options)


@needs_linux
@pytest.mark.extended
@pytest.mark.parametrize("row", ROWS)
def test_row(tmp_path, row):
    # Most of the time of row 21 goes by in waits: its parts side by side take hardly longer than one.
    jobs = 4 if row == 21 else 2
    results = tmp_path / "faults.json"
    amounts = ["--quick", "--kills", 2, "--corrupted", 2]
    done = run_matrix(*amounts, "--jobs", jobs, "--rows", row, "--output", tmp_path / "faults.md", "--json", results)
    assert results.is_file(), done.stdout + done.stderr
    result = json.loads(results.read_text())[str(row)]
    if result["not_run"]:
        pytest.skip(result["not_run"])
    assert done.returncode == 0 and not result["failures"], "\n".join([f"row {row}:", *result["failures"]])
    counts = result["counts"]
    assert result["runs"] > 0
    assert not {what: number for what, number in counts.items() if what in NEVER and number}
    assert {
        what: counts.get(what, 0) for what, number in LEAST.get(row, {}).items() if counts.get(what, 0) < number
    } == {}


IN_A_SAVE = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from fault_runs import Child, Run, Tally, Trigger, judge_kill, new_folder, reference, train

torch.set_num_threads(1)  # a fork of a process with a pool of threads may hang
tally, folder = Tally(), Path(sys.argv[2])

def die_at_the_next_fsync():
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)

run = Run(None, epochs=1, options={"ckpt_interval_steps": 1})
whole = reference(run, folder)
with new_folder(folder) as place:
    killed = replace(run, folder=place, triggers=[Trigger("save", 3, die_at_the_next_fsync)])
    lives = [Child(lambda: train(killed)).end()]
    tally.add("killed", int(lives[0].code == -signal.SIGKILL))
    tally.add("inside a save", len(lives[0].of("save")) - len(lives[0].of("saved")))
    judge_kill(tally, whole, killed, lives)
    for life in lives:
        life.bury()
print(json.dumps(vars(tally)))
"""


@needs_linux
def test_a_run_killed_inside_a_save_goes_on_bit_for_bit(tmp_path):
    """As row 1, for the default tests: one kill while the third checkpoint is being written, and the resume."""
    done = run_python("-c", IN_A_SAVE, FOLDER, tmp_path)
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout)
    assert not tally["failures"]
    assert tally["counts"]["killed"] == tally["counts"]["inside a save"] == tally["counts"]["bitwise equal"] == 1


@needs_linux
@pytest.mark.extended
def test_the_table_says_what_was_done_and_nothing_of_where(tmp_path):
    page, results = tmp_path / "deeper" / "faults.md", tmp_path / "faults.json"
    done = run_matrix(
        "--quick", "--kills", 2, "--rows", 29, 30, "--jobs", 1, "--output", page, "--json", results, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    text = page.read_text()
    assert "`python tests/faults/matrix.py --quick --kills 2 --rows 29 30 --jobs 1`" in text
    for row, result in json.loads(results.read_text()).items():
        assert re.search(rf"^\| {row} \| .* \| {result['runs']:,} \| .* \| pass \|$", text, re.MULTILINE)
    assert str(tmp_path) not in text and str(REPOSITORY) not in text


@needs_linux
@pytest.mark.extended
def test_a_row_that_fails_is_reported_and_the_others_go_on(tmp_path):
    """Here the package is made to commit without telling the truth: it writes the manifest of other bytes."""
    (tmp_path / "broken.py").write_text(
        "import runpy, sys\n"
        "import amp_recipes.checkpoint.state_format as room\n"
        "finish = room.HashedFile.finish\n"
        "room.HashedFile.finish = lambda self: finish(self)[::-1]\n"
        "sys.argv = sys.argv[1:]\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    page = tmp_path / "faults.md"
    arguments = ["--quick", "--kills", 2, "--rows", 3, 30, "--output", page]
    done = run_python(tmp_path / "broken.py", MATRIX, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^\| 3 \| .* \| FAIL \|$", page.read_text(), re.MULTILINE)
    assert re.search(r"^\| 30 \| .* \| pass \|$", page.read_text(), re.MULTILINE)


@pytest.mark.extended
def test_a_row_that_is_not_there_is_refused_and_each_that_is_is_a_case_here():
    done = run_matrix("--rows", 99)
    assert done.returncode == 2
    assert f"no row 99 here; rows are {', '.join(map(str, ROWS))}\n" in done.stderr
