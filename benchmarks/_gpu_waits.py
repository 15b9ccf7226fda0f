"""Counts how often, and where, the host waits for the device in a step of training.

By two instruments. Events: `torch.Event` is replaced by one that notes, when the host waits for it, in which step it
was recorded, whether it had happened already, and how long the wait was: torch's sync-debug mode does not see these.
Sync-debug mode (CUDA): a warning for each operation that makes the host wait, with the line that asked for it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from _gpu_networks import Batch, Network, Trainer, loss_of, make_brain, mlp, scratch_folder
from _gpu_results import PRECISIONS, parse, queues, result

from amp_recipes import Stage

WARM_UP = 4  # steps before anything is counted: memory is allocated, optimizers make their states


@dataclass
class Waits:
    """What the host waited for while something was watched.

    lags: how many steps before the running one the events were recorded in -> how often, and how often they had not
    happened yet; seconds: of all waits for events; lines: those that asked for a wait of another kind -> how often.
    """

    step: int = 0
    watching: bool = False
    steps: int = 0
    seconds: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    unfinished: Counter[int] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    traced: int = 0  # waits for events by CUDA's own account

    def begin_step(self, watching: bool) -> None:
        """Another step begins, which counts or does not."""
        self.step += 1
        self.steps += watching
        self.watching = watching

    def in_words(self, step_seconds: float) -> str:
        """Waits per step: for events of which step, unfinished in brackets, and of other kinds."""
        steps = max(1, self.steps)
        told = []
        for lag, times in sorted(self.lags.items()):
            which = {0: "of the same step", 1: "of the step before"}.get(lag, f"of {lag} steps before")
            told.append(f"{times / steps:.2f} {which} ({self.unfinished[lag] / steps:.2f} unfinished)")
        others = sum(self.lines.values())
        share = self.seconds / step_seconds if step_seconds else 0.0
        told.append(f"{others / steps:.2f} of other kinds; {100 * share:.1f} % of the time waiting for events")
        return ", ".join(told)


WAITS = Waits()


class WatchedEvent(torch.Event):
    """An event that notes what the host waits for."""

    def record(self, *arguments: Any) -> None:
        """As torch's."""
        self.recorded_in = WAITS.step
        super().record(*arguments)

    def synchronize(self) -> None:
        """As torch's; noted where that is asked for."""
        if not WAITS.watching:
            super().synchronize()
            return
        lag = WAITS.step - getattr(self, "recorded_in", WAITS.step)
        WAITS.lags[lag] += 1
        WAITS.unfinished[lag] += not self.query()
        began = time.perf_counter()
        super().synchronize()
        WAITS.seconds += time.perf_counter() - began


