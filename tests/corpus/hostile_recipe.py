"""The recipe that hostile YAMLs of `hostile_entry_points.py` name: a script that trains, and every way to its main."""

TRAIN = '''\
"""Trains one linear layer: python train.py CONFIG.yaml"""

import gc

import torch

from amp_recipes import Brain, Stage, load_hparams, parse_arguments


class Squares(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch)

    def compute_objectives(self, predictions, batch, stage):
        return predictions.pow(2).mean()


def fit(hparams, run_opts):
    hparams.get("table", {"missing": 0})["missing"]
    if "modules" not in hparams:
        return
    brain = Squares(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    brain.fit(hparams["epochs"], hparams["samples"], train_loader_kwargs=hparams["loader_kwargs"])


def main(argv=None):
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    fit(hparams, run_opts)


if __name__ == "__main__":
    main()
    gc.collect()  # what is left of the YAML's objects comes to its end
    print("the script came to its end")
'''

TWICE = '''\
"""Loads a YAML, then what its command line says by now."""

from amp_recipes import load_hparams, parse_arguments

for _ in range(2):
    hparams_file, run_opts, overrides = parse_arguments()
    load_hparams(hparams_file, overrides)
'''

# The same two functions as in a script that prepares data: one reads the words, the other calls it and writes.
PREPARE = """\
import argparse
import shutil
from pathlib import Path


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args(argv)


def main(argv=None):
    settings = parse(argv)
    if settings.overwrite:
        shutil.rmtree(settings.folder, ignore_errors=True)
    settings.folder.mkdir()
"""

