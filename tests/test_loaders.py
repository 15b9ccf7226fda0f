"""Loaders repeat by (seed, epoch), leave the global generators alone, and refuse what cannot train."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from amp_recipes.data import EpochShuffle, make_loader, set_epoch
from amp_recipes.errors import ConfigError, DataError


def dataset(n=12):
    return TensorDataset(torch.arange(n))


def make(data=None, *, shuffle=True, seed=3, device="cpu", **kwargs):
    return make_loader(dataset() if data is None else data, shuffle=shuffle, seed=seed, device=device, **kwargs)


def ids(loader):
    return [batch[0].tolist() for batch in loader]


class Draws(torch.utils.data.Dataset):
    """Samples that a worker draws from each of the generators that augmentations use."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, torch.randint(2**30, ()), np.random.randint(2**30), random.randrange(2**30)


class Counting(IterableDataset):
    def __init__(self, n, told=None):
        self.n, self.told, self.epochs = n, told, []

    def __iter__(self):
        return iter(torch.arange(self.n))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        if self.told is None:
            raise TypeError
        return self.told


def test_batches_equal_those_of_a_loader_given_the_order_by_hand():
    sampler = EpochShuffle(range(12), 3)
    sampler.set_epoch(2)
    by_hand = DataLoader(dataset(), batch_size=5, sampler=list(sampler))
    loader = make(batch_size=5)
    set_epoch(loader, 2)
    assert ids(loader) == ids(by_hand)
    assert ids(make(shuffle=False, batch_size=5)) == ids(DataLoader(dataset(), batch_size=5))


def test_epochs_differ_and_repeat():
    loader = make(batch_size=4)
    seen = {}
    for epoch in (1, 2, 1):
        set_epoch(loader, epoch)
        assert seen.setdefault(epoch, ids(loader)) == ids(loader)
    assert seen[1] != seen[2]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_global_generators_are_not_moved(num_workers, shuffle):
    def states():
        return torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    loader = make(shuffle=shuffle, batch_size=4, num_workers=num_workers)
    before = states()
    assert len(ids(loader)) == 3
    assert states() == before


def test_what_workers_draw_is_a_function_of_seed_epoch_and_worker():
    def drawn(seed, epoch):
        loader = make(Draws(), shuffle=False, seed=seed, batch_size=2, num_workers=2)
        set_epoch(loader, epoch)
        torch.rand(3)  # what the run drew before must not matter
        return torch.stack([torch.stack(batch) for batch in loader])

    first = drawn(3, 1)
    assert torch.equal(drawn(3, 1), first)
    for other in (drawn(3, 2), drawn(4, 1)):
        assert (other[:, 1:] != first[:, 1:]).all()
    assert first[0, 1, 0] != first[1, 1, 0]  # batch 0 is worker 0's, batch 1 worker 1's


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sampler": [3, 1]}, [[3], [1]]),
        ({"sampler": SequentialSampler(range(3)), "batch_size": 2}, [[0, 1], [2]]),
        ({"batch_sampler": [[1, 2], [0]]}, [[1, 2], [0]]),
        ({"collate_fn": lambda samples: [torch.tensor([-1])], "batch_size": 6}, [[-1], [-1]]),
    ],
)
def test_what_the_user_gives_wins(given, expected):
    assert ids(make(**given)) == expected


def test_a_users_generator_shuffles_as_torch_does():
    expected = ids(DataLoader(dataset(), shuffle=True, generator=torch.Generator().manual_seed(5)))
    assert ids(make(generator=torch.Generator().manual_seed(5))) == expected


def test_memory_is_pinned_by_default_for_cuda_only():
    assert make(device="cuda:0").pin_memory
    assert not make(device="cpu").pin_memory
    assert not make(device="cuda", pin_memory=False).pin_memory


def test_an_iterable_dataset_orders_itself():
    assert [batch.tolist() for batch in make(Counting(5), batch_size=2)] == [[0, 1], [2, 3], [4]]


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset_once_each():
    class Recorder(SequentialSampler):
        def __init__(self, source):
            super().__init__(source)
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    sampler, inner, data = Recorder(range(4)), Recorder(range(4)), Counting(3)
    set_epoch(make(sampler=sampler), 5)
    set_epoch(make(batch_sampler=BatchSampler(inner, 2, False)), 6)
    set_epoch(DataLoader(data), 7)
    set_epoch([1, 2], 8)
    set_epoch(make(sampler=RandomSampler(range(4))), 9)
    assert (sampler.epochs, inner.epochs, data.epochs) == ([5], [6], [7])


def test_unknown_arguments_are_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"no 'batchsize', 'xyzzy'; did you mean 'batch_size'\?.*num_workers"):
        make(batchsize=4, xyzzy=1)
    with pytest.raises(ConfigError, match=r"Training set: its loader cannot be made: .*mutually exclusive"):
        make(batch_sampler=[[0]], batch_size=2, name="Training set")


@pytest.mark.parametrize("data", [[], TensorDataset(torch.zeros(0)), Counting(0, told=0)])
def test_an_empty_set_is_refused(data):
    with pytest.raises(DataError, match="Training set is empty"):
        make(data, name="Training set")


@pytest.mark.parametrize("data", [[1, 2, 3], Counting(3, told=3)])
def test_zero_batches_say_why(data):
    with pytest.raises(DataError, match="Training set gives 0 batches: drop_last with 3 samples < batch size 4"):
        make(data, batch_size=4, drop_last=True, name="Training set")
    assert len(list(make(data, batch_size=3, drop_last=True))) == 1


def test_samplers_that_yield_nothing_are_refused():
    for given in ({"sampler": []}, {"batch_sampler": []}):
        with pytest.raises(DataError, match="0 batches: its list yields nothing"):
            make(**given)


def test_a_set_without_length_needs_a_sampler():
    class Endless:
        def __getitem__(self, index):
            return torch.tensor(index)

    for shuffle in (True, False):
        with pytest.raises(DataError, match="Endless has no length"):
            make(Endless(), shuffle=shuffle)
    assert [batch.tolist() for batch in make(Endless(), sampler=[4, 2])] == [[4], [2]]


def test_batch_size_none_yields_samples():
    assert [int(sample[0]) for sample in make(shuffle=False, batch_size=None)] == list(range(12))
