"""The life of a sharded run: averages of weights, evaluations, skips on all ranks, two optimizers, penalties."""

import pytest
import torch
from processes import in_processes
from sharded_runs import WIDTH, Symbols, batches_of, furthest, loss_of, model_of, train_sharded, whole
from torch import nn
from torch_release import needs_fsdp

from amp_recipes import Brain
from amp_recipes.errors import RecipeError
from amp_recipes.precision.host_copy import HostCopy

pytestmark = needs_fsdp

BATCHES = 4


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.3, momentum=0.9)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01, fused=True)


def arrays(modules):
    return {name: it.numpy() for name, it in whole(modules).items()}


# ---------------------------------------------------------------------- evaluation and averaged weights


def averaged_run(rank, reshard):
    options = {"device": "cpu", "strategy": "fsdp", "ema_decay": 0.5, "reshard_after_forward": reshard}
    brain = Symbols({"model": model_of(rank)}, sgd, None, {**options, "precision": "bf16"})
    brain.fit(range(2), batches_of(rank, BATCHES), batches_of(rank + 2, BATCHES), progressbar=False)
    tested = brain.evaluate(batches_of(rank + 2, BATCHES), progressbar=False)
    return arrays(brain.modules), brain.summary.last["valid"]["loss"], tested


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_evaluation_sees_averaged_weights_and_training_its_own(reshard):
    """What an evaluation has gathered is not what training goes on with, nor the other way round."""
    found = in_processes(averaged_run, 2, reshard)
    modules = nn.ModuleDict({"model": model_of(0)})
    average = nn.ModuleDict({"model": model_of(0)})
    optimizer = sgd(modules.parameters())
    for _ in range(2):
        for pair in zip(batches_of(0, BATCHES), batches_of(1, BATCHES), strict=True):
            for batch in pair:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(modules["model"](batch), batch)
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(modules.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            for mean, now in zip(average.parameters(), modules.parameters(), strict=True):
                mean.data.lerp_(now.data, 0.5)
    tested = [batch for rank in (2, 3) for batch in batches_of(rank, BATCHES)]
    with torch.no_grad():
        expected = sum(loss_of(average["model"](batch), batch).item() for batch in tested) / len(tested)
        own = sum(loss_of(modules["model"](batch), batch).item() for batch in tested) / len(tested)
    assert abs(own - expected) > 1e-3, "the average must differ from the weights"
    for weights, validated, evaluated in found:
        assert furthest(weights, whole(modules)) < 1e-5
        assert validated == pytest.approx(expected, rel=1e-5)
        assert evaluated == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------- verdicts


class Poisoned(Symbols):
    """One rank's loss is multiplied by something at its second batch."""

    poison = 1.0

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss * self.poison if self.step == 2 and torch.distributed.get_rank() == 1 else loss


def poisoned_runs(rank, options, poison):
    """With an unfused and a fused optimizer, and each with a host that sees numbers at once, and late."""
    found = []
    Poisoned.poison = poison
    for immediate in (True, False):
        HostCopy.immediate = immediate
        for optimizer in (sgd, fused_adamw):
            brain = train_sharded(rank, options, BATCHES, optimizer, recipe=Poisoned)
            scale = brain.scaler.get_scale() if brain.scaler.is_enabled() else None
            found.append((arrays(brain.modules), brain.optimizer_step, brain.skipped_steps, scale))
    return found


@pytest.mark.parametrize(
    ("options", "poison", "scale"),
    [
        pytest.param({}, float("nan"), None, marks=pytest.mark.extended),
        pytest.param({"precision": "bf16"}, float("inf"), None, marks=pytest.mark.extended),
        ({"precision": "fp16", "init_scale": 1024.0}, 1e5, 512.0),  # a finite loss, whose scaled gradients overflow
    ],
    ids=["nan", "inf", "overflow"],
)
def test_what_fails_on_one_rank_is_skipped_on_all(options, poison, scale):
    first, second = in_processes(poisoned_runs, 2, options, poison)
    for here, there in zip(first, second, strict=True):
        assert here[1:] == there[1:] == (BATCHES - 1, 1, scale)
        assert all((here[0][name] == there[0][name]).all() for name in here[0])
        assert all(torch.as_tensor(it).isfinite().all() for it in here[0].values())
    for at_once, queued in (first[0::2], first[1::2]):
        assert all((at_once[0][name] == queued[0][name]).all() for name in at_once[0])


def overflow_in_one_shard(rank):
    """The gradient of one row overflows, which one rank holds; also of a parameter with fewer rows than ranks."""
    verdicts = []
    for name in ("embedding.weight", "scale"):
        brain = train_sharded(rank, {"precision": "fp16", "init_scale": 64.0, "max_grad_norm": 1.0}, 1, sgd)
        before = whole(brain.modules)
        for row in (0, -1):
            loss = loss_of(brain.modules.model(batches_of(rank, 1)[0]), batches_of(rank, 1)[0])
            brain.backward(loss)
            gradient = brain.modules.model.get_parameter(name).grad.to_local()
            if len(gradient) and rank == (0 if row == 0 else 1):
                gradient[row] = float("inf")
            held = len(gradient)
            brain.optimizers_step()
            after = whole(brain.modules)
            same = all(torch.equal(before[it], after[it]) for it in before)
            verdicts.append((held, same, brain.skipped_steps, brain.scaler.get_scale()))
            before = after
    return verdicts


def test_an_overflow_in_the_part_of_one_rank_is_known_to_all():
    first, second = in_processes(overflow_in_one_shard, 2)
    assert [held for held, *_ in first] == [6, 6, 1, 1] and [held for held, *_ in second] == [5, 5, 0, 0]
    # The last: nobody's part has the infinity.
    expected = [(True, 1, 32.0), (True, 2, 16.0), (True, 1, 32.0), (False, 1, 32.0)]
    assert [rest for _, *rest in first] == [rest for _, *rest in second] == [list(it) for it in expected]


# ---------------------------------------------------------------------- several optimizers


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


def gan_modules(seed):
    torch.manual_seed(seed)
    return {"generator": Generator(), "critic": Critic()}


def gan_batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 2, WIDTH, generator=generator).unbind(1) for _ in range(BATCHES)]


