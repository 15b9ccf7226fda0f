"""One run's decisions about precision, from its options."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_recipes.config import RunOptions
from amp_recipes.errors import ConfigError, NonfiniteError, PrecisionError
from amp_recipes.precision import PrecisionPlan, Update, fwd_default_precision

CPU = torch.device("cpu")
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def fp32_means_what_it_did():
    """What fp32 means is a setting of the process: put it back, the newer switches after the older."""
    backends = torch.backends
    places = [backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]
    places += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    matmul, allow = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    before = [place.fp32_precision for place in places]
    yield
    torch.set_float32_matmul_precision(matmul)
    backends.cudnn.allow_tf32 = allow
    for place, mode in zip(places, before, strict=True):
        place.fp32_precision = mode


@pytest.fixture(params=["native", "slow"])
def cpu(request, monkeypatch):
    """A CPU that computes in both 16-bit formats, or in neither."""
    flags = {"avx512_bf16": True, "avx512_fp16": True} if request.param == "native" else {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    return request.param


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.attention(x, x, x)[0])


class Decorated(nn.Module):
    @fwd_default_precision
    def forward(self, x):
        return x


def model():
    return nn.ModuleDict({"model": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))})


def plan(modules=None, **options):
    return PrecisionPlan(RunOptions.from_mapping(options), modules or model(), CPU)


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -------------------------------------------------------------- formats


def test_training_and_evaluation_compute_in_the_formats_asked_for(subtests):
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for training, evaluation in [("bf16", "fp32"), ("fp16", "bf16"), ("fp32", "bf16")]:
        with subtests.test(f"{training}, {evaluation}"):
            modules = model()
            made = plan(modules, precision=training, eval_precision=evaluation)
            for context, name in ((made.training_ctx, training), (made.evaluation_ctx, evaluation)):
                with context:
                    assert modules["model"](X).dtype is dtypes[name]
            assert (made.training.name, made.evaluation.name) == (training, evaluation)


def test_slow_formats_are_warned_of_at_construction_once_each(cpu, caplog, subtests):
    slow = {
        ("bf16", "fp32"): ["bf16"],
        ("fp16", "fp16"): ["fp16"],  # once, though it is asked for twice
        ("fp16", "bf16"): ["fp16", "bf16"],
        ("fp32", "bf16"): ["bf16"],
        ("fp32", "fp32"): [],
    }
    for (precision, eval_precision), expected in slow.items():
        with subtests.test(f"{precision}, {eval_precision}"):
            caplog.clear()
            modules = model()
            made = plan(modules, precision=precision, eval_precision=eval_precision)
            messages = warned(caplog)
            assert [message.split(" on this CPU")[0] for message in messages] == (expected if cpu == "slow" else [])
            assert all("Use --precision fp32" in message for message in messages)
            caplog.clear()
            for context in (made.training_ctx, made.evaluation_ctx) * 2:
                with context:
                    modules["model"](X)
            assert warned(caplog) == []


def test_what_auto_chose_is_told_with_the_reason(cpu, caplog):
    caplog.set_level(logging.INFO)
    made = plan(precision="auto")
    chosen = {"native": "bf16", "slow": "fp32"}[cpu]
    assert made.training.name == chosen
    assert any(r.levelno == logging.INFO and r.getMessage().startswith(f"auto: {chosen}") for r in caplog.records)


def test_a_device_that_is_not_there_is_refused_before_anything_is_pinned():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    modules = model()
    options = RunOptions.from_mapping({"precision": "bf16", "fp32_modules": ["*"]})
    with pytest.raises(PrecisionError, match=r"bf16.*cuda"):
        PrecisionPlan(options, modules, torch.device("cuda"))
    assert not [name for name, module in modules.named_modules() if "forward" in vars(module)]


# -------------------------------------------------------------- scaler


def test_losses_are_scaled_in_fp16_training_only(subtests):
    for precision, eval_precision, enabled in [
        ("fp16", "fp32", True),
        ("bf16", "fp16", False),
        ("fp32", "fp16", False),
    ]:
        with subtests.test(precision):
            made = plan(precision=precision, eval_precision=eval_precision)
            assert made.scaler.is_enabled() is enabled
            assert float(made.scaler.scale(torch.tensor(1.0))) == (made.scaler.get_scale() if enabled else 1.0)
            assert made.updates.scaler is made.scaler


def test_each_option_of_the_scale_arrives_in_its_own_place():
    options = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    scaler = plan(precision="fp16", min_scale=512.0, **options).scaler
    state = scaler.state_dict()
    found = {name: state[name] for name in ("scale", "growth_factor", "backoff_factor", "growth_interval")}
    assert found == {"scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}

    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0  # not 256


@pytest.mark.parametrize(
    ("precision", "scale", "ends"), [("bf16", None, True), ("fp16", 1024.0, False), ("fp16", 512.0, True)]
)
def test_patience_forgives_overflows_in_fp16_while_the_scale_can_fall(precision, scale, ends):
    made = plan(precision=precision, nonfinite_patience=2, init_scale=2048.0, min_scale=512.0)
    skipped = Update(taken=False, losses=[1.0], grad_norms={"o": math.inf}, scale=scale)
    made.patience.observe(skipped, lambda: "train epoch 1, batch 1", 1)
    made.patience.check()  # one alone is forgiven everywhere
    made.patience.observe(skipped, lambda: "train epoch 1, batch 2", 2)
    if ends:
        with pytest.raises(NonfiniteError, match=f"batch 2: 2 updates in a row.*precision {precision}"):
            made.patience.check()
    else:
        made.patience.check()


# -------------------------------------------------------------- pins


def test_pinned_modules_compute_in_fp32_and_are_named(caplog):
    caplog.set_level(logging.INFO)
    modules = model()
    made = plan(modules, precision="bf16", fp32_modules=["model.2"])
    assert made.pinned == ["model.2"]
    assert "pinned to fp32: model.2" in [record.getMessage() for record in caplog.records]
    with made.training_ctx:
        assert modules["model"][0](X).dtype is torch.bfloat16
        assert modules["model"](X).dtype is torch.float32


def test_a_pin_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"modl\.2"):
        plan(fp32_modules=["modl.2"])


@pytest.mark.parametrize(
    ("asked", "modules", "patterns", "expected"),
    [
        ("tf32", model, [], "tf32"),
        ("tf32", model, ["*.1"], "ieee"),
        ("tf32", lambda: nn.ModuleDict({"loss": Decorated()}), [], "ieee"),
        ("ieee", model, ["*.1"], "ieee"),
        ("ieee", model, [], "ieee"),
    ],
    ids=["tf32", "tf32 and a pin", "tf32 and a decorated module", "ieee and a pin", "ieee"],
)
def test_a_pin_makes_fp32_ieee_in_the_whole_run_and_says_so(caplog, asked, modules, patterns, expected):
    made = plan(modules(), precision="fp32", float32_precision=asked, fp32_modules=patterns)
    assert made.float32_precision == expected
    assert torch.backends.cuda.matmul.fp32_precision == expected
    assert torch.backends.cudnn.conv.fp32_precision == expected
    messages = warned(caplog)
    assert len(messages) == (asked != expected)
    if messages:
        name = "model.1" if patterns else "loss"
        assert (
            messages[0].startswith("float32_precision is ieee in this run instead of tf32")
            and f"({name})" in messages[0]
        )


def test_a_pin_in_the_course_of_a_run_is_one_from_the_start_until_it_is_taken_back():
    modules = model()
    made = plan(modules, precision="bf16", float32_precision="tf32")
    named = made.pinned
    for _ in range(2):
        made.pin("model.2", modules)
        assert named == made.pinned == made.fp32_modules == ["model.2"] and made.float32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        with made.training_ctx:
            assert modules["model"](X).dtype is torch.float32
        made.unpin("model.2", modules)
        assert named == made.pinned == made.fp32_modules == [] and made.float32_precision == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        with made.training_ctx:
            assert modules["model"](X).dtype is torch.bfloat16


def test_pins_whose_forward_nobody_calls_are_reported_by_name(caplog):
    modules = nn.ModuleDict({"model": Attention()})
    made = plan(modules, fp32_modules=["*.out_proj", "*.norm"])
    modules["model"](torch.ones(1, 2, 4))
    made.report_dead_pins()
    (message,) = warned(caplog)
    assert "model.attention.out_proj." in message and "model.norm" not in message and "pin the parent" in message


def test_pins_that_were_called_and_no_pins_are_not_reported(caplog):
    for patterns in ([], ["model.*"]):
        modules = model()
        made = plan(modules, fp32_modules=patterns)
        modules["model"](X)
        made.report_dead_pins()
        assert warned(caplog) == []


@pytest.mark.parametrize(
    ("precision", "entered", "reported"), [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)]
)
def test_a_recipe_that_never_enters_the_training_context_is_told(cpu, caplog, precision, entered, reported):
    modules = model()
    made = plan(modules, precision=precision)
    caplog.clear()
    with made.evaluation_ctx:
        modules["model"](X)
    if entered:
        with made.training_ctx:
            modules["model"](X)
    made.report_missing_context()
    messages = warned(caplog)
    assert len(messages) == reported
    assert all("precision is bf16" in message and "with self.training_ctx:" in message for message in messages)


def test_the_options_may_be_any_object_with_those_attributes():
    given = RunOptions.from_mapping({"precision": "bf16"})
    made = PrecisionPlan(SimpleNamespace(**dict(given.items())), model(), CPU)
    assert made.training.name == "bf16"
