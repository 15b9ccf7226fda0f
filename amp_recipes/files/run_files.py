"""Opens files in a run's folder, which may come from somebody else: only regular files, and not through links.

A link would have a run write into a file elsewhere, a named pipe would hold it up, a device would fill its memory. The
folder itself, which the user names, may be a link.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from amp_recipes.errors import ConfigError

JSON_BYTES = 1 << 22  # environment.json has some kB; a summary.json names every module that is pinned
JSON_DEPTH = 50  # what recursive functions can follow whatever their depth when they begin

# Without O_NONBLOCK, opening a named pipe waits for a process at the other end.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def regular_only(path: str | os.PathLike[str], flags: int) -> int:
    """The descriptor of a regular file: the `opener` with which `open` reads or appends to a file of a run.

    Raises ConfigError where something else stands, or, to write, a file that has another name too; otherwise OSError.
    """
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
    with suppress(FileNotFoundError):
        _check(path, os.lstat(path), writes)  # before it is opened, which a device may not stand
    descriptor = os.open(path, flags | _FLAGS, 0o666)
    try:
        _check(path, os.fstat(descriptor), writes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_irregular(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError if at `path` there is something other than a regular file, such as a link to one."""
    with suppress(OSError):
        _check(path, os.lstat(path), writes=False)


def refuse_link(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if a folder that a run has inside of its own is a link."""
    if os.path.islink(folder):
        raise ConfigError(
            f"{folder} is a link. A run writes and deletes only inside its own folder. To put the whole run "
            "elsewhere, give another output_folder; the output folder itself may be a link."
        )


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file. Raises ConfigError; FileNotFoundError if there is no such file."""
    try:
        with open(path, "rb", opener=regular_only) as stream:
            data = stream.read(JSON_BYTES + 1)
        if len(data) > JSON_BYTES:
            raise ValueError(f"it is larger than {JSON_BYTES:,} bytes")
        value = json.loads(data)
        if _is_deep(value):
            raise RecursionError
    except (FileNotFoundError, ConfigError):
        raise
    except RecursionError as error:
        raise ConfigError(f"{path}: cannot be read: it is nested more than {JSON_DEPTH} levels deep.") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {why}.") from error
    return value


def write_atomically(file: Path, content: bytes) -> None:
    """Write `file` whole or not at all, in place of what stands there; a link is replaced. Raises OSError."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a process of this number that was killed, or a link
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _check(path: str | os.PathLike[str], found: os.stat_result, writes: bool) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFLNK:
        raise ConfigError(
            f"{path} is a link; expected a regular file, since a run does not read or write its files through links. "
            "Put the file itself there, or remove the link."
        )
    if kind != stat.S_IFREG:
        raise ConfigError(f"{path} is {_KINDS.get(kind, 'no file')}; expected a regular file. Remove it.")
    if writes and found.st_nlink > 1:
        raise ConfigError(
            f"{path} has a second name elsewhere (a hard link), so this run would change that file too. Put a copy "
            "in its place, or remove it."
        )


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(JSON_DEPTH):
        above = [item for item in level if isinstance(item, dict | list)]
        level = [item for items in above for item in (items.values() if isinstance(items, dict) else items)]
    return any(isinstance(item, dict | list) for item in level)


def path_below(folder: Path, name: str | os.PathLike[str], taken: Iterable[str]) -> Path | None:
    """`folder / name`, with the folders on the way made; None in a folder that may only be read.

    taken: names in the folder that are not to be given away. Raises ConfigError for them, for a name that leads out of
    the folder, and where a folder cannot be made.
    """
    path = folder / name
    below = Path(os.path.relpath(path.resolve(), folder.resolve())).parts
    if not below or below[0] == "..":
        raise ConfigError(f"output_path('{name}') is not inside {folder}: give the name of a file inside it.")
    if below[0] in taken:
        raise ConfigError(f"output_path('{name}') is reserved for the run's own {below[0]}: give another name.")
    if folder.is_dir() and not os.access(folder, os.W_OK):
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_path('{name}'): {error.strerror}: {error.filename}.") from error
    return path
