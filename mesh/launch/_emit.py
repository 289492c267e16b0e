"""`spmd launch --emit`: writes the job of a command line as the file of a scheduler (`mesh.schedulers`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mesh.job._timeouts import JOIN_S
from mesh.launch._launch_options import Options
from mesh.schedulers._jobset import jobset
from mesh.schedulers._scheduled_job import ScheduledJob
from mesh.schedulers._skypilot import skypilot
from mesh.schedulers._slurm import slurm
from mesh.schedulers._tpu_vm import tpu_vm

WRITERS: dict[str, Callable[[ScheduledJob], tuple[str, str]]] = {"slurm": slurm, "jobset": jobset, "tpu-vm": tpu_vm, "skypilot": skypilot}


def emit(options: Options) -> list[Path]:
    """Write the file for the scheduler `options.emit` into `options.out`.

    Returns:
        The paths written.
    """
    assert options.emit is not None
    options.out.mkdir(parents=True, exist_ok=True)
    name, text = WRITERS[options.emit](scheduled_job(options))
    path = options.out / name
    path.write_text(text, encoding="utf-8")
    if name.endswith(".sh"):
        path.chmod(0o755)
    return [path]


def scheduled_job(options: Options) -> ScheduledJob:
    """The job for a scheduler's file, in which each process joins the job and runs the program."""
    timeout = f"{max(JOIN_S, options.timeout_s):g}"
    exports = {"SPMD_WATCHDOG": f"{options.watchdog_s:g}", "SPMD_FIRST_STEP": f"{options.first_step_s:g}"}
    if options.directory is not None:
        exports["SPMD_JOB_DIR"] = str(options.directory)
    return ScheduledJob(
        name=options.setup.name or _job_name(options),
        command=("python", "-m", "mesh.launch", "--join", "--timeout", timeout, "--", *options.program),
        num_hosts=len(options.hosts) or options.processes,
        processes=options.processes,
        restarts=options.restarts,
        exports=exports,
        setup=options.setup,
    )


def _job_name(options: Options) -> str:
    """Name of the job from its program, as a DNS label of at most 40 characters, which leaves room for the numbers of pods."""
    program = options.program[1] if options.program[0] == "-m" else Path(options.program[0]).stem
    name = re.sub(r"[^a-z0-9]+", "-", program.lower()).strip("-")
    return (name if name[:1].isalpha() else f"job-{name}")[:40].strip("-")
