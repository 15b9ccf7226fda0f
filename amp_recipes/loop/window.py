"""Tracks each window of batches from its first batch until the result of its update has been handled."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from amp_recipes.errors import NonfiniteError, RecipeError
from amp_recipes.loop.metrics import StageMetrics
from amp_recipes.precision import PendingUpdate, Update, clear_gradients
from amp_recipes.precision.host_copy import HostCopy, HostFuture


class Shares(Protocol):
    """The weight of each batch of a window.

    weights: of each batch, in averages; samples: in all of them.
    """

    weights: Sequence[float]
    samples: int

    def share(self, index: int) -> tuple[float, float]:
        """Return the number to multiply the loss of a batch with, and the number to divide it by."""

    def requests(self) -> tuple[int, bool]:
        """The number of a signal that asks the run to end (0: none), and whether anything asks for a save."""


class Window:
    """The batches that accumulate for one update, and what became of it.

    Without a pass: a batch by itself, outside of any loop. size: batches to take, those that only keep up with other
    processes included; before: what it takes to take the step again, where that is kept.

    index: of the batch at hand; should_step: whether it is the last; counts: whether it counts, or only keeps up with
    other processes.
    sums: of the metrics that its batches add to the pass, if the update is taken. step: batches done in the epoch, at
    the last update or the end; by_hand: the recipe stepped an optimizer itself, and not within `optimizers_step`, which
    is `updating`; taken: any update was; last: the last update; rates: learning rate of each optimizer in it;
    differentiated: how many losses each update was made from;
    stepped_names: of the optimizers that `optimizers_step` has stepped in it; pinned: the pin that the run took because
    of it.
    """

    def __init__(
        self, run: Any, in_pass: Any = None, shares: Shares | None = None, size: int = 1, before: Any = None
    ) -> None:
        self.run = run
        self.in_pass = in_pass
        self.shares = shares
        self.size = size
        self.before = before
        self.weights = () if shares is None else shares.weights
        self.should_step = self.counts = True
        self.index = 0
        self.sums: StageMetrics | None = None
        self.samples = self.step = 0
        self.stepped = self.taken = self.ended = self.by_hand = self.updating = False
        self.last: Update | None = None
        self.differentiated: list[int] = []
        self.stepped_names: set[str] = set()
        self.rates: Mapping[str, Any] = {}
        self.pinned: dict[str, Any] | None = None
        self.pending: deque[tuple[PendingUpdate, Mapping[str, Any]]] = deque()
        self.posted: HostFuture | None = None

    def take(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """Call `fit_batch` for each of the batches; returns the losses of those that count."""
        run, losses = self.run, []
        run.window = self
        try:
            for self.index, batch in enumerate(batches):
                self.counts, self.should_step = self.index < len(self.weights), self.index == self.size - 1
                self.in_pass.step = done = self.in_pass.step + self.counts
                loss = run.recipe.fit_batch(run.feed.to_device(batch))
                self.in_pass.step = done  # a recipe that counts its steps, too, must not count them twice
                if self.counts:
                    losses.append(run.returned_loss(loss, "fit_batch") if run.own_fit_batch else loss)
        except NonfiniteError:  # of an update before this one, since whose verdict this forward has moved buffers
            with torch.no_grad():
                run.plan.updates.buffers.settle(None, lambda: True)
            raise
        finally:
            run.window = Window(run)
        return losses

    def backward(self, loss: torch.Tensor, names: Sequence[str]) -> None:
        """Differentiate the batch's share of the window's loss for all optimizers, or for the named ones."""
        run = self.run
        chosen = [*run.chosen_optimizers(names).values()] if names else None
        if run.reach is not None:
            run.reach.follow(loss, names or run.recipe.optimizers_dict)
        with run.processes.averaged(loss, chosen) as averaged:
            # Asked for only now: what other processes have arrives during the forward.
            share, of = (1.0, 1.0) if self.shares is None else self.shares.share(self.index)
            run.plan.updates.backward(loss, share, of, chosen, averaged)

    def optimizers_step(self, names: Sequence[str]) -> None:
        """Step all optimizers, or the named ones, and clear their gradients; the result is queued."""
        run, recipe = self.run, self.run.recipe
        if not self.should_step:
            raise RecipeError(
                f"optimizers_step was called at batch {run.current.step}, before the last of the {self.size} batches "
                "of this update (grad_accumulation_factor). In fit_batch, call it only `if self.should_step:`."
            )
        run.pending.settle(but_newest=1)  # the previous update may still have to change the learning rate
        chosen = available = recipe.freeze_optimizers(recipe.optimizers_dict) or {}
        if names:
            chosen = {name: available[name] for name in run.chosen_optimizers(names) if name in available}
        if not self.stepped_names.isdisjoint(chosen):
            run.pending.settle()  # it has stepped in this very window
        run.fit.replays.explain_skips(self)
        run.plan.patience.check()
        self.stepped_names.update(chosen)
        if self.sums is not None:
            self.sums.send(run.host)  # before the verdict, so that who has waited for that need not wait for these
        rates = {name: run.recovery.rate_in_force(optimizer) for name, optimizer in chosen.items()}
        self.updating = True
        try:
            update = run.plan.updates.step(chosen, run.settings.max_grad_norm)
        finally:
            self.updating = False
        run.plan.updates.update_scale(available.values())
        if names:
            for optimizer in chosen.values():
                clear_gradients(optimizer, set_to_none=True)
        else:
            recipe.zero_grad()
        run.pending.add(update, rates, run.current.step)

    def metric_sums(self) -> StageMetrics:
        """The sums to which `add_metric` adds: the window's until its result is known, or the pass's."""
        if self.in_pass is None:
            return self.run.current.sums
        if not self.counts:
            return StageMetrics()
        if self.sums is None:
            self.sums = StageMetrics()
        return self.sums

    @property
    def losses(self) -> list[float]:
        """The losses of the batches, once the window has ended."""
        if self.posted is not None:
            return self.posted.read()
        return self.last.losses if self.last is not None else []


class PendingWindows:
    """Queues windows whose results are still on the device, and notifies the listeners when the results arrive.

    Listeners are called at the latest just before the next update, when the result has long arrived. If the recipe
    steps by hand, and so makes no update here, they are called when the next window has ended.
    listeners: in their order, each with any of these methods. `on_update(update, window)` is called once for each
    update; `on_window(window)` when a window has ended and all its results are known; `on_hand_step(window)` at the
    end of a window that was stepped by hand, at once, since there is no result to wait for.
    """

    def __init__(self, device: torch.device, listeners: Sequence[Any] = ()) -> None:
        self._host = HostCopy(device)
        self._on_update = [each.on_update for each in listeners if hasattr(each, "on_update")]
        self._on_window = [each.on_window for each in listeners if hasattr(each, "on_window")]
        self._on_hand_step = [each.on_hand_step for each in listeners if hasattr(each, "on_hand_step")]
        self._windows: deque[Window] = deque()
        self._settling = False

    def __len__(self) -> int:
        """Return the number of windows whose result is pending."""
        return len(self._windows)

    def clear(self) -> None:
        """Forget windows that an exception left behind, or that `fit_batch` without `fit` left open."""
        self._windows.clear()

    def open(self, window: Window) -> None:
        """A window begins."""
        self._windows.append(window)

    def add(self, pending: PendingUpdate | None, rates: Mapping[str, Any], step: int) -> None:
        """`optimizers_step` was called, and made this update if there were gradients."""
        if not self._windows:
            self._windows.append(Window(None))
        window = self._windows[-1]
        window.stepped, window.step = True, step
        if pending is not None:
            window.pending.append((pending, rates))
            window.differentiated.append(pending.losses)
            if pending.known:
                self.settle()

    def end(self, losses: Sequence[torch.Tensor], step: int, as_differentiated: bool) -> None:
        """The newest window's batches are done, with these losses (0-d).

        as_differentiated: each was handed to `backward` as it is; if one update took them all, it carries them to the
        host.
        """
        window = self._windows[-1]
        if not window.pending:  # there may be no next update, which would settle what came before
            self.settle(but_newest=1)
        window.step, window.ended, window.by_hand = step, True, window.by_hand and not window.stepped
        if window.by_hand:
            window.taken = True
            for notify in self._on_hand_step:
                notify(window)
        if not (as_differentiated and window.differentiated == [len(losses)]):
            vector = losses[0] if len(losses) == 1 else torch.stack(list(losses)) if losses else torch.empty(0)
            window.posted = self._host.post(vector.detach())
        if window.sums is not None:
            window.sums.send(self._host)
        if not window.pending and (window.posted is None or window.posted.known):
            self.settle()

    def settle_updates(self) -> None:
        """Wait as `settle` does, if the result of an update is pending; a window without an update can wait."""
        if any(window.pending for window in self._windows):
            self.settle()

    def settle(self, but_newest: int = 0) -> None:
        """Read what is under way, waiting for it if need be, and tell the listeners.

        but_newest: how many windows may stay under way.
        """
        if self._settling:  # a listener asked for a number that settles
            return
        self._settling = True
        try:
            self._settle(but_newest)
        finally:
            self._settling = False

    def _settle(self, but_newest: int) -> None:
        while len(self._windows) > but_newest:
            window = self._windows[0]
            if window.posted is not None:
                window.posted.read()  # it was sent last: with it all has arrived
            while window.pending:
                pending, window.rates = window.pending.popleft()
                window.last = pending.read()
                window.taken = window.taken or window.last.taken
                for notify in self._on_update:
                    notify(window.last, window)
            if not window.ended:
                return
            self._windows.popleft()
            for notify in self._on_window:
                notify(window)
