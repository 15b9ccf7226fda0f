"""Experiments written for SpeechBrain's Brain, with ours in its place and all else SpeechBrain's own."""

import functools
import importlib

import pytest
import torch
from programs import run_python
from speechbrain_import import speechbrain as sb
from torch.utils.data import Subset

from amp_recipes import Brain, EpochCounter, Stage, parse_arguments
from amp_recipes.data import EpochLoader, batch_length, make_loader
from amp_recipes.errors import ConfigError

RUN_OPTS = {"device": "cpu", "noprogressbar": True}


@sb.utils.data_pipeline.takes("length")
@sb.utils.data_pipeline.provides("sig", "target")
def signal_pipeline(length):
    yield torch.linspace(0, 1, length)
    yield torch.tensor([float(length)])


def dynamic_items(count=10):
    data = {f"utterance{index}": {"length": 3 + index % 4} for index in range(count)}
    return sb.dataio.dataset.DynamicItemDataset(
        data, dynamic_items=[signal_pipeline], output_keys=["id", "sig", "target"]
    )


class LengthRecipe:
    """Tells a signal's length, as the original's recipes are written: PaddedBatch, annealing, their checkpointer."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        signals, lengths = batch.sig
        if stage == sb.Stage.TRAIN:
            signals = signals + 0.1 * torch.randn_like(signals)
        return self.modules.model(signals.sum(1, keepdim=True)), lengths

    def compute_objectives(self, predictions, batch, stage):
        predicted, _ = predictions
        loss = torch.nn.functional.mse_loss(predicted, batch.target.data)
        self.losses.append(batch.id, predicted, batch.target.data)
        return loss

    def on_stage_start(self, stage, epoch=None):
        self.losses = sb.utils.metric_stats.MetricStats(metric=lambda x, y: ((x - y) ** 2).mean(1))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == sb.Stage.VALID:
            stats = {"loss": stage_loss, "error": self.losses.summarize("average")}
            old_lr, new_lr = self.hparams.lr_annealing(stage_loss)
            sb.nnet.schedulers.update_learning_rate(self.optimizer, new_lr)
            self.hparams.train_logger.log_stats(
                {"Epoch": epoch, "lr": old_lr}, train_stats={"loss": self.train_loss}, valid_stats=stats
            )
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["error"])
        else:
            self.hparams.train_logger.log_stats(
                {"Epoch loaded": self.hparams.epoch_counter.current}, test_stats={"loss": stage_loss}
            )


class LengthBrain(LengthRecipe, Brain):
    """The recipe with our Brain."""


class OriginalLengthBrain(LengthRecipe, sb.Brain):
    """The recipe as it was."""


def experiment(folder, brain_class=LengthBrain, epochs=3, **run_opts):
    """What a recipe's YAML makes, and the Brain of it."""
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    counter = sb.utils.epoch_loop.EpochCounter(epochs)
    annealing = sb.nnet.schedulers.NewBobScheduler(0.02, annealing_factor=0.5, improvement_threshold=0.3)
    hparams = {
        "epoch_counter": counter,
        "lr_annealing": annealing,
        "train_logger": sb.utils.train_logger.FileTrainLogger(str(folder / "train_log.txt")),
        "dataloader_options": {"batch_size": 4, "shuffle": True},
    }
    checkpointer = sb.utils.checkpoints.Checkpointer(
        folder / "save", {"model": model, "counter": counter, "annealing": annealing}
    )
    opt_class = functools.partial(torch.optim.SGD, lr=0.02)
    run_opts = {**({} if brain_class is OriginalLengthBrain else {"seed": 5}), **RUN_OPTS, **run_opts}
    return brain_class({"model": model}, opt_class, hparams, run_opts, checkpointer)


def train(brain):
    brain.fit(
        brain.hparams.epoch_counter,
        dynamic_items(),
        dynamic_items(5),
        train_loader_kwargs=brain.hparams.dataloader_options,
        valid_loader_kwargs={"batch_size": 2},
    )


# ---------------------------------------------------------------------- stages


def test_stages_equal_those_of_the_same_name():
    for ours, theirs in zip(Stage, sb.Stage, strict=True):
        assert ours == theirs and theirs == ours
        assert (ours != theirs, theirs != ours) == (False, False)
        assert {ours: "x"}[theirs] == "x"
        assert sum(ours == other for other in sb.Stage) == 1
    assert Stage.TRAIN != "TRAIN" and torch.float32 != Stage.TRAIN


# ---------------------------------------------------------------------- data


