"""Shards modules over the processes, and gathers them for their computation (FSDP2).

A unit is what is gathered at a time: a block, or what an entry holds besides its blocks. Its parameters travel in one
message per format: those that autocast would cast anyway in the compute dtype, all others in fp32, so that each op
sees the numbers that it sees in one process. Gradients are summed in fp32 and stay sharded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, takewhile
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from amp_recipes.distributed import torch_private
from amp_recipes.distributed.gathered_dtype import GatheredDtype
from amp_recipes.distributed.meshes import REPLICATE, data_mesh, make_mesh
from amp_recipes.distributed.tensor_parallel import divide, styles_of
from amp_recipes.errors import ConfigError
from amp_recipes.modules.blocks import chosen_blocks, has_parameters, repeated_blocks, with_forward
from amp_recipes.modules.sharded import is_sharded as is_sharded_tensor
from amp_recipes.modules.torch_private import forward_hooks, forward_pre_hooks, parameters_of

# torch.distributed.fsdp is imported where it is used: that takes 0.6 s, which only those who shard should pay.
logger = logging.getLogger(__name__)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Forwards in which autocast casts these parameters whole. Of any other module (norms, embeddings, a user's own) some
# op may read the fp32 values, so they are gathered as they are; autocast then casts where it wants to.
_CAST_BY_AUTOCAST = {
    **{kind.forward: {"weight", "bias"} for kind in (nn.Linear, *_CONVOLUTIONS)},
    nn.MultiheadAttention.forward: {
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
    },
}

_WAITING: WeakSet[nn.Module] = WeakSet()  # roots whose replicas add up later


def shard(
    modules: nn.ModuleDict,
    device: torch.device,
    options: Any,
    compute_dtype: torch.dtype = torch.float32,
    fp32_modules: Collection[str] = (),
    tensor_parallel_plan: Mapping[str, str] | None = None,
) -> None:
    """Shard the parameters of `modules` over the processes, in place; all begin with those of the first process.

    The modules may still be on the CPU, and larger than the device: they go there unit by unit. Frozen ones are
    sharded too, since a frozen model can be the largest of a run. Units are the modules that `options.shard_modules`
    names (default: the repeated blocks), and each entry of `modules` with what is left of it. Layers that
    `tensor_parallel_plan` names are divided among `options.tensor_parallel` neighbours first.
    Raises ConfigError for patterns that match nothing, and for parameters that cannot be sharded.
    """
    roots = [root for root in _roots(modules) if not _gathers(root)]
    _to_device((buffer for module in modules.values() for buffer in module.buffers()), device)
    if not roots:
        return
    units = set(_blocks(modules, options)) | set(roots)
    owners = _owners(modules, roots, units)
    low = _low_precision(modules, fp32_modules) if compute_dtype.itemsize < 4 else set()
    divided = styles_of(modules, tensor_parallel_plan)
    mesh = make_mesh(device, options)
    _announce(modules, units, options, mesh, device)
    offloads = _offloads(options, device)

    def shard_unit(unit: nn.Module, reshard_after_forward: bool | None) -> None:
        own = {parameter: parameter for parameter, owner in owners.items() if owner is unit}
        _to_device(own, device)
        for module in _outside_of_others(unit, units):
            if module in divided:
                own |= divide(module, divided[module], mesh)
        parameters = [(now, compute_dtype if before in low else None) for before, now in own.items()]
        _shard_unit(unit, parameters, data_mesh(mesh), reshard_after_forward, offloads)

    for root in roots:
        for unit in _from_the_inside_out(root, units):
            # An only root's own parameters are needed again at once, by the backward: torch keeps them gathered.
            auto = unit is root and len(roots) == 1 and options.reshard_after_forward
            shard_unit(unit, None if auto else options.reshard_after_forward)
        if options.find_unused_parameters:
            root.set_reduce_scatter_unused_params(True)
        root.register_forward_hook(_free_where_no_backward_follows)


def _from_the_inside_out(root: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The units in `root`, itself last, that no earlier root has sharded."""
    for unit in reversed([module for module in root.modules() if module in units]):
        if not _gathers(unit):
            yield unit


