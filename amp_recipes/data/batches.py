"""Turns the dataset of a recipe into an iterable of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from amp_recipes.errors import DataError, RecipeError


def as_batches(
    data: Any, name: str, loader_kwargs: Mapping[str, Any], make_loader: Callable[..., DataLoader]
) -> Iterable[Any]:
    """A loader made of `data` if it holds samples, else `data` itself, which yields batches.

    A torch Dataset holds samples. So does a list, or whatever else has a length and an index, if loader kwargs are
    given; without them it holds batches. name: what messages call it. Raises DataError for what is neither, and for
    loader kwargs of an iterable without an index.
    """
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes, Mapping))
    if isinstance(data, Dataset) or (indexed and loader_kwargs):
        return make_loader(data, **loader_kwargs)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
        raise DataError(f"{name} is a {type(data).__name__}; expected a torch Dataset or an iterable of batches.")
    if loader_kwargs:
        raise DataError(
            f"{name} is a {type(data).__name__}, which yields batches already, but loader kwargs were given: "
            f"{', '.join(loader_kwargs)}. Give a torch Dataset or a list of samples, or set them in the loader."
        )
    return data


def as_epochs(counter: Any) -> Iterable[int]:
    """`counter` as it is. Raises RecipeError for what does not count epochs, such as their number."""
    if isinstance(counter, Iterable) and not isinstance(counter, str):
        return counter
    number = counter if type(counter) is int else 10
    raise RecipeError(
        f"fit: the epochs must be an iterable, but are {counter!r:.200}; give EpochCounter({number}), or "
        f"range(1, {number + 1})."
    )


def windows(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The batches in lists of `size`; the last list holds what is left."""
    while window := list(islice(batches, size)):
        yield window


def length(items: Any) -> int | None:
    """Return the number of items (batches, samples); None if they cannot be counted."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):  # torch's data pipes have a __len__ that raises
        return None
