"""Writes and reads token shards: one-dimensional .npy arrays of whole documents, and their index.json.

shards/
  index.json            written last: without it the folder is not finished
  train-00000.npy ...   uint16 or uint32 tokens; after each document the separator
  valid-00000.npy, test-00000.npy ...
  tokenizer.json        of the `tokenizers` library; absent where a token is a byte
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amp_recipes.errors import DataError

INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = "amp_recipes token shards 1"
SPLIT_NAMES = ("train", "valid", "test")


@dataclass
class Part:
    """What a split holds: each shard's name and number of tokens, documents, bytes of their text in UTF-8."""

    shards: list[tuple[str, int]] = field(default_factory=list)
    documents: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Index:
    """What index.json says."""

    vocab_size: int
    separator: int
    tokenizer: str | None
    splits: dict[str, Part]

    def write(self, folder: Path) -> None:
        """Write index.json whole."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        write_whole(folder / INDEX_FILE, lambda file: file.write(text.encode()))

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """Read index.json; raises DataError if it is missing or damaged."""
        path = folder / INDEX_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            splits = {name: Part(**part) for name, part in found.pop("splits").items()}
            return cls(splits=splits, **found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: no index of token shards ({error}); let prepare.py make the folder") from error


class ShardWriter:
    """Writes the documents of one split to shards of about `shard_tokens`; never holds more than one of them."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder, self.split = folder, split
        self.buffer = np.empty(shard_tokens, dtype=dtype)
        self.filled = 0
        self.part = Part()

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Take one document, its separator included; a shard ends with a document."""
        if self.filled and self.filled + len(tokens) > len(self.buffer):
            self.flush()
        if len(tokens) > len(self.buffer):
            self._save(tokens.astype(self.buffer.dtype))
        else:
            self.buffer[self.filled : self.filled + len(tokens)] = tokens
            self.filled += len(tokens)
        self.part.documents += 1
        self.part.bytes += text_bytes

    def flush(self) -> None:
        """Write the collected documents as a shard."""
        if self.filled:
            self._save(self.buffer[: self.filled])
            self.filled = 0

    def _save(self, tokens: np.ndarray) -> None:
        name = f"{self.split}-{len(self.part.shards):05d}.npy"
        write_whole(self.folder / name, lambda file: np.save(file, tokens))
        self.part.shards.append((name, len(tokens)))


def write_whole(path: Path, write: Any) -> None:
    """Write a file under another name and rename it once it is on the disk: it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
