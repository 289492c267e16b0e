"""Rules that need values, in a trace: they run on those that the host knows, and assume what the program can check."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base._errors import TraceError, user_line
from spmd.base._jax import known_value
from spmd.device._checks import Check
from spmd.device._storage import recording
from spmd.lowering._registry import assuming


def run_on_values(plan: Any, dynamic: list[Any], key: Any) -> Any:
    """`plan.run` in a trace, of a rule that needs values: those that the host knows are there, as numpy arrays.

    Values of inputs are asked for one by one, masks first, until the rule has what it needs: the program will hold for these.
    """
    recorder = recording.get()
    if recorder is None:
        return plan.run(dynamic, key)
    known = [known_value(value, recorder.is_state) if isinstance(value, jax.Array) else value for value in dynamic]
    unknown = sorted((i for i, k in enumerate(known) if k is None), key=lambda i: (dynamic[i].dtype != np.bool_, dynamic[i].size))
    while True:
        try:
            return _run_where_known(plan, dynamic, known, key)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            found = next(((i, v) for i in unknown if known[i] is None and (v := recorder.known_value(dynamic[i])) is not None), None)
            if found is None:
                return _run_assuming(recorder, plan, dynamic, known, key)
            known[found[0]] = found[1]


def _run_assuming(recorder: Any, plan: Any, dynamic: list[Any], known: list[Any], key: Any) -> Any:
    """The same where the host knows no more: what the rule assumes is checked by the program."""
    with assuming() as made:
        result = _run_where_known(plan, dynamic, known, key)
    for is_wrong, text, fix in made:
        elsewhere = "CPU torch's result has another shape there, or is an error"
        if not recorder.expect(is_wrong, Check(TraceError, text, user_line(), fix, elsewhere)):
            raise jax.errors.JAXTypeError(text)  # no flag can leave a branch or a loop
    return result


def _run_where_known(plan: Any, dynamic: list[Any], known: list[Any], key: Any) -> Any:
    """`known`: for each value what the host knows of it, or None."""
    if any(value is None for value in known):
        there = [np.asarray(k) if isinstance(k, jax.Array) else k for k in known]
        return plan.run([value if k is None else k for value, k in zip(dynamic, there, strict=True)], key)
    with jax.ensure_compile_time_eval():
        return plan.run([jnp.asarray(k) if isinstance(value, jax.Array) else k for value, k in zip(dynamic, known, strict=True)], key)


__all__ = ["run_on_values"]
