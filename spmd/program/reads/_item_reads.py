"""What `holder[key]` reads of a container: an entry, an item, the items of a slice, or the whole content."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from spmd.program.reads._hooks import QUIET
from spmd.program.reads._library import is_recorded
from spmd.program.reads._places_read import is_simple

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


def read_item(recording: Recording, holder: Any, key: Any) -> None:
    """Record what `holder[key]` reads."""
    cls = type(holder)
    if cls in QUIET or isinstance(holder, torch.Tensor):
        recording.operate(holder, key)
        return
    if recording._is_ignored(holder):
        return
    if isinstance(holder, dict) and is_simple(key):
        if cls.__getitem__ is dict.__getitem__ or not is_recorded(cls.__module__):
            recording._entry(holder, key, holder, "[")
            recording._note_missing(holder, key)
    elif isinstance(holder, (list, collections.deque)) and type(key) in (int, bool):
        if cls.__getitem__ in (list.__getitem__, collections.deque.__getitem__):
            _read_indices(recording, holder, [key])
    elif type(key) is slice and isinstance(holder, list) and (indices := _indices(key, holder)) is not None:
        _read_indices(recording, holder, indices)
    elif isinstance(holder, types.MappingProxyType):
        read_item(recording, recording._proxied_dict(holder), key)
    else:
        recording.read_content(holder)
        recording._note_missing(holder, key)


def _indices(key: slice, holder: list[Any]) -> range | None:
    """The indices that a slice of a list reads, if it reads these of every list that has them; else None."""
    start, stop, length = key.start, key.stop, len(holder)
    is_plain = key.step is None and all(end is None or type(end) is int for end in (start, stop))
    if not is_plain or type(holder).__getitem__ is not list.__getitem__:
        return None
    if start is not None and start < 0 and (stop is None or stop < 0):
        return range(start, 0 if stop is None else stop) if -start <= length else None
    if stop is not None and 0 <= stop <= length and (start is None or start >= 0):
        return range(start or 0, stop)
    return None


def _read_indices(recording: Recording, holder: Any, indices: Iterable[int]) -> None:
    content = holder
    if recording.journal.is_written(holder):
        content = recording._content_before(holder, lambda: holder)
        num_added = len(holder) - len(content)
        if num_added < 0 or any(a is not b for a, b in zip(content, holder, strict=False)):
            recording._whole_list(holder)
            return
        indices = [i if i >= 0 else i + num_added for i in indices if not -num_added <= i < 0]  # the trace has added the others
    for index in indices:
        _read_index(recording, holder, content, index)


def _read_index(recording: Recording, holder: Any, content: Any, index: int) -> None:
    """Record what `holder[index]` reads; `content` is what the list held before the trace."""
    place, length = recording._list(holder), len(content)
    if place.whole is not None:
        return
    # items[-1] may be items[0], also where an earlier trace made it an input under that name: that depends on the length
    other_name = index - length if index >= 0 else index + length
    has_both = any((index < 0) != (other < 0) for other in place.items) or recording.has_input(holder, other_name)
    if has_both or not -length <= index < length:
        recording._whole_list(holder)
    elif index not in place.items:
        value = place.items[index] = content[index]
        recording._note_value(value, f"{recording._title(holder)}[{index}]")


__all__ = ["read_item"]
