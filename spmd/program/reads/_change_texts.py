"""The text that says how a value differs from the one that a trace read."""

from __future__ import annotations

import re
import types
from typing import Any

import torch

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAMED = (types.FunctionType, type)  # their text is a name


def change_text(title: str, old: Any, new: Any, texts: tuple[str, str]) -> str:
    """The text for a value that is not the expected one.

    Args:
        title: the name of its place.
        old, new: the expected value, and the one that is there.
        texts: their texts. If these differ by addresses at most, they say nothing, and another object is named by its class.
    """
    before, now = texts
    if _ADDRESS.sub("", before) != _ADDRESS.sub("", now):
        return f"{title} changed from {before} to {now}"
    name = _class_name(new)
    if type(new) is not type(old):
        other = _class_name(old)
        return (
            f"{title} is of another class named {name}"
            if name == other
            else f"{title} is a {name} now, it was a {other} with the same text"
        )
    if isinstance(new, _NAMED):
        return f"{title} is another {name} of the same name, {new.__qualname__}"
    return f"{title} is another {name}" if _ADDRESS.search(now) else f"{title} is another {name} with the same text, {now}"


def _class_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "class" if isinstance(value, type) else type(value).__name__


__all__ = ["change_text"]
