"""Which options a run has, what each means, and what values each takes."""

# ruff: noqa: RUF009  (`option` makes a dataclass field, as `dataclasses.field` does)

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amp_recipes.config.mistakes import did_you_mean, join_mistakes
from amp_recipes.config.option_fields import (
    ABOVE_ONE,
    ANY_NUMBER,
    AT_LEAST_FOUR,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    FRACTION,
    POSITIVE,
    SEED,
    SIGNAL_NAMES,
    option,
)
from amp_recipes.config.other_names import instead_of
from amp_recipes.errors import ConfigError

_INTEGER_BITS = 64  # no option counts further
_SHOWN_CHARACTERS = 200  # of a value, in a message

PrecisionName = Literal["fp32", "bf16", "fp16", "auto"]


@dataclass(frozen=True)
class Purpose:
    """What a script is started for: to train, to be diagnosed, or to show again how a step went nonfinite.

    folder: what `--replay` was given.
    """

    action: Literal["train", "diagnose", "replay"] = "train"
    folder: str | None = None


@dataclass(frozen=True, init=False, eq=False, repr=False)
class OptionFields:
    """Each option with its type, default and meaning; a Brain has them as attributes of the same names."""

    precision: PrecisionName = option(
        "fp32",
        "Precision",
        "Precision of training. `auto`: bf16 if the device does it natively, else fp16 on a GPU, else fp32.",
    )
    eval_precision: PrecisionName = option(
        "fp32", "Precision", "Precision of validation and test.", changes_training=False
    )
    fp32_modules: list[str] = option(
        [],
        "Precision",
        "Modules that run in fp32 whatever the precision: patterns of module names (`*.norm`), or of "
        "class names (`type:LayerNorm`).",
    )
    float32_precision: Literal["ieee", "tf32"] = option(
        "ieee",
        "Precision",
        "What fp32 means in matrix products and convolutions on a GPU. Modules in `fp32_modules` always use `ieee`.",
    )
    init_scale: float = option(65536.0, "Loss scale (fp16)", "Loss scale at the start.", POSITIVE)
    growth_factor: float = option(
        2.0,
        "Loss scale (fp16)",
        "Factor on the scale after `growth_interval` updates without overflow.",
        ABOVE_ONE,
    )
    backoff_factor: float = option(0.5, "Loss scale (fp16)", "Factor on the scale after an overflow.", FRACTION)
    growth_interval: int = option(
        2000, "Loss scale (fp16)", "Updates in a row without overflow before the scale grows.", AT_LEAST_ONE
    )
    min_scale: float = option(1.0, "Loss scale (fp16)", "Floor of the loss scale; at most `init_scale`.", POSITIVE)
    max_grad_norm: float = option(
        5.0,
        "Optimization",
        "Bound on the L2 norm of each optimizer's gradients. 0 or less: no clipping.",
        ANY_NUMBER,
    )
    grad_accumulation_factor: int = option(1, "Optimization", "Batches per update.", AT_LEAST_ONE)
    nonfinite_patience: int = option(
        3,
        "Optimization",
        "Nonfinite updates in a row that end the run (in fp16 only those at the scale's floor count).",
        AT_LEAST_ONE,
    )
    locate_nonfinite: bool = option(
        True,
        "Optimization",
        "Take a step that went nonfinite again to say where the value was born, and keep it for `amp-recipes replay`. "
        "`false`: nothing is noted for it.",
        changes_training=False,
    )
    optimizer_step_limit: int | None = option(
        None, "Optimization", "Updates after which training stops, over all epochs.", AT_LEAST_ONE
    )
    lr_scheduler_interval: Literal["step", "epoch"] = option(
        "step", "Optimization", "When the hparam `lr_scheduler` advances: after each update or each epoch."
    )
    ema_decay: float | None = option(
        None,
        "Optimization",
        "Decay per update of an exponential moving average of the weights. Absent: no average.",
        FRACTION,
    )
    on_spike: Literal["off", "lower_lr", "wider_precision"] = option(
        "off",
        "Spikes",
        "What to do when the loss or a gradient norm leaves its band: go back to the last good checkpoint, and on from "
        "there with lower learning rates, or in fp32. Needs `output_folder`; how far it goes back depends on "
        "`ckpt_interval_steps`.",
    )
    spike_factor: float = option(
        8.0,
        "Spikes",
        "The band ends this many spreads above the median (spread: 1.4826 MAD of the logarithms; at least 0.05 for the "
        "loss, 0.25 for a norm).",
        POSITIVE,
    )
    spike_window: int = option(
        100, "Spikes", "Updates that make the band; before there are so many, nothing is a spike.", AT_LEAST_FOUR
    )
    spike_patience: int = option(1, "Spikes", "Updates in a row outside the band that make a spike.", AT_LEAST_ONE)
    spike_steps: int = option(
        100,
        "Spikes",
        "Updates after the checkpoint that run with lower learning rates or in fp32; at least to one past that which "
        "spiked.",
        AT_LEAST_ONE,
    )
    spike_lr_factor: float = option(0.1, "Spikes", "Factor on learning rates under `lower_lr`.", FRACTION)
    spike_limit: int = option(
        10, "Spikes", "How often the run goes back at most; later spikes are warned about and counted.", AT_LEAST_ONE
    )
    early_stop_metric: str | None = option(
        None,
        "Early stopping",
        "Metric to watch: one that `on_stage_end` returned for validation, or `loss`. Absent: no early stop.",
    )
    early_stop_mode: Literal["min", "max"] = option(
        "min", "Early stopping", "Whether the metric is better when smaller or larger."
    )
    early_stop_patience: int | None = option(
        5,
        "Early stopping",
        "Epochs in a row without a better value that end training. `null`: none do, and the metric only chooses the "
        "best checkpoint.",
        AT_LEAST_ONE,
    )
    seed: int | None = option(
        None,
        "Randomness",
        "Seeds Python, NumPy and torch before the YAML instantiates anything. Absent: nothing is seeded.",
        SEED,
    )
    deterministic: bool = option(
        False, "Randomness", "Use deterministic algorithms only; an operation that has none raises."
    )
    debug: bool = option(False, "Trying out", "Run a few batches only: `debug_epochs` epochs of `debug_batches`.")
    debug_batches: int = option(2, "Trying out", "Batches per stage under `debug`.", AT_LEAST_ONE)
    debug_epochs: int = option(2, "Trying out", "Epochs under `debug`.", AT_LEAST_ONE)
    overfit_batches: int = option(
        0,
        "Trying out",
        "Train and validate on the first n batches only. 0: off.",
        AT_LEAST_ZERO,
        changes_training=True,
    )
    test_only: bool = option(False, "Trying out", "Skip training; evaluate only.")
    output_folder: str | None = option(
        None, "Output", "Folder for logs, metrics and checkpoints. Absent: nothing is written."
    )
    log_interval_steps: int = option(10, "Output", "Updates between refreshes of progress and log.", AT_LEAST_ONE)
    noprogressbar: bool = option(False, "Output", "Show no progress bar.")
    ckpt_interval_minutes: float = option(
        0.0, "Checkpoints", "Minutes between checkpoints inside an epoch. 0: off.", AT_LEAST_ZERO
    )
    ckpt_interval_steps: int = option(
        0, "Checkpoints", "Updates between checkpoints inside an epoch. 0: off.", AT_LEAST_ZERO
    )
    ckpt_background: bool = option(
        True,
        "Checkpoints",
        "Copy the state to host memory and write it while training goes on. `false`: training waits for the disk.",
    )
    save_signals: list[str] = option(
        [],
        "Checkpoints",
        f"Signals at which the run saves and goes on, and does not end: {SIGNAL_NAMES.text}.",
        SIGNAL_NAMES,
    )
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "Checkpoints",
        "`auto`: go on from the newest checkpoint of the output folder, if there is one; `must`: end with an error if "
        "there is none; `never`: set the old checkpoints aside and start afresh.",
    )
    init_from: str | None = option(
        None,
        "Checkpoints",
        "Begin with the weights of another run: its output folder (its best checkpoint) or one of its `CKPT+` folders. "
        "A run that resumes does not look at it.",
    )
    accept_changes: bool = option(
        False, "Checkpoints", "Resume although settings differ from those that the run began with."
    )
    device: str | None = option(
        None,
        "Devices and processes",
        "Where to run: `cpu`, `cuda`, `cuda:1`, `mps`. Absent: the best one.",
    )
    strategy: Literal["ddp", "fsdp"] = option(
        "ddp",
        "Devices and processes",
        "How several processes share the model. `ddp`: each holds all of it; `fsdp`: each holds a part of every "
        "parameter, gradient and optimizer state.",
    )
    distributed_backend: str | None = option(
        None, "Devices and processes", "Process group backend. Absent: what fits the device."
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "Devices and processes",
        "Minutes that a process waits for the others before it ends with an error.",
        POSITIVE,
    )
    find_unused_parameters: bool = option(
        False,
        "Devices and processes",
        "Look for parameters that a forward leaves unused, in some processes or in all; costs time.",
    )
    static_graph: bool = option(
        False, "Devices and processes", "Promise ddp that every step uses the same parameters in the same order."
    )
    gradient_compression: Literal["off", "bf16", "fp16"] = option(
        "off",
        "Devices and processes",
        "Dtype in which ddp sends gradients: half the bytes, and they are rounded to it.",
        changes_training=True,
    )
    sync_batchnorm: bool = option(
        False,
        "Devices and processes",
        "BatchNorm over the batches of all processes together (on GPUs only).",
        changes_training=True,
    )
    shard_modules: list[str] = option(
        [],
        "Devices and processes",
        "Modules that fsdp gathers one at a time: patterns as for `fp32_modules`. Empty: the repeated blocks.",
    )
    shard_replicas: int = option(
        1,
        "Devices and processes",
        "Groups of processes, each of which shards the model among its own and averages gradients with the others.",
        AT_LEAST_ONE,
    )
    reshard_after_forward: bool = option(
        True, "Devices and processes", "Let fsdp free gathered parameters after each forward, to gather them again."
    )
    cpu_offload: bool = option(
        False, "Devices and processes", "Let fsdp keep parameters, gradients and optimizer state in host memory."
    )
    activation_checkpointing: list[str] = option(
        [],
        "Devices and processes",
        "Modules whose forward is computed again in the backward instead of kept: patterns as for `fp32_modules`, or "
        "`blocks` for the repeated blocks.",
    )
    tensor_parallel: int = option(
        1,
        "Devices and processes",
        "Processes that share each layer as the key `tensor_parallel_plan` of the YAML says (pattern of module names: "
        "`colwise` or `rowwise`).",
        AT_LEAST_ONE,
    )


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RunOptions(OptionFields, Mapping[str, Any]):
    """The options of one run: typed, validated, readable as attributes and as a mapping.

    `RunOptions(precision="bf16", seed=3)` sets two options; the others have their defaults. `explicit`
    tells which ones were set. Two objects are equal if all their values are.
    Raises ConfigError that names every unknown option and every wrong value together.
    """

    def __init__(self, **options: Any) -> None:
        self._set(options, "RunOptions")

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any] | None, where: str = "run_opts", purpose: Purpose = Purpose()
    ) -> RunOptions:
        """The options that `mapping` sets; `where` opens each error message."""
        options = cls.__new__(cls)
        options._set({} if mapping is None else mapping, where, purpose)
        return options

    @property
    def purpose(self) -> Purpose:
        """What the command line asks for beside the options: no YAML can say it, and it is not written down."""
        return self._purpose

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the options that were set, also where they were set to their default."""
        return self._explicit

    def with_defaults_from(self, hparams: Mapping[str, Any] | None, where: str = "hparams") -> RunOptions:
        """These options, those not explicit taken from `hparams` where it has a key of that name."""
        names = OPTION_NAMES - self.explicit
        found = {name: hparams[name] for name in names if name in hparams} if hparams else {}
        if not found:
            return self
        explicit = {name: self[name] for name in self.explicit}
        return self.from_mapping({**found, **explicit}, where, self.purpose)

    def _set(self, options: Mapping[str, Any], where: str, purpose: Purpose = Purpose()) -> None:
        values, mistakes = validate_options(options)
        if mistakes:
            raise ConfigError(join_mistakes([f"{where}: {text}" for text in mistakes.values()], where))
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else
        object.__setattr__(self, "_explicit", frozenset(options))
        object.__setattr__(self, "_purpose", purpose)

    def __getitem__(self, name: str) -> Any:
        if name not in OPTION_NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (declared.name for declared in fields(self))

    def __len__(self) -> int:
        return len(OPTION_NAMES)

    def __repr__(self) -> str:
        explicit = (f"{name}={self[name]!r}" for name in self if name in self.explicit)
        return f"RunOptions({', '.join(explicit)})"


FRAMEWORK_KEYS = frozenset({"lr_scheduler", "tensor_parallel_plan"})
"""Keys of a YAML that are no run options and that the framework reads."""

OPTION_NAMES = frozenset(declared.name for declared in fields(RunOptions))
OPTION_TYPES: dict[str, Any] = dict(sorted(get_type_hints(RunOptions).items()))
_SCHEMA = OmegaConf.structured(RunOptions)  # to be copied: to make it anew takes four times as long
OmegaConf.set_readonly(_SCHEMA, False)  # OmegaConf copies the flag of a frozen dataclass


def options_by_group() -> dict[str, list[Any]]:
    """The dataclass fields of `RunOptions` under their group's title, in the order of the class."""
    groups: dict[str, list[Any]] = {}
    for declared in fields(RunOptions):
        groups.setdefault(declared.metadata["group"], []).append(declared)
    return groups


