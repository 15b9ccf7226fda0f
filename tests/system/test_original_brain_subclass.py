"""Recipes written for the original Brain run as they are: only the imports differ.

The classes here use the original's ways on purpose: positional constructor arguments, `fit_batch` and
`evaluate_batch` written out, losses moved to the CPU, batches moved by the recipe, one batch as a data set.
"""

import pytest
import torch
from device import DEVICE
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset

from amp_recipes import Brain, Checkpointer, EpochCounter, Stage
from amp_recipes.data import to_device

RUN_OPTS = {"device": DEVICE, "noprogressbar": True}


def pairs(count: int = 10, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, 10, generator=generator), torch.rand(count, 10, generator=generator)]


def linear() -> torch.nn.Linear:
    torch.manual_seed(4)
    return torch.nn.Linear(10, 10, device=DEVICE)


class SimpleBrain(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.l1_loss(predictions, batch[1].to(self.device))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_smallest_brain_learns_one_batch(precision):
    model = linear()
    brain = SimpleBrain({"model": model}, lambda x: SGD(x, 0.1), run_opts={**RUN_OPTS, "precision": precision})
    inputs, targets = pairs()
    train_set = ([inputs, targets],)
    valid_set = ([inputs, targets],)

    start = brain.compute_objectives(brain.compute_forward([inputs], Stage.VALID), [inputs, targets], Stage.VALID)
    brain.fit(epoch_counter=range(10), train_set=train_set, valid_set=valid_set)
    end = brain.compute_objectives(brain.compute_forward([inputs], Stage.VALID), [inputs, targets], Stage.VALID)
    assert end < start
    assert brain.optimizer_step + brain.skipped_steps == 10
    assert brain.modules.model is brain.modules["model"] is model

    test_loss = brain.evaluate(valid_set)
    assert isinstance(test_loss, float)
    assert test_loss == pytest.approx(end.item(), rel=1e-5)  # evaluation is fp32 unless asked otherwise


def test_constructor_arguments_by_position():
    hparams = {"lr": 0.25, "nested": {"width": 3}, "compute_cost": torch.nn.functional.mse_loss}

    class Positional(SimpleBrain):
        def compute_objectives(self, predictions, batch, stage):
            return self.hparams.compute_cost(predictions, batch[1])

    checkpointer = None
    brain = Positional({"model": linear()}, lambda x: SGD(x, lr=hparams["lr"]), hparams, dict(RUN_OPTS), checkpointer)
    assert brain.hparams.lr == 0.25
    assert brain.hparams.nested["width"] == 3
    assert not hasattr(brain.hparams, "absent")
    assert brain.checkpointer is None
    brain.fit(range(2), (pairs(),))
    assert brain.optimizer_step == 2
    assert brain.optimizer.param_groups[0]["lr"] == 0.25


class WrittenOutBrain(SimpleBrain):
    """The training step written out, around the scaler, as recipes of the original do it."""

    def fit_batch(self, batch):
        with self.training_ctx:
            outputs = self.compute_forward(batch, Stage.TRAIN)
            loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_grad()
        return loss.detach().cpu()

    def evaluate_batch(self, batch, stage):
        with torch.no_grad():
            outputs = self.compute_forward(batch, stage=stage)
            loss = self.compute_objectives(outputs, batch, stage=stage)
        return loss.detach().cpu()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_written_out_fit_batch_trains_like_the_loop_in_it(precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batches = [pairs(seed=seed) for seed in range(3)]
    run_opts = {**RUN_OPTS, "precision": precision, "init_scale": 256.0, "growth_interval": 4}
    brain = WrittenOutBrain({"model": linear()}, lambda x: SGD(x, 0.1, momentum=0.9, foreach=False), run_opts=run_opts)
    brain.fit(range(3), batches, batches[:1])

    model = linear()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision == "fp16", init_scale=256.0, growth_interval=4)
    for inputs, targets in to_device(batches * 3, DEVICE):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=precision != "fp32"):
            loss = torch.nn.functional.l1_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(brain.modules.model.weight, model.weight)
    assert torch.equal(brain.modules.model.bias, model.bias)
    assert brain.scaler.get_scale() == scaler.get_scale()


class OneLineStepBrain(SimpleBrain):
    """The shortest override that recipes use: no clipping, one optimizer."""

    def fit_batch(self, batch):
        outputs = self.compute_forward(batch, Stage.TRAIN)
        loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


def test_fit_batch_without_the_framework_s_verbs():
    batches = [pairs(seed=seed) for seed in range(2)]
    brain = OneLineStepBrain({"model": linear()}, lambda x: Adam(x, lr=0.01, foreach=False), run_opts=RUN_OPTS)
    stage_losses = []
    brain.on_stage_end = lambda stage, stage_loss, epoch=None: stage_losses.append(float(stage_loss))
    brain.fit(range(4), batches)
    model = linear()
    optimizer = Adam(model.parameters(), lr=0.01, foreach=False)
    for _ in range(4):
        losses = []
        for inputs, targets in to_device(batches, DEVICE):
            optimizer.zero_grad()
            loss = torch.nn.functional.l1_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert torch.equal(brain.modules.model.weight, model.weight)
    assert stage_losses[-1] == pytest.approx(sum(losses) / 2, rel=1e-6)


