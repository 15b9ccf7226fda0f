"""Child processes: what they are given, how their end is told, and that signals reach them."""

import os
import signal
import sys
import threading

import pytest

from amp_recipes.commands.child_runs import ChildRuns, killed_by
from amp_recipes.errors import ConfigError

SAYS = "import os, sys; print('out', os.environ['WORD'], os.getcwd()); print('50%\\r100%\\n\\nerr', file=sys.stderr)"


def test_what_a_child_says_goes_to_files_and_its_end_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "here")
    both, out, err = (tmp_path / name for name in ("both", "out", "err"))
    both.write_text("of an earlier run\n")
    command = [sys.executable, "-c", SAYS]
    with ChildRuns() as children:
        together = children.run(command, both, folder=tmp_path)
        apart = children.run(command, out, errors=err, folder=tmp_path)
    assert together.status == 0 and together.seconds > 0 and both.read_text().startswith("of an earlier run\n")
    assert sorted(together.last_lines) == sorted(["100%", "err", f"out here {tmp_path}"])
    assert out.read_text() == f"out here {tmp_path}\n" and apart.last_lines == ["100%", "err"]


def test_a_child_without_a_file_says_it_where_its_parent_does(capfd):
    with ChildRuns() as children:
        ended = children.run([sys.executable, "-c", "print('here'); raise SystemExit(3)"])
    assert (ended.status, ended.said, capfd.readouterr().out) == (3, "", "here\n")


def test_output_is_not_written_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with ChildRuns() as children, pytest.raises(ConfigError, match="is a link"):
        children.run([sys.executable, "-c", ""], tmp_path / "link")


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def signum(request):
    """A signal that does what it does to every program: a shell has what it starts in the background ignore SIGINT."""
    usual = signal.default_int_handler if request.param == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(request.param, usual)
    yield request.param
    assert signal.getsignal(request.param) == usual
    signal.signal(request.param, before)


def test_a_signal_ends_the_child_and_is_remembered(signum, tmp_path):
    """The child tells with its first word that it runs; the parent is then sent the signal."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told = threading.Thread(target=lambda: (pipe.read_text(), os.kill(os.getpid(), signum)))
    told.start()
    code = f"import time; open({str(pipe)!r}, 'w').close(); time.sleep(60)"
    with ChildRuns() as children:
        ended = children.run([sys.executable, "-c", code], tmp_path / "output")
    told.join()
    assert children.requested == signum
    assert killed_by(ended.status) == ("killed by SIGINT" if signum == signal.SIGINT else "killed by SIGTERM")


def test_a_signal_before_the_start_ends_the_child_at_once(tmp_path):
    with ChildRuns() as children:
        os.kill(os.getpid(), signal.SIGTERM)
        ended = children.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "output")
    assert ended.status == -signal.SIGTERM and killed_by(0) == killed_by(2) == ""
