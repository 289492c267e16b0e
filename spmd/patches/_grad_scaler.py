"""A GradScaler that is first used inside a trace. Its scale and its growth count are state, which is created outside of the program.

What a scaler keeps between `unscale_` and `update` is a Python dict that torch writes: where a trace fails it is put back, or
the next call, traced or not, would take gradients for unscaled that are not.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from spmd.base._errors import TraceError, called_at, message
from spmd.device._storage import recording, wrap_host
from spmd.patches._table import current, replaced


@contextmanager
def traceable_grad_scaler() -> Generator[None]:
    """While active, a GradScaler creates its state as if no function were traced, and refuses optimizers that branch on values.

    Raises:
        TraceError: from `GradScaler.step` of an optimizer that is not fused.
    """
    torchs = current("torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker")

    def init(self: Any, dev: torch.device) -> None:
        if dev.type != "jax":
            torchs(self, dev)
            return
        token = recording.set(None)
        try:
            self._scale = wrap_host(np.full((), self._init_scale, np.float32))
            self._growth_tracker = wrap_host(np.full((), self._init_growth_tracker, np.int32))
        finally:
            recording.reset(token)

    def maybe_step(self: Any, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if any(found.device.type == "jax" for found in optimizer_state["found_inf_per_device"].values()):
            what = f"GradScaler skips {type(optimizer).__name__}.step() if a gradient is not finite, which is data-dependent"
            raise TraceError(message(what, *called_at(), fix=f"{type(optimizer).__name__}(..., fused=True), which decides on the device"))
        return torchs_step(self, optimizer, optimizer_state, *args, **kwargs)

    def check(self: Any, funcname: str) -> Any:  # `unscale_`, `step` and `update` call this first
        kept = self._per_optimizer_states
        before.setdefault(id(self), (self, kept, {key: dict(state) for key, state in kept.items()}))
        return torchs_check(self, funcname)

    before: dict[int, tuple[Any, dict[int, dict[str, Any]], dict[int, dict[str, Any]]]] = {}
    torchs_step = current("torch.amp.grad_scaler.GradScaler._maybe_opt_step")
    torchs_check = current("torch.amp.grad_scaler.GradScaler._check_scale_growth_tracker")
    with (
        replaced("torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker", init),
        replaced("torch.amp.grad_scaler.GradScaler._maybe_opt_step", maybe_step),
        replaced("torch.amp.grad_scaler.GradScaler._check_scale_growth_tracker", check),
    ):
        try:
            yield
        except BaseException:
            for scaler, kept, states in before.values():
                kept.clear()
                kept.update(states)
                scaler._per_optimizer_states = kept
            raise


__all__ = ["traceable_grad_scaler"]
