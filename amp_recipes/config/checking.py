"""Which overrides fit a YAML file, and what else is wrong with it: all mistakes, before anything is built."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hyperpyyaml.core import recursive_resolve, recursive_update
from ruamel.yaml import YAML, Tag
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import YAMLError

from amp_recipes.config.arguments import Overrides
from amp_recipes.config.document import (
    INCLUDE,
    NOT_PLAIN,
    PLACEHOLDER,
    REFERENCES,
    Document,
    KeyPath,
    has_tags,
    is_mapping,
    plain,
    read_document,
    tag_of,
    walk,
    words_of,
)
from amp_recipes.config.run_options import OPTION_NAMES, did_you_mean, join_mistakes, validate_options
from amp_recipes.errors import ConfigError

_REFERENCE = re.compile(r"<([^>]*)>")  # as HyperPyYAML finds references in the text of !ref and !copy
_PLAIN_VALUES = "null, true or false, a number, a string, or lists and mappings of these"


def read_and_check(
    path: str | os.PathLike[str], overrides: Mapping[str, Any] | str | None
) -> tuple[Document, dict[str, Any]]:
    """The YAML at `path` with all overrides applied, and the run options that it and they set.

    Nothing is instantiated. Raises ConfigError that names every mistake in the overrides and in the YAML.
    """
    document = read_document(path)
    mistakes = [*apply_overrides(document, as_mapping(overrides)), *check_document(document)]
    options, wrong_options = run_options_in(document)
    mistakes += wrong_options
    if mistakes:
        raise ConfigError(join_mistakes(list(dict.fromkeys(mistakes)), document.file))
    return document, options | explicit_options(overrides)


def apply_overrides(document: Document, overrides: Mapping[str, Any]) -> list[str]:
    """Write the overrides that fit into the document; what is wrong with the others."""
    dashes = "--" if isinstance(overrides, Overrides) else ""
    mistakes = list(_override(document, document.tree, _split_keys(overrides), (), dashes))
    for name, value in explicit_options(overrides).items():
        if name in document.tree:
            document.tree[name] = value
    return mistakes


def check_document(document: Document, prefix: KeyPath = (), files: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with a document to which the overrides were applied, each with file:line.

    prefix: the keys under which the document stands where another includes it; files: those that include it.
    """
    files = (*files, os.path.realpath(document.file))
    mistakes = [
        f"{document.where((str(key),))}: {key!r} must be a string, as every key at the top level."
        for key in document.tree
        if not isinstance(key, str)
    ]
    for path, parent, key in walk(document.tree):
        node, name, where = parent[key], ".".join(prefix + path), document.where(path)
        tag = tag_of(node)
        if tag == PLACEHOLDER:
            mistakes.append(f"{where}: {name} is a placeholder that needs a value: --{name}=...")
        elif tag in REFERENCES and isinstance(node, TaggedScalar):
            mistakes += [f"{where}: {name}: {text}" for text in _wrong_references(document, node)]
            if tag_of(_follow(node, document.tree)) in REFERENCES:
                mistakes.append(f"{where}: {name}: {node.value} leads back to itself.")
        elif tag.startswith(INCLUDE):
            mistakes += _check_included(document, node, where, prefix + path, files)
    return mistakes


def run_options_in(document: Document) -> tuple[dict[str, Any], list[str]]:
    """The run options among the top-level keys, and what is wrong with them.

    Left out are those that only resolving includes, or instantiating, can tell.
    """
    found = {}
    for name in [key for key in document.tree if key in OPTION_NAMES]:
        value = plain(_follow(document.tree[name], document.tree))
        if value is not NOT_PLAIN and not has_tags(value):
            found[name] = value
    options, wrong = validate_options(found)
    mistakes = [f"{document.where((name,))}: {text}" for name, text in wrong.items()]
    return {name: options[name] for name in found}, mistakes


