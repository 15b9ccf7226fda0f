"""The census against hand counts, against fake tensors, and against what is known of each cast."""

import json
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from cpu import needs_lstm_in_bf16, runs_lstm
from device import DEVICE
from fake_census import fake_census
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_release import RELEASE

from amp_recipes.data import to_device
from amp_recipes.files.user_code import Line
from amp_recipes.numerics.census.census import pins_hold, take_census
from amp_recipes.numerics.census.watch import CensusWatch
from amp_recipes.numerics.trial import Trial, plain_trial
from amp_recipes.numerics.watch.observe import OUTSIDE
from amp_recipes.precision import TorchAutocast, fwd_default_precision, pin_fp32

BF16, FP16 = torch.bfloat16, torch.float16


def total(model, x):
    """The loss: the sum of the output, in float32."""
    return model(x).float().sum()


def census_of(model, x, dtype=BF16, objective=total, **options):
    return take_census(plain_trial(model.to(DEVICE), objective), [to_device(x, DEVICE)], dtype, **options)


def ops_of(census, module, phase):
    """{op with the dtypes of in- and outputs: calls}, without the namespace; bf16 for bfloat16, and so on."""
    found = Counter()
    for row in census.ops:
        if (row.module, row.phase) == (module, phase):
            dtypes = " ".join(row.inputs) + " -> " + " ".join(row.outputs)
            dtypes = dtypes.replace("bfloat", "bf").replace("float", "fp")
            found[f"{row.op.removeprefix('aten::')}: {dtypes.strip()}"] += row.calls
    return dict(found)


def casts_of(census, **wanted):
    return [it for it in census.casts if all(getattr(it, name) == value for name, value in wanted.items())]


