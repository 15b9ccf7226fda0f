"""compare: what it runs and how it goes on, what it reads of the runs, and when it calls a precision worse."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from programs import DEADLINE_SECONDS, Program

from amp_recipes.commands import cli
from amp_recipes.commands.child_runs import EndedChild
from amp_recipes.commands.compare import command
from amp_recipes.commands.compare.curves import CURVE_POINTS
from amp_recipes.commands.compare.outcome import read_outcome, read_records
from amp_recipes.commands.compare.plan import Metric, choose_metric, make_plan, read_precisions, read_seeds
from amp_recipes.commands.compare.runs import why_it_failed
from amp_recipes.commands.compare.shown import as_markdown
from amp_recipes.commands.compare.significance import ALPHA, PAIRED, POWER, WELCH, holm, spread, worse_than
from amp_recipes.commands.compare.verdict import compared, find_place
from amp_recipes.commands.report import draw_comparison
from amp_recipes.errors import ConfigError

stats = pytest.importorskip("scipy.stats", reason="scipy is not installed: pip install 'amp-recipes[report]'")


# ---------------------------------------------------------------------- the test


def by_seed(*values):
    return dict(enumerate(values, start=1))


def test_the_paired_test_is_scipys():
    rng = random.Random(0)
    for _ in range(20):
        count = rng.randint(2, 8)
        one = [rng.gauss(1, 0.1) for _ in range(count)]
        other = [value + rng.gauss(0.02, 0.05) for value in one]
        found = worse_than(by_seed(*one), by_seed(*other), "min")
        expected = stats.ttest_rel(other, one, alternative="greater")
        assert found.name == PAIRED and found.pairs
        assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
        assert found.worse_by / found.error == pytest.approx(expected.statistic, rel=1e-9)
        assert found.freedom == expected.df


def test_unequal_seeds_are_compared_by_welchs_test():
    one, other = {1: 0.5, 2: 0.7, 4: 0.4}, {1: 0.9, 2: 0.8, 3: 1.1, 5: 0.7}
    found = worse_than(one, other, "min")
    expected = stats.ttest_ind(list(other.values()), list(one.values()), equal_var=False, alternative="greater")
    assert (found.name, found.pairs) == (WELCH, False)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.freedom == pytest.approx(expected.df)
    assert found.worse_by / found.error == pytest.approx(expected.statistic, rel=1e-9)


def test_a_small_sample_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 2 sqrt(3) = 3.464 with 2 degrees of freedom.

    With 2 degrees the tail is (1 - t / sqrt(2 + t^2)) / 2 = (1 - sqrt(12/14)) / 2 = 0.0371.
    """
    found = worse_than(by_seed(10, 10, 10), by_seed(11, 12, 13), "min")
    assert found.p == pytest.approx((1 - math.sqrt(12 / 14)) / 2)
    assert (found.worse_by, found.error, found.freedom) == (2, pytest.approx(1 / math.sqrt(3)), 2)


def test_the_other_direction_turns_the_result_around():
    one, other = by_seed(0.90, 0.91, 0.92), by_seed(0.80, 0.82, 0.81)
    worse, better = (worse_than(one, other, mode) for mode in ("max", "min"))
    assert worse.p < 0.01 and better.p > 0.99
    assert worse.p + better.p == pytest.approx(1)
    assert worse.worse_by == -better.worse_by > 0


def test_seed_noise_that_both_share_is_taken_out_by_the_pairs():
    seeds = [0.2, 0.9, 0.5, 1.4]
    shifted = [value + 0.01 + 0.001 * index for index, value in enumerate(seeds)]
    paired = worse_than(by_seed(*seeds), by_seed(*shifted), "min")
    welch = worse_than(by_seed(*seeds), dict(enumerate(shifted, start=5)), "min")
    assert paired.p < 0.001 and welch.p > 0.4


def test_without_spread_any_difference_counts(subtests):
    for one, other, p in [
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 1),
        ([0.0, 0.0], [0.0, 0.0], 1),
        ([1.0, 1.0, 1.0], [0.1, 0.1, 0.1], 1),  # better, at each seed
        ([0.1, 0.1, 0.1], [1.0, 1.0, 1.0], 0),
        ([0.1 + 0.2, 0.3], [0.3, 0.1 + 0.2], 1),
    ]:
        with subtests.test(one=one, other=other):
            found = worse_than(by_seed(*one), by_seed(*other), "min")
            assert (found.p, found.error, found.detectable(0.05)) == (p, 0, None)
            apart = worse_than(by_seed(*one), {seed + 10: value for seed, value in by_seed(*other).items()}, "min")
            assert len(set(one)) > 1 or (apart.p, apart.error) == (p, 0)


def test_equal_differences_of_seeds_that_differ_are_chance_in_a_metric_of_few_steps():
    """Accuracy over 269 images, two images fewer at both of two seeds: that is no certainty."""
    one, other = by_seed(260 / 269, 266 / 269), by_seed(258 / 269, 264 / 269)
    found = worse_than(one, other, "max")
    assert found.name == WELCH and found.p > 0.2
    # Equal but for their last bits, too.
    assert worse_than(by_seed(0.97, 0.98, 0.99), by_seed(0.98, 0.99, 1.0), "min").p == pytest.approx(
        stats.ttest_ind([0.98, 0.99, 1.0], [0.97, 0.98, 0.99], equal_var=False, alternative="greater").pvalue
    )


