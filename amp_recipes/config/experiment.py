"""Saves the settings and environment of a run before it starts, and opens its log."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from amp_recipes.config.changes import accepted_changes, environment_changes, holds_run
from amp_recipes.config.hparams import (
    Hparams,
    Loaded,
    find_loaded,
    overrides_text,
    resolved_text,
    settings_again,
    with_option,
)
from amp_recipes.config.options.arguments import AnyOverrides, Overrides, explicit_options
from amp_recipes.config.options.run_options import OPTION_NAMES, RunOptions
from amp_recipes.config.trust.checking import as_mapping
from amp_recipes.config.yaml.nodes import Mistakes
from amp_recipes.errors import CheckpointError, ConfigError
from amp_recipes.files.file_system import reason
from amp_recipes.files.folder_lock import lock_folder
from amp_recipes.files.run_files import read_json, regular_only, write_atomically
from amp_recipes.files.strict_json import encode_findings

logger = logging.getLogger(__name__)

ORIGINAL_FILE = "hyperparams_original.yaml"
RESOLVED_FILE = "hyperparams.yaml"
OVERRIDES_FILE = "overrides.yaml"
ENVIRONMENT_FILE = "environment.json"
LOG_FILE = "log.txt"
PINS_FILE = "pins.json"

# The packages whose version can change what a run computes or writes.
_PACKAGES = (
    "amp_recipes",
    "torch",
    "numpy",
    "HyperPyYAML",
    "ruamel.yaml",
    "PyYAML",
    "omegaconf",
    "safetensors",
    "tqdm",
)
_GIT_TIMEOUT_SECONDS = 10
# Options on how this start treats the folder. If they were saved, they would apply to every later start too.
_OF_ONE_START = frozenset({"accept_changes", "resume"})

# The settings that a run had before this process wrote others that were accepted, by the key of its folder.
_replaced: dict[tuple[int, str], bytes] = {}
# Process and real path of each folder that was prepared here -> the settings that `ensure_experiment_directory` wrote
# there, or None if the recipe prepared it itself. With the process: a forked one begins with a copy of this.
_prepared: dict[tuple[int, str], tuple[Any, ...] | None] = {}


def create_experiment_directory(
    folder: str | os.PathLike[str] | None,
    hyperparams_to_save: str | os.PathLike[str] | None = None,
    overrides: AnyOverrides = None,
) -> Path | None:
    """The folder of a run, with what is needed to repeat it; None for None: such a run writes nothing.

    A Brain does this itself for hyperparameters that `load_hparams` returned. A recipe calls it to have its log and
    the comparison with an earlier run before anything else, or for hyperparameters of another kind.

    hyperparams_to_save: the YAML of the run. Written unchanged (`hyperparams_original.yaml`) and with
        overrides, references and includes resolved (`hyperparams.yaml`, which gives the same values on its
        own). No function of `!applyref:` is called again: what `load_hparams` was given counts.
    overrides: as for `load_hparams`; written to `overrides.yaml` with the run options that were set.

    `environment.json` holds versions, devices, git state and command line. Log records of the process go
    to `log.txt` from here on. Only the main process (RANK absent or 0) writes.

    The folder is locked for this process until it ends. If it holds a run with checkpoints (`save/CKPT+...`), which
    will be resumed, the settings must be those of that run: all that differs and can change the training is listed
    in a ConfigError, or, with the run option `accept_changes`, in a warning. With `debug` or `test_only` the files
    of such a run stay as they are; `resume: never` compares nothing. With --diagnose and --replay nothing is done.
    Raises FolderInUseError if another process runs in the folder, and ConfigError if it cannot be written, or, as
    `load_hparams`, if YAML or overrides are wrong.
    """
    if folder is None:
        return None
    folder = Path(folder)
    tried = isinstance(overrides, Overrides) and overrides.run_options.purpose.action != "train"
    if tried or os.environ.get("RANK", "0") != "0":
        return folder
    loaded = None if hyperparams_to_save is None else find_loaded(hyperparams_to_save, overrides)
    _prepare(folder, hyperparams_to_save, overrides, loaded)
    return folder


def _prepare(folder: Path, yaml: str | os.PathLike[str] | None, overrides: AnyOverrides, loaded: Loaded | None) -> None:
    """Lock the folder, compare with the run that it holds, and write what is known before the run begins."""
    options = _run_options(yaml, overrides, loaded)
    files = _settings_files(yaml, _without(_OF_ONE_START, overrides), loaded)
    lock_folder(folder)
    environment = {**describe_environment(), "trust": list(loaded.names if loaded else ())}
    files[ENVIRONMENT_FILE] = (json.dumps(environment, indent=2) + "\n").encode()
    warnings: list[str] = []
    resolved_file = folder / RESOLVED_FILE
    tries_out = options.debug or options.test_only
    resumes = holds_run(folder, resolved_file) and options.resume != "never"
    if not tries_out:
        _follow_pins(folder, files, options.fp32_modules, resumes)
    if holds_run(folder, resolved_file):
        if resumes and not tries_out:
            warnings = _changes(folder, files.get(RESOLVED_FILE), options.accept_changes, environment)
        if tries_out:
            files.clear()
    if yaml is not None and os.path.realpath(yaml) == os.path.realpath(resolved_file):
        files.pop(ORIGINAL_FILE, None)  # the run's own settings again: what they came from stays
    if warnings and resolved_file.is_file():
        _replaced[_key(folder)] = resolved_file.read_bytes()
    _write(folder, files)
    for text in warnings:
        logger.warning("%s", text)
    _prepared[_key(folder)] = None


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files, and from here on the log."""
    try:
        for name, content in files.items():
            write_atomically(folder / name, content)
        log_to(folder / LOG_FILE)
    except OSError as error:
        raise ConfigError(
            f"output folder {folder} is not writable: {reason(error, folder)} ({error.filename})."
        ) from error


