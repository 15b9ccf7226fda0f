"""Hostile YAMLs that have a program read words of theirs as its command line, and with them `--trust`.

An attack is a working folder and the words of one program that is started in it. The folder holds the recipe of
`hostile_recipe.py` in `recipe`, and `second.yaml`, which creates the canary once its `--trust=os` is believed. The
program is the recipe's script with `main.yaml`, or one of the commands of `amp-recipes`.
`@CANARY@` stands for the file to create, `@HERE@` for the working folder, `@OUTSIDE@` for a folder beside it,
`@SHA256:PATH@` for the sha256 of a file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile_recipe import PREPARE, TOOLS, TRAIN, TWICE

CLI = "amp_recipes.commands.cli.main"
WORDS = "[second.yaml, '--trust=os']"
SECOND = "y: !apply:os.system ['touch @CANARY@']\n"
SCRIPT = ("@HERE@/recipe/train.py", "main.yaml")
COMMAND = ("-m", "amp_recipes.commands.cli")
NOTHING = object()


@dataclass(frozen=True)
class Attack:
    """One attack.

    text: of `main.yaml`; files: others in the working folder, or in `@OUTSIDE@`; links: symbolic links, to what they
    point at. command: what `nonfinite-3/meta.json` says of the run whose step it holds. words: of the program;
    further: what is added to them. env: added to the program's variables.
    run: the name of a finished run that lies in the working folder; meta, contents: what its checkpoint's `meta.json`
    says otherwise, in `meta` or beside it.
    refused: whether the YAML shows it, so that a check names the place; else it may also end while it runs.
    starts: whether a fresh interpreter is started, which takes seconds.
    unsure: why it is not known what is right; such an attack is left out of the tests.
    """

    name: str
    text: str = "lr: 0.1\n"
    refused: bool = False
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    command: Any = NOTHING
    run: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = SCRIPT
    further: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    starts: bool = False
    unsure: str = ""


def values(expressions: dict[str, str], refused: bool = False, **fields: Any) -> list[Attack]:
    """Attacks that are one value, or, where they begin with a line break, keys of their own."""
    # In a flow list YAML takes a comma or bracket right behind a tag for a part of it.
    spaced = {name: re.sub(r"(!name:[\w.]+)(?=[],}])", r"\1 ", text) for name, text in expressions.items()}
    return [
        Attack(name, f"lr: 0.1{text}\n" if text[0] == "\n" else f"lr: 0.1\nx: {text}\n", refused, **fields)
        for name, text in spaced.items()
    ]


# What is itself an entry point, under any name.
DIRECT = values(
    {
        "apply_main": f"!apply:train.main [{WORDS}]",
        "apply_main_without_words": "!apply:train.main",
        "apply_main_of_the_running_script": f"!apply:__main__.main [{WORDS}]",
        "apply_main_by_keyword": f"!apply:train.main {{argv: {WORDS}}}",
        "applyref_main": f"!applyref:train.main [{WORDS}]",
        "name_main": "!name:train.main",
        "name_main_with_words": f"!name:train.main [{WORDS}]",
        "name_main_of_the_running_script": "!name:__main__.main",
        "main_imported_as_go": f"!apply:tools.go [{WORDS}]",
        "main_by_assignment": f"!apply:tools.alias [{WORDS}]",
        "main_in_a_partial_of_the_recipe": "!name:tools.started",
        "main_in_a_cache": "!name:tools.cached",
        "main_in_a_table": "!name:tools.TABLE",
        "main_decorated_with_wraps": f"!apply:tools.decorated [{WORDS}]",
        "main_as_static_method": f"!apply:tools.Tool.main [{WORDS}]",
        "main_through_another_module": f"!apply:tools.train.main [{WORDS}]",
        "function_that_reads_words": f"!apply:tools.run [{WORDS}]",
        "static_method_that_reads_words": f"!apply:tools.Tool.static [{WORDS}]",
        "class_method_that_reads_words": f"!apply:tools.Tool.of_class [{WORDS}]",
        "bound_method_that_reads_words": f"!apply:tools.bound [{WORDS}]",
        "method_called_with_its_object": f"!apply:tools.Tool.method [!new:tools.Tool {{}}, {WORDS}]",
        "class_whose_init_reads_words": f"!new:tools.Command [{WORDS}]",
        "class_that_inherits_such_an_init": f"!new:tools.Child [{WORDS}]",
        "name_of_a_class_whose_init_reads_words": f"!name:tools.Command [{WORDS}]",
        "parse_arguments": f"!apply:amp_recipes.parse_arguments [{WORDS}]",
        "parse_arguments_of_its_module": f"!apply:amp_recipes.config.options.arguments.parse_arguments [{WORDS}]",
        "parse_arguments_of_the_recipe": f"!apply:tools.parse_arguments [{WORDS}]",
        "parse_arguments_under_another_name": f"!apply:tools.read_words [{WORDS}]",
        "main_of_amp_recipes": f"!apply:{CLI} [[check, recipe/train.py, second.yaml, '--trust=os']]",
        "argument_parser": "!new:argparse.ArgumentParser {}",
        "argument_parser_of_the_recipe": "!new:tools.argparse.ArgumentParser {}",
        "subclass_of_the_argument_parser": "!new:tools.Parser {}",
        "bound_method_of_a_parser": "!apply:tools.read [['--out=@CANARY@']]",
        "method_of_the_recipes_parser": "!apply:tools.parser.parse_args [['--out=@CANARY@']]",
        "method_of_a_new_parser": "\np: !new:tools.Parser {}\nx: !ref <p.parse_args>",
        "prepare_main": "!apply:prepare.main [['@CANARY@']]",
        "prepare_main_that_deletes": "!apply:prepare.main [['@CANARY@', '--overwrite']]",
        "prepare_parse": "!apply:prepare.parse [['@CANARY@']]",
        "function_that_uses_argparse": "!apply:tools.shards [['--out=@CANARY@']]",
    },
    refused=True,
)

# What reaches an entry point once it runs, so that only running it may show it.
INDIRECT = values(
    {
        "wrapper": f"!apply:tools.wrapper [{WORDS}]",
        "wrapper_of_a_wrapper": f"!apply:tools.deeper [{WORDS}]",
        "lambda": f"!apply:tools.later [{WORDS}]",
        "decorated_without_wraps": f"!apply:tools.hidden [{WORDS}]",
        "decorated_where_it_is_defined": f"!apply:tools.decorated_here [{WORDS}]",
        "parse_arguments_by_alias": f"!apply:tools.run_by_alias [{WORDS}]",
        "parse_arguments_by_its_module": f"!apply:tools.run_by_module [{WORDS}]",
        "parse_arguments_by_a_name_put_together": f"!apply:tools.run_by_name [{WORDS}]",
        "main_found_by_a_name_put_together": f"!apply:tools.found [{WORDS}]",
        "main_in_a_thread": f"!apply:tools.in_thread [{WORDS}]",
        "main_in_a_thread_that_waits_for_the_end": f"!apply:tools.in_thread_later [{WORDS}]",
        "main_in_a_forked_process": f"!apply:tools.in_fork [{WORDS}]",
        "script_run_again_in_the_process": f"!apply:tools.as_script [{WORDS}]",
        "generator_that_calls_main": f"!new:list [!apply:tools.in_generator [{WORDS}]]",
        "class_whose_new_calls_main": f"!new:tools.New [{WORDS}]",
        "class_whose_metaclass_calls_main": f"!new:tools.Made [{WORDS}]",
        "function_that_returns_main": "\nf: !apply:tools.give_main\nx: !new:list [!new:torch.utils.data.DataLoader "
        f"{{dataset: [{WORDS}], batch_size: null, collate_fn: !ref <f>}}]",
        "known_words_of_a_subclassed_parser": "!apply:tools.known_shards [['--out=@CANARY@']]",
        "wrapper_of_argparse": "!apply:tools.deeper_shards [['--out=@CANARY@']]",
    }
)
INDIRECT += values({"main_in_a_spawned_process": f"!apply:tools.in_spawned [{WORDS}]"}, starts=True)
INDIRECT += values(
    {"optparse": "!apply:tools.old_shards [['--out=@CANARY@']]"},
    unsure="optparse reads a command line too, but the recipe's own code is trusted to run",
)

# An entry point that lies in something else.
CONTAINERS = values(
    {
        "in_a_list": "[1, !name:train.main]",
        "in_a_mapping": "{a: {b: !name:train.main }}",
        "in_a_tuple": "!tuple [1, !name:train.main ]",
        "in_list_of_a_list": "!new:list [[[!name:train.main]]]",
        "in_a_dict": "!new:dict {a: !name:train.main}",
        "in_an_ordered_dict": "!new:collections.OrderedDict {a: !name:train.main}",
        "in_a_deque": "!new:collections.deque [[!name:train.main]]",
        "in_a_choice": "!apply:random.choice [[!name:train.main]]",
        "in_a_partial": "!name:max {key: !name:train.main}",
        "in_a_partial_of_a_partial": f"!name:sorted {{key: !name:max {{key: !name:train.main [{WORDS}]}}}}",
        "in_a_data_set": "!new:torch.utils.data.StackDataset [[!name:train.main]]",
        "in_a_module_list": "!new:torch.nn.Sequential [!name:train.main]",
        "in_a_default": "\nloader_kwargs: {collate_fn: !name:train.main}",
        "in_a_hidden_key": f"\n__x: !apply:train.main [{WORDS}]",
        "in_the_fields_of_an_epoch_counter": "!new:amp_recipes.EpochCounter {limit: !name:train.main}",
    },
    refused=True,
)


def loader(dataset: str, more: str) -> str:
    """A value: what a DataLoader gives, which is read while the YAML is loaded."""
    return f"!new:list [!new:torch.utils.data.DataLoader {{dataset: {dataset}, {more}}}]"


def runner(when: str) -> str:
    """An object of the recipe that runs the words in the method that `when` names."""
    return f"!new:tools.Runner [{WORDS}, {when}]"


OPTIMIZER = """
model: !new:torch.nn.Linear [1, 1]
optimizer: !new:torch.optim.SGD
  params: [!ref <model.weight>]
  lr: 0.1
