"""A worker that dies, hangs or raises is named, with the sample it was reading; the run ends in time."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from pairwise import each_once, pairwise
from programs import DEADLINE_SECONDS, Program
from repository import REPOSITORY
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from amp_recipes.data import LoadingStopped, close_loader, engine, loader_faults, make_loader, set_epoch, streams
from amp_recipes.errors import DataError


@pytest.fixture(autouse=True)
def workers_look_often_whether_they_are_to_end(monkeypatch):
    monkeypatch.setattr("amp_recipes.data.workers._END_CHECK_SECONDS", 0.05)


class Bad(Dataset):
    """Sample 5 is bad: `fail` is called for it."""

    def __init__(self, fail, n=12, bad=5):
        self.fail, self.n, self.bad = fail, n, bad

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if index == self.bad:
            self.fail()
        return torch.tensor(index)


class Listed(Bad):
    def __init__(self, fail, **entries):
        super().__init__(fail)
        for name, value in entries.items():
            setattr(self, name, value)


def unreadable():
    raise ValueError("no header")


def missing():
    Path("/nowhere/a.wav").read_bytes()


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(3600)


def loader(data, **kwargs):
    return make_loader(data, shuffle=False, seed=0, device="cpu", name="Training set", **{"batch_size": 2, **kwargs})


def failing(data, **kwargs):
    """The DataError of a pass over `data`."""
    batches = loader(data, **kwargs)
    with pytest.raises(DataError) as caught, loader_faults(batches):
        list(batches)
    return caught.value


def alive(pid):
    """Whether the process runs; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# ---------------------------------------------------------------------- a sample that raises


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_is_named_with_its_worker_and_its_own_traceback(num_workers):
    error = failing(Bad(unreadable), num_workers=num_workers)
    assert "Training set: sample 5 cannot be read: ValueError: no header." in str(error)
    if num_workers:
        assert "read by loader worker 0" in str(error)  # batches 0 and 2 are worker 0's
        assert 'raise ValueError("no header")' in str(error.__cause__)
    else:
        assert isinstance(error.__cause__, ValueError)
        assert error.__cause__.__traceback__ is not None


ENTRIES = [f"clips/{i}.wav" for i in range(12)]


TELLING = {
    "files": {"files": ENTRIES},
    "paths": {"paths": [Path(entry) for entry in ENTRIES]},
    "samples": {"samples": [(entry, 1) for entry in ENTRIES]},
    "imgs": {"imgs": [(entry, 1) for entry in ENTRIES], "other": ["x"] * 12},
    "items": {"items": [{"id": 3, "wav": entry} for entry in ENTRIES]},
    "describe": {"describe": lambda index: ENTRIES[index]},
    "describe wins": {"describe": lambda index: ENTRIES[index], "files": ["wrong"] * 12},
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.extended)])
def test_the_file_is_named_where_the_data_set_tells(num_workers, subtests):
    for name, entries in TELLING.items():
        with subtests.test(name):
            error = failing(Listed(unreadable, **entries), num_workers=num_workers)
            assert "sample 5 (clips/5.wav) cannot be read" in str(error)


def test_the_file_is_found_through_subsets_and_concatenations():
    data = Listed(unreadable, files=ENTRIES)
    assert "sample 1 (clips/5.wav)" in str(failing(Subset(data, [3, 5])))
    assert "sample 8 (clips/5.wav)" in str(failing(ConcatDataset([range(3), data])))
    assert "sample 2 (clips/5.wav)" in str(failing(Subset(ConcatDataset([range(3), data]), [0, 1, 8])))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_file_of_an_os_error_is_named(num_workers):
    assert "/nowhere/a.wav" in str(failing(Bad(missing), num_workers=num_workers))


