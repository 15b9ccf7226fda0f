"""Which keys of a YAML the recipe's own code reads: how a misspelt key is found that nothing in the YAML refers to."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch.utils.data import DataLoader

from amp_recipes.config.nodes import Mapping, Mistakes, Scalar, dotted, is_plain_mapping, walk
from amp_recipes.config.run_options import OPTION_NAMES
from amp_recipes.config.tags import REFERENCES

# The keys that a Brain itself looks for in its hparams, beside the run options.
FRAMEWORK_KEYS = frozenset({"lr_scheduler"})
# What a mapping for a loader (`loader_kwargs`, `dataloader_options`) may hold.
LOADER_KEYS = frozenset(inspect.signature(DataLoader).parameters)

_CUTOFF = 0.8  # a key that nobody reads is a mistake only if it is this near to one that somebody would
_FILES, _FILE_BYTES = 100, 500_000
_REFERENCE = re.compile(r"<([^<>\[\].]+)")


@dataclass
class NamesInCode:
    """Names in a recipe's Python files.

    read: those that it asks hparams for; modules: those that it asks a Brain's `modules` for; mentioned: all names and
    all strings.
    """

    read: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)


def find_unread_keys(root: Mapping, folder: str, mistakes: Mistakes) -> None:
    """Note each key that nothing reads, where one that is read and not there has nearly its name.

    Looked at are the top-level keys, and those of `modules` and of mappings for a loader. A key counts as read if the
    YAML refers to it, if it is a run option, or if its name stands anywhere in the Python files of `folder`. So a key
    of the user's own is never refused because nobody needs it.
    """
    names = names_in(folder)
    if not names.mentioned:
        return
    referred = {name for _, node in walk(root) if isinstance(node, Scalar) for name in _references(node)}
    known = names.mentioned | referred
    _compare(root, "", OPTION_NAMES | FRAMEWORK_KEYS | names.read, known, mistakes)
    for path, node in walk(root):
        if not isinstance(node, Mapping) or not is_plain_mapping(node):
            continue
        if path == ("modules",):
            _compare(node, "modules.", names.modules, known, mistakes)
        elif "loader" in path[-1]:
            _compare(node, f"{dotted(path)}.", LOADER_KEYS, known, mistakes)


def _compare(
    mapping: Mapping, start: str, read: frozenset[str] | set[str], known: set[str], mistakes: Mistakes
) -> None:
    """Note the keys that are neither read nor known, and near to one that is read and missing."""
    missing = sorted(read - mapping.items.keys())
    for key in mapping.items:
        if not isinstance(key, str) or key in read or key in known or key.startswith("_"):
            continue
        nearest = difflib.get_close_matches(key, missing, n=1, cutoff=_CUTOFF)
        if nearest:
            source = mapping.key_sources.get(key, mapping.items[key].source)
            text = f"{start}{key} is read by nothing: not by this YAML, the recipe's code or the framework."
            mistakes.add(source, f"{text} Did you mean {start}{nearest[0]}?")


def names_in(folder: str) -> NamesInCode:
    """The names in the Python files of a folder; those that cannot be read or parsed are left out."""
    names = NamesInCode()
    for file in sorted(Path(folder).glob("*.py"))[:_FILES]:
        try:
            state = file.stat()
        except OSError:
            continue
        if state.st_size <= _FILE_BYTES:
            found = _names_in_file(file, state.st_mtime_ns, state.st_size)
            names.read |= found.read
            names.modules |= found.modules
            names.mentioned |= found.mentioned
    return names


@functools.lru_cache(maxsize=_FILES)
def _names_in_file(file: Path, modified: int, size: int) -> NamesInCode:
    """The names in one file; asked for again only when it has changed: a sweep checks the YAML for each of its runs."""
    names = NamesInCode()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return names  # Python itself will say what is wrong with it
    for node in ast.walk(tree):
        names.read.update(_read_from_hparams(node))
        if isinstance(node, ast.Attribute) and _name_of(node.value) == "modules":
            names.modules.add(node.attr)
        names.mentioned.update(_mentioned(node))
    return names


def _read_from_hparams(node: ast.AST) -> Iterator[str]:
    """`hparams["x"]`, `self.hparams.x`, `hparams.get("x")`."""
    if isinstance(node, ast.Subscript) and _is_hparams(node.value):
        yield from _text(node.slice)
    elif isinstance(node, ast.Attribute) and _is_hparams(node.value):
        if not hasattr(dict, node.attr):
            yield node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_hparams(node.func.value):
        for argument in node.args[:1]:
            yield from _text(argument)


def _mentioned(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.keyword | ast.arg):
        if node.arg is not None:
            yield node.arg
    else:
        yield from _text(node)


def _is_hparams(node: ast.AST) -> bool:
    return _name_of(node) in ("hparams", "hparam", "hyperparams", "hyperparameters")


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _references(node: Scalar) -> list[str]:
    return _REFERENCE.findall(str(node.value)) if node.tag in REFERENCES else []