class Gan(Brain):
    def init_optimizers(self):
        self.optimizers_dict = {
            "generator": torch.optim.SGD(self.modules.generator.parameters(), 0.1, momentum=0.5),
            "critic": torch.optim.SGD(self.modules.critic.parameters(), 0.1, momentum=0.5),
        }

    def fit_batch(self, batch):
        noise, real = batch
        with self.training_ctx:
            fake = self.modules.generator(noise)
            critic_loss = self.modules.critic(fake.detach()).mean() - self.modules.critic(real).mean()
        self.backward(critic_loss, "critic")
        self.optimizers_step("critic")
        with self.training_ctx:
            loss = -self.modules.critic(fake).mean()
        self.backward(loss, "generator")
        self.optimizers_step("generator")
        return loss.detach()


def gan_run(rank, precision):
    brain = Gan(gan_modules(rank), None, None, {"device": "cpu", "strategy": "fsdp", "precision": precision})
    brain.fit(range(1), gan_batches(rank), progressbar=False)
    return arrays(brain.modules)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), pytest.param("bf16", torch.bfloat16, marks=pytest.mark.extended)]
)
def test_a_loss_for_one_optimizer_leaves_gradients_with_it_alone(precision, dtype):
    """Two forwards of one module in one backward, and a backward through a module to another's parameters."""
    found = in_processes(gan_run, 2, precision)
    modules = nn.ModuleDict(gan_modules(0))
    optimizers = [torch.optim.SGD(it.parameters(), 0.1, momentum=0.5) for it in modules.values()]

    def update(losses, module, optimizer):
        for gradients in zip(*(torch.autograd.grad(loss / 2, [*module.parameters()]) for loss in losses), strict=True):
            parameter = next(it for it in module.parameters() if it.grad is None)
            parameter.grad = sum(gradients)
        nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    for pair in zip(gan_batches(0), gan_batches(1), strict=True):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            fakes = [modules["generator"](noise) for noise, _ in pair]
            critic = modules["critic"]
            losses = [
                critic(fake.detach()).mean() - critic(real).mean() for fake, (_, real) in zip(fakes, pair, strict=True)
            ]
        update(losses, critic, optimizers[1])
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            losses = [-critic(fake).mean() for fake in fakes]
        update(losses, modules["generator"], optimizers[0])
    for weights in found:
        assert furthest(weights, whole(modules)) < (1e-6 if dtype == torch.float32 else 2e-3)


