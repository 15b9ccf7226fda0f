"""Says what to install where a recipe's import fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        raise ConfigError(
            f"'{error.name}' is not installed. Install what this recipe needs: pip install 'amp-recipes[{extra}]'"
        ) from error
