"""What the framework logs in a block, without a fixture."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(match: str = "") -> Iterator[list[str]]:
    """The warnings that are logged inside this context; one of them must match."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("amp_recipes")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
    assert any(re.search(match, text) for text in texts), f"no warning matches {match!r} in {texts}"
