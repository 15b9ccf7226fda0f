"""Several processes in step: uneven ends, weights over all, an end that all agree on, and each one's own state."""

import itertools
import logging
import math
import os
import signal
from contextlib import suppress
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from inside import run_of
from pairwise import extended, pairwise
from processes import in_processes
from torch import nn
from torch_release import skip_where_unknown

from amp_recipes import Brain, EpochCounter, Stage, distributed
from amp_recipes.distributed import AsyncGather, synced_window
from amp_recipes.errors import DataError, RecipeError
from amp_recipes.interrupts import RunInterrupted

RATE = 0.1


class Regression(Brain):
    """Each batch is (inputs, targets); what it counts for, where the option says so, is its number of samples."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        self.add_metric("samples_seen", len(batch[0]), 1e-9)  # a sum, that is, over a count that is known
        return nn.functional.mse_loss(predictions, batch[1])


class Weighted(Regression):
    def batch_weight(self, batch):
        return float(len(batch[0]))


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def samples(count):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, 3, generator=generator)
    return list(zip(x, x.sum(1, keepdim=True).sin(), strict=True))


def make(kind=Regression, **options):
    return kind({"model": model()}, lambda p: torch.optim.SGD(p, RATE), run_opts={"device": "cpu", **options})


def weights(brain):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in brain.modules.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


# ---------------------------------------------------------------------- uneven ends


def uneven(rank, kind, lengths, accumulate, batch_sizes=None, strategy="ddp"):
    """Rank r has lengths[r] batches of its own."""
    brain = make(kind, grad_accumulation_factor=accumulate, max_grad_norm=0.0, strategy=strategy)
    own = [[torch.stack(it) for it in zip(*batch, strict=True)] for batch in batches_of(rank, lengths, batch_sizes)]
    losses = []
    brain.on_stage_end = lambda stage, loss, epoch=None: losses.append((stage.name, loss, dict(brain.stage_metrics)))
    brain.fit(range(1), Iterated(own), Iterated(own), progressbar=False)
    return weights(brain), brain.optimizer_step, losses


class Iterated:
    """Batches without a length, which may be none."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches_of(rank, lengths, batch_sizes):
    made, data, at = [], samples(100), 0
    for owner, length in enumerate(lengths):
        for index in range(length):
            size = 2 if batch_sizes is None else batch_sizes[(owner + index) % len(batch_sizes)]
            if owner == rank:
                made.append(data[at : at + size])
            at += size
    return made


