"""`make gpu` goes on where a step fails, ends in time, says what it left out, and can be rehearsed without a GPU."""

import argparse
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from programs import run_python
from repository import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.append(str(BENCHMARKS))
import collect_wheels  # noqa: E402
import gpu  # noqa: E402

sys.path.remove(str(BENCHMARKS))
RESULT = {"what": "speed", "value": "7", "holds": None, "note": ""}
SAYS = f"print({json.dumps(RESULT)!r}, flush=True)"
MACHINE = 'print(\'{"what": "machine", "machine": "a machine", "software": "torch 0"}\')'


@pytest.fixture
def options(tmp_path, monkeypatch) -> argparse.Namespace:
    monkeypatch.setattr(gpu, "machine_step", lambda options: gpu.Step("machine", ("-S", "-c", MACHINE), 9))
    given = gpu.parse(["--device=cpu", "--small", f"--out={tmp_path / 'out'}"])
    given.scratch = tmp_path
    given.out.mkdir()
    return given


def run(options, *steps, part: str = "right") -> tuple[bool, list[dict], str]:
    """Whether all is well, the lines of that part, and the page."""
    good = gpu.run_part(part, steps, options, {})
    lines = gpu.read_lines(options.out / "gpu.jsonl")
    return good, [line for line in lines if line["part"] == part], (options.out / "gpu.md").read_text()


def step(name: str, code: str, seconds: float = 60) -> gpu.Step:
    return gpu.Step(name, ("-S", "-c", code), seconds)


def ends(lines) -> dict[str, str]:
    return {line["step"]: line["state"] for line in lines if line["kind"] == "step"}


def test_a_step_that_fails_says_why_and_the_others_go_on(options):
    good, lines, page = run(options, step("bad", f"{SAYS}; raise ValueError('broken')"), step("good", SAYS))
    assert not good
    assert ends(lines) == {"bad": "failed", "good": "done"}
    assert [line["value"] for line in lines if line["kind"] == "result"] == ["7", "7"]
    assert "- bad: failed: exit status 1: ValueError: broken" in page


def test_a_step_that_lacks_a_package_is_no_failure(options):
    good, lines, _ = run(options, step("speech", "import soundfile_of_nobody"))
    assert good and ends(lines) == {"speech": "not here"}


def test_a_step_that_cannot_be_run_on_the_device_says_why(options):
    good, lines, page = run(options, replace(step("groups", "1 / 0"), lacking="it has no groups"), step("next", SAYS))
    assert good and ends(lines) == {"groups": "not here", "next": "done"}
    assert "- groups: not here: it has no groups" in page


@pytest.mark.parametrize(("device", "reason"), [("simulated:1", "gloo takes no tensors of simulated:1"), ("cpu", "")])
def test_groups_of_processes_are_for_devices_that_gloo_takes(options, device, reason):
    options.device = device
    (groups,) = (each for each in gpu.fast_steps(options) if each.name == "distributed")
    assert groups.lacking == reason


def test_torch_finds_the_simulated_device_as_one_out_of_its_tree(options, tmp_path):
    options.device, options.wheels = "simulated", None
    paths = gpu.environment_of(options)["PYTHONPATH"].split(os.pathsep)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "simulated")])
    (point,) = found.entry_points
    assert (point.group, point.name, point.attr) == ("torch.backends", "simulated", "load")
    assert importlib.machinery.PathFinder.find_spec(point.module, paths) is not None
    assert str(tmp_path / "simulated") in paths


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(options, tmp_path):
    late = tmp_path / "late"
    child = f"import time; time.sleep(0.8); open({str(late)!r}, 'w')"
    code = f"{SAYS}; import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    good, lines, page = run(options, step("slow", code, 0.5), step("next", SAYS))
    assert not good
    assert ends(lines) == {"slow": "timed out", "next": "done"}
    assert "slow: timed out: had not ended after 0 s, its own time" in page
    assert [line["step"] for line in lines if line["kind"] == "result"] == ["slow", "next"]
    time.sleep(0.8)
    assert not late.exists()


def test_a_part_whose_time_is_over_says_what_it_left_out(options, monkeypatch):
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.2)
    options.minutes = 0.5 / 60
    good, lines, page = run(options, step("slow", "import time; time.sleep(9)"), step("never", SAYS))
    assert not good
    assert ends(lines) == {"slow": "timed out", "never": "left out"}
    assert "the part's time" in page and "- never: left out: the part's" in page


def test_what_must_hold_and_does_not_is_a_failure_and_stands_at_the_top(options):
    wrong = {**RESULT, "holds": False}
    good, _, page = run(options, step("bits", f"print({json.dumps(wrong)!r})"))
    assert not good
    assert page.index("- bits: speed: 7") < page.index("### bits")


def test_without_the_device_nothing_is_tried_and_results_stay(options, monkeypatch, capsys):
    run(options, step("one", SAYS))
    before = (options.out / "gpu.jsonl").read_text()
    monkeypatch.setattr(gpu, "machine_step", lambda options: step("machine", "raise SystemExit('no GPU')"))
    assert not gpu.run_part("right", [step("one", "print('nothing')")], options, {})
    assert (options.out / "gpu.jsonl").read_text() == before
    assert "the device cpu cannot be used: failed: exit status 1: no GPU" in capsys.readouterr().out


