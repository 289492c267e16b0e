"""Serialization of jax's executables, with the private names of jax that it needs.

A serialized executable has two parts. The call is a pickle of jax's own data (types, layouts, pytrees of arguments and results). The
executable itself is serialized by XLA. Reading either part can execute code: see docs/security.md.

Note [Collectives that lose their order]
    XLA:CPU runs independent operations of a device at the same time, but its collectives one after the other, in the same order on all
    devices. An executable that was serialized and read again keeps this order only within one computation: the body of each loop and
    each branch gets an order of its own (`CreateResourceFromProto` is called for each sequence of `thunk_proto_serdes.cc`). Then some
    devices wait in a loop's collective, and others in one outside it. After 40 s XLA ends the process. A training step of a Llama with
    four layers in a loop, over 8 devices, did so in each of 6 processes that read it, and in none of 9 that compiled it. So such
    executables are not written to files. The lowered program is, which a later process compiles without tracing and lowering.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from mesh.platform._jax_runtime import missing

try:
    from jax._src.compilation_cache import decompress_executable, extract_executable_and_time
    from jax._src.compiler import get_compile_options as _get_compile_options
    from jax._src.interpreters.mlir import make_ir_context as _make_ir_context
    from jax._src.interpreters.mlir import module_to_bytecode as _module_to_bytecode
    from jax._src.interpreters.pxla import MeshComputation as _MeshComputation
    from jax._src.interpreters.pxla import UnloadedMeshExecutable as _UnloadedMeshExecutable
    from jax._src.lib import _jax as _xla  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib import lapack as _lapack  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.lib.mlir import ir as _ir  # pyright: ignore[reportPrivateImportUsage]
    from jax._src.named_sharding import UNSPECIFIED as unspecified
except ImportError as error:
    raise missing(str(error)) from error

_ROOTS = ("jax", "jaxlib", "ml_dtypes", "numpy")
_BUILTINS = frozenset(("complex", "dict", "frozenset", "list", "set", "slice", "tuple"))


_COLLECTIVES = frozenset(
    f"k{kind}{part}"
    for kind in ("AllGather", "AllReduce", "AllToAll", "CollectiveBroadcast", "CollectivePermute", "RaggedAllToAll", "ReduceScatter")
    for part in ("", "Start")
)
_primitives: dict[int, Primitive] = {}  # primitives defined by jax and this package, by id


def is_known_primitive(primitive: Primitive) -> bool:
    """Whether a module of jax or of this package defines the primitive. Their modules are searched again only for an unknown one."""
    if id(primitive) not in _primitives:
        modules = [module for name, module in list(sys.modules.items()) if name.startswith(("jax.", "spmd."))]
        found = [value for module in modules for value in list(vars(module).values()) if isinstance(value, Primitive)]
        _primitives.update((id(value), value) for value in found)
    return id(primitive) in _primitives


def compile_options_text(client: Any) -> bytes:
    """The serialized compiler options that result from the present settings and environment."""
    return _get_compile_options(num_replicas=1, num_partitions=1, backend=client).SerializeAsString()


def is_in_order_when_read(executable: Any) -> bool:
    """Whether a serialized executable would run its collectives in one order. See Note [Collectives that lose their order].

    Args:
        executable: jaxlib's executable. One that is compiled ahead of time, for chips that are not here, has no devices.
    """
    devices = executable.local_devices() if hasattr(executable, "local_devices") else []
    if not devices or devices[0].platform != "cpu" or len(devices) == jax.process_count() == 1:
        return True
    computations = executable.hlo_modules()[0].computations()
    return sum(any(i.opcode.name in _COLLECTIVES for i in computation.instructions()) for computation in computations) < 2


class _Pickler(pickle.Pickler):
    """Replaces devices by their ids, and the executable and the client by names."""

    def __init__(self, file: io.BytesIO, executable: Any, client: Any) -> None:
        super().__init__(file)
        self._executable, self._client = executable, client

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._executable:
            return ("executable",)
        if obj is self._client:
            return ("client",)
        if isinstance(obj, jax.Device):
            return ("device", obj.id)
        return None


class _Unpickler(pickle.Unpickler):
    """Reads pickles of `_Pickler` with the devices of this process. Refuses classes other than those of jax, numpy and ml_dtypes."""

    def __init__(self, file: io.BytesIO, executable: Any, client: Any) -> None:
        super().__init__(file)
        self._executable, self._client = executable, client
        self._devices = {device.id: device for device in client.devices()}

    def persistent_load(self, pid: Any) -> Any:
        if pid == ("executable",):
            return self._executable
        return self._client if pid == ("client",) else self._devices[pid[1]]

    def find_class(self, module_name: str, global_name: str) -> Any:
        root = module_name.partition(".")[0]
        if root not in _ROOTS and not (root == "builtins" and global_name in _BUILTINS):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in an executable")
        return super().find_class(module_name, global_name)


def packed_call(compiled: Any) -> bytes:
    """Serialize jax's data for calling an executable, without the executable.

    Raises:
        ValueError: the executable calls back into Python, or closes over arrays.
    """
    unloaded = compiled._executable._unloaded_executable
    if unloaded is None or unloaded.host_callbacks or unloaded.keepalive or unloaded.mut or compiled._params.const_args:
        raise ValueError("it calls back into Python, or closes over arrays")
    info, in_tree = jax.tree.flatten(compiled.args_info)
    fields = {field.name: getattr(unloaded, field.name) for field in dataclasses.fields(unloaded)}
    executable = compiled.runtime_executable()
    with io.BytesIO() as file:
        _Pickler(file, executable, unloaded.backend).dump((fields, info, in_tree, compiled.out_tree, compiled._no_kwargs))
        return file.getvalue()


def unpacked(call: bytes, executable: Any, client: Any) -> Any:
    """Combine the result of `packed_call` and the executable from `loaded` to a callable `jax.stages.Compiled`."""
    fields, info, in_tree, out_tree, no_kwargs = _Unpickler(io.BytesIO(call), executable, client).load()
    unloaded = _UnloadedMeshExecutable(**fields)
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(info), out_tree, no_kwargs=no_kwargs)


def packed_lowering(lowered: jax.stages.Lowered) -> bytes:
    """Serialize a lowered program.

    Raises:
        ValueError: it calls back into Python, or closes over arrays.
    """
    lowering: Any = lowered._lowering
    options = lowering.compile_args
    if lowering.const_args or options["host_callbacks"] or options["keepalive"] or options["mut"]:
        raise ValueError("it calls back into Python, or closes over arrays")
    info, in_tree = jax.tree.flatten(lowered.args_info)
    ids = [device.id for device in lowering._device_list]
    made = lowering._name, lowering._donated_invars, lowering._platforms, lowering._compiler_options_kvs, ids
    with io.BytesIO() as file:
        content = _module_to_bytecode(lowering._hlo), made, options, info, in_tree, lowered.out_tree, lowered._no_kwargs
        _Pickler(file, object(), options["backend"]).dump(content)
        return file.getvalue()


def unpacked_lowering(content: bytes, client: Any) -> jax.stages.Lowered:
    """The lowered program that `packed_lowering` serialized."""
    module, made, options, info, in_tree, out_tree, no_kwargs = _Unpickler(io.BytesIO(content), None, client).load()
    name, donated, platforms, compiler_options, ids = made
    with _make_ir_context():
        hlo = _ir.Module.parse(module)
    by_id = {device.id: device for device in client.devices()}
    devices = tuple(by_id[number] for number in ids)
    lowering = _MeshComputation(name, hlo, [], donated, platforms, compiler_options, devices, **options)
    return jax.stages.Lowered(lowering, in_tree.unflatten(info), out_tree, no_kwargs)


def device_ids(compiled: Any) -> list[int]:
    """Ids of the devices that an executable runs on, in its order."""
    return [device.id for device in compiled._executable._unloaded_executable.device_list]


@dataclasses.dataclass(frozen=True)
class Written:
    """A serialized executable.

    Attributes:
        content: as serialized by XLA; with `in_cache`, as an entry of jax's compilation cache (compressed, with a compile time).
        in_cache: the form of `content`.
    """

    content: bytes
    in_cache: bool = False

    def plain(self) -> bytes:
        """The executable as serialized by XLA."""
        return extract_executable_and_time(decompress_executable(self.content))[0] if self.in_cache else self.content


def written(compiled: Any) -> Written:
    """Serialize an executable that was compiled in this process. (XLA:CPU would serialize a deserialized one without its code.)"""
    executable = compiled.runtime_executable()
    return Written(executable.client.serialize_executable(executable))


def loaded(executable: Written, client: Any, device_ids: Sequence[int]) -> Any:
    """Deserialize an executable for the devices with these ids.

    Its calls of LAPACK are null pointers until jax has looked up the functions, which it does when it lowers such a call. The process
    ended by a segmentation fault otherwise.
    """
    by_id = {device.id: device for device in client.devices()}
    devices = _xla.DeviceList(tuple(by_id[number] for number in device_ids))
    plain = executable.plain()
    if client.platform == "cpu" and b"lapack_" in plain:
        _lapack.prepare_lapack_call("potrf_ffi", np.dtype(np.float32))
    return client.deserialize_executable(plain, executable_devices=devices)


__all__ = [
    "Written",
    "compile_options_text",
    "device_ids",
    "is_in_order_when_read",
    "is_known_primitive",
    "loaded",
    "packed_call",
    "packed_lowering",
    "unpacked",
    "unpacked_lowering",
    "unspecified",
    "written",
]
