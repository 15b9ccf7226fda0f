"""Lists the names that a YAML may use by default: of torch, of the standard library and of amp_recipes.

A name is here only if no arguments that a YAML can give make it read, write, import, execute or walk attributes. That
is why `getattr`, `operator.attrgetter`, `functools.partial` (`!name:` with arguments makes one), `torch.load`,
`torch.nn.ParameterDict` (it sets any attribute by name) are missing, and with them what makes one huge number
of small ones (`math.factorial`, `math.prod`, `decimal.Decimal`, `operator.pow`). What is listed of amp_recipes writes,
if at all, what a run writes: checkpoints, metrics and a summary, in the folder that it is given.

Nothing here bounds memory or time: a call with large arguments makes large values, as `torch.zeros`, `range` in a
`list`, and `operator.mul` of a text and a number do. `limits` bounds what the YAML itself says.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import inspect
import math
import pydoc
import sys
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn.utils.parametrizations
import torch.nn.utils.rnn
import torch.optim.lr_scheduler
import torch.optim.swa_utils
import torch.utils.data
from torch import nn

_UNBOUNDED = frozenset({"comb", "factorial", "perm", "prod"})
STANDARD = {
    "builtins": """
        abs all any bool complex dict divmod enumerate float frozenset int len list max min range reversed round set
        slice sorted str sum tuple zip
    """,
    "collections": "Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "datetime.timezone": "utc",
    "math": " ".join(name for name in vars(math) if not name.startswith("_") and name not in _UNBOUNDED),
    "operator": "add eq floordiv ge gt le lt mul ne neg pos sub truediv",
    "os.path": "basename dirname join normpath splitext",
    "pathlib": "Path PurePath PurePosixPath",
    "random": "Random choice gauss randint random randrange seed uniform",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits octdigits punctuation whitespace",
}

TORCH = {
    "torch": """
        Generator Size device finfo iinfo inf nan pi
        channels_last channels_last_3d contiguous_format preserve_format strided
        manual_seed
        arange as_tensor empty empty_like eye from_numpy full full_like linspace logspace normal ones ones_like rand
        rand_like randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros
        zeros_like
        bartlett_window blackman_window hamming_window hann_window kaiser_window
        abs acos add amax amin angle argmax argmin argsort asin atan atan2 bernoulli bincount block_diag bmm
        broadcast_to bucketize cat cdist ceil chunk clamp clip clone complex concat conj cos cosh count_nonzero cross
        cumprod cumsum deg2rad diag diag_embed diagonal diff dist div dot einsum eq equal erf erfc erfinv exp exp2 expm1
        flatten flip floor fmod frac gather ge gt histc hypot imag index_select inner isclose isfinite isinf isnan istft
        kron le lerp lgamma log log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor
        logit logsumexp lt masked_fill masked_select matmul max maximum mean median meshgrid min minimum mm movedim mul
        multinomial nan_to_num narrow ne neg nonzero norm numel outer permute poisson polar pow prod quantile rad2deg
        real reciprocal relu relu_ remainder repeat_interleave reshape roll rot90 round rsqrt scatter scatter_add
        searchsorted selu sgn sigmoid sign sin sinc sinh softmax sort split sqrt square squeeze stack std std_mean stft
        sub sum t take tan tanh tensordot tile topk trace transpose tril triu trunc unbind unflatten unique unsqueeze
        var var_mean vdot view_as_complex view_as_real where
    """,
    "torch.cuda": "is_available",
    "torch.nn": "Buffer LinearCrossEntropyOptions Parameter ParameterList",
    "torch.nn.Embedding": "from_pretrained",
    "torch.nn.EmbeddingBag": "from_pretrained",
    "torch.nn.utils": """
        clip_grad_norm_ clip_grad_value_ clip_grads_with_norm_ get_total_norm parameters_to_vector remove_spectral_norm
        remove_weight_norm spectral_norm vector_to_parameters weight_norm
    """,
    "torch.nn.utils.parametrizations": "orthogonal spectral_norm weight_norm",
    "torch.nn.utils.rnn": """
        pack_padded_sequence pack_sequence pad_packed_sequence pad_sequence unpack_sequence unpad_sequence
    """,
    "torch.optim.swa_utils": """
        AveragedModel SWALR get_ema_avg_fn get_ema_multi_avg_fn get_swa_avg_fn get_swa_multi_avg_fn
    """,
    "torch.utils.data": """
        BatchSampler ChainDataset ConcatDataset DataLoader Dataset DistributedSampler IterableDataset RandomSampler
        Sampler SequentialSampler StackDataset Subset SubsetRandomSampler TensorDataset WeightedRandomSampler
        default_collate default_convert random_split
    """,
}

AMP_RECIPES = {
    "amp_recipes": """
        AMPConfig Brain Checkpointer EpochCounter RunOptions Stage TorchAutocast custom_bwd custom_fwd
        fwd_default_precision
    """,
    "amp_recipes.AMPConfig": "from_name",
    "amp_recipes.brain": "Brain Stage",
    "amp_recipes.checkpoint": "Checkpointer EpochCounter",
    "amp_recipes.config": "RunOptions seed_everything",
    "amp_recipes.data": """
        DynamicBatches EpochLoader EpochShuffle LengthBuckets batch_length make_loader to_device
    """,
    "amp_recipes.data.streams": "StreamLoader",
    "amp_recipes.loggers": "JsonlLogger ProgressLogger SummaryLogger make_loggers",
    "amp_recipes.precision": "AMPConfig TorchAutocast custom_bwd custom_fwd fwd_default_precision",
}
_AMP_RECIPES_NAMES = [f"{module}.{name}" for module, names in AMP_RECIPES.items() for name in names.split()]


def key_of(value: Any) -> int:
    """Return the key to compare an object by: itself, or the function of a bound method (each access is new)."""
    return id(value.__func__) if isinstance(value, MethodType) else id(value)


@functools.cache
def standard_objects() -> dict[str, Any]:
    """Every name of the standard library that a YAML may use, with its object; of builtins also the bare name."""
    found = {
        f"{module}.{name}": getattr(pydoc.locate(module), name)
        for module, names in STANDARD.items()
        for name in names.split()
    }
    return found | {name: getattr(builtins, name) for name in STANDARD["builtins"].split()}


def torch_objects() -> dict[str, Any]:
    """Every public name of torch that a YAML may use, with its object."""
    return _torch_objects(_has_exchanged())


def _has_exchanged() -> bool:
    """Whether torch has put others in the place of some functions (`manual_seed`): it does so when it imports this."""
    return "torch._dynamo" in sys.modules


@functools.cache
def _torch_objects(exchanged: bool) -> dict[str, Any]:
    found = _listed(TORCH)
    found |= {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    found |= _public(nn, _is_class_of(nn.Module, "torch.nn.modules."))
    found |= _public(torch.optim, _is_class_of(torch.optim.Optimizer, "torch.optim"))
    schedulers = torch.optim.lr_scheduler
    found |= _public(schedulers, _is_class_of(schedulers.LRScheduler, "torch.optim.lr_scheduler"))
    found |= _public(nn.functional, _is_function_of("torch.nn.functional", "torch._C._nn", "torch"))
    found |= _public(nn.init, _is_function_of("torch.nn.init"))
    return {name: value for name, value in found.items() if not inspect.ismodule(value) and name not in _NOT_OF_TORCH}


# Checks of other functions and the dispatch to classes that override them: nothing that a recipe calls. ParameterDict
# sets and gets whatever attribute a key names.
_NOT_OF_TORCH = frozenset({"torch.nn.ParameterDict", "torch.nn.functional.assert_int_or_pair"})


def amp_recipes_objects() -> dict[str, Any]:
    """Every name of amp_recipes that a YAML may use and whose module is imported, with its object."""
    return _listed(AMP_RECIPES)


def listed_keys() -> frozenset[int]:
    """The keys of the objects of torch and of the standard library, whose modules stay as long as the process."""
    return _listed_keys(_has_exchanged())


@functools.cache
def _listed_keys(exchanged: bool) -> frozenset[int]:
    values = [*_torch_objects(exchanged).values(), *standard_objects().values()]
    return frozenset(key_of(value) for value in values if inspect.isclass(value) or inspect.isroutine(value))


@functools.cache
def walkable_modules() -> frozenset[str]:
    """Modules that a name may go through: of torch and amp_recipes those of the lists and where their objects live.

    And `math`, of which nothing but numbers and functions of numbers can be had.
    """
    names = [*torch_objects(), *_AMP_RECIPES_NAMES]
    objects = [*torch_objects().values(), *amp_recipes_objects().values()]
    homes = {value.__module__ for value in objects if inspect.isclass(value) or inspect.isfunction(value)}
    above = parents([*names, *(f"{home}." for home in homes)])
    return frozenset({"math", *filter(_is_of_lists, above)})


def listed_names() -> list[str]:
    """Every name that a YAML may use by default, also of amp_recipes' modules that are not imported."""
    return [*torch_objects(), *_AMP_RECIPES_NAMES, *standard_objects()]


