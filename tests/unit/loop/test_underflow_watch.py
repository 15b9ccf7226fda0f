"""A training in fp16 measures now and then which gradients become zero, and warns; all else stays as it is."""

import copy
import json
import logging
import random

import pytest
import torch
from hosts import with_hosts
from inside import run_of
from torch import nn
from torch.nn import functional as F

from amp_recipes import Brain
from amp_recipes.loop.underflow import next_check


class Regression(Brain):
    """Counts its batches, and draws random numbers, as recipes do. weight: of the loss."""

    weight = 1.0

    def compute_forward(self, batch, stage):
        self.seen = getattr(self, "seen", 0) + 1
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions.float(), batch[1]) * self.weight


class Faint(Regression):
    """Its gradients are around 1e-7: at loss scale 1, fp16 makes most of them zero."""

    weight = 1e-6


class ByHand(Faint):
    """Has a fit_batch of its own."""

    def fit_batch(self, batch):
        with self.training_ctx:
            loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))


def data(batches=24):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(batches)]


def brain_of(kind=Faint, rate=1e-2, dropout=0.0, **options):
    options = {"device": "cpu", "noprogressbar": True, "precision": "fp16", "init_scale": 1.0, **options}
    return kind({"model": network(dropout)}, lambda weights: torch.optim.AdamW(weights, lr=rate), run_opts=options)


def warnings_of(caplog):
    return [record.message for record in caplog.records if "gradients" in record.message and "fp16" in record.message]


def zero_elements(brain, batch, scale):
    """By parameter: elements of the gradient that are not zero in fp32, and those of them that are zero in fp16."""
    gradients = {}
    for dtype in (torch.float32, torch.float16):
        model = copy.deepcopy(brain.modules).train()
        with torch.autocast("cpu", dtype, enabled=dtype is torch.float16):
            loss = F.mse_loss(model.model(batch[0]).float(), batch[1]) * brain.weight
        (loss * scale).backward()
        gradients[dtype] = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients[torch.float32].values())
    counted, lost = {}, {}
    for name, gradient in gradients[torch.float32].items():
        matters = gradient.abs() >= largest * 2.0**-24
        counted[name] = int(matters.sum())
        lost[name] = int((matters & (gradients[torch.float16][name] == 0)).sum())
    return counted, lost


@with_hosts(kind=[Faint, ByHand])
@pytest.mark.usefixtures("host")
def test_lost_gradients_are_warned_of_with_the_figures_that_a_count_by_hand_has(kind, caplog, tmp_path, capsys):
    brain = brain_of(kind, output_folder=str(tmp_path), optimizer_step_limit=20)
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data())
    counted, lost = zero_elements(brain, data()[19], 1.0)  # 20 updates are done: the weights are those of the check
    share = sum(lost.values()) / sum(counted.values())
    assert share > 0.5
    (message,) = warnings_of(caplog)
    assert f"{100 * share:.2g} %" in message and "--init_scale" in message and "bf16" in message
    found = json.loads((tmp_path / "summary.json").read_text())["underflow"]
    assert found["share"] == pytest.approx(share) and found["optimizer_step"] == 20 and found["scale"] == 1.0
    assert f"{100 * share:.2f}%" in capsys.readouterr().err
    worst = found["parameter"]
    shares = {name: lost[name] / counted[name] for name in counted if counted[name]}
    assert found["parameter_share"] == pytest.approx(shares[worst]) == max(shares.values())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = {each["optimizer_step"]: each["underflow"] for each in records if "underflow" in each}
    assert measured == {20: pytest.approx(share)}


def test_the_scale_that_the_warning_names_loses_nothing(caplog):
    brain = brain_of(optimizer_step_limit=20)
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data())
    (message,) = warnings_of(caplog)
    scale = float(message.split("--init_scale ")[1].split()[0].rstrip(".,:"))
    _, lost = zero_elements(brain, data()[19], scale)
    assert sum(lost.values()) <= 0.01 * sum(parameter.numel() for parameter in brain.modules.parameters())


class Spread(Brain):
    """One layer's gradients are small from place to place, but large inside, where a larger loss scale overflows."""

    def compute_forward(self, batch, stage):
        return self.modules.loud(batch[0] * 1e-6), self.modules.faint(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        loud, faint = predictions
        return 2e4 * loud.float().sum() + 1.5e-8 * faint.float().sum()


def test_where_no_larger_scale_helps_the_warning_names_other_cures(caplog):
    modules = {name: nn.Linear(8, 4, bias=False) for name in ("loud", "faint")}
    options = {"device": "cpu", "noprogressbar": True, "precision": "fp16", "init_scale": 1.0}
    brain = Spread(modules, lambda weights: torch.optim.SGD(weights, lr=1e-9), run_opts=options)
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data())
    (message,) = warnings_of(caplog)
    assert "--init_scale" not in message and "--precision bf16" in message and "fp32_modules" in message
    assert "most in faint.weight: 100 %" in message and brain.skipped_steps == 0


