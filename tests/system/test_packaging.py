"""What is promised to whoever installs the package: versions, contents of the wheel, what an import loads."""

from __future__ import annotations

import ast
import configparser
import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import fields
from importlib.util import find_spec

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from repository import REPOSITORY

from amp_recipes.commands.new import TEMPLATES

PACKAGE = REPOSITORY / "amp_recipes"
SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg", encoding="utf-8")

CLASSIFIERS = SETUP["metadata"]["classifiers"].split("\n")
PYTHONS = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(CLASSIFIERS))


def requirements(text: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def constraints_for(python: str) -> dict[str, str]:
    """Package -> exact version that constraints.txt asks for on that Python."""
    chosen: dict[str, str] = {}
    for constraint in requirements((REPOSITORY / "constraints.txt").read_text(encoding="utf-8")):
        if constraint.marker is None or constraint.marker.evaluate({"python_version": python}):
            name = canonicalize_name(constraint.name)
            assert name not in chosen, f"constraints.txt names {name} twice for Python {python}"
            (specifier,) = constraint.specifier
            assert specifier.operator == "==", f"{constraint} is not exact"
            chosen[name] = specifier.version
    return chosen


def declared() -> dict[str, list[Requirement]]:
    groups = {"install": requirements(SETUP["options"]["install_requires"])}
    groups |= {name: requirements(text) for name, text in SETUP["options.extras_require"].items()}
    for name, found in groups.items():  # an extra may be made of others
        others = {extra for it in found if it.name == SETUP["metadata"]["name"] for extra in it.extras}
        own = [it for it in found if it.name != SETUP["metadata"]["name"]]
        groups[name] = own + [requirement for extra in sorted(others) for requirement in groups[extra]]
    return groups


def test_every_dependency_has_one_exact_constraint_within_its_range(subtests):
    for python, group in itertools.product(PYTHONS, ("install", "dev", "recipes", "bench")):
        constraints = constraints_for(python)
        for requirement in declared()[group]:
            with subtests.test(f"{requirement} ({group}) for Python {python}"):
                assert constraints[canonicalize_name(requirement.name)] in requirement.specifier


def test_no_constraint_is_left_over():
    wanted = {canonicalize_name(requirement.name) for group in declared().values() for requirement in group}
    for python in PYTHONS:
        assert set(constraints_for(python)) <= wanted


def test_classifiers_and_python_requires_say_the_same():
    supported = SpecifierSet(SETUP["options"]["python_requires"])
    minors = [f"3.{minor}" for minor in range(6, 20) if f"3.{minor}" in supported]
    assert minors == PYTHONS


def test_ruff_checks_for_the_oldest_supported_python():
    target = re.search(r'target-version = "py3(\d+)"', (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert target is not None
    assert f"3.{target[1]}" == PYTHONS[0]


def test_this_python_and_platform_are_supported():
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS
    systems = {"linux": "Operating System :: POSIX :: Linux"}
    assert systems.get(sys.platform) in CLASSIFIERS, f"nothing is promised for {sys.platform}"


def import_time_modules(tree: ast.Module) -> set[str]:
    """What importing the file imports: not what stands in functions or under TYPE_CHECKING."""
    found: set[str] = set()
    queue: list[ast.AST] = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            queue += node.orelse
        else:
            queue += ast.iter_child_nodes(node)
    return found


def test_what_the_package_imports_is_declared():
    promised = {requirement.name for requirement in declared()["install"]} | {"amp_recipes"}
    if "pyyaml" in promised:
        promised.add("yaml")  # the only one that is imported under another name
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "templates"):
            continue  # these are never imported: `amp-recipes new` copies them
        for module in import_time_modules(ast.parse(path.read_text(encoding="utf-8"))):
            top = module.split(".")[0]
            known = top in sys.stdlib_module_names or top in promised
            # A namespace package is declared by its longer name: ruamel.yaml.
            known = known or any(module == name or module.startswith(name + ".") for name in promised)
            assert known, f"{path.relative_to(REPOSITORY)} imports {module}, which install_requires does not name"


def test_changelog_names_every_run_option():
    run_options = importlib.import_module("amp_recipes").RunOptions
    named = set(re.findall(r"`(\w+)`", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")))
    public = {field.name for field in fields(run_options) if not field.name.startswith("_")}
    assert public - named == set(), "CHANGELOG.md must name these run options: a YAML may have such a key"


IMPORTED = """
import json, sys
import torch
first = sorted(sys.modules)
import amp_recipes
print(json.dumps([first, sorted(set(sys.modules) - set(first))]))
"""


@pytest.fixture(scope="module")
def imported() -> list[set[str]]:
    """The modules that `import torch` loads in a fresh interpreter, and those that amp_recipes adds."""
    command = [sys.executable, "-c", IMPORTED]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [set(names) for names in json.loads(output)]


def test_import_leaves_optional_and_heavy_modules_alone(imported):
    _, added = imported
    heavy = {"sklearn", "scipy", "PIL", "tensorboard", "matplotlib", "pandas", "wandb", "mlflow", "IPython"}
    peers = {"speechbrain", "lightning", "accelerate", "ignite"}
    assert {name.split(".")[0] for name in added} & (heavy | peers) == set()
    # Importing these doubles the cost of `import torch`; torch itself puts them off until somebody compiles.
    assert added & {"torch._dynamo", "torch._inductor", "torch.onnx", "torch.utils.tensorboard"} == set()


def test_import_adds_few_modules_to_those_of_torch(imported):
    """Modules, and not seconds: they are the same on every machine. `torch._dynamo` alone brings 500."""
    of_torch, added = imported
    assert len(added) < 0.4 * len(of_torch)


def text_of(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    version = importlib.import_module("amp_recipes").__version__
    assert SETUP["metadata"]["version"] == "attr: amp_recipes.__version__"
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == version
    assert yaml.safe_load(text_of("conda/recipe.yaml"))["context"]["version"] == version
    changes = text_of("CHANGELOG.md")
    assert re.findall(r"^## \[(\d.*?)\]", changes, re.MULTILINE)[0] == version
    assert f"[{version}]: " in changes


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for():
    asked = yaml.safe_load(text_of("conda/recipe.yaml"))["requirements"]["run"]
    asked = [line.replace("${{ python_min }}", PYTHONS[0]).replace("pytorch ", "torch ") for line in asked]
    python = Requirement(f"python{SETUP['options']['python_requires']}")
    assert {str(Requirement(line)) for line in asked} == {str(it) for it in (python, *declared()["install"])}


def test_workflows_call_make_targets_that_exist_on_every_supported_python(subtests):
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    for path in sorted((REPOSITORY / ".github" / "workflows").glob("*.yml")):
        with subtests.test(path.name):
            jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
            steps = [step for job in jobs.values() for step in job["steps"]]
            called = {name for step in steps for name in re.findall(r"^make ([\w-]+)", step.get("run", ""))}
            assert called <= targets
            # A tag can be moved, the name of a commit cannot.
            used = [step["uses"] for step in steps if "uses" in step]
            assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in used)
            for job in jobs.values():
                assert job.get("strategy", {}).get("matrix", {}).get("python", PYTHONS) == PYTHONS


@pytest.mark.extended
@pytest.mark.skipif(find_spec("setuptools") is None, reason="building a wheel needs setuptools")
@pytest.mark.skipif(find_spec("pip") is None, reason="building a wheel needs pip")
def test_wheel_and_sdist_hold_all_and_nothing_else(tmp_path):
    # From a copy: building leaves files beside the sources.
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "site", "*.egg-info", "*_cache", "__pycache__")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    build_sdist = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    built = subprocess.run([sys.executable, "-c", build_sdist, tmp_path], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")

    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    contents = []
    for origin in (source, sdist):
        folder = tmp_path / f"from_{origin.name}"
        built = subprocess.run([*pip, "--wheel-dir", folder, origin], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    assert contents[0] == contents[1], "the sdist lacks something that belongs to the package"

    names = set(contents[0])
    sources = {path.relative_to(REPOSITORY).as_posix() for path in PACKAGE.rglob("*.py")}
    templates = {f"amp_recipes/templates/{name}" for name in TEMPLATES}
    sources |= {f"{folder}/{name}" for folder in templates for name in ("my_task.yaml", "README.md", "gitignore")}
    in_package = {name for name in names if name.startswith("amp_recipes/")}
    assert sources - in_package == set(), "a folder without __init__.py stays out of the wheel"
    assert "amp_recipes/py.typed" in in_package
    assert {name.split("/")[0].split("-")[0] for name in names} == {"amp_recipes"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    # Who packages it for another system runs the tests, which read nearly every file of the repository.
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if tracked.returncode == 0:
        with tarfile.open(sdist) as archive:
            packed = {name.partition("/")[2] for name in archive.getnames()}
        assert set(tracked.stdout.split()) - packed == set()
