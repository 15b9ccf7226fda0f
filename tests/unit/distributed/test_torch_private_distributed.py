"""torch's private names for several processes exist, and do what distributed/torch_private.py says.

In a group of one process: that the names do what they are for among several is in the tests of ddp and fsdp.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_release import RELEASE, needs_fsdp

from amp_recipes.distributed import torch_private
from amp_recipes.modules.torch_private import SEEN_IN, version_of

WHERE = f"private names of torch were seen in {' and '.join(SEEN_IN)}, and this is {torch.__version__}"


def test_nothing_is_missing():
    assert torch_private.missing_for_ddp() == [], WHERE
    lacks = ["FSDPState._fsdp_param_groups"] if RELEASE < (2, 13) else []
    assert torch_private.missing_for_fsdp() == lacks, WHERE


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.delattr(DistributedDataParallel, "_pre_forward")
    assert torch_private.missing_for_ddp() == ["_pre_forward"]
    monkeypatch.setattr(torch_private, "_GROUPS", "_of_another_torch")
    assert torch_private.missing_for_fsdp() == ["FSDPState._of_another_torch"]


def test_a_wrapper_that_is_never_called(group_of_one):
    module = nn.Linear(2, 1)
    module.register_buffer("table", torch.zeros(3))
    with torch_private.leaving_out(module, ["bias", "table"]):
        wrapper = DistributedDataParallel(module, init_sync=False)
    assert wrapper.parameters_to_ignore >= {"bias", "table"} and not vars(module).keys() & {"bias", "table"}, WHERE
    assert [parameter.shape for parameter in wrapper._module_parameters] == [(1, 2)], WHERE

    torch_private.before_forward(wrapper)
    torch_private.after_forward(wrapper, module(torch.ones(1, 2))).sum().backward()
    torch_private.check_finished(wrapper)
    assert module.weight.grad.tolist() == [[1.0, 1.0]], WHERE
    torch_private.expect_none(wrapper)
    torch_private.remove_hooks(wrapper)


def test_a_backward_that_reaches_some_parameters_is_found(group_of_one):
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    wrapper = DistributedDataParallel(module)
    torch_private.expect_gradients(wrapper, [])
    module[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError):
        torch_private.check_finished(wrapper)
    torch_private.expect_none(wrapper)
    loss = module[1](torch.ones(1, 2)).sum()
    loss.backward()  # nobody waits for it
    torch_private.remove_hooks(wrapper)


def test_a_broadcast_leaves_version_counters_alone(group_of_one):
    tensors = [torch.ones(2), torch.ones(3)]
    before = [version_of(tensor) for tensor in tensors]
    with torch.no_grad(), torch_private.versions_kept(tensors):
        torch_private.broadcast(tensors, 2**20)
        tensors[0].add_(1)
    assert [version_of(tensor) for tensor in tensors] == before, WHERE


@needs_fsdp
def test_groups_of_a_sharded_unit(group_of_one):
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    unit, mesh = nn.Linear(2, 2), dist.init_device_mesh("cpu", (1,))
    parameters = list(unit.parameters())
    fully_shard(unit, mesh=mesh, ignored_params=set(parameters))
    assert torch_private.groups_of(unit) == [], WHERE
    torch_private.add_group(unit, parameters, mesh, True, MixedPrecisionPolicy(), OffloadPolicy())
    (group,) = torch_private.groups_of(unit)
    assert torch_private.device_of(mesh) == torch.device("cpu"), WHERE
    weight = next(it for it in group.fsdp_params if it.sharded_param is unit.weight)
    assert torch_private.gathered_form(weight) is None and not torch_private.awaits_backward(group), WHERE

    output = unit(torch.ones(1, 2))
    gathered = torch_private.gathered_form(weight)
    assert gathered.shape == (2, 2) and torch_private.awaits_backward(group), WHERE
    output.sum().backward()
    assert not torch_private.awaits_backward(group), WHERE

    torch_private.free_gathered(group)
    assert unit.weight is weight.sharded_param, WHERE
    shells = torch_private.take_shells(weight)
    assert torch_private.gathered_form(weight) is None and weight.all_gather_outputs == [], WHERE
    torch_private.put_shells(weight, shells)
    assert torch_private.gathered_form(weight) is gathered, WHERE


def test_a_dtensor_of_a_part_that_stays_where_it_is(group_of_one):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    whole = distribute_tensor(torch.ones(4, 2), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
    local = torch.zeros(4, 2, dtype=torch.float64)
    made = torch_private.dtensor_like(whole, local)
    assert isinstance(made, DTensor) and made.placements == whole.placements and made.dtype == torch.float64, WHERE
    assert made.to_local() is local or made.to_local().data_ptr() == local.data_ptr(), WHERE


def test_activations_are_computed_again():
    calls = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            calls.append(1)
            return (x * self.weight).sin()

    module = Counted()
    for _ in range(2):  # the second call changes nothing
        torch_private.recompute_composably(module, lambda: (torch.enable_grad(), torch.enable_grad()))
    module(torch.ones(2)).sum().backward()
    assert len(calls) == 2 and type(module) is Counted, WHERE


def test_timeouts_and_the_store_of_a_group(group_of_one):
    assert torch_private.timeout_of(dist.group.WORLD) == timedelta(seconds=77), WHERE
    torch_private.set_timeout(dist.group.WORLD, timedelta(seconds=99))
    assert torch_private.timeout_of(dist.group.WORLD) == timedelta(seconds=99), WHERE
    torch_private.default_store().set("said", "here")
    assert torch_private.default_store().get("said") == b"here", WHERE
