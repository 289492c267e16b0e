"""Charts of results: bars in the terminal, and a PNG with step times and loss curves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rich.text import Text

from spmd.base._errors import SpmdError, message
from spmd.bench._result_table import title_of

_WIDTH = 50
_COLORS = {"ours": "#c44e52", "jax": "#4c72b0", "torchax": "#dd8452", "torch": "#8c8c8c", "torch.compile": "#55a868", "fsdp": "#937860"}


def bars(result: dict[str, Any]) -> Text:
    """The median step time of each contender as a bar."""
    medians = {name: peer["clocks"]["ready_s"]["median"] for name, peer in result["peers"].items() if "clocks" in peer}
    lines = [f"{name:>14} {'█' * max(1, round(_WIDTH * s / max(medians.values())))} {1e3 * s:.4g} ms" for name, s in medians.items()]
    return Text("\n".join(lines))


def save(results: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG with one row per timed result: the contenders' step times and loss curves.

    Raises:
        SpmdError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SpmdError(message("a chart needs matplotlib", fix="pip install 'spmd-mesh[bench]'"))
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [result for result in results if any("clocks" in peer for peer in result["peers"].values())]
    figure = Figure(figsize=(11, 2.6 * len(timed) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for row, result in enumerate(timed):
        left, right = (figure.add_subplot(len(timed), 2, 2 * row + column + 1) for column in (0, 1))
        _draw_times(left, result)
        _draw_losses(right, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_times(axes: Any, result: dict[str, Any]) -> None:
    """Draw each timed step as a tick and the median as a bar."""
    peers = {name: peer for name, peer in result["peers"].items() if "clocks" in peer}
    for position, (name, peer) in enumerate(peers.items()):
        color = _COLORS.get(name, "#333333")
        axes.barh(position, 1e3 * peer["clocks"]["ready_s"]["median"], color=color, alpha=0.55, height=0.6)
        axes.plot([1e3 * s for s in peer["seconds"]], [position] * len(peer["seconds"]), "|", color=color, markersize=9)
    axes.set_yticks(range(len(peers)), list(peers))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms per step (bar: median)")
    axes.set_title(title_of(result), fontsize=9, loc="left")


def _draw_losses(axes: Any, result: dict[str, Any]) -> None:
    """Draw ours as a thin line over the peers' thick lines, so that overlapping curves stay visible."""
    for name, peer in sorted(result["peers"].items(), key=lambda item: item[0] == "ours"):
        if peer.get("losses"):
            style = {"linewidth": 1.2, "color": "black"} if name == "ours" else {"linewidth": 5, "alpha": 0.45, "color": _COLORS.get(name)}
            axes.plot(peer["losses"], label=name, **style)
    axes.set_xlabel("step")
    axes.set_title("loss", fontsize=9, loc="left")
    axes.legend(fontsize=7)
