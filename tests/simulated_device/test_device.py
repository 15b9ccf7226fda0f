"""The simulated device keeps CUDA's order, is late where CUDA may be late, and waits where CUDA waits."""

import copy
import gc
import threading

import pytest
import simulated
import torch
from torch import nn
from torch.utils.data import DataLoader

DEVICE = "simulated:0"
SECOND = "simulated:1"
POISON = torch.full((1,), 0x7F7F7F7F, dtype=torch.int32).view(torch.float32).item()


def pinned(count: int = 4) -> torch.Tensor:
    return torch.zeros(count).pin_memory()


def late_copy(value: float, stream: torch.Stream | None = None, target: torch.Tensor | None = None) -> torch.Tensor:
    """Pinned memory that a copy under way on `stream` will fill with `value`."""
    target = pinned() if target is None else target
    stream = stream or torch.accelerator.current_stream()
    with stream:
        target.copy_(torch.full((4,), value, device=stream.device), non_blocking=True)
    return target


def is_there(target: torch.Tensor, value: float) -> bool:
    """Whether the copy has been made; if not, the target must be poison."""
    found = set(target.tolist())
    assert found in ({value}, {POISON})
    return found == {value}


# Devices, streams, events


def test_it_is_the_accelerator_with_two_devices():
    assert torch.accelerator.current_accelerator() == torch.device("simulated")
    assert torch.accelerator.device_count() == 2
    with pytest.raises(RuntimeError, match="simulated:2 does not exist"):
        torch.zeros(1, device="simulated:2")


def test_each_thread_has_its_own_current_device_and_stream():
    side = torch.Stream(device=SECOND)
    torch.accelerator.set_stream(side)
    seen = []

    def look():
        seen.append((torch.accelerator.current_device_index(), torch.accelerator.current_stream(1).stream_id))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [(0, 0)]
    assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_stream(1) == side


def test_a_copy_to_pinned_memory_is_poison_until_its_stream_is_waited_for():
    target = late_copy(1.0)
    assert not is_there(target, 1.0)
    torch.accelerator.current_stream().synchronize()
    assert is_there(target, 1.0)


def test_it_takes_what_was_in_the_tensor_when_it_was_queued():
    source = torch.ones(4, device=DEVICE)
    target = pinned().copy_(source, non_blocking=True)
    source.fill_(2.0)
    del source
    torch.accelerator.synchronize()
    assert is_there(target, 1.0)


def test_an_event_covers_what_was_queued_on_its_stream_before_it_and_no_more():
    first = late_copy(1.0)
    event = torch.accelerator.current_stream().record_event()
    second = late_copy(2.0)
    event.synchronize()
    assert is_there(first, 1.0) and not is_there(second, 2.0)


def test_an_event_of_another_stream_or_device_covers_nothing():
    target = late_copy(1.0)
    torch.Stream(device=DEVICE).record_event().synchronize()
    torch.accelerator.current_stream(1).record_event().synchronize()
    torch.accelerator.synchronize(1)
    assert not is_there(target, 1.0)
    torch.accelerator.synchronize(0)
    assert is_there(target, 1.0)


def test_an_event_that_is_recorded_again_forgets_the_first_place():
    target = late_copy(1.0)
    event = torch.accelerator.current_stream().record_event()
    event.record(torch.Stream(device=DEVICE))
    event.synchronize()
    assert not is_there(target, 1.0)


def test_an_event_belongs_to_the_device_that_it_was_recorded_on():
    event = torch.accelerator.current_stream(1).record_event()
    with pytest.raises(RuntimeError, match="cannot be recorded on a stream of simulated:0"):
        event.record(torch.accelerator.current_stream(0))


def test_a_stream_that_waits_for_an_event_comes_after_it():
    main, side = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    first = late_copy(1.0, main)
    side.wait_event(main.record_event())
    behind = late_copy(2.0, main)
    second = late_copy(3.0, side)
    side.synchronize()
    assert is_there(first, 1.0) and is_there(second, 3.0)
    assert not is_there(behind, 2.0)


def test_a_program_that_polls_comes_to_an_end():
    target = late_copy(1.0)
    event = torch.accelerator.current_stream().record_event()
    assert not event.query()
    assert not is_there(target, 1.0)
    assert event.query()
    assert is_there(target, 1.0)
    late_copy(2.0)
    stream = torch.accelerator.current_stream()
    assert (stream.query(), stream.query()) == (False, True)


