"""Reads YAML text as a tree of nodes: nothing is executed, and every mistake gets its line.

ruamel's parser finds the events; the tree is composed here, without recursion and with the limits enforced as the
events come. Values are those of YAML 1.2, as HyperPyYAML reads them. Where it does not say the same twice, one
meaning is chosen: a quoted `"(1, 2)"` is text (HyperPyYAML: a tuple on the first load of a process, text later), and
the values of a tuple are of YAML 1.2 too (HyperPyYAML: 1.1, where `1e-3` is text, `yes` is true and `010` is 8).
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import Reader
from ruamel.yaml.scanner import Scanner

from amp_recipes.config.yaml.limits import DEPTH, FILE_BYTES, NUMBER_BITS, TEXT_CHARACTERS, Budget, LimitError
from amp_recipes.config.yaml.mistakes import did_you_mean, short
from amp_recipes.config.yaml.nodes import Mapping, Mistakes, Node, Scalar, Sequence, Source, is_plain_mapping
from amp_recipes.config.yaml.tags import REFERENCES, TUPLE
from amp_recipes.config.yaml.words import SCALARS, STANDARD, TUPLE_TEXT, begins_as_a_tag, explain, wrong_tag
from amp_recipes.errors import ConfigError

_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_COMMENT = re.compile(r"\s#")
_FIRST_CHARACTER = re.compile(r"^[ \t]*([^\s#])", re.MULTILINE)
_NO_KEY: Any = object()
_BROKEN_KEY: Any = object()
_MERGE_KEY: Any = object()
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# A tuple that needs no parser: names and numbers with commas between them.
_FLAT_TUPLE = re.compile(r"\( *-?[\w.+]+(?: *, *-?[\w.+]+)*(?: *,)? *\)", re.ASCII)
_FLAT_CHARACTERS = 200
_COMMENT_CHARACTERS = 500
_HINTED_MISTAKES = 20  # the search for the nearest name takes time

_YAML = YAML(typ="safe", pure=True)
_CONSTRUCT = {kind: getattr(_YAML.constructor, f"construct_yaml_{kind}") for kind in SCALARS}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "timestamp": "a date"}


def read_file(path: str, mistakes: Mistakes, budget: Budget, where: Source | None = None) -> Mapping | None:
    """Return the YAML file at `path` as a tree; None, and a mistake, if it has none.

    where: what asked for the file, if another file did. Raises LimitError for a file larger than the limits.
    """
    text = _text_of(path, mistakes, where or Source(path))
    if text is None:
        return None
    budget.take_characters(len(text), where or path)
    known = len(mistakes)
    root = read_text(text, path, mistakes, budget)
    return None if root is None and len(mistakes) > known else _as_top_level(root, path, mistakes)


def _as_top_level(root: Node | None, path: str, mistakes: Mistakes) -> Mapping | None:
    """Return the root of a file if it is a mapping; keys that are not text are mistakes."""
    if root is None or not is_plain_mapping(root):
        place = root.source if root else Source(path)
        mistakes.add(place, f"the top level must be a mapping of names to values (lr: 0.1), but is {_describe(root)}.")
        return None
    for key, source in root.key_sources.items():
        if not isinstance(key, str):
            mistakes.add(source, f"{key!r} must be a string, as every key at the top level; put it in quotes.")
    return root


def read_text(text: str, name: str, mistakes: Mistakes, budget: Budget) -> Node | None:
    """YAML text as a tree whose sources say `name`; None where it is empty or broken.

    Raises LimitError for text larger than the limits.
    """
    if len(text) > FILE_BYTES:
        raise LimitError(f"{name}: is larger than {FILE_BYTES:,} bytes; put data into a data file.")
    if _has_wrong_character(text, name, mistakes):
        return None
    composer = _Composer(name, mistakes, budget, _Parser())
    try:
        root = composer.compose(text)
    except MarkedYAMLError as error:
        if not (composer.took_bracket and "expected ',' or" in str(error.problem)):  # else it has been reported
            line, column, meaning = explain(error, _LINE_BREAK.split(text))
            mistakes.add(Source(name, line, column), f"not valid YAML: {meaning}")
        return None
    except (ValueError, OverflowError) as error:  # from escapes that are no characters
        if isinstance(error, LimitError):
            raise
        mistakes.add(Source(name, composer.line), f"not valid YAML here or below: {error}.")
        return None
    composer.add_comments(_LINE_BREAK.split(text))
    if isinstance(root, Mapping):
        for reference in composer.references:
            reference.scope = root
    return root


def read_tuple(text: str, source: Source, mistakes: Mistakes, budget: Budget) -> Sequence:
    """Return the text `(1, a, [2])` at `source` as a tuple of plain data. Raises LimitError."""
    return _Composer(source.file, mistakes, budget, _Parser()).tuple_of(text, source)


def plain_value(text: str) -> Any:
    """The value of an unquoted scalar: null, true or false, a number, a date or text.

    Raises ConfigError where it looks like a number or a date but is none.
    """
    return _value(str(_YAML.resolver.resolve(ScalarNode, text, (True, False))).removeprefix(STANDARD), text)


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end is still to come."""

    node: Sequence | Mapping
    flow: bool  # written with [ ] or { }
    key: Any = _NO_KEY
    merged: Node | None = None  # the value of `<<`
    key_texts: dict[Any, str] = field(default_factory=dict)  # keys as they were written


