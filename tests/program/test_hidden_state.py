"""Objects of Python's library that a compiled function changes: attributes that only library code writes, files, locks, objects in C."""

import abc
import argparse
import array
import codecs
import collections
import contextlib
import contextvars
import csv
import ctypes
import decimal
import functools
import hashlib
import hmac
import io
import itertools
import logging
import logging.handlers
import mmap
import operator
import queue
import re
import reprlib
import socket
import sqlite3
import sys
import threading
import types
import unittest.mock
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import PIL.Image
import PIL.ImageDraw
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


class Counting(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def logger(handler: logging.Handler) -> Any:
    made = logging.Logger("of_a_test")
    made.addHandler(handler)
    return made


POINTER = ctypes.POINTER(ctypes.c_int)


def cached(inner: Any) -> Any:
    def outer(n: int) -> Any:
        return inner(n) + 1

    outer.inner = inner  # type: ignore[attr-defined]
    return functools.lru_cache(outer)


class Pointing(ctypes.Structure):
    _fields_ = (("to", ctypes.POINTER(ctypes.c_int)), ("number", ctypes.c_int))


class Outer(ctypes.Structure):
    _fields_ = (("inner", Pointing),)


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


def added(content: Any) -> int:
    content += type(content)("i", [2]) if isinstance(content, array.array) else content
    return len(content)


def held(lock: Any, n: int) -> int:
    lock.acquire()
    return n + lock._is_owned()


def of_abstract(pair: tuple[Any, Any]) -> int:
    abstract = pair[0]
    match pair[1]():
        case abstract():
            return 2
        case _:
            return 1


def registered() -> tuple[Any, Any]:
    return abc.ABCMeta("Abstract", (), {}), type("Concrete", (), {})


def generic() -> Any:
    return functools.singledispatch(lambda value: 1)


def printed(f: io.StringIO, n: int) -> int:
    with contextlib.redirect_stdout(f):
        print(n)
    return len(f.getvalue())


def printed_to(f: io.StringIO, n: int) -> int:
    print(n, file=f)
    return len(f.getvalue())


def set_to(error: BaseException, n: int) -> int:
    error.args = (n,)
    return error.args[0]


# what is made, what the function does with it and a counter, what the caller does between calls, what is looked at after a call
HELD_IN_C: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "array +=": (lambda: array.array("i", [1]), lambda a, n: added(a), lambda a: None, list),
    "array, between": (lambda: array.array("i", [1]), lambda a, n: len(a), lambda a: a.append(1), list),
    "view made in the function": (lambda: bytearray(b"ab"), lambda b, n: memoryview(b)[0], lambda b: b.insert(0, 7), bytes),
    "decompressor's end": (zlib.decompressobj, lambda z, n: 1 + z.eof, lambda z: z.eof or z.decompress(zlib.compress(b"a")), lambda z: 0),
    "flags of decimals": (
        lambda: decimal.Context(prec=5),
        lambda c, n: float(c.divide(1, 3)),
        lambda c: c.clear_flags(),
        lambda c: [signal.__name__ for signal, is_raised in c.flags.items() if is_raised],
    ),
    "flags of decimals that the function clears": (
        lambda: decimal.Context(prec=5),
        lambda c, n: (c.clear_flags(), c.add(1, 3), c.divide(1, n), 1 + c.flags[decimal.Inexact])[3],
        lambda c: c.divide(1, 3),
        lambda c: [signal.__name__ for signal, is_raised in c.flags.items() if is_raised],
    ),
    "a cache": (
        lambda: functools.lru_cache(maxsize=2)(lambda n: n),
        lambda f, n: f(3) + f(4) + f(3),
        lambda f: f.cache_clear() if f.cache_info().hits > 3 else f(5),
        lambda f: f.cache_info(),
    ),
    "a cache in a cache": (
        lambda: cached(functools.lru_cache(lambda n: n)),
        lambda f, n: f(3),
        lambda f: None,
        lambda f: (f.cache_info(), f.__wrapped__.inner.cache_info()),
    ),
    "a log in memory": (
        lambda: logger(logging.StreamHandler(io.StringIO())),
        lambda log, n: (log.warning("a"), 1)[1],
        lambda log: log.handlers[0].stream.write("b"),
        lambda log: log.handlers[0].stream.getvalue(),
    ),
    "records that a handler keeps": (
        lambda: logger(logging.handlers.MemoryHandler(9)),
        lambda log, n: (log.warning("a"), len(log.handlers[0].buffer))[1],
        lambda log: log.handlers[0].buffer.append(log.handlers[0].buffer[0]),
        lambda log: len(log.handlers[0].buffer),
    ),
    "a logger's level": (
        lambda: logger(Counting()),
        lambda log, n: (log.warning("a"), 1 + log.handlers[0].count)[1],
        lambda log: log.setLevel(logging.ERROR if log.level == logging.NOTSET else logging.NOTSET),
        lambda log: log.handlers[0].count,
    ),
    "traps of decimals": (
        lambda: decimal.Context(prec=5),
        lambda c, n: (c.traps.update({decimal.Inexact: not c.traps[decimal.Inexact]}), 1 + c.traps[decimal.Inexact])[1],
        lambda c: None,
        lambda c: c.traps[decimal.Inexact],
    ),
    "a structure in another": (
        lambda: Outer(Pointing(None, 1)),
        lambda s, n: (setattr(s.inner, "number", s.inner.number + 1), s.inner.number)[1],
        lambda s: setattr(s.inner, "number", s.inner.number * 2),
        lambda s: s.inner.number,
    ),
    "an item of a structured array": (
        lambda: np.zeros(1, [("a", "f4")])[0],
        lambda item, n: (item.__setitem__("a", item["a"] + 1), float(item["a"]))[1],
        lambda item: item.__setitem__("a", item["a"] * 2),
        lambda item: float(item["a"]),
    ),
    "a level that varies": (
        lambda: logging.Logger("of_a_test"),
        lambda log, n: (log.setLevel(log.level + 1), log.level)[1],
        lambda log: None,
        lambda log: log.level,
    ),
    "changes of a database": (table, lambda t, n: t.total_changes, lambda t: t.execute("insert into rows values (1)"), lambda t: 0),
    "lines of a reader": (lambda: csv.reader(["1"] * 9), lambda r, n: r.line_num, next, lambda r: 0),
    "text of an element": (
        lambda: ElementTree.fromstring("<a>1</a>"),
        lambda e, n: (setattr(e, "text", f"{e.text}1"), int(e.text))[1],
        lambda e: None,
        lambda e: e.text,
    ),
    "attribute of an element": (
        lambda: ElementTree.fromstring("<a b='1'/>"),
        lambda e, n: int(e.attrib["b"]),
        lambda e: e.set("b", e.get("b") + "1"),
        lambda e: 0,
    ),
    "recursive lock": (threading.RLock, held, lambda lock: None, lambda lock: lock._is_owned()),
    "text of a lock": (threading.Lock, lambda lock, n: len(repr(lock)), lambda lock: lock.acquire(blocking=False), lambda lock: 0),
    "printed to a file in memory": (io.StringIO, printed, lambda f: None, lambda f: f.getvalue()),
    "printed to a given file in memory": (io.StringIO, printed_to, lambda f: None, lambda f: f.getvalue()),
    "closed between": (io.StringIO, lambda f, n: 1 + f.closed, lambda f: f.close(), lambda f: 0),
    "arguments of an exception": (lambda: ValueError(1), set_to, lambda e: None, lambda e: e.args),
    "arguments of an exception, between": (lambda: ValueError(1), lambda e, n: e.args[0], lambda e: setattr(e, "args", (5,)), lambda e: 0),
    "cause of an exception": (
        lambda: ValueError(1),
        lambda e, n: 1 + (e.__cause__ is None),
        lambda e: setattr(e, "__cause__", KeyError()),
        lambda e: 0,
    ),
    "registered between": (registered, lambda pair, n: of_abstract(pair), lambda pair: pair[0].register(pair[1]), lambda pair: 0),
    "implementation": (generic, lambda f, n: f.dispatch(int)(3), lambda f: f.register(int, lambda value: 2), lambda f: 0),
    "children of a seed": (lambda: np.random.SeedSequence(0), lambda s, n: 1 + s.n_children_spawned, lambda s: s.spawn(1), lambda s: 0),
    "state of a generator": (
        lambda: np.random.PCG64(0),
        lambda bits, n: bits.state["state"]["state"] % 1000,
        lambda bits: bits.random_raw(),
        lambda bits: 0,
    ),
    "array of C": (lambda: (ctypes.c_int * 2)(1, 2), lambda a, n: (ctypes.memset(a, n, 1), a[0])[1], lambda a: None, list),
    "item of an array of C": (lambda: (ctypes.c_int * 2)(1, 2), lambda a, n: (a.__setitem__(0, n), a[0])[1], lambda a: None, list),
    "context of decimals": (
        lambda: decimal.Context(prec=5),
        lambda c, n: float(c.divide(decimal.Decimal(1), 3)),
        lambda c: setattr(c, "prec", 2),
        lambda c: 0,
    ),
    "proxy of a mapping": (
        lambda: collections.ChainMap({"a": 1}),
        lambda d, n: types.MappingProxyType(d)["a"],
        lambda d: d.__setitem__("a", 3),
        lambda d: 0,
    ),
    "parts of a partial function": (
        lambda: functools.partial(max, 2),
        lambda f, n: f(0),
        lambda f: f.__setstate__((max, (4,), {}, {})),
        lambda f: 0,
    ),
}


