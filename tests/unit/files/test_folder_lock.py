"""One run at a time in a folder: real processes that hold, die, and come again."""

import json
import logging
import os
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import in_a_child
from programs import DEADLINE_SECONDS, Program

from amp_recipes.errors import ConfigError, FolderInUseError
from amp_recipes.files import folder_lock
from amp_recipes.files.folder_lock import lock_folder, unlock_folder

IMPORTS = """\
import os, signal, sys
from amp_recipes.files import folder_lock
from amp_recipes.files.folder_lock import lock_folder, unlock_folder
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_stays_locked():
    before = set(folder_lock._held)
    yield
    for path in set(folder_lock._held) - before:
        unlock_folder(path)


@contextmanager
def process(code, *arguments):
    """A Python process of its own that runs `code`, dead when the block ends."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    running = Program("-c", IMPORTS + code, *arguments, **streams)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def holder(folder):
    return process("lock_folder(sys.argv[1]); say('locked'); signal.pause()", folder)


def is_free(folder):
    """Whether another process can lock the folder."""
    text = in_a_child(lambda: lock_folder(folder))
    assert text == "None" or text.startswith("FolderInUseError"), text
    return text == "None"


def test_the_second_process_is_told_who_holds_the_folder_and_changes_nothing(tmp_path):
    folder = tmp_path / "runs" / "a b"
    with holder(folder) as first:
        assert first.stdout.readline() == "locked\n"
        before = (folder / ".lock").read_bytes()
        with pytest.raises(FolderInUseError) as refused:
            lock_folder(folder)
        text = str(refused.value)
        since = json.loads(before)["since"]
        assert f"{folder} is in use by pid {first.pid} on host {socket.gethostname()} since {since}" in text
        assert f"kill {first.pid}" in text and "--output_folder" in text
        assert (folder / ".lock").read_bytes() == before
        with pytest.raises(FolderInUseError):  # the refused one's open and close released nothing
            lock_folder(folder)
        assert first.poll() is None
    lock_folder(folder)


def test_a_dead_holders_lock_is_taken_twenty_times_while_its_workers_live_on(tmp_path):
    code = """\
lock_folder(sys.argv[1])
worker = os.fork()
if worker == 0:
    os.setsid()
    os.closerange(0, 3)
    signal.pause()
say(worker)
signal.pause()
"""
    workers = []
    try:
        for _ in range(20):
            with process(code, tmp_path) as run:
                worker = int(run.stdout.readline())
                workers.append(worker)
                with pytest.raises(FolderInUseError, match=f"pid {run.pid} "):
                    lock_folder(tmp_path)
                os.kill(run.pid, signal.SIGKILL)
                run.wait()
                assert Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z" if os.path.isdir("/proc") else True
                lock_folder(tmp_path)
                assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
            unlock_folder(tmp_path)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def test_of_many_that_start_together_one_gets_the_folder(tmp_path):
    for turn in range(3):
        folder = tmp_path / str(turn)
        start, done = os.pipe(), os.pipe()
        pids = []
        for _ in range(6):
            pid = os.fork()
            if pid == 0:
                os.close(start[1])
                os.read(start[0], 1)  # all begin when the parent closes its end
                try:
                    lock_folder(folder)
                    os.write(done[1], b"1")
                except FolderInUseError:
                    os.write(done[1], b"0")
                except BaseException:
                    os.write(done[1], b"?")
                signal.pause()  # the winner holds it until all have tried
                os._exit(0)
            pids.append(pid)
        os.close(start[0])
        os.close(start[1])
        answers = b""
        try:
            while len(answers) < len(pids):
                answers += os.read(done[0], 1)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            os.close(done[0])
            os.close(done[1])
        assert sorted(answers) == sorted(b"000001")


def test_a_process_locks_as_often_as_it_likes_by_every_name_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0
    for name in (tmp_path / "run", str(tmp_path / "link"), "run", "./link/../run"):
        lock_folder(name)
        assert not is_free(tmp_path / "run")
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors + 1
    unlock_folder("link")
    assert is_free("run")
    unlock_folder("run")  # nothing is left to unlock


def test_threads_of_a_process_share_its_lock(tmp_path):
    errors = []

    def lock():
        try:
            lock_folder(tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=lock) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and not is_free(tmp_path)


def test_a_forked_child_does_not_hold_what_its_parent_holds(tmp_path):
    lock_folder(tmp_path)
    text = in_a_child(lambda: lock_folder(tmp_path))
    assert text.startswith("FolderInUseError") and f"pid {os.getpid()} " in text
    assert "That process started this one" in text
    in_a_child(lambda: unlock_folder(tmp_path))
    assert not is_free(tmp_path)


def test_a_child_can_take_the_folder_once_its_parent_has_let_go(tmp_path):
    lock_folder(tmp_path)

    def take():
        lock_folder(tmp_path)
        return json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()

    unlock_folder(tmp_path)
    assert in_a_child(take) == "True"


@pytest.mark.parametrize("left_behind", ["", "{", '{"pid": 1}', "null", '{"pid": "x", "host": 1, "since": 2}'])
def test_a_holder_that_has_not_written_its_name_is_another_process(tmp_path, monkeypatch, left_behind):
    monkeypatch.setattr(folder_lock, "_NAME_WITHIN_SECONDS", 0.1)
    code = """\
folder_lock._write_name = lambda descriptor: os.pwrite(descriptor, sys.argv[2].encode(), 0)
lock_folder(sys.argv[1])
say('locked')
signal.pause()
"""
    with process(code, tmp_path, left_behind) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUseError, match=r"in use by another process\. Wait"):
            lock_folder(tmp_path)


