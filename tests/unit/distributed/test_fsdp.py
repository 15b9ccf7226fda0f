"""What a sharded model does that one process's model does, and what it says where it cannot."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from cpu import runs_lstm
from processes import in_processes
from sharded_runs import SYMBOLS, WIDTH, Net, batches_of, loss_of
from torch import nn
from torch_release import needs_fsdp

from amp_recipes import distributed, fwd_default_precision
from amp_recipes.config.options.run_options import RunOptions
from amp_recipes.distributed.meshes import layout
from amp_recipes.errors import ConfigError, RecipeError
from amp_recipes.precision.pins import decorated_modules, pin_fp32

pytestmark = needs_fsdp

CPU = torch.device("cpu")


def options_of(**options):
    return RunOptions(**{"strategy": "fsdp", "device": "cpu", **options})


# ---------------------------------------------------------------------- pins


class Attention(nn.Module):
    """Uses a pinned child's weights without calling it, as MultiheadAttention does, and has parameters of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.gate = nn.Parameter(torch.full((WIDTH,), 1.0 + 2**-12))  # not a bf16 number
        self.seen = []

    def forward(self, x):
        self.seen.append(self.gate.dtype)
        return x + self.attention(x, x, x, need_weights=False)[0] * self.gate


class Decorated(nn.Linear):
    @fwd_default_precision
    def forward(self, x):
        return super().forward(x)


class Pinned(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decorated = Decorated(WIDTH, WIDTH)
        self.group = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Sequential(nn.Linear(6, 6)))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols):
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x)
        x = self.decorated(self.recurrent(x)[0])
        return self.head(self.group(x))


def pinned_run(rank, dtype, pins):
    torch.manual_seed(0)
    plain, sharded = (nn.ModuleDict({"model": model}) for model in (lambda it: (it, copy.deepcopy(it)))(Pinned()))
    names = [*pin_fp32(sharded, pins).names, *decorated_modules(sharded)]
    pin_fp32(plain, pins)
    distributed.wrap(sharded, CPU, options_of(), dtype, names)
    seen = {}

    def note(module, inputs, output):
        tensors = (*module._parameters.values(), output)
        seen[names_of[module]] = {it.dtype for it in tensors if isinstance(it, torch.Tensor)}

    names_of = {module: name for name, module in sharded.named_modules()}
    for module in sharded.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    losses = {}
    for batch in batches_of(0, 2):  # the same batches on both ranks, so that the average is that of one
        for modules in (plain, sharded):
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(modules["model"](batch), batch)
            (loss * 1024).backward()
            losses.setdefault(modules is plain, []).append(loss.item())
    assert losses[True] == losses[False]
    for (name, here), there in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(here.grad.full_tensor(), there.grad, rtol=0, atol=0, msg=name)
    assert {dtype for block in sharded["model"].blocks for dtype in block.seen} == {torch.float32}
    return seen


PINS = {  # what is pinned, and which linear layers then run in fp32
    "decorated": ([], ["decorated"]),
    "inside": (["model.group"], ["decorated", "group.0.0", "group.1.0"]),
    "direct use": (["model.head", "model.blocks.0.attention.out_proj"], ["decorated", "head"]),
    "all": (["model"], ["decorated", "group.0.0", "group.1.0", "head"]),
}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "decorated"),
        (torch.bfloat16, "inside"),
        (torch.bfloat16, "direct use"),
        (torch.float16, "all"),
        pytest.param(torch.bfloat16, "all", marks=pytest.mark.extended),
        pytest.param(torch.float16, "decorated", marks=pytest.mark.extended),
        pytest.param(torch.float16, "inside", marks=pytest.mark.extended),
        pytest.param(torch.float16, "direct use", marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_pins_hold_bit_for_bit(dtype, name):
    """Parameters, results and gradients: those of autocast with the same pins in one process."""
    pins, fp32 = PINS[name]
    if not runs_lstm(dtype):
        pins = [*pins, "model.recurrent"]
    for seen in in_processes(pinned_run, 2, dtype, pins):
        expected = {f"model.{name}": {torch.float32} for name in fp32}
        low = {f"model.{name}": {dtype} for name in ("group.0.0", "group.1.0", "head") if name not in fp32}
        assert seen == {**expected, **low}


# ---------------------------------------------------------------------- options


REFUSED = [
    ({"shard_modules": ["model.block.*"]}, None, "shard_modules: 'model.block.*' matches no module. Did you mean"),
    ({"shard_replicas": 3}, None, r"shard_replicas \(3\) does not divide the 2 processes"),
    ({"tensor_parallel": 2}, None, "tensor_parallel is 2, but the YAML has no tensor_parallel_plan"),
    ({"tensor_parallel": 2}, {"*.up": "rows"}, "'rows' is not a style; expected colwise, rowwise or colwise_gathered"),
    ({"tensor_parallel": 2}, {"*.norm": "colwise"}, r"\(LayerNorm\); only Linear and Embedding can be divided"),
    ({"strategy": "ddp", "cpu_offload": True}, None, "cpu_offload True is an option of --strategy fsdp"),
    ({"gradient_compression": "bf16"}, None, "gradient_compression bf16 is an option of --strategy ddp"),
    ({"sync_batchnorm": True}, None, "SyncBatchNorm runs on GPUs only"),
    ({"activation_checkpointing": ["type:Blok"]}, None, "Did you mean type:Block"),
]


def test_options_that_cannot_hold_are_refused_at_once(monkeypatch, subtests):
    monkeypatch.setattr("amp_recipes.distributed.checks.initialized", lambda: True)
    monkeypatch.setattr("amp_recipes.distributed.checks.world_size", lambda: 2)
    for options, plan, message in REFUSED:
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            distributed.check(options_of(**options), CPU, nn.ModuleDict({"model": Net()}), plan)


def test_all_mistakes_are_told_together_and_in_one_process_too():
    options = options_of(shard_modules=["x"], activation_checkpointing=["y"])
    with pytest.raises(ConfigError) as error:
        distributed.check(options, CPU, nn.ModuleDict({"model": Net()}), {"z": "colwise"})
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "activation_checkpointing",
        "shard_modules",
        "tensor_parallel_plan",
    ]


