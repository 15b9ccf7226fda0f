"""The pages draw what a report has, never fail on what it lacks, and leave no label over another."""

import json
import math
import random
import re
import sys
from functools import partial

import numpy as np
import pytest
from repository import REPOSITORY

from amp_recipes.commands.report import compare_page, diagnosis_page, draw_comparison, draw_diagnosis
from amp_recipes.commands.report.drawing import finite, finite_list, module_name, module_names, percent, words, wrapped
from amp_recipes.errors import ConfigError

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'amp-recipes[report]'")
FigureCanvasAgg = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg
Text = pytest.importorskip("matplotlib.text").Text

PNG = b"\x89PNG\r\n\x1a\n"


def module(index):
    part = ("query_key_value", "norm", "dropout_residual", "feed_forward_intermediate")[index % 4]
    return f"encoder.transformer_layers.{index // 4}.self_attention.output_projection.{part}"


def diagnosis(modules=60):
    rng = random.Random(0)
    scales = [2.0**octave for octave in range(0, 41, 4)]
    return {
        "precision": "fp16",
        "versions": {"torch": "2.13.0"},
        "headlines": ["NOT SAFE in fp16. Safe with head in fp32."],
        "settings": {"fp16": ["fp32_modules: [head]", "init_scale: 4096"]},
        "verdict": "NOT SAFE in fp16. Safe with head in fp32.\n   as it is  then  bound",
        "census": [{"module": "head", "phase": "forward", "op": "mm", "inputs": [], "outputs": [], "calls": 1}],
        "drift": [
            {
                "module": module(index),
                "local_error": 0.01,
                "sensitivity": 10.0 ** -(index / 10),
                "gradient_error": 0.1 / (index + 1),
                "above_max": 0.25 if index == 0 else 0.0,
                "below_normal": 0.5,
            }
            for index in range(modules)
        ],
        "casts": [
            {
                "module": module(index),
                "phase": "forward",
                "by": by,
                "from": "float32",
                "to": "float16",
                "calls": 1,
                "bytes": 1000 * (index + 1),
            }
            for index in range(modules)
            for by in ("autocast", "user", "backward", "a", "b")
        ],
        "underflow": {
            "scales": scales,
            "flushed": [0.001 + 0.5 / 4**index for index in range(len(scales))],
            "subnormal": [0.4 / 2**index for index in range(len(scales))],
            "largest": 65504 / 2.0**36,
            "window_octaves": 18.9,
            "init_scale": 65536.0,
            "exact_zeros": 0.001,
        },
        "pins": {
            "modules": ["head"],
            "tolerance": 0.01,
            "error": 0.004,
            "error_without": "inf",
            "held_out_error": 0.006,
            "steps": 200,
            "cost_time": 1.03,
            "cost_memory": 1.01,
            "verified": True,
            "curves": {"reference": [[rng.random() for _ in range(30)]] * 3, "pinned": [1.0] * 30},
        },
        "hazards": [{"kind": "mask", "file": "a.py", "line": 1, "message": "m"}] * 2,
    }


def comparison():
    runs = [
        {"seed": seed, "folder": "x", "finished": True, "message": "", "value": 0.9 + 0.01 * seed} for seed in (1, 2)
    ]
    failed = [{**runs[0], "finished": False, "value": None}, {**runs[1], "finished": False, "value": None}]
    sizes = {"step_seconds": 0.01, "step_ratio": 1.0, "memory_bytes": 1 << 28, "memory_ratio": 1.0}
    entries = [
        {"precision": "fp32", "verdict": "reference", "headline": "fp32: the reference", "runs": runs, **sizes},
        {"precision": "bf16", "verdict": "no different", "headline": "bf16: fine", "runs": runs, **sizes},
        {"precision": "fp16", "verdict": "worse", "headline": "fp16: worse", "runs": failed, **sizes, "step_ratio": 90},
    ]
    curves = {"fp32": [[1.0, 0.5], [1.1, 0.6]], "bf16": [[1.0, 0.5], [1.1, 0.6]], "fp16": [[None, None], [1.0, None]]}
    return {
        "reference": "fp32",
        "metric": {"name": "accuracy", "place": "test", "mode": "max"},
        "precisions": entries,
        "curves": {
            "loss": {"updates": [10, 20], "by_precision": curves},
            "metric": {"stage": "valid", "epochs": [1, 2], "by_precision": curves},
        },
    }


