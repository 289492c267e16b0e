"""Describes the machine that figures were measured on: processor, cores, versions, flags. It includes no host names or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("torch", "jax", "jaxlib", "libtpu", "numpy", "transformers")
_FLAGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_use_shardy_partitioner", "jax_threefry_partitionable")


def machine() -> dict[str, Any]:
    """The description as JSON-serializable data."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")), platform.processor())
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "flags": {name: jax.config.values.get(name) for name in _FLAGS},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
