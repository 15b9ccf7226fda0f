"""Hostile YAMLs and overrides: what somebody would try who wants a YAML to run, write or read something.

Each payload tries to create a file in the canary folder (or to read what it must not). `LIVE` says which ones do it
with plain HyperPyYAML, so that the corpus is known to have teeth: `test_hostile_yaml.py` runs them there.
`@CANARY@` stands for the file to create, `@CONFIGS@` for the folder of the YAML, `@OUTSIDE@` for a folder that the
recipe does not own but that is on `sys.path`, `@RECIPE@` for the recipe's folder.
"""

from __future__ import annotations

import base64
import itertools
import os
import pickle
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOUCH = "touch @CANARY@"
WRITE = "open('@CANARY@', 'w').close()"


@dataclass(frozen=True)
class Payload:
    """One attack. text: the YAML; files: others beside it; links: symbolic links beside it, to what they point at.

    overrides, arguments: what is given in the script, or on the command line.
    plain: what the keys must hold if the loader takes the payload for the harmless text that it then is.
    live: whether plain HyperPyYAML falls for it.
    built: whether only the load can know, since an object must be built before its attribute can be looked at.
    """

    name: str
    text: str
    live: bool = True
    overrides: Any = None
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    plain: dict[str, Any] | None = None
    trust: tuple[str, ...] = ()
    built: bool = False


def evil(expressions: dict[str, str], live: bool = True, built: bool = False) -> list[Payload]:
    """Payloads that are one value, or, where they begin with a line break, keys of their own."""
    # In a flow list YAML takes a comma or bracket right behind a tag for a part of it.
    spaced = {name: re.sub(r"(!(?:name|module):[\w.]+)(?=[],}])", r"\1 ", text) for name, text in expressions.items()}
    return [
        Payload(n, f"lr: 0.1{t}\n" if t[0] == "\n" else f"lr: 0.1\nevil: {t}\n", live, built=built)
        for n, t in spaced.items()
    ]


# One call runs a program, code or a file.
CALLS = evil(
    {
        "os_system": f"!apply:os.system ['{TOUCH}']",
        "posix_system": f"!apply:posix.system ['{TOUCH}']",
        "applyref_list": f"!applyref:os.system ['{TOUCH}']",
        "applyref_mapping": f"!applyref:os.system {{command: '{TOUCH}'}}",
        "applyref_args_kwargs": f"!applyref:os.system {{_args: ['{TOUCH}'], _kwargs: {{}}}}",
        "os_popen": f"\nfile: !apply:os.popen ['{TOUCH}; echo']\nwait: !apply:os.wait",
        "os_spawn": "!apply:os.spawnvp [0, touch, [touch, '@CANARY@']]",
        "os_posix_spawn": "\np: !apply:os.posix_spawn [/bin/touch, [touch, '@CANARY@'], {}]\nw: !apply:os.wait",
        "os_exec": "!apply:os.execvp [touch, [touch, '@CANARY@']]",
        "subprocess_popen": "\nevil: !new:subprocess.Popen\n  args: [touch, '@CANARY@']\nwait: !apply:os.wait",
        "subprocess_run": "!apply:subprocess.run [[touch, '@CANARY@']]",
        "subprocess_getoutput": f"!apply:subprocess.getoutput ['{TOUCH}']",
        "exec": f'!apply:exec ["{WRITE}"]',
        "builtins_exec": f'!apply:builtins.exec ["{WRITE}"]',
        "builtins_eval": f'!apply:builtins.eval ["{WRITE}"]',
        "import_builtin": "!apply:builtins.__import__ [hostile_side_effect]",
        "pty_spawn": "!apply:pty.spawn [[touch, '@CANARY@']]",
        "timeit": f'!apply:timeit.timeit {{stmt: "{WRITE}", number: 1}}',
        "cprofile": f'!apply:cProfile.run {{statement: "{WRITE}"}}',
        "trace": f'!apply:trace.Trace.run [!new:trace.Trace [0, 0], "{WRITE}"]',
        "interpreter": "!apply:code.InteractiveInterpreter.runsource "
        f'[!new:code.InteractiveInterpreter {{}}, "{WRITE}"]',
        "runpy": "!apply:runpy.run_path ['@OUTSIDE@/hostile_side_effect.py']",
        "import_module": "!apply:importlib.import_module [hostile_side_effect]",
        "pydoc_locate": "!apply:pydoc.locate [hostile_side_effect.x]",
        "resolve_name": "!apply:pkgutil.resolve_name ['hostile_side_effect:x']",
        "machinery_loader": "!apply:importlib.machinery.SourceFileLoader.load_module "
        "[!new:importlib.machinery.SourceFileLoader [hostile_x, '@OUTSIDE@/hostile_side_effect.py']]",
        "zipimport": "!apply:zipimport.zipimporter.load_module "
        "[!new:zipimport.zipimporter ['@OUTSIDE@/hostile.zip'], hostile_zipped]",
        "pickle_loads": "!apply:pickle.loads [!!binary '@PICKLE@']",
        "pickle_load": "!apply:pickle.load [!apply:open ['@OUTSIDE@/evil.pkl', rb]]",
        "joblib_load": "!apply:joblib.load ['@OUTSIDE@/evil.pkl']",
        "yaml_unsafe_load": f"!apply:yaml.unsafe_load [\"!!python/object/apply:os.system ['{TOUCH}']\"]",
        "hyperpyyaml_itself": f"!apply:hyperpyyaml.load_hyperpyyaml [\"x: !apply:os.system ['{TOUCH}']\"]",
        "logging_config": "!apply:logging.config.dictConfig "
        "[{version: 1, handlers: {h: {class: hostile_side_effect.thing}}}]",
        "thread": f"\nthread: !new:threading.Thread {{target: !name:os.system ['{TOUCH}']}}\n"
        "start: !apply:threading.Thread.start [!ref <thread>]\njoin: !apply:threading.Thread.join [!ref <thread>]",
        "atexit": f"!apply:atexit.register [!name:os.system, '{TOUCH}']",
        "forward_reference": "!apply:typing._eval_type "
        f'[!new:typing.ForwardRef ["{WRITE}"], !apply:builtins.globals {{}}, {{}}]',
    }
)
NOT_LIVE_CALLS = evil(
    {
        "builtins_compile": f'!apply:builtins.compile ["{WRITE}", x, exec]',
        "function_type": f'!new:types.FunctionType [!apply:builtins.compile ["{WRITE}", x, exec], {{}}]',
        "marshal_loads": "!apply:marshal.loads [!!binary '4wAAAAA=']",
        "ctypes_library": "!new:ctypes.CDLL ['@OUTSIDE@/evil.so']",
        "breakpoint": "!apply:breakpoint",
        "signal_handler": "!apply:signal.signal [14, !name:os.system]",
        "audit_hook": "!apply:sys.addaudithook [!name:builtins.exec]",
        "profile_hook": "!apply:sys.setprofile [!name:builtins.exec]",
        "input_waits_for_ever": "!apply:input",
        "exit": "!apply:sys.exit [3]",
        "hard_exit": "!apply:os._exit [0]",
        "kill": "!apply:os.kill [0, 0]",
        "environment": "!name:os.environ",
        "set_environment": "!apply:os.putenv [PATH, '@OUTSIDE@']",
        "change_directory": "!apply:os.chdir ['@OUTSIDE@']",
        "socket": "!apply:socket.create_connection [!tuple (127.0.0.1, 9)]",
        "url": "!apply:urllib.request.urlopen ['file:///etc/passwd']",
        "module_os": "!module:os",
        "module_torch_os": "!module:torch.os",
        "globals_of_the_loader": "!apply:builtins.globals {}",
        "type_three_arguments": "!new:type [X, !tuple (), {}]",
        "new_type_of": "!new:abc.ABCMeta [X, !tuple (), {}]",
        "enum_call": "!new:enum.Enum [X, 'a b']",
        "namedtuple": "!apply:collections.namedtuple [X, 'a b']",
        "str_format": "!apply:str.format ['{0.__class__.__mro__}', 1]",
        "str_format_walk": "!apply:str.format ['{0.__init__.__globals__[os].environ}', !new:recipe_parts.Holder {}]",
        "str_format_map": "!apply:str.format_map ['{x.__class__}', {x: 1}]",
        "builtins_format": "!apply:builtins.format [1, '1000000000d']",
        "formatter": "!apply:string.Formatter.vformat [!new:string.Formatter {}, '{0.__class__}', [1], {}]",
        "template": "!apply:string.Template.substitute [!new:string.Template ['$x'], {x: 1}]",
        "itemgetter": "!new:operator.itemgetter [system]",
        "gc_objects": "!apply:gc.get_objects",
        "frame": "!apply:sys._getframe",
        "inspect_getattr": "!apply:inspect.getattr_static [!module:os, system]",
        "vars_of_module": "!apply:vars [!module:os]",
    },
    live=False,
)

