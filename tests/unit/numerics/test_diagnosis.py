"""A verdict is true: what is unsafe is not called safe, what is not known is said, and no unproven pin is advised."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from device import DEVICE
from torch import nn
from torch.nn import functional as F

from amp_recipes.data import to_device
from amp_recipes.errors import PrecisionError
from amp_recipes.numerics.diagnosis import Diagnosis, Questions, diagnose, tolerance_for
from amp_recipes.numerics.trial import plain_trial

BF16 = torch.bfloat16


def classified(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def windows(count=8, samples=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [
        [(torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator))]
        for _ in range(count)
    ]
    return to_device(made, DEVICE)


def trial_of(model, objective=classified):
    model.to(DEVICE)
    return plain_trial(model, objective, torch.optim.AdamW(model.parameters(), lr=1e-2))


def healthy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


class Residue(nn.Module):
    """In bf16 nothing is left of what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return (self.linear(x) + 1024.0) - 1024.0


class Branches(nn.Module):
    """The gradient of a small branch is gone, though its share of the whole is small."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(8, 4), Residue()

    def forward(self, x):
        return self.main(x) + 0.15 * torch.relu(self.side(x))


def asked(trial, steps=40, given=None, seconds=1e6, **options):
    return diagnose(trial, given or windows(), Questions("bf16", steps=steps, seconds=seconds, **options))


def test_a_healthy_model_is_safe():
    found = asked(trial_of(healthy()))
    (answer,) = found.answers
    assert answer.pins.decision == "safe" and answer.verdict.startswith("bf16: safe (gradient error ")
    assert "no worse than fp32 (a loss" in answer.verdict and "largest in" in answer.verdict
    assert "systematic part" in answer.verdict and not found.as_dict()["pins"]["modules"]


def test_a_model_that_loses_a_layers_gradient_is_not_called_safe():
    """The error of the whole is within its bound: batches differ by more."""
    torch.manual_seed(0)
    found = asked(trial_of(Branches()))
    (answer,) = found.answers
    assert answer.pins.error_without <= answer.pins.tolerance
    assert answer.pins.without.tensor.startswith("side.") and answer.pins.without.tensor_error > 0.9
    assert answer.pins.decision == "pins" and answer.pins.modules == ["side"], answer.verdict
    assert "side." in answer.verdict and "> 50 %" in answer.verdict and "verified" in answer.verdict


def test_without_training_the_verdict_says_so():
    answer = asked(trial_of(healthy()), steps=0).answers[0]
    assert "gradient error only" in answer.verdict and "no training was requested" in answer.verdict
    torch.manual_seed(0)
    answer = asked(trial_of(Branches()), steps=0).answers[0]
    assert "gradient error only" in answer.verdict and "verified" not in answer.verdict


@pytest.mark.parametrize("model", [healthy, Branches])
def test_without_time_nothing_is_decided_and_nothing_advised(model, tmp_path):
    torch.manual_seed(0)
    found = asked(trial_of(model()), seconds=0.0)
    (answer,) = found.answers
    assert "not decided" in answer.verdict and "time ran out" in answer.verdict
    assert "safe" not in answer.verdict and "fp32_modules" not in answer.verdict
    found.write(tmp_path)
    assert not (tmp_path / "fp32_modules.yaml").exists()
    written = json.loads((tmp_path / "diagnosis.json").read_text())["pins"]
    assert written["error"] is None and written["held_out_error"] is None and written["worst_tensor"] is None
    assert written["fp32_modules"] == [] and written["decision"] == "not decided" and not written["verified"]


def shifted(model, batch):
    """Low precision shifts the loss, which its gradient does not tell."""
    return classified(model, batch) + (0.5 if torch.is_autocast_enabled(DEVICE.type) else 0.0)


def test_pins_that_training_refutes_are_not_advised(tmp_path):
    torch.manual_seed(0)
    found = asked(trial_of(Branches(), shifted))
    (answer,) = found.answers
    assert answer.pins.modules and not answer.pins.verified and answer.pins.fp32_modules == []
    assert "not safe as it is" in answer.verdict and "WORSE" in answer.verdict
    assert "Add to your YAML" not in answer.verdict and "Pin side" not in answer.verdict
    found.write(tmp_path)
    assert not (tmp_path / "fp32_modules.yaml").exists()


def test_what_training_refutes_without_any_pin_is_not_decided():
    torch.manual_seed(0)
    answer = asked(trial_of(healthy(), shifted)).answers[0]
    assert answer.verdict.startswith("bf16: not decided: ") and "WORSE" in answer.verdict


def test_verified_pins_are_written(tmp_path):
    torch.manual_seed(0)
    found = asked(trial_of(Branches()))
    found.write(tmp_path)
    assert yaml.safe_load((tmp_path / "fp32_modules.yaml").read_text()) == {"fp32_modules": ["side"]}
    assert "fp32_modules: [side]" in found.verdict


class Unrepeatable(nn.Module):
    """Draws from a generator that a trial does not know."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.size = nn.Linear(8, 4), size
        self.draw = iter(np.random.default_rng(0).standard_normal, None)

    def forward(self, x):
        return self.linear(x * (1 + self.size * next(self.draw)))


