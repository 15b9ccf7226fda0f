"""Every function of a recipe, in every place where a YAML may hand it over to be called.

`plant` copies a recipe, and has each function that reads a command line write its name down when it is entered.
`PROGRAM` loads YAMLs in such a copy, and tells which of them entered one.
"""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

WORDS = "[second.yaml, '--trust=os']"
READERS = {"parse_arguments", "parse_args", "parse_known_args", "parse_intermixed_args", "argv"}
NOTE = "__import__('builtins').open(__import__('os').environ['ENTERED'], 'a').write({!r})"

_LOADER = "!new:torch.utils.data.DataLoader {{dataset: [{}], batch_size: null, {}}}"
_LOADED = _LOADER.format(WORDS, "collate_fn: @F@ ")
_SCHEDULERS = "!name:torch.optim.lr_scheduler"
_WIDTHS = "d_model: 2, nhead: 1, dim_feedforward: 2, activation: @F@ "
_LINEAR = "!new:torch.nn.Linear [2, 2]"
_TRANSFORMER = "d_model: 2, nhead: 1, num_encoder_layers: 1, num_decoder_layers: 1, dim_feedforward: 2"
# By the parameter that takes something to call. What is built is used once it is loaded, as `use` in PROGRAM does.
LATER = {
    "itself": "@F@",
    "collate_fn": _LOADED,
    "worker_init_fn": _LOADER.format("1", "num_workers: 1, worker_init_fn: @F@ "),
    "max_key": "!name:max {key: @F@ }",
    "min_key": "!name:min {key: @F@ }",
    "sorted_key": "!name:sorted {key: @F@ }",
    "default_factory": "!new:collections.defaultdict [@F@ ]",
    "lr_lambda": f"{_SCHEDULERS}.LambdaLR {{lr_lambda: @F@ }}",
    "multiplicative_lr_lambda": f"{_SCHEDULERS}.MultiplicativeLR {{lr_lambda: @F@ }}",
    "scale_fn": f"{_SCHEDULERS}.CyclicLR {{base_lr: 0.1, max_lr: 0.2, cycle_momentum: false, scale_fn: @F@ }}",
    "avg_fn": f"!new:torch.optim.swa_utils.AveragedModel {{model: {_LINEAR}, avg_fn: @F@ }}",
    "multi_avg_fn": f"!new:torch.optim.swa_utils.AveragedModel {{model: {_LINEAR}, multi_avg_fn: @F@ }}",
    "encoder_activation": f"!new:torch.nn.TransformerEncoderLayer {{{_WIDTHS}}}",
    "decoder_activation": f"!new:torch.nn.TransformerDecoderLayer {{{_WIDTHS}}}",
    "transformer_activation": f"!new:torch.nn.Transformer {{{_TRANSFORMER}, activation: @F@ }}",
    "custom_encoder": f"!new:torch.nn.Transformer {{{_TRANSFORMER}, custom_encoder: @F@ }}",
    "custom_decoder": f"!new:torch.nn.Transformer {{{_TRANSFORMER}, custom_decoder: @F@ }}",
    "distance_function": "!new:torch.nn.TripletMarginWithDistanceLoss {distance_function: @F@ }",
    "fwd_default_precision": "!apply:amp_recipes.fwd_default_precision [@F@ ]",
    "custom_fwd": "!apply:amp_recipes.custom_fwd [@F@ ]",
    "custom_bwd": "!apply:amp_recipes.custom_bwd [@F@ ]",
    "opt_class": "!name:amp_recipes.Brain {opt_class: @F@ }",
    "partial": "!name:max {key: !name:sorted {key: @F@ }}",
}
_KEYED = _LOADER.format(f"[{WORDS}, {WORDS}]", "collate_fn: !name:@KIND@ {key: @F@ }")
_ONES = "!apply:torch.ones [1, 2]"
_OPTIMIZER = f"!new:torch.optim.SGD {{params: [!new:torch.nn.Parameter [{_ONES}]], lr: 0.1}}"
NOW = {
    "apply": f"!apply:@NAME@ [{WORDS}]",
    "applyref": f"!applyref:@NAME@ [{WORDS}]",
    "apply_without_arguments": "!apply:@NAME@",
    "collate_fn": f"!new:list [{_LOADED}]",
    "max_key": f"!new:list [{_KEYED.replace('@KIND@', 'max')}]",
    "min_key": f"!new:list [{_KEYED.replace('@KIND@', 'min')}]",
    "sorted_key": f"!new:list [{_KEYED.replace('@KIND@', 'sorted')}]",
    "distance_function": "!apply:torch.nn.functional.triplet_margin_with_distance_loss "
    f"{{anchor: {_ONES}, positive: {_ONES}, negative: {_ONES}, distance_function: @F@ }}",
    "lr_lambda": f"!new:torch.optim.lr_scheduler.LambdaLR [{_OPTIMIZER}, @F@ ]",
    "scale_fn": f"!new:torch.optim.lr_scheduler.CyclicLR {{optimizer: {_OPTIMIZER}, base_lr: 0.1, max_lr: 0.2, "
    "cycle_momentum: false, scale_fn: @F@ }",
    "wrapped": f"!new:list [{_LOADED.replace('@F@', '!apply:amp_recipes.fwd_default_precision [@F@ ]')}]",
}
IN_WORKER = (
    f"!new:list [{_LOADER.format(WORDS, 'num_workers: 1, multiprocessing_context: @CONTEXT@, collate_fn: @F@ ')}]"
)
INIT_IN_WORKER = (
    f"!new:list [{_LOADER.format('1', 'num_workers: 1, multiprocessing_context: @CONTEXT@, worker_init_fn: @F@ ')}]"
)
# All functions that read no command line, in one worker: starting one takes seconds.
EACH = IN_WORKER.replace(WORDS, "@ALL@").replace("@F@", "!name:hostile_each.call")

