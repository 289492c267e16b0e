"""Runs Lightning's Trainer and Fabric over a device mesh. The import registers accelerator "jax" and strategy "spmd" with both.

    import spmd.lightning

    Trainer(accelerator="jax", strategy="spmd").fit(module, loader)
    Trainer(accelerator="jax", strategy=spmd.lightning.SpmdStrategy(mesh, rules="megatron"))
    Fabric(accelerator="jax", strategy="spmd")

Works with the package `lightning`. `pytorch_lightning` and `lightning_fabric` have separate registries.
"""

# pyright: reportMissingImports=none, reportUnknownVariableType=none

from lightning.fabric.accelerators import ACCELERATOR_REGISTRY
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from spmd.lightning._accelerator import JaxAccelerator as JaxAccelerator
from spmd.lightning._strategies import SpmdFabricStrategy as SpmdFabricStrategy
from spmd.lightning._strategies import SpmdStrategy as SpmdStrategy

for _registry in (ACCELERATOR_REGISTRY, AcceleratorRegistry):
    JaxAccelerator.register_accelerators(_registry)
SpmdFabricStrategy.register_strategies(STRATEGY_REGISTRY)
SpmdStrategy.register_strategies(StrategyRegistry)

__all__ = ["JaxAccelerator", "SpmdFabricStrategy", "SpmdStrategy"]
