"""Pins modules to fp32 by patterns of their names: they compute in fp32 under autocast, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import nn

from amp_recipes.errors import ConfigError, PrecisionError
from amp_recipes.modules.names import check_patterns, matches, no_match
from amp_recipes.modules.torch_private import COMPILED_MODULE, assume_constant_result, children_of
from amp_recipes.modules.unregistered import how_to_register, unregistered
from amp_recipes.precision.autocast import call_without_autocast, has_default_precision


class _TraceLog:
    """The classes of which torch.compile has traced a pinned forward.

    number: what the compiler knows it by; torch before 2.13 takes plain values alone for constants.
    """

    _of_number: ClassVar[WeakValueDictionary[int, _TraceLog]] = WeakValueDictionary()
    _numbers = count()

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self.classes = set(classes)
        self.number = next(self._numbers)
        self._of_number[self.number] = self

    def __reduce__(self) -> tuple[type[_TraceLog], tuple[set[type]]]:
        return _TraceLog, (self.classes,)  # a copy has a number of its own

    @classmethod
    def add(cls, number: int, module_class: type) -> None:
        """Note a class in the log of that number."""
        cls._of_number[number].classes.add(module_class)


@assume_constant_result
def _note_traced(trace_log: int, module_class: type) -> bool:
    """Runs while torch.compile traces, not in the compiled code."""
    _TraceLog.add(trace_log, module_class)
    return True


class _Pin:
    """The pin of one module; its bound `forward` stands in the module's `__dict__`.

    Bound to the pin, so that copies and pickles of the module carry a pin of their own weights: a method
    bound to the module comes back from a pickle as the class's forward. And a bound method, because
    torch.compile guards on the identity of any other callable here: it would compile each of a model's
    equal blocks anew.
    """

    def __init__(self, module: nn.Module, trace_log: _TraceLog) -> None:
        self.module = module
        self.previous: Callable | None = vars(module).get("forward")  # set by other code on the instance
        self.called = False
        self.trace_log = trace_log

    @property
    def was_called(self) -> bool:
        return self.called or type(self.module) in self.trace_log.classes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, in fp32 with autocast off."""
        # While compiling, a note per module would be a side effect, which activation checkpointing refuses,
        # or an identity to guard on. So there it is one per class.
        if torch.compiler.is_compiling():
            _note_traced(self.trace_log.number, type(self.module))
        else:
            self.called = True
        if self.previous is not None:
            return call_without_autocast(self.previous, args, kwargs, torch.float32)
        forward = type(self.module).forward
        return call_without_autocast(forward, (self.module, *args), kwargs, torch.float32, untouched=1)


class Pins:
    """The modules that one `pin_fp32` pinned.

    names: their names, in the order of `named_modules`.
    """

    def __init__(self, pinned: dict[str, _Pin], trace_log: _TraceLog) -> None:
        self._pinned = pinned
        self._trace_log = trace_log

    @property
    def names(self) -> list[str]:
        return list(self._pinned)

    def add(self, name: str, module: nn.Module) -> None:
        """Pin one more module, in the course of a run; torch.compile sees it, and compiles its callers again."""
        self._pinned[name] = _pin(module, self._trace_log)

    def remove(self, name: str) -> None:
        """Take back a pin; what other code had set in its place comes back."""
        pin = self._pinned.pop(name)
        _put_forward(pin.module, pin.previous)

    def never_called(self) -> list[str]:
        """Names whose pinned forward has not run: their parent uses the weights without calling the module.

        An example is `out_proj` of `nn.MultiheadAttention`. Ask after some forwards. Where torch.compile
        traced one module of a class, all pinned modules of this class count as called.
        """
        return [name for name, pin in self._pinned.items() if not pin.was_called]


def pin_fp32(modules: nn.Module, patterns: Sequence[str]) -> Pins:
    """Pin the modules that match: under autocast they run with autocast off and inputs cast to fp32.

    patterns: shell-style patterns of names in `modules.named_modules()` ("model.head", "*.norm"; * also
    matches dots), or "type:" and a pattern of class names ("type:LayerNorm"); case counts. A module without
    a forward of its own (ModuleList, ModuleDict) is pinned through its children.
    Outputs are not cast back; without autocast nothing changes; pinning again changes nothing. Pins survive
    copies, pickles, torch.compile and checkpointing of activations; `state_dict` does not know of them.
    torch.jit.script refuses pinned modules. Under torch.compile the backward is pinned only where autocast
    is entered inside the compiled function (see `fwd_default_precision`).
    Raises ConfigError that lists all patterns that match nothing or nothing with a forward (ParameterList),
    PrecisionError for TorchScript modules; in either case nothing was pinned.
    """
    targets = _targets(modules, patterns)
    trace_log = _TraceLog()
    # named_modules() gives a module that has several names only once, under the first.
    pinned = {name: _pin(module, trace_log) for name, module in modules.named_modules() if module in targets}
    return Pins(pinned, trace_log)


