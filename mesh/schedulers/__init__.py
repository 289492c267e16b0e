"""Files for schedulers: a job written down for SLURM, Kubernetes' JobSet, TPU VMs and SkyPilot, one file each.

What they start is `python -m mesh.launch --join program`, once per process; where a process stands is read there
(`mesh/job/_clusters.py`) or passed on by the file. They know nothing of the launcher's command line.
"""
