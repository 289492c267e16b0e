"""A model object for transformers' generation loops: it looks like a model on the host, and its computation runs in programs.

`generate` and its loops run unedited on an object of the model's own class with the model's attributes. Only the few methods that
compute are replaced. Ids, masks, scores, processors, criteria and beams stay on the host, so they match CPU torch to the last token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from spmd.huggingface._generation_programs import Programs, bucket, programs_of
from spmd.huggingface._key_value_cache import KeyValueCache
from spmd.huggingface._token_loop import token_loop


class CacheHandle(Cache):
    """The object that transformers' loops pass around as `past_key_values`."""

    def __init__(self, cache: KeyValueCache) -> None:
        super().__init__(layers=[])
        self.cache = cache
        self.rows_B: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remember the beams' rows; the next program reorders the cache."""
        self.rows_B = beam_idx.long()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if not self.cache.layers else self.cache.num_tokens


class _Decoding:
    """Mixin that precedes the model's class among the bases."""

    __slots__ = ("_spmd_is_on_host", "_spmd_programs")
    _spmd_programs: Programs
    _spmd_is_on_host: bool
    device = torch.device("cpu")

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        self._spmd_programs.model._validate_model_kwargs(model_kwargs)  # it inspects signatures of methods that are replaced here

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_logits_processor(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return found if self._spmd_is_on_host else type(found)([_ProcessorOnDevice(p) if _is_user_defined(p) else p for p in found])

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_stopping_criteria(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return found if self._spmd_is_on_host else type(found)([_CriterionOnDevice(c) if _is_user_defined(c) else c for c in found])

    def _prepare_text_encoder_decoder_kwargs_for_generation(self, inputs_tensor: Tensor, model_kwargs: Any, **more: Any) -> Any:
        """Defer the encoder, which runs together with the prompt. Until then its tokens take the place of its states."""
        model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=inputs_tensor)  # pyright: ignore[reportArgumentType]
        if model_kwargs.get("attention_mask") is None:
            model_kwargs["attention_mask"] = torch.ones_like(inputs_tensor)
        return model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        copies = max(generation_config.num_beams, generation_config.num_return_sequences)
        max_length = max(max_cache_length + 1, generation_config.max_cache_len or 0)
        sizes = self._spmd_programs.sizes(batch_size * copies, max_length, copies)
        model_kwargs["past_key_values"] = CacheHandle(KeyValueCache(sizes, {}))

    def _sample(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, streamer: Any = None, **more: Any
    ) -> Any:
        """Generate many tokens per call if no step needs the host."""
        config = generation_config
        asks = streamer is not None or (config.return_dict_in_generate and (config.output_scores or config.output_logits))
        loop = None if asks or (self._spmd_is_on_host and config.do_sample) else token_loop(logits_processor, stopping_criteria, config)
        if loop is None:
            chosen = (logits_processor, stopping_criteria, config)
            return super()._sample(input_ids, *chosen, streamer=streamer, **more)  # pyright: ignore[reportAttributeAccessIssue]
        handle: CacheHandle = more["past_key_values"]
        self._prefill_cache(input_ids, more)
        tokens = loop.run(self._spmd_programs, handle.cache, input_ids)
        if not config.return_dict_in_generate:
            return tokens
        kind = GenerateEncoderDecoderOutput if self._spmd_programs.model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
        return kind(sequences=tokens, past_key_values=handle)  # pyright: ignore[reportArgumentType]

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: Any, is_first_iteration: bool = True) -> Any:
        handle: CacheHandle = model_kwargs["past_key_values"]
        self._prefill_cache(input_ids, model_kwargs)
        handle.rows_B = torch.arange(handle.cache.sizes.batch) if generation_config.num_beams > 1 else None
        return self(**self.prepare_inputs_for_generation(input_ids, past_key_values=handle))

    def _prefill_cache(self, input_ids: Tensor, model_kwargs: Any) -> None:
        cache: KeyValueCache = model_kwargs["past_key_values"].cache
        cache.given = _given(cache, self._spmd_programs, model_kwargs)
        encoder_tokens = model_kwargs["encoder_outputs"].last_hidden_state if "encoder_mask" in cache.given else None
        cache.num_encoder_tokens = 0 if encoder_tokens is None else encoder_tokens.shape[1]
        self._spmd_programs.prefill(cache, input_ids, encoder_tokens)

    def prepare_inputs_for_generation(self, input_ids: Tensor, past_key_values: Any = None, **more: Any) -> dict[str, Any]:
        return {"input_ids": input_ids[:, -1], "past_key_values": past_key_values}

    def __call__(self, input_ids: Tensor, past_key_values: CacheHandle, return_dict: bool = True) -> Any:
        rows_B, past_key_values.rows_B = past_key_values.rows_B, None
        scores_BV = self._spmd_programs.decode(past_key_values.cache, input_ids, rows_B)
        return CausalLMOutputWithPast(logits=scores_BV[:, None], past_key_values=past_key_values)  # pyright: ignore[reportArgumentType]


def _given(cache: KeyValueCache, programs: Programs, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """`KeyValueCache.given` on the host, made from what transformers prepared."""
    mask: Any = model_kwargs.get("attention_mask")
    positions: Any = model_kwargs.get("position_ids")
    given: dict[str, Tensor] = {}
    limit = programs.positions
    if programs.model.config.is_encoder_decoder:
        given["encoder_mask"] = torch.nn.functional.pad(mask, (0, bucket(mask.shape[1], limit=limit) - mask.shape[1]))
        return given
    slots = cache.sizes.slots
    if mask is not None:
        given["mask"] = torch.nn.functional.pad(mask, (0, slots - mask.shape[1]), value=1)
    if positions is not None:
        later = positions[:, -1:] + 1 + torch.arange(slots - positions.shape[1])
        given["positions"] = torch.cat([positions, later if limit is None else later.clamp(max=limit - 1)], 1)
    return given


class DrawsOnDevice(TorchFunctionMode):
    """While active, sampling on the host uses the device's random stream, so it draws what the same call would draw there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.multinomial and args[0].device.type == "cpu":
            probabilities, *more = args
            return func(probabilities.to("jax"), *more, **kwargs or {}).cpu()
        return func(*args, **kwargs or {})


def _is_user_defined(called: Any) -> bool:
    return type(called).__module__.partition(".")[0] != "transformers"


class _ProcessorOnDevice(LogitsProcessor):
    """Wraps a user-defined processor so that it sees tensors on the prompt's device."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        shown = scores.to("jax")
        found = self.theirs(input_ids.to("jax"), shown).cpu()
        if shown._version:  # in-place changes show up in `output_logits`
            scores.copy_(shown.cpu())
        return found


class _CriterionOnDevice(StoppingCriteria):
    """Wraps a user-defined stopping criterion in the same way."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["theirs"], name)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        shown = None if scores is None else tuple(score.to("jax") for score in scores)
        return self.theirs(input_ids.to("jax"), shown, **kwargs).cpu()


@functools.cache
def _class_of(kind: type) -> type:
    return type(kind.__name__, (_Decoding, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def decoding(model: Any, is_on_host: bool) -> Any:
    """A view of the model whose class generates by programs; it shares the model's attributes. `is_on_host`: the prompt is on the host."""
    made = object.__new__(_class_of(type(model)))
    object.__setattr__(made, "__dict__", vars(model))
    object.__setattr__(made, "_spmd_programs", programs_of(model))
    object.__setattr__(made, "_spmd_is_on_host", is_on_host)
    return made


__all__ = ["DrawsOnDevice", "CacheHandle", "decoding"]