class _Scanner(Scanner):
    """ruamel's scanner, which reads a thousand characters ahead; this stops it at the limit."""

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        if self.flow_level >= DEPTH:
            raise _too_deep(self.reader.stream.place(self.reader.get_mark()))
        super().fetch_flow_collection_start(TokenClass, to_push)


class _Parser(YAML):
    """ruamel's pure parser, without its search for plug-ins on the disk, which takes longer than a small text."""

    def __init__(self) -> None:
        super().__init__(typ="safe", pure=True)
        self.Scanner = _Scanner

    def official_plug_ins(self) -> list[str]:
        return []


class _Stream:
    """Text for ruamel's reader, which scans a value to its end before it returns; this stops it at the limit."""

    def __init__(self, text: str, name: str, place: Callable[[Any], Source]) -> None:
        self.text, self.name, self.place, self.position, self.since_event = text, name, place, 0, 0

    def read(self, size: int) -> str:
        chunk = self.text[self.position : self.position + size]
        self.position += len(chunk)
        self.since_event += len(chunk)
        if self.since_event > 2 * TEXT_CHARACTERS:
            where = _place(self.name, self.text, self.position - self.since_event)
            limit = f"{TEXT_CHARACTERS:,} characters"
            raise LimitError(f"{where}: a value or comment has more than {limit}; put it into a file.")
        return chunk


