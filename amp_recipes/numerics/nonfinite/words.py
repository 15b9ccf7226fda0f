"""Says in words where a nonfinite value first appeared, and what a person can do about it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from amp_recipes.data import SampleName
from amp_recipes.errors import listed
from amp_recipes.numerics.nonfinite.faults import Fault, FaultKind
from amp_recipes.numerics.nonfinite.history import History
from amp_recipes.numerics.nonfinite.values import Birth, TensorRange, plain_tensors, range_of
from amp_recipes.numerics.nonfinite.walk import Origin
from amp_recipes.numerics.watch.observe import OUTSIDE, is_registered

_MOST_NAMED = 8  # samples, modules

# Op, or op whose backward it was -> where it is not defined, and the cure in any precision.
_EDGES = {
    "sqrt rsqrt": "the root has no finite slope at 0, and no value below 0: add an eps inside the root",
    "log log2 log10 xlogy": "the log of 0 is -inf, and its slope is infinite: clamp the input, or add an eps",
    "div reciprocal": "the divisor is 0, or almost 0: add an eps to it",
    "acos asin atanh acosh": (
        "it has no value outside of its range, and no finite slope at the ends: clamp the input to a smaller range"
    ),
    "_weight_norm_interface": "a row of the weight is 0, and is divided by its norm: keep the weight from becoming 0",
    "pow": "a power may have no value, or no slope, at 0: clamp the base, or add an eps",
}
_OVERFLOWS = {
    "exp exp2 expm1 sinh cosh": "the exp of a large number overflows: clamp the input, or subtract its maximum first"
}

# What is wrong with the batch, and what to do about it: {details}, and {batch}, the parts of the batch.
_FAULTS: dict[FaultKind, str] = {
    "alignment": (
        "Cause: the lengths of these samples, for which CTC has no alignment: {details}. Check how the lengths are "
        "computed. Then leave such samples out, or use zero_infinity=True."
    ),
    "ignored labels": (
        "Cause: the labels of the batch. All of them are ignore_index ({details}), and a mean over no label is 0/0. "
        "Skip such batches, or use reduction='sum' and divide by the number of labels, at least 1."
    ),
    "labels without weight": (
        "Cause: the labels of the batch. All of them are of classes whose weight is 0 (class {details}), so the mean "
        "divides by 0. Give these classes a weight, or skip such batches."
    ),
    "nothing": (
        "Cause: a mean over nothing. The tensor has no elements, because nothing was selected in this batch. Compute "
        "this part of the loss only where something is selected."
    ),
    "one value": (
        "Cause: the spread of one value. A variance, or a standard deviation, divides by the number of values less 1, "
        "which is 0. Use correction=0, give it more values, or leave such samples out (drop_last: a last small batch)."
    ),
    "zero divisor": (
        "Cause: a divisor of 0, which was made from {batch} alone. A length, a count or a sum is 0, or a mask is "
        "empty. Leave such samples out, or divide by at least 1 (clamp(min=1)) or by an eps."
    ),
    "masked row": (
        "Cause: the mask, which was made from {batch} alone and hides a whole row. Leave such samples out, or leave at "
        "least one position of each row unmasked."
    ),
}
# What is wrong with the model's own computation.
_COMPUTATIONS: dict[FaultKind, str] = {
    "masked row": "Leave at least one position of each row unmasked, or replace the result of such rows with 0.",
    "zero probability": (
        "A probability is 0, and its log is -inf. Compute the log without the probability: log_softmax in place of "
        "softmax, logsigmoid in place of sigmoid, or a loss that takes logits."
    ),
    "equal points": (
        "Two points are equal, and the root has no slope at their distance of 0. Add an eps inside the root, or leave "
        "out pairs of equal points."
    ),
    "padding": (
        "The divisor was made from the row of padding (padding_idx) of an embedding, which is 0. Leave padded "
        "positions out before the division, or add an eps to the divisor."
    ),
}


def message_of(
    origin: Origin,
    cause: str,
    samples: Sequence,
    names: Sequence[SampleName],
    all_samples: bool,
    notes: Sequence[str],
    history: History,
) -> str:
    """The whole message: what, where, of what, in which samples, why, and what to do."""
    parts = [_birth(origin), _way(origin), _samples(samples, names, all_samples), *notes, _why(origin, cause, history)]
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


def norm_overflows(name: str, widest: TensorRange, cause: str, precision: str, history: History) -> str:
    """Describe finite gradients whose norm is not finite."""
    found = (
        f"Every gradient is finite, but their norm is not: the largest value is {widest.largest:.4g}, in the "
        f"gradient of {name}, and its square is too large for float32. "
    )
    if cause == "precision":
        return f"{found}Cause: the precision ({precision}). In float32, the norm of the same step is finite."
    advice = "The loss is far too large: normalise it. If it grew before, lower the learning rate."
    if history.grown is not None:
        advice = _divergence(history).lstrip() or "The loss did not grow before, but it is far too large: normalise it."
    return f"{found}Cause: the model (the norm is not finite in float32 either). {advice}"


def _birth(origin: Origin) -> str:
    place = origin.place
    where = "the recipe's own code (no module)" if place.module == OUTSIDE else f"{place.module or 'the model itself'}"
    line = f" at {origin.line}" if origin.line is not None else ""
    if origin.external is not None:
        reader = f"; the first op that reads it is {origin.op} in {where}{line}" if origin.op else ""
        return f"{origin.external} contains {_kind(origin)}{_count(origin)} before the step begins{reader}."
    birth = origin.birth
    by = f"{origin.op}, {place.phase}, {origin.dtype}{_function(birth)}"
    if birth is not None and birth.told_to:
        return f"The code itself writes {_kind(origin)} in {where} ({by}){line}, and nothing removes it later."
    return f"{_kind(origin)} first appeared in {where} ({by}){line}{_given(birth)}."


def _count(origin: Origin) -> str:
    """How many values of a weight or a buffer are not finite, of how many."""
    tensor = origin.external.tensor if origin.external is not None and origin.external.kind != "batch" else None
    if tensor is None:
        return ""
    ranges = [range_of(plain.detach()) for plain in plain_tensors(tensor)]
    values = sum(math.prod(found.shape) for found in ranges)
    return f" ({sum(found.nonfinite for found in ranges)} of its {values} values are not finite)"


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
            "multiplies its slope, which is not finite, by 0, which gives NaN. Replace the value with a harmless "
            "number before the op, not after it."
        )
    return target


def _samples(samples: Sequence, names: Sequence[SampleName], all_samples: bool) -> str:
    if not samples:
        return ""
    if all_samples:
        return "It happens with every sample of the batch."
    pairs = isinstance(samples[0], list)
    named = listed((f"{sample[1]} of batch {sample[0]}" if pairs else sample for sample in samples), _MOST_NAMED)
    whole = "window" if pairs else "batch"
    plural = "s" if len(samples) > 1 else ""
    return f"It comes from sample{plural} {named} (counted from 0) of the {whole}{_named(names)}."


def _named(names: Sequence[SampleName]) -> str:
    """The samples as the dataset knows them: `: dataset index 12 (clips/a.wav)`."""
    if not names:
        return ""
    if any(name.index is None for name in names):
        known = [name.file for name in names if name.file is not None]
        return f": {listed(known, _MOST_NAMED)}" if known else ""
    known = [str(name.index) if name.file is None else f"{name.index} ({name.file})" for name in names]
    order = "" if all(name.is_certain for name in names) else ", if the collate_fn keeps the order of the samples"
    return f": dataset {'indices' if len(names) > 1 else 'index'} {listed(known, _MOST_NAMED)}{order}"


def _why(origin: Origin, cause: str, history: History) -> str:
    if cause == "scale":
        return (
            "Cause: the loss scale, and nothing else. At scale 1 the same step is finite, and the scale decreases by "
            "itself. A lower init_scale avoids the skipped updates."
        )
    if cause == "precision":
        diverges = _divergence(history)
        pin = f"{diverges} If that does not help: {_pin(origin)}" if diverges else f" {_pin(origin)}"
        return f"Cause: the precision. In float32, the same step is finite.{_overflow(origin)}{pin}"
    if cause == "data":
        return "Cause: the data. Fix or remove these samples, and check the code that prepares them."
    if cause == "model" and origin.external is not None:
        return f"Cause: the model, which contains nonfinite numbers in any precision. {_since(history)}"
    if cause == "model" and _is_of_batch(origin.fault):
        return _FAULTS[origin.fault.kind].format(
            details="; ".join(origin.fault.details[:_MOST_NAMED]), batch=" and ".join(origin.fault.batch)
        )
    if cause == "model":
        return f"Cause: the model. The same step is nonfinite in float32 too.{_cure(origin, history)}"
    return ""


def _divergence(history: History) -> str:
    if not history.has_diverged:
        return ""
    before, last = history.grown
    return (
        f" The loss grew from {before:.4g} to {last:.4g}: training diverges. Lower the learning rate, or clip "
        "the gradients more."
    )


def _is_of_batch(fault: Fault | None) -> bool:
    """Whether it is a fault of the batch: a mask that the model makes is not."""
    return fault is not None and fault.kind in _FAULTS and (bool(fault.batch) or fault.kind not in _COMPUTATIONS)


def _since(history: History) -> str:
    """Tell since when a weight has been so, and what to do."""
    if history.updates is None:
        return "Find what wrote them: an initialisation, a loaded checkpoint, or an update without a check."
    if history.updates == 0:
        return (
            "They were there before the first update of this fit. Check the initialisation, and the checkpoint or the "
            "pretrained weights that were loaded."
        )
    return (
        f"The {history.updates} update(s) before in this fit were finite. So they did not read these values, or the "
        "last update or the recipe's code wrote them since. Check what was loaded, the eps of the optimizer, and what "
        f"changes weights outside of the optimizers.{_divergence(history)}"
    )


def _overflow(origin: Origin) -> str:
    """Describe the limit of the dtype that was exceeded."""
    if origin.birth is None or not hasattr(torch, origin.dtype):
        return ""
    if origin.pin and origin.pin != origin.place.module:  # what it read was spoiled before
        return ""
    if _advice(origin, _EDGES) is not None and not _has_small_divisor(origin):
        return f" {origin.dtype} rounds its input to a number at which the op has no value, or no slope."
    bound = torch.finfo(getattr(torch, origin.dtype)).max
    largest = _largest_input(origin.birth)
    if largest > bound:
        return f" Its input of up to {largest:.4g} is beyond the range of {origin.dtype} (at most {bound:.5g})."
    return "" if origin.nan else f" Its result is beyond the range of {origin.dtype} (at most {bound:.5g})."


def _has_small_divisor(origin: Origin) -> bool:
    """Whether it is an infinity by a divisor that is not 0: the quotient is too large."""
    if origin.nan or "div" not in (origin.op.rpartition("::")[2].rstrip("_"), _forward_name(origin.birth)):
        return False
    return not any(0.0 in (given.min, given.max) for given in origin.birth.inputs)


def _pin(origin: Origin) -> str:
    module = origin.place.module
    if not is_registered(module):
        return "Compute this part in float32: call .float() on its inputs, or use --precision bf16."
    if not module:
        return "Compute this part in float32 (make it a module and pin it), or use another precision."
    if origin.pin == "":
        return f"A pin of {module} alone does not cure it: use another precision, or find the pins with --diagnose."
    other = ", or use --precision bf16" if origin.dtype == "float16" else ""
    return f"Add to your YAML: fp32_modules: [{origin.pin or module}]{other}."


def _cure(origin: Origin, history: History) -> str:
    if origin.is_put_there:
        return (
            " If it is a mask, do not use the masked values in the loss. Is a target at a masked position, or does "
            "label_smoothing give masked classes a share?"
        )
    if origin.birth is None:
        return " Fill it when it is made (torch.zeros, not torch.empty), and look for code that writes into it."
    if origin.fault is not None:
        return f" {_COMPUTATIONS[origin.fault.kind]}"
    advice = _advice(origin, _EDGES) or _advice(origin, _OVERFLOWS)
    if advice is not None:
        return f" {advice[0].upper()}{advice[1:]}."
    return f"{_overflow(origin)} {_course(history)}"


def _course(history: History) -> str:
    """Advise as the losses before the step suggest."""
    if history.grown is None:
        return "Check its inputs. If the loss grew before, lower the learning rate, or clip the gradients more."
    before, last = history.grown
    if history.has_diverged:
        return _divergence(history).lstrip()
    return (
        f"The loss did not grow before (median {before:.4g}, last {last:.4g}), so training does not diverge. Look at "
        "what this op is given in this batch."
    )


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
