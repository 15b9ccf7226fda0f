"""Limits the size of a YAML in every way in which a small file could expand and fill the memory."""

from __future__ import annotations

from dataclasses import dataclass

from amp_recipes.config.yaml.mistakes import printable
from amp_recipes.errors import ConfigError

FILE_BYTES = 1 << 20  # one file; a list of data belongs into a file of its own
NODES = 20_000  # keys and values as written, over all files, and what `!copy` makes of them
EXPANDED_NODES = 100_000  # the same, each alias and reference counted as if it were written out
DEPTH = 50  # levels of nesting
TEXT_CHARACTERS = 100_000  # one value, also after references are put in
INCLUDED_FILES = 100
CHARACTERS = 2 << 20  # of all files; a comment takes its time too
FORMULA_CHARACTERS = 100_000  # of all arithmetic, with the numbers put in
NUMBER_BITS = 1_024  # of a whole number that arithmetic makes: what a float can still hold


class LimitError(ConfigError):
    """A YAML is larger than anything that a person would write."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # raised at once, not collected with the mistakes, which are made printable


@dataclass
class Budget:
    """The remaining limits for all files of one load. Each method raises LimitError beyond its limit."""

    nodes: int = NODES
    files: int = INCLUDED_FILES
    characters: int = CHARACTERS
    formula_characters: int = FORMULA_CHARACTERS

    def take_nodes(self, count: int, where: object) -> None:
        """Count keys and values."""
        self.nodes -= count
        if self.nodes < 0:
            raise LimitError(f"{where}: the YAML has more than {NODES:,} keys and values; put data into a data file.")

    def take_file(self, where: object) -> None:
        """Count a file that is included."""
        self.files -= 1
        if self.files < 0:
            raise LimitError(f"{where}: more than {INCLUDED_FILES} files are included.")

    def take_characters(self, count: int, where: object) -> None:
        """Count text before it is read."""
        self.characters -= count
        if self.characters < 0:
            raise LimitError(f"{where}: all files together have more than {CHARACTERS:,} characters; include fewer.")

    def take_formula(self, count: int, where: object) -> None:
        """Count the characters of a formula."""
        self.formula_characters -= count
        if self.formula_characters < 0:
            raise LimitError(f"{where}: more than {FORMULA_CHARACTERS:,} characters of arithmetic; compute in Python.")
