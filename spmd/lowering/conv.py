"""Convolutions: one `conv_general_dilated` for all ranks, transposed or not, grouped or not. The backward is its transpose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower
from spmd.lowering.matmul import is_narrower


def _per_dim(values: Any, count: int) -> tuple[int, ...]:
    """One value per spatial dim. torch also accepts a single value for all of them."""
    return tuple(values) * count if len(values) == 1 else tuple(values)


def _require_channels(input: Any, weight: Any, transposed: bool, groups: int) -> None:
    """Raise torch's error for a wrong number of channels."""
    wanted = weight.shape[0] if transposed else weight.shape[1] * groups
    if input.shape[1] != wanted:
        raise RuntimeError(
            f"Given groups={groups}, weight of size {list(weight.shape)}, expected input{list(input.shape)} "
            f"to have {wanted} channels, but got {input.shape[1]} channels instead"
        )


def _require_output(size: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any) -> None:
    """Raise torch's error for a transposed convolution with an empty output. The CPU does not raise it for groups."""
    dims = zip(size, kernel, stride, padding, dilation, output_padding, strict=True)
    out = [(n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in dims]
    if min(out) <= 0:
        given, made = (" x ".join(map(str, sizes if len(sizes) > 1 else (1, *sizes))) for sizes in (size, out))
        raise RuntimeError(
            f"Given input size per channel: ({given}). Calculated output size per channel: ({made}). Output size is too small"
        )


def _require_output_padding(output_padding: Any, stride: Any, dilation: Any) -> None:
    """Raise torch's error for an output padding of at least the stride and the dilation."""
    if all(more < s or more < d for more, s, d in zip(output_padding, stride, dilation, strict=True)):
        return
    if len(stride) == 1:  # torch's kernel is that of two dims
        output_padding, stride, dilation = (0, *output_padding), (1, *stride), (1, *dilation)
    dims = ("depth", "height", "width")[-len(stride) :]
    named = {"output_padding": output_padding, "stride": stride, "dilation": dilation}
    got = " ".join(f"{name}_{dim}: {n}" for name, sizes in named.items() for dim, n in zip(dims, sizes, strict=True))
    raise RuntimeError(f"output padding must be smaller than either stride or dilation, but got {got}")


def _require_valid_padding(input: Any, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any) -> None:
    if any(n < 0 for n in padding):
        raise RuntimeError("negative padding is not supported")


@lower("convolution", "convolution_overrideable", check=_require_valid_padding)
def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """input [N, C, ...] or [C, ...]; weight [O, C / groups, ...], or [C, O / groups, ...] if transposed."""
    rank = weight.ndim - 2
    if input.ndim == rank + 1:
        return convolution(input[None], weight, bias, stride, padding, dilation, transposed, output_padding, groups)[0]
    _require_channels(input, weight, transposed, groups)
    stride, padding, dilation, output_padding = (_per_dim(values, rank) for values in (stride, padding, dilation, output_padding))
    if transposed:
        _require_output_padding(output_padding, stride, dilation)
    if transposed and groups == 1 and input.size:
        _require_output(input.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding)
    out = _convolved(input, weight, stride, padding, dilation, output_padding if transposed else None, groups)
    return out if bias is None else out + bias.reshape((-1,) + (1,) * rank)


def _convolved(
    input: Any,
    weight: Any,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...] | None,
    groups: int,
) -> Any:
    """The convolution without bias. With an output padding it is transposed: a convolution over the input dilated by the stride."""
    spatial = tuple(range(2, weight.ndim))
    numbers = lax.ConvDimensionNumbers((0, 1, *spatial), (0, 1, *spatial), (0, 1, *spatial))
    if output_padding is None:
        return lax.conv_general_dilated(
            input,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            dimension_numbers=numbers,
            feature_group_count=groups,
        )
    if groups > 1:  # [G * I, O, ...] to [G * O, I, ...]: swap the channel dims within each group
        weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = jnp.swapaxes(weight, 1, 2).reshape(-1, weight.shape[1], *weight.shape[3:])
    else:
        weight = jnp.swapaxes(weight, 0, 1)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    return lax.conv_general_dilated(
        input,
        jnp.flip(weight, spatial),
        (1,) * len(spatial),
        [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


@lower("convolution_backward", told=("reduce_dtype",))
def convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Any,
    reduce_dtype: Any = None,
) -> Any:
    """Gradients of input, weight and bias, None where `output_mask` is False. The convolution is linear in each of them."""

    def product(x: Any, w: Any) -> Any:
        return convolution(x, w, None, stride, padding, dilation, transposed, output_padding, groups)

    if output_mask[1] and is_narrower(weight, reduce_dtype):  # lax has no convolution of narrow operands with a wide result
        wide = (grad_output.astype(reduce_dtype), input.astype(reduce_dtype), weight.astype(reduce_dtype))
        settings = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups)
        _, grad_weight, _ = convolution_backward(*wide, *settings, (False, True, False))
        grad_input, _, grad_bias = convolution_backward(grad_output, input, weight, *settings, (output_mask[0], False, output_mask[2]))
        return grad_input, grad_weight, grad_bias
    grad_input = jax.linear_transpose(lambda x: product(x, weight), input)(grad_output)[0] if output_mask[0] else None
    grad_weight = jax.linear_transpose(lambda w: product(input, w), weight)(grad_output)[0] if output_mask[1] else None
    if not output_mask[2]:
        return grad_input, grad_weight, None
    channel = grad_output.ndim - weight.ndim + 1
    return grad_input, grad_weight, jnp.sum(grad_output, tuple(i for i in range(grad_output.ndim) if i != channel))


@lower("conv_tbc")
def conv_tbc(self: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    """One-dimensional convolution over time: self [T, B, I], weight [K, I, O]."""
    numbers = lax.conv_dimension_numbers(self.shape, weight.shape, ("HNC", "HIO", "HNC"))
    return lax.conv_general_dilated(self, weight, (1,), [(pad, pad)], dimension_numbers=numbers) + bias
