"""Converts convolutions of a program for CPU devices from channels first (PyTorch's layout) to channels last.

XLA:CPU computes convolutions only over [N, H, W, C]. It transposes each operand and result of a convolution over [N, C, H, W], and
these copies remain even between consecutive convolutions: a tenth of a ResNet-50's step. So the program is recorded with images as
[N, H, W, C] from one convolution to the next, through pointwise operations, pooling and reductions. Every other operation gets its
operands as traced. On GPUs and TPUs the compiler chooses layouts itself, and programs stay as traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from spmd.base._jax import as_recorded, is_literal

_POINTWISE = frozenset(
    (
        *("add", "add_any", "sub", "mul", "div", "max", "min", "neg", "abs", "sign", "square", "integer_pow", "pow", "sqrt", "rsqrt"),
        *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "sin", "cos", "floor", "ceil", "round"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "select_n", "clamp", "convert_element_type", "copy"),
    )
)
_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"))
_WINDOWS = frozenset(("reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_scatter_add", "select_and_gather_add"))
_PER_DIM = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")


def has_convolution(jaxpr: Any) -> bool:
    """Whether the program contains a convolution. Nested jaxprs are not searched."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in jaxpr.eqns)


def run_channels_last(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluate a jaxpr with channels-last images inside. Arguments and results have the shapes and values of `eval_jaxpr`."""
    values = _Values()
    for variable, array in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True):
        values.put(variable, array)
    _run(jaxpr.eqns, values)
    return [values.plain(variable) for variable in jaxpr.outvars]


class _Values:
    """The array of each variable: as traced, with channels last, or both. An array is transposed at most once."""

    def __init__(self) -> None:
        self._plain: dict[Any, Any] = {}
        self._last: dict[Any, Any] = {}

    def put(self, variable: Any, array: Any) -> None:
        self._plain[variable] = array

    def put_last(self, variable: Any, array: Any) -> None:
        self._last[variable] = array

    def is_last(self, variable: Any) -> bool:
        """Whether the variable's array exists with channels last, so that no transpose is needed."""
        return not is_literal(variable) and variable in self._last

    def plain(self, variable: Any) -> Any:
        if is_literal(variable):
            return variable.val
        if variable not in self._plain:
            self._plain[variable] = lax.transpose(self._last[variable], _inverse_order(len(variable.aval.shape)))
        return self._plain[variable]

    def last(self, variable: Any) -> Any:
        """The array with channels last; a scalar unchanged."""
        if not variable.aval.shape:
            return self.plain(variable)
        if is_literal(variable) or variable not in self._last:
            moved = lax.transpose(self.plain(variable), _order(len(variable.aval.shape)))
            if is_literal(variable):
                return moved
            self._last[variable] = moved
        return self._last[variable]


def _order(rank: int) -> tuple[int, ...]:
    """The permutation to channels last: dim i of the result is dim `order[i]` as traced."""
    return (0, *range(2, rank), 1)


def _inverse_order(rank: int) -> tuple[int, ...]:
    """The inverse permutation: dim d as traced is dim `back[d]` with channels last."""
    return (0, rank - 1, *range(1, rank - 1))


def _run(equations: Sequence[Any], values: _Values) -> None:
    for eqn in equations:
        rule = _rule(eqn, values)
        with as_recorded(eqn):
            if rule is not None:
                rule(eqn, values)
                continue
            out = eqn.primitive.bind(*map(values.plain, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
        for variable, array in zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True):
            values.put(variable, array)


def _rule(eqn: Any, values: _Values) -> Callable[[Any, _Values], None] | None:
    """The function that runs the equation on channels-last images, or None to run it as traced."""
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        return _convolution
    if not any(values.is_last(variable) for variable in eqn.invars):
        return None
    if name in _POINTWISE and all(v.aval.shape in ((), eqn.outvars[0].aval.shape) for v in eqn.invars):
        return _pointwise
    if name in _REDUCTIONS:
        return _reduction
    if name in _WINDOWS:
        return _window
    if name == "jit" and _is_pointwise(eqn.params["jaxpr"]):
        return _inlined
    return None


def _convolution(eqn: Any, values: _Values) -> None:
    """Convolve with new dimension numbers, so no operand has to be transposed.

    A left operand that is traced as [N, C, ...] is used with channels last, and then so is a result of that form. Other operands are
    used in the layout in which they exist.
    """
    left, right = eqn.invars
    numbers, params = eqn.params["dimension_numbers"], dict(eqn.params)
    back = _inverse_order(len(left.aval.shape))
    takes_images = numbers.lhs_spec[:2] == (0, 1)
    is_left_last, is_right_last = takes_images or values.is_last(left), values.is_last(right)
    is_out_last = takes_images and numbers.out_spec[:2] == (0, 1)
    flags = (is_left_last, is_right_last, is_out_last)
    specs = [tuple(back[d] for d in spec) if flag else spec for spec, flag in zip(numbers, flags, strict=True)]
    params["dimension_numbers"] = lax.ConvDimensionNumbers(*specs)
    operands = (values.last(v) if flag else values.plain(v) for v, flag in ((left, is_left_last), (right, is_right_last)))
    (values.put_last if is_out_last else values.put)(eqn.outvars[0], eqn.primitive.bind(*operands, **params))


def _pointwise(eqn: Any, values: _Values) -> None:
    values.put_last(eqn.outvars[0], eqn.primitive.bind(*map(values.last, eqn.invars), **eqn.params))


def _reduction(eqn: Any, values: _Values) -> None:
    (operand,) = eqn.invars
    rank = len(operand.aval.shape)
    axes = tuple(sorted(_inverse_order(rank)[d] for d in eqn.params["axes"]))
    out = eqn.primitive.bind(values.last(operand), **{**eqn.params, "axes": axes})
    dims = [d for d in _order(rank) if d not in eqn.params["axes"]]  # traced number of each dim of `out`
    values.put(eqn.outvars[0], lax.transpose(out, [dims.index(d) for d in sorted(dims)]) if dims != sorted(dims) else out)


def _window(eqn: Any, values: _Values) -> None:
    order = _order(len(eqn.outvars[0].aval.shape))
    moved = {name: tuple(eqn.params[name][d] for d in order) for name in _PER_DIM if name in eqn.params}
    values.put_last(eqn.outvars[0], eqn.primitive.bind(*map(values.last, eqn.invars), **{**eqn.params, **moved}))


def _is_pointwise(closed: Any) -> bool:
    """Whether a jitted function has no constants and contains only pointwise operations and broadcasts."""
    return not closed.consts and all(eqn.primitive.name in _POINTWISE | {"broadcast_in_dim"} for eqn in closed.jaxpr.eqns)


def _inlined(eqn: Any, values: _Values) -> None:
    """Run the operations of a jitted function inline."""
    inner, jaxpr = _Values(), eqn.params["jaxpr"].jaxpr
    for variable, given in zip(jaxpr.invars, eqn.invars, strict=True):
        if values.is_last(given):
            inner.put_last(variable, values.last(given))
        else:
            inner.put(variable, values.plain(given))
    _run(jaxpr.eqns, inner)
    for variable, given in zip(eqn.outvars, jaxpr.outvars, strict=True):
        if inner.is_last(given):
            values.put_last(variable, inner.last(given))
        else:
            values.put(variable, inner.plain(given))


__all__ = ["has_convolution", "run_channels_last"]
