"""`Varying`: a number of Python or numpy that changes from call to call, as an input of a program.

A number that has changed when a function is traced again (a counter, a warm-up weight, an argument) is a `Varying` from then on.

- Python arithmetic on it gives another `Varying`, which each call computes on the host, exactly as Python does.
- As an operand of a tensor, it becomes an element of the vector of numbers that each call passes to the program.
- A comparison is answered with the value of this call, and its outcome is guarded: there is one program for each outcome.
- Other uses (a size, a key, a text) get the value itself, which is guarded.
"""

from __future__ import annotations

import builtins
import collections
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.base._errors import TraceAgain
from spmd.device._numbers import is_of_host, lifted
from spmd.device._representable_numbers import is_exact
from spmd.device._storage import recording
from spmd.program.reads._composed_functions import raised
from spmd.program.reads._nested import any_inside
from spmd.program.reads._noted_sizes import is_noted
from spmd.program.reads._number_calls import CHOICES, for_numbers
from spmd.program.reads._number_functions import gives_float, keeps_settings, may_raise
from spmd.program.reads._number_objects import RETURNED, Choice
from spmd.program.reads._number_operands import loses_numbers, number_beside
from spmd.program.reads._numpy_numbers import NUMPYS, OF_DTYPE, is_number, plain, with_errors

if TYPE_CHECKING:
    from spmd.program.trace._trace_settings import TraceSettings

Evaluate = Callable[[], Any]


