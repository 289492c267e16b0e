"""Drops attention masks that are equivalent to `is_causal` or mask nothing, because fused kernels take no mask.

While they are traced, libraries build a causal mask from positions instead of passing `is_causal=True`. The mask's values follow
from constants, so they are known during the trace.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

from spmd.base._convert import exact_dtypes
from spmd.base._jax import known_value
from spmd.device._storage import buffer_of, is_device_tensor, load, once, recording, trace_setting
from spmd.device._whole import WholeOp


class Attention(WholeOp):
    """`scaled_dot_product_attention`; on platforms with fused kernels, a mask that `is_causal` can replace is dropped."""

    def __call__(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **kwargs: Any
    ) -> Any:
        """Autograd kernel."""
        if is_device_tensor(attn_mask) and not is_causal and trace_setting("platform") in ("gpu", "tpu"):
            kind = _kind_of(attn_mask, query.shape[-2], key.shape[-2])
            if kind is not None:
                attn_mask, is_causal = None, kind == "causal"
        return super().__call__(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def _kind_of(mask: torch.Tensor, num_queries: int, num_keys: int) -> str | None:
    """ "causal" if a boolean mask [..., T, S] is known to be causal, "all" if it is known to mask nothing; else None."""
    recorder = recording.get()
    if recorder is None or mask.dtype != torch.bool or tuple(mask.shape[-2:]) != (num_queries, num_keys):
        return None

    def is_all_or_causal(value: Any) -> Any:
        columns, rows = (lax.broadcasted_iota(jnp.int32, value.shape, value.ndim - i) for i in (1, 2))
        return jnp.all(value), jnp.all(value == (columns <= rows))

    def kind() -> str | None:
        repeated = [size > 1 and stride == 0 for size, stride in zip(mask.shape, mask.stride(), strict=True)]
        one = mask[tuple(slice(1) if is_repeated else slice(None) for is_repeated in repeated)]
        with exact_dtypes():
            known = known_value(load(one), recorder.is_state, of=is_all_or_causal, num_alike=one.dim() - 2)
        return None if known is None else "all" if known[0] else "causal" if known[1] else None

    return once(("mask", tuple(mask.shape), mask.stride(), mask.storage_offset()), (buffer_of(mask).value,), kind)
