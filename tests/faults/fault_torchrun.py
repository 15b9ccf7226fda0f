"""Starts torchrun on the fault matrix's worker, and tells what became of each of its processes.

Its workers are forks (forked_torchrun.py); `plain=True` is the command as a user types it.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import fault_runs
import forked_torchrun
from fault_runs import Child
from fault_worker import Plan
from forked_torchrun import POLL_SECONDS

WORKER = Path(__file__).with_name("fault_worker.py")
LIMIT_SECONDS = 300  # after which a start of torchrun counts as hung
PATIENCE_SECONDS = 30  # of torchrun with workers that it has asked to end
_numbers = itertools.count()


class Launch:
    """One start of torchrun with `world` workers on a plan, under way.

    restarts: torchrun's --max-restarts; patience: seconds until it kills those that do not heed its SIGTERM. Events are
    lists [kind, rank, life, time, values...] in the order in which they were written; time is the system's monotonic
    clock. life: counts torchrun's restarts.
    """

    def __init__(
        self,
        plan: Plan,
        place: Path,
        world: int = 2,
        restarts: int = 0,
        plain: bool = False,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
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
        arguments = ["--standalone", f"--nproc_per_node={world}", f"--max-restarts={restarts}", str(WORKER), str(path)]
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
            time.sleep(POLL_SECONDS)

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
            time.sleep(POLL_SECONDS)
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
_BELOW = ("/distributed/elastic/", "/distributed/run.py", "/distributed/launcher/", "/tests/faults/", "runpy")


def _shortened(text: str, characters: int = 1800) -> str:
    """The beginning and the end of what each rank said, without the frames of this folder."""
    parts = []
    for part in text.split("\n\n["):
        kept = "\n".join(line for line in part.splitlines() if not any(it in line for it in _BELOW))
        half = characters // 2
        parts.append(kept if len(kept) <= characters else f"{kept[:half]}\n...\n{kept[-half:]}")
    return "\n\n[".join(parts)


def _exec(arguments: list[str]) -> NoReturn:
    os.set_inheritable(fault_runs._channel, True)  # closed, it would mean that the process is about to end
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])


def _agent(arguments: list[str], events: str, patience: float) -> None:
    """torchrun in this process."""
    record = os.open(events, os.O_WRONLY | os.O_APPEND)

    def start(args: tuple[str, ...], env: dict[str, str]) -> forked_torchrun.ForkedInterpreter:
        place = int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"])

        def note(kind: str, value: int) -> None:
            os.write(record, (json.dumps([kind, *place, time.monotonic(), value]) + "\n").encode())

        return forked_torchrun.ForkedInterpreter(args, env, patience, Path(f"{events}.said.{env['RANK']}"), note)

    forked_torchrun.run(arguments, start)
