"""Averages gradients of modules that every process holds completely.

The work is that of DistributedDataParallel (its buckets, hooks and buffer broadcast), which however is not put around a
module: it hangs on the module's forward hooks, as `torch.distributed._composable.replicate` and FSDP2 have it. So a
module stays what it is: its class, attributes, methods and names in checkpoints are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from amp_recipes.distributed import torch_private
from amp_recipes.distributed.collectives import AsyncGather, gather
from amp_recipes.distributed.processes import initialized
from amp_recipes.errors import ConfigError, RecipeError, listed
from amp_recipes.modules.torch_private import BatchNorm, forward_hooks, forward_pre_hooks, non_persistent_buffers

_BROADCAST_BYTES = 250 * 1024 * 1024  # as DistributedDataParallel has it
_SYNC_BATCHNORM_DEVICES = ("cuda", "hpu", "xpu")


class _Reducer(DistributedDataParallel):
    """Averages the gradients of `parameters`, which are in `module`, and of no others; it is never called itself."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], options: Any) -> None:
        chosen = {id(parameter) for parameter in parameters}
        parameters_by_name = module.named_parameters(remove_duplicate=False)
        left_out = [name for name, parameter in parameters_by_name if id(parameter) not in chosen]
        # `_Replica` sends them: that modules share a parameter is no reason to send the buffers of one with the other.
        left_out += [name for name, _ in module.named_buffers(remove_duplicate=False)]
        with torch_private.leaving_out(module, left_out):
            super().__init__(
                module,
                init_sync=False,  # done, for all modules together
                gradient_as_bucket_view=True,
                # A static graph finds them too.
                find_unused_parameters=options.find_unused_parameters and not options.static_graph,
                static_graph=options.static_graph,
            )
        self.averaged = list(parameters)
        self.identities = frozenset(map(id, parameters))
        self.reached = False  # by the backward under way
        self.told: Averaged | None = None  # the flags that the current backward sends with the gradients
        self.has_unsynced_gradients = False  # gradients of this window's earlier micro-batches, which were not averaged
        # Without a search for unused ones, a backward reaches all of them or none.
        self.marked = next((each for each in self.averaged if each.numel()), self.averaged[0])
        for parameter in self.averaged if self.find_unused_parameters else [self.marked]:
            parameter.register_post_accumulate_grad_hook(self._note_reached)
        self.expects_gradients = False  # since a forward; what a backward does of itself is not seen from here
        if options.gradient_compression != "off":
            self.register_comm_hook(None, _COMPRESSION[options.gradient_compression])

    def _note_reached(self, parameter: nn.Parameter) -> None:
        """Called before DistributedDataParallel takes the gradient."""
        self.reached = True
        if self.told is not None and parameter is self.marked:
            self.told.mark(parameter.grad)

    @property
    def marked_gradient(self) -> torch.Tensor | None:
        """The gradient that carried the flag to the other ranks in the last backward; None if none can."""
        gradient = self.marked.grad
        # Where unused parameters are looked for, this may be one of them, on one rank or on all.
        return gradient if self.reached and not self.find_unused_parameters and _can_be_marked(gradient) else None

    def after_forward(self, output: Any) -> Any:
        """The output, to be returned; a backward averages gradients from now on, if it is to."""
        self.expects_gradients = self.require_backward_grad_sync
        return torch_private.after_forward(self, output)

    def expect_gradients(self, loss: torch.Tensor) -> None:
        """Average in the next backward, from `loss`, also where no forward came before."""
        if self.static_graph or self.expects_gradients:
            return
        # A forward would have searched its outputs for unused parameters; for a method, the loss shows them.
        torch_private.expect_gradients(self, [loss] if self.find_unused_parameters else [])
        self.expects_gradients = True

    def not_averaged(self) -> list[nn.Parameter]:
        """After a backward: the parameters whose gradients of this window are due, but were not averaged."""
        due: list[nn.Parameter] = []
        if not self.reached:
            self.expect_none()  # the loss does not depend on the module
            if self.has_unsynced_gradients:  # but an earlier one of the window did
                due = self.averaged
        self.expects_gradients = self.has_unsynced_gradients = False
        return due

    def expect_none(self) -> None:
        """Leave gradients as they are: those of a critic that a generator's loss only goes through."""
        if self.expects_gradients:
            torch_private.expect_none(self)
            self.expects_gradients = False


