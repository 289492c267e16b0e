"""`save`: saves one step of a state, in the background and atomically.

    spmd.checkpoint.save("runs/a", step, {"model": model, "optimizer": optimizer, "batches": batches})
    ...
    spmd.checkpoint.join()          # at the end: waits, and raises the error of a failed save

Each process writes those of its shards that are replica 0, and reads every file back and compares it. When all processes have
finished, process 0 adds the manifest, renames the folder to the step's name, and only then deletes old steps. Saving a step again
creates a new folder. Nothing is ever written to a folder with a step's name.
"""

from __future__ import annotations

import json
import logging
import operator
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import mesh
from spmd.base._errors import CheckpointError, TraceError, called_at, message, shown
from spmd.base._jax import is_tracing
from spmd.checkpoint import _files, _manifest, _owner, _tree
from spmd.checkpoint._collect import Collected, collect
from spmd.checkpoint._coordination import Gang, current_gang
from spmd.checkpoint._inventory import MAX_MANIFEST_BYTES, committed, problem_of
from spmd.checkpoint._manifest import ArrayEntry, DataFile, Manifest, Piece
from spmd.checkpoint._snapshot import HostPiece, Staging, packed, pieces_of
from spmd.device._checks import raise_failed
from spmd.device._storage import recording

_WRITERS = 8  # threads, so that some compute checksums while others wait for the disk
_CALL = "spmd.checkpoint.save(path, step, state)"
_log = logging.getLogger("spmd.checkpoint")
# Saves in progress, by root, so that a later save raises the error of an earlier one. Only this module writes to it.
_pending: dict[Path, Saving] = {}
_staging: dict[Path, Staging] = {}  # by root


class Saving:
    """A save in progress.

    Attributes:
        root: the folder that was passed to `save`, as an absolute path.
        step: number of the step.
    """

    def __init__(self, root: Path, step: int, outcome: Future[None]) -> None:
        self.root, self.step = root, step
        self._outcome = outcome

    @property
    def is_done(self) -> bool:
        """Whether the save has finished or failed."""
        return self._outcome.done()

    def join(self) -> None:
        """Wait until the step is on disk, and release the folder's lock.

        Raises:
            CheckpointError: the step was not saved.
        """
        try:
            self.wait()
        finally:
            _owner.release(self.root)

    def wait(self) -> None:
        """Like `join`, but keep the folder locked for further saves of this job."""
        try:
            with mesh.extended_timeout("saving"):
                self._outcome.result()
        finally:
            if _pending.get(self.root) is self:
                del _pending[self.root]


def save(
    path: str | os.PathLike[str], step: int, state: Any, *, keep: int | None = None, wait: bool = False, gang: Gang | None = None
) -> Saving:
    """Save `state` as step `step` under `path`. Returns as soon as the state may be changed again.

    Args:
        path: a folder on a file system of all processes; created if it does not exist.
        step: number of the step, at least 0: an integer, also one of numpy.
        state: containers of modules, optimizers, schedulers, loaders (anything with state_dict and load_state_dict), tensors,
            arrays, numbers and text. The random streams of host and device are saved with it.
        keep: number of steps to keep, at least 1; older ones are deleted after this one was read back. None keeps all.
        wait: return only when the step is on disk.
        gang: the processes of the job; by default all processes of `jax.distributed`.

    Returns:
        The save in progress; with `wait`, finished.

    Raises:
        CheckpointError: the state contains a value that a checkpoint cannot store, or itself; or an argument is of a wrong type or out
            of range. Also if writing failed or another job saves there: in this save with `wait`, else in the previous save. The
            message names the step that was not saved.
        TraceError: the call is inside a compiled function.
    """
    _refuse_trace()
    root = Path(os.path.abspath(_files.folder_of(path, "save", _CALL)))
    step, keep = _checked_arguments(step, keep, wait)
    if root in _pending:
        _pending[root].wait()
    raise_failed()  # a state computed after a failed check must not be saved
    gang = current_gang() if gang is None else gang
    collected = collect(state)
    staging = None
    if not wait:
        staging = _staging.setdefault(root, Staging([]))
        staging.rewind()
    with mesh.extended_timeout("copying the state to be saved"):
        pieces = pieces_of(collected.leaves, gang.index, gang.size, staging)
    writer = _Writer(root, step, keep, gang, collected, list(packed(pieces)))
    outcome: Future[None] = Future()
    if wait:
        try:
            with mesh.extended_timeout("saving"):
                writer.run()
        finally:
            _owner.release(root)
        outcome.set_result(None)
        return Saving(root, step, outcome)
    outcome = _pooled(1, [writer.run])[0]
    outcome.add_done_callback(writer.report)
    _pending[root] = Saving(root, step, outcome)
    return _pending[root]


def _refuse_trace() -> None:
    if recording.get() is not None or is_tracing():
        why = "the arrays of the state have no values until the program runs"
        raise TraceError(message("save was called inside a compiled function", why, *called_at(), fix="save after the call: " + _CALL))


