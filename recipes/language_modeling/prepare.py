"""Make token shards of text: python recipes/language_modeling/prepare.py SHARDS TEXT... [--tokenizer bpe]

TEXT: .jsonl (or .jsonl.gz) and .parquet files, whose --field holds a document per record; any other file is plain text
(.gz: packed); a folder stands for all files below it. Everything is read and written as a stream: memory does not grow
with the text. shards.py tells what is written. Start train.py with --data_path=SHARDS.
"""

import argparse
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from shards import INDEX_FILE, SPLIT_NAMES, TOKENIZER_FILE, Index, ShardWriter, write_whole

from amp_recipes import needs_extra
from amp_recipes.errors import DataError

with needs_extra("language"):
    import pyarrow
    import pyarrow.parquet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
_PARQUET_ROWS = 256  # rows of a row group that are read at once
_ENCODED_CHARACTERS = 2**20  # that are tokenized at once, on all cores
_SHARD_NAME = re.compile(rf"\.?({'|'.join(SPLIT_NAMES)})-\d{{5,}}\.npy(\.tmp)?")

Encode = Callable[[list[str]], list[np.ndarray]]


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Return the files of inputs, and those below folders among them (without hidden ones), sorted in each folder."""
    files = []
    for path in inputs:
        if path.is_dir():
            below = sorted(it for it in path.rglob("*") if it.is_file())
            files += [it for it in below if not any(part.startswith(".") for part in it.relative_to(path).parts)]
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"'{path}' is not there; expected text, .jsonl or .parquet files, or folders of them")
    if not files:
        raise DataError(f"no file in {', '.join(map(str, inputs))}")
    return files


def read_documents(files: Iterable[Path], field: str, piece_characters: int) -> Iterator[str]:
    """Yield the documents of all files, in order, those without text left out.

    field: the key of a record, or the column, that is the text. piece_characters: plain text is cut into documents at
    the first end of a line after so many. Raises DataError that names file and line for what cannot be read.
    """
    for path in files:
        suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"][-1:]
        try:
            if suffixes == [".parquet"]:
                documents = read_parquet(path, field)
            elif suffixes == [".jsonl"]:
                documents = read_jsonl(path, field)
            else:
                documents = read_text(path, piece_characters)
            yield from (document for document in documents if document)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: no text in UTF-8 ({error}); convert it, or leave it out") from error
        except (OSError, EOFError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: not readable ({error})") from error


def open_text(path: Path):
    """Open a text file in UTF-8, unpacked if it ends in .gz; ends of lines stay as they are."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return open(path, encoding="utf-8", newline="")


def read_text(path: Path, piece_characters: int) -> Iterator[str]:
    """Yield pieces of a text file of about piece_characters, in whole lines."""
    with open_text(path) as file:
        while lines := file.readlines(piece_characters):
            yield "".join(lines)


def read_jsonl(path: Path, field: str) -> Iterator[str]:
    """Yield record[field] of each line."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: no JSON ({error})") from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str | None) or field not in record:
                keys = f"its keys are {', '.join(record)}" if isinstance(record, dict) else "it is no record"
                raise DataError(f"{path}:{number}: there is no text in field {field!r}; {keys}. Give another --field")
            yield record[field] or ""


def read_parquet(path: Path, field: str) -> Iterator[str]:
    """Yield the values of column `field`, a few rows in memory at a time."""
    with pyarrow.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        column = schema.field(field).type if field in schema.names else None
        if column is None or not (pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)):
            listed = ", ".join(f"{it.name} ({it.type})" for it in schema)
            raise DataError(f"{path}: there is no column {field!r} of strings; it has {listed}. Give another --field")
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
            for value in batch.column(0):
                yield value.as_py() or ""


def train_bpe(documents: Iterable[str], vocab_size: int, most_bytes: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer, which can encode any text, trained on the first most_bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(up_to(documents, most_bytes), trainer)
    return tokenizer


def up_to(documents: Iterable[str], most_bytes: int) -> Iterator[str]:
    """Yield documents until together they have most_bytes."""
    taken = 0
    for document in documents:
        if taken >= most_bytes:
            return
        taken += len(document.encode())
        yield document


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, without truncation and padding."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise DataError(f"{path}: no tokenizer.json of the tokenizers library ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def separator_of(tokenizer: Tokenizer, name: str) -> int:
    """Return the number of the token that separates documents."""
    number = tokenizer.token_to_id(name)
    if number is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        raise DataError(f"the tokenizer has no token {name!r}; give one as --separator: {', '.join(special[:20])}")
    return number


def encoder(tokenizer: Tokenizer | None) -> Encode:
    """Return the function that makes tokens of documents; without a tokenizer these are the bytes of UTF-8."""
    if tokenizer is None:
        return lambda documents: [np.frombuffer(document.encode(), dtype=np.uint8) for document in documents]
    tokenizer.encode_special_tokens = True  # the name of the separator inside a text is plain text
    return lambda documents: [
        np.array(encoded.ids, dtype=np.int64)
        for encoded in tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    ]


def in_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents with at least a certain number of characters."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _ENCODED_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def split_of(number: int, split_ratios: Sequence[float]) -> str:
    """Return the split of a document: a function of its number alone, by a hash, in these shares."""
    draw = int.from_bytes(blake2b(str(number).encode(), digest_size=8).digest(), "big") / 2**64
    if draw < split_ratios[0]:
        return "train"
    return "valid" if draw < split_ratios[0] + split_ratios[1] else "test"


def clear(folder: Path, overwrite: bool) -> None:
    """Make the folder, without what an earlier run left there; refuse one that holds anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX_FILE).exists() and not overwrite:
        raise DataError(f"'{folder}' holds finished token shards; give another folder, or --overwrite")
    own = {INDEX_FILE, TOKENIZER_FILE}
    others = [path.name for path in folder.iterdir() if path.name not in own and not _SHARD_NAME.fullmatch(path.name)]
    if others:
        raise DataError(f"'{folder}' is to hold token shards only, but there is {others[0]!r}; give a new folder")
    # Remove the index first: without it, no reader takes the rest for complete.
    for path in sorted(folder.iterdir(), key=lambda path: path.name != INDEX_FILE):
        path.unlink()


