"""Checkpoints: sharded, checked byte by byte, restored onto any mesh and number of processes. See `docs/checkpoints.md`.

state = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}
if spmd.checkpoint.has_step("runs/a"):
    start = spmd.checkpoint.restore("runs/a", state).step
...
spmd.checkpoint.save("runs/a", step, state, keep=3)     # in the background; errors come with the next save, or with join
spmd.checkpoint.join()
"""

from spmd.checkpoint._restore import Restored as Restored
from spmd.checkpoint._restore import has_step as has_step
from spmd.checkpoint._restore import restore as restore
from spmd.checkpoint._save import Saving as Saving
from spmd.checkpoint._save import join as join
from spmd.checkpoint._save import save as save
from spmd.checkpoint._scan import Step as Step
from spmd.checkpoint._scan import Verdict as Verdict
from spmd.checkpoint._scan import steps as steps
from spmd.checkpoint._scan import verify as verify

__all__ = ["Restored", "Saving", "Step", "Verdict", "has_step", "join", "restore", "save", "steps", "verify"]
