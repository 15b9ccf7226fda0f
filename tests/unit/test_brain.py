"""The loop as recipes meet it: what fit and evaluate promise beyond the arithmetic of a step."""

import json
import math
import re
from contextlib import nullcontext

import pytest
import torch
from device import DEVICE
from inside import run_of
from pairwise import each_once
from programs import run_python
from repository import REPOSITORY
from torch import nn
from torch.utils.data import TensorDataset

from amp_recipes import Brain, Checkpointer, EpochCounter, RunOptions, Stage
from amp_recipes.data import to_device
from amp_recipes.errors import CheckpointError, ConfigError, DataError, PrecisionError, RecipeError
from amp_recipes.loggers import RunLog

SIZE = 12


class Regression(Brain):
    """Records what is called, in order."""

    def compute_forward(self, batch, stage):
        self.seen.append((stage, batch[0][0, 0].item(), self.modules.training))
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    @property
    def seen(self) -> list:
        return self.__dict__.setdefault("_seen", [])


def data(size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = data(2 * count)
    return list(zip(x.split(2), y.split(2), strict=True))


def make(kind=Regression, hparams=None, opt=None, checkpointer=None, **options) -> Brain:
    torch.manual_seed(0)
    return kind(
        {"model": nn.Linear(3, 1)},
        opt or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)),
        hparams,
        {"device": DEVICE, "noprogressbar": True, **options},
        checkpointer,
    )


def weights(brain: Brain) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in brain.modules.parameters()])


def same_weights(first: Brain, second: Brain) -> bool:
    return torch.equal(weights(first), weights(second))


# ---------------------------------------------------------------- fit


def test_a_second_fit_goes_on_with_the_same_optimizer():
    twice, once = make(), make()
    for _ in range(2):
        twice.fit(range(1), batches())
    once.fit(range(2), batches())
    assert same_weights(twice, once) and twice.optimizer_step == once.optimizer_step == 12


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_fit_after_an_interrupted_one_begins_with_the_first_batch(accumulation):
    class Interrupted(Regression):
        def on_fit_batch_start(self, batch, should_step):
            if len(self.seen) == 2:
                self.seen.append(None)
                raise KeyboardInterrupt

    brain = make(Interrupted, grad_accumulation_factor=accumulation)
    with pytest.raises(KeyboardInterrupt):
        brain.fit(range(1), batches())
    brain.seen[:] = [None] * 9
    brain.fit(range(1), batches())
    assert [entry[1] for entry in brain.seen[9:]] == [batch[0][0, 0].item() for batch in batches()]
    before = brain.optimizer_step
    brain.fit_batch(to_device(batches()[0], DEVICE))
    assert brain.optimizer_step == before + 1


def test_batches_of_a_window_are_on_the_device_one_at_a_time():
    moved, used = [], []

    class Batch:
        def __init__(self, index):
            self.index = index

        def to(self, device):
            moved.append(self.index)
            return self

        def __len__(self):
            return 1

    class Own(Brain):
        def compute_forward(self, batch, stage):
            assert moved[-1] == batch.index
            used.append(batch.index)
            return self.modules.model(torch.ones(1, 3, device=DEVICE))

        def compute_objectives(self, predictions, batch, stage):
            return predictions.sum()

    make(Own, grad_accumulation_factor=4).fit(range(1), [Batch(index) for index in range(4)])
    assert used == [0, 1, 2, 3]


def test_debug_is_a_few_batches_of_a_few_epochs_and_leaves_a_run_alone(tmp_path):
    brain = make(output_folder=str(tmp_path), debug=True)
    brain.fit(EpochCounter(9), batches(), batches())
    stages = [stage for stage, *_ in brain.seen]
    assert stages == [Stage.TRAIN, Stage.TRAIN, Stage.VALID, Stage.VALID] * 2
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "save").exists()


def test_overfit_batches_trains_and_validates_on_the_same_few():
    brain = make(overfit_batches=2)
    brain.fit(range(2), batches(), batches())
    assert len({value for _, value, _ in brain.seen}) == 2 and len(brain.seen) == 8


@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizer_step_limit_holds_in_this_fit_and_in_the_next(accumulation):
    brain = make(optimizer_step_limit=2, grad_accumulation_factor=accumulation)
    for _ in range(2):
        brain.fit(range(3), batches())
        assert brain.optimizer_step == 2


def test_no_data_is_said_before_anything_trains(subtests):
    cases = {
        "dataset": (TensorDataset(*data(0)), "Training set is empty"),
        "list": ([], "Training set is empty"),
        "number": (3, "expected a torch Dataset or an iterable"),
        "iterator": (iter([]), "has no batches"),
    }
    for name, (given, message) in cases.items():
        with subtests.test(name), pytest.raises(DataError, match=message):
            make().fit(range(1), given)