def draw(folder, found, page=diagnosis_page):
    """The figure of a report, with what is written on it; None if nothing is drawn."""
    figures = []

    def keep(figure, file):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        # The labels of ticks beyond the limits of an axis are there, but not drawn: each text is asked.
        figure.written = []
        with pytest.MonkeyPatch.context() as patch:
            drawing = Text.draw
            patch.setattr(Text, "draw", lambda text, *args: (figure.written.append(text), drawing(text, *args)))
            canvas.draw()
        figures.append(figure)
        return file

    (folder / page.JSON_FILE).write_text(json.dumps(found))
    function = draw_diagnosis if page is diagnosis_page else draw_comparison
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "save", keep)
        assert (function(folder) is None) == (not figures)
    return figures[0] if figures else None


@pytest.fixture
def drawn(tmp_path):
    return partial(draw, tmp_path)


@pytest.fixture(scope="module")
def page_of_60(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("page"), diagnosis(modules=60))


@pytest.fixture(scope="module")
def page_of_comparison(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("page"), comparison(), compare_page)


def texts(figure):
    return [text.get_text() for text in figure.written if text.get_visible() and text.get_text().strip()]


def boxes(figure):
    """The box of each text on the page, with the text, a little smaller, since neighbours may touch."""
    found = {id(text): text for text in figure.written if text.get_visible() and text.get_text().strip()}
    return [
        (text.get_text(), text.get_window_extent(figure.canvas.get_renderer()).padded(-1.5)) for text in found.values()
    ]


def overlaps(figure):
    found = boxes(figure)
    return [
        (one, other) for index, (one, box) in enumerate(found) for other, its in found[index + 1 :] if box.overlaps(its)
    ]


# ---------------------------------------------------------------------- diagnosis


def test_a_diagnosis_is_drawn_beside_its_file(tmp_path):
    (tmp_path / "diagnosis.json").write_text(json.dumps(diagnosis(modules=3)))
    settings = dict(matplotlib.rcParams)
    file = draw_diagnosis(tmp_path)
    assert file == tmp_path / "diagnosis.png" and file.read_bytes().startswith(PNG)
    assert dict(matplotlib.rcParams) == settings  # nobody else's pictures change


def test_every_axis_of_the_diagnosis_has_a_label(page_of_60):
    def is_labelled(axes, kind):
        twins = getattr(axes, f"get_shared_{kind}_axes")().get_siblings(axes)
        return any(getattr(twin, f"get_{kind}label")() for twin in twins)

    assert len(page_of_60.axes) == 9
    for axes in page_of_60.axes[1:]:  # the first one is the head
        assert is_labelled(axes, "x") and is_labelled(axes, "y"), axes.get_title()


def test_curves_that_lie_on_each_other_are_both_seen(drawn):
    """Pixels of either colour, where fp32 and the low precision lose the same."""
    losses = [[1 / update for update in range(1, 60)]]
    figure = drawn({"precision": "bf16", "pins": {"curves": {"reference": losses, "pinned": losses}}})
    axes = figure.axes[1]
    wide, thin = axes.lines
    assert wide.get_ydata().tolist() == thin.get_ydata().tolist() and wide.get_linewidth() > 3 * thin.get_linewidth()
    box = axes.get_window_extent()
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1][int(box.y0) : int(box.y1), int(box.x0) : int(box.x1), :3]
    for line in (wide, thin):
        colour = np.array(matplotlib.colors.to_rgb(line.get_color())) * 255
        assert (abs(pixels - colour).max(axis=-1) < 40).sum() > 100


def test_a_folder_without_a_report_has_no_page(tmp_path):
    assert draw_diagnosis(tmp_path) is None and draw_comparison(tmp_path) is None
    (tmp_path / "diagnosis.json").write_text('{"verdict": "bf16: safe.", "drift": [], "casts": [], "pins": {}}')
    assert draw_diagnosis(tmp_path) is None


