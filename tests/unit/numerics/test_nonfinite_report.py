"""A report is strict JSON, and its folder gives the step back, bit for bit, or says why it cannot."""

import dataclasses
import json
import math
import os
import shutil
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import run_python
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

from amp_recipes.errors import CheckpointError, ConfigError
from amp_recipes.numerics.nonfinite.cause import locate
from amp_recipes.numerics.nonfinite.command import checked
from amp_recipes.numerics.nonfinite.plain_batches import PlainBatches
from amp_recipes.numerics.nonfinite.report import NonfiniteReport, read_command, read_replay, write_report
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.precision import pin_fp32
from amp_recipes.state.randomness import set_torch_random_state, torch_random_state

COMMAND = {"script": "train.py", "words": ["config.yaml", "--precision=fp16"], "cwd": "/tmp"}
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Pictures:
    image: torch.Tensor
    names: list


@dataclasses.dataclass(frozen=True)
class Frozen:
    lengths: torch.Tensor
    rate: float = 0.5

    def __post_init__(self):
        raise AssertionError("no code of the batch's class runs when it is read")


def frozen(lengths):
    made = object.__new__(Frozen)
    object.__setattr__(made, "lengths", lengths)
    object.__setattr__(made, "rate", 0.25)
    return made


class Unlucky(nn.Module):
    """Which sample goes wrong depends on the dropout mask, on the weights and on a buffer that is not saved."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.drop, self.norm = nn.Linear(6, 16), nn.Dropout(0.5), nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)
        self.register_buffer("bound", torch.rand(()) * 0.2 + 1.1, persistent=False)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)))
        return self.last(h * (2 * self.bound - h.amax(-1, keepdim=True)).clamp(min=0).log())


def classified(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batch():
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.arange(8) % 3}


@pytest.fixture
def written(tmp_path):
    """A report, and the folder that it left."""
    model, window = Unlucky(1), [batch()]
    trial = plain_trial(model, classified)
    random = torch_random_state(torch.device("cpu"))
    pin_fp32(model, ["last"])
    report = locate(trial, window, torch.bfloat16, 2.0)
    report.step = 17
    return report, write_report(tmp_path / "run", report, trial, window, random, COMMAND)


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_the_json_is_strict_and_has_what_was_promised(written):
    report, folder = written
    file = folder.with_suffix(".json")
    assert (file.name, folder.name) == ("nonfinite-17.json", "nonfinite-17")
    content = json.loads(file.read_text(), parse_constant=refuse_constant)
    assert list(content)[:9] == ["step", "module", "op", "phase", "dtype", "cause", "samples", "range", "message"]
    assert content["caveats"] == [] and "found" not in content
    assert content["step"] == 17 and content["module"] == "" and content["cause"] == "model"
    assert content["op"] == "aten::log" and content["samples"] == report.samples and content["precision"] == "bfloat16"
    assert set(content["range"][0]) == {"dtype", "shape", "min", "max", "nonfinite"}
    assert content["replay"] == "nonfinite-17" and content["no_replay"] is None
    assert content["line"] == report.line and content["replays"] == report.replays


def test_nonfinite_numbers_are_text():
    report = NonfiniteReport("model", "", torch.float32, math.inf, samples=[1], seconds=math.nan, ratio=-math.inf)
    content = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (content["scale"], content["seconds"], content["ratio"]) == ("inf", "nan", "-inf")
    assert content["step"] is None and report.name == "nonfinite"


def test_the_step_goes_wrong_again_in_another_model(written):
    then, folder = written
    replay = read_replay(folder)
    assert (replay.dtype, replay.scale, replay.pins) == (torch.bfloat16, 2.0, ["last"])
    assert {key: replay.command[key] for key in COMMAND} == COMMAND
    kept = read_command(folder)
    assert kept.pop("not_vouched_for") and kept == {**COMMAND, "module": None, "masked": []}
    assert replay.report["message"] == then.message and replay.versions["torch"] == torch.__version__
    model = Unlucky(2)
    pin_fp32(model, replay.pins)
    buffers = {name: it for name, it in model.named_buffers()}
    other = locate(plain_trial(model, classified), replay.window, replay.dtype, replay.scale)
    assert "differs from the report of step 17" in replay.compared_with(other)
    replay.load_into(model)
    assert all(it is buffers[name] for name, it in model.named_buffers())
    torch.manual_seed(5)
    set_torch_random_state(replay.random, torch.device("cpu"))
    now = locate(plain_trial(model, classified), replay.window, replay.dtype, replay.scale)
    assert now.samples == then.samples and now.message == then.message
    assert "The same as in step 17" in replay.compared_with(now)
    now.cause = "data"
    assert "cause was 'model' then and is 'data' now" in replay.compared_with(now)


def test_nothing_is_pickled(written):
    _, folder = written
    states = {f"{name}.safetensors" for name in ("buffers", "parameters", "random", "window")}
    assert {it.name for it in folder.iterdir()} == {"MANIFEST.sha256", "meta.json", *states}


def equal(one, other):
    """Equal in kind, class and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
        return same and one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if dataclasses.is_dataclass(one):
        return equal(vars(one), vars(other))
    return one == other