def test_dynamic_items_are_collated_as_their_loader_does():
    loader = make_loader(dynamic_items(), shuffle=False, seed=0, device="cpu", batch_size=4)
    theirs = sb.dataio.dataloader.make_dataloader(dynamic_items(), batch_size=4)
    assert isinstance(loader, EpochLoader)
    for batch, expected in zip(loader, theirs, strict=True):
        assert type(batch) is sb.dataio.batch.PaddedBatch
        assert batch.id == expected.id
        assert torch.equal(batch.sig.data, expected.sig.data) and torch.equal(batch.sig.lengths, expected.sig.lengths)
        assert batch_length(batch) == len(expected)


def test_dynamic_items_in_a_subset_and_with_a_collate_fn_of_the_recipes():
    subset = Subset(dynamic_items(), [1, 3])
    (batch,) = make_loader(subset, shuffle=False, seed=0, device="cpu", batch_size=2)
    assert batch.id == ["utterance1", "utterance3"]
    (ids,) = make_loader(
        subset, shuffle=False, seed=0, device="cpu", batch_size=2, collate_fn=lambda items: [it["id"] for it in items]
    )
    assert ids == ["utterance1", "utterance3"]


def test_speechbrain_is_not_imported_by_us():
    code = "import sys, amp_recipes; sys.exit(any(it.split('.')[0] == 'speechbrain' for it in sys.modules))"
    assert run_python("-c", code).returncode == 0


# ---------------------------------------------------------------------- a run with their checkpointer


def test_experiment_trains_and_evaluates_the_best(tmp_path):
    brain = experiment(tmp_path)
    train(brain)
    kept = brain.checkpointer.list_checkpoints()
    best = min(checkpoint.meta["error"] for checkpoint in kept)
    assert len(kept) <= 2 and brain.optimizer_step == 9
    with torch.no_grad():
        brain.modules.model.weight.fill_(100.0)
    loss = brain.evaluate(dynamic_items(5), min_key="error", test_loader_kwargs={"batch_size": 2})
    assert loss == pytest.approx(best, rel=1e-5)
    log = (tmp_path / "train_log.txt").read_text().splitlines()
    assert len(log) == 4 and log[-1].startswith("Epoch loaded:")


class Killed(Exception):
    """Stands for the end of the process."""


def killed_after(batches):
    class KilledBrain(LengthBrain):
        seen = 0

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            type(self).seen += 1
            if self.seen == batches:
                raise Killed

    return KilledBrain


@pytest.mark.parametrize("batches", [3, 5, *(pytest.param(it, marks=pytest.mark.extended) for it in (2, 4, 8))])
def test_killed_run_goes_on_bit_for_bit(tmp_path, batches):
    whole = experiment(tmp_path / "whole")
    train(whole)
    interval = {"ckpt_interval_steps": 1}
    with pytest.raises(Killed):
        train(experiment(tmp_path / "killed", killed_after(batches), **interval))
    resumed = experiment(tmp_path / "killed", **interval)
    train(resumed)
    assert torch.equal(resumed.modules.model.weight, whole.modules.model.weight)
    assert resumed.optimizer_step == whole.optimizer_step == 9
    assert resumed.train_loss == whole.train_loss
    assert resumed.hparams.lr_annealing.metric_values == whole.hparams.lr_annealing.metric_values
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_debug_saves_where_the_real_run_does_not_look(tmp_path):
    brain = experiment(tmp_path, debug=True, debug_batches=1, debug_epochs=1)
    train(brain)
    assert brain.checkpointer.list_checkpoints()
    assert list((tmp_path / "save").iterdir()) == []


def test_resume_never_leaves_what_else_lies_in_the_save_folder(tmp_path):
    train(experiment(tmp_path, epochs=1))
    (tmp_path / "save" / "label_encoder.txt").write_text("'a' => 0")
    brain = experiment(tmp_path, epochs=1, resume="never")
    train(brain)
    assert brain.optimizer_step == 3
    assert len(list((tmp_path / "save.1").iterdir())) == 1
    assert (tmp_path / "save" / "label_encoder.txt").is_file()
    assert len(brain.checkpointer.list_checkpoints()) == 1


def test_goes_on_from_a_checkpoint_of_the_original_brain(tmp_path, caplog):
    original = experiment(tmp_path, OriginalLengthBrain, epochs=2)
    train(original)
    original_rate = original.optimizer.param_groups[0]["lr"]
    seen = []

    class Seeing(LengthBrain):
        def on_fit_batch_start(self, batch, should_step):
            seen.append((self.modules.model.weight.clone(), self.optimizer.param_groups[0]["lr"]))

    brain = experiment(tmp_path, Seeing, epochs=3)
    train(brain)
    assert brain.hparams.epoch_counter.current == 3 and len(seen) == 3
    weight, rate = seen[0]
    assert torch.equal(weight, original.modules.model.weight) and rate == original_rate
    assert len(brain.hparams.lr_annealing.metric_values) == 3
    assert "saved by SpeechBrain's Brain" in caplog.text


