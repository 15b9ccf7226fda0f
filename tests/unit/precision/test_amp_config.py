"""What a precision name means, and what is said about a device before training."""

import dataclasses
import textwrap
from itertools import product
from pathlib import Path

import pytest
import torch
from programs import run_python

from amp_recipes.errors import ConfigError, PrecisionError
from amp_recipes.precision import amp_config
from amp_recipes.precision.amp_config import (
    AMPConfig,
    Capabilities,
    device_capabilities,
    fp16_parameters,
    resolve_precision,
    set_float32_precision,
)

BF16, FP16 = torch.bfloat16, torch.float16


def pretend(monkeypatch, device_type, native, runs=(BF16, FP16), name="Test Device"):
    """Let every device of the type have these capabilities."""
    capabilities = Capabilities(name, native=frozenset(native), runs=frozenset(runs))
    monkeypatch.setitem(amp_config._LOOK_UPS, device_type, lambda device: capabilities)


def pretend_cuda(monkeypatch, capability, bf16_emulated=True, hip=None, count=1):
    """Let torch report one kind of CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16_emulated or capability >= (8, 0))
    monkeypatch.setattr(torch.version, "hip", hip)


def test_a_name_gives_its_dtype(subtests):
    for name, dtype in {None: torch.float32, "fp32": torch.float32, "fp16": FP16, "bf16": BF16}.items():
        with subtests.test(name):
            assert AMPConfig.from_name(name) == AMPConfig(dtype)
            assert dataclasses.asdict(AMPConfig.from_name(name)) == {"dtype": dtype}


def test_an_unknown_name_lists_the_names_and_suggests_the_nearest(subtests):
    nearest = {"bf61": "bf16", "BF16": "bf16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    for wrong, right in nearest.items():
        with subtests.test(wrong):
            with pytest.raises(ValueError) as caught:
                AMPConfig.from_name(wrong)
            assert isinstance(caught.value, ConfigError)
            message = str(caught.value)
            assert all(part in message for part in (repr(wrong), "fp32", "fp16", "bf16"))
            assert message.endswith(f"Did you mean {right}?")


def test_what_is_no_name_is_a_config_error_too(subtests):
    for wrong in ("", "zzz", 16, ["bf16"], torch.bfloat16, True):
        with subtests.test(repr(wrong)):
            with pytest.raises(ConfigError, match="expected fp32, fp16 or bf16"):
                AMPConfig.from_name(wrong)
            with pytest.raises(ConfigError, match="expected fp32, fp16, bf16 or auto"):
                resolve_precision(wrong, "cpu")


def test_auto_is_no_dtype_and_the_error_says_what_chooses_it():
    with pytest.raises(ConfigError, match="resolve_precision"):
        AMPConfig.from_name("auto")


def test_fp32_is_fine_everywhere_without_a_look_at_the_device(subtests):
    for device, name in product(["cpu", "meta", "cuda:7", torch.device("mps")], [None, "fp32"]):
        with subtests.test(f"{name} on {device}"):
            precision = resolve_precision(name, device)
            assert (precision.name, precision.dtype) == ("fp32", torch.float32)
            assert precision.device_type == torch.device(device).type
            assert precision.reason is None
            assert precision.warning is None


def test_a_native_precision_draws_no_warning(monkeypatch):
    pretend(monkeypatch, "cuda", native=[BF16, FP16])
    for name, dtype in {"bf16": BF16, "fp16": FP16}.items():
        precision = resolve_precision(name, "cuda:1")
        assert precision == amp_config.Precision(name, dtype, "cuda", reason=None, warning=None)


def test_emulated_bf16_is_one_warning_with_advice(monkeypatch):
    pretend(monkeypatch, "cpu", native=[], name="this CPU (Old)")
    warning = resolve_precision("bf16", "cpu").warning
    assert all(part in warning for part in ("bf16", "this CPU (Old)", "emulated", "--precision fp32"))

    pretend(monkeypatch, "cuda", native=[FP16], name="cuda:0 (T4)")
    warning = resolve_precision("bf16", "cuda").warning
    assert all(part in warning for part in ("cuda:0 (T4)", "emulated", "--precision fp16 (native here)"))


def test_fp16_on_a_cpu_is_a_warning_that_says_how_slow(monkeypatch):
    pretend(monkeypatch, "cpu", native=[BF16], name="this CPU (AMD EPYC)")
    warning = resolve_precision("fp16", "cpu").warning
    for part in ("this CPU (AMD EPYC)", "a hundred times slower", "--precision bf16 (native here)", "GPU"):
        assert part in warning
    pretend(monkeypatch, "cpu", native=[])
    assert "Use --precision fp32;" in resolve_precision("fp16", "cpu").warning
    pretend(monkeypatch, "cpu", native=[FP16])
    assert resolve_precision("fp16", "cpu").warning is None


def test_fp16_on_mps_is_a_warning_even_though_it_is_native(monkeypatch):
    pretend(monkeypatch, "mps", native=[BF16, FP16])
    assert "--precision bf16 or fp32" in resolve_precision("fp16", "mps").warning
    assert resolve_precision("bf16", "mps").warning is None
    pretend(monkeypatch, "mps", native=[FP16], runs=[FP16])
    assert "--precision fp32" in resolve_precision("fp16", "mps").warning


def test_what_cannot_run_names_device_dtype_and_what_would_work(monkeypatch):
    pretend(monkeypatch, "mps", native=[FP16], runs=[FP16], name="this Mac's GPU (macOS 13)")
    with pytest.raises(PrecisionError) as caught:
        resolve_precision("bf16", "mps")
    for part in ("device mps", "torch.bfloat16", "this Mac's GPU (macOS 13)", "Use fp16 or fp32"):
        assert part in str(caught.value)


def test_a_device_type_without_autocast_is_an_error_of_its_own():
    for name in ("bf16", "fp16"):
        with pytest.raises(PrecisionError, match=rf"{name} .*device meta.*no autocast.*Use fp32"):
            resolve_precision(name, "meta")


def test_a_device_that_is_not_there_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PrecisionError, match=r"bf16 .* device cuda: torch finds no cuda device"):
        resolve_precision("bf16", "cuda")
    pretend_cuda(monkeypatch, (8, 0), count=2)
    with pytest.raises(PrecisionError, match=r"finds 2 cuda.*no cuda:2"):
        resolve_precision("bf16", "cuda:2")
    with pytest.raises(ConfigError, match="'coda' is unknown"):
        resolve_precision("bf16", "coda")


def test_auto_takes_native_bf16_then_fp16_on_a_gpu_then_fp32(monkeypatch, subtests):
    cases = [
        ("cpu", [BF16, FP16], "bf16"),
        ("cpu", [BF16], "bf16"),
        ("cpu", [FP16], "fp32"),
        ("cpu", [], "fp32"),
        ("cuda", [BF16, FP16], "bf16"),
        ("cuda", [FP16], "fp16"),
        ("cuda", [], "fp32"),
        ("mps", [FP16], "fp16"),
    ]
    for device, native, expected in cases:
        with subtests.test(f"{device} with {native}"):
            pretend(monkeypatch, device, native=native, name="the thing")
            precision = resolve_precision("auto", device)
            assert precision.name == expected
            assert precision.dtype is amp_config.PRECISIONS[expected]
            assert precision.reason.startswith(f"auto: {expected}, because the thing")
            assert (precision.warning is not None) == (device == "mps")


def test_auto_is_fp32_where_there_is_no_autocast():
    precision = resolve_precision("auto", "meta")
    assert precision.name == "fp32"
    assert "meta has no autocast" in precision.reason


def test_cpu_capabilities_follow_the_instruction_set(monkeypatch, subtests):
    cases = [
        ({"avx512_bf16": True, "avx512_fp16": False}, {BF16}),
        ({"amx_bf16": True, "amx_fp16": True}, {BF16, FP16}),
        ({"avx512_fp16": True}, {FP16}),
        ({"architecture": "aarch64", "neon": True, "bf16": True, "fp16_arith": True}, {BF16, FP16}),
        ({"architecture": "aarch64", "neon": True}, set()),
        ({}, set()),
    ]
    for flags, native in cases:
        with subtests.test(str(flags)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags, raising=False)
            assert device_capabilities(torch.device("cpu")).native == native


def test_a_torch_that_cannot_tell_the_instruction_set_counts_as_not_native(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    capabilities = device_capabilities(torch.device("cpu"))
    assert capabilities.native == set()
    assert capabilities.runs == {BF16, FP16}
    assert capabilities.device_name.startswith("this CPU (")


def test_cuda_capabilities_follow_the_compute_capability(monkeypatch, subtests):
    cases = [
        ((9, 0), True, {BF16, FP16}, {BF16, FP16}),
        ((8, 0), True, {BF16, FP16}, {BF16, FP16}),
        ((7, 5), True, {FP16}, {BF16, FP16}),  # torch.cuda.is_bf16_supported() is true here
        ((7, 0), False, {FP16}, {FP16}),
        ((5, 3), True, {FP16}, {BF16, FP16}),
        ((5, 2), True, set(), {BF16, FP16}),
    ]
    for capability, bf16_emulated, native, runs in cases:
        with subtests.test(f"{capability}"):
            pretend_cuda(monkeypatch, capability, bf16_emulated)
            capabilities = device_capabilities(torch.device("cuda", 0))
            assert (capabilities.native, capabilities.runs) == (native, runs)
            assert capabilities.device_name == "cuda:0 (Test GPU)"


def test_rocm_has_both_whatever_its_capability_number(monkeypatch):
    pretend_cuda(monkeypatch, (7, 0), hip="6.2")
    assert device_capabilities(torch.device("cuda")).native == {BF16, FP16}


def test_mps_capabilities_follow_macos(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for is_14, dtypes in ((True, {BF16, FP16}), (False, {FP16})):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_, is_14=is_14: is_14)
        assert device_capabilities(torch.device("mps")).runs == dtypes


def test_xpu_capabilities_follow_the_driver(monkeypatch):
    class Properties:
        name, has_fp16, has_bfloat16_conversions = "Test Arc", True, False

    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: Properties)
    assert device_capabilities(torch.device("xpu")).native == {FP16}


def test_an_accelerator_that_cannot_be_asked_is_taken_at_its_word():
    assert resolve_precision("bf16", "hpu").warning is None


def test_this_cpu_agrees_with_what_it_does():
    """An independent look: Linux lists the instruction sets that torch should have found."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("no /proc/cpuinfo on this system")
    if "flags" not in cpuinfo:
        pytest.skip("not an x86 CPU")
    flags = cpuinfo.split("flags", 1)[1].split("\n", 1)[0].split()
    native = device_capabilities(torch.device("cpu")).native
    assert (BF16 in native) == bool({"avx512_bf16", "amx_bf16"} & set(flags))
    assert (FP16 in native) == bool({"avx512_fp16", "amx_fp16"} & set(flags))


