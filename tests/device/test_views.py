"""Views of device tensors against torch on the CPU: any chain of them, read, written and differentiated."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings

import spmd
from spmd.base._convert import exact_dtypes
from spmd.device._views import GatherWindow, Window, contiguous_stride, plan_window

Step = Callable[[torch.Tensor], torch.Tensor]
Draw = Callable[[Any], Any]


def pick(draw: Draw, low: int, high: int) -> int:
    return draw(st.integers(low, high))


def slice_(draw: Draw, t: torch.Tensor) -> Step:
    dim = pick(draw, 0, t.dim() - 1)
    start = pick(draw, 0, t.shape[dim])
    window = (slice(None),) * dim + (slice(start, pick(draw, start, t.shape[dim]), pick(draw, 1, 3)),)
    return lambda x: x[window]


def select(draw: Draw, t: torch.Tensor) -> Step:
    dim = pick(draw, 0, t.dim() - 1)
    index = pick(draw, 0, max(t.shape[dim] - 1, 0))
    return lambda x: x.select(dim, index) if x.shape[dim] else x


def narrow(draw: Draw, t: torch.Tensor) -> Step:
    dim = pick(draw, 0, t.dim() - 1)
    start = pick(draw, 0, t.shape[dim])
    length = pick(draw, 0, t.shape[dim] - start)
    return lambda x: x.narrow(dim, start, length)


def transpose(draw: Draw, t: torch.Tensor) -> Step:
    first, second = pick(draw, 0, t.dim() - 1), pick(draw, 0, t.dim() - 1)
    return lambda x: x.transpose(first, second)


def permute(draw: Draw, t: torch.Tensor) -> Step:
    order = draw(st.permutations(range(t.dim())))
    return lambda x: x.permute(order)


def view(draw: Draw, t: torch.Tensor) -> Step:
    if not t.is_contiguous():
        return lambda x: x
    shape = draw(st.sampled_from([(-1,), (1, t.numel()), tuple(t.shape), *[(n, t.numel() // n) for n in (2, 3) if t.numel() % n == 0]]))
    return lambda x: x.view(shape if x.numel() else x.shape)


def unflatten(draw: Draw, t: torch.Tensor) -> Step:
    dim = pick(draw, 0, t.dim() - 1)
    extent = t.shape[dim]
    parts = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0] or [1]))
    return lambda x: x.unflatten(dim, (parts, x.shape[dim] // parts))


def expand(draw: Draw, t: torch.Tensor) -> Step:
    count = pick(draw, 1, 3)
    return lambda x: x.expand(count, *x.shape)


def unsqueeze(draw: Draw, t: torch.Tensor) -> Step:
    dim = pick(draw, 0, t.dim())
    return lambda x: x.unsqueeze(dim)


def diagonal(draw: Draw, t: torch.Tensor) -> Step:
    if t.dim() < 2:
        return lambda x: x
    first, second, *_ = draw(st.permutations(range(t.dim())))
    offset = pick(draw, -1, 1)
    return lambda x: x.diagonal(offset, first, second)


def unfold(draw: Draw, t: torch.Tensor) -> Step:
    dim = pick(draw, 0, t.dim() - 1)
    size = pick(draw, 1, max(t.shape[dim], 1))
    step = pick(draw, 1, 3)
    return lambda x: x.unfold(dim, size, step) if x.shape[dim] >= size else x


def as_strided(draw: Draw, t: torch.Tensor) -> Step:
    room = t.untyped_storage().nbytes() // t.element_size()
    size = (pick(draw, 1, 3), pick(draw, 1, 3))
    stride = (pick(draw, 0, 4), pick(draw, 0, 4))
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    offset = pick(draw, 0, max(room - 1 - last, 0))
    return lambda x: x.as_strided(size, stride, offset) if last < room else x


VIEWS = [slice_, select, narrow, transpose, permute, view, unflatten, expand, unsqueeze, diagonal, unfold, as_strided]
WRITES: dict[str, Step] = {
    "mul_": lambda t: t.mul_(2),
    "add_": lambda t: t.add_(torch.arange(float(t.numel()), device=t.device).reshape(t.shape)),
    "fill_": lambda t: t.fill_(7),
    "copy_": lambda t: t.copy_(torch.arange(float(t.numel()), device=t.device).reshape(t.shape) - 3),
    "copy_ of one": lambda t: t.copy_(torch.ones((), device=t.device)),
    "zero_": lambda t: t.zero_(),
}


def drawn_chain(draw: Draw, base: torch.Tensor, length: int) -> list[Step]:
    """Up to `length` view steps, each valid on the CPU tensor that the steps before it make of `base`."""
    steps: list[Step] = []
    current = base
    for _ in range(pick(draw, 1, length)):
        if current.dim() == 0 or current.numel() > 200:
            break
        steps.append(draw(st.sampled_from(VIEWS))(draw, current))
        current = steps[-1](current)
    return steps


def with_views(base: torch.Tensor, steps: list[Step]) -> list[torch.Tensor]:
    chain = [base]
    for step in steps:
        chain.append(step(chain[-1]))
    return chain


def is_writable(t: torch.Tensor) -> bool:
    """torch refuses to write where two elements share a place; expanded and overlapping views are only read."""
    places = torch.zeros(t.untyped_storage().nbytes() // t.element_size(), dtype=torch.int64)
    flat = torch.arange(places.numel()).as_strided(t.shape, t.stride(), t.storage_offset()).reshape(-1)
    return flat.unique().numel() == flat.numel()


def assert_same(host: torch.Tensor, device: torch.Tensor) -> None:
    assert device.device.type == "jax"
    torch.testing.assert_close(device.detach().cpu(), host.detach())


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=40)
@given(st.data(), shapes)
def test_chain_of_views_reads_and_writes_as_on_the_cpu(data: st.DataObject, shape: tuple[int, ...]) -> None:
    host_base = torch.arange(float(math.prod(shape))).reshape(shape)
    device_base = host_base.to("jax")
    steps = drawn_chain(data.draw, host_base, 4)
    host, device = with_views(host_base, steps), with_views(device_base, steps)
    for ours, theirs in zip(device, host, strict=True):
        assert (ours.shape, ours.stride(), ours.storage_offset()) == (theirs.shape, theirs.stride(), theirs.storage_offset())
        assert ours.is_contiguous() == theirs.is_contiguous()
        assert_same(theirs, ours)
    for _ in range(2):
        which = pick(data.draw, 0, len(host) - 1)
        write = WRITES[data.draw(st.sampled_from(sorted(WRITES)))]
        if is_writable(host[which]):
            write(host[which])
            write(device[which])
        for ours, theirs in zip(device, host, strict=True):
            assert_same(theirs, ours)


@settings(max_examples=30)
@given(st.data(), shapes)
def test_gradients_through_written_views_equal_the_cpus(data: st.DataObject, shape: tuple[int, ...]) -> None:
    x_host = (torch.arange(float(math.prod(shape))).reshape(shape) - 3).requires_grad_()
    x_device = x_host.detach().to("jax").requires_grad_()
    steps = drawn_chain(data.draw, x_host.detach(), 3)
    names = [data.draw(st.sampled_from(sorted(WRITES))) for _ in range(2)]
    through_base = data.draw(st.booleans())

    def loss(x: torch.Tensor) -> torch.Tensor:
        z = x * x
        last = with_views(z, steps)[-1]
        if writable:
            last = WRITES[names[0]](last)
        if through_base:
            z = WRITES[names[1]](z)
        return (z * z).sum() + (with_views(z, steps)[-1] * 3).sum()

    writable = is_writable(with_views(x_host.detach().clone(), steps)[-1])
    expected, found = loss(x_host), loss(x_device)
    assert_same(expected, found)
    if expected.requires_grad:
        expected.backward()
        found.backward()
        assert x_host.grad is not None and x_device.grad is not None
        assert_same(x_host.grad, x_device.grad)


@settings(max_examples=30)
@given(st.data(), shapes)
def test_contiguous_copies_exactly_when_torch_does(data: st.DataObject, shape: tuple[int, ...]) -> None:
    base = torch.zeros(shape)
    steps = drawn_chain(data.draw, base, 3)

    def shares(t: torch.Tensor) -> bool:
        last = with_views(t, steps)[-1]
        return last.contiguous().untyped_storage()._cdata == last.untyped_storage()._cdata

    assert shares(base.to("jax")) == shares(base)


COMMON: dict[str, Step] = {
    "whole": lambda t: t,
    "flattened": lambda t: t.view(-1),
    "merged": lambda t: t.view(4, 48),
    "split": lambda t: t.view(4, 2, 3, 8),
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(2, 0, 1),
    "heads": lambda t: t.view(4, 6, 2, 4).transpose(1, 2),
    "sliced": lambda t: t[1:3, :, 2:],
    "stepped": lambda t: t[::2, 1::2],
    "column": lambda t: t[:, :, 3],
    "row": lambda t: t[2],
    "element": lambda t: t[1, 2, 3],
    "expanded": lambda t: t[:, :1].expand(4, 5, 8),
    "chunk of a fused projection": lambda t: t.chunk(2, dim=-1)[1].transpose(0, 1),
}


def test_diagonal_falls_back_to_a_gather() -> None:
    diagonal = plan_window((4, 4), (4,), (5,), 0)
    assert isinstance(diagonal, GatherWindow)
    with exact_dtypes():
        assert diagonal.read(jnp.arange(16).reshape(4, 4)).tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("name", COMMON)
def test_common_views_have_neither_gather_nor_scatter(name: str) -> None:
    root = torch.arange(4 * 6 * 8).reshape(4, 6, 8)
    seen = COMMON[name](root)
    window = plan_window((4, 6, 8), tuple(seen.shape), seen.stride(), int(seen.storage_offset()))
    assert isinstance(window, Window)
    array = jnp.asarray(root.int().numpy())
    assert window.read(array).tolist() == seen.tolist()
    new = jnp.full(tuple(seen.shape), -1, array.dtype)
    program = str(jax.make_jaxpr(lambda r, v: (window.read(r), window.write(r, v)))(array, new))
    assert "gather" not in program and "scatter" not in program
    seen.fill_(-1) if name != "expanded" else root[:, :1].fill_(-1)
    assert window.write(array, new).tolist() == root.tolist()


def test_contiguous_stride_counts_an_empty_dim_as_one() -> None:
    assert contiguous_stride((2, 0, 3)) == torch.empty(2, 0, 3).stride()


def test_a_compiled_write_of_a_shifted_copy_reads_what_was_there_before() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        base = x + 1
        base[1:] = base[:-1].clone()
        return base.reshape(1, *base.shape)

    x = torch.arange(4, dtype=torch.int32).reshape(4, 1, 1)
    torch.testing.assert_close(spmd.compile(shifted)(x.to("jax")).cpu(), shifted(x))


_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes; of a bool whether they are zero, as the device has no other bools."""
    seen = tensor.cpu().view(torch.uint8)
    return seen != 0 if tensor.dtype == torch.bool else seen


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_values_computed_on_the_device_are_viewed_as_every_dtype(dtype: torch.dtype) -> None:
    for other in _DTYPES:
        host = torch.tensor([[1, 0, 2, 3] * 4, [0, 1, 1, 2] * 4]).to(dtype)
        device = host.to("jax").clone()
        view, want = device.view(other), host.view(other)
        assert torch.equal(_bytes(view), _bytes(want)), other
        view[0, 0], want[0, 0] = 1, 1
        assert torch.equal(_bytes(device), _bytes(host)), other
