"""Starts torchrun on the fault benchmark's worker, and tells what became of each of its processes.

It is torch's own `torch.distributed.run`, in a fork, with its agent, rendezvous and restarts. Only the interpreter that
it would start for each worker is a fork too, which has imported torch already: a start costs 0.3 s instead of 8.
`plain=True` is the command as a user types it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import _fault_runs
import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handlers
import torch.distributed.fsdp  # noqa: F401 - what workers import, once here instead of in each
import torch.distributed.run as torchrun
from _fault_runs import Child
from _fault_worker import Plan

WORKER = Path(__file__).with_name("_fault_worker.py")
LIMIT_SECONDS = 60  # after which a start of torchrun counts as hung
PATIENCE_SECONDS = 30  # of torchrun with workers that it has asked to end
_POLL_SECONDS = 0.005
_numbers = itertools.count()


class Launch:
    """One start of torchrun with `world` workers on a plan, under way.

    restarts: torchrun's --max-restarts; patience: seconds until it kills those that do not heed its SIGTERM. Events are
    lists [kind, rank, life, time, values...] in the order in which they were written; time is the system's monotonic
    clock. life: counts torchrun's restarts.
    """

    def __init__(
        self, plan: Plan, place: Path, world: int = 2, restarts: int = 0, plain: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> None:  # fmt: skip
        number = next(_numbers)
        self.events: list[list[Any]] = []
        self._file = place / f"events.{number}"
        self._file.touch()
        self._read = 0
        self._open: dict[tuple[int, int], int] = {}  # (life, rank) -> pidfd of a worker that lives
        self._pids: set[int] = set()
        self.hung = False
        self.ended: dict[tuple[int, int], float] = {}  # (life, rank) -> when its process was found to be over
        path = replace(plan, events=str(self._file)).save(place / f"plan.{number}.json")
        arguments = [
            "--standalone", f"--nproc_per_node={world}", f"--max-restarts={restarts}", str(WORKER), str(path),
        ]  # fmt: skip
        start = partial(_exec, arguments) if plain else partial(_agent, arguments, str(self._file), patience)
        self.agent = Child(start, 2 * LIMIT_SECONDS)
        _alive.append(self)

    def until(self, wanted: Callable[[list[Any]], bool]) -> bool:
        """Wait for an event that is `wanted`; False if all was over before."""
        looked_at = 0
        while True:
            over = self._look()
            for event in self.events[looked_at:]:
                if wanted(event):
                    return True
            looked_at = len(self.events)
            if over:
                return False
            time.sleep(_POLL_SECONDS)

    def end(self) -> Launch:
        """Wait until torchrun and all workers have ended; those that do not are killed, and `hung` is set."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self._look():
            if time.monotonic() > deadline:
                self.hung = True
                for pid in self._pids:
                    _signal_group(pid, signal.SIGUSR1)  # shows where each thread stands
                time.sleep(0.5)
                self.bury()
                break
            time.sleep(_POLL_SECONDS)
        return self

    def bury(self) -> None:
        """Kill what is left of it, workers included."""
        self._look()
        for pid in self._pids:  # each leads a session of its own
            _signal_group(pid, signal.SIGKILL)
        self.agent.bury()
        self._look()
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        if self in _alive:
            _alive.remove(self)

    def of(self, kind: str, life: int | None = None) -> list[list[Any]]:
        """The events of a kind: [rank, values...]."""
        return [[it[1], *it[4:]] for it in self.events if it[0] == kind and life in (None, it[2])]

    def codes(self, life: int) -> dict[int, int]:
        """Rank -> exit code; negative: the signal that ended it. Of plain torchrun nothing is known."""
        return {rank: code for rank, code in self.of("exit", life)}

    @property
    def fault_time(self) -> float | None:
        """When the first fault came."""
        return next((it[3] for it in self.events if it[0] == "fault"), None)

    @property
    def lives(self) -> int:
        """How often the workers were started."""
        return 1 + max((it[2] for it in self.events), default=-1)

    @property
    def said(self) -> str:
        """What the workers wrote, one after the other; of plain torchrun all that was written."""
        files = sorted(self._file.parent.glob(f"{self._file.name}.said.*"))
        texts = [f"[{file.suffixes[-1][1:]}] {file.read_text(errors='replace')}" for file in files]
        return "\n\n".join(texts) if texts else self.agent.output

    @property
    def how(self) -> str:
        """How it ended, in words."""
        codes = [self.codes(life) for life in range(self.lives)]
        hung = f"it hung for {LIMIT_SECONDS} s; " if self.hung else ""
        return f"{hung}torchrun's exit code {self.agent.code}, workers' {codes}; they said:\n{_shortened(self.said)}"

    def _look(self) -> bool:
        """Take in what has happened; whether all is over."""
        agent_over = self.agent.poll()
        self._read_events()
        for key, descriptor in list(self._open.items()):
            if select.select([descriptor], [], [], 0)[0]:
                os.close(self._open.pop(key))
                self.ended.setdefault(key, time.monotonic())  # torchrun's word for it came earlier, if there is one
        return agent_over and not self._open

    def _read_events(self) -> None:
        with self._file.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            self.events.append(event)
            if event[0] == "exit":
                self.ended[event[2], event[1]] = event[3]
            if event[0] in ("fork", "start") and event[4] not in self._pids:
                key = event[2], event[1]
                self._pids.add(event[4])
                try:
                    self._open[key] = os.pidfd_open(event[4])
                except ProcessLookupError:
                    self.ended.setdefault(key, time.monotonic())


