"""Prints what the machine of gpu.py is, and which torch it has."""

from __future__ import annotations

import json
import os
import platform

import torch
from _gpu_results import parse
from _reporting import cpu_model

import amp_recipes


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cpu":
        return cpu_model()
    if device.type != "cuda":
        return f"{device.type}, host {cpu_model()}"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute {properties.major}.{properties.minor}, "
        f"host {cpu_model()}, {os.cpu_count()} cores"
    )


def main() -> None:
    """Use the device, and print one line."""
    device = parse(__doc__.splitlines()[0]).device
    assert float(torch.ones(2, device=device).sum()) == 2
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    software = f"torch {torch.__version__}{cuda}, Python {platform.python_version()}"
    own = f"amp_recipes {amp_recipes.__version__}"
    print(json.dumps({"what": "machine", "machine": device_name(device), "software": f"{software}, {own}"}))


if __name__ == "__main__":
    main()
