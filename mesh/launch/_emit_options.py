"""The launcher's options for `--emit`: resources and setup of a scheduler's hosts."""

from __future__ import annotations

import argparse
import re

from mesh._mesh_errors import DeviceError
from mesh.schedulers._scheduled_job import Code, Resources, Setup, Volume
from mesh.schedulers._tpu_slice import TpuSlice

KINDS = ("slurm", "jobset", "tpu-vm", "skypilot")

# option -> the schedulers for which it has an effect
_SCHEDULERS: dict[str, tuple[str, ...]] = {
    "name": KINDS,
    "image": ("jobset", "skypilot"),
    "code": KINDS,
    "install": KINDS,
    "secret": KINDS,
    "volume": ("jobset", "tpu-vm", "skypilot"),
    "tpu": ("jobset", "tpu-vm", "skypilot"),
    "gpus": ("slurm", "jobset", "skypilot"),
    "cpus": ("slurm", "jobset", "skypilot"),
    "memory": ("slurm", "jobset", "skypilot"),
    "sbatch": ("slurm",),
}
_CODE: dict[str, tuple[str, ...]] = {
    "slurm": ("here", "git"),
    "jobset": ("image", "git"),
    "tpu-vm": ("here", "git"),
    "skypilot": ("here", "git", "image"),
}
_INSTALL = "pip install -r requirements.txt"


def add_emit_options(parser: argparse.ArgumentParser) -> None:
    """Add these options to the launcher's parser."""
    group = parser.add_argument_group("options of --emit")
    add = group.add_argument
    add("--name", help="name of the job and the file (default: from the program)")
    add("--image", metavar="NAME", help="container image in which the program runs (jobset, skypilot)")
    add("--code", metavar="HOW", help="source of the code: here (this folder), image (part of the image) or git+URL@REF")
    add("--install", metavar="LINE", help=f"run on each host before the program (tpu-vm, skypilot without an image: {_INSTALL})")
    add("--secret", action="append", metavar="NAME", help="environment variable whose value the scheduler stores; repeatable")
    add(
        "--volume",
        action="append",
        metavar="FROM:PATH",
        help="mount a claim, bucket or NFS share for checkpoints; repeatable",
    )
    add("--tpu", metavar="SLICE", help="TPU slice, as in v5e:4x4; also determines the number of hosts")
    add("--gpus", metavar="KIND:N", help="GPUs of each host, as in H100:8")
    add("--cpus", type=int, metavar="N", help="cores of each host")
    add("--memory", type=int, metavar="GIB", help="memory of each host, in GiB")
    add("--sbatch", action="append", metavar="NAME=VALUE", help="additional SLURM directive, as in partition=gpu; repeatable")


def setup_of(given: argparse.Namespace) -> tuple[Setup, str | None]:
    """The setup that the options describe, and an error line or None."""
    kind: str | None = given.emit
    for option, kinds in _SCHEDULERS.items():
        if getattr(given, option) is not None and kind not in kinds:
            return Setup(), f"--{option} has no effect without --emit {' or '.join(kinds)}"
    if kind is None:
        return Setup(), None
    if kind == "jobset" and given.image is None:
        return Setup(), "--emit jobset needs --image, a container with Python and this package"
    code = _code(given.code or ("image" if given.image is not None and kind == "jobset" else "here"))
    if code is None:
        return Setup(), f"--code is here, image or git+URL@REF, not {given.code!r}"
    if code.kind not in _CODE[kind]:
        return Setup(), f"--code {code.kind} is not possible with --emit {kind}, only {' and '.join(_CODE[kind])}"
    problem = _text_problem(given) or _resource_problem(given)
    if problem:
        return Setup(), problem
    default = _INSTALL if kind in ("tpu-vm", "skypilot") and given.image is None else None
    volumes = tuple(Volume(*text.rpartition(":")[::2]) for text in given.volume or ())
    return Setup(
        given.image,
        code,
        given.install or default,
        tuple(given.secret or ()),
        volumes,
        Resources(TpuSlice.parse(given.tpu) if given.tpu else None, _gpus(given.gpus), given.cpus, given.memory),
        tuple(given.sbatch or ()),
        given.name,
    ), None


def _code(text: str) -> Code | None:
    try:
        return Code.parse(text)
    except ValueError:
        return None


def _gpus(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    kind, _, count = text.partition(":")
    return kind, int(count)


def _text_problem(given: argparse.Namespace) -> str | None:
    if given.name is not None and not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", given.name):
        return f"--name takes up to 40 lower-case letters, digits and dashes, beginning with a letter, not {given.name!r}"
    for name in given.secret or ():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            shown = f"{name.partition('=')[0]}=..." if "=" in name else name
            return f"--secret takes the name of a variable without its value, not {shown!r}"
    for text in given.volume or ():
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            return f"--volume takes a source and a folder, as in checkpoints:/checkpoints, not {text!r}"
    for text in given.sbatch or ():
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", text):
            return f"--sbatch takes a directive without its dashes, as in partition=gpu, not {text!r}"
    return None


def _resource_problem(given: argparse.Namespace) -> str | None:
    if given.tpu is not None and given.gpus is not None:
        return "--tpu and --gpus exclude each other: a host has TPUs or GPUs"
    if given.gpus is not None and not re.fullmatch(r"[A-Za-z][\w-]*:[1-9]\d*", given.gpus):
        return f"--gpus takes a type of GPU and its number on each host, as in H100:8, not {given.gpus!r}"
    for option, value in {"--cpus": given.cpus, "--memory": given.memory}.items():
        if value is not None and value < 1:
            return f"{option} must be at least 1, got {value}"
    if given.tpu is None:
        return None
    try:
        hosts = TpuSlice.parse(given.tpu).num_hosts
    except DeviceError as error:
        what, fix = str(error).splitlines()
        return f"--tpu {what}: {fix.strip().removeprefix('fix: ')}"
    if given.processes is not None and given.processes != hosts:
        return f"-n {given.processes} does not fit --tpu {given.tpu}, which has {hosts} host{'s' * (hosts != 1)}: omit -n"
    return None
