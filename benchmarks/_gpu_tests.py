"""Runs `tests/system/test_gpu.py`, and prints how each test ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _gpu_results import parse, result

FILE = Path(__file__).resolve().parents[1] / "tests" / "system" / "test_gpu.py"


class Results:
    """Prints a result for each test."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended: the call itself, or another that failed or skipped."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if (subtest := getattr(report, "context", None)) is not None:
            name += f", {subtest.msg}"
        print()  # behind pytest's own marks
        if report.skipped:
            result(name, "skipped", None, report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
        else:
            result(name, report.outcome, report.passed, self.why(report))

    def why(self, report: pytest.TestReport) -> str:
        """The error of a test that failed, in one line."""
        crash = getattr(report.longrepr, "reprcrash", None)
        return "" if crash is None else crash.message.strip().splitlines()[0][:300]


def main() -> int:
    """All of them, extended ones too. Exit status 0 also where tests fail: each says so itself."""
    options = parse(__doc__)
    os.environ["AMP_RECIPES_TEST_DEVICE"] = str(options.device)
    marks = "not nightly and not extended" if options.small else "not nightly"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed there may not fit this pytest
    words = [str(FILE), "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-m", marks]
    status = pytest.main(words, plugins=[Results()])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


if __name__ == "__main__":
    sys.exit(main())
