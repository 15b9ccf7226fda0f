"""A state comes back from its file as it was, the safetensors library can read it, and no file makes code run."""

import hashlib
import json
import pickle
import re
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from amp_recipes.checkpoint.hashed_file import file_sha256
from amp_recipes.checkpoint.state_format import pack_state, plain_problem, read_state, write_state
from amp_recipes.errors import CheckpointError


def there_and_back(tmp_path, state):
    path = tmp_path / "x.safetensors"
    path.unlink(missing_ok=True)
    write_state(path, pack_state(state, "x"))
    return read_state(path)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(a, b):
    """Same kinds, same order, same bits."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert bits(a) == bits(b)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        for (key, x), (other, y) in zip(a.items(), b.items(), strict=True):
            assert_same(key, other)
            assert_same(x, y)
    elif isinstance(a, list | tuple | deque):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b) if isinstance(a, float | complex) else a == b


UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

# --- what comes back


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=[])),  # with surrogates, which no UTF-8 holds
    st.binary(),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    SCALARS | st.builds(torch.tensor, st.lists(st.integers(-5, 5), max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(deque),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["a", "$tensor", "$dict", "__metadata__", "a/b"]), inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=4).map(lambda entries: defaultdict(list, entries)),
        st.sets(st.integers() | st.text(), max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=UNHURRIED)
@given(TREES)
def test_any_tree_of_plain_values_comes_back(tmp_path, state):
    assert_same(there_and_back(tmp_path, state), state)


def dense_dtypes():
    found = {it for it in vars(torch).values() if isinstance(it, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    return sorted(found - quantized, key=str)


def test_every_dense_dtype_comes_back_bit_for_bit(tmp_path, subtests):
    for dtype in dense_dtypes():
        raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) if dtype != torch.bool else torch.tensor([0, 1] * 6)
        flat = raw.view(dtype) if dtype != torch.bool else raw.bool()
        with subtests.test(str(dtype)):
            state = {"flat": flat, "matrix": flat.reshape(3, 4), "scalar": flat[5], "empty": flat[:0].reshape(0, 7)}
            assert_same(there_and_back(tmp_path, state), state)


VALUES = [
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    frozenset([1, "a"]),
    deque([1, 2], maxlen=3),
    Counter({3: 2, 5: 1}),  # MultiStepLR asks its milestones as a Counter
    {1: "int", "1": "text", 1.5: "float", None: 0, True + 1: 2},
    [True, 1, 1.0, -0.0, float("inf"), float("nan")],
    [10**5000, -(2**63), 2**63 - 1, 2**63],
    np.float64(0.1),
    np.float32(0.1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.array(3.5),
    np.zeros((0, 3), np.complex128),
    np.random.PCG64(5).state,
    np.random.MT19937(5).state,
]


def test_other_kinds_of_values_come_back(tmp_path, subtests):
    for number, state in enumerate(VALUES):
        with subtests.test(type(state).__name__, number=number):
            back = there_and_back(tmp_path, {"x": state})["x"]
            assert_same(back, state)
            if isinstance(state, deque):
                assert back.maxlen == state.maxlen


def test_what_comes_back_as_a_simpler_kind(tmp_path):
    class Version(str):
        pass

    state = [defaultdict(lambda: 0, a=[1]), nn.Parameter(torch.ones(2)), Version("2.1"), np.str_("x")]
    dict_, tensor, version, text = there_and_back(tmp_path, state)
    assert (dict_, type(dict_)) == ({"a": [1]}, dict)
    assert (type(tensor), tensor.requires_grad) == (torch.Tensor, False)
    assert [(it, type(it)) for it in (version, text)] == [("2.1", str), ("x", str)]


def test_a_defaultdict_goes_on_making_what_it_made(tmp_path, subtests):
    for factory in (int, float, list, set, dict, None):
        with subtests.test(str(factory)):
            state = {"x": defaultdict(factory, {"a": 1, 2: [torch.ones(1)], "$dict": 3})}
            back = there_and_back(tmp_path, state)["x"]
            assert (type(back), back.default_factory) == (defaultdict, factory)
            assert (back["a"], back["$dict"], torch.equal(back[2][0], torch.ones(1))) == (1, 3, True)
            if factory is not None:
                assert back["new"] == factory()


def test_numpy_numbers_as_keys_come_back_as_the_python_numbers_that_find_the_same(tmp_path):
    keys = [np.int64(3), np.uint8(7), np.float32(0.1), np.float64(0.5), np.bool_(False)]
    back = there_and_back(tmp_path, {key: index for index, key in enumerate(keys)})
    assert [type(key) for key in back] == [int, int, float, float, bool]
    assert [back[key] for key in keys] == list(range(5))


def test_layouts_come_back_and_views_do_not_bring_what_they_are_a_view_of(tmp_path):
    big = torch.arange(24.0).reshape(1, 2, 3, 4)
    state = {
        "channels_last": big.to(memory_format=torch.channels_last),
        "transposed": big[0, 0].T,
        "expanded": torch.ones(1).expand(5),
        "part": big[..., ::2],
        "conj": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    back = there_and_back(tmp_path, state)
    for key in ("channels_last", "transposed"):
        assert_same(back[key], state[key])
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor)
        assert back[key].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    array = np.arange(6).reshape(2, 3)
    kinds = [array[:, ::-1], np.asfortranarray(array), array.astype(">i8"), np.broadcast_to(array, (2, 2, 3))]
    for kind, again in zip(kinds, there_and_back(tmp_path, kinds), strict=True):
        np.testing.assert_array_equal(again, kind)


def test_tied_tensors_are_written_once_and_tied_again(tmp_path):
    weight = torch.randn(100, 100)
    back = there_and_back(tmp_path, {"a": weight, "b": nn.Parameter(weight), "head": weight[:1], "other": weight + 0})
    assert back["a"] is back["b"]
    assert back["other"] is not back["a"]
    assert torch.equal(back["head"], weight[:1])
    assert (tmp_path / "x.safetensors").stat().st_size < 2 * weight.numel() * 4 + 2000


def test_the_versions_in_a_modules_state_come_back(tmp_path):
    state = nn.BatchNorm1d(2).state_dict()
    back = there_and_back(tmp_path, state)
    assert_same(back, state)
    assert back._metadata == state._metadata
    assert back._metadata[""] == {"version": 2}


def test_what_was_read_is_independent_of_the_file(tmp_path):
    back = there_and_back(tmp_path, {"x": torch.ones(1000)})
    (tmp_path / "x.safetensors").write_bytes(b"")
    back["x"].add_(1)
    assert back["x"].sum() == 2000


def test_it_can_be_read_inside_inference_mode_and_trained_on_outside(tmp_path):
    with torch.inference_mode():
        back = there_and_back(tmp_path, {"x": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)})
    assert not back["x"].is_inference()
    assert not back["c"].is_inference()


def test_a_default_device_does_not_matter(tmp_path):
    state = {"x": torch.ones(2), "c": torch.ones(2, 2, dtype=torch.complex128).T, "t": torch.arange(6.0).view(2, 3).T}
    torch.set_default_device("meta")
    try:
        back = there_and_back(tmp_path, state)
    finally:
        torch.set_default_device(None)
    assert_same(back, state)


# --- the file


def test_the_safetensors_library_reads_a_models_file_as_its_state_dict(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).to(torch.bfloat16))
    digest = write_state(tmp_path / "m.safetensors", pack_state(model.state_dict(), "m"))
    state = model.state_dict()
    read = load_file(tmp_path / "m.safetensors")
    assert set(read) == set(state)
    for key, tensor in state.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key], tensor)
    content = (tmp_path / "m.safetensors").read_bytes()
    assert digest == hashlib.sha256(content).hexdigest() == file_sha256(tmp_path / "m.safetensors")


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(FileExistsError):
        write_state(tmp_path / "x", pack_state({}, "x"))
    assert (tmp_path / "x").read_text() == "precious"


# --- what is refused


class Colour(IntEnum):
    RED = 1


class Other(Enum):
    ONE = 1


class Wrapped(torch.Tensor):
    """Stands for DTensor and its like: the data are somewhere else."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]


