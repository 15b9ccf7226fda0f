"""Finds out what the file system of a run's folder cannot do, and warns about the effect."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

from amp_recipes.errors import ConfigError

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The error numbers of a full disk."""

_NO_FOLDER_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


@functools.cache
def check_file_system(folder: str) -> None:
    """Warn once, in one line, of what the file system of `folder` lacks that a run can do without.

    Makes a small folder there, and removes it. Raises ConfigError where folders cannot be renamed, without which no
    checkpoint can be saved, and where nothing can be written.
    """
    lacks = []
    try:
        with tempfile.TemporaryDirectory(prefix=".tmp-probe-", dir=folder, ignore_cleanup_errors=True) as probe:
            made = Path(probe, "made")
            made.mkdir()
            (made / "file").touch()
            if not fsync_folder(made):
                lacks.append("no fsync of folders (after a loss of power the newest checkpoint may be missing)")
            try:
                os.link(made / "file", made / "link")
            except OSError:
                lacks.append("no hard links (on_spike makes a full copy of the checkpoint that it goes back to)")
            _check_rename(made, folder)
    except OSError as error:
        raise ConfigError(f"output folder {folder} is not writable: {reason(error, Path(folder))}.") from error
    if lacks:
        logger.warning("the file system of %s has %s", folder, " and ".join(lacks))


def _check_rename(made: Path, folder: str) -> None:
    try:
        os.rename(made, made.with_name("renamed"))
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ConfigError(
            f"the file system of output folder {folder} cannot rename folders ({error.strerror}). Each checkpoint is "
            "renamed once it is complete. Give an --output_folder on another file system."
        ) from error


def fsync_folder(path: Path) -> bool:
    """Write the names in a folder to the disk. False where the file system has no such call; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def reason(error: OSError, folder: Path) -> str:
    """Explain an error of the disk while something was created in `folder`, which need not exist."""
    return out_of_inodes(error, folder) or error.strerror or str(error)


def out_of_inodes(error: OSError, folder: Path) -> str:
    """Return a message if the disk has free bytes but no room for one more file, else an empty text."""
    if error.errno not in FULL:
        return ""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        found = os.statvfs(there)
        free = size_text(shutil.disk_usage(there).free)
    except OSError:  # the disk does not answer; the error at hand is the one to tell
        return ""
    if found.f_favail or not found.f_files:  # a file system without a limit, such as btrfs, says 0 for both
        return ""
    return f"no inodes left, so no file can be created (free {free}); delete files there (`df -i` counts them)"


def size_text(count: int) -> str:
    """Bytes as people read them: 512 bytes, 4.2 kB, 112 kB, 12.0 MB."""
    if count < 1000:
        return f"{count} bytes"
    if count < 999_500:
        return f"{count / 1e3:.{0 if count >= 9950 else 1}f} kB"
    return f"{count / 1e6:.1f} MB" if count < 999_950_000 else f"{count / 1e9:.1f} GB"
