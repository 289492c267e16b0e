"""The Python attributes of tensors that a trace leaves: constants belong to the kind of the tensor, all others are made anew by every call.

    y.label, y.source, y.sizes = "query", x, [n]    # a string, the caller's tensor, and a new list with the number of the call

A tensor with constants only costs a call no more than one that it makes. If there is another attribute, all are parts of a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from spmd.program.find._static import attributes_of
from spmd.program.trace._object_parts import ObjectParts

_CONSTANTS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))  # exact types, no noted sizes


@dataclass(frozen=True)
class GradientOf:
    """The gradient that a call leaves on the tensor `leaf`."""

    leaf: torch.Tensor


def constants_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes of a tensor if all are constants; otherwise none."""
    attributes = attributes_of(tensor) or {}
    return dict(attributes) if _are_constant(attributes) else {}


def attribute_parts(tensor: torch.Tensor) -> ObjectParts | None:
    """The parts of a node that gives a tensor its attributes, the tensor first; None if all are constants."""
    attributes = attributes_of(tensor) or {}
    return None if _are_constant(attributes) else (_nothing, partial(_put, list(attributes)), [tensor, *attributes.values()])


def gradient_parts(leaf: torch.Tensor) -> ObjectParts | None:
    """The parts of a node that gives the gradient of `leaf` its attributes; None if it has none."""
    attributes = attributes_of(leaf.grad) or {}
    return (_nothing, partial(_put, list(attributes)), [GradientOf(leaf), *attributes.values()]) if attributes else None


def _are_constant(attributes: dict[str, Any]) -> bool:
    return all(type(value) in _CONSTANTS for value in attributes.values())


def _nothing() -> None:
    """What the node is before it is filled: nothing refers to it."""


def _put(names: list[str], made: None, parts: list[Any]) -> None:
    tensor, *values = parts
    vars(tensor).update(zip(names, values, strict=True))


__all__ = ["GradientOf", "attribute_parts", "constants_of", "gradient_parts"]