def test_an_empty_validation_set_is_said_before_the_first_epoch_trains():
    brain = make()
    with pytest.raises(DataError, match="Validation set is empty"):
        brain.fit(range(1), batches(), [])
    assert brain.seen == []


def test_loader_arguments_with_batches_are_an_error():
    with pytest.raises(DataError, match="batch_size"):
        make().fit(range(1), iter(batches()), train_loader_kwargs={"batch_size": 2})


@pytest.mark.parametrize("made", ["init_optimizers", "constructor"])
def test_scheduler_and_checks_come_however_the_optimizer_was_made(made):
    class Own(Regression):
        def init_optimizers(self):
            self.optimizer = torch.optim.SGD(self.modules.parameters(), lr=1.0)

    brain = make(Own, hparams={"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)})
    if made == "constructor":
        brain.init_optimizers()
    brain.fit(range(1), batches(3))
    assert brain.optimizer.param_groups[0]["lr"] == 0.125
    low = make(Own, precision="fp16")
    low.modules.half()
    with pytest.raises(PrecisionError, match=r"model\.weight"):
        low.fit(range(1), batches())


def test_plateau_by_the_step_is_refused_before_training():
    brain = make(hparams={"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau})
    with pytest.raises(ConfigError, match="lr_scheduler_interval: epoch"):
        brain.fit(range(1), batches())
    assert brain.seen == []


def test_plateau_by_the_epoch_watches_the_validation_loss():
    scheduler = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)  # noqa: E731
    brain = make(hparams={"lr_scheduler": scheduler, "lr_scheduler_interval": "epoch"})
    brain.fit(range(3), batches(), batches())
    assert brain.optimizer.param_groups[0]["lr"] < 0.05


# ---------------------------------------------------------------- recipes that override


def test_a_fit_batch_that_steps_now_and_then_counts_only_real_updates():
    class EveryThird(Regression):
        def fit_batch(self, batch):
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            self.backward(loss)
            if self.step % 3 == 0:
                self.optimizers_step()
            return loss.detach()

    brain = make(EveryThird, hparams={"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)})
    brain.fit(range(1), batches(6))
    assert brain.optimizer_step == 2 and brain.optimizer.param_groups[0]["lr"] == 0.0125


def test_a_fit_batch_that_steps_its_optimizer_by_hand_is_counted():
    class ByHand(Regression):
        def fit_batch(self, batch):
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            loss.backward()
            if self.step % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.detach()

    brain = make(ByHand)
    brain.fit(range(1), batches(6))
    assert brain.optimizer_step == 3


def test_update_average_may_be_overridden():
    class Last(Regression):
        def update_average(self, loss, avg_loss):
            return loss

    losses = []

    class Kept(Last):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            losses.append(stage_loss)

    brain = make(Kept)
    brain.fit(range(1), batches(), batches(1))
    assert losses[1] == pytest.approx(brain.evaluate(batches(1))) and all(map(math.isfinite, losses))


@pytest.mark.parametrize("where", ["train", "evaluate"])
def test_a_loss_per_sample_is_refused_with_its_shape(where):
    class Vector(Regression):
        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch[1]).square().flatten()

    brain = make(Vector)
    run = (lambda: brain.fit(range(1), batches())) if where == "train" else (lambda: brain.evaluate(batches()))
    with pytest.raises(RecipeError, match=r"shape \(2,\).*\.mean\(\)"):
        run()


def test_a_fit_batch_that_returns_nothing_is_named():
    class Forgetful(Regression):
        def fit_batch(self, batch):
            super().fit_batch(batch)

    with pytest.raises(RecipeError, match=r"Forgetful\.fit_batch: the loss is a NoneType"):
        make(Forgetful).fit(range(1), batches())


def test_a_list_of_samples_with_loader_kwargs_trains_as_a_dataset_does():
    kwargs = {"batch_size": 4, "shuffle": True, "num_workers": 0}
    of_dataset, of_list = make(), make()
    of_dataset.fit(range(1, 3), TensorDataset(*data()), train_loader_kwargs=kwargs)
    of_list.fit(range(1, 3), list(TensorDataset(*data())), train_loader_kwargs=kwargs)
    assert same_weights(of_dataset, of_list)


def test_noprogressbar_leaves_a_line_per_epoch_and_asks_for_no_records_of_updates(capsys, monkeypatch):
    monkeypatch.setattr(RunLog, "log_update", None)
    brain = make()
    brain.fit(range(1, 3), batches(), batches())
    brain.evaluate(batches())
    said = [line for line in capsys.readouterr().err.splitlines() if " loss " in line]
    assert [line.split(" loss ")[0] for line in said] == ["epoch 1: train", "epoch 2: train", "test"]
    assert all("; valid loss " in line for line in said[:2])


@pytest.mark.parametrize("quiet", [True, False])
def test_the_table_of_the_summary_is_printed_once(quiet, tmp_path, capsys):
    brain = make(noprogressbar=quiet, output_folder=str(tmp_path))
    brain.fit(range(1, 3), batches(), batches())
    brain.evaluate(batches())
    said = capsys.readouterr().err
    assert said.count("Summary\n") == 1 and said.count("test loss ") + said.count("test: loss ") == 1
    assert "test" in json.loads((tmp_path / "summary.json").read_text())["last"]


def test_save_intervals_without_a_folder_are_told(caplog, tmp_path):
    for interval in ({"ckpt_interval_steps": 2}, {"ckpt_interval_minutes": 0.5}):
        make(**interval)
        assert f"{next(iter(interval))} has no effect without output_folder" in caplog.text
        caplog.clear()
        make(**interval, output_folder=str(tmp_path))
        make(**interval, debug=True)
        make()
        assert "has no effect" not in caplog.text


def test_a_recipe_that_counts_its_steps_too_does_not_count_twice():
    class Counts(Regression):
        def fit_batch(self, batch):
            self.steps = [*getattr(self, "steps", []), self.step]
            loss = super().fit_batch(batch)
            self.step += 1
            return loss

        def evaluate_batch(self, batch, stage):
            self.step += 1
            return super().evaluate_batch(batch, stage)

        def on_stage_end(self, stage, loss, epoch=None):
            self.steps.append((stage.name, self.step))

    brain = make(Counts)
    brain.fit(range(1), batches(3), batches(2))
    assert brain.steps == [1, 2, 3, ("TRAIN", 3), ("VALID", 2)]


class Losing(Regression):
    def compute_objectives(self, predictions, batch, stage):
        return self.loss_of(super().compute_objectives(predictions, batch, stage))


def test_a_loss_of_another_kind_says_what_to_return(subtests):
    for loss_of, said in {
        lambda loss: None: r"a NoneType.*end with `return loss`",
        lambda loss: (loss, 1): r"a tuple.*Return only the loss; use add_metric for other values",
        lambda loss: {"loss": loss}: r"a dict.*Return only the loss; use add_metric for other values",
        lambda loss: loss.item(): r"a float.*without \.item\(\)",
        lambda loss: loss.detach(): r"no gradient.*compute_objectives returns a detached loss.*frozen",
    }.items():
        with subtests.test(said), pytest.raises(RecipeError, match=said):
            brain = make(Losing)
            brain.loss_of = loss_of
            brain.fit(range(1), batches())


def test_arguments_of_another_kind_say_what_is_expected(subtests):
    model = nn.Linear(3, 1)
    adam = torch.optim.Adam(model.parameters())
    for arguments, said in {
        (model,): r"^modules is a Linear; expected .*\{'model': \.\.\.\}",
        (model.parameters(),): r"^modules is a generator; expected",
        ((("model", nn.Linear),), None): r"^modules is a tuple; expected",
        (nn.ModuleDict({"model": model}), adam): r"^opt_class is an object of Adam; .*!name:torch\.optim\.Adam",
        (None, "Adam"): r"^opt_class is an object of str",
    }.items():
        with subtests.test(said), pytest.raises(RecipeError, match=said):
            Regression(*arguments, run_opts={"device": DEVICE})
    with pytest.raises(RecipeError, match=r"^modules\['model'\] is <class .*`!new:` creates an object"):
        Regression({"model": nn.Linear}, run_opts={"device": DEVICE})


def test_epochs_that_cannot_be_counted_are_refused(subtests):
    for epochs, said in {3: "are 3.*EpochCounter\\(3\\), or range\\(1, 4\\)", "3": "are '3'", None: "are None"}.items():
        with subtests.test(said), pytest.raises(RecipeError, match=said):
            make().fit(epochs, batches())


def test_weights_of_batches_count_in_averages():
    class Weighted(Regression):
        def batch_weight(self, batch):
            return batch[0][:, 0].abs().sum()

    brain = make(Weighted)
    by_hand = [
        (nn.functional.mse_loss(brain.modules.model(x), y).item(), x[:, 0].abs().sum().item())
        for x, y in to_device(batches(), DEVICE)
    ]
    expected = sum(loss * weight for loss, weight in by_hand) / sum(weight for _, weight in by_hand)
    assert brain.evaluate(batches()) == pytest.approx(expected, rel=1e-6)


def test_unknown_optimizer_name_suggests_the_nearest():
    class Typo(Regression):
        def fit_batch(self, batch):
            self.optimizers_step("optimiser")

    with pytest.raises(ConfigError, match="Did you mean 'optimizer'"):
        make(Typo).fit(range(1), batches())


# ---------------------------------------------------------------- evaluate


def test_the_hook_after_a_test_sees_the_averaged_weights_and_that_after_a_validation_those_that_train():
    class Seeing(Regression):
        def evaluate_batch(self, batch, stage):
            self.evaluated = self.modules.model.weight.clone()
            return super().evaluate_batch(batch, stage)

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is not Stage.TRAIN:
                self.same = torch.equal(self.evaluated, self.modules.model.weight)

    brain = make(Seeing, ema_decay=0.9)
    brain.fit(range(1), batches(), batches())
    assert not brain.same
    trained = brain.modules.model.weight.clone()
    brain.evaluate(batches())
    assert brain.same
    assert torch.equal(brain.modules.model.weight, trained)


@pytest.mark.parametrize("fails", [False, True])
def test_a_test_inside_the_hook_of_a_test_has_the_same_weights(fails):
    class Twice(Regression):
        losses = ()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.TEST and len(self.losses) < 2:
                self.losses += (stage_loss,)
                self.evaluate(batches())
                if fails:
                    raise KeyError

    brain = make(Twice, ema_decay=0.9)
    brain.fit(range(1), batches())
    trained, averages = weights(brain), [it.clone() for it in run_of(brain).ema.state_dict().values()]
    with pytest.raises(KeyError) if fails else nullcontext():
        brain.evaluate(batches())
    assert len(set(brain.losses)) == 1 and len(brain.losses) == 2
    assert torch.equal(weights(brain), trained)
    assert all(map(torch.equal, run_of(brain).ema.state_dict().values(), averages))


@pytest.mark.parametrize("hook", ["on_fit_batch_end", "on_stage_end"])
def test_an_evaluation_inside_fit_changes_nothing_of_the_training(hook, tmp_path):
    class Evaluating(Regression):
        def evaluate_once(self):
            if run_of(self).current.stage is Stage.TRAIN and self.step in (2, 6):
                self.evaluate(batches(2), min_key="loss" if self.checkpointer.list_checkpoints() else None)

        def on_fit_batch_end(self, *_):
            if hook == "on_fit_batch_end":
                self.evaluate_once()

        def on_stage_end(self, *_):
            if hook == "on_stage_end":
                self.evaluate_once()

    plain = make(output_folder=str(tmp_path / "plain"), ema_decay=0.5)
    brain = make(Evaluating, output_folder=str(tmp_path / "evaluating"), ema_decay=0.5)
    for each in (plain, brain):
        each.fit(range(2), batches(), batches())
    assert same_weights(plain, brain)
    assert [entry for entry in brain.seen if entry[0] is Stage.TRAIN] == [
        entry for entry in plain.seen if entry[0] is Stage.TRAIN
    ]
    assert plain.summary.last["train"] == brain.summary.last["train"]
    assert all(map(torch.equal, run_of(plain).ema.state_dict().values(), run_of(brain).ema.state_dict().values()))


def test_evaluation_loads_the_best_and_leaves_counters_alone(tmp_path):
    class Worsening(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            return {"accuracy": {1: 0.5, 2: 0.9, 3: 0.1}.get(epoch, 0.0)}

    brain = make(Worsening, output_folder=str(tmp_path), early_stop_metric="accuracy", early_stop_mode="max")
    kept = {}
    brain.on_fit_batch_start = lambda *_: kept.setdefault(run_of(brain).current.epoch, weights(brain).clone())
    brain.fit(EpochCounter(3), batches(), batches())
    brain.evaluate(batches(), max_key="accuracy")
    assert torch.equal(weights(brain), kept[3])  # as epoch 3 began: the end of epoch 2
    assert brain.optimizer_step == 18 and brain.summary.best == {"accuracy": 0.9, "epoch": 2}


class Worsening(Regression):
    def on_stage_end(self, stage, stage_loss, epoch=None):
        return {"error": float(epoch)}


def test_early_stopping_stops():
    brain = make(Worsening, early_stop_metric="error", early_stop_patience=2)
    brain.fit(range(1, 10), batches(1), batches(1))
    assert len([entry for entry in brain.seen if entry[0] is Stage.TRAIN]) == 3


def test_test_only_trains_nothing_and_refuses_an_untrained_model(tmp_path):
    options = {"output_folder": str(tmp_path), "test_only": True}
    brain = make(**options)
    brain.fit(EpochCounter(1), batches())
    assert brain.seen == []
    with pytest.raises(CheckpointError, match="untrained"):
        brain.evaluate(batches())
    trained = make(output_folder=str(tmp_path))
    trained.fit(EpochCounter(1), batches())
    tested = make(**options)
    tested.evaluate(batches())
    assert same_weights(tested, trained)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["epochs"], summary["samples"], summary["optimizer_steps"]) == (1, 12, 6)
    assert set(summary["last"]) == {"train", "test"} and summary["best"] is not None


def test_evaluation_builds_no_graph_and_uses_its_own_precision():
    seen = []

    class Watching(Regression):
        def compute_forward(self, batch, stage):
            seen.append((stage, torch.is_grad_enabled(), torch.is_autocast_enabled(DEVICE.type)))
            return super().compute_forward(batch, stage).float()

    brain = make(Watching, precision="bf16")
    brain.fit(range(1), batches(1), batches(1))
    train = (Stage.TRAIN, True, True)
    assert seen == [train, train, (Stage.VALID, False, False)]  # the first is on copies, before the first step


# ---------------------------------------------------------------- resume


class Dies(Regression):
    after = None

    def on_fit_batch_end(self, *_):
        if len(self.seen) == self.after:
            raise KeyboardInterrupt


def interrupted_and_resumed(tmp_path, after: int, counter, **options) -> Brain:
    dying = make(Dies, output_folder=str(tmp_path / "run"), **options)
    dying.after = after
    with pytest.raises(KeyboardInterrupt):
        dying.fit(counter(), batches())
    resumed = make(output_folder=str(tmp_path / "run"), **options)
    torch.nn.init.zeros_(resumed.modules.model.weight)
    resumed.fit(counter(), batches())
    return resumed


COUNTERS = {"counter": lambda: EpochCounter(3), "from 0": lambda: range(3), "from 1": lambda: range(1, 4)}
SAVED = [
    (9, {}),  # inside the second epoch, saved at the end of the first
    (9, {"ckpt_interval_steps": 2}),
    (10, {"ckpt_interval_steps": 1, "grad_accumulation_factor": 2}),
    (11, {"ckpt_interval_steps": 1, "precision": "bf16", "ema_decay": 0.9}),
]


@pytest.mark.parametrize(("saved", "counter"), each_once(SAVED, [*COUNTERS]))
def test_a_run_that_dies_goes_on_where_it_was_saved(tmp_path, saved, counter):
    (after, options), counter = saved, COUNTERS[counter]
    whole = make(output_folder=str(tmp_path / "whole"), **options)
    whole.fit(counter(), batches())
    resumed = interrupted_and_resumed(tmp_path, after, counter, **options)
    assert same_weights(whole, resumed)
    assert resumed.optimizer_step == whole.optimizer_step
    assert resumed.summary.last["train"]["loss"] == pytest.approx(whole.summary.last["train"]["loss"], rel=1e-12)
    assert resumed.summary.best == whole.summary.best


def test_a_recipes_own_saves_in_on_stage_end_resume_with_the_right_learning_rate(tmp_path):
    class Saving(Dies):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])

    def recipe(folder) -> Brain:
        hparams = {
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            "lr_scheduler_interval": "epoch",
        }
        brain = make(Saving, hparams=hparams, checkpointer=Checkpointer(folder))
        brain.checkpointer.add_recoverable("model", brain.modules.model)
        return brain

    whole = recipe(tmp_path / "whole")
    whole.fit(range(4), batches(), batches(1))
    dying = recipe(tmp_path / "run")
    dying.after = 16  # inside the third epoch of 6 + 1 batches each
    with pytest.raises(KeyboardInterrupt):
        dying.fit(range(4), batches(), batches(1))
    resumed = recipe(tmp_path / "run")
    resumed.fit(range(4), batches(), batches(1))
    assert same_weights(whole, resumed)
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.05 / 16


def test_a_finished_run_says_that_it_goes_on_from_its_end(tmp_path, caplog):
    for _ in range(2):
        brain = make(output_folder=str(tmp_path))
        brain.fit(EpochCounter(1), batches())
    assert "resuming from" in caplog.text and "epoch 1" in caplog.text
    assert brain.summary.best is not None


# ---------------------------------------------------------------- what a run leaves behind


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_update_is_written_also_the_one_that_ends_the_run(tmp_path):
    bad = [(x * math.nan, y) for x, y in batches(3)]
    brain = make(output_folder=str(tmp_path), nonfinite_patience=3)
    with pytest.raises(PrecisionError, match="batch 5"):
        brain.fit(range(1), [*batches(2), *bad, *batches(2)])
    steps = [record for record in records(tmp_path) if record["kind"] == "step"]
    assert [(record["step"], record["skipped"]) for record in steps] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
        (5, True),
    ]
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_steps"] == 3


def test_records_hold_what_the_update_used(tmp_path):
    scheduler = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
    brain = make(hparams=scheduler, output_folder=str(tmp_path), grad_accumulation_factor=2)
    brain.fit(range(1), batches(5), batches(1))
    steps = [record for record in records(tmp_path) if record["kind"] == "step"]
    assert [record["lr"]["optimizer"] for record in steps] == [0.05, 0.025, 0.0125]
    assert [record["samples"] for record in steps] == [4, 4, 2]
    assert [record["step"] for record in steps] == [2, 4, 5]
    stages = [(record["stage"], record["samples"]) for record in records(tmp_path) if record["kind"] == "stage"]
    assert stages == [("train", 10), ("valid", 2)]


def test_throughput_counts_the_batches_of_its_own_update_too(tmp_path, host):
    brain = make(output_folder=str(tmp_path), grad_accumulation_factor=2)
    brain.fit(range(2), batches(5), batches(1))
    steps = [record for record in records(tmp_path) if record["kind"] == "step"]
    done = [round(record["samples_per_second"] * record["seconds"]) for record in steps]
    assert done == [4, 8, 10, 4, 8, 10]
    stages = [record for record in records(tmp_path) if record["kind"] == "stage"]
    assert [record["optimizer_step"] for record in stages] == [3, 3, 6, 6]
    assert all(0 < record["data_seconds"] < record["seconds"] for record in stages)
    assert sorted(record["wall_time"] for record in steps) == [record["wall_time"] for record in steps]


def test_a_run_that_ends_in_its_first_epoch_tells_its_time(tmp_path):
    bad = [(x * math.nan, y) for x, y in batches(2)]
    with pytest.raises(PrecisionError):
        make(output_folder=str(tmp_path), nonfinite_patience=2).fit(range(1), [*batches(3), *bad])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["samples"], summary["epochs"]) == (10, 0)
    assert summary["seconds"] == summary["training_seconds"] > 0 and summary["samples_per_second"] > 0


