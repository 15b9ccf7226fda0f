"""What is dangerous in low precision is found with its line; the same code without the danger gives nothing."""

import importlib.util
import itertools
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from cpu import recurrent_in_bf16
from device import DEVICE
from torch import nn
from torch.nn import functional as F

from amp_recipes.numerics.hazards import modules as hazard_modules
from amp_recipes.numerics.hazards.calls import _CAST_ON_CUDA_ALONE, _MOVES, _differs_on_cuda
from amp_recipes.numerics.hazards.hazards import find_hazards
from amp_recipes.numerics.hazards.list import KINDS
from amp_recipes.numerics.ops.reference import documented
from amp_recipes.numerics.trial import Trial, plain_trial
from amp_recipes.precision import pin_fp32

X = torch.linspace(-1, 1, 32).reshape(4, 8)
NET = """
import torch
from torch import nn
from torch.nn import functional as F
from amp_recipes import fwd_default_precision

KEEP = torch.linspace(-1, 1, 32).reshape(4, 8) > 0
ONES = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        {body}
"""
_numbers = itertools.count()


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Imports source as a module of the user's."""

    def imported(source):
        name = f"users_code_{next(_numbers)}"
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return imported


def network(user, body):
    """A module whose forward ends with the lines of `body`; y is its layer's output, in low precision."""
    torch.manual_seed(0)
    return user(NET.format(body=textwrap.indent(textwrap.dedent(body).strip(), " " * 8).strip())).Net()


def mean_of_output(model, batch):
    return model(batch).float().mean()


def hazards_of(model, batch=X, objective=mean_of_output):
    return find_hazards(plain_trial(model, objective), [batch])


def marked_line(module):
    """Where the source of `module` says `# here`."""
    lines = Path(module.__file__).read_text().splitlines()
    return module.__file__, 1 + next(number for number, line in enumerate(lines) if "# here" in line)


def source_of(model):
    return sys.modules[type(model).__module__]


def of_kind(hazards, kind):
    return [hazard for hazard in hazards if hazard.kind == kind]


