"""A recipe may give its own helpers and counters any name but those of the contract: no private name is in its way."""

import copy
import functools
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from pairwise import extended
from repository import REPOSITORY
from spiking_runs import Died, Recipe, batches, make, records
from torch import nn

from amp_recipes import Brain, EpochCounter, Stage
from amp_recipes.errors import RecipeError

LINES = (REPOSITORY / "tests" / "support" / "former_private_names.txt").read_text().splitlines()
FORMER = tuple(name for line in LINES if not line.startswith("#") for name in line.split())
BATCHES, EPOCHS, DIES_AT = 24, 2, 35  # in the middle of the second epoch
PLAIN = {"on_spike": "off", "log_interval_steps": 1}
# The data has a spike, from which the run goes back.
GUARDED = {**PLAIN, "on_spike": "lower_lr", "ema_decay": 0.9, "early_stop_metric": "loss", "early_stop_patience": 5}


# ------------------------------------------------------------------ recipes that use given names, and their runs


def with_methods(names):
    """Each name is a helper method, called in each step."""

    class WithMethods(Recipe):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.counters = [0] * len(names)

        def compute_objectives(self, predictions, batch, stage):
            for name in names if stage is Stage.TRAIN else ():
                getattr(self, name)()
            return super().compute_objectives(predictions, batch, stage)

        def counted(self):
            return self.counters

    def helper(at):
        def count(self, *_, **__):
            self.counters[at] += at + 1

        return count

    for at, name in enumerate(names):
        setattr(WithMethods, name, helper(at))
    return WithMethods


def with_attributes(names):
    """Each name is a counter that the constructor sets and each step moves."""

    class WithAttributes(Recipe):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.begin_counting()

        def begin_counting(self):
            for name in names:
                setattr(self, name, 0)

        def compute_objectives(self, predictions, batch, stage):
            for at, name in enumerate(names if stage is Stage.TRAIN else ()):
                setattr(self, name, getattr(self, name) + at + 1)
            return super().compute_objectives(predictions, batch, stage)

        def counted(self):
            return [getattr(self, name) for name in names]

    return WithAttributes


def with_late_attributes(names):
    """Each name is such a counter, first set in on_fit_start."""

    class WithLateAttributes(with_attributes(names)):
        def __init__(self, *arguments):
            Recipe.__init__(self, *arguments)

        def on_fit_start(self):
            self.begin_counting()
            super().on_fit_start()

    return WithLateAttributes


WAYS = [with_methods, with_attributes, with_late_attributes]


def train(brain):
    brain.fit(EpochCounter(EPOCHS), batches(BATCHES), batches(4, bad=()))
    return brain


def resume(folder, recipe, **options):
    """A run that an exception ends in the middle of an epoch, and that is started again."""
    with pytest.raises(Died):
        train(make(folder, recipe, DIES_AT, **options))
    return train(make(folder, recipe, **options))


def weights(brain):
    return {name: value.tolist() for name, value in brain.modules.state_dict().items()}


def losses(folder):
    steps = [(record["epoch"], record["step"], record["loss"]) for record in records(folder)]
    stages = [(record["epoch"], record["stage"], record["loss"]) for record in records(folder, "stage")]
    return steps, stages


def outcome(brain, folder):
    return {"counters": brain.counted(), "losses": losses(folder), "weights": weights(brain)}


@functools.cache
def expected(way, count, guarded):
    """What a run comes to whose recipe uses harmless names."""
    names = tuple(f"of_my_own_{at}" for at in range(count))
    with tempfile.TemporaryDirectory() as folder:
        brain = train(make(folder, way(names), **(GUARDED if guarded else PLAIN)))
        assert guarded == bool(brain.summary.went_back)
        return outcome(brain, Path(folder))


def check(way, names, guarded, folder):
    recipe, options = way(names), GUARDED if guarded else PLAIN
    whole = train(make(folder / "whole", recipe, **options))
    assert outcome(whole, folder / "whole") == expected(way, len(names), guarded)
    resumed = resume(folder / "resumed", recipe, **options)
    assert outcome(resumed, folder / "resumed") == expected(way, len(names), guarded)


# ------------------------------------------------------------------ all former private names


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_that_uses_all_former_private_names_trains_and_resumes(way, guarded, tmp_path):
    check(way, FORMER, guarded, tmp_path)


