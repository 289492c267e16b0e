"""`check=True`: traces on every call and compares, so that a stale constant of the program raises an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from spmd.base._errors import TraceError, message
from spmd.device._storage import buffer_of, is_device_tensor
from spmd.program.trace._captured import Captured
from spmd.program.xla._jaxpr import constants_within


def require_same(name: str, old: Captured, new: Captured) -> None:
    """Compare the current trace of step `name`, `new`, with the trace `old` of its program.

    Raises:
        TraceError: they differ. The message names the first value, operation or state tensor that differs.
    """
    difference = _difference(old, new)
    if difference is not None:
        raise TraceError(
            message(
                f"{name} now traces to a different program: a value that Python computes is a constant of the compiled one",
                *difference,
                fix="pass the value as a tensor argument, or keep it in an attribute of a module (which retraces when it changes)",
            )
        )


def _difference(old: Captured, new: Captured) -> list[str] | None:
    new = _in_order_of(old, new)
    then, now = (str(_without_layouts(captured.jaxpr.jaxpr)).splitlines() for captured in (old, new))
    for a, b in zip(then, now, strict=False):
        if a != b:
            return [f"traced: {a.strip()}", f"now:    {b.strip()}"]
    if len(then) != len(now):
        return [f"traced: {len(then)} operations", f"now:    {len(now)} operations"]
    within, within_now = (constants_within(captured.jaxpr.jaxpr) for captured in (old, new))
    for held, held_now in zip(within, within_now, strict=True):
        if held is not held_now and not np.array_equal(np.asarray(held), np.asarray(held_now), equal_nan=_is_float(held)):
            return [f"traced: the constant {_short(held)}", f"now:    the constant {_short(held_now)}"]
    replaced, replaced_now = map(_replaced, (old, new))
    for held, held_now, buffer, buffer_now in zip(old.jaxpr.consts, new.jaxpr.consts, old.state.consts, new.state.consts, strict=True):
        is_replaced = buffer in replaced and replaced[buffer] == replaced_now.get(buffer_now)
        if buffer is not buffer_now and not is_replaced and _owner(old, buffer) is not _owner(new, buffer_now):
            return [f"it reads another tensor of shape {tuple(np.shape(held_now))}"]
        if buffer is None and not np.array_equal(np.asarray(held), np.asarray(held_now), equal_nan=_is_float(held)):
            return [f"traced: the constant {_short(held)}", f"now:    the constant {_short(held_now)}"]
    kinds, kinds_now = ([leaf.kind for leaf in captured.outputs.leaves] for captured in (old, new))
    if kinds != kinds_now:
        return [f"traced: its results were {kinds}", f"now:    they are {kinds_now}"]
    for leaf, leaf_now in zip(old.outputs.leaves, new.outputs.leaves, strict=True):
        if leaf.kind == "host" and leaf.value != leaf_now.value:
            return ["it returns a CPU tensor with other values"]
        if leaf.kind == "static" and leaf.value is not leaf_now.value and leaf.value != leaf_now.value:
            return [f"traced: it returned {leaf.value!r}", f"now:    it returns {leaf_now.value!r}"]
    return None


def _without_layouts(value: Any) -> Any:
    """A jaxpr, or a parameter of an equation, without the layouts of results. Inputs that are laid out by the first call bring them."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_without_layouts, value)) if type(value) in (tuple, list) else value
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=_without_layouts(value.jaxpr))
    if not isinstance(value, Jaxpr):
        return value
    return value.replace(eqns=[equation.replace(params=_params(equation)) for equation in value.eqns])


def _params(equation: Any) -> dict[str, Any]:
    names = () if equation.primitive.name == "sharding_constraint" else ("sharding", "out_sharding")
    return {name: None if name in names else _without_layouts(value) for name, value in equation.params.items()}


def _replaced(captured: Captured) -> dict[Any, int]:
    """The buffers of the tensors that every call replaces, each with its position in `TraceState.held`."""
    return {buffer_of(h.value): i for i, h in enumerate(captured.state.held) if is_device_tensor(h.value)}


def _owner(captured: Captured, buffer: Any) -> Any:
    return captured.state.slots.get(buffer, buffer)


def _in_order_of(old: Captured, new: Captured) -> Captured:
    """The new trace with its constants in the order of the old trace, if both read the same buffers; else the new trace unchanged."""
    place = {id(b): i for i, b in enumerate(new.state.consts) if b is not None}
    order = [place.get(id(b)) if b is not None else i for i, b in enumerate(old.state.consts)]
    if sorted(i for i in order if i is not None) != list(range(len(new.state.consts))):
        return new
    wanted = [i for i in order if i is not None]
    closed = new.jaxpr
    jaxpr = closed.jaxpr.replace(constvars=[closed.jaxpr.constvars[i] for i in wanted])
    reordered = closed.replace(jaxpr=jaxpr, consts=[closed.consts[i] for i in wanted])
    return replace(new, jaxpr=reordered, state=replace(new.state, consts=[new.state.consts[i] for i in wanted]))


def _is_float(value: Any) -> bool:
    return np.issubdtype(np.asarray(value).dtype, np.inexact)


def _short(value: Any) -> str:
    return np.array2string(np.asarray(value), threshold=6, edgeitems=3)