def test_one_seed_gives_no_test():
    assert worse_than({1: 0.1}, {1: 0.9}, "min") is None
    assert worse_than({1: 0.1, 2: 0.2}, {1: 0.9}, "min") is None


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_the_detectable_difference_is_detected_so_often():
    """By simulation: samples with just this true difference are called worse in `POWER` of all cases."""
    numpy = pytest.importorskip("numpy")
    rng = numpy.random.default_rng(0)
    deviation, count, alpha = 0.3, 4, 0.025
    # Differences whose spread is exactly the deviation, for which the detectable difference is then meant.
    values = numpy.array([-1.0, 1.0, -1.0, 1.0]) * deviation * math.sqrt(3 / 4)
    found = worse_than(by_seed(*[0.0] * count), by_seed(*values.tolist()), "min")
    assert spread(values.tolist()) == pytest.approx(deviation)
    shift = found.detectable(alpha)
    samples = rng.normal(shift, deviation, (20_000, count))
    called = stats.ttest_1samp(samples, 0, axis=1, alternative="greater").pvalue <= alpha
    assert called.mean() == pytest.approx(POWER, abs=0.02)
    assert found.detectable(0.05) < shift


# ---------------------------------------------------------------------- what is typed


def test_seeds_are_a_number_or_a_list():
    assert read_seeds("3") == (1, 2, 3)
    assert read_seeds("11,12,13") == (11, 12, 13)
    assert read_seeds(" 7 ,") == (7,)
    for text in ("0", "-1", "a", "1,,2", "1.5", "", "1,1", "1234", "99999999999,1", "4294967296,", "1..3"):
        with pytest.raises(ConfigError, match="seed"):
            read_seeds(text)
    with pytest.raises(ConfigError, match="--seeds 1234,"):
        read_seeds("1234")


def test_precisions_are_names_the_reference_first():
    assert read_precisions("fp32, bf16") == ("fp32", "bf16")
    with pytest.raises(ConfigError, match=r"'bf61' is unknown.*Did you mean bf16"):
        read_precisions("fp32,bf61")
    for text in ("fp32", "fp32,fp32", "fp32,auto", "", "fp32,,bf16"):
        with pytest.raises(ConfigError, match="--precisions"):
            read_precisions(text)


def test_the_metric_and_its_direction():
    watched = {"early_stop_metric": "accuracy", "early_stop_mode": "max"}
    assert choose_metric(None, None, {}) == Metric("loss", "min", False)
    assert choose_metric(None, None, watched) == Metric("accuracy", "max", True)
    assert choose_metric("loss", None, watched) == Metric("loss", "min", True)
    assert choose_metric("valid.accuracy", None, watched) == Metric("valid.accuracy", "max", True)
    assert choose_metric("test.loss", None, {}) == Metric("test.loss", "min", True)
    assert choose_metric("wer", "min", watched) == Metric("wer", "min", True)
    with pytest.raises(ConfigError, match="--mode max"):
        choose_metric("wer", None, watched)


# ---------------------------------------------------------------------- what a run left


