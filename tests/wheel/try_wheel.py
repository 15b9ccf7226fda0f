"""Installs the wheel into an empty environment of each Python, and runs every recipe there with --debug.

    python tests/wheel/try_wheel.py                       # with the Python that runs this
    python tests/wheel/try_wheel.py python3.10 python3.13 --torch 'torch==2.13.0'

The wheel is built from the sdist, as a release is. Each recipe runs by `amp-recipes run` in an empty folder, so nothing
of the checkout is at hand. --write puts the result into benchmarks/results/packages.md. An environment with a torch
that is built for CUDA takes several gigabytes; only one exists at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "packages.md"
DEADLINE_SECONDS = 3600  # for a command that hangs

# A recipe that has no data of its own makes none for a trial: it is checked and not run.
ONLY_CHECKED = {"language_modeling_124m": ["--data_path=shards"]}

ASKED = """
import importlib.metadata as metadata, json, platform
from amp_recipes.commands.collection import recipes
packages = ("amp-recipes", "torch", "numpy", "hyperpyyaml", "ruamel.yaml")
print(json.dumps([platform.python_version(), {name: metadata.version(name) for name in packages}, list(recipes())]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already; by default one is built")
    parser.add_argument("--torch", help="what to install first, such as 'torch==2.13.0'; by default pip chooses")
    parser.add_argument("--pre", action="store_true", help="let pip take pre-releases of torch (its nightly builds)")
    parser.add_argument("--folder", type=Path, help="where the environments are made; by default a temporary folder")
    parser.add_argument("--write", action="store_true", help=f"write the result into {RESULTS.relative_to(REPOSITORY)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        wheel = options.wheel.resolve() if options.wheel else build(Path(folder))
        trials = [try_python(python, wheel, Path(folder), options) for python in options.pythons]
    if options.write:
        write([row(trial) for trial in trials])
    return 1 if any("failed" in trial["recipes"].values() for trial in trials) else 0


def build(folder: Path) -> Path:
    """The wheel that pip makes of the sdist."""
    # From a copy, because a build leaves files beside the sources.
    source = folder / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "runs"))
    make_sdist = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    succeed([sys.executable, "-c", make_sdist, folder], source)
    (sdist,) = folder.glob("*.tar.gz")
    succeed([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_python(python: str, wheel: Path, folder: Path, options: argparse.Namespace) -> dict:
    """Installs the wheel and runs the recipes; the environment is deleted afterwards."""
    environment, work = folder / "environment", folder / "work"
    succeed([python, "-m", "venv", environment], folder)
    own_python = environment / "bin" / "python"
    install = [own_python, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    if options.torch:
        succeed([*install, *(["--pre"] if options.pre else []), options.torch], folder)
    succeed([*install, f"amp-recipes[recipes] @ {wheel.as_uri()}"], folder)
    work.mkdir()
    version, packages, names = json.loads(succeed([own_python, "-c", ASKED], work).splitlines()[-1])
    print(f"Python {version}, {packages}", flush=True)
    results = {}
    for name in names:
        results[name] = run_recipe(environment / "bin" / "amp-recipes", name, work)
        print(f"  {name}: {results[name]}", flush=True)
    shutil.rmtree(environment)
    shutil.rmtree(work)
    return {"python": version, "packages": packages, "recipes": results}


def run_recipe(program: Path, name: str, work: Path) -> str:
    """Copies the recipe and checks the copy, then runs it from the package."""
    copy = work / f"copy_of_{name}"
    data = ONLY_CHECKED.get(name, [])
    commands = [
        [program, "new", "copied", "--from", name, "--to", copy],
        [program, "check", "train.py", "copied.yaml", *data],
    ]
    folders = [work, copy]
    if not data:
        commands.append([program, "run", name, "--debug"])
        folders.append(work)
    for command, folder in zip(commands, folders, strict=True):
        done = call(command, folder)
        if done.returncode != 0:
            print(done.stdout, flush=True)
            return "failed"
    return "checked" if data else "ran"


def succeed(command: list, folder: Path) -> str:
    """The command's output."""
    done = call(command, folder)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\nended with {done.returncode}")
    return done.stdout


def call(command: list, folder: Path) -> subprocess.CompletedProcess[str]:
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([str(word) for word in command], cwd=folder, timeout=DEADLINE_SECONDS, **together)


HEAD = """# Trials of the wheel

`make test-wheel ARGS="PYTHON... --write"` builds the sdist, builds the wheel from it, and installs the wheel with the
extra `recipes` into an empty environment of each Python. There it copies each recipe (`amp-recipes new --from`) and
checks the copy (`amp-recipes check`). Then it runs the recipe from the package (`amp-recipes run RECIPE --debug`) in an
empty folder. "Only checked": the recipe needs data that it does not make itself, so it was copied and checked only.

torch is the one that pip found: built for the CPU where its version ends in `+cpu`, else for CUDA. No GPU was there.

On 3.14 (outside of the supported range) finetuning failed in that environment, for a link of its standard library that
led nowhere. With the link mended, it did not end within nine minutes on a busy machine. That trial also had one change
to the speech recipe: it imports flashlight-text only for a beam search, as there is no wheel for 3.13 and 3.14.

On 3.13 the tests of `tests/unit/config/trust` pass. So do the default ones of hostile YAMLs and recipes, and of what
HyperPyYAML does with the same YAML (`tests/corpus/test_hostile_*.py`, `test_hyperpyyaml_equality.py`,
`test_yaml_*.py`). On 3.14, tests of trust failed in an earlier trial. They have not been run there since.

| Python | versions | ran | only checked | failed |
| --- | --- | --- | --- | --- |
"""


def row(trial: dict) -> str:
    """A line of the table: what became of each recipe with that Python."""
    versions = ", ".join(f"{name} {version}" for name, version in trial["packages"].items())
    names = {
        result: ", ".join(f"`{name}`" for name, became in trial["recipes"].items() if became == result)
        for result in ("ran", "checked", "failed")
    }
    return f"| {trial['python']} | {versions} | {names['ran']} | {names['checked']} | {names['failed'] or 'none'} |"


def write(rows: list[str]) -> None:
    """Replaces the lines of the same Pythons, and keeps those of others."""
    kept = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    by_python = {line.split(".")[1]: line for line in (*kept, *rows) if line.startswith("| 3.")}
    table = [by_python[minor] for minor in sorted(by_python, key=int)]
    RESULTS.write_text(HEAD + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
