"""A program for padded arguments, whose results are cut to the sizes of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd.base._convert import exact_dtypes
from spmd.device._arrays import fetched
from spmd.device._storage import Buffer
from spmd.program._options import Options
from spmd.program._program import Program
from spmd.program.run._program_call import ProgramCall
from spmd.program.sizes._family import Family
from spmd.program.sizes._formulas import Inexact
from spmd.program.trace._known_inputs import check_arguments
from spmd.program.trace._results import Leaf
from spmd.program.xla._compilation import Making


class SizedProgram(Program):
    """A program for one bucket. Its last host argument is the sizes of the call. See Note [Padding]."""

    def __init__(
        self,
        family: Family,
        bucket: Sequence[int],
        buffers: list[Buffer],
        options: Options,
        name: str,
        spent: tuple[float, float],
        making: Making,
    ) -> None:
        """Evaluate the family for the bucket, and compile.

        Raises:
            Inexact: it is not proved that padding does not affect the results.
        """
        self.family = family
        captured, dims, self._room = family.padded(bucket, buffers)
        num_outputs = captured.outputs.num_arrays
        num_written = len(captured.state.written)
        self._of_outputs, of_written, self._of_gradients = (
            dims[:num_outputs],
            dims[num_outputs : num_outputs + num_written],
            dims[num_outputs + num_written :],
        )
        if any(self._room.is_padded(dim) for own in of_written for dim in own):
            raise Inexact("an argument whose size varies is written in place, or a value of such a size is written to the state")
        super().__init__(captured, buffers, options, name, spent, making)
        self._dispatched = (*self._dispatched, self._cut_gradients)

    def reason_to_trace(self, numbers: Mapping[int, int | float], buffers: list[Buffer], hosts: list[torch.Tensor]) -> str | None:
        """Why the program is not valid for a call; None if it is."""
        return self.reason_for(self.family.today) or super().reason_to_trace(numbers, buffers, hosts)

    def reason_for(self, sizes: tuple[int, ...]) -> str | None:
        """Why the program is not valid for these sizes; None if it is."""
        why = self.family.reason(sizes)
        return "an extent of the program is larger than in its bucket" if why is None and not self._room.holds(sizes) else why

    def __call__(self, arg_buffers: list[Buffer], hosts: list[torch.Tensor], given: Any, num_decided: int = 0) -> Any:
        """Run once; the last of `hosts` is the sizes of the call, int64[names]."""
        self.family.today = tuple(hosts[-1].tolist())
        return super().__call__(arg_buffers, hosts, given, num_decided)

    def _cut(self, values: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
        return [self._cut_one(value, own) for value, own in zip(values, dims, strict=True)]

    def _cut_one(self, value: Any, dims: Any) -> Any:
        real = tuple(int(self._room.points.integer(self._room.product(dim))(self.family.today)) for dim in dims)
        if real == tuple(value.shape):
            return value
        if self.devices.is_on_cpu:
            return self.devices.array_of(np.ascontiguousarray(fetched(value)[tuple(slice(0, n) for n in real)]))
        with exact_dtypes():
            return jnp.asarray(lax.slice(value, (0,) * len(real), real))

    def _result(self, outputs: list[Any], given: Any, held: list[Any]) -> Any:
        return super()._result(self._cut(outputs, self._of_outputs), given, held)

    def _leaves(self) -> list[Leaf]:
        return self.family.leaves()

    def _check_arguments(self, call: ProgramCall) -> None:
        check_arguments(self.family.checks.at(self.family.today), [*call.arguments, *call.hosts])

    def _cut_gradients(self, call: ProgramCall) -> None:
        call.gradients = self._cut(call.gradients, self._of_gradients)


__all__ = ["SizedProgram"]
