"""The launcher: starts several processes as one job, ends them together, and restarts them from the last complete checkpoint.

    spmd launch -n 4 --devices-per-process 2 train.py --steps 100
    python -m mesh.launch --help

The program has joined its job before its first line runs, so that `mesh.init()` in it has no further effect. Only this package
and `mesh/job/_join.py` read the environment.
"""

from mesh.launch._main import main

__all__ = ["main"]