class NumbersNeeded(TraceAgain):
    """Code that is not recorded needs plain Python numbers: trace again with each varying number as a guarded constant."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, has_constant_numbers=True)


class Numbers:
    """The varying numbers of one trace: those that are inputs of the program, and the guards on their values.

    Attributes:
        is_tracing: whether a trace runs.
        inputs: functions that compute the inputs, in the order of the vector's elements.
        arrays: these elements, during a trace.
        on_branch: called with (key, evaluate, outcome) of each guard.
        numpy_errors: how numpy handled errors when the trace began.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the largest number of inputs."""
        self.inputs: list[Evaluate] = []
        self.arrays: list[Any] = []
        self._capacity = capacity
        self.is_tracing, self.numpy_errors = False, np.geterr()
        self._element: Callable[[int], Any] = lambda index: None
        self.on_branch: Callable[[Any, Evaluate, Any], None] = lambda key, evaluate, outcome: None

    def start(self, on_branch: Callable[[Any, Evaluate, Any], None], element: Callable[[int], Any]) -> None:
        """Begin a trace.

        Args:
            on_branch: called with (key, evaluate, outcome): the program is valid while `evaluate()` gives `outcome`.
            element: gives the traced value of one element of the vector.
        """
        self.inputs, self.arrays = [], []
        self.is_tracing, self.numpy_errors = True, np.geterr()
        self.on_branch, self._element = on_branch, element

    @property
    def has_room(self) -> bool:
        """Whether less than half of the inputs are taken."""
        return 2 * len(self.inputs) < self._capacity

    def stop(self) -> None:
        """End the trace, and drop all that belongs to it."""
        self.is_tracing, self.arrays = False, []
        self.on_branch, self._element = (lambda key, evaluate, outcome: None), (lambda index: None)

    def traced(self, number: Varying) -> torch.SymFloat | float | int | bool:
        """The number in a form that torch takes: an input of the program, or its value if it cannot be one."""
        evaluate = number.evaluate if not number.is_numpy else lambda: plain(number.evaluate())
        value = evaluate()
        if type(value) is int:
            number.guard(lambda: is_exact(evaluate()), is_exact(value))
        if isinstance(value, bool) or not is_exact(value) or (number.of_settings is None and len(self.inputs) == self._capacity):
            return number.concrete()
        if number.of_settings is not None:
            return number.of_settings()
        self.inputs.append(evaluate)
        array = self._element(len(self.inputs) - 1)
        self.arrays.append(array)
        return lifted(array, evaluate, self.on_branch, integral=isinstance(value, int))


class Varying:
    """A number of the host whose value may differ in every call of a program.

    Attributes:
        evaluate: computes the number from the values of this call.
        is_numpy: whether the number is one of numpy: an argument, a variable, an item of an array, or the result of one.
        of_settings: for a number that follows from settings of optimizers alone, gives it in the form that torch takes; None for others.
        choice: for a result of `min` or `max`, which argument it is.
    """

    __slots__ = ("_numbers", "_symbol", "_value", "choice", "evaluate", "is_numpy", "of_settings")
    __array_ufunc__ = None  # numpy's operators defer to ours: they would make an array of objects

    def __init__(self, numbers: Numbers, evaluate: Evaluate, is_numpy: bool = False, of_settings: Evaluate | None = None) -> None:
        self._numbers, self.of_settings = numbers, of_settings
        self._symbol: Any = None
        self._value: Any = None
        self.choice: Choice | None = None
        self.evaluate = evaluate
        self.is_numpy = is_numpy

    def concrete(self) -> Any:
        """The value in this call, one object in all of a trace. The program is then valid for this value only."""
        if self._value is None:
            self._value = self.evaluate()
        self.guard(self.evaluate, self._value)
        return self._value

    def is_held(self, value: Any) -> bool:
        """Whether an object is the value that `concrete` has given."""
        return value is self._value and value is not None

    def guard(self, evaluate: Evaluate, outcome: Any) -> None:
        """Guard: the program is valid while `evaluate()` gives `outcome`."""
        self._numbers.on_branch(None, evaluate, outcome)

    def traced(self) -> Any:
        """The number in a form that torch takes: an input of the program.

        Each part of the trace (a branch, a loop body) gets its own, because traced values cannot be shared between parts.
        """
        part = recording.get()
        if self._symbol is None or self._symbol[0] is not part:
            self._symbol = part, self._numbers.traced(self)
        return self._symbol[1]

    def apply(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)` with varying arguments, as a value that every call computes."""
        if len(args) == 1 and type(args[0]) is Varying and type(args[0].evaluate()) in RETURNED.get(fn, ()):
            return args[0]
        of_settings: Evaluate | None = None
        if all(map(_is_of_settings, args)) and keeps_settings(fn, args):
            of_settings = lambda: for_numbers(fn)(*(a.traced() if type(a) is Varying else a for a in args))  # noqa: E731
            if gives_float(fn, args):
                return of_settings()
        parts = [evaluation(a) for a in args]
        evaluate = lambda: fn(*(part() for part in parts))  # noqa: E731
        if (errors := np.geterr()) != self._numbers.numpy_errors:
            evaluate = partial(with_errors, errors, evaluate)
        if may_raise(fn, args):  # here, where the user may catch it; the guard separates numbers that raise from those that do not
            self.guard(lambda: _raised_by(evaluate), _raised_by(evaluate))
        value = evaluate()
        if _may_change_type(fn, args):
            self.guard(lambda: type(evaluate()), type(value))
        return Varying(self._numbers, evaluate, of_settings=of_settings) if of_settings else self._as_varying(evaluate, value)

    def _as_varying(self, evaluate: Evaluate, value: Any) -> Any:
        """The result of `evaluate`, which is `value` in this call: varying if it is a number or a tuple of some, otherwise guarded."""
        if is_number(value):
            return Varying(self._numbers, evaluate, isinstance(value, NUMPYS))
        if type(value) is tuple and all(map(is_number, value)):  # of `divmod`, `math.modf`, `as_integer_ratio`
            return tuple(self._as_varying(partial(_item_of, evaluate, i), item) for i, item in enumerate(value))
        self.guard(evaluate, value)
        return value

    def takes(self, number: Any) -> bool:
        """Whether the host computes an operation on this number and another: on a Python number, or a host number while there is room."""
        if isinstance(number, torch.SymFloat):
            return is_of_host(number) and self._numbers.has_room
        return isinstance(number, (int, float, *NUMPYS, Varying))

    def __bool__(self) -> bool:
        evaluate = self.evaluate
        outcome = bool(evaluate())
        self.guard(lambda: bool(evaluate()), outcome)
        return outcome

    def __copy__(self) -> Varying:
        return self

    def __deepcopy__(self, memo: Any) -> Varying:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NumbersNeeded  # a pickle of a number has its value, and no call

    def __hash__(self) -> int:
        raise NumbersNeeded  # it is part of a key: see `Recording.as_hash`

    def __getattr__(self, name: str) -> Any:
        if name == "__dict__":  # library code that inspects its arguments (json)
            raise NumbersNeeded
        value = self.evaluate()
        if name.startswith("_") or not hasattr(value, name):  # torch tests attributes of any object
            raise AttributeError(f"'{type(value).__name__}' object has no attribute '{name}'")
        if type(value) in RETURNED[operator.pos] and name in ("real", "numerator"):
            return self
        return NumberMethod(self, name) if callable(getattr(value, name)) else getattr(value if name in OF_DTYPE else self.concrete(), name)


