"""Key/value cache that stays on the devices between the prefill and the decode program, in tensors of fixed size.

Every layer stores all slots, also layers with a sliding window: the window is applied by the mask. A prompt that is padded to its
bucket leaves undefined values in the slots behind it. Each slot is overwritten before a token attends to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer


@dataclass(frozen=True)
class Sizes:
    """The sizes that the programs of a generation are compiled for.

    Attributes:
        batch: number of rows B, including beams and returned sequences.
        slots: number of tokens L that fit into the cache.
        copies: number of decoder rows per encoder row.
    """

    batch: int
    slots: int
    copies: int = 1


@dataclass
class KeyValueCache:
    """The tensors of one generation.

    Attributes:
        sizes: batch size and number of slots of the tensors below.
        layers: keys, then values, of each layer, [B, H, L, D]; then those of the encoder's tokens, [B, H, S, D].
        given: further inputs of every step: `mask` [B, L], `positions` [B, L], `encoder_mask` [B, S], `encoder_states` [B, S, E].
        num_tokens: number of filled slots.
        num_encoder_tokens: number of the S encoder tokens that are not padding.
    """

    sizes: Sizes
    given: dict[str, Tensor]
    layers: list[Tensor] = field(default_factory=list[Tensor])
    num_tokens: int = 0
    num_encoder_tokens: int = 0

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Names and shapes of `given`, as part of a program's key."""
        return tuple((name, tuple(tensor.shape)) for name, tensor in self.given.items())


def empty_cache(model: Any, sizes: Sizes) -> Any:
    """An empty cache for the model to fill."""
    config = model.config.get_text_config(decoder=True)
    own = Cache(layers=[StaticLayer(sizes.slots) for _ in range(config.num_hidden_layers)])
    return EncoderDecoderCache(own, Cache(layer_class_to_replicate=DynamicLayer)) if model.config.is_encoder_decoder else own


def tensors_of(cache: Any) -> list[Tensor]:
    """The tensors of a cache that a model has filled, in the order of `KeyValueCache.layers`."""
    parts: list[Any] = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    return [tensor for part in parts for layer in part.layers for tensor in (layer.keys, layer.values)]


def filled_cache(model: Any, tensors: list[Tensor], num_tokens: Tensor) -> Any:
    """A cache over these tensors, without a copy, that contains `num_tokens` (0-dim) tokens."""
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    layers: list[Any] = []
    for keys, values in pairs[:num_layers]:
        layer = StaticLayer(keys.shape[2])
        layer.cumulative_length = num_tokens.clone()
        layers.append(_filled(layer, keys, values))
    if not model.config.is_encoder_decoder:
        return Cache(layers=layers)
    over = Cache(layers=[_filled(DynamicLayer(), keys, values) for keys, values in pairs[num_layers:]])
    cache = EncoderDecoderCache(Cache(layers=layers), over)
    cache.is_updated = dict.fromkeys(range(num_layers), True)
    return cache


def _filled(layer: Any, keys: Tensor, values: Tensor) -> Any:
    layer.keys, layer.values, layer.dtype, layer.device, layer.is_initialized = keys, values, keys.dtype, keys.device, True
    return layer


def dynamic_cache(model: Any, cache: KeyValueCache, rows_B: Tensor | None) -> Any:
    """The cache that transformers' own loop would have returned, on device 'jax'. The host slices it, so no length needs a program.

    Args:
        rows_B: the source row of each row if beams were reordered after the last token.
    """
    config = model.config.get_text_config(decoder=True)
    host = [tensor.cpu().as_subclass(Tensor) for tensor in cache.layers]
    if rows_B is not None:
        host = [tensor[rows_B] if tensor.shape[0] == len(rows_B) else tensor for tensor in host]
    pairs = list(zip(host[::2], host[1::2], strict=True))
    own = DynamicCache(config=config)
    for index, (keys, values) in enumerate(pairs[: config.num_hidden_layers]):
        own.update(keys[:, :, : cache.num_tokens].contiguous(), values[:, :, : cache.num_tokens].contiguous(), index)
    if not model.config.is_encoder_decoder:
        return _moved(own)
    over = DynamicCache(config=config)
    for index, (keys, values) in enumerate(pairs[config.num_hidden_layers :]):
        over.update(keys[:, :, : cache.num_encoder_tokens].contiguous(), values[:, :, : cache.num_encoder_tokens].contiguous(), index)
    return EncoderDecoderCache(_moved(own), _moved(over))


def _moved(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys, layer.values, layer.device = layer.keys.to("jax"), layer.values.to("jax"), torch.device("jax")
    return cache


__all__ = ["KeyValueCache", "Sizes", "dynamic_cache", "empty_cache", "filled_cache", "tensors_of"]
