"""Checkpoints are whole or absent, ordered by number, and loaded all or not at all."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from amp_recipes.checkpoint import Checkpointer, EpochCounter
from amp_recipes.errors import CheckpointError, ConfigError


class Holder:
    """The smallest recoverable: hands out and takes any state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def trained(seed, steps=2, optimizer=torch.optim.AdamW, **kwargs):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = optimizer(model.parameters(), **kwargs)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return model, optimizer


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def numbers(checkpointer):
    return [checkpoint.number for checkpoint in checkpointer.list_checkpoints()]


# --- what is saved comes back


def test_a_run_comes_back_in_another_checkpointer_bit_for_bit(tmp_path):
    model, optimizer = trained(0)
    epochs = EpochCounter(5)
    next(iter(epochs))
    saved = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer, "epochs": epochs}).save_checkpoint(
        {"loss": torch.tensor(0.5), "note": "ä", "f32": np.float32(0.25)}
    )
    assert saved.meta == {"loss": 0.5, "note": "ä", "f32": 0.25}

    other_model, other_optimizer = trained(1)
    other_epochs = EpochCounter(5)
    other = Checkpointer(tmp_path)
    other.add_recoverable("model", other_model)
    other.add_recoverable("optimizer", other_optimizer)
    other.add_recoverable("epochs", other_epochs)
    assert other.recover_if_possible() == saved
    assert_equal(other_model.state_dict(), model.state_dict())
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
    assert list(other_epochs) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "LBFGS", "Adafactor"]
)
def test_the_state_of_every_usual_optimizer_comes_back(tmp_path, name):
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    _, optimizer = trained(0, optimizer=getattr(torch.optim, name), **kwargs)
    _, other = trained(1, steps=0, optimizer=getattr(torch.optim, name), **kwargs)
    Checkpointer(tmp_path, {"optimizer": optimizer}).save_checkpoint()
    Checkpointer(tmp_path, {"optimizer": other}).recover_if_possible()
    assert_equal(other.state_dict(), optimizer.state_dict())


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_it_had_not_stopped(tmp_path, name):
    def make():
        optimizer = trained(0, optimizer=torch.optim.SGD, lr=0.1)[1]
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    optimizer, scheduler = make()
    rates(optimizer, scheduler, 3)
    Checkpointer(tmp_path, {"o": optimizer, "s": scheduler}).save_checkpoint()
    other_optimizer, other_scheduler = make()
    Checkpointer(tmp_path, {"o": other_optimizer, "s": other_scheduler}).recover_if_possible()
    assert rates(other_optimizer, other_scheduler, 4) == rates(optimizer, scheduler, 4)


