"""The order of an epoch is a function of (seed, epoch) only."""

from itertools import product

import torch
from programs import run_python

from amp_recipes.data import EpochShuffle
from amp_recipes.data.samplers import epoch_seed, rank_batches, rank_groups, share, spread


def order(seed, epoch, n=100):
    sampler = EpochShuffle(range(n), seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_each_epoch_takes_every_sample_once():
    for epoch in range(3):
        assert sorted(order(7, epoch)) == list(range(100))


def test_the_order_does_not_depend_on_what_came_before():
    sampler = EpochShuffle(range(100), 7)
    for epoch in (0, 1, 5):
        sampler.set_epoch(epoch)
        torch.randperm(10)
        assert list(sampler) == list(sampler) == order(7, epoch)
    assert list(EpochShuffle(range(100), 7)) == order(7, 0)
    assert len(sampler) == 100


def test_another_process_gives_the_same_order():
    code = "from amp_recipes.data import EpochShuffle; s = EpochShuffle(range(100), 7); s.set_epoch(3); print(list(s))"
    assert run_python("-c", code).stdout.strip() == str(order(7, 3))  # its hash seed is another one, too


def test_no_two_of_many_neighbouring_seeds_and_epochs_share_an_order():
    # `seed + epoch` would give 40 orders here, not 400.
    assert len({tuple(order(seed, epoch)) for seed in range(20) for epoch in range(20)}) == 400


def test_seeds_differ_in_the_32_bits_that_the_generator_takes_and_by_purpose():
    low = {epoch_seed(seed, epoch, "shuffle") % 2**32 for seed in range(20) for epoch in range(20)}
    assert len(low) == 400
    assert epoch_seed(0, 0, "shuffle") != epoch_seed(0, 0, "workers")


def test_the_global_generator_is_not_moved():
    before = torch.random.get_rng_state()
    order(7, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def taken(count, batch_size, world_size, start=0, drop_last=False, kind="list"):
    """The batches of each rank, and the positions after each."""
    kinds = {"list": list, "range": lambda it: it, "tensor": lambda it: torch.tensor(list(it)), "iterator": iter}
    ranks, positions = [], []
    for rank in range(world_size):
        got = list(rank_batches(kinds[kind](range(count)), start, batch_size, drop_last, rank, world_size))
        ranks.append([list(batch) for batch, _ in got])
        positions.append([done for _, done in got])
    assert all(it == positions[0][: len(it)] for it in positions)  # the last ones may be without a last batch
    return ranks, positions[0]


KINDS = ["list", "range", "tensor", "iterator"]


def test_ranks_share_an_epoch(subtests):
    for count, world_size, kind in product([1, 2, 3, 7, 8, 23, 24, 25], [1, 2, 3], KINDS):
        with subtests.test(count=count, world_size=world_size, kind=kind):
            ranks, positions = taken(count, 4, world_size, kind=kind)
            step = 4 * world_size
            assert positions == [min(count, done) for done in range(step, count + step, step)]
            for at in range(len(positions)):
                together = [index for batches in ranks for index in (batches[at] if at < len(batches) else [])]
                assert together == list(range(at * step, positions[at]))  # every sample once, none twice
                sizes = [len(batches[at]) if at < len(batches) else 0 for batches in ranks]
                assert max(sizes) - min(sizes) <= 1
                assert max(sizes) <= 4


def test_a_start_skips_so_many_samples_of_all_ranks(subtests):
    for kind, start in product(KINDS, [0, 6, 12, 20, 23]):
        with subtests.test(kind=kind, start=start):
            ranks, positions = taken(23, 3, 2, start=start, kind=kind)
            assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(start, 23))
            assert positions == [*range(start + 6, 23, 6), 23][: len(positions)]


def test_drop_last_leaves_out_what_is_no_full_step():
    ranks, positions = taken(23, 4, 2, drop_last=True)
    assert ranks == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]
    assert positions == [8, 16]


def test_an_endless_order_is_taken_as_it_is_asked_for():
    endless = iter(int, 1)  # 0 for ever
    batches = rank_batches(endless, 5, 2, False, 1, 2)
    assert [next(batches) for _ in range(3)] == [([0, 0], 9), ([0, 0], 13), ([0, 0], 17)]


def test_shares_hold_neighbours():
    assert [share([1, 2, 3, 4, 5], rank, 2) for rank in range(2)] == [[1, 2], [3, 4, 5]]
    assert [share([1], rank, 3) for rank in range(3)] == [[1], [], []]


def test_batches_are_halved_until_each_rank_has_one():
    assert spread([[1, 2, 3, 4, 5]], 2) == [[1, 2, 3], [4, 5]]
    assert spread([[1, 2, 3, 4, 5], [6]], 4) == [[1, 2], [3], [4, 5], [6]]
    assert spread([[1], [2]], 3) == [[1], [2]]
    assert spread([[1]], 5) == [[1]]
    assert spread([[1], [2]], 2) == [[1], [2]]


def test_groups_of_batches_are_shared_from_any_place():
    batches = [[0, 1], [2], [3, 4, 5], [6, 7], [8, 9, 10]]
    got = [list(rank_groups(batches, 0, rank, 2)) for rank in range(2)]
    assert got[0] == [([0, 1], 3), ([3, 4, 5], 8), ([8, 9], 11)]
    assert got[1] == [([2], 3), ([6, 7], 8), ([10], 11)]
    assert list(rank_groups(batches, 6, 0, 1)) == [([6, 7], 8), ([8, 9, 10], 11)]
    assert list(rank_groups(batches, 11, 0, 2)) == []