def test_a_data_set_that_tells_nonsense_about_its_files_does_no_harm():
    for data in (
        Listed(unreadable, files=["too", "few"]),
        Listed(unreadable, files=lambda: 1 / 0),
        Listed(unreadable, samples="abcdefghijkl"),
        Listed(unreadable, describe=lambda index: 1 / 0),
    ):
        assert "sample 5 cannot be read: ValueError" in str(failing(data))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_end_of_iteration_inside_a_sample_is_no_end_of_the_epoch(num_workers):
    def stop():
        raise StopIteration

    assert "sample 5 cannot be read: StopIteration" in str(failing(Bad(stop), num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_do_not_fit_together_are_named(num_workers):
    class Ragged(Bad):
        def __getitem__(self, index):
            return torch.zeros(2 if index == 4 else 3)

    message = str(failing(Ragged(None), num_workers=num_workers))
    assert "samples [4, 5] cannot be collated into a batch: RuntimeError" in message
    assert "; sample 5 does not match sample 4 (give a collate_fn that pads them)." in message


def test_the_sample_that_spoils_a_batch_is_named_with_its_index(subtests):
    class Spoilt(Listed):
        def __getitem__(self, index):
            return self.sample if index == self.bad else (torch.zeros(3), 1)

    for bad, said in {
        None: "; sample 6 (6.wav) is None.",
        (torch.zeros(3), None): "; sample 6 (6.wav) cannot be collated even alone.",
        (torch.zeros(4), 1): "; sample 6 (6.wav) does not match sample 4 (4.wav) (give a collate_fn that pads",
    }.items():
        with subtests.test(said):
            data = Spoilt(None, files=[f"{index}.wav" for index in range(12)], sample=bad, bad=6)
            message = str(failing(data, batch_size=4))
            assert (
                message.startswith("Training set: samples [4, 5, 6, 7] cannot be collated into a batch: ")
                and said in message
            )


def test_a_collate_fn_that_takes_no_sample_blames_none():
    message = str(failing(Bad(None, bad=None), collate_fn=lambda samples: 1 / 0))
    assert "samples [0, 1] cannot be collated into a batch: ZeroDivisionError: division by zero. Repair" in message


def test_a_data_set_that_reads_batches_names_the_batch():
    class AtOnce(Bad):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    assert "samples [4, 5] cannot be read: ValueError: no header" in str(failing(AtOnce(unreadable)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_who_goes_on_after_a_bad_sample_gets_the_other_batches(num_workers):
    batches = loader(Bad(unreadable), num_workers=num_workers)
    iterator, seen = iter(batches), []
    while True:
        try:
            batch = next(iterator, None)
        except DataError:
            assert batches.state_dict()["samples"] == 4  # the bad batch has not been handed out
            continue
        if batch is None:
            break
        seen.append(batch.tolist())
    assert seen == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
    assert batches.state_dict()["samples"] == 12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_of_a_stream_is_named_by_its_number(num_workers):
    class Stream(IterableDataset):
        def __iter__(self):
            for i in range(12):
                if i == 5:
                    unreadable()
                yield i

    error = failing(Stream(), num_workers=num_workers)
    assert "sample 5 of the stream cannot be read: ValueError: no header" in str(error)
    assert ("read by loader worker 0" in str(error)) == bool(num_workers)


# ---------------------------------------------------------------------- a worker that dies


def test_a_killed_worker_is_named_with_its_signal_and_its_sample():
    error = failing(Listed(killed, files=ENTRIES), num_workers=2)
    assert "Training set: loader worker 0 (pid " in str(error)
    assert "was killed by SIGKILL while it read sample 5 (clips/5.wav)" in str(error)
    assert "memory" in str(error)
    # torch's own words, or those of the connection to the worker, if that was in use.
    assert "DataLoader worker" in str(error.__cause__) or isinstance(error.__cause__, (ConnectionError, EOFError))


def test_a_worker_that_leaves_is_named_with_its_exit_code():
    message = str(failing(Bad(lambda: os._exit(7)), num_workers=1))
    assert "loader worker 0" in message
    assert "ended with exit code 7 while it read sample 5" in message


class Pids(Dataset):
    """Each sample is the pid of who read it."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return os.getpid()


def test_a_worker_killed_while_the_step_runs_is_named_too():
    """torch raises from a signal handler, in the middle of whatever runs."""
    batches = loader(Pids(), num_workers=2)
    iterator = iter(batches)
    pid = int(next(iterator)[0])
    expected = rf"Training set: loader worker 0 \(pid {pid}\) was killed by SIGKILL"
    with pytest.raises(DataError, match=expected), loader_faults(batches):
        os.kill(pid, signal.SIGKILL)
        time.sleep(DEADLINE_SECONDS)  # the step
    # Cleaning up starts processes, whose end must not bring the error up again.
    for _ in range(3):
        subprocess.run(["true"], check=True)


def test_a_killed_worker_of_a_loader_that_is_not_ours_is_told_as_well():
    batches = DataLoader(Bad(killed), num_workers=1)
    # How it ended is known to torch's signal handler alone, whose error is lost where it comes in a finalizer.
    expected = r"Data set: a loader worker \(pid \d+\) (was killed by SIGKILL|ended unexpectedly)"
    with pytest.raises(DataError, match=expected), loader_faults(batches):
        list(batches)


def test_other_errors_pass_through_as_they_are():
    for error in (RuntimeError("CUDA out of memory"), KeyError("x"), DataError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, loader_faults([]):
            raise error
        assert caught.value is error


def test_a_loader_can_be_iterated_again_after_a_worker_died(tmp_path):
    once = tmp_path / "died"

    def die_once():
        if not once.exists():
            once.touch()
            killed()

    for persistent in (False, True):
        once.unlink(missing_ok=True)
        batches = loader(Bad(die_once), num_workers=1, persistent_workers=persistent)
        with pytest.raises(DataError, match="killed by SIGKILL"), loader_faults(batches):
            list(batches)
        assert torch.cat(list(batches)).tolist() == list(range(12))


# ---------------------------------------------------------------------- a worker that hangs


@pytest.mark.parametrize("persistent", [False, True])
def test_a_hanging_worker_is_named_and_killed(persistent, tmp_path):
    def hang_visibly():
        (tmp_path / "hanging").touch()
        hang()

    data = Listed(hang_visibly, files=ENTRIES)
    batches = loader(data, num_workers=2, timeout=DEADLINE_SECONDS, persistent_workers=persistent)
    iterator = iter(batches)
    next(iterator), next(iterator)
    wait_until((tmp_path / "hanging").exists)
    batches.timeout = 0.1
    iterator._batches.wait_at_most(0.1)  # torch took it when the pass began
    with pytest.raises(DataError) as caught:
        next(iterator)
    message = str(caught.value)
    assert "no batch came for 0.1 seconds: loader worker 0 (pid " in message
    assert "was reading sample 5 (clips/5.wav)" in message
    assert "timeout=<seconds>" in message
    pid = int(message.partition("(pid ")[2].partition(")")[0])
    wait_until(lambda: not alive(pid))


def test_workers_have_a_time_limit_by_default():
    assert loader(Bad(None), num_workers=1).timeout == 300
    assert loader(Bad(None), num_workers=1, timeout=0).timeout == 0
    assert loader(Bad(None)).timeout == 0


# ---------------------------------------------------------------------- the run's end


def run(code, *, tmp_path, start=Program, **kwargs):
    """A process of its own that runs `code`, with `loader` for a loader of 2 workers."""
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing, os, signal, sys, time, torch
            from pathlib import Path
            from torch.utils.data import Dataset
            from amp_recipes.data import make_loader, loader_faults

            class Data(Dataset):
                slow = 0.0
                def __len__(self): return 1000
                def __getitem__(self, index):
                    time.sleep(self.slow)
                    return torch.tensor(index)

            def loader(**kwargs):
                return make_loader(Data(), shuffle=False, seed=0, device="cpu", batch_size=2, num_workers=2, **kwargs)

            def pids():
                return [process.pid for process in multiprocessing.active_children()]

            def say(*words):
                print(*words, flush=True)
        """)
        + textwrap.dedent(code)
    )
    return start(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **kwargs)


def start_interpreter(script, **kwargs):
    """As `Program`, with the end of a real interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(script)], env=environment, text=True, **kwargs)


def finish(process):
    try:
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_workers_go_on_reading_when_the_whole_group_is_signalled(number, tmp_path):
    process = run(
        """
        from amp_recipes.interrupts import Interrupts
        for number in (signal.SIGTERM, signal.SIGHUP):  # the tests may run under nohup
            signal.signal(number, signal.SIG_DFL)
        signals = Interrupts()
        signals.__enter__()
        batches = loader()
        seen = []
        for number, batch in enumerate(batches):
            seen += batch.tolist()
            if number == 3:
                say("ready")
                sys.stdin.readline()
        assert seen == list(range(1000)), seen
        assert signals.requested is not None
        say("all", len(seen))
        """,
        tmp_path=tmp_path,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    process.stdin.write("go\n")
    process.stdin.flush()
    code, out, err = finish(process)
    assert (code, out) == (0, "all 1000\n"), err


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemExit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
@pytest.mark.parametrize("reading", ["0.0", "3600.0"], ids=["idle", "hanging"])
@pytest.mark.parametrize("start", [Program, pytest.param(start_interpreter, marks=pytest.mark.extended)])
def test_no_worker_outlives_the_run_nor_holds_it_up(start, end, reading, tmp_path):
    process = run(
        f"""
        batches = loader()
        Data.slow = {reading}
        iterator = iter(batches)
        if not Data.slow:
            next(iterator)
        say(*pids())
        {end}
        """,
        tmp_path=tmp_path,
        start=start,
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    code, _, err = finish(process)
    assert code == (-signal.SIGKILL if "SIGKILL" in end else 3), err
    wait_until(lambda: not any(map(alive, workers)))


@pytest.mark.parametrize("persistent", [False, True])
def test_the_loader_lets_go_of_its_workers_when_it_is_left(persistent):
    batches = loader(Pids(), num_workers=2, persistent_workers=persistent)
    iterator = iter(batches)
    workers = {int(next(iterator)[0]), int(next(iterator)[0])}
    assert len(workers) == 2
    assert all(map(alive, workers))
    del iterator, batches
    wait_until(lambda: not any(map(alive, workers)))


class PidStream(IterableDataset):
    def __iter__(self):
        return iter([os.getpid()] * 64)


@pytest.fixture
def no_collector():
    """Whatever ends has to end without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("data", "persistent"), each_once([Pids, PidStream], [False, True]))
def test_workers_end_with_the_last_reference_to_the_loader(data, persistent, no_collector):
    batches = loader(data(), num_workers=2, persistent_workers=persistent)
    workers = {int(pid) for batch in batches for pid in batch}  # a whole pass, then one that is left
    iterator = iter(batches)
    workers |= {int(next(iterator)[0]), int(next(iterator)[0])}
    assert any(map(alive, workers))
    del iterator, batches
    wait_until(lambda: not any(map(alive, workers)))


@pytest.mark.parametrize(("data", "persistent", "torchdata"), pairwise([Pids, PidStream], [False, True], [False, True]))
def test_a_loader_is_closed_although_its_pass_is_held_and_can_be_iterated_again(
    data, persistent, torchdata, no_collector, monkeypatch
):
    monkeypatch.setattr(streams, "has_torchdata", lambda: torchdata)
    batches = loader(data(), num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        iterator = iter(batches)
        workers = {int(next(iterator)[0]), int(next(iterator)[0])}
        assert all(map(alive, workers))
        close_loader(batches)
        wait_until(lambda: not any(map(alive, workers)))  # noqa: B023
        assert list(iterator) == []
        close_loader(batches)
    assert len(torch.cat(list(batches))) == (64 if data is Pids else 128)
    close_loader(batches)


def test_loaders_of_others_and_of_no_workers_are_left_as_they_are_when_closed():
    for other in ([1, 2], DataLoader(range(4)), loader(range(4)), iter([1, 2])):
        close_loader(other)
    assert torch.cat(list(loader(range(4)))).tolist() == [0, 1, 2, 3]
    batches = loader(range(4))
    iterator = iter(batches)
    next(iterator)
    close_loader(batches)
    assert next(iterator).tolist() == [2, 3]


class SlowAfter(Pids):
    """Only the first sample of each worker comes at once."""

    def __getitem__(self, index):
        if index >= 4:
            hang()
        return os.getpid()


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_workers_in_the_middle_of_a_sample_end_before_torch_would_kill_them(persistent, monkeypatch, no_collector):
    """After an error in the loop, whose traceback holds the pass."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 120.0)  # torch waits that long for one
    terminated = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", lambda process: terminated.append(process))
    batches = loader(SlowAfter(), num_workers=2, persistent_workers=persistent)
    workers = set()
    with pytest.raises(KeyError) as caught:
        for batch in batches:
            workers.add(int(batch[0]))
            if len(workers) == 2:
                raise KeyError("a step")
    close_loader(batches)
    wait_until(lambda: not any(map(alive, workers)))
    assert caught.value.args == ("a step",)
    assert terminated == []


# ---------------------------------------------------------------------- a request to stop


class Gated(Dataset):
    """Sample 6 comes once a file is there; `reached` is there once it is asked for."""

    def __init__(self, gate):
        self.gate, self.reached = gate, gate.with_suffix(".reached")

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 6:
            self.reached.touch()
        while index == 6 and not self.gate.exists():
            time.sleep(0.01)
        return torch.tensor(index)


class GatedStream(IterableDataset):
    def __init__(self, gate):
        self.data = Gated(gate)

    def __iter__(self):
        return map(self.data.__getitem__, range(12))


@pytest.mark.parametrize(
    ("kind", "torchdata", "limits"), pairwise([Gated, GatedStream], [False, True], [{}, {"timeout": 0}])
)
def test_who_waits_for_a_batch_can_be_stopped_and_go_on(kind, torchdata, limits, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(streams, "has_torchdata", lambda: torchdata)
    gate, asked, seen = tmp_path / "gate", [], []
    batches = loader(kind(gate), num_workers=1, **limits)
    batches.stop = lambda: asked.append(1) or len(asked) % 3 == 0
    with loader_faults(batches):
        iterator = iter(batches)
        for _ in range(2):
            with pytest.raises(LoadingStopped):
                while True:
                    seen += next(iterator).tolist()
            asked.clear()
        # Before the batch with sample 6 it may have been stopped as well, on a busy machine: nothing is lost.
        assert seen == list(range(len(seen))) and len(seen) <= 6
        assert batches.batches_done == len(seen) // 2
        gate.touch()
        batches.stop = None
        seen += torch.cat(list(iterator)).tolist()
    assert seen == list(range(12))


def test_a_time_limit_holds_whoever_asks_in_between(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.05)
    data = Gated(tmp_path / "gate")
    batches, asked = loader(data, num_workers=1, timeout=DEADLINE_SECONDS), []
    batches.stop = lambda: asked.append(1)
    iterator = iter(batches)
    next(iterator), next(iterator), next(iterator)
    wait_until(data.reached.exists)
    asked.clear()
    batches.timeout = 0.2
    with pytest.raises(DataError, match=r"no batch came for 0.2 seconds: loader worker 0 .* was reading sample 6"):
        next(iterator)
    assert asked


def test_persistent_workers_keep_the_users_limit():
    assert engine.poll_seconds(300, lambda: True, persistent=True) == 300
    assert engine.poll_seconds(300, None, persistent=False) == 300
    assert engine.poll_seconds(0.5, lambda: True, persistent=False) == 0.5
    assert engine.poll_seconds(0, lambda: True, persistent=False) == engine.poll_seconds(9, lambda: True, False) == 1


# ---------------------------------------------------------------------- the user's part in workers


def test_the_users_worker_init_fn_runs_and_meets_the_users_data_set(tmp_path):
    data = Bad(None, bad=-1)

    def begin(worker):
        info = torch.utils.data.get_worker_info()
        assert type(info.dataset) is Bad
        info.dataset.n = 100 + worker  # seen where samples are read
        (tmp_path / str(worker)).touch()

    batches = loader(data, num_workers=2, worker_init_fn=begin)
    assert len(list(batches)) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_worker_init_fn_that_raises_is_told(monkeypatch):
    module = sys.modules[loader_faults.__module__]
    monkeypatch.setattr(module, "_NOTICE_SECONDS", 0.1)  # for so long it looks whether a worker has died

    def begin(worker):
        raise OSError("no licence")

    with pytest.raises(Exception, match=r"no licence") as caught:
        list(loader(Bad(None, bad=-1), num_workers=1, worker_init_fn=begin))
    assert "worker process 0" in str(caught.value) or "worker 0" in str(caught.value)


def test_a_failed_epoch_leaves_the_position_where_the_last_good_batch_was():
    batches = loader(Bad(killed), num_workers=1)
    set_epoch(batches, 3)
    done = 0
    with pytest.raises(DataError, match="killed by SIGKILL"), loader_faults(batches):
        for batch in batches:
            done += len(batch)
    assert batches.state_dict() == {"epoch": 3, "samples": done}
