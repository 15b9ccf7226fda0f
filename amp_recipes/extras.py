"""Says what to install where a recipe's import fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amp_recipes.config.options.plain_errors import show_mistakes_plainly
from amp_recipes.errors import ConfigError


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Name the extra of amp-recipes that has the packages which are imported inside.

    with needs_extra("image"):
        from PIL import Image

    Raises ConfigError, which says what to install, for a package that is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        show_mistakes_plainly()  # a recipe's imports come before what reads its command line
        raise ConfigError(
            f"'{error.name}' is not installed. Install what this recipe needs: pip install 'amp-recipes[{extra}]'"
        ) from None
