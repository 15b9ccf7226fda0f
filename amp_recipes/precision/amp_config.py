"""Maps a precision name to its dtype, and decides whether the device computes natively in it."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from amp_recipes.errors import ConfigError, PrecisionError
from amp_recipes.modules.devices import has_autocast

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Precision name -> the dtype of its autocast."""

_NAMES = {dtype: name for name, dtype in PRECISIONS.items()}
_FLOAT32_PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True)
class AMPConfig:
    """The dtype in which autocast computes; float32 means no autocast."""

    dtype: torch.dtype

    @classmethod
    def from_name(cls, name: str | None) -> AMPConfig:
        """Return the configuration for a name: None or "fp32", "fp16", "bf16".

        Raises ConfigError (a ValueError) for any other name; "auto" needs a device: see `resolve_precision`.
        """
        return cls(_dtype_named(name, PRECISIONS))


@dataclass(frozen=True)
class Precision:
    """A precision on a device."""

    name: str  # fp32, fp16 or bf16; never auto
    dtype: torch.dtype
    device_type: str
    reason: str | None  # why `auto` chose it; None if the name was given
    warning: str | None  # what to expect and to do if the device is slow in this precision


@dataclass(frozen=True)
class Capabilities:
    """The support of one device for the 16-bit dtypes."""

    device_name: str  # as in messages: "this CPU (AMD EPYC)"
    native: frozenset[torch.dtype]  # computed in hardware
    runs: frozenset[torch.dtype]  # runs at all: native, or emulated


_BOTH = frozenset({torch.float16, torch.bfloat16})


def resolve_precision(name: str | None, device: torch.device | str) -> Precision:
    """Return the precision for a name on `device`; the caller logs its `reason` and `warning`.

    name: None or "fp32", "fp16", "bf16", or "auto": bf16 if it is native, else fp16 on a GPU, else fp32.
    Raises ConfigError for an unknown name or device, PrecisionError if the device cannot run it at all.
    """
    try:
        device = torch.device(device)
    except RuntimeError as cause:
        raise ConfigError(f"device {device!r} is unknown to torch: {cause}") from cause
    if name == "auto":
        return _choose(device)
    dtype = _dtype_named(name, (*PRECISIONS, "auto"))
    if dtype is torch.float32:
        return Precision("fp32", dtype, device.type, reason=None, warning=None)
    capabilities = _capabilities_or_raise(dtype, device)
    return Precision(_NAMES[dtype], dtype, device.type, None, _warning(dtype, device, capabilities))


def device_capabilities(device: torch.device) -> Capabilities:
    """Return the dtypes that `device` computes natively; an unknown device type counts as native in both.

    Raises PrecisionError if there is no such device, or if its type has no autocast.
    """
    look_up = _LOOK_UPS.get(device.type)
    if look_up is not None:
        return look_up(device)
    if not has_autocast(device.type):
        raise PrecisionError(f"device {device} has no autocast")
    return Capabilities(f"device {device}", native=_BOTH, runs=_BOTH)