"""
CYCLE = "base_lr: 0.1, max_lr: 0.2, cycle_momentum: false, scale_fn: @F@ "
TRIPLET = "!apply:torch.nn.functional.triplet_margin_with_distance_loss"
ONES = "!apply:torch.ones [1, 2]"
# Whatever of the lists calls what it is given, while it is built: `@F@`, which takes whatever comes.
NOW = {
    "collate_fn": loader("[1]", "batch_size: null, collate_fn: @F@ "),
    "collate_fn_of_a_batch": loader("[1, 2]", "batch_size: 2, collate_fn: @F@ "),
    "max_key": loader("[[1, 2]]", "batch_size: null, collate_fn: !name:max {key: @F@ }"),
    "min_key": loader("[[1, 2]]", "batch_size: null, collate_fn: !name:min {key: @F@ }"),
    "sorted_key": loader("[[1, 2]]", "batch_size: null, collate_fn: !name:sorted {key: @F@ }"),
    "worker_init_fn": loader("[1]", "batch_size: null, num_workers: 1, worker_init_fn: @F@ "),
    "lr_lambda": f"{OPTIMIZER}x: !new:torch.optim.lr_scheduler.LambdaLR [!ref <optimizer>, @F@ ]",
    "scale_fn": f"{OPTIMIZER}x: !new:torch.optim.lr_scheduler.CyclicLR {{optimizer: !ref <optimizer>, {CYCLE}}}",
    "distance_function": f"{TRIPLET} {{anchor: {ONES}, positive: {ONES}, negative: {ONES}, distance_function: @F@ }}",
}


TRAINING = {
    "modules": "{model: !new:torch.nn.Linear [2, 1]}",
    "opt_class": "!name:torch.optim.SGD {lr: 0.1}",
    "epochs": "[1]",
    "samples": "!new:tools.Vectors [4]",
    "loader_kwargs": "{batch_size: 2}",
}


def training(**changes: str) -> str:
    """A YAML that trains, with other values or further keys."""
    return "".join(f"{key}: {value}\n" for key, value in {**TRAINING, **changes}.items())


# The same, called later: in training, or by what the script does with it.
SCHEDULERS = "!name:torch.optim.lr_scheduler"
DEFERRED = {
    "collate_fn": {"loader_kwargs": "{batch_size: 2, collate_fn: @F@ }"},
    "worker_init_fn": {"loader_kwargs": "{batch_size: 2, num_workers: 1, worker_init_fn: @F@ }"},
    "opt_class": {"opt_class": "@F@"},
    "lr_scheduler": {"lr_scheduler": "@F@"},
    "lr_lambda": {"lr_scheduler": f"{SCHEDULERS}.LambdaLR {{lr_lambda: @F@ }}"},
    "multiplicative_lr_lambda": {
        "lr_scheduler": f"{SCHEDULERS}.MultiplicativeLR {{lr_lambda: @F@ }}",
        "lr_scheduler_interval": "step",
    },
    "scale_fn": {"lr_scheduler": f"{SCHEDULERS}.CyclicLR {{{CYCLE}}}", "lr_scheduler_interval": "step"},
    "activation": {
        "modules": "{model: !new:torch.nn.TransformerEncoderLayer {d_model: 2, nhead: 1, dim_feedforward: 2, "
        "activation: @F@ }}"
    },
    "default_factory": {"table": "!new:collections.defaultdict [@F@ ]"},
}


def handed(kind: str, refused: bool) -> list[Attack]:
    """A function of the recipe's tools, with its words, in each place that takes something to call."""
    function = f"!name:tools.{kind} [{WORDS}]"
    now = {f"{kind}_now_as_{name}": text.replace("@F@", function) for name, text in NOW.items()}
    later = [
        Attack(
            f"{kind}_in_training_as_{name}",
            training(**{key: text.replace("@F@", function) for key, text in changes.items()}),
            refused,
        )
        for name, changes in DEFERRED.items()
    ]
    return [*later, *values(now, refused)]


