"""verify-resume: what counts as a difference, what is said of it, and whole recipes that are killed and resumed."""

import functools
import itertools
import os
import random
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from programs import run_python
from repository import REPOSITORY
from torch import nn

from amp_recipes.brain import Brain
from amp_recipes.commands.child_runs import ChildRuns
from amp_recipes.commands.verify_resume import remembered
from amp_recipes.commands.verify_resume.causes import (
    describe,
    what_determinism_says,
    why_metrics_differ,
    why_not_reproducible,
    why_not_resumed,
)
from amp_recipes.commands.verify_resume.compare import (
    SECTIONS,
    Trace,
    Window,
    differing_metrics,
    first_difference,
    not_restored,
    read_stages,
    read_trace,
    spliced,
    unequal_generators,
)
from amp_recipes.commands.verify_resume.digests import Digests, digest_of_tree
from amp_recipes.commands.verify_resume.probe import generators, noting_unseeded
from amp_recipes.commands.verify_resume.remembered import remembered_values
from amp_recipes.commands.verify_resume.verify import ResumeCheck, verify_resume
from amp_recipes.errors import ConfigError
from amp_recipes.loop.resume import RESUMING_INSIDE

# -------------------------------------------------------------- digests


def leaves(value):
    found = Digests()
    found.add(value)
    return dict(found)


@dataclass
class Sample:
    image: torch.Tensor
    name: str


PAIRS = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002])),
    (torch.tensor([0.0]), torch.tensor([-0.0])),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(0, 4), torch.zeros(4, 0)),
    (torch.tensor(1, dtype=torch.bfloat16), torch.tensor(1, dtype=torch.float16)),
    (torch.tensor([True, False]), torch.tensor([False, True])),
    (np.arange(3), np.arange(3, dtype=np.int32)),
    (np.float32(1), np.float64(1)),
    (1, 1.0),
    (1, True),
    (0.1 + 0.2, 0.3),
    (0.0, -0.0),
    ("a", b"a"),
    (None, "None"),
    ([1, 2], [2, 1]),
    ([1, 2], (1, 2)),
    ({1, 2}, {1, 3}),
    (Sample(torch.ones(1), "a"), Sample(torch.ones(1), "b")),
    (torch.tensor([[1.0, 0.0]]).to_sparse(), torch.tensor([[0.0, 1.0]]).to_sparse()),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    (np.random.default_rng(1), np.random.default_rng(2)),
    (random.Random(1), random.Random(2)),
]


def test_values_that_differ_in_a_bit_have_other_digests(subtests):
    for one, other in PAIRS:
        with subtests.test(one=one, other=other):
            assert leaves(one) == leaves(one)
            assert leaves(one) != leaves(other)
            assert leaves({"a": [one]}) != leaves({"a": [other]})


def test_layout_and_device_of_the_memory_do_not_count():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert leaves(matrix.t().contiguous().t()) == leaves(matrix)
    assert leaves(matrix[:, ::2]) == leaves(torch.tensor([[0.0, 2.0], [3.0, 5.0]]))
    assert leaves({"a": 1, "b": torch.ones(1)}) == leaves(OrderedDict(a=1, b=torch.ones(1)))


def test_nan_is_equal_to_itself():
    assert leaves(torch.tensor([float("nan")])) == leaves(torch.tensor([float("nan")]))
    assert leaves(float("nan")) == leaves(float("nan"))


def test_each_tensor_has_a_path_and_a_list_of_strings_is_one_leaf():
    batch = {"image": torch.zeros(2), "names": ["a", "b"], "more": [torch.zeros(1), {"x": np.zeros(1)}]}
    found = Digests()
    found.add(batch, "batch")
    assert list(found) == ["batch.image", "batch.names", "batch.more.0", "batch.more.1.x"]
    assert (found.tensors, found.bytes) == (3, 8 + 4 + 8)


def test_an_object_with_nothing_to_read_is_named():
    found = Digests()
    found.add({"f": print, "x": 1, "o": object()})
    assert set(found) == {"x"} and found.unread == {"builtin_function_or_method", "object"}


def test_a_tree_that_holds_itself_ends():
    tree = {"x": 1}
    tree["self"] = tree
    assert "x" in leaves(tree)