def by_hand(weighs, lengths, accumulate, batch_sizes=None):
    """One process: in each window the batches of all, as long as they have any."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    of_ranks = [batches_of(rank, lengths, batch_sizes) for rank in range(len(lengths))]
    updates = 0
    for start in range(0, max(lengths), accumulate):
        window = [batch for own in of_ranks for batch in own[start : start + accumulate]]
        total = sum(len(batch) for batch in window) if weighs else len(window)
        for batch in window:
            x, y = (torch.stack(it) for it in zip(*batch, strict=True))
            (nn.functional.mse_loss(net(x), y) * (len(batch) if weighs else 1) / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
    everything = [sample for own in of_ranks for batch in own for sample in batch]
    with torch.no_grad():
        x, y = (torch.stack(it) for it in zip(*everything, strict=True))
        loss = nn.functional.mse_loss(net(x), y).item()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), updates, loss, len(everything)


WAYS = ["ddp", "fsdp"], [Regression, Weighted], [1, 2]


@pytest.mark.parametrize(
    ("strategy", "kind", "accumulate", "lengths"),
    [*pairwise(*WAYS, [(5, 3), (1, 6)]), *(extended(*way) for way in product(*WAYS, [(2, 3, 7, 1)]))],
    ids=str,
)
def test_ranks_with_unequal_data_equal_one_process_with_all_of_it(strategy, kind, accumulate, lengths):
    skip_where_unknown(strategy)
    sizes = (2, 3, 1)
    found = in_processes(uneven, len(lengths), kind, lengths, accumulate, sizes, strategy)
    expected, updates, loss, count = by_hand(kind is Weighted, lengths, accumulate, sizes)
    for of_rank, steps, ends in found:
        torch.testing.assert_close(of_rank, expected, rtol=2e-6, atol=1e-7)
        assert torch.equal(of_rank, found[0][0]) and steps == updates
        (_, _, trained), (_, validated, tested) = ends
        assert validated == pytest.approx(loss, rel=1e-6)  # by default a batch weighs its samples in averages
        for metrics in (trained, tested):  # each sample once
            assert metrics["samples_seen"] == pytest.approx(count / sum(lengths) * 1e9, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "lengths"),
    [("ddp", (1, 0)), ("fsdp", (0, 2)), extended("ddp", (0, 2)), extended("fsdp", (1, 0))],
    ids=str,
)
def test_a_rank_without_any_batch_keeps_up_with_anothers(lengths, strategy):
    skip_where_unknown(strategy)
    found = in_processes(uneven, 2, Regression, lengths, 1, (2,), strategy)
    expected, updates, loss, _ = by_hand(False, lengths, 1, (2,))
    for of_rank, steps, ends in found:
        torch.testing.assert_close(of_rank, expected, rtol=2e-6, atol=1e-7)
        assert steps == updates and ends[1][1] == pytest.approx(loss, rel=1e-6)


# ---------------------------------------------------------------------- windows that need no message


class Counted(Iterated):
    """Batches of a number that is known, or said to be."""

    def __init__(self, batches, length=None):
        super().__init__(batches)
        self.length = len(batches) if length is None else length

    def __len__(self):
        return self.length


def set_clock(seconds):
    """Each look at the clock finds so many seconds more."""
    ticks = itertools.count()
    synced_window.time = SimpleNamespace(monotonic=lambda: seconds * next(ticks))


def few_messages(rank, kind, lengths, seconds, told=None, accumulate=1, strategy="ddp", **options):
    """seconds: between two looks of a rank at its clock; told: what the training sets say of their lengths."""
    set_clock(seconds[rank])
    messages = []
    send = synced_window.AsyncGather
    synced_window.AsyncGather = lambda numbers: messages.append(numbers) or send(numbers)
    brain = make(kind, grad_accumulation_factor=accumulate, max_grad_norm=0.0, strategy=strategy, **options)
    own = [[torch.stack(it) for it in zip(*batch, strict=True)] for batch in batches_of(rank, lengths, (2, 3, 1))]
    brain.fit(range(1), Counted(own, told and told[rank]), progressbar=False)
    return weights(brain), brain.optimizer_step, brain.summary.samples, len(messages)


FAST, SLOW = (1e-3, 1e-3), (1e-3, 1.0)


@pytest.mark.parametrize(
    ("kind", "lengths", "seconds", "accumulate", "strategy", "messages"),
    [
        # Windows 0, 1 (where it is known how long one takes), 18, 19 (the last, which may not be full), and the end.
        (Regression, (20, 20), FAST, 1, "ddp", 5),
        (Regression, (9, 7), FAST, 2, "ddp", 5),  # 0, 1, then 3 and 4, which are not full everywhere, and the end
        extended(Regression, (9, 7), FAST, 2, "fsdp", 5),
        (Regression, (7, 6), SLOW, 1, "ddp", 8),
        (Weighted, (7, 6), FAST, 1, "ddp", 8),
    ],
    ids=str,
)
def test_a_message_holds_for_windows_of_which_all_know(kind, lengths, seconds, accumulate, strategy, messages):
    found = in_processes(few_messages, 2, kind, lengths, seconds, None, accumulate, strategy)
    expected, updates, _, samples = by_hand(kind is Weighted, lengths, accumulate, (2, 3, 1))
    for of_rank, *numbers in found:
        torch.testing.assert_close(of_rank, expected, rtol=2e-6, atol=1e-7)
        assert torch.equal(of_rank, found[0][0]) and numbers == [updates, samples, messages]


def test_a_length_may_be_too_short():
    found = in_processes(few_messages, 2, Regression, (9, 9), FAST, (9, 5))
    expected, *_ = by_hand(False, (9, 9), 1, (2, 3, 1))
    for of_rank, *_ in found:
        torch.testing.assert_close(of_rank, expected, rtol=2e-6, atol=1e-7)


def fewer_than_certain(rank):
    """Six windows are certain; rank 1 comes to its end after four."""
    set_clock(FAST[rank])
    windows = synced_window.SyncedWindows(weighted=False, certain_batches=12, per_window=2)
    lengths = [2, 2, 2, 2, 2] if rank == 0 else [2, 2, 2, 2, 1]
    try:
        return [windows.take([1.0] * length, length, lambda: (0, False)).share(0) for length in lengths]
    except DataError as error:
        return str(error)


def test_a_length_that_is_too_long_is_an_error():
    waiting, ended = in_processes(fewer_than_certain, 2)
    assert waiting == [(1.0, 2.0)] * 5
    assert ended.startswith("the training set yields fewer batches than its __len__ says")


def tried(rank):
    _, *numbers = few_messages(rank, Regression, (9, 9), FAST, debug=True, debug_batches=4)
    return numbers


def test_a_trial_of_few_batches_counts_on_no_more():
    samples = sum(len(batch) for rank in range(2) for batch in batches_of(rank, (9, 9), (2, 3, 1))[:4])
    assert in_processes(tried, 2) == [[4, samples, 4]] * 2


def nothing_at_all(rank):
    make().fit(range(1), iter(()), progressbar=False)


def test_no_batch_anywhere_is_an_error_on_all():
    with pytest.raises(AssertionError, match=r"(?s)rank 0.*has no batches.*rank 1.*has no batches"):
        in_processes(nothing_at_all, 2)


def forwards_and_reads(rank):
    """What happens in the second window: the first has to learn who has a batch at all."""
    events, read = [], AsyncGather.read

    class Notes(Regression):
        def compute_forward(self, batch, stage):
            events.append("forward")
            return super().compute_forward(batch, stage)

    AsyncGather.read = lambda gathered: [events.append("read"), read(gathered)][1]
    brain = make(Notes)
    brain.on_fit_batch_end = lambda *_: events.append("end")
    x, y = samples(4)[0]
    brain.fit(range(1), [(x[None], y[None])] * 3, progressbar=False)
    after_first = events.index("end") + 1
    return events[after_first : events.index("end", after_first)]


def test_a_window_does_not_wait_for_the_others_before_its_forward():
    for events in in_processes(forwards_and_reads, 2):
        assert "read" in events and events[0] == "forward"


# ---------------------------------------------------------------------- each sample once


SEEN = []  # of this process; not of the Brain, which a checkpoint would remember


class Remembers(Regression):
    """Keeps the numbers of the samples that it was given, by stage."""

    def compute_objectives(self, predictions, batch, stage):
        if run_of(self).window.counts:
            SEEN.extend((stage.name, run_of(self).current.epoch, int(number)) for number in batch[2])
        return super().compute_objectives(predictions, batch, stage)


class Numbered(torch.utils.data.Dataset):
    def __init__(self, count):
        self.items = samples(count)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return *self.items[index], torch.tensor(index)


def numbered(rank, count, accumulate):
    brain = make(Remembers, grad_accumulation_factor=accumulate, seed=5)
    data = Numbered(count)
    brain.fit(range(1, 3), data, data, False, {"batch_size": 2, "shuffle": True}, {"batch_size": 2})
    brain.evaluate(data, progressbar=False, test_loader_kwargs={"batch_size": 2})
    return SEEN


@pytest.mark.parametrize(
    ("processes", "count", "accumulate"),
    [
        *((2, count, 2) for count in (9, 11)),
        (2, 21, 1),  # the last batch is rank 0's alone
        *(extended(*it, 2) for it in product([2, 4], [8, 9, 11, 13]) if it not in [(2, 9), (2, 11)]),
    ],
)
def test_every_sample_counts_once_in_each_stage(processes, count, accumulate):
    of_ranks = in_processes(numbered, processes, count, accumulate)
    together = sorted(item for own in of_ranks for item in own)
    stages = [("TEST", None), *(("TRAIN", epoch) for epoch in (1, 2)), *(("VALID", epoch) for epoch in (1, 2))]
    expected = sorted(((name, epoch, n) for name, epoch in stages for n in range(count)), key=str)
    assert sorted(together, key=str) == expected


# ---------------------------------------------------------------------- an end that all agree on


class Interrupted(Regression):
    """Sends itself a signal, on one rank, at one batch of one stage."""

    def compute_forward(self, batch, stage):
        rank, in_stage, at = self.hparams.signal_at
        if (distributed.rank(), stage.name, self.step) == (rank, in_stage, at) and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.hparams.number)
        return super().compute_forward(batch, stage)


def interrupted(rank, folder, signal_at, number=signal.SIGTERM):
    torch.manual_seed(0)
    runs = {"first": signal_at, "second": (9, "TRAIN", 0)}
    told = []
    for at in runs.values():
        hparams = {"signal_at": at, "number": int(number)}
        brain = Interrupted(
            {"model": model()},
            lambda p: torch.optim.SGD(p, RATE),
            hparams,
            {"device": "cpu", "output_folder": folder, "seed": 1},
        )
        brain.sent = False
        data = Numbered(24)
        try:
            brain.fit(EpochCounter(3), data, data, False, {"batch_size": 2, "shuffle": True}, {"batch_size": 2})
            told.append(("over", brain.optimizer_step, weights(brain)))
        except RunInterrupted as ended:
            told.append((ended.code, brain.optimizer_step, weights(brain)))
    return told


def uninterrupted(rank):
    brain = make(seed=1)
    data = Numbered(24)
    brain.fit(EpochCounter(3), data, data, False, {"batch_size": 2, "shuffle": True}, {"batch_size": 2})
    return weights(brain), brain.optimizer_step


@pytest.fixture(scope="module")
def whole_of_signals():
    return in_processes(uninterrupted, 2)


@pytest.mark.parametrize(
    "signal_at",
    [
        (1, "TRAIN", 3),
        (0, "VALID", 6),
        pytest.param((0, "TRAIN", 3), marks=pytest.mark.extended),
        pytest.param((1, "TRAIN", 6), marks=pytest.mark.extended),
        pytest.param((1, "VALID", 2), marks=pytest.mark.extended),
    ],
)
def test_a_signal_on_one_rank_saves_and_ends_all_at_the_same_place(tmp_path, signal_at, whole_of_signals):
    found = in_processes(interrupted, 2, str(tmp_path / "run"), signal_at)
    stopped, resumed = zip(*found, strict=True)
    assert [code for code, *_ in stopped] == [143, 143]
    assert stopped[0][1] == stopped[1][1] < 18 and torch.equal(stopped[0][2], stopped[1][2])
    for (end, steps, now), (expected, all_steps) in zip(resumed, whole_of_signals, strict=True):
        assert (end, steps) == ("over", all_steps) and torch.equal(now, expected)


@pytest.mark.parametrize("rank", [1, extended(0)])
def test_any_end_signal_on_one_rank_ends_all_with_its_code(tmp_path, rank):
    found = in_processes(interrupted, 2, str(tmp_path / "run"), (rank, "TRAIN", 3), signal.SIGUSR2)
    assert [first[0] for first, _ in found] == [128 + signal.SIGUSR2] * 2


def saving_at_a_signal(rank, folder, signal_at):
    options = {"device": "cpu", "output_folder": folder, "seed": 1, "save_signals": ["SIGUSR2"]}
    hparams = {"signal_at": signal_at, "number": int(signal.SIGUSR2)}
    brain = Interrupted({"model": model()}, lambda p: torch.optim.SGD(p, RATE), hparams, options)
    brain.sent = False
    saved = []
    save_inside_epoch = run_of(brain).checkpoints.save_inside_epoch
    run_of(brain).checkpoints.save_inside_epoch = lambda meta: [saved.append(meta["step"]), save_inside_epoch(meta)]
    data = Numbered(24)
    brain.fit(EpochCounter(3), data, data, False, {"batch_size": 2, "shuffle": True}, {"batch_size": 2})
    return saved, weights(brain), brain.optimizer_step


@pytest.mark.parametrize(("rank", "step"), [(1, 1), extended(1, 2), extended(0, 2)])
def test_a_signal_on_one_rank_that_means_save_and_go_on_saves_once_on_all(tmp_path, rank, step, whole_of_signals):
    found = in_processes(saving_at_a_signal, 2, str(tmp_path / "run"), (rank, "TRAIN", step))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 1 and 2 <= found[0][0][0] <= 6
    for (_, now, steps), (expected, all_steps) in zip(found, whole_of_signals, strict=True):
        assert steps == all_steps and torch.equal(now, expected)


# ---------------------------------------------------------------------- each one's own state


class Draws(Regression):
    """Notes what each rank draws, and adds up a metric."""

    def compute_objectives(self, predictions, batch, stage):
        if stage is Stage.TRAIN:
            self.drawn = [*getattr(self, "drawn", []), torch.rand(()).item()]
        return super().compute_objectives(predictions, batch, stage)


def note_end(brain, ends, stage, loss, epoch=None):
    ends.append((loss, dict(brain.stage_metrics)))


def draws(rank, folder):
    brain = make(Draws, seed=1, ckpt_interval_steps=1, **({"output_folder": folder} if folder else {}))
    ends = []
    brain.on_stage_end = partial(note_end, brain, ends)
    brain.fit(EpochCounter(2), Numbered(16), None, False, {"batch_size": 2, "shuffle": True})
    return brain.drawn, ends


@pytest.fixture(scope="module")
def whole_of_draws():
    """What each rank draws, and the ends of its epochs, in a run without a folder that nothing interrupts."""
    return in_processes(draws, 2, None)


def test_each_rank_draws_its_own_numbers_and_goes_on_with_them(tmp_path, whole_of_draws):
    assert not set(whole_of_draws[0][0]) & set(whole_of_draws[1][0])  # not the same dropout everywhere
    first = in_processes(draws, 2, str(tmp_path / "run"))
    assert [drawn for drawn, _ in first] == [drawn for drawn, _ in whole_of_draws]


def killed(rank, folder):
    """Ends in the middle of an epoch; its last checkpoint is of the update before."""
    brain = make(Draws, output_folder=folder, seed=1, ckpt_interval_steps=1, ckpt_background=False)
    fit_batch, taken = brain.fit_batch, []

    def until_the_fourth(batch):
        taken.append(batch)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return fit_batch(batch)

    brain.fit_batch = until_the_fourth
    with pytest.raises(KeyboardInterrupt):
        brain.fit(EpochCounter(2), Numbered(16), None, False, {"batch_size": 2, "shuffle": True})
    return brain.drawn


def test_a_resume_gives_each_rank_its_own_state_back(tmp_path, whole_of_draws):
    before = in_processes(killed, 2, str(tmp_path / "run"))
    after = in_processes(draws, 2, str(tmp_path / "run"))
    for own, drawn, resumed in zip(whole_of_draws, before, after, strict=True):
        assert own[0][: len(drawn)] == drawn and len(drawn) == 3
        assert resumed[0] == own[0]  # what the recipe remembers came back too
        assert resumed[1] == own[1]  # losses and metrics of the epoch that was interrupted


@pytest.mark.parametrize("counts", [(2, 1, 2), extended((2, 4, 1)), extended((1, 2, 4))], ids=str)
def test_another_number_of_processes_goes_on_with_the_samples_that_are_left(tmp_path, counts):
    seen = []
    for index, count in enumerate(counts):
        seen.append(in_processes(some, count, str(tmp_path / "run"), index + 1 if index < 2 else None))
    numbers = sorted(n for of_ranks in seen for own, _ in of_ranks for n in own)
    assert numbers == list(range(40))
    losses = {loss for _, loss in seen[-1]}
    assert len(losses) == 1 and all(map(math.isfinite, losses))
    assert seen[0] != seen[1] != seen[2]


def some(rank, folder, updates):
    """Up to so many updates more than those of earlier calls, then ends without going through the epoch's end."""
    brain = make(Remembers, output_folder=folder, seed=1, ckpt_interval_steps=1, ckpt_background=False)
    ends = []
    brain.on_stage_end = lambda stage, loss, epoch=None: ends.append(loss)
    fit_batch, taken = brain.fit_batch, []

    def until(batch):
        taken.append(batch)
        if updates is not None and len(taken) > updates:
            raise KeyboardInterrupt
        return fit_batch(batch)

    brain.fit_batch = until
    with suppress(KeyboardInterrupt):
        brain.fit(EpochCounter(1), Numbered(40), None, False, {"batch_size": 2, "shuffle": True})
    return [n for _, _, n in SEEN], ends[0] if ends else None


