"""A GradScaler that is first used inside a trace. Its scale and its growth count are state, which is created outside of the program."""

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

    torchs_step = current("torch.amp.grad_scaler.GradScaler._maybe_opt_step")
    with (
        replaced("torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker", init),
        replaced("torch.amp.grad_scaler.GradScaler._maybe_opt_step", maybe_step),
    ):
        yield


__all__ = ["traceable_grad_scaler"]
