"""Writes a tree as YAML text that reads back as the same tree, here and by HyperPyYAML."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.config.yaml.nodes import (
    Key,
    KeyPath,
    Mapping,
    Node,
    Scalar,
    Sequence,
    Unknown,
    children,
    is_plain_scalar,
    scalar_text,
    walk,
)
from amp_recipes.config.yaml.reading import plain_value
from amp_recipes.config.yaml.tags import TUPLE
from amp_recipes.config.yaml.words import TUPLE_TEXT
from amp_recipes.errors import ConfigError

# A line of text, and its key.
_Line: TypeAlias = "tuple[str, KeyPath | None]"

_FLOW_CHARACTERS = 80  # a list of plain values up to this length is written on one line
_SIMPLE_KEY_CHARACTERS = 1000  # YAML: 1,024; a longer key is written after `?`
_ALIGNED_CHARACTERS = 72  # the sources after the keys of a mapping are aligned up to this length of a line

# Text that needs no quotes in any place; the pattern rather matches too few texts than too many.
_WITHOUT_QUOTES = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*(?: [A-Za-z0-9_./+=][A-Za-z0-9_./+=-]*)*")
_YAML_1_1_WORDS = frozenset({"yes", "no", "on", "off", "true", "false", "null"})
_BLOCK_LINE = re.compile(r"(?:[ -~\xa1-\ud7ff]*[!-~\xa1-\ud7ff])?")  # printable, without white space at its end
_NOT_PRINTABLE = re.compile("[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_TAG_ESCAPES = re.compile(r"[^A-Za-z0-9\-;/?:@&=+$_.!~*'()#]")


def to_yaml(root: Mapping, header: Iterable[str] = ()) -> str:
    """YAML text of a tree: values, types, tags, and one object where several keys share one.

    header: lines of comment above it.
    """
    comments = [f"# {one_line(line)}".rstrip() for text in header for line in text.splitlines() or [""]]
    return "\n".join([*comments, *(line for line, _ in _document(root)), ""])


def with_sources(root: Mapping, source_of: Callable[[KeyPath], str]) -> str:
    """The YAML text of a tree with `# file:line`, or another text of `source_of`, after each key."""
    lines = _document(root)
    columns: dict[KeyPath, int] = {}
    for line, path in lines:
        if path and len(line) <= _ALIGNED_CHARACTERS:
            columns[path[:-1]] = max(len(line), columns.get(path[:-1], 0))
    shown = []
    for line, path in lines:
        source = one_line(source_of(path)) if path else ""
        shown.append(f"{line:<{columns.get(path[:-1], 0)}}  # {source}" if path and source else line)
    return "\n".join([*shown, ""])


def _document(root: Mapping) -> list[_Line]:
    writer = _Writer(root)
    return list(writer.keys(root, (), "")) if root.items else [("{}", None)]


class _Writer:
    """The writer of one text; it records which nodes are shared, and which of these were already written."""

    def __init__(self, root: Mapping) -> None:
        nodes = [root, *(node for _, node in walk(root))]
        self._uses = Counter(child for node in nodes for _, child in children(node))
        self._anchors: dict[Node, str] = {}

    def keys(self, mapping: Mapping, path: KeyPath, indent: str) -> Iterator[_Line]:
        """The lines of a mapping's keys."""
        for key, node in mapping.items.items():
            key_path = (*path, str(key))
            text = _plain_text(key)
            if len(text) > _SIMPLE_KEY_CHARACTERS:
                yield f"{indent}? {text}", None
                text = ""
            behind, below = self._value(node, key_path, indent + "  ")
            yield f"{indent}{text}:{behind and ' '}{behind}", key_path
            yield from below

    def _items(self, sequence: Sequence, path: KeyPath, indent: str) -> Iterator[_Line]:
        for index, node in enumerate(sequence.items):
            behind, lines = self._value(node, (*path, str(index)), indent + "  ")
            below = list(lines)
            if not behind:  # a mapping or list begins on the line of the dash
                behind, first_path = below.pop(0)
                yield f"{indent}- {behind.lstrip()}", first_path
            else:
                yield f"{indent}- {behind}", None
            yield from below

    def _value(self, node: Node, path: KeyPath, indent: str) -> tuple[str, Iterable[_Line]]:
        """Return the text on the line of a key or dash, and the lines below it."""
        if node in self._anchors:
            return f"*{self._anchors[node]}", ()
        marks = self._marks(node)
        if isinstance(node, Unknown):
            return f"null  # (known after {node.tag} is called)", ()
        if isinstance(node, Scalar):
            return self._scalar(node, marks, indent)
        if line := self._on_a_line(node, marks):
            return line, ()
        if isinstance(node, Mapping):
            return " ".join(marks), self.keys(node, path, indent)
        return " ".join(marks), self._items(node, path, indent)

    def _scalar(self, node: Scalar, marks: list[str], indent: str) -> tuple[str, Iterable[_Line]]:
        if not node.tag:
            return _scalar(node.value, indent)
        return " ".join([*marks, _plain_text(str(node.value))] if node.value else marks), ()

    def _on_a_line(self, node: Sequence | Mapping, marks: list[str]) -> str:
        """All of a list or mapping, if it fits on one line; else empty."""
        if isinstance(node, Sequence) and node.tag == TUPLE and self._fits_on_a_line(node):
            return " ".join([*marks[:-1], _tuple(node)])
        if not node.items:
            return " ".join([*marks, "{}" if isinstance(node, Mapping) else "[]"])
        if isinstance(node, Mapping) or not all(is_plain_scalar(item) for item in node.items):
            return ""
        flow = _flow(node)
        # Text in quotes not in [ ]: ruamel, with which HyperPyYAML writes it anew, takes some of the quotes away.
        return " ".join([*marks, flow]) if len(flow) <= _FLOW_CHARACTERS and '"' not in flow else ""

    def _fits_on_a_line(self, sequence: Sequence) -> bool:
        """Whether all below is plain data: no call, no tuple, nothing shared."""
        below = [node for _, node in walk(sequence)]
        is_shared = any(self._uses[node] > 1 and not isinstance(node, Scalar) for node in below)
        return not is_shared and not any(node.tag or isinstance(node, Unknown) for node in below)

    def _marks(self, node: Node) -> list[str]:
        """The anchor of a shared node, which it gets here, and the tag."""
        marks = []
        if self._uses[node] > 1 and (node.tag or not isinstance(node, Scalar)):
            self._anchors[node] = f"shared{len(self._anchors) + 1}"  # not id001: ruamel gives such names again
            marks.append(f"&{self._anchors[node]}")
        return [*marks, _tag(node.tag)] if node.tag else marks


