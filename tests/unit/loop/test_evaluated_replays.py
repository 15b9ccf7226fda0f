"""A NaN in validation or test is located as one in training is; the forward alone is repeated."""

import json
import math

import pytest
import torch
from classifiers import Classifier
from device import DEVICE
from torch import nn

from amp_recipes import RunOptions
from amp_recipes.config import Purpose
from amp_recipes.state.randomness import SharedRandomState

LEARNS = lambda parameters: torch.optim.SGD(parameters, 0.1)  # noqa: E731


class Scaled(nn.Module):
    """A layer whose activations are beyond fp16."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), factor

    def forward(self, x):
        return self.layer(x * self.factor) / self.factor


def network(factor=1.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), Scaled(factor), nn.Linear(8, 4))


def data(batches=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(6, 8, generator=generator)  # noqa: E731
    return [(draw(), torch.randint(0, 4, (6,), generator=generator)) for _ in range(batches)]


def with_nan(*places, batches=5):
    found = data(batches, seed=1)
    for batch, sample in places:
        found[batch][0][sample, 2] = math.nan
    return found


def brain_of(folder=None, model=None, kind=Classifier, **options):
    options |= {"device": DEVICE, "noprogressbar": True, "output_folder": None if folder is None else str(folder)}
    return kind({"model": model or network()}, LEARNS, run_opts=options)


def reports(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("nonfinite-*.json"))}


@pytest.mark.usefixtures("host")
def test_a_nan_in_validation_is_located(tmp_path, caplog):
    brain = brain_of(tmp_path)
    brain.fit(range(1, 2), data(), with_nan((1, 3)))
    ((name, report),) = reports(tmp_path).items()
    assert name == "nonfinite-5-valid-2"  # five updates, then its second batch
    assert report["stage"] == "valid" and report["where"] == "valid epoch 1, batch 2"
    assert (report["cause"], report["module"], report["samples"]) == ("data", "model.0", [3]), report["message"]
    assert f"valid epoch 1, batch 2: {report['message']}" in caplog.text
    assert brain.skipped_steps == 0


def test_a_nan_of_the_last_batch_of_a_test_and_of_another_test_set(tmp_path):
    brain = brain_of(tmp_path)
    brain.fit(range(1, 2), data(2))
    first = brain.evaluate(with_nan((4, 0)))
    brain.evaluate([(-batch, labels) for batch, labels in with_nan((4, 5))])
    found = reports(tmp_path)
    assert {name: report["samples"] for name, report in found.items()} == {
        "nonfinite-2-test-5": [0],
        "nonfinite-2-test-5-2": [5],
    }
    assert math.isfinite(first)  # the average leaves it out, as before


@pytest.mark.usefixtures("host")
def test_another_sample_at_the_same_place_of_a_batch_is_another_fault(tmp_path, caplog):
    """Of another batch, of the validation set or of a test set; the same batch in the next epoch is the same fault."""
    brain = brain_of(tmp_path, nonfinite_patience=9)
    brain.fit(range(1, 3), with_nan((1, 3), (3, 3)), with_nan((1, 3)))
    for _ in range(2):
        brain.evaluate(with_nan((1, 3)))
    names = ["nonfinite-2", "nonfinite-4", "nonfinite-5-valid-2", "nonfinite-10-test-2", "nonfinite-10-test-2-2"]
    assert sorted(reports(tmp_path)) == sorted(names)
    assert caplog.text.count("the same as in") == 2  # of the second epoch: one more training batch, and the validation


def test_an_overflow_at_the_precision_of_evaluation_names_the_pin(tmp_path):
    brain = brain_of(tmp_path, network(1e6), eval_precision="fp16")
    brain.fit(range(1, 2), data(2), data(1))
    ((_, report),) = reports(tmp_path).items()
    assert report["cause"] == "precision" and report["precision"] == "float16", report["message"]
    assert report["module"].startswith("model.3")
    brain = brain_of(None, network(1e6), eval_precision="fp16", fp32_modules=["model.3"])
    assert math.isfinite(brain.evaluate(data(1)))  # the pin that it names


def test_three_batches_of_a_fit_and_no_more(tmp_path):
    brain = brain_of(tmp_path)
    places = [(batch, batch) for batch in range(5)]
    brain.fit(range(1, 4), data(2), with_nan(*places))
    assert [report["where"] for report in reports(tmp_path).values()] == [
        f"valid epoch 1, batch {batch}" for batch in (1, 2, 3)
    ]


def test_a_located_batch_changes_nothing_about_the_run():
    class Counts(Classifier):
        def compute_forward(self, batch, stage):
            self.seen = getattr(self, "seen", 0) + len(batch[0])
            return super().compute_forward(batch, stage)

        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            self.add_metric("loss_again", loss)
            return loss

    results = []
    for locate in (True, False):
        torch.manual_seed(5)
        brain = brain_of(kind=Counts, locate_nonfinite=locate, ema_decay=0.5)
        brain.fit(range(1, 3), data(), with_nan((1, 3)))
        weights = [value.tolist() for value in brain.modules.state_dict().values()]
        results.append((weights, brain.seen, brain.summary.last["valid"], torch.rand(1).item()))
    assert str(results[0]) == str(results[1])


def test_off_nothing_is_repeated(tmp_path):
    brain = brain_of(tmp_path, locate_nonfinite=False)
    brain.fit(range(1, 2), data(), with_nan((1, 3)))
    assert not reports(tmp_path)


def test_it_is_replayed_from_its_folder(tmp_path, capsys):
    brain_of(tmp_path).fit(range(1, 2), data(), with_nan((1, 3)))
    folder = tmp_path / "nonfinite-5-valid-2"
    told = json.loads(folder.with_suffix(".json").read_text())["message"]
    options = {"device": DEVICE, "noprogressbar": True}
    options = RunOptions.from_mapping(options, purpose=Purpose("replay", folder))
    capsys.readouterr()
    Classifier({"model": network()}, LEARNS, run_opts=options).fit(range(1, 2), data())
    printed = capsys.readouterr().out
    assert printed.startswith(told) and "The same as in step 5" in printed


class Draws(Classifier):
    """Its evaluation is not finite where it drew small numbers."""

    first = 0  # the batch from which on it draws

    def evaluate_batch(self, batch, stage):
        loss = super().evaluate_batch(batch, stage)
        if self.step > self.first and torch.rand(()) < 0.5:
            loss = loss / torch.zeros(())
        return loss


def copies_of(monkeypatch):
    """How often the states of torch's generators were copied for a batch of an evaluation."""
    calls, copy = [], SharedRandomState.copy
    monkeypatch.setattr(SharedRandomState, "copy", lambda shared, **given: calls.append(1) or copy(shared, **given))
    return calls


