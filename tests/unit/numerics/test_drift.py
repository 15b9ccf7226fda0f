"""Drift: what a low precision does to each module, against hand counts, and in modules of every odd kind."""

import json
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from device import DEVICE
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_release import RELEASE

from amp_recipes.data import to_device
from amp_recipes.numerics.drift.drift import ModuleDrift, drift
from amp_recipes.numerics.drift.own_ops import CallDtypes, OwnOps, hookable
from amp_recipes.numerics.drift.watch import Inside, Measure
from amp_recipes.numerics.trial import Trial, gradient_error, plain_trial
from amp_recipes.numerics.watch.observe import OpWatch

BF16, FP16 = torch.bfloat16, torch.float16


def seeded(make):
    """`make`, with the same weights at each call."""

    def build(*args, **kwargs):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(*args, **kwargs).to(DEVICE)

    return build


def squared(model, batch):
    x, target = batch
    return F.mse_loss(model(x).float(), target)


def windows_of(count=1, samples=8, inputs=6, outputs=4, batches=1, scale=1.0):
    generator = torch.Generator().manual_seed(1)

    def batch():
        x = torch.randn(samples, inputs, generator=generator) * scale
        return x, torch.randn(samples, outputs, generator=generator)

    return to_device([[batch() for _ in range(batches)] for _ in range(count)], DEVICE)


def rows(model, windows, dtype=BF16, objective=squared, **options):
    """The report, by module."""
    return {
        row.module: row
        for row in drift(plain_trial(model.to(DEVICE), objective), to_device(windows, DEVICE), dtype, **options)
    }


