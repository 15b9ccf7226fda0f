"""Loads the text: the source of Python's standard library, a text file, a folder of them, or token shards.

Without a tokenizer a token is a byte, and byte 0 separates documents.
"""

import os
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shards import INDEX_FILE, SPLIT_NAMES, TOKENIZER_FILE, Index
from windows import ShuffledWindows, Stream, Windows, open_tokens

from amp_recipes import needs_extra
from amp_recipes.errors import DataError

BYTE_VALUES = 256
BYTE_SEPARATOR = 0
_CUT_SEARCH_BYTES = 65536  # how far a cut may move to the end of a line
_LOOKED_AT_BYTES = 4096  # of each file, for a zero byte, which text does not have
_NO_PLAIN_TEXT = set(
    [
        ".arrow",
        ".bin",
        ".bz2",
        ".gz",
        ".jsonl",
        ".npy",
        ".npz",
        ".parquet",
        ".pt",
        ".safetensors",
        ".tar",
        ".xz",
        ".zip",
        ".zst",
    ]
)

# Sources of at least 12 kB that every Python from 3.10 to 3.13 has; 6.0 to 6.4 MB together (6.2 MB in 3.11).
STDLIB_FILES = """
_collections_abc.py _markupbase.py _pydecimal.py _pyio.py _strptime.py argparse.py ast.py asyncio/base_events.py
asyncio/events.py asyncio/futures.py asyncio/locks.py asyncio/proactor_events.py asyncio/selector_events.py
asyncio/sslproto.py asyncio/streams.py asyncio/tasks.py asyncio/unix_events.py asyncio/windows_events.py base64.py
bdb.py calendar.py cmd.py codecs.py collections/__init__.py compileall.py concurrent/futures/_base.py
concurrent/futures/process.py configparser.py contextlib.py csv.py ctypes/__init__.py ctypes/_aix.py
ctypes/util.py dataclasses.py difflib.py dis.py doctest.py email/_header_value_parser.py email/_parseaddr.py
email/_policybase.py email/charset.py email/feedparser.py email/generator.py email/header.py
email/headerregistry.py email/message.py email/utils.py enum.py fileinput.py fractions.py ftplib.py functools.py
gettext.py gzip.py heapq.py html/entities.py html/parser.py http/client.py http/cookiejar.py http/cookies.py
http/server.py imaplib.py importlib/_bootstrap.py importlib/_bootstrap_external.py importlib/metadata/__init__.py
inspect.py ipaddress.py json/__init__.py json/decoder.py json/encoder.py locale.py logging/__init__.py
logging/config.py logging/handlers.py lzma.py mailbox.py mimetypes.py modulefinder.py
multiprocessing/connection.py multiprocessing/forkserver.py multiprocessing/managers.py multiprocessing/pool.py
multiprocessing/process.py multiprocessing/queues.py multiprocessing/shared_memory.py multiprocessing/util.py
ntpath.py optparse.py os.py pdb.py pickle.py pickletools.py pkgutil.py platform.py plistlib.py poplib.py
posixpath.py pprint.py profile.py pstats.py pydoc.py random.py runpy.py selectors.py shlex.py shutil.py site.py
smtplib.py socket.py socketserver.py ssl.py statistics.py stringprep.py subprocess.py tarfile.py tempfile.py
textwrap.py threading.py timeit.py tokenize.py trace.py traceback.py tracemalloc.py turtle.py typing.py
unittest/case.py unittest/loader.py unittest/mock.py unittest/suite.py urllib/parse.py urllib/request.py uuid.py
venv/__init__.py warnings.py wave.py weakref.py webbrowser.py wsgiref/handlers.py wsgiref/validate.py
xml/dom/expatbuilder.py xml/dom/minidom.py xml/dom/xmlbuilder.py xml/etree/ElementPath.py xml/etree/ElementTree.py
xml/sax/expatreader.py xml/sax/handler.py xml/sax/saxutils.py xml/sax/xmlreader.py xmlrpc/client.py
xmlrpc/server.py zipimport.py zoneinfo/_zoneinfo.py
"""


@dataclass(frozen=True)
class Corpus:
    """The three parts of a text, and what a model must know about it.

    tokenizer: the file of the `tokenizers` library; None: a token is a byte.
    """

    train: ShuffledWindows
    valid: Windows
    test: Windows
    vocab_size: int
    separator: int
    tokenizer: Path | None

    def summary(self) -> str:
        """Return the sizes in one line."""
        parts = {"train": self.train.windows, "valid": self.valid, "test": self.test}
        sizes = ", ".join(f"{name} {part.text_bytes:,} bytes in {part.tokens:,} tokens" for name, part in parts.items())
        return f"{sizes}; vocabulary {self.vocab_size:,}"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text."""
        if self.tokenizer is None:
            return list(text.encode())
        tokenizer = load_tokenizer(self.tokenizer)
        tokenizer.encode_special_tokens = True  # as in prepare.py
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become question marks."""
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return load_tokenizer(self.tokenizer).decode(list(tokens))


