"""Extents that windows, steps and merged dims make of others, as functions of the sizes: by its rule, not found from points.

Note [Windows]
A convolution with stride 2 over `n` elements has `(n + b) // 2` results. A few points leave several such forms, so the form is made of that
of the operand's extent, by the operation's own rule. Extents that are the same at all points must be the same for all sizes.
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
_MOST_TRIED = 128  # sizes at which two forms are compared


def learn_extents(points: Points, jaxprs: Sequence[Any], limits: Sequence[tuple[int, int]], known: Sequence[Form] = ()) -> None:
    """Tell the points of the extents in these jaxprs, one for each of them, that a rule gives.

    Args:
        limits: for each name the least and the largest size for which they are used.
        known: extents as functions of the sizes, which need not be found.

    Raises:
        Unknown: two extents are the same at the points, and not for all sizes.
    """
    learning = _Learning(points, limits)
    for form in known:
        learning.learn(tuple(form(point) for point in points.at), form)
    learning.visit([getattr(j, "jaxpr", j) for j in jaxprs])


class Window(NamedTuple):
    """Windows along a dim, in one trace.

    Attributes:
        own, out: the dim of the operand, and that of the result.
        spread: how far the operand's elements are from each other.
        length, dilation: how many elements a window has, and how far they are from each other.
        step: from one window to the next.
        low, high: elements that are added at both ends; fewer than none are cut off.
    """

    own: int
    out: int
    spread: int
    length: int
    dilation: int
    step: int
    low: int
    high: int

    def room(self) -> int:
        """What the operand's spread extent has in addition, beside the first window."""
        return self.low + self.high - self.reach(self.length)

    def reach(self, length: Any) -> Any:
        """How far a window of so many elements reaches."""
        return (length - 1) * self.dilation + 1

    def whole(self, extent: Any) -> Any:
        """The extent that windows lie along, of so many elements."""
        return extent if self.spread == 1 else (extent - 1) * self.spread + 1


def windows_of(equation: Any) -> list[Window]:
    """The windows of an equation along each dim that has some."""
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
    """The padding of windows at other sizes: behind the last element as much as gives the extent of the result.

    Args:
        each: the equation, in each trace.
        size: a quantity at these sizes.
    """
    found = list[tuple[Any, Any]]()
    for same in zip(*map(windows_of, each), strict=True):
        first, low = same[0], size(tuple(window.low for window in same))
        if len({window.high for window in same}) == 1:
            found.append((low, first.high))
            continue
        number, length = size(_extents(each, "outvars", first.out)), size(tuple(window.length for window in same))
        extent = first.whole(size(_extents(each, "invars", first.own)))
        found.append((low, (number - 1) * first.step + first.reach(length) - extent - low))
    return tuple(found)


def ends_padding(each: Sequence[Any], size: Callable[[Values], Any]) -> tuple[tuple[Any, Any, Any], ...]:
    """The same of a `pad`: its configuration at other sizes."""
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


class _Learning:
    """See `learn_extents`."""

    def __init__(self, points: Points, limits: Sequence[tuple[int, int]]) -> None:
        self._points, self._limits = points, limits

    def visit(self, opened: Sequence[Any]) -> None:
        for each in zip(*(j.eqns for j in opened), strict=False):
            if any(one.primitive is not each[0].primitive or _ranks(one) != _ranks(each[0]) for one in each):
                return  # the size decides what is computed: said elsewhere
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
        elif name == "reduce_sum" and self._points.tried:
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
            if first.step > 1 and len(set(extent)) > 1 and len({(w.step, w.spread) for w in same}) == 1:
                inner, rest = self._form(extent), self._form(tuple(window.room() for window in same))
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
        """Products of dims that follow each other."""
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
        """How many elements a sum has, of those that vary in number: means divide by it."""
        columns = [_extents(each, "invars", d) for d in each[0].params["axes"]]
        forms = [(column, self._form(column)) for column in columns if len(set(column)) > 1]
        if len(forms) > 1:
            yield from _products([(column, form) for column, form in forms if form is not None])

    def learn(self, values: Values, form: Form) -> None:
        """Tell the points of an extent, if it is that at all of them."""
        if any(form(point) != value for point, value in zip(self._points.at, values, strict=True)):
            return
        self._points.tried = self._points.tried or [*self._tried()]
        known = (lambda sizes: values[0]) if len(set(values)) == 1 else self._points.learned(values)
        if known is None:
            self._points.learn(values, form)
        elif any(known(sizes) != form(sizes) for sizes in self._points.tried):
            raise Unknown(f"two extents are {', '.join(map(str, values))} where they were traced, and differ for other sizes")

    def _tried(self) -> Iterator[tuple[int, ...]]:
        """Sizes within the limits: for each name many that follow each other, and the ends."""
        period = self._points.period
        for i, (least, most) in enumerate(self._limits):
            first = least + (self._points.at[0][i] - least) % period
            some = [*range(first, min(most, first + _MOST_TRIED * period) + 1, period), most - (most - first) % period]
            for others in (self._points.at[0], self._points.at[-1]):
                yield from (tuple(n if j == i else other for j, other in enumerate(others)) for n in some)


def _extents(each: Sequence[Any], kind: str, dim: int) -> Values:
    return tuple(getattr(one, kind)[0].aval.shape[dim] for one in each)


def _ranks(equation: Any) -> list[int]:
    return [len(getattr(v.aval, "shape", ())) for v in (*equation.invars, *equation.outvars)]


def _stepped(window: Window, inner: Form, rest: Form) -> Form:
    """As jax writes it, so that it knows its symbols again."""
    return lambda sizes: (window.whole(inner(sizes)) + rest(sizes)) // window.step + 1


def _products(made: Sequence[tuple[Values, Form]]) -> Iterator[tuple[Values, Form]]:
    """Of extents beside each other: means divide by them."""
    for count in range(2, len(made) + 1):
        for some in itertools.combinations(made, count):
            forms = [form for _, form in some]
            values = tuple(map(math.prod, zip(*(column for column, _ in some), strict=True)))
            yield values, lambda sizes, forms=forms: math.prod([form(sizes) for form in forms])


__all__ = ["WINDOWED", "Form", "ends_padding", "learn_extents", "window_padding"]
