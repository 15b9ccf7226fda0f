"""Finds the blocks of a model that are gathered, or recomputed, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from amp_recipes.errors import ConfigError
from amp_recipes.modules.names import matching

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost equal blocks of lists: children of one class, of which a ModuleList or Sequential has several.

    A child without children is a layer, not a block: to gather each Linear of an MLP alone costs a collective each,
    and saves little.
    """
    kinds = Counter(map(type, module.children())) if isinstance(module, _CONTAINERS) else {}
    for child in module.children():
        if kinds.get(type(child), 0) > 1 and has_parameters(child) and any(True for _ in child.children()):
            yield child
        else:
            yield from repeated_blocks(child)


def chosen_blocks(option: str, modules: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that `patterns` name, each once; of a list without a forward its children.

    option: what errors call the patterns. Raises ConfigError for one that matches nothing, or nothing that is called.
    """
    found: dict[nn.Module, None] = {}
    for pattern in patterns:
        chosen = [block for module in matching(option, modules, [pattern]).values() for block in with_forward(module)]
        if not chosen:
            raise ConfigError(
                f"{option}: {pattern!r} matches only modules without a forward, such as a ParameterList. They are "
                "never called, so they cannot be gathered before a call. Name the module that uses them."
            )
        found |= dict.fromkeys(chosen)
    return list(found)


def with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """`module`, or its nearest descendants that have a forward where it has none of its own (ModuleList)."""
    if "forward" in vars(module) or type(module).forward is not nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from with_forward(child)


def has_parameters(module: nn.Module) -> bool:
    """Whether it holds any parameter, at any depth."""
    return any(True for _ in module.parameters())
