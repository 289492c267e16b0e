"""Rectangular parts (boxes) of an array: overlaps, cuts and coverage. Pure integer arithmetic.

Box((0, 4), (2, 8)).overlap(Box((1, 0), (3, 6)))      # Box((1, 4), (2, 6))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MAX_PAIRWISE = 2048  # up to this many boxes that no straight cut separates are compared pair by pair


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Elements `start <= index < stop` of an array, one entry per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim, in elements."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """The intersection, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices into an array of the values of `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))

    def pieces(self, max_elements: int) -> Iterator[Box]:
        """Cut the box into parts of at most `max_elements` elements, each contiguous in the box's row-major memory, in memory order."""
        if not self.size:
            return
        if self.size <= max_elements:
            yield self
            return
        dim = next(i for i, extent in enumerate(self.shape) if extent > 1)
        step = max(1, max_elements * self.shape[dim] // self.size)
        for at in range(self.start[dim], self.stop[dim], step):
            start = (*self.start[:dim], at, *self.start[dim + 1 :])
            stop = (*self.stop[:dim], min(at + step, self.stop[dim]), *self.stop[dim + 1 :])
            yield from Box(start, stop).pieces(max_elements)


def whole(shape: Sequence[int]) -> Box:
    """The box that covers an entire array of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Convert an index of a jax shard (one slice of step 1 per dim) to a box."""
    bounds = [part.indices(extent) for part, extent in zip(index, shape, strict=True)]
    return Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))


def grid(shape: Sequence[int], parts: Sequence[int]) -> list[Box]:
    """The shards, in row-major order, of an array whose dim `i` is cut into `parts[i]` parts.

    If `parts[i]` does not divide dim `i`, the last shards along it are smaller or missing.
    """
    boxes = [whole(shape)] if math.prod(shape) else []
    for dim, count in enumerate(parts):
        step = -(-shape[dim] // count)
        boxes = [
            Box((*b.start[:dim], at, *b.start[dim + 1 :]), (*b.stop[:dim], min(at + step, shape[dim]), *b.stop[dim + 1 :]))
            for b in boxes
            for at in range(0, shape[dim], step)
        ]
    return boxes


def tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes cover every element of an array of this shape exactly once."""
    if any(b.overlap(whole(shape)) != b for b in boxes):
        return False
    return sum(b.size for b in boxes) == math.prod(shape) and _are_disjoint(list(boxes), 0, 0)


def _are_disjoint(boxes: list[Box], dim: int, uncut: int) -> bool:
    """Whether no two boxes overlap. Cuts along `dim` where no box crosses the cut, then continues with the next dim in each part.

    Args:
        uncut: number of preceding dims along which no cut was possible. When it equals the rank, boxes are compared pair by pair.
    """
    if len(boxes) < 2:
        return True
    ndim = len(boxes[0].start)
    if uncut == ndim:
        return len(boxes) <= _MAX_PAIRWISE and not any(a.overlap(b) for i, a in enumerate(boxes) for b in boxes[:i])
    parts: list[list[Box]] = []
    reach = -1
    for box in sorted(boxes, key=lambda b: b.start[dim]):
        if box.start[dim] >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, box.stop[dim])
    uncut = uncut + 1 if len(parts) == 1 else 0
    return all(_are_disjoint(part, (dim + 1) % ndim, uncut) for part in parts)


__all__ = ["Box", "box_of", "grid", "tile", "whole"]
