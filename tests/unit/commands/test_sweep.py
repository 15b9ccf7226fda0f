"""A sweep runs what it says, each once, in a folder of its own, also when it is ended in between."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import DEADLINE_SECONDS, Program

from amp_recipes.commands.sweep import trials as sweep_trials
from amp_recipes.commands.sweep.axes import Choice, Choices, Range, covering, folder_name, grid, read_axes
from amp_recipes.commands.sweep.sweep import RunSettings, SweepRequest, run_sweep
from amp_recipes.config.options.arguments import parse_value
from amp_recipes.errors import ConfigError, FolderInUseError

# Stands for a recipe: notes each start, goes on where it was ended, and says what it reached.
RECIPE = """
import json, os, signal, sys, time
from pathlib import Path

given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:] if "=" in word)
folder = Path(given["output_folder"])
with open(folder / "starts.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
lr = float(given.get("lr", 1))

def leave(signum, frame):
    (folder / "saved.txt").write_text("epoch 1")
    sys.exit(128 + signum)

signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print("training at", lr, flush=True)
if given.get("act") == "bad":
    print("epoch 1:  10%\\repoch 1: 100%\\nRuntimeError: no such activation", file=sys.stderr)
    sys.exit(3)
if given.get("act") == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if given.get("act") == "slow" and not (folder / "saved.txt").exists():
    (folder / "pid.txt").write_text(str(os.getpid()))
    (folder / "pid.txt").rename(folder / "ready.txt")
    time.sleep(600)  # until a signal comes
if given.get("act") == "mute":
    sys.exit(0)
accuracy = "nan" if given.get("act") == "nan" else 1 - abs(lr - 0.01)
last = {"train": {"loss": 2.0}, "valid": {"loss": lr, "accuracy": 0.5}, "test": {"accuracy": 0.25}}
target = folder / "debug" if "--debug" in sys.argv else folder
target.mkdir(exist_ok=True)
(target / "summary.json").write_text(json.dumps({"last": last, "best": {"accuracy": accuracy, "epoch": 1}}))
"""

# A process that sweeps, for tests that end it.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, or nohup, ignores them
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from amp_recipes.commands.sweep.sweep import RunSettings, SweepRequest, run_sweep
script, folder, trials, *axes = sys.argv[1:]
request = SweepRequest(tuple(axes), int(trials) or None)
sys.exit(run_sweep(request, script, "x.yaml", [], lambda values: RunSettings(folder, "accuracy", "max", 7)))
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(RECIPE)
    return str(file)


@pytest.fixture
def sweep(recipe, tmp_path):
    """Calls run_sweep; the output folder is tmp_path/out."""

    def call(*axes, trials=None, options=(), check=None, **settings):
        known = {"output_folder": str(tmp_path / "out"), "metric": "accuracy", "mode": "max", "seed": 3, **settings}
        check = check or (lambda values: RunSettings(**known))
        return run_sweep(SweepRequest(axes, trials), recipe, "config.yaml", list(options), check)

    return call


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out" / "sweep"


def starts(folder, name):
    return (folder / name / "starts.txt").read_text().splitlines()


def study_trials(folder):
    optuna = pytest.importorskip("optuna")
    backend = optuna.storages.journal.JournalFileBackend(str(folder / sweep_trials.STUDY_FILE))
    storage = optuna.storages.JournalStorage(backend)
    (study,) = storage.get_all_studies()
    return storage.get_all_trials(study._study_id)


# ---------------------------------------------------------------------- what is typed


def test_values_are_read_as_the_command_line_reads_them(subtests):
    for word, values in [
        ("lr=1e-3,1e-4", [1e-3, 1e-4]),
        ("lr= 1e-3 , 1e-4 ", [1e-3, 1e-4]),
        ("act=relu", ["relu"]),
        ("flag=true,null,no", [True, None, "no"]),
        ("widths=[24,48],[24, 48, 96]", [[24, 48], [24, 48, 96]]),
        ("kwargs={a: 1, b: [2, 3]},{a: 2}", [{"a": 1, "b": [2, 3]}, {"a": 2}]),
        ("size=(1,2),(3,4)", ["(1,2)", "(3,4)"]),
        ("name='a,b',\"c,d\",e", ["a,b", "c,d", "e"]),
        ("name='it''s, so',x", ["it's, so", "x"]),
        ('name="a\\", b",x', ['a", b', "x"]),
        ("name=it's,isn't", ["it's", "isn't"]),
        ("name='',x", ["", "x"]),
        ("name=['a,]', b],x", [["a,]", "b"], "x"]),
        ("path=../data,a..b", ["../data", "a..b"]),
        ("path='1..2'", ["1..2"]),
        ("template=a=b,c", ["a=b", "c"]),
    ]:
        with subtests.test(word=word):
            (axis,) = read_axes([word], None)
            assert [choice.value for choice in axis.choices] == values
            assert [repr(parse_value(choice.text)) for choice in axis.choices] == [repr(value) for value in values]


def test_ranges(subtests):
    for word, expected in [
        ("lr=1e-5..1e-2:log", Range("lr", 1e-5, 1e-2, True)),
        ("lr=0.1..0.5", Range("lr", 0.1, 0.5, False)),
        ("lr=.1...5", Range("lr", 0.1, 0.5, False)),
        ("hidden=32..256", Range("hidden", 32, 256, False)),
        ("hidden=32..256:linear", Range("hidden", 32, 256, False)),
        ("x=-1..1.5", Range("x", -1.0, 1.5, False)),
    ]:
        with subtests.test(word=word):
            (axis,) = read_axes([word], 5)
            assert axis == expected
            assert axis.whole == (axis.key == "hidden")


def test_mistakes_in_what_is_typed(subtests, sweep, folder):
    for words, trials, message in [
        (["lr"], None, "--sweep 'lr': expected key=value,value, as in lr=1e-3,1e-4."),
        (["--lr=1,2"], None, "without dashes: lr=1,2"),
        (["=1"], None, "name of the key"),
        (["model..hidden=1"], None, "name of the key"),
        (["lr="], None, "there is no value"),
        (["lr=1,,2"], None, "a value is empty"),
        (["lr=1,2,"], None, "a value is empty"),
        (["lr=1", "lr=2"], None, "lr is swept twice"),
        (["model.hidden=1", "model={hidden: 2}"], None, "model.hidden is swept too"),
        (["lr=1e-3,0.001"], None, "1e-3 and 0.001 are the same value"),
        (["n=1,1"], None, "1 and 1 are the same value"),
        (["lr=1e-5..1e-2"], None, "a range needs --sweep-trials N"),
        (["lr=1e-5..1e-2,3"], 5, "a range cannot be mixed with values"),
        (["lr=1e-2..1e-5"], 5, "from the smaller number to the larger: 1e-5..1e-2"),
        (["lr=0..1:log"], 5, "greater than 0, not 0"),
        (["lr=1e-5..1e-2:lgo"], 5, "'lgo' is not a scale of a range; expected log or linear. Did you mean log?"),
        (["lr=1e-5.."], 5, "a range needs two finite numbers"),
        (["lr=1e-5...inf"], 5, "a range needs two finite numbers"),
        (["a=[1,2"], None, "a closing ] is missing"),
        (["a='x,y"], None, "a closing ' is missing"),
        (["output_folder=a,b"], None, "cannot be swept"),
        (["a=" + ",".join(map(str, range(101))), "b=0,1,2,3,4,5,6,7,8,9"], None, "the grid has 1,010 runs"),
        (["lr=1"], 0, "expected 1 or more"),
        ([], 5, "chooses among the values of --sweep"),
    ]:
        with subtests.test(words=words, trials=trials):
            with pytest.raises(ConfigError) as caught:
                sweep(*words, trials=trials)
            assert message in str(caught.value)
            assert not folder.exists()


def test_all_mistakes_are_told_at_once(sweep):
    with pytest.raises(ConfigError, match=r"(?s)2 mistakes in the sweep:.*'lr'.*'act='"):
        sweep("lr", "act=")


def test_a_thousand_runs_are_a_grid():
    (axis,) = read_axes(["a=" + ",".join(map(str, range(1000)))], None)
    assert len(axis.choices) == 1000


def test_the_order_of_the_axes_changes_nothing():
    words = ["lr=1,2", "act=relu,gelu"]
    assert list(grid(read_axes(words, None))) == list(grid(read_axes(words[::-1], None)))


def test_what_is_checked_of_a_range_has_both_ends_and_every_choice():
    axes = read_axes(["lr=1e-5..1e-2:log", "act=a,b,c", "hidden=32..64"], 5)
    seen = {key: {combination[key].value for combination in covering(axes)} for key in ("lr", "act", "hidden")}
    assert seen == {"lr": {1e-5, 1e-2}, "act": {"a", "b", "c"}, "hidden": {32, 64}}


# ---------------------------------------------------------------------- folders


def named(**values):
    return folder_name({key.replace("__", "."): Choice(str(value), value) for key, value in values.items()})


def test_folder_names_say_the_values():
    assert named(model__hidden=64, lr=0.001) == "lr=0.001,model.hidden=64"
    assert named(flag=True, act="relu", x=None, y=1e-05) == "act=relu,flag=true,x=null,y=1e-05"


def test_folder_names_are_safe_and_differ_where_the_values_do():
    values = [1, 1.0, "1", True, "true", "a/b", "a_b", "a,x=b", "../..", "", " ", "é", [1, 2], "[1, 2]", {"a": 1}]
    values += [0.1, 0.10000000000000002, 0.1234567890123, 0.1234567890124, math.inf, ".inf", "x" * 300, "x" * 301, "-"]
    names = [named(key=value) for value in values]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.startswith("key=") and "/" not in name and len(name) <= 120 and name.isascii()
    assert named(key="a/b").startswith("key=a_b-") and named(key=[24, 48]).startswith("key=24_48-")
    many = {f"a_rather_long_name_of_a_key_{index}": index for index in range(20)}
    assert len(named(**many)) <= 120 and named(**many) != named(**{**many, "a_rather_long_name_of_a_key_19": 0})


# ---------------------------------------------------------------------- a grid


def test_a_grid_runs_each_combination_in_its_own_folder(sweep, folder, recipe, capsys):
    assert sweep("lr=1e-2,1e-3", "model.hidden=64,128", options=["--precision", "bf16"]) == 0
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    assert names == {f"lr={lr},model.hidden={hidden}" for lr in (0.01, 0.001) for hidden in (64, 128)}
    name = "lr=0.001,model.hidden=64"
    assert starts(folder, name) == [
        f"config.yaml --precision bf16 --lr=1e-3 --model.hidden=64 --output_folder={folder / name}"
    ]
    assert (folder / name / "output.txt").read_text() == "training at 0.001\n"
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1/4  lr=0.01, model.hidden=64 ... accuracy 1, 0.0 minutes"
    assert said[3] == "4/4  lr=0.001, model.hidden=128 ... accuracy 0.991, 0.0 minutes"


def test_the_table_is_sorted_and_written_twice(sweep, folder, capsys):
    sweep("lr=1e-3,1e-2,1", metric="accuracy")
    table = [
        "| run   | lr    | best accuracy   | valid loss   | valid accuracy   | test accuracy   | minutes   |      |",
        "|-------|-------|-----------------|--------------|------------------|-----------------|-----------|------|",
        "| 2     | 0.01  | 1               | 0.01         | 0.5              | 0.25            | 0.0       | best |",
        "| 1     | 0.001 | 0.991           | 0.001        | 0.5              | 0.25            | 0.0       |      |",
        "| 3     | 1     | 0.01            | 1            | 0.5              | 0.25            | 0.0       |      |",
    ]
    said = capsys.readouterr().out
    assert "\n".join(table) in said
    assert f"The best is run 2: {folder / 'lr=0.01'}" in said
    assert "\n".join(table) in (folder / "sweep.md").read_text()
    written = json.loads((folder / "sweep.json").read_text())
    assert written["best"] == 2 and written["metric"] == "accuracy" and written["mode"] == "max"
    assert [run["number"] for run in written["runs"]] == [2, 1, 3]
    assert written["runs"][1]["values"] == {"lr": 0.001}
    assert written["runs"][1]["last"]["test"] == {"accuracy": 0.25}
    assert written["command"].endswith("config.yaml --sweep lr=1e-3,1e-2,1")


def test_a_smaller_loss_is_better_where_the_mode_says_so(sweep, folder):
    sweep("lr=1,1e-2,0.1", metric="loss", mode="min")
    written = json.loads((folder / "sweep.json").read_text())
    assert [run["values"]["lr"] for run in written["runs"]] == [0.01, 0.1, 1]


def test_a_run_that_fails_is_shown_and_the_others_go_on(sweep, folder, capsys):
    assert sweep("act=bad,killed,relu") == 1
    said = capsys.readouterr().out
    assert "1/3  act=bad ... failed with exit status 3 after 0.0 minutes\n  the end of " in said
    assert "    epoch 1: 100%\n    RuntimeError: no such activation\n" in said
    assert "10%" not in said.replace("100%", "")
    assert "2/3  act=killed ... killed by SIGKILL after" in said
    assert "3/3  act=relu ... accuracy 0.01" in said
    assert "| failed with exit status 3 |" in said
    assert json.loads((folder / "sweep.json").read_text())["best"] == 3


def test_a_run_without_the_metric_or_with_a_nan_stands_below(sweep, folder, capsys):
    assert sweep("act=mute,nan,relu") == 0
    said = capsys.readouterr().out
    assert "act=mute ... no accuracy in its summary (which has no metrics)" in said
    assert "act=nan ... accuracy nan" in said
    assert [run["number"] for run in json.loads((folder / "sweep.json").read_text())["runs"]] == [3, 1, 2]


def test_a_metric_that_no_summary_has_is_told(sweep, capsys):
    assert sweep("lr=1", metric="f1") == 0
    assert "no f1 in its summary (which has accuracy, loss)" in capsys.readouterr().out


def test_a_run_that_only_tries_out_has_its_summary_elsewhere(sweep, folder, capsys):
    assert sweep("lr=1e-2", options=["--debug"]) == 0
    assert "accuracy 1," in capsys.readouterr().out


def test_finished_runs_are_not_run_again_and_failed_ones_are(sweep, folder, capsys):
    assert sweep("act=bad,relu") == 1
    capsys.readouterr()
    assert sweep("act=gelu,relu,bad") == 1
    assert [len(starts(folder, f"act={act}")) for act in ("bad", "relu", "gelu")] == [2, 1, 1]
    said = capsys.readouterr().out
    assert "2/3  act=relu ... already finished: accuracy 0.01, 0.0 minutes" in said
    assert "| 0.01 " in said.split("already finished")[1], "its metrics are in the table"


@pytest.mark.parametrize("other", [{"options": ["--debug"]}, {"fingerprint": "another"}])
def test_what_ran_under_other_settings_is_not_finished(sweep, folder, other):
    sweep("lr=1")
    sweep("lr=1", **other)
    sweep("lr=1", **other)
    assert len(starts(folder, "lr=1")) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"exit_status": 0}'])
def test_a_damaged_record_is_none(sweep, folder, damage):
    sweep("lr=1")
    (folder / "lr=1" / "sweep_run.json").write_text(damage)
    assert sweep("lr=1") == 0
    assert len(starts(folder, "lr=1")) == 2


# ---------------------------------------------------------------------- the check before


def test_every_combination_is_checked_before_the_first_run(sweep, folder):
    asked = []

    def check(values):
        asked.append(values)
        if values.get("hidden") == 128:
            raise ConfigError(f"model.hidden {values['hidden']} is too much")
        return RunSettings(str(folder.parent), "loss", "min")

    with pytest.raises(ConfigError) as caught:
        sweep("lr=1,2", "hidden=64,128", check=check)
    # One mistake, though two combinations have it.
    assert str(caught.value) == "--sweep with hidden=128, lr=1: model.hidden 128 is too much"
    assert asked == [{}] + [{"hidden": hidden, "lr": lr} for hidden in (64, 128) for lr in (1, 2)]
    assert not folder.exists()


def test_a_mistake_of_the_yaml_itself_is_told_as_such(sweep):
    def check(values):
        raise ConfigError("x.yaml:3: there is no optimizer")

    with pytest.raises(ConfigError) as caught:
        sweep("lr=1,2", check=check)
    assert str(caught.value) == "x.yaml:3: there is no optimizer"


def test_the_sweep_may_give_what_the_yaml_lacks(sweep, folder):
    def check(values):
        if "lr" not in values:
            raise ConfigError("lr is a placeholder that needs a value")
        return RunSettings(str(folder.parent), "accuracy", "max")

    assert sweep("lr=1,2", check=check) == 0
    assert (folder / "lr=2" / "summary.json").is_file()


def test_the_folder_is_that_of_the_yamls_own_values(sweep, tmp_path):
    def check(values):
        return RunSettings(str(tmp_path / f"out_{values.get('lr', 'own')}"), "accuracy", "max")

    assert sweep("lr=1,2", check=check) == 0
    assert (tmp_path / "out_own" / "sweep" / "lr=1" / "summary.json").is_file()
    assert not (tmp_path / "out_1").exists()


def test_a_sweep_needs_an_output_folder(sweep):
    with pytest.raises(ConfigError, match="--output_folder=PATH"):
        sweep("lr=1", output_folder=None)


def test_a_sweep_is_not_started_by_torchrun(sweep, folder, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="not with torchrun"):
        sweep("lr=1")
    assert not folder.exists()


def test_the_handlers_of_signals_are_put_back(sweep):
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    sweep("lr=1")
    assert before == [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


# ---------------------------------------------------------------------- ended in between


def started(recipe, folder, *axes, trials=0):
    words = ("-c", DRIVER, recipe, folder.parent, trials, *axes)
    return Program(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(folder, pattern):
    """The file of that pattern, as soon as it is there."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() < deadline, f"no {pattern} came into {folder}"
        time.sleep(0.02)
    return found[0]


@pytest.mark.parametrize(
    ("signum", "passed_on"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGUSR1, 143)],
    ids=["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"],
)
def test_a_signal_reaches_the_run_and_the_same_command_goes_on(recipe, folder, signum, passed_on):
    axes = ("act=relu,slow,tanh",)
    process = started(recipe, folder, *axes)
    wait_for(folder, "act=slow/ready.txt")
    process.send_signal(signum)
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signum
    assert "2/3  act=slow ... interrupted after" in said
    assert f"{signum.name}: sweep stopped; run the same command again to continue it." in said
    assert (folder / "act=slow" / "saved.txt").read_text() == "epoch 1"
    assert json.loads((folder / "act=slow" / "sweep_run.json").read_text())["exit_status"] == passed_on
    assert not (folder / "act=tanh").exists()

    process = started(recipe, folder, *axes)
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    assert [len(starts(folder, f"act={act}")) for act in ("relu", "slow", "tanh")] == [1, 2, 1]
    assert "already finished" in said and "interrupted" not in said


