"""Creates a new recipe that runs at once, from a folder of `templates/` or from a recipe of the package.

A template is itself a recipe that runs, called `my_task`; a copy has another name in place of that.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import itertools
import keyword
import os
import re
import shlex
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from amp_recipes.commands.collection import Recipe, recipe_called, recipes
from amp_recipes.config.trust.module_files import spec_of
from amp_recipes.errors import ConfigError

PLACEHOLDER = "my_task"
# name -> what the recipe shows; the first is the default
TEMPLATES = {
    "basic": "one model, one loss, one metric, as in most recipes",
    "own_step": "its own fit_batch, with two optimizers that take turns (a small GAN)",
}
_LONGEST_NAME = 40  # characters; a longer one would not fit into the template's lines
_MAY_BE_THERE = {".git"}  # in the folder that is to be filled


def run(arguments: argparse.Namespace) -> int:
    """Create the recipe and print the next steps."""
    if arguments.list:
        print(listed_recipes())
        return 0
    if arguments.name is None:
        raise ConfigError(
            "the name of the recipe is missing: amp-recipes new my_task. --list shows the recipes and templates."
        )
    folder = arguments.to if arguments.to is not None else Path(arguments.name)
    made = new_recipe(arguments.name, folder, arguments.template, arguments.recipe)
    print(report(arguments.name, folder, made, arguments.recipe))
    return 0


def listed_recipes() -> str:
    """Return the list of recipes and templates to start from."""
    of_recipes = {name: recipe.summary for name, recipe in recipes().items()}
    width = max(map(len, [*of_recipes, *TEMPLATES]))
    blocks = {"amp-recipes new NAME --from": of_recipes, "amp-recipes new NAME --template": TEMPLATES}
    return "\n\n".join(
        "\n".join([f"{command} ...", *(f"  {name:{width}}  {summary}" for name, summary in found.items())])
        for command, found in blocks.items()
    )


def new_recipe(name: str, folder: Path, template: str, recipe: str | None = None) -> list[str]:
    """Write a recipe called `name` into `folder`, which is made; the names of its files.

    recipe: copy this recipe of the package instead of the template. All files are there or none: they are
    written elsewhere and renamed. Raises ConfigError for a name that a recipe cannot have, for a recipe that is none,
    and for a folder that holds anything.
    """
    if recipe is None:
        contents = read_template(template)
        check_name(name, contents)
        renamed = {_in_place(path, name): _in_place(text, name) for path, text in contents.items()}
    else:
        renamed = copy_of(recipe_called(recipe), name)
        check_name(name, renamed, names_a_class=False)
    try:
        check_folder(folder, name)
        _write_all(renamed, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror or error}. Give another with --to.") from error
    return sorted(renamed)


def read_template(template: str) -> dict[str, str]:
    """File name -> text of a template; files of an earlier run of it are left out."""
    entries = (entry for entry in (files("amp_recipes") / "templates" / template).iterdir() if entry.is_file())
    # As `.gitignore` it would act on the template, and packaging tools pass over hidden files.
    return {
        ".gitignore" if entry.name == "gitignore" else entry.name: entry.read_text(encoding="utf-8")
        for entry in entries
    }


def copy_of(recipe: Recipe, name: str) -> dict[str, str]:
    """File name -> text of a copy that is called `name`: all in one folder, and the commands in it work there.

    Other YAML files of the same scripts are copied under their own names; pictures of results are not.
    """
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(recipe.folder.glob("*.py"))}
    texts["README.md"] = (recipe.folder / "README.md").read_text(encoding="utf-8")
    for each in recipes().values():
        if each.folder == recipe.folder and (each == recipe or each.name != name):
            texts[f"{each.name}.yaml"] = each.hparams_file.read_text(encoding="utf-8")
    copied = {path.replace(f"{recipe.name}.yaml", f"{name}.yaml"): text for path, text in texts.items()}
    copied = {path: _in_one_folder(text, recipe, name) for path, text in copied.items()}
    return {**copied, ".gitignore": read_template("basic")[".gitignore"]}


def _in_one_folder(text: str, recipe: Recipe, name: str) -> str:
    text = re.sub(r"^!\[.*\n\n?", "", text, flags=re.MULTILINE)
    text = text.replace(f"recipes/{recipe.folder.name}/", "").replace("../../configs/", "").replace("configs/", "")
    return text.replace(f"{recipe.name}.yaml", f"{name}.yaml").replace(f"results/{recipe.name}/", f"results/{name}/")


def _in_place(text: str, name: str) -> str:
    return text.replace(PLACEHOLDER, name).replace(class_name(PLACEHOLDER), class_name(name))


def class_name(name: str) -> str:
    """`my_task` -> `MyTask`."""
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


# ---------------------------------------------------------------------- names


def check_name(name: str, contents: Mapping[str, str], names_a_class: bool = True) -> None:
    """Raise ConfigError, with a name that would do where one can be made, for one that a recipe cannot have."""
    wrong = _what_is_wrong(name, contents, names_a_class)
    if wrong is None:
        return
    nearest = suggestion(name)
    candidates = (nearest, f"{nearest}_task", f"my_{nearest}")
    fits = (each for each in candidates if each and _what_is_wrong(each, contents, names_a_class) is None)
    good = next(fits, PLACEHOLDER)
    raise ConfigError(f"a recipe cannot be called {name!r}: {wrong}. For example: amp-recipes new {good}")


def _what_is_wrong(name: str, contents: Mapping[str, str], names_a_class: bool) -> str | None:
    if wrong := _wrong_form(name):
        return wrong
    scripts = [text for path, text in contents.items() if path.endswith(".py")]
    own = {Path(path).stem for path in contents if path.endswith(".py")}
    if name in own:
        return f"{name}.py is one of the recipe's files"
    spec = spec_of(name)
    if spec is not None and spec.origin is not None:  # a folder without code in it has none
        return f"Python has a module of this name ({spec.origin}), which a file of yours would hide"
    return _wrong_class(class_name(name), scripts) if names_a_class else None


def _wrong_form(name: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return "expected small letters a to z, digits and _, with a letter first"
    if len(name) > _LONGEST_NAME:
        return f"it has {len(name)} characters, and at most {_LONGEST_NAME} are allowed"
    if name.endswith("_") or "__" in name:
        return "every _ must be between two words"
    return "this is a keyword of Python" if keyword.iskeyword(name) else None


def _wrong_class(name: str, scripts: Iterable[str]) -> str | None:
    taken = set().union(*map(_names_in, scripts)) - {class_name(PLACEHOLDER)}
    if name in taken or keyword.iskeyword(name) or hasattr(builtins, name):
        return f"its class would be {name}, which means something else in its code"
    return None


def _names_in(script: str) -> set[str]:
    """Every name that a script defines, imports or reads."""
    found = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
    return found


def suggestion(name: str) -> str:
    """Return a valid name near to a wrong one: `My-Täsk` -> `my_task`; empty if nothing is left."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()
    joined = re.sub(r"[^a-z0-9]+", "_", words).strip("_")
    return (f"task_{joined}" if joined[:1].isdigit() else joined)[:_LONGEST_NAME].rstrip("_")


