"""The proof by training: a difference is WORSE only where it matters, and what matters is found."""

import itertools
import math
import random

import pytest
import torch
from device import DEVICE
from planted_faults import ZOO

from amp_recipes.loop import examination
from amp_recipes.numerics.diagnosis import Questions, diagnose
from amp_recipes.numerics.pins import equivalence
from amp_recipes.numerics.pins.budget import Budget
from amp_recipes.numerics.pins.equivalence import LOOKS, compare
from amp_recipes.numerics.pins.proof import train_with_pins
from amp_recipes.numerics.trial import Course, plain_trial

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT_ROUNDOFF = 2.0**-8  # of bf16

# ---------------------------------------------------------------------- the decision, on losses that are made up


def decided(draw, fall=1.0, seeds=0.0, lost=0.0, noise=0.0, size=2.0):
    """The comparison that ends the looks, of a precision that loses `lost`, with normal noise in seeds and pairs."""
    reference = [size + draw.gauss(0, seeds) for _ in range(LOOKS[-1])]
    low = [value + lost + draw.gauss(0, noise) for value in reference]
    for look in LOOKS:
        found = compare([size + fall] * look, reference[:look], low[:look], size, 0.0)
        if found.is_decided:
            break
    return found


def rates(**what):
    """The shares that are called worse, and proven, of 1,000 draws."""
    draw = random.Random(0)
    found = [decided(draw, **what) for _ in range(1000)]
    return sum(it.worse for it in found) / 1000, sum(it.equal for it in found) / 1000


@pytest.mark.parametrize(
    "what",
    [
        {"lost": 0.002, "noise": 0.0005, "seeds": 0.002},  # all pairs agree on a fifth of a percent of the fall
        {"lost": 0.01, "noise": 0.002, "seeds": 0.01},
        {"lost": 0.015, "noise": 0.02, "seeds": 0.03},  # as the digits do
        {"lost": 0.05, "noise": 0.1, "seeds": 0.1},  # pairs that part as far as seeds do
    ],
)
def test_a_small_real_difference_is_no_false_alarm(what):
    worse, _ = rates(**what)
    assert worse <= 0.05


def test_at_the_margin_either_mistake_is_made_in_one_of_twenty():
    worse, equal = rates(lost=0.02, noise=0.001, seeds=0.002)
    assert worse <= 0.065 and equal <= 0.065  # 0.7 % is the standard deviation of 1,000 draws at 5 %


@pytest.mark.parametrize(
    "what", [{"lost": 0.03, "noise": 0.001}, {"lost": 0.06, "noise": 0.02, "seeds": 0.02}, {"lost": 0.2, "seeds": 0.05}]
)
def test_a_difference_beyond_the_margin_is_found(what):
    worse, equal = rates(**what)
    assert worse >= 0.95 and equal <= 0.01


def test_without_a_difference_it_is_mostly_proven():
    assert rates(noise=0.001, seeds=0.01)[1] == 1.0
    assert rates(noise=0.02, seeds=0.02)[1] >= 0.8


def test_the_quantiles_are_students():
    """His distribution as an integral, by Simpson's rule."""
    for pairs, quantile in equivalence._T.items():
        df, parts = pairs - 1, 2000
        density = [(1 + (quantile * i / parts) ** 2 / df) ** (-(df + 1) / 2) for i in range(parts + 1)]
        area = density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
        factor = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
        assert 0.5 - factor * area * quantile / parts / 3 == pytest.approx(0.05 / len(LOOKS), abs=2e-6)


@pytest.mark.parametrize(
    ("reference", "size", "margin"),
    [
        ([1.0, 1.0, 1.0], 1.0, 0.04),  # 2 % of what the loss falls by, 2
        ([0.9, 1.0, 1.1], 1.0, 0.1),  # the standard deviation of seeds
        ([1.0, 1.0, 1.0], 100.0, 100 * UNIT_ROUNDOFF),  # what one rounding does to a loss of that size
    ],
)
def test_the_margin_is_the_largest_of_three(reference, size, margin):
    found = compare([3.0, 3.0, 3.0], reference, reference, size, UNIT_ROUNDOFF)
    assert found.margin == pytest.approx(margin)


def test_a_lower_loss_is_not_worse_and_one_that_is_lower_by_more_than_the_margin_proves_nothing():
    """What is learned without a mask, or without dropout, ends lower too."""
    found = compare([3.0] * 3, [1.0, 1.0, 1.0], [0.97, 0.971, 0.969], 1.0, UNIT_ROUNDOFF)
    assert found.equal and not found.worse
    found = compare([3.0] * 3, [1.0, 1.0, 1.0], [0.5, 0.51, 0.49], 1.0, UNIT_ROUNDOFF)
    assert found.lower and not found.equal and not found.worse
    said = judged([1.0, 0.5, 1.0, 0.51, 1.0, 0.49])
    assert not said.proven and "lower, by 25 % of its fall" in said.text