def of_a_kind_in_beta():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        return torch.ones(2, 2).to_sparse_csr(), quantized


CSR, QUANTIZED = of_a_kind_in_beta()
Point = namedtuple("Point", ["x", "y"])
LOOP = []
LOOP.append(LOOP)


def test_what_a_file_cannot_hold_is_named_with_its_place_and_kind(subtests):
    for value, what in [
        (lambda: 0, "the function .*<lambda>"),
        (Path, "the class Path"),
        (Path("x"), "pathlib"),
        (object(), "object"),
        (Colour.RED, "Colour"),
        (Other.ONE, "Other"),
        (bytearray(b"x"), "bytearray"),
        (slice(3), "slice"),
        (type("Point", (tuple,), {})((1, 2)), "Point"),
        (type("State", (dict,), {})(), "State"),
        ({frozenset(): 2}, "frozenset as a key"),
        ({Colour.RED: 1}, "Colour as a key"),
        ({np.datetime64("2020-01-01"): 1}, "datetime64 as a key"),
        (Point(1, 2), "Point"),
        (np.array(["x"], dtype=object), "ndarray of object"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (torch.ones(2).to_sparse(), "sparse_coo"),
        (CSR, "sparse_csr"),
        (QUANTIZED, "quantized"),
        (torch.empty(2, device="meta"), "meta"),
        (Wrapped(torch.ones(2)), "Wrapped"),
        (nn.LazyLinear(2).weight, "lazy"),
        (LOOP, "100 levels deep, or contains itself"),
    ]:
        with subtests.test(what):
            expected = rf"of recoverable sched: state_dict\(\)\['a'\]\[1\].* is .*{what}"
            with pytest.raises(CheckpointError, match=expected):
                pack_state({"a": [1, value]}, "sched")
            assert re.search(rf"{what}.* at \['a'\]\[1\]", plain_problem({"a": [1, value]}))
            assert re.search(what, plain_problem(value))


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.ones(2), torch.ones(3)]
        return [torch.nested.nested_tensor(parts, layout=it) for it in (torch.strided, torch.jagged)]


