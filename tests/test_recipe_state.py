"""What a recipe keeps on its Brain comes back; what it only set, or what others save, is left alone."""

import random
from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from amp_recipes.recipe_state import RecipeState


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
    vars(made).update(attributes)
    return made


def state_of(made, own=("device", "hparams", "step"), elsewhere=()):
    return RecipeState(made, own, lambda: elsewhere)


def moved(made, change, into=None):
    """The recipe of another process that takes what `made` has after `change`."""
    state = state_of(made)
    state.begin()
    change(made)
    saved = state.state_dict()
    other = recipe() if into is None else into
    state_of(other).load_state_dict(saved)
    return other


@pytest.mark.parametrize(
    "value",
    [3, 2.5, "text", None, True, [1, [2, 3]], {"a": {1: 2.0}}, (1, "b"), {1, 2}, np.float32(0.5), Counter("aab")],
    ids=repr,
)
def test_a_plain_value_that_training_sets_comes_back(value):
    other = moved(recipe(), lambda made: setattr(made, "kept", value))
    assert other.kept == value


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
    saved = state_of(made, elsewhere=[made.scheduler]).state_dict()
    assert set(saved["objects"]) == {"hparams.meter"} and not saved["values"] and not saved["generators"]


def test_an_object_that_is_gone_is_said(caplog):
    saved = state_of(recipe(gone=Meter())).state_dict()
    state_of(recipe()).load_state_dict(saved)
    assert "'gone'" in caplog.text


def test_a_nan_is_kept():
    other = moved(recipe(best=0.0), lambda it: setattr(it, "best", float("nan")))
    assert other.best != other.best
