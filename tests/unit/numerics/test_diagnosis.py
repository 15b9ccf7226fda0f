"""A verdict is true: what is unsafe is not called safe, what is not known is said, and no unproven pin is advised."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from device import DEVICE
from small_networks import Branches, classified, healthy, trial_of, windows
from torch import nn

from amp_recipes.errors import PrecisionError
from amp_recipes.numerics.diagnosis import Diagnosis, Questions, diagnose, tolerance_for
from amp_recipes.numerics.trial import plain_trial

BF16 = torch.bfloat16


def asked(trial, steps=40, given=None, seconds=1e6, **options):
    return diagnose(
        trial, given or windows(), Questions("bf16", steps=steps, seconds=seconds, **options), tell=lambda part: None
    )


def test_a_healthy_model_is_safe():
    found = asked(trial_of(healthy()))
    (answer,) = found.answers
    assert answer.decision == answer.pins.decision == "safe" and found.status == 0
    lines = found.verdict.splitlines()
    assert lines[0] == "SAFE in bf16." and "no worse than fp32" in found.verdict
    figures = ["gradient error", "largest of one parameter", "systematic part"]
    assert [line.split("  ")[1] for line in lines[2:5]] == figures and lines[1].split() == ["measured", "bound"]
    assert not found.as_dict()["pins"]["modules"]


def test_a_model_that_loses_a_layers_gradient_is_not_called_safe():
    """The error of the whole is within its bound: batches differ by more."""
    torch.manual_seed(0)
    found = asked(trial_of(Branches()))
    (answer,) = found.answers
    assert answer.pins.error_without <= answer.pins.tolerance
    assert answer.pins.without.tensor.startswith("side.") and answer.pins.without.tensor_error > 0.9
    assert answer.pins.decision == "pins" and answer.pins.modules == ["side"], found.verdict
    assert found.verdict.startswith("NOT SAFE in bf16. Safe with side in fp32.\n") and found.status == 1
    row = next(line for line in found.verdict.splitlines() if line.startswith("  largest of one parameter"))
    assert "50 %" in row and row.split()[-1].startswith("side.")


def test_without_training_the_verdict_says_so():
    for model in (healthy, Branches):
        torch.manual_seed(0)
        found = asked(trial_of(model()), steps=0)
        assert "no training was requested, so only the gradient was tested" in found.verdict


@pytest.mark.parametrize("model", [healthy, Branches])
def test_without_time_nothing_is_decided_and_nothing_advised(model, tmp_path):
    torch.manual_seed(0)
    found = asked(trial_of(model()), seconds=0.0)
    assert found.verdict.startswith("NOT DECIDED in bf16: the time ran out") and found.status == 2
    assert "safe" not in found.verdict.lower() and "fp32_modules" not in found.verdict
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
    assert found.verdict.startswith("NOT SAFE in bf16. What makes it safe is not decided: ")
    assert "WORSE" in found.verdict and "Add to your YAML" not in found.verdict and found.status == 1
    found.write(tmp_path)
    assert not (tmp_path / "fp32_modules.yaml").exists()


def test_what_training_refutes_without_any_pin_is_not_safe():
    found = asked(trial_of(healthy(), shifted))
    assert found.verdict.startswith("NOT SAFE in bf16: the gradient is within its bounds, but ")
    assert "WORSE" in found.verdict.splitlines()[0] and found.status == 1


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
    assert answer.decision == "not decided" and "is not reproducible" in found.verdict
    assert "two runs in fp32 differ by" in found.verdict and "SAFE" not in found.verdict
    assert any("Two runs of the same step in fp32" in note for note in found.notes)
    assert not any("Two runs of the same step in fp32" in note for note in asked(trial_of(healthy()), steps=0).notes)


def test_a_step_that_nearly_repeats_itself_is_judged():
    found = asked(trial_of(Unrepeatable(1e-5)))
    assert found.answers[0].pins.decision == "safe", found.verdict
    assert any("Two runs of the same step in fp32" in note for note in found.notes)


def test_a_loss_that_does_not_fall_proves_nothing():
    model = healthy().to(DEVICE)
    trial = plain_trial(model, classified, torch.optim.SGD(model.parameters(), lr=0.01, maximize=True))
    found = asked(trial, given=windows(3) * 2)
    assert "did not fall" in found.verdict and found.status == 2


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
        assert wrong not in found.verdict, found.verdict
    assert "overflow" in found.verdict
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
