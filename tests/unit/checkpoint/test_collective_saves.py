"""Several processes save and load one checkpoint together, also where each holds all of the model (ddp)."""

import os
from datetime import timedelta
from itertools import product

import pytest
import torch
import torch.distributed as dist
from logged import logged
from processes import in_processes
from torch import nn

from amp_recipes.checkpoint import Checkpointer, CheckpointPolicy
from amp_recipes.errors import CheckpointError, ConfigError


class Gathering:
    """A recoverable that asks all ranks for its state, as the run's position does."""

    def __init__(self, rank):
        self.rank, self.loaded = rank, None

    def state_dict(self):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, self.rank * 10)
        return {"of_ranks": values}

    def load_state_dict(self, state):
        self.loaded = state["of_ranks"][self.rank % len(state["of_ranks"])]


def model(value=0.0):
    made = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def told(job):
    """The error that `job` raises, as text."""
    try:
        job()
    except (CheckpointError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# -------------------------------------------------------------- saves


def save_and_load(rank, folder, background):
    net, position = model(1.5), Gathering(rank)
    checkpointer = Checkpointer(folder, {"modules": net, "position": position})
    names = []
    if background:
        checkpointer.start_saving({"loss": 2.0}, then=lambda saved: names.append(saved.path.name))
        checkpointer.wait()
    else:
        names.append(checkpointer.save_checkpoint({"loss": 2.0}).path.name)
    other, again = model(0.0), Gathering(rank)
    found = Checkpointer(folder, {"modules": other, "position": again}).recover_if_possible()
    return names, found.number, found.meta, other.weight.tolist(), again.loaded, position.loaded


@pytest.mark.parametrize("background", [False, True])
def test_rank_0_alone_writes_and_all_load(tmp_path, background):
    found = in_processes(save_and_load, 2, tmp_path, background)
    for rank, (names, number, meta, weight, position, untouched) in enumerate(found):
        assert names == ([] if background and rank else ["CKPT+000001"])
        assert (number, meta, weight) == (1, {"loss": 2.0}, [[1.5] * 3] * 2)
        assert (position, untouched) == (rank * 10, None)
    assert sorted(os.listdir(tmp_path / "CKPT+000001")) == [
        "MANIFEST.sha256",
        "meta.json",
        "modules.safetensors",
        "position.safetensors",
    ]


def keep_only(rank, folder):
    checkpointer = Checkpointer(folder, {"modules": model(rank)})
    seen = []
    for loss in (3.0, 1.0, 2.0):
        checkpointer.save_and_keep_only({"loss": loss}, min_keys=["loss"])
        seen.append(sorted(os.listdir(folder)))
    return seen


def test_what_is_to_go_is_gone_on_every_rank_when_the_save_returns(tmp_path):
    expected = [["CKPT+000001"], ["CKPT+000002"], ["CKPT+000002", "CKPT+000003"]]
    assert in_processes(keep_only, 2, tmp_path) == [expected, expected]


REASONS = {
    "nan": "parameters are not finite (NaN or infinite): modules.weight",
    "disk": "disk is full",
    "state": "division",
}


def failing_in_every_way(rank, folder):
    ways = product(REASONS, [False, True])
    return {
        (how, background): failing(rank, folder / f"{how} {background}", how, background) for how, background in ways
    }


def failing(rank, folder, how, background):
    net = model(1.0)
    checkpointer = Checkpointer(folder, {"modules": net})
    checkpointer.save_checkpoint()
    if how == "nan" and rank == 0:
        net.weight.data[0, 0] = torch.nan
    if how == "disk" and rank == 0:
        write = os.write
        os.write = lambda descriptor, content: _full()
    if how == "state":
        bad = Gathering(rank)
        bad.state_dict = lambda: 1 / rank  # fails on rank 0 only
        checkpointer.add_recoverable("bad", bad)

    def save():
        if background:
            checkpointer.start_saving()
            checkpointer.wait()
        else:
            checkpointer.save_checkpoint()

    text = told(save)
    if how == "disk" and rank == 0:
        os.write = write
    net.weight.data.fill_(2.0)
    checkpointer.recoverables.pop("bad", None)
    return text, checkpointer.save_checkpoint().number, sorted(os.listdir(folder))


def _full():
    raise OSError(28, "No space left on device")


def test_what_fails_on_rank_0_is_raised_on_all_and_the_next_save_works(tmp_path, subtests):
    of_ranks = in_processes(failing_in_every_way, 2, tmp_path)
    for how, background in of_ranks[0]:
        with subtests.test(f"{how}, {'background' if background else 'foreground'}"):
            for text, number, left in (found[how, background] for found in of_ranks):
                assert (
                    REASONS[how] in text and "CKPT+000002 was not written" in text and "CKPT+000001 is intact" in text
                )
                assert (number, left) == (2, ["CKPT+000001", "CKPT+000002"])


def bad_key(rank, folder):
    checkpointer = Checkpointer(folder, {"modules": model()})
    return told(lambda: checkpointer.save_and_keep_only({"loss": 1.0}, min_keys=["los"]))


def test_an_error_of_what_follows_the_save_is_raised_on_all(tmp_path):
    first, second = in_processes(bad_key, 2, tmp_path)
    assert first == second and "Did you mean 'loss'?" in first


def alone(rank, folder):
    dist.destroy_process_group()
    store = (folder.parent / f"{folder.name}-store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=4))
    checkpointer = Checkpointer(folder, {"modules": model()})
    checkpointer.save_checkpoint()
    return told(checkpointer.save_checkpoint) if rank == 0 else None


def test_a_save_on_rank_0_alone_says_that_all_are_to_call_it(tmp_path):
    text, _ = in_processes(alone, 2, tmp_path)
    assert "every rank must call" in text and "distributed_timeout_minutes" in text
    assert os.listdir(tmp_path) == ["CKPT+000001"]


def crossed(rank, folder):
    checkpointer = Checkpointer(folder, {"modules": model()})
    checkpointer.save_checkpoint()
    return told(checkpointer.save_checkpoint if rank == 0 else checkpointer.recover_if_possible)


def test_a_save_that_meets_a_load_is_refused_on_both(tmp_path):
    for text in in_processes(crossed, 2, tmp_path):
        assert "rank 0 wants to save a checkpoint, rank 1 wants to load a checkpoint" in text


# -------------------------------------------------------------- loads


def damaged_for_one(rank, folder, where):
    net = model(1.0)
    checkpointer = Checkpointer(folder, {"modules": net, "more": model(0.0)})
    checkpointer.save_checkpoint()
    net.weight.data.fill_(2.0)
    newest = checkpointer.save_checkpoint()
    dist.barrier()
    if rank == 1:
        if where == "unseen":  # another machine, with a folder of its own
            checkpointer.checkpoints_dir = folder / "elsewhere"
            (folder / "elsewhere" / "CKPT+000001").mkdir(parents=True)
            for file in (folder / "CKPT+000001").iterdir():
                (folder / "elsewhere" / "CKPT+000001" / file.name).write_bytes(file.read_bytes())
        else:
            path = newest.path / "more.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    dist.barrier()
    with logged("damaged") as texts:
        found = checkpointer.recover_if_possible()
    return found.number, net.weight[0, 0].item(), [text for text in texts if "damaged" in text]


@pytest.mark.parametrize("where", ["damaged", "unseen"])
def test_what_one_rank_cannot_read_is_left_by_all(tmp_path, where):
    for number, weight, messages in in_processes(damaged_for_one, 2, tmp_path, where):
        assert (number, weight, len(messages)) == (1, 1.0, 1)
        assert ("more.safetensors" in messages[0]) == (where == "damaged")
        assert ("file system that all machines share" in messages[0]) == (where == "unseen")


def other_model(rank, folder):
    Checkpointer(folder, {"modules": model(1.0)}).save_checkpoint()
    mine = nn.Linear(3, 4) if rank == 1 else model(0.0)
    before = mine.weight.clone()
    text = told(Checkpointer(folder, {"modules": mine}).recover_if_possible)
    return text, torch.equal(mine.weight, before)


def test_another_model_on_one_rank_is_refused_on_all(tmp_path):
    for text, untouched in in_processes(other_model, 2, tmp_path):
        assert "modules.weight: shape (4, 3) here, (2, 3) in the checkpoint" in text and untouched


class Picky(Gathering):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if self.rank == 1 and not state:
            raise ValueError("not mine")


def one_does_not_take_it(rank, folder):
    net = model(1.0)
    Checkpointer(folder, {"modules": net, "picky": Picky(0)}).save_checkpoint()
    net.weight.data.fill_(5.0)
    text = told(Checkpointer(folder, {"modules": net, "picky": Picky(rank)}).recover_if_possible)
    return text, net.weight[0, 0].item()


def test_where_one_rank_cannot_load_all_take_back_what_they_had(tmp_path):
    for text, weight in in_processes(one_does_not_take_it, 2, tmp_path):
        assert "failed: not mine" in text and weight == 5.0


# -------------------------------------------------------------- the keeper


def keeps(rank, folder):
    made = CheckpointPolicy(None, folder, writes=True)
    made.register("modules", model(1.0))
    dues = [made.due(2, False), made.due(2, False), made.due(0, False), made.due(0, made.clock_due(1e-9))]
    for epoch in (1, 2, 3, 4):
        made.save_epoch({"epoch": epoch, "loss": 1.0 / epoch}, "loss", "min")
    made.save_inside_epoch({"epoch": 5})
    made.finish()
    left = sorted(os.listdir(folder))
    dist.barrier()
    again = CheckpointPolicy(None, folder, writes=True)
    again.register("modules", model(0.0))
    fresh = again.resume("never")
    return made.saves, dues, left, fresh, again.set_aside_number, sorted(os.listdir(folder)), again.resume("auto")


def test_every_rank_saves_and_the_main_one_renames_and_deletes(tmp_path):
    found = in_processes(keeps, 2, tmp_path / "save")
    for rank, (saves, dues, left, fresh, number, after, none) in enumerate(found):
        assert saves and dues == [False, True, False, True]
        assert left == ["CKPT+000003", "CKPT+000004", "CKPT+000005"]
        assert (fresh, number, after, none) == (None, None if rank else 1, [], None)
