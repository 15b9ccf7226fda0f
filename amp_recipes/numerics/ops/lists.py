"""Lists the precision of each op under autocast: torch's documented lists, and additions to them.

The lists are those of the torch.amp reference of torch 2.13 ("Autocast Op Reference"), word for word; on CPU they hold
for bfloat16 and float16 alike. What no list names runs in the dtype of its inputs, as do calls in place, with out= or
with an explicit dtype=, and whatever is float64 or not floating.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from amp_recipes.errors import PrecisionError

DOCUMENTED_TORCH = "2.13"

LOWER_PRECISION = "lower_precision"  # run in the autocast dtype, whatever the inputs are
FLOAT32 = "float32"  # what comes in is cast up to float32
WIDEST = "widest"  # what comes in is cast to the widest dtype among the inputs
RAISES = "raises"  # refused under autocast


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DOCUMENTED: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        LOWER_PRECISION: _names(
            """
            __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d
            conv_transpose1d conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell
            """
        ),
        FLOAT32: _names(
            """
            __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh
            cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1
            group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log_softmax log10 log1p log2
            margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist
            poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus
            sum renorm tan triplet_margin_loss
            """
        ),
        WIDEST: _names("addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot"),
    },
    "xpu": {
        LOWER_PRECISION: _names(
            """
            addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d
            conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv RNNCell
            """
        ),
        FLOAT32: _names(
            """
            __pow__ __rdiv__ __rpow__ __rtruediv__ binary_cross_entropy_with_logits cosine_embedding_loss
            cosine_similarity cumsum dist exp group_norm hinge_embedding_loss kl_div l1_loss layer_norm log
            log_softmax margin_ranking_loss nll_loss normalize poisson_nll_loss pow reciprocal rsqrt soft_margin_loss
            softmax softmin sum triplet_margin_loss
            """
        ),
        WIDEST: _names("bilinear cross grid_sample index_put scatter_add tensordot"),
    },
    "cpu": {
        LOWER_PRECISION: _names(
            """
            conv1d conv2d conv3d bmm mm linalg_vecdot baddbmm addmm addbmm linear matmul _convolution conv_tbc
            mkldnn_rnn_layer conv_transpose1d conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention
            _native_multi_head_attention
            """
        ),
        FLOAT32: _names(
            """
            avg_pool3d binary_cross_entropy grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d
            polar prod quantile nanquantile stft cdist trace view_as_complex cholesky cholesky_inverse cholesky_solve
            inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d
            reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d mse_loss
            cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss cross_entropy_loss l1_loss
            huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss kl_div
            multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn
            fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond
            linalg_matrix_rank linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv
            linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf
            _lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
            multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq
            linalg_inv_ex
            """
        ),
        WIDEST: _names("cat stack index_copy"),
    },
}
"""Device type -> policy -> the names that the documentation lists, in its order."""

_UPSAMPLING = _names(
    """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """
)
_UNDOCUMENTED_ON_GPUS = {
    LOWER_PRECISION: _names(
        """
        _convolution convolution conv_tbc einsum linalg_vecdot scaled_dot_product_attention
        _scaled_dot_product_flash_attention _thnn_fused_lstm_cell _thnn_fused_gru_cell
        """
    ),
    FLOAT32: (
        *_names("native_layer_norm rms_norm logsumexp frobenius_norm nuclear_norm linalg_matrix_norm"),
        *_names("huber_loss nll_loss2d"),
        *_UPSAMPLING,
    ),
    WIDEST: ("vdot",),
    RAISES: ("binary_cross_entropy",),
}

UNDOCUMENTED: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {LOWER_PRECISION: ("_addmm_activation",), FLOAT32: ("smooth_l1_loss",)},
    "cuda": {
        **_UNDOCUMENTED_ON_GPUS,
        LOWER_PRECISION: (
            *_UNDOCUMENTED_ON_GPUS[LOWER_PRECISION],
            # The last one in builds with cuDNN only.
            *("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),
        ),
    },
    "xpu": {
        LOWER_PRECISION: (*_UNDOCUMENTED_ON_GPUS[LOWER_PRECISION], "prelu"),
        FLOAT32: (
            *_UNDOCUMENTED_ON_GPUS[FLOAT32],
            *_names("acos asin cosh sinh tan erfinv expm1 log10 log1p log2 softplus prod cumprod renorm cdist pdist"),
            *_names("norm mse_loss smooth_l1_loss multi_margin_loss multilabel_margin_loss"),
        ),
        WIDEST: (*_UNDOCUMENTED_ON_GPUS[WIDEST], *_names("addcdiv addcmul atan2 dot")),
        RAISES: _UNDOCUMENTED_ON_GPUS[RAISES],
    },
}
"""Device type -> policy -> aten ops that torch 2.13 has an autocast kernel for, and the documentation leaves out."""

STANDS_FOR: dict[str, tuple[str, ...]] = {
    "__matmul__": ("matmul",),
    "__pow__": ("pow",),
    "__rpow__": ("pow",),
    "__rdiv__": ("reciprocal",),
    "__rtruediv__": ("reciprocal",),
    "GRUCell": ("gru_cell",),
    "LSTMCell": ("lstm_cell",),
    "RNNCell": ("rnn_tanh_cell", "rnn_relu_cell"),
    "multi_dot": ("linalg_multi_dot",),
    "grid_sample": ("grid_sampler",),
    "cross_entropy": ("nll_loss",),
    "softmin": ("softmax",),
    "normalize": ("linalg_vector_norm",),
}
"""Documented name that is Python's -> the aten ops that it calls and that have the autocast kernel."""

