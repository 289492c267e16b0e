"""Runs transformers' `model.generate` for models on device "jax" as programs.

    model = AutoModelForCausalLM.from_pretrained(name).to("jax")
    model.generate(ids, max_new_tokens=32)

Cases that `reason_for_fallback` names fall back to transformers' own loop on the device, which is slower and gives the same result;
`disable_compile=True` selects that loop.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from spmd.base._errors import message
from spmd.base._torch import pytree
from spmd.device._storage import recording
from spmd.patches._table import current, replace
from spmd.patches._when_imported import when_imported

_GENERATE = "transformers.generation.utils.GenerationMixin.generate"
_GIVEN = {"input_ids", "attention_mask", "position_ids", "decoder_input_ids"}
_NOT_COMPILED = "_spmd_not_compiled"
_LIBRARIES = {"spmd", "torch", "transformers"}


def register() -> None:
    """Replace `generate` as soon as transformers' generation module is imported."""
    when_imported("transformers.generation.utils", _install)


def _install() -> None:
    theirs = current(_GENERATE)
    parameters = inspect.signature(theirs)

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recording.get() is not None or not _is_on_device(self):
            return theirs(self, *args, **kwargs)
        called = parameters.bind(self, *args, **kwargs)
        if reason_for_fallback(self, dict(called.arguments)) is not None:
            return theirs(self, *args, **kwargs)
        return _by_programs(theirs, self, called)

    replace(_GENERATE, generate)


def _is_on_device(model: Any) -> bool:
    return {parameter.device.type for parameter in model.parameters()} == {"jax"}


def reason_for_fallback(model: Any, arguments: dict[str, Any]) -> str | None:
    """The reason why a call of `generate` falls back to transformers' loop; None if programs run it."""
    more = arguments.get("kwargs", {})
    if vars(model).get(_NOT_COMPILED):
        return "it could not be compiled before"
    for name in ("custom_generate", "assistant_model", "negative_prompt_ids", "synced_gpus"):
        if arguments.get(name) is not None:
            return name
    config, given = model._prepare_generation_config(arguments.get("generation_config"), **more)
    unknown = {name for name, value in given.items() if value is not None} - _GIVEN
    if unknown:
        return ", ".join(sorted(unknown))
    prompt = arguments.get("inputs")
    tensors = [t for t in (prompt, *given.values()) if t is not None]
    if model.main_input_name != "input_ids" or any(not isinstance(t, Tensor) or t.is_floating_point() or t.dim() != 2 for t in tensors):
        return "prompts that are not ids"
    ids = given.get("input_ids") if prompt is None else prompt
    beside = [given[name] for name in ("attention_mask", "position_ids") if given.get(name) is not None]
    if any(t.shape[1] == 0 or (ids is not None and t.shape != ids.shape) for t in (*([] if ids is None else [ids]), *beside)):
        return "a mask of another shape than its prompt"  # either an error or broadcasting
    return _model_reason(model) or _config_reason(model, config)


def _model_reason(model: Any) -> str | None:
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if not model._can_compile_fullgraph or model._is_stateful:
        return "a model without support for a static cache"
    if hasattr(model, "_reorder_cache"):
        return "a model that reorders its cache itself"
    if model.training and (
        _has_active_dropout(model) or any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    ):
        return "a model in training"
    if any(map(_has_user_hooks, model.modules())):
        return "forward hooks"
    layers = StaticCache(config=model.config, max_cache_len=1).layers
    config = model.config.get_text_config(decoder=True)
    if len(layers) != config.num_hidden_layers or {type(layer) for layer in layers} - {StaticLayer, StaticSlidingWindowLayer}:
        return "layers that cache something other than keys and values"
    if getattr(config, "attention_chunk_size", None) is not None or config._attn_implementation not in ("sdpa", "eager"):
        return "its attention"
    rotary: Any = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rotary, *rotary.values()) if isinstance(part, dict)}
    return "rotary embeddings that depend on the length" if kinds & {"dynamic", "longrope"} else None


