"""Run options: what they accept, what they refuse and how they say so."""

import copy
import pickle
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from amp_recipes.config.options.run_options import (
    OPTION_NAMES,
    RunOptions,
    near_misses,
    options_table,
    validate_options,
)
from amp_recipes.errors import ConfigError


def test_defaults_are_those_of_the_contract():
    options = RunOptions()
    assert {name: options[name] for name in options if options[name]} == {
        "precision": "fp32",
        "eval_precision": "fp32",
        "float32_precision": "ieee",
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "min_scale": 1.0,
        "measure_underflow": True,
        "max_grad_norm": 5.0,
        "grad_accumulation_factor": 1,
        "nonfinite_patience": 3,
        "locate_nonfinite": True,
        "on_nonfinite": "off",
        "pin_limit": 5,
        "lr_scheduler_interval": "step",
        "on_spike": "off",
        "spike_factor": 8.0,
        "spike_window": 100,
        "spike_patience": 1,
        "spike_steps": 100,
        "spike_lr_factor": 0.1,
        "spike_limit": 10,
        "early_stop_mode": "min",
        "early_stop_patience": 5,
        "debug_batches": 2,
        "debug_epochs": 2,
        "log_interval_steps": 10,
        "ckpt_background": True,
        "resume": "auto",
        "strategy": "ddp",
        "distributed_timeout_minutes": 10.0,
        "gradient_compression": "off",
        "shard_replicas": 1,
        "reshard_after_forward": True,
        "tensor_parallel": 1,
    }
    assert [options[name] for name in ("device", "seed", "output_folder", "ema_decay")] == [None] * 4
    assert [options[name] for name in ("debug", "test_only", "noprogressbar", "deterministic")] == [False] * 4
    assert options.explicit == frozenset()


def test_a_value_is_converted_to_the_type_of_its_option(subtests):
    for name, given, value in [
        ("seed", "3", 3),
        ("debug", "True", True),
        ("debug", "off", False),
        ("debug", 1, True),
        ("init_scale", "1e3", 1000.0),
        ("init_scale", 1024, 1024.0),
        ("max_grad_norm", -1, -1.0),
        ("device", None, None),
        ("device", torch.device("cuda:1"), "cuda:1"),
        ("output_folder", Path("results") / "a", "results/a"),
        ("output_folder", 2024, "2024"),
        ("fp32_modules", ("a", "*.norm"), ["a", "*.norm"]),
        ("fp32_modules", "*.norm", ["*.norm"]),
        ("save_signals", "SIGUSR1", ["SIGUSR1"]),
    ]:
        with subtests.test(name=name, given=given):
            converted = RunOptions(**{name: given})[name]
            assert converted == value
            assert type(converted) is type(value)


@pytest.mark.filterwarnings("error")  # a library's notice on each conversion would reach every user
def test_numbers_of_numpy_are_numbers(subtests):
    for name, given, value in [
        ("max_grad_norm", np.float32(0.5), 0.5),
        ("seed", np.int64(3), 3),
        ("debug", np.bool_(True), True),
        ("init_scale", np.array(2.0), 2.0),
    ]:
        with subtests.test(name):
            found = RunOptions(**{name: given})[name]
            assert found == value and type(found) is type(value)
    with pytest.raises(ConfigError, match=r"seed is .*, but must be a whole number"):
        RunOptions(seed=np.float32(0.5))


def test_words_of_others_for_a_value_lead_to_ours(subtests):
    for name, given, ours in [
        *(("precision", word, "fp16") for word in ("float16", "16-mixed", 16, "half", torch.float16, "FP16")),
        *(("eval_precision", word, "bf16") for word in ("bfloat16", "bf16-mixed", "BF16")),
        *(("precision", word, "fp32") for word in ("float32", 32, "32-true")),
        ("gradient_compression", "float16", "fp16"),
        *(("device", *words) for words in (("gpu", "cuda"), ("GPU:1", "cuda:1"), ("CUDA", "cuda"), ("CPU", "cpu"))),
    ]:
        with subtests.test(f"{name}={given}"), pytest.raises(ConfigError, match=rf"Did you mean {ours}\?$"):
            RunOptions(**{name: given})


def test_converting_is_silent():
    RunOptions(seed="3", init_scale=1024, debug="yes", output_folder=3)