class Hostile:
    """Fails at being looked at."""

    @property
    def __class__(self):
        raise ValueError("do not ask")


class Sparse(dict):
    """A kind of dict."""


def test_why_a_value_would_not_come_back_as_it_is_is_told_and_never_raised(subtests):
    for value, what in [
        (defaultdict(lambda: 0), r"a defaultdict whose factory is the function .*<lambda>"),
        ([1, {"a": defaultdict(Counter)}], r"a defaultdict whose factory is the class Counter at \[1\]\['a'\]"),
        (Sparse(), "Sparse"),
        (Hostile(), "do not ask"),
        *[(it, ".") for it in nested()],
    ]:
        with subtests.test(what):
            assert re.search(what, plain_problem(value))


def test_what_holds_itself_by_way_of_a_dict_is_told(tmp_path):
    loop = {}
    loop["x"] = (1, [loop])
    assert "contains itself" in plain_problem(loop)


@settings(max_examples=50, deadline=None, suppress_health_check=UNHURRIED)
@given(TREES)
def test_nothing_is_the_matter_with_plain_values(state):
    assert plain_problem(state) is None


def test_nothing_is_the_matter_with_what_comes_back():
    for value in (
        torch.ones(2).cfloat().conj(),
        torch.ones(2, requires_grad=True) * 2,
        nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        frozenset([1]),
        deque([torch.ones(1)], maxlen=2),
        Counter("ab"),
        defaultdict(dict, {np.int64(3): {"x": 1}}),
        np.float32(3),
        np.zeros(3),
    ):
        assert plain_problem({"x": [value]}) is None


def test_a_deep_tree_comes_back_up_to_the_limit(tmp_path):
    deep = torch.ones(1)
    for level in range(98):
        deep = ({level: deep},) if level % 2 else OrderedDict(x=deep)
        deep = deep[0] if isinstance(deep, tuple) else deep
    assert_same(there_and_back(tmp_path, deep), deep)


# --- files that somebody made


def forged(tmp_path, document, tensors=None):
    path = tmp_path / "forged.safetensors"
    text = document if isinstance(document, str) else json.dumps(document)
    save_file(tensors or {"t": torch.zeros(4, dtype=torch.uint8)}, path, metadata={"amp_recipes": text})
    return path


def test_a_forged_file_is_refused(tmp_path, subtests):
    for document in (
        "no json",
        "[" * 100_000,
        {"$tensor": "absent"},
        {"$unknown": 1},
        {"$tensor": "t", "dtype": "load", "shape": [1]},
        {"$tensor": "t", "dtype": "float32", "shape": [10**12]},
        {"$tensor": "t", "stride": [10**12]},
        {"$tensor": "t", "stride": [-1]},
        {"$dtype": "load"},
        {"$dtype": "__builtins__"},
        {"$scalar": 1, "dtype": "object"},
        {"$set": [[1]]},
        {"$bytes": "%"},
        {"$int": "1 + 1"},
        {"$OrderedDict": 3},
    ):
        with subtests.test(str(document)[:80]), pytest.raises(CheckpointError, match="cannot be read"):
            read_state(forged(tmp_path, document))


def test_a_file_of_another_program_is_refused(tmp_path):
    save_file({"t": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors: the state cannot be read"):
        read_state(tmp_path / "other.safetensors")


def test_a_pickle_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"x": Payload()}, tmp_path / "torch")
    (tmp_path / "pickle").write_bytes(pickle.dumps(Payload()))
    for name in ("torch", "pickle"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_state(tmp_path / name)
    assert not (tmp_path / "executed").exists()
    pickle.loads((tmp_path / "pickle").read_bytes())
    assert (tmp_path / "executed").exists()  # it would have been seen
