"""A bad batch leaves no trace: the run equals, bit for bit, the run that never saw it.

Bad means NaN or Inf in the input, a finite input that overflows inside the model, or a finite loss with a
nonfinite gradient. The reference is always a second run on the list of batches without the bad one.

At fp16 the bad batch also halves the scale, as it must. Scales are powers of two and the scaled gradients
here stay far from both ends of fp16's range, so that weights are equal bit for bit all the same.
"""

import re
from collections.abc import Callable, Iterable

import pytest
import torch
from device import DEVICE
from hosts import hosts_in_turn, with_hosts
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from amp_recipes import Brain, Stage
from amp_recipes.errors import NonfiniteError

pytestmark = pytest.mark.usefixtures("host")  # verdicts known at once, and queued

PRECISIONS = ["fp32", "bf16", "fp16"]
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "fused_momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
    "fused_adamw": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
}
COUNT = 6
WAYS = ["replaced", "in_place", "data", "address"]
every_precision = hosts_in_turn(precision=PRECISIONS)
without_scale = hosts_in_turn(precision=["fp32", "bf16"])


class Squaring(nn.Module):
    """A network whose middle squares its input, so that a large finite input overflows inside."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x_BD: Tensor) -> Tensor:
        h_BD = self.first(x_BD)
        return self.second(torch.relu(self.norm(h_BD * h_BD)))


def make_batches(count: int = COUNT) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(23)
    return [(torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(count)]


def spoil(kind: str, precision: str) -> tuple[Tensor, Tensor]:
    """One batch that makes the loss nonfinite, in one of its six rows."""
    generator = torch.Generator().manual_seed(99)
    inputs, targets = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
    if kind == "nan":
        inputs[2, 3] = float("nan")
    elif kind == "inf":
        inputs[2, 3] = float("-inf")
    else:
        # Finite in the model's own dtype; its square is beyond 3.4e38, or in fp16 beyond 65504.
        inputs[2] = 3e4 if precision == "fp16" else 1e30
    return inputs, targets


class Recipe(Brain):
    """A regression recipe that keeps the average training loss and the weights that validation sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.train_losses: list[float] = []
        self.evaluated: list[Tensor] = []

    def compute_forward(self, batch, stage):
        if stage is Stage.VALID:
            self.evaluated = [p.detach().clone() for p in self.modules.parameters()]
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is Stage.TRAIN:
            self.train_losses.append(float(stage_loss))
            if self.train_losses[-1] == self.train_losses[-1]:  # NaN where nothing finite was seen
                assert self.train_losses[-1] == float(self.avg_train_loss)


def train(
    batches: list,
    precision: str,
    optimizer: str = "adamw",
    *,
    recipe: type[Recipe] = Recipe,
    epochs: int = 1,
    build: Callable[[], nn.Module] = Squaring,
    valid: bool = True,
    **options,
) -> Recipe:
    torch.manual_seed(1)
    brain = recipe(
        {"model": build()},
        OPTIMIZERS[optimizer],
        {"lr_scheduler": lambda opt: ExponentialLR(opt, 0.9)},
        {
            "device": DEVICE,
            "precision": precision,
            "noprogressbar": True,
            "init_scale": 2.0**8,
            "growth_interval": 1000,
            "lr_scheduler_interval": "step",
            "ema_decay": 0.6,
            **options,
        },
    )
    brain.fit(range(epochs), batches, make_batches(1) if valid else None)
    return brain


