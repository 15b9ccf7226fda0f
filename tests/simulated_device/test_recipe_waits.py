"""What the recipes' own steps wait for."""

import pytest
import simulated
import torch
from recipe_runs import recipe_modules
from test_training import DTYPES

STEPS = 6


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules("speech_recognition") as modules:
        yield modules


def make_recognizer(recipe, precision):
    features = recipe.features.LogMel(8000, num_mels=10)
    front = recipe.model.ConvolutionalFront(10, 16, (4, 4))
    model = recipe.model.SpeechModel(front, recipe.model.RecurrentEncoder(16, 1), 16, 3)
    hparams = {
        "objective": recipe.objectives.CharacterCTC("ab"),
        "features": features,
        "model": model,
        "add_noise": recipe.features.AddNoise(),
        "spec_augment": recipe.features.SpecAugment(max_bands=3),
        "pin_features": True,
        "pin_loss": True,
    }

    class Watched(recipe.train.SpeechRecognizer):
        def on_fit_batch_start(self, batch, should_step):
            self.found.start_step()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.found.end_steps()

    return Watched(
        {"features": features, "model": model},
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        hparams,
        {"device": "simulated", "precision": precision, "init_scale": 2.0**10, "noprogressbar": True},
    )


def make_batches(recipe):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batch = recipe.data.collate(
            [
                {"wave": torch.randn(samples, generator=generator), "target": torch.tensor(target)}
                for samples, target in ((3000, [1, 2, 2]), (2000, [2, 1]))
            ]
        )
        yield {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in batch.items()}


@pytest.mark.parametrize("precision", DTYPES)
def test_speech_recognition_waits_for_nothing_but_ctcs_own_copies(recipe, precision):
    """torch's CTC loss copies its lengths to the device, once for each direction: no program can spare it that."""
    brain = make_recognizer(recipe, precision)
    with simulated.waits() as brain.found:
        brain.fit(range(1), list(make_batches(recipe)))
    inside = [wait for wait in brain.found.of_this_step if 1 < wait.step < STEPS]
    details = [wait.detail for wait in inside if wait.step == 2]
    assert details == [f"lengths of aten::{name} to the device" for name in ("_ctc_loss", "_ctc_loss_backward")]
    assert len(inside) == len(details) * (STEPS - 2), str(brain.found)