HANDED = handed("wrapper", False) + handed("run", True)

# Objects of the recipe whose methods others call.
METHODS = values(
    {
        "call_as_collate_fn": loader("[1]", f"batch_size: null, collate_fn: {runner('call')}"),
        "iter_in_a_list": f"!new:list [{runner('iter')}]",
        "iter_as_sampler": loader("[1, 2]", f"sampler: {runner('iter')}"),
        "iter_as_batch_sampler": loader("[1, 2]", f"batch_sampler: {runner('iter')}"),
        "len_of_a_data_set": f"!new:torch.utils.data.ConcatDataset [[{runner('len')}]]",
        "getitem_of_a_data_set": loader(runner("getitem"), "batch_size: null"),
        "forward_in_a_sequence": loader(
            "[1]", f"batch_size: null, collate_fn: !new:torch.nn.Sequential [!new:tools.Model [{WORDS}, forward]]"
        ),
        "str_of_an_object": f"!new:str [{runner('str')}]",
        "float_of_an_object": f"!new:float [{runner('float')}]",
        "index_of_an_object": f"!apply:math.gcd [{runner('index')}, 1]",
        "range_of_an_object": f"!new:range [{runner('index')}]",
        "fspath_of_an_object": f"!new:pathlib.Path [{runner('fspath')}]",
        "bool_of_an_object": f"!new:bool [{runner('bool')}]",
        "order_of_two_objects": f"!apply:sorted [[{runner('lt')}, {runner('lt')}]]",
        "sum_of_objects": f"!apply:sum [[{runner('add')}], {runner('add')}]",
        "hash_of_an_object": f"!new:set [[{runner('hash')}]]",
        "equality_of_objects": f"!apply:operator.eq [{runner('eq')}, {runner('eq')}]",
        "end_of_an_object": runner("del"),
        "function_of_torch_on_an_object": f"!apply:torch.abs [{runner('none')}]",
        "copy_of_an_object": f"\na: {runner('deepcopy')}\nb: !copy <a>",
        "property_of_an_object": "\na: !new:tools.Tool {}\nx: !ref <a.read>",
        "cached_property_of_an_object": "\na: !new:tools.Tool {}\nx: !ref <a.kept>",
        "attribute_made_when_it_is_asked_for": "\na: !new:tools.Tool {}\nx: !ref <a.anything>",
    }
)
METHODS += [
    Attack(f"{name}_in_training", training(**changes))
    for name, changes in {
        "call_as_collate_fn": {"loader_kwargs": f"{{batch_size: 2, collate_fn: {runner('call')}}}"},
        "iter_as_sampler": {"loader_kwargs": f"{{batch_size: 2, sampler: {runner('iter')}}}"},
        "iter_as_epochs": {"epochs": runner("iter")},
        "getitem_of_the_data_set": {"samples": f"!new:tools.Reading [{WORDS}]"},
        "forward_of_the_model": {"modules": f"{{model: !new:tools.Model [{WORDS}, forward]}}"},
        "state_of_the_model": {
            "modules": f"{{model: !new:tools.Model [{WORDS}, state]}}",
            "output_folder": "@HERE@/run",
        },
        "call_as_opt_class": {"opt_class": runner("call")},
        "words_as_samples": {
            "samples": f"!new:tools.Words [{WORDS}]",
            "loader_kwargs": "{batch_size: 2, collate_fn: !name:tools.wrapper }",
        },
    }.items()
]

