"""The formulas of docs/explanation/scaling.md against counts: bytes sent and bytes held, in 1, 2 and 4 processes."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from processes import in_processes
from repository import REPOSITORY
from torch_release import needs_fsdp, skip_where_unknown

BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # no package: its files import each other by name

from _scaling_counts import by_brain, count_fits, count_kept, count_steps  # noqa: E402
from _scaling_model import (  # noqa: E402
    BEGIN,
    BF16,
    DOCUMENT,
    END,
    FP32,
    LLAMA_7B,
    Machine,
    Protocol,
    Run,
    Shape,
    block_groups,
    cast_weights,
    collectives,
    gathered_bytes,
    held,
    kept_activations,
    memory,
    put,
    rest_groups,
    seconds,
    table,
)
from _small_llama import SmallLlama  # noqa: E402

SMALL = Shape(layers=3, hidden=64, inner=160, heads=4, tokens=256)
FP32_RUN = Run("ddp", ranks=2, batch=2, length=16, compute=FP32)
BF16_RUN = replace(FP32_RUN, compute=BF16)
FP32_SHARDED = replace(FP32_RUN, strategy="fsdp")
BF16_SHARDED = replace(FP32_SHARDED, compute=BF16, residual=BF16)

STEPS = {
    "ddp": FP32_RUN,
    "ddp, bf16": BF16_RUN,
    "ddp, a window of 3": replace(FP32_RUN, micro_batches=3),
    "ddp, gradients in bf16": replace(FP32_RUN, gradient_bytes=BF16),
    "ddp, 4": replace(FP32_RUN, ranks=4),
    "fsdp": FP32_SHARDED,
    "fsdp, bf16": BF16_SHARDED,
    "fsdp, bf16, norms in fp32": replace(BF16_SHARDED, residual=FP32),
    "fsdp, bf16, kept after the forward": replace(BF16_SHARDED, reshard_after_forward=False),
    "fsdp, bf16, checkpointed": replace(BF16_SHARDED, checkpointing=True),
    "fsdp, bf16, a window of 3": replace(BF16_SHARDED, micro_batches=3),
    "fsdp, bf16, a window of 3, reduced once": replace(BF16_SHARDED, micro_batches=3, reduce_each=False),
    "fsdp, bf16, 4": replace(BF16_SHARDED, ranks=4),
    "fsdp, bf16, 2 replicas of 2": replace(BF16_SHARDED, ranks=4, shard_replicas=2),
    "tensor parallel": replace(FP32_RUN, tensor_parallel=2),
    "tensor parallel, bf16": replace(BF16_RUN, tensor_parallel=2),
    "tensor parallel, bf16, checkpointed": replace(BF16_RUN, tensor_parallel=2, checkpointing=True),
    "fsdp 2 by tensor parallel 2, bf16": replace(BF16_SHARDED, ranks=4, tensor_parallel=2),
}


SHORT = ["ddp, gradients in bf16", "fsdp", "tensor parallel"]
in_three_parts = pytest.fixture(
    scope="module", params=["short", *(pytest.param(ranks, marks=pytest.mark.extended) for ranks in (2, 4))]
)


def counted(count, runs: dict[str, Run], part: str | int) -> list[tuple]:
    """(name, run, what each rank counted) of the short runs, or the others of so many ranks, in the same processes."""
    ranks = 2 if part == "short" else part
    chosen = {name: it for name, it in runs.items() if it.ranks == ranks and (name in SHORT) == (part == "short")}
    of_ranks = in_processes(count, ranks, SMALL, list(chosen.values()))
    return list(zip(chosen, chosen.values(), zip(*of_ranks, strict=True), strict=True))


@in_three_parts
def counted_steps(request):
    return counted(count_steps, STEPS, request.param)


def given_bytes(run: Run) -> dict[str, float]:
    """What a step gives to each kind of collective, by the formulas."""
    given: dict[str, float] = {}
    for each in collectives(SMALL, run):
        given[each.kind] = given.get(each.kind, 0) + each.bytes * each.count
    return given


def test_a_step_sends_and_holds_what_the_formulas_say(counted_steps, subtests):
    for name, run, of_ranks in counted_steps:
        with subtests.test(name):
            own = memory(SMALL, run)
            assert len(of_ranks) == run.ranks
            for counts in of_ranks:
                assert counts.given == given_bytes(run)
                held_bytes = (counts.parameters, counts.gradients, counts.optimizer)
                assert held_bytes == (own.parameters, own.gradients, own.optimizer)


def test_a_step_writes_to_its_sockets_what_a_ring_sends(counted_steps, subtests):
    """Gloo makes a reduce-scatter of an all-reduce, at twice the bytes; and each message has a header."""
    for name, run, of_ranks in counted_steps:
        with subtests.test(name):
            sent = sum(each.sent * (2 if each.kind == "reduce-scatter" else 1) for each in collectives(SMALL, run))
            for counts in of_ranks:
                headers = 700 * run.ranks / 2 * sum(counts.calls.values())
                assert sent <= counts.written <= 1.001 * sent + headers


@pytest.mark.parametrize(
    ("run", "checkpointing"),
    [
        (FP32_RUN, False),
        (BF16_RUN, True),
        pytest.param(FP32_RUN, True, marks=pytest.mark.extended),
        pytest.param(BF16_RUN, False, marks=pytest.mark.extended),
    ],
    ids=["fp32", "bf16-checkpointed", "fp32-checkpointed", "bf16"],
)
def test_a_forward_keeps_what_the_formulas_say(run, checkpointing):
    run = replace(run, ranks=1, checkpointing=checkpointing)
    weights = cast_weights(SMALL, run)
    if checkpointing and run.compute == BF16:
        weights = BF16 * SMALL.tokens * SMALL.hidden  # the head's: the others went as autocast was left
    generators = SMALL.layers * torch.get_rng_state().nbytes if checkpointing else 0
    loss = 2 * FP32  # the loss, and the number of targets that it was divided by
    (kept,) = in_processes(count_kept, 1, SMALL, run)
    assert kept == kept_activations(SMALL, run, fused_norm=False) + weights + generators + loss


@pytest.mark.parametrize("reshard", [False, True])
def test_a_sharded_forward_keeps_activations_and_what_stays_gathered(reshard):
    run = replace(BF16_SHARDED, reshard_after_forward=reshard)
    gathered = BF16 * (SMALL.rest if reshard else SMALL.parameters)
    expected = kept_activations(SMALL, run, fused_norm=False) + gathered + 2 * FP32
    for kept in in_processes(count_kept, 2, SMALL, run):
        # The buffer that a layer arrived in goes when gloo's thread has let go of it: before the count, or behind it.
        assert kept in (expected, expected + BF16 * SMALL.block)


BRAIN_SHARDED = replace(BF16_SHARDED, residual=FP32)
FITS = {
    "ddp": FP32_RUN,
    "ddp, bf16, a window of 3": replace(BF16_RUN, micro_batches=3),
    "ddp, gradients in bf16": replace(FP32_RUN, gradient_bytes=BF16),
    "fsdp": FP32_SHARDED,
    "fsdp, bf16, a window of 3": replace(BRAIN_SHARDED, micro_batches=3),
    "fsdp, bf16, kept after the forward": replace(BRAIN_SHARDED, reshard_after_forward=False),
    "fsdp, bf16, checkpointed": replace(BRAIN_SHARDED, checkpointing=True),
    "tensor parallel, bf16": replace(BRAIN_SHARDED, tensor_parallel=2),
    "tensor parallel, bf16, checkpointed": replace(BRAIN_SHARDED, tensor_parallel=2, checkpointing=True),
    "fsdp 2 by tensor parallel 2, bf16": replace(BRAIN_SHARDED, ranks=4, tensor_parallel=2),
    "fsdp, bf16, 2 replicas of 2, a window of 3": replace(BRAIN_SHARDED, ranks=4, shard_replicas=2, micro_batches=3),
}


@in_three_parts
def counted_fits(request):
    return counted(count_fits, FITS, request.param)


@needs_fsdp
def test_a_brain_sends_and_holds_what_the_formulas_say(counted_fits, subtests):
    for name, run, of_ranks in counted_fits:
        with subtests.test(name):
            own = memory(SMALL, run)
            for counts in of_ranks:
                assert counts.given == given_bytes(run)
                assert (counts.parameters, counts.optimizer) == (own.parameters, own.optimizer)
                assert 0 < counts.guards < 500


@pytest.mark.parametrize("run", [replace(BF16_RUN, ranks=1), BRAIN_SHARDED], ids=["alone", "fsdp"])
def test_the_forward_of_a_brain_keeps_what_the_formulas_say(run):
    skip_where_unknown(run.strategy)
    kept = kept_activations(SMALL, run, fused_norm=False) + cast_weights(SMALL, run) + 2 * FP32
    gathered = gathered_bytes(rest_groups(SMALL, run)) if run.strategy == "fsdp" else 0
    for counted in in_processes(count_kept, run.ranks, SMALL, run, by_brain):
        # One or both of a layer's messages may still be in gloo's hands.
        assert 0 <= counted - kept - gathered <= gathered_bytes(block_groups(SMALL, run))


def test_the_shape_counts_the_parameters_of_the_network():
    assert sum(p.numel() for p in SmallLlama(SMALL).parameters()) == SMALL.parameters
    with torch.device("meta"):
        assert sum(p.numel() for p in SmallLlama(LLAMA_7B).parameters()) == LLAMA_7B.parameters
    assert LLAMA_7B.parameters == 6_738_415_616  # as published


def test_known_figures_come_out():
    """ZeRO's example (1910.02054, figure 1) with fp32 gradients; a ring's bytes; the seconds of a known size."""
    sharded = replace(BF16_SHARDED, ranks=64)
    assert memory(LLAMA_7B, sharded).state == pytest.approx(16 * LLAMA_7B.parameters / 64, rel=1e-6)
    assert held(LLAMA_7B, replace(FP32_RUN, ranks=64)) == LLAMA_7B.parameters
    (gradients,) = collectives(LLAMA_7B, replace(FP32_RUN, ranks=8))
    assert gradients.sent == pytest.approx(2 * 7 / 8 * 4 * LLAMA_7B.parameters)
    at_once = Machine(reached=1.0, protocols=(Protocol(0, 0, 0, 1),))
    assert seconds(gradients, at_once) == pytest.approx(gradients.sent / 450e9)
    across = replace(gradients, ranks=16)  # two nodes: eight ports of 50 GB/s are slower than NVLink
    assert seconds(across, at_once) == pytest.approx(across.sent / 400e9)


def test_the_document_holds_the_table_that_the_formulas_make():
    text = DOCUMENT.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert put(text, table()) == text, "run: python benchmarks/_scaling_model.py --write"


def test_the_numbers_in_the_document_are_those_of_the_model():
    text = DOCUMENT.read_text()
    machine = Machine()
    assert re.search(rf"{machine.nvlink / 1e9:g} GB/s", text)
    assert re.search(rf"{machine.network / 1e9:g} GB/s", text)
    assert f"{machine.flops / 1e12:g} TFLOP/s" in text
    assert f"{machine.utilisation:.0%}".replace("%", " %") in text
