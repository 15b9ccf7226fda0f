"""In fp16, a fault with a finite loss is not taken for a loss scale that is too high."""

import json
import logging
import math
import random

import numpy as np
import pytest
import torch
from device import DEVICE
from end_of_run import everything
from hosts import HOSTS
from inside import run_of
from pairwise import each_once
from torch import nn
from torch.nn import functional as F

from amp_recipes import Brain, EpochCounter
from amp_recipes.errors import NonfiniteError
from amp_recipes.precision.loss_scaler import LossScaler

SAMPLES, BATCH, BAD = 12, 4, 7
EPOCHS = 6


class Padded(Brain):
    """Sums the positions inside the length of each sample; a mask after the layer leaves out the others."""

    def compute_forward(self, batch, stage):
        features, lengths, _ = batch
        inside = torch.arange(features.shape[1]) < lengths[:, None]
        return self.modules.model(features).squeeze(-1).float().where(inside, 0.0).sum(1)

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions, batch[2])


class Distances(Brain):
    """Learns a distance between two things; its slope at 0 is infinite."""

    def compute_forward(self, batch, stage):
        one, other, _ = batch
        return (self.modules.model(one) - self.modules.model(other)).float().square().sum(1).sqrt()

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions, batch[2])


def padded(bad=True):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, 5, 3, generator=generator) / 16
    if bad:
        features[BAD, 3:] = math.nan
    lengths = torch.full((SAMPLES,), 3)
    return [*zip(features, lengths, features[:, :3].sum((1, 2)), strict=True)]


def pairs():
    """One of them is of a thing and itself."""
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, SAMPLES, 3, generator=generator) / 16
    other[BAD] = one[BAD]
    return [*zip(one, other, (one - other).norm(dim=1), strict=True)]


FAULTS = {"padding": (Padded, padded, "data"), "duplicate": (Distances, pairs, "model")}


def brain_of(kind, folder=None, **options):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    return kind(
        {"model": nn.Linear(3, 1, bias=False)},
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        run_opts={
            "device": DEVICE,
            "noprogressbar": True,
            "precision": "fp16",
            "init_scale": 65536.0,
            "max_grad_norm": 0.0,
            "seed": 1,
            "ckpt_background": False,
            "output_folder": None if folder is None else str(folder),
            **options,
        },
    )


def fit(brain, samples, epochs=EPOCHS, **options):
    brain.fit(EpochCounter(epochs), samples, train_loader_kwargs={"batch_size": BATCH, "shuffle": True, **options})
    return brain


