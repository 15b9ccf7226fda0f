"""Loads texts and labels: from a CSV, TSV or JSON-lines file, or from Python's standard library.

A sample is {"input_ids": int64 (T,), "labels": int64 ()}; a batch also has
"attention_mask", and texts padded at the end.
Legend of shapes: B batch, T tokens, K classes.
"""

import csv
import difflib
import json
import logging
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import make_functions
from torch.utils.data import Dataset

from amp_recipes import needs_extra
from amp_recipes.errors import DataError

with needs_extra("finetuning"):
    from sklearn.utils.class_weight import compute_class_weight

logger = logging.getLogger(__name__)

SPLIT_NAMES = ("train", "valid", "test")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Example:
    """One labelled text, and its place ("reviews.csv:12"); group: texts of one group stay in one split."""

    text: str
    label: str
    group: str
    place: str


@dataclass(frozen=True)
class Tables:
    """The rows of the three datasets, read and checked, and the classes in order."""

    train: Sequence[Example]
    valid: Sequence[Example]
    test: Sequence[Example]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class TextSets:
    """The three datasets as tokens, and what the loss and the loaders must know about them."""

    train: "Texts"
    valid: "Texts"
    test: "Texts"
    class_weights: torch.Tensor | None
    padding: "Padding"


class Texts(Dataset):
    """Texts as token numbers, in order of length, so that those of a batch need little padding.

    All are in memory in one tensor, four bytes a token. lengths: int64 (N,), tokens of each text.
    Raises DataError, which tells the place, for a text without a token.
    """

    def __init__(self, examples: Sequence[Example], classes: Sequence[str], tokenizer: Any, max_tokens: int):
        numbers = {label: number for number, label in enumerate(classes)}
        tokenized = tokenize([example.text for example in examples], tokenizer, max_tokens)
        rows = sorted(zip(tokenized, examples, strict=True), key=lambda row: len(row[0]))
        pieces, examples = zip(*rows, strict=True)
        if not pieces[0]:
            text = examples[0].text
            raise DataError(f"{examples[0].place}: the tokenizer finds no token in the text {text[:40]!r}")
        self.labels = torch.tensor([numbers[example.label] for example in examples])
        self.lengths = torch.tensor([len(piece) for piece in pieces])
        self.starts = [0, *self.lengths.cumsum(0).tolist()]
        self.tokens = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_T = self.tokens[self.starts[index] : self.starts[index + 1]]
        return {"input_ids": tokens_T.long(), "labels": self.labels[index]}


class Padding:
    """Makes a batch of samples: texts end with pad_id up to the longest, where the attention mask is 0."""

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return input_ids and attention_mask, int64 (B, T), and labels, int64 (B,)."""
        texts = [sample["input_ids"] for sample in samples]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(texts, batch_first=True, padding_value=self.pad_id),
            # From the lengths: without a pad token, texts are padded with a token that they may also contain.
            "attention_mask": pad([torch.ones_like(text) for text in texts], batch_first=True),
            "labels": torch.stack([sample["labels"] for sample in samples]),
        }


def read_tables(
    data_file: str | Path | None,
    cache_folder: str | Path,
    valid_file: str | Path | None = None,
    test_file: str | Path | None = None,
    text_column: str = "text",
    label_column: str = "label",
    group_column: str | None = None,
    split_ratios: Sequence[float] = (0.7, 0.15, 0.15),
    data_seed: int = 0,
) -> Tables:
    """Return train, valid and test rows of a table of labelled texts.

    data_file: .csv, .tsv (with a header line, UTF-8) or .jsonl; None: the standard library's functions, split by file,
    made in cache_folder. valid_file, test_file: where they are given, they are
    those sets, and the rest of data_file is split by split_ratios among the others.
    group_column: rows with the same value stay together in one set (an author, a document); None: rows with the same
    text do.
    data_seed: decides which row goes where.
    Raises DataError for files, rows and settings that do not fit this description; warns of texts in two sets.
    """
    if not data_file:
        data_file, text_column, label_column, group_column = make_functions(cache_folder), "text", "label", "file"
    files = {"train": data_file, "valid": valid_file, "test": test_file}
    columns = (text_column, label_column, group_column)
    given = {name: read_examples(Path(file), *columns) for name, file in files.items() if file}
    check_ratios(split_ratios)
    classes = sort_labels({example.label for example in given["train"]})
    check_labels(given, classes, label_column)
    open_splits = [name for name in SPLIT_NAMES if name == "train" or name not in given]
    if len(open_splits) > 1:
        ratios = [split_ratios[SPLIT_NAMES.index(name)] for name in open_splits]
        parts = split_examples(given["train"], ratios, data_seed)
        split = dict(zip(open_splits, parts, strict=True))
        check_split(split, classes, data_file, group_column)
        given.update(split)
    warn_of_shared_texts(given)
    return Tables(given["train"], given["valid"], given["test"], classes)


def load_texts(tables: Tables, tokenizer: Any, max_tokens: int = 128, balanced: bool = False) -> TextSets:
    """Return the rows of the tables as tokens.

    max_tokens: longer texts lose their end.
    balanced: class_weights are N / (K * N of the class), so that every class counts the same; else None.
    Raises DataError for a number of tokens that the tokenizer does not take, and for a text without a token.
    """
    check_max_tokens(max_tokens, tokenizer)
    rows = (tables.train, tables.valid, tables.test)
    sets = [Texts(examples, tables.classes, tokenizer, max_tokens) for examples in rows]
    labels, classes = sets[0].labels.numpy(), np.arange(len(tables.classes))
    weights = torch.tensor(compute_class_weight("balanced", classes=classes, y=labels)).float() if balanced else None
    return TextSets(*sets, weights, Padding(tokenizer.pad_token_id))


def tokenize(texts: Sequence[str], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    """Return the token numbers of each text, with the tokenizer's special tokens, at most max_tokens."""
    pieces = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    cut = sum(len(piece) == max_tokens for piece in pieces)
    if cut:
        logger.info("%d of %d texts have max_tokens=%d tokens or more: their ends are cut", cut, len(texts), max_tokens)
    return pieces