class AccumulatingBrain(SimpleBrain):
    """Accumulation in the recipe: batches are counted from 1, gradients wait for every second one."""

    def fit_batch(self, batch):
        should_step = (self.step % self.grad_accumulation_factor) == 0
        self.on_fit_batch_start(batch, should_step)
        with self.no_sync(not should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            scaled_loss = self.scaler.scale(loss / self.grad_accumulation_factor)
            scaled_loss.backward()
        if should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, should_step)
        return loss.detach().cpu()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.announced = [*getattr(self, "announced", []), (self.step, should_step)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_accumulation_written_out_by_the_recipe(precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batches = [pairs(seed=seed) for seed in range(4)]
    run_opts = {**RUN_OPTS, "precision": precision, "grad_accumulation_factor": 2, "init_scale": 256.0}
    brain = AccumulatingBrain({"model": linear()}, lambda x: SGD(x, 0.1), run_opts=run_opts)
    brain.fit(range(2), batches)
    assert brain.announced == [(1, False), (2, True), (3, False), (4, True)] * 2

    model = linear()
    optimizer = SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision == "fp16", init_scale=256.0)
    for index, (inputs, targets) in enumerate(to_device(batches * 2, DEVICE)):
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=precision != "fp32"):
            loss = torch.nn.functional.l1_loss(model(inputs), targets)
        scaler.scale(loss / 2).backward()
        if index % 2 == 1:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert torch.equal(brain.modules.model.weight, model.weight)
    assert brain.optimizer_step == 4


class OverridingBrain(SimpleBrain):
    """`init_optimizers` and `zero_grad` of the recipe's own, two optimizers, checkpoints kept by loss."""

    def init_optimizers(self):
        self.body_optimizer = self.opt_class(self.modules.body.parameters())
        self.head_optimizer = self.hparams.head_opt_class(self.modules.head.parameters())
        self.optimizers_dict = {"body": self.body_optimizer, "head": self.head_optimizer}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("body_optimizer", self.body_optimizer)
            self.checkpointer.add_recoverable("head_optimizer", self.head_optimizer)

    def zero_grad(self, set_to_none=False):
        self.zeroed = getattr(self, "zeroed", 0) + 1
        self.body_optimizer.zero_grad(set_to_none)
        self.head_optimizer.zero_grad(set_to_none)

    def compute_forward(self, batch, stage):
        inputs, _ = batch
        return self.modules.head(torch.relu(self.modules.body(inputs.to(self.device))))

    def on_stage_start(self, stage, epoch=None):
        self.stages = [*getattr(self, "stages", []), (stage, epoch)]

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == Stage.VALID:
            self.valid_losses = [*getattr(self, "valid_losses", []), float(stage_loss)]
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss, "epoch": epoch}, min_keys=["loss"])
        else:
            self.test_loss = stage_loss


@pytest.fixture
def overriding(tmp_path):
    torch.manual_seed(9)
    modules = {"body": torch.nn.Linear(10, 6), "head": torch.nn.Linear(6, 10)}
    checkpointer = Checkpointer(tmp_path / "save", recoverables=dict(modules))
    hparams = {"head_opt_class": lambda x: SGD(x, 0.05), "epoch_counter": EpochCounter(limit=4)}
    return OverridingBrain(modules, lambda x: Adam(x, lr=0.01), hparams, RUN_OPTS, checkpointer)


def test_overridden_optimizers_zero_grad_and_stage_end(overriding):
    brain = overriding
    train_set = [pairs(seed=seed) for seed in range(2)]
    brain.fit(brain.hparams.epoch_counter, train_set, [pairs(seed=7)])
    expected = [(stage, epoch) for epoch in range(1, 5) for stage in (Stage.TRAIN, Stage.VALID)]
    assert brain.stages == expected
    assert brain.optimizer_step == 8
    assert brain.zeroed >= 8
    assert 0 < float(brain.train_loss) < 10
    assert len(brain.valid_losses) == 4
    # The recipe's own names reach the optimizers that trained.
    assert brain.body_optimizer.state_dict()["state"]

    found = brain.checkpointer.find_checkpoint(min_key="loss")
    assert found.meta["loss"] == pytest.approx(min(brain.valid_losses), rel=1e-6)


def test_evaluate_loads_the_best_checkpoint_by_key(overriding):
    brain = overriding
    brain.fit(brain.hparams.epoch_counter, [pairs()], [pairs(seed=7)])
    best = min(brain.valid_losses)
    with torch.no_grad():
        for parameter in brain.modules.parameters():
            parameter.fill_(100.0)
    test_loss = brain.evaluate([pairs(seed=7)], min_key="loss", progressbar=False)
    assert test_loss == pytest.approx(best, rel=1e-5)
    assert brain.stages[-1] == (Stage.TEST, None)
    assert float(brain.test_loss) == pytest.approx(test_loss, rel=1e-6)


