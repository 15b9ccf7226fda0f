"""Arithmetic in references: what is a formula, what it gives, and what it is refused for."""

import math

import pytest
from hyperpyyaml.core import parse_arithmetic
from hypothesis import given, settings
from hypothesis import strategies as st
from work import at_most

from amp_recipes.config.yaml.arithmetic import evaluate, is_arithmetic, number_of
from amp_recipes.errors import ConfigError

numbers = st.integers(0, 50).map(str) | st.floats(0, 50, allow_subnormal=False).map(repr)
formulas = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from([" + ", "-", " * ", " / ", "//", " % "]), inner).map("".join)
        | inner.map("({})".format)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(formulas)
def test_a_formula_gives_what_python_and_hyperpyyaml_give(text):
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ConfigError, match="divides by zero"):
            evaluate(text)
        return
    if not math.isfinite(expected):
        with pytest.raises(ConfigError, match="too large"):
            evaluate(text)
        return
    found = evaluate(text)
    assert found == expected == parse_arithmetic(text)
    assert type(found) is type(expected)


def test_signs_are_evaluated(subtests):
    for text in ["-3 + 4", "2 * -3", "(-3) ** 2", "+-+5", "-(1 + 2)", "2 ** -1", "1_000 * 2", "True + 1"]:
        with subtests.test(text=text):
            assert evaluate(text) == eval(text)


def test_other_text_is_no_formula(subtests):
    for text in [
        *(
            "",
            "x",
            "3 + x",
            "None",
            "'x' * 3",
            '"a" + "b"',
            "1, 2",
            "3 (4)",
            "2020-01-02",
            "1 if 1 else 2",
            "~3",
            "3 << 2",
        ),
        *(
            "abs(3)",
            "(1).real",
            "[1][0]",
            "1 == 1",
            "1 and 2",
            "not 1",
            "1j * 2",
            "3\n+ 4",
            "  3 + 1",
            "1e",
            "0_",
            "()",
        ),
        *(
            "__import__('os').system('true')",
            "(lambda: 1)()",
            "3 - 4x",
            "a - b",
            "9 ** x",
            "\u0663 + 1",
            "1\x00+1",
            "- -",
        ),
    ]:
        with subtests.test(text=text):
            assert evaluate(text) is None


def test_what_cannot_be_computed_is_refused_at_once(subtests):
    for text, said in [
        ("7 / 0", "7 / 0 divides by zero."),
        ("7 % 0", "divides by zero"),
        ("0 ** -1", "divides by zero"),
        ("(-8) ** 0.5", "is not a real number"),
        ("9**9**9", "is too large: numbers have at most 1,024 bits"),
        ("2**1024", "too large"),
        ("(-2)**1025", "too large"),
        ("10.0**400", "too large"),
        ("1e300 * 1e300", "too large"),
        ("2**1023*2 - 1 + 2**1023", "too large"),
        ("9" * 400, "too large"),
        ("(2**1023 + (2**1023 - 1)) * 1.0", "too large"),
        ("2" + "**2" * 300, "too large"),
        ("1" * 1_001, "too long"),
        ("(" * 51 + "1" + ")" * 51, "too long"),
        ("(" * 900, "too long"),
    ]:
        with subtests.test(text=text):
            with at_most(calls=15_000), pytest.raises(ConfigError) as caught:
                evaluate(text)
            assert said in str(caught.value) and len(str(caught.value)) < 250


def test_what_is_long_or_large_but_fits_is_computed(subtests):
    for text, result in [
        ("2**1023", 2**1023),
        ("1**(10**300)", 1),
        ("(-1)**(10**300 + 1)", -1),
        ("0**5", 0),
        ("2**-1074", 2**-1074),
        ("(2**1023 - 1) * 2 + 1", 2**1024 - 1),
        ("1" + "+1" * 499, 500),
        ("-" * 998 + "10", 10),
        ("(" * 50 + "1" + ")" * 50, 1),
        ("1e999 * 2", math.inf),  # infinity as `.inf` in a YAML: nothing grew
    ]:
        with subtests.test(text=text):
            assert evaluate(text) == result


@settings(max_examples=500, deadline=None)
@given(st.text("0123456789.eE_+-*/%() \n", max_size=40) | st.text(max_size=20))
def test_any_text_gives_a_small_number_or_none_or_a_config_error(text):
    try:
        found = evaluate(text)
    except ConfigError:
        return
    assert found is None or isinstance(found, float) or found.bit_length() <= 1_024


def test_operators_ask_for_arithmetic(subtests):
    for template in [
        "<a> / <b>",
        "<a>//<b>",
        "<a> // <b>",
        "<>-<>",
        "<>*2",
        "2 ** <>",
        "<> % 3",
        "(<> + 1) * 2",
        "(<>)",
        "-<>",
    ]:
        with subtests.test(template=template):
            assert is_arithmetic(template)


def test_a_slash_without_spaces_makes_a_path(subtests):
    for template in ["<>/<>", "<> /<>", "<>/ <>", "<>/2", "/<>/<>", "<>/<>/<>", "<>/<> - 1", "<>_<>", "<>", "v<>"]:
        with subtests.test(template=template):
            assert not is_arithmetic(template)


def test_an_ellipsis_is_no_number(subtests):
    for text in ["...", "(...)", "... + 1"]:
        with subtests.test(text=text):
            assert evaluate(text) is None


def test_a_number_is_read_back_from_its_own_text(subtests):
    for number in [22, 2.5, 0.0001, 1e-05, 1e22, 0, 10**299, -3, 1.0]:
        with subtests.test(number=number):
            found = number_of(str(number))
            assert found == number and type(found) is type(number)


def test_text_that_a_number_would_change_stays_text(subtests):
    for text in ["007", "2.10", "1e5", "1_2", "inf", "nan", "2.", "-0", "", "v2", " 2", "2\n", "\u0663", "9" * 301]:
        with subtests.test(text=text):
            assert number_of(text) is None