def as_mapping(overrides: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Overrides in any of the forms that `load_hparams` takes, as a mapping. Raises ConfigError."""
    if isinstance(overrides, str):
        try:
            overrides = YAML().load(overrides)
        except YAMLError as error:
            raise ConfigError(f"overrides: not valid YAML: {words_of(error)}") from error
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides must be a mapping of keys to values, but are {overrides!r}.")
    return overrides


def explicit_options(overrides: Any) -> dict[str, Any]:
    """The run options that were set beside overrides of the command line."""
    if not isinstance(overrides, Overrides):
        return {}
    options = overrides.run_options
    return {name: plain(value) for name, value in options.items() if name in options.explicit}


def _override(document: Document, node: Any, overrides: Mapping[Any, Any], path: KeyPath, dashes: str) -> Iterator[str]:
    """Write nested overrides below `node`; yield what is wrong with those that do not fit."""
    for given, value in overrides.items():
        name = dashes + ".".join((*path, str(given)))
        key = _find_key(node, given)
        where = document.where((*path, str(given if key is None else key)))
        if key is None and not path and given in OPTION_NAMES and not is_mapping(value):
            key = given  # `run_options_in` checks the value
        if key is None and is_mapping(value) and value and isinstance(node, CommentedMap):
            # No such key: a name with a dot in it may be one key of the YAML.
            joined = {f"{given}.{below}": item for below, item in value.items()}
            yield from _override(document, node, joined, path, dashes)
        elif key is None:
            yield f"{where}: {_unknown(document, node, path, name, dashes)}"
        elif is_mapping(value) and not _holds_nothing(node[key]):
            yield from _override_below(document, node, key, value, (*path, str(key)), dashes)
        elif plain(value) is NOT_PLAIN:
            yield f"{where}: {name} is {value!r}, a {type(value).__name__}; expected {_PLAIN_VALUES}."
        else:
            node[key] = plain(value)


def _override_below(
    document: Document, parent: Any, key: Any, overrides: Mapping[Any, Any], path: KeyPath, dashes: str
) -> Iterator[str]:
    """Apply a mapping of overrides to the node at `parent[key]`."""
    node, name, where = parent[key], ".".join(path), document.where(path)
    given = dashes + ".".join((*path, *map(str, list(overrides)[:1])))
    if tag_of(node).startswith(INCLUDE):
        yield from _override_included(document, parent, key, overrides, dashes + name)
    elif isinstance(node, CommentedMap | CommentedSeq):
        yield from _override(document, node, overrides, path, dashes)
    elif tag_of(node) in REFERENCES:
        yield f"{where}: {given}: {name} is {tag_of(node)} {node.value}; override what it refers to."
    else:
        yield f"{where}: {given}: {name} is {tag_of(node) or repr(node)}, which has no keys."


def _override_included(
    document: Document, parent: Any, key: Any, overrides: Mapping[Any, Any], name: str
) -> Iterator[str]:
    """Pass overrides on to an included file, after a check against its keys."""
    node = parent[key]
    try:
        child = document.included(node)
    except ConfigError:
        return  # check_document reports it
    mistakes = list(_cannot_pass_on(child, child.tree, overrides, (), name))
    if not mistakes:
        if not isinstance(node, CommentedMap):
            parent[key] = CommentedMap()
            parent[key].yaml_set_ctag(Tag(suffix=tag_of(node)))
        recursive_update(parent[key], plain(overrides))
    yield from mistakes


def _cannot_pass_on(
    child: Document, node: Any, overrides: Mapping[Any, Any], path: KeyPath, start: str
) -> Iterator[str]:
    """What HyperPyYAML could not pass on to an included file: it goes down mappings only."""
    for key, value in overrides.items():
        key_path = (*path, str(key))
        name, where = ".".join((start, *key_path)), child.where(key_path)
        if key not in node:
            hint = did_you_mean(key, node, ".".join((start, *path)) + ".")
            yield f"{where}: {name} is not a key of the included file.{hint}"
        elif plain(value) is NOT_PLAIN:
            yield f"{where}: {name} is {value!r}, a {type(value).__name__}; expected {_PLAIN_VALUES}."
        elif is_mapping(value) and isinstance(node[key], CommentedMap):
            yield from _cannot_pass_on(child, node[key], value, key_path, start)
        elif is_mapping(value):
            yield f"{where}: {name} has keys below it that only {child.file} itself can change."


def _find_key(node: Any, given: Any) -> Any:
    """The key of a mapping, or the index in a list, that `given` names; None if there is none."""
    if isinstance(node, CommentedSeq):
        index = int(given) if str(given).isdecimal() else len(node)
        return index if index < len(node) else None
    if given in node:
        return given
    # A command line gives text where the YAML may have a number for a key.
    return next((key for key in node if str(key) == str(given)), None)


def _unknown(document: Document, node: Any, path: KeyPath, name: str, dashes: str) -> str:
    if isinstance(node, CommentedSeq):
        return f"{name}: {'.'.join(path)} is a list of {len(node)}; expected one of its indices, from 0."
    wanted = name.removeprefix(dashes)
    keys = {".".join(key_path): key_path[-1] for key_path in document.lines}
    hint = did_you_mean(wanted, {*keys, *OPTION_NAMES}, dashes)
    if not hint:  # the right key at another depth
        leaves = difflib.get_close_matches(wanted.rpartition(".")[2], keys.values(), n=1)
        hint = next((f" Did you mean {dashes}{key}?" for key, leaf in keys.items() if leaf in leaves), "")
    return f"{name} is neither a key of the YAML nor a run option.{hint}"


def _check_included(document: Document, node: Any, where: str, path: KeyPath, files: tuple[str, ...]) -> list[str]:
    try:
        child = document.included(node)
    except ConfigError as error:
        return [f"{where}: {'.'.join(path)}: {error}"]
    if os.path.realpath(child.file) in files:
        return [f"{where}: {'.'.join(path)}: {child.file} includes itself."]
    return check_document(child, path, files)


def _wrong_references(document: Document, node: TaggedScalar) -> Iterator[str]:
    """References to keys that are not there, as far as they can be told before includes are resolved."""
    for reference in _REFERENCE.findall(str(node.value)):
        branch: Any = document.tree
        parts = [part.strip("]") for part in reference.split(".")[0].split("[")]
        for depth, part in enumerate(parts):
            if not isinstance(branch, CommentedMap) or tag_of(branch).startswith(INCLUDE):
                break  # what stands there is known only after its own tag is resolved
            if part not in branch:
                above = "".join(f"{name}." for name in parts[:depth])
                yield f"<{reference}> refers to a key that is not there.{did_you_mean(part, branch, above)}"
                break
            branch = branch[part]


def _follow(node: Any, tree: CommentedMap) -> Any:
    """What a node refers to, through any number of references.

    Another reference where they go round in a circle, NOT_PLAIN where they cannot be followed.
    """
    seen: set[int] = set()
    while isinstance(node, TaggedScalar) and tag_of(node) in REFERENCES and id(node) not in seen:
        seen.add(id(node))
        try:
            node = recursive_resolve(node.value, [], tree)
        except Exception:  # the reference is wrong, or goes into an include: resolving reports it
            return NOT_PLAIN
    return node


def _holds_nothing(node: Any) -> bool:
    """Whether a mapping may stand here instead: it has no keys that a typo could miss."""
    if isinstance(node, CommentedMap):
        return not node and not tag_of(node)
    return node is None or tag_of(node) == PLACEHOLDER


def _split_keys(overrides: Mapping[Any, Any]) -> dict[Any, Any]:
    """Overrides with a level for each dot in a key."""
    nested: dict[Any, Any] = {}
    for key, value in overrides.items():
        head, dot, below = key.partition(".") if isinstance(key, str) else (key, "", "")
        value = {below: value} if dot else value
        if is_mapping(value):
            value = _split_keys(value)
        if isinstance(nested.get(head), dict) and is_mapping(value):
            recursive_update(nested[head], value)
        else:
            nested[head] = value
    return nested
