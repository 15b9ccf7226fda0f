"""Collects into a folder the wheels that `make gpu` needs beside torch and numpy, for a machine without a network.

    python benchmarks/collect_wheels.py FOLDER

On a machine with a network. What setup.cfg asks for comes, and what the tests need, at the versions of constraints.txt,
for the Python and the platform of the other machine. `gpu.py --wheels FOLDER` unpacks them where they can be imported.
Only wheels are taken, and nothing is built: pip ends with an error that names a package which has none (omegaconf below
2.4 needs such a one, antlr4-python3-runtime). More names may follow FOLDER: what a recipe imports, say.
"""

from __future__ import annotations

import argparse
import configparser
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
THERE_ALREADY = ("torch", "numpy")
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")


def required() -> list[str]:
    """The names in `install_requires` that a machine with torch may lack, and those of the tests."""
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    lines = settings["options"]["install_requires"].split()
    names = [re.match(r"[\w.-]+", line)[0] for line in lines]
    return [name for name in names if name not in THERE_ALREADY] + list(FOR_TESTS)


def command(options: argparse.Namespace) -> list[str]:
    """What downloads them, with what they need in turn."""
    platforms = [f"--platform={name}_{options.machine}" for name in PLATFORMS]
    where = [f"--python-version={options.python_version}", "--implementation=cp", *platforms, "--only-binary=:all:"]
    constraints = ["-c", str(REPOSITORY / "constraints.txt")]
    names = [*required(), *options.names]
    return [sys.executable, "-m", "pip", "download", *where, *constraints, "-d", str(options.folder), *names]


def main(argv: Sequence[str]) -> int:
    """Download, and say what came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="further packages")
    parser.add_argument("--python-version", default="3.12", help="of the other machine (%(default)s)")
    parser.add_argument("--machine", default="x86_64", help="its processor (%(default)s)")
    options = parser.parse_args(argv)
    status = subprocess.run(command(options), check=False).returncode
    if status == 0:
        wheels = sorted(path.name for path in options.folder.glob("*.whl"))
        print("\n".join([f"{len(wheels)} wheels in {options.folder}:", *wheels]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