OF_A_REFERENCE = loader(f"[{WORDS}]", "batch_size: null, collate_fn: !ref <f>")
# How an entry point, or the words, get where they are used.
TRAVELS = [
    *values(
        {
            "by_reference": f"\nf: !name:train.main\nx: {OF_A_REFERENCE}",
            "by_reference_of_a_reference": f"\nf: !name:train.main\ng: !ref <f>\nx: !new:list [[!ref <g>, {WORDS}]]",
            "by_reference_into_a_mapping": '\nf: {g: {h: !name:train.main }}\nx: [!ref "<f[g][h]>"]',
            "by_attribute_of_a_class": "\nf: !name:tools.Tool\nx: !ref <f.main>",
            "by_attribute_of_a_module": "\nf: !module:train\nx: !ref <f.main>",
            "by_attribute_of_a_partial": f"\nf: !name:tools.wrapper [{WORDS}]\nx: !ref <f.func.__globals__>",
            "by_a_wrapper_of_amp_recipes": f"\nf: !apply:amp_recipes.fwd_default_precision [!name:train.main ]\n"
            f"x: {OF_A_REFERENCE}",
            "by_custom_fwd": f"\nf: !apply:amp_recipes.custom_fwd [!name:train.main ]\nx: {OF_A_REFERENCE}",
            "by_copy": "\nf: !name:train.main\nx: !copy <f>",
            "by_alias_of_yaml": "\nf: &f !name:train.main\nx: [*f]",
            "by_merge_key": f"\nf: &f {{collate_fn: !name:train.main [{WORDS}]}}\nx: {{<<: *f}}",
            "words_by_reference": f"\nw: {WORDS}\nx: !apply:train.main [!ref <w>]",
        },
        refused=True,
    ),
    Attack("by_attribute_of_an_object", f"f: !new:tools.Tool {{}}\nx: {OF_A_REFERENCE.replace('<f>', '<f.go>')}\n"),
    Attack("by_include", "a: !include:b.yaml\n", True, {"b.yaml": f"x: !apply:train.main [{WORDS}]\n"}),
    Attack(
        "by_include_of_an_include",
        "a: !include:b.yaml\n",
        True,
        {"b.yaml": "c: !include:c.yaml\n", "c.yaml": f"x: !apply:train.main [{WORDS}]\n"},
    ),
    Attack(
        "by_values_below_an_include",
        f"a: !include:b.yaml\n  f: !apply:train.main [{WORDS}]\n",
        True,
        {"b.yaml": "f: 1\n"},
    ),
    Attack("by_value_of_the_command_line", "x: 1\n", further=(f"--x=!apply:train.main [{WORDS}]",)),
    Attack("by_two_lines_of_the_command_line", "x: 1\n", further=(f"--x=1\ny: !apply:train.main [{WORDS}]",)),
    Attack(
        "by_words_of_the_command_line",
        "w: []\nx: !apply:train.main [!ref <w>]\n",
        True,
        further=("--w=[second.yaml, --trust=os]",),
    ),
    Attack(
        "by_resolved_settings_that_were_edited",
        f"# Resolved settings of a run: each reference is replaced by its value\nx: !apply:train.main [{WORDS}]\n",
        True,
    ),
]

