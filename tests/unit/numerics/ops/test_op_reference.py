"""What autocast does to each op: the documented lists, the probe of this machine, and the differences."""

import contextlib
import dataclasses
import json
import logging
import random
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
from cpu import runs_lstm
from torch_release import since

from amp_recipes.errors import ConfigError, PrecisionError
from amp_recipes.numerics.ops import findings as op_findings
from amp_recipes.numerics.ops import lists as op_lists
from amp_recipes.numerics.ops import probes as op_probes
from amp_recipes.numerics.ops import reference as op_reference
from amp_recipes.numerics.ops.findings import AS_GIVEN, CANNOT_RUN, EXEMPT, NOT_SEEN, OTHER_DTYPE, PARTLY
from amp_recipes.numerics.ops.lists import DOCUMENTED, FLOAT32, KERNEL_OF, LOWER_PRECISION, RAISES, STANDS_FOR, WIDEST
from amp_recipes.numerics.ops.reference import documented, policy, probe, registry, report_ops

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE_TYPES = ("cpu", "cuda", "xpu")
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def references():
    """The reference of each device type and dtype, made once; those of the default tier at the start."""
    made = {}

    def reference(device_type, dtype_name):
        key = (device_type, dtype_name)
        if key not in made:
            made[key] = op_reference.op_reference(device_type, LOW[dtype_name])
        return made[key]

    for key in (("cpu", "bf16"), ("cpu", "fp16"), ("cuda", "bf16")):
        reference(*key)
    return reference


@pytest.fixture
def only(monkeypatch):
    """Probe no more than these ops."""

    def choose(*names, **calls):
        kept = {name: op_probes.CALLS[name] for name in names} | calls
        monkeypatch.setattr(op_findings, "CALLS", kept)
        monkeypatch.setattr(op_findings, "NOT_ELIGIBLE", {})

    return choose


def by_name(findings):
    return {finding.name: finding for finding in findings}


# ---------------------------------------------------------------------- the lists


@pytest.mark.parametrize(
    ("device_type", "lower", "float32", "widest"), [("cpu", 20, 90, 3), ("cuda", 23, 51, 10), ("xpu", 21, 29, 6)]
)
def test_the_lists_are_as_long_as_the_documentation(device_type, lower, float32, widest):
    lists = DOCUMENTED[device_type]
    assert [len(lists[name]) for name in (LOWER_PRECISION, FLOAT32, WIDEST)] == [lower, float32, widest]
    assert len(documented(device_type)) == lower + float32 + widest  # so no name stands twice


def test_documented_is_read_only():
    with pytest.raises(TypeError):
        documented("cpu")["mm"] = FLOAT32


def test_a_device_type_without_lists_is_an_error_that_names_those_with():
    for ask in (documented, registry, lambda name: policy(name, "mm")):
        for device_type in ("mps", "cdua", "cuda:0", ""):
            with pytest.raises(PrecisionError, match="expected cuda, xpu or cpu"):
                ask(device_type)
    with pytest.raises(PrecisionError, match="Did you mean cuda"):
        documented("cdua")


