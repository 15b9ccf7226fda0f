"""Where autocast is on, where it is off, and in which dtype tensors arrive."""

import collections
import copy
import dataclasses
import enum
import functools
import inspect
import pickle
import threading
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from pairwise import pairwise
from programs import DEADLINE_SECONDS
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch_release import since

from amp_recipes.errors import PrecisionError
from amp_recipes.modules.devices import autocast_device_types
from amp_recipes.precision import autocast as autocast_module
from amp_recipes.precision.autocast import (
    TorchAutocast,
    custom_bwd,
    custom_fwd,
    fwd_default_precision,
    has_default_precision,
)

BF16, FP16 = torch.bfloat16, torch.float16


def low(*shape):
    return torch.randn(*shape or (2, 4)).bfloat16()


def autocast_state():
    """What autocast is set to on each device type, and what it caches."""
    states = [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in autocast_device_types()]
    return states, torch.is_autocast_cache_enabled()


@pytest.fixture(autouse=True)
def leaves_autocast_as_it_was():
    before = autocast_state()
    yield
    assert autocast_state() == before


@pytest.fixture
def bf16():
    with torch.autocast("cpu", BF16):
        yield


@fwd_default_precision
def seen(value, **kwargs):
    """The arguments as they arrive, and whether autocast is on."""
    return value, kwargs, torch.is_autocast_enabled("cpu")


class Pinned(nn.Module):
    """A linear layer that insists on fp32, and keeps the dtype of its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @fwd_default_precision
    def forward(self, x):
        return self.linear(x)


class ThreePinned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Pinned() for _ in range(3)])

    def forward(self, x):
        return self.layers(x)


class Pair(NamedTuple):
    first: Any
    second: Any


class TaggedPair(Pair):
    """A subclass of a namedtuple."""


@dataclasses.dataclass
class Batch:
    x: Any
    label: str = "a"
    y: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    x: Any


@dataclasses.dataclass(slots=True)
class SlottedBatch:
    x: Any
    label: str = "a"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlottedBatch:
    x: Any


class TaggedDict(dict):
    """A dict subclass that carries more than its items."""


class SelfDict(dict):
    """The idiom in which attributes are items."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Registered:
    def __init__(self, x):
        self.x = x


pytree.register_pytree_node(
    Registered,
    lambda value: ([value.x], None),
    lambda children, _: Registered(*children),
    serialized_type_name="amp_recipes.tests.Registered",
)


class Opaque:
    def __init__(self, x):
        self.x = x


class Colour(enum.Enum):
    RED = 1


# --- TorchAutocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast_computes_as_torch_autocast_does(subtests, dtype):
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype):
        expected = x @ x
    contexts = {
        "by position": TorchAutocast("cpu", dtype),
        "dtype by name": TorchAutocast("cpu", dtype=dtype),
        "both by name": TorchAutocast(device_type="cpu", dtype=dtype),
        "a device": TorchAutocast(torch.device("cpu"), dtype, True, True),
    }
    for name, context in contexts.items():
        with subtests.test(name):
            with context:
                assert torch.get_autocast_dtype("cpu") is dtype
                result = x @ x
            assert result.dtype is dtype
            assert torch.equal(result, expected)


def test_float32_does_nothing_not_even_inside_another_autocast(subtests):
    before = autocast_state()
    contexts = [
        TorchAutocast("cpu", torch.float32),
        TorchAutocast("cpu", dtype=torch.float32),
        TorchAutocast(device_type="meta", dtype=torch.float32),
        TorchAutocast(dtype=torch.float32),
    ]
    for index, context in enumerate(contexts):
        with subtests.test(index), warnings.catch_warnings():
            warnings.simplefilter("error")  # torch.autocast itself warns at float32
            with context:
                assert autocast_state() == before
            with torch.autocast("cpu", BF16), context:
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BF16
            assert not context.enabled


def test_one_instance_may_be_entered_again_and_inside_itself():
    context = TorchAutocast("cpu", BF16)
    for _ in range(2):
        with context:
            with torch.autocast("cpu", enabled=False):
                with context, context:
                    assert torch.is_autocast_enabled("cpu")
                assert not torch.is_autocast_enabled("cpu")
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")


