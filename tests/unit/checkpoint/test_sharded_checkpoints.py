"""Tensors that lie in parts on several processes: saved by all, loaded in any number of them and under any strategy."""

import errno
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from logged import logged
from processes import in_processes
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from amp_recipes.checkpoint import Checkpointer, best_checkpoint, find_newest, load_weights, make_newest, model_weights
from amp_recipes.checkpoint import folder as checkpoint_folder
from amp_recipes.checkpoint.checkpointer import FORMAT_VERSION
from amp_recipes.checkpoint.folder import meta_as_json
from amp_recipes.checkpoint.saving import write_folder
from amp_recipes.checkpoint.shards import OpenFiles
from amp_recipes.checkpoint.state_format import PackedState
from amp_recipes.commands.export import export_run
from amp_recipes.errors import CheckpointError
from amp_recipes.loop.ema import WeightAverage
from amp_recipes.state.outstanding_gradients import OutstandingGradients


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Rows that divide evenly and not (5, 3), fewer rows than ranks (1), tied weights, a 0-d buffer, a frozen part."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embedding = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.few = nn.Linear(6, 1)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.tensor(3.5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)).sum() + self.few(x).square().sum()


def made(seed, strategy):
    """A model of that seed, shared among the processes by a strategy, with an optimizer and averages."""
    torch.manual_seed(seed)
    net = Net()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,))
    elif strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    elif strategy == "tp+fsdp":
        whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in net.blocks:
            parallelize_module(block, whole["tensor"], plan)
        mesh = whole["data"]
    if strategy != "ddp":
        ignored = set(net.frozen.parameters())
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh, ignored_params=ignored)
    optimizer = torch.optim.AdamW([it for it in net.parameters() if it.requires_grad], lr=0.01)
    return net, optimizer, WeightAverage(net, 0.9)


def train(net, optimizer, averages, steps=2):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        net(torch.randn(4, 6, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update()


def whole(value):
    """Everything in a state with the tensors whole, gathered by torch itself."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def states(net, optimizer, averages):
    return {name: whole(it.state_dict()) for name, it in named(net, optimizer, averages).items()}


def named(net, optimizer, averages):
    return {"modules": net, "optimizer": optimizer, "ema": averages}


def same(first, second):
    """Whether two states are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def save(rank, folder, strategy, background=False):
    parts = made(0, strategy)
    train(*parts)
    expected = states(*parts)
    checkpointer = Checkpointer(folder, named(*parts))
    if background:
        checkpointer.start_saving({"epoch": 1})
        train(*parts, steps=3)  # what is saved is what was
        checkpointer.wait()
    else:
        checkpointer.save_checkpoint({"epoch": 1})
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    dist.is_initialized() and dist.barrier()


def load(rank, folder, strategy):
    """What a load gives, and whether it trains on as what was saved does."""
    expected = torch.load(folder / "expected.pt")
    found = {}
    for name, steps in (("fresh", 0), ("trained", 1)):
        parts = made(7, strategy)
        train(*parts, steps=steps)
        kinds = {key: type(it) for key, it in parts[0].state_dict().items()}
        Checkpointer(folder, named(*parts)).recover_if_possible()
        assert {key: type(it) for key, it in parts[0].state_dict().items()} == kinds
        found[name] = {key: same(it, expected[key]) for key, it in states(*parts).items()}
        train(*parts, steps=1)
    return found


EQUAL = {name: {"modules": True, "optimizer": True, "ema": True} for name in ("fresh", "trained")}
# From a strategy and a number of processes to others; each is loaded from and into at least twice.
COURSES = [((2, "fsdp"), [(1, "ddp")]), ((1, "ddp"), [(2, "tp+fsdp")])]
LONG_COURSES = [
    ((1, "ddp"), [(2, "fsdp"), (4, "tp+fsdp")]),
    ((2, "ddp"), [(1, "ddp"), (4, "fsdp")]),
    ((2, "fsdp"), [(1, "ddp"), (4, "fsdp"), (2, "ddp")]),
    ((4, "fsdp"), [(2, "fsdp"), (4, "hsdp")]),
    ((4, "hsdp"), [(1, "ddp"), (4, "hsdp"), (2, "tp+fsdp")]),
    ((4, "tp+fsdp"), [(1, "ddp"), (4, "tp+fsdp"), (2, "fsdp")]),
]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [*COURSES, *(pytest.param(*course, marks=pytest.mark.extended) for course in LONG_COURSES)],
    ids=lambda it: str(it[0]) + it[1] if type(it) is tuple else None,
)
def test_a_load_in_any_number_of_processes_and_strategy_is_equal_bit_for_bit(tmp_path, saved, loaded):
    count, strategy = saved
    in_processes(save, count, tmp_path, strategy, strategy == "fsdp" and count == 2)
    expected = torch.load(tmp_path / "expected.pt")
    read = Checkpointer(tmp_path).read(Checkpointer(tmp_path).find_checkpoint())
    assert all(same(whole(read[name]), expected[name]) for name in ("modules", "ema", "optimizer"))
    assert read["modules"]["head.weight"] is read["modules"]["embedding.weight"]  # tied ones are one tensor again
    for other_count, other in loaded:
        assert in_processes(load, other_count, tmp_path, other) == [EQUAL] * other_count, (other_count, other)


# -------------------------------------------------------------- what lies on the disk


# 4 ranks hold 2 copies of the model, in 2 parts each: ranks 0 and 1 write theirs.
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "fsdp"), pytest.param(4, "hsdp", marks=pytest.mark.extended)])
def test_the_files_hold_each_element_once_and_no_code(tmp_path, ranks, strategy):
    in_processes(save, ranks, tmp_path, strategy)
    folder = tmp_path / "CKPT+000001"
    files = sorted(it.name for it in folder.iterdir())
    assert files == [
        "MANIFEST.sha256",
        "ema.safetensors",
        "ema@00000.safetensors",
        "ema@00001.safetensors",
        "meta.json",
        "modules.safetensors",
        "modules@00000.safetensors",
        "modules@00001.safetensors",
        "optimizer.safetensors",
        "optimizer@00000.safetensors",
        "optimizer@00001.safetensors",
    ]
    assert json.loads((folder / "meta.json").read_text())["shards"] == ranks
    manifest = (folder / "MANIFEST.sha256").read_text()
    assert all(name in manifest for name in files[1:])
    sizes = sum((folder / name).stat().st_size - header(folder / name) for name in files if name.startswith("modules"))
    assert sizes == sum(it.nbytes for it in {id(it): it for it in Net().state_dict(keep_vars=True).values()}.values())