class Calls(nn.Module):
    """Runs what it is given, with its children at hand."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.function(self, x)


# ---------------------------------------------------------------------- counted by hand

# What `total` and the trial themselves take, for an output in bf16: `.float()` and `sum`; two detached losses, one for
# the trial's backward and one for its result; the gradient of the loss, 1. In the backward the sum's gradient is
# expanded, and that of `.float()` cast back.
OUTSIDE_FORWARD = {
    "_to_copy: bf16 -> fp32": 1,
    "sum: fp32 -> fp32": 1,
    "detach: fp32 -> fp32": 2,
    "ones_like: fp32 -> fp32": 1,
}
OUTSIDE_BACKWARD = {"expand: fp32 -> fp32": 1, "_to_copy: fp32 -> bf16": 1}


def test_a_linear_layer_counted_by_hand():
    census = census_of(nn.Linear(4, 3), torch.randn(5, 4))
    # Autocast casts x, W and b; then y = b + x W^T.
    assert ops_of(census, "", "forward") == {
        "_to_copy: fp32 -> bf16": 3,
        "t: bf16 -> bf16": 1,
        "addmm: bf16 bf16 bf16 -> bf16": 1,
    }
    # x needs no gradient. dW^T = x^T dy is taken as (dy^T x)^T: a transposition before and one after the product, and
    # one more for W -> W^T. db is the sum of dy over the batch, viewed as b. Both are cast back, and each becomes the
    # gradient of its leaf: one detach.
    assert ops_of(census, "", "backward") == {
        "t: bf16 -> bf16": 3,
        "mm: bf16 bf16 -> bf16": 1,
        "sum: bf16 -> bf16": 1,
        "view: bf16 -> bf16": 1,
        "_to_copy: bf16 -> fp32": 2,
        "detach: fp32 -> fp32": 2,
    }
    assert ops_of(census, OUTSIDE, "forward") == OUTSIDE_FORWARD
    assert ops_of(census, OUTSIDE, "backward") == OUTSIDE_BACKWARD
    # 4 bytes read and 2 written for each element of x (20), W (12), b (3); then the other way for W and b.
    (autocast,) = casts_of(census, module="", by="autocast")
    assert (autocast.from_, autocast.to, autocast.calls, autocast.bytes) == ("float32", "bfloat16", 3, 35 * 6)
    (backward,) = casts_of(census, module="", by="backward")
    assert (backward.from_, backward.to, backward.calls, backward.bytes) == ("bfloat16", "float32", 2, 15 * 6)
    (user,) = casts_of(census, by="user")
    assert (user.module, user.calls, user.bytes) == (OUTSIDE, 1, 15 * 6)
    assert user.line == Line(__file__, total.__code__.co_firstlineno + 2)
    assert len(census.casts) == 4
    assert census.low_owners() == [""] and census.neutral
    assert census.cast_bytes == (35 + 15 + 15 + 15) * 6, "with the output's, to float32 and back"


def test_a_convolution_counted_by_hand():
    census = census_of(nn.Sequential(nn.Conv1d(4, 3, 2), nn.ReLU()), torch.randn(2, 4, 6))
    # One op in either direction; its backward gives dW and db at once. ReLU keeps its (detached) output.
    assert ops_of(census, "0", "forward") == {"_to_copy: fp32 -> bf16": 3, "convolution: bf16 bf16 bf16 -> bf16": 1}
    assert ops_of(census, "1", "forward") == {"relu: bf16 -> bf16": 1, "detach: bf16 -> bf16": 1}
    assert ops_of(census, "1", "backward") == {"threshold_backward: bf16 bf16 -> bf16": 1, "detach: bf16 -> bf16": 1}
    assert ops_of(census, "0", "backward") == {
        "convolution_backward: bf16 bf16 bf16 -> bf16 bf16": 1,
        "_to_copy: bf16 -> fp32": 2,
        "detach: fp32 -> fp32": 2,
    }
    assert census.low_owners() == ["0", "1"]


def test_a_module_called_twice_counted_by_hand():
    net = Calls(lambda self, x: self.child(self.child(x)), child=nn.Linear(4, 4))
    census = census_of(net, torch.randn(5, 4))
    # The cache keeps the cast W and b, and the second input is bf16 already: 3 casts for two calls.
    assert ops_of(census, "child", "forward") == {
        "_to_copy: fp32 -> bf16": 3,
        "t: bf16 -> bf16": 2,
        "addmm: bf16 bf16 bf16 -> bf16": 2,
    }
    # The second call also hands a gradient to the first: its product, and the transposition of W^T. The two dW and
    # the two db meet at the cached casts, and add up there in bf16; only the sums are cast back.
    assert ops_of(census, "child", "backward") == {
        "t: bf16 -> bf16": 7,
        "mm: bf16 bf16 -> bf16": 3,
        "sum: bf16 -> bf16": 2,
        "view: bf16 -> bf16": 2,
        "add: bf16 bf16 -> bf16": 2,
        "_to_copy: bf16 -> fp32": 2,
        "detach: fp32 -> fp32": 2,
    }
    assert (census.cache.casts, census.cache.casts_without) == (2, 4)
    assert census.cache.bytes_saved == (16 + 4) * 6
    assert not census.cache.same_gradients, "without the cache they add up in float32"


def test_frozen_weights_counted_by_hand():
    net = Calls(lambda self, x: self.child(self.child(x)), child=nn.Linear(4, 4))
    net.child.requires_grad_(False)
    head = nn.Linear(4, 4)
    census = census_of(nn.Sequential(head, net), torch.randn(5, 4))
    # Nothing is cached: W and b twice. The input of the first call is bf16, from the head.
    assert ops_of(census, "1.child", "forward") == {
        "_to_copy: fp32 -> bf16": 4,
        "t: bf16 -> bf16": 2,
        "addmm: bf16 bf16 bf16 -> bf16": 2,
    }
    # Only the gradient of the input, for each call.
    assert ops_of(census, "1.child", "backward") == {"t: bf16 -> bf16": 2, "mm: bf16 bf16 -> bf16": 2}
    assert {(it.weight, it.module, it.calls, it.bytes) for it in census.frozen_recasts} == {
        ("1.child.weight", "1.child", 2, 2 * 16 * 6),
        ("1.child.bias", "1.child", 2, 2 * 4 * 6),
    }
    assert census.cache.casts == census.cache.casts_without == 6


def test_a_checkpointed_block_counted_by_hand():
    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False))

    net = Calls(forward, block=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), head=nn.Linear(4, 4))
    census = census_of(net, torch.randn(5, 4))
    forward = {"_to_copy: fp32 -> bf16": 3, "t: bf16 -> bf16": 1, "addmm: bf16 bf16 bf16 -> bf16": 1}
    assert ops_of(census, "block.0", "forward") == forward
    assert ops_of(census, "block.0", "recompute") == forward, "all of it again, casts too"
    # tanh keeps its output: detached, and only in the recompute, as the forward's was not kept.
    assert ops_of(census, "block.1", "forward") == {"tanh: bf16 -> bf16": 1}
    assert ops_of(census, "block.1", "recompute") == {"tanh: bf16 -> bf16": 1, "detach: bf16 -> bf16": 1}
    assert ops_of(census, "head", "recompute") == {}
    assert ops_of(census, "block.1", "backward") == {"tanh_backward: bf16 bf16 -> bf16": 1, "detach: bf16 -> bf16": 1}
    (again,) = casts_of(census, phase="recompute")
    assert (again.module, again.by, again.calls) == ("block.0", "autocast", 3)


@needs_lstm_in_bf16
def test_an_lstm_counted_by_hand():
    net = Calls(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(4, 3))
    census = census_of(net, torch.randn(2, 5, 4))
    forward = ops_of(census, "lstm", "forward")
    # One op does the layer. It is given x, two weights, two biases, h and c, all cast.
    assert forward["mkldnn_rnn_layer: bf16 bf16 bf16 bf16 bf16 bf16 bf16 -> bf16 bf16 bf16 uint8"] == 1
    assert forward["_to_copy: fp32 -> bf16"] == 7
    assert forward["zeros: -> fp32"] == 2
    # oneDNN gives gradients in float32. Those of the four weights are cast to the dtype of the cast weights, and back:
    # two casts each for nothing but a rounding.
    backward = ops_of(census, "lstm", "backward")
    assert backward["_to_copy: fp32 -> bf16"] == backward["_to_copy: bf16 -> fp32"] == 4
    (trip,) = census.cancelling
    assert (trip.there, trip.back, trip.phase, trip.calls) == ("lstm", "lstm", "backward", 4)
    assert (trip.dtype, trip.through, trip.loses) == ("float32", "bfloat16", True)


def test_tied_weights_counted_by_hand():
    def forward(self, x):
        return F.linear(self.embedding(x), self.embedding.weight)

    census = census_of(Calls(forward, embedding=nn.Embedding(4, 4)), torch.arange(4))
    # The lookup is in fp32; the product belongs to the module that takes it.
    assert ops_of(census, "embedding", "forward") == {"embedding: fp32 int64 -> fp32": 1}
    assert ops_of(census, "", "forward") == {
        "_to_copy: fp32 -> bf16": 2,
        "t: bf16 -> bf16": 1,
        "mm: bf16 bf16 -> bf16": 1,
    }
    # Its two gradients add up in fp32, where the weight is held.
    assert ops_of(census, "embedding", "backward") == {
        "embedding_dense_backward: fp32 int64 -> fp32": 1,
        "add: fp32 fp32 -> fp32": 1,
        "detach: fp32 -> fp32": 1,
    }
    assert census.low_owners() == [""]


def test_two_optimizers_and_a_window_of_two_batches():
    """A GAN's step: two losses, two backwards, gradients of both."""
    generator, critic = nn.Linear(4, 4, device=DEVICE), nn.Linear(4, 1, device=DEVICE)
    modules = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = {name: torch.optim.SGD(module.parameters(), 0.1) for name, module in modules.items()}

    def take(window, updates, context):
        losses = []
        for batch in window:
            updates.begin()
            for name in ("critic", "generator"):
                with context:
                    loss = critic(generator(batch)).float().sum()
                updates.backward(loss)
                updates.step({name: optimizers[name]}, 0.0)
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
                losses.append(loss.detach())
        return losses

    trial = Trial(modules, DEVICE, take, lambda: optimizers)
    census = take_census(trial, list(torch.randn(2, 3, 4).to(DEVICE)), BF16)
    assert census.neutral
    for name in modules:
        assert ops_of(census, name, "forward")["addmm: bf16 bf16 bf16 -> bf16"] == 4
    # Weights are cast anew in each of the four regions; the critic's input is bf16 by then.
    assert sum(it.calls for it in casts_of(census, module="generator", by="autocast")) == 12
    assert sum(it.calls for it in casts_of(census, module="critic", by="autocast")) == 8
    assert census.low_owners() == ["generator", "critic"]