class Apply(nn.Module):
    """A module that computes `function` of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def mlp(*between):
    return nn.Sequential(nn.Linear(6, 16), *between, nn.Linear(16, 4))


mlp = seeded(mlp)

# ---------------------------------------------------------------------------------------------------- the formula


def test_one_layer_by_hand():
    model = seeded(nn.Linear)(6, 4)
    ((x, target),) = windows_of()[0]
    (row,) = drift(plain_trial(model, squared), [[(x, target)]], BF16)

    y = model(x)
    (gradient,) = torch.autograd.grad(F.mse_loss(y, target), y)
    with torch.no_grad(), torch.autocast(DEVICE.type, BF16):
        d = model(x).float() - y
    by_channel = (gradient.norm(dim=0) * d.norm(dim=0)).norm()
    assert row.module == "" and row.calls == 1
    assert row.sensitivity == pytest.approx(by_channel.item(), rel=1e-5)
    assert row.local_error == pytest.approx((d.norm() / y.norm()).item(), rel=1e-5)


def test_channels_of_a_map_are_its_second_dimension():
    model = seeded(nn.Conv2d)(2, 3, 3)
    generator = torch.Generator().manual_seed(0)
    x, target = to_device(
        (torch.randn(4, 2, 9, 9, generator=generator), torch.randn(4, 3, 7, 7, generator=generator)), DEVICE
    )
    (row,) = drift(plain_trial(model, squared), [[(x, target)]], BF16)

    y = model(x)
    (gradient,) = torch.autograd.grad(F.mse_loss(y, target), y)
    with torch.no_grad(), torch.autocast(DEVICE.type, BF16):
        d = model(x).float() - y
    by_channel = (gradient.transpose(0, 1).flatten(1).norm(dim=1) * d.transpose(0, 1).flatten(1).norm(dim=1)).norm()
    assert row.sensitivity == pytest.approx(by_channel.item(), rel=1e-5)


def test_gradient_error_is_that_of_the_modules_own_parameters_in_the_whole_low_run():
    model, (window,) = mlp(nn.Tanh()), windows_of()
    trial = plain_trial(model, squared)
    low, reference = trial.run(window, BF16), trial.run(window)
    found = rows(model, [window])
    for name in ("0", "2"):
        difference = norm = 0.0
        for key in (f"{name}.weight", f"{name}.bias"):
            difference += float((low.gradients[key] - reference.gradients[key]).norm()) ** 2
            norm += float(reference.gradients[key].norm()) ** 2
        assert found[name].gradient_error == pytest.approx(math.sqrt(difference / norm), rel=1e-5)
    assert found["1"].gradient_error is None


def test_windows_and_batches_are_root_mean_squares_and_sums():
    windows = windows_of(3)
    model = mlp(nn.Tanh())
    each = [rows(model, [window])["0"] for window in windows]
    together = rows(model, windows)["0"]
    for key in ("sensitivity", "local_error", "gradient_error"):
        mean = math.sqrt(sum(getattr(row, key) ** 2 for row in each) / 3)
        assert getattr(together, key) == pytest.approx(mean, rel=1e-6)
    assert together.calls == 3


def test_calls_of_a_module_count_as_one_on_all_that_it_is_given():
    class Halves(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.layer, self.parts = seeded(nn.Linear)(6, 4), parts

        def forward(self, x):
            return torch.cat([self.layer(part) for part in x.chunk(self.parts)])

    windows = windows_of(2)
    whole, halves = rows(Halves(1), windows)["layer"], rows(Halves(4), windows)["layer"]
    assert halves.calls == 4 * whole.calls
    assert halves.sensitivity == pytest.approx(whole.sensitivity, rel=1e-5)
    assert halves.local_error == pytest.approx(whole.local_error, rel=1e-5)


def test_an_accumulation_window_is_one_large_batch():
    (window,) = windows_of(1, batches=3)
    whole = [tuple(torch.cat(parts) for parts in zip(*window, strict=True))]
    a, b = rows(mlp(nn.Tanh()), [window])["0"], rows(mlp(nn.Tanh()), [whole])["0"]
    assert a.calls == 3 and b.calls == 1
    assert a.sensitivity == pytest.approx(b.sensitivity, rel=1e-4)


def test_shares_of_values_that_fp16_cannot_hold():
    model = nn.Sequential(nn.Linear(6, 4, bias=False), Apply(lambda x: x * 1.0))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6)[:4])
    x = torch.ones(8, 6)
    x[0, 0], x[1, :3], x[2, 5], x[3, 1] = 7e4, 1e-5, 0.0, -65504.0
    row = rows(model, [[(x, torch.zeros(8, 4))]])["0"]
    # 48 values go in and 32 come out; the first four channels are in both.
    assert row.above_max == pytest.approx(2 / 80)
    assert row.below_normal == pytest.approx(6 / 80)
    assert row.largest == 7e4


def test_the_largest_value_inside_a_module_is_seen():
    model = seeded(nn.Sequential)(nn.Linear(6, 16), Apply(lambda x: (x * 1e6).tanh()), nn.Linear(16, 4))
    row = rows(model, windows_of())["1"]
    assert row.largest > 1e5 and row.above_max == 0.0


# ---------------------------------------------------------------------------------------- whose error an error is


def test_each_rounding_is_laid_at_the_door_of_one_module():
    """Doubling what a layer gave rounded is exact; a third of it is not."""
    found = rows(mlp(Apply(lambda x: x * 2), Apply(lambda x: x / 3)), windows_of())
    assert found["1"].sensitivity == found["1"].local_error == 0.0
    assert 1e-4 < found["2"].local_error < 4e-3


class Owner(nn.Module):
    """Owns a matrix product around two layers."""

    def __init__(self, own):
        super().__init__()
        self.first, self.second, self.own = nn.Linear(6, 16), nn.Linear(16, 4), own

    def forward(self, x):
        y = self.first(x)
        return self.second((y @ y.mT @ y).tanh() if self.own else y * 2)


@pytest.mark.parametrize("own", [True, False])
def test_a_parent_answers_for_its_own_ops_only(own):
    torch.manual_seed(0)
    found = rows(Owner(own), windows_of(samples=4))
    assert set(found) == {"", "first", "second"}
    assert found["first"].sensitivity > 0 and found["second"].sensitivity > 0
    assert (found[""].sensitivity > 1e-6) == own


def test_what_follows_the_dtype_of_its_input_computes_as_in_the_low_run():
    torch.manual_seed(0)
    model = mlp(Apply(lambda x: torch.log(1 + torch.exp(x + 12))))
    found = rows(model, windows_of(scale=3.0), FP16)
    assert found["1"].sensitivity == math.inf
    assert math.isfinite(found["0"].sensitivity) and math.isfinite(found["2"].sensitivity)


def test_modules_that_compute_in_fp32_are_not_in_it():
    assert set(rows(mlp(nn.LayerNorm(16), nn.Flatten()), windows_of(), pins=["0"])) == {"3"}
    assert set(rows(mlp(nn.Flatten()), windows_of(), pins=["0", "2"])) == set()


def test_candidates_can_be_named():
    assert set(rows(mlp(nn.Tanh()), windows_of(), candidates=["2"])) == {"2"}


def test_pins_that_stand_stay():
    from amp_recipes.precision import pin_fp32

    model = mlp(nn.Tanh())
    pin_fp32(model, ["0"])
    assert set(rows(model, windows_of())) == {"2"}


# ------------------------------------------------------------------------------------------ what is not finite


def test_what_is_not_finite_comes_first():
    model = mlp(nn.Tanh(), Apply(lambda x: x * 1e5), Apply(lambda x: x * 1e-5))
    ranked = drift(plain_trial(model, squared), windows_of(), FP16)
    assert ranked[0].module == "2" and ranked[0].sensitivity == ranked[0].local_error == math.inf
    assert all(math.isfinite(row.sensitivity) for row in ranked[1:])


def test_an_overflow_that_the_loss_does_not_see_is_harmless():
    def masked(x):
        mask = torch.zeros(16, device=x.device)
        mask[3:] = -1e9
        return (x + mask).to(x.dtype)  # -inf in fp16, which gives the weight 0 as -1e9 does

    found = rows(mlp(Apply(masked), nn.Softmax(-1)), windows_of(), FP16)
    assert found["1"].local_error == math.inf
    assert math.isfinite(found["1"].sensitivity)


def test_an_infinity_that_fp32_has_too_is_no_error():
    def masked(x):
        return x.masked_fill(torch.arange(16, device=x.device) > 3, -math.inf)

    found = rows(mlp(Apply(masked), nn.Softmax(-1)), windows_of(), FP16)
    assert found["1"].sensitivity == found["1"].local_error == 0.0
    assert math.isfinite(found["1"].largest)


def test_an_op_that_raises_in_low_precision_is_a_culprit():
    def masked(x):
        return x.masked_fill(torch.arange(16, device=x.device) > 3, -1e9)  # not a number of fp16

    model = mlp(Apply(masked), nn.Softmax(-1))
    with pytest.raises(RuntimeError):
        plain_trial(model, squared).run(windows_of()[0], FP16)
    ranked = drift(plain_trial(model, squared), windows_of(), FP16)
    assert ranked[0].module == "1" and ranked[0].sensitivity == math.inf
    assert {row.module for row in ranked} >= {"0", "3"}
    assert all(math.isfinite(row.sensitivity) for row in ranked[1:])


def test_a_backward_that_overflows_at_any_scale_is_a_culprit():
    """The derivative of the inverse root is -r^3 / 2, beyond fp16 where r itself is 100."""
    model = mlp(nn.Tanh(), Apply(lambda x: torch.rsqrt(x.square() + 1e-4)), Apply(lambda x: x * 1e-2))
    (window,) = windows_of()
    window[0][0][0] = 0.0
    with torch.no_grad():
        model[0].bias.zero_()
    ranked = drift(plain_trial(model, squared), [window], FP16)
    assert ranked[0].module == "2" and ranked[0].sensitivity == math.inf
    assert math.isfinite(ranked[0].local_error)
    assert all(math.isfinite(row.sensitivity) for row in ranked[1:])


def test_a_scale_that_overflows_is_backed_off():
    found = rows(mlp(nn.Tanh()), windows_of(), FP16, scale=2.0**40)
    assert all(row.gradient_error is None or row.gradient_error < 0.05 for row in found.values())


def test_large_values_do_not_overflow_the_sums():
    model = mlp(Apply(lambda x: x * 1e25), Apply(lambda x: x * 1e-25))
    assert all(0 < row.local_error < 1 for row in rows(model, windows_of()).values())


def test_a_reference_that_is_not_finite_gives_no_nan():
    model = mlp(Apply(lambda x: torch.where(x > 0, x / 0, x)))
    for row in rows(model, windows_of()).values():
        assert not math.isnan(row.sensitivity) and not math.isnan(row.local_error)


def test_as_dict_is_strict_json():
    row = ModuleDrift("a", math.inf, math.inf, None, 0.5, 0.0, 3.0, 1)
    text = json.dumps(row.as_dict(), allow_nan=False)
    assert json.loads(text)["sensitivity"] == "inf"
    assert json.loads(text).keys() >= {"module", "local_error", "gradient_error", "above_max", "below_normal"}


# ------------------------------------------------------------------------------- random numbers, buffers, neutrality


class Everything(nn.Module):
    """Draws, norms, a shared layer, an in-place op, and state in plain attributes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.shared, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls, self.hidden = 0, torch.zeros(16, device=DEVICE)

    def forward(self, x):
        self.calls += 1
        y = self.drop(self.norm(self.first(x)))
        y = self.shared(F.dropout(self.shared(y) + self.hidden, 0.3))
        self.hidden = self.hidden + y.detach().float().mean(0)
        y.mul_(1.0 + self.calls)
        return self.last(y.relu_() + torch.rand(16, device=x.device))


