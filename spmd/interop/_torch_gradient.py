"""Turns a function of torch tensors into a function of arrays whose derivative in JAX comes from torch's autograd.

JAX would differentiate the operations that it sees, without regard to `detach`, `no_grad`, hooks and custom Functions. So the function
is a `jax.custom_vjp`: both passes are traced together (`program/flow/_joint`), and autograd defines the backward pass. Reverse-mode
derivatives of any order are exact, because the backward pass is itself such a function. JAX refuses forward mode for a custom_vjp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero

from spmd.base._convert import exact_dtypes
from spmd.base._jax import varying_axes
from spmd.device._storage import load, wrap
from spmd.interop._symbolic_sizes import SymbolicSizes, has_symbols
from spmd.program.flow._joint import Joint, PureRound, trace_joint
from spmd.program.flow._round import one_round

Tensors = list[torch.Tensor]
_SYMBOLIC_ZERO: Any = SymbolicZero


class TensorFunction:
    """A function from tensors to tensors, to be called on arrays.

    Args:
        fn: takes and returns a list of device tensors; every trace runs it again.
    """

    def __init__(self, fn: Callable[[Tensors], Tensors]) -> None:
        self.fn = fn

    def __call__(self, arrays: Sequence[Any], words: Any) -> list[Any]:
        """The results as arrays. `words`: random state at the start, uint32[4]."""
        axes = frozenset[str]().union(*map(varying_axes, (*arrays, words)))
        return _values(self, [_varying(a, axes) for a in arrays], _varying(words, axes))

    def joint(self, arrays: Sequence[Any], wanted: Sequence[bool], words: Any) -> Joint | SymbolicJoint:
        """Both passes, traced for arrays with these shapes."""
        if has_symbols(arrays):
            return SymbolicJoint(self, arrays, wanted, words)
        with exact_dtypes():
            return trace_joint(lambda *tensors: self.fn(list(tensors)), [wrap(a) for a in arrays], wanted, [], words)

    def gradient(self, wanted: Sequence[bool], has_gradient: Sequence[bool]) -> TensorFunction:
        """The function from (tensors, a cotangent per result that has a gradient) to the gradients of the wanted tensors."""

        def run(tensors: Tensors) -> Tensors:
            inputs, cotangents = tensors[: len(wanted)], tensors[len(wanted) :]
            sources = [t if t.requires_grad else t.requires_grad_() for t, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
            results = [r for r, has in zip(self.fn(inputs), has_gradient, strict=True) if has]
            found: Any = torch.autograd.grad(results, sources, cotangents, create_graph=True, allow_unused=True)
            return [torch.zeros_like(t) if g is None else g for t, g in zip(sources, found, strict=True)]

        return TensorFunction(run)


class SymbolicJoint:
    """Both passes for arrays with symbolic sizes: a joint trace for each of a few sizes.

    Attributes:
        has_gradient: whether each result takes a cotangent.
    """

    def __init__(self, function: TensorFunction, arrays: Sequence[Any], wanted: Sequence[bool], words: Any) -> None:
        self._function, self._wanted = function, wanted
        self._sizes = SymbolicSizes(arrays)
        self._joints: list[Joint] = []
        self._num_results = 0
        with exact_dtypes():
            jax.eval_shape(lambda *flat: self._forward(flat[:-1], flat[-1]), *arrays, words)
        self.has_gradient = self._joints[0].has_gradient

    def outer_values(self) -> list[Any]:
        """Empty: values from outside are constants of each trace."""
        return []

    def run_forward(self, consts: Sequence[Any], inputs: Sequence[Any], words: Any) -> tuple[list[Any], list[Any]]:
        """(results, residuals), as arrays."""
        found = self._forward(inputs, words)
        return found[: self._num_results], found[self._num_results :]

    def _forward(self, inputs: Sequence[Any], words: Any) -> list[Any]:
        self._joints.clear()

        def run(*flat: Any) -> list[Any]:
            joint = self._function.joint(flat[:-1], self._wanted, flat[-1])
            assert isinstance(joint, Joint)
            self._joints.append(joint)
            results, residuals = joint.run_forward(joint.outer_values(), flat[:-1], flat[-1])
            self._num_results = len(results)
            return [*results, *residuals]

        return self._sizes.recorded([run] * len(self._sizes.points), [*inputs, words])

    def run_backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of the wanted inputs."""
        count = len(residuals)
        runs = [lambda *flat, joint=joint: joint.run_backward(flat[:count], flat[count:]) for joint in self._joints]
        return self._sizes.recorded(runs, [*residuals, *cotangents])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(function: TensorFunction, arrays: list[Any], words: Any) -> Any:
    """The function's values, if no gradient is needed."""
    if has_symbols(arrays):
        with exact_dtypes():
            sizes = SymbolicSizes(arrays)
            return sizes.recorded([lambda *flat: _values(function, [*flat[:-1]], flat[-1])] * len(sizes.points), [*arrays, words])
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with exact_dtypes(), one_round(words, PureRound), one_thread, torch.enable_grad():
        return [load(t.detach()) for t in function.fn([wrap(a) for a in arrays])]