def test_elapsed_time_is_known_once_both_events_are_done():
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(1, device=DEVICE)
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) > 0


# Copies


def test_of_two_copies_into_the_same_memory_the_first_cannot_be_read():
    target = late_copy(1.0)
    event = torch.accelerator.current_stream().record_event()
    late_copy(2.0, target=target)
    event.synchronize()
    assert not is_there(target, 2.0)
    torch.accelerator.synchronize()
    assert is_there(target, 2.0)


def test_a_stream_finds_in_pinned_memory_what_it_wrote_there():
    there_and_back = torch.empty(4, device=DEVICE).copy_(late_copy(1.0), non_blocking=True)
    assert there_and_back.tolist() == [1.0] * 4


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_convert_dtypes_and_strides(non_blocking):
    torch.manual_seed(0)
    source = torch.randn(3, 4, dtype=torch.float64)
    for change in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(3, 4)):
        there = change(source.pin_memory()).to(DEVICE, torch.float32, non_blocking=non_blocking)
        assert torch.equal(there.cpu(), change(source).float())
        back = torch.empty(change(source).shape, dtype=torch.float64).pin_memory()
        back.copy_(change(source.to(DEVICE)).float(), non_blocking=non_blocking)
        torch.accelerator.synchronize()
        assert torch.equal(back, change(source).float().double())


def test_between_the_devices():
    there = torch.arange(4.0, device=DEVICE).to(SECOND)
    assert there.device == torch.device(SECOND)
    assert there.tolist() == [0, 1, 2, 3]


def test_tensors_of_two_devices_or_of_the_host_do_not_mix():
    here = torch.ones(2, device=DEVICE)
    for other in (torch.ones(2, device=SECOND), torch.ones(2)):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
        with pytest.raises(RuntimeError, match="same device"):
            nn.functional.embedding(torch.zeros(1, dtype=torch.long, device=other.device), here[None])
    assert (here + torch.tensor(1.0)).tolist() == [2, 2]  # a number may be on the host


# The host's waits


def waits_of(action) -> list[str]:
    with simulated.waits() as found:
        action()
    return [wait.kind for wait in found.stalls]


def test_what_the_host_waits_for():
    x, mask = torch.ones(4, device=DEVICE), torch.ones(4, dtype=torch.bool, device=DEVICE)
    stream = torch.accelerator.current_stream()
    waiting = {
        "item": [lambda: x.sum().item(), lambda: bool(mask.all()), lambda: x.isnan().any().__bool__()],
        "copy": [
            x.cpu,
            x.tolist,
            lambda: pinned().copy_(x),
            lambda: torch.empty(4).copy_(x, non_blocking=True),  # not pinned
            lambda: torch.ones(4).to(DEVICE),
            lambda: pinned().to(DEVICE),
            lambda: torch.tensor([1.0], device=DEVICE),
            lambda: torch.where(mask, torch.tensor(0.0), x),
            lambda: x[torch.tensor([0])],
        ],
        "data": [
            mask.nonzero,
            lambda: x[mask],
            lambda: x.masked_select(mask),
            lambda: torch.equal(x, x),
            x.unique,
            lambda: torch.bincount(mask.long()),
            lambda: torch.index_put(x, [mask], torch.zeros(4, device=DEVICE)),
            lambda: torch.repeat_interleave(x, mask.long()),
        ],
        "stream": [lambda: (x.exp(), stream.synchronize())],
        "event": [lambda: (x.exp(), stream.record_event().synchronize())],
        "device": [lambda: (x.exp(), torch.accelerator.synchronize())],
    }
    for kind, actions in waiting.items():
        for index, action in enumerate(actions):
            assert waits_of(action) == [kind], (kind, index)