def test_threads_that_share_an_instance_do_not_mix_their_states():
    context, failures = TorchAutocast("cpu", BF16), []
    barrier = threading.Barrier(4, timeout=DEADLINE_SECONDS)

    def work(outer_dtype):
        try:
            with torch.autocast("cpu", outer_dtype):
                for _ in range(20):
                    barrier.wait()  # all enter together and leave together, in no order
                    with context:
                        barrier.wait()
                        assert torch.get_autocast_dtype("cpu") is BF16
                    assert torch.get_autocast_dtype("cpu") is outer_dtype
            assert not torch.is_autocast_enabled("cpu")
        except Exception as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in (BF16, FP16) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_exception_inside_leaves_the_state_as_before_and_passes():
    context = TorchAutocast("cpu", BF16)
    with pytest.raises(KeyError), context, context:
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")
    assert not context._entered.stack


def test_it_decorates():
    @TorchAutocast("cpu", BF16)
    def product(x, *, depth=0):
        """Doc."""
        return product(x, depth=depth - 1) if depth else (x @ x).dtype

    assert product(torch.ones(2, 2), depth=2) is BF16
    assert product.__doc__ == "Doc."
    assert TorchAutocast("cpu", torch.float32)(lambda x: (x @ x).dtype)(torch.ones(2, 2)) is torch.float32


def test_enabled_and_cache_enabled_are_handed_on():
    with TorchAutocast("cpu", BF16), TorchAutocast("cpu", BF16, enabled=False):
        assert not torch.is_autocast_enabled("cpu")
    with TorchAutocast("cpu", BF16, cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()


def test_an_index_in_the_device_is_an_error_that_names_the_type():
    with pytest.raises(RuntimeError, match=r"'cuda:0'.*its device type, 'cuda'"):
        TorchAutocast("cuda:0", BF16)
    assert TorchAutocast(torch.device("cuda:0"), BF16).device_type == "cuda"


def test_a_device_type_without_autocast_is_an_error_that_names_dtype_and_device():
    for device in ("meta", "nonsense"):
        with pytest.raises(
            RuntimeError, match=rf"'{device}' has no autocast to torch.bfloat16; expected one of cpu, cuda"
        ):
            TorchAutocast(device, BF16)


def test_wrong_arguments_are_type_errors_at_once(subtests):
    wrong = [
        lambda: TorchAutocast("cpu", dtype="bf16"),
        lambda: TorchAutocast("cpu", "bf16"),
        lambda: TorchAutocast(0, BF16),
        lambda: TorchAutocast(dtype=BF16),
        lambda: TorchAutocast("cpu", BF16, dtype=BF16),
        lambda: TorchAutocast("cpu", BF16, precision=1),
        lambda: TorchAutocast("cpu", torch.float32, precision=1),
    ]
    for index, make in enumerate(wrong):
        with subtests.test(index), pytest.raises(TypeError):
            make()


@pytest.mark.parametrize("fails_in", ["__init__", "__enter__"])
def test_a_failing_enter_names_dtype_and_device_and_keeps_the_cause(monkeypatch, fails_in):
    class Broken(torch.autocast):
        pass

    def fail(self, *args, **kwargs):
        raise ValueError("the driver said no")

    setattr(Broken, fails_in, fail)
    monkeypatch.setattr(torch, "autocast", Broken)
    context = TorchAutocast("cpu", dtype=BF16)
    with pytest.raises(RuntimeError, match=r"torch.bfloat16.*'cpu'.*the driver said no") as caught, context:
        pytest.fail("the body ran")
    assert isinstance(caught.value, PrecisionError)
    assert isinstance(caught.value.__cause__, ValueError)
    monkeypatch.undo()
    with context:  # the failed enter left nothing behind
        assert torch.is_autocast_enabled("cpu")


def test_copies_and_pickles_work_on_their_own():
    context = TorchAutocast("cpu", dtype=BF16)
    with context:
        clones = [copy.deepcopy(context), pickle.loads(pickle.dumps(context)), copy.copy(context)]
    for clone in clones:
        with clone:
            assert torch.get_autocast_dtype("cpu") is BF16
        assert repr(clone) == "TorchAutocast(device_type='cpu', dtype=torch.bfloat16)"


def test_a_decorated_function_is_part_of_one_compiled_graph():
    product = TorchAutocast("cpu", BF16)(lambda x: x @ x)
    assert torch.compile(product, backend="aot_eager", fullgraph=True)(torch.ones(2, 2)).dtype is BF16


# --- fwd_default_precision: how it is used -----------------------------------------------------------------


def function(x, *rest, flag=True, **options):
    """Doc."""
    return x


DECORATORS = {
    "as it is": fwd_default_precision,
    "called": fwd_default_precision(),
    "called with a dtype": fwd_default_precision(cast_inputs=torch.float32),
    "partial": functools.partial(fwd_default_precision, cast_inputs=torch.float32),
    "function by name": lambda f: fwd_default_precision(fwd=f),
    "all by position": lambda f: fwd_default_precision(f, torch.float32),
    "twice": lambda f: fwd_default_precision(fwd_default_precision(f)),
}


def test_every_way_to_decorate_gives_the_same(bf16, subtests):
    signature = "(x, *rest, flag=True, force_allow_autocast: bool = False, **options)"
    for name, decorate in DECORATORS.items():
        with subtests.test(name):
            decorated = decorate(function)
            assert decorated(low()).dtype is torch.float32
            assert decorated(low(), force_allow_autocast=True).dtype is BF16
            assert (decorated.__name__, decorated.__doc__) == ("function", "Doc.")
            assert inspect.unwrap(decorated) is function
            assert str(inspect.signature(decorated)) == signature
            assert has_default_precision(decorated)
            assert not has_default_precision(function)


def test_a_decorator_between_two_decorations_still_runs(bf16):
    def plus_one(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs) + 1

        return wrapper

    decorated = fwd_default_precision(plus_one(fwd_default_precision(function)))
    x = torch.zeros(2, dtype=BF16)
    assert torch.equal(decorated(x), torch.ones(2))
    assert torch.equal(decorated(x, force_allow_autocast=True), torch.ones(2, dtype=BF16))


def test_the_signature_of_a_bound_forward_has_no_self():
    assert list(inspect.signature(Pinned().forward).parameters) == ["x", "force_allow_autocast"]


def test_a_function_without_a_signature_can_be_decorated(bf16):
    assert fwd_default_precision(torch.relu)(low()).dtype is torch.float32


def test_decorating_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="cast_inputs="):
        fwd_default_precision(torch.float32)


