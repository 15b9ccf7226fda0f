"""A save in the background holds the state of the moment it was asked for, and its errors are not lost."""

import contextlib
import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from device import DEVICE
from programs import DEADLINE_SECONDS, run_python
from repository import REPOSITORY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes.checkpoint import Checkpointer, background, snapshot
from amp_recipes.checkpoint.saving import held_by
from amp_recipes.checkpoint.state_format import pack_state, write_state
from amp_recipes.errors import CheckpointError


class Holder:
    """The smallest recoverable: hands out and takes any state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Gate:
    """Holds up the first fsync of a save until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.opened = threading.Event(), threading.Event()
        real = os.fsync

        def fsync(descriptor):
            self.reached.set()
            assert self.opened.wait(DEADLINE_SECONDS)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def open(self):
        self.opened.set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def finished(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("CKPT"))


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Conv1d(1, 2, 3)).to(DEVICE)
    model[2].weight.data = model[2].weight.data.transpose(0, 2)  # not row by row
    optimizer = torch.optim.Adam(model.parameters())
    model[1](model[0](torch.randn(8, 30).to(DEVICE))).square().sum().backward()
    optimizer.step()
    return model, optimizer


# --- what is saved


def test_the_state_is_that_of_the_call_and_training_goes_on_while_it_is_written(tmp_path, gate):
    model, optimizer = trained()
    values = Holder({"list": [1, 2], "array": torch.arange(5).numpy(), "set": {1}})
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer, "values": values})
    expected = copy.deepcopy([model.state_dict(), optimizer.state_dict(), values.state])
    meta = {"epoch": 1}
    checkpointer.start_saving(meta)
    assert gate.reached.wait(DEADLINE_SECONDS)
    assert finished(tmp_path) == []  # it is still being written, and yet this goes on:
    optimizer.step()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    values.state["list"].append(3)
    values.state["array"][:] = 9
    values.state["set"].add(2)
    meta["epoch"] = 2
    gate.open()
    checkpointer.wait()
    found = checkpointer.recover_if_possible()
    assert found.meta == {"epoch": 1}
    assert_equal([model.state_dict(), optimizer.state_dict(), values.state], expected)


def assert_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert (a == b) if not hasattr(a, "all") else (a == b).all()


def test_it_is_the_same_file_as_a_save_that_waits_would_write(tmp_path):
    model, optimizer = trained()
    one = Checkpointer(tmp_path / "one", {"model": model, "optimizer": optimizer})
    other = Checkpointer(tmp_path / "other", {"model": model, "optimizer": optimizer})
    for _ in range(2):  # the second from memory that is used again
        one.start_saving({"x": 1})
        other.save_checkpoint({"x": 1})
        one.wait()
        for path in one.list_checkpoints()[0].path.iterdir():
            assert path.read_bytes() == (other.list_checkpoints()[0].path / path.name).read_bytes()


def test_host_memory_is_used_again_and_follows_the_state(tmp_path, monkeypatch):
    made = []
    real = torch.empty_like

    def empty_like(tensor, **kwargs):
        if kwargs.get("device") == "cpu":
            made.append(tuple(tensor.shape))
        return real(tensor, **kwargs)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    holder = Holder({"a": torch.ones(3), "b": torch.ones(4)})
    checkpointer = Checkpointer(tmp_path, {"x": holder})
    for state, news in [
        ({"a": torch.ones(3), "b": torch.zeros(4)}, [(3,), (4,)]),
        ({"a": torch.zeros(3), "b": torch.ones(4)}, []),
        ({"a": torch.zeros(3), "b": torch.ones(5)}, [(5,)]),
        ({"a": torch.zeros(3).double()}, [(3,)]),
        ({"a": torch.zeros(3).double(), "b": torch.ones(5)}, [(5,)]),  # it was not kept for ever
    ]:
        made.clear()
        holder.state = state
        checkpointer.start_saving()
        saved = checkpointer.find_checkpoint()
        assert made == news
        assert_equal(checkpointer.read(saved)["x"], state)


