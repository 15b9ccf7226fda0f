"""The search for pins: it finds the culprit, no pin can be left out, and what it says of the set is true."""

import json

import pytest
import torch
import yaml
from device import DEVICE
from small_networks import Residue
from torch import nn
from torch.nn import functional as F

from amp_recipes.config import load_hparams
from amp_recipes.data import to_device
from amp_recipes.numerics.drift.drift import drift
from amp_recipes.numerics.pins.gradient_noise import ErrorSums, GradientNoise
from amp_recipes.numerics.pins.proof import SavedBytes, train_with_pins
from amp_recipes.numerics.pins.search import default_tolerance, search_pins
from amp_recipes.numerics.trial import Outcome, Trial, gradient_error, plain_trial

BF16, FP16 = torch.bfloat16, torch.float16


class Sine(nn.Module):
    """Angles of some hundred rad, which bf16 knows to a whole one."""

    def __init__(self, width):
        super().__init__()
        self.frequency = nn.Linear(width, width)
        with torch.no_grad():
            self.frequency.weight *= 400

    def forward(self, x):
        return torch.sin(self.frequency(x)) * 0.3


class Offset(nn.Module):
    """A product that takes away what was added before it."""

    def __init__(self, width):
        super().__init__()
        self.center = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.center.weight.copy_(torch.eye(width) - 1 / width)

    def forward(self, x):
        return self.center(x + 300.0)


