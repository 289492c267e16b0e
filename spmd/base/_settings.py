"""Settings of the whole process: `spmd.configure`.

spmd.configure(progress=False)                    # report slow work through `logging` alone
spmd.configure(check_indices=True)                # check indices in eager operations too
spmd.configure(cache_dir="/scratch/programs")     # cache compiled programs for later processes here; False: no cache
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax

from mesh.job._join import programs_of_job
from spmd.base._errors import SpmdError, message
from spmd.base._program_files import default_folder, keep_no_programs, keep_programs

_log = logging.getLogger("spmd.compile")


@dataclass
class Settings:
    """The settings of a process. `spmd.configure` documents them."""

    progress: bool = True
    progress_after_s: float = 2.0
    check_indices: bool = False
    cache_dir: Path | Literal[False] | None = None
    cache_max_bytes: int = 4 << 30


in_force = Settings()


def configure(
    *,
    progress: bool | None = None,
    progress_after_s: float | None = None,
    check_indices: bool | None = None,
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None,
    cache_max_bytes: int | None = None,
) -> Settings:
    """Change settings of this process; settings that are not passed keep their values.

    Args:
        progress: report slow work on stderr: on a status line in a terminal, as lines elsewhere unless the program has
            configured `logging`. The logger "spmd.progress" always gets it, at level INFO.
        progress_after_s: report only work that takes longer than this, in seconds (2).
        check_indices: whether eager operations, and functions of `spmd.compile(check_indices=None)`, check indices computed on the device.
        cache_dir: a folder to cache compiled programs in for later processes; False disables the cache. Its files are executed, so
            other users must not be able to write there. The default is `spmd` in the user's cache directory, unless jax has a cache
            folder of its own.
        cache_max_bytes: limit for all cached programs together (4 GiB). The least recently used ones are removed.

    Returns:
        A copy of the settings after the change.

    Raises:
        SpmdError: a value is invalid, or the cache folder cannot be used.
    """
    flags: dict[str, object] = {"progress": progress, "check_indices": check_indices}
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise SpmdError(message(f"{name} must be True or False", f"got {value!r}", fix=f"spmd.configure({name}=True)"))
    is_number = isinstance(progress_after_s, int | float) and not isinstance(progress_after_s, bool)
    if progress_after_s is not None and not (is_number and 0 <= progress_after_s < math.inf):
        raise SpmdError(
            message("progress_after_s must be a number of seconds", f"got {progress_after_s!r}", fix="spmd.configure(progress_after_s=2.0)")
        )
    _require_cache(cache_dir, cache_max_bytes)
    _set_cache(cache_dir, cache_max_bytes)
    if progress is not None:
        in_force.progress = progress
    if progress_after_s is not None:
        in_force.progress_after_s = float(progress_after_s)
    if check_indices is not None:
        in_force.check_indices = check_indices
    return replace(in_force)


def _require_cache(folder: object, limit: object) -> None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
        raise SpmdError(
            message("cache_max_bytes must be a number of bytes", f"got {limit!r}", fix="spmd.configure(cache_max_bytes=4 << 30)")
        )
    if (folder is not None and folder is not False and not isinstance(folder, (str, os.PathLike))) or folder == "":
        raise SpmdError(message("cache_dir must be a folder or False", f"got {folder!r}", fix="spmd.configure(cache_dir=False)"))


def _set_cache(cache_dir: str | os.PathLike[str] | Literal[False] | None, max_bytes: int | None) -> None:
    """Enable, move, limit or disable the cache of compiled programs."""
    if cache_dir is False:
        keep_no_programs()
        in_force.cache_dir = False
    elif cache_dir is not None or in_force.cache_dir:
        folder = Path(str(in_force.cache_dir) if cache_dir is None else cache_dir).expanduser()
        keep_programs(folder, max_bytes or in_force.cache_max_bytes)
        in_force.cache_dir = folder
    if max_bytes is not None:
        in_force.cache_max_bytes = max_bytes


def keep_programs_by_default() -> None:
    """Enable the cache in the job's or the user's default folder, unless `configure` or jax's settings decide otherwise.

    Called before the first program is compiled.
    """
    if in_force.cache_dir is not None or not jax.config.values["jax_enable_compilation_cache"]:
        return
    job, own = programs_of_job(), jax.config.values["jax_compilation_cache_dir"]
    if own is not None and own != str(job):
        return
    try:
        _set_cache(job or default_folder(), None)
    except SpmdError as error:
        in_force.cache_dir = False
        _log.warning("compiled programs are not cached for later processes: %s", error)


__all__ = ["Settings", "configure", "in_force", "keep_programs_by_default"]
