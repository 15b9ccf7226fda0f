"""What follows from an update follows once, in order, and not before the device has told its outcome."""

from types import SimpleNamespace

import pytest
import torch

from amp_recipes.loop.window import PendingWindows, Window
from amp_recipes.precision import Update
from amp_recipes.precision.host_copy import HostCopy

CPU = torch.device("cpu")


class Pending:
    """An update whose verdict is known at once, or only when it is read."""

    def __init__(self, journal, name, losses=(1.0,), known=True, taken=True):
        self.journal, self.name, self.known = journal, name, known
        self.losses = len(losses)
        self.update = Update(taken=taken, losses=list(losses), grad_norms={}, scale=None)

    def read(self):
        self.journal.append(f"read {self.name}")
        return self.update


def window_of(weights):
    """A window of as many batches, which count for so much."""
    return Window(None, shares=SimpleNamespace(weights=weights, samples=len(weights)))


class Journal(list):
    """A queue of windows that writes down what it calls."""

    def __init__(self, on_update=None, on_window=None):
        super().__init__()
        self.windows = []
        self.then_update, self.then_window = on_update, on_window
        self.pending = PendingWindows(CPU, [self])

    def on_update(self, update, window):
        self.append(f"update at {window.step} with {window.rates}")
        assert window.last is update
        if self.then_update:
            self.then_update(self.pending)

    def on_window(self, window):
        self.append(f"window at {window.step}")
        self.windows.append(window)
        if self.then_window:
            self.then_window(self.pending)

    def taken(self):
        """What was written since the last look."""
        entries = self[:]
        self.clear()
        return entries

    def iteration(self, step, known=True, **kwargs):
        """One batch, one update made from its loss."""
        self.pending.open(window_of([1.0]))
        self.pending.add(Pending(self, step, known=known, **kwargs), {"lr": step}, step)
        self.pending.end([torch.tensor(1.0)], step, as_differentiated=True)


def losses_of(window):
    return [float(loss) for loss in window.losses]


def test_a_known_verdict_is_followed_at_once_and_the_window_once_it_has_ended():
    journal = Journal()
    journal.pending.open(window_of([2.0]))
    journal.pending.add(Pending(journal, "a"), {"lr": 0.1}, 1)
    assert journal.taken() == ["read a", "update at 1 with {'lr': 0.1}"]
    journal.pending.end([torch.tensor(1.0)], 2, as_differentiated=True)
    assert journal.taken() == ["window at 2"]
    assert len(journal.pending) == 0
    assert journal.windows[0].weights == [2.0]


def test_a_late_verdict_is_not_read_before_settle_and_then_followed_in_order():
    journal = Journal()
    journal.iteration(1, known=False)
    journal.iteration(2, known=False)
    assert journal == [] and len(journal.pending) == 2
    journal.pending.settle()
    expected = ["read 1", "update at 1 with {'lr': 1}", "window at 1", "read 2", "update at 2 with {'lr': 2}"]
    assert journal.taken() == [*expected, "window at 2"]
    journal.pending.settle()
    assert journal == [] and len(journal.pending) == 0


def test_settled_in_the_middle_of_a_window_its_end_still_follows_later():
    journal = Journal()
    journal.pending.open(window_of([1.0, 1.0]))
    journal.pending.add(Pending(journal, "a", known=False), {}, 1)
    journal.pending.settle()
    assert journal.taken() == ["read a", "update at 1 with {}"]
    assert len(journal.pending) == 1
    journal.pending.add(Pending(journal, "b", known=False), {}, 2)
    journal.pending.end([torch.tensor(1.0), torch.tensor(2.0)], 2, as_differentiated=False)
    assert journal == []
    journal.pending.settle()
    assert journal.taken() == ["read b", "update at 2 with {}", "window at 2"]


def test_a_known_verdict_after_a_late_one_waits_for_its_turn():
    journal = Journal()
    journal.iteration(1, known=False)
    journal.iteration(2, known=True)
    entries = [entry.split(" with")[0] for entry in journal.taken()]
    assert entries == ["read 1", "update at 1", "window at 1", "read 2", "update at 2", "window at 2"]


def test_each_of_two_updates_in_one_window_has_the_rates_that_it_used():
    journal = Journal()
    journal.pending.open(window_of([1.0]))
    journal.pending.add(Pending(journal, "critic", known=False), {"critic": 0.1}, 1)
    journal.pending.add(Pending(journal, "generator", known=False), {"generator": 0.2}, 1)
    journal.pending.settle()
    assert [entry for entry in journal.taken() if entry.startswith("update")] == [
        "update at 1 with {'critic': 0.1}",
        "update at 1 with {'generator': 0.2}",
    ]


