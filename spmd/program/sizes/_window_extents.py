"""Derives the extents of strided, windowed and merged dims as functions of the sizes, from the operation and not from points.

Note [Windows]
A convolution with stride 2 over `n` elements has `(n + b) // 2` results. Several such formulas fit a few points, so the formula is derived
from that of the operand's extent by the operation's own shape rule. Extents that are equal at all points must be equal for all sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from spmd.program.sizes._formulas import Points, Sizes, Unknown, Values
from spmd.program.xla._jaxpr import functions_of

Form = Callable[[Sizes], Any]
WINDOWED = frozenset(("conv_general_dilated", "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"))
_MAX_COMPARED = 128  # sizes at which two forms are compared


def learn_extents(points: Points, jaxprs: Sequence[Any], limits: Sequence[tuple[int, int]], known: Sequence[Form] = ()) -> None:
    """Derive extents in these jaxprs, one jaxpr per point, and add their formulas to `points`.

    Args:
        limits: for each name, the smallest and the largest size for which the formulas are used.
        known: formulas of extents that are known already.

    Raises:
        Unknown: two extents are equal at the points, but not for all sizes.
    """
    learning = _ExtentVisitor(points, limits)
    for form in known:
        learning.learn(tuple(form(point) for point in points.at), form)
    learning.visit([getattr(j, "jaxpr", j) for j in jaxprs])


class Window(NamedTuple):
    """Windows along one dim, in one trace.

    Attributes:
        own, out: dim of the operand, and dim of the result.
        base_dilation: dilation of the operand.
        length, dilation: number of elements in a window, and their dilation.
        stride: offset from one window to the next.
        low, high: padding at both ends; negative padding cuts elements off.
    """

    own: int
    out: int
    base_dilation: int
    length: int
    dilation: int
    stride: int
    low: int
    high: int

    def slack(self) -> int:
        """Padding minus the span of the first window."""
        return self.low + self.high - self.span(self.length)

    def span(self, length: Any) -> Any:
        """Dilated extent of a window with `length` elements."""
        return (length - 1) * self.dilation + 1

    def dilated(self, extent: Any) -> Any:
        """Dilated extent of an operand with `extent` elements."""
        return extent if self.base_dilation == 1 else (extent - 1) * self.base_dilation + 1


def windows_of(equation: Any) -> list[Window]:
    """Windows of an equation, one for each dim with windows."""
    params = equation.params
    if equation.primitive.name == "conv_general_dilated":
        numbers, kernel = params["dimension_numbers"], equation.invars[1].aval.shape
        dims = zip(numbers.lhs_spec[2:], numbers.out_spec[2:], params["lhs_dilation"], strict=True)
        parts = [[kernel[d] for d in numbers.rhs_spec[2:]], params["rhs_dilation"], params["window_strides"], params["padding"]]
    else:
        rank = range(len(params["window_dimensions"]))
        dims = zip(rank, rank, params["base_dilation"], strict=True)
        parts = [params[k] for k in ("window_dimensions", "window_dilation", "window_strides", "padding")]
    return [Window(*own, *rest, *padding) for own, *rest, padding in zip(dims, *parts, strict=True)]


def window_padding(each: Sequence[Any], size: Callable[[Values], Any]) -> tuple[tuple[Any, Any], ...]:
    """Window padding at other sizes. The padding after the last element is chosen such that the result has its extent.

    Args:
        each: the equation of each trace.
        size: evaluates a quantity at the other sizes.

    Returns:
        (low, high) for each dim with windows.
    """
    found = list[tuple[Any, Any]]()
    for same in zip(*map(windows_of, each), strict=True):
        first, low = same[0], size(tuple(window.low for window in same))
        if len({window.high for window in same}) == 1:
            found.append((low, first.high))
            continue
        number, length = size(_extents(each, "outvars", first.out)), size(tuple(window.length for window in same))
        extent = first.dilated(size(_extents(each, "invars", first.own)))
        found.append((low, (number - 1) * first.stride + first.span(length) - extent - low))
    return tuple(found)


def ends_padding(each: Sequence[Any], size: Callable[[Values], Any]) -> tuple[tuple[Any, Any, Any], ...]:
    """`padding_config` of a `pad` at other sizes; arguments as for `window_padding`."""
    found = list[tuple[Any, Any, Any]]()
    for d, same in enumerate(zip(*(one.params["padding_config"] for one in each), strict=True)):
        low, high, inner = (tuple(map(int, column)) for column in zip(*same, strict=True))
        start, between = size(low), size(inner)
        if len(set(high)) == 1:
            found.append((start, high[0], between))
            continue
        own, out = size(_extents(each, "invars", d)), size(_extents(each, "outvars", d))
        found.append((start, out - start - ((own - 1) * (between + 1) + 1), between))
    return tuple(found)


class _ExtentVisitor:
    """Visitor of jaxprs that derives extents. See `learn_extents`."""

    def __init__(self, points: Points, limits: Sequence[tuple[int, int]]) -> None:
        self._points, self._limits = points, limits

    def visit(self, opened: Sequence[Any]) -> None:
        for each in zip(*(j.eqns for j in opened), strict=False):
            if any(one.primitive is not each[0].primitive or _ranks(one) != _ranks(each[0]) for one in each):
                return  # the size decides what is computed: raised elsewhere
            for values, form in self._made(each):
                self.learn(values, form)
            for same in zip(*(functions_of(one) for one in each), strict=False):
                self.visit([getattr(j, "jaxpr", j) for j in same])

    def _made(self, each: Sequence[Any]) -> Iterator[tuple[Values, Form]]:
        name = each[0].primitive.name
        if name in WINDOWED:
            yield from self._of_windows(each)
        elif name == "slice" and each[0].params["strides"] is not None:
            yield from self._of_steps(each)
        elif name == "reshape":
            yield from self._merged(each)
        elif name == "reduce_sum" and self._points.compared_at:
            yield from self._counted(each)

    def _form(self, values: Values) -> Form | None:
        try:
            return self._points.integer(values)
        except Unknown:
            return None

    def _of_windows(self, each: Sequence[Any]) -> Iterator[tuple[Values, Form]]:
        made = list[tuple[Values, Form]]()
        for same in zip(*map(windows_of, each), strict=True):
            first, extent = same[0], _extents(each, "invars", same[0].own)
            if first.stride > 1 and len(set(extent)) > 1 and len({(w.stride, w.base_dilation) for w in same}) == 1:
                inner, rest = self._form(extent), self._form(tuple(window.slack() for window in same))
                if inner is not None and rest is not None:
                    made.append((_extents(each, "outvars", first.out), _stepped(first, inner, rest)))
        yield from made
        yield from _products(made)

    def _of_steps(self, each: Sequence[Any]) -> Iterator[tuple[Values, Form]]:
        starts, limits, strides = (
            list(zip(*(one.params[k] for one in each), strict=True)) for k in ("start_indices", "limit_indices", "strides")
        )
        for d, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
            span = tuple(end - begin for begin, end in zip(start, limit, strict=True))
            inner = self._form(span) if set(stride) == {stride[0]} and stride[0] > 1 and len(set(span)) > 1 else None
            if inner is not None:
                yield _extents(each, "outvars", d), _stepped(Window(d, d, 1, 1, 1, stride[0], 0, 0), inner, lambda sizes: -1)

    def _merged(self, each: Sequence[Any]) -> Iterator[tuple[Values, Form]]:
        """Extents of merged dims: products of consecutive dims."""
        given = [_extents(each, "invars", d) for d in range(len(each[0].invars[0].aval.shape))]
        for d in range(len(each[0].outvars[0].aval.shape)):
            made = _extents(each, "outvars", d)
            if len(set(made)) == 1 or self._form(made) is not None:
                continue
            for first, last in itertools.combinations(range(len(given) + 1), 2):
                part = given[first:last]
                forms = [self._form(column) for column in part]
                if len(part) > 1 and tuple(map(math.prod, zip(*part, strict=True))) == made and all(forms):
                    yield made, lambda sizes, forms=forms: math.prod([form(sizes) for form in forms if form])

    def _counted(self, each: Sequence[Any]) -> Iterator[tuple[Values, Form]]:
        """Number of elements in a sum over several varying dims, by which means divide."""
        columns = [_extents(each, "invars", d) for d in each[0].params["axes"]]
        forms = [(column, self._form(column)) for column in columns if len(set(column)) > 1]
        if len(forms) > 1:
            yield from _products([(column, form) for column, form in forms if form is not None])

    def learn(self, values: Values, form: Form) -> None:
        """Add the formula of an extent, if it fits all points.

        Raises:
            Unknown: another extent has the same values at the points, but not for all sizes.
        """
        if any(form(point) != value for point, value in zip(self._points.at, values, strict=True)):
            return
        self._points.compared_at = self._points.compared_at or [*self._sizes_to_compare()]
        known = (lambda sizes: values[0]) if len(set(values)) == 1 else self._points.learned(values)
        if known is None:
            self._points.learn(values, form)
        elif any(known(sizes) != form(sizes) for sizes in self._points.compared_at):
            raise Unknown(f"two extents are {', '.join(map(str, values))} at the sizes of the traces, but differ for other sizes")

    def _sizes_to_compare(self) -> Iterator[tuple[int, ...]]:
        """Sizes within the limits: for each name many consecutive ones, and the largest."""
        period = self._points.period
        for i, (least, most) in enumerate(self._limits):
            first = least + (self._points.at[0][i] - least) % period
            some = [*range(first, min(most, first + _MAX_COMPARED * period) + 1, period), most - (most - first) % period]
            for others in (self._points.at[0], self._points.at[-1]):
                yield from (tuple(n if j == i else other for j, other in enumerate(others)) for n in some)


def _extents(each: Sequence[Any], kind: str, dim: int) -> Values:
    return tuple(getattr(one, kind)[0].aval.shape[dim] for one in each)


def _ranks(equation: Any) -> list[int]:
    return [len(getattr(v.aval, "shape", ())) for v in (*equation.invars, *equation.outvars)]


def _stepped(window: Window, inner: Form, rest: Form) -> Form:
    """Number of strided windows, written as jax does, so that jax recognizes equal symbolic expressions."""
    return lambda sizes: (window.dilated(inner(sizes)) + rest(sizes)) // window.stride + 1


def _products(made: Sequence[tuple[Values, Form]]) -> Iterator[tuple[Values, Form]]:
    """Products of two or more extents, by which means divide."""
    for count in range(2, len(made) + 1):
        for some in itertools.combinations(made, count):
            forms = [form for _, form in some]
            values = tuple(map(math.prod, zip(*(column for column, _ in some), strict=True)))
            yield values, lambda sizes, forms=forms: math.prod([form(sizes) for form in forms])


__all__ = ["WINDOWED", "Form", "ends_padding", "learn_extents", "window_padding"]