# ---------------------------------------------------------------------- fake tensors

IMAGES = torch.randn(2, 3, 8, 8)
NETWORKS = {
    "linear": (lambda: nn.Linear(4, 3), torch.randn(5, 4)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2)),
        torch.randn(5, 4),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        IMAGES,
    ),
    "lstm": (lambda: Calls(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(4, 3)), torch.randn(2, 5, 4)),
    "gru": (lambda: Calls(lambda self, x: self.gru(x)[0], gru=nn.GRU(4, 3)), torch.randn(2, 5, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), torch.randn(3, 2, 8)),
    "checkpoint": (
        lambda: Calls(
            lambda self, x: checkpoint(self.block, self.head(x), use_reentrant=False),
            block=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            head=nn.Linear(4, 4),
        ),
        torch.randn(5, 4),
    ),
    "twice": (lambda: Calls(lambda self, x: self.child(self.child(x)), child=nn.Linear(4, 4)), torch.randn(5, 4)),
    "tied": (
        lambda: Calls(lambda self, x: F.linear(self.table(x), self.table.weight), table=nn.Embedding(4, 4)),
        torch.arange(4),
    ),
}


def counts(census, name):
    """Calls by place, op and dtypes.

    Two of torch's descriptions of ops are not what its kernels do: norms of bf16 by float32 weights keep their
    statistics in float32, and of an LSTM's gradients in float32 one more has strides that let it be taken over.
    """
    found = Counter()
    for it in census.ops:
        key = (it.module, it.phase, it.op)
        if name == "lstm" and it.op.removeprefix("aten::") in ("detach", "new_empty_strided", "copy_"):
            continue
        found[key if "_norm" in it.op else (*key, it.inputs, it.outputs)] += it.calls
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_fake_tensors_give_the_same_census(subtests, name):
    make, x = NETWORKS[name]
    for dtype in (torch.float32, BF16):
        if name == "lstm" and (not runs_lstm(dtype) or RELEASE < (2, 13)):  # which describes its backward otherwise
            continue  # the GRU stands for it
        torch.manual_seed(0)
        model = make()
        with subtests.test(str(dtype)):
            real = census_of(model, x, dtype)
            before = torch.get_rng_state()
            fake = fake_census(model, total, x.to(DEVICE), dtype)
            assert torch.equal(torch.get_rng_state(), before), "nothing is drawn"
            assert counts(fake, name) == counts(real, name)
            assert fake.casts == real.casts
            assert fake.low_owners() == real.low_owners() and fake.cancelling == real.cancelling
            assert real.neutral is True and fake.neutral is None
            assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


