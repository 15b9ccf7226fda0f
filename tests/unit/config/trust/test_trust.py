"""What a YAML may name, and what no way of naming leads to."""

import datetime
import inspect
import os
import pydoc
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch_release import RELEASE
from work import at_most

import amp_recipes.data.streams  # noqa: F401  (its listed names are checked below)
from amp_recipes.config.trust.trust import NotFound, NotTrusted, Trust
from amp_recipes.config.trust.trusted_names import amp_recipes_objects, key_of, standard_objects, torch_objects
from amp_recipes.errors import ConfigError


def names(text: str) -> list[str]:
    return text.split()


def found_by_python(name: str) -> object:
    """As `pydoc.locate`, which from Python 3.12 on prefers a module to what its package has by the same name."""
    parts = name.split(".")
    found = pydoc.locate(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        pydoc.locate(".".join(parts[:depth]))  # imports it, if it is a module
        found = getattr(found, part, None)
    return found


def not_refused(trust: Trust, wanted: list[str], refusals: tuple = (NotTrusted, NotFound)) -> list[str]:
    """The names of `wanted` that are not refused."""
    return [name for name in wanted if not isinstance(refusal_of(trust, name), refusals)]


def refusal_of(trust: Trust, name: str) -> Exception | None:
    try:
        trust.locate(name)
    except (NotTrusted, NotFound) as error:
        return error
    return None


RECIPE = """
import builtins, collections, datetime, enum, functools, importlib, math, os, pathlib, pickle, subprocess, sys, typing
import numpy as np
import torch
import torch.nn.functional as F
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from importlib import import_module
from math import sqrt
from operator import attrgetter, methodcaller
from os import path, system
from torch import load, nn, optim
from torch.nn import Linear, Module, ParameterDict
import amp_recipes
from amp_recipes import EpochCounter, load_hparams

SIZES = (1, 2, 3)
SETTINGS = {"lr": [1e-3, None], "name": "x"}
ROOT = pathlib.Path("data")
MEAN = torch.zeros(3)
STD = np.ones(3)
NET = nn.Linear(2, 2)
make_net = partial(nn.Linear, 2, 2)

run = functools.partial(os.system)
nested = functools.partial(functools.partial(eval))
callable_run = functools.partial(os.system, "true")
read_variable = os.environ.get
environment = os.environ
getter = attrgetter("x")
commands = {"run": [os.system]}
hidden = (1, (2, {"x": eval}))
generator = (x for x in [1])
frame = sys._getframe()
code = compile("1", "x", "eval")
types_of = {int: exec}
ordered = collections.OrderedDict(run=os.system)
default = collections.defaultdict(list, run=[os.system])
queue = collections.deque([eval])
objects = np.array([eval, 1], dtype=object)
keys = {os.system: 1}
file = open(os.devnull)
Numbers = list[int]
T = typing.TypeVar("T")
cached_load = lru_cache(torch.load)
append = [].append
builtin_method = "{0.__class__}".format
namespace = globals()
modules = sys.modules
loader = __loader__


def wrapped(*args):
    return os.system(*args)


functools.update_wrapper(wrapped, os.system)


@lru_cache
def cached(x=1):
    return x


@torch.no_grad()
def quiet(x=1):
    return x


def numbers():
    yield 1


class Colour(enum.Enum):
    RED = 1


@dataclass
class Item:
    x: int = 1
    secret: object = os.system
    os: object = os
    table: object = None


class Pair(typing.NamedTuple):
    first: object
    second: object


class Names(list):
    def __iter__(self):
        return iter([])


pair = Pair(1, os.system)
names_of = Names([eval])
ordered_numbers = collections.OrderedDict(a=1)
plain_objects = np.array(["a", None], dtype=object)
good_pair = Pair(1, nn.Linear)


class Callable:
    def __call__(self):
        return 1


class Spoof:
    __class__ = torch.Tensor
    def __call__(self):
        return 1


class Model(nn.Module):
    size = 3
    os = os
    load_file = staticmethod(torch.load)
    shell = system
    inner = subprocess.Popen

    def __init__(self, size: int = 3):
        super().__init__()
        self.size = size
        self.layer = nn.Linear(2, 2)
        self.item = Item()

    @classmethod
    def small(cls):
        return cls(1)

    @staticmethod
    def static():
        return 1

    @property
    def secret(self):
        return os.system

    @functools.cached_property
    def lazy(self):
        return 1


class Table(nn.Embedding):
    pass


class Number(int):
    pass


class Storage(torch.UntypedStorage):
    pass


instance = Model()
callable_instance = Callable()
loose = subprocess.list2cmdline


def __getattr__(name):
    if name == "dynamic":
        return os.system
    if name == "module_of_os":
        return os
    raise AttributeError(name)
"""

ADMITTED = names(
    """
    SIZES SETTINGS ROOT MEAN STD NET make_net sqrt Linear EpochCounter cached quiet numbers Colour Colour.RED Item
    Callable Model Model.small Model.static Table.from_pretrained Model.size instance callable_instance
    ordered_numbers plain_objects good_pair
    """
)

REFUSED = names(
    """
    os os.system os.path.join sys.modules builtins.eval builtins functools.partial functools.reduce
    importlib.import_module collections.namedtuple math.sqrt nn nn.Linear torch torch.load torch.nn.Linear F F.relu np
    np.load np.loadtxt optim.SGD path path.join path.os pathlib.Path pickle.loads subprocess.Popen amp_recipes
    amp_recipes.load_hparams load_hparams datetime.sys.modules enum.sys system load partial reduce lru_cache
    import_module attrgetter methodcaller ParameterDict Module.apply Linear.apply Linear.register_forward_hook run
    nested callable_run read_variable environment getter commands hidden generator generator.gi_frame frame
    frame.f_builtins frame.f_globals code types_of file Numbers T cached_load append builtin_method namespace modules
    loader wrapped Model.os Model.os.system Model.load_file Model.shell Model.inner Model.secret Model.secret.fget
    Model.secret.fget.x Model.lazy Model.lazy.func Model.apply Model.mro Model.register_forward_hook Model.to
    Model.forward Model.load_state_dict Table.register_module Item.secret instance.apply instance.secret
    instance.item.secret instance.item.os SETTINGS.get SIZES.count cached.cache_clear dynamic module_of_os
    module_of_os.system ROOT.unlink ROOT.write_text MEAN.numpy MEAN.map_ MEAN.apply_ MEAN.register_hook STD.tofile
    NET.apply callable_instance.x numbers.x loose Number.from_bytes Number.real Storage.from_file
    Storage.is_shared Spoof.mro typing.sys.modules torch.hub.load dataclass
    ordered default queue objects keys pair names_of
    """
)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A recipe folder on Python's path, whose module `my_data` holds everything that an attacker may hope for."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "my_data.py").write_text(RECIPE)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)  # a file name such as `built-in` must not be looked for here
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] not in ("torch", "numpy", "amp_recipes"):
            del sys.modules[name]


