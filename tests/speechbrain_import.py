"""SpeechBrain for tests, where it is installed; else they are skipped with the reason."""

import sys
import types

import pytest
import torch

if torch.version.cuda is None:
    # The torchaudio of PyPI links to CUDA. Beside a torch without it, SpeechBrain's modules need its Python half only.
    extension = types.ModuleType("torchaudio._extension")
    extension._IS_TORCHAUDIO_EXT_AVAILABLE = extension._IS_ALIGN_AVAILABLE = False
    extension.fail_if_no_align = lambda function: function
    sys.modules.setdefault("torchaudio._extension", extension)

speechbrain = pytest.importorskip("speechbrain", reason="SpeechBrain is not installed: pip install speechbrain")


def forget_lazy_modules() -> None:
    """Take out of sys.modules what SpeechBrain imports when somebody looks at it, be it only for a `__file__`.

    Whoever walks through sys.modules (pytest, hypothesis, inspect) would else end in the ImportError of a package that
    is not installed.
    """
    lazy = sys.modules["speechbrain.utils.importutils"].LazyModule
    for name in [name for name, module in sys.modules.items() if isinstance(module, lazy)]:
        del sys.modules[name]


forget_lazy_modules()