def header(path):
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def watched_load(rank, folder, strategy):
    """Names of the files of which this rank takes the sha256, and how many bytes of tensors it reads."""
    hashed, read = [], []
    real_sum, real_part = checkpoint_folder.file_sha256, OpenFiles.part
    checkpoint_folder.file_sha256 = lambda path: hashed.append(path.name) or real_sum(path)

    def part(self, piece, shared):
        found = real_part(self, piece, shared)
        read.append((piece.file, found.nbytes))
        return found

    OpenFiles.part = part
    parts = made(1, strategy)
    Checkpointer(folder, named(*parts)).recover_if_possible()
    return sorted(set(hashed) - {"meta.json"}), {file for file, _ in read}, sum(count for _, count in read)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A folder of checkpoints of two processes under fsdp."""
    folder = tmp_path_factory.mktemp("sharded")
    in_processes(save, 2, folder, "fsdp")
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder of checkpoints of one process."""
    folder = tmp_path_factory.mktemp("single")
    in_processes(save, 1, folder, "ddp")
    return folder


def test_each_rank_reads_its_own_part_and_each_file_is_verified_once(sharded, single):
    files = sorted(it.name for it in (sharded / "CKPT+000001").glob("*.safetensors"))
    everything = sum(in_processes(watched_load, 1, sharded, "ddp")[0][2:])
    found = in_processes(watched_load, 2, sharded, "fsdp")
    assert sorted([*found[0][0], *found[1][0]]) == files
    for rank, (_, read, count) in enumerate(found):
        assert {it.partition("@")[2] for it in read} == {"", f"{rank:05d}.safetensors"}
        assert count < 0.65 * everything  # what is not sharded is read by both
    for _, _, count in in_processes(watched_load, 2, single, "fsdp"):
        assert count < 0.65 * everything


# -------------------------------------------------------------- damage


def load_older(rank, folder, other):
    parts = made(0, "fsdp")
    checkpointer = Checkpointer(folder, named(*parts))
    old = checkpointer.save_checkpoint({"epoch": 1})
    expected = states(*parts)
    train(*parts)
    newest = checkpointer.save_checkpoint({"epoch": 2})
    dist.barrier()
    path = newest.path / f"modules@{other:05d}.safetensors"
    if rank == 0:
        content = path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    dist.barrier()
    with logged(path.name):
        found = checkpointer.recover_if_possible()
    return found.number == old.number and same(states(*parts), expected)