def tensors_of(brain: Recipe) -> dict[str, Tensor]:
    """Everything that training moves, by name."""
    found = {f"modules.{name}": value for name, value in brain.modules.state_dict().items()}
    for name, optimizer in brain.optimizers_dict.items():
        state = optimizer.state_dict()
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if value is not None:
                    found[f"{name}.{index}.{key}"] = torch.as_tensor(value)
        for index, group in enumerate(state["param_groups"]):
            found[f"{name}.group{index}.lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    for index, value in enumerate(brain.evaluated):
        found[f"average.{index}"] = value
    return found


def assert_same(ours: Recipe, theirs: Recipe) -> None:
    found, expected = tensors_of(ours), tensors_of(theirs)
    assert found.keys() == expected.keys()
    assert all(torch.isfinite(value).all() for value in expected.values())
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different
    assert ours.train_losses == pytest.approx(theirs.train_losses, rel=1e-6)


@with_hosts(precision=PRECISIONS, optimizer=[*OPTIMIZERS], kind=["nan", "inf", "overflow"], index=[0, 3, COUNT])
def test_one_bad_batch_equals_the_run_without_it(precision, optimizer, kind, index):
    good = make_batches()
    bad = [*good[:index], spoil(kind, precision), *good[index:]]
    ours, theirs = train(bad, precision, optimizer), train(good, precision, optimizer)
    assert_same(ours, theirs)
    assert (ours.skipped_steps, ours.optimizer_step) == (1, COUNT)
    assert (theirs.skipped_steps, theirs.optimizer_step) == (0, COUNT)


@pytest.fixture
def uninitialised_memory_is_nan():
    """What torch would leave to chance is NaN for sure."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@hosts_in_turn(precision=PRECISIONS, bad_ones=[1, 2])
def test_fused_momentum_is_initialised_although_its_first_step_is_skipped(
    uninitialised_memory_is_nan, precision, bad_ones
):
    good = make_batches()
    bad = [*[spoil("nan", precision)] * bad_ones, *good]
    ours = train(bad, precision, "fused_momentum")
    assert_same(ours, train(good, precision, "fused_momentum"))


@hosts_in_turn(optimizer=[*OPTIMIZERS], precision=PRECISIONS)
def test_bad_batches_in_every_epoch(precision, optimizer):
    """Two in a row at the start, one in the middle and one as the last batch of each epoch."""
    good = make_batches()
    bads = [spoil(kind, precision) for kind in ("nan", "overflow", "inf", "nan")]
    bad = [*bads[:2], *good[:2], bads[2], *good[2:], bads[3]]
    # Eight halvings from 2**13 stay clear of fp16's subnormals.
    ours = train(bad, precision, optimizer, epochs=2, nonfinite_patience=4, init_scale=2.0**13)
    theirs = train(good, precision, optimizer, epochs=2, init_scale=2.0**13)
    assert_same(ours, theirs)
    assert (ours.skipped_steps, ours.optimizer_step) == (8, 2 * COUNT)


@hosts_in_turn(optimizer=[*OPTIMIZERS], precision=PRECISIONS, position=[0, 1])
def test_a_bad_batch_takes_its_accumulation_window_with_it(precision, optimizer, position):
    """A window is one update: the good batch beside the bad one is left out as well."""
    good = make_batches()
    window = [make_batches(7)[6], make_batches(8)[7]]
    window[position] = spoil("overflow", precision)
    bad = [*good[:2], *window, *good[2:]]
    ours = train(bad, precision, optimizer, grad_accumulation_factor=2)
    theirs = train(good, precision, optimizer, grad_accumulation_factor=2)
    assert_same(ours, theirs)
    assert (ours.skipped_steps, ours.optimizer_step) == (1, COUNT // 2)


@every_precision
def test_bad_last_window_that_is_short(precision):
    good = make_batches()
    ours = train([*good, spoil("nan", precision)], precision, grad_accumulation_factor=2)
    theirs = train(good, precision, grad_accumulation_factor=2)
    assert_same(ours, theirs)
    assert (ours.skipped_steps, ours.optimizer_step) == (1, COUNT // 2)


class InfiniteLoss(Recipe):
    """Adds the batch's third entry to the loss: a constant, so gradients stay finite."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss + batch[2] if len(batch) > 2 else loss


@with_hosts(precision=PRECISIONS, constant=[float("inf"), float("nan")], optimizer=["adamw", "fused_momentum"])
def test_nonfinite_loss_with_finite_gradients_skips(precision, constant, optimizer):
    good = make_batches()
    strange = (*make_batches(7)[6], torch.tensor(constant))
    theirs = train(good, precision, optimizer, recipe=InfiniteLoss)
    for index in (0, 4):
        bad = [*good[:index], strange, *good[index:]]
        ours = train(bad, precision, optimizer, recipe=InfiniteLoss)
        assert_same(ours, theirs)
        assert (ours.skipped_steps, ours.optimizer_step) == (1, COUNT)


class RootOfParameter(nn.Module):
    """Adds the root of input times a parameter: where that is 0, the loss is finite, its gradient is not."""

    def __init__(self):
        super().__init__()
        self.inner = Squaring()
        self.offset = nn.Parameter(torch.ones(4))

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.inner(x_BD) + (self.offset * x_BD[:, :1].abs()).sqrt()


@every_precision
def test_finite_loss_with_nonfinite_gradient_skips(precision):
    good = make_batches()
    inputs, targets = (value.clone() for value in make_batches(7)[6])
    inputs[1, 0] = 0.0  # d sqrt(offset * 0) / d offset = 0 / 0
    bad = [*good[:2], (inputs, targets), *good[2:]]
    ours = train(bad, precision, build=RootOfParameter)
    assert_same(ours, train(good, precision, build=RootOfParameter))
    assert (ours.skipped_steps, ours.optimizer_step) == (1, COUNT)


@without_scale
def test_finite_gradients_whose_norm_overflows_skip(precision):
    """Squares of 1e25 overflow: a clipping coefficient of 0 would be a silent no-op, or NaN."""

    class Scaled(Recipe):
        def compute_objectives(self, predictions, batch, stage):
            return predictions.float().mean() * (batch[2] if len(batch) > 2 else 1.0)

    good = make_batches()
    bad = [good[0], (*good[5], torch.tensor(1e25)), *good[1:]]
    options = {"recipe": Scaled, "build": lambda: nn.Linear(8, 4), "max_grad_norm": 1.0}
    ours = train(bad, precision, **options)
    assert_same(ours, train(good, precision, **options))
    assert ours.skipped_steps == 1


# ---------------------------------------------------------------- several optimizers: all or none


class TwoOptimizers(Recipe):
    def init_optimizers(self):
        self.optimizers_dict = {
            "first": OPTIMIZERS["momentum"](self.modules.first.parameters()),
            "second": OPTIMIZERS["adamw"](self.modules.second.parameters()),
        }

    def compute_forward(self, batch, stage):
        first = self.modules.first(batch[0])
        second = self.modules.second(batch[1])
        return first, second

    def compute_objectives(self, predictions, batch, stage):
        first, second = predictions
        # The third entry multiplies only the gradient of the second module: its loss stays finite.
        return first.float().pow(2).mean() + GradientTimes.apply(second.float(), batch[2]).pow(2).mean()


class GradientTimes(torch.autograd.Function):
    """The identity, with its gradient multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@every_precision
def test_two_optimizers_step_all_or_none(precision):
    generator = torch.Generator().manual_seed(3)
    one = torch.ones(())
    good = [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator), one) for _ in range(5)]
    bad = list(good)
    bad[2:2] = [(good[0][0], good[0][1], torch.tensor(float("inf")))]
    bad[0:0] = [(good[1][0], good[1][1], torch.tensor(float("nan")))]

    def run(batches):
        torch.manual_seed(1)
        brain = TwoOptimizers(
            {"first": nn.Linear(8, 4), "second": nn.Linear(8, 4)},
            run_opts={"device": DEVICE, "precision": precision, "noprogressbar": True, "init_scale": 2.0**8},
        )
        brain.fit(range(1), batches)
        return brain

    ours, theirs = run(bad), run(good)
    assert_same(ours, theirs)
    assert (ours.skipped_steps, ours.optimizer_step) == (2, 5)


class Adversarial(Recipe):
    """Three critic rounds and a generator round an iteration; the third entry may spoil one critic round."""

    def init_optimizers(self):
        self.optimizers_dict = {
            "critic": OPTIMIZERS["fused_adamw"](self.modules.critic.parameters()),
            "generator": OPTIMIZERS["momentum"](self.modules.generator.parameters()),
        }

    def fit_batch(self, batch):
        noise, real, rounds = batch
        for factor in rounds:
            self.zero_grad()
            with self.training_ctx:
                fake = self.modules.generator(noise).detach()
                loss = (self.modules.critic(fake) - self.modules.critic(real)).float().mean() * factor
            self.backward(loss)
            self.optimizers_step("critic")
        self.zero_grad()
        with self.training_ctx:
            loss = -self.modules.critic(self.modules.generator(noise)).float().mean()
        self.backward(loss)
        self.optimizers_step("generator")
        return loss.detach()


@hosts_in_turn(precision=PRECISIONS, spoiled=[0, 1, 2])
def test_bad_critic_round_equals_the_iteration_without_that_round(precision, spoiled):
    """The rounds before and after it, and the generator's update, are taken."""
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)) for _ in range(4)]

    def run(rounds_of_first_and_third: list[float]) -> Adversarial:
        torch.manual_seed(1)
        brain = Adversarial(
            {"critic": nn.Linear(8, 1), "generator": nn.Linear(8, 8)},
            run_opts={"device": DEVICE, "precision": precision, "noprogressbar": True, "init_scale": 2.0**8},
        )
        rounds = [rounds_of_first_and_third, [1.0] * 3] * 2
        brain.fit(range(1), [(*pair, each) for pair, each in zip(data, rounds, strict=True)])
        return brain

    bad = [1.0, 1.0]
    bad.insert(spoiled, float("nan"))
    ours, theirs = run(bad), run([1.0, 1.0])
    assert_same(ours, theirs)
    assert (ours.skipped_steps, theirs.skipped_steps) == (2, 0)
    assert ours.optimizer_step == theirs.optimizer_step


