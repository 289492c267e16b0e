"""Findings about attention heads and packed projections, which need the modules, not only names and shapes.

A projection to heads may be split anywhere. But if a shard ends inside a head, the compiler gathers the heads again. Query, key
and value concatenated in one weight ([3, H, K]) are cut across, which costs a reshuffle of activations. Separate weights, or
heads as the outermost dim ([H, 3, K]), avoid it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from mesh import Finding, Placement, RulesReport

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "d_head", "head_size")
_WIDTH = ("embed_dim", "hidden_size", "d_model", "n_embd", "width", "all_head_size")
_PACKED = re.compile(r"(c_attn|qkv|qkv_proj|query_key_value|Wqkv|in_proj|in_proj_weight|in_proj_bias)(\.base_layer)?(\.weight|\.bias)?$")
_PACKED_TWO = re.compile(r"(gate_up_proj)(_bias)?(\.base_layer)?(\.weight|\.bias)?$")


def head_findings(model: nn.Module, report: RulesReport) -> list[Finding]:
    """Findings about heads and packed dims for the placements of a model; equal layers are reported once."""
    found: dict[tuple[str, str], Finding] = {}

    def note(name: str, findings: Iterator[Finding]) -> None:
        for finding in findings:  # once for equal layers, and only for the weight if the bias has the same finding
            found.setdefault((finding.kind, re.sub(r"\d+|\.bias$|\.weight$", "*", name)), finding)

    placements = {placement.name: placement for placement in report}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if full in placements and _PACKED_TWO.search(full):
                note(full, _packed(placements[full], 2, "gate and up"))
        heads, head_dim, kv_heads = _attention(module)
        if not heads or not head_dim:
            continue
        for name, _ in module.named_parameters():
            full = f"{path}.{name}" if path else name
            placement = placements.get(full)
            if placement is not None:
                note(full, _projection(placement, heads, kv_heads, head_dim))
    return list(found.values())


def _attention(module: nn.Module) -> tuple[int, int, int]:
    """(heads, head size, key-value heads) of a module that computes attention itself, else zeros."""
    own = vars(module)
    has_own = any(isinstance(own.get(name), int) for name in _HEADS)
    is_attention = has_own or re.search(r"att(ention|n)", type(module).__name__, re.IGNORECASE)
    if not is_attention or isinstance(module, nn.ModuleList):
        return 0, 0, 0
    heads = _number(module, _HEADS)
    head_dim = _number(module, _HEAD_DIM)
    width = _number(module, _WIDTH)
    head_dim = head_dim or (width // heads if heads and width and width % heads == 0 else 0)
    if not head_dim and heads:
        head_dim = next((layer.in_features // heads for layer in module.modules() if isinstance(layer, nn.Linear)), 0)
    return heads, head_dim, _number(module, _KV_HEADS) or heads


def _number(module: nn.Module, names: tuple[str, ...]) -> int:
    """The first of these attributes that is a positive int, of the module or else of its configuration; else 0."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _projection(placement: Placement, heads: int, kv_heads: int, head_dim: int) -> Iterator[Finding]:
    """Findings for one parameter of an attention module whose shards do not end between heads."""
    packed_size = (heads + 2 * kv_heads) * head_dim
    is_packed = _PACKED.search(placement.name) is not None
    for dim, (size, shards) in enumerate(_split_dims(placement)):
        if is_packed and size == packed_size:
            yield from _packed(placement, 3, "query, key and value")
            if heads % shards or kv_heads % shards:
                yield _uneven(placement, dim, f"{heads} query and {kv_heads} key-value heads", shards, math.gcd(heads, kv_heads))
        elif size in (heads * head_dim, kv_heads * head_dim) and (size // head_dim) % shards:
            count = size // head_dim
            yield _uneven(placement, dim, f"{count} heads of {head_dim}", shards, count)


def _packed(placement: Placement, parts: int, names: str) -> Iterator[Finding]:
    for dim, (size, shards) in enumerate(_split_dims(placement)):
        if shards == 1 or size % parts or (dim == 0 and len(placement.shape) == 3):  # dim 0 of a stack counts experts
            continue
        if (size // parts) % shards:
            what = f"{placement.name!r}: dim {dim} packs {names}, {size // parts} each, which {shards} shards do not divide"
            yield Finding("packed", what, f"split over an axis whose size divides {size // parts}, or replicate it")
        else:
            what = f"{placement.name!r}: dim {dim} packs {names}; split into {shards} shards that cross them, unless heads come first"
            yield Finding("packed", what, "expect a reshuffle of activations, or use separate weights", is_error=False)


def _uneven(placement: Placement, dim: int, what: str, shards: int, count: int) -> Finding:
    text = f"{placement.name!r}: dim {dim} has {what}, split into {shards} shards, so that some heads are cut"
    return Finding("heads", text, f"split it over an axis whose size divides {count}, or replicate it")


def _split_dims(placement: Placement) -> list[tuple[int, int]]:
    """(size, number of shards) of each dim."""
    return [(size, size // piece if piece else 1) for size, piece in zip(placement.shape, _piece(placement), strict=True)]


def _piece(placement: Placement) -> tuple[int, ...]:
    return placement.sharding.shard_shape(placement.shape)


__all__ = ["head_findings"]
