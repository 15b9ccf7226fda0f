"""Data sets become iterables of batches, batches become windows."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from amp_recipes.data.batches import as_batches, length, windows
from amp_recipes.errors import DataError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def forbidden(*args, **kwargs):
    raise AssertionError("no loader is to be made of batches")


def test_a_dataset_of_samples_goes_to_a_loader_with_the_kwargs():
    samples = TensorDataset(torch.arange(5))
    loader = as_batches(samples, "Training set", {"batch_size": 2}, DataLoader)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_a_streaming_dataset_holds_samples_too():
    assert [len(batch) for batch in as_batches(Stream(), "Training set", {"batch_size": 3}, DataLoader)] == [3, 2]


@pytest.mark.parametrize(
    "batches", [[1, 2], (), iter([1]), DataLoader([1, 2])], ids=["list", "empty", "iterator", "loader"]
)
def test_an_iterable_of_batches_is_passed_on_as_it_is(batches):
    assert as_batches(batches, "Training set", {}, forbidden) is batches


def test_loader_kwargs_for_batches_are_refused_by_name():
    with pytest.raises(DataError, match=r"^Validation set is a list.*batch_size, shuffle.*Give a torch Dataset"):
        as_batches([1, 2], "Validation set", {"batch_size": 2, "shuffle": True}, forbidden)


@pytest.mark.parametrize("data", [None, 3, torch.nn.Linear(1, 1), object()])
def test_what_holds_neither_samples_nor_batches_is_refused(data):
    with pytest.raises(DataError, match=f"^Test set is a {type(data).__name__}; expected a torch Dataset or an iter"):
        as_batches(data, "Test set", {}, forbidden)


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_windows_hold_every_batch_once_and_in_order(count, size):
    expected = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    assert list(windows(iter(range(count)), size)) == expected


def test_a_window_takes_no_batch_of_the_next():
    batches = itertools.count()
    made = windows(batches, 3)
    assert next(made) == [0, 1, 2]
    assert next(batches) == 3  # still there for the loop that stops here


class Sized(Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 7


@pytest.mark.parametrize(
    ("batches", "count"),
    [
        ([1, 2, 3], 3),
        (DataLoader(Sized(), batch_size=2), 4),
        (DataLoader(Stream(), batch_size=2), None),
        (iter([1, 2]), None),
    ],
    ids=["list", "loader", "stream", "iterator"],
)
def test_length_counts_batches_where_that_is_possible(batches, count):
    assert length(batches) == count
