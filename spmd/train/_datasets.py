"""Creates a recipe's datasets, and loaders that put their batches on the devices."""

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
    """The training samples of a recipe.

    Args:
        table: the recipe's table [data].
        seed: seed of the random crops and flips of images.

    Raises:
        RecipeError: the table names no file or object, or the files contain no sample.
    """
    if table.kind == "tokens":
        return TokenFiles(table.paths, table.seq, table.dtype)
    if table.kind == "text":
        return TextFiles(files_of(table.paths, *SUFFIXES), tokenizer_of(table.tokenizer, "[data] tokenizer"))
    if table.kind == "images":
        return ImageFolder(table.paths, table.size, augment=table.augment, mean=table.mean, std=table.std, seed=seed)
    return _own(table.own, table.arguments, "[data]")


def held_out_of(recipe: Recipe, training: Samples) -> Samples:
    """The held-out samples of a recipe, of the same kind as its `training` samples.

    Raises:
        RecipeError: [evaluation] names no file or object, or the files contain no sample.
    """
    table, given = recipe.data, recipe.evaluation
    if table.kind == "tokens":
        return TokenFiles(given.paths, table.seq, table.dtype)
    if isinstance(training, TextFiles):
        return dataclasses.replace(training, files=files_of(given.paths, *SUFFIXES))
    if isinstance(training, ImageFolder):
        return ImageFolder(given.paths, table.size, mean=table.mean, std=table.std, classes=training.classes)
    return _own(given.own, given.arguments, "[evaluation]")


def with_vocabulary_check(samples: Samples, vocabulary: int) -> Samples:
    """The samples with a check: a token >= `vocabulary` raises a RecipeError when it is read. 0 means no check."""
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
    """A loader that yields one epoch per `iter`, each in a new order. The last batch of an epoch is dropped if it is not full.

    Raises:
        RecipeError: the data has less than one batch, or the batch does not divide over the devices.
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
    # `check` compares the processes' batches by the sharding of dim 0, which is the dim of the micro-batches here
    return spmd.shard_loader(feed, mesh, (None, axes or None), check=False)


def held_out_batches(recipe: Recipe, dataset: Samples, mesh: Mesh, is_masked: bool) -> Iterator[Any]:
    """One unshuffled pass over the held-out data, for `Evaluation.run`.

    Args:
        recipe: gives the batch size and the number of batches.
        dataset: the result of `held_out_of`.
        mesh: the devices.
        is_masked: pad a last batch that is not full and yield (batch, mask) pairs. Otherwise that batch is dropped.

    Raises:
        RecipeError: the data has less than one batch, and nothing is padded.
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


__all__ = ["dataset_of", "held_out_batches", "held_out_of", "training_batches", "with_vocabulary_check"]