def test_a_batch_that_draws_is_repeated_with_its_own_numbers(tmp_path, monkeypatch, caplog):
    calls = copies_of(monkeypatch)
    torch.manual_seed(1)
    brain_of(tmp_path, kind=Draws).evaluate(data(12))
    assert [report["cause"] for report in reports(tmp_path).values()] == ["model"]
    assert caplog.text.count("the same as in") == 2 and "was finite" not in caplog.text
    assert len(calls) >= 4


def test_quiet_batches_share_a_copy_and_a_batch_that_draws_later_says_so(tmp_path, monkeypatch, caplog):
    calls, kind = copies_of(monkeypatch), type("DrawsLate", (Draws,), {"first": 20})
    torch.manual_seed(3)
    brain = brain_of(tmp_path, kind=kind)
    brain.evaluate(data(20))
    assert len(calls) <= 6 and not reports(tmp_path)
    brain.evaluate(data(40))
    assert caplog.text.count("The recipe draws random numbers in this evaluation") == 1  # from then on, it is certain
    assert "Cause: the model" in caplog.text


def test_the_log_says_once_when_steps_are_no_longer_reported(caplog):
    brain = brain_of(nonfinite_patience=9, precision="fp16")
    brain.fit(range(1), with_nan(*[(batch, batch) for batch in range(5)]))
    said = "3 nonfinite steps of this fit were reported. Later ones are skipped and counted, but not reported"
    assert caplog.text.count(said) == 1 and "still repeated once" in caplog.text