@pytest.mark.parametrize("name", list(HELD_IN_C))
def test_state_in_c_is_read_and_written_as_in_python(name: str) -> None:
    make, use, between, look = HELD_IN_C[name]

    def run(wrap: Any, device: str) -> list[Any]:
        made, count, found = make(), [0], []

        def fn(x: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return x * use(made, count[0])

        step = wrap(fn)
        for _ in range(4):
            found.append((step(torch.ones(1, device=device)).item(), look(made)))
            between(made)
        return found

    assert run(lambda fn: spmd.compile(fn, max_retraces=9), "jax") == run(lambda fn: fn, "cpu")


def starred(items: Iterator[int]) -> int:
    first, *_ = items
    return first


# what no call can repeat or check: what is made before the call, and what the function does with it
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "closed": (io.StringIO, lambda f: f.close()),
    "closed by a block": (io.BytesIO, lambda f: contextlib.ExitStack().enter_context(f).close()),
    "a file over one in memory": (lambda: io.TextIOWrapper(io.BytesIO()), lambda f: f.write("a")),
    "released": (lambda: memoryview(bytearray(b"a")), lambda m: m.release()),
    "a writer inside an object": (lambda: csv.DictWriter(io.StringIO(), ["a"]), lambda w: w.writerow({"a": 1})),
    "a hash inside an object": (lambda: hmac.new(b"k", digestmod="sha256"), lambda h: h.update(b"a")),
    "the length of an element": (lambda: ElementTree.Element("a"), len),
    "an item of an element": (lambda: ElementTree.fromstring("<a><b/></a>"), lambda e: e[0].tag),
    "a pointer": (lambda: ctypes.pointer(ctypes.c_int(1)), lambda p: p.contents.value),
    "a pointer in a structure": (lambda: Pointing(ctypes.pointer(ctypes.c_int(1)), 2), lambda s: s.to.contents.value),
    "a pointer in an array": (lambda: (ctypes.POINTER(ctypes.c_int) * 1)(ctypes.pointer(ctypes.c_int(1))), lambda a: a[0].contents),
    "memory at an address": (lambda: ctypes.create_string_buffer(b"a"), lambda s: ctypes.string_at(ctypes.addressof(s), 1)),
    "a number at an address": (lambda: ctypes.c_int(1), lambda n: ctypes.c_int.from_address(ctypes.addressof(n))),
    "a copy to an address": (lambda: ctypes.c_int(1), lambda n: ctypes.memset(ctypes.addressof(n), 0, 4)),
    "pixels": (lambda: PIL.Image.new("L", (2, 2)).load(), lambda pixels: pixels[0, 0]),
    "an image that is written to": (lambda: PIL.Image.new("L", (2, 2)), lambda image: image.putpixel((0, 0), 1)),
    "a drawing": (lambda: PIL.ImageDraw.Draw(PIL.Image.new("L", (2, 2))), lambda drawing: drawing.point((0, 0), 1)),
    "code that is instrumented": (lambda: starred, lambda fn: fn.__code__.co_consts),
    "the text of a context of decimals": (decimal.getcontext, repr),
    "a cache asked by name": (lambda: functools.lru_cache(len), operator.methodcaller("cache_info")),
    "a reference to a number in C": (lambda: ctypes.byref(ctypes.c_int(1)), lambda r: ctypes.cast(r, POINTER).contents.value),
    "a mock": (unittest.mock.Mock, lambda m: m(1)),
    "a memory map": (lambda: mmap.mmap(-1, 16), lambda m: m[0]),
    "a socket": (socket.socket, lambda s: s.gettimeout()),
    "a context": (contextvars.copy_context, lambda c: c.run(len, "a")),
    "a scanner": (lambda: cast(Any, re.compile("a")).scanner("aa"), lambda s: s.search()),
    "a starred iterator": (lambda: iter([1, 2]), lambda it: [*it]),
    "an unpacked iterator": (lambda: iter([1, 2]), starred),
    "a searched iterator": (lambda: iter([1, 2]), lambda it: 1 in it),
    "the text of an iterator": (itertools.count, lambda it: f"{it}"),
    "the frame of a generator": (lambda: (i for i in range(3)), lambda g: g.gi_frame),
    "an array's size": (lambda: np.zeros(2), lambda a: a.resize(3, refcheck=False)),
    "a registration": (registered, lambda pair: pair[0].register(pair[1])),
    "flags of decimals, held apart": (lambda: decimal.getcontext().flags, lambda flags: flags[decimal.Inexact]),
    "flags of decimals": (decimal.getcontext, lambda c: c.flags[decimal.Inexact]),
    "a token": (lambda: VARIABLE.set(1), lambda token: VARIABLE.reset(token)),
}
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_no_call_can_repeat_or_check_is_refused_by_name(name: str) -> None:
    make, use = REFUSED[name]
    before = make()
    with pytest.raises(spmd.TraceError, match="depends on a value that later calls cannot check"):
        spmd.compile(lambda x: (use(before), x * 2)[1])(torch.ones(1, device="jax"))
    if isinstance(before, socket.socket):
        before.close()