# ---------------------------------------------------------------------- data that is not divided


KINDS = ["dataset", "stream", "list", "loader", "divided loader"]


def undivided(rank):
    return [lines_of(kind) for kind in KINDS]


def lines_of(kind):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("amp_recipes").addHandler(handler)
    data = Numbered(8)
    given = {
        "dataset": lambda: data,
        "stream": lambda: Stream(data),
        "list": lambda: list(torch.utils.data.DataLoader(data, batch_size=2)),
        "loader": lambda: torch.utils.data.DataLoader(data, batch_size=2, shuffle=True),
        "divided loader": lambda: torch.utils.data.DataLoader(
            data, batch_size=2, sampler=torch.utils.data.DistributedSampler(data)
        ),
    }[kind]()
    kwargs = {"batch_size": 2} if kind in ("dataset", "stream") else {}
    make().fit(range(1), given, None, False, kwargs)
    logging.getLogger("amp_recipes").removeHandler(handler)
    return [text for text in told if "read" in text]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


def test_data_that_every_process_would_read_whole_is_told(subtests):
    of_kinds, _ = in_processes(undivided, 2)  # the first process speaks for all
    for kind, told in zip(KINDS, of_kinds, strict=True):
        with subtests.test(kind):
            if kind in ("stream", "list"):
                assert len(told) == 1 and told[0].startswith("all 2 processes start with the same batch")
            elif kind == "loader":
                assert told and told[0].startswith(
                    "Training set is a DataLoader that does not divide its data among processes"
                )
            else:
                assert told == []


