"""Each sentence of a verdict is said by a planted network, and where something is wrong it names what to do."""

import functools
import math
import re
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from device import DEVICE
from small_networks import Branches, NoLowBackward, Residue, classified, healthy, trial_of, windows
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp_recipes.numerics import diagnosis
from amp_recipes.numerics.answers import LossScale
from amp_recipes.numerics.diagnosis import Diagnosis, Questions, diagnose
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.numerics.verdict import SENTENCES, Sentence, percent, verdict_of
from amp_recipes.precision import pin_fp32

BF16 = torch.bfloat16


def asked(trial, precisions="bf16", steps=12, given=None, pinned=(), weights="", seconds=math.inf, **options):
    questions = Questions(precisions, steps=steps, seconds=seconds, **options)
    return diagnose(trial, given or windows(), questions, pinned, weights, tell=lambda part: None)


# ---------------------------------------------------------------------- planted networks


class Big(nn.Module):
    """Beyond fp16's largest number inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x * 1e6) / 1e6


class Refusing(nn.Module):
    """A layer that raises an error of another kind than torch's if its input is bf16."""

    def forward(self, x):
        if x.dtype == BF16:
            raise TypeError("no bf16 here")
        return torch.relu(x)


class Complex(nn.Module):
    """torch.complex has no bf16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        y = self.linear(x)
        return torch.complex(y, y).abs()


class Halving(nn.Module):
    def forward(self, x):
        return NoLowBackward.apply(x)


class With(nn.Module):
    """A healthy network before and after a layer."""

    def __init__(self, layer, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8)
        self.layer, self.head = layer, nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.layer(self.before(x)))


class Listed(nn.Module):
    """Keeps its layer where torch does not find it."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer.to(DEVICE)]

    def forward(self, x):
        return self.layers[0](x)


class Gated(nn.Module):
    """Each part loses its gradient in bf16, and works only on batches that name it."""

    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.Linear(8, 4)
        self.sides = nn.ModuleList(Residue() for _ in range(parts))

    def forward(self, x):
        y = self.main(x)
        for index, side in enumerate(self.sides):
            if float(x[0, 0]) == index + 1:
                y = y + 0.15 * torch.relu(side(x))
        return y


class Unwatchable(nn.Module):
    """Raises an error while an instrument watches."""

    def forward(self, x):
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("this kernel cannot be watched")
        return torch.relu(x)


class Slow(nn.Module):
    """Takes a second on its own clock in low precision, as emulated arithmetic does; the first step takes more."""

    def __init__(self, seconds=1.0, first=1.0):
        super().__init__()
        self.clock = [0.0]
        self.seconds = chain([first], repeat(seconds))  # an iterator is not put back after a step on trial

    def forward(self, x):
        low = torch.is_autocast_enabled(DEVICE.type)
        self.clock[0] += next(self.seconds) if low else 0.01
        return torch.relu(x)


def timed(slow):
    """A diagnosis in which time goes by in `slow` alone."""
    now = {"processor_now": lambda device: slow.clock[0]}
    with mock.patch.multiple("amp_recipes.numerics.trial", **now):
        return asked(trial_of(With(slow)), steps=0)


class Hazardous(nn.Module):
    """Seven lines that fp16 cannot take."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        y = self.linear(x)
        y = y.masked_fill(x[:, :4] > 4.1, -1e9)
        y = y.masked_fill(x[:, :4] > 4.2, -2e9)
        y = y.masked_fill(x[:, :4] > 4.3, -3e9)
        y = y.masked_fill(x[:, :4] > 4.4, -4e9)
        y = y.masked_fill(x[:, :4] > 4.5, -5e9)
        y = y.masked_fill(x[:, :4] > 4.6, -6e9)
        return y.masked_fill(x[:, :4] > 4.7, -7e9)


class Elementwise(nn.Module):
    """Nothing that autocast casts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x * self.weight)[:, :4]


