"""A job as a SkyPilot task: SkyPilot finds machines in a cloud, copies the folder, and starts the program on each of them."""

from __future__ import annotations

from mesh.job._place import PREEMPTED
from mesh.job._timeouts import DEFAULT_PORT
from mesh.schedulers._scheduled_job import ScheduledJob, indented, quoted, virtual_environment_commands


def skypilot(job: ScheduledJob) -> tuple[str, str]:
    """Name and text of the job file. For SkyPilot a TPU slice is one node, whatever its number of hosts."""
    place = [
        'export SPMD_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n1)":' + str(DEFAULT_PORT),
        'export SPMD_PROCESS="$SKYPILOT_NODE_RANK" SPMD_PROCESSES="$(echo "$SKYPILOT_NODE_IPS" | wc -l)" SPMD_LOCAL_PROCESSES=1',
        'export SPMD_JOB_KEY="$SKYPILOT_TASK_ID"',
    ]
    activate = [". ~/env/bin/activate"] if job.setup.install is not None else []
    setup = ["set -e", *virtual_environment_commands(job.setup.install)] if job.setup.install is not None else []
    secrets = "".join(f"  {name}: null\n" for name in job.setup.secrets)
    mounts = "".join(f"  {quoted(each.path)}:\n    source: {quoted(each.source)}\n    mode: MOUNT\n" for each in job.setup.volumes)
    exports = "".join(f"  {name}: {quoted(value)}\n" for name, value in job.exports.items())
    text = f"""# {_usage(job)}
name: {job.name}
num_nodes: {job.num_hosts if job.setup.resources.tpu is None else 1}
{_workdir(job)}resources:
{_resources(job)}  job_recovery:
    max_restarts_on_errors: {job.restarts}
    recover_on_exit_codes: [{PREEMPTED}]
envs:
{exports}{f"secrets:{chr(10)}{secrets}" if secrets else ""}{f"file_mounts:{chr(10)}{mounts}" if mounts else ""}\
{f"setup: |{chr(10)}{indented(setup, 2)}" if setup else ""}run: |
{indented(["set -e", *activate, *place, job.line], 2)}"""
    return f"{job.name}.sky.yaml", text


def _usage(job: ScheduledJob) -> str:
    return " ".join(["sky jobs launch", *(f"--secret {name}" for name in job.setup.secrets), f"{job.name}.sky.yaml"])


def _workdir(job: ScheduledJob) -> str:
    if job.setup.code.kind == "git":
        return f"workdir:\n  url: {quoted(job.setup.code.url)}\n  ref: {quoted(job.setup.code.ref)}\n"
    return "workdir: .\n" if job.setup.code.kind == "here" else ""


def _resources(job: ScheduledJob) -> str:
    resources, found = job.setup.resources, dict[str, str]()
    if resources.tpu is not None:
        found["accelerators"] = f"tpu-{resources.tpu.accelerator}"
        found["accelerator_args"] = f"{{runtime_version: {resources.tpu.runtime_version}}}"
    if resources.gpus is not None:
        kind, count = resources.gpus
        found["accelerators"] = f"{kind}:{count}"
    if resources.cpus is not None:
        found["cpus"] = f"{resources.cpus}+"
    if resources.memory_gb is not None:
        found["memory"] = f"{resources.memory_gb}+"
    if job.setup.image is not None:
        found["image_id"] = quoted(f"docker:{job.setup.image}")
    return "".join(f"  {name}: {value}\n" for name, value in found.items())
