"""Calls every op under autocast on the device, and prints where torch does other than its documentation says."""

from __future__ import annotations

import torch
from _gpu_results import parse, result

from amp_recipes.errors import PrecisionError
from amp_recipes.numerics.ops.reference import Difference, op_reference


def main() -> None:
    """At both low precisions."""
    options = parse(__doc__)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        try:
            found = op_reference(options.device.type, dtype)
        except PrecisionError as error:  # no lists are documented for that kind of device
            result(name, "cannot be asked", None, str(error))
            continue
        unknown = [each for each in found.differences if each.explanation is None]
        told = f"{len(found.findings)} ops, {len(found.differences)} differences, {len(unknown)} of them not explained"
        result(f"{name}, {'run' if found.live else 'traced, not run'}", told)
        for each in found.differences:
            result(f"{name}, {each.name}", in_words(each), None, each.explanation or "NOT EXPLAINED")


def in_words(difference: Difference) -> str:
    """What it does, beside what is documented."""
    return f"{difference.found} ({difference.documented})"


if __name__ == "__main__":
    main()