def test_sets_are_equal_whatever_their_order():
    one, other = set([0, 8]), set([8, 0])  # the same slot of the table: the first to come stands first
    assert list(one) != list(other)
    assert leaves(one) == leaves(other)


def test_every_global_generator_shows_in_its_own_digest():
    draws = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1)}
    for name, draw in draws.items():
        before = generators(torch.device("cpu"))
        draw()
        after = generators(torch.device("cpu"))
        assert [key for key in before if before[key] != after[key]] == [name]


# -------------------------------------------------------------- traces


def window(update, loss=1.0, **sections):
    """A made-up window; sections are given as names, whose digest is the update's number, or as dicts."""
    whole = {name: {f"{name}.a": str(update), f"{name}.b": "0"} for name in SECTIONS}
    whole.update({name: {**whole[name], **given} for name, given in sections.items() if name in SECTIONS})
    rest = {name: given for name, given in sections.items() if name not in SECTIONS}
    return Window(
        **{
            **{"update": update, "epoch": 1, "step": update, "batches": 1, "sections": whole, "losses": (loss.hex(),)},
            **rest,
        }
    )


def trace(*windows, first=1, last=4, end=True):
    """Windows `first` to `last`, those given in place of their number."""
    given = {it.update: it for it in windows}
    made = [given.get(number, window(number)) for number in range(first, last + 1)]
    return Trace(made, window(last + 1) if end else None)


def test_equal_traces_have_no_difference():
    assert first_difference(trace(), trace()) is None


def test_each_section_is_found_and_named(subtests):
    for section in SECTIONS:
        with subtests.test(section=section):
            found = first_difference(trace(), trace(window(3, **{section: {f"{section}.b": "other"}})))
            assert (found.section, found.update, found.place, found.index) == (section, 3, "epoch 1, batch 3", 2)
            assert list(found.names) == [f"{section}.b"] and found.equal == 1
            assert (
                f"{section}.b" in "\n".join(describe(found))
                and "before update 3 (epoch 1, batch 3)" in describe(found)[0]
            )


def test_of_several_sections_the_first_in_order_is_named_and_the_others_are_told():
    other = trace(window(2, loss=9.0, ema={"ema.a": "x"}, random={"torch": "x"}, data={"data.a": "x"}))
    found = first_difference(trace(), other)
    assert (found.section, list(found.also)) == ("data", ["random", "ema"])


def test_the_loss_is_compared_by_its_bits():
    found = first_difference(trace(window(2, loss=0.3)), trace(window(2, loss=0.1 + 0.2)))
    assert (found.section, found.one, found.other) == ("loss", "0.3", "0.30000000000000004")
    assert first_difference(trace(window(2, loss=0.0)), trace(window(2, loss=-0.0))).section == "loss"
    assert first_difference(trace(window(2, loss=float("nan"))), trace(window(2, loss=float("nan")))) is None


def test_an_earlier_update_wins_over_an_earlier_section():
    other = trace(window(2, loss=5.0), window(3, data={"data.a": "x"}))
    assert first_difference(trace(), other).section == "loss"


def test_another_batch_of_the_epoch_is_a_difference_of_place():
    found = first_difference(trace(), trace(window(3, step=1)))
    assert found.section == "place" and found.one.startswith("update 3: epoch 1, batch 3") and "batch 1" in found.other


def test_a_missing_tensor_is_told_as_missing():
    less = window(2)
    del less.sections["optimizers"]["optimizers.b"]
    found = first_difference(trace(), trace(less))
    assert (found.section, list(found.names), found.one, found.other) == (
        "optimizers",
        ["optimizers.b"],
        "",
        "(nothing)",
    )


def test_a_run_that_took_fewer_updates_differs_unless_it_was_killed():
    found = first_difference(trace(), trace(last=3, end=False))
    assert (found.section, found.update, found.one, found.other) == ("length", 4, "4 updates", "3 updates")
    assert first_difference(trace(), trace(last=3, end=False), both_ended=False) is None


def test_the_state_after_the_last_update_counts():
    other = Trace(trace().windows, window(5, modules={"modules.a": "x"}))
    found = first_difference(trace(), other)
    assert (found.section, found.update, found.index) == ("modules", 5, 4)