POLICIES = [  # name, on a CPU, on CUDA
    ("mm", LOWER_PRECISION, LOWER_PRECISION),
    ("aten::softmax", None, FLOAT32),
    ("softmax.int", None, FLOAT32),
    ("aten::softmax.int", None, FLOAT32),
    ("_softmax", None, FLOAT32),
    ("aten._softmax.default", None, FLOAT32),
    ("_log_softmax", None, FLOAT32),
    ("native_layer_norm", None, FLOAT32),
    ("aten.native_group_norm.default", None, FLOAT32),
    ("_fused_rms_norm", None, FLOAT32),  # on no list, but torch casts it
    ("logsumexp", None, FLOAT32),
    ("linalg_vector_norm", None, FLOAT32),
    ("linalg_cross", None, None),  # torch.cross is cast, torch.linalg.cross is not
    ("sum.dim_IntList", None, FLOAT32),
    ("pow.Tensor_Scalar", None, FLOAT32),
    ("mean", None, None),
    ("mv", None, LOWER_PRECISION),
    ("convolution", LOWER_PRECISION, LOWER_PRECISION),
    ("conv_transpose2d.input", LOWER_PRECISION, LOWER_PRECISION),
    ("lstm_cell", None, LOWER_PRECISION),
    ("LSTMCell", None, LOWER_PRECISION),
    ("__matmul__", LOWER_PRECISION, LOWER_PRECISION),
    ("__rtruediv__", None, FLOAT32),
    ("nll_loss_forward", FLOAT32, FLOAT32),
    ("cross_entropy", FLOAT32, FLOAT32),
    ("cross_entropy_loss", FLOAT32, FLOAT32),
    ("grid_sample", FLOAT32, WIDEST),
    ("grid_sampler_2d", FLOAT32, WIDEST),
    ("_scaled_dot_product_flash_attention_for_cpu", LOWER_PRECISION, LOWER_PRECISION),
    ("scaled_dot_product_attention", LOWER_PRECISION, LOWER_PRECISION),
    ("cat", WIDEST, None),
    ("_linalg_eigh", FLOAT32, None),
    ("binary_cross_entropy", FLOAT32, "raises"),
    ("mm.out", None, None),
    ("sum.IntList_out", None, None),
    ("fractional_max_pool2d.output", None, None),
    ("addmm_", None, None),
    ("__ipow__", None, None),
    ("exp_", None, None),
    ("my_op", None, None),
    ("", None, None),
]


def test_policy_takes_names_as_dispatch_shows_them(subtests):
    for name, cpu, cuda in POLICIES:
        with subtests.test(name):
            assert (policy("cpu", name), policy("cuda", name)) == (cpu, cuda)


def test_policy_is_the_documented_one_for_every_documented_name():
    for device_type in DEVICE_TYPES:
        assert {name: policy(device_type, name) for name in documented(device_type)} == dict(documented(device_type))


def test_every_kernel_that_is_named_is_an_op_of_torch():
    """A name that torch does not have would be looked for in vain."""
    kernels = {kernel for name in op_probes.CALLS for kernel in op_probes.kernels_of(name)}
    python_names = set(STANDS_FOR) | set(KERNEL_OF.values())
    unknown = {kernel for kernel in kernels | set(KERNEL_OF) if not hasattr(torch.ops.aten, kernel)}
    assert unknown - python_names == set()


# ---------------------------------------------------------------------- the probe


@pytest.mark.parametrize(
    ("device_type", "dtype_name"),
    [
        ("cpu", "bf16"),
        ("cpu", "fp16"),
        ("cuda", "bf16"),
        pytest.param("cuda", "fp16", marks=extended),
        pytest.param("xpu", "bf16", marks=extended),
    ],
)
def test_torch_does_as_documented_or_the_difference_is_explained(references, device_type, dtype_name):
    reference = references(device_type, dtype_name)
    assert [difference for difference in reference.differences if difference.explanation is None] == []
    found = by_name(reference.findings)
    assert documented(device_type).keys() <= found.keys()
    assert [name for name in documented(device_type) if found[name].found == NOT_SEEN] == []


@pytest.mark.parametrize("dtype_name", LOW)
def test_the_differences_on_a_cpu_are_those_that_are_known(references, dtype_name):
    """The same on every CPU: what one cannot run is no difference."""
    names = {difference.name for difference in references("cpu", dtype_name).differences}
    assert names == {"_convolution", "_addmm_activation", "smooth_l1_loss"}


@pytest.mark.parametrize("dtype_name", LOW)
def test_what_this_cpu_cannot_run_is_told_as_such(references, dtype_name):
    """Only oneDNN's LSTM: some CPUs have it in neither low dtype, others in bf16 alone."""
    reference = references("cpu", dtype_name)
    stuck = {finding.name for finding in reference.findings if finding.found == CANNOT_RUN}
    assert stuck == (set() if runs_lstm(LOW[dtype_name], backward=False) else {"lstm", "mkldnn_rnn_layer"})
    assert ("1 cannot run" in reference.table()) == bool(stuck)


