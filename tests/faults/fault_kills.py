"""Rows of the fault matrix in which a run is killed or asked to end: 1 to 4, 9, 13 to 16."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fault_runs import (
    BATCH,
    LARGE,
    Amounts,
    Child,
    Noisy,
    Reference,
    Run,
    Tally,
    Trigger,
    fit,
    in_child,
    judge_end,
    judge_kill,
    make,
    new_folder,
    reference,
    repeated_batches,
    train,
)

_TRIES = 6  # per kill that is to hit something short


def in_saves(amounts: Amounts, folder: Path, background: bool) -> Tally:
    """Row 1: a kill while a checkpoint is being written."""
    run = Run(None, width=LARGE, options={"ckpt_interval_steps": 1, "ckpt_background": background})
    return _aimed(amounts, folder, run, amounts.kills // 2, "save", "saved", "inside a save")


def in_deletions(amounts: Amounts, folder: Path, background: bool) -> Tally:
    """Row 3: a kill while an old checkpoint is being deleted."""
    run = Run(None, width=LARGE, options={"ckpt_interval_steps": 1, "ckpt_background": background})
    return _aimed(amounts, folder, run, max(1, amounts.kills // 8), "delete", "deleted", "inside a deletion")


def _aimed(amounts: Amounts, folder: Path, run: Run, wanted: int, begins: str, ends: str, what: str) -> Tally:
    """Kill between two reports, at a random one of them, after a random part of the time that it usually takes."""
    tally, chance = Tally(), amounts.generator((begins, run.options))
    whole = reference(run, folder)
    places = whole.saves if begins == "save" else whole.deletions
    usual = whole.save_seconds if begins == "save" else whole.delete_seconds
    for _ in range(wanted * _TRIES):
        if tally.counts[what] == wanted:
            break
        with new_folder(folder) as place:
            this = replace(run, folder=place)
            life = Child(lambda this=this: train(this))
            life.until(lambda event: event[0] == begins, chance.randint(1, places))
            time.sleep(chance.uniform(0, usual))
            life.kill()
            open_ones = len(life.of(begins)) - len(life.of(ends))
            tally.runs += 1
            tally.add(what, int(open_ones > 0))
            tally.add("before or after one", int(open_ones == 0))
            lives = [life]
            judge_kill(tally, whole, this, lives)
            for it in lives:
                it.bury()
    tally.expect(tally.counts[what] == wanted, f"{tally.counts[what]} of {wanted} kills came {what}")
    return tally


def in_epochs(amounts: Amounts, folder: Path, workers: int) -> Tally:
    """Row 2: a kill in the middle of an epoch."""
    tally, chance = Tally(), amounts.generator(("in epochs", workers))
    run = Run(None, workers=workers)
    whole = reference(run, folder)
    for _ in range(amounts.kills // 2):
        with new_folder(folder) as place:
            this = replace(run, folder=place).with_options(ckpt_interval_steps=chance.choice([1, 2, 5]))
            life = Child(lambda this=this: train(this))
            life.until(lambda event: event[0] == "train", chance.randint(1, len(whole.order)))
            time.sleep(chance.uniform(0, whole.step_seconds))
            life.kill()
            tally.runs += 1
            tally.add("also inside a save", int(len(life.of("save")) > len(life.of("saved"))))
            lives = [life]
            judge_kill(tally, whole, this, lives)
            for it in lives:
                it.bury()
    return tally


def two_in_an_epoch(amounts: Amounts, folder: Path, workers: int) -> Tally:
    """Row 4: a kill, and another one in the same epoch of the resumed run."""
    tally, chance = Tally(), amounts.generator(("two", workers))
    run = Run(None, workers=workers, epochs=1, samples=10 * BATCH, options={"ckpt_interval_steps": 1})
    whole = reference(run, folder)
    for _ in range(amounts.few(max(1, amounts.kills // 10))):
        with new_folder(folder) as place:
            this, lives = replace(run, folder=place), []
            for last in (False, True):
                lives.append(Child(lambda this=this: train(this)))
                lives[-1].until(lambda event: event[0] == "train", chance.randint(2, 4))
                lives[-1].kill()
                judge_kill(tally, whole, this, lives, resume=last)
            tally.runs += 1
            for it in lives:
                it.bury()
    return tally


# ---------------------------------------------------------------------- the temporary folder


def temporary_folder_elsewhere(amounts: Amounts, folder: Path) -> Tally:
    """Row 9: kills inside saves while TMPDIR is a full file system, or another one."""
    tally, chance = Tally(), amounts.generator("temporary folder")
    run = Run(None, width=LARGE, options={"ckpt_interval_steps": 1})
    whole = reference(run, folder)
    with new_folder(folder) as mount, small_file_system(mount, 64) as mounted, new_folder(_other_disk()) as other:
        tally.note = "TMPDIR: a tmpfs of 64 kB, full, and a folder on another file system"
        if not mounted:
            tally.note = "TMPDIR: a folder on another file system (no permission to mount a small one)"
        (mount / "full").write_bytes(b"x" * (60_000 if mounted else 0))
        for number in range(amounts.few(20)):
            elsewhere = mount if mounted and number % 2 == 0 else other
            before = sorted(elsewhere.iterdir())
            with new_folder(folder) as place:
                this = replace(run, folder=place)
                life = Child(lambda this=this, elsewhere=elsewhere: _with_temporary_folder(elsewhere, this))
                life.until(lambda event: event[0] == "save", chance.randint(1, whole.saves))
                time.sleep(chance.uniform(0, whole.save_seconds))
                life.kill()
                tally.runs += 1
                lives = [life]
                judge_kill(tally, whole, this, lives)
                for it in lives:
                    it.bury()
            leaked = sorted(set(elsewhere.iterdir()) - set(before))
            tally.add("leaked", len(leaked))
            tally.expect(not leaked, "leaked", leaked)
    return tally


def _with_temporary_folder(folder: Path, run: Run) -> None:
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    train(run)


def _other_disk() -> Path:
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def small_file_system(mount: Path, kilobytes: int) -> Iterator[bool]:
    """A tmpfs of that size on `mount` within the context; yields False where this user may not mount."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(mount)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(mount)], capture_output=True)


