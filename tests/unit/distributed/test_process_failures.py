"""A rank that fails, dies or hangs: all end, soon, and say which one it was and why."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import in_processes
from programs import DEADLINE_SECONDS, run_python
from repository import REPOSITORY
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from amp_recipes import distributed
from amp_recipes.config.options import plain_errors
from amp_recipes.distributed import failures
from amp_recipes.distributed.failures import Report, Watch
from amp_recipes.errors import ConfigError, ProcessError


@pytest.fixture
def run(monkeypatch):
    """Makes watches of a run whose store is torchrun's, and stops them; `run.ended`: exit codes."""

    class Run:
        def __init__(self):
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.watches, self.ended = [], []

        def watch(self, rank, world_size=2):
            self.watches.append(Watch(self.store, rank, world_size, 10.0))
            return self.watches[-1]

    made = Run()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(failures, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(failures, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(os, "_exit", made.ended.append)
    yield made
    stop(made)


def stop(run):
    while run.watches:
        run.watches.pop().stop()


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_all_hear_of_the_first_failure_and_a_main_thread_that_stays_is_ended(run, capfd):
    first, second = run.watch(0), run.watch(1)
    second.tell(Report(1, "ValueError", "bad sample 7"))
    second.tell(Report(1, "ValueError", "another"))
    assert first.report(DEADLINE_SECONDS) == Report(1, "ValueError", "bad sample 7")
    assert wait_until(lambda: len(run.ended) == 2) and run.ended == [1, 1]
    printed = capfd.readouterr().err
    assert "[rank 0] ended because rank 1 failed: ValueError: bad sample 7" in printed
    assert "[rank 0] The main thread was here" in printed and "wait_until" in printed


def test_a_process_that_ends_by_itself_is_not_ended_again(run, monkeypatch):
    monkeypatch.setattr(failures, "_GRACE_SECONDS", DEADLINE_SECONDS)
    watch = run.watch(0)
    run.watch(1).tell(Report(1, "ValueError", "bad sample 7"))
    assert watch.report(DEADLINE_SECONDS)
    stop(run)
    watch._thread.join()
    assert run.ended == []


def test_nothing_happens_after_an_orderly_end(run):
    watches = [run.watch(0), run.watch(1)]
    for watch in watches:
        watch.say_done()
    stop(run)
    assert [watch.report() for watch in watches] == [None, None] and run.ended == []


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system does not tell of the end of other processes")
@pytest.mark.parametrize("in_order", [False, True])
def test_a_process_killed_on_the_same_machine_is_heard_of_by_all(run, monkeypatch, in_order):
    child = subprocess.Popen(["sleep", "6000"])
    run.store.set("process/1", json.dumps([failures._machine(), child.pid]))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    neighbour = run.watch(0, world_size=3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    far = run.watch(2, world_size=3)  # as one of another machine
    if in_order:
        run.store.set("done/1", "")
    assert wait_until(lambda: neighbour._neighbours)
    child.kill()
    if in_order:
        child.wait()
        assert wait_until(lambda: not neighbour._neighbours)
        assert neighbour.report() is far.report() is None
    else:
        for watch in (neighbour, far):
            report = watch.report(DEADLINE_SECONDS)
            assert report.rank == 1 and "SIGKILL" in report.message
        child.wait()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system does not tell of the end of other processes")
def test_a_run_whose_torchrun_was_killed_saves_and_ends(run, monkeypatch):
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    asked = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(os, "getppid", lambda: child.pid)
    monkeypatch.setattr(os, "kill", lambda pid, signum: asked.append((pid, signum, list(run.ended))))
    monkeypatch.setattr(failures, "_SAVE_WITHIN_SECONDS", 0.5)
    watch = run.watch(0)
    assert wait_until(lambda: watch._neighbours)
    child.stdin.close()
    assert wait_until(lambda: asked) and asked == [(os.getpid(), signal.SIGTERM, [])]
    assert wait_until(lambda: run.ended) and run.ended == [143]  # nothing has ended it in time
    child.wait()


@pytest.mark.parametrize("in_order", [False, True])
def test_the_end_of_the_store_is_the_end_of_rank_0_unless_that_was_done(run, monkeypatch, in_order):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    watch = run.watch(1)
    if in_order:
        run.store.set("done/0", "")
    assert wait_until(lambda: watch._host_is_done == in_order)
    run.store = None  # the server ends with it
    assert wait_until(lambda: watch._store_is_gone)
    report = watch.report(0 if in_order else DEADLINE_SECONDS)
    assert report is None if in_order else report.rank == 0 and "ended without an error message" in report.message


def test_only_what_torch_says_of_other_ranks_becomes_a_process_error():
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("gloo"), ProcessError("ours")):
        with pytest.raises(type(error)) as raised, distributed.collective("averaging"):
            raise error
        assert raised.value is error
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:4")
    for error in (lost, dist.DistBackendError("NCCL error"), dist.DistStoreError("wait timeout after 3000ms")):
        with pytest.raises(ProcessError, match="while averaging") as raised, distributed.collective("averaging"):
            raise error
        assert raised.value.__cause__ is error


def wait_in_vain(rank):
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    text = ""
    if rank == 0:
        with pytest.raises(ProcessError) as raised, distributed.collective("averaging the loss"):
            dist.all_reduce(torch.zeros(1), group=group)
        text = str(raised.value)
    dist.barrier()  # rank 1 stays, and does not come
    return text


def test_a_wait_in_vain_names_the_option_that_ends_it():
    text = in_processes(wait_in_vain, 2)[0]
    assert text.startswith("rank 0 waited (distributed_timeout_minutes) for the others while averaging the loss")
    assert "--distributed_timeout_minutes" in text


@pytest.fixture
def hook(monkeypatch, tmp_path):
    """The hook for uncaught errors of rank 1 of 2, as a script has it that has called `parse_arguments`."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "TORCHELASTIC_ERROR_FILE": tmp_path / "error.json"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(failures, "_exit_code", None)
    plain_errors.show_mistakes_plainly()
    distributed.show_ranks_in_errors()
    installed = sys.excepthook
    distributed.show_ranks_in_errors()
    assert sys.excepthook is installed, "installed twice"

    def call(error):
        try:
            raise error
        except BaseException as raised:
            installed(type(raised), raised, raised.__traceback__)

    return call


def test_an_uncaught_error_has_its_rank_on_every_line_and_is_left_for_torchrun(hook, capsys, tmp_path, monkeypatch):
    hook(ValueError("bad\nsample"))
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert lines[0] == "[rank 1] Traceback (most recent call last):" and lines[-1] == "[rank 1] sample"
    assert failures.exit_code() == 1
    ours = json.loads((tmp_path / "error.json").read_text())
    try:
        raise ValueError("bad\nsample")
    except ValueError as error:
        get_error_handler().record_exception(error)
    theirs = json.loads((tmp_path / "error.json").read_text())
    assert ours["message"]["message"] == theirs["message"]["message"]
    assert ours["message"].keys() == theirs["message"].keys()
    assert ours["message"]["extraInfo"].keys() == theirs["message"]["extraInfo"].keys()
    assert abs(int(ours["message"]["extraInfo"]["timestamp"]) - time.time()) < DEADLINE_SECONDS


def test_a_users_mistake_is_one_line_with_its_rank(hook, capsys):
    hook(ConfigError("batch_size: expected int"))
    assert capsys.readouterr().err == "[rank 1] train.py: batch_size: expected int\n"


def test_the_same_mistake_on_all_ranks_is_shown_by_the_main_one(hook, capsys, tmp_path, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(failures, "_REPORT_WITHIN_SECONDS", 0.2)
    printed = []
    for rank, text in ((0, "batch_size: expected int"), (1, "batch_size: expected int"), (1, "no file here")):
        monkeypatch.setenv("RANK", str(rank))
        hook(ConfigError(text))
        printed.append(capsys.readouterr().err)
    assert printed == ["[rank 0] train.py: batch_size: expected int\n", "", "[rank 1] train.py: no file here\n"]
    left = json.loads((tmp_path / "error.json").read_text())["message"]
    assert left["extraInfo"]["py_callstack"] == "train.py: no file here\n"


def test_torchs_own_error_keeps_its_traceback_and_gets_our_words(hook, capsys, tmp_path):
    now = time.time()
    hook(RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"))
    printed = capsys.readouterr().err
    assert "[rank 1] RuntimeError: [gloo/transport" in printed and 'test_process_failures.py", line' in printed
    assert "ProcessError: rank 1 waited (distributed_timeout_minutes) for the others, and the wait timed out" in printed
    dated = int(json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["timestamp"])
    assert dated > now + 5, "torchrun would call it the root cause"


SCRIPT = """
import logging, os, signal, sys, time, warnings
import torch
from torch import nn
from amp_recipes import Brain, distributed, parse_arguments


class Regression(Brain):
    def compute_forward(self, batch, stage):
        if distributed.rank() == 1 and self.optimizer_step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            {fault}
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])


