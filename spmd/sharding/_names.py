"""The name of a tensor for an error message: found when the error is written, at no cost before.

A tensor does not know which module holds it, so all modules are asked, as the garbage collector lists them: one walk over the
heap, tenths of a second where that is large. Callers ask only when they have something to say. Nothing is kept.
"""

from __future__ import annotations

import gc

import torch


def name_of(tensor: torch.Tensor) -> str:
    """`parameter 'layers.0.up.weight'`, `buffer ...`, or `tensor float32[1024, 4096]` if no module holds it."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    for module in modules:
        for kind, registry in (("parameter", "_parameters"), ("buffer", "_buffers")):
            for key, held in module.__dict__.get(registry, {}).items():
                if held is tensor:
                    return f"{kind} '{'.'.join([*_path(module, modules), key])}'"
    return f"tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _path(module: torch.nn.Module, modules: list[torch.nn.Module], limit: int = 64) -> list[str]:
    """Names from the outermost module that holds `module` down to it."""
    above: dict[int, tuple[torch.nn.Module, str]] = {}
    for holder in modules:
        for name, child in holder.__dict__.get("_modules", {}).items():
            above.setdefault(id(child), (holder, name))
    path: list[str] = []
    while id(module) in above and len(path) < limit:
        module, name = above[id(module)]
        path.insert(0, name)
    return path
