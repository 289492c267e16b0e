"""`restore`: restores the latest valid step into the program's own objects, on any mesh.

    restored = spmd.checkpoint.restore("runs/a", {"model": model, "optimizer": optimizer, "batches": batches})
    print(restored.step)

Each process reads only the pieces that overlap the shards on its devices, and checks their checksums. A step that is damaged or
does not match is skipped with a warning, by all processes together. A program's values change only after everything was read.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mesh
from mesh.platform._allocator import give_back_freed_memory
from spmd.base._errors import CheckpointError, called_at, message, shown
from spmd.checkpoint import _files, _inventory, _owner, _save
from spmd.checkpoint._collect import RANDOM, parameter_names
from spmd.checkpoint._coordination import Gang, current_gang
from spmd.checkpoint._plan_entries import Finish
from spmd.checkpoint._read import Reader
from spmd.checkpoint._restore_plan import Plan
from spmd.checkpoint._rng_state import RandomState


@dataclass(frozen=True)
class Restored:
    """The result of `restore`.

    Attributes:
        step: number of the step that was restored.
        state: the restored state. Its modules, optimizers and tensors are the objects that were passed in; numbers and strings are new.
        skipped: why newer steps were skipped; empty if the latest was restored.
        bytes_read: bytes of arrays that this process read.
    """

    step: int
    state: Any
    skipped: tuple[str, ...]
    bytes_read: int


def restore(
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    step: int | None = None,
    cast: bool = False,
    random: bool = True,
    gang: Gang | None = None,
) -> Restored:
    """Restore the latest valid step under `path` into `state`.

    Args:
        path: the folder that was passed to `save`.
        state: a state like the one passed to `save`, on the same or another mesh and number of processes. Saved entries that are
            missing in it are not read; None in it takes any saved value. None returns everything, as CPU tensors and plain values,
            for inspection.
        step: restore this step only, and raise an error if it is damaged.
        cast: convert arrays to the dtypes of `state`; by default a different dtype is an error.
        random: restore the random streams too. Has no effect if `state` is None.
        gang: the processes of the job; by default all processes of `jax.distributed`.

    Raises:
        CheckpointError: an argument has a wrong type, or no step is valid and matches `state`; the message gives the reason for each.

    Warns:
        UserWarning: newer steps were skipped.
    """
    _require_arguments(step, {"cast": cast, "random": random})
    root = Path(os.path.abspath(_files.folder_of(path, "restore", "spmd.checkpoint.restore(path, state)")))
    _save.join(root)
    gang = current_gang() if gang is None else gang
    with mesh.extended_timeout("restoring"):
        restored = _restored(root, state, step, cast, random, gang)
    give_back_freed_memory()
    _owner.forget(root)
    return restored


def _require_arguments(step: object, flags: dict[str, object]) -> None:
    if step is not None and (isinstance(step, bool | torch.Tensor) or not hasattr(type(step), "__index__")):
        number = step if isinstance(step, str) and step.isdecimal() else "10"
        fix = f"spmd.checkpoint.restore(path, state, step={int(number)})"
        raise CheckpointError(message(f"step of restore must be an integer or None, got {shown(step)}", *called_at(), fix=fix))
    for name, value in flags.items():
        if not isinstance(value, bool):
            fix = f"spmd.checkpoint.restore(path, state, {name}=True)"
            raise CheckpointError(message(f"{name} of restore must be True or False, got {shown(value)}", *called_at(), fix=fix))


def _restored(root: Path, state: Any, step: int | None, cast: bool, random: bool, gang: Gang) -> Restored:
    """Try the candidates in order, and restore the first one that all processes can read and that matches the state."""
    names = [name for name in map(_files.parse_name, _agreed_candidates(root, step, gang)) if name is not None]
    skipped: list[str] = []
    for name in names:
        finish, reader, problem = None, None, ""
        try:
            finish, reader = _prepared(root, name, state, cast, random, gang)
        except CheckpointError as error:
            problem = str(error)
        problems = gang.exchange("read", problem)
        if not any(problems):
            assert finish is not None and reader is not None
            _warn(skipped, name.step)
            return Restored(name.step, finish(), tuple(skipped), reader.bytes_read)
        first = next(index for index, text in enumerate(problems) if text)
        skipped.append(f"{name.folder}: " + (f"process {first}: " if gang.size > 1 else "") + problems[first])
    reasons = "\n".join(skipped).splitlines()
    raise CheckpointError(
        message(f"{root} has no valid step that matches the program", *reasons, fix="fix the problems above, or start a new run")
    )


def _agreed_candidates(root: Path, step: int | None, gang: Gang) -> list[str]:
    """Process 0's list of candidates, so that all processes try the same steps in the same order."""
    names: list[str] = []
    problem = ""
    if gang.index == 0:
        try:
            names = [name.folder for name in _inventory.candidates(root, step)]
        except CheckpointError as error:
            problem = str(error)
    names, problem = json.loads(gang.exchange("found", json.dumps([names, problem]))[0])
    if problem:
        raise CheckpointError(problem)
    return names


def _prepared(root: Path, name: _files.StepName, state: Any, cast: bool, random: bool, gang: Gang) -> tuple[Finish, Reader]:
    """Compare the state with a step and read the step. The returned action changes the state, and finds no more damage."""
    manifest = _inventory.read_manifest(root, name)
    reader = Reader(manifest, _files.Store(root / name.folder))
    # With a different number of processes, all use process 0's nodes: positions belong to the job, and streams have equal seeds.
    local = manifest.local[gang.index if gang.size == len(manifest.local) else 0] if manifest.local else {}
    plan = Plan(reader, local, cast, parameter_names(state))
    finish = plan.value(manifest.tree) if state is None else plan.walk(state, manifest.tree, "")
    streams = plan.walk(RandomState(), local[RANDOM], RANDOM) if random and state is not None and RANDOM in local else None
    reader.read()

    def finish_all() -> Any:
        value = finish()
        if streams is not None:
            streams()
        return value

    return finish_all, reader


def _warn(skipped: list[str], step: int) -> None:
    if skipped:
        warnings.warn(
            message(
                f"step {step} is restored; newer steps that are damaged or do not match the program: {len(skipped)}",
                *"\n".join(skipped).splitlines(),
                fix="delete the damaged steps and check the disk",
            ),
            stacklevel=4,
        )


def has_step(path: str | os.PathLike[str]) -> bool:
    """Whether `path` contains a committed step. If so, a program should restore it, and treat an error of `restore` as fatal."""
    root = _files.folder_of(path, "has_step", "spmd.checkpoint.has_step(path)")
    return bool(_inventory.committed(Path(os.path.abspath(root))))


__all__ = ["Restored", "has_step", "restore"]
