"""Stores the command that started a run, and checks it before anybody runs it again."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from amp_recipes.errors import CheckpointError
from amp_recipes.files.granted_trust import trust_in

MASK = "***"
_KEY_BYTES = 32
# Names of secret values: api_key, hf.token, --db-password. Not monkey, tokenizer, max_tokens.
_SECRET = re.compile(
    r"(.*[^a-z])?(api|access|auth|private)?(key|token)|.*(secret|password|passwd|passphrase|credential).*",
    re.IGNORECASE,
)
_ENTRY = re.compile(r"""([\w.-]+)(["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,{}\[\]"']+)""")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MODULE = re.compile(r"\w[\w-]*(\.\w[\w-]*)*")


def saved(command: Mapping[str, Any]) -> dict[str, Any]:
    """The command as a folder keeps it: secrets masked, with the sha256 of the files that it names, and signed."""
    words, masked = _without_secrets(list(map(str, command.get("words", ()))))
    kept = {**command, "words": words} if isinstance(command.get("words"), list | tuple) else dict(command)
    kept = {**kept, "masked": masked, "sha256": _digests(kept)}
    return {**kept, "signature": _signature(kept, make_key=True)}


def checked(folder: Path, command: Any) -> dict[str, Any]:
    """The command of `meta.json`, as `read_command` returns it. Raises CheckpointError for what is none."""
    if command is None:
        raise CheckpointError(
            f"{folder}: this run was not started from a script (from a notebook?), so it cannot be started again. "
            "Read the folder with amp_recipes.numerics.nonfinite.report.read_replay."
        )
    given = command if isinstance(command, dict) else {}
    kept = {key: given.get(key) for key in ("script", "module", "words", "cwd")}
    kept["masked"] = given.get("masked", [])
    if not _is_command(kept):
        raise CheckpointError(
            f"{folder}: its command is {command!r}; expected a script or module, arguments and a working folder."
        )
    is_signed = _signature(given) is not None and given.get("signature") == _signature(given)
    return {**kept, "not_vouched_for": _not_vouched_for(Path(folder), kept, given.get("sha256"), is_signed)}


def _is_command(kept: Mapping[str, Any]) -> bool:
    module = kept["module"]
    return (
        all(_is_word(kept[key]) for key in ("script", "cwd"))
        and all(isinstance(kept[key], list) and all(map(_is_word, kept[key])) for key in ("words", "masked"))
        and (module is None or (isinstance(module, str) and _MODULE.fullmatch(module) is not None))
    )


def _is_word(value: Any) -> bool:
    """Whether a value is text that a program can be given."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _not_vouched_for(folder: Path, command: dict[str, Any], digests: Any, is_signed: bool) -> dict[str, str]:
    """Return the parts of a command that only the folder vouches for: the name to trust it by -> the reason.

    A folder may come from anybody, its checksums too. So a command is taken for the user's own where a run of the same
    user signed it, and its script lies below the working folder, outside of the run, unchanged; as a module, where that
    script is what the module's name means there.
    """
    here, module = Path.cwd().resolve(), command["module"]
    try:
        cwd = Path(command["cwd"]).resolve()
        script = (cwd / command["script"]).resolve()
    except OSError as error:  # a name that is too long, a ring of links
        return {module or command["script"]: f"{error.strerror}"}
    digest = digests.get(command["script"]) if isinstance(digests, dict) else None
    reason = _why_not_the_users(here, folder.resolve().parent, cwd, script, digest)
    if reason is None and module is not None and not _is_module(module, cwd, script):
        reason = f"{command['script']} is not that module"
    name = module or str(script.relative_to(here) if here in script.parents else script)
    if is_signed:
        return {} if reason is None else {name: reason}
    trusted = dict.fromkeys(trust_in(command["words"]), "the run trusted it with --trust")
    return {name: reason or "no run of yours signed this command", **trusted}


def _why_not_the_users(here: Path, run: Path, cwd: Path, script: Path, digest: Any) -> str | None:
    """Return the reason against running a script in `cwd`: its place, or that it was changed."""
    if here not in (cwd, *cwd.parents) or here not in script.parents:
        return f"it is not in the working folder, {here}"
    if run in script.parents and run not in (here, *here.parents):
        return f"it is inside the run's own folder, {run}"
    if digest is None or digest != _digest(script):
        return "it is not the file with which the run was started"
    return None


def _is_module(module: str, cwd: Path, script: Path) -> bool:
    path = cwd.joinpath(*module.split("."))
    return script in (path.with_suffix(".py"), path / "__main__.py")


def _signature(command: Mapping[str, Any], make_key: bool = False) -> str | None:
    """Return a signature of a command that only this user's runs can write; None if there is no key.

    HMAC (RFC 2104) with SHA-256 of what decides what is run.
    """
    key = _key(make_key)
    if key is None:
        return None
    signed = [command.get(name) for name in ("script", "module", "words", "cwd", "sha256")]
    return hmac.new(key, json.dumps(signed, sort_keys=True, default=str).encode(), "sha256").hexdigest()


def _key(make: bool) -> bytes | None:
    """The user's key, of 32 random bytes, in a file that nobody else can read."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        file = Path(state, "amp_recipes", "replay.key")
        if make and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "wb") as new:
                    new.write(secrets.token_bytes(_KEY_BYTES))
        key = file.read_bytes()
    except (OSError, RuntimeError):  # no home folder, or a read-only one: nothing is signed
        return None
    return key if len(key) == _KEY_BYTES else None


def changed_files(command: Mapping[str, Any] | None) -> list[str]:
    """The files that the command names and that are not what they were."""
    digests = {} if command is None else command.get("sha256", {})
    return [word for word, digest in digests.items() if _digest(Path(command["cwd"]) / word) != digest]


def _without_secrets(words: list[str]) -> tuple[list[str], list[str]]:
    """The words with MASK in place of what looks like a secret, and the names of what was masked."""
    kept: list[str] = []
    masked: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if kept and _takes_a_secret(kept[-1]) and not word.startswith("-"):
            masked.append(kept[-1])
            kept.append(MASK)
        elif not equals or not _is_secret(name):
            kept.append(_without_entries(word, masked))
        elif value:
            masked.append(name)
            kept.append(f"{name}={MASK}")
        else:
            kept.append(word)
    return kept, list(dict.fromkeys(masked))


def _takes_a_secret(word: str) -> bool:
    """Whether it is an option whose value is the next word."""
    return word.startswith("-") and "=" not in word and _is_secret(word)


def _without_entries(word: str, masked: list[str]) -> str:
    """The same for what a word of YAML or JSON holds: `--logger={url: x, api_key: ...}`."""

    def replaced(entry: re.Match[str]) -> str:
        if not _is_secret(entry[1]):
            return entry[0]
        masked.append(entry[1])
        return f"{entry[1]}{entry[2]}{MASK}"

    name, equals, value = word.partition("=")
    return f"{name}={_ENTRY.sub(replaced, value)}" if equals else _ENTRY.sub(replaced, word)


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(_CAMEL.sub("_", name)) is not None


def _digests(command: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of the script and of the YAML files among the words, by the words."""
    words = [str(command.get("script", "")), *map(str, command.get("words", ()))]
    found = {}
    for word in dict.fromkeys(words):
        digest = _digest(Path(str(command.get("cwd", "."))) / word) if word.endswith((".py", ".yaml", ".yml")) else None
        if digest is not None:
            found[word] = digest
    return found


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
