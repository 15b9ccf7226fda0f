"""Decides where autocast is on and where it is off, and casts tensors between the two."""

from __future__ import annotations

import enum
import functools
import inspect
import numbers
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from amp_recipes.errors import PrecisionError
from amp_recipes.modules.devices import autocast_device_types, has_autocast
from amp_recipes.modules.nested import parts_of
from amp_recipes.modules.torch_private import REGISTER_PYTREE

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCAST_SIGNATURE = inspect.signature(torch.autocast)
_CTX_STATE = "_amp_recipes_autocast_state"
_DECORATED_MARK = "_amp_recipes_default_precision"


class _EnteredContexts(threading.local):
    """Keeps one stack per thread, since autocast's state is per thread, too."""

    def __init__(self) -> None:
        self.stack: list[torch.autocast] = []


class TorchAutocast:
    """A `torch.autocast` that can be entered repeatedly, nested in itself and shared between threads.

    Accepts the arguments of `torch.autocast` (device_type, dtype, enabled, cache_enabled), by position or by
    name; device_type may also be a `torch.device`. With float32 it does nothing: autocast has no float32 mode.
    It is a context manager and a decorator. Code under torch.compile can call a decorated function, but can enter
    only `torch.autocast` itself. Attributes: `device_type`, `dtype` (None: the device's default) and
    `enabled` (False for float32).
    Raises TypeError for arguments that `torch.autocast` does not accept, and PrecisionError (a RuntimeError)
    with dtype and device if the device has no autocast, or if entering it fails.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = _AUTOCAST_SIGNATURE.bind_partial(*args, **kwargs).arguments
        if "device_type" in arguments:
            arguments["device_type"] = _device_type(arguments["device_type"])
        self.device_type: str | None = arguments.get("device_type")
        self.dtype: torch.dtype | None = arguments.get("dtype")
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise TypeError(
                f"dtype of autocast is {self.dtype!r}; expected a torch.dtype such as torch.bfloat16. "
                "AMPConfig.from_name('bf16').dtype converts a name"
            )
        self._is_noop = self.dtype is torch.float32
        if not self._is_noop:
            _AUTOCAST_SIGNATURE.bind(**arguments)  # only a no-op can do without a device type
            if not has_autocast(self.device_type):
                raise PrecisionError(
                    f"device type {self.device_type!r} has no autocast to {self.dtype or 'its default dtype'}; "
                    f"expected one of {', '.join(autocast_device_types())}. Use float32 on this device"
                )
        self.enabled: bool = not self._is_noop and arguments.get("enabled", True)
        self._arguments = dict(arguments)
        self._entered = _EnteredContexts()
        self.was_entered = False

    def __enter__(self) -> TorchAutocast:
        if self._is_noop:
            return self
        try:
            # A new context each time: torch.autocast keeps what it has to restore on itself, so one of
            # them entered twice would restore the wrong state.
            context = torch.autocast(**self._arguments)
            context.__enter__()
        except Exception as cause:
            raise PrecisionError(
                f"cannot enter autocast to {self.dtype or 'its default dtype'} on device "
                f"{self.device_type!r}: {cause}. Choose another precision or device"
            ) from cause
        self._entered.stack.append(context)
        self.was_entered = True
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if not self._is_noop:
            self._entered.stack.pop().__exit__(exc_type, exc_value, traceback)

    def __call__(self, function: Callable) -> Callable:
        """Return `function` decorated: each call runs inside this context. With float32, `function` itself."""
        if self._is_noop:
            return function
        arguments = self._arguments

        @functools.wraps(function)
        def inside_autocast(*args: Any, **kwargs: Any) -> Any:
            # torch.compile cannot enter an object of ours that was made outside the function it traces.
            with torch.autocast(**arguments) if torch.compiler.is_compiling() else self:
                return function(*args, **kwargs)

        return inside_autocast

    def __reduce__(self) -> tuple:
        # A copy or a pickle (of a model that holds one) starts outside: thread-local stacks are not copied.
        return functools.partial(TorchAutocast, **self._arguments), ()

    def __repr__(self) -> str:
        return f"TorchAutocast({', '.join(f'{name}={value!r}' for name, value in self._arguments.items())})"


def _device_type(device: Any) -> str:
    """Return the type of `device`. A string such as "cuda:0" raises, as in torch."""
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise TypeError(f"device_type of autocast is {device!r}; expected a string such as 'cuda'")
    device_type, colon, _ = device.partition(":")
    if colon:
        raise PrecisionError(
            f"autocast got the device {device!r}; expected its device type, {device_type!r}. Use torch.device("
            f"{device!r}).type"
        )
    return device


@overload
def fwd_default_precision(fwd: Callable[P, R], cast_inputs: torch.dtype | None = ...) -> Callable[P, R]: ...


@overload
def fwd_default_precision(
    fwd: None = None, cast_inputs: torch.dtype | None = ...
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def fwd_default_precision(fwd: Callable | None = None, cast_inputs: torch.dtype | None = torch.float32) -> Callable:
    """Decorate `fwd` so that under autocast it runs with autocast off, and with its inputs cast to `cast_inputs`.

    For a `forward` (or any function) that needs a fixed precision. Use it with or without arguments: without `fwd`
    it returns a decorator. The decorated function has one more argument, `force_allow_autocast=False`; with True it
    runs as if it were not decorated.

    cast_inputs: dtype for floating-point tensors on devices whose autocast is on, in positional and keyword
    arguments, at any depth of dict, list, tuple, namedtuple, dataclass, PackedSequence and registered
    pytrees. None: autocast is off, but nothing is cast. float64, integers, bools, complex numbers and other objects
    are not changed. A container in which nothing is cast is passed on itself, and a tensor that is passed twice stays
    one tensor. A type that may hide tensors causes one warning.
    Without autocast nothing changes. Outputs are not cast back. Nothing is stored on module or arguments.
    torch.compile runs a backward in the autocast state in which the compiled function was called. Enter autocast
    inside that function; otherwise the backward of `fwd` is in low precision too.
    torch.jit.script compiles the undecorated source, and so loses the precision: use torch.compile.
    """
    if fwd is None:
        return functools.partial(fwd_default_precision, cast_inputs=cast_inputs)
    if not callable(fwd):
        raise TypeError(
            f"fwd_default_precision got {fwd!r}; expected a function to decorate. Give a dtype as cast_inputs="
        )
    signature = _signature_of(fwd)
    untouched = _leading_self(signature)
    is_decorated_inside = signature is not None and "force_allow_autocast" in signature.parameters
    undecorated = functools.partial(fwd, force_allow_autocast=True) if is_decorated_inside else fwd

    @functools.wraps(fwd)
    def at_default_precision(*args: Any, force_allow_autocast: bool = False, **kwargs: Any) -> Any:
        if force_allow_autocast:
            return undecorated(*args, **kwargs)
        return call_without_autocast(fwd, args, kwargs, cast_inputs, untouched)

    setattr(at_default_precision, _DECORATED_MARK, True)
    if signature is not None and not is_decorated_inside:
        at_default_precision.__signature__ = _with_force_allow_autocast(signature)
    return at_default_precision


def has_default_precision(fwd: Any) -> bool:
    """Whether `fwd` was decorated by `fwd_default_precision`."""
    return getattr(fwd, _DECORATED_MARK, False)


def _signature_of(function: Callable) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have none
        return None


def _leading_self(signature: inspect.Signature | None) -> int:
    """1 where the first parameter is `self`: a method's owner is not an input, even if it is a dataclass."""
    return 1 if signature is not None and next(iter(signature.parameters), None) == "self" else 0