# What calls what it is given.
INDIRECT = evil(
    {
        "reduce": "!apply:functools.reduce [!name:builtins.open, ['@CANARY@', w]]",
        "map": f"!new:list [!new:map [!name:os.system, ['{TOUCH}']]]",
        "filter": f"!new:list [!new:filter [!name:os.system, ['{TOUCH}']]]",
        "starmap": f"!new:list [!new:itertools.starmap [!name:os.system, [['{TOUCH}']]]]",
        "iter_sentinel": f"!new:list [!apply:iter [!name:os.system ['{TOUCH}'], 0]]",
        "operator_call": f"!apply:operator.call [!name:os.system, '{TOUCH}']",
        "partial_class": f"!apply:operator.call [!new:functools.partial [!name:os.system, '{TOUCH}']]",
        "partial_call": f"!apply:functools.partial.__call__ [!name:os.system ['{TOUCH}']]",
        "attrgetter": f"!new:list [!new:map [!apply:operator.call "
        f"[!new:operator.attrgetter [system], !module:os], ['{TOUCH}']]]",
        "methodcaller": f"!apply:operator.call [!new:operator.methodcaller [system, '{TOUCH}'], !module:os]",
        "getattr": f"!new:list [!new:map [!apply:getattr [!module:os, system], ['{TOUCH}']]]",
        "builtins_getattr": f"!new:list [!new:map [!apply:builtins.getattr [!module:os, system], ['{TOUCH}']]]",
        "reference_to_a_module": f"\nm: !module:os\ns: !ref <m.system>\n"
        f"evil: !new:list [!new:map [!ref <s>, ['{TOUCH}']]]",
        "regular_expression": "!apply:re.sub [x, !name:os.makedirs ['@CANARY@', 448], x]",
        "defaultdict_factory": "\nd: !new:collections.defaultdict [!name:os.system ['touch @CANARY@']]\n"
        "evil: !apply:operator.getitem [!ref <d>, x]",
        "defaultdict_missing": "\nd: !new:collections.defaultdict [!name:os.system ['touch @CANARY@']]\n"
        "evil: !apply:collections.defaultdict.__missing__ [!ref <d>, x]",
        "property_descriptor": "!apply:property.__get__ [!new:property [!name:os.system], 'touch @CANARY@']",
        "method_type": f"!apply:operator.call [!new:types.MethodType [!name:os.system, '{TOUCH}']]",
        "static_method": f"!apply:staticmethod.__call__ [!new:staticmethod [!name:os.system], '{TOUCH}']",
        "singledispatch": f"!apply:operator.call [!apply:functools.singledispatch [!name:os.system], '{TOUCH}']",
        "context_run": f"!apply:contextvars.Context.run [!new:contextvars.Context [], !name:os.system, '{TOUCH}']",
        "exit_stack": f"\nstack: !new:contextlib.ExitStack []\n"
        f"push: !apply:contextlib.ExitStack.callback [!ref <stack>, !name:os.system, '{TOUCH}']\n"
        "evil: !apply:contextlib.ExitStack.close [!ref <stack>]",
        "finalizer": f"!new:weakref.finalize [!new:recipe_parts.Holder {{}}, !name:os.system, '{TOUCH}']",
        "print_to": "!apply:recipe_parts.call [!name:print {file: !apply:open ['@CANARY@', w]}]",
        "through_the_recipe": f"!apply:recipe_parts.call [!name:os.system, '{TOUCH}']",
        "hidden_key": f"\n__a: &a !apply:os.system ['{TOUCH}']\nb: 1",
        "nested_deep": f"[[{{a: [!apply:os.system ['{TOUCH}']]}}]]",
        "argument_of_a_trusted_class": f"!new:torch.nn.Linear [4, !apply:os.system ['{TOUCH}']]",
        "default_value": f"!apply:dict.setdefault [{{}}, a, !apply:os.system ['{TOUCH}']]",
        "json_hook": "!apply:json.loads {s: '{}', object_hook: !name:os.makedirs ['@CANARY@', 448]}",
    }
)
INDIRECT += evil(
    {
        "sorted_key": "!name:sorted {key: !name:os.system}",
        "max_key": "!name:max {key: !name:os.system}",
        "name_of_exec": "!name:builtins.exec",
        "name_partial_of_open": "!name:open ['@CANARY@', w]",
        "partialmethod": "!new:functools.partialmethod [!name:os.system]",
        "lru_cache": "!apply:functools.lru_cache [!name:os.system]",
        "cached_property": "!apply:functools.cached_property.__get__ "
        "[!new:functools.cached_property [!name:os.system], 1]",
        "deepcopy_memo": "!apply:copy.deepcopy [!name:os.system]",
    },
    live=False,
)

# What writes, or reads what it must not.
FILES = evil(
    {
        "open": "!apply:open ['@CANARY@', w]",
        "io_open": "!apply:io.open ['@CANARY@', w]",
        "os_open": "!apply:os.open ['@CANARY@', 66]",
        "codecs_open": "!apply:codecs.open ['@CANARY@', w]",
        "file_io": "!new:io.FileIO ['@CANARY@', w]",
        "gzip_open": "!apply:gzip.open ['@CANARY@', w]",
        "zip_file": "!new:zipfile.ZipFile ['@CANARY@', w]",
        "tar_file": "!new:tarfile.TarFile ['@CANARY@', w]",
        "path_touch": "!apply:pathlib.Path.touch [!new:pathlib.Path ['@CANARY@']]",
        "path_write_text": "!apply:pathlib.Path.write_text [!new:pathlib.Path ['@CANARY@'], x]",
        "path_mkdir": "!apply:pathlib.Path.mkdir [!new:pathlib.Path ['@CANARY@']]",
        "path_method_by_reference": "\np: !new:pathlib.Path ['@CANARY@']\nevil: !apply:operator.call [!ref <p.touch>]",
        "os_mkdir": "!apply:os.mkdir ['@CANARY@']",
        "os_makedirs": "!apply:os.makedirs ['@CANARY@/x']",
        "os_symlink": "!apply:os.symlink [/etc/passwd, '@CANARY@']",
        "os_rename": "!apply:os.rename ['@CONFIGS@/victim.txt', '@CANARY@']",
        "os_mkfifo": "!apply:os.mkfifo ['@CANARY@']",
        "shutil_copy": "!apply:shutil.copyfile [/etc/passwd, '@CANARY@']",
        "shutil_move": "!apply:shutil.move ['@CONFIGS@/victim.txt', '@CANARY@']",
        "temporary_file": "!apply:tempfile.mkstemp {dir: '@CANARIES@'}",
        "temporary_folder": "!apply:tempfile.mkdtemp {dir: '@CANARIES@'}",
        "logging_file_handler": "!new:logging.FileHandler ['@CANARY@']",
        "logging_basic_config": "!apply:logging.basicConfig {filename: '@CANARY@', force: true}",
        "sqlite": "!apply:sqlite3.connect ['@CANARY@']",
        "shelve": "!apply:shelve.open ['@CANARY@']",
        "compiled_file": "!apply:py_compile.compile {file: '@OUTSIDE@/hostile_side_effect.py', cfile: '@CANARY@'}",
        "numpy_save": "!apply:numpy.save ['@CANARY@', [1]]",
        "numpy_savetxt": "!apply:numpy.savetxt ['@CANARY@', [1]]",
        "numpy_memmap": "!new:numpy.memmap {filename: '@CANARY@', mode: w+, shape: 4}",
        "numpy_load_pickle": "!apply:numpy.load {file: '@OUTSIDE@/evil.pkl', allow_pickle: true}",
        "numpy_tofile": "!apply:numpy.ndarray.tofile [!apply:numpy.ones [2], '@CANARY@']",
        "numpy_through_tensor": "\nt: !apply:torch.ones [2]\na: !apply:torch.Tensor.numpy [!ref <t>]\n"
        "evil: !apply:operator.call [!ref <a.tofile>, '@CANARY@']",
    }
)
FILES += evil(
    {
        "numpy_load": "!apply:numpy.load ['@OUTSIDE@/evil.pkl']",
        "numpy_fromfile": "!apply:numpy.fromfile [/etc/passwd]",
        "path_read_text": "!apply:pathlib.Path.read_text [!new:pathlib.Path [/etc/passwd]]",
        "os_listdir": "!apply:os.listdir [/]",
        "os_remove": "!apply:os.remove ['@CONFIGS@/nothing.txt']",
        "shutil_rmtree": "!apply:shutil.rmtree ['@CONFIGS@/nothing']",
        "expand_user": "!apply:os.path.expanduser ['~']",
        "path_exists": "!apply:os.path.exists [/etc/passwd]",
        "path_home": "!apply:pathlib.Path.home {}",
        "path_glob": "!new:list [!apply:pathlib.Path.glob [!new:pathlib.Path [/], '*']]",
    },
    live=False,
)

