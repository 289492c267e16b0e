"""Checks of this machine and its Python environment, for `spmd doctor`.

Every check is a value, and nothing here prints. Versions are read without importing the packages, so a broken package is reported
instead of raising an error.

    for problem in doctor.examine().problems:
        print(problem.name, problem.problem, problem.fix)
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import mesh
from spmd.base._program_files import default_folder

# The lower bounds of pyproject.toml; tests/test_doctor.py compares the two.
SUPPORTED = {"python": ">=3.11,<3.15", "torch": ">=2.11", "jax": ">=0.10", "libtpu": ">=0.0.42"}

# Distributions that take PyTorch's only slot for an out-of-tree device. PyTorch loads such backends when it is imported, if
# they declare an entry point, so merely installing one can cause a conflict.
CONFLICTING = ("torch_xla", "torchax", "torch_tpu")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was checked.
        found: what was found, such as a version.
        supported: the supported versions; empty if there is no restriction.
        problem: what is wrong; None if nothing is.
        fix: how to solve the problem; None without one.
    """

    name: str
    found: str
    supported: str = ""
    problem: str | None = None
    fix: str | None = None

    def __post_init__(self) -> None:
        if (self.problem is None) != (self.fix is None):
            raise ValueError(f"check {self.name!r} needs both a problem and a fix, or neither")


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Devices of one kind that jax sees. `memory_bytes` is per device; None if the platform does not report it."""

    platform: str
    kind: str
    num_devices: int
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of `spmd doctor`."""

    checks: tuple[Check, ...]
    devices: tuple[DeviceGroup, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.problem is not None)


def check_version(name: str, found: str | None, supported: str) -> Check:
    """Check a required package whose version must be in `supported`."""
    install = f"pip install '{name}{supported}'" if name != "python" else f"make a new environment with Python {supported}"
    if found is None:
        return Check(name=name, found="not installed", supported=supported, problem=f"{name} is not installed", fix=install)
    if not SpecifierSet(supported).contains(found, prereleases=True):
        return Check(name=name, found=found, supported=supported, problem=f"{name} {found} is outside {supported}", fix=install)
    return Check(name=name, found=found, supported=supported)


def check_libtpu(found: str | None) -> Check:
    """Check the TPU compiler. Only ahead-of-time compilation for TPU pods needs it, so its absence is not a problem."""
    if found is None:
        return Check(name="libtpu", found="not installed (plans TPU pods: pip install 'spmd-mesh[tpu]')", supported=SUPPORTED["libtpu"])
    return check_version("libtpu", found, SUPPORTED["libtpu"])


def check_conflict(name: str, found: str | None) -> Check:
    """Check for a package that claims the same device slot, so that both should not be in one environment."""
    if found is None:
        return Check(name=name, found="not installed", supported="not installed")
    return Check(
        name=name,
        found=found,
        supported="not installed",
        problem=f"{name} claims the device slot of PyTorch that 'jax' needs; a process can use only one of them",
        fix=f"pip uninstall {name}, or install it in another environment",
    )


def check_host(num_cores: int, memory_bytes: int | None) -> Check:
    """Report the number of usable cores and the memory of this machine."""
    memory = "memory unknown" if memory_bytes is None else f"{memory_bytes / 2**30:.0f} GiB memory"
    return Check(name="host", found=f"{num_cores} core{'s' if num_cores != 1 else ''}, {memory}")


def check_cached_programs(folder: Path) -> Check:
    """Report number and total size of the compiled programs in a cache folder."""
    sizes = [file.stat().st_size for file in folder.glob("machine-*/*.program")]
    return Check(name="cached programs", found=f"{len(sizes)} in {folder}, {sum(sizes) / 2**20:.1f} MiB")


def group_devices(devices: Iterable[mesh.Device]) -> tuple[DeviceGroup, ...]:
    """Count devices by platform and kind, in order of first appearance."""
    groups: dict[tuple[str, str], list[mesh.Device]] = {}
    for device in devices:
        groups.setdefault((device.platform, device.device_kind), []).append(device)
    return tuple(
        DeviceGroup(platform=key[0], kind=key[1], num_devices=len(members), memory_bytes=memory_bytes(members[0]))
        for key, members in groups.items()
    )


def memory_bytes(device: mesh.Device) -> int | None:
    """Memory in bytes that jax may use on `device`; None if its platform has no statistics (cpu, ahead-of-time devices)."""
    read_stats: Callable[[], dict[str, Any] | None] | None = getattr(device, "memory_stats", None)
    if read_stats is None:
        return None
    try:
        stats = read_stats()
    except (RuntimeError, NotImplementedError):
        return None
    limit = (stats or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, read without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def jaxlib_range() -> str:
    """The specifier of the jaxlib versions that the installed jax requires; empty (any version) if it has none."""
    try:
        lines = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    needed = [one for one in map(Requirement, lines) if one.name == "jaxlib" and one.marker is None]
    return str(needed[0].specifier) if needed else ""


def host_memory_bytes() -> int | None:
    """Physical memory of this machine in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def num_usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def quiet_stderr() -> Generator[None]:
    """While active, discard stderr, including that of C++: on a machine without a TPU, libtpu logs there that it finds none."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def see_devices() -> tuple[tuple[DeviceGroup, ...], Check | None]:
    """The devices that jax lists, or a failed check with the reason why it cannot."""
    try:
        with quiet_stderr():
            return group_devices(mesh.devices()), None
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        problem = f"jax cannot list its devices: {reason}"
        return (), Check(name="devices", found="none", problem=problem, fix="set JAX_PLATFORMS=cpu to run without the accelerator")


def examine() -> Report:
    """Examine this machine and this Python environment."""
    devices, failure = see_devices()
    checks = [
        check_version("python", platform.python_version(), SUPPORTED["python"]),
        check_version("torch", installed_version("torch"), SUPPORTED["torch"]),
        check_version("jax", installed_version("jax"), SUPPORTED["jax"]),
        check_version("jaxlib", installed_version("jaxlib"), jaxlib_range()),
        check_libtpu(installed_version("libtpu")),
        Check(name="spmd", found=installed_version("spmd-mesh") or "from a source tree, not installed"),
        *(check_conflict(name, installed_version(name)) for name in CONFLICTING),
        check_host(num_usable_cores(), host_memory_bytes()),
        check_cached_programs(default_folder()),
    ]
    return Report(checks=(*checks, failure) if failure else tuple(checks), devices=devices)