def check(modules: nn.ModuleDict) -> None:
    """Raise ConfigError for parameters that cannot be sharded, and for a torch whose insides are others."""
    missing = torch_private.missing_for_fsdp()
    if missing:
        raise ConfigError(
            f"strategy fsdp uses internals of torch 2.13 ({', '.join(missing)}) that torch {torch.__version__} does "
            "not have. Install torch 2.13, or use --strategy ddp."
        )
    _owners(modules, _roots(modules), set(_roots(modules)))


def is_sharded(modules: nn.Module) -> bool:
    """Whether any of `modules` is sharded."""
    return any(_gathers(module) for module in modules.modules())


@contextmanager
def no_sync(modules: nn.Module) -> Iterator[None]:
    """Inside this context, groups of processes do not sum their gradients (shard_replicas); restored after exceptions.

    Inside a group they do, at each backward: gradients that wait whole for the window's end would take 4 bytes a
    parameter on every process (28 GB for 7 B), where shards take that divided by the group's size.
    """
    roots = [module for module in _roots(modules) if _gathers(module) and _has_replicas(module)]
    waiting = [root for root in roots if root in _WAITING]  # inside another one
    try:
        for root in roots:
            root.set_requires_all_reduce(False)
            _WAITING.add(root)
        yield
    finally:
        for root in roots:
            if root not in waiting:
                root.set_requires_all_reduce(True)
                _WAITING.discard(root)


@contextmanager
def keeping_gathered(modules: nn.Module) -> Iterator[None]:
    """Inside this context, a backward keeps the gathered parameters: the backward of a penalty needs them too.

    The next ordinary backward frees it. It must go through an output of the modules besides the penalty's, else
    torch does not notice it, and gradients stay where they are.
    """
    roots = [module for module in _roots(modules) if _gathers(module)]
    try:
        for root in roots:
            root.set_reshard_after_backward(False)
        yield
    finally:
        for root in roots:
            root.set_reshard_after_backward(True)


