"""Defines for each op one call on tiny inputs, and the kernels that show its dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

from amp_recipes.numerics.ops.lists import KERNEL_OF, STANDS_FOR

aten = torch.ops.aten


class Inputs:
    """Makes the inputs of one call: floating ones in the dtypes of the turn, integers as they are.

    dtypes: of the first floating input, the second ...; the last one holds for all that follow.
    empty: allocate only, without values: all that a device that is not here allows.
    aside: a context in which the making itself is not observed.
    Values are uniform in [0.1, 0.9), where log, acos and erfinv are defined, from a generator of our own: the global
    ones do not move.
    """

    def __init__(
        self,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        empty: bool,
        aside: Callable[[], AbstractContextManager],
    ) -> None:
        self._device = device
        self._dtypes = tuple(dtypes)
        self._empty = empty
        self._aside = aside
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.made: list[torch.dtype] = []  # the dtypes of the floating inputs, in the order of the call

    def __call__(self, *shape: int) -> torch.Tensor:
        """A floating input of this shape."""
        return self._floating(shape, lambda: self._uniform(shape))

    def ones(self, *shape: int) -> torch.Tensor:
        """A floating input of ones: the labels of a margin loss."""
        return self._floating(shape, lambda: torch.ones(shape, dtype=torch.float32, device="cpu"))

    def identity(self, size: int, *shape: int) -> torch.Tensor:
        """A floating input: the identity matrix, in another shape."""
        return self._floating(shape, lambda: torch.eye(size, dtype=torch.float32, device="cpu").reshape(shape))

    def positive_definite(self, size: int = 4) -> torch.Tensor:
        """A floating input: a symmetric positive definite matrix."""
        return self._floating((size, size), lambda: self._positive_definite(size))

    def integers(self, values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """An input that autocast has nothing to do with."""
        with self._aside():
            made = torch.tensor(values, dtype=dtype, device="cpu")
            return torch.empty(made.shape, dtype=dtype, device=self._device) if self._empty else made.to(self._device)

    def _floating(self, shape: Sequence[int], values: Callable[[], torch.Tensor]) -> torch.Tensor:
        dtype = self._dtypes[min(len(self.made), len(self._dtypes) - 1)]
        self.made.append(dtype)
        with self._aside():
            if self._empty:
                return torch.empty(shape, dtype=dtype, device=self._device)
            return values().to(self._device, dtype)

    def _uniform(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float32, device="cpu") * 0.8 + 0.1

    def _positive_definite(self, size: int) -> torch.Tensor:
        half = self._uniform((size, size))
        return half + half.T + 4 * size * torch.eye(size, dtype=torch.float32, device="cpu")


Call = Callable[[Inputs], object]

_CLASSES = [0, 1, 2]
_MULTILABEL = [[1, -1, 0, 0], [2, 0, -1, 0], [3, -1, 0, 0]]


def _convolution(kernel: Callable, given: Inputs, *flags: bool) -> object:
    """aten::_convolution, whose two overloads differ in the last flag, allow_tf32."""
    return kernel(given(1, 2, 8), given(3, 2, 3), None, [1], [0], [1], False, [0], 1, *flags)


def _recurrent(op: Callable, gates: int, given: Inputs, states: int = 1) -> object:
    """One layer over three steps, without biases: lstm takes a tuple of states, the others one state."""
    state = tuple(given(1, 1, 4) for _ in range(states))
    weights = [given(4 * gates, 4), given(4 * gates, 4)]
    return op(given(3, 1, 4), state if states > 1 else state[0], weights, False, 1, 0.0, False, False, False)


def _alike(
    namespace: object, names: str, *shapes: tuple[int, ...], after: tuple = (), prefix: str = ""
) -> dict[str, Call]:
    """Functions that take floating inputs of the same shapes, and `after` behind them, by `prefix` and name."""

    def calling(name: str) -> Call:
        return lambda given: getattr(namespace, name)(*(given(*shape) for shape in shapes), *after)

    return {prefix + name: calling(name) for name in names.split()}


def _of_matrix(namespace: object, names: str, prefix: str = "") -> dict[str, Call]:
    """Functions of one positive definite matrix."""

    def calling(name: str) -> Call:
        return lambda given: getattr(namespace, name)(given.positive_definite())

    return {prefix + name: calling(name) for name in names.split()}


def _into(op: Callable, given: Inputs, *others: object, shape: Sequence[int] = (3, 3)) -> torch.Tensor:
    """`op` with out=: a tensor of the dtype of its first input."""
    first = given(3, 3)
    return op(first, *others, out=torch.empty(shape, dtype=first.dtype, device=first.device))


CALLS: dict[str, Call] = {
    # -- matrix products
    **_alike(torch, "mm matmul chain_matmul", (3, 3), (3, 3)),
    **_alike(torch.linalg, "vecdot", (3, 3), (3, 3), prefix="linalg_"),
    **_alike(torch, "dot vdot", (3,), (3,)),
    **_alike(torch, "addmm", (3, 3), (3, 3), (3, 3)),
    "bmm": lambda given: torch.bmm(given(2, 3, 3), given(2, 3, 3)),
    "mv": lambda given: torch.mv(given(3, 3), given(3)),
    "__matmul__": lambda given: given(3, 3) @ given(3, 3),
    "addmv": lambda given: torch.addmv(given(3), given(3, 3), given(3)),
    "addr": lambda given: torch.addr(given(3, 3), given(3), given(3)),
    "addbmm": lambda given: torch.addbmm(given(3, 3), given(2, 3, 3), given(2, 3, 3)),
    "baddbmm": lambda given: torch.baddbmm(given(2, 3, 3), given(2, 3, 3), given(2, 3, 3)),
    "_addmm_activation": lambda given: aten._addmm_activation(given(3), given(3, 3), given(3, 3)),
    "multi_dot": lambda given: torch.linalg.multi_dot([given(3, 3), given(3, 3)]),
    "linear": lambda given: F.linear(given(2, 3), given(4, 3), given(4)),
    "bilinear": lambda given: F.bilinear(given(2, 3), given(2, 3), given(4, 3, 3)),
    "einsum": lambda given: torch.einsum("ij,jk->ik", given(3, 3), given(3, 3)),
    "tensordot": lambda given: torch.tensordot(given(3, 3), given(3, 3), 1),
    # -- convolutions
    "conv1d": lambda given: F.conv1d(given(1, 2, 8), given(3, 2, 3)),
    "conv2d": lambda given: F.conv2d(given(1, 2, 8, 8), given(3, 2, 3, 3)),
    "conv3d": lambda given: F.conv3d(given(1, 2, 5, 5, 5), given(3, 2, 3, 3, 3)),
    "conv_transpose1d": lambda given: F.conv_transpose1d(given(1, 2, 8), given(2, 3, 3)),
    "conv_transpose2d": lambda given: F.conv_transpose2d(given(1, 2, 8, 8), given(2, 3, 3, 3)),
    "conv_transpose3d": lambda given: F.conv_transpose3d(given(1, 2, 5, 5, 5), given(2, 3, 3, 3, 3)),
    "conv_tbc": lambda given: torch.conv_tbc(given(8, 1, 2), given(3, 2, 3), given(3)),
    "convolution": lambda given: aten.convolution(given(1, 2, 8), given(3, 2, 3), None, [1], [0], [1], False, [0], 1),
    "_convolution": lambda given: _convolution(aten._convolution.default, given, False, False, True, True),
    "_convolution.deprecated": lambda given: _convolution(aten._convolution.deprecated, given, False, False, True),
    # -- recurrent networks and attention
    "LSTMCell": lambda given: torch.lstm_cell(given(2, 4), (given(2, 4), given(2, 4)), given(16, 4), given(16, 4)),
    "GRUCell": lambda given: torch.gru_cell(given(2, 4), given(2, 4), given(12, 4), given(12, 4)),
    "RNNCell": lambda given: torch.rnn_tanh_cell(given(2, 4), given(2, 4), given(4, 4), given(4, 4)),
    **_alike(torch, "rnn_relu_cell", (2, 4), (2, 4), (4, 4), (4, 4)),
    **_alike(aten, "_thnn_fused_lstm_cell", (2, 16), (2, 16), (2, 4)),
    **_alike(aten, "_thnn_fused_gru_cell", (2, 12), (2, 12), (2, 4)),
    "lstm": lambda given: _recurrent(torch.lstm, 4, given, states=2),
    "gru": lambda given: _recurrent(torch.gru, 3, given),
    "rnn_tanh": lambda given: _recurrent(torch.rnn_tanh, 1, given),
    "mkldnn_rnn_layer": lambda given: torch.mkldnn_rnn_layer(
        *(given(3, 1, 4), given(16, 4), given(16, 4), given(16), given(16), given(1, 4), given(1, 4)),
        *(False, [], 2, 4, 1, True, False, False, False),
    ),
    **_alike(F, "scaled_dot_product_attention", *[(1, 1, 4, 8)] * 3),
    **_alike(aten, "_scaled_dot_product_flash_attention", *[(1, 1, 4, 8)] * 3),
    "_native_multi_head_attention": lambda given: aten._native_multi_head_attention(
        *(given(1, 4, 8), given(1, 4, 8), given(1, 4, 8), 8, 2), given(24, 8), given(24), given(8, 8), given(8)
    ),
    "multi_head_attention_forward": lambda given: F.multi_head_attention_forward(
        *(given(4, 1, 8), given(4, 1, 8), given(4, 1, 8), 8, 2, given(24, 8), given(24), None, None, False, 0.0),
        *(given(8, 8), given(8)),
    ),
    "embedding": lambda given: F.embedding(given.integers(_CLASSES), given(5, 4)),
    # -- activations, softmax
    **_alike(F, "relu gelu silu softplus", (4,)),
    **_alike(torch, "sigmoid tanh", (4,)),
    **_alike(F, "softmax log_softmax softmin", (3, 4), after=(-1,)),
    **_alike(torch, "logsumexp", (3, 4), after=(-1,)),
    "prelu": lambda given: F.prelu(given(3), given(1)),
    # -- normalisation
    "layer_norm": lambda given: F.layer_norm(given(2, 4), (4,), given(4), given(4)),
    "native_layer_norm": lambda given: aten.native_layer_norm(given(2, 4), (4,), given(4), given(4), 1e-5),
    "rms_norm": lambda given: F.rms_norm(given(2, 4), (4,), given(4)),
    "group_norm": lambda given: F.group_norm(given(2, 4), 2, given(4), given(4)),
    "batch_norm": lambda given: F.batch_norm(given(4, 4), None, None, given(4), given(4), training=True),
    "instance_norm": lambda given: F.instance_norm(given(2, 4, 4), None, None, given(4), given(4)),
    "normalize": lambda given: F.normalize(given(3, 4)),
    "renorm": lambda given: torch.renorm(given(3, 4), 2, 0, 0.5),
    # -- element by element
    **_alike(torch, "exp expm1 log log2 log10 log1p acos asin cosh sinh tan sin cos sqrt", (4,)),
    **_alike(torch, "rsqrt reciprocal erfinv", (4,)),
    **_alike(torch, "pow atan2 polar", (3,), (3,)),
    **_alike(torch, "addcdiv addcmul", (3,), (3,), (3,)),
    "__pow__": lambda given: given(4) ** 2,
    "__rpow__": lambda given: 2 ** given(4),
    "__rdiv__": lambda given: given(4).__rdiv__(1.0),
    "__rtruediv__": lambda given: 1.0 / given(4),
    "add": lambda given: given(4) + given(4),
    "mul": lambda given: given(4) * given(4),
    "div": lambda given: given(4) / given(4),
    "where": lambda given: torch.where(given.integers([True, False], torch.bool), given(2), given(2)),
    "cross": lambda given: torch.cross(given(3), given(3), dim=0),
    "linalg_cross": lambda given: torch.linalg.cross(given(3), given(3)),
    "view_as_complex": lambda given: torch.view_as_complex(given(3, 2)),
    "fake_quantize_per_tensor_affine": lambda given: torch.fake_quantize_per_tensor_affine(given(3), 0.1, 0, 0, 255),
    # -- reductions and distances
    **_alike(torch, "sum mean var trace", (4, 4)),
    **_alike(torch, "prod", (3,)),
    **_alike(torch, "cumsum cumprod", (4,), after=(0,)),
    **_alike(torch, "quantile nanquantile", (5,), after=(0.5,)),
    **_alike(torch, "dist", (3,), (3,)),
    **_alike(torch, "cdist", (3, 2), (3, 2)),
    **_alike(F, "pdist", (3, 2)),
    **_alike(F, "cosine_similarity", (3, 4), (3, 4)),
    **_alike(torch.linalg, "vector_norm matrix_norm", (3, 4), prefix="linalg_"),
    "norm": lambda given: given(3, 4).norm(),
    # -- joining, indexing
    "cat": lambda given: torch.cat([given(2), given(2)]),
    "stack": lambda given: torch.stack([given(2), given(2)]),
    "index_copy": lambda given: given(3).index_copy(0, given.integers([0]), given(1)),
    "index_put": lambda given: given(3).index_put((given.integers([0]),), given(1)),
    "scatter_add": lambda given: given(3).scatter_add(0, given.integers([0]), given(1)),
    # -- losses
    **_alike(F, "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss", (3,), (3,)),
    **_alike(F, "binary_cross_entropy binary_cross_entropy_with_logits", (3,), (3,)),
    **_alike(F, "triplet_margin_loss", (3, 4), (3, 4), (3, 4)),
    "nll_loss": lambda given: F.nll_loss(given(3, 4), given.integers(_CLASSES)),
    "nll_loss2d": lambda given: F.nll_loss(given(1, 4, 3, 1), given.integers([[[0], [1], [2]]])),
    "cross_entropy": lambda given: F.cross_entropy(given(3, 4), given.integers(_CLASSES)),
    "cross_entropy_loss": lambda given: aten.cross_entropy_loss(given(3, 4), given.integers(_CLASSES)),
    "kl_div": lambda given: F.kl_div(given(3), given(3), reduction="sum"),
    "soft_margin_loss": lambda given: F.soft_margin_loss(given(3), given.ones(3)),
    "hinge_embedding_loss": lambda given: F.hinge_embedding_loss(given(3), given.ones(3)),
    "cosine_embedding_loss": lambda given: F.cosine_embedding_loss(given(3, 4), given(3, 4), given.ones(3)),
    "margin_ranking_loss": lambda given: F.margin_ranking_loss(given(3), given(3), given.ones(3)),
    "multi_margin_loss": lambda given: F.multi_margin_loss(given(3, 4), given.integers(_CLASSES)),
    "multilabel_margin_loss": lambda given: F.multilabel_margin_loss(given(3, 4), given.integers(_MULTILABEL)),
    "multilabel_margin_loss_forward": lambda given: aten.multilabel_margin_loss_forward(
        given(3, 4), given.integers(_MULTILABEL), 1
    ),
    "ctc_loss": lambda given: F.ctc_loss(
        given(6, 1, 5), given.integers([[1, 2]]), given.integers([6]), given.integers([2])
    ),
    # -- pooling, padding, sampling
    **_alike(F, "max_pool2d avg_pool2d adaptive_avg_pool2d", (1, 1, 4, 4), after=(2,)),
    **_alike(F, "avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d", (1, 1, 4, 4, 4), after=(2,)),
    "max_unpool2d": lambda given: F.max_unpool2d(given(1, 1, 1, 1), given.integers([[[[0]]]]), 2),
    "max_unpool3d": lambda given: F.max_unpool3d(given(1, 1, 1, 1, 1), given.integers([[[[[0]]]]]), 2),
    "fractional_max_pool2d": lambda given: aten.fractional_max_pool2d(
        given(1, 1, 6, 6), [2, 2], [3, 3], given(1, 1, 2)
    ),
    "fractional_max_pool3d": lambda given: aten.fractional_max_pool3d(
        given(1, 1, 6, 6, 6), [2, 2, 2], [3, 3, 3], given(1, 1, 3)
    ),
    "reflection_pad1d": lambda given: F.pad(given(1, 1, 4), (1, 1), "reflect"),
    "reflection_pad2d": lambda given: F.pad(given(1, 1, 4, 4), (1, 1, 1, 1), "reflect"),
    "replication_pad1d": lambda given: F.pad(given(1, 1, 4), (1, 1), "replicate"),
    "replication_pad2d": lambda given: F.pad(given(1, 1, 4, 4), (1, 1, 1, 1), "replicate"),
    "replication_pad3d": lambda given: F.pad(given(1, 1, 4, 4, 4), (1, 1, 1, 1, 1, 1), "replicate"),
    **_alike(aten, "upsample_nearest1d _upsample_nearest_exact1d", (1, 1, 4), after=([8],)),
    **_alike(aten, "upsample_nearest2d _upsample_nearest_exact2d", (1, 1, 4, 4), after=([8, 8],)),
    **_alike(aten, "upsample_nearest3d _upsample_nearest_exact3d", (1, 1, 4, 4, 4), after=([8, 8, 8],)),
    **_alike(aten, "upsample_linear1d", (1, 1, 4), after=([8], False)),
    **_alike(aten, "upsample_bilinear2d upsample_bicubic2d", (1, 1, 4, 4), after=([8, 8], False)),
    **_alike(aten, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa", (1, 1, 4, 4), after=([8, 8], False)),
    **_alike(aten, "upsample_trilinear3d", (1, 1, 4, 4, 4), after=([8, 8, 8], False)),
    # Volumes: for images CUDA asks cuDNN first, which needs the device itself.
    "grid_sample": lambda given: F.grid_sample(given(1, 1, 4, 4, 4), given(1, 4, 4, 4, 3), align_corners=False),
    **_alike(torch, "grid_sampler grid_sampler_3d", (1, 1, 4, 4, 4), (1, 4, 4, 4, 3), after=(0, 0, False)),
    **_alike(torch, "grid_sampler_2d", (1, 1, 4, 4), (1, 4, 4, 2), after=(0, 0, False)),
    **_alike(aten, "_grid_sampler_2d_cpu_fallback", (1, 1, 4, 4), (1, 4, 4, 2), after=(0, 0, False)),
    # -- Fourier transforms
    "stft": lambda given: torch.stft(given(64), 16, window=given(16), return_complex=True),
    **_alike(torch.fft, "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2", (4, 4), prefix="fft_"),
    **_alike(torch.fft, "rfftn irfftn hfft ihfft", (4, 4), prefix="fft_"),
    # -- linear algebra
    **_of_matrix(torch.linalg, "cond matrix_rank cholesky cholesky_ex svdvals svd eigvals", prefix="linalg_"),
    **_of_matrix(torch.linalg, "eigvalsh eig eigh inv inv_ex qr", prefix="linalg_"),
    **_of_matrix(torch, "cholesky cholesky_inverse inverse"),
    **_of_matrix(torch, "_lu_with_info"),
    "linalg_solve": lambda given: torch.linalg.solve(given.positive_definite(), given(4)),
    "linalg_lstsq": lambda given: torch.linalg.lstsq(given.positive_definite(), given(4, 1)),
    "linalg_householder_product": lambda given: torch.linalg.householder_product(given(4, 3), given(3)),
    "linalg_tensorinv": lambda given: torch.linalg.tensorinv(given.identity(4, 2, 2, 4), ind=2),
    "linalg_tensorsolve": lambda given: torch.linalg.tensorsolve(given.identity(4, 2, 2, 4), given(2, 2)),
    "cholesky_solve": lambda given: torch.cholesky_solve(given(4, 1), given.positive_definite()),
    **_alike(torch, "qr svd geqrf", (4, 3)),
    "pinverse": lambda given: torch.pinverse(given(3, 2)),
    "lu_solve": lambda given: torch.lu_solve(
        given(4, 1), given.positive_definite(), given.integers([1, 2, 3, 4], torch.int32)
    ),
    "orgqr": lambda given: torch.orgqr(given(4, 3), given(3)),
    "ormqr": lambda given: torch.ormqr(given(4, 3), given(3), given(4, 2)),
    "triangular_solve": lambda given: torch.triangular_solve(given(4, 1), given.positive_definite()),
}
"""Each op by the name of the documented lists, or by its own where no list has it."""

CPU_ONLY = frozenset({"mkldnn_rnn_layer", "_grid_sampler_2d_cpu_fallback"})
GPU_ONLY = frozenset({"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"})

NOT_ELIGIBLE: dict[str, Call] = {
    "addmm_ (in place)": lambda given: given(3, 3).addmm_(given(3, 3), given(3, 3)),
    "exp_ (in place)": lambda given: given(4).exp_(),
    "mm (out=)": lambda given: _into(torch.mm, given, given(3, 3)),
    "prod (out=)": lambda given: _into(torch.prod, given, 1, shape=(3,)),
    "softmax (dtype=)": lambda given: F.softmax(given(3, 4), -1, dtype=torch.float64),
    "sum (dtype=)": lambda given: torch.sum(given(3, 4), dtype=torch.float64),
    "prod (dtype=)": lambda given: torch.prod(given(3, 4), dtype=torch.float64),
    "mm (float64)": lambda given: torch.mm(given(3, 3).double(), given(3, 3).double()),
    "mse_loss (float64)": lambda given: F.mse_loss(given(3).double(), given(3).double()),
    "mm (int64)": lambda given: torch.mm(given.integers([[1]]), given.integers([[1]])),
}
"""Calls that the documentation says autocast leaves alone, with the reason in brackets."""

_FOURIER = ("_fft_r2c", "_fft_c2c", "_fft_c2r")
_RECURRENT = ("mm", "addmm", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
_BATCH_NORM = (
    *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    *("cudnn_batch_norm", "miopen_batch_norm"),
)

COMPOSED_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("matmul", "__matmul__", "chain_matmul", "multi_dot", "tensordot"), ("mm",)),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell", "rnn_relu_cell", "lstm", "gru", "rnn_tanh"), _RECURRENT),
    **dict.fromkeys(("batch_norm", "instance_norm"), _BATCH_NORM),
    **dict.fromkeys(("cosine_similarity", "linalg_matrix_norm"), ("linalg_vector_norm",)),
    **dict.fromkeys((name for name in CALLS if name.startswith("fft_")), _FOURIER),
    **dict.fromkeys(("cross_entropy", "cross_entropy_loss"), ("_log_softmax", "nll_loss_forward")),
    "linear": ("addmm",),
    "einsum": ("bmm",),
    "linalg_vecdot": ("mul", "sum"),
    **dict.fromkeys((f"conv{way}{size}d" for way in ("", "_transpose") for size in (1, 2, 3)), ("convolution",)),
    # Where the device is not here, no fused kernel can be chosen, and torch traces the plain formula.
    "scaled_dot_product_attention": (
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_safe_softmax"),
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "multi_head_attention_forward": ("addmm", "bmm", "baddbmm"),
    "cross": ("linalg_cross",),
    "rms_norm": ("_fused_rms_norm", "rsqrt"),
    **dict.fromkeys(("quantile", "nanquantile"), ("sort",)),
    "l1_loss": ("sub", "abs"),
    "kl_div": ("xlogy", "sub"),
    "poisson_nll_loss": ("exp", "sub"),
    "hinge_embedding_loss": ("where", "clamp_min_"),
    "cosine_embedding_loss": ("mul", "sum"),
    "margin_ranking_loss": ("sub", "clamp_min_"),
    "triplet_margin_loss": ("norm",),
    "multilabel_margin_loss": ("multilabel_margin_loss_forward",),
    **dict.fromkeys(("grid_sample", "grid_sampler"), ("grid_sampler_3d",)),
    "stft": ("_fft_r2c",),
    **dict.fromkeys(("linalg_cond", "linalg_matrix_rank", "linalg_svdvals", "svd"), ("_linalg_svd",)),
    "linalg_eigvals": ("linalg_eig",),
    "linalg_eigvalsh": ("_linalg_eigh",),
    "linalg_cholesky": ("linalg_cholesky_ex",),
    **dict.fromkeys(("linalg_inv", "linalg_tensorinv", "inverse"), ("linalg_inv_ex",)),
    "linalg_tensorsolve": ("_linalg_solve_ex",),
    "pinverse": ("linalg_pinv",),
    "qr": ("linalg_qr",),
    "orgqr": ("linalg_householder_product",),
}
"""Ops that dispatch to kernels of other names -> those of them that show in which dtype the op itself runs."""


def kernels_of(name: str) -> frozenset[str]:
    """The aten kernels, without overload, one of which runs when this entry of CALLS or NOT_ELIGIBLE is called."""
    op = name.partition(" ")[0].partition(".")[0]
    stand_ins = STANDS_FOR.get(op, (op,))
    own = {*stand_ins, *(kernel for kernel, of in KERNEL_OF.items() if of in stand_ins)}
    return frozenset(COMPOSED_OF.get(op, own))
