"""A job as a script for TPU VMs: it makes them, copies or fetches the code, installs, and starts the program on every host by SSH.

TPU VMs know themselves which of the hosts they are (their metadata server says so).
"""

from __future__ import annotations

import shlex

from mesh.job._place import PREEMPTED
from mesh.schedulers._scheduled_job import ScheduledJob, environment_of_its_own, fetched


def tpu_vm(job: ScheduledJob) -> tuple[str, str]:
    """Name and text of the file."""
    code = 'cd "$HOME/code"'
    install = [*_unpacked(job), *_mounted(job), *(environment_of_its_own(job.setup.install) if job.setup.install is not None else [])]
    activate = [". ~/env/bin/activate"] if job.setup.install is not None else []
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.exports.items()]
    run = [code, *activate, *_secrets(job), *exports, f"exec {job.line}"]
    text = f"""#!/bin/bash
# {job.name}.sh TPU_NAME ZONE
# Makes the TPU VM if there is none of that name, brings the program there, and runs it on every host. The VM stays:
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
    # cloud-platform: the VM reads secrets and buckets under its own service account.
    options = f"--accelerator-type {tpu.accelerator} --version {tpu.image} --scopes cloud-platform"
    return f"tpu describe > /dev/null 2>&1 || tpu create {options}\n"


def _copied(job: ScheduledJob) -> str:
    if job.setup.code.kind != "here":
        return ""
    lines = [
        "archive=$(mktemp)",
        "trap 'rm -f \"$archive\"' EXIT",
        "if git rev-parse --quiet --is-inside-work-tree > /dev/null 2>&1; then",  # what git ignores stays here
        '  git ls-files -z --cached --others --exclude-standard | tar czf "$archive" --null -T -',
        "else",
        '  tar czf "$archive" --exclude=./.venv --exclude=./env .',
        "fi",
        'gcloud compute tpus tpu-vm scp "$archive" "$name":code.tgz --zone "$zone" --worker=all',
    ]
    return "".join(f"{line}\n" for line in lines)


def _unpacked(job: ScheduledJob) -> list[str]:
    if job.setup.code.kind == "git":
        return fetched(job.setup.code, '"$HOME/code"')
    return ['mkdir -p "$HOME/code"', 'cd "$HOME/code"', 'tar xzf "$HOME/code.tgz"']


def _mounted(job: ScheduledJob) -> list[str]:
    found: list[str] = []
    for each in job.setup.volumes:
        path = shlex.quote(each.path)
        found.append(f"mountpoint -q {path} || {{ sudo mkdir -p {path} && sudo mount -t nfs {shlex.quote(each.source)} {path}; }}")
    return found


def _secrets(job: ScheduledJob) -> list[str]:
    """Read on the host from Secret Manager, in two steps: a failure in `export X=$(...)` would not end the script."""
    found: list[str] = []
    for name in job.setup.secrets:
        found += [f'{name}="$(gcloud secrets versions access latest --secret={name})"', f"export {name}"]
    return found


def _script(lines: list[str]) -> str:
    return "\n".join(["set -eu", *lines])