def test_the_name_of_a_dead_holder_is_not_given_for_that_of_the_one_that_is_writing_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_NAME_WITHIN_SECONDS", DEADLINE_SECONDS)
    with holder(tmp_path) as dead:
        dead.stdout.readline()
    code = """\
write = folder_lock._write_name
def late(descriptor):
    say('locked')
    sys.stdin.readline()
    write(descriptor)
folder_lock._write_name = late
lock_folder(sys.argv[1])
signal.pause()
"""
    read_name, read = folder_lock._read_name, []

    def read_and_let_it_write(descriptor):
        read.append(read_name(descriptor).get("pid"))
        if len(read) == 3:
            alive.stdin.write("\n")
            alive.stdin.flush()
        return read_name(descriptor)

    monkeypatch.setattr(folder_lock, "_read_name", read_and_let_it_write)
    with process(code, tmp_path) as alive:
        assert alive.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUseError, match=f"pid {alive.pid} "):
            lock_folder(tmp_path)
    assert read[:3] == [dead.pid] * 3


def test_a_holder_on_another_host_is_named_though_no_such_pid_is_here(tmp_path):
    code = """\
folder_lock.socket.gethostname = lambda: 'node7'
folder_lock.os.getpid = lambda: 2**22 + 1
lock_folder(sys.argv[1])
say('locked')
signal.pause()
"""
    with process(code, tmp_path) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUseError, match=r"pid 4194305 on host node7 since .* \(kill 4194305 there\)"):
            lock_folder(tmp_path)


def test_a_lock_that_was_lost_is_taken_back(tmp_path):
    lock_folder(tmp_path)
    (tmp_path / ".lock").read_bytes()  # closing any descriptor of the file drops the lock
    assert is_free(tmp_path)
    lock_folder(tmp_path)
    assert f"pid {os.getpid()} " in in_a_child(lambda: lock_folder(tmp_path))
    (tmp_path / ".lock").read_bytes()
    with holder(tmp_path) as thief:
        thief.stdout.readline()
        with pytest.raises(FolderInUseError, match=f"pid {thief.pid} "):
            lock_folder(tmp_path)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_folder_that_was_removed_and_made_anew_is_locked_anew(tmp_path, what):
    folder = tmp_path / "run"
    lock_folder(folder)
    (folder / ".lock").unlink()
    if what == "folder":
        folder.rmdir()
    lock_folder(folder)
    assert (folder / ".lock").exists() and not is_free(folder)


def test_closed_descriptors_are_noticed_and_none_of_others_is_closed(tmp_path):
    lock_folder(tmp_path)
    (number,) = [held.descriptor for path, held in folder_lock._held.items() if path == os.path.realpath(tmp_path)]
    others = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.dup2(others, number)  # closes the lock's
    lock_folder(tmp_path)
    assert not is_free(tmp_path)
    assert os.path.sameopenfile(number, others)
    os.close(others)
    os.close(number)


def test_a_lock_file_that_is_replaced_while_it_is_locked_is_not_taken(tmp_path, monkeypatch):
    real, names = folder_lock._try_lock, []

    def replaced_once(descriptor):
        got = real(descriptor)
        if not names:
            names.append((tmp_path / ".lock").rename(tmp_path / "gone"))
        return got

    monkeypatch.setattr(folder_lock, "_try_lock", replaced_once)
    lock_folder(tmp_path)
    assert (tmp_path / ".lock").exists() and not is_free(tmp_path)


def test_a_process_keeps_only_its_latest_locks(tmp_path):
    folders = [tmp_path / str(number) for number in range(folder_lock._MOST_HELD + 2)]
    for folder in folders[:-2]:
        lock_folder(folder)
    lock_folder(folders[0])  # used again: no longer the oldest
    for folder in folders[-2:]:
        lock_folder(folder)
    assert len(folder_lock._held) == folder_lock._MOST_HELD
    assert [is_free(folder) for folder in folders[:4]] == [False, True, True, False]
    assert not any(map(is_free, folders[-2:]))


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EINVAL"])
def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog, code):
    number = getattr(folder_lock.errno, code)

    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder_lock.fcntl, "lockf", no_locks)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0
    lock_folder(tmp_path)
    lock_folder(tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and os.strerror(number) in record.getMessage()
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("blocked", ["run", "run/.lock", "above"])
def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path, blocked):
    folder = tmp_path / "above" / "run" if blocked == "above" else tmp_path / "run"
    if blocked == "run/.lock":
        (tmp_path / blocked).mkdir(parents=True)
    else:
        (tmp_path / blocked).write_text("a file")
    with pytest.raises(
        ConfigError, match=r"run is not writable: .*\(.*\)\.|\.lock is a folder; expected a regular file"
    ):
        lock_folder(folder)
    assert os.path.realpath(folder) not in folder_lock._held


def test_folders_of_every_name_are_locked(tmp_path, subtests):
    for name in ("run 'a' \"b\"", "läuft 走る", "a\nb", "x" * 255):
        with subtests.test(name):
            lock_folder(tmp_path / name)
            assert not is_free(tmp_path / name)
    with pytest.raises(ConfigError, match="not writable"):
        lock_folder(tmp_path / ("y" * 256))


def test_a_lock_file_that_is_a_link_is_refused_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="is a link"):
        lock_folder(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "keep me"
