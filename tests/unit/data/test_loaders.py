"""Loaders repeat by (seed, epoch), leave the global generators alone, and refuse what cannot train."""

import json
import os
import random
from itertools import zip_longest

import numpy as np
import pytest
import torch
from device import DEVICE
from pairwise import each_once
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from amp_recipes.data import EpochShuffle, make_loader, set_epoch
from amp_recipes.errors import ConfigError, DataError


def dataset(n=12):
    return TensorDataset(torch.arange(n))


def make(data=None, *, shuffle=True, seed=3, device=DEVICE, **kwargs):
    return make_loader(dataset() if data is None else data, shuffle=shuffle, seed=seed, device=device, **kwargs)


def ids(loader):
    return [batch[0].tolist() for batch in loader]


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


def test_what_the_user_gives_wins():
    assert ids(make(sampler=[3, 1])) == [[3], [1]]
    assert ids(make(sampler=SequentialSampler(range(3)), batch_size=2)) == [[0, 1], [2]]
    assert ids(make(batch_sampler=[[1, 2], [0]])) == [[1, 2], [0]]
    assert ids(make(collate_fn=lambda samples: [torch.tensor([-1])], batch_size=6)) == [[-1], [-1]]


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
    with pytest.raises(
        ConfigError, match=r"no argument 'batchsize', 'xyzzy'; did you mean 'batch_size'\?.*num_workers"
    ):
        make(batchsize=4, xyzzy=1)
    with pytest.raises(ConfigError, match=r"Training set: the loader cannot be created: .*mutually exclusive"):
        make(batch_sampler=[[0]], batch_size=2, name="Training set")


def test_an_empty_set_is_refused():
    for data in ([], TensorDataset(torch.zeros(0)), Counting(0, told=0)):
        with pytest.raises(DataError, match="Training set is empty"):
            make(data, name="Training set")


def test_zero_batches_say_why():
    for data in ([1, 2, 3], Counting(3, told=3)):
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


# ---------------------------------------------------------------------- the place in the data


class Reads(torch.utils.data.Dataset):
    """Counts what is read, in a file, so that workers count too; draws in each sample."""

    def __init__(self, log=None, n=23):
        self.log, self.n = log, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        return torch.tensor([float(index), random.random(), np.random.rand(), float(torch.rand(()))]).double()


class Lazy(torch.utils.data.Sampler):
    """Draws each index from the global generators when it is asked for it."""

    def __iter__(self):
        for _ in range(20):
            yield random.choice([int(torch.randint(23, ())), np.random.randint(23)])

    def __len__(self):
        return 20


