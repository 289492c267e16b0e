"""Saves a step's executables to one file and loads them in another process: on a pod, on a CI machine.

    train_step(x, y)
    train_step.save("train_step.programs")

    train_step.load("train_step.programs")  # in another process: nothing is compiled
    train_step(x, y)

The file is a zip archive. `manifest.json` has the required versions and devices, and a checksum of each part. `program0.bin` is an
executable as XLA serialises it, and `program0.call` is jax's description of its inputs and outputs. Both are code that loading executes:
docs/security.md says who is trusted. An executable is found by the digest of the traced program (Note [Digests of programs]). So the first
call still traces; it uses an executable whose digest is equal, or compiles.
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
from spmd.base._errors import SpmdError, called_at, message
from spmd.base._jax_executables import Written, device_ids, is_in_order_when_read, packed_call, written
from spmd.base._program_files import machine_name
from spmd.base._written_files import file_path, file_to_write
from spmd.program.xla._cached_executables import CachedExecutable
from spmd.program.xla._digest import code_digest

if TYPE_CHECKING:
    from spmd.program._program import Program


class NoProgramFile(SpmdError, FileNotFoundError):
    """A file of executables does not exist."""


_FORMAT = "spmd executables 1"


def save_executables(path: Any, name: str, programs: Iterable[Program], client: Any) -> Path:
    """Write the executables of these programs to `path` atomically: a failure leaves a file that was there unchanged.

    Returns:
        The path.

    Raises:
        SpmdError: `path` is not one of a file in an existing folder, a program calls back into Python, or could hang once it is loaded
            (Note [Collectives that lose their order]), or this process is part of a job.
    """
    path = file_to_write(path, f"{name}.save", f"{name}.save({{path}})")
    _refuse_in_job(name, "saved")
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            manifest: dict[str, Any] = {"format": _FORMAT, "name": name, "facts": _requirements(client), "programs": []}
            for number, program in enumerate(programs):
                call, executable = _serialized(name, program)
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
    return path


def _serialized(name: str, program: Program) -> tuple[bytes, bytes]:
    """jax's data for calling a program's executable, and the executable."""
    if program.digest is None:
        raise _not_saved(name, f"it contains {program.no_digest}")
    if not is_in_order_when_read(program.compiled.runtime_executable()):
        why = "it has collectives in a loop and outside it, whose order XLA does not save on CPU devices: it could hang"
        raise _not_saved(name, why, "let each process compile it; if it is rolled, spmd.compile(fn, roll=False)")
    try:
        call = packed_call(program.compiled)
    except ValueError as error:
        raise _not_saved(name, str(error)) from error
    return call, (program.compilation.read_from or written(program.compiled)).plain()


def load_executables(path: Any, name: str, client: Any) -> dict[str, CachedExecutable]:
    """The executables of a file, by digest. When this returns, other threads are still loading them.

    Raises:
        SpmdError: the file is invalid or damaged, is of another function, or was saved by other versions or for other devices; or this
            process is part of a job.
        NoProgramFile: the file does not exist; also a FileNotFoundError.
    """
    path = file_path(path, f"{name}.load", f"{name}.load({{path}})")
    _refuse_in_job(name, "loaded")
    if path.is_dir():
        raise _invalid(path, "it is a folder")
    if not path.exists():
        what = f"{name}.load({str(path)!r}): no such file"
        fix = f"{name}.save({str(path)!r}) first, in a process that has run it"
        raise NoProgramFile(message(what, *called_at(), fix=fix))
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
                raise _invalid(path, f"its format is {manifest.get('format') if isinstance(manifest, dict) else None!r}")
            _require_match(path, name, manifest, _requirements(client))
            found = {item["digest"]: _executable(path, archive, item) for item in manifest["programs"]}
    except (SpmdError, PermissionError):
        raise
    except Exception as error:  # zipfile, zlib and json raise a dozen exception classes for damaged bytes
        raise _invalid(path, f"{type(error).__name__}: {error}") from error
    for kept in found.values():
        kept.begin(client)
    return found


def _executable(path: Path, archive: zipfile.ZipFile, item: dict[str, Any]) -> CachedExecutable:
    call, executable = (_part(path, archive, part, item["parts"][part]) for part in item["parts"])
    return CachedExecutable(call, item["devices"], Written(executable))


def _part(path: Path, archive: zipfile.ZipFile, part: str, checksum: str) -> bytes:
    content = archive.read(part)
    if hashlib.sha256(content).hexdigest() != checksum:
        raise _invalid(path, f"the checksum of {part} is not the one in its manifest")
    return content


def _requirements(client: Any) -> dict[str, str]:
    """The versions, devices and flags of this process. A process that loads executables must have the same as the one that saved them."""
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


def _require_match(path: Path, name: str, manifest: dict[str, Any], here: dict[str, str]) -> None:
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


def _refuse_in_job(name: str, done: str) -> None:
    if job() is not None:
        raise SpmdError(
            message(
                f"the programs of {name} cannot be {done} in a job of several processes",
                "the processes of a job compare their lowered programs before the first run, and share a cache instead",
                fix="spmd launch --job-dir DIR, which the next attempt reads; or spmd.configure(cache_dir=...) in all processes",
            )
        )


def _not_saved(name: str, why: str, fix: str = "remove the Python callbacks from it") -> SpmdError:
    return SpmdError(message(f"a program of {name} cannot be saved", why, fix=fix))


def _invalid(path: Path, why: str) -> SpmdError:
    return SpmdError(message(f"{path} is not a complete file of programs", why, fix="save it again: step.save(path)"))


def not_in_file(name: str, path: str) -> str:
    """The warning for a function that is compiled although a file of executables was loaded."""
    return message(
        f"{name} is compiled: the loaded file {path} has no program for this call",
        "the function, a setting, or the shapes, values or shardings of its arguments and state differ from those at save time",
        fix=f"call it once with each kind of arguments, then {name}.save({path!r})",
    )


__all__ = ["NoProgramFile", "load_executables", "not_in_file", "save_executables"]
