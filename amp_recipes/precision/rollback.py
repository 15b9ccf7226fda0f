"""Restores module buffers when an update is skipped, without waiting for the device.

A batch that overflows has already moved BatchNorm's running statistics when the overflow is found. Where the verdict
is still on the device, the choice between the kept value and the new one is made there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_recipes.modules.torch_private import buffers_of, children_of, version_of
from amp_recipes.precision.torch_private import flatten, foreach_copy

# A large buffer that training leaves alone (a causal mask) is not copied. A small one is, whether it moves or not:
# kernels (torch's native batch_norm) and `.data` write without raising the version counter that would tell.
LARGE_BYTES = 2**20


@dataclass(slots=True, eq=False)
class _Watched:
    """One buffer: where it lives, and the object that stood there at the last verdict.

    register: the owner's, in which it stands under `key`; looked up in each step.
    """

    owner: nn.Module
    register: dict[str, torch.Tensor | None]
    key: str
    name: str
    tensor: torch.Tensor | None = None
    # The same memory with a version counter of its own: a write raises no counter, so that the backward of a graph
    # which saved the buffer (a generator's, while its critic steps) still runs. None where it cannot be written.
    alias: torch.Tensor | None = None
    version: int = -1
    moves: bool | None = None  # of a large one: whether training changes it; None before the first update

    @property
    def current(self) -> torch.Tensor | None:
        return self.register.get(self.key)

    @property
    def in_place(self) -> bool:
        """Whether the same object stands there, on the same memory."""
        current = self.current
        return current is self.tensor and (self.alias is None or current.is_set_to(self.alias))

    @property
    def untouched(self) -> bool:
        """Whether moreover nothing that raises the version counter wrote to it."""
        return self.in_place and _version(self.tensor) == self.version

    @property
    def without_copy(self) -> bool:
        return self.alias is None or self.moves is False

    @property
    def large(self) -> bool:
        return self.alias.nbytes >= LARGE_BYTES

    def take(self) -> None:
        """Let the object that stands there now be the one to go back to."""
        self.tensor = self.current
        self.version = _version(self.tensor)
        self.alias = self.tensor.data if _writable(self.tensor) else None

    def put_back(self, values: torch.Tensor | None) -> None:
        """Let the object stand there again, or `values` on the new device if the module was moved since."""
        current = self.current
        if current is not None and values is not None and current.device != values.device:
            self.register[self.key] = values.to(current.device)
            return
        if self.alias is not None and not self.tensor.is_set_to(self.alias):
            self.tensor.data = self.alias
        self.register[self.key] = self.tensor

    def fits(self, current: torch.Tensor | None) -> bool:
        """Whether `current` can hold the values of `alias`, in the same place of a group."""
        return (
            _writable(current)
            and current.shape == self.alias.shape
            and current.dtype == self.alias.dtype
            and current.device == self.alias.device
            and (current.is_contiguous() or not self.alias.is_contiguous())
        )


class _Group:
    """Buffers of one device and dtype, with their kept values in one vector: a few kernels serve them all."""

    def __init__(self, items: Sequence[_Watched]) -> None:
        self.items = items
        self.aliases = [item.alias for item in items]
        self.kept = torch.cat([alias.reshape(-1) for alias in self.aliases])
        parts = self.kept.split([alias.numel() for alias in self.aliases])
        self.parts = [part.view(alias.shape) for part, alias in zip(parts, self.aliases, strict=True)]

    def replaced(self) -> list[int]:
        """Indices of the items that do not stand in place any more."""
        return [index for index, item in enumerate(self.items) if not item.in_place]

    def strays(self, replaced: Iterable[int]) -> list[_Watched]:
        """Those of the replaced items in whose place something of another kind stands now."""
        return [item for item in map(self.items.__getitem__, replaced) if not item.fits(item.current)]

    def keep(self, replaced: Iterable[int]) -> None:
        """Keep the buffers as they are."""
        self._take(replaced)
        foreach_copy(self.parts, self.aliases)

    def put_back(self, replaced: Iterable[int]) -> None:
        """Bring back the kept values, in the objects that held them."""
        for index in replaced:
            self.items[index].put_back(self.parts[index])
        foreach_copy(self.aliases, self.parts)

    def choose(self, skip: torch.Tensor, replaced: Sequence[int]) -> None:
        """`put_back` where `skip` (0-d bool) is true, else `keep`, without the host.

        Not into an object that a module put in the place of another: a graph may have saved it for its backward.
        """
        self._take(replaced)
        torch.where(skip, self.kept, flatten(self.aliases), out=self.kept)
        for index in replaced:
            item = self.items[index]
            item.register[item.key] = torch.empty_like(item.alias)
        self._take(replaced)
        foreach_copy(self.aliases, self.parts)

    def _take(self, replaced: Iterable[int]) -> None:
        for index in replaced:
            self.items[index].take()
            self.aliases[index] = self.items[index].alias


class BufferRollback:
    """Keeps the buffers of `modules`, and puts them back after a skipped update.

    All are copied when watching begins, one that several modules share once. Large ones (1 MiB and more) whose values
    the first update leaves alone are let go then. Of those, and of buffers that cannot be written (expanded, sparse,
    not yet materialised), only another object in their place can be undone. A copy of the rollback, by `deepcopy` or
    `pickle`, starts afresh.
    """

    def __init__(self, modules: nn.Module) -> None:
        self._modules = modules
        self._watched: dict[tuple[int, str], _Watched] = {}
        self._groups: list[_Group] = []
        self._without_copy: list[_Watched] = []
        self._registers: list[dict] = []  # of all modules: their buffers, and their children
        self._registered = 0
        self._learning = False
        self.watching = False

    def __reduce__(self) -> tuple:
        return type(self), (self._modules,)

    @property
    def kept_bytes(self) -> int:
        """Memory that the copies take."""
        return sum(group.kept.nbytes for group in self._groups)

    @torch.no_grad()
    def watch(self) -> None:
        """Store the buffers as they are now, as the state to go back to."""
        known, self._watched = self._watched, {}
        self._groups, self._without_copy = [], []
        items = [known.get((id(item.owner), item.key), item) for item in self._find_new()]
        for item in items:
            if item.moves is False and not item.untouched:
                item.moves = None
            item.take()
        self._add(items)
        self._learning = self.watching = True

    def settle(self, skip: torch.Tensor | None, skipped: Callable[[], bool]) -> None:
        """Keep the buffers as they are where `skip` is 0, put back the earlier ones where it is 1.

        skip: 0-d float tensor on the device; None where the host knows, and asking `skipped` is free. Else that is
        asked only for a buffer that is new, was replaced by one of another kind, or lives on the CPU beside a GPU,
        and for one without a copy that changed. To be called without gradients enabled.
        """
        if not self.watching:
            return
        if self._learning:
            self._learn()
        lost = self._settle_without_copy(skipped)
        skip = None if skip is None else skip != 0
        for group in list(self._groups):
            replaced = group.replaced()
            strays = group.strays(replaced) if replaced else []
            if not strays and skip is not None and skip.device.type == group.kept.device.type:
                group.choose(skip.to(group.kept.device), replaced)
                continue
            if skipped():
                group.put_back(replaced)
            elif not strays:
                group.keep(replaced)
            if strays:
                self._regroup(group, strays)
        if sum(map(len, self._registers)) != self._registered:
            lost += self._welcome(skipped)
        if lost:
            warnings.warn(
                "the values of these buffers could not be restored after a skipped update, because they first "
                f"appeared or changed in its batch: {', '.join(lost)}. Check that they are finite.",
                stacklevel=2,
            )

    def _learn(self) -> None:
        """Release the large buffers that their first update did not change."""
        self._learning = False
        for group in list(self._groups):
            item = group.items[0]
            if item.large and item.moves is None:
                item.moves = not (item.in_place and torch.equal(item.alias, group.parts[0]))
                if not item.moves:
                    self._groups.remove(group)
                    self._without_copy.append(item)
                    item.take()

    def _settle_without_copy(self, skipped: Callable[[], bool]) -> list[str]:
        """Returns the names of those that changed in place, which cannot be undone, although the update is skipped."""
        lost = []
        for item in [item for item in self._without_copy if not item.untouched]:
            if skipped():
                if not item.in_place and _version(item.tensor) == item.version:
                    item.put_back(item.tensor)
                    item.take()
                    continue
                lost.append(item.name)
            self._without_copy.remove(item)
            item.moves = True
            item.take()
            self._add([item])
        return lost

    def _welcome(self, skipped: Callable[[], bool]) -> list[str]:
        """Begin to watch buffers that were registered since; returns their names if the update is skipped."""
        items = list(self._find_new())
        for item in items:
            item.take()
        self._add(items)
        return [item.name for item in items if item.tensor is not None] if items and skipped() else []

    def _find_new(self) -> Iterator[_Watched]:
        """The buffers that are not watched, and None where one may come to stand."""
        modules = dict(self._modules.named_modules())
        self._registers = [each for module in modules.values() for each in (buffers_of(module), children_of(module))]
        self._registered = sum(map(len, self._registers))
        seen = {id(item.tensor) for item in self._watched.values()}
        for path, module in modules.items():
            for key, tensor in buffers_of(module).items():
                known = (id(module), key) in self._watched or (tensor is not None and id(tensor) in seen)
                seen.add(id(tensor))
                if not known:
                    yield _Watched(module, buffers_of(module), key, f"{path}.{key}" if path else key)

    def _add(self, items: Iterable[_Watched]) -> None:
        """Watch `items` from their present state on: small contiguous ones together, others alone."""
        together: dict[object, list[_Watched]] = {}
        for item in items:
            self._watched[id(item.owner), item.key] = item
            if item.without_copy:
                self._without_copy.append(item)
            elif item.large or not item.alias.is_contiguous():
                together[item] = [item]
            else:
                together.setdefault((item.alias.device, item.alias.dtype), []).append(item)
        self._groups += map(_Group, together.values())

    def _regroup(self, group: _Group, strays: Sequence[_Watched]) -> None:
        """Watch each of `strays` alone: what was replaced by another kind once will be again."""
        self._groups.remove(group)
        for item in group.items:
            item.take()
        self._add([item for item in group.items if item not in strays])
        for item in strays:
            self._add([item])


def _version(tensor: torch.Tensor | None) -> int:
    """The version counter; -1 where there is none (yet)."""
    return -1 if tensor is None or is_lazy(tensor) or tensor.is_inference() else version_of(tensor)


def _writable(tensor: torch.Tensor | None) -> bool:
    """Whether each element has its own memory, to write to."""
    return (
        tensor is not None
        and not is_lazy(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_inference())
        and all(stride > 0 or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
