"""The benchmarks run and write what they promise. What they measure has no bound here: machines are noisy."""

import re

import pytest
from programs import run_python
from repository import REPOSITORY

OVERHEAD = REPOSITORY / "benchmarks" / "overhead.py"
WORDS = ("--rounds", "2", "--steps", "4", "--precisions", "fp32", "--no-peers")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("overhead") / "deeper" / "overhead.md"
    finished = run_python(OVERHEAD, *WORDS, "--output", path)
    assert finished.returncode == 0, finished.stderr
    return path.read_text()


def ratios(page: str, row: str) -> list[float]:
    """The medians in all rows of that name, one per optimizer."""
    return [float(found) for found in re.findall(rf"^\| {re.escape(row)} \| (\d+\.\d+) \(", page, re.MULTILINE)]


def test_overhead_writes_a_ratio_for_each_way_to_train_and_optimizer(page):
    assert ratios(page, "hand-written loop") == [1.0, 1.0]
    for row in ("the same loop again (noise)", "Brain", "Brain, writing progress and JSONL"):
        found = ratios(page, row)
        assert len(found) == 2, page
        assert all(ratio > 0 for ratio in found)


def test_overhead_finds_that_brain_trains_the_same_weights_as_the_loop(page):
    assert "*" not in page  # the mark of a row whose weights differ


def test_overhead_says_how_it_was_measured_and_nothing_of_where(page, tmp_path_factory):
    assert "--rounds 2 --steps 4 --precisions fp32 --no-peers`" in page
    assert "2 rounds of 4 steps" in page
    assert str(REPOSITORY) not in page
    assert str(tmp_path_factory.getbasetemp()) not in page


def test_overhead_refuses_a_precision_that_it_does_not_know():
    finished = run_python(OVERHEAD, "--precisions", "fp61")
    assert finished.returncode == 2
    assert "fp61" in finished.stderr
