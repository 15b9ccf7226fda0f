"""The order of an epoch is a function of (seed, epoch) only."""

import subprocess
import sys
from pathlib import Path

import torch

from amp_recipes.data import EpochShuffle
from amp_recipes.data.samplers import epoch_seed


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
    root = Path(__file__).parents[1]
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == str(order(7, 3))


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
