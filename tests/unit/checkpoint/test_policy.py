"""When a run saves, what stays on the disk, and what it goes on from."""

import logging
import time
from types import SimpleNamespace

import pytest
from logged import logged
from programs import DEADLINE_SECONDS

from amp_recipes.checkpoint import Checkpointer, CheckpointPolicy, folder, policy
from amp_recipes.errors import CheckpointError


class Holder:
    """The smallest recoverable."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture(autouse=True)
def nothing_is_left_undone(caplog):
    """A checkpoint that could not be deleted is told in the log only."""
    yield
    assert not any("Could not delete" in record.getMessage() for record in caplog.get_records("call"))


@pytest.fixture
def clock(monkeypatch):
    """Stands still until it is moved, in minutes."""
    clock = SimpleNamespace(minutes=100.0)
    monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: clock.minutes * 60))
    return clock


def owned(tmp_path, writes=True, **recoverables):
    """A policy with a checkpointer of its own."""
    made = CheckpointPolicy(None, tmp_path, writes)
    for name, obj in recoverables.items():
        made.register(name, obj)
    return made


def recipes(tmp_path, **recoverables):
    """A policy of a recipe's checkpointer."""
    return CheckpointPolicy(Checkpointer(tmp_path, recoverables), tmp_path / "unused", writes=True)


def kept(tmp_path):
    """Epoch, or epoch and batch, of what lies on the disk; oldest first."""
    metas = [checkpoint.meta for checkpoint in reversed(Checkpointer(tmp_path).list_checkpoints())]
    return [(meta["epoch"], meta["step"]) if "step" in meta else meta["epoch"] for meta in metas]


def save_epochs(made, values, metric="loss", mode="min", first=1):
    for epoch, value in enumerate(values, first):
        made.save_epoch({"epoch": epoch, metric: value}, metric, mode)


# -------------------------------------------------------------- whose checkpointer


def test_without_a_folder_and_without_a_checkpointer_nothing_is_kept():
    made = CheckpointPolicy(None, None, writes=True)
    made.register("modules", Holder())
    made.save_epoch({"epoch": 1, "loss": 1.0}, "loss", "min")
    assert (made.checkpointer, made.owned) == (None, False)
    assert not made.due(1, made.clock_due(1e-9))
    assert made.resume() is None and made.load_for_evaluation(None, None, ["modules"]) is None


def test_a_recipes_checkpointer_wins_over_the_folder_and_is_not_saved_to_at_epoch_ends(tmp_path):
    made = recipes(tmp_path, model=Holder())
    assert not made.owned
    save_epochs(made, [3.0, 2.0])
    assert kept(tmp_path) == [] and not (tmp_path / "unused").exists()


# -------------------------------------------------------------- what stays