class NumberMethod:
    """A method of a varying number. Code that is not recorded calls it directly, and gets the result for the value of this call."""

    __slots__ = ("_name", "_number")

    def __init__(self, number: Varying, name: str) -> None:
        self._number, self._name = number, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(self._number.concrete(), self._name)(*args, **options)

    def vary(self, *args: Any, **options: Any) -> Any:
        """The result as a value that every call computes; instrumented code calls this."""
        name = self._name
        return applied(self._number, lambda number, *more, **named: getattr(number, name)(*more, **named), self._number, *args, **options)


def _is_of_settings(number: Any) -> bool:
    """Whether a number is a constant or follows from settings of optimizers alone."""
    if isinstance(number, torch.SymFloat):
        return is_of_host(number) and number.node.key is not None
    return type(number) in (int, float) or (type(number) is Varying and number.of_settings is not None)


def _may_change_type(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether the result of `fn` may change between int and float for other numbers of the same types."""
    if fn in (operator.pow, operator.ipow, pow):  # ints to a negative power
        return not any(type(a) is float for a in args)
    among = args[0] if len(args) == 1 and is_sequence(args[0]) else args
    return fn in (min, max) and len({type(evaluation(a)()) for a in among}) > 1


def _item_of(evaluate: Evaluate, index: int) -> Any:
    return evaluate()[index]


def _raised_by(evaluate: Evaluate) -> type[Exception] | None:
    try:
        evaluate()
    except Exception as error:
        return type(error)
    return None


def evaluation(number: Any) -> Evaluate:
    """A function that gives a number, or a list or tuple of numbers, in each call."""
    if isinstance(number, Varying):
        return number.evaluate
    if isinstance(number, torch.SymFloat):  # a hyperparameter of an optimizer
        assert number.node.evaluate is not None
        return partial(_of_host, number.node.kind, number.node.evaluate)
    if is_sequence(number):
        parts, kind = [evaluation(item) for item in number], type(number)
        return lambda: kind([part() for part in parts])
    return number.now if is_noted(number) else lambda: number


def _of_host(kind: type, evaluate: Evaluate) -> Any:
    """A number that the host computes. It does not hold the node, which would keep the trace alive."""
    return kind(evaluate())


def _convert(name: str) -> None:
    setattr(Varying, name, lambda self, *args: getattr(self.concrete(), name)(*args))


for _name in ("__repr__", "__str__", "__format__"):  # no `__index__` and no `__float__`: C code would take the value without a guard
    _convert(_name)


def _binary(name: str, fn: Callable[[Any, Any], Any], of_tensors: Callable[[Any, Any], Any] | None = None) -> None:
    def of(self: Varying, other: Any, left: Any, right: Any) -> Any:
        if self.takes(other):
            return self.apply(fn, left, right)
        if isinstance(other, (torch.Tensor, torch.SymFloat, torch.SymInt, complex)):
            beside: Any = other if loses_numbers(other) else None
            taken = (a.traced() if isinstance(a, Varying) else a for a in (left, right))
            return (of_tensors or fn)(*(a if beside is None else number_beside(a, beside) for a in taken))
        return fn(*(a.concrete() if isinstance(a, Varying) else a for a in (left, right)))

    setattr(Varying, f"__{name}__", lambda self, other: of(self, other, self, other))
    setattr(Varying, f"__r{name}__", lambda self, other: of(self, other, other, self))


def _comparison(name: str, fn: Callable[[Any, Any], Any]) -> None:
    def compare(self: Varying, other: Any) -> Any:
        if not self.takes(other):
            is_traced = isinstance(other, (torch.Tensor, torch.SymFloat))
            return fn(self.traced() if is_traced else self.concrete(), other)
        evaluate, its = self.evaluate, evaluation(other)
        outcome = fn(evaluate(), its())
        self.guard(lambda: fn(evaluate(), its()), outcome)
        return outcome

    setattr(Varying, f"__{name}__", compare)


def _unary(name: str, fn: Callable[..., Any]) -> None:
    setattr(Varying, f"__{name}__", lambda self, *args: self.apply(fn, self, *args))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and_", "or_", "xor"):
    _binary(_name.rstrip("_"), getattr(operator, _name))
for _name, _rest in {"pow": (operator.pow, raised), "divmod": (divmod,), "matmul": (operator.matmul,)}.items():
    _binary(_name, *_rest)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(_name, getattr(operator, _name))
for _name, _fn in {"neg": operator.neg, "pos": operator.pos, "abs": abs, "invert": operator.invert, "round": round}.items():
    _unary(_name, _fn)
for _name, _fn in {"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}.items():
    _unary(_name, _fn)

_OPERATIONS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "lshift", "rshift", "and_", "or_", "xor", "invert"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "ilshift", "irshift", "iand", "ior", "ixor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not_", "truth", "index"),
)
_BUILTINS = ("abs", "round", "int", "float", "min", "max", "pow", "bool", "sum", "divmod", "complex")
PURE = {
    id(fn)
    for fn in (
        *filter(callable, vars(math).values()),
        *(getattr(operator, name) for name in _OPERATIONS),
        *(getattr(builtins, name) for name in _BUILTINS),
    )
}


def is_varying(key: Any) -> bool:
    """Whether a key contains varying numbers, in slices, tuples or lists."""
    return any_inside(key, lambda part: type(part) in (tuple, list), _is_varying_part)


def _is_varying_part(part: Any) -> bool:
    return type(part) is Varying or (type(part) is slice and any(type(end) is Varying for end in (part.start, part.stop, part.step)))


def fixed(key: Any) -> Any:
    """The key with the values of this call. The program is then valid for these only."""
    if type(key) is slice:
        return slice(*map(fixed, (key.start, key.stop, key.step)))
    if type(key) in (tuple, list):
        return type(key)(map(fixed, key))
    return key.concrete() if type(key) is Varying else key


def with_fixed_keys(made: Any) -> Any:
    """A dict or set that was just built, with plain numbers for varying keys. The program is then valid for these only."""
    if any(map(is_varying, made)):
        if isinstance(made, frozenset):
            return frozenset(map(fixed_if_varying, made))
        items = list(made.items()) if isinstance(made, dict) else list(made)
        made.clear()
        made.update([(fixed_if_varying(k), v) for k, v in items] if isinstance(made, dict) else map(fixed_if_varying, items))
    return made


def fixed_if_varying(key: Any) -> Any:
    """The key with the values of this call if it varies, otherwise the key itself."""
    return fixed(key) if is_varying(key) else key


def applied(number: Varying, fn: Any, /, *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)` of numbers of the host, as a value that every call computes. `number` is one of those that vary."""
    if "out" in options:  # of numpy
        return fn(*map(fixed_if_varying, given), **options)
    num, call = len(given), fn
    if options:
        call = lambda *all_: fn(*all_[:num], **dict(zip(options, all_[num:], strict=True)))  # noqa: E731
    found = number.apply(call, *given, *options.values())
    if fn in CHOICES and type(found) is Varying:
        among: Any = given[0] if num == 1 else given
        found.choice = Choice(fn, among, list(map(evaluation, among)), options.get("key"))
    return found


def is_sequence(value: Any) -> bool:
    """Whether it is a sequence that torch and numpy convert to a tensor or an array."""
    return isinstance(value, (list, tuple, collections.deque)) and type(value) is not torch.Size
