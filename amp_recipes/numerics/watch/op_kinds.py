"""Reads from an op's name and schema, once, what it does with values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from amp_recipes.precision.torch_private import Op, kernel_of, schema_of

# view: names values anew; copy: keeps or casts them; make: writes constants; move: puts them elsewhere, each as it was;
# compute: all else, where a dtype can round or overflow.
Doing = Literal["view", "copy", "make", "move", "compute"]


def names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


_VIEWS = names("detach alias lift_fresh _unsafe_view _reshape_alias")
_COPIES = names("_to_copy to copy clone contiguous set resize lift_fresh_copy")
_MAKES = names("arange scalar_tensor fill zero eye tril_indices triu_indices linspace")
_MAKES_BEGIN = ("empty", "new_", "zeros", "ones", "full", "rand")
_MOVES = names(
    """
    cat constant_pad_nd diagonal_scatter embedding equal flip gather index index_select masked_scatter masked_select
    pixel_shuffle pixel_unshuffle repeat repeat_interleave roll select_backward select_scatter slice_backward
    slice_scatter stack take tril triu unfold_backward _local_scalar_dense _unsafe_index
    """
)
_CHANGE_DTYPE = names("real imag view_as_real view_as_complex")  # of the views; `view` may
# Products of matrices, convolutions and recurrent layers: what a low precision is there for.
_PRODUCTS = names(
    """
    addbmm addmm addmv addr baddbmm bmm dot linear mm mv vdot _addmm_activation _grouped_mm _scaled_mm mkldnn_linear
    convolution _convolution convolution_overrideable mkldnn_convolution mkldnn_rnn_layer _cudnn_rnn
    _thnn_fused_lstm_cell _thnn_fused_gru_cell _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _transformer_encoder_layer_fwd _native_multi_head_attention
    """
)
# Questions about a tensor (its device), and marks in a profile, are no computation. Higher-order ops hide theirs.
_UNCOUNTED = names("prim profiler")


class OpKind:
    """Facts about an op that instruments need.

    name: `aten::mm`, for any overload; base: that without namespace and without the underscore of an in-place op.
    positions: of the arguments that are tensors or hold some (None: they may be anywhere); leading: how many tensors it
    takes, where those are its first arguments and one tensor is all that it returns, else 0; source: which argument a
    cast casts. is_plain_view: one tensor in, one of the same dtype out. is_counted: whether it is a computation.
    """

    def __init__(self, op: Any) -> None:
        self.op = op
        self.leading = 0
        self.positions: tuple[int, ...] | None = None
        self.writes_into = ""  # "in place" or "out=", where it does
        if isinstance(op, Op):
            schema = schema_of(op)
            self.name = schema.name
            self._read_schema(schema)
        else:
            self.name = str(op)
        namespace, _, base = self.name.rpartition("::")
        self.base = base.rstrip("_") or base
        self.doing = _doing(op, self.base)
        self.is_counted = isinstance(op, Op) and namespace not in _UNCOUNTED
        changes_dtype = self.base in _CHANGE_DTYPE or str(op) == "aten.view.dtype"
        self.is_plain_view = self.doing == "view" and self.leading == 1 and not changes_dtype
        self.is_cast = self.name in ("aten::_to_copy", "aten::copy_", "aten::to")  # `to` in inference mode alone
        self.source = 1 if self.base == "copy" else 0
        self.is_sum = self.name == "aten::add"
        self.is_product = self.base in _PRODUCTS

    def _read_schema(self, schema: Any) -> None:
        arguments = schema.arguments
        if schema.is_mutable:
            self.writes_into = "out=" if any(argument.is_out for argument in arguments) else "in place"
        positions = tuple(index for index, argument in enumerate(arguments) if "Tensor" in str(argument.type))
        if any(arguments[index].kwarg_only for index in positions):
            return
        self.positions = positions
        count = len(positions)
        if count <= 3 and _are_plain(arguments[:count], count) and _are_plain(schema.returns, 1):
            self.leading = count


def _are_plain(items: Sequence[Any], count: int) -> bool:
    """Whether a schema has so many arguments or results here, each one tensor."""
    return [str(item.type) for item in items] == ["Tensor"] * count


KINDS: dict[Any, OpKind] = {}  # by what an OpOverload runs, or by itself: its own hash is slow


def op_kind(op: Any) -> OpKind:
    """The kind of an op."""
    try:
        key = kernel_of(op)
    except AttributeError:  # a higher-order op
        key = op
    kind = KINDS.get(key)
    if kind is None:
        kind = KINDS[key] = OpKind(op)
    return kind


def _doing(op: Any, base: str) -> Doing:
    if base in _COPIES:  # before the views: `to` and `contiguous` may return what they are given
        return "copy"
    if base in _VIEWS or getattr(op, "is_view", False):
        return "view"
    if base in _MAKES or base.startswith(_MAKES_BEGIN):
        return "make"
    return "move" if base in _MOVES or base.endswith("_copy") else "compute"
