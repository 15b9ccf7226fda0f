"""Real runs are killed, signalled and damaged, a few times each, by the benchmark that does it by the hundred."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from repository import REPOSITORY

FAULTS = REPOSITORY / "benchmarks" / "faults.py"

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: forks that a pidfd waits for"),
]


def run(*arguments: str) -> subprocess.CompletedProcess:
    # In a process of its own: it forks, which one that has trained with several threads must not.
    return subprocess.run(
        [sys.executable, str(FAULTS), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What a quick run of some rows printed, its table, and its results by row."""
    folder = tmp_path_factory.mktemp("faults")
    page, results = folder / "deeper" / "faults.md", folder / "faults.json"
    amounts = ["--quick", "--kills", "6", "--corrupted", "1", "--rows", "1", "2", "5", "6", "11", "15"]
    done = run(*amounts, "--jobs", "1", "--output", str(page), "--json", str(results))
    assert page.is_file(), done.stdout + done.stderr
    return done, page.read_text(), json.loads(results.read_text())


def counts_of(finished, row: int) -> dict:
    done, _, results = finished
    result = results[str(row)]
    assert not result["failures"], done.stdout
    return result["counts"]


def test_a_run_that_is_killed_inside_saves_loses_nothing(finished):
    counts = counts_of(finished, 1)
    assert counts["inside a save"] == 6, "kills that hit a save"
    assert counts["torn"] == counts["finished saves lost"] == counts["crashes on resume"] == 0
    assert counts["bitwise equal"] >= 6  # those that came just before or after a save as well


def test_a_run_that_is_killed_mid_epoch_goes_on_bit_for_bit_with_and_without_workers(finished):
    counts = counts_of(finished, 2)
    assert counts["torn"] == counts["finished saves lost"] == counts["crashes on resume"] == 0
    assert counts["bitwise equal"] == 6


def test_whichever_call_to_the_system_fails_a_good_checkpoint_is_there(finished):
    counts = counts_of(finished, 5)
    assert counts["torn"] == counts["the older one lost"] == 0
    assert counts["error told"] > 20


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_nothing_is_renamed_before_it_is_on_the_disk_and_nothing_deleted_before_a_newer_one_is(finished):
    _, page, _ = finished
    if "not run: strace failed" in page:
        pytest.skip("this system does not let strace look on")
    counts = counts_of(finished, 6)
    assert (counts["renames"], counts["renames before fsync"]) == (6, 0)
    assert (counts["deletions"], counts["deletions before commit"]) == (5, 0)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(finished):
    counts = counts_of(finished, 11)
    assert counts["file named"] == counts["fell back"] == counts["bitwise equal"] == 2


def test_a_signal_in_a_forward_in_a_save_and_in_a_validation_loses_no_step(finished):
    counts = counts_of(finished, 15)
    assert (counts["exit code 143"], counts["exit code 130"]) == (3, 3)
    assert counts["workers' exit code 143"] == 2, "under torchrun, ddp and fsdp"
    assert counts["steps lost"] == counts["batches done twice"] == 0 and counts["bitwise equal"] == 8


def test_the_table_says_what_was_done_and_nothing_of_where(finished, tmp_path_factory):
    done, page, results = finished
    assert done.returncode == 0, done.stdout
    assert re.search(r"`python benchmarks/faults\.py --quick --kills 6 --corrupted 1 .*--jobs 1`", page)
    for row, result in results.items():
        assert re.search(rf"^\| {row} \| .* \| {result['runs']:,} \| .* \| (pass|not run: .*) \|$", page, re.MULTILINE)
    assert str(tmp_path_factory.getbasetemp()) not in page
    assert str(REPOSITORY) not in page


def test_a_row_that_fails_is_reported_and_the_others_go_on(tmp_path):
    """Here the package is made to commit without telling the truth: it writes the manifest of other bytes."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import amp_recipes.checkpoint.state_format as room\n"
        "finish = room.HashedFile.finish\n"
        "room.HashedFile.finish = lambda self: finish(self)[::-1]\n"
    )
    page = tmp_path / "faults.md"
    done = subprocess.run(
        [sys.executable, str(FAULTS), "--quick", "--kills", "2", "--rows", "3", "30", "--output", str(page)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^\| 3 \| .* \| FAIL \|$", page.read_text(), re.MULTILINE)
    assert re.search(r"^\| 30 \| .* \| pass \|$", page.read_text(), re.MULTILINE)


def test_it_refuses_a_row_that_it_does_not_have():
    done = run("--rows", "99")
    assert done.returncode == 2
    assert "99" in done.stderr
