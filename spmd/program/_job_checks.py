"""Checks of a compiled step in a job of several processes: all run the same program on consistent data, under the watchdog.

Before the first run of a program, the processes compare its digest. Each call is counted by the watchdog and adds its inputs to the running
comparison of the data. In a single process a step has no `JobChecks` and no overhead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import torch

from mesh import Mesh, extended_timeout
from mesh.job import _agreement, _join
from spmd.base._errors import SpmdError, message
from spmd.base._progress import underway
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer

# The settings of jax that change what a program computes.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
    "jax_debug_nans",
)
_MAX_CHARACTERS = 160


_is_compiling: ContextVar[bool] = ContextVar("a program is being compiled", default=False)


@contextmanager
def compiling() -> Generator[None]:
    """A context in which a program is traced or compiled: the watchdog's timeout is that of a compilation."""
    token = _is_compiling.set(True)
    try:
        with nullcontext() if _join.job() is None else extended_timeout("compiling"):
            yield
    finally:
        _is_compiling.reset(token)


def is_compiling() -> bool:
    """Whether the current compilation is of a program, not of an eager operation."""
    return _is_compiling.get()


class JobChecks:
    """The checks of one program in a job."""

    def __init__(self, job: _join.Job) -> None:
        self._job = job

    def require_same(self, name: str, mesh: Mesh | None, state: list[Buffer], args: list[Buffer], lowered: Any) -> None:
        """Compare the program with those of the other processes before its first run.

        Args:
            name: name of the compiled function.
            mesh: the mesh of the program, or None.
            state, args: buffers of its state and of its arguments.
            lowered: the program as lowered by jax.

        Raises:
            JobError: a process differs; the message names the process and the item.
        """
        text = lowered.as_text()
        items = {
            "function": name,
            "flags": _short({**_join.program_environment(), **{s: str(jax.config.values.get(s)) for s in _SETTINGS}}),
            "mesh": "none" if mesh is None else mesh.to_string(),
            "arguments": _short([_layout(b) for b in args]),
            "state": _short([_layout(b) for b in state]),
            "seed": f"torch {torch.initial_seed()}, device {default_stream.seed}, {default_stream.draws} draws",
            "uploaded values": f"digest {_agreement.digest(repr([b.digest for b in (*state, *args)]).encode()):08x}",
            "program": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
        number = self._job.next_program()
        watchdog, title = self._job.watchdog, f"program {number} ({name})"
        waiting = f"waiting for all processes to run {title}, which this process has traced"
        with underway(waiting), watchdog.extended(waiting):
            _agreement.compare(self._job.service, self._job.host.index, title, items, watchdog.first_s)

    def begin(self, numbers: list[float], args: list[Buffer], hosts: list[np.ndarray[Any, Any]]) -> None:
        """Note the start of a call.

        Args:
            numbers: Python numbers that are inputs of the program.
            args: buffers of the device tensors among the arguments.
            hosts: the CPU tensors among the arguments.

        Raises:
            JobError: the processes fed different data in the previous step.
        """
        job = self._job
        job.watchdog.enter()
        job.steps.note("random stream", _agreement.digest(default_stream.words().tobytes()))
        job.steps.note("numbers of the optimizers", _agreement.digest(np.array(numbers, np.float64).tobytes()))
        job.steps.note("uploaded values", _agreement.digest(repr([b.digest for b in args]).encode()))
        for host in hosts:
            job.steps.note("CPU tensors", _agreement.digest(host.reshape(-1).view(np.uint8)))
        job.steps.begin()

    def end(self) -> None:
        """Note that the call was dispatched."""
        self._job.watchdog.leave()


def require_sound(hlo: str) -> None:
    """Refuse collectives that compute wrong numbers between CPU processes; see mesh/platform/_gloo.py.

    Args:
        hlo: text of the compiled program.

    Raises:
        SpmdError: the program contains a reduce-scatter.
    """
    if " reduce-scatter(" in hlo or " reduce-scatter-start(" in hlo:
        raise SpmdError(
            message(
                "the compiled program contains a reduce-scatter, which computes wrong numbers between CPU processes (jax#40830)",
                "gloo's reduce-scatter is wrong for chunks of 4 MiB and more, without an error",
                fix="run on one process, or on another platform",
            )
        )


def watched() -> JobChecks | None:
    """The checks for a new program, or None in a single process."""
    job = _join.job()
    return None if job is None else JobChecks(job)


def _layout(buffer: Buffer) -> str:
    annotation = buffer.annotation
    placed = "" if annotation is None else str(annotation.partition_spec)
    return f"{buffer.dtype}{list(buffer.shape)}{placed}"


def _short(value: Any) -> str:
    """The text of a value; if it is long, its first characters and a digest of all."""
    text = str(value)
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}... ({len(text)} characters, digest {hashlib.sha256(text.encode()).hexdigest()[:12]})"