def test_a_damaged_part_that_one_rank_reads_has_all_take_the_older_checkpoint(tmp_path):
    assert in_processes(load_older, 2, tmp_path, 1) == [True, True]


def refused(rank, folder):
    parts = made(0, "fsdp")
    checkpointer = Checkpointer(folder, named(*parts))
    local = parts[0].blocks[0].up.weight.to_local()
    if rank == 1:
        local.data[0, 0] = torch.inf
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save_checkpoint()
    kept = os.listdir(folder)
    other = Checkpointer(folder, {"modules": made(0, "fsdp")[0], "half": Half()})
    with pytest.raises(CheckpointError) as refusal:
        other.save_checkpoint()
    return str(caught.value), kept, str(refusal.value)


def disk_full(rank, folder):
    parts = made(0, "fsdp")
    checkpointer = Checkpointer(folder, named(*parts))
    checkpointer.save_checkpoint({"epoch": 1})
    write = os.write
    if rank == 1:
        os.write = full
    with pytest.raises(CheckpointError) as caught:
        checkpointer.start_saving({"epoch": 2})
        checkpointer.wait()
    os.write = write
    dist.barrier()
    left = sorted(os.listdir(folder))
    dist.barrier()
    return str(caught.value), left, checkpointer.save_checkpoint({"epoch": 2}).number


def full(descriptor, content):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_for_one_rank_leaves_nothing_and_is_told_to_all(tmp_path):
    for text, left, number in in_processes(disk_full, 2, tmp_path):
        assert "disk is full" in text and "CKPT+000001 is intact" in text
        assert (left, number) == (["CKPT+000001"], 2)


class Half:
    """Holds a sharded tensor of a dtype that safetensors lacks."""

    def state_dict(self):
        mesh = init_device_mesh("cpu", (2,))
        return {"z": distribute_tensor(torch.zeros(4, dtype=torch.complex64), mesh, [Shard(0)])}

    def load_state_dict(self, state):
        raise AssertionError


def test_an_infinity_in_one_part_is_refused_by_all_and_so_is_a_dtype_that_files_lack(tmp_path):
    for nonfinite, kept, dtype in in_processes(refused, 2, tmp_path):
        assert "modules.blocks.0.up.weight" in nonfinite and kept == []
        assert "['z'] is a sharded tensor of complex64" in dtype


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([["../a.safetensors", [0, 0], [2, 2]]], "not a file of a checkpoint"),
        ([["a@00000.safetensors", [0, 0], [1, 2]]], "expected [1, 2]"),
        ([], "hold 0 of 4 elements"),
        ([["a@00000.safetensors", [0, 0], [2, 2]]] * 2, "hold 8 of 4 elements"),
        ([["b.safetensors", [0, 0], [2, 2]]], "does not list b.safetensors"),
    ],
)
def test_an_index_of_parts_that_was_made_up_is_damage(tmp_path, pieces, why):
    entry = {"dtype": "F32", "shape": [2, 2], "pieces": pieces}
    states = {
        "a": PackedState({"x": {"$sharded": "x"}}, {}, {"x": entry}),
        "a@00000": PackedState({"offsets": {"x": [0, 0]}}, {"x": torch.ones(2, 2)}),
    }
    write_folder(tmp_path / "CKPT+000001", states, meta_as_json(FORMAT_VERSION, ["a"], {}, shards=1))
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(why)):
        checkpointer.read(checkpointer.find_checkpoint())


# -------------------------------------------------------------- forms and dtypes


class Held:
    """Any state; `layouts` shares what a load gives as its entries are."""

    def __init__(self, state):
        self.state = self.loaded = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state