class Averaged:
    """The gradients that a backward has averaged over the processes, and the flags that it has sent with them.

    A loss may be nonfinite on one rank alone, with gradients that are finite. So one element of a gradient is made NaN
    there before gradients are averaged, and after that it is NaN on all ranks: they need no message of their own.
    """

    def __init__(self) -> None:
        self._factor: torch.Tensor | None = None
        self._sent_flags: list[tuple[frozenset[int], torch.Tensor]] = []

    def tell(self, losses: Sequence[torch.Tensor]) -> None:
        """Before the backward: let its gradients tell whether any of the `losses` (0-d, detached) is nonfinite."""
        device = losses[-1].device
        # Each apart: the sum of finite losses may overflow. Multiplying by 1 leaves all bits, also the sign of a zero.
        self._factor = sum((loss - loss).to(device) for loss in losses) + 1

    def mark(self, gradient: torch.Tensor) -> None:
        """Make the first element NaN if a loss is nonfinite; leave it as it is, to the bit, if none is."""
        if self._factor is not None and _can_be_marked(gradient):
            gradient.as_strided((), ()).mul_(self._factor.to(gradient.device))

    def take(self, reducer: _Reducer) -> None:
        """After the backward: the gradients of `reducer` are averaged."""
        if self._factor is not None and reducer.marked_gradient is not None:
            # Read at once: the recipe may change gradients before the update (a mask, nan_to_num), and remove the flag.
            self._sent_flags.append((reducer.identities, reducer.marked_gradient.as_strided((), ()) * 0))

    def heard_with(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor | None:
        """0-d, the same on all ranks: NaN if a loss was nonfinite on any of them, or their first gradient; else 0.

        None where they have to be asked: this backward has not averaged the gradients of all these `parameters`. That
        depends on the course of the step alone and not on numbers, so that either all ranks ask or none.
        """
        left, heard = set(map(id, parameters)), None
        for identities, told in self._sent_flags:
            if heard is None and not left.isdisjoint(identities):
                heard = told
            left -= identities
        return None if left else heard


class _Replica:
    """Hooks of one module, before and after its forward, that average its gradients over the processes.

    A copy or a pickle of the module has hooks that do nothing.
    """

    def __init__(self) -> None:
        self.reducers: list[_Reducer] = []
        self.paused = False  # in evaluation
        self.has_buffers = False
        self.buffers_are_due = True

    def __reduce__(self) -> tuple[type[_Replica], tuple[()]]:
        return _Replica, ()

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self._takes_part():
            return
        for reducer in self.reducers:
            torch_private.before_forward(reducer)
        if self.has_buffers and self.buffers_are_due:
            _broadcast_buffers(module)

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._takes_part():
            return output
        for reducer in self.reducers:
            output = reducer.after_forward(output)
        # As torch has it: after a forward whose gradients are averaged. So a window, however long, has one.
        self.buffers_are_due = self.reducers[0].require_backward_grad_sync
        return output

    def _takes_part(self) -> bool:
        # Without gradients there is nothing to average, and a rank may be alone here: it draws samples in a hook.
        return bool(self.reducers) and torch.is_grad_enabled() and not self.paused


def check(options: Any, device: torch.device) -> None:
    """Raise ConfigError for options that several processes on `device` cannot run with, and for another torch."""
    missing = torch_private.missing_for_ddp()
    if missing:
        raise ConfigError(
            f"training with several processes uses internals of torch 2.13 ({', '.join(missing)}) that torch "
            f"{torch.__version__} does not have. Install torch 2.13, or train in one process."
        )
    if options.sync_batchnorm and device.type not in _SYNC_BATCHNORM_DEVICES:
        raise ConfigError(
            f"sync_batchnorm needs a GPU, but the device is {device}: torch's SyncBatchNorm runs on GPUs only. Leave "
            "it out (each process then normalises over its own batch), or use layers that do not depend on the batch "
            "(GroupNorm, LayerNorm)."
        )
    # https://github.com/pytorch/pytorch/pull/187732: it fails, and once it does not, gradients are not averaged.
    if options.static_graph and options.grad_accumulation_factor > 1:
        raise ConfigError(
            f"static_graph does not work with grad_accumulation_factor {options.grad_accumulation_factor}: torch "
            f"{torch.__version__} does not average accumulated gradients under a static graph. Leave static_graph "
            "out."
        )


def wrap(modules: nn.ModuleDict, device: torch.device, options: Any) -> None:
    """Average the gradients of `modules` over the processes from now on, and start all from rank 0's weights.

    Modules without trainable parameters are only made equal. A parameter that several modules share is averaged once,
    whichever of them a step uses. To be called again where `requires_grad` changed; where nothing did, nothing happens.

    options: has the run options on processes as attributes. Raises ConfigError for options that cannot hold here and
    for modules that differ between ranks, or that have no values yet.
    """
    check(options, device)
    by_owners = _parameters_by_owners(modules)
    if _is_wrapped(modules, by_owners):
        return
    _unwrap(modules)
    check_ready(modules)
    if options.sync_batchnorm:
        synchronise_batchnorms(modules)
    start_alike(modules)
    replicas = {name: _Replica() for name in modules}
    for owners, parameters in by_owners.items():
        reducer = _Reducer(modules[owners[0]], parameters, options)
        for name in owners:
            replicas[name].reducers.append(reducer)
    for name, module in modules.items():
        if replicas[name].reducers and _replica_of(module) is None:
            replicas[name].has_buffers = bool(_persistent_buffers(module))
            module.register_forward_pre_hook(replicas[name].before_forward, prepend=True)
            module.register_forward_hook(replicas[name].after_forward)


@contextmanager
def no_sync(modules: nn.Module, use: bool = True) -> Iterator[None]:
    """Inside this context, backward does not average gradients across ranks; restored also after an exception."""
    reducers = [*_reducers(modules), *_of_the_recipe(modules)] if use and initialized() else []
    before = [reducer.require_backward_grad_sync for reducer in reducers]
    for reducer in reducers:
        reducer.require_backward_grad_sync = False
        if isinstance(reducer, _Reducer):
            reducer.has_unsynced_gradients = True
            reducer.expect_none()
    try:
        yield
    finally:
        for reducer, synchronises in zip(reducers, before, strict=True):
            reducer.require_backward_grad_sync = synchronises


@contextmanager
def averaging(
    modules: nn.Module, loss: torch.Tensor, parameters: Iterable[nn.Parameter] | None = None
) -> Iterator[Averaged]:
    """Around a backward from `loss`: see to it that it averages the gradients of all it reaches, or raise RecipeError.

    That is more than DistributedDataParallel does by itself: modules whose weights were used without a call of the
    module (a method, a tied weight) are averaged as well, and so are gradients of a part of a module's parameters.

    parameters: those that the backward leaves gradients with; default: all.
    """
    averaged = Averaged()
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    by_hand: list[nn.Parameter] = []
    whole: list[_Reducer] = []
    for reducer in _synchronising(modules):
        reducer.reached = False
        wanted = reducer.averaged
        if chosen is not None:
            wanted = [parameter for parameter in wanted if id(parameter) in chosen]
        if len(wanted) == len(reducer.averaged):
            whole.append(reducer)
            reducer.told = averaged
            reducer.expect_gradients(loss)
        else:
            reducer.expect_none()  # it would wait for the others
            by_hand += wanted
    try:
        yield averaged
    finally:
        for reducer in whole:
            reducer.told = None
    for reducer in whole:
        _check_finished(reducer, modules)
        averaged.take(reducer)
        by_hand += reducer.not_averaged()
    _average(by_hand)


@torch.no_grad()
def differing(modules: nn.Module) -> list[str]:
    """Names of the trainable parameters whose values are not the same in all processes; each must hold all of them."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    named = {name: each for name, each in modules.named_parameters() if each.requires_grad and not each.is_complex()}
    if not initialized() or not named:
        return []
    values = [parameter.contiguous().view(words[parameter.element_size()]) for parameter in named.values()]
    sums = torch.stack([value.sum(dtype=torch.int64) for value in values])
    rows = AsyncGather((sums % 2**52).tolist()).read()  # as many as a double holds
    return [name for name, column in zip(named, zip(*rows, strict=True), strict=True) if len(set(column)) > 1]


@contextmanager
def evaluating(modules: nn.Module) -> Iterator[None]:
    """Inside this context, forwards exchange nothing: ranks may have different numbers of batches.

    To be entered by all ranks: at its beginning they take rank 0's buffers, so that all evaluate the same model.
    """
    if not initialized():
        yield
        return
    _broadcast_buffers(modules)
    replicas = _replicas(modules)
    before = [replica.paused for replica in replicas]
    for replica in replicas:
        replica.paused = True
    try:
        yield
    finally:
        for replica, paused in zip(replicas, before, strict=True):
            replica.paused = paused


@contextmanager
def paused(modules: nn.Module) -> Iterator[None]:
    """Inside this context, forwards and backwards of this process exchange nothing with the others."""
    replicas, wrappers = _replicas(modules), [*_reducers(modules), *_of_the_recipe(modules)]
    before = [(replica, "paused", replica.paused) for replica in replicas]
    for wrapper in wrappers:
        if isinstance(wrapper, _Reducer):
            wrapper.expect_none()  # a forward may have come before, whose backward has not
        names = ("require_backward_grad_sync", "require_forward_param_sync")
        before += [(wrapper, name, getattr(wrapper, name)) for name in names]
    for holder, name, _ in before:
        setattr(holder, name, isinstance(holder, _Replica))
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


# ---------------------------------------------------------------------- what is wrapped


def _parameters_by_owners(modules: nn.ModuleDict) -> dict[tuple[str, ...], list[nn.Parameter]]:
    """The trainable parameters under the names of the modules that have them.

    Each group is averaged apart: a step that uses one of the modules then uses all of a group, or none.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in modules.items():
        if isinstance(module, DistributedDataParallel):  # the recipe's own wrapper
            continue
        for parameter in _trainable(module.parameters()):
            owners.setdefault(parameter, []).append(name)
    groups: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter, names in owners.items():
        groups.setdefault(tuple(names), []).append(parameter)
    return groups


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _replica_of(module: nn.Module) -> _Replica | None:
    """The live one that hangs on the module's hooks."""
    for hook in forward_pre_hooks(module).values():
        replica = getattr(hook, "__self__", None)
        if isinstance(replica, _Replica) and replica.reducers:
            return replica
    return None


def _replicas(modules: nn.Module) -> list[_Replica]:
    """Those of a Brain's modules, which hang on its entries and not deeper: this is asked in every step."""
    return [replica for module in modules.children() if (replica := _replica_of(module)) is not None]


def _of_the_recipe(modules: nn.Module) -> list[DistributedDataParallel]:
    """Entries that the recipe has wrapped itself: they are left as they are."""
    return [module for module in modules.children() if isinstance(module, DistributedDataParallel)]


def _reducers(modules: nn.Module) -> list[_Reducer]:
    """Each that averages some of the modules' gradients, once."""
    return list(dict.fromkeys(reducer for replica in _replicas(modules) for reducer in replica.reducers))


def _synchronising(modules: nn.Module) -> list[_Reducer]:
    """Return the replicas that average in the next backward."""
    return [reducer for reducer in _reducers(modules) if reducer.require_backward_grad_sync] if initialized() else []


def _is_wrapped(modules: nn.ModuleDict, by_owners: dict[tuple[str, ...], list[nn.Parameter]]) -> bool:
    """Whether the very parameters that are trainable now are averaged, in the process group of now."""
    reducers = _reducers(modules)
    if any(reducer.process_group is not dist.group.WORLD for reducer in reducers):
        return False
    now = sorted(sorted(map(id, parameters)) for parameters in by_owners.values())
    return bool(reducers) and now == sorted(sorted(map(id, reducer.averaged)) for reducer in reducers)


def _unwrap(modules: nn.ModuleDict) -> None:
    """Remove hooks from an earlier wrap."""
    for reducer in _reducers(modules):
        torch_private.remove_hooks(reducer)
    for module in modules.children():
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Replica)]:
                del hooks[key]


