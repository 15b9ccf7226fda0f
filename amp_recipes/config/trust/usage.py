"""Finds keys of a YAML that the recipe's code does not read, since one of them may be misspelt."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from amp_recipes.config.options.run_options import FRAMEWORK_KEYS, OPTION_NAMES
from amp_recipes.config.yaml.mistakes import slip_of
from amp_recipes.config.yaml.nodes import Mapping, Mistakes, Scalar, dotted, is_plain_mapping, walk
from amp_recipes.config.yaml.tags import REFERENCES

# What a mapping for a loader (`loader_kwargs`, `dataloader_options`) may hold.
LOADER_KEYS = frozenset(inspect.signature(DataLoader).parameters)

# A key that nobody reads is a mistake only if it is this near to one that somebody does: `seeds` and `log_interval` are
# no slips for run options of nearly that name.
_CUTOFF, _OPTION_CUTOFF = 0.8, 0.85
_FILES, _FILE_BYTES = 300, 500_000
_COMPUTED = (ast.JoinedStr, ast.BinOp, ast.Call)
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__", "build"})
_SUGGESTIONS = 50  # comparing names takes time
_REFERENCE = re.compile(r"<([^<>\[\].]+)")


@dataclass
class NamesInCode:
    """Names in a recipe's Python files.

    read: those that it asks hparams for, and cannot do without; modules: those that it asks a Brain's `modules` for;
    mentioned: all names and all strings.
    """

    read: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)


def find_unread_keys(root: Mapping, folder: str, mistakes: Mistakes) -> tuple[str, ...]:
    """The top-level keys that nothing reads; where one that is read and not there has nearly its name, a mistake.

    Looked at are the top-level keys, and those of `modules` and of mappings for a loader. A key counts as read if the
    YAML refers to it, if it is a run option, or if its name is anywhere in the Python files in and below `folder`;
    if not all of those can be read, nothing is said. So a key of the user's own is never refused because nobody needs
    it.
    """
    names = names_in(folder)
    if names is None or not names.mentioned:
        return ()
    known = names.mentioned | _referred(root)
    _compare(root, "", FRAMEWORK_KEYS | names.read, known, mistakes)
    for path, node in walk(root):
        if isinstance(node, Mapping) and is_plain_mapping(node):
            if path == ("modules",):
                _compare(node, "modules.", names.modules, known, mistakes)
            elif "loader" in path[-1]:
                _compare(node, f"{dotted(path)}.", LOADER_KEYS, known, mistakes)
    read = OPTION_NAMES | FRAMEWORK_KEYS | known
    return tuple(key for key in root.items if _is_public(key) and key not in read)


def find_misspelt_options(root: Mapping, folder: str, mistakes: Mistakes) -> None:
    """Note the top-level keys that are slips of run options, and that nothing reads.

    This is the part of `find_unread_keys` that each run can pay for: it reads the code only if there is such a key.
    """
    referred, near = _referred(root), Mistakes()
    _compare(root, "", FRAMEWORK_KEYS, referred, near)
    names = names_in(folder) if near else None
    if names is not None and names.mentioned:
        _compare(root, "", FRAMEWORK_KEYS, names.mentioned | referred, mistakes)


def _referred(root: Mapping) -> set[str]:
    """The keys that the YAML itself refers to."""
    nodes = [node for _, node in walk(root) if isinstance(node, Scalar) and node.tag in REFERENCES]
    return {name for node in nodes for name in _REFERENCE.findall(str(node.value))}


def _is_public(key: Any) -> bool:
    return isinstance(key, str) and not key.startswith("_")


def _compare(
    mapping: Mapping, start: str, read: frozenset[str] | set[str], known: set[str], mistakes: Mistakes
) -> None:
    """Note the keys that are neither read nor known, and near to one that is read and missing.

    start: the keys above, empty at the top level, where a key may also be a slip of a run option.
    """
    options = frozenset() if start else OPTION_NAMES
    missing, missing_options = (sorted(names - mapping.items.keys()) for names in (read, options))
    strange = [key for key in mapping.items if _is_public(key) and key not in read | known | options]
    for key in strange[:_SUGGESTIONS]:
        if nearest := slip_of(key, missing, _CUTOFF, plurals=True) or slip_of(key, missing_options, _OPTION_CUTOFF):
            source = mapping.key_sources.get(key, mapping.items[key].source)
            text = f"{start}{key} is not used: this YAML, the recipe's code and the framework do not read it."
            mistakes.add(source, f"{text} Did you mean {start}{nearest}?")


def names_in(folder: str) -> NamesInCode | None:
    """The names in the Python files in and below a folder; None if there are too many, or one cannot be read."""
    names = NamesInCode()
    for count, file in enumerate(_python_files(folder)):
        try:
            state = os.stat(file)
            found = _names_in_file(file, state.st_mtime_ns, state.st_size) if state.st_size <= _FILE_BYTES else None
        except OSError:
            return None
        if found is None or count == _FILES:
            return None
        names.read |= found.read
        names.modules |= found.modules
        names.mentioned |= found.mentioned
    return names


def _python_files(folder: str) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        yield from (os.path.join(place, name) for name in sorted(files) if name.endswith(".py"))


@functools.lru_cache(maxsize=_FILES)
def _names_in_file(file: str, modified: int, size: int) -> NamesInCode | None:
    """The names in one file; asked for again only when it has changed: a sweep checks the YAML for each of its runs."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # Python itself will say what is wrong with it
    names = NamesInCode()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_hparams(node.value) and isinstance(node.slice, _COMPUTED):
            return None  # `hparams[f"lr_{stage}"]`: what is read is known only then
        names.read.update(_read_from_hparams(node))
        if isinstance(node, ast.Attribute) and _name_of(node.value) == "modules":
            names.modules.add(node.attr)
        names.mentioned.update(_mentioned(node))
    return names


def _read_from_hparams(node: ast.AST) -> Iterator[str]:
    """`hparams["x"]` and `self.hparams.x`; not `hparams.get("x")`, which can do without."""
    if isinstance(node, ast.Subscript) and _is_hparams(node.value):
        yield from _text(node.slice)
    elif isinstance(node, ast.Attribute) and _is_hparams(node.value) and not hasattr(dict, node.attr):
        yield node.attr


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
