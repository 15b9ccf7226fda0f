"""Files in a run's folder, which may come from somebody else: none leads elsewhere, stops a run or fills memory."""

import json
import os
import resource
import socket
import tracemalloc
from pathlib import Path

import pytest
from work import at_most

from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import (
    JSON_BYTES,
    JSON_DEPTH,
    read_json,
    refuse_irregular,
    refuse_link,
    regular_only,
    write_atomically,
)

KINDS = {
    "link": "is a link",
    "dangling link": "is a link",
    "link to a device": "is a link",
    "folder": "is a folder",
    "pipe": "is a named pipe",
    "socket": "is a socket",
}


def place(kind: str, path: Path, elsewhere: Path) -> None:
    """Put something that is no regular file at `path`."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # its path may have 108 bytes only
    else:
        targets = {"link": elsewhere, "dangling link": elsewhere.with_name("nothing"), "link to a device": "/dev/zero"}
        path.symlink_to(targets[kind])


@pytest.fixture
def elsewhere(tmp_path):
    file = tmp_path / "elsewhere"
    file.write_text("theirs\n")
    return file


@pytest.mark.parametrize("mode", ["rb", "ab", "r+b", "a+b"])
def test_only_regular_files_are_opened(tmp_path, elsewhere, subtests, mode):
    for kind, name in KINDS.items():
        with subtests.test(kind), at_most(calls=5_000):
            path = tmp_path / kind
            place(kind, path, elsewhere)
            with pytest.raises(ConfigError, match=rf"{path} {name}.*; expected a regular file") as refused:
                open(path, mode, opener=regular_only)  # noqa: SIM115
            assert "emove" in str(refused.value)
            with pytest.raises(ConfigError, match=name):
                refuse_irregular(path)
            assert elsewhere.read_text() == "theirs\n" and not (tmp_path / "nothing").exists()


def test_what_takes_the_place_between_look_and_opening_is_refused_too(tmp_path, elsewhere, monkeypatch):
    path = tmp_path / "file"
    path.touch()
    regular = os.lstat(path)
    for kind in KINDS:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        place(kind, path, elsewhere)
        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", lambda _: regular)
            for mode in ("rb", "ab"):
                with pytest.raises((ConfigError, OSError)):
                    open(path, mode, opener=regular_only)  # noqa: SIM115
    assert elsewhere.read_text() == "theirs\n"


def test_regular_files_are_read_and_appended_to_as_ever(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")  # the folder is what the user named
    path = tmp_path / "run" / "file"
    for text in ("a", "b"):
        with open(path, "a", encoding="utf-8", opener=regular_only) as stream:
            stream.write(text)
    with open(path, encoding="utf-8", opener=regular_only) as stream:
        assert stream.read() == "ab"
    refuse_irregular(path)
    refuse_irregular(tmp_path / "nothing")
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    with pytest.raises(FileNotFoundError):
        open(tmp_path / "nothing", "rb", opener=regular_only)  # noqa: SIM115


def test_a_file_of_two_names_is_read_and_not_written(tmp_path, elsewhere):
    path = tmp_path / "file"
    os.link(elsewhere, path)
    with open(path, "rb", opener=regular_only) as stream:
        assert stream.read() == b"theirs\n"
    with pytest.raises(ConfigError, match="second name elsewhere"):
        open(path, "ab", opener=regular_only)  # noqa: SIM115


def test_no_descriptor_stays_open(tmp_path, elsewhere):
    path = tmp_path / "file"
    os.mkfifo(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    try:
        for _ in range(300):
            with pytest.raises(ConfigError):
                open(path, "rb", opener=regular_only)  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_inside_of_a_run_is_no_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "save").symlink_to("there")
    with pytest.raises(ConfigError, match=r"save is a link.*another output_folder"):
        refuse_link(tmp_path / "save")
    refuse_link(tmp_path / "there")
    refuse_link(tmp_path / "nothing")


def test_json_is_read(tmp_path):
    for value in ({"a": [1, None, "x"]}, [], 3, {"deep": json.loads("[" * 49 + "]" * 49)}):
        (tmp_path / "a.json").write_text(json.dumps(value))
        assert read_json(tmp_path / "a.json") == value


UNREADABLE = {
    "empty": ("", "Expecting value"),
    "half": ("{", "line 1 column 2"),
    "digits": ("9" * 5_000, "digits"),
    "lists": ("[" * (JSON_DEPTH + 1) + "]" * (JSON_DEPTH + 1), "nested more than 50"),
    "mappings": ('{"a":' * (JSON_DEPTH + 1) + "1" + "}" * (JSON_DEPTH + 1), "nested more than 50"),
    "brackets": ("[" * 100_000, "nested more than 50"),
    "large": (" " * (JSON_BYTES + 1), "larger than 4,194,304 bytes"),
}


def test_json_that_cannot_be_read_is_named(tmp_path, subtests):
    file = tmp_path / "a.json"
    for name, (text, says) in UNREADABLE.items():
        with subtests.test(name):
            file.write_text(text)
            with pytest.raises(ConfigError, match=says) as refused:
                read_json(file)
            assert str(refused.value).startswith(f"{file}: cannot be read: ")


def test_json_that_is_missing_or_no_file(tmp_path, elsewhere):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "nothing")
    for kind in KINDS:
        place(kind, tmp_path / kind, elsewhere)
        with pytest.raises(ConfigError, match=KINDS[kind]):
            read_json(tmp_path / kind)


def test_json_of_any_size_takes_little_memory(tmp_path):
    file = tmp_path / "a.json"
    with open(file, "wb") as stream:
        stream.truncate(1 << 40)  # a file of holes
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="larger"):
            read_json(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_writing_replaces_what_stands_there(tmp_path, elsewhere):
    for kind in set(KINDS) - {"folder"}:
        place(kind, tmp_path / kind, elsewhere)
        write_atomically(tmp_path / kind, b"ours")
        assert (tmp_path / kind).read_text() == "ours" and not (tmp_path / kind).is_symlink()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", b"ours")
    assert elsewhere.read_text() == "theirs\n"
    assert not list(tmp_path.glob(".*"))


def test_a_link_at_the_temporary_name_is_not_written_through(tmp_path, elsewhere):
    """In a container, process numbers are small and the same at each start."""
    (tmp_path / f".a.yaml.{os.getpid()}.tmp").symlink_to(elsewhere)
    write_atomically(tmp_path / "a.yaml", b"ours")
    assert elsewhere.read_text() == "theirs\n" and (tmp_path / "a.yaml").read_text() == "ours"


def test_a_failed_write_leaves_the_earlier_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("earlier")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", b"later")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "earlier"