def _follow_pins(folder: Path, files: dict[str, bytes], given: Sequence[str], resumes: bool) -> None:
    """Add to the new settings what the run in `folder` pinned by itself; forget it if another run begins there.

    given: the value of `fp32_modules` at this start.
    """
    if not resumes:
        with suppress(OSError):  # a folder that cannot be written says so when it is written to
            (folder / PINS_FILE).unlink(missing_ok=True)
    elif RESOLVED_FILE in files and os.path.lexists(folder / PINS_FILE):
        modules = [*dict.fromkeys([*given, *_own_pins(folder / PINS_FILE)])]
        files[RESOLVED_FILE] = with_option(files[RESOLVED_FILE].decode(), "fp32_modules", modules).encode()


def _own_pins(file: Path) -> list[str]:
    """The modules in a file that `write_pins` wrote. Raises ConfigError."""
    pins = read_json(file)
    try:
        modules = [pin["module"] for pin in pins]
    except (KeyError, TypeError):
        modules = [None]
    if not all(isinstance(module, str) for module in modules):
        raise ConfigError(
            f"{file} is not a list of pins as this version writes it. To resume, delete it, and add its modules to "
            "fp32_modules."
        )
    return modules


def write_pins(folder: str | os.PathLike[str], modules: Sequence[str], pins: Sequence[Mapping[str, Any]]) -> None:
    """Write into the settings of the run in `folder` what it has pinned by itself; do nothing if there are none.

    modules: the new value of `fp32_modules`; pins: those that the run took, each with its `module`.
    """
    folder = Path(folder)
    resolved = folder / RESOLVED_FILE
    try:
        if not resolved.is_file():
            return
        write_atomically(folder / PINS_FILE, encode_findings(pins))  # first: from then on a start expects the others
        text = with_option(resolved.read_text(encoding="utf-8"), "fp32_modules", list(modules))
        write_atomically(resolved, text.encode())
    except (OSError, ConfigError) as error:  # checkpoints keep them too
        logger.warning("could not write the pins of the run into %s: %s", resolved, error)


def _run_options(yaml: str | os.PathLike[str] | None, overrides: AnyOverrides, loaded: Loaded | None) -> RunOptions:
    """The run options of a start, which say what it does with a run that is there already."""
    if yaml is not None:
        return RunOptions.from_mapping(settings_again(yaml, overrides, loaded).options, "overrides")
    mistakes = Mistakes()
    given = {**as_mapping(overrides, mistakes), **explicit_options(overrides)}
    mistakes.raise_if_any("overrides")
    return RunOptions.from_mapping({name: given[name] for name in OPTION_NAMES & given.keys()}, "overrides")


def _settings_files(
    yaml: str | os.PathLike[str] | None, overrides: AnyOverrides, loaded: Loaded | None
) -> dict[str, bytes]:
    """Return the contents of the files of settings, by file name."""
    files = {OVERRIDES_FILE: overrides_text(overrides).encode()}
    if yaml is not None:
        files[RESOLVED_FILE] = resolved_text(yaml, overrides, loaded).encode()
        files[ORIGINAL_FILE] = loaded.original if loaded else Path(yaml).read_bytes()
    return files


