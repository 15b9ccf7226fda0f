"""The benchmark of several processes runs under torchrun and writes what it promises; its times have no bound here."""

import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from programs import run_python
from repository import REPOSITORY

pytestmark = pytest.mark.extended
BENCHMARK = REPOSITORY / "benchmarks" / "distributed.py"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("distributed") / "deeper" / "distributed.md"
    forked = REPOSITORY / "tests" / "faults" / "forked_torchrun.py"  # what the benchmark itself would start
    finished = run_python(forked, "--standalone", "--nproc-per-node=2", BENCHMARK, "--quick", "--output", path)
    assert finished.returncode == 0, finished.stderr
    return path.read_text()


def cells(page: str, row: str) -> list[list[str]]:
    """The cells of each row of that name, without the name."""
    found = re.findall(rf"^\| {re.escape(row)} \| (.+) \|$", page, re.MULTILINE)
    assert found, page
    return [line.split(" | ") for line in found]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_gives_each_way_to_train_a_ratio(page, strategy):
    ((by_hand, *others),) = cells(page, f"{strategy}, fp32, small steps")
    assert by_hand.startswith("1.00 (")
    assert len(others) == 3
    assert all(float(cell.split()[0]) > 0 for cell in others)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_brain_sends_what_theory_and_the_loop_by_hand_say(page, strategy):
    ((theory, by_hand, brain, guards),) = cells(page, strategy)
    assert theory == by_hand == brain
    assert 0 < int(guards.replace(",", "")) < 1000


def test_it_says_how_it_was_measured_and_nothing_of_where(page, tmp_path_factory):
    assert "`python benchmarks/distributed.py --quick`" in page
    assert str(REPOSITORY) not in page
    assert str(tmp_path_factory.getbasetemp()) not in page


def test_brain_trains_the_weights_of_the_loop_by_hand(page):
    assert "*" not in page  # the mark of a row whose weights differ


def test_it_starts_two_processes_of_itself_under_torchrun(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARK.parent)  # no package: its files import each other by name
    started = []
    monkeypatch.setattr(subprocess, "run", lambda it, **_: started.append(it) or SimpleNamespace(returncode=3))
    assert runpy.run_path(str(BENCHMARK))["main"](["--quick"]) == 3
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert started == [[*launcher, str(BENCHMARK), "--quick"]]
