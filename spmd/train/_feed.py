"""Loads the batches of a dataset in a job of several processes: each sample is loaded only by the process whose devices use it.

The order of an epoch is drawn from a seed and the epoch's number, identically in every process, and cut into global batches. Each
process loads the rows of a global batch that its own devices hold, for any mesh. So a run on two processes sees the same batches
as a run on one, row by row, and the position in the data is one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from mesh import Mesh, PartitionSpec, ShardingSpec
from spmd.base._errors import message
from spmd.base._torch import pytree
from spmd.train._recipe import RecipeError


class GlobalOrder(Sampler[list[int]]):
    """Batch sampler: yields this process's sample indices of each global batch.

    Attributes:
        epoch: number of the epoch.
        start: index of the first batch that the next `iter` yields.

    Args:
        num_samples: size of the dataset.
        batch: number of samples in a global batch.
        rows: the rows of a global batch that this process loads, in the order of its devices' shards.
        shuffle: draw a new order for every epoch.
        seed: seed of these orders.
        whole: drop the last batch if it is not full.
    """

    def __init__(self, num_samples: int, batch: int, rows: list[int], shuffle: bool, seed: int, whole: bool) -> None:
        self.num_samples, self.batch, self.rows, self.shuffle, self.seed = num_samples, batch, rows, shuffle, seed
        self.num_batches = num_samples // batch if whole else -(-num_samples // batch)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        if self.shuffle:
            order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        else:
            order = torch.arange(self.num_samples)
        for number in range(start, self.num_batches):
            samples: list[int] = order[number * self.batch : (number + 1) * self.batch].tolist()
            mine = [samples[row] for row in self.rows if row < len(samples)]
            if mine:
                yield mine


class Feed:
    """Loader of this process's rows of each global batch, for `spmd.shard_loader`.

    It has no state of its own, so `shard_loader` resumes it by skipping batches. See `PlacedFeed` for datasets that need no skipping.

    Args:
        dataset: a dataset with a length. Samples are tensors or containers of tensors.
        order: the sample indices of each batch.
        workers: number of worker processes.
        accumulate: number of micro-batches in a batch; every tensor gets a leading dim of this size. 0 adds no dim.
    """

    def __init__(self, dataset: Dataset[Any], order: GlobalOrder, workers: int, accumulate: int) -> None:
        self.dataset, self.order = dataset, order
        self._accumulate, self._start, self._next = accumulate, 0, 0
        # Not "fork": a forked process lacks jax's threads, so waiting for a lock that one of them held would deadlock.
        context = "forkserver" if workers else None
        self._loader = DataLoader(dataset, batch_sampler=order, num_workers=workers, multiprocessing_context=context)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.order.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        self.order.start = start
        for number, batch in enumerate(self._loader, start + 1):
            self._next = number
            yield _stacked(batch, self._accumulate) if self._accumulate else batch


class PlacedFeed(Feed):
    """A `Feed` whose samples depend only on their index and epoch, so it resumes at any position without loading earlier samples."""

    def state_dict(self) -> dict[str, Any]:
        """The number of samples of this epoch that were yielded."""
        return {"samples": self._next * self.order.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the saved number of samples. The batch size may differ from the saved run's.

        Raises:
            RecipeError: the saved position is not a multiple of the batch size.
        """
        samples = int(state["samples"])
        if samples % self.order.batch:
            what = f"the checkpoint's position is sample {samples} of an epoch, not a multiple of the batch size {self.order.batch}"
            raise RecipeError(message(what, fix=f"[data] batch = a divisor of {samples}"))
        self._start = samples // self.order.batch


def rows_here(mesh: Mesh, axes: tuple[str, ...], batch: int, accumulate: int) -> list[int]:
    """The rows of a global batch that this process's devices hold, ordered by micro-batch.

    Raises:
        RecipeError: a micro-batch does not divide over the devices along `axes`.
    """
    size = batch // accumulate
    sharding = ShardingSpec(mesh, PartitionSpec(axes or None))
    if size % sharding.num_shards:
        what = f"[data] batch = {batch} in {accumulate} micro-batches does not divide over the {sharding.num_shards} devices along {axes}"
        raise RecipeError(message(what, fix=f"a multiple of {sharding.num_shards * accumulate}"))
    pieces = sharding.to_jax().addressable_devices_indices_map((size,)).values()
    rows = sorted({row for piece in pieces if piece for row in range(size)[piece[0]]})
    return [micro * size + row for micro in range(accumulate) for row in rows]


def _stacked(batch: Any, accumulate: int) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.unflatten(0, (accumulate, -1)), batch)


__all__ = ["Feed", "GlobalOrder", "PlacedFeed", "rows_here"]
