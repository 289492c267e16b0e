"""`save_safetensors`: a module's weights as Hugging Face keeps them, written by all processes, gathered by none.

Names, shapes and dtypes decide where each tensor's bytes lie, so every process writes its own shards into files of the right
size, and process 0 names the finished folder. It needs a file system on which several hosts may write to one file (Lustre,
GPFS, a local disk); over NFS, save on one host.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _files
from spmd.checkpoint._boxes import Box
from spmd.checkpoint._collect import Leaf, array_of
from spmd.checkpoint._coordination import Gang, current_gang
from spmd.checkpoint._safetensors import NAMES, runs
from spmd.checkpoint._tree import dtype_name
from spmd.device._storage import buffer_of

_ALIGNMENT = 64  # of the first tensor's bytes; headers are padded with blanks


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes begin."""

    file: str
    offset: int


def save_safetensors(
    folder: str | os.PathLike[str], module: torch.nn.Module, *, max_file_bytes: int = 5 * 10**9, gang: Gang | None = None
) -> list[str]:
    """Write a module's parameters and buffers as `model.safetensors`, or as several files and an index.

    Args:
        folder: a new folder that all processes see; it appears when everything is written.
        module: tied weights are written under their first name.
        max_file_bytes: the size limit of a file, unless it contains a single tensor.
        gang: the processes of the job; by default those that jax knows.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the folder exists, a tensor's dtype is not supported by the format, or writing failed.
    """
    final = Path(os.path.abspath(folder))
    gang = current_gang() if gang is None else gang
    leaves = _leaves(module)
    files = _divided(leaves, max_file_bytes)
    writing = final.with_name(_files.WRITING + final.name)
    try:
        _together(gang, "opened", lambda: _open(final, writing, files) if gang.index == 0 else None)
        places = {leaf.name: place for name, group in files.items() for leaf, place in _layout(name, group)}
        _together(gang, "written", lambda: _write(writing, leaves, places, gang))
        _together(gang, "named", lambda: _files.commit(writing, final) if gang.index == 0 else None)
    except CheckpointError:
        if gang.index == 0 and writing.exists():
            _files.remove(writing)
        raise
    return [*files]


def _leaves(module: torch.nn.Module) -> list[Leaf]:
    found: list[Leaf] = []
    seen: set[Any] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue
        key = (id(buffer_of(value)) if value.device.type == "jax" else value.untyped_storage().data_ptr() or id(value), tuple(value.shape))
        if key in seen and value.numel():
            continue
        seen.add(key)
        array = array_of(value)
        if dtype_name(array.dtype) not in NAMES:
            raise CheckpointError(message(f"{name!r} of {value.dtype} has no safetensors dtype", fix="convert it first"))
        found.append(Leaf(name, array, None, tuple(value.shape)))
    return found


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.value.dtype.itemsize


def _divided(leaves: list[Leaf], max_file_bytes: int) -> dict[str, list[Leaf]]:
    """The tensors by file, in order."""
    groups: list[list[Leaf]] = [[]]
    for leaf in leaves:
        if groups[-1] and sum(map(_nbytes, groups[-1])) + _nbytes(leaf) > max_file_bytes:
            groups.append([])
        groups[-1].append(leaf)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _header(group: list[Leaf]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for leaf in group:
        end = at + _nbytes(leaf)
        entries[leaf.name] = {"dtype": NAMES[dtype_name(leaf.value.dtype)], "shape": list(leaf.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _layout(name: str, group: list[Leaf]) -> list[tuple[Leaf, _Place]]:
    at = len(_header(group))
    found: list[tuple[Leaf, _Place]] = []
    for leaf in group:
        found.append((leaf, _Place(name, at)))
        at += _nbytes(leaf)
    return found


def _open(final: Path, writing: Path, files: dict[str, list[Leaf]]) -> None:
    """Files of their full size with their headers, and the index."""
    if final.exists() or final.is_symlink():
        raise CheckpointError(message(f"{final} exists", "nothing is overwritten", fix="choose another folder, or move it away"))
    _files.make_folder(writing)
    for name, group in files.items():
        _files.write_small(writing / name, _header(group))
        os.truncate(writing / name, len(_header(group)) + sum(map(_nbytes, group)))
    if len(files) > 1:
        total = sum(_nbytes(leaf) for group in files.values() for leaf in group)
        where = {leaf.name: name for name, group in files.items() for leaf in group}
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        _files.write_small(writing / "model.safetensors.index.json", index.encode())


def _write(writing: Path, leaves: list[Leaf], places: dict[str, _Place], gang: Gang) -> None:
    """This process's shards into their places."""
    descriptors: dict[str, int] = {}
    try:
        for leaf in leaves:
            place = places[leaf.name]
            for box, data in leaf.shards(gang.index, gang.size):
                if place.file not in descriptors:
                    descriptors[place.file] = os.open(writing / place.file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                _write_box(descriptors[place.file], place.offset, leaf, box, np.ascontiguousarray(np.asarray(data)))
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _write_box(descriptor: int, offset: int, leaf: Leaf, box: Box, data: np.ndarray[Any, Any]) -> None:
    octets = data.reshape(-1).view(np.uint8).data
    at = 0
    for start, nbytes in runs(leaf.shape, box, data.dtype.itemsize):
        part, to = octets[at : at + nbytes], offset + start
        at += nbytes
        while part:
            count = os.pwrite(descriptor, part, to)
            part, to = part[count:], to + count


def _together(gang: Gang, name: str, action: Any) -> None:
    """Do it on every process; the first error is everybody's."""
    problem = ""
    try:
        action()
    except (CheckpointError, OSError) as error:
        problem = str(error if isinstance(error, CheckpointError) else _files.failed("the safetensors cannot be written", error))
    for number, text in enumerate(gang.exchange(name, problem)):
        if text:
            raise CheckpointError((f"process {number}: " if gang.size > 1 else "") + text)


__all__ = ["save_safetensors"]