# ---------------------------------------------------------------------- what would let processes drift apart


class Untimely(Regression):
    """An optimizer, a schedule, an average or weights that differ by rank, unless somebody sees to it."""

    def init_optimizers(self):
        super().init_optimizers()
        if self.hparams.stranger is not None:
            self.optimizer.add_param_group({"params": list(self.hparams.stranger.parameters())})


def half_way(optimizer, total_updates):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_updates)


def drifting_in_turn(rank):
    return {what: drifting(rank, what, (5, 3)) for what in ("schedule", "average", "evaluation")}


def drifting(rank, what, lengths):
    torch.manual_seed(rank)  # as without the option `seed`: each process has weights of its own
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    hparams = {"stranger": nn.Linear(1, 1) if what == "stranger" else None}
    hparams |= {"lr_scheduler": half_way} if what == "schedule" else {}
    options = {"device": "cpu"} | ({"ema_decay": 0.9} if what == "average" else {})
    brain = Untimely({"model": net}, lambda p: torch.optim.SGD(p, RATE), hparams, options)
    own = [[torch.stack(it) for it in zip(*batch, strict=True)] for batch in batches_of(rank, lengths, None)]
    same = [torch.stack(it) for it in zip(*samples(6), strict=True)]
    if what == "evaluation":
        return brain.evaluate([same], progressbar=False), weights(brain)
    try:
        brain.fit(range(1), own, [same], progressbar=False)
    except RecipeError as error:
        return str(error)
    average = run_of(brain).ema.state_dict() if what == "average" else {}
    return brain.summary.last["valid"]["loss"], weights(brain), *average.values()


