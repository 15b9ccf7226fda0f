"""How YAML text becomes a tree of nodes: nothing is executed, and every mistake gets its line.

ruamel's parser finds the events; the tree is composed here, without recursion and with the limits enforced as the
events come. Values are those of YAML 1.2, as HyperPyYAML reads them. Where it does not say the same twice, one
meaning is chosen: a quoted `"(1, 2)"` is text (HyperPyYAML: a tuple on the first load of a process, text later), and
the values of a tuple are of YAML 1.2 too (HyperPyYAML: 1.1, where `1e-3` is text, `yes` is true and `010` is 8).
"""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import Reader

from amp_recipes.config.limits import DEPTH, FILE_BYTES, NUMBER_BITS, TEXT_CHARACTERS, Budget, LimitError
from amp_recipes.config.nodes import Mapping, Mistakes, Node, Scalar, Sequence, Source, is_plain_mapping
from amp_recipes.config.run_options import did_you_mean
from amp_recipes.config.tags import CALLS, INCLUDE, PLACEHOLDER, REFERENCES, TAGS, TUPLE
from amp_recipes.errors import ConfigError

_STANDARD = "tag:yaml.org,2002:"
_INSTEAD = {"object/apply": "!apply:", "object/new": "!new:", "name": "!name:", "module": "!module:", "tuple": TUPLE}
TUPLE_TEXT = re.compile(r"^\(.*\)$")  # HyperPyYAML's own pattern
_LINE_BREAK = re.compile(r"\r\n|\n|\r")
_COMMENT = re.compile(r"\s#\s*(.*?)\s*$")
_FIRST_CHARACTER = re.compile(r"^[ \t]*([^\s#])", re.MULTILINE)
_NO_KEY: Any = object()
_BROKEN_KEY: Any = object()
_MERGE_KEY: Any = object()
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# The words of the tags without signs, in lower case, to find the one that was meant.
_WORDS = {tag.strip("!:").lower(): tag for tag in TAGS}

_YAML = YAML(typ="safe", pure=True)
_SCALARS = ("str", "int", "float", "bool", "null", "timestamp")
_CONSTRUCT = {kind: getattr(_YAML.constructor, f"construct_yaml_{kind}") for kind in _SCALARS}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "timestamp": "a date"}


def read_file(path: str, mistakes: Mistakes, budget: Budget, where: Source | None = None) -> Mapping | None:
    """The YAML file at `path` as a tree; None where it has none, which then stands among the mistakes.

    where: what asked for the file, if another file did. Raises LimitError for a file larger than the limits.
    """
    text = _text_of(path, mistakes, where or Source(path))
    if text is None:
        return None
    known = len(mistakes)
    root = read_text(text, path, mistakes, budget)
    if root is None and len(mistakes) > known:
        return None
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
    if found := Reader.NON_PRINTABLE.search(text):
        source = _place(name, text, found.start())
        mistakes.add(source, f"the character U+{ord(found.group()):04X} cannot stand in YAML; in quotes, write \\x..")
        return None
    if (found := _FIRST_CHARACTER.search(text)) and found[1] == "%":
        source = _place(name, text, found.start(1))
        mistakes.add(source, "directives (%) are not supported: YAML is read as 1.2; delete this line.")
        return None
    composer = _Composer(name, mistakes, budget, YAML(typ="safe", pure=True))
    try:
        root = composer.compose(text)
    except MarkedYAMLError as error:
        line, column, meaning = _explain(error, _LINE_BREAK.split(text))
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


def plain_value(text: str) -> Any:
    """The value of an unquoted scalar: null, true or false, a number, a date or text.

    Raises ConfigError where it looks like a number or a date but is none.
    """
    return _value(str(_YAML.resolver.resolve(ScalarNode, text, (True, False))).removeprefix(_STANDARD), text)


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end is still to come."""

    node: Sequence | Mapping
    flow: bool  # written with [ ] or { }
    key: Any = _NO_KEY
    merged: Node | None = None  # the value of `<<`


class _Stream:
    """Text for ruamel's reader, which scans a value to its end before it says anything; this stops it before."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.position, self.since_event = text, name, 0, 0

    def read(self, size: int) -> str:
        chunk = self.text[self.position : self.position + size]
        self.position += len(chunk)
        self.since_event += len(chunk)
        if self.since_event > 2 * TEXT_CHARACTERS:
            where = _place(self.name, self.text, self.position - self.since_event)
            raise LimitError(f"{where}: a value (or comment) of more than {TEXT_CHARACTERS:,} characters; use a file.")
        return chunk


