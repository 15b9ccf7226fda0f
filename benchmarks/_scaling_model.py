"""How memory and communication grow with model, batch, ranks and strategy: the formulas, and the table made from them.

    python benchmarks/_scaling_model.py          prints the table of docs/explanation/scaling.md
    python benchmarks/_scaling_model.py --write  puts it there

The formulas are held against counts at small scale in tests/system/test_scaling_formulas.py. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "explanation" / "scaling.md"
BEGIN, END = "<!-- the table begins: benchmarks/_scaling_model.py --write -->", "<!-- the table ends -->"

FP32, BF16 = 4, 2  # bytes of a number
ADAMW_MOMENTS = 2
BUCKET_BYTES = 25 * 2**20  # DDP's default bucket_cap_mb


@dataclass(frozen=True)
class Shape:
    """A transformer of Llama's shape: untied embedding and head, RMSNorm, SwiGLU, as many key heads as heads."""

    layers: int
    hidden: int
    inner: int
    heads: int
    tokens: int

    @property
    def block_matrices(self) -> int:
        """Parameters of one layer's linear modules: query, key, value, out; gate, up, down."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.inner

    @property
    def block(self) -> int:
        """Parameters of one layer: its linear modules and two norms."""
        return self.block_matrices + 2 * self.hidden

    @property
    def rest(self) -> int:
        """Parameters outside the layers: embedding, head and the last norm. FSDP's root group."""
        return 2 * self.tokens * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.block + self.rest


LLAMA_7B = Shape(layers=32, hidden=4096, inner=11008, heads=32, tokens=32_000)


@dataclass(frozen=True)
class Run:
    """One way to train a shape.

    batch: sequences in a micro-batch of one data rank (tensor parallel peers are one data rank); length: tokens in a
    sequence; compute: bytes of a number in the products (2 at bf16); residual: bytes of a number outside of them:
    between the layers, in norms and in the embedding, as FSDP gathers their weights. It is 4 with a Brain, whose
    autocast casts what the products need alone; torch's plain policy (param_dtype) makes it the compute dtype.
    reduce_each: whether FSDP reduces gradients at each micro-batch, or once a window, as Brain does not.
    """

    strategy: str  # ddp or fsdp
    ranks: int
    batch: int
    length: int
    compute: int = BF16
    residual: int = FP32
    micro_batches: int = 1
    shard_replicas: int = 1
    tensor_parallel: int = 1
    reshard_after_forward: bool = True
    reduce_each: bool = True
    checkpointing: bool = False
    gradient_bytes: int = FP32  # as DDP sends them: 2 with gradient_compression
    ranks_of_node: int = 8

    @property
    def shards(self) -> int:
        """Ranks among which each parameter is split by FSDP."""
        return self.ranks // (self.shard_replicas * self.tensor_parallel) if self.strategy == "fsdp" else 1

    @property
    def tokens(self) -> int:
        """Tokens in a micro-batch of one data rank."""
        return self.batch * self.length


# ---------------------------------------------------------------------- memory


