"""A job as a script for TPU VMs: it creates them, copies or fetches the code, installs packages, and starts the program over SSH.

Each host finds its place in the job from the metadata server of its TPU VM.
"""

from __future__ import annotations

import shlex

from mesh.job._place import PREEMPTED
from mesh.schedulers._scheduled_job import ScheduledJob, git_fetch_commands, virtual_environment_commands


def tpu_vm(job: ScheduledJob) -> tuple[str, str]:
    """Name and text of the job file."""
    code = 'cd "$HOME/code"'
    install = [*_unpacked(job), *_mounted(job), *(virtual_environment_commands(job.setup.install) if job.setup.install is not None else [])]
    activate = [". ~/env/bin/activate"] if job.setup.install is not None else []
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.exports.items()]
    run = [code, *activate, *_secrets(job), *exports, f"exec {job.line}"]
    text = f"""#!/bin/bash
# {job.name}.sh TPU_NAME ZONE
# Creates the TPU VM if it does not exist, copies the program to it, and runs it on every host. To delete the VM afterwards:
# gcloud compute tpus tpu-vm delete TPU_NAME --zone ZONE
set -euo pipefail
name=${{1:?TPU_NAME}} zone=${{2:?ZONE}}
tpu() {{ gcloud compute tpus tpu-vm "$1" "$name" --zone "$zone" "${{@:2}}"; }}
on_every_host() {{ tpu ssh --worker=all --command "$1"; }}

{_create(job)}{_copied(job)}
on_every_host {shlex.quote(_script(install))}

failures=0
while true; do
  code=0
  on_every_host {shlex.quote(_script(run))} || code=$?
  failures=$((failures + 1))
  if [ "$code" -eq 0 ] || [ "$code" -eq {PREEMPTED} ] || [ "$failures" -gt {job.restarts} ]; then exit "$code"; fi
done
"""
    return f"{job.name}.sh", text


def _create(job: ScheduledJob) -> str:
    tpu = job.setup.resources.tpu
    if tpu is None:
        return ""
    # With the scope cloud-platform the VM can read secrets and buckets under its own service account.
    options = f"--accelerator-type {tpu.accelerator} --version {tpu.runtime_version} --scopes cloud-platform"
    return f"tpu describe > /dev/null 2>&1 || tpu create {options}\n"


def _copied(job: ScheduledJob) -> str:
    if job.setup.code.kind != "here":
        return ""
    lines = [
        "archive=$(mktemp)",
        "trap 'rm -f \"$archive\"' EXIT",
        "if git rev-parse --quiet --is-inside-work-tree > /dev/null 2>&1; then",  # files that git ignores are not copied
        '  git ls-files -z --cached --others --exclude-standard | tar czf "$archive" --null -T -',
        "else",
        '  tar czf "$archive" --exclude=./.venv --exclude=./env .',
        "fi",
        'gcloud compute tpus tpu-vm scp "$archive" "$name":code.tgz --zone "$zone" --worker=all',
    ]
    return "".join(f"{line}\n" for line in lines)


def _unpacked(job: ScheduledJob) -> list[str]:
    if job.setup.code.kind == "git":
        return git_fetch_commands(job.setup.code, '"$HOME/code"')
    return ['mkdir -p "$HOME/code"', 'cd "$HOME/code"', 'tar xzf "$HOME/code.tgz"']


def _mounted(job: ScheduledJob) -> list[str]:
    found: list[str] = []
    for each in job.setup.volumes:
        path = shlex.quote(each.path)
        found.append(f"mountpoint -q {path} || {{ sudo mkdir -p {path} && sudo mount -t nfs {shlex.quote(each.source)} {path}; }}")
    return found


def _secrets(job: ScheduledJob) -> list[str]:
    """Lines that read secrets from Secret Manager on the host. Assignment and export are separate, because a failure in `export X=$(...)`
    would not end the script."""
    found: list[str] = []
    for name in job.setup.secrets:
        found += [f'{name}="$(gcloud secrets versions access latest --secret={name})"', f"export {name}"]
    return found


def _script(lines: list[str]) -> str:
    return "\n".join(["set -eu", *lines])
