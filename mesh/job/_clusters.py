"""Detection of a process's place in its job, from the environment variables of schedulers.

`detect(environ)` calls the readers below in order and returns the first result. The most specific reader comes first,
because one scheduler runs inside another (mpirun and torchrun inside a SLURM allocation, `spmd launch` inside any):

    1. spmd launch            SPMD_COORDINATOR, SPMD_PROCESS, SPMD_PROCESSES
    2. torchrun               TORCHELASTIC_RUN_ID with MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
    3. Open MPI               OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
    4. SLURM (srun)           SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST
    5. GKE, JobSet, TPU VMs   TPU_WORKER_ID, TPU_WORKER_HOSTNAMES, and MEGASCALE_* for several slices

A TPU VM outside GKE sets none of these variables. If there is a TPU, its metadata server is queried last (`on_tpu_vm`).
The readers are functions of a mapping; only `mesh/job/_join.py` reads the environment itself.
"""

from __future__ import annotations

import hashlib
import re
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from mesh._mesh_errors import JobError, message
from mesh.job._place import Host
from mesh.job._timeouts import DEFAULT_PORT

Environ = Mapping[str, str]
Reader = Callable[[Environ], Host | None]


def detect(environ: Environ) -> Host | None:
    """The process's place in the job that `environ` describes, or None if it describes no job.

    Raises:
        JobError: the variables of a scheduler are incomplete, or one is not a number.
    """
    registered = (reader for name, reader in READERS.items() if name not in _BUILT_IN)
    for reader in (READERS["launcher"], *registered, *(READERS[name] for name in _BUILT_IN[1:])):
        found = reader(environ)
        if found is not None:
            return found
    return None


def _launcher(environ: Environ) -> Host | None:
    if "SPMD_COORDINATOR" not in environ or "SPMD_PROCESS" not in environ:
        return None
    devices, directory = environ.get("SPMD_DEVICES", ""), environ.get("SPMD_JOB_DIR", "")
    return Host(
        index=_number(environ, "SPMD_PROCESS"),
        count=_number(environ, "SPMD_PROCESSES"),
        coordinator=environ["SPMD_COORDINATOR"],
        found_by="launcher",
        num_local=_number(environ, "SPMD_LOCAL_PROCESSES") if "SPMD_LOCAL_PROCESSES" in environ else None,
        devices=_number(environ, "SPMD_DEVICES") if devices else None,
        directory=Path(directory) if directory else None,
        attempt=_number(environ, "SPMD_ATTEMPT") if "SPMD_ATTEMPT" in environ else 0,
        key=environ.get("SPMD_JOB_KEY", ""),
        local_index=_number(environ, "SPMD_LOCAL_PROCESS") if "SPMD_LOCAL_PROCESS" in environ else None,
    )


def _torchrun(environ: Environ) -> Host | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    # torchrun's own store listens on MASTER_PORT, so process 0 uses the port above.
    port = _number(environ, "MASTER_PORT") + 1
    return Host(
        index=_number(environ, "RANK"),
        count=_number(environ, "WORLD_SIZE"),
        coordinator=f"{_text(environ, 'MASTER_ADDR')}:{port}",
        found_by="torchrun",
        num_local=_number(environ, "LOCAL_WORLD_SIZE"),
        attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        key=environ["TORCHELASTIC_RUN_ID"],
        local_index=_number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None,
    )


def _open_mpi(environ: Environ) -> Host | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    index, count = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    num_local = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE") or ""
    coordinator = environ.get("SPMD_COORDINATOR") or (f"127.0.0.1:{_port_of(job)}" if num_local == count else None)
    if coordinator is None:
        raise JobError(
            message(
                "Open MPI has no variable for the host of process 0",
                f"the job has {count} processes, {num_local} of them on this machine",
                fix=f"mpirun -x SPMD_COORDINATOR=<first host>:{DEFAULT_PORT} ...",
            )
        )
    local = int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]) if "OMPI_COMM_WORLD_LOCAL_RANK" in environ else None
    return Host(index, count, coordinator, "Open MPI", num_local, key=job, local_index=local)


def _slurm(environ: Environ) -> Host | None:
    if "SLURM_PROCID" not in environ or "SLURM_JOB_ID" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None
    first = expand_hostlist(environ["SLURM_STEP_NODELIST"])[0]
    count = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    step = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    num_local = _tasks_on_node(per_node, int(environ.get("SLURM_NODEID", "0"))) if per_node else None
    coordinator = environ.get("SPMD_COORDINATOR") or f"{first}:{_port_of(step)}"
    return Host(
        index=_number(environ, "SLURM_PROCID"),
        count=count,
        coordinator=coordinator,
        found_by="SLURM",
        num_local=num_local,
        attempt=int(environ.get("SLURM_RESTART_COUNT", "0")),
        key=step,
        local_index=_number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else None,
    )