def test_a_scale_that_the_run_began_with_is_no_cure(caplog):
    """It has overflowed, and the loss scale went down from there."""

    class Overflows(Faint):
        def compute_objectives(self, predictions, batch, stage):
            return super().compute_objectives(predictions, batch, stage) * (1e20 if self.step <= 16 else 1.0)

    brain = brain_of(Overflows, init_scale=65536.0, locate_nonfinite=False)  # else it ends: no scale fits those
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data(40))
    (message,) = warnings_of(caplog)
    assert brain.skipped_steps == 16 and "loss scale 1," in message and "--init_scale" not in message


@pytest.mark.parametrize(("kind", "options"), [(Regression, {"init_scale": 65536.0}), (Faint, {"precision": "bf16"})])
def test_a_healthy_run_is_not_warned(kind, options, caplog):
    brain = brain_of(kind, **options)
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data())
    assert not warnings_of(caplog)
    found = brain.summary.underflow
    assert found is None if options.get("precision") else found["share"] < 0.01


def test_switched_off_it_measures_nothing(caplog):
    brain = brain_of(measure_underflow=False)
    with caplog.at_level(logging.WARNING):
        brain.fit(range(1), data())
    assert not warnings_of(caplog) and brain.summary.underflow is None and brain.seen == 24


def test_it_needs_no_search_for_nonfinite_values():
    brain = brain_of(locate_nonfinite=False)
    brain.fit(range(1), data())
    assert brain.summary.underflow["optimizer_step"] == 20


class Moving(Regression):
    """Changes in its forward what no optimizer does: a weight (by `.data`), and a generator of Python's."""

    def compute_forward(self, batch, stage):
        random.random()
        self.modules.model[1].bias.data = self.modules.model[1].bias.data * 0.99
        return super().compute_forward(batch, stage)


@pytest.mark.parametrize("kind", [Faint, Moving, ByHand])
def test_training_is_the_same_bit_for_bit(kind):
    results = []
    for measured in (True, False):
        random.seed(0)
        brain = brain_of(kind, dropout=0.1, measure_underflow=measured, max_grad_norm=1.0)
        torch.manual_seed(1)
        brain.fit(range(1), data())
        state = {name: value.clone() for name, value in brain.modules.state_dict().items()}
        moments = str(brain.optimizer.state_dict())
        results.append((state, moments, torch.get_rng_state(), random.getstate(), brain.seen, brain.avg_train_loss))
        assert (brain.summary.underflow is not None) is measured
    (state, *rest), (expected, *others) = results
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(rest.pop(1), others.pop(1)) and rest == others


class Killed(Exception):
    pass


class Dies(Faint):
    """Dies before an update, as a killed process does."""

    dies_at = None

    def on_fit_batch_start(self, batch, should_step):
        if self.step == self.dies_at:
            raise Killed


@pytest.mark.parametrize("dies_at", [15, 22])
def test_a_run_that_is_killed_and_resumed_has_measured_the_same(dies_at, tmp_path, caplog):
    """Killed before the check, from whose checkpoint it is made again, and after it, when it is not made twice."""
    summaries = []
    for folder, deaths in ((tmp_path / "a", (None,)), (tmp_path / "b", (dies_at, None))):
        for death in deaths:
            with caplog.at_level(logging.WARNING):
                brain = brain_of(
                    Dies, dropout=0.1, seed=1, output_folder=str(folder), ckpt_interval_steps=7, ckpt_background=False
                )
                brain.dies_at = death
                try:
                    brain.fit(range(1), data())
                except Killed:
                    continue
        summaries.append((brain.summary.underflow, run_of(brain).underflow.state_dict()))
    assert summaries[0] == summaries[1] and summaries[0][0]["optimizer_step"] == 20
    assert len(warnings_of(caplog)) == 2  # one of each run


def test_a_model_that_cannot_be_repeated_is_left_alone(caplog):
    class Once(Regression):
        def compute_forward(self, batch, stage):
            if getattr(self, "seen", 0) == 20:
                raise RuntimeError("only once")
            return super().compute_forward(batch, stage)

    brain = brain_of(Once, optimizer_step_limit=20)
    with caplog.at_level(logging.INFO):
        brain.fit(range(1), data())
    assert brain.optimizer_step == 20 and brain.summary.underflow is None
    assert any("only once" in record.message for record in caplog.records)


def test_checks_become_rare():
    """Two steps each: under half a percent of the updates from the 400th on."""
    due, checks = next_check(0), []
    while due < 10**7:
        checks.append(due)
        due = next_check(due)
    assert checks[:4] == [20, 1000, 2000, 4000]
    assert all(2 * (count + 1) / update <= 0.005 for count, update in enumerate(checks) if update >= 400)
    assert all(next_check(update - 1) == update for update in checks)
