"""Replacements for three methods of `torch.nn.Module` that record all their reads at once: the call, and the lookup of a part.

These methods run for every module of a model, and each reads the same dozen places. So a replacement records these reads and does the
work of the method. In other cases (module hooks, TorchScript) torch's method runs, instrumented like all other code.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._torch import in_torchscript_trace
from spmd.program.find._static import static_attribute
from spmd.program.reads._calls import note_call
from spmd.program.reads._hooks import without_hooks
from spmd.program.reads._number_place import ABSENT

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

Original = Callable[..., Any]
RunModule = Callable[[torch.nn.Module, Callable[[], Any]], Any]
_Module: Any = torch.nn.Module
_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_PARTS = ("_parameters", "_buffers", "_modules")


def _call_impl(recording: Recording, original: Original, module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`Module._call_impl`: calls `forward` directly if there are no module hooks."""

    def run() -> Any:
        forward = without_hooks(recording, _forward_of, recording, original, module, args, kwargs)
        return original(module, *args, **kwargs) if forward is None else forward(*args, **kwargs)

    return recording.run_module(module, run)


def _forward_of(recording: Recording, original: Original, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The module's `forward`, with its call recorded; None if there are hooks too, or if finding it runs Python code (a property)."""
    attributes, variables = _attributes_of(recording, module), original.__globals__
    if type(static_attribute(type(module), "forward")) is not types.FunctionType and "forward" not in attributes:
        return None
    registries = [*(attributes.get(name) for name in _HOOKS), *map(variables.get, _GLOBAL_HOOKS)]
    if in_torchscript_trace() or any(registries) or None in registries:
        return None
    for name in _HOOKS:
        recording.load_attr(module, name)
    for name in _GLOBAL_HOOKS:
        recording.load_global(variables, name)
    for registry in registries:
        recording.read_content(registry)
    recording.load_attr(module, "forward")
    return note_call(recording, module.forward, (*args, *kwargs.values()))


def _wrapped_call_impl(recording: Recording, original: Original, module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """`Module._wrapped_call_impl`: calls `_call_impl`, unless the module has a compiled one."""
    is_plain = without_hooks(recording, _calls_call_impl, recording, module)
    return module._call_impl(*args, **kwargs) if is_plain else original(module, *args, **kwargs)


def _calls_call_impl(recording: Recording, module: Any) -> bool:
    attributes = _attributes_of(recording, module)
    if attributes.get("_compiled_call_impl") is not None or type(module)._call_impl is not _Module._call_impl:
        return False
    recording.load_attr(module, "_compiled_call_impl")
    recording.load_attr(module, "_call_impl")
    return "_call_impl" not in attributes


def _getattr(recording: Recording, original: Original, module: Any, name: str) -> Any:
    """`Module.__getattr__`: returns a parameter, a buffer or a module."""
    found = without_hooks(recording, _part_of, recording, module, name)
    return original(module, name) if found is ABSENT else found


def _part_of(recording: Recording, module: Any, name: str) -> Any:
    attributes = _attributes_of(recording, module)
    for kind in _PARTS:
        holder = attributes.get(kind)
        if type(holder) is not dict:
            return ABSENT
        recording._read_item(attributes, kind)
        if name in holder:
            recording._read_item(holder, name)
            return holder[name]
        recording.contains(name, holder)
    return ABSENT


def _attributes_of(recording: Recording, module: Any) -> dict[str, Any]:
    found = recording.attributes(module)
    assert found is not None
    return found


REPLACEMENTS: dict[types.CodeType, Callable[..., Any]] = {
    _Module._call_impl.__code__: _call_impl,
    _Module._wrapped_call_impl.__code__: _wrapped_call_impl,
    _Module.__getattr__.__code__: _getattr,
}

__all__ = ["REPLACEMENTS", "RunModule"]
