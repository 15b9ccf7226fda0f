"""Modules that compute in fp32 because a pattern names them, with no line of the model changed."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
import types

import pytest
import torch
import torch._dynamo.testing
from programs import DEADLINE_SECONDS
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_recipes.errors import ConfigError, PrecisionError
from amp_recipes.precision.autocast import fwd_default_precision
from amp_recipes.precision.pins import decorated_modules, pin_fp32

BF16 = torch.bfloat16


class Spy(nn.Module):
    """A linear layer that notes the dtype of its input and whether autocast is on where it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x, scale=1.0):
        self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return self.linear(x) * scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.norm(x))


class Net(nn.Module):
    def __init__(self, checkpointing=False):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"a": Spy(), "b": nn.Linear(4, 2)})
        self.checkpointing = checkpointing

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.heads["a"](x), self.heads["b"](x)


class Outer(nn.Module):
    """A module that holds a Spy and calls it on what autocast made of the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.spy = Spy()

    def forward(self, x):
        return self.spy(self.first(x))


@pytest.fixture(autouse=True)
def leaves_autocast_off():
    yield
    assert not torch.is_autocast_enabled("cpu")


def run(module, *args, **kwargs):
    with torch.autocast("cpu", BF16):
        return module(*args, **kwargs)


def x_low():
    return torch.randn(2, 4).bfloat16()


# --- what is pinned ----------------------------------------------------------------------------------------


NAMES_OF_PATTERNS = [
    (["embed"], ["embed"]),
    (["*.norm"], ["blocks.0.norm", "blocks.1.norm"]),
    (["blocks.?.norm", "embed"], ["embed", "blocks.0.norm", "blocks.1.norm"]),
    (["heads.*"], ["heads.a", "heads.a.linear", "heads.b"]),  # * matches dots
    (["type:LayerNorm"], ["blocks.0.norm", "blocks.1.norm"]),
    (["type:L*Norm", "type:Spy"], ["blocks.0.norm", "blocks.1.norm", "heads.a"]),
    (["blocks"], ["blocks.0", "blocks.1"]),  # a ModuleList has no forward
    (["heads"], ["heads.a", "heads.b"]),
    (["type:ModuleDict"], ["heads.a", "heads.b"]),
    ([], []),
    (["embed", "embed", "em*"], ["embed"]),
]


def test_patterns_pin_by_name_and_by_class(subtests):
    for patterns, names in NAMES_OF_PATTERNS:
        with subtests.test(str(patterns)):
            net = Net()
            assert pin_fp32(net, patterns).names == names
            assert [name for name, module in net.named_modules() if "forward" in vars(module)] == names


def test_a_pinned_module_sees_fp32_and_no_autocast():
    net = nn.Sequential(nn.Linear(4, 4), Spy(), nn.Linear(4, 4))
    free, pinned = copy.deepcopy(net), copy.deepcopy(net)
    pin_fp32(pinned, ["1"])
    x = torch.randn(2, 4)
    assert run(free, x).dtype is run(pinned, x).dtype is BF16
    assert free[1].seen == [(BF16, True)]
    assert pinned[1].seen == [(torch.float32, False)]

    with torch.autocast("cpu", BF16):
        expected = net[0](x)
    expected = net[1](expected.float())
    with torch.autocast("cpu", BF16):
        expected = net[2](expected)
        assert torch.equal(pinned(x), expected)


def test_keyword_arguments_and_containers_are_cast_too():
    class Reader(nn.Module):
        def forward(self, batch, *, scale):
            return batch["x"][0].dtype, scale.dtype

    module = nn.ModuleDict({"reader": Reader()})
    pin_fp32(module, ["reader"])
    assert run(module["reader"], {"x": [x_low()]}, scale=x_low()) == (torch.float32, torch.float32)


def test_without_autocast_nothing_changes():
    spy = Spy().bfloat16()
    plain = copy.deepcopy(spy)
    pin_fp32(nn.ModuleList([spy]), ["0"])
    x = x_low()
    assert torch.equal(spy(x), plain(x))
    assert spy.seen == [(BF16, False)]


def test_a_pin_inside_a_pin_and_a_decorated_forward_are_fine():
    outer = Outer()
    pins = pin_fp32(nn.ModuleDict({"outer": outer}), ["outer", "outer.spy"])
    assert run(outer, x_low()).dtype is torch.float32
    assert outer.spy.seen == [(torch.float32, False)]
    assert pins.never_called() == []

    class Decorated(Spy):
        @fwd_default_precision(cast_inputs=None)
        def forward(self, x):
            return super().forward(x)

    decorated = Decorated()
    pin_fp32(decorated, ["type:Decorated"])
    run(decorated, x_low())
    assert decorated.seen == [(torch.float32, False)]


def test_pinning_twice_is_pinning_once():
    net = nn.Sequential(Spy())
    first = pin_fp32(net, ["0"])
    forward = net[0].forward
    second = pin_fp32(net, ["*"])
    assert net[0].forward == forward
    run(net, x_low())
    assert net[0].seen == [(torch.float32, False)]
    assert first.never_called() == []
    assert "0" not in second.never_called()


def test_a_module_under_two_names_is_pinned_by_either_and_once():
    shared = Spy()
    for pattern in ("a", "b"):
        net = nn.ModuleDict({"a": shared, "b": shared})
        assert pin_fp32(net, [pattern]).names == ["a"]


def test_a_forward_that_somebody_set_on_the_instance_is_kept():
    spy = Spy()
    spy.forward = types.MethodType(lambda self, x: Spy.forward(self, x) + 1, spy)
    plain = copy.deepcopy(spy)
    pin_fp32(nn.ModuleList([spy]), ["0"])
    x = x_low()
    assert torch.equal(run(spy, x), plain(x.float()))
    assert spy.seen == [(torch.float32, False)]


def test_state_dict_parameters_and_signature_of_positions_are_as_before():
    net = Net()
    before = list(net.state_dict()), [name for name, _ in net.named_modules()]
    pin_fp32(net, ["*"])
    assert (list(net.state_dict()), [name for name, _ in net.named_modules()]) == before
    net.load_state_dict(Net().state_dict())
    assert inspect.signature(net.heads["a"].forward).bind(x_low(), scale=2.0)


# --- mistakes ----------------------------------------------------------------------------------------------


def test_patterns_that_match_nothing_are_all_reported_with_the_nearest_names():
    net = Net()
    with pytest.raises(ConfigError) as caught:
        pin_fp32(net, ["embd", "type:LayerNrm", "embed", "*.nrm", "type:layernorm", "qqq"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "'embd'" in lines[0] and "Did you mean embed" in lines[0]
    assert "'type:LayerNrm'" in lines[1] and "Did you mean type:LayerNorm" in lines[1]
    assert "'*.nrm'" in lines[2]
    assert "Did you mean type:LayerNorm" in lines[3]  # case counts
    assert "there are embed, blocks" in lines[4]
    assert not any("forward" in vars(module) for module in net.modules())  # the good pattern did not act


def test_a_string_instead_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"expected a list of patterns: \['embed'\]"):
        pin_fp32(Net(), "embed")


def test_what_has_no_forward_and_no_children_is_refused_by_name():
    module = nn.ModuleDict({"bias": nn.ParameterList([nn.Parameter(torch.ones(1))]), "spy": Spy()})
    with pytest.raises(ConfigError, match=r"'bias' \(ParameterList\).*cannot be pinned"):
        pin_fp32(module, ["spy", "bias"])
    assert "forward" not in vars(module["spy"])
    assert pin_fp32(module, ["*"]).names == ["spy", "spy.linear"]  # beside others it is no mistake


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_modules_are_refused_and_refuse_pins():
    scripted = nn.ModuleDict({"scripted": torch.jit.script(nn.Linear(2, 2))})
    with pytest.raises(PrecisionError, match="'scripted' is a TorchScript module"):
        pin_fp32(scripted, ["scripted"])
    net = nn.Sequential(nn.Linear(2, 2))
    pin_fp32(net, ["0"])
    with pytest.raises(torch.jit.frontend.NotSupportedError):  # not silently without the pin
        torch.jit.script(net)


# --- what a pin survives -----------------------------------------------------------------------------------


def via_torch_save(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), via_torch_save],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_is_pinned_and_uses_its_own_weights(clone):
    net = Net()
    pins = pin_fp32(net, ["heads.a", "*.norm"])
    copied = clone(net)
    x = torch.randn(2, 4)
    assert torch.equal(run(copied, x)[0], run(net, x)[0])
    assert copied.heads["a"].seen == [(torch.float32, False)]
    assert pins.never_called() == []
    with torch.no_grad():
        copied.heads["a"].linear.weight.zero_()
        copied.heads["a"].linear.bias.fill_(3.0)
    assert torch.equal(run(copied, x)[0], torch.full((2, 4), 3.0))
    assert not torch.equal(run(net, x)[0], run(copied, x)[0])
    assert len(net.heads["a"].seen) == 2


def test_a_copy_keeps_the_pin_through_two_generations():
    net = nn.Sequential(Spy())
    pin_fp32(net, ["0"])
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert pin_fp32(copied, ["0"]).names == ["0"]
    run(copied, x_low())
    assert copied[0].seen == [(torch.float32, False)]


def test_an_exception_inside_leaves_autocast_as_it_was():
    class Boom(nn.Module):
        def forward(self, x):
            raise KeyError("boom")

    net = nn.Sequential(Boom())
    pin_fp32(net, ["0"])
    with torch.autocast("cpu", BF16):
        with pytest.raises(KeyError):
            net(x_low())
        assert torch.is_autocast_enabled("cpu")


def test_gradients_are_those_of_fp32():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reference = copy.deepcopy(net)
    pin_fp32(net, ["1"])
    x = torch.randn(2, 4)
    run(net, x).square().sum().backward()
    reference[1](run(reference[0], x).float()).square().sum().backward()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_pinned(use_reentrant):
    net = nn.Sequential(nn.Linear(4, 4), Spy())
    pin_fp32(net, ["1"])
    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", BF16):
        out = checkpoint(net, x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert net[1].seen == [(torch.float32, False)] * 2


def test_weights_exchanged_by_functional_call_are_used():
    net = nn.Sequential(nn.Linear(4, 4))
    pin_fp32(net, ["0"])
    other = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    with torch.autocast("cpu", BF16):
        result = torch.func.functional_call(net, other, (x_low(),))
    assert torch.equal(result, torch.zeros(2, 4))


@pytest.fixture
def clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class PlainNet(nn.Module):
    def __init__(self, checkpointing=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.unused = nn.Bilinear(4, 4, 4)
        self.checkpointing = checkpointing

    def forward(self, x):
        with torch.autocast("cpu", BF16):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.extended), True])
def test_pinned_modules_compile_into_one_graph(clean_dynamo, checkpointing):
    torch.manual_seed(0)
    net = PlainNet(checkpointing)
    free = copy.deepcopy(net)
    pins = pin_fp32(net, ["*.norm", "blocks.2", "unused"])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    x = torch.randn(2, 4)
    for _ in range(2):
        result = compiled(x)
    assert counter.frame_count == 1
    assert result.dtype is torch.float32
    assert pins.never_called() == ["unused"]
    assert torch.equal(result, net(x))
    assert not torch.equal(result, free(x).float())

    def gradients(function):
        net.zero_grad()
        function(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in net.blocks.parameters()]

    for ours, theirs in zip(gradients(compiled), gradients(net), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.extended  # an interpreter imports torch anew
def test_importing_the_room_does_not_import_the_compiler():
    code = "import sys, amp_recipes.precision; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert run.stdout.strip() == "False", run.stderr


def test_equal_blocks_share_one_compilation(clean_dynamo):
    blocks = nn.ModuleList([Block() for _ in range(4)])
    pins = pin_fp32(blocks, ["*.norm"])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = [torch.compile(block, backend=counter, fullgraph=True) for block in blocks]
    with torch.autocast("cpu", BF16):
        for block in compiled:
            assert block(x_low()).dtype is BF16
    assert counter.frame_count == 1
    assert pins.never_called() == []


def test_a_compiled_module_is_pinned_through_what_it_wraps(clean_dynamo):
    spy_names = nn.ModuleDict({"model": torch.compile(nn.Linear(4, 4), backend="eager")})
    assert pin_fp32(spy_names, ["model"]).names == ["model._orig_mod"]
    assert run(spy_names["model"], x_low()).dtype is torch.float32


def test_export_keeps_pins():
    net = PlainNet()
    pin_fp32(net, ["*.norm", "blocks.2"])
    x = torch.randn(2, 4)
    # Not strict=True: torch 2.13 then asserts a wrong dtype, also where the model itself turns autocast off.
    result = torch.export.export(net, (x,)).module()(x)
    assert result.dtype is torch.float32
    assert torch.equal(result, net(x))


# --- reports -----------------------------------------------------------------------------------------------


def test_a_pin_that_forward_never_calls_is_reported():
    attention = nn.MultiheadAttention(4, 2)
    net = nn.ModuleDict({"attention": attention, "spy": Spy()})
    pins = pin_fp32(net, ["attention.out_proj", "spy"])
    assert pins.never_called() == ["attention.out_proj", "spy"]
    x = torch.randn(3, 2, 4)
    run(attention, x, x, x)
    run(net["spy"], x)
    assert pins.never_called() == ["attention.out_proj"]


def test_self_attention_stays_self_attention_in_a_pin():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2)
    plain = copy.deepcopy(attention)
    pin_fp32(nn.ModuleList([attention]), ["0"])
    x = torch.randn(3, 2, 4).bfloat16()
    x_float = x.float()
    assert torch.equal(run(attention, x, x, x)[0], plain(x_float, x_float, x_float)[0])


def test_calls_without_autocast_count_as_calls():
    net = nn.Sequential(Spy())
    pins = pin_fp32(net, ["0"])
    net(torch.randn(2, 4))
    assert pins.never_called() == []


def test_decorated_modules_are_found_by_their_class():
    class Decorated(nn.Module):
        @fwd_default_precision
        def forward(self, x):
            return x

    class Inherits(Decorated):
        pass

    class Overrides(Decorated):
        def forward(self, x):
            return x

    net = nn.ModuleDict({"a": Decorated(), "b": nn.Sequential(Inherits()), "c": Overrides(), "d": Spy()})
    pin_fp32(net, ["d"])
    assert decorated_modules(net) == ["a", "b.0"]
