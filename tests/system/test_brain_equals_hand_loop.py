"""Training through Brain equals, bit for bit, the loop that one would write by hand with torch alone.

Every scenario of PyTorch's page of mixed-precision examples stands here twice: once as a Brain recipe, once
as a plain loop over `torch.autocast`, `torch.amp.GradScaler` and `optimizer.step`. Parameters, buffers,
optimizer state and every loss must be equal; no tolerance anywhere but in the averages.

The only thing that the hand-written loops add to the textbook is what Brain promises about a skipped update:
buffers go back to where they were, and the schedule and the average of weights stand still.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from device import DEVICE
from hosts import hosts_in_turn, with_hosts
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import amp_recipes
from amp_recipes import Brain, Stage
from amp_recipes.data import to_device

pytestmark = pytest.mark.usefixtures("host")  # verdicts known at once, and queued

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A precision, and for fp16 the scale that training starts from."""

    precision: str
    init_scale: float = 2.0**8
    growth_interval: int = 4  # short, so that the scale also grows during the few steps here

    @property
    def overflows(self) -> bool:
        """Whether the first updates are skipped: gradients of these models stay below 2**4."""
        return self.precision == "fp16" and self.init_scale >= 2.0**20

    def autocast(self) -> torch.autocast:
        dtype = DTYPES[self.precision]
        return torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype != torch.float32)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(
            DEVICE.type,
            enabled=self.precision == "fp16",
            init_scale=self.init_scale,
            growth_interval=self.growth_interval,
        )

    def run_opts(self, **options) -> dict:
        return {
            "device": DEVICE,
            "precision": self.precision,
            "init_scale": self.init_scale,
            "growth_interval": self.growth_interval,
            "noprogressbar": True,
            "max_grad_norm": 0.0,
            **options,
        }


CASES = {precision: Case(precision) for precision in DTYPES}
OVERFLOW = CASES["fp16-overflow"] = Case("fp16", init_scale=2.0**24)
every_case = hosts_in_turn(["case"], case=[*CASES])
every_precision = hosts_in_turn(["case"], case=[*DTYPES])


@pytest.fixture
def case(request):
    return CASES[request.param]


def with_cases(cases: Iterable[str] = CASES, **factors) -> pytest.MarkDecorator:
    return with_hosts(["case"], case=[*cases], **factors)


def cases_in_turn(cases: Iterable[str] = CASES, **factors) -> pytest.MarkDecorator:
    return hosts_in_turn(["case"], case=[*cases], **factors)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "fused_momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    # Chosen, or Brain would take the fused kernels on a device that queues its work, which round otherwise.
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, foreach=False),
    "fused_adamw": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
}


class Network(nn.Module):
    """Two layers; BatchNorm and dropout between them on demand."""

    def __init__(self, batchnorm: bool = False, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x_BD)))))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return build().to(DEVICE)


def make_batches(count: int = 6, size: int = 4, dim: int = 8) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(size, dim, generator=generator) for _ in range(2)] for _ in range(count)]


