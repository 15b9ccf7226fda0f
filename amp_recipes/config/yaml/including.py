"""Puts the files that `!include:` names into the tree, and decides which files may be named."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from amp_recipes.config.yaml.limits import DEPTH, Budget, LimitError
from amp_recipes.config.yaml.mistakes import did_you_mean, slip_of
from amp_recipes.config.yaml.nodes import (
    Key,
    KeyPath,
    Mapping,
    Mistakes,
    Node,
    Scalar,
    Unknown,
    children,
    dotted,
    is_plain_mapping,
    walk,
)
from amp_recipes.config.yaml.reading import read_file
from amp_recipes.config.yaml.tags import INCLUDE, PLACEHOLDER, REFERENCES

_SLIP, _COMPARED_NAMES = 0.85, 100
_REFERENCE_TO_KEYS = re.compile(r"<([^<>.]+)>")  # without the attribute of an object: those are no mappings

# The real paths of the files from the main YAML down to the one whose tags are looked at.
_Chain: TypeAlias = "tuple[str, ...]"


def expand_includes(root: Mapping, trusted_folders: Sequence[str], mistakes: Mistakes, budget: Budget) -> None:
    """Replace each `!include:` node by the root of its file, with the values below the tag merged into it.

    root: of the main YAML; a file must lie in the folder of that YAML, or in one of `trusted_folders`, after links are
        followed. It is looked up in the folder of the file with the tag, after links are followed too.
    A file that several tags include becomes a separate tree for each. A file that cannot be included is one of the
    `mistakes`, and becomes an `Unknown`: nothing is known of its keys. Raises LimitError.
    """
    main = os.path.realpath(root.source.file)
    _Including(os.path.dirname(main), trusted_folders, mistakes, budget).expand(root, (main,), ())


class _Including:
    """One load: what is allowed, and what was done."""

    def __init__(self, config_root: str, trusted_folders: Sequence[str], mistakes: Mistakes, budget: Budget) -> None:
        self.config_root = config_root
        self.folders = [config_root, *map(os.path.realpath, trusted_folders)]
        self.mistakes = mistakes
        self.budget = budget
        self.seen: set[Node] = set()
        self.included: dict[Node, Node] = {}
        self.scopes: set[Mapping] = set()  # mappings in which references look up their `<key>`

    def expand(self, node: Node, chain: _Chain, path: KeyPath) -> None:
        """Replace each include below `node`, which is at `path` in the last file of `chain`."""
        pending = [(node, path)]
        while pending:
            parent, path = pending.pop()
            nodes = children(parent)
            if nodes and len(path) >= DEPTH:
                raise LimitError(f"{parent.source}: YAML and includes are nested more than {DEPTH} levels deep.")
            below = []
            for key, child in nodes:
                child_path = (*path, str(key))
                if child.tag.startswith(INCLUDE) and not isinstance(child, Unknown):
                    parent.items[key] = self._root_for(child, chain, child_path)  # type: ignore[union-attr]
                elif child not in self.seen:
                    self.seen.add(child)
                    below.append((child, child_path))
            pending += reversed(below)

    def _root_for(self, node: Node, chain: _Chain, path: KeyPath) -> Node:
        """Return the root that replaces an include; each alias of it gets the same one."""
        if node not in self.included:
            self.included[node] = Unknown(node.tag, node.source)
            self.included[node] = self._read(node, chain, path) or self.included[node]
        return self.included[node]

    def _read(self, node: Node, chain: _Chain, path: KeyPath) -> Mapping | None:
        self.budget.take_file(node.source)  # before going deeper: it bounds how deep that is
        # The values below the tag belong to this file: their own includes are looked up in its folder.
        self.expand(node, chain, path)
        file = self._find(node, chain, path)
        root = None if file is None else read_file(file, self.mistakes, self.budget, node.source)
        if file is None or root is None:
            return None
        self.scopes.add(root)
        if isinstance(node, Mapping):
            # Before the file's own includes: a value given here may take the place of one, or go into its file.
            self._merge(root, node, path)
        self.expand(root, (*chain, os.path.realpath(file)), path)
        return root

    def _find(self, node: Node, chain: _Chain, path: KeyPath) -> str | None:
        """The file that an include names; None, with a mistake, if it may not or cannot be included."""
        name = node.tag.removeprefix(INCLUDE)
        here = os.path.dirname(chain[-1])
        try:
            real = os.path.realpath(os.path.join(here, name))
            missing = not os.path.lexists(real)
        except ValueError:  # a character that the file system cannot have
            return self._wrong(node, path, f"{name!r} cannot be the name of a file")
        # First of all, so that nobody learns from the message which files there are elsewhere.
        if not any(_lies_in(real, folder) for folder in self.folders):
            folder = os.path.dirname(real)
            return self._wrong(
                node,
                path,
                f"{real} lies outside {self.config_root}, the folder of the main YAML. To allow the files of its "
                f'folder: trust=("{folder}",) in load_hparams, or --trust {folder} on the command line',
            )
        if real in chain:
            circle = [self._short(file) for file in (*chain[chain.index(real) :], real)]
            return self._wrong(node, path, f"the file includes itself: {' -> '.join(circle)}")
        if missing:
            return self._wrong(node, path, f"there is no file {real}", _nearest_yaml(real, name))
        # As it is written, where that is the same file: `configs/net.yaml` reads better than its real path.
        written = os.path.normpath(os.path.join(os.path.dirname(node.source.file), name))
        return written if os.path.realpath(written) == real else real

    def _wrong(self, node: Node, path: KeyPath, text: str, hint: str = "") -> None:
        self.mistakes.add(node.source, f"{dotted(path)}: {node.tag}: {text}.{hint}")

    def _short(self, file: str) -> str:
        return os.path.relpath(file, self.config_root) if _lies_in(file, self.config_root) else file

    def _merge(self, root: Mapping, values: Mapping, path: KeyPath) -> None:
        """Merge the values below an include into the root of its file, as HyperPyYAML's `recursive_update` does.

        Beyond it: a call with another tag replaces the old one (in HyperPyYAML its arguments went to the old class), as
        any value replaces null or a placeholder.
        """
        pending = [(root, values, path)]
        while pending:
            target, given, path = pending.pop()
            self.budget.take_nodes(len(given.items), given.source)  # what aliases multiply is merged each time
            self._move_scope(given, target)
            for key, value in given.items.items():
                old = target.items.get(key)
                if isinstance(old, Mapping) or (old is not None and _is_call_without_arguments(old)):
                    value = _keys_of_reference(value)
                if isinstance(old, Mapping) and isinstance(value, Mapping) and value.tag in ("", old.tag):
                    pending.append((old, value, (*path, str(key))))
                else:
                    self._merge_key(target, given, key, value, (*path, str(key)))

    def _merge_key(self, target: Mapping, given: Mapping, key: Key, value: Node, path: KeyPath) -> None:
        """Put one value, which is no mapping for a mapping, where it belongs."""
        old = target.items.get(key)
        source = given.key_sources.get(key, value.source)
        if old is None:
            if nearest := _slip(key, target):
                text = f"{dotted(path)} is not a key of the included file."
                self.mistakes.add(source, f"{text} Did you mean {nearest}?")
        elif is_plain_mapping(value):
            if _is_call_without_arguments(old):
                value = self._with_arguments(old, value)
            elif not _holds_nothing(old):
                where = target.key_sources.get(key, old.source)
                text = f"{dotted(path)}: this is a mapping, but {where} holds a value without keys."
                self.mistakes.add(source, text)
                return
        _put(target, key, value, given)

    def _with_arguments(self, call: Node, arguments: Node) -> Mapping:
        assert isinstance(arguments, Mapping)
        sources, comments = dict(arguments.key_sources), dict(arguments.comments)
        called = Mapping(call.tag, dict(arguments.items), call.source, sources, comments)
        self._move_scope(arguments, called)
        return called

    def _move_scope(self, old: Mapping, new: Mapping) -> None:
        """Let the references of a file whose root goes into another mapping follow what is given to that one."""
        if old in self.scopes:
            self.scopes.remove(old)
            self.scopes.add(new)
            for _, node in walk(old):
                if isinstance(node, Scalar) and node.scope is old:
                    node.scope = new


def _slip(key: Key, target: Mapping) -> str:
    """Return the key of an included file that a new key misspells; not searched in files with hundreds of keys."""
    known = [name for name in target.items if isinstance(name, str)]
    return slip_of(key, known, _SLIP) if isinstance(key, str) and len(known) <= _COMPARED_NAMES else ""


def _put(target: Mapping, key: Key, value: Node, given: Mapping) -> None:
    target.items[key] = value
    target.key_sources[key] = given.key_sources.get(key, value.source)
    if key in given.comments:
        target.comments[key] = given.comments[key]


def _is_call_without_arguments(node: Node) -> bool:
    """Whether a node is `!new:X` or `!include:FILE` with nothing after it, which may be given arguments or values."""
    return isinstance(node, Scalar) and ":" in node.tag and node.value in (None, "")


def _holds_nothing(node: Node) -> bool:
    """Whether anything may replace this node without loss (an empty mapping just gets keys)."""
    empty = isinstance(node, Scalar) and (node.tag == PLACEHOLDER or (not node.tag and node.value is None))
    return empty or isinstance(node, Unknown)


def _keys_of_reference(value: Node) -> Node:
    """A reference to a mapping as a mapping of references to its keys, which can be merged; others as they are."""
    reference, target = _followed(value)
    if not isinstance(reference, Scalar) or not isinstance(target, Mapping) or target.tag:
        return value
    start = reference.value.strip()[1:-1]
    names = {key: f"<{start}[{key}]>" for key in target.items if isinstance(key, str) and not set(key) & set("<>[].")}
    items: dict[Key, Node] = {
        key: Scalar(reference.tag, names[key], value.source, names[key], reference.scope) if key in names else node
        for key, node in target.items.items()
    }
    return Mapping("", items, value.source, dict(target.key_sources), dict(target.comments))


def _followed(value: Node) -> tuple[Node, Node | None]:
    """The last of the references that lead on from a value, and what it names."""
    reference: Node = value
    target: Node | None = value
    for _ in range(DEPTH):  # a longer chain is as good as a circle
        if not isinstance(target, Scalar) or target.tag not in REFERENCES:
            break
        reference, target = target, _referred(target)
    return reference, target


def _referred(reference: Scalar) -> Node | None:
    """Return the node at the keys of a reference, if the reference goes through mappings only."""
    match = _REFERENCE_TO_KEYS.fullmatch(str(reference.value).strip())
    node: Node | None = reference.scope if match else None
    for part in match[1].split("[") if match else ():
        node = node.items.get(part.strip("]")) if is_plain_mapping(node) else None
    return node


def _lies_in(file: str, folder: str) -> bool:
    return os.path.commonpath([file, folder]) == folder


def _nearest_yaml(real: str, name: str) -> str:
    """` Did you mean x.yaml?` for a file of that folder, with the folder as it was written."""
    folder, wanted = os.path.split(real)
    try:
        found: Iterable[str] = [file for file in os.listdir(folder) if file.endswith((".yaml", ".yml"))]
    except OSError:
        return ""
    start = name[: name.rfind("/") + 1]
    return did_you_mean(wanted, found, start) or did_you_mean(f"{wanted}.yaml", found, start)