def nearest_listed(name: str) -> str:
    """The listed name that is nearest in the same module; empty if none is near."""
    place, _, leaf = name.rpartition(".")
    members = {listed.rpartition(".")[2] for listed in listed_names() if listed.rpartition(".")[0] == place}
    same = sorted(member for member in members if member.lower() == leaf.lower())
    near = [leaf] if leaf in same else same or difflib.get_close_matches(leaf, sorted(members), 1)
    return f"{place}.{near[0]}" if near else ""


def listed_elsewhere(name: str) -> str:
    """A listed name with the same last part in any module, if only but for upper and lower case; empty if none is."""
    leaf = name.rpartition(".")[2]
    same = [listed for listed in listed_names() if listed.rpartition(".")[2].lower() == leaf.lower()]
    return min(same, key=lambda listed: (listed.rpartition(".")[2] != leaf, len(listed)), default="")


def _is_of_lists(name: str) -> bool:
    return name.partition(".")[0] in ("amp_recipes", "torch") and "._" not in name


def parents(names: Iterable[str]) -> set[str]:
    """The dotted names above each name: `a.b.c` gives `a.b` and `a`."""
    return {name[:dot] for name in names for dot, character in enumerate(name) if character == "."}


def _listed(names: dict[str, str]) -> dict[str, Any]:
    """The objects that a list names, as far as the modules that hold them are imported."""
    found = {}
    for owner_name, members in names.items():
        module_name, _, class_name = owner_name.rpartition(".")
        owner = sys.modules.get(owner_name) or getattr(sys.modules.get(module_name), class_name, None)
        found |= {f"{owner_name}.{name}": getattr(owner, name) for name in members.split() if hasattr(owner, name)}
    return found


def _public(module: Any, is_listed: Callable[[Any], bool]) -> dict[str, Any]:
    """The public names of a module with their objects, as far as those are listed."""
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and is_listed(value)}
    return {f"{module.__name__}.{name}": value for name, value in found.items()}


def _is_class_of(base: type, home: str) -> Callable[[Any], bool]:
    return lambda value: inspect.isclass(value) and issubclass(value, base) and value.__module__.startswith(home)


def _is_function_of(*homes: str) -> Callable[[Any], bool]:
    return lambda value: inspect.isroutine(value) and value.__module__ in homes