# ---------------------------------------------------------------------- who asked


def only_cast(census, **wanted):
    (found,) = casts_of(census, **wanted)
    return found


def test_each_way_in_which_a_user_casts_is_the_users():
    def forward(self, x):
        y = self.child(x)
        a = y.float()
        b = y.to(torch.float32)
        c = y.type(torch.float32)
        d = y.type_as(x)
        e = torch.empty_like(x).copy_(y)
        f = y.double()
        g = F.softmax(y, -1, dtype=torch.float32)
        h = torch.softmax(y, -1, dtype=torch.float32)
        return a + b + c + d + e + f + g + h

    census = census_of(Calls(forward, child=nn.Linear(4, 4)), torch.randn(2, 4))
    users = casts_of(census, module="", phase="forward", by="user")
    first = forward.__code__.co_firstlineno
    assert sorted(it.line.number - first for it in users) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert {it.line.file for it in users} == {__file__}
    assert Counter(it.to for it in users) == {"float32": 7, "float64": 1}
    assert casts_of(census, module="", phase="forward", by="autocast") == []
    assert only_cast(census, module="child", phase="forward").by == "autocast"
    assert {it.by for it in casts_of(census, phase="backward")} == {"backward"}


def test_casts_within_an_op_that_autocast_knows_are_autocasts():
    def forward(self, x):
        y = self.child(x)
        z = x @ y.T
        return F.cross_entropy(z, torch.zeros(2, dtype=torch.long, device=x.device)) + F.mse_loss(y, y.sin())

    census = census_of(Calls(forward, child=nn.Linear(4, 4)), torch.randn(2, 4), objective=lambda m, x: m(x))
    assert {it.by for it in casts_of(census, phase="forward")} == {"autocast"}
    # x for the product; logits for the loss; the two inputs of the squared error.
    own = casts_of(census, module="", phase="forward")
    assert sum(it.calls for it in own if it.to == "bfloat16") == 1
    assert sum(it.calls for it in own if it.to == "float32") >= 3