def mean_square(predictions: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(predictions, targets)


class RecordingBrain(Brain):
    """A regression recipe that keeps every loss and every `should_step` it is shown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses: list[Tensor] = []
        self.steps_announced: list[bool] = []
        self.stage_losses: list[float] = []

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return mean_square(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.losses.append(loss.detach().clone())
        self.steps_announced.append(bool(should_step))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        assert stage is Stage.TRAIN
        self.stage_losses.append(float(stage_loss))


@dataclass
class HandRun:
    """What a hand-written loop leaves behind."""

    losses: list[Tensor]
    counted: list[list[float]]  # per epoch: losses of the windows whose update was taken
    taken: int = 0
    skipped: int = 0


def restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train_by_hand(
    case: Case,
    model: nn.Module,
    optimizer: Optimizer,
    batches: list,
    *,
    epochs: int = 2,
    max_norm: float | None = None,
    window: int = 1,
    weigh: Callable[[list], float] = lambda batch: 1.0,
    scheduler=None,
    schedule_every: str = "step",
    average: AveragedModel | None = None,
) -> HandRun:
    """The textbook loop with accumulation, clipping, a schedule and an average of weights."""
    batches = to_device(batches, DEVICE)
    scaler = case.scaler()
    run = HandRun(losses=[], counted=[])
    model.train()
    for _ in range(epochs):
        run.counted.append([])
        for start in range(0, len(batches), window):
            chunk = batches[start : start + window]
            total = sum(weigh(batch) for batch in chunk)
            buffers = copy_buffers(model)
            losses = []
            optimizer.zero_grad(set_to_none=True)
            for batch in chunk:
                with case.autocast():
                    loss = mean_square(model(batch[0]), batch[1])
                scaler.scale(loss * weigh(batch) / total).backward()
                losses.append(loss.detach().clone())
            run.losses += losses
            scaler.unscale_(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            finite = all(bool(torch.isfinite(p.grad).all()) for p in parameters)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(parameters, max_norm)
            scaler.step(optimizer)
            scaler.update()
            if not finite:
                restore(model, buffers)
                run.skipped += 1
                continue
            run.taken += 1
            run.counted[-1] += [loss.item() for loss in losses]
            if scheduler is not None and schedule_every == "step":
                scheduler.step()
            if average is not None:
                average.update_parameters(model)
        if scheduler is not None and schedule_every == "epoch":
            scheduler.step()
    assert run.taken > 0
    assert (run.skipped > 0) == case.overflows
    return run


def assert_same_tensors(ours: Iterable[Tensor], theirs: Iterable[Tensor], what: str) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) > 0, what
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what} {index} differs by {(a - b).abs().max()}"


def assert_same_model(ours: nn.Module, theirs: nn.Module) -> None:
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.isfinite(value).all() for value in expected.values())
    for name in expected:
        assert torch.equal(state[name], expected[name]), f"{name} differs"


def assert_same_optimizer(ours: Optimizer, theirs: Optimizer) -> None:
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert state["state"][index].keys() == entries.keys()
        for name, value in entries.items():
            found = state["state"][index][name]
            same = torch.equal(found, value) if isinstance(value, Tensor) else found == value
            assert same, f"{name} of parameter {index} differs: {found} against {value}"
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (ours, theirs)]
    assert rates[0] == rates[1]


def assert_same_run(brain: RecordingBrain, model: nn.Module, optimizer: Optimizer, run: HandRun) -> None:
    assert_same_tensors(brain.losses, run.losses, "loss")
    assert_same_model(brain.modules.model, model)
    assert_same_optimizer(brain.optimizer, optimizer)
    assert (brain.optimizer_step, brain.skipped_steps) == (run.taken, run.skipped)


def compare(
    case: Case,
    *,
    optimizer: str = "adamw",
    build: Callable[[], nn.Module] = Network,
    batches: list | None = None,
    max_norm: float | None = None,
    window: int = 1,
) -> tuple[RecordingBrain, HandRun]:
    """Train one network through Brain and by hand, from one seed; they must end equal."""
    batches = make_batches() if batches is None else batches
    if case.overflows:
        batches = batches * 3 * window  # the scale needs some updates to come down
    model = seeded(build)
    theirs = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(3)
    run = train_by_hand(case, model, theirs, batches, max_norm=max_norm, window=window)

    options = case.run_opts(max_grad_norm=max_norm or 0.0, grad_accumulation_factor=window)
    brain = RecordingBrain({"model": seeded(build)}, OPTIMIZERS[optimizer], run_opts=options)
    torch.manual_seed(3)
    brain.fit(range(2), batches)
    assert_same_run(brain, model, theirs, run)
    for stage_loss, counted in zip(brain.stage_losses, run.counted, strict=True):
        assert stage_loss == pytest.approx(math.fsum(counted) / len(counted), rel=1e-6)
    return brain, run


# torch's fused SGD keeps uninitialised momentum when its very first update is skipped, so the hand-written
# loop is no reference there; tests/corpus/test_bad_batches.py holds that case against a run without the skip.
@with_cases(DTYPES, optimizer=[*OPTIMIZERS])
def test_plain_training(case, optimizer):
    compare(case, optimizer=optimizer)


@hosts_in_turn(optimizer=[name for name in OPTIMIZERS if name != "fused_momentum"])
def test_training_that_starts_with_skipped_updates(optimizer):
    compare(OVERFLOW, optimizer=optimizer)


@with_cases(optimizer=["momentum", "adamw", "fused_adamw"])
def test_clipping(case, optimizer):
    brain, _ = compare(case, optimizer=optimizer, max_norm=0.1)
    free, _ = compare(case, optimizer=optimizer)
    assert not torch.equal(brain.modules.model.first.weight, free.modules.model.first.weight)


@every_case
def test_accumulation_with_a_short_last_window(case):
    brain, _ = compare(case, batches=make_batches(7), window=4, max_norm=0.2)
    if not case.overflows:
        assert brain.steps_announced == [False, False, False, True, False, False, True] * 2


@every_precision
def test_accumulation_window_longer_than_the_epoch(case):
    compare(case, optimizer="momentum", batches=make_batches(3), window=5)


@every_case
def test_batchnorm_and_dropout(case):
    compare(case, build=lambda: Network(batchnorm=True, dropout=0.3))


@every_case
def test_batchnorm_and_dropout_under_accumulation(case):
    batches = make_batches(5)
    compare(case, build=lambda: Network(batchnorm=True, dropout=0.3), batches=batches, window=2)


@every_case
def test_default_options_clip_at_five(case):
    """The only option that the hand-written loop has to know about is the default bound on the norm."""
    batches = [[10 * inputs, 50 * targets] for inputs, targets in make_batches(4)]
    if case.precision == "fp16" and not case.overflows:
        case = Case("fp16", init_scale=1.0)
    model = seeded(Network)
    theirs = OPTIMIZERS["sgd"](model.parameters())
    run = train_by_hand(case, model, theirs, batches, epochs=4, max_norm=5.0)
    options = case.run_opts()
    del options["max_grad_norm"]
    brain = RecordingBrain({"model": seeded(Network)}, OPTIMIZERS["sgd"], run_opts=options)
    brain.fit(range(4), batches)
    assert_same_run(brain, model, theirs, run)


@with_cases(interval=["step", "epoch"], optimizer=["momentum", "fused_adamw"])
def test_learning_rate_schedule(case, interval, optimizer):
    batches = make_batches(6) * (3 if case.overflows else 1)
    model = seeded(Network)
    theirs = OPTIMIZERS[optimizer](model.parameters())
    scheduler = ExponentialLR(theirs, 0.8)
    run = train_by_hand(case, model, theirs, batches, scheduler=scheduler, schedule_every=interval)

    brain = RecordingBrain(
        {"model": seeded(Network)},
        OPTIMIZERS[optimizer],
        {"lr_scheduler": lambda ours: ExponentialLR(ours, 0.8)},
        case.run_opts(lr_scheduler_interval=interval),
    )
    brain.fit(range(2), batches)
    assert_same_run(brain, model, theirs, run)
    assert theirs.param_groups[0]["lr"] < theirs.param_groups[0]["initial_lr"]


@cases_in_turn(optimizer=["adamw", "fused_adamw"])
def test_average_of_weights(case, optimizer):
    batches = make_batches(6) * (3 if case.overflows else 1)
    model = seeded(Network)
    theirs = OPTIMIZERS[optimizer](model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average.update_parameters(model)  # the first call copies: the average starts from the initial weights
    run = train_by_hand(case, model, theirs, batches, average=average)

    class Evaluated(RecordingBrain):
        """Keeps the weights that validation sees: those of the average."""

        def compute_forward(self, batch, stage):
            if stage is Stage.VALID:
                self.seen = [p.detach().clone() for p in self.modules.model.parameters()]
            return super().compute_forward(batch, stage)

        def on_stage_end(self, stage, stage_loss, epoch=None):
            pass

    brain = Evaluated({"model": seeded(Network)}, OPTIMIZERS[optimizer], run_opts=case.run_opts(ema_decay=0.7))
    brain.fit(range(2), batches, batches[:1])
    assert_same_run(brain, model, theirs, run)
    assert_same_tensors(brain.seen, average.module.parameters(), "averaged parameter")


@every_case
def test_windows_weighted_by_tokens(case):
    """sum(loss_i * w_i) / sum(w_i) over each window. The sums are powers of two, so no order of the
    multiplication and the division can change a bit."""
    tokens = [3, 1, 4, 12, 11, 5, 2]
    batches = [[*batch, count] for batch, count in zip(make_batches(7), tokens, strict=True)]
    epochs = 12 if case.overflows else 2

    class Weighted(RecordingBrain):
        def batch_weight(self, batch):
            return batch[2]

    model = seeded(Network)
    theirs = OPTIMIZERS["sgd"](model.parameters())
    run = train_by_hand(case, model, theirs, batches, epochs=epochs, window=2, weigh=lambda batch: batch[2])
    options = case.run_opts(grad_accumulation_factor=2)
    brain = Weighted({"model": seeded(Network)}, OPTIMIZERS["sgd"], run_opts=options)
    brain.fit(range(epochs), batches)
    assert_same_run(brain, model, theirs, run)
    last = run.losses[-7:]
    expected = sum(loss.item() * count for loss, count in zip(last, tokens, strict=True)) / sum(tokens)
    assert brain.stage_losses[-1] == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- several optimizers


class TwoOptimizers(RecordingBrain):
    """One loss over two modules, each with an optimizer of its own."""

    def compute_forward(self, batch, stage):
        return self.modules.head(torch.relu(self.modules.body(batch[0])))

    def init_optimizers(self):
        self.optimizers_dict = {
            "body": OPTIMIZERS["momentum"](self.modules.body.parameters()),
            "head": OPTIMIZERS["adamw"](self.modules.head.parameters()),
        }


@cases_in_turn(max_norm=[0.0, 0.05])
def test_two_optimizers_with_one_update_of_the_scale(case, max_norm):
    batches = make_batches() * (3 if case.overflows else 1)
    body, head = seeded(lambda: nn.Linear(8, 8)), seeded(lambda: nn.Linear(8, 8))
    optimizers = [OPTIMIZERS["momentum"](body.parameters()), OPTIMIZERS["adamw"](head.parameters())]
    scaler = case.scaler()
    losses, skipped = [], 0
    for inputs, targets in to_device(batches * 2, DEVICE):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with case.autocast():
            loss = mean_square(head(torch.relu(body(inputs))), targets)
        scaler.scale(loss).backward()
        losses.append(loss.detach())
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        parameters = [*body.parameters(), *head.parameters()]
        finite = all(bool(torch.isfinite(p.grad).all()) for p in parameters)
        if max_norm:
            nn.utils.clip_grad_norm_(body.parameters(), max_norm)
            nn.utils.clip_grad_norm_(head.parameters(), max_norm)
        for optimizer in optimizers:
            if finite:  # all or none; torch alone would decide for each
                scaler.step(optimizer)
        scaler.update()
        skipped += not finite
    assert (skipped > 0) == case.overflows

    modules = {"body": seeded(lambda: nn.Linear(8, 8)), "head": seeded(lambda: nn.Linear(8, 8))}
    brain = TwoOptimizers(modules, run_opts=case.run_opts(max_grad_norm=max_norm))
    brain.fit(range(2), batches)
    assert_same_tensors(brain.losses, losses, "loss")
    assert_same_model(brain.modules.body, body)
    assert_same_model(brain.modules.head, head)
    assert_same_optimizer(brain.optimizers_dict["body"], optimizers[0])
    assert_same_optimizer(brain.optimizers_dict["head"], optimizers[1])
    assert (brain.optimizer_step, brain.skipped_steps) == (len(losses) - skipped, skipped)
    if case.precision == "fp16":
        assert brain.scaler.get_scale() == scaler.get_scale()


def critic_loss(critic: nn.Module, generator: nn.Module, noise: Tensor, real: Tensor) -> Tensor:
    return (critic(generator(noise).detach()) - critic(real)).float().mean()


def generator_loss(critic: nn.Module, generator: nn.Module, noise: Tensor) -> Tensor:
    return -critic(generator(noise)).float().mean()


CRITIC_STEPS = 3


class Adversarial(Brain):
    """Three critic updates and one generator update in each iteration, through the verbs of Brain."""

    losses: list[Tensor]

    def init_optimizers(self):
        self.optimizers_dict = {
            "critic": OPTIMIZERS["adamw"](self.modules.critic.parameters()),
            "generator": OPTIMIZERS["adamw"](self.modules.generator.parameters()),
        }

    def fit_batch(self, batch):
        noise, real = batch
        for _ in range(CRITIC_STEPS):
            self.zero_grad()
            with self.training_ctx:
                loss = critic_loss(self.modules.critic, self.modules.generator, noise, real)
            self.backward(loss)
            self.optimizers_step("critic")
        self.zero_grad()
        with self.training_ctx:
            loss = generator_loss(self.modules.critic, self.modules.generator, noise)
        self.backward(loss)
        self.optimizers_step("generator")
        self.losses.append(loss.detach().clone())
        return loss.detach()


@cases_in_turn(DTYPES, max_norm=[0.0, 0.05])
def test_several_critic_steps_in_one_iteration(case, max_norm):
    """The scale grows every fourth update, so an update in the wrong place would show in the weights."""
    batches = make_batches(5)
    critic, generator = seeded(Network), seeded(Network)
    critic_optimizer = OPTIMIZERS["adamw"](critic.parameters())
    generator_optimizer = OPTIMIZERS["adamw"](generator.parameters())
    scaler = case.scaler()
    losses = []

    def update(optimizer, module, loss):
        critic.zero_grad()
        generator.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if max_norm:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        scaler.step(optimizer)

    for noise, real in to_device(batches * 2, DEVICE):
        for index in range(CRITIC_STEPS):
            if index > 0:
                scaler.update()
            with case.autocast():
                loss = critic_loss(critic, generator, noise, real)
            update(critic_optimizer, critic, loss)
        with case.autocast():
            loss = generator_loss(critic, generator, noise)
        update(generator_optimizer, generator, loss)
        scaler.update()
        losses.append(loss.detach())

    options = case.run_opts(max_grad_norm=max_norm)
    brain = Adversarial({"critic": seeded(Network), "generator": seeded(Network)}, run_opts=options)
    brain.losses = []
    brain.fit(range(2), batches)
    assert_same_tensors(brain.losses, losses, "loss")
    assert_same_model(brain.modules.critic, critic)
    assert_same_model(brain.modules.generator, generator)
    assert_same_optimizer(brain.optimizers_dict["critic"], critic_optimizer)
    assert_same_optimizer(brain.optimizers_dict["generator"], generator_optimizer)
    assert brain.skipped_steps == 0
    if case.precision == "fp16":
        assert brain.scaler.get_scale() == scaler.get_scale() > case.init_scale


def test_several_critic_steps_survive_an_overflow_at_the_start():
    """Each critic step answers for itself: the scale comes down, then both networks learn."""
    modules = {"critic": seeded(Network), "generator": seeded(Network)}
    brain = Adversarial(modules, run_opts=OVERFLOW.run_opts(init_scale=2.0**26))
    brain.losses = []
    before = copy.deepcopy(brain.modules.state_dict())
    brain.fit(range(3), make_batches(6))
    after = brain.modules.state_dict()
    assert brain.skipped_steps > 0
    assert all(torch.isfinite(value).all() for value in after.values())
    for part in ("critic.first.weight", "generator.first.weight"):
        assert not torch.equal(before[part], after[part])


@every_case
def test_frozen_optimizer_leaves_its_module_alone(case):
    """`freeze_optimizers` returns the ones that may step, as a hand-written loop leaves one out."""
    batches = make_batches() * (3 if case.overflows else 1)
    body, head = seeded(lambda: nn.Linear(8, 8)), seeded(lambda: nn.Linear(8, 8))
    optimizer = OPTIMIZERS["adamw"](head.parameters())
    scaler = case.scaler()
    for inputs, targets in to_device(batches, DEVICE):
        body.zero_grad()
        optimizer.zero_grad()
        with case.autocast():
            loss = mean_square(head(torch.relu(body(inputs))), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    class Frozen(TwoOptimizers):
        def freeze_optimizers(self, optimizers):
            return {name: optimizer for name, optimizer in optimizers.items() if name == "head"}

    modules = {"body": seeded(lambda: nn.Linear(8, 8)), "head": seeded(lambda: nn.Linear(8, 8))}
    brain = Frozen(modules, run_opts=case.run_opts())
    brain.fit(range(1), batches)
    assert_same_model(brain.modules.body, body)
    assert_same_model(brain.modules.head, head)


# ---------------------------------------------------------------- unusual gradients


class WithUnused(Network):
    """Its last layer gets no gradient, ever."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(8, 8)


@cases_in_turn(DTYPES, optimizer=["momentum", "fused_adamw"])
def test_parameters_without_gradient(case, optimizer):
    batches = make_batches()
    model = seeded(WithUnused)
    theirs = OPTIMIZERS[optimizer](model.parameters())
    scaler = case.scaler()
    for inputs, targets in to_device(batches, DEVICE):
        theirs.zero_grad()
        with case.autocast():
            loss = mean_square(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(theirs)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(theirs)
        scaler.update()
    options = case.run_opts(max_grad_norm=0.3)
    brain = RecordingBrain({"model": seeded(WithUnused)}, OPTIMIZERS[optimizer], run_opts=options)
    brain.fit(range(1), batches)
    assert_same_model(brain.modules.model, model)
    assert_same_optimizer(brain.optimizer, theirs)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8, sparse=True)

    def forward(self, index_B: Tensor) -> Tensor:
        return self.table(index_B)


@cases_in_turn(max_norm=[0.0, 0.05])
def test_sparse_gradients(case, max_norm):
    """Indices repeat, so only the coalesced values have the gradient's norm; torch refuses to clip these."""
    generator = torch.Generator().manual_seed(8)
    batches = [
        [torch.randint(0, 12, (16,), generator=generator), torch.randn(16, 8, generator=generator)]
        for _ in range(36 if case.overflows else 6)
    ]
    model = seeded(Lookup)
    theirs = OPTIMIZERS["sgd"](model.parameters())
    scaler = case.scaler()
    for index, targets in to_device(batches, DEVICE):
        theirs.zero_grad()
        with case.autocast():
            # Only a low-precision op between the table and the loss can overflow.
            loss = mean_square(model(index) @ torch.eye(8, device=DEVICE), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(theirs)
        if max_norm > 0:
            gradient = model.table.weight.grad.coalesce()
            norm = torch.linalg.vector_norm(gradient.values())
            assert not norm.isfinite() or norm > max_norm
            gradient.values().mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
            model.table.weight.grad = gradient
        scaler.step(theirs)
        scaler.update()

    class Projected(RecordingBrain):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch[0]) @ torch.eye(8, device=DEVICE)

    options = case.run_opts(max_grad_norm=max_norm)
    brain = Projected({"model": seeded(Lookup)}, OPTIMIZERS["sgd"], run_opts=options)
    brain.fit(range(1), batches)
    torch.testing.assert_close(brain.modules.model.table.weight, model.table.weight, rtol=1e-6, atol=1e-7)
    if case.precision == "fp16":
        assert brain.scaler.get_scale() == scaler.get_scale()
    assert (brain.skipped_steps > 0) == case.overflows


# ---------------------------------------------------------------- gradient penalty


class PenaltyOutside(RecordingBrain):
    """The penalty in a `fit_batch` of its own: gradients are taken outside autocast."""

    def fit_batch(self, batch):
        with self.training_ctx:
            loss = mean_square(self.modules.model(batch[0]), batch[1])
        gradients = self.gradients(loss, list(self.modules.model.parameters()))
        with self.training_ctx:
            loss = loss + penalty(gradients)
        self.backward(loss)
        self.optimizers_step()
        self.losses.append(loss.detach().clone())
        return loss.detach()


class PenaltyInObjectives(RecordingBrain):
    """The penalty as a part of the loss: the recipe overrides nothing else."""

    def compute_objectives(self, predictions, batch, stage):
        loss = mean_square(predictions, batch[1])
        return loss + penalty(self.gradients(loss, list(self.modules.model.parameters())))


def penalty(gradients: Iterable[Tensor]) -> Tensor:
    return sum(gradient.pow(2).sum() for gradient in gradients).sqrt()


@cases_in_turn(recipe=[PenaltyOutside, PenaltyInObjectives])
def test_gradient_penalty(case, recipe):
    batches = make_batches() * (3 if case.overflows else 1)
    model = seeded(Network)
    theirs = OPTIMIZERS["adamw"](model.parameters())
    scaler = case.scaler()
    losses, skipped = [], 0
    for inputs, targets in to_device(batches * 2, DEVICE):
        theirs.zero_grad()
        with case.autocast():
            loss = mean_square(model(inputs), targets)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale() if case.precision == "fp16" else 1.0
        gradients = [gradient * inverse for gradient in scaled]
        with case.autocast():
            loss = loss + penalty(gradients)
        scaler.scale(loss).backward()
        scaler.unscale_(theirs)
        skipped += not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        scaler.step(theirs)
        scaler.update()
        losses.append(loss.detach())
    assert (skipped > 0) == case.overflows

    brain = recipe({"model": seeded(Network)}, OPTIMIZERS["adamw"], run_opts=case.run_opts())
    brain.fit(range(2), batches)
    assert len(brain.losses) == len(losses)
    for ours, expected in zip(brain.losses, losses, strict=True):
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())  # the skipped ones are inf or NaN
    assert_same_model(brain.modules.model, model)
    assert_same_optimizer(brain.optimizer, theirs)
    assert brain.skipped_steps == skipped


