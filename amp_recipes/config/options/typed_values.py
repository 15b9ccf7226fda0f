"""Reads values that are typed on a command line.

They are YAML 1.2 scalars and flow collections, as they would be in the file. What YAML would refuse, or read as
something other than what was typed (tags, anchors, comments, block collections, tuples, dates), is the typed text.
"""

from __future__ import annotations

import datetime
from typing import Any

from amp_recipes.config.options.run_options import OPTION_TYPES, option_choices
from amp_recipes.config.yaml.limits import TEXT_CHARACTERS, Budget
from amp_recipes.config.yaml.nodes import COMMAND_LINE, Mistakes, Node, Scalar, Source, plain_data, walk
from amp_recipes.config.yaml.reading import read_tuple

_LINE_BREAKS = frozenset("\n\r\x85\u2028\u2029")
# What one value may hold; more is text, as is all that YAML would refuse: the YAML reader's time grows with the square.
_ITEMS, _COLLECTIONS, _OPENING = 10_000, 500, ("[", "{", "? ", "- ")
_QUOTES = ("'", '"')
_CLOSING = {"[": "]", "{": "}", **{quote: quote for quote in _QUOTES}}


def parse_value(text: str) -> Any:
    """The plain value that `text` is in YAML 1.2; `text` itself where YAML would change or refuse it."""
    if not text.strip() or not _LINE_BREAKS.isdisjoint(text) or _is_large(text):
        return text
    try:
        return _plain_value(text)
    except Exception:  # whatever makes the YAML reader stumble, the typed text is the value
        return text


def option_value(name: str, text: str) -> Any:
    """The value of a run option: text stays text for an option that is one (a folder named 007)."""
    value = parse_value(text)
    if OPTION_TYPES[name] == list[str]:
        return _string_list(value, text)
    holds_text = OPTION_TYPES[name] == (str | None) or option_choices(name)
    return text if holds_text and value is not None and not isinstance(value, str) else value


def _is_large(text: str) -> bool:
    return len(text) > TEXT_CHARACTERS or text.count(",") > _ITEMS or sum(map(text.count, _OPENING)) > _COLLECTIONS


def _string_list(value: Any, text: str) -> Any:
    """A list of strings; `[*.norm, model.head]` too, which YAML would take for an alias."""
    if isinstance(value, str) and text.startswith("[") and text.endswith("]"):
        return [item.strip().strip("'\"") for item in text[1:-1].split(",") if item.strip()]
    return value if isinstance(value, list) else [text]


def _plain_value(text: str) -> Any:
    """As `parse_value`, with any exception where the text is not plain YAML that says what was typed."""
    mistakes, typed = Mistakes(), text.strip()
    # In a tuple of one, tags, anchors, comments and what goes over several lines are mistakes.
    (node,) = read_tuple(f"({text})", Source(COMMAND_LINE), mistakes, Budget()).items
    mistakes.raise_if_any(COMMAND_LINE)
    if isinstance(node, Scalar) and node.text == typed:
        return text if isinstance(node.value, str | datetime.date) else node.value
    if _CLOSING[typed[0]] != typed[-1] or isinstance(node, Scalar) != (typed[0] in _QUOTES) or "<<" in text:
        raise ValueError("something stands behind the value, or it is a pair, or a merge")
    for _, below in walk(node):
        _write_date_as_text(below)
    return plain_data(node)


def _write_date_as_text(node: Node) -> None:
    if isinstance(node, Scalar) and isinstance(node.value, datetime.date):
        node.value = node.text
    if isinstance(node, Scalar) and node.value is None and not node.text:
        raise ValueError("`{name}` is more often a template than a mapping to nothing")
