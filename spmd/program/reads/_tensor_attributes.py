"""Attributes of tensors: those that torch gives to all tensors, and those of a class or an object of the user's."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

import torch

from spmd.base._errors import TraceError, called_at, message
from spmd.device._storage import is_device_tensor
from spmd.program.find._static import attributes_of
from spmd.program.reads._library import is_recorded

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead

_OF_ALL = frozenset(dir(torch.Tensor)) | {"__dict__", "jax", "is_jax"}  # the last two once the device is registered
_OF_ARGUMENTS = {  # questions that no program answers for the argument of a later call, with an equivalent question
    "is_inference": "torch.is_inference_mode_enabled(), or a flag among the arguments",
    "_base": "pass a flag that says whether it is a view",
    "_is_view": "pass a flag that says whether it is a view",
    "is_conj": "pass a flag, or x.resolve_conj()",
    "is_neg": "pass a flag, or x.resolve_neg()",
}
ASKING = frozenset(
    id(getattr(owner, name)) for owner in (torch, torch.Tensor) for name in _OF_ARGUMENTS if callable(getattr(owner, name, None))
)
"""Ids of the functions that ask these questions: `torch.is_conj(x)`."""
_REPLACED_BY_TRACES = frozenset({"shape", "nbytes", "size", "numel", "nelement", "stride", "storage_offset"})  # if sizes vary
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})  # tensors that torch makes anew in every read


def note_tensor_attribute(recording: PlacesRead, tensor: torch.Tensor, name: str) -> None:
    """Record the read of an attribute of a tensor: of a CPU tensor that shows its values, or one that torch does not give to all."""
    if (name == "_version" or name in _OF_ARGUMENTS) and is_device_tensor(tensor):
        _require_answer(recording, tensor, name)
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
    elif name not in _REPLACED_BY_TRACES:  # also of torch.Tensor, where a program may replace it
        recording._class_attribute(bases, name)
    elif bases[0] is not torch.Tensor:
        recording._class_attribute(bases[: bases.index(torch.Tensor)], name)


def _require_answer(recording: PlacesRead, tensor: torch.Tensor, name: str) -> None:
    """Refuse what a user's function asks of a tensor from before the trace and later calls would answer otherwise.

    Raises:
        TraceError: it is the count of writes, or a question about an argument.
    """
    if not _is_asked_by_user(sys._getframe(2)):
        return
    is_argument = any(tensor is one for one in recording._arguments)
    if name == "_version":
        if is_argument or any(tensor is value for place in recording.places.values() for value in place.values()):
            what = f"a compiled function reads ._version of a tensor of shape {tuple(tensor.shape)}, the count of its writes in place"
            why = "a call of a program writes it once, however often the function does"
            raise TraceError(message(what, *called_at(), why, fix="count the writes in an attribute: self.num_writes += 1"))
    elif is_argument:
        what = f"a compiled function reads .{name} of its argument, a tensor of shape {tuple(tensor.shape)}"
        why = "the program has the argument's values; later calls may pass another kind of tensor"
        raise TraceError(message(what, *called_at(), why, fix=_OF_ARGUMENTS[name]))


def _is_asked_by_user(frame: types.FrameType | None) -> bool:
    """Whether the innermost code that is recorded, from `frame` outwards, is not torch's."""
    while frame is not None and not is_recorded(_module_of(frame)):
        frame = frame.f_back
    return frame is not None and _module_of(frame).partition(".")[0] != "torch"


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


__all__ = ["ASKING", "note_tensor_attribute"]