def test_a_kernel_that_refuses_the_low_dtype_is_no_difference(only):
    """As oneDNN's LSTM on some CPUs: an op that autocast casts to bf16, which its kernel does not know."""

    def kernel(matrix):
        if matrix.dtype == torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return matrix @ matrix

    def call(given):
        is_cast = torch.is_autocast_enabled("cpu")
        matrix = given(3, 3)
        with torch.autocast("cpu", enabled=False):
            return torch.ops.op_reference_test.mm(matrix.bfloat16() if is_cast else matrix)

    library = torch.library.Library("op_reference_test", "DEF")
    library.define("mm(Tensor matrix) -> Tensor")
    library.impl("mm", kernel, "CPU")
    only(mm=call)
    (finding,) = probe("cpu", torch.bfloat16)
    assert (finding.found, finding.computed) == (CANNOT_RUN, ("bf16",)) and "primitive" in finding.error
    reference = op_reference.op_reference("cpu", torch.bfloat16)
    assert "mm" not in {difference.name for difference in reference.differences}
    assert "1 documented ops: 0 as documented, 0 not, 0 not seen, 1 cannot run." in reference.table()


def test_an_op_that_raises_under_autocast_alone_is_a_difference(only):
    def refuse_autocast(given):
        product = torch.mm(given(3, 3), given(3, 3))
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not under autocast")
        return product

    only(mm=refuse_autocast)
    reference = op_reference.op_reference("cpu", torch.bfloat16)
    (difference,) = [difference for difference in reference.differences if difference.name == "mm"]
    assert (difference.found, difference.explanation) == (RAISES, None)


def test_the_profiler_sees_every_documented_cpu_op_run_in_the_dtype_that_the_probe_reports(references):
    """An instrument that shares nothing with the probe: the op is called by its own name, once more after the casts."""
    found = by_name(references("cpu", "bf16").findings)
    turns = {LOWER_PRECISION: (torch.float32,), FLOAT32: (torch.bfloat16,), WIDEST: (torch.bfloat16, torch.float32)}
    names = {"fp32": "float", "bf16": "c10::BFloat16", "complex64": "c10::complex<float>", "fp64": "double"}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        for name, listed in documented("cpu").items():
            given = op_probes.Inputs(torch.device("cpu"), turns[listed], False, contextlib.nullcontext)
            refused = contextlib.suppress(RuntimeError) if found[name].found == CANNOT_RUN else contextlib.nullcontext()
            with torch.autocast("cpu", torch.bfloat16), torch.profiler.record_function(f"probe:{name}"), refused:
                op_probes.CALLS[name](given)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    calls, current = defaultdict(list), None
    for event in events:
        if event.name().startswith("probe:"):
            current = event.name().removeprefix("probe:")
        elif current is not None and event.name() == f"aten::{current}":
            calls[current].append({dtype for dtype in event.dtypes() if dtype in names.values()})
    for name, listed in documented("cpu").items():
        assert calls[name], f"{name} was never called"
        # The profiler does not look into lists, nor at the inputs of a call that raises.
        if name in ("cat", "stack") or found[name].found == CANNOT_RUN:
            continue
        expected = "c10::BFloat16" if listed == LOWER_PRECISION else "float"
        assert ({expected} in calls[name]) == (found[name].found == listed), (name, calls[name])


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=extended)])
def test_the_trace_without_a_device_finds_what_the_live_probe_finds(references, every):
    """The CPU, taken as a device that is not here."""
    live = by_name(references("cpu", "bf16").findings)
    tracer = op_findings._Prober("cpu", torch.bfloat16, live=False)
    with op_findings._undisturbed("cpu", live=False):
        names = [name for name in live if "(" not in name][::every]
        traced = [tracer.finding(name, op_probes.CALLS[name], live[name].documented) for name in names]
    seen = [finding for finding in traced if finding.found != NOT_SEEN]
    assert len(seen) > 200 / every
    for finding in seen:
        is_cast_alone = live[finding.name].found == CANNOT_RUN  # what is traced runs no kernel
        assert finding.found == (LOWER_PRECISION if is_cast_alone else live[finding.name].found), finding.name


