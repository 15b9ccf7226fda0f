"""Prints the results of a step of gpu.py: a line of JSON for each, which the program that started the step collects."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
PRECISIONS = ("fp32", "bf16", "fp16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def result(what: str, value: Any, holds: bool | None = None, note: str = "") -> None:
    """Print one result. holds: whether what must be so is so; None where nothing must."""
    print(json.dumps({"what": what, "value": str(value), "holds": holds, "note": note}), flush=True)


def parse(description: str, argv: Sequence[str] | None = None, **more: Any) -> argparse.Namespace:
    """The options that every step has, and `more`: name of an option -> what `add_argument` takes."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="(%(default)s)")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal on a CPU")
    for name, settings in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    options = parser.parse_args(argv)
    if options.small:
        torch.set_num_threads(1)
    return options


def use_recipe(name: str) -> None:
    """Let the files of a recipe be imported, as its own script imports them."""
    sys.path.insert(0, str(RECIPES / name))


def queues(device: torch.device) -> bool:
    """Whether the device works behind the host's back, so that the host can be made to wait for it."""
    return device.type != "cpu"


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if queues(device):
        torch.accelerator.synchronize(device)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor where a device that queues its work can fetch it by itself."""
    return tensor.pin_memory() if queues(device) else tensor
