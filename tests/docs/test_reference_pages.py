"""The pages of the reference that are written by hand leave nothing out."""

import dataclasses
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from programs import run_python
from repository import REPOSITORY

from amp_recipes import Brain
from amp_recipes.loggers.jsonl import header
from amp_recipes.records import SCHEMA_VERSION, RunSummary, StageRecord, StepRecord

PAGES = REPOSITORY / "docs" / "reference"
RUN_FOLDER = (PAGES / "run_folder.md").read_text()


def section(title: str) -> str:
    return RUN_FOLDER.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> list[str]:
    """The code in the first column of its tables."""
    return [name for cell in re.findall(r"^\| (`.*?`) \|", text, re.M) for name in re.findall(r"`([^`]+)`", cell)]


def test_brain_page_has_every_public_name():
    page = (PAGES / "brain.md").read_text()
    public = [name for name in vars(Brain) if not name.startswith("_")]
    missing = [name for name in public if not re.search(rf"`{name}[(`]|^## {name}$", page, re.M)]
    assert not missing
    named = {name.partition("(")[0] for name in first_column(page.split("## Methods that you write")[1])}
    assert named <= {*vars(Brain), *Brain.__annotations__, "diagnose"}


def fields_of(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_fields_of_the_records_are_on_the_page():
    steps, stages = section("metrics.jsonl").split('`"kind": "stage"`')
    assert {*first_column(steps)} == fields_of(StepRecord)
    assert {*first_column(stages)} == fields_of(StageRecord)
    assert {*first_column(section("summary.json"))} == fields_of(RunSummary) | {"schema_version"}
    assert header()["schema_version"] == SCHEMA_VERSION == 1, "the page says 1, in two places"


RECIPE = """\
import torch
from amp_recipes import Brain, EpochCounter, load_hparams, parse_arguments


class Mean(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.float().square().mean()


file, options, overrides = parse_arguments()
hparams = load_hparams(file, overrides)
data = [torch.ones(4, 3) for _ in range(6)]
data[4][1, 1] = float(hparams["poison"])
brain = Mean({"model": hparams["model"]}, hparams["opt_class"], hparams, options)
brain.fit(EpochCounter(1), data, data[:2])
brain.evaluate(data[:2])
"""

SETTINGS = """\
poison: 1.0
output_folder: run
seed: 1
device: cpu
ema_decay: 0.9
noprogressbar: true
model: !new:torch.nn.Linear {in_features: 3, out_features: 1}
opt_class: !name:torch.optim.SGD {lr: 0.1}
lr_scheduler: !name:torch.optim.lr_scheduler.StepLR {step_size: 2}
"""


def unnamed(folder: Path) -> list[str]:
    """The files of a run that the page does not name."""
    names = [
        *first_column(section("The folder of a run")),
        *first_column(section("The folders of a sweep and a comparison")),
    ]
    parts = first_column(section("A checkpoint"))
    patterns = [*names, *(f"{name}/{part}" for name in names if "CKPT" in name for part in parts)]
    files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [file for file in files if not any(matches(file, pattern) for pattern in patterns)]


def matches(file: str, pattern: str) -> bool:
    return file.count("/") == pattern.count("/") and fnmatch(file, pattern)


def run(folder: Path, *words: str, statuses: tuple[int, ...] = (0,)) -> None:
    (folder / "train.py").write_text(RECIPE)
    (folder / "train.yaml").write_text(SETTINGS)
    done = run_python("train.py", "train.yaml", *words, cwd=folder)
    assert done.returncode in statuses, done.stderr


@pytest.mark.extended  # a step that is taken again, fp16 on a CPU: seconds
def test_run_leaves_no_file_that_the_page_does_not_name(tmp_path):
    run(tmp_path, "--poison=.nan", "--precision=fp16")
    assert (tmp_path / "run" / "nonfinite-5.json").is_file()
    assert not unnamed(tmp_path / "run")


@pytest.mark.extended
def test_runs_of_other_kinds_leave_no_file_that_the_page_does_not_name(tmp_path):
    run(tmp_path, "--debug")
    run(tmp_path, "--ckpt_interval_steps=2", "--optimizer_step_limit=3")
    run(tmp_path, "--optimizer_step_limit=9", "--accept_changes")
    run(tmp_path, "--resume=never")
    run(tmp_path, "--precision=bf16", "--diagnose", statuses=(0, 1, 2))  # whatever the verdict is
    done = run_python("-m", "amp_recipes", "export", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not unnamed(tmp_path / "run")
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"debug", "save.1", "metrics.1.jsonl", "diagnosis.json", "export"} <= written
    run(tmp_path, "--output_folder=swept", "--sweep", "seed=1,2")
    for folder in ("seed=1", "seed=2"):
        assert not unnamed(tmp_path / "swept" / "sweep" / folder)
