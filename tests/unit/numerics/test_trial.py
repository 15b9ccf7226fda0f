"""A step that is tried: it is the real one, the same each time, and leaves nothing behind."""

import math

import pytest
import torch
from device import DEVICE
from torch import nn
from torch.nn import functional as F

from amp_recipes.data import to_device
from amp_recipes.numerics.trial import Outcome, gradient_error, plain_trial

BF16, FP16 = torch.bfloat16, torch.float16


class Stateful(nn.Module):
    """Draws, norms, and keeps a hidden state and a counter in plain attributes."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.hidden, self.calls, self.seen = torch.zeros(16, device=DEVICE), 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        y = F.dropout(self.norm(self.inp(x)), 0.3) + self.hidden
        self.hidden = self.hidden + y.detach().float().mean(0)
        return self.out(y) * self.calls


def squared(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def window(batches=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [(torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(batches)]
    return to_device(made, DEVICE)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stateful().to(DEVICE)


def same(a: Outcome, b: Outcome) -> bool:
    names = a.gradients.keys() == b.gradients.keys()
    return names and all(map(torch.equal, a.losses, b.losses)) and gradient_error(a, b) == 0.0


def test_a_run_is_the_hand_written_step(model):
    trial, batches = plain_trial(model, squared), window()
    torch.manual_seed(5)
    outcome = trial.run(batches)
    torch.manual_seed(5)
    for batch in batches:
        (squared(model, batch) / 2).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, outcome.gradients[name])


def test_runs_repeat_and_leave_nothing_behind(model):
    trial = plain_trial(model, squared, torch.optim.Adam(model.parameters()))
    state, random = {name: it.clone() for name, it in model.state_dict().items()}, torch.get_rng_state()
    hidden = model.hidden
    first = trial.run(window())
    for dtype, scale in ((BF16, 1.0), (FP16, 1024.0)):
        assert gradient_error(trial.run(window(), dtype, scale), first) < 0.05
    trial.train([window()] * 3, BF16)
    assert same(trial.run(window()), first)
    assert all(torch.equal(state[name], it) for name, it in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.hidden is hidden and model.calls == 0 and model.seen == []
    assert all(it.grad is None for it in model.parameters()) and not trial.optimizers()["optimizer"].state


def test_pins_of_a_run(model):
    trial = plain_trial(model, squared)
    reference = trial.run(window())
    pinned = trial.run(window(), BF16, pins=["inp", "norm", "out"])
    assert pinned.pins.never_called() == [] and gradient_error(pinned, reference) < 1e-6
    assert gradient_error(trial.run(window(), BF16), reference) > 1e-4
    assert not any("forward" in vars(it) for it in model.modules())


def test_a_scale_that_overflows_is_backed_off(model):
    trial = plain_trial(model, squared)
    assert not trial.run(window(), FP16, 2.0**40).is_finite
    backed_off = trial.run_finite(window(), FP16, 2.0**40)
    assert backed_off.is_finite and 1.0 <= backed_off.scale < 2.0**24
    assert gradient_error(backed_off, trial.run(window())) < 0.01


def test_a_loss_that_only_went_backward_counts():
    """As of a critic, whose loss a step may not return."""
    layer = nn.Linear(6, 4, device=DEVICE)
    trial = plain_trial(layer, squared)
    take = trial._take

    def two_losses(batches, updates, context):
        updates.backward(layer(batches[0][0]).sum() + math.inf)
        return take(batches, updates, context)

    trial._take = two_losses
    outcome = trial.run(window(1))
    assert len(outcome.losses) == 1 and len(outcome.differentiated) == 2
    assert not outcome.loss_is_finite


def test_training_is_the_hand_written_loop(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    trial, windows = plain_trial(model, squared, optimizer), [window(seed=seed) for seed in range(5)]
    course = trial.train(windows, prepare=lambda: torch.manual_seed(3))
    assert course.skipped == 0 and course.is_finite and course.sizes == course.losses
    torch.manual_seed(3)
    losses = []
    for batches in windows:
        found = [squared(model, batch) for batch in batches]
        for loss in found:
            (loss / 2).backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(it.item() for it in found) / 2)
    assert course.losses == pytest.approx(losses, rel=1e-6)


def test_skipped_updates_are_counted(model):
    course = plain_trial(model, squared).train([window(1)] * 4, FP16, scale=2.0**126)
    assert course.skipped == 4 and course.is_finite
    assert plain_trial(model, squared).train([window(1)] * 4, FP16, scale=2.0**8).skipped == 0


def test_the_error_of_gradients():
    def outcome(**gradients):
        return Outcome([], {name: torch.tensor(it) for name, it in gradients.items()}, 1.0, 0.0)

    assert gradient_error(outcome(a=[3.0], b=[4.0]), outcome(a=[3.0], b=[4.0])) == 0.0
    assert gradient_error(outcome(a=[3.5], b=[4.0]), outcome(a=[3.0], b=[4.0])) == pytest.approx(0.1)
    assert gradient_error(outcome(a=[3.0]), outcome(a=[3.0], b=[4.0])) == pytest.approx(0.8)
    assert gradient_error(outcome(a=[math.inf]), outcome(a=[3.0])) == math.inf
    assert gradient_error(outcome(), outcome()) == 0.0
    assert gradient_error(outcome(a=[1.0]), outcome(a=[0.0])) == math.inf