HELPER = '''\
def call(function):
    """What a loader's worker does with a sample that is a function."""
    for arguments in ([["second.yaml", "--trust=os"]], []):
        try:
            function(*arguments)
        except (Exception, SystemExit):
            pass
'''

PROGRAM = '''\
"""Loads each YAML of a list, uses what it gives, and tells which of them entered a function that notes it."""

import contextlib
import functools
import io
import json
import os
import signal
import sys
import warnings

import torch

from amp_recipes import load_hparams

WORDS = ["second.yaml", "--trust=os"]


class TooLong(BaseException):
    pass


def too_long(*_):
    raise TooLong


def use(value):
    if isinstance(value, torch.utils.data.DataLoader):
        list(value)
    elif isinstance(value, torch.optim.swa_utils.AveragedModel):
        for _ in range(2):
            value.update_parameters(torch.nn.Linear(2, 2))
    elif isinstance(value, (torch.nn.Transformer, torch.nn.TransformerDecoderLayer)):
        value(torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    elif isinstance(value, torch.nn.TripletMarginWithDistanceLoss):
        value(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    elif isinstance(value, torch.nn.Module):
        value(torch.ones(1, 1, 2))
    elif isinstance(value, dict):
        value["missing"]
    elif isinstance(value, functools.partial) and value.func in (max, min, sorted):
        value([WORDS, WORDS])
    elif isinstance(value, functools.partial) and "lr_scheduler" in getattr(value.func, "__module__", ""):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = value(optimizer)
        optimizer.step()
        scheduler.step()
    elif isinstance(value, functools.partial):
        value({"model": torch.nn.Linear(2, 2)}).init_optimizers()
    elif callable(value):
        value(WORDS)


def one(text):
    """Whether a name in it was refused, and what was said."""
    with open("product.yaml", "w") as file:
        file.write(f"x: {text}\\n")
    signal.alarm(30)
    try:
        value = load_hparams("product.yaml")["x"]
        use(value)
    except (Exception, SystemExit, TooLong) as error:
        return " is not trusted" in str(error), f"{type(error).__name__}: {error}"[:200]
    finally:
        signal.alarm(0)
    return False, ""


def main():
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.1  # how long a loader waits for a worker that failed
    signal.signal(signal.SIGALRM, too_long)
    warnings.simplefilter("ignore")
    sys.argv[1:], (texts, result) = [], sys.argv[1:]
    found = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for text in json.load(open(texts)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.environ["ENTERED"])
            refused, said = one(text)
            entered = open(os.environ["ENTERED"]).read() if os.path.exists(os.environ["ENTERED"]) else ""
            found.append({"text": text, "refused": refused, "said": said, "entered": entered})
    with open(result, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":  # a worker that is spawned imports this file
    main()
'''


@dataclass(frozen=True)
class Function:
    """A function of a recipe. reads: whether it reads a command line, itself or through others of its file."""

    name: str  # with its module
    reads: bool
    yields: bool  # so that a call does not enter it, and gives what a worker cannot send


def plant(recipe: Path, folder: Path) -> list[Function]:
    """Copy a recipe, with notes in the functions that read a command line; its public functions."""
    shutil.copytree(recipe, folder, ignore=shutil.ignore_patterns("__pycache__", "*.png", "*.md"))
    functions = []
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text())
        known = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        reading = _reading(known)
        for name in reading:
            known[name].body.insert(0, ast.parse(NOTE.format(f"{file.stem}.{name} ")).body[0])
        file.write_text(ast.unparse(tree))
        public = [name for name in known if not name.startswith("_")]
        functions += [Function(f"{file.stem}.{name}", name in reading, _yields(known[name])) for name in public]
    (folder / "hostile_each.py").write_text(HELPER)
    (folder / "hostile_program.py").write_text(PROGRAM)
    return functions


def _yields(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))


def _reading(known: dict[str, ast.FunctionDef]) -> set[str]:
    """Those that read a command line, or call one of the file that does."""
    mentions = {name: {_mentioned(node) for node in ast.walk(function)} for name, function in known.items()}
    reading = {name for name, mentioned in mentions.items() if mentioned & READERS}
    while further := {name for name, mentioned in mentions.items() if mentioned & reading} - reading:
        reading |= further
    return reading


def _mentioned(node: ast.AST) -> str:
    """The name that is called or read; argv only as an attribute, of sys."""
    if isinstance(node, ast.Name):
        return "" if node.id == "argv" else node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def texts(functions: list[Function], when: str) -> list[str]:
    """The values to load. when: now, later, fork, spawn, forkserver."""
    if when in ("now", "later"):
        places = NOW if when == "now" else LATER
        return [_filled(text, function.name) for function in functions for text in places.values()]
    both = [text.replace("@CONTEXT@", when) for text in (IN_WORKER, INIT_IN_WORKER)]
    others = [f"!name:{function.name} " for function in functions if not function.reads]
    chosen = [function for function in functions if function.reads or (when == "fork" and not function.yields)]
    each = EACH.replace("@CONTEXT@", when).replace("@ALL@", ", ".join(others))
    return [each, *(_filled(text, function.name) for function in chosen for text in both)]


def _filled(text: str, name: str) -> str:
    return text.replace("@F@", f"!name:{name}").replace("@NAME@", name)


def names(functions: list[Function]) -> list[str]:
    """Values that do no more than name each function."""
    return [f"[!name:{function.name} ]" for function in functions]


def write_texts(values: list[str], file: Path) -> None:
    """The list that PROGRAM reads."""
    file.write_text(json.dumps(values))
