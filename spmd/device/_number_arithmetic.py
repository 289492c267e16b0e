"""Arithmetic of `torch.SymFloat`s that keeps ints ints, where the number is ours.

`n = tokens.sum().item()` is an int, and so are `n + 1`, `n % 4` and `n ** 2`: torch's own operators make a float of the int first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.device._numbers import NumberNode
from spmd.patches._table import current, replace

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def install() -> None:
    """Replace the operators of `torch.SymFloat`; those of other tracers' numbers do what they did."""
    for name in _OPERATORS:
        for method, is_reversed in ((f"__{name}__", False), (f"__r{name}__", True)):
            target = f"torch.SymFloat.{method}"
            replace(target, _operator(name, is_reversed, current(target)))


def _operator(name: str, is_reversed: bool, of_torch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        node = self.node
        if not isinstance(node, NumberNode):
            return of_torch(self, other)
        its = _node_of(other, node)
        if its is None:
            return of_torch(self, other)
        if name == "pow" and not is_reversed and node.integral and type(other) is int and other >= 0:
            return torch.SymFloat(node.pow_by_natural(its))  # pyright: ignore[reportAttributeAccessIssue]
        return torch.SymFloat(getattr(its, name)(node) if is_reversed else getattr(node, name)(its))

    return method


def _node_of(number: Any, beside: NumberNode) -> NumberNode | None:
    """The node of an operand; None for what is no plain number."""
    if isinstance(number, torch.SymFloat):
        return number.node if isinstance(number.node, NumberNode) else None
    if type(number) in (int, bool):
        return beside.wrap_int(int(number))
    return beside.wrap_float(number) if type(number) is float else None


__all__ = ["install"]
