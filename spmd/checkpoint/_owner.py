"""One job saves into a folder: its first process holds a lock from a save to `join`, and looks for steps that are not its own.

Two jobs in one folder would remove each other's saves in progress and old steps, and a restart would go on from either's.
The lock is one of POSIX (`lockf`): it is the process's, not its children's, and gone when the process is. Where a file system
has none, the look at the steps remains.
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
_locks: dict[Path, int] = {}  # by root: the descriptor of the file that this process has locked
_known: dict[Path, set[str]] = {}  # by root: the steps that were there when this job came, and its own


def claim(root: Path, steps: Iterable[str]) -> None:
    """This job is about to save under `root`, where these steps are.

    Raises:
        CheckpointError: another job saves there, or has since this one's first save.
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
                raise _refusal(root, f"that job's first process is {holder or 'not known'}") from None
            raise
        if _is_there(root, descriptor):
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
            _locks[root] = descriptor
        else:  # its holder removed it before it let go
            os.close(descriptor)


def note_saved(root: Path, step: str) -> None:
    """A step is there that this job saved."""
    _known[root].add(step)


def release(root: Path | None) -> None:
    """This job has no save in progress under `root`, or under any (None)."""
    for held in list(_locks) if root is None else [root]:
        descriptor = _locks.pop(held, None)
        if descriptor is not None:
            if _is_there(held, descriptor):
                (held / NAME).unlink()
            os.close(descriptor)


def forget(root: Path) -> None:
    """This job goes on from what it restored: whatever is there is its own."""
    _known.pop(root, None)


def _is_there(root: Path, descriptor: int) -> bool:
    """Whether an open file is the one that has the name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(root / NAME))
    except FileNotFoundError:
        return False


def _refusal(root: Path, found: str) -> CheckpointError:
    return CheckpointError(message(f"another job saves into {root}", found, fix='give each job its own folder, save("runs/b", ...)'))


__all__ = ["NAME", "claim", "forget", "note_saved", "release"]