def _checked_arguments(step: Any, keep: Any, wait: Any) -> tuple[int, int | None]:
    """`step` and `keep` as Python integers."""
    number, kept = _integer("step", step), None if keep is None else _integer("keep", keep)
    if number < 0 or (kept is not None and kept < 1):
        raise CheckpointError(message(f"save(step={number}, keep={kept}) is invalid", fix="step must be at least 0, keep at least 1"))
    if not isinstance(wait, bool):
        fix = "spmd.checkpoint.save(path, step, state, wait=True)"
        raise CheckpointError(message(f"wait of save must be True or False, got {shown(wait)}", *called_at(), fix=fix))
    return number, kept


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool | torch.Tensor | jax.Array | np.ndarray) or not hasattr(type(value), "__index__"):
        raise CheckpointError(message(f"{name} of save must be an integer, got {shown(value)}", *called_at(), fix=_CALL))
    return operator.index(value)


def join(path: str | os.PathLike[str] | None = None) -> None:
    """Wait for the save in progress under `path`, or for all saves, and release the locks. Raises the first error.

    Raises:
        CheckpointError: a step was not saved.
    """
    root = None if path is None else Path(os.path.abspath(_files.folder_of(path, "join", "spmd.checkpoint.join()")))
    chosen = [saving for folder, saving in _pending.items() if root in (None, folder)]
    errors: list[CheckpointError] = []
    for saving in chosen:
        try:
            saving.join()
        except CheckpointError as error:
            errors.append(error)
    _owner.release(root)
    if errors:
        raise errors[0]


def _pooled(num_threads: int, jobs: Sequence[Callable[[], Any]]) -> list[Future[Any]]:
    """Start jobs on a new thread pool.

    Note [Threads at shutdown]. All jobs of a save are submitted while `save` runs. Once Python shuts down, a pool accepts no more
    jobs, but it finishes those it has. So a program may end right after its last save.
    """
    pool = ThreadPoolExecutor(num_threads, "checkpoint")
    futures = [pool.submit(job) for job in jobs]
    pool.shutdown(wait=False)
    return futures