def test_what_only_makes_faster_is_left_unheeded_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("amp_recipes.distributed.checks.initialized", lambda: True)
    with caplog.at_level(logging.WARNING):
        options = options_of(strategy="ddp", shard_modules=["model.blocks.*"])
        distributed.check(options, CPU, nn.ModuleDict({"model": Net()}))
    assert "shard_modules is an option of --strategy fsdp; with ddp it has no effect" in caplog.text


def test_parameters_that_each_stand_in_one_place_can_be_sharded():
    inner = nn.Linear(2, 2)
    for modules in ({"a": inner, "b": nn.Sequential()}, {"a": inner, "b": nn.Sequential(inner)}):
        distributed.fsdp.check(nn.ModuleDict(modules))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (lambda: {"a": (a := Net()), "b": tied(a)}, "a.embedding.weight is in more than one entry"),
        (lambda: {"a": nn.ParameterList([torch.ones(2)])}, "a.0 is in a module without a forward"),
        (lambda: {"a": Scalar()}, "a.temperature is a 0-dimensional tensor"),
    ],
)
def test_parameters_that_no_module_gathers_are_refused(modules, message):
    with pytest.raises(ConfigError, match=message):
        distributed.fsdp.check(nn.ModuleDict(modules()))


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.temperature


def tied(model):
    head = nn.Linear(WIDTH, SYMBOLS, bias=False)
    head.weight = model.embedding.weight
    return head


def test_layouts_of_eight_processes():
    for replicas, tensor, sizes in [
        (1, 1, {"shard": 8}),
        (2, 1, {"replicate": 2, "shard": 4}),
        (1, 8, {"shard": 1, "tensor": 8}),
        (2, 2, {"replicate": 2, "shard": 2, "tensor": 2}),
    ]:
        assert layout(SimpleNamespace(shard_replicas=replicas, tensor_parallel=tensor), 8) == sizes


# ---------------------------------------------------------------------- precision that changes


def autocast(dtype):
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def changing_run(rank):
    torch.manual_seed(0)
    plain, sharded = (nn.ModuleDict({"model": model}) for model in (lambda it: (it, copy.deepcopy(it)))(Net()))
    distributed.wrap(sharded, CPU, options_of(), torch.bfloat16)
    optimizers = [torch.optim.SGD(modules.parameters(), 0.1) for modules in (plain, sharded)]
    batch, other = batches_of(0, 2)
    found = []
    for modules, optimizer in zip((plain, sharded), optimizers, strict=True):
        losses = []
        for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16):
            with autocast(dtype):
                loss = loss_of(modules["model"](batch), batch)
            for evaluated in (None, torch.float16):  # inside the step, while the graph waits for its backward
                with torch.no_grad(), autocast(evaluated):
                    losses.append(loss_of(modules["model"](other), other).item())
            loss.backward()
            with torch.no_grad(), autocast(None):
                losses.append(loss_of(modules["model"](other), other).item())
            optimizer.step()
            with torch.no_grad(), autocast(None):  # the new weights, though the old ones had just been gathered
                losses.append(loss_of(modules["model"](other), other).item())
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == found[1]
    refused = ""
    try:
        for dtype in (torch.bfloat16, None):
            with autocast(dtype):
                sharded["model"](batch)
    except RecipeError as error:
        refused = str(error)
    return found[0], refused


def test_weights_are_gathered_as_the_context_of_the_call_asks():
    """Training in bf16, evaluating in fp32 (also inside a step), widening: all as in one process, bit for bit."""
    for losses, refused in in_processes(changing_run, 2):
        assert len(set(losses)) > 10
        assert "was called under autocast to torch.bfloat16 and then to no dtype before the backward" in refused


# ---------------------------------------------------------------------- what waits for the last micro-batch


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

    def forward(self, x, unused):
        for index, block in enumerate(self.blocks):
            x = x if index == unused else block(x)
        return x


def waiting_run(rank):
    torch.manual_seed(0)
    modules = nn.ModuleDict({"model": Optional()})
    distributed.wrap(modules, CPU, options_of(shard_replicas=2))
    distributed.wrap(modules, CPU, options_of(shard_replicas=2))  # a second fit: as it is
    units = [modules["model"], *modules["model"].blocks]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    found = []
    try:
        with distributed.no_sync(modules):
            found.append({group.all_reduce_grads for group in groups})
            raise RecipeError("inside")
    except RecipeError:
        found.append({group.all_reduce_grads for group in groups})
    modules["model"](torch.ones(1, 2), unused=1).sum().backward()  # a block that no rank calls
    return found, [it.grad is None for it in modules.parameters()]


def test_replicas_wait_for_the_last_micro_batch_and_no_longer_after_an_exception():
    for found, without in in_processes(waiting_run, 4):
        assert found == [{False}, {True}]
        assert without == [False, False, True, True, False, False]