def test_spike_recovery_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Leave `checkpointer` out"):
        experiment(tmp_path, on_spike="lower_lr", output_folder=str(tmp_path / "run"))


def test_our_epoch_counter_in_their_checkpointer(tmp_path):
    class Plain(LengthBrain):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.checkpointer.save_and_keep_only()

    def trained():
        torch.manual_seed(3)
        model, counter = torch.nn.Linear(1, 1), EpochCounter(2)
        checkpointer = sb.utils.checkpoints.Checkpointer(tmp_path, {"model": model, "counter": counter})
        opt_class = functools.partial(torch.optim.SGD, lr=0.02)
        brain = Plain({"model": model}, opt_class, {"epoch_counter": counter}, RUN_OPTS, checkpointer)
        brain.fit(counter, dynamic_items(), train_loader_kwargs={"batch_size": 4})
        return brain

    first, again = trained(), trained()
    assert first.optimizer_step == again.optimizer_step == 6
    assert torch.equal(again.modules.model.weight, first.modules.model.weight)


# ---------------------------------------------------------------------- their parts in our checkpoints


class NormalizedBrain(Brain):
    """Without a checkpointer of the recipe's, with what only SpeechBrain's hooks know how to save."""

    def compute_forward(self, batch, stage):
        signals, lengths = batch.to(self.device).sig
        normalized = self.modules.normalize(signals.unsqueeze(2), lengths)
        return self.modules.model(normalized.mean(1))

    def compute_objectives(self, predictions, batch, stage):
        self.seen = getattr(self, "seen", 0) + (stage == Stage.TRAIN)
        if stage == Stage.TRAIN and self.seen == getattr(self.hparams, "killed_at", None):
            raise Killed
        return torch.nn.functional.mse_loss(predictions, batch.target.data)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == Stage.VALID:
            _, rate = self.hparams.lr_annealing(stage_loss)
            sb.nnet.schedulers.update_learning_rate(self.optimizer, rate)


def normalized(folder, **hparams):
    torch.manual_seed(2)
    norm = importlib.import_module("speechbrain.processing.features").InputNormalization(norm_type="global")
    modules = {"normalize": norm, "model": torch.nn.Linear(1, 1)}
    hparams["lr_annealing"] = sb.nnet.schedulers.NewBobScheduler(0.1, improvement_threshold=0.9)
    run_opts = {**RUN_OPTS, "output_folder": str(folder), "ckpt_interval_steps": 1}
    return NormalizedBrain(modules, functools.partial(torch.optim.SGD, lr=0.1), hparams, run_opts)


def fit_normalized(brain, epochs=3):
    counter = sb.utils.epoch_loop.EpochCounter(epochs)
    options = {"batch_size": 4}
    brain.fit(counter, dynamic_items(), dynamic_items(4), train_loader_kwargs=options, valid_loader_kwargs=options)
    return brain


@pytest.mark.parametrize("killed_at", [8, pytest.param(3, marks=pytest.mark.extended)])
def test_their_scheduler_and_statistics_go_on_in_our_checkpoints(tmp_path, killed_at):
    whole = fit_normalized(normalized(tmp_path / "whole"))
    with pytest.raises(Killed):
        fit_normalized(normalized(tmp_path / "killed", killed_at=killed_at))
    resumed = fit_normalized(normalized(tmp_path / "killed"))
    assert resumed.modules.normalize.count == whole.modules.normalize.count
    assert torch.equal(resumed.modules.normalize.glob_mean, whole.modules.normalize.glob_mean)
    assert torch.equal(resumed.modules.model.weight, whole.modules.model.weight)
    assert resumed.hparams.lr_annealing.metric_values == whole.hparams.lr_annealing.metric_values
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] < 0.1


def test_evaluation_in_a_new_process_has_their_statistics(tmp_path):
    trained = fit_normalized(normalized(tmp_path), epochs=1)
    expected = trained.evaluate(dynamic_items(4), test_loader_kwargs={"batch_size": 4})
    fresh = normalized(tmp_path)
    assert fresh.evaluate(dynamic_items(4), test_loader_kwargs={"batch_size": 4}) == expected
    assert fresh.modules.normalize.count == trained.modules.normalize.count > 0


# ---------------------------------------------------------------------- adversarial, with optimizers of its own


