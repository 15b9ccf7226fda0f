"""Bands of numbers: what leaves one is found, what does not is left alone, and nothing is forgotten by a state."""

import json
import math
import random

import numpy as np
import pytest
import torch

from amp_recipes.loop.recovery.lowered_rates import LoweredRates
from amp_recipes.loop.recovery.spikes import LEAST_SPREAD_OF_LOSS, LEAST_SPREAD_OF_NORM, Band, SpikeWatch
from amp_recipes.precision import LossScaler


def band_of(values, window=None, factor=8.0, least_spread=0.05):
    band = Band(window or len(values), factor, least_spread)
    for value in values:
        band.add(value)
    return band


def limit_by_hand(values, factor=8.0, least_spread=0.05):
    """The formula, written down apart from the code: median + factor * max(1.4826 MAD, least)."""
    values = np.array(values, dtype=np.float64)
    logarithms = bool((values >= 0).all())
    if logarithms:
        values = np.log(np.maximum(values, values[values > 0].min()))
        least = least_spread
    else:
        least = least_spread * np.median(np.abs(values))
    median = np.median(values)
    limit = median + factor * max(1.4826 * np.median(np.abs(values - median)), least)
    return np.exp(limit) if logarithms else limit


SERIES = {
    "losses": lambda draw: draw.lognormvariate(0, 0.3),
    "tiny": lambda draw: draw.lognormvariate(-20, 3),
    "around zero": lambda draw: draw.gauss(0, 1),
    "negative": lambda draw: -draw.lognormvariate(2, 0.1),
    "zeros": lambda draw: draw.choice([0.0, 1e-8, 0.5, 0.7]),
    "level": lambda draw: 2.0 + draw.random() * 1e-9,
}


@pytest.mark.parametrize("window", [4, 7, 30])
def test_the_limit_is_that_of_the_formula_over_the_latest_values(subtests, window):
    for name, make in SERIES.items():
        with subtests.test(name):
            draw = random.Random(window)
            values = [make(draw) for _ in range(5 * window)]
            band = Band(window, 8.0, 0.05)
            for count, value in enumerate(values, start=1):
                band.add(value)
                latest = values[max(0, count - window) : count]
                if count < window:
                    assert band.limit == math.inf and band.has(1e300)
                elif any(latest):
                    assert band.limit == pytest.approx(limit_by_hand(latest), rel=1e-9)
                assert band.values == latest


def test_a_value_is_in_the_band_up_to_its_limit():
    band = band_of([1.0, 1.1, 0.9, 1.2, 1.0])
    assert all(band.has(value) for value in (-5.0, 0.0, 1e-300, 1.0, band.limit))
    assert not any(band.has(value) for value in (math.nextafter(band.limit, 9.0), 1e300, math.inf, math.nan))


def test_outliers_among_the_values_hardly_move_the_limit():
    clean = [1.0 + 0.01 * (index % 7) for index in range(40)]
    assert band_of([*clean, 1e6, 1e9, 1e12]).limit < 1.1 * band_of(clean).limit


def test_a_series_that_does_not_move_may_still_move_a_little():
    assert band_of([2.0] * 20).limit == pytest.approx(2.0 * math.exp(8 * 0.05))
    assert band_of([-2.0] * 20).limit == pytest.approx(-2.0 + 8 * 0.05 * 2.0)
    assert band_of([0.0] * 20).has(1e9)  # there is nothing to compare with


def test_extreme_values_raise_nothing(subtests):
    for values in ([5e-324] * 8, [1e308] * 8, [1e-300, 1e300] * 4, [-1e308, 1e308] * 4):
        with subtests.test(str(values)):
            band = band_of(values)
            assert not math.isnan(band.limit) and band.has(min(values)) and not math.isnan(band.median)


