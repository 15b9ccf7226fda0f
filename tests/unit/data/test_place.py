"""Any iterable of batches goes on where it was, without reading what came before where that is possible."""

import random

import numpy as np
import pytest
import torch
from device import DEVICE
from pairwise import each_once, pairwise
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from amp_recipes.data import (
    batches_from,
    begin_again,
    beginning,
    can_begin_again,
    generator_states,
    loader_state,
    make_loader,
    replay_reason,
    set_epoch,
    set_generator_states,
    streams,
)
from amp_recipes.errors import DataError


class Reads(Dataset):
    """Says which samples it was asked for."""

    def __init__(self, n=20):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read.append(int(index))
        return torch.tensor(index)


class Stream(IterableDataset):
    """Numbers and draws, split among workers; `tells`: it has a state."""

    def __init__(self, n=23):
        self.n, self.start, self.made = n, 0, 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        while self.start * workers + worker < self.n:
            index = self.start * workers + worker
            self.start += 1
            self.made += 1
            yield torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))]).double()
        self.start = 0


class Tells(Stream):
    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


class Batches:
    """An iterable that tells its own place."""

    def __init__(self):
        self.at, self.iterated = 0, 0

    def __iter__(self):
        self.iterated += 1
        while self.at < 9:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def whole_and_parts(make, step):
    """All batches of one pass, and those of a pass that was stopped after `step` and resumed by a new loader."""
    whole = [as_list(batch) for batch in batches_from(begun(make()), 0, None)]
    first = begun(make())
    iterator = batches_from(first, 0, None)
    seen = [as_list(next(iterator)) for _ in range(step)]
    state = loader_state(first)
    del iterator
    second = begun(make())
    seen += [as_list(batch) for batch in batches_from(second, step, state)]
    return whole, seen, second


def begun(loader):
    set_epoch(loader, 2)
    return loader


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


# ---------------------------------------------------------------------- loaders of ours


def test_a_loader_of_ours_tells_its_place():
    data = []

    def make():
        data.append(Reads())
        return make_loader(data[-1], shuffle=True, seed=1, device=DEVICE, batch_size=3)

    whole, seen, second = whole_and_parts(make, 4)
    assert seen == whole
    assert len(data[-1].read) == 20 - 12
    assert replay_reason(second) is None


@pytest.mark.parametrize(
    ("kind", "num_workers", "torchdata", "batch_size"), pairwise([Stream, Tells], [0, 2], [True, False], [None, 3])
)
def test_a_stream_goes_on_with_the_same_samples_and_draws(kind, num_workers, torchdata, batch_size, monkeypatch):
    monkeypatch.setattr(streams, "has_torchdata", lambda: torchdata)
    data = []

    def make():
        data.append(kind())
        return make_loader(
            data[-1], shuffle=False, seed=1, device=DEVICE, batch_size=batch_size, num_workers=num_workers
        )

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    before = torch.random.get_rng_state(), random.getstate(), str(np.random.get_state())
    whole, seen, second = whole_and_parts(make, 3)
    assert seen == whole
    assert sum(len(batch) if batch_size else 1 for batch in whole) == 23
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    reason = replay_reason(second)
    if kind is Tells and (torchdata or num_workers == 0):
        assert reason is None
        if num_workers == 0:
            assert data[-1].made == 23 - 3 * (batch_size or 1)  # not made again
    elif kind is Tells:
        assert "torchdata" in reason
    else:
        assert "Stream is an IterableDataset that cannot save its position: give it state_dict" in reason


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_streams_draws_differ_by_epoch_and_are_the_same_with_persistent_workers(num_workers):
    def rows(loader, epoch):
        set_epoch(loader, epoch)
        return torch.cat(list(loader)).tolist()

    kwargs = {"shuffle": False, "seed": 1, "device": DEVICE, "batch_size": 2, "num_workers": num_workers}
    fresh = {epoch: rows(make_loader(Stream(), **kwargs), epoch) for epoch in (1, 2)}
    assert fresh[1] != fresh[2]
    if num_workers:
        kept = make_loader(Stream(), persistent_workers=True, **kwargs)
        assert [rows(kept, epoch) for epoch in (1, 2, 1)] == [fresh[1], fresh[2], fresh[1]]


