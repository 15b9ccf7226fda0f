"""The benchmark of several processes runs under torchrun and writes what it promises; its times have no bound here."""

import os
import re
import subprocess
import sys

import pytest
from repository import REPOSITORY


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("distributed") / "deeper" / "distributed.md"
    finished = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "distributed.py"), "--quick", "--output", str(path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert finished.returncode == 0, finished.stderr
    return path.read_text()


def cells(page: str, row: str) -> list[list[str]]:
    """The cells of each row of that name, without the name."""
    found = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", page, re.MULTILINE)
    assert found, page
    return [line.split(" | ") for line in found]


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_gives_each_way_to_train_a_ratio(page, strategy):
    ((by_hand, *others),) = cells(page, f"{strategy}, fp32, small steps")
    assert by_hand.startswith("1.00 (")
    assert len(others) == 3
    assert all(float(cell.split()[0]) > 0 for cell in others)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_brain_sends_what_theory_and_the_loop_by_hand_say(page, strategy):
    ((theory, by_hand, brain, guards),) = cells(page, strategy)
    assert theory == by_hand == brain
    assert 0 < int(guards.replace(",", "")) < 1000


@pytest.mark.extended
def test_it_says_how_it_was_measured_and_nothing_of_where(page, tmp_path_factory):
    assert "`python benchmarks/distributed.py --quick`" in page
    assert str(REPOSITORY) not in page
    assert str(tmp_path_factory.getbasetemp()) not in page


@pytest.mark.extended
def test_brain_trains_the_weights_of_the_loop_by_hand(page):
    assert "*" not in page  # the mark of a row whose weights differ
