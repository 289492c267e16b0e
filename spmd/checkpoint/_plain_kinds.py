"""Compares plain values of a program with saved ones by kind: text does not replace a number, nor a tensor either of them.

An int and a float are both numbers, since a sum that begins as 0 becomes a float. `None` in the program's state takes any value.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from spmd.base._errors import shown
from spmd.checkpoint import _tree
from spmd.checkpoint._plan_entries import Ref, mismatch
from spmd.checkpoint._read import Reader

_KINDS: dict[type, str] = {  # a bool is an int too, and a Counter a dict, so these are first
    bool: "True or False",
    int: "a number",
    float: "a number",
    complex: "a complex number",
    str: "text",
    bytes: "bytes",
    bytearray: "bytes",
    torch.dtype: "a dtype",
    torch.device: "a device",
    list: "a list",
    tuple: "a tuple",
    set: "a set",
    frozenset: "a frozenset",
    Counter: "a Counter",
    dict: "a dict",
}
_FIX = "pass a state like the saved one; None in it takes any saved value"


def require_kind(target: Any, saved: Any, reader: Reader, path: str) -> None:
    """Refuse a saved value that is of another kind than the program's.

    Args:
        target: the program's value, no array.
        saved: the decoded node, with `Ref`s for arrays.
        reader: has the entries of these arrays.
        path: path of the two in the state.

    Raises:
        CheckpointError: the kinds differ, or a checkpoint cannot contain a value like `target`.
    """
    if target is None:
        return
    own = _kind_of(target)
    if own is None:
        what = f"the program has {shown(target)}, which a checkpoint cannot contain"
        raise mismatch(path, what, f"the checkpoint has {_described(saved, reader)}", fix=_FIX)
    if own != _saved_kind(saved, reader):
        raise mismatch(path, f"the program has {_of(own, target)}", f"the checkpoint has {_described(saved, reader)}", fix=_FIX)


def require_mapping(target: Any, saved: Any, reader: Reader, path: str) -> None:
    """Refuse a saved value that is no dict where the `state_dict()` of the program's object is one.

    Raises:
        CheckpointError: it is of another kind.
    """
    if not isinstance(saved, dict) and isinstance(target.state_dict(), dict):
        raise mismatch(path, f"the program has {shown(target)}", f"the checkpoint has {_described(saved, reader)}", fix=_FIX)


def _kind_of(value: object) -> str | None:
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), None)


def _saved_kind(saved: Any, reader: Reader) -> str | None:
    """The kind of a saved value. A scalar of numpy is of the kind of its elements."""
    if isinstance(saved, Ref):
        return _kind_of(np.zeros((), _tree.numpy_dtype(reader.entry(saved.number).dtype)).item()) if saved.kind == "scalar" else None
    return _kind_of(saved.item() if isinstance(saved, np.generic) else saved)


def _described(saved: Any, reader: Reader) -> str:
    if isinstance(saved, Ref):
        entry = reader.entry(saved.number)
        if saved.kind == "scalar":
            return f"a scalar of dtype {entry.dtype}"
        return f"{'a tensor' if saved.kind in ('device', 'torch') else 'an array'} of shape {entry.shape}"
    return _of(_kind_of(saved) or shown(saved), saved)


def _of(kind: str, value: object) -> str:
    """The kind, and a short value: "the number 3", "the text 'a'", "a list"."""
    if kind == "True or False":
        return repr(value)
    return f"the {kind.removeprefix('a ')} {value!r:.40}" if kind in ("a number", "text") else kind


__all__ = ["require_kind", "require_mapping"]