def test_a_streams_place_belongs_to_its_epoch():
    loader = make_loader(Tells(), shuffle=False, seed=1, device=DEVICE, batch_size=2)
    iterator = iter(begun(loader))
    next(iterator), next(iterator)
    loader.load_state_dict(loader_state(loader))
    assert loader.batches_done == 2
    assert next(iter(loader))[:, 0].tolist() == [4, 5]
    loader.load_state_dict(loader_state(loader))
    assert loader.batches_done == 3
    set_epoch(loader, 3)
    assert loader.batches_done == 0
    assert loader_state(loader) == {"epoch": 3, "batches": 0, "num_workers": 0}


def test_a_stream_read_by_another_number_of_workers_is_refused():
    loader = make_loader(Tells(), shuffle=False, seed=1, device=DEVICE, name="Training set", num_workers=2)
    with pytest.raises(DataError, match=r"Training set: .* saved with num_workers=3, but now there are 2 workers"):
        loader.load_state_dict({"epoch": 1, "batches": 3, "num_workers": 3})
    with pytest.raises(DataError, match="a saved position needs 'epoch' and 'batches'"):
        loader.load_state_dict({"epoch": 1, "samples": 3})


# ---------------------------------------------------------------------- loaders of torch and torchdata


SAMPLERS = {
    "shuffle": lambda: {"batch_size": 3, "shuffle": True},
    "in order": lambda: {"batch_size": 3},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "drop_last": lambda: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(5, 20))},
    "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler([1.0] * 20, 30)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(20)), 4, False)},
    "generator": lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
}


@pytest.mark.parametrize(("setup", "num_workers"), each_once(list(SAMPLERS), [2, 0]))
def test_a_dataloader_of_torch_is_skipped_in_its_sampler(setup, num_workers):
    """From the same global state, the same batches; and the global state moves as it would have."""

    def make():
        data = Reads() if num_workers == 0 else TensorDataset(torch.arange(20))
        return DataLoader(data, num_workers=num_workers, **SAMPLERS[setup]())

    torch.manual_seed(7)
    iterator = iter(make())
    expected = [str(batch) for batch in iterator][3:]
    torch.manual_seed(7)
    iterator = iter(make())
    for _ in range(3):
        next(iterator)
    moved = torch.random.get_rng_state()

    loader = make()
    torch.manual_seed(7)
    batches = batches_from(loader, 3, None)
    assert torch.equal(torch.random.get_rng_state(), moved)  # all is drawn when the call returns
    torch.manual_seed(8)  # what a resume does: it puts the state of the save back
    assert [str(batch) for batch in batches] == expected
    if num_workers == 0:
        taken = 3 if setup == "no batches" else 12 if setup == "batch sampler" else 9
        assert len(loader.dataset.read) == sum(1 for _ in loader.sampler) - taken if setup == "in order" else True
        assert len(loader.dataset.read) < 30 - taken + 1
    assert replay_reason(loader) is None


def test_a_generator_that_goes_on_from_epoch_to_epoch_is_put_back():
    def make():
        return DataLoader(TensorDataset(torch.arange(20)), 3, shuffle=True, generator=torch.Generator().manual_seed(3))

    def ids(batches):
        return [batch[0].tolist() for batch in batches]

    whole = make()
    expected = [ids(batches_from(whole, 0, None)) for _ in range(3)]
    stopped = make()
    ids(batches_from(stopped, 0, None))
    iterator = batches_from(stopped, 0, None)
    next(iterator), next(iterator)
    state = loader_state(stopped)
    resumed = make()
    assert ids(batches_from(resumed, 2, state)) == expected[1][2:]
    assert ids(batches_from(resumed, 0, None)) == expected[2]


