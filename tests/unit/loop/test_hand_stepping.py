"""A recipe that steps its optimizer itself finds rates and averages as they are on a CPU, wherever it runs."""

import copy
import itertools
import json

import pytest
import torch
from classifiers import StepsByHand
from device import DEVICE
from inside import run_of
from torch import nn

from amp_recipes.precision.host_copy import HostCopy

BATCHES = 10


class ByHand(StepsByHand):
    """Notes what it finds before each step."""

    def before_step(self):
        run = run_of(self)
        averages = [average.tolist() for average in run.ema.state_dict().values()]
        self.found.append((self.optimizer.param_groups[0]["lr"], averages))
        self.waiting.append(len(run.pending))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)) for _ in range(BATCHES)
    ]


def trained(**options):
    torch.manual_seed(0)
    brain = ByHand(
        {"model": nn.Linear(8, 4)},
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)},
        {"device": DEVICE, "lr_scheduler_interval": "step", "ema_decay": 0.9, "noprogressbar": True, **options},
    )
    brain.found, brain.waiting = [], []
    brain.fit(range(1, 3), batches())
    return brain


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rates_and_averages_move_with_each_step(host, accumulate):
    brain = trained(grad_accumulation_factor=accumulate)
    windows = [index // accumulate for index in range(2 * BATCHES)]
    assert [rate for rate, _ in brain.found] == [0.5**window for window in windows]
    averages = [averages for _, averages in brain.found]
    moved = [before != after for before, after in itertools.pairwise(averages)]
    assert moved == [before != after for before, after in itertools.pairwise(windows)]
    assert brain.optimizer_step == 2 * BATCHES // accumulate


def test_what_is_found_and_logged_is_the_same_however_the_host_learns_of_losses(tmp_path, monkeypatch):
    at_once = trained(output_folder=str(tmp_path / "at_once"), log_interval_steps=1)
    monkeypatch.setattr(HostCopy, "immediate", False)
    queued = trained(output_folder=str(tmp_path / "queued"), log_interval_steps=1)
    assert queued.found == at_once.found and queued.avg_train_loss == at_once.avg_train_loss
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("at_once", "queued")]
    here, there = ([without_measures(line) for line in lines] for lines in logs)
    assert here == there and len(here) >= 2 * BATCHES


def without_measures(line):
    measures = ("time", "second", "memory")
    return {name: value for name, value in json.loads(line).items() if not any(each in name for each in measures)}


def test_the_log_has_the_rate_of_a_hand_step(tmp_path):
    trained(output_folder=str(tmp_path), log_interval_steps=1)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"]["optimizer"] for record in records if "lr" in record]
    assert rates == [0.5**step for step in range(2 * BATCHES)]


def test_windows_that_wait_stay_few_so_that_batches_are_let_go(host):
    assert max(trained().waiting) <= 2  # the one at hand, and the one before it


class ScaledByHand(StepsByHand):
    """Scales its losses itself, as recipes of the original Brain do at fp16; the scale overflows in the first steps."""

    def fit_batch(self, batch):
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
        self.own.scale(16 * loss).backward()
        self.own.step(self.optimizer)
        self.own.update()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("fused", [None, False, True])
def test_a_step_that_the_recipes_own_scaler_skips_does_not_count(host, fused):
    torch.manual_seed(0)
    brain = ScaledByHand(
        {"model": nn.Linear(8, 4)},
        lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=fused),
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)},
        {"device": DEVICE, "lr_scheduler_interval": "step", "noprogressbar": True},
    )
    brain.own, brain.rates = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**127, backoff_factor=2.0**-60), []
    brain.fit(range(1), batches())
    skipped = BATCHES - brain.optimizer_step
    assert 1 <= skipped < 4
    assert brain.rates == [1.0] * skipped + [0.5**step for step in range(BATCHES - skipped)]


class InTurns(StepsByHand):
    """Takes every second step itself, and leaves the others to the framework."""

    def fit_batch(self, batch):
        if self.step % 2:
            return super().fit_batch(batch)
        with self.training_ctx:
            loss = self.compute_objectives(self.compute_forward(batch, None), batch, None)
        self.backward(loss)
        self.optimizers_step()
        return loss.detach()


def test_a_hand_step_has_the_rate_that_follows_from_a_framework_step(host):
    torch.manual_seed(0)
    brain = InTurns(
        {"model": nn.Linear(8, 4)},
        lambda parameters: torch.optim.SGD(parameters, lr=1.0, fused=True),
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)},
        {"device": DEVICE, "lr_scheduler_interval": "step", "noprogressbar": True},
    )
    expected = copy.deepcopy(brain.modules.model)
    brain.fit(range(1), batches())
    for index, (x, labels) in enumerate(batches()):
        gradients = torch.autograd.grad(
            nn.functional.cross_entropy(expected(x.to(DEVICE)), labels.to(DEVICE)), list(expected.parameters())
        )
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter -= 0.5**index * gradient
    for found, by_hand in zip(brain.modules.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, by_hand)
