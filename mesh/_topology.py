"""Devices of a TPU topology that this machine does not have. Programs can be compiled for them but not run on them.

    mesh.topology_devices("v5e:2x4")                                        # 8 devices, from libtpu, on a machine without a TPU
    pod = mesh.Mesh(range(256), (32, 8), ("data", "model"), topology="v5e:16x16")

libtpu contains the real XLA:TPU compiler and needs no TPU to compile. Topology names that it accepts: v4:12x16x16, v5e:2x2 .. v5e:16x16,
v5p:8x8x16, v6e:16x16, tpu7x:4x4x4. This module is independent of meshes.
"""

from __future__ import annotations

import functools
import os
from typing import cast

from jax.experimental import topologies

from mesh._devices import Device
from mesh._mesh_errors import DeviceError, message

# Without the first three, libtpu queries the cloud's metadata service and waits minutes for an answer that never comes.
# Without the last, only one process per machine may load libtpu, a restriction meant for processes that own a chip.
_FOR_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# On chips with sparse cores (v5p), XLA offloads embedding lookups to them. jaxlib cannot print such a program (0.10.2 with libtpu 0.0.51:
# "async-update instruction should have 1 operands but sees 3"), so its collectives could not be counted.
_OPTIONS: dict[str, str | bool] = {"xla_tpu_offload_gather_to_sparsecore": False}


def topology_options() -> dict[str, str | bool]:
    """Compiler options for `jax.stages.Lowered.compile` that keep a program for `topology_devices` printable as HLO text."""
    return dict(_OPTIONS)


@functools.cache
def topology_devices(name: str) -> tuple[Device, ...]:
    """The devices of a TPU slice, in the compiler's order. A device's position is its logical id in meshes over this topology.

    Args:
        name: chip generation and shape, e.g. "v5e:16x16".

    Raises:
        DeviceError: libtpu is not installed, is in use by another process, or does not support the topology.
    """
    before = dict(os.environ)
    for variable, value in _FOR_LIBTPU.items():
        os.environ.setdefault(variable, value)
    try:
        found = topologies.get_topology_desc(topology_name=name, platform="tpu")
    except Exception as error:  # jax and libtpu raise RuntimeError, NotImplementedError and XlaRuntimeError here
        raise DeviceError(
            message(
                f"topology {name!r} cannot be compiled for here",
                str(error).splitlines()[0],
                fix="pip install 'spmd-mesh[tpu]' for libtpu, and write the topology as in 'v5e:2x4' or 'v5p:8x8x16'",
            )
        ) from error
    finally:  # including what libtpu itself sets: a child process that inherited it would act as a worker of a pod
        for variable in os.environ.keys() - before.keys():
            del os.environ[variable]
    return tuple(cast("list[Device]", found.devices))


def has_topology() -> bool:
    """Whether `topology_devices` has succeeded in this process, so that libtpu is loaded."""
    return topology_devices.cache_info().currsize > 0


__all__ = ["has_topology", "topology_devices", "topology_options"]