@pytest.fixture
def trust(recipe):
    return Trust(recipe_folders=[recipe])


def test_what_a_recipe_defines_may_be_named(trust, subtests):
    for name in ADMITTED:
        with subtests.test(name):
            assert key_of(trust.locate(f"my_data.{name}")) == key_of(pydoc.locate(f"my_data.{name}"))


def test_what_a_recipe_only_imports_or_leads_to_is_refused_and_the_advice_is_enough(recipe, trust, subtests):
    for name in REFUSED:
        with subtests.test(name):
            error = refusal_of(trust, f"my_data.{name}")
            assert error is not None
            if isinstance(error, NotFound):
                assert name in {"Table.register_module", "callable_instance.x", "numbers.x"}
                continue
            advice = advice_in(error)
            leads_nowhere = name in {"Model.secret.fget.x"}  # then there is nothing to trust
            assert leads_nowhere or advice or "; write " in str(error), str(error)
            assert advice not in {"torch", "amp_recipes", "builtins", "builtins.module", "builtins.generator"}
            if advice and not name.startswith(("dynamic", "module_of_os")):  # the recipe's own __getattr__ gives these
                assert pydoc.locate(advice) is not None
                Trust([advice], [recipe]).locate(f"my_data.{name}")


STANDARD_REFUSED = names(
    """
    eval exec compile open __import__ getattr setattr delattr vars globals locals dir type object super property
    classmethod staticmethod map filter iter next input print breakpoint memoryview bytearray bytes id hash format
    callable hasattr isinstance issubclass help exit quit copyright pow repr str.format str.join dict.get
    dict.fromkeys int.from_bytes type.mro builtins.eval builtins.open builtins.str.format math.factorial math.comb
    math.perm math.prod operator.attrgetter operator.methodcaller operator.itemgetter operator.getitem operator.setitem
    operator.call operator.pow operator.mod operator.lshift operator.concat operator.iadd functools.partial
    functools.reduce functools.partialmethod itertools.count itertools.starmap collections.namedtuple
    collections.ChainMap collections.UserDict collections.abc.Callable decimal.Decimal fractions.Fraction datetime.sys
    random.Random.seed random.setstate random.SystemRandom random.sample random.choices string.Formatter
    string.Template pathlib.os pathlib.Path.touch pathlib.Path.write_text pathlib.Path.read_text pathlib.Path.home
    os.system os.popen os.remove os.environ os.path.exists os.path.os os.path.genericpath posixpath.join os
    posix.system subprocess.run sys.exit sys.modules pickle.loads marshal.loads code.interact codecs.open io.open
    builtins importlib.import_module runpy.run_path ctypes.CDLL timeit.timeit types.FunctionType types.SimpleNamespace
    copy.deepcopy pydoc.locate pydoc.pipepager webbrowser.open this antigravity distutils.spawn numpy.load
    numpy.loadtxt yaml.unsafe_load ruamel.yaml.YAML hyperpyyaml.load_hyperpyyaml sklearn.svm.SVC
    PIL.Image.open
    """
)


def test_the_rest_of_python_is_refused(trust):
    for name in not_refused(trust, STANDARD_REFUSED, NotTrusted):
        assert isinstance(refusal_of(trust, name), NotFound) and found_by_python(name) is None, name