class LateLayer(nn.Module):
    """A layer that the data only reach where the first column is large."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(8, 4)
        self.late = nn.Linear(8, 4)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.always(x_BD)
        return y_BD + self.late(x_BD) if x_BD[0, 0] > 5.0 else y_BD


# torch's fused SGD with momentum cannot take in a parameter later at all: TypeError, without any bad batch.
@hosts_in_turn(optimizer=[name for name in OPTIMIZERS if name != "fused_momentum"], precision=PRECISIONS)
def test_parameters_whose_first_gradient_is_bad(precision, optimizer):
    """State that is made in a step that is skipped must not be left behind half made."""
    good = [(inputs.clone(), targets) for inputs, targets in make_batches()]
    for inputs, _ in good[3:]:
        inputs[0, 0] = 6.0
    bad_one = (good[3][0].clone(), good[3][1])
    bad_one[0][2, 2] = float("nan")
    ours = train([*good[:3], bad_one, *good[3:]], precision, optimizer, build=LateLayer)
    assert_same(ours, train(good, precision, optimizer, build=LateLayer))
    assert ours.skipped_steps == 1


# ---------------------------------------------------------------- buffers of every habit


class Tracker(nn.Module):
    """Keeps a running mean of its input in buffers, in a way of its own; starts at call number `start`."""

    def __init__(self, way: str, start: int = 0):
        super().__init__()
        self.way, self.start, self.calls = way, start, 0
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0))  # training never changes it
        self.register_buffer("scratch", None)

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls > self.start:
                self.track(x_BD.detach().float().mean(0))
        return self.layer(x_BD - self.mean + self.table / 8)

    def track(self, mean_D: Tensor) -> None:
        if self.way == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * mean_D
        elif self.way == "in_place":
            self.mean.mul_(0.9).add_(0.1 * mean_D)
        elif self.way == "data":
            self.mean.data.mul_(0.9).add_(0.1 * mean_D)
        else:  # written by its address, as fused kernels do
            self.mean.numpy()[:] = (0.9 * self.mean + 0.1 * mean_D).numpy()


@hosts_in_turn(way=WAYS, precision=["fp32", "fp16"])
def test_buffers_go_back_however_the_module_changes_them(subtests, precision, way):
    good = make_batches()
    theirs = train(good, precision, "fused_adamw", build=lambda: Tracker(way))
    for index in (0, 1, 3, COUNT):
        with subtests.test(index):
            bad = [*good[:index], spoil("nan", precision), *good[index:]]
            ours = train(bad, precision, "fused_adamw", build=lambda: Tracker(way))
            assert_same(ours, theirs)
            assert ours.modules.model.mean.abs().sum() > 0


@hosts_in_turn(way=WAYS, index=[2, 4])
def test_buffers_that_start_to_move_go_back_too(way, index):
    """At the third batch: in the bad batch itself, which `start` counts as well, or in one before it.

    Later batches move the buffer as if the bad one had not been.
    """
    good = make_batches()
    ours = train([*good[:index], spoil("nan", "fp32"), *good[index:]], "fp32", build=lambda: Tracker(way, start=2))
    assert_same(ours, train(good, "fp32", build=lambda: Tracker(way, start=2)))


# ---------------------------------------------------------------- patience


def bad_batch(precision: str = "fp32") -> tuple[Tensor, Tensor]:
    return spoil("nan", precision)


@without_scale
def test_patience_ends_the_run_with_advice(precision):
    good = make_batches()
    batches = [*good[:2], *[bad_batch()] * 3, *good[2:], *[bad_batch()] * 30]
    with pytest.raises(NonfiniteError) as caught:
        train(batches, precision, nonfinite_patience=3)
    message = str(caught.value)
    assert "3" in message
    assert re.search(r"epoch|step|batch", message)
    assert re.search(r"learning rate|nonfinite_patience|precision|input|data|clip|max_grad_norm", message)


class Kept(Recipe):
    """At hand after its run has failed."""

    def on_fit_start(self):
        super().on_fit_start()
        Kept.last = self


@hosts_in_turn(optimizer=["adamw", "fused_adamw"], precision=["bf16", "fp32"])
def test_run_that_patience_ends_keeps_its_last_good_weights(precision, optimizer):
    """The verdict comes when the batch after it went forward, if the optimizer skips on a device that queues."""
    good = make_batches()
    reference = train(good[:2], precision, optimizer, valid=False)
    with pytest.raises(NonfiniteError):
        train([*good[:2], *[bad_batch()] * 9], precision, optimizer, recipe=Kept, valid=False)
    assert_same_modules(Kept.last, reference)


def assert_same_modules(ours: Brain, theirs: Brain) -> None:
    expected = theirs.modules.state_dict()
    found = ours.modules.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@without_scale
def test_patience_counts_only_consecutive_ones(precision):
    good = make_batches()
    pair = [bad_batch()] * 2
    batches = [*pair, good[0], *pair, good[1], *pair, *good[2:], *pair]
    ours = train(batches, precision, nonfinite_patience=3)
    assert_same(ours, train(good, precision))
    assert ours.skipped_steps == 8


@without_scale
def test_patience_ends_a_run_whose_last_batches_are_bad(precision):
    """The flag of the last step is settled at the stage's end, not forgotten."""
    with pytest.raises(NonfiniteError):
        train([*make_batches(), *[bad_batch()] * 3], precision, nonfinite_patience=3)