class GanBrain(Brain):
    """As the original's GAN recipes are: `fit_batch` steps by hand, and nothing fills `optimizers_dict`."""

    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        signals, _ = batch.sig
        noise = torch.randn(signals.shape[0], 1, device=self.device)
        return self.modules.generator(noise), batch.target.data

    def compute_objectives(self, predictions, batch, stage, of="generator"):
        made, real = predictions
        fooled = torch.sigmoid(self.modules.discriminator(made))
        if of == "generator":
            return (1 - fooled).pow(2).mean()
        return fooled.pow(2).mean() + (1 - torch.sigmoid(self.modules.discriminator(real))).pow(2).mean()

    def fit_batch(self, batch):
        self.d_optimizer.zero_grad()
        loss = self.compute_objectives(self.compute_forward(batch, sb.Stage.TRAIN), batch, sb.Stage.TRAIN, "critic")
        loss.backward()
        self.d_optimizer.step()
        self.g_optimizer.zero_grad()
        g_loss = self.compute_objectives(self.compute_forward(batch, sb.Stage.TRAIN), batch, sb.Stage.TRAIN)
        g_loss.backward()
        self.g_optimizer.step()
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == getattr(self.hparams, "killed_after", None):
            raise Killed
        return loss.detach().cpu() + g_loss.detach().cpu()

    def init_optimizers(self):
        self.g_optimizer = self.hparams.opt_class(self.modules.generator.parameters())
        self.d_optimizer = self.hparams.opt_class(self.modules.discriminator.parameters())

    def zero_grad(self, set_to_none=False):
        self.g_optimizer.zero_grad(set_to_none)
        self.d_optimizer.zero_grad(set_to_none)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses = [*getattr(self, "losses", []), stage_loss]


def gan(folder, **hparams):
    torch.manual_seed(1)
    modules = {"generator": torch.nn.Linear(1, 1), "discriminator": torch.nn.Linear(1, 1)}
    hparams["opt_class"] = functools.partial(torch.optim.Adam, lr=0.01)
    run_opts = {**RUN_OPTS, "seed": 5, "output_folder": str(folder), "ckpt_interval_steps": 1}
    brain = GanBrain(modules, hparams=hparams, run_opts=run_opts)
    brain.fit(sb.utils.epoch_loop.EpochCounter(2), dynamic_items(), train_loader_kwargs={"batch_size": 4})
    return brain


def test_gan_with_optimizers_of_its_own_goes_on_bit_for_bit(tmp_path):
    """Without a checkpointer of the recipe's: the Brain's own keeps what `init_optimizers` made."""
    whole = gan(tmp_path / "whole")
    with pytest.raises(Killed):
        gan(tmp_path / "killed", killed_after=5)
    resumed = gan(tmp_path / "killed")
    for name, weight in whole.modules.state_dict().items():
        assert torch.equal(resumed.modules.state_dict()[name], weight), name
    assert resumed.losses == whole.losses


# ---------------------------------------------------------------------- options


def test_run_opts_that_their_parser_made(tmp_path):
    argv = ["train.yaml", "--device", "cpu", "--precision", "bf16", "--noprogressbar", "--tqdm_colored_bar", "--lr=1"]
    _, run_opts, _ = sb.parse_arguments(argv)
    brain = LengthBrain({}, hparams={"max_grad_norm": 2.0, "grad_accumulation_factor": 3}, run_opts=run_opts)
    assert (brain.precision, brain.noprogressbar, brain.max_grad_norm) == ("bf16", True, 2.0)
    assert brain.grad_accumulation_factor == 3 and brain.nonfinite_patience == 3


@pytest.mark.parametrize("name", ["auto_mix_prec", "data_parallel_backend", "jit", "profile_training"])
def test_option_of_theirs_that_we_do_not_have_says_what_to_do(name, caplog):
    with pytest.raises(ConfigError, match=f"there is no run option '{name}'. Instead, "):
        LengthBrain({}, run_opts={**RUN_OPTS, name: True})
    with pytest.raises(ConfigError, match=f"'{name}'. Instead, "):
        parse_arguments(["train.yaml", f"--{name}"])
    LengthBrain({}, run_opts={**RUN_OPTS, name: False})
    assert "have no effect here" not in caplog.text
    LengthBrain({}, hparams={name: True}, run_opts=RUN_OPTS)
    assert f"'{name}' does nothing here. Instead, " in caplog.text


def test_hparams_have_the_access_of_a_simple_namespace():
    brain = LengthBrain({}, hparams={"lr": 0.1}, run_opts=RUN_OPTS)
    assert brain.hparams.lr == 0.1 and hasattr(brain.hparams, "lr") and not hasattr(brain.hparams, "wav_augment")
    brain.hparams.lr = 0.2
    with pytest.raises(AttributeError, match="wav_augment"):
        brain.hparams.wav_augment  # noqa: B018
    assert vars(brain.hparams) == {"lr": 0.2}