# Each in the forward of a module; the line that does it is marked, unless it is the last.
PRESENT = {
    "mask_value": [
        ("masked_fill", "return y.masked_fill(KEEP, -1e9)", "fp16"),
        ("masked_fill in place", "return (y * 1).masked_fill_(KEEP, -1e5)", "fp16"),
        ("whole number", "return y.masked_fill(KEEP, -100000)", "fp16"),
        ("of a tensor", "return y.masked_fill(KEEP, torch.tensor(-1e9, dtype=y.dtype))", "fp16"),
        ("where", "return torch.where(KEEP, y, -1e9)", "fp16"),
        ("where and a tensor", "return torch.where(KEEP, y, torch.tensor(-1e9))", "fp16"),
        ("full_like", "return torch.where(KEEP, y, torch.full_like(y, -1e9))", "fp16"),
        ("full", "return y + torch.full((8,), -1e9, dtype=y.dtype)", "fp16"),
        ("by index", "y = y * 1\ny[KEEP] = -1e9  # here\nreturn y", "fp16"),
        ("by slice", "y = y * 1\ny[:, 3:] = -1e9  # here\nreturn y", "fp16"),
        ("by a factor", "return y + (1 - KEEP.to(y.dtype)) * -1e9", "fp16"),
        ("added", "return torch.where(KEEP, y, y - 1e9)", "fp16"),
        ("cast", "return y + torch.zeros(4, 8).masked_fill(KEEP, -1e9).to(y.dtype)", "fp16"),
        (
            "of attention",
            "mask = torch.full((4, 4), -1e9).triu(1)\n"
            "return F.scaled_dot_product_attention(y[None], y[None], y[None], attn_mask=mask)  # here",
            "fp16",
        ),
        ("padding", "return F.pad(y, (1, 1), value=-1e9)", "fp16"),
        ("bound", "return y.clamp(max=1e6)", "fp16"),
        ("scatter", "return y.scatter(0, torch.zeros(1, 8, dtype=torch.long), -1e9)", "fp16"),
        ("least of fp32", "return torch.where(KEEP, y, torch.finfo(torch.float32).min)", ""),
    ],
    "eps": [
        ("added", "return y / (y.norm(dim=1, keepdim=True) * 0 + y.abs() + 1e-8)", "fp16"),
        ("before", "return y / (1e-8 + y.abs())", "fp16"),
        ("in place", "return y.abs().add_(1e-12).sqrt()", "fp16"),
        ("clamp", "return y / y.abs().clamp(min=1e-8)", "fp16"),
        ("clamp_min", "return y / y.abs().clamp_min(1e-10)", "fp16"),
        ("maximum", "return y / torch.maximum(y.abs(), torch.tensor(1e-8))", "fp16"),
        ("a buffer", "eps = torch.tensor(1e-9)\nreturn y / (y.abs() + eps)  # here", "fp16"),
        ("where", "return 1 / torch.where(y == 0, 1e-8, y)", "fp16"),
        ("masked_fill", "return 1 / y.masked_fill(y == 0, 1e-8)", "fp16"),
        ("normalize", "return F.normalize(y, dim=-1)", "fp16"),
        ("cosine", "return F.cosine_similarity(y, y + 1, dim=-1)", "fp16"),
        ("a log", "return torch.log(y.sigmoid() + 1e-8)", "fp16"),
        ("just below", "return y + 5e-8", "fp16"),
        ("upper bound", "return torch.log(1 - y.sigmoid().clamp(1e-4, 1 - 1e-4))", ""),
        ("upper bound in bf16", "return torch.log(1 - y.sigmoid().clamp(1e-3, 0.999))", "bf16"),
    ],
    "long_reduction": [
        ("sum", "return y.repeat(100, 1).sum()", ""),
        ("sum that bf16 cannot count", "return y.repeat(20, 1).sum(0).sum() + y.repeat(20, 1).sum()", "bf16"),
        ("cumsum", "return y.repeat(1000, 1).cumsum(0)", ""),
        ("mean", "return y.repeat(2100, 1).mean()", "fp16"),
        ("beyond fp16", "return (y.repeat(100, 1) * 0 + 100).sum()", "fp16"),
    ],
    "exp_of_large": [
        ("exp", "return (y * 0 + 12).exp()", "fp16"),
        ("in place", "return (y * 0 + 12).exp_()", "fp16"),
        ("expm1", "return (y * 0 + 12).expm1()", "fp16"),
        ("exp2", "return torch.exp2(y * 0 + 17)", "fp16"),
        ("cosh", "return torch.cosh(y * 0 - 12)", "fp16"),
        ("power", "return 10 ** (y * 0 + 5)", "fp16"),
        ("everywhere", "return (y * 0 + 90).exp() * 0", ""),
        ("everywhere, in fp32", "return (y.float() * 0 + 90).exp() * 0", ""),
    ],
    "bce": [
        ("function", "return F.binary_cross_entropy(y.sigmoid(), ONES)", ""),
        ("module", "return nn.BCELoss()(y.sigmoid(), ONES)", ""),
        ("fp32", "return nn.BCELoss()(y.float().sigmoid(), ONES)", ""),
    ],
    "not_autocast": [
        ("in place", "return (y * 1).exp_()", ""),
        ("operator", "y = y * 1\ny **= 2  # here\nreturn y", ""),
        ("out=", "out = torch.empty(8, 8)\nreturn y.sum() * torch.mm(x.T, x, out=out)  # here", ""),
        ("matmul in place", "return y.float() + torch.zeros(4, 8).addmm_(x, torch.ones(8, 8))", ""),
        ("dtype=", "return y.softmax(-1, dtype=torch.bfloat16)", ""),
        ("dtype by position", "return torch.softmax(y, -1, torch.bfloat16)", ""),
        (
            "log_softmax of cross_entropy",
            "with torch.autocast('cpu', enabled=False):\n    return F.cross_entropy(y, KEEP.long()[:, 0])  # here",
            "",
        ),
        ("dtype= of a function in Python", "return F.log_softmax(y, -1, dtype=torch.float16)", ""),
        ("dtype= of a sum", "return y.sum(dtype=y.dtype)", ""),
        ("narrowed", "y = y * 1\ny += x  # here\nreturn y", ""),
    ],
    "cpu_is_not_cuda": [
        ("softmax", "return y.softmax(-1)", ""),
        ("layer_norm", "return F.layer_norm(y, (8,))", ""),
        ("norm", "return y.norm(dim=-1)", ""),
        ("power", "return y**3", ""),
        ("grid_sample", "return F.grid_sample(y[None, None], torch.zeros(1, 4, 8, 2), align_corners=False)", ""),
        ("avg_pool3d", "return F.avg_pool3d(y.view(1, 1, 2, 4, 4), 2)", ""),
        ("quantile", "return y * torch.quantile(y, 0.5)", ""),
        ("rfft", "return torch.fft.rfft(y).abs()", ""),
        ("mv", "return y * torch.mv(torch.ones(8, 8), torch.ones(8))", ""),
        ("cross_entropy", "return F.cross_entropy(y, torch.zeros(4, dtype=torch.long))", ""),
    ],
    "value_range": [("input", "return F.linear(ONES * 1e6, torch.ones(8, 8)) * 1e-9 * y.sum()", "fp16")],
    "whole_numbers": [
        ("positions", "return y.mean() * torch.arange(1000).to(y.dtype).mean()", "bf16"),
        ("many positions", "return y.mean() * torch.arange(4000).to(y.dtype).mean()", ""),
    ],
}
# The same without the danger.
ABSENT = {
    "mask_value": [
        'return y.masked_fill(KEEP, float("-inf")).softmax(-1)',
        "return y.masked_fill(KEEP, -1e4)",
        "return y.masked_fill(KEEP, -65504)",
        "return y.float().masked_fill(KEEP, -1e9)",
        "return y + torch.zeros(4, 8).masked_fill(KEEP, -1e9)",
        "return y + torch.zeros(4, 8).masked_fill(KEEP, -torch.inf).to(y.dtype)",
        "return y.masked_fill(KEEP, torch.finfo(y.dtype).min)",
        "return torch.where(KEEP, y, torch.finfo(y.dtype).min)",
        "return y + (1 - KEEP.to(y.dtype)) * torch.finfo(y.dtype).min",
        "return y + torch.full((4, 8), torch.finfo(y.dtype).min / 2).to(y.dtype)",
        "y = y * 1\ny[:, 3:] = torch.finfo(y.dtype).min\nreturn y",
        "return torch.maximum(y, torch.full_like(y, -torch.finfo(y.dtype).max))",
        "return y / 1e6",
        "return y * (y < 1e9)",
        "return torch.maximum(y, torch.tensor(-1e9))",
        "return y[:, torch.tensor(3)] + torch.randint(0, 100000, (4,)).float()",
    ],
    "eps": [
        "return y / (y.abs() + 1e-5)",
        "return y / (y.abs() + 6e-8)",
        "return torch.log(y.float().sigmoid() + 1e-8)",
        "return torch.add(y, y, alpha=1e-9)",
        "return y * 1e-9",
        "return torch.log(y.sigmoid() + torch.finfo(y.dtype).tiny)",
        "return torch.log(1 - y.sigmoid().clamp(max=1 - torch.finfo(y.dtype).eps))",
        "return F.layer_norm(y, (8,), eps=1e-12)",
        "return F.rms_norm(y, (8,), eps=1e-12)",
        "return y.clamp(min=0) + 0.0",
        "return torch.log(1 - y.sigmoid().clamp(0.01, 0.99))",
        "return y.clamp(-1, 1)",
        "return torch.where(KEEP, y, 1.0)",
        "return torch.log(1 - y.float().sigmoid().clamp(1e-4, 1 - 1e-4))",
    ],
    "long_reduction": [
        "return y.repeat(100, 1).sum(dtype=torch.float32)",
        "return y.repeat(100, 1).float().sum()",
        "return y.sum()",
        "return y.repeat(100, 1).mean()",
        "return y.repeat(100, 1).sum(1)",
        "return y * (y.repeat(100, 1) > 0).sum().clamp(max=3)",
    ],
    "exp_of_large": [
        "return y.exp()",
        "return (y.float() * 0 + 12).exp()",
        "return (y * 0 - 100).exp()",
        "return y.masked_fill(KEEP, -torch.inf).exp()",
        "return (y + 100).softmax(-1)",
        "return (y + 100).logsumexp(-1)",
        "return (y + 100) ** 2",
    ],
    "bce": [
        "return F.binary_cross_entropy_with_logits(y, ONES)",
        "with torch.autocast('cpu', enabled=False):\n    return F.binary_cross_entropy(y.float().sigmoid(), ONES)",
    ],
    "not_autocast": [
        "return y.softmax(-1, dtype=torch.float32)",
        "return y.sum(dtype=torch.float32)",
        "return (y * 1).add_(1)",
        "return F.relu(y, inplace=True)",
        "return y.float().exp_()",
        "return (y.softmax(-1) * 1).log_()",  # CUDA has made it fp32
        "return y + torch.zeros(4, 8, dtype=y.dtype)",
        "return y.to(torch.bfloat16).to(dtype=torch.float32)",
        "with torch.autocast('cpu', enabled=False):\n    return (y * 1).exp_()",
        "return F.cross_entropy(y, torch.zeros(4, dtype=torch.long))",  # autocast casts the logits
    ],
    "cpu_is_not_cuda": [
        "return y.float().softmax(-1)",
        "return F.relu(y) + torch.sigmoid(y)",
        "return F.pad(y[None, None], (1, 1, 1, 1), mode='reflect')",
        "return F.huber_loss(y, ONES)",
        "return F.mse_loss(y, ONES)",
        "return F.cross_entropy(y.float(), torch.zeros(4, dtype=torch.long))",
        "return y.softmax(-1, dtype=torch.float32)",
        "with torch.autocast('cpu', enabled=False):\n    return y.softmax(-1)",
        "return F.interpolate(y[None, None], scale_factor=2)",
    ],
    "value_range": ["return F.linear(ONES * 6e4, torch.ones(8, 8)) * 1e-9 * y.sum()"],
    "whole_numbers": [
        "return y.mean() * torch.arange(200).to(y.dtype).mean()",
        "return y.mean() * torch.arange(1000).float().mean()",
        "return y.mean() * torch.arange(256).to(torch.uint8).to(y.dtype).mean()",
    ],
}


