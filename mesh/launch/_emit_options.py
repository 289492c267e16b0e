"""The part of the launcher's command line that `--emit` reads: what the hosts of a scheduler need."""

from __future__ import annotations

import argparse
import re

from mesh._mesh_errors import DeviceError
from mesh.schedulers._scheduled_job import Code, Resources, Setup, Volume
from mesh.schedulers._tpu_slice import TpuSlice

KINDS = ("slurm", "jobset", "tpu-vm", "skypilot")

# option -> the kinds of files that it means something in
_MEANS: dict[str, tuple[str, ...]] = {
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
    group = parser.add_argument_group("what --emit writes into the file")
    add = group.add_argument
    add("--name", help="of the job and the file (default: the program's)")
    add("--image", metavar="NAME", help="the container that the program runs in (jobset, skypilot)")
    add("--code", metavar="HOW", help="how the program gets there: here (this folder), image (it holds it) or git+URL@REF")
    add("--install", metavar="LINE", help=f"run on each host before the program (tpu-vm, skypilot without an image: {_INSTALL})")
    add("--secret", action="append", metavar="NAME", help="a variable whose value the scheduler keeps; may be given again")
    add("--volume", action="append", metavar="FROM:PATH", help="storage for checkpoints: a claim, a bucket or an NFS share as a folder")
    add("--tpu", metavar="SLICE", help="TPU chips, as v5e:4x4; says the number of hosts too")
    add("--gpus", metavar="KIND:N", help="GPUs of each host, as H100:8")
    add("--cpus", type=int, metavar="N", help="cores of each host")
    add("--memory", type=int, metavar="GIB", help="memory of each host")
    add("--sbatch", action="append", metavar="NAME=VALUE", help="one more directive of SLURM, as partition=gpu; may be given again")


def setup_of(given: argparse.Namespace) -> tuple[Setup, str | None]:
    """What the options say, and what is wrong with them."""
    kind: str | None = given.emit
    for option, kinds in _MEANS.items():
        if getattr(given, option) is not None and kind not in kinds:
            return Setup(), f"--{option} means nothing without --emit {' or '.join(kinds)}"
    if kind is None:
        return Setup(), None
    if kind == "jobset" and given.image is None:
        return Setup(), "--emit jobset needs --image: the container that holds Python and this package"
    code = _code(given.code or ("image" if given.image is not None and kind == "jobset" else "here"))
    if code is None:
        return Setup(), f"--code is here, image or git+URL@REF, not {given.code!r}"
    if code.kind not in _CODE[kind]:
        return Setup(), f"--code {code.kind} is not possible with --emit {kind}: one of {', '.join(_CODE[kind])} is"
    fault = _fault_of_words(given) or _fault_of_resources(given)
    if fault:
        return Setup(), fault
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


def _fault_of_words(given: argparse.Namespace) -> str | None:
    if given.name is not None and not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", given.name):
        return f"--name is up to 40 lower case letters, digits and dashes, a letter first, not {given.name!r}"
    for name in given.secret or ():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            return f"--secret is the name of a variable without its value, not {name.partition('=')[0]!r} and more"
    for text in given.volume or ():
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            return f"--volume is a source and a folder, as in checkpoints:/checkpoints, not {text!r}"
    for text in given.sbatch or ():
        if not re.fullmatch(r"[a-z][a-z-]*(=\S+)?", text):
            return f"--sbatch is a directive without its dashes, as in partition=gpu, not {text!r}"
    return None


def _fault_of_resources(given: argparse.Namespace) -> str | None:
    if given.tpu is not None and given.gpus is not None:
        return "--tpu and --gpus are both given: a host has one of them"
    if given.gpus is not None and not re.fullmatch(r"[A-Za-z][\w-]*:[1-9]\d*", given.gpus):
        return f"--gpus is a kind and how many of it each host has, as in H100:8, not {given.gpus!r}"
    for option, value in {"--cpus": given.cpus, "--memory": given.memory}.items():
        if value is not None and value < 1:
            return f"{option} must be at least 1, got {value}"
    if given.tpu is None:
        return None
    try:
        hosts = TpuSlice.parse(given.tpu).num_hosts
    except DeviceError as error:
        wrong, fix = str(error).splitlines()
        return f"--tpu {wrong}: {fix.strip().removeprefix('fix: ')}"
    if given.processes is not None and given.processes != hosts:
        return f"-n {given.processes} does not fit --tpu {given.tpu}, which has {hosts} host{'s' * (hosts != 1)}: leave -n out"
    return None
