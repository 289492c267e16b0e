"""PyTorch's own distributed API on device 'jax': `init_device_mesh("jax", ...)`, and functions that take such a mesh.

    mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])

Importing `spmd` calls `register`. docs/ecosystem.md explains what this API means in a single program, and what is refused.
"""

from spmd.compat.torch_distributed._dispatch import install, register

__all__ = ["install", "register"]