def held(shape: Shape, run: Run) -> int:
    """Parameters that a rank holds between steps: tensor parallelism splits the linear modules of the layers, FSDP all.

    FSDP pads the first dimension of each parameter to a multiple of the ranks; left out here.
    """
    layers = shape.layers * (shape.block_matrices // run.tensor_parallel + 2 * shape.hidden)
    return (layers + shape.rest) // run.shards


def block_activations(shape: Shape, run: Run, fused_norm: bool = True) -> int:
    """Bytes that one layer keeps for its backward, per token."""
    hidden, parts = shape.hidden, run.tensor_parallel
    # Autocast casts what goes in for each linear module anew: three copies for query, key and value, two for gate and
    # up. Where nothing is cast each group of them shares one.
    inputs = (2 if run.residual == run.compute else 5) * run.compute * hidden
    attention = 4 * run.compute * hidden // parts + FP32 * shape.heads // parts  # q, k, v, result; its logsumexp
    feed_forward = 4 * run.compute * shape.inner // parts  # gate, silu(gate), up, their product
    return 2 * norm_activations(shape, run, fused_norm) + inputs + attention + feed_forward


def norm_activations(shape: Shape, run: Run, fused_norm: bool) -> int:
    """Bytes that one RMSNorm keeps, per token.

    fused_norm: on a GPU it is one kernel, which keeps its input; on a CPU it is made of several, which keep an fp32
    input and the normalised one.
    """
    return (run.residual * shape.hidden if fused_norm else 2 * FP32 * shape.hidden) + FP32


def kept_activations(shape: Shape, run: Run, fused_norm: bool = True) -> int:
    """Bytes that the forward of one micro-batch keeps for the backward; of a checkpointed layer its input alone.

    Behind the layers: the last norm, what goes into the head, and the log-softmax in fp32.
    """
    layer = run.residual * shape.hidden if run.checkpointing else block_activations(shape, run, fused_norm)
    end = norm_activations(shape, run, fused_norm) + run.compute * shape.hidden + FP32 * shape.tokens
    return (shape.layers * layer + end) * run.tokens


def cast_weights(shape: Shape, run: Run) -> int:
    """Bytes of the low-precision copies of the linear modules' weights that autocast makes.

    Without checkpointing they live until the backward; with it until autocast is left, and the head's alone on. FSDP's
    policy gathers the weights in low precision: there are none.
    """
    if run.strategy == "fsdp" or run.compute == FP32:
        return 0
    layers = shape.layers * shape.block_matrices // run.tensor_parallel
    return run.compute * (layers + shape.tokens * shape.hidden)


def loss_peak(shape: Shape, run: Run) -> int:
    """Bytes about the logits, beside the log-softmax, where the loss turns around: they, their gradient, its cast."""
    return (2 * run.compute + FP32) * shape.tokens * run.tokens


def gathered(shape: Shape, run: Run) -> int:
    """Bytes of whole parameters and gradients that FSDP holds beside its shards, at most.

    The root group stays from the forward to its backward; of layers there are the one that computes, the one fetched
    ahead, and the buffer that it arrives in. A gradient stands in the compute dtype and, as it is sent, in fp32.
    """
    if run.shards == 1:
        return 0
    block = shape.block_matrices // run.tensor_parallel + 2 * shape.hidden
    blocks = 3 if run.reshard_after_forward else shape.layers + 1
    gradients = (run.compute + FP32) * max(block, shape.rest)
    if not run.reduce_each and run.micro_batches > 1:
        gradients += FP32 * (shape.layers * block + shape.rest)
    return gathered_bytes(rest_groups(shape, run)) + blocks * gathered_bytes(block_groups(shape, run)) + gradients


def block_groups(shape: Shape, run: Run) -> dict[int, int]:
    """What FSDP gathers for one layer: bytes of a number -> so many numbers; each in a message of its own."""
    return groups(run, shape.block_matrices // run.tensor_parallel, 2 * shape.hidden)


def rest_groups(shape: Shape, run: Run) -> dict[int, int]:
    """The same of the root: the head, and embedding and norm."""
    head = shape.tokens * shape.hidden
    return groups(run, head, shape.rest - head)


def groups(run: Run, matrices: int, others: int) -> dict[int, int]:
    """Numbers that autocast would cast, and others, by the bytes that each is gathered in."""
    return (
        {run.compute: matrices, run.residual: others}
        if run.residual != run.compute
        else {run.compute: matrices + others}
    )


def gathered_bytes(of_unit: dict[int, int]) -> int:
    """Bytes of all groups of a unit."""
    return sum(size * numbers for size, numbers in of_unit.items())


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: between steps (`state`), and at most within one (`peak`)."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    cast_weights: int
    activations: int

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return self.state + self.gathered + self.cast_weights + self.activations


def memory(shape: Shape, run: Run) -> Memory:
    """What one rank needs with AdamW. Parameters, gradients and moments are fp32: they are the master weights."""
    own = held(shape, run)
    activations = kept_activations(shape, run)
    if run.checkpointing:  # a layer is computed again when the logits are gone
        activations += max(block_activations(shape, run) * run.tokens, loss_peak(shape, run))
    else:
        activations += loss_peak(shape, run)
    return Memory(
        parameters=FP32 * own,
        gradients=FP32 * own,
        optimizer=ADAMW_MOMENTS * FP32 * own,
        gathered=gathered(shape, run),
        cast_weights=cast_weights(shape, run),
        activations=activations,
    )


# ---------------------------------------------------------------------- communication


@dataclass(frozen=True)
class Collective:
    """`count` equal collectives of one step, each of `bytes` on its larger side, among `ranks`, so many of a node."""

    what: str
    kind: str
    bytes: float
    count: int
    ranks: int
    ranks_of_node: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring: (N - 1) / N of the data once, in an all-reduce twice."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return self.count * self.bytes * rounds * (self.ranks - 1) / self.ranks


def collectives(shape: Shape, run: Run) -> list[Collective]:
    """What a rank takes part in during one step of `micro_batches`; groups of one rank are left out."""
    found = [*tensor_parallel_collectives(shape, run)]
    found += fsdp_collectives(shape, run) if run.strategy == "fsdp" else ddp_collectives(shape, run)
    return [each for each in found if each.ranks > 1 and each.count > 0]


def ddp_collectives(shape: Shape, run: Run) -> Iterator[Collective]:
    """Each gradient once a window, in buckets."""
    total = run.gradient_bytes * held(shape, run)
    buckets = math.ceil(FP32 * held(shape, run) / BUCKET_BYTES)
    ranks = run.ranks // run.tensor_parallel
    near = max(1, min(ranks, run.ranks_of_node // run.tensor_parallel))
    yield Collective("gradients", "all-reduce", total / buckets, buckets, ranks, near)


def fsdp_collectives(shape: Shape, run: Run) -> Iterator[Collective]:
    """Parameters before each forward and backward, in two messages where there are two dtypes; gradients in fp32.

    The root is not freed between forward and backward, so that it is gathered once. Replicas wait with their
    all-reduce for the window's last micro-batch.
    """
    near = max(1, min(run.shards, run.ranks_of_node // run.tensor_parallel))
    gathers = (2 if run.reshard_after_forward else 1) * run.micro_batches
    reductions = run.micro_batches if run.reduce_each else 1
    # A replica's rank averages its shard with the ranks that hold the same one: one in each replica.
    far = min(max(1, run.ranks_of_node // (run.shards * run.tensor_parallel)), run.shard_replicas)
    units = (
        ("layers", block_groups(shape, run), shape.layers, gathers),
        ("rest", rest_groups(shape, run), 1, run.micro_batches),
    )
    for what, of_unit, count, times in units:
        for size, numbers in of_unit.items():
            gradients, sent = FP32 * numbers, count * reductions
            yield Collective(f"{what}: parameters", "all-gather", size * numbers, count * times, run.shards, near)
            yield Collective(f"{what}: gradients", "reduce-scatter", gradients, sent, run.shards, near)
            yield Collective(f"{what}: shards", "all-reduce", gradients / run.shards, count, run.shard_replicas, far)


def tensor_parallel_collectives(shape: Shape, run: Run) -> Iterator[Collective]:
    """All-reduces of activations: out and down in the forward; query, key, value, gate and up in the backward.

    A fused query-key-value and gate-up would need two in the backward (Megatron). A checkpointed layer repeats the
    forward up to the last product, whose result nobody needs.
    """
    numbers = run.tokens * shape.hidden
    times = shape.layers * run.micro_batches
    near = min(run.tensor_parallel, run.ranks_of_node)
    forward = 2 + (1 if run.checkpointing else 0)
    yield Collective("activations", "all-reduce", run.compute * numbers, forward * times, run.tensor_parallel, near)
    yield Collective("their gradients", "all-reduce", run.residual * numbers, 5 * times, run.tensor_parallel, near)


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's ways to send: seconds to start and per hop, and the part of the bandwidth that is left."""

    start: float
    near_hop: float
    far_hop: float
    bandwidth: float


# NCCL's own figures for a ring over NVLink and a network: src/graph/tuning.cc, baseLat, hwLat and the factors of busBw.
PROTOCOLS = (
    Protocol(8.4e-6, 3.4e-6, 9.6e-6, 1.0),  # Simple
    Protocol(10.0e-6, 1.9e-6, 4.0e-6, 0.92),  # LL128
    Protocol(3.6e-6, 1.8 * 0.47e-6, 2.7e-6, 0.25),  # LL
)


@dataclass(frozen=True)
class Machine:
    """Assumptions on the hardware; the defaults are a node of eight H100 with NVLink 4 and eight 400 Gb/s ports.

    nvlink, network: bytes a second of one GPU in one direction; reached: the part of them that collectives get.
    """

    flops: float = 989e12  # dense bf16
    utilisation: float = 0.4
    memory: float = 80e9
    usable: float = 0.9  # the rest: context, communication buffers, fragmentation
    nvlink: float = 450e9
    network: float = 50e9
    reached: float = 0.8
    protocols: tuple[Protocol, ...] = PROTOCOLS


def seconds(collective: Collective, machine: Machine) -> float:
    """Time of the collectives on their own: bytes at the slowest link, and the hops around the ring.

    By the quickest protocol. A ring that runs through all GPUs of a node enters and leaves by all of their ports. An
    all-reduce may take a tree instead, whose hops grow with the logarithm of the nodes.
    """
    near = collective.ranks_of_node
    nodes = collective.ranks / near
    bandwidth = machine.reached * (machine.nvlink if nodes <= 1 else min(machine.nvlink, near * machine.network))

    def by(protocol: Protocol) -> float:
        ring = (collective.ranks - nodes) * protocol.near_hop + (nodes - 1) * protocol.far_hop
        tree = (near - 1) * protocol.near_hop + math.log2(max(1, nodes)) * protocol.far_hop
        hops = 2 * min(ring, tree) if collective.kind == "all-reduce" else ring
        return collective.sent / (bandwidth * protocol.bandwidth) + collective.count * (protocol.start + hops)

    return min(map(by, machine.protocols))


def compute_seconds(shape: Shape, run: Run, machine: Machine) -> float:
    """Time of the products of one step: 6 operations per parameter and token and 12 * length * hidden per layer.

    As Megatron counts (2104.04473, appendix); with checkpointing the layers' forward once more: 8 and 16.
    """
    passes = 8 if run.checkpointing else 6
    layer = passes * (shape.block_matrices + 2 * run.length * shape.hidden) / run.tensor_parallel
    head = 6 * shape.tokens * shape.hidden
    operations = run.micro_batches * run.tokens * (shape.layers * layer + head)
    return operations / (machine.flops * machine.utilisation)


# ---------------------------------------------------------------------- the table


def table_runs(batch: int = 2, length: int = 4096, counts: Sequence[int] = (1, 2, 4, 8, 16, 64, 256, 1024)) -> list:
    """Name and run of each row. All take batch * length tokens per GPU and step, tensor parallel peers together."""
    rows = [("ddp", Run("ddp", ranks, batch, length)) for ranks in counts]
    sharded = Run("fsdp", 1, batch, length)
    rows += [("fsdp", replace(sharded, ranks=ranks)) for ranks in counts if ranks > 1]
    rows += [
        ("fsdp, replicas of 8", replace(sharded, ranks=ranks, shard_replicas=ranks // 8))
        for ranks in counts
        if ranks > 8
    ]
    rows += [
        ("fsdp, tensor parallel 8", replace(sharded, ranks=ranks, batch=8 * batch, tensor_parallel=8))
        for ranks in counts
        if ranks >= 8
    ]
    return rows


def table(shape: Shape = LLAMA_7B, machine: Machine = Machine()) -> str:
    """The table of docs/explanation/scaling.md."""
    lines = [
        "| strategy | GPUs | state | peak | peak, checkpointed | fits 80 GB | sent | communication | compute | ratio |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, run in table_runs():
        checkpointed = replace(run, checkpointing=True)
        peaks = [memory(shape, each).peak for each in (run, checkpointed)]
        limit = machine.memory * machine.usable
        fits = "yes" if peaks[0] <= limit else "checkpointed" if peaks[1] <= limit else "no"
        taken = run if fits == "yes" else checkpointed
        found = collectives(shape, taken)
        sent = sum(each.sent for each in found)
        communication = sum(seconds(each, machine) for each in found)
        compute = compute_seconds(shape, taken, machine)
        lines.append(
            f"| {name} | {run.ranks:,} | {gigabytes(memory(shape, run).state)} | {gigabytes(peaks[0])} | "
            f"{gigabytes(peaks[1])} | {fits} | {gigabytes(sent)} | {communication:.2f} | {compute:.2f} | "
            f"{communication / compute:.2f} |"
        )
    return "\n".join(lines)


def gigabytes(count: float) -> str:
    """Bytes as GB with one digit behind the point."""
    return f"{count / 1e9:.1f}"


def put(text: str, made: str) -> str:
    """`text` with what stands between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(argv: Sequence[str]) -> None:
    """Print the table, or write it into the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="put the table into docs/explanation/scaling.md")
    if parser.parse_args(argv).write:
        DOCUMENT.write_text(put(DOCUMENT.read_text(), table()))
    else:
        print(table())


if __name__ == "__main__":
    main(sys.argv[1:])