# All of these exist in torch 2.13; each executes, loads, writes, reads a file, or calls what it is given by name.
DANGEROUS_TORCH = names(
    """
    torch.load torch.save torch.from_file torch.frombuffer torch.asarray torch.from_dlpack torch.compile torch.vmap
    torch.cond torch.fork torch.wait torch.import_ir_module torch.set_default_device
    torch.use_deterministic_algorithms torch.set_num_threads torch.classproperty torch.get_file_path torch.Tensor
    torch.Tensor.apply_ torch.Tensor.map_ torch.Storage torch.UntypedStorage torch.UntypedStorage.from_file
    torch.FloatStorage.from_file torch.ScriptModule torch.PyTorchFileReader torch.PyTorchFileWriter torch.hub
    torch.hub.load torch.hub.load_state_dict_from_url torch.hub.download_url_to_file torch.ops torch.ops.load_library
    torch.ops.aten.from_file torch.classes.load_library torch.os torch.os.system torch.sys.modules torch.builtins.eval
    torch.importlib.import_module torch.ctypes.CDLL torch.platform.os torch.inspect.os torch.functools.reduce
    torch.functools.partial torch.jit.load torch.jit.script torch.jit.trace torch.package.PackageImporter
    torch.serialization.load torch.serialization.os torch.storage.os torch.multiprocessing.spawn
    torch.multiprocessing.Process torch.distributed.init_process_group torch.distributed.run.main
    torch.distributed.checkpoint.load torch.distributed.elastic torch.distributed.rpc torch.utils.collect_env.run
    torch.utils.collect_env.get_pretty_env_info torch.utils.cpp_extension torch.utils.cpp_extension.load
    torch.utils.cpp_extension.load_inline torch.utils.cpp_extension.CppExtension torch.utils.benchmark
    torch.utils.benchmark.Timer torch.utils.bottleneck torch.utils.model_zoo.load_url torch.utils.file_baton.FileBaton
    torch.utils.hipify torch.utils.bundled_inputs torch.utils.mobile_optimizer torch.utils.tensorboard.SummaryWriter
    torch.utils.checkpoint.checkpoint torch.utils.hooks.RemovableHandle torch.utils.backcompat
    torch.utils.dlpack.from_dlpack torch.utils.data.datapipes torch.utils.data.IterDataPipe
    torch.utils.data.MapDataPipe torch.utils.data.DFIterDataPipe torch.utils.data.functional_datapipe
    torch.utils.data.datapipes.iter.FileOpener torch.utils.data.datapipes.iter.FileLister
    torch.utils.data.datapipes.iter.StreamReader torch.utils.data.datapipes.iter.Mapper
    torch.utils.data.graph.traverse torch.utils.data.argument_validation torch.utils.data.dataloader.os
    torch.utils.data.dataloader.multiprocessing torch.utils.data.dataloader.itertools torch.utils.data.dataset.bisect
    torch.utils.data.distributed.dist.launch torch.fx torch.fx.graph_module torch.fx.graph_module.os.system
    torch.fx.GraphModule torch.fx.symbolic_trace torch.func torch.export.load torch.onnx.export
    torch.autograd.Function torch.autograd.profiler.profile torch.profiler.profile torch.library.Library torch.testing
    torch.backends torch.cuda.memory.os torch.cuda.set_device torch.cuda.os torch.cuda.sys torch.random.contextlib
    torch.random.fork_rng torch.functional.torch torch.functional.F torch.nn.Module.apply torch.nn.Linear.apply
    torch.nn.Module.register_forward_hook torch.nn.Module.register_module
    torch.nn.Module.register_load_state_dict_post_hook torch.nn.Module.compile torch.nn.Module.load_state_dict
    torch.nn.Module.to torch.nn.Module.share_memory torch.nn.Sequential.append torch.nn.ParameterDict
    torch.nn.DataParallel torch.nn.parallel.DistributedDataParallel torch.nn.factory_kwargs torch.nn.functional.torch
    torch.nn.functional.torch.hub.load torch.nn.functional.importlib.import_module torch.nn.functional.warnings.sys
    torch.nn.functional.dataclasses.make_dataclass torch.nn.functional.np.load
    torch.nn.functional.handle_torch_function torch.nn.functional.boolean_dispatch
    torch.nn.functional.has_torch_function torch.nn.functional.Callable torch.nn.functional.Optional torch.nn.grad
    torch.nn.modules.module.functools.reduce torch.nn.modules.module.itertools.starmap torch.nn.modules.module.inspect
    torch.nn.modules.module.register_module_forward_hook torch.nn.modules.module.register_module_full_backward_hook
    torch.nn.modules.module.partial torch.nn.modules.container.operator.attrgetter torch.nn.modules.container.abc
    torch.nn.modules.container.ParameterDict torch.nn.modules.linear.F torch.nn.modules.linear.torch
    torch.nn.init.warnings torch.nn.init.math torch.nn.utils.parametrize
    torch.nn.utils.parametrize.register_parametrization torch.nn.utils.parametrize.copyreg
    torch.nn.utils.parametrizations.parametrize torch.nn.utils.stateless.functional_call
    torch.nn.utils.prune.global_unstructured torch.nn.utils.skip_init torch.nn.utils.init
    torch.nn.utils.fuse_conv_bn_eval torch.nn.utils.rnn.copy_method_params torch.nn.utils.rnn.bind
    torch.nn.utils.rnn.NamedTuple torch.nn.quantized torch.nn.intrinsic torch.nn.attention
    torch.nn.attention.flex_attention torch.optim.Optimizer.register_step_pre_hook
    torch.optim.Optimizer.load_state_dict torch.optim.SGD.step torch.optim.optimizer.functools
    torch.optim.optimizer.deepcopy torch.optim.optimizer.register_optimizer_step_pre_hook
    torch.optim.optimizer.warnings torch.optim.lr_scheduler.partial torch.optim.lr_scheduler.wraps
    torch.optim.lr_scheduler.types torch.optim.lr_scheduler.types.FunctionType torch.optim.lr_scheduler.ref
    torch.optim.lr_scheduler.LambdaLR.load_state_dict torch.optim.swa_utils.deepcopy torch.optim.swa_utils.itertools
    torch.optim.swa_utils.update_bn torch.optim.swap_in_optimizer_params_and_state
    """
)


def test_what_of_torch_loads_writes_executes_or_calls_is_refused(trust, subtests):
    for name in DANGEROUS_TORCH:
        with subtests.test(name):
            error = refusal_of(trust, name)
            assert error is not None
            if isinstance(error, NotFound):  # a name of another version, or one that does not exist below a class
                assert found_by_python(name) is None


def test_the_list_of_torch_is_what_it_was_read_to_be():
    """Read name by name for torch 2.13: a version that brings others must be read again before the numbers change."""
    found = torch_objects()
    in_module = {name: sum(full.rpartition(".")[0] == name for full in found) for name in COUNTS}
    expected = COUNTS if RELEASE >= (2, 13) else COUNTS | {"torch.nn": 162, "torch.nn.functional": 131}
    assert in_module == expected
    assert len(found) == sum(expected.values())


