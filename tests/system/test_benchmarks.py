"""The benchmarks run and write what they promise. What they measure has no bound here: machines are noisy."""

import importlib
import re

import pytest
from programs import run_python
from repository import REPOSITORY

from amp_recipes import parse_arguments
from amp_recipes.config import check

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


# --- the tables of the recipes


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("recipes")


def test_every_recipe_has_a_table(tables):
    folders = {path.parent.name for path in REPOSITORY.glob("recipes/*/train.py")}
    assert {name.removesuffix("_unpinned").removesuffix("_smallest") for name in tables.TABLES} == folders


@pytest.mark.extended
def test_each_recipe_takes_the_options_of_its_table(tables, subtests):
    for name in tables.TABLES:
        for small in (False, True):
            with subtests.test(name, small=small):
                words = tables.command(name, small)
                script, config = words[1:3]
                options = words[words.index("--") + 1 :]
                file, _, overrides = parse_arguments([str(REPOSITORY / config), *options])
                check(file, overrides, recipe_folder=(REPOSITORY / script).parent)


def test_an_unknown_table_is_refused_with_those_there_are(tables, capsys):
    with pytest.raises(SystemExit) as stopped:
        tables.main(["imagenet"])
    assert stopped.value.code == 2
    assert "unknown table imagenet; expected image_classification" in capsys.readouterr().err


@pytest.mark.extended
def test_a_small_table_has_a_row_for_each_precision(tmp_path):
    page = tmp_path / "page.md"
    words = ("--small", "image_classification", "--output", page)
    finished = run_python(REPOSITORY / "benchmarks" / "recipes.py", *words)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for precision in ("fp32", "bf16", "fp16"):
        assert re.search(rf"^\| {precision}\b.*\d", page.read_text(), re.MULTILINE)