# Modules outside the allow-list must not even be imported.
IMPORTS = evil(
    {
        "import_by_module": "!module:hostile_side_effect",
        "import_by_new": "!new:hostile_side_effect.Thing {}",
        "import_by_name": "!name:hostile_side_effect.thing",
        "import_by_apply": "!apply:hostile_side_effect.thing",
        "import_by_applyref": "!applyref:hostile_side_effect.thing",
        "import_of_package": "!name:hostile_package.nothing",
        "import_of_submodule": "!module:hostile_package.inner",
        "import_of_namespace": "!module:hostile_namespace.inner",
        "import_of_failing_name": "!new:hostile_side_effect.there.is.nothing {}",
        "import_of_linked_module": "!module:hostile_linked",
        "import_of_linked_package": "!name:hostile_linked_package.nothing",
        "import_of_module_below_trusted_name": "!module:collections.hostile_below",
    }
)
IMPORTS[-1] = Payload(IMPORTS[-1].name, IMPORTS[-1].text, live=False)
IMPORTS += evil({"import_of_private_module": "!module:_posixsubprocess", "browser": "!module:this"}, live=False)

TORCH = evil(
    {
        "torch_os": f"!apply:torch.os.system ['{TOUCH}']",
        "torch_functional_os": f"!apply:torch.functional.torch.os.system ['{TOUCH}']",
        "torch_load": "!apply:torch.load {f: '@OUTSIDE@/evil.pkl', weights_only: false}",
        "torch_serialization_load": "!apply:torch.serialization.load {f: '@OUTSIDE@/evil.pkl', weights_only: false}",
        "torch_save": "!apply:torch.save [1, '@CANARY@']",
        "torch_hub": "!apply:torch.hub.load {repo_or_dir: '@OUTSIDE@/hub', source: local, model: model}",
        "torch_hub_walk": "!apply:torch.nn.functional.torch.hub.load "
        "{repo_or_dir: '@OUTSIDE@/hub', source: local, model: model}",
        "torch_hub_download": "!apply:torch.hub.download_url_to_file ['file:///etc/passwd', '@CANARY@']",
        "torch_from_file": "!apply:torch.from_file {filename: '@CANARY@', shared: true, size: 10}",
        "torch_storage_from_file": "!apply:torch.UntypedStorage.from_file ['@CANARY@', true, 10]",
        "torch_collect_env": f"!apply:torch.utils.collect_env.run ['{TOUCH}']",
        "torch_collect_env_lambda": f"!apply:torch.utils.collect_env.run_and_read_all "
        f"[!name:torch.utils.collect_env.run, '{TOUCH}']",
        "torch_benchmark_timer": f"!apply:torch.utils.benchmark.Timer.timeit "
        f'[!new:torch.utils.benchmark.Timer ["{WRITE}"], 1]',
        "torch_reduce": "!apply:torch.nn.modules.module.functools.reduce [!name:open, ['@CANARY@', w]]",
        "torch_functional_importlib": "!apply:torch.nn.functional.importlib.import_module [hostile_side_effect]",
        "torch_loader_os": f"!apply:torch.utils.data.dataloader.os.system ['{TOUCH}']",
        "torch_optim_walk": f"!apply:torch.optim.swa_utils.torch.os.system ['{TOUCH}']",
        "torch_checkpoint": f"!apply:torch.utils.checkpoint.checkpoint [!name:os.system ['{TOUCH}']]",
        "torch_pytree": f"!apply:torch.utils._pytree.tree_map [!name:os.system, ['{TOUCH}']]",
        "torch_worker_init": "\nloader: !new:torch.utils.data.DataLoader\n  dataset: [1]\n"
        "  collate_fn: !name:os.makedirs ['@CANARY@', 448]\n"
        "evil: !new:list [!ref <loader>]",
        "torch_collate": "\nloader: !new:torch.utils.data.DataLoader\n  dataset: ['@CANARY@']\n  batch_size: null\n"
        "  collate_fn: !name:os.mkdir\nevil: !new:list [!ref <loader>]",
        "torch_lambda_lr": "\nmodel: !new:torch.nn.Linear [1, 1]\noptimizer: !new:torch.optim.SGD\n"
        "  params: [!ref <model.weight>]\n  lr: 0.1\n"
        "scheduler: !new:torch.optim.lr_scheduler.LambdaLR\n  optimizer: !ref <optimizer>\n"
        "  lr_lambda: !name:subprocess.call [[touch, '@CANARY@']]",
        "torch_module_apply": "\nmodel: !new:torch.nn.Linear [1, 1]\n"
        "evil: !apply:torch.nn.Module.apply [!ref <model>, !name:os.makedirs ['@CANARY@', 448]]",
        "torch_module_hook": "\nmodel: !new:torch.nn.Identity {}\n"
        "hook: !apply:torch.nn.Module.register_forward_pre_hook "
        "[!ref <model>, !name:recipe_parts.call_with_canary ]\n"
        "evil: !apply:torch.nn.Module.__call__ [!ref <model>, null]",
        "torch_tensor_apply": "!apply:torch.Tensor.apply_ [!apply:torch.ones [1], !name:os.makedirs ['@CANARY@', 448]]",
        "torch_jit_save": "!apply:torch.jit.save [!apply:torch.jit.script [!new:torch.nn.Identity {}], '@CANARY@']",
        "torch_builtins": f'!apply:torch.nn.init.torch.builtins.exec ["{WRITE}"]',
        "torch_package": "!new:torch.package.PackageExporter ['@CANARY@']",
        "torch_data_pipe": "!apply:operator.call [!name:torch.utils.data.datapipes.utils.common.os.mkdir, '@CANARY@']",
        "torch_profiler": "!apply:torch.autograd.profiler.torch.os.mkdir ['@CANARY@']",
    }
)
TORCH += evil(
    {
        "torch_functional_dispatch": "!apply:torch.nn.functional.handle_torch_function [!name:torch.os.system, [], 1]",
        "torch_sys_modules": "!name:torch.sys.modules",
        "torch_load_library": "!apply:torch.ops.load_library ['@OUTSIDE@/evil.so']",
        "torch_classes_load_library": "!apply:torch.classes.load_library ['@OUTSIDE@/evil.so']",
        "torch_load_inline": "!apply:torch.utils.cpp_extension.load_inline {name: evil, cpp_sources: ['int x;']}",
        "torch_jit_load": "!apply:torch.jit.load ['@OUTSIDE@/evil.pkl']",
        "torch_jit_unit": "!new:torch.jit.CompilationUnit ['def f(x): return x']",
        "torch_jit_script": "!apply:torch.jit.script [!new:torch.nn.Identity {}]",
        "torch_compile": "!apply:torch.compile [!new:torch.nn.Identity {}]",
        "torch_fx": "!apply:torch.fx.symbolic_trace [!new:torch.nn.Identity {}]",
        "torch_fx_exec": "!name:torch.fx.graph_module._exec_with_source",
        "torch_fx_graph_module": "!new:torch.fx.GraphModule [!new:torch.nn.Identity {}, !new:torch.fx.Graph {}]",
        "torch_onnx": "!name:torch.onnx.export",
        "torch_export_load": "!apply:torch.export.load ['@OUTSIDE@/evil.pkl']",
        "torch_distributed": "!apply:torch.distributed.init_process_group [gloo]",
        "torch_rpc": "!name:torch.distributed.rpc.rpc_sync",
        "torch_spawn": "!apply:torch.multiprocessing.spawn {fn: !name:os.system}",
        "torch_process": "!new:torch.multiprocessing.Process {target: !name:os.system}",
        "torch_import_package": "!new:torch.package.PackageImporter ['@OUTSIDE@/hostile.zip']",
        "torch_model_zoo": "!name:torch.utils.model_zoo.load_url",
        "torch_summary_writer": "!new:torch.utils.tensorboard.SummaryWriter ['@CANARY@']",
        "torch_parametrize": "!apply:torch.nn.utils.parametrize.register_parametrization "
        "[!new:torch.nn.Linear [1, 1], weight, !name:os.system]",
        "torch_functional_call": "!name:torch.nn.utils.stateless.functional_call",
        "torch_library": "!new:torch.library.Library [evil, DEF]",
        "torch_private": "!name:torch._C._jit_flatten",
        "torch_tensor_method": "!name:torch.Tensor.numpy",
        "torch_storage": "!name:torch.Tensor.untyped_storage",
        "torch_module_load_state": "!name:torch.nn.Module.load_state_dict",
        "torch_module_to": "!apply:torch.nn.Module.register_module [!new:torch.nn.Identity {}, x, null]",
        "torch_hook_of_optimizer": "!name:torch.optim.Optimizer.register_step_pre_hook",
        "torch_global_hook": "!name:torch.nn.modules.module.register_module_forward_hook",
        "torch_nn_module": "!module:torch.hub",
        "torch_vmap": "!apply:torch.func.vmap [!name:os.system]",
        "torch_map_location": "!name:torch.utils.data.graph.pickle.loads",
        "torch_dynamo": "!module:torch._dynamo",
        "torch_testing": "!module:torch.testing._internal.common_utils",
        "torch_elastic": "!apply:torch.distributed.run.main [[--help]]",
        "torch_shared_memory": "!name:torch.multiprocessing.reductions.rebuild_storage_filename",
    },
    live=False,
)