def test_a_value_of_the_wrong_type_or_range_is_refused_by_name(subtests):
    for name, value in [
        ("seed", True),
        ("seed", 1.5),
        ("seed", -1),
        ("seed", 2**32),
        ("debug", 2),
        ("debug", "maybe"),
        ("debug", None),
        ("device", True),
        ("device", ["cpu"]),
        ("precision", "${eval_precision}"),
        ("init_scale", "${precision}"),
        ("init_scale", "???"),
        ("init_scale", 0),
        ("init_scale", float("inf")),
        ("growth_factor", 1),
        ("backoff_factor", 1.0),
        ("ema_decay", 1.0),
        ("max_grad_norm", float("nan")),
        ("grad_accumulation_factor", 0),
        ("nonfinite_patience", 0),
        ("ckpt_interval_minutes", -0.1),
        ("fp32_modules", [1]),
        ("fp32_modules", [["a"]]),
        ("fp32_modules", {"a": 1}),
        ("save_signals", "SIGTERM"),
        ("save_signals", ["SIGUSR1", "SIGUSER2"]),
        ("save_signals", [10]),
    ]:
        refused = pytest.raises(ConfigError, match=rf"^here: {name} is .* must be ")
        with subtests.test(name=name, value=value), refused:
            RunOptions.from_mapping({name: value}, where="here")


def test_all_mistakes_are_reported_together_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        RunOptions.from_mapping({"precison": "fp16", "precision": "bf61", "seed": -1, "debug": True})
    header, *lines = str(caught.value).splitlines()
    assert header == "3 mistakes in run_opts:"
    assert "'precison'" in lines[0] and lines[0].endswith("Did you mean precision?")
    assert "fp32, bf16, fp16 or auto" in lines[1] and lines[1].endswith("Did you mean bf16?")
    assert "seed is -1" in lines[2]


def test_the_floor_of_the_scale_cannot_lie_above_its_start():
    with pytest.raises(ConfigError, match=r"min_scale is 8.0, but must be at most init_scale"):
        RunOptions(init_scale=4, min_scale=8)


def test_a_run_opts_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match="must be a mapping"):
        RunOptions.from_mapping(["--debug"])


def test_options_read_as_a_mapping():
    options = RunOptions(device="cpu")
    assert options["device"] == options.get("device") == options.device == "cpu"
    assert "device" in options and "devise" not in options
    assert options.get("devise", 7) == 7
    assert dict(options.items()) == {name: getattr(options, name) for name in options.keys()}  # noqa: SIM118
    assert len(options) == len(fields(options)) == len(OPTION_NAMES)
    with pytest.raises(KeyError):
        options["explicit"]


def test_options_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        RunOptions().precision = "fp61"


def test_equality_is_by_value_and_explicit_survives_copy_and_pickle():
    options = RunOptions(precision="fp32", fp32_modules=["a"])
    assert options == RunOptions(fp32_modules=["a"]) != RunOptions()
    for twin in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin == options
        assert twin.explicit == {"precision", "fp32_modules"}


def test_hparams_fill_only_what_was_not_set():
    options = RunOptions(precision="fp16", device=None)
    merged = options.with_defaults_from({"precision": "bf16", "device": "cpu", "seed": "7", "lr": 0.1})
    assert (merged.precision, merged.device, merged.seed) == ("fp16", None, 7)
    assert merged.explicit == {"precision", "device", "seed"}
    assert options.explicit == {"precision", "device"}  # the original is as before
    assert options.with_defaults_from(None) == options


def test_a_wrong_hparam_is_refused_as_an_option_would_be():
    with pytest.raises(ConfigError, match=r"^hparams: max_grad_norm is 'much', but must be a number"):
        RunOptions().with_defaults_from({"max_grad_norm": "much"})


def test_the_table_has_a_row_for_each_option_with_its_help():
    rows = {line.split("`")[1]: line for line in options_table().splitlines() if line.startswith("| `")}
    assert set(rows) == OPTION_NAMES
    for option in fields(RunOptions):
        assert option.metadata["help"] in rows[option.name]
    assert "`65536`" in rows["init_scale"]
    assert all(line.count("|") == 4 for line in rows.values())


def test_near_misses_of_options_are_found_and_other_keys_left_alone():
    said = near_misses(["sed", "max_gradnorm", "grad_accumulation_factors", "lr", "model", "lr_scheduler", "seed"])
    assert [text.split("'")[1] for text in said] == ["sed", "max_gradnorm", "grad_accumulation_factors"]
    assert "did you mean 'max_grad_norm'" in said[1]


def test_a_value_beyond_all_measure_is_a_mistake_and_not_shown_at_length(subtests):
    for name in ["seed", "max_grad_norm", "log_interval_steps", "output_folder", "debug", "fp32_modules"]:
        for value in [16**300, -(16**300), 16**20_000, [16**20_000], "x" * 100_000]:
            if isinstance(value, str) and name in ("output_folder", "fp32_modules"):
                continue
            with subtests.test(name=name, value=value):
                _, mistakes = validate_options({name: value})
                assert 0 < len(mistakes[name]) < 500
