"""Finds functions that read a command line: a YAML that calls one would start the script with arguments of its own."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_READERS = ("argparse.ArgumentParser", "optparse.OptionParser", "getopt.", "click.", "typer.", "fire.", "hydra.")
_CACHED = type(functools.cache(len))
_READER_FUNCTIONS = ("main", "parse_arguments")


class _Name(str):
    """The dotted name of something that is not there to be looked at."""


def reads_command_line(subject: Any, is_own: Callable[[str], bool]) -> str:
    """Return the name of the reader of a command line that a function or class would call; empty if none.

    is_own: whether a module, by its name, holds code that is followed; that of other modules is not looked at.
    A function called `main` counts. Nothing is called or imported: what the code names is looked up.
    """
    pending: list[tuple[Any, type | None]] = [(subject, None)]
    seen: set[tuple[int, type | None]] = set()
    while pending:
        item, owner = pending.pop()
        if (id(item), owner) in seen:
            continue
        seen.add((id(item), owner))
        if reader := _reader(item):
            return reader
        if not inspect.isclass(item):
            pending += _followed(item, owner, is_own)
            continue
        if reader := next(filter(None, map(_reader, item.__mro__)), ""):
            return reader
        own_bases = [base for base in item.__mro__ if is_own(base.__module__)]
        pending += [(method, item) for base in own_bases for method in _called_unnamed(base)]
    return ""


def _followed(value: Any, owner: type | None, is_own: Callable[[str], bool]) -> list[tuple[Any, type | None]]:
    """Return the functions that a function's code names, each with the class of its `self`; none for foreign code."""
    function, owner = _function_of(value, owner)
    if function is None or not is_own(str(function.__module__)):
        return []
    return [(named, owner) for named in _named_by(function, owner)]


def _reader(value: Any) -> str:
    """The full name of what reads a command line, if that is what a value is."""
    if isinstance(value, _Name):
        name = str(value)
    else:
        named = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
        name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
    of_a_module = isinstance(value, _Name) or (isinstance(value, FunctionType) and "." not in value.__qualname__)
    is_function = of_a_module and name.rpartition(".")[2] in _READER_FUNCTIONS
    return name if is_function or name.startswith(_READERS) else ""


def _called_unnamed(kind: type) -> Iterator[Any]:
    """The methods that Python or torch call without a name in the code: `__init__`, `__call__`, `forward`."""
    for name, value in vars(kind).items():
        if (name.startswith("__") and name.endswith("__")) or name == "forward":
            yield value


def _function_of(value: Any, owner: type | None) -> tuple[FunctionType | None, type | None]:
    """The Python function of a value, and the class whose `self` or `cls` it is given."""
    while not isinstance(value, FunctionType):
        if isinstance(value, functools.partial | functools.partialmethod):
            value = value.func
        elif isinstance(value, MethodType):
            value, bound = value.__func__, value.__self__
            owner = bound if inspect.isclass(bound) else type(bound)
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, _CACHED):
            value = value.__wrapped__
        else:
            return None, None
    return value, owner


def _named_by(function: FunctionType, owner: type | None) -> Iterator[Any]:
    """The values that a function's code finds in its module, class, closure and defaults, as far as they are there."""
    yield getattr(function, "__wrapped__", None)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    for code in _with_inner(function.__code__):
        yield from _read_by(code, function.__globals__, owner)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of the functions and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


# In `count, tool = 1, argparse` they stand between the load and the store: each name may then have the value.
_BESIDE = ("LOAD_CONST", "LOAD_SMALL_INT", "ROT_TWO", "SWAP")


def _read_by(code: CodeType, names: dict[str, Any], owner: type | None) -> Iterator[Any]:
    variables: dict[str, Any] = {code.co_varnames[0]: owner} if code.co_argcount else {}
    value: Any = None
    module: Any = None  # what is being imported from
    for operation, argument in _steps(code):
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            value = names.get(argument)
        elif operation == "IMPORT_NAME":
            value = module = sys.modules.get(argument, _Name(argument))
        elif operation == "IMPORT_FROM":
            value = _member(module, argument)
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            value = _member(value, argument)
        elif operation == "STORE_FAST":
            variables[argument] = value
        elif operation.startswith("LOAD_FAST"):
            value = variables.get(argument)
        elif operation not in _BESIDE:
            value = None
        if value is not None and not isinstance(value, ModuleType):
            yield value


def _steps(code: CodeType) -> Iterator[tuple[str, Any]]:
    """The operations of the code, each with its argument. Python 3.13 joins two: STORE_FAST_LOAD_FAST."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, tuple) and "_FAST_" in step.opname:
            first = "STORE_FAST" if step.opname.startswith("STORE") else "LOAD_FAST"
            second = "STORE_FAST" if "STORE_FAST" in step.opname.removeprefix(first) else "LOAD_FAST"
            yield from zip((first, second), step.argval, strict=True)
        else:
            yield step.opname, step.argval


def _member(owner: Any, name: str) -> Any:
    """A member of a module or class, without running code of theirs; its name, where it is not there."""
    if isinstance(owner, ModuleType):
        return vars(owner)[name] if name in vars(owner) else _Name(f"{owner.__name__}.{name}")
    if isinstance(owner, _Name):
        return _Name(f"{owner}.{name}")
    return inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else None