def test_fp16_parameters_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half(), torch.nn.Linear(2, 2).bfloat16())
    assert fp16_parameters(model.named_parameters()) == ["1.weight", "1.bias"]
    assert fp16_parameters(iter([])) == []


def test_an_unknown_float32_precision_is_a_config_error(subtests):
    for wrong in ("TF32", "high", "fp32", None, True):
        with subtests.test(repr(wrong)), pytest.raises(ConfigError, match="expected ieee or tf32"):
            set_float32_precision(wrong)


def test_float32_precision_is_set_everywhere_and_leaves_torch_usable():
    """In a process of its own: the switches are global. Older getters raise where the two APIs disagree."""
    script = """
        import warnings; warnings.simplefilter("error")
        import torch
        from amp_recipes.precision.amp_config import set_float32_precision
        b = torch.backends
        places = [b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn]
        places += [b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
        others = lambda: (b.fp32_precision, b.cudnn.enabled, b.cudnn.benchmark, b.cudnn.deterministic,
                          b.mkldnn.enabled, b.cuda.matmul.allow_fp16_reduced_precision_reduction,
                          b.cuda.matmul.allow_bf16_reduced_precision_reduction, torch.get_default_dtype(),
                          torch.are_deterministic_algorithms_enabled())
        before = others()
        for mode in ("tf32", "ieee", "tf32", "ieee", "ieee"):
            assert set_float32_precision(mode) is None
            for _ in range(2):
                assert {place.fp32_precision for place in places} == {mode}
                assert b.cuda.matmul.allow_tf32 is b.cudnn.allow_tf32 is (mode == "tf32")
                assert torch.get_float32_matmul_precision() == ("high" if mode == "tf32" else "highest")
                with b.cudnn.flags(enabled=True, allow_tf32=mode == "tf32"):
                    pass
            assert others() == before
        print("fine")
    """
    run = run_python("-c", textwrap.dedent(script))
    assert run.stdout.strip() == "fine", run.stderr
