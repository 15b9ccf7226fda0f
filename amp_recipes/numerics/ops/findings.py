"""Finds the effect of autocast on an op: calls the op with and without it, and watches its kernels."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from amp_recipes.errors import PrecisionError
from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.ops.lists import FLOAT32, LOWER_PRECISION, RAISES, STANDS_FOR, WIDEST, documented
from amp_recipes.numerics.ops.probes import CALLS, CPU_ONLY, GPU_ONLY, NOT_ELIGIBLE, Call, Inputs, kernels_of
from amp_recipes.precision.amp_config import resolve_precision
from amp_recipes.precision.autocast import TorchAutocast
from amp_recipes.precision.torch_private import (
    FAKE_TENSOR_LOG,
    DispatchMode,
    all_op_names,
    bare_op_name,
    fake_tensor_mode,
    has_kernel,
)

AS_GIVEN = "as given"  # run in the dtype of its inputs: autocast changes nothing
EXEMPT = "not eligible"  # documented so: in place, out=, dtype=, float64, integers
OTHER_DTYPE = "another dtype"  # cast to a low dtype that is not the one asked for
PARTLY = "in part"  # some of its kernels are cast, others are not
BY_PARTS = "by its parts"  # it has no autocast kernel, but what it is made of has
CANNOT_RUN = "cannot run"  # cast to the low dtype, which its kernel refuses on this device
NOT_SEEN = "not seen"  # it could not be run here, or not up to its kernel

LOW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHORT_NAMES = {torch.float32: "fp32", torch.float64: "fp64", **{dtype: name for name, dtype in LOW_DTYPES.items()}}
_WIDE = {torch.float32, torch.float64}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class OpFinding:
    """The effect of autocast on one op. Dtypes by short name, each once, in the order of the call."""

    name: str
    documented: str | None  # the policy by the lists; "not eligible"; None: no list of this device type has it
    found: str  # a policy, "as given", "raises", "in part", "another dtype", "cannot run" or "not seen"
    inputs: tuple[str, ...]  # the floating inputs of the call that showed it
    computed: tuple[str, ...]  # what the op's own kernels were given, as dispatch saw them
    outputs: tuple[str, ...]
    error: str | None  # the first line of what that call raised
    note: str


def probe(device_type: str, dtype: torch.dtype) -> list[OpFinding]:
    """Call every op on fp32, low and mixed inputs, with autocast and without: what it changes is what it does.

    dtype: torch.bfloat16 or torch.float16. Without such a device torch's dispatch is traced on tensors without data:
    the casts are torch's own, but no kernel runs. An op that cannot be called is a finding with an error. Autocast
    state, warning filters, random generators and determinism settings are afterwards what they were.
    Raises PrecisionError for a device type without documented lists, for another dtype, and where the device cannot
    run the dtype at all.
    """
    listed = documented(device_type)
    if dtype not in LOW_DTYPES.values():
        raise PrecisionError(f"autocast can be probed in torch.bfloat16 or torch.float16, not in {dtype}")
    live = is_here(device_type)
    if live:
        resolve_precision(SHORT_NAMES[dtype], device_of(device_type))  # raises where the device cannot run it
    with _undisturbed(device_type, live):
        prober = _Prober(device_type, dtype, live)
        elsewhere = GPU_ONLY if device_type == "cpu" else CPU_ONLY
        return [
            *(prober.finding(name, call, listed.get(name)) for name, call in CALLS.items() if name not in elsewhere),
            *(prober.finding(name, call, EXEMPT) for name, call in NOT_ELIGIBLE.items()),
        ]


def autocast_kernels(device_type: str) -> list[str]:
    """The aten ops, with overload, that have an autocast kernel in this build of torch; no device is needed."""
    key = f"Autocast{device_type.upper()}"
    return sorted(name for name in all_op_names() if name.startswith("aten::") and has_kernel(name, key))


def bare_name(kernel: str) -> str:
    """An op's name without namespace and overload."""
    return kernel.removeprefix("aten::").partition(".")[0]


def is_here(device_type: str) -> bool:
    """Whether this machine has such a device."""
    return device_type == "cpu" or getattr(torch, device_type).is_available()


def device_of(device_type: str) -> torch.device:
    """The device of this type that is current here."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, getattr(torch, device_type).current_device())


@dataclass(frozen=True)
class _Run:
    """One call: what its kernels were given, what it returned, or what it raised."""

    made: tuple[torch.dtype, ...]
    kernels: set[str]
    computed: set[torch.dtype]
    outputs: tuple[torch.dtype, ...]
    error: str | None
    kernel_raised: bool  # the error comes from one of `kernels`

    def differs(self, other: _Run) -> bool:
        mine = (self.computed, self.outputs, self.error is None)
        return mine != (other.computed, other.outputs, other.error is None)


def _computes_in(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.dtype]:
    """Return the dtypes in which a kernel computes: those of its tensors, unless an argument widens them."""
    if kwargs.get("dtype") is not None:  # a sum of bf16 with dtype=float32 adds up in float32
        return [kwargs["dtype"]]
    if bare_op_name(func) in ("_softmax", "_log_softmax") and args[2]:  # half_to_float: what fp16 gets on a GPU
        return [torch.float32]
    return _floating(args, kwargs)


class _Kernels(DispatchMode):
    """Watches for some kernels, and for the dtypes in which they are to compute."""

    def __init__(self, wanted: frozenset[str]) -> None:
        super().__init__()
        self._wanted = wanted
        self._watching = True
        self.seen: set[str] = set()
        self.computed: set[torch.dtype] = set()
        self.raised = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside this context, ops are not watched."""
        self._watching = False
        try:
            yield
        finally:
            self._watching = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, bare_op_name(func)
        if not self._watching or name not in self._wanted:
            return func(*args, **kwargs)
        self.seen.add(name)  # before it runs, because it may raise
        self.computed.update(_computes_in(func, args, kwargs))
        try:
            return func(*args, **kwargs)
        except Exception:
            self.raised = True
            raise