def test_scaler_averaged_model_and_generator_states_come_back(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    averaged = torch.optim.swa_utils.AveragedModel(trained(0)[0])
    draws = Holder(torch.get_rng_state())
    Checkpointer(tmp_path, {"scaler": scaler, "averaged": averaged, "draws": draws}).save_checkpoint()
    others = {
        "scaler": torch.amp.GradScaler("cpu"),
        "averaged": torch.optim.swa_utils.AveragedModel(trained(1)[0]),
        "draws": Holder(),
    }
    Checkpointer(tmp_path, others).recover_if_possible()
    assert_equal(others["scaler"].state_dict(), scaler.state_dict())
    assert_equal(others["averaged"].state_dict(), averaged.state_dict())
    assert_equal(others["draws"].state, draws.state)


def test_the_layout_on_disk_has_a_version_and_a_file_per_recoverable(tmp_path):
    path = Checkpointer(tmp_path, {"a": Holder(1), "b": Holder(2)}).save_checkpoint({"x": 1}).path
    assert path == tmp_path / "CKPT+000001"
    assert sorted(file.name for file in path.iterdir()) == ["a.pt", "b.pt", "meta.json"]
    assert json.loads((path / "meta.json").read_text()) == {
        "format_version": 1,
        "recoverables": ["a", "b"],
        "meta": {"x": 1},
    }


# --- which checkpoint


def test_order_is_by_number_and_not_by_clock(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    for _ in range(3):
        checkpointer.save_checkpoint()
    os.utime(tmp_path / "CKPT+000003", (0, 0))  # as if the clock had been set back before the last save
    (tmp_path / "CKPT+000001").rename(tmp_path / "CKPT+1000000")  # more digits than the padding has
    assert numbers(checkpointer) == [1000000, 3, 2]
    assert Checkpointer(tmp_path, {"a": Holder(1)}).save_checkpoint().number == 1000001


def test_the_number_of_a_deleted_checkpoint_is_not_given_out_again(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    path = checkpointer.save_checkpoint().path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    assert checkpointer.save_checkpoint().number == 2


def test_find_takes_the_best_and_of_equals_the_newest_never_nan_never_without_the_key(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    for meta in [
        {"loss": 2.0},
        {"loss": 1.0},
        {"loss": 1.0},
        {"loss": float("nan")},
        {"other": 0.0},
        {"loss": 3},
    ]:
        checkpointer.save_checkpoint(meta)
    assert checkpointer.find_checkpoint(min_key="loss").number == 3
    assert checkpointer.find_checkpoint(max_key="loss").number == 6
    assert checkpointer.find_checkpoint().number == 6
    assert checkpointer.find_checkpoint(min_key="nobody") is None
    with pytest.raises(ConfigError, match="not both"):
        checkpointer.find_checkpoint(min_key="loss", max_key="loss")


def test_recover_takes_the_best_by_key(tmp_path):
    holder = Holder()
    checkpointer = Checkpointer(tmp_path, {"a": holder})
    for loss in [3.0, 1.0, 2.0]:
        holder.state = loss
        checkpointer.save_checkpoint({"loss": loss})
    assert checkpointer.recover_if_possible(min_key="loss").number == 2
    assert holder.state == 1.0


def test_recover_gives_none_only_where_there_is_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    assert checkpointer.recover_if_possible(max_key="accuracy") is None
    checkpointer.save_checkpoint({"accuracy": float("nan"), "loss": 1.0})
    with pytest.raises(CheckpointError, match=r"NaN is none.*their meta has: accuracy, loss"):
        checkpointer.recover_if_possible(max_key="accuracy")
    with pytest.raises(CheckpointError, match="Did you mean 'accuracy'"):
        checkpointer.recover_if_possible(max_key="acuracy")


def test_a_damaged_meta_file_is_left_out_with_a_warning_but_never_a_silent_fresh_start(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    checkpointer.save_checkpoint()
    newest = checkpointer.save_checkpoint().path
    (newest / "meta.json").write_text('{"format_ver')
    with pytest.warns(UserWarning, match="CKPT.000002 is left out"):
        assert checkpointer.recover_if_possible().number == 1
    (tmp_path / "CKPT+000001" / "meta.json").write_text("[]")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="can be read"):
        checkpointer.recover_if_possible()


def test_a_newer_format_is_refused_by_its_version(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    meta = checkpointer.save_checkpoint().path / "meta.json"
    meta.write_text(json.dumps({"format_version": 99, "meta": {}}))
    with pytest.raises(CheckpointError, match="format version 99"):
        checkpointer.recover_if_possible()


# --- which ones stay


def test_keep_only_keeps_the_best_of_each_key_and_always_the_newest(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    metrics = [(1.0, 0.1), (2.0, 0.9), (0.5, 0.2), (3.0, 0.3), (float("nan"), float("nan"))]
    for loss, accuracy in metrics:
        checkpointer.save_and_keep_only({"loss": loss, "acc": accuracy}, min_keys=["loss"], max_keys=["acc"])
    assert numbers(checkpointer) == [5, 3, 2]
    checkpointer.save_and_keep_only({"loss": 9.0, "acc": 0.0}, min_keys=["loss"], max_keys=["acc"], num_to_keep=2)
    assert numbers(checkpointer) == [6, 3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+000002", "CKPT+000003", "CKPT+000006"]


def test_keep_only_without_keys_keeps_the_newest(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    for _ in range(4):
        checkpointer.save_and_keep_only(num_to_keep=2)
    assert numbers(checkpointer) == [4, 3]
    checkpointer.save_and_keep_only()
    assert numbers(checkpointer) == [5]


def test_keep_only_with_a_mistyped_key_deletes_nothing(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    checkpointer.save_checkpoint({"loss": 1.0})
    with pytest.raises(ConfigError, match="Did you mean 'loss'"):
        checkpointer.save_and_keep_only({"loss": 2.0}, min_keys="los")
    assert numbers(checkpointer) == [2, 1]
    with pytest.raises(ConfigError, match="num_to_keep is 0"):
        checkpointer.save_and_keep_only({"loss": 2.0}, num_to_keep=0)


# --- loaded all or not at all


def test_a_missing_state_is_named_and_nothing_is_loaded(tmp_path):
    Checkpointer(tmp_path, {"a": Holder(1), "c": Holder(3)}).save_checkpoint()
    live = Holder("untouched")
    with pytest.raises(CheckpointError, match=r"no state of b; nothing was loaded.*It holds: a, c"):
        Checkpointer(tmp_path, {"a": live, "b": Holder(2)}).recover_if_possible()
    assert live.state == "untouched"


def test_a_truncated_state_is_named_and_nothing_is_loaded(tmp_path):
    path = Checkpointer(tmp_path, {"a": Holder(1), "b": trained(0)[0]}).save_checkpoint().path
    content = (path / "b.pt").read_bytes()
    (path / "b.pt").write_bytes(content[: len(content) // 2])
    live = Holder("untouched")
    with pytest.raises(CheckpointError, match=r"b\.pt: the state of 'b' cannot be read"):
        Checkpointer(tmp_path, {"a": live, "b": trained(1)[0]}).recover_if_possible()
    assert live.state == "untouched"


def test_another_model_is_refused_with_keys_and_shapes_and_live_weights_stay(tmp_path):
    saved = nn.ModuleDict({"body": nn.Linear(3, 4), "old": nn.Linear(1, 1)})
    first = Holder(1)
    Checkpointer(tmp_path, {"first": first, "model": saved}).save_checkpoint()
    live = nn.ModuleDict({"body": nn.Linear(3, 5), "new": nn.Linear(1, 1)})
    before = {key: value.clone() for key, value in live.state_dict().items()}
    first.state = "untouched"
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path, {"first": first, "model": live}).recover_if_possible()
    message = str(error.value)
    assert "model.body.weight: shape (5, 3) here, (4, 3) in the checkpoint" in message
    assert "model.new.bias: not in the checkpoint" in message
    assert "model.old.bias: only in the checkpoint" in message
    assert_equal(dict(live.state_dict()), before)
    assert first.state == "untouched"


def test_an_optimizer_with_other_groups_is_refused_before_the_model_is_loaded(tmp_path):
    model, optimizer = trained(0)
    Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}).save_checkpoint()
    live = trained(1)[0]
    before = live[0].weight.detach().clone()
    split = torch.optim.AdamW([{"params": live[0].parameters()}, {"params": live[1].parameters()}])
    with pytest.raises(CheckpointError, match=r"optimizer: parameters per group are \[2, 2\] here, \[4\]"):
        Checkpointer(tmp_path, {"model": live, "optimizer": split}).recover_if_possible()
    assert torch.equal(live[0].weight, before)


def test_a_pickle_with_code_in_a_checkpoint_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'executed'}",))

    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    path = checkpointer.save_checkpoint().path / "a.pt"
    torch.save({"x": Payload()}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpointer.recover_if_possible()
    path.write_bytes(pickle.dumps(Payload(), protocol=2))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpointer.recover_if_possible()
    assert not (tmp_path / "executed").exists()


# --- what may be a recoverable


@pytest.mark.parametrize("obj", [3, object(), nn.Linear])
def test_what_has_no_state_is_refused_when_it_is_added(tmp_path, obj):
    with pytest.raises(ConfigError, match="expected an object with state_dict"):
        Checkpointer(tmp_path, {"a": obj})


def test_a_name_is_taken_once(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    with pytest.raises(ConfigError, match="'a' is already a Holder"):
        checkpointer.add_recoverable("a", Holder(2))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a\\b", "a\0", "/a", 3, "a b", "a\n"])
def test_a_name_is_a_plain_file_name(tmp_path, name):
    with pytest.raises(ConfigError, match="expected a file name"):
        Checkpointer(tmp_path).add_recoverable(name, Holder(1))


@pytest.mark.parametrize(
    ("state", "named"), [({"lr": np.float64(0.1)}, "numpy"), ([Path("x")], "pathlib"), (lambda: 0, "lambda")]
)
def test_a_state_that_could_not_be_read_back_fails_at_the_save_and_names_what_it_holds(tmp_path, state, named):
    checkpointer = Checkpointer(tmp_path, {"good": Holder(1), "bad": Holder(state)})
    with pytest.raises(CheckpointError, match=rf"'bad' \(Holder\)(.|\n)*{named}"):
        checkpointer.save_checkpoint()
    assert list(tmp_path.iterdir()) == []


def test_meta_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="as JSON"):
        Checkpointer(tmp_path, {"a": Holder(1)}).save_checkpoint({"x": object()})
    assert list(tmp_path.iterdir()) == []


# --- the disk


def test_a_folder_that_cannot_be_written_is_refused_at_construction(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not writable"):
        Checkpointer(tmp_path / "file" / "save")
    with pytest.raises(CheckpointError, match="not writable"):
        Checkpointer(tmp_path / "file")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root can write to")
def test_a_read_only_folder_is_refused_at_construction():
    with pytest.raises(CheckpointError, match="not writable"):
        Checkpointer("/proc/self")


@pytest.mark.parametrize(("function", "nth"), [("mkdir", 2), ("rename", 1), *[("fsync", nth) for nth in range(1, 6)]])
def test_a_failing_call_to_the_disk_leaves_the_old_checkpoint_and_no_leftover(tmp_path, monkeypatch, function, nth):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(torch.arange(10)), "b": Holder(2)})
    checkpointer.save_checkpoint()
    real, calls = getattr(os, function), []

    def fail_at_nth(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail_at_nth)
        with pytest.raises(CheckpointError, match=r"CKPT\+000002' not written: No space left on device"):
            checkpointer.save_checkpoint()
    assert len(calls) == nth
    assert not list(tmp_path.glob(".tmp*"))
    holders = {"a": Holder(), "b": Holder()}
    assert Checkpointer(tmp_path, holders).recover_if_possible() is not None
    assert torch.equal(holders["a"].state, torch.arange(10))


def test_a_disk_that_fills_while_tensors_are_written_is_reported_as_that(tmp_path):
    holder = Holder(torch.zeros(10))
    checkpointer = Checkpointer(tmp_path, {"a": holder})
    checkpointer.save_checkpoint()
    holder.state = torch.zeros(1_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"CKPT\+000002' not written: File too large"):
            checkpointer.save_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["CKPT+000001"]
    assert checkpointer.recover_if_possible().number == 1


def test_files_folder_and_parent_reach_the_disk_in_that_order(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(source, target):
        done.append("rename")
        rename(source, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to tell which file a descriptor is")
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1), "b": Holder(2)})
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    checkpointer.save_checkpoint()
    assert done == ["a.pt", "b.pt", "meta.json", ".tmp-CKPT+000001", "rename", tmp_path.name]


def test_leftovers_of_a_crash_are_ignored_and_removed_at_the_next_save(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    checkpointer.save_checkpoint()
    leftover = tmp_path / ".tmp-CKPT+000002"
    leftover.mkdir()
    (leftover / "a.pt").write_bytes(b"half")
    (tmp_path / "notes").mkdir()  # somebody else's
    assert numbers(checkpointer) == [1]
    assert checkpointer.recover_if_possible().number == 1
    checkpointer.save_checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+000001", "CKPT+000002", "notes"]


def test_a_process_killed_while_it_saves_leaves_only_whole_checkpoints(tmp_path):
    script = textwrap.dedent(
        """
        import sys, torch
        from amp_recipes.checkpoint import Checkpointer
        torch.set_num_threads(1)
        class Holder:
            def state_dict(self): return self.state
            def load_state_dict(self, state): self.state = state
        holders = {"a": Holder(), "b": Holder()}
        checkpointer = Checkpointer(sys.argv[1], holders)
        for number in range(1, 100000):
            for holder in holders.values():
                holder.state = torch.full((200_000,), float(number))
            checkpointer.save_and_keep_only({"n": number})
            print(number, flush=True)
        """
    )
    for delay in (0.004, 0.013):  # the child does little but save
        folder = tmp_path / str(delay)
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        for _ in range(3):
            child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        finished = 3 + len(child.stdout.read().split())
        child.wait()
        holders = {"a": Holder(), "b": Holder()}
        found = Checkpointer(folder, holders).recover_if_possible()
        assert found.meta["n"] == found.number >= finished
        for holder in holders.values():
            assert torch.equal(holder.state, torch.full((200_000,), float(found.number)))


def test_long_and_unusual_paths_work(tmp_path):
    folder = tmp_path / "Ünï codé 模型" / ("x" * 200) / ("y" * 200)
    Checkpointer(folder, {"模型": Holder(7)}).save_checkpoint()
    holder = Holder()
    Checkpointer(str(folder), {"模型": holder}).recover_if_possible()
    assert holder.state == 7
