"""A step's executables as one file, which belongs to whoever saved it: for another process, a pod, a machine of CI.

    train_step(x, y)
    train_step.save("train_step.programs")

    train_step.load("train_step.programs")  # in another process: nothing is compiled
    train_step(x, y)

A zip archive: `manifest.json` says what the executables need, with a checksum of each part; `program0.bin` is an executable as XLA writes
it, `program0.call` what jax knows of it. The last two are code: docs/security.md says who is trusted. Each is found by the digest of
the traced program (Note [Digests of programs]), so the first call traces; what it finds is exact, or it is compiled.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mesh.job._join import job, program_environment
from spmd.base._errors import SpmdError, message
from spmd.base._jax_executables import Written, device_ids, packed_call, written
from spmd.base._program_files import machine_name
from spmd.program.xla._cached_executables import CachedExecutable
from spmd.program.xla._digest import code_digest

if TYPE_CHECKING:
    from spmd.program._program import Program

_FORMAT = "spmd executables 1"


def save_executables(path: Path, name: str, programs: Iterable[Program], client: Any) -> None:
    """Write the executables of these programs, whole or not at all.

    Raises:
        SpmdError: one of them calls back into Python; this process is one of a job.
    """
    _require_alone(name, "saved")
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            manifest: dict[str, Any] = {"format": _FORMAT, "name": name, "facts": _facts(client), "programs": []}
            for number, program in enumerate(programs):
                if program.digest is None:
                    raise _unkept(name, program.no_digest)
                try:
                    call = packed_call(program.compiled)
                except ValueError as error:
                    raise _unkept(name, str(error)) from error
                executable = (program.compilation.read_from or written(program.compiled)).plain()
                parts = {f"program{number}.call": call, f"program{number}.bin": executable}
                for part, content in parts.items():
                    archive.writestr(part, content)
                sums = {part: hashlib.sha256(content).hexdigest() for part, content in parts.items()}
                manifest["programs"].append({"digest": program.digest, "devices": device_ids(program.compiled), "parts": sums})
            archive.writestr("manifest.json", json.dumps(manifest, indent=1))
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def load_executables(path: Path, name: str, client: Any) -> dict[str, CachedExecutable]:
    """The executables of a file by digest. They are being loaded by other threads when this returns.

    Raises:
        SpmdError: it is no such file, or damaged; it is another function's; it was saved by other versions or for other devices.
        FileNotFoundError: the file does not exist.
    """
    _require_alone(name, "loaded")
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
                raise _foreign(path, f"its format is {manifest.get('format') if isinstance(manifest, dict) else None!r}")
            _require_fit(path, name, manifest, _facts(client))
            found = {item["digest"]: _checked(path, archive, item) for item in manifest["programs"]}
    except (SpmdError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:  # zipfile, zlib and json raise a dozen classes for damaged bytes
        raise _foreign(path, f"{type(error).__name__}: {error}") from error
    for kept in found.values():
        kept.begin(client)
    return found


def _checked(path: Path, archive: zipfile.ZipFile, item: dict[str, Any]) -> CachedExecutable:
    call, executable = (_part(path, archive, part, item["parts"][part]) for part in item["parts"])
    return CachedExecutable(call, item["devices"], Written(executable))


def _part(path: Path, archive: zipfile.ZipFile, part: str, checksum: str) -> bytes:
    content = archive.read(part)
    if hashlib.sha256(content).hexdigest() != checksum:
        raise _foreign(path, f"{part} has another checksum than when it was saved")
    return content


def _facts(client: Any) -> dict[str, str]:
    """What must be the same where executables are saved and where they are loaded."""
    devices = client.devices()
    facts = {
        **{package: version(package) for package in ("jax", "jaxlib")},
        "torch": torch.__version__,
        "the code of spmd": code_digest()[:16],
        "platform": f"{client.platform} {client.platform_version}",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "flags": str(sorted(program_environment().items())),
    }
    return facts | ({"processor": machine_name()} if client.platform == "cpu" else {})


def _require_fit(path: Path, name: str, manifest: dict[str, Any], here: dict[str, str]) -> None:
    if manifest["name"] != name:
        raise SpmdError(
            message(f"{path} contains programs of {manifest['name']}, not of {name}", fix=f"{manifest['name']}.load({str(path)!r})")
        )
    there: dict[str, str] = manifest["facts"]
    differing = [f"{fact}: {there.get(fact)} there, {value} here" for fact, value in here.items() if there.get(fact) != value]
    if differing:
        raise SpmdError(
            message(
                f"{path} does not match this process",
                *differing,
                fix=f"call {name}(...) once here, without the file, and {name}.save({str(path)!r})",
            )
        )


def _require_alone(name: str, done: str) -> None:
    if job() is not None:
        raise SpmdError(
            message(
                f"the programs of {name} are not {done} in a job",
                "the processes of a job compare their lowered programs before they run, and share a cache",
                fix="spmd launch --job-dir DIR, which the next attempt reads; or spmd.configure(cache_dir=...) in all processes",
            )
        )


def _unkept(name: str, why: str) -> SpmdError:
    return SpmdError(message(f"a program of {name} cannot be saved", f"it holds {why}", fix="remove the Python callbacks from it"))


def _foreign(path: Path, why: str) -> SpmdError:
    return SpmdError(message(f"{path} is not a complete file of programs", why, fix="save it again: step.save(path)"))


__all__ = ["load_executables", "save_executables"]