@dataclass(eq=False, slots=True)
class _Composer:
    """One document in the making.

    tuple_source: where the `(...)` stands whose inside is read, in which tags and aliases are refused;
    depth: the levels of nesting in which it stands; reach: how far each line is known to be no comment.
    """

    file: str
    mistakes: Mistakes
    budget: Budget
    parser: YAML
    tuple_source: Source | None = None
    depth: int = 0
    line: int = 1
    root: Node | None = None
    tuple_parser: YAML | None = None  # kept, since making one looks for plug-ins on the disk
    references: list[Scalar] = field(default_factory=list)
    mappings: list[Mapping] = field(default_factory=list)
    stack: list[_Open] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    reach: dict[int, float] = field(default_factory=dict)

    def compose(self, text: str) -> Node | None:
        """The tree of the one document in `text`; None if there is none. Raises ruamel's errors for bad YAML."""
        stream = _Stream(text, self.file)
        begun = False
        for event in self.parser.parse(stream):
            stream.since_event = 0
            self.line = event.start_mark.line + 1
            if isinstance(event, events.DocumentStartEvent):
                if begun:
                    self.mistakes.add(Source(self.file, self.line, 1), "a second document begins here; expected one.")
                    break
                begun = True
            elif isinstance(event, events.NodeEvent):
                self._take(event)
            elif isinstance(event, events.CollectionEndEvent):
                self._note_reach(event)
                self._close()
        return self.root

    def add_comments(self, lines: list[str]) -> None:
        """Note the comment behind each key that is the first on its line."""
        first: dict[int, Source] = {}
        for mapping in self.mappings:
            for key, source in mapping.key_sources.items():
                reach = self.reach.get(source.line, 0)
                if first.setdefault(source.line, source) == source and math.isfinite(reach):
                    found = _COMMENT.search(lines[source.line - 1], int(reach))
                    if found and found[1]:
                        mapping.comments[key] = found[1]

    def _take(self, event: events.NodeEvent) -> None:
        mark = event.start_mark
        source = self.tuple_source or Source(self.file, mark.line + 1, mark.column + 1)
        self.budget.take_nodes(1, source)
        self._note_reach(event)
        is_alias = isinstance(event, events.AliasEvent)
        if self.tuple_source and (is_alias or event.tag is not None or event.anchor is not None):
            self.mistakes.add(source, "a tuple in parentheses holds plain data only; with tags, write !tuple [...].")
        if is_alias:
            self._add(self._aliased(event, source), source)
            return
        if self.tuple_source:
            event.ctag = None
        if isinstance(event, events.ScalarEvent):
            node = self._scalar(event, source)
            self._add(node, source, is_merge=event.value == "<<" and event.style is None and event.tag is None)
        else:
            if self.depth + len(self.stack) >= DEPTH:
                raise LimitError(f"{source}: lists and mappings are nested more than {DEPTH} levels deep.")
            if isinstance(event, events.SequenceStartEvent):
                node = Sequence(self._tag(event, "list", source), [], source)
            else:
                node = Mapping(self._tag(event, "mapping", source), {}, source)
                self.mappings.append(node)
            self.stack.append(_Open(node, bool(event.flow_style)))
        if event.anchor is not None:
            self.anchors[event.anchor] = node

    def _add(self, node: Node, source: Source, is_merge: bool = False) -> None:
        """Put a finished node where it belongs: into the list, or as a key or a value into the mapping."""
        if not self.stack:
            self.root = node
            return
        parent = self.stack[-1]
        if isinstance(parent.node, Sequence):
            parent.node.items.append(node)
        elif parent.key is _NO_KEY:
            parent.key = _MERGE_KEY if is_merge else self._key(parent.node, node, source)
        else:
            if parent.key is _MERGE_KEY:
                if parent.merged is not None:
                    self.mistakes.add(source, "<< stands twice in this mapping; write <<: [*first, *second].")
                parent.merged = node
            elif parent.key is not _BROKEN_KEY:
                parent.node.items[parent.key] = node
            parent.key = _NO_KEY

    def _close(self) -> None:
        done = self.stack.pop()
        if isinstance(done.node, Mapping) and done.merged is not None:
            self._merge(done.node, done.merged)
        self._add(done.node, done.node.source)

    def _key(self, mapping: Mapping, node: Node, source: Source) -> Any:
        if not isinstance(node, Scalar) or node.tag or not isinstance(node.value, str | int | float | None):
            self.mistakes.add(source, f"a key must be text or a number, but is {_describe(node)}; put it in quotes.")
            return _BROKEN_KEY
        if first := mapping.key_sources.get(node.value):
            again = f"stands at line {first.line} and again at line {source.line}; keep one."
            self.mistakes.add(source, f"{_short(node.text)} {again}")
            return _BROKEN_KEY
        mapping.key_sources[node.value] = source
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
        name = _short(event.anchor)
        if node is None:
            # Only among a few short names: difflib takes minutes for thousands.
            known = [anchor for anchor in self.anchors if len(anchor) < 40] if len(self.anchors) < 100 else []
            hint = did_you_mean(name, known, "*")
            self.mistakes.add(source, f"*{name} is used, but no &{name} stands above it.{hint}")
        elif any(node is above.node for above in self.stack):
            self.mistakes.add(source, f"*{name} stands inside of &{name}, which so contains itself.")
        else:
            return node
        return Scalar("", None, source)

    def _scalar(self, event: events.ScalarEvent, source: Source) -> Node:
        text, is_plain = event.value, event.style is None
        if len(text) > TEXT_CHARACTERS:
            raise LimitError(f"{source}: a value of more than {TEXT_CHARACTERS:,} characters; use a file.")
        if _SURROGATE.search(text):
            self.mistakes.add(source, "an escape (\\ud800 to \\udfff) is no character; write \\U and 8 digits.")
            return Scalar("", "", source)
        is_tuple = is_plain and bool(TUPLE_TEXT.match(text))
        is_cut = self.tuple_source or not is_tuple  # in `[(1, 2)]`, YAML sees the texts `(1` and `2)`
        if is_plain and text[:1] == "(" != text and is_cut and self.stack and self.stack[-1].flow:
            self.mistakes.add(source, f"{_short(text)} ends here; write !tuple [1, 2], or put text in quotes.")
        tag = self._tag(event, "text", source)
        if tag == TUPLE or (not tag and is_tuple):
            return self._tuple(text.strip(), source)
        if tag and not tag.startswith(_STANDARD):
            scalar = Scalar(tag, text, source, text)
            if tag in REFERENCES:
                self.references.append(scalar)
            return scalar
        try:
            value = _value(tag, text) if tag else plain_value(text) if is_plain else text
        except ConfigError as error:
            self.mistakes.add(source, str(error))
            value = text
        return Scalar("", value, source, text)

    def _tuple(self, text: str, source: Source) -> Node:
        """`(1, [2, 3])` as a tuple: its inside is read as the inside of a list."""
        self.tuple_parser = self.tuple_parser or YAML(typ="safe", pure=True)
        depth = self.depth + len(self.stack)
        inside = _Composer(self.file, self.mistakes, self.budget, self.tuple_parser, source, depth)
        try:
            inside.compose(f"[{text[1:-1]}]")
        except (YAMLError, IndexError) as error:
            why = getattr(error, "problem", None) or error
            self.mistakes.add(source, f"{_short(text)} is read as a tuple, but is none ({why}); put text in quotes.")
        return Sequence(TUPLE, inside.root.items if isinstance(inside.root, Sequence) else [], source)

    def _tag(self, event: events.NodeEvent, kind: str, source: Source) -> str:
        """The tag of an event; empty if it has none, or a wrong one, which then is among the mistakes."""
        tag = "" if event.tag is None else str(event.tag)
        text = event.value if isinstance(event, events.ScalarEvent) else ""
        if tag == "!" and re.match(rf"(?:{'|'.join(_WORDS)})\b", text.lower()):
            self.mistakes.add(source, f"a space stands behind the !; write !{_short(text)}.")
        if tag in ("", "!"):  # YAML's `! text` is the same as text
            return ""
        if wrong := _wrong_tag(tag, kind, text):
            self.mistakes.add(source, wrong)
            return ""
        return "" if tag in (f"{_STANDARD}seq", f"{_STANDARD}map") else tag

    def _note_reach(self, event: events.Event) -> None:
        """Remember which part of a line is a value, in which a # opens no comment."""
        start, end = event.start_mark, event.end_mark
        is_open = isinstance(event, events.ScalarEvent) and event.style in ("'", '"') and start.line < end.line
        for line, column in ((start.line, math.inf if is_open else start.column), (end.line, end.column)):
            self.reach[line + 1] = max(column, self.reach.get(line + 1, 0))


