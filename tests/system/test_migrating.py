"""The programs of docs/migrating: each diff applies, both of its sides run, and their losses agree."""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from repository import REPOSITORY

import amp_recipes
from amp_recipes import Brain, RunOptions
from amp_recipes.config.options.other_names import instead_of
from amp_recipes.config.options.run_options import OPTION_NAMES
from amp_recipes.errors import ConfigError

PAGES = {path.stem: path.read_text() for path in (REPOSITORY / "docs" / "migrating").glob("*.md")}
NOT_OF_THE_BRAIN = {"opt_class", "lr_scheduler", "train_loader_kwargs", "valid_loader_kwargs", "state_dict"}
NOT_OF_THE_BRAIN |= {"amp_recipes", "batch_sampler", "collate_fn", "weight_decay"}


def sides_of(page):
    """The program before and after the page's diff, which shows all lines of both, and its name."""
    (diff,) = re.findall(r"```diff\n(--- .*?)```", PAGES[page], re.S)
    before, after, counts, *lines = diff.splitlines()
    name = before.removeprefix("--- ")
    old = [line[1:] for line in lines if not line.startswith("+")]
    new = [line[1:] for line in lines if not line.startswith("-")]
    assert after == f"+++ {name}" and counts == f"@@ -1,{len(old)} +1,{len(new)} @@"
    return "\n".join(old) + "\n", "\n".join(new) + "\n", name


def files_of(page):
    """The files that the page shows in full, without the line that names each."""
    return dict(re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", PAGES[page], re.S))


def commands_of(page, script):
    """The arguments of each command of the page that starts the script."""
    return [line.split() for line in re.findall(rf"^python {script} (.*)$", PAGES[page], re.M)]


def rows_of(page):
    """The cells of each row of the page's tables whose last column is ours."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.M):
        header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split(" |")] for line in table.splitlines())
        if header[-1] == "here":
            yield from rows


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, logging_as_before):
    """Runs a program in a folder of its own, beside the page's YAML; returns its names, output and folder."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run_program(page, side, arguments, text=None):
        old, new, script = sides_of(page)
        folder = tmp_path / side
        folder.mkdir()
        for name, content in files_of(page).items():
            (folder / name).write_text(content)
        (folder / script).write_text(text or {"theirs": old, "ours": new}[side])
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, Path(script).stem, raising=False)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", script, *arguments])
        names = runpy.run_path(script, run_name="__main__")
        return SimpleNamespace(**names, folder=folder, output=capsys.readouterr())

    with mock.patch.dict(os.environ):  # other frameworks leave settings there
        yield run_program


@pytest.fixture
def accelerate():
    """Accelerate, whose state is the process's."""
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def valid_losses(ours):
    """The validation loss of each epoch of a recipe that ran."""
    lines = (ours.folder / "results/digits/1/metrics.jsonl").read_text().splitlines()
    stages = [record for record in map(json.loads, lines) if record["kind"] == "stage"]
    return [record["loss"] for record in stages if record["stage"] == "valid"]


def equal_weights(ours, theirs):
    return all(mine.equal(other) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True))


# ---------------------------------------------------------------------- what the pages show


@pytest.mark.parametrize("page", ["lightning", "accelerate", "hf_trainer", "own_loop"])
def test_the_recipe_that_is_shown_is_what_the_diff_makes(page):
    _, new, script = sides_of(page)
    assert files_of(page)[script] == new
    assert re.search(r"^(from|import) (lightning|accelerate)", new, re.M) is None


@pytest.mark.parametrize("page", PAGES)
def test_our_names_in_the_tables_are_there(page):
    known = OPTION_NAMES | NOT_OF_THE_BRAIN | set(dir(Brain)) | set(Brain.__annotations__) | set(dir(amp_recipes))
    ours = [row[-1] for row in rows_of(page)]
    assert len(ours) > 10
    named = set(re.findall(r"`(?:self\.)?([a-z]\w+_\w+)", " ".join(ours)))
    assert named and named <= known


@pytest.mark.parametrize("page, least", [("lightning", 8), ("speechbrain", 5), ("hf_trainer", 2)])
def test_their_options_end_in_an_error_that_says_what_the_page_says(page, least, subtests):
    found = 0
    for theirs, ours in rows_of(page):
        for name in re.findall(r"`([a-z]\w+)", theirs):
            if name in OPTION_NAMES or not (advice := instead_of(name)):
                continue
            found += 1
            with subtests.test(name):
                with pytest.raises(ConfigError, match="Instead, "):
                    RunOptions(**{name: "other"})
                if "Instead, set " in advice:
                    assert advice.partition("Instead, set ")[2].rstrip(".") in ours.replace("`", "")
    assert found >= least


# ---------------------------------------------------------------------- both sides


