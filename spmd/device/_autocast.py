"""`torch.autocast("jax", dtype=...)`: which ops run in the low dtype, in float32, or in the widest dtype of their inputs.

The lists are the ones that PyTorch's accelerator backends register (`ATen/autocast_mode.h`: AT_FORALL_LOWER_PRECISION_FP,
AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE). `tests/device/test_autocast.py` compares them with the header
of the installed torch. Float64 and integer tensors are never cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.base._torch import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard, OpOverload, torch_at_least
from spmd.lowering._registry import exists, resolve

LOW = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
]
FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    *(["rms_norm"] if torch_at_least("2.12") else []),
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
FLOAT32_BY_DTYPE = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
WIDEST = ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add"]

# Ops that torch decomposes and this device does not: the cast that torch applies to their parts is applied to the whole op.
WHOLE_IN_FLOAT32 = ["cross_entropy_loss", "nll_loss_nd", "ctc_loss.IntList", "ctc_loss.Tensor"]
WHOLE_IN_FLOAT32_BY_DTYPE = ["special_softmax", "special_log_softmax"]
# Ops with several products and sums that autocast to different dtypes: they are decomposed.
DECOMPOSED = [
    "_scaled_dot_product_attention_math",
    "_weight_norm",
    "lstm.input",
    "lstm.data",
    "gru.input",
    "gru.data",
    "rnn_tanh.input",
    "rnn_tanh.data",
    "rnn_relu.input",
    "rnn_relu.data",
]

_KEY = DispatchKey.AutocastPrivateUse1  # pyright: ignore[reportAttributeAccessIssue]
_BELOW = DispatchKeySet(_KEY)
_LOW_DTYPES = (torch.float16, torch.bfloat16)


def kernels() -> dict[str, Callable[..., Any]]:
    """The autocast kernel of every listed overload that the installed torch has."""
    made: dict[str, Callable[..., Any]] = {}
    kinds = (
        (LOW, _in_low),
        (FLOAT32 + WHOLE_IN_FLOAT32, _in_float32),
        (FLOAT32_BY_DTYPE + WHOLE_IN_FLOAT32_BY_DTYPE, _in_float32_by_dtype),
        (WIDEST, _in_widest),
        (DECOMPOSED, _decomposed),
    )
    for names, kind in kinds:
        for name in names:
            if exists(name):
                made[name] = kind(resolve(name))
    made["binary_cross_entropy"] = _refused
    return made


def _in_low(op: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _called(op, args, kwargs, torch.get_autocast_dtype("jax"))

    return kernel


def _in_float32(op: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _called(op, args, kwargs, torch.float32)

    return kernel


def _in_float32_by_dtype(op: OpOverload) -> Callable[..., Any]:
    """Kernel of an op that takes the dtype to compute in as an argument; a dtype that the caller passes takes precedence."""
    names = [a.name for a in op._schema.arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        given = kwargs.get("dtype") if len(args) <= position else args[position]
        if given is None and isinstance(first, torch.Tensor) and first.dtype in _LOW_DTYPES:
            if len(args) > position:
                args = (*args[:position], torch.float32, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return _called(op, args, kwargs, None)

    return kernel


def _in_widest(op: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtypes = [a.dtype for a in _tensors(args) if _is_eligible(a)]
        return _called(op, args, kwargs, torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("jax"))

    return kernel


def _decomposed(op: OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.decompose(*args, **kwargs)

    return kernel


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast\n"
        "  the sigmoid before them may have saturated in 16 bits\n"
        "  fix: use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def _called(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> Any:
    with ExcludeDispatchKeyGuard(_BELOW):
        if dtype is None:
            return op(*args, **kwargs)
        return op(*(_cast(a, dtype) for a in args), **{n: _cast(a, dtype) for n, a in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if _is_eligible(value) and value.dtype != dtype else value
    if isinstance(value, list | tuple):
        return [_cast(v, dtype) for v in value]
    return value


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "jax" and tensor.is_floating_point() and tensor.dtype != torch.float64


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)]
