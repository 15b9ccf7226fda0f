"""A typo in the recipe's YAML or on its command line is found before anything is built, with what was meant.

The mutants are made, not chosen: each word loses, doubles, swaps or changes a letter in turn, at a place that its
number decides.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from repository import REPOSITORY

from amp_recipes.config import check, parse_arguments
from amp_recipes.errors import ConfigError

pytest.importorskip("sklearn")  # the recipe's data module needs it

RECIPE = REPOSITORY / "recipes" / "image_classification"
YAML = REPOSITORY / "configs" / "image_classification.yaml"
TEXT = YAML.read_text(encoding="utf-8")

TOP_KEYS = re.findall(r"^(\w+):", TEXT, re.MULTILINE)
NESTED_KEYS = [line for line in re.findall(r"^  \w+:.*", TEXT, re.MULTILINE)]
# Each with the text around it that tells which one of the file is meant.
TAGS = [
    ("ref", "output_folder: !{} "),
    ("apply", "images: !{}:"),
    ("new", "augment: !{}:"),
    ("new", "model: !{}:"),
    ("name", "opt_class: !{}:"),
    ("name", "lr_scheduler: !{}:"),
]
TARGETS = [
    ("load_images", "!apply:data.{}"),
    ("RandomAffine", "!new:data.{}"),
    ("SmallResNet", "!new:model.{}"),
    ("EpochCounter", "!new:amp_recipes.{}"),
    ("AdamW", "!name:torch.optim.{}"),
    ("CosineAnnealingLR", "!name:torch.optim.lr_scheduler.{}"),
    ("data", "!new:{}.RandomAffine"),
    ("model", "!new:{}.SmallResNet"),
    ("amp_recipes", "!new:{}.EpochCounter"),
    ("torch", "!name:{}.optim.AdamW"),
    ("optim", "!name:torch.{}.AdamW"),
    ("lr_scheduler", "!name:torch.optim.{}.Cosine"),
]
REFERENCES = [
    ("precision", "results/image_classification/<{}>"),
    ("seed", "seed_<{}>"),
    ("data_folder", "!ref <{}>"),
    ("split_ratios", "!ref <{}>"),
    ("num_classes", "!ref <images.{}>"),
    ("images", "!ref <{}.channels>"),
    ("number_of_epochs", "limit: !ref <{}>"),
    ("weight_decay", "weight_decay: !ref <{}>"),
    ("model", "model: !ref <{}>"),
]
VALUES = [("fp32", "precision: {} "), ("max", "early_stop_mode: {} "), ("epoch", "lr_scheduler_interval: {} ")]
OPTION_NAMES = [
    *("precision", "eval_precision", "max_grad_norm", "seed", "debug_batches", "output_folder", "device"),
    *("grad_accumulation_factor", "nonfinite_patience", "ckpt_interval_minutes", "early_stop_patience", "resume"),
]
OPTION_VALUES = [
    ("precision", "bf16"),
    ("eval_precision", "fp16"),
    ("resume", "never"),
    ("early_stop_mode", "min"),
    ("lr_scheduler_interval", "step"),
    ("float32_precision", "tf32"),
]
OVERRIDES = [
    *("number_of_epochs", "data_seed", "weight_decay", "label_smoothing", "model.dropout", "model.widths"),
    *("images.image_size", "augment.max_shift", "loader_kwargs.batch_size", "opt_class.fused", "lr_scheduler.T_max"),
    *("epoch_counter.limit", "image_size", "split_ratios"),
]


def mutant_of(word: str, number: int) -> str:
    """`word` with one letter lost, doubled, swapped with the next, or changed: which, and where, `number` says."""
    places = [place for place in range(len(word)) if word[place].isalnum()]
    for shift in range(4 * len(word)):
        at = places[(5 * number + shift) % len(places)]
        letter = word[at]
        changed = [
            word[:at] + word[at + 1 :],
            word[:at] + letter + word[at:],
            word[:at] + word[at + 1 : at + 2] + letter + word[at + 2 :],
            word[:at] + ("x" if letter != "x" else "y") + word[at + 1 :],
        ][number % 4]
        if changed not in ("", word):
            return changed
    raise AssertionError(word)


@dataclass(frozen=True)
class Mutant:
    """A YAML and a command line with one typo. meant: the word as it was; typed: as it is."""

    kind: str
    meant: str
    typed: str
    text: str = TEXT
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}-{self.meant}-{self.typed}"


def in_text(kind: str, word: str, around: str, number: int) -> Mutant:
    typed = mutant_of(word, number)
    assert around.format(word) in TEXT
    return Mutant(kind, word, typed, TEXT.replace(around.format(word), around.format(typed), 1))


def mutants(turn: int = 0) -> list[Mutant]:
    """One mutant of each word; `turn` decides which of its letters and what happens to it."""
    found = []
    for number, key in enumerate(TOP_KEYS, turn):
        found.append(in_text("key", key, "\n{}:", number))
    for number, line in enumerate(NESTED_KEYS, turn):
        key = line.split(":")[0].strip()
        typed = mutant_of(key, number)
        found.append(Mutant("nested", key, typed, TEXT.replace(line, line.replace(key, typed, 1), 1)))
    for kind, words in (("tag", TAGS), ("target", TARGETS), ("reference", REFERENCES), ("value", VALUES)):
        found += [in_text(kind, word, around, number) for number, (word, around) in enumerate(words, turn)]
    for number, name in enumerate(OPTION_NAMES, turn):
        typed = mutant_of(name, number)
        found.append(Mutant("option", name, typed, arguments=(f"--{typed}", "1")))
    for number, (name, value) in enumerate(OPTION_VALUES, turn):
        typed = mutant_of(value, number)
        found.append(Mutant("option value", value, typed, arguments=(f"--{name}={typed}",)))
    for number, name in enumerate(OVERRIDES, turn):
        *above, last = name.split(".")
        typed = mutant_of(last, number)
        found.append(Mutant("override", last, typed, arguments=(f"--{'.'.join([*above, typed])}=1",)))
    for number, name in enumerate(("PLACEHOLDER", "copy", "tuple", "include:x.yaml", "applyref:data.f"), turn):
        word = name.partition(":")[0]
        typed = mutant_of(word, number)
        text = TEXT.replace("data_folder: null", f"data_folder: !{name.replace(word, typed)} ", 1)
        found.append(Mutant("tag", word, typed, text))
    return found


@pytest.fixture
def in_recipe(monkeypatch):
    """The recipe's folder is where Python looks for modules, as in its own process; nothing of torch is built."""
    monkeypatch.syspath_prepend(RECIPE)
    monkeypatch.chdir(REPOSITORY)
    for name in ("data", "model", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    built = []
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_, **__: built.append("a module"))
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", lambda *_, **__: built.append("an optimizer"))
    yield
    for name in ("data", "model", "train"):
        sys.modules.pop(name, None)
    assert not built


