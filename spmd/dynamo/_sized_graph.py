"""A graph's executables for all sizes up to a bucket's: inputs are padded, and results are cut. See Note [Padding]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd.base._convert import exact_dtypes, host_array
from spmd.base._errors import TraceError
from spmd.base._open_sizes import open_sizes
from spmd.device._arrays import fetched
from spmd.device._layout import annotation_of
from spmd.device._storage import buffer_of, is_device_tensor, is_whole, load, wrap
from spmd.device._views import contiguous_stride
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._graph_executables import GraphExecutables, Sizes
from spmd.dynamo._graph_inputs import Given
from spmd.dynamo._graph_passes import Joint, Traced
from spmd.dynamo._graph_results import Made, Plain, Shown
from spmd.dynamo._sized_traces import SizedTraces
from spmd.program.sizes._dims import SMALLEST, Dim, Named
from spmd.program.sizes._evaluate import SizeDecides
from spmd.program.sizes._formulas import Inexact, Points
from spmd.program.sizes._sized_arguments import padded
from spmd.program.sizes._trace_points import more_points, points_within, with_enough_points
from spmd.program.trace._known_inputs import ArgumentCheck
from spmd.program.trace._memory_order import stored_values
from spmd.program.trace._window import Window
from spmd.program.xla._executable import on_all_devices

_LARGEST = 256  # traces cover at least sizes up to this; larger sizes cost no more


class Sizing(NamedTuple):
    """The sizes of a program.

    Attributes:
        today: all sizes of the call for which it is made.
        vary: indices of the sizes that may differ in other calls.
        units: for each of these, a number of which it is always a multiple. Bucket, limits and the program count sizes in this unit.
        bucket: the sizes for which the program is compiled.
        multiples: numbers of which the sizes of the traces are multiples, so that shards divide them.
        limits: the smallest and largest sizes for which the graph is traced.
    """

    today: tuple[int, ...]
    vary: tuple[int, ...]
    units: tuple[int, ...]
    bucket: tuple[int, ...]
    multiples: tuple[int, ...]
    limits: tuple[tuple[int, int], ...]

    def all_at(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """All sizes, with `sizes` for those that vary."""
        found = list(self.today)
        for i, unit, size in zip(self.vary, self.units, sizes, strict=True):
            found[i] = unit * size
        return tuple(found)

    def of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The varying sizes among all sizes."""
        return tuple(sizes[i] // unit for i, unit in zip(self.vary, self.units, strict=True))

    def ranges(self) -> list[list[tuple[int, int]]]:
        """Ranges of sizes for which one set of traces may be valid: all sizes, all that are not small, those of the bucket."""
        today = self.of(self.today)
        found = [
            list(self.limits),
            [(max(least, most // 6), most) for least, most in self.limits],
            [
                (max(least, b // 2 + 1) if b * unit > SMALLEST else least, b)
                for (least, _), b, unit in zip(self.limits, self.bucket, self.units, strict=True)
            ],
        ]
        found = [limits for limits in found if all(low <= n <= high for n, (low, high) in zip(today, limits, strict=True))]
        found = [limits for i, limits in enumerate(found) if limits not in found[:i]]
        return [*found[:1], *found]  # the first twice, at other points: a size may equal a constant by chance


def sizing(calls: Calls, args: Sequence[Any], vary: Sequence[int]) -> Sizing | None:
    """The sizes of the program for a call; None if no bucket covers them.

    Args:
        vary: indices of the sizes that may differ.
    """
    sizes, today = calls.sizes, calls.sizes.of(args)
    found = list[tuple[int, int, int, int, tuple[int, int]]]()
    for i in vary:
        (least, largest), unit, parts = sizes.limits(i, today), sizes.unit(i, today), 1
        if not unit:  # another size needs another graph
            continue
        for position, value in enumerate(args):
            if is_device_tensor(value) and (spec := annotation_of(value)) is not None and sizes.varies(position, (i,)):
                parts = math.lcm(parts, sizes.parts(position, i, spec.padded_shape((1,) * value.ndim)))
        most = max(_LARGEST, 2 << (today[i] - 1).bit_length()) if today[i] > 0 else 0
        most = most if largest is None else min(most, largest)
        if not parts or not least <= today[i] <= most:
            return None
        bucket = Dim(sizes.names[i], max=most).bucket(today[i], math.lcm(unit, parts)) // unit
        found.append((i, unit, bucket, parts // math.gcd(parts, unit), (-(-least // unit), max(most // unit, bucket))))
    if not found:
        return None
    which, units, buckets, multiples, limits = zip(*found, strict=True)
    return Sizing(today, which, units, buckets, multiples, limits)


class _Passes(NamedTuple):
    traces: SizedTraces
    joint: Joint

    @property
    def is_certain(self) -> bool:
        return self.traces.is_certain


class SizedGraph(GraphExecutables):
    """The executables of one bucket.

    Args:
        known: traces from other buckets, which are reused if valid; new traces are added.

    Raises:
        Inexact: it is not proved that padding does not affect the results.
    """

    def __init__(
        self, calls: Calls, args: tuple[Any, ...], name: str, how: Sizing, known: list[SizedTraces], *, takes_numbers: bool
    ) -> None:
        self._how, self._sizes, self._known = how, calls.sizes, known
        self._whole = how.all_at(how.bucket)
        self._latest: tuple[Sizes, Any, Any] = ((), None, None)
        super().__init__(calls, args, name, takes_numbers=takes_numbers)
        self._is_on_cpu = jax.default_backend() == "cpu"
        self._is_plain = False

    def sizes_of(self, args: tuple[Any, ...]) -> Sizes:
        return self._how.of(self._sizes.of(args))

    def reason(self, args: tuple[Any, ...]) -> str | None:
        """The reason why the program is not valid for a call; None if it is."""
        sizes = self.sizes_of(args)
        if any(n > b for n, b in zip(sizes, self._how.bucket, strict=True)):
            return "a size is larger than the bucket's"
        return self._traces.reason(sizes, self._how.bucket)

    def _given_as(self, tensor: torch.Tensor, position: int, with_gradient: bool) -> Given:
        given = super()._given_as(tensor, position, with_gradient)
        if position >= len(self._positions) or not self._sizes.varies(self._positions[position], self._how.vary):
            return given
        order = tuple(range(tensor.dim()))
        if tensor.is_contiguous():  # whatever the shape of its storage
            given = given._replace(stride=None)
        if given.stride is not None:
            order = tuple(sorted(order, key=tensor.stride().__getitem__, reverse=True))
            if not is_whole(tensor.permute(order), buffer_of(tensor)):
                raise Inexact("an input of varying size that is a part of its storage with permuted dims")
        return self._resized(given._replace(order=order), position, self._whole)

    def _resized(self, given: Given, position: int, sizes: Sequence[int]) -> Given:
        """How a tensor is passed for other sizes: with its dims in the same memory order."""
        assert given.order is not None
        size = self._sizes.shape(self._positions[position], sizes)
        root = tuple(size[d] for d in given.order)
        stride = dict(zip(given.order, contiguous_stride(root), strict=True))
        return given._replace(root=root, size=size, stride=given.stride and tuple(stride[d] for d in range(len(size))))

    def _traced(self, calls: Calls, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Traced:
        sizes = self.sizes_of(args)
        found = next((traces for traces in self._known if traces.reason(sizes, self._how.bucket) is None), None)
        if found is None:
            found, joint = self._made(calls, args, tensors)
            self._known.insert(0, found)
        else:
            joint = found.at(self._how.bucket)
        why = found.reason(sizes, self._how.bucket)
        if why is not None:  # known only after the program was evaluated
            raise SizeDecides(why)
        self._traces = found
        return joint.split()

    def _made(self, calls: Calls, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> tuple[SizedTraces, Joint]:
        """Traces that are valid for a call, and both passes for the bucket."""
        how, ranges = self._how, self._how.ranges()
        names = tuple(
            f"{calls.sizes.names[i]} / {unit}" if unit > 1 else calls.sizes.names[i] for i, unit in zip(how.vary, how.units, strict=True)
        )
        extents = [lambda sizes, form=form: form(how.all_at(sizes)) for form in calls.sizes.rounded]
        for number, limits in enumerate(ranges):
            try:
                steps = [(multiple, 0) for multiple in how.multiples]
                points = points_within(limits, steps, int(number == 1))
                holds_for = [(low if number else least, most) for low, (least, most) in zip(points[0], limits, strict=True)]
                joints = list[Joint]()

                def made(at: Sequence[Sequence[int]], joints: list[Joint] = joints, holds_for: Any = holds_for) -> _Passes:
                    joints += [self._joint_at(point, calls, args, tensors) for point in at[len(joints) :]]
                    traces = SizedTraces(names, Points(at), joints, holds_for, extents)
                    return _Passes(traces, traces.at(how.bucket))

                found, joint = with_enough_points(made, points, more_points(points, steps))
                why = found.reason(how.of(how.today), how.bucket)
                if why is None:
                    return found, joint
                raise SizeDecides(why)
            except Inexact as error:
                if number == len(ranges) - 1 or not error.may_depend_on_range:
                    raise
        raise AssertionError("there is a range")

    def _joint_at(self, point: Sequence[int], calls: Calls, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Joint:
        """Both passes, traced for other sizes than the call's.

        Raises:
            SizeDecides: the graph is not valid for these sizes.
        """
        sizes = self._how.all_at(point)
        why = self._sizes.refusal(sizes)
        if why is not None:
            raise SizeDecides(why)
        given = [how if how.order is None else self._resized(how, i, sizes) for i, how in enumerate(self.given)]
        examples = [jax.ShapeDtypeStruct(how.root, buffer_of(t).dtype) for how, t in zip(given, tensors, strict=True)]
        given_hosts = [self._host_for(position, t, sizes) for position, t in self._placed_hosts(args)]
        hosts = [*map(stored_values, given_hosts), np.zeros(len(point), np.int64)]
        try:
            with open_sizes():
                joint = self._trace(calls, tuple(self._sizes.replaced(args, sizes)), given_hosts, given).joint(examples, hosts)
        except (TraceError, Inexact):
            raise
        except Exception as error:
            if self._numbers:  # Python may need the value of one of these
                raise
            raise SizeDecides(f"for sizes {tuple(sizes)} the graph raises {type(error).__name__}: {error}") from error
        return joint

    def _placed_hosts(self, args: tuple[Any, ...]) -> list[tuple[int, torch.Tensor]]:
        """The CPU tensors with their positions among the inputs; -1 for a tensor that the graph contains."""
        return list(zip([*self._hosts, *[-1] * len(self._held_hosts)], self._host_tensors(args), strict=True))

    def _host_for(self, position: int, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if not self._sizes.varies(position, self._how.vary):
            return tensor
        return torch.zeros(self._sizes.shape(position, sizes), dtype=tensor.dtype)

    def _host_arrays(self, args: tuple[Any, ...]) -> Sequence[Any]:
        found = list[Any]()
        for position, tensor in self._placed_hosts(args):
            varies = self._sizes.varies(position, self._how.vary)
            value = host_array(tensor) if varies else stored_values(tensor)  # as in the trace, where it is contiguous if it varies
            if varies:
                whole = self._sizes.shape(position, self._whole)
                value = np.pad(value, [(0, m - n) for n, m in zip(value.shape, whole, strict=True)])
            found.append(value)
        return [*found, np.asarray(self.sizes_of(args), np.int64)]

    def arrays(self, tensors: Sequence[torch.Tensor], given: Sequence[Given]) -> list[Any]:
        return super().arrays([_whole(t, how) for t, how in zip(tensors, given, strict=True)], given)

    def backward(self, kept: Sequence[Any], cotangents: Sequence[Any], sizes: Sizes) -> list[torch.Tensor | None]:
        assert self.traced.backward is not None
        avals = self.traced.backward.rest.in_avals[-len(cotangents) :]
        whole = [None if c is None else load(_padded(wrap(c), a.shape)) for c, a in zip(cotangents, avals, strict=True)]
        return super().backward([*kept, np.asarray(sizes, np.int64)], whole, sizes)

    def _shown(self, sizes: Sizes) -> tuple[list[Made | Shown | Plain], list[Window | None]]:
        return self._of(sizes)[0]

    def _input_checks(self, sizes: Sizes) -> list[ArgumentCheck]:
        return self._traces.input_checks.at(sizes)

    def _of(self, sizes: Sizes) -> tuple[Any, list[tuple[int, ...]]]:
        """(results and windows, shapes of all results) for a call with these sizes."""
        if self._latest[0] != sizes:
            self._latest = sizes, self._traces.shown(sizes), self._traces.shapes(sizes)
        return self._latest[1:]

    def _cut(self, values: Sequence[Any], outputs: Sequence[int], sizes: Sizes) -> Sequence[Any]:
        shapes = self._of(sizes)[1]
        return [self._cut_one(value, shapes[i]) for value, i in zip(values, outputs, strict=True)]

    def _cut_one(self, value: Any, shape: tuple[int, ...]) -> Any:
        if value.shape == shape:
            return value
        if self._is_on_cpu:
            return on_all_devices(np.ascontiguousarray(fetched(value)[tuple(slice(0, n) for n in shape)]), self._replicated)
        with exact_dtypes():
            return jnp.asarray(lax.slice(value, (0,) * len(shape), shape))


def _whole(tensor: torch.Tensor, how: Given) -> torch.Tensor:
    """The tensor padded to the sizes with which it is passed."""
    if how.order is None:
        return tensor
    if how.stride is None:
        return _padded(tensor, how.size)
    back = sorted(range(len(how.order)), key=how.order.__getitem__)
    return _padded(tensor.detach().permute(how.order), how.root).permute(back)


def _padded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    dims = {d: str(d) for d in range(len(shape))}
    return padded(Named((), tensor, dims), {dims[d]: n for d, n in enumerate(shape)})


__all__ = ["SizedGraph", "Sizing", "sizing"]
