"""Buffers go back when an update is skipped, whatever way a module writes them."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes.precision.rollback import BufferRollback
from amp_recipes.precision.scaling import LossScaler, UpdateOwner

GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def never() -> bool:
    raise AssertionError("the host was asked")


SETTLES = ["verdict on the host", "verdict on the device"]
in_both_ways = pytest.mark.parametrize("settle", SETTLES, indirect=True)


@pytest.fixture(params=[pytest.param(SETTLES[0], marks=pytest.mark.extended), SETTLES[1]])
def settle(request):
    """Settles as the CPU does, where the host knows the verdict, and as a GPU does."""

    def settle(rollback: BufferRollback, skip: torch.Tensor) -> None:
        with torch.no_grad():
            rollback.settle(None if request.param == SETTLES[0] else skip, lambda: bool(skip))

    return settle


class Counting(nn.Module):
    """Changes one buffer in place, replaces another, and one changes its shape."""

    def __init__(self):
        super().__init__()
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("mask", torch.ones(100))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.in_place += x
        self.replaced = self.replaced * 0.9 + x
        self.grown = torch.cat([self.grown, x[:1]])


@in_both_ways
@pytest.mark.parametrize("skips", [(True, False, True), (False, True, False)])
def test_custom_buffers(skips, settle):
    module, twin = Counting(), Counting()
    rollback = BufferRollback(module)
    rollback.watch()
    for index, skip in enumerate(skips):
        x = torch.full((3,), index + 1.0)
        module(x * torch.nan if skip else x)
        settle(rollback, SKIP if skip else GO)
        if not skip:
            twin(x)
    for name, expected in buffers(twin).items():
        assert torch.equal(buffers(module)[name], expected), name


@pytest.mark.parametrize("compiled", [None, pytest.param("eager", marks=pytest.mark.extended), "aot_eager"])
def test_batch_norm_statistics(compiled, settle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    twin.load_state_dict(model.state_dict())
    rollback = BufferRollback(model)
    rollback.watch()
    run = torch.compile(model, backend=compiled) if compiled else model
    for skip in (False, True, True, False):
        x = torch.randn(8, 3)
        run(x * torch.inf if skip else x)
        settle(rollback, SKIP if skip else GO)
        if not skip:
            twin(x)
    for name, expected in buffers(twin).items():
        torch.testing.assert_close(buffers(model)[name], expected, msg=name)


def test_statistics_that_thaw_in_the_middle_are_still_kept(settle):
    norm = nn.BatchNorm1d(2).eval()
    rollback = BufferRollback(norm)
    rollback.watch()
    norm(torch.randn(4, 2))
    settle(rollback, GO)
    norm.train()(torch.full((4, 2), torch.nan))
    settle(rollback, SKIP)
    assert norm.running_mean.isfinite().all() and norm.running_var.isfinite().all()


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(2**20))
        self.register_buffer("count", torch.zeros(1))

    def forward(self):
        self.count += 1


def test_a_large_buffer_that_training_leaves_alone_does_not_stay_in_memory(settle):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    assert rollback.kept_bytes == 2**22 + 4
    module()
    settle(rollback, GO)
    assert rollback.kept_bytes == 4


def test_a_large_buffer_that_changes_later_is_kept_from_then_on(settle):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    module.mask.fill_(2)
    settle(rollback, GO)
    module.mask.fill_(torch.nan)
    settle(rollback, SKIP)
    assert torch.equal(module.mask, torch.full((2**20,), 2.0))


@in_both_ways
def test_a_first_change_of_a_large_buffer_in_a_skipped_batch_is_said(settle):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    module.mask.zero_()
    with pytest.warns(UserWarning, match=r"first appeared or changed in its batch: mask\."):
        settle(rollback, SKIP)


def test_a_buffer_shared_by_two_modules_is_kept_once():
    first, second = Counting(), Counting()
    second.mask = first.mask
    rollback = BufferRollback(nn.ModuleList([first, second]))
    rollback.watch()
    assert rollback.kept_bytes == 2 * 4 * (3 + 3 + 1) + 400


def test_what_was_let_go_is_neither_copied_nor_compared_at_the_next_watch(settle, monkeypatch):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compared again"))
    rollback.watch()
    assert rollback.kept_bytes == 4
    settle(rollback, GO)
    assert rollback.kept_bytes == 4


def test_what_was_let_go_and_changed_between_two_watches_is_looked_at_afresh(settle):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    module.mask.fill_(2)
    rollback.watch()
    module.mask.fill_(torch.nan)
    settle(rollback, SKIP)
    assert torch.equal(module.mask, torch.full((2**20,), 2.0))


def test_a_large_buffer_that_was_written_before_it_was_replaced_is_said(settle):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    module.mask.zero_()
    module.mask = module.mask + 1
    with pytest.warns(UserWarning, match=r": mask\."):
        settle(rollback, SKIP)


def test_a_large_buffer_that_was_let_go_and_then_replaced_goes_back(settle):
    module = Masked()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    mask = module.mask
    module.mask = torch.zeros(7)
    settle(rollback, SKIP)
    assert module.mask is mask
    module.mask = torch.zeros(7)
    settle(rollback, GO)
    module.mask.fill_(torch.nan)
    settle(rollback, SKIP)
    assert torch.equal(module.mask, torch.zeros(7))


# ---------------------------------------------------------------- kinds of buffers

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "floats": lambda: torch.tensor([1.0, 2.0]),
    "halves": lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "count": lambda: torch.tensor(3),
    "zero_dimensional": lambda: torch.tensor(1.5),
    "flags": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j, 3.0]),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "strided": lambda: torch.arange(6.0)[::2],
    "empty": lambda: torch.zeros(0, 3),
    "large": lambda: torch.ones(2**18),
}


class Zoo(nn.Module):
    """One buffer of each of `kinds`."""

    def __init__(self, kinds=tuple(KINDS)):
        super().__init__()
        for kind in kinds:
            self.register_buffer(kind, KINDS[kind]())


def other(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor if tensor.dtype is torch.bool else tensor * 3 + 1


def write(module: nn.Module, key: str) -> None:
    getattr(module, key).data.copy_(other(getattr(module, key)))


def replace(module: nn.Module, key: str) -> None:
    setattr(module, key, other(getattr(module, key)))


def replace_memory(module: nn.Module, key: str) -> None:
    getattr(module, key).data = other(getattr(module, key))


def replace_strided(module: nn.Module, key: str) -> None:
    setattr(module, key, torch.stack([other(getattr(module, key))] * 2, -1)[..., 0])


def lengthen(module: nn.Module, key: str) -> None:
    old = getattr(module, key)
    setattr(module, key, torch.cat([old.reshape(-1), other(old).reshape(-1)]))


def change_dtype(module: nn.Module, key: str) -> None:
    old = getattr(module, key)
    setattr(module, key, other(old).to(torch.int64 if old.is_floating_point() else torch.complex128))


def expand(module: nn.Module, key: str) -> None:
    setattr(module, key, torch.ones(1).expand(3))


def clear(module: nn.Module, key: str) -> None:
    setattr(module, key, None)


def remove(module: nn.Module, key: str) -> None:
    delattr(module, key)


CHANGES = [write, replace, replace_memory, replace_strided, lengthen, change_dtype, expand, clear, remove]


@in_both_ways
@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_buffer_goes_back_whatever_replaces_it(subtests, change, settle):
    for kind in KINDS:
        with subtests.test(kind):
            check_that_buffers_go_back(kind, change, settle)


def check_that_buffers_go_back(kind: str, change: Callable, settle: Callable) -> None:
    """Its neighbours, which change in place, go back as well, and it is kept in its new form once it is taken."""
    module = Zoo()
    rollback = BufferRollback(module)
    rollback.watch()

    def update(skip, changes):
        before = {key: None if x is None else x.clone() for key, x in module._buffers.items()}
        for key in list(module._buffers):
            changes(key)
        after = {key: None if x is None else x.clone() for key, x in module._buffers.items()}
        settle(rollback, skip)
        expected = before if skip else after
        assert module._buffers.keys() == expected.keys()
        for key, value in expected.items():
            assert (module._buffers[key] is None) == (value is None), key
            assert value is None or torch.equal(module._buffers[key], value), key
            assert value is None or module._buffers[key].dtype == value.dtype, key

    def all_change(key):
        (change if key == kind else write)(module, key)

    def all_written(key):
        if module._buffers[key] is not None and change is not expand:
            write(module, key)

    update(GO, lambda key: write(module, key))
    update(SKIP, all_change)
    update(SKIP, all_change)
    update(GO, all_change)
    update(SKIP, all_written)
    update(GO, all_written)
    update(SKIP, all_written)


def test_a_buffer_that_cannot_be_written_stays_or_goes_back_as_an_object(settle):
    """Expanded over one element: an in-place write to it is an error."""
    module = nn.Module()
    module.register_buffer("wide", torch.ones(1).expand(3))
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    with torch.inference_mode():
        module.register_buffer("inferred", torch.ones(3))
    before = dict(module.named_buffers())
    rollback = BufferRollback(module)
    rollback.watch()
    for skip in (GO, SKIP):
        settle(rollback, skip)
        assert all(module._buffers[key] is before[key] for key in before)
    for key in before:
        setattr(module, key, torch.full((3,), torch.nan))
    settle(rollback, SKIP)
    assert all(module._buffers[key] is before[key] for key in before)
    for key in before:
        setattr(module, key, torch.full((3,), 2.0))
    settle(rollback, GO)
    for key in before:
        getattr(module, key).fill_(torch.nan)
    settle(rollback, SKIP)
    assert all(torch.equal(module._buffers[key], torch.full((3,), 2.0)) for key in before)


@pytest.mark.parametrize("skip", [GO, SKIP], ids=["taken", "skipped"])
def test_buffers_that_move_to_another_device_stay_there(skip, settle):
    module = Zoo()
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    module.to("meta")
    settle(rollback, skip)
    assert all(buffer.is_meta for buffer in module.buffers())
    settle(rollback, skip)


def test_float8_is_kept(settle):
    module = nn.Module()
    for key, size in {"small": 2, "large": 2**20}.items():
        module.register_buffer(key, torch.ones(size).to(torch.float8_e4m3fn))
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    assert rollback.kept_bytes == 2
    module.small.data.copy_(torch.zeros(2))
    settle(rollback, SKIP)
    assert torch.equal(module.small.float(), torch.ones(2))


class Kernels(TorchDispatchMode):
    """Counts what reaches the device; views and questions that the host answers do not."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in ("view", "is_set_to", "detach", "split_with_sizes"):
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 53])
def test_a_few_kernels_serve_all_buffers(count):
    """Two dtypes: float32 statistics and int64 counters."""
    rollback = BufferRollback(nn.ModuleList(nn.BatchNorm1d(2) for _ in range(count)))
    rollback.watch()
    with torch.no_grad(), Kernels() as kernels:
        rollback.settle(GO, never)
    assert kernels.seen["where"] == 2
    assert kernels.seen.total() <= 7
    with torch.no_grad(), Kernels() as kernels:
        rollback.settle(None, lambda: False)
    assert kernels.seen.total() <= 2


