"""Attributes of tensors: those that torch gives to all tensors, and those of a class or an object of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from spmd.program.find._static import attributes_of

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead

_OF_ALL = frozenset(dir(torch.Tensor)) | {"__dict__", "jax", "is_jax"}  # the last two once the device is registered
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})  # tensors that torch makes anew in every read


def note_tensor_attribute(recording: PlacesRead, tensor: torch.Tensor, name: str) -> None:
    """Record the read of an attribute of a tensor: of a CPU tensor that shows its values, or one that torch does not give to all."""
    if tensor.device.type == "cpu" and name in _VIEWS:
        recording._host_tensor(tensor)
    elif tensor.device.type == "cpu" and name == "grad":
        recording.read_c_attribute(tensor, name)
    elif name == "__dict__":
        recording.attributes(tensor)  # notes whose it is
    bases = type(tensor).__mro__
    if name not in _OF_ALL or name in (attributes_of(tensor) or ()):
        recording._class_attribute(bases, name)
        attributes = recording.attributes(tensor)
        if attributes is not None:
            recording._entry(attributes, name, "a tensor's", " ")
    elif bases[0] is not torch.Tensor:
        recording._class_attribute(bases[: bases.index(torch.Tensor)], name)


__all__ = ["note_tensor_attribute"]
