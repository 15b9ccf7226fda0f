"""Decides which nonfinite steps of a fit are repeated, and what follows from what that finds."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amp_recipes import distributed, numerics
from amp_recipes.loop.loader_pass import Pass
from amp_recipes.loop.locating import Explained, Locator, Suspect, versions_of
from amp_recipes.loop.rehearsal import BeforeStep, forward_trial, training_trial
from amp_recipes.loop.window import Window
from amp_recipes.precision import Update
from amp_recipes.stage import Stage
from amp_recipes.state.randomness import SharedRandomState, generator_state, torch_random_state

logger = logging.getLogger(__name__)

# Of one `fit`, beside the step that ends it: a user who trains on with broken samples has seen some of them by then.
_MOST_REPLAYS = 3
_LOSSES = 50  # of the latest updates, which tell whether the loss grew


@dataclass(frozen=True, slots=True)
class Skip:
    """Why an update was skipped.

    is_fault: False where only the fp16 loss scale was too high, which then falls (back-off); None: no replay has told.
    cause: of a fault, in words; empty if it is not known; pin: what the run pins because of it (`on_nonfinite: pin`).
    """

    is_fault: bool | None = None
    cause: str = ""
    pin: dict[str, Any] | None = None


class Replays:
    """The replays of one fit.

    Several processes repeat their own shares at the same time, each with the whole model and without the others, and
    meet again before and after. So the first one to know of a skipped update waits for the others to know of it.
    """

    def __init__(self, run: Any) -> None:
        self._run, self._locator = run, Locator(run)
        self._counts: Counter[Stage] = Counter()
        self._files: Counter[str] = Counter()
        self._test_passes = 0
        self._said_unreported = False
        self._shared = SharedRandomState(run.device)
        self._generators: tuple[Any, dict[str, Any]] = (None, {})
        self._skipped: deque[tuple[Update, Window]] = deque()  # of several processes: not repeated yet
        self._taken = 0  # updates of this fit
        self._losses: deque[list[float]] = deque(maxlen=_LOSSES)  # of the latest of them

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, which locates as many steps as one that was not interrupted.

        It also knows the updates before, so that it says the same about a step.
        """
        return {"count": self._counts[Stage.TRAIN], "taken": self._taken, "losses": [*self._losses]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; older checkpoints have no updates in it."""
        self._counts[Stage.TRAIN] = state["count"]
        self._taken = state.get("taken", 0)
        self._losses = deque(state.get("losses", ()), maxlen=_LOSSES)

    # ------------------------------------------------------------------ where a nonfinite value first appeared

    def before_step(self, batches: Sequence[Any]) -> BeforeStep | None:
        """Return the data that a replay of this window would need; None where nothing would replay it."""
        run = self._run
        if not (run.settings.locate_nonfinite or run.underflow.is_on):
            return None
        own, step = self._own_generators(), run.current.step
        random, loader = torch_random_state(run.device), run.fit.loaders.get("train")
        return BeforeStep(batches, random, own, step, versions_of(batches), loader, step)

    def before_evaluated(self, batch: Any, loader: Any) -> BeforeStep:
        """Return the data that a replay of this evaluated batch would need; it is counted already."""
        random, step, batches = self._shared.take(), self._run.current.step, [batch]
        if random is not None:
            return BeforeStep(batches, random, [], step, versions_of(batches), loader, step - 1, False)
        own = self._own_generators()
        random = self._shared.copy(is_for_many=not own)
        return BeforeStep(batches, random, own, step, versions_of(batches), loader, step - 1)

    def checked(self, before: BeforeStep) -> BeforeStep:
        """The same, knowing whether its random state is certain."""
        is_certain = before.random_is_certain or self._shared.holds(before.random)
        return before._replace(random_is_certain=is_certain)

    def _own_generators(self) -> list[tuple[str, Any, Any]]:
        """The generators of the recipe's own, with their states."""
        run = self._run
        attributes = (run.current.epoch, len(vars(run.recipe)))
        if self._generators[0] != attributes:  # else they are those of the last step
            self._generators = attributes, run.recipe_state.generators()
        return [(name, generator, generator_state(generator)) for name, generator in self._generators[1].items()]

    def note_taken(self, update: Update) -> None:
        """Remember an update that was taken: what was before a nonfinite step tells what to do about it."""
        self._taken += 1
        self._losses.append(update.losses)

    def _history(self) -> numerics.History:
        """The updates before, without losses where several optimizers each have their own."""
        losses = [statistics.fmean(each) for each in self._losses if each]
        return numerics.History(self._taken, losses if len(self._run.recipe.optimizers_dict) == 1 else ())

    def left(self, stage: Stage) -> int:
        """Return how many more nonfinite batches of the stage will be repeated."""
        return max(0, _MOST_REPLAYS - self._counts[stage]) if self._run.settings.locate_nonfinite else 0

    def judge(self, update: Update, window: Window) -> Skip:
        """Repeat a skipped update, to find whether it is a fault, and where that began.

        Above the floor of the fp16 scale, the step is repeated once at scale 1, or at a lower floor: only what is
        finite there is back-off.
        In a run of several processes, `explain_skips` follows instead.
        """
        run = self._run
        if run.processes.many:
            self._skipped.append((update, window))
            return Skip()
        if window.before is None or not run.settings.locate_nonfinite:
            return Skip()
        patience = run.plan.patience
        last = patience.in_a_row + 1 >= run.settings.nonfinite_patience  # the one that the error is about
        is_to_locate = last or self.left(Stage.TRAIN) > 0
        scaled, is_fault, unscaled = patience.may_back_off(update), None, min(1.0, run.plan.scaler.min_scale)
        if scaled and (all(map(math.isfinite, update.losses)) or not is_to_locate):
            is_fault = self._is_fault_unscaled(window, unscaled)
            if not is_fault:
                return Skip(is_fault)
        if not is_to_locate:
            self._say_unreported()
            return Skip(is_fault)
        # What overflows at the scale may hide what is wrong at any scale.
        suspect = self._suspect(update, window, unscaled if is_fault else None)
        found = next(iter(self._locator.explain([suspect], 1, last)), Explained())
        self._counts[Stage.TRAIN] += found.pin is None
        if scaled and is_fault is None and found.cause not in (None, "not replayable"):
            is_fault = found.cause != "scale"
        return Skip(is_fault, found.words, found.pin)

    def _is_fault_unscaled(self, window: Window, scale: float) -> bool | None:
        """Whether the step is nonfinite at this scale, too: one forward and backward; None if it cannot be repeated."""
        run, before = self._run, window.before
        try:
            outcome = training_trial(run, before).run(_own_batches(window), run.plan.training.dtype, scale)
        except Exception as error:  # the skipped step is the news
            logger.warning("%s: could not repeat the step: %r", window.in_pass.where(window.step), error)
            return None
        return not (outcome.is_finite and math.isfinite(outcome.gradient_norm))

    def _say_unreported(self) -> None:
        """Say once that faults of training are no longer reported."""
        if not self._said_unreported:
            self._said_unreported = True
            repeated = " A skipped fp16 step is still repeated once, to tell a fault from back-off."
            logger.warning(
                "%d nonfinite steps of this fit were reported. Later ones are skipped and counted, but not reported, "
                "except the one that ends the run.%s",
                _MOST_REPLAYS,
                repeated if self._run.plan.scaler.is_enabled() else "",
            )

    def explain_skips(self, current: Window | None = None) -> None:
        """Several processes: repeat the skipped updates that all of them know of by now: those before `current`.

        To be called by all processes at the same point. Raises NonfiniteError if patience is exhausted.
        """
        run, patience = self._run, self._run.plan.patience
        if not run.processes.many:  # or the step is one that is being repeated
            return
        while self._skipped and (run.host.immediate or self._skipped[0][1] is not current):
            update, window = self._skipped.popleft()
            if window.before is not None:
                self._judge_together(update, window)
            patience.check()

    def _judge_together(self, update: Update, window: Window) -> None:
        """As `judge`, by all processes; `patience` has taken for back-off what a lower loss scale might cure."""
        run, patience = self._run, self._run.plan.patience
        is_fault, unscaled = None, min(1.0, run.plan.scaler.min_scale)
        if patience.takes_for_back_off(update):
            is_fault = self._is_fault_in_any(window, unscaled)
            run.totals.backed_off_steps += is_fault is False
            if is_fault:
                run.plan.scaler.put_back(update.scale)
                where = lambda: window.in_pass.where(window.step)  # noqa: E731
                patience.observe(update, where, run.totals.skipped_steps, is_fault=True)
        last = patience.exhausted
        is_to_locate = is_fault or (is_fault is None and not self._may_be_back_off(update))
        # A loss may be nonfinite on one of them alone.
        asked = distributed.AsyncGather([is_to_locate and (last or self.left(Stage.TRAIN) > 0)]).read()
        if any(one for (one,) in asked):
            self._counts[Stage.TRAIN] += 1
            found = self._locator.explain([self._suspect(update, window, unscaled if is_fault else None)], 1, last)
            patience.explain("".join(each.words for each in found))
        elif is_to_locate and distributed.is_main_process():
            self._say_unreported()

    def _may_be_back_off(self, update: Update) -> bool:
        return self._run.plan.patience.may_back_off(update) and all(map(math.isfinite, update.losses))

    def _is_fault_in_any(self, window: Window, scale: float) -> bool | None:
        """Whether the step is nonfinite at this scale in any process, too; None if that cannot be told."""
        if self._locator.cannot_repeat():
            return None
        with self._locator.whole():
            with self._locator.alone():
                own = self._is_fault_unscaled(window, scale)
            everyone = distributed.gather(own)
        return True if True in everyone else None if None in everyone else False

    def _suspect(self, update: Update, window: Window, scale: float | None = None) -> Suspect:
        """The step to repeat; scale: None for the run's own."""
        run, before = self._run, window.before
        caveats = []
        if window.taken:
            caveats.append(
                "An optimizer had already stepped in this window, so the repeated step began from other weights."
            )
        if run.processes.many and any(isinstance(module, nn.SyncBatchNorm) for module in run.modules.modules()):
            caveats.append("SyncBatchNorm normalised the repeated step by the samples of this process alone.")
        return Suspect(
            training_trial(run, before),
            _own_batches(window),
            torch.float32 if run.plan.widened else run.plan.training.dtype,
            scale or update.scale or 1.0,
            before,
            Stage.TRAIN,
            window.in_pass.where(window.step),
            caveats=caveats,
            run_scale=update.scale or 1.0,
            history=self._history(),
        )

    def explain_batches(self, batches: Sequence[BeforeStep], current: Pass) -> None:
        """Repeat batches of an evaluation whose loss is nonfinite; all processes call it together."""
        run, stage = self._run, current.stage
        found = sum(distributed.gather(len(batches))) if run.processes.many else len(batches)
        most = min(found, self.left(stage))
        if not most:
            return
        self._counts[stage] += most
        self._test_passes += stage is Stage.TEST
        suspects = [
            Suspect(
                forward_trial(run, stage, before),
                before.batches,
                run.plan.evaluation.dtype,
                1.0,
                before,
                stage,
                current.where(before.step),
                self._new_name(f"nonfinite-{self._locator.step}-{stage.name.lower()}-{before.step}"),
                test_pass=self._test_passes,
            )
            for before in batches
        ]
        self._locator.explain(suspects, most)

    def _new_name(self, name: str) -> str:
        """A name for files that this fit has not used: two test sets may follow the same update."""
        if self._run.processes.many:
            name = f"{name}-rank-{distributed.rank()}"
        self._files[name] += 1
        return name if self._files[name] == 1 else f"{name}-{self._files[name]}"


def _own_batches(window: Window) -> Sequence[Any]:
    """The batches of the window that are this process's own: beyond them, it only keeps up with the others."""
    batches = window.before.batches
    return batches[: len(window.weights)] or batches


class NonfiniteBatches:
    """The batches of an evaluation whose loss is nonfinite, as many as will be repeated at its end."""

    def __init__(self, run: Any, current: Pass) -> None:
        self.current = current
        self._batches: list[BeforeStep] = []
        self._replays = run.fit.replays
        self._most = self._replays.left(current.stage)

    def before(self, batch: Any, loader: Any) -> BeforeStep | None:
        """Return what `note` needs, before the batch's forward; None if no more batches will be repeated."""
        return self._replays.before_evaluated(batch, loader) if len(self._batches) < self._most else None

    def note(self, before: BeforeStep | None) -> None:
        """Note a batch, as it was before its forward."""
        if before is not None and len(self._batches) < self._most:
            self._batches.append(self._replays.checked(before))

    def explain(self) -> None:
        """Say where the losses became nonfinite; the weights are still those that were evaluated."""
        if self._most:
            self._replays.explain_batches(self._batches, self.current)
