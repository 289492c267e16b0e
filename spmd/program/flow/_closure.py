"""Tensors with a gradient that a branch or a loop body captures.

`torch.cond(pred, f, g, operands)` is differentiable with respect to its operands and the tensors that `f` and `g` close over, such as
a module's parameters or an activation. The first trace of the body finds them. The backward pass replaces them by new leaves, so that
autograd stops there instead of continuing into the outer graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmd.base._errors import TraceError, message
from spmd.base._torch import DisableTorchFunction, DispatchKey, HigherOrderOperator, pytree
from spmd.device._storage import Buffer, buffer_of, is_device_tensor


def graph_mark() -> int:
    """A sequence number: autograd nodes created so far have smaller ones, later nodes do not."""
    with torch.enable_grad():
        node: Any = (torch.zeros((), requires_grad=True) * 1).grad_fn
    return node._sequence_nr()


class _Mode(TorchFunctionMode):
    """A mode that stays active in the bodies of nested control flow."""

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(fn, HigherOrderOperator):
            return fn(*args, **kwargs)
        with self:
            return fn.py_kernels[DispatchKey.AutogradPrivateUse1](*args, **kwargs)


class Closure(_Mode):
    """Mode that records the tensors with a gradient that a function uses but did not create.

    Args:
        is_newborn: whether a buffer was created inside the function.

    Attributes:
        tensors: the recorded tensors, by id.
    """

    def __init__(self, is_newborn: Callable[[Buffer], bool]) -> None:
        super().__init__()
        self._mark = graph_mark()
        self._is_newborn = is_newborn
        self.tensors: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if is_device_tensor(value) and self._is_outer(value):
                self.tensors[id(value)] = value
        return self.call(func, args, kwargs or {})

    def _is_outer(self, tensor: torch.Tensor) -> bool:
        with DisableTorchFunction():
            if not tensor.requires_grad or self._is_newborn(buffer_of(tensor)):
                return False
            node: Any = tensor.grad_fn
            return node is None or node._sequence_nr() < self._mark


class Substituted(_Mode):
    """Mode that replaces tensors among the arguments of torch functions.

    Args:
        pairs: (tensor, its replacement).
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._instead = {id(old): (old, new) for old, new in pairs}  # keeps the old one alive, so that its id is not reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = self._instead
        args, kwargs = pytree.tree_map(lambda v: instead[id(v)][1] if id(v) in instead else v, (args, kwargs or {}))
        return self.call(func, args, kwargs)


def gradients(
    fn: Callable[..., Any],
    operands: Sequence[Any],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    wanted: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Gradients of `fn(*operands)` with respect to `wanted`; zeros for a tensor that the results do not depend on.

    Args:
        pairs: closure tensors, each with the leaf that replaces it.
        cotangents: one per leaf of the result; None if no gradient flows.

    Raises:
        TraceError: the function's graph reaches a tensor that its first trace did not record.
    """
    mark = graph_mark()
    with torch.enable_grad(), Substituted(pairs):
        outputs = pytree.tree_leaves(fn(*operands))
    flowing = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and is_device_tensor(o) and o.requires_grad]
    if not flowing or not wanted:
        return [torch.zeros_like(t) for t in wanted]
    _require_closed([o for o, _ in flowing], {id(t) for t in wanted}, mark)
    found: Sequence[Any] = torch.autograd.grad([o for o, _ in flowing], list(wanted), [c for _, c in flowing], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]  # pyright: ignore[reportUnnecessaryComparison]


def _require_closed(outputs: Sequence[torch.Tensor], wanted: set[int], mark: int) -> None:
    """Raise TraceError if the graph of `outputs` reaches other leaves than `wanted`, or nodes older than `mark`."""
    nodes: list[Any] = [o.grad_fn for o in outputs]
    waiting = [node for node in nodes if node is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if (leaf is not None and id(leaf) not in wanted) or (leaf is None and node._sequence_nr() < mark):
            shape = list(leaf.shape) if leaf is not None else "unknown"
            raise TraceError(
                message(
                    "a branch or loop body in a compiled function captures a tensor in a way that torch does not report",
                    f"shape {shape}, handed to {'a custom autograd.Function' if leaf is not None else node.name()}",
                    fix="pass the tensor as an operand",
                )
            )
        waiting.extend(following for following, _ in node.next_functions if following is not None)


__all__ = ["Closure", "Substituted", "gradients", "graph_mark"]
