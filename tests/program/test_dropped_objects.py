"""What a compiled function makes and drops ends as in CPython: generators leave their blocks, files are written, weak references clear."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd

Log = list[str]


def halves(x: torch.Tensor, log: Log) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        try:
            yield from x.split(1)
        finally:
            log.append("left")


def break_(x: torch.Tensor, log: Log) -> None:
    for _ in halves(x, log):
        break


def raise_(x: torch.Tensor, log: Log) -> None:
    with contextlib.suppress(KeyError):
        for _ in halves(x, log):
            raise KeyError


def enumerate_(x: torch.Tensor, log: Log) -> None:
    for _ in enumerate(halves(x, log)):
        break


def zip_(x: torch.Tensor, log: Log) -> None:
    for _ in zip(range(5), halves(x, log), strict=False):
        break


def map_(x: torch.Tensor, log: Log) -> None:
    for _ in map(torch.neg, halves(x, log)):
        break


def delete(x: torch.Tensor, log: Log) -> None:
    it = halves(x, log)
    it.__next__()
    del it


def nested(x: torch.Tensor, log: Log) -> None:
    def outer() -> Iterator[torch.Tensor]:
        yield from halves(x, log)

    for _ in (half * 2 for half in outer()):
        break


def unpack(x: torch.Tensor, log: Log) -> None:
    with contextlib.suppress(ValueError):
        (_,) = halves(x, log)


ENDS: dict[str, Callable[[torch.Tensor, Log], Any]] = {
    "break": break_,
    "an exception": raise_,
    "enumerate": enumerate_,
    "zip": zip_,
    "map": map_,
    "del": delete,
    "generators in generators": nested,
    "unpacking": unpack,
    "next": lambda x, log: next(iter(halves(x, log))),
    "any": lambda x, log: any(True for _ in halves(x, log)),
    "islice": lambda x, log: list(itertools.islice(halves(x, log), 1)),
    "in": lambda x, log: 1 in (len(half) for half in halves(x, log)),
}


def called(make: Callable[[str, Log], Callable[[torch.Tensor], Any]], device: str) -> list[Any]:
    log: Log = []
    fn = make(device, log)
    step = spmd.compile(fn) if device == "jax" else fn
    return [(step(torch.ones(2, device=device)), list(log), torch.is_grad_enabled()) for _ in range(3)]


@pytest.mark.parametrize("name", ENDS)
def test_a_generator_that_is_dropped_leaves_its_blocks_at_once(name: str) -> None:
    def make(device: str, log: Log) -> Callable[[torch.Tensor], Any]:
        weight = torch.ones(1, device=device, requires_grad=True)

        def fn(x: torch.Tensor) -> Any:
            ENDS[name](x, log)
            log.append("after")
            return (weight * 2).requires_grad, torch.is_grad_enabled(), len(log)

        return fn

    assert called(make, "jax") == called(make, "cpu")


class Held:
    def __init__(self, it: Iterator[Any]) -> None:
        self.it = it


@pytest.mark.parametrize(
    "holder", [Held, lambda it: [it], lambda it: {"it": it}, lambda it: lambda: it], ids=["object", "list", "dict", "cell"]
)
def test_a_generator_that_the_trace_ends_too_late_is_refused(holder: Callable[[Any], Any]) -> None:
    weight = torch.ones(1, device="jax", requires_grad=True)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        held = holder(halves(x, []))
        it: Any = held.it if isinstance(held, Held) else held() if callable(held) else held["it"] if isinstance(held, dict) else held[0]
        next(it)
        del it, held
        return weight * 2

    with pytest.raises(spmd.TraceError, match=r"(?s)drops the generator halves \(test_dropped.*fix: end it where it is dropped"):
        step(torch.ones(2, device="jax"))
    assert torch.is_grad_enabled()


def test_a_generator_that_the_function_closes_may_be_anywhere() -> None:
    def make(device: str, log: Log) -> Callable[[torch.Tensor], Any]:
        def fn(x: torch.Tensor) -> Any:
            held = Held(halves(x, log))
            next(held.it)
            held.it.close()  # type: ignore[attr-defined]
            return torch.is_grad_enabled(), len(log)

        return fn

    assert called(make, "jax") == called(make, "cpu")


def texts(tmp_path: Path, write: Callable[[Path, int], Any], device: str) -> list[Any]:
    path, kept = tmp_path / device, {"k": 0}
    path.write_text("")

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept["k"] += 1
        found = write(path, kept["k"])
        return x * (1 if found is None else found)

    step = spmd.compile(fn) if device == "jax" else fn
    found = [(step(torch.ones(2, device=device)).tolist(), path.read_text()) for _ in range(4)]
    gc.collect()  # what a trace has opened may be in a cycle; its warning belongs to this test
    return found


def append(path: Path, k: int) -> None:
    open(path, "a").write(f"step {k};")  # noqa: SIM115


def write_and_read(path: Path, k: int) -> int:
    json.dump({"k": k}, open(path, "w"))  # noqa: SIM115
    with path.open() as file:
        return json.load(file)["k"]


def write_and_open(path: Path, k: int) -> int:
    json.dump({"k": k}, open(path, "w"))  # noqa: SIM115
    return json.load(open(path))["k"]


def in_a_list(path: Path, k: int) -> None:
    files = [open(path, "a")]  # noqa: SIM115
    files[0].write("a line\n")


def not_dropped(path: Path, k: int) -> int:
    file = open(path, "w")  # noqa: SIM115
    file.write("unseen")
    length = len(open(path).read())  # noqa: SIM115
    file.close()
    return length


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("write", [append, write_and_read, write_and_open, not_dropped])
def test_a_file_that_is_dropped_is_written_at_once(tmp_path: Path, write: Callable[[Path, int], Any]) -> None:
    assert texts(tmp_path, write, "jax") == texts(tmp_path, write, "cpu")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_in_a_list_is_written_when_the_trace_ends(tmp_path: Path) -> None:
    assert texts(tmp_path, in_a_list, "jax")[0] == texts(tmp_path, in_a_list, "cpu")[0]


def test_a_temporary_file_that_is_dropped_is_gone(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> Any:
        file = tempfile.NamedTemporaryFile(dir=tmp_path)  # noqa: SIM115
        file.write(b"abc")
        file.flush()
        name, size = file.name, os.path.getsize(file.name)
        del file
        return size, os.path.exists(name)

    step = spmd.compile(fn)
    assert [step(torch.ones(2, device="jax")) for _ in range(3)] == [(3, False)] * 3


class Thing:
    pass


def weakly(x: torch.Tensor) -> Any:
    thing, other, inside, tensor = Thing(), Thing(), Thing(), x * 2
    one, by_key, members, of_tensor = (
        weakref.ref(thing),
        weakref.WeakValueDictionary({"k": other}),
        weakref.WeakSet([other]),
        weakref.ref(tensor),
    )
    holder: Any = [inside]
    of_inside = weakref.ref(inside)
    found = [one() is thing, len(by_key), len(members), of_tensor() is tensor, of_inside() is inside]
    del thing, other, inside, tensor
    found += [one() is None, len(by_key), len(members), of_tensor() is None, of_inside() is holder[0]]
    del holder
    return [*found, of_inside() is None]


def test_weak_references_clear_as_in_python() -> None:
    step = spmd.compile(weakly)
    assert [step(torch.ones(2, device="jax")) for _ in range(2)] == [weakly(torch.ones(2))] * 2
