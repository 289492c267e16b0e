"""Device values that take the place of Python numbers in a traced program.

While a program is traced, `tensor.item()` and the lifted floats of an optimizer are `torch.SymFloat`s whose node holds a 0-dim
array. Arithmetic on them stays on the device, and ATen ops accept them as `Scalar`. Converting one to a Python number raises at
the user's line. This module does not depend on tensors or programs.

A node with `evaluate` can compute the number on the host and answers comparisons. It passes each answer to `on_branch`, which
guards the program: it is retraced when the answer would differ.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, called_at, message
from spmd.device._asserted import answered
from spmd.device._host_answers import host_answer
from spmd.device._powers import power
from spmd.device._storage import once, recording

Evaluate = Callable[[], float]
AsInput = Callable[[Any], Any]


class _IntNode(NamedTuple):
    """The node of a `torch.SymInt` that passes an int to C code which expects one (`"%d" % n`)."""

    value: int

    def is_int(self) -> bool:
        return True

    def int_(self) -> int:
        return self.value


class NumberNode:
    """Node of a `torch.SymFloat`. The methods implement the protocol that torch's C++ calls.

    Attributes:
        value: 0-dim array, usually a tracer, or a function that returns it.
        evaluate: computes the number on the host from the current hyperparameters; None for data.
        on_branch: called with (key, evaluate, outcome) for each comparison that Python branches on.
        boolean: the node is the outcome of a comparison (a `torch.SymBool`).
        integral: the number stands for a Python int (an item of an integer tensor) and promotes like one; torch still sees a float.
        truth: the number stands for a Python bool (an item of a bool tensor); arithmetic converts it to an int, as in Python.
        key: expression that `of_settings` can compute. Numbers with equal keys always evaluate to the same value. None if there is none.
        operation: (name, operands) of the operation that gave a number that only the device knows; None for others.
        num_operations: number of operations and items that it follows from.
        as_input: returns, for the key of a number that the host can compute from settings alone, an array that is an input of the
            program; None if the program has no room for further inputs.
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
        self.operation: tuple[builtins.str, tuple[NumberNode, ...]] | None = None
        self.num_operations = 1

    @property
    def kind(self) -> type:
        """The class of the Python number that the node stands for."""
        return bool if self.boolean or self.truth else int if self.integral else float

    @property
    def value(self) -> Any:
        """The 0-dim array. That of a comparison is computed only if the program needs it."""
        return self._value() if callable(self._value) else self._value

    def as_truth(self) -> NumberNode:
        """The outcome of a comparison, or of an operator on bools, as a bool with which Python can compute."""

        def value() -> Any:
            with exact_dtypes():
                return once("truth", (self.value,), lambda: _integer(self.value))

        made = NumberNode(value, self.evaluate, self.on_branch, key=self.key, truth=True)
        made.operation, made.num_operations = self.operation, self.num_operations
        return made

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

    def trunc(self) -> _IntNode:
        return _IntNode(int(self._concrete("int")))

    def round(self, digits: Any = None) -> NumberNode:
        raise needs_value("rounded number")

    def __repr__(self) -> str:
        return "a number of the traced program"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise needs_value("number (to be pickled)")

    def __deepcopy__(self, memo: Any) -> NumberNode:
        return self

    _graph_repr = str  # print and f-strings call it

    def wrap_float(self, number: float) -> NumberNode:
        return NumberNode(np.float64(number), lambda: number, self.on_branch, key=("float", float(number).hex()))

    def wrap_int(self, number: int) -> NumberNode:
        value = np.int64(number) if _fits_64_bits(number) else np.float64(number)
        return NumberNode(value, lambda: number, self.on_branch, integral=True, key=("int", number))

    def wrap_bool(self, number: bool) -> NumberNode:
        return NumberNode(np.bool_(number), lambda: number, self.on_branch, boolean=True, key=("bool", number))

    def guard_float(self, file: str, line: int) -> float:
        answer = answered(self._is_true) if self.evaluate is None else None
        return float(self._concrete("float, or as a bool for a branch")) if answer is None else float(answer)

    def guard_int(self, file: str, line: int) -> int:
        return int(self._concrete("int"))

    def _concrete(self, kind: builtins.str) -> Any:
        """The value of a number that the host knows. The program gets a guard on this value."""
        if self.evaluate is None or self.on_branch is None:
            known = host_answer(self.value)
            if known is None:
                raise needs_value(kind)
            return self.kind(known.item())
        value = self.evaluate()
        self.on_branch(None if self.key is None else ("value", self.key), self.evaluate, value)  # pyright: ignore[reportArgumentType]
        return value

    def known(self, what: builtins.str) -> Any:
        """The Python number that the node stands for. The program gets a guard on this value.

        Args:
            what: kind of number that is needed, for the error.

        Raises:
            TraceError: only the device knows the number.
        """
        return self.kind(self._concrete(what))

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def expect_true(self, file: str, line: int) -> bool:
        """torch's own sanity checks (the base of a power is not negative); assumed to hold if only the device knows the number."""
        return True if self.evaluate is None else bool(self.evaluate())

    def _is_true(self) -> Any:
        with exact_dtypes():
            return jnp.asarray(self.value) != 0

    def bool_(self) -> bool:
        if self.evaluate is None or self.on_branch is None:
            answer = answered(self._is_true)
            known = host_answer(self._is_true()) if answer is None else answer
            recorder = recording.get()
            if known is None and recorder is not None:
                known = recorder.side_of(self._is_true())
            if known is None:
                raise needs_value("bool (a branch)")
            return bool(known)
        evaluate = self.evaluate
        outcome = bool(evaluate())
        self.on_branch(self.key, lambda: bool(evaluate()), outcome)
        return outcome


