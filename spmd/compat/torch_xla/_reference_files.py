"""`torch_xla.utils.serialization`: a file with references, and a folder next to it with one file per device tensor.

The format is torch_xla's: `path` contains the data with a `TensorReference` for each tensor, `path + ".tensors"` the tensors.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._torch import pytree
from spmd.compat.torch_xla import _xla_model as xm


class TensorReference:
    """A reference to the tensor in file number `tid`."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


# Files that torch_xla wrote refer to its class by name, which resolves to this one.
TensorReference.__module__ = "torch_xla.utils.serialization"


def save(data: Any, path: str, master_only: bool = True, global_master: bool = False) -> None:
    """Write `data`, with its device tensors as CPU tensors in separate files.

    Args:
        data: nested containers.
        path: path of the file. The folder is `path + ".tensors"`; it is emptied first.
        master_only: only the first process writes; otherwise every process needs its own `path`.
        global_master: the first process of the job, not of each host.
    """
    folder, is_writer = _folder(path), not master_only or xm.is_master_ordinal(local=not global_master)
    if is_writer:
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)
    count = 0

    def referenced(t: torch.Tensor) -> Any:
        nonlocal count
        if not xm.is_xla_tensor(t):
            return t
        if is_writer:
            torch.save(t.detach().cpu().as_subclass(torch.Tensor), _file(folder, count))
        count += 1
        return TensorReference(count - 1)

    references = pytree.tree_map_only(torch.Tensor, referenced, data)
    if is_writer:
        torch.save(references, path)
    xm.rendezvous("torch_xla.utils.serialization.save")


def load(path: str) -> Any:
    """Read the result of `save`, with its device tensors on the CPU. It is unpickled, so load only files that you trust."""
    read: Callable[[TensorReference], Any] = lambda reference: torch.load(_file(_folder(path), reference.tid))  # noqa: E731
    return pytree.tree_map_only(TensorReference, read, torch.load(path, weights_only=False))


def _folder(path: str) -> str:
    return path + ".tensors"


def _file(folder: str, number: int) -> str:
    return os.path.join(folder, f"tensor_{number}.pt")
