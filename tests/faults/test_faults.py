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
NEVER = ["torn", "finished saves lost", "the older one lost", "crashes on resume", "crashes", "steps lost", "leaked",
         "batches done twice", "bad parameters", "executed", "missing", "repeated", "renames before fsync",
         "deletions before commit"]  # fmt: skip

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
    assert result["runs"] > 0
    assert not {what: number for what, number in result["counts"].items() if what in NEVER and number}


IN_A_SAVE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from fault_kills import in_saves
from fault_runs import Amounts

torch.set_num_threads(1)  # a fork of a process with a pool of threads may hang
tally = in_saves(Amounts(kills=2, corrupted=1, quick=True, seed=0), Path(sys.argv[2]), background=True, epochs=1)
print(json.dumps(vars(tally)))
"""


@needs_linux
def test_a_run_killed_inside_a_save_goes_on_bit_for_bit(tmp_path):
    """Part of row 1, for the default tests: one kill that hits a save, and the resume."""
    done = run_python("-c", IN_A_SAVE, FOLDER, tmp_path)
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout)
    assert not tally["failures"]
    assert tally["counts"]["inside a save"] == 1, "kills that hit a save"
    assert tally["counts"]["bitwise equal"] == tally["runs"] >= 1


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