# ---------------------------------------------------------------------- neighbours


def two_in_a_folder(amounts: Amounts, folder: Path) -> Tally:
    """Row 13: a second run in the folder of one that is under way."""
    tally = Tally()
    run = Run(None)
    whole = reference(run, folder)
    for number in range(amounts.few(5)):
        with new_folder(folder) as place:
            gate, opens = os.pipe()
            waits = Trigger("between steps", 2 + number, lambda gate=gate: os.read(gate, 1))
            this = replace(run, folder=place)
            life = Child(lambda this=this, waits=waits: train(replace(this, triggers=[waits])))
            life.until(lambda event: event[0] == "train", 2 + number)
            second = Child(lambda this=this: train(this)).end()
            os.write(opens, b"x")
            life.end()
            os.close(gate)
            os.close(opens)
            tally.runs += 1
            refused = second.code == 1 and second.error is not None and second.error[0] == "FolderInUseError"
            tally.add("second refused", int(refused))
            text = second.error[1] if second.error else ""
            tally.expect(refused, "the second run was not refused", second.how)
            tally.expect(
                str(life.pid) in text and socket.gethostname() in text and not second.of("train"),
                "the holder is not named",
                text,
            )
            tally.add("first undisturbed", int(judge_end(tally, whole, [life])))
            life.bury()
            second.bury()
    return tally


def stale_lock(amounts: Amounts, folder: Path) -> Tally:
    """Row 14: the holder of the lock is dead; its loader workers may not be."""
    tally = Tally()
    whole = {workers: reference(Run(None, workers=workers), folder) for workers in (0, 2)}
    for number in range(amounts.few(20)):
        with new_folder(folder) as place:
            this = Run(place, workers=2 * (number % 2))
            life = Child(lambda this=this: train(this))
            life.until(lambda event: event[0] == "train", 2)
            life.kill()
            lives = [life]
            judge_kill(tally, whole[this.workers], this, lives)
            tally.runs += 1
            tally.add("reclaimed", int(lives[-1].code == 0))
            for it in lives:
                it.bury()
    return tally


# ---------------------------------------------------------------------- signals

_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
_PHASES = [  # where the signal comes; options; loader workers
    ("reading a sample", {}, 0),
    ("a worker reading", {}, 2),
    ("forward", {}, 0),
    ("backward", {}, 0),
    ("backward", {"grad_accumulation_factor": 2}, 0),
    ("optimizer step", {}, 0),
    ("optimizer step", {"precision": "fp16", "init_scale": 1024.0}, 0),
    ("save", {"ckpt_interval_steps": 2}, 0),
    ("save", {"ckpt_interval_steps": 2, "ckpt_background": False}, 0),
    ("delete", {"ckpt_interval_steps": 2}, 0),
    ("delete", {"ckpt_interval_steps": 2, "ckpt_background": False}, 0),
    ("validation", {}, 0),
    ("between epochs", {}, 0),
    ("between steps", {}, 2),
]
_NTH = {"validation": (1, 4), "between epochs": (1, 2), "delete": (1, 2), "save": (1, 3)}


