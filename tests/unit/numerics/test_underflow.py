"""Underflow: what a bf16 run predicts of fp16 gradients, against fp16 runs; and the scale that it recommends."""

import json
import math

import pytest
import torch
from device import DEVICE
from torch import nn
from torch.nn import functional as F

from amp_recipes.data import to_device
from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.numerics.watch.observe import Attribution, OpWatch
from amp_recipes.numerics.watch.op_kinds import op_kind
from amp_recipes.numerics.watch.underflow import underflow

FP16 = torch.float16


class Born(OpWatch):
    """Counts what is born in a dtype in the backward: values, zeros, and those that are not finite."""

    def __init__(self, modules, dtype):
        super().__init__(Attribution(modules), self.saw)
        self.dtype, self.all, self.zeros, self.nonfinite = dtype, 0, 0, 0

    def saw(self, op, args, kwargs, output):
        if self.at.here.phase != "backward" or op_kind(op).doing in ("view", "make", "move"):
            return
        for tensor in tensors_in(output):
            if tensor.dtype == self.dtype:
                self.all += tensor.numel()
                self.zeros += int((tensor == 0).sum())
                self.nonfinite += int((~tensor.isfinite()).sum())


def network(gain=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    return plain_trial(model.to(DEVICE), lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1]) * gain)


def windows(count=2, batches=1, samples=32):
    generator = torch.Generator().manual_seed(0)

    def batch():
        return torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator)

    return to_device([[batch() for _ in range(batches)] for _ in range(count)], DEVICE)


# Each gain and each number of batches once; all pairs in the extended tier.
@pytest.mark.parametrize(
    ("gain", "batches"),
    [
        *((1.0, 1), (1e-3, 3), (1e-5, 1)),
        *(pytest.param(*it, marks=pytest.mark.extended) for it in ((1.0, 3), (1e-3, 1), (1e-5, 3))),
    ],
)
def test_it_predicts_the_zeros_of_fp16(gain, batches):
    """Within a tenth of the share: what fp16 rounds up to its smallest number flows on, where most is flushed."""
    trial, steps = network(gain), windows(batches=batches)
    found = underflow(trial, steps)
    seen = 0
    for log2 in (0, 2, 4, 8, 12):
        real = Born(trial.modules, FP16)
        for window in steps:
            trial.run(window, FP16, 2.0**log2, watch=[real])
        flushed = found.flushed[found.scales.index(2.0**log2)]
        assert flushed == pytest.approx(real.zeros / real.all, rel=0.1, abs=0.005)
        seen += 0.01 < flushed < 0.99
    assert seen >= (gain < 1e-2)


def test_scales_are_monotonous_and_shares():
    found = underflow(network(1e-4), windows())
    for values, rising in ((found.flushed, False), (found.energy_lost, False), (found.overflows, True)):
        assert sorted(values, reverse=not rising) == list(values)
    assert all(0 <= share <= 1 for share in (*found.flushed, *found.subnormal, *found.energy_lost))
    assert found.flushed[0] > 0.1 > found.energy_lost[0]  # small gradients are many, and matter little


@pytest.mark.parametrize("gain", [10.0, 1.0, 1e-4])
def test_the_recommended_scale_trains_without_overflow(gain):
    trial, steps = network(gain), windows(4)
    found = underflow(trial, steps)
    assert found.largest * found.init_scale <= 65504 / 8 or found.init_scale == 1.0
    assert found.init_scale in (1.0, 2.0**24) or found.largest * found.init_scale * 16 > 65504
    for window in steps:
        assert trial.run(window, FP16, found.init_scale).is_finite
        overflowing = 2.0**12 * 65504 / (8 * found.largest)
        assert not trial.run(window, FP16, overflowing).is_finite or gain > 1
    assert trial.train(steps, FP16, found.init_scale).skipped == 0


def test_the_window_lies_between_flushing_and_overflow():
    found = underflow(network(), windows())
    ceiling = math.log2(65504 / found.largest)
    opens = 2.0 ** (ceiling - found.window_octaves)
    assert opens in found.scales
    index = found.scales.index(opens)
    assert found.flushed[index] - found.exact_zeros < 1e-3
    assert index == 0 or found.flushed[index - 1] - found.exact_zeros >= 1e-3


def test_exact_zeros_are_not_flushed_ones():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    trial = plain_trial(model.to(DEVICE), lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1]))
    found = underflow(trial, windows())
    assert found.exact_zeros > 0.1
    assert found.flushed[-1] == pytest.approx(found.exact_zeros)


def test_where_nothing_flows_in_low_precision():
    found = underflow(network(), windows(), pins=["0", "2", "4"])
    assert found.counted == 0 and found.window_octaves is None
    json.dumps(found.as_dict(), allow_nan=False)


def test_what_is_written():
    found = underflow(network(), windows())
    written = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert written.keys() >= {"scales", "flushed", "window_octaves", "init_scale"}
    assert len(written["scales"]) == len(written["flushed"])


def test_losses_too_small_for_any_scale(subtests):
    """The scale is one that a run accepts, and what is said of it is true of it."""
    for gain in (1e-14, 1e-20, 1e-34):
        with subtests.test(f"{gain:g}"):
            found = underflow(network(gain), windows())
            assert found.init_scale == 2.0**24 and found.counted
            flushed = found.flushed[found.scales.index(found.init_scale)] - found.exact_zeros
            assert flushed > 0.5 or gain > 1e-15
            if flushed > 0.5 and found.flushed[-1] - found.exact_zeros >= 1e-3:
                assert found.window_octaves is None
            json.dumps(found.as_dict(), allow_nan=False)


def test_gradients_of_weights_are_counted_where_they_are_born_in_low_precision():
    torch.manual_seed(0)
    trial = plain_trial(nn.Linear(8, 4), lambda model, batch: model(batch).float().square().mean())
    counted = underflow(trial, [[torch.randn(16, 8)]]).counted
    assert counted >= 16 * 4 + 8 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    trial = network()
    trial.modules.cuda()
    trial.device = torch.device("cuda")
    found = underflow(trial, [[tuple(it.cuda() for it in batch) for batch in window] for window in windows()])
    assert found.counted and found.init_scale > 1