def needs_value(kind: str, line: str = "") -> TraceError:
    """The error for a number that Python needs during the trace.

    Args:
        kind: kind of Python number that was needed.
        line: location in the user's code; by default that of the current call.
    """
    return TraceError(
        message(
            f"a number of the traced program was needed as a Python {kind}",
            *([f"called at {line}"] if line else called_at()),
            "its value is known only when the compiled program runs",
            fix="return it from the step, or stay on the device with torch.where or torch.cond",
        )
    )


def data_dependent(op: Any) -> TraceError:
    """The error for an op whose result shape depends on values while a program is traced."""
    return TraceError(
        message(
            f"the result shape of {op} depends on values, which a traced program does not have",
            *called_at(),
            fix=_FIXED_SHAPE_FIXES.get(
                op._schema.name, "keep shapes fixed with torch.where or a mask, or call the op outside the compiled function"
            ),
        )
    )


_MASKED = (
    "torch.where(mask, f(x), x) for x[mask] = f(x[mask]); torch.where(mask, x, 0).sum() for x[mask].sum(), over mask.sum() for the mean"
)
_FIXED_SHAPE_FIXES = {
    **dict.fromkeys(("aten::index", "aten::_unsafe_index", "aten::masked_select"), _MASKED),
    **dict.fromkeys(("aten::index_put", "aten::_index_put_impl"), "x = torch.where(mask, values, x), with a value for every element"),
    "aten::nonzero": "torch.where(mask, a, b) needs no positions; torch.nonzero_static(mask, size=n) gives n of them",
}
"""Equivalent code with fixed shapes, by operator."""


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
        made = NumberNode(value, evaluate, on_branch, boolean=name in _COMPARISONS, integral=integral, key=key, as_input=as_input)
        if evaluate is None:
            made.operation = name, (self, *others)
            made.num_operations = 1 + sum(node.num_operations for node in (self, *others))
        return made

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
    on_branch(("computes", key), partial(_is_computable, evaluate), True)  # if it fails, the retrace raises Python's error
    return compute()


def _is_computable(evaluate: Evaluate) -> bool:
    try:
        evaluate()
    except (ValueError, ArithmeticError):
        return False
    return True


def of_settings(key: Any, settings: Any) -> Any:
    """Compute the expression `key` of a number from the settings: Python floats, or arrays in a program that takes only the settings."""
    name, *parts = key
    if name == "slot":
        return settings[parts[0]]
    if name in CONSTANTS:
        return CONSTANTS[name](parts[0])
    return _OPERATORS[name](*(of_settings(part, settings) for part in parts))


CONSTANTS: dict[str, Callable[[Any], float]] = {"float": float.fromhex, "int": float, "bool": float}


def _fits_64_bits(number: int) -> bool:
    """Whether the number fits into 64 bits."""
    return -(2**63) <= number < 2**63


def _integer(value: Any) -> Any:
    """The number as an int64, for arithmetic on Python ints."""
    if isinstance(value, jax.Array):
        return value.astype(jnp.int64)
    if not _fits_64_bits(int(value)):
        raise needs_value("int of more than 64 bits")
    return np.int64(value)


def _of_math(name: str, number: Any) -> Any:
    if not isinstance(number, jax.Array):
        return getattr(math, name)(number)
    return getattr(jnp, name)(number if jnp.issubdtype(number.dtype, jnp.inexact) else number.astype(jnp.float64))


