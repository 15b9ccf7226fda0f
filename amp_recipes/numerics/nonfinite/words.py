"""Says in words where a nonfinite value first appeared, and what a person can do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from amp_recipes.errors import listed
from amp_recipes.numerics.nonfinite.values import Birth, TensorRange
from amp_recipes.numerics.nonfinite.walk import Origin
from amp_recipes.numerics.watch.observe import OUTSIDE

_MOST_NAMED = 8  # samples, modules

# Op, or op whose backward it was -> where it is not defined, and the cure in any precision.
_EDGES = {
    "sqrt rsqrt": "the root has no finite slope at 0, and no value below 0: add an eps inside the root",
    "norm linalg_vector_norm cdist _cdist": "a norm has no slope at 0: add an eps to its input",
    "log log2 log10 xlogy": "the log of 0 is -inf, and its slope is infinite: clamp the input, or add an eps",
    "div reciprocal": "the divisor is 0, or almost 0: add an eps to it",
    "acos asin atanh acosh": "its slope is infinite at the ends of its range: clamp the input to a smaller range",
    "pow": "a power may have no value, or no slope, at 0: clamp the base, or add an eps",
    "binary_cross_entropy": "it computes logs of probabilities: use binary_cross_entropy_with_logits",
}
_OVERFLOWS = {
    "exp exp2 expm1 sinh cosh": "the exp of a large number overflows: clamp the input, or subtract its maximum first"
}


def message_of(origin: Origin, cause: str, samples: Sequence, all_samples: bool, notes: Sequence[str]) -> str:
    """The whole message: what, where, of what, in which samples, why, and what to do."""
    parts = [_birth(origin), _way(origin), _samples(samples, all_samples), *notes, _why(origin, cause)]
    return " ".join(filter(None, parts))


def not_replayable(drawn: Sequence[str], several_optimizers: bool, device_type: str) -> str:
    """Explain why a replay may be finite although the step was not."""
    reasons = []
    if drawn:
        reasons.append(f"the step draws from {' and '.join(drawn)}, which a replay cannot restore")
    if several_optimizers:
        reasons.append("another optimizer may have stepped inside the window, which a replay does not do")
        reasons.append("an earlier batch may have left gradients that the recipe's own fit_batch does not clear")
    if device_type != "cpu":
        reasons.append(
            f"kernels of {device_type} may add numbers in another order each time (deterministic: true prevents this)"
        )
    if not reasons:
        reasons.append(
            "the step reads something else besides modules, batch and torch's generators, and this has changed"
        )
    why = "; or ".join(reasons)
    return (
        "The step was repeated and was finite, so the place where it became nonfinite was not found. Possible "
        f"reasons: {why}."
    )


def norm_overflows(name: str, widest: TensorRange, cause: str, precision: str) -> str:
    """Describe finite gradients whose norm is not finite."""
    found = (
        f"Every gradient is finite, but their norm is not: the largest value is {widest.largest:.4g}, in the "
        f"gradient of {name}, and its square is too large for float32. "
    )
    if cause == "precision":
        return f"{found}Cause: the precision ({precision}). In float32, the norm of the same step is finite."
    return (
        f"{found}Cause: the model (the norm is not finite in float32 either). The loss is far too large, or training "
        "has diverged. Normalise the loss, lower the learning rate, or go back to an earlier checkpoint."
    )


def _birth(origin: Origin) -> str:
    place = origin.place
    where = "the recipe's own code (no module)" if place.module == OUTSIDE else f"{place.module or 'the model itself'}"
    line = f" at {origin.line}" if origin.line is not None else ""
    if origin.external is not None:
        reader = f"; the first op that reads it is {origin.op} in {where}{line}" if origin.op else ""
        return f"{origin.external} contains {_kind(origin)} before the step begins{reader}."
    birth = origin.birth
    by = f"{origin.op}, {place.phase}, {origin.dtype}{_function(birth)}"
    if birth is not None and birth.told_to:
        return f"The code itself writes {_kind(origin)} in {where} ({by}){line}, and nothing removes it later."
    return f"{_kind(origin)} first appeared in {where} ({by}){line}{_given(birth)}."


def _function(birth: Birth | None) -> str:
    """In which function of autograd it was."""
    if birth is None or (birth.function is None and birth.node is None):
        return ""
    return f", {birth.node}" if birth.function is None else f", in the autograd.Function {birth.function}"


def _kind(origin: Origin) -> str:
    return "NaN" if origin.nan else "inf"


def _given(birth: Birth | None) -> str:
    """Describe the inputs of the op."""
    if birth is None:
        return ": its memory was never initialised, or was changed outside of torch's ops"
    if birth.masked_rows:
        return ": a whole row is masked (-inf), and softmax of such a row is NaN"
    return f": inputs {'; '.join(map(_range, birth.inputs))}" if birth.inputs else ""


def _range(given: TensorRange) -> str:
    held = "nothing" if given.min is None else f"{given.min:.4g} to {given.max:.4g}"
    bad = f" and {given.nonfinite} nonfinite" if given.nonfinite else ""
    return f"{held}{bad} ({given.dtype} {list(given.shape)})"


def _way(origin: Origin) -> str:
    through = [module or "the model itself" for module in origin.chain[1:]]
    if len(through) > _MOST_NAMED:
        through = [*through[:3], "...", *through[-3:]]
    way = f", through {' -> '.join(through)}" if through else ""
    target = f"It made the {origin.target} nonfinite{way}."
    if origin.was_dropped:
        target += (
            " The loss is finite, because the forward drops this value (a where, a mask). But the backward "
            "multiplies its infinite slope by 0, which gives NaN. Replace the value with a harmless number before "
            "the op, not after it."
        )
    return target


def _samples(samples: Sequence, all_samples: bool) -> str:
    if not samples:
        return ""
    if all_samples:
        return "It happens with every sample of the batch."
    pairs = isinstance(samples[0], list)
    named = listed((f"{sample[1]} of batch {sample[0]}" if pairs else sample for sample in samples), _MOST_NAMED)
    whole = "window" if pairs else "batch"
    return f"It comes from sample{'s' if len(samples) > 1 else ''} {named} (counted from 0) of the {whole}."


def _why(origin: Origin, cause: str) -> str:
    if cause == "scale":
        return (
            "Cause: the loss scale, and nothing else. At scale 1 the same step is finite, and the scale decreases by "
            "itself. A lower init_scale avoids the skipped updates."
        )
    if cause == "precision":
        return f"Cause: the precision. In float32, the same step is finite.{_overflow(origin)} {_pin(origin)}"
    if cause == "data":
        return "Cause: the data. Fix or remove these samples, and check the code that prepares them."
    if cause == "model" and origin.external is not None:
        return (
            "Cause: the model, which contains nonfinite numbers in any precision. Find what wrote them: an "
            "initialisation, a loaded checkpoint, or an update without a check."
        )
    if cause == "model":
        return f"Cause: the model. The same step is nonfinite in float32 too.{_cure(origin)}"
    return ""


def _overflow(origin: Origin) -> str:
    """Describe the limit of the dtype that was exceeded."""
    if origin.birth is None or not hasattr(torch, origin.dtype):
        return ""
    if _advice(origin, _EDGES) is not None:
        return f" {origin.dtype} rounds its input to a number at which the op has no value, or no slope."
    bound = torch.finfo(getattr(torch, origin.dtype)).max
    largest = _largest_input(origin.birth)
    if largest > bound:
        return f" Its input of up to {largest:.4g} is beyond the range of {origin.dtype} (at most {bound:.5g})."
    return "" if origin.nan else f" Its result is beyond the range of {origin.dtype} (at most {bound:.5g})."


def _pin(origin: Origin) -> str:
    module = origin.place.module
    if module == OUTSIDE or module.startswith("<"):
        return "Compute this part in float32: call .float() on its inputs, or use --precision bf16."
    if not module:
        return "Compute this part in float32 (make it a module and pin it), or use another precision."
    other = ", or use --precision bf16" if origin.dtype == "float16" else ""
    return f"Add to your YAML: fp32_modules: [{module}]{other}."


def _cure(origin: Origin) -> str:
    birth = origin.birth
    if origin.is_put_there:
        return " If it is a mask, do not use the masked values in the loss. Is a target at a masked position?"
    if birth is not None and birth.masked_rows:
        return " Leave at least one position of each row unmasked, or replace the result of such rows with 0."
    advice = _advice(origin, _EDGES) or _advice(origin, _OVERFLOWS)
    if advice is not None:
        return f" {advice[0].upper()}{advice[1:]}."
    return f"{_overflow(origin)} Check its inputs, lower the learning rate, or clip the gradients more."


def _advice(origin: Origin, advices: dict[str, str]) -> str | None:
    """Return the advice for the op whose backward it was, or else for the op itself."""
    forward = _forward_name(origin.birth)
    if not forward and _is_large_square(origin):
        return None  # not its edge, but a square of something large
    for name in (forward, origin.op.rpartition("::")[2].rstrip("_")):
        for names, advice in advices.items():
            if name in names.split():
                return advice
    return None


def _forward_name(birth: Birth | None) -> str:
    """`native_layer_norm` for the node NativeLayerNormBackward0; empty where none is known."""
    node = "" if birth is None or birth.node is None else birth.node
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"Backward\d*$", "", node)).lower()


def _is_large_square(origin: Origin) -> bool:
    if origin.nan or origin.birth is None or not origin.op.startswith("aten::pow"):
        return False
    return _largest_input(origin.birth) > 1.0


def _largest_input(birth: Birth) -> float:
    return max((given.largest or 0.0 for given in birth.inputs), default=0.0)
