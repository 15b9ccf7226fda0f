"""torch's private names on modules, tensors and nested values exist, and do what modules/torch_private.py says."""

import sys
import time
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from amp_recipes.modules import torch_private
from amp_recipes.modules.torch_private import SEEN_IN

WHERE = f"private names of torch were seen in {' and '.join(SEEN_IN)}, and this is {torch.__version__}"


def test_the_release_is_one_that_the_names_were_seen_in():
    assert torch.__version__.split("+")[0] in SEEN_IN, f"{WHERE}: where these tests pass, add it to SEEN_IN"


def test_registers_of_a_module_are_live():
    module = nn.BatchNorm1d(2)
    assert torch_private.parameters_of(module)["weight"] is module.weight, WHERE
    assert torch_private.parameters_of(nn.Linear(2, 2, bias=False))["bias"] is None, WHERE
    other = torch.ones(2)
    torch_private.buffers_of(module)["running_mean"] = other
    assert module.running_mean is other, WHERE
    assert torch_private.children_of(nn.Sequential(module)) == {"0": module}, WHERE


def test_buffers_that_the_state_leaves_out():
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    assert torch_private.non_persistent_buffers(module) == {"left_out"}, WHERE


def test_hooks_can_be_found_and_taken_away():
    module, calls = nn.Identity(), []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    module(torch.zeros(1))
    for hooks in (torch_private.forward_pre_hooks(module), torch_private.forward_hooks(module)):
        assert len(hooks) == 1, WHERE
        hooks.clear()
    module(torch.zeros(1))
    assert calls == ["before", "after"], WHERE


def test_versions_of_a_modules_state():
    state = nn.BatchNorm1d(2).state_dict()
    assert torch_private.versions_of_state(state)[""] == {"version": 2}, WHERE
    assert torch_private.versions_of_state({}) is None
    other = OrderedDict(state)
    torch_private.set_versions_of_state(other, OrderedDict({"": {"version": 1}}))
    seen = []
    module = nn.BatchNorm1d(2)
    module.register_load_state_dict_pre_hook(lambda module, state, prefix, local, *_: seen.append(local["version"]))
    module.load_state_dict(other)
    assert seen == [1], WHERE


def test_what_torch_compile_returns_holds_the_module_under_this_name():
    module = nn.Linear(2, 2)
    compiled = torch.compile(module)
    assert torch_private.children_of(compiled) == {torch_private.COMPILED_MODULE: module}, WHERE
    assert type(compiled).__module__.startswith(torch_private.DYNAMO) and torch_private.DYNAMO in sys.modules, WHERE


def test_the_base_of_batchnorms():
    for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, torch_private.BatchNorm), WHERE
    assert not issubclass(nn.LayerNorm, torch_private.BatchNorm), WHERE


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_names_of_scripts(tmp_path):
    script = torch.jit.script(nn.Linear(2, 2))
    assert torch_private.made_from(script) is nn.Linear, WHERE
    assert torch_private.name_in_script(script).startswith("__torch__.torch.nn.modules.linear."), WHERE
    assert torch_private.made_from(nn.Linear(2, 2)) is None
    script.save(tmp_path / "script.pt")
    loaded = torch.jit.load(tmp_path / "script.pt")
    assert not isinstance(torch_private.made_from(loaded), type), WHERE


def test_versions_of_tensors():
    tensor = torch.zeros(2)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == before + 1, WHERE
    tensor.data.add_(1)
    assert torch_private.version_of(tensor) == before + 1, WHERE
    with torch.inference_mode(), pytest.raises(RuntimeError):
        torch_private.version_of(torch.zeros(1))


def test_values_of_a_sparse_tensor_that_is_not_coalesced():
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,))
    assert torch_private.sparse_values(tensor).tolist() == [1.0, 2.0], WHERE


def test_tensors_on_one_memory_have_one_storage():
    tensor = torch.zeros(4)
    assert torch_private.storage_id(tensor) == torch_private.storage_id(tensor[2:]), WHERE
    assert torch_private.storage_id(tensor) != torch_private.storage_id(tensor.clone()), WHERE
    with pytest.raises(RuntimeError):
        torch_private.storage_id(tensor.to_sparse())


def test_how_long_a_running_loader_waits():
    batches = iter(DataLoader(Slow(), num_workers=1))
    torch_private.set_timeout_of_batches(batches, 0.01)
    with pytest.raises(RuntimeError, match="timed out"):
        next(batches)
    torch_private.set_timeout_of_batches(batches, 0)
    assert next(batches).item() == 7, WHERE


class Slow(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(0.5)
        return 7


def test_walks_of_nested_values():
    point = namedtuple("point", "x y")
    value = {"a": [1, (2, point(3, 4))], "b": OrderedDict(c=5)}
    assert torch_private.tree_leaves(value) == [1, 2, 3, 4, 5], WHERE
    doubled = torch_private.tree_map(lambda number: number * 2, value)
    assert doubled == {"a": [2, (4, point(6, 8))], "b": OrderedDict(c=10)}, WHERE
    assert type(doubled["b"]) is OrderedDict and type(doubled["a"][1][1]) is point, WHERE


def test_parts_of_a_registered_container():
    parts, rebuild = torch_private.pytree_parts(OrderedDict(a=1, b=2))
    assert parts == [1, 2] and rebuild([3, 4]) == OrderedDict(a=3, b=4), WHERE
    assert torch_private.pytree_parts(type("Own", (dict,), {})()) is None, WHERE
    module_name, _, name = torch_private.REGISTER_PYTREE.rpartition(".")
    assert callable(getattr(sys.modules[module_name], name)), WHERE


def test_a_function_that_the_compiler_runs_while_it_traces():
    calls = []

    @torch_private.assume_constant_result
    def traced():
        calls.append(1)
        return 2

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(x):
        return x * traced()

    assert [doubled(torch.ones(1)).item() for _ in range(3)] == [2.0] * 3
    assert len(calls) == 1, WHERE


def test_no_accelerator_from_elsewhere_is_here():
    assert torch_private.out_of_tree_device_type() == "privateuseone", WHERE
