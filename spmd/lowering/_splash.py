"""jax's splash attention, a Pallas kernel for TPUs, as an implementation of `spmd.lowering.fused_attention`.

No other file uses names of the kernel's library.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

_BLOCKS = (512, 256, 128)  # block sizes: rows of queries, and of keys, in the chip's vector memory at a time
_LEAST_SCORES = 1 << 20  # per head; the compiler itself keeps fewer scores on the chip


def takes(query: Any, key: Any, value: Any) -> bool:
    """Whether the kernel should compute attention for these arrays (or shapes), [B, H, T, D] and [B, K, S, D]."""
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
    """The results of `plain_attention`. `interpret`: interpret the kernel, on any platform but slowly."""
    kernel = _kernel(query.shape[1], query.shape[2], key.shape[2], is_causal, True, interpret)
    out, (logsumexp,) = jax.vmap(kernel)(_scaled(query, scale), key, value)
    return [out, logsumexp]


def backward(
    query: Any, key: Any, value: Any, out: Any, logsumexp: Any, grad: Any, *, is_causal: bool, scale: float, interpret: bool = False
) -> list[Any]:
    """The results of `plain_attention_grad`."""
    kernel = _kernel(query.shape[1], query.shape[2], key.shape[2], is_causal, False, interpret)
    library, settings = _library()[0], kernel.kwargs

    def sample_grads(q: Any, k: Any, v: Any, o: Any, lse: Any, g: Any) -> Any:
        residuals = (q, k, v, None, None, o, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
        grads = library._splash_attention_bwd(
            False, settings["mask_value"], False, settings["block_sizes"], None, settings["mask_function"], None, interpret, residuals, g
        )
        return grads[3:6]

    grad_query, grad_key, grad_value = jax.vmap(sample_grads)(_scaled(query, scale), key, value, out, logsumexp, grad)
    return [_scaled(grad_query, scale), grad_key, grad_value]


def _scaled(x: Any, scale: float) -> Any:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _library() -> tuple[Any, Any]:
    """The modules of the kernels and of their masks. Importing Pallas takes 0.2 s, so it waits until a program needs it."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    return splash_attention_kernel, splash_attention_mask


@functools.cache
def _kernel(num_heads: int, num_queries: int, num_keys: int, is_causal: bool, saves_logsumexp: bool, interpret: bool) -> Any:
    library, masks = _library()
    one_head = masks.CausalMask if is_causal else masks.FullMask
    q, kv = (next(block for block in _BLOCKS if size % block == 0) for size in (num_queries, num_keys))
    blocks = library.BlockSizes(
        block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_kv_dkv_compute=kv, block_q_dq=q, block_kv_dq=kv
    )
    with jax.ensure_compile_time_eval():  # the kernel's block tables must be concrete, also in a trace
        return library.make_splash_mha(
            masks.MultiHeadMask([one_head((num_queries, num_keys))] * num_heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            save_residuals=saves_logsumexp,
            interpret=interpret,
        )
