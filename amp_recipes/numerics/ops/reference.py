"""Compares the effect of autocast on each op on this machine with torch's documentation, and explains differences."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from amp_recipes.errors import PrecisionError
from amp_recipes.numerics.ops.findings import (
    AS_GIVEN,
    BY_PARTS,
    CANNOT_RUN,
    EXEMPT,
    NOT_SEEN,
    OTHER_DTYPE,
    PARTLY,
    SHORT_NAMES,
    OpFinding,
    autocast_kernels,
    bare_name,
    device_of,
    is_here,
    probe,
)
from amp_recipes.numerics.ops.lists import (
    DOCUMENTED_TORCH,
    FLOAT32,
    KERNEL_OF,
    LOWER_PRECISION,
    STANDS_FOR,
    WIDEST,
    documented,
    policy,
    undocumented,
)
from amp_recipes.numerics.ops.probes import CPU_ONLY
from amp_recipes.precision.amp_config import AMPConfig, device_capabilities

__all__ = ["OpFinding", "OpReference", "documented", "op_reference", "policy", "probe", "registry", "report_ops"]

NOT_LISTED = "not listed"

_FEATURES = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "sve_bf16", "fp16_arith")
_KNOWN: dict[tuple[str, str, str], str] = {
    ("cpu", "_convolution", AS_GIVEN): (
        "only its older overload, without allow_tf32, has a kernel; autocast casts conv1d to conv_transpose3d "
        "themselves"
    ),
    ("cuda", "cross_entropy", PARTLY): (
        "its log_softmax requests the dtype of the logits, and autocast does not change an explicit dtype: it rounds "
        "to the low dtype, and only nll_loss is float32. Give it float32 logits"
    ),
    **{
        ("cuda", name, OTHER_DTYPE): "the cast for cuDNN's recurrent networks is always to fp16"
        for name in ("lstm", "gru", "rnn_tanh")
    },
}
_MISDOCUMENTED_ON_CUDA = {"cross_entropy": PARTLY}


@dataclass(frozen=True)
class Registry:
    """The aten ops with an autocast kernel for a device type in this build of torch, even without such a device."""

    device_type: str
    kernels: tuple[str, ...]  # "aten::softmax.int": with namespace and overload
    documented_only: tuple[str, ...]  # documented names that no kernel has
    registered_only: tuple[str, ...]  # ops with a kernel that have no documented name

    @property
    def names(self) -> frozenset[str]:
        """The ops with a kernel, without namespace and overload."""
        return frozenset(bare_name(kernel) for kernel in self.kernels)


@dataclass(frozen=True)
class Difference:
    """A difference between torch and its documentation; explanation is None if it is not known."""

    name: str
    documented: str
    found: str
    explanation: str | None


@dataclass(frozen=True)
class OpReference:
    """The effect of autocast on every op on a device type: the lists, the findings, the registry, the differences."""

    torch_version: str
    device_type: str
    device_name: str
    dtype: str  # bf16 or fp16
    features: dict[str, bool]  # what the CPU computes in hardware; empty for other devices
    live: bool  # False: no such device here; torch's dispatch was traced on tensors without data, and no kernel ran
    findings: tuple[OpFinding, ...]
    registry: Registry

    @property
    def differences(self) -> list[Difference]:
        """The differences of findings or registry from the documentation, in that order."""
        return [*self._differing_findings(), *self._undocumented_kernels(), *self._documented_without_kernel()]

    def _differing_findings(self) -> Iterator[Difference]:
        for finding in self.findings:
            expected = AS_GIVEN if finding.documented == EXEMPT else finding.documented
            if finding.found == OTHER_DTYPE or not self._is_as_documented(finding.found, expected):
                listed = f"documented {expected}" if expected else NOT_LISTED
                explanation = _KNOWN.get((self.device_type, finding.name, finding.found))
                yield Difference(finding.name, listed, finding.found, explanation)
        called = {finding.name for finding in self.findings}
        for name in sorted(documented(self.device_type).keys() - called):
            yield Difference(name, f"documented {documented(self.device_type)[name]}", "never called", None)

    def _is_as_documented(self, found: str, expected: str | None) -> bool:
        if expected is None or found == expected or (found == CANNOT_RUN and expected == LOWER_PRECISION):
            return True
        return found == NOT_SEEN and not self.live  # nothing could be traced

    def _undocumented_kernels(self) -> Iterator[Difference]:
        """Ops that no list names and that have an autocast kernel: known, if they do what is known of them."""
        found = {finding.name: finding.found for finding in self.findings}
        for name in self.registry.registered_only:
            known = undocumented(self.device_type).get(name)
            does = found.get(name, NOT_SEEN)
            explanation = None
            if known is not None and does in (known, NOT_SEEN):
                explanation = f"torch has a kernel for it that the documentation leaves out: {known}"
            yield Difference(name, NOT_LISTED, does, explanation)

    def _documented_without_kernel(self) -> Iterator[Difference]:
        for name in self.registry.documented_only:
            calls = [op for op in STANDS_FOR.get(name, ()) if op in self.registry.names]
            explanation = f"a Python function; it calls {' or '.join(calls)}, which has one" if calls else None
            listed = documented(self.device_type)[name]
            yield Difference(name, f"documented {listed}", "no kernel of that name", explanation)

    @property
    def rehearsal_gaps(self) -> dict[tuple[str, str], list[str]]:
        """(found here, what CUDA does) -> the ops: what a run on this device does not rehearse of one on CUDA.

        Left out: ops that are cast by their parts alone and that CUDA's lists do not name, for there too their parts
        decide; and kernels that are reached through another op.
        """
        gaps: dict[tuple[str, str], list[str]] = {}
        if self.device_type == "cuda":
            return gaps
        for finding in self.findings:
            on_cuda = self._on_cuda(finding)
            if on_cuda is not None and finding.found not in (NOT_SEEN, on_cuda):
                gaps.setdefault((finding.found, on_cuda), []).append(finding.name)
        return gaps

    def _on_cuda(self, finding: OpFinding) -> str | None:
        """Return the effect of CUDA's autocast on an op; None for those that are left out."""
        if finding.documented == EXEMPT or finding.name in KERNEL_OF or finding.name in CPU_ONLY:
            return None
        listed = _MISDOCUMENTED_ON_CUDA.get(finding.name) or policy("cuda", finding.name)
        by_parts = finding.documented is None and finding.name not in self.registry.names
        return listed or (None if by_parts else AS_GIVEN)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it; each finding also says what CUDA does to the op ("cuda")."""
        return {
            "torch": self.torch_version,
            "documentation": DOCUMENTED_TORCH,
            "device_type": self.device_type,
            "device": self.device_name,
            "dtype": self.dtype,
            "features": self.features,
            "live": self.live,
            "findings": [asdict(finding) | {"cuda": policy("cuda", finding.name)} for finding in self.findings],
            "registry": asdict(self.registry),
            "differences": [asdict(difference) for difference in self.differences],
            "rehearsal_gaps": [
                {"here": here, "cuda": on_cuda, "ops": ops} for (here, on_cuda), ops in self.rehearsal_gaps.items()
            ],
        }

    def table(self, every: bool = False) -> str:
        """Plain text in 100 columns. every: a row for each op; otherwise ops that fare alike share one."""
        return "\n".join(line.rstrip() for line in _lines(self, every))


def op_reference(device_type: str, dtype: torch.dtype) -> OpReference:
    """Return the effect of autocast on this machine and torch; a device type without a device is traced, not run.

    dtype: torch.bfloat16 or torch.float16.
    Raises PrecisionError for a device type without documented lists, for another dtype, and where the device cannot
    run the dtype at all.
    """
    findings = probe(device_type, dtype)
    live = is_here(device_type)
    name = (
        device_capabilities(device_of(device_type)).device_name if live else f"this machine has no {device_type} device"
    )
    return OpReference(
        torch_version=torch.__version__,
        device_type=device_type,
        device_name=name,
        dtype=SHORT_NAMES[dtype],
        features=_features() if device_type == "cpu" else {},
        live=live,
        findings=tuple(findings),
        registry=registry(device_type),
    )


def registry(device_type: str) -> Registry:
    """Return the aten ops that this build of torch casts on a device type, from its dispatcher; needs no device.

    Raises PrecisionError for a device type without documented lists.
    """
    listed = documented(device_type)
    kernels = autocast_kernels(device_type)
    names = {bare_name(kernel) for kernel in kernels}
    spoken_for = {op for name in listed for op in STANDS_FOR.get(name, ())}
    return Registry(
        device_type,
        kernels=tuple(kernels),
        documented_only=tuple(name for name in listed if name not in names),
        registered_only=tuple(sorted(names - set(listed) - spoken_for)),
    )


def report_ops(device_type: str | None, dtype_name: str | None, as_json: bool, every: bool = False) -> str:
    """Return the output of `amp-recipes ops`.

    device_type: None for the best device here. dtype_name: "bf16" or "fp16"; None for bf16. every: a row for each op.
    Raises ConfigError for an unknown dtype name, PrecisionError for fp32 and as `op_reference`.
    """
    dtype = AMPConfig.from_name(dtype_name or "bf16").dtype
    if dtype is torch.float32:
        raise PrecisionError("autocast does nothing in fp32; choose bf16 or fp16")
    reference = op_reference(device_type or _best_device_type(), dtype)
    return json.dumps(reference.as_dict(), indent=2) if as_json else reference.table(every)


def _best_device_type() -> str:
    return next(device_type for device_type in ("cuda", "xpu", "cpu") if is_here(device_type))


def _features() -> dict[str, bool]:
    flags = torch.cpu.get_capabilities()
    return {feature: bool(flags[feature]) for feature in _FEATURES if feature in flags}


_WIDTH = 100
_TITLES = {
    LOWER_PRECISION: "runs in {dtype}, whatever the inputs are",
    FLOAT32: "casts the inputs up to float32",
    WIDEST: "casts the inputs to the widest dtype among them",
    EXEMPT: "documented as unchanged by autocast: in place, out=, dtype=, float64, integers",
    None: "on no list of {device}; documented to run in the dtype of its inputs",
}


def _lines(reference: OpReference, every: bool) -> Iterator[str]:
    yield from _head(reference)
    groups: dict[str | None, list[OpFinding]] = {listed: [] for listed in _TITLES}
    for finding in reference.findings:
        groups[finding.documented].append(finding)
    for listed, findings in groups.items():
        title = _TITLES[listed].format(dtype=reference.dtype, device=reference.device_type)
        yield ""
        yield f"{listed or NOT_LISTED} ({len(findings)}): {title}"
        yield from _table(findings, reference.device_type != "cuda") if every else _paragraphs(findings)
    yield from _gap_lines(reference)
    yield from _difference_lines(reference)


def _head(reference: OpReference) -> Iterator[str]:
    facts = [f"torch {reference.torch_version}, {reference.device_name}, {reference.dtype}"]
    for verb, wanted in (("has", True), ("lacks", False)):
        features = [feature for feature, there in reference.features.items() if bool(there) is wanted]
        if features:
            facts.append(f"{verb} {' '.join(features)}")
    yield from _wrapped("; ".join(facts))
    if not reference.torch_version.startswith(f"{DOCUMENTED_TORCH}."):
        yield f"The lists are those of torch {DOCUMENTED_TORCH}; some differences may come from the version."
    if not reference.live:
        yield "Traced through torch's dispatcher on tensors without data: the casts are real, but no kernel ran."
    yield _counts([finding for finding in reference.findings if finding.documented not in (None, EXEMPT)])


def _counts(listed: list[OpFinding]) -> str:
    right = sum(finding.found == finding.documented for finding in listed)
    missed, stuck = (sum(finding.found == found for finding in listed) for found in (NOT_SEEN, CANNOT_RUN))
    counts = f"{right} as documented, {len(listed) - right - missed - stuck} not, {missed} not seen"
    if stuck:
        counts += f", {stuck} cannot run"
    return f"{len(listed)} documented ops: {counts}."


def _table(findings: list[OpFinding], with_cuda: bool) -> Iterator[str]:
    """A row for each op; what there is to remark stands below it."""
    heads = ("op", "given", "computed", "output", "found", "on cuda")
    rows = [heads, *map(_row, findings)]
    if not with_cuda:
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, finding in zip(rows, (None, *findings), strict=True):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        if finding is not None and (finding.error or finding.note):
            yield from _wrapped(f"      {_cut(finding.error or finding.note)}", rest="      ")


def _row(finding: OpFinding) -> tuple[str, ...]:
    dtypes = [" ".join(dtypes) or "-" for dtypes in (finding.inputs, finding.computed, finding.outputs)]
    return finding.name, *dtypes, _cell(finding.found), _cell(policy("cuda", finding.name) or "-")


def _cell(text: str) -> str:
    return "lower" if text == LOWER_PRECISION else text


def _paragraphs(findings: list[OpFinding]) -> Iterator[str]:
    """Group ops with the same behaviour, and name the behaviour once."""
    alike: dict[str, list[str]] = {}
    for finding in findings:
        alike.setdefault(_what_happens(finding), []).append(finding.name)
    for happens, names in alike.items():
        yield from _wrapped(f"  {happens}:", rest="    ")
        yield from _listed(names)


def _what_happens(finding: OpFinding) -> str:
    given, computed, output = (" ".join(dtypes) for dtypes in (finding.inputs, finding.computed, finding.outputs))
    if finding.error and not (computed and finding.found in (LOWER_PRECISION, FLOAT32, WIDEST)):
        return f"{finding.found} ({given} in, {_cut(finding.error)})"
    happens = finding.found
    if computed:
        end = "then traced no further" if finding.error else f"{output or 'no floating'} out"
        happens += f", {given} in, {computed} computed, {end}"
    return f"{happens}, {finding.note}" if finding.note.startswith(BY_PARTS) else happens


def _gap_lines(reference: OpReference) -> Iterator[str]:
    gaps = reference.rehearsal_gaps
    if not gaps:
        return
    yield ""
    yield f"Differences on cuda that a run on {reference.device_type} does not show:"
    for (here, on_cuda), names in gaps.items():
        there = f"{on_cuda} on cuda" if on_cuda != AS_GIVEN else "on no list of cuda"
        yield f"  {here} here, {there} ({len(names)}):"
        yield from _listed(names)


def _difference_lines(reference: OpReference) -> Iterator[str]:
    differences = reference.differences
    yield ""
    yield f"Differences from the documentation: {len(differences) or 'none'}"
    alike: dict[str, list[str]] = {}  # GPUs have dozens that are only missing from the page
    for difference in differences:
        why = difference.explanation or "NOT EXPLAINED"
        what = f"{difference.documented}, found {difference.found}: {why}"
        alike.setdefault(what, []).append(difference.name)
    for what, names in alike.items():
        if len(names) == 1:
            yield from _wrapped(f"  {names[0]}: {what}", rest="    ")
        else:
            yield from _wrapped(f"  {what} ({len(names)}):", rest="    ")
            yield from _listed(names)


def _listed(names: list[str]) -> list[str]:
    return _wrapped(f"      {'  '.join(names)}", rest="      ")


def _cut(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _wrapped(text: str, rest: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
