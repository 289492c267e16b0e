"""What a generation keeps on the devices between two programs: keys and values of every token so far, in tensors of one size.

Every layer keeps all slots, those of layers with a sliding window too: the window is a matter of the mask. A prompt that was padded to its
bucket leaves slots behind it that hold anything; a token is written to its slot before any token looks there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache, StaticLayer


@dataclass(frozen=True)
class Sizes:
    """What a generation's programs are made for.

    Attributes:
        batch: rows B, beams and returned sequences included.
        slots: tokens L that the tensors have room for.
        copies: rows of the decoder for each row of the encoder.
    """

    batch: int
    slots: int
    copies: int = 1


@dataclass
class Kept:
    """Tensors of one generation.

    Attributes:
        sizes: of the tensors.
        layers: keys, then values, of each layer, [B, H, L, D]; then those over the encoder's tokens, [B, H, S, D].
        given: what every token needs besides: `mask` [B, L], `positions` [B, L], `encoder_mask` [B, S], `encoder_states` [B, S, E].
        num_tokens: slots that hold a token.
        num_encoder_tokens: of the S, those that are no padding to a bucket.
    """

    sizes: Sizes
    given: dict[str, Tensor]
    layers: list[Tensor] = field(default_factory=list[Tensor])
    num_tokens: int = 0
    num_encoder_tokens: int = 0

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Of what is given, for the key of a program."""
        return tuple((name, tuple(tensor.shape)) for name, tensor in self.given.items())


def empty_cache(model: Any, sizes: Sizes) -> Any:
    """A cache that the model fills."""
    config = model.config.get_text_config(decoder=True)
    own = Cache(layers=[StaticLayer(sizes.slots) for _ in range(config.num_hidden_layers)])
    return EncoderDecoderCache(own, Cache(layer_class_to_replicate=DynamicLayer)) if model.config.is_encoder_decoder else own


def tensors_of(cache: Any) -> list[Tensor]:
    """`Kept.layers` of a cache that a model has filled."""
    parts: list[Any] = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    return [tensor for part in parts for layer in part.layers for tensor in (layer.keys, layer.values)]


def filled_cache(model: Any, tensors: list[Tensor], num_tokens: Tensor) -> Any:
    """A cache of these very tensors, with so many tokens (0-dim) in it."""
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


def dynamic_cache(model: Any, kept: Kept, rows_B: Tensor | None) -> Any:
    """The cache that transformers' own loop would have left, on device 'jax'; no program is needed for its lengths.

    Args:
        rows_B: which row each row goes on from, where beams were chosen after the last token.
    """
    config = model.config.get_text_config(decoder=True)
    host = [tensor.cpu().as_subclass(Tensor) for tensor in kept.layers]
    if rows_B is not None:
        host = [tensor[rows_B] if tensor.shape[0] == len(rows_B) else tensor for tensor in host]
    pairs = list(zip(host[::2], host[1::2], strict=True))
    own = DynamicCache(config=config)
    for index, (keys, values) in enumerate(pairs[: config.num_hidden_layers]):
        own.update(keys[:, :, : kept.num_tokens].contiguous(), values[:, :, : kept.num_tokens].contiguous(), index)
    if not model.config.is_encoder_decoder:
        return _moved(own)
    over = DynamicCache(config=config)
    for index, (keys, values) in enumerate(pairs[config.num_hidden_layers :]):
        over.update(keys[:, :, : kept.num_encoder_tokens].contiguous(), values[:, :, : kept.num_encoder_tokens].contiguous(), index)
    return EncoderDecoderCache(_moved(own), _moved(over))


def _moved(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys, layer.values, layer.device = layer.keys.to("jax"), layer.values.to("jax"), torch.device("jax")
    return cache


__all__ = ["Kept", "Sizes", "dynamic_cache", "empty_cache", "filled_cache", "tensors_of"]