def test_a_snapshot_taken_inside_inference_mode_can_be_taken_again_outside(tmp_path):
    holder = Holder(torch.ones(3))
    checkpointer = Checkpointer(tmp_path, {"x": holder})
    with torch.inference_mode():
        checkpointer.start_saving()
    holder.state = torch.zeros(3)
    checkpointer.start_saving()
    assert checkpointer.recover_if_possible().number == 2
    assert torch.equal(holder.state, torch.zeros(3))


# --- one at a time


def test_every_method_waits_for_what_is_under_way(tmp_path, gate):
    holder = Holder(torch.ones(3))
    checkpointer = Checkpointer(tmp_path, {"x": holder})
    other = Checkpointer(tmp_path, {"x": holder})  # of the same folder, by another path
    linked = Checkpointer(tmp_path / ".." / tmp_path.name, {"x": holder})
    asks = [
        checkpointer.list_checkpoints,
        checkpointer.find_checkpoint,
        checkpointer.recover_if_possible,
        checkpointer.wait,
        other.list_checkpoints,
        linked.wait,
    ]
    seen = []
    checkpointer.start_saving(then=lambda saved: seen.append("written"))
    assert gate.reached.wait(DEADLINE_SECONDS)
    threads = [threading.Thread(target=lambda ask=ask: (ask(), seen.append("asked"))) for ask in asks]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert seen == ["written", *["asked"] * len(asks)]


def test_saves_follow_each_other_and_are_numbered_in_the_order_they_were_asked_for(tmp_path):
    holder = Holder()
    checkpointer = Checkpointer(tmp_path, {"x": holder})
    inside, most, done = [], [], []

    def then(saved):
        inside.append(saved)
        most.append(len(inside))
        done.append((saved.number, saved.meta["n"], saved.path.is_dir()))
        inside.pop()

    for number in range(1, 6):
        holder.state = torch.full((1000,), float(number))
        if number == 3:
            checkpointer.save_checkpoint({"n": number})
        else:
            checkpointer.start_saving({"n": number}, then)
    checkpointer.wait()
    assert done == [(number, number, True) for number in (1, 2, 4, 5)]
    assert most == [1] * 4
    for saved in checkpointer.list_checkpoints():
        assert checkpointer.read(saved)["x"][0] == saved.meta["n"]


def test_the_old_go_in_the_background_too_but_only_after_the_new_is_there(tmp_path):
    holder = Holder(torch.ones(3))
    checkpointer = Checkpointer(tmp_path, {"x": holder})
    for loss in (3.0, 1.0, 2.0, float("nan")):
        checkpointer.start_saving({"loss": loss}, then=lambda saved: checkpointer.prune(saved, min_keys=["loss"]))
    assert [saved.number for saved in checkpointer.list_checkpoints()] == [4, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+000002", "CKPT+000004"]


def test_copies_of_a_checkpointer_share_its_folder_and_not_its_thread(tmp_path, gate):
    checkpointer = Checkpointer(tmp_path, {"x": Holder(torch.ones(3))})
    checkpointer.start_saving()
    assert gate.reached.wait(DEADLINE_SECONDS)
    copied, pickled = copy.deepcopy(checkpointer), pickle.loads(pickle.dumps(checkpointer))
    gate.open()
    for number, each in enumerate((copied, pickled), 1):
        assert next(iter(each.list_checkpoints())).number == number
        each.start_saving()
        each.wait()
    assert finished(tmp_path) == ["CKPT+000001", "CKPT+000002", "CKPT+000003"]


# --- what goes wrong


def failing_disk(monkeypatch, *names):
    """No checkpoint gets one of those names."""
    real = os.rename

    def rename(source, target):
        if Path(target).name in names:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)


