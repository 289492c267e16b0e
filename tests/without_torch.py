"""A file of `spmd.export` in a process that has JAX, and neither torch nor this package."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

LOADER = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "spmd", "mesh")))
path, *files = sys.argv[1:]
sys.path.insert(0, path)
import numpy as np, spmd_exported
program = spmd_exported.load(path)
state, inputs, results = program.state(), [np.load(f) for f in files], []
"""


def without_torch(code: str, path: Path, *inputs: torch.Tensor, num_devices: int) -> Any:
    """What `code`, after `LOADER`, prints last as JSON; in a process that has JAX and no torch."""
    files = [path.with_name(f"input{i}.npy") for i in range(len(inputs))]
    for file, value in zip(files, inputs, strict=True):
        np.save(file, value.numpy())
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "HOME": str(path.parent)}
    command = [sys.executable, "-I", "-c", LOADER + code, str(path), *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=path.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
