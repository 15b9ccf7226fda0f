"""The device is built once, by whoever comes first, and says why where it cannot be built."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import simulated_build

# Says its version, and notes each compilation in the file beside it; its library is never loaded.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit; fi
echo compiled >> {log}
while [ "$1" != -o ]; do shift; done
echo "{error}" >&2
[ -z "{error}" ] && touch "$2"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a compiler that only counts its calls, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def compiler(version: str = "1.0", error: str = "") -> str:
        path = tmp_path / "compiler"
        path.write_text(COMPILER.format(version=version, error=error, log=tmp_path / "log"))
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    compiler.count = lambda: len((tmp_path / "log").read_text().splitlines())
    return compiler


def test_of_several_at_once_one_compiles(fake):
    compiler = fake()
    with ThreadPoolExecutor(4) as threads:
        libraries = list(threads.map(lambda _: simulated_build.built_library(compiler), range(4)))
    assert libraries[0].exists() and len(set(libraries)) == 1
    assert fake.count() == 1


def test_another_compiler_or_another_source_is_another_build(fake, tmp_path, monkeypatch):
    first = simulated_build.built_library(fake())
    assert simulated_build.built_library(fake(version="2.0")) != first
    sources = tmp_path / "device"
    sources.mkdir()
    (sources / "other.cpp").write_text("// another")
    monkeypatch.setattr(simulated_build, "SOURCES", sources)
    assert simulated_build.built_library(fake()) != first
    assert fake.count() == 3


def test_it_says_why_it_cannot_be_built(fake, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(simulated_build.CannotBuild, match="there is no 'no-such-compiler' on this machine"):
        simulated_build.load()
    with pytest.raises(simulated_build.CannotBuild, match="needs more memory"):
        simulated_build.built_library(fake(error="fatal error: Killed signal terminated program cc1plus"))
    monkeypatch.setattr(simulated_build, "WRITTEN_FOR", "1.0")
    with pytest.raises(simulated_build.CannotBuild, match=r"written for torch 1.0; with torch .*: a.cpp:1: error: no"):
        simulated_build.built_library(fake(error="a.cpp:1: error: no"))


def test_an_error_with_the_torch_that_it_is_written_for_is_a_failure(fake):
    with pytest.raises(RuntimeError, match=r"does not compile:\na.cpp:1: error: no"):
        simulated_build.built_library(fake(error="a.cpp:1: error: no"))
    assert not list(simulated_build._cache_folder().glob("*.so"))
