"""Finds the class from which TorchScript was compiled or traced, before it lost its decorators."""

from __future__ import annotations

import sys

import torch
from torch import nn

from amp_recipes.modules.torch_private import made_from, name_in_script

_MANGLED = "___torch_mangle_"  # what TorchScript puts into a name that it has already


def class_before_script(module: torch.jit.ScriptModule) -> type | None:
    """The class of a script that was made here, or that a loaded class of its name may have been; else None."""
    source = made_from(module)
    if isinstance(source, type) and source.__name__ != "QualnameWrapper":  # torch.jit.trace's own
        return source
    parts = [part for part in name_in_script(module).split(".") if not part.startswith(_MANGLED)]
    folder, name = ".".join(parts[1:-1]) or "__main__", parts[-1]  # the first is __torch__
    loaded = getattr(sys.modules.get(folder), name, None)
    return loaded if isinstance(loaded, type) and issubclass(loaded, nn.Module) else None
