"""Tests of my_task: it learns at each precision, and a kill changes no result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
RECIPE = (str(FOLDER / "train.py"), str(FOLDER / "my_task.yaml"))


def run_python(*words: str) -> None:
    """Run Python in a process of its own, so that runs do not share imports or seeds."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_epoch_learns_far_more_than_chance(tmp_path, precision):
    run_python(*RECIPE, f"--precision={precision}", "--number_of_epochs=1", f"--output_folder={tmp_path}")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["last"]["test"]["accuracy"] > 0.7


def test_a_killed_run_goes_on_bit_for_bit():
    run_python("-m", "amp_recipes.commands.cli", "verify-resume", *RECIPE)
