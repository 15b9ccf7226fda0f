"""A run that is killed in the course of a spike goes on bit for bit, whatever it was doing."""

import os

import pytest
from hosts import HOSTS
from pairwise import each_once
from spiking_runs import Died, batches, die, fit, make, records, terminate

from amp_recipes.checkpoint import Checkpointer, going_back
from amp_recipes.interrupts import RunInterrupted


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ---------------------------------------------------------------------- killed and resumed


OPTIONS = {
    "plain": {},
    "fp16": {"precision": "fp16", "init_scale": 2.0, "growth_interval": 12, "on_spike": "wider_precision"},
    "average": {"precision": "bf16", "ema_decay": 0.9, "ckpt_interval_steps": 2},
    "windows": {"grad_accumulation_factor": 2, "ckpt_interval_steps": 2},
    "epochs": {"lr_scheduler_interval": "epoch", "spike_steps": 12},
}


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """The options, and a run with them that nothing ends."""
    options = OPTIONS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        folder = tmp_path_factory.mktemp("whole")
        brain = fit(make(folder, **options))
    assert brain.summary.went_back == 2
    return options, brain.end, last_of_each(folder)


def last_of_each(folder):
    """As a reader of the records is told to take them: the last of each epoch and step."""
    found = {(it["epoch"], it["step"]): it for it in records(folder)}
    return {key: (it["loss"], it["lr"], it["grad_norm"], it["scale"]) for key, it in found.items()}


# At the spike's second coming, later in the recovery, at the next.
@pytest.mark.parametrize(("whole", "dies_at"), each_once([*OPTIONS], [20, 22, 41]), indirect=["whole"])
def test_a_run_that_is_killed_goes_on_bit_for_bit_also_in_the_recovery(tmp_path, whole, dies_at):
    options, end, steps = whole
    with pytest.raises(Died):
        fit(make(tmp_path, dies_at=dies_at, **options))
    assert fit(make(tmp_path, **options)).end == end
    assert last_of_each(tmp_path) == steps


@pytest.fixture(scope="module")
def whole_of_one_epoch(tmp_path_factory):
    return fit(make(tmp_path_factory.mktemp("one")), epochs=1).end


@pytest.mark.parametrize(
    ("dies_at", "end_by", "host"), each_once([18, 19, 21, 24], [terminate, die], HOSTS), indirect=["host"]
)
@pytest.mark.usefixtures("host")
def test_whatever_ends_it_and_wherever(tmp_path, whole_of_one_epoch, dies_at, end_by):
    """A signal waits for the step, and where that is the spike, for the way back."""
    with pytest.raises((Died, RunInterrupted)):
        fit(make(tmp_path, dies_at=dies_at, end_by=end_by), epochs=1)
    assert fit(make(tmp_path), epochs=1).end == whole_of_one_epoch


ENDS = [(14, 1, 1, 1), (36,), (39, 1, 1), (37, 2, 3), (10,)]


@pytest.mark.parametrize(("ends", "interval"), each_once(ENDS, [4, 0]), ids=str)
def test_what_a_signal_has_saved_is_no_place_to_go_back_to(tmp_path, whole_of_two, ends, interval):
    """Or a run that was interrupted would go back to another place than the one that was not."""
    for dies_at in ends:  # in its process
        with pytest.raises(RunInterrupted):
            fit(make(tmp_path, dies_at=dies_at, end_by=terminate, ckpt_interval_steps=interval))
    assert fit(make(tmp_path, ckpt_interval_steps=interval)).end == whole_of_two[interval]


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
    return {it: fit(make(tmp_path_factory.mktemp("two"), ckpt_interval_steps=it)).end for it in (0, 4)}


SPIKE_OF_THREE = batches(bad=(17, 18, 19)), {"spike_patience": 3}
MOMENTS = ["make_newest", "save_checkpoint", "delete_checkpoint", "recover_if_possible"]


@pytest.fixture(scope="module")
def whole_with_patience(tmp_path_factory):
    data, options = SPIKE_OF_THREE
    whole = fit(make(tmp_path_factory.mktemp("whole"), **options), data, epochs=1)
    assert whole.summary.went_back == 1
    return whole.end


@pytest.mark.parametrize(("moment", "after"), each_once(MOMENTS, [False, True]))
def test_killed_while_it_goes_back_it_does_so_again(tmp_path, monkeypatch, whole_with_patience, moment, after):
    """A signal has had the state saved in the midst of the spike, so that there is something to delete as well."""
    data, options = SPIKE_OF_THREE
    with pytest.raises(RunInterrupted):
        fit(make(tmp_path / "run", dies_at=18, end_by=terminate, **options), data, epochs=1)
    armed = []

    def dying(function):
        def call(*args, **kwargs):
            if armed and not after:
                raise Died
            result = function(*args, **kwargs)
            if armed:
                raise Died
            return result

        return call

    def arm(*args, **kwargs):
        armed.append(True)
        return find_newest(*args, **kwargs)

    find_newest = going_back.find_newest
    with monkeypatch.context() as patch:
        patch.setattr("amp_recipes.loop.recovery.recovery.find_newest", arm)
        if moment == "make_newest":
            patch.setattr("amp_recipes.loop.recovery.recovery.make_newest", dying(going_back.make_newest))
        else:
            patch.setattr(Checkpointer, moment, dying(getattr(Checkpointer, moment)))
        with pytest.raises(Died):
            fit(make(tmp_path / "run", **options), data, epochs=1)
    assert fit(make(tmp_path / "run", **options), data, epochs=1).end == whole_with_patience
