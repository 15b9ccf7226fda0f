"""Whatever a YAML names: its words are no command line, now, in training, or in a worker."""

import re

import pytest
from hostile_entry_points import ATTACKS, CORPUS, SCRIPT, SECOND, Attack, lay_out, training
from programs import run_python


def sure(attacks):
    return [attack for attack in attacks if not attack.unsure]


# One of each way that a word may take; the others are in the extended tier.
DEFAULT_TIER = {
    "name_main",
    "apply_main",
    "prepare_main",
    "wrapper",
    "wrapper_of_argparse",
    "main_in_a_thread_that_waits_for_the_end",
    "in_a_list",
    "in_a_partial",
    "run_in_training_as_collate_fn",
    "wrapper_in_training_as_lr_lambda",
    "wrapper_now_as_max_key",
    "iter_in_a_list",
    "forward_of_the_model_in_training",
    "getitem_of_the_data_set_in_training",
    "by_reference_of_a_reference",
    "by_attribute_of_an_object",
    "by_include",
    "words_of_the_process_set_for_a_second_load",
    "nested_load",
    "trust_in_the_environment",
    "run_in_a_worker_by_spawn_now",
    "wrapper_in_a_worker_by_fork_in_training",
    "check",
    "show_config",
}


@pytest.mark.parametrize("kind", CORPUS)
def test_no_word_of_a_yaml_is_a_command_line(kind, tmp_path, subtests):
    for attack in [attack for attack in sure(CORPUS[kind]) if attack.name in DEFAULT_TIER]:
        with subtests.test(attack.name):
            assert_harmless(lay_out(attack, tmp_path))


@pytest.mark.extended
@pytest.mark.parametrize("kind", CORPUS)
def test_no_word_of_a_yaml_is_a_command_line_in_all_cases(kind, tmp_path, subtests):
    for attack in [attack for attack in sure(CORPUS[kind]) if attack.name not in DEFAULT_TIER]:
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
    ran = run_python(*job.words, *further, cwd=job.here, env=job.attack.env)
    said = ran.stdout + ran.stderr
    assert not job.canary.exists(), f"was executed: {said[-1500:]}"
    if job.attack.refused:
        assert ran.returncode not in (0, None), f"was not refused: {said[-1500:]}"
        assert re.search(r"\w+\.yaml:\d+(:\d+)?: ", said), f"names no place: {said[-1500:]}"
        assert "Traceback" not in said, said[-3000:]


def test_the_script_works_without_an_attack(tmp_path):
    job = lay_out(Attack("harmless", training()), tmp_path)
    ran = run_python(*job.words, cwd=job.here)
    assert ran.returncode == 0 and "came to its end" in ran.stdout, ran.stdout + ran.stderr


def test_trust_on_the_command_line_is_enough(tmp_path):
    job = lay_out(Attack("trusted", SECOND, further=("--trust=os",)), tmp_path)
    ran = run_python(*job.words, cwd=job.here)
    assert job.canary.exists(), ran.stdout + ran.stderr


def test_names_are_unique_and_there_are_enough():
    names = {attack.name for attack in ATTACKS}
    assert len(names) == len(ATTACKS) >= 150 and names >= DEFAULT_TIER
