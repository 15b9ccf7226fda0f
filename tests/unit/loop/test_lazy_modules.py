"""Modules whose sizes follow from the first batch train, and are diagnosed, in each precision."""

import pytest
import torch
from classifiers import Classifier
from device import DEVICE
from torch import nn


def data():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(6, 8, generator=generator)  # noqa: E731
    return [(draw(), torch.randint(0, 4, (6,), generator=generator)) for _ in range(5)]


def brain_of(precision, **options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(4))
    options |= {"device": DEVICE, "noprogressbar": True, "precision": precision}
    return Classifier({"model": network}, lambda p: torch.optim.SGD(p, 0.1), run_opts=options)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("pins", [[], ["model.0"]])
def test_they_train(precision, pins):
    brain = brain_of(precision, fp32_modules=pins)
    brain.fit(range(2), data())
    assert brain.optimizer_step == 10
    assert brain.modules["model"][1].num_batches_tracked.item() == 10  # what was tried before is not counted
    assert {parameter.dtype for parameter in brain.modules.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_they_are_diagnosed(precision):
    brain = brain_of(precision)
    found = brain.diagnose(data(), steps=0)
    assert [answer.name for answer in found.answers][-1] == precision
    assert found.answers[-1].failure is None and not any("Not measured" in note for note in found.notes)
    brain.fit(range(1), data())
    assert brain.modules["model"][1].num_batches_tracked.item() == 5
