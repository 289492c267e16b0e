"""Runs rules that need values in a trace: with the values that the host knows, and with assumptions that the program checks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base._errors import TraceError, user_line
from spmd.base._jax import known_value
from spmd.device._checks import Check
from spmd.device._host_answers import host_answer
from spmd.device._storage import recording
from spmd.lowering._registry import assuming, sizes_from


def run_on_values(plan: Any, dynamic: list[Any], key: Any) -> Any:
    """`plan.run` in a trace for a rule that needs values. Values that the host knows are passed as numpy arrays.

    If the host can compute the sizes that the rule needs, the program gets a guard on these. Otherwise known values of inputs are added
    one by one, masks first, until the rule succeeds, and the program gets a guard on each of them.
    """
    recorder = recording.get()
    if recorder is None:
        return plan.run(dynamic, key)
    known = [known_value(value, recorder.is_state) if isinstance(value, jax.Array) else value for value in dynamic]
    unknown = sorted((i for i, k in enumerate(known) if k is None), key=lambda i: (dynamic[i].dtype != np.bool_, dynamic[i].size))
    while True:
        try:
            with sizes_from(host_answer):
                return _run_where_known(plan, dynamic, known, key)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            found = next(((i, v) for i in unknown if known[i] is None and (v := recorder.known_value(dynamic[i])) is not None), None)
            if found is None:
                return _run_assuming(recorder, plan, dynamic, known, key)
            known[found[0]] = found[1]


def _run_assuming(recorder: Any, plan: Any, dynamic: list[Any], known: list[Any], key: Any) -> Any:
    """The same if the host knows no further values: the program checks the assumptions of the rule."""
    with assuming() as made:
        result = _run_where_known(plan, dynamic, known, key)
    for is_wrong, text, fix in made:
        elsewhere = "CPU torch returns another shape there, or raises"
        if not recorder.expect(is_wrong, Check(TraceError, text, user_line(), fix, elsewhere)):
            raise jax.errors.JAXTypeError(text)  # in the body of a branch or a loop, which no flag can leave
    return result


def _run_where_known(plan: Any, dynamic: list[Any], known: list[Any], key: Any) -> Any:
    """`plan.run` with the known values in place of the traced ones; `known`: the value of each dynamic value on the host, or None."""
    if any(value is None for value in known):
        on_host = [np.asarray(k) if isinstance(k, jax.Array) else k for k in known]
        return plan.run([value if k is None else k for value, k in zip(dynamic, on_host, strict=True)], key)
    with jax.ensure_compile_time_eval():
        return plan.run([jnp.asarray(k) if isinstance(value, jax.Array) else k for value, k in zip(dynamic, known, strict=True)], key)


__all__ = ["run_on_values"]
