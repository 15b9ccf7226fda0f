"""The samples of a batch are named by what the dataset knows of them, in whatever order they are read."""

import pytest
import torch
from device import DEVICE
from pairwise import pairwise
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)

from amp_recipes.data import (
    DynamicBatches,
    LengthBuckets,
    SampleName,
    batches_from,
    loader_state,
    make_loader,
    sample_names,
    set_epoch,
    windows,
)


class Clips(Dataset):
    """Each sample is its own index."""

    def __init__(self, count=37):
        self.count, self.paths = count, [f"clips/{index}.wav" for index in range(count)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Worn(RandomSampler):
    """A sampler of the user's that remembers how often it was iterated."""

    begun = 0

    def __iter__(self):
        self.begun += 1
        return super().__iter__()


LENGTHS = [5 + 7 * index % 31 for index in range(37)]
ORDERS = {
    "shuffle": lambda data: {"shuffle": True, "batch_size": 5},
    "in order": lambda data: {"shuffle": False, "batch_size": 5},
    "drop_last": lambda data: {"shuffle": True, "batch_size": 5, "drop_last": True},
    "buckets": lambda data: {"shuffle": False, "batch_sampler": LengthBuckets(LENGTHS, 5, pool_size=15)},
    "dynamic": lambda data: {"shuffle": False, "batch_sampler": DynamicBatches(LENGTHS, 90)},
    "user's": lambda data: {"shuffle": False, "sampler": Worn(data), "batch_size": 5},
    "weighted": lambda data: {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * 37, 30), "batch_size": 5},
    "generator": lambda data: {"shuffle": True, "batch_size": 5, "generator": torch.Generator().manual_seed(3)},
    "batches": lambda data: {"shuffle": False, "batch_sampler": BatchSampler(RandomSampler(data), 4, False)},
    "distributed": lambda data: {"shuffle": False, "sampler": DistributedSampler(data, 2, 1), "batch_size": 5},
}


def made(order="shuffle", workers=0, rank=0, world_size=1, data=None, **kwargs):
    data = Clips() if data is None else data
    options = {"num_workers": workers, **ORDERS[order](data), **kwargs}
    return make_loader(data, seed=7, device=DEVICE, rank=rank, world_size=world_size, **options)


def named(loader, number, batch):
    return [name.index for name in sample_names(loader, number, batch, len(batch)) or []]


def assert_all_are_named(loader, batches, first=0, window=3):
    """Asked one window late, as a replay does."""
    earlier = []
    for of_window in windows(iter(batches), window):
        for number, batch in earlier:
            assert named(loader, number, batch) == batch.tolist()
        numbers = range(first, first := first + len(of_window))
        earlier = list(zip(numbers, of_window, strict=True))
    for number, batch in earlier:
        assert named(loader, number, batch) == batch.tolist()


@pytest.mark.parametrize(("order", "workers", "ranks"), pairwise(list(ORDERS), (0, 2), ((0, 1), (0, 2), (1, 2))))
def test_each_batch_is_named_in_each_epoch(order, workers, ranks):
    rank, world_size = ranks if order != "distributed" else (0, 1)
    loader = made(order, workers, rank, world_size)
    for epoch in (1, 2):
        set_epoch(loader, epoch)
        assert_all_are_named(loader, batches_from(loader, 0, None))


@pytest.mark.parametrize(("order", "workers"), pairwise(list(ORDERS), (0, 2)))
def test_batches_after_a_resume_inside_an_epoch_are_named(order, workers):
    loader = made(order, workers)
    set_epoch(loader, 2)
    batches = batches_from(loader, 0, None)
    for _ in range(2):
        next(batches)
    state = loader_state(loader)
    rest = [batch.tolist() for batch in batches]
    again = made(order, workers)
    set_epoch(again, 2)
    resumed = batches_from(again, 2, state)
    first = next(resumed)
    assert first.tolist() == rest[0]
    assert named(again, 2, first) == first.tolist()
    assert named(again, 1, first) == []  # of another process
    assert_all_are_named(again, resumed, first=3)


def test_a_resume_with_another_number_of_processes_names_what_it_reads():
    loader = made(world_size=1)
    batches = batches_from(loader, 0, None)
    for _ in range(3):
        next(batches)
    other = made(rank=1, world_size=2)
    resumed = batches_from(other, 2, loader_state(loader))
    assert_all_are_named(other, resumed, first=other.batches_done)


