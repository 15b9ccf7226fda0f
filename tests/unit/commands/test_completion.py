"""The completion scripts, run by a real bash and, where there is one, a real zsh."""

import os
import shutil
import subprocess

import pytest
from programs import DEADLINE_SECONDS
from repository import REPOSITORY

from amp_recipes.commands import cli
from amp_recipes.commands.completion import SHELLS
from amp_recipes.config.options.run_options import OPTION_NAMES
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.nodes import Mistakes, dotted, walk
from amp_recipes.config.yaml.reading import read_file

RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))

# bash has split the line at "=" too; its script reads the line itself.
BASH = r"""
set -u
source "$1"
COMP_LINE=$3; COMP_POINT=${#COMP_LINE}; COMP_WORDS=($3); COMP_CWORD=1; COMPREPLY=()
"$2"
(( ${#COMPREPLY[@]} )) && printf '%s\n' "${COMPREPLY[@]}"
"""
# bashcompinit calls the function in sh's emulation, with zsh's own words.
ZSH = r"""
autoload() { :; }; compinit() { :; }; bashcompinit() { :; }; complete() { :; }
source "$1"
emulate sh
COMP_WORDS=("${(@z)3}"); [[ $3 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
"$2"
(( ${#COMPREPLY[@]} )) && printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        with open(folder / shell, "w") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", file)
            assert cli.main(["completion", shell]) == 0
    return folder


# What a missing shell leaves untested is said once, by the test of the script's syntax below.
@pytest.fixture(params=[shell for shell in SHELLS if shutil.which(shell)])
def complete(request, scripts, tmp_path):
    """What TAB offers at the end of a line, in a folder with train.py and config.yaml; no Python may start."""
    shell = request.param
    (tmp_path / "train.py").write_text("import amp_recipes\n")
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("python", "python3"):
        (stubs / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/python_ran\n")
        (stubs / name).chmod(0o755)
    env = {"PATH": f"{stubs}:/usr/bin:/bin", "HOME": str(tmp_path)}

    def complete(line, function="_amp_recipes_script", yaml=None):
        if yaml is not None:
            (tmp_path / "config.yaml").write_text(yaml)
        options = ["--norc", "-c", BASH] if shell == "bash" else ["-f", "-c", ZSH]
        words = [shutil.which(shell), *options, "test", scripts / shell, function, line]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        assert done.stderr == "" and not (tmp_path / "python_ran").exists()
        offered = done.stdout.splitlines()
        if shell == "bash" and "=" in line.split(" ")[-1]:
            begun = line.split(" ")[-1].partition("=")[0]
            offered = [f"{begun}={word}" for word in offered]  # bash adds to what it split
        return offered

    complete.folder = tmp_path
    complete.shell = shell
    return complete


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_parses_and_evaluates_nothing(scripts, shell):
    text = (scripts / shell).read_text()
    assert "eval " not in text.replace("eval_", "") and "compgen" not in text and "@" + "OPTIONS@" not in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_and_keys_of_a_recipe(subtests, complete):
    for program in ["python train.py", "python3 train.py", "./train.py", "torchrun --x 2 train.py"]:
        for typed, expected in [
            ("--precision ", ["fp32", "bf16", "fp16", "auto"]),
            ("--precision b", ["bf16"]),
            ("--precision=", [f"--precision={name}" for name in ("fp32", "bf16", "fp16", "auto")]),
            ("--precision=f", ["--precision=fp32", "--precision=fp16"]),
            ("--debug ", ["true", "false"]),
            ("--debug=t", ["--debug=true"]),
            ("--grad_acc", ["--grad_accumulation_factor"]),
            ("--model.hid", ["--model.hidden"]),
            ("--model", ["--model.hidden", "--model.net.depth"]),
            ("--lr", ["--lr", "--lr_scheduler_interval"]),
            ("--lr 3 --model.net.", ["--model.net.depth"]),
            ("--seed ", []),  # a number: nothing to offer, the shell falls back to files
            ("", []),
            ("--nothing", []),
        ]:
            with subtests.test(program=program, typed=typed):
                yaml = "lr: 0.1\nseed: 1\nmodel: !new:m.Net\n    hidden: 4\n    net: !new:n.Net\n        depth: 3\n"
                assert complete(f"{program} config.yaml {typed}", yaml=yaml) == expected


def test_where_no_yaml_is_given_yet_run_options_are_offered(complete):
    assert complete("python train.py --prec") == ["--precision"]
    assert complete("python train.py missing.yaml --prec") == ["--precision"]
    assert complete("python train.py con") == []


def test_another_script_is_left_alone(complete):
    (complete.folder / "other.py").write_text("print(1)\n")
    assert complete("python other.py config.yaml --pre", yaml="lr: 1\n") == []
    assert complete("python -m my.train config.yaml --pre") == ["--precision"]


def test_odd_names_of_the_yaml(subtests, complete):
    for name in ["my dir/c.yaml", "lr=0.1/a:b/c.yml", "~/c.yaml", "$HOME.yaml", "it's.yaml", "-.yaml"]:
        with subtests.test(name=name):
            file = complete.folder / name.removeprefix("~/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("width: 1\n")
            typed = name.replace(" ", "\\ ").replace("$", "\\$").replace("'", "\\'")
            expected = [] if name.startswith("-") else ["--width"]
            assert complete(f"python train.py {typed} --wid") == expected


def own_keys(complete, yaml):
    """The keys that are offered beside the run options."""
    without = complete("python train.py --")
    offered = complete("python train.py config.yaml --", yaml=yaml)
    return sorted(word[2:] for word in offered if word not in without)


def test_keys_are_found_in_the_text(subtests, complete):
    for yaml, expected in [
        ("# a: 1\n\na: 1 # b: 2\n", "a"),
        ("a:\n  b:\n    c: 1\n  d: 2\ne: 3\n", "a.b.c a.d e"),
        ("a:\n- b: 1\n  c: 2\n- b: 3\nd: 1\n", "a.0.b a.0.c a.1.b d"),
        ("a:\n  - b: 1\n  - - c: 2\n    - d: 3\n", "a.0.b a.1.0.c a.1.1.d"),
        ("a:\n  - 1\n  - 2\nb: [1, 2]\n", "a b"),
        ("a: {b: 1, c: [1, 2], d: x}\n", "a.b a.c a.d"),
        ("a: !new:x.A {b: 1}\n", "a.b"),
        ("a: &x !new:x.A\n  b: 1\nc: *x\n", "a.b c"),
        ("a: |\n  b: 1\n  c: 2\nd: 1\n", "a d"),
        ("a: >-\n  b: 1\n\n  c: 2\nd: 1\n", "a d"),
        ("'q': 1\n1: 2\nx y: 3\na-b: 4\n_c: 5\n", "_c a-b"),
        ("'q':\n  b: 1\nc: 1\n", "c"),
        ("a: 'b: c'\nd: \"e: f\"\n", "a d"),
        ("a: http://x/y\nb: c:d\n", "a b"),
        ("a: 1\r\nb:\r\n  c: 1\r\n", "a b.c"),
        ("- a: 1\n- b: 2\n", ""),
        ("a: !include:inner.yaml\n", "a.x a.y.z"),
        ("a: !include:inner.yaml\n  x: 3\nb: 1\n", "a.x a.y.z b"),
        ("a: !include:missing.yaml\nb: 1\n", "b"),
        ("a: !include:config.yaml\nb: 1\n", "a.a.b a.b b"),
        ("\n", ""),
        ("a\n", ""),
        ("\tb: 1\na: 1\n", "a"),
    ]:
        with subtests.test(yaml=yaml):
            (complete.folder / "inner.yaml").write_text("x: 1\ny:\n  z: 2\n")
            assert own_keys(complete, yaml) == expected.split()


def test_the_recipes_keys_are_those_that_the_reader_finds(subtests, complete):
    for recipe in RECIPES:
        with subtests.test(recipe=recipe.stem):
            root = read_file(str(recipe), Mistakes(), Budget())
            values = {dotted(path): node for path, node in walk(root)}
            named = {name for name in values if not any(other.startswith(f"{name}.") for other in values)}
            lists = {name.rpartition(".")[0] for name in named if name.rpartition(".")[2].isdigit()}
            expected = {name for name in named | lists if not name.rpartition(".")[2].isdigit()} - OPTION_NAMES
            assert own_keys(complete, recipe.read_text()) == sorted(expected)


# ---------------------------------------------------------------------- hostile files


@pytest.mark.parametrize(
    "yaml",
    [
        "$(touch canary): 1",
        "a: {$(touch canary): 1}",
        "`touch canary`: 1",
        "a:\n  $(touch canary): 1",
        "a'$(touch canary)': 1",
        '"; touch canary; ": 1',
        "a: $(touch canary)",
        "a: !include:$(touch canary).yaml",
        "a: !include:`touch${IFS}canary`",
        "a: !include:x;touch\tcanary",
        "a: !include:inner.yaml",
        "a[$(touch canary)]: 1",
        "@a b: 1\n@x $(touch canary): 2",
        'a: {b: 1, "$(touch canary)": 2}',
        "a\x1b]0;x\x07: 1",
        "* : 1\n? : 2",
        "a: !include:/dev/zero",
        "a: !include:pipe",
        "a: !include:../../../../../../dev/zero",
    ],
)
def test_nothing_of_a_hostile_file_is_run_or_offered(complete, yaml):
    (complete.folder / "inner.yaml").write_text("$(touch canary): 1\n")
    os.mkfifo(complete.folder / "pipe")
    for typed in ("--", "--a", "--$", "--a.", ""):
        offered = complete(f"python train.py config.yaml {typed}", yaml=f"{yaml}\n")
        assert all(word.lstrip("-").replace(".", "").replace("_", "").replace("-", "").isalnum() for word in offered)
    assert not (complete.folder / "canary").exists()


def test_a_hostile_name_of_a_file_is_not_run(complete):
    (complete.folder / "$(touch canary).yaml").write_text("width: 1\n")
    complete("python train.py $(touch canary).yaml --wid")
    assert complete("python train.py \\$\\(touch\\ canary\\).yaml --wid") == ["--width"]
    (complete.folder / "$(touch canary).py").write_text("amp_recipes\n")
    complete("python \\$\\(touch\\ canary\\).py config.yaml --wid")
    assert not (complete.folder / "canary").exists()


@pytest.mark.parametrize(
    "yaml",
    [
        "".join(f"key_{n}: 1\n" for n in range(200_000)),
        "".join(f"k{n}: !include:config.yaml\n" for n in range(400)),
        "a: " + "{" * 1_000_000,
        "a: " + "[" * 1_000_000,
        "".join(f"{' ' * n}a:\n" for n in range(1000)),
        "x" * 5_000_000,
    ],
    ids=["many keys", "includes itself", "braces", "brackets", "deep", "long"],
)
def test_a_huge_file_does_not_hold_up_the_shell(complete, yaml):
    complete("python train.py config.yaml --ke", yaml=yaml)  # longer than a test may take, if it were held up


# ---------------------------------------------------------------------- amp-recipes


def test_the_commands_of_amp_recipes(subtests, complete):
    for typed, expected in [
        ("ver", ["verify-resume"]),
        ("completion ", ["bash", "zsh"]),
        ("ne", ["new"]),
        ("new my_task --t", ["--to", "--template"]),
        ("new my_task --template ", ["basic", "own_step"]),
        ("new my_task --template o", ["own_step"]),
        ("new my_task --to ", []),
        ("export --t", ["--to"]),
        ("export --prec", []),
        ("diff a --j", ["--json"]),
        ("diff ", []),
        ("verify-resume train.py config.yaml --st", ["--steps", "--static_graph", "--strategy"]),
        ("verify-resume train.py config.yaml --wid", ["--width"]),
        ("verify-resume train.py config.yaml --precision ", ["fp32", "bf16", "fp16", "auto"]),
        ("unknown --x", []),
    ]:
        with subtests.test(typed=typed):
            assert complete(f"amp-recipes {typed}", "_amp_recipes_command", yaml="width: 1\n") == expected


def test_every_command_of_amp_recipes_is_offered(complete):
    offered = complete("amp-recipes ", "_amp_recipes_command")
    assert offered == [*(command.name for command in cli.COMMANDS), "--help", "--version"]