@contextmanager
def gathered(modules: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside this context, modules and optimizers hold whole parameters, and calls of modules gather nothing.

    All processes enter it together. What is written to the whole parameters is lost.
    """
    units = [module for module in modules.modules() if _gathers(module)]
    for unit in units:
        unit.reshard()
    device = {id(each): torch_private.device_of_unit(unit) for unit in units for each in unit.parameters()}
    with torch.no_grad():
        whole = {
            parameter: nn.Parameter(parameter.full_tensor().to(device[id(parameter)]), parameter.requires_grad)
            for parameter in modules.parameters()
            if is_sharded_tensor(parameter)
        }
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    holders = [parameters_of(module) for module in modules.modules()] if whole else []
    hooks = [hooks(unit) for unit in units for hooks in (forward_pre_hooks, forward_hooks)]
    before = [(holder, dict(holder)) for holder in (*holders, *hooks)]
    lists = [(group, list(group)) for group in groups]
    for holder in holders:
        holder.update({name: whole[each] for name, each in holder.items() if each in whole})
    for register in hooks:
        for key in [key for key, hook in register.items() if _is_fsdps(hook)]:
            del register[key]
    for group in groups:
        group[:] = [whole.get(parameter, parameter) for parameter in group]
    try:
        yield
    finally:
        for holder, content in before:
            holder.clear()
            holder.update(content)
        for group, content in lists:
            group[:] = content


def _is_fsdps(hook: Any) -> bool:
    """Whether a hook on a unit's forward gathers, frees or casts what it gathers."""
    owner = getattr(hook, "__self__", None)
    return hook is _free_where_no_backward_follows or isinstance(owner, (GatheredDtype, torch_private.state_class()))


def leaves(modules: nn.Module, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the leaves of `parameters` in an autograd graph: the gathered form of sharded ones, else themselves.

    For `backward(inputs=...)`, to be asked after the forward. A sharded one that has not been gathered yet, because
    its unit was not called, is left out: there is no graph with it.
    """
    gathered: dict[nn.Parameter, torch.Tensor | None] = {}
    for module in modules.modules():
        if _gathers(module):
            for group in torch_private.groups_of(module):
                for parameter in group.fsdp_params:
                    gathered[parameter.sharded_param] = torch_private.gathered_form(parameter)
    found = (gathered.get(parameter, parameter) for parameter in parameters)
    return [tensor for tensor in found if tensor is not None]


def _gathers(module: nn.Module) -> bool:
    """Whether `module` is a unit of FSDP's already."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _roots(modules: nn.Module) -> list[nn.Module]:
    """The modules through which a recipe enters: each entry, or its children where it is a mere list."""
    entries = modules.values() if isinstance(modules, nn.ModuleDict) else [modules]
    return [root for entry in entries for root in with_forward(entry) if has_parameters(root)]


def _blocks(modules: nn.ModuleDict, options: Any) -> list[nn.Module]:
    if options.shard_modules:
        return chosen_blocks("shard_modules", modules, options.shard_modules)
    return [block for entry in modules.values() for block in repeated_blocks(entry)]


def _owners(modules: nn.ModuleDict, roots: list[nn.Module], units: set[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """Parameter -> the unit that gathers it: the innermost that holds all places where it stands (tied weights).

    Raises ConfigError for what has no such unit, and for what cannot be divided.
    """
    ways: dict[nn.Parameter, tuple[nn.Module, ...]] = {}

    def walk(module: nn.Module, way: tuple[nn.Module, ...]) -> None:
        way = (*way, module) if module in units else way
        for parameter in parameters_of(module).values():
            if parameter is not None:
                ways[parameter] = _shared_beginning(ways.get(parameter, way), way)
        for child in module.children():
            walk(child, way)

    for root in _outermost(roots):
        walk(root, ())
    whole = {name: each for name, each in modules.named_parameters() if not is_sharded_tensor(each)}
    problems = [f"{name} {problem}" for name, each in whole.items() if (problem := _why_unowned(each, ways))]
    if problems:
        raise ConfigError(
            f"strategy fsdp cannot shard: {'; '.join(problems)}. A parameter is gathered when the module that holds it "
            "is called, and only one module may hold it. Put the modules that share it into one module with a forward, "
            "or use --strategy ddp."
        )
    return {parameter: way[-1] for parameter, way in ways.items()}


def _outermost(roots: list[nn.Module]) -> list[nn.Module]:
    inner = {module for root in roots for module in root.modules() if module is not root}
    return [root for root in roots if root not in inner]


def _shared_beginning(first: tuple[nn.Module, ...], second: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    pairs = zip(first, second, strict=False)
    return tuple(here for here, _ in takewhile(lambda pair: pair[0] is pair[1], pairs))


def _why_unowned(parameter: nn.Parameter, ways: Mapping[nn.Parameter, tuple[nn.Module, ...]]) -> str | None:
    if parameter not in ways:
        return "is in a module without a forward"
    if not ways[parameter]:
        return "is in more than one entry of the modules"
    if parameter.ndim == 0:
        return "is a 0-dimensional tensor: make it a tensor of shape (1,)"
    return None


def _low_precision(modules: nn.ModuleDict, fp32_modules: Collection[str]) -> set[nn.Parameter]:
    """The parameters of which every reader gets a low-precision copy under autocast."""
    pinned = {inner for name in fp32_modules for inner in modules.get_submodule(name).modules()}
    low: set[nn.Parameter] = set()
    kept: set[nn.Parameter] = set()
    for module in modules.modules():
        replaced = "forward" in vars(module)  # its caller, and what it reads, are unknown
        cast = set() if module in pinned or replaced else _CAST_BY_AUTOCAST.get(type(module).forward, set())
        for name, parameter in module.named_parameters(recurse=False):
            (low if name in cast and parameter.dtype is torch.float32 else kept).add(parameter)
    return low - kept


def _shard_unit(
    unit: nn.Module,
    parameters: list[tuple[nn.Parameter, torch.dtype | None]],
    mesh: DeviceMesh,
    reshard_after_forward: bool | None,
    offloads: bool,
) -> None:
    """Shard `parameters` (each with the dtype to gather it in, None: its own), to be gathered when `unit` is called.

    torch's call makes one group of all parameters, in one dtype; told to ignore them all, it installs only what
    gathers groups. torch itself makes several where parameters lie on several meshes, and the same function makes
    ours.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    # autocast casts inputs, so that pinned modules get them as they are.
    policies = {
        dtype: MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for dtype in {dtype for _, dtype in parameters} | {None}
    }
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=policies[None],
        offload_policy=offload,
        ignored_params=set(unit.parameters()),
    )
    kinds = lambda item: (str(item[1]), str(item[0].dtype))  # noqa: E731
    reshards = True if reshard_after_forward is None else reshard_after_forward
    for _, group in groupby(sorted(parameters, key=kinds), kinds):
        members = list(group)
        own = [parameter for parameter, _ in members]
        torch_private.add_group(unit, own, mesh, reshards, policies[members[0][1]], offload)
    low = [group for group in torch_private.groups_of(unit) if group.mp_policy.param_dtype is not None]
    if low:
        GatheredDtype(unit, low, low[0].mp_policy.param_dtype, torch_private.device_of(mesh))


def _outside_of_others(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """`unit` and what is in it, but for other units and what is in those."""
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _outside_of_others(child, units)


@torch.no_grad()
def _to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move `tensors` to the device, in place, with the first process's values; sharded ones stay as they are."""
    for tensor in tensors:
        if not is_sharded_tensor(tensor):
            tensor.data = tensor.detach().to(device).contiguous()  # FSDP2 supports no other layout
            _broadcast(tensor)


def _broadcast(tensor: torch.Tensor) -> None:
    """Broadcast as bytes, since not every backend supports every dtype."""
    data = tensor.detach()
    if data.is_contiguous():
        dist.broadcast(data.view(-1).view(torch.uint8), src=0)
    else:
        whole = data.contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        data.copy_(whole)


def _free_where_no_backward_follows(root: nn.Module, inputs: Any, outputs: Any) -> None:
    """Free what a forward without gradients has gathered.

    Else the next forward would compute with it, although an optimizer, an average or a checkpoint has changed the
    shards since.
    """
    if not torch.is_grad_enabled():
        for module in root.modules():
            if _gathers(module):
                module.reshard()


def _has_replicas(root: nn.Module) -> bool:
    # The root may have no group: all its parameters may be in blocks. All units of a run have one mesh.
    units = filter(_gathers, root.modules())
    first = next((group for unit in units for group in torch_private.groups_of(unit)), None)
    return first is not None and REPLICATE in (first.mesh_info.mesh.mesh_dim_names or ())


def _offloads(options: Any, device: torch.device) -> bool:
    if options.cpu_offload and device.type == "cpu":
        logger.info("cpu_offload has no effect: the device is the CPU, so the parameters are in host memory already")
    return options.cpu_offload and device.type != "cpu"


def _announce(
    modules: nn.ModuleDict, units: set[nn.Module], options: Any, mesh: DeviceMesh, device: torch.device
) -> None:
    sizes = ", ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    names = [name for name, module in modules.named_modules() if module in units]
    logger.info("fsdp gathers %d units one at a time (%s): %s", len(names), sizes, _shortened(names))
    if not options.shard_modules and len(names) == len(modules):
        logger.info(
            "fsdp gathers each entry of the modules whole, because the model has no repeated blocks in a ModuleList "
            "or Sequential; set shard_modules to the modules that it should gather one at a time."
        )


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {names[-1]}" if len(names) > 4 else "")
