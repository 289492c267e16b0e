"""`torch_xla.distributed.spmd.debugging`: pictures of layouts, printed when they are made, as torch_xla does."""

from __future__ import annotations

import rich.console
import torch

from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla._tensor_views import sharding_text
from spmd.draw._picture import Picture
from spmd.visualize import visualize
from spmd.visualize import visualize_sharding as picture_of
from spmd.xla_names._manual import ManualTensor


class NoShardingError(SpmdError, ValueError):
    """There is no sharding to draw."""


def visualize_tensor_sharding(
    t: torch.Tensor, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80
) -> Picture:
    """`visualize_sharding` of where `t` lies, with the tensor's name and sizes.

    Raises:
        NoShardingError: it has no sharding (a ValueError).
    """
    _require(text := sharding_text(t))
    picture = picture_of(text) if isinstance(t, ManualTensor) else visualize(t)
    assert isinstance(picture, Picture)  # of a module it would be a report
    return _shown(picture, use_color, max_width)


def visualize_sharding(sharding: str, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80) -> Picture:
    """Print the picture of a sharding such as "{devices=[2,2]0,1,2,3}", and return it; `rich` prints it again.

    Args:
        sharding: as `torch_xla._XLAC._get_xla_sharding_spec(t)` gives it, of any rank.
        use_color: whether to print in colour, where the terminal has any.
        scale: taken for torch_xla's sake, as `min_width`: a cell is as large as what it says.
        max_width: columns to print in.

    Raises:
        NoShardingError: the text is empty (a ValueError).
        SpmdError: it is no sharding.
    """
    _require(sharding)
    return _shown(picture_of(sharding), use_color, max_width)


def _require(sharding: str) -> None:
    if not sharding:
        raise NoShardingError(
            message("there is no sharding to draw: the tensor lies on no mesh", fix="xs.mark_sharding(t, mesh, spec) first")
        )


def _shown(picture: Picture, use_color: bool, max_width: int) -> Picture:
    rich.console.Console(width=max_width, no_color=not use_color).print(picture)
    return picture
