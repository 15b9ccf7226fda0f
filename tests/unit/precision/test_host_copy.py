"""Scalars reach the host unchanged, and a landing place is used again only once it has been read."""

import copy
import math
import pickle
from itertools import product

import torch

from amp_recipes.precision import host_copy
from amp_recipes.precision.host_copy import HostCopy

CPU = torch.device("cpu")


def test_the_values_are_those_of_the_tensor_at_every_dtype(host, subtests):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with subtests.test(str(dtype)):
            vector = torch.tensor([1 / 3, -math.inf, 6e4, 2.0**-24], dtype=dtype)
            assert HostCopy(CPU).post(vector).read() == [float(x) for x in vector]


def test_a_float64_loss_keeps_all_its_bits(host):
    assert HostCopy(CPU).post(torch.tensor(0.1, dtype=torch.float64)).read() == [0.1]


def test_nan_stays_nan(host):
    nan, one = HostCopy(CPU).post(torch.tensor([math.nan, 1.0])).read()
    assert math.isnan(nan) and one == 1.0


def test_what_happens_to_the_tensor_after_the_post_does_not_count(host):
    loss = torch.tensor([1.0, 2.0])
    future = HostCopy(CPU).post(loss)
    loss.fill_(-1.0)
    assert future.read() == [1.0, 2.0]


def test_tickets_read_in_any_order_hold_their_own_values(host):
    home = HostCopy(CPU)
    tickets = [home.post(torch.tensor([float(i), 10.0 * i])) for i in range(4)]
    single = home.post(torch.tensor(7.0))
    for i in (2, 0, 3, 1):
        assert tickets[i].read() == [i, 10 * i]
    later = home.post(torch.tensor([-1.0, -2.0]))  # takes a place that was read
    assert [future.read() for future in tickets] == [[i, 10 * i] for i in range(4)]
    assert (later.read(), single.read()) == ([-1, -2], [7])


def test_a_loop_uses_as_many_landing_places_as_are_unread_at_once(monkeypatch):
    made = []
    row = host_copy._Row
    monkeypatch.setattr(host_copy, "_Row", lambda *args: made.append(args) or row(*args))
    home = HostCopy(CPU)
    waiting = []
    for i in range(20):
        waiting.append(home.post(torch.tensor([float(i)] * 3)))
        if len(waiting) > 2:
            assert waiting.pop(0).read() == [i - 2] * 3
    assert len(made) == 3


def test_reading_again_gives_the_same_and_frees_the_place_once():
    home = HostCopy(CPU)
    future = home.post(torch.tensor([5.0]))
    assert future.read() == future.read() == [5.0]
    first, second = home.post(torch.tensor([6.0])), home.post(torch.tensor([7.0]))
    assert (first.read(), second.read()) == ([6.0], [7.0])  # not one place given out twice


def test_known_is_what_the_kind_of_device_says_until_the_ticket_is_read(host):
    future = HostCopy(CPU).post(torch.tensor(1.0))
    assert future.known == (host == "at_once")
    future.read()
    assert future.known


def test_only_devices_that_queue_their_work_are_waited_for(subtests):
    for device, immediate in {"cpu": True, "mps": True, "cuda:1": False, "xpu": False, "meta": True}.items():
        with subtests.test(device):
            assert HostCopy(torch.device(device)).immediate is immediate


DUPLICATES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


def test_a_copied_ticket_holds_the_values_and_shares_no_place(host, subtests):
    for (name, duplicate), read_before in product(DUPLICATES.items(), (False, True)):
        with subtests.test(f"{name}, read before: {read_before}"):
            home = HostCopy(CPU)
            future = home.post(torch.tensor([1.0, 2.0]))
            if read_before:
                future.read()
            double = duplicate(future)
            home.post(torch.tensor([8.0, 9.0]))
            assert double.known and double.read() == [1.0, 2.0]
            assert future.read() == [1.0, 2.0]


def test_a_copied_host_copy_hands_out_places_of_its_own(subtests):
    for name in ("deepcopy", "pickle"):
        with subtests.test(name):
            home = HostCopy(CPU)
            home.post(torch.tensor(1.0)).read()  # a place is free now
            other = DUPLICATES[name](home)
            here, there = home.post(torch.tensor(2.0)), other.post(torch.tensor(3.0))
            assert (here.read(), there.read()) == ([2.0], [3.0])
