"""Modules under ddp, in two processes: gradients averaged once, whatever of the modules a step uses."""

import copy
import io
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from processes import in_processes
from torch import nn

from amp_recipes.distributed import ddp
from amp_recipes.errors import ConfigError, RecipeError
from amp_recipes.precision.pins import pin_fp32, pinned_modules

CPU = torch.device("cpu")


def options(**changed):
    given = {
        "find_unused_parameters": False,
        "static_graph": False,
        "gradient_compression": "off",
        "sync_batchnorm": False,
        "grad_accumulation_factor": 1,
    }
    return SimpleNamespace(**{**given, **changed})


def inputs(rank: int, step: int = 0, width: int = 3) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank))


def take_gradients(modules: nn.Module) -> dict:
    """The gradients by name, as arrays (a process sends no tensors); there are none afterwards."""
    found = {name: None if it.grad is None else it.grad.numpy().copy() for name, it in modules.named_parameters()}
    for parameter in modules.parameters():
        parameter.grad = None
    return found


def mean_gradients(modules: nn.Module, loss_of) -> dict:
    """What one process finds that accumulates the ranks' losses, each divided by their number: 2."""
    for rank in range(2):
        (loss_of(modules, rank) / 2).backward()
    return take_gradients(modules)


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert (found[name] == value).all(), name


def collectives(profile: torch.profiler.profile) -> Counter:
    """How often gloo was asked for what."""
    return Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))


def make_modules(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return nn.ModuleDict({"model": model, "frozen": nn.Linear(3, 3).requires_grad_(False)})


def loss_of(modules: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return modules["model"](modules["frozen"](inputs(rank, step))).square().mean()


# ---------------------------------------------------------------------- gradients


def average(rank: int, changed: dict) -> dict:
    modules = make_modules(seed=rank)  # as without `seed`: random weights differ
    model = modules["model"]
    ddp.wrap(modules, CPU, options(**changed))
    start = {name: it.numpy().copy() for name, it in modules.state_dict().items()}
    found = []
    for step in range(3):
        loss_of(modules, rank, step).backward()
        found.append(take_gradients(modules))
    same = modules["model"] is model and type(model) is nn.Sequential and not modules["frozen"]._forward_pre_hooks
    return {"start": start, "gradients": found, "same": same}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        pytest.param({"static_graph": True}, marks=pytest.mark.extended),
        {"find_unused_parameters": True, "static_graph": True},
    ],
    ids=str,
)
def test_gradients_are_the_mean_over_ranks_and_modules_stay_themselves(changed):
    modules = make_modules(seed=0)
    start = {name: it.numpy().copy() for name, it in modules.state_dict().items()}
    for found in in_processes(average, 2, changed):
        assert_same(found["start"], start)
        assert found["same"]
        for step in range(3):
            expected = mean_gradients(modules, lambda modules, rank, step=step: loss_of(modules, rank, step))
            assert_same(found["gradients"][step], expected)


def make_shared() -> nn.ModuleDict:
    torch.manual_seed(0)
    modules = nn.ModuleDict({"embed": nn.Linear(3, 3), "decode": nn.Linear(3, 3), "whole": nn.ModuleList()})
    modules["decode"].weight = modules["embed"].weight
    modules["whole"].append(modules["embed"])
    return modules


SHARED_LOSSES = {
    "both": lambda m, rank: m["decode"](m["embed"](inputs(rank))).square().mean(),
    "first": lambda m, rank: m["embed"](inputs(rank)).square().mean(),
    "second": lambda m, rank: m["decode"](inputs(rank)).square().mean(),
    "twice": lambda m, rank: (m["embed"](m["embed"](inputs(rank))) * m["embed"](inputs(rank, 1))).mean(),
}


def share(rank: int) -> list[dict]:
    modules = make_shared()
    ddp.wrap(modules, CPU, options())
    found = []
    for name in [*SHARED_LOSSES, *reversed(SHARED_LOSSES)]:
        SHARED_LOSSES[name](modules, rank).backward()
        found.append(take_gradients(modules))
    return found


def test_a_shared_parameter_is_averaged_once_whichever_module_a_step_uses():
    modules = make_shared()
    expected = [mean_gradients(modules, SHARED_LOSSES[name]) for name in [*SHARED_LOSSES, *reversed(SHARED_LOSSES)]]
    for found in in_processes(share, 2):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


