"""Schedulers move with the updates of their own optimizer, or with epochs, as torch's do by hand."""

import functools
from itertools import product

import pytest
import torch
from device import DEVICE
from inside import run_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from amp_recipes import Brain, EpochCounter
from amp_recipes.errors import ConfigError
from amp_recipes.loop.schedulers import Schedulers

# The optimizers here never step, of which torch warns.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


def sgd(lr=1.0):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


def by_a_function(optimizer):
    return ExponentialLR(optimizer, gamma=0.5)


class Recipes:
    def by_a_method(self, optimizer):
        return ExponentialLR(optimizer, gamma=0.5)


class Halving(ExponentialLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, gamma=0.5)


MAKERS = {
    "partial": functools.partial(ExponentialLR, gamma=0.5),
    "function": by_a_function,
    "method": Recipes().by_a_method,
    "class": Halving,
}


def test_a_scheduler_by_the_step_moves_only_the_optimizers_that_took_the_update(subtests):
    for name, make in MAKERS.items():
        with subtests.test(name):
            optimizers = {"generator": sgd(1.0), "critic": sgd(8.0)}
            schedulers = Schedulers(make, optimizers, "step")
            schedulers.after_update(["critic"])
            schedulers.after_update(["critic", "generator"])
            assert (rate(optimizers["generator"]), rate(optimizers["critic"])) == (0.5, 2.0)


def test_a_scheduler_by_the_step_stays_at_the_end_of_an_epoch():
    optimizer = sgd()
    Schedulers(by_a_function, {"optimizer": optimizer}, "step").after_epoch(0.5)
    assert rate(optimizer) == 1.0


def test_a_scheduler_by_the_epoch_stays_at_updates_and_moves_all_optimizers_at_the_end():
    optimizers = {"a": sgd(1.0), "b": sgd(4.0)}
    schedulers = Schedulers(by_a_function, optimizers, "epoch")
    schedulers.after_update(["a", "b"])
    assert (rate(optimizers["a"]), rate(optimizers["b"])) == (1.0, 4.0)
    schedulers.after_epoch(0.5)
    assert (rate(optimizers["a"]), rate(optimizers["b"])) == (0.5, 2.0)


def test_rates_follow_a_hand_written_warmup_and_decay():
    optimizer = sgd(0.8)
    make = functools.partial(LambdaLR, lr_lambda=lambda step: min((step + 1) / 4, 4 / (step + 1)))
    schedulers = Schedulers(make, {"optimizer": optimizer}, "step")
    seen = [rate(optimizer)]
    for _ in range(7):
        schedulers.after_update(["optimizer"])
        seen.append(rate(optimizer))
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.64, 3.2 / 6, 3.2 / 7, 0.4])


def test_plateau_watches_the_epochs_loss_and_others_are_not_given_it():
    plateau, steps = sgd(), sgd()
    make = functools.partial(ReduceLROnPlateau, factor=0.1, patience=0)
    schedulers = Schedulers(make, {"optimizer": plateau}, "epoch")
    rates = []
    for loss in [3.0, 2.0, 2.5, 1.0]:
        schedulers.after_epoch(loss)
        rates.append(rate(plateau))
    assert rates == pytest.approx([1.0, 1.0, 0.1, 0.1])  # only 2.5 was no better than what came before

    others = Schedulers(functools.partial(StepLR, step_size=2, gamma=0.1), {"optimizer": steps}, "epoch")
    others.after_epoch(5.0)  # as an epoch number it would move the rate
    assert rate(steps) == 1.0


def test_plateau_by_the_step_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau.*lr_scheduler_interval: epoch"):
        Schedulers(ReduceLROnPlateau, {"optimizer": sgd()}, "step")


class StatefulSchedule:
    """As recipes of the original Brain have: called by the recipe with epochs and losses."""

    def __call__(self, *args):
        raise AssertionError("called by the framework")


def test_without_a_maker_nothing_moves(subtests):
    for make, interval in product([None, StatefulSchedule()], ["step", "epoch"]):
        with subtests.test(f"{type(make).__name__} by the {interval}"):
            optimizer = sgd()
            schedulers = Schedulers(make, {"optimizer": optimizer}, interval)
            schedulers.after_update(["optimizer"])
            schedulers.after_epoch(1.0)
            assert schedulers.by_optimizer == {} and rate(optimizer) == 1.0


def test_an_update_of_an_unknown_optimizer_moves_nothing():
    optimizer = sgd()
    Schedulers(by_a_function, {"optimizer": optimizer}, "step").after_update(["other"])
    assert rate(optimizer) == 1.0


