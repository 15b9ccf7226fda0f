"""Matches modules by shell-style patterns of their names or of their classes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from amp_recipes.errors import ConfigError

_TYPE_PREFIX = "type:"


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether `pattern` ("*.norm"; * also matches dots) names the module, or ("type:LayerNorm") its class."""
    if pattern.startswith(_TYPE_PREFIX):
        return fnmatchcase(type(module).__name__, pattern.removeprefix(_TYPE_PREFIX))
    return fnmatchcase(name, pattern)


def check_patterns(option: str, patterns: Sequence[str]) -> None:
    """Raise ConfigError for a string where a list of patterns is meant."""
    if isinstance(patterns, str):
        raise ConfigError(f"{option} is the string {patterns!r}; expected a list of patterns: [{patterns!r}]")


def no_match(option: str, pattern: str, named_modules: Sequence[tuple[str, nn.Module]]) -> str:
    """Explain that a pattern matches none of `named_modules`, with the nearest names."""
    prefix, what = "", "module"
    candidates = [name for name, _ in named_modules if name]
    if pattern.startswith(_TYPE_PREFIX):
        prefix, what = _TYPE_PREFIX, "class of a module"
        candidates = sorted({type(module).__name__ for _, module in named_modules})
    message = f"{option}: {pattern!r} matches no {what}"
    nearest = difflib.get_close_matches(pattern.removeprefix(prefix), candidates, n=3)
    if nearest:
        return f"{message}. Did you mean {' or '.join(prefix + name for name in nearest)}?"
    shown = [prefix + name for name in candidates[:8]] or ["none: the model has no submodules"]
    return f"{message}; there are {', '.join(shown)}{', ...' if len(candidates) > 8 else ''}"


def matching(option: str, modules: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that any of `patterns` names, by name, in the order of `named_modules`.

    Raises ConfigError that lists all patterns that match nothing; option: what the error calls them.
    """
    check_patterns(option, patterns)
    named_modules = list(modules.named_modules(remove_duplicate=False))
    found = {
        name: module for name, module in named_modules if any(matches(pattern, name, module) for pattern in patterns)
    }
    problems = [
        pattern for pattern in patterns if not any(matches(pattern, name, module) for name, module in found.items())
    ]
    if problems:
        raise ConfigError("\n".join(no_match(option, pattern, named_modules) for pattern in problems))
    return found
