"""A signal is a request, in the process that runs the loop and nowhere else."""

import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
from programs import DEADLINE_SECONDS, Program, run_python

from amp_recipes import interrupts as module
from amp_recipes.interrupts import Interrupts, RunInterrupted

LOG_FROM_A_THREAD = module._log
TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
ALL = [TERM, INT, HUP, signal.SIGQUIT, USR1, signal.SIGUSR2, signal.SIGXCPU]
DEFAULTS = {signum: signal.default_int_handler if signum == INT else signal.SIG_DFL for signum in ALL}
by_name = pytest.mark.parametrize("signum", ALL, ids=lambda signum: signum.name)


@pytest.fixture(autouse=True)
def default_handlers():
    """As Python starts, and as a test has to leave them."""
    before = {signum: signal.signal(signum, default) for signum, default in DEFAULTS.items()}
    yield
    left = {signum: signal.signal(signum, handler) for signum, handler in before.items()}
    assert left == DEFAULTS
    assert module._installed == [] and Interrupts._saves == 0


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """What the handler has for the log, without the thread that writes it."""
    lines = []
    monkeypatch.setattr(module, "_log", lines.append)
    return lines


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def ended(interrupts, signum):
    """Leave a block whose request has been seen, as the loop does."""
    with pytest.raises(RunInterrupted) as left:
        interrupts.leave("saved")
    assert left.value.code == 128 + signum
    interrupts.requested = None


@by_name
def test_a_signal_is_noted_and_the_work_goes_on(signum, said):
    work = []
    with Interrupts() as interrupts:
        assert interrupts.requested is None
        signal.raise_signal(signum)
        work.append("finished")
        assert interrupts.requested == signum
        ended(interrupts, signum)
    assert work == ["finished"]
    (line,) = said
    assert line.startswith(f"{signum.name}: finishing the step, saving, then exiting")
    assert ("press Ctrl-C again to exit at once" in line) == (signum == INT)


@by_name
def test_leave_ends_the_process_with_the_code_of_the_signal(signum, caplog):
    interrupts = Interrupts()
    with pytest.raises(SystemExit) as left, interrupts:
        signal.raise_signal(signum)
        interrupts.leave("epoch 2, step 3: saved")
    assert isinstance(left.value, RunInterrupted) and left.value.code == 128 + signum
    assert str(left.value) == f"{signum.name}: epoch 2, step 3: saved" and str(left.value) in caplog.text


@by_name
def test_a_real_process_ends_with_the_code_of_the_signal(signum):
    script = """\
import signal, sys, time
signal.signal(int(sys.argv[1]), eval(f"signal.{sys.argv[2]}"))  # the tests may run under nohup
from amp_recipes.interrupts import Interrupts
with Interrupts() as interrupts:
    print("ready", flush=True)
    while interrupts.requested is None:
        time.sleep(0.001)
    print("step finished", flush=True)
    interrupts.leave("saved")
"""
    default = "default_int_handler" if signum == INT else "SIG_DFL"
    run = Program("-c", script, int(signum), default, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signum)
        out, err = run.communicate(timeout=DEADLINE_SECONDS)
    finally:
        run.kill()
    assert (run.returncode, out) == (128 + signum, "step finished\n")
    assert f"{signum.name}: finishing the step" in err and f"{signum.name}: saved" in err and "Traceback" not in err


@pytest.mark.parametrize("interactive", [True, False])
@pytest.mark.parametrize("signum", [TERM, INT])
def test_an_interactive_session_survives_ctrl_c(monkeypatch, signum, interactive):
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        monkeypatch.delattr(sys, "ps1", raising=False)
    expected = KeyboardInterrupt if interactive and signum == INT else RunInterrupted
    with pytest.raises(expected, match=f"{signum.name}: saved"), Interrupts() as interrupts:
        signal.raise_signal(signum)
        interrupts.leave("saved")


def test_a_second_ctrl_c_breaks_in_unless_it_is_the_same_one_or_a_save_is_under_way(clock):
    lived_through = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(INT)
        clock.now += 0.99
        signal.raise_signal(INT)  # a terminal and a launcher pass one Ctrl-C on twice
        lived_through.append("the same")
        clock.now += 0.02
        with interrupts.saving():
            with interrupts.saving():
                signal.raise_signal(INT)
            signal.raise_signal(INT)
        lived_through.append("a save")
        with Interrupts().saving():  # of another run inside this one
            signal.raise_signal(INT)
        lived_through.append("another's save")
        assert interrupts.requested == INT
        signal.raise_signal(INT)
        lived_through.append("the second")
    assert lived_through == ["the same", "a save", "another's save"]