def test_the_host_is_not_asked_about_buffers_that_keep_their_shape():
    module = Zoo()
    rollback = BufferRollback(module)
    rollback.watch()
    for skip in (GO, SKIP):
        for key in KINDS:
            replace(module, key)
        with torch.no_grad():
            rollback.settle(skip, never)


# ---------------------------------------------------------------- buffers that come later


class LazyMean(nn.Module):
    """Makes its buffer in the first forward: registers it, or puts it where None stood."""

    def __init__(self, announced: bool):
        super().__init__()
        if announced:
            self.register_buffer("mean", None)

    def forward(self, x):
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", torch.zeros(3))
        self.mean.mul_(0.5).add_(x)


@pytest.mark.parametrize("announced", [True, False])
def test_a_buffer_made_in_a_good_first_forward_is_kept(announced, settle):
    module = nn.Sequential(LazyMean(announced))
    rollback = BufferRollback(module)
    rollback.watch()
    for value, skip in ((1.0, GO), (torch.nan, SKIP), (1.0, GO), (torch.nan, SKIP)):
        module(torch.full((3,), value))
        settle(rollback, skip)
    assert torch.equal(module[0].mean, torch.full((3,), 1.5))


def test_a_buffer_put_where_none_stood_in_a_skipped_batch_goes(settle):
    module = LazyMean(announced=True)
    rollback = BufferRollback(module)
    rollback.watch()
    module(torch.full((3,), torch.nan))
    settle(rollback, SKIP)
    assert module.mean is None
    module(torch.ones(3))
    settle(rollback, GO)
    assert torch.equal(module.mean, torch.ones(3))


