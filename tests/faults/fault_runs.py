"""What the fault matrix trains, the processes it trains in, and how two trainings are compared.

torch is imported once, in the parent, which starts no thread and trains nothing; every run is a fork of it, so that one
costs a tenth of a second. This needs a system with fork and pidfd (Linux).
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import logging
import math
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch imports it at the first optimizer: once here instead of in each run
from torch import Tensor, nn
from torch.utils.data import Dataset

from amp_recipes import Brain, EpochCounter, Stage
from amp_recipes.checkpoint import checkpointer as checkpointer_room

SAMPLES, BATCH, FEATURES = 24, 4, 8
STEPS = SAMPLES // BATCH  # of an epoch
VALIDATION_SAMPLES = 8
SMALL, LARGE = 16, 600  # width of the model: a checkpoint of about 20 kB, and of about 6 MB
SECONDS = 600  # after which a process that should have ended counts as hung; none takes a tenth of it


# ---------------------------------------------------------------------- what is trained


@dataclass
class Trigger:
    """Does `action` when the run comes to `phase` for the `nth` time."""

    phase: str
    nth: int
    action: Callable[[], object]
    seen: int = 0

    def at(self, phase: str) -> None:
        """The run has come to `phase`."""
        if phase == self.phase:
            self.seen += 1
            if self.seen == self.nth:
                self.action()


@dataclass
class Run:
    """One training: where, of what size, with which options; and what befalls it."""

    folder: Path | None
    workers: int = 0
    width: int = SMALL
    epochs: int = 2
    samples: int = SAMPLES
    options: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    triggers: Sequence[Trigger] = ()
    on_read: Callable[[int], object] | None = None  # called with the index of each sample, where it is read
    poisoned: Callable[[int, int], bool] | None = None  # (epoch, step) -> whether that batch's loss is NaN
    metric: Callable[[int], float] | None = None  # epoch -> "score"
    on_epoch_end: Callable[[Brain, int], object] | None = None  # after the epoch's validation

    def with_options(self, **options: Any) -> Run:
        """The same with more options."""
        return replace(self, options={**self.options, **options})


class Noisy(Dataset):
    """Each sample draws from every global generator, as augmentation does."""

    def __init__(self, samples: int, on_read: Callable[[int], object] | None = None) -> None:
        self.x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(0))
        self.files = [f"recordings/{index:04d}.wav" for index in range(samples)]
        self._on_read = on_read

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        if self._on_read is not None:
            self._on_read(index)
        noise = torch.randn(FEATURES) + random.random() + float(np.random.rand())
        return index, self.x[index] + 0.1 * noise, self.x[index].sum()


class Recipe(Brain):
    """All that could be lost is there: dropout, statistics, averaged weights, a schedule, draws and sums in hooks."""

    run: Run

    def phase(self, name: str) -> None:
        """Tell the triggers where the run is."""
        for trigger in self.run.triggers:
            trigger.at(name)

    def compute_forward(self, batch, stage):
        """The prediction (batch, 1)."""
        self.phase("forward" if stage is Stage.TRAIN else "validation" if stage is Stage.VALID else "evaluation")
        return self.modules.model(batch[1])

    def compute_objectives(self, predictions, batch, stage):
        """The mean square error; NaN where the batch is poisoned."""
        self.index_sum += batch[0].double().sum()
        loss = nn.functional.mse_loss(predictions.squeeze(1).float(), batch[2])
        if stage is Stage.TRAIN:
            if loss.requires_grad:
                loss.register_hook(lambda _: self.phase("backward"))
            if self.run.poisoned is not None and self.run.poisoned(self.epoch, self.step):
                loss = loss * torch.nan
        elif stage is Stage.VALID:
            report("valid", self.epoch, self.step, batch[0].tolist(), loss.item().hex())
        return loss

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        """Report what was trained on; a batch that only keeps up with another process does not count."""
        run = self._Brain__run
        if not run.window.counts or run.log is run.idle_log:  # or the step is on trial
            return
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        report("train", self.epoch, self.step, batch[0].tolist(), loss.item().hex(), scale)
        self.phase("between steps")

    def on_stage_start(self, stage, epoch=None):
        """Draw from a global generator, and begin a sum over the stage."""
        self.epoch = epoch
        self.index_sum = torch.zeros((), dtype=torch.float64)
        self.luck = torch.rand(()).item()
        if stage is Stage.TRAIN:
            self.phase("between epochs")

    def on_stage_end(self, stage, stage_loss, epoch=None):
        """The sum and the draw as metrics."""
        metrics = {"index_sum": self.index_sum.item(), "luck": self.luck}
        if self.run.metric is not None and epoch is not None:
            metrics["score"] = self.run.metric(epoch)
        if stage is Stage.VALID and self.run.on_epoch_end is not None:
            self.run.on_epoch_end(self, epoch)
        return metrics


def make(run: Run) -> Recipe:
    """The run's Brain, with the same weights at each call."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    wide = run.width
    model = nn.Sequential(
        nn.Linear(FEATURES, wide),
        nn.BatchNorm1d(wide),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Linear(wide, wide),
        nn.ReLU(),
        nn.Linear(wide, 1),
    )
    hparams = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)}
    folder = None if run.folder is None else str(run.folder)
    options = {"device": "cpu", "noprogressbar": True, "seed": 5, "ema_decay": 0.9, "output_folder": folder}

    def make_optimizer(parameters):
        optimizer = torch.optim.AdamW(parameters, 0.003)
        optimizer.register_step_pre_hook(lambda *_: brain.phase("optimizer step"))
        return optimizer

    brain = Recipe({"model": model}, make_optimizer, hparams, {**options, **run.options})
    brain.run = run
    return brain