# ---------------------------------------------------------------- reading


def read_examples(path: Path, text_column: str, label_column: str, group_column: str | None) -> list[Example]:
    """Return the rows of a table; raises DataError that tells file and line of the first that cannot be used."""
    if not path.is_file():
        raise DataError(f"'{path}' is not a file; expected a .csv, .tsv or .jsonl file.{nearest_file(path)}")
    if path.suffix.lower() in JSON_SUFFIXES:
        rows = read_json_lines(path)
    elif path.suffix.lower() in DELIMITERS:
        rows = read_delimited(path, DELIMITERS[path.suffix.lower()])
    else:
        raise DataError(f"'{path}' ends in '{path.suffix}'; expected .csv, .tsv or .jsonl")
    examples = []
    try:
        for place, row in rows:
            text = cell(row, text_column, "text_column", place)
            label = cell(row, label_column, "label_column", place)
            group = cell(row, group_column, "group_column", place) if group_column else text.strip()
            examples.append(Example(text, label, group, place))
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 ({error}); convert it: iconv -f latin1 -t utf-8") from error
    if not examples:
        raise DataError(f"'{path}' holds no row below its header")
    return examples


def read_delimited(path: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a CSV or TSV file; a field in quotes may hold delimiters and line breaks."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the module's own is 128 KiB
    # utf-8-sig: spreadsheets write a byte order mark, which would become part of the first column's name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    count = len(row) + len(row.get(None, [])) - (None in row) - list(row.values()).count(None)
                    raise DataError(
                        f"{place}: the row has {count} fields, the header {len(reader.fieldnames)}; put fields that "
                        f"hold '{delimiter}' or line breaks in double quotes".replace("\t", "tab")
                    )
                yield place, row
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: {error}; double a quote inside quotes") from error


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a file with one JSON object per line."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: a {type(row).__name__}; expected one JSON object per line")
            yield f"{path}:{number}", row


def cell(row: Mapping[str, Any], column: str, setting: str, place: str) -> str:
    """Return the column's value as text; raises DataError if it is missing or empty."""
    if column not in row:
        near = difflib.get_close_matches(column, row, n=1, cutoff=0.5)
        hint = f" Did you mean --{setting}={near[0]}?" if near else ""
        raise DataError(f"{place}: there is no column '{column}' ({setting}); found {', '.join(map(repr, row))}.{hint}")
    value = row[column]
    if isinstance(value, (dict, list, float)):
        raise DataError(f"{place}: '{column}' is {value!r}; expected text" + (", or a whole number or true or false"))
    text = "" if value is None else str(value)
    if not text.strip():
        raise DataError(f"{place}: '{column}' is empty; leave the row out")
    return text if setting == "text_column" else text.strip()