def test_a_margin_that_is_most_of_the_fall_proves_nothing():
    found = compare([1.1] * 3, [0.9, 1.0, 1.1], [0.9, 1.0, 1.1], 1.0, UNIT_ROUNDOFF)
    assert found.shows_nothing and not found.equal
    assert compare([1.1] * 3, [0.9, 1.0, 1.1], [1.9, 2.0, 2.1], 1.0, UNIT_ROUNDOFF).worse


# ---------------------------------------------------------------------- training, on courses that are made up


class Courses:
    """A trial whose trainings end as told: fp32 and low precision in turn, one pair for each seed; then again."""

    def __init__(self, ends, low_skips=0, first=3.0):
        self.ends, self.low_skips, self.first, self.asked = itertools.cycle(ends), low_skips, first, []
        self.optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)

    def optimizers(self):
        return {"optimizer": self.optimizer}

    def train(self, windows, dtype, scale, pins, prepare):
        prepare()
        self.asked.append(
            (dtype, [id(it) for it in windows], torch.rand(1).item(), self.optimizer.param_groups[0]["lr"])
        )
        losses = [self.first] * (len(windows) // 2) + [next(self.ends)] * (len(windows) - len(windows) // 2)
        return Course(losses, [abs(it) for it in losses], skipped=0 if dtype == torch.float32 else self.low_skips)


def windows(count):
    return [[torch.zeros(1)] for _ in range(count)]


def judged(ends, dtype=BF16, **options):
    return train_with_pins(Courses(ends, **options), windows(4), dtype, 1.0, [], 20)


def test_a_pair_has_the_same_batches_and_random_numbers():
    trial = Courses([1.0, 1.0] * 3)
    assert train_with_pins(trial, windows(4), BF16, 1.0, [], 20).proven
    for reference, low in zip(trial.asked[::2], trial.asked[1::2], strict=True):
        assert (reference[0], low[0]) == (torch.float32, BF16) and reference[1:] == low[1:]
    assert len({tuple(it[1]) for it in trial.asked}) == 3


def test_pairs_show_what_seeds_hide():
    """The seeds end 20 % apart, the low precision 15 % above its own pair each time."""
    worse = judged([1.0, 1.15, 1.2, 1.353, 1.1, 1.248])
    assert worse.worse and not worse.proven and "WORSE" in worse.text and "7.9 % of" in worse.text
    alike = judged([1.0, 1.01, 1.2, 1.19, 1.1, 1.103])
    assert alike.proven and not alike.worse and "no worse than fp32" in alike.text


@pytest.mark.parametrize("percent", [0.11, 0.22])
def test_a_tiny_difference_that_all_seeds_agree_on_does_not_matter(percent):
    """What rounding did to two healthy recipes, which were called WORSE."""
    low = [1 + percent / 100 * share for share in (0.98, 1.0, 1.02)]
    found = judged([1.0, low[0], 1.0, low[1], 1.0, low[2]])
    assert found.proven, found.text


@pytest.mark.parametrize(("noise", "pairs"), [(0.001, 3), (0.02, 6), (0.05, 12)])
def test_there_are_more_pairs_only_while_it_is_not_decided(noise, pairs):
    ends = [value for sign in (1, -1, 0) for value in (1.0, 1.0 + sign * noise)]
    found = judged(ends)
    assert len(found.reference) == len(found.low) == pairs == found.comparison.pairs
    assert found.proven or (pairs == 12 and "would have been seen" in found.text)
    assert len(train_with_pins(Courses(ends), windows(4), BF16, 1.0, [], 20, pairs=3).low) == 3


def test_the_first_and_the_last_quarter_take_the_same_windows_and_the_rest_the_others():
    trial, many = Courses([1.0, 1.0]), windows(32)
    train_with_pins(trial, many, BF16, 1.0, [], 40)
    ids = [id(window) for window in many]
    for _, taken, *_ in trial.asked:
        assert set(taken[:10]) == set(taken[-10:]) == set(ids[:10])
        assert len(set(taken[10:30])) == 20 and set(taken[10:30]) <= set(ids[10:])
    assert len({tuple(taken[-10:]) for _, taken, *_ in trial.asked}) == 3


def test_one_seed_that_diverges_does_not_hide_behind_its_own_spread():
    assert not judged([1.0, 1.0, 1.0, 1.0, 1.0, 90.0]).proven
    assert "diverges" in judged([1.0, 1.0, 1.0, 1.0, 1.0, float("nan")]).text


def test_a_loss_that_does_not_fall_shows_nothing():
    flat = judged([3.0] * 6)
    assert not flat.proven and "did not fall" in flat.text


@pytest.mark.parametrize(("dtype", "skips", "proven"), [(FP16, 3, True), (FP16, 4, False), (BF16, 1, False)])
def test_skipped_updates_prove_nothing(dtype, skips, proven):
    found = judged([1.0] * 6, dtype, low_skips=skips)
    assert found.proven == proven and (proven or "skipped" in found.text)


@pytest.mark.parametrize("start", [0.0, 1e-6])
def test_a_warm_up_is_trained_at_the_rate_that_it_warms_up_to(start):
    trial = Courses([1.0] * 6)
    trial.optimizer.param_groups[0].update(lr=start, initial_lr=0.1)
    assert train_with_pins(trial, windows(4), BF16, 1.0, [], 20).proven
    assert {it[3] for it in trial.asked} == {0.1}
    trial.optimizer.param_groups[0].update(lr=0.0, initial_lr=0.0)
    assert "every learning rate is 0" in train_with_pins(trial, windows(4), BF16, 1.0, [], 20).text


# ---------------------------------------------------------------------- time


def test_a_limit_in_seconds_becomes_one_in_steps():
    """Only the first three steps of each dtype are timed: when the machine is slow afterwards, nothing changes."""
    for later in (1.0, 50.0):
        budget = Budget(100.0)
        for seconds in (9.0, 1.0, 1.0, later, later):  # the first of all takes long
            budget.pay(FP32, seconds)
            budget.pay(BF16, seconds)
        assert budget.left == 100 - 2 * 13 and budget.price(FP32) == budget.price(BF16) == 1.0
    assert Budget(None).training(100, BF16) == (100, LOOKS[-1])
    assert Budget(0.0).is_spent


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(1e6, (100, 12)), (2405.0, (100, 12)), (2000.0, (100, 6)), (1000.0, (50, 6)), (100.0, (12, 3)), (50.0, (0, 0))],
)
def test_steps_are_halved_until_six_pairs_fit(seconds, steps):
    budget = Budget(seconds + 2)
    budget.pay(FP32, 1.0)
    budget.pay(BF16, 1.0)
    assert budget.training(100, BF16) == steps


