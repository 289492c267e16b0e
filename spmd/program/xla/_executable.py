"""A function of arrays lowered for a mesh, and what can be read from its executable."""

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
    """What was compiled, and the mesh it runs on.

    Attributes:
        compiled: jax's executable.
        mesh: None: one device.
    """

    compiled: Any
    mesh: Mesh | None

    def memory(self) -> MemoryReport:
        """Bytes of arguments, outputs, temporaries and their peak on each device, as reported by the compiler."""
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
    """`run` lowered for arguments like `args`, kept from the layouts that XLA's partitioner gets wrong (call inside `exact_dtypes`).

    Args:
        donate: the first argument's arrays are handed over.
        pinned: the shardings of the results, None where XLA chooses.

    Raises:
        SpmdError: arguments lie on different devices.
    """
    jitted = jax.jit(run, donate_argnums=0 if donate else (), out_shardings=pinned)
    try:
        found = _partition.lowered(jitted, args, None if mesh is None else mesh.to_jax(), platform)
    except ValueError as error:  # a value in it is marked over another mesh
        raise_other_devices(error)
        raise
    if mesh is not None:
        avoid_faults(found, platform)
    return found


def on_all_devices(host: np.ndarray[Any, Any], replicated: Any) -> Any:
    """Host values on every device of a mesh (`replicated`: that sharding), or on the one device (None)."""
    with exact_dtypes():
        if replicated is None:
            return jnp.asarray(host)
        if replicated.is_fully_addressable:
            return jax.device_put(host, replicated)
        # jax.device_put would run a collective of its own to compare the processes' values; see `_job_checks` for that
        return jax.make_array_from_callback(host.shape, replicated, lambda index: host[index])


__all__ = ["Executable", "lowered", "on_all_devices"]
