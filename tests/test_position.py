"""Where a run stands comes back from a checkpoint, inside an epoch or between two."""

import json

import pytest

from amp_recipes.position import Position


class Loop:
    """The numbers that a loop would hand in, and what it is given back."""

    def __init__(self, step=0, optimizer_step=0):
        self.numbers = {"epoch": 1, "step": step, "optimizer_step": optimizer_step}
        self.taken = None

    def position(self):
        return Position(lambda: self.numbers, lambda state: setattr(self, "taken", dict(state)))


def resumed(position):
    """A position, and its loop, of a process that starts from what `position` saves."""
    loop = Loop()
    fresh = loop.position()
    fresh.load_state_dict(json.loads(json.dumps(position.state_dict())))
    return fresh, loop


def test_a_new_run_has_done_nothing():
    position = Loop().position()
    assert not position.is_done(1) and not position.inside_epoch
    assert position.take_step() == 0


def test_the_loops_numbers_are_read_at_the_save_and_written_back_at_the_load():
    loop = Loop()
    position = loop.position()
    loop.numbers = {"epoch": 3, "step": 7, "optimizer_step": 42}  # moved since the position was made
    _, taken_by = resumed(position)
    assert {name: taken_by.taken[name] for name in loop.numbers} == loop.numbers


def test_saved_inside_epoch_3_it_goes_on_in_epoch_3_after_the_done_batches_once():
    position = Loop(step=5).position()
    position.epoch_done(1)
    position.epoch_done(2)
    fresh, _ = resumed(position)
    assert [epoch for epoch in range(1, 6) if not fresh.is_done(epoch)] == [3, 4, 5]
    assert fresh.inside_epoch
    assert fresh.take_step() == 5
    assert fresh.take_step() == 0 and not fresh.inside_epoch  # epoch 4 begins at its first batch


def test_saved_inside_the_first_epoch_no_epoch_is_done():
    fresh, _ = resumed(Loop(step=2).position())
    assert not fresh.is_done(1) and fresh.inside_epoch and fresh.take_step() == 2


def test_saved_between_epochs_the_next_one_begins_at_its_first_batch():
    position = Loop(step=0).position()
    position.epoch_done(2)
    fresh, _ = resumed(position)
    assert [epoch for epoch in range(1, 5) if not fresh.is_done(epoch)] == [3, 4]
    assert not fresh.inside_epoch and fresh.take_step() == 0


def test_resumed_twice_it_stands_where_the_second_run_stood():
    position = Loop(step=5).position()
    position.epoch_done(1)
    fresh, loop = resumed(position)
    fresh.take_step()
    fresh.epoch_done(2)
    loop.numbers["step"] = 9
    again, _ = resumed(fresh)
    assert again.is_done(2) and not again.is_done(3) and again.take_step() == 9


def test_a_new_fit_forgets_epochs_and_batches_of_the_last():
    fresh, _ = resumed(Loop(step=5).position())
    fresh.epoch_done(4)
    fresh.start_afresh()
    assert not fresh.is_done(1) and not fresh.inside_epoch and fresh.take_step() == 0


def test_a_new_fit_forgets_a_loss_that_the_last_left_due():
    position = Loop().position()
    position.epoch_loss_due = 0.5
    position.start_afresh()
    assert position.epoch_loss_due is None


@pytest.mark.parametrize("due", [None, 0.0, 0.75])
def test_an_epochs_loss_that_is_still_due_comes_back(due):
    position = Loop().position()
    position.epoch_loss_due = due
    assert resumed(position)[0].epoch_loss_due == due


def test_a_load_replaces_a_loss_that_was_due():
    saved, fresh = Loop().position(), Loop().position()
    fresh.epoch_loss_due = 0.5
    fresh.load_state_dict(saved.state_dict())
    assert fresh.epoch_loss_due is None
