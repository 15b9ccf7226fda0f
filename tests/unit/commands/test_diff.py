"""What differs between two runs."""

import json
import os
import shutil

import pytest
from programs import run_python
from repository import REPOSITORY
from work import at_most

from amp_recipes.commands.diff import compare_runs
from amp_recipes.errors import ConfigError

ENVIRONMENT = {
    "time": "2026-01-01",
    "argv": ["train.py"],
    "cwd": "/x",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
    "gpus": [],
    "cuda": None,
    "git": {"commit": "abc", "dirty": False},
}
SUMMARY = {
    "schema_version": 1,
    "precision": "fp32",
    "device": "cpu",
    "seconds": 10.0,
    "epochs": 2,
    "optimizer_steps": 80,
    "skipped_steps": 0,
    "last": {"valid": {"loss": 0.5, "accuracy": 0.9}, "test": {"loss": 0.6}},
    "best": {"accuracy": 0.9, "epoch": 2},
}


FILES = ["hyperparams.yaml", "overrides.yaml", "environment.json", "summary.json"]


@pytest.fixture
def run(tmp_path):
    """Makes the folder of a run."""

    def run(name, yaml="lr: 0.1\n", environment=None, summary=SUMMARY, overrides="{}\n"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        files = {
            "hyperparams.yaml": None if yaml is None else f"output_folder: {folder}\n{yaml}log: {folder}/log.txt\n",
            "overrides.yaml": overrides,
            "environment.json": json.dumps({**ENVIRONMENT, **(environment or {})}),
            "summary.json": None if summary is None else json.dumps(summary),
        }
        for file, text in files.items():
            if text is not None:
                (folder / file).write_text(text)
        return folder

    return run


def pairs(found):
    return [(it.name, it.a, it.b) for it in found]


def test_two_runs_of_the_same_settings_are_equal_wherever_they_lie(run):
    times = {**SUMMARY, "seconds": 12.5, "samples_per_second": 3.0, "peak_memory_bytes": 7}
    a, b = run("a"), run("b", environment={"time": "later", "argv": ["x"], "cwd": "/y"}, summary=times)
    found = compare_runs(a, b)
    assert not found.differ and not any(found.sections.values()) and found.notes == []
    assert "the same: settings, overrides, trust, versions, git" in found.report()
    assert "seconds" in found.report() and "+2.5" in found.report()


def test_settings_with_run_options_beside_training(run):
    a, b = run("a", "lr: 0.1\nnumber_of_epochs: 2\n"), run("b", "lr: 0.2\nnumber_of_epochs: 3\nlog_interval_steps: 5\n")
    found = compare_runs(a, b)
    assert found.differ
    assert pairs(found.sections["settings"]) == [
        ("lr", "0.1", "0.2"),
        ("number_of_epochs", "2", "3"),
        ("log_interval_steps", "10", "5"),
    ]
    assert "\nsettings (a -> b)\n  lr: 0.1 -> 0.2\n" in found.report()
    assert pairs(compare_runs(b, a).sections["settings"])[0] == ("lr", "0.2", "0.1")


def test_overrides_trust_versions_and_git(run):
    changed = {
        "packages": {"torch": "2.14.0", "omegaconf": "2.4"},
        "gpus": ["H200", "H200"],
        "trust": ["sklearn"],
        "git": {"commit": "def", "dirty": True},
    }
    found = compare_runs(run("a", overrides=""), run("b", environment=changed, overrides="lr: 0.1\n"))
    assert found.differ and found.sections["settings"] == []
    assert "overrides" not in found.sections  # the first run kept none
    assert pairs(found.sections["trust"]) == [("trust", None, ["sklearn"])]
    assert sorted(pairs(found.sections["versions"]), key=str) == [
        ("gpus", [], ["H200", "H200"]),
        ("numpy", "2.4.6", None),
        ("omegaconf", None, "2.4"),
        ("torch", "2.13.0", "2.14.0"),
    ]
    assert pairs(found.sections["git"]) == [("commit", "abc", "def"), ("dirty", False, True)]
    report = found.report()
    assert "  gpus: none -> H200, H200\n" in report and "  trust: (absent) -> sklearn\n" in report
    assert "  dirty: false -> true" in report


def test_overrides_are_compared_without_the_output_folder(run, tmp_path):
    a = run("a", overrides=f"output_folder: {tmp_path}/a\nlr: 0.1\n")
    b = run("b", overrides=f"output_folder: {tmp_path}/b\nlr: 0.1\nmodel: {{width: 2}}\n")
    assert pairs(compare_runs(a, b).sections["overrides"]) == [("model.width", None, "2")]


def test_uncommitted_changes_on_both_sides_are_said_to_be_unknown(run):
    git = {"git": {"commit": "abc", "dirty": True}}
    found = compare_runs(run("a", environment=git), run("b", environment=git))
    assert not found.differ and "were not committed" in found.report()


def test_results_stand_side_by_side_with_their_change(run):
    better = {**SUMMARY, "precision": "bf16", "skipped_steps": 3, "best": None, "seconds": 8.0}
    better["last"] = {"valid": {"loss": 0.25, "accuracy": 0.9}, "test": {"loss": None, "wer": 0.1}}
    found = compare_runs(run("a"), run("b", summary=better))
    assert found.differ
    rows = {line.split()[0]: line.split()[1:] for line in found.report().splitlines() if line.startswith("  ")}
    assert rows["valid.loss"] == ["0.5", "0.25", "-0.25"]
    assert rows["valid.accuracy"] == ["0.9", "0.9"]
    assert rows["test.loss"] == ["0.6", "-"] and rows["test.wer"] == ["-", "0.1"]
    assert rows["skipped_steps"] == ["0", "3", "+3"]
    assert rows["best.epoch"] == ["2", "-"]
    assert rows["precision"] == ["fp32", "bf16"] and "device" not in rows
    assert rows["seconds"] == ["10", "8", "-2"]


def test_another_result_is_a_difference(subtests, run):
    for change in [{"optimizer_steps": 81}, {"last": {}}, {"best": {"accuracy": 0.91, "epoch": 2}}, {"device": "cuda"}]:
        with subtests.test(change=change):
            assert compare_runs(run("a"), run("b", summary={**SUMMARY, **change})).differ


def test_a_run_that_is_not_over_or_only_tried_out_says_so(run):
    a, b = run("a", summary=None), run("b", summary=None)
    (b / "debug").mkdir()
    (b / "debug" / "summary.json").write_text(json.dumps(SUMMARY))
    found = compare_runs(a, b)
    assert found.notes == [
        f"{a}: no summary.json: the run has not finished.",
        f"{b}: the results are those of a short run with --debug.",
    ]
    assert ("valid.loss", None, 0.5) in pairs(found.results) and found.differ
    assert all(note in found.report() for note in found.notes)


def test_a_run_without_settings_is_compared_in_the_rest(run):
    found = compare_runs(run("a", yaml=None), run("b"))
    assert "settings" not in found.sections and "no hyperparams.yaml" in found.notes[0]
    assert "the same: overrides, trust, versions, git" in found.report()


def test_json_for_programs(run):
    a, b = run("a"), run("b", "lr: 0.2\n", summary={**SUMMARY, "epochs": 3})
    found = json.loads(compare_runs(a, b).as_json())
    assert list(found) == ["runs", "differ", "settings", "overrides", "trust", "versions", "git", "results", "notes"]
    assert found["runs"] == [str(a), str(b)] and found["differ"] is True
    assert found["settings"] == {"lr": ["0.1", "0.2"]} and found["git"] == {} and found["notes"] == []
    assert found["results"]["epochs"] == [2, 3] and found["results"]["best.epoch"] == [2, 2]


def test_a_folder_that_is_no_run_is_told_from_one(subtests, run, tmp_path):
    a = run("a")
    (a / "save" / "CKPT+000001").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for path, says in [
        ("nothing", "there is no such folder"),
        ("a/summary.json", "is a file"),
        ("a/save", "belongs to the run {0}/a;"),
        ("a/save/CKPT+000001", "belongs to the run {0}/a;"),
        ("", "none of hyperparams.yaml, environment.json, summary.json. It contains the runs {0}/a."),
        ("empty", "none of hyperparams.yaml, environment.json, summary.json."),
    ]:
        with subtests.test(path=path):
            for runs in ((a, tmp_path / path), (tmp_path / path, a)):
                with pytest.raises(ConfigError) as refused:
                    compare_runs(*runs)
                assert says.format(tmp_path) in str(refused.value)
                assert "expected the output folder of a run" in str(refused.value)


def test_a_damaged_file_is_named(subtests, run):
    a = run("a")
    for file in FILES:
        for damage in [b"[", b"[1]", b"\xff\xfe\xfd", b'{"a": ' + b"[" * 100_000]:
            with subtests.test(file=file, damage=damage):
                b = run("b")
                (b / file).write_bytes(damage)
                with pytest.raises(ConfigError, match=file.replace(".", r"\.")):
                    compare_runs(a, b)


def test_values_do_not_steer_the_terminal(run):
    a, b = run("a"), run("b", 'lr: "\\e[31m"\n', environment={"cpu": "\x1b[2J" + "x" * 500})
    report = compare_runs(a, b).report()
    assert "\x1b" not in report and max(map(len, report.splitlines())) < 250


def test_names_do_not_steer_the_terminal_either(run, tmp_path):
    esc = {"a\x1b[31m": 1, "b\n  lr: 0.1": 2, "c\u202e\u2066": 3, "d\ud800\r": 4, "\x9b2J": 5}
    settings = '"a\\e[31m": 1\n"b\\nsame: 2": {"\\x9b": 3}\n"\\u202e": !new:x\n'
    a = run("a")
    hostile = run("b", settings, {"packages": {**esc, "torch": "2\x07"}, "git": esc, "trust": esc}, {**SUMMARY, **esc})
    report = compare_runs(a, hostile).report()
    assert all(char.isprintable() for line in report.split("\n") for char in line)
    assert all(text in report for text in (r"a\x1b[31m", r"b\nsame: 2.\x9b", r"c\u202e\u2066", r"d\ud800\r", r"\x9b2J"))
    report.encode()
    json.loads(compare_runs(a, hostile).as_json())
    (tmp_path / "above" / "\x1b[2J").mkdir(parents=True)
    shutil.copy(hostile / "environment.json", tmp_path / "above" / "\x1b[2J")
    with pytest.raises(ConfigError, match=r"It contains the runs .*\\x1b\[2J\.") as refused:
        compare_runs(a, tmp_path / "above")
    assert "\x1b" not in str(refused.value)


def test_what_is_no_file_is_named_and_neither_read_nor_waited_for(subtests, run):
    a = run("a")
    place = {
        "link": lambda path: path.symlink_to(a / path.name),
        "link to a device": lambda path: path.symlink_to("/dev/zero"),
        "link to nothing": lambda path: path.symlink_to("nothing"),
        "pipe": os.mkfifo,
        "folder": os.mkdir,
    }
    for file in FILES:
        for kind in place:
            with subtests.test(file=file, kind=kind):
                b = run(f"{kind} for {file}")
                (b / file).unlink()
                place[kind](b / file)
                with (
                    at_most(calls=50_000),
                    pytest.raises(ConfigError, match=rf"{b / file} is a .*expected a regular file"),
                ):
                    compare_runs(a, b)


def test_a_run_is_given_through_a_link(run, tmp_path):
    a, b = run("a"), run("b", "lr: 0.2\n")
    (tmp_path / "latest").symlink_to("b")
    assert pairs(compare_runs(a, tmp_path / "latest").sections["settings"]) == [("lr", "0.1", "0.2")]
    (b / "debug").symlink_to(a)  # but inside of it nothing is
    (b / "summary.json").unlink()
    with pytest.raises(ConfigError, match="debug is a link"):
        compare_runs(a, b)


@pytest.mark.parametrize("file", FILES)
def test_a_huge_file_is_refused_at_once(run, file):
    a, b = run("a"), run("b")
    content = f'{{"x": "{"y" * 5_000_000}"}}' if file.endswith(".json") else "x: 1\n" + "# y\n" * 1_250_000
    (b / file).write_text(content)
    with at_most(calls=50_000), pytest.raises(ConfigError, match=r"larger than [14],\d+,\d+ bytes"):
        compare_runs(a, b)


ANCHORS = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
LONG_TEXT = f"a: &a {'x' * 99_000}\nb: [{'*a, ' * 15_000}]\n"
LONG_KEYS = f"? {'x' * 90_000}\n: {{{', '.join(f'k{n}: 1' for n in range(1_000))}}}\n"
MORE_LONG_KEYS = f"? {'x' * 90_000}\n: {{{', '.join(f'k{n}: 1' for n in range(9_000))}}}\n"
MEASURE = """
import resource, sys
from amp_recipes.errors import ConfigError
from amp_recipes.commands.diff import compare_runs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    compare_runs(*sys.argv[1:])
except ConfigError:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(ANCHORS, "values", id="anchors"),
        pytest.param(LONG_TEXT, "values", id="long text", marks=pytest.mark.extended),
        pytest.param(LONG_KEYS, "characters", id="long keys"),
        pytest.param(MORE_LONG_KEYS, "characters", id="more long keys", marks=pytest.mark.extended),
    ],
)
def test_a_small_yaml_that_fills_a_machine_is_refused_at_once(run, text, says):
    a, b = run("a"), run("b", text)
    refused = pytest.raises(ConfigError, match=rf"hyperparams\.yaml.* more than 1\S* {says}")
    with at_most(calls=20_000_000), refused:
        compare_runs(a, b)
    done = run_python("-c", MEASURE, a, b)
    megabytes = int(done.stdout)
    assert megabytes < 128, done.stderr


ODD = {
    "long number": 10**4_000,
    "long negative": -(10**4_200),
    "large": 1e308,
    "infinite": float("inf"),
    "nan": float("nan"),
    "long text": "x" * 10**6,
    "lists": [[[1]]],
    "nothing": {},
}


def test_results_of_any_kind_are_shown(subtests, run):
    for name, value in ODD.items():
        with subtests.test(name):
            a = run("a", summary={**SUMMARY, "n": 0.5, "m": 10**4_200, "last": [1], "best": value})
            b = run("b", summary={**SUMMARY, "n": value, "m": value, "best": None, "x" * 10**6: 1})
            for runs in ((a, b), (b, a)):
                report = compare_runs(*runs).report()
                assert "nan" in report or max(map(len, report.splitlines())) < 450
                json.loads(compare_runs(*runs).as_json())


def test_hostile_settings_are_compared_and_never_built(run, tmp_path):
    canary = tmp_path / "canary"
    hostile = f"lr: 0.1\nx: !apply:os.mkdir [{canary}]\ny: !new:subprocess.Popen [[touch, {canary}]]\n"
    found = compare_runs(run("a"), run("b", hostile))
    assert not canary.exists() and len(found.sections["settings"]) == 2 + 1


@pytest.mark.extended  # three starts of a recipe
def test_runs_of_a_recipe(tmp_path):
    """Two real runs: what they leave is what is read here."""
    recipe = [REPOSITORY / "recipes/image_classification/train.py", REPOSITORY / "configs/image_classification.yaml"]
    for name, options in (("a", []), ("b", []), ("c", ["--precision=bf16", "--lr=0.01"])):
        done = run_python(*recipe, "--debug", f"--output_folder={tmp_path / name}", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    a, b, c = (tmp_path / name for name in "abc")
    assert not compare_runs(a, b).differ, compare_runs(a, b).report()
    found = compare_runs(a, c)
    assert pairs(found.sections["settings"]) == [
        ("lr", "0.003", "0.01"),
        ("opt_class.lr", "0.003", "0.01"),
        ("precision", "fp32", "bf16"),
    ]
    assert pairs(found.sections["overrides"]) == [("precision", "fp32", "bf16"), ("lr", None, "0.01")]
    assert ("optimizer_steps", 4, 4) in pairs(found.results) and found.differ
    shutil.copytree(a, tmp_path / "copy")
    assert not compare_runs(a, tmp_path / "copy").differ
