"""SpeechBrain for tests, where it is installed; else they are skipped with the reason."""

import importlib
import sys
import types

import pytest

# All that tests use: what SpeechBrain imports later would find neither the stand-in below nor its own lazy modules.
PARTS = """
    core dataio.batch dataio.dataloader dataio.dataset nnet.linear nnet.schedulers processing.features utils.checkpoints
    utils.data_pipeline utils.epoch_loop utils.metric_stats utils.train_logger
"""


def import_speechbrain() -> types.ModuleType:
    """SpeechBrain's modules, with an empty torchaudio where none can be imported: no test reads a recording."""
    try:
        import torchaudio  # noqa: F401
    except (ImportError, OSError):  # PyPI's is built for CUDA: on other machines it is better left out
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    try:
        found = pytest.importorskip("speechbrain", reason="SpeechBrain is not installed: see `make setup`")
        for part in PARTS.split():
            importlib.import_module(f"speechbrain.{part}")
    finally:
        if getattr(sys.modules.get("torchaudio"), "__file__", None) is None:
            sys.modules.pop("torchaudio", None)
    # Nor stay the modules that are imported when somebody looks at them, be it only for a `__file__`: who walks through
    # sys.modules (pytest, hypothesis, inspect) would end in the ImportError of a package that is not installed.
    lazy = sys.modules["speechbrain.utils.importutils"].LazyModule
    for name in [name for name, module in sys.modules.items() if isinstance(module, lazy)]:
        del sys.modules[name]
    return found


speechbrain = import_speechbrain()
