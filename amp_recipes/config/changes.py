"""Whether a start in the folder of an earlier run has the settings of that run, or which ones differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import TaggedScalar
from ruamel.yaml.scalarbool import ScalarBoolean

from amp_recipes.config.arguments import parse_value
from amp_recipes.config.document import KeyPath, plain, read_document, tag_of
from amp_recipes.config.run_options import OPTION_NAMES, RunOptions, validate_options
from amp_recipes.errors import ConfigError

# Run options that say how a run is watched, where it goes, or how it is taken up again: a resumed run may change them.
BESIDE_TRAINING = frozenset(option.name for option in fields(RunOptions) if not option.metadata["changes_training"])

_ABSENT = "(absent)"
# A tag and a value as they are written: what two settings are compared by.
_Setting = tuple[str, str]


def holds_run(folder: Path, resolved_file: Path) -> bool:
    """Whether an earlier run in `folder` left its settings and something to go on from."""
    return resolved_file.is_file() and any(folder.glob("save/CKPT+*"))


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two resolved YAML trees and can change the training: `lr: 0.001 -> 0.002`, one each.

    Run options that are absent count with their defaults. A path that differs only in the output folder is the same.
    """
    before, after = _settings(old), _settings(new)
    moved = [_output_folder(old), _output_folder(new)]
    names = [*before, *(name for name in after if name not in before)]
    lines = []
    for name in names:
        was, now = before.get(name), after.get(name)
        if was != now and not (was and now and all(moved) and _same_but_moved(was, now, *moved)):
            lines.append(f"{name}: {_shown(was)} -> {_shown(now)}")
    return lines


def accepted_changes(folder: Path, resolved_file: Path, new_text: str, accept: bool) -> list[str]:
    """What differs between the settings of the run in `folder` and the resolved YAML text of this start.

    Raises ConfigError that lists all of it, if there is any and `accept` is false.
    """
    try:
        changes = setting_changes(read_document(resolved_file).tree, YAML().load(new_text) or {})
    except ConfigError as error:
        changes = [f"the settings of that run cannot be read: {error}"]
    if not changes or accept:
        return changes
    listed = "\n  ".join(changes)
    raise ConfigError(
        f"{folder} holds a run that began with other settings (was -> would be):\n  {listed}\n"
        f"To resume it with the new settings: --accept_changes. To leave it as it is: another --output_folder. To "
        f"start anew in this folder and set the old checkpoints aside: --resume never."
    )


def environment_changes(file: Path, new: Mapping[str, Any]) -> list[str]:
    """What of the environment differs from the one that `file` describes and can change results: torch, the code."""
    try:
        old = json.loads(file.read_bytes())
    except (OSError, ValueError):  # none there, or damaged: nothing to compare with
        return []
    compared = {"torch": ("packages", "torch"), "git commit": ("git", "commit")}
    found = ((what, _entry(old, *keys), _entry(new, *keys)) for what, keys in compared.items())
    return [f"{what}: {was or _ABSENT} -> {now or _ABSENT}" for what, was, now in found if was != now]


def _settings(tree: Mapping[str, Any]) -> dict[str, _Setting]:
    """Each setting by its dotted name, without the run options that do not change the training."""
    given = {name: plain(tree[name]) for name in tree if name in OPTION_NAMES}
    options, mistakes = validate_options(given)
    # Of another version's options, some values may be wrong today: those count as they are written.
    values = {**options, **{name: given[name] for name in mistakes if name in given}}
    counted = {name: value for name, value in values.items() if name not in BESIDE_TRAINING}
    own = {name: value for name, value in tree.items() if name not in OPTION_NAMES}
    return {".".join(path): setting for path, setting in _leaves({**own, **counted}, ())}


def _leaves(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, _Setting]]:
    """Tags and values below a node; a list of scalars is one value."""
    if not isinstance(node, Mapping | list | tuple) or _is_plain_list(node):
        yield path, (tag_of(node), _written(node))
        return
    if path and (tag_of(node) or not node):
        yield path, (tag_of(node), "" if node or tag_of(node) else _written(node))
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        yield from _leaves(value, (*path, str(key)))


def _is_plain_list(node: Any) -> bool:
    nested = TaggedScalar | Mapping | list | tuple
    return isinstance(node, list | tuple) and bool(node) and not any(isinstance(item, nested) for item in node)


def _written(value: Any) -> str:
    """A value as a YAML would have it; other text for every other value (the string "1", 1, 1.0 and true are four)."""
    if isinstance(value, TaggedScalar):
        return str(value.value or "")
    if isinstance(value, list | tuple):
        return repr([plain(item) for item in value])
    if isinstance(value, Mapping):
        return repr({plain(key): plain(item) for key, item in value.items()})
    value = bool(value) if isinstance(value, ScalarBoolean) else plain(value)
    if isinstance(value, str) and parse_value(value) == value and value.strip():
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")  # the string "nan" stands as it is
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


def _shown(setting: _Setting | None) -> str:
    return _ABSENT if setting is None else " ".join(part for part in setting if part) or "''"


def _same_but_moved(was: _Setting, now: _Setting, old_folder: str, new_folder: str) -> bool:
    """Whether both are the same path in, or of, two output folders."""
    if was[0] != now[0]:
        return False
    if (was[1], now[1]) == (_written(old_folder), _written(new_folder)):
        return True
    old_start, new_start = f"{old_folder.rstrip('/')}/", f"{new_folder.rstrip('/')}/"
    return was[1].startswith(old_start) and now[1] == new_start + was[1].removeprefix(old_start)


def _output_folder(tree: Mapping[str, Any]) -> str:
    folder = tree.get("output_folder")
    return str(folder) if isinstance(folder, str) else ""


def _entry(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
