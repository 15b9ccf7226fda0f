"""What a recipe keeps on its Brain comes back; what it only set, or what others save, is left alone."""

import copy
import random
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from amp_recipes import Checkpointer
from amp_recipes.checkpoint import plain_problem
from amp_recipes.state.recipe import RecipeState


class Pair(NamedTuple):
    left: float
    right: float


@dataclass(frozen=True)
class Sets:
    train: Dataset
    names: tuple[str, ...]


class Meter:
    """Has a state, as torchmetrics' objects and schedulers have."""

    def __init__(self):
        self.total = 0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def recipe(**attributes):
    made = SimpleNamespace(device=torch.device("cpu"), hparams=SimpleNamespace(meter=Meter(), lr=0.1), step=3)
    made.modules = nn.ModuleDict()
    vars(made).update(attributes)
    return made


def state_of(made, own=("device", "hparams", "modules", "step"), elsewhere=()):
    return RecipeState(made, own, lambda: elsewhere, plain_problem)


def moved(made, change, into=None):
    """The recipe of another process that takes what `made` has after `change`."""
    state = state_of(made)
    state.begin()
    change(made)
    saved = state.state_dict()
    other = recipe() if into is None else into
    state_of(other).load_state_dict(saved)
    return other


def test_what_cannot_be_kept_is_told_where_it_may_change(caplog):
    """Neither data nor the Brain's own modules are memory of the recipe's."""
    made, model = recipe(), nn.Linear(1, 1)
    made.modules["model"] = model
    made.pair, made.teachers = Pair(1.0, 2.0), [nn.Linear(1, 1)]
    made.hparams.modules, made.hparams.folder = {"model": model}, Path("here")
    made.hparams.sets = {"all": [Sets(TensorDataset(torch.ones(2)), ("a", "b"))]}
    state = state_of(made)
    state.begin()
    with caplog.at_level("INFO"):
        state.state_dict()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "pair" in told and "teachers" in told
    assert "hparams" not in told


@pytest.mark.parametrize(
    "value",
    [3, 2.5, "text", None, True, [1, [2, 3]], {"a": {1: 2.0}}, (1, "b"), {1, 2}, np.float32(0.5), Counter("aab")],
    ids=repr,
)
def test_a_plain_value_that_training_sets_comes_back(value):
    other = moved(recipe(), lambda made: setattr(made, "kept", value))
    assert other.kept == value


GROWING = {
    "list": ([1], lambda kept: kept.append(2)),
    "dict": ({"a": 1}, lambda kept: kept.update(b=2)),
    "set": ({1}, lambda kept: kept.add(2)),
    "deque": (deque([1]), lambda kept: kept.append(2)),
    "Counter": (Counter("a"), lambda kept: kept.update("b")),
    "defaultdict": (defaultdict(list, a=[1]), lambda kept: kept["b"].append(2)),
    "OrderedDict": (OrderedDict(a=1), lambda kept: kept.update(b=2)),
    "a set in a list": ([{1}], lambda kept: kept[0].add(2)),
    "a set in a dict": ({"x": {1}}, lambda kept: kept["x"].add(2)),
    "a set in a tuple": (({1},), lambda kept: kept[0].add(2)),
    "an array in a list": ([np.zeros(2)], lambda kept: kept[0].fill(2)),
    "a tensor in a dict": ({"x": torch.zeros(2)}, lambda kept: kept["x"].fill_(2)),
}


@pytest.mark.parametrize("kind", GROWING)
def test_a_container_that_training_changes_in_place_comes_back(kind):
    value, grow = GROWING[kind]
    other = moved(
        recipe(kept=copy.deepcopy(value)), lambda made: grow(made.kept), into=recipe(kept=copy.deepcopy(value))
    )
    expected = copy.deepcopy(value)
    grow(expected)
    assert str(other.kept) == str(expected) != str(value)


def test_tensors_and_arrays_come_back_apart_from_the_live_ones():
    made = recipe(correct=torch.zeros(3), seen=np.zeros(2))

    def change(it):
        it.correct += 1
        it.seen += 2

    other = moved(made, change)
    made.correct += 100
    assert torch.equal(other.correct, torch.ones(3)) and (other.seen == 2).all()


def test_what_did_not_change_is_a_setting_and_keeps_its_new_value():
    made = recipe(weight=0.5, names=["a"])
    other = moved(made, lambda it: None, into=recipe(weight=0.9, names=["b"]))
    assert other.weight == 0.9 and other.names == ["b"]


def test_a_container_is_filled_in_place_so_that_other_names_for_it_see_it():
    history, recent = [], deque(maxlen=2)
    other = recipe(history=history, recent=recent)
    moved(recipe(history=[], recent=deque(maxlen=2)), lambda it: (it.history.append(7), it.recent.append(8)), other)
    assert history == [7] and list(recent) == [8] and recent.maxlen == 2


def test_generators_go_on_where_they_were():
    def generators():
        return {
            "torch_one": torch.Generator().manual_seed(1),
            "numpy_one": np.random.default_rng(2),
            "old_numpy_one": np.random.RandomState(3),
            "python_one": random.Random(4),
        }

    def draw(it):
        return [
            torch.rand(3, generator=it.torch_one).tolist(),
            it.numpy_one.random(3).tolist(),
            it.old_numpy_one.rand(3).tolist(),
            it.python_one.random(),
        ]

    made = recipe(**generators())
    other = moved(made, draw, into=recipe(**generators()))
    assert draw(made) == draw(other)