COUNTS = {
    "torch": 271,
    "torch.cuda": 1,
    "torch.nn": 164,
    "torch.nn.Embedding": 1,
    "torch.nn.EmbeddingBag": 1,
    "torch.nn.functional": 132,
    "torch.nn.init": 26,
    "torch.nn.utils": 10,
    "torch.nn.utils.parametrizations": 3,
    "torch.nn.utils.rnn": 6,
    "torch.optim": 16,
    "torch.optim.lr_scheduler": 16,
    "torch.optim.swa_utils": 6,
    "torch.utils.data": 18,
}


def test_nothing_listed_has_a_name_that_warns():
    """What loads, writes or executes says so in its name, with these exceptions that were read."""
    harmless = {"torch.from_numpy", "torch.nn.Embedding.from_pretrained", "torch.nn.EmbeddingBag.from_pretrained"}
    harmless |= {"torch.nn.utils.vector_to_parameters", "torch.utils.data.DataLoader", "torch.nn.ParameterList"}
    words = names("load save open file exec eval compile script import hook apply call run_ read write url http spawn")
    words += names("fork process jit export from_ Dict")
    for name in torch_objects().keys() - harmless - {"torch.nn.ModuleDict"}:
        assert not any(word in name.rpartition(".")[2] for word in words), name


def test_only_classes_functions_and_constants_are_listed():
    constant = (torch.dtype, torch.memory_format, torch.layout, float, str, datetime.timezone)
    for name, value in {**torch_objects(), **standard_objects(), **amp_recipes_objects()}.items():
        assert inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, constant), name


def test_every_listed_name_is_found_as_python_finds_it(trust):
    for name, value in {**torch_objects(), **standard_objects(), **amp_recipes_objects()}.items():
        found = trust.locate(name)
        assert key_of(found) == key_of(value) == key_of(found_by_python(name)) or found == value != value, name


def test_all_layers_losses_optimizers_and_schedulers_are_there(trust):
    for name in set(torch.nn.modules.__all__) - {"DataParallel", "ParameterDict", "Module", "factory_kwargs"}:
        assert inspect.isclass(trust.locate(f"torch.nn.{name}")), name
    for name in set(torch.optim.__all__) - {"swap_in_optimizer_params_and_state", "lr_scheduler", "swa_utils"}:
        assert inspect.isclass(trust.locate(f"torch.optim.{name}")), name
    for name in torch.optim.lr_scheduler.__all__:
        assert inspect.isclass(trust.locate(f"torch.optim.lr_scheduler.{name}")), name
    for name in names("float32 float16 bfloat16 int64 bool hann_window hamming_window tensor zeros manual_seed relu"):
        trust.locate(f"torch.{name}")


def test_a_listed_object_may_be_named_where_it_lives(trust, subtests):
    for name in names(
        """
        torch.nn.modules.linear.Linear torch.nn.modules.loss.CrossEntropyLoss torch.nn.modules.conv.Conv2d
        torch.utils.data.dataloader.DataLoader torch.utils.data.sampler.RandomSampler torch.nn.parameter.Parameter
        amp_recipes.checkpoint.epoch_counter.EpochCounter amp_recipes.data.samplers.EpochShuffle
        amp_recipes.Stage.TRAIN amp_recipes.loggers.JsonlLogger amp_recipes.config.seed_everything builtins.max
        """
    ):
        with subtests.test(name):
            assert trust.locate(name) is pydoc.locate(name)


def test_what_of_amp_recipes_loads_writes_or_runs_is_refused(trust):
    wanted = names(
        """
        amp_recipes.load_hparams amp_recipes.parse_arguments amp_recipes.create_experiment_directory
        amp_recipes.commands.cli.main amp_recipes.commands.cli amp_recipes.commands.export
        amp_recipes.commands.export.export amp_recipes.commands.verify_resume
        amp_recipes.config.load_hparams amp_recipes.config.hparams.load_hparams amp_recipes.config.hparams.os
        amp_recipes.config.trust.trust.Trust amp_recipes.config.trust.trust amp_recipes.Brain.fit
        amp_recipes.Checkpointer.save_checkpoint amp_recipes.Checkpointer.delete_all
        amp_recipes.checkpoint.load_weights amp_recipes.brain.os amp_recipes.brain.torch amp_recipes.config.experiment
        amp_recipes.data.workers amp_recipes.files.folder_lock amp_recipes.AMPConfig.mro
        amp_recipes.checkpoint.checkpointer.os amp_recipes.checkpoint.checkpointer.partial
        """
    )
    assert not not_refused(trust, wanted)


def test_names_are_compared_exactly_and_private_ones_refused(trust):
    wanted = [
        "torch.nn.Lin\u0435ar",  # a Cyrillic e
        "torch.nn.\uff2cinear",
        "\uff4dath.sqrt",
        "torch\u200b.nn.Linear",
        "torch.nn.\ufb02atten",
        "torch.nn.Linear\n",
        " torch.nn.Linear",
        "torch.nn.Linear()",
        "",
        "a" * 501,
        ".".join(["a"] * 251),
    ]
    wanted += names(
        """
        torch..nn .torch torch. torch/nn torch.nn:Linear torch.nn.Linear[0] torch.__init__ torch._C
        torch.nn.Linear.__init__ torch.nn.Linear.__init__.__globals__ my_data.Model.__subclasses__
        my_data.numbers.__globals__ my_data.__builtins__ my_data.__dict__ __builtin__.eval _io.open
        _posixsubprocess.fork_exec my_data.__main__
        """
    )
    assert not not_refused(trust, wanted)


def test_a_lookalike_is_told_by_its_character(trust):
    with pytest.raises(NotFound, match=r"\(CYRILLIC SMALL LETTER IE\), which is not ASCII"):
        trust.locate("torch.nn.Lin\u0435ar")