def steps(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_each_epoch_is_reported_and_leaves_the_scale(tmp_path, fault):
    kind, samples, cause = FAULTS[fault]
    fit(brain_of(kind, tmp_path), samples())
    found = [json.loads(path.read_text()) for path in tmp_path.glob("nonfinite-*.json")]
    assert found and all(it["cause"] == cause and len(it["samples"]) == 1 for it in found), found
    records = steps(tmp_path)
    bad = [index for index, it in enumerate(records) if it["skipped"]]
    assert len(bad) == EPOCHS and len({records[index]["step"] for index in bad}) > 1  # shuffled
    # Only the update right after a fault has half the scale.
    expected = [65536.0, *(32768.0 if it["skipped"] else 65536.0 for it in records[:-1])]
    assert [it["scale"] for it in records] == expected
    told = summary(tmp_path)
    assert (told["skipped_steps"], told["backed_off_steps"]) == (EPOCHS, 0)


def test_the_samples_are_named_by_what_was_planted(tmp_path):
    brain = brain_of(Padded, tmp_path)
    brain.fit(range(1), padded(), train_loader_kwargs={"batch_size": BATCH})
    (path,) = tmp_path.glob("nonfinite-*.json")
    assert json.loads(path.read_text())["samples"] == [BAD % BATCH]


def test_faults_in_a_row_end_the_run_at_once(tmp_path):
    samples = [(features * math.nan, *rest) for features, *rest in padded()]
    with pytest.raises(NonfiniteError, match=r"3 updates in a row.*batch\[0\] contains NaN"):
        fit(brain_of(Padded, tmp_path), samples)
    # With a finite loss too, which the mask hides the NaN from.
    for features, length, _ in samples:
        features[:length] = 1.0
    with pytest.raises(NonfiniteError, match=r"3 updates in a row.*batch\[0\] contains NaN"):
        fit(brain_of(Padded, tmp_path / "finite"), samples)
    assert len(steps(tmp_path / "finite")) == 3


def test_a_scale_that_is_too_high_is_no_fault_and_costs_one_step_each(tmp_path, caplog):
    """Counts as before: the scale falls with each skipped update, and no report is made."""

    class Counting(Padded):
        forwards = 0

        def compute_forward(self, batch, stage):
            type(self).forwards += 1
            return super().compute_forward(batch, stage)

    forwards, scales = [], []
    for locate in (True, False):
        Counting.forwards = 0
        folder = tmp_path / str(locate)
        options = {"init_scale": 2.0**30, "growth_interval": 6, "locate_nonfinite": locate, "nonfinite_patience": 1}
        with caplog.at_level(logging.INFO):
            brain = fit(brain_of(Counting, folder, **options), padded(bad=False), persistent_workers=False)
        forwards.append(Counting.forwards)
        scales.append([(it["scale"], it["skipped"], it["loss"]) for it in steps(folder)])
        assert not list(folder.glob("nonfinite-*")) and "Cause" not in caplog.text
        told = summary(folder)
        assert told["skipped_steps"] == brain.skipped_steps > 3
        assert told.get("backed_off_steps") == (brain.skipped_steps if locate else None)
        assert brain.optimizer_step > 3
    assert scales[0] == scales[1]
    assert forwards[0] - forwards[1] == brain.skipped_steps


def test_without_a_replay_all_is_as_it_was(tmp_path):
    fit(brain_of(Padded, tmp_path, locate_nonfinite=False), padded())
    assert steps(tmp_path)[-1]["scale"] <= 65536.0 / 2 ** (EPOCHS - 1)
    assert "backed_off_steps" not in summary(tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_have_no_back_off_to_count(tmp_path, precision):
    fit(brain_of(Padded, tmp_path, precision=precision), padded(), epochs=1)
    assert summary(tmp_path)["skipped_steps"] == 1 and "backed_off_steps" not in summary(tmp_path)


def test_gradients_whose_norm_alone_overflows_are_a_fault(tmp_path):
    """The scaler sees finite gradients and would never lower the scale."""

    class Huge(Padded):
        def compute_objectives(self, predictions, batch, stage):
            return super().compute_objectives(predictions, batch, stage) * 1e23

    with pytest.raises(NonfiniteError, match="their norm is not"):
        fit(brain_of(Huge, tmp_path, init_scale=4.0, fp32_modules=["model"]), padded(bad=False))


class Died(Exception):
    pass


class Dying(Padded):
    """Dies before a batch that is trained on, counted over the run; steps on trial do not count."""

    dies_at = None
    batches_seen = 0

    def on_fit_batch_start(self, batch, should_step):
        run = run_of(self)
        if run.log is not run.idle_log:
            self.batches_seen += 1
            if self.batches_seen == self.dies_at:
                raise Died


def course(folder):
    """The last record of each update, as what a resumed run repeats is logged again."""
    return {(it["epoch"], it["step"]): (it["scale"], it["skipped"], it["loss"]) for it in steps(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    brain = fit(brain_of(Dying, folder), padded())
    return everything(brain), course(folder), summary(folder)["backed_off_steps"]


# Right after the first fault, one update later, and later yet.
@pytest.mark.parametrize(("after", "host"), each_once([1, 2, 3], HOSTS), indirect=["host"])
@pytest.mark.usefixtures("host")
def test_a_run_that_is_killed_after_a_fault_goes_on_bit_for_bit(tmp_path, whole, after):
    end, expected, backed_off = whole
    fault = next(index for index, (_, skipped, _) in enumerate(expected.values()) if skipped)
    brain = brain_of(Dying, tmp_path, ckpt_interval_steps=1)
    brain.dies_at = 1 + fault + after
    with pytest.raises(Died):
        fit(brain, padded())
    again = fit(brain_of(Dying, tmp_path, ckpt_interval_steps=1), padded())
    assert course(tmp_path) == expected
    assert {**everything(again), "best": None} == {**end, "best": None}
    assert summary(tmp_path)["backed_off_steps"] == backed_off


def test_a_fall_that_is_taken_back_waits_for_the_next_update():
    """Gradients under way carry the scale that is in force, so it stays for them."""
    scaler = LossScaler("cpu", init_scale=64.0, growth_interval=100)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def update(factor):
        before = scaler.get_scale()
        weight.grad = None
        scaler.scale(weight.sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.note_step(optimizer)
        scaler.update()
        return before

    assert update(math.nan) == 64.0
    scaler.put_back(64.0)
    saved = scaler.state_dict()
    assert [update(1.0), update(1.0), update(1.0)] == [32.0, 64.0, 64.0]
    scaler.load_state_dict(saved)
    assert [update(math.inf), update(math.inf), update(1.0)] == [32.0, 32.0, 16.0]  # its own falls stay
    scaler.put_back(8.0)  # what was in force is not exceeded
    assert [update(1.0), update(1.0)] == [16.0, 16.0]
    for scale in (16.0, 8.0, 8.0):  # faults in a row, as the second may come before the first is taken back
        assert update(math.nan) == scale
        scaler.put_back(scale)
    assert [update(1.0), update(1.0)] == [8.0, 16.0]
    assert "put_back_to" not in scaler.state_dict()