@without_scale
def test_patience_runs_on_across_epochs(precision):
    """Bad data only, two batches an epoch: the third skip in a row comes in the second epoch."""
    with pytest.raises(NonfiniteError):
        train([bad_batch()] * 2, precision, epochs=4, nonfinite_patience=3)


def test_ordinary_back_off_of_the_scale_does_not_use_up_patience():
    batches = make_batches() * 5
    brain = train(batches, "fp16", init_scale=2.0**34, nonfinite_patience=3)
    assert brain.skipped_steps >= 10
    assert brain.optimizer_step == len(batches) - brain.skipped_steps > 0
    assert all(torch.isfinite(value).all() for value in brain.modules.state_dict().values())


def test_ordinary_back_off_equals_the_run_without_the_skipped_batches():
    """The batches that were spent on finding the scale leave no trace either."""

    class Watched(Recipe):
        skips: tuple[int, ...] = ()

        def on_fit_batch_start(self, batch, should_step):
            self.skips = *self.skips, self.skipped_steps  # the recipe's own, so that a replay leaves it as it was

    batches = make_batches() * 5
    ours = train(batches, "fp16", "fused_momentum", recipe=Watched, init_scale=2.0**34)
    after = [*ours.skips[1:], ours.skipped_steps]
    kept = [batch for batch, a, b in zip(batches, ours.skips, after, strict=True) if a == b]
    assert 0 < len(kept) < 20
    theirs = train(kept, "fp16", "fused_momentum", init_scale=ours.scaler.get_scale())
    assert theirs.skipped_steps == 0
    assert_same(ours, theirs)