class Parts(nn.Module):
    """Used in parts, and through a method."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = 7  # what DistributedDataParallel has as well
        self.encoder, self.decoder = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x, decode=True):
        h = self.encoder(x)
        return self.decoder(h) if decode else h

    def reconstruct(self, x):
        return self.decoder(self.encoder(x)) - x


def make_parts() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"model": Parts()})


def use_parts(rank: int) -> dict:
    modules = make_parts()
    model = modules["model"]
    ddp.wrap(modules, CPU, options())
    found = {}
    for _ in range(2):  # the second time in rebuilt buckets
        loss = model.reconstruct(inputs(rank)).square().mean()
        with ddp.averaging(modules, loss):
            loss.backward()
        found["method"] = take_gradients(modules)
        loss = model(inputs(rank)).square().mean()
        chosen = list(model.decoder.parameters())
        with ddp.averaging(modules, loss, chosen):
            loss.backward(inputs=chosen)
        found["part"] = take_gradients(modules)
        loss = model(inputs(rank)).square().mean()
        with ddp.averaging(modules, loss):
            loss.backward()
        found["whole"] = take_gradients(modules)
    try:
        loss = model(inputs(rank), decode=False).square().mean()
        with ddp.averaging(modules, loss):
            loss.backward()
    except RecipeError as error:
        found["error"] = str(error)
    take_gradients(modules)
    loss = model(inputs(rank)).square().mean()
    with ddp.averaging(modules, loss):
        loss.backward()
    found["after"] = take_gradients(modules)
    found["dim"] = model.dim
    return found


def test_averaging_reaches_methods_and_parts_and_names_what_a_loss_left_out():
    modules = make_parts()
    whole = mean_gradients(modules, lambda m, rank: m["model"](inputs(rank)).square().mean())
    method = mean_gradients(modules, lambda m, rank: m["model"].reconstruct(inputs(rank)).square().mean())
    part = {name: value if "decoder" in name else None for name, value in whole.items()}
    for found in in_processes(use_parts, 2):
        assert_same(found["whole"], whole)
        assert_same(found["method"], method)
        assert_same(found["part"], part)
        assert_same(found["after"], whole)
        assert "model.decoder.weight, model.decoder.bias" in found["error"], found["error"]
        assert "find_unused_parameters" in found["error"]
        assert found["dim"] == 7


def leave_out(rank: int) -> list[dict]:
    modules = make_parts()
    ddp.wrap(modules, CPU, options(find_unused_parameters=True))
    found = []
    for decode in (False, True, False):
        loss = modules["model"](inputs(rank), decode=decode).square().mean()
        with ddp.averaging(modules, loss):
            loss.backward()
        found.append(take_gradients(modules))
    return found


def use_a_method_and_look_for_unused(rank: int) -> dict:
    modules = make_parts()
    ddp.wrap(modules, CPU, options(find_unused_parameters=True))
    loss = modules["model"].reconstruct(inputs(rank)).square().mean()
    with ddp.averaging(modules, loss):
        loss.backward()
    return take_gradients(modules)


def test_a_method_is_averaged_where_unused_parameters_are_looked_for():
    modules = make_parts()
    method = mean_gradients(modules, lambda m, rank: m["model"].reconstruct(inputs(rank)).square().mean())
    for found in in_processes(use_a_method_and_look_for_unused, 2):
        assert_same(found, method)


def drift_apart(rank: int) -> list[list[str]]:
    modules = make_parts()
    ddp.wrap(modules, CPU, options())
    found = [ddp.differing(modules)]
    with torch.no_grad():
        modules["model"].decoder.bias[0] += rank * 1e-6
    return [*found, ddp.differing(modules)]


def test_weights_that_differ_are_named():
    for found in in_processes(drift_apart, 2):
        assert found == [[], ["model.decoder.bias"]]


def test_unused_parameters_are_found_if_asked():
    modules = make_parts()
    expected = [
        mean_gradients(modules, lambda m, rank, d=decode: m["model"](inputs(rank), decode=d).square().mean())
        for decode in (False, True, False)
    ]
    for found in in_processes(leave_out, 2):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def unfreeze(rank: int) -> tuple[dict, dict, bool]:
    modules = make_modules()
    ddp.wrap(modules, CPU, options())
    loss_of(modules, rank).backward()
    first = take_gradients(modules)
    modules["frozen"].requires_grad_(True)
    modules["model"][0].requires_grad_(False)
    ddp.wrap(modules, CPU, options())
    hooks = len(modules["model"]._forward_pre_hooks)
    ddp.wrap(modules, CPU, options())
    loss_of(modules, rank).backward()
    return first, take_gradients(modules), hooks == len(modules["model"]._forward_pre_hooks) == 1


def test_what_is_frozen_may_change_between_two_wraps():
    modules = make_modules()
    first = mean_gradients(modules, loss_of)
    modules["frozen"].requires_grad_(True)
    modules["model"][0].requires_grad_(False)
    second = mean_gradients(modules, loss_of)
    for found in in_processes(unfreeze, 2):
        assert_same(found[0], first)
        assert_same(found[1], second)
        assert found[2]


def copy_model(rank: int) -> bool:
    modules = make_modules()
    ddp.wrap(modules, CPU, options())
    copied, unpickled = copy.deepcopy(modules), pickle.loads(pickle.dumps(modules))
    saved = io.BytesIO()
    torch.save(modules, saved)
    if rank == 0:  # a copy exchanges nothing
        for it in (copied, unpickled):
            loss_of(it, rank).backward()
    loss_of(modules, rank).backward()
    return True


def test_copies_and_pickles_of_a_module_are_on_their_own():
    assert in_processes(copy_model, 2) == [True, True]


# ---------------------------------------------------------------------- what is sent, and when


def count(rank: int) -> dict:
    modules = make_modules()
    ddp.wrap(modules, CPU, options())
    for step in range(2):  # after them buckets are built as they stay
        loss_of(modules, rank, step).backward()
    found = {}

    def counted(name: str, function) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        found[name] = dict(collectives(profile))

    def window() -> None:
        for index in range(4):
            with ddp.no_sync(modules, index < 3):
                loss_of(modules, rank, index).backward()

    def failing_window() -> None:
        with pytest.raises(ZeroDivisionError), ddp.no_sync(modules):
            loss_of(modules, rank).backward()
            raise ZeroDivisionError
        loss_of(modules, rank).backward()

    def without_gradients() -> None:
        with torch.no_grad():
            for _ in range(rank):  # a rank alone
                loss_of(modules, rank)

    counted("window", window)
    counted("after an exception", failing_window)
    counted("without gradients", without_gradients)
    return found


def test_a_window_sends_once_and_no_sync_is_left_after_an_exception():
    for found in in_processes(count, 2):
        # The weights in one bucket; the buffers in one message for each of their two dtypes.
        once = {"gloo:all_reduce": 1, "gloo:broadcast": 2}
        assert found == {"window": once, "after an exception": once, "without gradients": {}}


def evaluate(rank: int) -> dict:
    modules = make_modules()
    ddp.wrap(modules, CPU, options())
    modules["cache"] = nn.Module()
    modules["cache"].register_buffer("table", torch.zeros(rank + 1), persistent=False)  # grown with what it saw
    loss_of(modules, rank).backward()
    own = {name: it.numpy().copy() for name, it in modules.named_buffers()}
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler as profile, pytest.raises(ZeroDivisionError), ddp.evaluating(modules):
        modules.eval()
        for step in range(3 * rank):  # rank 0 has nothing to evaluate
            loss_of(modules, rank, step)
        with torch.no_grad():
            inside = {name: it.numpy().copy() for name, it in modules.named_buffers()}
        raise ZeroDivisionError
    modules.train()
    take_gradients(modules)
    loss_of(modules, rank, 1).backward()
    after = take_gradients(modules)
    return {"own": own, "inside": inside, "after": after, "sent": dict(collectives(profile))}


def test_evaluation_takes_rank_0s_buffers_once_and_then_exchanges_nothing():
    first, second = in_processes(evaluate, 2)
    name = "model.1.running_mean"
    assert (first["own"][name] != second["own"][name]).any()
    assert (first["inside"][name] == first["own"][name]).all()
    assert (second["inside"][name] == first["own"][name]).all()
    assert first["sent"] == second["sent"] == {"gloo:broadcast": 2}
    expected = mean_gradients(make_modules(), lambda modules, rank: loss_of(modules, rank, 1))
    assert_same(first["after"], expected)
    assert_same(second["after"], expected)


def compress(rank: int, dtype: str, scale: float) -> tuple[dict, dict]:
    modules = make_modules()
    ddp.wrap(modules, CPU, options(gradient_compression=dtype))
    loss_of(modules, rank).backward()
    plain = take_gradients(modules)
    (loss_of(modules, rank) * (scale if rank == 1 else 1.0)).backward()
    return plain, take_gradients(modules)


@pytest.mark.parametrize("name", [pytest.param("bf16", marks=pytest.mark.extended), "fp16"])
def test_compressed_gradients_are_rounded_and_an_overflow_reaches_all_ranks(name):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    modules = make_modules()
    parts = []
    for rank in range(2):
        loss_of(modules, rank).backward()
        parts.append(take_gradients(modules))
    found = in_processes(compress, 2, name, 1e9)
    for key in parts[0]:
        if parts[0][key] is None:
            continue
        halves = [torch.tensor(part[key]).to(dtype) / 2 for part in parts]
        expected = (halves[0] + halves[1]).float()  # summed in the dtype that is sent
        for plain, _ in found:
            torch.testing.assert_close(torch.tensor(plain[key]), expected, rtol=0, atol=0)
    overflowed = [{key: it for key, it in large.items() if it is not None} for _, large in found]
    assert_same(overflowed[0], overflowed[1])
    finite = all(torch.tensor(it).isfinite().all() for it in overflowed[0].values())
    assert finite == (name == "bf16")


# ---------------------------------------------------------------------- what cannot be


CANNOT_BE = {
    "meta": 'parameter more.weight is on the device "meta"',
    "lazy": "parameter more.weight has no shape yet",
    "other shape": "the modules differ between processes",
    "other number": "the modules differ between processes",
    "sync_batchnorm": "the device is cpu",
    "static_graph": "does not average accumulated gradients under a static graph",
}


def fail_to_wrap(rank: int) -> dict[str, str]:
    return {what: refusal(rank, what) for what in CANNOT_BE}


def refusal(rank: int, what: str) -> str:
    modules, changed = make_modules(), {}
    if what == "meta":
        modules["more"] = nn.Linear(2, 2, device="meta")
    elif what == "lazy":
        modules["more"] = nn.LazyLinear(2)
    elif what == "other shape":
        modules["more"] = nn.Linear(2, 2 + rank)
    elif what == "other number":
        modules["more"] = nn.Linear(2, 2, bias=rank == 0)
    else:
        changed = {"sync_batchnorm": True} if what == "sync_batchnorm" else {"static_graph": True}
        changed["grad_accumulation_factor"] = 2
    with pytest.raises(ConfigError) as caught:
        ddp.wrap(modules, CPU, options(**changed))
    return str(caught.value)


def test_what_cannot_be_shared_is_refused_on_all_ranks(subtests):
    of_ranks = in_processes(fail_to_wrap, 2)
    for what, words in CANNOT_BE.items():
        with subtests.test(what):
            assert all(words in messages[what] for messages in of_ranks)


def test_synchronised_batchnorms_keep_their_identity_and_their_pins():
    modules = nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "norm": nn.BatchNorm2d(2)})
    pin_fp32(modules, ["type:BatchNorm1d"])
    before = list(modules.modules())
    state = copy.deepcopy(modules.state_dict())
    ddp.synchronise_batchnorms(modules)
    assert all(one is other for one, other in zip(modules.modules(), before, strict=True))
    assert type(modules["model"][1]) is type(modules["norm"]) is nn.SyncBatchNorm
    assert pinned_modules(modules) == ["model.1"]
    reference = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4))
    assert vars(modules["model"][1]).keys() - {"forward"} == vars(reference).keys()
    assert all(torch.equal(it, state[name]) for name, it in modules.state_dict().items())
    torch.testing.assert_close(modules["norm"](torch.ones(2, 2, 2, 2)), nn.BatchNorm2d(2)(torch.ones(2, 2, 2, 2)))


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_batchnorm_with_a_forward_of_its_own_is_not_made_a_plain_one():
    with pytest.raises(ConfigError, match="model is a Activated"):
        ddp.synchronise_batchnorms(nn.ModuleDict({"model": Activated(2)}))