def measured(trial: Trial, window, dtype=BF16, names=None):
    """The reference run with the instruments on."""
    modules = hookable(trial.modules)
    dtypes = CallDtypes(modules)
    trial.run(window, dtype, watch=[dtypes])
    own_ops = OwnOps(modules, dtypes, dtype, trial.device)
    names = list(modules) if names is None else names
    inside = Inside(trial.modules)
    measure = Measure(modules, names, own_ops, set())
    return trial.run(window, watch=[OpWatch(inside.at, inside.saw), measure])


def test_the_reference_run_is_bit_for_bit_that_without_instruments():
    model, (window,) = seeded(Everything)(), windows_of(batches=2)
    trial = plain_trial(model, squared)
    bare, watched = trial.run(window), measured(trial, window)
    assert all(map(torch.equal, bare.losses, watched.losses))
    assert all(torch.equal(bare.gradients[name], watched.gradients[name]) for name in bare.gradients)


def test_it_leaves_nothing_behind():
    model, windows = seeded(Everything)(), windows_of(2)
    before, random = {name: it.clone() for name, it in model.state_dict().items()}, torch.get_rng_state()
    hooks = [len(it._forward_hooks) + len(it._forward_pre_hooks) for it in model.modules()]
    rows(model, windows)
    assert all(torch.equal(before[name], it) for name, it in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert hooks == [len(it._forward_hooks) + len(it._forward_pre_hooks) for it in model.modules()]
    assert all(it.grad is None for it in model.parameters())
    assert not any("forward" in vars(it) for it in model.modules())


def test_masks_of_dropout_are_the_same_on_both_sides():
    found = rows(mlp(nn.Dropout(0.5), Apply(lambda x: F.dropout(x, 0.5))), windows_of())
    assert all(row.local_error < 0.01 for row in found.values())


def test_buffers_do_not_move_twice():
    class Momentum(nn.Module):
        """Its output shows how often it ran."""

        def __init__(self):
            super().__init__()
            self.register_buffer("ran", torch.zeros(()))
            self.layer, self.times = nn.Linear(6, 4), 0

        def forward(self, x):
            self.ran += 1
            self.times += 1
            return self.layer(x) * 1e3**self.ran * 1e3**self.times

    found = rows(Momentum(), windows_of(batches=2))
    assert all(row.local_error < 0.02 for row in found.values())


# ------------------------------------------------------------------------------------------ modules of odd kinds


@dataclass
class Boxed:
    values: torch.Tensor
    name: str = "x"


class Pair(NamedTuple):
    values: torch.Tensor
    count: torch.Tensor


CONTAINERS = {
    "tensor": (lambda y: y, lambda y: y),
    "dict": (lambda y: {"a": [y]}, lambda out: out["a"][0]),
    "named tuple": (lambda y: Pair(y, torch.arange(3)), lambda out: out.values),
    "dataclass": (Boxed, lambda out: out.values),
    "twice the same": (lambda y: (y, y), lambda out: (out[0] + out[1]) / 2),
}


def test_outputs_and_inputs_in_containers(subtests):
    plain = rows(mlp(Apply(torch.tanh), Apply(lambda y: y / 3)), windows_of())
    for kind, (put, take) in CONTAINERS.items():
        model = mlp(Apply(lambda x, put=put: put(x.tanh())), Apply(lambda box, take=take: take(box) / 3))
        found = rows(model, windows_of())
        with subtests.test(kind):
            for name in ("1", "2"):
                assert found[name].local_error == pytest.approx(plain[name].local_error, rel=1e-5)
                assert found[name].sensitivity == pytest.approx(plain[name].sensitivity, rel=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.stem, self.inner, self.reentrant = nn.Linear(6, 6), mlp(nn.GELU(), nn.Dropout(0.2)), reentrant

    def forward(self, x):
        x = self.stem(x)
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    plain, found = (rows(seeded(Checkpointed)(it), windows_of(2)) for it in (None, reentrant))
    assert plain.keys() == found.keys()
    for name, row in plain.items():
        assert found[name].sensitivity == pytest.approx(row.sensitivity, rel=1e-5) and row.sensitivity > 0
        assert found[name].local_error == pytest.approx(row.local_error, rel=1e-5)
        assert found[name].calls == row.calls


class Taught(nn.Module):
    """A teacher that runs without gradients; `strict` does with its output what a gradient would not allow."""

    def __init__(self, gradients, gain=1.0, strict=False):
        super().__init__()
        self.teacher, self.student, self.gradients, self.strict = nn.Linear(6, 4), nn.Linear(6, 4), gradients, strict
        self.teacher.requires_grad_(False)
        with torch.no_grad():
            self.teacher.weight *= gain

    def forward(self, x):
        with nullcontext() if self.gradients else torch.no_grad():
            target = self.teacher(x)
        if self.strict:
            target = torch.from_numpy(target.float().numpy())
        return self.student(x) - target.float().clamp(-1, 1)


def test_a_frozen_module_has_a_say_in_the_loss():
    found = rows(seeded(Taught)(gradients=True), windows_of())
    assert found["teacher"].sensitivity > 0 and found["teacher"].gradient_error is None


def test_an_output_that_must_not_need_a_gradient_is_left_alone():
    found = rows(seeded(Taught)(gradients=True, strict=True), windows_of())
    assert found["teacher"].sensitivity == 0 and found["teacher"].local_error > 0
    assert found["student"].sensitivity > 0


def test_without_gradients_only_what_is_not_finite_counts():
    assert rows(seeded(Taught)(gradients=False), windows_of())["teacher"].sensitivity == 0
    assert rows(seeded(Taught)(gradients=False, gain=1e6), windows_of(), FP16)["teacher"].sensitivity == math.inf


def test_tied_weights_and_modules_under_two_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.out.weight = self.inp.weight
            self.again, self.head = self.inp, nn.Linear(6, 4)

        def forward(self, x):
            return self.head(self.again(self.out(self.inp(x)).tanh()))

    found = rows(seeded(Tied)(), windows_of())
    assert found["inp"].calls == 2 and found["out"].gradient_error == found["inp"].gradient_error > 0


def test_what_hooks_leave_for_the_loss_is_of_the_real_run():
    model, kept = mlp(nn.Tanh()), {}
    model[1].register_forward_hook(lambda module, args, output: kept.update(features=output))

    def objective(model, batch):
        return squared(model, batch) + kept["features"].float().square().mean()

    (window,) = windows_of()
    trial = plain_trial(model, objective)
    assert gradient_error(measured(trial, window), trial.run(window)) == 0.0
    assert rows(model, [window], objective=objective)["0"].sensitivity > 0


def test_a_forward_that_differentiates():
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            (score,) = torch.autograd.grad(self.energy(x).float().sum(), x, create_graph=True)
            return (score @ torch.ones(6, 4, device=score.device)).tanh()

    found = rows(seeded(Score)(), windows_of())
    assert found[""].sensitivity > 0 and found["energy.0"].local_error > 0


def test_one_of_two_outputs_may_have_no_say_in_the_loss():
    factors = Apply(lambda x: torch.linalg.qr((x.T @ x).float()))
    found = rows(mlp(factors, Apply(lambda factors: factors[0])), windows_of(samples=16))
    assert found["1"].sensitivity > 0


def test_in_place_on_the_input():
    model = mlp(Apply(lambda x: x.mul_(2)), Apply(lambda x: x.add_(1 / 3)), nn.ReLU(inplace=True))
    (window,) = windows_of()
    trial = plain_trial(model, squared)
    assert gradient_error(measured(trial, window), trial.run(window)) == 0.0
    assert rows(model, [window])["2"].local_error > 0


DTYPES = {
    "float64": lambda: nn.Sequential(nn.Linear(6, 4)).double(),
    "complex": lambda: mlp(Apply(lambda x: torch.fft.rfft(x.float())), Apply(lambda z: torch.fft.irfft(z, 16))),
    "integers": lambda: mlp(Apply(lambda x: (x, x.argmax(-1))), Apply(lambda x, *_: x[0] * x[1].unsqueeze(-1))),
    "no outputs": lambda: mlp(Apply(lambda x: x[:, :0]), Apply(lambda x: F.pad(x, (0, 16)))),
}


def test_other_dtypes_pass(subtests):
    for kind, make in DTYPES.items():
        if kind == "float64" and RELEASE < (2, 13):  # whose mse_loss has no backward for two dtypes
            continue
        (window,) = windows_of()
        if kind == "float64":
            window = [tuple(it.double() for it in batch) for batch in window]
        with subtests.test(kind):
            for row in rows(make(), [window]).values():
                assert math.isfinite(row.sensitivity)


def test_recurrent_and_attention_layers():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 4)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x):
            return self.head(self.layer(self.rnn(x.unsqueeze(1).expand(-1, 5, -1))[0]).mean(1))

    found = rows(seeded(Mixed)(), windows_of())
    assert found.keys() >= {"rnn", "head", "layer.self_attn", "layer.linear1", "layer.linear2"}
    assert all(found[name].sensitivity > 0 for name in ("rnn", "layer.self_attn", "head"))


