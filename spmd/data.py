"""`shard_loader`: prefetches batches of any loader to the devices, sharded over a mesh. Its position can be saved.

    batches = spmd.shard_loader(DataLoader(dataset, 64, shuffle=True, num_workers=4), m, ("data", None))
    for x, y in batches:
        loss = train_step(x, y)          # meanwhile the next two batches are uploaded
    spmd.checkpoint.save(path, step, {"model": model, "optimizer": optimizer, "batches": batches})

Note [Loaders and random numbers]. Batches are taken from the loader on the caller's thread, right after the last step was
dispatched. So the loader runs and its batches are uploaded while the devices compute. A separate thread is no alternative: most
loaders draw from the process's global random streams, and the order of their draws and the program's would be nondeterministic. The
loader has its own random streams, which replace the global ones only while it runs. So neither prefetching nor resuming changes any
random number. Heavy work on the host belongs in the loader's own workers.
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
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.base._wrong_arguments import require_iterable, wrong_argument
from spmd.checkpoint._coordination import Gang, current_gang
from spmd.checkpoint._rng_state import host_streams, set_host_streams
from spmd.device._storage import buffer_of, wrap, wrap_host
from spmd.sharding._annotate import as_mesh
from spmd.sharding._tensor import become_sharded

_END = -1  # exchanged instead of a batch size by a process whose loader has ended


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
    """Iterate over the batches of `loader` as device tensors, sharded over `mesh`.

    Args:
        loader: any iterable of batches: a torch DataLoader, grain, Hugging Face datasets, a list. Batches are torch or numpy
            arrays, or dicts, lists and tuples of them; other values in them are passed through.
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        spec: a PartitionSpec or tuple for all arrays (dims beyond it are not split, trailing Nones may exceed an array's rank),
            or a dict or list of specs with the structure of the batch.
        prefetch: number of batches that are uploaded ahead.
        ragged: what to do with a last batch that is smaller along dim 0: raise an error, drop it, or pad it with zeros. With
            "pad" every batch is `(batch, mask)`, mask bool[B], False where padded.
        feeds: in a job, whether each process's loader yields its own slice of the global batch ("slice") or all of it ("batch").
        check: in a job, compare checksums of the batches of all processes, and raise an error that names a process with wrong data.
        gang: the processes of the job; by default all processes of `jax.distributed`.
        pad_to: dims of varying size, for a model that masks padding: for each array of the batch a dict from dim number to a `Dim`
            or its name. Arrays are padded to the dim's next bucket, so that few shapes occur. If dim 0 is among them, that covers
            the smaller last batch and `ragged` does not apply. In a job the largest size over all processes is used.
        fill: padding value: a number, or a dict of numbers by the array's key; None: the dim's own `fill`, which is 0 by default.

    Returns:
        An iterable of batches with the structure of the loader's. A checkpoint saves its position.

    Raises:
        SpmdError: `loader` is not iterable, or an option is invalid. While iterating: batches do not fit the spec, `pad_to` or each other.
    """
    require_iterable(loader, "shard_loader", 'spmd.shard_loader(DataLoader(dataset, 64), mesh, ("data", None))')
    if type(prefetch) is not int or not isinstance(check, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        what = f"shard_loader(prefetch={shown(prefetch)}, check={shown(check)}) has an option of a wrong type"
        raise wrong_argument(what, "prefetch is a number of batches, check is True or False")
    if ragged not in ("error", "drop", "pad") or feeds not in ("slice", "batch") or prefetch < 0:
        what = f"shard_loader(ragged={ragged!r}, feeds={feeds!r}, prefetch={prefetch}) has an invalid option"
        raise SpmdError(message(what, fix='ragged is "error", "drop" or "pad", feeds is "slice" or "batch", prefetch is 0 or more'))
    if pad_to is None and fill is not None:
        what = f"shard_loader has fill={fill!r} but no pad_to, which names the dims to pad"
        raise SpmdError(message(what, fix='pad_to={"labels": {1: spmd.Dim("seq", max=512)}}'))
    padding = None if pad_to is None else Padding(pad_to, fill)
    return ShardedLoader(loader, as_mesh(mesh), spec, prefetch, ragged, feeds, check, current_gang() if gang is None else gang, padding)


class ShardedLoader:
    """Returned by `shard_loader`. Each `iter()` is one pass over the loader, or after a restore the rest of a pass.

    Attributes:
        epoch: number of finished passes.
        batch: number of batches yielded in this pass.
    """

    per_process = True  # a checkpoint saves each process's own state

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
        self._full: int | None = None  # elements along dim 0 of a full batch on this process
        self._streams: dict[str, Any] | None = None  # the loader's random streams: present state
        self._initial_streams: dict[str, Any] | None = None  # the loader's random streams: state at the start of this pass
        self._source: Any = None  # the loader's own state after the last batch yielded
        self._resumes = False  # whether the next pass continues from a restored position
        self._template: Any = None  # the last batch, for the structure of an empty one

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch yielded, not the last one prefetched."""
        streams = self._initial_streams if self.batch else self._streams
        full = None if self._full is None else self._full * self._feeders  # global, since the number of processes may change
        return {"epoch": self.epoch, "batch": self.batch, "full": full, "streams": streams, "source": self._source}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position: the next `iter()` yields the batches after it.

        Raises:
            SpmdError: `state` is not the state of a loader; the position is unchanged.
        """
        _require_position(state)
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
        """An iterator over the loader from the position to continue from."""
        resumes, self._resumes = self._resumes, False
        if self._streams is None:
            self._streams = host_streams()
        self._initial_streams = self._streams
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
                    what = f"the loader ended after {number} batches, but the checkpoint was saved after batch {self.batch}"
                    raise SpmdError(message(what, fix="resume with the dataset and batch size of the saved run"))
            return source

    @property
    def _feeders(self) -> int:
        """Number of processes whose batches together are one global batch."""
        return self._gang.size if self._feeds == "slice" else 1

    @contextmanager
    def _own_streams(self) -> Generator[None]:
        """While active, the global random streams are the loader's. See Note [Loaders and random numbers]."""
        assert self._streams is not None
        outer = host_streams()
        set_host_streams(self._streams)
        try:
            yield
        finally:
            self._streams = host_streams()
            set_host_streams(outer)

    def _fetched(self, source: Iterator[Any]) -> tuple[Any, Any] | None:
        """The next batch on the devices and the loader's state after it; None at the end."""
        with self._own_streams():
            batch = next(source, None)
            state = _state_of(self._loader, source)
        size = _END if batch is None else _size(batch)
        sizes, varying = self._exchanged_sizes(batch, size)
        if not self._has_next(batch, sizes):
            return None
        if batch is None:
            batch, size = self._empty_batch(), 0
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
        return (placed if mask is None else (placed, self._array(mask, self._mask_spec()))), state

    def _has_next(self, batch: Any, sizes: Sequence[int]) -> bool:
        """Whether there is another batch. All processes get the same answer."""
        if all(found == _END for found in sizes):
            return False
        known = self._template if batch is None else batch
        if self._padding is not None and (known is None or self._padding.has_rows(known)):
            return True
        full = max(self._full or 0, *sizes)
        short = {index: found for index, found in enumerate(sizes) if found < full}
        if self._full is not None and full > self._full:
            raise SpmdError(
                message(f"a batch has {full} elements, but earlier ones had {self._full}", fix="make all batches but the last one size")
            )
        if short and self._ragged == "error":
            number, found = next(iter(short.items()))
            where = f"process {number}'s" if self._gang.size > 1 else "the"
            raise SpmdError(
                message(
                    f"{where} last batch has {max(found, 0)} elements, all others have {full}",
                    "a program is compiled for a single size",
                    fix='shard_loader(..., ragged="drop") drops it, ragged="pad" pads it and yields (batch, mask)',
                )
            )
        return not short or self._ragged == "pad"

    def _exchanged_sizes(self, batch: Any, size: int) -> tuple[list[int], dict[str, int]]:
        """Exchange sizes between processes, and compare checksums of their batches.

        Returns:
            (every process's batch size or `_END`, the largest size of each dim in `pad_to`, by name)
        """
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
        """Check that processes feed the same data if and only if their devices have the same shards.

        Args:
            fed: for each process, the checksum of its batch and the ranges of its shards.
        """
        for number, (digest, place) in enumerate(fed):
            for other, (digest_before, place_before) in enumerate(fed[:number]):
                if (digest == digest_before) != (place == place_before):
                    same = digest == digest_before
                    raise SpmdError(
                        message(
                            f"process {number} feeds {'the same data as' if same else 'different data from'} process {other}",
                            f"pass {self.epoch}: their devices have {'different shards' if same else 'the same shard'} of a batch",
                            fix="give each loader its own part (DistributedSampler), or feeds='batch'; check=False for constant data",
                        )
                    )

    def _part(self) -> list[Any]:
        """The ranges along dim 0 of the shards on this process's devices."""
        sharding = ShardingSpec(self._mesh, self._mask_spec()).to_jax()
        length = self._mesh.size()  # divisible by any number of shards
        indices = sharding.addressable_devices_indices_map((length,)).values()
        return sorted({(index[0].start, index[0].stop) for index in indices if index}, key=str)

    def _mask_spec(self) -> PartitionSpec:
        """The spec of dim 0 of a batch."""
        first = self._spec
        while isinstance(first, dict | list):
            first = next(iter(first.values() if isinstance(first, dict) else first))
        entries = tuple(as_spec(first)) if first is not None else ()
        return PartitionSpec(*(entries[:1] or (None,)))

    def _divisible(self, size: int) -> int:
        """The smallest number of elements on this process, at least `size`, that is divisible by the number of its shards."""
        parts = max(1, len(self._part())) if self._feeds == "slice" else ShardingSpec(self._mesh, self._mask_spec()).num_shards
        return -(-max(size, 1) // parts) * parts

    def _parts(self, path: tuple[Any, ...], dim: int) -> int:
        """The number of shards into which this process's part of a dim is split."""
        if dim == 0:
            return self._divisible(1)
        spec = self._spec
        for key in path:
            spec = _entry(spec, key, type(spec)) if isinstance(spec, dict | list) else spec
        entries = () if spec is None else tuple(as_spec(spec))
        return 1 if dim >= len(entries) else ShardingSpec(self._mesh, PartitionSpec(entries[dim])).num_shards

    def _empty_batch(self) -> Any:
        """An empty batch, for a process whose loader ended before the loaders of other processes."""
        if self._template is None:
            raise SpmdError(
                message(f"the loader of process {self._gang.index} yields no batch", fix="give every process at least one batch")
            )
        return _mapped(self._template, lambda value: value[:0] if value.ndim else value)

    def _placed(self, value: Any, spec: Any) -> Any:
        """A batch with its arrays on the devices, sharded by `spec`."""
        if isinstance(value, torch.Tensor | np.ndarray):
            if isinstance(spec, dict | list):
                raise SpmdError(
                    message("the spec has a dict or list where the batch has an array", f"spec: {spec}", fix="write a single spec there")
                )
            array = host_array(value) if isinstance(value, torch.Tensor) else np.array(value, order="C")  # a copy: loaders reuse memory
            return self._array(array, _spec_of_rank(spec, array.ndim))
        if isinstance(value, Mapping):
            return {key: self._placed(item, _entry(spec, key, dict)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            kind: Any = type(value)
            items = [self._placed(item, _entry(spec, number, list)) for number, item in enumerate(value)]
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        return value

    def _array(self, host: np.ndarray[Any, Any], spec: PartitionSpec) -> torch.Tensor:
        """One array on the devices. Each device gets its shard from the process that has it."""
        placed = ShardingSpec(self._mesh, spec)
        if self._gang.size > 1 and self._feeds == "slice":
            with exact_dtypes():
                tensor = wrap(jax.make_array_from_process_local_data(placed.to_jax(), host))
            buffer_of(tensor).annotation = placed
        else:
            placed.validate(host.shape, "a batch's array")
            tensor = wrap_host(host)
            buffer_of(tensor).annotate(placed)  # uploads each device's shard; uneven dims are padded in device memory
        return become_sharded(tensor)


def _require_position(state: Any) -> None:
    """Check that `state` is one that `ShardedLoader.state_dict` returns."""
    fix = "saved = loader.state_dict(), later loader.load_state_dict(saved)"
    if not isinstance(state, Mapping):
        raise SpmdError(message(f"the state of a loader is a dict, got {shown(state)}", *called_at(), fix=fix))
    names = ("epoch", "batch", "full", "streams", "source")
    missing = [name for name in names if name not in state]
    if missing:
        what = f"the state of a loader lacks {', '.join(map(repr, missing))}"
        raise SpmdError(message(what, f"it has {', '.join(map(repr, state)) or 'no entries'}", *called_at(), fix=fix))
    wrong = [name for name in names[:2] if type(state[name]) is not int or state[name] < 0]
    wrong += ["full"] if state["full"] is not None and (type(state["full"]) is not int or state["full"] < 0) else []
    wrong += ["streams"] if not isinstance(state["streams"], Mapping | None) else []
    if wrong:
        what = f"the state of a loader has an invalid entry {wrong[0]!r}: {shown(state[wrong[0]])}"
        raise SpmdError(message(what, *called_at(), fix=fix))


def _has(value: Any, name: str) -> bool:
    return callable(getattr(value, name, None)) and not inspect.isclass(value)


def _state_of(loader: Any, source: Any) -> Any:
    """The state of a loader with `state_dict` (torchdata, datasets) or of its iterator with `get_state` (grain); else None."""
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
    """The batch with `fn` applied to each array."""
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
    """Elements along dim 0 of the first array that has a dim."""
    leaves = list(_leaves(batch))
    for value in leaves:
        if value.ndim:
            return value.shape[0]
    kind = type(batch).__name__
    if leaves:
        what = f"the loader yields {kind} whose arrays have 0 dims, so a batch has no dim 0"
        raise SpmdError(message(what, fix="yield one array per batch, with a dim for its samples: torch.stack(samples)"))
    raise SpmdError(message(f"the loader yields {kind} without an array", fix="yield tensors or numpy arrays, alone or in containers"))


def _padded(value: Any, size: int, full: int) -> Any:
    """The array padded with zeros along dim 0 to `full`, if it has the batch's size there."""
    if not value.ndim or value.shape[0] != size or size == full:
        return value
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value.new_zeros((full - size, *value.shape[1:]))])
    return np.concatenate([value, np.zeros((full - size, *value.shape[1:]), value.dtype)])


def _digest(batch: Any) -> int:
    """A checksum of the batch's arrays; never 0."""
    crc = 0
    for value in _leaves(batch):
        array = host_array(value) if isinstance(value, torch.Tensor) else np.ascontiguousarray(value)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)
    return crc + 1


def _entry(spec: Any, key: Any, kind: type) -> Any:
    """The spec of one entry of a container: its own entry of a dict or list, else the shared spec."""
    if not isinstance(spec, dict | list):
        return spec
    if isinstance(spec, kind) and (key in spec if isinstance(spec, dict) else key < len(spec)):
        return spec[key]
    raise SpmdError(
        message(f"the batch has an entry {key!r} that the spec lacks", f"spec: {spec}", fix="add it to the spec; None replicates it")
    )


def _spec_of_rank(spec: Any, ndim: int) -> PartitionSpec:
    """The spec adapted to an array's rank: missing dims are not split, Nones beyond the rank are dropped."""
    entries = () if spec is None else tuple(as_spec(spec))
    if any(entry is not None for entry in entries[ndim:]) and ndim:
        raise SpmdError(message(f"an array of rank {ndim} cannot be laid out by {entries}", fix="pass a dict or list of specs"))
    return PartitionSpec(*entries[:ndim], *[None] * (ndim - len(entries)))


__all__ = ["ShardedLoader", "shard_loader"]