# The framework's own functions that load, write or run must not be the way around.
OWN = [
    Payload(
        "load_hparams_with_trust",
        "evil: !apply:amp_recipes.load_hparams {path: '@CONFIGS@/inner.yaml', trust: [os]}\n",
        files={"inner.yaml": f"x: !apply:os.system ['{TOUCH}']\n"},
    ),
    Payload(
        "load_hparams_of_config",
        "evil: !apply:amp_recipes.config.load_hparams {path: '@CONFIGS@/inner.yaml', trust: [os]}\n",
        files={"inner.yaml": f"x: !apply:os.system ['{TOUCH}']\n"},
    ),
    Payload(
        "load_hparams_of_hparams",
        "evil: !apply:amp_recipes.config.hparams.load_hparams {path: '@CONFIGS@/inner.yaml', trust: [os]}\n",
        files={"inner.yaml": f"x: !apply:os.system ['{TOUCH}']\n"},
    ),
    *evil(
        {
            "own_os": f"!apply:amp_recipes.files.folder_lock.os.system ['{TOUCH}']",
            "own_torch": f"!apply:amp_recipes.brain.torch.os.system ['{TOUCH}']",
            "experiment_directory": "!apply:amp_recipes.create_experiment_directory {folder: '@CANARY@'}",
            "experiment_directory_home": "!apply:amp_recipes.config.experiment.create_experiment_directory "
            "['@CANARY@']",
        }
    ),
    *evil(
        {
            "own_cli": "!apply:amp_recipes.commands.cli.main [[--help]]",
            "own_export": "!name:amp_recipes.commands.export.export",
            "own_parse_arguments": "!apply:amp_recipes.parse_arguments [[x.yaml]]",
            "own_resume_check": "!module:amp_recipes.commands.verify_resume",
            "own_trust": "!new:amp_recipes.config.trust.trust.Trust [[os]]",
            "own_build": "!name:amp_recipes.config.trust.instantiate.build",
            "own_lock": "!name:amp_recipes.files.folder_lock.lock_folder",
            "own_wrapper_of_a_function": "!apply:amp_recipes.fwd_default_precision [!name:os.system]",
        },
        live=False,
    ),
]

# What the recipe's own modules have imported, or hold, is not the recipe's own.
REEXPORTS = evil(
    {
        "recipe_os": f"!apply:recipe_parts.os.system ['{TOUCH}']",
        "recipe_system": f"!apply:recipe_parts.system ['{TOUCH}']",
        "recipe_alias": f"!apply:recipe_parts.alias ['{TOUCH}']",
        "recipe_reduce": "!apply:recipe_parts.reduce [!name:open, ['@CANARY@', w]]",
        "recipe_partial": f"!apply:recipe_parts.call [!new:recipe_parts.partial [!name:os.system, '{TOUCH}']]",
        "recipe_subprocess": "!new:list [!new:map [!name:recipe_parts.subprocess.call, [[touch, '@CANARY@']]]]",
        "recipe_popen_class": "\nevil: !new:recipe_parts.Popen [[touch, '@CANARY@']]\nw: !apply:os.wait",
        "recipe_path": "!apply:recipe_parts.Path.touch [!new:recipe_parts.Path ['@CANARY@']]",
        "recipe_numpy": "!apply:recipe_parts.np.save ['@CANARY@', [1]]",
        "recipe_torch": "!apply:recipe_parts.torch.save [1, '@CANARY@']",
        "recipe_helper_os": f"!apply:recipe_parts.recipe_helper.os.system ['{TOUCH}']",
        "recipe_static": f"!apply:recipe_parts.Holder.run ['{TOUCH}']",
        "recipe_table": "!apply:recipe_parts.call "
        f"[!apply:operator.getitem [!name:recipe_parts.TABLE, run], '{TOUCH}']",
        "recipe_partial_instance": "!apply:recipe_parts.call [!name:recipe_parts.opener, '@CANARY@']",
        "recipe_bound_method": f"!apply:recipe_parts.bound ['{TOUCH}']",
        "recipe_cached": f"!apply:recipe_parts.call [!name:recipe_parts.cached, '{TOUCH}']",
        "recipe_inherited_apply": "!apply:recipe_parts.Child.apply "
        "[!new:recipe_parts.Child {}, !name:os.makedirs ['@CANARY@', 448]]",
        "recipe_globals": "!apply:recipe_parts.call "
        f"[!apply:recipe_parts.call.__globals__.__getitem__ [system], '{TOUCH}']",
        "recipe_builtins": "!apply:recipe_parts.call "
        f'[!apply:recipe_parts.call.__builtins__.__getitem__ [exec], "{WRITE}"]',
        "recipe_loader": "!apply:recipe_parts.__loader__.set_data ['@CANARY@', !!binary 'eA==']",
        "recipe_spec": "!apply:recipe_parts.__spec__.loader.set_data ['@CANARY@', !!binary 'eA==']",
        "recipe_class_of_globals": "!apply:recipe_parts.call "
        f"[!apply:recipe_parts.Holder.__init__.__globals__.__getitem__ [system], '{TOUCH}']",
    }
)
REEXPORTS += evil(
    {
        "recipe_module_reexport": "!module:recipe_parts.os",
        "recipe_table_whole": "!name:recipe_parts.TABLE",
        "recipe_list_of_functions": "!name:recipe_parts.FUNCTIONS",
        "recipe_dict": "!name:recipe_parts.__dict__",
        "recipe_main": "!module:__main__",
        "recipe_exception": "!name:recipe_parts.sys.exc_info",
        "recipe_environment": "!name:recipe_parts.ENVIRONMENT",
        "recipe_foreign_instance": "!name:recipe_parts.worker",
        "recipe_class_globals": "!name:recipe_parts.Holder.__dict__",
        "recipe_torch_nn": "!name:recipe_parts.nn.Module.apply",
    },
    live=False,
)