@contextmanager
def watched(device: torch.device) -> Iterator[Waits]:
    """Within it, waits are counted while `Waits.watching`."""
    vars(WAITS).update(vars(Waits()))
    torch.Event = WatchedEvent
    cuda = device.type == "cuda"

    def note(message: Any, category: type, filename: str, number: int, *_: Any) -> None:
        if WAITS.watching and "synchroniz" in str(message):
            WAITS.lines[_asking_line(sys._getframe(1)) or f"{filename}:{number}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield WAITS
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
            torch.Event = WatchedEvent.__mro__[1]


def trace_events() -> None:
    """Have CUDA tell of each wait for an event as well: as a check of the other count."""
    try:
        from torch.cuda import _gpu_trace  # private; seen in 2.11 and 2.13

        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_event_synchronization(lambda _: _count_traced())
    except (ImportError, AttributeError) as error:
        result("CUDA's own trace", "cannot be had", None, str(error))


def _count_traced() -> None:
    WAITS.traced += WAITS.watching


def _asking_line(frame: FrameType | None) -> str | None:
    """The innermost line outside of torch and of this file."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name not in (__file__, warnings.__file__):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


# ---------------------------------------------------------------------- what is watched


class Watched(Trainer):
    """Tells where steps begin, and measures metrics where it is to."""

    metrics = False
    count: int  # of the batches

    def on_fit_batch_start(self, batch: Batch, should_step: bool) -> None:
        """A step begins."""
        first = WAITS.step == WARM_UP
        # What follows the last batch is the end of the stage, which may wait.
        WAITS.begin_step(WARM_UP <= WAITS.step < self.count - 1)
        if first:
            self.began = time.perf_counter()

    def compute_objectives(self, predictions: torch.Tensor, batch: Batch, stage: Stage) -> torch.Tensor:
        """The loss; and the accuracy."""
        if self.metrics:
            self.add_metric("accuracy", predictions.argmax(-1) == batch[1], len(batch[1]))
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """The steps are over."""
        self.took = time.perf_counter() - getattr(self, "began", time.perf_counter())


class WithMetrics(Watched):
    """Adds a metric in each step."""

    metrics = True


class TwoOptimizers(Watched):
    """Two networks that step by themselves, as of a generator and its critic."""

    def init_optimizers(self) -> None:
        """One for each layer."""
        first, *others = self.modules.model
        rest = torch.nn.ModuleList(others)
        self.optimizers_dict = {"first": self.opt_class(first.parameters()), "rest": self.opt_class(rest.parameters())}

    def fit_batch(self, batch: Batch) -> torch.Tensor:
        """Step one, then the other."""
        self.on_fit_batch_start(batch, True)
        for name in self.optimizers_dict:
            with self.training_ctx:
                loss = loss_of(self.modules.model(batch[0]), batch[1])
            self.backward(loss, name)
            self.optimizers_step(name)
        return loss.detach()


class StepsByHand(Watched):
    """Takes the step itself, as a SpeechBrain recipe may."""

    def fit_batch(self, batch: Batch) -> torch.Tensor:
        """torch alone, without loss scaling."""
        self.on_fit_batch_start(batch, True)
        with self.training_ctx:
            loss = loss_of(self.modules.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Evaluated(Watched):
    """Watches the validation, and not the training."""

    def on_fit_batch_start(self, batch: Batch, should_step: bool) -> None:
        """Training is not looked at here."""

    def evaluate_batch(self, batch: Batch, stage: Stage) -> torch.Tensor:
        """A step begins."""
        Watched.on_fit_batch_start(self, batch, False)
        return super().evaluate_batch(batch, stage)


CASES: dict[str, dict[str, Any]] = {
    "fused": {},
    "unfused": {"optimizer": "unfused"},
    "accumulation of 2": {"grad_accumulation_factor": 2},
    "EMA": {"ema_decay": 0.9},
    "two optimizers": {"kind": TwoOptimizers},
    "metrics": {"kind": WithMetrics},
    "progress bar and JSONL": {"output_folder": True, "noprogressbar": False},
    "watch for spikes": {"on_spike": "lower_lr", "output_folder": True},
    "steps by hand": {"kind": StepsByHand},
    "evaluation": {"kind": Evaluated},
}
# An unfused step asks for its own verdict.
MAY_WAIT = ("unfused",)


def measure(case: str, precision: str, device: torch.device, network: Network, batches: list[Batch]) -> None:
    """Train in one case, and print the waits."""
    settings = {"kind": Watched, **CASES[case]}
    if settings.pop("output_folder", False):
        settings["output_folder"] = scratch_folder()
    brain = make_brain(network.make(device), device, precision, **settings)
    brain.count = len(batches)
    evaluates = case == "evaluation"
    with watched(device) as waits:
        brain.fit([1], batches[:2] if evaluates else batches, batches if evaluates else None)
    others = sum(waits.lines.values())
    same_step = waits.unfinished[0]
    must = others == 0 and same_step == 0 if queues(device) and case not in MAY_WAIT else None
    note = "; ".join(f"{line} {times} times" for line, times in waits.lines.most_common(5))
    if device.type == "cuda" and waits.traced != sum(waits.lags.values()):
        note += f"; CUDA's own trace has {waits.traced} waits for events, not {sum(waits.lags.values())}"
    result(f"{case}, {precision}", waits.in_words(brain.took), must, note)


def main() -> None:
    """Go through all cases at all precisions."""
    options = parse(__doc__.splitlines()[0])
    if options.device.type == "cuda":
        trace_events()
    else:
        note = f"{options.device.type} has none: only waits for events are counted, those of other kinds are 0"
        result("torch's sync-debug mode", "not here", None, note)
    network = mlp(32, 16) if options.small else mlp(2048, 4096, depth=4)  # of some milliseconds a step
    batches = network.batches(WARM_UP + (8 if options.small else 20), options.device)
    for case in CASES:
        for precision in PRECISIONS:
            if case == "steps by hand" and precision == "fp16":
                continue  # by hand there is nothing that scales
            measure(case, precision, options.device, network, batches)


if __name__ == "__main__":
    main()