def test_two_sweeps_do_not_share_a_folder(recipe, folder, sweep):
    process = started(recipe, folder, "act=slow")
    wait_for(folder, "act=slow/ready.txt")
    with pytest.raises(FolderInUseError, match=f"in use by pid {process.pid}"):
        sweep("lr=1")
    process.terminate()
    process.communicate(timeout=DEADLINE_SECONDS)


def test_a_sweep_that_is_killed_goes_on(recipe, folder):
    process = started(recipe, folder, "act=relu,slow,tanh")
    ready = wait_for(folder, "act=slow/ready.txt")
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    os.kill(int(ready.read_text()), signal.SIGTERM)  # the run has lived on
    wait_for(folder, "act=slow/saved.txt")
    process = started(recipe, folder, "act=relu,slow,tanh")
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0
    assert [len(starts(folder, f"act={act}")) for act in ("relu", "slow", "tanh")] == [1, 2, 1]


# ---------------------------------------------------------------------- trials


def test_trials_need_optuna(sweep, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'amp_recipes\[sweep\]'"):
        sweep("lr=1..2", trials=3)
    assert not folder.exists()
    assert sweep("lr=1") == 0


def test_trials_stay_in_their_ranges_and_come_close_to_the_best(sweep, folder):
    pytest.importorskip("optuna")
    assert sweep("lr=1e-4..1:log", "hidden=32..40", "act=relu,gelu", trials=14) == 0
    trials = study_trials(folder)
    assert len(trials) == 14 and all(trial.state.name == "COMPLETE" for trial in trials)
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert len(runs) == 14
    for run in runs:
        assert 1e-4 <= run["values"]["lr"] <= 1
        assert run["values"]["hidden"] in range(32, 41) and isinstance(run["values"]["hidden"], int)
        assert run["values"]["act"] in ("relu", "gelu")
        assert run["best"]["accuracy"] == pytest.approx(1 - abs(run["values"]["lr"] - 0.01)), "the value that ran"
    assert len({run["folder"] for run in runs}) == 14
    assert runs[0]["best"]["accuracy"] > 0.99


def chosen(folder):
    return [(trial.params, trial.state.name, trial.values) for trial in study_trials(folder)]


def test_more_trials_go_on_as_if_they_had_been_asked_for_at_once(recipe, tmp_path):
    pytest.importorskip("optuna")

    def call(name, trials, seed=5):
        request = SweepRequest(("lr=1e-4..1:log", "act=relu,gelu"), trials)
        settings = RunSettings(str(tmp_path / name), "accuracy", "max", seed)
        assert run_sweep(request, recipe, "c.yaml", [], lambda values: settings) == 0
        return chosen(tmp_path / name / "sweep")

    at_once = call("a", 12)
    call("b", 4)
    assert call("b", 12) == at_once
    assert call("c", 12, seed=6) != at_once
    assert len({trial[0]["lr"] for trial in at_once}) == 12


def test_a_failed_trial_is_one_and_is_tried_again(sweep, folder, recipe, capsys):
    pytest.importorskip("optuna")
    assert sweep("act=bad,nan,mute,relu", trials=8) == 1
    states = {trial.params["act"]: trial.state.name for trial in study_trials(folder)}
    assert states["relu"] == "COMPLETE" and {"FAIL"} == {states[act] for act in states if act != "relu"}
    assert "bad" in states, "the seed chooses it"
    # The same values are not run twice.
    assert all(len(starts(folder, f"act={act}")) == 1 for act in states)
    assert " ... same values as run " in capsys.readouterr().out

    Path(recipe).write_text(RECIPE.replace('== "bad"', '== "good"'))
    assert sweep("act=bad,nan,mute,relu", trials=8) == 0
    assert len(starts(folder, "act=bad")) == 2
    trials = study_trials(folder)
    again = [trial.number for trial in trials if "again" in trial.user_attrs]
    assert (
        len(again) == sum(trial.params["act"] == "bad" for trial in trials[:8]) and trials[8].state.name == "COMPLETE"
    )
    assert sweep("act=bad,nan,mute,relu", trials=8) == 0
    assert len(study_trials(folder)) == len(trials)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_trial_goes_on_with_its_values(recipe, folder, signum):
    pytest.importorskip("optuna")
    axes = ("act=slow", "lr=1e-4..1:log")
    process = started(recipe, folder, *axes, trials=2)
    ready = wait_for(folder, "*/ready.txt")
    process.send_signal(signum)
    process.communicate(timeout=DEADLINE_SECONDS)
    (trial,) = study_trials(folder)
    assert trial.state.name == "RUNNING"
    if signum == signal.SIGKILL:
        os.kill(int(ready.read_text()), signal.SIGTERM)  # the run has lived on
    wait_for(ready.parent, "saved.txt")
    Path(recipe).write_text(RECIPE.replace("time.sleep(600)", "pass"))
    with open(folder / sweep_trials.STUDY_FILE, "a") as file:
        file.write('{"op_code": 6, "wor')  # half a line, as after a crash of the machine
    process = started(recipe, folder, *axes, trials=2)
    said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, said
    first, second = study_trials(folder)
    assert first.params == trial.params and first.state.name == second.state.name == "COMPLETE"
    assert len((ready.parent / "starts.txt").read_text().splitlines()) == 2


def test_another_sweep_in_the_folder_has_a_study_of_its_own(sweep, folder):
    optuna = pytest.importorskip("optuna")
    sweep("lr=1e-4..1:log", trials=2)
    sweep("lr=1e-4..0.5:log", trials=2)
    sweep("lr=1e-4..0.5:log", trials=2, mode="min")
    backend = optuna.storages.journal.JournalFileBackend(str(folder / sweep_trials.STUDY_FILE))
    assert len(optuna.storages.JournalStorage(backend).get_all_studies()) == 3


def test_choices_of_trials_may_be_lists(sweep, folder):
    pytest.importorskip("optuna")
    assert sweep("widths=[1,2],[3,4]", trials=4) == 0
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [1, 2] in [run["values"]["widths"] for run in runs]
    (axis,) = read_axes(["widths=[1,2],[3,4]"], 4)
    assert isinstance(axis, Choices)
