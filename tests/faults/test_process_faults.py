"""One of several processes under torchrun is killed, frozen or misled: a quick round of the fault benchmark."""

import json
import os
import subprocess
import sys

import pytest
from repository import REPOSITORY

FAULTS = REPOSITORY / "benchmarks" / "faults.py"

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: forks that a pidfd waits for"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What a quick run of the rows on several processes printed, and its results by row."""
    folder = tmp_path_factory.mktemp("faults")
    results = folder / "faults.json"
    # In a process of its own: it forks, which one that has trained with several threads must not. Most of the time of
    # row 21 goes by in waits, so that many parts side by side take hardly longer than one.
    rows = ["--rows", "20", "21", "22", "24", "44"]
    output = ["--output", str(folder / "faults.md")]
    done = subprocess.run(
        [sys.executable, str(FAULTS), "--quick", "--jobs", "4", *rows, "--json", str(results), *output],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert results.is_file(), done.stdout + done.stderr
    return done.stdout, json.loads(results.read_text())


def result_of(finished, row: int) -> tuple[int, dict]:
    """How many runs there were, and what was counted."""
    printed, results = finished
    result = results[str(row)]
    assert not result["failures"], printed
    return result["runs"], result["counts"]


def test_all_processes_end_when_one_is_killed_and_a_restart_goes_on_bit_for_bit(finished):
    runs, counts = result_of(finished, 20)
    assert counts["torn"] == counts["finished saves lost"] == counts["crashes on resume"] == 0
    assert counts["bitwise equal"] == runs == 7, "by hand and by --max-restarts, by ddp and fsdp, and more"
    assert counts["all ended in time"] + counts["over before the kill"] == runs


def test_those_that_wait_in_vain_end_at_our_timeout_and_name_its_option(finished):
    runs, counts = result_of(finished, 21)
    assert counts["all ended in time"] == counts["those that waited failed"] == counts["bitwise equal"] == runs == 5
    assert counts["option named"] == 2, "of a frozen rank and a sleeping one"


def test_a_rank_that_is_killed_in_a_sharded_save_leaves_nothing_torn(finished):
    runs, counts = result_of(finished, 22)
    assert counts["torn"] == counts["finished saves lost"] == counts["crashes on resume"] == 0
    assert counts["bitwise equal"] == runs == 4
    assert counts["all ended alike"] == 2, "runs in which one rank's disk was full"


def test_infinite_gradients_of_one_rank_make_all_ranks_skip(finished):
    runs, counts = result_of(finished, 24)
    assert counts["all skipped"] == counts["ranks equal"] == runs == 6, "three precisions, ddp and fsdp"
    assert counts["bad parameters"] == 0


def test_an_epoch_that_other_numbers_of_processes_go_on_with_takes_each_sample_once(finished):
    _, counts = result_of(finished, 44)
    assert counts["missing"] == counts["repeated"] == counts["crashes"] == counts["torn"] == 0
