"""One of several processes that train together, and what befalls it: what the fault matrix gives torchrun.

    python -m torch.distributed.run --standalone --nproc_per_node=2 tests/faults/fault_worker.py plan.json

It trains a small model as a recipe would, adds to a file what it does, and at the places that the plan names it is
killed, frozen, signalled, or does something that the others do not.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fault_runs import FEATURES, Noisy, digest
from torch import Tensor, nn

from amp_recipes import Brain, EpochCounter, Stage

VALIDATION_SAMPLES = 12


@dataclass
class Fault:
    """What happens to some ranks when they come to `phase` for the `nth` time.

    phase: a step of the loop, "write" (anything is made, written, renamed or deleted in the folder of checkpoints),
    "prepare" (the same before the first batch, where no signal is handled yet; how often varies by one, as the ranks
    make the folder at the same time) or "load" (a file of a checkpoint is opened to be read). action: the name of a
    method of `Faults`; value: what it takes. ranks: None, all of them. life: counts torchrun's restarts.
    """

    phase: str
    nth: int
    action: str
    ranks: list[int] | None = None
    value: float = 0.0
    target: str = "self"
    life: int = 0


@dataclass
class Plan:
    """A run of several processes: where, of what size, with which options, and its faults.

    batch: samples of all ranks together in a step; stop_after: leave after so many steps, as a process that is killed.
    """

    folder: str
    events: str
    epochs: int = 2
    samples: int = 48
    batch: int = 4
    width: int = 16
    own_seed: bool = True  # each rank draws other numbers
    options: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def save(self, path: Path) -> Path:
        """Write it where a worker can read it."""
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: str) -> Plan:
        """The plan that `save` wrote."""
        plan = cls(**json.loads(Path(path).read_text()))
        plan.faults = [Fault(**it) for it in plan.faults]
        return plan


class Block(nn.Module):
    """A residual layer with all that is random in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)"""
        return x + self.inner(x)


class Net(nn.Module):
    """Repeated blocks, which fsdp shards by itself, between a first and a last layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, FEATURES) -> (batch, 1)"""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# ---------------------------------------------------------------------- what befalls it


class LeftEarly(Exception):
    """This rank leaves the loop while the others go on."""


class Faults:
    """Does to this process what the plan says, and adds to the file of events."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rank = int(os.environ.get("RANK", "0"))
        self.life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.seen: Counter[str] = Counter()
        self._pause_seconds = 0.0
        self._events = os.open(plan.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def report(self, kind: str, *values: Any) -> None:
        """Add a line; one write, so that the lines of two processes do not mix."""
        record = [kind, self.rank, self.life, time.monotonic(), *values]
        os.write(self._events, (json.dumps(record) + "\n").encode())

    def at(self, phase: str) -> None:
        """The run has come to `phase`."""
        self.seen[phase] += 1
        if phase == "between steps":
            time.sleep(self._pause_seconds)
        for fault in self.plan.faults:
            ours = fault.phase == phase and fault.life == self.life
            lasting = fault.action == "disk_full" and self.seen[phase] > fault.nth
            if ours and (fault.ranks is None or self.rank in fault.ranks):
                if self.seen[phase] == fault.nth:
                    self.report("fault", phase, fault.nth, fault.action)
                if self.seen[phase] == fault.nth or lasting:
                    getattr(self, fault.action)(fault)

    def watch_files(self, folder: Path) -> None:
        """From now on report what is done in the folder of checkpoints, as the phases "prepare", "write" and "load"."""
        save, busy = str(folder), threading.local()
        kinds = {"os.mkdir": "write", "os.rename": "write", "os.remove": "write", "os.rmdir": "write"}

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            if (event not in kinds and event != "open") or getattr(busy, "yes", False):
                return
            path = arguments[0]
            if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(save):
                return
            phase = kinds.get(event)
            if event == "os.rename" and Path(arguments[1]).name.startswith("CKPT+"):
                self.report("commit", Path(arguments[1]).name)
            if event == "open":
                writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                inside = os.fspath(path) != save and not os.path.isdir(path)
                phase = "write" if writes else "load" if inside else None
            if phase == "write" and not self.seen["forward"]:
                phase = "prepare"
            if phase is not None:
                busy.yes = True
                try:
                    self.at(phase)
                finally:
                    busy.yes = False

        sys.addaudithook(look)

    # what can happen

    def kill(self, fault: Fault) -> None:
        """SIGKILL, `value` seconds later."""
        self._later(fault, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def freeze(self, fault: Fault) -> None:
        """SIGSTOP: none of its threads runs any more."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self, fault: Fault) -> None:
        """Its main thread does nothing any more."""
        time.sleep(1e4)

    def fail(self, fault: Fault) -> None:
        """An exception, as of a sample that cannot be read."""
        raise ValueError("a bad sample")

    def inf(self, fault: Fault) -> None:
        """Infinite gradients; see `Recipe.compute_objectives`."""

    def leave(self, fault: Fault) -> None:
        """Out of the loop, as if its data were over."""
        raise LeftEarly

    def stop(self, fault: Fault) -> None:
        """Wait to be killed: all ranks are here."""
        dist.barrier() if dist.is_initialized() else None
        self._kill_everybody()

    def extra(self, fault: Fault) -> None:
        """A collective that the others do not make."""
        dist.all_reduce(torch.ones(3))

    def reduce_other_shape(self, fault: Fault) -> None:
        """The same collective on all ranks, with another shape on each."""
        dist.all_reduce(torch.ones(1000 * (self.rank + 1)))

    def disk_full(self, fault: Fault) -> None:
        """This and every later write fails."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def terminate(self, fault: Fault) -> None:
        """SIGTERM to `target`: `self`, `agent` (torchrun) or `all`; with `value` seconds between two of them."""
        if fault.target in ("self", "all"):
            os.kill(os.getpid(), signal.SIGTERM)
        if fault.target in ("agent", "all"):
            os.kill(os.getppid(), signal.SIGTERM)
        for pid in self._others() if fault.target == "all" else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill_agent(self, fault: Fault) -> None:
        """SIGKILL to torchrun itself; training then has much to do still."""
        os.kill(os.getppid(), signal.SIGKILL)
        self._pause_seconds = 1.0

    def kill_all(self, fault: Fault) -> None:
        """SIGKILL to every worker at once."""
        self._kill_everybody()

    def _kill_everybody(self) -> None:
        for pid in self._others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _others(self) -> list[int]:
        """The other workers of this life."""
        records = [json.loads(line) for line in Path(self.plan.events).read_text().splitlines()]
        started = [it for it in records if it[0] == "start" and it[2] == self.life]
        return [pid for *_, pid in started if pid != os.getpid() and os.path.exists(f"/proc/{pid}")]

    def _later(self, fault: Fault, act: Callable[[], object]) -> None:
        if not fault.value:
            act()
        timer = threading.Timer(fault.value, act)
        timer.daemon = True
        timer.start()


# ---------------------------------------------------------------------- what is trained


class Recipe(Brain):
    """Dropout, draws in the data and in a hook: all that a restart could get wrong shows in the numbers."""

    faults: Faults

    def compute_forward(self, batch, stage):
        """The prediction (batch, 1); its gradient may be made infinite."""
        self.faults.at("forward" if stage is Stage.TRAIN else "validation")
        return self.modules.model(batch[1])

    def compute_objectives(self, predictions, batch, stage):
        """The mean square error."""
        loss = nn.functional.mse_loss(predictions.squeeze(1).float(), batch[2])
        if stage is Stage.TRAIN:
            if self._is_planned("inf"):
                predictions.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
            loss.register_hook(lambda _: self.faults.at("backward"))
        else:
            self.faults.report("valid", self.epoch, self.step, batch[0].tolist(), loss.item().hex())
        return loss

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        """Report what was trained on, unless it is there only to keep up with other ranks."""
        if self._Brain__run.window.counts:
            self.faults.report("train", self.epoch, self.step, batch[0].tolist(), loss.item().hex())
        self.faults.at("between steps")

    def on_stage_start(self, stage, epoch=None):
        """Draw from a global generator."""
        self.epoch = epoch
        self.luck = torch.rand(()).item()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        """The draw as a metric."""
        return {"luck": self.luck}

    def _is_planned(self, action: str) -> bool:
        """Whether `action` comes at this step: (epoch, step) is said by the number of the batch in the run."""
        faults = self.faults
        return any(
            fault.action == action
            and faults.seen["forward"] == fault.nth
            and fault.life == faults.life
            and (fault.ranks is None or faults.rank in fault.ranks)
            for fault in faults.plan.faults
        )


def make(faults: Faults) -> Recipe:
    """The Brain of the plan, with the same weights at each call and on each rank."""
    plan = faults.plan
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(11)

    def make_optimizer(parameters):
        optimizer = torch.optim.AdamW(parameters, 0.003)
        optimizer.register_step_pre_hook(lambda *_: faults.at("optimizer step"))
        return optimizer

    options = {"device": "cpu", "noprogressbar": True, "seed": 5, "output_folder": plan.folder}
    hparams = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)}
    brain = Recipe({"model": Net(plan.width)}, make_optimizer, hparams, {**options, **plan.options})
    brain.faults = faults
    if plan.own_seed:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + faults.rank)
    return brain


