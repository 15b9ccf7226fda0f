"""The house keeps its layers: a file imports only from layers above it, and nothing goes in a circle."""

import ast
import functools
from pathlib import Path

from repository import REPOSITORY

import amp_recipes

PACKAGE = REPOSITORY / "amp_recipes"

# Each room's layer; a room imports from lower layers, and inside itself. Why: a reader of `precision` needs no other
# room; a newcomer adds a logger or a probe without touching the loop.
LAYERS = {
    "errors": 0,
    "records": 1,
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
    "brain": 7,
    "__init__": 8,
    "commands": 9,
    "templates": 9,
}
# What still runs up, until the next commits cut it.
TO_CUT = {("loop", "commands"), ("loop", "config"), ("numerics", "config")}
# The one import that starts a command: inside a function, when the command line of a recipe's script asks for a check,
# the settings or a sweep. A run does not import commands.
STARTS_COMMANDS = ("config/hparams.py", "amp_recipes.commands.requests")
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


def starts_commands(path: Path, name: str) -> bool:
    return str(path.relative_to(PACKAGE)) == STARTS_COMMANDS[0] and name.startswith(STARTS_COMMANDS[1])


def may_import(room: str, other: str) -> bool:
    return other == room or LAYERS[other] < LAYERS[room] or (room, other) in TO_CUT


def test_every_room_has_a_layer():
    assert {room_of(path) for path in MODULES} - set(LAYERS) == set(), "say in LAYERS where it stands"


def test_a_file_imports_only_from_layers_above_it():
    wrong = []
    for path in MODULES:
        room = room_of(path)
        for node, name in imports_of(path):
            other = name.split(".")[1] if "." in name else None
            if other in LAYERS and not may_import(room, other) and not starts_commands(path, name):
                wrong.append(f"{shown(path, node)} imports {name}: {room} (layer {LAYERS[room]}) may not know {other} "
                             f"(layer {LAYERS[other]})")  # fmt: skip
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
    """Only an optional dependency, and what starts a command, may be imported inside a function."""
    inside = set()
    for path in MODULES:
        functions = [node for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        lines = {line for function in functions for line in range(function.lineno, function.end_lineno + 1)}
        inside |= {
            shown(path, node)
            for node, name in imports_of(path)
            if node.lineno in lines and not starts_commands(path, name)
        }
    assert inside == set(), "an import inside a function hides a circle"


def test_a_run_imports_no_command():
    statements = ast.parse((PACKAGE / STARTS_COMMANDS[0]).read_text()).body
    assert [node.module for node in statements if isinstance(node, ast.ImportFrom) and "commands" in node.module] == []


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
        "AMPConfig", "TorchAutocast", "fwd_default_precision", "custom_fwd", "custom_bwd", "Stage", "Brain",
        "RunOptions", "parse_arguments", "load_hparams", "create_experiment_directory", "EpochCounter", "Checkpointer",
    }  # fmt: skip
    assert set(amp_recipes.__all__) == contract
    assert all(getattr(amp_recipes, name).__doc__ for name in contract)


def test_no_file_is_too_long_to_read():
    """A file of more than 500 lines wants to be two rooms."""
    lines = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: count for path, count in lines.items() if count > 500} == {}
