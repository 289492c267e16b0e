"""Numbers that only the device knows, in the places where PyTorch wants a Python number.

While a program is traced, `tensor.item()` and the lifted floats of an optimizer are `torch.SymFloat`s whose node carries a
0-dim array. Arithmetic on them stays on the device, ATen ops take them as `Scalar`, and turning one into a real Python
number raises at the user's own line. It knows no tensor and no program.

A node may know its `hint`, the number's value at trace time, and then answers comparisons; each answer is told to
`on_branch`, so that the program can be retraced when it would differ.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, called_at, message
from spmd.device._asserted import answered
from spmd.device._host_answers import host_answer
from spmd.device._powers import power
from spmd.device._storage import once

Evaluate = Callable[[], float]
AsInput = Callable[[Any], Any]


class _Whole(NamedTuple):
    """The node of a `torch.SymInt` that stands for an int, on its way to C code which asks for one (`"%d" % n`)."""

    value: int

    def is_int(self) -> bool:
        return True

    def int_(self) -> int:
        return self.value


class NumberNode:
    """Node of a `torch.SymFloat` (the methods are the protocol that torch's C++ asks for).

    Attributes:
        value: 0-dim array, usually a tracer, or a function that makes it.
        evaluate: computes the number on the host from today's hyperparameters, or None for data.
        on_branch: told of (key, evaluate, outcome) of each comparison that Python branched on.
        boolean: the node is the outcome of a comparison (a `torch.SymBool`).
        integral: it stands for a Python int (an item of an integer tensor), which promotes as one; torch still sees a float.
        truth: it stands for a Python bool (an item of a bool tensor); arithmetic makes it an int, as it does in Python.
        key: equal for two numbers that `evaluate` to the same always, an expression that `of_settings` computes; None if there is none.
        as_input: gives, for a key, the array of a number that the host computes of settings alone, as an input of the program; None where
            there is room for no more.
    """

    def __init__(
        self,
        value: Any,
        evaluate: Evaluate | None = None,
        on_branch: Callable[[Any, Callable[[], bool], bool], None] | None = None,
        boolean: bool = False,
        integral: bool = False,
        key: Any = None,
        truth: bool = False,
        as_input: AsInput | None = None,
    ) -> None:
        self._value = value
        self.as_input = as_input
        self.key = key
        self.evaluate = evaluate
        self.on_branch = on_branch
        self.boolean = boolean
        self.integral = integral or truth
        self.truth = truth

    @property
    def kind(self) -> type:
        """The class of the Python number that it stands for."""
        return bool if self.boolean or self.truth else int if self.integral else float

    @property
    def value(self) -> Any:
        """The 0-dim array; that of a comparison is made only if the program needs it."""
        return self._value() if callable(self._value) else self._value

    def is_float(self) -> bool:
        return not self.boolean

    def is_bool(self) -> bool:
        return self.boolean

    def is_symbolic(self) -> bool:
        return True

    def _no(self) -> bool:
        return False

    def _none(self) -> None:
        return None

    is_int = is_nested_int = is_constant = has_hint = _no
    maybe_as_int = maybe_as_float = maybe_as_bool = constant_int = constant_bool = nested_int = _none

    def str(self) -> builtins.str:
        return builtins.str(self._concrete("string"))

    def trunc(self) -> _Whole:
        return _Whole(int(self._concrete("int")))

    def round(self, digits: Any = None) -> NumberNode:
        raise needs_value("rounded number")

    def __repr__(self) -> str:
        return "a number of the traced program"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise needs_value("number (to be pickled)")

    def __deepcopy__(self, memo: Any) -> NumberNode:
        return self

    _graph_repr = str  # print and f-strings come here

    def wrap_float(self, number: float) -> NumberNode:
        return NumberNode(np.float64(number), lambda: number, self.on_branch, key=("float", float(number).hex()))

    def wrap_int(self, number: int) -> NumberNode:
        value = np.int64(number) if _holds(number) else np.float64(number)
        return NumberNode(value, lambda: number, self.on_branch, integral=True, key=("int", number))

    def wrap_bool(self, number: bool) -> NumberNode:
        return NumberNode(np.bool_(number), lambda: number, self.on_branch, boolean=True, key=("bool", number))

    def guard_float(self, file: str, line: int) -> float:
        answer = answered(self._is_true) if self.evaluate is None else None
        return float(self._concrete("float")) if answer is None else float(answer)

    def guard_int(self, file: str, line: int) -> int:
        return int(self._concrete("int"))

    def _concrete(self, kind: builtins.str) -> Any:
        """The value of a number that the host knows; the program then holds for this value only."""
        if self.evaluate is None or self.on_branch is None:
            known = host_answer(self.value)
            if known is None:
                raise needs_value(kind)
            return self.kind(known.item())
        value = self.evaluate()
        self.on_branch(None if self.key is None else ("value", self.key), self.evaluate, value)  # pyright: ignore[reportArgumentType]
        return value

    def known(self, what: builtins.str) -> Any:
        """The Python number that it stands for; the program then holds for this value only.

        Raises:
            TraceError: only the device knows it; `what` says what was needed.
        """
        return self.kind(self._concrete(what))

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def expect_true(self, file: str, line: int) -> bool:
        """torch's own sanity checks (a base of a power is not negative): taken on trust where only the device knows."""
        return True if self.evaluate is None else bool(self.evaluate())

    def _is_true(self) -> Any:
        with exact_dtypes():
            return jnp.asarray(self.value) != 0

    def bool_(self) -> bool:
        if self.evaluate is None or self.on_branch is None:
            answer = answered(self._is_true)
            known = host_answer(self._is_true()) if answer is None else answer
            if known is None:
                raise needs_value("bool (a branch)")
            return bool(known)
        evaluate = self.evaluate
        outcome = bool(evaluate())
        self.on_branch(self.key, lambda: bool(evaluate()), outcome)
        return outcome


def needs_value(kind: str, line: str = "") -> TraceError:
    """The error for a number that Python wants now; `line` says where, if it is not where this is called."""
    return TraceError(
        message(
            f"a number of the traced program was needed as a Python {kind}",
            *([f"called at {line}"] if line else called_at()),
            "its value is known only when the compiled program runs",
            fix="return it from the step, or stay on the device with torch.where or torch.cond",
        )
    )


def data_dependent(op: Any) -> TraceError:
    """The error for a result whose shape a traced program does not know."""
    return TraceError(
        message(
            f"the result shape of {op} depends on values, which a traced program does not have",
            *called_at(),
            fix=_OF_FIXED_SHAPE.get(
                op._schema.name, "keep shapes fixed with torch.where or a mask, or call the op outside the compiled function"
            ),
        )
    )


_MASKED = (
    "torch.where(mask, f(x), x) for x[mask] = f(x[mask]); torch.where(mask, x, 0).sum() for x[mask].sum(), over mask.sum() for the mean"
)
_OF_FIXED_SHAPE = {
    **dict.fromkeys(("aten::index", "aten::_unsafe_index", "aten::masked_select"), _MASKED),
    **dict.fromkeys(("aten::index_put", "aten::_index_put_impl"), "x = torch.where(mask, values, x), of values for all elements"),
    "aten::nonzero": "torch.where(mask, a, b) needs no positions; torch.nonzero_static(mask, size=n) gives n of them",
}
"""What does the same with shapes that no value decides, by operator."""


def _operator(name: str, fn: Callable[..., Any]) -> None:
    def method(self: NumberNode, *others: NumberNode) -> NumberNode:
        def compute() -> Any:
            operands = (self.value, *(other.value for other in others))
            with exact_dtypes():
                if integral and name in _KEEP_INTEGERS:
                    operands = tuple(map(_integer, operands))
                return once(name, operands, lambda: fn(*operands))

        integral = name in _MAKE_INTEGERS or (name in _KEEP_INTEGERS and all(node.integral for node in (self, *others)))
        parts = [node.evaluate for node in (self, *others)]
        known = [part for part in parts if part is not None]
        on_branch = next((node.on_branch for node in (self, *others) if node.on_branch is not None), None)
        as_input = next((node.as_input for node in (self, *others) if node.as_input is not None), None)
        evaluate = (lambda: fn(*(float(part()) for part in known))) if len(known) == len(parts) else None
        keys = (name, *(node.key for node in (self, *others)))
        key = None if None in keys else keys
        if name in _COMPARISONS:
            value: Any = compute
        elif as_input is not None and evaluate is not None and key is not None and _is_float(evaluate()):
            value = partial(_input_or_computed, as_input, on_branch, key, evaluate, compute)
        else:
            value = compute()
        return NumberNode(value, evaluate, on_branch, boolean=name in _COMPARISONS, integral=integral, key=key, as_input=as_input)

    method.__name__ = name
    setattr(NumberNode, name, method)


def _is_float(value: Any) -> bool:
    if isinstance(value, complex):
        what = f"an optimizer computes {value} from its settings, but a program supports only real numbers"
        raise TraceError(message(what, *called_at(), fix="choose arguments for which this number is real"))
    return type(value) is float


def _input_or_computed(as_input: AsInput, on_branch: Any, key: Any, evaluate: Evaluate, compute: Callable[[], Any]) -> Any:
    found = as_input(key)
    if found is not None:
        return found
    on_branch(("computes", key), partial(_is_computable, evaluate), True)  # else Python's error comes when it is traced again
    return compute()


def _is_computable(evaluate: Evaluate) -> bool:
    try:
        evaluate()
    except (ValueError, ArithmeticError):
        return False
    return True


def of_settings(key: Any, settings: Any) -> Any:
    """What a number's `key` says, computed of the settings: Python's floats, or an array in a program that gets these alone."""
    name, *parts = key
    if name == "slot":
        return settings[parts[0]]
    if name in _CONSTANTS:
        return _CONSTANTS[name](parts[0])
    return _OPERATORS[name](*(of_settings(part, settings) for part in parts))


_CONSTANTS: dict[str, Callable[[Any], float]] = {"float": float.fromhex, "int": float, "bool": float}


def _holds(number: int) -> bool:
    """Whether 64 bits hold it."""
    return -(2**63) <= number < 2**63


def _integer(value: Any) -> Any:
    """The int64 that a number of Python's ints is computed with."""
    if isinstance(value, jax.Array):
        return value.astype(jnp.int64)
    if not _holds(int(value)):
        raise needs_value("int of more than 64 bits")
    return np.int64(value)


def _of_math(name: str, number: Any) -> Any:
    if not isinstance(number, jax.Array):
        return getattr(math, name)(number)
    return getattr(jnp, name)(number if jnp.issubdtype(number.dtype, jnp.inexact) else number.astype(jnp.float64))


def _of_device(*numbers: Any) -> bool:
    return any(isinstance(number, jax.Array) for number in numbers)


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_integer"})
_KEEP_INTEGERS = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg", "pos", "abs", "sym_min", "sym_max", "pow_by_natural"})
_MAKE_INTEGERS = frozenset({"floor", "ceil"})
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: -a if isinstance(b, np.generic) and b == -1 else a * b,  # a product of 64-bit floats is 45 instructions of a TPU
    "truediv": lambda a, b: a / b,
    "float_truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "pow": power,
    "float_pow": power,
    "pow_by_natural": lambda a, b: a**b,
    "floor": partial(_of_math, "floor"),
    "ceil": partial(_of_math, "ceil"),
    "neg": lambda a: -a,
    "pos": lambda a: a,
    "abs": abs,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "is_integer": lambda a: a % 1 == 0,
    "sym_min": lambda a, b: jnp.minimum(a, b) if _of_device(a, b) else min(a, b),
    "sym_max": lambda a, b: jnp.maximum(a, b) if _of_device(a, b) else max(a, b),
    "sqrt": lambda a: power(a, 0.5),
}
OF_MATH = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
"""Functions of `math` that a program computes, as `torch.sym_sqrt` and its kin."""
for _name in OF_MATH:
    _OPERATORS[f"sym_{_name}"] = partial(_of_math, _name)