@since((2, 13), "other lists")
@pytest.mark.parametrize("device_type", ["cuda", pytest.param("xpu", marks=extended)])
def test_what_is_known_beyond_the_documentation_is_what_torch_does(references, device_type):
    reference = references(device_type, "bf16")
    known = op_lists.undocumented(device_type)
    assert known.keys() - set(reference.registry.registered_only) <= {"_cudnn_rnn"}  # only builds with cuDNN have it
    found = {name: by_name(reference.findings)[name].found for name in known if name in by_name(reference.findings)}
    unseen = {name for name, does in found.items() if does == NOT_SEEN}
    assert unseen <= {"scaled_dot_product_attention"}  # chosen by a device that is not here
    assert {name: does for name, does in found.items() if name not in unseen} == {
        name: known[name] for name in found.keys() - unseen
    }
    uncalled = known.keys() - found.keys()
    assert uncalled <= {
        *("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "frobenius_norm", "nuclear_norm")
    }


@pytest.mark.parametrize("dtype_name", ["bf16", pytest.param("fp16", marks=extended)])
def test_cuda_rounds_the_log_softmax_of_cross_entropy_which_a_cpu_does_not(references, dtype_name):
    on_cuda, on_cpu = (by_name(references(kind, dtype_name).findings)["cross_entropy"] for kind in ("cuda", "cpu"))
    assert (on_cuda.documented, on_cuda.found, set(on_cuda.computed)) == (FLOAT32, PARTLY, {dtype_name, "fp32"})
    assert (on_cpu.found, on_cpu.computed) == (FLOAT32, ("fp32",))
    assert "cross_entropy" in references("cpu", dtype_name).rehearsal_gaps[FLOAT32, PARTLY]


@pytest.mark.parametrize("dtype_name", LOW)
def test_the_calls_that_are_not_eligible_are_left_alone(references, dtype_name):
    exempt = [finding for finding in references("cpu", dtype_name).findings if finding.documented == EXEMPT]
    assert len(exempt) == len(op_probes.NOT_ELIGIBLE)
    assert {finding.found for finding in exempt} == {AS_GIVEN}
    assert by_name(exempt)["addmm_ (in place)"].computed == (dtype_name,)
    assert by_name(exempt)["softmax (dtype=)"].outputs == ("fp64",)


FINDINGS = [  # name, found, inputs, computed, outputs
    ("mm", LOWER_PRECISION, ("fp32",), ("bf16",), ("bf16",)),
    ("mse_loss", FLOAT32, ("bf16",), ("fp32",), ("fp32",)),
    ("cat", WIDEST, ("bf16", "fp32"), ("fp32",), ("fp32",)),
    ("softmax", AS_GIVEN, ("bf16",), ("bf16",), ("bf16",)),
    ("layer_norm", AS_GIVEN, ("bf16",), ("bf16",), ("bf16",)),
    ("rms_norm", AS_GIVEN, ("bf16",), ("fp32",), ("bf16",)),
    ("LSTMCell", LOWER_PRECISION, ("fp32",), ("bf16",), ("fp32",)),
    ("einsum", LOWER_PRECISION, ("fp32",), ("bf16",), ("bf16",)),
    ("fft_fft", FLOAT32, ("bf16",), ("fp32",), ("complex64",)),
]


def test_findings_on_a_cpu(references, subtests):
    findings = by_name(references("cpu", "bf16").findings)
    for name, found, inputs, computed, outputs in FINDINGS:
        with subtests.test(name):
            it = findings[name]
            assert (it.found, it.inputs, it.computed, it.outputs) == (found, inputs, computed, outputs)


def test_an_op_is_not_believed_to_have_run_if_its_kernel_was_not_seen(only):
    only(
        mm=lambda given: given(3, 3),
        bmm=lambda given: given(3, 3).bfloat16(),
        addmm=lambda given: given(3, 3).bfloat16() if torch.is_autocast_enabled("cpu") else given(3, 3),
    )
    assert [finding.found for finding in probe("cpu", torch.bfloat16)] == [NOT_SEEN, NOT_SEEN, NOT_SEEN]


def test_an_op_that_this_build_lacks_is_a_finding(only, monkeypatch):
    monkeypatch.delattr(torch, "bmm")
    monkeypatch.setattr(torch, "cdist", None)
    only("bmm", "cdist", "mm", mv=lambda given: torch.ops.aten.no_such_op(given(3)))
    bmm, cdist, mm, mv = probe("cpu", torch.bfloat16)
    assert (bmm.found, bmm.documented, mm.error) == (NOT_SEEN, LOWER_PRECISION, None)
    assert bmm.error.startswith("AttributeError") and cdist.error.startswith("TypeError")
    assert mv.error.startswith("AttributeError")
    reference = op_reference.op_reference("cpu", torch.bfloat16)
    unexplained = {difference.name for difference in reference.differences if difference.explanation is None}
    assert {"bmm", "cdist", "addmm"} <= unexplained and "mm" not in unexplained  # addmm was not even called


def test_a_cast_to_another_low_dtype_is_not_taken_for_the_one_asked_for(only):
    """As cuDNN's recurrent networks do, which know fp16 only."""

    def to_half(given):
        matrices = given(3, 3), given(3, 3)
        enabled = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            return torch.mm(*(matrix.half() if enabled else matrix for matrix in matrices))

    only(mm=to_half)
    (finding,) = probe("cpu", torch.bfloat16)
    assert (finding.found, finding.computed) == (OTHER_DTYPE, ("fp16",))


def test_wrong_entries_of_the_lists_are_reported(references, monkeypatch):
    wrong = {"softmax": FLOAT32, "mm": FLOAT32, "mse_loss": LOWER_PRECISION, "cat": LOWER_PRECISION}
    right = {difference.name for difference in references("cpu", "bf16").differences}
    for name, listed in wrong.items():
        monkeypatch.setitem(op_lists._DOCUMENTED_POLICIES["cpu"], name, listed)
    reference = op_reference.op_reference("cpu", torch.bfloat16)
    assert {difference.name for difference in reference.differences} - right == wrong.keys()
    for name, listed in wrong.items():
        first = next(difference for difference in reference.differences if difference.name == name)
        assert (first.documented, first.explanation) == (f"documented {listed}", None)
    assert "NOT EXPLAINED" in reference.table()


def test_a_kernel_that_nobody_knows_of_is_reported(references, monkeypatch):
    monkeypatch.delitem(op_lists._UNDOCUMENTED_POLICIES["cpu"], "smooth_l1_loss")
    (difference,) = [d for d in references("cpu", "bf16").differences if d.name == "smooth_l1_loss"]
    assert (difference.documented, difference.found, difference.explanation) == ("not listed", FLOAT32, None)


def test_a_documented_name_that_torch_does_not_have_is_reported(references, monkeypatch):
    monkeypatch.setitem(op_lists._DOCUMENTED_POLICIES["cpu"], "no_such_op", FLOAT32)
    reference = dataclasses.replace(references("cpu", "bf16"), registry=registry("cpu"))
    reports = [difference for difference in reference.differences if difference.name == "no_such_op"]
    assert [(report.found, report.explanation) for report in reports] == [
        ("never called", None),
        ("no kernel of that name", None),
    ]


# ---------------------------------------------------------------------- the registry


@since((2, 13), "other lists")
def test_the_registry_needs_no_device():
    cuda = registry("cuda")
    assert "aten::softmax.int" in cuda.kernels and {"softmax", "mm", "rms_norm"} <= cuda.names
    assert set(cuda.documented_only) == set(STANDS_FOR)  # Python's names, and no others
    assert {"rms_norm", "logsumexp", "einsum", "huber_loss"} <= set(cuda.registered_only)
    assert not set(cuda.registered_only) & set(documented("cuda"))


def test_the_registry_of_the_cpu():
    cpu = registry("cpu")
    assert cpu.documented_only == ()
    assert cpu.registered_only == ("_addmm_activation", "smooth_l1_loss")
    assert "aten::_convolution" not in cpu.kernels and "aten::_convolution.deprecated" in cpu.kernels


# ---------------------------------------------------------------------- side effects


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def errors_on_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_warn_always(True)  # not only the first time in this process
        try:
            yield
        finally:
            torch.set_warn_always(False)


SURROUNDINGS = {
    "autocast fp16": lambda: torch.autocast("cpu", torch.float16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "warnings": errors_on_warnings,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}
OF_EACH_POLICY = ("mm", "softmax", "mse_loss", "cat", "prelu", "index_copy", "einsum", "quantile")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=extended)])
def test_the_surroundings_do_not_change_the_findings(only, subtests, every):
    if not every:
        only(*OF_EACH_POLICY)
    expected = by_name(probe("cpu", torch.bfloat16))
    for name, surroundings in SURROUNDINGS.items():
        with subtests.test(name):
            with surroundings():
                found = by_name(probe("cpu", torch.bfloat16))
            assert found == expected


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=extended)])
def test_the_probe_leaves_everything_as_it_was(device_type):
    torch.manual_seed(3), random.seed(3), np.random.seed(3)

    def state():
        return (
            [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICE_TYPES],
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            list(warnings.filters),
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
        )

    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        before = state()
        probe(device_type, torch.bfloat16)
        assert state() == before
        assert torch.autocast_increment_nesting() == 2  # one for this region, one for the question
        torch.autocast_decrement_nesting()