def eventually(condition):
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_error_is_logged_at_once_and_raised_once_at_the_next_call_that_reads(tmp_path, monkeypatch, caplog):
    checkpointer = Checkpointer(tmp_path, {"x": Holder(torch.ones(3))})
    checkpointer.save_checkpoint({"optimizer_step": 1})
    failing_disk(monkeypatch, "CKPT+000002")
    called = []
    checkpointer.start_saving({"optimizer_step": 2}, then=called.append)
    message = (
        "Checkpoint CKPT+000002 (step 2) was not written: Input/output error. CKPT+000001 (step 1) is intact. "
        f"Folder: {str(tmp_path)!r}."
    )
    eventually(lambda: message in caplog.text)  # without anybody asking
    monkeypatch.undo()
    with pytest.raises(CheckpointError) as error:
        checkpointer.list_checkpoints()
    assert str(error.value) == message
    assert called == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+000001"]
    checkpointer.wait()
    checkpointer.start_saving({"optimizer_step": 4})
    checkpointer.wait()
    assert checkpointer.recover_if_possible().meta == {"optimizer_step": 4}


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_failed_does_not_keep_the_next_from_being_made(tmp_path, monkeypatch, caplog, background):
    holder = Holder(torch.ones(3))
    checkpointer = Checkpointer(tmp_path, {"x": holder})
    with monkeypatch.context() as patch:
        failing_disk(patch, "CKPT+000001")
        checkpointer.start_saving({"n": 1})
        eventually(lambda: not checkpointer._background.busy)
    holder.state = torch.zeros(3)
    threads = []
    if background:
        checkpointer.start_saving({"n": 2}, then=lambda saved: threads.append(threading.current_thread()))
        assert threads == [threading.current_thread()]  # its errors are seen at once
    else:
        checkpointer.save_checkpoint({"n": 2})
    assert finished(tmp_path) == ["CKPT+000001"]
    (warning,) = [it for it in caplog.records if it.levelno == logging.WARNING]
    assert "the previous save failed" in warning.getMessage() and "Input/output error" in warning.getMessage()
    holder.state = None
    assert checkpointer.recover_if_possible().meta == {"n": 2}
    assert torch.equal(holder.state, torch.zeros(3))
    checkpointer.start_saving({"n": 3}, then=lambda saved: threads.append(threading.current_thread()))
    checkpointer.wait()
    assert threads[-1] is not threading.current_thread()  # and the one after is beside training again


@pytest.mark.parametrize("save", ["start_saving", "save_checkpoint"])
def test_a_save_after_one_that_failed_raises_if_the_disk_is_still_bad(tmp_path, monkeypatch, save):
    checkpointer = Checkpointer(tmp_path, {"x": Holder(torch.ones(3))})
    failing_disk(monkeypatch, "CKPT+000001")
    checkpointer.start_saving({"optimizer_step": 1})
    with pytest.raises(CheckpointError, match=r"\(step 2\) was not written: Input/output error"):
        getattr(checkpointer, save)({"optimizer_step": 2})
    checkpointer.wait()  # both errors have been told
    assert finished(tmp_path) == []


def test_an_error_of_what_was_to_follow_is_raised_too(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"x": Holder(1)})
    checkpointer.start_saving({"loss": 1.0}, then=lambda saved: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpointer.wait()
    checkpointer.wait()
    assert finished(tmp_path) == ["CKPT+000001"]


def test_a_state_that_cannot_be_saved_is_refused_at_the_call(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"x": Holder(object())})
    with pytest.raises(CheckpointError, match="was not written"):
        checkpointer.start_saving()
    checkpointer.wait()


def test_a_diverged_model_is_not_saved_and_nothing_pruned(tmp_path):
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path, {"model": model})
    checkpointer.save_checkpoint({"loss": 2.0})
    model.weight.data[0, 0] = float("nan")
    checkpointer.start_saving({"loss": 1.0}, then=lambda saved: checkpointer.prune(saved, min_keys=["loss"]))
    with torch.no_grad():
        model.weight.fill_(0)  # the state was bad when it was taken
    with pytest.raises(CheckpointError, match=r"parameters are not finite .*model\.weight.*CKPT\+000001 is intact"):
        checkpointer.wait()
    assert finished(tmp_path) == ["CKPT+000001"]


@pytest.mark.parametrize("why", ["little is free", "none can be had"])
def test_without_memory_for_a_copy_it_is_written_at_once_and_that_is_said_once(tmp_path, monkeypatch, caplog, why):
    if why == "little is free":
        monkeypatch.setattr(snapshot, "free_host_memory", lambda: 2 * 4000 - 1)
    else:

        def fail(*args, **kwargs):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(torch, "empty_like", fail)
    checkpointer = Checkpointer(tmp_path, {"x": Holder(torch.ones(1000))})
    threads = []
    for _ in range(2):
        checkpointer.start_saving(then=lambda saved: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()] * 2
    assert finished(tmp_path) == ["CKPT+000001", "CKPT+000002"]
    assert caplog.text.count("training waits while a checkpoint is written") == 1