def write_shards(
    folder: Path,
    documents: Iterable[str],
    tokenizer: Tokenizer | None,
    separator: int,
    split_ratios: Sequence[float],
    shard_tokens: int,
) -> Index:
    """Write the documents' tokens, each with the separator behind it, and then the index; returns that."""
    vocab_size = 256 if tokenizer is None else 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    encode = encoder(tokenizer)
    writers = {name: ShardWriter(folder, name, dtype, shard_tokens) for name in SPLIT_NAMES}
    number = 0
    for batch in in_batches(documents):
        for document, tokens in zip(batch, encode(batch), strict=True):
            writers[split_of(number, split_ratios)].add(np.append(tokens, separator), len(document.encode()))
            number += 1
    for name, writer in writers.items():
        writer.flush()
        if not writer.part.documents:
            raise DataError(
                f"none of the {number} documents fell into {name}; give more text, a larger share in --split, or, for "
                "plain text, a smaller --piece_characters"
            )
    if tokenizer is not None:
        write_whole(folder / TOKENIZER_FILE, lambda file: file.write(tokenizer.to_str(pretty=True).encode()))
    splits = {name: writer.part for name, writer in writers.items()}
    index = Index(vocab_size, separator, TOKENIZER_FILE if tokenizer is not None else None, splits)
    index.write(folder)
    return index


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, help="folder to write to")
    parser.add_argument("text", type=Path, nargs="+", help="files and folders to read")
    parser.add_argument("--field", default="text", help="key or column of the text in .jsonl and .parquet (text)")
    parser.add_argument("--tokenizer", default="bpe", help="bpe: train one; bytes: none; or a tokenizer.json (bpe)")
    parser.add_argument("--vocab_size", type=int, default=16384, help="tokens of a trained tokenizer (16384)")
    parser.add_argument("--train_bytes", type=int, default=10**8, help="of the text, to train a tokenizer on (10^8)")
    parser.add_argument("--separator", default=END_OF_DOCUMENT, help=f"token between documents ({END_OF_DOCUMENT})")
    parser.add_argument("--split", type=float, nargs=3, default=(0.98, 0.01, 0.01), help="train, valid, test shares")
    parser.add_argument("--shard_tokens", type=int, default=2 * 10**7, help="tokens of a shard (2 * 10^7)")
    parser.add_argument("--piece_characters", type=int, default=65536, help="of a document of plain text (65536)")
    parser.add_argument("--overwrite", action="store_true", help="replace finished shards")
    settings = parser.parse_args(argv)
    if min(settings.split) <= 0 or abs(sum(settings.split) - 1) > 1e-6:
        parser.error(f"--split is {settings.split}; expected three shares above 0 with sum 1")
    for name in ("vocab_size", "train_bytes", "shard_tokens", "piece_characters"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name} is {getattr(settings, name)}; expected at least 1")
    return settings


def main(argv: list[str] | None = None) -> Index:
    """Make the shards that the command line asks for, and say what they hold."""
    settings = parse(argv)
    files = find_files(settings.text)
    given = None if settings.tokenizer in ("bpe", "bytes") else read_tokenizer(Path(settings.tokenizer))
    clear(settings.shards, settings.overwrite)

    def documents() -> Iterator[str]:
        return read_documents(files, settings.field, settings.piece_characters)

    tokenizer = (
        train_bpe(documents(), settings.vocab_size, settings.train_bytes) if settings.tokenizer == "bpe" else given
    )
    separator = 0 if tokenizer is None else separator_of(tokenizer, settings.separator)
    index = write_shards(settings.shards, documents(), tokenizer, separator, settings.split, settings.shard_tokens)
    for name, part in index.splits.items():
        tokens = sum(count for _, count in part.shards)
        shards = f"{len(part.shards)} shard(s)"
        print(f"{name}: {part.documents:,} documents, {part.bytes:,} bytes, {tokens:,} tokens, {shards}")
    return index


if __name__ == "__main__":
    main()