def write(folder, window, model=None, **kwargs):
    """The folder of a finite step."""
    model = nn.Linear(2, 2) if model is None else model
    report = NonfiniteReport("not replayable", "finite", torch.float32, 1.0, step=3)
    trial = plain_trial(model, lambda model, batch: model(batch).sum())
    return write_report(Path(folder), report, trial, window, torch_random_state(torch.device("cpu")), **kwargs)


def test_batches_come_back_as_they_were(tmp_path):
    x = torch.randn(3, 4)
    window = [
        {"x": x, "low": x.half(), 3: [x.double(), None, "text", 2.5, math.nan, math.inf, True], "empty": ()},
        Pair(x, Pair({"deep": (x.int(), [Pair(1, x > 0)])}, np.arange(3, dtype=np.int16))),
        Pictures(x, ["a", "b"]),
        [frozen(x), frozen(frozen(x))],
        OrderedDict(b=x, a={"set": {1, 2}}),
        pack_sequence([x, x[:2]]),
        torch.ones(2, requires_grad=True),
        x.t(),
    ]
    back = read_replay(write(tmp_path, window)).window
    assert math.isnan(back[0][3][4]) and math.isnan(window[0][3][4])
    window[0][3][4] = back[0][3][4] = 0.0
    assert len(back) == len(window) and all(map(equal, window, back))
    assert type(back[1]) is Pair and type(back[2]) is Pictures and type(back[3][1].lengths) is Frozen
    assert back[7].stride() == window[7].stride()


class Mesh:
    """What only a pickle could hold."""


def test_what_a_folder_cannot_hold_is_named(tmp_path):
    window = [{"x": torch.ones(2), "mesh": [Mesh()], "sparse": torch.eye(2).to_sparse()}]
    folder = write(tmp_path, window)
    assert folder.is_dir()  # weights and the rest are there to look at
    with pytest.raises(CheckpointError, match=r"cannot be replayed.*\['mesh'\]\[0\].*Mesh") as caught:
        read_replay(folder)
    assert "['sparse']" in str(caught.value)
    around = []
    around.append(around)
    with pytest.raises(CheckpointError, match="contains itself"):
        read_replay(write(tmp_path, [around]))


def test_only_classes_of_batches_are_made():
    for kind, name, value in (
        ("namedtuple", "test_nonfinite_report:Gone", [1]),
        ("namedtuple", "not_imported:Pair", [1, 2]),
        ("namedtuple", "subprocess:Popen", ["true"]),
        ("namedtuple", "os:system", ["true"]),
        ("dataclass", "subprocess:Popen", {"args": "true"}),
        ("dataclass", "builtins:dict", {"a": 1}),
        ("dataclass", f"{__name__}:Mesh", {"a": 1}),
        ("namedtuple", f"{__name__}:Pair", [1]),
        ("pickle", f"{__name__}:Pair", [1, 2]),
    ):
        with pytest.raises(CheckpointError, match="not imported"):
            PlainBatches([value], [((0,), kind, name)]).restored()


def test_damage_is_found(written, tmp_path):
    _, folder = written
    for name in [it.name for it in folder.iterdir()]:
        for harm in ("flip", "cut", "remove", "link"):
            copy = tmp_path / f"{harm}-{name}"
            shutil.copytree(folder, copy)
            file = copy / name
            content = bytearray(file.read_bytes())
            if harm == "flip":
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
            elif harm == "cut":
                file.write_bytes(content[:-9])
            else:
                file.unlink()
                if harm == "link":
                    os.symlink(folder / name, file)
            with pytest.raises(CheckpointError, match=str(copy)):
                read_replay(copy)


