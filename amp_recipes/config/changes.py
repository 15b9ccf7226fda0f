"""Compares the settings of a start with those of the earlier run in its folder."""

from __future__ import annotations

import os
from collections.abc import Collection
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_recipes.config.options.run_options import OPTION_NAMES, OPTIONS, validate_options
from amp_recipes.config.yaml.limits import EXPANDED_NODES, Budget
from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.config.yaml.nodes import (
    KeyPath,
    Mapping,
    Mistakes,
    Node,
    Scalar,
    Sequence,
    attribute_name,
    children,
    dotted,
    is_plain_scalar,
    plain_data,
    scalar_text,
)
from amp_recipes.config.yaml.reading import plain_value, read_file, read_text
from amp_recipes.config.yaml.tags import REF, TUPLE
from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import read_json, refuse_irregular

# Settings that a resumed run may always change: run options on what a run logs, where it writes and how it resumes;
# and keys of the YAML's top level, with all below them: how long to train, and what to log. Other settings that follow
# from the number of epochs (the T_max of a scheduler) are compared like the rest.
BESIDE_TRAINING = frozenset(name for name, option in OPTIONS.items() if not option.metadata["changes_training"])
_FREE_KEYS = frozenset({"number_of_epochs", "log_file", "log_interval", "progressbar", "train_log", "train_logger"})
_EPOCH_COUNTERS = frozenset(
    f"!new:amp_recipes.{name}"
    for name in ("EpochCounter", "checkpoint.EpochCounter", "checkpoint.epoch_counter.EpochCounter")
)
_EPOCH_LIMIT = ("limit", "0")  # by name or by position
# Options of a loader (`loader_kwargs`) that change how batches are read, not what is in them.
_FREE_OF_LOADERS = frozenset({"num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "timeout"})

# A path is written out for each setting: with a few long keys near the top, that would be gigabytes.
_PATH_CHARACTERS = 1_000
_CHARACTERS_PER_VALUE = 80  # longer text counts as several values, since each alias writes it out

_ABSENT = "(absent)"
_OPENS_NO_PLAIN_TEXT = "'\"[{(!&*|>%@`#,"


@dataclass(frozen=True, slots=True)
class _Setting:
    """A tag and a value as they are written, to compare two settings.

    relative: the value with paths relative to the output folder. free: it may always change.
    """

    tag: str
    text: str
    relative: str
    free: bool

    def __str__(self) -> str:
        return " ".join(part for part in (self.tag, self.text) if part)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs between two runs.

    was, now: as a YAML would have it; None: absent. free: a resumed run may change it.
    """

    name: str
    was: str | None
    now: str | None
    free: bool

    def __str__(self) -> str:
        was, now = (_ABSENT if text is None else text for text in (self.was, self.now))
        return one_line(f"{self.name}: {was} -> {now}")


def holds_run(folder: Path, resolved_file: Path) -> bool:
    """Whether `folder` holds the settings of an earlier run and something to resume from."""
    return os.path.lexists(resolved_file) and any(folder.glob("save/CKPT+*"))


def setting_changes(old: Mapping, new: Mapping) -> list[str]:
    """Return the changes between two resolved YAML trees that a resume refuses, such as `lr: 0.001 -> 0.002`.

    Otherwise the same as `differences`.
    """
    return [str(change) for change in differences(old, new) if not change.free]


def differences(old: Mapping, new: Mapping) -> list[Change]:
    """Return all differences of two resolved YAML trees, in the order of the old one, then of the new one.

    Run options that are absent count with their defaults. A path that differs only in the output folder is the same,
    and so is the output folder. An object that several keys share counts once; that a key shares it is its setting.
    Raises ConfigError for a tree that is too large to compare once its anchors are written out.
    """
    before, after = _settings(old), _settings(new)
    found = []
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        if was is None or now is None or not _are_same(was, now):
            free = all(setting.free for setting in (was, now) if setting is not None)
            found.append(Change(dotted(path), *(None if text is None else str(text) for text in (was, now)), free))
    return found


def accepted_changes(folder: Path, resolved_file: Path, new_text: str, accept: bool) -> list[str]:
    """Return the changes from the settings of the run in `folder` to the resolved YAML text of this start.

    Raises ConfigError that lists all of it, if there is any and `accept` is false.
    """
    mistakes = Mistakes()
    new = read_text(new_text, "the settings of this start", mistakes, Budget())
    mistakes.raise_if_any("the settings of this start")
    assert isinstance(new, Mapping)
    try:
        changes = setting_changes(read_settings(resolved_file), new)
    except ConfigError as error:
        changes = [f"the saved settings cannot be read: {error}"]
    if not changes or accept:
        return changes
    listed = "\n  ".join(changes)
    raise ConfigError(
        f"The settings differ from those of the run in {folder} (saved -> now):\n  {listed}\n"
        "To resume with the new settings: --accept_changes. To keep that run and start another one: another "
        "--output_folder. To start again in this folder and move the old checkpoints aside: --resume never."
    )


def read_settings(resolved_file: Path) -> Mapping:
    """The resolved settings that a run left in `resolved_file`. Raises ConfigError."""
    refuse_irregular(resolved_file)
    mistakes = Mistakes()
    root = read_file(str(resolved_file), mistakes, Budget())
    mistakes.raise_if_any(str(resolved_file))
    assert root is not None
    return root


def environment_changes(file: Path, new: AnyMapping[str, Any]) -> list[str]:
    """Return the changes since the environment in `file` that can change results: torch, the code."""
    try:
        old = read_json(file)
    except (FileNotFoundError, ConfigError):  # none there, or damaged: nothing to compare with
        return []
    compared = {"torch": ("packages", "torch"), "git commit": ("git", "commit")}
    found = ((what, _entry(old, *keys), _entry(new, *keys)) for what, keys in compared.items())
    return [one_line(f"{what}: {was or _ABSENT} -> {now or _ABSENT}") for what, was, now in found if was != now]


# ---------------------------------------------------------------------- the settings of a tree


def _settings(root: Mapping) -> dict[KeyPath, _Setting]:
    """Each setting by its path."""
    _check_size(root)
    given = {str(key): plain_data(node) for key, node in root.items.items() if key in OPTION_NAMES and not node.tag}
    options, mistakes = validate_options(given)
    folder = given.get("output_folder")
    flat = _Flat(root, folder if isinstance(folder, str) else "")
    # Of another version's options, some values may be wrong today: those count as they are written.
    valid = given.keys() - mistakes.keys()
    for key, node in root.items.items():
        if key not in valid:
            flat.add((str(key),), node, free=key in BESIDE_TRAINING | _FREE_KEYS)
    absent = options.keys() - mistakes.keys() - root.items.keys()
    for name in (name for name in options if name in valid | absent):
        flat.add_value((name,), "", options[name], free=name in BESIDE_TRAINING)
    return flat.settings


class _Flat:
    """The settings of a resolved tree, as they are added.

    A list of plain values is one setting, and so is an object that is described at another key, or an attribute of it.
    """

    def __init__(self, root: Mapping, output_folder: str) -> None:
        self.settings: dict[KeyPath, _Setting] = {}
        self._homes = _homes(root)
        self._folder = output_folder.rstrip("/")

    def add(self, path: KeyPath, node: Node, free: bool) -> None:
        """Add a node and what is below it. Raises ConfigError for a path that is too long."""
        if sum(map(len, path)) > _PATH_CHARACTERS:
            limit = f"{_PATH_CHARACTERS:,} characters"
            raise ConfigError(f"{node.source}: the path of this key has more than {limit}; use shorter names.")
        reference = self._reference(path, node)
        free_below = _free_below(path, node)
        if reference:
            self.add_value(path, REF, reference, free)
        elif not children(node) or (_is_plain_list(node) and not free_below):
            self.add_value(path, "" if node.tag == TUPLE else node.tag, _own_value(node), free)
        else:
            if node.tag:
                self.add_value(path, node.tag, "", free)
            for key, child in children(node):
                self.add((*path, str(key)), child, free or str(key) in free_below)

    def add_value(self, path: KeyPath, tag: str, value: Any, free: bool) -> None:
        """Add one setting; an empty value after a tag means no value."""
        text, relative = ("", "") if tag and value == "" else (written(value), written(self._relative(value)))
        self.settings[path] = _Setting(tag, text, relative, free)

    def _reference(self, path: KeyPath, node: Node) -> str:
        """`<model>` for an object that is described at another key, `<images.channels>` for an attribute of one."""
        if isinstance(node, Sequence) and (name := attribute_name(node)) is not None:
            home = self._homes.get(node.items[0])
            if home not in (None, (*path, "0")):
                return f"<{_as_reference(home)}.{name}>"
        home = self._homes.get(node, path)
        return "" if home == path else f"<{_as_reference(home)}>"

    def _relative(self, value: Any) -> Any:
        """`value` with a mark, which no YAML can hold, in place of the output folder."""
        if isinstance(value, list | tuple):
            return type(value)(self._relative(item) for item in value)
        if not self._folder or not isinstance(value, str) or not f"{value}/".startswith(f"{self._folder}/"):
            return value
        below = value.removeprefix(self._folder)
        return "\0" if not below.strip("/") else f"\0{below}"


def _free_below(path: KeyPath, node: Node) -> Collection[str]:
    """The keys directly below a node that a resumed run may change."""
    if not node.tag and "loader" in path[-1]:
        return _FREE_OF_LOADERS
    return _EPOCH_LIMIT if node.tag in _EPOCH_COUNTERS else ()


def _own_value(node: Node) -> Any:
    """The value after the tag of a node; "" for an object without arguments, which can be written in three ways."""
    if isinstance(node, Sequence) and node.items:
        values = [item.value for item in node.items if isinstance(item, Scalar)]
        return tuple(values) if node.tag == TUPLE else values
    return "" if node.tag not in ("", TUPLE) else plain_data(node)


def _homes(root: Mapping) -> dict[Node, KeyPath]:
    """Return the path that describes each object: of its keys the one of fewest levels, then the first by name."""
    homes: dict[Node, KeyPath] = {}
    level: list[tuple[KeyPath, Node]] = [((), root)]
    while level:
        below = [((*path, str(key)), child) for path, node in level for key, child in children(node)]
        level = []
        for path, node in sorted(below, key=lambda place: place[0]):
            if node.tag in ("", TUPLE):
                level.append((path, node))
            elif node not in homes:
                homes[node] = path
                level.append((path, node))
    return homes


def _as_reference(path: KeyPath) -> str:
    return path[0] + "".join(f"[{key}]" for key in path[1:])


def _are_same(was: _Setting, now: _Setting) -> bool:
    return was.tag == now.tag and (was.text == now.text or was.relative == now.relative)


def _check_size(root: Mapping) -> None:
    """Raise ConfigError for a tree that is too large to compare once its aliases are written out."""
    sizes: dict[Node, int] = {}
    pending: list[Node] = [root]
    while pending:
        node = pending[-1]
        below = [child for _, child in children(node)]
        unknown = [child for child in below if child not in sizes]
        pending += unknown
        if not unknown:
            pending.pop()
            characters = len(str(node.value)) if isinstance(node, Scalar) else 0
            sizes[node] = 1 + characters // _CHARACTERS_PER_VALUE + sum(sizes[child] for child in below)
    if sizes[root] > EXPANDED_NODES:
        limit = f"{EXPANDED_NODES:,} values"
        raise ConfigError(f"{root.source.file}: the settings have more than {limit} when each alias is written out.")


# ---------------------------------------------------------------------- values as text


def _is_plain_list(node: Node) -> bool:
    return isinstance(node, Sequence) and all(is_plain_scalar(item) for item in node.items)


def written(value: Any) -> str:
    """A value as a YAML would have it; other text for every other value (the string "1", 1, 1.0 and true are four)."""
    if isinstance(value, list | tuple):
        inner = ", ".join(repr(item) if isinstance(item, str) else written(item) for item in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, str):
        return value if _is_plain_text(value) else repr(value)
    return scalar_text(value)


def _is_plain_text(text: str) -> bool:
    """Whether a string reads as itself without quotes."""
    if not text or text[0] in _OPENS_NO_PLAIN_TEXT or text != text.strip() or not text.isprintable():
        return False
    try:
        return isinstance(plain_value(text), str)
    except ConfigError:  # it looks like a number or a date, and is none
        return False


def _entry(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, AnyMapping) else None
    return tree
