"""A WGAN with gradient penalty in two processes: the recipe equals a loop over torch that takes all their batches."""

import pytest
import torch
from processes import in_processes
from recipe_runs import recipe_modules
from torch import nn

from amp_recipes.state.randomness import set_apart

SIZE, NOISE, CRITIC_STEPS, PENALTY = 8, 4, 2, 10.0
LENGTHS = ((3, 3, 3, 3), (3, 3, 3, 3))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NOISE, 6), nn.Tanh(), nn.Linear(6, SIZE * SIZE))

    def forward(self, noise):
        return self.layers(noise).sigmoid().unflatten(1, (1, SIZE, SIZE))

    def noise(self, count):
        return torch.randn(count, NOISE)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))

    def forward(self, images):
        return self.layers(images).squeeze(1)


def make_networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"critic": Critic(), "generator": Generator()}


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.5)


def batches(rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [{"image": torch.rand(length, 1, SIZE, SIZE, generator=generator)} for length in LENGTHS[rank]]


def train(rank: int, accumulate: int) -> list:
    networks = make_networks()
    hparams = {"generator": networks["generator"], "critic_steps": CRITIC_STEPS, "penalty_weight": PENALTY}
    options = {"device": "cpu", "grad_accumulation_factor": accumulate, "max_grad_norm": 0.0}
    with recipe_modules("adversarial") as recipe:
        brain = recipe.train.AdversarialBrain(networks, make_optimizer, hparams, options)
        torch.manual_seed(100)
        brain.fit(range(2), batches(rank), progressbar=False)
    assert brain.skipped_steps == 0
    return [parameter.detach().numpy() for network in networks.values() for parameter in network.parameters()]


def train_by_hand(accumulate: int) -> list[torch.Tensor]:
    networks = make_networks()
    critic, generator = networks["critic"], networks["generator"]
    parts = {name: list(network.parameters()) for name, network in networks.items()}
    optimizers = {name: make_optimizer(parameters) for name, parameters in parts.items()}
    draws = []
    for rank in range(2):
        torch.manual_seed(100)
        set_apart(rank)  # each process draws its own noise
        draws.append(torch.get_rng_state())

    def step(name: str, losses_of) -> None:
        """Add up the gradients of each rank, then those of the ranks."""
        of_ranks = []
        for rank in range(2):
            torch.set_rng_state(draws[rank])
            for loss in losses_of(rank):
                (loss / (2 * accumulate)).backward(inputs=parts[name])
            draws[rank] = torch.get_rng_state()
            of_ranks.append([parameter.grad.clone() for parameter in parts[name]])
            optimizers[name].zero_grad()
        for parameter, first, second in zip(parts[name], *of_ranks, strict=True):
            parameter.grad = first + second
        optimizers[name].step()
        optimizers[name].zero_grad()

    def critic_loss(real):
        with torch.no_grad():
            generated = generator(generator.noise(len(real)))
        mixed = torch.lerp(real, generated, torch.rand_like(real[:, :1, :1, :1])).requires_grad_()
        scores = critic(real), critic(generated), critic(mixed)
        slopes = torch.autograd.grad(scores[2].sum(), mixed, create_graph=True)[0].flatten(1).norm(dim=1)
        return scores[1].mean() - scores[0].mean() + PENALTY * (slopes - 1).square().mean()

    def generator_loss(count):
        return -critic(generator(generator.noise(count))).mean()

    updates = 0
    for _ in range(2):
        for begin in range(0, len(LENGTHS[0]), accumulate):
            window = slice(begin, begin + accumulate)
            step("critic", lambda rank, window=window: (critic_loss(it["image"]) for it in batches(rank)[window]))
            updates += 1
            if updates % CRITIC_STEPS == 0:
                counts = [lengths[window] for lengths in LENGTHS]
                step("generator", lambda rank, counts=counts: map(generator_loss, counts[rank]))
    return [parameter.detach() for parameters in parts.values() for parameter in parameters]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_two_processes_equal_one_that_accumulates(accumulate):
    expected = train_by_hand(accumulate)
    for found in in_processes(train, 2, accumulate):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), other, rtol=0, atol=0)