# From an object to what it knows.
WALKS = evil(
    {
        "walk_module_attribute": "\nh: !new:recipe_parts.Holder {}\nos: !ref <h.tools>\n"
        f"evil: !apply:recipe_parts.call [!ref <os.system>, '{TOUCH}']",
        "walk_function_attribute": "\nh: !new:recipe_parts.Holder {}\n"
        f"evil: !apply:recipe_parts.call [!ref <h.run>, '{TOUCH}']",
        "walk_path_method": "\nh: !new:recipe_parts.Holder {}\np: !ref <h.path>\nfolder: !apply:recipe_parts.call "
        "[!ref <p.joinpath>, '@CANARY@']\nevil: !apply:recipe_parts.call [!ref <folder.touch>]",
        "walk_globals": "\nh: !new:recipe_parts.Holder {}\ni: !ref <h.__init__>\ng: !ref <i.__globals__>\n"
        f"s: !apply:operator.getitem [!ref <g>, system]\nevil: !apply:recipe_parts.call [!ref <s>, '{TOUCH}']",
        "walk_class_subclasses": "\nx: !new:object {}\nc: !ref <x.__class__>\ns: !ref <c.__subclasses__>\n"
        f"l: !apply:recipe_parts.call [!ref <s>]\nevil: !apply:recipe_parts.system ['{TOUCH}']",
        "walk_getattr_by_hand": "\nh: !new:recipe_parts.Holder {}\nt: !apply:getattr [!ref <h>, tools]\n"
        f"s: !apply:getattr [!ref <t>, system]\nevil: !apply:recipe_parts.call [!ref <s>, '{TOUCH}']",
        "walk_getattr_dunder": "\nh: !new:recipe_parts.Holder {}\ni: !apply:getattr [!ref <h>, __init__]\n"
        "g: !apply:getattr [!ref <i>, __globals__]\n"
        f"s: !apply:operator.getitem [!ref <g>, system]\nevil: !apply:recipe_parts.call [!ref <s>, '{TOUCH}']",
        "walk_partial_func": "\np: !name:os.system ['x']\nf: !ref <p.func>\n"
        f"evil: !apply:recipe_parts.call [!ref <f>, '{TOUCH}']",
        "walk_bound_torch_method": "\nm: !new:recipe_parts.Child {}\n"
        "evil: !apply:recipe_parts.call [!ref <m.apply>, !name:recipe_parts.call_with_canary]",
        "walk_descriptor": "\nh: !new:recipe_parts.Holder {}\nf: !ref <h.opener>\n"
        "evil: !apply:recipe_parts.call [!ref <f>, '@CANARY@']",
    },
    built=True,
)
WALKS += evil(
    {
        "walk_class": "\nx: !new:recipe_parts.Holder {}\nevil: !ref <x.__class__>",
        "walk_class_of_plain": "\nx: 1\nevil: !ref <x.__class__>",
        "walk_class_of_text": "\nx: text\nevil: !ref <x.format>",
        "walk_dict": "\nx: !new:recipe_parts.Holder {}\nevil: !ref <x.__dict__>",
        "walk_reduce": "\nx: !new:recipe_parts.Holder {}\nevil: !ref <x.__reduce_ex__>",
        "walk_two_attributes": "\nx: !new:recipe_parts.Holder {}\nevil: !ref <x.tools.system>",
        "walk_through_module": "\nm: !module:recipe_parts\nevil: !ref <m.os>",
        "walk_module_of_torch": "\nm: !module:torch\nevil: !ref <m.load>",
        "walk_module_of_torch_to_another": "\nm: !module:torch.nn.functional\nevil: !ref <m.torch>",
        "walk_module_of_ours": "\nm: !module:amp_recipes.config\nevil: !ref <m.load_hparams>",
        "walk_module_of_ours_to_another": "\nm: !module:amp_recipes\nevil: !ref <m.cli>",
        "walk_class_method": "\nc: !name:recipe_parts.Child\nevil: !ref <c.register_forward_hook>",
        "walk_module_by_getattr": "!apply:getattr [!module:recipe_parts, os]",
        "walk_default_of_getattr": "!apply:getattr [!new:recipe_parts.Holder {}, nothing, !name:os.system]",
        "walk_name_from_reference": "\nn: __class__\nx: !new:recipe_parts.Holder {}\n"
        "evil: !apply:getattr [!ref <x>, !ref <n>]",
        "walk_name_from_call": "!apply:getattr [!new:recipe_parts.Holder {}, !apply:os.path.join [tools]]",
        "walk_name_with_dot": "!apply:getattr [!new:recipe_parts.Holder {}, tools.system]",
        "walk_tensor_method": "\nt: !apply:torch.ones [2]\nevil: !ref <t.numpy>",
        "walk_module_hook": "\nm: !new:torch.nn.Identity {}\nevil: !ref <m.register_forward_hook>",
        "walk_generator": "\ng: !new:torch.Generator {}\nevil: !ref <g.__init__>",
        "walk_lookalike": "\nx: !new:recipe_parts.Holder {}\nevil: !ref <x.\uff3f\uff3fclass\uff3f\uff3f>",
    },
    live=False,
    built=True,
)

# Ways to write a tag that a search of the text for tags would overlook.
TAGS = evil(
    {
        "python_apply": f"!!python/object/apply:os.system ['{TOUCH}']",
        "python_verbatim": f"!<tag:yaml.org,2002:python/object/apply:os.system> ['{TOUCH}']",
        "local_verbatim": f"!<!apply:os.system> ['{TOUCH}']",
        "percent_encoded": f"!apply:os%2Esystem ['{TOUCH}']",
        "percent_encoded_letter": f"!apply:os.%73ystem ['{TOUCH}']",
        "percent_encoded_tag": f"!%61pply:os.system ['{TOUCH}']",
        "block_arguments": f"\nevil: !apply:os.system\n  - {TOUCH}",
        "anchor_before_tag": f"\na: &a !apply:os.system ['{TOUCH}']\nb: *a",
        "anchor_after_tag": f"\na: !apply:os.system &a ['{TOUCH}']\nb: *a",
        "multi_line_flow": f"\nevil: !apply:os.system [\n  '{TOUCH}'\n  ]",
        "merge_key": f"\nbase: &base {{x: !apply:os.system ['{TOUCH}']}}\nevil:\n  <<: *base",
        "merge_key_inline": f"\nevil:\n  <<: {{x: !apply:os.system ['{TOUCH}']}}",
        "merge_key_list": f"\nevil:\n  <<: [{{y: 1}}, {{x: !apply:os.system ['{TOUCH}']}}]",
        "merged_arguments": f"\nargs: &args {{command: '{TOUCH}'}}\nevil: !apply:os.system\n  <<: *args",
        "copy_of_a_call": f"\na: !apply:os.system ['{TOUCH}']\nb: !copy <a>",
        "reference_to_a_call": f"\n__a: !apply:os.system ['{TOUCH}']\nb: !ref <__a>",
        "reference_in_arguments": f"\nc: '{TOUCH}'\nb: !apply:os.system [!ref <c>]",
        "ordered_map": f"!!omap [a: !apply:os.system ['{TOUCH}']]",
        "pairs": f"!!pairs [a: !apply:os.system ['{TOUCH}']]",
    }
)
TAGS += evil(
    {
        "python_new": "!!python/object/new:subprocess.Popen [[touch, '@CANARY@']]",
        "merge_value": f"\nevil:\n  <<: !apply:recipe_parts.identity [!apply:os.system ['{TOUCH}']]",
        "key_call": f"\n? !apply:os.system ['{TOUCH}']\n: 1",
        "key_python": f"\n? !!python/object/apply:os.system ['{TOUCH}']\n: 1",
        "key_nested": f"\nevil:\n  ? !apply:os.system ['{TOUCH}']\n  : 1",
        "key_tuple": f"\n? (1, !!python/object/apply:os.system ['{TOUCH}'])\n: 1",
        "key_in_a_sequence_key": f"\nevil:\n  ? [!apply:os.system ['{TOUCH}']]\n  : 1",
        "yaml_set": f"\nevil: !!set\n  ? !apply:os.system ['{TOUCH}']",
    },
    live=False,
)
TAGS += [Payload("byte_order_mark", f"\ufeffevil: !apply:os.system ['{TOUCH}']\n")]
TAGS += [
    Payload("tag_directive", f"%TAG ! tag:yaml.org,2002:python/\n---\nevil: !object/apply:os.system ['{TOUCH}']\n"),
    Payload("tag_handle", f"%TAG !e! !apply:\n---\nevil: !e!os.system ['{TOUCH}']\n"),
    Payload("yaml_directive", f"%YAML 1.1\n---\nevil: !apply:os.system ['{TOUCH}']\n", live=False),
    Payload("root_call", f"!apply:os.system ['{TOUCH}']\n"),
    Payload("root_new", "!new:subprocess.Popen {args: [touch, '@CANARY@']}\n"),
    Payload("root_python", f"!!python/object/apply:os.system ['{TOUCH}']\n"),
    Payload("second_document", f"lr: 1\n---\nevil: !apply:os.system ['{TOUCH}']\n", live=False),
    Payload("unknown_tag", f"evil: !Apply:os.system ['{TOUCH}']\n", live=False),
    Payload("python_name", "evil: !!python/name:os.system\n", live=False),
    Payload("python_name_suffix", "evil: !!python/name:os.system ''\n", live=False),
    Payload("python_module", "evil: !!python/module:os\n", live=False),
    Payload("python_tuple", "evil: !!python/tuple [1, 2]\n", live=False),
    Payload("tag_on_text", f"evil: !apply:os.system '{TOUCH}'\n", live=False),
    Payload("target_with_parts", "evil: !apply:os.system.__call__ ['touch @CANARY@']\n"),
    Payload("target_with_space", "evil: !apply:os. system ['touch @CANARY@']\n", live=False),
    Payload("target_with_brackets", "evil: !apply:os[system] ['touch @CANARY@']\n", live=False),
    Payload("target_with_slash", "evil: !apply:os/system ['touch @CANARY@']\n", live=False),
    Payload("target_with_leading_dot", "evil: !apply:.os.system ['touch @CANARY@']\n", live=False),
    Payload("target_with_double_dot", "evil: !apply:os..system ['touch @CANARY@']\n", live=False),
    Payload("target_with_line_break", "evil: !apply:os%0Asystem ['touch @CANARY@']\n", live=False),
    Payload("target_empty", "evil: !apply: ['touch @CANARY@']\n", live=False),
    Payload("target_with_nul", "evil: !apply:os.system%00 ['touch @CANARY@']\n", live=False),
]

