"""Infers numbers of a trace as functions of named sizes, from their values in several traces.

Note [Points]
A function is traced at k + 3 points, where a point is a choice of its k named sizes: all small; each one large in turn; all in between,
twice. The value of an integer of the program (an extent, a limit, a number that Python computed) is then known at each point. Its formula
is one of a few forms, whose coefficients follow from the first points. The remaining points must agree, as must two more points if the
form is neither a sum nor a product. A number that fits none of the forms is refused, never guessed. No periodic function of the sizes fits
one of them (see points_within).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

Values = tuple[int, ...]  # values of one integer, one per point
Sizes = Sequence[Any]  # one per name, as Python ints or traced int64
_POWERS = (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)
_OFFSETS = (0, -1, 1, -2, 2)
_STEPS = (2, 3, 4, 5, 6, 7, 8, 16, 32)


class Inexact(Exception):
    """The program is not proved to compute the same results with padding. The message gives the reason.

    Attributes:
        equation: the equation of the jaxpr that is the cause, or None.
        may_depend_on_range: whether the proof may succeed for a smaller range of sizes.
    """

    equation: Any = None
    may_depend_on_range = False


class Unknown(Inexact):
    """A number of the program fits none of the supported forms."""

    may_depend_on_range = True


class Points:
    """The named sizes of the traces.

    Attributes:
        at: for each trace, the size of each name.
        period: divisor for which the sizes of a name have the same remainder, at all points and in all calls.
        are_enough: whether the points verify the formulas of all numbers so far; False after a form with many coefficients.
        compared_at: sizes at which all formulas that fit a number must be equal, if quotients are rounded. See Note [Windows].
    """

    def __init__(self, at: Sequence[Sequence[int]], period: int = 1) -> None:
        self.period = period
        self.at = tuple(tuple(point) for point in at)
        self.num_names = len(self.at[0])
        self.are_enough = True
        self.compared_at: Sequence[Sizes] = ()
        self._derived: dict[Values, Callable[[Sizes], Any]] = {}
        self._known: dict[Values, Callable[[Sizes], Any]] = {}

    def parts(self, values: Sequence[Any]) -> list[int]:
        """Indices of the names that a number depends on, given its values at the points."""
        return [i for i in range(self.num_names) if values[1 + i] != values[0]]

    def integer(self, values: Values) -> Callable[[Sizes], Any]:
        """Formula of an integer: a function of the sizes.

        Raises:
            Inexact: it fits none of the supported forms.
        """
        if values not in self._known:
            self._known[values] = self._integer(values)
        return self._known[values]

    def learned(self, values: Values) -> Callable[[Sizes], Any] | None:
        """Formula of an integer if it is already known, else None."""
        return self._known.get(values)

    def learn(self, values: Values, form: Callable[[Sizes], Any]) -> None:
        """Set the formula of an integer that the rule of an operation derives."""
        self._known[values] = self._derived[values] = form

    def _integer(self, values: Values) -> Callable[[Sizes], Any]:
        if len(set(values)) == 1:
            return lambda sizes: values[0]
        names = self.parts(values)
        for form in (self._sum, self._product, self._shifted_product, self._square, self._squares, self._from_derived, self._floored):
            found = form(values, names) if names else None
            if found is not None and all(found(point) == value for point, value in zip(self.at, values, strict=True)):
                self.are_enough &= form in (self._sum, self._product)
                return found
        raise Unknown(f"an extent or index is {_listed(values)} for sizes {_listed(self.at)}, not a sum or product of them")

    def _sum(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        slopes = [Fraction(values[1 + i] - values[0], self.at[1 + i][i] - self.at[0][i]) for i in names]
        start = values[0] - sum(slope * self.at[0][i] for slope, i in zip(slopes, names, strict=True))
        below = math.lcm(start.denominator, *(slope.denominator for slope in slopes))
        if self.period % below:
            return None
        terms, rest = [(int(slope * below), i) for slope, i in zip(slopes, names, strict=True)], int(start * below)
        return lambda sizes: (sum(slope * sizes[i] for slope, i in terms) + rest) // below

    def _product(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        """`c * (n + b) * (m + d) ...`, for example of dims that a reshape merged."""
        scale, terms = Fraction(values[0]), list[tuple[int, int, int]]()
        for i in names:
            offset = self.offset(values, i, Fraction)
            if not self.at[0][i] + offset:
                return None
            scale /= (self.at[0][i] + offset) * offset.denominator
            terms.append((i, offset.denominator, offset.numerator))
        if self.period ** len(names) % scale.denominator:
            return None
        above, below = scale.numerator, scale.denominator
        return lambda sizes: above * math.prod((q * sizes[i] + p for i, q, p in terms), start=1) // below

    def _shifted_product(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        """`a * n * m + b`."""
        products = [math.prod(point[i] for i in names) for point in self.at]
        slope = Fraction(values[1 + names[0]] - values[0], products[1 + names[0]] - products[0])
        start = values[0] - slope * products[0]
        if slope.denominator != 1 or start.denominator != 1:
            return None
        return lambda sizes: int(slope) * math.prod([sizes[i] for i in names]) + int(start)

    def _square(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        """`(a * n * n + b * n + c) / d` of one size, for example the number of elements in a matrix or a triangle."""
        if len(names) > 1:
            return None
        name, places = names[0], (0, 1 + names[0], len(self.at) - 2)
        first, second, third = ((self.at[place][name], Fraction(values[place])) for place in places)
        one = (second[1] - first[1]) / (second[0] - first[0])
        square = ((third[1] - first[1]) / (third[0] - first[0]) - one) / (third[0] - second[0])
        slope = one - square * (first[0] + second[0])
        start = first[1] - slope * first[0] - square * first[0] ** 2
        below = math.lcm(square.denominator, slope.denominator, start.denominator)
        a, b, c = (int(v * below) for v in (square, slope, start))
        rest, step = first[0] % self.period, self.period
        some = (rest, rest + step, rest + 2 * step)
        if any((a * n * n + b * n + c) % below for n in some):  # an integer only for some of the sizes
            return None
        return lambda sizes: (a * sizes[name] * sizes[name] + b * sizes[name] + c) // below

    def _squares(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        """`a * n * n * m + b`, for example the number of attention scores, or the index of the last one."""
        for powers in itertools.product((1, 2), repeat=len(names)):
            terms = [i for i, power in zip(names, powers, strict=True) for _ in range(power)]
            products = [math.prod(point[i] for i in terms) for point in self.at]
            slope = Fraction(values[1 + names[0]] - values[0], products[1 + names[0]] - products[0])
            a, b = int(slope), values[0] - int(slope) * products[0]
            if slope == a and all(a * product + b == v for product, v in zip(products, values, strict=True)):
                return lambda sizes, a=a, b=b, terms=terms: a * math.prod([sizes[i] for i in terms]) + b
        return None

    def _from_derived(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        """`a * q + b` of a quantity from `_quantities`, if all that fit are the same function."""
        found = list[Callable[[Sizes], Any]]()
        for known, form in self._quantities() if self._derived else ():
            place = next((i for i, v in enumerate(known) if v != known[0]), 0)
            slope = (values[place] - values[0]) // (known[place] - known[0]) if place else 0
            start = values[0] - slope * known[0]
            if slope and all(slope * k + start == v for k, v in zip(known, values, strict=True)):
                found.append(lambda sizes, slope=slope, start=start, form=form: slope * form(sizes) + start)
        if not found or any(found[0](sizes) != other(sizes) for other in found[1:] for sizes in self.compared_at):
            return None
        return found[0]

    def _quantities(self) -> Iterator[tuple[Values, Callable[[Sizes], Any]]]:
        """Derived integers, products of two of them, and products of one and a size."""
        own = [*self._derived.items()]
        sizes = [(tuple(p[i] for p in self.at), lambda sizes, i=i: sizes[i]) for i in range(self.num_names)]
        yield from own
        for number, (one, first) in enumerate(own):
            for other, second in (*own[number:], *sizes):
                product = tuple(a * b for a, b in zip(one, other, strict=True))
                yield product, lambda sizes, first=first, second=second: first(sizes) * second(sizes)

    def _floored(self, values: Values, names: list[int]) -> Callable[[Sizes], Any] | None:
        """`d * ((n + b) // c)` of one size, for example under a stride, if only one such form fits the points."""
        (name, *others), found, common = names, list[tuple[int, int, int]](), math.gcd(*values)
        scales = [n for n in range(1, min(common, 64) + 1) if common % n == 0]
        for scale, step in itertools.product(scales, _STEPS) if not others else ():
            for offset in range(-4 * step, 4 * step + 1):
                if all(scale * ((p[name] + offset) // step) == v for p, v in zip(self.at, values, strict=True)):
                    found.append((scale, step, offset))
        if len(found) != 1:
            return None
        scale, step, offset = found[0]
        return lambda sizes: scale * ((sizes[name] + offset) // step)

    def within(self, sizes: Sequence[int]) -> bool:
        """Whether sizes have the same remainders as the points."""
        return all((n - m) % self.period == 0 for n, m in zip(sizes, self.at[0], strict=True))

    def offset(self, values: Sequence[Any], name: int, number: Any) -> Any:
        """The `b` for which the number is proportional to `n + b`."""
        low, high = self.at[0][name], self.at[1 + name][name]
        return number(values[0] * high - values[1 + name] * low) / number(values[1 + name] - values[0])

    def number(self, values: Sequence[Any], dtype: Any) -> Callable[[Sizes], Any]:
        """Formula of a number of a program: a function of the sizes that returns a float64 or an integer.

        Args:
            values: its value at each point.
            dtype: its dtype in the program.

        Raises:
            Inexact: it fits none of the supported forms.
        """
        kind = np.dtype(dtype).kind
        if all(v == values[0] or (v != v and values[0] != values[0]) for v in values):
            return lambda sizes: values[0]
        if kind in "iu":
            return self.integer(tuple(int(v) for v in values))
        if kind == "f" or jnp.issubdtype(dtype, jnp.floating):
            numbers = [float(v) for v in values]
            tolerance = max(4 * float(jnp.finfo(dtype).eps), 1e-12)
            if all(v.is_integer() and abs(v) * tolerance < 1 for v in numbers):
                with suppress(Unknown):
                    whole = self.integer(tuple(map(int, numbers)))
                    return lambda sizes: _float(whole(sizes))
            if tolerance > 1e-4 and self.compared_at:
                raise self._unknown(values)  # too little precision to distinguish rounded quotients
            if tolerance > 1e-4:
                return self._low_precision(numbers, np.dtype(dtype))
            fitting = (
                (found, num_free)
                for found, num_free in self._forms(numbers, tolerance)
                if all(math.isclose(_at(found, p), v, rel_tol=tolerance) for p, v in zip(self.at, numbers, strict=True))
            )
            chosen = next(fitting, None)
            if chosen is not None and all(self._are_same(chosen[0], other) for other, _ in (fitting if self.compared_at else ())):
                self.are_enough &= chosen[1] < 3
                return chosen[0]
        raise self._unknown(values)

    def _are_same(self, one: Callable[[Sizes], Any], other: Callable[[Sizes], Any]) -> bool:
        return all(math.isclose(_at(one, sizes), _at(other, sizes), rel_tol=1e-5) for sizes in self.compared_at)

    def _unknown(self, values: Sequence[Any]) -> Unknown:
        return Unknown(f"a number is {_listed(values)} for sizes {_listed(self.at)}, not a supported power or logarithm of them")

    def _low_precision(self, values: list[float], dtype: Any) -> Callable[[Sizes], Any]:
        """A number with 8 or 11 significant bits: `k * (n * m + b) ** p` for k or 1 / k an integer, rounded to the dtype."""
        names = [i for i in range(self.num_names) if values[1 + i] != values[0]]
        for power, offset in itertools.product(_POWERS, _OFFSETS if names else ()):
            base = math.prod(self.at[0][i] for i in names) + offset
            for scale in _near(values[0] / float(base) ** power) if base > 0 else ():

                def found(sizes: Sizes, scale: float = scale, power: float = power, offset: int = offset) -> Any:
                    return scale * (_float(math.prod([sizes[i] for i in names])) + offset) ** power

                if all(float(np.asarray(_at(found, p)).astype(dtype)) == v for p, v in zip(self.at, values, strict=True)):
                    self.are_enough = False
                    return found
        raise self._unknown(values)

    def _forms(self, values: list[float], tolerance: float) -> Any:
        """Forms of a float, simplest first, each with its number of free coefficients."""
        names = [i for i in range(self.num_names) if not math.isclose(values[1 + i], values[0], rel_tol=tolerance)]
        if not names:
            return
        for power, offset in itertools.product(_POWERS, _OFFSETS):  # c * (n * m + b) ** p
            yield self._scaled(values, names, power, offset), 1
        for power, offsets in itertools.product(_POWERS, itertools.product(_OFFSETS, repeat=len(names) if len(names) < 4 else 0)):
            if any(offsets) and len(names) > 1:  # c * ((n + b) * (m + d)) ** p
                yield self._powered(values, list(zip(names, offsets, strict=True)), power), 1
        for above, below in itertools.permutations(_OFFSETS, 2):  # c * (n * m + a) / (n * m + b), such as Bessel's correction
            yield self._quotient(values, names, above, below), 1
        if tolerance < 1e-3:  # two free coefficients need precision
            for power in (*_POWERS, 0.0):
                yield self._affine(values, names, power), 2
            for power in _POWERS[1:]:
                yield self._rooted(values, names, power), 2
            products = tuple(math.prod(point[i] for i in names) for point in self.at)
            yield self._ratio(values, products, lambda sizes: math.prod([sizes[i] for i in names])), 3
        for extents, quantity in [*self._quantities()] if self._derived else ():
            yield from ((form, 1) for form in _of_quantity(values[0], extents[0], quantity))
            yield self._ratio(values, extents, quantity), 3
        for extents, quantity in [*self._known.items()]:  # the same forms of an extent such as n * (m + 1)
            if len(set(extents)) > 1:
                yield from ((form, 1) for form in _of_quantity(values[0], extents[0], quantity))

    def _scaled(self, values: list[float], names: list[int], power: float, offset: int) -> Callable[[Sizes], Any]:
        base = math.prod(self.at[0][i] for i in names) + offset
        scale = values[0] / float(base) ** power if base > 0 else math.nan
        return lambda sizes: scale * (_float(math.prod([sizes[i] for i in names])) + offset) ** power

    def _powered(self, values: list[float], terms: list[tuple[int, int]], power: float) -> Callable[[Sizes], Any]:
        base = math.prod(self.at[0][i] + b for i, b in terms)
        scale = values[0] / float(base) ** power if base > 0 else math.nan
        return lambda sizes: scale * math.prod([_float(sizes[i]) + b for i, b in terms]) ** power

    def _quotient(self, values: list[float], names: list[int], above: int, below: int) -> Callable[[Sizes], Any]:
        first = math.prod(self.at[0][i] for i in names)
        scale = values[0] * (first + below) / (first + above) if first + above else math.nan

        def found(sizes: Sizes) -> Any:
            product = _float(math.prod([sizes[i] for i in names]))
            return scale * (product + above) / (product + below)

        return found

    def _affine(self, values: list[float], names: list[int], power: float) -> Callable[[Sizes], Any]:
        """`a * q ** p + b`, where q is the product of the sizes; p = 0 denotes the logarithm."""

        def term(sizes: Sizes) -> Any:
            product = _float(math.prod([sizes[i] for i in names]))
            return product**power if power else (math.log(product) if isinstance(product, float) else jnp.log(product))

        one, other = term(self.at[0]), term(self.at[1 + names[0]])
        slope = (values[1 + names[0]] - values[0]) / (other - one)
        start = values[0] - slope * one
        return lambda sizes: slope * term(sizes) + start

    def _rooted(self, values: list[float], names: list[int], power: float) -> Callable[[Sizes], Any]:
        """`(a * q + b) ** p`, where q is the product of the sizes, for example of the number of elements minus one."""
        first, second = (math.prod(self.at[place][i] for i in names) for place in (0, 1 + names[0]))
        sign = -1.0 if values[0] < 0 else 1.0
        one, other = (abs(values[place]) ** (1 / power) if values[place] else math.nan for place in (0, 1 + names[0]))
        slope = (other - one) / (second - first)
        start = one - slope * first
        return lambda sizes: sign * (slope * _float(math.prod([sizes[i] for i in names])) + start) ** power

    def _ratio(self, values: list[float], known: Values, quantity: Callable[[Sizes], Any]) -> Callable[[Sizes], Any]:
        """`(a * q + c) / (q + b)` of a quantity q, usually the product of the sizes."""
        places = [0, next((i for i, v in enumerate(values) if v != values[0]), 1), len(self.at) - 2]
        products = np.array([known[place] for place in places], np.float64)
        numbers = np.array([values[place] for place in places])
        try:
            slope, start, offset = np.linalg.solve(np.stack([products, np.ones(3), -numbers], 1), numbers * products).tolist()
        except np.linalg.LinAlgError:
            return lambda sizes: math.nan

        def found(sizes: Sizes) -> Any:
            q = _float(quantity(sizes))
            return (slope * q + start) / (q + offset)

        return found if abs(offset) <= 2 else lambda sizes: math.nan  # otherwise a pole could fit any number


def _near(ratio: float) -> list[float]:
    """The nearest integer to a number, and the nearest inverse of an integer."""
    found = [float(round(ratio))] if abs(ratio) >= 0.5 else []
    return [*found, 1 / round(1 / ratio)] if ratio and abs(1 / ratio) >= 0.5 else found


def _of_quantity(value: float, first: int, quantity: Callable[[Sizes], Any]) -> Iterator[Callable[[Sizes], Any]]:
    """`c * (q + b) ** p` and `c * (q + a) / (q + b)` of an extent q, where `c` follows from one value of each."""
    for power, offset in itertools.product(_POWERS, _OFFSETS):
        scale = value / float(first + offset) ** power if first + offset > 0 else math.nan
        yield lambda sizes, scale=scale, power=power, offset=offset: scale * (_float(quantity(sizes)) + offset) ** power
    for above, below in itertools.permutations(_OFFSETS, 2):
        scale = value * (first + below) / (first + above) if first + above else math.nan
        yield (
            lambda sizes, scale=scale, above=above, below=below: (
                scale * (_float(quantity(sizes)) + above) / (_float(quantity(sizes)) + below)
            )
        )


def _at(found: Callable[[Sizes], Any], point: Sizes) -> float:
    try:
        return float(found(point))
    except (ArithmeticError, ValueError, TypeError):  # TypeError for a root of a negative number
        return math.nan


def _float(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value.astype(jnp.float64)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(str(v) for v in values)


__all__ = ["Inexact", "Points", "Sizes", "Unknown", "Values"]
