"""A plugin that runs tests of the other folders on the simulated device: those of the files in existing_tests.txt.

tests/conftest.py loads it where AMP_RECIPES_TEST_DEVICE is `simulated`. It tells how many tests used the device, and
in which precisions; a file of which none did is an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
import simulated
from cannot_run import CANNOT_RUN

from amp_recipes import Brain

_ran: dict[str, Counter[bool]] = defaultdict(Counter)  # by file: whether a test used the device
_precisions: Counter[str] = Counter()  # tests that made a Brain there; one test may have several


def pytest_configure() -> None:
    try:
        simulated.load()
    except simulated.CannotBuild as reason:
        pytest.exit(f"skipped: the simulated device {reason}", returncode=0)


@pytest.hookimpl(tryfirst=True)  # before tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown = set(CANNOT_RUN)
    for item in items:
        for name in (name for name in CANNOT_RUN if name in item.nodeid):
            unknown.discard(name)
            item.add_marker(pytest.mark.xfail(reason=CANNOT_RUN[name], strict=True))
    collected = {item.path.name for item in items}
    unknown = {name for name in unknown if name.partition("::")[0] in collected}
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"cannot_run.py lists tests that are not there: {sorted(unknown)}")


@pytest.fixture(autouse=True)
def notes_of_the_device(
    record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Note what the test did there; it may not touch pinned memory that a copy uses."""
    used, precisions, make = _used(), set(), Brain.__init__

    def noted(brain: Brain, *args: object, **kwargs: object) -> None:
        make(brain, *args, **kwargs)
        if brain.device.type == "simulated":
            precisions.add(brain.precision)

    monkeypatch.setattr(Brain, "__init__", noted)
    yield
    record_property("used_the_device", _used() > used)
    record_property("precisions", sorted(precisions))
    assert simulated.finish() == []


def _used() -> int:
    return simulated.newest_sequence() + simulated.pinned_stats()["allocations"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    if report.when == "teardown" and "precisions" in properties:
        _ran[report.nodeid.partition("::")[0]][properties["used_the_device"]] += 1
        _precisions.update(properties["precisions"])


def _idle_files(config: pytest.Config) -> list[str]:
    return [] if config.option.keyword else [file for file, counts in _ran.items() if not counts[True]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _idle_files(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    used = sum(counts[True] for counts in _ran.values())
    brains = ", ".join(f"{count} in {precision}" for precision, count in sorted(_precisions.items()))
    terminalreporter.write_line(
        f"{used} of {sum(counts.total() for counts in _ran.values())} tests used the simulated device; "
        f"with a Brain there: {brains or 'none'}"
    )
    for file in _idle_files(terminalreporter.config):
        terminalreporter.write_line(f"error: no test of {file} used the simulated device")
