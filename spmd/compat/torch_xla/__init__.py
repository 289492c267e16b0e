"""torch_xla's API on this package, so that unedited SPMD programs run.

    import spmd.compat.torch_xla
    spmd.compat.torch_xla.install()          # first in the program, before it imports torch_xla

    python -m spmd.compat.torch_xla train.py --epochs 3        # or without editing it

`docs/migration.md` lists what is the same, what is better, and what is refused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from mesh import AcceleratorIdle, Mesh, MeshError, virtual_devices
from mesh.launch._xla_environment import set_spmd_flags, torch_xla_environment
from spmd.base._errors import DeviceSlotError, message
from spmd.compat.torch_xla import (
    _attention_kernels,
    _debug_metrics,
    _device_names,
    _dtensor_specs,
    _meshes,
    _missing,
    _module_table,
    _process_groups,
    _sharding_ops,
    _step_ends,
    _tensor_views,
)
from spmd.xla_names._mode import use_spmd

_installed: list[ExitStack] = []
_listening: list[bool] = []


def install() -> None:
    """Put modules `torch_xla`, `torch_xla.core.xla_model`, ... into `sys.modules`, and make "xla" mean device 'jax'.

    Reads torch_xla's environment variables: `PJRT_DEVICE=CPU CPU_NUM_DEVICES=8` gives eight virtual devices. A second call does nothing.

    Raises:
        DeviceSlotError: the real torch_xla is loaded.
        DeviceError: the environment asks for virtual devices too late.
        SpmdError: the environment asks for automatic sharding.
    """
    if _installed:
        return
    if "torch_xla" in sys.modules:
        raise DeviceSlotError(
            message(
                "torch_xla is already loaded", f"from {sys.modules['torch_xla']}", fix="call install() before anything imports torch_xla"
            )
        )
    _take_environment()
    if not _listening:
        _debug_metrics.listen()
        _listening.append(True)
    with ExitStack() as stack:
        made = _module_table.modules()
        sys.modules.update(made)
        stack.callback(lambda: [sys.modules.pop(name, None) for name in made])
        _missing.enter(stack)
        _sharding_ops.register()
        _attention_kernels.register()
        _process_groups.register()
        set_spmd_flags()
        _tensor_views.enter(stack)
        _dtensor_specs.enter(stack)
        _extend_meshes(stack)
        _device_names.enter(stack)
        _debug_metrics.enter(stack)
        _step_ends.record()
        stack.callback(_step_ends.run_eagerly)
        _installed.append(stack.pop_all())


def uninstall() -> None:
    """Undo `install`."""
    if _installed:
        _installed.pop().close()


@contextmanager
def installed() -> Generator[None]:
    """A context manager: `install` for a `with` block."""
    before = bool(_installed)
    install()
    try:
        yield
    finally:
        if not before:
            uninstall()


def _take_environment() -> None:
    asked = torch_xla_environment()
    if asked.auto_sharding:
        use_spmd(auto=True)
    if asked.device == "CPU" and asked.num_cpu_devices is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AcceleratorIdle)  # the program itself said CPU
            virtual_devices(asked.num_cpu_devices)


def _extend_meshes(stack: ExitStack) -> None:
    """Make errors of meshes and specs AssertionErrors too, as in torch_xla, and add two methods to Mesh."""
    bases = MeshError.__bases__
    MeshError.__bases__ = (*bases, AssertionError)
    stack.callback(setattr, MeshError, "__bases__", bases)
    for name, method in (("get_op_sharding", _meshes.op_sharding), ("get_jax_mesh", Mesh.to_jax)):
        setattr(Mesh, name, (lambda make: lambda self, *spec: make(self, *spec))(method))
        stack.callback(delattr, Mesh, name)


__all__ = ["install", "installed", "uninstall"]
