"""Arrays of numpy that a function returns or stores share the memory that they share in plain Python."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import batch, on_device

GLOBAL = np.arange(6.0).reshape(2, 3)
STATE: dict[str, Any] = {}


def stored() -> Any:
    STATE["a"] = np.arange(6.0).reshape(2, 3)
    STATE["b"], STATE["c"] = STATE["a"][1:], STATE["a"].T


def of_records() -> Any:
    a = np.zeros(3, dtype=[("f", "f4"), ("g", "i8")])
    return a["g"], a["f"][::2]


def of_objects() -> Any:
    a = np.empty((2, 2), dtype=object)
    a[0, 0], a[1, 1] = 1, [1]
    return a, a[1], a.T, a[::-1]


def read_only() -> Any:
    a, b = np.arange(3.0), np.ones(2)
    b.flags.writeable = False
    return a, np.broadcast_to(a, (2, 3)), b


def with_(make: Callable[[Any], Any], a: Any) -> Any:
    return make(a)


CASES: dict[str, Callable[[], Any]] = {
    "a slice": lambda: with_(lambda a: (a, a[:1]), np.zeros(2)),
    "views alone": lambda: with_(lambda a: (a.T, a[::-1, 1:]), np.arange(6.0).reshape(2, 3)),
    "in state": stored,
    "of an array from before": lambda: (GLOBAL[1:], GLOBAL.T, GLOBAL),
    "of another dtype": lambda: with_(lambda a: (a, a.view(np.int32)[1:]), np.arange(4)),
    "fields of records": of_records,
    "of objects": of_objects,
    "read-only": read_only,
    "columns first": lambda: with_(lambda a: (a, a[:, 1], a[0]), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "of dims in another order": lambda: with_(lambda a: (a, a[0, 1:]), np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0).copy("K")),
    "empty": lambda: with_(lambda a: (a, a[:, 1:], np.zeros(3)[3:]), np.zeros((0, 3))),
    "without dims": lambda: with_(lambda a: (a, a[...], a[1:2].reshape(())), np.zeros(3)),
    "of a bytearray": lambda: with_(lambda b: (np.frombuffer(b, np.uint8), np.frombuffer(b, np.uint8)[2:]), bytearray(b"abcd")),
    "of bytes": lambda: np.frombuffer(b"abcd", np.uint8)[1:],
    "of swapped bytes": lambda: with_(lambda a: (a, a[1:]), np.arange(3, dtype=">i4")),
    "in attributes": lambda: with_(lambda a: [vars(torch.ones(1)), a, {"v": a[1:]}], np.zeros(2)),
}


def arrays_in(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple, dict)):
        return [array for part in (value.values() if isinstance(value, dict) else value) for array in arrays_in(part)]
    return [value] if isinstance(value, np.ndarray) else []


def relations(arrays: list[Any]) -> list[Any]:
    """The geometry of arrays, and what a write to each makes of the others."""
    found: list[Any] = [(a.shape, a.strides if a.size else (), a.dtype, a.flags.writeable) for a in arrays]
    for number, array in enumerate(arrays):
        if array.size and array.flags.writeable:
            array[(0,) * array.ndim] = number + 70
            found.append([a.tolist() for a in arrays])
    return found


@pytest.mark.parametrize("name", CASES)
def test_arrays_share_memory_in_every_call(name: str) -> None:
    def called(run: Callable[..., Any], x: torch.Tensor) -> list[Any]:
        STATE.clear()
        found = []
        for _ in range(3):
            GLOBAL[...] = np.arange(6.0).reshape(2, 3)
            result = arrays_in([run(x)[1], STATE, GLOBAL])
            found.append(relations(result))
        GLOBAL[...] = np.arange(6.0).reshape(2, 3)
        return found

    def fn(x: torch.Tensor) -> Any:
        return x * 2, CASES[name]()

    step = spmd.compile(fn)
    assert called(step, on_device(batch(2))) == called(fn, batch(2))
    assert step.num_traces == 1


def test_every_call_has_memory_of_its_own() -> None:
    step = spmd.compile(lambda x: (x * 2, with_(lambda a: (a, a[1:]), np.zeros(3))))
    x = on_device(batch(2))
    (_, (first, _)), (_, (second, view)) = step(x), step(x)
    assert view.base is second
    assert not np.shares_memory(first, second)


OTHERS: dict[str, Callable[[], Any]] = {
    "memoryview": lambda: with_(lambda a: (a, memoryview(a)), np.zeros(3)),
    "MaskedArray": lambda: with_(lambda a: (a, np.ma.MaskedArray(a)), np.zeros(3)),
    "flatiter": lambda: with_(lambda a: (a, a.flat), np.zeros(3)),
    "matrix": lambda: GLOBAL.view(np.matrix),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_object_with_memory_of_a_result_is_refused_by_name(name: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x * 2, OTHERS[name]()

    with pytest.raises(spmd.TraceError, match=f"a {name} that the compiled function returns or stores shares memory"):
        spmd.compile(fn)(on_device(batch(2)))