def _of_device(*numbers: Any) -> bool:
    return any(isinstance(number, jax.Array) for number in numbers)


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "is_integer"})
_KEEP_INTEGERS = frozenset(
    {
        *("add", "sub", "mul", "floordiv", "mod", "neg", "pos", "abs", "sym_min", "sym_max", "min", "max", "pow_by_natural"),
        *("and_", "or_", "xor", "lshift", "rshift"),
    }
)
_MAKE_INTEGERS = frozenset({"floor", "ceil", "int"})
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: -a if isinstance(b, np.generic) and b == -1 else a * b,  # a product of 64-bit floats takes 45 instructions on a TPU
    "truediv": lambda a, b: a / b,
    "float_truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "pow": power,
    "float_pow": power,
    "pow_by_natural": lambda a, b: a**b,
    "and_": lambda a, b: a & b,
    "or_": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "lshift": lambda a, b: jnp.where(jnp.asarray(b) > 63, 0, a << jnp.clip(b, 0, 63)),
    "rshift": lambda a, b: a >> jnp.clip(b, 0, 63),
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
    "min": lambda a, b: jnp.where(b < a, b, a) if _of_device(a, b) else min(a, b),  # Python's: the first of equal ones, NaN is never less
    "max": lambda a, b: jnp.where(b > a, b, a) if _of_device(a, b) else max(a, b),
    "int": lambda a: jnp.trunc(a) if _of_device(a) else int(a),
    "sqrt": lambda a: power(a, 0.5),
}
OF_MATH = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
"""Functions of `math` that a program can compute, like `torch.sym_sqrt` and similar functions."""
for _name in OF_MATH:
    _OPERATORS[f"sym_{_name}"] = partial(_of_math, _name)
for _name, _fn in _OPERATORS.items():
    _operator(_name, _fn)


def lifted(value: Any, evaluate: Evaluate | None = None, on_branch: Any = None, **kind: Any) -> torch.SymFloat:
    """A `torch.SymFloat` for the 0-dim array `value`; `kind` has further arguments of `NumberNode`."""
    return torch.SymFloat(NumberNode(value, evaluate, on_branch, **kind))


def is_of_host(number: torch.SymFloat, *, asks: bool = False) -> bool:
    """Whether the host can compute the number.

    Args:
        asks: allow inputs whose values the host knows; the program then gets a guard on them.
    """
    node = number.node
    if not isinstance(node, NumberNode):
        return False
    return (node.evaluate is not None and node.on_branch is not None) or (asks and host_answer(node.value) is not None)


def decided(
    decides: tuple[str, Callable[[Any], Any]], place: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool | None:
    """The host's answer to a lowering's question about an optimizer's setting. The program gets a guard on the answer.

    None for other numbers: only the device knows them, or they vary from call to call and could cause retraces again and again.

    Args:
        decides: name of the argument, and the question.
        place: position in `args` of each argument name.
    """
    name, question = decides
    number = kwargs[name] if name in kwargs else args[place[name]]
    if not isinstance(number, torch.SymFloat) or not is_of_host(number) or number.node.key is None:
        return None
    return bool(question(number))


def with_known(names: Collection[str], order: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call, with those in `names` converted to Python numbers. The program gets a guard on their values.

    Args:
        order: names of the positional arguments.

    Raises:
        TraceError: only the device knows one of the numbers.
    """

    def known(name: str, arg: Any) -> Any:
        is_ours = isinstance(arg, torch.SymFloat) and name in names and isinstance(arg.node, NumberNode)
        return arg.node.known("number (an argument that decides a shape, or how to compute)") if is_ours else arg

    return tuple(map(known, order, args)), {name: known(name, arg) for name, arg in kwargs.items()}


def is_program_number(value: Any) -> TypeGuard[torch.SymFloat]:
    """Whether it is a number of the traced program."""
    return type(value) in (torch.SymFloat, torch.SymBool) and isinstance(value.node, NumberNode)


def number_of(arg: Any) -> Any:
    """The `torch.SymFloat` that an argument of an operator is, or that C++ has wrapped in a 0-dim CPU tensor; None for others."""
    if isinstance(arg, torch.SymFloat):
        return arg
    return getattr(arg, "__wrapped_number", None) if isinstance(arg, torch.Tensor) and arg.is_cpu else None


def sample(number: torch.SymFloat | torch.SymBool) -> float | int | bool:
    """A Python number that promotes like the lifted one."""
    return number.node.kind(1) if isinstance(number.node, NumberNode) else 1.0


def carried(number: torch.SymFloat | torch.SymInt | torch.SymBool) -> Any:
    """The 0-dim array of a lifted number.

    Raises:
        TraceError: the number belongs to another tracer.
    """
    node = number.node
    if not isinstance(node, NumberNode):
        raise TraceError(
            message(f"a symbolic number of another tracer was passed to device 'jax': {number}", fix="run the op outside that tracer")
        )
    return node.value