@pytest.mark.parametrize("kind", PRESENT)
def test_each_hazard_is_found_on_its_line(user, subtests, kind):
    for name, body, precision in PRESENT[kind]:
        with subtests.test(name):
            model = network(user, body if "# here" in body else f"{body}  # here")
            hazards = hazards_of(model)
            assert of_kind(hazards, "raises") == []
            found = of_kind(hazards, kind)
            assert [(it.file, it.line) for it in found] == [marked_line(source_of(model))] * len(found)
            assert precision in [it.precision for it in found]
            assert len(found) == len({(it.precision, it.message) for it in found}) <= 2


@pytest.mark.parametrize("kind", ABSENT)
def test_the_same_without_the_danger_gives_nothing(user, subtests, kind):
    for body in ABSENT[kind]:
        with subtests.test(body):
            found = hazards_of(network(user, body))
            assert of_kind(found, kind) == of_kind(found, "raises") == []


@pytest.mark.parametrize("how", ["decorated", "pinned", "switched off"])
def test_fp32_regions_have_no_hazards(user, subtests, how):
    """Whichever way the user makes one."""
    for body in (
        "y.masked_fill(KEEP, -1e9)",
        "y / (y.abs() + 1e-8)",
        "y.repeat(100, 1).sum()",
        "(y * 0 + 12).exp()",
        "y.softmax(-1)",
    ):
        source = NET.format(body=f"return {body}")
        if how == "decorated":
            source = source.replace("    def forward", "    @fwd_default_precision\n    def forward")
        elif how == "switched off":
            lines = ["with torch.autocast('cpu', enabled=False):", "    y = y.float()", f"    return {body}"]
            source = NET.format(body="\n        ".join(lines))
        model = user(source).Net()
        if how == "pinned":
            pin_fp32(model, ["*"])
        with subtests.test(body):
            assert hazards_of(model) == []
            assert hazards_of(network(user, f"return {body}")) != []


