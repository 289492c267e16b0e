"""`load_safetensors`: fills a module with weights in Hugging Face's format. Each process reads only the bytes of its shards.

model = GPT().to("jax")                       # call mark_sharding first: then no device and no host stores the whole model
spmd.checkpoint.load_safetensors("models/gpt2", model, dtype=torch.bfloat16)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd.base._convert import host_tensor, to_numpy_dtype
from spmd.base._errors import CheckpointError, message
from spmd.checkpoint._boxes import Box, whole
from spmd.checkpoint._placement import assembled, boxes_on
from spmd.checkpoint._plan_entries import first_names, layout_of, mismatch
from spmd.checkpoint._safetensors import Entry, SafetensorsFile, files_of
from spmd.device._storage import buffer_of, is_whole


@dataclass(frozen=True)
class Loaded:
    """The result of `load_safetensors`.

    Attributes:
        bytes_read: bytes of tensors that this process read.
        unused: names that only the files have. Always empty with `strict=True`.
        missing: names that only the module has. Always empty with `strict=True`.
    """

    bytes_read: int
    unused: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass
class _Source:
    """The tensors in all files of a model.

    Attributes:
        names: a tensor's file and its name there, by its name in the module.
    """

    names: dict[str, tuple[SafetensorsFile, str]] = field(default_factory=dict[str, tuple[SafetensorsFile, str]])

    def entry(self, name: str) -> Entry:
        file, theirs = self.names[name]
        return file.entries[theirs]

    def read(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        file, theirs = self.names[name]
        return file.read(theirs, box)


def load_safetensors(
    path: str | os.PathLike[str],
    module: torch.nn.Module,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> Loaded:
    """Fill a module's parameters and buffers from safetensors files.

    Args:
        path: a file, an index (`*.safetensors.index.json`), or a folder that contains one of either.
        module: its tensors are filled in place and keep their shardings. Of tied weights the files need only one name.
        dtype: the new dtype of the module's floating-point tensors; values are converted to it. None: the files' dtypes
            must equal the module's.
        strict: raise an error for names that only one side has.
        rename: maps a name in the files to the module's name.

    Raises:
        CheckpointError: a file is invalid or missing, or a name, shape or dtype does not match. The module is unchanged, except
            that tensors read before a later read error stay filled.
    """
    with ExitStack() as stack:
        files: list[SafetensorsFile] = []
        source = _opened(Path(path), rename or str, stack, files)
        targets = module.state_dict(keep_vars=True)
        names, missing, unused = _matched(targets, source)
        if strict and (missing or unused):
            details = [f"not in the files: {first_names(missing)}"] if missing else []
            details += [f"not in the module: {first_names(unused)}"] if unused else []
            raise mismatch(type(module).__name__, *details, fix="pass rename= for other names, or strict=False")
        for name in names:
            _require_fit(name, targets[name], source.entry(name), dtype)
        groups = _tied(names, targets)
        for group in groups.values():
            _require_equal(group, source)
        origins = {name: groups[_key(value)][0] for name, value in targets.items() if _is_filled(value, groups)}
        if dtype is not None:
            module.to(dtype)
            targets = module.state_dict(keep_vars=True)
        filled: set[Any] = set()
        for name, origin in origins.items():  # all names: `module.to` makes two tensors of a tied buffer
            if _key(targets[name]) not in filled:
                filled.add(_key(targets[name]))
                _fill(targets[name], source, origin)
        return Loaded(sum(file.bytes_read for file in files), tuple(unused), tuple(missing))


def _opened(path: Path, rename: Callable[[str], str], stack: ExitStack, files: list[SafetensorsFile]) -> _Source:
    """Open all files. With an index, a tensor is read only from the file that the index lists."""
    found = files_of(path)
    opened: dict[Path, SafetensorsFile] = {}
    for file in dict.fromkeys(found.values() if isinstance(found, Mapping) else found):
        opened[file] = SafetensorsFile(file)
        stack.callback(opened[file].close)
    files.extend(opened.values())
    listed = found if isinstance(found, Mapping) else {name: file for file, one in opened.items() for name in one.entries}
    source = _Source()
    for name, file in listed.items():
        if name not in opened[file].entries:
            raise CheckpointError(
                message(f"{file} has no tensor {name[:80]!r}", "the index lists it there", fix="download it or write it again")
            )
        ours = rename(name)
        if ours in source.names:
            raise CheckpointError(
                message(f"two tensors of the files map to {ours[:80]!r} in the module", fix="make rename= return distinct names")
            )
        source.names[ours] = opened[file], name
    return source


def _matched(targets: Mapping[str, Any], source: _Source) -> tuple[list[str], list[str], list[str]]:
    """Compare names.

    Returns:
        The names that module and files both have; the names in the module none of whose tied names is in the files; the names that
        only the files have.
    """
    names = [name for name, value in targets.items() if name in source.names and isinstance(value, torch.Tensor)]
    filled = {_key(targets[name]) for name in names}
    missing = [name for name, value in targets.items() if isinstance(value, torch.Tensor) and _key(value) not in filled]
    return names, missing, [name for name in source.names if name not in targets]


def _key(tensor: torch.Tensor) -> Any:
    """A key that is equal for tied tensors."""
    if tensor.device.type == "jax":
        return id(buffer_of(tensor)), tuple(tensor.shape)
    return tensor.untyped_storage().data_ptr() or id(tensor), tuple(tensor.shape), tensor.storage_offset()


def _is_filled(value: Any, groups: Mapping[Any, list[str]]) -> bool:
    return isinstance(value, torch.Tensor) and _key(value) in groups


def _tied(names: list[str], targets: Mapping[str, torch.Tensor]) -> dict[Any, list[str]]:
    """The names, grouped by tensor."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(_key(targets[name]), []).append(name)
    return groups