def checked(mutant: Mutant, tmp_path: Path) -> str:
    """What the check says of a mutant; empty if it finds nothing."""
    file = tmp_path / YAML.name
    file.write_text(mutant.text, encoding="utf-8")
    try:
        overrides = parse_arguments([str(file), *mutant.arguments])[2]
        check(str(file), overrides, recipe_folder=RECIPE)
    except ConfigError as error:
        return str(error)
    return ""


def suggests(message: str, mutant: Mutant) -> bool:
    """Whether an error names what was meant; or, where others refer to a key that has the typo, the key as it is."""
    names = re.findall(r"[Dd]id you mean ([^?]+)\?", message)
    words = {word for name in names for word in re.findall(r"\w+", name)}
    return mutant.meant in words or (mutant.kind == "key" and mutant.typed in words)


def test_without_a_typo_there_is_nothing_to_report(in_recipe, tmp_path):
    for arguments in ((), ("--precision=bf16", "--number_of_epochs=3", "--model.dropout=0.1")):
        assert checked(Mutant("none", "", "", TEXT, arguments), tmp_path) == ""
    assert len(mutants()) >= 50


NIGHTLY = [pytest.mark.extended, pytest.mark.nightly]
KINDS = [["key"], ["nested"], ["tag", "target"], ["reference", "value"], ["option", "option value", "override"]]


