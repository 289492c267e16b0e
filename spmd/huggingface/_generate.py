"""`model.generate` of a model on device "jax": transformers' own, by programs.

    model = AutoModelForCausalLM.from_pretrained(name).to("jax")
    model.generate(ids, max_new_tokens=32)

What `reason_against` names is left to transformers' loop over the device, which is slower and the same; `disable_compile=True` leaves
all to it.
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
_SPMD_OWN = "_spmd_left_to_transformers"
_LIBRARIES = {"spmd", "torch", "transformers"}


def register() -> None:
    """Models generate so as soon as transformers' generation is imported."""
    when_imported("transformers.generation.utils", _install)


def _install() -> None:
    theirs = current(_GENERATE)
    parameters = inspect.signature(theirs)

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recording.get() is not None or not _lies_on_devices(self):
            return theirs(self, *args, **kwargs)
        called = parameters.bind(self, *args, **kwargs)
        if reason_against(self, dict(called.arguments)) is not None:
            return theirs(self, *args, **kwargs)
        return _by_programs(theirs, self, called)

    replace(_GENERATE, generate)


def _lies_on_devices(model: Any) -> bool:
    return {parameter.device.type for parameter in model.parameters()} == {"jax"}


def reason_against(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why a call of `generate` is left to transformers' loop; None if programs do it."""
    more = arguments.get("kwargs", {})
    if vars(model).get(_SPMD_OWN):
        return "it was found to be no program"
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
        return "prompts that are no ids"
    ids = given.get("input_ids") if prompt is None else prompt
    beside = [given[name] for name in ("attention_mask", "position_ids") if given.get(name) is not None]
    if any(t.shape[1] == 0 or (ids is not None and t.shape != ids.shape) for t in (*([] if ids is None else [ids]), *beside)):
        return "a mask of another shape than its prompt"  # which may be an error, or may broadcast
    return _model_against(model) or _config_against(model, config)


def _model_against(model: Any) -> str | None:
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if not model._can_compile_fullgraph or model._is_stateful:
        return "a model without a static cache"
    if hasattr(model, "_reorder_cache"):
        return "a cache of its own order"
    if model.training and (_drops(model) or any(getattr(module, "gradient_checkpointing", False) for module in model.modules())):
        return "a model in training"
    if any(map(_has_hooks_of_the_users, model.modules())):
        return "forward hooks"
    layers = StaticCache(config=model.config, max_cache_len=1).layers
    config = model.config.get_text_config(decoder=True)
    if len(layers) != config.num_hidden_layers or {type(layer) for layer in layers} - {StaticLayer, StaticSlidingWindowLayer}:
        return "layers that keep something else than keys and values"
    if getattr(config, "attention_chunk_size", None) is not None or config._attn_implementation not in ("sdpa", "eager"):
        return "its attention"
    rotary: Any = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rotary, *rotary.values()) if isinstance(part, dict)}
    return "rotary embeddings that depend on the length" if kinds & {"dynamic", "longrope"} else None


def _drops(model: Any) -> bool:
    """Whether dropout does anything."""
    numbers = [value for name, value in model.config.to_dict().items() if "drop" in name]
    return any(isinstance(value, float) and value > 0 for value in numbers) or any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()
    )


def _has_hooks_of_the_users(module: torch.nn.Module) -> bool:
    """Whether somebody would see the padding of a prompt, and that its last token is computed twice."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] not in _LIBRARIES for hook in hooks)


class _AfterPrompt:
    """A streamer that has the prompt already."""

    def __init__(self, streamer: Any) -> None:
        self.end = streamer.end
        self._streamer, self._has_prompt = streamer, False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True


def _config_against(model: Any, config: Any) -> str | None:
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
    from spmd.huggingface._generation_programs import Left

    given = dict(called.arguments)
    given.pop("self")
    more = given.pop("kwargs", {})
    tensors = [t for t in pytree.tree_leaves((given.get("inputs"), more)) if isinstance(t, Tensor)]
    is_on_host = bool(tensors) and all(t.device.type == "cpu" for t in tensors)
    try:
        with nullcontext() if is_on_host else DrawsOnDevice():
            result = theirs(decoding(model, is_on_host), **_on_host(given), **_on_host(more))
    except Left as left:
        if not left.is_expected:
            _leave(model, left, left.is_lasting)
        if called.arguments.get("streamer") is not None:
            called.arguments["streamer"] = _AfterPrompt(called.arguments["streamer"])
        return theirs(*called.args, **called.kwargs)
    return _finished(model, result, is_on_host)


def _on_host(given: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cpu().as_subclass(Tensor) if isinstance(t, Tensor) else t for name, t in given.items()}


def _finished(model: Any, result: Any, is_on_host: bool) -> Any:
    """The result on the device of the prompt, with transformers' cache."""
    from spmd.huggingface._decoding_model import Held
    from spmd.huggingface._kept_tokens import dynamic_cache

    if isinstance(result, Tensor):
        return result if is_on_host else result.to("jax")
    held = result.get("past_key_values")
    if isinstance(held, Held):
        result["past_key_values"] = dynamic_cache(model, held.kept, held.rows_B)
    for name, value in result.items():
        if isinstance(value, Tensor | tuple) and not is_on_host:
            result[name] = value.to("jax") if isinstance(value, Tensor) else tuple(part.to("jax") for part in value)
    return result


def _leave(model: Any, error: Exception, is_lasting: bool) -> None:
    """Say why a model is left to transformers' loop, in this call or from now on."""
    if is_lasting:
        vars(model)[_SPMD_OWN] = True
    warnings.warn(
        message(
            f"{type(model).__name__} generates by transformers' own loop, an operation at a time: it is no program",
            str(error),
            fix="model.generate(..., disable_compile=True) asks for that loop",
        ),
        stacklevel=4,
    )


__all__ = ["reason_against", "register"]
