"""What a hook means by default, and that recipes may name its arguments as they like."""

import inspect

import pytest
import torch
from device import DEVICE
from torch import nn

from amp_recipes import Brain, Stage
from amp_recipes.errors import RecipeError
from amp_recipes.loop.recipe_class import HOOKS

BATCH = (torch.ones(4, 3), torch.ones(4, 1))


class Unwritten(Brain):
    pass


def test_what_a_recipe_must_write_says_so_with_the_recipes_name_and_the_signature():
    for name in ("compute_forward", "compute_objectives"):
        arguments = list(inspect.signature(getattr(Brain, name)).parameters)[1:]
        with pytest.raises(NotImplementedError) as caught:
            getattr(Unwritten(), name)(*[None] * len(arguments))
        assert str(caught.value) == f"Unwritten must define {name}({', '.join(arguments)})"


def test_there_are_three_stages():
    assert [stage.name for stage in Stage] == ["TRAIN", "VALID", "TEST"]


def test_a_batch_counts_for_its_leading_dimension():
    for batch, weight in [(BATCH, 4), ({"x": torch.ones(2, 9)}, 2), (torch.tensor(1.0), 1)]:
        assert Unwritten().batch_weight(batch) == weight


def test_no_optimizer_is_frozen_and_a_stage_has_no_metrics_by_default():
    optimizers = {"a": object(), "b": object()}
    assert dict(Unwritten().freeze_optimizers(optimizers)) == optimizers
    assert Unwritten().on_stage_end(Stage.VALID, 0.5, 1) is None


class Renamed(Brain):
    """Writes every hook, with arguments that cannot be given by name, and notes what it gets."""

    def note(self, name, *given):
        self.__dict__.setdefault("calls", []).append((name, *given))

    def compute_forward(self, b, s, /):
        self.note("compute_forward", s)
        return self.modules["model"](b[0])

    def compute_objectives(self, p, b, s, /):
        self.note("compute_objectives", s)
        return (p - b[1]).square().mean()

    def on_stage_start(self, s, e, /):
        self.note("on_stage_start", s, e)

    def on_stage_end(self, s, loss, e, /):
        self.note("on_stage_end", s, e)
        return {"answer": 42}

    def on_fit_batch_start(self, b, steps, /):
        self.note("on_fit_batch_start", steps)

    def on_fit_batch_end(self, b, p, loss, steps, /):
        assert p.shape == (4, 1) and loss.ndim == 0
        self.note("on_fit_batch_end", steps)

    def batch_weight(self, b, /):
        return 2.0

    def freeze_optimizers(self, o, /):
        self.note("freeze_optimizers")
        return o


def test_every_hook_is_called_with_positional_arguments_in_order():
    hooks = {name for name in vars(Brain) if name.startswith(("on_", "compute_"))} | {
        "batch_weight",
        "freeze_optimizers",
    }
    hooks -= {"on_fit_start", "on_evaluate_start"}  # which a recipe calls in turn
    assert hooks <= set(vars(Renamed))  # a new hook must be tried here too
    brain = Renamed(
        {"model": nn.Linear(3, 1)},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"device": DEVICE, "noprogressbar": True, "grad_accumulation_factor": 2},
    )
    brain.fit([1], [BATCH, BATCH], [BATCH])
    brain.evaluate([BATCH])

    def batch(steps):
        calls = [("on_fit_batch_start", steps), ("compute_forward", Stage.TRAIN), ("compute_objectives", Stage.TRAIN)]
        return [*calls, *[("freeze_optimizers",)] * steps, ("on_fit_batch_end", steps)]

    def evaluation(stage, epoch):
        calls = [("on_stage_start", stage, epoch), ("compute_forward", stage), ("compute_objectives", stage)]
        return [*calls, ("on_stage_end", stage, epoch)]

    training = [("on_stage_start", Stage.TRAIN, 1), *batch(False), *batch(True), ("on_stage_end", Stage.TRAIN, 1)]
    assert brain.calls == [*training, *evaluation(Stage.VALID, 1), *evaluation(Stage.TEST, None)]


def recipe_with(**methods):
    """A Brain subclass with these methods beside the two that it must have."""
    needed = {"compute_forward": lambda self, batch, stage: batch, "compute_objectives": lambda self, *_: 0.0}
    return type("Mine", (Brain,), {**needed, **methods})


def test_a_misspelt_hook_is_refused_with_the_nearest_name(subtests):
    for name, meant in [
        ("on_stage_ends", "on_stage_end"),
        ("on_stage_strat", "on_stage_start"),
        ("compute_forwrd", "compute_forward"),
        ("computeForward", "compute_forward"),
        ("compute_objective", "compute_objectives"),
        ("fit_bacth", "fit_batch"),
        ("init_optimizer", "init_optimizers"),
        ("batch_weigth", "batch_weight"),
    ]:
        with subtests.test(name):
            kind = recipe_with(**{name: lambda self, *_: None})
            if meant.startswith("compute"):
                delattr(kind, meant)
            with pytest.raises(RecipeError, match=rf"Mine\.{name} is not called .* Did you mean {meant}\?"):
                kind()


def test_a_hook_of_another_framework_is_warned_of_with_ours(subtests, caplog):
    for name, ours in [
        ("training_step", "compute_forward and compute_objectives"),
        ("configure_optimizers", "opt_class, or init_optimizers"),
        ("on_train_start", "on_fit_start"),
        ("on_epoch_end", "on_stage_end"),
        ("on_train_epoch_end", "on_stage_end"),
        ("on_train_batch_end", "on_fit_batch_end"),
    ]:
        with subtests.test(name):
            caplog.clear()
            recipe_with(**{name: lambda self, *_: None})()
            assert f"Mine.{name} is not called: here, use {ours} instead." in caplog.text
    caplog.clear()
    recipe_with(
        training_step=lambda self, batch: batch, fit_batch=lambda self, batch: self.training_step(batch), on_fit_end=len
    )()
    assert "is not called" not in caplog.text


def calls_a_helper(self, batch, stage):
    return self.compute_forward2(batch)


def calls_by_name(self, batch, stage):
    name = "fit_batchs"
    return getattr(self, name)(batch)


def test_helpers_of_a_recipe_are_no_misspelt_hooks(subtests):
    helper = lambda self, *_: None  # noqa: E731
    for name, methods in {
        "names of its own": dict.fromkeys(
            ["on_epoch_end", "on_train_start", "compute_forward_pass", "compute_metrics", "fit_generator", "on_end"],
            helper,
        ),
        "private": {"_fit_batch": helper, "_on_stage_ends": helper},
        "called in the recipe": {"compute_forward2": helper, "compute_forward": calls_a_helper},
        "called by its name": {"fit_batchs": helper, "compute_forward": calls_by_name},
        "beside the hook": {"on_stage_ends": helper, "on_stage_end": helper},
        "an attribute": {"on_stage_ends": 3},
    }.items():
        with subtests.test(name):
            recipe_with(**methods)()


def test_the_hooks_are_methods_of_brain():
    assert all(callable(getattr(Brain, name)) for name in HOOKS)
    of_the_class = {name for name in vars(Brain) if name.startswith(("on_", "compute_"))}
    assert of_the_class <= set(HOOKS)