def test_enough_memory_is_twice_what_the_copy_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "free_host_memory", lambda: 2 * 4000)
    checkpointer = Checkpointer(tmp_path, {"x": Holder(torch.ones(1000))})
    threads = []
    checkpointer.start_saving(then=lambda saved: threads.append(threading.current_thread()))
    checkpointer.wait()
    assert threads != [threading.current_thread()]
    monkeypatch.setattr(snapshot, "free_host_memory", lambda: 0)  # nothing more is needed for the next
    checkpointer.start_saving(then=lambda saved: threads.append(threading.current_thread()))
    checkpointer.wait()
    assert threading.current_thread() not in threads


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux's /proc")
def test_free_memory_is_at_most_what_the_machine_has():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < snapshot.free_host_memory() <= total


def test_the_limit_of_a_container_counts_without_the_page_cache(tmp_path):
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 300\ninactive_file 500\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert snapshot._available_in_group(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert snapshot._available_in_group(tmp_path) is None


# --- processes


def run_interpreter(*words):
    """As `run_python`, with the end of a real interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *map(str, words)], env=environment, capture_output=True, text=True)


def run_script(tmp_path, body, run=run_python):
    script = """
        import os, sys, threading, torch
        from amp_recipes.checkpoint import Checkpointer
        torch.set_num_threads(1)
        class Holder:
            def __init__(self, state): self.state = state
            def state_dict(self): return self.state
            def load_state_dict(self, state): self.state = state
        checkpointer = Checkpointer(sys.argv[1], {"x": Holder(torch.ones(1000))})
    """
    return run("-c", textwrap.dedent(script) + textwrap.dedent(body), tmp_path / "save")


@pytest.mark.parametrize("run", [run_python, pytest.param(run_interpreter, marks=pytest.mark.extended)])
def test_pythons_exit_waits_for_the_write_also_after_an_error(tmp_path, run):
    done = run_script(
        tmp_path,
        """
        real = os.fsync
        def after_the_script(descriptor):
            threading.main_thread().join()
            real(descriptor)
        os.fsync = after_the_script
        checkpointer.start_saving(then=lambda saved: print("written", flush=True))
        print("the script is over", flush=True)
        raise SystemExit(143)
        """,
        run,
    )
    assert done.stdout.split("\n")[:2] == ["the script is over", "written"]
    assert done.returncode == 143
    assert finished(tmp_path / "save") == ["CKPT+000001"]


def test_a_save_from_a_handler_at_exit_works(tmp_path):
    done = run_script(
        tmp_path,
        """
        import atexit
        atexit.register(checkpointer.wait)
        atexit.register(checkpointer.start_saving)
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert finished(tmp_path / "save") == ["CKPT+000001"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path):
    done = run_script(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside a thread, which is what loaders do
        real, reached, go = os.fsync, threading.Event(), threading.Event()
        def held_up(descriptor):
            reached.set()
            go.wait()
            real(descriptor)
        os.fsync = held_up
        checkpointer.start_saving()
        reached.wait()
        child = os.fork()
        if child == 0:
            checkpointer.wait()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        go.set()
        checkpointer.wait()
        print(os.waitstatus_to_exitcode(status))
        """,
    )
    assert done.stdout.strip() == "7", done.stderr


def test_a_signal_while_waiting_is_handled_and_the_write_goes_on(tmp_path, gate, monkeypatch):
    checkpointer = Checkpointer(tmp_path, {"x": Holder(torch.ones(3))})
    sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
    join, seen = threading.Thread.join, []

    def handler(signum, frame):
        seen.append(signum)
        gate.open()

    def join_with_a_signal(thread):
        sender.start()
        join(thread)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        checkpointer.start_saving()
        assert gate.reached.wait(DEADLINE_SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", join_with_a_signal)
            checkpointer.wait()  # would not return without the handler
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
    assert finished(tmp_path) == ["CKPT+000001"]


def test_a_handler_that_raises_while_a_thread_starts_neither_doubles_nor_loses_the_save(tmp_path, monkeypatch):
    """As torch's does for a loader worker that died."""

    def died(*_):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    start = threading.Thread.start

    def start_while_a_worker_dies(thread):
        start(thread)
        os.kill(os.getpid(), signal.SIGCHLD)

    earlier = signal.signal(signal.SIGCHLD, died)
    try:
        checkpointer = Checkpointer(tmp_path, {"model": torch.nn.Linear(2, 2)})
        monkeypatch.setattr(threading.Thread, "start", start_while_a_worker_dies)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            checkpointer.start_saving({"epoch": 1})
        monkeypatch.undo()
        assert [it.meta for it in checkpointer.list_checkpoints()] == [{"epoch": 1}]
    finally:
        signal.signal(signal.SIGCHLD, earlier)


@pytest.mark.parametrize("begun", [False, True])
def test_a_save_whose_thread_cannot_be_relied_on_is_made_once(tmp_path, monkeypatch, begun):
    def start(thread):
        if begun:
            start_for_real(thread)
        raise RuntimeError(
            "DataLoader worker (pid 1) is killed by signal: Killed." if begun else "can't start new thread"
        )

    start_for_real = threading.Thread.start
    checkpointer = Checkpointer(tmp_path, {"model": nn.Linear(2, 2)})
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="DataLoader") if begun else contextlib.nullcontext():
        checkpointer.start_saving({"epoch": 1})
    monkeypatch.undo()
    assert [it.meta for it in checkpointer.list_checkpoints()] == [{"epoch": 1}]


FORKING = """
import os, threading
from amp_recipes.checkpoint.background import without_forks

order, inside, asked = [], threading.Event(), threading.Event()
os.register_at_fork(before=asked.set)  # runs before what was registered earlier

def work():
    with without_forks():
        inside.set()
        asked.wait()
        order.append("worked")

thread = threading.Thread(target=work)
thread.start()
inside.wait()
if os.fork() == 0:
    with without_forks():  # nobody holds it in the child
        os._exit(0)
order.append("forked")
assert os.wait()[1] == 0
thread.join()
print(*order)
"""


def test_a_fork_waits_for_a_thread_that_it_would_break_off():
    done = run_python("-c", FORKING)
    assert done.stdout.split() == ["worked", "forked"], done.stderr


class ForksInOps(TorchDispatchMode):
    """Notes the operations of this thread during which another could fork."""

    def __init__(self):
        super().__init__()
        self.ops = self.unguarded = ()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops += (op,)
        forker = threading.Thread(target=self._try_to_fork, args=(op,))
        forker.start()
        forker.join()
        return op(*args, **(kwargs or {}))

    def _try_to_fork(self, op):
        if background._forks.acquire(blocking=False):
            background._forks.release()
            self.unguarded += (op,)


def test_no_fork_meets_torch_in_the_writing_thread(tmp_path):
    """What torch does there for the first time would stay half done in a loader worker, which then waits for ever."""
    state = {"packed": pack_state({"weight": torch.ones(3, 2)[:, :1], "more": torch.ones(2)}, "model")}
    with ForksInOps() as mode:
        held_by(state, {"packed": frozenset({"weight", "more"})})
        write_state(tmp_path / "packed", state["packed"])
    assert {torch.ops.aten.stack.default, torch.ops.aten.aminmax.default} <= set(mode.ops), mode.ops
    assert mode.unguarded == ()


INTERRUPTED = """
import os, signal, threading
from amp_recipes.checkpoint.background import without_forks

inside, over = threading.Event(), threading.Event()

def work():
    with without_forks():
        inside.set()
        over.wait()

def raising(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, raising)
thread = threading.Thread(target=work)
thread.start()
inside.wait()
signal.setitimer(signal.ITIMER_REAL, 0.2)
if os.fork() == 0:
    with without_forks():
        os._exit(0)
over.set()
print(os.wait()[1], flush=True)
thread.join()
os._exit(0)
"""


def test_a_signal_that_raises_while_a_fork_waits_leaves_the_child_free():
    done = run_python("-c", INTERRUPTED)
    assert done.stdout.split() == ["0"], done.stderr