def test_nonfinite_data_with_the_scale_at_its_floor_ends_the_run():
    batches = [*make_batches()[:2], *[bad_batch()] * 12]
    options = {"init_scale": 2.0**6, "min_scale": 2.0**3, "nonfinite_patience": 3}
    with pytest.raises(NonfiniteError):
        train(batches, "fp16", recipe=Kept, locate_nonfinite=False, **options)
    assert Kept.last.scaler.get_scale() == 2.0**3
    # 2**6 -> 2**3 takes three skips; those at the floor are the ones that count.
    assert 5 <= Kept.last.skipped_steps <= 7
    with pytest.raises(NonfiniteError):
        train(batches, "fp16", recipe=Kept, **options)
    assert Kept.last.skipped_steps <= 4 and Kept.last.scaler.get_scale() > 2.0**3  # a replay tells that each counts


def test_scale_never_falls_below_its_floor():
    good = make_batches()
    batches = [*[bad_batch()] * 4, *good]
    options = {"init_scale": 2.0**9, "min_scale": 2.0**8, "nonfinite_patience": 10}
    ours = train(batches, "fp16", locate_nonfinite=False, **options)
    assert ours.scaler.get_scale() == 2.0**8
    assert_same(ours, train(good, "fp16", init_scale=2.0**8))


def test_faults_leave_no_trace_in_the_scale():
    good = make_batches()
    ours = train([*[bad_batch()] * 4, *good], "fp16", init_scale=2.0**9, nonfinite_patience=10)
    assert ours.skipped_steps == 4 and ours.scaler.get_scale() == 2.0**9
    assert_same(ours, train(good, "fp16", init_scale=2.0**9))