_alive: list[Launch] = []


def bury_all_launches() -> None:
    """End every torchrun, and every worker, that this process has started and not yet ended."""
    for launch in list(_alive):
        launch.bury()


def _signal_group(pid: int, number: int) -> None:
    """Signal a worker and its children, if it is still there."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
    except ProcessLookupError:
        pass


# What a fork has below its own frames: the agent's.
_BELOW = ("/distributed/elastic/", "/distributed/run.py", "/distributed/launcher/", "/benchmarks/_fault_", "runpy")


def _shortened(text: str, characters: int = 1800) -> str:
    """The beginning and the end of what each rank said, without the frames of this benchmark."""
    parts = []
    for part in text.split("\n\n["):
        kept = "\n".join(line for line in part.splitlines() if not any(it in line for it in _BELOW))
        half = characters // 2
        parts.append(kept if len(kept) <= characters else f"{kept[:half]}\n...\n{kept[-half:]}")
    return "\n\n[".join(parts)


def _exec(arguments: list[str]) -> NoReturn:
    os.set_inheritable(_fault_runs._channel, True)  # closed, it would mean that the process is about to end
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])


def _agent(arguments: list[str], events: str, patience: float) -> None:
    """torchrun in this process."""
    ForkedInterpreter.patience = patience
    record = os.open(events, os.O_WRONLY | os.O_APPEND)
    handlers.SubprocessHandler._popen = lambda self, args, env: ForkedInterpreter(args, env, record, events)
    torchrun.main(arguments)


class ForkedInterpreter:
    """What `subprocess.Popen([python, "-u", script, ...], start_new_session=True)` is to torchrun."""

    patience: float = PATIENCE_SECONDS

    def __init__(self, args: tuple[str, ...], env: dict[str, str], record: int, events: str) -> None:
        self.returncode: int | None = None
        self._record, self._place = record, (int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"]))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            said = f"{events}.said.{env['RANK']}"
            output = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _be_interpreter(args[args.index("-u") + 1 :], env)
        self._note("fork", self.pid)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self._note("exit", self.returncode)
        return self.returncode

    def _note(self, kind: str, value: int) -> None:
        os.write(self._record, (json.dumps([kind, *self._place, time.monotonic(), value]) + "\n").encode())

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + min(self.patience, float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return self.returncode


def _be_interpreter(argv: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    """Run a script in this fork as a new interpreter would: hooks, threads, exit functions and exit code."""
    code = 120
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        sys.argv = list(argv)
        code = 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            code = 1
            sys.excepthook(*sys.exc_info())
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