# Untagged text in parentheses, which HyperPyYAML reads with PyYAML's unsafe loader.
PYTHON = f"!!python/object/apply:os.system ['{TOUCH}']"
TUPLES = evil(
    {
        "tuple": f"(1, {PYTHON})",
        "tuple_in_a_list": f"\nevil:\n  - (1, {PYTHON})",
        "tuple_in_arguments": f"\nevil: !apply:recipe_parts.identity\n  - (1, {PYTHON})",
        "tuple_tag": f"!tuple (1, {PYTHON})",
        "tuple_of_one": f"({PYTHON})",
        "tuple_over_lines": f"\nevil: (1,\n  {PYTHON})",
        "tuple_with_anchor": f"(&a {PYTHON}, *a)",
        "tuple_by_reference_in_parts": f"\n__x: '!python/object/apply'\n__y: \"os.system ['{TOUCH}']\"\n"
        "evil: !ref (1, !<__x>:<__y>)",
    }
)
TUPLES += evil({"tuple_nested": f"((1, {PYTHON}))", "tuple_closing_the_list": f"(1] , {PYTHON})"}, live=False)
TUPLES += [
    Payload("tuple_by_reference", f'__x: "{PYTHON}"\nevil: !ref (1, <__x>)\n', plain={"evil": (1, PYTHON)}),
    Payload("tuple_in_quotes", f'evil: "(1, {PYTHON})"\n', plain={"evil": f"(1, {PYTHON})"}),
    Payload("tuple_in_a_block", f"evil: |-\n  (1, {PYTHON})\n", plain={"evil": f"(1, {PYTHON})"}, live=False),
    Payload("tuple_of_our_tags", f"evil: (1, !apply:os.system ['{TOUCH}'])\n", live=False),
    Payload("tuple_tag_on_text", f'evil: !tuple "(1, {PYTHON})"\n'),
]

SIBLING = f"x: !apply:os.system ['{TOUCH}']\n"
INCLUDES = [
    Payload("include_hostile", "a: !include:b.yaml\n", files={"b.yaml": SIBLING}),
    Payload("include_nested", "a: !include:b.yaml\n", files={"b.yaml": "c: !include:c.yaml\n", "c.yaml": SIBLING}),
    Payload(
        "include_values_below", f"a: !include:b.yaml\n  x: !apply:os.system ['{TOUCH}']\n", files={"b.yaml": "x: 1\n"}
    ),
    Payload(
        "include_new_keys_below",
        f"a: !include:b.yaml\n  y: {{z: [!apply:os.system ['{TOUCH}']]}}\n",
        files={"b.yaml": "x: 1\n"},
    ),
    Payload(
        "include_alias_across",
        f"x: &x !apply:os.system ['{TOUCH}']\na: !include:b.yaml {{y: *x}}\n",
        files={"b.yaml": "y: 1\n"},
    ),
    Payload(
        "include_alias_of_the_other_file",
        "a: !include:b.yaml\nc: *x\n",
        files={"b.yaml": f"x: &x {SIBLING[3:]}"},
        live=False,
    ),
    Payload("include_reference_into", "a: !include:b.yaml\nc: !ref <a[x]>\n", files={"b.yaml": SIBLING}),
    Payload("include_tuple", "a: !include:b.yaml\n", files={"b.yaml": f"x: (1, {PYTHON})\n"}),
    Payload("include_in_a_tuple", "a: (1, !include:b.yaml )\n", files={"b.yaml": SIBLING}, live=False),
    Payload("include_as_key", "? !include:b.yaml\n: 1\n", files={"b.yaml": SIBLING}, live=False),
    Payload("include_in_arguments", "a: !new:dict {b: !include:b.yaml }\n", files={"b.yaml": SIBLING}),
    Payload("include_in_merge", "a:\n  <<: !include:b.yaml\n", files={"b.yaml": SIBLING}, live=False),
    Payload("include_subfolder", "a: !include:sub/b.yaml\n", files={"sub/b.yaml": SIBLING}, live=False),
    Payload("include_passwd", "a: !include:/etc/passwd\n", live=False),
    Payload("include_absolute", "a: !include:@OUTSIDE@/secret.yaml\n", live=False),
    Payload("include_parent", "a: !include:../../outside/secret.yaml\n", live=False),
    Payload("include_parent_in_the_middle", "a: !include:./x/../../../outside/secret.yaml\n", live=False),
    Payload("include_percent_encoded", "a: !include:%2e%2e/%2e%2e/outside/secret.yaml\n", live=False),
    Payload("include_link", "a: !include:link.yaml\n", links={"link.yaml": "@OUTSIDE@/secret.yaml"}, live=False),
    Payload("include_folder_link", "a: !include:link/secret.yaml\n", links={"link": "@OUTSIDE@"}, live=False),
    Payload(
        "include_link_in_included",
        "a: !include:sub/b.yaml\n",
        files={"sub/b.yaml": "c: !include:link.yaml\n"},
        links={"sub/link.yaml": "@OUTSIDE@/secret.yaml"},
        live=False,
    ),
    Payload(
        "include_link_of_links",
        "a: !include:one.yaml\n",
        links={"one.yaml": "two.yaml", "two.yaml": "one.yaml"},
        live=False,
    ),
    Payload("include_fifo", "a: !include:fifo\n", live=False),
    Payload("include_device", "a: !include:/dev/zero\n", live=False),
    Payload("include_device_link", "a: !include:zero.yaml\n", links={"zero.yaml": "/dev/zero"}, live=False),
    Payload("include_standard_input", "a: !include:/dev/stdin\n", live=False),
    Payload("include_process", "a: !include:/proc/self/environ\n", live=False),
    Payload("include_first_process", "a: !include:/proc/1/environ\n", live=False),
    Payload("include_home", "a: !include:~/.bashrc\n", live=False),
    Payload("include_variable", "a: !include:$HOME/.bashrc\n", live=False),
    Payload("include_url", "a: !include:file:///etc/passwd\n", live=False),
    Payload("include_folder", "a: !include:.\n", live=False),
    Payload("include_nothing", "a: !include:\n", live=False),
    Payload("include_nul", "a: !include:b.yaml%00.txt\n", files={"b.yaml": SIBLING}, live=False),
    Payload("include_from_reference", "f: /etc/passwd\na: !include:<f>\n", live=False),
    Payload("include_itself", "a: !include:main.yaml\n", live=False),
    Payload("include_of_source_code", "a: !include:@RECIPE@/recipe_parts.py\n", live=False),
    Payload("include_binary", "a: !include:@OUTSIDE@/evil.pkl\n", live=False),
]

