"""The host never waits inside a step: reads from the device are counted, with every guard and logger on.

On a CPU a read costs nothing, but it dispatches the same op (`aten::_local_scalar_dense`) as on a GPU, where
it would stop the queue. Methods that read by another way are counted by name.
"""

import json

import pytest
import torch
from device import DEVICE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes import Brain, Stage

FIRST, LAST = 4, 20  # counted from before batch 4 to before batch 20: optimizer state exists by then
READERS = ["item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__"]


class Reads(TorchDispatchMode):
    """Counts reads of tensors while active: dispatched ones, and calls of the methods that read."""

    def __init__(self):
        super().__init__()
        self.dispatched = 0
        self.methods: list[str] = []
        self.patch = pytest.MonkeyPatch()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.dispatched += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        for name in READERS:
            self.patch.setattr(torch.Tensor, name, self.counted(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *exc_info):
        self.patch.undo()
        return super().__exit__(*exc_info)

    def counted(self, name, method):
        def read(tensor, *args, **kwargs):
            self.methods.append(name)
            return method(tensor, *args, **kwargs)

        return read


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x_BD):
        return self.layers(x_BD)


class Counted(Brain):
    """Counts the reads between the starts of batches FIRST and LAST."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])

    def on_stage_start(self, stage, epoch=None):
        if stage is Stage.TRAIN:
            self.reads = Reads()
            self.seen = 0

    def on_fit_batch_start(self, batch, should_step):
        self.seen += 1
        if self.seen == FIRST:
            self.reads.__enter__()
        elif self.seen == LAST:
            self.reads.__exit__(None, None, None)


class Wasteful(Counted):
    """Reads the loss of every batch, as the origin of Brain does."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if not torch.isfinite(loss.detach().cpu()):
            raise ValueError("nonfinite")


def count_reads(folder, precision: str, recipe: type[Counted] = Counted, **options) -> Counted:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(LAST + 4)
    ]
    brain = recipe(
        {"model": Network()},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)},
        {
            "device": DEVICE,
            "precision": precision,
            "init_scale": 2.0**8,
            "max_grad_norm": 1.0,
            "output_folder": str(folder),
            "log_interval_steps": 1000,
            "lr_scheduler_interval": "step",
            **options,
        },
    )
    brain.fit(range(1), batches, progressbar=True)
    assert brain.optimizer_step == len(batches) // brain.grad_accumulation_factor
    return brain


OPTIONS = {
    "clipped": {},
    "ema": {"ema_decay": 0.9},
    "unclipped": {"max_grad_norm": 0.0},
    "spikes": {"on_spike": "lower_lr", "spike_window": 4, "ckpt_background": False},
    "accumulation": {"grad_accumulation_factor": 2},
}


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 0), ("bf16", 0), ("fp16", 1)])
def test_device_reads_per_step(tmp_path, subtests, host, precision, allowed):
    """With verdicts that the host knows at once, and with queued ones."""
    for name, options in OPTIONS.items():
        with subtests.test(name):
            brain = count_reads(tmp_path / name, precision, **options)
            updates = (LAST - FIRST) // brain.grad_accumulation_factor
            assert brain.reads.dispatched <= allowed * updates, brain.reads.methods
            assert len(brain.reads.methods) <= allowed * updates, brain.reads.methods


def test_the_records_are_written_all_the_same(tmp_path, host):
    """No reads is easy where nothing is logged: every step must be in the file in the end."""
    count_reads(tmp_path, "bf16")
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record.get("kind") == "step"]
    assert [record["step"] for record in steps] == list(range(1, LAST + 5))
    assert all(isinstance(record["loss"], float) for record in steps)
    assert all(record["grad_norm"] > 0 for record in steps)


def test_a_read_in_every_step_is_seen_by_this_count(tmp_path, host):
    brain = count_reads(tmp_path, "fp32", recipe=Wasteful)
    assert brain.reads.methods.count("cpu") == LAST - FIRST
    assert brain.reads.dispatched >= LAST - FIRST


def test_hand_written_loop_with_fused_optimizer_reads_nothing():
    """The bar is reachable: torch's own step, clipping and BatchNorm read nothing at fp32 and bf16."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    inputs, targets = torch.randn(6, 8), torch.randint(0, 4, (6,))
    reads = Reads()
    for step in range(6):
        if step == 2:
            reads.__enter__()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    reads.__exit__(None, None, None)
    assert (reads.dispatched, reads.methods) == (0, [])
