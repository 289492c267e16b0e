"""`shard_loader`: batches of any loader, laid out over a mesh, ahead of the step that takes them; its place can be saved.

    batches = spmd.shard_loader(DataLoader(dataset, 64, shuffle=True, num_workers=4), m, ("data", None))
    for x, y in batches:
        loss = train_step(x, y)          # the next two batches are on their way to the devices already
    spmd.checkpoint.save(path, step, {"model": model, "optimizer": optimizer, "batches": batches})

Note [Loaders and random numbers]. Batches are taken from the loader on the caller's thread, right after the last step was
dispatched: while the devices compute, the loader works and its batches are sent. Not on a thread of its own, because most
loaders draw from the process's global random streams, and where those draws fall between the program's own would be a matter
of luck. The loader draws from streams that are swapped in for it alone, so neither the prefetch nor a resume changes a number
anywhere. Heavy work on the host belongs into the loader's own workers.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import jax
import numpy as np
import torch

from mesh import Mesh, PartitionSpec, ShardingSpec, as_spec
from spmd._padded_batches import Padding
from spmd.base._convert import exact_dtypes, host_array
from spmd.base._errors import SpmdError, message
from spmd.checkpoint._coordination import Gang, current_gang
from spmd.checkpoint._rng_state import host_streams, set_host_streams
from spmd.device._storage import buffer_of, wrap, wrap_host
from spmd.sharding._annotate import as_mesh
from spmd.sharding._tensor import become_sharded

_END = -1  # in place of a batch's size


def shard_loader(
    loader: Iterable[Any],
    mesh: Any,
    spec: Any,
    prefetch: int = 2,
    *,
    ragged: Literal["error", "drop", "pad"] = "error",
    feeds: Literal["slice", "batch"] = "slice",
    check: bool = True,
    gang: Gang | None = None,
    pad_to: Mapping[Any, Any] | None = None,
    fill: Any = None,
) -> ShardedLoader:
    """Batches of `loader` as device tensors laid out over `mesh`.

    Args:
        loader: any iterable of batches: torch DataLoader, grain, Hugging Face datasets, a list. Batches are arrays of torch or
            numpy, or dicts, lists and tuples of them; other values in them are passed on.
        mesh: the devices.
        spec: a PartitionSpec or tuple for all arrays (dims beyond it are not split, trailing Nones may exceed an array's rank);
            or a dict or list of such that mirrors the batch.
        prefetch: how many batches are sent ahead.
        ragged: what to do with a last batch of fewer elements along dim 0: an error, leave it out, or pad it with zeros; with
            "pad" every batch comes as `(batch, mask)`, mask bool[B], False where padded.
        feeds: on several processes, whether each one's loader yields its own part of the global batch, or all of it.
        check: on several processes, compare what they feed, and name the one that feeds other or the same data.
        gang: the job's processes; those that jax knows by default.
        pad_to: sizes that vary, for a model that masks what is padding: for each array of the batch a `Dim`, or the name of one, by the
            number of its dim. Arrays are padded to the dim's next bucket, so that few shapes arrive, the last short batch's too where dim
            0 is among them (then `ragged` is not asked). In a job the largest size of all processes counts.
        fill: what that padding holds: a number, or a dict with one for each array by key; None: the dim's own `fill`, which is 0.

    Raises:
        SpmdError: an option means nothing; while iterating: batches do not fit the spec, pad_to or each other.
    """
    if ragged not in ("error", "drop", "pad") or feeds not in ("slice", "batch") or prefetch < 0:
        what = f"shard_loader(ragged={ragged!r}, feeds={feeds!r}, prefetch={prefetch}) has an invalid option"
        raise SpmdError(message(what, fix='ragged is "error", "drop" or "pad", feeds is "slice" or "batch", prefetch is 0 or more'))
    if pad_to is None and fill is not None:
        what = f"shard_loader was given fill={fill!r}, and no pad_to that says what is padded"
        raise SpmdError(message(what, fix='pad_to={"labels": {1: spmd.Dim("seq", max=512)}}'))
    padding = None if pad_to is None else Padding(pad_to, fill)
    return ShardedLoader(loader, as_mesh(mesh), spec, prefetch, ragged, feeds, check, current_gang() if gang is None else gang, padding)


class ShardedLoader:
    """Made by `shard_loader`; each `iter()` is one pass over the loader, or the rest of one after a restore.

    Attributes:
        epoch: passes finished.
        batch: batches handed out in this pass.
    """

    per_process = True  # a checkpoint keeps each process's place

    def __init__(
        self,
        loader: Iterable[Any],
        mesh: Mesh,
        spec: Any,
        prefetch: int,
        ragged: str,
        feeds: str,
        check: bool,
        gang: Gang,
        padding: Padding | None = None,
    ) -> None:
        self.epoch = self.batch = 0
        self._loader, self._mesh, self._spec, self._prefetch = loader, mesh, spec, prefetch
        self._ragged, self._feeds, self._check, self._gang, self._padding = ragged, feeds, check, gang, padding
        self._full: int | None = None  # elements along dim 0 of a whole batch on this process
        self._streams: dict[str, Any] | None = None  # the loader's own random streams now
        self._began: dict[str, Any] | None = None  # ... and when this pass began
        self._source: Any = None  # the loader's own account of its place after the last batch handed out
        self._resumes = False
        self._template: Any = None

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def state_dict(self) -> dict[str, Any]:
        """The place: what was handed out, not what was prefetched."""
        streams = self._began if self.batch else self._streams
        full = None if self._full is None else self._full * self._feeders  # of the job: it may go on with other processes
        return {"epoch": self.epoch, "batch": self.batch, "full": full, "streams": streams, "source": self._source}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a place: the next `iter()` yields the batches after it."""
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._full = None if state["full"] is None else state["full"] // self._feeders
        self._streams, self._source, self._resumes = state["streams"], state["source"], self.batch > 0 or state["source"] is not None

    def __iter__(self) -> Iterator[Any]:
        queue: deque[tuple[Any, Any]] = deque()
        source = self._started()
        ended = False
        while True:
            while not ended and len(queue) <= self._prefetch:
                fetched = self._fetched(source)
                ended = fetched is None
                if fetched is not None:
                    queue.append(fetched)
            if not queue:
                break
            batch, self._source = queue.popleft()
            self.batch += 1
            yield batch
        self.epoch, self.batch, self._source = self.epoch + 1, 0, None

    def _started(self) -> Iterator[Any]:
        """The loader's iterator, at the place to continue from."""
        resumes, self._resumes = self._resumes, False
        if self._streams is None:
            self._streams = host_streams()
        self._began = self._streams
        if not resumes:
            self.batch = 0
        for part in (self._loader, *(getattr(self._loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
        with self._own_streams():
            saved = self._source if resumes else None
            if saved is not None and _has(self._loader, "load_state_dict"):
                self._loader.load_state_dict(saved)  # pyright: ignore[reportAttributeAccessIssue]
                return iter(self._loader)
            source = iter(self._loader)
            if saved is not None and _has(source, "set_state"):
                source.set_state(saved)  # pyright: ignore[reportAttributeAccessIssue]
                return source
            for number in range(self.batch):
                if next(source, None) is None:
                    what = f"the loader ended after {number} batches, the checkpoint's place is after {self.batch}"
                    raise SpmdError(message(what, fix="resume with the dataset and batch size that the checkpoint was made with"))
            return source

    @property
    def _feeders(self) -> int:
        """How many processes' batches make up a global one."""
        return self._gang.size if self._feeds == "slice" else 1

    @contextmanager
    def _own_streams(self) -> Generator[None]:
        """See Note [Loaders and random numbers]."""
        assert self._streams is not None
        outer = host_streams()
        set_host_streams(self._streams)
        try:
            yield
        finally:
            self._streams = host_streams()
            set_host_streams(outer)

    def _fetched(self, source: Iterator[Any]) -> tuple[Any, Any] | None:
        """The next batch on the devices and the loader's place after it; None at the end."""
        with self._own_streams():
            batch = next(source, None)
            place = _place_of(self._loader, source)
        size = _END if batch is None else _size(batch)
        sizes, varying = self._agreed(batch, size)
        if not self._goes_on(batch, sizes):
            return None
        if batch is None:
            batch, size = self._nothing(), 0
        if self._full is None:
            self._full = self._divisible(size) if self._ragged == "pad" else size
        self._template = batch
        mask = None
        if self._ragged == "pad":
            mask = np.arange(self._full) < size
            batch = _mapped(batch, lambda value: _padded(value, size, self._full or 0))
        if self._padding is not None:
            batch = self._padding.padded(batch, varying, self._parts)
        placed = self._placed(batch, self._spec)
        return (placed if mask is None else (placed, self._array(mask, self._mask_spec()))), place

    def _goes_on(self, batch: Any, sizes: Sequence[int]) -> bool:
        """Whether there is another batch, the same answer on every process."""
        if all(found == _END for found in sizes):
            return False
        known = self._template if batch is None else batch
        if self._padding is not None and (known is None or self._padding.has_rows(known)):
            return True
        full = max(self._full or 0, *sizes)
        short = {index: found for index, found in enumerate(sizes) if found < full}
        if self._full is not None and full > self._full:
            raise SpmdError(message(f"a batch has {full} elements, those before had {self._full}", fix="give all but the last one size"))
        if short and self._ragged == "error":
            number, found = next(iter(short.items()))
            where = f"process {number}'s" if self._gang.size > 1 else "the"
            raise SpmdError(
                message(
                    f"{where} last batch has {max(found, 0)} elements, the others have {full}",
                    "a program is compiled for one size",
                    fix='shard_loader(..., ragged="drop") leaves it out, ragged="pad" pads it and yields (batch, mask)',
                )
            )
        return not short or self._ragged == "pad"

    def _agreed(self, batch: Any, size: int) -> tuple[list[int], dict[str, int]]:
        """Every process's size, and the largest of each name of `pad_to`; what they feed is compared on the way."""
        varying = {} if self._padding is None or batch is None else self._padding.sizes(batch)
        if self._gang.size == 1:
            return [size], varying
        place = str(self._part()) if self._feeds == "slice" else ""
        digest = _digest(batch) if self._check and batch is not None else 0
        names = "" if self._padding is None else f"|{json.dumps(varying)}"
        answers = [text.split("|", 3) for text in self._gang.exchange("batch", f"{size}|{digest}|{place}{names}")]
        if self._check:
            self._require_distinct([(int(d), p) for s, d, p, *_ in answers if int(s) != _END and int(d)])
        for name, found in (item for _, _, _, *text in answers for item in json.loads(*(text or ["{}"])).items()):
            varying[name] = max(varying.get(name, 0), found)
        return [int(found) for found, *_ in answers], varying

    def _require_distinct(self, fed: Sequence[tuple[int, str]]) -> None:
        """Processes that hold the same part must feed the same, others must not."""
        for number, (digest, place) in enumerate(fed):
            for other, (digest_before, place_before) in enumerate(fed[:number]):
                if (digest == digest_before) != (place == place_before):
                    same = digest == digest_before
                    raise SpmdError(
                        message(
                            f"process {number} feeds {'the same data as' if same else 'other data than'} process {other}",
                            f"pass {self.epoch}: their devices hold {'different parts' if same else 'the same part'} of a batch",
                            fix="give each loader its own part (DistributedSampler), or feeds='batch'; check=False for constant data",
                        )
                    )

    def _part(self) -> list[Any]:
        """Which pieces along dim 0 this process's devices hold."""
        sharding = ShardingSpec(self._mesh, self._mask_spec()).to_jax()
        pieces = self._mesh.size()  # divisible by whatever splits it
        return sorted(
            {(part[0].start, part[0].stop) for part in sharding.addressable_devices_indices_map((pieces,)).values() if part}, key=str
        )

    def _mask_spec(self) -> PartitionSpec:
        """How dim 0 of a batch is split."""
        first = self._spec
        while isinstance(first, dict | list):
            first = next(iter(first.values() if isinstance(first, dict) else first))
        entries = tuple(as_spec(first)) if first is not None else ()
        return PartitionSpec(*(entries[:1] or (None,)))

    def _divisible(self, size: int) -> int:
        """The least number of elements on this process, not below `size`, that its devices share evenly."""
        parts = max(1, len(self._part())) if self._feeds == "slice" else ShardingSpec(self._mesh, self._mask_spec()).num_shards
        return -(-max(size, 1) // parts) * parts

    def _parts(self, path: tuple[Any, ...], dim: int) -> int:
        """Into how many pieces what this process feeds of a dim is cut."""
        if dim == 0:
            return self._divisible(1)
        spec = self._spec
        for key in path:
            spec = _entry(spec, key, type(spec)) if isinstance(spec, dict | list) else spec
        entries = () if spec is None else tuple(as_spec(spec))
        return 1 if dim >= len(entries) else ShardingSpec(self._mesh, PartitionSpec(entries[dim])).num_shards

    def _nothing(self) -> Any:
        """A batch of nothing, for a process whose loader ended before the others'."""
        if self._template is None:
            raise SpmdError(message(f"the loader of process {self._gang.index} has no batch", fix="give every process at least one batch"))
        return _mapped(self._template, lambda value: value[:0] if value.ndim else value)

    def _placed(self, value: Any, spec: Any) -> Any:
        """A batch with its arrays on the devices."""
        if isinstance(value, torch.Tensor | np.ndarray):
            if isinstance(spec, dict | list):
                raise SpmdError(message("the spec has a container where the batch has an array", f"spec: {spec}", fix="give one spec"))
            array = host_array(value) if isinstance(value, torch.Tensor) else np.array(value, order="C")  # loaders reuse their memory
            return self._array(array, _fitted(spec, array.ndim))
        if isinstance(value, Mapping):
            return {key: self._placed(item, _entry(spec, key, dict)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            kind: Any = type(value)
            items = [self._placed(item, _entry(spec, number, list)) for number, item in enumerate(value)]
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        return value

    def _array(self, host: np.ndarray[Any, Any], spec: PartitionSpec) -> torch.Tensor:
        """One array: each device gets its own piece, from the process that has it."""
        placed = ShardingSpec(self._mesh, spec)
        if self._gang.size > 1 and self._feeds == "slice":
            with exact_dtypes():
                tensor = wrap(jax.make_array_from_process_local_data(placed.to_jax(), host))
            buffer_of(tensor).annotation = placed
        else:
            placed.validate(host.shape, "a batch's array")
            tensor = wrap_host(host)
            buffer_of(tensor).annotate(placed)  # each device gets its piece now; uneven dims are padded where they are stored
        return become_sharded(tensor)


def _has(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None)) and not inspect.isclass(value)


def _place_of(loader: Any, source: Any) -> Any:
    """The loader's own account of its place, where it keeps one: torchdata's and datasets' way, or grain's."""
    if _has(loader, "state_dict") and _has(loader, "load_state_dict"):
        return loader.state_dict()
    return source.get_state() if _has(source, "get_state") and _has(source, "set_state") else None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)


def _mapped(value: Any, fn: Any) -> Any:
    """The batch with `fn` of each array."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind: Any = type(value)
        items = [_mapped(item, fn) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    return value


def _size(batch: Any) -> int:
    """Elements along dim 0 of the first array that has one."""
    for value in _leaves(batch):
        if value.ndim:
            return value.shape[0]
    raise SpmdError(
        message(f"the loader yields {type(batch).__name__} without an array", fix="yield tensors or numpy arrays, alone or in containers")
    )


def _padded(value: Any, size: int, full: int) -> Any:
    """Zeros added along dim 0 of an array that has the batch's size there."""
    if not value.ndim or value.shape[0] != size or size == full:
        return value
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value.new_zeros((full - size, *value.shape[1:]))])
    return np.concatenate([value, np.zeros((full - size, *value.shape[1:]), value.dtype)])


def _digest(batch: Any) -> int:
    """A checksum of the batch's arrays, never 0."""
    crc = 0
    for value in _leaves(batch):
        array = host_array(value) if isinstance(value, torch.Tensor) else np.ascontiguousarray(value)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc + 1


def _entry(spec: Any, key: Any, kind: type) -> Any:
    """The spec of one entry of a container: the same for all, or that of a mirroring dict or list."""
    if not isinstance(spec, dict | list):
        return spec
    if isinstance(spec, kind) and (key in spec if isinstance(spec, dict) else key < len(spec)):
        return spec[key]
    raise SpmdError(
        message(f"the batch has an entry {key!r}, the spec has none", f"spec: {spec}", fix="name it; None: whole on all devices")
    )


def _fitted(spec: Any, ndim: int) -> PartitionSpec:
    """The spec for an array of another rank: further dims are not split, Nones beyond the rank are dropped."""
    entries = () if spec is None else tuple(as_spec(spec))
    if any(entry is not None for entry in entries[ndim:]) and ndim:
        raise SpmdError(message(f"an array of rank {ndim} cannot be laid out by {entries}", fix="give a dict or list of specs"))
    return PartitionSpec(*entries[:ndim], *[None] * (ndim - len(entries)))


__all__ = ["ShardedLoader", "shard_loader"]