def test_a_narrower_window_takes_the_latest_of_a_saved_band():
    band = Band(4, 8.0, 0.05)
    band.load([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert band.values == [3.0, 4.0, 5.0, 6.0]


def test_steadily_falling_and_slowly_rising_series_stay_in_their_band():
    for direction in (-0.02, 0.005):
        band = Band(50, 8.0, 0.05)
        for index in range(500):
            value = math.exp(direction * index + 0.05 * math.sin(index))
            assert band.has(value)
            band.add(value)


# ---------------------------------------------------------------------- the watch


def watch(patience=1, window=5):
    made = SpikeWatch(window, 8.0, patience)
    made.begin(1, 0)
    return made


def calm(made, count, begin=0):
    for index in range(begin, begin + count):
        made.observe(1.0 + 0.05 * (index % 3), [("optimizer", 2.0 + 0.1 * (index % 4))], f"batch {index}", index)


def test_a_loss_and_a_norm_each_have_their_band():
    for loss, norm, series in [(50.0, 2.0, "loss"), (1.0, 500.0, "gradient norm (optimizer)"), (math.nan, 2.0, "loss")]:
        made = watch()
        calm(made, 5)
        assert not made.spiked
        made.observe(loss, [("optimizer", norm)], "batch 5", 6)
        assert made.spiked and made.last.series == series and made.last.update == 6
        assert "batch 5" in str(made.last) and series in str(made.last)


def test_each_optimizer_and_each_of_its_steps_is_watched():
    made = watch()
    for index in range(3):  # two critic steps in each window: 6 values
        made.observe(1.0, [("critic", 2.0), ("critic", 2.1), ("generator", 1e-3)], "", index)
    made.observe(1.0, [("critic", 2.0), ("critic", 90.0), ("generator", 1e-3)], "", 4)
    assert made.last.series == "gradient norm (critic)" and made.spiked


def test_a_norm_may_move_more_than_a_loss():
    assert LEAST_SPREAD_OF_NORM > LEAST_SPREAD_OF_LOSS
    made = watch()
    calm(made, 5)
    made.observe(1.0, [("optimizer", 6.0)], "", 5)  # three times its median
    assert made.outside == 0


def test_values_before_the_band_is_known_are_no_spike_unless_they_are_not_finite():
    made = watch()
    for loss in (1.0, 1e9, 1e-9, 1e5):
        made.observe(loss, [], "", 1)
    assert made.outside == 0
    made.observe(math.inf, [], "", 1)
    assert made.spiked and "no band yet" in str(made.last)


def test_it_takes_as_many_in_a_row_as_patience_says():
    made = watch(patience=3)
    calm(made, 5)
    for outside in ([99.0, 99.0], [99.0, 99.0, 99.0]):
        for loss in outside:
            assert not made.spiked
            made.observe(loss, [], "", 0)
        if len(outside) == 2:
            calm(made, 1)
    assert made.spiked


def test_what_lies_outside_does_not_enter_and_a_level_is_accepted_only_when_asked():
    made = watch()
    calm(made, 5)
    for _ in range(50):
        made.observe(40.0, [("optimizer", 2.0)], "", 0)
    assert made.outside == 50 and made.spiked
    made.accept_level()
    for _ in range(20):
        made.observe(40.0, [("optimizer", 2.0)], "", 0)
    assert made.outside == 0
    made.observe(400.0, [("optimizer", 2.0)], "", 0)
    assert made.spiked


def test_in_a_recovery_nothing_is_a_spike():
    made = watch()
    calm(made, 5)
    made.until = 100
    made.observe(99.0, [], "", 7)
    assert made.outside == 1 and not made.spiked
    made.until = None
    assert made.spiked


def test_a_watch_goes_on_from_its_state():
    made = watch(patience=2)
    calm(made, 9)
    made.observe(99.0, [("optimizer", 2.0)], "here", 10)
    made.spikes, made.went_back, made.until, made.went_back_to = 3, 2, 50, 40
    again = SpikeWatch(5, 8.0, 2)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert again.state_dict() == made.state_dict() and str(again.last) == str(made.last)
    for each in (made, again):
        each.until = None
        each.observe(1.3, [("optimizer", 3.0)], "", 11)
        each.observe(99.0, [("optimizer", 2.0)], "", 12)
    assert again.state_dict() == made.state_dict()


def test_a_watch_that_goes_back_keeps_its_counts_and_the_bands_of_then():
    made = watch()
    calm(made, 5)
    saved = {**made.state_dict(), "judged": True}
    calm(made, 3)
    made.observe(99.0, [], "", 9)
    made.spikes = 1
    made.load_state_dict(made.gone_back(saved, update=5, until=20))
    assert made.state_dict()["bands"] == saved["bands"] and made.outside == 0
    assert (made.spikes, made.went_back, made.until, made.went_back_to) == (1, 1, 20, 5)


def test_good_is_what_was_saved_in_this_fit_and_before_the_band_was_left():
    made = watch(patience=3)
    calm(made, 5, begin=1)
    saved = {**made.state_dict(), "judged": True}
    assert made.is_good(5, saved) and made.is_good(5, None)
    for update in (6, 7):
        made.observe(99.0, [], "", update)
        assert made.is_good(5, saved) and made.is_good(5, None) and made.left_after == 5
    assert not made.is_good(6, None)
    assert not made.is_good(6, {**saved, "observed": 5, "judged": False}), "in the midst of the update that left"
    assert not made.is_good(7, {**made.state_dict(), "judged": True})
    assert made.is_good(4, {**saved, "judged": False}), "in the midst of an earlier one"
    assert not made.is_good(5, {**saved, "fit": 2}) and not made.is_good(5, {**saved, "judged": False})
    calm(made, 1, begin=8)
    assert made.left_after is None and made.is_good(8, {**made.state_dict(), "judged": True})


# ---------------------------------------------------------------------- lower rates


def optimizer_with(*rates):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
    made = torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)])
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return made


