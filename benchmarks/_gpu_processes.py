"""Trains with ddp and fsdp in a group of one process over NCCL, and in two processes that share one device over gloo.

A group of one: its weights must be those of a run without a group. Two on one device, each with half of every batch:
their weights must be near those of a run with whole batches. Neither replaces two devices.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist
from _gpu_networks import INIT_SCALE, Network, language_model, make_brain, scratch_folder
from _gpu_results import PRECISIONS, parse, result
from torch.distributed import get_default_backend_for_device as default_backend
from torch.distributed.tensor import DTensor

from amp_recipes.distributed import processes

STRATEGIES = ("ddp", "fsdp")
STEPS = 6
NEAR = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}  # of the update's norm: halves are rounded by themselves


def network(small: bool, rows: int) -> Network:
    """A language model for batches of so many rows."""
    return language_model(2, 32, 64, 16, rows) if small else language_model(4, 256, 512, 256, rows)


def trained(device: torch.device, precision: str, small: bool, strategy: str, half: int | None) -> list[torch.Tensor]:
    """How far a few steps of SGD move the weights. half: which half of each batch is this process's."""
    rows = 8
    whole = network(small, rows)
    batches = whole.batches(STEPS, device)
    if half is not None:
        own = slice(half * rows // 2, (half + 1) * rows // 2)
        batches = [(inputs[own], targets[own]) for inputs, targets in batches]
    brain = make_brain(
        *(whole.make(device), device, precision),
        strategy=strategy,
        distributed_backend=os.environ.get("AMP_RECIPES_BACKEND"),
        distributed_timeout_minutes=1.0,
        max_grad_norm=0.0,
        init_scale=INIT_SCALE,
    )
    # AdamW's first steps go by the gradients' signs, which a rounding turns.
    brain.opt_class = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    before = [tensor.detach().cpu().clone() for tensor in brain.modules.parameters()]
    brain.fit([1], batches)
    ends = [tensor.detach() for tensor in brain.modules.parameters()]
    if strategy == "fsdp":
        assert any(isinstance(tensor, DTensor) for tensor in ends), "nothing was sharded"
    ends = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in ends]
    return [end.cpu() - begin for end, begin in zip(ends, before, strict=True)]


def distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The norm of the difference, relative to that of the others."""
    flat = [torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (some, others)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def be_one_of(group: str, argv: Sequence[str]) -> None:
    """Be a process of a group: train with each strategy at each precision, and print how far it is from one alone."""
    options = parse_words(argv)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    alone = {precision: torch.load(options.alone)[precision] for precision in PRECISIONS}
    if world == 1:
        processes.treat_one_as_many()
        dist.init_process_group(backend(options.device))
    for strategy in options.strategies:
        for precision in PRECISIONS:
            what = f"{strategy}, {precision}, {group}"
            try:
                half = rank if world > 1 else None
                moved = trained(options.device, precision, options.small, strategy, half)
            except Exception as error:
                traceback.print_exc()
                if rank == 0:
                    note = (
                        f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else repr(error)
                    )
                    # gloo may lack what fsdp calls for tensors of a GPU: then that is no fault of ours.
                    lacking = world > 1 and strategy == "fsdp" and options.device.type != "cpu"
                    result(what, "failed", None if lacking else False, note[:300])
                if world > 1:
                    raise  # the others are not where this one is
                continue
            if rank == 0:
                off = distance(moved, alone[precision])
                told = f"{off:.2g} of the update away from one process"
                result(what, told, off <= NEAR[precision], f"over {dist.get_backend_config()}")


def backend(device: torch.device) -> str:
    """What a run of several processes would take."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{default_backend(device.type)}"


def start_group(count: int, group: str, strategies: Sequence[str], options: Namespace, alone: str) -> None:
    """Start the processes of a group on the one device, as if each were on a machine of its own."""
    small = ("--small",) if options.small else ()
    words = [f"--device={options.device}", *small, f"--group={group}", f"--alone={alone}"]
    words += ["--strategies", *strategies]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    variables |= {"MASTER_ADDR": "127.0.0.1"} | ({"AMP_RECIPES_BACKEND": "gloo"} if count > 1 else {})
    started = []
    for rank in range(count):
        own = {name: str(value) for name, value in {**variables, "RANK": rank}.items()}
        started.append(subprocess.Popen([sys.executable, __file__, *words], env={**os.environ, **own}))
    statuses = [process.wait() for process in started]
    if any(statuses) and not (count > 1 and "fsdp" in strategies and options.device.type != "cpu"):
        result(f"{', '.join(strategies)}, {group}", f"exit statuses {statuses}", False)


def parse_words(argv: Sequence[str]) -> Namespace:
    """The options; with a group, be one of its processes."""
    return parse(__doc__.splitlines()[0], argv, group={}, alone={}, strategies={"nargs": "+", "default": STRATEGIES})


def main(argv: Sequence[str]) -> None:
    """Train alone, then in both groups."""
    options = parse_words(argv)
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)
    if options.group:
        be_one_of(options.group, argv)
        return
    if options.device.type not in ("cpu", "cuda"):
        result("groups of processes", "not here", None, f"neither NCCL nor gloo takes tensors of {options.device.type}")
        return
    alone = f"{scratch_folder()}/alone.pt"
    torch.save({name: trained(options.device, name, options.small, "ddp", None) for name in PRECISIONS}, alone)
    start_group(1, "a group of one", STRATEGIES, options, alone)
    for strategy in STRATEGIES:
        start_group(2, "two on one device", [strategy], options, alone)


if __name__ == "__main__":
    main(sys.argv[1:])