def main():
    _, run_opts, _ = parse_arguments()
    torch.manual_seed(0)
    global brain  # lives until the interpreter's end
    brain = Regression(
        {{"model": nn.Linear(4, 1)}}, lambda p: torch.optim.SGD(p, 0.1), run_opts={{"device": "cpu", **run_opts}}
    )
    warnings.warn("heed this")
    logging.getLogger("a recipe").warning("heed this")
    brain.fit(range(1), [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(6)])
    print(f"rank {{distributed.rank()}} trained {{brain.optimizer_step}} steps", flush=True)


main()
"""


def torchrun(folder, fault, *options, launcher=()):
    """Run the script above with two processes."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(fault=fault))
    config = folder / "config.yaml"
    config.write_text("{}\n")
    forked = REPOSITORY / "tests" / "faults" / "forked_torchrun.py"
    # torchrun looks every 5 s, so that each rank has said what it has to say before torchrun ends it.
    options = ["--standalone", "--nproc_per_node=2", "--monitor-interval=5", *launcher, script, config, *options]
    return run_python(forked, *options)


@pytest.mark.extended
def test_a_killed_rank_ends_all_and_the_restart_trains_to_a_clean_end(tmp_path):
    """Two things in one run of torchrun, whose start is what takes time."""
    finished = torchrun(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", launcher=["--max-restarts=1"])
    assert finished.returncode == 0, finished.stderr
    before, after = finished.stderr.split("restart 1 of 1")
    told = r"\[rank 0\] train\.py: ProcessError: rank 0 lost the others.*, because rank 1 failed: its process ended"
    assert re.search(told, before)
    assert sorted(finished.stdout.splitlines()[-2:]) and finished.stdout.count("trained 6 steps") == 2
    assert finished.stdout.count("2 processes, this one") + finished.stderr.count("2 processes, this one") == 2
    assert after.count("heed this") == 3, "a warning is said by rank 0 alone"
    for word in ("[rank", "destroy_process_group", "terminate"):
        assert word not in after, after


@pytest.mark.extended
def test_an_error_on_one_rank_ends_all_and_torchrun_shows_it_as_the_cause(tmp_path):
    finished = torchrun(tmp_path, "raise ValueError('bad sample 7')")
    assert finished.returncode == 1
    assert "[rank 1] ValueError: bad sample 7" in finished.stderr
    # Between, it may say what it was waiting for: that depends on where rank 0 was when rank 1 failed.
    told = r"\[rank 0\] train\.py: ProcessError: rank 0 lost the others.*, because rank 1 failed: ValueError"
    assert re.search(told, finished.stderr), finished.stderr
    summary = finished.stderr.split("Root Cause")[1]
    assert "ValueError: bad sample 7" in summary and "rank      : 1" in summary


@pytest.mark.extended
def test_a_frozen_rank_ends_all_when_the_time_is_over(tmp_path):
    finished = torchrun(tmp_path, "time.sleep(6000)", "--distributed_timeout_minutes=0.15")
    assert finished.returncode == 1, finished.stderr
    assert "rank 0 waited 9 seconds (distributed_timeout_minutes) for the others" in finished.stderr
    assert "[rank 1] ended because rank 0 failed" in finished.stderr
    assert "[rank 1]     time.sleep(6000)" in finished.stderr  # where it hung
