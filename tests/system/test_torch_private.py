"""torch's private names stand in three files, and nowhere else in the package."""

import ast

import pytest
from repository import REPOSITORY

PACKAGE = REPOSITORY / "amp_recipes"
HOMES = {f"{room}/torch_private.py" for room in ("modules", "precision", "distributed")}
# Python's own, and what a namedtuple has.
PYTHONS = {"_getframe", "_exit", "_current_frames", "_make", "_fields", "_replace", "_asdict", "_actions"}
# Overridden where torch calls them, and guarded by test_torch_private_precision.py.
OVERRIDDEN = {"_unscale_grads_", "_should_skip_dynamo"}
OTHERS = {"_lru_cache_wrapper": "functools'", "_inst": "random's"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if str(path.relative_to(PACKAGE)) not in HOMES)


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees):
    """What the package itself defines under a private name: methods, functions, classes, attributes, variables."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name):
                names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__":
            names |= {it.value for it in node.args if isinstance(it, ast.Constant) and isinstance(it.value, str)}
    return names


def private_names(tree):
    """Private names that a file asks something for: as attribute, in an import, or with getattr and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            # An op's name begins with an underscore where it is not for users; ops are data here.
            if is_private(node.attr) and not (isinstance(node.value, ast.Name) and node.value.id == "aten"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for dotted in (f"{module}.{alias.name}" for alias in node.names):
                for part in dotted.split("."):
                    if is_private(part) and dotted.startswith("torch"):
                        yield node.lineno, part
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            named = getattr(node.args[1], "value", None)
            asks = node.func.id in ("getattr", "hasattr", "setattr")
            if asks and isinstance(named, str) and is_private(named):
                yield node.lineno, named


# Names that both we and torch use: where the file itself does not define them they are torch's.
TORCHS = {"_version", "_modules", "_buffers", "_parameters", "_values", "_ops", "_C", "_schema", "_op", "_opname"}


def found_in(path, trees, own):
    here = own_names([trees[path]])
    for line, name in private_names(trees[path]):
        is_ours = name in (here if name in TORCHS else own)
        if not is_ours and name not in PYTHONS | OVERRIDDEN | OTHERS.keys():
            yield f"{path.relative_to(PACKAGE)}:{line}: {name}"


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_private_names_of_torch_stand_in_three_files(trees):
    own = own_names(trees.values())
    wrong = [found for path in FILES for found in found_in(path, trees, own)]
    assert wrong == [], "put them into the lowest torch_private.py that serves, with a test that names the release"


def test_the_three_files_are_found_out(trees):
    """The search sees what it is to see."""
    own = own_names(tree for path, tree in trees.items() if path.name != "torch_private.py")
    counts = {home: len(list(found_in(PACKAGE / home, trees, own))) for home in HOMES}
    assert all(count >= 10 for count in counts.values()), counts