def test_results_of_another_machine_do_not_stay_under_the_new_one(options, monkeypatch):
    run(options, step("one", SAYS), step("two", SAYS))
    other = step("machine", MACHINE.replace("a machine", "another"))
    monkeypatch.setattr(gpu, "machine_step", lambda options: other)
    _, lines, page = run(options, step("one", SAYS))
    assert {line["step"] for line in lines if line["kind"] == "result"} == {"one"}
    assert "another" in page and "### two" not in page


def test_a_part_that_runs_again_takes_the_place_of_its_results_and_keeps_those_of_others(options):
    run(options, step("one", SAYS), step("two", SAYS))
    run(options, step("of another part", SAYS), part="fast")
    _, lines, page = run(options, step("one", "print('nothing')"))
    assert [line["step"] for line in lines if line["kind"] == "result"] == ["two"]
    assert "### of another part" in page and "### two" in page
    assert page.count("## right") == 1


def test_the_page_has_a_table_for_each_step():
    about = {"kind": "part", "device": "cuda", "small": False, "date": "2026-01-02", "command": "gpu.py"}
    own = {"part": "fast", "step": "saves"}
    lines = [
        {"part": "fast", **about, "machine": "H1", "software": "torch 3"},
        {**own, "kind": "result", "what": "first | second", "value": "3", "holds": True, "note": ""},
        {**own, "kind": "result", "what": "later", "value": "4", "holds": None, "note": "few"},
        {**own, "kind": "step", "state": "done", "seconds": 12.3, "note": ""},
    ]
    assert gpu.page(lines).splitlines()[4:] == [
        "## fast",
        "",
        "- Command: `gpu.py`",
        "- Date: 2026-01-02",
        "- Machine: H1 (`--device cuda`)",
        "- Software: torch 3",
        "",
        "Of what must hold, 1 do.",
        "",
        "### saves (done, 12 s)",
        "",
        "| what            | result    | note   |",
        "|-----------------|-----------|--------|",
        r"| first \| second | 3 (holds) |        |",
        "| later           | 4         | few    |",
    ]


def test_the_tables_of_another_benchmark_become_results(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Speed\n\ntext | with a bar\n\n## SGD\n\n| | fp32 | bf16 |\n| --- | ---: | --- |\n| Brain | 1 | 2 |\n"
    )
    assert [(row["what"], row["value"]) for row in gpu.rows_of(page)] == [
        ("SGD: Brain: fp32", "1"),
        ("SGD: Brain: bf16", "2"),
    ]


def test_a_rehearsal_writes_beside_no_result_of_a_gpu():
    results = BENCHMARKS / "results"
    assert gpu.parse([]).out == results
    for words in (["--device=cpu"], ["--small"], ["--device=simulated"]):
        assert results not in (gpu.parse(words).out, *gpu.parse(words).out.parents)


def test_each_step_has_its_script_and_its_limit(options):
    for part in gpu.PARTS:
        steps = gpu.steps(part, options)
        assert len({each.name for each in steps}) == len(steps)
        for each in steps:
            assert Path(each.words[0]).is_file(), each.name
            assert 0 < each.seconds <= 300


def test_wheels_are_found_before_what_is_installed(options, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    options.wheels = tmp_path / "wheels_to_unpack"
    options.wheels.mkdir()
    with zipfile.ZipFile(options.wheels / "tqdm-9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tqdm/__init__.py", "version = 9")
    paths = gpu.environment_of(options)["PYTHONPATH"].split(":")
    assert paths[0] == str(REPOSITORY)
    assert (Path(paths[1]) / "tqdm" / "__init__.py").read_text() == "version = 9"


def test_all_that_is_required_but_torch_and_numpy_is_collected():
    assert set(collect_wheels.required()) >= {"omegaconf", "hyperpyyaml", "tqdm", "ruamel.yaml", "pytest", "hypothesis"}
    assert not {"torch", "numpy"} & set(collect_wheels.required())


STEPS = [(part, each.name) for part in gpu.PARTS for each in gpu.steps(part, argparse.Namespace(
    small=True, device="cpu", out=Path("out"), scratch=Path("scratch")))]  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(("part", "name"), STEPS, ids=[name for _, name in STEPS])
def test_each_step_can_be_rehearsed_on_a_cpu(part, name, tmp_path):
    words = ("--device=cpu", "--small", f"--part={part}", "--steps", name, f"--out={tmp_path}")
    finished = run_python(BENCHMARKS / "gpu.py", *words)
    log = (tmp_path / "gpu.log").read_text()
    assert finished.returncode == 0, finished.stdout + log[-3000:]
    lines = gpu.read_lines(tmp_path / "gpu.jsonl")
    assert [line["state"] for line in lines if line["kind"] == "step"] in (["done"], ["not here"])
    if not name.startswith("recipe"):
        assert [line for line in lines if line["kind"] == "result"]