def test_a_save_that_fails_is_over(clock):
    failed = False
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(INT)
        clock.now += 2
        with pytest.raises(OSError, match="full"), interrupts.saving():
            signal.raise_signal(INT)
            raise OSError("full")
        failed = True
        signal.raise_signal(INT)
    assert failed


def test_sigterm_again_and_again_changes_nothing(clock, said):
    with Interrupts() as interrupts:
        for _ in range(5):
            signal.raise_signal(TERM)
            clock.now += 10
        assert interrupts.requested == TERM
        ended(interrupts, TERM)
    assert said == ["SIGTERM: finishing the step, saving, then exiting"]


@pytest.mark.parametrize("order", [(TERM, INT), (INT, TERM)])
def test_the_first_signal_decides_the_code(clock, order):
    with Interrupts() as interrupts:
        for signum in order:
            signal.raise_signal(signum)
            clock.now += 10
        assert interrupts.requested == order[0]
        ended(interrupts, order[0])
    lived_through = []
    with pytest.raises(KeyboardInterrupt), Interrupts():
        for signum in (TERM, INT, INT):  # the second Ctrl-C counts, whatever came first
            signal.raise_signal(signum)
            lived_through.append(signum)
            clock.now += 10
    assert lived_through == [TERM, INT]


def test_a_request_that_nobody_heeds_ends_the_process_where_the_block_ends():
    interrupts = Interrupts()
    with pytest.raises(RunInterrupted) as left, interrupts:
        signal.raise_signal(TERM)
    assert left.value.code == 143
    with interrupts:  # used again, it has forgotten
        assert interrupts.requested is None


def test_an_exception_is_not_hidden_by_a_request():
    with pytest.raises(ValueError, match="mine"), Interrupts():
        signal.raise_signal(TERM)
        raise ValueError("mine")


@pytest.mark.parametrize("signum", [INT, HUP, USR1], ids=lambda signum: signum.name)
@pytest.mark.parametrize("mine", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "own"])
def test_ignored_signals_and_own_handlers_stay(mine, signum):
    """nohup ignores SIGHUP."""
    signal.signal(signum, mine)
    with Interrupts(["SIGUSR1"]) as interrupts:
        assert signal.getsignal(signum) == mine and signal.getsignal(TERM) == interrupts._note
        signal.raise_signal(signum)
        assert interrupts.requested is None and interrupts.save_requested is None
    assert signal.getsignal(signum) == mine
    signal.signal(signum, DEFAULTS[signum])


@pytest.mark.parametrize("save_signals", ["[]", "['SIGUSR1']"])
def test_a_handler_that_is_not_pythons_stays(save_signals):
    """faulthandler's, and those of C libraries, of which `signal.getsignal` knows nothing."""
    script = f"""
import faulthandler, signal
from amp_recipes.interrupts import Interrupts
faulthandler.register(signal.SIGUSR1)
with Interrupts({save_signals}) as interrupts:
    signal.raise_signal(signal.SIGUSR1)
    print(interrupts.requested, interrupts.save_requested)
"""
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stdout) == (0, "None None\n"), ended.stderr
    assert "most recent call first" in ended.stderr


def test_a_signal_that_means_save_and_go_on_asks_for_no_end(said):
    with Interrupts(["SIGUSR1", "SIGXCPU"]) as interrupts:
        assert interrupts.save_requested is None
        signal.raise_signal(USR1)
        assert (interrupts.save_requested, interrupts.requested) == (USR1, None)
        interrupts.save_requested = None
        signal.raise_signal(signal.SIGUSR2)  # the others still end the run
        assert (interrupts.save_requested, interrupts.requested) == (None, signal.SIGUSR2)
        signal.raise_signal(signal.SIGXCPU)
        assert (interrupts.save_requested, interrupts.requested) == (signal.SIGXCPU, signal.SIGUSR2)
        ended(interrupts, signal.SIGUSR2)
    with interrupts:  # used again, it has forgotten
        assert interrupts.save_requested is None
    assert [line.partition(":")[0] for line in said] == ["SIGUSR2"]
    assert copy.deepcopy(interrupts)._saves_at == interrupts._saves_at == {USR1, signal.SIGXCPU}


