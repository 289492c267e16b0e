"""Batches of a dataset for one process of a job: every sample goes to the devices that compute it, and to no other process.

The order of a pass is drawn from a seed and the pass's number, the same in every process, and cut into global batches. Of each a
process loads the rows that its own devices hold, whatever the mesh. So a run on two processes sees the batches of a run on one,
row by row, and the place in the data is one number.
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
    """For each global batch the samples of this process.

    Attributes:
        epoch: number of the pass.
        start: first batch of the next `iter`.

    Args:
        num_samples: in the dataset.
        batch: samples of a global batch.
        rows: which of them are this process's, in the order in which it holds them.
        shuffle: a new order in every pass.
        seed: of these orders.
        whole: leave out a last batch of fewer samples.
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
    """A loader of such batches, for `spmd.shard_loader`; its place is kept exactly where samples depend on nothing but their number.

    Args:
        dataset: has a length; samples are tensors or containers of them.
        order: which samples, when.
        workers: processes that load.
        accumulate: micro-batches that a batch is stacked of: every tensor gets a first dim of this size; 0: no such dim.
    """

    def __init__(self, dataset: Dataset[Any], order: GlobalOrder, workers: int, accumulate: int) -> None:
        self.dataset, self.order = dataset, order
        self._accumulate, self._start, self._next = accumulate, 0, 0
        # not forked: jax's threads would not be in a fork, and whoever waits for one of their locks waits for ever
        context = "forkserver" if workers else None
        self._loader = DataLoader(dataset, batch_sampler=order, num_workers=workers, multiprocessing_context=context)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass."""
        self.order.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        self.order.start = start
        for number, batch in enumerate(self._loader, start + 1):
            self._next = number
            yield _stacked(batch, self._accumulate) if self._accumulate else batch


class PlacedFeed(Feed):
    """One whose samples depend on their number and pass alone, so that it goes on anywhere without loading what came before."""

    def state_dict(self) -> dict[str, Any]:
        """Samples handed out in this pass."""
        return {"samples": self._next * self.order.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after so many; the size of a batch may be another.

        Raises:
            RecipeError: a batch would begin elsewhere than one ended.
        """
        samples = int(state["samples"])
        if samples % self.order.batch:
            what = f"the checkpoint's position is sample {samples} of an epoch, not a multiple of the batch size {self.order.batch}"
            raise RecipeError(message(what, fix=f"[data] batch = a divisor of {samples}"))
        self._start = samples // self.order.batch


def rows_here(mesh: Mesh, axes: tuple[str, ...], batch: int, accumulate: int) -> list[int]:
    """Rows of a global batch that this process's devices hold, micro-batch after micro-batch.

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
