"""Recognises common faults by the op that made a nonfinite value, its arguments, and what these were made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from amp_recipes.precision.torch_private import Op, schema_of

FaultKind = Literal[
    "alignment",
    "ignored labels",
    "labels without weight",
    "nothing",
    "one value",
    "zero divisor",
    "masked row",
    "zero probability",
    "equal points",
    "padding",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that the arguments of an op show.

    details: what they show, in words; samples: those that do it, if the arguments tell; source: the tensor that is to
    blame (a divisor, what a log was taken of), of which the trace knows who wrote it; batch: the parts of the batch
    from which alone that was made.
    """

    kind: FaultKind
    details: tuple[str, ...] = ()
    samples: tuple[int, ...] | None = None
    source: Tensor | int | None = None
    batch: tuple[str, ...] = ()

    def known_as(self, source: int | None) -> Fault:
        """The same with the number of the event that wrote the source, which may then be freed."""
        return replace(self, source=source)


class Call(NamedTuple):
    """A call of an op."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """The arguments by name; those that were left out have their defaults."""
        declared = schema_of(self.op).arguments
        given = {argument.name: value for argument, value in zip(declared, self.args, strict=False)}
        left_out = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
        return left_out | given | self.kwargs


def fault_of(name: str, arguments: Mapping[str, Any], makes_nan: bool) -> Fault | None:
    """The fault that the arguments of a forward op show, if they do.

    name: of the op, without its namespace; makes_nan: whether NaN is what it made.
    """
    if "ctc_loss" in name:
        return _alignment(arguments)
    if makes_nan and _reads_nothing(arguments):
        return Fault("nothing")
    find = _BY_OP.get(name.rstrip("_"))
    return None if find is None else find(arguments)


def _alignment(arguments: Mapping[str, Any]) -> Fault | None:
    """CTC needs a frame for each label, and one more for the blank between two labels that are equal."""
    frames, lengths = _numbers(arguments["input_lengths"]), _numbers(arguments["target_lengths"])
    impossible: dict[int, str] = {}
    for sample, (labels, count) in enumerate(zip(_targets(arguments["targets"], lengths), frames, strict=True)):
        repeats = sum(first == second for first, second in pairwise(labels))
        needed = len(labels) + repeats
        if needed > count:
            blanks = f", of which {repeats} equal the one before and need a blank between them," if repeats else ""
            impossible[sample] = (
                f"sample {sample} has {count} frames, and its {len(labels)} labels{blanks} need {needed}"
            )
    return Fault("alignment", tuple(impossible.values()), tuple(impossible)) if impossible else None


def _targets(targets: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """The labels of each sample: of a padded tensor, or of all in a row."""
    if targets.ndim > 1:
        return [row[:length] for row, length in zip(targets.tolist(), lengths, strict=True)]
    return [part.tolist() for part in targets.split(list(lengths))]


def _numbers(lengths: Any) -> list[int]:
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)


def _reads_nothing(arguments: Mapping[str, Any]) -> bool:
    first = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    return first is not None and first.is_floating_point() and not first.numel()


def _labels(arguments: Mapping[str, Any]) -> Fault | None:
    target, weight = arguments["target"], arguments["weight"]
    counted = target[target != arguments["ignore_index"]]
    if not counted.numel():
        return Fault("ignored labels", (str(arguments["ignore_index"]),))
    if weight is not None and not weight[counted].any():
        return Fault("labels without weight", (", ".join(map(str, counted.unique().tolist()[:8])),))
    return None


def _spread(arguments: Mapping[str, Any]) -> Fault | None:
    """Variance and standard deviation divide by the number of values less the correction."""
    tensor, dimensions = arguments["self"], arguments.get("dim")
    sizes = [tensor.shape[dimension] for dimension in dimensions or range(tensor.ndim)]
    correction = arguments.get("correction", arguments.get("unbiased", True))
    return Fault("one value") if math.prod(sizes) <= (1 if correction is None else correction) else None


def _divisor(arguments: Mapping[str, Any]) -> Fault | None:
    divisor = arguments["other"] if "other" in arguments else arguments["self"]
    if isinstance(divisor, Tensor):
        return Fault("zero divisor", source=divisor) if bool((divisor == 0).any()) else None
    return Fault("zero divisor") if divisor == 0 else None


def _log(arguments: Mapping[str, Any]) -> Fault | None:
    return Fault("zero probability", source=arguments["self"]) if bool((arguments["self"] == 0).any()) else None


_BY_OP: dict[str, Callable[[Mapping[str, Any]], Fault | None]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _labels),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _spread),
    **dict.fromkeys(("div", "reciprocal"), _divisor),
    **dict.fromkeys(("log", "log2", "log10"), _log),
}


def padded_rows(arguments: Mapping[str, Any]) -> bool:
    """Whether an embedding was asked for its row of padding, and this is 0."""
    row = arguments["padding_idx"]
    if row < 0 or not bool((arguments["indices"] == row).any()):
        return False
    return not bool(torch.count_nonzero(arguments["weight"][row]))
