"""Loads a pretrained model from a folder in the Hugging Face layout, and chooses which weights train.

transformers and peft are wrapped here because a YAML may not name them; nothing is ever downloaded or unpickled.
"""

import difflib
import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from amp_recipes import needs_extra
from amp_recipes.errors import ConfigError, DataError

with needs_extra("finetuning"):
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging as transformers_logging

logger = logging.getLogger(__name__)

TUNINGS = ("full", "lora", "head")
LOCAL = {"local_files_only": True, "trust_remote_code": False}

# What is new in a model is checked and logged here.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def check_folder(model_folder: str | Path) -> Path:
    """Return the folder's absolute path; raises DataError if it has not the Hugging Face layout."""
    folder = Path(model_folder).expanduser().resolve()
    if not folder.is_dir():
        names = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, names, n=1)
        hint = f" Did you mean '{folder.parent / near[0]}'?" if near else ""
        raise DataError(
            f"model_folder '{model_folder}' is not a folder; expected one with config.json, model.safetensors and a "
            f"tokenizer, as save_pretrained writes it (nothing is downloaded).{hint}"
        )
    if not (folder / "config.json").is_file():
        raise DataError(f"model_folder '{folder}' holds no config.json: it is no model in the Hugging Face layout")
    if not any(folder.glob("*.safetensors")):
        pickled = ", ".join(path.name for path in sorted(folder.glob("*.bin")))
        also = f" ({pickled} is not read, because unpickling can run code: load it yourself and save_pretrained)"
        raise DataError(f"model_folder '{folder}' holds no .safetensors file" + (also if pickled else ""))
    return folder


def load_tokenizer(model_folder: str | Path) -> Any:
    """Return the folder's tokenizer, which pads with its end token if it has no pad token."""
    folder = check_folder(model_folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"model_folder '{folder}' has no tokenizer that transformers can read: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise DataError(f"the tokenizer of '{folder}' has neither a pad token nor an end token")
    return tokenizer


def load_classifier(
    model_folder: str | Path,
    classes: Sequence[str],
    tokenizer: Any,
    max_tokens: int,
    tuning: str = "full",
    pretrained: bool = True,
    attention: str = "sdpa",
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    lora_targets: str | Sequence[str] = "all-linear",
) -> nn.Module:
    """Return the model with a head for the classes; only what `tuning` says takes gradients. Weights are fp32.

    max_tokens: of the longest text; DataError if the model has fewer positions.
    tuning: full, lora (adapters, and all that the folder has no weights for), head (only the latter).
    pretrained: False keeps the folder's architecture and draws every weight at random, to see what pretraining gives.
    attention: transformers' implementation: sdpa, eager, ...
    lora_rank, lora_alpha, lora_dropout, lora_targets: as peft's LoraConfig (Hu et al. 2021).
    """
    if tuning not in TUNINGS:
        raise ConfigError(f"tuning is '{tuning}'; expected {', '.join(TUNINGS)}")
    if tuning != "full" and not pretrained:
        raise ConfigError(f"tuning '{tuning}' would leave random weights as they are; use tuning: full")
    folder = check_folder(model_folder)
    names = dict(enumerate(classes))
    config = AutoConfig.from_pretrained(
        folder, id2label=names, label2id={label: number for number, label in names.items()}, **LOCAL
    )
    config.problem_type = "single_label_classification"
    config.pad_token_id = tokenizer.pad_token_id
    config.use_cache = False  # nothing is generated, and a recomputed forward would fill the cache twice
    # fp32 whatever the file holds: bf16 weights lose small updates, and gradients of fp16 weights cannot be unscaled.
    settings = {"config": config, "dtype": torch.float32, "attn_implementation": attention}
    if not pretrained:
        model = AutoModelForSequenceClassification.from_config(**settings)
        check_positions(model, max_tokens, folder)
        return model
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        folder, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **settings, **LOCAL
    )
    check_positions(model, max_tokens, folder)
    new = new_parameters(model, folder, loaded)
    if tuning == "full":
        return model
    new_modules = sorted({name.rpartition(".")[0] for name in new})
    if tuning == "lora":
        return add_lora(model, new_modules, lora_rank, lora_alpha, lora_dropout, lora_targets)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in new)
    return model