def load_tokenizer(file: Path) -> Any:
    """Return the tokenizer that prepare.py wrote."""
    with needs_extra("language"):
        from tokenizers import Tokenizer
    return Tokenizer.from_file(str(file))


def load_corpus(
    data_path: str | Path | None,
    window_tokens: int,
    epoch_windows: int,
    shuffle_seed: int,
    split_ratios: Sequence[float] = (0.92, 0.04, 0.04),
    file_pattern: str = "*",
    max_valid_windows: int | None = None,
) -> Corpus:
    """Return the standard library's source (data_path None), or the text or token shards at data_path.

    data_path: a text file, cut into train, valid and test at ends of lines; a folder of text files, split by file; or
        a folder of token shards that prepare.py made, split there.
    window_tokens: tokens that the model sees at once. epoch_windows, shuffle_seed: as ShuffledWindows takes them.
    split_ratios: shares of train, valid and test, by bytes of a file and by number of files in a folder.
    file_pattern: which files of a folder are text, as `*.txt`. max_valid_windows: bound on those of valid.
    Raises DataError for what does not fit this description.
    """
    check_settings(window_tokens, epoch_windows, split_ratios, max_valid_windows)
    index, tokenizer = None, None
    if data_path is None or data_path == "":
        parts = split_files(find_stdlib(), split_ratios)
    else:
        path = Path(data_path)
        if (path / INDEX_FILE).is_file():
            index = Index.read(path)
            parts = shard_streams(path, index)
        elif path.is_dir():
            parts = split_files(find_texts(path, file_pattern), split_ratios)
        elif path.is_file():
            parts = cut_file(path, split_ratios)
        else:
            raise DataError(f"data_path '{path}' is not there; expected a text file, a folder of them, or token shards")
    separator, vocab_size = BYTE_SEPARATOR, BYTE_VALUES
    if index is not None:
        separator, vocab_size = index.separator, index.vocab_size
        tokenizer = path / TOKENIZER_FILE if index.tokenizer else None
    windows = []
    for name, streams in zip(SPLIT_NAMES, parts, strict=True):
        size = index.splits[name].bytes if index else sum(stream.last - stream.first for stream in streams)
        at_most = max_valid_windows if name == "valid" else None
        windows.append(Windows(streams, window_tokens, separator, size, at_most))
    train, valid, test = windows
    return Corpus(ShuffledWindows(train, epoch_windows, shuffle_seed), valid, test, vocab_size, separator, tokenizer)


def count_batches(windows_per_update: int, batch_size: int) -> int:
    """Return the batches of an update that each process takes.

    windows_per_update: of all processes that torchrun starts; DataError where their batches do not make it up.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for name, value in {"windows_per_update": windows_per_update, "batch_size": batch_size}.items():
        if value < 1:
            raise DataError(f"{name} is {value}; expected a whole number of at least 1")
    at_once = batch_size * processes
    if windows_per_update % at_once:
        of_all = f" in each of {processes} processes" if processes > 1 else ""
        raise DataError(
            f"batch_size is {batch_size}{of_all} and windows_per_update is {windows_per_update}; expected the second "
            f"to be a multiple of {at_once}, such as --windows_per_update={-(-windows_per_update // at_once) * at_once}"
        )
    return windows_per_update // at_once


def check_settings(
    window_tokens: int, epoch_windows: int, split_ratios: Sequence[float], max_valid_windows: int | None
) -> None:
    """Raise DataError for a setting that no text could satisfy."""
    numbers = {"window_tokens": window_tokens, "epoch_windows": epoch_windows}
    if max_valid_windows is not None:
        numbers["max_valid_windows"] = max_valid_windows
    for name, value in numbers.items():
        if value < 1:
            raise DataError(f"{name} is {value}; expected a whole number of at least 1")
    if len(split_ratios) != 3 or min(split_ratios) <= 0 or abs(sum(split_ratios) - 1) > 1e-6:
        raise DataError(f"split_ratios is {list(split_ratios)}; expected shares of train, valid and test with sum 1")


def find_stdlib() -> dict[str, Path]:
    """Return those of STDLIB_FILES that this Python has, by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = STDLIB_FILES.split()
    found = {name: folder / name for name in names if (folder / name).is_file()}
    if len(found) < len(names) / 2:
        raise DataError(
            f"'{folder}' holds {len(found)} of {len(names)} sources of the standard library of Python "
            f"{sys.version.split()[0]}, which is perhaps installed without them; give a text of your own as data_path"
        )
    return found