def test_other_folders_are_refused(written, tmp_path):
    _, folder = written
    for odd in (tmp_path / "missing", folder / "meta.json", tmp_path):
        for read in (read_replay, read_command):
            with pytest.raises(CheckpointError, match=str(odd)):
                read(odd)
    assert read_replay(write(tmp_path, [])).command is None
    with pytest.raises(CheckpointError, match="notebook"):
        read_command(tmp_path / "nonfinite-3")
    fine = {"script": "a", "words": [], "cwd": ""}
    modules = [fine | {"module": odd} for odd in ("-c", "", "a b", "../a", "a..b", "a/b", 1, ["a"])]
    for odd in (fine | {"script": 1}, fine | {"words": "b"}, {"words": []}, *modules):
        with pytest.raises(CheckpointError, match="expected a script"):
            read_command(write(tmp_path, [], command=odd))


def test_a_changed_script_is_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    (tmp_path / "a.yaml").write_text("a: 1")
    command = {"script": str(script), "words": ["a.yaml", "--precision=fp16"], "cwd": str(tmp_path)}
    folder = write(tmp_path, [], command=command)
    assert read_replay(folder).changed == []
    (tmp_path / "a.yaml").write_text("a: 2")
    replay = read_replay(folder)
    assert replay.changed == ["a.yaml"]
    report = NonfiniteReport("not replayable", "finite", torch.float32, 1.0)
    assert "a.yaml has changed since" in replay.compared_with(report)
    assert torch.__version__ not in replay.compared_with(report)
    replay.versions["torch"] = "1.0"
    assert f"torch is {torch.__version__} here; it was 1.0" in replay.compared_with(report)


def test_another_command_line_is_told(tmp_path):
    command = {"script": "train.py", "words": ["a.yaml", "--precision=fp16", "--api_key=x"], "cwd": str(tmp_path)}
    replay = read_replay(write(tmp_path, [], command=command))
    report = NonfiniteReport("not replayable", "finite", torch.float32, 1.0)
    for same in (["a.yaml", "--precision=fp16", "--replay", "there"], ["a.yaml", "--precision=fp16", "--replay=there"]):
        assert "command line" not in replay.compared_with(report, same)
    told = replay.compared_with(report, ["a.yaml", "--width=3", "--replay", "there"])
    assert "(--precision=fp16 is missing here; --width=3 is new)" in told and "api_key is" not in told


