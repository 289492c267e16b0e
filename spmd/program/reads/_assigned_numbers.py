"""Numbers that are assigned to elements of a tensor: `x[i] = r`, `x[mask] = r`.

Torch's C++ takes only Python's numbers there. So a number that varies becomes a 0-dim tensor of the dtype first, which torch fills as it
does for a Python number, with the same rounding and the same errors.
"""

from __future__ import annotations

from typing import Any

import torch

from spmd.device._numbers import is_program_number
from spmd.device._storage import is_device_tensor
from spmd.program.reads._number_arguments import is_int, is_overridden
from spmd.program.reads._varying import Varying


def element_of(tensor: torch.Tensor, value: Any) -> Any:
    """A number that varies as a 0-dim tensor of the dtype of `tensor`; other values as they are."""
    if type(value) is not Varying:
        return value
    if value.is_numpy:
        tensor.new_empty(1)[0] = value.evaluate()  # raises for the classes of numpy that torch does not take
    if not is_program_number(value.traced()):
        return value.traced()
    number: Any = value.traced()
    if tensor.dtype is not torch.bool:
        return torch.full((), number, dtype=tensor.dtype, device=tensor.device)
    return torch.full((), number, dtype=torch.int64 if is_int(number) else torch.float64, device=tensor.device) != 0


class _Elements:
    """Takes the place of a tensor to whose elements a value is assigned."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tensor[key] = element_of(self._tensor, value)


def elements_of(holder: Any) -> Any:
    """What takes the place of `holder` in `holder[key] = value`."""
    takes_numbers = is_device_tensor(holder) and type(holder).__setitem__ is torch.Tensor.__setitem__ and not is_overridden((holder,))
    return _Elements(holder) if takes_numbers else holder


__all__ = ["element_of", "elements_of"]
