"""The launcher: several processes started as one job, ended as one, and started again from the last good checkpoint.

    spmd launch -n 4 --devices-per-process 2 train.py --steps 100
    python -m mesh.launch --help

A program started so has joined its job before its first line runs (`mesh.init()` in it does nothing more). Only this
package and `mesh/job/_join.py` read the environment.
"""

from mesh.launch._main import main

__all__ = ["main"]
