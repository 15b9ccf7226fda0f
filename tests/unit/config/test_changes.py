"""A start in the folder of an earlier run: what has changed is told, and refused unless it is accepted."""

import dataclasses
import json
import logging
import os

import pytest
from hyperpyyaml import resolve_references
from repository import REPOSITORY
from work import at_most

from amp_recipes.config import RunOptions, create_experiment_directory, load_hparams, parse_arguments
from amp_recipes.config.changes import BESIDE_TRAINING, differences, environment_changes, setting_changes
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.nodes import Mistakes
from amp_recipes.config.yaml.reading import read_text
from amp_recipes.config.yaml.references import resolve
from amp_recipes.errors import ConfigError

RECIPE = """\
output_folder: {folder}
save_folder: !ref <output_folder>/save
log_file: !ref <output_folder>/deep/log.txt
seed: 3
lr: 0.001
betas: [0.9, 0.999]
model: !new:collections.Counter
    hidden: 4
    name: net
optimizer: !name:collections.OrderedDict
    lr: !ref <lr>
layers:
    - {{width: 1}}
    - {{width: 2}}
"""


pytestmark = pytest.mark.usefixtures("logging_as_before")


def tree(text):
    mistakes = Mistakes()
    root = read_text(text or "{}", "x.yaml", mistakes, Budget())
    assert not list(mistakes)
    return root


def changes(old, new):
    return setting_changes(tree(old), tree(new))


def test_each_change_is_told_by_name_and_values(subtests):
    for old, new, expected in [
        ("lr: 0.001", "lr: 0.002", ["lr: 0.001 -> 0.002"]),
        ("lr: 1e-3", "lr: 0.001", []),
        ("a: 1", "a: 1.0", ["a: 1 -> 1.0"]),
        ("a: 1", "a: true", ["a: 1 -> true"]),
        ("a: 1", "a: '1'", ["a: 1 -> '1'"]),
        ("a: 0x10", "a: 16", []),
        ("a: null", "a: 'null'", ["a: null -> 'null'"]),
        ("a: .nan", "a: .NaN", []),
        ("a: .nan", "a: nan", ["a: .nan -> nan"]),
        ("a: .inf", "a: -.inf", ["a: .inf -> -.inf"]),
        ("a: ''", "a: ' '", ["a: '' -> ' '"]),
        ("a: net", 'a: "net"', []),
        ("a: 1", "", ["a: 1 -> (absent)"]),
        ("", "a: {b: 1, c: 2}", ["a.b: (absent) -> 1", "a.c: (absent) -> 2"]),
        ("a: {}", "a: []", ["a: {} -> []"]),
        ("a: 3", "a: {b: 3}", ["a: 3 -> (absent)", "a.b: (absent) -> 3"]),
        ("a: [1, x]", "a: [x, 1]", ["a: [1, 'x'] -> ['x', 1]"]),
        ("a: ['b, c']", "a: [b, c]", ["a: ['b, c'] -> ['b', 'c']"]),
        ("a: [{b: 1}, {b: 2}]", "a: [{b: 1}]", ["a.1.b: 2 -> (absent)"]),
        ("a: !new:x.A", "a: !new:x.B", ["a: !new:x.A -> !new:x.B"]),
        ("a: !new:x.A {b: 1}", "a: !new:x.B {b: 2}", ["a: !new:x.A -> !new:x.B", "a.b: 1 -> 2"]),
        ("a: !new:x.A {b: 1}", "a: {b: 1}", ["a: !new:x.A -> (absent)"]),
        ("a: !new:x.A [1, 2]", "a: !new:x.A [1, 3]", ["a: !new:x.A [1, 2] -> !new:x.A [1, 3]"]),
        ("a: !name:x.A", "a: !name:x.A {}", []),
        ("a: !new:x.A []", "a: !new:x.A", []),
        ("a: !new:x.A ['']", "a: !new:x.A", ["a: !new:x.A [''] -> !new:x.A"]),
        ("a: (1, 2)", "a: [1, 2]", ["a: (1, 2) -> [1, 2]"]),
        ("a: (1, x)", "a: !tuple [1, x]", []),
        ("a: (1, 2)", "a: '(1, 2)'", ["a: (1, 2) -> '(1, 2)'"]),
        ("a: (1)", "a: !tuple []", ["a: (1) -> ()"]),
        ("a: &x {b: 1}\nc: *x", "a: {b: 1}\nc: {b: 1}", []),
        ("a: &x {b: 1}\nc: *x", "a: &x {b: 2}\nc: *x", ["a.b: 1 -> 2", "c.b: 1 -> 2"]),
        ("b: 1\na: 2", "a: 2\nb: 1", []),
        ("1: x", "'1': y", ["1: x -> y"]),
        ("a: {1: x}", "a: {1: z}", ["a.1: x -> z"]),
        ("a: 2024-01-02", "a: 2024-01-03", ["a: 2024-01-02 -> 2024-01-03"]),
        ("a: 2024-01-02", "a: '2024-01-02'", ["a: 2024-01-02 -> '2024-01-02'"]),
        ("a: '[1]'", "a: [1]", ["a: '[1]' -> [1]"]),
        ("a: \"'1'\"", "a: '1'", ["a: \"'1'\" -> '1'"]),
        ("a.b: 1", "a: {b: 1}", ["a.b: 1 -> (absent)", "a.b: (absent) -> 1"]),
    ]:
        with subtests.test(old=old, new=new):
            assert changes(old, new) == expected
            assert changes(old, old) == changes(new, new) == []
            assert len(changes(new, old)) == len(expected)


