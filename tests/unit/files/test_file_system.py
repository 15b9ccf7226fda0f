"""File systems that lack something: what is said of it, and that a run does without it where that is safe."""

import errno
import logging
import os
import stat
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from amp_recipes import Brain, EpochCounter
from amp_recipes.checkpoint import Checkpointer
from amp_recipes.config import create_experiment_directory
from amp_recipes.errors import CheckpointError, ConfigError
from amp_recipes.files import folder_lock
from amp_recipes.files.folder_lock import lock_folder, unlock_folder


class Regression(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


def make(folder, **options):
    torch.manual_seed(0)
    run_opts = {"device": "cpu", "noprogressbar": True, "output_folder": str(folder), **options}
    return Regression({"model": nn.Linear(3, 1)}, lambda p: torch.optim.SGD(p, 0.1), run_opts=run_opts)


def trained(folder, **options):
    brain = make(folder, **options)
    brain.fit(EpochCounter(2), [torch.ones(2, 3)] * 2)
    return brain


@pytest.fixture(autouse=True)
def unlocked(tmp_path):
    yield
    unlock_folder(tmp_path / "run")


def refuse(code):
    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    return refused


def without_folder_fsync(patch, code=errno.EINVAL):
    fsync = os.fsync

    def of_files_only(descriptor):
        return refuse(code)() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync(descriptor)

    patch.setattr(os, "fsync", of_files_only)


def without_links(patch):
    patch.setattr(os, "link", refuse(errno.EPERM))


def without_locks(patch):
    patch.setattr(folder_lock.fcntl, "lockf", refuse(errno.EINVAL))


def without_rename_over_folders(patch):
    rename = os.rename

    def only_to_new_names(source, target, **_):
        return refuse(errno.EEXIST)() if os.path.isdir(target) else rename(source, target)

    patch.setattr(os, "rename", only_to_new_names)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_nothing_is_said_of_a_file_system_that_lacks_nothing(tmp_path, caplog):
    trained(tmp_path / "run", on_spike="lower_lr")
    assert warnings_in(caplog) == []
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".tmp")]


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        (without_folder_fsync, ["no fsync of folders (", "power"]),
        (without_links, ["no hard links (", "on_spike"]),
        (without_locks, ["could not lock", "(Invalid argument)", "no second run"]),
        (without_rename_over_folders, None),  # no run needs it
    ],
)
def test_a_run_goes_on_without_it_and_says_once_what_that_costs(tmp_path, monkeypatch, caplog, lacks, told):
    lacks(monkeypatch)
    ended = trained(tmp_path / "run", on_spike="lower_lr")
    again = make(tmp_path / "run", on_spike="lower_lr")
    texts = warnings_in(caplog)
    assert len(texts) == (told is not None), texts
    for words in told or []:
        assert words in texts[0] and str(tmp_path / "run") in texts[0]
    again.fit(EpochCounter(2), [torch.ones(2, 3)] * 2)  # what was saved is found
    assert torch.equal(again.modules.model.weight, ended.modules.model.weight)
    assert again.optimizer_step == ended.optimizer_step == 4


def test_two_lacks_are_told_in_one_line(tmp_path, monkeypatch, caplog):
    without_folder_fsync(monkeypatch)
    without_links(monkeypatch)
    make(tmp_path / "run")
    (text,) = warnings_in(caplog)
    assert "no fsync of folders (" in text and "no hard links (" in text


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS])
def test_a_folder_that_refuses_fsync_holds_checkpoints(tmp_path, monkeypatch, code):
    without_folder_fsync(monkeypatch, code)
    checkpointer = Checkpointer(tmp_path / "save", {"model": nn.Linear(2, 2)})
    for _ in range(2):
        checkpointer.save_and_keep_only()
    assert checkpointer.recover_if_possible().number == 2


def test_a_disk_that_fails_is_not_taken_for_one_that_refuses(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path / "save", {"model": nn.Linear(2, 2)})
    without_folder_fsync(monkeypatch, errno.EIO)
    with pytest.raises(CheckpointError, match="not written: Input/output error"):
        checkpointer.save_checkpoint()


def test_a_file_system_that_cannot_rename_folders_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    rename = os.rename
    monkeypatch.setattr(
        os, "rename", lambda source, *to: refuse(errno.ENOSYS)() if os.path.isdir(source) else rename(source, *to)
    )
    with pytest.raises(ConfigError, match=r"run cannot rename folders \(Function not implemented\).*--output_folder"):
        make(tmp_path / "run")
    make(tmp_path / "run", debug=True)  # saves no checkpoints


# ---------------------------------------------------------------------- out of inodes


def out_of_inodes(patch, files=1000):
    """Files can still be removed, and those that are there be written to."""
    real, open_, mkdir = os.statvfs, os.open, os.mkdir
    names = [name for name in dir(os.statvfs_result) if name.startswith("f_") and name != "f_fsid"]

    def statvfs(path):
        found = {name: getattr(real(path), name) for name in names}
        found |= {"f_files": files, "f_ffree": 0, "f_favail": 0, "f_frsize": 4096, "f_bavail": 24_000_000}
        order = ["f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"]
        return os.statvfs_result([*(found[name] for name in order), found["f_flag"], found["f_namemax"]])

    def no_new_file(path, flags, *args, **kwargs):
        makes = flags & os.O_CREAT and not os.path.lexists(path)
        return refuse(errno.ENOSPC)() if makes else open_(path, flags, *args, **kwargs)

    def no_new_folder(path, *args, **kwargs):
        return mkdir(path, *args, **kwargs) if os.path.lexists(path) else refuse(errno.ENOSPC)()

    patch.setattr(os, "statvfs", statvfs)
    patch.setattr(os, "open", no_new_file)
    patch.setattr(os, "mkdir", no_new_folder)


def test_out_of_inodes_is_told_as_that_by_a_save(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, {"model": nn.Linear(2, 2)})
    checkpointer.save_checkpoint()
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: nullcontext())  # has no name, so needs no `O_CREAT`
    out_of_inodes(monkeypatch)
    with pytest.raises(CheckpointError) as error:
        checkpointer.save_checkpoint()
    assert str(error.value).startswith(
        "Checkpoint CKPT+000002 was not written: no inodes left, so no file can be created (free 98.3 GB); delete "
        "files there (`df -i` counts them). CKPT+000001 is intact."
    )


def test_out_of_inodes_is_told_as_that_at_the_start(tmp_path, monkeypatch):
    out_of_inodes(monkeypatch)
    starts = {
        "a lock": lambda: lock_folder(tmp_path / "run"),
        "settings": lambda: create_experiment_directory(tmp_path / "run"),
        "checkpoints": lambda: Checkpointer(tmp_path / "run" / "save"),
    }
    for start in starts.values():
        with pytest.raises((ConfigError, CheckpointError), match=r"not writable.*no inodes left.*`df -i`"):
            start()


def test_a_full_disk_with_inodes_left_or_without_such_a_limit_is_full(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, {"model": nn.Linear(2, 2)})
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: nullcontext())
    out_of_inodes(monkeypatch, files=0)  # as btrfs says
    with pytest.raises(CheckpointError, match=r"not written: the disk is full \(needs"):
        checkpointer.save_checkpoint()
