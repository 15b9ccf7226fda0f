"""Copies device scalars to the host without making the host wait for the device.

A step starts the copies of the numbers that it needs. They run while the host queues the next forward, and are read
when they are needed. The values are read through a NumPy view made once, so reading is no tensor operation.
"""

from __future__ import annotations

import torch

from amp_recipes.modules.devices import queues_work


class _Row:
    """A landing place for some values in host memory, with the event that says when they are there."""

    __slots__ = ("event", "key", "values", "view")

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.key = (count, dtype, device)
        asynchronous = queues_work(device)
        self.values = torch.empty(count, dtype=dtype, pin_memory=asynchronous)
        self.view = self.values.numpy()
        self.event = torch.Event(device) if asynchronous else None


class HostFuture:
    """Stands for values on their way to the host."""

    __slots__ = ("_home", "_row", "_values")

    def __init__(self, home: HostCopy, row: _Row) -> None:
        self._home = home
        self._row: _Row | None = row
        self._values: list[float] = []

    def __reduce__(self) -> tuple:
        # A copy holds the values: a landing place cannot be shared with one.
        return _arrived, (self.read(),)

    @property
    def known(self) -> bool:
        """Whether the values are on the host for certain.

        Never asks the event, so that what happens does not depend on timing.
        """
        return self._row is None or self._home.immediate

    def read(self) -> list[float]:
        """The values as Python floats; waits for the copy where it is still under way."""
        row = self._row
        if row is not None:
            if row.event is not None:
                row.event.synchronize()
            self._values = row.view.tolist()
            self._home.release(row)
            self._row = None
        return self._values


def _arrived(values: list[float]) -> HostFuture:
    future = HostFuture.__new__(HostFuture)
    future._row, future._values = None, values
    return future


class HostCopy:
    """Hands out futures for scalars of one device; landing places are used again once read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, torch.dtype, torch.device], list[_Row]] = {}

    def __reduce__(self) -> tuple:
        return HostCopy, (self._device,)

    @property
    def immediate(self) -> bool:
        """Whether a copy is there as soon as it is made: the device does not queue its work behind the host."""
        return not queues_work(self._device)

    def post(self, vector: torch.Tensor) -> HostFuture:
        """Start copying a detached floating vector (or 0-d tensor); returns the future that will hold its values.

        One that is on the host already is there at once.
        """
        # Converted on the device: a copy that also converts goes through memory that is not pinned, and waits.
        if vector.dtype not in (torch.float32, torch.float64):
            vector = vector.float()
        key = (vector.numel(), vector.dtype, vector.device)
        free = self._free.setdefault(key, [])
        row = free.pop() if free else _Row(*key)
        row.values.copy_(vector, non_blocking=row.event is not None)
        if row.event is not None:
            # By itself it would be recorded on the stream of whatever device is the current one.
            row.event.record(torch.accelerator.current_stream(vector.device))
        return HostFuture(self, row)

    def release(self, row: _Row) -> None:
        """Take back a landing place that has been read."""
        self._free[row.key].append(row)