def test_a_cast_cached_by_the_region_around_survives(only):
    """Leaving the probe must not end the region in which it was called."""
    only("mm")
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        first = torch.mm(weight, weight)
        probe("cpu", torch.float16)
        second = torch.mm(weight, weight)
    casts = [{edge[0] for edge in output.grad_fn.next_functions} for output in (first, second)]
    assert casts[0] == casts[1]


def test_autocast_that_was_forced_for_a_missing_device_stays_forced(only):
    only("mm")
    torch.set_autocast_enabled("xpu", True)
    try:
        probe("xpu", torch.bfloat16)
        assert torch.is_autocast_enabled("xpu")
    finally:
        torch.set_autocast_enabled("xpu", False)


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=extended)])
def test_nothing_is_printed_or_logged(capfd, device_type):
    logged = []
    handler = logging.Handler()
    handler.emit = logged.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        probe(device_type, torch.float16)
    finally:
        log.removeHandler(handler)
    assert capfd.readouterr() == ("", "") and logged == [] and not log.disabled


# ---------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("device_type", "dtype_name"), [("cpu", "bf16"), ("cpu", "fp16"), pytest.param("cuda", "fp16", marks=extended)]
)
def test_the_table_tells_everything_in_100_columns(references, device_type, dtype_name):
    reference = references(device_type, dtype_name)
    for every in (False, True):
        table = reference.table(every)
        lines = table.splitlines()
        assert max(map(len, lines)) <= 100 and not any(line.endswith(" ") for line in lines)
        assert torch.__version__ in lines[0] and dtype_name in lines[0]
        for finding in reference.findings:
            assert finding.name in " ".join(table.split())
        end = table[table.index("Differences from the documentation") :]
        for difference in reference.differences:
            assert difference.name in end