def test_a_handler_that_the_recipe_sets_within_stays():
    def mine(*_):
        pass

    with Interrupts():
        signal.signal(TERM, mine)
    assert signal.getsignal(TERM) is mine
    signal.signal(TERM, signal.SIG_DFL)


def test_one_inside_another_does_nothing_and_the_outer_one_notes():
    outer, inner = Interrupts(), Interrupts()
    with outer:
        with inner:
            signal.raise_signal(TERM)
            assert (outer.requested, inner.requested) == (TERM, None)
        assert signal.getsignal(TERM) == outer._note
        ended(outer, TERM)
        with outer:
            signal.raise_signal(INT)
        assert signal.getsignal(TERM) == outer._note and outer.requested == INT
        ended(outer, INT)


def test_in_another_thread_it_does_nothing():
    seen = []

    def work():
        with Interrupts() as interrupts, interrupts.saving():
            seen.append((signal.getsignal(TERM), interrupts.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(signal.SIG_DFL, None)]


FORKING = """
import os, signal, threading, time
from amp_recipes.interrupts import Interrupts
statuses = []
def fork():
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        os._exit(7)
    statuses.append(os.waitpid(pid, 0)[1])
with Interrupts() as interrupts:
    if {from_thread}:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    else:
        fork()
    print(os.WTERMSIG(statuses[0]), signal.getsignal(signal.SIGTERM) == interrupts._note, interrupts.requested)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("from_thread", [False, True])
def test_a_forked_process_ends_at_a_sigterm(from_thread):
    """In a process of its own: libraries that other tests have imported may not survive a fork from a thread."""
    done = run_python("-c", FORKING.format(from_thread=from_thread))
    assert done.stdout.split() == [str(int(TERM)), "True", "None"], done.stderr


def test_the_handler_waits_for_no_lock_that_the_interrupted_code_holds(monkeypatch):
    monkeypatch.setattr(module, "_log", LOG_FROM_A_THREAD)
    lock = threading.Lock()  # unlike the locks of logging, it cannot be taken twice by one thread

    lines = []

    class Locked(logging.Handler):
        def emit(self, record):
            with lock:
                lines.append(record.getMessage())

    handler = Locked()
    module.logger.addHandler(handler)
    try:
        with Interrupts() as interrupts:
            with lock:
                signal.raise_signal(TERM)
                assert interrupts.requested == TERM and lines == []
            ended(interrupts, TERM)
    finally:
        module.logger.removeHandler(handler)
    assert lines == ["SIGTERM: finishing the step, saving, then exiting", "SIGTERM: saved"]


def test_a_copy_has_noted_nothing():
    with Interrupts() as interrupts:
        signal.raise_signal(TERM)
        for other in (copy.deepcopy(interrupts), pickle.loads(pickle.dumps(interrupts))):
            assert other.requested is None and other._earlier == {}
        ended(interrupts, TERM)


@pytest.mark.parametrize("heeded", [True, False], ids=["in the loop", "at its end"])
@pytest.mark.parametrize(("processes", "status"), [("2", 143), ("1", -signal.SIGTERM)])
@pytest.mark.parametrize("first", ["SIGTERM", "SIGUSR1"])
def test_a_second_sigterm_leaves_one_of_several_processes_its_exit_code(processes, status, heeded, first):
    """torchrun sends it to all as soon as the first has ended; one process alone ends at once, as the user wants."""
    script = f"""
import os, signal
from amp_recipes.interrupts import Interrupts, RunInterrupted
try:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.{first})
        if {heeded}:
            interrupts.leave("saved")
except RunInterrupted:
    os.kill(os.getpid(), signal.SIGTERM)
    raise
"""
    expected = 128 + signal.Signals[first] if status > 0 else status
    assert run_python("-c", script, env={"WORLD_SIZE": processes}).returncode == expected


def test_a_request_to_save_that_came_too_late_is_told(caplog):
    with Interrupts(["SIGUSR1"]):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert "SIGUSR1: there was nothing left to save" in caplog.text