# Where else the words might come from, or the trust.
NESTED = "x: !apply:tools.nested [third.yaml]\n"
OTHER_SOURCES = [
    Attack(
        "words_of_the_process_set_by_a_function",
        f"a: !apply:tools.set_words [{WORDS}]\nx: !apply:tools.without_words\n",
    ),
    Attack(
        "words_of_the_process_set_and_read_in_training",
        f"a: !apply:tools.set_words [{WORDS}]\n"
        + training(loader_kwargs="{batch_size: 2, collate_fn: !name:tools.without_words }"),
    ),
    Attack(
        "words_of_the_process_set_for_a_second_load",
        f"a: !apply:tools.set_words [{WORDS}]\n",
        words=("@HERE@/recipe/twice.py", "main.yaml"),
    ),
    Attack(
        "trust_in_the_environment",
        SECOND,
        True,
        env={"TRUST": "os", "AMP_RECIPES_TRUST": "os", "AMP_RECIPES_ARGS": "--trust=os", "ARGV": "--trust=os"},
    ),
    Attack("trust_key_in_a_nested_yaml", NESTED, files={"third.yaml": f"trust: [os]\n{SECOND}"}),
    Attack("nested_load", "x: !apply:tools.nested [second.yaml]\n"),
    Attack("nested_load_of_a_nested_load", NESTED, files={"third.yaml": "x: !apply:tools.nested [second.yaml]\n"}),
    Attack(
        "nested_load_in_training",
        training(loader_kwargs="{batch_size: 2, collate_fn: !name:tools.nested [second.yaml]}"),
    ),
    Attack(
        "nested_load_that_gives_trust",
        "x: !apply:tools.nested_with_trust [second.yaml, [os]]\n",
        unsure="a function of the recipe passes trust on: it is the script's code, but the YAML's words",
    ),
    Attack(
        "nested_load_that_makes_a_request",
        "x: !apply:tools.nested_with_overrides [second.yaml, [os]]\n",
        unsure="as nested_load_that_gives_trust",
    ),
    Attack("run_options_that_look_like_trust", f"run_opts: {{trust: os}}\noverrides: {{trust: [os]}}\n{SECOND}", True),
    Attack("trust_among_the_values_of_a_key", f"trust: x\n{SECOND}", True, further=("--trust.x=os",)),
    Attack("trust_as_value_of_an_option", SECOND, True, further=("--output_folder=--trust=os",)),
    Attack(
        "trust_of_another_name_in_a_nested_load",
        "x: !apply:tools.wrapper [[second.yaml, '--trust=os']]\n",
        further=("--trust=json",),
    ),
    Attack("trust_in_a_file_of_words", SECOND, False, {"words.txt": "--trust=os\n"}, further=("@words.txt",)),
    Attack("yaml_named_like_an_option", "x: !apply:train.main [['--trust=os', second.yaml]]\n", True),
]