for _name, _fn in _OPERATORS.items():
    _operator(_name, _fn)


def lifted(value: Any, evaluate: Evaluate | None = None, on_branch: Any = None, **kind: Any) -> torch.SymFloat:
    """A `torch.SymFloat` that carries the 0-dim array `value`; `kind` is what else a `NumberNode` is told."""
    return torch.SymFloat(NumberNode(value, evaluate, on_branch, **kind))


def is_of_host(number: torch.SymFloat, *, asks: bool = False) -> bool:
    """Whether the host can compute the number; `asks`: from inputs that it knows too, for which the program then holds."""
    node = number.node
    if not isinstance(node, NumberNode):
        return False
    return (node.evaluate is not None and node.on_branch is not None) or (asks and host_answer(node.value) is not None)


def decided(
    decides: tuple[str, Callable[[Any], Any]], place: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool | None:
    """What the host answers to a lowering's question about an optimizer's setting; the program then holds while the answer is the same.

    None for other numbers: only the device knows them, or they vary from call to call and might go to and fro.

    Args:
        decides: name of the argument, and the question.
        place: of each name the position among `args`.
    """
    name, question = decides
    number = kwargs[name] if name in kwargs else args[place[name]]
    if not isinstance(number, torch.SymFloat) or not is_of_host(number) or number.node.key is None:
        return None
    return bool(question(number))


def with_known(names: Collection[str], order: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call's arguments, those of `names` as Python's own numbers; the program holds for their values only.

    Args:
        order: names of the arguments that are given by position.

    Raises:
        TraceError: only the device knows one.
    """

    def known(name: str, arg: Any) -> Any:
        is_ours = isinstance(arg, torch.SymFloat) and name in names and isinstance(arg.node, NumberNode)
        return arg.node.known("number (an argument that decides a shape, or how to compute)") if is_ours else arg

    return tuple(map(known, order, args)), {name: known(name, arg) for name, arg in kwargs.items()}


def sample(number: torch.SymFloat | torch.SymBool) -> float | int | bool:
    """A Python number that promotes as the lifted one does."""
    return number.node.kind(1) if isinstance(number.node, NumberNode) else 1.0


def carried(number: torch.SymFloat | torch.SymInt | torch.SymBool) -> Any:
    """The 0-dim array that a lifted number carries."""
    node = number.node
    if not isinstance(node, NumberNode):
        raise TraceError(
            message(f"a symbolic number of another tracer was passed to device 'jax': {number}", fix="run the op outside that tracer")
        )
    return node.value
