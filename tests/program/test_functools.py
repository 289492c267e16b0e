"""Functions that functools keeps something behind: caches and implementations by type, as Python has them."""

import functools
import io
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spmd
from spmd.base._torch import pytree
from tests.listing import Listing


def _called(make: Callable[[], Callable[[int, torch.Tensor], Any]], device: str) -> list[Any]:
    call = make()
    kept: dict[str, Any] = {"i": 0}
    run: Any = lambda x: call(kept["i"], x)  # noqa: E731
    run = spmd.compile(run) if device == "jax" else run
    found: list[Any] = []
    for i in range(6):
        kept["i"] = i
        found.append(run(torch.ones(2, device=device)).tolist())
        found.append(getattr(call, "seen", None) and list(call.seen))  # type: ignore[attr-defined]
        between: Any = getattr(call, "between", None)
        if between is not None:
            between(i)
    return found


def _writes_where_it_is_computed() -> Any:
    seen: list[int] = []
    base = {"value": 2.0}

    @functools.lru_cache(maxsize=2)
    def cached(n: int) -> float:
        seen.append(n)
        return n * base["value"]

    def call(i: int, x: torch.Tensor) -> torch.Tensor:
        return x * cached(i // 2)

    def between(i: int) -> None:
        if i == 1:
            base["value"] = 10.0
        if i == 4:
            cached.cache_clear()

    call.seen, call.between = seen, between  # type: ignore[attr-defined]
    return call


def _of_a_method() -> Any:
    class Held:
        num = 0

        @functools.cache  # noqa: B019
        def value(self, k: int) -> int:
            self.num += 1
            return self.num * k

    held = Held()
    return lambda i, x: x * held.value(2) + held.value(3) + held.num


def _by_type() -> Any:
    @functools.singledispatch
    def chosen(value: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @chosen.register
    def _(value: int, x: torch.Tensor) -> torch.Tensor:
        return x * value

    class Held:
        @functools.singledispatchmethod
        def chosen(self, value: Any, x: torch.Tensor) -> torch.Tensor:
            return x

        @chosen.register
        def _(self, value: int, x: torch.Tensor) -> torch.Tensor:
            return x + value

    held = Held()
    values = (3, 4, 5, "a", 6.0, 7)
    return lambda i, x: chosen(values[i], x) + held.chosen(i, x)


@pytest.mark.parametrize("make", [_writes_where_it_is_computed, _of_a_method, _by_type])
def test_what_functools_keeps_is_as_in_python(make: Callable[[], Any]) -> None:
    assert _called(make, "jax") == _called(make, "cpu")


@pytest.mark.parametrize("maxsize", [None, 128])
def test_a_cached_tensor_that_was_changed_outside_is_seen(maxsize: int | None) -> None:
    @functools.lru_cache(maxsize)
    def weights(n: int) -> torch.Tensor:
        return torch.ones(n).to("jax")

    step = spmd.compile(lambda x: x * weights(2))
    x = torch.ones(2).to("jax")
    found = [step(x).tolist(), step(x).tolist()]
    weights(2).mul_(3.0)
    found += [step(x).tolist()]
    weights.cache_clear()
    assert [*found, step(x).tolist()] == [[1.0, 1.0], [1.0, 1.0], [3.0, 3.0], [1.0, 1.0]]
    assert step.num_traces == 2


def _of_weights(cached: Callable[[Any], Any], device: str) -> Any:
    """Weights of the first call, which each update takes into account."""
    weight = torch.nn.Parameter(torch.ones(1, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    first = cached(lambda: weight.detach().clone())

    def step(k: int, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        ((weight - first()) ** 2 + weight * x).sum().backward()
        optimizer.step()
        return weight.detach().clone()

    return step


def _of_an_argument_object(cached: Callable[[Any], Any], device: str) -> Any:
    held: dict[str, Any] = {}
    first = cached(lambda: held["x"] * 1)

    def step(k: int, x: torch.Tensor) -> Any:
        held["x"] = x + k
        return first() + 0

    return step


def _of_a_methods_state(cached: Callable[[Any], Any], device: str) -> Any:
    class Held:
        num = 0

        def mask(self, n: int, *, on: torch.device) -> Any:
            self.num += 1
            return {"mask": [torch.ones(n, device=on) * self.num]}

        cached_mask = cached(mask)

    held = Held()
    return lambda k, x: (x * held.cached_mask(k % 2 + 1, on=x.device)["mask"][0].sum(), held.num)


def _updated(cached: Callable[[Any], Any], device: str) -> Any:
    count = cached(lambda key: torch.zeros(2, device=device))
    return lambda k, x: count("ab"[k // 2 % 2]).add_(x).clone()


@pytest.mark.parametrize("maxsize", [None, 1, 128])
@pytest.mark.parametrize("make", [_of_weights, _of_an_argument_object, _of_a_methods_state, _updated])
def test_a_tensor_that_is_cached_is_computed_once_for_a_key(make: Callable[..., Any], maxsize: int | None) -> None:
    def found(device: str) -> list[Any]:
        fn: Any = make(functools.lru_cache(maxsize), device)
        step: Any = spmd.compile(fn) if device == "jax" else fn
        results: Any = [step(k, torch.ones(2, device=device)) for k in range(6)]
        leaves: list[Any] = pytree.tree_leaves(results)
        return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    torch.testing.assert_close(found("jax"), found("cpu"))


@pytest.mark.parametrize("maxsize", [None, 1, 128])
def test_random_numbers_that_are_cached_are_drawn_once_for_a_key(maxsize: int | None) -> None:
    noise = functools.lru_cache(maxsize)(lambda n: torch.randn(n, device="jax"))
    step = spmd.compile(lambda x: x + noise(x.shape[0]))
    found = [step(torch.zeros(n, device="jax")) for n in (2, 2, 3, 3, 3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3]) and torch.equal(found[2], found[4])
    assert torch.equal(noise(3), found[4])


def test_random_numbers_that_a_call_cannot_leave_in_a_cache_are_refused() -> None:
    noise: Any = functools.cache(lambda x: torch.randn(2, device="jax"))
    compiled: Any = spmd.compile
    cases: list[Any] = [(lambda x: x + noise(x), {}), (lambda x: x + noise(1), {"steps_per_call": 2})]
    for fn, options in cases:
        with pytest.raises(spmd.TraceError, match=r"(?s)caches random numbers.*for an argument.*fix: call .*before the step"):
            compiled(fn, **options)(torch.ones(2, 2, device="jax"))


class _Place:
    def __init__(self) -> None:
        self.value = 0

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("method", ["cache_info", "cache_clear"])
def test_which_calls_a_cached_function_has_had_is_refused(method: str) -> None:
    @functools.lru_cache
    def grown(n: int) -> int:
        return n + 1

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + grown(1)
        getattr(grown, method)()
        return y

    with pytest.raises(spmd.TraceError, match=rf"grown\.{method}\(\): the earlier calls of a cached function"):
        step(torch.ones(2, device="jax"))


def test_an_object_that_is_an_index_may_give_a_number_that_changes() -> None:
    place = _Place()
    step = spmd.compile(lambda x: x[place] + range(10)[place])
    found: list[float] = []
    for place.value in range(4):
        found.append(step(torch.arange(4.0).to("jax")).item())
    assert found == [0.0, 2.0, 4.0, 6.0]


def cached(maxsize: int) -> dict[str, Any]:
    """A cached function that counts how often it runs."""
    state: dict[str, Any] = {"n": 0, "i": 0}

    @functools.lru_cache(maxsize=maxsize)
    def fn(key: int) -> float:
        state["n"] += 1
        return key + 1.0

    return {"fn": fn, "state": state, "lists": functools.lru_cache(maxsize=maxsize)(lambda key: [key])}


def next_key(made: dict[str, Any]) -> int:
    made["state"]["i"] = (made["state"]["i"] + 1) % 2
    return made["state"]["i"]


# the size of the cache, what the function does with it, and what the caller does between calls
EVICTIONS: dict[str, tuple[int, Callable[[Any], float], Callable[[Any, int], Any]]] = {
    "all in turn": (2, lambda m: m["fn"](1) + m["fn"](2) + m["fn"](3), lambda m, call: None),
    "one after another": (1, lambda m: m["fn"](next_key(m)), lambda m, call: None),
    "between": (2, lambda m: m["fn"](1), lambda m, call: (m["fn"](5), m["fn"](6))),
    "the least recently used": (2, lambda m: m["fn"](1), lambda m, call: m["fn"](2 + call)),
    "cleared": (8, lambda m: m["fn"](1), lambda m, call: m["fn"].cache_clear()),
    "a list that is changed": (8, lambda m: (m["lists"](1).append(1), float(len(m["lists"](1))))[1], lambda m, call: None),
}


@pytest.mark.parametrize("name", list(EVICTIONS))
def test_what_is_evicted_runs_again(name: str) -> None:
    maxsize, use, between = EVICTIONS[name]

    def run(wrap: Any, device: str) -> list[Any]:
        made, found = cached(maxsize), []
        step = wrap(lambda x: x * use(made))
        for call in range(6):
            found.append((step(torch.ones(1, device=device)).item(), made["state"]["n"]))
            between(made, call)
        return found

    assert run(lambda fn: spmd.compile(fn, max_retraces=20), "jax") == run(lambda fn: fn, "cpu")


class Meter:
    def __init__(self) -> None:
        self.total, self.history = 0, list[Any]()


class Slot:
    __slots__ = ("history", "total")

    def __init__(self) -> None:
        self.total, self.history = 0, list[Any]()


def _append(found: Any, number: int, x: torch.Tensor) -> Any:
    found.append(number)
    return len(found)


def _set(found: Any, number: int, x: torch.Tensor) -> Any:
    found["n"] = number
    return found["n"]


def _add(found: Any, number: int, x: torch.Tensor) -> Any:
    found.total += number
    found.history.append(number)
    return found.total


def _append_inside(found: Any, number: int, x: torch.Tensor) -> Any:
    found[0]["a"].append(number)
    return found[0]["a"][0]


def _append_tensor(found: Any, number: int, x: torch.Tensor) -> Any:
    found.append(x * number)
    return len(found)


def _append_of_device(found: Any, number: int, x: torch.Tensor) -> Any:
    found.append((x * number).sum().item())
    return 1


def _shown(found: Any) -> str:
    if isinstance(found, (Meter, Slot)):
        return repr((found.total, found.history))
    return repr([part.tolist() if isinstance(part, torch.Tensor) else part for part in found] if isinstance(found, list) else found)


_NEW: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "list": (list, _append),
    "dict": (dict, _set),
    "object": (Meter, _add),
    "slots": (Slot, _add),
    "inside a tuple": (lambda: ({"a": []},), _append_inside),
    "tensors": (list, _append_tensor),
    "numbers of the device": (list, _append_of_device),
}


@pytest.mark.parametrize("keys", ["aaaaaaaa", "abcabcab", "abcdefgh", "clear"])
@pytest.mark.parametrize("name", list(_NEW))
def test_what_the_function_puts_into_a_cached_result_is_that_of_each_call(name: str, keys: str) -> None:
    """Whether the result is new in a call, is found, was evicted before, or the cache was cleared."""

    def run(device: str) -> list[Any]:
        make, put = _NEW[name]

        @functools.lru_cache(maxsize=2)
        def cached(key: str) -> Any:
            return make()

        state = SimpleNamespace(number=0, key="a")

        def step(x: torch.Tensor) -> torch.Tensor:
            state.number += 1
            return x * put(cached(state.key), state.number, x)

        compiled: Callable[..., Any] = spmd.compile(step) if device == "jax" else step
        found: list[Any] = []
        for i in range(8):
            state.key = "a" if keys == "clear" else keys[i]
            if keys == "clear" and i % 3 == 2:
                cached.cache_clear()
            result = compiled(torch.ones(2, device=device)).tolist()
            found.append((result, _shown(cached(state.key)), cached.cache_info().currsize))
        return found

    assert run("jax") == run("cpu")


def test_a_call_that_raises_leaves_the_cache_as_it_was() -> None:
    log: list[int] = []

    @functools.lru_cache(maxsize=2)
    def cached(key: int) -> dict[str, int]:
        log.append(key)
        return {}

    @spmd.compile
    def step(x: torch.Tensor, key: int) -> torch.Tensor:
        cached(key)
        if key == 1:
            raise ValueError("one")
        return x * 2

    for key in (1, 2, 1, 2):
        if key == 1:
            with pytest.raises(ValueError, match="one"):
                step(torch.ones(2, device="jax"), key)
        else:
            step(torch.ones(2, device="jax"), key)
    assert log == [2]
    assert cached.cache_info().currsize == 1


LOGGER = logging.getLogger("tests.functools")


def only(x: torch.Tensor, n: int, once: Any) -> None:
    once("one")


def before_others(x: torch.Tensor, n: int, once: Any) -> None:
    once("one")
    LOGGER.warning("step %d", n)
    once("two")
    LOGGER.warning("end")


def of_the_device(x: torch.Tensor, n: int, once: Any) -> None:
    LOGGER.warning("begin")
    once("one")
    LOGGER.warning("loss %.1f", x.sum().item())


def later(x: torch.Tensor, n: int, once: Any) -> None:
    if n >= 3:
        once("one")
    LOGGER.warning("step %d", n)


def in_a_branch(x: torch.Tensor, n: int, once: Any) -> None:
    once("one")
    LOGGER.warning("constant")
    if x.sum() > 2:
        once("two")
        LOGGER.warning("large")
    else:
        LOGGER.warning("small")


def of_an_object(x: torch.Tensor, n: int, once: Any) -> None:
    ADAPTER.once("one")
    LOGGER.warning("step %d", n)


class Adapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    @functools.lru_cache(None)  # noqa: B019
    def once(self, text: str) -> None:
        self.warning(text)


ADAPTER = Adapter(LOGGER, {})


@pytest.mark.filterwarnings("ignore:.*branches on values of the device")
@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("fn", [only, before_others, of_the_device, later, in_a_branch, of_an_object])
def test_a_cached_function_logs_once(fn: Any, is_own: bool, is_cleared: bool) -> None:
    def calls(device: str) -> tuple[list[Any], int]:
        file, own = io.StringIO(), Listing()
        LOGGER.handlers[:], LOGGER.propagate = [own if is_own else logging.StreamHandler(file)], False
        state = SimpleNamespace(n=0)
        Adapter.once.cache_clear()

        @functools.lru_cache
        def once(text: str) -> None:
            LOGGER.warning(text)

        def step(x: torch.Tensor) -> torch.Tensor:
            state.n += 1
            fn(x, state.n, once)
            return x + 1

        run: Any = step if device == "cpu" else spmd.compile(step)
        found = []
        for k in range(7):
            run(torch.full((2,), float(k % 4)).to(device))
            found.append(own.texts.copy() if is_own else file.getvalue())
            if is_cleared and k == 3 and fn is not of_an_object:
                once.cache_clear()
        return found, device == "cpu" or run.num_traces

    try:
        found, num_traces = calls("jax")
        assert found == calls("cpu")[0]
        assert num_traces <= (4 if fn in (later, in_a_branch) else 2) + is_cleared
    finally:
        LOGGER.handlers.clear()