def worker(when: str, context: str, target: str, refused: bool) -> Attack:
    """A loader's worker, started by `context`, that is given an entry point; `when`: now, or in training."""
    function = f"!name:tools.{target} [{WORDS}]"
    more = f"num_workers: 1, multiprocessing_context: {context}, collate_fn: {function}"
    if when == "now":
        text = f"x: {loader('[1]', f'batch_size: null, {more}')}\n"
    else:
        text = training(loader_kwargs=f"{{batch_size: 2, {more}}}")
    return Attack(f"{target}_in_a_worker_by_{context}_{when}", text, refused, starts=context != "fork" and not refused)


CONTEXTS = ("fork", "spawn", "forkserver")
WORKERS = [
    worker(when, context, target, refused)
    for context in CONTEXTS
    for target, refused in (("wrapper", False), ("run", True))
    for when in ("in_training", "now")
]
SAMPLES = f"!new:torch.utils.data.DataLoader {{{{dataset: [{WORDS}], batch_size: null, num_workers: 1, " + (
    "multiprocessing_context: {0}, collate_fn: !name:train.main }}"
)
WORKERS += [
    *[
        Attack(f"main_over_words_in_a_worker_by_{it}", f"x: !new:list [{SAMPLES.format(it)}]\n", True)
        for it in CONTEXTS
    ],
    *[
        Attack(
            f"main_over_words_in_a_worker_by_{context}_in_training",
            training(
                samples=f"!new:tools.Words [{WORDS}]",
                loader_kwargs=f"{{batch_size: 2, num_workers: 1, multiprocessing_context: {context}, "
                "collate_fn: !name:train.main }",
            ),
            True,
        )
        for context in CONTEXTS
    ],
    *[
        Attack(
            f"unpickled_in_a_worker_by_{context}",
            training(
                loader_kwargs=f"{{batch_size: 2, num_workers: 1, multiprocessing_context: {context}, "
                f"collate_fn: !new:tools.Unpickled [{WORDS}]}}"
            ),
            starts=True,
        )
        for context in CONTEXTS[1:]
    ],
    Attack(
        "worker_init_fn_by_spawn_in_training",
        training(
            loader_kwargs="{batch_size: 2, num_workers: 1, multiprocessing_context: spawn, "
            f"worker_init_fn: !name:tools.wrapper [{WORDS}]}}"
        ),
        starts=True,
    ),
    Attack(
        "data_set_by_spawn_in_training",
        training(
            samples=f"!new:tools.Reading [{WORDS}]",
            loader_kwargs="{batch_size: 2, num_workers: 1, multiprocessing_context: spawn}",
        ),
        starts=True,
    ),
]