def test_a_cast_that_stands_in_a_loop_or_a_comprehension_is_the_users():
    def forward(self, x):
        parts = [part.float() for part in self.child(x).split(1)]
        for _ in range(2):
            parts = [self.child(part).float() for part in parts]
        return torch.cat(parts)

    census = census_of(Calls(forward, child=nn.Linear(4, 4)), torch.randn(3, 4))
    assert sum(it.calls for it in casts_of(census, module="", by="user")) == 9
    # x, W, b at first, then 2 x 3 parts that came back in float32.
    assert only_cast(census, module="child", by="autocast").calls == 3 + 6


def test_what_a_composite_op_casts_at_its_end_is_not_the_users():
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.child(x).chunk(3, -1), dropout_p=0.2)

    census = census_of(Calls(forward, child=nn.Linear(4, 12)), torch.randn(2, 3, 4))
    own = casts_of(census, module="", phase="forward")
    assert {it.by for it in own} == {"autocast"} and {it.to for it in own} == {"float32", "bfloat16"}


def test_another_mode_on_the_way_does_not_hide_who_asked():
    net = Calls(lambda self, x: self.child(x).float().sin(), child=nn.Linear(4, 4))
    torch.set_default_device(DEVICE)  # a function mode
    try:
        census = census_of(net, torch.randn(2, 4))
    finally:
        torch.set_default_device(None)
    assert only_cast(census, module="", phase="forward").by == "user"
    assert only_cast(census, module="child", phase="forward").by == "autocast"
    inner, outer = CensusWatch(net), CensusWatch(net)
    plain_trial(net, total).run([torch.randn(2, 4).to(DEVICE)], BF16, watch=[outer, inner])
    assert inner.casts == outer.casts
    assert sum(inner.counts.values()) == sum(outer.counts.values())


def test_a_pins_border_casts_are_the_pins():
    class Norm(nn.Module):
        @fwd_default_precision
        def forward(self, x):
            return x / x.norm()

    net = nn.Sequential(nn.Linear(4, 4), Norm(), nn.Linear(4, 4), nn.Linear(4, 4))
    census = census_of(net, torch.randn(2, 4), pins=["3"])
    for name in ("1", "3"):
        cast = only_cast(census, module=name, phase="forward")
        assert (cast.by, cast.from_, cast.to, cast.line) == ("pin", "bfloat16", "float32", None)
    assert census.pins == ["3", "1"]


def test_in_float32_every_cast_is_the_users():
    census = census_of(nn.Linear(4, 4), torch.randn(2, 4).double(), torch.float32, lambda m, x: m(x.float()).sum())
    assert [it.by for it in casts_of(census, phase="forward")] == ["user"]
    assert census.cache is None and census.low_owners() == [] and census.meant_low == []


def test_a_scripts_casts_cannot_be_told_apart():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).float()

    scripted = torch.jit.script(Plain())
    census = census_of(nn.Sequential(scripted), torch.randn(2, 4))
    assert {it.by for it in casts_of(census, module="0", phase="forward")} == {"script"}


# ---------------------------------------------------------------------- casts that cancel, modules that are misplaced


def test_a_round_trip_that_loses_and_a_widening_that_returns():
    def there(self, x):
        return x.half().view(-1)

    def back(self, x):
        return x.float()

    net = nn.Sequential(Calls(there), Calls(back), nn.Linear(4, 4), Calls(lambda self, x: x.float()), nn.Linear(4, 4))
    census = census_of(net, torch.randn(4))
    found = {(it.there, it.back, it.phase): (it.dtype, it.through, it.loses) for it in census.cancelling}
    assert found["0", "1", "forward"] == ("float32", "float16", True), "through a view"
    assert found["3", "4", "forward"] == ("bfloat16", "float32", False)
    # The backward of the widening: to fp32 and back again.
    assert found["4", "3", "backward"] == ("bfloat16", "float32", False)
    assert sum(it.calls for it in census.cancelling) == 3


def test_values_that_changed_in_between_do_not_cancel():
    def forward(self, x):
        y = x.half()
        y.mul_(2)
        return y.float() + x.half().sin().float() + x.half().clone().float()

    x = torch.randn(4, requires_grad=True)
    census = census_of(Calls(forward), x, objective=lambda model, x: model(x).sum())
    assert [it for it in census.cancelling if it.phase == "forward"] == []


