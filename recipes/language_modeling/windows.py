"""Cuts token streams into windows, and orders them for training, with memory maps and in constant memory.

A sample is {"inputs": int64 (T,), "targets": int64 (T,)}; a batch has (B, T) of each. Target t is the token that
follows inputs[:t + 1]; every token of the streams is a target exactly once. A window goes on in the next stream where
one ends: short documents fill windows together. The very last may be short: it is padded, its targets there IGNORE.
Legend of shapes: B batch, T tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from model import IGNORE
from torch.utils.data import Dataset

from amp_recipes.errors import DataError

_OPEN_FILES = 64  # memory maps that stay open in a process
_ROUNDS = 4  # of the Feistel network: Luby and Rackoff (1988) prove four to be enough with random functions
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Stream:
    """Tokens first to last - 1 of a file: plain text (one token per byte), or an array of whole numbers (.npy).

    ended: whether a separator follows them that does not stand in the file.
    """

    path: Path
    first: int
    last: int
    ended: bool = False

    def __len__(self) -> int:
        return self.last - self.first + self.ended

    def read(self, start: int, stop: int, separator: int) -> np.ndarray:
        """Return tokens start to stop - 1 of the stream, int64, with the separator behind the file's last one."""
        from_file = open_tokens(self.path)[self.first + start : min(self.first + stop, self.last)]
        behind = max(0, self.first + stop - self.last)
        return np.pad(from_file.astype(np.int64), (0, behind), constant_values=separator)


@lru_cache(maxsize=_OPEN_FILES)
def open_tokens(path: Path) -> np.ndarray:
    """Return the tokens of a file as a memory map: nothing is read before it is asked for.

    Raises DataError, which names the file, where it cannot be.
    """
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r")
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not readable as tokens ({error}); was it moved or cut off?") from error


class Windows(Dataset):
    """The windows of streams, in order, one stream behind the other.

    streams: none of them empty. window_tokens: T. separator: the token that stands before and after a document.
    text_bytes: how many bytes of text the streams stand for. at_most: no more than so many windows, evenly spread.
    """

    def __init__(
        self, streams: Sequence[Stream], window_tokens: int, separator: int, text_bytes: int, at_most: int | None = None
    ):
        self.streams = tuple(streams)
        self.window_tokens = window_tokens
        self.separator = separator
        self.text_bytes = text_bytes
        # Token t of all streams is in the first stream whose entry here is larger than t.
        self.ends = np.cumsum([len(stream) for stream in self.streams])
        self.tokens = int(self.ends[-1])
        self.available = -(-self.tokens // window_tokens)
        self.count = min(self.available, at_most or self.available)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per target; separators are targets, too, and have none."""
        return self.text_bytes / self.tokens

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = index * self.available // self.count * self.window_tokens
        stop = min(start + self.window_tokens, self.tokens)
        tokens = torch.from_numpy(self.read(start - 1, stop))
        inputs = torch.full((self.window_tokens,), self.separator, dtype=torch.int64)
        targets = torch.full((self.window_tokens,), IGNORE, dtype=torch.int64)
        inputs[: stop - start], targets[: stop - start] = tokens[:-1], tokens[1:]
        return {"inputs": inputs, "targets": targets}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start to stop - 1 of all streams, int64; token -1 is a separator."""
        pieces = [np.full(1, self.separator)] if start < 0 else []
        start = max(0, start)
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            stream, end = self.streams[number], int(self.ends[number])
            begin = end - len(stream)
            pieces.append(stream.read(start - begin, min(stop, end) - begin, self.separator))
            start, number = end, number + 1
        return np.concatenate(pieces)


class ShuffledWindows(Dataset):
    """Windows in a random order without end, which epochs of `epoch_windows` cut into pieces.

    All windows come once before any comes again, in another order then. Which window stands at a place is computed
    from (seed, place): nothing is kept, however many there are, and to go on anywhere costs nothing. The loader is
    therefore not to shuffle.
    """

    def __init__(self, windows: Windows, epoch_windows: int, seed: int):
        self.windows = windows
        self.epoch_windows = epoch_windows
        self.seed = seed
        self.epoch = 1

    def set_epoch(self, epoch: int) -> None:
        """Give the windows of that epoch, counted from 1, from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.epoch_windows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.epoch_windows:
            raise IndexError(f"window {index} of {self.epoch_windows}")
        time_over, place = divmod((self.epoch - 1) * self.epoch_windows + index, len(self.windows))
        return self.windows[shuffled(place, len(self.windows), f"{self.seed}/{time_over}")]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per target."""
        return self.windows.bytes_per_token


def shuffled(place: int, count: int, key: str) -> int:
    """Return what stands at `place` in a random order of 0 to count - 1 that is a function of `key`.

    A Feistel network permutes the next power of 4; what falls outside is sent through it again until it falls inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): fewer than 4 times on average.
    """
    half_bits = max(2, (count - 1).bit_length() + 1 >> 1)
    half_mask = (1 << half_bits) - 1
    keys = _round_keys(key)
    while True:
        left, right = place >> half_bits, place & half_mask
        for round_key in keys:
            left, right = right, left ^ (_mixed(right ^ round_key) & half_mask)
        place = left << half_bits | right
        if place < count:
            return place


@lru_cache(maxsize=8)
def _round_keys(key: str) -> tuple[int, ...]:
    digest = blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


def _mixed(x: int) -> int:
    """A 64-bit number in which each bit depends on every bit of x (the finaliser of Steele et al. 2014, "SplitMix")."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
