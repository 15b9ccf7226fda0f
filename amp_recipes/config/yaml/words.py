"""Explains mistakes in YAML text: unknown tags, and text that is not YAML."""

from __future__ import annotations

import difflib
import re

from ruamel.yaml.error import MarkedYAMLError, StringMark

from amp_recipes.config.yaml.mistakes import short
from amp_recipes.config.yaml.tags import CALLS, INCLUDE, PLACEHOLDER, REFERENCES, TAGS, TUPLE

STANDARD = "tag:yaml.org,2002:"
SCALARS = ("str", "int", "float", "bool", "null", "timestamp")
TUPLE_TEXT = re.compile(r"^\(.*\)$")  # HyperPyYAML's own pattern

_INSTEAD = {"object/apply": "!apply:", "object/new": "!new:", "name": "!name:", "module": "!module:", "tuple": TUPLE}
# The words of the tags without signs, in lower case, to find the one that was meant.
_WORDS = {tag.strip("!:").lower(): tag for tag in TAGS}
_BEFORE_A_WORD = re.compile(rf"(?:{'|'.join(_WORDS)})\b", re.IGNORECASE)
_IN_FLOW = re.compile(r"[],[]")  # YAML takes these for a part of a tag that they follow


def begins_as_a_tag(text: str) -> bool:
    """Whether text begins with the word of a tag (`ref <b>`), which a space separates from its !."""
    return bool(_BEFORE_A_WORD.match(text))


def wrong_tag(tag: str, kind: str, text: str, with_hint: bool = True) -> str:
    """Return the mistake in a tag of a text, a list or a mapping; empty if there is none.

    with_hint: name the tag that was meant, the search for which takes time.
    """
    head, colon, name = tag.partition(":")
    if tag.startswith(STANDARD):
        return _wrong_standard_tag(tag.removeprefix(STANDARD), kind, with_hint)
    if tag in (*REFERENCES, PLACEHOLDER):
        return _wrong_reference(tag, kind, text)
    if tag == TUPLE:
        fits = kind == "list" or (kind == "text" and TUPLE_TEXT.match(text.strip()))
        return "" if fits else "!tuple takes (1, 2), or a list: !tuple [1, 2]."
    if head + colon in (*CALLS, INCLUDE):
        return _wrong_call(head + colon, name, kind, text)
    return _unknown_tag(tag, text, with_hint)


def _wrong_reference(tag: str, kind: str, text: str) -> str:
    if kind != "text":
        return f"{tag} takes a text, but has a {kind} below it."
    return "" if text.strip() or tag == PLACEHOLDER else f"{tag} needs a reference after it: {tag} <key>."


def _wrong_call(head: str, name: str, kind: str, text: str) -> str:
    """The same for a tag that a name follows: `!new:`, `!include:`, ..."""
    shown = short(head + name)
    if not name:
        return f"{head} needs a name directly after it, without a space: {head}{short(text.strip()) or 'name'}."
    if not name.isprintable():
        return f"the name after {head} has characters that cannot be printed: {short(name)}."
    found = _IN_FLOW.search(name, len(name) - 1 if head == INCLUDE else 0)  # the name of a file may hold one
    if found:
        return f"a space is missing between {short(head + name[: found.start()])} and {found[0]}"
    if text.strip():
        return f"{shown} has {short(text)} after it; arguments must be a list or a mapping."
    if head == INCLUDE and kind == "list":
        return f"{shown} takes a mapping of values for the file, but has a list below it."
    return ""


def _wrong_standard_tag(name: str, kind: str, with_hint: bool) -> str:
    fitting = {"seq": "list", "map": "mapping"}.get(name, "text" if name in SCALARS else "")
    if fitting:
        return "" if fitting == kind else f"!!{name} takes a {fitting}, but this is a {kind}."
    if name.startswith("python/"):
        what, _, target = name.removeprefix("python/").partition(":")
        advice = f"write {_INSTEAD[what]}{short(target)}" if what in _INSTEAD else "write the plain value"
        return f"!!{short(name)}: Python tags are never executed; {advice}."
    return _unknown_tag(f"!!{name}", "", with_hint)


def _unknown_tag(tag: str, text: str, with_hint: bool) -> str:
    _bangs, word, rest = re.fullmatch(r"(!*)(\w*)(.*)", tag, re.DOTALL).groups()  # type: ignore[union-attr]
    nearest = difflib.get_close_matches(word.lower(), _WORDS, n=1) if with_hint else []
    if not nearest:
        return f"there is no tag {short(tag)}; expected one of {', '.join(TAGS)}."
    meant = _WORDS[nearest[0]]
    name = rest.lstrip(":.;=/-") or (text.strip().split(" ")[0] if meant.endswith(":") else "")
    return f"there is no tag {short(tag)}. Did you mean {short(meant + name)}?"


