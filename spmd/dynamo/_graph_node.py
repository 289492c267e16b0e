"""A call of a graph's programs on autograd's tape: one node, forward and backward one program each.

What the backward pass needs of the inputs is saved as these tensors, so a write in between is found. What the forward pass computed
for it hangs on one tensor without elements, which is saved with them: a hundred arrays cost what one does. Where saved-tensor
hooks are on, each is a tensor of its own, which they see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.base._torch import top_saved_tensors_default_hooks
from spmd.device._storage import load, wrap, wrap_unset

if TYPE_CHECKING:
    from spmd.dynamo._graph_executables import Program

_BYTE = np.dtype(np.uint8)


class Node(torch.autograd.Function):
    """apply(program, tensors, args, *those of the tensors that get a gradient)"""

    @staticmethod
    def forward(ctx: Any, program: Program, tensors: list[torch.Tensor], args: tuple[Any, ...], *wanted: torch.Tensor) -> Any:
        """The computed values, as a tuple of tensors."""
        traced = program.traced
        made, computed = program.forward(tensors, args)
        ctx.program, ctx.size = program, program.size_of(args)
        ctx.is_carried = top_saved_tensors_default_hooks(False) is None
        ctx.save_for_backward(
            *(tensors[i] for i in traced.kept_inputs), *([_carrying(computed)] if ctx.is_carried else map(wrap, computed))
        )
        if len(traced.flowing) < len(made):
            flowing = set(traced.flowing)
            ctx.mark_non_differentiable(*(t for i, t in enumerate(made) if i not in flowing))
        return tuple(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of `wanted`."""
        program: Program = ctx.program
        traced, saved = program.traced, ctx.saved_tensors
        count = len(traced.kept_inputs)
        inputs = program.arrays(saved[:count], [program.given[i] for i in traced.kept_inputs])
        computed = saved[count].untyped_storage().spmd_carried if ctx.is_carried else list(map(load, saved[count:]))
        return None, None, None, *program.backward([*inputs, *computed], [load(grads[i]) for i in traced.flowing], ctx.size)


def _carrying(arrays: list[Any]) -> torch.Tensor:
    tensor = wrap_unset((0,), _BYTE)
    tensor.untyped_storage().spmd_carried = arrays  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


__all__ = ["Node"]