def test_a_memory_map_of_numpy_is_an_array(tmp_path: Path) -> None:
    values = np.memmap(tmp_path / "values", "f4", "w+", shape=(2,))
    step = spmd.compile(lambda x: (values.__setitem__(0, values[0] + 1), x * float(values[0]))[1])
    assert [(step(torch.ones(1, device="jax")).item(), float(values[0])) for _ in range(3)] == [(1, 1), (2, 2), (3, 3)]


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


def test_a_file_that_the_function_reads_and_changes_is_read_by_every_call(tmp_path: Path) -> None:
    count, cache = tmp_path / "count", tmp_path / "cache"

    def counted(x: torch.Tensor) -> torch.Tensor:
        number = int(count.read_text())
        count.write_text(str(number + 1))
        return x * number

    def cached(x: torch.Tensor) -> torch.Tensor:
        if not cache.exists():
            cache.write_text("3")
            return x * 10
        return x * int(cache.read_text())

    def run(wrap: Any, x: torch.Tensor) -> list[Any]:
        count.write_text("1")
        cache.unlink(missing_ok=True)
        first, second = wrap(counted), wrap(cached)
        found = [first(x).tolist() for _ in range(3)] + [second(x).tolist() for _ in range(3)]
        cache.unlink()
        return [*found, second(x).tolist(), second(x).tolist(), count.read_text()]

    assert run(spmd.compile, torch.ones(2, device="jax")) == run(lambda fn: fn, torch.ones(2))
    step, x = spmd.compile(cached), torch.ones(2, device="jax")
    assert [step(x)[0].item() for _ in range(3)] == [3, 3, 3] and step.num_traces == 1
