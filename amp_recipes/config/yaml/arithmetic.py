"""Evaluates the arithmetic that a `!ref` may hold (`<hidden> * 2`)."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from amp_recipes.config.yaml.limits import NUMBER_BITS
from amp_recipes.config.yaml.mistakes import short
from amp_recipes.errors import ConfigError

CHARACTERS = 1_000  # of one formula
PARENTHESES = 50  # open at once

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_NODES = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
_FORMULA = re.compile(r"(?:[0-9.eE_+*/%()\s-]|True|False)*")
_PATH_SLASH = re.compile(r"(?<!/)/(?!/)(?:(?<!\s/)|(?!\s))")  # one slash without white space on both sides
_NUMBER = re.compile(r"[0-9.e+-]{1,300}")


def is_arithmetic(template: str) -> bool:
    """Whether text whose references were left out asks for arithmetic: it has an operator, and no slash of a path.

    `/` divides only between white space: `<seed>/<run>` is a path, where HyperPyYAML gives 662.0.
    """
    return bool(re.search(r"[-+*/%(]", template)) and not _PATH_SLASH.search(template)


def could_be_formula(text: str) -> bool:
    """Whether text has nothing but numbers, operators and parentheses in it; the rest is text, and is not parsed."""
    return bool(_FORMULA.fullmatch(text))


def evaluate(text: str) -> int | float | None:
    """The result of a formula of numbers with + - * / // % ** and parentheses; None if the text is no formula.

    Names and quoted strings make it no formula: it stays text. HyperPyYAML leaves every sign as text (`-3 + 4`).
    Raises ConfigError for a division by zero, and for a result that is too large or not real.
    """
    if not could_be_formula(text):
        return None
    if len(text) > CHARACTERS or _open_at_once(text) > PARENTHESES:
        raise ConfigError(
            f"{short(text)} is too long: arithmetic has at most {CHARACTERS:,} characters "
            f"and {PARENTHESES} nested parentheses."
        )
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    except (RecursionError, MemoryError) as error:  # a thousand signs in a row
        raise ConfigError(f"{short(text)} is nested too deeply.") from error
    nodes = list(ast.walk(body))
    is_formula = "..." not in text and all(isinstance(node, _NODES) for node in nodes)
    return _result(nodes, text) if is_formula else None


def number_of(text: str) -> int | float | None:
    """The number that text is, if the number is written just so: `22` and `2.5`, but not `007` or `2.10`.

    HyperPyYAML makes a number of any text that reads as one, so that a version `2.10` becomes 2.1.
    """
    if not _NUMBER.fullmatch(text):
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text:
            return number
    return None


def _result(nodes: list[ast.AST], text: str) -> int | float:
    values: dict[ast.AST, Any] = {}
    # Operands first, and without recursion: a sum of 500 terms is 500 levels deep.
    for node in reversed(nodes):
        if isinstance(node, ast.BinOp):
            values[node] = _apply(node.op, [values[node.left], values[node.right]], text)
        elif isinstance(node, ast.UnaryOp):
            values[node] = _apply(node.op, [values[node.operand]], text)
        elif isinstance(node, ast.Constant):
            values[node] = _bounded(node.value, text)
    return values[nodes[0]]


def _apply(symbol: ast.AST, operands: list[Any], text: str) -> int | float:
    """One operation. No operand is longer than NUMBER_BITS, so only a power can grow beyond twice that."""
    if isinstance(symbol, ast.Pow) and all(isinstance(value, int) for value in operands):
        base, exponent = operands
        if (abs(base).bit_length() - 1) * exponent >= NUMBER_BITS:
            raise _too_large(text)
    try:
        result = _OPERATORS[type(symbol)](*operands)
        overflows = isinstance(result, float) and not math.isfinite(result) and all(map(math.isfinite, operands))
    except ZeroDivisionError as error:
        raise ConfigError(f"{short(text)} divides by zero.") from error
    except OverflowError as error:
        raise _too_large(text) from error
    if isinstance(result, complex):
        raise ConfigError(f"{short(text)} is not a real number.")
    if overflows:
        raise _too_large(text)
    return _bounded(result, text)


def _bounded(value: Any, text: str) -> int | float:
    if isinstance(value, int) and value.bit_length() > NUMBER_BITS:
        raise _too_large(text)
    return value


def _too_large(text: str) -> ConfigError:
    return ConfigError(f"{short(text)} is too large: numbers have at most {NUMBER_BITS:,} bits.")


def _open_at_once(text: str) -> int:
    depths = accumulate(1 if character == "(" else -1 for character in text if character in "()")
    return max(depths, default=0)
