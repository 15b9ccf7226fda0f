"""Checkpoints are whole or absent, ordered by number, and loaded all or not at all."""

import copy
import hashlib
import json
import math
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from device import DEVICE
from logged import logged
from torch import nn
from torch.optim import lr_scheduler

from amp_recipes.checkpoint import Checkpointer, EpochCounter
from amp_recipes.checkpoint import checkpointer as checkpointer_module
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
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
    optimizer = optimizer(model.parameters(), **kwargs)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3).to(DEVICE)).square().sum()
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


OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "LBFGS", "Adafactor"]


def test_the_state_of_every_usual_optimizer_comes_back(tmp_path, subtests):
    for name in OPTIMIZERS:
        kwargs = {"momentum": 0.9} if name == "SGD" else {}
        with subtests.test(name):
            _, optimizer = trained(0, optimizer=getattr(torch.optim, name), **kwargs)
            _, other = trained(1, steps=0, optimizer=getattr(torch.optim, name), **kwargs)
            Checkpointer(tmp_path / name, {"optimizer": optimizer}).save_checkpoint()
            Checkpointer(tmp_path / name, {"optimizer": other}).recover_if_possible()
            assert_equal(other.state_dict(), optimizer.state_dict())


class ExactSGD(torch.optim.Optimizer):
    """Keeps weights and moments in float32, whatever the parameters have."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    exact = parameter.detach().float()
                    state.update(master=exact.clone(), moments=[exact / 3, (exact / 7,)], low=parameter.detach() / 3)


def test_an_optimizers_state_that_is_more_exact_than_its_parameters_is_not_rounded(tmp_path):
    def make(seed, dtype=torch.bfloat16):
        torch.manual_seed(seed)
        model = nn.Linear(3, 4).to(dtype)
        optimizer = ExactSGD([{"params": [model.weight]}, {"params": [model.bias]}])
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = make(0)
    assert saved["optimizer"].state[saved["model"].weight]["master"].dtype == torch.float32
    Checkpointer(tmp_path, saved).save_checkpoint()
    live = make(1)
    Checkpointer(tmp_path, live).recover_if_possible()
    assert_equal(live["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert live["optimizer"].state[live["model"].bias]["low"].dtype == torch.bfloat16

    other = make(1, torch.float64)  # parameters of another precision than was saved: torch's casts stay
    Checkpointer(tmp_path, other).recover_if_possible()
    assert other["optimizer"].state[other["model"].weight]["master"].dtype == torch.float64


def test_an_optimizers_exact_state_is_put_back_exactly_when_a_load_fails(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 4).to(torch.bfloat16)
        optimizer = ExactSGD(model.parameters())
        optimizer.step()
        for state in optimizer.state.values():
            state["master"] = torch.randn_like(state["master"])
        return optimizer

    Checkpointer(tmp_path, {"optimizer": make(0), "last": Holder(1)}).save_checkpoint()
    live = make(1)
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(CheckpointError, match="restored to their earlier state"):
        Checkpointer(tmp_path, {"optimizer": live, "last": Stubborn(takes=["mine"])}).recover_if_possible()
    assert_equal(live.state_dict(), before)


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


def test_a_scheduler_goes_on_as_if_it_had_not_stopped(tmp_path, subtests):
    def make(name):
        optimizer = trained(0, optimizer=torch.optim.SGD, lr=0.1)[1]
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    for name in SCHEDULERS:
        with subtests.test(name):
            optimizer, scheduler = make(name)
            rates(optimizer, scheduler, 3)
            Checkpointer(tmp_path / name, {"o": optimizer, "s": scheduler}).save_checkpoint()
            other_optimizer, other_scheduler = make(name)
            Checkpointer(tmp_path / name, {"o": other_optimizer, "s": other_scheduler}).recover_if_possible()
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
    files = ["MANIFEST.sha256", "a.safetensors", "b.safetensors", "meta.json"]
    assert sorted(file.name for file in path.iterdir()) == files
    assert json.loads((path / "meta.json").read_text()) == {
        "format_version": 2,
        "recoverables": ["a", "b"],
        "meta": {"x": 1},
    }
    sums = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in files[1:]}
    lines = (path / "MANIFEST.sha256").read_text().splitlines()
    assert sorted(lines) == sorted(f"{digest}  {name}" for name, digest in sums.items())


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_manifest_is_one_that_sha256sum_checks(tmp_path):
    path = Checkpointer(tmp_path, {"模型": Holder(torch.ones(3)), "b": Holder(2)}).save_checkpoint().path
    command = ["sha256sum", "--check", "--strict", "MANIFEST.sha256"]
    assert subprocess.run(command, cwd=path, capture_output=True).stdout.count(b": OK") == 3
    (path / "b.safetensors").write_bytes(b"")
    assert subprocess.run(command, cwd=path, capture_output=True).returncode != 0


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
    for meta in [{"loss": 2.0}, {"loss": 1.0}, {"loss": 1.0}, {"loss": float("nan")}, {"other": 0.0}, {"loss": 3}]:
        checkpointer.save_checkpoint(meta)
    assert checkpointer.find_checkpoint(min_key="loss").number == 3
    assert checkpointer.find_checkpoint(max_key="loss").number == 6
    assert checkpointer.find_checkpoint().number == 6
    assert checkpointer.find_checkpoint(min_key="nobody") is None
    with pytest.raises(ConfigError, match="at most one of them"):
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
    with pytest.raises(CheckpointError, match=r"NaN does not count.*keys in their meta: accuracy, loss"):
        checkpointer.recover_if_possible(max_key="accuracy")
    with pytest.raises(CheckpointError, match="Did you mean 'accuracy'"):
        checkpointer.recover_if_possible(max_key="acuracy")


def test_a_damaged_meta_file_is_left_out_with_a_warning_but_never_a_silent_fresh_start(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    checkpointer.save_checkpoint()
    newest = checkpointer.save_checkpoint().path
    (newest / "meta.json").write_text('{"format_ver')
    with logged(r"CKPT.000002 is damaged, so it is skipped: meta\.json cannot be read"):
        assert checkpointer.recover_if_possible().number == 1
    (tmp_path / "CKPT+000001" / "meta.json").write_text("[]")
    with logged(), pytest.raises(CheckpointError, match=r"No usable checkpoint(.|\n)*CKPT\+000001: meta\.json"):
        checkpointer.recover_if_possible()


# --- formats


def rewrite_meta(path, **changes):
    """Change the meta file of a checkpoint, and its sum, as another version of the package would have written it."""
    content = {**json.loads((path / "meta.json").read_text()), **changes}
    (path / "meta.json").write_text(json.dumps(content))
    manifest = path / "MANIFEST.sha256"
    lines = [line for line in manifest.read_text().splitlines() if "meta.json" not in line]
    digest = hashlib.sha256((path / "meta.json").read_bytes()).hexdigest()
    manifest.write_text("\n".join([*lines, f"{digest}  meta.json", ""]))


def test_a_newer_format_is_refused_by_its_version(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    rewrite_meta(checkpointer.save_checkpoint().path, format_version=99)
    for ask in (checkpointer.recover_if_possible, checkpointer.list_checkpoints):
        with pytest.raises(
            CheckpointError, match=r"format version 99, but this amp_recipes reads version 2\. Install a newer"
        ):
            ask()


def test_a_version_that_is_only_a_flipped_bit_is_damage(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    checkpointer.save_checkpoint()
    meta = checkpointer.save_checkpoint().path / "meta.json"
    meta.write_text(meta.read_text().replace('"format_version": 2', '"format_version": 6'))
    with logged("CKPT.000002 is damaged"):
        assert checkpointer.recover_if_possible().number == 1


def test_the_format_of_before_the_first_release_is_refused_by_its_version(tmp_path):
    old = tmp_path / "CKPT+000001"
    old.mkdir()
    torch.save({"weight": torch.ones(1)}, old / "model.pt")
    (old / "meta.json").write_text(json.dumps({"format_version": 1, "recoverables": ["model"], "meta": {}}))
    with pytest.raises(CheckpointError, match="format version 1, from before the first release"):
        Checkpointer(tmp_path, {"model": Holder()}).recover_if_possible()


def test_older_formats_are_migrated_step_by_step(tmp_path, monkeypatch):
    old = Checkpointer(tmp_path, {"model": Holder({"w": 1}), "lr": Holder(0.5)})
    saved = old.save_checkpoint({"loss": 1.0})
    seen = []

    def to_3(states):  # takes a state apart
        seen.append(sorted(states))
        return {"model": states["model"], "optimizer": {"lr": states["lr"]}}

    def to_4(states):  # and renames a key
        seen.append(sorted(states))
        return {**states, "model": {"weight": states["model"]["w"]}}

    monkeypatch.setattr(checkpointer_module, "FORMAT_VERSION", 4)
    monkeypatch.setattr(checkpointer_module, "MIGRATIONS", {2: to_3, 3: to_4})
    model, optimizer = Holder(), Holder()
    new = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
    assert new.recover_if_possible() == saved
    assert (model.state, optimizer.state) == ({"weight": 1}, {"lr": 0.5})
    assert seen == [["lr", "model"], ["model", "optimizer"]]
    assert new.save_checkpoint().number == 2
    assert new.recover_if_possible().number == 2
    assert len(seen) == 2  # the new one needs none

    monkeypatch.setattr(checkpointer_module, "MIGRATIONS", {3: to_4})
    with pytest.raises(CheckpointError, match="format version 2"):
        Checkpointer(tmp_path, {"model": model}).recover_if_possible()


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


def saved_with(checkpointer, key, *values, **kwargs):
    """Save with each value in turn, and delete what prune deletes."""
    for value in values:
        checkpointer.prune(checkpointer.save_checkpoint({key: value}), **kwargs)


def test_more_of_the_newest_may_stay_beside_the_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    saved_with(checkpointer, "loss", 1.0, 2.0, 3.0, 4.0, 5.0, min_keys=["loss"], newest=2)
    assert numbers(checkpointer) == [5, 4, 1]
    saved_with(checkpointer, "loss", 0.5, min_keys=["loss"], newest=3)
    assert numbers(checkpointer) == [6, 5, 4]
    saved_with(checkpointer, "loss", 9.0, newest=2)
    assert numbers(checkpointer) == [7, 6]
    with pytest.raises(ConfigError, match="newest is 0"):
        checkpointer.prune(checkpointer.find_checkpoint(), newest=0)


def test_a_good_one_is_not_deleted_for_a_better_one_that_is_damaged(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(torch.ones(9)), "b": Holder(1)})
    for loss in (3.0, 2.0, 1.0):
        checkpointer.save_checkpoint({"loss": loss})
    path = tmp_path / "CKPT+000003" / "b.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with logged(r"CKPT\+000003 is damaged, so the next best is kept too: b\.safetensors"):
        saved_with(checkpointer, "loss", 9.0, min_keys=["loss"])
    assert numbers(checkpointer) == [4, 3, 2]
    with logged("damaged, so it is skipped"):
        assert checkpointer.recover_if_possible(min_key="loss").number == 2
    path.write_bytes(content)  # it was only the reading that failed
    saved_with(checkpointer, "loss", 9.0, min_keys=["loss"])
    assert numbers(checkpointer) == [5, 3]


def test_files_are_read_again_only_where_something_good_is_to_go(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(checkpointer_module, "verify_all", lambda path: read.append(path.name))
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    saved_with(checkpointer, "loss", 3.0, 4.0, 2.0, min_keys=["loss"], newest=2)
    assert read == []  # nothing to delete yet, then the best is the one just written
    assert numbers(checkpointer) == [3, 2]
    saved_with(checkpointer, "loss", 5.0, min_keys=["loss"], newest=2)
    assert read == ["CKPT+000003"]  # 2 went for it
    assert numbers(checkpointer) == [4, 3]
    saved_with(checkpointer, "loss", 6.0, min_keys=["loss"], newest=2)
    assert numbers(checkpointer) == [5, 4, 3]
    assert read == ["CKPT+000003"]


# --- loaded all or not at all


def test_a_missing_state_is_named_and_nothing_is_loaded(tmp_path):
    Checkpointer(tmp_path, {"a": Holder(1), "c": Holder(3)}).save_checkpoint()
    live = Holder("untouched")
    with pytest.raises(CheckpointError, match=r"no state of b; nothing was loaded.*It has states of: a, c"):
        Checkpointer(tmp_path, {"a": live, "b": Holder(2)}).recover_if_possible()
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


class Stubborn(Holder):
    """Takes no state, or only its own again, or not even that."""

    def __init__(self, takes):
        super().__init__("mine")
        self.takes = takes

    def load_state_dict(self, state):
        self.state = "half"
        if state not in self.takes:
            raise ValueError("not mine")
        super().load_state_dict(state)


def test_objects_before_one_that_does_not_take_its_state_get_theirs_back(tmp_path):
    model, optimizer = trained(0)
    Checkpointer(
        tmp_path, {"model": model, "optimizer": optimizer, "plain": Holder([torch.ones(1)]), "last": Holder(1)}
    ).save_checkpoint()
    live, live_optimizer = trained(1)
    plain, last = Holder({"list": [torch.zeros(2), (1, "x")]}), Stubborn(takes=["mine"])
    before = copy.deepcopy([live.state_dict(), live_optimizer.state_dict(), plain.state])
    checkpointer = Checkpointer(tmp_path, {"model": live, "optimizer": live_optimizer, "plain": plain, "last": last})
    with pytest.raises(
        CheckpointError, match=r"state of 'last' \(Stubborn\) failed: .*not mine\. All objects were restored"
    ):
        checkpointer.recover_if_possible()
    assert_equal([live.state_dict(), live_optimizer.state_dict(), plain.state], before)
    assert last.state == "mine"


def test_what_cannot_be_put_back_is_named(tmp_path):
    first = Holder(1)
    Checkpointer(tmp_path, {"a": first, "b": Holder(1)}).save_checkpoint()
    first.state = "untouched"
    with pytest.raises(CheckpointError, match="Could not restore b: do not train with this model"):
        Checkpointer(tmp_path, {"a": first, "b": Stubborn(takes=[])}).recover_if_possible()
    assert first.state == "untouched"


def test_read_gives_the_states_to_nothing(tmp_path):
    holder = Holder({"x": torch.ones(2)})
    checkpointer = Checkpointer(tmp_path, {"a": holder, "b": Holder(2)})
    saved = checkpointer.save_checkpoint()
    holder.state = "other"
    states = checkpointer.read(saved)
    assert_equal(states, {"a": {"x": torch.ones(2)}, "b": 2})
    assert holder.state == "other"
    assert Checkpointer(tmp_path).read(saved, ["b"]) == {"b": 2}
    with pytest.raises(CheckpointError, match="no state of c"):
        checkpointer.read(saved, ["c"])
    (saved.path / "a.safetensors").write_bytes(b"")
    assert checkpointer.read(saved, ["b"]) == {"b": 2}
    with pytest.raises(CheckpointError, match=r"is damaged: a\.safetensors"):
        checkpointer.read(saved)


def test_damage_is_told_once_however_often_the_folder_is_looked_at(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    folder = checkpointer.save_checkpoint()
    (folder.path / "meta.json").write_text("{")
    for _ in range(3):
        assert checkpointer.list_checkpoints() == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "is damaged, so it is skipped" in record.getMessage()


def test_a_forged_file_in_a_checkpoint_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'executed'}",))

    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    folder = checkpointer.save_checkpoint().path
    for write in (torch.save, lambda it, path: path.write_bytes(pickle.dumps(it, protocol=2))):
        path = folder / "a.safetensors"
        write({"x": Payload()}, path)
        manifest = folder / "MANIFEST.sha256"  # whoever forges a file forges its sum
        lines = [line for line in manifest.read_text().splitlines() if path.name not in line]
        manifest.write_text("\n".join([f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}", *lines, ""]))
        with logged("damaged"), pytest.raises(CheckpointError, match="cannot be read"):
            Checkpointer(tmp_path, {"a": Holder(1)}).recover_if_possible()
    assert not (tmp_path / "executed").exists()


# --- what may be a recoverable


def test_what_has_no_state_is_refused_when_it_is_added(tmp_path):
    for obj in (3, object(), nn.Linear):
        with pytest.raises(ConfigError, match="expected an object with state_dict"):
            Checkpointer(tmp_path, {"a": obj})


def test_a_name_is_taken_once(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    with pytest.raises(ConfigError, match="'a' is already a Holder"):
        checkpointer.add_recoverable("a", Holder(2))


def test_a_name_is_a_plain_file_name(tmp_path, subtests):
    for name in ("", "a/b", "..", ".a", "a\\b", "a\0", "/a", 3, "a b", "a\n"):
        with subtests.test(repr(name)), pytest.raises(ConfigError, match="name is a file name"):
            Checkpointer(tmp_path).add_recoverable(name, Holder(1))


def test_a_name_is_no_longer_than_a_file_name_may_be(tmp_path):
    longest = "模" * 81
    checkpointer = Checkpointer(tmp_path, {longest: Holder(5)})
    checkpointer.save_checkpoint()
    assert checkpointer.read(checkpointer.find_checkpoint()) == {longest: 5}
    with pytest.raises(ConfigError, match="longer than 243 bytes"):
        checkpointer.add_recoverable(longest + "x", Holder(1))


def test_a_state_that_could_not_be_read_back_fails_at_the_save_and_names_what_it_holds(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"good": Holder(1), "bad": Holder([Path("x")])})
    with pytest.raises(CheckpointError, match=r"CKPT\+000001 was not written: .*'bad' \(Holder\).*\[0\] is a pathlib"):
        checkpointer.save_checkpoint()
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_taken_is_named(tmp_path):
    class Broken(Holder):
        def state_dict(self):
            raise KeyError("x")

    checkpointer = Checkpointer(tmp_path, {"good": Holder(1)})
    checkpointer.save_checkpoint({"optimizer_step": 7})
    checkpointer.add_recoverable("bad", Broken())
    with pytest.raises(
        CheckpointError,
        match=r"CKPT\+000002 \(step 9\) was not written: .*'bad' \(Broken\) raised KeyError.*CKPT\+000001 \(step 7\)",
    ):
        checkpointer.save_checkpoint({"optimizer_step": 9})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_diverged_model_is_not_saved(tmp_path, value, dtype):
    model = nn.ParameterDict({"fine": torch.ones(3), "empty": torch.ones(0), "bad": torch.ones(4, 4).to(dtype)})
    checkpointer = Checkpointer(tmp_path, {"model": nn.DataParallel(model)})
    good = checkpointer.save_checkpoint({"optimizer_step": 1, "loss": 1.0})
    bad = torch.ones(4, 4)
    bad[1, 2] = float(value)
    model["bad"].data = bad.to(dtype)
    with pytest.raises(
        CheckpointError, match=r"\(step 2\) was not written: parameters are not finite .*: model\.bad\. .*CKPT\+0"
    ):
        checkpointer.save_and_keep_only({"optimizer_step": 2, "loss": 0.0}, min_keys=["loss"])
    assert [path.name for path in tmp_path.iterdir()] == [good.path.name]
    assert checkpointer.recover_if_possible() == good
    assert model["bad"].float().isfinite().all() if not dtype.is_complex else model["bad"].isfinite().all()


@pytest.mark.parametrize("where", ["weights", "optimizer"])
def test_a_checkpoint_that_has_diverged_is_left_for_the_one_before(tmp_path, monkeypatch, where):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
    good = checkpointer.save_checkpoint()
    weights = copy.deepcopy(model.state_dict())
    bad = model.weight.data if where == "weights" else optimizer.state[model.weight]["exp_avg"]
    bad[1, 0] = math.nan
    monkeypatch.setattr(checkpointer_module, "refuse_nonfinite", lambda bad: list(bad))  # as another program would
    checkpointer.save_checkpoint()
    named = "model.weight" if where == "weights" else "optimizer: exp_avg of parameter 0"
    with logged(f"CKPT\\+000002 is damaged, so it is skipped: not finite: {named}"):
        assert checkpointer.recover_if_possible() == good
    assert all(torch.equal(it, weights[name]) for name, it in model.state_dict().items())
    assert optimizer.state[model.weight]["exp_avg"].isfinite().all()
    shutil.rmtree(good.path)
    with pytest.raises(CheckpointError, match="not finite"), logged():
        checkpointer.recover_if_possible()


class OwnState(torch.optim.SGD):
    """Keeps a best loss that is not known yet, in a state of its own form."""

    def state_dict(self):
        return {"mine": {"best": torch.tensor(math.nan)}}

    def load_state_dict(self, state):
        self.loaded = state


def test_states_of_other_forms_do_not_count_as_diverged(tmp_path):
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    adam.step()
    adam.state[model.weight]["best"] = torch.tensor(math.nan)
    own = OwnState(model.parameters(), 0.1)
    checkpointer = Checkpointer(tmp_path, {"model": model, "adam": adam, "own": own})
    assert checkpointer.recover_if_possible() is None
    saved = checkpointer.save_checkpoint()
    assert checkpointer.recover_if_possible() == saved and own.loaded["mine"]["best"].isnan()


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_weights_of_another_kind_are_refused(tmp_path, dtype):
    Checkpointer(
        tmp_path, {"model": nn.ParameterDict({"w": nn.Parameter(torch.ones(2, dtype=dtype), False)})}
    ).save_checkpoint()
    with pytest.raises(CheckpointError, match=rf"model\.w: torch\.float32 here, {dtype} in the checkpoint"):
        Checkpointer(tmp_path, {"model": nn.ParameterDict({"w": torch.ones(2)})}).recover_if_possible()


def test_infinities_may_stand_where_training_changes_nothing(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), float("-inf")))
    model.weight.requires_grad_(False).fill_(float("inf"))
    checkpointer = Checkpointer(tmp_path, {"model": model, "other": Holder(torch.tensor(float("nan")))})
    checkpointer.save_checkpoint()
    assert checkpointer.recover_if_possible().number == 1
    model.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"model\.weight"):
        checkpointer.save_checkpoint()


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


def test_leftovers_of_a_crash_are_ignored_and_removed_at_the_next_save(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"a": Holder(1)})
    checkpointer.save_checkpoint()
    leftover = tmp_path / ".tmp-CKPT+000002"
    leftover.mkdir()
    (leftover / "a.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()  # somebody else's
    assert numbers(checkpointer) == [1]
    assert checkpointer.recover_if_possible().number == 1
    checkpointer.save_checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+000001", "CKPT+000002", "notes"]


def test_long_and_unusual_paths_work(tmp_path):
    folder = tmp_path / "Ünï codé 模型" / ("x" * 200) / ("y" * 200)
    Checkpointer(folder, {"模型": Holder(7)}).save_checkpoint()
    holder = Holder()
    Checkpointer(str(folder), {"模型": holder}).recover_if_possible()
    assert holder.state == 7
