"""`DistributedDataParallel` of a module on device 'jax': parameters replicated, the batch split over all devices."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mesh import Mesh, PartitionSpec, device_count
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_distributed._batches import split_batch
from spmd.device._layout import annotation_of
from spmd.sharding._annotate import mark_sharding
from spmd.sharding._device_mesh import is_of_devices, mesh_axes


class OneProgramDataParallel(DistributedDataParallel):
    """The wrapper, with `module` and `no_sync`. It has no reducer: gradients are summed where the program computes them.

    Args:
        module: on device 'jax'; tensors that are marked keep their layout.
        device_ids: if given, batches on the CPU are moved to the device, as in torch. Which ids does not matter.
        device_mesh: mesh whose axes shard the batch; default: all devices.
        options: torch's other arguments configure its reducer and have no effect.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, *args: Any, device_mesh: Any = None, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self._moves = bool(device_ids)
        self.device_ids, self.output_device, self.device = None, None, torch.device("jax")
        if is_of_devices(device_mesh):
            found = mesh_axes(device_mesh)
            self.mesh, self.axes = found.mesh, found.names
        else:
            self.mesh = Mesh(range(device_count()), (device_count(),), ("data",))
            self.axes = self.mesh.axis_names
        for tensor in (*module.parameters(), *module.buffers()):
            if annotation_of(tensor) is None:
                mark_sharding(tensor, self.mesh, PartitionSpec(*(None,) * tensor.dim()))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = split_batch((inputs, kwargs), self.mesh, self.axes, moves=self._moves)
        return self.module(*inputs, **kwargs)

    def train(self, mode: bool = True) -> Any:
        return nn.Module.train(self, mode)

    def __getstate__(self) -> Any:
        return vars(self)

    def __setstate__(self, state: Any) -> None:
        nn.Module.__setstate__(self, state)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Do nothing: gradients are already sums over the whole batch, and accumulate as without it."""
        yield

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing: no rank has fewer batches than another."""
        yield

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise SpmdError(message("the compiler chooses the collectives of a program, and none can be replaced", fix="leave the hook out"))


def made(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`DistributedDataParallel.__new__`: makes our class for a module on the device."""
    module = args[0] if args else kwargs.get("module")
    if cls is DistributedDataParallel and isinstance(module, nn.Module) and any(p.device.type == "jax" for p in module.parameters()):
        return nn.Module.__new__(OneProgramDataParallel)
    return nn.Module.__new__(cls)


__all__ = ["OneProgramDataParallel", "made"]
