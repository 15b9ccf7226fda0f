"""The house keeps its layers: a file imports only from layers above it, and nothing goes in a circle."""

import ast
from pathlib import Path

import pytest
from repository import REPOSITORY

PACKAGE = REPOSITORY / "amp_recipes"

# Each room's layer; a room imports from lower layers, and inside itself. Why: a reader of `precision` needs no other
# room; a newcomer adds a logger or a probe without touching the loop.
LAYERS = {
    "errors": -1,
    "run_files": 0,
    "records": 0,
    "host_copy": 0,
    "module_names": 0,
    "sharded_tensors": 0,
    "distributed": 0,
    "folder_lock": 0,
    "interrupts": 0,
    "ema": 0,
    "early_stopping": 0,
    "schedulers": 0,
    "lowered_rates": 0,
    "spikes": 0,
    "precision": 0,
    "position": 0,
    "recipe_state": 0,
    "transient_buffers": 0,
    "outstanding_gradients": 0,
    "randomness": 0,
    "config": 1,
    "checkpoint": 1,
    "data": 1,
    "rounds": 1,
    "loggers": 2,
    "numerics": 2,
    "report": 2,
    "ledger": 2,
    "loss_average": 0,
    "hooks": 2,
    "stage_metrics": 0,
    "run_setup": 3,
    "run_report": 4,
    "run_data": 5,
    "resumable_run": 6,
    "examined_run": 7,
    "spike_recovery": 8,
    "brain": 9,
    "__init__": 10,
    "export": 11,
    "resume_check": 11,
    "run_diff": 11,
    "compare": 11,
    "completion": 11,
    "new": 11,
    "templates": 11,
    "cli": 12,
}
# Inside layer 0 these may be imported by their neighbours: they hold no decisions, only words that all rooms share.
SHARED = {"records", "host_copy", "module_names", "randomness", "run_files", "sharded_tensors"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[ast.AST, str]]:
    """Every import of our own modules in a file, as a node and a dotted name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute, so that their layer can be read"
            found.append((node, node.module))
            found += [(node, f"{node.module}.{alias.name}") for alias in node.names]
    return [(node, name) for node, name in found if name == "amp_recipes" or name.startswith("amp_recipes.")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_layers_above_it(path):
    room = room_of(path)
    assert room in LAYERS, f"{room} has no layer yet: say in LAYERS where it stands"
    for node, name in imports_of(path):
        parts = name.split(".")
        if len(parts) == 1 or parts[1] not in LAYERS:
            continue
        other = parts[1]
        allowed = other == room or LAYERS[other] < LAYERS[room] or (other in SHARED and room not in SHARED)
        assert allowed, (
            f"{path.relative_to(REPOSITORY)}:{node.lineno} imports {name}: {room} (layer {LAYERS[room]}) may not know "
            f"{other} (layer {LAYERS[other]}). Pass in what it needs, or move the shared part to a lower layer."
        )


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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_stand_at_the_top(path):
    """Only an optional dependency may be imported inside a function."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = node.names[0].name if isinstance(node, ast.Import) else node.module
                assert not module.startswith("amp_recipes"), (
                    f"{path}:{node.lineno} imports {module} inside a function, which hides a circle"
                )


def test_only_the_precision_room_scales_clips_and_steps():
    """One owner: a second place that steps an optimizer would forget to scale, clip or skip."""
    verbs = {"unscale_", "clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm", "found_inf", "autocast"}
    for path in MODULES:
        if room_of(path) == "precision":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in verbs, f"{path.relative_to(REPOSITORY)}:{node.lineno} uses .{node.attr}"


def test_recipes_hold_no_scaler_autocast_or_device_code():
    for path in (REPOSITORY / "recipes").rglob("*.py"):
        text = path.read_text()
        for word in ("GradScaler", "autocast(", ".cuda(", "unscale_", "scaler."):
            assert word not in text, f"{path.relative_to(REPOSITORY)} contains {word}: this is the framework's work"


def test_public_names_are_those_of_the_contract():
    import amp_recipes

    contract = {
        "AMPConfig", "TorchAutocast", "fwd_default_precision", "custom_fwd", "custom_bwd", "Stage", "Brain",
        "RunOptions", "parse_arguments", "load_hparams", "create_experiment_directory", "EpochCounter", "Checkpointer",
    }  # fmt: skip
    assert set(amp_recipes.__all__) == contract
    assert all(getattr(amp_recipes, name).__doc__ for name in contract)


def test_no_file_is_too_long_to_read():
    """A file of more than 500 lines wants to be two rooms."""
    for path in MODULES:
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path.relative_to(REPOSITORY)} has {lines} lines"
