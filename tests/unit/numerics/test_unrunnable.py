"""A module that the device cannot run in a low precision is named before an update, with the pin that cures it."""

import pytest
import torch
import yaml
from cpu import runs_lstm
from device import DEVICE
from small_networks import NoLowBackward
from torch import nn

from amp_recipes import Brain, Stage
from amp_recipes.errors import PrecisionError
from amp_recipes.loop.runnable import Runnable
from amp_recipes.numerics.pins.unrunnable import find_unrunnable, pinned_by
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.numerics.verdict import settings_of
from amp_recipes.precision.amp_config import device_capabilities

BF16 = torch.bfloat16
BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(autouse=True)
def no_mish_in_low_precision(monkeypatch):
    """A device without Mish in 16 bits: torch's own module raises, as an LSTM does on a CPU without AVX-512."""
    monkeypatch.setattr(nn.Mish, "forward", refuse_autocast(nn.Mish.forward))


def refuse_autocast(forward):
    def refusing(self, x):
        if torch.is_autocast_enabled(DEVICE.type):
            raise RuntimeError("could not create a primitive\nwith more to say")
        return forward(self, x)

    return refusing


class Doubled(nn.Module):
    """A module of the recipe's own that fails too."""

    forward = refuse_autocast(lambda self, x: 2 * x)


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), *layers, nn.Linear(4, 1))


def asked(model, objective=lambda model, batch: model(batch).float().square().mean(), pinned=()):
    return find_unrunnable(plain_trial(model.to(DEVICE), objective), [BATCHES[0].to(DEVICE)], BF16, pinned)


def test_all_that_fails_is_named_of_torchs_own_modules_by_class():
    found = asked(network(nn.Mish(), Doubled(), nn.Mish()))
    assert {pattern: name for pattern, (name, _) in found.errors.items()} == {"type:Mish": "3", "4": "4"}
    assert str(found) == "3 raises 'could not create a primitive'; 4 raises 'could not create a primitive'"


def test_nothing_is_found_where_the_step_runs_or_fails_in_fp32_too():
    def fails(model, batch):
        raise RuntimeError("a mistake of the recipe's")

    assert asked(network()) is None
    assert asked(network(nn.Mish()), pinned=["3"]) is None
    assert asked(network(), fails) is None


def test_what_no_pin_cures_is_left_to_fp32():
    found = asked(network(), lambda model, batch: NoLowBackward.apply(model(batch)).sum())
    assert found.errors == {} and str(found) == ""


# ---------------------------------------------------------------------- in a run


def test_an_error_of_another_kind_counts_where_it_is_asked_for():
    class Refusing(nn.Module):
        def forward(self, x):
            if torch.is_autocast_enabled(DEVICE.type):
                raise AssertionError("fp32 only")
            return x

    trial = plain_trial(network(Refusing()).to(DEVICE), lambda model, batch: model(batch).float().square().mean())
    window = [BATCHES[0].to(DEVICE)]
    found = find_unrunnable(trial, window, BF16, kind=Exception)
    assert found.errors == {"3": ("3", "fp32 only")} and pinned_by(trial.modules, found) == ["3"]
    with pytest.raises(AssertionError, match="fp32 only"):
        find_unrunnable(trial, window, BF16)


class Recipe(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.float().square().mean()


def recipe(model, brain_class=Recipe, **options):
    options = {"device": DEVICE, "noprogressbar": True, **options}
    return brain_class({"model": model}, lambda parameters: torch.optim.SGD(parameters, 0.1), {}, options)


def state_of(brain):
    return [*map(torch.clone, brain.modules.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("option", ["precision", "eval_precision"])
def test_fit_ends_before_the_first_step_and_says_what_to_pin(option):
    brain = recipe(network(nn.Mish()), **{option: "bf16"}, locate_nonfinite=False)
    before = state_of(brain)
    with pytest.raises(PrecisionError) as caught:
        brain.fit(range(1, 3), BATCHES, BATCHES)
    message = str(caught.value)
    assert message.startswith(f"{option} bf16 cannot run this model on {device_capabilities(DEVICE).device_name}: ")
    assert "model.3 raises 'could not create a primitive'" in message
    assert '`fp32_modules: ["type:Mish"]`' in message and f"--{option} fp32" in message
    assert all(map(torch.equal, state_of(brain), before)) and (brain.step, brain.optimizer_step) == (0, 0)

    cured = recipe(network(nn.Mish()), fp32_modules=["type:Mish"], **{option: "bf16"})
    cured.fit(range(1, 3), BATCHES, BATCHES)
    assert cured.optimizer_step == 6


@pytest.mark.parametrize("option", ["precision", "eval_precision"])
def test_a_run_whose_first_batch_was_tried_equals_one_where_it_was_not(option, monkeypatch):
    losses = []
    for tried in (True, False):
        brain = recipe(network(), **{option: "bf16"}, seed=1)
        if not tried:
            monkeypatch.setattr(Runnable, "_try_first_batch", lambda self, batches: None)
        brain.fit(range(1, 3), BATCHES, BATCHES)
        losses.append([brain.avg_train_loss, *state_of(brain)])
    assert losses[0][0] == losses[1][0] and all(map(torch.equal, losses[0][1:], losses[1][1:]))


def test_a_step_of_the_recipes_own_is_blamed_when_it_fails():
    class Own(Recipe):
        def fit_batch(self, batch):
            with self.training_ctx:
                loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            self.backward(loss)
            self.optimizers_step()
            return loss.detach()

    with pytest.raises(PrecisionError, match="type:Mish") as caught:
        recipe(network(nn.Mish()), Own, precision="bf16").fit(range(1, 2), BATCHES)
    assert type(caught.value.__cause__) is RuntimeError


def test_the_pins_that_a_run_has_stay_in_the_advice():
    with pytest.raises(PrecisionError, match=r'fp32_modules: \["model.0", "type:Mish"\]'):
        recipe(network(nn.Mish()), precision="bf16", fp32_modules=["model.0"]).fit(range(1, 2), BATCHES)


def test_evaluation_says_it_too_and_a_module_that_comes_later():
    with pytest.raises(PrecisionError, match=r"eval_precision bf16 .*type:Mish"):
        recipe(network(nn.Mish()), eval_precision="bf16").evaluate(BATCHES)

    class Late(Recipe):
        def compute_forward(self, batch, stage):
            return self.modules.late(batch) if self.step == 3 else self.modules.model(batch)

    model, late = network(), network(nn.Mish())
    options = {"device": DEVICE, "noprogressbar": True, "precision": "bf16"}
    brain = Late({"model": model, "late": late}, lambda parameters: torch.optim.SGD(parameters, 0.1), {}, options)
    with pytest.raises(PrecisionError, match=r"late.3 raises .*type:Mish") as caught:
        brain.fit(range(1, 2), BATCHES)
    assert brain.optimizer_step == 2 and type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), torch.OutOfMemoryError("no memory"), KeyError("x")])
