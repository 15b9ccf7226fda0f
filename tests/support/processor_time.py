"""Fails a test of the default tier that takes too much processor time, so that `make test` stays fast.

It counts this process, the processes that it waited for and the programs that it started. It does not count the time
that a test waits, other programs, and fixtures that several tests share. A test over the limit runs again, since the
first run in a process may import or compile what later ones find done.
"""

from __future__ import annotations

import functools
import os
import resource
import time

import pytest
from _pytest.runner import runtestprotocol
from programs import finished_processor_seconds

LIMIT_SECONDS = 2.0
# A test that takes the limit on one machine took up to 1.4 times as much on another that `_calibrate` called equally
# fast: caches, memory and torch's kernels differ too. So a test is over the limit from twice the limit on.
MACHINES_DIFFER = 2.0
# What `_calibrate` takes on a core of 2.1 GHz (Intel Xeon with AVX-512, 2023). A slower core gets more time.
REFERENCE_SECONDS = 0.015
_in_shared_fixtures = [0.0]


def processor_seconds() -> float:
    """What this process, its children and the programs of tests have taken so far."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(it.ru_utime + it.ru_stime for it in used) + finished_processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of the default tier, and measure it."""
    if any(item.get_closest_marker(tier) for tier in ("extended", "nightly")):
        return None
    if "AMP_RECIPES_TEST_DEVICE" in os.environ:  # not `make test`
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    seconds, reports = _measured(item, nextitem)
    allowed = LIMIT_SECONDS * MACHINES_DIFFER
    if seconds > allowed and all(report.passed for report in reports):
        allowed *= _slowness()
        item._initrequest()  # as pytest-rerunfailures does: fixtures are made anew
        again, reports = _measured(item, nextitem)
        seconds = min(seconds, again)
    if seconds > allowed:
        _fail(
            reports,
            f"{item.nodeid} takes {seconds:.1f} s of processor time; a test of `make test` should take "
            f"{LIMIT_SECONDS:.0f} s, and fails from {allowed:.1f} s on with this machine. Make it smaller, or mark it "
            "`extended`.",
        )
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> object:
    """Do not count a fixture that several tests share as time of the first of them."""
    if fixturedef.scope == "function":
        return (yield)
    before, nested = processor_seconds(), _in_shared_fixtures[0]
    try:
        return (yield)
    finally:
        _in_shared_fixtures[0] = nested + processor_seconds() - before


def _measured(item: pytest.Item, nextitem: pytest.Item | None) -> tuple[float, list[pytest.TestReport]]:
    before, shared = processor_seconds(), _in_shared_fixtures[0]
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    return processor_seconds() - before - (_in_shared_fixtures[0] - shared), reports


def _fail(reports: list[pytest.TestReport], message: str) -> None:
    for report in reports:
        if report.when == "call" and report.passed:
            report.outcome, report.longrepr = "failed", message


def _slowness() -> float:
    """How many times longer this core takes now than the reference; at least 1."""
    return max(1.0, min(_calibrate() for _ in range(5)) / REFERENCE_SECONDS)


def _calibrate() -> float:
    began = time.process_time()
    functools.reduce(lambda total, number: (total * 31 + number) % 1_000_003, range(200_000), 0)
    return time.process_time() - began