def write_run(folder, losses, metrics=None, best=None, memory=None, stage="valid", seconds=0.5, header=1):
    """Files as a run leaves them: two epochs of equally many updates, and one stage of another kind at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    half = max(1, len(losses) // 2)
    records = [{"kind": "header", "schema_version": header}]
    for index, loss in enumerate(losses):
        epoch, step = divmod(index, half)
        records.append(
            {
                "kind": "step",
                "stage": "train",
                "epoch": epoch + 1,
                "step": step + 1,
                "loss": loss,
                "skipped": False,
                "seconds": (step + 1) * seconds,
                "memory_bytes": None,
            }
        )
    records.append({"kind": "stage", "stage": "train", "epoch": 2, "loss": losses[-1], "metrics": {}})
    records.append({"kind": "stage", "stage": stage, "epoch": 2, "loss": 0.5, "metrics": metrics or {}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"best": best, "peak_memory_bytes": memory, "peak_memory_of": "device"}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def read(folder, message="", precision="fp32", seed=1):
    return read_outcome(precision, seed, folder, folder, message)


def test_what_is_read_of_a_run(tmp_path):
    outcome = read(write_run(tmp_path, [3.0, "nan", 2.0, 1.0], {"wer": 0.25}, {"wer": 0.2, "epoch": 1}, 123))
    assert outcome.losses[0] == 3.0 and math.isnan(outcome.losses[1])
    assert outcome.final("valid") == {"loss": 0.5, "wer": 0.25} and outcome.final("best")["wer"] == 0.2
    assert outcome.final("train") == {"loss": 1.0} and outcome.final("test") == {}
    assert (outcome.memory_bytes, outcome.memory_of) == (123, "device")
    assert outcome.step_seconds == pytest.approx(0.5) and outcome.finished


def test_the_last_record_of_a_step_counts_as_after_a_resume(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [{"kind": "step", "stage": "train", "epoch": 1, "step": step, "loss": 1.0} for step in (1, 2, 3)]
    lines += [{"kind": "step", "stage": "train", "epoch": 1, "step": step, "loss": 2.0} for step in (3, 4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "step", "sta')
    steps, stages = read_records(file)
    assert [step.loss for step in steps] == [1.0, 1.0, 2.0, 2.0]
    assert stages == []


def test_time_per_update_is_the_median_after_the_warm_up(subtests, tmp_path):
    for seconds, median in [
        ([[50.0, *(50.0 + 0.1 * step for step in range(1, 20))], [7.0, 7.1]], 0.1),
        ([[50.0, 50.1, 50.4]], 0.2),  # the first tenth is left out, one update at least
        ([[5.0], [7.0]], 7.0),  # the clock begins anew with each epoch
        ([[5.0]], None),
        ([[3.0, "nan", 2.0]], None),
    ]:
        with subtests.test(seconds=seconds):
            steps = [
                {"kind": "step", "stage": "train", "epoch": epoch, "step": step, "seconds": value}
                for epoch, values in enumerate(seconds)
                for step, value in enumerate(values)
            ]
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
            assert read(tmp_path).step_seconds == (None if median is None else pytest.approx(median))


def test_damaged_files_are_told_or_left_out(subtests, tmp_path):
    for damage in ["null", "[1]", '"x"', "{", "12"]:
        with subtests.test(damage=damage):
            write_run(tmp_path, [1.0, 2.0])
            (tmp_path / "metrics.jsonl").write_text(f'{damage}\n{{"kind": "step", "epoch": [1], "loss": {{}}}}\n')
            assert len(read(tmp_path).losses) == 1 and math.isnan(read(tmp_path).losses[0])
            (tmp_path / "summary.json").write_text(damage)
            if damage == "{":
                with pytest.raises(ConfigError, match=r"summary\.json"):
                    read(tmp_path)
            else:
                assert read(tmp_path).memory_bytes is None


def test_records_of_another_version_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="version 99"):
        read(write_run(tmp_path, [1.0], header=99))


def test_a_run_that_left_nothing_has_nothing(tmp_path):
    outcome = read(tmp_path, "killed by SIGKILL")
    assert (len(outcome.losses), outcome.step_seconds, outcome.memory_bytes, outcome.finished) == (0, None, None, False)


def test_why_a_run_failed(subtests):
    for said, status, kind, message in [
        (
            "Traceback (most recent call last):\n  File ...\namp_recipes.errors.NonfiniteError: loss is nan\n  in x\n",
            1,
            "NonfiniteError",
            "NonfiniteError: loss is nan",
        ),
        (
            "epoch 1: 10%\repoch 1: 100%\nRuntimeError: \"addmm\" not implemented for 'Half'\n",
            1,
            "RuntimeError",
            "RuntimeError: \"addmm\" not implemented for 'Half'",
        ),
        ("train.py: configs/x.yaml:3: wrong\n", 1, "", "exit status 1: train.py: configs/x.yaml:3: wrong"),
        ("", 3, "", "exit status 3"),
        ("anything", -9, "", "killed by SIGKILL (the machine may have run out of memory)"),
        ("KeyError\n", 1, "KeyError", "KeyError"),
        ("x\nValueError: \x1b[31mred\n", 1, "ValueError", "ValueError: \\x1b[31mred"),
    ]:
        with subtests.test(said=said):
            assert why_it_failed(EndedChild(status, 0.0, said)) == (kind, message)


# ---------------------------------------------------------------------- the verdict


@pytest.fixture
def plan(tmp_path):
    """Makes a plan of runs that need not be made. The YAML watches the accuracy."""
    (tmp_path / "train.py").touch()
    (tmp_path / "x.yaml").write_text("early_stop_metric: accuracy\nearly_stop_mode: max\nlr: 0.1\n")

    def make(precisions="fp32,bf16", seeds="3", options=(), metric=None, mode=None):
        return make_plan(
            tmp_path / "train.py", tmp_path / "x.yaml", options, precisions, seeds, tmp_path / "out", metric, mode
        )

    return make


def outcomes_of(plan, values, losses=lambda precision, seed: [seed + 1.0, 1.0, 0.5, 0.25], **files):
    """Outcomes read from files that were written with these accuracies; text: why the run did not finish."""
    found = []
    for run_ in plan.runs:
        value = values[run_.precision][run_.seed - 1]
        write_run(run_.folder, losses(run_.precision, run_.seed), {"accuracy": value}, **files)
        failed = value if isinstance(value, str) and value not in ("nan", "inf") else ""
        found.append(read(run_.folder, failed, run_.precision, run_.seed))
    return found


def verdicts(plan, values, **more):
    found = compared(plan, outcomes_of(plan, values, **more), "amp-recipes compare ...")
    return {entry["precision"]: entry for entry in found["precisions"]}, found


def test_an_effect_that_is_there_is_found_and_noise_is_not(plan):
    values = {"fp32": [0.90, 0.91, 0.92], "bf16": [0.91, 0.90, 0.915], "fp16": [0.80, 0.815, 0.82]}
    entries, found = verdicts(plan("fp32,bf16,fp16"), values)
    assert [entries[name]["verdict"] for name in entries] == ["reference", "no different", "worse"]
    assert (found["worse"], found["undecided"]) == (["fp16"], [])
    p = [stats.ttest_rel(values[name], values["fp32"], alternative="less").pvalue for name in ("bf16", "fp16")]
    assert [entries[name]["test"]["p"] for name in ("bf16", "fp16")] == pytest.approx(p)
    assert entries["fp16"]["test"]["p_holm"] == pytest.approx(2 * min(p))
    assert entries["fp16"]["test"]["worse_by"] == pytest.approx(0.91 - sum(values["fp16"]) / 3)
    assert "0.098 lower" in entries["fp16"]["reason"] and "paired t-test" in entries["fp16"]["reason"]
    assert "within seed noise" in entries["bf16"]["headline"] and "80 % of such" in entries["bf16"]["headline"]


def test_with_the_other_direction_the_verdict_is_another(plan):
    values = {"fp32": [0.90, 0.91, 0.92], "bf16": [0.80, 0.815, 0.82]}
    assert verdicts(plan(), values)[0]["bf16"]["verdict"] == "worse"
    mistaken = plan(options=["--early_stop_mode=min"])
    assert verdicts(mistaken, values)[0]["bf16"]["verdict"] == "no different"
    assert verdicts(plan(metric="accuracy", mode="min"), values)[0]["bf16"]["verdict"] == "no different"


def test_the_precisions_share_the_chance_of_a_mistake(plan):
    """A p between alpha / 2 and alpha is enough for one precision, and not for one of two."""
    fp32, low = [0.90, 0.91, 0.92], [0.87, 0.90, 0.885]
    p = stats.ttest_rel(low, fp32, alternative="less").pvalue
    assert ALPHA / 2 < p < ALPHA
    assert verdicts(plan(), {"fp32": fp32, "bf16": low})[0]["bf16"]["verdict"] == "worse"
    both, _ = verdicts(plan("fp32,bf16,fp16"), {"fp32": fp32, "bf16": low, "fp16": fp32})
    assert both["bf16"]["verdict"] == "no different"
    tested = worse_than(by_seed(*fp32), by_seed(*low), "max")
    assert both["bf16"]["test"]["detectable"] == pytest.approx(tested.detectable(ALPHA / 2))


@pytest.mark.parametrize("comparisons", [200, pytest.param(500, marks=pytest.mark.extended)])
def test_false_alarms_are_as_rare_as_alpha_says(comparisons):
    """Comparisons of two precisions without any difference, whose seeds hang together a little."""
    rng = random.Random(1)
    alarms = 0
    for _ in range(comparisons):
        seeds = [rng.gauss(0, 1) for _ in range(3)]
        samples = [by_seed(*(0.5 * seed + rng.gauss(0, 1) for seed in seeds)) for _ in range(3)]
        p = [worse_than(samples[0], sample, "min").p for sample in samples[1:]]
        alarms += min(holm(p)) <= ALPHA
    assert 0 < alarms / comparisons <= ALPHA + 0.02


def test_runs_that_did_not_finish_make_a_precision_worse(plan):
    values = {"fp32": [0.9, 0.91, 0.92], "fp16": ["NonfiniteError: it diverged", 0.92, "nan"]}
    entries, found = verdicts(plan("fp32,fp16"), values)
    assert entries["fp16"]["verdict"] == "worse" and found["worse"] == ["fp16"]
    assert entries["fp16"]["reason"] == "2 of 3 runs did not finish (NonfiniteError: it diverged)"
    assert [run_["finished"] for run_ in entries["fp16"]["runs"]] == [False, True, False]
    assert entries["fp16"]["runs"][2]["message"] == "its valid accuracy is nan"
    text = as_markdown(found)
    assert "fp16 seed 1 did not finish: NonfiniteError: it diverged" in text and "1 of 3" in text


def test_a_recipe_that_does_not_finish_at_the_reference_either_is_judged_by_those_that_do(plan):
    values = {"fp32": ["diverged", 0.91, 0.92, 0.91], "fp16": [0.90, 0.92, "diverged", 0.91]}
    entries, found = verdicts(plan("fp32,fp16", "4"), values)
    assert entries["fp16"]["verdict"] == "no different" and WELCH in entries["fp16"]["reason"]
    assert "The reference run fp32 seed 1 did not finish: diverged" in found["notes"]
    entries, found = verdicts(plan("fp32,fp16"), {"fp32": ["diverged", "diverged", 0.9], "fp16": [0.9, 0.9, 0.8]})
    assert (
        entries["fp16"]["verdict"] == "no verdict" and "1 of fp32 and 3 of fp16 finished" in entries["fp16"]["reason"]
    )
    entries, found = verdicts(plan("fp32,fp16", "1"), {"fp32": ["diverged"], "fp16": ["diverged"]})
    assert entries["fp16"]["verdict"] == "no verdict"


def test_one_seed_gives_no_verdict_and_says_why(plan):
    entries, found = verdicts(plan(seeds="1"), {"fp32": [0.9], "bf16": [0.1]})
    assert entries["bf16"]["verdict"] == "no verdict" and "--seeds 3" in entries["bf16"]["reason"]
    assert (found["worse"], found["undecided"]) == ([], ["bf16"])
    assert entries["bf16"]["test"] is None and entries["bf16"]["spread"] is None
    assert "no verdict: seed noise cannot be estimated" in as_markdown(found)


def test_seeds_that_change_nothing_are_one_run(plan):
    values = {"fp32": [0.9, 0.9, 0.9], "bf16": [0.8, 0.8, 0.8]}
    entries, _ = verdicts(plan(), values, losses=lambda precision, seed: [1.0, 0.5, 0.25, 0.125])
    assert entries["bf16"]["verdict"] == "no verdict"
    assert "all seeds give the same losses in fp32, bf16" in entries["bf16"]["reason"]


def test_a_metric_at_its_ceiling_still_shows_a_collapse(plan):
    entries, _ = verdicts(plan(), {"fp32": [1.0, 1.0, 1.0], "bf16": [0.1, 0.1, 0.1]})
    assert entries["bf16"]["verdict"] == "worse" and "the same difference at every seed" in entries["bf16"]["reason"]
    entries, _ = verdicts(plan(), {"fp32": [1.0, 1.0, 1.0], "bf16": [1.0, 1.0, 1.0]})
    assert entries["bf16"]["verdict"] == "no different" and "the same on average" in entries["bf16"]["reason"]


def test_where_the_final_metric_is_looked_up(plan):
    runs = outcomes_of(plan(), {"fp32": [0.9] * 3, "bf16": [0.8] * 3}, best={"accuracy": 0.95, "epoch": 1})
    assert find_place(Metric("accuracy", "max", True), runs) == "best"
    assert find_place(Metric("valid.accuracy", "max", True), runs) == "valid"
    assert find_place(Metric("loss", "min", False), runs) == "valid"
    with pytest.raises(ConfigError, match=r"--metric wer.*valid\.accuracy"):
        find_place(Metric("wer", "min", True), runs)
    runs = outcomes_of(plan(), {"fp32": [0.9] * 3, "bf16": [0.8] * 3}, stage="test")
    assert find_place(Metric("accuracy", "max", True), runs) == "test"
    assert find_place(Metric("loss", "min", False), runs) == "train"


def test_times_and_memory_are_ratios_to_the_reference(plan):
    made = plan()
    outcomes = outcomes_of(made, {"fp32": [0.9] * 3, "bf16": [0.8] * 3}, memory=1000)
    for outcome in outcomes:
        if outcome.precision == "bf16":
            outcome.step_seconds, outcome.memory_bytes = 0.125, 800
    found = compared(made, outcomes, "")
    assert [entry["step_ratio"] for entry in found["precisions"]] == [1.0, pytest.approx(0.25)]
    assert [entry["memory_ratio"] for entry in found["precisions"]] == [1.0, pytest.approx(0.8)]


def test_curves_are_averaged_to_as_many_points_as_a_picture_shows(plan):
    losses = [float(index) for index in range(1000)]
    found = verdicts(
        plan(),
        {"fp32": [0.9] * 3, "bf16": [0.8] * 3},
        losses=lambda precision, seed: losses if precision == "fp32" else [*losses[:500], *["nan"] * 3],
    )[1]
    curves = found["curves"]["loss"]
    assert len(curves["updates"]) == CURVE_POINTS and curves["updates"][-1] == 1000
    (first, *_), (short, *_) = curves["by_precision"]["fp32"], curves["by_precision"]["bf16"]
    assert first[:2] == [2.0, 7.0] and first[-1] == 997.0
    assert short[:2] == [2.0, 7.0] and short[99] == 497.0 and set(short[100:]) == {None}
    assert found["curves"]["metric"]["epochs"] == [2]


def test_runs_of_different_code_or_machines_are_noted(plan):
    made = plan()
    outcomes = outcomes_of(made, {"fp32": [0.9, 0.8, 0.7], "bf16": [0.9, 0.8, 0.71]})
    outcomes[0].script = "other"
    outcomes[1].environment = {"packages": {"torch": "2.13.0"}, "git": None}
    outcomes[2].environment = {"packages": {"torch": "2.12.0"}, "git": None}
    notes = "\n".join(compared(made, outcomes, "")["notes"])
    assert "train.py changed between the runs" in notes and "'2.12.0', '2.13.0'" in notes and "git" not in notes


# ---------------------------------------------------------------------- the runs

# Stands for a recipe: notes each start and leaves files as a run does. The accuracy says how it goes.
RECIPE = """
import json, os, signal, sys, time
from pathlib import Path

