"""The name of a tensor for an error message: found when the error is written, at no cost before.

A tensor does not know which module holds it, so the garbage collector is asked who refers to it. Nothing is kept.
"""

from __future__ import annotations

import gc
from typing import Any

import torch


def name_of(tensor: torch.Tensor) -> str:
    """`parameter 'layers.0.up.weight'`, `buffer ...`, or `tensor float32[1024, 4096]` if no module holds it."""
    for holder in gc.get_referrers(tensor):
        if not isinstance(holder, dict):
            continue
        key = next((k for k, v in holder.items() if v is tensor and isinstance(k, str)), None)
        if key is None:
            continue
        for owner in _modules_with(holder):
            kind = "parameter" if holder is owner.__dict__.get("_parameters") else "buffer"
            return f"{kind} '{'.'.join([*_path(owner), key])}'"
    return f"tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _modules_with(registry: dict[Any, Any]) -> list[torch.nn.Module]:
    """Modules one of whose registries is this very dict."""
    found: list[torch.nn.Module] = []
    for referrer in gc.get_referrers(registry):
        owners: list[Any] = [referrer] if isinstance(referrer, torch.nn.Module) else []
        if isinstance(referrer, dict):
            owners = [o for o in gc.get_referrers(referrer) if isinstance(o, torch.nn.Module)]
        for owner in owners:
            if any(registry is owner.__dict__.get(name) for name in ("_parameters", "_buffers")):
                found.append(owner)
    return found


def _path(module: torch.nn.Module, limit: int = 64) -> list[str]:
    """Names from the outermost module that holds `module` down to it."""
    path: list[str] = []
    for _ in range(limit):
        above = _holder(module)
        if above is None:
            return path
        module, name = above
        path.insert(0, name)
    return path


def _holder(module: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    for referrer in gc.get_referrers(module):
        if not isinstance(referrer, dict):
            continue
        name = next((k for k, v in referrer.items() if v is module and isinstance(k, str)), None)
        if name is None:
            continue
        for second in gc.get_referrers(referrer):
            candidates = [second] if isinstance(second, torch.nn.Module) else gc.get_referrers(second) if isinstance(second, dict) else []
            for owner in candidates:
                if isinstance(owner, torch.nn.Module) and owner.__dict__.get("_modules") is referrer:
                    return owner, name
    return None