class OwnGenerator(torch.utils.data.Sampler):
    """Draws from a generator that goes on from epoch to epoch."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        return iter(self.generator.permutation(23).tolist())

    def __len__(self):
        return 23


SETUPS = {
    "shuffled": lambda: {"batch_size": 4},
    "in order": lambda: {"batch_size": 4, "shuffle": False},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "samples": lambda: {"batch_size": None},
    "list sampler": lambda: {"batch_size": 4, "sampler": list(range(22, -1, -1))},
    "lazy sampler": lambda: {"batch_size": 3, "sampler": Lazy()},
    "RandomSampler": lambda: {"batch_size": 4, "sampler": RandomSampler(range(23))},
    "weights": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 23, 30)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(23)), 5, False)},
    "list of batches": lambda: {"batch_sampler": [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [0]]},
    "generator": lambda: {"batch_size": 4, "generator": torch.Generator().manual_seed(5)},
    "own generator": lambda: {"batch_size": 4, "sampler": OwnGenerator(np.random.default_rng(7))},
    "sampler generator": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(23), generator=torch.Generator().manual_seed(5)),
    },
    "collate": lambda: {"batch_size": 4, "collate_fn": lambda samples: torch.stack(samples) + random.random()},
}
WORKERS = {
    "main process": {},
    "2 workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def epochs(loader, until):
    """The batches of epochs 1 to `until`."""
    return {epoch: [batch.tolist() for batch in begin(loader, epoch)] for epoch in range(1, until + 1)}


def begin(loader, epoch):
    set_epoch(loader, epoch)
    return loader


@pytest.mark.parametrize(("setup", "workers"), each_once(list(SETUPS), list(WORKERS)))
def test_a_resumed_epoch_goes_on_as_if_it_had_not_stopped(setup, workers, tmp_path):
    expected = epochs(make(Reads(), **SETUPS[setup]()), 3)  # by the main process, without a stop
    stopped = make(Reads(), **SETUPS[setup](), **WORKERS[workers])
    epochs(stopped, 1)
    iterator, seen = iter(begin(stopped, 2)), []
    for _ in range(3):
        seen.append(next(iterator).tolist())
        assert seen == expected[2][: len(seen)]
        assert stopped.batches_done == len(seen)
    state = json.loads(json.dumps(stopped.state_dict(), default=lambda it: {"tensor": it.tolist()}))
    for name, saved in state.get("generators", {}).items():
        if "tensor" in saved:
            state["generators"][name] = torch.tensor(saved["tensor"], dtype=torch.uint8)
    del iterator
    torch.rand(3), random.random(), np.random.rand()

    log = tmp_path / "read"
    resumed = make(Reads(log), **SETUPS[setup](), **WORKERS[workers])
    begin(resumed, 2).load_state_dict(state)
    assert resumed.batches_done == 3
    seen += [batch.tolist() for batch in resumed]
    assert seen == expected[2]
    read = sum(1 for _ in log.open())
    assert read == sum(1 if setup == "samples" else len(batch) for batch in expected[2][3:])  # nothing was read again
    assert resumed.batches_done == len(expected[2])
    assert [batch.tolist() for batch in begin(resumed, 3)] == expected[3]


@pytest.mark.parametrize(
    "workers", ["main process", "persistent", pytest.param("2 workers", marks=pytest.mark.extended)]
)
def test_only_a_loaded_state_moves_the_beginning(workers):
    loader = make(Reads(), batch_size=4, **WORKERS[workers])
    expected = epochs(make(Reads(), batch_size=4), 2)
    for _ in range(2):
        next(iter(begin(loader, 1)))  # left alone after a batch
    assert [batch.tolist() for batch in begin(loader, 1)] == expected[1]
    assert [batch.tolist() for batch in begin(loader, 1)] == expected[1]
    loader.load_state_dict({"epoch": 1, "samples": 8})
    assert [batch.tolist() for batch in begin(loader, 2)] == expected[2]  # another epoch has its own beginning
    loader.load_state_dict({"epoch": 1, "samples": 8})
    assert [batch.tolist() for batch in loader] == expected[1][2:]  # without a set_epoch too
    assert [batch.tolist() for batch in loader] == expected[1]


def test_what_is_prefetched_is_not_counted():
    loader = begin(make(Reads(), batch_size=2, num_workers=2, prefetch_factor=4), 4)
    iterator = iter(loader)
    assert loader.state_dict() == {"epoch": 4, "samples": 0}
    next(iterator)
    assert loader.state_dict() == {"epoch": 4, "samples": 2}
    assert len(list(iterator)) == 11
    assert loader.state_dict() == {"epoch": 4, "samples": 23}
    set_epoch(loader, 5)
    assert loader.state_dict() == {"epoch": 5, "samples": 0}


def test_a_loaded_state_is_told_until_the_loader_moves():
    loader = make(Reads(), batch_size=4)
    loader.load_state_dict({"epoch": 2, "samples": 12})
    assert loader.state_dict() == {"epoch": 2, "samples": 12}
    assert loader.batches_done == 3
    set_epoch(loader, 2)
    assert loader.state_dict() == {"epoch": 2, "samples": 12}
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 2, "samples": 16}


def test_a_state_of_another_kind_is_refused():
    for state in (None, {}, {"epoch": 1}, [1, 2], {"batches": 3}):
        with pytest.raises(DataError, match="Data set: a saved position needs 'epoch' and 'samples'"):
            make().load_state_dict(state)


@pytest.mark.parametrize(("count", "kwargs"), each_once([1, 7, 16, 23], [{}, {"num_workers": 1}]))
def test_ranks_see_each_sample_once_in_as_many_batches(count, kwargs):
    ranks = [make(Reads(n=count), batch_size=4, rank=rank, world_size=2, **kwargs) for rank in range(2)]
    seen = [[[int(row[0]) for row in batch] for batch in begin(loader, 3)] for loader in ranks]
    assert [len(loader) for loader in ranks] == [-(-count // 8)] * 2  # of the rank with most
    assert [len(batches) for batches in seen] == [-(-count // 8), -(-count // 8) - (count % 8 == 1)]
    order = EpochShuffle(range(count), 3)
    order.set_epoch(3)
    flat = [index for step in zip_longest(*seen, fillvalue=[]) for batch in step for index in batch]
    assert flat == list(order)


def test_two_processes_then_one_then_two_read_each_sample_once():
    seen, state = [], None
    for world_size, steps in ((2, 2), (1, 3), (2, 100)):
        ranks = range(world_size)
        loaders = [begin(make(Reads(n=62), batch_size=4, rank=rank, world_size=world_size), 1) for rank in ranks]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            step = [next(iterator, None) for iterator in iterators]
            if step[0] is None:
                break
            seen += [row for batch in step for row in batch.tolist()]
        states = [loader.state_dict() for loader in loaders]
        assert all(it == states[0] for it in states)
        state = states[0]
    whole = [row for batch in begin(make(Reads(n=62), batch_size=4), 1) for row in batch.tolist()]
    assert seen == whole  # the same draws too


def test_a_users_sampler_is_shared_among_ranks_unless_it_shares_itself():
    def seen(rank, sampler):
        return [
            int(row[0])
            for batch in make(Reads(), batch_size=4, sampler=sampler, rank=rank, world_size=2)
            for row in batch
        ]

    plain = [seen(rank, list(range(16))) for rank in range(2)]
    assert sorted(plain[0] + plain[1]) == list(range(16))
    shared = [DistributedSampler(range(16), 2, rank, shuffle=False) for rank in range(2)]
    assert [seen(rank, shared[rank]) for rank in range(2)] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    loader = make(Reads(), batch_size=4, sampler=shared[1], rank=1, world_size=2)
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 0, "samples": 8}  # of both ranks
    other = make(Reads(), batch_size=4, sampler=shared[1], rank=1, world_size=2)
    other.load_state_dict(loader.state_dict())
    assert [int(row[0]) for batch in other for row in batch] == list(range(9, 16, 2))
    assert len(loader) == 2


def test_random_samplers_give_all_ranks_one_order():
    def seen(rank):
        torch.manual_seed(rank)  # ranks often differ in this
        loader = make(Reads(), batch_size=4, sampler=RandomSampler(range(23)), rank=rank, world_size=2)
        return [int(row[0]) for batch in loader for row in batch]

    assert sorted(seen(0) + seen(1)) == list(range(23))


def test_drop_last_counts_the_samples_of_all_processes():
    with pytest.raises(DataError, match="drop_last with 7 samples < batch size 4 x 2 processes"):
        make(Reads(n=7), batch_size=4, drop_last=True, world_size=2)
    assert len(make(Reads(n=17), batch_size=4, drop_last=True, world_size=2)) == 2


def test_the_loader_looks_like_any_other():
    data = Reads()
    loader = make(data, batch_size=4, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert (loader.dataset, loader.batch_size, loader.drop_last, loader.num_workers) == (data, 4, True, 0)
    assert isinstance(loader.sampler, EpochShuffle)
    assert [len(batch) for batch in loader.batch_sampler] == [4] * 5
    assert len(loader) == len(list(loader)) == 5
    assert len(iter(loader)) == 5


def test_two_iterations_at_a_time_do_not_disturb_each_other():
    for kwargs in ({}, {"num_workers": 1}):
        loader = make(Reads(), batch_size=4, **kwargs)
        expected = [batch.tolist() for batch in loader]
        pairs = [(one.tolist(), two.tolist()) for one, two in zip(loader, loader, strict=True)]
        assert pairs == [(batch, batch) for batch in expected]


def test_a_persistent_workers_data_set_is_told_the_epoch():
    class Told(Reads):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, index):
            return self.epoch

    loader = make(Told(), batch_size=23, num_workers=1, persistent_workers=True)
    for epoch in (4, 5, 7):
        assert set(next(iter(begin(loader, epoch))).tolist()) == {epoch}


@pytest.mark.extended  # the worker imports torch anew
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_read_the_same(method):
    expected = [batch[0].tolist() for batch in begin(make(batch_size=4), 1)]
    started = make(batch_size=4, num_workers=1, multiprocessing_context=method)
    assert [batch[0].tolist() for batch in begin(started, 1)] == expected


def test_hundreds_of_workers_are_not_started(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    loader = make_loader([0, 1, 2], shuffle=False, seed=0, device="cpu", name="Training set", num_workers=300)
    assert (
        loader.num_workers == 32
        and "Training set: num_workers=300 is too many for 2 CPU cores; started 32" in caplog.text
    )
    caplog.clear()
    assert make_loader([0, 1, 2], shuffle=False, seed=0, device="cpu", num_workers=32).num_workers == 32
    assert not caplog.text