given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:] if "=" in word)
folder, seed, precision = Path(given["output_folder"]), int(given["seed"]), given["precision"]
with open(folder / "starts.txt", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
act = given.get("act", "")
if act == f"diverge in {precision}" and seed == 2:
    sys.exit("Traceback:\\namp_recipes.errors.NonfiniteError: 3 updates in a row were nonfinite")
if act == f"fail in {precision}":
    sys.exit("Traceback:\\nRuntimeError: not implemented for 'Half'")
if act == f"wait in {precision}" and seed == 2 and not (folder / "ready").exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "pid").rename(folder / "ready")
    time.sleep(600)  # until a signal comes
if act == "mute":
    sys.exit(0)
loss = 1 + 0.1 * seed
if precision != "fp32":
    loss += float(given.get("cost", 0)) * (1 + 0.1 * seed) + 0.01 * (-1) ** seed
lines = [{"kind": "header", "schema_version": 1}]
for step in range(1, 11):
    lines.append({"kind": "step", "stage": "train", "epoch": 1, "step": step, "loss": loss + 1 / step,
                  "seconds": 0.01 * step, "skipped": False})
lines += [{"kind": "stage", "stage": stage, "epoch": 1, "loss": loss, "metrics": {"wer": loss / 10}}
          for stage in ("train", "valid")]
