"""In-place operators of a tensor or array and a number that varies: `p *= self.decay`.

The operator of the tensor does not know the number, so Python would use the number's reflected operator, which returns a new tensor and
leaves the one on the left as it is. Others lose a number of the program (`_number_operands`).
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.device._numbers import is_program_number
from spmd.program.reads._composed_functions import raised_in_place
from spmd.program.reads._container_methods import note_in_place
from spmd.program.reads._copied_elements import CopiedElements
from spmd.program.reads._late_writes import late_operand
from spmd.program.reads._number_operands import integer_operand, loses_numbers, number_beside
from spmd.program.reads._varying import Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor")


class _InPlace:
    """Stands for the left operand."""

    __slots__ = ("copies", "target")

    def __init__(self, target: Any, copies: CopiedElements) -> None:
        self.target, self.copies = target, copies


def _define(name: str) -> None:
    do = getattr(operator, f"i{name}" if hasattr(operator, f"i{name}") else f"i{name}_")
    of_tensor = raised_in_place if name == "pow" else do

    def operate(self: _InPlace, number: Any) -> Any:
        if not isinstance(self.target, torch.Tensor):
            return do(self.target, number.concrete())
        taken = number.traced() if type(number) is Varying else number
        with self.copies.writing(self.target):
            return of_tensor(self.target, number_beside(taken, self.target) if loses_numbers(self.target) else taken)

    setattr(_InPlace, f"__i{name}__", operate)


for _name in _NAMES:
    _define(_name)


def in_place(recording: Recording, left: Any, right: Any) -> Any:
    """Before `left += right` and the like. Returns the left operand to use instead."""
    if (late := late_operand(recording, left, right)) is not None:
        return late
    note_in_place(recording, left, right)
    if isinstance(left, list):
        return left
    return _in_place_operand(integer_operand(recording._operands(left, right), right), right, recording.copies)


def _in_place_operand(left: Any, right: Any, copies: CopiedElements) -> Any:
    """The left operand to use. `copies`: the elements that were read at a varying index."""
    is_varying = type(right) is Varying and isinstance(left, (torch.Tensor, np.ndarray))
    return _InPlace(left, copies) if is_varying or copies.has(left) or (is_program_number(right) and loses_numbers(left)) else left


__all__ = ["in_place"]