def test_asking_calls_no_sampler_of_the_users():
    data = Clips()
    sampler = Worn(data)
    loader = made(data=data, shuffle=False, sampler=sampler)
    state = torch.get_rng_state()
    for number, batch in enumerate(batches_from(loader, 0, None)):
        assert named(loader, number, batch) == batch.tolist()
    assert sampler.begun == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "order", [{"shuffle": True}, {"shuffle": False}, {"sampler": WeightedRandomSampler([1.0] * 37, 30)}]
)
def test_a_dataloader_of_the_users_is_recorded(order, workers):
    data = Clips()
    loader = DataLoader(data, 5, num_workers=workers, **order)
    torch.manual_seed(1)
    expected = [batch.tolist() for batch in loader]
    torch.manual_seed(1)
    batches = batches_from(loader, 0, None)
    assert_all_are_named(loader, batches)
    torch.manual_seed(1)
    assert [batch.tolist() for batch in batches_from(loader, 0, None)] == expected  # and its order is as before
    torch.manual_seed(1)
    assert_all_are_named(loader, batches_from(loader, 2, None), first=2)


def test_what_cannot_be_known_is_not_named():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(12))

    data = Clips()
    stream = make_loader(Stream(), shuffle=False, seed=0, device=DEVICE, batch_size=4)
    persistent = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    for loader in (stream, DataLoader(Stream(), 4), persistent, [torch.arange(4)]):
        assert sample_names(loader, 0, next(iter(batches_from(loader, 0, None))), 4) is None
    assert sample_names(None, 0, torch.arange(4), 4) is None
    loader = made(collate_fn=lambda samples: torch.stack(samples[:2]))
    assert sample_names(loader, 0, next(batches_from(loader, 0, None)), 2) is None  # it left some out


def test_files_come_from_the_dataset():
    class Folder(Clips):
        """As torchvision's."""

        def __init__(self):
            super().__init__(6)
            del self.paths
            self.samples = [(f"images/{index}.png", 0) for index in range(6)]

    both = ConcatDataset([Clips(4), Folder()])
    part = Subset(both, [9, 1, 5])
    rows = [{"text": torch.tensor(0), "path": f"texts/{index}.txt"} for index in range(3)]
    for data, expected in (
        (both, ["clips/0.wav", "clips/1.wav", "clips/2.wav", "clips/3.wav", "images/0.png", "images/1.png"]),
        (part, ["images/5.png", "clips/1.wav", "images/1.png"]),
    ):
        loader = made("in order", data=data, batch_size=6)
        batch = next(batches_from(loader, 0, None))
        found = sample_names(loader, 0, batch, len(batch))
        assert found == [SampleName(index, file) for index, file in enumerate(expected)]
    loader = made("in order", data=rows, batch_size=3)
    batch = next(batches_from(loader, 0, None))
    assert sample_names(loader, 0, batch, 3) == [SampleName(index, f"texts/{index}.txt") for index in range(3)]


def test_files_that_the_batch_names_hold_for_any_iterable():
    batches = [{"x": torch.zeros(2), "audio_path": ["a.wav", "b.wav"]}]
    assert sample_names(batches, 0, batches[0], 2) == [SampleName(None, "a.wav"), SampleName(None, "b.wav")]
    of_samples = [{"file": "a.wav"}, {"file": "b.wav"}]
    assert sample_names(None, 0, of_samples, 2) == [SampleName(None, "a.wav"), SampleName(None, "b.wav")]
    assert sample_names(None, 0, {"path": ["a.wav"]}, 2) is None


def test_a_collate_function_may_sort():
    def sorts(samples):
        return torch.stack(sorted(samples, reverse=True))

    loader = made("in order", collate_fn=sorts)
    found = sample_names(loader, 0, next(batches_from(loader, 0, None)), 5)
    assert [name.is_certain for name in found] == [False] * 5

    def sorts_both(samples):
        samples = sorted(samples, reverse=True)
        return {"x": torch.stack(samples), "path": [f"clips/{sample}.wav" for sample in samples]}

    loader = made("in order", collate_fn=sorts_both)
    found = sample_names(loader, 0, next(batches_from(loader, 0, None)), 5)
    assert found == [SampleName(None, f"clips/{index}.wav") for index in (4, 3, 2, 1, 0)]