class Big(nn.Module):
    """Activations of up to 1e6, beyond fp16."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        with torch.no_grad():
            self.up.weight *= 1e6
            self.down.weight *= 1e-6

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Residual(nn.Module):
    def __init__(self, inner, width=16):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


def classified(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def planted(*inner) -> Trial:
    torch.manual_seed(0)
    layers = [Residual(kind(16)) for kind in inner]
    model = nn.Sequential(nn.Linear(8, 16), Residual(nn.Linear(16, 16)), *layers, nn.LayerNorm(16), nn.Linear(16, 4))
    model.to(DEVICE)
    return plain_trial(model, classified, torch.optim.SGD(model.parameters(), lr=0.01))


def windows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [
        [(torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator))]
        for _ in range(count)
    ]
    return to_device(made, DEVICE)


def searched(trial, dtype, scale=1.0, steps=0, **options):
    ranked = options.pop("ranked", None)
    ranked = drift(trial, windows(2), dtype, scale) if ranked is None else ranked
    return search_pins(trial, windows(3), windows(3, seed=1), dtype, scale, ranked=ranked, steps=steps, **options)


FAULTS = {
    "offset": ((Offset,), BF16, 1.0, {"2", "2.inner", "2.inner.center"}),
    "big": ((Big,), FP16, 1024.0, {"2", "2.inner", "2.inner.up"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_culprit_is_found_alone(fault):
    inner, dtype, scale, cures = FAULTS[fault]
    trial = planted(*inner)
    found = searched(trial, dtype, scale)
    assert found.error_without > found.tolerance == default_tolerance(dtype)
    assert len(found.modules) == 1 and found.modules[0] in cures
    assert found.error <= found.tolerance / 1.25 and found.held_out_error <= found.tolerance
    assert found.verified
    assert found.as_dict()["error_without"] == ("inf" if fault == "big" else found.error_without)
    for window in windows(2, seed=7):
        low = trial.run_finite(window, dtype, scale, found.modules)
        assert gradient_error(low, trial.run(window)) <= found.tolerance


def test_no_pin_can_be_left_out():
    """The sine needs more than its own: what comes to it rounded is rounded four hundred times."""
    trial = planted(Sine, Offset)
    found = searched(trial, BF16)
    assert found.verified and len(found.modules) >= 2
    assert any(name.startswith("2") for name in found.modules)
    for left_out in found.modules:
        pins = [name for name in found.modules if name != left_out]
        errors = [gradient_error(trial.run(it, BF16, pins=pins), trial.run(it)) for it in windows(3)]
        assert max(errors) > found.tolerance / 1.25


def test_no_set_is_run_twice(monkeypatch):
    trial, seen = planted(Sine, Offset), []
    run = Trial.run

    def counted(self, window, dtype=torch.float32, scale=1.0, pins=None, watch=()):
        if dtype is BF16 and not list(watch):
            seen.append((id(window), None if pins is None else frozenset(pins)))
        return run(self, window, dtype, scale, pins, watch)

    ranked = drift(trial, windows(2), BF16)
    search, held_out = windows(3), windows(3, seed=1)
    monkeypatch.setattr(Trial, "run", counted)
    monkeypatch.setattr("amp_recipes.numerics.pins.search.cost", lambda *_: (1.0, 1.0))
    found = search_pins(trial, search, held_out, BF16, 1.0, ranked=ranked, steps=0)
    # The census looks again at the set that was found, and at how it runs without being looked at.
    assert found.verified and len(seen) - len(set(seen)) <= 2


def test_nothing_is_pinned_where_nothing_needs_it():
    found = searched(planted(), BF16, steps=12)
    assert found.modules == [] and found.verified and found.error == found.error_without <= found.tolerance
    assert found.steps == 12 and "no worse than fp32" in found.training


def test_it_says_so_where_pins_do_not_help():
    """The fault lies in the objective, where no module can be pinned."""
    trial = planted()

    def objective(model, batch):
        y = model(batch[0])
        return classified(lambda _: torch.sin((y @ torch.eye(4, device=DEVICE)) * 3000), batch)

    trial = plain_trial(trial.modules, objective)
    found = searched(trial, BF16)
    assert not found.verified and found.modules == []
    assert "outside of modules" in found.undecided and found.decision == "not decided" and found.needed
    assert found.fp32_modules == []
    with pytest.raises(ValueError, match="not verified"):
        found.yaml()


def test_pins_that_stand_stay_or_are_told_as_superfluous():
    found = searched(planted(Offset), BF16, already=["2.inner", "0"])
    assert found.modules == [] and found.verified
    assert found.superfluous == ["0"] and found.fp32_modules == ["2.inner"]


def test_training_decides():
    trial, several = planted(), windows(4)
    good = train_with_pins(trial, several, BF16, 1.0, [], 16)
    assert good.proven and len(good.reference) == len(good.low) == 3
    assert all(len(it) == 16 for it in (*good.reference, *good.low))
    state = {name: it.clone() for name, it in trial.modules.state_dict().items()}

    def broken(model, batch):
        low = torch.is_autocast_enabled(DEVICE.type)
        return classified(model, batch) + ((model[3].bias[0] - 5).square() * 3 if low else 0)

    bad = train_with_pins(plain_trial(trial.modules, broken), several, BF16, 1.0, [], 16)
    assert not bad.proven and "WORSE" in bad.text
    assert all(torch.equal(state[name], it) for name, it in trial.modules.state_dict().items())


def test_losses_that_cancel_are_judged_by_their_size():
    """As those of a critic and a generator: their mean is small beside what rounding does to each."""
    trial = planted()
    take = trial._take
    trial._take = lambda *args: [it for loss in take(*args) for it in (loss + 100.0, -loss.float() - 100.0 + 1e-4)]
    found = train_with_pins(trial, windows(4), BF16, 1.0, [], 12)
    assert not found.proven and "WORSE" not in found.text and "gave no evidence" in found.text
    trial._take = lambda *args: [it for loss in take(*args) for it in (3 * loss.float() + 1.0, -loss.float() - 1.0)]
    found = train_with_pins(trial, windows(4), BF16, 1.0, [], 40)
    assert found.proven


def test_the_rate_is_put_back():
    trial = planted()
    (optimizer,) = trial.optimizers().values()
    optimizer.param_groups[0].update(lr=torch.tensor(1e-6), initial_lr=0.05)
    assert train_with_pins(trial, windows(4), BF16, 1.0, [], 12).steps == 12
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-6)


def test_the_time_is_kept():
    trial = planted(Sine)
    ranked = drift(trial, windows(1), BF16)
    found = search_pins(trial, windows(3), windows(3, seed=1), BF16, 1.0, ranked=ranked, steps=200, seconds=0.0)
    assert not found.verified and "time ran out" in found.undecided and found.error is None
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["error_without"] is None


def test_costs_are_ratios_of_a_step():
    found = searched(planted(Sine), BF16)
    assert found.cost_time > 0 and 0.9 < found.cost_memory < 4


def test_saved_bytes_are_activations():
    model, x = nn.Linear(8, 16, bias=False), torch.randn(32, 8)
    with SavedBytes(model) as saved:
        model(x).square().sum().backward()
    assert saved.bytes == 4 * (32 * 8 + 32 * 16)


def test_what_is_written(tmp_path):
    found = searched(planted(Sine), BF16)
    written = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    keys = {"modules", "tolerance", "error", "held_out_error", "steps", "cost_time", "cost_memory", "verified"}
    assert written.keys() >= keys
    text = found.yaml()
    assert text.startswith("#") and yaml.safe_load(text) == {"fp32_modules": found.modules}
    (tmp_path / "fp32_modules.yaml").write_text(text)
    main = tmp_path / "train.yaml"
    main.write_text("pins: !include:fp32_modules.yaml\nfp32_modules: !ref <pins[fp32_modules]>\n")
    assert load_hparams(main)["fp32_modules"] == found.modules


def test_odd_names_are_quoted():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"a: b": Sine(16), "[c]": nn.Linear(16, 16)})
            self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.out(self.layers["[c]"](self.layers["a: b"](self.inp(x))))

    torch.manual_seed(0)
    trial = plain_trial(Odd().to(DEVICE), classified)
    found = searched(trial, BF16)
    assert found.modules and yaml.safe_load(found.yaml())["fp32_modules"] == found.modules


# ---------------------------------------------------------------------- the three bounds


class Lost(nn.Module):
    """A side branch of which bf16 leaves nothing."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(8, 4), Residue()

    def forward(self, x):
        return self.main(x) + 0.15 * torch.relu(self.side(x))