# What is asked for in place of a run.
MAIN_NOW = f"x: !apply:train.main [{WORDS}]\nlr: 0.1\n"
WRAPPED_NOW = f"x: !apply:tools.wrapper [{WORDS}]\nlr: 0.1\n"
ACTIONS = [
    Attack("check", MAIN_NOW, True, further=("--check",)),
    Attack("check_of_a_wrapper", WRAPPED_NOW, further=("--check",)),
    Attack("check_of_a_function_for_values", f"x: !applyref:train.main [{WORDS}]\n", True, further=("--check",)),
    Attack("show_config", MAIN_NOW, True, further=("--show-config",)),
    Attack("show_config_of_a_wrapper", f"x: !applyref:tools.wrapper [{WORDS}]\n", further=("--show-config",)),
    Attack("help", MAIN_NOW, further=("--help",)),
    Attack("diagnose", MAIN_NOW, True, further=("--diagnose",)),
    Attack("sweep", MAIN_NOW, further=("--sweep", "lr=0.1,0.2", "--output_folder=swept"), refused=True),
    Attack("sweep_of_a_wrapper", WRAPPED_NOW, further=("--sweep", "lr=0.1", "--output_folder=swept"), starts=True),
    Attack(
        "sweep_over_calls", "x: 1\n", further=("--sweep", f"x=!apply:train.main [{WORDS}],2", "--output_folder=swept")
    ),
    Attack(
        "sweep_over_words",
        "w: []\nx: !apply:train.main [!ref <w>]\n",
        True,
        further=("--sweep", "w=[second.yaml, --trust=os]", "--output_folder=swept"),
    ),
    Attack("command_check", MAIN_NOW, True, words=(*COMMAND, "check", "recipe/train.py", "main.yaml")),
    Attack("command_check_of_a_wrapper", WRAPPED_NOW, words=(*COMMAND, "check", "recipe/train.py", "main.yaml")),
    Attack(
        "command_check_of_a_linked_script",
        MAIN_NOW,
        True,
        links={"link.py": "recipe/train.py"},
        words=(*COMMAND, "check", "link.py", "main.yaml"),
    ),
    Attack(
        "command_show_config",
        MAIN_NOW,
        True,
        words=(*COMMAND, "check", "recipe/train.py", "main.yaml", "--show-config"),
    ),
]