@in_both_ways
def test_buffers_that_appear_in_a_skipped_batch_are_said_once_by_name(settle, recwarn):
    module = nn.ModuleDict({"a": LazyMean(announced=False), "b": nn.LazyBatchNorm1d(), "c": nn.Identity()})
    rollback = BufferRollback(module)
    rollback.watch()
    for value in (1.0, torch.nan):
        module["a"](torch.full((3,), value))
        module["b"](torch.full((4, 3), value))
        module["c"].norm = nn.BatchNorm1d(3)
        settle(rollback, SKIP)
    names = ["b.running_mean", "b.running_var", "a.mean", "c.norm.running_mean", "c.norm.num_batches_tracked"]
    (said,) = [str(warning.message) for warning in recwarn]
    assert all(f" {name}" in said for name in names)
    assert torch.equal(module["a"].mean, torch.ones(3))
    assert all(buffer.isfinite().all() for buffer in module["b"].buffers())


def test_lazy_batch_norm_is_kept_from_its_first_update_on(settle):
    torch.manual_seed(0)
    module, twin = nn.LazyBatchNorm1d(), nn.BatchNorm1d(3)
    rollback = BufferRollback(module)
    rollback.watch()
    for skip in (GO, SKIP, GO, SKIP):
        x = torch.randn(4, 3)
        module(x * torch.nan if skip else x)
        settle(rollback, skip)
        if not skip:
            twin(x)
    for name, expected in buffers(twin).items():
        assert torch.equal(buffers(module)[name], expected), name