def signals(amounts: Amounts, folder: Path, number: signal.Signals) -> Tally:
    """Row 15: a signal in every phase of training, and in an evaluation."""
    tally, chance = Tally(), amounts.generator(number)
    wholes: dict[str, Reference] = {}
    phases = [_PHASES[2], _PHASES[8], _PHASES[11]] if amounts.quick else _PHASES
    for phase, options, workers in phases:
        run = Run(None, workers=workers, options=options)
        if repr(run) not in wholes:
            wholes[repr(run)] = reference(run, folder)
        whole = wholes[repr(run)]
        with new_folder(folder) as place:
            this = replace(run, folder=place)
            nth = chance.randint(*_NTH.get(phase, (3, 9)))
            life = Child(lambda this=this, phase=phase, nth=nth: train(_signalled(this, phase, number, nth))).end()
            _judge_signal(tally, whole, this, life, phase, number)
    if not amounts.quick:
        _in_evaluation(tally, folder, number)
    return tally


def _signalled(run: Run, phase: str, number: int, nth: int) -> Run:
    """To be called in the process that trains."""
    main = os.getpid()

    def act() -> None:
        os.kill(main, number)

    if phase in ("reading a sample", "a worker reading"):
        first = Trigger("read", nth, act)
        return replace(run, on_read=lambda index: first.at("read"))
    return replace(run, triggers=[Trigger(phase, nth, act)])


def _judge_signal(tally: Tally, whole: Reference, run: Run, life: Child, phase: str, number: signal.Signals) -> None:
    tally.runs += 1
    right = life.code == _CODES[number]
    tally.add(f"exit code {_CODES[number]}", int(right))
    tally.expect(right, f"{number.name} in '{phase}' {run.options}", life.how)
    lives = [life]
    judge_kill(tally, whole, run, lives)
    lost = repeated_batches(whole, lives) if lives[-1].code == 0 else 0
    tally.add("steps lost", lost)
    tally.expect(lost == 0, f"{number.name} in '{phase}' {run.options}", f"{lost} batches were done twice")
    for it in lives:
        it.bury()


def _in_evaluation(tally: Tally, folder: Path, number: signal.Signals) -> None:
    with new_folder(folder) as place:
        run = Run(place)

        def evaluate(run: Run) -> float:
            brain = make(run)
            return brain.evaluate(Noisy(16), test_loader_kwargs={"batch_size": BATCH})

        in_child(lambda: fit(make(run)))
        whole = in_child(lambda: evaluate(run))
        main_signalled = Child(lambda: evaluate(_signalled_in_evaluation(run, number))).end()
        again = in_child(lambda: evaluate(run))
    tally.runs += 1
    right = main_signalled.code == _CODES[number]
    tally.add(f"exit code {_CODES[number]}", int(right))
    tally.expect(right, f"{number.name} in an evaluation", main_signalled.how)
    tally.expect(again == whole, "the evaluation after it differs", f"{again} {whole}")
    main_signalled.bury()


def _signalled_in_evaluation(run: Run, number: int) -> Run:
    main = os.getpid()
    return replace(run, triggers=[Trigger("evaluation", 2, lambda: os.kill(main, number))])


def signals_in_saves(amounts: Amounts, folder: Path) -> Tally:
    """Row 16: one signal, then more of them inside the save that it asked for."""
    tally, chance = Tally(), amounts.generator("signals in saves")
    run = Run(None, width=LARGE)
    whole = reference(run, folder)
    second_ones = [signal.SIGTERM, signal.SIGINT]
    for turn in range(amounts.few(12)):
        number, again = second_ones[turn % 2], second_ones[turn // 2 % 2]
        pause = 1.2 if turn % 3 == 0 else 0.0  # a second SIGINT within a second is the same key stroke
        with new_folder(folder) as place:
            this = replace(run, folder=place).with_options(ckpt_background=turn % 4 < 2)
            nth = chance.randint(2, len(whole.order) - 1)

            def act(number=number, again=again, pause=pause, this=this, nth=nth) -> None:
                main = os.getpid()
                inside = Trigger("save", 1, lambda: _send(main, again, pause))
                first = Trigger("forward", nth, lambda: (os.kill(main, number), inner.append(inside)))
                inner: list[Trigger] = [first]
                train(replace(this, triggers=inner))

            life = Child(act).end()
            _judge_signal(tally, whole, this, life, f"forward, then {again.name} in the save", number)
    return tally


def _send(main: int, number: int, pause: float) -> None:
    time.sleep(pause)
    for _ in range(3):
        os.kill(main, number)
        time.sleep(0.002)