class _Writer:
    """One save, on one process."""

    def __init__(self, root: Path, step: int, keep: int | None, gang: Gang, collected: Collected, groups: list[list[HostPiece]]) -> None:
        self.root, self.step, self.keep, self.gang, self.collected, self.groups = root, step, keep, gang, collected, groups
        self.files = [DataFile(f"data-{gang.index:05d}-{n:06d}.bin", sum(len(p.data) for p in group)) for n, group in enumerate(groups)]
        self._store: Future[_files.Store] = Future()
        # See Note [Threads at shutdown]: the writers start now and wait for the folder.
        self._jobs = _pooled(_WRITERS, [partial(self._write_file, *job) for job in zip(self.files, groups, strict=True)])

    def run(self) -> None:
        """Write this process's files. Returns when the step is committed."""
        is_first = self.gang.index == 0
        try:
            name = str(self._on_all_processes("opened", self._open if is_first else _nothing)[0])
            writing = self.root / (_files.WRITING + name)
        except BaseException as error:
            self._store.set_exception(error)
            raise
        try:
            self._on_all_processes("written", lambda: self._write(writing))
            self._on_all_processes("committed", (lambda: self._commit(writing, self.root / name)) if is_first else _nothing)
        except CheckpointError:
            if is_first:
                _discard(writing)
            raise

    def report(self, outcome: Future[None]) -> None:
        """Log a failure at once, since the next save or `join`, which raises it, may be far away."""
        error = outcome.exception()
        if error is not None:
            _log.error("%s", error)

    def _write_file(self, file: DataFile, group: Sequence[HostPiece]) -> list[int]:
        return self._store.result().write(file.name, [piece.data for piece in group])

    def _on_all_processes(self, name: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every process, and return the results of all. The first error is raised on every process."""
        result, problem = None, ""
        try:
            result = action()
        except (CheckpointError, OSError) as error:
            problem = str(error if isinstance(error, CheckpointError) else _files.failed(f"{self.root} cannot be written", error))
        answers = [json.loads(text) for text in self.gang.exchange(name, json.dumps([result, problem]))]
        for number, (_, text) in enumerate(answers):
            if text:
                where = f"process {number}: " if self.gang.size > 1 else ""
                raise CheckpointError(f"step {self.step} was not saved: {where}{text}")
        return [result for result, _ in answers]

    def _open(self) -> str:
        """Create the folder to write to, and return the final name of the step's folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        _owner.claim(self.root, [name.folder for name in committed(self.root)])
        for entry in os.scandir(self.root):
            if entry.name.startswith((_files.WRITING, _files.DELETING)):  # left by a run that was killed
                _files.remove(Path(entry.path))
        taken = {name.attempt for name in map(_files.parse_name, os.listdir(self.root)) if name is not None and name.step == self.step}
        name = _files.StepName(self.step, max(taken, default=-1) + 1)
        _files.make_folder(self.root / (_files.WRITING + name.folder))
        return name.folder

    def _write(self, writing: Path) -> None:
        """Write this process's data files, and a list of their contents for process 0."""
        self._store.set_result(_files.Store(writing))
        wait_for(self._jobs)  # all of them: none may still write when the error of another causes the folder's removal
        checksums = [job.result() for job in self._jobs]
        arrays = self._arrays(checksums)
        if self.gang.index == 0:
            self._own = self.files, arrays
        else:
            part = {"files": [[f.name, f.nbytes] for f in self.files], "arrays": [_manifest.array_to_json(a) for a in arrays]}
            text = json.dumps({**part, "local": self.collected.local})
            _files.write_small(writing / _part(self.gang.index), text.encode())

    def _arrays(self, checksums: Sequence[Sequence[int]]) -> list[ArrayEntry]:
        """The entries of all arrays, each with only the pieces that this process wrote.

        Args:
            checksums: the CRC-32 of each piece, by file.
        """
        found: list[list[Piece]] = [[] for _ in self.collected.leaves]
        for number, (group, sums) in enumerate(zip(self.groups, checksums, strict=True)):
            at = 0
            for piece, crc32 in zip(group, sums, strict=True):
                found[piece.leaf].append(Piece(piece.box, number, at, len(piece.data), crc32))
                at += len(piece.data)
        return [
            ArrayEntry(leaf.name, _tree.dtype_name(leaf.value.dtype), leaf.shape, leaf.spec, tuple(pieces))
            for leaf, pieces in zip(self.collected.leaves, found, strict=True)
        ]

    def _commit(self, writing: Path, final: Path) -> None:
        """Write the manifest of the files of all processes, rename the folder to the step's name, and delete old steps."""
        manifest = self._manifest(writing)
        data = manifest.to_bytes()
        _files.write_small(writing / _manifest.NAME, data)
        if _files.read_small(writing / _manifest.NAME, MAX_MANIFEST_BYTES) != data:
            raise CheckpointError(message(f"the manifest of {final} reads back differently", fix="check the disk"))
        _manifest.parse(data)
        _files.commit(writing, final)
        _owner.note_saved(self.root, final.name)
        mesh.report_saved(self.step)
        self._delete_old(final)

    def _manifest(self, writing: Path) -> Manifest:
        """Combine the lists of all processes to the manifest, and delete these lists."""
        files, arrays = self._own
        local = [self.collected.local]
        pieces = [list(entry.pieces) for entry in arrays]
        for index in range(1, self.gang.size):
            part = _manifest.load_json(_files.read_small(writing / _part(index), MAX_MANIFEST_BYTES))
            theirs = [_manifest.array_from_json(row, len(part["files"])) for row in part["arrays"]]
            _require_same(arrays, theirs, index)
            for own, entry in zip(pieces, theirs, strict=True):
                own.extend(replace(piece, file=piece.file + len(files)) for piece in entry.pieces)
            files = [*files, *(DataFile(*row) for row in part["files"])]
            local.append(part["local"])
            _files.remove(writing / _part(index))
        whole = tuple(replace(entry, pieces=tuple(own)) for entry, own in zip(arrays, pieces, strict=True))
        return Manifest(self.step, tuple(files), whole, self.collected.tree, tuple(local), self._about())

    def _about(self) -> dict[str, Any]:
        versions = {name: version(name) for name in ("torch", "jax")}
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {"saved": saved, "processes": self.gang.size, "versions": versions}

    def _delete_old(self, final: Path) -> None:
        """Delete earlier attempts at this step, and all but the newest `keep` valid steps. A failed deletion is only logged."""
        names = [name for name in committed(self.root) if name.step <= self.step and name.folder != final.name]
        older = [name for name in names if name.step < self.step]
        if self.keep is not None:
            whole = [name.step for name in older if problem_of(self.root, name) is None]
            limit = min([self.step, *sorted(set(whole), reverse=True)[: self.keep - 1]])
        else:
            limit = 0
        for name in names:
            if name.step == self.step or name.step < limit:
                try:
                    _files.retire(self.root / name.folder)
                except OSError as error:
                    _log.warning("step %d was saved, but %s cannot be deleted: %s", self.step, name.folder, error)


def _require_same(ours: Sequence[ArrayEntry], theirs: Sequence[ArrayEntry], index: int) -> None:
    """Raise a CheckpointError if process `index` saves arrays of other names, dtypes or shapes than process 0."""
    a, b = ([(e.name, e.dtype, e.shape) for e in entries] for entries in (ours, theirs))
    if a != b:
        different = next((pair for pair in zip(a, b, strict=False) if pair[0] != pair[1]), (len(a), len(b)))
        raise CheckpointError(
            message(
                f"process {index} saves a different state than process 0",
                f"process 0: {different[0]}",
                f"process {index}: {different[1]}",
                fix="build and save the same state on every process",
            )
        )


def _part(index: int) -> str:
    return f"part-{index:05d}.json"


def _nothing() -> None:
    return None


def _discard(writing: Path) -> None:
    try:
        _files.remove(writing)
    except OSError as error:
        _log.warning("%s could not be removed: %s", writing, error)


__all__ = ["Saving", "join", "save"]
