"""Lists the YAML's own keys for `--help`: names, values as they are written, and the comments beside them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from amp_recipes.config.changes import written
from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.config.yaml.nodes import KeyPath, Mapping, Node, Scalar, Sequence, children, dotted, is_plain_mapping
from amp_recipes.config.yaml.tags import CALLS, TUPLE

_NAME_COLUMNS = 44  # a longer name and value push the comment to the next line
_VALUE_CHARACTERS = 40
_LEAST_COMMENT_COLUMNS = 20


def keys_help(root: Mapping, width: int | None = None) -> str:
    """The YAML's own keys, one a line: dotted name, value as it is written, comment; empty where there are none.

    `--name` marks what takes a value on the command line;
    an object is named without dashes above its arguments. width: of the terminal, by default.
    """
    rows = [(f"  {name} {value}".rstrip(), comment) for name, value, comment in _Rows().below(root, ())]
    width = shutil.get_terminal_size().columns - 2 if width is None else width
    commented = [len(left) for left, comment in rows if comment and len(left) <= _NAME_COLUMNS]
    column = max(commented, default=0) + 2
    columns = max(width - column, _LEAST_COMMENT_COLUMNS)
    lines: list[str] = []
    for left, comment in rows:
        wrapped = textwrap.wrap(comment, columns)
        if wrapped and len(left) + 2 <= column:
            left = f"{left:<{column}}{wrapped.pop(0)}"
        lines += [left, *(" " * column + line for line in wrapped)]
    return "\n".join(lines)


class _Rows:
    """Every key, in the order of the file; a node that several keys share is entered once."""

    def __init__(self) -> None:
        self._entered: dict[Node, KeyPath] = {}
        self._named: dict[Node, bool] = {}

    def below(self, parent: Node, parent_path: KeyPath) -> Iterator[tuple[str, str, str]]:
        """Yield for each key its option (its name, if it takes no value), its value and its comment."""
        for key, node in children(parent):
            path = (*parent_path, str(key))
            name = one_line(dotted(path))
            comment = one_line(parent.comments.get(key, "")) if isinstance(parent, Mapping) else ""
            if node in self._entered:
                yield name, f"as {one_line(dotted(self._entered[node]))}", comment
                continue
            self._entered[node] = path
            if not self._has_names(node) or node.tag:
                # An object takes no plain value, only its arguments do.
                yield (name if node.tag.startswith(CALLS) else f"--{name}"), self._as_written(node), comment
            elif comment:  # else the keys below say all there is
                yield name, "", comment
            if self._has_names(node):
                yield from self.below(node, path)

    def _has_names(self, node: Node) -> bool:
        """Whether a node has keys below it; a list of values is one value."""
        if node not in self._named:
            below = [child for _, child in children(node)]
            named = bool(below) if isinstance(node, Mapping) else any(map(self._has_names, below))
            self._named[node] = named or any(child.tag.startswith(CALLS) for child in below)
        return self._named[node]

    def _as_written(self, node: Node) -> str:
        """A value in one line, cut where it is long; of what has keys below it, the tag."""
        text = ""
        for piece in self._pieces(node):
            text += one_line(piece)
            if len(text) > _VALUE_CHARACTERS:
                return text[: _VALUE_CHARACTERS - 3] + "..."
        return text

    def _pieces(self, node: Node) -> Iterator[str]:
        if isinstance(node, Sequence) and not self._has_names(node):
            opening, closing = "()" if node.tag == TUPLE else (f"{node.tag} [".lstrip(), "]")
            yield opening
            for index, item in enumerate(node.items):
                yield ", " if index else ""
                yield from self._pieces(item)
            yield closing
        elif isinstance(node, Scalar):
            is_text = not node.tag and isinstance(node.value, str)
            yield written(node.value) if is_text else f"{node.tag} {node.text}".strip() or "null"
        else:
            yield "{}" if is_plain_mapping(node) else node.tag
