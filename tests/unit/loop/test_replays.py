"""A Brain that is diagnosed stays as it was, and one whose step goes nonfinite says where."""

import json
import logging
import math
import random
import textwrap
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from device import DEVICE
from inside import run_of
from programs import run_python
from torch import nn
from torch.nn import functional as F

from amp_recipes import Brain, RunOptions, numerics
from amp_recipes.config import Purpose
from amp_recipes.errors import DataError, NonfiniteError, PrecisionError, RecipeError
from amp_recipes.loop import examination

OPT = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731


class Classifier(Brain):
    """Counts its batches, as recipes do."""

    def compute_forward(self, batch, stage):
        self.seen = getattr(self, "seen", 0) + len(batch[0])
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return F.cross_entropy(predictions.float(), batch[1])


class Quick(Classifier):
    """Its diagnosis takes few steps, also where a fit starts it."""

    def diagnose(self, *args, **options):
        return super().diagnose(*args, **{"steps": 2, "windows": 4, **options})


class Scaled(nn.Module):
    """A layer whose activations are beyond fp16."""

    def __init__(self, width, factor):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.factor = factor

    def forward(self, x):
        return self.layer(x * self.factor) / self.factor


def network(factor=1.0, width=16):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.1),
        Scaled(width, factor),
        nn.ReLU(),
        nn.Linear(width, 4),
    )


def data(batches=8, size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(batches)
    ]


def brain_of(model, kind=Classifier, opt=OPT, **options):
    return kind({"model": model}, opt, run_opts={"device": DEVICE, "noprogressbar": True, **options})


def state_of(brain):
    optimizers = [optimizer.state_dict() for optimizer in brain.optimizers_dict.values()]
    return {name: value.clone() for name, value in brain.modules.state_dict().items()}, optimizers


@pytest.fixture
def undrawn(monkeypatch):
    """A diagnosis is written, and not drawn, which takes longer than the rest."""
    monkeypatch.setattr(examination, "_draw", lambda folder: None)


# ---------------------------------------------------------------------- diagnosis


def test_a_context_that_a_hook_sets_in_a_diagnosis_is_gone_after_it(undrawn):
    class Sets(Classifier):
        def on_stage_start(self, stage, epoch=None):
            self.training_ctx = self.evaluation_ctx = nullcontext()

    brain = brain_of(network(), Sets, precision="bf16", eval_precision="bf16")
    before = brain.training_ctx, brain.evaluation_ctx
    brain.diagnose(data(), steps=1, minutes=0.05)
    assert (brain.training_ctx, brain.evaluation_ctx) == before


def test_a_recipe_that_recovers_by_itself_is_diagnosed(tmp_path, undrawn, capsys):
    class Recovers(Quick):
        def on_fit_start(self):
            super().on_fit_start()
            self.checkpointer.recover_if_possible()

    folder = {"output_folder": str(tmp_path / "run")}
    brain_of(network(), **folder).fit(range(1), data())
    options = {"device": DEVICE, "noprogressbar": True, "precision": "bf16", **folder}
    asked = RunOptions.from_mapping(options, purpose=Purpose("diagnose"))
    brain = Recovers({"model": network()}, OPT, run_opts=asked)
    with pytest.raises(SystemExit):
        brain.fit(range(1), data())
    assert "bf16" in capsys.readouterr().out


def test_a_diagnosis_changes_nothing():
    """A fit after it is, bit for bit, a fit without it: weights, statistics, random numbers, the recipe's memory."""
    plain, diagnosed = (brain_of(network(), precision="bf16") for _ in range(2))
    torch.manual_seed(3)
    plain.fit(range(1, 3), data())
    torch.manual_seed(3)
    python = random.getstate()
    found = diagnosed.diagnose(data(), steps=4)
    assert found.answers, found.verdict
    assert not hasattr(diagnosed, "seen") and random.getstate() == python
    diagnosed.fit(range(1, 3), data())
    for (name, expected), given in zip(
        plain.modules.state_dict().items(), diagnosed.modules.state_dict().values(), strict=True
    ):
        assert torch.equal(expected, given), name
    assert plain.seen == diagnosed.seen and plain.optimizer_step == diagnosed.optimizer_step
    assert plain.avg_train_loss == diagnosed.avg_train_loss


