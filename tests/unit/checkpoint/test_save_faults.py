"""Whatever fails while a checkpoint is written, loaded or deleted: one that is whole is left, and it is found."""

import errno
import os
import random
import resource
import shutil
import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from logged import logged
from pairwise import each_once
from programs import Program

from amp_recipes.checkpoint import Checkpointer
from amp_recipes.errors import CheckpointError

CALLS = ["mkdir", "open", "write", "fsync", "close", "rename", "rmdir", "unlink"]


class Holder:
    """The smallest recoverable: hands out and takes any state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Disk:
    """Counts the calls to the disk, and lets one of them fail."""

    def __init__(self, patch, nth=None, code=errno.EIO):
        self.log = []
        for name in CALLS:
            patch.setattr(os, name, self._watched(name, getattr(os, name), nth, code))

    def _watched(self, name, real, nth, code):
        def call(*args, **kwargs):
            self.log.append(name)
            failing = len(self.log) == nth
            if failing and name != "close":
                raise OSError(code, os.strerror(code))
            result = real(*args, **kwargs)
            if failing:  # the descriptor is given back even then
                raise OSError(code, os.strerror(code))
            return result

        return call


def run_of(folder, value):
    """Two recoverables whose states must always belong together."""
    return Checkpointer(folder, {"a": Holder(torch.full((100,), float(value))), "b": Holder({"value": value})})


def found_in(folder):
    """The value that both states have."""
    a, b = Holder(), Holder()
    assert Checkpointer(folder, {"a": a, "b": b}).recover_if_possible() is not None
    assert torch.equal(a.state, torch.full((100,), float(b.state["value"])))
    return b.state["value"]


# --- every call to the disk


def calls_of_a_save(folder, monkeypatch):
    run_of(folder, 1).save_checkpoint()
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        run_of(folder, 2).save_and_keep_only()
    return disk.log


@pytest.mark.parametrize(("code", "background"), each_once([errno.EIO, errno.ENOSPC], [False, True]))
def test_whichever_call_to_the_disk_fails_nothing_is_lost(tmp_path, monkeypatch, caplog, code, background):
    log = calls_of_a_save(tmp_path / "count", monkeypatch)
    assert {"mkdir", "open", "write", "fsync", "close", "rename", "rmdir", "unlink"} <= set(log)
    refused = 0
    for nth in range(1, len(log) + 1):
        folder = tmp_path / str(nth)
        run_of(folder, 1).save_checkpoint({"optimizer_step": 10})
        second = run_of(folder, 2)
        with monkeypatch.context() as patch:
            disk = Disk(patch, nth, code)
            try:
                if background:
                    second.start_saving(then=second.prune)
                    second.wait()
                else:
                    second.save_and_keep_only()
                written = True
            except CheckpointError as error:
                written = False
                refused += 1
                assert "CKPT+000001 (step 10) is intact" in str(error) or "not writable" in str(error)
        assert len(disk.log) >= nth, "the fault was never reached"
        assert found_in(folder) == (2 if written else 1), f"call {nth} ({log[nth - 1]})"
        if not written:
            assert [path.name for path in folder.iterdir()] == ["CKPT+000001"]
        third = run_of(folder, 3)  # and the next one is as if nothing had been
        third.save_and_keep_only()
        assert found_in(folder) == 3
        assert len(list(folder.iterdir())) == 1
    assert refused >= log.index("rename")  # or the faults did not strike


def test_files_reach_the_disk_before_the_rename_and_nothing_goes_before_the_new_one_is_there(tmp_path, monkeypatch):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell which file a descriptor is")
    checkpointer = run_of(tmp_path, 1)
    checkpointer.save_checkpoint()
    done = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def record_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(source, target):
        done.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    def record_rmtree(path, *args, **kwargs):
        done.append(f"delete {Path(path).name}")
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(shutil, "rmtree", record_rmtree)
    checkpointer.save_and_keep_only()
    assert done == [
        *["a.safetensors", "b.safetensors", "meta.json", "MANIFEST.sha256", ".tmp-CKPT+000002"],
        "rename .tmp-CKPT+000002 CKPT+000002",
        tmp_path.name,
        "rename CKPT+000001 .tmp-CKPT+000001",
        "delete .tmp-CKPT+000001",
    ]


def test_a_new_folder_is_on_the_disk_with_all_that_is_above_it(tmp_path, monkeypatch):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell which file a descriptor is")
    done, fsync = [], os.fsync

    def record_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    Checkpointer(tmp_path / "run" / "save")
    assert set(done) == {tmp_path, tmp_path / "run"}


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    checkpointer = run_of(tmp_path, 4)
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    checkpointer.save_checkpoint()
    monkeypatch.undo()
    assert found_in(tmp_path) == 4


# --- no room, no permission


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    holder = Holder(torch.zeros(10))
    checkpointer = Checkpointer(tmp_path, {"a": holder})
    holder.state = torch.zeros(3_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_100_000))
        patch.setattr(os, "write", None)
        with pytest.raises(CheckpointError, match=r"\(needs 12\.0 MB, free 3\.1 MB\)\. There is no other checkpoint\."):
            checkpointer.save_checkpoint({"optimizer_step": 3})
    checkpointer.save_checkpoint({"optimizer_step": 300})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_100_000))
    with pytest.raises(CheckpointError) as error:
        checkpointer.save_checkpoint({"optimizer_step": 340})
    assert str(error.value).startswith(
        "Checkpoint CKPT+000002 (step 340) was not written: the disk is full (needs 12.0 MB, free 3.1 MB). "
        "CKPT+000001 (step 300) is intact."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+000001"]


def test_room_is_told_in_units_that_fit(tmp_path, monkeypatch, subtests):
    for values, free, told in [
        (28_000, 96_000, r"needs 11\d kB, free 96 kB"),
        (28_000, 0, r"needs 11\d kB, free 0 bytes"),
        (28_000, 999, r"needs 11\d kB, free 999 bytes"),
        (28_000, 9_940, r"needs 11\d kB, free 9\.9 kB"),
        (28_000, 9_960, r"needs 11\d kB, free 10 kB"),
        (300_000, 999_700, r"needs 1\.2 MB, free 1\.0 MB"),
        (300_000_000, 999_960_000, r"needs 1\.2 GB, free 1\.0 GB"),
        (300_000_000, 123_000_000, r"needs 1\.2 GB, free 123\.0 MB"),
    ]:
        checkpointer = Checkpointer(tmp_path, {"a": Holder(torch.empty(values))})
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with subtests.test(told), pytest.raises(CheckpointError, match=rf"disk is full \({told}\)"):
            checkpointer.save_checkpoint()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_meanwhile_is_told_in_the_same_words(tmp_path, monkeypatch, code):
    checkpointer = run_of(tmp_path, 1)
    checkpointer.save_checkpoint()
    write = os.write

    def full(descriptor, content):
        if len(content) > 300:
            raise OSError(code, os.strerror(code))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        CheckpointError, match=r"disk is full \(needs 7\d\d bytes, free [\d.]+ [MG]B\)\. CKPT\+000001 is intact"
    ):
        checkpointer.save_checkpoint()
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+000001"]
    assert checkpointer.save_checkpoint().number == 2


def test_a_limit_on_the_size_of_files_is_reported_as_that(tmp_path):
    holder = Holder(torch.zeros(10))
    checkpointer = Checkpointer(tmp_path, {"a": holder})
    checkpointer.save_checkpoint()
    holder.state = torch.zeros(1_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"CKPT\+000002 was not written: File too large"):
            checkpointer.save_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+000001"]
    assert checkpointer.recover_if_possible().number == 1


def test_a_folder_that_became_read_only_is_told_and_can_still_be_read(tmp_path, monkeypatch):
    checkpointer = run_of(tmp_path, 1)
    checkpointer.save_checkpoint()
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"is not writable \(Read-only file system\)"):
        checkpointer.save_checkpoint()
    assert found_in(tmp_path) == 1


def test_nothing_is_put_into_the_systems_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    run_of(tmp_path / "save", 5).save_and_keep_only()
    assert found_in(tmp_path / "save") == 5


# --- damage


def damaged(content, how, random_):
    """`content` of a file after an accident."""
    at = random_.randrange(len(content))
    if how == "truncated":
        return content[:at]
    if how == "bit flip":
        return content[:at] + bytes([content[at] ^ (1 << random_.randrange(8))]) + content[at + 1 :]
    size = min(512, len(content))
    start = random_.randrange(len(content) - size + 1)
    return content[:start] + bytes(size) + content[start + size :]


@pytest.mark.parametrize("how", ["truncated", "bit flip", "zeroed page"])
@pytest.mark.parametrize("file", ["a.safetensors", "b.safetensors", "meta.json", "MANIFEST.sha256"])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path, file, how):
    for value in (1, 2):
        run_of(tmp_path, value).save_checkpoint({"loss": 1.0 / value})
    path = tmp_path / "CKPT+000002" / file
    content = path.read_bytes()
    random_ = random.Random(f"{file} {how}")
    for _ in range(25):
        path.write_bytes(damaged(content, how, random_))
        assert path.read_bytes() != content
        with logged(r"CKPT\+000002 is damaged, so it is skipped: ") as warned:
            assert found_in(tmp_path) == 1
        assert any(name in warned[0] for name in (file, "MANIFEST.sha256"))
    path.unlink()
    with logged(r"CKPT\+000002 is damaged, so it is skipped: "):
        assert found_in(tmp_path) == 1
    path.write_bytes(content)
    assert found_in(tmp_path) == 2


def test_of_the_best_the_next_best_is_taken(tmp_path):
    for value, loss in enumerate([3.0, 1.0, 2.0, 9.0], 1):
        run_of(tmp_path, value).save_checkpoint({"loss": loss})
    (tmp_path / "CKPT+000002" / "b.safetensors").write_bytes(b"")
    a, b = Holder(), Holder()
    with logged(r"CKPT\+000002 is damaged, .*b\.safetensors \(0 bytes\)"):
        found = Checkpointer(tmp_path, {"a": a, "b": b}).recover_if_possible(min_key="loss")
    assert (found.number, b.state) == (3, {"value": 3})


def test_if_all_are_damaged_it_refuses_and_lists_each(tmp_path):
    for value in (1, 2, 3):
        run_of(tmp_path, value).save_checkpoint({"loss": 1.0})
    for number, file in enumerate(["a.safetensors", "meta.json", "MANIFEST.sha256"], 1):
        (tmp_path / f"CKPT+00000{number}" / file).write_bytes(b"x")
    live = run_of(tmp_path, 7)
    for key in (None, "loss"):
        with pytest.raises(CheckpointError) as error:
            live.recover_if_possible(min_key=key)
        lines = str(error.value).splitlines()
        assert "No usable checkpoint" in lines[0]
        assert "CKPT+000001: a.safetensors (1 bytes) has sha256" in str(error.value)
        assert "CKPT+000002: meta.json cannot be read" in str(error.value)
        assert "CKPT+000003: MANIFEST.sha256" in str(error.value)
        assert "`--resume never` renames their folder and starts a new run" in str(error.value)
    assert live.recoverables["b"].state == {"value": 7}


def test_files_that_are_not_asked_for_are_not_looked_at(tmp_path):
    run_of(tmp_path, 1).save_checkpoint()
    (tmp_path / "CKPT+000001" / "b.safetensors").write_bytes(b"")
    a = Holder()
    assert Checkpointer(tmp_path, {"a": a}).recover_if_possible().number == 1
    assert torch.equal(a.state, torch.ones(100))


def test_a_checkpoint_that_cannot_be_read_is_left_out(tmp_path, monkeypatch):
    for value in (1, 2):
        run_of(tmp_path, value).save_checkpoint()
    path = tmp_path / "CKPT+000002" / "a.safetensors"
    path.unlink()
    path.mkdir()
    with logged(r"a\.safetensors is a folder; expected a regular file"):
        assert found_in(tmp_path) == 1


# --- the process is killed


@pytest.mark.parametrize("mode", ["save_and_keep_only", "start_saving"])
def test_a_process_that_is_killed_while_it_saves_or_prunes_leaves_whole_checkpoints(tmp_path, mode):
    script = textwrap.dedent(
        """
        import sys, torch
        from amp_recipes.checkpoint import Checkpointer
        torch.set_num_threads(1)
        class Holder:
            def state_dict(self): return self.state
            def load_state_dict(self, state): self.state = state
        folder, mode = sys.argv[1:]
        holders = {"a": Holder(), "b": Holder()}
        checkpointer = Checkpointer(folder, holders)
        def told(saved):
            checkpointer.prune(saved)
            print(saved.number, flush=True)
        for number in range(1, 100000):
            for holder in holders.values():
                holder.state = torch.full((50_000,), float(number))
            if mode == "start_saving":
                checkpointer.start_saving({"n": number}, then=told)
            else:
                print(checkpointer.save_and_keep_only({"n": number}).number, flush=True)
        """
    )
    for saves in (1, 3, 4):
        folder = tmp_path / str(saves)
        child = Program("-c", script, folder, mode, stdout=subprocess.PIPE)
        try:
            for _ in range(saves):
                assert child.stdout.readline()
        finally:
            child.kill()
        finished = saves + len(child.stdout.read().split())
        child.wait()
        holders = {"a": Holder(), "b": Holder()}
        found = Checkpointer(folder, holders).recover_if_possible()
        assert found.meta["n"] == found.number >= finished
        for holder in holders.values():
            assert torch.equal(holder.state, torch.full((50_000,), float(found.number)))
