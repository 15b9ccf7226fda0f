"""Other frameworks, each in its customary minimal form, at the same clipping and precision as the hand-written loop.

Each function returns a contender for a case. It raises ImportError where the framework is not installed, and whatever
the framework raises, or `Refused`, where that cannot train the case.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from _workload import Case, Contender, Refused, TimedBatches
from torch import nn

_LIGHTNING_NAMES = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_ACCELERATE_NAMES = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def ignite(case: Case) -> Contender:
    """An Ignite Engine; its users write the step themselves."""
    from ignite.engine import Engine

    model = case.make_model()
    optimizer = case.make_optimizer(model.parameters())
    scaler = case.make_scaler()

    def step(engine, batch):
        model.train()
        inputs, targets = case.to_device(batch)
        optimizer.zero_grad(set_to_none=True)
        with case.autocast():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        engine.state.total += loss.detach()
        return loss.detach()

    def fit(batches: TimedBatches) -> None:
        engine = Engine(step)
        engine.state.total = torch.zeros((), device=case.device)
        engine.run(batches, max_epochs=1)

    return Contender(model, fit)


def fabric(case: Case) -> Contender:
    """A loop over Lightning Fabric."""
    from lightning.fabric import Fabric

    _quiet_lightning()
    runner = Fabric(accelerator=case.device.type, devices=1, precision=_LIGHTNING_NAMES[case.precision])
    _check_lightning_precision(runner._precision.precision, case)
    bare = case.make_model()
    model, optimizer = runner.setup(bare, case.make_optimizer(bare.parameters()))

    def fit(batches: TimedBatches) -> None:
        model.train()
        total = torch.zeros((), device=case.device)
        for batch in batches:
            inputs, targets = case.to_device(batch)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            runner.backward(loss)
            runner.clip_gradients(model, optimizer, max_norm=case.max_grad_norm)
            optimizer.step()
            total += loss.detach()

    return Contender(bare, fit)


def lightning_trainer(case: Case) -> Contender:
    """Lightning's Trainer without logger, checkpoints and progress bar."""
    import lightning

    _quiet_lightning()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = case.make_model()

        def training_step(self, batch, batch_index):
            inputs, targets = batch
            return nn.functional.cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self):
            return case.make_optimizer(self.model.parameters())

    module = Module()

    def fit(batches: TimedBatches) -> None:
        trainer = lightning.Trainer(
            accelerator=case.device.type,
            devices=1,
            precision=_LIGHTNING_NAMES[case.precision],
            gradient_clip_val=case.max_grad_norm,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        _check_lightning_precision(trainer.precision, case)
        trainer.fit(module, batches)

    return Contender(module.model, fit)


def accelerate(case: Case) -> Contender:
    """A loop over Accelerate."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # the precision of the case before
    runner = Accelerator(mixed_precision=_ACCELERATE_NAMES[case.precision], cpu=case.device.type == "cpu")
    if case.precision == "fp16" and runner.scaler is None:
        raise Refused("trains in fp32 in its place")
    bare = case.make_model()
    model, optimizer = runner.prepare(bare, case.make_optimizer(bare.parameters()))

    def fit(batches: TimedBatches) -> None:
        model.train()
        total = torch.zeros((), device=case.device)
        for batch in batches:
            inputs, targets = case.to_device(batch)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            runner.backward(loss)
            runner.clip_grad_norm_(model.parameters(), case.max_grad_norm)
            optimizer.step()
            total += loss.detach()

    return Contender(bare, fit)


def speechbrain(case: Case) -> Contender:
    """SpeechBrain's Brain, which keeps a running average of the loss itself."""
    from speechbrain.core import Brain

    if case.precision == "fp16" and case.device.type == "cpu":
        raise Refused("has no fp16 on a CPU")

    class Tiny(Brain):
        def compute_forward(self, batch, stage):
            inputs, self.targets = case.to_device(batch)
            return self.modules.model(inputs)

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.cross_entropy(predictions, self.targets)

    brain = Tiny(
        modules={"model": case.make_model()},
        opt_class=case.make_optimizer,
        run_opts={
            "device": str(case.device),
            "precision": case.precision,
            "max_grad_norm": case.max_grad_norm,
            "noprogressbar": True,
        },
    )
    return Contender(brain.modules.model, lambda batches: brain.fit(range(1), batches))


PEERS: dict[str, Callable[[Case], Contender]] = {
    "SpeechBrain": speechbrain,
    "Ignite": ignite,
    "Lightning Fabric": fabric,
    "Lightning Trainer": lightning_trainer,
    "Accelerate": accelerate,
}


def _check_lightning_precision(given: str, case: Case) -> None:
    """Lightning changes a precision that it cannot run to another one, with a warning only."""
    if given != _LIGHTNING_NAMES[case.precision]:
        raise Refused(f"runs {given} in its place")


def _quiet_lightning() -> None:
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