# ---------------------------------------------------------------------- files


def check_folder(folder: Path, name: str) -> None:
    """Raise ConfigError unless the folder is new or empty."""
    if folder.is_dir():
        there = sorted({path.name for path in folder.iterdir()} - _MAY_BE_THERE)
        if there:
            raise ConfigError(
                f"{folder} is not empty (it holds {there[0]}), and files are never overwritten. Give a new folder: "
                f"amp-recipes new {name} --to {shlex.quote(str(_free_folder(folder, name)))}"
            )
    elif os.path.lexists(folder):
        raise ConfigError(f"{folder} exists and is not a folder. Give another with --to.")


def _free_folder(folder: Path, name: str) -> Path:
    """A folder near to one that is taken, and free."""
    inside = folder / name
    beside = (folder.with_name(f"{folder.name}_{count}") for count in itertools.count(2))
    candidates = beside if folder.name in (name, "") else itertools.chain([inside], beside)
    return next(path for path in candidates if not os.path.lexists(path))


def _write_all(contents: Mapping[str, str], folder: Path) -> None:
    """Write files into a folder, all or none."""
    if folder.is_dir():
        _fill(contents, folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        whole = Path(temporary) / folder.name
        whole.mkdir()  # the temporary folder itself is for its owner alone
        _fill(contents, whole)
        os.rename(whole, folder)  # refuses a folder that has come into being meanwhile, unless it is empty


def _fill(contents: Mapping[str, str], folder: Path) -> None:
    """Write files into an existing folder: it may be the shell's current one, so it must stay the same folder."""
    written: list[Path] = []
    try:
        for name, text in contents.items():
            with open(folder / name, "x", encoding="utf-8") as file:  # never into a file that is there
                written.append(folder / name)
                file.write(text)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def report(name: str, folder: Path, made: list[str], recipe: str | None = None) -> str:
    """Return the list of created files, and the commands to run next."""
    train = f"python train.py {name}.yaml"
    steps = {f"cd {shlex.quote(str(folder))}": ""}
    if recipe is None:
        steps[train] = "# trains on random data, in seconds"
    else:
        steps[recipe_called(recipe).needs] = "# installs what the recipe imports"
        steps[f"{train} --debug"] = "# tries everything on a few batches"
        steps[train] = "# trains; the head of the YAML says how long that takes"
    steps[f"{train} --help"] = "# every setting"
    if recipe is None:
        steps["python -m pytest"] = "# its tests (pip install pytest)"
    if folder.resolve() == Path.cwd():
        del steps[f"cd {shlex.quote(str(folder))}"]
    width = max(map(len, steps))
    commands = "\n".join(f"    {command:{width}}  {comment}".rstrip() for command, comment in steps.items())
    return f"{folder}: {', '.join(made)}\n\n{commands}\n\nREADME.md says where your data, model and metrics go."