@pytest.mark.parametrize("known", [True, False])
def test_callbacks_that_settle_are_not_entered_again(known):
    journal = Journal(on_update=PendingWindows.settle, on_window=PendingWindows.settle)
    for step in (1, 2):
        journal.iteration(step, known)
    journal.pending.settle()
    entries = [entry.split(" with")[0] for entry in journal]
    assert entries == ["read 1", "update at 1", "window at 1", "read 2", "update at 2", "window at 2"]


@pytest.mark.parametrize("where", ["on_update", "on_window"])
def test_after_a_callback_that_raised_the_rest_still_settles_and_repeats_nothing(where):
    def fail_once(pending):
        if journal.failures.pop():
            raise RuntimeError("out of patience")

    journal = Journal(**{where: fail_once})
    journal.failures = [False, True]
    journal.iteration(1, known=False)
    journal.iteration(2, known=False)
    with pytest.raises(RuntimeError, match="out of patience"):
        journal.pending.settle()
    journal.pending.settle()
    entries = [entry.split(" with")[0] for entry in journal]
    assert entries == ["read 1", "update at 1", "window at 1", "read 2", "update at 2", "window at 2"]


def test_clear_forgets_windows_ended_or_not():
    journal = Journal()
    journal.iteration(1, known=False)
    journal.pending.open(window_of([1.0]))
    journal.pending.add(Pending(journal, "left open", known=False), {}, 2)
    journal.pending.clear()
    journal.pending.settle()
    assert journal == [] and len(journal.pending) == 0
    journal.iteration(7)
    assert journal[-1] == "window at 7" and len(journal.windows) == 1


def test_a_step_without_gradients_is_a_step_but_no_update():
    journal = Journal()
    journal.pending.open(window_of([1.0]))
    journal.pending.add(None, {"lr": 1.0}, 1)
    journal.pending.end([torch.tensor(3.0)], 1, as_differentiated=True)
    assert journal.taken() == ["window at 1"]
    window = journal.windows[0]
    assert (window.stepped, window.taken, window.last, losses_of(window)) == (True, False, None, [3.0])


def test_a_window_in_which_nobody_stepped_says_so():
    journal = Journal()
    journal.pending.open(window_of([1.0]))
    journal.pending.end([torch.tensor(3.0)], 1, as_differentiated=False)
    assert not journal.windows[0].stepped and not journal.windows[0].taken


def test_a_window_is_taken_if_any_of_its_updates_was_and_last_is_the_last(subtests):
    for verdicts, taken in {(True, False): True, (False, True): True, (False, False): False}.items():
        with subtests.test(str(verdicts)):
            journal = Journal()
            journal.pending.open(window_of([1.0]))
            for index, verdict in enumerate(verdicts):
                journal.pending.add(Pending(journal, index, taken=verdict), {}, 1)
            journal.pending.end([torch.tensor(1.0)], 1, as_differentiated=False)
            assert journal.windows[0].taken is taken
            assert journal.windows[0].last.taken is verdicts[-1]


def test_fit_batch_called_without_fit_opens_a_window_by_itself():
    journal = Journal()
    journal.pending.add(Pending(journal, "a"), {}, 4)
    assert journal.taken() == ["read a", "update at 4 with {}"]


@pytest.fixture
def posts(monkeypatch):
    """How many numbers each copy to the host took."""
    counts = []
    post = HostCopy.post
    monkeypatch.setattr(HostCopy, "post", lambda self, vector: counts.append(vector.numel()) or post(self, vector))
    return counts


LOSSES = [
    (True, [2], []),  # one update took both losses, and carries them
    (False, [2], [2]),  # what fit_batch returned is not what was differentiated
    (True, [1, 1], [2]),  # two updates took one each
    (True, [3], [2]),  # the update was made from more than the batches' losses
    (True, [], [2]),  # no update
]


def test_the_losses_of_a_window_are_its_batches_and_copied_only_if_no_update_carries_them(host, posts, subtests):
    for as_differentiated, made_from, copies in LOSSES:
        with subtests.test(f"{as_differentiated}, {made_from}"):
            posts.clear()
            journal = Journal()
            journal.pending.open(window_of([1.0, 1.0]))
            for count in made_from:
                carried = [0.1, 0.2] if made_from == [2] and as_differentiated else [-1.0] * count
                journal.pending.add(Pending(journal, "a", carried, known=host == "at_once"), {}, 2)
            losses = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.1, 0.2)]
            journal.pending.end(losses, 2, as_differentiated)
            journal.pending.settle()
            assert losses_of(journal.windows[0]) == [0.1, 0.2]
            assert posts == copies


def test_losses_on_their_way_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(HostCopy, "immediate", False)
    journal = Journal()
    journal.pending.open(window_of([1.0]))
    journal.pending.add(Pending(journal, "a"), {}, 1)
    journal.pending.end([torch.tensor(2.0)], 1, as_differentiated=False)
    assert journal.windows == [] and len(journal.pending) == 1
    journal.pending.settle()
    assert losses_of(journal.windows[0]) == [2.0]