def test_without_autocast_nothing_changes():
    value = {"x": [low()]}
    arrived, kwargs, _ = seen(value, other=value)
    assert arrived is value
    assert kwargs["other"] is value
    with torch.autocast("cpu", BF16, enabled=False):
        assert seen(value)[0] is value


def test_under_autocast_it_is_off_inside_and_inputs_are_fp32(bf16):
    x = low()
    arrived, kwargs, enabled = seen(x, other={"y": (x,)})
    assert not enabled
    assert arrived.dtype is torch.float32
    assert kwargs["other"]["y"][0].dtype is torch.float32
    assert torch.equal(arrived, x.float())
    assert Pinned()(x).dtype is torch.float32
    assert torch.is_autocast_enabled("cpu")


def test_force_allow_autocast_means_not_decorated(bf16):
    x = low()
    arrived, kwargs, enabled = seen(x, force_allow_autocast=True)
    assert arrived is x
    assert enabled
    assert kwargs == {}
    assert Pinned()(x, force_allow_autocast=True).dtype is BF16


def test_cast_inputs_none_turns_autocast_off_and_casts_nothing(bf16):
    x = low()
    arrived, enabled = fwd_default_precision(lambda x: (x, torch.is_autocast_enabled("cpu")), cast_inputs=None)(x)
    assert arrived is x
    assert not enabled


def test_another_dtype_may_be_asked_for(bf16):
    assert fwd_default_precision(lambda x: x.dtype, cast_inputs=FP16)(torch.ones(2)) is FP16


def test_nothing_is_stored_on_module_or_tensors(bf16):
    module, x = Pinned(), low()
    before, tensor_before = dict(vars(module)), dict(vars(x))
    module(x)
    assert vars(module) == before
    assert vars(x) == tensor_before
    assert list(module.state_dict()) == ["linear.weight", "linear.bias"]


def test_a_tensor_whose_device_has_autocast_off_passes(bf16):
    x = torch.empty(2, dtype=BF16, device="meta")
    assert seen(x)[0] is x


