"""Runs what a recipe's command line requests instead of training: a check, the settings, a sweep."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from amp_recipes.commands.sweep.sweep import RunSettings, SweepRequest, run_sweep
from amp_recipes.config.options.arguments import Overrides
from amp_recipes.config.options.run_options import RunOptions, display
from amp_recipes.config.trust.checking import Settings
from amp_recipes.config.yaml.mistakes import printable, reader_may_leave
from amp_recipes.config.yaml.nodes import dotted
from amp_recipes.config.yaml.writing import to_yaml, with_sources

# Checks the YAML with further values beside the overrides.
CheckWith = Callable[[Overrides], Settings]


def run_request(overrides: Overrides, hparams_file: str, check_with: CheckWith) -> int:
    """Run the request of the command line instead of training; return the exit status. Raises ConfigError."""
    if overrides.request.action == "sweep":
        return _sweep(overrides, hparams_file, check_with)
    settings = check_with(overrides)
    with reader_may_leave():
        print(report(settings, overrides))
    return 0


def report(settings: Settings, overrides: Overrides) -> str:
    """Return the text of `--show-config` if it was requested, else the text of a check."""
    return shown(settings).rstrip("\n") if overrides.request.action == "show_config" else summary(settings)


def summary(settings: Settings) -> str:
    """Return one line on what was checked, and the keys that nothing seems to read: one may be misspelt."""
    text = f"{settings.file}: no mistakes ({len(settings.sources)} values, {settings.objects} objects to build)."
    if settings.unread:
        text += f"\nKeys that nothing seems to read: {', '.join(map(printable, settings.unread))}."
    return text


def shown(settings: Settings) -> str:
    """Return the resolved YAML with the source of each value, then the run options that were not set."""
    sources = settings.sources
    lines = [with_sources(settings.resolved, lambda path: sources.get(dotted(path), ""))]
    defaults = RunOptions()
    rest = {name: value for name, value in settings.options.items() if name not in settings.resolved.items}
    lines += [f"{name}: {display(value) or 'null'}  # command line\n" for name, value in rest.items()]
    lines.append("\n# Run options at their defaults\n")
    known = settings.resolved.items.keys() | rest.keys()
    lines += [f"# {name}: {display(value) or 'null'}\n" for name, value in defaults.items() if name not in known]
    return "".join(lines)


def _sweep(overrides: Overrides, hparams_file: str, check_with: CheckWith) -> int:
    def check(values: Mapping[str, Any]) -> RunSettings:
        checked = check_with(overrides.with_values(values))
        options = checked.options
        return RunSettings(
            output_folder=options.get("output_folder"),
            metric=options.get("early_stop_metric") or "loss",
            mode=options.get("early_stop_mode", "min"),
            seed=options.get("seed"),
            fingerprint=hashlib.sha256(to_yaml(checked.resolved).encode()).hexdigest(),
        )

    request = overrides.request
    sweep = SweepRequest(request.axes, request.trials)
    return run_sweep(sweep, _script(), hparams_file, list(request.words), check)


def _script() -> str:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(main or sys.argv[0])