def test_a_gradient_that_is_wholly_gone_is_seen_in_the_whole_and_alone():
    torch.manual_seed(0)
    found = searched(plain_trial(Lost().to(DEVICE), classified), BF16, tolerance=0.3)
    assert found.error_without < 0.3 and found.without.tensor_error == 1.0 and found.without.tensor.startswith("side")
    assert found.modules and found.verified and found.worst.tensor_error <= 0.5
    assert found.as_dict()["worst_tensor"] == {"name": found.worst.tensor, "error": found.worst.tensor_error}


def outcome(*values):
    return Outcome([torch.zeros(())], {"w": torch.tensor(values, dtype=torch.float32)}, 1.0, 0.0)


def test_what_is_the_same_on_every_batch_is_told_from_what_is_not():
    generator = torch.Generator().manual_seed(0)
    fixed = torch.randn(400, generator=generator)
    found = {}
    for kind in ("bias", "scatter"):
        sums = ErrorSums()
        for _ in range(8):
            wanted = torch.randn(400, generator=generator)
            change = fixed if kind == "bias" else torch.randn(400, generator=generator)
            sums.add(outcome(*(wanted + 0.15 * change).tolist()), outcome(*wanted.tolist()))
        found[kind] = sums.result({"w"})
    assert found["bias"].bias == pytest.approx(0.15, rel=0.1) and found["bias"].bias_floor < 1e-3
    assert found["scatter"].bias < 0.03 and found["scatter"].bias_floor == pytest.approx(0.15 / 8**0.5, rel=0.1)
    assert found["bias"].excess(0.2, 0.08, 0.5) > 1 > found["scatter"].excess(0.2, 0.08, 0.5)


def test_the_error_is_that_of_a_step():
    low, wanted = outcome(1.0, 2.0), outcome(1.0, 4.0)
    sums = ErrorSums()
    assert sums.add(low, wanted) == pytest.approx(gradient_error(low, wanted))
    assert sums.add(outcome(float("nan"), 1.0), wanted) == sums.result({"w"}).error == float("inf")


def test_tensors_of_rounding_noise_are_not_judged():
    noise = GradientNoise()
    noise.add(Outcome([torch.zeros(())], {"w": torch.ones(10), "b": torch.full((3,), 1e-5)}, 1.0, 0.0))
    assert noise.judged == {"w"}


def test_a_bias_alone_starts_the_search():
    """The error is within its bound, but the same on every batch."""
    trial = planted()

    class Shrunk(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            y = self.inner(x)
            return y * 0.85 if torch.is_autocast_enabled(DEVICE.type) else y

    trial.modules[3] = Shrunk(trial.modules[3])
    trial = plain_trial(trial.modules, classified)
    assert searched(trial, BF16, tolerance=0.4).modules == []
    found = searched(trial, BF16, tolerance=0.4, bias_tolerance=0.05)
    assert found.without.error < 0.4 and found.without.bias > 0.05
    assert found.verified and found.modules == ["3"] and found.worst.bias < 0.05


def test_a_step_that_does_not_repeat_itself_gets_no_verdict():
    trial = planted()
    found = searched(trial, BF16, ranked=[], repeats_within=0.03)
    assert found.decision == "not decided" and "is not reproducible" in found.undecided and found.error is None
    assert searched(trial, BF16, ranked=[], repeats_within=1e-6).decision == "safe"


def test_a_held_out_window_that_fails_is_searched_on():
    """The culprit overflows in the windows that are held out, and in no other."""
    trial = planted(Big)
    with torch.no_grad():
        trial.modules[2].inner.up.weight *= 1e-3
        trial.modules[2].norm = nn.Identity()
    quiet, loud = windows(3), windows(2, seed=3)
    for window in loud:
        window[0] = (window[0][0] * 3000, window[0][1])
    rows = drift(trial, quiet[:2], FP16, 64.0)
    assert search_pins(trial, quiet[:2], quiet[2:], FP16, 64.0, ranked=rows, steps=0).decision == "safe"
    found = search_pins(trial, quiet, loud, FP16, 64.0, ranked=rows, steps=0)
    assert any("held-out batch failed" in note for note in found.notes) and found.needed
    assert found.decision == "pins" and found.error_without == float("inf"), (found.notes, found.undecided)


def test_without_a_window_left_to_hold_out_nothing_is_decided():
    trial = planted(Big)
    rows = drift(trial, windows(2), FP16, 1024.0)
    found = search_pins(trial, windows(3), [], FP16, 1024.0, ranked=rows, steps=0)
    assert found.decision == "not decided" and found.helps == "more_windows" and found.fp32_modules == []