@pytest.fixture
def canary(tmp_path):
    """Python text that makes a file when it runs, and whether it has run."""
    path = tmp_path / "canary"
    return f"open({str(path)!r}, 'w').close()\nthing = 1\n", path.exists


@pytest.mark.parametrize("name", names("evil evil.thing evil_package evil_package.thing evil_package.below.thing"))
def test_a_module_outside_the_recipe_is_not_imported(recipe, tmp_path, monkeypatch, canary, name):
    text, has_run = canary
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "evil_package").mkdir(parents=True)
    for file in ("evil.py", "evil_package/__init__.py", "evil_package/below.py"):
        (elsewhere / file).write_text(text)
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(NotTrusted, match=r'trust=\("evil'):
        Trust(recipe_folders=[recipe]).locate(name)
    with pytest.raises(NotTrusted):
        Trust(["evil_other"], [recipe]).module(name)
    assert not has_run()
    Trust([name.partition(".")[0]], [recipe]).locate(name.partition(".")[0])
    assert has_run()


@pytest.mark.parametrize("link", ["linked.py", "linked_folder", "my_package/linked.py"])
def test_a_symlink_out_of_the_recipe_is_not_followed(recipe, tmp_path, canary, link):
    text, has_run = canary
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "linked_folder").mkdir(parents=True)
    (elsewhere / "linked.py").write_text(text)
    (elsewhere / "linked_folder" / "__init__.py").write_text(text)
    (recipe / "my_package").mkdir()
    (recipe / "my_package" / "__init__.py").write_text("linked = 3\n")  # the file would come before it
    (recipe / link).symlink_to(elsewhere / link.rpartition("/")[2])
    with pytest.raises(NotTrusted):
        Trust(recipe_folders=[recipe]).locate(link.removesuffix(".py").replace("/", ".") + ".thing")
    with pytest.raises(NotTrusted):
        Trust(recipe_folders=[recipe]).locate(link.removesuffix(".py").replace("/", "."))
    assert not has_run()


def test_a_recipe_folder_that_is_a_symlink_itself_is_the_recipes(recipe, tmp_path):
    (tmp_path / "link").symlink_to(recipe)
    assert Trust(recipe_folders=[tmp_path / "link"]).locate("my_data.SIZES") == (1, 2, 3)


def test_a_builtin_is_not_taken_for_a_file_of_its_name(recipe, tmp_path, monkeypatch, canary):
    text, has_run = canary
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "max.py").write_text(text)
    with pytest.raises(NotTrusted):
        Trust(recipe_folders=[recipe]).locate("max")
    assert not has_run()


def test_regular_packages_of_a_recipe_are_the_recipes(recipe, trust):
    (recipe / "my_package" / "deep").mkdir(parents=True)
    (recipe / "my_package" / "__init__.py").write_text("from my_package.deep.leaf import Leaf\n")
    (recipe / "my_package" / "deep" / "__init__.py").touch()
    (recipe / "my_package" / "deep" / "leaf.py").write_text("class Leaf: pass\n")
    (recipe / "my_package" / "other.py").write_text("other = 2\n")
    for name in ("my_package.Leaf", "my_package.deep.leaf.Leaf", "my_package.other.other"):
        assert trust.locate(name) is pydoc.locate(name)
    assert trust.module("my_package.deep.leaf").__name__ == "my_package.deep.leaf"


@pytest.mark.parametrize("regular", ["", "results/run1", "results/run1/deep", "results/run1 results/run1/deep"])
@pytest.mark.parametrize("name", ["results.run1.deep.evil.thing", "results.run1.deep.evil", "results.run1.evil.thing"])
def test_what_lies_below_the_recipe_in_a_plain_folder_is_not_imported(recipe, trust, canary, regular, name):
    text, has_run = canary
    (recipe / "results" / "run1" / "deep").mkdir(parents=True)
    for folder in regular.split():
        (recipe / folder / "__init__.py").write_text(text)
    for file in ("run1/evil.py", "run1/deep/evil.py"):
        (recipe / "results" / file).write_text(text)
    words = r"results has no __init__\.py: add one, or trust it\. To allow it: trust=\(\"results\",\)"
    with pytest.raises(NotTrusted, match=words):
        trust.locate(name)
    with pytest.raises(NotTrusted):
        trust.module(name.removesuffix(".thing"))
    assert not has_run()
    assert Trust(["results"], [recipe]).locate(name) and has_run()


def test_a_file_on_pythons_path_below_the_recipe_needs_packages_above_it(recipe, trust, canary, monkeypatch):
    text, has_run = canary
    (recipe / "results" / "run1").mkdir(parents=True)
    (recipe / "results" / "run1" / "evil.py").write_text(text)
    monkeypatch.syspath_prepend(recipe / "results" / "run1")
    with pytest.raises(NotTrusted, match="results has no __init__"):
        trust.locate("evil.thing")
    (recipe / "results" / "__init__.py").touch()
    with pytest.raises(NotTrusted, match=f"results{os.sep}run1 has no __init__"):
        Trust(recipe_folders=[recipe]).locate("evil.thing")
    assert not has_run()


@pytest.mark.parametrize(
    ("link", "to"),
    [
        ("linked.py", "results/evil.py"),
        ("linked", "results"),
        ("my_package/linked.py", "results/evil.py"),
        ("my_package/linked", "results"),
        ("results/__init__.py", "my_package/__init__.py"),
    ],
)
def test_a_symlink_into_a_plain_folder_below_the_recipe_is_not_followed(recipe, trust, canary, link, to):
    text, has_run = canary
    (recipe / "results").mkdir()
    (recipe / "results" / "evil.py").write_text(text)
    (recipe / "my_package").mkdir()
    (recipe / "my_package" / "__init__.py").touch()
    (recipe / link).symlink_to(recipe / to)
    name = link.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for wanted in (f"{name}.evil.thing", f"{name}.thing", name):
        if wanted != "results":  # whose code would be that of my_package
            with pytest.raises((NotTrusted, NotFound)):
                trust.locate(wanted)
    assert not has_run()