def test_run_options_count_by_their_values_not_by_how_they_were_given(subtests):
    for old, new, expected in [
        ("", "precision: fp32", []),  # given, but its default
        ("", "precision: bf16", ["precision: fp32 -> bf16"]),
        ("max_grad_norm: 5", "", []),
        ("max_grad_norm: 5", "max_grad_norm: 1", ["max_grad_norm: 5.0 -> 1.0"]),
        ("fp32_modules: head", "fp32_modules: [head]", []),
        ("grad_accumulation_factor: 2", "", ["grad_accumulation_factor: 2 -> 1"]),
        ("seed: 1", "seed: 2", ["seed: 1 -> 2"]),
        ("log_interval_steps: 1", "log_interval_steps: 2", []),
        ("a: {log_interval_steps: 1}", "a: {log_interval_steps: 2}", ["a.log_interval_steps: 1 -> 2"]),
        ("precision: fp8", "precision: bf16", ["precision: fp8 -> bf16"]),  # of an older version
    ]:
        with subtests.test(old=old, new=new):
            assert changes(old, new) == expected


def test_which_options_a_resumed_run_may_change_is_said_at_the_option():
    marked = {o.name for o in dataclasses.fields(RunOptions) if o.metadata["changes_training"] is False}
    assert marked == BESIDE_TRAINING
    may = {"eval_precision", "noprogressbar", "device", "resume", "init_from", "accept_changes", "test_only", "debug"}
    may |= {"log_interval_steps", "ckpt_interval_minutes", "ckpt_interval_steps", "ckpt_background", "output_folder"}
    assert may <= BESIDE_TRAINING
    must = {"precision", "fp32_modules", "seed", "deterministic", "max_grad_norm", "grad_accumulation_factor"}
    must |= {"ema_decay", "init_scale", "growth_interval", "lr_scheduler_interval", "optimizer_step_limit"}
    assert not must & BESIDE_TRAINING


def test_an_option_beside_training_is_never_a_change(subtests):
    values = {bool: ("true", "false"), str: ("a", "b"), int: ("3", "4"), float: ("3.5", "4.5"), list: ("[a]", "[b]")}
    for name in sorted(BESIDE_TRAINING):
        with subtests.test(name=name):
            default = RunOptions()[name]
            pair = values[type(default)] if default is not None else ("'x'", "'y'")
            assert changes(f"{name}: {pair[0]}", f"{name}: {pair[1]}") == []


def test_paths_that_follow_the_output_folder_are_no_change(subtests):
    text = "output_folder: {0}\nsame: {0}\nbelow: {1}/save\nlog: !new:a.Log [{1}/log, 3]\nl: !new:a.L {{file: {1}/log}}"
    for old, new in [("runs/a", "runs/b"), ("runs/a/", "runs/b"), ("'1'", "'2'")]:
        with subtests.test(old=old, new=new):
            old_text, new_text = (text.format(name, name.strip("'/")) for name in (old, new))
            assert changes(old_text, new_text) == []


def test_what_only_looks_like_the_output_folder_is_a_change():
    old = "output_folder: '1'\nk: 1\nx: '1'\ny: 21/a\nz: !new:a.B [1/a]\nw: 1/a"
    new = "output_folder: '2'\nk: 2\nx: '2'\ny: 22/a\nz: !new:a.C [2/a]\nw: 2/b"
    refused = ["k: 1 -> 2", "y: 21/a -> 22/a", "z: !new:a.B ['1/a'] -> !new:a.C ['2/a']", "w: 1/a -> 2/b"]
    assert changes(old, new) == refused
    assert changes(f"{old}\nv: 1/a", f"{new}\nv: 1/a") == refused  # a path into the old folder, that stays one


