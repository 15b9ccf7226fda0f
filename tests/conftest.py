"""Fixtures that several test files share."""

from contextlib import suppress

import pytest

with suppress(ImportError):
    # Inductor imports it, which fails once another package has imported the standard library's distutils.
    import setuptools  # noqa: F401

from amp_recipes.host_copy import HostCopy


@pytest.fixture(params=["at_once", "queued"])
def host(request, monkeypatch):
    """How the host learns a verdict: at once, as on a CPU, or late, as from a device that queues its work.

    With "queued" a CPU goes the way of a GPU: fused kernels skip on the device, and counters, schedules and
    averages settle just before the next update.
    """
    if request.param == "queued":
        monkeypatch.setattr(HostCopy, "immediate", False)
    return request.param
