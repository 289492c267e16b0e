"""Host: this process's place in a job, and the exit codes from which a launcher knows why a process ended.

Depends on neither sockets nor jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Exit codes of a process of a job. 1 (an exception), 130 (Ctrl-C) and the negatives (signals) are Python's own.
PREEMPTED = 75  # stopped by SIGTERM after saving; can be restarted (EX_TEMPFAIL)
PEER_FAILED = 76  # another process failed first; this exit is only a consequence
STUCK = 77  # ended by the watchdog


@dataclass(frozen=True)
class Host:
    """This process's place in a job.

    Attributes:
        index: from 0 to count - 1; process 0 is the coordinator.
        count: number of processes in the job.
        coordinator: "name:port" at which process 0 runs the roll call, or None in a job of one process.
        found_by: source of these values: "arguments", "launcher", "torchrun", ..., or "alone" without a job.
        num_local: number of the job's processes on this machine, or None if unknown.
        local_index: index of this process among those, or None if unknown.
        devices: number of virtual CPU devices of each process, or None to use the machine's own devices.
        directory: the job's directory, shared by its processes on one machine, or None.
        attempt: number of restarts of the job before this one.
        key: secret that the processes of this job share, so that processes of other jobs are rejected; may be empty.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None
    found_by: str = "alone"
    num_local: int | None = None
    devices: int | None = None
    directory: Path | None = None
    attempt: int = 0
    key: str = ""
    local_index: int | None = None

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"