class Unrepeatable(nn.Module):
    """Another result each time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.draws = iter(torch.randn(10_000, generator=torch.Generator().manual_seed(0)).tolist())

    def forward(self, x):
        return self.linear(x * (1 + 0.3 * next(self.draws)))


class Energy(nn.Module):
    """Beyond fp16 in the forward, and so are the gradients of its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Linear(8, 1), nn.Linear(9, 4)

    def forward(self, x):
        energy = self.weight((255 * x) ** 2)
        return self.head(torch.cat([x, torch.log1p(energy.abs())], dim=1))


def shifted(model, batch):
    """Low precision shifts the loss, which its gradient does not tell."""
    return classified(model, batch) + (0.5 if torch.is_autocast_enabled(DEVICE.type) else 0.0)


def cancelled_outside(model, batch):
    """What is lost is lost outside of modules."""
    y = model(batch[0])
    eye = torch.eye(4, device=y.device)
    return F.cross_entropy(((y + 1024.0) @ eye).float() - 1024.0, batch[1])


def refusing_outside(model, batch):
    y = model(batch[0])
    y = y @ torch.eye(4, device=y.device)
    if y.dtype == BF16:
        raise ValueError("no bf16 here")
    return F.cross_entropy(y.float(), batch[1])


def huge_loss(model, batch):
    return 1e7 * classified(model, batch)


def small_loss(model, batch):
    return 1e-7 * classified(model, batch)


def maximized(model):
    model.to(DEVICE)
    return plain_trial(model, classified, torch.optim.SGD(model.parameters(), lr=0.01, maximize=True))


def pinned(model, *names):
    model.to(DEVICE)
    pin_fp32(model, names)
    return asked(trial_of(model), pinned=names)


def spoilt():
    given = windows(4)
    given[1][0][0][5, 2] = math.nan
    return given


def flagged():
    """Windows to search on, and three held out that each need another pin."""
    given = windows()
    for index, window in enumerate(given):
        window[0][0][:, 0] = max(0, index - 4)
    return given


NETWORKS: dict[str, Callable[[], Diagnosis]] = {
    "healthy": lambda: asked(trial_of(healthy())),
    "healthy, not trained": lambda: asked(trial_of(healthy()), steps=0, weights="as initialised"),
    "healthy, fp16": lambda: asked(trial_of(healthy()), "fp16"),
    "healthy, no time": lambda: asked(trial_of(healthy()), seconds=0.0),
    "healthy, pin without need": lambda: pinned(healthy(), "0"),
    "healthy, pin of nothing": lambda: asked(trial_of(healthy()), pinned=["nowhere"]),
    "healthy, but loss is shifted": lambda: asked(trial_of(healthy(), shifted)),
    "healthy, not learning": lambda: asked(maximized(healthy()), given=windows(3) * 2),
    "healthy, scale of 2^30": lambda: asked(trial_of(healthy()), "fp16", loss_scale=LossScale(2.0**30)),
    "small loss, scale of 1": lambda: asked(trial_of(healthy(), small_loss), "fp16", loss_scale=LossScale(1.0)),
    "huge loss": lambda: asked(trial_of(healthy(), huge_loss), "fp16"),
    "residue": lambda: asked(trial_of(Branches())),
    "residue, not learning": lambda: asked(maximized(Branches()), given=windows(3) * 2),
    "residue, pinned": lambda: pinned(Branches(), "side"),
    "residue, each batch another": lambda: asked(trial_of(Gated(3)), given=flagged()),
    "residue outside of modules": lambda: asked(trial_of(Branches(), cancelled_outside)),
    "overflow": lambda: asked(trial_of(Big()), "fp16"),
    "overflow in a list": lambda: asked(trial_of(With(Listed(Big()), 4)), "fp16"),
    "raises": lambda: asked(trial_of(With(Refusing()))),
    "raises, not learning": lambda: asked(maximized(With(Refusing())), given=windows(3) * 2),
    "raises outside of modules": lambda: asked(trial_of(healthy(), refusing_outside)),
    "not repeatable": lambda: asked(trial_of(Unrepeatable())),
    "cannot be watched": lambda: asked(trial_of(With(Unwatchable()))),
    "waits": lambda: timed(Slow()),
    "seven hazards": lambda: asked(trial_of(Hazardous()), ("bf16", "fp16"), steps=0),
    "elementwise": lambda: asked(trial_of(Elementwise()), "fp16", steps=0),
    "NaN in the data": lambda: asked(trial_of(healthy()), given=spoilt()),
}


