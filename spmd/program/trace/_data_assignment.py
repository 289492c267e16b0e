"""`p.data = new` in a traced function: every call updates the tensor's memory, as `p.copy_(new)` does.

PyTorch gives the tensor other memory and leaves the old memory unchanged. The difference is visible only if another tensor shares the old
or the new memory. In that case the function is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from spmd.base._errors import TraceError, message
from spmd.base._torch import storage_use_count
from spmd.device._storage import Buffer, buffer_of, load, store
from spmd.program.reuse._columns import Guards
from spmd.program.trace._window import leaves_whole


class DataAssignments:
    """Context that restores the memory of the given tensors after a trace.

    Attributes:
        replaced: (name, tensor) for each tensor whose `.data` the function replaced.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._kept = [(name, t, _memory_of(t), num_sharing(t)) for name, t in named]
        self._old: dict[int, torch.Tensor] = {}
        self.replaced: list[tuple[str, torch.Tensor]] = []

    def __enter__(self) -> DataAssignments:
        with torch.no_grad():
            self._old = {id(t): t.data for _, t, _, _ in self._kept}
        return self

    def __exit__(self, *error: object) -> None:
        for _, t, memory, _ in self._kept:
            if _memory_of(t) != memory:
                t.data = self._old[id(t)]
        self._old = {}

    def write_back(self) -> None:
        """At the end of the function, give each tensor its old memory with its new values.

        Raises:
            TraceError: a tensor got another shape or dtype, or shares memory with another one, so an in-place update would differ.
        """
        changed = [(name, t, count) for name, t, memory, count in self._kept if _memory_of(t) != memory]
        groups: dict[Buffer, list[torch.Tensor]] = {}
        for name, t, count in changed:
            old = self._old[id(t)]
            if (t.shape, t.dtype) != (old.shape, old.dtype):
                why = f"it was {old.dtype} of shape {tuple(old.shape)}, and becomes {t.dtype} of shape {tuple(t.shape)}"
                raise _reshaped(name, why) if buffer_of(t) is buffer_of(old) else _refused(name, why)
            if count > 1:
                raise _refused(name, "another tensor shares its old memory")
            groups.setdefault(buffer_of(t), []).append(t)
        unchanged = {buffer_of(t) for _, t, memory, _ in self._kept if _memory_of(t) == memory}
        for name, t, _ in changed:
            buffer = buffer_of(t)
            if buffer in unchanged or (len(groups[buffer]) > 1 and leaves_whole(groups[buffer], buffer)):
                raise _refused(name, "another tensor shares its new memory")
        values = [load(t) for _, t, _ in changed]
        for (name, t, _), value in zip(changed, values, strict=True):
            t.data = self._old[id(t)]
            store(t, value)
            self.replaced.append((name, t))

    def guard(self, guards: Guards) -> None:
        """Guard that no other tensor shares the memory of the replaced tensors."""
        replaced = self.replaced

        def check() -> str | None:
            for name, t in replaced:
                if num_sharing(t) > 1:
                    return f"another tensor shares the memory of {name}, whose .data the function replaces"
            return None

        if replaced:
            guards.add(check)


def _memory_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor, and its view of it: equal as long as the tensor has the same memory."""
    return id(buffer_of(tensor)), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def num_sharing(tensor: torch.Tensor) -> int:
    """The number of tensors on the storage of `tensor`, including itself."""
    storage = tensor.untyped_storage()  # counts as one more user; torch returns the same Python object each time
    return storage_use_count(storage._cdata) - 1


def _reshaped(name: str, why: str) -> TraceError:
    what = f"the compiled function changes the shape of {name} in place, by unsqueeze_, squeeze_, transpose_, t_, resize_ or .data"
    return TraceError(message(what, why, fix="use a view of it instead: x = x.unsqueeze(0), or change the shape before the call"))


def _refused(name: str, why: str) -> TraceError:
    what = f"the compiled function sets {name}.data to another tensor"
    return TraceError(message(what, why, fix=f"update it in place: {name}.data.copy_(new)"))