def test_without_an_output_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make().fit(range(1), batches(), batches())
    assert list(tmp_path.iterdir()) == []


def test_fit_draws_nothing_from_the_global_generators():
    brain = make()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    brain.fit(range(2), TensorDataset(*data()), train_loader_kwargs={"batch_size": 2, "shuffle": True})
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "assign", "is_said"),
    [
        ("precision", lambda brain: setattr(brain, "precision", "fp16"), True),
        ("fp32_modules", lambda brain: brain.fp32_modules.append("model"), True),
        ("device", lambda brain: setattr(brain, "device", DEVICE), False),  # as it is
        ("max_grad_norm", lambda brain: setattr(brain, "max_grad_norm", 1.0), False),  # it has its effect
    ],
)
def test_an_option_that_comes_too_late_is_said(name, assign, is_said, caplog):
    class Late(Regression):
        def on_fit_start(self):
            super().on_fit_start()
            assign(self)

    brain = make(Late)
    brain.fit(range(1), batches())
    assert (f"self.{name} was set to" in caplog.text and f"--{name}" in caplog.text) is is_said
    caplog.clear()
    brain.fit(range(1), batches())
    brain.evaluate(batches())
    assert "was set to" not in caplog.text  # once


def test_options_by_precedence():
    brain = make(hparams={"max_grad_norm": 1.0, "precision": "bf16"}, precision="fp32")
    assert (brain.max_grad_norm, brain.precision, brain.nonfinite_patience) == (1.0, "fp32", 3)
    brain.max_grad_norm = 0.5  # read at each step
    brain.fit(range(1), batches(1))
    assert brain.hparams.max_grad_norm == 1.0