@every_precision
def test_gradients_are_unscaled_and_differentiable(case):
    brain = RecordingBrain({"model": seeded(Network)}, OPTIMIZERS["sgd"], run_opts=case.run_opts())
    inputs, targets = to_device(make_batches(1)[0], DEVICE)
    inputs.requires_grad_()
    with brain.training_ctx:
        loss = mean_square(brain.modules.model(inputs), targets)
    (gradient,) = brain.gradients(loss, [inputs])
    reference = seeded(Network)
    with case.autocast():
        expected_loss = mean_square(reference(inputs), targets)
    (expected,) = torch.autograd.grad(expected_loss, inputs)
    torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=1e-5)
    assert gradient.requires_grad
    gradient.pow(2).sum().backward()
    assert brain.modules.model.first.weight.grad.abs().sum() > 0


# ---------------------------------------------------------------- custom autograd functions


def make_matmul(custom_fwd, custom_bwd):
    """x @ w with a backward written out; each decorator as given."""

    class Matmul(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.mm(w)

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad.mm(w.t()), x.t().mm(grad)

    return Matmul


class WithFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)
        self.function = function

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.function.apply(self.inner(x_BD), self.weight)


@cases_in_turn(cast_inputs=[None, torch.float32])
def test_custom_autograd_function(case, cast_inputs):
    if cast_inputs is None:
        torch_fwd = torch.amp.custom_fwd(device_type=DEVICE.type)
        our_fwd = amp_recipes.custom_fwd
    else:
        torch_fwd = torch.amp.custom_fwd(device_type=DEVICE.type, cast_inputs=cast_inputs)
        our_fwd = amp_recipes.custom_fwd(cast_inputs=cast_inputs)
    torch_function = make_matmul(torch_fwd, torch.amp.custom_bwd(device_type=DEVICE.type))
    our_function = make_matmul(our_fwd, amp_recipes.custom_bwd)

    batches = make_batches() * (3 if case.overflows else 1)
    model = seeded(lambda: WithFunction(torch_function))
    theirs = OPTIMIZERS["adamw"](model.parameters())
    run = train_by_hand(case, model, theirs, batches)
    brain = RecordingBrain(
        {"model": seeded(lambda: WithFunction(our_function))}, OPTIMIZERS["adamw"], run_opts=case.run_opts()
    )
    brain.fit(range(2), batches)
    assert_same_run(brain, model, theirs, run)
