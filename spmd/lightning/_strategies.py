"""Lightning's strategy "spmd" for Trainer and Fabric: models laid out by rules, batches split, each step one program.

Lightning sees one process with one device: a loader's batch is the global batch, `world_size` is 1, and nothing is reduced.
"""

# pyright: reportMissingImports=none, reportUnknownVariableType=none, reportUntypedBaseClass=none, reportUnknownMemberType=none
# pyright: reportUnknownArgumentType=none, reportUnknownParameterType=none, reportIncompatibleMethodOverride=none

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDevice
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from mesh import Mesh, device_count
from spmd.base._errors import SpmdError, message
from spmd.base._torch import pytree
from spmd.device._deferred import deferring
from spmd.program.lazy._session import Lazy, lazy
from spmd.rules._shard_module import RulesLike, named_tensors
from spmd.rules._training_layouts import Layouts
from spmd.sharding._annotate import as_mesh, mark_sharding
from spmd.sharding._tensor import sharding_of

NAME = "spmd"
# Layouts of models that were set up. Lightning moves a finished model to the host, where it loses its layout. A second setup restores it.
_laid_out: WeakKeyDictionary[torch.nn.Module, tuple[Any, dict[str, Any]]] = WeakKeyDictionary()


class _Placement:
    """What both strategies do: layout of models and batches, and deferred operations.

    Attributes:
        mesh: the mesh; created when a model is set up, if none was given.
        lazy: the deferred operations, with `num_executables`, `retraces` and `program`. None before a model is set up, and inside
            a `spmd.lazy()` of the program.
    """

    def __init__(self, mesh: Any, rules: RulesLike, batch: str | Sequence[str] | None, strict: bool) -> None:
        self.mesh: Mesh | None = None if mesh is None else as_mesh(mesh)
        self.lazy: Lazy | None = None
        self._options = rules, batch, strict
        self._layouts: Layouts | None = None
        self._deferring = ExitStack()

    def lay_out(self, model: torch.nn.Module) -> None:
        """Lay out the model, move it to the device, and defer operations from now on."""
        if self.mesh is None:
            self.mesh = Mesh(range(device_count()), (device_count(),), ("fsdp",))
        if self._layouts is None:
            self._layouts = Layouts(self.mesh, *self._options)
        if deferring.get() is None:
            self.lazy = self._deferring.enter_context(lazy())
        before = _laid_out.get(model)
        if before is not None and before[0] == (self.mesh, self._options[0]):
            for name, tensor in named_tensors(model):
                mark_sharding(tensor, self.mesh, before[1][name])
        else:
            self._layouts.lay_out_model(model)
            specs = {name: sharding_of(tensor) for name, tensor in named_tensors(model)}
            _laid_out[model] = (self.mesh, self._options[0]), {n: spec.partition_spec for n, spec in specs.items() if spec is not None}
        model.to("jax")

    def placed(self, batch: Any) -> Any:
        """A batch on the devices, split along dim 0."""
        return batch if self._layouts is None else self._layouts.placed(batch)

    def finish(self) -> None:
        """Run pending operations and stop deferring. A model that is set up later is laid out again."""
        self._deferring.close()
        self._layouts = None


def on_this_device(precision: Any) -> Any:
    """Set a precision plugin's autocast to device 'jax'. For an unknown accelerator Lightning makes it for CUDA.

    Raises:
        SpmdError: the plugin scales losses.
    """
    if isinstance(precision, MixedPrecision | FabricMixedPrecision):
        if precision.precision != "bf16-mixed":
            raise SpmdError(message(f"precision={precision.precision!r} scales losses for CUDA", fix="precision='bf16-mixed'"))
        precision.device = "jax"
    return precision


def on_the_host(state: Any) -> Any:
    """The same containers with CPU tensors, which torch can load without this package."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().as_subclass(torch.Tensor), state)


class _MeshStrategy:
    """What both strategies add to Lightning's strategy for a single device, the base class after this one."""

    def __init__(
        self, mesh: Any = None, rules: RulesLike = "fsdp", batch: str | Sequence[str] | None = None, strict: bool = True, **options: Any
    ) -> None:
        base: Any = super()
        base.__init__(device=torch.device("jax", 0), **options)
        self.placing = _Placement(mesh, rules, batch, strict)

    @property
    def lazy(self) -> Lazy | None:
        """The deferred operations, with `num_executables`, `retraces` and `program`."""
        return self.placing.lazy

    def teardown(self) -> None:
        self.placing.finish()
        base: Any = super()
        base.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(NAME, cls, description="one program over a mesh", override=True)


class SpmdStrategy(_MeshStrategy, SingleDeviceStrategy):
    """`Trainer(accelerator="jax", strategy="spmd")`; pass an instance to choose a mesh.

    Args:
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`; default: all devices along one axis, 'fsdp'.
        rules: rules for `spmd.shard_module`.
        batch: the axis or axes that split a batch; default: all axes without the name of a model axis.
        strict: as for `spmd.shard_module`.
        options: further options of Lightning's `SingleDeviceStrategy`.
    """

    strategy_name = NAME

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        self._precision_plugin = on_this_device(precision_plugin)

    def model_to_device(self) -> None:
        self.placing.lay_out(self.model)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Split the tensors that are still on the host. The module's own hooks run as with any other strategy."""
        return super().batch_to_device(self.placing.placed(batch), device, dataloader_idx)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return on_the_host(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return on_the_host(super().optimizer_state(optimizer))


class SpmdFabricStrategy(_MeshStrategy, FabricSingleDevice):
    """`Fabric(accelerator="jax", strategy="spmd")`; pass an instance to choose a mesh. Arguments as for `SpmdStrategy`."""

    @property
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = on_this_device(precision)

    def module_to_device(self, module: Any) -> None:
        self.placing.lay_out(module)

    def batch_to_device(self, batch: Any, device: Any = None) -> Any:
        return super().batch_to_device(self.placing.placed(batch), device)

    def process_dataloader(self, dataloader: Any) -> Any:
        return PlacedLoader(dataloader, self.placing)

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        return on_the_host(super().get_module_state_dict(module))

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return on_the_host(super().get_optimizer_state(optimizer))


class PlacedLoader:
    """A loader whose batches are split over the mesh. Other attributes come from the wrapped loader."""

    def __init__(self, loader: Any, placing: _Placement) -> None:
        self.loader, self._placing = loader, placing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self._placing.placed(batch)


__all__ = ["NAME", "PlacedLoader", "SpmdFabricStrategy", "SpmdStrategy", "on_the_host", "on_this_device"]
