"""What is known of device types does not depend on which of them this machine has."""

import pytest
import torch

from amp_recipes.modules import devices
from amp_recipes.modules.devices import autocast_device_types, has_autocast, queues_work


def test_which_devices_queue_their_work(subtests):
    for name, queued in {"cpu": False, "mps": False, "meta": False, "cuda:1": True, "xpu": True}.items():
        with subtests.test(name):
            assert queues_work(torch.device(name)) is queued


def test_autocast_is_known_by_type():
    assert has_autocast("cpu") and has_autocast("cuda") and not has_autocast("no such device")
    assert {"cpu", "cuda"} <= set(autocast_device_types())


@pytest.fixture
def from_elsewhere(monkeypatch):
    """An accelerator from outside of torch's tree that takes its name late, under that of a device with autocast."""
    monkeypatch.setattr(devices, "_IN_TREE", ("cpu",))
    monkeypatch.setattr(devices, "_with_autocast", {})
    assert "xpu" not in autocast_device_types()
    monkeypatch.setattr(devices, "out_of_tree_device_type", lambda: "xpu")


def test_one_that_gets_its_name_late_is_known_from_then_on(from_elsewhere):
    assert autocast_device_types() == ("cpu", "xpu")
    assert queues_work(torch.device("xpu"))
