"""Whatever a folder holds that came from somebody else: commands neither run, write, copy nor print what harms."""

import re
from pathlib import Path

import pytest
from hostile_entry_points import Attack, lay_out, training
from hostile_folders import FOLDER_ATTACKS, FOLDERS, REPLAYED
from programs import run_python

from amp_recipes.commands.export import export_run

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The output folder of a run of two epochs of the corpus' recipe."""
    folder = tmp_path_factory.mktemp("finished")
    text = training(output_folder="run", epochs="!new:amp_recipes.EpochCounter {limit: 2}")
    job = lay_out(Attack("finished", text), folder)
    ran = run_python(*job.words, cwd=job.here)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return job.here / "run"


def sure(kind):
    return [attack for attack in FOLDERS[kind] if not attack.unsure]


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_hostile_folder_does_no_harm(kind, tmp_path, finished_run, subtests):
    for attack in sure(kind)[:4]:
        with subtests.test(attack.name):
            assert_harmless(lay_out(attack, tmp_path, finished_run))


@pytest.mark.extended
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_hostile_folder_does_no_harm_in_all_cases(kind, tmp_path, finished_run, subtests):
    for attack in sure(kind)[4:]:
        with subtests.test(attack.name):
            assert_harmless(lay_out(attack, tmp_path, finished_run))


def assert_harmless(job):
    """Nothing ran that the folder brought, nothing changed elsewhere, and the command told so in plain words."""
    before = contents(job.outside)
    ran = run_python(*job.words, cwd=job.here, timeout_seconds=120)
    said = ran.stdout + ran.stderr
    assert not job.canary.exists(), f"was executed: {said[-1500:]}"
    assert contents(job.outside) == before, f"was changed: {said[-1500:]}"
    copies = [path for path in job.here.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in copies if b"password: 1234" in path.read_bytes()], "a file from elsewhere was copied"
    assert "password" not in said, f"a file from elsewhere was shown: {said[-1500:]}"
    assert "Traceback" not in said, said[-3000:]
    assert not CONTROL.search(said), f"a terminal would obey: {said[-1500:]!a}"


def contents(folder: Path) -> dict[str, bytes | str]:
    """What a folder holds: names, the contents of files, and where links point."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_a_step_of_ones_own_script_is_replayed(tmp_path):
    job = lay_out(REPLAYED, tmp_path)
    ran = run_python(*job.words, cwd=job.here)
    assert not (job.here / "ran").exists() and "no run of yours signed this command" in ran.stderr
    (flag,) = re.findall(r"--trust=\S+", ran.stderr)
    ran = run_python(*job.words, flag, cwd=job.here)
    assert (job.here / "ran").exists(), ran.stdout + ran.stderr
    assert (job.here / "ran").read_text() == f"a.yaml --replay={job.here / 'nonfinite-3'}"


@pytest.mark.parametrize("name", ["model.safetensors", "export.json", "hyperparams.yaml"])
def test_an_export_writes_through_no_link_that_lies_in_wait(name, tmp_path, finished_run, monkeypatch):
    # The name of the file that it writes first, of a process number that somebody guessed.
    monkeypatch.setattr("os.getpid", lambda: 4711)
    links = {f"run/export/.{name}.4711.tmp": "@OUTSIDE@/secret.yaml"}
    job = lay_out(Attack("waiting", run="run", links=links), tmp_path, finished_run)
    export_run(job.here / "run")
    assert (job.outside / "secret.yaml").read_text() == "password: 1234\n"


def test_names_are_unique_and_there_are_enough():
    assert len({attack.name for attack in FOLDER_ATTACKS}) == len(FOLDER_ATTACKS) >= 150
