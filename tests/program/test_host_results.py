"""CPU tensors that a trace makes and returns or stores: every call makes them anew, like eager code on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import spmd

TABLE = torch.arange(4.0)
ARRAY = np.arange(3.0)
LAYER = nn.Linear(2, 2)


class Labelled(torch.Tensor):
    pass


class Holder:
    def __init__(self) -> None:
        self.log: list[torch.Tensor] = []


def overlapping() -> Any:
    t = torch.zeros(6)
    return t, t[1:], t.view(2, 3).t(), t.detach()


def views_alone() -> Any:
    t = torch.arange(6.0)
    return t[1:3], t[2:]


def other_dtypes() -> Any:
    t = torch.ones(4)
    return t, t.view(torch.int32), t[1:].view(torch.uint8)


def leaves() -> Any:
    p, w = nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)
    return p, p.data, w, w * 2


def with_attributes() -> Any:
    t = torch.ones(2)
    t.label, t.rows, t.other = "query", [1, 2], torch.zeros(1)  # type: ignore[attr-defined]
    return t, t.other  # type: ignore[attr-defined]


def written() -> torch.Tensor:
    t = torch.zeros(3)
    t[1] = 5
    return t.add_(1)


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def repeated() -> Any:
    t = torch.ones(3)
    return t, [t], {"t": t}


CASES: dict[str, Callable[[], Any]] = {
    "new": lambda: (torch.zeros(3), torch.tensor(2.5, dtype=torch.float64), torch.zeros(3, 0), torch.arange(4)),
    "dtypes": lambda: [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn)],
    "strides": lambda: (torch.ones(1, 3).expand(4, 3), torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)),
    "pending": lambda: (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag),
    "class": lambda: torch.ones(3).as_subclass(Labelled),
    "named": lambda: torch.ones(2, 3).max(0),
    "of_an_array": lambda: torch.from_numpy(np.arange(3)),
    "of_constants": lambda: torch.cat([TABLE, torch.zeros(2)]),
    **{fn.__name__: fn for fn in (overlapping, views_alone, other_dtypes, leaves, with_attributes, written, inferred, repeated)},
    "of_older_tensors": lambda: (TABLE[1:], TABLE.view(2, 2), TABLE.detach(), LAYER.weight.detach().t(), LAYER.weight.T),
    "of_older_arrays": lambda: (torch.from_numpy(ARRAY), torch.as_tensor(ARRAY)[1:]),
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in (value.values() if isinstance(value, dict) else value) for t in tensors_in(part)]


def shown(value: Any) -> list[Any]:
    """What the tensors of a result are: values, layout, class, which of them are one, and which share memory, also with older tensors."""
    found = tensors_in(value)
    older = [TABLE, LAYER.weight, torch.from_numpy(ARRAY)]
    memory = [t.untyped_storage().data_ptr() for t in [*found, *older]]
    return [
        (
            *(type(t), t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), list(vars(t))),
            *(t.is_leaf and t.requires_grad, t.is_inference(), t.is_conj(), t.is_neg()),
            t.detach().tolist() if t.is_complex() else t.detach().double().tolist(),
            [other is t for other in found],
            [other == address for other in memory] if t.numel() else [],
        )
        for t, address in zip(found, memory, strict=False)
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_call_returns_what_the_cpu_does(name: str) -> None:
    make, x = CASES[name], torch.ones(3).to("jax")
    step = spmd.compile(lambda x: (x + 1, make()))
    results = [step(x)[1] for _ in range(3)]
    assert [shown(result) for result in results] == [shown(make())] * 3
    assert step.num_traces == 1
    if not name.startswith("of_older"):
        memory = [{t.untyped_storage().data_ptr() for t in tensors_in(result) if t.numel()} for result in results]
        assert not memory[0] & memory[1] | memory[1] & memory[2]


def test_a_write_to_a_result_changes_no_later_call() -> None:
    step = spmd.compile(lambda x: (x, torch.zeros(3)))
    for _ in range(3):
        result = step(torch.ones(2).to("jax"))[1]
        assert result.tolist() == [0.0, 0.0, 0.0]
        result.add_(7).resize_(8)
    assert step.num_traces == 1


def test_a_write_to_one_result_changes_the_others_with_its_memory() -> None:
    step = spmd.compile(lambda x: (x, overlapping()))
    for _ in range(2):
        _, (whole, rest, table, _) = step(torch.ones(2).to("jax"))
        rest[0] = 5
        assert whole.tolist() == [0, 5, 0, 0, 0, 0]
        assert table[1, 0] == 5
        assert whole._version == rest._version


def test_a_view_of_an_older_tensor_follows_its_values() -> None:
    table = torch.zeros(3)
    step = spmd.compile(lambda x: (x, table[1:]))
    for n in range(3):
        part = step(torch.ones(2).to("jax"))[1]
        assert part.tolist() == [n, n]
        part.add_(1)
        assert table.tolist() == [0, n + 1, n + 1]


def test_values_that_decide_one_are_guarded() -> None:
    step = spmd.compile(lambda x, n: (x, torch.tensor([1.0, float(n)]), torch.arange(x.shape[0])))
    for size, n in ((2, 1), (2, 2), (3, 2), (2, 3), (2, 2), (3, 2)):
        _, pair, positions = step(torch.ones(size).to("jax"), n)
        assert pair.tolist() == [1.0, n]
        assert positions.tolist() == list(range(size))
    assert step.num_traces == 4


@pytest.mark.parametrize("make", [lambda n: torch.zeros(2), torch.arange], ids=["constant", "size"])
def test_of_dynamic_sizes(make: Callable[[int], torch.Tensor]) -> None:
    step = spmd.compile(lambda x: (x + 1, make(x.shape[0])), dynamic=True)
    for size in (3, 4, 5, 6, 7, 5):
        total, made = step(torch.ones(size).to("jax"))
        assert total.tolist() == [2.0] * size
        assert torch.equal(made, make(size))


def test_stored_on_objects() -> None:
    held = Holder()

    def step(x: torch.Tensor) -> torch.Tensor:
        held.last = torch.arange(3.0)  # type: ignore[attr-defined]
        held.log.append(torch.zeros(2))
        held.pair = [held.log[-1]] * 2  # type: ignore[attr-defined]
        return x + 1

    compiled = spmd.compile(step)
    for n in range(1, 4):
        compiled(torch.ones(2).to("jax"))
        assert held.last.tolist() == [0, 1, 2]  # type: ignore[attr-defined]
        assert len(held.log) == n
        assert held.pair[0] is held.pair[1] is held.log[-1]  # type: ignore[attr-defined]
        held.log[-1].add_(n)
    assert [t.tolist() for t in held.log] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_of_packed_sequences(is_sorted: bool) -> None:
    def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return pad_packed_sequence(pack_padded_sequence(x, lengths, enforce_sorted=is_sorted))

    compiled, x = spmd.compile(step), torch.arange(60.0).view(5, 3, 4)
    for lengths in map(torch.tensor, ([5, 3, 1], [5, 4, 1], [5, 3, 1], [5, 5, 5])):
        (padded, found), (wanted, wanted_lengths) = compiled(x.to("jax"), lengths), step(x, lengths)
        torch.testing.assert_close(padded.cpu(), wanted, rtol=0, atol=0)
        torch.testing.assert_close(found, wanted_lengths, rtol=0, atol=0)
    assert compiled.num_traces == 3


def array_and_tensor() -> Any:
    a = np.arange(3)
    return a, torch.from_numpy(a)


def with_gradient() -> torch.Tensor:
    p = nn.Parameter(torch.ones(2))
    p.sum().backward()
    return p


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: torch.ones(3).to_sparse(), r"a sparse_coo tensor on the CPU, of shape \(3,\)[\s\S]*fix: return x.to_dense\(\)"),
        (lambda: torch.ones(3, device="meta"), r"a tensor on meta, of shape \(3,\)[\s\S]*fix: create it on device 'jax' or 'cpu'"),
        (lambda: torch.ones(3).share_memory_(), r"in shared memory[\s\S]*fix: return it as it was, and call share_memory_\(\) there"),
        (torch.get_rng_state, r"a random state[\s\S]*fix: read it outside of the function"),
        (lambda: torch.jax.get_rng_state(), r"a random state[\s\S]*fix: read it outside of the function"),  # type: ignore[attr-defined]
        (with_gradient, r"a CPU tensor with a gradient[\s\S]*fix: return x.detach\(\)"),
        (array_and_tensor, r"a ndarray .* shares memory with a Tensor"),
    ],
)
def test_what_no_call_can_make_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(spmd.TraceError, match=text):
        spmd.compile(lambda x: (x, make()))(torch.ones(2).to("jax"))


def test_results_of_several_steps_are_refused() -> None:
    with pytest.raises(spmd.TraceError, match=r"a tensor on cpu, of shape \(3,\)[\s\S]*fix: create it on device 'jax'"):
        spmd.compile(lambda x: (x, torch.zeros(3)), steps_per_call=2)(torch.ones(2, 3).to("jax"))


def test_an_export_refuses_one(tmp_path: Any) -> None:
    with pytest.raises(spmd.SpmdError, match=r"returns a CPU tensor[\s\S]*fix: create it on device 'jax'"):
        spmd.export(lambda x: (x, torch.zeros(3)), (torch.ones(2).to("jax"),), tmp_path / "programs.spmd")
