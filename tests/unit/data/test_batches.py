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


def test_an_iterable_of_batches_is_passed_on_as_it_is():
    for batches in ([1, 2], (), iter([1]), DataLoader([1, 2])):
        assert as_batches(batches, "Training set", {}, forbidden) is batches


def test_loader_kwargs_for_batches_are_refused_by_name():
    for batches in (iter([1, 2]), DataLoader([1, 2])):
        kind = type(batches).__name__
        with pytest.raises(DataError, match=rf"^Validation set is a {kind}.*batch_size, shuffle.*Give a torch Dataset"):
            as_batches(batches, "Validation set", {"batch_size": 2, "shuffle": True}, forbidden)


def test_a_list_holds_samples_if_loader_kwargs_are_given():
    for samples in ([1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3]).numpy()):
        loader = as_batches(samples, "Training set", {"batch_size": 2}, DataLoader)
        assert [batch.tolist() for batch in loader] == [[1, 2], [3]]


def test_what_holds_neither_samples_nor_batches_is_refused():
    for data in (None, 3, torch.nn.Linear(1, 1), object()):
        expected = f"^Test set is a {type(data).__name__}; expected a torch Dataset or an iter"
        with pytest.raises(DataError, match=expected):
            as_batches(data, "Test set", {}, forbidden)


def test_windows_hold_every_batch_once_and_in_order():
    for count, size in itertools.product(range(8), [1, 2, 3, 7]):
        expected = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        assert list(windows(iter(range(count)), size)) == expected, (count, size)


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


def test_length_counts_batches_where_that_is_possible():
    assert length([1, 2, 3]) == 3
    assert length(DataLoader(Sized(), batch_size=2)) == 4
    assert length(DataLoader(Stream(), batch_size=2)) is None
    assert length(iter([1, 2])) is None
