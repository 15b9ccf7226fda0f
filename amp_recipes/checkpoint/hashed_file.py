"""Writes a file and computes its sha256 at the same time; computes that of an existing file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from amp_recipes.checkpoint.background import without_forks
from amp_recipes.files.run_files import regular_only

_CHUNK_BYTES = 4 << 20  # long enough that hashing and writing run without the interpreter's lock
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class HashedFile:
    """A new file that knows its sha256 without being read again."""

    def __init__(self, path: Path) -> None:
        with without_forks():
            self._digest = hashlib.sha256()
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)

    def write(self, content: memoryview) -> None:
        """Append bytes."""
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            self._digest.update(chunk)
            while len(chunk):  # a write may be a short one
                chunk = chunk[os.write(self._descriptor, chunk) :]

    def finish(self) -> str:
        """Wait until the disk has it all; returns the sha256 in hexadecimal."""
        os.fsync(self._descriptor)
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Give the descriptor back, once."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def file_sha256(path: Path) -> str:
    """The sha256 of a file as it now is on the disk. Raises OSError; ConfigError for what is no regular file."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0, opener=regular_only) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