# ---------------------------------------------------------------------- objects that several keys share


def test_a_shared_object_is_one_setting(subtests):
    for old, new, expected in [
        # Told once, where it is described.
        ("a: &x !new:x.A {b: 1}\nc: *x", "a: &x !new:x.A {b: 2}\nc: *x", ["a.b: 1 -> 2"]),
        ("a: &x !new:x.A {b: 1}\nc: *x", "c: &x !new:x.A {b: 1}\na: *x", []),
        ("m: {a: &x !new:x.A }\nc: *x", "c: &x !new:x.A\nm: {a: *x}", []),
        # An object of its own is another model than one that is shared.
        ("a: &x !new:x.A\nc: *x", "a: !new:x.A\nc: !new:x.A", ["c: !ref <a> -> !new:x.A"]),
        (
            "a: {b: &x !new:x.A {d: 1}}\nc: {e: *x}",
            "a: {b: !new:x.A {d: 1}}\nc: {e: !new:x.A {d: 1}}",
            ["c.e: !ref <a[b]> -> !new:x.A", "c.e.d: (absent) -> 1"],
        ),
        # Attributes of an object, each time an `!apply:getattr` of its own or shared.
        ("a: &x !new:x.A\nb: !apply:getattr [*x, n]", "a: &x !new:x.A\nb: !apply:getattr\n- *x\n- n", []),
        (
            "a: &x !new:x.A\nb: &y !apply:getattr [*x, n]\nc: *y",
            "a: &x !new:x.A\nb: !apply:getattr [*x, n]\nc: !apply:getattr [*x, n]",
            [],
        ),
        (
            "a: &x !new:x.A\nb: !apply:getattr [*x, n]",
            "a: &x !new:x.A\nb: !apply:getattr [*x, m]",
            ["b: !ref <a.n> -> !ref <a.m>"],
        ),
        ("a: &x !new:x.A\nb: !apply:getattr [*x, n]", "a: &x !new:x.A\nb: 3", ["b: !ref <a.n> -> 3"]),
        ("b: !apply:getattr [!new:x.A , n]", "b: !apply:getattr [!new:x.B , n]", ["b.0: !new:x.A -> !new:x.B"]),
    ]:
        with subtests.test(old=old, new=new):
            assert changes(old, new) == expected
            assert changes(old, old) == changes(new, new) == []


def test_settings_that_an_older_version_saved_are_those_of_the_same_yaml():
    """As HyperPyYAML dumped them: with comments of the wrong keys, empty nulls, anchors, attributes by getattr."""
    old = """\
        split: &id001 [0.7, 0.3] # train, test
        data_folder:       # null: the digits
        images: &id002 !apply:data.load_images
          split: *id001
        model: &id003 !new:model.Net # what is trained

        # Training
          in_channels: !apply:getattr          # as the images are
          - *id002
          - channels
          shape: (1, 8)
        modules:
          model: *id003
        fused: true
        eps: 1e-05
        debug: true
    """
    new = """\
        split: &a [0.7, 0.3]
        data_folder: null
        images: &b !apply:data.load_images {split: *a}
        model: &c !new:model.Net
          in_channels: !apply:getattr [*b, channels]
          shape: !tuple [1, 8]
        modules: {model: *c}
        fused: true
        eps: 1.0e-05
    """
    assert changes(old, new) == []


REFERENCES = """\
a: !name:torch.nn.ReLU
b: !ref <a>
n: !new:torch.nn.ReLU
m: [!ref <n>, !copy <n>]
c: !new:collections.Counter
  x: 1
d: !ref <c>
e: !copy <c>
i: !apply:random.Random
f: !ref <i.seed>
g: !ref <f>
h: [!ref <g>, 1]
t: (1, 2)
u: !ref <t>
small: 0.00001
half: !ref <small> / 2
text: !ref <small>/x
empty: {}
none:
l: [[1, 2], {k: v}]
k: !ref <l>
"""


IMAGE_RECIPE = (REPOSITORY / "configs" / "image_classification.yaml").read_text()


