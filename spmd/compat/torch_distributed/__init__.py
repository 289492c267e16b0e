"""PyTorch's own distributed words on device 'jax': `init_device_mesh("jax", ...)` and what is done with such a mesh.

    mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])

Importing `spmd` calls `register`. docs/ecosystem.md says what these words mean in one program, and what cannot be meant.
"""

from spmd.compat.torch_distributed._words import install, register

__all__ = ["install", "register"]
