"""Sharded training means the same as one process that accumulates the micro-batches of all ranks, written by hand."""

import pytest
import torch
from pairwise import extended
from processes import in_processes
from sharded_runs import by_hand, furthest, train_sharded, whole
from torch_release import needs_fsdp

from amp_recipes.distributed import is_sharded

pytestmark = needs_fsdp

BATCHES = 6
# AdamW divides by the root of a squared gradient: a rounding of 1e-7 in a gradient near zero moves its weight by more.
SGD_BOUND = 1e-6


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.3, momentum=0.9, weight_decay=0.01)


def run(rank, options, batches, optimizer=None, tied=False):
    brain = train_sharded(rank, options, batches, **({"optimizer": optimizer} if optimizer else {}), tied=tied)
    assert is_sharded(brain.modules)
    # As arrays: a tensor in a pipe is a name of memory that is gone when the process has ended.
    weights = {name: it.numpy() for name, it in whole(brain.modules).items()}
    return weights, brain.optimizer_step, brain.skipped_steps, brain.summary.last


@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [(2, None), extended(2, sgd), extended(4, None), extended(4, sgd)],
    ids=["2-adamw", "2-sgd", "4-adamw", "4-sgd"],
)
def test_fp32_with_accumulation_and_clipping(ranks, optimizer):
    options = {"grad_accumulation_factor": 2, "max_grad_norm": 0.1}
    found = in_processes(run, ranks, options, BATCHES, optimizer)
    expected, norms = by_hand(ranks, BATCHES, 2, 0.1, **({"optimizer": optimizer} if optimizer else {}))
    assert min(norms) > 0.1, "the clipping must be in effect"
    for weights, steps, skipped, _ in found:
        assert (steps, skipped) == (BATCHES // 2, 0)
        assert furthest(weights, expected) < 1e-6
        assert all((weights[name] == found[0][0][name]).all() for name in weights)


PINS = ["model.blocks.1.up", "model.head", "type:LayerNorm"]


@pytest.mark.parametrize(
    ("precision", "dtype", "pins"),
    [
        ("bf16", torch.bfloat16, PINS),
        ("fp16", torch.float16, []),
        extended("bf16", torch.bfloat16, []),
        extended("fp16", torch.float16, PINS),
    ],
    ids=["bf16-pins", "fp16", "bf16", "fp16-pins"],
)
def test_low_precision_casts_what_autocast_casts_in_one_process(precision, dtype, pins):
    """Weights are gathered in low precision where autocast would cast them, and elsewhere in fp32."""
    options = {"precision": precision, "fp32_modules": pins, "max_grad_norm": 0.1, "init_scale": 1024.0}
    found = in_processes(run, 2, options, BATCHES, sgd)
    expected, norms = by_hand(2, BATCHES, 1, 0.1, dtype, 1024.0 if precision == "fp16" else 1.0, pins, sgd)
    assert min(norms) > 0.1
    for weights, steps, skipped, _ in found:
        assert (steps, skipped) == (BATCHES, 0)
        assert furthest(weights, expected) < 1e-6


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), extended(4, {}), extended(4, {"reshard_after_forward": False})],
    ids=["2-reshard", "4-reshard", "4-keep"],
)
def test_tied_weights_and_groups_that_hold_copies(ranks, options):
    options = {"shard_replicas": 2, "grad_accumulation_factor": 3, "max_grad_norm": 0.1, **options}
    found = in_processes(run, ranks, options, BATCHES, sgd, True)
    expected, norms = by_hand(ranks, BATCHES, 3, 0.1, optimizer=sgd, tied=True)
    assert min(norms) > 0.1
    for weights, steps, _, _ in found:
        assert steps == BATCHES // 3
        assert furthest(weights, expected) < 1e-6


PLAN = {"*.up": "colwise", "*.down": "rowwise", "*.head": "colwise_gathered"}


def run_divided(rank, options, data_rank):
    brain = train_sharded(rank, options, BATCHES, sgd, {"tensor_parallel_plan": PLAN}, data_rank=data_rank[rank])
    divided = brain.modules.model.blocks[0].up.weight
    assert "tensor" in divided.device_mesh.mesh_dim_names
    return {name: it.numpy() for name, it in whole(brain.modules).items()}, brain.optimizer_step, brain.skipped_steps


@pytest.mark.parametrize(
    ("ranks", "options", "data_rank"),
    [(2, {}, [0, 0]), extended(4, {}, [0, 0, 1, 1]), extended(4, {"shard_replicas": 2}, [0, 0, 1, 1])],
    ids=["tensor", "shards and tensor", "replicas and tensor"],
)
def test_layers_that_several_processes_share(ranks, options, data_rank):
    """Neighbours compute each layer together on the same data; the norm counts each number once."""
    options = {"tensor_parallel": 2, "grad_accumulation_factor": 2, "max_grad_norm": 0.1, **options}
    found = in_processes(run_divided, ranks, options, data_rank)
    expected, norms = by_hand(ranks // 2, BATCHES, 2, 0.1, optimizer=sgd)
    assert min(norms) > 0.1
    for weights, *steps in found:
        assert steps == [BATCHES // 2, 0]
        assert furthest(weights, expected) < 1e-6