def test_what_the_host_does_not_wait_for():
    x, mask = torch.ones(4, device=DEVICE), torch.ones(4, dtype=torch.bool, device=DEVICE)

    def write_with_mask():
        x[mask] = 1.0

    for index, action in enumerate([
        lambda: pinned().to(DEVICE, non_blocking=True),
        lambda: torch.ones(4).to(DEVICE, non_blocking=True),  # CUDA copies it to memory of its own first
        lambda: pinned().copy_(x, non_blocking=True),
        lambda: pinned(1).copy_(x.sum(), non_blocking=True),
        lambda: x.half().to("cpu", non_blocking=True),  # torch pins what it makes
        lambda: torch.where(mask, 0.0, x),
        lambda: x.masked_fill(mask, 0.0),
        write_with_mask,
        lambda: x[:2].clone(),
        lambda: torch.randn(4, device=DEVICE),
        lambda: x.to(SECOND),
        lambda: torch.accelerator.current_stream().query(),
        lambda: torch.accelerator.current_stream().wait_stream(torch.Stream(device=DEVICE)),
    ]):  # fmt: skip
        assert waits_of(action) == [], index


def test_a_wait_knows_its_place():
    x = torch.ones(4, device=SECOND)
    event = torch.accelerator.current_stream(1).record_event()
    recorded_at = simulated.newest_sequence()
    for _ in range(3):
        x.add_(1)
    with simulated.waits() as found:
        event.synchronize()
        event.synchronize()
    first, second = found.all
    assert (first.kind, first.device, first.stream) == ("event", 1, 0)
    assert (first.waited_for, first.queued_since) == (recorded_at, 3)
    assert first.lines[0].startswith("test_device.py:") and first.lines[0].endswith("in test_a_wait_knows_its_place")
    assert (first.already_done, second.already_done) == (False, True)
    assert found.stalls == [first]


def test_waits_for_this_step_and_for_the_one_before():
    x, events = torch.ones(4, device=DEVICE), []
    with simulated.waits() as found:
        for _ in found.steps(range(4)):
            x.add_(1)
            if events:
                events.pop().synchronize()
            events.append(torch.accelerator.current_stream().record_event())
        events.pop().synchronize()  # after the loop
    assert found.of_this_step == []
    assert [(wait.step, wait.for_step) for wait in found.of_earlier_steps] == [(2, 1), (3, 2), (4, 3)]
    assert found.most_in_a_step == 1
    assert [wait.step for wait in found.stalls] == [2, 3, 4, 0]


def test_a_wait_of_another_thread_is_recorded():
    x = torch.ones(1, device=DEVICE)
    with simulated.waits() as found:
        thread = threading.Thread(target=x.item)
        thread.start()
        thread.join()
    assert [wait.kind for wait in found.all] == ["item"]


# Memory


def test_pinned_memory_is_counted_and_known_by_its_parts():
    before = simulated.pinned_stats()
    target = pinned(1000)
    assert target.is_pinned() and target[10:].is_pinned() and not torch.zeros(1).is_pinned()
    after = simulated.pinned_stats()
    assert after["bytes"] - before["bytes"] == 4000
    assert after["allocations"] - before["allocations"] == 1
    del target
    assert simulated.pinned_stats()["bytes"] == before["bytes"]


def test_pinned_memory_that_is_freed_under_a_copy_is_kept_until_the_copy_is_done():
    for copy_under_way in (lambda: late_copy(1.0), lambda: torch.ones(4).pin_memory().to(DEVICE, non_blocking=True)):
        copy_under_way()
        gc.collect()
        assert simulated.pinned_stats()["freed_under_copy"] == 1
        torch.accelerator.synchronize()
        assert simulated.pinned_stats()["freed_under_copy"] == 0


def test_device_memory_is_counted_on_each_device():
    before = torch.accelerator.memory_allocated(1)
    torch.accelerator.reset_peak_memory_stats(1)
    x = torch.ones(1000, device=SECOND)
    y = x + x  # what a kernel returns counts too
    del x
    assert torch.accelerator.memory_allocated(1) - before == 4000
    assert torch.accelerator.max_memory_allocated(1) - before == 8000
    del y
    assert torch.accelerator.memory_allocated(1) == before


def test_new_device_memory_is_poison():
    assert torch.empty(2, device=DEVICE).tolist() == [POISON, POISON]


def test_a_loader_pins_its_batches():
    batches = list(DataLoader([torch.tensor(float(i)) for i in range(4)], batch_size=2, pin_memory=True))
    assert all(batch.is_pinned() for batch in batches)


def test_results_are_resized_and_views_stay_views():
    x = torch.arange(6.0, device=DEVICE).reshape(2, 3)
    result = torch.empty(0, device=DEVICE)
    torch.add(x, x, out=result)
    assert result.tolist() == (x * 2).tolist()
    x.t().unfold(0, 2, 1)[0].fill_(7.0)
    assert x.tolist() == [[7, 7, 2], [7, 7, 5]]
    assert result.resize_(8).shape == (8,)