@pytest.mark.parametrize("name", [extended(name) for name in FORMER])
@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_that_uses_one_former_private_name_trains_and_resumes(way, name, tmp_path):
    check(way, (name,), True, tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_a_recipe_with_harmless_names_resumes_as_if_it_had_not_ended(way, tmp_path):
    check(way, ("my_own",), True, tmp_path)  # else the tests above compare with nothing


def test_a_brain_has_one_private_name_and_that_is_mangled():
    seen = []

    class Looks(Recipe):
        def compute_forward(self, batch, stage):
            seen.append({*vars(self), *dir(Brain)})
            return super().compute_forward(batch, stage)

    brain = train(make(None, Looks, **PLAIN))
    for names in [{*vars(brain), *dir(Brain)}, *seen]:
        private = [name for name in names if name.startswith("_") and not name.startswith("__")]
        assert len(private) == 1 and private[0].startswith("_Brain__")


# ------------------------------------------------------------------ as recipes use them


def test_a_helper_called_resume_does_not_keep_a_run_from_going_on(tmp_path):
    class Helps(Recipe):
        def _resume(self):
            return "mine"

    whole = train(make(tmp_path / "whole", Helps, **PLAIN))
    resumed = resume(tmp_path / "resumed", Helps, **PLAIN)
    assert len(resumed.journal.lines) < BATCHES  # it did not begin anew
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole") and weights(resumed) == weights(whole)


def test_counters_are_saved_whatever_they_are_called(tmp_path):
    class Counts(Recipe):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._norms, self._unjudged, self._counts = 0, 0.0, torch.zeros(())
            self._reports, self._metrics = [], {"batches": 0}

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self._norms += 1
            self._unjudged += 1.0
            self._counts += 1
            self._reports.append(self.step)
            self._metrics["batches"] += 1

    brain = resume(tmp_path, Counts, **PLAIN)
    trained = EPOCHS * BATCHES
    assert (brain._norms, brain._unjudged, brain._counts.item()) == (trained, trained, trained)
    assert brain._reports == EPOCHS * list(range(1, BATCHES + 1)) and brain._metrics == {"batches": trained}


def test_what_a_recipe_keeps_on_self_is_not_taken_for_the_frameworks():
    class Teaches(Recipe):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._ema = copy.deepcopy(self.modules.model[0])  # a teacher
            self._average, self._log, self._host, self._plan = 0.0, [], "node7", {"warmup": 3}

        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, self._to_device(batch, "cpu"), stage)
            self._average += loss.item()
            self._log.append(self._ema(batch[1]).detach())
            return loss

        def _to_device(self, batch, name):
            return [part.to(name) for part in batch]

    brain = train(make(None, Teaches, **PLAIN))
    assert brain._average > 0 and len(brain._log) == EPOCHS * (BATCHES + 4)
    assert isinstance(brain._ema, nn.Linear) and (brain._host, brain._plan) == ("node7", {"warmup": 3})
    assert weights(brain) == weights(train(make(None, Recipe, **PLAIN)))


def test_a_helper_does_not_replace_what_the_framework_does(tmp_path):
    class Acts(Recipe):
        def _act(self, values):
            return values.relu()

        def _judge(self, *values):
            return max(values)

        def _numbers(self):
            return [1, 2, 3]

    options = {**GUARDED, "ema_decay": None}
    whole, own = (train(make(tmp_path / kind.__name__, kind, **options)) for kind in (Recipe, Acts))
    assert own.summary.went_back == whole.summary.went_back == EPOCHS
    assert weights(own) == weights(whole)
    assert (own._act(torch.tensor(-1.0)), own._judge(1, 3), own._numbers()) == (0, 3, [1, 2, 3])


# ------------------------------------------------------------------ names of options and of the contract


@pytest.mark.parametrize("name", ["resume", "debug", "seed"])
def test_a_recipes_own_method_beats_the_option_of_its_name_with_one_warning(name, caplog):
    recipe = type("Own", (Recipe,), {name: lambda self: "mine"})
    with caplog.at_level(logging.WARNING):
        brain = make(None, recipe, **{**PLAIN, "debug": True})
        train(brain)
    assert getattr(brain, name)() == "mine"
    warnings = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(warnings) == 1 and "option" in warnings[0] and "Own" in warnings[0]
    options = brain.run_opts
    assert len(brain.journal.lines) == options.debug_epochs * options.debug_batches  # the option `debug` still holds


NO_METHODS = {
    "fit": 3,
    "compute_forward": None,
    "optimizers_step": {},
    "evaluate": "test",
    "on_stage_end": [],
    "gather": 1.5,
}


@pytest.mark.parametrize("name", NO_METHODS)
def test_an_attribute_in_the_place_of_a_method_is_said_by_the_constructor(name):
    recipe = type("Own", (Recipe,), {name: NO_METHODS[name]})
    with pytest.raises(RecipeError, match=rf"(?s)Own.*\b{name}\b.*method"):
        make(None, recipe, **PLAIN)


@pytest.mark.parametrize("name", ["modules", "step", "optimizers_dict", "hparams"])
def test_a_method_in_the_place_of_an_attribute_is_said_by_the_constructor(name):
    recipe = type("Own", (Recipe,), {name: lambda self: None})
    with pytest.raises(RecipeError, match=rf"(?s)Own.*\b{name}\b.*attribute"):
        make(None, recipe, **PLAIN)


def test_any_callable_is_a_method():
    class Own(Recipe):
        on_stage_start = staticmethod(lambda stage, epoch=None: None)
        batch_weight = functools.partialmethod(lambda self, batch: len(batch[0]))

    assert train(make(None, Own, **PLAIN)).optimizer_step == EPOCHS * BATCHES
