"""Saves and restores the position of any iterable of batches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, Dataset, IterableDataset

from amp_recipes.data.dynamic_items import forget_skipping, is_plain_loader
from amp_recipes.data.sample_draws import draws_nothing, held_generators
from amp_recipes.data.sample_names import forget_recorded, recorded
from amp_recipes.data.samplers import samplers_of
from amp_recipes.data.streams import StreamLoader
from amp_recipes.state.preserved import has_state
from amp_recipes.state.randomness import GENERATORS, set_generator_state, states_of

# Of loaders with generators of their own: the states with which the present epoch began.
_BEGAN: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def loader_state(loader: Any) -> dict[str, Any] | None:
    """Return the position of `loader` in its data, for `batches_from`; None if it has none."""
    if has_state(loader):
        return loader.state_dict()
    if not isinstance(loader, DataLoader):
        return None
    state = {}
    if loader in _BEGAN:
        state["generators"] = _BEGAN[loader]
    if _tells_by_dataset(loader):
        state["dataset"] = loader.dataset.state_dict()
    return state or None


def batches_from(loader: Iterable[Any], step: int, state: Mapping[str, Any] | None) -> Iterator[Any]:
    """The batches of `loader` after the first `step` of them; `state` is what `loader_state` gave there, if anything.

    All that this draws from global generators, and all replaying, is done when the call returns. Where an epoch begins,
    `batches_from(loader, 0, None)` is `iter(loader)` that also notes where the loader's own generators are.
    """
    if has_state(loader):
        if state is not None and step:
            loader.load_state_dict(state)
            return iter(loader)
        return _replayed(loader, step)
    if isinstance(loader, DataLoader):
        return _from_dataloader(loader, step, state or {})
    if isinstance(loader, Sequence):
        return (loader[place] for place in range(step, len(loader)))
    return _replayed(loader, step)


def generator_states(loader: Any) -> dict[str, Any]:
    """Return the states of the generators of a DataLoader and its samplers, for `set_generator_states`.

    Without workers also those that the dataset holds as attributes, through Subset, ConcatDataset and the like; with
    workers each has a copy of them, which draws on its own.
    """
    return states_of(_held(loader))


def set_generator_states(loader: Any, states: Mapping[str, Any]) -> None:
    """Restore the states in the generators of a loader made like the one of `generator_states`."""
    _set_states(_held(loader), states)


def _set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name in generators.keys() & states.keys():
        set_generator_state(generators[name], states[name])


def can_begin_again(loader: Any) -> bool:
    """Whether the batches can be had once more; an iterator without a state of its own gives them once."""
    return has_state(loader) or not isinstance(loader, Iterator)


def beginning(loader: Any) -> Any:
    """Return what `begin_again` needs of a loader before its first batch."""
    if isinstance(loader, DataLoader):  # torch draws in `state_dict` of torchdata's, which begins by itself anyway
        return copy.deepcopy(loader.dataset.state_dict()) if _tells_by_dataset(loader) else None
    return copy.deepcopy(loader.state_dict()) if has_state(loader) else None


def begin_again(loader: Any, state: Any) -> None:
    """Reset a `loader` that would otherwise continue after the batches that it gave."""
    if state is not None:
        teller = loader.dataset if isinstance(loader, DataLoader) else loader
        teller.load_state_dict(copy.deepcopy(state))


def replay_reason(loader: Any) -> str | None:
    """Return why a resume inside an epoch must read batches again, and what to do; None if it need not."""
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        return (
            "some batches may be read twice and others not at all: with in_order=False their order depends on which "
            "worker is faster; leave in_order out"
        )
    reason = _cannot_tell(loader)
    return f"the batches already used are read again, which takes time: {reason}" if reason is not None else None


def _cannot_tell(loader: Any) -> str | None:
    """Return why the remaining batches need the earlier ones to be read again, and what to do."""
    kind = type(loader).__name__
    if isinstance(loader, StreamLoader):
        return _stream_cannot_tell(loader)
    if has_state(loader) or isinstance(loader, Sequence):
        return None
    if not isinstance(loader, DataLoader):
        return f"a {kind} cannot save its position: give a torch Dataset, or give it state_dict and load_state_dict"
    if _tells_by_dataset(loader):
        return None
    if isinstance(loader.dataset, IterableDataset):
        advice = "give the IterableDataset itself, with state_dict and load_state_dict, instead of a DataLoader"
        advice = f"{advice}, or torchdata's StatefulDataLoader"
        return f"a DataLoader over an IterableDataset cannot save its position: {advice}"
    if not is_plain_loader(loader):
        return f"a {kind} may give its batches in any order: give a torch Dataset instead, or give it state_dict"
    if not _can_skip(loader):
        return "the draws of a DataLoader's workers depend on all that they read before: give the Dataset itself"
    return None


def _stream_cannot_tell(loader: StreamLoader) -> str | None:
    if loader.knows_its_place:
        return None
    if has_state(loader.dataset):
        return "an IterableDataset read by workers can save its position only through torchdata: pip install torchdata"
    kind = type(loader.dataset).__name__
    return f"{kind} is an IterableDataset that cannot save its position: give it state_dict and load_state_dict"


def _from_dataloader(loader: DataLoader, step: int, state: Mapping[str, Any]) -> Iterator[Any]:
    forget_skipping(loader)
    forget_recorded(loader)
    generators = held_generators(loader, *samplers_of(loader))
    _set_states(generators, state.get("generators", {}))
    if generators:
        _BEGAN[loader] = states_of(generators)
    if step and "dataset" in state and _tells_by_dataset(loader):
        loader.dataset.load_state_dict(state["dataset"])
        return iter(loader)
    if step and _can_skip(loader):
        return _skipped(loader, step)
    return _replayed(_skipped(loader, 0) if _can_be_recorded(loader) else loader, step)


def _can_be_recorded(loader: DataLoader) -> bool:
    """Whether an equal loader, whose sampler remembers what it gave, may take its place for an epoch."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return False
    return not loader.persistent_workers