def check_ready(modules: nn.ModuleDict) -> None:
    """Raise ConfigError for parameters without values: those of lazy modules, or on the device "meta"."""
    for name, parameter in modules.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problem = "has no shape yet (a lazy module). Call the module once before you create the Brain"
        elif parameter.is_meta:
            problem = (
                'is on the device "meta", so it has no values. Give it values (`to_empty`) before you create the Brain'
            )
        else:
            continue
        raise ConfigError(f"parameter {name} {problem}: all processes must start from the same weights.")


def start_alike(modules: nn.ModuleDict) -> None:
    """Give all ranks rank 0's parameters and buffers, also those of frozen modules.

    Raises ConfigError, on all of them, where they differ in more than values.
    """
    persistent = {id(buffer) for buffer in _persistent_buffers(modules)}
    saved, others = [], []
    for name, tensor in (*modules.named_parameters(), *modules.named_buffers()):
        is_saved = isinstance(tensor, nn.Parameter) or id(tensor) in persistent
        (saved if is_saved else others).append((name, tensor))
    _refuse_other_models(saved)
    # Tables that have grown with what a rank has seen stay its own.
    shapes = gather([(name, tuple(tensor.shape)) for name, tensor in others])
    alike = all(of_rank == shapes[0] for of_rank in shapes)
    broadcast = [tensor.detach() for _, tensor in ([*saved, *others] if alike else saved)]
    if broadcast:
        torch_private.broadcast(broadcast, _BROADCAST_BYTES)


