"""Whatever a YAML, an include or an override says: nothing runs that was not allowed, and the error says where."""

import importlib.util
import json
import re
import sys
from contextlib import suppress

import pytest
from hostile_corpus import CORPUS, PAYLOADS, SIDE_EFFECT, lay_out, lay_out_house
from programs import run_python

from amp_recipes.config import check, create_experiment_directory, parse_arguments
from amp_recipes.config.trust.checking import Settings
from amp_recipes.errors import ConfigError

# Loads each file with plain HyperPyYAML in a fork, as SpeechBrain would call it.
VICTIM = """
import atexit, json, os, signal, sys
import numpy, torch, hyperpyyaml, logging.config, importlib.machinery
import torch.utils.data.datapipes.utils.common, torch.utils.collect_env, torch.utils.benchmark, numpy.f2py
for job in json.load(open(sys.argv[1])):
    if os.fork() == 0:
        signal.alarm(300)
        os.environ["HOSTILE_CANARY"] = job["canary"]
        try:
            with open(job["file"]) as stream:
                hyperpyyaml.load_hyperpyyaml(stream, job["overrides"])
            print(job["file"], "loaded", flush=True)
        except BaseException as error:
            print(job["file"], repr(error)[:300], flush=True)
        finally:
            atexit._run_exitfuncs()
            os._exit(0)
    os.wait()
"""


@pytest.fixture(autouse=True)
def a_script_with_a_file(monkeypatch):
    """`__main__` is pytest's file, also where a process of pytest-xdist has none: that would count as a notebook."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", pytest.__file__, raising=False)


@pytest.fixture
def house(tmp_path):
    root = tmp_path / "hostile"
    lay_out_house(root)
    return root


@pytest.fixture
def train(house):
    """The module of a recipe's script, from whose folder a YAML may name things."""
    spec = importlib.util.spec_from_file_location("hostile_train", house / "recipe" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_path(house, monkeypatch):
    """As in a run of the recipe: its folder is on `sys.path`, and so is another one that others can write to."""
    for folder in ("outside", "recipe"):
        monkeypatch.syspath_prepend(house / folder)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("hostile_", "recipe_")):
            del sys.modules[name]


def overrides_of(job):
    if job.payload.arguments:
        return parse_arguments([str(job.file), *job.fill(job.payload.arguments)])[2]
    return job.fill(job.payload.overrides)


