"""Run by test_collectives under `spmd launch`: every collective over all processes against numpy, one line per case.

Whole numbers in float32, so that sums are exact in any order.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import mesh

host = mesh.init()
count = mesh.device_count()
grid = mesh.Mesh(range(count), (count,), ("x",)).to_jax()


def scattered(x: Any, tiled: bool = True) -> Any:
    return jax.lax.psum_scatter(x, "x", tiled=tiled)


def untiled(x: Any) -> Any:
    return jax.lax.psum_scatter(x.reshape(count, -1), "x", tiled=False)


def rotated(x: Any) -> Any:
    return jax.lax.ppermute(x, "x", [(i, (i + 1) % count) for i in range(count)])


def exchanged(x: Any) -> Any:
    return jax.lax.all_to_all(x, "x", 0, 0, tiled=True)


def in_groups(x: Any) -> Any:
    return jax.lax.psum_scatter(x, "x", tiled=True, axis_index_groups=[[i, i + count // 2] for i in range(count // 2)])


def sums_in_groups(a: np.ndarray) -> np.ndarray:
    """Device i and device i + count / 2 form a group; the first gets the first half of the sum."""
    half = count // 2
    halves = [(a[i % half] + a[i % half + half]).reshape(2, -1)[i // half] for i in range(count)]
    return np.stack(halves)


def pieces(a: np.ndarray) -> np.ndarray:
    return a.reshape(count, count, -1)


def sums(a: np.ndarray) -> np.ndarray:
    return a.sum(0)


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "psum": (functools.partial(jax.lax.psum, axis_name="x"), lambda a: np.broadcast_to(sums(a), a.shape)),
    "pmax": (functools.partial(jax.lax.pmax, axis_name="x"), lambda a: np.broadcast_to(a.max(0), a.shape)),
    "psum_scatter": (scattered, lambda a: sums(a).reshape(count, -1)),
    "psum_scatter untiled": (untiled, lambda a: sums(a).reshape(count, -1)),
    "psum_scatter in groups": (in_groups, sums_in_groups),
    "all_gather": (lambda x: jax.lax.all_gather(x, "x", tiled=True), lambda a: np.broadcast_to(a.reshape(-1), (count, a.size))),
    "all_to_all": (exchanged, lambda a: pieces(a).swapaxes(0, 1).reshape(count, -1)),
    "ppermute": (rotated, lambda a: np.roll(a, 1, 0)),
}


def check(name: str, chunk_bytes: int) -> bool:
    """One collective, in which each device sends or gets pieces of `chunk_bytes`."""
    run, expect = CASES[name]
    per_device = chunk_bytes // 4 * (count if "scatter" in name or name == "all_to_all" else 1)
    values = np.resize(np.arange(1021, dtype=np.float32), (count, per_device))
    split = NamedSharding(grid, PartitionSpec("x"))
    given = jax.make_array_from_callback(values.reshape(-1).shape, split, lambda index: values.reshape(-1)[index])
    mapped = jax.shard_map(run, mesh=grid, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False)
    result = jax.jit(mapped)(given)
    wanted = np.ascontiguousarray(expect(values)).reshape(count, -1)
    right = True
    for shard in result.addressable_shards:
        device = list(grid.devices.flat).index(shard.device)
        right &= bool(np.array_equal(np.asarray(shard.data).reshape(-1), wanted[device]))
    return right


for size in (int(text) for text in sys.argv[1:]):
    for case in CASES:
        if "all_gather" in case and size * count > 2**27:
            continue
        print(case, size, "right" if check(case, size) else "WRONG", flush=True)
