"""Finds the class that TorchScript compiled or traced: what the script was before it lost its decorators."""

from __future__ import annotations

import sys

import torch
from torch import nn

_MANGLED = "___torch_mangle_"  # what TorchScript puts into a name that it has already


def class_before_script(module: torch.jit.ScriptModule) -> type | None:
    """The class of a script that was made here, or that a loaded class of its name may have been; else None."""
    made_from = getattr(getattr(module, "_concrete_type", None), "py_class", None)
    if isinstance(made_from, type) and made_from.__name__ != "QualnameWrapper":  # torch.jit.trace's own
        return made_from
    parts = [it for it in module._c._type().qualified_name().split(".") if not it.startswith(_MANGLED)]
    folder, name = ".".join(parts[1:-1]) or "__main__", parts[-1]  # the first is __torch__
    made_from = getattr(sys.modules.get(folder), name, None)
    return made_from if isinstance(made_from, type) and issubclass(made_from, nn.Module) else None