def _has_active_dropout(model: Any) -> bool:
    """Whether the model has active dropout."""
    numbers = [value for name, value in model.config.to_dict().items() if "drop" in name]
    return any(isinstance(value, float) and value > 0 for value in numbers) or any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()
    )


def _has_user_hooks(module: torch.nn.Module) -> bool:
    """Whether a user's hook would see the padding of a prompt and its last token computed twice."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] not in _LIBRARIES for hook in hooks)


class _WithoutPrompt:
    """A streamer wrapper that drops the prompt, which the streamer has already received."""

    def __init__(self, streamer: Any) -> None:
        self.end = streamer.end
        self._streamer, self._has_prompt = streamer, False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True


def _config_reason(model: Any, config: Any) -> str | None:
    from transformers.generation.configuration_utils import GenerationMode

    if config.get_generation_mode() not in (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
        GenerationMode.BEAM_SEARCH,
        GenerationMode.BEAM_SAMPLE,
    ):
        return "its way of generating"
    if config.disable_compile or config.use_cache is False:
        return "disable_compile" if config.disable_compile else "use_cache=False"
    if config.cache_implementation not in (None, "static", "dynamic") or config.prefill_chunk_size is not None:
        return "its cache"
    if config.cache_implementation == "static" and config.return_dict_in_generate:
        return "its cache"
    for name in ("output_attentions", "output_hidden_states", "token_healing", "low_memory", "is_assistant", "watermarking_config"):
        if getattr(config, name, None):
            return name
    return None if config.guidance_scale in (None, 1) else "guidance_scale"


def _by_programs(theirs: Any, model: Any, called: inspect.BoundArguments) -> Any:
    from spmd.huggingface._decoding_model import DrawsOnDevice, decoding
    from spmd.huggingface._generation_programs import NotCompiled

    given = dict(called.arguments)
    given.pop("self")
    more = given.pop("kwargs", {})
    tensors = [t for t in pytree.tree_leaves((given.get("inputs"), more)) if isinstance(t, Tensor)]
    is_on_host = bool(tensors) and all(t.device.type == "cpu" for t in tensors)
    try:
        with nullcontext() if is_on_host else DrawsOnDevice():
            result = theirs(decoding(model, is_on_host), **_on_host(given), **_on_host(more))
    except NotCompiled as failure:
        if not failure.is_expected:
            _warn_of_fallback(model, failure, failure.is_lasting)
        if called.arguments.get("streamer") is not None:
            called.arguments["streamer"] = _WithoutPrompt(called.arguments["streamer"])
        return theirs(*called.args, **called.kwargs)
    return _finished(model, result, is_on_host)


def _on_host(given: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cpu().as_subclass(Tensor) if isinstance(t, Tensor) else t for name, t in given.items()}


def _finished(model: Any, result: Any, is_on_host: bool) -> Any:
    """The result on the prompt's device, with transformers' cache."""
    from spmd.huggingface._decoding_model import CacheHandle
    from spmd.huggingface._key_value_cache import dynamic_cache

    if isinstance(result, Tensor):
        return result if is_on_host else result.to("jax")
    handle = result.get("past_key_values")
    if isinstance(handle, CacheHandle):
        result["past_key_values"] = dynamic_cache(model, handle.cache, handle.rows_B)
    for name, value in result.items():
        if isinstance(value, Tensor | tuple) and not is_on_host:
            result[name] = value.to("jax") if isinstance(value, Tensor) else tuple(part.to("jax") for part in value)
    return result


def _warn_of_fallback(model: Any, error: Exception, is_lasting: bool) -> None:
    """Warn that a model falls back to transformers' loop, in this call or from now on."""
    if is_lasting:
        vars(model)[_NOT_COMPILED] = True
    warnings.warn(
        message(
            f"{type(model).__name__} generates by transformers' own loop, one operation at a time, because it could not be compiled",
            str(error),
            fix="model.generate(..., disable_compile=True) selects that loop",
        ),
        stacklevel=4,
    )


__all__ = ["reason_for_fallback", "register"]