def test_a_proof_trains_on_more_windows_than_are_looked_at():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(DEVICE)
    taken = []

    def objective(model, batch):
        taken.append(id(batch))
        return torch.nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    trial = plain_trial(model, objective)
    made = [[(torch.randn(16, 8).to(DEVICE), torch.arange(16).to(DEVICE) % 4)] for _ in range(9)]
    diagnose(trial, made[:4], Questions("bf16", steps=12, seconds=1e6), further=made[4:])
    assert set(taken) == {id(window[0]) for window in made}


def test_further_windows_are_bounded_in_bytes():
    windows = [[{"x": torch.zeros(100)}] for _ in range(5)]
    assert list(examination._within(windows, 1200)) == windows[:3]
    assert list(examination._within(windows, 10**9)) == windows


# ---------------------------------------------------------------------- planted networks

SILENT = ["silent_zero_of_squares", "silent_count_of_ones", "lstm_on_an_offset_bf16"]


def proof_of(planted, pins, steps=40):
    return train_with_pins(planted.trial(), planted.windows(16), planted.dtype, planted.scale, pins, steps)


@pytest.mark.extended
@pytest.mark.parametrize("name", SILENT)
def test_a_fault_that_makes_nothing_nonfinite_is_worse_and_its_cure_is_not(name):
    planted = ZOO[name]
    ill = proof_of(planted, [])
    assert ill.worse, ill.text
    cured = proof_of(planted, [planted.culprit])
    assert cured.proven, cured.text


@pytest.mark.extended
def test_a_fault_that_shows_late_is_worse_after_more_steps():
    assert proof_of(ZOO["large_angle_sine_bf16"], [], steps=200).worse


def test_an_update_that_underflows_is_found():
    """Half of the model has gradients that fp16 rounds to 0 at scale 1. All stays finite."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)]).to(DEVICE)
    made = [[torch.randn(16, 8).to(DEVICE)] for _ in range(16)]

    def objective(model, x):
        target = x.argmax(1) % 4
        seen, hidden = (torch.nn.functional.cross_entropy(part(x).float(), target) for part in model)
        return seen + hidden * 1e-8 + (hidden - hidden * 1e-8).detach()  # the loss of both, learned from at 1 and 1e-8

    trial = plain_trial(model, objective, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-12))
    assert train_with_pins(trial, made, FP16, 1.0, [], 40).worse
    assert train_with_pins(trial, made, FP16, 2.0**16, [], 40).proven