SCALARS = "lr: 0.1\nmodel:\n  hidden: 4\nopt: !name:torch.optim.SGD\n  lr: !ref <lr>\n"
CALL = f"!apply:os.system ['{TOUCH}']"
OVERRIDES = [
    Payload("override_text", SCALARS, overrides=f"lr: {CALL}\n"),
    Payload("override_text_nested", SCALARS, overrides=f"model: {{hidden: {CALL}}}\n"),
    Payload("override_text_tuple", SCALARS, overrides=f"lr: (1, {PYTHON})\n"),
    Payload("override_text_python", SCALARS, overrides=f"lr: {PYTHON}\n"),
    Payload("override_text_key", SCALARS, overrides=f"? {CALL}\n: 1\n", live=False),
    Payload("override_text_merge", SCALARS, overrides=f"model:\n  <<: {{hidden: {CALL}}}\n"),
    Payload("override_text_alias", SCALARS, overrides=f"lr: &a {CALL}\nmodel: {{hidden: *a}}\n"),
    Payload("override_text_include", SCALARS, overrides="lr: !include:/etc/passwd\n", live=False),
    Payload("override_text_reference", SCALARS, overrides="lr: !ref <model.__class__>\n", live=False),
    Payload("override_text_applyref", SCALARS, overrides=f"lr: !applyref:os.system ['{TOUCH}']\n"),
    Payload("override_text_directive", SCALARS, overrides=f"%TAG !e! !apply:\n---\nlr: !e!os.system ['{TOUCH}']\n"),
    Payload("override_text_root", SCALARS, overrides=f"{CALL}\n", live=False),
    Payload("override_mapping_tuple", SCALARS, overrides={"lr": f"(1, {PYTHON})"}, plain={"lr": f"(1, {PYTHON})"}),
    Payload(
        "override_mapping_nested_tuple",
        SCALARS,
        overrides={"model": {"hidden": f"(1, {PYTHON})"}},
        plain={"model": {"hidden": f"(1, {PYTHON})"}},
    ),
    Payload(
        "override_mapping_dotted_tuple",
        SCALARS,
        overrides={"model.hidden": f"(1, {PYTHON})"},
        live=False,
        plain={"model": {"hidden": f"(1, {PYTHON})"}},
    ),
    Payload("override_mapping_call_as_text", SCALARS, overrides={"lr": CALL}, plain={"lr": CALL}, live=False),
    Payload(
        "override_mapping_reference_as_text",
        SCALARS,
        overrides={"lr": "!ref <model>"},
        live=False,
        plain={"lr": "!ref <model>"},
    ),
    Payload(
        "override_mapping_angles_as_text", SCALARS, overrides={"lr": "<model>"}, live=False, plain={"lr": "<model>"}
    ),
    Payload(
        "override_mapping_newline",
        SCALARS,
        overrides={"lr": f"1\nevil: {CALL}"},
        plain={"lr": f"1\nevil: {CALL}"},
        live=False,
    ),
    Payload("override_mapping_key_newline", SCALARS, overrides={f"lr: 1\nevil: {CALL}\nx": 1}, live=False),
    Payload("override_mapping_function", SCALARS, overrides={"lr": os.system}, live=False),
    Payload("override_mapping_key_trust", SCALARS, overrides={"trust": ["os"]}, live=False),
    Payload("override_replaces_a_call", SCALARS, overrides={"opt": {"lr": f"(1, {PYTHON})"}}, plain={"lr": 0.1}),
    Payload(
        "override_of_a_reference",
        "a: 1\nevil: !ref (1, <a>)\n",
        overrides={"a": PYTHON},
        plain={"a": PYTHON, "evil": (1, PYTHON)},
    ),
    Payload("argument_call", SCALARS, arguments=("--lr", CALL), plain={"lr": CALL}),
    Payload("argument_equals_call", SCALARS, arguments=(f"--lr={CALL}",), plain={"lr": CALL}),
    Payload(
        "argument_nested_call",
        SCALARS,
        arguments=(f"--model.hidden={CALL}",),
        live=False,
        plain={"model": {"hidden": CALL}},
    ),
    Payload("argument_tuple", SCALARS, arguments=("--lr", f"(1, {PYTHON})"), plain={"lr": f"(1, {PYTHON})"}),
    Payload("argument_python", SCALARS, arguments=("--lr", PYTHON), plain={"lr": PYTHON}),
    Payload(
        "argument_newline",
        SCALARS,
        arguments=("--lr", f"1\nevil: {CALL}"),
        plain={"lr": f"1\nevil: {CALL}"},
        live=False,
    ),
    Payload(
        "argument_known_key_newline",
        "lr: 0.1\nevil: 1\n",
        arguments=("--lr", f"1\nevil: {CALL}"),
        plain={"lr": f"1\nevil: {CALL}"},
    ),
    Payload(
        "argument_carriage_return",
        "lr: 0.1\nevil: 1\n",
        arguments=("--lr", f"1\revil: {CALL}"),
        plain={"lr": f"1\revil: {CALL}"},
    ),
    Payload(
        "argument_next_line",
        "lr: 0.1\nevil: 1\n",
        arguments=("--lr", f"1\x85evil: {CALL}"),
        plain={"lr": f"1\x85evil: {CALL}"},
        live=False,
    ),
    Payload("argument_list", SCALARS, arguments=("--lr", f"[1, {CALL}]"), plain={"lr": f"[1, {CALL}]"}),
    Payload(
        "argument_mapping",
        SCALARS,
        arguments=("--model", f"{{hidden: {CALL}}}"),
        plain={"model": f"{{hidden: {CALL}}}"},
    ),
    Payload(
        "argument_key_newline",
        SCALARS,
        arguments=(f"--lr=1\nevil={CALL}",),
        plain={"lr": f"1\nevil={CALL}"},
        live=False,
    ),
    Payload("argument_name_newline", "lr: 0.1\nevil: 1\n", arguments=(f"--evil: {CALL}\nlr", "1")),
    Payload(
        "argument_include",
        SCALARS,
        arguments=("--lr", "!include:/etc/passwd"),
        live=False,
        plain={"lr": "!include:/etc/passwd"},
    ),
    Payload(
        "argument_walk", SCALARS, arguments=("--lr", "!ref <opt.func>"), live=False, plain={"lr": "!ref <opt.func>"}
    ),
    Payload("argument_run_option", SCALARS, arguments=("--output_folder", CALL), plain={"lr": 0.1}, live=False),
    Payload("argument_interpolation", SCALARS, arguments=("--output_folder", "${oc.env:HOME}"), live=False),
    Payload("argument_placeholder", "lr: !PLACEHOLDER\n", arguments=("--lr", CALL), plain={"lr": CALL}),
    Payload("argument_into_arguments", "c: echo\nevil: !apply:os.system [!ref <c>]\n", arguments=("--c", TOUCH)),
    Payload(
        "argument_replaces_target",
        "opt: !new:torch.nn.ReLU {}\n",
        arguments=("--opt", CALL),
        live=False,
        plain={"opt": CALL},
    ),
]

LOOKALIKES = evil(
    {
        "cyrillic_o": f"!apply:\u043es.system ['{TOUCH}']",
        "fullwidth": f"!apply:\uff4fs.system ['{TOUCH}']",
        "fullwidth_attribute": f"!apply:os.\uff53ystem ['{TOUCH}']",
        "cyrillic_tag": f"!\u0430pply:os.system ['{TOUCH}']",
        "one_dot_leader": f"!apply:os\u2024system ['{TOUCH}']",
        "zero_width_space": f"!apply:os\u200b.system ['{TOUCH}']",
        "right_to_left": f"!apply:\u202eos.system ['{TOUCH}']",
        "soft_hyphen": "!new:torch.nn.Lin\u00adear [1, 1]",
        "combining": "!new:torch.nn.Linea\u0301r [1, 1]",
        "lookalike_torch": "!new:t\u043erch.nn.Linear [1, 1]",
        "lookalike_recipe": "!apply:recip\u0435_parts.identity [1]",
        "long_s": f"!apply:o\u017f.system ['{TOUCH}']",
        "percent_encoded_lookalike": f"!apply:%D0%BEs.system ['{TOUCH}']",
        "recipe_lookalike_function": "!apply:recipe_parts.\uff49dentity [1]",
        "case": f"!apply:OS.system ['{TOUCH}']",
        "case_of_torch": "!new:Torch.nn.Linear [1, 1]",
    },
    live=False,
)

# A YAML cannot give itself trust, and what it opens stays as closed as before.
SELF_TRUST = [
    Payload("trust_key", f"trust: [os]\nevil: {CALL}\n"),
    Payload("trust_hidden_key", f"__trust__: os\nevil: {CALL}\n"),
    Payload("trust_option", f"run_opts: {{trust: os}}\nevil: {CALL}\n"),
    Payload("trust_argument", f"evil: {CALL}\ntrust: x\n", arguments=("--trust.x", "os"), live=False),
    Payload(
        "trust_of_one_opens_no_other",
        f"evil: !apply:sklearn.utils.os.system ['{TOUCH}']\n",
        trust=("sklearn",),
        live=False,
    ),
    Payload("trust_of_numpy_opens_no_os", f"evil: !apply:numpy.f2py.os.system ['{TOUCH}']\n", trust=("numpy",)),
    Payload(
        "trust_of_numpy_opens_no_builtins", f'evil: !apply:numpy.ma.core.builtins.exec ["{WRITE}"]\n', trust=("numpy",)
    ),
    Payload("trust_of_a_module_opens_no_sibling", f"evil: !apply:os.system ['{TOUCH}']\n", trust=("os.path",)),
    Payload("trust_of_a_prefix", f"evil: !apply:os.system ['{TOUCH}']\n", trust=("o", "os.sys", "oss")),
    Payload("trust_of_a_folder", "evil: !module:hostile_side_effect\n", trust=("@OUTSIDE@",)),
    Payload("trust_of_a_folder_stays_there", "a: !include:@OUTSIDE@/../configs\n", trust=("@OUTSIDE@",), live=False),
    Payload("trust_of_a_folder_is_not_its_parent", "a: !include:/etc/passwd\n", trust=("@OUTSIDE@",), live=False),
    Payload("trust_of_a_link", "a: !include:@OUTSIDE@/linked.yaml\n", trust=("@OUTSIDE@",), live=False),
    Payload("trust_of_torch_utils_opens_no_private", f"evil: {CALL}\n", trust=("torch",)),
]