def test_an_empty_batch():
    window = [(torch.zeros(0, 6), torch.zeros(0, 4))]
    for row in rows(mlp(nn.Tanh()), [window]).values():
        assert not math.isnan(row.sensitivity)


def test_compiled_and_scripted_modules():
    """TorchScript takes no hooks and no pins: what it does in low precision is that of the module around it."""
    model = mlp(nn.Sequential(torch.jit.script(nn.Linear(16, 16))), nn.Tanh())
    model[0] = torch.compile(model[0])
    found = rows(model, windows_of())
    assert found.keys() == {"0._orig_mod", "1", "2", "3"}
    assert all(row.sensitivity > 0 for row in found.values() if row.gradient_error is not None)


# ------------------------------------------------------------------------------------------------------- ranks


@contextmanager
def alone_in_bf16(layer):
    """Within it, the layer computes under autocast, and gives fp32."""
    forward = layer.forward

    def low_forward(x):
        with torch.autocast(DEVICE.type, BF16):
            return forward(x).float()

    layer.forward = low_forward
    try:
        yield
    finally:
        del layer.forward


def test_the_rank_is_that_of_the_true_errors():
    """Against runs in which only one module's own ops are low; beside it the local error, which knows nothing."""
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(0)
    gains = (1.0, 30.0, 0.03, 10.0, 0.3)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 4) for _ in gains)

        def forward(self, x):
            return sum(gain * layer(x).float().tanh() for gain, layer in zip(gains, self.layers, strict=True))

    model, windows = Branches(), windows_of(2, samples=32)
    trial = plain_trial(model, squared)
    found = rows(model, windows)
    names = [f"layers.{i}" for i in range(len(gains))]
    truth = []
    for name in names:
        squares = 0.0
        for window in windows:
            only = alone_in_bf16(model.get_submodule(name))
            squares += gradient_error(trial.run(window, watch=[only]), trial.run(window)) ** 2
        truth.append(squares)
    assert stats.spearmanr([found[name].sensitivity for name in names], truth).statistic > 0.85
    assert stats.spearmanr([found[name].local_error for name in names], truth).statistic < 0.6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    model = mlp(nn.Dropout(0.1), nn.GELU()).cuda()
    windows = [[tuple(it.cuda() for it in batch) for batch in window] for window in windows_of(2)]
    for dtype in (BF16, FP16):
        found = rows(model, windows, dtype)
        assert all(0 < found[name].local_error < 0.02 and found[name].sensitivity > 0 for name in ("0", "3"))
