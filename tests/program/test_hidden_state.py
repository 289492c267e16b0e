"""Objects of Python's library that a compiled function changes: attributes that only library code writes, files, locks, objects in C."""

import argparse
import codecs
import csv
import hashlib
import io
import queue
import reprlib
import sqlite3
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--k", type=int, default=3)
    return made


OPEN: list[sqlite3.Connection] = []


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for each in OPEN:
        each.close()


def table() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    made.execute("create table rows (a)")
    OPEN.append(made)
    return made


def raise_default(p: argparse.ArgumentParser, n: int) -> int:
    p.set_defaults(k=p.parse_args([]).k + 1)
    return p.parse_args([]).k


def toggle(lock: Any, n: int) -> int:
    lock.release() if lock.locked() else lock.acquire()
    return 1 + lock.locked()


def longer(shown: reprlib.Repr, n: int) -> int:
    shown.maxlist = n
    return len(shown.repr([1] * 9))


# what is made, what the function does with it and a counter, what is looked at after the call
STATE: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "semaphore": (lambda: threading.Semaphore(9), lambda s, n: (s.acquire(), s._value)[1], lambda s: s._value),
    "event": (threading.Event, lambda e, n: (e.clear() if e.is_set() else e.set(), 1)[1], lambda e: e.is_set()),
    "parser": (parser, raise_default, lambda p: p.parse_args([]).k),
    "decoder": (
        codecs.getincrementaldecoder("utf8"),
        lambda d, n: len(d.decode(b"\xa9\xc3" if n > 1 else b"\xc3")),
        lambda d: d.getstate(),
    ),
    "lock": (threading.Lock, toggle, lambda lock: lock.locked()),
    "lock of a block": (threading.Lock, lambda lock, n: (lock.acquire(), lock.release(), 1)[2], lambda lock: lock.locked()),
    "text in memory": (io.StringIO, lambda f, n: (f.write("ab"), print("c", file=f), f.tell())[2], lambda f: (f.getvalue(), f.tell())),
    "bytes in memory": (io.BytesIO, lambda f, n: (f.write(b"ab"), f.seek(1), f.read(1)[0])[2], lambda f: (f.getvalue(), f.tell())),
    "numbers that vary in its attributes": (reprlib.Repr, longer, lambda r: r.maxlist),
    "numbers that vary in its attributes, by C": (
        lambda: [type("Held", (), {"v": 1})()],
        lambda held, n: (list(map(setattr, held, ["v"], [n])), held[0].v)[1],
        lambda held: held[0].v,
    ),
}


def test_every_call_changes_what_only_library_code_writes() -> None:
    def run(wrap: Any, device: str) -> list[Any]:
        made, count = {name: make() for name, (make, _, _) in STATE.items()}, [0]

        def fn(x: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return torch.stack([x * use(made[name], count[0]) for name, (_, use, _) in STATE.items()])

        step = wrap(fn)
        found = []
        for _ in range(4):
            found.append((step(torch.ones(1, device=device)).tolist(), {name: look(made[name]) for name, (*_, look) in STATE.items()}))
            made["semaphore"].release()
        return found

    expected = run(lambda fn: fn, "cpu")
    for got, want in zip(run(lambda fn: spmd.compile(fn, max_retraces=9), "jax"), expected, strict=True):
        assert got == want


HIDDEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "hash": (hashlib.sha256, lambda h: h.update(b"x")),
    "compressor": (zlib.compressobj, lambda z: z.compress(b"x")),
    "writer": (lambda: csv.writer(io.StringIO()), lambda w: w.writerow([1])),
    "queue": (queue.SimpleQueue, lambda q: q.put(1)),
    "database": (table, lambda t: t.execute("select * from rows")),
}


@pytest.mark.parametrize("name", list(HIDDEN))
def test_what_python_cannot_read_is_refused_if_it_was_there_before(name: str) -> None:
    make, change = HIDDEN[name]
    held, x = make(), torch.ones(1, device="jax")
    with pytest.raises(spmd.TraceError, match="an object from before the call .* which no other call sees"):
        spmd.compile(lambda x: (change(held), x * 2)[1])(x)
    if name != "queue":
        assert spmd.compile(lambda x: (change(make()), x * 2)[1])(x).item() == 2


def test_files_are_written_while_the_function_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [tmp_path / mode for mode in ("w", "w+", "wb")]
    with open(names[0], "w") as only, open(names[1], "w+") as both, open(names[2], "wb") as binary:

        @spmd.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            print("error", file=sys.stderr)
            sys.stdout.write("out")
            only.write("a")
            only.flush()
            print("b", file=both)
            binary.writelines([b"c"])
            return x * 2

        for _ in range(3):
            assert step(torch.ones(1, device="jax")).item() == 2
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("error\n", "out") and step.num_traces == 1
    assert [name.read_text() for name in names] == ["a", "b\n", "c"]
    with open(names[0]) as file, pytest.raises(spmd.TraceError, match="an iterator from before the call"):
        spmd.compile(lambda x: x * len(file.readline()))(torch.ones(1, device="jax"))
