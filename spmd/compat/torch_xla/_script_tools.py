"""`torch_xla.utils.utils`: helpers of scripts around a training loop."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from mesh.launch._xla_environment import check_env_flag as check_env_flag
from mesh.launch._xla_environment import getenv_as as getenv_as


class SampleGenerator:
    """The same sample `sample_count` times, as input for benchmarks. It is its own iterator; every `for` loop starts from the beginning."""

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._sample_count, self._count = data, sample_count, 0

    def __len__(self) -> int:
        return self._sample_count

    def __iter__(self) -> Iterator[Any]:
        return SampleGenerator(self._data, self._sample_count)

    def __next__(self) -> Any:
        if self._count >= self._sample_count:
            raise StopIteration
        self._count += 1
        return self._data

    next = __next__


class FnDataGenerator:
    """`count` pairs of (data, func(data)), data made by `gen_tensor(batch_size, *dims)`."""

    def __init__(
        self, func: Callable[..., Any], batch_size: int, gen_tensor: Callable[..., Any], dims: Iterable[int] | None = None, count: int = 1
    ) -> None:
        self._func, self._gen_tensor = func, gen_tensor
        self._shape, self._count = (batch_size, *(dims or [1])), count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            data = self._gen_tensor(*self._shape)
            yield data, self._func(data)


class DataWrapper:
    """A user-defined object with tensors. Subclasses return its tensors, and rebuild it from others."""

    def get_tensors(self) -> list[Any]:
        """The CPU tensors that must go to the device."""
        raise NotImplementedError(f"{type(self).__name__} lacks get_tensors")

    def from_tensors(self, tensors: list[Any]) -> Any:
        """The same object rebuilt from `tensors`, one for each of `get_tensors()`."""
        raise NotImplementedError(f"{type(self).__name__} lacks from_tensors")


class LazyProperty:
    """A value that `gen_fn()` computes on first access."""

    def __init__(self, gen_fn: Callable[[], Any]) -> None:
        self._gen_fn: Callable[[], Any] | None = gen_fn
        self._value: Any = None

    @property
    def value(self) -> Any:
        if self._gen_fn is not None:
            self._value, self._gen_fn = self._gen_fn(), None
        return self._value


class TmpFolder:
    """A temporary folder, deleted with the object. Its path is `name`."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp()

    def __del__(self) -> None:
        shutil.rmtree(self.name, ignore_errors=True)


class TimedScope:
    """A `with` block that prints its duration, unless `set_error` was called."""

    def __init__(self, msg: str = "", printfn: Callable[[str], Any] | None = None) -> None:
        self._msg, self._print, self._error = msg, printfn or eprint, False
        self._start = 0.0

    def __enter__(self) -> TimedScope:
        self._start = time.time()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._error:
            self._print(f"{self._msg}{1000.0 * (time.time() - self._start):.3f}ms")

    def set_error(self, error: Any) -> None:
        self._error = bool(error)


def as_list(t: Any) -> Any:
    """`[t]`; a list or tuple is returned as it is."""
    return t if isinstance(t, tuple | list) else [t]


def shape(inputs: Any) -> list[int]:
    """The shape of nested lists of numbers."""
    if not isinstance(inputs, list | tuple):
        return []
    inner = [shape(item) for item in inputs]
    assert all(one == inner[0] for one in inner), f"lists of unequal shapes: {inner}"
    return [len(inner), *(inner[0] if inner else [])]


def flatten_nested_tuple(inputs: Any) -> tuple[Any, ...]:
    """The leaves of nested tuples and lists, in order."""
    return tuple(leaf for item in inputs for leaf in flatten_nested_tuple(item)) if isinstance(inputs, list | tuple) else (inputs,)


def list_copy_append(ilist: Sequence[Any], item: Any) -> list[Any]:
    """A new list with `item` appended."""
    return [*ilist, item]


def null_print(*args: Any, **kwargs: Any) -> None:
    """Print nothing."""


def eprint(*args: Any) -> None:
    """`print` to stderr."""
    sys.stderr.write(" ".join(map(str, args)) + "\n")


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """`eprint` if `debug`, else `null_print`. Default of `debug`: `DEBUG` in the environment."""
    return eprint if (getenv_as("DEBUG", int, 0) if debug is None else debug) else null_print


def timed(fn: Callable[[], Any], msg: str = "", printfn: Callable[[str], Any] = eprint) -> Any:
    """Call `fn()` and print its duration."""
    with TimedScope(msg, printfn):
        return fn()


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """TCP ports that are free now."""
    ports = []
    for _ in range(n):
        with socket.socket() as listener:
            listener.bind(("", 0))
            ports.append(listener.getsockname()[1])
    return ports


def parallel_work(num_workers: int, fn: Callable[..., Any], *args: Iterable[Any]) -> list[Any]:
    """`map(fn, *args)` in threads; raises the exception of a call."""
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(fn, *args))
