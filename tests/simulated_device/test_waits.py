"""No step of Brain's waits for its own work: the device always has something to do."""

import pytest
import simulated
import torch
from classifiers import Classifier, StepsByHand
from test_training import DTYPES, make_batches, make_model

from amp_recipes import Stage

STEPS = 8
ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731 - nobody says how it is computed


class Watched(Classifier):
    """Marks in `found` where each step begins."""

    def on_fit_batch_start(self, batch, should_step):
        self.found.start_step()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.found.end_steps()


class Measured(Watched):
    def compute_objectives(self, predictions, batch, stage):
        right = predictions.argmax(dim=1) == batch[1]
        self.add_metric("accuracy", right, len(right))
        self.add_metric("largest", predictions.detach().float().max(), 1)
        return super().compute_objectives(predictions, batch, stage)


class MeasuredOnTheHost(Watched):
    """Its metrics are tensors of the host."""

    def compute_objectives(self, predictions, batch, stage):
        self.add_metric("ones", torch.ones(3), torch.tensor(6))
        return super().compute_objectives(predictions, batch, stage)


class MeasuredOnBoth(MeasuredOnTheHost):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        self.add_metric("zeros", predictions.detach().sum() * 0, torch.tensor(2))
        return loss


class TwoOptimizers(Watched):
    def init_optimizers(self):
        layers = self.modules.model
        self.optimizers_dict = {"front": ADAMW(layers[0].parameters()), "head": ADAMW(layers[-1].parameters())}

    def fit_batch(self, batch):
        self.found.start_step()
        with self.training_ctx:
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        self.optimizers_step("front")
        self.optimizers_step("head")
        return loss.detach()


class ByHand(StepsByHand, Watched):
    def before_step(self):
        self.found.start_step()


def waits_of(kind=Watched, opt=ADAMW, epochs=1, valid=None, **options):
    brain = kind(
        {"model": make_model()},
        opt,
        run_opts={"device": "simulated", "noprogressbar": True, "init_scale": 2.0**10, **options},
    )
    with simulated.waits() as brain.found:
        brain.fit(range(epochs), make_batches(STEPS), valid)
    return brain, brain.found


def check(found, first=2):
    """first: the step from which on no wait is allowed. Before it optimizers make their state, and are looked at.

    After the last step the epoch's end waits for all.
    """
    inside = [wait for wait in found.stalls if first <= wait.step < STEPS]
    assert all(wait.for_step < wait.step for wait in inside), str(found)
    assert len({wait.step for wait in inside}) == len(inside), str(found)


CASES = {
    "plain": {},
    "accumulation": {"grad_accumulation_factor": 2},
    "ema": {"ema_decay": 0.9},
    "metrics": {"kind": Measured},
    "metrics of the host": {"kind": MeasuredOnTheHost},
    "metrics of both": {"kind": MeasuredOnBoth},
    "spikes": {"on_spike": "lower_lr", "output_folder": "run", "ckpt_background": False},
    "sgd": {"opt": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)},
    "fused by the recipe": {"opt": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)},
    "logged": {"output_folder": "run", "log_interval_steps": 1, "ckpt_background": False},
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_no_step_waits_for_its_own_work(case, precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    brain, found = waits_of(precision=precision, **CASES[case])
    check(found, first=4 if case == "accumulation" else 2)
    assert brain.optimizer_step > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_by_hand_waits_for_the_one_before_it_at_most(precision):
    brain, found = waits_of(ByHand, precision=precision)
    check(found)
    assert brain.optimizer_step == STEPS


@pytest.mark.parametrize("precision", DTYPES)
def test_two_optimizers_that_step_by_name_do_not_wait_for_each_other(precision):
    brain, found = waits_of(TwoOptimizers, precision=precision)
    check(found)
    assert brain.optimizer_step == 2 * STEPS


@pytest.mark.parametrize("kind", [MeasuredOnTheHost, MeasuredOnBoth])
def test_metrics_of_the_host_are_added_up_beside_those_of_the_device(kind):
    brain, _ = waits_of(kind, epochs=2)
    metrics = brain.summary.last["train"]
    assert metrics["ones"] == 0.5 and metrics.get("zeros", 0.0) == 0.0


def test_an_optimizer_without_a_fused_step_waits_and_the_log_says_so(caplog):
    with caplog.at_level("INFO"):
        _, found = waits_of(opt=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3))
    assert len({wait.step for wait in found.of_this_step}) == STEPS
    assert "RMSprop" in caplog.text


def test_an_evaluation_waits_for_the_batch_two_before_it():
    class Evaluated(Measured):
        def evaluate_batch(self, batch, stage):
            self.found.start_step()
            return super().evaluate_batch(batch, stage)

        def on_fit_batch_start(self, batch, should_step):
            pass

    brain = Evaluated({"model": make_model()}, ADAMW, run_opts={"device": "simulated", "noprogressbar": True})
    with simulated.waits() as brain.found:
        brain.evaluate(make_batches(STEPS))
    inside = [wait for wait in brain.found.stalls if 0 < wait.step < STEPS]
    assert inside and all(wait.for_step <= wait.step - 2 for wait in inside), str(brain.found)
