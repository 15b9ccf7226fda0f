"""Whose ops are whose: attribution against another design (tags on autograd nodes), and against what is known."""

import sys
import threading
from collections import Counter, namedtuple
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cpu import recurrent_in_bf16
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from amp_recipes.files.user_code import Line, lies_with_the_user, user_line
from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.watch.observe import OUTSIDE, Attribution, OpWatch, Place, dtype_name, op_name


class Places(OpWatch):
    """Every op with its place, in order."""

    def __init__(self, modules, lines=False):
        super().__init__(Attribution(modules, lines), self.saw)
        self.seen = []
        self.lines = []

    def saw(self, op, args, kwargs, output):
        self.seen.append((op_name(op), self.at.here))
        self.lines.append(self.at.line)

    def of(self, module, phase):
        return [op.removeprefix("aten::") for op, place in self.seen if place == Place(module, phase)]


class Tags(TorchFunctionMode):
    """Each node carries the module that was on top when torch returned what it stands behind."""

    def __init__(self, modules):
        super().__init__()
        self.names = {module: name for name, module in modules.named_modules()}
        self.stack, self.seen = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.tag(output if isinstance(output, (tuple, list)) else [output])
        return output

    def tag(self, values):
        nodes = [it.grad_fn for it in values if isinstance(it, torch.Tensor) and it.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if id(self) not in node.metadata:
                node.metadata[id(self)] = self.stack[-1] if self.stack else OUTSIDE
                nodes += [following for following, _ in node.next_functions if following is not None]

    def after(self, module, _, output):
        self.tag(tree_leaves(output))
        self.stack.pop()

    def see(self, op):
        if torch._C._current_graph_task_id() == -1:
            place = Place(self.stack[-1] if self.stack else OUTSIDE, "forward")
        elif self.stack:
            place = Place(self.stack[-1], "recompute")
        else:
            place = Place(torch._C._current_autograd_node().metadata.get(id(self), OUTSIDE), "backward")
        self.seen.append((op_name(op), place))

    def run(self, step):
        class See(TorchDispatchMode):
            def __torch_dispatch__(mode, func, types, args=(), kwargs=None):
                output = func(*args, **(kwargs or {}))
                self.see(func)
                return output

        with ExitStack() as stack:
            hook = register_module_forward_pre_hook(lambda module, _: self.stack.append(self.names[module]))
            stack.callback(hook.remove)
            stack.callback(register_module_forward_hook(self.after, always_call=True).remove)
            stack.enter_context(self)
            stack.enter_context(See())
            step()
        return self.seen


@dataclass
class Boxed:
    hidden: torch.Tensor


class Boxing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Boxed(self.linear(x).tanh() * 2)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 2


class Squaring(nn.Module):
    def forward(self, x):
        return Square.apply(x.exp()).tanh()


class Calls(nn.Module):
    """Runs what it is given, with its children at hand."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return self.function(self, x)


def linear():
    return nn.Linear(4, 4)


def block():
    return nn.Sequential(linear(), nn.GELU(), linear())


def frozen_first():
    net = nn.Sequential(linear(), nn.Tanh(), linear())
    net[0].requires_grad_(False)
    return net


def same_twice():
    shared = linear()
    return Calls(lambda self, x: self.two(self.one(x)), one=shared, two=shared)


NETWORKS = {
    "mlp": block,
    "dataclass outputs": lambda: Calls(lambda self, x: self.head(self.box(x).hidden), box=Boxing(), head=linear()),
    "one module called three times": lambda: Calls(
        lambda self, x: self.child(self.child(self.child(x)).sin()), child=linear()
    ),
    "one module under two names": same_twice,
    "autograd.Function": lambda: nn.Sequential(linear(), Squaring(), linear()),
    "frozen first layer": frozen_first,
    "attention": lambda: Calls(
        lambda self, x: self.attention(x[None], x[None], x[None])[0], attention=nn.MultiheadAttention(4, 2)
    ),
    "recurrent": lambda: Calls(lambda self, x: self.layer(x[None])[0], layer=recurrent_in_bf16()(4, 4)),
    "convolution": lambda: Calls(
        lambda self, x: self.norm(self.convolution(x[:, None])).relu_(),
        convolution=nn.Conv1d(1, 3, 2),
        norm=nn.BatchNorm1d(3),
    ),
    "in place": lambda: Calls(lambda self, x: self.child(x).mul_(2).add_(1).relu_(), child=linear()),
    "tied weights": lambda: Calls(
        lambda self, x: F.linear(self.embedding(x.long().abs() % 4).sum(1), self.embedding.weight),
        embedding=nn.Embedding(4, 4),
    ),
    "checkpoint": lambda: Calls(
        lambda self, x: self.head(checkpoint(self.block, self.first(x), use_reentrant=False)),
        first=linear(),
        block=block(),
        head=linear(),
    ),
    "reentrant checkpoint": lambda: Calls(
        lambda self, x: self.head(checkpoint(self.block, self.first(x), use_reentrant=True)),
        first=linear(),
        block=block(),
        head=linear(),
    ),
    "nested checkpoints": lambda: Calls(
        lambda self, x: checkpoint(
            lambda y: self.head(checkpoint(self.block, y, use_reentrant=False)).sin(), x, use_reentrant=False
        ),
        block=block(),
        head=linear(),
    ),
}


def step_of(net, autocast, inputs_need_gradient=False):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=inputs_need_gradient)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).float().pow(2).mean()
        loss.backward()

    return step


def without_accumulation(seen):
    """Gradients of leaves, and sums of gradients, belong elsewhere in the two designs."""
    return [(op, place) for op, place in seen if op not in ("aten::detach", "aten::add", "aten::add_", "aten::clone")]


@pytest.mark.parametrize("autocast", [False, True])
def test_places_agree_with_tags_on_nodes(subtests, autocast):
    for name, network in NETWORKS.items():
        torch.manual_seed(0)
        net = network()
        step = step_of(net, autocast)
        with subtests.test(name):
            with Places(net) as places:
                step()
            net.zero_grad()
            tagged = Tags(net).run(step)
            assert [op for op, _ in places.seen] == [op for op, _ in tagged], "both see the same ops in the same order"
            if name != "nested checkpoints":  # there the tags call the recompute of plain functions a backward
                assert without_accumulation(places.seen) == without_accumulation(tagged)
            assert any(place.phase == "backward" for _, place in places.seen)


def test_what_is_in_no_module_is_outside():
    net = linear()
    step = step_of(net, autocast=False)
    with Places(net) as places:
        step()
    assert places.of(OUTSIDE, "forward") == ["pow", "mean", "ones_like"]
    assert places.of(OUTSIDE, "backward") == ["expand", "div", "pow", "mul", "mul"]
    assert places.of("", "forward") == ["t", "addmm"]
    # The input needs no gradient: the weight's product, the bias's sum, and three leaves' worth of bookkeeping.
    assert places.of("", "backward") == ["t", "mm", "t", "sum", "view", "detach", "t", "detach"]


def test_a_checkpoints_second_forward_is_a_recompute_with_the_same_ops():
    net = NETWORKS["checkpoint"]()
    with Places(net) as places:
        step_of(net, autocast=False)()
    for name, ops in {"block.0": ["t", "addmm"], "block.1": ["gelu"]}.items():
        assert places.of(name, "forward") == ops
        # Beside them what it keeps for the backward is detached.
        assert [op for op in places.of(name, "recompute") if op != "detach"] == ops
    # The last layer's output is not needed again, and torch stops before it.
    assert set(places.of("block.2", "recompute")) == {"t", "detach"}
    assert places.of("head", "recompute") == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_of_plain_code_belongs_to_the_module_whose_code_it_is(reentrant):
    def forward(self, x):
        return self.head(checkpoint(lambda y: self.child(y.sin()).cos().tanh(), x, use_reentrant=reentrant))

    net = nn.Sequential(linear(), Calls(forward, child=linear(), head=linear()))
    with Places(net) as places:
        step_of(net, autocast=False)()
    assert {"sin", "cos"} <= set(places.of("1", "recompute"))
    assert {"sin", "cos"} <= set(places.of("1", "forward"))
    assert not set(places.of("1", "backward")) & {"addmm", "sigmoid"}
    assert "addmm" in places.of("1.child", "recompute")
    assert places.of("0", "recompute") == []


def test_a_backward_inside_a_forward_is_a_backward_and_what_follows_is_forward_again():
    """A gradient penalty: the nodes that `create_graph=True` makes belong to the modules they differentiate."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.child(x).tanh().sum(), x, create_graph=True)
        return gradient.pow(2)

    net = Calls(forward, child=nn.Sequential(linear(), nn.Sigmoid(), linear()))
    with Places(net) as places:
        net(torch.randn(3, 4)).sum().backward()
    kinds = Counter(place for _, place in places.seen)
    assert {place.phase for place in kinds} == {"forward", "backward"}
    assert "sigmoid_backward" in places.of("child.1", "backward"), "the first backward, within the forward"
    assert "sigmoid_backward" not in places.of("child.1", "forward")
    # The derivative of sigmoid' takes it again: its node came to be in the first backward.
    holders = {place.module for op, place in places.seen if op == "aten::sigmoid_backward"}
    assert holders == {"child.1"} and places.of("child.1", "backward").count("sigmoid_backward") > 1
    assert "pow" in places.of("", "forward")
    assert "pow" in places.of("", "backward") or "mul" in places.of("", "backward")
    assert "mm" in places.of("child.0", "backward")
    assert set(places.of(OUTSIDE, "backward")) <= {"expand", "detach"}, "the loss's, and that of the leaf x"


def test_a_double_backward_outside_of_modules():
    net = nn.Sequential(linear(), nn.Sigmoid(), linear())
    x = torch.randn(3, 4, requires_grad=True)
    with Places(net) as places:
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        penalty = (gradient * 3).pow(2).sum()
        marker = len(places.seen)
        penalty.backward()
    second = Counter(place for _, place in places.seen[marker:])
    assert second[Place("1", "backward")] > 0 and second[Place("0", "backward")] > 0
    products = [place for op, place in places.seen[marker:] if op in ("aten::mm", "aten::addmm")]
    assert {place.module for place in products} <= {"0", "2"}
    assert Place(OUTSIDE, "backward") in second, "of the penalty itself"


def test_a_forward_past_call_belongs_to_the_caller():
    net = Calls(lambda self, x: self.child.forward(x), child=linear())
    with Places(net) as places:
        step_of(net, autocast=False)()
    assert "addmm" in places.of("", "forward") and "mm" in places.of("", "backward")
    assert places.of("child", "forward") == places.of("child", "backward") == []
    assert places.at.called == {""}


def test_a_module_that_raises_leaves_the_places_right():
    def fails(self, x):
        x.sin()
        raise ValueError("on purpose")

    def forward(self, x):
        with suppress(ValueError):
            self.bad(x)
        return self.good(x).cos()

    net = Calls(forward, bad=nn.Sequential(Calls(fails)), good=linear())
    with Places(net) as places:
        step_of(net, autocast=False)()
    assert places.of("bad.0", "forward") == ["sin"]
    assert "cos" in places.of("", "forward")
    assert places.of("bad.0", "backward") == places.of("bad", "backward") == []


def test_a_pre_hook_that_raises_leaves_the_places_right():
    def forward(self, x):
        with suppress(ValueError):
            self.child(x)
        return x.cos()

    def refuse(module, args):
        if isinstance(module, nn.Tanh):
            raise ValueError("on purpose")

    net = Calls(forward, child=nn.Tanh())
    hook = register_module_forward_pre_hook(refuse)  # runs before ours, which then does not run
    try:
        with Places(net) as places:
            net(torch.ones(2))
            torch.ones(2).exp()
    finally:
        hook.remove()
    assert places.of("", "forward") == ["cos"] and "exp" in places.of(OUTSIDE, "forward")


def test_modules_that_are_not_in_the_tree_are_named_by_their_class():
    net = Calls(lambda self, x: nn.Sigmoid()(x).cos())
    with Places(net) as places:
        net(torch.ones(2, requires_grad=True)).sum().backward()
    assert places.of("<Sigmoid>", "forward") == ["sigmoid", "detach"]
    assert places.of("<Sigmoid>", "backward") == ["detach", "sigmoid_backward"]
    assert places.of(OUTSIDE, "backward")[-1] == "detach", "the gradient of a leaf that no module holds"


def test_hooks_on_tensors_belong_to_the_node_they_stand_on():
    def forward(self, x):
        y = self.child(x)
        y.register_hook(lambda gradient: gradient.sign())
        return y.tanh()

    net = Calls(forward, child=linear())
    with Places(net) as places:
        step_of(net, autocast=False)()
    assert "sign" in places.of("child", "backward")


def test_gradients_of_a_weight_belong_to_the_module_that_holds_it_or_the_one_above_that_ran():
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    attention.forward = lambda x: attention[0](x, x, x)[0]
    with Places(attention) as places:
        attention(torch.randn(3, 1, 4)).sum().backward()
    assert "0.out_proj" not in {place.module for _, place in places.seen}
    assert places.of("0", "backward").count("detach") >= 4, "weights and biases of both projections"


def test_gradients_of_a_leaf_that_no_module_holds():
    scale = torch.ones(4, requires_grad=True)
    net = linear()
    with Places(net) as places:
        (net(torch.randn(3, 4)) * scale).sum().backward()
    assert scale.grad is not None
    assert sum(op == "aten::detach" and place.module == OUTSIDE for op, place in places.seen) == 1


def test_other_threads_do_not_disturb():
    """A dispatch mode lives on its thread; module hooks are everybody's."""
    net, other = linear(), nn.Sequential(nn.Tanh(), linear())
    x = torch.randn(3, 4)
    loss = net(x).sum()

    def forward(self, x):
        thread = threading.Thread(target=lambda: other(x).sum().backward())
        thread.start()
        thread.join()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return self.child(x).cos()

    outer = Calls(forward, child=net)
    with Places(outer) as places:
        outer(x).sum().backward()
    assert other[1].weight.grad is not None and net.weight.grad is not None
    assert "cos" in places.of("", "forward") and "addmm" in places.of("child", "forward")
    assert {place.module for _, place in places.seen} == {"", "child", OUTSIDE}


def test_containers_of_every_kind_may_leave_a_module():
    Pair = namedtuple("Pair", "left right")

    def forward(self, x):
        return {"pair": Pair(self.child(x), [x.sin(), (x.cos(),)])}

    net = Calls(lambda self, x: self.inner(x)["pair"].left.tanh(), inner=Calls(forward, child=linear()))
    with Places(net) as places:
        step_of(net, autocast=True)()
    assert "tanh_backward" in places.of("", "backward") and "mm" in places.of("inner.child", "backward")


def test_an_instrument_may_be_entered_again_and_beside_another():
    net = block()
    places, other = Places(net), Places(net)
    with places:
        step_of(net, autocast=True)()
    first = list(places.seen)
    places.seen.clear()
    net.zero_grad()
    with places, other, torch.autocast("cpu", torch.bfloat16):
        step_of(net, autocast=True)()
    assert places.seen == first == other.seen


def test_nothing_is_left_behind():
    from torch.nn.modules import module

    net = block()
    hooks = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    multithreading = torch._C._is_multithreading_enabled()
    with pytest.raises(ZeroDivisionError), Places(net):
        assert not torch._C._is_multithreading_enabled()
        raise ZeroDivisionError
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == hooks
    assert torch._C._is_multithreading_enabled() == multithreading


def test_what_saw_runs_is_not_seen_and_about_to_see_comes_before():
    before, after = [], []

    def about_to_see(op, args, kwargs):
        if op_name(op) == "aten::add_":
            before.append(args[0].clone())

    def saw(op, args, kwargs, output):
        after.append((op_name(op), output.sum() if isinstance(output, torch.Tensor) else None))

    x = torch.zeros(2)
    with OpWatch(Attribution(nn.Identity()), saw, about_to_see):
        x.add_(1)
    assert [op for op, _ in after] == ["aten::add_"]
    assert torch.equal(before[0], torch.zeros(2)) and after[0][1] == 2


def test_an_op_that_fails_is_not_seen():
    with Places(nn.Identity()) as places, pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert "aten::mm" not in [op for op, _ in places.seen]


def test_attribution_alone_knows_what_runs():
    net = nn.Sequential(nn.Tanh())
    seen = []
    net[0].register_forward_pre_hook(lambda *_: seen.append(attribution.here))
    with Attribution(net) as attribution:
        assert attribution.here == Place(OUTSIDE, "forward")
        net(torch.ones(1))
        assert attribution.here == Place(OUTSIDE, "forward")
    assert seen == [Place("0", "forward")]


def test_lines_of_the_forward_also_in_the_backward():
    def forward(self, x):
        y = self.child(x)
        z = y.sin()
        return z * y

    net = Calls(forward, child=linear())
    first = forward.__code__.co_firstlineno
    with Places(net, lines=True) as places:
        step_of(net, autocast=True)()
    of = {}
    for (op, place), line in zip(places.seen, places.lines, strict=True):
        of.setdefault((op.removeprefix("aten::"), place.phase), []).append(line)
    assert of["sin", "forward"] == [Line(__file__, first + 2)]
    assert of["addmm", "forward"] == [Line(__file__, first + 1)], "torch's own lines are not the user's"
    assert of["cos", "backward"] == [Line(__file__, first + 2)]
    assert Line(__file__, first + 1) in of["mm", "backward"]
    assert Line(__file__, first + 3) in of["mul", "backward"]


def test_users_lines(tmp_path):
    assert user_line() == Line(__file__, sys._getframe().f_lineno)
    code = "from amp_recipes.files.user_code import user_line\nresult = user_line()"
    for filename, found in (
        (str(tmp_path / "train.py"), True),
        ("<ipython-input-3-abc>", True),
        ("<stdin>", True),
        ("<string>", False),
        (torch.__file__, False),
        (str(tmp_path / "site-packages" / "package" / "module.py"), False),  # of another environment
        (str(tmp_path / ".venv" / "train.py"), True),
    ):
        space = {}
        exec(compile(code, filename, "exec"), space)
        assert space["result"] == (Line(filename, 2) if found else Line(__file__, space["result"].number))
        assert lies_with_the_user(filename) == found
    assert str(Line("train.py", 3)) == "train.py:3"


def test_tensors_and_names():
    x = torch.ones(1)
    assert list(tensors_in({"a": [x, 1]}, (x, None))) == [x, x]
    assert dtype_name(torch.bfloat16) == "bfloat16" and op_name(torch.ops.aten.mm.out) == "aten::mm"


def test_watching_does_not_import_the_compiler(monkeypatch):
    """It takes 2 s, and torch's own dispatch modes do."""
    net = nn.Linear(2, 2)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import raises ImportError
    monkeypatch.delattr(torch, "_dynamo", raising=False)
    with Places(net) as places:
        net(torch.ones(1, 2)).sum().backward()
    assert places.seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_places_on_a_gpu(subtests):
    """Its backward runs on the calling thread, where nodes have one count."""
    for name, network in NETWORKS.items():
        net = network()
        step = step_of(net, autocast=False)
        with Places(net) as on_cpu:
            step()
        net = net.cuda()
        x = torch.randn(3, 4, device="cuda")
        with Places(net) as on_gpu:
            net(x).float().pow(2).mean().backward()
        with subtests.test(name):
            assert {place for _, place in on_gpu.seen} == {place for _, place in on_cpu.seen}
