"""Pins that do nothing are found, and the reason is the right one."""

import io

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE
from torch import nn

from amp_recipes.numerics.pins.lost import lost_pins
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.precision import fwd_default_precision, pin_fp32

BF16 = torch.bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Scale(nn.Module):
    """Decorated: fp32 wherever autocast is on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    @fwd_default_precision
    def forward(self, x):
        return x @ self.weight


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.weight


class Calls(nn.Module):
    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.function(self, x)


def lost(model, names, x=None, **options):
    """{module: reason} for a step on `x`."""
    x = torch.randn(3, 4) if x is None else x
    trial = plain_trial(model.to(DEVICE), lambda model, x: model(x).float().sum())
    found = lost_pins(trial, [x.to(DEVICE)], names, BF16, **options)
    assert all(set(it) == {"module", "reason"} for it in found)
    assert len({it["module"] for it in found}) == len(found)
    return {it["module"]: it["reason"] for it in found}


def test_pins_that_hold_are_not_lost():
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Sequential(nn.Linear(4, 4)))
    assert lost(model, ["0", "1", "2", "2.0"]) == {}
    assert lost(model, []) == {}


def test_a_dead_pin_names_who_uses_the_weights():
    model = Calls(
        lambda self, x: F.linear(self.attention(x, x, x)[0], self.table.weight) + self.block(x),
        attention=nn.MultiheadAttention(4, 2),
        table=nn.Embedding(4, 4),
        block=Calls(lambda self, x: self.inner.forward(x), inner=nn.Linear(4, 4)),
        unused=nn.Linear(4, 4),
    )
    names = ["attention", "attention.out_proj", "table", "block.inner", "unused"]
    found = lost(model, names, torch.randn(3, 1, 4))
    assert set(found) == {"attention.out_proj", "table", "unused"}, "a pin holds where forward is called past __call__"
    assert "attention used its weights" in found["attention.out_proj"]
    assert "pin attention instead" in found["attention.out_proj"]
    assert "the root used its weights" in found["table"]
    assert found["unused"] == "its forward was not called: this step does not use it"


def test_weights_that_the_recipe_uses_itself():
    model = nn.ModuleDict({"table": nn.Embedding(4, 4), "head": nn.Linear(4, 4)})
    trial = plain_trial(model, lambda model, x: F.linear(model["head"](x), model["table"].weight).sum())
    (found,) = lost_pins(trial, [torch.randn(3, 4)], ["table", "head"], BF16)
    assert found["module"] == "table" and "the recipe's own code used its weights" in found["reason"]
    assert "instead" not in found["reason"], "there is no module to pin"


def test_names_that_match_nothing():
    model = nn.Sequential(nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 4))
    found = lost(model, ["haed", "0", "head.0.1"])
    assert found["haed"] == "matches no module; did you mean head?"
    assert "matches no module" in found["head.0.1"] and set(found) == {"haed", "head.0.1"}


def test_containers_have_no_forward():
    model = Calls(lambda self, x: self.layers[0](x), layers=nn.ModuleList([nn.Linear(4, 4)]))
    found = lost(model, ["layers", "layers.0"])
    assert set(found) == {"layers"} and "no forward" in found["layers"]


def test_what_torchscript_made_of_a_decorated_class_is_named_with_what_ran_low():
    inner = nn.Sequential(nn.Linear(4, 4), Plain())
    model = nn.Sequential(torch.jit.script(Scale()), torch.jit.trace(Scale(), torch.randn(3, 4)), Scale(), inner)
    found = lost(model, ["2"])
    assert set(found) == {"0", "1"}
    for reason in found.values():
        assert f"{__name__}.Scale" in reason and "fwd_default_precision" in reason
        assert "aten::mm in bfloat16" in reason
    # Of an undecorated class nothing is expected.
    assert lost(nn.Sequential(torch.jit.script(Plain())), []) == {}


def test_a_decorated_class_deep_inside_a_script():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = Scale()

        def forward(self, x):
            return self.scale(x)

    found = lost(nn.Sequential(torch.jit.script(Holder())), [])
    assert set(found) == {"0.scale"}
    assert "aten::mm in bfloat16 ran in 0" in found["0.scale"]


def test_pins_of_scripts_do_nothing():
    scripted = torch.jit.script(Plain())
    stream = io.BytesIO()
    torch.jit.save(scripted, stream)
    stream.seek(0)
    block = torch.jit.script(nn.Sequential(nn.Linear(4, 4)))
    model = nn.Sequential(scripted, torch.jit.load(stream), block, torch.jit.trace(Plain(), torch.randn(3, 4)))
    before = vars(scripted).get("forward")
    found = lost(model, ["0", "1", "2.0", "3"])
    assert set(found) == {"0", "1", "2.0", "3"}
    assert all("compiled code ignores pins" in reason for reason in found.values())
    assert f"made from {__name__}.Plain" in found["0"]
    assert "Plain" in found["1"] and "Plain" in found["3"]
    assert "Linear" in found["2.0"], "what a script holds is a script"
    assert vars(scripted).get("forward") is before


def test_a_traced_module_that_was_pinned_when_it_was_traced():
    plain = Plain()
    pin_fp32(plain, ["*"])
    model = nn.Sequential(torch.jit.trace(plain, torch.randn(3, 4)))
    assert "TorchScript" in lost(model, ["0"])["0"]


def test_a_module_that_was_replaced_after_pinning():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Scale())
    pin_fp32(model, ["0", "1", "2", "3"])
    model[1] = nn.Linear(4, 4)
    model[2].forward = lambda x: x * 2
    model[3] = Scale()  # its class is pinned already
    found = lost(model, ["0", "1", "2", "3"], standing=True)
    assert set(found) == {"1", "2"} and all("replaced after pinning" in reason for reason in found.values())
    assert lost(model, ["0", "1", "2"]) == {}, "as a proposal they can be pinned"


def test_a_module_under_two_names():
    shared = nn.Linear(4, 4)
    model = Calls(lambda self, x: self.second(self.first(x)), first=shared, second=shared)
    assert lost(model, ["first", "second"]) == {}
    pin_fp32(model, ["second"])
    assert lost(model, ["second"], standing=True) == {}


def test_nothing_is_left_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pin_fp32(model, ["0"])
    pinned = vars(model[0])["forward"]
    lost(model, ["1", "x"])
    assert vars(model[0])["forward"] == pinned and "forward" not in vars(model[1])
    assert model[0].weight.grad is None