@dataclass(eq=False, slots=True)
class _Composer:
    """The builder of one document.

    tuple_source: the source of the `(...)` that is being read, in which tags and aliases are refused;
    depth: its level of nesting; reach: up to where each line is known to be no comment;
    took_bracket: a tag contains a bracket that belongs to the list or mapping around it.
    """

    file: str
    mistakes: Mistakes
    budget: Budget
    parser: YAML
    tuple_source: Source | None = None
    depth: int = 0
    line: int = 1
    took_bracket: bool = False
    root: Node | None = None
    tuple_parser: YAML | None = None
    references: list[Scalar] = field(default_factory=list)
    mappings: list[Mapping] = field(default_factory=list)
    stack: list[_Open] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    reach: dict[int, float] = field(default_factory=dict)

    def compose(self, text: str) -> Node | None:
        """The tree of the one document in `text`; None if there is none. Raises ruamel's errors for bad YAML."""
        stream = _Stream(text, self.file, self._place)
        begun = False
        for event in self.parser.parse(stream):
            stream.since_event = 0
            self.line = event.start_mark.line + 1
            if isinstance(event, events.DocumentStartEvent):
                if begun:
                    text = "a second document begins here; a file must hold only one."
                    self.mistakes.add(Source(self.file, self.line, 1), text)
                    break
                begun = True
            elif isinstance(event, events.NodeEvent):
                self._take(event)
            elif isinstance(event, events.CollectionEndEvent):
                self._note_reach(event)
                self._close()
        return self.root

    def add_comments(self, lines: list[str]) -> None:
        """Add the comment after each key that is the first on its line."""
        first: dict[int, Source] = {}
        for mapping in self.mappings:
            for key, source in mapping.key_sources.items():
                reach = self.reach.get(source.line, 0)
                if first.setdefault(source.line, source) == source and math.isfinite(reach):
                    line = lines[source.line - 1]
                    found = _COMMENT.search(line, int(reach))
                    if found and (comment := line[found.end() :].strip()):
                        mapping.comments[key] = comment[:_COMMENT_CHARACTERS]

    def _place(self, mark: StreamMark) -> Source:
        return self.tuple_source or Source(self.file, mark.line + 1, mark.column + 1)

    def _take(self, event: events.NodeEvent) -> None:
        source = self._place(event.start_mark)
        self.budget.take_nodes(1, source)
        self._note_reach(event)
        is_alias = isinstance(event, events.AliasEvent)
        if self.tuple_source and (is_alias or event.tag is not None or event.anchor is not None):
            self.mistakes.add(source, "a tuple in parentheses holds plain data only; to use tags, write !tuple [...].")
        if is_alias:
            self._add(self._aliased(event, source), source)
            return
        if self.tuple_source:
            event.ctag = None
        if isinstance(event, events.ScalarEvent):
            node = self._scalar(event, source)
            self._add(node, source, is_merge=event.value == "<<" and event.style is None and event.tag is None)
        else:
            node = self._opened(event, source)
        if event.anchor is not None:
            self.anchors[event.anchor] = node

    def _opened(self, event: events.NodeEvent, source: Source) -> Sequence | Mapping:
        """The list or mapping that begins here, to which what follows is added."""
        if self.depth + len(self.stack) >= DEPTH:
            raise _too_deep(source)
        node: Sequence | Mapping
        if isinstance(event, events.SequenceStartEvent):
            node = Sequence(self._tag(event, "list", source), [], source)
        else:
            node = Mapping(self._tag(event, "mapping", source), {}, source)
            self.mappings.append(node)
        self.stack.append(_Open(node, bool(event.flow_style)))
        return node

    def _add(self, node: Node, source: Source, is_merge: bool = False) -> None:
        """Put a finished node where it belongs: into the list, or as a key or a value into the mapping."""
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if isinstance(parent.node, Sequence):
            parent.node.items.append(node)
        elif parent.key is _NO_KEY:
            parent.key = _MERGE_KEY if is_merge else self._key(parent, node, source)
        else:
            if parent.key is _MERGE_KEY:
                if parent.merged is not None:
                    self.mistakes.add(source, "<< is used twice in this mapping; write <<: [*first, *second].")
                parent.merged = node
            elif parent.key is not _BROKEN_KEY:
                parent.node.items[parent.key] = node
            parent.key = _NO_KEY

    def _close(self) -> None:
        done = self.stack.pop()
        if isinstance(done.node, Mapping) and done.merged is not None:
            self._merge(done.node, done.merged)
        self._add(done.node, done.node.source)

    def _key(self, parent: _Open, node: Node, source: Source) -> Any:
        if not isinstance(node, Scalar) or node.tag or not isinstance(node.value, str | int | float | None):
            self.mistakes.add(source, f"a key must be text or a number, but is {_describe(node)}; put it in quotes.")
            return _BROKEN_KEY
        sources: dict[Any, Source] = parent.node.key_sources  # type: ignore[union-attr]
        if node.value in sources:
            text, first, line = parent.key_texts[node.value], sources[node.value].line, source.line
            again = f"is given at line {first} and again at line {line}; keep one."
            if text != node.text:
                again = f"at line {line} is the same key as {short(text)} at line {first}; put one of them in quotes."
            self.mistakes.add(source, f"{short(node.text)} {again}")
            return _BROKEN_KEY
        sources[node.value], parent.key_texts[node.value] = source, node.text
        return node.value

    def _merge(self, mapping: Mapping, merged: Node) -> None:
        """Add the keys of `<<`: a mapping's own keys win, then the first of several mappings."""
        givers = merged.items if isinstance(merged, Sequence) and not merged.tag else [merged]
        items: dict[Any, Node] = {}
        sources: dict[Any, Source] = {}
        for giver in reversed(givers):
            if not isinstance(giver, Mapping):
                self.mistakes.add(merged.source, f"<< takes a mapping, or a list of them, but got {_describe(giver)}.")
                continue
            self.budget.take_nodes(len(giver.items), merged.source)
            items |= giver.items
            sources |= giver.key_sources
        mapping.items, mapping.key_sources = items | mapping.items, sources | mapping.key_sources

    def _aliased(self, event: events.AliasEvent, source: Source) -> Node:
        node = self.anchors.get(event.anchor)
        name = short(event.anchor)
        if node is None:
            hint = did_you_mean(name, self.anchors, "*") if len(self.mistakes) < _HINTED_MISTAKES else ""
            self.mistakes.add(source, f"*{name} is used, but &{name} is not defined above it.{hint}")
        elif any(node is above.node for above in self.stack):
            self.mistakes.add(source, f"*{name} is used inside &{name}, so the value would contain itself.")
        else:
            return node
        return Scalar("", None, source)

    def _scalar(self, event: events.ScalarEvent, source: Source) -> Node:
        text, is_plain = event.value, event.style is None
        if len(text) > TEXT_CHARACTERS:
            raise LimitError(f"{source}: a value has more than {TEXT_CHARACTERS:,} characters; put it into a file.")
        if _SURROGATE.search(text):
            self.mistakes.add(source, "the escapes \\ud800 to \\udfff are not characters; write \\U and 8 digits.")
            return Scalar("", "", source)
        is_tuple = is_plain and bool(TUPLE_TEXT.match(text))
        if is_plain and self._is_cut_tuple(text, is_tuple):
            self.mistakes.add(source, f"{short(text)} ends here; write !tuple [1, 2], or put text in quotes.")
        tag = self._tag(event, "text", source)
        if tag == TUPLE or (not tag and is_tuple):
            return self.tuple_of(text.strip(), source)
        if tag and not tag.startswith(STANDARD):
            return self._tagged(tag, text, source)
        if is_plain or tag:
            return self._plain(text, source, tag)
        return Scalar("", text, source, text)

    def _is_cut_tuple(self, text: str, is_tuple: bool) -> bool:
        """Whether text is the start of a tuple in a list: in `[(1, 2)]`, YAML sees the texts `(1` and `2)`."""
        in_flow = bool(self.stack) and self.stack[-1].flow
        return in_flow and text[:1] == "(" != text and (self.tuple_source is not None or not is_tuple)

    def _tagged(self, tag: str, text: str, source: Source) -> Scalar:
        scalar = Scalar(tag, text, source, text)
        if tag in REFERENCES:
            self.references.append(scalar)
        return scalar

    def _plain(self, text: str, source: Source, tag: str = "") -> Scalar:
        """An unquoted scalar, or one with a standard tag, as the value that it is."""
        try:
            value = _value(tag, text) if tag else plain_value(text)
        except ConfigError as error:
            self.mistakes.add(source, str(error))
            value = text
        return Scalar("", value, source, text)

    def tuple_of(self, text: str, source: Source) -> Sequence:
        """`(1, [2, 3])` as a tuple: its inside is read as the inside of a list."""
        depth = self.depth + len(self.stack)
        if depth < DEPTH and len(text) <= _FLAT_CHARACTERS and _FLAT_TUPLE.fullmatch(text):
            items = [item.strip(" ") for item in text[1:-1].split(",")]
            items = items if items[-1] else items[:-1]
            self.budget.take_nodes(1 + len(items), source)
            return Sequence(TUPLE, [self._plain(item, source) for item in items], source)
        self.tuple_parser = self.tuple_parser or _Parser()
        inside = _Composer(self.file, self.mistakes, self.budget, self.tuple_parser, source, depth)
        try:
            inside.compose(f"[{text[1:-1]}]")
        except (YAMLError, IndexError) as error:
            why = getattr(error, "problem", None) or error
            self.mistakes.add(source, f"{short(text)} looks like a tuple, but is not one ({why}); put text in quotes.")
        return Sequence(TUPLE, inside.root.items if isinstance(inside.root, Sequence) else [], source)

    def _tag(self, event: events.NodeEvent, kind: str, source: Source) -> str:
        """The tag of an event; empty if it has none, or a wrong one, which then is among the mistakes."""
        tag = "" if event.tag is None else str(event.tag)
        text = event.value if isinstance(event, events.ScalarEvent) else ""
        if tag == "!" and begins_as_a_tag(text):
            self.mistakes.add(source, f"there is a space after the !; write !{short(text)}.")
        if tag in ("", "!"):  # YAML's `! text` is the same as text
            return ""
        if wrong := wrong_tag(tag, kind, text, with_hint=len(self.mistakes) < _HINTED_MISTAKES):
            self.mistakes.add(source, wrong)
            self.took_bracket = self.took_bracket or "]" in tag
            return ""
        return "" if tag in (f"{STANDARD}seq", f"{STANDARD}map") else tag

    def _note_reach(self, event: events.Event) -> None:
        """Record which part of a line is a value, in which a # starts no comment."""
        start, end = event.start_mark, event.end_mark
        is_open = isinstance(event, events.ScalarEvent) and event.style in ("'", '"') and start.line < end.line
        for line, column in ((start.line, math.inf if is_open else start.column), (end.line, end.column)):
            self.reach[line + 1] = max(column, self.reach.get(line + 1, 0))