target = folder / "debug" if given.get("debug") == "true" else folder
target.mkdir(exist_ok=True)
(target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(target / "summary.json").write_text(json.dumps({"best": None, "peak_memory_bytes": 1 << 20}))
"""
YAML = "lr: 0.1\nact: null\ncost: 0\noutput_folder: results/<nothing>\nsteps: [1, 2]\n"


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "train.py").write_text(RECIPE)
    (folder / "x.yaml").write_text(YAML)
    return folder


@pytest.fixture
def compare(recipe, tmp_path, monkeypatch):
    """Calls the command with options; its exit status. The folder is tmp_path/out. No picture, which takes its time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "draw_comparison", lambda folder: None)

    def call(*words, to="out"):
        words = [str(recipe / "train.py"), str(recipe / "x.yaml"), *words, *(["--to", to] if to else [])]
        return cli.main(["compare", *words])

    return call


def starts(tmp_path):
    return {
        f"{file.parent.parent.name} {file.parent.name}": len(file.read_text().splitlines())
        for file in sorted((tmp_path / "out").glob("*/*/starts.txt"))
    }


def found_in(tmp_path, folder="out"):
    return json.loads((tmp_path / folder / "compare.json").read_text())


def test_every_precision_runs_with_every_seed_in_its_folder(compare, tmp_path, capsys):
    assert compare("--precisions", "fp32,bf16", "--seeds", "2", "--lr=0.2") == 0
    assert starts(tmp_path) == {"bf16 seed_1": 1, "bf16 seed_2": 1, "fp32 seed_1": 1, "fp32 seed_2": 1}
    words = (tmp_path / "out" / "bf16" / "seed_2" / "starts.txt").read_text().split()
    assert {"--lr=0.2", "--precision=bf16", "--seed=2", "--output_folder=out/bf16/seed_2"} < set(words)
    output = capsys.readouterr().out
    assert "4/4  bf16 seed 2  finished in" in output and "no different from fp32 within seed noise" in output
    first, second, _, last = re.findall(r"^ +\d/4 .*", output, re.MULTILINE)  # a warning may stand among them
    assert "; about" in first and "left, bf16 not measured yet" in first
    assert "not measured" not in second and "left" not in last
    assert "| bf16 | no different | 1.15" in output
    text = (tmp_path / "out" / "compare.md").read_text()
    assert text.startswith("# bf16 compared with fp32\n\n    amp-recipes compare ") and "-- --lr=0.2\n" in text


