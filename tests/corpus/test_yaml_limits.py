"""Small files that would fill a machine: each ends in an error or a small tree, with little work and little memory.

A program forks for each case, so that the peak of memory is that of the case alone.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from work import at_most

from amp_recipes.config import check, parse_arguments
from amp_recipes.errors import ConfigError

# For a check or a load. The most that a case makes is 16 million.
CALLS = 60_000_000
# Ends what hangs inside one call, such as a power of great numbers: no case takes a tenth of it.
PROCESSOR_SECONDS = 60
MEGABYTES = 200
MIB = 1 << 20


def chain(levels: int, first: str, following: str) -> str:
    """Keys a0, a1, ..., where the text of each names the one before it as {0}."""
    lines = [f"a0: {first}", *(f"a{n}: {following.format(f'a{n - 1}', f'a{n}')}" for n in range(1, levels))]
    return "\n".join(lines) + "\n"


def filled(unit: str, size: int = MIB - 100, before: str = "", after: str = "\n") -> str:
    """A text of almost the greatest size that a file may have, made of one unit."""
    return before + unit * (size // len(unit.encode())) + after


def numbered(line: str, count: int) -> str:
    return "".join(f"{line.format(n)}\n" for n in range(count))


def merges(levels: int, twice: bool = False) -> str:
    lines = ["m0: &m0 {k0: 1}"]
    for n in range(1, levels):
        merged = f"[*m{n - 1}, *m{n - 1}]" if twice else f"*m{n - 1}"
        lines.append(f"m{n}: &m{n} {{<<: {merged}, k{n}: 1}}")
    return "\n".join(lines) + "\n"


def doubled(levels: int) -> list[Any]:
    """A list of lists that has few objects, but 2**levels leaves."""
    values: list[Any] = [1]
    for _ in range(levels):
        values = [values, values]
    return values


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = wrap(value)
    return value


def circular_list() -> list[Any]:
    values: list[Any] = [1]
    values.append(values)
    return values


def circular_dict() -> dict[str, Any]:
    values: dict[str, Any] = {"b": 1}
    values["a"] = values
    return values


# Must be refused: what they say is larger than any limit.
BOMBS = {
    "references": chain(60, "[x]", "[!ref <{0}>, !ref <{0}>]"),
    "references_in_mappings": chain(60, "{x: 1}", "{{l: !ref <{0}>, r: !ref <{0}>}}"),
    "references_in_calls": chain(60, "[x]", "!new:torch.nn.Sequential [!ref <{0}>, !ref <{0}>]"),
    "anchors": chain(60, "&a0 [x]", "&{1} [*{0}, *{0}]"),
    "anchors_by_ten": chain(12, "&a0 [x]", "&{1} [" + ", ".join(["*{0}"] * 10) + "]"),
    "anchors_in_mappings": chain(60, "&a0 {x: 1}", "&{1} {{l: *{0}, r: *{0}}}"),
    "copies": chain(60, "[x]", "[!copy <{0}>, !copy <{0}>]"),
    "copies_of_a_call": chain(60, "[x]", "!new:list [!copy <{0}>, !copy <{0}>]"),
    "copies_of_anchors": chain(14, "&a0 [x]", "&{1} [*{0}, *{0}]") + numbered("c{}: !copy <a13>", 2000),
    "text": chain(60, "xxxxxxxxxx", "!ref <{0}><{0}>"),
    "text_by_ten": chain(12, "xxxxxxxxxx", "!ref " + "<{0}>" * 10),
    "text_of_many": f"x: {'y' * 90_000}\n" + numbered("a{}: !ref <x><x><x><x><x><x><x><x><x><x>", 1000),
    "squares": chain(60, "123456789", "!ref <{0}> * <{0}>"),
    "powers_of_powers": chain(60, "99", "!ref <{0}> ** <{0}>"),
    "power": "one: 1\na: !ref <one> * 9**9**9\n",
    "power_by_reference": "n: 9\na: !ref <n>**<n>**<n>\n",
    "power_of_power": "n: 1000000\na: !ref ((<n>**<n>)**<n>)**<n>\n",
    "power_negative": "n: 1000000000\na: !ref 7 ** <n> ** <n>\n",
    "power_of_power_modulo": "one: 1\na: !ref <one> * 9**9**9 % 7\n",
    "product_of_powers": "one: 1\na: !ref <one> * " + "*".join(["9**300"] * 3000) + "\n",
    "negative_power_of_zero": "one: 1\na: !ref <one> * 0 ** -1\n",
    "division_by_zero": "one: 1\na: !ref <one> * 1 / 0\n",
    "modulo_by_zero": "one: 1\na: !ref <one> * 1 % 0\n",
    "float_overflow": "one: 1\na: !ref <one> * 1e308 ** 2\n",
    "whole_number_too_large_for_a_float": f"n: {'9' * 310}\na: !ref <n> / 3\n",
    "merges_in_merges": merges(700),
    "merges_of_many": "b: &b {"
    + ", ".join(f"k{n}: {n}" for n in range(1000))
    + "}\n"
    + numbered("a{}: {{<<: *b}}", 1000),
    "deep_flow_list": "a: " + "[" * 10_000 + "]" * 10_000 + "\n",
    "deep_flow_mapping": "a: " + "{a: " * 10_000 + "1" + "}" * 10_000 + "\n",
    "deep_block": "".join(" " * n + "a:\n" for n in range(1_000)) + " " * 1_000 + "b\n",
    "deep_compact_list": "a:\n  " + "- " * 10_000 + "x\n",
    "deep_keys": "? " * 10_000 + "x\n",
    "deep_references": chain(3_000, "[x]", "[!ref <{0}>]"),
    "deep_references_in_files_order": "".join(f"a{n}: [!ref <a{n + 1}>]\n" for n in range(3_000)) + "a3000: 1\n",
    "deep_calls": chain(3_000, "[x]", "!new:list [!ref <{0}>]"),
    "deep_copies": chain(3_000, "[x]", "[!copy <{0}>]"),
    "deep_anchors": chain(3_000, "&a0 [x]", "&{1} [*{0}]"),
    "deep_tuple": "a: " + "(" * 20_000 + "1" + ")" * 20_000 + "\n",
    "deep_list_in_a_tuple": "a: (" + "[" * 20_000 + "]" * 20_000 + ")\n",
    "tuple_of_many": "a: (" + "1," * 45_000 + "1)\n",
    "tuples_of_many": "a: &a (" + "1," * 4_000 + "1)\n" + numbered("b{}: (" + "1," * 900 + "1)", 100),
    "circle": "a: !ref <b>\nb: !ref <a>\n",
    "circle_in_containers": "a: {b: {c: !ref <a>}}\n",
    "circle_in_text": "a: !ref x<b>\nb: !ref <a>y\n",
    "circle_of_anchors": "a: &a [*a]\n",
    "circle_of_copies": "a: [!copy <b>]\nb: [!copy <a>]\n",
    "circle_of_thousands": chain(3_000, "!ref <a2999>", "!ref <{0}>"),
    "circle_in_sub_keys": "a: {b: !ref <a[b]>}\n",
    "attributes_of_attributes": "a: 1\nb: !ref <a" + ".x" * 30_000 + ">\n",
    "long_key_path": "a: 1\nb: !ref <a" + "[x]" * 30_000 + ">\n",
    "five_megabytes": filled("a: b # a comment\n", 5 * MIB),
    "five_megabytes_of_nothing": filled(" ", 5 * MIB, "a: 1\n"),
    "sixty_four_megabytes": filled("#" * 1023 + "\n", 64 * MIB),
    "brackets": filled("["),
    "closed_brackets": filled("]", before="a: "),
    "braces": filled("{"),
    "mixed_brackets": filled("[{"),
    "pairs_of_brackets": filled("[],", before="a: [", after="]\n"),
    "one_plain_text": filled("x", before="a: "),
    "one_quoted_text": filled("x", before="a: '", after="'\n"),
    "one_block_text": filled("x", before="a: |\n  "),
    "one_folded_text": filled("  x\n", before="a: >\n"),
    "lines_of_one_plain_text": filled("\n x", before="a: x"),
    "escapes": filled("\\x41", before='a: "', after='"\n'),
    "quotes": filled("'", before="a: "),
    "unclosed_quotes": filled("x\n\n", before='a: "'),
    "key_and_value_lines": numbered("key{}: b", 60_000),
    "lines_with_the_same_key": filled("a: b\n"),
    "list_items": filled("- a\n", before="a:\n"),
    "empty_list_items": filled("-\n", before="a:\n"),
    "flow_items": filled("a,", before="a: [", after="]\n"),
    "explicit_keys": filled("? "),
    "explicit_key_lines": filled("? a\n"),
    "colons": filled(": "),
    "colon_signs": filled(":", before="a: {", after="}\n"),
    "anchors_of_nothing": "".join(f"- &a{n}\n" for n in range(60_000)),
    "anchors_in_a_row": filled("&a "),
    "aliases_in_a_row": filled("*a, ", before="x: &a 1\nb: [", after="]\n"),
    "undefined_aliases": filled("*a, ", before="b: [", after="]\n"),
    "tags_in_a_row": filled("!x "),
    "unknown_tags": numbered("k{}: !unknwon x", 15_000),
    "long_key": filled("k", before="", after=": 1\n"),
    "long_tag": filled("t", before="a: !new:", after=" {}\n"),
    "long_dotted_target": filled("t.", before="a: !new:", after="t {}\n"),
    "long_anchor": filled("t", before="a: &", after=" 1\n"),
    "long_include": filled("t", before="a: !include:", after="\n"),
    "documents": filled("---\n"),
    "directives": filled("%A b\n"),
    "tag_directives": "".join(f"%TAG !e{n}! !new:\n" for n in range(50_000)) + "---\na: 1\n",
    "tabs": filled("\t", before="a:\n"),
    "angles": filled("<", before="a: !ref "),
    "references_to_nothing_in_one_text": filled("<b>", before="a: !ref "),
    "binary": filled("A", before="a: !!binary "),
    "digits": f"a: {'9' * 100_001}\n",
    "references_to_nothing": numbered("key_{0}: !ref <kye_{0}>", 8_000),
    "references_to_long_names": f"{'ab' * 40_000}: 1\nb: !ref <{'ba' * 40_000}>\n",
    "targets_that_are_not_there": numbered("k{0}: !new:torch.nn.Lineer{0} {{}}", 8_000),
    "arguments_that_are_not_there": numbered("k{0}: !new:torch.nn.Linear {{in_featurs{0}: 1}}", 5_000),
    "keywords_that_are_not_there": "k: !new:torch.nn.Linear {"
    + ", ".join(f"in_featurs{n}: 1" for n in range(9_000))
    + "}\n",
    "untrusted_targets": numbered("k{0}: !new:package{0}.Thing {{}}", 8_000),
    "long_unknown_tag": "a: !" + "reff" * 20_000 + " x\n",
    "long_target": "a: !new:torch.nn." + "Linear" * 15_000 + " {}\n",
    "long_argument": "a: !new:torch.nn.Linear {" + "in_features" * 9_000 + ": 1}\n",
    "whole_number_of_many_digits": f"seed: {'9' * 50_000}\n",
    "hexadecimal_seed": f"seed: 0x{'f' * 50_000}\n",
    "hexadecimal_norm": f"max_grad_norm: 0x{'f' * 50_000}\n",
}

# May be refused or be a small tree, as long as it ends at once.
SMALL = {
    "power_without_a_reference": "a: !ref 9**9**9\n",
    "wide_references": "x: [1, 2]\n" + numbered("a{}: !ref <x>", 5_000),
    "small_arithmetic": "x: 3\n" + numbered("a{}: !ref <x> * 2", 5_000),
    "long_sum": "a: !ref " + " + ".join(["1"] * 20_000) + "\n",
    "long_unary": "a: !ref 1 + " + "-" * 50_000 + "1\n",
    "long_unary_with_spaces": "a: !ref 1 + " + "- " * 40_000 + "1\n",
    "nested_parentheses": "a: !ref " + "(" * 30_000 + "1 + 1" + ")" * 30_000 + "\n",
    "long_product": "a: !ref " + "*".join(["3"] * 40_000) + "\n",
    "long_attribute_in_arithmetic": "a: !ref 1 + x" + ".x" * 40_000 + "\n",
    "long_call_in_arithmetic": "a: !ref 1 + " + "f(" * 20_000 + ")" * 20_000 + "\n",
    "long_literal": "a: !ref 1 + " + "9" * 90_000 + "\n",
    "long_hexadecimal_literal": "a: !ref 1 + 0x" + "f" * 90_000 + "\n",
    "repeated_text": "a: !ref '\"x\" * 1000000000'\n",
    "repeated_list": "a: !ref '[0] * 1000000000'\n",
    "formatted_text": "a: !ref '\"%1000000000d\" % 1'\n",
    "formatted_field": "a: !ref \"f'{1:1000000000}'\"\n",
    "shifted": "a: !ref 1 << 1000000000\n",
    "comprehension": "a: !ref '[0 for x in range(1000000000)] + 1'\n",
    "exponent": "a: 1e999999999\nb: !ref <a> * 0\nc: -1e-999999999\n",
    "long_exponent": f"a: 1e{'9' * 50_000}\n",
    "long_float": f"a: 0.{'1' * 90_000}\nb: !ref <a> * 2\n",
    "hexadecimal": f"a: 0x{'f' * 90_000}\nb: !ref x<a>\nc: !ref <a> * 2\n",
    "octal": f"a: 0o{'7' * 90_000}\n",
    "underscores": f"a: 1{'_' * 90_000}1\n",
    "nearly_a_number": f"a: {'1' * 90_000}x\nb: {'1_' * 40_000}x\nc: {'1.' * 40_000}\n",
    "nearly_a_date": f"a: 2001-01-01T{'1' * 90_000}\nb: 2001-01-01{' ' * 50_000}x\n",
    "sexagesimal": "a: 1" + ":59" * 30_000 + "\n",
    "comments": filled("# comment\n"),
    "comments_behind_values": numbered("k{}: 1 # why", 15_000),
    "empty_lines": filled("\n", before="a: 1\n"),
    "spaces": filled(" ", before="a: 1\n"),
    "indentation": filled(" ", before="a:\n", after="b: 1\n"),
    "carriage_returns": filled("\r", before="a: 1\n"),
    "nulls_of_unicode": filled("\u2028", before="a: 1\n"),
    "byte_order_marks": filled("\ufeff"),
    "long_tuple_text": "a: '(" + "1," * 45_000 + "1)'\n",
    "unclosed_tuple": "a: (" + "1," * 45_000 + "\n",
    "text_with_parentheses": "a: (" + ")(" * 45_000 + ")\n",
    "merges_twice": merges(60, twice=True),
    "angles_and_brackets": "a: !ref " + "<[" * 45_000 + "\n",
    "unclosed_references": "a: !ref " + "<a" * 45_000 + "\n",
    "references_within_references": "a: !ref " + "<" * 40_000 + "a" + ">" * 40_000 + "\n",
    "long_reference": f"a: !ref <{'x' * 90_000}>\n",
    "placeholders": numbered("k{}: !PLACEHOLDER", 15_000),
    "wide_merge": "b: &b {"
    + ", ".join(f"k{n}: {n}" for n in range(3000))
    + "}\na: {<<: ["
    + ", ".join(["*b"] * 3000)
    + "]}\n",
    "linears": numbered("k{}: !name:torch.nn.Linear {{in_features: 1}}", 4_000),
    "references_to_attributes": "m: !new:torch.nn.Linear [1, 1]\n" + numbered("k{}: !ref <m.weight>", 5_000),
    "long_word_of_a_run_option": f"precision: {'fp32' * 20_000}\n",
    "keys_like_run_options": numbered("precisio{}: 1", 9_000),
}

# What a call makes of its arguments is not limited: `torch.zeros [1000000000000]` is a YAML's right.
FILES: dict[str, Callable[[Path], Any]] = {}
OVERRIDES: dict[str, Callable[[str], Any]] = {
    "dotted": lambda file: {"a." * 50_000 + "a": 1},
    "dotted_list": lambda file: {"l." + "0." * 50_000 + "0": 1},
    "dotted_on_the_command_line": lambda file: parse_arguments([file, "--" + "a." * 50_000 + "a=1"])[2],
    "brackets_on_the_command_line": lambda file: parse_arguments([file, "--lr", "[" * 100_000])[2],
    "closed_brackets_on_the_command_line": lambda file: parse_arguments([file, "--lr", "[" * 50_000 + "]" * 50_000])[2],
    "braces_on_the_command_line": lambda file: parse_arguments([file, "--lr", "{a: " * 50_000])[2],
    "parentheses_on_the_command_line": lambda file: parse_arguments([file, "--lr", "(" * 50_000 + ")" * 50_000])[2],
    "question_marks_on_the_command_line": lambda file: parse_arguments([file, "--lr", "? " * 50_000])[2],
    "dashes_on_the_command_line": lambda file: parse_arguments([file, "--lr", "- " * 50_000])[2],
    "quotes_on_the_command_line": lambda file: parse_arguments([file, "--lr", "'" * 100_001])[2],
    "digits_on_the_command_line": lambda file: parse_arguments([file, "--lr", "9" * 100_000])[2],
    "digits_of_a_run_option": lambda file: parse_arguments([file, "--seed", "9" * 100_000])[2],
    "hexadecimal_run_option": lambda file: parse_arguments([file, "--max_grad_norm", "0x" + "f" * 50_000])[2],
    "items_on_the_command_line": lambda file: parse_arguments([file, "--lr", "[" + "1," * 60_000 + "1]"])[2],
    "long_value": lambda file: parse_arguments([file, "--lr", "x" * 120_000])[2],
    "long_name": lambda file: parse_arguments([file, "--" + "precision" * 12_000, "1"])[2],
    "many_names": lambda file: parse_arguments([file, *(f"--lr{n}=1" for n in range(5_000))])[2],
    "many_options": lambda file: parse_arguments([file, *(f"--precisoin{n}=1" for n in range(5_000))])[2],
    "many_words": lambda file: parse_arguments([file, *(f"precisoin{n}" for n in range(5_000))])[2],
    "anchors_on_the_command_line": lambda file: parse_arguments([file, "--lr", "[&a [1,1], *a, *a]"])[2],
    "text_of_anchors": lambda file: chain(60, "&a0 [x]", "&{1} [*{0}, *{0}]"),
    "text_of_brackets": lambda file: "lr: " + "[" * 100_000,
    "text_of_five_megabytes": lambda file: filled("a: b\n", 5 * MIB),
    "text_of_merges": lambda file: merges(700),
    "objects_that_double": lambda file: {"lr": doubled(60)},
    "objects_that_double_a_little": lambda file: {"lr": doubled(18)},
    "mappings_that_double": lambda file: {"model": nested(60, lambda value: {"a": value, "b": value})},
    "deep_objects": lambda file: {"lr": nested(100_000, lambda value: [value])},
    "deep_mapping": lambda file: nested(100_000, lambda value: {"a": value}),
    "deep_mapping_below_a_key": lambda file: {"model": nested(100_000, lambda value: {"hidden": value})},
    "deep_tuples": lambda file: {"lr": nested(100_000, lambda value: (value,))},
    "a_list_in_itself": lambda file: {"lr": circular_list()},
    "a_mapping_in_itself": lambda file: circular_dict(),
    "a_mapping_in_itself_below_a_key": lambda file: {"model": circular_dict()},
    "many_items": lambda file: {"lr": list(range(1_000_000))},
    "many_keys": lambda file: {f"key{n}": n for n in range(20_000)},
    "an_endless_list": lambda file: {"lr": iter(int, 1)},
    "a_long_range": lambda file: {"lr": range(10**12)},
    "a_large_number": lambda file: {"lr": 10**100_000},
    "a_large_number_as_option": lambda file: {"max_grad_norm": 10**100_000},
    "a_long_text": lambda file: {"lr": "x" * 50_000_000},
    "a_long_key": lambda file: {"x" * 5_000_000: 1},
    "an_index_of_many_digits": lambda file: {"l." + "9" * 10_000: 1},
}


def include_chain(folder: Path) -> None:
    for n in range(300):
        (folder / f"i{n}.yaml").write_text(f"a: !include:i{n + 1}.yaml\n")
    (folder / "i300.yaml").write_text("x: 1\n")


def include_twice(folder: Path) -> None:
    for n in range(40):
        (folder / f"i{n}.yaml").write_text(f"a: !include:i{n + 1}.yaml\nb: !include:i{n + 1}.yaml\n")
    (folder / "i40.yaml").write_text("x: 1\n")


def include_circle(folder: Path) -> None:
    for n in range(3):
        (folder / f"i{n}.yaml").write_text(f"a: !include:i{(n + 1) % 3}.yaml\n")


def include_circle_of_links(folder: Path) -> None:
    (folder / "i0.yaml").write_text("a: !include:link0.yaml\n")
    for n in range(50):
        (folder / f"link{n}.yaml").symlink_to(f"link{n + 1}.yaml")
    (folder / "link50.yaml").symlink_to("i0.yaml")


def include_large_often(folder: Path) -> None:
    (folder / "i0.yaml").write_text(numbered("k{}: !include:i1.yaml", 90))
    (folder / "i1.yaml").write_text("# " + "x" * 1_000_000 + "\n" + numbered("k{}: 1", 5_000))


def include_itself_below(folder: Path) -> None:
    (folder / "i0.yaml").write_text("a: !include:i1.yaml\n  b: !include:i0.yaml\n")
    (folder / "i1.yaml").write_text("b: 1\n")


def zero_device(folder: Path) -> None:
    (folder / "i0.yaml").symlink_to("/dev/zero")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "i0.yaml")


def include_of_a_fifo(folder: Path) -> None:
    os.mkfifo(folder / "fifo.yaml")
    (folder / "i0.yaml").write_text("a: !include:fifo.yaml\n")


def a_folder(folder: Path) -> None:
    (folder / "i0.yaml").mkdir()


def a_hole(folder: Path) -> None:
    with open(folder / "i0.yaml", "wb") as file:
        file.truncate(1 << 40)


def binary(folder: Path) -> None:
    (folder / "i0.yaml").write_bytes(bytes(range(256)) * 4000)


def utf16(folder: Path) -> None:
    (folder / "i0.yaml").write_text("a: !apply:os.system [ls]\n", encoding="utf-16")


def a_text_of_nulls(folder: Path) -> None:
    (folder / "i0.yaml").write_bytes(b"a: " + b"\0" * 1_000_000)


FILES.update(
    {
        made.__name__: made
        for made in (
            include_chain,
            include_twice,
            include_circle,
            include_circle_of_links,
            include_large_often,
            include_itself_below,
            zero_device,
            fifo,
            include_of_a_fifo,
            a_folder,
            a_hole,
            binary,
            utf16,
            a_text_of_nulls,
        )
    }
)

BASE = "lr: 0.1\na: {a: 1}\nl: [1]\nmodel: {hidden: 4}\n"

KINDS = {"bomb": BOMBS, "file": FILES, "small": SMALL, "override": OVERRIDES}
CASES = [f"{kind}-{name}" for kind, cases in KINDS.items() for name in cases]
# One of each kind, in the default tier.
FIRST = [
    *("bomb-references", "bomb-anchors", "bomb-text", "bomb-squares", "bomb-power"),
    *("bomb-deep_flow_list", "bomb-circle", "bomb-five_megabytes"),
    *("file-include_twice", "file-include_circle", "file-zero_device", "file-fifo", "file-a_hole", "file-utf16"),
    *("small-formatted_field", "small-repeated_text", "small-merges_twice"),
    *("override-mappings_that_double", "override-a_mapping_in_itself", "override-brackets_on_the_command_line"),
]
# A quarter, with the best known bombs, in the extended tier; all of them by night.
EXTENDED = [case for case in CASES if case not in FIRST and case in {*CASES[::4], *CASES[:12]}]
NIGHTLY = [case for case in CASES if case not in FIRST + EXTENDED]


def prepared(case: str, folder: Path) -> tuple[Path, Callable[[str], Any]]:
    """The file of a case, written, and what gives its overrides."""
    kind, name = case.split("-", 1)
    file = folder / "i0.yaml"
    overrides: Callable[[str], Any] = lambda _: None  # noqa: E731
    if kind == "file":
        FILES[name](folder)
    elif kind == "override":
        file.write_text(BASE)
        overrides = OVERRIDES[name]
    else:
        file.write_text(KINDS[kind][name])
    return file, overrides


# A folder of its own, as a recipe has: the check reads the Python files beside the script.
SCRIPT = "from amp_recipes.config import check, load_hparams\n\n\ndef both():\n    return "
SCRIPT += "(lambda *given: check(*given)), (lambda *given: load_hparams(*given))\n"


def measured(case: str, folder: Path, readers: tuple[Callable[..., Any], ...]) -> dict[str, Any]:
    """How a check and a load of a case ended, and the megabytes that they took, in the process that calls this."""
    file, overrides = prepared(case, folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)  # the machine is not what is tested
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
    ends = []
    for read in readers:
        try:
            with at_most(CALLS):
                read(str(file), overrides(str(file)))
            ends.append("loaded")
        except ConfigError as error:
            ends.append(f"refused: {str(error)[:300]}")
            if len(str(error)) > MIB:
                ends.append(f"a message of {len(str(error))} characters")
        except BaseException as error:
            ends.append(f"{type(error).__name__}: {str(error)[:300]}")
    return {"ends": ends, "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024}


def work(root: Path, cases: list[str]) -> None:
    """Measure each case in a fork of this process; write a line for each."""
    (root / "recipe").mkdir(parents=True)
    (root / "recipe" / "limits_script.py").write_text(SCRIPT)
    sys.path.insert(0, str(root / "recipe"))
    readers = importlib.import_module("limits_script").both()
    for case in cases:
        folder = root / case
        folder.mkdir()
        if os.fork() == 0:
            try:
                print(json.dumps([case, measured(case, folder, readers)]), flush=True)
            finally:
                os._exit(0)
        _, status = os.wait()
        if status != 0:
            print(json.dumps([case, {"ends": [f"ended with status {status}"], "megabytes": 0}]), flush=True)


@pytest.mark.parametrize(
    "cases",
    [
        *(FIRST[part::4] for part in range(4)),
        *(pytest.param(EXTENDED[part::4], marks=pytest.mark.extended) for part in range(4)),
        *(pytest.param(NIGHTLY[part::12], marks=[pytest.mark.extended, pytest.mark.nightly]) for part in range(12)),
    ],
    ids=lambda cases: cases[0],
)
def test_it_ends_with_little_work_and_in_little_memory(cases, tmp_path, subtests):
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = run_python(__file__, tmp_path / "limits", *cases, env=environment)
    found = dict(map(json.loads, ran.stdout.splitlines()))
    assert list(found) == cases, ran.stderr
    for case, result in found.items():
        with subtests.test(case):
            for end in result["ends"]:
                assert end.startswith("refused" if case.startswith(("bomb", "file")) else ("refused", "loaded")), end
            assert result["megabytes"] < MEGABYTES


def test_a_file_of_two_hundred_lines_is_checked_with_little_work(tmp_path):
    blocks = [
        f"width_{n}: {n + 1}\nlayer_{n}: !new:torch.nn.Linear\n  in_features: !ref <width_{n}>\n"
        f"  out_features: !ref <width_{n}> * 2\n  bias: true  # as in the paper\n"
        for n in range(40)
    ]
    file = tmp_path / "main.yaml"
    file.write_text("".join(blocks))
    assert len(file.read_text().splitlines()) == 200
    check(str(file), recipe_folder=tmp_path)  # what is read once in a process
    with at_most(calls=1_000_000):
        check(str(file), recipe_folder=tmp_path)


def test_five_megabytes_are_refused_before_they_are_read(tmp_path):
    file = tmp_path / "main.yaml"
    file.write_text(filled("a: b # a comment\n", 5 * MIB))
    with at_most(calls=1_500), pytest.raises(ConfigError, match=r"main\.yaml.*larger than"):
        check(str(file), recipe_folder=tmp_path)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
