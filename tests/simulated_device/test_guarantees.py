"""What Brain promises holds on a device that queues its work: names of culprits, flat memory, the same rates."""

import logging
import os

import pytest
import simulated
import torch
from classifiers import Classifier, StepsByHand
from torch import nn

from amp_recipes import fwd_default_precision
from amp_recipes.checkpoint import Checkpointer, snapshot
from amp_recipes.precision.host_copy import HostCopy
from amp_recipes.state.randomness import random_state, set_random_state, set_torch_random_state, torch_random_state


class ByHand(StepsByHand):
    def before_step(self):
        self.rates.append(self.optimizer.param_groups[0]["lr"])


def make_batches(count=6, bad=None):
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(6, 8, generator=generator).pin_memory(),
            torch.randint(0, 4, (6,), generator=generator).pin_memory(),
        )
        for _ in range(count)
    ]
    if bad is not None:
        batches[bad][0][2, 5] = float("nan")
    return batches


def make_brain(device, kind=Classifier, hparams=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"device": device, "noprogressbar": True, **options}
    brain = kind({"model": model}, lambda parameters: torch.optim.SGD(parameters, lr=1.0), hparams, options)
    brain.rates = []
    return brain


def test_the_origin_of_a_nan_is_told_as_on_a_cpu(caplog):
    told = []
    for device in ("cpu", "simulated"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            make_brain(device, nonfinite_patience=9).fit(range(1), make_batches(bad=3))
        told.append([record.getMessage() for record in caplog.records if "contains NaN" in record.getMessage()])
    assert told[0] == told[1] and "the first op that reads it is aten::addmm in model.0" in told[1][0]


def halved(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_steps_by_hand_find_the_rates_and_averages_of_a_cpu():
    ends = []
    for device in ("cpu", "simulated"):
        brain = make_brain(device, ByHand, {"lr_scheduler": halved}, ema_decay=0.9, lr_scheduler_interval="step")
        brain.fit(range(1), make_batches(), make_batches(2))
        ends.append((brain.rates, [value.tolist() for value in brain.modules.state_dict().values()]))
    assert ends[0] == ends[1] and ends[1][0] == [0.5**step for step in range(6)]


@pytest.mark.extended
def test_steps_by_hand_take_no_more_memory_the_longer_they_go_on():
    class Watches(ByHand):
        def before_step(self):
            super().before_step()
            if self.step in (100, 10_000):
                self.seen.append((simulated.pinned_stats()["bytes"], torch.accelerator.memory_allocated()))

    brain = make_brain("simulated", Watches)
    brain.seen = []
    batches = make_batches(4)
    brain.fit(range(1), (batches[index % 4] for index in range(10_001)))
    assert len(brain.seen) == 2 and brain.seen[0] == brain.seen[1]


def test_deterministic_gives_cublas_what_it_asks_for(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be put back")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        make_brain("simulated", deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_pin_holds_on_a_device_whose_type_came_late():
    seen = []

    class Head(nn.Module):
        @fwd_default_precision
        def forward(self, x):
            seen.append((x.dtype, torch.is_autocast_enabled("simulated")))
            return x * 2

    with torch.autocast("simulated", torch.float16):
        Head()(torch.ones(2, device="simulated", dtype=torch.float16))
    assert seen == [(torch.float32, False)]


def test_the_first_save_in_the_background_finds_its_pinned_memory_ready(tmp_path):
    """To pin gigabytes takes seconds, for which training would wait."""

    class Saves(Classifier):
        def on_fit_batch_start(self, batch, should_step):
            self.pinned.append(simulated.pinned_stats())

    options = {"precision": "fp16", "ema_decay": 0.9, "output_folder": str(tmp_path), "ckpt_interval_steps": 4}
    brain = make_brain("simulated", Saves, **options)
    brain.pinned = []
    brain.fit(range(1), make_batches())
    start, before, after = (brain.pinned[step] for step in (0, 3, 4))
    assert after["allocations"] == before["allocations"]  # by the thread that trains
    weights = sum(parameter.nbytes for parameter in brain.modules.parameters())
    assert after["bytes"] - start["bytes"] >= 2 * weights  # they and their averages


def test_no_memory_is_pinned_ahead_that_is_not_clearly_free(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, {"model": nn.Linear(8, 8, device="simulated")})
    held = []
    for free in (0, None):  # None: the system does not say
        monkeypatch.setattr(snapshot, "free_host_memory", lambda free=free: free)
        checkpointer.prepare_saving()
        checkpointer.wait()
        held.append(simulated.pinned_stats()["bytes"])
    assert held[1] - held[0] == 4 * (8 * 8 + 8)


@pytest.mark.parametrize("take", ["all", "of a step"])
def test_generators_of_the_device_of_a_run_are_put_back_whichever_is_the_current_one(take):
    device = torch.device("simulated:1")
    torch.accelerator.set_device_index(0)
    state = random_state(device) if take == "all" else torch_random_state(device)
    first = torch.randn(4, device=device).tolist()
    torch.randn(4, device=device)
    set_random_state(state) if take == "all" else set_torch_random_state(state, device)
    assert torch.randn(4, device=device).tolist() == first


def test_the_peak_of_the_devices_memory_is_in_the_summary():
    brain = make_brain("simulated")
    before = torch.accelerator.memory_allocated()
    brain.fit(range(1), make_batches())
    assert brain.summary.peak_memory_of == "device" and brain.summary.peak_memory_bytes > before


def test_numbers_of_several_devices_each_have_a_landing_place_of_their_own():
    home = HostCopy(torch.device("simulated:0"))
    devices = ["simulated:0", "simulated:1", "cpu", "simulated:1", "simulated:0"]
    for number, device in enumerate(devices):
        assert home.post(torch.full((2,), number, device=device, dtype=torch.float32)).read() == [number, number]


class HalfOnTheHost(Classifier):
    """Its last layer lies on the host."""

    def compute_forward(self, batch, stage):
        first, last = self.modules.model[0], self.last
        return last(first(batch[0]).cpu()).to(self.device)


def test_an_optimizer_of_weights_on_the_host_too_takes_the_same_steps_as_on_a_cpu():
    losses = {}
    for device in ("cpu", "simulated:0"):
        brain = make_brain(device, HalfOnTheHost)
        torch.manual_seed(2)
        brain.last = nn.Linear(8, 4)
        model = brain.modules.model
        brain.opt_class = lambda _, first=model[0], last=brain.last: torch.optim.AdamW(
            [*first.parameters(), *last.parameters()], lr=0.1
        )
        brain.fit([1], make_batches())
        assert brain.skipped_steps == 0
        losses[device] = brain.avg_train_loss
    assert losses["simulated:0"] == pytest.approx(losses["cpu"], rel=1e-6)