def _text_of(path: str, mistakes: Mistakes, where: Source) -> str | None:
    """What stands in a regular file, as text."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for whoever writes into it.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                mistakes.add(where, f"{path} cannot be read: it is no regular file.")
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


def _place(name: str, text: str, index: int) -> Source:
    return Source(name, text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


def _value(tag: str, text: str) -> Any:
    """The value that a standard tag, given or resolved, makes of text. Raises ConfigError."""
    kind = tag.removeprefix(_STANDARD)
    if kind not in _CONSTRUCT:  # `=` and `<<`, which YAML 1.1 gave a meaning
        return text
    try:
        if kind == "int" and len(text) > 2 * NUMBER_BITS:
            raise OverflowError
        value = _CONSTRUCT[kind](ScalarNode(tag, text))
        if kind == "int" and value.bit_length() > NUMBER_BITS:
            raise OverflowError
    except OverflowError:
        raise ConfigError(f"{_short(text)} is too large a number; put it in quotes if it is text.") from None
    except (ValueError, LookupError, YAMLError):
        raise ConfigError(f"{_short(text)} is not {_KINDS.get(kind, kind)}; put it in quotes if it is text.") from None
    return value


def _wrong_tag(tag: str, kind: str, text: str) -> str:
    """What is wrong with a tag that stands before text, a list or a mapping; empty if nothing is."""
    head, colon, name = tag.partition(":")
    head, shown = head + colon, _short(tag)
    if tag.startswith(_STANDARD):
        return _wrong_standard_tag(tag.removeprefix(_STANDARD), kind)
    if tag in (*REFERENCES, PLACEHOLDER):
        if kind != "text":
            return f"{tag} takes a text, but a {kind} stands below it."
        return "" if text.strip() or tag == PLACEHOLDER else f"{tag} needs a reference behind it: {tag} <key>."
    if tag == TUPLE:
        fits = kind == "list" or (kind == "text" and TUPLE_TEXT.match(text.strip()))
        return "" if fits else "!tuple takes (1, 2), or a list: !tuple [1, 2]."
    if head in (*CALLS, INCLUDE):
        if not name:
            return f"{head} needs a name directly behind it, without a space: {head}{_short(text.strip()) or 'name'}."
        if not name.isprintable():
            return f"the name behind {head} has characters that cannot be printed: {_short(name)}."
        if name[-1] in ",]":
            return f"{shown} ends with {name[-1]!r}: put a space between the name and what follows."
        if text.strip():
            return f"{shown} has {_short(text)} behind it; arguments must be a list or a mapping."
        if head == INCLUDE and kind == "list":
            return f"{shown} takes a mapping of values for the file, but a list stands below it."
        return ""
    return _unknown_tag(tag, text)


def _wrong_standard_tag(name: str, kind: str) -> str:
    fitting = {"seq": "list", "map": "mapping"}.get(name, "text" if name in _CONSTRUCT else "")
    if fitting:
        return "" if fitting == kind else f"!!{name} takes a {fitting}, but a {kind} stands here."
    if name.startswith("python/"):
        what, _, target = name.removeprefix("python/").partition(":")
        advice = f"write {_INSTEAD[what]}{_short(target)}" if what in _INSTEAD else "write the plain value"
        return f"!!{_short(name)}: Python tags are never executed; {advice}."
    return _unknown_tag(f"!!{name}", "")


def _unknown_tag(tag: str, text: str) -> str:
    _bangs, word, rest = re.fullmatch(r"(!*)(\w*)(.*)", tag, re.DOTALL).groups()  # type: ignore[union-attr]
    nearest = difflib.get_close_matches(word.lower(), _WORDS, n=1)
    if not nearest:
        return f"there is no tag {_short(tag)}; expected one of {', '.join(TAGS)}."
    meant = _WORDS[nearest[0]]
    name = rest.lstrip(":.;=/-") or (text.strip().split(" ")[0] if meant.endswith(":") else "")
    return f"there is no tag {_short(tag)}. Did you mean {_short(meant + name)}?"


def _describe(node: Node | None) -> str:
    if node is None or node.tag:
        return f"a {_short(node.tag)}" if node else "empty"
    if isinstance(node, Scalar):
        return f"the {'text' if isinstance(node.value, str) else 'value'} {_short(node.text)}"
    return "a list" if isinstance(node, Sequence) else "a mapping"


def _short(text: str) -> str:
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 60 else f"{text[:57]}..."


# What ruamel's parser says, what the line above and the line of the mistake hold, and what it means, with groups of the
# second in braces. A ^ in front of the meaning: the mistake is where the list, the quote ... opens.
_MEANINGS = [
    (r"'\\t' that cannot start", "", "a tab indents this line; use spaces."),
    (r"cannot start|',' or", r"<[^<>\n]*\[.*\Z", 'inside [ ] or {{ }} this needs quotes: !ref "<a[b]>".'),
    (r"cannot start", "", "a value cannot begin with this character; put it in quotes."),
    (r"mapping values", r"^\s*(?:- +)*([\w.-]+):\S.*\n", "a space is missing behind `{0}:` in the line above."),
    (r"mapping values", r"\n.*:\s.*:", "a second colon with a space behind it; put the value in quotes."),
    (r"mapping values", "", "a key below a value; is the line above complete, and the indentation right?"),
    (r"expected ':'", r"\n\s*(?:- +)*([\w.-]+):\S.*\Z", "^a space is missing behind `{0}:`."),
    (r"expected ':'", "", "^a key without its colon."),
    (r"end of stream|document separator", "", "^the quote that opens here is never closed."),
    (r"quoted.*escape", "", "no escape of YAML; write \\\\ for a backslash, or use single quotes."),
    (r"expected ',' or", r"\n.*(![^\s!]*[\w.])\].*\Z", "^a space is missing between {0} and its bracket."),
    (r"expected ',' or '([]}])'", "", "^the bracket that opens here is not closed."),
    (r"expected ' ', but found", r"(![\w:./-]*)[^\w:./-].*\Z", "a space is missing behind {0}."),
    (r"scanning a tag|undefined tag", "", f"^not a tag; expected one of {', '.join(TAGS)}."),
    (r"scanning an (?:alias|anchor)", "", "^* and & open an alias or an anchor; put text in quotes."),
    (r"sequence entries", "", "a list item (-) behind its key; put it on the next line, or write [ ]."),
    (r"expected the node content", "", "a value is missing here."),
    (r"found \(?'<(?:scalar|alias)", "", "text behind a value that has ended; put all of it in quotes."),
    (r"<block end>.*'[]},]'", "", "a bracket is closed, or a comma given, that no [ or {{ has opened."),
    (r"<block end>|<document start>", "", "the indentation fits none of the lines above."),
    (r"block scalar", "", "behind | or > only +, - or a number may stand."),
]


def _explain(error: MarkedYAMLError, lines: list[str]) -> tuple[int, int, str]:
    """Line, column and meaning of what ruamel's parser stumbled over, with the line and a caret under the column."""
    said = f"{error.context or ''}: {error.problem or ''}"
    for pattern, around, meaning in [*_MEANINGS, ("", "", "")]:
        at_opening = meaning.startswith("^") and error.context_mark
        mark = error.context_mark if at_opening else error.problem_mark or error.context_mark
        above, line = ["", *lines][mark.line : mark.line + 2]
        # Cut, since these patterns take quadratic time for a line that is made for it.
        if re.search(pattern, said) and (found := re.search(around, f"{above[:300]}\n{line[:300]}")):
            break
    meaning = meaning.removeprefix("^").format(*found.groups()) or f"{said.strip(': ')}."
    first = max(0, mark.column - 60)
    shown = line[first : first + 100].replace("\t", "\N{RIGHTWARDS ARROW}")
    caret = f"\n      {shown}\n      {' ' * (mark.column - first)}^" if shown.strip() else ""
    return mark.line + 1, mark.column + 1, f"{meaning}{caret}"
