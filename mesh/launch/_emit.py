"""Files for schedulers: the job of a command line, written down for SLURM, GKE's JobSet, TPU VMs or SkyPilot.

Each starts `spmd launch --join program` once per process; where a process stands is read there (`mesh/job/_clusters.py`), or
passed on by the file. A preempted job (exit code 75) is put back into the queue.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from mesh.job._place import PREEMPTED
from mesh.job._timeouts import DEFAULT_PORT, JOIN_S
from mesh.launch._launch_options import Options


def emit(options: Options) -> list[Path]:
    """Write the files for `options.emit` into `options.out`.

    Returns:
        What was written.
    """
    assert options.emit is not None
    options.out.mkdir(parents=True, exist_ok=True)
    name, text = WRITERS[options.emit](options)
    path = options.out / name
    path.write_text(text, encoding="utf-8")
    if name.endswith(".sh"):
        path.chmod(0o755)
    return [path]


def _command(options: Options) -> str:
    """What each process runs."""
    words = ["python", "-m", "mesh.launch", "--join", "--timeout", f"{max(JOIN_S, options.timeout_s):g}", "--", *options.program]
    return shlex.join(words)


def _exports(options: Options) -> dict[str, str]:
    """What each process finds in its environment beyond what the scheduler sets."""
    found = {"SPMD_WATCHDOG": f"{options.watchdog_s:g}", "SPMD_FIRST_STEP": f"{options.first_step_s:g}"}
    if options.directory is not None:
        found["SPMD_JOB_DIR"] = str(options.directory)
    return found


def _job_name(options: Options) -> str:
    program = options.program[1] if options.program[0] == "-m" else Path(options.program[0]).stem
    return re.sub(r"[^a-z0-9]+", "-", program.lower()).strip("-") or "job"


def _num_hosts(options: Options) -> int:
    return len(options.hosts) or options.processes


def _slurm(options: Options) -> tuple[str, str]:
    nodes = _num_hosts(options)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in _exports(options).items())
    text = f"""#!/bin/bash
#SBATCH --job-name={_job_name(options)}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={options.processes // nodes}
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM reaches all processes two minutes before the time is up: they agree on a step, save, and leave with {PREEMPTED}.
#SBATCH --signal=TERM@120
{exports}
failures=0
while true; do
  srun --kill-on-bad-exit=1 {_command(options)}
  code=$?
  if [ "$code" -eq {PREEMPTED} ]; then exec scontrol requeue "$SLURM_JOB_ID"; fi
  failures=$((failures + 1))
  if [ "$code" -eq 0 ] || [ "$failures" -gt {options.restarts} ]; then exit "$code"; fi
done
"""
    return f"{_job_name(options)}.sbatch", text


def _jobset(options: Options) -> tuple[str, str]:
    name, count = _job_name(options), options.processes
    program = "".join(f"                - {_yaml(word)}\n" for word in shlex.split(_command(options)))
    exports = "".join(
        f"                - name: {key}\n                  value: {_yaml(value)}\n" for key, value in _exports(options).items()
    )
    text = f"""apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: {options.restarts}
  replicatedJobs:
    - name: host
      replicas: 1
      template:
        spec:
          parallelism: {count}
          completions: {count}
          completionMode: Indexed
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 120
              containers:
              - name: program
                image: IMAGE  # the image that holds the program and this package
                command:
{program}                env:
                - name: SPMD_PROCESS
                  valueFrom:
                    fieldRef:
                      fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
                - name: SPMD_PROCESSES
                  value: "{count}"
                - name: SPMD_LOCAL_PROCESSES
                  value: "1"
                - name: SPMD_COORDINATOR
                  value: {name}-host-0-0.{name}:{DEFAULT_PORT}
{exports}                ports:
                - containerPort: {DEFAULT_PORT}
                - containerPort: {DEFAULT_PORT + 1}
"""
    return f"{name}.jobset.yaml", text


def _tpu_vm(options: Options) -> tuple[str, str]:
    exports = " ".join(f"{key}={shlex.quote(value)}" for key, value in _exports(options).items())
    command = f"cd {shlex.quote(str(Path.cwd()))} && {exports} {_command(options)}"
    text = f"""#!/bin/bash
# Runs the program on every host of a TPU VM; TPU_WORKER_ID and TPU_WORKER_HOSTNAMES say there which is which.
# usage: {_job_name(options)}.sh TPU_NAME ZONE
set -euo pipefail
name=$1 zone=$2
command={shlex.quote(command)}
failures=0
while true; do
  code=0
  gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "$command" || code=$?
  failures=$((failures + 1))
  if [ "$code" -eq 0 ] || [ "$code" -eq {PREEMPTED} ] || [ "$failures" -gt {options.restarts} ]; then exit "$code"; fi
done
"""
    return f"{_job_name(options)}.sh", text


def _skypilot(options: Options) -> tuple[str, str]:
    nodes = _num_hosts(options)
    exports = "".join(f"  {key}: {_yaml(value)}\n" for key, value in _exports(options).items())
    text = f"""name: {_job_name(options)}
num_nodes: {nodes}
workdir: .
resources:
  accelerators: tpu-v5e-8  # what each host should have
  job_recovery:
    max_restarts_on_errors: {options.restarts}
    recover_on_exit_codes: [{PREEMPTED}]
envs:
{exports}run: |
  export SPMD_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{DEFAULT_PORT}"
  export SPMD_PROCESS="$SKYPILOT_NODE_RANK" SPMD_PROCESSES="$SKYPILOT_NUM_NODES" SPMD_LOCAL_PROCESSES=1 SPMD_JOB_KEY="$SKYPILOT_TASK_ID"
  {_command(options)}
"""
    return f"{_job_name(options)}.sky.yaml", text


def _yaml(text: str) -> str:
    """A YAML string in double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


WRITERS: dict[str, Callable[[Options], tuple[str, str]]] = {
    "slurm": _slurm,
    "jobset": _jobset,
    "tpu-vm": _tpu_vm,
    "skypilot": _skypilot,
}
