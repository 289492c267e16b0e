"""`torch_xla.experimental.custom_kernel`: this package's attention under torch_xla's signatures.

On TPUs `flash_attention` is a fused kernel wherever `scaled_dot_product_attention` is; elsewhere it is two products around a softmax. The
same positions attend.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional

from mesh import Mesh, ShardingSpec
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla._meshes import mesh_of_text
from spmd.device._call_jax import call_jax
from spmd.sharding._annotate import as_mesh
from spmd.sharding._constraint import constrain
from spmd.xla_names._global_mesh import mesh_or_global


class KernelError(SpmdError, AssertionError):
    """The arguments of a kernel do not fit each other."""


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """softmax(sm_scale * q k^T + ab) v over the positions that may attend.

    Args:
        q: [B, H, T, D].
        k: [B, H, S, D].
        v: [B, H, S, D].
        causal: position t attends to positions up to t.
        q_segment_ids: [B, T]; with `kv_segment_ids` [B, S], positions attend only within their segment.
        kv_segment_ids: see `q_segment_ids`.
        sm_scale: factor of the scores; the default is 1, not 1 / sqrt(D).
        ab: [B, H, T, S], added to the scores.
        partition_spec: layout of q, k, v and the result over `mesh`, as for `mark_sharding`; the sequence and D are not split.
        mesh: the mesh; None: the global mesh.

    Raises:
        KernelError: segment ids are given for only one side (an AssertionError).
    """
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise KernelError(message("flash_attention was given segment ids for only one side", fix="pass q_segment_ids and kv_segment_ids"))
    spec: ShardingSpec | None = None
    if partition_spec is not None:
        spec = ShardingSpec(_mesh(mesh), ast.literal_eval(partition_spec) if isinstance(partition_spec, str) else partition_spec)
        q, k, v = (constrain(t, spec, spec) for t in (q, k, v))
    mask = _mask(q.shape[-2], k.shape[-2], q.device, causal, q_segment_ids, kv_segment_ids, ab)
    is_causal = causal and mask is None
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=sm_scale)
    return out if spec is None else constrain(out, spec, spec)


def _mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, str):
        mesh = None if mesh == "None" else mesh_of_text(mesh)
    return as_mesh(mesh_or_global(mesh, "flash_attention"))


def _mask(
    num_queries: int, num_keys: int, device: Any, causal: bool, q_ids: torch.Tensor | None, kv_ids: torch.Tensor | None, ab: Any
) -> torch.Tensor | None:
    """The mask that `is_causal` cannot express: None, a boolean mask, or values to add."""
    allowed: torch.Tensor | None = None
    if q_ids is not None and kv_ids is not None:
        allowed = q_ids[:, None, :, None] == kv_ids[:, None, None, :]
    if causal and (allowed is not None or ab is not None):
        below = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()
        allowed = below if allowed is None else allowed & below
    if ab is None or allowed is None:
        return allowed if ab is None else ab
    return ab.masked_fill(~allowed, float("-inf"))


class FlashAttention:
    """`FlashAttention.apply(q, k, v, causal, q_segment_ids, kv_segment_ids, sm_scale, ab, partition_spec, mesh)`."""

    MIN_BLOCK_SIZE = 128
    DEFAULT_MASK_VALUE = -0.7 * float(torch.finfo(torch.float32).max)

    @staticmethod
    def apply(
        q: Any, k: Any, v: Any, causal: bool = False, q_segment_ids: Any = None, kv_segment_ids: Any = None, sm_scale: float = 1.0,
        ab: Any = None, partition_spec: Any = None, mesh: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        return flash_attention(q, k, v, causal, q_segment_ids, kv_segment_ids, sm_scale, ab=ab, partition_spec=partition_spec, mesh=mesh)


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    lengths: torch.Tensor,
    page_indices: torch.Tensor,
    pages_per_compute_block: int,
    megacore_mode: str | None = None,
    attn_logits_soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one query per sequence over keys and values in pages; [B, H, D].

    Args:
        q: [B, H, D], already scaled.
        k_pages: [K, P, page size, D]; each of the K heads serves H / K heads of q.
        v_pages: same shape as `k_pages`.
        lengths: [B], number of positions of each sequence.
        page_indices: [B, pages per sequence], the pages of each sequence.
        pages_per_compute_block: accepted for compatibility, like `megacore_mode`: it tunes torch_xla's TPU kernel.
        attn_logits_soft_cap: scores become cap * tanh(score / cap).

    Raises:
        KernelError: `megacore_mode` is not None, "kv_head" or "batch" (an AssertionError).
    """
    if megacore_mode not in (None, "kv_head", "batch"):
        raise KernelError(message(f"paged_attention has no megacore mode {megacore_mode!r}", fix="None, 'kv_head' or 'batch'"))

    def attend(q: Any, k_pages: Any, v_pages: Any, lengths: Any, page_indices: Any) -> Any:
        kv_heads, dim = k_pages.shape[0], q.shape[-1]
        keys, values = (jnp.moveaxis(pages[:, page_indices], 0, 1).reshape(q.shape[0], kv_heads, -1, dim) for pages in (k_pages, v_pages))
        grouped = q.reshape(q.shape[0], kv_heads, -1, dim).astype(jnp.float32)
        scores = jnp.einsum("bkgd,bksd->bkgs", grouped, keys.astype(jnp.float32))
        if attn_logits_soft_cap is not None:
            scores = attn_logits_soft_cap * jnp.tanh(scores / attn_logits_soft_cap)
        is_there = jnp.arange(keys.shape[2])[None] < lengths[:, None]
        weights = jax.nn.softmax(jnp.where(is_there[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgs,bksd->bkgd", weights, values.astype(jnp.float32)).reshape(q.shape).astype(q.dtype)

    return call_jax(attend, (q, k_pages, v_pages, lengths, page_indices), name="paged_attention")


@cache
def register() -> torch.library.Library:
    """Register `torch.ops.xla.flash_attention` and `paged_attention`, once per process. They live as long as the library."""
    library = torch.library.Library("xla", "FRAGMENT")
    pages = "Tensor k_pages, Tensor v_pages, Tensor lengths, Tensor page_indices, int pages_per_compute_block"
    operators: dict[str, Callable[..., Any]] = {
        "flash_attention(Tensor q, Tensor k, Tensor v, bool casual=False) -> Tensor": flash_attention,
        f"paged_attention(Tensor q, {pages}, str? megacore_mode=None, float? attn_logits_soft_cap=None) -> Tensor": paged_attention,
    }
    for schema, fn in operators.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], fn, "CompositeImplicitAutograd")
    return library