def test_a_diagnosis_after_training_looks_at_the_trained_weights_and_leaves_them():
    brain = brain_of(network(), precision="bf16")
    brain.fit(range(1, 2), data())
    before, optimizers = state_of(brain)
    found = brain.diagnose(data(), steps=2)
    after, optimizers_after = state_of(brain)
    assert "trained in this process" in found.weights
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert str(optimizers) == str(optimizers_after)


def test_the_overflowing_module_is_named_and_its_pin_is_proven(tmp_path, undrawn):
    brain = brain_of(network(1e6), precision="fp16", output_folder=str(tmp_path / "run"))
    found = brain.diagnose(data(), steps=10)
    assert "model.3" in found.verdict and "fp32_modules" in found.verdict
    fp16 = found.answers[-1]
    assert fp16.name == "fp16" and fp16.pins.modules and fp16.pins.verified, found.verdict
    assert "model.3" in fp16.pins.modules, fp16.pins.modules
    written = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    for key in ("census", "casts", "drift", "pins", "underflow", "hazards", "verdict", "versions"):
        assert key in written
    for row, keys in (
        (written["census"][0], {"module", "phase", "op", "inputs", "outputs", "calls"}),
        (written["casts"][0], {"module", "phase", "by", "from", "to", "calls", "bytes"}),
        (written["drift"][0], {"module", "local_error", "sensitivity", "gradient_error", "above_max", "below_normal"}),
        (
            written["pins"],
            {"modules", "tolerance", "error", "held_out_error", "steps", "cost_time", "cost_memory", "verified"},
        ),
        (written["underflow"], {"scales", "flushed", "window_octaves", "init_scale"}),
    ):
        assert keys <= row.keys()
    again = brain_of(
        network(1e6), precision="fp16", fp32_modules=fp16.pins.modules, output_folder=str(tmp_path / "pinned")
    )
    again.fit(range(1, 2), data())
    assert again.optimizer_step > 0 and math.isfinite(again.avg_train_loss)


def test_with_diagnose_fit_ends_the_script_untrained_with_the_status_of_the_verdict(tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    options = RunOptions.from_mapping(
        {"device": DEVICE, "precision": "bf16", "output_folder": str(tmp_path / "run"), "noprogressbar": True},
        purpose=Purpose("diagnose", settings={"minutes": math.inf, "tolerance": 0.5}),
    )
    brain = Quick({"model": network()}, OPT, run_opts=options)
    before, _ = state_of(brain)
    with pytest.raises(SystemExit) as ended:
        brain.fit(range(1, 3), data())
    found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert ended.value.code == found["status"] and found["pins"]["tolerance"] == 0.5
    brain.fit(range(1, 3), data())  # of a script that goes on all the same
    assert capsys.readouterr().out.count("The weights tested") == 1 and "part 1 of 9: reference" in caplog.text
    assert math.isnan(brain.evaluate(iter(())))
    assert all(torch.equal(before[name], value) for name, value in brain.modules.state_dict().items())
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"diagnosis.json", "diagnosis.png"}
    assert not (tmp_path / "run" / "metrics.jsonl").exists() and not (tmp_path / "run" / "save").exists()


def test_a_diagnosis_needs_batches_and_a_low_precision():
    brain = brain_of(network(), precision="bf16")
    with pytest.raises(DataError, match="at least 3 windows"):
        brain.diagnose(data(2))
    with pytest.raises(PrecisionError, match="fp32"):
        brain.diagnose(data(), precisions=["fp32"])


def test_diagnose_inside_fit_is_refused():
    class Eager(Classifier):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.diagnose(data())

    with pytest.raises(RecipeError, match="inside fit"):
        brain_of(network(), Eager, precision="bf16").fit(range(1, 2), data())