def test_the_device_is_not_guessed_from_the_first_tensor():
    """A batch in a dict on a device whose autocast is on, where a guess from the arguments would be cpu."""
    torch.set_autocast_enabled("cuda", True)  # the state can be set without a GPU
    try:
        on = fwd_default_precision(lambda batch: torch.is_autocast_enabled("cuda"))
        assert on({"x": torch.ones(2)}) is False
        cpu = low()
        assert seen(cpu)[0] is cpu  # autocast is on for cuda only
        with torch.autocast("cpu", BF16):
            assert seen(cpu)[0].dtype is torch.float32
            assert on({}) is False
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_autocast_is_noticed_on_every_device_type(subtests):
    # torch.autocast needs the module of a private backend.
    for device_type in set(autocast_device_types()) - {torch._C._get_privateuse1_backend_name()}:
        with subtests.test(device_type):
            torch.set_autocast_enabled(device_type, True)
            try:
                assert fwd_default_precision(lambda name=device_type: torch.is_autocast_enabled(name))() is False
            finally:
                torch.set_autocast_enabled(device_type, False)


def test_an_exception_inside_leaves_autocast_on(bf16):
    @fwd_default_precision
    def fail(x):
        raise KeyError(x.dtype)

    before = autocast_state()
    with pytest.raises(KeyError, match="float32"):
        fail(low())
    assert autocast_state() == before


def test_the_owner_of_a_method_is_no_input(bf16):
    @dataclasses.dataclass
    class Model:
        weight: torch.Tensor
        calls: int = 0

        @fwd_default_precision
        def forward(self, x):
            self.calls += 1
            return self.weight.dtype, x.dtype

    model = Model(low())
    assert model.forward(low()) == (BF16, torch.float32)
    assert model.calls == 1


# --- fwd_default_precision: what is cast -------------------------------------------------------------------


def both(x):
    return [
        (x,),
        [x, [x]],
        {"a": x, 3: {"b": [(x,)]}},
        collections.OrderedDict(b=x, a=x),
        collections.defaultdict(list, a=x),
        collections.deque([x], maxlen=3),
        TaggedDict(a=x),
        SelfDict(a=x),
        Pair(x, "text"),
        TaggedPair(x, [x]),
        Batch(x),
        FrozenBatch([x]),
        SlottedBatch(x),
        FrozenSlottedBatch(Batch(x)),
        Registered(x),
        {"deep": [FrozenBatch(Pair({"x": (Batch(x),)}, None))]},
        torch.return_types.max((x, torch.zeros(2, dtype=torch.long))),
        pack_padded_sequence(x.view(4, 2, 1), [4, 2]),
    ]


