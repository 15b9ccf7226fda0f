"""What a data set draws is a function of (seed, epoch, index): not of workers, batches, or what came before."""

import random

import numpy as np
import pytest
import torch
from device import DEVICE
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from amp_recipes.data import make_loader, set_epoch
from amp_recipes.data.sample_draws import DrawStream, SampleSeeds, draws_nothing, draws_put_back, held_generators
from amp_recipes.state.randomness import generator_state, set_generator_state


class Draws(Dataset):
    """Samples that draw from each of the generators that augmentations use."""

    def __init__(self, n=11):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        drawn = (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(()),
            torch.randn(()),
        )
        return torch.tensor([index, *map(float, drawn)], dtype=torch.float64)


class DrawsAtOnce(Draws):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def drawn(data=None, *, seed=3, epoch=1, shuffle=True, **kwargs):
    """What each sample drew, by index."""
    loader = make_loader(Draws() if data is None else data, shuffle=shuffle, seed=seed, device=DEVICE, **kwargs)
    set_epoch(loader, epoch)
    rows = torch.cat([batch.reshape(-1, 7) for batch in loader]).tolist()
    return {row[0]: row[1:] for row in rows}


def states():
    return random.getstate(), str(np.random.get_state()), torch.random.get_rng_state().tolist()


def test_draws_do_not_depend_on_how_the_samples_are_read():
    expected = drawn(batch_size=4)
    assert len(expected) == 11
    torch.rand(5), random.random(), np.random.rand()  # what the run drew before must not matter
    for other in (
        {"batch_size": 1},
        {"batch_size": 11, "shuffle": False},
        {"batch_size": None},
        {"batch_size": 4, "num_workers": 1},
        {"batch_size": 3, "num_workers": 2},
        {"batch_size": 4, "sampler": list(reversed(range(11)))},
        {"batch_sampler": [[2, 3, 4], list(range(5, 11)), [0, 1]]},
    ):
        assert drawn(**other) == expected, other


def test_draws_differ_by_sample_epoch_and_seed():
    tables = [drawn(), drawn(epoch=2), drawn(seed=4)]
    values = [value for table in tables for row in table.values() for value in row]
    assert len(set(values)) == len(values) == 3 * 11 * 6


def test_persistent_workers_draw_as_in_the_epoch_they_read():
    loader = make_loader(
        Draws(), shuffle=True, seed=3, device=DEVICE, batch_size=2, num_workers=2, persistent_workers=True
    )
    for epoch in (1, 2, 1):
        set_epoch(loader, epoch)
        rows = torch.cat(list(loader)).tolist()
        assert {row[0]: row[1:] for row in rows} == drawn(epoch=epoch)


def test_a_data_set_that_reads_batches_draws_by_the_list_of_indices():
    expected = drawn(DrawsAtOnce(), batch_size=4)
    assert drawn(DrawsAtOnce(), batch_size=4, num_workers=2) == expected
    assert drawn(DrawsAtOnce(), batch_size=4, epoch=2) != expected


def test_a_subset_is_drawn_sample_by_sample_although_it_reads_batches():
    subset = Subset(Draws(), [7, 5, 3])
    assert drawn(subset, batch_size=3) == drawn(subset, batch_size=1) == drawn(subset, batch_size=2, num_workers=1)


def test_what_a_collate_function_draws_is_a_function_of_its_samples():
    def mix(samples):
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])

    def mixed(data, epoch, **kwargs):
        loader = make_loader(data, shuffle=True, seed=1, device=DEVICE, batch_size=3, collate_fn=mix, **kwargs)
        set_epoch(loader, epoch)
        return torch.stack(list(loader)).tolist()

    data = TensorDataset(torch.arange(12))
    assert mixed(data, 1) == mixed(data, 1) == mixed(data, 1, num_workers=2)
    assert mixed(data, 1) != mixed(data, 2)
    assert mixed(Draws(), 1) == mixed(Draws(), 1, num_workers=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_stay_where_they_are_between_batches(num_workers):
    random.gauss(0, 1), np.random.randn(), torch.randn(())  # each keeps half of a pair for the next call
    before = states()
    loader = make_loader(Draws(), shuffle=True, seed=3, device=DEVICE, batch_size=2, num_workers=num_workers)
    for _ in loader:
        assert states() == before
    assert states() == before


def test_the_generators_are_put_back_when_a_sample_fails():
    class Fails(Draws):
        def __getitem__(self, index):
            raise ValueError("no")

    before = states()
    with pytest.raises(ValueError, match="no"):
        drawn(Fails())
    assert states() == before


def test_seeds_are_alike_for_equal_indices_of_any_type():
    seeds = SampleSeeds(1, 2)

    def draws(index):
        with draws_put_back():
            seeds.set_for(index)
            return random.random(), np.random.rand(), float(torch.rand(()))

    assert draws(3) == draws(np.int64(3)) == draws(torch.tensor(3))
    different = [3, 4, -3, "3", (3,), [3, 4], [34], "a"]
    assert len({draws(index) for index in different}) == len(different)
    assert len(set(draws(3))) == 3


def test_a_stream_of_draws_goes_on_where_it_stopped():
    def take(stream, count):
        with stream:
            return [(random.random(), np.random.randn(), float(torch.randn(()))) for _ in range(count)]

    whole, parts = DrawStream(SampleSeeds(1, 2), "x"), DrawStream(SampleSeeds(1, 2), "x")
    before = states()
    expected = take(whole, 5)
    assert take(parts, 2) + take(parts, 3) == expected
    assert states() == before
    assert take(DrawStream(SampleSeeds(1, 3), "x"), 5) != expected


def test_only_data_sets_that_are_known_to_draw_nothing_go_unseeded():
    tensors = TensorDataset(torch.arange(4))
    for data in (tensors, Subset(tensors, [1]), ConcatDataset([tensors, Subset(tensors, [2])]), [1, 2], range(3)):
        assert draws_nothing(data)
    assert draws_nothing(StackDataset(a=tensors, b=[1, 2, 3, 4]))
    assert draws_nothing(StackDataset(tensors, tensors))

    class Own(TensorDataset):
        pass

    own = Own(torch.arange(4))
    for data in (Draws(), own, Subset(own, [1]), ConcatDataset([tensors, own]), StackDataset(own, tensors)):
        assert not draws_nothing(data)


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda it: torch.rand(3, generator=it).tolist()),
    "numpy": (lambda: np.random.default_rng(1), lambda it: it.random(3).tolist()),
    "RandomState": (lambda: np.random.RandomState(1), lambda it: it.randn(3).tolist()),
    "random": (lambda: random.Random(1), lambda it: [it.gauss(0, 1) for _ in range(3)]),
}


def test_generators_go_back_to_a_state(subtests):
    for name, (make, draw) in GENERATORS.items():
        with subtests.test(name):
            generator, other = make(), make()
            draw(generator)
            state = generator_state(generator)
            expected = draw(generator)
            set_generator_state(other, state)
            assert draw(other) == expected


def test_generators_are_found_once_in_what_holds_them():
    class Holder:
        def __init__(self, **attributes):
            self.__dict__.update(attributes)

    one, two = torch.Generator(), random.Random(3)
    found = held_generators(Holder(a=one, n=1), Holder(b=one, c=two), object(), None)
    assert list(found.values()) == [one, two]
