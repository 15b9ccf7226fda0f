"""Whatever a YAML names: its words are no command line, now, in training, or in a worker."""

import re

import pytest
from hostile_entry_points import ATTACKS, CORPUS, SCRIPT, lay_out
from programs import run_python


def sure(attacks):
    return [attack for attack in attacks if not attack.unsure]


def ordered(kind):
    """The attacks of a kind, one of each outcome first: those are in the default tier."""
    attacks = sure(CORPUS[kind])
    first = {(attack.refused): attack for attack in reversed(attacks) if not attack.starts}
    return list(first.values()), [attack for attack in attacks if attack not in first.values()]


@pytest.mark.parametrize("kind", CORPUS)
def test_no_word_of_a_yaml_is_a_command_line(kind, tmp_path, subtests):
    for attack in ordered(kind)[0]:
        with subtests.test(attack.name):
            assert_harmless(lay_out(attack, tmp_path))


@pytest.mark.extended
@pytest.mark.parametrize("kind", CORPUS)
def test_no_word_of_a_yaml_is_a_command_line_in_all_cases(kind, tmp_path, subtests):
    for attack in ordered(kind)[1]:
        with subtests.test(attack.name):
            assert_harmless(lay_out(attack, tmp_path))


@pytest.mark.extended
@pytest.mark.parametrize("kind", [kind for kind in CORPUS if kind != "action"])
def test_a_check_executes_nothing_and_names_the_place(kind, tmp_path, subtests):
    for attack in sure(CORPUS[kind]):
        if attack.words[0] == SCRIPT[0]:
            with subtests.test(attack.name):
                assert_harmless(lay_out(attack, tmp_path), "--check")


def assert_harmless(job, *further):
    """The canary is absent, and what the YAML shows is refused with its place and without a traceback."""
    ran = run_python(*job.words, *further, cwd=job.here, env={**job.attack.env, "PYTHONDONTWRITEBYTECODE": ""})
    said = ran.stdout + ran.stderr
    assert not job.canary.exists(), f"was executed: {said[-1500:]}"
    if job.attack.refused:
        assert ran.returncode not in (0, None), f"was not refused: {said[-1500:]}"
        assert re.search(r"\w+\.yaml:\d+(:\d+)?: ", said), f"names no place: {said[-1500:]}"
        assert "Traceback" not in said, said[-3000:]


def test_the_script_works_without_an_attack(tmp_path):
    from hostile_entry_points import Attack, training

    job = lay_out(Attack("harmless", training()), tmp_path)
    ran = run_python(*job.words, cwd=job.here)
    assert ran.returncode == 0 and "came to its end" in ran.stdout, ran.stdout + ran.stderr


def test_trust_on_the_command_line_is_enough(tmp_path):
    from hostile_entry_points import SECOND, Attack

    job = lay_out(Attack("trusted", SECOND, further=("--trust=os",)), tmp_path)
    ran = run_python(*job.words, cwd=job.here)
    assert job.canary.exists(), ran.stdout + ran.stderr


def test_names_are_unique_and_there_are_enough():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 150