def nearest_file(path: Path) -> str:
    """Return a hint to the file with the nearest name in the same folder, or nothing."""
    names = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean '{path.parent / near[0]}'?" if near else ""


# ---------------------------------------------------------------- splitting and checking


def check_ratios(split_ratios: Sequence[float]) -> None:
    """Raise DataError unless the ratios are shares with sum 1."""
    positive = len(split_ratios) == len(SPLIT_NAMES) and all(ratio > 0 for ratio in split_ratios)
    if not positive or not math.isclose(sum(split_ratios), 1.0, abs_tol=1e-6):
        raise DataError(f"split_ratios is {list(split_ratios)}; expected shares of train, valid and test with sum 1")


def check_max_tokens(max_tokens: int, tokenizer: Any) -> None:
    """Raise DataError for a number of tokens that leaves none for the text, or that the tokenizer does not take."""
    if not tokenizer.num_special_tokens_to_add() < max_tokens <= tokenizer.model_max_length:
        raise DataError(
            f"max_tokens is {max_tokens}; the tokenizer takes up to {tokenizer.model_max_length}, "
            f"{tokenizer.num_special_tokens_to_add()} of them special ones"
        )


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the labels in order: as numbers where all are whole numbers, else as text."""
    try:
        return tuple(sorted(labels, key=int))
    except ValueError:
        return tuple(sorted(labels))


def check_labels(given: Mapping[str, Sequence[Example]], classes: Sequence[str], label_column: str) -> None:
    """Raise DataError for fewer than two classes, and for labels that training does not know."""
    if len(classes) < 2:
        raise DataError(f"every '{label_column}' of the training data is '{classes[0]}'; expected two classes or more")
    for examples in given.values():
        for example in examples:
            if example.label not in classes:
                near = difflib.get_close_matches(example.label, classes, n=1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise DataError(f"{example.place}: no training text has the label '{example.label}'.{hint}")
    if len(classes) > max(20, len(given["train"]) // 3):
        raise DataError(
            f"'{label_column}' has {len(classes)} values in {len(given['train'])} rows, first {classes[:3]}; is it the "
            "column of the classes?"
        )


def split_examples(examples: Sequence[Example], ratios: Sequence[float], data_seed: int) -> list[list[Example]]:
    """Return the examples in parts whose sizes, in all and in each class, are near the ratios; groups stay whole.

    Every group, the largest first, goes where most is missing of the classes that it has.
    """
    counts = Counter(example.label for example in examples)
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        groups[example.group].append(example)
    order = list(groups.values())
    random.Random(data_seed).shuffle(order)
    order.sort(key=len, reverse=True)
    shares = [ratio / sum(ratios) for ratio in ratios]
    missing = [{label: share * count for label, count in counts.items()} for share in shares]
    parts: list[list[Example]] = [[] for _ in ratios]
    for group in order:
        inside = Counter(example.label for example in group)
        # Relative to the share, so that small parts get their examples, too.
        needs = [
            sum(count * missing[at][label] / (shares[at] * counts[label]) for label, count in inside.items())
            for at in range(len(parts))
        ]
        best = max(range(len(parts)), key=needs.__getitem__)
        parts[best].extend(group)
        for label, count in inside.items():
            missing[best][label] -= count
    return parts


def check_split(
    split: Mapping[str, Sequence[Example]], classes: Sequence[str], data_file: str | Path, group_column: str | None
) -> None:
    """Raise DataError if a part of the split lacks a class."""
    for name, examples in split.items():
        lacking = set(classes) - {example.label for example in examples}
        if lacking:
            kind = f"groups ({group_column})" if group_column else "different texts"
            raise DataError(
                f"'{data_file}': the split leaves no text of {', '.join(sorted(lacking)[:5])} for {name}; a class "
                f"needs three {kind} or more. Add some, leave the class out, or give valid_file and test_file"
            )


def warn_of_shared_texts(sets: Mapping[str, Sequence[Example]]) -> None:
    """Warn of texts that are in two sets: a test on texts of the training gives too good a result."""
    texts = {name: {example.text.strip() for example in examples} for name, examples in sets.items()}
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        shared = [example.place for example in sets[second] if example.text.strip() in texts[first]]
        if shared:
            logger.warning(
                "%d of the %d texts of %s stand in %s too, first %s: its results will look better than they are",
                *(len(shared), len(sets[second]), second, first, shared[0]),
            )
