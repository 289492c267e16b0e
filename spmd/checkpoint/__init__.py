"""Sharded checkpoints. Every byte has a checksum, and a step can be restored onto any mesh and any number of processes.

See `docs/checkpoints.md`.

state = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}
if spmd.checkpoint.has_step("runs/a"):
    start = spmd.checkpoint.restore("runs/a", state).step
...
spmd.checkpoint.save("runs/a", step, state, keep=3)     # in the background; the next save or join raises its error
spmd.checkpoint.join()
"""

from spmd.checkpoint._inventory import Step as Step
from spmd.checkpoint._inventory import Verdict as Verdict
from spmd.checkpoint._inventory import steps as steps
from spmd.checkpoint._inventory import verify as verify
from spmd.checkpoint._inventory import verify_step as verify_step
from spmd.checkpoint._reshard import reshard as reshard
from spmd.checkpoint._restore import Restored as Restored
from spmd.checkpoint._restore import has_step as has_step
from spmd.checkpoint._restore import restore as restore
from spmd.checkpoint._safetensors_in import Loaded as Loaded
from spmd.checkpoint._safetensors_in import load_safetensors as load_safetensors
from spmd.checkpoint._safetensors_out import save_safetensors as save_safetensors
from spmd.checkpoint._save import Saving as Saving
from spmd.checkpoint._save import join as join
from spmd.checkpoint._save import save as save

__all__ = [
    # steps
    "Restored",
    "Saving",
    "has_step",
    "join",
    "restore",
    "save",
    # inspection and resharding
    "Step",
    "Verdict",
    "reshard",
    "steps",
    "verify",
    "verify_step",
    # safetensors files
    "Loaded",
    "load_safetensors",
    "save_safetensors",
]
