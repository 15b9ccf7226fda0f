"""Makes and advances the learning rate schedulers of a run, one per optimizer."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from amp_recipes.errors import ConfigError

logger = logging.getLogger(__name__)

_SPENT = 1e-6  # share of a learning rate's first value, below which next to nothing is learned


class Schedulers:
    """The schedulers that `make` (the hparam `lr_scheduler`) returns for each optimizer.

    make: a class, function or partial that takes the optimizer, as `!name:` in a YAML gives. None, and an object with
    a state of its own (as recipes of the original Brain have, which step it themselves), make none. A parameter
    `total_updates` that is not given gets what count_updates returns: how many updates the run is to take.
    interval: "step" or "epoch". Raises ConfigError for ReduceLROnPlateau by the step, for total_updates by the epoch.
    """

    def __init__(
        self,
        make: Any,
        optimizers: Mapping[str, Optimizer],
        interval: str,
        count_updates: Callable[[], int] | None = None,
    ) -> None:
        self.total_updates: int | None = None  # the total that the scheduler was given
        self.by_optimizer: dict[str, Any] = {}
        self.optimizers = dict(optimizers)
        self._interval = interval
        self._has_warned = False
        if isinstance(make, functools.partial) or inspect.isclass(make) or inspect.isroutine(make):
            if count_updates is not None and _lacks_total(make):
                self.total_updates = self._count(count_updates)
                make = functools.partial(make, total_updates=self.total_updates)
            self.by_optimizer = {name: make(optimizer) for name, optimizer in optimizers.items()}
        elif make is not None:
            logger.info(
                "lr_scheduler is a %s, which the framework does not step: step it in the recipe", type(make).__name__
            )
        if interval == "step":
            self._refuse_plateau()

    def _refuse_plateau(self) -> None:
        if any(isinstance(found, ReduceLROnPlateau) for found in self.by_optimizer.values()):
            raise ConfigError(
                "lr_scheduler is ReduceLROnPlateau, which needs the loss of an epoch, but lr_scheduler_interval is "
                "step. Set lr_scheduler_interval: epoch."
            )

    def _count(self, count_updates: Callable[[], int]) -> int:
        """Count the updates of the run, for a scheduler that needs the total."""
        if self._interval == "epoch":
            raise ConfigError(
                "lr_scheduler takes total_updates, but lr_scheduler_interval is epoch, so it would advance once per "
                "epoch. Set lr_scheduler_interval: step, or give total_updates in the YAML."
            )
        if len(self.optimizers) > 1:
            raise ConfigError(
                f"lr_scheduler takes total_updates, but {', '.join(self.optimizers)} may each take a different "
                "number of updates. Give total_updates in the YAML, as an argument of lr_scheduler."
            )
        return count_updates()

    def after_update(self, names: Iterable[str]) -> None:
        """These optimizers took an update."""
        if self._interval == "step":
            for name in names:
                if name in self.by_optimizer:
                    self.by_optimizer[name].step()

    def warn_if_spent(self, epoch: int) -> None:
        """Warn once if a learning rate has fallen almost to 0, by updates, before this epoch begins."""
        if self._interval != "step" or self._has_warned:
            return
        for name in self.by_optimizer:
            for group in self.optimizers[name].param_groups:
                rate, first = group["lr"], group.get("initial_lr", 0.0)
                # A rate on a device is not read: the host would wait for it.
                if isinstance(rate, float) and rate < _SPENT * first:
                    self._has_warned = True
                    logger.warning(
                        "the learning rate of %s is %.3g when epoch %d begins, and was %.3g at first. lr_scheduler "
                        "advances after each update; to advance it after each epoch, set lr_scheduler_interval: epoch.",
                        name,
                        rate,
                        epoch,
                        first,
                    )
                    return

    def after_epoch(self, loss: float) -> None:
        """An epoch is over; `loss` (the validation's, if there was one) is what ReduceLROnPlateau watches."""
        if self._interval == "epoch":
            for scheduler in self.by_optimizer.values():
                scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))


def _lacks_total(make: Any) -> bool:
    """Whether it has a parameter total_updates that the YAML did not give."""
    given = make.keywords if isinstance(make, functools.partial) else {}
    try:
        return "total_updates" in inspect.signature(make).parameters and "total_updates" not in given
    except ValueError:  # of a class in C
        return False
