"""Values of a program while it is recorded with loops: single arrays, and stacks of the values of all passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.base._jax import is_literal
from spmd.program.roll._repeats import num_bytes


class Stacks:
    """The array of each variable. A member of a stack is sliced out when it is first requested."""

    def __init__(self) -> None:
        self._single: dict[Any, Any] = {}
        self._arrays: list[Any] = []
        self._layouts: list[Any] = []
        self._places: dict[Any, tuple[int, int]] = {}  # variable -> (number of its stack, index in the stack)

    def put(self, variable: Any, array: Any) -> None:
        self._single[variable] = array

    def put_stack(self, variables: Sequence[Any], array: Any, layout: Any = None) -> None:
        """Store `array[i]` as the value of `variables[i]`. `layout` is the sharding of each of them, or None if they are not marked."""
        for i, variable in enumerate(variables):
            self._places[variable] = len(self._arrays), i
        self._arrays.append(array)
        self._layouts.append(layout)

    def layout(self, variable: Any) -> Any:
        """The sharding of a member of a stack of marked tensors. None for other values."""
        return None if is_literal(variable) or variable not in self._places else self._layouts[self._places[variable][0]]

    def get(self, atom: Any) -> Any:
        """The value of a variable or literal."""
        if is_literal(atom):
            return atom.val
        if atom not in self._single:
            stack, index = self._places[atom]
            self._single[atom] = lax.index_in_dim(self._arrays[stack], index, keepdims=False)
        return self._single[atom]

    def stack(self, variables: Sequence[Any]) -> Any:
        """[len(variables), ...]: an existing stack of the variables, a slice of one, or else a new stack."""
        found = self._slice(variables)
        if found is not None:
            stack, start, step = found
            array = self._arrays[stack]
            array = lax.rev(array, (0,)) if step < 0 else array
            start = start if step > 0 else len(array) - 1 - start
            return array if len(variables) == len(array) else lax.slice_in_dim(array, start, start + len(variables))
        array = jnp.stack([self.get(v) for v in variables])
        if not any(v in self._places for v in variables) and len(set(variables)) == len(variables):
            self.put_stack(variables, array)
        return array

    def rows(self, variables: Sequence[Any]) -> Any:
        """[len(variables), ...]: like `stack`, for interleaved variables: the first members of several stacks, then the second, ..."""
        parts: list[Any] = []
        start = 0
        while start < len(variables):
            width, length = self._interleaving(variables, start)
            if not width:
                parts.append(self.get(variables[start])[None])
                start += 1
                continue
            stop = start + width * length
            columns = [self.stack(variables[start + i : stop : width]) for i in range(width)]
            parts.append(jnp.stack(columns, 1).reshape(width * length, *columns[0].shape[1:]))
            start = stop
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def _interleaving(self, variables: Sequence[Any], start: int) -> tuple[int, int]:
        """(number of interleaved stacks, members of each) from `start` on; (0, 0) if no later variable is the next of the same stack."""
        stack, index = self._places.get(variables[start], (-1, 0))
        for width in range(1, len(variables) - start):
            if self._places.get(variables[start + width]) == (stack, index + 1):
                length = 1
                while start + (length + 1) * width <= len(variables) and all(
                    self._follows(variables[start + length * width + i], variables[start + (length - 1) * width + i]) for i in range(width)
                ):
                    length += 1
                return (width, length) if length > 1 else (0, 0)
        return 0, 0

    def _follows(self, variable: Any, before: Any) -> bool:
        """Whether `variable` is the member after `before` in the same stack."""
        stack, index = self._places.get(before, (-1, 0))
        return self._places.get(variable) == (stack, index + 1)

    def is_reversed(self, families: Sequence[Sequence[Any]]) -> bool:
        """Whether the families that are stacked from the last pass to the first have more bytes than those in forward order."""
        sizes = {1: 0, -1: 0}
        for family in families:
            found = self._slice(family)
            if found is not None:
                sizes[found[2]] += num_bytes(family[0].aval)
        return sizes[-1] > sizes[1]

    def _slice(self, variables: Sequence[Any]) -> tuple[int, int, int] | None:
        """(stack, index of the first variable, step 1 or -1) if the variables are consecutive members of one stack. Otherwise None."""
        places = [self._places.get(v) for v in variables]
        first, second = places[0], places[1]
        if first is None or second is None or first[0] != second[0] or abs(step := second[1] - first[1]) != 1:
            return None
        return (*first, step) if places == [(first[0], first[1] + i * step) for i in range(len(places))] else None


__all__ = ["Stacks"]