def forms(mesh):
    tensors = {
        "bf16": torch.arange(10).bfloat16().reshape(5, 2),
        "fp8": torch.arange(6.0).reshape(6, 1).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(12).reshape(3, 2, 2) << 40,
        "fp64": torch.linspace(0, 1, 7, dtype=torch.float64),
        "one_row": torch.ones(1, 3),
        "empty": torch.zeros(0, 3),
    }
    shared = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items() if name != "fp8"}
    shared["columns"] = distribute_tensor(torch.arange(15.0).reshape(3, 5), mesh, [Shard(1)])
    shared["everywhere"] = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    shared["scalar"] = distribute_tensor(torch.tensor(2.5), mesh, [Replicate()])
    local = tensors["fp8"].chunk(2)[dist.get_rank()]
    shared["fp8"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return {"nested": [shared, (shared["bf16"], 3)]}


def save_forms(rank, folder):
    state = forms(init_device_mesh("cpu", (2,)))
    held = Held(state)
    checkpointer = Checkpointer(folder, {"held": held})
    checkpointer.save_checkpoint()
    checkpointer.recover_if_possible()
    loaded, first = held.loaded["nested"][0], state["nested"][0]
    equal = {
        name: torch.equal(loaded[name].to_local().view(torch.uint8), it.to_local().view(torch.uint8))
        for name, it in first.items()
        if it.ndim
    }
    kinds = {name: loaded[name].placements == it.placements for name, it in first.items() if it.ndim}
    return equal, kinds, held.loaded["nested"][1][0] is loaded["bf16"]


def test_every_dtype_and_form_comes_back(tmp_path):
    for equal, kinds, tied in in_processes(save_forms, 2, tmp_path):
        assert all(equal.values()) and all(kinds.values()) and tied, (equal, kinds)
    found = Checkpointer(tmp_path).read(Checkpointer(tmp_path).find_checkpoint())["held"]["nested"][0]
    assert torch.equal(found["columns"], torch.arange(15.0).reshape(3, 5))
    assert torch.equal(found["int64"], torch.arange(12).reshape(3, 2, 2) << 40)
    assert found["empty"].shape == (0, 3) and found["scalar"] == 2.5
    assert torch.equal(found["fp8"].float(), torch.arange(6.0).reshape(6, 1))


# -------------------------------------------------------------- beginning with the weights of a run


def begin_with(rank, folder, strategy):
    net = made(3, strategy)[0]
    checkpoint = best_checkpoint(folder)
    expected = torch.load(folder / "expected.pt")
    averaged = {**expected["modules"], **expected["ema"], "head.weight": expected["ema"]["embedding.weight"]}
    equal = []
    for weights in (model_weights(checkpoint), model_weights(checkpoint, net)):
        net.load_state_dict(made(3, strategy)[0].state_dict())
        load_weights(net, weights, "it")
        equal.append(same(whole(dict(net.state_dict())), averaged))
    return equal


@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        ("fsdp", "ddp"),
        ("ddp", "fsdp"),
        pytest.param("fsdp", "fsdp", marks=pytest.mark.extended),
        pytest.param("ddp", "ddp", marks=pytest.mark.extended),
    ],
)
def test_a_run_begins_with_the_averaged_weights_of_another(tmp_path, strategy, other):
    in_processes(save, 2, tmp_path, strategy)
    assert in_processes(begin_with, 2, tmp_path, other) == [[True, True]] * 2


# -------------------------------------------------------------- as one file


def save_again(rank, folder, to):
    parts = made(5, "ddp")
    Checkpointer(folder, named(*parts)).recover_if_possible()
    Checkpointer(to, named(*parts)).save_checkpoint({"epoch": 1})


