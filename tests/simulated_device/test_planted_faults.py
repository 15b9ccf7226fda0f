"""Programs with a fault that only a device shows that queues its work: each must be caught."""

import pytest
import simulated
import torch
from torch import nn

FIRST, SECOND = "simulated:0", "simulated:1"


def copy_of_sum(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A number on the device, and pinned memory that it is on its way to."""
    total = torch.ones(3, device=device).sum()
    row = torch.zeros(1).pin_memory()
    row.copy_(total[None], non_blocking=True)
    return total, row


def test_an_event_on_the_stream_of_the_current_device_instead_of_the_tensors():
    _, row = copy_of_sum(SECOND)
    event = torch.Event(SECOND)
    event.record()  # simulated:0 is the current device
    event.synchronize()
    assert row.item() != 3.0
    right = torch.Event(SECOND)
    right.record(torch.accelerator.current_stream(SECOND))
    right.synchronize()
    assert row.item() == 3.0


def test_pinned_memory_read_without_a_wait():
    _, row = copy_of_sum(FIRST)
    assert row.item() > 3e38
    torch.accelerator.synchronize()
    assert row.item() == 3.0


def test_an_event_recorded_before_the_copy():
    event = torch.accelerator.current_stream().record_event()
    _, row = copy_of_sum(FIRST)
    event.synchronize()
    assert row.item() != 3.0


def test_a_copy_on_a_side_stream_waited_for_on_the_main_one():
    main = torch.accelerator.current_stream()
    with torch.Stream(device=FIRST):
        _, row = copy_of_sum(FIRST)
    main.synchronize()
    assert row.item() != 3.0


@pytest.mark.parametrize("write", [lambda x: x.fill_(7.0), lambda x: x.numpy().fill(7.0)], ids=["torch", "numpy"])
def test_a_pinned_source_written_before_its_copy_was_waited_for(write):
    source = torch.ones(4).pin_memory()
    source.to(FIRST, non_blocking=True)
    write(source)
    torch.accelerator.synchronize()
    (violation,) = simulated.take_violations()
    assert violation.startswith("the pinned source of a copy to the device was written")
    assert "test_planted_faults.py" in violation


def test_a_pinned_source_written_after_the_wait_is_right():
    source = torch.ones(4).pin_memory()
    source.to(FIRST, non_blocking=True)
    torch.accelerator.current_stream().record_event().synchronize()
    source.fill_(7.0)
    torch.accelerator.synchronize()
    assert simulated.take_violations() == []


def test_a_pinned_target_written_while_a_copy_into_it_is_under_way():
    _, row = copy_of_sum(FIRST)
    row.fill_(7.0)
    torch.accelerator.synchronize()
    (violation,) = simulated.take_violations()
    assert "while a copy from the device into it was under way" in violation


def train(steps, log) -> None:
    model = nn.Linear(4, 1, device=FIRST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for _ in steps:
        loss = model(torch.ones(2, 4, device=FIRST)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss.detach())


def test_an_item_in_a_step():
    with simulated.waits() as found:
        train(found.steps(range(3)), log=lambda loss: loss.item())
    assert [wait.step for wait in found.of_this_step] == [1, 2, 3]
    assert {wait.kind for wait in found.of_this_step} == {"item"}
    assert "test_planted_faults.py" in found.of_this_step[0].lines[0]


def test_the_same_loop_without_it_waits_for_nothing():
    losses = []
    with simulated.waits() as found:
        train(found.steps(range(3)), log=losses.append)
    assert not found.stalls, str(found)


def test_clipping_that_reads_the_norm_in_the_step():
    model = nn.Linear(4, 1, device=FIRST)
    with simulated.waits() as found:
        for _ in found.steps(range(2)):
            model(torch.ones(2, 4, device=FIRST)).sum().backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 100:
                raise AssertionError
    assert len(found.of_this_step) == 2
