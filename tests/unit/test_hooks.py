"""What a hook means by default, and that recipes may name its arguments as they like."""

import inspect

import pytest
import torch
from device import DEVICE
from torch import nn

from amp_recipes import Brain, Stage

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
