"""Digest of everything that determines the executable of a traced program, so a cached executable is found without lowering.

Note [Digests of programs]
    jax's compilation cache needs the lowered program as its key, and lowering takes as long as tracing. The lowered program is determined
    by the jaxpr, the dtypes and layouts of the arrays, jax's settings, the devices and our own code, so the digest is computed from these.
    Every value in the jaxpr must be of a type that this module can write exactly. Python functions (callbacks, user-defined derivative
    rules) are not, nor are primitives from outside jax and this package. A program with one of these has no digest and is lowered.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.random import rbg_prng_impl, threefry_prng_impl, unsafe_rbg_prng_impl
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mesh.job._join import program_environment
from spmd.base._jax import is_literal
from spmd.base._jax_executables import compile_options_text, is_known_primitive, unspecified

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_RANDOM = (threefry_prng_impl, rbg_prng_impl, unsafe_rbg_prng_impl)
_CODE = ("base", "device", "lowering", "program")  # folders whose code turns a trace into an executable
_FUNCTIONS_OF = {  # functions for differentiation, which lowering does not use
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}


class NoDigest(Exception):
    """A program contains a value that cannot be written as text exactly. The message names the value."""


def digest(jaxpr: Any, consts: Sequence[Any], layout: Sequence[Any], client: Any) -> str:
    """SHA-256 of a program, its devices, jax's settings and our code, as hexadecimal digits.

    Args:
        jaxpr: the traced program.
        consts: values of its constants; None for a constant that is passed as an input.
        layout: other values that determine the executable, such as shardings.
        client: jax's client of the devices.

    Raises:
        NoDigest: the program contains a value of an unknown type.
    """
    text = _Text()
    parts = text.of(jaxpr), text.of(tuple(consts)), text.of(tuple(layout)), _settings_text(client), code_digest()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _Text:
    """Writes values as text. Two texts are equal only if the values compile to the same executable."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}  # id -> (the value, kept alive so that its id stays unique, and its text)

    def of(self, value: Any) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        found = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = value, self._write(value, kind)
        return found[1]

    def _write(self, value: Any, kind: Any) -> str:
        if value is unspecified:
            return "unspecified"
        if any(value is known for known in _RANDOM):
            return f"random({value.name})"
        for known, write in _KINDS:
            if isinstance(value, known):
                return write(self, value)
        if issubclass(kind, (int, float, complex)) and hasattr(value, "dtype"):  # jax's literals
            plain: Any = kind.__mro__[1]
            return f"{plain.__repr__(value)}:{self.of(value.dtype)}"
        if kind is dict:
            return f"dict({', '.join(f'{self.of(k)}: {self.of(v)}' for k, v in value.items())})"
        if isinstance(value, (tuple, list)):
            return f"{_name(kind)}({', '.join(map(self.of, value))})"
        if kind in (set, frozenset):
            return f"set({', '.join(sorted(map(self.of, value)))})"
        if isinstance(value, enum.Enum):
            return f"{_name(kind)}.{value.name}"
        if dataclasses.is_dataclass(value):
            return f"{_name(kind)}({', '.join(f'{f.name}={self.of(getattr(value, f.name))}' for f in dataclasses.fields(value))})"
        raise NoDigest(f"a {kind.__module__}.{kind.__qualname__}")

    def jaxpr(self, jaxpr: Any) -> str:
        """Digest of the equations, with variables numbered in order of appearance."""
        effects = [effect for effect in jaxpr.effects if type(effect).__name__ != "NamedAxisEffect"]
        if effects:
            raise NoDigest(f"operations with effects ({', '.join(sorted(map(str, effects)))})")
        names: dict[Any, str] = {}

        def new(variables: Sequence[Any]) -> str:
            for variable in variables:
                names[variable] = f"v{len(names)}"
            return " ".join([f"{names[v]}:{self.of(v.aval)}" for v in variables])

        def read(atom: Any) -> str:
            return f"={self.of(atom.val)}:{self.of(atom.aval)}" if is_literal(atom) else names[atom]

        lines = [f"{{ {new(jaxpr.constvars)} ; {new(jaxpr.invars)}"]
        for equation in jaxpr.eqns:
            name, operands = equation.primitive.name, " ".join(map(read, equation.invars))
            if not is_known_primitive(equation.primitive):
                raise NoDigest(f"the primitive {name}")
            left_out = _FUNCTIONS_OF.get(name, ())
            try:
                params = " ".join([f"{k}={self.of(v)}" for k, v in sorted(equation.params.items()) if k not in left_out])
            except NoDigest as error:
                raise NoDigest(str(error) if " in " in str(error) else f"{error} in the primitive {name}") from error
            lines.append(f"{new(equation.outvars)} <- {name} {operands} [{params}] {self.of(equation.ctx)}")
        lines.append(f"-> {' '.join(map(read, jaxpr.outvars))} }}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def closed(self, closed: Any) -> str:
        return f"{self.of(closed.jaxpr)} where {self.of(tuple(closed.consts))}"

    def array(self, value: Any) -> str:
        if not getattr(value, "is_fully_addressable", True) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise NoDigest("an array of random keys" if jnp.issubdtype(value.dtype, jax.dtypes.extended) else "an array of other processes")
        host = np.ascontiguousarray(value)
        return f"array({host.dtype.name}{host.shape} {hashlib.sha256(host.tobytes()).hexdigest()})"

    def aval(self, aval: Any) -> str:
        if type(aval) is not ShapedArray:
            raise NoDigest(f"a value of type {type(aval).__name__}")
        kept = aval.weak_type, str(aval.sharding), str(getattr(aval, "manual_axis_type", None)), str(getattr(aval, "memory_space", None))
        return f"{aval.dtype}[{', '.join(map(self.of, aval.shape))}]{kept}"

    def sharding(self, sharding: Any) -> str:
        return f"sharding({self.of(sharding.mesh)}, {sharding.spec!r}, {sharding.memory_kind})"

    def mesh(self, mesh: Any) -> str:
        ids = [getattr(device, "id", None) for device in mesh.devices.flat]  # None in an empty mesh
        return f"mesh({mesh.axis_names}, {mesh.axis_types}, {mesh.devices.shape}, {ids})"

    def context(self, ctx: Any) -> str:
        configs = getattr(ctx, "configs", None)
        return f"context({ctx!r}{'' if configs is None else configs!r})"


def _name(kind: Any) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_KINDS: tuple[tuple[Any, Callable[[_Text, Any], str]], ...] = (
    (ShapedArray, _Text.aval),
    (jax.extend.core.ClosedJaxpr, _Text.closed),
    (jax.extend.core.Jaxpr, _Text.jaxpr),
    (NamedSharding, _Text.sharding),
    (SingleDeviceSharding, lambda _, sharding: repr(sharding)),
    (jax.sharding.Mesh, _Text.mesh),
    ((AbstractMesh, PartitionSpec), lambda _, value: repr(value)),
    ((np.ndarray, np.generic, jax.Array), _Text.array),
    (np.dtype, lambda _, dtype: f"dtype({dtype.name})"),
    (type(jax.make_jaxpr(abs)(1.0).jaxpr.eqns[0].ctx), _Text.context),
)

# prefixes of jax's settings that do not affect an executable
_IGNORED_SETTINGS = tuple(
    f"jax_{name}"
    for name in (
        *("compilation_cache", "persistent_cache", "enable_compilation_cache", "raise_persistent_cache", "log", "explain", "dump"),
        *("include_debug_info_in_dumps", "debug_log", "debug_leaked", "transfer_guard", "traceback", "tracer_error", "send_traceback"),
        *("check_tracer_leaks", "compiler_detailed_logging", "share_binary", "hlo_source", "pprint"),
    )
)


def _settings_text(client: Any) -> str:
    """jax's version, its settings in this thread, flags in the environment, the devices and the compiler's options."""
    settings = {name: value for name, value in jax.config.values.items() if not name.startswith(_IGNORED_SETTINGS)}
    here = [getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")]
    devices = [(device.id, device.platform, device.device_kind) for device in client.devices()]
    flags = sorted(program_environment().items())
    known = jax.__version__, sorted(settings.items(), key=repr), here, flags, devices, client.platform_version, compile_options_text(client)
    return repr(known)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of the files in this package that affect executables."""
    root = Path(__file__).parents[2]
    files = sorted(file for folder in _CODE for file in (root / folder).rglob("*.py"))
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    return hashlib.sha256(b"".join(digests)).hexdigest()


__all__ = ["NoDigest", "code_digest", "digest"]
