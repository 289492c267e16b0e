"""A slice of TPU chips by the name that compilers take, and by the names of those who lend it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mesh._mesh_errors import DeviceError, message


@dataclass(frozen=True)
class _Generation:
    """What the makers call it, per chip generation.

    Attributes:
        dims: of the grid in a slice's name.
        one_host: chips up to which a slice has one host.
        node: of GKE's label cloud.google.com/gke-tpu-accelerator.
        accelerator: prefix of gcloud's accelerator type.
        units: that the type's number counts, per chip: cores in old generations.
        image: runtime version of a TPU VM.
    """

    dims: int
    one_host: int
    node: str
    accelerator: str
    units: int
    image: str


_GENERATIONS = {
    "v4": _Generation(3, 4, "tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base"),
    "v5e": _Generation(2, 8, "tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": _Generation(3, 4, "tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    "v6e": _Generation(2, 8, "tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
}
_CHIPS_PER_HOST = 4  # of slices with several hosts


@dataclass(frozen=True)
class TpuSlice:
    """Chips of one slice, e.g. TpuSlice("v5e", (4, 4)): 16 chips on 4 hosts.

    Attributes:
        generation: "v4", "v5e", "v5p" or "v6e".
        grid: chips along each dim.
    """

    generation: str
    grid: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> TpuSlice:
        """From "v5e:4x4", which `mesh.Mesh(topology=...)` takes too.

        Raises:
            DeviceError: no such chips, or a grid with another number of dims.
        """
        generation, _, grid = text.partition(":")
        known = _GENERATIONS.get(generation)
        if known is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", grid) or grid.count("x") != known.dims - 1:
            names = ", ".join(f"{name}:{'x'.join(['4'] * each.dims)}" for name, each in _GENERATIONS.items())
            raise DeviceError(message(f"{text!r} is not a TPU slice", fix=f"write the chips and their grid, as in {names}"))
        return TpuSlice(generation, tuple(int(size) for size in grid.split("x")))

    @property
    def num_chips(self) -> int:
        return math.prod(self.grid)

    @property
    def num_hosts(self) -> int:
        return 1 if self.num_chips <= self._known.one_host else math.ceil(self.num_chips / _CHIPS_PER_HOST)

    @property
    def topology(self) -> str:
        """The grid as GKE writes it: "4x4"."""
        return "x".join(map(str, self.grid))

    @property
    def node(self) -> str:
        return self._known.node

    @property
    def accelerator(self) -> str:
        """Of `gcloud compute tpus tpu-vm create --accelerator-type`: "v5litepod-16"."""
        return f"{self._known.accelerator}-{self.num_chips * self._known.units}"

    @property
    def image(self) -> str:
        return self._known.image

    @property
    def _known(self) -> _Generation:
        return _GENERATIONS[self.generation]
