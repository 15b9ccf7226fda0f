"""Loads the simulated device for the tests in this folder, which are a run of their own."""

from pathlib import Path

import pytest
import simulated
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    others = [item.nodeid for item in items if HERE not in item.path.parents]
    if len(others) < len(items) and others:
        raise pytest.UsageError(
            "tests/simulated_device needs a pytest run of its own (make test-simulated): its device is the whole "
            f"process's accelerator. Also asked for: {others[0]}"
        )


@pytest.fixture(scope="session")
def loaded_device():
    try:
        simulated.load()
    except simulated.CannotBuild as reason:
        pytest.skip(f"the simulated device {reason}")


@pytest.fixture(autouse=True)
def device_as_before(loaded_device):
    """Each test starts on simulated:0 with nothing under way, and may not touch pinned memory that a copy uses."""
    yield
    assert simulated.finish() == []


@pytest.fixture
def synchronized():
    """Lets both devices finish what is queued."""

    def synchronize():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)

    return synchronize