def test_only_a_script_of_the_working_folder_is_vouched_for(tmp_path, monkeypatch, subtests):
    here, run = tmp_path / "here", tmp_path / "here" / "results" / "run"
    for file in ("here/train.py", "here/package/train.py", "here/results/run/train.py", "elsewhere/train.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("print(1)")
    (here / "link.py").symlink_to(tmp_path / "elsewhere" / "train.py")
    monkeypatch.chdir(here)
    elsewhere = tmp_path / "elsewhere" / "train.py"

    def doubted(folder=run, harm=None, **command):
        written = write(folder, [], command={"words": [], "cwd": str(here), **command})
        if harm is not None:
            (here / harm).write_text("print(2)")
        return read_command(written)["not_vouched_for"]

    with subtests.test("as it was"):
        assert doubted(script="train.py") == doubted(script=str(here / "train.py")) == {}
        assert (
            doubted(script="train.py", module="train")
            == doubted(script="package/train.py", module="package.train")
            == {}
        )
        assert doubted(here, script="train.py") == {}, "a run that writes into the working folder itself"
    for what, named, why, command in [
        ("elsewhere", str(elsewhere), "not in the working folder", {"script": "../elsewhere/train.py"}),
        ("a link", str(elsewhere), "not in the working folder", {"script": "link.py"}),
        ("of the run", "results/run/train.py", "the run's own folder", {"script": "results/run/train.py"}),
        (
            "its folder",
            str(elsewhere),
            "not in the working folder",
            {"script": "train.py", "cwd": str(tmp_path / "elsewhere")},
        ),
        ("missing", "no.py", "not the file", {"script": "no.py"}),
        ("no Python file", "data.txt", "not the file", {"script": "data.txt"}),
        (
            "a module",
            "torch.distributed.run",
            "is not that module",
            {"script": "train.py", "module": "torch.distributed.run"},
        ),
        ("changed", "train.py", "not the file", {"script": "train.py", "harm": "train.py"}),
    ]:
        with subtests.test(what):
            ((name, reason),) = doubted(**command).items()
            assert name == named and why in reason


@pytest.mark.parametrize(
    "command",
    [
        {"module": "torch.distributed.run", "words": ["--no-python", "touch", "canary"]},
        {"module": "timeit", "words": ["open('canary', 'w')"]},
        {"script": "run/evil.py"},
        {"words": ["run/evil.yaml", "--trust=os"]},
        {"words": ["run/evil.yaml", "--trust", "os"]},
    ],
)
def test_a_folder_cannot_have_replay_run_what_it_likes(tmp_path, command, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evil.py").write_text("open('canary', 'w')")
    (tmp_path / "run" / "evil.yaml").write_text("evil: !apply:os.system [touch canary]\n")
    (tmp_path / "train.py").write_text("from amp_recipes.config import *\nload_hparams(*parse_arguments()[::2])")
    command = {"script": "train.py", "words": ["\x1b[31mred"], "cwd": str(tmp_path), **command}
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
        folder = write(tmp_path / "run", [], command=command)
    done = run_python("-m", "amp_recipes.commands.cli", "replay", folder, cwd=tmp_path)
    assert done.returncode == 1 and "would run code that may not be yours" in done.stderr, done.stderr
    assert not (tmp_path / "canary").exists() and "\x1b" not in done.stderr
    assert command.get("module", command["script"]) in done.stderr and "touch canary" not in done.stdout


def test_a_command_that_no_run_of_the_user_signed_is_not_vouched_for(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    command = {"script": "train.py", "words": ["a.yaml", "--trust=os"], "cwd": str(tmp_path)}
    folder = write(tmp_path / "run", [], command=command)
    assert read_command(folder)["not_vouched_for"] == {}, "its trust was the user's, too"
    key = Path(os.environ["XDG_STATE_HOME"]) / "amp_recipes" / "replay.key"
    assert key.stat().st_mode & 0o777 == 0o600
    ours = json.loads((folder / "meta.json").read_text())["meta"]["command"]
    for change in ({"words": ["b.yaml"]}, {"cwd": str(tmp_path / "..")}, {"module": "train"}, {"signature": None}):
        assert checked(folder, ours | change)["not_vouched_for"], change
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
        assert list(read_command(folder)["not_vouched_for"]) == ["train.py", "os"]
        theirs = write(tmp_path / "theirs", [], command=command)
        elsewhere.setenv("XDG_STATE_HOME", "/dev/null")
        assert checked(folder, ours)["not_vouched_for"] and write(tmp_path / "unsigned", [], command=command).is_dir()
    assert list(read_command(theirs)["not_vouched_for"]) == ["train.py", "os"]


def test_a_run_that_was_started_as_a_module(tmp_path):
    for module in ("package.train", "train", "package.__main__", "my-recipes.01_train", None):
        folder = write(tmp_path, [], command={**COMMAND, "module": module})
        assert read_command(folder)["module"] == module


SECRET = "hunter2"


WORDS = [  # given, kept (None: all as given), masked
    ([f"--api_key={SECRET}"], ["--api_key=***"], ["--api_key"]),
    (["a.yaml", "--hf.token", SECRET, "--x"], ["a.yaml", "--hf.token", "***", "--x"], ["--hf.token"]),
    ([f"wandb.apiKey={SECRET}"], ["wandb.apiKey=***"], ["wandb.apiKey"]),
    ([f"--PGPASSWORD={SECRET}={SECRET}"], ["--PGPASSWORD=***"], ["--PGPASSWORD"]),
    ([f"--log={{url: x, token: {SECRET}}}"], ["--log={url: x, token: ***}"], ["token"]),
    ([f'--log={{"client_secret": "{SECRET}, {SECRET}"}}'], ['--log={"client_secret": ***}'], ["client_secret"]),
    (["--token", "--x=1"], ["--token", "--x=1"], []),
    (["--api_key=", "--monkey=1", "--tokenizer=a", "--max_tokens=5", "--n_keys=2", "key"], None, []),
]


def test_secrets_are_not_kept(tmp_path, subtests):
    for number, (words, kept, masked) in enumerate(WORDS):
        with subtests.test(" ".join(words)):
            folder = write(tmp_path / str(number), [], command={**COMMAND, "words": words})
            files = [file for file in folder.parent.rglob("*") if file.is_file()]
            assert files and not any(SECRET.encode() in file.read_bytes() for file in files)
            command = read_command(folder)
            assert command["words"] == (words if kept is None else kept) and command["masked"] == masked
            told = read_replay(folder).compared_with(NonfiniteReport("not replayable", "finite", torch.float32, 1.0))
            assert ("give them again" in told) == bool(masked) and all(name in told for name in masked)


def test_nobody_else_may_read_what_the_batches_hold(tmp_path):
    before = os.umask(0)
    try:
        for _ in range(2):
            folder = write(tmp_path, [torch.ones(2)], command=COMMAND)
    finally:
        os.umask(before)
    files = [*folder.iterdir(), tmp_path / "nonfinite-3.json"]
    assert len(files) == 7 and {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {it.name for it in tmp_path.iterdir()} == {"nonfinite-3", "nonfinite-3.json"}, "nothing else is left"


def test_what_is_not_as_in_the_step_is_told_again(tmp_path):
    caveat = "An optimizer had already stepped in this window, so the replay began from other weights."
    report = NonfiniteReport("model", "NaN was born. Cause: the model. Look.", torch.float32, 1.0, step=3)
    report.put_back, report.caveats = ["hparams.noise"], [caveat]
    trial = plain_trial(nn.Linear(2, 2), lambda model, batch: model(batch).sum())
    folder = write_report(tmp_path, report, trial, [], torch_random_state(torch.device("cpu")))
    wanted = f"NaN was born. {caveat} Probably: the model. Look."
    assert json.loads((tmp_path / "nonfinite-3.json").read_text())["message"] == wanted
    now = NonfiniteReport("model", "NaN was born. Cause: the model. Look.", torch.float32, 1.0)
    told = read_replay(folder).compared_with(now)
    assert told.startswith(wanted) and "draws from hparams.noise" in told and now.caveats == []


@dataclasses.dataclass
class Hostile:
    image: int

    def __getattribute__(self, name):
        if name == "image":
            raise RuntimeError("no image today")
        return super().__getattribute__(name)


def test_the_json_is_written_whatever_a_folder_cannot_hold(tmp_path):
    assert write(tmp_path, [torch.ones(2)]).is_dir()
    path = write(tmp_path, [object.__new__(Hostile)])
    content = json.loads(path.read_text())
    assert (path.name, content["message"], content["replay"]) == ("nonfinite-3.json", "finite", None)
    assert content["no_replay"] == "RuntimeError: no image today"
    assert [it.name for it in tmp_path.iterdir()] == [path.name], (
        "the folder of an earlier process is not taken for its"
    )
    path = write(tmp_path, [], nn.LazyLinear(3))
    assert "lazy parameter" in json.loads(path.read_text())["no_replay"]


def test_a_place_that_cannot_be_written_raises_what_the_caller_expects(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        write(tmp_path / "file" / "run", [])
    real = os.mkdir

    def read_only(path, *args, **kwargs):
        if Path(path).name.startswith(".tmp-"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(PermissionError):
        write(tmp_path, [])


def test_a_folder_that_would_be_too_large_is_not_written(tmp_path, monkeypatch):
    path = write(tmp_path, [torch.zeros(1000)], most_bytes=3000)
    content = json.loads(path.read_text())
    assert path.name == "nonfinite-3.json" and content["replay"] is None and "most_bytes" in content["no_replay"]
    assert not (tmp_path / "nonfinite-3").exists()
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "disk is full" in json.loads(write(tmp_path, [torch.zeros(1000)]).read_text())["no_replay"]


def test_an_earlier_folder_is_replaced_and_a_link_is_not_followed(tmp_path):
    write(tmp_path, [torch.zeros(3)])
    folder = write(tmp_path, [torch.ones(3)])
    assert torch.equal(read_replay(folder).window[0], torch.ones(3))
    shutil.rmtree(folder)
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", folder)
    with pytest.raises(ConfigError, match="link"):
        write(tmp_path, [])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_another_model_is_refused_and_left_alone(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    replay = read_replay(write(tmp_path, [], model))
    for other, told in [
        (nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), r"0.weight has shape \[4, 2\] here and \[3, 2\]"),
        (nn.Sequential(nn.Linear(2, 3)), "1.weight is only in the folder"),
        (nn.Sequential(nn.Linear(2, 3).half(), nn.BatchNorm1d(3)), "0.weight is float16 here and float32 there"),
        (nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3)), "no shape before the first batch"),
    ]:
        before = [it.clone() for it in other.state_dict().values() if not hasattr(it, "materialize")]
        with pytest.raises(CheckpointError, match=told):
            replay.load_into(other)
        after = [it for it in other.state_dict().values() if not hasattr(it, "materialize")]
        assert all(map(torch.equal, before, after))


def test_a_cache_that_has_grown_is_taken_over(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.arange(5.0))
    replay = read_replay(write(tmp_path, [], model))
    other = nn.Linear(2, 2)
    other.register_buffer("cache", torch.zeros(0))
    replay.load_into(other)
    assert torch.equal(other.cache, torch.arange(5.0)) and torch.equal(other.weight, model.weight)