def test_the_diagnosis_of_a_run_looks_at_its_newest_checkpoint_and_leaves_the_folder_alone(tmp_path, undrawn):
    folder = tmp_path / "run"
    brain_of(network(), precision="bf16", output_folder=str(folder)).fit(range(1, 3), data())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "log.txt"}
    settings = {"device": DEVICE, "precision": "bf16", "output_folder": str(folder), "noprogressbar": True}
    for resume, weights in (("auto", "from the checkpoint CKPT+000002"), ("never", "as initialised")):
        options = RunOptions.from_mapping({**settings, "resume": resume}, purpose=Purpose("diagnose"))
        brain = Classifier({"model": network()}, OPT, run_opts=options)
        assert brain.diagnose(data(), steps=2).weights == weights
    assert all(path.read_bytes() == content for path, content in before.items())


# ---------------------------------------------------------------------- where a NaN was born


def test_the_error_names_the_module_and_the_cause(tmp_path):
    brain = brain_of(network(1e6), precision="fp16", output_folder=str(tmp_path / "run"))
    with pytest.raises(NonfiniteError, match=r"model\.3"):
        brain.fit(range(1, 50), data())
    reports = sorted((tmp_path / "run").glob("nonfinite-*.json"))
    assert len(reports) == 1  # what is the same again is told in a line
    report = json.loads(reports[0].read_text())
    assert {"step", "module", "op", "phase", "dtype", "cause", "samples", "range", "message"} <= report.keys()
    assert report["cause"] == "precision" and report["module"].startswith("model.3") and report["phase"] == "forward"


def test_a_fault_of_every_sample_is_reported_once_whatever_the_dataset_calls_them(tmp_path):
    brain = brain_of(network(1e6), precision="fp16", output_folder=str(tmp_path / "run"))
    samples = [(x, y) for batch, labels in data() for x, y in zip(batch, labels, strict=True)]
    with pytest.raises(NonfiniteError, match=r"model\.3"):
        brain.fit(range(1, 50), samples, train_loader_kwargs={"batch_size": 16, "shuffle": True})
    (report,) = (tmp_path / "run").glob("nonfinite-*.json")
    assert len(json.loads(report.read_text())["dataset_indices"]) == 16


def test_the_samples_that_brought_a_nan_are_named(tmp_path):
    batches = data()
    batches[2][0][5, 3] = math.nan
    brain = brain_of(network(), precision="bf16", output_folder=str(tmp_path / "run"))
    brain.fit(range(1, 2), batches)  # one bad batch is skipped, and training goes on
    (path,) = (tmp_path / "run").glob("nonfinite-*.json")
    report = json.loads(path.read_text())
    assert report["cause"] == "data" and report["samples"] == [5]


def test_a_bad_weight_is_told_apart_by_when_it_came():
    model = network()
    model[0].weight.data[1, 2] = math.nan
    brain = brain_of(model)
    said = r"1 of its 128 values are not finite.*before the first update of this fit"
    with pytest.raises(NonfiniteError, match=said):
        brain.fit(range(1), data())

    class Adds(Classifier):
        def compute_forward(self, batch, stage):  # without an eps, Adam's first update of a zero gradient is 0 / 0
            return super().compute_forward(batch, stage) + 0 * self.modules.unused(batch[0])

    without_eps = lambda parameters: torch.optim.Adam(parameters, eps=0.0)  # noqa: E731
    modules = {"model": network(), "unused": nn.Linear(8, 4)}
    brain = Adds(modules, without_eps, run_opts={"device": DEVICE, "noprogressbar": True})
    with pytest.raises(NonfiniteError, match=r"parameter .* contains NaN .*The 1 update\(s\) before in this fit"):
        brain.fit(range(1), data())


def test_a_bad_weight_after_a_resume_was_not_there_before_the_first_update(tmp_path):
    class Writes(Classifier):
        """Dies at its third batch; a second process writes a NaN before it."""

        has_written = False

        def on_fit_batch_start(self, batch, should_step):
            if self.optimizer_step == 2 and not self.has_written:  # once: not in a replay
                if not writes:
                    raise KeyboardInterrupt
                self.has_written = True
                with torch.no_grad():
                    next(self.modules.parameters())[0, 0] = math.nan

    def run():
        brain = brain_of(network(), Writes, output_folder=str(tmp_path), ckpt_interval_steps=1, nonfinite_patience=1)
        brain.fit(range(1, 3), data())

    writes = False
    with pytest.raises(KeyboardInterrupt):
        run()
    writes = True
    with pytest.raises(NonfiniteError, match=r"The 2 update\(s\) before in this fit were finite"):
        run()