# What ruamel's parser says, what the line above and the line of the mistake hold, and what it means, with groups of the
# second in braces. A ^ in front of the meaning: the mistake is where the list, the quote ... opens.
_MEANINGS = [
    (r"'\\t' that cannot start", "", "this line is indented with a tab; use spaces."),
    (r"cannot start|',' or", r"<[^<>\n]*\[.*\Z", 'inside [ ] or {{ }} this needs quotes: !ref "<a[b]>".'),
    (r"cannot start", "", "a value cannot begin with this character; put it in quotes."),
    (r"mapping values", r"^\s*(?:- +)*([\w.-]+):\S.*\n", "a space is missing after `{0}:` in the line above."),
    (r"mapping values", r"\n.*:\s.*:", "a second colon followed by a space; put the value in quotes."),
    (r"mapping values", "", "a key below a value; is the line above complete, and is the indentation right?"),
    (r"expected ':'", r"\n\s*(?:- +)*([\w.-]+):\S.*\Z", "^a space is missing after `{0}:`."),
    (r"expected ':'", "", "^a key without its colon."),
    (r"end of stream|document separator", "", "^the quote that opens here is never closed."),
    (r"quoted.*escape", "", "not an escape of YAML; write \\\\ for a backslash, or use single quotes."),
    (r"expected ',' or '([]}])'", "", "^the bracket that opens here is not closed."),
    (r"scanning a tag|undefined tag", "", f"^not a tag; expected one of {', '.join(TAGS)}."),
    (r"scanning an (?:alias|anchor)", "", "^* and & start an alias or an anchor; put text in quotes."),
    (r"sequence entries", "", "a list item (-) on the line of its key; put it on the next line, or write [ ]."),
    (r"expected the node content", "", "a value is missing here."),
    (r"found \(?'<(?:scalar|alias)", "", "text after the end of a value; put all of it in quotes."),
    (r"<block end>.*'[]},]'", "", "a closing bracket or a comma, but no [ or {{ is open."),
    (r"<block end>|<document start>", "", "the indentation matches none of the lines above."),
    (r"block scalar", "", "only +, - or a number may follow | or >."),
]


def explain(error: MarkedYAMLError, lines: list[str]) -> tuple[int, int, str]:
    """Return the line, column and meaning of an error of ruamel's parser, with a caret under the column."""
    mark, meaning = _end_of_tag(error, lines) or _meaning(error, lines)
    line = lines[mark.line]
    first = max(0, mark.column - 60)
    shown = line[first : first + 100].replace("\t", "\N{RIGHTWARDS ARROW}")
    caret = f"\n      {shown}\n      {' ' * (mark.column - first)}^" if shown.strip() else ""
    return mark.line + 1, mark.column + 1, f"{meaning}{caret}"


def _end_of_tag(error: MarkedYAMLError, lines: list[str]) -> tuple[StringMark, str] | None:
    """The mark and the meaning of a character that cannot follow a tag, as the } of `{a: !name:torch.float64}`."""
    start, end = error.context_mark, error.problem_mark
    if error.context != "while scanning a tag" or "expected ' '" not in error.problem or start.line != end.line:
        return None
    tag, behind = lines[end.line][start.column : end.column], lines[end.line][end.column : end.column + 1]
    if found := _IN_FLOW.search(tag):
        tag, behind = tag[: found.start()], found[0]
    if behind.isalnum():
        return end, f"{behind} is not allowed in a tag."
    return end, f"a space is missing between {short(tag)} and {behind}"


def _meaning(error: MarkedYAMLError, lines: list[str]) -> tuple[StringMark, str]:
    said = f"{error.context or ''}: {error.problem or ''}"
    for pattern, around, meaning in [*_MEANINGS, ("", "", "")]:
        at_opening = meaning.startswith("^") and error.context_mark
        mark = error.context_mark if at_opening else error.problem_mark or error.context_mark
        above, line = ["", *lines][mark.line : mark.line + 2]
        # Cut, since these patterns take quadratic time for a line that is made for it.
        if re.search(pattern, said) and (found := re.search(around, f"{above[:300]}\n{line[:300]}")):
            break
    return mark, meaning.removeprefix("^").format(*found.groups()) or f"{said.strip(': ')}."