def test_the_json_has_the_layout_that_is_promised(compare, tmp_path, capsys):
    assert compare("--seeds", "2", "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)  # nothing else stands there
    assert "finished in" in printed.err
    assert found == found_in(tmp_path)
    assert set(found) == {
        "schema_version",
        "command",
        "script",
        "yaml",
        "options",
        "reference",
        "seeds",
        "metric",
        "eval_precision",
        "alpha",
        "power",
        "precisions",
        "curves",
        "worse",
        "undecided",
        "notes",
    }
    assert found["metric"] == {"name": "loss", "place": "valid", "mode": "min"}
    assert (found["reference"], found["seeds"], found["alpha"]) == ("fp32", [1, 2], 0.05)
    reference, low = found["precisions"]
    assert set(low) == {
        "precision",
        "verdict",
        "headline",
        "reason",
        "mean",
        "spread",
        "test",
        "step_seconds",
        "step_ratio",
        "memory_bytes",
        "memory_ratio",
        "memory_of",
        "runs",
    }
    assert set(low["test"]) == {"name", "worse_by", "degrees_of_freedom", "p", "p_holm", "detectable"}
    assert reference["test"] is None and low["test"]["name"] == PAIRED
    assert low["runs"][1] == {
        "seed": 2,
        "folder": "out/bf16/seed_2",
        "finished": True,
        "message": "",
        "value": pytest.approx(1.21),
        "updates": 10,
        "skipped": 0,
        "step_seconds": pytest.approx(0.01),
        "memory_bytes": 1 << 20,
    }
    assert set(found["curves"]["loss"]) == {"updates", "by_precision"}
    assert set(found["curves"]["metric"]) == {"stage", "epochs", "by_precision"}


def test_a_worse_precision_is_exit_status_one(compare, tmp_path, capsys):
    assert compare("--seeds", "3", "--cost=0.5", to=None) == 1
    assert found_in(tmp_path, "results/compare/tiny")["worse"] == ["bf16"]
    assert "bf16: worse than fp32: valid loss is 0.6 higher" in capsys.readouterr().out


def test_finished_runs_are_not_run_again_and_more_can_be_added(compare, tmp_path, capsys):
    assert compare("--seeds", "2") == 0
    assert compare("--seeds", "3", "--precisions", "fp32,bf16,fp16", "--noprogressbar") == 0
    assert len(starts(tmp_path)) == 9 and set(starts(tmp_path).values()) == {1}
    assert "fp32 seed 1  finished in" in capsys.readouterr().out


def test_a_run_that_diverges_is_a_result_and_not_tried_again(compare, tmp_path, capsys):
    words = ("--seeds", "2", "--precisions", "fp32,bf16,fp16", "--act=diverge in fp16")
    assert compare(*words) == 1
    assert compare(*words) == 1
    assert set(starts(tmp_path).values()) == {1}
    found = found_in(tmp_path)
    assert found["worse"] == ["fp16"]
    message = "NonfiniteError: 3 updates in a row were nonfinite"
    assert found["precisions"][2]["headline"] == f"fp16: worse than fp32: 1 of 2 runs did not finish ({message})."
    output = capsys.readouterr().out
    assert f"did not finish: {message}" in output and ", in an earlier call" in output


def test_a_run_that_fails_otherwise_is_tried_again_with_the_next_command(compare, tmp_path):
    assert compare("--seeds", "2", "--precisions", "fp32,fp16", "--act=fail in fp16") == 1
    assert found_in(tmp_path)["precisions"][1]["runs"][0]["message"] == "RuntimeError: not implemented for 'Half'"
    assert compare("--seeds", "2", "--precisions", "fp32,fp16", "--act=fail in fp16") == 1
    assert starts(tmp_path) == {"fp16 seed_1": 2, "fp16 seed_2": 2, "fp32 seed_1": 1, "fp32 seed_2": 1}


def test_a_reference_that_fails_at_once_ends_the_comparison(compare, tmp_path, capsys):
    assert compare("--act=fail in fp32") == 2
    assert starts(tmp_path) == {"fp32 seed_1": 1}
    error = capsys.readouterr().err
    assert "The reference run (fp32 seed 1) did not finish: RuntimeError: not implemented" in error
    assert "out/fp32/seed_1/output.txt" in error


def test_other_settings_are_not_mixed_with_what_was_run(compare, recipe, tmp_path, capsys):
    assert compare("--seeds", "2") == 0
    assert compare("--seeds", "2", "--lr=0.2") == 2
    assert "4 finished runs with other settings (saved -> now):\n  lr: 0.1 -> 0.2\nGive another folder with --to" in (
        capsys.readouterr().err
    )
    (recipe / "x.yaml").write_text(YAML.replace("[1, 2]", "[1, 3]"))
    assert compare("--seeds", "2") == 2
    assert "steps: [1, 2] -> [1, 3]" in capsys.readouterr().err
    (recipe / "x.yaml").write_text(YAML + "# a comment, and what changes no result\nckpt_interval_steps: 5\n")
    assert compare("--seeds", "2", "--log_interval_steps=1") == 0
    assert compare("--seeds", "2", "--max_grad_norm=1") == 2
    assert "max_grad_norm: 5.0 -> 1" in capsys.readouterr().err.replace("(absent)", "5.0")
    assert set(starts(tmp_path).values()) == {1}


def test_an_unfinished_run_of_other_settings_is_set_aside(compare, tmp_path, capsys):
    assert compare("--seeds", "2", "--act=fail in bf16") == 1
    for run_ in ("seed_1", "seed_2"):  # what did finish would be refused
        record = tmp_path / "out" / "fp32" / run_ / "compare_run.json"
        record.unlink()
    assert compare("--seeds", "2") == 0
    assert "an unfinished run with other settings was renamed to seed_1.aside_1" in capsys.readouterr().out
    assert (tmp_path / "out" / "bf16" / "seed_1.aside_1" / "starts.txt").exists()
    assert starts(tmp_path)["bf16 seed_1"] == 1


def test_a_changed_script_is_noted(compare, recipe, tmp_path):
    assert compare("--seeds", "2") == 0
    (recipe / "train.py").write_text(RECIPE + "# changed\n")
    assert compare("--seeds", "2", "--precisions", "fp32,bf16,fp16") == 0
    assert "train.py changed between the runs" in found_in(tmp_path)["notes"][0]


@pytest.mark.parametrize("damage", ["{", "[]", '{"schema_version": 9}', '{"schema_version": 1, "settings": 3}'])
def test_a_damaged_record_is_told_or_run_anew(compare, tmp_path, damage):
    assert compare("--seeds", "2") == 0
    (tmp_path / "out" / "bf16" / "seed_2" / "compare_run.json").write_text(damage)
    assert compare("--seeds", "2") == (2 if damage == "{" else 0)


def test_a_metric_that_is_not_there_is_told_after_the_first_run(compare, tmp_path, capsys):
    assert compare("--metric", "accuracy", "--mode", "max") == 2
    assert starts(tmp_path) == {"fp32 seed_1": 1}
    assert "expected one of train.loss, train.wer, valid.loss, valid.wer" in capsys.readouterr().err
    assert compare("--metric", "wer", "--mode", "min") == 0
    assert found_in(tmp_path)["metric"] == {"name": "wer", "place": "valid", "mode": "min"}


def test_mistakes_are_told_with_status_two(subtests, compare, tmp_path, capsys):
    for words, message in [
        (["--sede=3"], "sede"),
        (["--precision=bf16"], "--precision is given to each run by compare: use --precisions"),
        (["--seed=3"], "use --seeds"),
        (["--output_folder=x"], "use --to"),
        (["--check"], "leave out --check"),
        (["--test_only"], "leave out test_only"),
        (["--precisions", "fp32"], "give two or more"),
        (["--seeds", "x"], "a number of seeds"),
        (["--metric", "wer"], "--mode max"),
        (["--act=mute"], "wrote no records"),
    ]:
        with subtests.test(words=words):
            assert compare(*words) == 2
            assert message in capsys.readouterr().err
            assert set(starts(tmp_path)) <= {"fp32 seed_1"}


def test_a_script_that_is_not_there_and_torchrun_are_mistakes(compare, recipe, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert compare() == 2 and "torchrun" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    (recipe / "train.py").unlink()
    assert compare() == 2 and "is not a file" in capsys.readouterr().err


def test_a_run_that_only_tries_out_has_its_records_elsewhere(compare, tmp_path):
    assert compare("--seeds", "2", "--debug=true") == 0
    assert found_in(tmp_path)["precisions"][1]["runs"][0]["updates"] == 10


def test_one_seed_ends_with_status_two(compare, capsys):
    assert compare("--seeds", "7,") == 2
    assert "bf16: no verdict: seed noise cannot be estimated from 1 seed" in capsys.readouterr().out


def test_without_scipy_nothing_is_run(compare, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert compare() == 2
    assert "pip install 'amp-recipes[report]'" in capsys.readouterr().err and starts(tmp_path) == {}


def test_without_matplotlib_the_numbers_are_written(compare, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "draw_comparison", draw_comparison)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare("--seeds", "2") == 0
    assert "pip install 'amp-recipes[report]' draws the page" in capsys.readouterr().out
    assert found_in(tmp_path)["worse"] == [] and not (tmp_path / "out" / "compare.png").exists()


def test_the_picture_is_drawn(compare, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'amp-recipes[report]'")
    monkeypatch.setattr(command, "draw_comparison", draw_comparison)
    assert compare("--seeds", "2", "--precisions", "fp32,bf16,fp16", "--act=diverge in fp16") == 1
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "drawn in compare.png" in capsys.readouterr().out


# A process that compares, for tests that end it.
DRIVER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from amp_recipes.commands.cli import main
sys.exit(main(["compare", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda it: it.name)
def test_a_comparison_that_is_ended_goes_on(compare, recipe, tmp_path, capsys, signum):
    words = ["--seeds", "2", "--act=wait in bf16"]
    arguments = (recipe / "train.py", recipe / "x.yaml", *words, "--to", "out")
    process = Program("-c", DRIVER, *arguments, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True)
    waits = tmp_path / "out" / "bf16" / "seed_2" / "ready"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not waits.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    assert compare(*words) == 2 and "is in use by pid" in capsys.readouterr().err  # two do not share a folder
    process.send_signal(signum)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
    assert signum == signal.SIGKILL or "run the same command again" in output
    assert not (tmp_path / "out" / "compare.json").exists()
    assert compare(*words) == 0
    if signum == signal.SIGKILL:
        os.kill(int(waits.read_text()), signal.SIGKILL)  # the run has lived on
    assert starts(tmp_path) == {"bf16 seed_1": 1, "bf16 seed_2": 2, "fp32 seed_1": 1, "fp32 seed_2": 1}


# ---------------------------------------------------------------------- a whole recipe

SCRIPT = """
import torch
from torch import nn
from amp_recipes import Brain, load_hparams, parse_arguments

class Tiny(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0] * self.hparams.factor)

    def compute_objectives(self, predictions, batch, stage):
        return ((predictions.float() - batch[0]) ** 2).mean()

def main():
    file, run_opts, overrides = parse_arguments()
    hparams = load_hparams(file, overrides)
    points = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 160).reshape(40, 4))
    brain = Tiny({"model": nn.Linear(4, 4)}, lambda weights: torch.optim.SGD(weights, 1e-9), hparams, run_opts)
    kwargs = {"batch_size": 4, "shuffle": True}
    brain.fit(range(1, 3), points, points, train_loader_kwargs=kwargs, valid_loader_kwargs={"batch_size": 4})

if __name__ == "__main__":
    main()
"""


@pytest.mark.extended
def test_a_whole_recipe_of_which_fp16_overflows(compare, recipe, tmp_path, capsys):
    """Inputs of 1e6 are inf in fp16 at any loss scale, and finite in fp32."""
    (recipe / "train.py").write_text(SCRIPT)
    (recipe / "x.yaml").write_text("factor: 1.0e6\nmin_scale: 16384\nfp32_modules: []\n")
    words = ("--precisions", "fp32,fp16", "--seeds", "2", "--device=cpu")
    status = compare(*words)
    found, output = found_in(tmp_path), capsys.readouterr().out
    assert status == 1, output
    fp32, fp16 = found["precisions"]
    assert fp16["verdict"] == "worse", output
    assert fp16["reason"].startswith("2 of 2 runs did not finish (exit status 1: train.py: train epoch 1, batch 3: 3")
    assert fp16["runs"][0]["skipped"] == fp16["runs"][0]["updates"] == 3
    assert fp32["step_seconds"] > 0 and fp32["memory_of"] == "process" and fp32["memory_bytes"] > 1 << 20
    assert fp32["runs"][0]["value"] != fp32["runs"][1]["value"]
    assert [len(runs) for runs in found["curves"]["loss"]["by_precision"].values()] == [2, 2]
    assert found["curves"]["loss"]["updates"][-1] == 20 and found["curves"]["metric"]["epochs"] == [1, 2]
    assert compare(*words) == 1 and ", in an earlier call" in capsys.readouterr().out
