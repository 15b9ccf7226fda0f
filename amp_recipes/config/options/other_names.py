"""Translates options and values of SpeechBrain's Brain, Lightning's Trainer and others into ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMPILE = "compile the modules in the script: modules={'model': torch.compile(model)}"
_PROFILE = "wrap fit() in torch.profiler.profile, with --optimizer_step_limit"
_GROUPS = "make the parameter groups in init_optimizers"

# Of the original Brain: its default, and what to do for another value; "" where nothing is to be done.
_ORIGINAL: dict[str, tuple[Any, str]] = {
    "auto_mix_prec": (False, "set precision: fp16"),
    "bfloat16_mix_prec": (False, "set precision: bf16"),
    "compile": (False, _COMPILE),
    "compile_mode": ("default", _COMPILE),
    "compile_module_keys": (None, _COMPILE),
    "compile_using_dynamic_shape_tracing": (False, _COMPILE),
    "compile_using_fullgraph": (False, _COMPILE),
    "data_parallel_backend": (False, "start the script with torchrun, which gives each GPU a process"),
    "data_parallel_count": (-1, "start the script with torchrun --nproc_per_node"),
    "debug_persistently": (False, "find the files of a debug run in debug/ of the output folder"),
    "distributed_launch": (False, ""),
    "jit": (False, _COMPILE),
    "jit_module_keys": (None, _COMPILE),
    "log_config": (None, ""),
    "param_file": ("", ""),
    "profile_steps": (5, _PROFILE),
    "profile_training": (False, _PROFILE),
    "profile_warmup": (5, _PROFILE),
    "remove_vector_weight_decay": (False, _GROUPS),
    "skip_nonfinite_grads": (False, ""),  # always
    "tqdm_barcolor": (None, ""),
    "tqdm_colored_bar": (False, ""),
}

_OTHERS = {
    "accelerator": "set device",
    "accumulate_grad_batches": "set grad_accumulation_factor",
    "amp": "set precision",
    "bf16": "set precision: bf16",
    "default_root_dir": "set output_folder",
    "deepspeed": "set strategy: fsdp",
    "devices": "start the script with torchrun --nproc_per_node",
    "epochs": "set the limit of the EpochCounter",
    "fast_dev_run": "set debug",
    "fp16": "set precision: fp16",
    "gradient_accumulation_steps": "set grad_accumulation_factor",
    "gradient_clip_val": "set max_grad_norm",
    "learning_rate": "give lr to the optimizer",
    "log_every_n_steps": "set log_interval_steps",
    "logging_steps": "set log_interval_steps",
    "lr_scheduler_type": "give an lr_scheduler in the YAML",
    "max_epochs": "set the limit of the EpochCounter",
    "max_steps": "set optimizer_step_limit",
    "mixed_precision": "set precision",
    "num_train_epochs": "set the limit of the EpochCounter",
    "output_dir": "set output_folder",
    "per_device_train_batch_size": "give batch_size in train_loader_kwargs",
    "resume_from_checkpoint": "start the same command again, or set init_from",
    "save_steps": "set ckpt_interval_steps",
    "use_amp": "set precision",
}

# Words of other trainers and of torch for the values of options, in lower case.
_VALUES = {
    "gpu": "cuda",
    **dict.fromkeys(("32", "32-true", "float", "float32", "single"), "fp32"),
    **dict.fromkeys(("16", "16-mixed", "16-true", "float16", "fp16-mixed", "half"), "fp16"),
    **dict.fromkeys(("bf16-mixed", "bf16-true", "bfloat16"), "bf16"),
}


def value_here(value: Any) -> str:
    """Return our name of a value, in lower case: `fp16` for `16-mixed`, `torch.float16`; `cuda:1` for `GPU:1`."""
    name, colon, index = str(value).lower().removeprefix("torch.").partition(":")
    return _VALUES.get(name, name) + colon + index


def instead_of(name: str) -> str:
    """Return advice on an option of another trainer, as a sentence after a space; empty for other names."""
    advice = _ORIGINAL[name][1] if name in _ORIGINAL else _OTHERS.get(name, "")
    return f" Instead, {advice}." if advice else ""


def without_originals(options: Mapping[str, Any]) -> dict[str, Any]:
    """Run options without those of the original Brain that ask for nothing: left at their default, or cosmetic.

    options: may be its RunOptions, of which the ones that were set count.
    """
    if hasattr(options, "overridden_args"):
        options = {name: getattr(options, name) for name in sorted(options.overridden_args)}
    return {name: value for name, value in options.items() if name not in _ORIGINAL or _asks(name, value)}


def ignored_options(hparams: Mapping[str, Any]) -> list[str]:
    """Return warnings on hparams that are options of the original Brain and do nothing here."""
    found = [name for name in hparams if name in _ORIGINAL and _asks(name, hparams[name])]
    return [f"{name!r} does nothing here.{instead_of(name)}" for name in found]


def _asks(name: str, value: Any) -> bool:
    default, advice = _ORIGINAL[name]
    return bool(advice) and value != default