@pytest.mark.parametrize(
    ("turn", "kinds"),
    [
        *((0, kinds) for kinds in KINDS),
        *(pytest.param(turn, list(chain(*KINDS)), marks=NIGHTLY) for turn in range(1, 20)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_every_typo_is_reported_and_nine_of_ten_with_the_right_name(turn, kinds, in_recipe, tmp_path, subtests):
    every = [mutant for mutant in mutants(turn) if mutant.kind in kinds]
    without = []
    for mutant in every:
        with subtests.test(str(mutant)):
            message = checked(mutant, tmp_path)
            assert message, f"{mutant.typed!r} for {mutant.meant!r} was not found"
            assert re.search(rf"{re.escape(YAML.name)}:\d+|command line|--", message), message
            if not suggests(message, mutant):
                without.append(str(mutant))
    assert len(without) <= len(every) // 10, without


SLIPS_ON_THE_COMMAND_LINE = [
    (["--batch_siz=8"], "loader_kwargs.batch_size"),  # the right name at another depth
    (["--dropout=0.5"], "model.dropout"),
    (["--model.drpout=0.5"], "model.dropout"),
    (["--optim.lr=1"], "opt_class.lr"),
    (["--debug=ture"], "true"),
    (["--max_grad_norm=5.O"], "a number"),
    (["--seed=12e"], "a whole number"),
    (["--number-of-epochs=3"], "number_of_epochs"),
    (["-lr=1"], "two dashes"),
    (["lr=1"], "starts with --"),
    (["--lr"], "--lr="),
]


def test_other_slips_on_the_command_line(in_recipe, tmp_path, subtests):
    for arguments, meant in SLIPS_ON_THE_COMMAND_LINE:
        with subtests.test(arguments[0]):
            assert meant in checked(Mutant("slip", "", "", TEXT, tuple(arguments)), tmp_path)


def test_a_typo_in_the_name_of_the_file(in_recipe):
    with pytest.raises(ConfigError, match=r"Did you mean .*image_classification\.yaml\?"):
        check("configs/image_clasification.yaml", recipe_folder=RECIPE)


SLIPS_IN_THE_FILE = [
    ("  fused: True", "  fused: Treu", "fused"),
    ("  max_degrees: 12.0", "   max_degrees: 12.0", "indent"),
    ("weight_decay: 0.05", "weight_decay:0.05", ":"),
    ("lr: 0.003", "lr: 0.003\nlr: 0.004", "lr"),
    ("widths: [24, 48, 96]", "widths: [24, 48, 96", "bracket"),
    ("precision: fp32", "precision: 'fp32", "'"),
    ("  max_zoom: 0.1", "\tmax_zoom: 0.1", "tab"),
    ("seed: 1234", "seed: 12e4x", "whole number"),
    ("blocks_per_stage: 1 ", "blocks_per_stage: one ", "blocks_per_stage"),
    ("dropout: 0.0 ", "dropout: [0.0] ", "dropout"),
    ("  in_channels: !ref <images.channels>  # as the images are\n", "", "in_channels"),
    ("!ref <lr>", "!ref <lr", "<lr"),
    ("data_folder: null", "data_folder: !PLACEHOLDER", "--data_folder"),
]


def test_other_slips_in_the_file(in_recipe, tmp_path, subtests):
    for old, new, meant in SLIPS_IN_THE_FILE:
        with subtests.test(new):
            assert old in TEXT
            message = checked(Mutant("slip", "", "", TEXT.replace(old, new, 1)), tmp_path)
            assert message and meant in message
            assert re.search(rf"{re.escape(YAML.name)}:\d+", message), message
