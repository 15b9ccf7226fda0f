"""Resolves `!ref`, `!copy` and `!applyref:` into a tree without them.

The meaning does not depend on the order of the keys, and keeps what was written. HyperPyYAML differs here:

- A reference to a formula gives its result (`<b> * 2` with `b: !ref <a> + 1` further down: there `<a> + 1 * 2`).
- What a value says is never read as a reference or as arithmetic again (there `a: <b>` and `a: 1 - 2` are).
- Text is a number only where the number is written just so (there `<a>_<b>` is 22 and version `2.10` becomes 2.1).
- A tuple, `!ref (<a>, <b> + 1)`, is split before values are put in: a comma in a value stays in the value.
- A list has indices (`<sizes[0]>`), keys may hold dots or be numbers, and a path of attributes is followed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from amp_recipes.config.yaml.arithmetic import could_be_formula, evaluate, is_arithmetic, number_of
from amp_recipes.config.yaml.limits import (
    DEPTH,
    EXPANDED_NODES,
    FILE_BYTES,
    NUMBER_BITS,
    TEXT_CHARACTERS,
    Budget,
    LimitError,
)
from amp_recipes.config.yaml.mistakes import did_you_mean, printable, short
from amp_recipes.config.yaml.nodes import (
    NOT_PLAIN,
    Key,
    Mapping,
    Mistakes,
    Node,
    Scalar,
    Sequence,
    Unknown,
    children,
    dotted,
    is_plain_mapping,
    is_plain_scalar,
    is_plain_sequence,
    plain_data,
    walk,
)
from amp_recipes.config.yaml.overriding import to_nodes
from amp_recipes.config.yaml.reading import read_tuple
from amp_recipes.config.yaml.tags import APPLYREF, ATTRIBUTE, COPY, INCLUDE, PLACEHOLDER, REF, REFERENCES, TUPLE
from amp_recipes.errors import AmpRecipesError, ConfigError

Call = Callable[[str, list[Any], dict[str, Any]], Any]

_REFERENCE = re.compile(r"<([^<>]*)>")  # HyperPyYAML allows `<` in a key, at quadratic time
_PARTS = re.compile(r"([^.\[\]]+)((?:\[[^\[\]]*\])*)((?:\.[^.\[\]]+)*)")  # key [key] ... .attribute ...
_NUMBER_IN_TEXT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")

_STAND_IN = re.compile(r"ref[0-9]+x")

_STEPS = 3 * DEPTH  # references and nodes that lead on to each other; less than Python's own stack allows
# The search for the nearest name takes seconds where there are thousands.
_HINTED_MISTAKES = 20
_HINTED_KEYS = 500


def resolve(root: Mapping, mistakes: Mistakes, budget: Budget, call: Call | None = None) -> Mapping:
    """Return a new tree in which each reference is replaced by its value; `root` is unchanged.

    A node that several keys refer to is one object in it. What is wrong goes to `mistakes`; Unknown takes its place.
    call: gets the name and the arguments of each `!applyref:`, once, in the order of the file, and returns plain data;
    without it such a value, and all text that it goes into, is Unknown.
    Raises LimitError where the tree grows beyond the limits, and ConfigError for an exception of `call`.
    """
    resolver = _Resolver(root, mistakes, budget, call)
    for _, node in list(walk(root)):
        if node.tag.startswith(APPLYREF):  # before anything refers to it, so that random draws keep their order
            resolver.resolved(node)
    resolved = resolver.resolved(root)
    assert isinstance(resolved, Mapping)
    return resolved


class _Size(NamedTuple):
    """A resolved node with everything below it written out."""

    nodes: int = 1
    depth: int = 0
    characters: int = 0


class _Resolver:
    def __init__(self, root: Mapping, mistakes: Mistakes, budget: Budget, call: Call | None) -> None:
        self._root, self._mistakes, self._budget, self._call = root, mistakes, budget, call
        self._names = {node: dotted(path) for path, node in walk(root)}
        self._resolved: dict[Node, Node] = {}  # also of each resolved node to itself
        self._sizes: dict[Node, _Size] = {}
        self._targets: dict[Scalar, Node] = {}
        self._other_keys: dict[Mapping, dict[str, Key]] = {}
        self._resolving: set[Node] = set()
        self._following: set[Node] = set()
        self._chain: list[Node] = []  # what is in either of them, outermost first
        self._characters = 0  # of all text that references made
        self._written = 0  # nodes of lists and mappings that went into text or into a function

    def resolved(self, node: Node) -> Node:
        """Return the resolved form of a node, made once; a resolved node is returned as it is."""
        if node not in self._resolved:
            if node in self._resolving:
                return self._circular(node)
            with self._within(self._resolving, node):
                made = self._resolve(node)
            self._resolved[node] = self._measured(made)
        return self._resolved[node]

    def _resolve(self, node: Node) -> Node:
        if isinstance(node, Unknown):
            return node
        if node.tag in REFERENCES:
            if isinstance(node, Scalar):
                return self._refer(node)
            return self._wrong(node, f"{node.tag} needs one reference after it: {node.tag} <key>.")
        if node.tag.startswith(APPLYREF):
            return self._apply(node)
        if node.tag == PLACEHOLDER:
            name = self._name(node)
            self._mistakes.add(node.source, f"{name} is a placeholder that needs a value: --{name}=...")
        if node.tag == PLACEHOLDER or node.tag.startswith(INCLUDE):  # the reason has been reported
            return self._unknown(node)
        return _rebuilt(node, self.resolved)

    # References: one alone, or within text

    def _refer(self, scalar: Scalar) -> Node:
        text = str(scalar.value or "")
        if _REFERENCE.fullmatch(text):
            node = self.resolved(self._target(scalar))
            return self._copy(node, {}) if scalar.tag == COPY else node
        references = list(dict.fromkeys(_REFERENCE.findall(text)))
        in_parentheses = text.startswith("(") and text.endswith(")") and "\n" not in text
        if not references and not in_parentheses:
            return self._without_reference(scalar, text)
        return self._put_together(scalar, text, references, in_parentheses)

    def _put_together(self, scalar: Scalar, text: str, references: list[str], in_parentheses: bool) -> Node:
        """Return a number, a tuple or a text, with the values of its references."""
        nodes = {reference: self.resolved(self._find(scalar, reference)) for reference in references}
        if any(isinstance(node, Unknown) for node in nodes.values()):
            return self._unknown(scalar)
        number = self._calculate(scalar, text, nodes) if references else None
        if number is not None:
            return number
        return self._tuple(scalar, text) if in_parentheses else self._interpolate(scalar, text, nodes)

    def _without_reference(self, scalar: Scalar, text: str) -> Node:
        """`!ref` with text alone is the text, as in HyperPyYAML; but not where the brackets were forgotten."""
        key = text.split("[")[0].split(".")[0]
        if not text:
            return self._wrong(scalar, f"{scalar.tag} needs a reference after it: {scalar.tag} <key>.")
        if key in self._scope(scalar).items and _PARTS.fullmatch(text):
            return self._wrong(scalar, f"{scalar.tag} {short(text)}: write <{short(text)}> to refer to that key.")
        if text.lstrip().startswith("<") or text.rstrip().endswith(">"):
            return self._wrong(scalar, f"{scalar.tag} {short(text)}: a reference has < and > around it: <key>.")
        return Scalar("", text, scalar.source, text)

    def _calculate(self, scalar: Scalar, text: str, nodes: dict[str, Node]) -> Node | None:
        """The result of a formula; None if it is none, because some value in it is no number."""
        if not is_arithmetic(_REFERENCE.sub("<>", text)):
            return None
        operands = {reference: _operand(node) for reference, node in nodes.items()}
        if None in operands.values() or not could_be_formula(_REFERENCE.sub("0", text)):
            return None
        length = len(text) + sum(len(str(operands[reference])) for reference in _REFERENCE.findall(text))
        self._budget.take_formula(length, scalar.source)  # before the numbers are put in
        try:
            number = evaluate(_REFERENCE.sub(lambda found: str(operands[found[1]]), text))
        except ConfigError as error:
            return self._wrong(scalar, f"{short(text)}: {error}")
        return None if number is None else Scalar("", number, scalar.source, str(number))

    def _tuple(self, scalar: Scalar, text: str) -> Node:
        """A tuple, of which each item may be a reference, arithmetic or text with references."""
        taken = set(_STAND_IN.findall(text))
        stand_in = next(name for name in map("ref{}x".format, count()) if name not in taken)
        references: list[str] = []

        def put_away(found: re.Match[str]) -> str:
            references.append(found[0])
            return f"{stand_in}{len(references) - 1}."

        mistakes = Mistakes()
        root = read_tuple(_REFERENCE.sub(put_away, text), scalar.source, mistakes, self._budget)
        nodes: list[Node] = [root, *(node for _, node in walk(root))]
        if mistakes or any(isinstance(node, Mapping) for node in nodes):
            return self._wrong(scalar, f"{short(text)} is not a tuple: expected values with commas between them.")
        put_back = re.compile(rf"{stand_in}([0-9]+)\.")
        for node in nodes:
            self._names[node] = self._name(scalar)
            if isinstance(node, Scalar) and isinstance(node.value, str) and put_back.search(node.value):
                node.value = node.text = put_back.sub(lambda found: references[int(found[1])], node.value)
                node.tag, node.scope = scalar.tag, scalar.scope
        return self.resolved(nodes[0])

    def _interpolate(self, scalar: Scalar, text: str, nodes: dict[str, Node]) -> Node:
        """Text with the values put in as Python's `str` writes them, or the number that it then is."""
        values = {}
        for reference, node in nodes.items():
            value = self._plain_data(node)
            if value is NOT_PLAIN:
                what = "an attribute" if node.tag == ATTRIBUTE else node.tag or "a list or mapping with an object in it"
                return self._wrong(
                    scalar,
                    f"<{short(reference)}> is {what}, which cannot be part of a text: it is built later. "
                    "Use the reference alone, or refer to a value that it is built from.",
                )
            values[reference] = str(value)
        length = len(text) + sum(len(values[reference]) for reference in _REFERENCE.findall(text))
        if length > TEXT_CHARACTERS:
            return self._wrong(scalar, f"the text would have more than {TEXT_CHARACTERS:,} characters.")
        self._characters += length
        if self._characters > FILE_BYTES:
            raise LimitError(f"{scalar.source}: references expand to more than {FILE_BYTES:,} characters of text.")
        result = _REFERENCE.sub(lambda found: values[found[1]], text)
        number = number_of(result)
        return Scalar("", result if number is None else number, scalar.source, result)

    def _plain_data(self, node: Node) -> Any:
        """Return `plain_data` within a limit on its size, since it repeats shared nodes."""
        size = self._sizes[node]
        self._written += size.nodes if size.depth else 0
        if self._written > EXPANDED_NODES or size.characters > TEXT_CHARACTERS:
            raise LimitError(f"{node.source}: the value is too large for text or for an argument of !applyref:.")
        return plain_data(node)

    def _copy(self, node: Node, copies: dict[Node, Node]) -> Node:
        """Fresh nodes that share among them what the old ones share. No deeper than DEPTH, as each node is measured."""
        if node not in copies:
            self._budget.take_nodes(1, node.source)
            copies[node] = self._measured(_rebuilt(node, lambda below: self._copy(below, copies)))
        return copies[node]

    # What a reference names

    def _target(self, scalar: Scalar) -> Node:
        """Return the unresolved node at the end of a chain of references; `scalar` may be inside it."""
        if scalar not in self._targets:
            if scalar in self._following:
                return self._circular(scalar)
            with self._within(self._following, scalar):
                self._targets[scalar] = self._through(self._find(scalar, str(scalar.value)[1:-1]))
        return self._targets[scalar]

    def _find(self, scalar: Scalar, reference: str) -> Node:
        parts = _PARTS.fullmatch(reference)
        if not parts:
            shown = short(reference)
            return self._wrong(scalar, f"<{shown}> is not a reference; expected <key>, <key[sub]> or <key.attribute>.")
        node: Node = self._scope(scalar)
        keys = [parts[1], *parts[2][1:-1].split("][")] if parts[2] else [parts[1]]
        for depth, key in enumerate(keys):
            node = self._through(node)
            if isinstance(node, Unknown):
                return node
            below = self._below(node, key)
            if below is None:
                return self._wrong(scalar, self._not_there(scalar, reference, node, keys, depth))
            node = below
        return self._attribute(scalar, parts, node) if parts[3] else node

    def _through(self, node: Node) -> Node:
        """The node whose keys a reference reaches through `node`."""
        if isinstance(node, Scalar) and node.tag == REF and _REFERENCE.fullmatch(str(node.value)):
            return self._target(node)
        if node.tag in REFERENCES or node.tag.startswith((APPLYREF, INCLUDE)):
            return self.resolved(node)
        return node

    def _below(self, node: Node, key: str) -> Node | None:
        if isinstance(node, Mapping):
            if key in node.items:
                return node.items[key]
            if node not in self._other_keys:
                self._other_keys[node] = {str(known): known for known in node.items if not isinstance(known, str)}
            others = self._other_keys[node]
            return node.items[others[key]] if key in others else None
        if is_plain_sequence(node) and re.fullmatch("[0-9]{1,9}", key):
            return node.items[int(key)] if int(key) < len(node.items) else None
        return None

    def _attribute(self, scalar: Scalar, parts: re.Match[str], node: Node) -> Node:
        node = self._through(node)
        if isinstance(node, Unknown):
            return node
        names = parts[3].split(".")[1:]
        if wrong := self._wrong_attribute(scalar, parts, node, names):
            return self._wrong(scalar, f"<{short(parts[0])}>{wrong}")
        made = self.resolved(node)
        for name in names:
            items = [made, self._measured(Scalar("", name, scalar.source, name))]
            made = self._measured(Sequence(ATTRIBUTE, items, scalar.source))
        return made

    def _wrong_attribute(self, scalar: Scalar, parts: re.Match[str], node: Node, names: list[str]) -> str:
        """Why `node` cannot have attributes of these names; empty if it may."""
        if scalar.tag == COPY:
            return " is an attribute of an object, which !copy cannot copy; use !ref."
        if node.tag in ("", TUPLE):
            start = short(parts[1] + parts[2])
            key = f" Write <{start}[{short(names[0])}]>." if self._below(node, names[0]) is not None else ""
            return f": {start} is {_words(node)}, which has no attributes.{key}"
        for name in names:
            if not (name.isascii() and name.isidentifier()):
                return f": {short(name)!r} cannot be the name of an attribute."
        if any(name.startswith("_") for name in names):
            return ": a YAML may not use attributes that begin with _."
        return ""

    def _not_there(self, scalar: Scalar, reference: str, node: Node, keys: list[str], depth: int) -> str:
        """Return the mistake in a reference whose key at `depth` is not in `node`, with a suggestion."""
        start, shown, key = "".join(f"[{above}]" for above in keys[1:depth]), short(reference), keys[depth]
        above = short(keys[0] + start)
        scope = self._scope(scalar)
        if is_plain_sequence(node):
            return f"<{shown}>: {above} is a list of {len(node.items)}; expected one of its indices, from 0."
        if not isinstance(node, Mapping):
            built = "which is built later" if node.tag else "which has no keys"
            return f"<{shown}>: {above} is {_words(node)}, {built}."
        text = f"<{shown}>: {above} has no {short(key)}." if depth else f"<{shown}> refers to a key that is missing."
        is_hinted = len(self._mistakes) < _HINTED_MISTAKES and len(key) <= 100
        return text + self._hint(key, node, scope, depth) if is_hinted else text

    def _hint(self, key: str, node: Mapping, scope: Mapping, depth: int) -> str:
        """Return a suggestion for a key that is not in `node`."""
        if not depth and scope is not self._root and key in self._root.items:
            return f" An included file sees only its own keys; pass it the value below its tag: {key}: !ref <{key}>."
        return did_you_mean(key, list(node.items)[:_HINTED_KEYS]) or _elsewhere(key, scope)

    # Functions

    def _apply(self, node: Node) -> Node:
        """Return the result of the function of `!applyref:`, as nodes."""
        args, kwargs = self._arguments(node)
        below = [self.resolved(argument) for argument in [*args, *kwargs.values()]]
        values = [self._plain_data(argument) for argument in below]
        if any(map(self._is_unknown, below)):
            return self._unknown(node)
        for argument, value in zip(below, values, strict=True):
            if value is NOT_PLAIN:
                what = _words(argument)
                return self._wrong(node, f"{node.tag} takes plain data only, not {what}; use !apply: for objects.")
        if self._call is None:
            return self._unknown(node)
        result = self._called(
            self._call, node, values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        )
        said = f"{self._name(node)}: what {node.tag} returned (for an object, use !apply:)"
        made = self.resolved(to_nodes(result, node.source, self._mistakes, said))
        self._budget.take_nodes(self._sizes[made].nodes, node.source)
        return made

    def _called(self, call: Call, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return call(node.tag.removeprefix(APPLYREF), args, kwargs)
        except Exception as error:  # the function that the YAML names may raise anything
            words = str(error) if isinstance(error, AmpRecipesError) else f"{type(error).__name__}: {error}"
            cause = None if isinstance(error, AmpRecipesError) else error
            message = printable(f"{node.source}: {self._name(node)}: {node.tag} failed: {words}")
            raise ConfigError(message) from cause

    def _arguments(self, node: Node) -> tuple[list[Node], dict[str, Node]]:
        if isinstance(node, Sequence):
            return node.items, {}
        if not isinstance(node, Mapping):
            return [], {}
        if node.items.keys() == {"_args", "_kwargs"}:
            args, kwargs = self._through(node.items["_args"]), self._through(node.items["_kwargs"])
            if isinstance(args, Sequence) and isinstance(kwargs, Mapping) and not args.tag and not kwargs.tag:
                return args.items, self._keywords(kwargs)
            unknown = [below for below in (args, kwargs) if isinstance(below, Unknown)]
            return unknown or [self._wrong(node, "_args must be a list, and _kwargs a mapping.")], {}
        return [], self._keywords(node)

    def _keywords(self, node: Mapping) -> dict[str, Node]:
        wrong = "is not a string; the name of an argument must be one."
        return {
            str(key): item if isinstance(key, str) else self._wrong(item, f"{key!r} {wrong}")
            for key, item in node.items.items()
        }

    # The limits, and what goes wrong

    def _measured(self, node: Node) -> Node:
        """Return the node if its size is within the limits. The nodes below it have been measured."""
        if node in self._sizes:
            return node
        sizes = [self._sizes[child] for _, child in children(node)]
        if isinstance(node, Scalar):
            size = _Size(characters=len(node.value) if isinstance(node.value, str) else 0)
        else:
            depth = 1 + max((size.depth for size in sizes), default=0)
            size = _Size(1 + sum(size.nodes for size in sizes), depth, sum(size.characters for size in sizes))
        if size.depth > DEPTH:
            raise LimitError(f"{node.source}: lists and mappings are nested more than {DEPTH} levels deep.")
        if size.nodes > EXPANDED_NODES:
            raise LimitError(f"{node.source}: aliases and references expand to more than {EXPANDED_NODES:,} values.")
        self._sizes[node], self._resolved[node] = size, node
        return node

    def _is_unknown(self, node: Node) -> bool:
        return isinstance(node, Unknown) or any(isinstance(below, Unknown) for _, below in walk(node))

    @contextmanager
    def _within(self, active: set[Node], node: Node) -> Iterator[None]:
        if len(self._chain) >= _STEPS:
            raise LimitError(f"{node.source}: a chain of references has more than {_STEPS} steps.")
        active.add(node)
        self._chain.append(node)
        try:
            yield
        finally:
            self._chain.pop()
            active.remove(node)

    def _circular(self, node: Node) -> Node:
        """Tell of a chain of references that comes back to `node`, at the last of them."""
        between = [other for other in self._chain[self._chain.index(node) :] if other.tag in REFERENCES]
        names = list(dict.fromkeys(self._name(other) for other in [node, *between]))
        last = self._chain[-1]
        self._mistakes.add(last.source, f"{self._name(last)} refers to itself: {' -> '.join([*names, names[0]])}.")
        return self._unknown(last)

    def _wrong(self, node: Node, text: str) -> Node:
        self._mistakes.add(node.source, f"{self._name(node)}: {text}")
        return self._unknown(node)

    def _unknown(self, node: Node) -> Node:
        self._budget.take_nodes(1, node.source)  # one text may hold thousands of wrong references
        return self._measured(Unknown(node.tag, node.source))

    def _name(self, node: Node) -> str:
        return self._names.get(node, "")

    def _scope(self, scalar: Scalar) -> Mapping:
        return scalar.scope or self._root


def _rebuilt(node: Node, make: Callable[[Node], Node]) -> Node:
    """A fresh node like this one, with what `make` gives for each node directly below."""
    if isinstance(node, Mapping):
        items = {key: make(item) for key, item in node.items.items()}
        return Mapping(node.tag, items, node.source, dict(node.key_sources), dict(node.comments))
    if isinstance(node, Sequence):
        return Sequence(node.tag, [make(item) for item in node.items], node.source)
    if isinstance(node, Scalar):
        return Scalar(node.tag, node.value, node.source, node.text, node.scope)
    return node


def _operand(node: Node) -> str | None:
    """Return the text of a value for a formula; None if it is not a number."""
    text = _number_text(node.value) if is_plain_scalar(node) else ""
    # (-3) ** 2 is 9, as for a number, where the text -3 ** 2 would be -9.
    if text.startswith(("+", "-")):
        return f"({text})"
    return text or None


def _number_text(value: Any) -> str:
    """A number, or text that is one, as it can be read back; empty for everything else."""
    if isinstance(value, str):
        return value if _NUMBER_IN_TEXT.fullmatch(value[:400]) else ""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "1e999", -math.inf: "-1e999"}.get(value, "(1e999-1e999)")
    if isinstance(value, int) and value.bit_length() > NUMBER_BITS:
        return ""  # Python refuses to write it
    return repr(value) if isinstance(value, int | float) else ""


def _words(node: Node) -> str:
    if is_plain_mapping(node):
        return "a mapping"
    if is_plain_sequence(node):
        return "a tuple" if node.tag else "a list"
    return node.tag or short(getattr(node, "text", "") or str(getattr(node, "value", "")))


def _elsewhere(key: str, scope: Mapping) -> str:
    """A hint at a key of the same or nearly the same name at another depth."""
    paths = {path[-1]: path for path, _ in reversed(list(walk(scope)))}
    nearest = difflib.get_close_matches(key, list(paths)[:_HINTED_KEYS], n=1, cutoff=0.8)
    if not nearest:
        return ""
    head, *below = paths[nearest[0]]
    return f" Did you mean <{head}{''.join(f'[{name}]' for name in below)}>?"
