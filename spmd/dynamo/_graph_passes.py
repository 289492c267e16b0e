"""The two passes of a traced graph: one jaxpr for both, split where the cotangents enter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd.base._jax import eval_jaxpr, is_literal, split_by_dependence
from spmd.device._checks import Check
from spmd.device._storage import Buffer
from spmd.dynamo._graph_backward import Backward
from spmd.dynamo._graph_results import Made, Plain, Shown
from spmd.program.trace._known_inputs import ArgumentCheck
from spmd.program.trace._window import Window


@dataclass(frozen=True)
class Traced:
    """The result of one trace.

    Attributes:
        forward: jaxpr from outer values, inputs and random words to computed values, new values of written inputs, and values that are
            saved for `backward`; all flat.
        backward: the pass from saved values and cotangents to gradients; None if no gradients flow.
        outer: values from outside the graph, each with the buffer that is read in every call, or None if it is constant.
        results: how each result of the graph is made.
        windows: windows of the computed values, as in `Results`.
        flowing: indices of computed values that take a cotangent.
        written: positions of inputs that are written.
        kept_inputs: positions of inputs that are saved for `backward`, before the values that the forward pass computed for it.
        gradients: positions of inputs whose gradients `backward` returns.
        draws: number of random draws.
        checks: checks of values, whose flags are one result behind the new values of written inputs.
        input_checks: checks of inputs before each call. Their arguments are the device tensors, then the CPU tensors.
    """

    forward: Any
    backward: Backward | None
    outer: list[tuple[Any, Buffer | None]]
    results: list[Made | Shown | Plain]
    windows: list[Window | None]
    flowing: list[int]
    written: list[int]
    kept_inputs: list[int]
    gradients: list[int]
    draws: int
    checks: list[Check]
    input_checks: list[ArgumentCheck]

    @property
    def num_own(self) -> int:
        """Number of results of `forward` before the saved values."""
        return len(self.windows) + len(self.written) + bool(self.checks)

    def run_forward(self, *arrays: Any) -> list[Any]:
        """Run `forward` on arrays."""
        return eval_jaxpr(self.forward.jaxpr, self.forward.consts, *arrays)


@dataclass(frozen=True)
class Joint:
    """Both passes as one jaxpr.

    Attributes:
        closed: jaxpr from outer values, inputs, CPU tensors, random words, further inputs of the backward pass and cotangents to
            computed values, new values of written inputs, flags of checks, and gradients.
        num_inputs: number of device tensors among the inputs.
        num_again: number of further inputs of the backward pass.
        reached: for each output that takes a cotangent, which gradients depend on it.

    The other attributes are as in `Traced`.
    """

    closed: Any
    outer: list[tuple[Any, Buffer | None]]
    num_inputs: int
    num_again: int
    results: list[Made | Shown | Plain]
    windows: list[Window | None]
    flowing: list[int]
    written: list[int]
    gradients: list[int]
    reached: list[list[bool]]
    draws: int
    checks: list[Check]
    input_checks: list[ArgumentCheck]

    @property
    def num_own(self) -> int:
        """Number of results of the jaxpr before the gradients."""
        return len(self.windows) + len(self.written) + bool(self.checks)

    def split(self) -> Traced:
        """Split into two passes. Inputs that the backward pass needs are saved directly, not returned by the forward pass."""
        num_later = self.num_again + len(self.flowing)
        num_known = len(self.closed.in_avals) - num_later
        forward, rest, is_unknown = split_by_dependence(self.closed, [False] * num_known + [True] * num_later)
        assert not any(is_unknown[: self.num_own])
        is_known = [not unknown for unknown in is_unknown[self.num_own :]]
        kept_inputs, backward = list[int](), None
        if self.flowing:
            forward, kept_inputs, places, constants = self._without_inputs(forward)
            backward = Backward(rest, places, is_known, self.reached, constants, self.num_again)
        return Traced(
            *(forward, backward, self.outer, self.results, self.windows, self.flowing, self.written),
            *(kept_inputs, self.gradients, self.draws, self.checks, self.input_checks),
        )

    def _without_inputs(self, forward: Any) -> tuple[Any, list[int], list[int], Any]:
        """The forward pass without saved results that are inputs, are constant (zeros, positions) or occur twice.

        Returns:
            (forward, kept_inputs, places, constants). `places`: index of each saved value among these inputs, computed values and
                results of `constants`, a jaxpr without inputs.
        """
        jaxpr, num_outer = forward.jaxpr, len(self.outer)
        given = jaxpr.invars[num_outer : num_outer + self.num_inputs]
        source = {id(v): i for i, v in enumerate(given) if i not in self.written}  # written inputs have other values after the call
        equations, made = _without_operands(jaxpr)
        values = jaxpr.outvars[self.num_own :]
        inputs = list(dict.fromkeys(source[id(v)] for v in values if id(v) in source))
        computed = list({id(v): v for v in values if id(v) not in source and id(v) not in made}.values())
        constant = list({id(v): v for v in values if id(v) in made}.values())
        slot = {id(v): len(inputs) + i for i, v in enumerate((*computed, *constant))}
        places = [inputs.index(source[id(v)]) if id(v) in source else slot[id(v)] for v in values]
        info = jaxpr.debug_info._replace(result_paths=None)
        kept = jaxpr.replace(outvars=[*jaxpr.outvars[: self.num_own], *computed], debug_info=info)
        constants = jaxpr.replace(invars=[], outvars=constant, eqns=equations, debug_info=info._replace(arg_names=None))
        return forward.replace(jaxpr=kept), inputs, places, forward.replace(jaxpr=constants)


def _without_operands(jaxpr: Any) -> tuple[list[Any], set[int]]:
    """The equations that depend only on literals, and the ids of their output variables."""
    found, made = list[Any](), set[int]()
    for equation in jaxpr.eqns:
        if not equation.effects and all(is_literal(v) or id(v) in made for v in equation.invars):
            found.append(equation)
            made.update(map(id, equation.outvars))
    return found, made


__all__ = ["Joint", "Traced"]