def test_other_errors_stay_as_they_are(error):
    class Failing(Recipe):
        def compute_objectives(self, predictions, batch, stage):
            raise error

    with pytest.raises(type(error)) as caught:
        recipe(network(), Failing, precision="bf16").fit(range(1, 2), BATCHES)
    assert caught.value is error


def test_an_error_that_comes_and_goes_is_not_blamed_on_the_precision():
    class Moody(Recipe):
        calls = 0

        def compute_objectives(self, predictions, batch, stage):
            type(self).calls += 1
            if self.step == 3 and self.calls < 6:  # in the step, and in the first of those that are tried again
                raise RuntimeError("the disk sleeps")
            return super().compute_objectives(predictions, batch, stage)

    with pytest.raises(RuntimeError, match="the disk sleeps") as caught:
        recipe(network(), Moody, precision="bf16").fit(range(1, 2), BATCHES)
    assert not isinstance(caught.value, PrecisionError)


def test_what_fails_in_another_way_when_it_is_tried_again_does_not_hide_the_error():
    class Changing(Recipe):
        calls = 0

        def compute_objectives(self, predictions, batch, stage):
            type(self).calls += 1
            if self.step == 3:
                raise RuntimeError("first") if self.calls < 5 else ValueError("second")
            return super().compute_objectives(predictions, batch, stage)

    with pytest.raises(RuntimeError, match="first"):
        recipe(network(), Changing, precision="bf16").fit(range(1, 2), BATCHES)


def test_a_validation_that_takes_other_batches_is_not_tried_on_those_of_training():
    class Pairs(Recipe):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch["valid" if stage is Stage.VALID else "train"])

    train, valid = ([{name: batch} for batch in BATCHES] for name in ("train", "valid"))
    brain = recipe(network(), Pairs, eval_precision="bf16")
    brain.fit(range(1, 2), train, valid)
    assert brain.optimizer_step == 3


def test_a_diagnosis_names_it_and_the_line_for_the_yaml_cures_it():
    batches = [batch for seed in range(2) for batch in BATCHES]
    found = recipe(network(nn.Mish()), precision="fp16").diagnose(batches, steps=0)
    bf16, fp16 = found.answers
    for answer in (bf16, fp16):
        assert answer.decision == "cannot run" and answer.failure.raised.module == "model.3"
        assert "could not create a primitive" in answer.failure.raised.error
        assert yaml.safe_load("\n".join(settings_of(answer))) == {"fp32_modules": ["type:Mish"]}
    assert found.status == 1 and found.verdict.startswith("CANNOT RUN in fp16. Safe with type:Mish in fp32.")
    cured = recipe(network(nn.Mish()), precision="fp16", fp32_modules=["type:Mish"]).diagnose(batches, steps=0)
    assert cured.status == 0 and cured.verdict.startswith("SAFE in fp16 with the pins of the run: model.3.")


def test_an_lstm_runs_in_bf16_or_is_named():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x):
            return self.lstm(x[None])[0]

    brain = recipe(Recurrent(), precision="bf16")
    if runs_lstm(BF16):
        brain.fit(range(1, 2), BATCHES)
        assert brain.optimizer_step == 3
    else:
        with pytest.raises(PrecisionError, match="type:LSTM"):
            brain.fit(range(1, 2), BATCHES)
