"""With several processes, the main one diagnoses and replays as one process would; the others wait for its result."""

import json

import pytest
from processes import in_processes
from test_located_together import STRATEGIES, Classifier, brain_of, data, network, sgd, weights_of

from amp_recipes import RunOptions
from amp_recipes.config import Purpose
from amp_recipes.errors import ConfigError, DataError
from amp_recipes.loop import examination

QUICK = {"precisions": ("bf16",), "steps": 1, "windows": 4, "minutes": 5.0}


def diagnosed(rank, folder, strategy, trains):
    examination._draw = lambda folder: None
    brain = brain_of(folder, strategy)
    if trains:
        brain.fit(range(1), data(rank))
    before = weights_of(brain)
    found = brain.diagnose(data(rank), **QUICK)
    same = before == weights_of(brain)
    brain.fit(range(1), data(rank))  # the ranks still train together
    return str(found), same, weights_of(brain)


@pytest.mark.extended
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_get_the_diagnosis_of_one(tmp_path, strategy, trains):
    (first, *rest), (second, *others) = in_processes(diagnosed, 2, str(tmp_path), strategy, trains)
    assert first == second and first.startswith("NOT DECIDED in bf16")
    if not trains:  # what follows the verdict tells times
        ((alone, *_),) = in_processes(diagnosed, 1, str(tmp_path / "one"), strategy, trains)
        assert alone.splitlines()[0] == first.splitlines()[0]
    assert rest == others and rest[0]
    assert "bf16" in json.dumps(json.loads((tmp_path / "diagnosis.json").read_text()))


def asked(rank, folder, strategy):
    examination._draw = lambda folder: None
    brain_of(folder, strategy).fit(range(1), data(rank))
    options = {"device": "cpu", "noprogressbar": True, "precision": "bf16", "output_folder": folder}
    options = RunOptions.from_mapping({**options, "strategy": strategy}, purpose=Purpose("diagnose"))
    brain = Quick({"model": network()}, sgd, run_opts=options)
    with pytest.raises(SystemExit) as ended:
        brain.fit(range(1), data(rank))
    assert ended.value.code == 0  # torchrun takes others for a failure
    return weights_of(brain) == weights_of(brain_of(None, strategy)), brain.optimizer_step


class Quick(Classifier):
    def diagnose(self, *args, **options):
        return super().diagnose(*args, **{**QUICK, **options})


@pytest.mark.extended
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_diagnose_on_the_command_line_prints_once_and_trains_nothing(tmp_path, strategy, capfd):
    assert in_processes(asked, 2, str(tmp_path), strategy) == [(True, 0), (True, 0)]
    printed = capfd.readouterr()
    assert sum(line.startswith("NOT DECIDED in bf16") for line in printed.out.splitlines()) == 1
    assert printed.err.count("running a diagnosis instead of training") == 1
    assert json.loads((tmp_path / "diagnosis.json").read_text())["weights"].startswith("from the checkpoint")


def refused(rank, folder):
    found = []
    for batches, kind in ((data(rank, 2), DataError), (data(rank), ConfigError)):
        with pytest.raises(kind) as error:
            brain_of(folder, "ddp").diagnose(batches, **{**QUICK, "windows": 4 if kind is DataError else 2})
        found.append(str(error.value))
    return found


def test_all_ranks_raise_what_the_main_process_raises(tmp_path):
    first, second = in_processes(refused, 2, str(tmp_path))
    assert first == second and "only 2" in first[0] and "at least 3 windows" in first[1]
