"""How a data set becomes batches whose order and random draws are a function of (seed, epoch)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from amp_recipes.data.samplers import EpochShuffle, epoch_seed
from amp_recipes.errors import ConfigError, DataError

_ACCEPTED = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in ("self", "dataset")]


class EpochLoader(DataLoader):
    """A DataLoader with a generator of its own, seeded from (seed, epoch) at the start of each iteration.

    The seeds of its workers follow from that generator, so each worker draws the same in the same epoch of
    every run, and the global generators stay where they are. (Persistent workers are seeded only when they
    start: this is torch's rule.)
    """

    def __init__(self, dataset: Any, *, seed: int, **loader_kwargs: Any) -> None:
        super().__init__(dataset, generator=torch.Generator(), **loader_kwargs)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw as in that epoch from the next iteration on; the samplers have their own `set_epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.generator.manual_seed(epoch_seed(self.seed, self.epoch, "workers"))
        return super().__iter__()


def make_loader(
    dataset: Any,
    *,
    shuffle: bool,
    seed: int,
    device: torch.device | str,
    name: str = "Data set",
    **loader_kwargs: Any,
) -> DataLoader:
    """A DataLoader over `dataset` that draws nothing from the global generators.

    shuffle: through `EpochShuffle`; an IterableDataset and a given sampler or batch_sampler order themselves.
    device: where the batches go; only for CUDA is memory pinned by default.
    name: what messages call the data, such as "Training set".
    loader_kwargs: any argument of torch's DataLoader; what is given wins. With a `generator`, torch shuffles
        by it.
    Raises ConfigError for arguments that DataLoader does not take, DataError for no samples or no batches.
    """
    _refuse_unknown(loader_kwargs, name)
    iterable = isinstance(dataset, IterableDataset)
    ordered = any(loader_kwargs.get(key) is not None for key in ("sampler", "batch_sampler"))
    _refuse_empty(dataset, name, needs_length=not (iterable or ordered))
    loader_kwargs.setdefault("pin_memory", torch.device(device).type == "cuda")
    shuffle = shuffle and not iterable and not ordered
    try:
        if loader_kwargs.get("generator") is not None:
            loader = DataLoader(dataset, shuffle=shuffle, **loader_kwargs)
        else:
            loader_kwargs.pop("generator", None)
            if shuffle:
                loader_kwargs["sampler"] = EpochShuffle(dataset, seed)
            loader = EpochLoader(dataset, seed=seed, **loader_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: its loader cannot be made: {error}") from error
    _refuse_no_batches(loader, name)
    return loader


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell `loader` and whatever in it has a `set_epoch` (samplers, data set) which epoch begins.

    Any iterable of batches may be given; one without `set_epoch` is left as it is.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    # By identity: a sampler stands in the loader and in its batch sampler, and may count its calls.
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def _refuse_unknown(loader_kwargs: dict[str, Any], name: str) -> None:
    unknown = [key for key in loader_kwargs if key not in _ACCEPTED]
    if not unknown:
        return
    hints = [f"did you mean {match!r}?" for key in unknown for match in get_close_matches(key, _ACCEPTED, n=1)]
    raise ConfigError(
        f"{name}: DataLoader takes no {', '.join(map(repr, unknown))}; "
        + (f"{' '.join(hints)} It takes " if hints else "it takes ")
        + f"{', '.join(_ACCEPTED)}."
    )


def _refuse_empty(dataset: Any, name: str, needs_length: bool) -> None:
    length = _length(dataset)
    if length == 0:
        raise DataError(f"{name} is empty: its {type(dataset).__name__} has 0 samples.")
    if length is None and needs_length:
        raise DataError(
            f"{name}: a {type(dataset).__name__} has no length. Give it __len__, pass a "
            "sampler, or make it an IterableDataset."
        )


def _refuse_no_batches(loader: DataLoader, name: str) -> None:
    source = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
    batch_sampler = loader.batch_sampler
    own_batches = batch_sampler is not None and loader.batch_size is None
    if own_batches:
        source = batch_sampler
    # Asked of the source: `len(loader)` would make torch warn about an IterableDataset that yields more.
    length = _length(source)
    if length is None:
        return
    if length == 0:
        raise DataError(f"{name} gives 0 batches: its {type(source).__name__} yields nothing.")
    if not own_batches and loader.drop_last and length < (loader.batch_size or 1):
        raise DataError(
            f"{name} gives 0 batches: drop_last with {length} samples < batch size {loader.batch_size}. "
            "Lower batch_size, or set drop_last to false."
        )


def _length(x: Any) -> int | None:
    try:
        return len(x)
    except (TypeError, NotImplementedError):  # torch's data pipes have a __len__ that raises
        return None