def test_a_learning_rate_that_is_too_high_is_told_by_the_loss_before():
    class Fourth(Classifier):
        def compute_objectives(self, predictions, batch, stage):
            return predictions.float().pow(4).mean()

    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    torch.manual_seed(0)
    brain = brain_of(nn.Linear(8, 4), Fourth, sgd, max_grad_norm=0.0)
    with pytest.raises(NonfiniteError, match=r"The loss grew from .*: training diverges\. Lower the learning"):
        brain.fit(range(1), [(3 * batch[0], batch[1]) for batch in data(16)])


def test_a_located_step_changes_nothing_about_the_run():
    batches = data()
    batches[2][0][5, 3] = math.nan
    results = []
    for locate in (True, False):
        torch.manual_seed(5)
        brain = brain_of(network(), precision="bf16", locate_nonfinite=locate)
        brain.fit(range(1, 4), batches)
        results.append((brain.modules.state_dict(), brain.seen, brain.skipped_steps, brain.avg_train_loss))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0].values(), results[1][0].values(), strict=True))
    assert results[0][1:] == results[1][1:] and results[0][2] == 3


def test_ordinary_back_off_triggers_nothing(tmp_path, caplog):
    """A scale that is too high overflows the gradients, and falls: that is how fp16 finds its scale."""
    caplog.set_level(logging.INFO)
    brain = brain_of(
        network(), precision="fp16", init_scale=2.0**40, output_folder=str(tmp_path / "run"), nonfinite_patience=1
    )
    brain.fit(range(1, 6), data())
    assert brain.skipped_steps > 3 and brain.optimizer_step > 3
    assert not list((tmp_path / "run").glob("nonfinite-*"))


def test_off_nothing_is_kept_for_it():
    brain = brain_of(network(), precision="bf16", locate_nonfinite=False)
    assert run_of(brain).fit.replays.before_step([1]) is None


def test_no_more_than_three_steps_and_the_last_are_taken_again(tmp_path):
    batches = data()
    for index, batch in enumerate(batches):
        batch[0][index, 0] = math.nan
    brain = brain_of(network(), precision="bf16", output_folder=str(tmp_path / "run"), nonfinite_patience=6)
    with pytest.raises(NonfiniteError, match="sample"):
        brain.fit(range(1, 2), batches)
    assert len(list((tmp_path / "run").glob("nonfinite-*.json"))) == 4


