"""Ensures that only one job saves into a folder, by a lock and by a check for steps of another job.

Two jobs in one folder would delete each other's unfinished saves and old steps, and a restart would continue from either job's
step. Process 0 holds a POSIX lock (`lockf`) from a save until `join`. Child processes do not inherit the lock, and it is released
when the process ends. On a file system without locks only the check for foreign steps remains.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from spmd.base._errors import CheckpointError, message

NAME = ".saving_job"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_locks: dict[Path, int] = {}  # by root: descriptor of the lock file, locked by this process
_known: dict[Path, set[str]] = {}  # by root: steps that existed at this job's first save, and steps that it saved


def claim(root: Path, steps: Iterable[str]) -> None:
    """Lock `root` for this job before a save.

    Args:
        steps: names of the steps now under `root`.

    Raises:
        CheckpointError: another job has the lock, or has saved a step since this job's first save.
    """
    steps = set(steps)
    foreign = steps - _known.setdefault(root, steps)
    if foreign:
        raise _refusal(root, f"since this job's first save there, another wrote {', '.join(sorted(foreign))}")
    while root not in _locks:
        descriptor = os.open(root / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace")
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _refusal(root, f"process 0 of that job is {holder or 'unknown'}") from None
            raise
        if _is_lock_file(root, descriptor):
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
            _locks[root] = descriptor
        else:  # its owner unlinked the file before releasing the lock: lock the new file
            os.close(descriptor)


def note_saved(root: Path, step: str) -> None:
    """Record that this job saved folder `step`."""
    _known[root].add(step)


def release(root: Path | None) -> None:
    """Release the lock on `root`, or all locks if it is None. Does nothing without a lock."""
    for locked in list(_locks) if root is None else [root]:
        descriptor = _locks.pop(locked, None)
        if descriptor is not None:
            if _is_lock_file(locked, descriptor):
                (locked / NAME).unlink()
            os.close(descriptor)


def forget(root: Path) -> None:
    """Accept all steps under `root` as this job's own. Called after a restore, from which the job continues."""
    _known.pop(root, None)


def _is_lock_file(root: Path, descriptor: int) -> bool:
    """Whether an open file is the present lock file of `root`, and not one that was unlinked."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(root / NAME))
    except FileNotFoundError:
        return False


def _refusal(root: Path, found: str) -> CheckpointError:
    return CheckpointError(message(f"another job saves into {root}", found, fix='give each job its own folder, save("runs/b", ...)'))


__all__ = ["NAME", "claim", "forget", "note_saved", "release"]
