"""A job as a Kubernetes JobSet (jobset.sigs.k8s.io, v1alpha2): one pod per process; all pods are restarted together."""

from __future__ import annotations

from mesh.job._place import PREEMPTED
from mesh.job._timeouts import DEFAULT_PORT
from mesh.schedulers._scheduled_job import ScheduledJob, git_fetch_commands, indented, quoted


def jobset(job: ScheduledJob) -> tuple[str, str]:
    """Name and text of the job file.

    A pod that exits with 75, or whose node is removed, was preempted. The pods are then restarted without counting for `maxRestarts`.
    """
    assert job.setup.image is not None
    text = f"""{_usage(job)}apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  failurePolicy:
    maxRestarts: {job.restarts}
    rules:
    - name: preempted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: host
    replicas: 1
    template:
      spec:
        parallelism: {job.processes}
        completions: {job.processes}
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: program
              operator: In
              values: [{PREEMPTED}]
          - action: FailJob
            onPodConditions:
            - type: DisruptionTarget
              status: "True"
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120
{_node(job)}            containers:
            - name: program
              image: {quoted(job.setup.image)}
              command:
{_command(job)}              env:
{_env(job)}              ports:
              - containerPort: {DEFAULT_PORT}
              - containerPort: {DEFAULT_PORT + 1}
{_resources(job)}{_volumes(job)}"""
    return f"{job.name}.jobset.yaml", text


def _usage(job: ScheduledJob) -> str:
    lines = [f"# kubectl apply -f {job.name}.jobset.yaml"]
    if job.setup.secrets:
        lines.append(f"# before: kubectl create secret generic {job.name} --from-env-file=FILE  # lines {job.setup.secrets[0]}=...")
    return indented(lines, 0)


def _node(job: ScheduledJob) -> str:
    tpu = job.setup.resources.tpu
    if tpu is None:
        return ""
    lines = [
        "nodeSelector:",
        f"  cloud.google.com/gke-tpu-accelerator: {tpu.gke_label}",
        f"  cloud.google.com/gke-tpu-topology: {tpu.topology}",
    ]
    return indented(lines, 12)


def _command(job: ScheduledJob) -> str:
    """The program itself, or a shell that fetches and installs first and then replaces itself with the program."""
    before = git_fetch_commands(job.setup.code, "/tmp/code") if job.setup.code.kind == "git" else []
    before += [job.setup.install] if job.setup.install is not None else []
    if not before:
        return indented([f"- {_literal(word)}" for word in job.command], 14)
    script = "\n".join([*before, f"exec {job.line}"]).replace("$(", "$$(")
    return indented(["- bash", "- -euc", "- |"], 14) + indented([script], 16)


def _literal(text: str) -> str:
    """The text in quotes, with `$(NAME)` escaped, since Kubernetes would replace it with the variable's value."""
    return quoted(text.replace("$(", "$$("))


def _env(job: ScheduledJob) -> str:
    lines: list[str] = []
    from_pod = {
        "SPMD_PROCESS": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "SPMD_JOB_KEY": "metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
        "SPMD_ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
    }
    for name, path in from_pod.items():
        lines += [f"- name: {name}", "  valueFrom:", "    fieldRef:", f"      fieldPath: {path}"]
    values = {
        "SPMD_PROCESSES": str(job.processes),
        "SPMD_LOCAL_PROCESSES": "1",
        "SPMD_COORDINATOR": f"{job.name}-host-0-0.{job.name}:{DEFAULT_PORT}",
        **job.exports,
    }
    for name, value in values.items():
        lines += [f"- name: {name}", f"  value: {_literal(value)}"]
    for name in job.setup.secrets:
        lines += [f"- name: {name}", "  valueFrom:", "    secretKeyRef:", f"      name: {job.name}", f"      key: {name}"]
    return indented(lines, 14)


def _resources(job: ScheduledJob) -> str:
    resources, limits = job.setup.resources, dict[str, str]()
    if resources.tpu is not None:
        limits["google.com/tpu"] = str(resources.tpu.num_chips // resources.tpu.num_hosts)
    if resources.gpus is not None:
        limits["nvidia.com/gpu"] = str(resources.gpus[1])
    if resources.cpus is not None:
        limits["cpu"] = quoted(str(resources.cpus))
    if resources.memory_gb is not None:
        limits["memory"] = f"{resources.memory_gb}Gi"
    # No `requests`: Kubernetes then uses the limits as requests.
    return indented(["resources:", "  limits:", *(f"    {name}: {value}" for name, value in limits.items())], 14) if limits else ""


def _volumes(job: ScheduledJob) -> str:
    if not job.setup.volumes:
        return ""
    mounts = [line for i, each in enumerate(job.setup.volumes) for line in (f"- name: volume-{i}", f"  mountPath: {quoted(each.path)}")]
    claims = [
        line
        for i, each in enumerate(job.setup.volumes)
        for line in (f"- name: volume-{i}", "  persistentVolumeClaim:", f"    claimName: {quoted(each.source)}")
    ]
    return indented(["volumeMounts:", *mounts], 14) + indented(["volumes:", *claims], 12)