def set_float32_precision(mode: str) -> None:
    """Set how matrix products, convolutions and RNNs of CUDA, cuDNN and oneDNN compute in fp32.

    mode: "ieee" for all 23 mantissa bits, "tf32" for 10 bits and the tensor cores.
    Holds for the whole process. Raises ConfigError for another mode.
    """
    if mode not in _FLOAT32_PRECISIONS:
        raise ConfigError(_unknown("float32_precision", mode, _FLOAT32_PRECISIONS))
    # torch keeps the older switches beside `fp32_precision` and raises in their getters, which cudnn.flags()
    # and torch.compile read, once the two disagree. So the older ones are set too, and first, because
    # they write to the newer ones.
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = mode == "tf32"
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    places = [cudnn, cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    for place in places:  # not mkldnn itself: its setter writes the default of every backend
        place.fp32_precision = mode


def fp16_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the float16 parameters: gradients in fp16 cannot be unscaled, so they need fp32 masters."""
    return [name for name, parameter in named_parameters if parameter.dtype is torch.float16]


def _dtype_named(name: str | None, accepted: Iterable[str]) -> torch.dtype:
    """The dtype of a precision name; anything else raises ConfigError, which lists the accepted names."""
    if name is None:
        return torch.float32
    if isinstance(name, str) and name in PRECISIONS:
        return PRECISIONS[name]
    advice = ". 'auto' depends on the device: use resolve_precision('auto', device)" if name == "auto" else ""
    raise ConfigError(_unknown("precision", name, accepted) + advice)


def _unknown(option: str, given: object, accepted: Iterable[str]) -> str:
    """Return the message for an unknown value: the value, the accepted ones, and the nearest of them."""
    *others, last = accepted
    message = f"{option} {given!r} is unknown; expected {', '.join(others)} or {last}"
    # 0.4: far enough for "float16" and "bfloat16", too near for "half".
    nearest = difflib.get_close_matches(str(given).lower(), (*others, last), n=1, cutoff=0.4)
    return f"{message}. Did you mean {nearest[0]}?" if nearest else message


def _choose(device: torch.device) -> Precision:
    """Choose the precision for "auto" on `device`, with the reason."""
    try:
        capabilities = device_capabilities(device)
    except PrecisionError as error:
        return Precision("fp32", torch.float32, device.type, f"auto: fp32, because {error}", warning=None)
    device_name = capabilities.device_name
    if torch.bfloat16 in capabilities.native:
        dtype, reason = torch.bfloat16, f"{device_name} computes bf16 natively"
    elif device.type != "cpu" and torch.float16 in capabilities.native:
        dtype, reason = torch.float16, f"{device_name} computes fp16 natively, but not bf16"
    elif device.type == "cpu":
        dtype, reason = torch.float32, f"{device_name} has no native bf16, and fp16 is only for GPUs"
    else:
        dtype, reason = torch.float32, f"{device_name} has neither native bf16 nor native fp16"
    name = _NAMES[dtype]
    warning = None if dtype is torch.float32 else _warning(dtype, device, capabilities)
    return Precision(name, dtype, device.type, f"auto: {name}, because {reason}", warning)


def _capabilities_or_raise(dtype: torch.dtype, device: torch.device) -> Capabilities:
    """Return the capabilities of `device`. Raises PrecisionError if it cannot run `dtype` at all."""
    try:
        capabilities = device_capabilities(device)
    except PrecisionError as error:
        raise PrecisionError(
            f"precision {_NAMES[dtype]} ({dtype}) cannot run on device {device}: {error}. Use fp32, or another device"
        ) from None
    if dtype not in capabilities.runs:
        others = [name for name, other in PRECISIONS.items() if other in capabilities.runs] + ["fp32"]
        raise PrecisionError(
            f"precision {_NAMES[dtype]} ({dtype}) cannot run on device {device}: {capabilities.device_name} "
            f"does not support it. Use {' or '.join(others)}"
        )
    return capabilities


def _warning(dtype: torch.dtype, device: torch.device, capabilities: Capabilities) -> str | None:
    """Return a warning for users who are about to train in `dtype` here; None if there is none."""
    name, device_name = _NAMES[dtype], capabilities.device_name
    if device.type == "mps" and dtype is torch.float16:
        bf16 = "bf16 or " if torch.bfloat16 in capabilities.runs else ""
        return (
            f"fp16 on {device_name}: on MPS, autocast and loss scaling support fewer operations than on CUDA. Use "
            f"--precision {bf16}fp32, or compare the first losses in fp16 with an fp32 run."
        )
    if dtype in capabilities.native:
        return None
    native = [_NAMES[other] for other in _BOTH & capabilities.native]
    instead = f"Use --precision {native[0]} (native here) or fp32" if native else "Use --precision fp32"
    if dtype is torch.float16 and device.type == "cpu":
        # Measured: 1.1 GFLOP/s in fp16 against 105 in fp32, and a training step 13 to 90 times slower.
        return (
            f"fp16 on {device_name} has no native arithmetic, so expect it to be ten to a hundred times slower than "
            f"fp32. {instead}; fp16 is for GPUs."
        )
    if device.type == "cpu":
        # Measured on a CPU with AVX2 alone: the image recipe took 11 times as long as in fp32.
        return (
            f"{name} on {device_name} is emulated, not native: it saves memory, but can be up to ten times slower "
            f"than fp32. {instead}, or --precision auto."
        )
    return (
        f"{name} on {device_name} is emulated, not native: it saves memory, but is no faster than fp32 and often "
        f"slower. {instead}."
    )


def _cpu_capabilities(device: torch.device) -> Capabilities:
    """By instruction set: AVX-512 or AMX on x86, the bf16 and fp16 arithmetic extensions on ARM."""
    look_up = getattr(torch.cpu, "get_capabilities", dict)  # absent from older torch: nothing is native then
    flags = look_up()
    native = set()
    if any(flags.get(flag) for flag in ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")):
        native.add(torch.bfloat16)
    if any(flags.get(flag) for flag in ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith")):
        native.add(torch.float16)
    model = flags.get("cpu_name") or platform.processor() or platform.machine()
    return Capabilities(f"this CPU ({model})", native=frozenset(native), runs=_BOTH)


def _cuda_capabilities(device: torch.device) -> Capabilities:
    """By compute capability: bf16 from 8.0 (Ampere), fp16 from 5.3; every GPU that ROCm supports has both."""
    _require_device(device, torch.cuda.is_available(), torch.cuda.device_count())
    name = f"{device} ({torch.cuda.get_device_name(device)})"
    if torch.version.hip:
        return Capabilities(name, native=_BOTH, runs=_BOTH)
    # torch.cuda.is_bf16_supported() is also true where bf16 is emulated; the capability is not.
    capability = torch.cuda.get_device_capability(device)
    native = {torch.bfloat16} if capability >= (8, 0) else set()
    if capability >= (5, 3):
        native.add(torch.float16)
    runs = _BOTH if torch.cuda.is_bf16_supported() else frozenset({torch.float16})
    return Capabilities(name, native=frozenset(native), runs=runs)


def _mps_capabilities(device: torch.device) -> Capabilities:
    """By macOS: Metal has bf16 from version 14; torch cannot tell an M1, which emulates it, from the rest."""
    _require_device(device, torch.backends.mps.is_available(), 1)
    dtypes = _BOTH if torch.backends.mps.is_macos_or_newer(14, 0) else frozenset({torch.float16})
    return Capabilities(f"this Mac's GPU (macOS {platform.mac_ver()[0]})", native=dtypes, runs=dtypes)


def _xpu_capabilities(device: torch.device) -> Capabilities:
    """By what the driver tells of the Intel GPU."""
    _require_device(device, torch.xpu.is_available(), torch.xpu.device_count())
    properties = torch.xpu.get_device_properties(device)
    native = set()
    if getattr(properties, "has_bfloat16_conversions", False):
        native.add(torch.bfloat16)
    if getattr(properties, "has_fp16", False):
        native.add(torch.float16)
    return Capabilities(f"{device} ({properties.name})", native=frozenset(native), runs=_BOTH)


def _require_device(device: torch.device, available: bool, count: int) -> None:
    """Raise PrecisionError unless this machine has `device`."""
    if not available:
        raise PrecisionError(f"torch finds no {device.type} device on this machine")
    if device.index is not None and device.index >= count:
        raise PrecisionError(f"torch finds {count} {device.type} device(s), so there is no {device}")


_LOOK_UPS: dict[str, Callable[[torch.device], Capabilities]] = {
    "cpu": _cpu_capabilities,
    "cuda": _cuda_capabilities,
    "mps": _mps_capabilities,
    "xpu": _xpu_capabilities,
}
