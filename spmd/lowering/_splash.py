"""`spmd.lowering.fused_attention` by jax's splash attention, a Pallas kernel for TPUs. No other file knows the kernel's names."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

_BLOCKS = (512, 256, 128)  # rows of queries, and of keys, that are in the chip's vector memory at a time
_LEAST_SCORES = 1 << 20  # of a head; fewer the compiler keeps on the chip by itself


def takes(query: Any, key: Any, value: Any) -> bool:
    """Whether the kernel should compute attention of such arrays (or shapes), [B, H, T, D] and [B, K, S, D]."""
    return (
        query.dtype == key.dtype == value.dtype == jnp.bfloat16
        and query.ndim == key.ndim == value.ndim == 4
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] == key.shape[3]
        and query.shape[3] in (64, 128, 256)
        and query.shape[2] % _BLOCKS[-1] == 0
        and key.shape[2] % _BLOCKS[-1] == 0
        and query.shape[2] * key.shape[2] >= _LEAST_SCORES
    )


def forward(query: Any, key: Any, value: Any, *, is_causal: bool, scale: float, interpret: bool = False) -> list[Any]:
    """What `plain_attention` computes. `interpret`: on any platform, slowly."""
    kernel = _kernel(query.shape[1], query.shape[2], key.shape[2], is_causal, True, interpret)
    out, (norm,) = jax.vmap(kernel)(_scaled(query, scale), key, value)
    return [out, norm]


def backward(
    query: Any, key: Any, value: Any, out: Any, norm: Any, grad: Any, *, is_causal: bool, scale: float, interpret: bool = False
) -> list[Any]:
    """What `plain_attention_grad` computes."""
    kernel = _kernel(query.shape[1], query.shape[2], key.shape[2], is_causal, False, interpret)
    library, said = _library()[0], kernel.kwargs

    def of_one(q: Any, k: Any, v: Any, o: Any, n: Any, g: Any) -> Any:
        kept = (q, k, v, None, None, o, n, kernel.dq_mask_info, kernel.dkv_mask_info)
        found = library._splash_attention_bwd(
            False, said["mask_value"], False, said["block_sizes"], None, said["mask_function"], None, interpret, kept, g
        )
        return found[3:6]

    of_query, of_key, of_value = jax.vmap(of_one)(_scaled(query, scale), key, value, out, norm, grad)
    return [_scaled(of_query, scale), of_key, of_value]


def _scaled(x: Any, scale: float) -> Any:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _library() -> tuple[Any, Any]:
    """The kernels' module and that of their masks. Pallas takes 0.2 s to import: not before a program needs it."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    return splash_attention_kernel, splash_attention_mask


@functools.cache
def _kernel(num_heads: int, num_queries: int, num_keys: int, is_causal: bool, keeps_norm: bool, interpret: bool) -> Any:
    library, masks = _library()
    one_head = masks.CausalMask if is_causal else masks.FullMask
    q, kv = (next(block for block in _BLOCKS if size % block == 0) for size in (num_queries, num_keys))
    blocks = library.BlockSizes(
        block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_kv_dkv_compute=kv, block_q_dq=q, block_kv_dq=kv
    )
    with jax.ensure_compile_time_eval():  # its tables of blocks are values, whatever is being traced
        return library.make_splash_mha(
            masks.MultiHeadMask([one_head((num_queries, num_keys))] * num_heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=keeps_norm,
            interpret=interpret,
        )