@functools.cache
def diagnosed(name):
    torch.manual_seed(0)
    return NETWORKS[name]()


# Sentence -> the network that makes a verdict say it, and what a reader finds in the verdict to do about it.
NOTHING_TO_DO = ""
TABLE = {
    "safe": ("healthy", NOTHING_TO_DO),
    "safe_pinned": ("residue, pinned", "pins of the run: side"),
    "cured": ("residue", r"Safe with side in fp32(.|\n)*\n  fp32_modules: \[side\]"),
    "refuted": ("healthy, but loss is shifted", "Train in fp32, or test whole trainings: amp-recipes compare"),
    "unsafe": ("residue outside of modules", r"torch.autocast\('\w+', enabled=False\)"),
    "cannot_cured": ("raises", r"Safe with layer in fp32(.|\n)*\n  fp32_modules: \[layer\]"),
    "cannot_open": ("raises, not learning", "Diagnose again with a learning rate"),
    "cannot": ("raises outside of modules", r"test_verdict.py:\d+(.|\n)*Train in fp32, or change that line"),
    "undecided": ("healthy, not learning", "Diagnose again with a learning rate"),
    "fp32": ("NaN in the data", "Repair this first. .*sample 5"),
    "raises": ("raises", r"layer raises an error at \S+test_verdict.py:\d+: TypeError: no bf16 here"),
    "overflows": ("overflow", r"linear \(\|x\| up to \S+ > 65504\)(.|\n)*  fp32_modules: \[linear\]"),
    "tried": ("residue, not learning", r"NOT SAFE(.|\n)*not proven: with side in fp32(.|\n)*with a learning rate"),
    "training": ("healthy", NOTHING_TO_DO),
    "no_training": ("healthy, not trained", "steps=200"),
    "add": ("residue", r"Add to your YAML:\n  fp32_modules: \[side\]\n"),
    "cost": ("residue", NOTHING_TO_DO),
    "no_cost": ("raises", "fp32_modules"),
    "superfluous": ("healthy, pin without need", "Take them out of fp32_modules"),
    "more_time": ("healthy, no time", "--diagnose-minutes=20"),
    "more_windows": ("residue, each batch another", "--diagnose-windows=16"),
    "make_repeatable": ("not repeatable", "deterministic: true"),
    "other_rate": ("healthy, not learning", "learning rate"),
    "outside": ("residue outside of modules", "enabled=False"),
    "change_line": ("raises outside of modules", r"call \.float\(\)"),
    "compare": ("healthy, but loss is shifted", "--precisions=fp32,bf16"),
    "fix_fp32": ("NaN in the data", "sample 5"),
    "scale": ("healthy, fp16", "init_scale 65536"),
    "scale_grows": ("small loss, scale of 1", r"\n  init_scale: 16777216\n"),
    "scale_falls": ("healthy, scale of 2^30", r"init_scale: \d+ avoids it"),
    "no_scale_fits": ("huge loss", "Divide the loss by a constant"),
    "no_scale": ("elementwise", "does not matter"),
    "lost_pin": ("healthy, pin of nothing", "Correct its name in fp32_modules"),
    "more_hazards": ("seven hazards", "diagnosis.json"),
    "weights": ("healthy, not trained", "as initialised"),
    "not_measured": ("cannot be watched", "this kernel cannot be watched"),
    "slow": ("waits", "device with native bf16 arithmetic"),
    "repeats": ("not repeatable", "deterministic: true"),
    "on_cpu": ("healthy", "amp-recipes ops"),
}


def kinds(found):
    return [line.kind for line in verdict_of(found) if isinstance(line, Sentence)]


def test_pins_that_are_not_proven_stand_beside_the_figures_without_them():
    """A verdict that is not safe does not show only figures that are within their bounds."""
    found = diagnosed("residue, not learning")
    _, head, *rows = found.verdict.splitlines()[:5]
    assert re.split(r"  +", head.strip()) == ["as it is", "tried", "bound"]
    (answer,) = found.answers
    largest = [re.split(r"  +", row.strip())[1:3] for row in rows][1]
    assert largest == [percent(answer.pins.without.tensor_error), percent(answer.pins.worst.tensor_error)]
    assert answer.pins.without.tensor_error > 0.5 > answer.pins.worst.tensor_error