def test_a_replay_that_fails_does_not_hide_the_nonfinite_step(monkeypatch, caplog):
    def broken(*_, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(numerics, "locate", broken)
    with pytest.raises(NonfiniteError, match="What to try"):
        brain_of(network(1e6), precision="fp16").fit(range(1, 50), data())
    assert "could not repeat the step" in caplog.text and "out of memory" in caplog.text


def test_a_nonfinite_step_is_replayed_from_its_folder(tmp_path, capsys):
    batches = data()
    batches[2][0][5, 3] = math.nan
    brain_of(network(), precision="bf16", output_folder=str(tmp_path / "run")).fit(range(1, 2), batches)
    (folder,) = (path for path in (tmp_path / "run").glob("nonfinite-*") if path.is_dir())
    told = json.loads(folder.with_suffix(".json").read_text())["message"]
    options = {"device": DEVICE, "precision": "bf16", "noprogressbar": True}
    options = RunOptions.from_mapping(options, purpose=Purpose("replay", folder))
    capsys.readouterr()
    Classifier({"model": network()}, OPT, run_opts=options).fit(range(1, 2), data())
    assert capsys.readouterr().out.startswith(told)


def test_accumulation_names_the_batch_of_the_window(tmp_path):
    batches = data()
    batches[2][0][5, 3] = math.nan
    brain = brain_of(network(), precision="bf16", grad_accumulation_factor=4, output_folder=str(tmp_path / "run"))
    brain.fit(range(1, 2), batches)
    (path,) = (tmp_path / "run").glob("nonfinite-*.json")
    report = json.loads(path.read_text())
    assert report["cause"] == "data" and report["samples"] == [[2, 5]]


class TwoSteps(Classifier):
    """A recipe with a `fit_batch` of its own and two optimizers."""

    def init_optimizers(self):
        first, second = self.modules.model[0], self.modules.model[-1]
        self.optimizers_dict = {
            "first": torch.optim.SGD(first.parameters(), 0.1),
            "second": torch.optim.SGD(second.parameters(), 0.1),
        }

    def fit_batch(self, batch):
        self.zero_grad()
        for name in ("first", "second"):
            with self.training_ctx:
                loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
            self.backward(loss)
            self.optimizers_step(name)
        return loss.detach()


def test_a_recipe_with_its_own_step_and_two_optimizers_is_diagnosed_and_located(tmp_path, undrawn):
    brain = brain_of(
        network(), TwoSteps, opt=None, nonfinite_patience=5, precision="bf16", output_folder=str(tmp_path / "run")
    )
    assert brain.diagnose(data(), steps=3).answers
    batches = data()
    batches[1][0][7, 0] = math.inf
    brain.fit(range(1, 2), batches)
    report = json.loads(next((tmp_path / "run").glob("nonfinite-*.json")).read_text())
    assert report["cause"] == "data" and report["samples"] == [7]


# ---------------------------------------------------------------------- from the command line


SCRIPT = """
import math, torch
from torch import nn
from amp_recipes import Brain, EpochCounter, load_hparams, parse_arguments

class Tiny(Brain):
    def diagnose(self, *args, **settings):
        return super().diagnose(*args, **{"steps": 2, "windows": 4, **settings})
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])
    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions.float(), batch[1])

hparams_file, run_opts, overrides = parse_arguments()
hparams = load_hparams(hparams_file, overrides)
generator = torch.Generator().manual_seed(0)
x, y = torch.randn(96, 8, generator=generator), torch.randint(0, 4, (96,), generator=generator)
if hparams["spoil"]:
    hparams["spoil"] + 1
    x[40, 2] = math.nan
data = torch.utils.data.TensorDataset(x, y)
brain = Tiny({"model": hparams["model"]}, hparams["opt_class"], hparams, run_opts)
brain.fit(EpochCounter(1), data, train_loader_kwargs={"batch_size": 16})
print("loss", brain.evaluate(data, test_loader_kwargs={"batch_size": 48}))
"""
YAML = """
precision: bf16
seed: 1
spoil: False
output_folder: run
model: !new:torch.nn.Linear
  in_features: 8
  out_features: 4
opt_class: !name:torch.optim.SGD
  lr: 0.1
"""


def test_a_diagnosis_takes_different_batches():
    brain = brain_of(network(), precision="bf16")
    with examination._examination(run_of(brain)):
        chosen = examination._first_windows(run_of(brain), data(), {}, 5)
    assert len(chosen) == 5
    assert all(torch.equal(window[0][0], batch[0]) for window, batch in zip(chosen, data(), strict=False))


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "tiny.yaml").write_text(YAML)
    return tmp_path


def run(folder, *words):
    return run_python(*words, cwd=folder, env={"HOME": str(folder)})


@pytest.mark.extended
def test_diagnose_on_the_command_line(recipe):
    done = run(recipe, "train.py", "tiny.yaml", "--diagnose", "--noprogressbar")
    found = json.loads((recipe / "run" / "diagnosis.json").read_text())
    assert done.returncode == found["status"], done.stderr
    assert done.stdout.startswith(found["headlines"][0]) and "loss nan" not in done.stdout
    assert {path.name for path in (recipe / "run").iterdir()} >= {"diagnosis.json"}
    assert not (recipe / "run" / "hyperparams.yaml").exists()
    words = ["diagnose", "train.py", "tiny.yaml", "--tolerance", "1e-9", "--minutes=inf", "--noprogressbar"]
    command = run(recipe, "-m", "amp_recipes.commands.cli", *words)
    assert command.returncode == 1 and "NOT SAFE in bf16" in command.stdout, command.stderr
    assert "diagnosis, part 1 of 9: reference" in command.stderr


