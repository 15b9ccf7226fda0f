"""Which process is which, how they meet, which device is whose, and who goes first."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from processes import in_processes
from programs import DEADLINE_SECONDS

from amp_recipes import distributed
from amp_recipes.distributed import processes, rendezvous
from amp_recipes.errors import ConfigError, ProcessError

LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    """Sets the launcher's variables, and only those given."""
    for name in (*LAUNCHER_NAMES, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda **names: [monkeypatch.setenv(name, str(value)) for name, value in names.items()]


@pytest.fixture
def store():
    """A store of a server of its own, as torchrun's, and a second connection to it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return server, server.clone()


def two_devices(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)


@pytest.mark.parametrize("name", [None, "cuda"])
def test_each_process_of_a_machine_has_the_device_of_its_local_rank(environment, monkeypatch, name):
    two_devices(monkeypatch)
    environment(RANK=3, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2)
    assert distributed.pick_device(name) == torch.device("cuda", 1)


def test_more_processes_than_devices_are_refused(environment, monkeypatch):
    two_devices(monkeypatch)
    environment(RANK=6, LOCAL_RANK=2, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
    with pytest.raises(ConfigError, match=r"rank 6 .*LOCAL_RANK.* 2 cuda devices.*--nproc_per_node"):
        distributed.pick_device(None)


def test_one_named_device_cannot_be_that_of_all_processes(environment, monkeypatch):
    two_devices(monkeypatch)
    environment(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
    with pytest.raises(ConfigError, match=r"'cuda:1' is a single device, but 2 processes.*--device cuda"):
        distributed.pick_device("cuda:1")


def test_processes_that_srun_or_mpirun_started_are_told_what_is_missing(environment):
    for name, launcher in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")):
        environment(**{name: 8})
        with pytest.raises(ConfigError, match=rf"{launcher} started 8 processes.*RANK=.*set WORLD_SIZE=1"):
            distributed.start(torch.device("cpu"))
        environment(WORLD_SIZE=1)
        distributed.start(torch.device("cpu"))  # they are to train alone
        os.environ.pop("WORLD_SIZE")
        os.environ.pop(name)


def test_an_environment_with_holes_is_refused_before_anybody_waits(environment):
    environment(RANK=0, WORLD_SIZE=2)
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT is not set"):
        distributed.start(torch.device("cpu"))


def test_one_process_has_no_group_and_is_all_there_is(environment):
    environment()
    distributed.start(torch.device("cpu"))
    assert not dist.is_initialized()
    found = [distributed.rank(), distributed.local_rank(), distributed.data_rank()]
    assert found == [0, 0, 0] and distributed.world_size() == distributed.data_world_size() == 1
    with distributed.main_process_first():
        pass
    with pytest.raises(ConfigError, match="tensor_parallel=2 needs a multiple of 2 processes, but there are 1"):
        distributed.start(torch.device("cpu"), tensor_parallel=2)


def numbers(rank):
    distributed.start(torch.device("cpu"), tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel=3 .* there are 4"):
        distributed.start(torch.device("cpu"), tensor_parallel=3)
    return distributed.rank(), distributed.data_rank(), distributed.data_world_size()


def test_neighbours_that_share_layers_share_their_data():
    assert in_processes(numbers, 4) == [(0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2)]


def groups(rank):
    default = distributed.host_group()
    dist.get_backend_config = lambda: "cuda:nccl"  # as that of a group that somebody made for NCCL alone
    processes._host_groups.clear()
    made = distributed.host_group()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=made)
    return default, made is distributed.host_group(), made is not dist.group.WORLD, dist.get_backend(made), total.item()


def test_numbers_of_the_host_go_over_gloo():
    assert in_processes(groups, 2) == [(None, True, True, "gloo", 3.0)] * 2


def _meet(first, second):
    """The name that rank 0 gives to a start; rank 1, which comes later, must find the same."""
    late, found = time.monotonic() + DEADLINE_SECONDS, []

    def come():
        time.sleep(0.1)
        found.append(rendezvous._find(second, 1, late))

    thread = threading.Thread(target=come)
    thread.start()
    name = rendezvous._gather(first, 2, late)
    thread.join()
    assert found == [name]
    return name


def test_a_restart_meets_only_those_that_are_there_now(store, environment):
    """torchrun's store still has what the dead processes of the first start wrote."""
    environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="here", MASTER_PORT=1)
    names = [_meet(*store) for _ in range(2)]
    assert names[0] != names[1]


def test_who_does_not_come_is_named(store, environment):
    environment(RANK=0, WORLD_SIZE=4, MASTER_ADDR="here", MASTER_PORT=1)
    store[0].set("asks/2", "somebody who has died since")
    with pytest.raises(ProcessError, match=r"here MASTER_PORT=1 .*ranks 1, 2, 3 of 4 did not join.*firewall"):
        rendezvous._gather(store[0], 4, time.monotonic() + 0.1)
    assert rendezvous._find(store[1], 1, time.monotonic() + 0.1) is None


def test_an_address_where_nobody_answers_is_in_the_error(environment):
    environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    with pytest.raises(ProcessError, match=r"rank 1 of 2 .*MASTER_PORT=1 within 1 second \(distributed_timeout"):
        rendezvous.meet(timeout_minutes=1 / 60)


def prepare(rank, folder, each_machine):
    found = []
    for name in ("a", "b"):
        with distributed.main_process_first(each_machine):
            found.append(sorted(os.listdir(folder)))
            if rank == 0:
                time.sleep(0.1)  # the others would be in by then, if nothing kept them
                open(os.path.join(folder, name), "w").close()
    return found


@pytest.mark.parametrize("each_machine", [False, True])
def test_the_others_find_what_the_main_process_has_prepared(tmp_path, each_machine):
    found = in_processes(prepare, 3, str(tmp_path), each_machine)
    assert found[0] == [[], ["a"]]
    assert found[1] == found[2] == [["a"], ["a", "b"]]


def fail_first(rank):
    try:
        with distributed.main_process_first():
            assert rank == 0, "nobody else may come in"
            raise OSError("disk full")
    except (OSError, ProcessError) as error:
        return type(error).__name__, str(error)


def test_a_main_process_that_fails_lets_nobody_wait_for_ever():
    first, second = in_processes(fail_first, 2)
    assert first == ("OSError", "disk full")
    assert second[0] == "ProcessError" and "rank 0 failed there: OSError: disk full" in second[1]


def hang_first(rank):
    processes._timeout_minutes = 0.3 / 60
    if rank == 1:
        with pytest.raises(ProcessError, match=r"no sign of life for 0\.3 seconds"), distributed.main_process_first():
            pytest.fail("went in")
    dist.barrier()  # rank 0 comes no earlier


def slow_first(rank):
    processes._timeout_minutes = 2 / 60
    processes.SignOfLife._SECONDS = 0.02
    with distributed.main_process_first():
        if rank == 0:
            time.sleep(2.5)  # longer than the time-out, but alive
    return True


def test_a_slow_main_process_is_told_from_a_dead_one():
    in_processes(hang_first, 2)
    assert in_processes(slow_first, 2) == [True, True]