@pytest.mark.parametrize("text", [REFERENCES, IMAGE_RECIPE], ids=["references", "recipe"])
def test_what_hyperpyyaml_resolved_and_dumped_compares_equal(text):
    """A run that was begun with an older version goes on."""
    mistakes = Mistakes()
    resolved = resolve(tree(text), mistakes, Budget())
    assert not list(mistakes)
    assert differences(tree(resolve_references(text).getvalue()), resolved) == []


def anchors(levels, leaf="[1]"):
    """YAML whose values double with each level."""
    lines = [f"a0: &a0 {leaf}"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_an_expansion_that_fills_a_machine_is_refused_at_once():
    with (
        at_most(calls=400_000),
        pytest.raises(ConfigError, match=r"x\.yaml: the settings have more than 100,000 values"),
    ):
        changes(anchors(40), anchors(40, "[2]"))


def test_objects_that_share_objects_are_not_written_out():
    deep = "\n".join(["a0: &a0 !new:x.A [1]", *(f"a{n}: &a{n} !new:x.A [*a{n - 1}, *a{n - 1}]" for n in range(1, 15))])
    with at_most(calls=300_000):
        assert changes(deep, deep.replace("[1]", "[2]")) == ["a0: !new:x.A [1] -> !new:x.A [2]"]


# ---------------------------------------------------------------------- what may always change


COUNTERS = ["EpochCounter", "checkpoint.EpochCounter", "checkpoint.epoch_counter.EpochCounter"]


def test_a_resumed_run_may_train_for_longer(subtests):
    for counter in COUNTERS:
        for limit in ["{{limit: {0}}}", "[{0}]"]:
            with subtests.test(counter=counter, limit=limit):
                text = f"number_of_epochs: {{0}}\ncounter: !new:amp_recipes.{counter} {limit}"
                assert changes(text.format(2), text.format(5)) == []
                assert changes(f"counter: !new:amp_recipes.{counter} [2]", text.format(5)) == []
                assert [str(change) for change in differences(tree(text.format(2)), tree(text.format(5)))][:1] == [
                    "number_of_epochs: 2 -> 5"
                ]


def test_keys_that_may_always_change_are_these_and_no_others(subtests):
    for old, new, expected in [
        # What follows from the number of epochs is a change as any other.
        (
            "number_of_epochs: 2\ns: !name:x.S {T_max: 2}",
            "number_of_epochs: 5\ns: !name:x.S {T_max: 5}",
            ["s.T_max: 2 -> 5"],
        ),
        ("c: !new:x.EpochCounter {limit: 2}", "c: !new:x.EpochCounter {limit: 3}", ["c.limit: 2 -> 3"]),
        (
            "c: !new:x.Counter {limit: 2}",
            "c: !new:amp_recipes.EpochCounter {limit: 3}",
            ["c: !new:x.Counter -> !new:amp_recipes.EpochCounter", "c.limit: 2 -> 3"],
        ),
        (
            "c: !new:amp_recipes.EpochCounter {limit: 2, x: 1}",
            "c: !new:amp_recipes.EpochCounter {limit: 3, x: 2}",
            ["c.x: 1 -> 2"],
        ),
        ("m: {number_of_epochs: 2}", "m: {number_of_epochs: 3}", ["m.number_of_epochs: 2 -> 3"]),
        ("limit: 2", "limit: 3", ["limit: 2 -> 3"]),
        ("train_logger: !new:x.L {file: a}", "train_logger: !new:x.M {file: b, n: 1}", []),
        ("log_interval: 2", "", []),
    ]:
        with subtests.test(old=old, new=new):
            assert changes(old, new) == expected


def test_all_differences_hold_also_what_a_resumed_run_may_change():
    old, new = "log_interval_steps: 3\nnumber_of_epochs: 2\nlr: 1", "debug: true\nnumber_of_epochs: 2\nlr: 2"
    found = differences(tree(old), tree(new))
    assert [(str(change), change.free) for change in found] == [
        ("lr: 1 -> 2", False),
        ("debug: false -> true", True),
        ("log_interval_steps: 3 -> 10", True),
    ]


# ---------------------------------------------------------------------- starts


@pytest.fixture
def start(tmp_path):
    """Starts the recipe as a script does, with these words on its command line."""
    folder = tmp_path / "run"
    yaml = tmp_path / "recipe.yaml"
    yaml.write_text(RECIPE.format(folder=folder))

    def start(*words, text=None):
        if text is not None:
            yaml.write_text(text)
        file, _, overrides = parse_arguments([str(yaml), *words])
        return create_experiment_directory(folder, file, overrides)

    start.folder = folder
    return start


def checkpoint(folder):
    """The run in `folder` has saved something."""
    (folder / "save" / "CKPT+000001").mkdir(parents=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".yaml", ".json")}


