"""Counts at small scale what the formulas of `_scaling_model` say: bytes sent, bytes held, bytes kept by a forward.

Of loops by hand with torch's own functions, and of a Brain. Every function that counts runs in each process of a gloo
group, and returns what its own process counted.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _collective_bytes import CollectiveBytes, written_bytes
from _scaling_model import BF16, Run, Shape
from _small_llama import SmallLlama
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from amp_recipes import Brain, Stage

PLAN = {
    **{f"attention.{name}": ColwiseParallel for name in ("query", "key", "value")},
    **{f"feed_forward.{name}": ColwiseParallel for name in ("gate", "up")},
    "attention.out": RowwiseParallel,
    "feed_forward.down": RowwiseParallel,
}
BRAIN_PLAN = {
    f"model.blocks.*.{name}": "colwise" if style is ColwiseParallel else "rowwise" for name, style in PLAN.items()
}


@dataclass(frozen=True)
class Counted:
    """What one process counted in one step; the bytes by kind of collective."""

    given: dict[str, int]  # to collectives: the larger side of each
    calls: dict[str, int]
    written: int  # to sockets
    parameters: int
    gradients: int
    optimizer: int


def by_torch(shape: Shape, run: Run, device: torch.device | str = "cpu") -> nn.Module:
    """The small network, shared among the processes as a script by hand would with torch's own functions."""
    torch.manual_seed(0)
    model = SmallLlama(shape).to(device)
    sizes = (run.shard_replicas, run.ranks // (run.shard_replicas * run.tensor_parallel), run.tensor_parallel)
    mesh = init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
    for index, block in enumerate(model.blocks):
        if run.tensor_parallel > 1:
            parallelize_module(block, mesh["tensor"], {name: style() for name, style in PLAN.items()})
        if run.checkpointing:
            model.blocks[index] = checkpoint_wrapper(block)
    if run.strategy == "fsdp":
        shard_by_torch(model, run, mesh["replicate", "shard"] if run.shard_replicas > 1 else mesh["shard"])
        return model
    if run.ranks == run.tensor_parallel:
        return model
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if run.gradient_bytes == BF16:
        # By a name of our own: DDP refuses torch's without NCCL, though gloo sums bf16 as well.
        model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    return model


def shard_by_torch(model: SmallLlama, run: Run, mesh: DeviceMesh) -> None:
    """`fully_shard` each layer and the root: all in the compute dtype, or norms and embedding in fp32 as `run` says."""
    low = torch.bfloat16 if run.compute == BF16 else None
    plain = run.residual == run.compute
    policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=plain)
    exact = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if not plain:
            for module in block.modules():
                if isinstance(module, nn.RMSNorm):
                    fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=run.reshard_after_forward)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=run.reshard_after_forward)
    if not plain:
        for module in (model.embedding, model.norm):
            fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    # The root as fully_shard has it by itself: it stays gathered until its backward.
    fully_shard(model, mesh=mesh, mp_policy=policy)


def loss_of(model: nn.Module, numbers_BT: torch.Tensor, run: Run) -> torch.Tensor:
    """The loss of one micro-batch; a token stands for itself, which is as good to count with as any target."""
    with torch.autocast("cpu", torch.bfloat16, enabled=run.compute == BF16):
        return nn.functional.cross_entropy(model(numbers_BT).flatten(0, 1), numbers_BT.flatten())


def micro_batch_context(model: nn.Module, run: Run, last: bool) -> AbstractContextManager:
    """What keeps a micro-batch that is not the window's last from sending gradients."""
    if run.strategy == "fsdp":
        model.set_requires_gradient_sync(last or run.reduce_each)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def batches_of(shape: Shape, run: Run) -> list[torch.Tensor]:
    """The window's micro-batches of token numbers."""
    size = (run.micro_batches, run.batch, run.length)
    return list(torch.randint(0, shape.tokens, size, generator=torch.Generator().manual_seed(1)))


