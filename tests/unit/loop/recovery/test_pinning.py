"""With `on_nonfinite: pin` the module of a proven precision fault is pinned, and the run goes on."""

import json
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from device import DEVICE
from end_of_run import everything
from hosts import HOSTS
from inside import run_of
from pairwise import each_once
from torch import nn
from torch.nn import functional as F

from amp_recipes import Brain, EpochCounter
from amp_recipes.config import experiment, load_hparams, parse_arguments
from amp_recipes.errors import ConfigError, NonfiniteError
from amp_recipes.loop.recovery import pinning
from amp_recipes.precision import pinned_modules

SAMPLES, BATCH, EPOCHS = 16, 4, 3
FAULT = 6  # the update, over all, in which the product overflows for the first time


class Energy(nn.Module):
    """A product that overflows fp16 from some loudness on; scaled down, it is harmless."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.register_buffer("calls", torch.zeros(()))
        self.loudness = 1.0

    def forward(self, x):
        if self.training:
            self.calls += 1
        loud = x * self.loudness
        return (loud @ self.weight / self.loudness).to(x.dtype)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.energy, self.last = nn.Linear(3, 6), nn.Dropout(0.2), Energy(6), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(self.energy(self.drop(self.first(x))))


class Died(Exception):
    pass


class Recipe(Brain):
    """The loudness rises with the updates that are done; dies before a batch that is trained on."""

    dies_at = None
    loud = 3e5
    faults = FAULT

    def on_fit_batch_start(self, batch, should_step):
        run = run_of(self)
        if run.log is run.idle_log:
            return  # a step on trial
        done = run.totals.optimizer_step + run.totals.skipped_steps
        self.modules.model.energy.loudness = self.loud if done >= self.faults else 1.0
        if done + 1 == self.dies_at:
            raise Died

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0]).squeeze(1)

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions.float(), batch[1])


def samples():
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return [*zip(x, x.sum(1), strict=True)]


def seed_all(seed=4):
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(seed)


def brain_of(folder=None, recipe=Recipe, model=None, **options):
    seed_all()
    return recipe(
        {"model": Network() if model is None else model},
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        run_opts={
            "device": DEVICE,
            "noprogressbar": True,
            "precision": "fp16",
            "init_scale": 1024.0,
            "ckpt_background": False,
            "on_nonfinite": "pin",
            "output_folder": None if folder is None else str(folder),
            **options,
        },
    )


def fit(brain, epochs=EPOCHS):
    brain.fit(EpochCounter(epochs), samples(), train_loader_kwargs={"batch_size": BATCH, "shuffle": True})
    return brain


def steps(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


def course(folder):
    """The last record of each update, since what a resumed run repeats is logged again."""
    times = {"samples_per_second", "seconds", "memory_bytes", "wall_time"}
    return {(it["epoch"], it["step"]): {k: v for k, v in it.items() if k not in times} for it in steps(folder)}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing ends, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    brain = fit(brain_of(folder))
    return everything(brain), folder, pinned_modules(brain.modules)


def test_the_module_is_pinned_from_the_last_good_state(whole):
    _, folder, pinned = whole
    assert pinned == ["model.energy"]
    records = [*course(folder).values()]
    assert [index for index, it in enumerate(records) if it["skipped"]] == [FAULT]
    (report,) = folder.glob("nonfinite-*.json")
    report = json.loads(report.read_text())
    assert (report["cause"], report["module"], report["pinned"]) == ("precision", "model.energy", True)
    pin = {"module": "model.energy", "step": FAULT + 1, "op": report["op"], "line": report["line"]}
    assert report["step"] == FAULT + 1 and "test_pinning.py:" in report["line"]
    assert [it.get("pinned") for it in records] == [pin if index == FAULT else None for index in range(len(records))]
    told = summary(folder)
    assert told["pinned"] == [pin] and told["fp32_modules"] == ["model.energy"]
    assert (told["skipped_steps"], told["backed_off_steps"]) == (1, 0)


def test_what_comes_after_the_pin_is_a_run_with_the_pin(tmp_path, whole):
    """The update after it equals that of a run that had the pin, from the same weights and random numbers."""

    class PinsAtFault(Recipe):
        """Skips the same update by itself, and pins by hand."""

        def on_fit_batch_start(self, batch, should_step):
            super().on_fit_batch_start(batch, should_step)
            run = run_of(self)
            if run.log is not run.idle_log and run.totals.skipped_steps and "model.energy" not in run.plan.pinned:
                run.plan.pin("model.energy", run.modules)

    brain = brain_of(tmp_path, PinsAtFault, on_nonfinite="off", nonfinite_patience=2)
    fit(brain)
    by_hand, pinned = ([it["loss"] for it in course(folder).values()] for folder in (tmp_path, whole[1]))
    assert by_hand == pinned
    assert everything(brain)["weights"] == whole[0]["weights"]


# Before the fault, with it (the last checkpoint is from before the pin), right after it, and later.
@pytest.mark.parametrize(
    ("dies_at", "interval", "host"), each_once([FAULT, FAULT + 2, FAULT + 4], [1, 3], HOSTS), indirect=["host"]
)
@pytest.mark.usefixtures("host")
def test_a_run_that_is_killed_around_the_pin_goes_on_bit_for_bit(tmp_path, whole, dies_at, interval):
    end, folder, pinned = whole
    brain = brain_of(tmp_path, ckpt_interval_steps=interval)
    brain.dies_at = dies_at
    with pytest.raises(Died):
        fit(brain)
    again = fit(brain_of(tmp_path, ckpt_interval_steps=interval))
    assert pinned_modules(again.modules) == pinned
    assert course(tmp_path) == course(folder)
    assert everything(again) == end
    assert summary(tmp_path)["pinned"] == summary(folder)["pinned"]


def test_it_is_said_once_with_the_line_for_the_yaml(caplog):
    with caplog.at_level(logging.WARNING):
        fit(brain_of(fp32_modules=["model.last"]))
    (said,) = [it.getMessage() for it in caplog.records if "is pinned to fp32 from now on" in it.getMessage()]
    assert 'fp32_modules: ["model.last", "model.energy"]' in said and "train epoch 2, batch 3" in said


def test_a_pin_after_the_first_update_is_not_called_dead(caplog):
    class Early(Recipe):
        faults = 0

    with caplog.at_level(logging.WARNING):
        fit(brain_of(recipe=Early))
    assert "is pinned to fp32 from now on" in caplog.text and "have no effect" not in caplog.text


def test_off_it_is_as_ever():
    with pytest.raises(NonfiniteError, match="3 updates in a row"):
        fit(brain_of(on_nonfinite="off"))


class Outside(Recipe):
    """The product is in the recipe's own code: no module can be pinned for it."""

    faults = 10**6

    def compute_forward(self, batch, stage):
        scores = self.modules.model(batch[0])
        return ((scores * 3e5) @ torch.ones(1, 1)).squeeze(1)