def test_modules_that_were_meant_to_be_low_and_are_not():
    class Odd(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.function = function

        def forward(self, x):
            return self.function(x, self.weight)

    @torch.autocast(DEVICE.type, enabled=False)
    def off(x, weight):
        return x.float() @ weight

    net = nn.ModuleDict(
        {
            "low": Odd(lambda x, weight: x @ weight),
            "double_": Odd(lambda x, weight: (x.double() @ weight.double()).float()),
            "out_": Odd(
                lambda x, weight: (
                    torch.mm(x.detach(), weight.detach(), out=torch.empty(3, 4, device=x.device)) + weight.sum()
                )
            ),
            "in_place": Odd(lambda x, weight: x.new_zeros(3, 4).addmm_(x, weight)),
            "off": Odd(off),
            "pinned": Odd(lambda x, weight: x @ weight),
            "script": torch.jit.script(nn.Linear(4, 4, bias=False)),
            "no_rule": Odd(lambda x, weight: torch.dot(x.flatten(), weight.flatten().repeat(2)[:12])),
        }
    )

    def objective(model, x):
        with torch.autocast(DEVICE.type, enabled=False):  # a scripted module is called outside of the region
            script = model["script"](x)
        return script.sum() + sum(child(x).float().sum() for name, child in model.items() if name != "script")

    census = census_of(net, torch.randn(3, 4), objective=objective, pins=["pinned"])
    reasons = {it.module: (it.op.removeprefix("aten::"), it.dtype, it.reason) for it in census.meant_low}
    assert reasons["double_"][:2] == ("mm", "float64") and "float64" in reasons["double_"][2]
    assert reasons["out_"][:2] == ("mm", "float32") and "out=" in reasons["out_"][2]
    assert reasons["in_place"][:2] == ("addmm_", "float32") and "in place" in reasons["in_place"][2]
    assert "autocast was off" in reasons["off"][2]
    assert reasons["pinned"][2] == "pinned"
    assert "TorchScript" in reasons["script"][2]
    assert "no rule" in reasons["no_rule"][2]
    assert "low" not in reasons and len(reasons) == 7


def test_ops_in_a_low_dtype_inside_a_pinned_module_and_the_proof_of_a_pin():
    class Escapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return self.inner(x)

    net = nn.Sequential(nn.Linear(4, 4), Escapes(), nn.Linear(4, 4))
    census = census_of(net, torch.randn(3, 4), pins=["1", "2"])
    assert {(it.module, it.phase) for it in census.meant_fp32} == {("1.inner", "forward"), ("1.inner", "backward")}
    assert pins_hold(census, ["2"]) == []
    violations = pins_hold(census, ["1", "2"])
    assert {it["module"] for it in violations} == {"1.inner"}
    assert any("addmm ran in bfloat16 in the forward, 1 times" in it["reason"] for it in violations)
    assert any("in the backward" in it["reason"] for it in violations)


def test_a_pin_holds_where_gradients_of_its_input_add_up_in_low():
    """In x + pinned(x) two bf16 gradients meet: the engine's sum, which is not the pinned module's."""
    net = Calls(
        lambda self, x: self.after(self.first(x) + self.pinned(self.first(x))) + self.twice(self.first(x)),
        first=nn.Linear(4, 4),
        pinned=nn.Linear(4, 4),
        after=nn.Linear(4, 4),
        twice=Calls(lambda self, x: self.pinned(x) * self.pinned(x), pinned=nn.Linear(4, 4)),
    )

    def residual(self, x):
        y = self.first(x)
        return self.after(y + self.pinned(y)) + y

    net.function = residual
    census = census_of(net, torch.randn(3, 4), pins=["pinned"])
    assert "add: bf16 bf16 -> bf16" in ops_of(census, "first", "backward")
    assert pins_hold(census, ["pinned"]) == [] and census.meant_fp32 == []
    net.function = lambda self, x: self.twice(self.first(x))
    census = census_of(net, torch.randn(3, 4), pins=["twice.pinned"])
    assert pins_hold(census, ["twice.pinned"]) == []


def test_a_pin_holds_in_the_recompute():
    net = Calls(
        lambda self, x: checkpoint(self.block, self.first(x), use_reentrant=False),
        first=nn.Linear(4, 4),
        block=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    )
    census = census_of(net, torch.randn(3, 4), pins=["block.0", "block.2"])
    assert ops_of(census, "block.0", "recompute")["addmm: fp32 fp32 fp32 -> fp32"] == 1
    assert pins_hold(census, ["block.0", "block.2"]) == []
    assert pins_hold(census, ["block"]) == [], "what stands between them takes fp32"
    assert pins_hold(census, ["first"]) != []


def test_a_pin_that_is_never_called_does_not_hold():
    net = Calls(lambda self, x: self.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2))
    census = census_of(net, torch.randn(3, 1, 4), pins=["attention.out_proj"])
    (violation,) = pins_hold(census, ["attention.out_proj"])
    assert violation["module"] == "attention.out_proj" and "was not called" in violation["reason"]
    assert census.never_called == ["attention.out_proj"]
    assert pins_hold(census_of(net, torch.randn(3, 1, 4)), ["attention.out_proj"]) != []


