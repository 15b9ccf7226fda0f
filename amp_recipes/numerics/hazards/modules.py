"""Finds hazards in modules without a step: parameters in low precision, and pins that TorchScript lost."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amp_recipes.errors import listed
from amp_recipes.files.user_code import Line, lies_with_the_user
from amp_recipes.modules.torch_script import class_before_script
from amp_recipes.numerics.hazards.list import Found
from amp_recipes.precision.autocast import has_default_precision

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_SPELLINGS = {torch.float16: {"float16", "half"}, torch.bfloat16: {"bfloat16"}}
_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16}
# What a step runs casts activations, not parameters.
_STEP_METHODS = {"forward", "compute_forward", "compute_objectives", "fit_batch", "evaluate_batch"}
_NAMED = 4


def note_modules(modules: nn.Module, found: Found) -> None:
    """Note the hazards that lie in the modules themselves."""
    _note_low_parameters(modules, found)
    _note_scripted(modules, found)


def _note_low_parameters(modules: nn.Module, found: Found) -> None:
    """Trained parameters that are not fp32; frozen ones are not updated, so nothing is lost."""
    for dtype, short in NAMES.items():
        holders = {name: module for name, module in modules.named_modules() if _trains_in(module, dtype)}
        if not holders:
            continue
        first, *others = _lines_casting_to(dtype, modules) or [None]
        asked = "" if first is None else " Perhaps the cast is here" + _also(others) + "."
        digits = "256" if dtype is torch.bfloat16 else "2048"
        message = (
            f"parameters are stored in {short} ({_named(list(holders))}), where an update below 1/{digits} of a "
            f"weight is lost.{asked} Store them in fp32; autocast casts them where needed."
        )
        for name, module in holders.items():
            line = first or _line_of_class(type(module))
            found.add("half_parameters", message, line, "wrong", module=name, what=dtype, is_about_line=False)


def _trains_in(module: nn.Module, dtype: torch.dtype) -> bool:
    return any(weight.dtype is dtype and weight.requires_grad for weight in module.parameters(recurse=False))


def _named(names: list[str]) -> str:
    return listed((name or "the root" for name in names), _NAMED)


def _also(lines: list[Line]) -> str:
    shown = ", ".join(map(str, lines[:_NAMED]))
    return f" or at {shown}" if shown else ""


def _note_scripted(modules: nn.Module, found: Found) -> None:
    """Report modules that TorchScript compiled: it drops decorators, and they cannot be pinned."""
    outermost: list[str] = []
    for name, module in modules.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        source = class_before_script(module)
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in outermost)
        if source is not None and has_default_precision(getattr(source, "forward", None)):
            grade = "wrong"
            message = (
                f"is TorchScript, made from {source.__qualname__}, whose forward has fwd_default_precision. The "
                "compiled forward has lost it, so autocast casts its ops. Use the original module."
            )
        elif not is_inside:
            grade = "note"
            message = "is TorchScript, which fp32_modules cannot pin. If it needs fp32, use the original module."
        else:
            continue
        line = (_line_of_class(source) if source is not None else None) or _line_that_scripts(modules)
        found.add("scripted_pin", f"{name or 'the model'} {message}", line, grade, module=name, what=name)
        if not is_inside:
            outermost.append(name)


def _line_of_class(kind: type) -> Line | None:
    """Return the line where a class of the user begins; None for other classes, and where there is no source."""
    try:
        file = inspect.getsourcefile(kind) or ""
        return Line(file, inspect.getsourcelines(kind)[1]) if file and lies_with_the_user(file) else None
    except (OSError, TypeError):
        return None


def _lines_casting_to(dtype: torch.dtype, modules: nn.Module) -> list[Line]:
    """Lines that ask for `dtype` outside of a step: `.half()`, else `.to(torch.float16)` and `dtype=torch.float16`.

    Of the files nearest to the model in which there are any.
    """
    for files in _users_files(modules):
        calls, arguments = list[Line](), list[Line]()
        for file, call in _calls_outside_steps(files):
            line = Line(file, call.end_lineno or call.lineno)
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if _CASTS.get(name) is dtype and not call.args:
                calls.append(line)
            elif _names_dtype(call, dtype, by_position=name in ("to", "set_default_dtype")):
                arguments.append(line)
        if calls or arguments:
            return calls or arguments
    return []


def _calls_outside_steps(files: Iterable[str]) -> Iterator[tuple[str, ast.Call]]:
    for file in files:
        for node in _nodes_outside_steps(_tree(file)):
            if isinstance(node, ast.Call):
                yield file, node


def _names_dtype(call: ast.Call, dtype: torch.dtype, by_position: bool) -> bool:
    given = [word.value for word in call.keywords if (word.arg or "").endswith("dtype")]
    given += call.args if by_position else []
    return any(isinstance(value, ast.Attribute) and value.attr in _SPELLINGS[dtype] for value in given)


def _line_that_scripts(modules: nn.Module) -> Line | None:
    """The first line of the user's files that calls `torch.jit.script` or `trace`."""
    for file in itertools.chain.from_iterable(_users_files(modules)):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.jit.script", "torch.jit.trace"):
                return Line(file, node.lineno)
    return None


def _users_files(modules: nn.Module) -> Iterator[list[str]]:
    """Source files of the user's: of the classes in the tree, then of the script, then all that were imported."""
    for names in (dict.fromkeys(type(module).__module__ for module in modules.modules()), ["__main__"], sys.modules):
        files = (getattr(sys.modules.get(name), "__file__", None) for name in list(names))
        yield sorted({file for file in files if _is_users_source(file)})


def _is_users_source(file: Any) -> bool:
    return isinstance(file, str) and file.endswith(".py") and lies_with_the_user(file)


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError):  # changed since it was loaded, or not there
        return ast.Module(body=[], type_ignores=[])


def _nodes_outside_steps(tree: ast.AST) -> Iterator[Any]:
    waiting = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef) and node.name in _STEP_METHODS:
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))