def _targets(modules: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    """The modules whose forwards `patterns` mean. Raises as `pin_fp32` does."""
    check_patterns("fp32_modules", patterns)
    named_modules = list(modules.named_modules(remove_duplicate=False))
    problems: list[str] = []
    targets: set[nn.Module] = set()
    for pattern in patterns:
        matched = [(name, module) for name, module in named_modules if matches(pattern, name, module)]
        found = {target for name, module in matched for target in _with_forward(name, module)}
        targets |= found
        if not matched:
            problems.append(no_match("fp32_modules", pattern, named_modules) + _if_unregistered(modules, pattern))
        elif not found:
            problems.append(_no_forward(pattern, matched))
    if problems:
        raise ConfigError("\n".join(problems))
    return targets


def _if_unregistered(modules: nn.Module, pattern: str) -> str:
    """Say what to do if a pattern names a layer in a Python list or dict, as if that were registered."""
    found = unregistered(modules, {})
    meant = [name for name in found if fnmatchcase(re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", name), pattern)]
    return "".join(f". {advice}" for advice in how_to_register(meant))


@contextmanager
def pinned_only(modules: nn.Module, names: Iterable[str]) -> Iterator[Pins]:
    """Inside this context, only the modules of these names are pinned to fp32; then the earlier ones again.

    names: as in `modules.named_modules()`; each must have a forward. A forward that `fwd_default_precision` decorates
    stays as it is. Yields the pins, which know whether they were called.
    """
    chosen = {name: modules.get_submodule(name) for name in names}
    before = [(module, vars(module).get("forward")) for module in modules.modules()]
    trace_log = _TraceLog()
    try:
        for module, forward in before:
            pin = getattr(forward, "__self__", None)
            if isinstance(pin, _Pin):
                _put_forward(module, pin.previous)
        yield Pins({name: _pin(module, trace_log) for name, module in chosen.items()}, trace_log)
    finally:
        for module, forward in before:
            _put_forward(module, forward)


def _put_forward(module: nn.Module, forward: Callable | None) -> None:
    """Set `forward` on the instance, or restore the class's own if it is None."""
    vars(module).pop("forward", None)
    if forward is not None:
        module.forward = forward


def decorated_modules(modules: nn.Module) -> list[str]:
    """Names of the modules whose class has a forward decorated by `fwd_default_precision`."""
    # A ScriptModule's class raises for it.
    forwards = ((name, getattr(type(module), "forward", None)) for name, module in modules.named_modules())
    return [name for name, forward in forwards if has_default_precision(forward)]


def pinned_modules(modules: nn.Module) -> list[str]:
    """Names of the modules that are pinned now."""
    forwards = ((name, vars(module).get("forward")) for name, module in modules.named_modules())
    return [name for name, forward in forwards if isinstance(getattr(forward, "__self__", None), _Pin)]


def _no_forward(pattern: str, matched: list[tuple[str, nn.Module]]) -> str:
    """Explain that a pattern matches only modules that are never called, such as a ParameterList."""
    name, module = matched[0]
    return (
        f"fp32_modules: {pattern!r} matches {name!r} ({type(module).__name__}), which cannot be pinned, because it "
        "has no forward and no child with one. Pin the module that uses it"
    )


def _with_forward(name: str, module: nn.Module) -> Iterator[nn.Module]:
    """Return the modules to pin for a module: itself, or its children if its forward is never called.

    An `_orig_mod` is what torch.compile(module) wraps: the wrapper's attributes are not its own.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise PrecisionError(
            f"fp32_modules: {name!r} is a TorchScript module, whose compiled forward cannot be pinned. Use the "
            "original module"
        )
    is_compiled = COMPILED_MODULE in children_of(module)
    if not is_compiled and ("forward" in vars(module) or type(module).forward is not nn.Module.forward):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _with_forward(f"{name}.{child_name}" if name else child_name, child)


def _pin(module: nn.Module, trace_log: _TraceLog) -> _Pin:
    """The pin of `module`: the one it has, or a new one."""
    pin = getattr(vars(module).get("forward"), "__self__", None)
    if not isinstance(pin, _Pin):
        pin = _Pin(module, trace_log)
        module.forward = pin.forward
    return pin