TOOLS = '''\
"""What a recipe may define that leads to a command line."""

import argparse
import copy
import functools
import importlib
import multiprocessing
import optparse
import os
import runpy
import sys
import threading

import prepare
import torch
import train
from train import main as go

import amp_recipes
import amp_recipes.config.options.arguments as words_of
from amp_recipes import load_hparams, parse_arguments
from amp_recipes import parse_arguments as read_words

WORDS = ["second.yaml", "--trust=os"]
TABLE = {"go": train.main}
alias = train.main
started = functools.partial(train.main, WORDS)
cached = functools.lru_cache(train.main)
later = lambda words, *_: train.main(words)
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=argparse.FileType("w"))
read = parser.parse_args


def run(words=None, *_):
    file, _, overrides = parse_arguments(words)
    load_hparams(file, overrides)


def run_by_alias(words=None, *_):
    file, _, overrides = read_words(words)
    load_hparams(file, overrides)


def run_by_module(words=None, *_):
    file, _, overrides = words_of.parse_arguments(words)
    load_hparams(file, overrides)


def run_by_name(words=None, *_):
    file, _, overrides = getattr(amp_recipes, "parse_" + "arguments")(words)
    load_hparams(file, overrides)


def wrapper(words, *_):
    train.main(words)


def deeper(words, *_):
    wrapper(words)


def found(words, *_):
    getattr(importlib.import_module("train"), "".join(["ma", "in"]))(words)


def in_thread(words, *_):
    thread = threading.Thread(target=train.main, args=[words])
    thread.start()
    thread.join()


def in_thread_later(words, *_):
    def wait():
        main_thread = threading.main_thread()
        main_thread.join(2)
        train.main(words)

    threading.Thread(target=wait, daemon=False).start()


def in_fork(words, *_):
    process = multiprocessing.get_context("fork").Process(target=train.main, args=[words])
    process.start()
    process.join()


def in_spawned(words, *_):
    process = multiprocessing.get_context("spawn").Process(target=train.main, args=[words])
    process.start()
    process.join()


def as_script(words, *_):
    sys.argv[1:] = words
    runpy.run_path(train.__file__, run_name="__main__")


def without_words(*_):
    train.main()


def decorate(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


def hide(function):
    def inner(*args):
        return function(*args)

    return inner


decorated = decorate(train.main)
hidden = hide(train.main)


@hide
def decorated_here(words=None):
    file, _, overrides = parse_arguments(words)
    load_hparams(file, overrides)


async def in_coroutine(words=None):
    train.main(words)


def in_generator(words=None):
    yield train.main(words)


def shards(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    open(parser.parse_args(argv).out, "w").close()


def known_shards(argv=None):
    parser = Parser()
    parser.add_argument("--out")
    open(parser.parse_known_args(argv)[0].out, "w").close()


def deeper_shards(argv=None):
    shards(argv)


def old_shards(argv=None):
    parser = optparse.OptionParser()
    parser.add_option("--out")
    open(parser.parse_args(argv)[0].out, "w").close()


def set_words(words):
    sys.argv[1:] = words


def give_main():
    return train.main


def nested(path, *_):
    return load_hparams(path)


def nested_check(path):
    return amp_recipes.config.check(path)


def nested_with_trust(path, trust):
    return load_hparams(path, trust=trust)


def nested_with_overrides(path, names):
    request = words_of.Request(trust=tuple(names))
    return load_hparams(path, words_of.Overrides(request=request))


def nested_with_these(overrides, path):
    return load_hparams(path, overrides)


class Parser(argparse.ArgumentParser):
    pass


class Tool:
    main = staticmethod(train.main)

    def __init__(self):
        self.go = train.main

    @staticmethod
    def static(words=None):
        file, _, overrides = parse_arguments(words)
        load_hparams(file, overrides)

    @classmethod
    def of_class(cls, words=None):
        file, _, overrides = parse_arguments(words)
        load_hparams(file, overrides)

    def method(self, words=None):
        file, _, overrides = parse_arguments(words)
        load_hparams(file, overrides)

    @property
    def read(self):
        return train.main(WORDS)

    @functools.cached_property
    def kept(self):
        return train.main(WORDS)

    def __getattr__(self, name):
        return train.main(WORDS) if name == "anything" else object.__getattribute__(self, name)


bound = Tool().method


class Command:
    def __init__(self, words=None):
        file, _, overrides = parse_arguments(words)
        load_hparams(file, overrides)


class Child(Command):
    pass


class New:
    def __new__(cls, words=None):
        train.main(words)
        return super().__new__(cls)


class Meta(type):
    def __call__(cls, words):
        return train.main(words)


class Made(metaclass=Meta):
    pass


class Runner(torch.nn.Module):
    """Runs the words whatever is done with it: each method is one that others call."""

    def __init__(self, words, when):
        super().__init__()
        self.words, self.when = words, when
        self.weight = torch.nn.Parameter(torch.ones(1))

    def ran(self, when, result):
        if when == self.when:
            train.main(self.words)
        return result

    def __call__(self, *_):
        return self.ran("call", 0)

    def forward(self, x):
        return self.ran("forward", x)

    def __iter__(self):
        return iter(self.ran("iter", [0, 1]))

    def __len__(self):
        return self.ran("len", 2)

    def __getitem__(self, index):
        return self.ran("getitem", torch.ones(2))

    def __str__(self):
        return self.ran("str", "x")

    def __float__(self):
        return self.ran("float", 0.0)

    def __index__(self):
        return self.ran("index", 0)

    def __fspath__(self):
        return self.ran("fspath", "x")

    def __bool__(self):
        return self.ran("bool", True)

    def __lt__(self, other):
        return self.ran("lt", True)

    def __add__(self, other):
        return self.ran("add", 0)

    def __hash__(self):
        return self.ran("hash", 0)

    def __eq__(self, other):
        return self.ran("eq", True)

    def __deepcopy__(self, memo):
        return self.ran("deepcopy", self)

    def __del__(self):
        if "words" in self.__dict__:
            self.ran("del", None)

    def state_dict(self, *args, **kwargs):
        return self.ran("state", super().state_dict(*args, **kwargs))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        train.main(WORDS)


class Model(Runner):
    __call__ = torch.nn.Module.__call__

    def forward(self, x):
        return super().forward(x).sum(-1) * self.weight


class Unpickled:
    """Runs its words in the process that it is sent to."""

    def __init__(self, words):
        self.words = words

    def __setstate__(self, state):
        self.__dict__.update(state)
        train.main(self.words)

    def __call__(self, samples):
        return torch.ones(2, 2)


class Vectors(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.ones(2)


class Reading(Vectors):
    """Samples that are made by running the words."""

    def __init__(self, words):
        super().__init__(4)
        self.words = words

    def __getitem__(self, index):
        train.main(self.words)
        return super().__getitem__(index)


class Words(Vectors):
    """Samples that are command lines: all of its words in a batch of as many."""

    def __init__(self, words):
        super().__init__(len(words))
        self.words = words

    def __getitem__(self, index):
        return self.words[index]
'''
