"""TPU slices: the name for the compiler, and the names for GKE and gcloud."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mesh._mesh_errors import DeviceError, message


@dataclass(frozen=True)
class _Generation:
    """Names and sizes of a chip generation.

    Attributes:
        dims: number of dims of the chip grid.
        max_one_host: largest number of chips of a slice with one host.
        gke_label: value of GKE's label cloud.google.com/gke-tpu-accelerator.
        accelerator: prefix of gcloud's accelerator type.
        units_per_chip: units per chip in the accelerator type's number, which counts cores in some generations.
        runtime_version: runtime version of a TPU VM.
    """

    dims: int
    max_one_host: int
    gke_label: str
    accelerator: str
    units_per_chip: int
    runtime_version: str


_GENERATIONS = {
    "v4": _Generation(3, 4, "tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base"),
    "v5e": _Generation(2, 8, "tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": _Generation(3, 4, "tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    "v6e": _Generation(2, 8, "tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
}
_CHIPS_PER_HOST = 4  # in slices with several hosts


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice, e.g. TpuSlice("v5e", (4, 4)): 16 chips on 4 hosts.

    Attributes:
        generation: "v4", "v5e", "v5p" or "v6e".
        grid: number of chips along each dim.
    """

    generation: str
    grid: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> TpuSlice:
        """Parse a name like "v5e:4x4", as in `mesh.Mesh(topology=...)`.

        Raises:
            DeviceError: the generation is unknown, or it has no slice of this grid.
        """
        generation, _, grid = text.partition(":")
        known = _GENERATIONS.get(generation)
        if known is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid) or grid.count("x") != known.dims - 1:
            names = ", ".join(f"{name}:{'x'.join(['4'] * each.dims)}" for name, each in _GENERATIONS.items())
            raise DeviceError(message(f"{text!r} is not a TPU slice", fix=f"write the chips and their grid, as in {names}"))
        sizes = tuple(int(size) for size in grid.split("x"))
        wrong = next((size for size in sizes if size not in ((1, 2, 4, 8, 16) if known.dims == 2 else (1, 2, size // 4 * 4))), None)
        if wrong is not None:
            of = "1, 2, 4, 8 or 16 chips" if known.dims == 2 else "1, 2 or a multiple of 4 chips"
            raise DeviceError(
                message(
                    f"there is no TPU slice {text!r}",
                    f"a dim of {generation} has {of}, not {wrong}",
                    fix=f"write {generation}:{'x'.join(['4'] * known.dims)}",
                )
            )
        return TpuSlice(generation, sizes)

    @property
    def num_chips(self) -> int:
        """Number of chips of the slice."""
        return math.prod(self.grid)

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the slice."""
        return 1 if self.num_chips <= self._names.max_one_host else math.ceil(self.num_chips / _CHIPS_PER_HOST)

    @property
    def topology(self) -> str:
        """The grid as GKE writes it, e.g. "4x4"."""
        return "x".join(map(str, self.grid))

    @property
    def gke_label(self) -> str:
        """Value of GKE's label cloud.google.com/gke-tpu-accelerator."""
        return self._names.gke_label

    @property
    def accelerator(self) -> str:
        """Accelerator type for `gcloud compute tpus tpu-vm create`, e.g. "v5litepod-16"."""
        return f"{self._names.accelerator}-{self.num_chips * self._names.units_per_chip}"

    @property
    def runtime_version(self) -> str:
        """Runtime version of a TPU VM."""
        return self._names.runtime_version

    @property
    def _names(self) -> _Generation:
        return _GENERATIONS[self.generation]