def weights(optimizer):
    return [group["params"][0][0].item() for group in optimizer.param_groups]


def test_each_group_steps_with_its_lower_rate_and_keeps_its_own():
    optimizer, rates = optimizer_with(0.3, 0.07), LoweredRates(0.1)
    rates.attach({"optimizer": optimizer})
    rates.attach({"optimizer": optimizer})  # once more changes nothing
    optimizer.step()
    assert weights(optimizer) == pytest.approx([0.7, 0.93])
    rates.active = True
    assert rates.in_force(optimizer) == 0.3 * 0.1
    optimizer.step()
    assert weights(optimizer) == pytest.approx([0.67, 0.923])
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.07]  # to the bit
    rates.active = False
    assert rates.in_force(optimizer) == 0.3
    optimizer.step()
    assert weights(optimizer) == pytest.approx([0.37, 0.853])


def test_a_rate_in_a_tensor_is_lowered_in_place_and_once_where_groups_share_it():
    shared = torch.tensor(0.3)
    optimizer, rates = optimizer_with(shared, shared), LoweredRates(0.1)
    assert all(group["lr"] is shared for group in optimizer.param_groups)
    rates.attach({"optimizer": optimizer})
    rates.active = True
    assert rates.in_force(optimizer).item() == pytest.approx(0.03)
    optimizer.step()
    assert weights(optimizer) == pytest.approx([0.97, 0.97])
    assert all(group["lr"] is shared for group in optimizer.param_groups) and shared.item() == torch.tensor(0.3).item()


def test_a_step_that_raises_leaves_no_lower_rate_behind():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    optimizer, rates = Fails([torch.nn.Parameter(torch.ones(2))], lr=0.3), LoweredRates(0.1)
    rates.attach({"optimizer": optimizer})
    rates.active = True
    for _ in range(3):
        with pytest.raises(RuntimeError):
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.3 * 0.1
    rates.put_back()
    assert optimizer.param_groups[0]["lr"] == 0.3


SCHEDULES = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=30),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


def test_no_schedule_notices(subtests):
    for name, make in SCHEDULES.items():
        with subtests.test(name):
            plain, lowered = optimizer_with(0.3, 0.07), optimizer_with(0.3, 0.07)
            rates = LoweredRates(0.1)
            rates.attach({"optimizer": lowered})
            schedules = [make(plain), make(lowered)]
            for step in range(20):
                rates.active = 5 <= step < 12
                for optimizer, schedule in zip((plain, lowered), schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                assert [g["lr"] for g in plain.param_groups] == [g["lr"] for g in lowered.param_groups]
                assert (weights(plain) == weights(lowered)) is (step < 5)


# ---------------------------------------------------------------------- a loss scaler that pauses


def test_a_paused_scaler_scales_nothing_and_keeps_its_state():
    scaler = LossScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1})
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.5)

    def step():
        scaler.scale(parameter * 1.0).backward()
        gradient = parameter.grad.item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return gradient

    state = scaler.state_dict()
    scaler.pause(True)
    assert [step() for _ in range(4)] == [1.0] * 4 and parameter.item() == -1.0
    assert scaler.state_dict() == state and not scaler.is_enabled() and scaler.scale_tensor is None
    other = LossScaler("cpu")
    other.pause(True)
    other.load_state_dict(scaler.state_dict())
    other.pause(False)
    assert other.state_dict() == state
    scaler.pause(False)
    assert step() == 2.0**10 and scaler.state_dict()["scale"] == 2.0**11  # the second good one in a row


def test_pausing_does_not_enable_a_scaler_that_is_off():
    scaler = LossScaler("cpu", enabled=False)
    scaler.pause(True)
    scaler.pause(False)
    assert not scaler.is_enabled() and scaler.state_dict() == {}