@pytest.mark.parametrize("here", ["outside", pytest.param("recipe", marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", CORPUS)
def test_nothing_is_executed_and_the_error_says_where(kind, here, house, train, on_path, monkeypatch, subtests):
    monkeypatch.chdir(house / here)  # wherever it is started
    for payload in CORPUS[kind]:
        with subtests.test(payload.name):
            job = lay_out(payload, house)
            monkeypatch.setenv("HOSTILE_CANARY", str(job.canary))
            assert_harmless(job, lambda *given: check(*given, house / "recipe"))
            assert_harmless(job, train.load)


def assert_harmless(job, read):
    """A payload is refused with its place, or it is the harmless text that it says it then is."""
    before = set(sys.modules)
    plain = job.payload.plain
    try:
        found = read(job.file, overrides_of(job), job.fill(job.payload.trust))
    except ConfigError as error:
        assert names_a_place(str(error), job), str(error)
    else:
        if isinstance(found, Settings):  # what an object's attributes are is known once it is built
            assert plain is not None or job.payload.built, "was checked without an error"
        else:
            assert plain is not None, f"was loaded without an error: {found}"
            assert {key: found[key] for key in plain} == job.fill(plain)
    assert not list(job.canaries.iterdir()), "was executed"
    assert (job.file.parent / "victim.txt").exists()
    assert not [name for name in set(sys.modules) - before if name.startswith("hostile_")]


def names_a_place(message: str, job) -> bool:
    """Whether an error says which line of which file, or that it was in what was given beside it."""
    places = [rf"{re.escape(str(path))}:\d+" for path in job.file.parent.rglob("*") if path.suffix != ".txt"]
    if job.payload.arguments or job.payload.overrides:
        places += ["command line", "overrides", "--", re.escape(str(job.file))]
    return any(re.search(place, message) for place in places)


@pytest.mark.extended
def test_the_payloads_work_on_hyperpyyaml(tmp_path):
    # Measured with HyperPyYAML 1.2.3: all that are marked as live.
    lay_out_house(tmp_path)
    jobs = [lay_out(payload, tmp_path) for payload in PAYLOADS if payload.live]
    listed = [
        {"file": str(job.file), "canary": str(job.canary), "overrides": overrides_as_speechbrain_would(job)}
        for job in jobs
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(listed))
    path = f"{tmp_path / 'recipe'}:{tmp_path / 'outside'}"
    ran = run_python("-c", VICTIM, tmp_path / "jobs.json", cwd=tmp_path, env={"PYTHONPATH": path})
    duds = [job.payload.name for job in jobs if not list(job.canaries.iterdir())]
    said = [line for line in ran.stdout.splitlines() if any(f"/{name}/" in line for name in duds)]
    assert not duds, "\n".join(said) + ran.stderr[-2000:]
    assert len(jobs) >= 100


def overrides_as_speechbrain_would(job):
    """SpeechBrain writes the options of the command line into lines of YAML."""
    if not job.payload.arguments:
        return job.fill(job.payload.overrides)
    words = job.fill(job.payload.arguments)
    pairs = [word[2:].split("=", 1) for word in words] if len(words) == 1 else [(words[0][2:], words[1])]
    return "\n".join(f"{name}: {value}" for name, value in pairs)


def test_names_are_unique_and_there_are_enough():
    assert len({payload.name for payload in PAYLOADS}) == len(PAYLOADS) >= 500


def load(train, folder, text):
    (folder / "main.yaml").write_text(text)
    return train.load(folder / "main.yaml")


def test_a_check_builds_nothing_and_calls_nothing(house, train, on_path, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    monkeypatch.setenv("HOSTILE_CANARY", str(canary))
    text = "a: !new:recipe_parts.Boom {}\nb: !applyref:recipe_parts.call_with_canary\n"
    text += "c: !apply:recipe_parts.call_with_canary\n"
    (tmp_path / "main.yaml").write_text(text)
    check(tmp_path / "main.yaml", recipe_folder=house / "recipe")
    assert not canary.exists()
    load(train, tmp_path, "a: !new:recipe_parts.Boom {}\n")
    assert canary.exists()


def test_nothing_is_built_where_a_later_key_is_wrong(house, train, on_path, tmp_path, monkeypatch, subtests):
    canary = tmp_path / "canary"
    monkeypatch.setenv("HOSTILE_CANARY", str(canary))
    wrong = ["!apply:os.system [ls]", "!new:recipe_parts.Boom {x: 1}", "!ref <d>", "!nwe:x {}", "!include:/etc/passwd"]
    for last in wrong:
        for first in ("!new:recipe_parts.Boom {}", "!applyref:recipe_parts.call_with_canary"):
            with subtests.test(first + last), pytest.raises(ConfigError, match=r"main\.yaml:2:\d+"):
                load(train, tmp_path, f"a: {first}\nb: {last}\n")
    assert not canary.exists()


@pytest.mark.parametrize(
    "name",
    ["list", "colorsys"] + [pytest.param(n, marks=pytest.mark.extended) for n in ("max", "dict", "fractions", "sched")],
)
def test_a_file_that_has_the_name_of_a_builtin_or_of_a_standard_module_is_not_imported(
    name, train, on_path, tmp_path, monkeypatch
):
    canary = tmp_path / "canary"
    monkeypatch.setenv("HOSTILE_CANARY", str(canary))
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / f"{name}.py").write_text(SIDE_EFFECT)
    monkeypatch.syspath_prepend(shadow)
    monkeypatch.delitem(sys.modules, name, raising=False)
    for target in (name, f"builtins.{name}", f"{name}.thing", f"{name}.Fraction"):
        for tag in ("!new", "!apply", "!name", "!module", "!applyref"):
            with suppress(ConfigError):
                load(train, tmp_path, f"a: {tag}:{target} [[1, 2]]\n")
    assert not canary.exists()


def test_a_resolved_file_that_somebody_changed_is_no_more_trusted(house, train, on_path, tmp_path):
    hparams = load(train, tmp_path, "lr: 0.1\nmodel: !new:torch.nn.Linear [1, 2]\n")
    create_experiment_directory(tmp_path / "run", hparams.path)
    resolved = next((tmp_path / "run").glob("hyperparams*.yaml"))
    assert list(train.load(resolved)) == ["lr", "model"]
    text = resolved.read_text()
    for change in (
        f"evil: !apply:os.system ['touch {tmp_path}/canary']\n",
        f"evil: (1, !!python/object/apply:os.system ['touch {tmp_path}/canary'])\n",
        "trust: [os]\nevil: !name:os.system\n",
    ):
        resolved.write_text(text + change)
        with pytest.raises(ConfigError):
            train.load(resolved)
    assert not (tmp_path / "canary").exists()


def test_what_is_trusted_must_be_said_clearly(train, on_path, tmp_path, subtests):
    (tmp_path / "main.yaml").write_text("lr: 0.1\n")
    unclear = [("*",), ("",), ("os system",), ("os.",), ("\u043es",), (1,), "os", {"os": 1}, 5, ("/nowhere",)]
    for trust in unclear:
        with subtests.test(repr(trust)), pytest.raises(ConfigError):
            train.load(tmp_path / "main.yaml", None, trust)


def test_what_the_error_says_to_trust_is_enough(train, on_path, tmp_path, subtests):
    for value in (
        "!apply:os.path.expandvars [x]",
        "!new:subprocess.Popen [['true']]",
        "!name:functools.reduce",
        "!name:torch.hub.load",
        "!name:torch.nn.Module.apply",
        "!name:recipe_parts.system",
        "!name:recipe_parts.Child.apply",
        "!module:json",
        "!name:sklearn.utils.shuffle",
        "!name:numpy.save",
        "!name:exec",
        "!name:amp_recipes.load_hparams",
    ):
        with subtests.test(value):
            with pytest.raises(ConfigError) as caught:
                load(train, tmp_path, f"a: {value}\n")
            (name,) = re.findall(r"--trust ([\w.]+\w)", str(caught.value))
            assert f'trust=("{name}",)' in str(caught.value)
            assert list(train.load(tmp_path / "main.yaml", None, (name,))) == ["a"]


def test_a_message_holds_no_signs_that_a_terminal_obeys(train, on_path, tmp_path):
    (tmp_path / "main.yaml").write_text(
        '"a\\e[2J": !ref <b>\nc: !ref <"\\e[31m">\nd: !new:torch.nn.Linear {"\\e]0;x\\a": 1}\n'
    )
    with pytest.raises(ConfigError) as caught:
        train.load(tmp_path / "main.yaml", {"\x1b[31mred": 1})
    assert "\x1b" not in str(caught.value)