def test_pins_that_stand_are_known():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pin_fp32(net, ["1"])
    census = census_of(net, torch.randn(3, 4))
    assert census.pins == ["1"] and census.low_owners() == ["0"] and pins_hold(census, ["1"]) == []
    without = census_of(net, torch.randn(3, 4), pins=[])
    assert without.low_owners() == ["0", "1"]


# ---------------------------------------------------------------------- neutrality


def test_a_census_leaves_everything_as_it_was():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(DEVICE)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(5, 4)
    random = torch.get_rng_state()
    census = census_of(net, x)
    assert census.neutral and "no bit" in census.neutrality_note
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.is_autocast_cache_enabled()


def test_where_watching_changes_the_step_it_is_said_and_the_module_named():
    class Looks(nn.Module):
        """As torch's own fast paths: it does otherwise under a mode."""

        def forward(self, x):
            watched = torch.utils._python_dispatch.is_in_torch_dispatch_mode()
            return x.double() if watched else x * 1.5

    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Looks()), nn.Linear(4, 4).double())
    census = census_of(net, torch.randn(3, 4), torch.float32, lambda m, x: m[2](m[1](m[0](x)).double()).sum())
    assert census.neutral is False
    assert "first in 1.0 (float32 -> float64), 1 (float32 -> float64)" in census.neutrality_note


def test_kernels_that_run_other_ops_are_where_a_mode_changes_the_path():
    """Inside a kernel autocast holds, but not under a mode: a fast path is bf16 bare and fp32 when it is watched."""
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    for name, net, x, changed in (
        ("fast path", nn.Sequential(encoder, nn.Linear(16, 4)), torch.randn(2, 3, 16), "0 (bfloat16 -> float32)"),
        (
            "bilinear",
            Calls(lambda self, x: self.child(x, x), child=nn.Bilinear(16, 16, 8)),
            torch.randn(4, 16),
            "child",
        ),
    ):
        census = census_of(net, x)
        assert census.neutral or f"first in {changed}" in census.neutrality_note, name
        assert census_of(net, x, torch.float32).neutral, name
    with torch.no_grad(), torch.autocast(DEVICE.type, BF16):
        bare = encoder(torch.randn(2, 3, 16).to(DEVICE)).dtype
    census = census_of(nn.Sequential(encoder, nn.Linear(16, 4)), torch.randn(2, 3, 16))
    watched = {it.outputs for it in census.ops if it.op == "aten::_transformer_encoder_layer_fwd"}
    assert census.neutral == (watched == {(str(bare).removeprefix("torch."),)}), "what differs is noticed"


def test_a_step_that_does_not_repeat_itself_is_not_blamed_on_watching():
    noise = iter(range(100))
    net = Calls(lambda self, x: self.child(x) * next(noise), child=nn.Linear(4, 4))
    census = census_of(net, torch.randn(3, 4))
    assert census.neutral is False and "two runs without watching differ" in census.neutrality_note


def test_nan_gradients_are_the_same_bits():
    census = census_of(nn.Linear(4, 4), torch.full((3, 4), math.nan))
    assert census.neutral


# ---------------------------------------------------------------------- what a census says


def test_a_census_is_strict_json_of_the_schema():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    census = census_of(net, torch.randn(3, 4), pins=["0"])
    told = json.loads(json.dumps(census.as_dict(), allow_nan=False))
    assert set(told["census"][0]) == {"module", "phase", "op", "inputs", "outputs", "calls"}
    assert {"module", "phase", "by", "from", "to", "calls", "bytes"} <= set(told["casts"][0])
    assert sum(row["calls"] for row in told["census"]) == sum(row.calls for row in census.ops)
    assert len({json.dumps({k: v for k, v in row.items() if k != "calls"}) for row in told["census"]}) == len(
        told["census"]
    )
    assert told["neutral"] is True and told["frozen_recasts"][0]["weight"].startswith("1.")


