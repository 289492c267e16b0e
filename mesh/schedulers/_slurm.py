"""A job as an sbatch script: it requests hosts, fetches code and installs packages if needed, and starts the program with srun."""

from __future__ import annotations

import shlex

from mesh.job._place import PREEMPTED
from mesh.schedulers._scheduled_job import ScheduledJob, git_fetch_commands


def slurm(job: ScheduledJob) -> tuple[str, str]:
    """Name and text of the job file. The hosts must share the folder from which it is submitted."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.exports.items()]
    if job.setup.resources.cpus is not None:  # since SLURM 22.05 srun does not inherit --cpus-per-task
        exports.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    text = f"""#!/bin/bash
# {_usage(job)}
{_directives(job)}# SIGTERM reaches all processes two minutes before the time is up: they agree on a step, save, and leave with {PREEMPTED}.
#SBATCH --signal=TERM@120

{_lines([*_secrets(job), *exports])}{_lines(_setup(job))}
failures=0
while true; do
  srun --kill-on-bad-exit=1 {job.line}
  code=$?
  if [ "$code" -eq {PREEMPTED} ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
  failures=$((failures + 1))
  if [ "$code" -eq 0 ] || [ "$failures" -gt {job.restarts} ]; then exit "$code"; fi
done
"""
    return f"{job.name}.sbatch", text


def _usage(job: ScheduledJob) -> str:
    exported = f" ({', '.join(job.setup.secrets)} exported before)" if job.setup.secrets else ""
    return f"sbatch {job.name}.sbatch{exported}"


def _directives(job: ScheduledJob) -> str:
    found = {
        "job-name": job.name,
        "nodes": str(job.num_hosts),
        "ntasks-per-node": str(job.processes // job.num_hosts),
        "output": f"{job.name}-%j.log",
    }
    resources = job.setup.resources
    if resources.cpus is not None:
        found["cpus-per-task"] = str(max(1, resources.cpus // (job.processes // job.num_hosts)))
    if resources.memory_gb is not None:
        found["mem"] = f"{resources.memory_gb}G"
    if resources.gpus is not None:
        kind, count = resources.gpus
        found["gpus-per-node"] = f"{kind.lower()}:{count}"
    for directive in job.setup.directives:
        name, _, value = directive.partition("=")
        found[name] = value
    lines = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in found.items()]
    return _lines([*lines, "#SBATCH --requeue", "#SBATCH --open-mode=append"])


def _secrets(job: ScheduledJob) -> list[str]:
    """Lines that end the job at once if a secret is missing from the environment, which sbatch passes on."""
    return [f': "${{{name}:?export it before sbatch}}"' for name in job.setup.secrets]


def _setup(job: ScheduledJob) -> list[str]:
    """Lines that fetch and install before srun, once for the whole job, since the hosts share the folder."""
    lines = ['cd "$SLURM_SUBMIT_DIR" || exit']
    if job.setup.code.kind == "git":
        lines += [f"{command} || exit" for command in git_fetch_commands(job.setup.code, f"{job.name}-code")]
    if job.setup.install is not None:
        lines += ["[ -d env ] || python3 -m venv env || exit", ". env/bin/activate", f"{job.setup.install} || exit"]
    return lines


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
