"""The name of a tensor for an error message, looked up only when the error is written.

A tensor does not know the module that contains it. So the lookup searches all modules that the garbage collector lists: one walk
over the heap, which takes tenths of a second if the heap is large. Nothing is cached.
"""

from __future__ import annotations

import torch

from spmd.base._live_objects import live_instances


def name_of(tensor: torch.Tensor) -> str:
    """`parameter 'layers.0.up.weight'`, `buffer ...`, or `tensor float32[1024, 4096]` if no module contains it."""
    modules = live_instances(torch.nn.Module)
    for module in modules:
        for kind, registry in (("parameter", "_parameters"), ("buffer", "_buffers")):
            for key, held in module.__dict__.get(registry, {}).items():
                if held is tensor:
                    return f"{kind} '{'.'.join([*_path(module, modules), key])}'"
    return f"tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _path(module: torch.nn.Module, modules: list[torch.nn.Module], limit: int = 64) -> list[str]:
    """Attribute names from the outermost module down to `module`."""
    above: dict[int, tuple[torch.nn.Module, str]] = {}
    for holder in modules:
        for name, child in holder.__dict__.get("_modules", {}).items():
            above.setdefault(id(child), (holder, name))
    path: list[str] = []
    while id(module) in above and len(path) < limit:
        module, name = above[id(module)]
        path.insert(0, name)
    return path
