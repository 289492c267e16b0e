"""A recipe's data as a dataset, and as batches on the devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

import spmd
from mesh import Mesh
from spmd.base._errors import message
from spmd.data import ShardedLoader
from spmd.sharding._axes import batch_axes
from spmd.train._feed import Feed, GlobalOrder, PlacedFeed, rows_here
from spmd.train._image_folder import ImageFolder
from spmd.train._import_path import imported
from spmd.train._recipe import Data, Recipe, RecipeError
from spmd.train._text_files import SUFFIXES, TextFeed, TextFiles
from spmd.train._token_files import TokenFiles, files_of
from spmd.train._tokenizers import tokenizer_of

Samples = Dataset[Any] | TextFiles


def dataset_of(table: Data, seed: int) -> Samples:
    """The samples that a table names.

    Args:
        table: what kind, and where.
        seed: of what is drawn for a sample.

    Raises:
        RecipeError: there are none.
    """
    if table.kind == "tokens":
        return TokenFiles(table.paths, table.seq, table.dtype)
    if table.kind == "text":
        return TextFiles(files_of(table.paths, *SUFFIXES), tokenizer_of(table.tokenizer, "[data] tokenizer"))
    if table.kind == "images":
        return ImageFolder(table.paths, table.size, augment=table.augment, mean=table.mean, std=table.std, seed=seed)
    return _own(table.own, table.arguments, "[data]")


def held_out_of(recipe: Recipe, training: Samples) -> Samples:
    """The samples that a recipe evaluates: of the kind of its `training` data.

    Raises:
        RecipeError: there are none.
    """
    table, given = recipe.data, recipe.evaluation
    if table.kind == "tokens":
        return TokenFiles(given.paths, table.seq, table.dtype)
    if isinstance(training, TextFiles):
        return dataclasses.replace(training, files=files_of(given.paths, *SUFFIXES))
    if isinstance(training, ImageFolder):
        return ImageFolder(given.paths, table.size, mean=table.mean, std=table.std, classes=training.classes)
    return _own(given.own, given.arguments, "[evaluation]")


def limited(samples: Samples, vocabulary: int) -> Samples:
    """The same, where a token that the model does not know is an error; `vocabulary` 0: not known."""
    if isinstance(samples, TextFiles):
        return dataclasses.replace(samples, vocabulary=vocabulary)
    if isinstance(samples, TokenFiles):
        samples.vocabulary = vocabulary
    return samples


def _own(path: str, arguments: dict[str, Any], table: str) -> Dataset[Any]:
    dataset = imported(path, f"{table} own")(**arguments)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        what = f"{table} own = {path!r} returned {type(dataset).__name__}, which has no __len__ or no __getitem__"
        raise RecipeError(message(what, fix="return a torch.utils.data.Dataset with __len__ and __getitem__"))
    return dataset


def training_batches(recipe: Recipe, dataset: Samples, mesh: Mesh) -> ShardedLoader:
    """The passes over the data, a new order in each, without the last batch of a pass if it is uneven.

    Raises:
        RecipeError: there is no whole batch, or it does not divide over the devices.
    """
    table, accumulate = recipe.data, recipe.optimizer.accumulate
    axes = batch_axes(mesh)
    rows = rows_here(mesh, axes, table.batch, accumulate)
    stacks = accumulate if accumulate > 1 else 0
    if isinstance(dataset, TextFiles):
        feed = TextFeed(dataset, table.seq, table.batch, rows, shuffle=table.shuffle, seed=recipe.seed, accumulate=stacks)
    else:
        order = GlobalOrder(len(dataset), table.batch, rows, table.shuffle, recipe.seed, whole=True)  # pyright: ignore[reportArgumentType]
        if not len(order):
            what = f"[data] has {order.num_samples} samples, fewer than a batch of {table.batch}"
            raise RecipeError(message(what, fix="a smaller [data] batch, or more data"))
        kind = Feed if table.kind == "dataset" else PlacedFeed
        feed = kind(dataset, order, table.workers, stacks)
    if accumulate == 1:
        return spmd.shard_loader(feed, mesh, (axes or None,))
    # `check` compares what processes feed by where dim 0 lies, which here is that of the micro-batches
    return spmd.shard_loader(feed, mesh, (None, axes or None), check=False)


def held_out_batches(recipe: Recipe, dataset: Samples, mesh: Mesh, is_masked: bool) -> Iterator[Any]:
    """One pass over held-out data in its order, as `Evaluation` takes it.

    Args:
        recipe: how many samples at a time, and how many batches.
        dataset: what `held_out_of` returned.
        mesh: the devices.
        is_masked: pad an uneven last batch, and say what is padding; leave it out otherwise.

    Raises:
        RecipeError: there is no whole batch where none is padded.
    """
    batch, axes = recipe.data.batch // recipe.optimizer.accumulate, batch_axes(mesh)
    rows = rows_here(mesh, axes, batch, 1)
    if isinstance(dataset, TextFiles):
        feed = TextFeed(dataset, recipe.data.seq, batch, rows, whole=not is_masked)
    else:
        order = GlobalOrder(len(dataset), batch, rows, False, 0, whole=not is_masked)  # pyright: ignore[reportArgumentType]
        if not len(order):
            what = f"[evaluation] has {order.num_samples} samples, fewer than a batch of {batch}"
            raise RecipeError(message(what, fix="more data, or a smaller [data] batch"))
        feed = Feed(dataset, order, recipe.data.workers, 0)
    batches = spmd.shard_loader(feed, mesh, (axes or None,), ragged="pad" if is_masked else "error")
    yield from itertools.islice(batches, recipe.evaluation.batches or None)


__all__ = ["dataset_of", "held_out_batches", "held_out_of", "limited", "training_batches"]
