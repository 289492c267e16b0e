"""What a compiled function writes to Python, every call writes: afterwards all is as after the same calls in plain PyTorch."""

import array
import collections
import contextlib
import copy
import ctypes
import functools
import heapq
import io
import operator
import os
import queue
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

import mesh
import spmd
from tests.sweeps import every_other

Write = Callable[[Any, torch.Tensor], Any]
COUNT = 0


class Watched:
    def __init__(self) -> None:
        self.writes = 0
        self.value = 0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "value":
            object.__setattr__(self, "writes", self.writes + 1)


class Scaled:
    def __init__(self) -> None:
        self._scale = 1

    @property
    def scale(self) -> int:
        return self._scale

    @scale.setter
    def scale(self, value: int) -> None:
        self._scale = value


class Plain:
    def __init__(self) -> None:
        self.n = 0


class Other(Scaled):
    """Another class that an object may become one of."""


class Lazy:
    @functools.cached_property
    def scale(self) -> int:
        return 3


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Own:
    """An iterator in Python."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> "Own":
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count % 3 == 0:
            raise StopIteration
        return self.count


def printed(s: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print(s.count)
    s.name += out.getvalue()


def in_the_environment(s: Any) -> None:
    name = f"OF_A_TEST_{id(s)}"
    os.environ[name] = os.environ.get(name, "") + "x"
    s.name = os.environ[name]


class State:
    """Everything that the rows below write to."""

    total = 0

    def __init__(self) -> None:
        self.count = 0
        self.flag = False
        self.name = ""
        self.items: list[Any] = [0]
        self.table: dict[Any, Any] = {"a": 0}
        self.seen: set[Any] = set()
        self.recent: collections.deque[Any] = collections.deque([0], maxlen=3)
        self.counts: collections.defaultdict[str, int] = collections.defaultdict(int)
        self.counter: collections.Counter[str] = collections.Counter()
        self.order = collections.OrderedDict.fromkeys("abc")
        self.user: Any = collections.UserDict(a=0)
        self.nested = {"a": [{"n": 0}]}
        self.heap: list[int] = [5, 1, 4]
        self.space = types.SimpleNamespace(n=0)
        self.watched, self.scaled, self.lazy, self.slotted = Watched(), Scaled(), Lazy(), Slotted()
        self.plain = Plain()
        self.module = nn.Module()
        self.module.steps = 0  # type: ignore[assignment]
        self.module.register_buffer("mean", torch.zeros(2))
        self.tensor: Any = None
        self.bytes = bytearray(2)
        self.own, self.number = Own(), ctypes.c_int(0)
        os.environ.pop(f"OF_A_TEST_{id(self)}", None)
        self.queue: queue.Queue[Any] = queue.Queue()
        self.queue.put(0)


def counted(s: State) -> None:
    s.count += 1


def entries_that_move(s: State) -> None:
    s.name += ",".join(s.table)
    s.table["w"] = len(s.table)
    del s.table["a"], s.table["w"]
    s.table["a"], s.table["w"] = 0, 1


def swap(s: State) -> None:
    s.items, s.name = [*s.items, len(s.items)], s.name + "x"


def leave_by(write: Callable[[Any], Any], value: Any) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(write, value)


def hooked(x: torch.Tensor, write: Callable[[Any], Any]) -> None:
    y = x.clone().requires_grad_()
    y.register_hook(write)
    (y * y).sum().backward()


ROWS: dict[str, Write] = {
    "an attribute": lambda s, x: setattr(s, "count", s.count + 1),
    "a flag": lambda s, x: setattr(s, "flag", not s.flag),
    "several": lambda s, x: swap(s),
    "entries that move": lambda s, x: entries_that_move(s),
    "an iterator of one's own": lambda s, x: (next(s.own), sum(s.own), [v for v in s.own]),
    "the environment": lambda s, x: in_the_environment(s),
    "a number of C": lambda s, x: (setattr(s.number, "value", s.number.value + 1), setattr(s, "count", s.number.value)),
    "output that is kept": lambda s, x: printed(s),
    "a class": lambda s, x: setattr(type(s), "total", type(s).total + 1),
    "the attributes of an object": lambda s, x: setattr(s.plain, "__dict__", {"n": s.plain.n + 1, "sums": [x.sum()]}),
    "the class of an object": lambda s, x: setattr(s.scaled, "__class__", Other if type(s.scaled) is Scaled else Scaled),
    "a slot": lambda s, x: setattr(s.slotted, "count", s.slotted.count + 1),
    "a property": lambda s, x: setattr(s.scaled, "scale", s.scaled.scale * 2),
    "a cached property": lambda s, x: s.lazy.scale,
    "__setattr__": lambda s, x: setattr(s.watched, "value", s.watched.value + 2),
    "__dict__": lambda s, x: s.__dict__.update(count=s.count + 3),
    "vars": lambda s, x: vars(s).__setitem__("count", s.count + 3),
    "a namespace": lambda s, x: setattr(s.space, "n", s.space.n + 1),
    "a new attribute": lambda s, x: setattr(s.space, f"n{s.count}", 1),
    "del": lambda s, x: delattr(s, "name") if hasattr(s, "name") else setattr(s, "name", "back"),
    "dict item": lambda s, x: s.table.__setitem__("a", s.table["a"] + 1),
    "dict update": lambda s, x: s.table.update(a=s.table["a"] + 1, b=1),
    "dict update, a dict by a keyword": lambda s, x: (
        counted(s),
        s.table.update(a={"n": s.count}),
        s.table.update({"b": 1}, c={"d": [x * 2]}),
    ),
    "operators": lambda s, x: (
        counted(s),
        operator.iadd(s.items, [s.count]),
        operator.delitem(s.items, 0),
        operator.setitem(s.table, "a", 2),
    ),
    "methods of classes": lambda s, x: (counted(s), list.insert(s.items, 0, s.count), list.pop(s.items), dict.update(s.table, b=s.items)),
    "dict setdefault": lambda s, x: s.table.setdefault("b", len(s.table)),
    "dict pop": lambda s, x: s.table.pop("a", None),
    "dict clear": lambda s, x: s.table.clear(),
    "dict del": lambda s, x: s.table.__delitem__("a") if "a" in s.table else s.table.__setitem__("a", 1),
    "nested": lambda s, x: s.nested["a"][0].__setitem__("n", s.nested["a"][0]["n"] + 1),
    "default dict": lambda s, x: s.counts.__setitem__("k", s.counts["k"] + 1),
    "counter": lambda s, x: s.counter.update(["k", "l"]),
    "ordered dict": lambda s, x: s.order.move_to_end(next(iter(s.order))),
    "user dict": lambda s, x: s.user.__setitem__("a", s.user["a"] + 1),
    "append": lambda s, x: s.items.append(7),
    "append, by a library": lambda s, x: list(map(s.items.append, range(2))),
    "append, by a context": lambda s, x: leave_by(s.items.append, len(s.items)),
    "set, by a library": lambda s, x: any(map(s.seen.add, [len(s.seen)])),
    "append, by a hook": lambda s, x: hooked(x, s.items.append),
    "a queue": lambda s, x: (s.queue.put(s.queue.get() + 1), s.queue.put(x * 2) if s.queue.qsize() < 3 else s.queue.get()),
    "append what was read": lambda s, x: s.items.append(s.items[-1] + 1),
    "extend": lambda s, x: s.items.extend([1, 2]),
    "list +=": lambda s, x: s.items.__iadd__([1]),
    "insert": lambda s, x: s.items.insert(0, len(s.items)),
    "list item": lambda s, x: s.items.__setitem__(0, s.items[0] + 1),
    "list slice": lambda s, x: s.items.__setitem__(slice(0, 1), [1, 2]),
    "list pop": lambda s, x: (s.items.append(1), s.items.append(2), s.items.pop(0)),
    "sort and reverse": lambda s, x: (s.heap.sort(), s.heap.reverse(), s.heap.append(len(s.heap))),
    "heap": lambda s, x: heapq.heappush(s.heap, heapq.heappop(s.heap) + 3),
    "set": lambda s, x: s.seen.add(len(s.seen)),
    "deque": lambda s, x: s.recent.append(s.recent[-1] + 1),
    "bytes": lambda s, x: s.bytes.__setitem__(0, s.bytes[0] + 1),
    "a module": lambda s, x: setattr(s.module, "steps", s.module.steps + 1),
    "a module's mode": lambda s, x: s.module.train(not s.module.training),
    "a buffer": lambda s, x: setattr(s.module, "mean", s.module.mean * 0.5 + x),
    "a tensor": lambda s, x: setattr(s, "tensor", x * 2),
    "a tensor that is read": lambda s, x: setattr(s, "tensor", x if s.tensor is None else s.tensor + x),
    "tensors in a list": lambda s, x: s.items.append(x * 2),
    "tensors in a dict": lambda s, x: s.table.update(x=x * 2, y={"z": x + 1}),
    "an item": lambda s, x: s.table.__setitem__("a", s.table["a"] + x.sum().item()),
    "items in a list": lambda s, x: s.items.append(x.sum().item()),
}


def content(value: Any) -> Any:
    """All that a state holds, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, nn.Module):
        return {k: content(v) for k, v in value.__dict__.items() if k in ("steps", "training")} | {"mean": value.mean.tolist()}
    if isinstance(value, (dict, collections.UserDict)):
        return [(k, content(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [content(v) for v in value]
    if isinstance(value, queue.Queue):
        return content(value.queue)
    if isinstance(value, Slotted):
        return value.count
    if isinstance(value, Scaled):
        return type(value).__name__, value.scale
    if hasattr(value, "__dict__"):
        return {k: content(v) for k, v in vars(value).items()}
    return value


def after(write: Write, wrap: Callable[[Any], Any], place: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    State.total = 0
    state = State()
    state.module.to(place(torch.zeros(8)).device)
    step = wrap(lambda x: (write(state, x), x * 2)[1])
    found: list[Any] = []
    for i in range(4):
        found.append(step(place(torch.arange(8.0)[:2] if i < 0 else torch.full((2,), float(i + 1)))).tolist())
        found.append((content(state), State.total))
    return found


def compiled(fn: Any) -> Any:
    return spmd.compile(fn, max_retraces=50)


@pytest.mark.parametrize("name", every_other(ROWS))
def test_every_call_writes_as_python_does(name: str) -> None:
    expected = after(ROWS[name], lambda fn: fn, lambda x: x)
    assert after(ROWS[name], compiled, lambda x: x.to("jax")) == expected


@pytest.mark.parametrize("name", every_other(ROWS, first=1))
def test_every_call_writes_on_eight_devices(name: str, mesh_4x2: mesh.Mesh) -> None:
    expected = after(ROWS[name], lambda fn: fn, lambda x: x)
    assert after(ROWS[name], compiled, lambda x: spmd.mark_sharding(x.to("jax"), mesh_4x2, ("model",))) == expected


def test_dicts_and_lists_that_are_arguments_are_the_callers() -> None:
    @spmd.compile
    def step(batch: dict[str, Any], log: list[Any]) -> torch.Tensor:
        batch["x"] = batch["x"] * 2
        batch["n"] = len(log)
        log.append(batch["x"].sum())
        return batch["x"]

    batch: dict[str, Any] = {"x": torch.ones(2).to("jax")}
    log: list[Any] = []
    for i in range(3):
        result = step(batch, log)
        assert (result is batch["x"], batch["x"].tolist(), batch["n"], len(log)) == (True, [2.0 ** (i + 1)] * 2, i, i + 1)


def appends(a: Any, b: Any) -> Any:
    a["n"].append(1.0)
    return len(b["n"]), a is b, a["n"] is b["n"]


def removes(a: Any, b: Any) -> Any:
    del a["n"]
    return sorted(b)


def lists_twice(a: Any, b: Any) -> Any:
    a["n"].append(b["x"] * 2)
    return [v * 2 if isinstance(v, torch.Tensor) else v for v in b["n"]]


@pytest.mark.parametrize("fn", [appends, removes, lists_twice])
def test_a_container_that_is_passed_twice_is_one(fn: Callable[..., Any]) -> None:
    def called(run: Any, device: str) -> list[Any]:
        found: list[Any] = []
        for way in ("apart", "one", "one inside", "apart", "one"):
            numbers: list[Any] = [0.0]
            x = torch.ones(2, device=device)
            a = {"n": numbers, "x": x}
            b = a if way == "one" else {"n": numbers if way == "one inside" else [0.0], "x": x}
            found.append((content(run(a, b)), content(a), content(b), a.get("n") is numbers, a.get("n") is b.get("n")))
        return found

    assert called(compiled(fn), "jax") == called(fn, "cpu")


def test_a_list_that_is_passed_and_named_is_refused_where_it_is_written_to() -> None:
    named = [1.0]
    step = spmd.compile(lambda given, x: (given.append(3.0), x * len(named))[1])
    with pytest.raises(spmd.TraceError, match="a list among the arguments is also reached as named"):
        step(named, torch.ones(1, device="jax"))
    assert named == [1.0]
    read = spmd.compile(lambda given, x: x * len(named) + given[0])
    assert read(named, torch.ones(1, device="jax")).item() == 2


def test_a_mode_of_the_users_sees_the_functions_that_the_function_calls() -> None:
    class Seen(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def names(run: Callable[[Any], Any], device: str) -> list[str]:
        mode = Seen()

        def step(x: torch.Tensor) -> torch.Tensor:
            with mode:
                y = torch.sin(x) + 1
                return y[0] if y.dim() else y

        step = run(step)
        for _ in range(3):
            step(torch.ones(2, device=device))
        return mode.names

    assert names(spmd.compile, "jax") == names(lambda fn: fn, "cpu")


def test_a_trace_that_fails_leaves_nothing_behind() -> None:
    state = State()
    before = content(state)

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        state.count += 1
        state.items.append(1)
        state.table["b"] = x
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            step(torch.ones(2).to("jax"))
        assert content(state) == before


def variable_in_turn(x: torch.Tensor, level: ContextVar[float]) -> torch.Tensor:
    read = level.get(1.0)
    level.set(read + 1)
    return x * read


def variable_set_and_reset(x: torch.Tensor, level: ContextVar[float]) -> torch.Tensor:
    token = level.set(3.0)
    y = x * level.get()
    level.reset(token)
    return y + level.get(0.5)


def variable_set_twice(x: torch.Tensor, level: ContextVar[float]) -> torch.Tensor:
    level.set(2.0)
    level.set(level.get() * 2)
    return x * level.get()


@pytest.mark.parametrize("fn", [variable_in_turn, variable_set_and_reset, variable_set_twice])
def test_a_context_variable_that_had_no_value(fn: Callable[..., torch.Tensor]) -> None:
    """Only a token can take its value away again, so the trace sets it in a copy of the context."""
    seen: list[Any] = []
    for device in ("cpu", "jax"):
        level: ContextVar[float] = ContextVar("level")
        call: Any = spmd.compile(fn) if device == "jax" else fn
        x = torch.ones(2, device=device)
        seen.append([(call(x, level).tolist(), level.get(None)) for _ in range(4)])
    assert seen[0] == seen[1]


def test_a_context_variable_stays_unset_where_the_trace_is_refused() -> None:
    level: ContextVar[float] = ContextVar("level")

    def fn(x: torch.Tensor) -> float:
        level.set(2.0)
        return sum(x.repeat(99).tolist()) * level.get()

    with pytest.raises(spmd.TraceError):
        spmd.compile(fn)(torch.ones(2, device="jax"))
    assert level.get(None) is None


def _with(write: Callable[[Any], Any]) -> Callable[[Any], float]:
    def use(holder: Any) -> float:
        read = float(holder[0])
        write(holder)
        return read

    return use


def write_view(a: Any) -> None:
    part = a[:]
    part[0] = part[0] + 1


def write_memory(a: Any) -> None:
    shown = memoryview(a)
    shown[0] = shown[0] + 1


def write_attribute(local: Any) -> float:
    local.v = local.v + 1
    return local.v


class Local(threading.local):
    v = 1.0


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "view": write_view,
    "flat": lambda a: a.flat.__setitem__(0, a[0] + 1),
    "ravel": lambda a: a.ravel().__setitem__(0, a[0] + 1),
    "transposed": lambda a: a.T.__iadd__(1),
    "method": lambda a: a.__setitem__(0, a[0] + 1),
    "in place": lambda a: a.__iadd__(1),
    "out": lambda a: np.add(a[:], 1, out=a[:]),
    "memory": write_memory,
    "from buffer": lambda a: np.frombuffer(a).__iadd__(1),
}
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    **{f"numpy, {name}": (lambda: np.ones(1), _with(write)) for name, write in ARRAYS.items()},
    "array, item": (lambda: array.array("d", [1.0]), _with(lambda a: a.__setitem__(0, a[0] + 1))),
    "array, grown": (lambda: array.array("d", [1.0]), _with(lambda a: a.insert(0, a[0] + 1))),
    "array, memory": (lambda: array.array("d", [1.0]), _with(write_memory)),
    "local": (Local, write_attribute),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_arrays_written_through_what_shows_them_and_attributes_of_a_thread(name: str) -> None:
    make, use = HOLDERS[name]
    seen: list[Any] = []
    for device in ("cpu", "jax"):
        holder, x = make(), torch.ones(1, device=device)

        def call(x: torch.Tensor, holder: Any = holder) -> torch.Tensor:
            return x * use(holder)

        step: Any = spmd.compile(call, max_retraces=9) if device == "jax" else call
        seen.append([step(x).item() for _ in range(4)])
    assert seen[0] == seen[1]


def test_attributes_of_another_thread_are_others() -> None:
    local, x = Local(), torch.ones(1, device="jax")
    step = spmd.compile(lambda x: x * local.v)
    local.v = 2.0
    seen = [step(x).item()]
    other = threading.Thread(target=lambda: seen.append(step(x).item()))
    other.start()
    other.join()
    assert [*seen, step(x).item()] == [2.0, 1.0, 2.0]


def test_a_write_that_nobody_saw_is_refused_and_undone() -> None:
    values, memset = np.ones(2), ctypes.CDLL(None).memset
    address, x = ctypes.c_void_p(values.ctypes.data), torch.ones(1, device="jax")

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * float(values[0])
        memset(address, 0, ctypes.c_size_t(8))
        return y

    with pytest.raises(spmd.TraceError, match="written to by code that is not recorded"):
        spmd.compile(fn)(x)
    assert values.tolist() == [1.0, 1.0]


def new_entries(d: dict[str, Any], n: int) -> None:
    for key in list(d):
        d[key] = [n, key]


# What is done with a dict after an entry was replaced; and how many programs four calls with another number have, at most.
AFTER_ENTRIES: dict[str, tuple[Callable[[dict[str, Any], int], Any], int]] = {
    "gone through": (lambda d, n: [v for v in d.values()], 2),
    "copied": (lambda d, n: dict(d), 2),
    "unpacked": (lambda d, n: {**d}, 2),
    "sorted": (lambda d, n: sorted(d), 2),
    "searched": (lambda d, n: 3 in d.values(), 2),
    "shown": (lambda d, n: str(d), 4),
    "updated": (lambda d, n: (d.update(other=[n]), list(d.items())), 4),
    "emptied": (lambda d, n: (list(d), d.clear(), d.update(entry=[n], other=1)), 4),
    "without one": (lambda d, n: (d.pop("other"), list(d.items()), d.__setitem__("other", [n])), 4),
    "all replaced": (lambda d, n: (new_entries(d, n), str(d)), 4),
    "copied deep": (lambda d, n: d.__setitem__("other", copy.deepcopy(d)["entry"]), 4),
}


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, vars])
@pytest.mark.parametrize("name", AFTER_ENTRIES)
def test_a_dict_that_is_read_whole_after_an_entry_was_replaced(name: str, kind: Any) -> None:
    use, most = AFTER_ENTRIES[name]
    seen: list[Any] = []
    for device in ("cpu", "jax"):
        content: dict[str, Any] = {"entry": [1], "other": [2]}
        holder = types.SimpleNamespace(**content) if kind is vars else kind(content)
        state = types.SimpleNamespace(n=3)

        def call(x: torch.Tensor, holder: Any = holder, state: Any = state) -> torch.Tensor:
            entries = vars(holder) if kind is vars else holder
            entries["entry"] = [state.n % 7]
            use(entries, state.n)
            state.n += 5
            return x

        step: Any = spmd.compile(call, max_retraces=9) if device == "jax" else call
        x = torch.ones(1, device=device)
        seen.append([(step(x), repr(holder), state.n)[1:] for _ in range(4)])
    assert seen[1] == seen[0]
    assert step.num_traces <= (4 if kind is vars else most)  # `vars` hands out all that is there, before the entry is replaced


class Callback:
    def __init__(self, priority: int) -> None:
        self.priority, self.seen = [priority], list[torch.Tensor]()


def test_callbacks_that_are_sorted_may_keep_what_they_saw() -> None:
    def run(wrap: Any, device: str) -> Any:
        callbacks = [Callback(1), Callback(0), Callback(2)]

        def fn(x: torch.Tensor) -> torch.Tensor:
            for callback in sorted(callbacks, key=lambda c: c.priority):
                x = x * 2 + callback.priority[0]
                callback.seen.append(x)
            late = list(filter(lambda c: c.priority[0] > 1, callbacks))
            return x * max(late, key=lambda c: c.priority[0]).priority[0] + sum(map(lambda c: c.priority[0], late))

        step, found = wrap(fn), []
        for i in range(4):
            if i == 3:
                callbacks[0].priority[0] = 5
            found.append(step(torch.ones(2, device=device)).tolist())
        assert wrap is not spmd.compile or step.num_traces == 2
        return found, [[t.tolist() for t in c.seen] for c in callbacks]

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")


class Settings(dict[str, Any]):
    """Attributes are items, by methods in C."""

    __getattr__ = dict.get
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


def _without(s: Settings, x: torch.Tensor) -> Any:
    if "once" in s:
        del s.once
    s["once"] = len(s)


BY_METHODS_IN_C: dict[str, Callable[[Settings, torch.Tensor], Any]] = {
    "number": lambda s, x: exec("s.k += 1", {"s": s}),
    "tensor": lambda s, x: exec("s.h = x if s.h is None else s.h + x", {"s": s, "x": x}),
    "setattr": lambda s, x: setattr(s, "k", s.k * 2),
    "delete": _without,
}


@pytest.mark.parametrize("name", list(BY_METHODS_IN_C))
def test_attributes_that_a_method_in_c_writes_are_written_by_every_call(name: str) -> None:
    def run(wrap: Any, device: str) -> Any:
        settings = Settings(k=1, once=2)

        def fn(x: torch.Tensor) -> torch.Tensor:
            BY_METHODS_IN_C[name](settings, x)
            return x * settings.k

        step = wrap(fn)
        found = [step(torch.ones(2, device=device)).tolist() for _ in range(4)]
        return found, {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}

    assert run(spmd.compile, "jax") == run(lambda fn: fn, "cpu")