def test_shares():
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
    census = census_of(net, torch.randn(32, 64))
    assert 0 < census.cast_share < 1 and census.cast_seconds > 0 and census.cast_time_share > 0
    moved = sum(row.bytes for row in census.ops if row.op == "aten::_to_copy")
    assert census.cast_share == moved / sum(row.bytes for row in census.ops)
    assert census.cast_bytes == moved, "here each copy is a cast"


# ---------------------------------------------------------------------- odd steps


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.float().to(gradient.dtype) * 2


ODD_MODELS = [
    (lambda: nn.Identity(), torch.randn(3, 4, requires_grad=True)),
    (lambda: nn.Linear(4, 4), torch.randn(0, 4)),
    (lambda: nn.Linear(4, 4).double(), torch.randn(3, 4).double()),
    (lambda: nn.Linear(4, 4).to(BF16), torch.randn(3, 4).to(BF16)),
    (
        lambda: Calls(lambda self, x: torch.view_as_real(torch.fft.fft(self.child(x).float())), child=nn.Linear(4, 4)),
        torch.randn(3, 4),
    ),
    (lambda: nn.Embedding(5, 4, sparse=True), torch.arange(3)),
    (lambda: nn.EmbeddingBag(5, 4), torch.arange(4).view(2, 2)),
    (lambda: nn.Sequential(nn.Linear(4, 4), Calls(lambda self, x: Doubled.apply(x))), torch.randn(3, 4)),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(3, 4)),
    (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.randn(3, 4)),
    (
        lambda: Calls(
            torch.autocast(DEVICE.type, enabled=False)(
                lambda self, x: torch.sparse.mm(x.relu().to_sparse(), self.child.weight)
            ),
            child=nn.Linear(4, 4),
        ),
        torch.randn(3, 4),
    ),
]


def test_odd_models(subtests):
    for make, x in ODD_MODELS:
        torch.manual_seed(0)
        model = make()
        with subtests.test(str(model)):
            census = census_of(model, x, BF16, lambda model, x: model(x).float().sum())
            assert census.neutral, census.neutrality_note
            json.dumps(census.as_dict(), allow_nan=False)


def test_a_step_in_inference_mode_and_one_under_no_grad():
    def objective(model, x):
        with torch.inference_mode():
            target = model(x).float()
        with torch.no_grad():
            other = model(x)
        return (model(x).float() - target.clone() - other).sum()

    census = census_of(nn.Linear(4, 4), torch.randn(3, 4), objective=objective)
    forward = ops_of(census, "", "forward")
    assert census.neutral and forward["addmm: bf16 bf16 bf16 -> bf16"] == 2
    # In inference mode ops come whole: `linear`, not what it is made of, and `to`.
    assert forward["linear: bf16 bf16 bf16 -> bf16"] == 1 and forward["to: fp32 -> bf16"] == 3
    # The cache holds what was cast without gradients, and not what was in inference mode.
    assert sum(it.calls for it in casts_of(census, module="", by="autocast")) == 3 + 3 + 1


def test_torch_func_and_vmap_inside_a_step():
    def objective(model, x):
        parameters = dict(model.named_parameters())

        def loss(parameters, row):
            return torch.func.functional_call(model, parameters, row).float().sum()

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        return gradients["weight"].pow(2).sum() + model(x).sum()

    census = census_of(nn.Linear(4, 4), torch.randn(3, 4), objective=objective)
    assert census.neutral


def test_a_step_that_fails_leaves_no_mode_behind():
    def objective(model, x):
        model(x).float()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        census_of(nn.Linear(4, 4), torch.randn(3, 4), objective=objective)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.is_autocast_cache_enabled()
    assert not TorchAutocast(DEVICE.type, dtype=BF16).was_entered


def test_records_are_counted_on_the_way(monkeypatch):
    from amp_recipes.numerics.census import watch as census_watch

    net, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4)
    whole = census_of(net, x)
    monkeypatch.setattr(census_watch, "_MOST_RECORDS", 3)
    assert census_of(net, x).ops == whole.ops


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_census_on_a_gpu():
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).cuda()
    x = torch.randn(8, 64, device="cuda")
    census = census_of(net, x, FP16)
    assert census.low_owners() == ["0", "2"] and census.cast_time_share > 0
    fake = fake_census(net, total, x, FP16)
    assert {(it.module, it.phase, it.op): it.calls for it in fake.ops} == {
        (it.module, it.phase, it.op): it.calls for it in census.ops
    }
