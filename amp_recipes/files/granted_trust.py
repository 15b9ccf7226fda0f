"""Reads the `--trust` words of the command line that started this process; a YAML cannot change them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

_TRUSTED = "AMP_RECIPES_TRUSTED"  # the variable that holds what the command line trusts


def names_in(text: str) -> list[str]:
    """The names in `a,b` or `[a, b]`."""
    return [part.strip() for part in text.strip("[]").split(",") if part.strip()]


def trust_in(words: Sequence[str]) -> list[str]:
    """The names that `--trust` gives among the words of a command line."""
    texts = [word.removeprefix("--trust=") for word in words if word.startswith("--trust=")]
    texts += [text for word, text in pairwise(words) if word == "--trust"]
    return [name for text in texts for name in names_in(text)]


def granted_trust() -> list[str]:
    """The names that the process's own command line trusts, or that of the script which started this process."""
    return [*trust_in(sys.orig_argv), *names_in(os.environ.get(_TRUSTED, ""))]


# For processes that a script starts by multiprocessing: their own command line is Python's.
os.environ.setdefault(_TRUSTED, ",".join(trust_in(sys.orig_argv)))
