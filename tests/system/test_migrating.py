"""What docs/migrating/index.md shows for our side runs, and does what it says."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

from amp_recipes.config.options.run_options import OPTION_NAMES

PAGE = (REPOSITORY / "docs" / "migrating" / "index.md").read_text()
BLOCKS = {
    first: f"# {first}\n{body}" for first, body in re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", PAGE, re.S)
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script of the page in an empty folder; returns its names and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)

    def run_script(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", script, *arguments])
        return runpy.run_path(script, run_name="__main__"), capsys.readouterr()

    return run_script


def command_of(script):
    """What the page types to start it."""
    (line,) = re.findall(rf"^python {script} (.*)$", PAGE, re.M)
    return line.split()


def test_page_has_all_its_scripts():
    assert set(BLOCKS) == {"signals.yaml", "signals.py", "digits.yaml", "digits.py", "loop.py", "brain.py"}


def test_loop_and_brain_give_the_same_numbers(run):
    _, by_hand = run("loop.py")
    _, ours = run("brain.py")
    losses = re.findall(r"^epoch \d: ([\d.]+)$", by_hand.out, re.M)
    assert len(losses) == 3 and float(losses[-1]) < float(losses[0])
    assert re.findall(r"^VALID epoch \d: ([\d.]+)$", ours.out, re.M) == losses


def test_loop_and_brain_end_with_the_same_weights(run):
    by_hand, _ = run("loop.py")
    ours, _ = run("brain.py")
    for mine, expected in zip(ours["model"].parameters(), by_hand["model"].parameters(), strict=True):
        assert mine.equal(expected)


@pytest.mark.parametrize("arguments", [["digits.yaml"], command_of("digits.py")], ids=" ".join)
def test_lightning_s_classifier(run, arguments):
    names, _ = run("digits.py", *arguments, "--device", "cpu")
    brain = names["brain"]
    assert brain.summary.best["accuracy"] > 0.8
    assert brain.checkpointer.find_checkpoint(max_key="accuracy").meta["accuracy"] == brain.summary.best["accuracy"]


def test_speechbrain_s_experiment(run):
    pytest.importorskip("speechbrain_import", reason="SpeechBrain is not installed: pip install speechbrain")
    names, _ = run("signals.py", *command_of("signals.py"), "--device", "cpu")
    brain = names["brain"]
    assert brain.precision == "bf16"
    *epochs, test = Path("results/signals/7/train_log.txt").read_text().splitlines()
    errors = [float(line.rpartition("valid error: ")[2]) for line in epochs]
    assert len(errors) == 4 and errors[-1] < errors[0]
    assert test.startswith(f"epoch: {errors.index(min(errors)) + 1} - ")  # the best was evaluated
    assert Path("results/signals/7/metrics.jsonl").is_file()


def test_options_that_the_page_names_are_there():
    tables = re.findall(r"^\| .*? \| (.*) \|$", PAGE.split("## From Lightning")[1].split("A classifier in")[0], re.M)
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", " ".join(tables)))
    known = OPTION_NAMES | {"compute_forward", "compute_objectives", "opt_class", "init_optimizers", "lr_scheduler"}
    assert named <= known | {"on_stage_end", "fit_batch"}