# ---------------------------------------------------------------- copies of the rollback, and pending graphs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_watches_the_copied_module_and_starts_afresh(copied, settle):
    module = nn.BatchNorm1d(2)
    rollback = BufferRollback(module)
    rollback.watch()
    settle(rollback, GO)
    module_copy, rollback_copy = copied((module, rollback))
    assert rollback.watching and not rollback_copy.watching
    module_copy.running_mean.fill_(5)
    rollback_copy.watch()
    module_copy.running_mean.fill_(torch.nan)
    settle(rollback_copy, SKIP)
    assert torch.equal(module_copy.running_mean, torch.full((2,), 5.0))
    assert torch.equal(module.running_mean, torch.zeros(2))


def test_nothing_goes_back_to_before_watching_ended(settle):
    module = nn.BatchNorm1d(2)
    rollback = BufferRollback(module)
    rollback.watch()
    module.running_mean.fill_(5)
    rollback.watching = False
    settle(rollback, SKIP)
    assert torch.equal(module.running_mean, torch.full((2,), 5.0))


@pytest.mark.parametrize("skip", [GO, SKIP], ids=["taken", "skipped"])
def test_a_pending_backward_still_sees_what_it_saved(skip, settle):
    """A module that replaces its buffer may multiply by the old object and by the new one."""
    module = nn.Module()
    module.register_buffer("gain", torch.full((3,), 2.0))
    rollback = BufferRollback(module)
    rollback.watch()
    x = torch.ones(3, requires_grad=True)
    y = x * module.gain
    module.gain = module.gain + 5
    y = y + x * module.gain
    settle(rollback, skip)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 9.0))
    assert torch.equal(module.gain, torch.full((3,), 2.0 if skip else 7.0))


def adversaries() -> tuple[nn.ModuleDict, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    modules = nn.ModuleDict({"generator": generator, "critic": nn.Linear(3, 1)})
    return modules, {key: torch.optim.AdamW(modules[key].parameters(), fused=True) for key in modules}


@pytest.mark.parametrize("bad", [None, 0, 2])
def test_a_generators_graph_survives_the_critics_step(host, bad):
    """One generator forward serves the critic's step, on its detached output, and then the generator's own.

    The critic's loss of batch `bad` is NaN: its step is left out, and the statistics are as before that batch.
    """
    batches = torch.randn(4, 5, 2, 3, generator=torch.Generator().manual_seed(1)).unbind(0)
    modules, optimizers = adversaries()
    owner = UpdateOwner(modules, LossScaler("cpu", enabled=False), torch.device("cpu"))
    for index, batch in enumerate(batches):
        owner.begin()
        fake = modules["generator"](batch[:, 0])
        loss = modules["critic"](fake.detach()).mean() - modules["critic"](batch[:, 1]).mean()
        for key, objective in (("critic", loss), ("generator", None)):
            objective = -modules["critic"](fake).mean() if objective is None else objective
            optimizers[key].zero_grad()
            owner.backward(objective * torch.nan if key == "critic" and index == bad else objective)
            owner.step({key: optimizers[key]}, max_grad_norm=0.0)
    ours = modules.state_dict()

    modules, optimizers = adversaries()
    for index, batch in enumerate(batches):
        before = buffers(modules)
        fake = modules["generator"](batch[:, 0])
        if index != bad:
            optimizers["critic"].zero_grad()
            (modules["critic"](fake.detach()).mean() - modules["critic"](batch[:, 1]).mean()).backward()
            optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        (-modules["critic"](fake).mean()).backward()
        optimizers["generator"].step()
        if index == bad:
            modules.load_state_dict(before, strict=False)
    for name, expected in modules.state_dict().items():
        assert torch.equal(ours[name], expected), name
