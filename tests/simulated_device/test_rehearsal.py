"""`make gpu` finds the simulated device in the processes that it starts."""

import json

import pytest
from programs import run_python
from repository import REPOSITORY


@pytest.mark.extended
def test_each_step_of_the_gpu_benchmark_has_the_device(tmp_path):
    words = ["--device=simulated", "--small", "--part=fast", "--steps", "distributed", f"--out={tmp_path}"]
    done = run_python(REPOSITORY / "benchmarks" / "gpu.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    part, step = map(json.loads, (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert part["machine"].startswith("simulated, host") and step["state"] == "not here"