# ---------------------------------------------------------------- what is said to users


class OwnStep(Regression):
    """Leaves autocast and accumulation out of account."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        self.optimizers_step()
        return loss.detach()


def test_a_low_precision_that_no_own_fit_batch_enters_is_said(caplog):
    class Right(Regression):
        def fit_batch(self, batch):
            with self.training_ctx:
                loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            self.backward(loss)
            self.optimizers_step()
            return loss.detach()

    make(Right, precision="bf16").fit(range(1), batches())
    assert "training_ctx" not in caplog.text
    make(OwnStep, precision="bf16").fit(range(1), batches())
    assert caplog.text.count("with self.training_ctx") == 1


def test_a_step_inside_an_accumulation_window_is_refused():
    with pytest.raises(RecipeError, match=r"if self\.should_step"):
        make(OwnStep, grad_accumulation_factor=2).fit(range(1), batches())


def test_no_optimizer_is_said_before_training():
    brain = Regression({"model": nn.Linear(3, 1)}, run_opts={"device": DEVICE, "noprogressbar": True})
    with pytest.raises(RecipeError, match="has no optimizer"):
        brain.fit(range(1), batches())


def test_a_device_that_is_not_there_is_said():
    with pytest.raises(ConfigError, match=r"device 'cuda:99' cannot be used here"):
        make(device="cuda:99")


def test_a_fit_that_learned_nothing_says_so(caplog):
    bad = [(x * math.nan, y) for x, y in batches(2)]
    make().fit(range(1), bad)
    assert "all 2 updates were skipped" in caplog.text
    counter = EpochCounter(0)
    make().fit(counter, batches())
    assert "nothing was trained" in caplog.text


def test_an_evaluation_of_the_best_without_checkpoints_says_so(caplog):
    brain = make()
    brain.fit(range(1), batches())
    brain.evaluate(batches(), max_key="accuracy")
    assert "no checkpoint was loaded" in caplog.text


def test_a_run_that_stopped_early_stays_stopped(tmp_path):
    trained = []
    for _ in range(2):
        options = {"early_stop_metric": "error", "early_stop_patience": 2, "output_folder": str(tmp_path)}
        brain = make(Worsening, **options)
        brain.fit(EpochCounter(9), batches(1), batches(1))
        trained.append(len(brain.seen))
    assert trained == [6, 0]


def test_notices_reach_the_terminal_of_a_user_without_logging(tmp_path):
    script = (
        "import torch, logging\n"
        "from amp_recipes import Brain\n"
        "Brain({'model': torch.nn.Linear(1, 1)}, run_opts={'device': 'cpu', 'precision': 'auto', "
        "'fp32_modules': ['model']})\n"
        "logging.getLogger('amp_recipes.x').warning('a warning')\n"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    assert "pinned to fp32: model" in done.stderr and "auto" in done.stderr
    assert done.stderr.count("a warning") == 1


def test_an_early_stop_leaves_the_counter_at_the_last_trained_epoch(caplog):
    counter = EpochCounter(9)
    caplog.set_level("INFO", logger="amp_recipes")
    make(Worsening, early_stop_metric="error", early_stop_patience=2).fit(counter, batches(1), batches(1))
    assert counter.current == 3
    assert "stopped early: the best error is 1 in epoch 1" in caplog.text


@pytest.mark.parametrize("epochs", [[0, 0, 0], range(3, 0, -1)], ids=["repeated", "descending"])
def test_epochs_of_any_order_are_all_trained(epochs):
    brain = make()
    brain.fit(epochs, batches(2))
    assert brain.optimizer_step == 6


def test_a_nested_evaluation_with_the_recipes_own_checkpointer_does_not_move_the_run(tmp_path):
    class Nested(Regression):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                self.checkpointer.save_checkpoint(meta={"loss": stage_loss, "epoch": epoch})
                self.evaluate(batches(1), max_key="loss")

    brain = make(Nested, checkpointer=Checkpointer(tmp_path))
    brain.checkpointer.add_recoverable("model", brain.modules.model)
    plain = make()
    for each in (brain, plain):
        each.fit(EpochCounter(3), batches(), batches(1))
    assert same_weights(brain, plain) and brain.optimizer_step == 18


def test_an_update_under_way_counts_when_an_exception_ends_the_fit(host):
    class Stops(Regression):
        def on_fit_batch_end(self, *_):
            if self.step == 3:
                raise KeyboardInterrupt

    scheduler = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
    brain = make(Stops, hparams=scheduler)
    with pytest.raises(KeyboardInterrupt):
        brain.fit(range(1), batches())
    assert brain.summary.optimizer_steps == brain.optimizer_step == 3
    assert brain.optimizer.param_groups[0]["lr"] == 0.05 / 8


def test_a_replaced_optimizer_is_the_one_that_is_saved(tmp_path):
    brain = make(output_folder=str(tmp_path))
    brain.fit(range(1), batches())
    brain.optimizer = torch.optim.Adam(brain.modules.parameters())
    brain.optimizers_dict = {"optimizer": brain.optimizer}
    brain.fit(range(1), batches())
    assert brain.checkpointer.recoverables["optimizer.optimizer"] is brain.optimizer


def test_an_optimizer_that_a_hook_puts_in_is_scheduled():
    class Swapping(Regression):
        def on_stage_start(self, stage, epoch=None):
            if epoch == 1:
                self.optimizer = torch.optim.SGD(self.modules.parameters(), lr=1.0)
                self.optimizers_dict = {"optimizer": self.optimizer}

    scheduler = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
    brain = make(Swapping, hparams=scheduler)
    brain.fit(range(2), batches(2))
    assert brain.optimizer.param_groups[0]["lr"] == 0.25


def test_an_evaluation_inside_a_window_keeps_the_state_to_go_back_to(tmp_path):
    class Evaluating(Regression):
        def on_fit_batch_end(self, *_):
            if self.step == 5 and self.checkpointer is not None:
                self.evaluate(batches(1), min_key="loss")

    def norm(kind, **options) -> Brain:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        run_opts = {"device": DEVICE, "noprogressbar": True, "grad_accumulation_factor": 4, **options}
        return kind({"model": model}, lambda p: torch.optim.SGD(p, 0.1), run_opts=run_opts)

    first, *rest = batches(8)
    bad = [(x * math.nan, y) if index == 6 else (x, y) for index, (x, y) in enumerate([first, *rest])]
    evaluating, plain = norm(Evaluating, output_folder=str(tmp_path)), norm(Regression)
    evaluating.checkpointer.save_checkpoint(meta={"loss": 1.0})
    run_of(evaluating).checkpoints._resumed = True
    for brain in (evaluating, plain):
        brain.fit(range(1), bad)
        assert brain.skipped_steps == 1
    for name, value in plain.modules.state_dict().items():
        assert torch.equal(evaluating.modules.state_dict()[name], value), name


def test_a_hyperparameter_that_is_missing_is_an_error_that_names_the_nearest():
    brain = Regression({"model": nn.Linear(3, 1)}, hparams={"number_of_epochs": 3})
    assert not hasattr(brain.hparams, "lr_scheduler") and getattr(brain.hparams, "lr", 0.1) == 0.1
    with pytest.raises(AttributeError, match=r"hparams has no 'number_of_epoch'\. Did you mean 'number_of_epochs'"):
        brain.hparams.number_of_epoch  # noqa: B018


def test_deterministic_asks_torch_for_it():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        make(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def test_every_run_option_is_read_somewhere():
    """An option that nobody reads does nothing, without a word."""
    package = REPOSITORY / "amp_recipes"
    rooms = ("loop", "precision", "distributed", "checkpoint", "config")
    files = [path for room in rooms for path in (package / room).rglob("*.py") if path.name != "options.py"]
    code = "\n".join(path.read_text() for path in files)
    assert [name for name in RunOptions() if not re.search(rf"\.{name}\b", code)] == []


class Settings(Regression):
    """Has the name of an option for a default of its own, which it changes in a run."""

    max_grad_norm = 7.0

    def on_fit_start(self):
        super().on_fit_start()
        self.max_grad_norm = self.hparams.bound


def test_an_option_that_a_recipe_assigns_in_a_run_holds_also_where_its_class_has_a_default(caplog):
    bounded, same = make(Settings, {"bound": 1e-4}), make(max_grad_norm=1e-4)
    for brain in (bounded, same):
        brain.fit(range(1), batches())
    assert torch.equal(weights(bounded), weights(same)) and "run options: max_grad_norm" in caplog.text


def test_an_evaluation_in_a_hook_of_an_evaluation_has_a_pass_of_its_own():
    class Nests(Regression):
        inner = None

        def on_stage_start(self, stage, epoch=None):
            if self.inner:
                data, self.inner = self.inner, None
                self.evaluate(data)

        def evaluate_batch(self, batch, stage):
            self.add_metric("seen", len(batch[0]), 1e-9)
            return super().evaluate_batch(batch, stage)

    plain, nests = make(Nests), make(Nests)
    nests.inner = batches(2)
    assert nests.evaluate(batches()) == plain.evaluate(batches())
    assert nests.summary.last["test"] == plain.summary.last["test"] and "seen" in plain.summary.last["test"]


def test_what_brain_has_is_not_there_before_its_constructor():
    class Early(Regression):
        def __init__(self, *args):
            self.step = 0
            super().__init__(*args)

    with pytest.raises(AttributeError, match=r"Early.__init__ must call super\(\).__init__\(...\) before"):
        Early({"model": nn.Linear(3, 1)})


def test_what_no_loss_depends_on_is_told_also_if_the_first_windows_have_none(caplog):
    class Waits(Regression):
        def fit_batch(self, batch):
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
            if self.step > 2:
                self.backward(loss)
                self.optimizers_step()
            return loss.detach()

    brain = make(Waits)
    brain.modules["idle"] = nn.Linear(2, 2)
    brain.fit(range(1), batches())
    assert (
        caplog.text.count("the loss of the first update does not depend on them") == 1 and "idle.weight" in caplog.text
    )


def test_metrics_of_a_stage_stay_until_the_next_one_ends():
    class Looks(Regression):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.add_metric("one", 1.0)

        def on_stage_start(self, stage, epoch=None):
            self.known = dict(self.stage_metrics)

    brain = make(Looks)
    brain.fit(range(1), batches(), batches())
    assert brain.known == {"one": 1.0}