# What other tools would expand or run is text here.
TEXTS = [
    Payload(f"text_{name}", f"evil: {value}\n", live=False, plain={"evil": text})
    for name, value, text in [
        ("shell", f"$({TOUCH})", f"$({TOUCH})"),
        ("backticks", f"'`{TOUCH}`'", f"`{TOUCH}`"),
        ("omegaconf", "${oc.env:HOME}", "${oc.env:HOME}"),
        ("omegaconf_resolver", "'${eval:1}'", "${eval:1}"),
        ("template", "'{{ 1 + 1 }}'", "{{ 1 + 1 }}"),
        ("format", "'{0.__class__}'", "{0.__class__}"),
        ("percent", "'%(x)s %1000000000d'", "%(x)s %1000000000d"),
        ("call_in_quotes", f"\"!apply:os.system ['{TOUCH}']\"", f"!apply:os.system ['{TOUCH}']"),
        ("reference_in_quotes", "'!ref <evil>'", "!ref <evil>"),
        ("reference_without_tag", "<evil>", "<evil>"),
        ("python", f"__import__('os').system('{TOUCH}')", f"__import__('os').system('{TOUCH}')"),
        ("python_in_a_reference", f"!ref __import__('os').system('{TOUCH}')", f"__import__('os').system('{TOUCH}')"),
        ("lambda", "!ref (lambda:1)() + 1", "(lambda:1)() + 1"),
        ("class_walk_in_arithmetic", "!ref 1 + ().__class__", "1 + ().__class__"),
    ]
]
TEXTS += [
    Payload(f"function_{name}", f"evil: !applyref:recipe_parts.{name}\n", live=False, plain={"evil": text})
    for name, text in [
        ("returns_a_call", "!apply:os.system [ls]"),
        ("returns_a_tuple", "(1, !!python/object/apply:os.system [ls])"),
        ("returns_a_reference", "<evil>"),
    ]
]
TEXTS += [
    Payload("function_returns_a_function", "evil: !applyref:recipe_parts.returns_a_function\n", live=False, built=True),
    Payload(
        "function_returns_a_node",
        "evil: !applyref:recipe_parts.returns_a_node\n",
        live=False,
        plain={"evil": {"x": ["ls"]}},
    ),
]

CORPUS = {
    "call": CALLS + NOT_LIVE_CALLS,
    "call of what is given": INDIRECT,
    "file": FILES,
    "import": IMPORTS,
    "torch": TORCH,
    "own function": OWN,
    "re-export": REEXPORTS,
    "walk": WALKS,
    "tag": TAGS,
    "tuple": TUPLES,
    "include": INCLUDES,
    "override": OVERRIDES,
    "lookalike": LOOKALIKES,
    "self trust": SELF_TRUST,
    "text": TEXTS,
}
PAYLOADS = list(itertools.chain(*CORPUS.values()))

TRAIN = '''\
"""A recipe's script: what its folder defines is trusted."""

from amp_recipes.config import load_hparams


def load(path, overrides=None, trust=()):
    return load_hparams(path, overrides, trust)
'''

PARTS = '''\
"""A recipe's module, which imports and holds what a YAML must not reach through it."""

import functools
import os
import subprocess
import sys
import threading
from functools import partial, reduce
from os import system
from pathlib import Path
from subprocess import Popen

import numpy as np
import recipe_helper
import torch
from torch import nn

alias = os.system
opener = partial(open, mode="w")
TABLE = {"run": os.system}
FUNCTIONS = [os.system]
ENVIRONMENT = os.environ
worker = threading.Thread(target=os.system)


class Shell:
    def __init__(self, *args):
        pass


class Holder:
    run = staticmethod(os.system)

    def __init__(self):
        self.tools = os
        self.path = Path("/")

    @property
    def opener(self):
        return opener


class Child(nn.Module):
    pass


bound = recipe_helper.Tool().run
cached = functools.lru_cache(os.system)


def call(function, *args):
    return function(*args)


def call_with_canary(*_):
    open(os.environ["HOSTILE_CANARY"], "w").close()


def identity(value):
    return value


def returns_a_call():
    return "!apply:os.system [ls]"


def returns_a_tuple():
    return "(1, !!python/object/apply:os.system [ls])"


def returns_a_reference():
    return "<evil>"


def returns_a_function():
    return os.system


def returns_a_node():
    from ruamel.yaml import YAML

    return YAML().load("x: !apply:os.system [ls]")


class Boom:
    def __init__(self, *_):
        open(os.environ["HOSTILE_CANARY"], "w").close()
'''

HELPER = """\
import os


class Tool:
    run = staticmethod(os.system)
"""

SIDE_EFFECT = "import os\n\nopen(os.environ['HOSTILE_CANARY'], 'w').close()\n\n\ndef thing():\n    pass\n"


class _Reduced:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def lay_out_house(root: Path) -> None:
    """A recipe's folder and one that is not the recipe's, for all payloads; the canary's path is in the environment."""
    outside, recipe = root / "outside", root / "recipe"
    files = {
        recipe / "train.py": TRAIN,
        recipe / "recipe_parts.py": PARTS,
        recipe / "recipe_helper.py": HELPER,
        outside / "hostile_side_effect.py": SIDE_EFFECT,
        outside / "hostile_target.py": SIDE_EFFECT,
        outside / "hostile_package/__init__.py": SIDE_EFFECT,
        outside / "hostile_package/inner.py": "",
        outside / "hostile_namespace/inner.py": SIDE_EFFECT,
        outside / "hub/hubconf.py": SIDE_EFFECT + "\n\ndef model():\n    return 1\n",
        outside / "secret.yaml": "password: 1234\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (outside / "evil.pkl").write_bytes(_pickle("touch $HOSTILE_CANARY"))
    with zipfile.ZipFile(outside / "hostile.zip", "w") as archive:
        archive.writestr("hostile_zipped.py", SIDE_EFFECT)
    (outside / "linked.yaml").symlink_to("/etc/passwd")
    (recipe / "hostile_linked.py").symlink_to(outside / "hostile_target.py")
    (recipe / "hostile_linked_package").symlink_to(outside / "hostile_package")


def _pickle(command: str) -> bytes:
    return pickle.dumps(_Reduced(command), protocol=2)


@dataclass
class Job:
    """A payload on the disk."""

    payload: Payload
    file: Path
    canaries: Path
    words: dict[str, str]

    @property
    def canary(self) -> Path:
        return self.canaries / "canary"

    def fill(self, value: Any) -> Any:
        """`value` with the paths of this job."""
        if isinstance(value, str):
            for word, path in self.words.items():
                value = value.replace(word, path)
        elif isinstance(value, dict):
            value = {self.fill(key): self.fill(item) for key, item in value.items()}
        elif isinstance(value, tuple | list):
            value = type(value)(self.fill(item) for item in value)
        return value


def lay_out(payload: Payload, root: Path) -> Job:
    """Write a payload's files below `root`, where `lay_out_house` has been."""
    configs, canaries = root / "configs" / payload.name, root / "canaries" / payload.name
    configs.mkdir(parents=True)
    canaries.mkdir(parents=True)
    canary = str(canaries / "canary")
    words = {
        "@CANARY@": canary,
        "@CANARIES@": str(canaries),
        "@CONFIGS@": str(configs),
        "@OUTSIDE@": str(root / "outside"),
        "@RECIPE@": str(root / "recipe"),
        "@PICKLE@": base64.b64encode(_pickle(f"touch {canary}")).decode(),
    }
    job = Job(payload, configs / "main.yaml", canaries, words)
    for name, text in {**payload.files, "main.yaml": payload.text, "victim.txt": "x"}.items():
        (configs / name).parent.mkdir(parents=True, exist_ok=True)
        (configs / name).write_text(job.fill(text))
    for name, target in payload.links.items():
        (configs / name).symlink_to(job.fill(target))
    if "fifo" in payload.text:
        os.mkfifo(configs / "fifo")
    return job