def shape_of(value):
    """The types in a structure, with what stands in place of each tensor: its dtype."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return type(value), [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [shape_of(item) for item in value]
    if dataclasses.is_dataclass(value):
        return type(value), [(field.name, shape_of(getattr(value, field.name))) for field in dataclasses.fields(value)]
    if isinstance(value, Registered):
        return Registered, shape_of(value.x)
    return value


def test_containers_are_cast_at_any_depth_and_keep_their_types(bf16, subtests):
    x = low()
    for given, expected in zip(both(x), both(x.float()), strict=True):
        with subtests.test(str(shape_of(given))):
            before = shape_of(given)
            arrived, kwargs, _ = seen(given, keyword=given)
            assert shape_of(arrived) == shape_of(expected)
            assert shape_of(kwargs["keyword"]) == shape_of(expected)
            assert shape_of(given) == before  # the caller's own container is left alone


def test_a_container_in_which_nothing_is_cast_is_handed_on_itself(bf16, subtests):
    for given in both(torch.randn(2, 4)):
        with subtests.test(str(shape_of(given))):
            arrived, kwargs, _ = seen(given, keyword=given)
            assert arrived is given
            assert kwargs["keyword"] is given
            assert seen([low(), given])[0][1] is given


def test_what_a_container_carries_besides_its_items_is_kept(bf16):
    tagged = TaggedDict(x=low())
    tagged.tag = "kept"
    assert seen(tagged)[0].tag == "kept"

    mirrored = seen(SelfDict(x=low()))[0]
    assert mirrored.x is mirrored["x"]
    assert mirrored.x.dtype is torch.float32

    default = seen(collections.defaultdict(list, x=low()))[0]
    assert default.default_factory is list
    assert seen(collections.deque([low()], maxlen=3))[0].maxlen == 3

    batch = Batch(low())
    batch.y = low()  # an init=False field, set later
    batch.extra = "no field at all"
    arrived = seen(batch)[0]
    assert (arrived.x.dtype, arrived.y.dtype, arrived.extra) == (torch.float32, torch.float32, batch.extra)

    packed = pack_padded_sequence(low(3, 2, 4), [3, 2])
    arrived = seen(packed)[0]
    assert arrived.data.dtype is torch.float32
    assert torch.equal(arrived.batch_sizes, packed.batch_sizes)
    assert nn.LSTM(4, 4)(arrived)[0].data.shape == (5, 4)


def test_one_tensor_given_twice_stays_one_tensor(bf16):
    x = low()
    first, second = seen([x, {"again": x}])[0]
    assert first is second["again"]


def test_tensors_of_other_dtypes_pass_untouched(bf16, subtests):
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float32):
        with subtests.test(str(dtype)):
            x = torch.ones(2, dtype=dtype)
            assert seen(x)[0] is x


def test_tensors_of_both_low_dtypes_are_cast(bf16, subtests):
    for dtype in (FP16, BF16):
        with subtests.test(str(dtype)):
            for x in (torch.ones(2, dtype=dtype), nn.Parameter(torch.ones(2, dtype=dtype))):
                assert seen(x)[0].dtype is torch.float32
            sparse = torch.eye(3, dtype=dtype).to_sparse()
            assert seen(sparse)[0].dtype is torch.float32
            assert seen(sparse)[0].is_sparse


WITHOUT_TENSORS = [
    *(None, "text", b"bytes", bytearray(b"x"), 1, 1.5, True, 1j, range(3), Colour.RED, len, Opaque, torch.relu),
    *(np.ones(2, dtype=np.float16), np.float32(1), np.bool_(True), np.dtype("float32")),
    *(torch.float16, torch.device("cpu"), torch.Size([2]), torch.Generator(), torch.strided),
    *(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleList(), functools.partial(len)),
]


def test_what_holds_no_tensors_passes_silently(bf16, subtests):
    for value in WITHOUT_TENSORS:
        with subtests.test(type(value).__name__), warnings.catch_warnings():
            autocast_module._seen_types.clear()
            warnings.simplefilter("error")
            assert seen(value)[0] is value
            assert seen({"x": [value]})[0]["x"][0] is value


def test_an_unknown_type_passes_with_one_warning_that_names_it(bf16):
    class Mystery(Opaque):
        pass

    value = Mystery(low())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert seen(value)[0] is value
        assert seen([Mystery(low()), value])[0][1] is value
        assert seen({1, 2})[0] == {1, 2}
    assert [("Mystery" in str(w.message), "builtins.set" in str(w.message)) for w in caught] == [
        (True, False),
        (False, True),
    ]


# --- fwd_default_precision: gradients, copies, and the machinery around modules ----------------------------


def test_gradients_reach_the_inputs_in_their_own_dtype():
    module = Pinned()
    x = low().requires_grad_()
    with torch.autocast("cpu", BF16):
        out = module({"x": x}["x"])
    out.square().sum().backward()

    reference = x.detach().float().requires_grad_()
    expected = copy.deepcopy(module)
    expected.zero_grad()
    expected.linear(reference).square().sum().backward()
    assert x.grad.dtype is BF16
    assert torch.equal(x.grad, reference.grad.bfloat16())
    assert torch.equal(module.linear.weight.grad, expected.linear.weight.grad)


def test_pins_inside_pins_stay_pinned(bf16):
    @fwd_default_precision
    def outer(x):
        return seen(x), torch.is_autocast_enabled("cpu")

    (arrived, _, inner_on), outer_on = outer(low())
    assert arrived.dtype is torch.float32
    assert not (inner_on or outer_on)

    @fwd_default_precision
    def reenters(x):
        with torch.autocast("cpu", BF16):
            return seen(x.bfloat16())

    assert reenters(low())[0].dtype is torch.float32


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_are_pinned_too(bf16, clone):
    module = ThreePinned()
    assert torch.equal(clone(module)(low()), clone(module)(low())) is False  # random inputs, so not a constant
    x = low()
    assert clone(module)(x).dtype is torch.float32
    assert torch.equal(clone(module)(x), module(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_in_the_same_precision(use_reentrant):
    torch.manual_seed(0)
    module, plain = ThreePinned(), nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)

    def gradients(run):
        module.zero_grad()
        x.grad = None
        with torch.autocast("cpu", BF16):
            out = run(module, plain(x))
        out.square().sum().backward()
        return [out.detach(), x.grad, *[parameter.grad.clone() for parameter in module.parameters()]]

    expected = gradients(lambda module, h: module(h))
    result = gradients(lambda module, h: checkpoint(module, h, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.fixture
def clean_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_frames(function, *args, backend="aot_eager"):
    """The result of `function` compiled as one graph, and how many graphs that took."""
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    result = torch.compile(function, backend=counter, fullgraph=True)(*args)
    return result, counter.frame_count


def test_three_decorated_layers_are_one_graph(clean_dynamo):
    module, x = ThreePinned(), torch.randn(2, 4)

    def run(x):
        with torch.autocast("cpu", BF16):
            return module(F.linear(x, torch.eye(4)))

    result, frames = compiled_frames(run, x)
    assert frames == 1
    assert result.dtype is torch.float32
    assert torch.equal(result, run(x))


GRAPH_BATCHES = [
    {"x": low()},
    collections.OrderedDict(x=low()),
    Pair(low(), "text"),
    Batch(low()),
    FrozenBatch(low()),
    SlottedBatch(low()),
    FrozenSlottedBatch(low()),
    Registered(low()),
    collections.deque([low()]),
]


@pytest.mark.parametrize(
    "batch",
    [
        *(pytest.param(batch, marks=pytest.mark.extended) for batch in GRAPH_BATCHES),
        [(low(), {"y": Batch(low())}), None, 3],
    ],
    ids=lambda batch: type(batch).__name__,
)
@since((2, 13), "torch.compile does not trace the copy of a dataclass")
def test_containers_are_cast_inside_one_graph(clean_dynamo, batch):
    @fwd_default_precision
    def total(batch, **kwargs):
        return sum(leaf.sum() for leaf in leaves(batch)) + kwargs["extra"].sum()

    def leaves(value):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = list(value.values())
        elif dataclasses.is_dataclass(value) or isinstance(value, Registered):
            value = [value.x]
        elif not isinstance(value, (list, tuple, collections.deque)):
            return []
        return [leaf for item in value for leaf in leaves(item)]

    def run(batch):
        with torch.autocast("cpu", BF16):
            return total(batch, extra=low_constant)

    low_constant = low()
    result, frames = compiled_frames(run, batch)
    assert frames == 1
    assert result.dtype is torch.float32
    assert torch.equal(result, run(batch))


def test_an_unknown_type_does_not_break_the_graph(clean_dynamo):
    @fwd_default_precision
    def double(value):
        return value.x * 2

    def run(value):
        with torch.autocast("cpu", BF16):
            return double(value)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, frames = compiled_frames(run, Opaque(low()))
    assert (result.dtype, frames) == (BF16, 1)


@pytest.mark.extended  # a C++ compiler runs
def test_inductor_compiles_a_decorated_layer_and_its_backward(clean_dynamo):
    torch.manual_seed(0)
    module = Pinned()

    def run(x):
        with torch.autocast("cpu", BF16):  # inside: torch.compile's backward takes the state of the call
            return module(x.bfloat16())

    def gradients(run):
        module.zero_grad()
        run(torch.ones(2, 4)).square().sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    expected = gradients(run)
    result = gradients(torch.compile(run, backend="inductor", fullgraph=True))
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.extended
def test_checkpointing_compiles(clean_dynamo):
    module = ThreePinned()

    def run(x):
        with torch.autocast("cpu", BF16):
            return checkpoint(module, x.bfloat16(), use_reentrant=False)

    x = torch.randn(2, 4)
    result, frames = compiled_frames(run, x)
    assert frames == 1
    assert torch.equal(result, run(x))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_export_keeps_the_precision(bf16, strict):
    module, x = ThreePinned(), low()
    program = torch.export.export(module, (x,), strict=strict)
    result = program.module()(x)
    assert result.dtype is torch.float32
    assert torch.equal(result, module(x))


def test_distributed_data_parallel_runs_decorated_modules(group_of_one):
    module = ThreePinned()
    parallel = nn.parallel.DistributedDataParallel(module)
    x = low()
    with torch.autocast("cpu", BF16):
        result = parallel(x)
        assert torch.equal(result, module(x))
    result.sum().backward()
    assert result.dtype is torch.float32
    assert all(parameter.grad is not None for parameter in module.parameters())


# --- custom_fwd, custom_bwd --------------------------------------------------------------------------------


def make_matmul(forward_decorator, backward_decorator):
    """A matrix product with its own backward that notes the autocast state that each sees."""
    states = []

    def note():
        states.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    class MatMul(torch.autograd.Function):
        @staticmethod
        @forward_decorator
        def forward(ctx, a, b):
            note()
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @backward_decorator
        def backward(ctx, grad):
            note()
            a, b = ctx.saved_tensors
            grad_a = grad.mm(b.t()) if ctx.needs_input_grad[0] else None
            grad_b = a.t().mm(grad) if ctx.needs_input_grad[1] else None
            return grad_a, grad_b

    return MatMul, states


@pytest.mark.parametrize(
    ("cast_inputs", "dtype", "in_autocast", "needs_grad"),
    pairwise(
        [None, torch.float32, FP16], [None, BF16, FP16], [False, True], [(True, True), (True, False), (False, True)]
    ),
)
def test_custom_functions_compute_as_with_torch_amp(cast_inputs, dtype, in_autocast, needs_grad):
    ours = make_matmul(custom_fwd(cast_inputs=cast_inputs), custom_bwd)
    theirs = make_matmul(
        torch.amp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs), torch.amp.custom_bwd(device_type="cpu")
    )
    results = []
    for function, states in (ours, theirs):
        torch.manual_seed(0)
        a = torch.randn(3, 4, requires_grad=needs_grad[0])
        b = torch.randn(4, 3, requires_grad=needs_grad[1])
        with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
            middle = function.apply(a, b)
            out = function.apply(middle.to(b.dtype), b.t().reshape(3, 4))  # used twice in one graph
        # Backward sees another state than forward: off, or on with the other dtype.
        with torch.autocast("cpu", FP16 if dtype is BF16 else BF16, enabled=in_autocast):
            out.float().sum().backward()
        grads = [x.grad for x in (a, b) if x.grad is not None]
        results.append(([middle, out, *grads], states))
    (our_tensors, our_states), (their_tensors, their_states) = results
    assert our_states == their_states
    assert len(our_tensors) == len(their_tensors) == 2 + sum(needs_grad)
    for ours_, theirs_ in zip(our_tensors, their_tensors, strict=True):
        assert ours_.dtype is theirs_.dtype
        assert torch.equal(ours_, theirs_)


def test_a_custom_function_takes_its_device_from_tensors_at_any_depth(bf16):
    seen_dtypes = []

    class Total(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, scale, batch):
            seen_dtypes.append((batch["x"][0].dtype, torch.is_autocast_enabled("cpu")))
            return batch["x"][0].sum() * scale

    Total.apply(2.0, {"x": [low()]})
    assert seen_dtypes == [(torch.float32, False)]


def test_a_custom_function_without_tensors_still_leaves_autocast(bf16):
    class Eye(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, n):
            return torch.eye(n) @ torch.eye(n)

    assert Eye.apply(2).dtype is torch.float32


def test_a_function_with_setup_context_records_its_state_there():
    states = []

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(x):
            return x * 2

        @staticmethod
        @custom_fwd
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            states.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", FP16):
        out = Double.apply(x)
    out.sum().backward()
    assert states == [(True, FP16)]
    assert vars(x) == {}  # torch.amp's leaves attributes on the first tensor


def test_custom_bwd_without_custom_fwd_says_what_is_missing():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            return grad * 2

    with pytest.raises(PrecisionError, match=r"Half.backward.*Decorate forward with custom_fwd"):
        Half.apply(torch.ones(2, requires_grad=True)).sum().backward()


def test_custom_functions_trace_in_one_graph(clean_dynamo):
    class Plain(torch.autograd.Function):
        @staticmethod
        @custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.exp()

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            return grad * a.exp()

    def run(a):
        with torch.autocast("cpu", BF16):
            return Plain.apply(F.linear(a, torch.eye(4)))

    a = torch.randn(2, 4, requires_grad=True)
    result, frames = compiled_frames(run, a)
    assert (frames, result.dtype) == (1, torch.float32)
    assert torch.equal(result, run(a))
    compiled_grad, grad = torch.autograd.grad(result.sum(), a), torch.autograd.grad(run(a).sum(), a)
    assert torch.equal(compiled_grad[0], grad[0])
