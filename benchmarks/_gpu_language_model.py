"""Trains the language model of 124 M parameters in bf16: a Brain beside the hand-written loop, in turns.

Printed: the ratio of the times with its quartiles, tokens per second, the share of what a product of bf16 matrices
reaches (MFU), the peak of memory of each alone, and the share of the time in which the device does nothing.
"""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable

import torch
from _gpu_networks import HandLoop, Network, Trainer, by_hand, language_model_124m, make_brain
from _gpu_results import parse, result, wait_for
from _workload import Contender, TimedBatches
from overhead import BRAIN, BY_HAND, measure, quartiles
from throughput import measure_peak_flops
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PRECISION = "bf16"
Maker = Callable[[], "HandLoop | Trainer"]


def makers(network: Network, device: torch.device) -> dict[str, Maker]:
    """Both ways to train, each with a network of its own."""
    return {
        BY_HAND: lambda: by_hand(network.make(device), device, PRECISION),
        BRAIN: lambda: make_brain(network.make(device), device, PRECISION),
    }


def contender(trainer: HandLoop | Trainer) -> Contender:
    """What goes once over batches."""
    if isinstance(trainer, HandLoop):
        return Contender(trainer.model, trainer.fit)
    return Contender(trainer.modules.model, lambda batches: trainer.fit([1], batches))


def batches_of(network: Network, steps: int, device: torch.device) -> TimedBatches:
    """The network's batches, timed."""
    return TimedBatches(steps, device, around=2, make_batch=network.batch)


def peak_memory(name: str, make: Maker, batches: TimedBatches, device: torch.device) -> None:
    """The peak of the device's memory in some steps, of one way alone."""
    if device.type == "cpu":
        result(f"peak memory, {name}", "not measured", None, "a CPU does not tell")
        return
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    trainer = contender(make())
    trainer.fit(batches)
    wait_for(device)
    peak = torch.accelerator.max_memory_allocated(device) - before
    result(f"peak memory, {name}", f"{peak / 2**30:.2f} GiB")


def idle_share(name: str, trainer: Contender, batches: TimedBatches, device: torch.device) -> None:
    """The share of the time between its first and its last kernel in which the device runs none."""
    if device.type != "cuda":
        result(f"idle share, {name}", "not measured", None, f"{device.type} has no profiler of its own")
        return
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        trainer.fit(batches)
        wait_for(device)
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    if not events:
        result(f"idle share, {name}", "not measured", None, "the profiler saw no kernel")
        return
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    result(f"idle share, {name}", f"{100 * (1 - busy / (until - spans[0][0])):.1f} %", None, "while profiled")


def main() -> None:
    """Measure memory, then speed, then idle time."""
    options = parse(__doc__.splitlines()[0])
    device = options.device
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)
    network = language_model_124m(options.small)
    model = network.make(device)
    context = lambda: torch.autocast(device.type, torch.bfloat16)  # noqa: E731
    peak = measure_peak_flops(model, context)
    result("product of bf16 matrices", f"{peak / 1e12:.4g} TFLOP/s")
    flops_per_token = model.flops_per_token()
    tokens = network.batch(torch.Generator())[0].numel()
    del model

    for name, make in makers(network, device).items():
        peak_memory(name, make, batches_of(network, 2, device), device)
    steps, rounds = (2, 2) if options.small else (8, 7)
    trained = {name: contender(make()) for name, make in makers(network, device).items()}
    found = measure(trained, batches_of(network, steps, device), rounds)
    for name, measured in found.items():
        low, median, high = quartiles(measured.ratios)
        per_second = tokens / measured.microseconds * 1e6
        same = "" if measured.same_weights else "; other bits than by hand"
        if name != BY_HAND:
            result(
                f"time, {name} to {BY_HAND}", f"{median:.3f} ({low:.3f} to {high:.3f})", None, f"{rounds} rounds{same}"
            )
        result(f"tokens per second, {name}", f"{per_second:,.0f}")
        result(f"MFU, {name}", f"{100 * per_second * flops_per_token / peak:.1f} %")
        computed = statistics.median(measured.processor_ratios)
        result(f"processor time of the host, {name}", f"{computed:.3f} of {BY_HAND}'s")
    for name, each in trained.items():
        idle_share(name, each, batches_of(network, 2 if options.small else 12, device), device)


if __name__ == "__main__":
    main()
