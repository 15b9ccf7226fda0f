"""Restores a model, its optimizers, the recipe's state and the random generators after a step on trial."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from amp_recipes.files.user_code import lies_with_the_user
from amp_recipes.state.randomness import (
    GENERATORS,
    generator_state,
    random_state,
    set_generator_state,
    set_random_state,
)

# Attributes of the recipe's own objects: (where they stand, names that are not its own).
Holder = tuple[dict[str, Any], Collection[str]]

# Beside weights, what is larger is data: copied where everything is, not for each step that is tried.
_LARGE_BYTES = 2**26
# A recipe's objects are few; a graph of more (a dataset read into lists) is data.
_MOST_OBJECTS = 200_000


@contextmanager
def preserved(
    modules: nn.Module,
    optimizers: Iterable[Optimizer],
    device: torch.device,
    weights: bool = False,
    holders: Iterable[Holder] = (),
    untouched: Iterable[Any] = (),
) -> Iterator[None]:
    """Inside this context, gradients begin as None; afterwards everything is restored bit for bit, in the same objects.

    Kept: of modules their buffers, attributes, hooks, submodules, modes and which parameters train; gradients; random
    generators, the global ones and those met. holders: of what else is kept, at any depth: tensors, arrays, numbers,
    containers, generators, modules, objects whose class is the user's own, and others that have a `state_dict`; data
    sets and loaders are not. A lazy module that is initialized inside stays so. untouched: objects that are left as
    they are. weights: also parameters, optimizers' state and what is larger than 64 MiB, copied to host memory: their
    size is needed there.
    What a step writes to files, or does through objects of other libraries, is not undone.
    """
    optimizers = list(optimizers)
    with ExitStack() as undo:
        random = random_state(device)
        undo.callback(set_random_state, random)
        memory = _Memory(undo, weights, untouched)
        for holder, left_out in holders:
            memory.keep_attributes(holder, left_out)
        for value in (modules, *optimizers):
            memory.keep(value)
        for parameter in memory.parameters:
            parameter.grad = None
        yield


@contextmanager
def module_state_kept(module: nn.Module) -> Iterator[None]:
    """Inside this context, `module` may run on trial: buffers and attributes are restored, in it and all inside it."""
    with ExitStack() as undo:
        _Memory(undo, weights=False).keep(module)
        yield


@contextmanager
def values_kept(batches: Any) -> Iterator[None]:
    """Inside this context, a recipe may write to its batches; afterwards they have their earlier values."""
    with ExitStack() as undo:
        _Memory(undo, weights=True).keep(batches)
        yield


def has_state(value: Any) -> bool:
    """Whether `value` can tell its state and take it back."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class _Memory:
    """Notes what objects hold, each once, and lets `undo` put it back, whatever fails on the way."""

    def __init__(self, undo: ExitStack, weights: bool, untouched: Iterable[Any] = ()) -> None:
        self.parameters: list[nn.Parameter] = []
        self._undo = undo
        self._weights = weights
        self._seen = {id(value): value for value in untouched}  # by identity; held, so that none is given out again
        # The first that fits counts: a Parameter is a Tensor, too.
        self._by_kind: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (nn.Parameter, self._keep_parameter),
            (torch.Tensor, self._keep_tensor),
            (np.ndarray, self._keep_array),
            (GENERATORS, self._keep_generator),
            (Optimizer, self._keep_optimizer),
            (nn.Module, self._keep_module),
            (tuple, self._keep_tuple),
            ((Dataset, DataLoader, Sampler), self._leave),
        )

    def keep(self, value: Any) -> None:
        """Keep what `value` holds, and what that holds."""
        if isinstance(value, (type(None), bool, int, float, str, bytes, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MOST_OBJECTS:
            return
        for kinds, keep in self._by_kind:
            if isinstance(value, kinds):
                keep(value)
                return
        if type(value) in (dict, OrderedDict, defaultdict, list, deque, set):
            self._keep_container(value)
        else:
            self._keep_object(value)

    def keep_attributes(self, attributes: dict[str, Any], left_out: Collection[str] = ()) -> None:
        """Keep attributes of an object, but those left out."""
        names = {name: value for name, value in attributes.items() if name not in left_out}
        self._undo.callback(_put_attributes, attributes, names, left_out)
        for value in names.values():
            self.keep(value)

    def _keep_parameter(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self._undo.callback(_put_parameter, parameter, parameter.grad, parameter.requires_grad)
        if self._weights:
            self._keep_values(parameter)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if self._weights or tensor.nbytes <= _LARGE_BYTES:
            self._keep_values(tensor)

    def _keep_array(self, array: np.ndarray) -> None:
        if array.flags.writeable and (self._weights or array.nbytes <= _LARGE_BYTES):
            self._undo.callback(np.copyto, array, array.copy())

    def _keep_generator(self, generator: Any) -> None:
        self._undo.callback(set_generator_state, generator, generator_state(generator))

    def _keep_tuple(self, items: tuple) -> None:
        for item in items:
            self.keep(item)

    def _leave(self, data: Any) -> None:
        """Data sets and loaders stay as the step leaves them."""

    def _keep_object(self, value: Any) -> None:
        if _is_the_users(type(value)):
            self.keep_attributes(vars(value))
        elif hasattr(type(value), "__iter__"):
            return  # a library's loader, or a counter of epochs: a step does not move it, and a load would
        elif has_state(value):
            self._undo.callback(value.load_state_dict, deepcopy(value.state_dict()))

    def _keep_values(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor) or tensor.is_meta or tensor.is_inference() or tensor.layout is not torch.strided:
            return
        if all(tensor.stride()) or tensor.numel() <= 1:  # else several elements share memory, and are not written to
            copied = tensor.detach().to("cpu", copy=True) if self._weights else tensor.detach().clone()
            self._undo.callback(_put_values, tensor, copied)

    def _keep_module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # its attributes are those of compiled code
            for part in (*module.parameters(), *module.buffers()):
                self.keep(part)
            return
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            self._undo.callback(_put_initialized, module, module.training)
            return
        self.keep_attributes(vars(module))  # with hooks, buffers, parameters and submodules, which are dicts there

    def _keep_optimizer(self, optimizer: Optimizer) -> None:
        self.keep(optimizer.param_groups)
        if self._weights:
            self.keep(optimizer.state)

    def _keep_container(self, container: Any) -> None:
        is_mapping = isinstance(container, dict)
        items = dict(container) if is_mapping else list(container)
        self._undo.callback(put_items, container, items)
        for item in (*items, *items.values()) if is_mapping else items:
            self.keep(item)


def _is_the_users(kind: type) -> bool:
    """Whether objects of this class hold a recipe's state: others (a logger, a thread) live a life of their own."""
    if issubclass(kind, SimpleNamespace):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    has_attributes = kind.__dictoffset__ != 0
    in_main = kind.__module__ == "__main__"  # a notebook, or `python -c`, has no file
    return has_attributes and (in_main if file is None else lies_with_the_user(file))


def _put_attributes(attributes: dict[str, Any], values: dict[str, Any], left_out: Collection[str]) -> None:
    for name in attributes.keys() - values.keys() - set(left_out):
        del attributes[name]
    attributes.update(values)


def _put_initialized(module: nn.Module, training: bool) -> None:
    """Leave a lazy module initialized: by then it is of another class, which its former attributes do not fit."""
    module.training = training
    if hasattr(module, "reset_running_stats") and not is_lazy(module.running_mean):
        module.reset_running_stats()


def _put_parameter(parameter: nn.Parameter, gradient: torch.Tensor | None, requires_grad: bool) -> None:
    if parameter.requires_grad is not requires_grad:
        parameter.requires_grad_(requires_grad)
    parameter.grad = gradient


def _put_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.shape != values.shape:  # a cache that grew in place
        tensor.data = values.to(tensor.device)
    else:
        tensor.data.copy_(values)  # .data: a graph that saved the tensor may still be differentiated


def put_items(container: Any, items: Any) -> None:
    """Give a dict, set, list or deque these items in place of its own."""
    put: Callable[[Any], None] = container.update if isinstance(container, (dict, set)) else container.extend
    container.clear()
    put(items)
