"""Selects the contenders of a run, with the reason for each that cannot take part."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from mesh._mesh_errors import nearest
from spmd.base._errors import UsageError
from spmd.bench._measure import Entrant
from spmd.bench._task import Job

FILES = {"jax": "by_hand", "torchax": "with_torchax", "torch": "torch_cpu", "torch.compile": "torch_compiled", "fsdp": "torch_fsdp"}


def entrants_of(against: list[str], job: Job, torchax_python: Path | None) -> list[Entrant]:
    """The contenders of a run: ours first, then the peers in the given order.

    Raises:
        UsageError: `against` contains an unknown name.
    """
    for name in against:
        if name not in FILES:
            raise UsageError(f"--against takes {', '.join(FILES)}, not {name!r}{nearest(name, FILES)}")
    listed = [_entrant(name, job, torchax_python) for name in against]
    return [Entrant("ours", "ours", sys.executable, _missing_requirement(job)), *listed]


def _entrant(name: str, job: Job, torchax_python: Path | None) -> Entrant:
    python = sys.executable
    absent = _missing_requirement(job)
    if name == "torchax":
        found = torchax_python or Path(__file__).resolve().parents[2] / ".venv-torchax" / "bin" / "python"
        python, absent = str(found), absent or _missing_torchax(found)
    if not absent and name != "jax" and job.topology:
        absent = "programs for a TPU topology are only compared with JAX by hand"
    if not absent and name == "torch.compile" and job.platform == "cpu" and not shutil.which("g++"):
        absent = "torch.compile on the CPU needs a C++ compiler, and g++ was not found"
    if not absent and name == "fsdp" and job.platform == "gpu":
        absent = "fsdp runs on the CPU only, over gloo"
    return Entrant(name, FILES[name], python, absent)


def _missing_requirement(job: Job) -> str:
    """The reason why no contender can run the job on this machine, or ""."""
    if job.topology and importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install 'spmd-mesh[tpu]'"
    if job.platform == "gpu" and not any(Path("/dev").glob("nvidia[0-9]*")):
        return "this machine has no GPU"
    if job.variant == "hf" and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'spmd-mesh[hf]'"
    return ""


def _missing_torchax(python: Path) -> str:
    if not python.exists():
        return "torchax's environment was not found: run make torchax, or give --torchax-python"
    probe = subprocess.run([str(python), "-c", "import torchax"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"torchax cannot be imported: {(probe.stderr.strip().splitlines() or ['no message'])[-1]}"