def test_loop_and_recipe_give_the_same_numbers_in_fp16(run):
    by_hand = run("own_loop", "theirs", [])
    ours = run("own_loop", "ours", ["digits.yaml", "--device", "cpu"])
    shown = re.compile(r"^epoch \d valid: loss [\d.]+, accuracy [\d.]+", re.M)
    assert len(shown.findall(by_hand.output.out)) == 3
    assert shown.findall(ours.output.err) == shown.findall(by_hand.output.out)
    assert equal_weights(ours.hparams["model"], by_hand.model)
    assert ours.brain.optimizer_step == 36


def test_accelerate_gives_the_same_weights(run, accelerate):
    theirs = run("accelerate", "theirs", [])
    ours = run("accelerate", "ours", ["digits.yaml", "--device", "cpu"])
    losses = [float(loss) for loss in re.findall(r"valid: loss ([\d.]+)", theirs.output.out)]
    assert len(losses) == 3 and valid_losses(ours) == pytest.approx(losses, rel=1e-6)
    assert equal_weights(ours.hparams["model"], theirs.model)


def test_lightning_s_classifier_gives_the_losses_that_lightning_gave(run):
    ours = run("lightning", "ours", ["digits.yaml", "--device", "cpu"])
    shown = re.search(r"validation losses ([\d.]+), ([\d.]+) and ([\d.]+) on a CPU", PAGES["lightning"]).groups()
    assert valid_losses(ours) == pytest.approx([float(loss) for loss in shown], rel=1e-4)
    best = ours.brain.summary.best["accuracy"]
    assert best > 0.8 and ours.brain.summary.last["test"]["accuracy"] == best
    assert ours.brain.checkpointer.find_checkpoint(max_key="accuracy").meta["accuracy"] == best


@pytest.mark.extended
def test_lightning_gives_the_same_losses(run):
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")
    theirs = run("lightning", "theirs", [])
    ours = run("lightning", "ours", ["digits.yaml", "--device", "cpu"])
    *losses, best = [float(loss) for loss in re.findall(r"valid loss ([\d.]+)", theirs.output.out)]
    assert len(losses) == 3 and valid_losses(ours) == pytest.approx(losses, rel=1e-6)
    assert ours.brain.summary.last["test"]["loss"] == pytest.approx(best, rel=1e-6)


@pytest.mark.extended
def test_hugging_face_trainer_gives_the_same_losses(run, accelerate):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    theirs = run("hf_trainer", "theirs", [])
    ours = run("hf_trainer", "ours", ["digits.yaml", "--device", "cpu"])
    evaluations = [record for record in theirs.trainer.state.log_history if "eval_loss" in record]
    *losses, best = [record["eval_loss"] for record in evaluations]
    assert len(losses) == 3 and valid_losses(ours) == pytest.approx(losses, rel=1e-6)
    assert ours.brain.summary.last["test"]["loss"] == pytest.approx(best, rel=1e-6)
    assert ours.brain.summary.best["accuracy"] == pytest.approx(max(record["eval_accuracy"] for record in evaluations))


# ---------------------------------------------------------------------- SpeechBrain


@pytest.fixture
def speechbrain():
    pytest.importorskip("speechbrain_import", reason="SpeechBrain is not installed: pip install speechbrain")


def train_log(program, output_folder="results/signals/7"):
    return (program.folder / output_folder / "train_log.txt").read_text()


def test_speechbrain_writes_the_same_log(run, speechbrain):
    theirs = run("speechbrain", "theirs", ["signals.yaml", "--device", "cpu", "--noprogressbar"])
    ours = run("speechbrain", "ours", ["signals.yaml", "--device", "cpu"])
    assert isinstance(ours.brain, Brain) and not isinstance(theirs.brain, Brain)
    assert train_log(ours) == train_log(theirs)
    assert train_log(ours) in PAGES["speechbrain"]
    assert equal_weights(ours.hparams["model"], theirs.hparams["model"])


def test_speechbrain_s_experiment_of_which_only_the_class_changes(run, speechbrain):
    old, _, _ = sides_of("speechbrain")
    (diff,) = re.findall(r"```diff\n(\+.*?)```", PAGES["speechbrain"], re.S)
    imports, removed, added = re.findall(r"^[+-](.*)$", diff, re.M)
    assert old.count(f"{removed}\n") == 1
    text = f"{imports}\n{old}".replace(removed, added)
    ours = run("speechbrain", "ours", ["signals.yaml", "--device", "cpu", "--noprogressbar"], text)
    assert isinstance(ours.brain, Brain)
    assert train_log(ours) in PAGES["speechbrain"]


def test_speechbrain_s_experiment_with_options_of_ours(run, speechbrain):
    *_, arguments = commands_of("speechbrain", "signals.py")
    ours = run("speechbrain", "ours", [*arguments, "--device", "cpu"])
    assert ours.brain.precision == "bf16" and ours.brain.ckpt_interval_steps == 5
    *epochs, test = train_log(ours, "results/bf16").splitlines()
    errors = [float(line.rpartition("valid error: ")[2]) for line in epochs]
    assert len(errors) == 4 and errors[-1] < errors[0]
    assert test.startswith(f"epoch: {errors.index(min(errors)) + 1} - ")  # the best was evaluated
    assert (ours.folder / "results/bf16/metrics.jsonl").is_file()
