"""The locator names where a nonfinite value was born, why, and in which samples; and blames no harmless mask."""

import dataclasses
import math
import random
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu import recurrent_in_bf16
from device import DEVICE
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from work import at_most

from amp_recipes.data import to_device
from amp_recipes.numerics.nonfinite.batch_samples import Inseparable, samples_in, take_samples
from amp_recipes.numerics.nonfinite.cause import locate
from amp_recipes.numerics.nonfinite.memory import Written
from amp_recipes.numerics.nonfinite.samples import samples_by_parts
from amp_recipes.numerics.nonfinite.trace import NonfiniteTrace
from amp_recipes.numerics.nonfinite.values import INFINITE, NAN, kind_of, range_of
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.numerics.watch.observe import OUTSIDE

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = math.inf


class Net(nn.Module):
    """Linear, the faulty part, linear: the culprit is called `part`."""

    def __init__(self, part, inputs=6, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.part, self.after = nn.Linear(inputs, width), part, nn.Linear(width, 3)

    def forward(self, x):
        return self.after(self.part(self.before(x)))


class Part(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, h):
        return self.function(h)


def batch_of(samples=8, features=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, features, generator=generator), torch.arange(samples) % 3


def classified(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def located(part, batch=None, dtype=FP32, scale=1.0, objective=classified, **kwargs):
    model = part if isinstance(part, Net) else Net(part if isinstance(part, nn.Module) else Part(part))
    window = batch if isinstance(batch, list) else [batch_of() if batch is None else batch]
    return locate(plain_trial(model.to(DEVICE), objective), to_device(window, DEVICE), dtype, scale, **kwargs)


def line_of(mark):
    """Where in this file `# born: mark` stands."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(f"# born: {mark}")]
    return f"{__file__}:{number}"


def found(report):
    return report.module, report.op.removeprefix("aten::"), report.phase, report.cause


# ---------------------------------------------------------------------------------------------- planted faults


def test_matmul_overflow():
    h = batch_of()[0]
    h[[1, 4]] *= 3000

    def part(h):
        return F.layer_norm(h @ h.mT, (8,))  # born: matmul

    report = located(part, (h, batch_of()[1]), FP16, 1024.0)
    assert found(report) == ("part", "mm", "forward", "precision")
    assert report.samples == [1, 4]
    assert report.line == line_of("matmul")
    assert report.dtype == "float16" and report.made[0].nonfinite
    assert [it.shape for it in report.range] == [(8, 8), (8, 8)] and report.range[0].nonfinite == 0
    assert report.target == "loss" and report.chain == ["part", "after", OUTSIDE]
    assert "fp32_modules: [part]" in report.message and "65504" in report.message


def test_cast_overflow_names_the_module_that_casts_and_the_range():
    x, y = batch_of()
    x[3] *= 1e6
    report = located(nn.Identity(), (x, y), FP16, 1024.0)
    assert found(report) == ("before", "_to_copy", "forward", "precision")
    assert report.samples == [3]
    assert report.range[0].largest == float(x.abs().max()) and report.range[0].dtype == "float32"


def test_overflow_in_a_reduction():
    def part(h):
        total = (h.abs() * 50).repeat(1, 100).sum(-1, keepdim=True)  # born: sum
        return h + total - total.mean()

    x, y = batch_of()
    x[6] *= 15
    report = located(part, (x, y), FP16)
    assert found(report) == ("part", "sum", "forward", "precision")
    assert report.line == line_of("sum") and report.samples == [6]


def test_root_of_zero_has_no_gradient():
    def part(h):
        length = (h - h.detach()).pow(2).sum(-1, keepdim=True).sqrt()  # born: root
        return h + length

    for dtype in (FP32, BF16):
        report = located(part, dtype=dtype)
        assert report.module == "part" and report.phase == "backward" and report.cause == "model"
        assert report.node.startswith("Sqrt") and report.line == line_of("root")
        assert report.samples == list(range(8)) and "eps" in report.message
        assert report.target.startswith("gradient of before.")


def test_log_of_zero_in_some_samples():
    def part(h):
        return torch.log(F.relu(h[:, :1]) + 0.0) * h  # born: log

    report = located(part)
    assert found(report) == ("part", "log", "forward", "model")
    net = Net(nn.Identity())
    dark = (net.before(batch_of()[0])[:, 0] <= 0).nonzero().flatten().tolist()
    assert report.samples == dark and 0 < len(dark) < 8
    assert report.line == line_of("log") and "clamp" in report.message


def test_an_eps_that_fp16_rounds_to_zero():
    def part(h):
        h = torch.where(torch.arange(8, device=h.device)[:, None] == 5, 0.0, h)
        return h / (h.abs().sum(-1, keepdim=True) + 1e-8)  # born: eps

    report = located(part, dtype=FP16)
    assert found(report) == ("part", "div", "forward", "precision")
    assert report.samples == [5] and report.line == line_of("eps")
    assert "rounds its input" in report.message


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_row_that_is_masked_as_a_whole(dtype):
    def part(h):
        scores = h @ h.mT
        allowed = torch.ones(8, 8, dtype=torch.bool, device=h.device).tril()
        allowed[2] = False
        return scores.masked_fill(~allowed, -INF).softmax(-1) @ h  # born: masked

    report = located(part, dtype=dtype)
    assert found(report) == ("part", "_softmax", "forward", "model")
    assert report.samples == [2] and report.line == line_of("masked")
    assert "masked" in report.message


def test_masks_that_came_from_a_buffer_or_from_a_log():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -INF))

        def forward(self, h):
            return (h @ h.mT + self.mask).softmax(-1) @ h

    part = Masked()
    assert located(part).cause == "not replayable"  # causal, and harmless
    part.mask[4] = -INF
    assert found(located(part)) == ("part", "_softmax", "forward", "model")
    report = located(lambda h: (h @ h.mT + torch.ones(8, 8, device=DEVICE).tril(-1).log()).softmax(-1) @ h)
    assert found(report) == ("part", "_softmax", "forward", "model") and report.samples == [0]


def causal(h):
    scores = h @ h.mT
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -INF).softmax(-1) @ h


def test_a_causal_mask_is_never_blamed():
    class Two(nn.Module):
        def __init__(self, fault):
            super().__init__()
            self.attention, self.faulty, self.more = Part(causal), Part(fault), Part(causal)

        def forward(self, h):
            return self.more(self.faulty(self.attention(h)))

    assert located(Two(lambda h: h)).cause == "not replayable"
    assert found(located(Two(lambda h: (h * 0).log()))) == ("part.faulty", "log", "forward", "model")
    report = located(Two(lambda h: h + (h * 0).abs().sqrt()))
    assert (report.module, report.phase) == ("part.faulty", "backward")
    assert found(located(Two(lambda h: h * 1e5), dtype=FP16))[0] == "part.faulty"


def test_a_scale_that_is_too_high_is_benign():
    report = located(lambda h: h * 500, dtype=FP16, scale=2.0**20)
    assert report.cause == "scale" and report.phase == "backward" and report.replays == 2
    assert report.scale == 2.0**20 and "nothing else." in report.message


def test_what_overflows_at_the_scale_does_not_hide_what_is_wrong_at_any():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.loud, self.root = Part(lambda h: h * 500), Part(lambda h: (h.float() * 0).sqrt())

        def forward(self, h):
            return self.loud(h) + self.root(h)

    report = located(Split(), dtype=FP16, scale=2.0**20)
    assert (report.module, report.cause, report.phase) == ("part.root", "model", "backward")


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_samples_that_hold_what_is_not_finite(value):
    x, y = batch_of()
    x[3, 1] = x[6, 0] = value
    report = located(nn.Identity(), (x, y))
    assert (report.module, report.phase, report.cause) == ("before", "forward", "data")
    assert report.samples == [3, 6] and report.external == "batch[0]"
    assert report.range[0].nonfinite == 2


@dataclasses.dataclass
class Pictures:
    image: torch.Tensor
    kind: torch.Tensor


def test_the_part_of_the_batch_is_named():
    x, y = batch_of()
    x[2] = math.nan

    def of_dict(model, batch):
        return F.cross_entropy(model(batch["in"]["image"]), batch["kind"])

    def of_array(model, batch):
        return F.cross_entropy(model(torch.from_numpy(batch["in"]).to(DEVICE)), batch["kind"])

    report = located(nn.Identity(), {"in": {"image": x}, "kind": y}, objective=of_dict)
    assert report.external == "batch['in']['image']" and report.samples == [2]
    report = located(nn.Identity(), Pictures(x, y), objective=lambda model, it: classified(model, (it.image, it.kind)))
    assert report.external == "batch.image" and report.samples == [2]
    report = located(nn.Identity(), {"in": x.numpy().copy(), "kind": y}, objective=of_array)
    assert report.external == "batch['in']" and report.samples == [2]
    y = torch.randn(8, 3)
    y[7] = math.nan
    report = located(nn.Identity(), (batch_of()[0], y), objective=lambda model, it: F.mse_loss(model(it[0]), it[1]))
    assert (report.module, report.cause, report.samples) == (OUTSIDE, "data", [7])


def test_nan_in_the_data_that_is_left_out_again_is_not_the_cause():
    x, y = batch_of()
    x[3] = math.nan
    keep = torch.arange(8, device=DEVICE)[:, None] != 3

    def objective(model, batch):
        x = torch.where(keep, batch[0], 0.0)
        return F.cross_entropy(model(x / (x * 0).sum()), batch[1])

    report = located(nn.Identity(), (x, y), objective=objective)
    assert (report.module, report.op, report.cause) == (OUTSIDE, "aten::div", "model")
    report = located(nn.Identity(), (x, y), objective=lambda model, it: model(it[0])[keep[:, 0]].sum())
    assert report.cause == "data"  # the weight's gradient is 0 * NaN


@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_a_weight_that_is_not_finite(value, dtype):
    net = Net(nn.Linear(8, 8))
    net.part.weight.data[1, 2] = value
    report = located(net, dtype=dtype)
    assert (report.module, report.phase, report.cause) == ("part", "forward", "model")
    assert report.external == "parameter part.weight" and report.samples == []
    assert not net.part.weight[1, 2].isfinite() and net.part.weight.isfinite().sum() == 63  # repaired, and put back


def test_a_buffer_that_is_not_finite_matters_only_where_it_is_used():
    part = nn.BatchNorm1d(8)
    part.running_var[3] = INF
    assert located(part).cause == "not replayable"  # in training it is only written
    part.running_mean[1] = math.nan
    report = located(Net(part.eval()))
    assert report.external == "buffer part.running_mean" and report.module == "part" and report.cause == "model"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.after = recurrent_in_bf16()(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.after(self.recurrent(x)[0][:, -1])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_recurrent_layer(dtype):
    model, y = Recurrent(), torch.arange(4) % 3
    x = torch.randn(4, 5, 6)
    assert locate(plain_trial(model, classified), [(x, y)], dtype).cause == "not replayable"
    x[1, 3] = INF
    report = locate(plain_trial(model, classified), [(x, y)], dtype)
    assert (report.module, report.cause, report.samples) == ("recurrent", "data", [1])
    model.recurrent.weight_hh_l0.data[0, 0] = math.nan
    report = locate(plain_trial(model, classified), [(torch.randn(4, 5, 6), y)], dtype)
    assert report.external == "parameter recurrent.weight_hh_l0" and report.module == "recurrent"


class Attention(nn.Module):
    def __init__(self, gain):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)
        with torch.no_grad():
            self.attention.in_proj_weight *= gain

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0].mean(1))


def test_attention():
    x, y = torch.randn(4, 5, 8), torch.arange(4) % 3
    assert locate(plain_trial(Attention(1.0), classified), [(x, y)], FP16).cause == "not replayable"
    report = locate(plain_trial(Attention(600.0), classified), [(x, y)], FP16)
    assert (report.module, report.phase, report.cause) == ("attention", "forward", "precision")
    assert report.samples and set(report.samples) <= set(range(4))


def test_convolution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model[0].weight.data.abs_()
    x = torch.rand(5, 3, 8, 8)
    x[3] = 6e4
    report = locate(plain_trial(model, classified), [(x, torch.arange(5) % 3)], FP16)
    assert (report.module, report.phase, report.cause, report.samples) == ("0", "forward", "precision", [3])
    assert "convolution" in report.op


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_forward_that_a_checkpoint_runs_again(reentrant):
    def inner(h):
        return torch.where(h > 0, torch.sqrt(h), 0.0)  # born: recompute

    report = located(lambda h: checkpoint(inner, h, use_reentrant=reentrant))
    assert found(report) == ("part", "sqrt", "recompute", "model")
    assert report.line == line_of("recompute") and report.node is None


def test_the_branch_of_a_where_that_is_left_out():
    def part(h):
        return torch.where(h > 0, torch.sqrt(h), 0.0)  # born: where

    report = located(part)
    assert found(report) == ("part", "sqrt", "forward", "model")
    assert report.target.startswith("gradient of before.") and report.line == line_of("where")
    assert "drops this value" in report.message


def test_accumulation_tells_which_batch():
    good, bad = batch_of(seed=1), batch_of(seed=2)
    bad[0][5] *= 1e6
    report = located(nn.Identity(), [good, good, bad, good], FP16)
    assert (report.module, report.cause, report.samples) == ("before", "precision", [[2, 5]])
    assert "5 of batch 2" in report.message

    def roots(model, batch):
        return (model(batch[0]) * 0 + batch[1][:, None]).sqrt().mean()

    lengths = [torch.ones(8) for _ in range(3)]
    lengths[1][4] = 0
    report = located(nn.Identity(), [(batch_of(seed=i)[0], it) for i, it in enumerate(lengths)], objective=roots)
    assert (report.module, report.phase, report.cause, report.samples) == (OUTSIDE, "backward", "model", [[1, 4]])


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x / (x - x))  # born: function


class Blown(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / (x - x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_function_of_the_user_is_named():
    report = located(Halved.apply)
    assert found(report) == ("part", "div", "backward", "model")
    assert report.function == "Halved" and "Halved" in report.message
    report = located(Blown.apply)
    assert found(report) == ("part", "div", "forward", "model") and report.function == "Blown"


def test_the_recipes_own_loss():
    def objective(model, batch):
        return (model(batch[0]) * 1000).pow(2).mean().float()  # born: loss

    report = located(nn.Identity(), objective=objective, dtype=FP16)
    assert found(report) == (OUTSIDE, "pow", "forward", "precision")
    assert report.line == line_of("loss") and ".float()" in report.message

    def half(model, batch):
        return (model(batch[0]).half() * 1000).pow(2).mean().float()

    report = located(nn.Identity(), objective=half, dtype=FP16)
    assert found(report) == (OUTSIDE, "pow", "forward", "model")
    assert "the code casts its inputs" in report.message


def test_a_target_at_a_masked_place():
    def objective(model, batch):
        return F.cross_entropy(
            model(batch[0]).masked_fill(torch.tensor([False, False, True], device=DEVICE), -INF), batch[1]
        )

    x, y = batch_of()
    y[:] = 0
    y[6] = 2
    report = located(nn.Identity(), (x, y), objective=objective)
    assert found(report) == (OUTSIDE, "masked_fill", "forward", "model")
    assert report.samples == [6] and "mask" in report.message


def test_a_norm_that_overflows_over_finite_gradients():
    report = located(nn.Identity(), objective=lambda model, batch: classified(model, batch) * 1e25)
    assert report.cause == "model" and report.op == "gradient norm" and report.target == "gradient norm"
    assert "norm" in report.message and report.range[0].largest > 1e19


def test_gradients_that_the_recipe_takes_itself():
    def by_hand(model, batch):
        loss = (model.before(batch[0]) * 0).sum(-1).sqrt().sum() + classified(model, batch)
        for it, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            it.grad = gradient
        return model.after.bias.sum() * 0 + 1

    report = located(nn.Identity(), objective=by_hand)
    assert (report.module, report.phase, report.cause) == (OUTSIDE, "backward", "model")
    assert report.node.startswith("Sqrt") and report.target.startswith("gradient of ")


def test_parameters_that_only_an_optimizer_holds():
    codes = nn.Parameter(torch.zeros(8, 6))
    net = Net(nn.Identity())
    optimizer = torch.optim.SGD([*net.parameters(), codes], lr=0.1)

    def with_codes(model, batch):
        return classified(model, (batch[0] + codes.abs().sum(-1, keepdim=True).sqrt(), batch[1]))

    report = locate(plain_trial(net, with_codes, optimizer), [batch_of()], FP32)
    assert report.target == "gradient of optimizer[4]" and report.cause == "model" and report.module == OUTSIDE
    codes.data[3, 3] = math.nan
    report = locate(plain_trial(net, with_codes, optimizer), [batch_of()], FP32)
    assert report.external == "parameter optimizer[4]" and report.cause == "model"
    assert "a second problem" in report.message  # the root of 0


def test_sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.out = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.out((self.embedding(x).mean(1) * 0).sqrt())

    words = torch.randint(0, 10, (8, 5))
    report = locate(plain_trial(Words(), classified), [(words, batch_of()[1])], FP32)
    assert found(report)[2:] == ("backward", "model") and report.module == "" and report.samples == list(range(8))


# ---------------------------------------------------------------------------------------------- what cannot be told


def test_a_finite_step_says_so():
    report = located(nn.Identity())
    assert report.cause == "not replayable" and report.replays == 1
    assert (report.module, report.op, report.phase, report.samples) == (None, None, None, [])
    assert "finite" in report.message


def test_draws_that_a_replay_cannot_set_back_are_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = np.random.default_rng(0)

        def forward(self, h):
            return h * self.generator.random()

    assert located(lambda h: h * random.random()).drawn == ["Python's random"]
    assert located(lambda h: h * np.random.rand()).drawn == ["NumPy's global generator"]
    report = located(Own())
    assert report.drawn == ["the generator part.generator"] and "part.generator" in report.message
    assert located(lambda h: h * torch.rand(()) * torch.rand(())).drawn == []
    report = located(lambda h: (h * random.random() * 0).log())
    assert report.module == "part" and "Python's random" in report.message


def test_generators_that_are_put_back_are_no_excuse():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = np.random.default_rng(0)

        def forward(self, h):
            return (h * self.generator.random() * outside.random() * random.random() * 0).log()

    own, outside = Own(), random.Random(0)
    report = located(own, known_generators={"the model's noise": own.generator, "hparams.noise": outside})
    assert report.put_back == ["the model's noise", "hparams.noise"] and report.drawn == ["Python's random"]
    assert "noise" not in report.message and "Python's random, which a replay cannot restore" in report.message
    report = located(lambda h: h * outside.random(), known_generators={"hparams.noise": outside})
    assert report.drawn == [] and "cannot restore" not in report.message and "noise" not in report.message
    unused = located(lambda h: (h * 0).log(), known_generators={"hparams.noise": outside})
    assert (unused.drawn, unused.put_back) == ([], [])


def test_with_a_caveat_no_cause_is_certain():
    other = "An optimizer had already stepped in this window, so the replay began from other weights."
    changed = "The recipe changed batch[0] in place, so the replay began with other values."
    x, y = batch_of()
    x[3, 2] = math.nan
    parts = {
        "data": (nn.Identity(), {"batch": (x, y)}),
        "model": (Part(lambda h: (h * 0).log()), {}),
        "precision": (Part(lambda h: h * 1e4 * 1e4 / 1e8), {"dtype": FP16}),
        "not replayable": (nn.Identity(), {}),
    }
    reports = {cause: located(part, **given) for cause, (part, given) in parts.items()}
    reports["scale"] = located(nn.Identity(), dtype=FP16, scale=2.0**24)
    for cause, report in reports.items():
        assert report.cause == cause and ("Cause: " in report.message) == (cause != "not replayable")
        certain = report.message
        report.caveats.append(other)
        report.caveats.append(changed)
        assert f"{other} {changed}" in report.message and "Cause: " not in report.message
        assert report.message.endswith(changed) or f"{changed} Probably: the " in report.message
        assert report.message.replace(f"{other} {changed} ", "").replace("Probably: ", "Cause: ").startswith(certain)
        assert report.as_dict()["caveats"] == [other, changed] and report.as_dict()["message"] == report.message


def test_a_step_that_raises_is_reported():
    def part(h):
        raise KeyError("speaker")

    report = located(part)
    assert report.cause == "not replayable" and "speaker" in report.message

    def only_low(h):
        if h.dtype == FP32:
            raise TypeError("not made for float32")
        return (h * 0).log()

    report = located(only_low, dtype=FP16)
    assert found(report) == ("part", "log", "forward", "not replayable") and "not made for float32" in report.message


# ---------------------------------------------------------------------------------------------- memory and time


def test_views_slices_and_writes_in_place():
    def slices(h):
        out = torch.zeros_like(h)
        for column in range(8):
            out[:, column] = (h[:, column] * 0).log() if column == 3 else h[:, column]  # born: slices
        return out * 2

    report = located(slices)
    assert report.op == "aten::log" and report.line == line_of("slices")

    def overwritten(h):
        out = torch.full_like(h, math.nan)
        out.copy_(h)
        return out.mul_(1e30).mul_(1e30)  # born: in place

    report = located(overwritten)
    assert found(report) == ("part", "mul_", "forward", "model") and report.line == line_of("in place")
    assert report.range[0].nonfinite == 0

    def unread(h):
        waste = (h * 0).log()
        part = torch.cat([waste, h])[8:]
        return part + (h * 0 + 1e30) * 1e30  # born: unread

    report = located(unread)
    assert found(report)[:2] == ("part", "mul") and report.line == line_of("unread")


def test_memory_that_is_given_out_again_is_not_mistaken():
    def part(h):
        with torch.no_grad():
            for _ in range(50):  # each is freed, and its memory used by the next
                (h * 0).log()
        return h * torch.full_like(h, 1e30) * 1e30  # born: again

    report = located(part)
    assert report.op == "aten::mul" and report.line == line_of("again")


def test_memory_that_is_changed_out_of_sight():
    def numpy_writes(h):
        noise = torch.zeros(8, 8)
        noise.numpy()[2, 3] = math.nan
        return h + noise

    report = located(numpy_writes)
    assert report.module == "part" and report.op == "aten::zeros" and "outside of torch's ops" in report.message
    report = located(lambda h: h * (h.sum() * 0 / 0).item())
    assert report.op == "aten::div" and report.module == "part"


def test_the_trace_keeps_no_activation_alive():
    dead = []

    def part(h):
        with torch.no_grad():
            activation = h * 2
            reference = StorageWeakRef(activation.untyped_storage())
            del activation
            dead.append(reference.expired())
        return (h * 0).log()

    assert located(part).module == "part"
    assert dead and all(dead)


def test_a_watched_run_computes_the_same_bits():
    net = Net(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), Part(causal)))
    trial = plain_trial(net, classified)
    for dtype in (FP32, BF16, FP16):
        bare = trial.run([batch_of()], dtype, 8.0)
        trace = NonfiniteTrace(net, [batch_of()], dict(net.named_parameters()), {})
        watched = trial.run([batch_of()], dtype, 8.0, watch=[trace])
        assert torch.equal(bare.losses[0], watched.losses[0])
        assert all(torch.equal(bare.gradients[name], it) for name, it in watched.gradients.items())
        assert sum(isinstance(it, Written) for it in trace.events) > 30


def test_locating_leaves_nothing_behind():
    net = Net(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), Part(lambda h: (h * 0).log())))
    net.after.weight.grad = torch.ones(3, 8)
    state = {name: it.clone() for name, it in net.state_dict().items()}
    x, y = batch_of()
    kept, generator, drawn = x.clone(), torch.get_rng_state(), random.getstate()
    assert locate(plain_trial(net, classified), [(x, y)], BF16).cause == "model"
    assert all(torch.equal(it, state[name]) for name, it in net.state_dict().items())
    assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), generator) and random.getstate() == drawn
    assert net.before.weight.grad is None and torch.equal(net.after.weight.grad, torch.ones(3, 8))
    assert not any(it._post_accumulate_grad_hooks for it in net.parameters())


def test_a_watched_run_does_not_look_at_every_element_in_python():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0) for _ in range(2)]
    model = nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 16))
    trial = plain_trial(model, lambda model, x: model(x).square().mean())
    window = [torch.randn(8, 32, 16)]  # 20 activations of 16,000 and more elements
    for fault in (0.0, math.nan):  # a finite step is watched to its end; a NaN makes all activations NaN
        model[0].weight.data[0, 0] = fault
        with at_most(calls=200_000):
            trial.run(window, BF16, watch=[NonfiniteTrace(model, window, dict(model.named_parameters()), {})])


# ---------------------------------------------------------------------------------------------- values and samples


def test_kinds_of_values(subtests):
    for dtype in (torch.float64, FP32, FP16, BF16, torch.complex64, torch.float8_e5m2):
        with subtests.test(str(dtype)):
            kinds_of_values(dtype)


def kinds_of_values(dtype):
    fine = torch.tensor([[60000.0, 1.0, -60000.0]]).expand(50, 3).to(FP32)
    if dtype == torch.float8_e5m2:
        fine = fine / 10
    assert kind_of(fine.to(dtype)) == 0  # also where the sum overflows
    bad = fine.clone()
    bad[7, 1] = -INF
    assert kind_of(bad.to(dtype)) == INFINITE
    bad[9, 2] = math.nan
    assert kind_of(bad.to(dtype)) == NAN
    if dtype != torch.float8_e5m2:
        assert range_of(bad.to(dtype)).nonfinite == 2
    assert kind_of(torch.ones(3, dtype=torch.int32)) == kind_of(torch.empty(0, dtype=dtype)) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
def test_on_a_gpu():
    net = Net(Part(lambda h: F.layer_norm(h @ h.mT, (8,)))).cuda()
    x, y = batch_of()
    x[[1, 4]] *= 3000
    window = [(x.cuda(), y.cuda())]
    trial = plain_trial(net, classified)
    trace = NonfiniteTrace(net, window, dict(net.named_parameters()), {})
    bare, watched = trial.run(window, FP16), trial.run(window, FP16, watch=[trace])
    assert torch.equal(bare.losses[0].isnan(), watched.losses[0].isnan())
    report = locate(trial, window, FP16, 1024.0)
    assert report.module in ("before", "part") and report.cause == "precision" and report.samples == [1, 4]


def test_rows_of_flattened_dimensions():
    x = torch.randn(4, 5, 8)
    y = torch.randint(0, 3, (4, 5))
    x[2] *= 1e6
    model = nn.Linear(8, 3)

    def flat(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1) * 1.0, batch[1].flatten())

    assert locate(plain_trial(model, flat), [(x, y)], FP16).samples == [2]

    def time_first(model, batch):  # (time * samples, features)
        x = batch[0].transpose(0, 1).contiguous().flatten(0, 1).half()
        return F.cross_entropy(model(x), batch[1].T.flatten())

    assert locate(plain_trial(model, time_first), [(x, y)], FP16).samples == [2]


def test_samples_that_are_left_out_on_the_way_did_not_do_it():
    x, y = batch_of()
    x[[2, 6]] *= 100

    def part(h):
        picked = h.abs().amax(-1, keepdim=True) > 20
        return F.batch_norm(torch.where(picked, (h * 0).log(), h), None, None, training=True)  # NaN in all from here on

    report = located(part, (x, y))
    assert found(report) == ("part", "log", "forward", "model") and report.samples == [2, 6]

    def all_after_all(h):
        loud = (h + 5).exp().exp()
        return torch.where(h.abs().amax(-1, keepdim=True) > 20, loud, h) + loud.clamp(max=1) * loud

    assert located(all_after_all, (x * 0 + 20, y)).samples == list(range(8))
    x[[1, 3]] = math.nan
    report = located(nn.Identity(), (x, y), objective=lambda model, it: model(it[0][2:]).sum())
    assert report.cause == "data" and report.samples == [1, 3]


def test_samples_of_batches_of_other_forms():
    x, y = batch_of()
    x[[2, 5], 1] = math.nan

    def of_sparse(model, batch):
        h = torch.sparse.mm(batch[0], model.before.weight.t())
        return F.cross_entropy(model.after(h), batch[1])

    report = located(nn.Identity(), (x.to_sparse(), y), objective=of_sparse)
    assert (report.cause, report.external, report.samples) == ("data", "batch[0]", [2, 5])
    rows = [{"x": row, "y": label} for row, label in zip(x, y, strict=True)]
    rows[2]["x"] = torch.ones(6)

    def of_rows(model, batch):
        return F.cross_entropy(model(torch.stack([it["x"] for it in batch])), torch.stack([it["y"] for it in batch]))

    report = located(nn.Identity(), [rows], objective=of_rows)
    assert (report.cause, report.external, report.samples) == ("data", "batch[5]['x']", [5])


def test_the_rows_of_a_weights_gradient_are_not_taken_for_samples():
    """There are as many features as samples; the sample is found by trying parts of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 3, bias=False))

    def objective(model, batch):
        return (model(batch[0] * 1e-3).float() - batch[1]).square().sum(-1).mean() * 1e3

    x, target = torch.randn(8, 8), torch.randn(8, 3)
    target[6] *= 3e3
    report = locate(plain_trial(model, objective), [(x, target)], FP16, 1.0)
    assert report.phase == "backward" and report.samples == [6]