CORPUS = {
    "direct": DIRECT,
    "indirect": INDIRECT,
    "container": CONTAINERS,
    "handed over": HANDED,
    "method": METHODS,
    "travel": TRAVELS,
    "other source": OTHER_SOURCES,
    "worker": WORKERS,
    "action": ACTIONS,
}
ATTACKS = list(itertools.chain(*CORPUS.values()))


@dataclass
class Job:
    """An attack on the disk: its working folder, and two beside it."""

    attack: Attack
    here: Path
    outside: Path
    canary: Path

    @property
    def words(self) -> list[str]:
        """Of the program, which is started in the working folder."""
        return [self.fill(word) for word in (*self.attack.words, *self.attack.further)]

    def fill(self, value: Any) -> Any:
        """`value` with the paths of this job, and the sums of files that are written already."""
        if isinstance(value, str):
            for word, path in (("@CANARY@", self.canary), ("@HERE@", self.here), ("@OUTSIDE@", self.outside)):
                value = value.replace(word, str(path))
            return re.sub("@SHA256:(.*?)@", lambda found: _sum(self.here / found[1]), value)
        if isinstance(value, dict):
            return {self.fill(key): self.fill(item) for key, item in value.items()}
        return [self.fill(item) for item in value] if isinstance(value, list | tuple) else value


def lay_out(attack: Attack, root: Path, finished_run: Path | None = None) -> Job:
    """Write an attack's files below `root`. finished_run: what is copied where the attack has a run."""
    folder = root / attack.name
    job = Job(attack, folder / "here", folder / "outside", folder / "canary")
    files = {
        "recipe/train.py": TRAIN,
        "recipe/twice.py": TWICE,
        "recipe/prepare.py": PREPARE,
        "recipe/tools.py": TOOLS,
        "second.yaml": SECOND,
        "main.yaml": attack.text,
        "@OUTSIDE@/evil.py": "open('@CANARY@', 'w').close()\n",
        "@OUTSIDE@/evil.yaml": SECOND,
        "@OUTSIDE@/secret.yaml": "password: 1234\n",
    }
    if attack.run:
        shutil.copytree(finished_run, job.here / attack.run)
    for name, text in {**files, **attack.files}.items():
        path = job.here / job.fill(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(job.fill(text))
    for name, target in attack.links.items():
        path = job.here / job.fill(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(job.fill(target))
    if attack.command is not NOTHING:
        states = ["window", "random", "parameters", "buffers"]
        meta = {"format_version": 1, "recoverables": states, "meta": {"command": job.fill(attack.command)}}
        _write_meta(job.here / "nonfinite-3", meta)
    if attack.meta or attack.contents:
        for checkpoint in (job.here / attack.run / "save").iterdir():
            found = json.loads((checkpoint / "meta.json").read_text())
            _write_meta(checkpoint, {**found, "meta": {**found["meta"], **attack.meta}, **attack.contents})
    return job


def _write_meta(folder: Path, contents: Any) -> None:
    """`meta.json`, and its line of the manifest, beside the lines that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(contents))
    manifest = folder / "MANIFEST.sha256"
    lines = manifest.read_text().splitlines() if manifest.exists() else []
    kept = [line for line in lines if not line.endswith("  meta.json")]
    manifest.write_text("".join(f"{line}\n" for line in [*kept, f"{_sum(folder / 'meta.json')}  meta.json"]))


def _sum(file: Path) -> str:
    """Of a file that is there; a sum of no file holds for none."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "0" * 64
