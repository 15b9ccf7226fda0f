"""The planted networks are well in fp32 where precision is to blame; the locator names module and cause in all."""

import functools
import json

import pytest
import torch
from device import DEVICE
from planted_faults import OUTSIDE, ZOO, Batch, Planted, cases, gan_loss, optimizer_of, zoo

from amp_recipes import Brain
from amp_recipes.errors import NonfiniteError
from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.nonfinite import NonfiniteReport, locate
from amp_recipes.numerics.trial import Outcome
from amp_recipes.numerics.watch.observe import Attribution, OpWatch, op_name

WELL_IN_FP32 = [*zoo(cause="precision"), *zoo(cause="scale")]
NONFINITE = zoo(nonfinite=True)


class FirstNonfinite(OpWatch):
    """Remembers the first op that gave something nonfinite, but what is known to be harmless: masks and a watcher.

    Independent of the locator: good enough where the harmless is known.
    """

    def __init__(self, modules):
        super().__init__(Attribution(modules), self.saw)
        self.found = None

    def saw(self, op, args, kwargs, output):
        name = op_name(op).removeprefix("aten::")
        place = self.at.here
        if self.found or name.startswith(("masked_fill", "empty")) or place.module == "watcher":
            return
        if not all(bool(it.isfinite().all()) for it in tensors_in(output) if it.is_floating_point()):
            self.found = (place.module, place.phase, name)


def test_there_are_enough_of_them():
    assert len(NONFINITE) >= 25
    assert {it.cause for it in NONFINITE} == {"precision", "scale", "model", "data"}
    assert {it.phase for it in NONFINITE} == {"forward", "backward"}


@pytest.mark.parametrize("planted", cases(zoo()))
def test_the_fault_shows_in_every_window_and_not_in_fp32(planted):
    trial = planted.trial()
    for window in planted.windows(3):
        assert trial.run(window, planted.dtype, planted.scale).is_finite != planted.nonfinite
        assert trial.run(window, planted.dtype, 1.0).is_finite == (not planted.nonfinite or planted.cause == "scale")
        assert trial.run(window).is_finite == (planted in WELL_IN_FP32)


@pytest.mark.parametrize("planted", cases(WELL_IN_FP32))
def test_it_trains_in_fp32(planted):
    course = planted.trial().train(planted.windows(1) * 10)
    assert course.is_finite
    if planted.make_trial is None:  # two players do not both win
        assert course.losses[-1] < course.losses[0]


@pytest.mark.parametrize("planted", cases(NONFINITE))
def test_the_first_nonfinite_value_is_where_it_was_planted(planted: Planted):
    trial = planted.trial()
    first = FirstNonfinite(trial.modules)
    trial.run(planted.windows(1)[0], planted.dtype, planted.scale, watch=[first])
    module, phase, op = first.found
    assert (module, phase) == (planted.culprit, planted.phase)
    assert not planted.ops or op in planted.ops


# ---------------------------------------------------------------------------------------------- the locator


@functools.cache
def report_of(planted: Planted) -> NonfiniteReport:
    return locate(planted.trial(), planted.windows(1)[0], planted.dtype, planted.scale)


@pytest.mark.parametrize("planted", cases(NONFINITE))
def test_the_locator_names_module_cause_phase_op_and_line(planted):
    found = report_of(planted)
    assert (found.module, found.cause, found.phase) == (planted.culprit, planted.cause, planted.phase), found.message
    assert not planted.ops or found.op.removeprefix("aten::") in planted.ops
    assert found.line is not None and "planted_faults.py:" in found.line
    assert found.message.count(planted.culprit) or planted.culprit == OUTSIDE
    if planted.cause == "precision" and planted.culprit != OUTSIDE:
        assert f"fp32_modules: [{planted.culprit}]" in found.message


@pytest.mark.parametrize("planted", cases(NONFINITE))
def test_the_samples_it_names_do_it_and_the_others_do_not(planted):
    window = planted.windows(1)[0]
    named = [tuple(it) if isinstance(it, list) else (0, it) for it in report_of(planted).samples]
    if planted.samples is not None:
        assert named == [(1 if planted.window > 1 else 0, it) for it in planted.samples]
    if planted.culprit == OUTSIDE and planted.cause == "precision":
        return  # a sum over the batch: no sample does it alone
    if "weight" in planted.name:
        assert named == []
        return
    trial = planted.trial()
    batch = window[named[0][0]]
    guilty = [it for _, it in named]
    innocent = [it for it in range(len(batch[0])) if it not in guilty]
    assert not well(trial.run([taken(batch, guilty)], planted.dtype, planted.scale), planted)
    if innocent:
        assert well(trial.run([taken(batch, innocent)], planted.dtype, planted.scale), planted)


def well(outcome: Outcome, planted: Planted) -> bool:
    """Whether what was nonfinite is finite; the gradient of a loss that was nonfinite may be ill for another reason."""
    return outcome.loss_is_finite if planted.phase == "forward" else outcome.is_finite


