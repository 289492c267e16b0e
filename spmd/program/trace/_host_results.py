"""CPU tensors that a trace made and leaves: every call makes them anew, on memory of its own.

    return torch.tensor([1.0, n]), torch.arange(3)[1:]      # in every call two new tensors, the second one a view

What decides their values is guarded, so they have the values of the trace in every call of its program. Tensors that share memory in the
trace do so in a call. A tensor with the memory of a tensor or array from before the trace has that memory in every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spmd.base._errors import TraceError, message
from spmd.base._torch import DisableTorchFunctionSubclass, hooks_of_leaf
from spmd.device._random_stream import default_stream
from spmd.program.trace._array_parts import bytes_of, has_memory, shares_memory
from spmd.program.trace._window import PLAIN_KIND, Kind, Window


@dataclass(frozen=True)
class HostMemory:
    """A storage on the host that results show.

    Attributes:
        number: its number among those of the results.
        window: what the tensor shows of it that the others are views of.
        values: its bytes in the trace; None if it is from before the trace.
        owner: a tensor on it, if it is from before the trace.
    """

    number: int
    window: Window
    values: np.ndarray[Any, Any] | None
    owner: torch.Tensor | None

    def made(self) -> torch.Tensor:
        """The tensor of a call that the others are views of."""
        if self.values is None:
            assert self.owner is not None
            return self.owner
        size, stride, offset, dtype, is_conj, is_neg, kind = self.window
        with torch.inference_mode(torch.is_inference_mode_enabled() is not kind.is_of_other_mode), torch.no_grad():
            made = torch.empty(0, dtype=dtype).set_(torch.tensor(self.values).untyped_storage(), offset, size, stride)  # pyright: ignore[reportArgumentType]
            made = torch.ops.aten._neg_view(made) if is_neg else made
            return torch.ops.aten._conj(made) if is_conj else made

    def is_like(self, other: HostMemory) -> bool:
        """Whether this is the same memory from before the trace, or memory of a trace with the same values."""
        if self.values is None or other.values is None:
            return self.values is other.values and self.owner is other.owner
        return (self.number, self.window) == (other.number, other.window) and np.array_equal(self.values, other.values)


@dataclass(frozen=True, eq=False)
class HostTensor:
    """A CPU tensor that the trace made.

    Attributes:
        memory: its storage.
        window: what it shows of it.
        is_root: it is the tensor of the trace that the others are views of.
        is_view: torch says so; a `detach()` of a tensor is not one.
    """

    memory: HostMemory
    window: Window
    is_root: bool
    is_view: bool

    def made(self, roots: dict[int, torch.Tensor]) -> torch.Tensor:
        """The tensor of a call.

        Args:
            roots: by number of a memory, the tensor of the call that the others are views of.
        """
        root = roots.get(self.memory.number)
        if root is None:
            root = roots[self.memory.number] = self.memory.made()
        if self.is_root:
            return self.window.kind.made_of(root)
        with torch.no_grad():
            shown = self.window._replace(kind=PLAIN_KIND).shown(
                root if type(root) is torch.Tensor and not root.requires_grad else _plain(root)
            )
            return self.window.kind.made_of(shown if self.is_view else shown.detach())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostTensor):
            return False
        return (self.window, self.is_root, self.is_view) == (other.window, other.is_root, other.is_view) and self.memory.is_like(
            other.memory
        )

    __hash__ = object.__hash__


class HostResults:
    """The CPU tensors among the results of a trace."""

    def __init__(self, results: Iterable[Any], before: Iterable[Any]) -> None:
        """
        Args:
            results: the results.
            before: the objects from before the trace whose content it read.
        """
        self._before = list(before)
        self._results = [value for value in results if has_memory(value)]
        self._memories: dict[int, tuple[HostMemory, torch.Tensor]] = {}  # by id of a storage, with the tensor of the trace

    def taken(self, value: torch.Tensor) -> HostTensor:
        """The description of a CPU tensor that the trace made.

        Raises:
            TraceError: no call can make it anew.
        """
        _require_made_anew(value)
        key = id(value.untyped_storage())
        if key not in self._memories:
            self._memories[key] = self._memory(value)
        memory, root = self._memories[key]
        return HostTensor(memory, _window(value), value is root and memory.values is not None, value._base is not None)

    def _memory(self, value: torch.Tensor) -> tuple[HostMemory, torch.Tensor]:
        number, values = len(self._memories), bytes_of(value).numpy()
        if (owner := self._owner(value, values)) is not None:
            return HostMemory(number, _window(owner), None, owner), owner
        same = (t for t in self._results if t.untyped_storage() is value.untyped_storage() and t._base is None)
        root = next(same, value if value._base is None else value._base)
        return HostMemory(number, _window(root), values.copy(), None), root

    def _owner(self, value: torch.Tensor, values: np.ndarray[Any, Any]) -> torch.Tensor | None:
        """A tensor with the memory of an object from before the trace, if `value` has it too."""
        for other in self._before:
            if has_memory(other) and other.untyped_storage() is value.untyped_storage():
                return other
            if shares_memory(other, values):
                return _plain(value)
        return None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.detach().as_subclass(torch.Tensor)


def _window(tensor: torch.Tensor) -> Window:
    return Window.with_kind(_plain(tensor), Kind.of(tensor))


def _require_made_anew(value: torch.Tensor) -> None:
    if value.is_nested:
        raise _refused("a nested tensor on the CPU", "return torch.nested.to_padded_tensor(x, 0.0)")
    shape = f", of shape {tuple(value.shape)}"
    if value.device.type != "cpu":
        raise _refused(f"a tensor on {value.device}{shape}", "create it on device 'jax' or 'cpu'")
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
        raise _refused(f"a {kind} tensor on the CPU{shape}", f"return x.{'dequantize' if value.is_quantized else 'to_dense'}()")
    if not has_memory(value):
        raise _refused(f"a {type(value).__name__} on the CPU{shape}", "return the plain tensors that it holds")
    if value.is_shared():
        raise _refused(f"a CPU tensor in shared memory{shape}", "return it as it was, and call share_memory_() there")
    if value.is_leaf and (value.grad is not None or any(hooks_of_leaf(value))):
        what = "a gradient" if value.grad is not None else "hooks"
        raise _refused(f"a CPU tensor with {what}{shape}", "return x.detach(), or create it on device 'jax'")
    if _is_random_state(value):
        raise _refused("a random state", "read it outside of the function; one for the backward pass belongs on `ctx`, not on a module")


def _is_random_state(value: torch.Tensor) -> bool:
    """Whether it has the form of a state of the random generator of the host, or is one of the device's stream."""
    if value.dtype != torch.uint8 or value.dim() != 1:
        return False
    own = default_stream.get_state()
    return value.numel() == torch.get_rng_state().numel() or (value.numel() == own.numel() and torch.equal(value[:8], own[:8]))


def _refused(what: str, fix: str) -> TraceError:
    why = "a call can make only dense CPU tensors with the values of the trace"
    return TraceError(message(f"the compiled function returns {what}, or leaves it on an object", why, fix=fix))


__all__ = ["HostMemory", "HostResults", "HostTensor"]