def _replayed(loader: Iterable[Any], step: int) -> Iterator[Any]:
    batches = iter(loader)
    for _ in islice(batches, step):
        pass
    return batches


def _skipped(loader: DataLoader, step: int) -> Iterator[Any]:
    """Return `iter(loader)` with its sampler advanced by `step` batches."""
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    skipping = _Skipping(loader, source, step)
    order = {"sampler": skipping, "batch_size": None} if loader.batch_sampler is None else {"batch_sampler": skipping}
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "prefetch_factor")
    same = {name: getattr(loader, name) for name in (*names, "multiprocessing_context", "in_order")}
    batches = iter(DataLoader(loader.dataset, **order, **same))
    skipping.skip()  # after torch has drawn the seed of its workers, which it does before it asks the sampler
    return batches


class _Skipping:
    """A sampler that has given its first `step` items before; iterated once."""

    def __init__(self, loader: DataLoader, source: Iterable[Any], step: int) -> None:
        self._loader, self._source, self._step = loader, source, step
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._items)

    def skip(self) -> None:
        """Take the first items now, unless they are taken."""
        if self._items is None:
            items = iter(self._source)
            for _ in islice(items, self._step):
                pass
            self._items = recorded(self._loader, items, self._step)


def _can_skip(loader: DataLoader) -> bool:
    """Whether the batches from some step on do not depend on the earlier ones having been read."""
    if not is_plain_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.num_workers == 0 or draws_nothing(loader.dataset)


def _tells_by_dataset(loader: DataLoader) -> bool:
    # A worker has a copy of the dataset, and only that copy knows.
    return loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset) and has_state(loader.dataset)


def _held(loader: Any) -> dict[str, Any]:
    """The generators that a loader, its samplers and, as long as it is read in this process, its dataset hold."""
    if not isinstance(loader, DataLoader):
        return {}
    found = held_generators(loader, *samplers_of(loader))
    if loader.num_workers == 0:
        _add_held(loader.dataset, "dataset", found, set())
    return found


def _add_held(dataset: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    """Enter the generators that a dataset holds, and those of the datasets that it is made of."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    attributes = getattr(dataset, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, GENERATORS) and not any(value is other for other in found.values()):
            found[f"{path}.{name}"] = value
    for name, part in _made_of(attributes):
        if isinstance(part, Dataset):
            _add_held(part, f"{path}.{name}", found, seen)


def _made_of(attributes: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Return the `datasets` of a ConcatDataset or StackDataset, or the `dataset` of a Subset."""
    parts = attributes.get("datasets")
    if isinstance(parts, dict):
        yield from parts.items()
    elif isinstance(parts, (list, tuple)):
        yield from enumerate(parts)
    if "dataset" in attributes:
        yield "dataset", attributes["dataset"]