def fit(brain: Recipe) -> None:
    """Train as the run says."""
    run = brain.run
    brain.fit(
        EpochCounter(run.epochs),
        Noisy(run.samples, run.on_read),
        Noisy(VALIDATION_SAMPLES),
        train_loader_kwargs={"batch_size": BATCH, "shuffle": True, "num_workers": run.workers, **run.loader},
        valid_loader_kwargs={"batch_size": BATCH},
    )


def train(run: Run) -> None:
    """Train to the end, and report what there is then."""
    report_saves(run)
    brain = make(run)
    fit(brain)
    report("end", fingerprint(brain))


def report_saves(run: Run) -> None:
    """In this process from now on: report when a save and a deletion begin and when they are over."""
    write_folder, delete_folder = checkpointer_room.write_folder, checkpointer_room.delete_folder

    def reported_write(target: Path, *args: Any) -> None:
        report("save", target.name)
        for trigger in run.triggers:
            trigger.at("save")
        write_folder(target, *args)
        report("saved", target.name)

    def reported_delete(path: Path) -> None:
        report("delete", path.name)
        for trigger in run.triggers:
            trigger.at("delete")
        delete_folder(path)
        report("deleted", path.name)

    checkpointer_room.write_folder, checkpointer_room.delete_folder = reported_write, reported_delete


def fingerprint(brain: Recipe) -> dict[str, str]:
    """A sha256 of each part of what decides about the next step."""
    parts = {
        "weights": brain.modules.state_dict(),
        "optimizer": brain.optimizer.state_dict(),
        "averaged weights": brain._Brain__run.ema.state_dict(),
        "scaler": brain.scaler.state_dict(),
        "steps": (brain.optimizer_step, brain.skipped_steps),
        "torch generator": torch.get_rng_state(),
        "python generator": random.getstate(),
        "numpy generator": np.random.get_state(),
        "metrics": (brain.summary.last, brain.summary.best),
        "the recipe's own": (brain.index_sum, brain.luck),
    }
    return {name: digest(part) for name, part in parts.items()}


