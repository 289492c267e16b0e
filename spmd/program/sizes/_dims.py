"""Dims whose sizes vary: how the user declares them, and their sizes in a call.

spmd.Dim("seq", max=512)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from mesh._mesh_errors import nearest
from spmd.base._errors import SpmdError, message, shown

SMALLEST = 8  # the smallest bucket; programs for smaller sizes are hardly faster


@dataclass(frozen=True)
class Dim:
    """A named size that varies between calls. Dims of the same name have the same size within a call.

    Args:
        name: used in messages, and to refer to the dim in other places.
        max: the largest size, in elements.
        buckets: the sizes to compile programs for, in increasing order up to `max`; None: powers of two from 8 on, and `max`.
        masked_by_model: whether the model masks padding itself. If so, tensors are padded with `fill`, nothing is proved, and results
            are returned as the model computed them.
        fill: the value of the padding.
        min: the smallest size, in elements; a call with a smaller one raises an error.

    Raises:
        SpmdError: the arguments are invalid.
    """

    name: str
    max: int
    buckets: tuple[int, ...] | None = None
    masked_by_model: bool = False
    fill: float = 0
    min: int = 1

    def __post_init__(self) -> None:
        given: Any = self  # of any types: they are the user's
        if not isinstance(given.name, str) or not self.name or type(self.max) is not int or self.max < 1:
            what = f"Dim({self.name!r}, max={self.max!r}) needs a name (a text) and a positive integer max"
            raise SpmdError(message(what, fix='spmd.Dim("batch", max=64)'))
        if type(self.min) is not int or not 1 <= self.min <= self.max:
            what = f"the minimum of dim {self.name!r} must be between 1 and its maximum"
            raise SpmdError(message(what, f"min={self.min!r}, max={self.max}", fix=f"spmd.Dim({self.name!r}, min=1, max={self.max})"))
        if not isinstance(given.masked_by_model, bool):
            what = f"masked_by_model of dim {self.name!r} must be True or False, got {shown(self.masked_by_model)}"
            raise SpmdError(message(what, fix=f"spmd.Dim({self.name!r}, max={self.max}, masked_by_model=True)"))
        if not isinstance(given.fill, int | float):
            what = f"fill of dim {self.name!r} must be a number, got {shown(self.fill)}"
            raise SpmdError(message(what, fix=f"spmd.Dim({self.name!r}, max={self.max}, masked_by_model=True, fill=0)"))
        if self.fill != 0 and not self.masked_by_model:
            what = f"dim {self.name!r} has fill={self.fill!r}, which only masked_by_model=True uses: otherwise no result depends on padding"
            fix = f"spmd.Dim({self.name!r}, max={self.max}, masked_by_model=True, fill={self.fill!r})"
            raise SpmdError(message(what, fix=fix))
        if self.buckets is not None:
            object.__setattr__(self, "buckets", self._checked_buckets(self.buckets))

    def _checked_buckets(self, buckets: Any) -> tuple[int, ...]:
        fix = f"spmd.Dim({self.name!r}, max={self.max}, buckets=({max(1, self.max // 4)}, {self.max}))"
        sizes: tuple[Any, ...] = tuple(buckets) if isinstance(buckets, Iterable) else ()
        are_integers = all(isinstance(size, Integral) for size in sizes)
        if not sizes or not are_integers or list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] != self.max:
            what = f"the buckets of dim {self.name!r} must increase up to max"
            raise SpmdError(message(what, f"buckets={buckets!r}, max={self.max}", fix=fix))
        return tuple(map(int, sizes))

    def bucket(self, size: int, multiple: int = 1) -> int:
        """Size of the program that runs a call of size `size`, rounded up to a multiple of `multiple` (the number of shards)."""
        if self.buckets is not None:
            found = next(b for b in self.buckets if b >= size)
        else:
            found = min(max(SMALLEST, 1 << (size - 1).bit_length()), self.max)
        return -(-found // multiple) * multiple


@dataclass(frozen=True)
class Named:
    """A tensor among a call's arguments, or an array of a batch, with dims that vary.

    Attributes:
        path: the argument's name, followed by keys into containers.
        dims: name of each varying dim, by its index.
    """

    path: tuple[Any, ...]
    tensor: Any
    dims: Mapping[int, str]

    @property
    def title(self) -> str:
        return f"{self.path[0]}{''.join(f'[{key!r}]' for key in self.path[1:])}"


class AskedDims:
    """The dims that an option declares as varying, usually `dynamic=`.

    Attributes:
        dims: every declared `Dim`, by name.
    """

    def __init__(self, dynamic: Mapping[str, Any], parameters: Sequence[str] | None, option: str = "dynamic") -> None:
        """`parameters`: names of the function's parameters; None if it accepts any."""
        self.dims: dict[str, Dim] = {}
        self._option = option
        self._require_mapping(dynamic)
        self._tree = dict(dynamic)
        for argument in dynamic:
            if parameters is not None and argument not in parameters:
                what = f"{option} names an argument {argument!r} that the function does not have{nearest(argument, list(parameters))}"
                first = f'{option}={{{parameters[0]!r}: {{0: spmd.Dim("batch", max=64)}}}}' if parameters else f"drop {option}"
                raise SpmdError(message(what, f"its arguments: {', '.join(parameters) or 'none'}", fix=first))
        self._note(dynamic)
        self._require_known(dynamic)

    def _require_mapping(self, tree: Any) -> None:
        if not isinstance(tree, Mapping):
            what = f"{self._option} has {tree!r} where a dim is expected"
            raise SpmdError(message(what, fix=f'{self._option}={{"x": {{0: spmd.Dim("batch", max=64)}}}}'))

    def _note(self, tree: Any) -> None:
        for value in tree.values() if isinstance(tree, Mapping) else ():
            if isinstance(value, Dim):
                if self.dims.setdefault(value.name, value) != value:
                    what = f"dim {value.name!r} is defined twice"
                    raise SpmdError(
                        message(
                            what,
                            f"{self.dims[value.name]} and {value}",
                            fix=f"write {value.name!r} the second time",
                        )
                    )
            else:
                self._note(value)

    def _require_known(self, tree: Any) -> None:
        for value in tree.values() if isinstance(tree, Mapping) else (tree,):
            if isinstance(value, str):
                if value not in self.dims:
                    what = f"{self._option} names a dim {value!r} that is not defined{nearest(value, list(self.dims))}"
                    raise SpmdError(message(what, fix=f"spmd.Dim({value!r}, max=512)"))
            elif not isinstance(value, Dim):
                self._require_mapping(value)
                self._require_known(value)

    def found(self, arguments: Mapping[str, Any]) -> list[Named]:
        """The tensors of a call that have declared dims."""
        return [named for name, tree in self._tree.items() if name in arguments for named in self._walk((name,), arguments[name], tree)]

    def _walk(self, path: tuple[Any, ...], value: Any, tree: Any) -> Iterator[Named]:
        title = Named(path, value, {}).title
        if not isinstance(tree, Mapping):
            what = f"{self._option} has {tree!r} for {title}, where a mapping from its dims is expected"
            raise SpmdError(message(what, fix=f'{self._option}={{{path[-1]!r}: {{0: spmd.Dim("batch", max=64)}}}}'))
        if isinstance(value, torch.Tensor | np.ndarray):
            for dim in tree:
                if isinstance(dim, str) and dim.removeprefix("-").isdecimal():
                    what = f"{self._option} names dim {dim!r} of {title}, and dims are integers"
                    raise SpmdError(message(what, fix=f'{self._option}={{{path[-1]!r}: {{{int(dim)}: spmd.Dim("batch", max=64)}}}}'))
                if type(dim) is not int or not -value.ndim <= dim < value.ndim:
                    what = f"{self._option} names dim {dim!r} of {title}, which has {value.ndim} dims"
                    raise SpmdError(message(what, f"its shape is {tuple(value.shape)}", fix="name an existing dim of the tensor"))
            twice = next((d for d in tree if d < 0 and d % value.ndim in tree), None)
            if twice is not None:
                what = f"{self._option} names one dim of {title} twice: {twice % value.ndim} and {twice}"
                raise SpmdError(message(what, f"its shape is {tuple(value.shape)}", fix=f"leave out {twice}"))
            deeper = next((dim for dim, named in tree.items() if not isinstance(named, Dim | str)), None)
            if deeper is not None:
                what = f"{self._option} has {tree[deeper]!r} for dim {deeper} of {title}, where a Dim or its name is expected"
                raise SpmdError(message(what, f"its shape is {tuple(value.shape)}", fix=f'{{{deeper}: spmd.Dim("batch", max=64)}}'))
            yield Named(path, value, {d % value.ndim: n.name if isinstance(n, Dim) else n for d, n in tree.items()})
            return
        for key, inner in tree.items():
            try:
                part = value[key]
            except (KeyError, IndexError, TypeError) as error:
                what = f"{self._option} names {key!r} of {title}, which does not exist"
                raise SpmdError(
                    message(what, f"{title} is a {type(value).__name__}", fix="name an existing item, or a dim of a tensor")
                ) from error
            yield from self._walk((*path, key), part, inner)

    def sizes(self, found: Sequence[Named]) -> dict[str, int]:
        """Size of each named dim in a call.

        Raises:
            SpmdError: a size is not between `min` and `max` of its dim, or two tensors have different sizes for the same name.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for named in found:
            for d, name in named.dims.items():
                size, where = int(named.tensor.shape[d]), f"dim {d} of {named.title}"
                known, first = sizes.setdefault(name, (size, where))
                if known != size:
                    what = f"dim {name!r} has two sizes in one call"
                    raise SpmdError(message(what, f"{first} is {known}, {where} is {size}", fix="give the second dim a different name"))
                dim = self.dims[name]
                if not dim.min <= size <= dim.max:
                    what = f"dim {name!r} has size {size}, which is not between {dim.min} and {dim.max}"
                    least = f", min={min(size, dim.min)}" if dim.min > 1 else ""
                    wider = f"spmd.Dim({name!r}{least}, max={max(size, dim.max)})" if size else f"skip calls whose dim {name!r} is empty"
                    raise SpmdError(message(what, f"{where}, shape {tuple(named.tensor.shape)}", fix=wider))
        return {name: size for name, (size, _) in sizes.items()}


__all__ = ["AskedDims", "Dim", "Named"]
