"""Finds hazards in the inputs of kernels: constants, casts, long sums and exponentials in low precision."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amp_recipes.modules.nested import tensors_in
from amp_recipes.modules.torch_private import storage_id
from amp_recipes.numerics.hazards.calls import CallHazards
from amp_recipes.numerics.hazards.list import Found, Grade, library_line
from amp_recipes.numerics.hazards.modules import NAMES
from amp_recipes.numerics.ops.lists import FLOAT32, KERNEL_OF, LOWER_PRECISION, policy
from amp_recipes.numerics.watch.observe import Attribution, dtype_name
from amp_recipes.numerics.watch.op_kinds import OpKind, names, op_kind
from amp_recipes.precision.torch_private import Op, schema_of, without_torch_function

_LARGEST = torch.finfo(torch.float16).max  # 65504
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max
_SMALLEST = 2.0**-24  # of fp16; half of it and less rounds to 0
# What `torch.finfo(x.dtype)` says of bf16: it follows the precision, and says something else in fp16.
_FOLLOWS_DTYPE = {_LARGEST_BF16, _LARGEST_BF16 / 2, torch.finfo(torch.bfloat16).tiny}
# What is between these and 1 rounds to 1: half of the last digit below 1.
_ROUNDS_TO_ONE = {"bf16": 1 - 2.0**-9, "fp16": 1 - 2.0**-12, "fp32": 1 - 2.0**-25}
# Whole numbers are exact up to here: 2 to the digits of the significand.
_COUNTABLE = {"bf16": 256, "fp16": 2048}

# Constants here cannot hurt: they divide, bound from the far side, are compared, or describe a distribution.
_HARMLESS = names(
    """
    div divide true_divide floor_divide fmod remainder pow maximum minimum fmax fmin uniform normal random arange
    linspace bernoulli exponential lt le gt ge eq ne isclose
    """
)
# These let a constant that is too large become infinite; all others refuse it.
_SILENT = names("add sub rsub mul where index_put scalar_tensor addcmul addcdiv lerp nan_to_num _to_copy copy")
# Ops in which a tiny constant is a guard: it is added, is a bound, or replaces another value.
_GUARDS = names(
    "add sub rsub clamp clamp_min maximum fmax where masked_fill fill full full_like new_full index_put scalar_tensor"
)
_BOUNDS_ABOVE = names("clamp clamp_max minimum fmin")
# Ops whose 0-d tensors are looked at: they come from Python numbers, or stand for one.
_TAKES_CONSTANTS = names(
    "add sub rsub mul where masked_fill fill index_put clamp clamp_min clamp_max maximum minimum fmax fmin"
)
_SUMS = names("sum nansum cumsum")
# What the user wrote where these run.
_WRITTEN_AS = {"_to_copy": "a cast", "copy": "a copy", "scalar_tensor": "where", "constant_pad_nd": "pad"}
_WRITTEN_AS["index_put"] = "an assignment"
# The base of the exponential, and what is left of it: sinh and cosh are half an exponential, of |x|.
_EXPONENTIALS = {"exp": (math.e, 1.0), "expm1": (math.e, 1.0), "exp2": (2.0, 1.0), "sinh": (math.e, 2.0)}
_EXPONENTIALS["cosh"] = _EXPONENTIALS["sinh"]
# They pick or repeat values, so that the precision they run in changes none.
_PICKS = "upsample_nearest"


class OpHazards:
    """Looks at the ops of the forward, below autocast; `calls` has to be entered with it.

    On a CPU it follows which tensors CUDA's autocast would leave in fp32 (what comes out of a softmax, and what is
    computed from that): a hazard in these is a note. Values are read from the device for the few ops concerned.
    """

    def __init__(self, modules: nn.Module, found: Found, device_type: str) -> None:
        self.at = Attribution(modules)
        self.calls = CallHazards(found, device_type, self.at, self._is_wide)
        self._found = found
        self._is_cpu = device_type == "cpu"
        self._wide_on_cuda: set[int] = set()  # storages of low-precision tensors

    def about_to_see(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.at.here.phase != "forward":
            return
        kind = op_kind(op)
        with without_torch_function():  # what is asked here is no call of the user's
            if kind.is_cast:
                self._cast(kind, args, kwargs)
            elif kind.doing != "view":
                self._constants(kind, args, kwargs)
                if kind.base in _EXPONENTIALS or (kind.base == "pow" and not isinstance(args[0], torch.Tensor)):
                    self._exponential(kind, args)

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.at.here.phase != "forward":
            return
        kind = op_kind(op)
        with without_torch_function():
            if kind.base in _SUMS or kind.base == "mean":
                self._sum(kind, args, output)
            elif kind.base == "_log_softmax" and self.calls.calling == "cross_entropy":
                self._cross_entropy(output.dtype)
            if self._is_cpu and kind.doing != "view":
                self._follow(kind, args, kwargs, output)

    def _constants(self, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kind.base in _HARMLESS and kind.base not in _BOUNDS_ABOVE | _GUARDS:
            return
        constants = [(name, value) for name, value in _constants_in(kind, args, kwargs) if _is_remarkable(value)]
        if constants and _computed_in(kind, args, kwargs) in NAMES:
            given = list(tensors_in(args))
            note = self._only_on_cpu([tensor for tensor in given if tensor.dtype in NAMES and tensor.ndim] or given)
            for name, value in constants:
                self._constant(kind, name, value, note)

    def _constant(self, kind: OpKind, name: str, value: float, note: str) -> None:
        if abs(value) > _LARGEST and kind.base not in _HARMLESS:
            self._too_large(kind, name, value, note)
        elif 0 < abs(value) < _SMALLEST and kind.base in _GUARDS and name != "alpha":
            self._too_small(value, note)
        elif kind.base in _BOUNDS_ABOVE and _ROUNDS_TO_ONE["bf16"] <= value < _ROUNDS_TO_ONE["fp32"]:
            self._rounds_to_one(value, note)

    def _too_small(self, value: float, note: str) -> None:
        becomes, so = f"{_SMALLEST:.3g}", ""
        if abs(value) <= _SMALLEST / 2:
            becomes, so = "0", " and protects against nothing"
        message = (
            f"{value:g} is below the smallest number of fp16 ({_SMALLEST:.3g}): there it becomes {becomes}{so}. "
            "Compute this in fp32, or use a larger number."
        )
        self._add("eps", message, "risk", "fp16", value, note)

    def _rounds_to_one(self, value: float, note: str) -> None:
        in_both = value >= _ROUNDS_TO_ONE["fp16"]
        where = "fp16 and bf16" if in_both else "bf16"
        message = f"{value:.10g} rounds to 1 in {where}, so it is no bound: compute this in fp32."
        self._add("eps", message, "risk", "" if in_both else "bf16", value, note)

    def _too_large(self, kind: OpKind, name: str, value: float, note: str) -> None:
        both = abs(value) > _LARGEST_BF16
        refused = (kind.base not in _SILENT or name == "alpha") and str(kind.op) != "aten.fill_.Tensor"
        happens = "torch raises an error" if refused else "it becomes infinite"
        where = "fp16 and bf16" if both else f"fp16 ({_LARGEST:g})"
        message = (
            f"{value:g} in {_WRITTEN_AS.get(kind.base, kind.base)} is beyond the range of {where}: {happens}. For a "
            "mask, use torch.finfo(x.dtype).min, or -inf if no row is masked completely. Compute anything else in "
            "fp32."
        )
        self._add("mask_value", message, "wrong", "" if both else "fp16", value, note)

    def _cast(self, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Constants and inputs that are cast to low precision: what needs no gradient, and is no parameter."""
        source = args[kind.source]
        target = args[0].dtype if kind.base == "copy" else kwargs.get("dtype")
        if target not in NAMES or not _is_wide_input(source) or (bounds := _bounds(source)) is None:
            return
        smallest, largest = bounds
        furthest = max(-smallest, largest)
        if not source.is_floating_point():
            self._whole_numbers(furthest)
        elif furthest in _FOLLOWS_DTYPE:
            return
        elif largest <= 1 and _LARGEST < -smallest < math.inf:
            self._too_large(kind, "", smallest, "")
        elif _LARGEST < furthest < math.inf:
            message = (
                f"values of up to {furthest:.4g} that need no gradient (an input?) are cast to {NAMES[target]} here, "
                f"but the largest number of fp16 is {_LARGEST:g}: scale them down first."
            )
            self._add("value_range", message, "wrong", "fp16")

    def _whole_numbers(self, largest: float) -> None:
        if largest > _COUNTABLE["bf16"]:
            message = (
                f"integers of up to {largest:.6g} are cast to low precision here, but bf16 is exact only up to "
                f"{_COUNTABLE['bf16']}, and fp16 up to {_COUNTABLE['fp16']}. Keep positions and counts in fp32."
            )
            self._add("whole_numbers", message, "risk", "" if largest > _COUNTABLE["fp16"] else "bf16")

    def _exponential(self, kind: OpKind, args: tuple[Any, ...]) -> None:
        base, share = _EXPONENTIALS.get(kind.base) or (_base_of_power(args[0]), 1.0)
        exponent = args[1] if kind.base == "pow" else args[0]
        bounds = _bounds_of_exponent(exponent) if base is not None else None
        if bounds is None:
            return
        largest = max(-bounds[0], bounds[1]) if share != 1.0 else bounds[1]
        most_by_name = {"fp16": _LARGEST, "bf16": _LARGEST_BF16}
        ends = {name: math.log(most * share) / math.log(base) for name, most in most_by_name.items()}
        if not ends["fp16"] < largest < math.inf:
            return
        if largest > ends["bf16"]:
            message = _infinite(kind.base, largest, "in every precision", ends["bf16"])
            self._add("exp_of_large", f"{message}.", "wrong")
        elif exponent.dtype in NAMES:
            message = _infinite(kind.base, largest, "in fp16", ends["fp16"])
            note = " CUDA runs it in fp32, but its result overflows when it is cast to fp16." if self._is_cpu else ""
            self._add("exp_of_large", f"{message}, or compute it in fp32.{note}", "wrong", "fp16")

    def _sum(self, kind: OpKind, args: tuple[Any, ...], output: Any) -> None:
        given = args[0]
        if not isinstance(given, torch.Tensor) or given.dtype not in NAMES or output.dtype not in NAMES:
            return
        if kind.base == "cumsum":
            elements = given.shape[args[1]] if given.ndim else 1
        else:
            elements = given.numel() // max(1, output.numel())
        if kind.base == "mean":
            self._mean(elements, self._only_on_cpu([given]))
        elif elements > _COUNTABLE["bf16"]:
            bounds = _bounds(output) or (0.0, 0.0)
            self._long_sum(kind.base, elements, max(-bounds[0], bounds[1]))

    def _long_sum(self, name: str, elements: int, largest: float) -> None:
        # CUDA's autocast runs sum and cumsum in fp32, unless they say dtype=, which is a hazard of its own.
        note = f" (Not on CUDA, whose autocast runs {name} in fp32.)" if self._is_cpu else ""
        if _LARGEST < largest < math.inf:
            message = f"reaches {largest:.4g}, beyond the range of fp16 ({_LARGEST:g}): give it dtype=torch.float32."
            grade, precision = "wrong", "fp16"
        else:
            message = (
                f"in low precision: bf16 is exact only up to {_COUNTABLE['bf16']}, fp16 up to {_COUNTABLE['fp16']}, "
                f"and the largest number of fp16 is {_LARGEST:g}. Give it dtype=torch.float32."
            )
            grade, precision = "risk", "" if elements > _COUNTABLE["fp16"] else "bf16"
        self._add("long_reduction", f"{name} over {elements} elements {message}", grade, precision, name, note)

    def _mean(self, elements: int, note: str) -> None:
        if elements > _LARGEST:
            message = (
                f"mean over {elements} elements in low precision: the gradient of each element is 1/{elements} of "
                f"the mean's gradient. This is below the normal numbers of fp16 ({2.0**-14:.3g}) unless the loss "
                "scale is large. Compute the mean in fp32."
            )
            self._add("long_reduction", message, "note", "fp16", "mean", note)

    def _cross_entropy(self, dtype: torch.dtype) -> None:
        # It asks its log_softmax for the dtype of the logits, which autocast does not overrule; a CPU's casts them.
        if dtype in NAMES:
            name = NAMES[dtype]
            message = (
                f"cross_entropy of {name} logits: its log_softmax runs in {name} on this device, which rounds the "
                "loss of each token or sample. Call .float() on the logits."
            )
            self._add("not_autocast", message, "risk", what="cross_entropy")

    def _follow(self, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Remark what CUDA would run in fp32, and remember which tensors would be fp32 there."""
        low = _low(args, kwargs)
        there = _on_cuda(kind.name) if self.calls.is_under_autocast and not self.calls.escapes else None
        # An op in place keeps its dtype there as well, and what it writes into is known already.
        outputs = [] if kind.writes_into else _low(output)
        is_wide = there == FLOAT32 or self._flows_wide(kind, low, outputs)
        stays_wide = is_wide and there != LOWER_PRECISION and not kind.is_product
        for tensor in outputs:
            self._mark(tensor, stays_wide)
        if there == FLOAT32 and low and outputs and not kind.base.startswith(_PICKS):
            self._runs_wide_on_cuda(KERNEL_OF.get(kind.base, kind.base), low[0].dtype)

    def _runs_wide_on_cuda(self, name: str, dtype: torch.dtype) -> None:
        message = (
            f"{name} runs in {dtype_name(dtype)} here, but CUDA's autocast runs it in fp32: the findings here do not "
            "apply there."
        )
        module = self.at.here.module
        self._found.add("cpu_is_not_cuda", message, self.at.line, "note", "", module, name, is_about_line=False)

    def _flows_wide(self, kind: OpKind, low: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        if kind.is_cast and low and outputs and outputs[0].dtype != low[0].dtype:
            return False
        least = min(1, max((output.ndim for output in outputs), default=0))  # a 0-d tensor does not widen others
        return any(self._is_wide(tensor) for tensor in low if tensor.ndim >= least)

    def _is_wide(self, tensor: torch.Tensor) -> bool:
        """Whether CUDA's autocast would have kept `tensor`, of low precision here, in fp32."""
        return (storage := _storage(tensor)) is not None and storage in self._wide_on_cuda

    def _mark(self, tensor: torch.Tensor, is_wide: bool) -> None:
        storage = _storage(tensor)
        if storage is not None and is_wide:
            self._wide_on_cuda.add(storage)
        elif storage is not None:
            self._wide_on_cuda.discard(storage)  # the memory may have been another's

    def _only_on_cpu(self, low: list[torch.Tensor]) -> str:
        """Return a note if CUDA computes this in fp32, else an empty text."""
        if not self._is_cpu:
            return ""
        name = self.calls.calling
        if self.calls.is_under_autocast and _on_cuda(name) == FLOAT32:
            return f" (Not on CUDA, whose autocast runs {name} in fp32.)"
        if any(map(self._is_wide, low)):
            return " (Not on CUDA, whose autocast has made this fp32.)"
        return ""

    def _add(self, kind: str, message: str, grade: Grade, precision: str = "", what: Any = "", note: str = "") -> None:
        grade = "note" if note and grade == "risk" else grade
        module = self.at.here.module
        self._found.add(kind, message + note, self.at.line, grade, precision, module, what, inside=library_line())


_PROMOTE = ("add", "sub", "rsub", "mul", "where", "maximum", "minimum", "lerp")  # to the widest that they are given


@functools.cache
def _on_cuda(name: str) -> str | None:
    return policy("cuda", name)


def _storage(tensor: torch.Tensor) -> int | None:
    """Names the memory of a plain tensor."""
    return storage_id(tensor) if _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory, one by one; what subclasses do when asked is not known."""
    is_known = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return is_known and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)


def _bounds(tensor: torch.Tensor) -> tuple[float, float] | None:
    """The smallest and the largest value; None where there is none to read."""
    if not _is_plain(tensor) or not tensor.numel() or tensor.is_quantized:
        return None
    if tensor.dtype not in (*NAMES, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64):
        return None
    return tuple(map(float, torch.aminmax(tensor.detach())))


def _low(*values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(*values) if tensor.dtype in NAMES]


def _is_wide_input(source: Any) -> bool:
    """Whether it is a tensor of more than low precision that neither is trained nor comes from what is."""
    if not isinstance(source, torch.Tensor) or source.dtype in NAMES:
        return False
    return not (source.requires_grad or isinstance(source, nn.Parameter))


def _bounds_of_exponent(exponent: Any) -> tuple[float, float] | None:
    is_float = isinstance(exponent, torch.Tensor) and exponent.is_floating_point()
    return _bounds(exponent) if is_float and exponent.dtype is not torch.float64 else None


def _is_remarkable(value: float) -> bool:
    size = abs(value)
    return _LARGEST < size < math.inf or 0 < size < _SMALLEST or _ROUNDS_TO_ONE["bf16"] <= value < 1


def _constants_in(kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers that the op computes with, by the name of their argument; sizes and dimensions are none."""
    arguments = schema_of(kind.op).arguments
    by_name = ((argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs)
    for argument, value in (*zip(arguments, args, strict=False), *by_name):
        yield from _constant(kind, argument, value)


def _constant(kind: OpKind, schema: Any, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "int" not in str(schema.type).lower() and abs(value) not in _FOLLOWS_DTYPE:
            yield schema.name, float(value)
    elif kind.base in _TAKES_CONSTANTS and _is_one_number(value):
        number = float(value)
        if abs(number) not in _FOLLOWS_DTYPE:
            # A constant that low precision rounded from -1e9 is reported as -1e9.
            yield schema.name, float(f"{number:.2g}") if value.dtype in NAMES else number


def _is_one_number(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.ndim:
        return False
    return value.is_floating_point() and not value.requires_grad and _is_plain(value)


def _computed_in(kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of what comes out, before the op runs."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    tensors = [tensor for tensor in tensors_in(args) if tensor.is_floating_point()]
    if not tensors:
        return None
    if kind.writes_into or kind.base not in _PROMOTE:
        return tensors[0].dtype
    leading = [tensor for tensor in tensors if tensor.ndim] or tensors
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in leading))


def _infinite(name: str, largest: float, where: str, end: float) -> str:
    said = f"{name} of up to {largest:.4g} is infinite {where} (above {end:.4g}): "
    return said + "subtract the maximum first, as logsumexp does"


def _base_of_power(base: Any) -> float | None:
    return float(base) if isinstance(base, (int, float)) and base > 1 else None