def test_the_recipes_folder_may_be_a_package_without_init_file(recipe, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # as with `python -m recipe.train`
    assert Trust(recipe_folders=[recipe]).locate("recipe.my_data.SIZES") == (1, 2, 3)


def test_what_is_built_into_python_is_no_file_of_the_recipe(trust, recipe):
    (recipe / "built-in").touch()  # what Python gives as the origin of such modules
    wanted = names("exec posix.system sys.exit builtins.eval my_data.system my_data.SIZES.count")
    assert not not_refused(trust, wanted, NotTrusted)


def test_a_module_of_the_recipe_may_have_the_name_of_one_of_pythons(trust, recipe):
    assert "sndhdr" not in sys.modules
    (recipe / "sndhdr.py").write_text("from os import system\nclass Own: pass\n")
    assert trust.locate("sndhdr.Own").__module__ == "sndhdr"
    with pytest.raises(NotTrusted):
        trust.locate("sndhdr.system")


def test_an_installed_package_inside_the_recipe_folder_is_not_the_recipes(recipe, monkeypatch, canary):
    text, has_run = canary
    site = recipe / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "evil.py").write_text(text)
    monkeypatch.syspath_prepend(site)
    with pytest.raises(NotTrusted):
        Trust(recipe_folders=[recipe]).locate("evil.thing")
    with pytest.raises(NotTrusted):
        Trust(recipe_folders=[site]).locate("evil.thing")
    with pytest.raises(NotTrusted):  # as with `python -m pytest`, whose script lies in there
        Trust(recipe_folders=[os.path.dirname(pytest.__file__)]).module("pytest")
    assert not has_run()


def test_amp_recipes_and_torch_keep_their_lists_where_they_lie_in_the_recipe_folder():
    root = os.path.dirname(os.path.dirname(inspect.getfile(Trust)))
    trust = Trust(recipe_folders=[os.path.dirname(root), os.path.dirname(torch.__file__)])
    for name in ("amp_recipes.load_hparams", "amp_recipes.commands.cli.main", "torch.load", "torch.hub.load"):
        with pytest.raises(NotTrusted):
            trust.locate(name)
    assert trust.locate("amp_recipes.EpochCounter")


def test_a_module_that_puts_another_in_its_place_is_refused(recipe, trust):
    (recipe / "changeling.py").write_text("import os, sys\nsys.modules[__name__] = os\n")
    (recipe / "no_module.py").write_text("import sys\nsys.modules[__name__] = sys.exit\n")
    for name in ("changeling.system", "changeling", "no_module", "no_module.x"):
        with pytest.raises(NotTrusted):
            trust.locate(name)


