"""`save_safetensors`: writes a module's weights in Hugging Face's format. Every process writes its shards; none gathers a tensor.

Names, shapes and dtypes determine the offset of each tensor, so every process writes its own shards into files of the final
size. Process 0 renames the folder when it is complete. Several hosts write to one file, which needs a suitable file system
(Lustre, GPFS, a local disk). On NFS, save on one host.
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

from spmd.base._errors import CheckpointError, called_at, message, shown
from spmd.checkpoint import _files
from spmd.checkpoint._boxes import Box
from spmd.checkpoint._collect import Leaf, array_of
from spmd.checkpoint._coordination import Gang, current_gang
from spmd.checkpoint._safetensors import NAMES, runs
from spmd.checkpoint._tree import dtype_name
from spmd.device._storage import buffer_of

_ALIGNMENT = 64  # of the first tensor's offset; headers are padded with spaces


@dataclass(frozen=True)
class _Place:
    """The file of a tensor, and the offset of its first byte there."""

    file: str
    offset: int


def save_safetensors(
    folder: str | os.PathLike[str], module: torch.nn.Module, *, max_file_bytes: int = 5 * 10**9, gang: Gang | None = None
) -> list[str]:
    """Write a module's parameters and buffers as `model.safetensors`, or as several files and an index.

    Args:
        folder: a new folder on a file system of all processes. It appears under this name when everything is written.
        module: the module to save. Tied weights are written once, under their first name.
        max_file_bytes: maximum bytes of tensors in a file. A larger tensor gets a file of its own.
        gang: the processes of the job; by default all processes of `jax.distributed`.

    Returns:
        The names of the tensor files.

    Raises:
        CheckpointError: `module` is none, the folder exists, the format does not support the dtype of a tensor, or writing failed.
    """
    given: Any = module
    if not isinstance(given, torch.nn.Module):
        what = f"save_safetensors takes a module, got {shown(given)}"
        raise CheckpointError(message(what, *called_at(), fix="save_safetensors(folder, model)"))
    final = Path(os.path.abspath(_files.folder_of(folder, "save_safetensors", "save_safetensors(folder, model)")))
    gang = current_gang() if gang is None else gang
    leaves = _leaves(module)
    files = _divided(leaves, max_file_bytes)
    writing = final.with_name(_files.WRITING + final.name)
    try:
        _on_all_processes(gang, "opened", lambda: _open(final, writing, files) if gang.index == 0 else None)
        places = {leaf.name: place for name, group in files.items() for leaf, place in _layout(name, group)}
        _on_all_processes(gang, "written", lambda: _write(writing, leaves, places, gang))
        _on_all_processes(gang, "named", lambda: _files.commit(writing, final) if gang.index == 0 else None)
    except CheckpointError:
        if gang.index == 0 and writing.exists():
            _files.remove(writing)
        raise
    return [*files]


def _leaves(module: torch.nn.Module) -> list[Leaf]:
    """The tensors of a module's `state_dict()`, each tied one once."""
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
            raise CheckpointError(
                message(f"{name!r} cannot be saved: safetensors does not support {value.dtype}", fix="convert it to another dtype first")
            )
        found.append(Leaf(name, array, None, tuple(value.shape)))
    return found


def _nbytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.value.dtype.itemsize


def _divided(leaves: list[Leaf], max_file_bytes: int) -> dict[str, list[Leaf]]:
    """Distribute the tensors over files, in order."""
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
    """Create the files with their headers and their full size, and the index."""
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
    """Write this process's shards."""
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


def _on_all_processes(gang: Gang, name: str, action: Any) -> None:
    """Run `action` on every process and wait for all of them; raise the first error on every process."""
    problem = ""
    try:
        action()
    except (CheckpointError, OSError) as error:
        problem = str(error if isinstance(error, CheckpointError) else _files.failed("the safetensors cannot be written", error))
    for number, text in enumerate(gang.exchange(name, problem)):
        if text:
            raise CheckpointError((f"process {number}: " if gang.size > 1 else "") + text)


__all__ = ["save_safetensors"]
