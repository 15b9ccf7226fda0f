"""Reads values that are typed on a command line.

They are YAML 1.2 scalars and flow collections, as they would be in the file. What YAML would refuse, or read as
something other than what was typed (tags, anchors, comments, block collections, dates), is the typed text.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.events import AliasEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from amp_recipes.config.options.run_options import OPTION_TYPES, option_choices
from amp_recipes.config.yaml.limits import TEXT_CHARACTERS

_LINE_BREAKS = frozenset("\n\r\x85\u2028\u2029")
# What one value may hold; more is text, as is all that YAML would refuse: the YAML reader's time grows with the square.
_ITEMS, _COLLECTIONS, _OPENING = 10_000, 500, ("[", "{", "? ", "- ")
# A date is left out: nobody who types 2024-01-02 for a folder's name wants a date object.
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))


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
    """Do the same as `parse_value`, but raise any exception if the text is not plain YAML."""
    if any(map(_is_marked, YAML(typ="safe", pure=True).parse(text))):
        raise ValueError("anchors, aliases and tags are not plain values")
    yaml = YAML(typ="safe", pure=True)
    root = yaml.compose(text)
    # A comment, or a second document, lies outside the root node.
    if text[: root.start_mark.index].strip() or text[root.end_mark.index :].strip():
        raise ValueError("more than one value")
    value = _construct(yaml, root)
    is_plain_text = isinstance(root, ScalarNode) and root.style is None and isinstance(value, str)
    return text if is_plain_text else value


def _is_marked(event: Any) -> bool:
    """Whether a part of a YAML has an anchor or a tag, or is an alias."""
    if isinstance(event, AliasEvent) or getattr(event, "tag", None) is not None:
        return True
    return isinstance(event, NodeEvent) and event.anchor is not None


def _construct(yaml: YAML, node: Node) -> Any:
    if isinstance(node, ScalarNode):
        if node.style in ("|", ">") or node.tag == "tag:yaml.org,2002:merge":
            raise ValueError("block scalars and merges are not plain values")
        return yaml.constructor.construct_object(node) if node.tag in _PLAIN_TAGS else node.value
    if not node.flow_style:
        raise ValueError("a block collection, as in `a: b`, is more often meant as text")
    if isinstance(node, SequenceNode):
        return [_construct(yaml, item) for item in node.value]
    assert isinstance(node, MappingNode)
    return _construct_mapping(yaml, node)


def _construct_mapping(yaml: YAML, node: MappingNode) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if value_node.start_mark.index == value_node.end_mark.index:
            raise ValueError("`{name}` is more often a template than a mapping to nothing")
        key = _construct(yaml, key_node)
        if key in mapping:
            raise ValueError("the same key twice")
        mapping[key] = _construct(yaml, value_node)
    return mapping
