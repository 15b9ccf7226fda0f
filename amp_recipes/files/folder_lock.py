"""Locks an output folder, so that one run at a time writes there; a lock ends with its process.

The lock is a POSIX record lock on `<folder>/.lock`. The kernel drops it when its process ends, however it ends, so
there is no stale lock to recognize. `flock` would live on in forked loader workers that outlive a killed parent.

The price: a process drops its record lock when it closes any descriptor of that file. So nothing here opens the
file of a folder that this process holds, and nothing else should (`lock_folder` once more takes a lost lock back).
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_recipes.errors import ConfigError, FolderInUseError
from amp_recipes.files.file_system import reason
from amp_recipes.files.run_files import regular_only

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

# Each needs an open file. A process with more runs than this has finished the first ones long ago.
_MOST_HELD = 64
# Errors of file systems without locks (NFS without a lock service, some FUSE and cluster file systems).
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
_HELD_BY_ANOTHER = frozenset({errno.EACCES, errno.EAGAIN})
# How long a holder may take between taking the lock and having written its name.
_NAME_WITHIN_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True)
class _Held:
    """A lock of this process: the open file, and which file that is."""

    descriptor: int
    identity: tuple[int, int]


_held: dict[str, _Held] = {}  # by the folder's real path, the latest last
_unlocked: set[str] = set()  # folders whose file system has no locks: said once
_guard = threading.RLock()


def lock_folder(folder: str | os.PathLike[str]) -> None:
    """Make this process the only one that runs in `folder`, until it ends or calls `unlock_folder`.

    Makes the folder if it is not there. A second call in the same process changes nothing; a forked child does not
    hold what its parent holds. Where the file system has no locks, one warning says so.
    Raises FolderInUseError that names the holder; ConfigError if the folder cannot be written.
    """
    folder = Path(folder)
    with _guard:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = os.path.realpath(folder)
            if not _still_held(path):
                _take(folder, path)
        except OSError as error:
            name = error.filename or folder / LOCK_FILE
            raise ConfigError(f"output folder {folder} is not writable: {reason(error, folder)} ({name}).") from error
        while len(_held) > _MOST_HELD:
            _let_go(next(iter(_held)))


def unlock_folder(folder: str | os.PathLike[str]) -> None:
    """Unlock `folder`, however often this process has locked it; does nothing if it does not hold the lock."""
    with _guard:
        _let_go(os.path.realpath(folder))


def _still_held(path: str) -> bool:
    """Whether this process holds the folder's lock file as it is there now; what is stale is forgotten."""
    held = _held.get(path)
    if held is None:
        return False
    try:
        # Both comparisons are without an open: the folder may be another one now, and the descriptor too.
        same = _identity(os.stat(os.path.join(path, LOCK_FILE))) == held.identity
        ours = _identity(os.fstat(held.descriptor)) == held.identity
    except OSError:
        same = ours = False
    if same and ours and _try_lock(held.descriptor):  # no change if it is held; taken back if it was lost
        if _read_name(held.descriptor).get("pid") != os.getpid():  # it was lost, and others had it for a while
            _write_name(held.descriptor)
        _held[path] = _held.pop(path)
        return True
    _let_go(path)
    return False


def _take(folder: Path, path: str) -> None:
    """Lock the folder's lock file and write our name into it. Raises FolderInUseError or OSError."""
    file = os.path.join(path, LOCK_FILE)
    while True:
        descriptor = regular_only(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            if not _try_lock(descriptor):
                holder = _holder(descriptor)
                if holder is None:
                    continue  # it released the lock in between
                raise FolderInUseError(_in_use(folder, holder))
            identity = _identity(os.fstat(descriptor))
            if _identity(os.stat(file)) != identity:
                continue  # another file by now
            _write_name(descriptor)
            _held[path] = _Held(descriptor, identity)
            return
        except FileNotFoundError:  # removed, with its folder perhaps, while we were locking it
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _say_once(path, error.strerror)
            return
        finally:
            if path not in _held:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether this process has the lock now. Raises OSError where locks do not work."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise
    return True


def _let_go(path: str) -> None:
    held = _held.pop(path, None)
    if held is None:
        return
    with suppress(OSError):  # closed already
        # Not a file that got the number after something else had closed ours.
        if _identity(os.fstat(held.descriptor)) == held.identity:
            os.close(held.descriptor)


def _forget_in_child() -> None:
    """A fork has copies of the open files, but none of the locks; its parent's thread may have held the guard."""
    global _guard
    _guard = threading.RLock()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _write_name(descriptor: int) -> None:
    now = datetime.datetime.now().astimezone()
    name = {"pid": os.getpid(), "host": socket.gethostname(), "since": now.isoformat(" ", timespec="seconds")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(name) + "\n").encode(), 0)


def _holder(descriptor: int) -> dict[str, Any] | None:
    """Return the holder's data about itself; empty if it wrote none in time; None if nobody holds the lock now."""
    deadline = time.monotonic() + _NAME_WITHIN_SECONDS
    while True:
        name = _read_name(descriptor)
        if name and _can_be_alive(name):
            return name
        # The name of an earlier holder, or half of one: the holder is writing.
        if time.monotonic() > deadline:
            return {}
        time.sleep(_ASK_AGAIN_SECONDS)
        if _try_lock(descriptor):
            return None


def _read_name(descriptor: int) -> dict[str, Any]:
    try:
        name = json.loads(os.pread(descriptor, 4096, 0))
        return {"pid": int(name["pid"]), "host": str(name["host"]), "since": str(name["since"])}
    except (ValueError, KeyError, TypeError):
        return {}


def _can_be_alive(name: dict[str, Any]) -> bool:
    if name["host"] == socket.gethostname():
        try:
            os.kill(name["pid"], 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):  # of another user
            pass
    return True


def _in_use(folder: Path, holder: dict[str, Any]) -> str:
    start = f"output folder {folder} is in use by"
    if not holder:
        return f"{start} another process. Wait until it ends, or give another --output_folder."
    here = holder["host"] == socket.gethostname()
    who = f"{start} pid {holder['pid']} on host {holder['host']} since {holder['since']}."
    if here and holder["pid"] == os.getppid():
        return f"{who} That process started this one: let only one of them use the folder."
    end_it = f"end it (kill {holder['pid']}{'' if here else ' there'})"
    return f"{who} Wait until it ends, {end_it}, or give another --output_folder."


def _say_once(path: str, reason: str | None) -> None:
    if path not in _unlocked:
        _unlocked.add(path)
        logger.warning("could not lock %s (%s): make sure that no second run uses this folder", path, reason)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
