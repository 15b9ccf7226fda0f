"""Fixtures that several test files share."""

import copy
import datetime
import gc
import logging
import os
import sys
import tempfile
from contextlib import suppress

# Before torch is imported, for this process and for those that tests start: the tests' networks are so small that a
# second thread costs more than it does, and `make test` has a process on every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of tests start an interpreter, and each would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Runs sign what they keep for a replay with a key of the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="amp_recipes_state")

import hypothesis
import pytest
import ruamel.yaml
import torch
import yaml

with suppress(ImportError):
    # Inductor imports it, which fails once another package has imported the standard library's distutils.
    import setuptools  # noqa: F401

from amp_recipes.precision.host_copy import HostCopy

pytest_plugins = ["processor_time"]
if os.environ.get("AMP_RECIPES_TEST_DEVICE", "").startswith("simulated"):
    pytest_plugins.append("existing_tests")

# The same examples everywhere, however slow the machine is; `--hypothesis-profile=default` draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

sys.dont_write_bytecode = False  # nor does the next run rewrite the test files' assertions anew


def pytest_collection_finish():
    """What is there before the first test stays to the end, and no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["at_once", "queued"])
def host(request, monkeypatch):
    """How the host learns a verdict: at once, as on a CPU, or late, as from a device that queues its work.

    With "queued" a CPU goes the way of a GPU: fused kernels skip on the device, and counters, schedules and
    averages settle just before the next update.
    """
    if request.param == "queued":
        monkeypatch.setattr(HostCopy, "immediate", False)
    return request.param


@pytest.fixture
def logging_as_before(monkeypatch):
    """The root logger is left as it was found; rank 0 writes to it."""
    monkeypatch.delenv("RANK", raising=False)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def group_of_one():
    """The store of a process group, gloo's, of this process alone, with a timeout that is nobody's default."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=77)
    )
    yield store
    # What holds the group goes first. Who drops the last hold waits for gloo's threads with the interpreter locked, and
    # one of those may be waiting for the interpreter, to let go of a tensor: they would wait for ever.
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def yaml_libraries_as_they_were():
    """Each test finds PyYAML and ruamel as they are: HyperPyYAML, to which some compare, changes both."""
    functions = [
        yaml.constructor.BaseConstructor.construct_object,
        ruamel.yaml.constructor.BaseConstructor.construct_object,
    ]
    defaults = [function.__defaults__ for function in functions]
    resolvers = list(ruamel.yaml.resolver.implicit_resolvers)
    registered = {name: value for name, value in vars(ruamel.yaml.Loader).items() if name.startswith("yaml_")}
    copies = {name: copy.deepcopy(value) for name, value in registered.items()}
    yield
    for function, default in zip(functions, defaults, strict=True):
        function.__defaults__ = default
    ruamel.yaml.resolver.implicit_resolvers[:] = resolvers
    for name in [name for name in vars(ruamel.yaml.Loader) if name.startswith("yaml_")]:
        if name in copies:
            setattr(ruamel.yaml.Loader, name, copies[name])
        else:
            delattr(ruamel.yaml.Loader, name)
