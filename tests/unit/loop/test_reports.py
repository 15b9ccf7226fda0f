"""What a recipe reports: metrics without hooks, the stage's time, files in the run's folder."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE
from torch import nn

from amp_recipes import Brain, EpochCounter, RunOptions, Stage
from amp_recipes.config import Purpose
from amp_recipes.errors import ConfigError, RecipeError
from amp_recipes.interrupts import RunInterrupted
from amp_recipes.loggers import run_log

OPT = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731


class Regression(Brain):
    """Reports its mean error and the share of samples in the batch whose first feature is positive."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0]).squeeze(1)

    def compute_objectives(self, predictions, batch, stage):
        errors = (predictions.float() - batch[1]).abs()
        self.add_metric("mean_error", errors, len(errors))
        self.add_metric("positive", batch[0][:, 0] > 0, len(errors))
        return errors.square().mean()


def batches(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, 3, generator=generator) for size in sizes]
    return [(x, x.sum(1)) for x in made]


def brain_of(kind=Regression, **options):
    torch.manual_seed(0)
    return kind({"model": nn.Linear(3, 1)}, OPT, run_opts={"device": DEVICE, "noprogressbar": True, **options})


def positives(data):
    return sum((x[:, 0] > 0).sum().item() for x, _ in data) / sum(len(x) for x, _ in data)


def stage_records(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record.get("kind") == "stage"]


def test_each_stage_reports_its_own_metrics(tmp_path):
    train, valid, test = batches(5, 2, 8), batches(7, 1, seed=1), batches(3, 4, seed=2)
    brain = brain_of(output_folder=str(tmp_path))
    brain.fit(EpochCounter(2), train, valid)
    brain.evaluate(test)
    found = [(record["stage"], record["metrics"]["positive"]) for record in stage_records(tmp_path)]
    of_epoch = [("train", positives(train)), ("valid", positives(valid))]
    assert found == [*of_epoch, *of_epoch, ("test", positives(test))]
    assert brain.summary.last["test"]["mean_error"] == stage_records(tmp_path)[-1]["metrics"]["mean_error"]