# ---------------------------------------------------------------------- penalties and unused modules


class Penalised(Brain):
    def compute_forward(self, batch, stage):
        x = batch[0].clone().requires_grad_()
        return x, self.modules.critic(x)

    def compute_objectives(self, predictions, batch, stage):
        x, scores = predictions
        (gradient,) = self.gradients(scores, [x])
        return scores.float().mean() + (gradient.norm() - 1).square()


def penalised_run(rank, precision):
    options = {"device": "cpu", "strategy": "fsdp", "precision": precision, "init_scale": 64.0}
    brain = Penalised({"critic": gan_modules(rank)["critic"]}, sgd, None, options)
    brain.fit(range(1), gan_batches(rank), progressbar=False)
    return arrays(brain.modules), brain.optimizer_step


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), pytest.param("bf16", torch.bfloat16, marks=pytest.mark.extended)]
)
def test_a_gradient_penalty(precision, dtype):
    """Its backward computes with weights that the first one had gathered."""
    found = in_processes(penalised_run, 2, precision)
    modules = nn.ModuleDict({"critic": gan_modules(0)["critic"]})
    optimizer = sgd(modules.parameters())
    for pair in zip(gan_batches(0), gan_batches(1), strict=True):
        for batch in pair:
            x = batch[0].clone().requires_grad_()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                scores = modules["critic"](x)
            (gradient,) = torch.autograd.grad(scores.sum(), [x], create_graph=True)
            ((scores.float().mean() + (gradient.norm() - 1).square()) / 2).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
    for weights, steps in found:
        assert steps == BATCHES
        assert furthest(weights, whole(modules)) < (1e-6 if dtype == torch.float32 else 2e-3)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x, left):
        return self.left(x) if left else self.right(x)


class Branching(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0], left=torch.distributed.get_rank() == 0)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.mean()


def branching_run(rank, options):
    torch.manual_seed(0)
    options = {"device": "cpu", "strategy": "fsdp", **options}
    brain = Branching({"model": Branches()}, lambda parameters: torch.optim.SGD(parameters, 1.0), None, options)
    before = arrays(brain.modules)
    try:
        brain.fit(range(1), gan_batches(rank)[:1], progressbar=False)
    except RecipeError as error:
        return before, arrays(brain.modules), str(error)
    return before, arrays(brain.modules), ""


def test_other_parameters_on_other_ranks_are_refused_unless_asked_for():
    for before, after, message in in_processes(branching_run, 2, {}):
        assert "gradients of different parameters" in message and "find_unused_parameters" in message
        assert all((before[name] == after[name]).all() for name in before)
    means = [gan_batches(rank)[0][0].mean(0) for rank in range(2)]
    for before, after, message in in_processes(branching_run, 2, {"find_unused_parameters": True, "max_grad_norm": 0}):
        assert not message
        for name, mean in zip(("left", "right"), means, strict=True):
            expected = torch.as_tensor(before[f"model.{name}.weight"])[0] - mean / 2
            torch.testing.assert_close(torch.as_tensor(after[f"model.{name}.weight"])[0], expected)


class Early(Symbols):
    """Makes its optimizer in the constructor, of parameters that sharding then replaces."""

    def __init__(self, *args):
        super().__init__(*args)
        self.optimizers_dict = {"mine": sgd(self.modules.parameters())}

    def init_optimizers(self):
        pass


def early_run(rank):
    try:
        train_sharded(rank, {}, 1, None, recipe=Early)
    except RecipeError as error:
        return str(error)
    return ""


def test_an_optimizer_from_before_the_sharding_is_refused():
    for message in in_processes(early_run, 2):
        assert "optimizer 'mine' holds parameters from before the modules were sharded" in message