def _text_of(path: str, mistakes: Mistakes, where: Source) -> str | None:
    """Return the text of a regular file."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for whoever writes into it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                mistakes.add(where, f"{path} cannot be read: it is not a regular file.")
                return None
            data = stream.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        siblings = Path(path).parent.glob("*.y*ml") if isinstance(error, FileNotFoundError) else []
        why = getattr(error, "strerror", None) or error
        mistakes.add(where, f"{path} cannot be read: {why}.{did_you_mean(path, siblings)}")
        return None
    if len(data) > FILE_BYTES:
        raise LimitError(f"{path}: the YAML is larger than {FILE_BYTES:,} bytes; put data into a data file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        mistakes.add(Source(path, line, column), f"byte 0x{data[error.start]:02x} is not UTF-8; save it as UTF-8.")
        return None


def _has_wrong_character(text: str, name: str, mistakes: Mistakes) -> bool:
    """Whether text has a character that YAML cannot have there; it is then among the mistakes."""
    if found := Reader.NON_PRINTABLE.search(text):
        source = _place(name, text, found.start())
        mistakes.add(source, f"the character U+{ord(found.group()):04X} is not allowed in YAML; in quotes, write \\x..")
        return True
    found = _FIRST_CHARACTER.search(text)
    if found and found[1] == "%":
        source = _place(name, text, found.start(1))
        mistakes.add(source, "directives (%) are not supported: YAML is read as 1.2; delete this line.")
        return True
    return False


def _too_deep(source: Source) -> LimitError:
    return LimitError(f"{source}: lists and mappings are nested more than {DEPTH} levels deep.")


def _place(name: str, text: str, index: int) -> Source:
    return Source(name, text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def _value(tag: str, text: str) -> Any:
    """The value that a standard tag, given or resolved, makes of text. Raises ConfigError."""
    kind = tag.removeprefix(STANDARD)
    if kind not in _CONSTRUCT:  # `=` and `<<`, which YAML 1.1 gave a meaning
        return text
    try:
        if kind == "int" and len(text) > 2 * NUMBER_BITS:
            raise OverflowError
        value = _CONSTRUCT[kind](ScalarNode(tag, text))
        if kind == "int" and value.bit_length() > NUMBER_BITS:
            raise OverflowError
    except OverflowError:
        raise ConfigError(f"{short(text)} is too large a number; put it in quotes if it is text.") from None
    except (ValueError, LookupError, YAMLError):
        raise ConfigError(f"{short(text)} is not {_KINDS.get(kind, kind)}; put it in quotes if it is text.") from None
    return value


def _describe(node: Node | None) -> str:
    if node is None or node.tag:
        return f"a {short(node.tag)}" if node else "empty"
    if isinstance(node, Scalar):
        return f"the {'text' if isinstance(node.value, str) else 'value'} {short(node.text)}"
    return "a list" if isinstance(node, Sequence) else "a mapping"
