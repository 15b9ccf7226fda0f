"""Keeps account of iterations whose outcome the device has not told yet, and says what follows once it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_recipes.precision import PendingUpdate, Update
from amp_recipes.precision.host_copy import HostCopy, Ticket


class Window:
    """The batches of one iteration, and the updates made from them.

    weights: of each batch, in averages; samples: in all of them; step: batches done in the epoch, at the last update
    or the end; stepped: whether `optimizers_step` was called; taken: whether any update was; last: the last update;
    rates: learning rate per optimizer that it used; differentiated: how many losses each update was made from;
    by_hand: the recipe stepped an optimizer itself; before: what it takes to take the step again, where that is kept;
    metrics: what its batches contribute to the stage's, if it counts.
    """

    __slots__ = (
        "before",
        "by_hand",
        "differentiated",
        "ended",
        "last",
        "metrics",
        "pending",
        "posted",
        "rates",
        "samples",
        "step",
        "stepped",
        "taken",
        "weights",
    )

    def __init__(self, weights: Sequence[float] = (), samples: int = 0, before: Any = None) -> None:
        self.weights = weights
        self.samples = samples
        self.before = before
        self.metrics: Any = None
        self.step = 0
        self.stepped = self.taken = self.ended = self.by_hand = False
        self.last: Update | None = None
        self.differentiated: list[int] = []
        self.rates: Mapping[str, Any] = {}
        self.pending: deque[tuple[PendingUpdate, Mapping[str, Any]]] = deque()
        self.posted: Ticket | None = None

    @property
    def losses(self) -> list[float]:
        """The losses of the batches, once the window has ended."""
        if self.posted is not None:
            return self.posted.read()
        return self.last.losses if self.last is not None else []


class Ledger:
    """Iterations in order, from their first batch until everything that waits for their verdict has followed.

    on_update: called with each update and its window, in order, once the verdict is known; on_window: called with
    each window that has ended, after its updates. Both run at the latest just before the next update, where the
    verdict has long arrived.
    """

    def __init__(
        self, device: torch.device, on_update: Callable[[Update, Window], None], on_window: Callable[[Window], None]
    ) -> None:
        self._host = HostCopy(device)
        self._on_update = on_update
        self._on_window = on_window
        self._windows: deque[Window] = deque()
        self._settling = False

    def __len__(self) -> int:
        """How many windows are under way."""
        return len(self._windows)

    def clear(self) -> None:
        """Forget windows that were left behind by an exception, or left open by `fit_batch` without `fit`."""
        self._windows.clear()

    def open(self, weights: Sequence[float], samples: int, before: Any = None) -> None:
        """A new window begins."""
        self._windows.append(Window(weights, samples, before))

    def add(self, pending: PendingUpdate | None, rates: Mapping[str, Any], step: int) -> None:
        """`optimizers_step` was called, and made this update if there were gradients."""
        if not self._windows:
            self._windows.append(Window())
        window = self._windows[-1]
        window.stepped, window.step = True, step
        if pending is not None:
            window.pending.append((pending, rates))
            window.differentiated.append(pending.losses)
            if pending.known:
                self.settle()

    def end(
        self,
        losses: Sequence[torch.Tensor],
        step: int,
        as_differentiated: bool,
        by_hand: bool = False,
        metrics: Any = None,
        samples: int | None = None,
    ) -> None:
        """The open window's batches are done, with these losses (0-d).

        as_differentiated: each was handed to `backward` as it is; if one update took them all, it carries them to the
        host. by_hand, metrics: see `Window`. samples: of all processes, where there are several.
        """
        window = self._windows[-1]
        window.metrics = metrics
        window.samples = window.samples if samples is None else samples
        window.step, window.ended, window.by_hand = step, True, by_hand and not window.stepped
        if not (as_differentiated and window.differentiated == [len(losses)]):
            vector = losses[0] if len(losses) == 1 else torch.stack(list(losses)) if losses else torch.empty(0)
            window.posted = self._host.post(vector.detach())
        if not window.pending and (window.posted is None or window.posted.known):
            self.settle()

    def settle(self) -> None:
        """Read what is under way, waiting for it if need be, and let everything follow from it."""
        if self._settling:  # what follows asked for a number that settles
            return
        self._settling = True
        try:
            self._settle()
        finally:
            self._settling = False

    def _settle(self) -> None:
        while self._windows:
            window = self._windows[0]
            while window.pending:
                pending, window.rates = window.pending.popleft()
                window.last = pending.read()
                window.taken = window.taken or window.last.taken
                self._on_update(window.last, window)
            if not window.ended:
                return
            self._windows.popleft()
            self._on_window(window)
