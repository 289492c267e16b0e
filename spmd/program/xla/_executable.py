"""Lowers a function of arrays for a mesh, and reports memory, FLOPs and collectives of its executable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesh import Mesh
from spmd.base._convert import exact_dtypes
from spmd.device._partitioner import avoid_faults, raise_other_devices
from spmd.program.xla import _hlo, _partition
from spmd.program.xla._memory_report import MemoryReport, memory


class Executable:
    """A compiled program and its mesh.

    Attributes:
        compiled: jax's executable.
        mesh: the mesh that it runs on; None for one device.
    """

    compiled: Any
    mesh: Mesh | None

    def memory(self) -> MemoryReport:
        """Per-device bytes of arguments, outputs and temporaries, and their peak, as reported by the compiler."""
        return memory(self.compiled)

    def flops(self) -> int:
        """Floating-point operations of one call on one device (dots and convolutions, 2 per multiply-add)."""
        return _hlo.flops(self.hlo())

    def hlo(self) -> str:
        """The optimised HLO text."""
        text = self.compiled.as_text()
        assert text is not None
        return text

    def collectives(self) -> _hlo.CollectiveReport:
        """The collectives of the compiled program."""
        names = () if self.mesh is None else tuple(self.mesh.axis_names)
        sizes = () if self.mesh is None else tuple(self.mesh.mesh_shape)
        return _hlo.collectives(self.hlo(), names, sizes)


def lowered(run: Callable[..., Any], args: Sequence[Any], *, donate: bool, pinned: Any, mesh: Mesh | None, platform: str) -> Any:
    """Lower `run` for arguments like `args`, and constrain layouts that XLA's partitioner gets wrong. Call it inside `exact_dtypes`.

    Args:
        donate: whether the arrays of the first argument are donated.
        pinned: shardings of the results; None where XLA chooses.

    Raises:
        SpmdError: arguments are on different devices.
    """
    jitted = jax.jit(run, donate_argnums=0 if donate else (), out_shardings=pinned)
    try:
        found = _partition.lowered(jitted, args, None if mesh is None else mesh.to_jax(), platform)
    except ValueError as error:  # a value is marked over a mesh of other devices
        raise_other_devices(error)
        raise
    if mesh is not None:
        avoid_faults(found, platform)
    return found


def on_all_devices(host: np.ndarray[Any, Any], replicated: Any) -> Any:
    """Upload a host array.

    Args:
        replicated: the replicated sharding over a mesh, or None for one device.
    """
    with exact_dtypes():
        if replicated is None:
            return jnp.asarray(host)
        if replicated.is_fully_addressable:
            return jax.device_put(host, replicated)
        # jax.device_put would run a collective to compare the processes' values, which `_job_checks` does already
        return jax.make_array_from_callback(host.shape, replicated, lambda index: host[index])


__all__ = ["Executable", "lowered", "on_all_devices"]
