"""What the README shows is so."""

import re
import subprocess
import sys

import pytest
from repository import REPOSITORY

from amp_recipes.config.run_options import options_table

README = (REPOSITORY / "README.md").read_text()


def code_block(language: str, first_line: str) -> str:
    found = re.search(rf"```{language}\n({re.escape(first_line)}\n.*?)```", README, re.DOTALL)
    assert found, f"README has no {language} block that begins with {first_line}"
    return found.group(1)


def test_table_of_options_is_made_from_the_dataclass():
    table = README.split("options_table -->\n")[1].split("\n<!-- end of options")[0]
    assert table.strip() == options_table().strip(), "README: paste options_table() between the marks"


@pytest.mark.parametrize(
    "arguments", [[], ["--precision", "fp16", "--lr=3e-3"], ["--model.out_features", "12"]], ids=" ".join
)
def test_recipe_in_twenty_lines_runs(tmp_path, arguments):
    (tmp_path / "tiny.yaml").write_text(code_block("yaml", "# tiny.yaml"))
    (tmp_path / "tiny.py").write_text(code_block("python", "# tiny.py"))
    done = subprocess.run(
        [sys.executable, "tiny.py", "tiny.yaml", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d train: loss ([\d.]+)", done.stderr)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2


def test_supported_pythons_are_those_of_the_metadata():
    requires = re.search(r"python_requires = >=3\.(\d+),<3\.(\d+)", (REPOSITORY / "setup.cfg").read_text())
    first, beyond = (int(minor) for minor in requires.groups())
    assert f"Python 3.{first} to 3.{beyond - 1}" in README
    assert first <= sys.version_info.minor < beyond