def _scalar(value: Any, indent: str) -> tuple[str, Iterable[_Line]]:
    """A plain value; text of several lines is written unchanged below its key, if YAML allows it."""
    lines = value.removesuffix("\n").split("\n") if isinstance(value, str) and "\n" in value else []
    if not lines or not _is_block(lines):
        return _plain_text(value), ()
    return "|" if value.endswith("\n") else "|-", [(f"{indent}{line}" if line else "", None) for line in lines]


def _is_block(lines: list[str]) -> bool:
    """Whether YAML can hold lines as they are: neither blank nor indented at the start, nor blank at the end."""
    opens = bool(lines[0]) and not lines[0].startswith(" ")
    return opens and bool(lines[-1]) and all(map(_BLOCK_LINE.fullmatch, lines))


def _plain_text(value: Key | datetime.date, quoted: bool = False) -> str:
    """A plain value on one line; in quotes where it would read as something else. quoted: text always in quotes."""
    if isinstance(value, str):
        return _text(value, quoted)
    if isinstance(value, float):
        return _float(value)
    return scalar_text(value)


def _text(value: str, quoted: bool) -> str:
    may_stand_bare = _WITHOUT_QUOTES.fullmatch(value) and value.lower() not in _YAML_1_1_WORDS
    if not quoted and may_stand_bare and _is_text(value):
        return value
    text = json.dumps(value, ensure_ascii=False)  # JSON's text is YAML's, but for what YAML calls unprintable
    text = _NOT_PRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    # HyperPyYAML forgets the quotes and makes a tuple of "(1, 2)", in its first load of a process.
    return f"!!str {text}" if not quoted and TUPLE_TEXT.match(value) else text


def _is_text(text: str) -> bool:
    try:
        return plain_value(text) == text
    except ConfigError:
        return False


def _float(value: float) -> str:
    """A float that YAML 1.1 and 1.2, and HyperPyYAML, read as exactly this one."""
    text = scalar_text(value)
    mantissa, exponent, power = text.partition("e")
    if not exponent:
        return text
    # Without a point, 1e-05 is text for YAML 1.1. Without zeros after a long mantissa, HyperPyYAML, which writes the
    # text anew with ruamel, loses its last digit: of 4,000 random floats 664 were changed, none with the zeros.
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{mantissa.ljust(20, '0') if len(mantissa) > 8 else mantissa}e{power}"


def _flow(node: Node, quoted: bool = False) -> str:
    """Plain data on one line."""
    if isinstance(node, Sequence):
        return f"[{', '.join(_flow(item, quoted) for item in node.items)}]"
    if isinstance(node, Mapping):
        pairs = (f"{_plain_text(key, quoted)}: {_flow(item, quoted)}" for key, item in node.items.items())
        return f"{{{', '.join(pairs)}}}"
    return _plain_text(node.value, quoted) if isinstance(node, Scalar) else "null"


def _tuple(node: Sequence) -> str:
    """A tuple of plain data as HyperPyYAML writes it, in parentheses; its text in quotes, as 1.1 must read it too."""
    inside = _flow(node, quoted=True)[1:-1] + ("," if len(node.items) == 1 else "")
    text = f"({inside})"
    ends = re.search(r":(?:\s|$)|\s#", text)  # what would end unquoted text
    return f"{TUPLE} {_plain_text(text, quoted=True)}" if ends else text


def _tag(tag: str) -> str:
    """A tag with what a tag cannot hold as %XX; a % itself twice so, since ruamel decodes it twice."""
    escaped = tag.replace("%", "%25")
    return _TAG_ESCAPES.sub(lambda found: "".join(f"%{byte:02X}" for byte in found.group().encode()), escaped)