def test_workers_that_may_draw_are_replayed():
    """What they draw follows from all they read before, so that only reading it again gives the same."""

    class Draws(Reads):
        def __getitem__(self, index):
            return torch.rand(())

    def make():
        return DataLoader(Draws(), batch_size=3, num_workers=2)

    torch.manual_seed(7)
    expected = [batch.tolist() for batch in make()]
    torch.manual_seed(7)
    assert [batch.tolist() for batch in batches_from(make(), 3, None)] == expected[3:]
    assert "give the Dataset itself" in replay_reason(make())
    assert "the batches already used are read again" in replay_reason(make())


def test_a_stream_in_a_dataloader_of_torch():
    whole, seen, second = whole_and_parts(lambda: DataLoader(Numbers(), batch_size=2), 4)
    assert seen == whole
    assert second.dataset.made == 20 - 8
    assert replay_reason(second) is None
    assert "state_dict" in replay_reason(DataLoader(Stream()))
    assert "StatefulDataLoader" in replay_reason(DataLoader(Tells(), num_workers=1))


class Numbers(Tells):
    def __iter__(self):
        while self.start < 20:
            self.start += 1
            self.made += 1
            yield self.start - 1
        self.start = 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchdatas_loader_tells_its_place(num_workers):
    def make():
        return StatefulDataLoader(Numbers(), batch_size=2, num_workers=num_workers)

    whole, seen, second = whole_and_parts(make, 4)
    assert seen == whole
    assert replay_reason(second) is None


def test_batches_in_no_order_are_told():
    kwargs = {"num_workers": 1, "in_order": False}
    for loader in (DataLoader(Reads(), **kwargs), make_loader(Reads(), shuffle=True, seed=0, device=DEVICE, **kwargs)):
        assert "in_order=False" in replay_reason(loader)
        assert "the batches already used are read again" not in replay_reason(loader)


def test_a_subclass_of_dataloader_is_replayed():
    class Own(DataLoader):
        def __iter__(self):
            return iter(["a", "b", "c"])

    assert list(batches_from(Own([1]), 1, None)) == ["b", "c"]
    assert "a Own may give its batches in any order" in replay_reason(Own([1]))


# ---------------------------------------------------------------------- generators of the data set


class Own(Dataset):
    """Draws from a generator that it keeps."""

    def __init__(self, seed=1):
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, self.rng.random()])


class OwnStream(IterableDataset):
    def __init__(self):
        self.rng = random.Random(1)

    def __iter__(self):
        return (torch.tensor([index, self.rng.random()]) for index in range(10))


def joined():
    return ConcatDataset([Own(1), Subset(Own(2), range(5)), ConcatDataset([Own(3)])])


OWN_GENERATORS = {
    "own": (Own, {"dataset.rng"}),
    "stream": (OwnStream, {"dataset.rng"}),
    "subset": (lambda: Subset(Own(), range(10)), {"dataset.dataset.rng"}),
    "concat": (joined, {"dataset.0.rng", "dataset.1.dataset.rng", "dataset.2.0.rng"}),
    "stack": (lambda: StackDataset(Own(1), Own(2)), {"dataset.0.rng", "dataset.1.rng"}),
    "stack by name": (lambda: StackDataset(a=Own(1)), {"dataset.a.rng"}),
}


