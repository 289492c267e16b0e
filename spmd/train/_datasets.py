"""A recipe's data as a dataset, and as batches on the devices."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

import spmd
from mesh import Mesh
from spmd.base._errors import message
from spmd.data import ShardedLoader
from spmd.sharding._axes import batch_axes
from spmd.train._feed import Feed, GlobalOrder, PlacedFeed, rows_here
from spmd.train._import_path import imported
from spmd.train._recipe import Data, Recipe, RecipeError
from spmd.train._token_files import TokenFiles


def dataset_of(table: Data, vocabulary: int) -> Dataset[Any]:
    """The samples that a table names.

    Args:
        table: what kind, and where.
        vocabulary: of the model; 0: not known.

    Raises:
        RecipeError: there are none.
    """
    if table.kind == "tokens":
        return TokenFiles(table.paths, table.seq, table.dtype, vocabulary)
    dataset = imported(table.own, "[data] own")(**table.arguments)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        what = f"[data] own = {table.own!r} returned {type(dataset).__name__}, which has no length or no samples by number"
        raise RecipeError(message(what, fix="return a torch.utils.data.Dataset with __len__ and __getitem__"))
    return dataset


def training_batches(recipe: Recipe, dataset: Dataset[Any], mesh: Mesh) -> ShardedLoader:
    """The passes over the data, a new order in each, without the last batch of a pass if it is uneven.

    Raises:
        RecipeError: there is no whole batch, or it does not divide over the devices.
    """
    table, accumulate = recipe.data, recipe.optimizer.accumulate
    axes = batch_axes(mesh)
    rows = rows_here(mesh, axes, table.batch, accumulate)
    order = GlobalOrder(len(dataset), table.batch, rows, table.shuffle, recipe.seed, whole=True)  # pyright: ignore[reportArgumentType]
    if not len(order):
        what = f"[data] has {order.num_samples} samples, a batch {table.batch}"
        raise RecipeError(message(what, fix="a smaller [data] batch, or more data"))
    kind = Feed if table.kind == "dataset" else PlacedFeed
    feed = kind(dataset, order, table.workers, accumulate if accumulate > 1 else 0)
    if accumulate == 1:
        return spmd.shard_loader(feed, mesh, (axes or None,))
    # `check` compares what processes feed by where dim 0 lies, which here is that of the micro-batches
    return spmd.shard_loader(feed, mesh, (None, axes or None), check=False)


__all__ = ["dataset_of", "training_batches"]