def test_evaluate_with_max_key_loads_the_largest(tmp_path):
    model = linear()
    checkpointer = Checkpointer(tmp_path / "save", recoverables={"model": model})
    brain = SimpleBrain({"model": model}, lambda x: SGD(x, 0.1), {}, RUN_OPTS, checkpointer)
    for accuracy, value in ((0.1, 1.0), (0.9, 2.0), (0.5, 3.0)):
        with torch.no_grad():
            model.weight.fill_(value)
        checkpointer.save_checkpoint(meta={"accuracy": accuracy})
    brain.evaluate((pairs(),), max_key="accuracy")
    assert torch.equal(model.weight, torch.full((10, 10), 2.0, device=DEVICE))


class MovableBatch:
    """A batch object with `.to`, such as data sets of padded signals yield."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets
        self.moves = 0

    def to(self, *args, **kwargs):
        self.inputs = self.inputs.to(*args, **kwargs)
        self.targets = self.targets.to(*args, **kwargs)
        self.moves += 1
        return self


class BatchObjectBrain(Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        return self.modules.model(batch.inputs)

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.l1_loss(predictions, batch.targets)


def test_batches_with_their_own_to():
    brain = BatchObjectBrain({"model": linear()}, lambda x: SGD(x, 0.1), run_opts=RUN_OPTS)
    batches = [MovableBatch(*pairs(seed=seed)) for seed in range(3)]
    brain.fit(range(2), batches, batches[:1])
    assert brain.optimizer_step == 6
    assert isinstance(brain.evaluate(batches[:1]), float)
    assert all(batch.moves >= 2 for batch in batches)


class Samples(Dataset):
    """Twelve samples; its author also gives the loader."""

    def __init__(self):
        self.inputs, self.targets = pairs(12)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

    @staticmethod
    def collate(samples):
        return MovableBatch(*(torch.stack(values) for values in zip(*samples, strict=True)))

    def loader(self, batch_size):
        return DataLoader(self, batch_size=batch_size, collate_fn=self.collate)


def test_loader_that_comes_with_the_dataset():
    brain = BatchObjectBrain({"model": linear()}, lambda x: SGD(x, 0.1), run_opts=RUN_OPTS)
    brain.fit(range(2), Samples().loader(5), Samples().loader(6))
    assert brain.optimizer_step == 2 * 3


def test_dataset_with_loader_kwargs():
    brain = BatchObjectBrain({"model": linear()}, lambda x: SGD(x, 0.1), run_opts=RUN_OPTS)
    kwargs = {"batch_size": 4, "collate_fn": Samples.collate}
    brain.fit(range(2), Samples(), Samples(), train_loader_kwargs=kwargs, valid_loader_kwargs=kwargs)
    assert brain.optimizer_step == 2 * 3
    assert isinstance(brain.evaluate(Samples(), test_loader_kwargs=kwargs), float)


def test_make_dataloader_overridden_by_the_recipe():
    class OwnLoader(BatchObjectBrain):
        def make_dataloader(self, dataset, stage, **loader_kwargs):
            self.made = [*getattr(self, "made", []), (stage, loader_kwargs)]
            return dataset.loader(loader_kwargs["batch_size"])

    brain = OwnLoader({"model": linear()}, lambda x: SGD(x, 0.1), run_opts=RUN_OPTS)
    brain.fit(
        range(1), Samples(), Samples(), train_loader_kwargs={"batch_size": 3}, valid_loader_kwargs={"batch_size": 4}
    )
    assert brain.optimizer_step == 4
    assert brain.made == [(Stage.TRAIN, {"batch_size": 3}), (Stage.VALID, {"batch_size": 4})]


def test_modules_and_modes_during_the_stages():
    modes = []

    class Modes(SimpleBrain):
        def compute_forward(self, batch, stage):
            modes.append((stage, self.modules.training, torch.is_grad_enabled()))
            return super().compute_forward(batch, stage)

    brain = Modes({"model": linear()}, lambda x: SGD(x, 0.1), run_opts=RUN_OPTS)
    brain.fit(range(1), (pairs(),), (pairs(),))
    brain.evaluate((pairs(),))
    assert modes == [(Stage.TRAIN, True, True), (Stage.VALID, False, False), (Stage.TEST, False, False)]


def test_brain_without_optimizer_evaluates():
    brain = SimpleBrain({"model": linear()}, run_opts=RUN_OPTS)
    inputs, targets = to_device(pairs(), DEVICE)
    with torch.no_grad():
        expected = torch.nn.functional.l1_loss(brain.modules.model(inputs), targets)
    assert brain.evaluate(([inputs, targets],)) == pytest.approx(expected.item(), rel=1e-6)
