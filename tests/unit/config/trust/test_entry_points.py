"""A YAML cannot start a script: what reads a command line is no target, and only the user's own words grant trust."""

import sys

import pytest

from amp_recipes.config import load_hparams, parse_arguments
from amp_recipes.config.trust.trust import NotTrusted, Trust
from amp_recipes.errors import ConfigError

CODE = '''\
import argparse
import functools
import sys
from argparse import ArgumentParser

import amp_recipes.config as config
from amp_recipes import Brain
from amp_recipes.config import load_hparams, parse_arguments

parser = argparse.ArgumentParser()


def begin(argv=None): return parse_arguments(argv)
def by_module(argv=None): return config.parse_arguments(argv)
def by_its_own_parser(): return ArgumentParser().parse_args()
def by_a_shared_parser(): return parser.parse_args()
def words_of_the_user(): return sys.argv[1:]
def main(): return 3
def through_another(*words): return helper(words)
def helper(words): return begin(words)
def in_a_lambda(): return map(lambda words: begin(words), [1])
def imported_late():
    import argparse as tool
    return tool.ArgumentParser()
def imported_on_one_line(): import argparse as tool; return tool.ArgumentParser()
def named_on_one_line(): tool = argparse; return tool.ArgumentParser()
def named_with_another(): count, tool = 1, argparse; return tool.ArgumentParser(count)
def named_before_another(): tool, count = argparse, 1; return tool.ArgumentParser(count)
def in_a_list(): return [reader() for reader in [begin]]
def imported_from_late():
    from amp_recipes.config import Overrides, parse_arguments as read
    return read(Overrides)
def by_default(reader=parse_arguments): return reader()
def by_keyword_default(*, reader=parse_arguments): return reader()
def made():
    reader = parse_arguments
    def inner(): return reader()
    return inner
in_a_closure = made()
def decorated(function):
    @functools.wraps(function)
    def around(*args): return function(*args)
    return around
@decorated
def wrapped(argv): return parse_arguments(argv)
part = functools.partial(begin, [])
table = {"key": [begin]}
cached = functools.lru_cache(begin)
class Parser(ArgumentParser): pass

class AtBirth:
    def __init__(self, argv=None): self.options = parse_arguments(argv)
class WhenCalled:
    def __call__(self, argv): return self.deeper(argv)
    def deeper(self, argv): return parse_arguments(argv)
class Child(AtBirth): pass
class AsForward(Brain):
    def forward(self, argv): return begin(argv)
class ByName:
    @classmethod
    def from_words(cls, argv): return cls.more(argv)
    @classmethod
    def more(cls, argv): return parse_arguments(argv)
    @staticmethod
    def plain(argv): return parse_arguments(argv)
    def harmless(self): return 1
caller = WhenCalled()

def harmless(x): return x
def loads_another(path): return load_hparams(path)
def speaks_of_it(): return "argparse.ArgumentParser", "main"
def takes_a_namespace(): return argparse.Namespace(width=3)
class Tower:
    def __init__(self): self.main()
    def main(self): return 3
class Harmless:
    main = 3
    def __init__(self, argv=()): self.argv = argv
    def parse(self): return self.main
class OffersIt:
    """Its object reads nothing; only who names the method does."""
    def from_words(self, argv): return parse_arguments(argv)
'''
STARTS = """
    begin by_module by_its_own_parser by_a_shared_parser main through_another helper
    in_a_lambda imported_late imported_on_one_line named_on_one_line named_with_another named_before_another
    in_a_list imported_from_late
    by_default by_keyword_default made in_a_closure wrapped part table
    AtBirth WhenCalled cached Parser Child AsForward ByName.from_words ByName.plain caller parse_arguments parser
"""
HARMLESS = """
    words_of_the_user takes_a_namespace Tower Tower.main harmless loads_another speaks_of_it Harmless ByName
    ByName.harmless OffersIt decorated
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    yield tmp_path
    sys.modules.pop("script", None)


def test_what_reads_a_command_line_is_no_target(recipe, subtests):
    for name in STARTS.split():
        with subtests.test(name), pytest.raises(NotTrusted):
            Trust((), [recipe]).locate(f"script.{name}")
    for name in HARMLESS.split():
        with subtests.test(name):
            assert Trust((), [recipe]).locate(f"script.{name}") is not None


def test_the_refusal_says_why_and_how_to_allow_it(recipe):
    with pytest.raises(NotTrusted) as refused:
        Trust((), [recipe]).locate("script.through_another")
    reason = "starts a script: it reads a command line (amp_recipes.config.options.arguments.parse_arguments)"
    assert reason in str(refused.value) and "--trust script" in str(refused.value)
    assert Trust(["script"], [recipe]).locate("script.through_another")(str(recipe / "a.yaml"))


def test_only_words_of_the_processs_own_command_line_grant_trust(monkeypatch, tmp_path):
    yaml = tmp_path / "a.yaml"
    yaml.write_text("a: !apply:os.getpid []\n")
    with pytest.raises(
        ConfigError, match=r"--trust os is refused: it is not on the command line that started this process"
    ):
        parse_arguments([str(yaml), "--trust=os"])
    for typed in (["--trust", "os,json"], ["--trust=[os]"]):
        monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", str(yaml), *typed])
        _, _, overrides = parse_arguments([str(yaml), "--trust=os"])
        assert load_hparams(yaml, overrides)["a"] > 0
        with pytest.raises(ConfigError, match="--trust sys is refused: it is not on the command line"):
            parse_arguments([str(yaml), "--trust=os,sys"])