def find_texts(folder: Path, file_pattern: str) -> dict[str, Path]:
    """Return the text files below folder by their names there, without hidden and empty ones.

    Raises DataError for fewer than three, and for one that is no text.
    """
    found = {}
    for path in folder.rglob(file_pattern):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.stat().st_size == 0 or any(part.startswith(".") for part in Path(name).parts):
            continue
        check_text(path, "choose the text among the files with file_pattern")
        found[name] = path
    if len(found) < len(SPLIT_NAMES):
        raise DataError(
            f"'{folder}' holds {len(found)} text file(s) named {file_pattern}; a split by file needs at least three. "
            "Give a single file, which is cut into parts, or let prepare.py make token shards"
        )
    return found


def check_text(path: Path, remedy: str = "give plain text") -> None:
    """Raise DataError for a file that is not plain text: packed, records, an array, UTF-16; its bytes mean nothing."""
    if path.suffix.lower() in _NO_PLAIN_TEXT:
        found = f"{path.suffix} is no plain text"
    else:
        with open(path, "rb") as file:
            if b"\0" not in file.read(_LOOKED_AT_BYTES):
                return
        found = "no text in UTF-8 or ASCII (it has a zero byte)"
    raise DataError(f"{path}: {found}; {remedy}, or let prepare.py make token shards of .jsonl, .parquet or .gz")


def split_files(files: dict[str, Path], split_ratios: Sequence[float]) -> list[list[Stream]]:
    """Return the streams of train, valid and test, one per file, each part sorted by name.

    In the order of a hash of their names the first files are tested on and the next validated on, at least one each:
    the same on every machine, and a further file moves hardly any other.
    """
    order = sorted(files, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    num_valid, num_test = (max(1, round(len(order) * ratio)) for ratio in split_ratios[1:])
    num_test = min(num_test, len(order) - 2)
    num_valid = min(num_valid, len(order) - num_test - 1)
    parts = order[num_test + num_valid :], order[num_test : num_test + num_valid], order[:num_test]
    return [[Stream(files[name], 0, files[name].stat().st_size, ended=True) for name in sorted(part)] for part in parts]


def cut_file(path: Path, split_ratios: Sequence[float]) -> list[list[Stream]]:
    """Return one stream for each of train, valid and test: the file's beginning, middle and end.

    Where lines are so long that cuts at their ends would leave a part less than half its share, it is cut inside them.
    Raises DataError for what is not text, and for a part that would have no byte.
    """
    check_text(path)
    size = path.stat().st_size
    if size < 100:
        raise DataError(f"{path}: {size} bytes; expected a text of at least 100")
    places = [int(size * split_ratios[0]), int(size * (split_ratios[0] + split_ratios[1]))]
    cuts = [0, *(end_of_line(path, place) for place in places), size]
    if any(cuts[at + 1] - cuts[at] < size * ratio / 2 for at, ratio in enumerate(split_ratios)):
        cuts = [0, *places, size]
    if not 0 < cuts[1] < cuts[2] < size:
        raise DataError(f"{path}: {size} bytes are too few for split_ratios {list(split_ratios)}; raise the smallest")
    return [[Stream(path, cuts[at], cuts[at + 1], ended=True)] for at in range(3)]


def end_of_line(path: Path, place: int) -> int:
    """Return the first place after a line feed from `place` on, or `place` itself if none is near."""
    near = bytes(open_tokens(path)[place : place + _CUT_SEARCH_BYTES])
    return place + near.find(b"\n") + 1


def shard_streams(folder: Path, index: Index) -> list[list[Stream]]:
    """Return the streams of train, valid and test, one per shard.

    Raises DataError for a missing split or shard, or one whose length is not the index's.
    """
    parts = []
    for name in SPLIT_NAMES:
        if name not in index.splits or not index.splits[name].shards:
            raise DataError(f"{folder / INDEX_FILE}: there is no {name} split; let prepare.py make the folder")
        streams = []
        for file, tokens in index.splits[name].shards:
            found = open_tokens(folder / file)
            if found.shape != (tokens,) or found.dtype.kind != "u":
                raise DataError(f"{folder / file}: {found.dtype} {found.shape}, but {INDEX_FILE} says {tokens} tokens")
            streams.append(Stream(folder / file, 0, tokens))
        parts.append(streams)
    return parts