def _with_force_allow_autocast(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    has_var_keyword = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    added = inspect.Parameter("force_allow_autocast", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    parameters.insert(len(parameters) - has_var_keyword, added)
    return signature.replace(parameters=parameters)


def call_without_autocast(
    fwd: Callable, args: tuple, kwargs: dict[str, Any], cast_inputs: torch.dtype | None, untouched: int = 0
) -> Any:
    """Return `fwd(*args, **kwargs)` with autocast off and inputs cast; without autocast, a plain call.

    untouched: number of leading positional arguments that are not inputs (a method's self, a Function's ctx).
    """
    # torch's own question whether any is on would be cheaper than this 1.4 us, but it overlooks mps.
    active = [device_type for device_type in autocast_device_types() if torch.is_autocast_enabled(device_type)]
    if not active:
        return fwd(*args, **kwargs)
    return _call_cast(fwd, args, kwargs, cast_inputs, active, untouched)


def _call_cast(
    fwd: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    cast_inputs: torch.dtype | None,
    device_types: list[str],
    untouched: int,
) -> Any:
    """Call `fwd` with autocast off on `device_types` and the inputs on them cast."""
    if cast_inputs is not None:

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            dtype = tensor.dtype
            if dtype is cast_inputs or dtype is torch.float64 or not dtype.is_floating_point:
                return tensor
            return tensor.to(cast_inputs) if tensor.device.type in device_types else tensor

        tensors = _TensorMap(cast)
        args = args[:untouched] + tensors.visit(args[untouched:])
        kwargs = tensors.visit(kwargs) if kwargs else kwargs
    off = [(device_type, False, None) for device_type in device_types]
    return _call_in_autocast_state(off, fwd, args, kwargs)


def _call_in_autocast_state(
    states: list[tuple[str, bool, torch.dtype | None]], fwd: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call `fwd` with (device type, enabled, dtype) set for each; one `with` per frame traces in dynamo."""
    if not states:
        return fwd(*args, **kwargs)
    device_type, enabled, dtype = states[0]
    with torch.autocast(device_type, dtype=dtype, enabled=enabled):
        return _call_in_autocast_state(states[1:], fwd, args, kwargs)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `function` applied to each tensor in it, at any depth; types of containers are kept.

    A container whose tensors all came back unchanged is returned itself; no container is changed in place.
    Values that cannot hold tensors pass; an object of any other unknown type passes with one warning.
    """
    return _TensorMap(function).visit(value)


class _TensorMap:
    """Maps one call's tensors; one met twice is mapped once, so that `query is key` stays true."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function
        self.mapped: dict[torch.Tensor, torch.Tensor] = {}  # the replaced ones; tensors hash by identity
        # Counts the tensors that were replaced. Comparing containers by identity would tell the same, but
        # torch.compile cannot trace that for those that the walk made.
        self.replaced = 0

    def visit(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._visit_tensor(value)
        kind = type(value)
        if kind in _PLAIN_TYPES or isinstance(value, nn.Module):
            return value
        if kind is tuple or kind is list:  # what arguments come in
            return self._rebuilt(value, value, kind)
        parts = parts_of(value)
        if parts is None:
            _warn_once_if_opaque(value)
            return value
        return self._rebuilt(value, *parts)

    def _visit_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.mapped.get(tensor)
        if result is None:
            result = self.function(tensor)
            if result is tensor:
                return tensor
            self.mapped[tensor] = result
        self.replaced += 1
        return result

    def _rebuilt(self, value: Any, items: Iterable, rebuild: Callable[[list], Any]) -> Any:
        """`value` itself if no tensor below it is replaced, else `rebuild(mapped items)`."""
        before = self.replaced
        mapped = [self.visit(item) for item in items]
        return value if self.replaced == before else rebuild(mapped)


_PLAIN_TYPES = (type(None), bool, int, float, str)  # what arguments mostly are, tried first


_SILENT_TYPES = (
    *(str, bytes, bytearray, numbers.Number, range, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.layout, torch.memory_format),
)
_seen_types: set[type] = set()


def _warn_once_if_opaque(value: Any) -> None:
    """Say once per type that tensors inside `value` are out of reach, unless it cannot hold any."""
    if torch.compiler.is_compiling():
        return
    kind = type(value)
    if kind in _seen_types:
        return
    _seen_types.add(kind)
    is_numpy = any(base.__module__ == "numpy" for base in kind.__mro__)
    if is_numpy or callable(value) or isinstance(value, _SILENT_TYPES):
        return
    warnings.warn(
        (
            f"tensors inside {kind.__module__}.{kind.__qualname__} objects keep their dtype: a precision cast does "
            "not look into such objects. Pass the tensors themselves, make the class a dataclass, or register it "
            "with "
        )
        + REGISTER_PYTREE,
        stacklevel=2,
    )


def custom_fwd(fwd: Callable | None = None, *, cast_inputs: torch.dtype | None = None) -> Callable:
    """Decorate the `forward` of a `torch.autograd.Function`, so that its backward runs in the same autocast state.

    Like `torch.amp.custom_fwd`, but the device types are those of the tensors among the arguments after ctx,
    at any depth (all device types if there is no tensor). Use it with or without cast_inputs, together with
    `custom_bwd` on `backward`. If forward takes no ctx, decorate `setup_context` as well.

    cast_inputs: under autocast, cast floating-point inputs as `fwd_default_precision` does, and run forward
    and backward with autocast off. None: the autocast state does not change.
    """
    if fwd is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        has_ctx = len(args) > 0 and isinstance(args[0], torch.autograd.function.FunctionCtx)
        device_types = _device_types_in(args[has_ctx:], kwargs) or autocast_device_types()
        state = [
            (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in device_types
        ]
        if has_ctx:
            off = cast_inputs is not None
            setattr(args[0], _CTX_STATE, [(kind, enabled and not off, dtype) for kind, enabled, dtype in state])
        active = [device_type for device_type, enabled, _ in state if enabled]
        if cast_inputs is None or not active:
            return fwd(*args, **kwargs)
        return _call_cast(fwd, args, kwargs, cast_inputs, active, int(has_ctx))

    return forward


def custom_bwd(bwd: Callable) -> Callable:
    """Decorate the `backward` of a `torch.autograd.Function`: it runs in the autocast state of its forward.

    Needs `custom_fwd` on `forward` (or on `setup_context`); raises PrecisionError without it.
    """

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: Any) -> Any:
        state = getattr(args[0], _CTX_STATE, None)
        if state is None:
            raise PrecisionError(
                f"{bwd.__qualname__} has custom_bwd, but its forward did not record the autocast state. Decorate "
                "forward with custom_fwd; if forward takes no ctx, decorate setup_context as well"
            )
        changed = [
            (device_type, enabled, dtype)
            for device_type, enabled, dtype in state
            if torch.is_autocast_enabled(device_type) != enabled or torch.get_autocast_dtype(device_type) != dtype
        ]
        return _call_in_autocast_state(changed, bwd, args, kwargs)

    return backward


def _device_types_in(*values: Any) -> list[str]:
    """Device types with autocast that the tensors in `values` are on, each once."""
    found: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        device_type = tensor.device.type
        if device_type not in found and device_type in autocast_device_types():
            found.append(device_type)
        return tensor

    map_tensors(note, values)
    return found