def _require_fit(name: str, target: torch.Tensor, entry: Entry, dtype: torch.dtype | None) -> None:
    """Raise a CheckpointError if shape or dtype differ, or `target` is on 'meta'. `dtype`: conversion for floating-point tensors."""
    if tuple(target.shape) != entry.shape:
        raise mismatch(
            name, f"the module's shape is {tuple(target.shape)}", f"the file's is {entry.shape}", fix="build the module that was saved"
        )
    ours = str(target.dtype).removeprefix("torch.")
    is_converted = dtype is not None and target.is_floating_point() and "float" in entry.dtype
    if ours != entry.dtype and not is_converted:
        fix = f"choose one: load_safetensors(..., dtype=torch.{entry.dtype})"
        raise mismatch(name, f"the module's dtype is {ours}", f"the file's is {entry.dtype}", fix=fix)
    if target.device.type == "meta":
        raise mismatch(name, "it is on device 'meta', which stores no values", fix="model.to_empty(device='jax') first")


def _require_equal(group: list[str], source: _Source) -> None:
    """Check that all names of one tied tensor have equal values in the files."""
    for other in group[1:]:
        for box in whole(source.entry(group[0]).shape).pieces(2**22):
            if source.read(group[0], box).tobytes() != source.read(other, box).tobytes():
                fix = "untie them in the module, or remove one from the files"
                raise mismatch(other, f"the module ties it to {group[0]!r}", "the files have different values for the two", fix=fix)


def _fill(target: torch.Tensor, source: _Source, name: str) -> None:
    """Fill a tensor. On a mesh only this process's shards are read; otherwise the values stay on the host until they are used."""
    shape, dtype = tuple(target.shape), to_numpy_dtype(target.dtype)
    if target.device.type != "jax" or not is_whole(target, buffer_of(target)):
        with torch.no_grad():
            target.copy_(host_tensor(source.read(name, whole(shape)).astype(dtype, copy=False)))
        return
    buffer = buffer_of(target)
    sharding = layout_of(buffer)
    if sharding is None:
        host = source.read(name, whole(shape)).astype(dtype, copy=False)
        buffer.set(None)
        buffer.host = host
        return
    values = {box: source.read(name, box) for box in boxes_on(sharding, shape)}
    buffer.set(assembled(sharding, shape, values, dtype))


__all__ = ["Loaded", "load_safetensors"]