def test_changes_are_refused_all_together_and_nothing_is_written(start):
    checkpoint(start())
    before = contents(start.folder)
    with pytest.raises(ConfigError) as refused:
        start("--lr=0.002", "--model.hidden=8", "--precision=bf16", "--log_interval_steps=2")
    text = str(refused.value)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[1:-1] == [
        "lr: 0.001 -> 0.002",
        "model.hidden: 4 -> 8",
        "optimizer.lr: 0.001 -> 0.002",
        "precision: fp32 -> bf16",
    ]
    assert str(start.folder) in lines[0]
    assert all(advice in lines[-1] for advice in ("--accept_changes", "--output_folder", "--resume never"))
    assert contents(start.folder) == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("name: net", "name: net\n    bias: true"), "model.bias: (absent) -> true"),
        (("seed: 3", "seed: 4"), "seed: 3 -> 4"),
        (("betas: [0.9, 0.999]\n", ""), "betas: [0.9, 0.999] -> (absent)"),
        (
            ("!name:collections.OrderedDict", "!name:collections.Counter"),
            "optimizer: !name:collections.OrderedDict -> !name:collections.Counter",
        ),
        (("{width: 2}", "{width: 5}"), "layers.1.width: 2 -> 5"),
    ],
)
def test_a_changed_yaml_is_refused_and_taken_with_the_flag(start, change, line, caplog):
    checkpoint(start())
    text = RECIPE.format(folder=start.folder).replace(*change)
    with pytest.raises(ConfigError, match="The settings differ") as refused:
        start(text=text)
    assert line in str(refused.value)
    start("--accept_changes")
    log = (start.folder / "log.txt").read_text()
    assert all(words in text for words in (line, "saved -> now") for text in (caplog.text, log))
    assert (
        f"keep their saved values. To train with another schedule, start a new run with --init_from {start.folder}."
        in log
    )
    assert (start.folder / "hyperparams_original.yaml").read_text() == text
    caplog.clear()
    start()  # these are the settings of the run now, and the flag was for one start
    assert "changed settings" not in caplog.text
    assert load_hparams(start.folder / "hyperparams.yaml").get("accept_changes") is None


def test_more_epochs_need_no_flag_but_what_follows_from_them_does(start):
    text = RECIPE.format(folder=start.folder) + (
        "number_of_epochs: 2\ncounter: !new:amp_recipes.EpochCounter {limit: !ref <number_of_epochs>}\n"
    )
    checkpoint(start(text=text))
    start("--number_of_epochs=3")
    assert load_hparams(start.folder / "hyperparams.yaml")["counter"].limit == 3
    start("--accept_changes", text=f"{text}half: !ref <number_of_epochs> // 2\n")
    with pytest.raises(ConfigError, match=r"half: 1 -> 2") as refused:
        start("--number_of_epochs=4")
    assert "number_of_epochs" not in str(refused.value)


def test_without_checkpoints_there_is_nothing_to_go_on_with(start):
    start()
    (start.folder / "save").mkdir()
    start("--lr=0.002")
    assert load_hparams(start.folder / "hyperparams.yaml")["lr"] == 0.002


def test_resume_never_compares_nothing_and_is_not_written_down(start):
    checkpoint(start())
    start("--lr=0.002", "--resume=never")
    again = load_hparams(start.folder / "hyperparams.yaml")
    assert again["lr"] == 0.002 and "resume" not in again
    assert "resume" not in (start.folder / "overrides.yaml").read_text()


@pytest.mark.parametrize("option", ["--debug", "--test_only"])
def test_trying_out_and_testing_leave_the_files_of_a_run_as_they_are(start, option):
    checkpoint(start())
    before = contents(start.folder)
    start("--lr=0.002", option)
    assert contents(start.folder) == before


@pytest.mark.parametrize("option", ["--debug", "--test_only"])
def test_trying_out_writes_its_settings_where_no_run_is(start, option):
    start("--lr=0.002", option)
    assert load_hparams(start.folder / "hyperparams.yaml")["lr"] == 0.002


