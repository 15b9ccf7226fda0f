"""The house keeps its layers: a file imports only from layers above it, and nothing goes in a circle."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

import amp_recipes
from amp_recipes import errors

PACKAGE = REPOSITORY / "amp_recipes"

# Each room's layer; a room imports from lower layers, and inside itself. Why: a reader of `precision` needs no other
# room; a newcomer adds a logger or a probe without touching the loop.
LAYERS = {
    "errors": 0,
    "interrupts": 1,
    "records": 1,
    "stage": 1,
    "options": 1,
    "files": 1,
    "modules": 1,
    "distributed": 2,
    "precision": 2,
    "state": 2,
    "checkpoint": 3,
    "data": 3,
    "loggers": 3,
    "numerics": 4,
    "loop": 5,
    "config": 6,
    "extras": 7,
    "brain": 7,
    "trained": 8,
    "__init__": 9,
    "commands": 10,
    "templates": 10,
    "__main__": 11,
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def shown(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(REPOSITORY)}:{node.lineno}"


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports_of(path: Path) -> list[tuple[ast.AST, str]]:
    """Every import of our own modules in a file, as a node and a dotted name."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path, node)}: imports are absolute, so that their layer can be read"
            found.append((node, node.module))
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
    return [(node, name) for node, name in found if name == "amp_recipes" or name.startswith("amp_recipes.")]


def imports_from_others(path: Path) -> list[ast.ImportFrom]:
    """The imports from modules that are not the package's."""
    found = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]
    return [node for node in found if not (node.module or "").startswith("amp_recipes")]


def may_import(room: str, other: str) -> bool:
    return other == room or LAYERS[other] < LAYERS[room]


def test_every_room_has_a_layer():
    assert {room_of(path) for path in MODULES} - set(LAYERS) == set(), "say in LAYERS where it stands"


def test_a_file_imports_only_from_lower_layers():
    wrong = []
    for path in MODULES:
        room = room_of(path)
        for node, name in imports_of(path):
            other = name.split(".")[1] if "." in name else None
            if other in LAYERS and not may_import(room, other):
                wrong.append(
                    f"{shown(path, node)} imports {name}: {room} (layer {LAYERS[room]}) may not know {other} "
                    f"(layer {LAYERS[other]})"
                )
    assert not wrong, "pass in what they need, or move the shared part to a lower layer"


def test_no_import_circles_between_files():
    """Not even inside a room: a file can be read after the ones it imports, and before those that import it."""
    names = {
        path: ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in MODULES
    }
    files = {name: path for path, name in names.items()}
    edges = {
        names[path]: {name for _, name in imports_of(path) if name in files and name != names[path]} - {"amp_recipes"}
        for path in MODULES
        if path.name != "__init__.py"
    }
    # A room's __init__ only gathers its files; inside the room nobody imports through it.
    state: dict[str, str] = {}

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert state.get(name) != "open", f"import circle: {' -> '.join([*way[way.index(name) :], name])}"
        if name in state:
            return
        state[name] = "open"
        for other in edges.get(name, ()):
            visit(other, (*way, name))
        state[name] = "done"

    for name in edges:
        visit(name, ())


def test_imports_stand_at_the_top():
    """Only an optional dependency may be imported inside a function."""
    inside = set()
    for path in MODULES:
        functions = [node for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        lines = {line for function in functions for line in range(function.lineno, function.end_lineno + 1)}
        inside |= {shown(path, node) for node, name in imports_of(path) if node.lineno in lines}
    assert inside == set(), "an import inside a function hides a circle"


def test_only_the_precision_room_scales_clips_and_steps():
    """One owner: a second place that steps an optimizer would forget to scale, clip or skip."""
    verbs = {"unscale_", "clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm", "found_inf", "autocast"}
    uses = [
        f"{shown(path, node)} uses .{node.attr}"
        for path in MODULES
        if room_of(path) != "precision"
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in verbs
    ]
    assert uses == []


def test_recipes_hold_no_scaler_autocast_or_device_code():
    words = ("GradScaler", "autocast(", ".cuda(", "unscale_", "scaler.")
    texts = {path: path.read_text() for path in (REPOSITORY / "recipes").rglob("*.py")}
    found = [
        f"{path.relative_to(REPOSITORY)}: {word}" for path, text in texts.items() for word in words if word in text
    ]
    assert found == [], "this is the framework's work"


def test_public_names_are_those_of_the_contract():
    contract = {
        "AMPConfig",
        "TorchAutocast",
        "fwd_default_precision",
        "custom_fwd",
        "custom_bwd",
        "Stage",
        "Brain",
        "RunOptions",
        "parse_arguments",
        "load_hparams",
        "load_trained",
        "needs_extra",
        "create_experiment_directory",
        "EpochCounter",
        "Checkpointer",
    }
    assert set(amp_recipes.__all__) == contract
    assert all(getattr(amp_recipes, name).__doc__ for name in contract)


def test_no_class_inherits_from_a_class_of_the_package():
    """Objects hold objects. Protocols, exceptions, and what is torch's or the standard library's may be inherited."""
    own = [path for path in MODULES if room_of(path) != "templates"]  # recipes, which subclass Brain
    classes = {node.name: node for path in own for node in nodes_of(path) if isinstance(node, ast.ClassDef)}
    bases: dict[str, set[str]] = {}
    for path in own:
        others = {alias.asname or alias.name for node in imports_from_others(path) for alias in node.names}
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(names - others)
    free = {name for name, node in classes.items() if "Protocol" in ast.unparse(node).partition(":")[0]}
    free |= set(vars(errors)) | {"OptionFields"}  # which is for checkers of types
    inherited = {name: found & classes.keys() - free for name, found in bases.items() if name not in free}
    assert {name: found for name, found in inherited.items() if found} == {}


@pytest.mark.extended
def test_the_package_loads_neither_commands_nor_instruments():
    code = "import sys; from amp_recipes import Brain; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "amp_recipes.loop.run" in loaded
    late = ("amp_recipes.commands", "amp_recipes.numerics.")
    assert [name for name in loaded if name.startswith(late)] == []


def test_functions_of_more_than_ten_branches_are_listed_and_grow_no_more():
    """The list in `complex_functions.txt` may only shrink: a new one wants to be two functions."""
    limit = ("--select", "C901", "--config", "lint.mccabe.max-complexity=10", "--output-format", "json")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *limit, "--no-cache", str(PACKAGE)], capture_output=True, text=True
    )
    places = ((Path(found["filename"]), found["message"].split("`")[1]) for found in json.loads(done.stdout))
    complex_now = {f"{path.relative_to(PACKAGE)} {function}" for path, function in places}
    listed = set((REPOSITORY / "tests" / "support" / "complex_functions.txt").read_text().splitlines())
    assert complex_now - listed == set(), "these are too complex"
    assert listed - complex_now == set(), "these are simple now: take them off the list"
