"""What a recipe gives as a data set, as an iterable of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from amp_recipes.errors import DataError, RecipeError


def as_batches(
    data: Any, name: str, loader_kwargs: Mapping[str, Any], make_loader: Callable[..., DataLoader]
) -> Iterable[Any]:
    """A loader made of `data` if it is a torch Dataset (of samples), else `data` itself (of batches).

    name: what messages call it. Raises DataError for what is neither, and for loader kwargs without a Dataset.
    """
    if isinstance(data, Dataset):
        return make_loader(data, **loader_kwargs)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
        raise DataError(f"{name} is a {type(data).__name__}; expected a torch Dataset or an iterable of batches.")
    if loader_kwargs:
        raise DataError(
            f"{name} is a {type(data).__name__}, which yields batches already, but loader kwargs were given: "
            f"{', '.join(loader_kwargs)}. Give a torch Dataset, or set them where the loader is made."
        )
    return data


def as_epochs(counter: Any) -> Iterable[int]:
    """`counter` as it is. Raises RecipeError for what does not count epochs, such as their number."""
    if isinstance(counter, Iterable) and not isinstance(counter, str):
        return counter
    number = counter if isinstance(counter, int) else 10
    raise RecipeError(
        f"fit: the epochs are {counter!r:.200}; expected what counts them: EpochCounter({number}), or "
        f"range(1, {number + 1})."
    )


def windows(batches: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """The batches in lists of `size`; the last list holds what is left."""
    while window := list(islice(batches, size)):
        yield window


def length(batches: Iterable[Any]) -> int | None:
    """How many batches there are; None where they cannot be counted."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