def test_state_goes_through_a_file(tmp_path):
    torch.save({"x": torch.arange(3.0, device=SECOND)}, tmp_path / "state.pt")
    for location in (None, "simulated:0", "cpu"):
        x = torch.load(tmp_path / "state.pt", map_location=location)["x"]
        assert x.device == torch.device(location or SECOND) and x.tolist() == [0, 1, 2]


# Random numbers


def test_each_device_has_its_own_random_numbers():
    torch.manual_seed(0)
    host = torch.default_generator.get_state()
    first = torch.randn(4, device=DEVICE)
    state = torch.simulated.get_rng_state(DEVICE)
    dropped = nn.functional.dropout(torch.ones(64, device=DEVICE))
    assert torch.equal(torch.default_generator.get_state(), host)
    torch.simulated.set_rng_state(state, DEVICE)
    assert torch.equal(nn.functional.dropout(torch.ones(64, device=DEVICE)), dropped)
    assert torch.equal(torch.randn(4, device=SECOND).cpu(), first.cpu())  # seeded alike, and not drawn from so far


def test_a_generator_of_the_device_draws_and_one_of_the_host_is_refused():
    draws = [torch.rand(3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5)).tolist() for _ in range(2)]
    assert draws[0] == draws[1]
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=DEVICE, generator=torch.Generator())


# Layers and autocast, against the CPU's


def gradients(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    output = module(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    output.square().sum().backward()
    grads = (parameter.grad for parameter in module.parameters())
    return [output.detach().cpu(), *(grad.to_dense().cpu() if grad.is_sparse else grad.cpu() for grad in grads)]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, groups=1),
        lambda: nn.ConvTranspose2d(3, 4, 3, bias=False),
        lambda: nn.Sequential(nn.Flatten(2), nn.LSTM(64, 5, num_layers=2, bidirectional=True)),
        lambda: nn.Sequential(nn.Flatten(2), nn.GRU(64, 5, bias=False)),
        lambda: nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 32, dropout=0.0)),
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.MaxPool2d(2), nn.GELU()),
    ],
    ids=["conv", "conv_transpose", "lstm", "gru", "transformer", "norms"],
)
def test_layers_and_their_gradients_equal_the_cpus(layer):
    torch.manual_seed(0)
    ours = layer().double()
    theirs = copy.deepcopy(ours).to(DEVICE)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for found, expected in zip(gradients(theirs, x.to(DEVICE)), gradients(ours, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_sparse_gradients_equal_the_cpus():
    ours = nn.Embedding(10, 3, sparse=True)
    theirs = copy.deepcopy(ours).to(DEVICE)
    ids = torch.tensor([1, 2, 1, 7])
    for module, inputs in ((ours, ids), (theirs, ids.to(DEVICE))):
        for _ in range(2):  # the second backward adds to the first
            module(inputs).square().sum().backward()
    grad = theirs.weight.grad
    assert grad.is_sparse and grad.device == torch.device(DEVICE)
    assert torch.equal(grad.coalesce().indices().cpu(), ours.weight.grad.coalesce().indices())
    assert torch.equal(grad.to_dense().cpu(), ours.weight.grad.to_dense())
    for module in (ours, theirs):
        torch.optim.SparseAdam(module.parameters()).step()
    torch.testing.assert_close(theirs.weight.cpu(), ours.weight)


def test_autocast_has_cudas_lists():
    x = torch.randn(4, 4, device=DEVICE)
    with torch.autocast("simulated", torch.float16):
        assert (x @ x).dtype == torch.float16
        assert (x @ x).softmax(-1).dtype == torch.float32
        assert nn.functional.layer_norm((x @ x), (4,)).dtype == torch.float32  # the CPU's lists do not have it at fp32
        assert (x.half() + x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def test_a_backward_runs_in_a_thread_of_the_device():
    threads, devices = [], []
    x = torch.ones(2, device=SECOND, requires_grad=True)

    def note(grad):
        threads.append(threading.get_ident())
        devices.append(torch.accelerator.current_device_index())

    y = x * 2
    y.register_hook(note)
    y.sum().backward()
    assert threads != [threading.get_ident()]
    assert devices == [1] and torch.accelerator.current_device_index() == 0