def test_on_stage_end_sees_them_and_its_own_win():
    class Judged(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            return {"positive": -1.0, "twice": 2 * self.stage_metrics["positive"]}

    data = batches(6, 3)
    brain = brain_of(Judged)
    brain.evaluate(data)
    assert brain.summary.last["test"]["positive"] == -1
    assert brain.summary.last["test"]["twice"] == 2 * positives(data)
    assert "mean_error" in brain.summary.last["test"]


def test_early_stopping_and_the_best_checkpoint_read_them(tmp_path):
    brain = brain_of(output_folder=str(tmp_path), early_stop_metric="mean_error", early_stop_patience=50)
    brain.fit(EpochCounter(3), batches(8, 8), batches(8, seed=1))
    assert brain.summary.best["mean_error"] == min(
        record["metrics"]["mean_error"] for record in stage_records(tmp_path) if record["stage"] == "valid"
    )


def test_a_metric_that_is_not_there_says_how_to_add_it():
    with pytest.raises(ConfigError, match=r"Did you mean 'mean_error'\? Add it with self\.add_metric"):
        brain_of(early_stop_metric="mean_eror").fit(EpochCounter(1), batches(8), batches(8))


def test_evaluation_inside_a_stage_leaves_its_metrics_alone():
    class Curious(Regression):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.step == 2:
                self.evaluate(batches(50, seed=9))

    plain, curious = brain_of(), brain_of(Curious)
    for brain in (plain, curious):
        brain.fit(EpochCounter(1), batches(4, 4, 4))
    assert curious.summary.last["train"] == plain.summary.last["train"]


def test_a_step_that_is_tried_again_adds_nothing():
    """The second batch, which holds a NaN, is taken again and again to find out why."""
    data = batches(4, 4, 4)
    data[1][0][0, 1] = math.nan
    brain = brain_of()
    brain.fit(EpochCounter(1), data)
    assert brain.skipped_steps == 1
    assert brain.summary.last["train"]["positive"] == positives([data[0], data[2]])
    assert math.isfinite(brain.summary.last["train"]["mean_error"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_epoch_reports_what_the_whole_one_does(tmp_path, precision):
    class Interrupted(Regression):
        ends_at = None

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.step == self.ends_at:
                os.kill(os.getpid(), signal.SIGTERM)

    data, valid = batches(4, 7, 2, 5, 6), batches(5, seed=1)
    whole = brain_of(Interrupted, output_folder=str(tmp_path / "whole"), precision=precision)
    whole.fit(EpochCounter(2), data, valid)
    cut = brain_of(Interrupted, output_folder=str(tmp_path / "cut"), precision=precision)
    cut.ends_at = 3
    with pytest.raises(RunInterrupted):
        cut.fit(EpochCounter(2), data, valid)
    resumed = brain_of(Interrupted, output_folder=str(tmp_path / "cut"), precision=precision)
    resumed.fit(EpochCounter(2), data, valid)
    expected, found = ([record["metrics"] for record in stage_records(tmp_path / name)] for name in ("whole", "cut"))
    assert found == expected


def test_batches_whose_update_is_skipped_do_not_count():
    """As they do not in the average loss; a window counts as a whole or not at all."""
    data = batches(4, 4, 4, 4, 4, 4)
    bad = (data[2][0], data[2][1] + math.inf)
    brain = brain_of(grad_accumulation_factor=2, nonfinite_patience=9)
    brain.fit(EpochCounter(1), [*data[:2], bad, *data[3:]])
    assert brain.skipped_steps == 1
    assert brain.summary.last["train"]["positive"] == positives([*data[:2], *data[4:]])


def test_what_on_stage_end_adds_is_reported():
    class Late(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.add_metric("late", 3, 4)

    brain = brain_of(Late)
    brain.evaluate(batches(3))
    assert brain.summary.last["test"]["late"] == 0.75


def test_the_name_of_the_loss_is_taken():
    with pytest.raises(RecipeError, match="average loss"):
        brain_of().add_metric("loss", 1)


def test_contributions_that_are_left_out_are_told(caplog):
    class Nan(Regression):
        def compute_objectives(self, predictions, batch, stage):
            self.add_metric("share", torch.tensor([1.0, math.nan]), 2)
            return super().compute_objectives(predictions, batch, stage)

    brain_of(Nan).evaluate(batches(3, 3))
    assert "metric share: 2 values" in caplog.text


def test_stage_seconds_are_those_of_the_stage(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(run_log, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 1e9))

    class Slow(Regression):
        def compute_forward(self, batch, stage):
            clock.now += 0.5
            return super().compute_forward(batch, stage)

        def on_stage_end(self, stage, stage_loss, epoch=None):
            return {"seconds": self.stage_seconds}

    brain = brain_of(Slow)
    brain.fit(EpochCounter(1), batches(4, 4, 4), batches(4))
    seconds = [brain.summary.last[stage]["seconds"] for stage in ("train", "valid")]
    assert (*seconds, brain.summary.seconds) == (1.5, 0.5, 2.0)


# ---------------------------------------------------------------------- files


def test_a_file_lies_below_the_output_folder(tmp_path):
    path = brain_of(output_folder=str(tmp_path / "run")).output_path("samples/epoch_1.png")
    assert path == tmp_path / "run" / "samples" / "epoch_1.png"
    assert path.parent.is_dir() and not path.exists()


def test_a_trial_writes_beside_the_run(tmp_path):
    path = brain_of(output_folder=str(tmp_path / "run"), debug=True).output_path("a.png")
    assert path == tmp_path / "run" / "debug" / "a.png"


def test_nothing_is_to_be_written_without_a_folder_or_in_a_diagnosis(tmp_path):
    assert brain_of().output_path("a.png") is None
    options = RunOptions.from_mapping(
        {"device": DEVICE, "noprogressbar": True, "output_folder": str(tmp_path / "run")}, purpose=Purpose("diagnose")
    )
    assert Regression({"model": nn.Linear(3, 1)}, OPT, run_opts=options).output_path("a.png") is None
    assert not (tmp_path / "run").exists()


def test_nor_in_a_process_that_is_not_the_main_one(tmp_path, monkeypatch):
    brain = brain_of(output_folder=str(tmp_path / "run"))
    monkeypatch.setenv("RANK", "1")
    assert brain.output_path("a.png") is None


NAMES_REFUSED = {
    "is not inside": ["../a.png", "/tmp/a.png", "b/../../a.png", "", ".", "b/.."],
    "is reserved for": ["metrics.jsonl", "save/a.png", "b/../summary.json", "hyperparams.yaml"],
}


@pytest.mark.parametrize("words", NAMES_REFUSED)
def test_names_that_lead_out_or_are_the_run_s_own_are_refused(tmp_path, subtests, words):
    brain = brain_of(output_folder=str(tmp_path / "run"))
    for name in NAMES_REFUSED[words]:
        with subtests.test(name), pytest.raises(ConfigError, match=words):
            brain.output_path(name)


def test_a_folder_that_is_a_file_is_named(tmp_path):
    brain = brain_of(output_folder=str(tmp_path / "run"))
    brain.output_path("a").write_text("")
    with pytest.raises(ConfigError, match=r"output_path\('a/b'\).*exists"):
        brain.output_path("a/b")


def test_stage_is_said_by_the_brain_alone():
    """What a recipe adds between stages belongs to none and is not reported."""
    brain = brain_of()
    brain.add_metric("between", 1)
    brain.evaluate(batches(3))
    assert "between" not in brain.summary.last["test"]
    assert Stage.TEST.name.lower() in brain.summary.last
