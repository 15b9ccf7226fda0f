"""What the README shows is so."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_python
from repository import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
RECORDING = REPOSITORY / "docs/pictures/recording.svg"


def code_block(language: str, first_line: str) -> str:
    found = re.search(rf"```{language}\n({re.escape(first_line)}\n.*?)```", README, re.DOTALL)
    assert found, f"README has no {language} block that begins with {first_line}"
    return found.group(1)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A folder with the README's recipe."""
    (tmp_path / "tiny.yaml").write_text(code_block("yaml", "# tiny.yaml"))
    (tmp_path / "tiny.py").write_text(code_block("python", "# tiny.py"))
    return tmp_path


def learned(done: subprocess.CompletedProcess) -> bool:
    losses = [float(loss) for loss in re.findall(r"epoch \d train: loss ([\d.]+)", done.stderr)]
    return done.returncode == 0 and len(losses) == 5 and losses[-1] < losses[0] / 2


def test_recipe_in_twenty_lines_takes_options(tiny):
    done = run_python("tiny.py", "tiny.yaml", "--precision=fp16", "--lr=3e-3", "--model.out_features", "12", cwd=tiny)
    assert learned(done), done.stderr


@pytest.mark.extended  # a fresh interpreter takes seconds to import torch
def test_recipe_in_twenty_lines_runs_in_a_fresh_interpreter(tiny):
    variables = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tiny.py", "tiny.yaml"]
    done = subprocess.run(command, cwd=tiny, env=variables, capture_output=True, text=True)
    assert learned(done), done.stderr


def test_supported_pythons_are_those_of_the_metadata():
    requires = re.search(r"python_requires = >=3\.(\d+),<3\.(\d+)", (REPOSITORY / "setup.cfg").read_text())
    first, beyond = (int(minor) for minor in requires.groups())
    assert f"Python 3.{first} to 3.{beyond - 1}" in README
    assert first <= sys.version_info.minor < beyond


def test_links_also_work_outside_the_repository():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert targets and all(target.startswith("https://") for target in targets), targets


# ---------------------------------------------------------------------- the picture


def words_of(picture: str) -> list[str]:
    """What the picture shows between its figures, without lines of dots and white space, where long lines are cut."""
    lines = [line for line in re.findall(r"<text[^>]*>(.*?)</text>", picture) if line != "..."]
    return re.split(r"[\d.,]+(?:e[-+]?\d+)?", re.sub(r"\s+", "", "".join(lines)))


def test_stopped_run_of_the_picture_ends_as_the_uninterrupted_one_of_the_readme():
    ends = [re.findall(r"test: loss ([\d.]+), accuracy ([\d.]+),", text) for text in (README, RECORDING.read_text())]
    assert len(ends[0]) == 1 and ends[0] == ends[1]


def test_picture_is_small_and_loads_nothing():
    picture = RECORDING.read_text().replace("http://www.w3.org/2000/svg", "")
    assert len(picture) < 100_000 and not re.search(r"https?://|url\(|<script|<image|@import", picture)


@pytest.mark.extended  # trains for half a minute
def test_picture_shows_what_the_commands_write():
    script = runpy.run_path(str(REPOSITORY / "docs/pictures/make_recording.py"))
    assert words_of(script["draw"](script["record"]())) == words_of(RECORDING.read_text())