def test_a_step_that_does_not_repeat_itself_is_told():
    found = asked(trial_of(Unrepeatable(0.3)))
    (answer,) = found.answers
    assert answer.pins.decision == "not decided" and "is not reproducible" in answer.verdict
    assert "two runs in fp32 differ by" in answer.verdict and "safe" not in answer.verdict
    assert any("Two runs of the same step in fp32" in note for note in found.notes)
    assert not any("Two runs of the same step in fp32" in note for note in asked(trial_of(healthy()), steps=0).notes)


def test_a_step_that_nearly_repeats_itself_is_judged():
    found = asked(trial_of(Unrepeatable(1e-5)))
    assert found.answers[0].pins.decision == "safe", found.verdict
    assert any("Two runs of the same step in fp32" in note for note in found.notes)


def test_a_loss_that_does_not_fall_proves_nothing():
    model = healthy().to(DEVICE)
    trial = plain_trial(model, classified, torch.optim.SGD(model.parameters(), lr=0.01, maximize=True))
    answer = asked(trial, given=windows(3) * 2).answers[0]
    assert "did not fall" in answer.verdict and answer.pins.decision == "not decided"


def test_sentences_are_grammatical():
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return self.linear(x * 1e6) / 1e6

    torch.manual_seed(0)
    found = diagnose(trial_of(Big()), windows(), Questions(("fp16",), steps=40, seconds=1e6))
    for wrong in ("is not finite >", "e+02 %", "modules of 1", "1 modules", "inf", " nan"):
        assert wrong not in found.answers[0].verdict, found.answers[0].verdict
    assert "overflow" in found.answers[0].verdict
    assert math.isfinite(found.answers[0].pins.error) and found.as_dict()["pins"]["error_without"] == "inf"


def test_a_precision_may_be_given_as_a_string():
    assert Questions("bf16").precisions == Questions(["bf16"]).precisions == ("bf16",)
    with pytest.raises(PrecisionError, match="fp32"):
        Questions("fp32")


def test_the_bound_where_none_is_given():
    assert tolerance_for(BF16, 0.0) == 10 * torch.finfo(BF16).eps
    assert tolerance_for(BF16, 1.0) == 0.2


def test_a_number_that_is_not_finite_does_not_lose_a_finished_diagnosis(tmp_path):
    Diagnosis(seconds=math.inf, notes=["found"]).write(tmp_path)
    written = json.loads((tmp_path / "diagnosis.json").read_text(), parse_constant=pytest.fail)
    assert written["seconds"] == "inf" and written["notes"] == ["found"]
