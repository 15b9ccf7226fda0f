"""Builds the simulated device's C++ once, into the user's cache."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "device"
NAME = "simulated_device_extension"
# The torch whose interfaces the sources are written for: with it a compiler's error is a failure, not a reason to skip.
WRITTEN_FOR = "2.13"

_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", f"-DTORCH_EXTENSION_NAME={NAME}"]
_LACK_OF_MEMORY = ("killed", "out of memory", "memory exhausted", "cannot allocate", "bad_alloc")
_LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


class CannotBuild(Exception):
    """The device cannot be built here; the message says why."""


def load() -> ModuleType:
    """The extension; compiled first if it has not been with these sources, torch and compiler.

    Compiling takes about half a minute of one core. Raises CannotBuild where there is no compiler, or where a torch
    that the sources are not written for has other interfaces.
    """
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(built_library(_compiler())))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
    loader.exec_module(module)
    return module


def built_library(compiler: str) -> Path:
    """The shared library. Processes that come at the same time wait for the first, and find what it built."""
    library = _cache_folder() / f"{_fingerprint(compiler)}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(compiler, library)
    return library


def _compiler() -> str:
    wanted = os.environ.get("CXX", "c++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise CannotBuild(f"needs a C++ compiler, and there is no {wanted!r} on this machine")
    probe = [compiler, _FLAGS[0], "-fsyntax-only", "-x", "c++", os.devnull]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        raise CannotBuild(f"needs a compiler of C++20, and {compiler} is none")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        raise CannotBuild(f"needs Python's headers, and there is no {headers}")
    return compiler


def _cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "amp_recipes_simulated_device"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotBuild(f"needs a folder for what is built, and cannot make {folder}: {error.strerror}") from error
    return folder


def _fingerprint(compiler: str) -> str:
    """Names a build: whatever could make it another one is in it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [torch.__version__, sysconfig.get_config_var("SOABI"), version, *_FLAGS]
    parts += [path.name + path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        _compile(compiler, built)
        built.rename(library)  # in one step: a process that is killed leaves no half of a library


def _compile(compiler: str, built: Path) -> None:
    # One file for the compiler: reading torch's headers takes it longer than all else.
    together = built.with_name("all.cpp")
    together.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
    headers = (*cpp_extension.include_paths(), sysconfig.get_path("include"))
    includes = [part for path in headers for part in ("-isystem", path)]  # no warnings about what is not ours
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler, *_FLAGS, *includes, str(together), "-o", str(built), *libraries, *_LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode < 0 or any(sign in done.stderr.lower() for sign in _LACK_OF_MEMORY):
        raise CannotBuild("needs more memory: the compiler was ended, or ended for lack of it")
    if done.returncode != 0:
        _explain(done.stderr)


def _explain(errors: str) -> None:
    if torch.__version__.startswith(WRITTEN_FOR):
        raise RuntimeError(f"the simulated device does not compile:\n{errors}")
    first = next((line for line in errors.splitlines() if "error:" in line), errors[-300:])
    raise CannotBuild(f"is written for torch {WRITTEN_FOR}; with torch {torch.__version__}: {first}")