def check_positions(model: nn.Module, max_tokens: int, folder: Path) -> None:
    """Raise DataError if texts of max_tokens are longer than the model was made for."""
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    for name, module in model.named_modules():
        # RoBERTa and similar models count positions from the one after the padding.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    if 0 < positions < max_tokens:  # 0, or -1 in XLNet: without bound
        raise DataError(
            f"max_tokens is {max_tokens}; the model in '{folder}' has positions for {positions} tokens. "
            f"Give --max_tokens={positions} or less, or another --model_folder"
        )


def new_parameters(model: nn.Module, folder: Path, loaded: dict[str, Any]) -> set[str]:
    """Return the names of the parameters outside the pretrained body, or that the folder has no weights for.

    Raises DataError if the body lacks more than a pooler: transformers would train on with random weights.
    """
    body = f"{model.base_model_prefix}."
    unknown = {*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])}
    lost = sorted(name for name in unknown if name.startswith(body) and "pooler" not in name)
    if lost:
        raise DataError(
            f"the weights of model_folder '{folder}' are not those of its config.json: {len(lost)} of "
            f"{len(model.state_dict())} tensors are missing or have another shape, first '{lost[0]}'"
        )
    names = {name for name, _ in model.named_parameters()}
    new = {name for name in names if name in unknown or not name.startswith(body)}
    logger.info("pretrained: %s; new or of the head: %s", folder, ", ".join(sorted(new)))
    return new


def add_lora(
    model: nn.Module, new_modules: Sequence[str], rank: int, alpha: float, dropout: float, targets: str | Sequence[str]
) -> nn.Module:
    """Return the model with low-rank adapters; its new modules are trained and saved whole."""
    peft = import_peft()
    config = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # A pooler that the folder lacks is random, and must train; peft by itself trains only the head.
        modules_to_save=list(new_modules),
        exclude_modules=list(new_modules),
    )
    return peft.get_peft_model(model, config)


def import_peft() -> ModuleType:
    """Return peft, which takes seconds to import and which only LoRA needs."""
    with needs_extra("finetuning"):
        import peft
    return peft


def freeze_modes(model: nn.Module) -> None:
    """Put every module whose weights are all frozen into evaluation mode.

    Its dropout would be noise that nothing learns from, and a frozen BatchNorm would still move its statistics. Dropout
    beside weights that train, as in a layer with adapters, stays on.
    """
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()


def adamw(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float, **settings: Any) -> Optimizer:
    """Return AdamW over the parameters that train, without weight decay on vectors: biases and norms."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=lr, **settings)


def warmup_then_linear(optimizer: Optimizer, total_updates: int, warmup_ratio: float = 0.1) -> LambdaLR:
    """Return a schedule that rises for the first warmup_ratio of total_updates and falls to zero at their end."""
    rising = max(1, round(warmup_ratio * total_updates))

    def factor(update: int) -> float:
        if update < rising:
            return (update + 1) / rising
        return max(0.0, (total_updates - update) / max(1, total_updates - rising))

    return LambdaLR(optimizer, factor)


def save_for_transformers(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write model (or adapter) and tokenizer as from_pretrained reads them; the folder appears whole or not at all."""
    written = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(written, ignore_errors=True)
    adapter = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(written, **adapter)
    if adapter:
        model.get_base_model().config.save_pretrained(written)  # the names of the classes
    tokenizer.save_pretrained(written)
    shutil.rmtree(folder, ignore_errors=True)
    written.rename(folder)


def load_fine_tuned(folder: str | Path) -> tuple[nn.Module, Any]:
    """Return model and tokenizer as save_for_transformers wrote them, adapters merged into their model's weights."""
    folder = Path(folder).expanduser().resolve()
    if not (folder / "adapter_config.json").is_file():
        folder = check_folder(folder)
        return AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, **LOCAL
        ), load_tokenizer(folder)
    peft = import_peft()
    base = check_folder(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    config = AutoConfig.from_pretrained(folder, **LOCAL)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, config=config, use_safetensors=True, ignore_mismatched_sizes=True, dtype=torch.float32, **LOCAL
    )
    return peft.PeftModel.from_pretrained(model, folder).merge_and_unload(), load_tokenizer(folder)