def test_a_damaged_report_is_told(subtests, tmp_path):
    for damage in ["{", "[1]", '"x"', "\xff"]:
        with subtests.test(damage=damage):
            (tmp_path / "diagnosis.json").write_text(damage, encoding="latin-1")
            with pytest.raises(ConfigError, match=r"diagnosis\.json"):
                draw_diagnosis(tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "diagnosis.json").write_text(json.dumps(diagnosis()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'amp-recipes[report]'")):
        draw_diagnosis(tmp_path)


def test_the_page_says_what_the_report_says(page_of_60):
    shown = texts(page_of_60)
    everything = "\n".join(shown)
    for text in (
        "NOT SAFE in fp16. Safe with head in fp32.",
        "For fp16, add to your YAML: fp32_modules: [head]; init_scale: 4096",
        "Hazards in the code: mask (2).",
        "Diagnosis of fp16, torch 2.13.0",
        "Sensitivity, the first 20 of 60 modules",
        "25 %",
        "50 %",
        "window: 18.9 octaves",
        "advised\n2^16",
        "flushed to 0",
        "kept with\nfewer digits",
        "overflow",
        "Casts in a step, 10 of 60",
        "autocast",
        "others",
        "tolerance 1 %",
        "0.4 %",
        "0.6 %",
        "with 1 more module in fp32, verified",
        "in fp32: head\na step takes 1.03 times the time and 1.01 times the memory",
        "beyond the 0.1 % that are 0 in bf16",
        "3 fp32 seeds and fp16, pinned",
        "modules of encoder.transformer_layers",
    ):
        assert text in everything, text
    assert sum("norm" in text or "query_key" in text for text in shown) > 5


def test_a_page_of_few_modules_shows_all(drawn):
    assert "all modules" in "\n".join(texts(drawn({"drift": diagnosis(modules=7)["drift"]})))


@pytest.mark.parametrize("modules", [1, 3, 60])
def test_no_label_stands_over_another(drawn, page_of_60, modules):
    figure = page_of_60 if modules == 60 else drawn(diagnosis(modules))
    names = [text for text in texts(figure) if text.startswith(("0.", "1.", "2.", "3.", "4."))]
    assert modules < 4 or len(names) >= 20
    assert overlaps(figure) == []
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in boxes(figure):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text


def test_modules_keep_the_order_of_the_report(drawn):
    found = diagnosis(modules=3)
    figure = drawn({"drift": found["drift"]})
    axes = figure.axes[1]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert [row.rpartition(".")[2] for row in rows] == ["query_key_value", "norm", "dropout_residual"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    widths = [bar.get_width() + bar.get_x() for bar in axes.patches]
    assert widths == pytest.approx([row["sensitivity"] for row in found["drift"]])


def test_nonfinite_numbers_are_shown_as_such(drawn):
    found = diagnosis(modules=3)
    found["drift"][0] |= {"sensitivity": "inf", "gradient_error": "nan", "above_max": None}
    found["drift"][1]["sensitivity"] = None
    found["pins"] |= {"held_out_error": "inf", "verified": False}
    found["pins"]["curves"]["pinned"] = [1.0, 2.0, "nan", "nan"]
    shown = texts(drawn(found))
    assert {"inf", "nan", "not known", "-", "without them", "fp16, pinned\n(nonfinite)"} <= set(shown)
    assert any("NOT verified" in text for text in shown)


@pytest.mark.parametrize("key", ["drift", "casts", "underflow", "pins"])
def test_each_part_is_drawn_alone(drawn, key):
    assert overlaps(drawn({key: diagnosis()[key]})) == []


ODD = (
    None,
    "inf",
    "nan",
    "-inf",
    [],
    {},
    "text $x^{ $",
    -1,
    0,
    1e300,
    1e-300,
    True,
    [None],
    [{}],
    {"a": []},
    "\x1b[31m漢",
)


def spoil(value, rng):
    """The report with one of its values replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        return {**value, key: spoil(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], spoil(value[index], rng), *value[index + 1 :]]
    return rng.choice(ODD)


@pytest.mark.parametrize("page", [diagnosis_page, compare_page], ids=lambda it: it.JSON_FILE)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_stands_in_a_report_the_page_is_drawn(drawn, page, seed):
    rng = random.Random(seed)
    found = diagnosis(modules=6) if page is diagnosis_page else comparison()
    for _ in range(25):
        found = spoil(found, rng)
        found = found if isinstance(found, dict) else {}
    drawn(found, page)


def test_the_window_lies_below_the_overflow(drawn):
    underflow = {**diagnosis()["underflow"], "window_octaves": 6.0}
    (axes,) = drawn({"underflow": {**underflow, "largest": 65504 / 2.0**30}}).axes[1:]
    spans = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
    assert [(box.x0, box.x1) for box in spans][-1] == (pytest.approx(24), pytest.approx(30))
    assert len(spans) == 2


# ---------------------------------------------------------------------- comparison


def test_a_comparison_is_drawn_beside_its_file(tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(comparison()))
    file = draw_comparison(tmp_path)
    assert file == tmp_path / "compare.png" and file.read_bytes().startswith(PNG)


def test_the_comparison_says_what_the_report_says(page_of_comparison):
    figure = page_of_comparison
    everything = "\n".join(texts(figure))
    for text in (
        "bf16: fine\nfp16: worse",
        "Compared with fp32",
        "valid accuracy after each epoch",
        "2 did not finish",
        "Final test accuracy of each seed (higher is better)",
        "(x90.00)",
        "10 ms",
        "256 MiB",
    ):
        assert text in everything, text
    assert overlaps(figure) == []
    loss = figure.axes[1]
    assert [line.get_ydata().tolist() for line in loss.lines][:2] == [[1.05, 0.55]] * 2


def test_curves_that_end_together_have_labels_apart(drawn):
    found = comparison()
    curves = {name: [[1.0, 0.5]] for name in ("fp32", "bf16", "fp16")}
    found["curves"]["loss"]["by_precision"] = found["curves"]["metric"]["by_precision"] = curves
    figure = drawn(found, compare_page)
    assert overlaps(figure) == []
    assert sum(text == "bf16" for text in texts(figure)) >= 4  # both curves, and the rows below


# ---------------------------------------------------------------------- words and numbers


def test_numbers_of_a_report():
    assert [finite(value) for value in (1, "2.5", "inf", "nan", None, True, [], {}, 10**400, "x")] == [
        1.0,
        2.5,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
    ]
    assert finite_list("12") == [] and finite_list([1, "nan"])[0] == 1.0 and math.isnan(finite_list([1, "nan"])[1])
    assert [percent(share) for share in (0, 1e-6, 0.0013, 0.12, 0.999, 1, 3.5)] == [
        "0",
        "< 0.001 %",
        "0.13 %",
        "12 %",
        "100 %",
        "100 %",
        "350 %",
    ]


def test_long_names_stay_apart_and_short_ones_whole():
    assert module_name("head", 20) == "head"
    names = [module(index) for index in range(60)]
    labels, above = module_names(names, 48)
    assert len(set(labels)) == 60 and max(map(len, labels)) <= 48 and above == "encoder.transformer_layers"
    assert module_names(["encoder", "encoder.norm"], 48) == (["encoder", "encoder.norm"], "")
    assert module_names(["head"], 48) == (["head"], "")
    assert module_names([], 48) == ([], "")
    assert len(module_name("x" * 300, 30)) <= 30 and len(module_name(".".join(["abc"] * 100), 30)) <= 30


def test_words_of_a_file_are_no_formulas():
    assert words("a$b\n\x1b[31m") == r"a\$b  [31m" and words(None) == "" and words("abcdef", 4) == "abc…"
    assert wrapped("one two three four", 9, 2) == "one two\nthree …"


def test_no_page_touches_the_state_of_pyplot():
    for file in (REPOSITORY / "amp_recipes" / "report").glob("*.py"):
        assert "pyplot" not in file.read_text(), file


def test_the_loss_scale_of_the_run_is_marked_beside_the_advised_one(drawn):
    shown = texts(drawn({**diagnosis(), "loss_scale": {"init": 256.0}}))
    assert "of this run\n(256)" in shown and "advised\n2^16" in shown and "your code" in shown