@pytest.mark.parametrize(
    "make",
    [
        lambda data: make_loader(data, shuffle=False, seed=0, device=DEVICE, batch_size=2),
        lambda data: DataLoader(data, batch_size=2),
    ],
    ids=["ours", "torch"],
)
def test_without_workers_the_data_sets_own_generators_go_on(make, subtests):
    for name, (data, names) in OWN_GENERATORS.items():
        with subtests.test(name):
            whole = [str(batch) for batch in batches_from(make(data()), 0, None)]
            first = make(data())
            iterator = batches_from(first, 0, None)
            seen = [str(next(iterator)) for _ in range(3)]
            states, state = generator_states(first), loader_state(first)
            assert {it for it in states if it.startswith("dataset.")} == names
            second = make(data())
            batches = batches_from(second, 3, state)
            set_generator_states(second, states)
            assert seen + [str(batch) for batch in batches] == whole


def test_with_workers_a_data_sets_own_generators_are_not_taken_for_those_that_draw():
    assert not generator_states(make_loader(Own(), shuffle=False, seed=0, device=DEVICE, num_workers=1))
    assert not generator_states([1, 2])


def test_a_data_set_that_holds_itself_is_no_endless_walk():
    data = Own()
    data.dataset = data
    assert set(generator_states(DataLoader(data))) == {"dataset.rng"}


# ---------------------------------------------------------------------- other iterables


def test_an_iterable_with_a_state_goes_on_from_it():
    whole, seen, second = whole_and_parts(Batches, 4)
    assert seen == whole == list(range(9))
    assert second.iterated == 1
    assert replay_reason(second) is None


def test_without_its_state_it_is_replayed():
    assert list(batches_from(Batches(), 4, None)) == [4, 5, 6, 7, 8]


class OwnState:
    """Goes on where it was when it is asked for an iterator again."""

    place = 0

    def __iter__(self):
        while self.place < 6:
            self.place += 1
            yield torch.tensor([self.place])
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_loader(Tells(), shuffle=False, seed=1, device=DEVICE, batch_size=4),
        lambda: DataLoader(Tells(), batch_size=4),
        OwnState,
        lambda: make_loader(Reads(), shuffle=True, seed=1, device=DEVICE, batch_size=4),
        lambda: [[1], [2], [3], [4]],
    ],
    ids=["stream", "DataLoader", "own", "data set", "list"],
)
def test_a_pass_that_was_left_can_begin_again(make):
    loader = make()
    assert can_begin_again(loader)
    state = beginning(loader)
    first = [index_of(batch) for batch in batches_from(loader, 0, None)]
    for asked in (3, 1):
        left = batches_from(loader, 0, None)
        for _ in range(asked):
            next(left)
        begin_again(loader, state)
        assert [index_of(batch) for batch in batches_from(loader, 0, None)] == first


def index_of(batch):
    """What tells a batch from others, without its draws."""
    return as_list(batch)[0][0] if isinstance(as_list(batch)[0], list) else as_list(batch)


def test_an_iterator_cannot_begin_again_unless_it_has_a_state():
    assert not can_begin_again(iter([1, 2])) and not can_begin_again(it for it in [1])
    assert can_begin_again([1, 2]) and can_begin_again(OwnState())


def test_a_sequence_is_taken_by_index():
    class Costly(list):
        def __iter__(self):
            raise AssertionError("nothing before the step may be made")

    for step in (0, 2, 5):
        assert list(batches_from(Costly("abcde"), step, None)) == list("abcde")[step:]
    assert loader_state(["a"]) is None
    assert replay_reason(["a"]) is None


def test_an_iterator_is_replayed_before_the_call_returns():
    made = []

    def generate():
        for i in range(5):
            made.append(i)
            yield i

    batches = batches_from(generate(), 3, None)
    assert made == [0, 1, 2]
    assert list(batches) == [3, 4]
    assert loader_state(generate()) is None
    reason = replay_reason(generate())
    assert "the batches already used are read again" in reason and "a generator cannot save its position" in reason
    assert "give a torch Dataset" in reason


def test_a_step_beyond_the_end_leaves_nothing():
    for loader in ([1, 2], iter([1, 2]), DataLoader([1, 2]), make_loader([1, 2], shuffle=False, seed=0, device=DEVICE)):
        assert list(batches_from(loader, 5, None)) == []