def test_no_scale_is_advised_at_which_the_gradients_overflow():
    found = diagnosed("huge loss")
    assert found.underflow.overflows[0] and found.status == 1
    assert "avoids it" not in found.verdict and "every scale overflows, or" in found.verdict
    assert diagnosed("healthy, fp16").status == 0  # the same with the loss divided


def test_each_sentence_has_a_network():
    assert TABLE.keys() == SENTENCES.keys() and {network for network, _ in TABLE.values()} <= NETWORKS.keys()


def test_a_layer_that_is_not_registered_is_pinned_through_its_parent_and_advised_on():
    found = diagnosed("overflow in a list")
    assert found.verdict.startswith("NOT SAFE in fp16. Safe with layer in fp32.")
    assert "  fp32_modules: [layer]" in found.verdict and "Make layer.layers an nn.ModuleList" in found.verdict


@pytest.mark.parametrize("kind", TABLE)
def test_a_network_makes_the_verdict_say_the_sentence_and_it_names_what_to_do(kind):
    if kind == "on_cpu" and DEVICE.type != "cpu":
        pytest.skip("said on a CPU only")
    network, to_do = TABLE[kind]
    found = diagnosed(network)
    assert kind in kinds(found), found.verdict
    assert re.search(to_do, found.verdict), found.verdict
    assert "{" not in found.verdict and "None" not in found.verdict and " inf" not in found.verdict


STATUSES = {"safe": 0, "safe_pinned": 0, "cured": 1, "refuted": 1, "unsafe": 1, "undecided": 2, "fp32": 2}
STATUSES |= {"cannot_cured": 1, "cannot_open": 1, "cannot": 1}


@pytest.mark.parametrize("kind", STATUSES)
def test_the_first_line_and_the_status_agree(kind):
    found = diagnosed(TABLE[kind][0])
    assert kinds(found)[0] == kind and found.status == STATUSES[kind]
    assert found.as_dict()["headlines"] == [found.verdict.splitlines()[0]]


# ---------------------------------------------------------------------- a precision that cannot run


def test_what_raises_in_bf16_leaves_fp16_its_verdict():
    found = asked(trial_of(With(Refusing())), ("bf16", "fp16"))
    bf16, fp16 = found.answers
    assert (bf16.decision, fp16.decision) == ("cannot run", "safe") and found.underflow.counted
    assert bf16.fp32_modules == ["layer"] and bf16.failure.raised.module == "layer"
    assert bf16.failure.raised.line.file == __file__
    assert bf16.as_dict()["failure"]["fp32_modules"] == ["layer"]


def test_the_op_and_the_pin_of_torch_complex_are_named():
    found = asked(trial_of(With(Complex(), 4)))
    raised = found.answers[0].failure.raised
    assert (raised.module, raised.op) == ("layer", "aten::complex")
    assert found.answers[0].fp32_modules == ["layer"] and "fp32_modules: [layer]" in found.verdict


def test_the_pins_of_the_run_stay_in_the_advice():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": Branches(), "second": With(Refusing())}).to(DEVICE)

    def both(model, batch):
        return F.cross_entropy((model["first"](batch[0]) + model["second"](batch[0])).float(), batch[1])

    pin_fp32(model, ["first.side"])
    found = asked(trial_of(model, both), pinned=["first.side"])
    assert found.answers[0].fp32_modules == ["first.side", "second.layer"], found.verdict


def test_an_error_of_the_backward_is_a_verdict():
    found = asked(trial_of(With(Halving())))
    assert found.answers[0].decision == "cannot run" and "no backward in bf16" in found.verdict
    assert found.status == 1


# ---------------------------------------------------------------------- the run's own loss scale


