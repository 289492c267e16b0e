"""A tensor printed in a compiled function: the refusal says so, where torch's printing asks for values by an operation of its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from spmd.base._errors import TraceError, called_at, message
from spmd.patches._table import current, replaced


@contextmanager
def printing_refused_by_name() -> Generator[None]:
    """While active, `print`, `str`, `repr` and f-strings of a tensor whose values the trace does not have say what is missing."""
    torchs = current("torch._tensor_str._str")

    def _str(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        try:
            return torchs(self, tensor_contents=tensor_contents)
        except TraceError as error:
            raise _printed(self) from error

    with replaced("torch._tensor_str._str", _str):
        yield


def _printed(tensor: Any) -> TraceError:
    what = f"a tensor of the traced program, {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, was printed or made a string"
    why = "its values are known only when the compiled program runs"
    return TraceError(
        message(what, *called_at(), why, fix="return it from the step and print it there; x.shape and x.dtype are known here")
    )


__all__ = ["printing_refused_by_name"]
