"""Lists the steps in a folder and verifies them, from their manifests and bytes and never from names alone.

for found in spmd.checkpoint.steps("runs/a"):
    print(found.step, found.nbytes)
spmd.checkpoint.verify("runs/a").problems       # () if every byte of the latest step matches its checksum
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _files, _manifest
from spmd.checkpoint._manifest import Manifest

MAX_MANIFEST_BYTES = 2**30
_FOREIGN = {
    ".metadata": "torch.distributed.checkpoint: its .metadata is a pickle, which executes code when it is read",
    "_CHECKPOINT_METADATA": "orbax",
    "_METADATA": "orbax",
}


@dataclass(frozen=True)
class Step:
    """One committed step.

    Attributes:
        step: number of the step.
        folder: the step's folder.
        problem: why the manifest is unreadable or a data file has the wrong size; None if there is no such problem.
        manifest: the parsed manifest; None if there is a problem.
    """

    step: int
    folder: Path
    problem: str | None
    manifest: Manifest | None

    @property
    def nbytes(self) -> int:
        """Bytes of the step's arrays; 0 if the manifest is unreadable."""
        return 0 if self.manifest is None else self.manifest.nbytes


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.

    Attributes:
        step: number of the step.
        folder: the step's folder.
        problems: one line per damaged file or piece; empty if the step is valid.
        nbytes: number of bytes of arrays that were read.
    """

    step: int
    folder: Path
    problems: tuple[str, ...]
    nbytes: int


def committed(root: Path) -> list[_files.StepName]:
    """Committed steps under `root`, newest first, by the names of their folders. Excludes symbolic links and unfinished saves."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _files.failed(f"{root} cannot be read", error) from error
    found = [name for name in map(_files.parse_name, names) if name is not None and _files.is_real_folder(root / name.folder)]
    return sorted(found, reverse=True)


def steps(path: str | os.PathLike[str]) -> list[Step]:
    """All committed steps under a folder, newest first. Reads their manifests and the sizes of their files, not their data.

    Raises:
        CheckpointError: the folder is a checkpoint of another library, or is unreadable.
    """
    root = _files.folder_of(path, "steps", "spmd.checkpoint.steps(path)")
    _refuse_foreign(root)
    return [_step(root, name) for name in committed(root)]


def _step(root: Path, name: _files.StepName) -> Step:
    try:
        return Step(name.step, root / name.folder, None, read_manifest(root, name))
    except CheckpointError as error:
        return Step(name.step, root / name.folder, _in_one_line(error), None)


def problem_of(root: Path, name: _files.StepName) -> str | None:
    """Why a step's manifest is unreadable or a data file has the wrong size; None if there is no such problem."""
    return _step(root, name).problem


def _in_one_line(error: CheckpointError) -> str:
    """The message of an error without its fix, in one line."""
    return ": ".join(line.strip() for line in str(error).splitlines() if not line.strip().startswith("fix:"))


def read_manifest(root: Path, name: _files.StepName) -> Manifest:
    """Read and check a step's manifest, and the presence and sizes of its data files.

    Raises:
        CheckpointError: the manifest is unreadable or of another step, or a data file is missing or has another size.
    """
    folder = root / name.folder
    manifest = _manifest.parse(_files.read_small(folder / _manifest.NAME, MAX_MANIFEST_BYTES))
    if manifest.step != name.step:
        raise CheckpointError(
            message(
                f"{folder} contains step {manifest.step}", "the folder was renamed or copied", fix=f"rename it to step_{manifest.step:08d}"
            )
        )
    for file in manifest.files:
        size = _files.size_of(folder / file.name)
        if size != file.nbytes:
            what = "is missing or not a regular file" if size is None else f"has {size} bytes, but {file.nbytes} were written"
            raise CheckpointError(message(f"{folder / file.name} {what}", fix=f"restore another step: `spmd ckpt ls {root}` shows them"))
    return manifest


def _refuse_foreign(root: Path) -> None:
    for name, what in _FOREIGN.items():
        if os.path.lexists(root / name):
            raise CheckpointError(
                message(
                    f"{root} is a checkpoint of a different library",
                    f"{name} belongs to {what}",
                    fix="export it as safetensors with that library, and read it with spmd.checkpoint.load_safetensors",
                )
            )


def candidates(root: Path, step: int | None) -> list[_files.StepName]:
    """The folders to try, in this order: all committed steps, newest first, or the attempts at `step`.

    Raises:
        CheckpointError: `root` contains no step, or not `step`, or is a checkpoint of another library.
    """
    _refuse_foreign(root)
    names = committed(root)
    chosen = names if step is None else [name for name in names if name.step == step]
    if not chosen:
        there = ", ".join(str(number) for number in sorted({name.step for name in names})[-5:]) or "none"
        wanted = "a step" if step is None else f"step {step}"
        fix = f"leave step= out to use step {names[0].step}" if names else "pass the folder that was passed to spmd.checkpoint.save"
        raise CheckpointError(message(f"{root} contains no checkpoint of {wanted}", f"committed steps: {there}", fix=fix))
    return chosen


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verdict:
    """Read every byte of a step (the latest by default) and compare it with the checksums.

    Raises:
        CheckpointError: the folder does not contain this step, or any step.
    """
    root = _files.folder_of(path, "verify", "spmd.checkpoint.verify(path)")
    return verify_folder(root, candidates(root, step)[0])


def verify_step(step: Step) -> Verdict:
    """Like `verify`, for a step from `steps`."""
    name = _files.parse_name(step.folder.name)
    assert name is not None
    return verify_folder(step.folder.parent, name)


def verify_folder(root: Path, name: _files.StepName) -> Verdict:
    """Read every byte of one step's folder and compare it with the checksums."""
    folder = root / name.folder
    problems: list[str] = []
    num_read = 0
    try:
        manifest = read_manifest(root, name)
    except CheckpointError as error:
        return Verdict(name.step, folder, (_in_one_line(error),), 0)
    store = _files.Store(folder)
    for entry in manifest.arrays:
        for piece in entry.pieces:
            try:
                found = store.checksum(manifest.files[piece.file].name, piece.offset, piece.nbytes)
            except CheckpointError as error:
                problems.append(_in_one_line(error))
                continue
            num_read += piece.nbytes
            if found != piece.crc32:
                problems.append(damaged(entry.name, piece, manifest))
    return Verdict(name.step, folder, tuple(problems), num_read)


def damaged(name: str, piece: _manifest.Piece, manifest: Manifest) -> str:
    """One line that names the damaged part of array `name` and its bytes in the data file."""
    where = f"{manifest.files[piece.file].name}, bytes {piece.offset} to {piece.offset + piece.nbytes}"
    return f"{name!r}[{', '.join(f'{a}:{b}' for a, b in zip(piece.box.start, piece.box.stop, strict=True))}] is damaged ({where})"


__all__ = [
    "MAX_MANIFEST_BYTES",
    "Step",
    "Verdict",
    "candidates",
    "committed",
    "damaged",
    "problem_of",
    "read_manifest",
    "steps",
    "verify",
    "verify_folder",
    "verify_step",
]