_KERNELS = {
    "LSTMCell": "lstm_cell",
    "GRUCell": "gru_cell",
    "RNNCell": "rnn_tanh_cell rnn_relu_cell",
    "multi_dot": "linalg_multi_dot",
    "cross_entropy": "cross_entropy_loss",
    "grid_sample": "grid_sampler grid_sampler_2d grid_sampler_3d",
    "conv2d": "convolution convolution_overrideable mkldnn_convolution miopen_convolution",
    "softmax": "_softmax",
    "log_softmax": "_log_softmax",
    "prelu": "_prelu_kernel",
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
    "rms_norm": "_fused_rms_norm",
    "norm": "linalg_vector_norm",
    "bilinear": "_trilinear",
    "cdist": "_cdist_forward",
    "pdist": "_pdist_forward",
    "ctc_loss": "_ctc_loss _cudnn_ctc_loss",
    "nll_loss": "nll_loss_forward nll_loss_nd",
    "nll_loss2d": "nll_loss2d_forward",
    "multilabel_margin_loss": "multilabel_margin_loss_forward",
    "max_pool3d": "max_pool3d_with_indices",
    "max_pool2d": "max_pool2d_with_indices",
    "adaptive_avg_pool2d": "_adaptive_avg_pool2d",
    "adaptive_avg_pool3d": "_adaptive_avg_pool3d",
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_attention_math"
    ),
    "fake_quantize_per_tensor_affine": "fake_quantize_per_tensor_affine_cachemask",
    "fft_rfft": "_fft_r2c",
    "fft_irfft": "_fft_c2r",
    "fft_fft": "_fft_c2c",
    "linalg_svd": "_linalg_svd",
    "linalg_eigh": "_linalg_eigh",
    "linalg_solve": "_linalg_solve_ex",
    "_lu_with_info": "linalg_lu_factor_ex",
    "lu_solve": "linalg_lu_solve",
    "pinverse": "linalg_pinv",
}
KERNEL_OF = {kernel: op for op, kernels in _KERNELS.items() for kernel in kernels.split()}
"""An aten op that is reached only through another, or a second name -> the op on whose list it stands."""


def documented(device_type: str) -> Mapping[str, str]:
    """Op name -> "lower_precision", "float32" or "widest", as the torch.amp reference lists it for a device type.

    Raises PrecisionError for a device type that has no list there.
    """
    return MappingProxyType(_of(device_type, _DOCUMENTED_POLICIES))


def undocumented(device_type: str) -> Mapping[str, str]:
    """Op name -> policy ("raises" too) of the aten ops that torch casts and its reference leaves out.

    Raises PrecisionError for a device type that has no documented list either.
    """
    return MappingProxyType(_of(device_type, _UNDOCUMENTED_POLICIES))


def policy(device_type: str, op_name: str) -> str | None:
    """Return the effect of autocast on an op on this device type; None: it runs in the dtype of its inputs.

    op_name: a documented name, or an aten one as dispatch shows it, with or without namespace and overload ("softmax",
    "aten::softmax.int", "aten._softmax.default", "native_layer_norm"). In-place and out= variants are never cast.
    Returns "lower_precision", "float32" or "widest" as documented, or as torch does it where the documentation leaves
    the op out; then also "raises" (binary_cross_entropy on CUDA). A kernel that several ops share has the policy of
    the op that bears its name: "mm" says nothing of a tensordot that calls it. CUDA's cross_entropy is float32 here, as
    listed, though torch casts only a part of it: `op_reference` says which.
    Raises PrecisionError for a device type that has no documented list.
    """
    lists = (_of(device_type, _DOCUMENTED_POLICIES), _of(device_type, _UNDOCUMENTED_POLICIES))
    name, _, overload = op_name.removeprefix("aten::").removeprefix("aten.").partition(".")
    if overload.endswith("out") or overload == "output":
        return None
    for candidate in (name, *([KERNEL_OF[name]] if name in KERNEL_OF else ()), *_SPOKEN_FOR.get(name, ())):
        for policies in lists:
            if candidate in policies:
                return policies[candidate]
    return None


def _of(device_type: str, policies: dict[str, dict[str, str]]) -> dict[str, str]:
    if device_type in policies:
        return policies[device_type]
    *others, last = policies
    message = (
        f"torch documents no autocast lists for device type {device_type!r}; expected {', '.join(others)} or {last}"
    )
    nearest = difflib.get_close_matches(str(device_type).lower(), policies, n=1)
    raise PrecisionError(f"{message}. Did you mean {nearest[0]}?" if nearest else message)


def _by_name(lists: dict[str, dict[str, tuple[str, ...]]]) -> dict[str, dict[str, str]]:
    return {
        device_type: {name: policy for policy, names in by_policy.items() for name in names}
        for device_type, by_policy in lists.items()
    }


_DOCUMENTED_POLICIES = _by_name(DOCUMENTED)
_UNDOCUMENTED_POLICIES = _by_name(UNDOCUMENTED)
# Where a list has aten's name only: Python's name for it, and the kernel's.
_SPOKEN_FOR = {
    **{name: ops for name, ops in STANDS_FOR.items() if name != "cross_entropy"},
    "cross_entropy": ("cross_entropy_loss",),
    "grid_sampler_2d": ("grid_sampler",),
}