def test_the_script_itself_may_be_named_where_it_lies_in_the_recipe(recipe, trust, monkeypatch):
    script = types.ModuleType("__main__")
    script.__file__ = str(recipe / "train.py")
    exec("import os\nclass Network: pass\n", script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert trust.locate("__main__.Network") is script.Network
    for name in ("__main__.os", "__main__.os.system"):
        with pytest.raises(NotTrusted):
            trust.locate(name)
    script.__file__ = "/elsewhere/train.py"
    with pytest.raises(NotTrusted):
        Trust(recipe_folders=[recipe]).locate("__main__.Network")


def test_an_import_that_fails_is_told_as_such(recipe, trust):
    (recipe / "needs.py").write_text("import no_such_package\n")
    (recipe / "fails.py").write_text("1 / 0\n")
    (recipe / "exits.py").write_text("import sys\nsys.exit('bye')\n")
    for name, text in [
        ("needs", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("fails", "ZeroDivisionError: division by zero"),
        ("exits", "SystemExit: bye"),
    ]:
        with pytest.raises(NotFound, match=f"the module {name} cannot be imported: {text}"):
            trust.locate(f"{name}.thing")


NEAREST = [
    ("torch.nn.Liner", "torch.nn.Linear"),
    ("torch.nn.Relu", "torch.nn.ReLU"),
    ("torch.nn.relu", "torch.nn.ReLU"),
    ("torch.AdamW", "torch.optim.AdamW"),
    ("torch.optm.Adam", "torch.optim"),
    ("torch.optim.lr_schedulers.StepLR", "torch.optim.lr_scheduler"),
    ("torch.optim.lr_scheduler.CosineAnealingLR", "torch.optim.lr_scheduler.CosineAnnealingLR"),
    ("Linear", "torch.nn.Linear"),
    ("troch.nn.Linear", "torch.nn.Linear"),
    ("amp_recipes.EpochConter", "amp_recipes.EpochCounter"),
    ("amp_recipe.EpochCountr", "amp_recipes.EpochCounter"),
    ("troch.nn.ReLU", "torch.nn.ReLU"),
    ("troch.nn.relu", "torch.nn.ReLU"),
    ("troch.relu", "torch.relu"),
    ("troch.nn.functional.relu", "torch.nn.functional.relu"),
    ("tensorch.optim.Adamw", "torch.optim.AdamW"),
    ("ReLU", "torch.nn.ReLU"),
    ("oprator.mul", "operator.mul"),
    ("nn.Linear", "torch.nn.Linear"),
    ("math.sqr", "math.sqrt"),
    ("my_data.Modell", "my_data.Model"),
    ("my_dta.Modl", "my_data"),
    ("my_data.Model.smal", "my_data.Model.small"),
    ("my_dta.Model", "my_data.Model"),
]


def test_the_nearest_name_is_told(recipe, subtests):
    for name, nearest in NEAREST:
        trust = Trust(recipe_folders=[recipe])  # the suggestions of each are limited
        trust.locate("my_data.SIZES")
        with subtests.test(name), pytest.raises(NotFound, match=f"Did you mean {nearest}\\?"):
            trust.locate(name)


def test_a_package_is_trusted_by_name_with_all_below_it(recipe):
    trust = Trust(["sklearn"], [recipe])
    assert trust.locate("sklearn.svm.SVC") is pydoc.locate("sklearn.svm.SVC")
    for name in ("sklearn.svm.SVC.__init__", "sklearn.utils.warnings", "sklearn.os", "sklearn.base.np.load"):
        with pytest.raises((NotTrusted, NotFound)):
            trust.locate(name)
    assert Trust(["numpy"]).locate("numpy.sin") is np.sin
    assert Trust(["scipy"]).locate("scipy.special.expit")  # a ufunc, whose class is numpy's
    for name in ("os.system", "eval", "torch.load", "torch.hub.load", "torch.nn.Module.apply", "str.format"):
        assert key_of(Trust([name]).locate(name)) == key_of(pydoc.locate(name))
        with pytest.raises(NotTrusted):
            Trust([name]).locate("os.popen")


def test_a_single_object_or_module_is_trusted_without_the_rest():
    assert Trust(["sklearn.svm.SVC"]).locate("sklearn.svm.SVC").__name__ == "SVC"
    with pytest.raises(NotTrusted):
        Trust(["sklearn.svm.SVC"]).locate("sklearn.svm.SVR")
    assert Trust(["sklearn.svm"]).locate("sklearn.svm.SVR")
    with pytest.raises(NotTrusted):
        Trust(["sklearn.svm"]).locate("sklearn.linear_model.Ridge")
    with pytest.raises(NotTrusted):
        Trust(["sklearn"]).locate("scipy.special.expit")
    assert Trust(["os"]).locate("os.system") is os.system  # whose home is posix
    with pytest.raises(NotTrusted):
        Trust(["os"]).locate("os.sys.modules")


def test_a_re_export_of_a_trusted_package_names_its_home(recipe):
    (recipe / "my_shim").mkdir()
    (recipe / "my_shim" / "__init__.py").write_text("from sklearn.svm import SVC\nfrom os import system\n")
    trust = Trust(["my_shim"])  # trusted by name, not as the recipe's
    with pytest.raises(NotTrusted, match=r'it is sklearn\.svm\._classes\.SVC\. To allow it: trust=\("sklearn",\)'):
        trust.locate("my_shim.SVC")
    with pytest.raises(NotTrusted, match=r'trust=\("posix\.system",\)'):
        trust.locate("my_shim.system")
    assert Trust(["my_shim", "sklearn"]).locate("my_shim.SVC")


def test_what_the_error_says_to_trust_is_enough(subtests):
    none = re.compile(r"__|distutils|\.(sys|os|genericpath)$|^(this|antigravity|builtins)$")
    more = names("os.environ.get os.environ torch.hub.load torch.onnx.export scipy.special.expit")
    for name in [name for name in STANDARD_REFUSED if not none.search(name)] + more:
        with subtests.test(name):
            if pydoc.locate(name) is None:
                continue  # not in this version
            with pytest.raises(NotTrusted) as refused:
                Trust().locate(name)
            assert Trust([advice_in(refused.value)]).locate(name) == pydoc.locate(name)


def advice_in(error: Exception) -> str:
    """What the message says to trust; empty if it says nothing."""
    return str(error).partition('trust=("')[2].partition('"')[0]


def test_advice_on_an_attribute(recipe, trust, subtests):
    for key, attribute, advice in [
        ("module", "frame", "my_data.frame"),
        ("module", "system", "posix.system"),
        ("generator", "gi_frame", ""),
        ("model", "os", ""),
        ("tensor", "numpy", ""),
        ("item", "secret", "posix.system"),
    ]:
        with subtests.test(f"{key}.{attribute}"):
            owner = OWNERS[key](trust.module("my_data"))
            with pytest.raises(NotTrusted) as refused:
                trust.attribute(owner, attribute)
            assert advice_in(refused.value) == advice
            if advice:
                assert Trust([advice], [recipe]).attribute(owner, attribute)


def test_no_advice_where_none_would_help(subtests):
    for name in ("builtins", "amp_recipes.config.trust.trust.nothing", "os.nothing", "torch.hub.nothing"):
        with subtests.test(name):
            error = refusal_of(Trust(), name)
            assert error is not None and advice_in(error) == ""


def test_a_refusal_does_not_run_an_objects_code_to_find_its_advice(recipe, trust):
    (recipe / "properties.py").write_text(
        "import types\n"
        "ran = []\n"
        "class Holder:\n"
        "    value = property(lambda self: ran.append(1))\n"
        "Holder.__module__ = 'elsewhere'\n"
        "held = Holder()\n"
    )
    with pytest.raises(NotTrusted):
        trust.locate("properties.held.value.x")
    with pytest.raises(NotTrusted):
        trust.locate("properties.held.value")
    assert sys.modules["properties"].ran == []


def test_many_wrong_names_take_little_work(subtests):
    for name in ("torch.nn.Linaer{}", "torhc.X{}", "nosuchmodule{}.Linear", "os.system{}", "math.x{}"):
        with subtests.test(name), at_most(calls=1_200_000):
            trust = Trust()
            found = [str(refusal_of(trust, name.format(number))) for number in range(300)]
            assert all(found) and "None" not in found
            assert sum("Did you mean" in text for text in found) <= 20


def test_a_time_zone_and_a_module_of_pure_functions(trust):
    import math

    assert trust.locate("datetime.timezone.utc") is datetime.timezone.utc
    assert trust.module("math") is math
    assert trust.attribute(math, "sqrt") is math.sqrt
    for name in ("math.factorial", "math.prod", "datetime.timezone.min"):
        with pytest.raises(NotTrusted):
            trust.locate(name)
    with pytest.raises(NotTrusted):
        trust.attribute(math, "factorial")


def test_folders_to_include_from_are_kept_apart(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    trust = Trust(["sklearn", "./shared", "..", str(tmp_path), "./link"])
    shared = os.path.realpath(tmp_path / "shared")
    assert trust.folders == (shared, os.path.dirname(os.path.realpath(tmp_path)), os.path.realpath(tmp_path), shared)


def test_wrong_entries_are_refused(subtests):
    for packages in ("sklearn", ["os system"], [""], [3], ["a..b"], ["./missing"], [None], 3, ["_x"]):
        with subtests.test(repr(packages)), pytest.raises(ConfigError):
            Trust(packages)


OWNERS = {
    "model": lambda data: data.Model(),
    "item": lambda data: data.Item(),
    "tensor": lambda data: torch.ones(2, 2, requires_grad=True) * 2,
    "linear": lambda data: torch.nn.Linear(2, 2),
    "optimizer": lambda data: torch.optim.SGD([torch.zeros(1)], lr=0.1),
    "loader": lambda data: torch.utils.data.DataLoader([1, 2]),
    "partial": lambda data: data.make_net,
    "evil_partial": lambda data: data.run,
    "path": lambda data: data.ROOT,
    "text": lambda data: "text",
    "mapping": lambda data: {"x": 1},
    "generator": lambda data: data.numbers(),
    "frame": lambda data: sys._getframe(),
    "function": lambda data: data.cached,
    "class": lambda data: data.Model,
    "module": lambda data: data,
    "os": lambda data: os,
    "array": lambda data: np.ones(3),
    "random": lambda data: __import__("random").Random(1),
}


READABLE = names(
    """
    model.size model.layer model.item model.training model.small class.size class.small item.x linear.weight
    linear.in_features optimizer.param_groups optimizer.defaults loader.dataset loader.sampler loader.batch_size
    partial.args partial.keywords partial.func path.name path.parent tensor.shape tensor.dtype tensor.device tensor.T
    array.shape array.T array.dtype module.SIZES module.Model random.uniform
    """
)
UNREADABLE = names(
    """
    model.apply model.os model.shell model.load_file model.inner model.secret model.register_forward_hook model.to
    model.__class__ model._modules model.load_state_dict item.secret item.os linear.apply linear.compile
    optimizer.register_step_pre_hook optimizer.step optimizer.load_state_dict loader.multiprocessing partial.__call__
    evil_partial.func evil_partial.args path.unlink path.write_text path.open text.format text.join mapping.get
    mapping.values mapping.__class__ generator.gi_frame generator.gi_code generator.send frame.f_builtins
    frame.f_globals frame.f_back function.cache_clear function.cache_info class.mro class.apply class.os class.shell
    class.secret module.os module.system module.run module.frame module.nn module.dynamic os.system os.path os.environ
    array.tofile array.dump array.ctypes.x tensor.numpy tensor.apply_ tensor.map_ tensor.grad_fn tensor.register_hook
    random.getstate random.sample item.x.y
    """
)


def test_a_reference_reads_data_and_what_may_be_named(trust, subtests):
    for attribute in READABLE:
        key, _, name = attribute.partition(".")
        owner = OWNERS[key](trust.module("my_data"))
        with subtests.test(attribute):
            assert type(trust.attribute(owner, name)) is type(getattr(owner, name))


def test_a_reference_does_not_lead_out(trust, subtests):
    for attribute in UNREADABLE:
        key, _, name = attribute.partition(".")
        with subtests.test(attribute), pytest.raises((NotTrusted, NotFound)):
            trust.attribute(OWNERS[key](trust.module("my_data")), name)


def test_containers_that_hold_what_is_refused_are_refused(trust):
    item = trust.locate("my_data.Item")(table={"run": [os.system]})
    with pytest.raises(NotTrusted, match=r"posix\.system"):
        trust.attribute(item, "table")
    loop: list = [1]
    loop.append(loop)
    item.table = loop
    assert trust.attribute(item, "table") is loop
    item.table = types.SimpleNamespace(x=1, run=os.system)
    assert trust.attribute(trust.attribute(item, "table"), "x") == 1
    with pytest.raises(NotTrusted):
        trust.attribute(trust.attribute(item, "table"), "run")


def test_a_missing_attribute_names_the_nearest(trust):
    with pytest.raises(NotFound, match=r"a Linear has no attribute 'weigth'\. Did you mean weight\?"):
        trust.attribute(torch.nn.Linear(2, 2), "weigth")


def test_modules_are_what_their_name_says(trust):
    assert trust.module("torch.nn.functional") is torch.nn.functional
    assert trust.module("my_data").__name__ == "my_data"
    for name in ("os", "sys", "builtins", "math.sqrt", "torch.nn.Linear", "torch.hub", "my_data.os", "my_data.Model"):
        with pytest.raises((NotTrusted, NotFound)):
            trust.module(name)


def test_naming_does_not_import_what_is_refused(trust):
    before = set(sys.modules)
    for name in (*STANDARD_REFUSED, *DANGEROUS_TORCH, "distutils", "pip", "idlelib.run", "torch.onnx", "torch.testing"):
        with pytest.raises((NotTrusted, NotFound)):
            trust.locate(name)
    assert not {name for name in set(sys.modules) - before if not name.startswith("my_")}


@pytest.mark.extended  # a fresh interpreter: in this one others have imported it
def test_what_torch_exchanges_when_it_imports_dynamo_may_be_named_before_and_after():
    code = (
        "import sys, torch\n"
        "from amp_recipes.config.trust.trust import Trust\n"
        "before = Trust().locate('torch.manual_seed')\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo\n"
        "assert Trust().locate('torch.manual_seed') is torch.manual_seed is not before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