def taken(batch: Batch, samples: list[int]) -> Batch:
    return tuple(it[samples] for it in batch)


@pytest.mark.parametrize("planted", cases(zoo(nonfinite=False)))
def test_the_locator_invents_nothing_where_all_is_finite(planted):
    found = locate(planted.trial(), planted.windows(1)[0], planted.dtype, planted.scale)
    assert found.cause == "not replayable"
    assert found.module is None


# ---------------------------------------------------------------------------------------------- in a run


class Recipe(Brain):
    """Trains a planted network as a recipe does."""

    planted: Planted

    def compute_forward(self, batch, stage):
        return self.planted.objective(self.modules.model, batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions


class GanRecipe(Recipe):
    """Updates critic and generator one after the other."""

    def init_optimizers(self):
        self.optimizers_dict = {
            name: optimizer_of(self.modules.model.get_submodule(name), 1e-3) for name in ("critic", "generator")
        }

    def fit_batch(self, batch):
        for name in self.optimizers_dict:
            self.zero_grad()
            with self.training_ctx:
                loss = gan_loss(self.modules.model, name, *batch)
            self.backward(loss)
            self.optimizers_step(name)
        return loss.detach()


def recipe(planted: Planted, folder, **options) -> Recipe:
    kind = Recipe if planted.make_trial is None else GanRecipe
    run_opts = {
        "device": DEVICE,
        "noprogressbar": True,
        "precision": "fp16" if planted.dtype == torch.float16 else "bf16",
        "grad_accumulation_factor": planted.window,
        "init_scale": planted.scale if planted.cause == "scale" else 1.0,
        "output_folder": str(folder),
        **options,
    }
    brain = kind({"model": planted.make()}, lambda _: optimizer_of(brain.modules, 1e-3), None, run_opts)
    brain.planted = planted
    return brain


def batches_of(planted: Planted, windows: int = 4) -> list[Batch]:
    return [batch for window in planted.windows(windows) for batch in window]


IN_A_RUN = [
    ZOO[name]
    for name in (
        *("matmul_overflow", "convolution_overflow", "attention_overflow", "lstm_with_an_exponential_gate"),
        *("accumulation", "two_optimizers", "forward_under_checkpointing", "backward_under_checkpointing"),
        *("nan_samples", "nan_target", "inf_sample_under_accumulation", "inf_weight", "log_of_zero"),
    )
]
RUN_BY_DEFAULT = frozenset({"matmul_overflow", "accumulation", "two_optimizers", "nan_target", "inf_weight"})


@pytest.mark.parametrize("planted", cases(IN_A_RUN, RUN_BY_DEFAULT))
def test_a_run_that_goes_nonfinite_says_where(tmp_path, planted):
    outside = planted.culprit == OUTSIDE
    culprit = OUTSIDE if outside else f"model.{planted.culprit}"
    brain = recipe(planted, tmp_path)
    before = {key: value.clone() for key, value in brain.modules.state_dict().items()}
    with pytest.raises(NonfiniteError) as raised:
        brain.fit(range(1), batches_of(planted))
    assert outside or culprit in str(raised.value)
    found = json.loads((tmp_path / "nonfinite-1.json").read_text())
    assert (found["module"], found["cause"], found["phase"]) == (culprit, planted.cause, planted.phase)
    assert found["step"] == 1
    assert not planted.ops or found["op"].removeprefix("aten::") in planted.ops
    if planted.samples is not None:
        assert found["samples"] == [[1, it] if planted.window > 1 else it for it in planted.samples]
    assert (tmp_path / "nonfinite-1").is_dir()
    for key, value in brain.modules.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("planted", cases([it for it in IN_A_RUN if it.cause == "precision"], RUN_BY_DEFAULT))
def test_the_pin_that_it_names_lets_the_run_go_on(tmp_path, planted):
    brain = recipe(planted, tmp_path, fp32_modules=[f"model.{planted.culprit}"])
    brain.fit(range(1), batches_of(planted))
    assert brain.skipped_steps == 0
    assert not list(tmp_path.glob("nonfinite*"))


def test_a_scale_that_backs_off_is_no_fault(tmp_path):
    planted = ZOO["wrong_scale"]
    brain = recipe(planted, tmp_path)
    brain.fit(range(2), batches_of(planted, 8))
    assert 0 < brain.skipped_steps < 8
    assert brain.optimizer_step == 16 - brain.skipped_steps
    assert not list(tmp_path.glob("nonfinite*"))


def test_a_run_can_do_without(tmp_path):
    planted = ZOO["matmul_overflow"]
    brain = recipe(planted, tmp_path, locate_nonfinite=False)
    with pytest.raises(NonfiniteError) as raised:
        brain.fit(range(1), batches_of(planted))
    assert "pool" not in str(raised.value)
    assert not list(tmp_path.glob("nonfinite*"))
