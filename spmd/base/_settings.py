"""What a program sets for its whole process: `spmd.configure`. Knows nothing of who reads it.

spmd.configure(progress=False)                    # what takes long is said through `logging` alone
spmd.configure(check_indices=True)                # for eager operations too
spmd.configure(cache_dir="~/.cache/spmd")         # compiled programs are found again by the next process
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from spmd.base._errors import SpmdError, message

_WORTH_KEEPING_S = 0.1  # seconds of compilation: below, reading a file is no quicker


@dataclass
class Settings:
    """What `spmd.configure` sets; `configure` documents each."""

    progress: bool = True
    progress_after_s: float = 2.0
    check_indices: bool = False
    cache_dir: Path | None = None


in_force = Settings()


def configure(
    *,
    progress: bool | None = None,
    progress_after_s: float | None = None,
    check_indices: bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Settings:
    """Settings of this process; what is left out stays as it is.

    Args:
        progress: say on stderr what takes long while it does: on a status line at a terminal, in lines elsewhere unless the program has
            set `logging` up. Logger "spmd.progress" has it in any case, level INFO.
        progress_after_s: how long something takes before anything is said of it, in seconds (2).
        check_indices: what `spmd.compile(check_indices=None)` means, and whether eager operations check indices that only the device knows.
        cache_dir: a folder for compiled programs, which the next process finds there. What lies in it is run: let nobody else write there.

    Returns:
        What holds now.

    Raises:
        SpmdError: a value that means nothing.
    """
    flags: dict[str, object] = {"progress": progress, "check_indices": check_indices}
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise SpmdError(message(f"{name} is True or False", f"got {value!r}", fix=f"spmd.configure({name}=True)"))
    if progress_after_s is not None and not 0 <= progress_after_s < math.inf:
        raise SpmdError(
            message("progress_after_s is a number of seconds", f"got {progress_after_s!r}", fix="spmd.configure(progress_after_s=2.0)")
        )
    if cache_dir is not None:
        _keep_programs(Path(cache_dir).expanduser())
    if progress is not None:
        in_force.progress = progress
    if progress_after_s is not None:
        in_force.progress_after_s = float(progress_after_s)
    if check_indices is not None:
        in_force.check_indices = check_indices
    return replace(in_force)


def _keep_programs(folder: Path) -> None:
    """Have jax write compiled programs there, and look for them there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SpmdError(
            message(f"cache_dir={str(folder)!r} is no folder to write to", str(error), fix='spmd.configure(cache_dir="~/.cache/spmd")')
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # jax looks at the folder's name once
    in_force.cache_dir = folder


@contextmanager
def programs_not_kept() -> Generator[None]:
    """While active, jax keeps no compiled programs: it cannot read those for chips that are not here, and warns of each."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder is None:
        yield
        return
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


__all__ = ["Settings", "configure", "in_force", "programs_not_kept"]
