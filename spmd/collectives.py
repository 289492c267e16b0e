"""Communication inside a manual region (`spmd.shard_map`): torch.distributed's functional collectives over mesh axes.

    total = all_reduce(x, "sum", "data")
    rows = all_gather(x, 0, "model")

A `group` is a mesh axis or a tuple of axes. Arguments are shards, and results are new tensors. Every function is differentiable. The
gradient of "max" and "min" is divided equally among the members that have the extreme value, as in `torch.amax`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.device._storage import load, recording, wrap

Group = str | Sequence[str]


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: Any, axes: Any, of: Callable[[Any, Any], Any]) -> Any:
    """The group's elementwise maximum or minimum, with a gradient; jax's own has none."""
    return of(x, axes)


@_extreme.defjvp
def _extreme_jvp(axes: Any, of: Callable[[Any, Any], Any], primals: Any, tangents: Any) -> Any:
    out = of(primals[0], axes)
    has_it = primals[0] == out
    share = lax.psum(has_it.astype(out.dtype), axes)
    return out, lax.psum(jnp.where(has_it, tangents[0], 0) / share, axes)


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.psum,
    "avg": lax.pmean,
    "max": lambda x, axes: _extreme(x, axes, lax.pmax),
    "min": lambda x, axes: _extreme(x, axes, lax.pmin),
    "product": lambda x, axes: jnp.prod(lax.all_gather(x, axes), axis=0),
}


def all_reduce(tensor: torch.Tensor, reduce_op: str, group: Group) -> torch.Tensor:
    """Reduce `tensor` over the group. Every member gets the result.

    Args:
        reduce_op: "sum", "avg", "max", "min" or "product".

    Raises:
        SpmdError: unknown reduction, or the call is not inside a manual region over the group's axes.
    """
    reduce, axes = _reduction(reduce_op), _axes("all_reduce", group)
    return _run("all_reduce", lambda x: reduce(x, axes), tensor)


def all_gather(tensor: torch.Tensor, gather_dim: int, group: Group) -> torch.Tensor:
    """Concatenate the group's tensors along `gather_dim`. Every member gets the result.

    Raises:
        SpmdError: the tensor has no such dim, or the call is not inside a manual region over the group's axes.
    """
    dim, axes = _dim("all_gather", gather_dim, tensor), _axes("all_gather", group)
    return _run("all_gather", lambda x: lax.all_gather(x, axes, axis=dim, tiled=True), tensor)


def reduce_scatter(tensor: torch.Tensor, reduce_op: str, scatter_dim: int, group: Group) -> torch.Tensor:
    """Reduce `tensor` over the group and return this member's shard of the result along `scatter_dim`.

    Args:
        reduce_op: "sum" or "avg".

    Raises:
        SpmdError: unknown reduction, the tensor has no such dim, the group's size does not divide it, or the call is not inside a manual
            region.
    """
    if reduce_op not in ("sum", "avg"):
        raise SpmdError(
            message(f"reduce_scatter does not support {reduce_op!r}", "known: 'sum', 'avg'", fix="use all_reduce, then take a slice")
        )
    dim, axes = _dim("reduce_scatter", scatter_dim, tensor), _axes("reduce_scatter", group)

    def scatter(x: Any) -> Any:
        size = _size(axes)
        _require_divisible("reduce_scatter", tuple(x.shape), dim, size, group)
        out = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return out / size if reduce_op == "avg" else out

    return _run("reduce_scatter", scatter, tensor)


def all_to_all(tensor: torch.Tensor, split_dim: int, concat_dim: int, group: Group) -> torch.Tensor:
    """Split `tensor` along `split_dim`, send part i to member i of the group, and concatenate the received parts along `concat_dim`.

    Raises:
        SpmdError: the tensor has no such dim, the group's size does not divide `split_dim`, or the call is not inside a manual region.
    """
    split, concat = (_dim("all_to_all", dim, tensor) for dim in (split_dim, concat_dim))
    axes = _axes("all_to_all", group)

    def exchange(x: Any) -> Any:
        _require_divisible("all_to_all", tuple(x.shape), split, _size(axes), group)
        return lax.all_to_all(x, axes, split, concat, tiled=True)

    return _run("all_to_all", exchange, tensor)


def permute(tensor: torch.Tensor, pairs: Iterable[tuple[int, int]], group: Group) -> torch.Tensor:
    """Send this member's tensor from `source` to `target` for each pair (source, target). A member that receives nothing gets zeros.

    Raises:
        SpmdError: `pairs` are not pairs of ints, a pair names a member that the group does not have, a member sends or receives twice,
            or the call is not inside a manual region.
    """
    axes, sent = _axes("permute", group), _pairs(pairs)

    def send(x: Any) -> Any:
        size = _size(axes)
        outside = [pair for pair in sent if not all(0 <= member < size for member in pair)]
        if outside:
            what = f"permute over {group!r} has no member for {outside[0]}"
            raise SpmdError(message(what, f"the group has {size} members, 0 to {size - 1}", fix="write pairs (source, target) of these"))
        for side, members in zip(("sends", "receives"), zip(*sent, strict=True), strict=False):
            twice = next((member for member in members if members.count(member) > 1), None)
            if twice is not None:
                what = f"permute over {group!r}: member {twice} {side} twice"
                raise SpmdError(
                    message(what, f"pairs: {sent}", fix="let each member send to at most one other and receive from at most one")
                )
        return lax.ppermute(x, axes, sent)

    return _run("permute", send, tensor)


def axis_index(group: Group) -> torch.Tensor:
    """The index of this member in the group: a 0-dim int64 tensor on the device."""
    axes = _axes("axis_index", group)
    with exact_dtypes():
        return wrap(_checked(lambda: lax.axis_index(axes)).astype(jnp.int64))


def _dim(name: str, dim: Any, tensor: torch.Tensor) -> int:
    """A dim of the tensor, counted from 0."""
    rank = _required(name, tensor).dim()
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        what = f"{name} got {shown(dim)} as a dim of a tensor of shape {tuple(tensor.shape)}"
        fix = "pass the dim, then the group: all_gather(x, 0, 'data')"
        raise SpmdError(message(what, f"its dims are {-rank} to {rank - 1}" if rank else "it has no dims", *called_at(), fix=fix))
    return dim % rank


def _required(name: str, tensor: Any) -> torch.Tensor:
    """The argument of a collective, which must be a device tensor."""
    if isinstance(tensor, torch.Tensor) and tensor.device.type == "jax":
        return tensor
    what = f"a tensor on {tensor.device}" if isinstance(tensor, torch.Tensor) else shown(tensor)
    raise SpmdError(message(f"{name} takes a shard, a tensor on device 'jax', got {what}", *called_at(), fix="call it for each tensor"))


def _pairs(pairs: Any) -> list[tuple[int, int]]:
    """The pairs (source, target) of `permute`."""
    listed = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    wrong = next((p for p in listed if not (isinstance(p, tuple | list) and len(p) == 2 and all(map(_is_member, p)))), None)
    if wrong is not None or not isinstance(pairs, Iterable):
        what = f"permute takes pairs (source, target) of ints, got {wrong if isinstance(wrong, tuple | list) else shown(wrong)}"
        raise SpmdError(message(what, *called_at(), fix="permute(x, [(0, 1), (1, 0)], 'data')"))
    return [(int(source), int(target)) for source, target in listed]


def _is_member(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _run(name: str, collective: Callable[[Any], Any], tensor: torch.Tensor) -> torch.Tensor:
    with exact_dtypes():
        value = load(_required(name, tensor))
        return wrap(_checked(lambda: collective(value)))


def _checked(collective: Callable[[], Any]) -> Any:
    try:
        return collective()
    except NameError as error:  # jax raises it for an axis that is not manual here
        recorder = recording.get()
        axes = None if recorder is None else recorder.axes
        if axes is not None:
            name = str(error).partition("axis name: ")[2].partition(".")[0]
            what = f"a collective runs over axis {name!r}, which the mesh of its region does not have"
            known = f"axes of the mesh: {', '.join(map(repr, axes))}"
            raise SpmdError(message(what, known, *called_at(), fix="name one of these, or a tuple of them")) from error
        raise SpmdError(
            message(
                f"a collective runs outside a manual region: {error}",
                *called_at(),
                fix="call it inside a function mapped by spmd.shard_map over that axis",
            )
        ) from error


def _reduction(name: Any) -> Callable[[Any, Any], Any]:
    if not isinstance(name, str) or name not in _REDUCTIONS:
        raise SpmdError(message(f"{name!r} is not a reduction", f"known: {', '.join(map(repr, _REDUCTIONS))}", fix="use one of these"))
    return _REDUCTIONS[name]


def _axes(name: str, group: Any) -> str | tuple[str, ...]:
    """The mesh axes of a group: names, each once. jax takes a number among them as a dim of the tensor."""
    axes: tuple[Any, ...] | None = (group,) if isinstance(group, str) else tuple(group) if isinstance(group, Sequence) else None
    if axes is not None and all(isinstance(axis, str) for axis in axes) and len(set(axes)) == len(axes):
        return group if isinstance(group, str) else axes
    what = f"{name} takes a mesh axis or a tuple of different ones as its group, got {shown(group) if axes is None else repr(group)}"
    raise SpmdError(message(what, *called_at(), fix="name the axes: 'data', or ('data', 'model')"))


def _size(axes: str | tuple[str, ...]) -> int:
    return _checked(lambda: lax.axis_size(axes))


def _require_divisible(what: str, shape: tuple[int, ...], dim: int, size: int, group: Group) -> None:
    if shape[dim] % size:
        raise SpmdError(
            message(
                f"{what} over {group!r} cannot split dim {dim} of shape {shape}",
                f"dim {dim} has {shape[dim]} elements, the group {size} members",
                fix="split a dim that the group's size divides, or pad it",
            )
        )


__all__ = ["Group", "all_gather", "all_reduce", "all_to_all", "axis_index", "permute", "reduce_scatter"]
