"""What gets gradients that no optimizer uses, and what an optimizer holds in vain, is said after the first update."""

import torch
from device import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_recipes import Brain

BATCHES = [torch.ones(4, 3)] * 3


class Net(nn.Module):
    """A layer in a Python list, and one that is never called, beside one that is."""

    def __init__(self, in_list=True, unused=True):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = [nn.Linear(3, 3, device=DEVICE)] if in_list else nn.ModuleList([nn.Linear(3, 3)])
        if unused:
            self.extra = nn.Linear(3, 3)

    def forward(self, x):
        return self.blocks[0](self.first(x))


class Recipe(Brain):
    head = None

    def compute_forward(self, batch, stage):
        x = self.modules.model(batch)
        return x if self.head is None else self.head["deep"][0](x)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


def said(caplog, model, recipe=Recipe, epochs=1, prepare=lambda brain: None, **options):
    brain = recipe(
        {"model": model},
        lambda them: torch.optim.SGD(them, 0.1),
        run_opts={"device": DEVICE, "noprogressbar": True, **options},
    )
    prepare(brain)
    brain.fit(range(epochs), BATCHES)
    return [record.getMessage() for record in caplog.records if "these parameters" in record.getMessage()]


def test_a_layer_in_a_list_and_one_that_is_not_called_are_named_once(caplog):
    unused, idle = said(caplog, Net(), epochs=2)
    assert "no optimizer holds" in unused and "model.blocks[0].weight, model.blocks[0].bias." in unused
    assert "does not depend on" in idle and "model.extra.weight, model.extra.bias." in idle


def test_a_module_that_the_recipe_keeps_to_itself_is_named(caplog):
    def prepare(brain):
        brain.head = {"deep": [nn.Linear(3, 2, device=DEVICE)]}

    (unused,) = said(caplog, Net(in_list=False, unused=False), prepare=prepare)
    assert "self.head['deep'][0].weight" in unused


def test_a_healthy_model_is_told_nothing(caplog):
    frozen = Net(in_list=False)
    frozen.extra.requires_grad_(False)
    for options in (
        {},
        {"grad_accumulation_factor": 2},
        {"precision": "bf16"},
        {"precision": "fp16", "init_scale": 2.0**60},
    ):
        assert not said(caplog, frozen, **options)
    assert not said(caplog, Net(in_list=False, unused=False))


class Alternating(Recipe):
    """The critic steps first; the generator's loss comes in another window."""

    def init_optimizers(self):
        first, second = self.modules.model.first, self.modules.model.blocks
        self.optimizers_dict = {
            "critic": torch.optim.SGD(first.parameters(), 0.1),
            "generator": torch.optim.SGD(second.parameters(), 0.1),
        }
        self.optimizer = self.optimizers_dict["critic"]

    def fit_batch(self, batch):
        name = "critic" if self.step % 2 else "generator"
        layer = self.modules.model.first if name == "critic" else self.modules.model.blocks[0]
        with self.training_ctx:
            loss = layer(batch).square().mean()
        self.backward(loss, name)
        self.optimizers_step(name)
        return loss.detach()


def test_an_optimizer_whose_turn_has_not_come_holds_nothing_in_vain(caplog):
    assert not said(caplog, Net(in_list=False, unused=False), Alternating)


class Recomputing(Recipe):
    def compute_forward(self, batch, stage):
        return checkpoint(self.modules.model, batch.requires_grad_(), use_reentrant=True)


def test_what_recomputation_hides_is_not_called_idle(caplog):
    assert not said(caplog, Net(in_list=False, unused=False), Recomputing)


def test_a_diagnosis_before_it_neither_reports_nor_takes_the_report(caplog):
    def prepare(brain):
        brain.diagnose(BATCHES, steps=2)
        assert not [it for it in caplog.records if "these parameters" in it.getMessage()]

    assert len(said(caplog, Net(), prepare=prepare, precision="bf16")) == 2
