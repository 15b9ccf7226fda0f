"""Training on the simulated device: a loop by hand equals the CPU's, and Brain trains at each precision."""

import copy

import pytest
import simulated
import torch
from classifiers import Classifier
from torch import nn

from amp_recipes import EpochCounter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 6
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters, lr, fused: torch.optim.SGD(parameters, lr, momentum=0.9, fused=fused),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),  # a half, whose reciprocal is exact
        nn.Linear(4 * 8 * 8, 8),
    )


def make_batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, 1, 8, 8, generator=generator).pin_memory(),
            torch.randint(0, 8, (16,), generator=generator).pin_memory(),
        )
        for _ in range(count)
    ]


class HandLoop:
    """Trains as one would on a GPU, without a wait in a step."""

    def __init__(self, device: str, precision: str = "fp32", optimizer: str = "adamw", fused: bool = True) -> None:
        self.device = torch.device(device)
        self.model = make_model().to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=1e-2, fused=fused)
        self.autocast = torch.autocast(self.device.type, DTYPES[precision], enabled=precision != "fp32")
        enabled = precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, growth_interval=3, enabled=enabled)
        self.losses: list[torch.Tensor] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        images, labels = (x.to(self.device, non_blocking=True) for x in (images, labels))
        with self.autocast:
            loss = nn.functional.cross_entropy(self.model(images).float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def run(self, batches) -> list[float]:
        torch.manual_seed(2)  # the dropout's draws
        for images, labels in batches:
            self.step(images, labels)
        return [loss.item() for loss in self.losses]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_losses_of_a_loop_by_hand_equal_the_cpus(optimizer, fused):
    batches = make_batches()
    ours, theirs = (HandLoop(device, "fp32", optimizer, fused) for device in ("simulated:1", "cpu"))
    assert ours.run(batches) == theirs.run(batches)
    for name, expected in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name].cpu(), expected), name


@pytest.mark.parametrize("precision", DTYPES)
def test_a_fused_loop_by_hand_waits_for_nothing(precision):
    batches = make_batches()
    loop = HandLoop("simulated", precision)
    torch.manual_seed(2)
    with simulated.waits() as found:
        for images, labels in found.steps(batches):
            loop.step(images, labels)
    assert not found.stalls, str(found)
    exact = HandLoop("simulated").run(batches)
    assert [loss.item() for loss in loop.losses] == pytest.approx(exact, abs=0.05)


def test_the_scaler_skips_an_overflow_on_the_device():
    loop = HandLoop("simulated", "fp16")
    before = copy.deepcopy(loop.model.state_dict())
    ((images, labels),) = make_batches(1)
    loop.step(images * torch.inf, labels)
    assert loop.scaler.get_scale() == 2.0**9
    weights = [name for name in before if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(loop.model.state_dict()[name], before[name]) for name in weights)


def test_an_unfused_scaled_optimizer_waits_in_each_step():
    loop = HandLoop("simulated", "fp16", fused=False)
    with simulated.waits() as found:
        for images, labels in found.steps(make_batches()):
            loop.step(images, labels)
    assert [wait.step for wait in found.of_this_step] == list(range(1, STEPS + 1))


class Watched(Classifier):
    """Marks its steps in `found`, if there is one."""

    found = None

    def on_fit_batch_start(self, batch, should_step):
        if self.found is not None:
            self.found.start_step()


def make_brain(precision: str, device: str = "simulated", fused: bool = True, **options) -> Watched:
    return Watched(
        {"model": make_model()},
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=fused),
        run_opts={"device": device, "precision": precision, "init_scale": 2.0**10, "noprogressbar": True, **options},
    )


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("precision", DTYPES)
def test_brain_trains(precision, fused):
    batches = make_batches()
    brain = make_brain(precision, fused=fused, max_grad_norm=0.0)
    torch.manual_seed(2)
    brain.fit(range(1), batches)
    loop = HandLoop("simulated", precision, fused=fused)
    assert brain.avg_train_loss == pytest.approx(sum(loop.run(batches)) / STEPS, abs=1e-6)
    for name, expected in loop.model.state_dict().items():
        assert torch.equal(brain.modules.model.state_dict()[name], expected), name


@pytest.mark.parametrize("precision", DTYPES)
def test_brain_waits_once_in_a_step_and_for_the_step_before(precision):
    brain = make_brain(precision)
    with simulated.waits() as found:
        brain.found = found
        brain.fit(range(1), make_batches())
    # The verdict of the first update is read at once, and the last when the epoch is over.
    inside = [wait for wait in found.stalls if 1 < wait.step < STEPS]
    assert all(wait.kind == "event" and wait.for_step == wait.step - 1 for wait in inside), str(found)
    assert len({wait.step for wait in inside}) == len(inside)


def test_a_run_that_is_resumed_equals_one_that_was_not(tmp_path):
    runs = {}
    for name, ends in {"whole": [4], "resumed": [2, 4]}.items():
        for epochs in ends:
            brain = make_brain("fp16", output_folder=str(tmp_path / name), ema_decay=0.9)
            brain.fit(EpochCounter(epochs), make_batches(), make_batches(2))
        runs[name] = brain
    assert runs["whole"].optimizer_step == runs["resumed"].optimizer_step == 4 * STEPS
    expected = runs["whole"].modules.state_dict()
    for name, found in runs["resumed"].modules.state_dict().items():
        assert torch.equal(found, expected[name]), name


def test_brain_trains_on_the_device_that_is_not_the_current_one():
    """An event is by itself recorded on the current device, whose work is done: the numbers would not be there yet."""
    first, second = (make_brain("fp32", device=device) for device in ("simulated:0", "simulated:1"))
    for brain in (first, second):
        torch.manual_seed(2)
        torch.accelerator.set_device_index(0)
        brain.fit(range(1), make_batches())
    assert first.avg_train_loss == second.avg_train_loss
    for name, expected in first.modules.state_dict().items():
        assert torch.equal(second.modules.state_dict()[name].cpu(), expected.cpu()), name


def test_what_names_no_device_means_the_one_of_the_run():
    make_brain("fp32", device="simulated:1")
    assert torch.zeros(1, device="simulated").device.index == torch.accelerator.current_device_index() == 1