def test_halves_of_halves():
    def searched(is_bad, length, most_runs=16):
        return samples_by_parts(is_bad, length, most_runs)

    for culprits in ({0}, {7}, {2, 5}, {0, 1}, {3, 4, 7}):
        assert searched(lambda samples, c=culprits: bool(c & set(samples)), 8) == sorted(culprits)
    for culprit in (0, 1, 500, 999):
        assert searched(lambda samples, c=culprit: c in samples, 1000, 13) == [culprit]
    assert searched(lambda samples: 3 in samples, 1000, 5) is None  # too many runs
    assert searched(lambda samples: True, 64, 6) is None  # no matter of samples
    assert searched(lambda samples: len(samples) > 4, 8) is None  # only together
    assert searched(lambda samples: {2, 6} <= set(samples), 8) is None
    assert searched(lambda samples: {2, 3} <= set(samples), 8) is None
    assert searched(lambda samples: 1 in samples, 2) == [1]


def test_samples_are_taken_from_any_container():
    Pair = namedtuple("Pair", "x y")
    x = torch.arange(4.0)
    batch = {"x": x, "words": ["a", "b", "c", "d"], "pair": Pair(x, [x]), "rate": 0.5, "data": Pictures(x, x)}
    assert samples_in(batch) == 4 and samples_in([{"x": torch.ones(7)}, {"x": torch.ones(9)}]) == 2
    assert take_samples([{"x": 1}, {"x": 2}], [1], 2) == [{"x": 2}]
    part = take_samples(batch, [1, 3], 4)
    assert part["words"] == ["b", "d"] and part["rate"] == 0.5 and type(part["pair"]) is Pair
    assert torch.equal(part["pair"].y[0], torch.tensor([1.0, 3.0])) and torch.equal(part["data"].kind, part["x"])
    for odd in (object(), torch.zeros(5), {1, 2}):
        with pytest.raises(Inseparable):
            take_samples({"x": x, "odd": odd}, [1], 4)