def digest(value: Any) -> str:
    """The sha256 of tensors, arrays and plain values, at any depth."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray):
            found.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(f"{len(value)} items".encode())
            for item in value:
                add(item)
        else:
            found.update(f"{type(value).__name__} {value!r}".encode())

    add(value)
    return found.hexdigest()


# ---------------------------------------------------------------------- processes

_channel: int | None = None  # where this process reports to


def report(*values: Any) -> None:
    """Tell the process that started this one."""
    if _channel is not None:
        os.write(_channel, (json.dumps(values) + "\n").encode())  # one short write: lines of two threads do not mix


class Child:
    """A fork that does `work`, with what it has reported, its output and how it ended.

    It leads a process group of its own, so that its loader workers can be found when it is dead.
    """

    def __init__(self, work: Callable[[], object], seconds: float = SECONDS) -> None:
        self.events: list[list[Any]] = []
        self.times: list[float] = []
        self.code: int | None = None  # negative: the signal that ended it
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._rest = b""
        self._reading, writing = os.pipe()
        self.started = time.monotonic()
        self.seconds = 0.0
        self._limit = seconds
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _live_and_die(work, writing, self._output.fileno())
        with suppress(OSError):  # both do it, so that it is done before either goes on
            os.setpgid(self.pid, self.pid)
        os.close(writing)
        self._ends = os.pidfd_open(self.pid)
        _alive.append(self)

    def until(self, wanted: Callable[[list[Any]], bool], nth: int = 1) -> bool:
        """Wait for the `nth` report that is `wanted`; False if the process ended first."""
        looked_at = found = 0
        while True:
            while looked_at < len(self.events):
                found += wanted(self.events[looked_at])
                looked_at += 1
                if found == nth:
                    return True
            if self.code is not None:
                return False
            self._wait()

    def kill(self, number: int = signal.SIGKILL) -> Child:
        """Send a signal; with SIGKILL wait for the end."""
        if self.code is None:  # else its number may be another process's by now
            os.kill(self.pid, number)
        return self.end() if number == signal.SIGKILL else self

    def poll(self) -> bool:
        """Take in what it has reported, without waiting; whether it has ended."""
        while self.code is None and select.select([self._reading, self._ends], [], [], 0)[0]:
            self._wait()
        if self.code is None and time.monotonic() > self.started + self._limit:
            self._wait()
        return self.code is not None

    def end(self) -> Child:
        """Wait for the end. Raises TimeoutError, after killing it, if it takes too long."""
        while self.code is None:
            self._wait()
        return self

    def of(self, *kinds: str) -> list[list[Any]]:
        """What it reported of these kinds, without the kind."""
        return [event[1:] for event in self.events if event[0] in kinds]

    @property
    def error(self) -> tuple[str, str] | None:
        """Type and text of the exception that ended it."""
        errors = self.of("error")
        return (errors[-1][0], errors[-1][1]) if errors else None

    @property
    def output(self) -> str:
        """What it wrote to stdout and stderr."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    @property
    def how(self) -> str:
        """How it ended, in words."""
        last = self.output.strip().splitlines()[-1:]
        return f"exit code {self.code}" + (f", {self.error[0]}: {self.error[1]}" if self.error else f" {''.join(last)}")

    def bury(self) -> None:
        """End what is left of it: loader workers look every few seconds whether their parent lives."""
        if self.code is None:
            self.kill()
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        if self in _alive:
            _alive.remove(self)
            os.close(self._reading)
            os.close(self._ends)

    def _wait(self) -> None:
        left = self.started + self._limit - time.monotonic()
        ready, _, _ = select.select([self._reading, self._ends], [], [], max(0.0, left))
        if self._ends in ready:
            _, status = os.waitpid(self.pid, 0)
            os.set_blocking(self._reading, False)  # its workers may hold the other end open
            while self._read():
                pass
            self.code = os.waitstatus_to_exitcode(status)
            self.seconds = time.monotonic() - self.started
        elif ready:
            if not self._read():  # closed by a process that is about to end
                select.select([self._ends], [], [], max(0.0, left))
        else:
            os.kill(self.pid, signal.SIGABRT)  # shows where each of its threads stood
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            raise TimeoutError(f"a run did not end within {self._limit:g} s; it stood at:\n{self.output[-3000:]}")

    def _read(self) -> bool:
        try:
            text = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            self.events.append(json.loads(line))
            self.times.append(time.monotonic())
        return bool(text)