def test_objects_with_a_state_come_back_on_the_brain_and_in_its_hparams():
    def change(made):
        made.own_meter.total, made.hparams.meter.total = 5, 6

    other = moved(recipe(own_meter=Meter()), change, into=recipe(own_meter=Meter()))
    assert (other.own_meter.total, other.hparams.meter.total) == (5, 6)


def test_what_is_saved_elsewhere_modules_and_other_objects_are_left_alone():
    made = recipe(scheduler=Meter(), net=nn.Linear(1, 1), log=print, thing=object())
    state = state_of(made, elsewhere=[made.scheduler])
    state.begin()
    saved = state.state_dict()
    assert set(saved["objects"]) == {"hparams.meter"} and not saved["values"] and not saved["generators"]


def test_an_object_that_is_gone_is_said(caplog):
    saved = state_of(recipe(gone=Meter())).state_dict()
    state_of(recipe()).load_state_dict(saved)
    assert "'gone'" in caplog.text


def test_a_nan_is_kept():
    other = moved(recipe(best=0.0), lambda it: setattr(it, "best", float("nan")))
    assert other.best != other.best


def test_a_parameter_and_a_buffer_that_others_hold_too_are_filled_not_replaced():
    optimized = nn.Parameter(torch.zeros(2))
    into = recipe(temperature=optimized, parts=[torch.zeros(3)])
    inside = into.parts[0]

    def change(made):
        with torch.no_grad():
            made.temperature += 4
        made.parts[0] += 5

    moved(recipe(temperature=nn.Parameter(torch.zeros(2)), parts=[torch.zeros(3)]), change, into)
    assert into.temperature is optimized and torch.equal(optimized.detach(), torch.full((2,), 4.0))
    assert into.parts[0] is inside and torch.equal(inside, torch.full((3,), 5.0))


def test_taking_the_same_state_twice_gives_the_same_twice():
    made = recipe()
    made.lens, made.seen, made.by_name = [1, 2], {3}, {"a": [4]}
    state = state_of(made).state_dict()
    other = recipe()
    for _ in range(2):
        state_of(other).load_state_dict(state)
        assert (other.lens, other.seen, other.by_name) == ([1, 2], {3}, {"a": [4]})


def test_kinds_of_containers_stay_what_they_are():
    made = recipe()
    state = state_of(made)
    state.begin()
    made.recent, made.counts, made.lists = deque([1], maxlen=2), Counter("aab"), defaultdict(list, {1: [2]})
    saved = pack_and_read(state.state_dict())
    other = recipe()
    state_of(other).load_state_dict(saved)
    assert other.recent == made.recent and other.recent.maxlen == 2
    assert other.counts == made.counts and other.counts["z"] == 0
    other.lists[9].append(1)
    assert other.lists == {1: [2], 9: [1]}


def test_a_value_that_went_back_to_what_it_was_is_restored_too():
    made, other = recipe(first=False), recipe(first=False)
    state = state_of(made)
    state.begin()
    made.first = True
    state.state_dict()
    made.first = False
    saved = state.state_dict()
    other.first = True
    state_of(other).load_state_dict(saved)
    assert other.first is False


def test_modules_that_are_not_trained_as_modules_come_back():
    def with_teacher():
        made = recipe(teacher=nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200)))
        made.hparams.normalize = nn.BatchNorm1d(3)
        return made

    def change(made):
        made.teacher[0].weight.data.mul_(2)  # which the version counter does not tell
        made.teacher[1].running_mean += 1
        made.hparams.normalize.running_var += 3

    made, other = with_teacher(), with_teacher()
    moved(made, change, other)
    for name in ("teacher", "normalize"):
        one, two = ((it.teacher if name == "teacher" else it.hparams.normalize) for it in (made, other))
        assert torch.equal(
            one.state_dict()["0.weight" if name == "teacher" else "running_var"],
            two.state_dict()["0.weight" if name == "teacher" else "running_var"],
        )


def test_large_weights_that_never_changed_and_those_of_the_brain_are_not_saved_again():
    made = recipe(frozen=nn.Linear(400, 400, bias=False))
    made.modules["model"] = nn.Linear(400, 400)
    made.alias = made.modules["model"]
    state = state_of(made)
    state.begin()
    assert state.state_dict()["modules"] == {}


def test_what_a_checkpoint_cannot_hold_is_left_out_and_named_in_the_log(caplog, subtests):
    caplog.set_level("INFO")
    for value in (torch.zeros(3, device="meta"), torch.eye(3).to_sparse(), object(), iter([1]), {torch.zeros(1): 1}):
        caplog.clear()
        with subtests.test(type(value).__name__):
            made = recipe(odd=value, fine=1)
            state = state_of(made)
            state.begin()
            made.fine = 2
            assert list(state.state_dict()["values"]) == ["fine"]
            assert "odd" in caplog.text


def test_a_list_that_holds_itself_is_left_out():
    made = recipe(odd=[])
    made.odd.append(made.odd)
    state = state_of(made)
    state.begin()
    assert not state.state_dict()["values"]


def test_any_change_of_a_tensor_is_seen(subtests):
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float64):
        with subtests.test(str(dtype)):
            made = recipe(kept=torch.zeros(3000, dtype=dtype))
            state = state_of(made)
            state.begin()
            assert not state.state_dict()["values"]
            made.kept[[5, 2999]] = torch.ones(2, dtype=dtype)  # a sum of changes that could cancel
            assert list(state.state_dict()["values"]) == ["kept"]


def pack_and_read(state):
    """As it comes back from a checkpoint."""

    class Holder:
        def state_dict(self):
            return state

        def load_state_dict(self, saved):
            self.saved = saved

    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder, {"it": Holder()})
        checkpointer.save_checkpoint()
        checkpointer.recover_if_possible()
        return checkpointer.recoverables["it"].saved