def test_a_sharded_checkpoint_is_exported_as_one_of_a_single_process(tmp_path, sharded):
    in_processes(save_again, 1, sharded, tmp_path / "again")
    export_run(sharded, tmp_path / "first")
    export_run(tmp_path / "again", tmp_path / "second")
    files = [tmp_path / name / "model.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes()[header(files[0]) :] == files[1].read_bytes()[header(files[1]) :]
    found, other = map(load_file, files)
    assert found.keys() == other.keys() == Net().state_dict().keys() and all(map(same, found.values(), other.values()))


# -------------------------------------------------------------- going back


def go_back(rank, folder):
    parts = made(0, "fsdp")
    place = Held({"update": 1})
    checkpointer = Checkpointer(folder, {**named(*parts), "brain": place})
    checkpointer.save_checkpoint({"epoch": 1})
    expected = states(*parts)
    train(*parts)
    place.state = {"update": 2}
    checkpointer.save_checkpoint({"epoch": 2})
    dist.barrier()
    if rank == 0:
        checkpoint, found = find_newest(checkpointer, "brain", lambda it, brain: brain["update"] == 1)
        found["brain"]["recovery"] = True
        make_newest(checkpointer, checkpoint, found)
    dist.barrier()
    found = checkpointer.recover_if_possible()
    return found.number, same(states(*parts), expected), place.loaded, sorted(os.listdir(folder))


def test_the_main_process_alone_makes_an_earlier_sharded_checkpoint_the_newest(tmp_path):
    left = ["CKPT+000001", "CKPT+000003"]
    assert in_processes(go_back, 2, tmp_path) == [(3, True, {"update": 1, "recovery": True}, left)] * 2


# -------------------------------------------------------------- gradients between a backward and its step


def gradients(rank, folder, strategy):
    net, optimizer, _averages = made(0, strategy)
    outstanding = OutstandingGradients(net, lambda: {"optimizer": optimizer}, str)
    net(torch.ones(2, 6)).backward()
    expected = whole(outstanding.state_dict())
    checkpointer = Checkpointer(folder, {"modules": net, "gradients": outstanding})
    checkpointer.save_checkpoint()
    optimizer.zero_grad()
    checkpointer.recover_if_possible()
    kinds = {type(it.grad) is type(it.detach()) for it in net.parameters() if it.grad is not None}
    return same(whole(outstanding.state_dict()), expected), kinds, len(expected)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_that_wait_for_their_step_come_back_as_they_were_shared(tmp_path, strategy):
    assert in_processes(gradients, 2, tmp_path, strategy) == [(True, {True}, 15)] * 2


# -------------------------------------------------------------- a load that fails


class Refuses(Held):
    def load_state_dict(self, state):
        if state == "saved":
            raise ValueError("not this")


def taken_back(rank, folder):
    parts = made(0, "fsdp")
    Checkpointer(folder, {**named(*parts), "last": Held("saved")}).save_checkpoint()
    train(*parts)
    expected = states(*parts)
    with pytest.raises(CheckpointError, match=r"not this\. All objects were restored to their earlier state"):
        Checkpointer(folder, {**named(*parts), "last": Refuses("live")}).recover_if_possible()
    equal = same(states(*parts), expected)
    net = made(0, "fsdp")[0]
    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match=r"few\.weight: shape"):
        net.few.weight = nn.Parameter(torch.zeros(2, 6))
        Checkpointer(folder, {"modules": net}).recover_if_possible()
    return equal


def test_a_load_that_one_object_refuses_is_taken_back(tmp_path):
    assert in_processes(taken_back, 2, tmp_path) == [True, True]


# -------------------------------------------------------------- a rank that is killed inside a save (row 22)


def save_and_die(rank, folder, point, background):
    """Rank 1 is killed at its `point`-th call to the disk in the second save; returns how many it makes."""
    parts = made(0, "fsdp")
    checkpointer = Checkpointer(folder, named(*parts))
    checkpointer.save_checkpoint({"epoch": 1})
    train(*parts, steps=1)
    calls = []
    if rank == 1:
        for name in ("open", "write", "fsync", "close"):
            setattr(os, name, dying(getattr(os, name), calls, point))
    try:
        if point == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if background:
            checkpointer.start_saving({"epoch": 2})
        else:
            checkpointer.save_checkpoint({"epoch": 2})
        checkpointer.wait()
    except CheckpointError as error:
        Path(folder, "told").write_text(str(error))
    return len(calls)


def dying(function, calls, point):
    def call(*args, **kwargs):
        calls.append(function)
        if len(calls) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return call


@pytest.fixture(scope="module")
def calls_of_a_save(tmp_path_factory):
    _, calls = in_processes(save_and_die, 2, tmp_path_factory.mktemp("whole"), 10**9, False)
    assert calls >= 9  # three files
    return calls


@pytest.mark.parametrize("part", [0.5, *(pytest.param(it, marks=pytest.mark.extended) for it in (0.0, 0.1, 1.0))])
def test_a_rank_killed_inside_a_save_leaves_the_old_checkpoint_and_no_torn_one(tmp_path, calls_of_a_save, part):
    point = int(part * calls_of_a_save)
    with pytest.raises(AssertionError, match="rank 1: ended without an answer"):
        in_processes(save_and_die, 2, tmp_path, point, point % 2 == 0)
    assert "did not answer" in (tmp_path / "told").read_text()
    checkpointer = Checkpointer(tmp_path)
    assert [it.meta["epoch"] for it in checkpointer.list_checkpoints()] == [1]
    assert checkpointer.read(checkpointer.find_checkpoint()).keys() == {"modules", "optimizer", "ema"}
