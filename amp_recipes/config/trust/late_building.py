"""Names the key of a YAML whose object could not be built, also if it is built after the YAML was loaded."""

from __future__ import annotations

import functools
from typing import Any

import torch

from amp_recipes.errors import AmpRecipesError, ConfigError


class LateClass(functools.partial):
    """The result of `!name:` for a class with arguments: a call adds the missing ones and builds the object.

    place: `x.yaml:7:3: opt_class: !name:torch.optim.Adam`. Raises ConfigError that names it where the object cannot be
    built. A call that the class's signature refuses is a mistake of the caller's, and raises TypeError.
    """

    place = ""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:
            is_callers = error.__traceback__.tb_next is None  # raised by the call itself
            if is_callers or isinstance(error, torch.OutOfMemoryError):  # who catches that tries again with less
                raise
            raise_unbuilt(self.place, error)


def raise_unbuilt(place: str, error: Exception, what: str = "cannot be built") -> None:
    """Raise ConfigError for what the code that a YAML names raised; place: the YAML's line, the key, the tag."""
    if isinstance(error, AmpRecipesError):
        # What the framework says is for people already: the way there would only hide it.
        raise ConfigError(f"{place} {what}: {error}") from None
    raise ConfigError(f"{place} {what}: {type(error).__name__}: {error}") from error
