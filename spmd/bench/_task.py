"""The job of a contender: a benchmark's script, sizes and mesh, as a plain value that can be sent to another process.

This file imports neither torch nor jax nor `spmd`, because peers in other environments load it by its path.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]


@dataclass(frozen=True)
class Job:
    """One benchmark on one mesh.

    Attributes:
        name: name of the benchmark.
        folder: folder of the scripts `<name>.py` and `<name>_jax.py`.
        variant: the model's variant; "" is the script's first.
        preset: a key of the script's `PRESETS`.
        overrides: sizes that differ from the preset's.
        axes: mesh axes and their sizes. An empty mesh is one device.
        dtype: dtype of parameters and floating inputs, "float32" or "bfloat16".
        topology: compile for this TPU topology ("v5e:2x4") without running. "" runs on this machine.
        platform: "cpu" or "gpu".
        num_batches: number of different batches. Step n uses batch n modulo this.
        real_data, weights: files that the script reads; "" for none.
    """

    name: str
    folder: str
    variant: str = ""
    preset: str = "small"
    overrides: tuple[tuple[str, Any], ...] = ()
    axes: tuple[tuple[str, int], ...] = ()
    dtype: str = "float32"
    topology: str = ""
    platform: str = "cpu"
    num_batches: int = 4
    real_data: str = ""
    weights: str = ""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Job:
        """Inverse of `to_dict`, also after JSON has turned tuples into lists."""
        pairs: dict[str, Any] = {key: tuple((name, value) for name, value in fields[key]) for key in ("overrides", "axes")}
        return cls(**(fields | pairs))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(size for _, size in self.axes)

    @property
    def mesh_text(self) -> str:
        """The mesh in the format of `mesh.Mesh.from_string`."""
        text = ",".join(f"{name}={size}" for name, size in self.axes) or "data=1"
        return f"{text} on {self.topology}" if self.topology else text

    @cached_property
    def script(self) -> ModuleType:
        """The benchmark's PyTorch script."""
        return load(Path(self.folder) / f"{self.name}.py")

    @cached_property
    def by_hand(self) -> ModuleType:
        """The benchmark's hand-written JAX script."""
        return load(Path(self.folder) / f"{self.name}_jax.py")

    @cached_property
    def config(self) -> Any:
        """Sizes of the model and of a batch."""
        variant = self.variant or self.script.VARIANTS[0]
        return dataclasses.replace(self.script.PRESETS[self.preset], variant=variant, **dict(self.overrides))

    def spec_of(self, name: str, rank: int) -> Spec:
        """Partition spec of the parameter `name` on this mesh. Parameters without a spec in the script are replicated."""
        for pattern, spec in self.script.shardings(self.config).items():
            if fnmatch.fnmatchcase(name, pattern):
                return self.drop_missing_axes(spec)
        return (None,) * rank

    def drop_missing_axes(self, spec: Spec) -> Spec:
        """The spec without axes that the mesh does not have."""
        return tuple(self._present_axes(entry) for entry in spec)

    def _present_axes(self, entry: Entry) -> Entry:
        names = [axis for axis, _ in self.axes]
        kept = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis in names)
        return None if not kept else kept[0] if len(kept) == 1 else kept

    def batch_specs(self) -> list[Spec]:
        """Partition specs of a batch's tensors."""
        return [self.drop_missing_axes(spec) for spec in self.script.BATCH_SPECS]

    def activations(self) -> dict[str, Spec]:
        """Sharding constraints on the outputs of modules: pattern of the module's name -> spec."""
        listed = getattr(self.script, "activations", None)
        return {} if listed is None else {pattern: self.drop_missing_axes(spec) for pattern, spec in listed(self.config).items()}

    def batches(self) -> list[tuple[Any, ...]]:
        """The batches as CPU tensors, with floating tensors in the job's dtype. With a topology, one batch without values."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.topology:
            drawn = [self.script.example(self.config)]
        else:
            drawn = self.script.batches(self.config, self.num_batches, Path(self.real_data) if self.real_data else None)
        return [tuple(t.to(dtype) if t.is_floating_point() else t for t in batch) for batch in drawn]

    def model(self) -> Any:
        """The model on the CPU with the same weights in every process, or on the meta device with a topology."""
        import torch

        torch.manual_seed(0)
        with torch.device("meta" if self.topology else "cpu"):
            model = self.script.build(self.config)
        if self.weights and not self.topology:
            self.script.load_weights(model, self.config, Path(self.weights))
        return model.to(getattr(torch, self.dtype))

    def train_step(self, model: Any, optimizer: Any) -> Callable[..., Any]:
        """The usual PyTorch training step as a function of a batch, for every contender that uses torch's autograd."""
        loss_of = self.script.loss

        def train_step(*batch: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            optimizer.step()
            return loss

        return train_step


def load(path: Path) -> ModuleType:
    """Import a file as a module, once per process. The module can import other files of its folder by name."""
    name = f"_bench_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