def test_the_two_processes_are_joined_at_the_resumed_ones_first_update():
    killed = trace(window(3, loss=7.0), last=4, end=False)  # what it did after the save is done again
    whole, resumed_at = spliced(killed, trace(first=3, last=5))
    assert resumed_at == 2 and [it.update for it in whole.windows] == [1, 2, 3, 4, 5]
    assert first_difference(trace(last=5), whole) is None
    assert spliced(killed, trace(last=5))[1] == 0  # began afresh


def test_a_trace_is_read_back_without_its_torn_end(tmp_path):
    lines = [
        '{"kind": "window", "update": 1, "epoch": 1, "step": 1, "batches": 1, "sections": {"data": {"x": "1"}}}',
        '{"kind": "loss", "losses": ["0x1.0p+0"]}',
        '{"kind": "window", "update": 2, "epoch": null, "step": 2, "batches": 1, "sections": {}}',
        '{"kind": "wind',
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    (tmp_path / "trace.jsonl.unseeded").write_text("b\na\nb\n")
    found = read_trace(file)
    assert [it.update for it in found.windows] == [1, 2] and found.end is None
    assert found.windows[0].losses == ("0x1.0p+0",) and found.windows[1].losses == ()
    assert found.windows[1].place == "batch 2" and found.unseeded == ["a", "b"]
    assert read_trace(tmp_path / "none.jsonl") == Trace([], None, [])


def test_metrics_are_compared_by_stage_and_epoch_and_the_later_record_counts(tmp_path):
    def write(name, *records):
        file = tmp_path / name
        file.write_text("\n".join(['{"kind": "header"}', *records]) + "\n")
        return read_stages(file)

    record = '{{"kind": "stage", "stage": "{}", "epoch": {}, "loss": {}, "metrics": {{"acc": {}}}, "seconds": {}}}'
    one = write("one", record.format("train", 1, 0.5, 0.25, 1), record.format("valid", 1, 0.5, 0.5, 1))
    same = write(
        "same",
        record.format("train", 1, 9, 9, 1),
        *[record.format(s, 1, 0.5, m, 7) for s, m in (("train", 0.25), ("valid", 0.5))],
    )
    assert differing_metrics(one, same) == {}
    other = write("other", record.format("train", 1, 0.5, 0.75, 1), record.format("valid", 1, "null", 0.5, 1))
    assert differing_metrics(one, other) == {"train acc of epoch 1": (0.25, 0.75), "valid loss of epoch 1": (0.5, None)}
    assert differing_metrics(one, {}) and read_stages(tmp_path / "none") == {}
    lost = write(
        "lost", record.format("valid", 1, 0.5, 0.5, 1), record.format("valid", 1, 0.5, 0.5, 1).replace('"acc": 0.5', "")
    )
    assert "valid acc of epoch 1" not in lost  # what only the earlier record had is gone


def test_only_what_two_whole_runs_agree_on_is_said_not_to_be_restored():
    def remembering(**values):
        windows = [window(n, remembered={name: it(n) for name, it in values.items()}) for n in (1, 2, 3)]
        return Trace(windows, window(4, remembered={name: it(4) for name, it in values.items()}))

    one = remembering(calls=str, clock=lambda n: "10:00", fixed=lambda n: "1")
    again = remembering(calls=str, clock=lambda n: "10:05", fixed=lambda n: "1")
    resumed = remembering(calls=lambda n: str(n if n == 1 else n - 2), clock=lambda n: "10:09", fixed=lambda n: "1")
    assert not_restored(one, again, resumed, resumed_at=1, until=3) == {"calls": ("2", "0")}


def test_generators_of_the_recipe_that_are_not_in_the_same_state_are_found():
    def holding(**values):
        return Trace([window(1, remembered=values)])

    one = holding(a="generator 1", b="generator 1", c="3")
    other = holding(a="generator 2", b="generator 1", c="4")
    assert unequal_generators(one, other, 0) == ["a"]


# -------------------------------------------------------------- what is said of a difference


def difference(section, update=2, **other):
    windows = {"loss": {"loss": 5.0}}.get(section, {section: {f"{section}.b": "x"}})
    return first_difference(trace(), trace(window(update, **windows, **other)))


def text(lines):
    return "\n".join(lines)


def test_data_that_differ_between_whole_runs_are_the_data_sets_fault():
    assert "PYTHONHASHSEED" in text(why_not_reproducible(difference("data"), []))
    told = text(why_not_reproducible(difference("data"), ["numpy.random.default_rng() without a seed at data.py:7"]))
    assert "data.py:7" in told and "PYTHONHASHSEED" not in told
    assert "np.random.default_rng([seed, index])" in told and "Look for a generator" not in told
    told = text(why_not_reproducible(difference("data", random={"torch": "x"}), []))
    assert "global generators" in told


def test_generators_state_and_loss_have_reasons_of_their_own():
    assert "clock" in text(why_not_reproducible(difference("random"), []))
    assert "before the seed is set" in text(why_not_reproducible(difference("modules", update=1), []))
    for section in ("modules", "optimizers", "loss"):
        assert "an operation" in text(why_not_reproducible(difference(section), []))
    assert "an operation" in text(why_not_reproducible(difference("loss", update=1), []))
    assert "made different batches" in text(
        why_not_reproducible(first_difference(trace(), trace(window(2, step=9))), [])
    )


def test_what_torch_says_of_operations_is_passed_on():
    stderr = "Traceback\nRuntimeError: cumsum_cuda_kernel does not have a deterministic implementation, but you set"
    assert "cumsum_cuda_kernel" in text(what_determinism_says(1, stderr, None))
    assert "CUBLAS_WORKSPACE_CONFIG" in text(what_determinism_says(1, "set CUBLAS_WORKSPACE_CONFIG=:4096:8", None))
    assert "boom" in text(what_determinism_says(1, "boom", None))
    assert "deterministic: true" in text(what_determinism_says(0, "", True))
    assert "deterministic: true" not in text(what_determinism_says(0, "", False))


def test_a_resume_with_other_data_tells_what_the_loader_said():
    log = f"WARNING {RESUMING_INSIDE}the loader has no state_dict.\nmore"
    assert "the loader has no state_dict." in text(why_not_resumed(difference("data"), True, {}, log))
    assert "did not continue with the batch" in text(why_not_resumed(difference("data"), True, {}, ""))


def test_a_resume_with_other_state_was_not_restored_or_depends_on_what_was_not():
    assert "not what was saved" in text(why_not_resumed(difference("optimizers"), True, {}, ""))
    told = text(why_not_resumed(difference("optimizers"), False, {"train.py: calls": ("6", "0")}, ""))
    assert "train.py: calls: 6 | 0" in told and "not what was saved" not in told
    assert "neither a checkpoint nor this check" in text(why_not_resumed(difference("loss"), True, {}, ""))
    aside = first_difference(
        trace(window(2, modules={"model.mean (a buffer with persistent=False)": "1"})),
        trace(window(2, modules={"model.mean (a buffer with persistent=False)": "2"})),
    )
    assert "make it persistent" in text(why_not_resumed(aside, True, {}, ""))
    assert "after the resume" in text(why_not_resumed(difference("random"), True, {}, ""))


def test_what_a_data_set_remembers_has_advice_of_its_own():
    per_sample, attribute = "np.random.default_rng([seed, index])", "an attribute of the Brain"
    told = text(why_not_resumed(difference("data"), True, {"train_set.rng": ("generator 1", "generator 2")}, ""))
    assert "train_set.rng: generator 1 | generator 2" in told and per_sample in told and attribute not in told
    told = text(why_not_resumed(difference("loss"), True, {"train.py: calls": ("6", "0")}, ""))
    assert attribute in told and per_sample not in told
    both = {"train_set.reads": ("6", "0"), "train.py: calls": ("6", "0")}
    told = text(why_metrics_differ({"train acc": (0.5, 0.25)}, both))
    assert attribute in told and per_sample in told


def test_metrics_name_the_counter():
    told = text(why_metrics_differ({"train acc of epoch 1": (0.5, 0.25)}, {"Tiny.seen": ("6", "0")}))
    assert "train acc of epoch 1: 0.5 | 0.25" in told and "Tiny.seen: 6 | 0" in told


# -------------------------------------------------------------- what a recipe remembers


CALLS = 3
COUNTS = itertools.count(5)


def make_counter():
    count = 0

    def step(more=[]):  # noqa: B006  (this is what is to be found)
        nonlocal count
        count += 1

    return step


class Meter:
    def __init__(self):
        self.total = 7


class Recipe:
    seen = 4

    def __init__(self):
        self.meter = Meter()
        self.step_counter = make_counter()
        self.bound = functools.partial(make_counter(), more=[Meter()])
        self.framework = 1
        self.hparams = SimpleNamespace(rng=np.random.default_rng(1), table={"a": [Meter()]})
        self.modules = nn.ModuleDict({"model": Model()})


def run_of(recipe):
    """What the loop knows of a recipe."""
    train = SimpleNamespace(dataset=torch.utils.data.Subset(Numbers(), [0]))
    state = SimpleNamespace(not_the_recipes={"framework", "hparams", "modules"})
    return SimpleNamespace(recipe=recipe, recipe_state=state, fit=SimpleNamespace(loaders={"train": train}))


class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        self.reads = 2
        self.big = torch.zeros(1 << 20)


class Model(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.forwards = 9


@pytest.fixture
def every_entry(monkeypatch):
    """No limit on what is looked at: all test files, with their tables, lie in the folder of this one."""
    monkeypatch.setattr(remembered, "_MAX_ENTRIES", 10**6)


def test_globals_closures_classes_objects_data_sets_and_modules_are_looked_into(every_entry):
    found = remembered_values(run_of(Recipe()), Path(__file__).parent)
    expected = {
        "test_resume_check.py: CALLS": "3",
        "test_resume_check.py: COUNTS": "count(5)",
        "Recipe.seen": "4",
        "brain.meter.total": "7",
        "brain.step_counter, variable count": "0",
        "hparams.table['a'][0].total": "7",
        "train_set.reads": "2",
        "modules.model.forwards": "9",
        "modules.model.in_features": "1",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["hparams.rng"].startswith("generator ")
    assert not any(name.startswith(("brain.framework", "modules.model.weight")) for name in found)
    assert "train_set.big" not in found  # 4 MB would be read before every update


def test_a_generators_draw_shows(every_entry):
    recipe = Recipe()
    before = remembered_values(run_of(recipe), Path(__file__).parent)
    recipe.hparams.rng.random()
    recipe.step_counter()
    after = remembered_values(run_of(recipe), Path(__file__).parent)
    assert {name for name in after if after[name] != before.get(name)} == {
        "hparams.rng",
        "brain.step_counter, variable count",
    }


class Found(Brain):
    steps_seen = 8


def test_a_brain_among_the_globals_is_not_walked_into(monkeypatch, every_entry):
    brain = Found({"model": nn.Linear(1, 1)}, torch.optim.SGD)
    monkeypatch.setattr(sys.modules[__name__], "BRAIN", brain, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "STEP", brain.fit_batch, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "KIND", Found, raising=False)
    found = remembered_values(run_of(Recipe()), Path(__file__).parent)
    own = [name for name in found if name.startswith(Path(__file__).name)]  # other tests' globals are found as well
    assert not [name for name in own if "BRAIN" in name or "STEP" in name]
    assert found["test_resume_check.py: CALLS"] == "3" and "8" in [
        found[name] for name in found if "steps_seen" in name
    ]


def test_other_peoples_modules_are_left_alone():
    walk = remembered._Walk(Path(np.__file__).parents[1])
    assert not walk.is_in_folder(np) and not walk.is_in_folder(sys)  # site-packages; no file
    assert not remembered._Walk(REPOSITORY).is_in_folder(remembered)


def test_places_that_seed_from_entropy_are_noted(tmp_path):
    notes = tmp_path / "notes"
    original = np.random.default_rng
    with noting_unseeded(notes):
        for _ in range(3):
            np.random.default_rng()
        np.random.default_rng(1)
        np.random.default_rng(seed=None)
    assert np.random.default_rng is original
    lines = notes.read_text().splitlines()
    assert len(lines) == 2 and all(f"{__file__}:" in line and "default_rng() without a seed" in line for line in lines)


def test_what_libraries_seed_from_entropy_is_not_noted(tmp_path):
    """Neither a package, nor the standard library, nor code without a file; but the recipe's, imported or not."""
    code = "import numpy as np\nrng = np.random.default_rng()\n"
    places = {name: tmp_path / name / "module.py" for name in ("recipe", "lib/site-packages/scipy", "dist-packages/x")}
    names = [*map(str, places.values()), str(Path(os.__file__).parent / "x.py"), "<string>", "<frozen importlib._boot>"]
    names.append(str(REPOSITORY / "amp_recipes" / "x.py"))
    notes = tmp_path / "notes"
    with noting_unseeded(notes):
        for name in names:
            exec(compile(code, name, "exec"), {})
    recipes = places["recipe"]
    assert notes.read_text() == f"numpy.random.default_rng() without a seed at {recipes}:2\n"


def test_digest_of_a_tree_depends_on_paths():
    assert digest_of_tree({"a": 1}) != digest_of_tree({"b": 1})


# -------------------------------------------------------------- whole recipes


SCRIPT = """
import random
import numpy as np
import torch
from torch import nn
from amp_recipes import Brain, create_experiment_directory, load_hparams, parse_arguments

class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.points = torch.linspace(-1, 1, 80).reshape(20, 4)
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return self.points[index] + {noise}

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

def main():
    seen = 0

    class Tiny(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch)

        def compute_objectives(self, predictions, batch, stage):
            nonlocal seen
            seen += 1
            return ((predictions - batch) ** 2).mean() * ({factor})

        def on_stage_end(self, stage, stage_loss, epoch=None):
            return {{"seen": {metric}}}

    file, run_opts, overrides = parse_arguments()
    hparams = load_hparams(file, overrides)
    create_experiment_directory(hparams["output_folder"], file, overrides)
    Tiny({{"model": make_model()}}, torch.optim.Adam, hparams, run_opts).fit(
        range(1, 99), Noisy(), Noisy(), train_loader_kwargs={{"batch_size": 3, "shuffle": True}}
    )
    raise AssertionError("not reached: the first fit ends the check")

if __name__ == "__main__":
    main()
"""
NOISE = "0.1 * torch.randn(4) * random.random() * float(np.random.rand())"
SMALL = ("--steps", "6", "--save_at", "2", "--kill_at", "3")


def write_recipe(folder, noise=NOISE, factor="1.0", metric="0", yaml="output_folder: x\nseed: 3\n"):
    (folder / "train.py").write_text(SCRIPT.format(noise=noise, factor=factor, metric=metric))
    (folder / "tiny.yaml").write_text(yaml)
    return [str(folder / "train.py"), str(folder / "tiny.yaml")]


def run(*arguments):
    """The command as a user starts it; its status and what it prints."""
    done = run_python("-m", "amp_recipes.commands.cli", "verify-resume", *arguments)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.extended
def test_a_recipe_with_dropout_shuffling_and_augmentation_is_proved_equal(tmp_path):
    status, output = run(
        # 20 samples make 7 batches: the end of an epoch, its validation and its save lie between kill and end.
        *write_recipe(tmp_path, yaml="output_folder: x\n"),
        "--steps",
        "9",
        "--kill_at",
        "6",
        "--precision",
        "bf16",
        "--keep",
        tmp_path / "kept",
    )
    assert status == 0, output
    assert "EQUAL bit for bit: the run that was killed after update 6 resumed from update 5." in output
    assert "The YAML sets no seed" in output and "9 updates of 9 batches, 4 after the resume" in output
    killed = read_trace(tmp_path / "kept" / "killed.jsonl")
    assert len(killed.windows) == 6 and killed.end is None  # it was killed, and not after the end
    resumed = read_trace(tmp_path / "kept" / "resumed.jsonl")
    assert [it.update for it in resumed.windows] == [6, 7, 8, 9] and resumed.end is not None
    assert {name for name, found in resumed.windows[0].sections.items() if found} == {
        "data",
        "random",
        "modules",
        "optimizers",
    }


GAN = """
        def init_optimizers(self):
            self.optimizers_dict = {{
                name: torch.optim.Adam(self.modules[name].parameters()) for name in ("model", "critic")
            }}

        def fit_batch(self, batch):
            loss = (self.modules.model(batch) - batch).square().mean()
            self.backward(loss)
            self.optimizers_step("model")
            loss = (self.modules.critic(batch) - batch).square().mean()
            self.backward(loss)
            self.optimizers_step("critic")
            return loss

        def compute_forward(self, batch, stage):
"""


@pytest.mark.extended
def test_two_optimizers_that_step_in_turn_are_counted_as_one_update(tmp_path):
    """With the command's defaults: 12 updates of 2 optimizer steps each."""
    recipe = write_recipe(tmp_path)
    script = Path(recipe[0])
    text = script.read_text().replace("        def compute_forward(self, batch, stage):\n", GAN.format()[1:], 1)
    text = text.replace(
        '{"model": make_model()}, torch.optim.Adam', '{"model": make_model(), "critic": make_model()}, None'
    )
    script.write_text(text)
    status, output = run(*recipe, "--keep", tmp_path / "kept")
    assert status == 0, output
    # An epoch's end.
    assert "EQUAL bit for bit: the run that was killed after update 8 resumed from update 7." in output
    assert "12 updates of 12 batches, 5 after the resume" in output
    whole, killed, resumed = (
        read_trace(tmp_path / "kept" / f"{name}.jsonl") for name in ("whole", "killed", "resumed")
    )
    assert [len(it.windows) for it in (whole, killed, resumed)] == [12, 8, 5]
    assert {name.partition(".")[0] for name in whole.end.sections["optimizers"]} == {"model", "critic"}


@pytest.mark.extended
def test_a_data_set_with_an_unseeded_generator_is_named(tmp_path):
    noise = "torch.from_numpy(np.random.default_rng().random(4)).float()"
    status, output = run(*write_recipe(tmp_path, noise=noise), *SMALL)
    assert status == 1, output
    assert "First difference: the batches' contents, before update 1 (epoch 1, batch 1)" in output
    line = next(n for n, it in enumerate(SCRIPT.splitlines(), 1) if "{noise}" in it)
    assert f"default_rng() without a seed at {tmp_path / 'train.py'}:{line}" in output
    assert "NOT REPRODUCIBLE" in output and "EQUAL bit" not in output


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"factor": "1 + 0.1 * seen"}, "First difference: the loss, at update 3 (epoch 1, batch 3)"),
        ({"metric": "seen"}, "train seen of epoch 1: 6.0 | 4.0"),
    ],
    ids=["in the loss", "in a metric"],
)
def test_a_counter_in_a_closure_is_named(tmp_path, change, first):
    status, output = run(*write_recipe(tmp_path, **change), *SMALL)
    assert status == 1, output
    assert first in output
    assert "Tiny.compute_objectives, variable seen: 2 | 0" in output
    assert "NOT EQUAL" in output and "NOT REPRODUCIBLE" not in output


@pytest.mark.extended
def test_a_run_that_fails_shows_why(tmp_path):
    status, output = run(*write_recipe(tmp_path, noise="1 / 0"), *SMALL)
    assert status == 2 and "ZeroDivisionError" in output and "failed with status 1" in output


def test_a_signal_ends_the_check_with_the_run_under_way(tmp_path):
    script, yaml = map(Path, write_recipe(tmp_path))
    with ChildRuns() as children, pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
        ResumeCheck(script, yaml, [], 6, 2, 3, tmp_path, children, print).run("whole")
    assert ended.value.code == 128 + signal.SIGTERM


def test_numbers_and_options_that_do_not_fit_are_refused_before_anything_runs(tmp_path):
    script, yaml = write_recipe(tmp_path)
    with pytest.raises(ConfigError, match="kill_at 8 and steps 8"):
        verify_resume(script, yaml, steps=8)
    with pytest.raises(ConfigError, match="not a file"):
        verify_resume(tmp_path / "none.py", yaml)
    with pytest.raises(ConfigError, match="sede"):
        verify_resume(script, yaml, ["--sede", "3"])
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").touch()
    with pytest.raises(ConfigError, match="not empty"):
        verify_resume(script, yaml, keep=tmp_path / "kept")