def test_the_first_line_tells_what_the_cpu_computes_in_hardware(references):
    reference = references("cpu", "bf16")
    words = " ".join(reference.table().splitlines()[:2]).replace(";", "").split()
    assert reference.features and set(reference.features) <= set(words)


def test_rows_of_the_full_table_are_aligned(references):
    lines = references("cpu", "bf16").table(every=True).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("widest"))
    rows = lines[start + 1 : start + 5]
    column = rows[0].index("computed")
    assert [row[column:].split()[0] for row in rows] == ["computed", "fp32", "fp32", "fp32"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda", pytest.param("xpu", marks=extended)])
def test_the_json_holds_the_whole_reference(references, device_type):
    reference = references(device_type, "bf16")
    saved = json.loads(json.dumps(reference.as_dict(), allow_nan=False))
    assert [finding["name"] for finding in saved["findings"]] == [finding.name for finding in reference.findings]
    assert [difference["name"] for difference in saved["differences"]] == [d.name for d in reference.differences]
    assert saved["torch"] == torch.__version__ and saved["dtype"] == "bf16"
    softmax = next(finding for finding in saved["findings"] if finding["name"] == "softmax")
    assert softmax["cuda"] == FLOAT32


def test_what_a_cpu_run_does_not_rehearse(references):
    gaps = references("cpu", "bf16").rehearsal_gaps
    assert {"softmax", "layer_norm", "rms_norm", "exp", "pow", "sum", "norm", "cumsum"} <= set(gaps[AS_GIVEN, FLOAT32])
    assert {"avg_pool3d", "fft_fft", "linalg_eigh"} <= set(gaps[FLOAT32, AS_GIVEN])
    named = {name for names in gaps.values() for name in names}
    assert not named & {"mm", "mse_loss", "lstm", "gru", "mkldnn_rnn_layer", *op_probes.NOT_ELIGIBLE}
    assert not named & {"native_layer_norm", "convolution", "grid_sampler_2d"}  # reached through other ops
    assert references("cuda", "bf16").rehearsal_gaps == {}


def test_report_ops_prints_a_table_or_json(only):
    only("mm", "softmax")
    assert report_ops("cpu", None, as_json=False).splitlines()[0].startswith(f"torch {torch.__version__}")
    saved = json.loads(report_ops("cpu", "fp16", as_json=True))
    assert (saved["device_type"], saved["dtype"], saved["live"]) == ("cpu", "fp16", True)
    best = json.loads(report_ops(None, "bf16", as_json=True))
    assert best["live"] and best["device_type"] == ("cuda" if torch.cuda.is_available() else best["device_type"])


def test_report_ops_refuses():
    for device_type, dtype_name, error, says in (
        ("cpu", "fp32", PrecisionError, "autocast does nothing in fp32"),
        ("cpu", "bf61", ConfigError, "Did you mean bf16"),
        ("cpu", "auto", ConfigError, "auto"),
        ("mps", "bf16", PrecisionError, "expected cuda, xpu or cpu"),
    ):
        with pytest.raises(error, match=says):
            report_ops(device_type, dtype_name, as_json=False)


def test_only_low_dtypes_are_probed():
    for dtype in (torch.float32, torch.float64, torch.int64):
        with pytest.raises(PrecisionError, match=r"torch\.bfloat16 or torch\.float16"):
            probe("cpu", dtype)


def test_another_version_of_torch_is_said(only, monkeypatch):
    only("mm")
    monkeypatch.setattr(torch, "__version__", "2.20.1")
    assert "those of torch 2.13" in report_ops("cpu", "bf16", as_json=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
@pytest.mark.parametrize("dtype_name", LOW)
def test_a_gpu_is_probed_live_and_does_what_the_trace_says(references, dtype_name):
    reference = references("cuda", dtype_name)
    assert reference.live
    tracer = op_findings._Prober("cuda", LOW[dtype_name], live=False)
    with op_findings._undisturbed("cuda", live=False):
        for name in documented("cuda"):
            traced = tracer.finding(name, op_probes.CALLS[name], None)
            assert traced.found in (by_name(reference.findings)[name].found, NOT_SEEN), name
