"""A run that is killed in the course of a spike goes on bit for bit, whatever it was doing."""

import os

import pytest
from spiking_runs import Died, batches, die, fit, make, records, terminate

from amp_recipes.checkpoint import Checkpointer, going_back
from amp_recipes.interrupts import RunInterrupted


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ---------------------------------------------------------------------- killed and resumed


OPTIONS = [
    {},
    {"precision": "fp16", "init_scale": 2.0, "growth_interval": 12, "on_spike": "wider_precision"},
    {"precision": "bf16", "ema_decay": 0.9, "ckpt_interval_steps": 2},
    {"grad_accumulation_factor": 2, "ckpt_interval_steps": 2},
    {"lr_scheduler_interval": "epoch", "spike_steps": 12},
]


@pytest.fixture(scope="module", params=OPTIONS, ids=lambda options: "-".join(options) or "plain")
def whole(request, tmp_path_factory):
    """The options, and a run with them that nothing ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        folder = tmp_path_factory.mktemp("whole")
        brain = fit(make(folder, **request.param))
    assert brain.summary.went_back == 2
    return request.param, brain.end, last_of_each(folder)


def last_of_each(folder):
    """As a reader of the records is told to take them: the last of each epoch and step."""
    found = {(it["epoch"], it["step"]): it for it in records(folder)}
    return {key: (it["loss"], it["lr"], it["grad_norm"], it["scale"]) for key, it in found.items()}


@pytest.mark.parametrize("dies_at", [20, 22, 41])  # at the spike's second coming, later in the recovery, at the next
def test_a_run_that_is_killed_goes_on_bit_for_bit_also_in_the_recovery(tmp_path, whole, dies_at):
    options, end, steps = whole
    with pytest.raises(Died):
        fit(make(tmp_path, dies_at=dies_at, **options))
    assert fit(make(tmp_path, **options)).end == end
    assert last_of_each(tmp_path) == steps


@pytest.fixture(scope="module")
def whole_of_one_epoch(tmp_path_factory):
    return fit(make(tmp_path_factory.mktemp("one")), epochs=1).end


@pytest.mark.usefixtures("host")  # as on a device that queues its work
@pytest.mark.parametrize("end_by", [die, terminate], ids=lambda end_by: end_by.__name__)
@pytest.mark.parametrize("dies_at", [18, 19, 21, 24])
def test_whatever_ends_it_and_wherever(tmp_path, whole_of_one_epoch, dies_at, end_by):
    """A signal waits for the step, and where that is the spike, for the way back."""
    with pytest.raises((Died, RunInterrupted)):
        fit(make(tmp_path, dies_at=dies_at, end_by=end_by), epochs=1)
    assert fit(make(tmp_path), epochs=1).end == whole_of_one_epoch


@pytest.mark.parametrize("ends", [(10,), (36,), (39, 1, 1), (37, 2, 3), (14, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("interval", [4, 0])
def test_what_a_signal_has_saved_is_no_place_to_go_back_to(tmp_path, whole_of_two, ends, interval):
    """Or a run that was interrupted would go back to another place than the one that was not."""
    for dies_at in ends:  # in its process
        with pytest.raises(RunInterrupted):
            fit(make(tmp_path, dies_at=dies_at, end_by=terminate, ckpt_interval_steps=interval))
    assert fit(make(tmp_path, ckpt_interval_steps=interval)).end == whole_of_two[interval]


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory):
    return {it: fit(make(tmp_path_factory.mktemp("two"), ckpt_interval_steps=it)).end for it in (0, 4)}


@pytest.mark.parametrize("moment", ["make_newest", "save_checkpoint", "delete_checkpoint", "recover_if_possible"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_while_it_goes_back_it_does_so_again(tmp_path, monkeypatch, moment, after):
    """A signal has had the state saved in the midst of the spike, so that there is something to delete as well."""
    data, options = batches(bad=(17, 18, 19)), {"spike_patience": 3}
    whole = fit(make(tmp_path / "whole", **options), data, epochs=1)
    assert whole.summary.went_back == 1
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
        patch.setattr("amp_recipes.spike_recovery.find_newest", arm)
        if moment == "make_newest":
            patch.setattr("amp_recipes.spike_recovery.make_newest", dying(going_back.make_newest))
        else:
            patch.setattr(Checkpointer, moment, dying(getattr(Checkpointer, moment)))
        with pytest.raises(Died):
            fit(make(tmp_path / "run", **options), data, epochs=1)
    assert fit(make(tmp_path / "run", **options), data, epochs=1).end == whole.end
