"""A diagnosis of a run names the layer that hangs on the recipe, or in a list, and says how to register it."""

import pytest
import torch
from device import DEVICE
from torch import nn
from torch.nn import functional as F

from amp_recipes import Brain
from amp_recipes.errors import ConfigError
from amp_recipes.precision import pin_fp32


class Pool(nn.Module):
    """Products of small numbers with large ones, summed."""

    def forward(self, x):
        return (x @ (3e4 * x).mT).mean(-1, keepdim=True) / 3e4


class OnRecipe(Brain):
    """Calls a layer that is in no module."""

    def compute_forward(self, batch, stage):
        return self.modules.head(self.adapter(self.modules.body(batch[0])))

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions.float(), batch[1])


class InList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Pool()]

    def forward(self, x):
        return self.layers[0](x)


def brain_of(body, adapter):
    torch.manual_seed(0)
    modules = {"body": nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), body), "head": nn.Linear(1, 1)}
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)  # noqa: E731
    brain = OnRecipe(modules, optimizer, run_opts={"device": DEVICE, "noprogressbar": True, "precision": "fp16"})
    brain.adapter = adapter
    return brain


def verdict(brain):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 3, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(3)]
    return brain.diagnose(data, precisions=("fp16",), steps=0, windows=3).verdict


@pytest.mark.extended
def test_a_layer_on_the_recipe():
    said = verdict(brain_of(nn.Identity(), Pool()))
    assert "self.adapter is not registered" in said and "Add the layer to `modules` of the Brain" in said
    assert "in self.adapter (not registered)" in said and f"{__name__}.py" in said


@pytest.mark.extended
def test_a_layer_in_a_list_of_a_module():
    said = verdict(brain_of(InList(), nn.Identity()))
    assert "body.2.layers[0] is not registered" in said and "Make body.2.layers an nn.ModuleList" in said
    assert "  fp32_modules: [body.2]" in said


def test_a_pin_of_such_a_layer_is_told_how_to_register_it():
    brain = brain_of(InList(), nn.Identity())
    with pytest.raises(ConfigError, match=r"'body.2.layers.0' matches no module.*Make body.2.layers an nn.ModuleList"):
        pin_fp32(brain.modules, ["body.2.layers.0"])