_alive: list[Child] = []
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def _live_and_die(work: Callable[[], object], channel: int, output: int) -> None:
    """The life of a forked process; does not return."""
    global _channel
    code = 70
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # no run outlives its parent
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        faulthandler.enable(file=2)
        logging.getLogger().setLevel(logging.INFO)
        _alive.clear()
        _channel = channel
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        value = work()
        report("value", value)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        report("error", type(error).__name__, str(error))
        code = 1
    finally:
        with suppress(BaseException):
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns (a JSON value), done in a fork. Raises RuntimeError if it fails."""
    child = Child(work).end()
    child.bury()
    if child.code != 0:
        raise RuntimeError(f"{child.how}\n{child.output[-2000:]}")
    return child.of("value")[0][0]


def bury_all() -> None:
    """End every process that this one has started and not yet ended."""
    for child in list(_alive):
        child.bury()


@contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """A folder that is there within the context only."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Amounts:
    """How much is done: as the command line says."""

    kills: int  # inside saves, and as many in the middle of epochs
    corrupted: int  # files of each kind: truncated, with a flipped bit, with a zeroed page
    quick: bool  # everything else a few times only
    seed: int

    def few(self, number: int) -> int:
        """`number`, or a tenth of it in a quick run."""
        return max(1, number // 10) if self.quick else number

    def within(self, seconds: float) -> float:
        """A bound on time; none in a quick run, which tests make on any machine, beside anything."""
        return math.inf if self.quick else seconds

    def generator(self, name: object) -> random.Random:
        """Random choices of one part, the same for the same seed."""
        return random.Random(f"{self.seed} {name}")


@dataclass
class Tally:
    """What came of one row's runs."""

    runs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    note: str = ""
    not_run: str = ""  # why, where it could not be

    def add(self, what: str, number: int = 1) -> None:
        """Count; also 0, so that the table shows it."""
        self.counts[what] += number

    def expect(self, holds: bool, what: str, detail: object = "") -> bool:
        """Note a failure unless it holds."""
        if not holds:
            self.failures.append(f"{what}: {detail}" if str(detail) else what)
        return bool(holds)

    def merge(self, other: Tally) -> None:
        """Add what came of another part of the same row."""
        self.runs += other.runs
        self.counts.update(other.counts)
        self.counts.update(dict.fromkeys(other.counts, 0))
        self.failures += other.failures
        self.note = " ".join(filter(None, dict.fromkeys([self.note, other.note])))
        self.not_run = self.not_run or other.not_run


@dataclass
class Reference:
    """The run that nothing befell."""

    trained: dict[tuple[int, int], list[Any]]
    validated: dict[tuple[int, int], list[Any]]
    end: dict[str, str]
    saves: int
    deletions: int
    save_seconds: float
    delete_seconds: float
    step_seconds: float

    @property
    def order(self) -> list[tuple[int, int]]:
        """(epoch, step) of every training batch."""
        return list(self.trained)


def reference(run: Run, parent: Path) -> Reference:
    """Do the run to its end, undisturbed."""
    with new_folder(parent) as folder:
        child = Child(lambda: train(replace(run, folder=folder))).end()
        child.bury()
    if child.code != 0:
        raise RuntimeError(f"the undisturbed run failed: {child.how}\n{child.output[-3000:]}")
    return Reference(
        by_place(child.of("train")),
        by_place(child.of("valid")),
        child.of("end")[0][0],
        len(child.of("saved")),
        len(child.of("deleted")),
        _typical_seconds(child, "save", "saved"),
        _typical_seconds(child, "delete", "deleted"),
        _typical_seconds(child, "train", "train"),
    )


def by_place(records: list[list[Any]]) -> dict[tuple[int, int], list[Any]]:
    """(epoch, step) -> the rest of the record."""
    return {(epoch, step): rest for epoch, step, *rest in records}


def _typical_seconds(child: Child, begins: str, ends: str) -> float:
    found, began = [], None
    for event, at in zip(child.events, child.times, strict=True):
        if event[0] == ends and began is not None:
            found.append(at - began)
            began = None
        if event[0] == begins:
            began = at
    return statistics.median(found) if found else 0.0


def differences(whole: Reference, lives: Sequence[Child]) -> list[str]:
    """What in the lives of a run, together, is not as in the undisturbed one; the last of them came to the end."""
    found = []
    order = {place: number for number, place in enumerate(whole.order)}
    done = 0
    for number, life in enumerate(lives, 1):
        trained, last = by_place(life.of("train")), number == len(lives)
        wrong = [
            f"{kind} (epoch, step) {place}: {record} instead of {expected.get(place)}"
            for kind, expected in (("train", whole.trained), ("valid", whole.validated))
            for place, record in by_place(life.of(kind)).items()
            if expected.get(place) != record
        ]
        if wrong:
            found.append(f"life {number}: {len(wrong)} batches differ, first {wrong[0]}")
            continue
        places = [order[place] for place in trained]
        if places != list(range(places[0], places[0] + len(places)) if places else []):
            found.append(f"life {number}: not one batch after the other: {list(trained)}")
        elif places and places[0] > done:
            found.append(f"life {number}: begins at {whole.order[places[0]]}, but only {done} batches were done")
        elif last and places and places[-1] != len(order) - 1:
            found.append(f"life {number}: ended at {whole.order[places[-1]]}")
        done = max(done, *(place + 1 for place in places)) if places else done
    end = lives[-1].of("end")
    if not end:
        return [*found, f"the last life did not come to the end: {lives[-1].how}"]
    return [*found, *(f"{name} differ at the end" for name, it in end[0][0].items() if whole.end[name] != it)]


def repeated_batches(whole: Reference, lives: Sequence[Child]) -> int:
    """Training batches that were done more than once."""
    return sum(len(life.of("train")) for life in lives) - len(whole.trained)


# ---------------------------------------------------------------------- the folder, looked at with other eyes


def checkpoints_in(save: Path) -> tuple[dict[str, Path], list[str]]:
    """Name -> folder of every finished checkpoint, and what is wrong with those that are torn.

    Reads the manifest as `sha256sum -c` does, and nothing of the package.
    """
    good, torn = {}, []
    folders = sorted(save.glob("CKPT+*")) if save.is_dir() else []
    for folder in folders:
        try:
            lines = (folder / "MANIFEST.sha256").read_text().splitlines()
            sums = {line[66:]: line[:64] for line in lines}
            files = {path.name for path in folder.iterdir()} - {"MANIFEST.sha256"}
            if files != set(sums) or not files:
                raise ValueError(f"{sorted(files)} lie there, {sorted(sums)} are listed")
            for name, expected in sums.items():
                if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                    raise ValueError(f"{name} is not as listed")
            json.loads((folder / "meta.json").read_text())
            good[folder.name] = folder
        except (OSError, ValueError) as error:
            torn.append(f"{folder.name}: {error}")
    return good, torn


def judge_kill(tally: Tally, whole: Reference, run: Run, lives: list[Child], resume: bool = True) -> bool:
    """After a kill of the last of `lives`: look at the folder, go on to the end, compare. Returns whether all is well.

    resume: False where the run is to be killed again.
    """
    failures = len(tally.failures)
    good, torn = checkpoints_in(run.folder / "save")
    finished = [name for (name,) in lives[-1].of("saved")]
    lost = bool(finished) and not any(name >= finished[-1] for name in good)
    tally.add("torn", len(torn))
    tally.add("finished saves lost", int(lost))
    tally.expect(not torn, "torn", torn)
    tally.expect(not lost, "finished save lost", f"{finished[-1:]} of {sorted(good)}")
    if resume:
        lives.append(Child(lambda: train(replace(run, triggers=(), on_read=None))).end())
        judge_end(tally, whole, lives)
    return len(tally.failures) == failures


def judge_end(tally: Tally, whole: Reference, lives: list[Child]) -> bool:
    """The last life was to come to the end: did it, and is everything as in the undisturbed run?"""
    crashed = lives[-1].code != 0
    tally.add("crashes on resume", int(crashed))
    if not tally.expect(not crashed, "resume crashed", f"{lives[-1].how}\n{lives[-1].output[-1500:]}"):
        return False
    wrong = differences(whole, lives)
    tally.add("bitwise equal", int(not wrong))
    return tally.expect(not wrong, "not as undisturbed", "; ".join(wrong))