def train(plan: Plan) -> None:
    """Train to the end as one of several, and report what there is then."""
    faults = Faults(plan)
    faults.report("start", os.getpid())
    faulthandler.register(signal.SIGUSR1)  # where each thread stands, for one that hangs
    world = int(os.environ.get("WORLD_SIZE", "1"))
    faults.watch_files(Path(plan.folder) / "save")
    brain = make(faults)
    with contextlib.suppress(LeftEarly):
        brain.fit(
            EpochCounter(plan.epochs),
            Noisy(plan.samples, lambda _: faults.at("read")),
            Noisy(VALIDATION_SAMPLES),
            train_loader_kwargs={"batch_size": plan.batch // world, "shuffle": True},
            valid_loader_kwargs={"batch_size": 2},
        )
        faults.report("end", fingerprint(brain), dict(faults.seen))


def fingerprint(brain: Recipe) -> dict[str, str]:
    """A sha256 of each part of what decides about the next step; of parameters that are sharded, of all of them."""
    parts = {
        "weights": {name.replace("model.module.", "model."): it for name, it in brain.modules.state_dict().items()},
        "optimizer": brain.optimizer.state_dict(),
        "scaler": brain.scaler.state_dict(),
        "steps": brain.optimizer_step,
        "skipped": brain.skipped_steps,
        "torch generator": torch.get_rng_state(),
        "python generator": random.getstate(),
        "numpy generator": np.random.get_state(),
        "metrics": (brain.summary.last, brain.summary.best) if brain.faults.rank == 0 else None,
        "bad parameters": sum(int((~torch.isfinite(whole(it))).sum()) for it in brain.modules.parameters()),
    }
    return {name: part if isinstance(part, int) else digest(_whole_in(part)) for name, part in parts.items()}


def whole(value: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks; another one as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _whole_in(value: Any) -> Any:
    if isinstance(value, Tensor):
        return whole(value)
    if isinstance(value, dict):
        return {key: _whole_in(it) for key, it in value.items()}
    return [_whole_in(it) for it in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    train(Plan.load(sys.argv[1]))