@pytest.mark.extended
@pytest.mark.parametrize("words", [["--lr=x", "--modell=3"], ["--spoil=oops"], ["--diagnose-windows=2"]], ids=str)
def test_a_diagnosis_that_ends_with_an_error_is_not_decided(recipe, words):
    done = run(recipe, "train.py", "tiny.yaml", "--diagnose", "--noprogressbar", *words)
    assert done.returncode == 2 and done.stderr and not done.stdout, done.stdout


@pytest.mark.extended
def test_a_nonfinite_step_is_shown_again_from_its_folder(recipe):
    done = run(recipe, "train.py", "tiny.yaml", "--spoil=True", "--noprogressbar")
    assert done.returncode == 0, done.stderr
    folder, of_test = sorted(path for path in (recipe / "run").glob("nonfinite-*") if path.is_dir())
    shown = run(recipe, "-m", "amp_recipes.commands.cli", "replay", str(of_test))
    assert of_test.name == "nonfinite-6-test-1" and "The same as in step 6" in shown.stdout, shown.stderr
    told = json.loads((recipe / "run" / f"{folder.name}.json").read_text())
    assert told["samples"] == [8] and told["cause"] == "data"
    shown = run(recipe, "-m", "amp_recipes.commands.cli", "replay", str(folder))
    assert shown.returncode == 0, shown.stderr
    assert told["message"].split(":")[0] in shown.stdout
    with (recipe / "train.py").open("a") as script:
        script.write("print('changed')\n")
    refused = run(recipe, "-m", "amp_recipes.commands.cli", "replay", str(folder))
    assert refused.returncode == 1 and "train.py: it is not the file with which the run was started" in refused.stderr
    assert "--trust=train.py" in refused.stderr and not refused.stdout
    shown = run(recipe, "-m", "amp_recipes.commands.cli", "replay", str(folder), "--trust=train.py")
    assert told["message"].split(":")[0] in shown.stdout and "train.py has changed since" in shown.stdout


def test_a_folder_that_is_no_report_is_refused(recipe):
    (recipe / "empty").mkdir()
    done = run(recipe, "-m", "amp_recipes.commands.cli", "replay", "empty")
    assert done.returncode == 1 and "empty" in done.stderr and "Traceback" not in done.stderr


def test_words_that_cannot_be_together(recipe):
    done = run(recipe, "train.py", "tiny.yaml", "--diagnose", "--check")
    assert done.returncode != 0 and "cannot be combined" in done.stderr


# ---------------------------------------------------------------------- what a recipe may hold


class Meter:
    """An object of the recipe's own, without a state_dict."""

    def __init__(self):
        self.count, self.history = 0, []


class Holding(Quick):
    """Holds what recipes hold, and moves all of it in each step."""

    def on_fit_start(self):
        super().on_fit_start()
        if not hasattr(self, "meter"):
            self.meter = Meter()
            self.meters = {"inner": [Meter()]}
            torch.manual_seed(11)
            self.teacher = nn.Linear(256, 256)
            self.noise = torch.Generator().manual_seed(1)
            self.draws = {"numpy": np.random.default_rng(2), "python": random.Random(3)}
            self.bank, self.cursor = torch.zeros(4, 8), 0
            with torch.no_grad():
                self.modules.model[0].weight.mul_(0.5)

    def on_stage_start(self, stage, epoch=None):
        self.modules.model[0].bias.requires_grad_(epoch != 1)

    def compute_forward(self, batch, stage):
        batch[0].mul_(1.0 + 0.01 * torch.rand((), generator=self.noise))
        self.meter.count += 1
        self.meters["inner"][0].history.append(self.draws["numpy"].random() + self.draws["python"].random())
        self.bank[self.cursor % 4] = batch[0][0].detach()
        self.cursor += 1
        return self.modules.model(batch[0])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        with torch.no_grad():
            self.teacher.weight.lerp_(torch.ones(256, 256), 0.1)
        self.modules.model[3].factor = 1.0 + 1e-3 * self.meter.count
        if self.checkpointer is not None and not run_of(self).in_fit:
            self.checkpointer.save_checkpoint()

    def remembers(self):
        return (
            [value.clone() for value in (*self.modules.state_dict().values(), *self.teacher.state_dict().values())],
            (self.meter.count, self.meters["inner"][0].history, self.cursor, self.bank.tolist()),
            (self.noise.get_state().tolist(), self.draws["numpy"].random(), self.draws["python"].random()),
            [parameter.requires_grad for parameter in self.modules.parameters()],
        )


