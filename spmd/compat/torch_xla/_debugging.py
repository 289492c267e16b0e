"""`torch_xla.distributed.spmd.debugging`: prints pictures of layouts; the returned pictures print as torch_xla's tables."""

from __future__ import annotations

from typing import Any

import rich.box
import rich.console
import rich.padding
import torch
from rich.align import Align
from rich.table import Table

from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla._runtime import device_type
from spmd.compat.torch_xla._tensor_views import sharding_text
from spmd.draw._picture import Picture
from spmd.visualize import visualize
from spmd.visualize import visualize_sharding as picture_of
from spmd.xla_names._manual import ManualTensor


class TablePicture(Picture):
    """A picture that `rich` prints as torch_xla's table: one cell per tile of the first two dims, with its devices."""

    use_color = True

    def __rich__(self) -> Table:
        has_color = self.use_color and rich.console.Console().color_system is not None
        table = Table(
            show_header=False,
            show_lines=not has_color,
            padding=0,
            highlight=not has_color,
            pad_edge=False,
            box=None if has_color else rich.box.SQUARE,
        )
        devices = self.tiling.devices
        while devices.ndim > 3:
            devices = devices[:, :, 0]
        for row in devices.reshape(devices.shape[0], -1, devices.shape[-1]):
            table.add_row(*map(self._cell, row))
        return table

    def _cell(self, ids: Any) -> rich.padding.Padding:
        listed = ids.tolist()
        is_split = self.tiling.copies == 1 and self.tiling.title not in ("{replicated}", "{manual}") and self.tiling.devices.size > 1
        shown = listed[0] if is_split else listed
        return rich.padding.Padding(Align(f"{device_type()} {shown}", "center", vertical="middle"), (1, 1, 1, 1))


class NoShardingError(SpmdError, ValueError):
    """There is no sharding to draw."""


def visualize_tensor_sharding(
    t: torch.Tensor, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80
) -> Picture:
    """`visualize_sharding` for the layout of `t`, with its name and sizes.

    Raises:
        NoShardingError: `t` has no sharding (a ValueError).
    """
    _require(text := sharding_text(t))
    picture = picture_of(text) if isinstance(t, ManualTensor) else visualize(t)
    assert isinstance(picture, Picture)  # of a module it would be a report
    return _shown(picture, use_color, max_width)


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """The sharding of `t` as text, with a list of devices."""
    return sharding_text(t)


def visualize_sharding(sharding: str, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80) -> Picture:
    """Print the picture of a sharding such as "{devices=[2,2]0,1,2,3}" and return it, so that `rich` can print it again.

    Args:
        sharding: text of `torch_xla._XLAC._get_xla_sharding_spec(t)`, for any rank.
        use_color: whether to print in color, if the terminal supports it.
        scale: accepted for compatibility, like `min_width`: a cell is as large as its text.
        max_width: width of the output in columns.

    Raises:
        NoShardingError: the text is empty (a ValueError).
        SpmdError: the text is not a sharding.
    """
    _require(sharding)
    return _shown(picture_of(sharding), use_color, max_width)


def _require(sharding: str) -> None:
    if not sharding:
        raise NoShardingError(
            message("there is no sharding to draw: the tensor is not on a mesh", fix="mark it first: xs.mark_sharding(t, mesh, spec)")
        )


def _shown(picture: Picture, use_color: bool, max_width: int) -> Picture:
    rich.console.Console(width=max_width, no_color=not use_color).print(picture)
    table = TablePicture(picture.tiling, picture.note)
    table.use_color = use_color
    return table
