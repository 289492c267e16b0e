"""Exceptions and the one warning of `mesh`, and the form their messages take.

    ValueError
     +-- MeshError               a mesh, spec or device request makes no sense
          +-- SpecError          a PartitionSpec does not fit its mesh or its tensor
               +-- RulesError    rules for a model leave something that is probably not meant
          +-- DeviceError        too few devices, or asked for too late (also a RuntimeError)
    RuntimeError
     +-- JobError                the processes of a job do not come together, or do not agree
    UserWarning
     +-- AcceleratorIdle         virtual devices were asked for beside a real accelerator

A message says first what is wrong, then shows the values on both sides, then the shortest fix:

    >>> print(message("the mesh has no axis 'modle'", ["axes: data, model"], "write 'model'"))
    the mesh has no axis 'modle'
      axes: data, model
      fix: write 'model'

Knows nothing of meshes, jax or tensors.
"""

from collections.abc import Iterable


class MeshError(ValueError):
    """A mesh, a spec or a device request makes no sense; base of the errors about meshes."""


class SpecError(MeshError):
    """A PartitionSpec is malformed, or does not fit its mesh or its tensor."""


class RulesError(SpecError):
    """Rules for a model, applied strictly, leave something that is probably not meant."""


class DeviceError(MeshError, RuntimeError):
    """The devices asked for do not exist, or were asked for too late."""


class JobError(RuntimeError):
    """The processes of a job do not come together, do not agree, or one of them is gone."""


class AcceleratorIdle(UserWarning):
    """Virtual CPU devices were asked for on a machine that seems to have an accelerator."""


def message(what: str, details: Iterable[str], fix: str) -> str:
    """Text of an error in the project's form.

    Args:
        what: what is wrong, in the user's words, with the thing's own name.
        details: the values on both sides, one line each.
        fix: the shortest change that helps, as code where possible.

    Returns:
        One line for `what`, then indented lines: the details and `fix: ...`.
    """
    return "\n  ".join([what, *details, f"fix: {fix}"])