def same(first, second):
    tensors, *others = zip(first, second, strict=True)
    return all(torch.equal(a, b) for a, b in zip(*tensors, strict=True)) and all(a == b for a, b in others)


def test_whatever_a_recipe_holds_is_after_a_diagnosis_as_before(tmp_path, undrawn):
    results = []
    for diagnosed in (False, True):
        torch.manual_seed(5)
        brain = brain_of(network(), Holding, precision="bf16", output_folder=str(tmp_path / f"run{diagnosed}"))
        if diagnosed:
            brain.diagnose(data())
            assert not list((tmp_path / "runTrue").glob("save/CKPT*"))
        brain.fit(range(1, 3), data())
        if diagnosed:  # and in the midst of a training
            before = brain.remembers()
            state = [
                brain.noise.get_state(),
                brain.draws["numpy"].bit_generator.state,
                brain.draws["python"].getstate(),
            ]
            brain.diagnose(data(), steps=2)
            again = [
                brain.noise.get_state(),
                brain.draws["numpy"].bit_generator.state,
                brain.draws["python"].getstate(),
            ]
            assert str(state) == str(again) and before[1] == brain.remembers()[1]
            continue
        results.append(brain.remembers())
    torch.manual_seed(5)
    brain = brain_of(network(), Holding, precision="bf16")
    brain.diagnose(data(), steps=2)
    brain.fit(range(1, 3), data())
    assert same(results[0], brain.remembers())


def test_whatever_a_recipe_holds_is_after_a_located_step_as_without():
    results = []
    for locate in (True, False):
        torch.manual_seed(5)
        batches = data()
        batches[2][0][5, 3] = math.nan
        brain = brain_of(network(), Holding, precision="bf16", locate_nonfinite=locate)
        brain.fit(range(1, 3), batches)
        results.append(brain.remembers())
    assert same(*results)


def test_a_fault_that_depends_on_the_step_and_on_the_recipes_generator_is_located(tmp_path):
    class AtStep(Classifier):
        def on_fit_start(self):
            super().on_fit_start()
            self.noise = torch.Generator().manual_seed(0)

        def compute_forward(self, batch, stage):
            noise = torch.rand((), generator=self.noise)
            scores = super().compute_forward(batch, stage)
            return scores + (noise * math.inf if self.step == 3 else 0.0)

    brain = brain_of(network(), AtStep, precision="bf16", output_folder=str(tmp_path / "run"))
    brain.fit(range(1, 2), data())
    report = json.loads(next((tmp_path / "run").glob("nonfinite-*.json")).read_text())
    assert report["cause"] != "not replayable" and report["module"] == "<recipe>", report["message"]


class Penalised(Classifier):
    """A penalty on the gradient: its loss is nonfinite where the scaled gradient is."""

    def compute_objectives(self, predictions, batch, stage):
        loss = F.cross_entropy(predictions.float(), batch[1])
        (gradient,) = self.gradients(loss, [self.modules.model[0].weight])
        return loss + gradient.square().mean()


def test_a_loss_made_of_gradients_that_overflow_at_the_scale_is_benign(caplog):
    brain = brain_of(network(), Penalised, precision="fp16", init_scale=2.0**40, nonfinite_patience=100)
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data(2))
    found = [
        record.getMessage()
        for record in caplog.records
        if "born" in record.getMessage() or "Cause" in record.getMessage()
    ]
    assert found and all("the scale" in message and "fp32_modules" not in message for message in found)