def test_options_in_the_yaml_and_in_plain_overrides_count_too(start, tmp_path):
    checkpoint(start())
    recipe = tmp_path / "recipe.yaml"
    with pytest.raises(ConfigError, match=r"lr: 0\.001 -> 1"):
        create_experiment_directory(start.folder, recipe, {"lr": 1})
    create_experiment_directory(start.folder, recipe, {"lr": 1, "accept_changes": True})
    assert load_hparams(start.folder / "hyperparams.yaml")["lr"] == 1
    with pytest.raises(ConfigError, match=r"lr: 1 -> 2"):
        create_experiment_directory(start.folder, recipe, "lr: 2")
    start("--lr=3", text=RECIPE.format(folder=start.folder) + "accept_changes: true\n")
    assert load_hparams(start.folder / "hyperparams.yaml")["lr"] == 3


def test_a_run_that_was_moved_is_the_same_run(start, tmp_path):
    checkpoint(start())
    moved = tmp_path / "elsewhere" / "b"
    moved.parent.mkdir()
    start.folder.rename(moved)
    _, _, overrides = parse_arguments(["recipe.yaml", f"--output_folder={moved}"])
    create_experiment_directory(moved, tmp_path / "recipe.yaml", overrides)
    assert load_hparams(moved / "hyperparams.yaml")["save_folder"] == f"{moved}/save"


@pytest.mark.parametrize("damage", ["", "lr: [", "- 1"])
def test_settings_that_cannot_be_read_are_not_taken_for_the_same(start, damage, caplog):
    checkpoint(start())
    (start.folder / "hyperparams.yaml").write_text(damage)
    with pytest.raises(ConfigError, match=r"cannot be read: .*hyperparams\.yaml"):
        start()
    start("--accept_changes")
    assert "cannot be read" in caplog.text
    start()


def test_another_torch_or_commit_is_a_warning(start, caplog):
    checkpoint(start())
    file = start.folder / "environment.json"
    environment = json.loads(file.read_text())
    torch_version = environment["packages"]["torch"]
    environment["packages"]["torch"] = "1.0"
    environment["git"] = {"commit": "abc", "dirty": False}
    file.write_text(json.dumps(environment))
    start()
    assert f"torch: 1.0 -> {torch_version}" in caplog.text and "git commit: abc -> " in caplog.text
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    caplog.clear()
    start()  # the file tells of this environment now
    assert caplog.text == ""
    for damaged in ("", "[1]", "{"):
        file.write_text(damaged)
        start()


HOSTILE = {
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "large": lambda path: path.write_bytes(b" " * 5_000_000),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000),
    "bomb": lambda path: path.write_text(anchors(40)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_run_of_somebody_else_holds_up_no_start(start, kind, caplog):
    checkpoint(start())
    environment, settings = start.folder / "environment.json", start.folder / "hyperparams.yaml"
    for file in (environment, settings):
        file.unlink()
        HOSTILE[kind](file)
    with at_most(calls=1_000_000):
        assert environment_changes(environment, {"packages": {"torch": "2.0"}}) == []
        with pytest.raises(ConfigError, match=r"the saved settings cannot be read: .*hyperparams\.yaml"):
            start()


def test_no_change_steers_the_terminal(start, tmp_path):
    escapes = '"a\\e[31m": {"\\x9b": "\\e[2J"}\n"b\\nc": [1]\n"\\u202e": !new:x\n'
    told = [str(change) for change in differences(tree("{}"), tree(escapes))]
    assert told[0] == r"a\x1b[31m.\x9b: (absent) -> '\x1b[2J'" and told[1] == r"b\nc: (absent) -> [1]"
    assert all(text.isprintable() for text in told)
    file = tmp_path / "environment.json"
    file.write_text(json.dumps({"packages": {"torch": "1\x1b[2J\n"}, "git": {"commit": {"\ud800": 1}}}))
    told = environment_changes(file, {"packages": {"torch": "2"}, "git": {"commit": "abc"}})
    assert told[0] == r"torch: 1\x1b[2J\n -> 2" and all(text.isprintable() for text in told)


def test_a_folder_that_was_only_tried_out_in_is_taken_for_no_run(start):
    """--debug saves no checkpoints, and what it leaves lies in a folder of its own."""
    start("--debug")
    (start.folder / "debug").mkdir()
    (start.folder / "debug" / "summary.json").write_text("{}")
    start("--lr=0.002")
    assert load_hparams(start.folder / "hyperparams.yaml")["lr"] == 0.002


def test_other_ranks_compare_nothing(start, monkeypatch):
    checkpoint(start())
    monkeypatch.setenv("RANK", "1")
    assert start("--lr=7") == start.folder