def test_a_scale_that_is_too_low_is_not_safe_and_a_higher_one_is():
    found = diagnosed("small loss, scale of 1")
    (answer,) = found.answers
    assert answer.scale == 1.0 and answer.loss_scale.lost > 0.9 and found.status == 1
    assert found.verdict.startswith("NOT SAFE in fp16 at init_scale 1. Safe at init_scale 16777216.\n")
    assert answer.loss_scale.updates == 24 * 2000
    at_advised = asked(trial_of(healthy(), small_loss), "fp16", loss_scale=LossScale(2.0**24))
    assert at_advised.status == 0 and at_advised.answers[0].scale == 2.0**24


def test_the_share_that_becomes_zero_is_that_of_a_run_in_fp16():
    """Against the gradients of the parameters themselves, which a real fp16 step gives."""
    torch.manual_seed(0)
    trial, given = trial_of(healthy(), small_loss), windows()
    found = asked(trial, "fp16", steps=0, given=given, loss_scale=LossScale(1.0))
    low = trial.run(given[0], torch.float16, 1.0)
    zeros = sum(int((gradient == 0).sum()) for gradient in low.gradients.values())
    assert zeros / sum(gradient.numel() for gradient in low.gradients.values()) > 0.9
    assert found.answers[0].loss_scale.lost > 0.9 > found.answers[0].loss_scale.lost_advised


def test_a_scale_that_is_too_high_backs_off_and_is_safe():
    found = diagnosed("healthy, scale of 2^30")
    scale = found.answers[0].loss_scale
    assert found.status == 0 and scale.met == 2.0 ** (30 - scale.skipped) < 2.0**30
    torch.manual_seed(0)
    trial, scales = trial_of(healthy()), (scale.met, 2 * scale.met)
    finite = [all(trial.run(window, torch.float16, at).is_finite for window in windows()[:5]) for at in scales]
    assert finite == [True, False]


def test_what_overflows_in_the_forward_does_not_spoil_the_advice_on_the_scale():
    torch.manual_seed(0)
    trial = trial_of(Energy())
    found = asked(trial, "fp16")
    (answer,) = found.answers
    scale = answer.loss_scale
    assert (
        answer.fp32_modules == ["weight"]
        and scale.pins == ("weight",)
        and "Loss scale with weight in fp32" in str(found)
    )
    finite = [trial.run(windows()[0], torch.float16, at, ["weight"]).is_finite for at in (scale.met, scale.advised)]
    assert finite == [True, True] and scale.advised > 1000 and scale.lost < 0.01


# ---------------------------------------------------------------------- what it costs


def test_each_part_tells_when_it_begins_and_has_its_processor_time():
    told: list[str] = []
    torch.manual_seed(0)
    questions = Questions(("bf16", "fp16"), steps=12, seconds=math.inf)
    found = diagnose(trial_of(healthy()), windows(), questions, tell=told.append)
    numbers = [tuple(map(int, re.match(r"diagnosis, part (\d+) of (\d+): ", line).groups())) for line in told]
    assert [number for number, _ in numbers[:5]] == [1, 2, 3, 4, 5] and sorted(set(numbers)) == numbers, told
    # Two parts of fp16 are needed only where something overflows, or the scale is too low.
    assert {of for _, of in numbers} == {len(told) + 2} and numbers[-1][0] <= len(told) + 2
    seconds = found.as_dict()["processor_seconds"]
    assert set(seconds) == {"reference", "hazards", "pins of the run", "underflow", "bf16", "fp16"}
    for name in ("bf16", "fp16"):
        assert set(seconds[name]) == {"first step", "census", "drift", "pins", "proof"}
    assert all(value >= 0 for name in ("bf16", "fp16") for value in seconds[name].values())


def test_a_slow_first_step_is_no_slow_precision():
    assert "slow" not in kinds(timed(Slow(0.01, first=1000.0)))


def test_the_advised_scale_is_searched_in_half_of_the_time(monkeypatch):
    given, search = [], diagnosis.search_pins
    monkeypatch.setattr(diagnosis, "search_pins", lambda *of, **how: given.append(how["seconds"]) or search(*of, **how))
    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    asked(trial_of(healthy(), small_loss), "fp16", steps=0, seconds=1000.0, loss_scale=LossScale(1.0))
    assert given == [500.0, 1000.0]  # no time goes by: the second has what the first leaves
    given.clear()
    asked(trial_of(healthy()), "fp16", steps=0, seconds=1000.0)
    assert given == [1000.0]
