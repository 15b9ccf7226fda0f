"""Ranks checkpoints by a metric, and decides which ones to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from amp_recipes.checkpoint.folder import Checkpoint
from amp_recipes.errors import ConfigError


def ranked(checkpoints: list[Checkpoint], min_key: str | None, max_key: str | None) -> list[Checkpoint]:
    """Return the checkpoints that have a number for the key, best first; without a key, all of them in their order.

    Raises ConfigError if both keys are given.
    """
    if min_key is not None and max_key is not None:
        raise ConfigError(f"min_key={min_key!r} and max_key={max_key!r} are both given; expected at most one of them.")
    if min_key is not None:
        return _best_first(checkpoints, min_key, -1)
    return checkpoints if max_key is None else _best_first(checkpoints, max_key, +1)


def numbers_to_keep(
    checkpoints: list[Checkpoint],
    saved: Checkpoint,
    min_keys: Iterable[str] | None,
    max_keys: Iterable[str] | None,
    num_to_keep: int,
    newest: int,
    is_intact: Callable[[Path], bool],
) -> set[int]:
    """The numbers of the checkpoints that stay; see `Checkpointer.prune`. Raises ConfigError."""
    signs = [(key, -1) for key in _as_list(min_keys)] + [(key, +1) for key in _as_list(max_keys)]
    _refuse_unknown_keys([key for key, _ in signs], checkpoints, saved)
    others = [checkpoint.number for checkpoint in checkpoints if checkpoint.number != saved.number]
    keep = {saved.number, *others[: newest - 1]}
    if not signs:
        keep.update(checkpoint.number for checkpoint in checkpoints[:num_to_keep])
    for ranking in [_best_first(checkpoints, key, sign) for key, sign in signs]:
        keep.update(_best_and_spare(ranking, num_to_keep, keep, saved.number, is_intact))
    return keep


def _refuse_unknown_keys(keys: list[str], checkpoints: list[Checkpoint], saved: Checkpoint) -> None:
    for key in keys:
        if not any(key in checkpoint.meta for checkpoint in [saved, *checkpoints]):
            raise ConfigError(f"No checkpoint has {key!r}; {known_keys(checkpoints, key)}")


def check_num_to_keep(num_to_keep: int) -> None:
    """Raise ConfigError unless at least one stays."""
    if num_to_keep < 1:
        raise ConfigError(f"num_to_keep is {num_to_keep}; expected 1 or more.")


def known_keys(checkpoints: list[Checkpoint], key: str | None) -> str:
    """List the keys in the meta of the checkpoints, and suggest the one that `key` may mean."""
    known = sorted({known for checkpoint in checkpoints for known in checkpoint.meta})
    nearest = get_close_matches(str(key), [name for name in known if name != key], n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"the keys in their meta: {', '.join(known) or 'nothing'}.{hint}"


def _best_first(checkpoints: list[Checkpoint], key: str, sign: int) -> list[Checkpoint]:
    """Return the checkpoints with a number for `key`, best first; equal ones in the order given (newest first)."""
    usable = [checkpoint for checkpoint in checkpoints if _is_number(checkpoint.meta.get(key))]
    return sorted(usable, key=lambda checkpoint: -sign * checkpoint.meta[key])


def _best_and_spare(
    ranking: list[Checkpoint], count: int, kept: set[int], saved: int, is_intact: Callable[[Path], bool]
) -> list[int]:
    """The numbers of the `count` best that are as they were written, and of damaged ones among them.

    kept: those that stay anyway; saved: the one that was just written, whose files need no look. A damaged one stays:
    it may be the reading that failed.
    """
    if all(checkpoint.number in kept for checkpoint in ranking[count:]):
        return [checkpoint.number for checkpoint in ranking]  # none would go
    chosen, intact = [], 0
    for checkpoint in ranking:
        if intact == count:
            break
        chosen.append(checkpoint.number)
        intact += checkpoint.number == saved or is_intact(checkpoint.path)
    return chosen


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _as_list(keys: Iterable[str] | None) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys or [])