def test_code_outside_of_modules_cannot_be_pinned(caplog):
    with pytest.raises(NonfiniteError, match="the recipe's own code"):
        fit(brain_of(recipe=Outside))
    assert "is pinned" not in caplog.text


class Elsewhere(Energy):
    """Its result is too large for fp16 wherever it goes: with the pin, the next layer overflows instead."""

    def forward(self, x):
        return super().forward(x) * self.loudness


def test_a_pin_that_does_not_help_is_not_taken(caplog):
    model = Network()
    model.energy = Elsewhere(6)
    with pytest.raises(NonfiniteError):
        fit(brain_of(model=model))
    assert "is pinned" not in caplog.text


class Several(nn.Module):
    """Layers that overflow one after the other, each from a later update on."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Energy(3) for _ in range(layers))
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class OneByOne(Recipe):
    def on_fit_batch_start(self, batch, should_step):
        run = run_of(self)
        if run.log is not run.idle_log:
            done = run.totals.optimizer_step + run.totals.skipped_steps
            for index, layer in enumerate(self.modules.model.layers):
                layer.loudness = 3e5 if done > index else 1.0


def test_after_pin_limit_patience_is_as_ever(caplog):
    brain = brain_of(recipe=OneByOne, model=Several(3), pin_limit=2)
    with pytest.raises(NonfiniteError, match=r"3 updates in a row.*model\.layers\.2"):
        fit(brain)
    assert [pin["module"] for pin in brain.summary.pinned] == ["model.layers.0", "model.layers.1"]
    assert caplog.text.count("pin_limit (2) is reached") == 1


def test_more_pins_than_steps_that_are_located_otherwise(caplog):
    brain = fit(brain_of(recipe=OneByOne, model=Several(5)))
    assert len(brain.summary.pinned) == 5 and brain.skipped_steps == 5


@pytest.mark.extended
def test_a_compiled_module_is_traced_again():
    try:
        brain = fit(brain_of(model=torch.compile(Network(), backend="eager")))
    finally:
        torch.compiler.reset()
    assert brain.skipped_steps == 1 and [pin["module"] for pin in brain.summary.pinned] == ["model._orig_mod.energy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"precision": "fp32"}, "fp32 already"), ({"locate_nonfinite": False}, "locate_nonfinite is false")],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        brain_of(**options)


def test_several_processes_are_refused():
    several = SimpleNamespace(processes=SimpleNamespace(many=True), shards=False)
    with pytest.raises(ConfigError, match="works in one process"):
        pinning._check(several)


def test_a_state_from_before_the_pin_takes_it_back():
    """A run that goes back after a spike goes on as one that is resumed there."""
    brain = fit(brain_of())
    run = run_of(brain)
    assert pinned_modules(brain.modules) == ["model.energy"]
    saved = run.pinning.numbers()
    run.pinning.take_numbers({})
    assert pinned_modules(brain.modules) == run.plan.pinned == brain.summary.pinned == []
    run.pinning.take_numbers(saved)
    assert pinned_modules(brain.modules) == brain.summary.fp32_modules == ["model.energy"]
    assert brain.summary.pinned == saved["pins"]


# ---------------------------------------------------------------------- the settings of the run


YAML = """\
# the recipe's own comment
on_nonfinite: pin
precision: fp16
init_scale: 1024.0
width: 6
twice: !ref <width> * 2
"""


def started(tmp_path, yaml=YAML, *argv, dies_at=None):
    """A start of the same script, as from the command line of a new process."""
    experiment._prepared.clear()
    file = tmp_path / "params.yaml"
    file.write_text(yaml)
    words = [str(file), f"--output_folder={tmp_path / 'run'}", "--noprogressbar", "--ckpt_interval_steps=1", *argv]
    hparams_file, run_opts, overrides = parse_arguments(words)
    seed_all()
    hparams = load_hparams(hparams_file, overrides)
    brain = Recipe({"model": Network()}, lambda parameters: torch.optim.AdamW(parameters, 0.01), hparams, run_opts)
    brain.dies_at = dies_at
    return brain


@pytest.fixture
def killed(tmp_path, logging_as_before):
    """A run that was killed after it had pinned."""
    with pytest.raises(Died):
        fit(started(tmp_path, dies_at=FAULT + 3))
    return tmp_path


def resolved(tmp_path):
    return load_hparams(tmp_path / "run" / "hyperparams.yaml")


def test_the_settings_of_the_run_have_the_pin_and_are_the_same_otherwise(killed):
    assert resolved(killed)["fp32_modules"] == ["model.energy"]
    assert resolved(killed)["twice"] == 12
    text = (killed / "run" / "hyperparams.yaml").read_text()
    assert text.startswith("# Resolved settings of a run") and "init_scale: 1024.0" in text
    (pin,) = json.loads((killed / "run" / "pins.json").read_text())
    assert pin["module"] == "model.energy"


@pytest.mark.parametrize("line", ["", 'fp32_modules: ["model.energy"]\n'], ids=["as_it_was", "added"])
def test_a_resumed_start_may_have_the_line_or_not(killed, line):
    brain = fit(started(killed, YAML + line))
    assert brain.skipped_steps == 1 and pinned_modules(brain.modules) == ["model.energy"]
    assert resolved(killed)["fp32_modules"] == ["model.energy"]


def test_other_changes_are_refused_as_ever(killed):
    with pytest.raises(ConfigError, match=r"init_scale: 1024\.0 -> 512\.0") as raised:
        started(killed, YAML.replace("1024", "512"))
    assert "fp32_modules" not in str(raised.value)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"module": 3}]', '{"module": "model"}'])
def test_a_damaged_list_of_pins_is_named(killed, content):
    (killed / "run" / "pins.json").write_text(content)
    with pytest.raises(ConfigError, match=r"pins\.json"):
        started(killed)


def test_settings_that_cannot_be_written_do_not_end_the_run(tmp_path, caplog):
    brain = started(tmp_path)
    (tmp_path / "run" / "hyperparams.yaml").write_text("a: [")
    assert fit(brain).skipped_steps == 1
    assert "could not write the pins of the run" in caplog.text


def test_the_resolved_settings_alone_start_the_pinned_run(killed):
    hparams = resolved(killed)
    seed_all()
    options = {"output_folder": str(killed / "other")}
    brain = Recipe({"model": Network()}, lambda parameters: torch.optim.AdamW(parameters, 0.01), hparams, options)
    assert fit(brain).skipped_steps == 0


def test_a_new_run_in_the_folder_begins_without_the_pin(killed):
    brain = started(killed, YAML, "--resume=never")
    assert "fp32_modules" not in resolved(killed) and not (killed / "run" / "pins.json").exists()
    fit(brain)
    assert brain.skipped_steps == 1 and resolved(killed)["fp32_modules"] == ["model.energy"]