def ensure_experiment_directory(
    folder: str | os.PathLike[str], hparams: Any, run_opts: RunOptions | None = None
) -> None:
    """Prepare `folder` as `create_experiment_directory` does, unless the recipe did it, or there is nothing to write.

    hparams: what `load_hparams` returned; with anything else this does nothing. run_opts: options that were set beside
    it, in code. They are written down and compared like those of the command line, over which they win.
    What this wrote for the same settings in this process is not written again.
    Raises what `create_experiment_directory` raises.
    """
    if not isinstance(hparams, Hparams) or os.environ.get("RANK", "0") != "0":
        return
    key = _key(folder)
    if _prepared.get(key, ()) is None:
        return
    loaded = find_loaded(hparams.path, hparams.overrides)
    if loaded is None and not os.path.isfile(hparams.path):
        logger.warning("%s no longer exists: the settings of this run were neither saved nor compared.", hparams.path)
        return
    overrides = _with_options(hparams.overrides, run_opts)
    original = loaded.original if loaded else Path(hparams.path).read_bytes()
    settings = (hparams.path, original, overrides_text(overrides))
    if _prepared.get(key) != settings:
        _prepare(Path(folder), hparams.path, overrides, loaded)
        _prepared[key] = settings


@contextmanager
def going_on_in(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Restore the saved settings of the run in `folder` if its load, the body of the block, fails."""
    before = None if folder is None else _replaced.pop(_key(folder), None)
    try:
        yield
    except CheckpointError:
        if before is not None:
            write_atomically(Path(folder) / RESOLVED_FILE, before)
        raise


def _key(folder: str | os.PathLike[str]) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)


def _with_options(overrides: AnyOverrides, run_opts: RunOptions | None) -> AnyOverrides:
    """The overrides with the run options that were set; as they are if there are none, or if they are YAML text."""
    if run_opts is None or not run_opts.explicit or isinstance(overrides, str):
        return overrides
    return Overrides(overrides or {}, run_options=run_opts.with_defaults_from(explicit_options(overrides)))


def _changes(folder: Path, resolved: bytes | None, accepts_changes: bool, environment: dict[str, Any]) -> list[str]:
    """Return log lines on the differences from the run in `folder`. Raises ConfigError for those that are refused."""
    lines = []
    if resolved is not None:
        changes = accepted_changes(folder, folder / RESOLVED_FILE, resolved.decode(), accepts_changes)
        if changes:
            lines.append("\n  ".join([f"{folder}: resuming with changed settings (saved -> now):", *changes]))
            lines.append(
                "Arguments of optimizers and schedulers (lr, T_max, ...) keep their saved values. To train with "
                f"another schedule, start a new run with --init_from {folder}."
            )
    for change in environment_changes(folder / ENVIRONMENT_FILE, environment):
        lines.append(f"{folder}: the environment has changed since the run began: {change}")
    return lines


def _without(names: frozenset[str], overrides: AnyOverrides) -> AnyOverrides:
    """The overrides without the run options of those names; YAML text as it is."""
    if isinstance(overrides, str) or overrides is None:
        return overrides
    kept = {key: value for key, value in overrides.items() if key not in names}
    if not isinstance(overrides, Overrides):
        return kept
    explicit = {name: value for name, value in explicit_options(overrides).items() if name not in names}
    return Overrides(kept, run_options=RunOptions(**explicit))


def describe_environment() -> dict[str, Any]:
    """Versions, devices, git state, command line and time, as plain JSON values."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "git": _git_state(),
    }


def log_to(file: Path) -> None:
    """Write the log records of this process to `file`, and to no other file of an earlier call.

    The handler is at the root logger, so that a recipe's own records are written too. Where logging was not
    configured, warnings still go to stderr as before, and records from INFO on to the file.
    """
    root = logging.getLogger()
    handlers = [handler for handler in root.handlers if isinstance(handler, _LogFile)]
    if any(handler.baseFilename == os.path.abspath(file) for handler in handlers):
        return
    new = _LogFile(file, encoding="utf-8")
    new.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)  # Python uses it only while there is no other handler
        root.setLevel(logging.INFO)
    for old in handlers:
        root.removeHandler(old)
        old.close()
    root.addHandler(new)


class _LogFile(logging.FileHandler):
    """A handler of our own type, so that a second call finds it; no link leads it elsewhere."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=regular_only)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions | {"torch": torch.__version__}  # which names the build, too


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git_state() -> dict[str, Any] | None:
    """Commit of the repository around the working directory and whether files differ; None without one."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):  # no git here, or a repository too slow to ask
        return None
    return done.stdout.strip() if done.returncode == 0 else None