def test_all_processes_have_the_same_model(subtests):
    firsts, seconds = in_processes(drifting_in_turn, 2)
    for what, first in firsts.items():
        with subtests.test(what):
            assert len(first) > 1 and first[0] == seconds[what][0]
            assert all(torch.equal(mine, yours) for mine, yours in zip(first[1:], seconds[what][1:], strict=True))


def test_an_optimizer_of_what_nobody_averages_is_refused():
    for told in in_processes(drifting, 2, "stranger", (2, 2)):
        assert "trains 2 parameters that are not in the Brain's modules (the first has shape (1, 1))" in told


def nan_at_the_end(rank):
    brain = make(nonfinite_patience=2, max_grad_norm=0.0)
    own = [[torch.stack(it) for it in zip(*batch, strict=True)] for batch in batches_of(rank, (2, 7), None)]
    if rank == 0:
        own[-1][0] = own[-1][0] * torch.nan
    brain.fit(range(1), own, progressbar=False)
    return brain.optimizer_step, brain.skipped_steps


def test_a_last_batch_that_is_not_finite_skips_its_own_update_alone():
    assert in_processes(nan_at_the_end, 2) == [(6, 1)] * 2


class Fails:
    """A recoverable that cannot be saved, in one process."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank == 1:
            raise ValueError("no state here")
        return {}

    def load_state_dict(self, state):
        pass


def failing_state(rank, folder):
    brain = make(output_folder=folder)
    brain.checkpointer.add_recoverable("fails", Fails(rank))
    brain.fit(EpochCounter(1), Numbered(8), None, False, {"batch_size": 2})


def test_a_state_that_cannot_be_saved_in_one_process_is_an_error_on_all(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 0.*no state here.*rank 1.*no state here"):
        in_processes(failing_state, 2, str(tmp_path / "run"))


# ---------------------------------------------------------------------- a module that only some micro-batches use


class Alternates(Regression):
    """Odd batches go through both modules, even ones through the first alone."""

    def compute_forward(self, batch, stage):
        first = self.modules.model(batch[0])
        return first + self.modules.beside(batch[0]) if len(batch[0]) % 2 else first


def alternating(rank, strategy):
    torch.manual_seed(3)
    modules = {"model": nn.Linear(3, 1), "beside": nn.Linear(3, 1)}
    options = {"device": "cpu", "strategy": strategy, "grad_accumulation_factor": 2, "max_grad_norm": 0.0}
    brain = Alternates(modules, lambda p: torch.optim.SGD(p, RATE), run_opts=options)
    own = [[torch.stack(it) for it in zip(*batch, strict=True)] for batch in batches_of(rank, (4, 4), (1, 2))]
    brain.fit(range(1), own if rank == 0 else own[1:] + own[:1], progressbar=False)
    return weights(brain), brain.optimizer_step


def test_a_module_that_an_earlier_micro_batch_used_is_averaged():
    """Under ddp only a window's last backward averages; there the loss does not depend on it."""
    (first, steps), (second, _) = in_processes(alternating, 2, "ddp")
    torch.manual_seed(3)
    model, beside = nn.Linear(3, 1), nn.Linear(3, 1)
    parameters = [*model.parameters(), *beside.parameters()]
    optimizer = torch.optim.SGD(parameters, RATE)
    of_ranks = [batches_of(rank, (4, 4), (1, 2)) for rank in range(2)]
    of_ranks[1] = of_ranks[1][1:] + of_ranks[1][:1]
    for start in (0, 2):
        for batch in of_ranks[0][start : start + 2] + of_ranks[1][start : start + 2]:
            x, y = (torch.stack(it) for it in zip(*batch, strict=True))
            found = model(x) + beside(x) if len(batch) % 2 else model(x)
            (nn.functional.mse_loss(found, y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert steps == 2 and torch.equal(first, second)
    torch.testing.assert_close(first, torch.cat([p.detach().flatten() for p in parameters]), rtol=2e-6, atol=1e-7)