def _refuse_other_models(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    shapes = gather([(name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in tensors])
    for rank, of_rank in enumerate(shapes):
        for ours, theirs in zip_longest(shapes[0], of_rank):
            if ours != theirs:
                raise ConfigError(
                    f"the modules differ between processes: rank 0 has {_tensor_text(ours)}, rank {rank} has "
                    f"{_tensor_text(theirs)}. Every process must build the same model. Check whether the model depends "
                    "on the rank, on random numbers, or on the data that a rank reads."
                )


def _tensor_text(tensor: tuple[str, tuple[int, ...], str, bool] | None) -> str:
    if tensor is None:
        return "nothing more"
    name, shape, dtype, trainable = tensor
    return f"{name} {list(shape)} ({dtype.removeprefix('torch.')}{'' if trainable else ', frozen'})"


def _broadcast_buffers(modules: nn.Module) -> None:
    """Give all ranks rank 0's persistent buffers, as DistributedDataParallel does with all of them."""
    buffers = _persistent_buffers(modules)
    if buffers:
        # Graphs that have saved one do not mind: at least in rank 0 nothing has changed.
        with torch.no_grad(), torch_private.versions_kept(buffers):
            torch_private.broadcast(buffers, _BROADCAST_BYTES)


def _persistent_buffers(modules: nn.Module) -> list[torch.Tensor]:
    """The buffers that checkpoints hold, each once.

    Others are tables, or grow with what a rank has seen: their shapes may differ.
    """
    found: dict[int, torch.Tensor] = {}
    for module in modules.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in non_persistent_buffers(module):
                found[id(buffer)] = buffer
    return list(found.values())


# ---------------------------------------------------------------------- gradients


# Under names of our own: torch refuses its bf16 hook by name without NCCL, but gloo sums bf16 as well. Without
# annotations: torch compares them with classes, and here they are strings.
def _send_bf16(group, bucket):
    return default_hooks.bf16_compress_hook(group, bucket)


def _send_fp16(group, bucket):
    return default_hooks.fp16_compress_hook(group, bucket)


_COMPRESSION: dict[str, Callable[..., Any]] = {"bf16": _send_bf16, "fp16": _send_fp16}


def _can_be_marked(gradient: torch.Tensor | None) -> bool:
    """Whether it has a first real element, in memory."""
    return (
        gradient is not None and gradient.layout is torch.strided and gradient.numel() > 0 and not gradient.is_complex()
    )


def _average(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients over the ranks, in one collective for each dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # another rank may have one
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
    for group in by_dtype.values():
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in group]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for parameter, part in zip(group, flat.split([parameter.numel() for parameter in group]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))


def _check_finished(reducer: _Reducer, modules: nn.Module) -> None:
    """Raise RecipeError if a backward reached some of the parameters only: no rank has averages then."""
    try:
        torch_private.check_finished(reducer)
    except RuntimeError:
        torch_private.expect_none(reducer)
    else:
        return
    missing = {id(parameter) for parameter in reducer.averaged if parameter.grad is None}
    names = [name for name, parameter in modules.named_parameters() if id(parameter) in missing]
    raise RecipeError(
        f"the loss does not depend on {listed(names) or 'some parameters'}, but it depends on other parameters of "
        "the same module, so ddp cannot average the module's gradients over the processes. If this changes from step "
        "to step, give --find_unused_parameters=true. If these parameters are never used, freeze them "
        "(requires_grad_(False)) or remove them."
    )


# ---------------------------------------------------------------------- BatchNorm


def synchronise_batchnorms(modules: nn.ModuleDict) -> None:
    """Make every BatchNorm a SyncBatchNorm, in place: fp32 pins, hooks and references to it stay.

    `SyncBatchNorm.convert_sync_batchnorm` makes new modules, and loses them. Raises ConfigError for a class derived
    from BatchNorm, whose own forward would be lost as well.
    """
    named = {name: each for name, each in modules.named_modules() if isinstance(each, BatchNorm)}
    found = {name: each for name, each in named.items() if not isinstance(each, nn.SyncBatchNorm)}
    for name, batchnorm in found.items():
        if type(batchnorm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            raise ConfigError(
                f"sync_batchnorm: {name} is a {type(batchnorm).__name__}, a subclass of BatchNorm with its own "
                "forward, which torch's SyncBatchNorm would replace. Leave sync_batchnorm out, or use a plain "
                "BatchNorm there."
            )
    for batchnorm in found.values():
        batchnorm.__class__ = nn.SyncBatchNorm
        batchnorm.process_group = None