# ---------------------------------------------------------------------- what the values would have told


def test_what_is_said_of_masks_is_what_fp16_does():
    """Filling is refused, and what computes with the constant becomes infinite."""
    y, keep = torch.ones(4, dtype=torch.float16), torch.tensor([True, False, True, False])
    for value in (-1e9, -1e5, 1e6):
        with pytest.raises(RuntimeError, match="overflow"):
            y.masked_fill(keep, value)
        with pytest.raises(RuntimeError, match="overflow"):
            y.clamp(max=value)
        assert torch.where(keep, value, y).isinf().any()
        assert (y + value).isinf().all() and (y * value).isinf().all()


def test_refused_and_infinite_masks_are_told_apart(user):
    (refused,) = of_kind(hazards_of(network(user, "return y.masked_fill(KEEP, -1e9)")), "mask_value")
    (infinite,) = of_kind(hazards_of(network(user, "return y - KEEP.to(y.dtype) * 1e9")), "mask_value")
    assert "raises an error" in refused.message and "-1e+09" in refused.message
    assert "infinite" in infinite.message and "raises an error" not in infinite.message


def test_what_is_said_of_eps_is_what_fp16_does(user):
    for value, becomes in ((1e-8, 0.0), (2.0**-25, 0.0), (5e-8, 2.0**-24), (6e-8, 2.0**-24)):
        assert float(torch.zeros(1, dtype=torch.float16) + value) == becomes
        found = of_kind(hazards_of(network(user, f"return y + {value!r}")), "eps")
        assert [("becomes 0 " in it.message) for it in found] == ([becomes == 0.0] if value < 2.0**-24 else [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_rounds_to_one(user, dtype):
    bound = 1 - torch.finfo(dtype).eps / 4
    assert float(torch.tensor(bound, dtype=dtype)) == 1.0
    assert float(torch.tensor(bound - 1e-4, dtype=dtype)) < 1.0
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    (found,) = of_kind(hazards_of(network(user, f"return y.clamp(max={bound!r})")), "eps")
    assert short in found.message
    below = of_kind(hazards_of(network(user, f"return y.clamp(max={bound - 1e-4!r})")), "eps")
    assert all(short not in it.message for it in below)


def test_a_long_sum_beyond_fp16_is_worse_than_one_that_is_only_inexact(user):
    (beyond,) = of_kind(hazards_of(network(user, "return (y.repeat(100, 1) * 0 + 100).sum()")), "long_reduction")
    (inexact,) = of_kind(hazards_of(network(user, "return y.repeat(100, 1).sum()")), "long_reduction")
    assert beyond.grade == "wrong" and "e+05, beyond the range of fp16" in beyond.message
    assert inexact.grade != "wrong"


def test_what_cuda_computes_in_fp32_is_a_note(user):
    """On a CPU the eps vanishes; CUDA's autocast has made the probabilities fp32."""
    (here,) = of_kind(hazards_of(network(user, "return torch.log(y.softmax(-1) + 1e-8)")), "eps")
    (both,) = of_kind(hazards_of(network(user, "return torch.log(y.sigmoid() + 1e-8)")), "eps")
    (again,) = of_kind(hazards_of(network(user, "return self.inner(y.softmax(-1)).abs() + 1e-8")), "eps")
    (viewed,) = of_kind(hazards_of(network(user, "return (y.softmax(-1).T * 2)[:2] + 1e-8")), "eps")
    assert (here.grade, both.grade, again.grade, viewed.grade) == ("note", "risk", "risk", "note")
    assert "CUDA" in here.message and "CUDA" not in both.message


def test_memory_that_is_used_again_is_not_taken_for_what_lay_there(user):
    """Whether CUDA keeps a tensor in fp32 goes by its storage, which is freed and given out again."""
    body = """
        for _ in range(20):
            y.softmax(-1)
            z = y.abs() * 1
            z = z + 1e-8  # here
        return z
    """
    (found,) = of_kind(hazards_of(network(user, body)), "eps")
    assert found.grade == "risk"


# ---------------------------------------------------------------------- optimizers and backwards

STEP = """
import torch
from amp_recipes.numerics.trial import Trial


def trial(model, optimizer):
    def take(window, updates, context):
        updates.begin()
        {body}
        updates.step({{"optimizer": optimizer}}, 0.0)
        return [loss.detach()]

    return Trial(model, torch.device("cpu"), take, lambda: {{"optimizer": optimizer}})
"""


def hazards_of_step(user, body):
    module = user(STEP.format(body=textwrap.indent(textwrap.dedent(body).strip(), " " * 8).strip()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    return module, find_hazards(module.trial(model, torch.optim.SGD(model.parameters(), 0.1)), [X])


def test_a_backward_inside_the_region(user, subtests):
    for call in (
        "updates.backward(loss)",
        "loss.backward()",
        "torch.autograd.backward([loss])",
        "torch.autograd.grad(loss, [*model.parameters()])",
    ):
        inside = f"""
            with context:
                loss = model(window[0]).float().mean()
                {call}  # here
        """
        outside = f"""
            with context:
                loss = model(window[0]).float().mean()
            {call}
        """
        with subtests.test(call):
            module, hazards = hazards_of_step(user, inside)
            assert [(it.kind, it.file, it.line) for it in hazards] == [
                ("backward_under_autocast", *marked_line(module))
            ]
            assert hazards_of_step(user, outside)[1] == []


def test_a_backward_inside_the_region_unpins():
    """Why it is a hazard: the backward of what ran in fp32 is cast."""
    layer = nn.Linear(256, 256)
    x = torch.randn(64, 256, requires_grad=True)

    def gradient(is_inside):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                loss = layer(x).square().mean()
            if is_inside:
                loss.backward()
        if not is_inside:
            loss.backward()
        return layer.weight.grad.clone()

    exact, cast = gradient(False), gradient(True)
    assert (exact - cast).norm() / exact.norm() > 1e-4


def test_a_custom_backward_that_asks_for_its_forwards_autocast_is_none(user):
    body = """
        class Cube(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cpu")
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x**3

            @staticmethod
            @torch.amp.custom_bwd(device_type="cpu")
            def backward(ctx, gradient):
                return 3 * ctx.saved_tensors[0] @ torch.eye(1) ** 2 * gradient

        with context:
            loss = Cube.apply(model(window[0]).float()).mean()
        updates.backward(loss)
    """
    assert of_kind(hazards_of_step(user, body)[1], "backward_under_autocast") == []


@pytest.mark.parametrize("call", ['updates.step({"optimizer": optimizer}, 0.0)', "optimizer.step()"])
def test_an_optimizer_step_inside_the_region(user, call):
    module, hazards = hazards_of_step(
        user,
        f"""
        with context:
            loss = model(window[0]).float().mean()
            updates.backward(loss)
            {call}  # here
        """,
    )
    (found,) = of_kind(hazards, "step_under_autocast")
    assert (found.file, found.line) == marked_line(module)
    assert hazards.index(found) == 0, "nothing is worse"
    outside = """
        with context:
            loss = model(window[0]).float().mean()
        updates.backward(loss)
        optimizer.step()
    """
    assert hazards_of_step(user, outside)[1] == []


def test_a_recipe_with_its_own_fit_batch(user):
    """The step and the backward of a Brain's recipe are named by the recipe's lines."""
    module = user(
        """
import torch
from torch.nn import functional as F
from amp_recipes import Brain, Stage


class Wrong(Brain):
    def fit_batch(self, batch):
        with self.training_ctx:
            loss = F.mse_loss(self.modules.model(batch[0]), batch[1])
            self.backward(loss)  # backward
            if self.should_step:
                self.optimizers_step()  # step
        return loss.detach()


class Right(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions, batch[1])
"""
    )
    data = [(torch.randn(8, 8), torch.randn(8, 2)) for _ in range(3)]

    def found(kind):
        torch.manual_seed(0)
        brain = kind({"model": nn.Linear(8, 2)}, torch.optim.AdamW, run_opts={"device": DEVICE, "noprogressbar": True})
        return brain.diagnose(data, precisions=("bf16",), steps=0).hazards

    lines = Path(module.__file__).read_text().splitlines()
    at = {
        word: 1 + next(index for index, line in enumerate(lines) if f"# {word}" in line)
        for word in ("backward", "step")
    }
    hazards = found(module.Wrong)
    assert [(it.kind, it.file, it.line) for it in hazards] == [
        ("step_under_autocast", module.__file__, at["step"]),
        ("backward_under_autocast", module.__file__, at["backward"]),
    ]
    assert found(module.Right) == []


# ---------------------------------------------------------------------- what modules tell

HALF = """
import torch
from torch import nn


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = {inner}

    def forward(self, x):
        return self.inner({x}).float() + x.half().float()
"""


IN_LOW_PRECISION = [
    ("nn.Linear(8, 8).half()", "x.half()", "fp16"),
    ("nn.Linear(8, 8).to(torch.float16)", "x.half()", "fp16"),
    ("nn.Linear(8, 8, dtype=torch.bfloat16)", "x", "bf16"),
    ("nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()", "x", "bf16"),
]


def test_parameters_in_low_precision(user, subtests):
    for inner, x, short in IN_LOW_PRECISION:
        with subtests.test(inner):
            module = user(HALF.format(inner=f"{inner}  # here", x=x))
            model = module.Half()
            (found,) = of_kind(hazards_of(model), "half_parameters")
            assert (found.file, found.line) == marked_line(module)
            assert found.grade == "wrong" and f"stored in {short}" in found.message and found.module.startswith("inner")
            assert "here." in found.message, "one line asks for it; casts of activations in forward are none"
            model.requires_grad_(False)
            model.register_parameter("trained", nn.Parameter(torch.zeros(1)))
            trial = plain_trial(model, lambda model, x: (model(x) + model.trained).mean())
            assert of_kind(find_hazards(trial, [X]), "half_parameters") == [], "frozen ones are not updated"


def test_parameters_in_low_precision_that_no_line_asks_for(user, monkeypatch):
    """A dtype that came from a checkpoint, say: then the class is named, if it is the user's."""
    module = user(
        """
import torch
from torch import nn


class Own(nn.Linear):  # here
    def forward(self, x):
        return super().forward(x.half().float())
"""
    )
    monkeypatch.setattr(hazard_modules, "_users_files", lambda modules: iter([[module.__file__]]))
    for kind, place in ((module.Own, "{}:{}".format(*marked_line(module))), (nn.Linear, "0")):
        model = nn.Sequential(kind(8, 8).bfloat16())
        (found,) = of_kind(hazards_of(model), "half_parameters")
        assert found.place == place and "Perhaps" not in found.message


SCRIPTED = """
import torch
from torch import nn
from amp_recipes import fwd_default_precision


class {first}(nn.Module):{mark}
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    {decorator}
    def forward(self, x):
        return self.layer(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = {head}

    def forward(self, x):
        return self.head(x)
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["torch.jit.script(Head())", "torch.jit.trace(Head(), torch.zeros(1, 8))"])
def test_a_pin_that_torchscript_lost(user, how):
    scripted = user(SCRIPTED.format(first="Head", mark="  # here", decorator="@fwd_default_precision", head=how))
    (found,) = hazards_of(scripted.Net())
    assert (found.kind, found.grade, found.module) == ("scripted_pin", "wrong", "head")
    assert (found.file, found.line) == marked_line(scripted)
    plain = user(SCRIPTED.format(first="Head", mark="  # here", decorator="", head=how))
    (note,) = hazards_of(plain.Net())
    assert (note.kind, note.grade, note.file, note.line) == ("scripted_pin", "note", *marked_line(plain))
    as_it_is = user(SCRIPTED.format(first="Head", mark="", decorator="@fwd_default_precision", head="Head()"))
    assert hazards_of(as_it_is.Net()) == []


# ---------------------------------------------------------------------- no noise


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        causal = torch.ones(time, time, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(causal, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def transformer():
    return nn.Sequential(nn.Embedding(50, 32), *(Block() for _ in range(3)), nn.LayerNorm(32), nn.Linear(32, 50))


def torchs_transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += x
        return F.relu(y)


def resnet():
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2))
    return nn.Sequential(stem, Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.recurrent = recurrent_in_bf16()(16, 32, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, 50)

    def forward(self, words):
        return self.head(self.recurrent(self.embed(words))[0])


WORDS = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))


def language(model, words):
    return F.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())


def images(model, batch):
    return F.cross_entropy(model(batch).float(), torch.zeros(len(batch), dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "batch", "objective", "notes"),
    [
        (transformer, WORDS, language, ["softmax"]),
        (torchs_transformer, WORDS, language, []),
        (resnet, torch.rand(4, 1, 16, 16), images, []),
        (Recurrent, WORDS, language, []),
    ],
)
def test_plain_networks_raise_no_alarm(make, batch, objective, notes):
    """Only what a CPU does not rehearse is remarked, once for each op."""
    torch.manual_seed(0)
    model = make()
    trial = plain_trial(model, objective, torch.optim.AdamW(model.parameters()))
    hazards = find_hazards(trial, [batch])
    assert [(it.kind, it.grade) for it in hazards] == [("cpu_is_not_cuda", "note")] * len(notes)
    assert [it.message.split()[0] for it in hazards] == notes


def test_one_remark_for_an_op_names_all_places_and_modules(user):
    body = "y = y.softmax(-1)  # here\ny = y.softmax(-1) + y.softmax(-1)\nreturn y.softmax(-1)"
    model = nn.Sequential(network(user, body), network(user, body))
    (found,) = hazards_of(model)
    file, line = marked_line(source_of(model[0]))
    assert (found.file, found.line, found.modules) == (file, line, ("0", "1"))
    assert found.also[:2] == (f"{file}:{line + 1}", f"{file}:{line + 2}") and len(found.also) == 5
    assert f"{file}:{line + 1}" in found.message and "2 more" in found.message


def test_what_is_typed_at_a_prompt_has_a_line(monkeypatch):
    """The cells of a notebook are no files."""
    names = {"__name__": "__main__"}
    source = NET.format(body="return y.masked_fill(KEEP, -1e9)")
    exec(compile(source, "<ipython-input-3-0123456789ab>", "exec"), names)
    (found,) = of_kind(hazards_of(names["Net"]()), "mask_value")
    assert found.place == f"<ipython-input-3-0123456789ab>:{source.count(chr(10), 0, source.index('-1e9')) + 1}"


def test_a_line_that_many_modules_run_is_named_once(user):
    one = network(user, "return y / (y.abs() + 1e-8)  # here")
    model = nn.Sequential(*(type(one)() for _ in range(4)), type(one)())
    (found,) = hazards_of(model)
    assert (found.file, found.line) == marked_line(source_of(one))
    assert found.modules == ("0", "1", "2", "3", "4") and found.module == "0"


def test_the_worst_comes_first(user):
    body = """
        y = y.softmax(-1)
        y = y.softmax(-1) * torch.log(y.sigmoid() + 1e-8)
        return self.inner(y).masked_fill(KEEP, -1e9)
    """
    hazards = hazards_of(network(user, body))
    grades = [it.grade for it in hazards]
    assert grades == sorted(grades, key=["wrong", "risk", "note"].index) and set(grades) == {"wrong", "note"}
    assert hazards[0].kind == "mask_value"
    assert {it.kind for it in hazards} <= set(KINDS)


def test_what_diagnosis_json_gets(user):
    (found,) = hazards_of(network(user, "return y.masked_fill(KEEP, -1e9)"))
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert told["kind"] == "mask_value" and told["line"] == found.line and told["file"] == found.file
    assert found.place == f"{found.file}:{found.line}" and told["message"] == found.message


# ---------------------------------------------------------------------- nothing stops the diagnosis


def test_a_step_that_raises_in_bf16_is_told_with_its_line(user):
    """And what was found before it."""
    body = """
        y = y / (y.abs() + 1e-8)
        return y.masked_fill(KEEP, torch.finfo(torch.float32).min)  # here
    """
    model = network(user, body)
    hazards = hazards_of(model)
    assert [it.kind for it in hazards] == ["raises", "mask_value", "eps"]
    for it in hazards[:2]:
        assert (it.file, it.line) == marked_line(source_of(model))
    assert "without overflow" in hazards[0].message and hazards[0].precision == "bf16"
    assert hazards[1].precision == "", "bf16 ends before fp32"


def test_the_trial_is_as_before_after_a_step_that_raised(user):
    model = network(user, "return y.masked_fill(KEEP, torch.finfo(torch.float32).min)")
    trial = plain_trial(model, mean_of_output)
    before = trial.run([X])
    hazards = find_hazards(trial, [X])
    after = trial.run([X])
    assert hazards and torch.equal(before.losses[0], after.losses[0])
    assert not torch.is_autocast_enabled("cpu") and torch._C._len_torch_function_stack() == 0


def test_watching_changes_no_number(user):
    """The step that is watched gives the bits of one that is not."""
    model = network(user, "return F.dropout(torch.log(y.softmax(-1) + 1e-8), 0.5)")
    outcomes = []

    class Remembering(Trial):
        def run(self, *args, **kwargs):
            outcomes.append(super().run(*args, **kwargs))
            return outcomes[-1]

    plain = plain_trial(model, mean_of_output)
    trial = Remembering(model, plain.device, plain._take, plain.optimizers)
    find_hazards(trial, [X])
    bare = trial.run([X], torch.bfloat16)
    assert torch.equal(bare.losses[0], outcomes[0].losses[0])
    assert bare.gradients.keys() == outcomes[0].gradients.keys()
    assert all(torch.equal(bare.gradients[it], outcomes[0].gradients[it]) for it in bare.gradients)


ODD = {
    "float64": "return (y.double() @ torch.ones(8, 8, dtype=torch.float64)).exp()",
    "complex": "return torch.view_as_real(torch.complex(y.float(), x) * torch.ones(8, dtype=torch.complex64))",
    "sparse": "return torch.sparse.mm(x.to_sparse(), self.inner.weight.float()).sum() * y",
    "empty": "return y[:0].exp().sum() + torch.ones(0).sum() + y",
    "in place": "return y.mul_(2).relu_()",
    "int": "return y * (x * 1000).long() * torch.ones(8, dtype=torch.int8)",
    "vmap": "return torch.vmap(lambda row: self.inner(row).tanh())(x)",
    "func": "return torch.func.jvp(self.inner, (x,), (x,))[1]",
    "nested": "return torch.nested.nested_tensor([x[:1], x[:3]]).to(y.dtype).to_padded_tensor(0.0).sum() * y",
    "jagged": "return self.inner(torch.nested.nested_tensor([x[:1], x[:3]], layout=torch.jagged)).values()",
    "meta": "return y * torch.ones(3, device='meta').exp().shape[0]",
    "quantized": "return y * torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()",
    "checkpointed": "return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)",
    "reentrant": "x.requires_grad_()\nreturn torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)",
    "subclass": "return y + nn.Parameter(torch.ones(8)) + torch.masked.mean(x, mask=KEEP)",
    "no gradient": "with torch.no_grad():\n    z = self.inner(x)\nreturn z + y",
    "0-d": "return y.mean() + torch.tensor(3)",
    "foreach": "return torch._foreach_add([y], 1.0)[0]",
    "list": "return torch.stack([y, y]).unbind()[0].split([4, 4], 1)[1]",
}


@pytest.mark.filterwarnings("ignore")
def test_odd_steps_are_watched_without_alarm(user, subtests):
    for name, body in ODD.items():
        with subtests.test(name):
            found = hazards_of(network(user, body), X.clone())
            assert [it for it in found if it.grade != "note"] == []


@pytest.mark.filterwarnings("ignore")
def test_modules_that_are_odd(user):
    """Shared, tied, compiled, without parameters, in a container, made in the step."""
    one = network(user, "return y / (y.abs() + 1e-8)  # here")
    shared = nn.Sequential(one, nn.ModuleDict({"again": one})["again"], nn.Dropout(0.0))
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    compiled = torch.compile(one)
    for model, number in ((shared, 1), (tied, 0), (compiled, 1)):
        assert [(it.file, it.line) for it in hazards_of(model)] == [marked_line(source_of(one))] * number

    class Exp(nn.Module):
        def forward(self, x):
            return nn.Linear(8, 8)(x).detach() + x.exp()

    assert hazards_of(Exp(), X.clone().requires_grad_()) == []


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_whose_source_is_gone(user):
    module = user(SCRIPTED.format(first="Head", mark="", decorator="", head="Head()"))
    model = nn.Sequential(torch.jit.script(module.Head()))
    Path(module.__file__).unlink()
    (found,) = hazards_of(model)
    assert found.kind == "scripted_pin"


def test_the_library_between_torch_and_the_user_is_named(user, tmp_path, monkeypatch):
    """A mask in an installed package: the user's line calls it, and the package's line is told beside it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "attention_library.py").write_text(
        "import torch\n\n\ndef masked(scores, keep):\n    return scores.masked_fill(keep, -1e9)\n"
    )
    monkeypatch.syspath_prepend(folder)
    model = network(user, "import attention_library\nreturn attention_library.masked(y, KEEP)  # here")
    (found,) = of_kind(hazards_of(model), "mask_value")
    assert (found.file, found.line) == marked_line(source_of(model))
    assert found.inside == f"{folder}/attention_library.py:5" and found.inside in found.message


# ---------------------------------------------------------------------- what is claimed of CUDA


def test_the_other_policy_covers_what_the_lists_differ_in():
    """Each op that the CPU's lists make fp32 and CUDA's do not is either remarked or known to move values only."""
    cpu, cuda = documented("cpu"), documented("cuda")
    differing = {name for name, rule in cpu.items() if rule == "float32" and cuda.get(name) != "float32"}
    remarked = {name for name in cpu if _differs_on_cuda(name) and name not in _MOVES}
    spoken_for = {
        "binary_cross_entropy",
        "cross_entropy_loss",
        "huber_loss",
        "nll_loss2d",
    }  # raises; float32 on CUDA, too
    assert differing - remarked - _MOVES <= spoken_for | {name for name in differing if "multilabel_margin" in name}
    assert all(cuda[name] == "lower_precision" and name not in cpu for name in _CAST_ON_CUDA_ALONE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="what CUDA's autocast does needs a CUDA device")
def test_on_cuda_as_on_a_cpu(user):
    model = network(user, "return torch.log(y.sigmoid() + 1e-8) + y.masked_fill(KEEP.cuda(), -1e9)  # here").cuda()
    found = hazards_of(model, X.cuda())
    assert {it.kind for it in found} == {"eps", "mask_value"}
    assert {(it.file, it.line) for it in found} == {marked_line(source_of(model))}
    bce = network(user, "return F.binary_cross_entropy(y.sigmoid(), ONES.cuda())  # here").cuda()
    assert [it.kind for it in hazards_of(bce, X.cuda())] == ["raises", "bce"]