def test_each_optimizer_has_a_scheduler_of_its_own_under_its_name():
    optimizers = {"a": sgd(), "b": sgd()}
    found = Schedulers(by_a_function, optimizers, "step").by_optimizer
    assert {name: scheduler.optimizer for name, scheduler in found.items()} == optimizers


# ---------------------------------------------------------------------- total_updates


def falling(optimizer, total_updates, final=0.0):
    return LambdaLR(optimizer, lambda step: 1 - (1 - final) * min(1.0, step / total_updates))


class FallingClass(LambdaLR):
    def __init__(self, optimizer, total_updates):
        super().__init__(optimizer, lambda step: 1 - step / total_updates)


def test_a_scheduler_that_takes_the_number_of_updates_is_told_it():
    for make in (falling, functools.partial(falling, final=0.0), FallingClass):
        optimizer = sgd()
        schedulers = Schedulers(make, {"optimizer": optimizer}, "step", lambda: 4)
        schedulers.after_update(["optimizer"])
        assert (rate(optimizer), schedulers.total_updates) == (0.75, 4)


def test_what_the_yaml_gives_wins():
    optimizer = sgd()
    make = functools.partial(falling, total_updates=2)
    schedulers = Schedulers(make, {"optimizer": optimizer}, "step", lambda: 4)
    schedulers.after_update(["optimizer"])
    assert (rate(optimizer), schedulers.total_updates) == (0.5, None)


def test_by_the_epoch_a_number_of_updates_makes_no_sense():
    with pytest.raises(ConfigError, match="lr_scheduler_interval: step"):
        Schedulers(falling, {"optimizer": sgd()}, "epoch", lambda: 4)


class Regression(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()


def brain_of(**options):
    model = nn.Linear(2, 1)
    return Regression(
        {"model": model},
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        hparams={"lr_scheduler": falling},
        run_opts={"device": DEVICE, "noprogressbar": True, **options},
    )


DATA = TensorDataset(torch.randn(11, 2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3 * 6),
        ({"grad_accumulation_factor": 4}, 3 * 2),
        ({"optimizer_step_limit": 7}, 7),
        ({"debug": True, "debug_batches": 2, "debug_epochs": 1}, 2),
        ({"overfit_batches": 1}, 3),
    ],
    ids=["plain", "windows", "limited", "debug", "overfit"],
)
def test_it_is_told_as_many_updates_as_the_run_takes(options, expected):
    brain = brain_of(**options)
    brain.fit(EpochCounter(3), DATA, train_loader_kwargs={"batch_size": 2})
    assert run_of(brain).schedulers.total_updates == brain.optimizer_step == expected
    assert rate(brain.optimizer) == pytest.approx(0.0, abs=1e-9)


def test_a_training_set_without_a_length_is_refused_before_anything_is_trained():
    brain = brain_of()
    with pytest.raises(ConfigError, match=r"total_updates, but its training set has no length"):
        brain.fit(EpochCounter(3), ([torch.randn(2, 2)] for _ in range(3)))
    assert brain.optimizer_step == 0


def test_a_resume_with_another_plan_says_so(tmp_path, caplog):
    loader_kwargs = {"batch_size": 2}
    brain_of(output_folder=str(tmp_path)).fit(EpochCounter(1), DATA, train_loader_kwargs=loader_kwargs)
    with caplog.at_level("WARNING"):
        longer = brain_of(output_folder=str(tmp_path))
        longer.fit(EpochCounter(2), DATA, train_loader_kwargs=loader_kwargs)
    assert "planned for 6 updates, but this run takes 12" in caplog.text
    assert rate(longer.optimizer) == pytest.approx(0.0, abs=1e-9)


def test_of_several_optimizers_nobody_knows_how_often_each_steps():
    with pytest.raises(ConfigError, match="generator, critic may each take a different number"):
        Schedulers(falling, {"generator": sgd(), "critic": sgd()}, "step", lambda: 4)


def test_a_second_fit_whose_rates_the_first_took_to_zero_says_so(caplog):
    brain = brain_of()
    for _ in range(2):
        assert "every learning rate is 0" not in caplog.text
        brain.fit(EpochCounter(1), DATA, train_loader_kwargs={"batch_size": 2})
    assert "every learning rate is 0" in caplog.text


def test_a_schedule_that_is_spent_after_an_epoch_names_the_interval(caplog, subtests):
    steps = functools.partial(StepLR, step_size=1, gamma=1e-2)
    for interval, warnings in (("step", 1), ("epoch", 0)):
        with subtests.test(interval):
            brain = brain_of(lr_scheduler_interval=interval)
            brain.hparams.lr_scheduler = steps
            brain.fit(EpochCounter(3), DATA, train_loader_kwargs={"batch_size": 2})
            assert caplog.text.count("set lr_scheduler_interval: epoch") == warnings
            caplog.clear()