class _Prober:
    """Calls ops on one device type, in one low dtype."""

    def __init__(self, device_type: str, low: torch.dtype, live: bool) -> None:
        self._device = device_of(device_type) if live else torch.device(device_type)
        self._low = low
        self._live = live
        self._world = contextlib.nullcontext() if live else fake_tensor_mode()
        self._turns = {"fp32": (torch.float32,), "low": (low,), "mixed": (low, torch.float32)}
        self._cast_names = {bare_name(kernel) for kernel in autocast_kernels(device_type)}

    def finding(self, name: str, call: Call, listed: str | None) -> OpFinding:
        """Return the effect of autocast on one op."""
        wanted = kernels_of(name)
        on, off = {}, {}
        for turn, dtypes in self._turns.items():
            if turn == "mixed" and len(on["low"].made) == 1:  # there is nothing to mix
                continue
            on[turn] = self._run(call, wanted, dtypes, enabled=True)
            off[turn] = self._run(call, wanted, dtypes, enabled=False)
        found, turn = self._verdict(on, off)
        shown = on[turn]
        computed = _short(sorted(shown.computed, key=str))
        dtypes = (_short(shown.made), computed, _short(shown.outputs))
        return OpFinding(name, listed, found, *dtypes, shown.error, self._note(name, found, shown))

    def _run(self, call: Call, wanted: frozenset[str], dtypes: tuple[torch.dtype, ...], enabled: bool) -> _Run:
        kernels = _Kernels(wanted)
        given = Inputs(self._device, dtypes, empty=not self._live, aside=kernels.aside)
        outputs: tuple[torch.dtype, ...] = ()
        error = None
        try:
            with torch.inference_mode(False), torch.no_grad(), self._world, kernels, self._autocast(enabled):
                outputs = tuple(_floating(call(given)))
        except Exception as cause:  # an op that this build or device lacks is a finding, too
            error = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
        return _Run(tuple(given.made), kernels.seen, kernels.computed, outputs, error, kernels.raised)

    def _autocast(self, enabled: bool) -> AbstractContextManager:
        if self._live:
            return TorchAutocast(self._device.type, dtype=self._low, enabled=enabled)
        return autocast_without_device(self._device.type, self._low, enabled)

    def _verdict(self, on: dict[str, _Run], off: dict[str, _Run]) -> tuple[str, str]:
        """Return the effect of autocast, and the turn that shows it."""
        for turn, run in on.items():
            if run.error and not off[turn].error:
                return (CANNOT_RUN if run.kernel_raised and run.computed == {self._low} else RAISES), turn
        for turn, run in on.items():
            if run.differs(off[turn]):
                return self._change(turn, run), turn
        ran = any(run.kernels and not run.error for run in on.values())
        return (AS_GIVEN if ran else NOT_SEEN), "low"

    def _change(self, turn: str, run: _Run) -> str:
        """Return the effect of autocast on an op that it changes."""
        if not run.kernels:
            return NOT_SEEN
        if turn == "fp32":
            if run.computed == {self._low} or set(run.outputs) == {self._low}:
                return LOWER_PRECISION
            return OTHER_DTYPE if run.computed <= set(LOW_DTYPES.values()) else PARTLY
        if not _real(run.computed) <= _WIDE:
            return PARTLY
        return FLOAT32 if turn == "low" else WIDEST

    def _note(self, name: str, found: str, run: _Run) -> str:
        if found == NOT_SEEN:
            return "" if run.error else "none of its kernels ran"
        has_kernel = not {bare_name(name), *STANDS_FOR.get(name, ())}.isdisjoint(self._cast_names)
        if found not in (AS_GIVEN, RAISES, CANNOT_RUN) and not has_kernel:
            return f"{BY_PARTS}: {', '.join(sorted(run.kernels))}"
        if _real(run.computed).isdisjoint(_real(run.made) | _real(run.outputs)):
            return "" if not run.computed else f"{' '.join(_short(run.computed))} inside"
        return ""


@contextlib.contextmanager
def _undisturbed(device_type: str, live: bool) -> Iterator[None]:
    """Leave warning filters, random generators, determinism and torch's log as they are."""
    devices = [device_of(device_type)] if live and device_type != "cpu" else []
    log = logging.getLogger(FAKE_TENSOR_LOG)
    was_silent, log.disabled = log.disabled, True
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices, device_type=device_type if devices else "cuda"):
            warnings.simplefilter("ignore")
            if deterministic:  # it would refuse some ops
                torch.use_deterministic_algorithms(False)
            yield
    finally:
        log.disabled = was_silent
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=warn_only)


@contextlib.contextmanager
def autocast_without_device(device_type: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    """`torch.autocast` for a device that is not here, where the original would turn itself off."""
    was_enabled, was_dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, was_enabled)
        torch.set_autocast_dtype(device_type, was_dtype)


def _floating(*values: object) -> list[torch.dtype]:
    """The floating and complex dtypes of all tensors in `values`."""
    dtypes = (tensor.dtype for tensor in tensors_in(values))
    return [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]


def _real(dtypes: Iterable[torch.dtype]) -> set[torch.dtype]:
    return {_REAL.get(dtype, dtype) for dtype in dtypes}


def _short(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes))