def options_table() -> str:
    """A Markdown table per group of options: name, default, meaning."""
    defaults = RunOptions()
    tables = []
    for group, options in options_by_group().items():
        rows = [f"**{group}**", "", "| option | default | meaning |", "| --- | --- | --- |"]
        for declared in options:
            meaning = declared.metadata["help"].replace("|", "\\|")
            if choices := option_choices(declared.name):
                meaning = f"{meaning} One of {', '.join(f'`{choice}`' for choice in choices)}."
            default = display(defaults[declared.name])
            rows.append(f"| `{declared.name}` | {default and f'`{default}`'} | {meaning} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables) + "\n"


def option_choices(name: str) -> tuple[str, ...]:
    """The values that an option with a closed list of values takes; empty for the others."""
    hint = OPTION_TYPES[name]
    return get_args(hint) if all(isinstance(choice, str) for choice in get_args(hint)) else ()


def display(value: Any) -> str:
    """A default as one types it on the command line; empty for an absent one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def validate_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of every option as its type, and what is wrong with `options`, by name.

    The caller decides how to report the mistakes: a YAML knows the line, a dict does not.
    """
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        return {}, {"": f"run options must be a mapping of names to values, but are a {kind}"}
    schema = copy.deepcopy(_SCHEMA)
    mistakes: dict[str, str] = {}
    for name, value in options.items():
        if name not in OPTION_NAMES:
            mistakes[name] = f"there is no run option {name!r}.{instead_of(name) or did_you_mean(name, OPTION_NAMES)}"
            continue
        try:
            OmegaConf.update(schema, name, _plain(name, value))
        except (OmegaConfBaseException, ValueError):
            mistakes[name] = f"{name} is {_shown(value)}, but must be {_expected(name)}.{_nearest(name, value)}"
    values: dict[str, Any] = OmegaConf.to_container(schema, resolve=False)  # type: ignore[assignment]
    for declared in fields(RunOptions):
        within, value = declared.metadata["within"], values[declared.name]
        if declared.name not in mistakes and within and value is not None and not within.holds(value):
            mistakes[declared.name] = f"{declared.name} is {_shown(value)}, but must be {within.text}."
    if not mistakes and values["min_scale"] > values["init_scale"]:
        floor, start = values["min_scale"], values["init_scale"]
        mistakes["min_scale"] = f"min_scale is {floor!r}, but must be at most init_scale ({start!r})."
    return values, mistakes


def near_misses(keys: Iterable[str]) -> list[str]:
    """What to say of keys that are no run options but look like a misspelt one: a YAML may have keys of its own."""
    said = []
    for key in keys:
        known = key in OPTION_NAMES | FRAMEWORK_KEYS
        near = [] if known else difflib.get_close_matches(str(key), sorted(OPTION_NAMES), 1, cutoff=0.8)
        said += [f"{key!r} is no run option; did you mean {name!r}?" for name in near]
    return said


def _plain(name: str, value: Any) -> Any:
    """`value` as OmegaConf takes it; ValueError where its own conversion would guess."""
    hint = OPTION_TYPES[name]
    if isinstance(value, os.PathLike | torch.device):
        value = str(value)
    if hint == list[str]:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(name)
        return list(value)
    if hint is bool:
        if not isinstance(value, bool | str) and value not in (0, 1):
            raise ValueError(name)
    elif value is False and "off" in option_choices(name):
        return "off"  # as YAML 1.1 reads the word
    elif isinstance(value, bool) or (isinstance(value, int) and value.bit_length() > _INTEGER_BITS):
        raise ValueError(name)
    if name == "device" and isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError as error:
            raise ValueError(name) from error
    # OmegaConf reads ${...} and ??? in a string as its own syntax and lets them pass any type.
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ValueError(name)
    return value


def _shown(value: Any) -> str:
    """A value for a message: not at length, and not where Python refuses to write it (a number of 10,000 digits)."""
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        return f"a whole number of {value.bit_length():,} bits"
    try:
        text = repr(value)
    except ValueError:  # such a number in a list
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _expected(name: str) -> str:
    hint = OPTION_TYPES[name]
    if choices := option_choices(name):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if name == "device":
        return "a device that torch knows, such as cpu, cuda, cuda:1 or mps"
    words = {
        list[str]: "a list of strings",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        int | None: "a whole number or null",
        float | None: "a number or null",
        str | None: "a string (without ${...}) or null",
    }
    return words[hint]


def _nearest(name: str, value: Any) -> str:
    choices = ("cpu", "cuda", "mps", "xpu") if name == "device" else option_choices(name)
    return did_you_mean(value, choices) if isinstance(value, str) else ""