def _tpu(environ: Environ) -> Host | None:
    if "TPU_WORKER_HOSTNAMES" not in environ or "TPU_WORKER_ID" not in environ:
        return None
    names = [name.split(":")[0] for name in environ["TPU_WORKER_HOSTNAMES"].split(",") if name]
    index, slices, slice_id = _number(environ, "TPU_WORKER_ID"), 1, 0
    coordinator = environ.get("SPMD_COORDINATOR")
    if "MEGASCALE_NUM_SLICES" in environ:
        slices, slice_id = _number(environ, "MEGASCALE_NUM_SLICES"), _number(environ, "MEGASCALE_SLICE_ID")
        first = _text(environ, "MEGASCALE_COORDINATOR_ADDRESS").split(":")[0]
        coordinator = coordinator or f"{first}:{DEFAULT_PORT}"
    count = len(names) * slices
    if count == 1:
        return None
    return Host(
        slice_id * len(names) + index, count, coordinator or f"{names[0]}:{DEFAULT_PORT}", "TPU", 1, key=environ.get("JOBSET_NAME", "")
    )


READERS: dict[str, Reader] = {
    "launcher": _launcher,
    "torchrun": _torchrun,
    "Open MPI": _open_mpi,
    "SLURM": _slurm,
    "TPU": _tpu,
}


_BUILT_IN = tuple(READERS)


def register_cluster(name: str) -> Callable[[Reader], Reader]:
    """Decorator that registers a function to detect a scheduler. It takes the environment and returns a `Host`, or None.

    `mesh.init` and `spmd launch --join` call the function after the check for `spmd launch` and before the built-in schedulers.

    Args:
        name: name of the scheduler, for error messages.

    Raises:
        JobError: a cluster of this name is already registered.
    """
    if name in READERS:
        raise JobError(
            message(f"a cluster named {name!r} is already registered", f"registered: {', '.join(READERS)}", fix="choose another name")
        )

    def register(reader: Reader) -> Reader:
        READERS[name] = reader
        return reader

    return register


def on_tpu_vm(attribute: Callable[[str], str | None]) -> Host | None:
    """The place of this TPU VM host among the hosts of its slice, or None for a slice of one host or another machine.

    Args:
        attribute: returns a metadata attribute of the machine by its name, or None; see `metadata`.
    """
    number, endpoints = attribute("agent-worker-number"), attribute("worker-network-endpoints")
    if number is None or endpoints is None or not number.isdigit():
        return None
    addresses = [entry.split(":")[-1] for entry in endpoints.split(",") if entry]  # "unused:unused:10.0.0.2,..."
    if len(addresses) < 2:
        return None
    return Host(int(number), len(addresses), f"{addresses[0]}:{DEFAULT_PORT}", "TPU VM", 1, key=endpoints)


def metadata(name: str) -> str | None:
    """A metadata attribute of this Google Cloud machine, or None after one second without an answer."""
    url = f"http://metadata.google.internal/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=1.0) as answer:
            return answer.read(65536).decode("utf-8", "replace").strip()
    except OSError:
        return None


def expand_hostlist(text: str) -> list[str]:
    """Expand SLURM's short form of host names: "n[01-03,7],login" becomes n01, n02, n03, n7, login.

    Raises:
        JobError: unbalanced brackets or a malformed range.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names.extend(_expanded(part))
    if not names or text.count("[") != text.count("]"):
        raise JobError(message(f"{text!r} is not a list of hosts", fix="write names with ranges, e.g. 'node[01-04],node7'"))
    return names


def _expanded(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    names: list[str] = []
    for piece in inside.split(","):
        low, dash, high = piece.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) - int(low) > 100_000):
            raise JobError(message(f"{part!r} is not a list of hosts", f"{piece!r} is not a range", fix="write e.g. 'node[01-04]'"))
        names += [f"{head}{i:0{len(low)}d}" for i in range(int(low), int(high if dash else low) + 1)]
    return [name + end for name in names for end in _expanded(tail)] if tail else names


def _tasks_on_node(text: str, node: int) -> int | None:
    """The entry of one node in SLURM's list of tasks per node, e.g. "2(x3),1", or None."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _port_of(job: str) -> int:
    """Port derived from the job's id, equal in all processes. It is below the range of ephemeral ports."""
    return 20_000 + 2 * (int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 5_000)


def _text(environ: Environ, name: str) -> str:
    if not environ.get(name):
        fix = f"set {name}, or call mesh.init(coordinator, count, index)"
        raise JobError(message(f"the environment has no {name}", "the scheduler normally sets it", fix=fix))
    return environ[name]


def _number(environ: Environ, name: str) -> int:
    text = _text(environ, name)
    if not text.isdigit():
        fix = f"set {name}, or call mesh.init(coordinator, count, index)"
        raise JobError(message(f"{name} is {text!r}", "a non-negative integer is expected", fix=fix))
    return int(text)