@pytest.mark.parametrize(
    ("mode", "losses", "expected"),
    [
        ("min", [3.0, 1.0, 2.0, 5.0], [2, 3, 4]),
        ("max", [3.0, 1.0, 2.0, 5.0], [3, 4]),
        ("max", [3.0, 1.0, 2.0, 1.0], [1, 3, 4]),
        ("min", [1.0, 1.0, 2.0, 3.0], [2, 3, 4]),  # of equals the newest
        ("min", [2.0, float("nan"), float("nan"), float("nan")], [1, 3, 4]),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_the_best_and_the_two_newest_epochs_stay(tmp_path, mode, losses, expected, background):
    made = CheckpointPolicy(None, tmp_path, writes=True, background=background)
    made.register("model", Holder())
    save_epochs(made, losses, mode=mode)
    assert kept(tmp_path) == expected


def test_a_process_that_does_not_write_leaves_no_trace_of_epochs(tmp_path):
    made = owned(tmp_path, writes=False, model=Holder())
    save_epochs(made, [1.0])
    assert not made.due(1, made.clock_due(1e-9))
    assert kept(tmp_path) == []


def test_of_the_checkpoints_inside_an_epoch_the_two_newest_stay_beside_best_and_newest(tmp_path):
    made = owned(tmp_path, model=Holder())
    save_epochs(made, [1.0, 2.0])
    for step, inside in ((10, [(3, 10)]), (20, [(3, 10), (3, 20)]), (30, [(3, 20), (3, 30)])):
        made.save_inside_epoch({"epoch": 3, "step": step})
        assert kept(tmp_path) == [1, 2, *inside]
    save_epochs(made, [3.0], first=3)
    assert kept(tmp_path) == [1, (3, 30), 3]


def test_while_it_is_not_to_delete_all_stay_and_the_next_save_clears_up(tmp_path):
    made = owned(tmp_path, model=Holder())
    save_epochs(made, [1.0])
    made.deletes = False
    for step in (10, 20, 30):
        made.save_inside_epoch({"epoch": 2, "step": step})
    save_epochs(made, [2.0, 3.0, 4.0], first=2)
    assert kept(tmp_path) == [1, (2, 10), (2, 20), (2, 30), 2, 3, 4]
    made.deletes = True
    made.save_inside_epoch({"epoch": 5, "step": 10})
    assert kept(tmp_path) == [1, 2, 3, 4, (5, 10)]
    save_epochs(made, [5.0], first=5)
    assert kept(tmp_path) == [1, (5, 10), 5]


def test_a_reload_takes_the_newest_in_the_midst_of_a_run(tmp_path):
    model = Holder("first")
    made = owned(tmp_path, model=model)
    save_epochs(made, [1.0])
    model.value = "second"
    made.due(5, False)
    made.reload()
    assert model.value == "first" and made.updates_since_save == 0
    model.value = "third"
    made.reload()  # not only once
    assert model.value == "first"


def test_the_end_of_an_epoch_takes_the_place_of_what_was_saved_inside_it(tmp_path):
    made = owned(tmp_path, model=Holder())
    made.save_inside_epoch({"epoch": 1, "step": 10})
    save_epochs(made, [1.0])
    assert kept(tmp_path) == [(1, 10), 1]
    made.save_inside_epoch({"epoch": 2, "step": 10})
    assert kept(tmp_path) == [1, (2, 10)]


def test_if_the_newest_is_damaged_the_one_before_is_there_to_go_on_from(tmp_path):
    model = Holder()
    made = owned(tmp_path, model=model)
    for epoch in (1, 2, 3):
        model.value = epoch
        save_epochs(made, [float(epoch)], first=epoch)
    made.wait()
    (tmp_path / "CKPT+000003" / "model.safetensors").write_bytes(b"")
    fresh = owned(tmp_path, model=model)
    with logged(r"CKPT\+000003 is damaged"):
        assert fresh.resume().meta["epoch"] == 2
    assert model.value == 2


def test_a_new_checkpoint_is_whole_before_the_old_one_goes(tmp_path):
    class Failing(Holder):
        def state_dict(self):
            raise OSError("disk is full")

    made = owned(tmp_path, model=Holder())
    made.save_inside_epoch({"epoch": 1, "step": 10})
    made.register("broken", Failing())
    with pytest.raises(CheckpointError, match=r"CKPT\+000001 is intact"):
        made.save_inside_epoch({"epoch": 1, "step": 20})
    assert kept(tmp_path) == [(1, 10)]


def test_inside_a_recipes_checkpointer_the_recipes_own_checkpoints_stay(tmp_path):
    made = recipes(tmp_path, model=Holder())
    for epoch in (1, 2):
        made.checkpointer.save_checkpoint({"epoch": epoch})
        for step in (10, 20):
            made.save_inside_epoch({"epoch": epoch + 1, "step": step})
    assert kept(tmp_path) == [1, 2, (3, 10), (3, 20)]


# -------------------------------------------------------------- when


def test_due_by_updates_counts_from_the_last_save_of_either_kind(tmp_path):
    made = owned(tmp_path, model=Holder())
    assert [made.due(3, False) for _ in range(4)] == [False, False, True, True]
    made.save_inside_epoch({"epoch": 1, "step": 4})
    assert [made.due(3, False) for _ in range(2)] == [False, False]
    save_epochs(made, [1.0])
    assert [made.due(3, False) for _ in range(3)] == [False, False, True]


def test_due_by_minutes_counts_from_the_last_save(tmp_path, clock):
    made = owned(tmp_path, model=Holder())
    seen = []
    for minutes in (0, 1.9, 0.2, 5.0):
        clock.minutes += minutes
        seen.append(made.due(0, made.clock_due(2.0)))
    assert seen == [False, False, True, True]
    made.save_inside_epoch({"epoch": 1, "step": 4})
    clock.minutes += 1.9
    assert not made.due(0, made.clock_due(2.0))
    clock.minutes += 0.2
    assert made.due(0, made.clock_due(2.0))


def test_an_interval_of_0_is_off(tmp_path, clock):
    made = owned(tmp_path, model=Holder())
    clock.minutes += 1e6
    assert not any([made.due(0, False) for _ in range(3)])


# -------------------------------------------------------------- what goes in


def test_what_the_recipe_saves_already_is_not_saved_twice(tmp_path):
    counter, optimizer = Holder(), Holder()
    made = recipes(tmp_path, counter=counter, optimizer=optimizer)
    made.register("epoch_counter", counter)  # the same object, by another name
    made.register("optimizer", Holder())  # the recipe's is meant to stay
    assert made.checkpointer.recoverables == {"counter": counter, "optimizer": optimizer}


def test_a_second_registration_counts_only_with_replace(tmp_path):
    first, second = Holder(), Holder()
    made = owned(tmp_path, epoch_counter=first)
    made.register("epoch_counter", second)
    assert made.checkpointer.recoverables["epoch_counter"] is first
    made.register("epoch_counter", second, replace=True)
    assert made.checkpointer.recoverables["epoch_counter"] is second
    made.register("epoch_counter", second, replace=True)
    assert made.checkpointer.recoverables == {"epoch_counter": second}


def test_replace_does_not_take_the_place_of_what_the_recipe_registered(tmp_path):
    counter = Holder()
    made = recipes(tmp_path, epoch_counter=counter)
    for _ in range(2):  # two fits with counters of their own
        made.register("epoch_counter", Holder(), replace=True)
    assert made.checkpointer.recoverables == {"epoch_counter": counter}


def test_a_second_fit_may_bring_a_counter_that_the_recipe_does_not_save(tmp_path):
    counter, other = Holder(), Holder()
    made = recipes(tmp_path, counter=counter)
    made.register("epoch_counter", counter, replace=True)
    made.register("epoch_counter", other, replace=True)
    assert made.checkpointer.recoverables == {"counter": counter, "epoch_counter": other}


# -------------------------------------------------------------- going on


def test_resume_loads_the_newest_whatever_its_metric_and_says_from_where(tmp_path, caplog):
    model = Holder("epoch 1")
    earlier = owned(tmp_path, model=model)
    save_epochs(earlier, [1.0])
    model.value = "epoch 2, batch 10"
    earlier.save_inside_epoch({"epoch": 2, "step": 10})

    fresh = Holder()
    found = owned(tmp_path, model=fresh).resume()
    assert (fresh.value, found.meta["step"]) == ("epoch 2, batch 10", 10)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        record.getMessage()
        == f"resuming from {found.path} (epoch 2, batch 10); to start a new run, give another output_folder"
    )


@pytest.mark.parametrize(
    ("meta", "where"),
    [
        ({"epoch": 1}, "(epoch 1)"),
        ({"epoch": 1, "step": 0}, "(epoch 1)"),
        ({"epoch": 1, "step": 38}, "(epoch 1, batch 38)"),
        ({"epoch": 1, "step": 38, "stage": "train"}, "(epoch 1, batch 38)"),
        ({"epoch": 1, "step": 4, "stage": "valid"}, "(during the validation of epoch 1)"),
    ],
)
def test_the_moment_that_a_run_goes_on_from_is_said(tmp_path, caplog, meta, where):
    owned(tmp_path, model=Holder()).save_inside_epoch(meta)
    found = owned(tmp_path, model=Holder()).resume()
    (record,) = caplog.records
    assert f"resuming from {found.path} {where}; " in record.getMessage()


def test_after_a_fit_that_failed_the_newest_can_be_loaded_again(tmp_path):
    model = Holder("epoch 1")
    made = owned(tmp_path, model=model)
    assert made.resume("never") is None
    save_epochs(made, [1.0])
    model.value = "half an epoch further"
    made.resume_again()
    assert made.resume("never").meta["epoch"] == 1  # they are its own: not set aside
    assert (model.value, made.set_aside_number) == ("epoch 1", None)
    assert made.resume() is None


@pytest.mark.parametrize("whole", [True, False])
def test_resume_never_says_where_the_old_checkpoints_are(tmp_path, whole):
    save = tmp_path / "save"
    (tmp_path / "save.1").mkdir()
    earlier = owned(save, model=Holder(1))
    save_epochs(earlier, [1.0])
    earlier.wait()
    if not whole:
        (save / "CKPT+000001" / "meta.json").write_bytes(b"")
    made = owned(save, model=Holder(2))
    assert made.resume("never") is None
    assert made.set_aside_number == 2
    assert [it.name for it in (tmp_path / "save.2").iterdir()] == ["CKPT+000001"]
    assert list(save.iterdir()) == []
    assert owned(save, model=Holder()).set_aside_number is None


# -------------------------------------------------------------- a save that fails


class Disk:
    """Has no room while it is `full`; counts the saves that were tried."""

    def __init__(self, monkeypatch):
        self.full, self.tried = False, 0
        monkeypatch.setattr(folder.shutil, "disk_usage", self._usage)

    def _usage(self, path):
        self.tried += 1
        return SimpleNamespace(free=0 if self.full else 10**12)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_save_that_failed_does_not_keep_the_next_from_being_made(tmp_path, disk):
    made = owned(tmp_path, model=Holder())
    save_epochs(made, [3.0, 2.0])
    made.wait()
    disk.full = True
    made.save_inside_epoch({"epoch": 3, "step": 10})
    eventually(lambda: not made.checkpointer._background.busy)
    disk.full = False
    made.save_inside_epoch({"epoch": 3, "step": 20})
    assert kept(tmp_path) == [1, 2, (3, 20)]


def eventually(condition):
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_last_epochs_save_is_tried_once_more_at_the_end(tmp_path, disk, caplog):
    model = Holder("last")
    made = owned(tmp_path, model=model)
    save_epochs(made, [1.0, 2.0, 3.0])
    made.wait()
    disk.full = True
    save_epochs(made, [4.0], first=4)
    eventually(lambda: not made.checkpointer._background.busy)
    disk.full = False
    made.finish()
    assert kept(tmp_path) == [1, 3, 4]  # what was to go has gone
    assert "trying once more" in caplog.text and "disk is full" in caplog.text
    assert made.checkpointer.find_checkpoint().meta["loss"] == 4.0
    made.finish()
    assert kept(tmp_path) == [1, 3, 4]


def test_it_is_tried_only_once(tmp_path, disk):
    made = owned(tmp_path, model=Holder())
    save_epochs(made, [1.0])
    made.wait()
    disk.full, before = True, disk.tried
    save_epochs(made, [2.0], first=2)
    with pytest.raises(CheckpointError, match="disk is full"):
        made.finish()
    assert disk.tried - before == 2
    made.finish()
    assert kept(tmp_path) == [1]


@pytest.mark.parametrize("how", ["finish", "wait"])
def test_a_save_whose_moment_has_passed_is_not_tried_again(tmp_path, disk, how):
    made = owned(tmp_path, model=Holder())
    save_epochs(made, [1.0])
    made.wait()
    disk.full, before = True, disk.tried
    if how == "finish":
        made.save_inside_epoch({"epoch": 2, "step": 10})
    else:
        save_epochs(made, [2.0], first=2)
    with pytest.raises(CheckpointError, match="disk is full"):
        getattr(made, how)()
    assert disk.tried - before == 1
    made.wait()


def test_without_a_folder_there_is_nothing_to_finish():
    assert CheckpointPolicy(None, None, writes=True).finish() is None


def test_a_second_fit_of_the_same_process_does_not_go_back(tmp_path):
    model = Holder("saved")
    made = owned(tmp_path, model=model)
    assert made.resume() is None  # nothing there yet
    save_epochs(made, [1.0])
    model.value = "trained on"
    assert made.resume() is None
    assert model.value == "trained on"


def test_a_resumed_run_replaces_the_checkpoints_inside_the_epoch_that_it_came_from(tmp_path):
    earlier = owned(tmp_path, model=Holder())
    save_epochs(earlier, [1.0])
    earlier.save_inside_epoch({"epoch": 2, "step": 10})
    made = owned(tmp_path, model=Holder())
    made.resume()
    made.save_inside_epoch({"epoch": 2, "step": 20})
    assert kept(tmp_path) == [1, (2, 10), (2, 20)]
    made.save_inside_epoch({"epoch": 2, "step": 30})
    assert kept(tmp_path) == [1, (2, 20), (2, 30)]


def test_a_recipe_that_deleted_the_checkpoint_inside_the_epoch_hears_nothing_of_it(tmp_path):
    made = recipes(tmp_path, model=Holder())
    made.save_inside_epoch({"epoch": 1, "step": 10})
    made.checkpointer.save_and_keep_only({"epoch": 1, "loss": 1.0}, min_keys=["loss"])
    made.save_inside_epoch({"epoch": 2, "step": 10})
    assert kept(tmp_path) == [1, (2, 10)]


# -------------------------------------------------------------- evaluation


def trained(tmp_path, values=(3.0, 1.0, 2.0), **kwargs):
    """A policy after some epochs; its objects hold the last epoch's number."""
    model, optimizer = Holder(), Holder()
    made = owned(tmp_path, modules=model, optimizer=optimizer)
    for epoch, value in enumerate(values, 1):
        model.value = optimizer.value = epoch
        save_epochs(made, [value], first=epoch, **kwargs)
    return made, model, optimizer


@pytest.mark.parametrize(("keys", "epoch"), [((None, "loss"), 2), ((None, None), 3), (("loss", None), 3)])
def test_an_evaluation_loads_the_best_or_the_newest_and_of_it_only_what_is_named(tmp_path, keys, epoch):
    made, model, optimizer = trained(tmp_path)
    model.value = optimizer.value = "moved on"
    found = made.load_for_evaluation(*keys, names=("modules", "ema"))
    assert found.meta["epoch"] == epoch
    assert (model.value, optimizer.value) == (epoch, "moved on")
    assert set(made.checkpointer.recoverables) == {"modules", "optimizer"}  # training saves as before


def test_an_evaluation_in_a_new_process_needs_no_optimizer(tmp_path):
    trained(tmp_path)
    model = Holder()
    owned(tmp_path, modules=model).load_for_evaluation(None, "loss", names=("modules", "ema"))
    assert model.value == 2


def test_a_recipes_checkpointer_restores_all_that_the_recipe_gave_it(tmp_path):
    model, tokenizer = Holder(1), Holder(1)
    made = recipes(tmp_path, model=model, tokenizer=tokenizer)
    made.checkpointer.save_checkpoint({"epoch": 1})
    model.value = tokenizer.value = 2
    made.load_for_evaluation(None, None, names=("modules",))
    assert (model.value, tokenizer.value) == (1, 1)


def test_the_best_of_what_training_did_not_keep_is_warned_of_with_the_way_out(tmp_path, caplog):
    made, model, _ = trained(tmp_path)
    for epoch, accuracy in ((4, 0.9), (5, 0.1), (6, 0.5)):
        model.value = epoch
        made.save_epoch({"epoch": epoch, "loss": 9.0 + epoch, "accuracy": accuracy}, "loss", "min")
    found = made.load_for_evaluation("accuracy", None, names=("modules",))
    assert found.meta["epoch"] == 6  # epoch 4 was better, but is gone
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "best checkpoint by 'accuracy' may be gone" in record.getMessage()
    assert "kept only the best by 'loss'" in record.getMessage() and "early_stop_metric" in record.getMessage()


@pytest.mark.parametrize("keys", [(None, "loss"), (None, None)])
def test_the_best_of_what_training_kept_and_the_newest_are_not_warned_of(tmp_path, caplog, keys):
    made, _, _ = trained(tmp_path)
    made.load_for_evaluation(*keys, names=("modules",))
    assert caplog.records == []


def test_a_key_that_no_checkpoint_has_is_refused_with_the_keys_there_are(tmp_path):
    made, model, _ = trained(tmp_path)
    model.value = "as it is"
    with pytest.raises(CheckpointError, match="loss"):
        made.load_for_evaluation(None, "lss", names=("modules",))
    assert model.value == "as it is"


@pytest.mark.parametrize("whose", [owned, recipes])
def test_where_only_checkpoints_inside_an_epoch_exist_no_best_is_found(tmp_path, whose):
    model = Holder(1)
    made = whose(tmp_path, modules=model)
    made.save_inside_epoch({"epoch": 1, "step": 10})
    model.value = "as it is"
    assert made.load_for_evaluation("accuracy", None, names=("modules",), newest=("modules",)) is None
    assert model.value == "as it is"
    assert made.load_for_evaluation(None, None, names=("modules",)).meta["step"] == 10
    assert model.value == 1
    made.checkpointer.save_checkpoint({"epoch": 1, "loss": 1.0})
    with pytest.raises(CheckpointError, match="loss"):
        made.load_for_evaluation("accuracy", None, names=("modules",))


def test_a_damaged_checkpoint_is_not_as_if_there_were_none(tmp_path):
    made = owned(tmp_path, modules=Holder(1))
    save_epochs(made, [1.0])
    made.save_inside_epoch({"epoch": 2, "step": 10})
    made.wait()
    (tmp_path / "CKPT+000001" / "meta.json").write_bytes(b"")
    with logged("damaged"), pytest.raises(CheckpointError, match=r"CKPT\+000001"):
        made.load_for_evaluation(None, "loss", names=("modules",))


@pytest.mark.parametrize("has_folder", [True, False])
def test_with_no_checkpoint_at_all_an_evaluation_finds_none_and_changes_nothing(tmp_path, has_folder):
    model = Holder("as it is")
    made = CheckpointPolicy(None, tmp_path if has_folder else None, writes=True)
    made.register("modules", model)
    assert made.load_for_evaluation("accuracy", None, names=("modules",)) is None
    assert model.value == "as it is"