def count_step(rank: int, shape: Shape, run: Run, share: Callable[[Shape, Run], nn.Module] = by_torch) -> Counted:
    """What one step of a window of micro-batches sends, and what the process holds after it."""
    model = share(shape, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = batches_of(shape, run)

    def step() -> None:
        for number, batch in enumerate(batches, start=1):
            with micro_batch_context(model, run, last=number == len(batches)):
                loss_of(model, batch, run).backward()
        optimizer.step()

    for _ in range(2):  # DDP orders its buckets anew after the first, and tells the others
        step()
        optimizer.zero_grad()
    dist.barrier()
    before = written_bytes()
    with CollectiveBytes() as counted:
        step()
    written = written_bytes() - before
    parameters = list(model.parameters())
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    return Counted(
        given={kind: counted.of(kind) for kind in {call.kind for call in counted.calls}},
        calls=dict(Counter(call.kind for call in counted.calls)),
        written=written,
        parameters=sum(map(own_bytes, parameters)),
        gradients=sum(own_bytes(parameter.grad) for parameter in parameters),
        optimizer=sum(own_bytes(value) for value in state if value.ndim > 0),  # the step counts are left out
    )


GUARD_BYTES = 200  # what ranks tell each other is smaller; parameters and gradients, and activations, are larger


class LanguageModel(Brain):
    """The small network as a Brain trains it, on pairs of token numbers and the next ones."""

    def compute_forward(self, batch, stage: Stage):
        """The logits of a batch."""
        inputs, _ = batch
        return self.modules.model(inputs)

    def compute_objectives(self, predictions, batch, stage: Stage):
        """The loss of the logits."""
        _, targets = batch
        return nn.functional.cross_entropy(predictions.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def make_brain(shape: Shape, run: Run, **options: Any) -> LanguageModel:
    """A Brain with its default options, but for those that `run` says: every guard on, nothing written."""
    torch.manual_seed(0)
    return LanguageModel(
        modules={"model": SmallLlama(shape)},
        opt_class=make_optimizer,
        hparams={"tensor_parallel_plan": BRAIN_PLAN} if run.tensor_parallel > 1 else None,
        run_opts={
            "device": "cpu",
            "precision": "bf16" if run.compute == BF16 else "fp32",
            "strategy": run.strategy,
            "grad_accumulation_factor": run.micro_batches,
            "gradient_compression": "bf16" if run.gradient_bytes == BF16 else "off",
            "reshard_after_forward": run.reshard_after_forward,
            "shard_replicas": run.shard_replicas,
            "tensor_parallel": run.tensor_parallel,
            "activation_checkpointing": ["blocks"] if run.checkpointing else [],
            **options,
        },
    )


def by_brain(shape: Shape, run: Run) -> nn.Module:
    """The small network, shared among the processes by a Brain."""
    brain = make_brain(shape, run)
    brain.on_fit_start()
    return brain.modules.model


@dataclass(frozen=True)
class CountedFit:
    """What one process of a Brain counted: bytes of a step by kind of collective, and what it holds after it."""

    given: dict[str, int]  # without what the ranks tell each other
    guards: int
    parameters: int
    optimizer: int


def count_fit(rank: int, shape: Shape, run: Run) -> CountedFit:
    """What one window of a Brain sends: the difference between fits of 3 and 6 of them, over 3.

    Of batches without a length, so that its ranks talk in every window.
    """
    fits = []
    for windows in (3, 6):
        brain = make_brain(shape, run)
        batches = [(numbers, numbers) for numbers in batches_of(shape, run)] * windows
        with CollectiveBytes() as counted:
            brain.fit([1], iter(batches), progressbar=False)
        fits.append(Counter((call.kind, call.bytes) for call in counted.calls))
    given: dict[str, int] = {}
    guards = 0
    for kind, size in fits[1]:
        total = size * (fits[1][kind, size] - fits[0][kind, size]) // 3
        if size <= GUARD_BYTES:
            guards += total
        elif total:
            given[kind] = given.get(kind, 0) + total
    state = [value for of_one in brain.optimizer.state.values() for value in of_one.values()]
    return CountedFit(
        given=given,
        guards=guards,
        parameters=sum(map(own_bytes, brain.modules.parameters())),
        optimizer=sum(own_bytes(value) for value in state if value.ndim > 0),
    )


def count_fits(rank: int, shape: Shape, runs: list[Run]) -> list[CountedFit]:
    """`count_fit` of each run, one after the other."""
    return [count_fit(rank, shape, run) for run in runs]


def count_steps(rank: int, shape: Shape, runs: list[Run]) -> list[Counted]:
    """`count_step` of each run, one after the other."""
    return [count_step(rank, shape, run) for run in runs]


def own_bytes(tensor: torch.Tensor) -> int:
    """The bytes of it that lie in this process."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def count_kept(rank: int, shape: Shape, run: Run, share: Callable[[Shape, Run], nn.Module] = by_torch) -> int:
    """Bytes that a forward has allocated and not given back, by the allocator's own account; the loss among them."""
    model = share(shape, run)
    (batch,) = batches_of(shape, run)
    forward = partial(loss_of, model, batch, run)
    forward().backward()  # what is allocated once is allocated now
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = forward()
    events = profiled.profiler.kineto_results.events()
    del loss
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
