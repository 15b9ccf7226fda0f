"""Batches of similar length: every sample once, little padding, the same list in every process."""

import random
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from amp_recipes.data import DynamicBatches, LengthBuckets, make_loader, set_epoch
from amp_recipes.errors import ConfigError

LENGTHS = np.random.RandomState(5).randint(1, 101, 503).tolist()


class Clips(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return index


def make(kind, **kwargs):
    if kind is LengthBuckets:
        return LengthBuckets(LENGTHS, 8, **{"pool_size": 100, **kwargs})
    return DynamicBatches(LENGTHS, 400, **{"pool_size": 100, **kwargs})


def flat(lists):
    return list(chain.from_iterable(lists))


def padding(batches):
    return sum(max(LENGTHS[i] for i in batch) * len(batch) - sum(LENGTHS[i] for i in batch) for batch in batches)


BOTH = pytest.mark.parametrize("kind", [LengthBuckets, DynamicBatches])


@BOTH
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_has_every_sample_once(kind, shuffle):
    sampler = make(kind, shuffle=shuffle, seed=1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert sorted(flat(batches)) == list(range(503))
        assert len(sampler) == len(batches)


@BOTH
def test_the_batches_are_a_function_of_seed_and_epoch(kind):
    def batches(seed, epoch):
        sampler = make(kind, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    used = make(kind, seed=1)
    for epoch in (3, 1, 2):
        used.set_epoch(epoch)
        torch.rand(3)
        assert list(used) == list(used) == batches(1, epoch)
    assert len({str(batches(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    before = torch.random.get_rng_state()
    batches(1, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


@BOTH
def test_an_order_of_length_is_the_same_in_each_epoch(kind):
    sampler = make(kind, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(4)
    assert list(sampler) == first
    assert [LENGTHS[i] for i in flat(first)] == sorted(LENGTHS)


@BOTH
def test_there_is_less_padding_than_in_random_batches(kind):
    order = list(range(503))
    random.Random(0).shuffle(order)
    at_random = [order[i : i + 8] for i in range(0, 503, 8)]
    sampler = make(kind, seed=1)
    assert padding(sampler) < padding(at_random) / 3
    assert [max(LENGTHS[i] for i in batch) for batch in sampler] != sorted(max(LENGTHS[i] for i in b) for b in sampler)


def test_buckets_hold_batch_size_samples():
    sizes = [len(batch) for batch in make(LengthBuckets, seed=1)]
    assert max(sizes) == 8
    assert sum(size < 8 for size in sizes) == 6  # one for each pool of 100
    assert {len(batch) for batch in make(LengthBuckets, seed=1, drop_last=True)} == {8}


def test_no_dynamic_batch_is_over_the_limit_and_none_could_take_the_next():
    def cost(batch):
        return max(LENGTHS[i] for i in batch) * len(batch)

    batches = list(make(DynamicBatches, shuffle=False))
    assert all(cost(batch) <= 400 for batch in batches)
    for batch, following in pairwise(batches):
        assert cost([*batch, following[0]]) > 400
    assert all(cost(batch) <= 400 for batch in make(DynamicBatches, seed=2))
    assert max(len(batch) for batch in make(DynamicBatches, seed=2, max_batch_size=7)) == 7


def test_lengths_may_be_seconds_in_any_container():
    seconds = [0.1 * length for length in range(1, 31)]
    expected = list(DynamicBatches(seconds, 3.0, seed=0))
    for same in (np.array(seconds), torch.tensor(seconds, dtype=torch.float64), tuple(seconds), iter(seconds)):
        assert list(DynamicBatches(same, 3.0, seed=0)) == expected
    assert next(iter(DynamicBatches([0.1] * 30, 0.1 * 3, seed=0, shuffle=False))) == [0, 1, 2]


def test_a_sample_over_the_limit_is_an_error_or_a_batch_of_its_own():
    with pytest.raises(
        ConfigError, match="2 samples are longer than max_total_length 5; the longest is sample 3 with 9"
    ):
        DynamicBatches([1, 2, 6, 9], 5)
    batches = list(DynamicBatches([1, 2, 6, 9], 5, too_long="alone", shuffle=False))
    assert batches == [[0, 1], [2], [3]]
    with pytest.raises(ConfigError, match="too_long 'drop' is unknown; expected 'raise' or 'alone'"):
        DynamicBatches([1], 5, too_long="drop")


def test_lengths_that_are_none_are_refused(subtests):
    for lengths, said in [
        ([1, float("nan")], "length of sample 1 is nan"),
        ([1, 2, -3], "length of sample 2 is -3"),
        ([[1, 2]], r"got shape \(1, 2\)"),
        (["a"], "lengths must be numbers"),
        (torch.tensor(3), r"got shape \(\)"),
    ]:
        with subtests.test(said), pytest.raises(ConfigError, match=said):
            LengthBuckets(lengths, 2)


def test_sizes_that_are_none_are_refused():
    for make_it in (
        lambda: LengthBuckets([1], 0),
        lambda: LengthBuckets([1], 2, pool_size=0),
        lambda: DynamicBatches([1], 5, max_batch_size=0),
    ):
        with pytest.raises(ConfigError, match="is not a number of samples"):
            make_it()


# ---------------------------------------------------------------------- in a loader


def loader(kind, rank=0, world_size=1, seed=3, **kwargs):
    batches = make_loader(
        Clips(),
        shuffle=True,
        seed=seed,
        device="cpu",
        batch_sampler=make(kind),
        rank=rank,
        world_size=world_size,
        **kwargs,
    )
    set_epoch(batches, 2)
    return batches


@BOTH
def test_a_loader_gives_them_with_the_runs_seed(kind):
    expected = make(kind, seed=3)
    expected.set_epoch(2)
    assert [batch.tolist() for batch in loader(kind)] == list(expected)
    by_hand = DataLoader(Clips(), batch_sampler=expected)
    assert [batch.tolist() for batch in loader(kind, num_workers=2)] == [batch.tolist() for batch in by_hand]
    assert len(loader(kind)) == len(expected)


@BOTH
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches_and_each_has_as_many(kind, world_size):
    ranks = [[batch.tolist() for batch in loader(kind, rank, world_size)] for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(loader(kind, 0, world_size))}
    assert sorted(flat(flat(ranks))) == list(range(503))
    whole = [batch.tolist() for batch in loader(kind)]
    steps = len(whole) // world_size
    assert [ranks[at % world_size][at // world_size] for at in range(steps * world_size)] == whole[: steps * world_size]


@BOTH
def test_another_number_of_processes_goes_on_with_the_samples_that_are_left(kind):
    seen, state = [], None
    for world_size, steps in ((2, 5), (1, 7), (2, 10**6)):
        iterators, loaders = [], [loader(kind, rank, world_size) for rank in range(world_size)]
        for it in loaders:
            if state is not None:
                it.load_state_dict(state)
            iterators.append(iter(it))
        for _ in range(steps):
            step = [next(iterator, None) for iterator in iterators]
            if step[0] is None:
                break
            seen += flat(batch.tolist() for batch in step)
        states = [it.state_dict() for it in loaders]
        assert all(it == states[0] for it in states)
        state = states[0]
    assert sorted(seen) == list(range(503))


def test_the_place_is_counted_in_batches_of_this_process():
    one = loader(LengthBuckets)
    iterator = iter(one)
    for _ in range(6):
        next(iterator)
    assert one.batches_done == 6
    two = loader(LengthBuckets, 1, 2)
    two.load_state_dict(one.state_dict())
    assert two.batches_done == 3


def test_lengths_of_another_data_set_are_refused():
    with pytest.raises(ConfigError, match="Training set: LengthBuckets was given 3 lengths, but the dataset has 503"):
        make_loader(
            Clips(), shuffle=True, seed=0, device="cpu", name="Training set", batch_sampler=LengthBuckets([1, 2, 3], 2)
        )
