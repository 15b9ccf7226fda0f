"""Where a run stands comes back from a checkpoint: inside an epoch, inside its validation, or between two."""

import json

from amp_recipes.state.position import Position


class Loop:
    """The numbers that a loop saves beside its place; its snapshots are counted."""

    def __init__(self, step=0, optimizer_step=0, epoch=1):
        self.numbers = {"epoch": epoch, "step": step, "data": {"samples": 4 * step}, "optimizer_step": optimizer_step}
        self.snapshots = 0

    def snapshot(self, with_recipe):
        self.snapshots += 1
        return {"random": self.snapshots, "recipe": {} if with_recipe else None}

    def position(self):
        position = Position(self.snapshot)
        position.loop = self
        return position


def resumed(position):
    """A position, and its loop, of a process that starts from what `position` saves."""
    later = Loop()
    fresh = later.position()
    fresh.load_state_dict(json.loads(json.dumps({**position.loop.numbers, **position.state_dict()})))
    return fresh, later


def test_a_new_run_has_done_nothing():
    position = Loop().position()
    assert not position.is_done(1) and not position.inside_epoch and position.steps_done == 0
    assert position.take_place() is None and position.take_snapshot() is None and not position.take_only_validation()


def test_saved_inside_epoch_3_it_goes_on_in_epoch_3_after_the_done_batches_once():
    position = Loop(step=5).position()
    position.epoch_done(1)
    position.epoch_done(2)
    position.training_begins()
    fresh, _ = resumed(position)
    assert [epoch for epoch in range(1, 6) if not fresh.is_done(epoch)] == [3, 4, 5]
    assert fresh.inside_epoch and fresh.steps_done == 5
    place = fresh.take_place()
    assert (place.step, place.data) == (5, {"samples": 20})
    assert place.stage_start["random"] == 1 and place.now["random"] == 2  # taken when it began, and at the save
    assert fresh.take_place() is None and not fresh.inside_epoch and fresh.steps_done == 0


def test_saved_before_the_first_batch_of_an_epoch_has_come_the_epoch_is_not_over():
    position = Loop(epoch=2).position()
    position.training_begins()
    position.epoch_done(1)
    position.training_begins()
    fresh, _ = resumed(position)
    assert fresh.inside_epoch and not fresh.is_done(2) and fresh.is_done(1)
    assert fresh.steps_done == 0 and fresh.take_place().step == 0


def test_resumed_inside_an_epoch_and_saved_again_the_epoch_still_began_when_it_began():
    position = Loop(step=5).position()
    position.training_begins()
    fresh, loop = resumed(position)
    fresh.training_begins(resumed=fresh.take_place())
    loop.numbers["step"] = 9
    again, _ = resumed(fresh)
    place = again.take_place()
    assert place.step == 9 and place.stage_start["random"] == 1


def test_saved_between_epochs_the_next_one_begins_at_its_first_batch():
    position = Loop().position()
    position.epoch_done(1)
    position.epoch_done(2)
    fresh, _ = resumed(position)
    assert [epoch for epoch in range(1, 5) if not fresh.is_done(epoch)] == [3, 4]
    assert not fresh.inside_epoch and fresh.take_place() is None
    assert fresh.take_snapshot()["random"] == 1 and fresh.take_snapshot() is None


def test_saved_inside_a_validation_the_epoch_has_that_left_from_its_beginning():
    loop = Loop(epoch=2)
    position = loop.position()
    position.epoch_done(1)
    position.training_begins()
    position.epoch_done(2)
    position.validation_begins()
    loop.snapshots = 99  # draws and counters of the part of the validation that was done
    fresh, _ = resumed(position)
    assert [epoch for epoch in range(1, 5) if not fresh.is_done(epoch)] == [2, 3, 4]
    assert fresh.inside_epoch and fresh.take_place() is None
    assert fresh.take_snapshot()["random"] == 2  # as it was when the validation began
    assert fresh.take_only_validation() and not fresh.take_only_validation()
    fresh.validation_begins()
    again, _ = resumed(fresh)  # a second time in the same validation
    assert not again.is_done(2) and again.take_only_validation()


def test_saved_after_the_validation_the_epoch_is_over():
    position = Loop().position()
    position.epoch_done(1)
    position.validation_begins()
    position.validation_ends()
    fresh, _ = resumed(position)
    assert fresh.is_done(1) and not fresh.take_only_validation()


def test_an_epochs_loss_that_is_still_due_comes_back():
    for due in (None, 0.0, 0.75):
        position = Loop().position()
        position.epoch_loss_due = due
        assert resumed(position)[0].epoch_loss_due == due


def test_a_load_replaces_a_loss_that_was_due():
    saved, fresh = Loop().position(), Loop().position()
    fresh.epoch_loss_due = 0.5
    fresh.load_state_dict({**saved.loop.numbers, **saved.state_dict()})
    assert fresh.epoch_loss_due is None
