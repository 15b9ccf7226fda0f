"""Formats rows as a table that reads well on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The lines of an aligned Markdown table, whose first row is its head."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers="firstrow", tablefmt="github", disable_numparse=True)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns without lines, the first to the left and the others to the right; the first row is the head."""
    sides = ("left", *["right"] * (len(rows[0]) - 1))
    return tabulate(
        rows, headers="firstrow", tablefmt="plain", colalign=sides, disable_numparse=True, preserve_whitespace=True
    )
