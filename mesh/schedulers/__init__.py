"""Job files for SLURM, Kubernetes JobSet, TPU VMs and SkyPilot; one module per scheduler.

Each file starts `python -m mesh.launch --join program` once per process. A process finds its place in the job from the scheduler's
variables (`mesh/job/_clusters.py`), or from variables that the file sets. This package does not depend on the launcher's options.
"""
