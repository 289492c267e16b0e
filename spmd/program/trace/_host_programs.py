"""A jaxpr that the host evaluates, for values that Python asks for before a call: counters, flags, sizes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from mesh._devices import devices, host_device
from spmd.base._convert import exact_dtypes
from spmd.base._jax import evaluated
from spmd.base._jax_executables import packed_lowering, unpacked_lowering


class HostProgram:
    """A closed jaxpr that the host evaluates. It caches its last result, since equal layers ask for equal values.

    Args:
        closed: the jaxpr; None for that of a stored trace.
        content: of a stored trace, the jaxpr as a lowered program, which is compiled at the first call.
    """

    def __init__(self, closed: Any, content: bytes = b"") -> None:
        self._closed, self._content = closed, content
        self._given: list[np.ndarray[Any, Any]] = []
        self._result: Any = None

    @property
    def is_exact(self) -> bool:
        """Whether a device computes the same result: from integers to integers, or with operations that keep whole numbers whole."""
        ends = [atom.aval.dtype for atom in (*self._closed.jaxpr.invars, *self._closed.jaxpr.outvars)]
        return all(dtype.kind in "biu" for dtype in ends) or _keeps_whole(self._closed)

    def _evaluated(self, given: list[Any]) -> Any:
        return evaluated(self._closed, given) if self._closed is not None else self._compiled(*map(np.asarray, given))

    @cached_property
    def _compiled(self) -> Any:
        host: Any = host_device() or devices()[0]
        return unpacked_lowering(self._content, host.client).compile()

    def __reduce__(self) -> Any:
        """For traces that are stored."""
        closed = self._closed
        if closed is None:
            return _read_program, (self._content,)
        with exact_dtypes(), jax.default_device(host_device()):
            run = jax.jit(lambda *given: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *given)[0])
            return _read_program, (packed_lowering(run.lower(*closed.in_avals)),)

    def __call__(self, given: list[Any]) -> np.ndarray[Any, Any]:
        if self._result is None or not all(map(is_same, given, self._given)):
            with exact_dtypes():
                self._given, self._result = given, np.asarray(self._evaluated(given))
        return self._result


def _read_program(content: bytes) -> HostProgram:
    return HostProgram(None, content)


_WHOLE = frozenset(  # primitives that keep whole numbers whole
    (
        *("add", "sub", "mul", "max", "min", "neg", "abs", "sign", "add_any", "select_n", "and", "or", "not"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "squeeze", "expand_dims", "transpose"),
    )
)


def _keeps_whole(closed: Any) -> bool:
    constants = [*closed.consts, *(atom.val for eqn in closed.jaxpr.eqns for atom in eqn.invars if hasattr(atom, "val"))]
    return all(map(_is_whole, closed.jaxpr.eqns)) and all(map(is_exact, map(np.asarray, constants)))


def _is_whole(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        return _keeps_whole(eqn.params["jaxpr"])
    return name in _WHOLE or all(atom.aval.dtype.kind in "biu" for atom in (*eqn.invars, *eqn.outvars))


def is_exact(value: np.ndarray[Any, Any]) -> bool:
    """Whether all elements are integers, or floats that are whole numbers in the range where each whole number is a float."""
    if value.dtype.kind in "biu":
        return True
    return bool((np.floor(value) == value).all() and (abs(value) < 2 ** jnp.finfo(value.dtype).nmant).all())


def is_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays are equal bit by bit: NaN equals itself, and -0.0 differs from 0.0."""
    return one is other or (one.shape == other.shape and one.tobytes() == other.tobytes())


__all__ = ["HostProgram", "is_exact", "is_same"]