def _values_fwd(function: TensorFunction, arrays: list[Any], words: Any) -> tuple[list[Any], Any]:
    values = [a.value for a in arrays]
    wanted = tuple(a.perturbed and jnp.issubdtype(a.value.dtype, jnp.inexact) for a in arrays)
    if not any(wanted):
        return _values(function, values, words.value), None
    joint = function.joint(values, wanted, words.value)
    both: Any = _forward(function, joint, wanted, values, words.value)
    return both[0], (_Static(function, joint, wanted), values, words.value, both[1])


def _values_bwd(function: TensorFunction, saved: Any, cotangents: Any) -> tuple[Any, None]:
    if saved is None:
        return None, None
    static, values, words, residuals = saved
    return _input_gradients(static, values, words, residuals, [_dense(c) for c in cotangents]), None


_values.defvjp(_values_fwd, _values_bwd, symbolic_zeros=True)


def _dense(cotangent: Any) -> Any:
    return jax.lax.full(cotangent.shape, 0, cotangent.dtype) if isinstance(cotangent, _SYMBOLIC_ZERO) else cotangent


@jax.tree_util.register_static
class _Static:
    """The static part of the residuals: the function, its joint trace, and which inputs get a gradient."""

    def __init__(self, function: TensorFunction, joint: Joint | SymbolicJoint, wanted: tuple[bool, ...]) -> None:
        self.function, self.joint, self.wanted = function, joint, wanted

    def spread(self, gradients: Sequence[Any]) -> list[Any]:
        """One entry per input: its gradient, or None."""
        rest = iter(gradients)
        return [next(rest) if is_wanted else None for is_wanted in self.wanted]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _forward(function: TensorFunction, joint: Joint | SymbolicJoint, wanted: tuple[bool, ...], values: list[Any], words: Any) -> Any:
    """The forward pass of a joint trace: (results, residuals)."""
    with exact_dtypes():
        return joint.run_forward(joint.outer_values(), values, words)


def _forward_fwd(function: TensorFunction, joint: Joint | SymbolicJoint, wanted: tuple[bool, ...], values: list[Any], words: Any) -> Any:
    both: Any = _forward(function, joint, wanted, values, words)
    return both, (values, words, both[1])


def _forward_bwd(
    function: TensorFunction, joint: Joint | SymbolicJoint, wanted: tuple[bool, ...], saved: Any, cotangents: Any
) -> tuple[Any, None]:
    values, words, residuals = saved
    return _input_gradients(_Static(function, joint, wanted), values, words, residuals, cotangents[0]), None


_forward.defvjp(_forward_fwd, _forward_bwd)


def _input_gradients(static: _Static, values: list[Any], words: Any, residuals: list[Any], cotangents: list[Any]) -> list[Any]:
    """One gradient per input; None where JAX needs none."""
    flowing = [_conjugated(c) for c, has in zip(cotangents, static.joint.has_gradient, strict=True) if has]
    axes = frozenset[str]().union(*map(varying_axes, values))
    gradients: Any = _backward(static, values, words, residuals, flowing)
    return static.spread([_varying(_conjugated(g), axes) for g in gradients])


def _varying(array: Any, axes: frozenset[str]) -> Any:
    """The array, marked as varying along `axes`. If all inputs and gradients vary, JAX sums the gradients of inputs that did not."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _conjugated(value: Any) -> Any:
    """Conjugate a complex value: torch's gradient is the conjugate of JAX's."""
    return jnp.conj(value) if jnp.iscomplexobj(value) else value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(static: _Static, values: list[Any], words: Any, residuals: list[Any], cotangents: list[Any]) -> Any:
    """Gradients of the wanted inputs in torch's convention, computed from the residuals; formally a function of the values."""
    with exact_dtypes():
        return static.joint.run_backward(residuals, cotangents)


def _backward_fwd(static: _Static, values: list[Any], words: Any, residuals: list[Any], cotangents: list[Any]) -> Any:
    return _backward(static, values, words, residuals, cotangents), (values, words, cotangents)


def _backward_bwd(static: _Static, saved: Any, seconds: list[Any]) -> tuple[Any, None, None, Any]:
    """Second order: differentiates the gradient as its own function, computed by torch with create_graph=True."""
    values, words, cotangents = saved
    gradient = static.function.gradient(static.wanted, static.joint.has_gradient)
    is_inexact = [jnp.issubdtype(v.dtype, jnp.inexact) for v in values]

    def of_inexact(chosen: list[Any], flowing: list[Any]) -> list[Any]:
        rest = iter(chosen)
        return gradient([*(next(rest) if takes else v for v, takes in zip(values, is_inexact, strict=True)), *flowing], words)

    _, pull = jax.vjp(of_inexact, [v for v, takes in zip(values, is_inexact, strict=True) if takes], cotangents)
    of_values, of_cotangents = pull(seconds)
    rest = iter(of_values)
    return [next(rest) if takes else None for takes in is_inexact], None, None, of_cotangents


_backward.defvjp(_backward_fwd, _backward_bwd)

__all__ = ["TensorFunction", "Tensors"]
