"""`shard_map`: values, layouts, gradients and communication of regions; what has no meaning in one is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax
from jax.sharding import PartitionSpec as P
from torch._higher_order_ops.while_loop import while_loop

import mesh
import spmd
from spmd.collectives import all_gather, all_reduce, all_to_all, axis_index, permute, reduce_scatter
from tests.oracle import array_of, assert_same, batch

pytestmark = pytest.mark.multidevice(num=8)
D, M = "data", "model"
ROTATE = [(i, (i + 1) % 4) for i in range(4)]


def by_jax(fn: Callable[..., Any], grid: mesh.Mesh, in_specs: Any, out_specs: Any, *args: torch.Tensor) -> torch.Tensor:
    """The same region written in JAX."""
    run = jax.shard_map(fn, mesh=grid.to_jax(), in_specs=tuple(P(*s) for s in in_specs), out_specs=P(*out_specs), check_vma=False)
    return torch.tensor(jax.device_get(run(*(jnp.asarray(a.numpy()) for a in args))))


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "all_reduce sum": (lambda x: all_reduce(x, "sum", D), lambda x: lax.psum(x, D), (D, M), (None, M)),
    "all_reduce avg": (lambda x: all_reduce(x, "avg", (D, M)), lambda x: lax.pmean(x, (D, M)), (D, M), (None, None)),
    "all_reduce max": (lambda x: all_reduce(x, "max", M), lambda x: lax.pmax(x, M), (D, M), (D, None)),
    "all_reduce min": (lambda x: all_reduce(x, "min", M), lambda x: lax.pmin(x, M), (D, M), (D, None)),
    "all_reduce product": (
        lambda x: all_reduce(x, "product", M),
        lambda x: jnp.prod(lax.all_gather(x, M), axis=0),
        (D, M),
        (D, None),
    ),
    "all_gather": (lambda x: all_gather(x, 0, D), lambda x: lax.all_gather(x, D, tiled=True), (D, M), (None, M)),
    "all_gather last": (lambda x: all_gather(x, -1, M), lambda x: lax.all_gather(x, M, axis=1, tiled=True), (D, M), (D, None)),
    "reduce_scatter": (
        lambda x: reduce_scatter(x, "sum", 1, D),
        lambda x: lax.psum_scatter(x, D, scatter_dimension=1, tiled=True),
        (None, None),
        (None, D),
    ),
    "reduce_scatter avg": (
        lambda x: reduce_scatter(x, "avg", 0, D),
        lambda x: lax.psum_scatter(x, D, tiled=True) / 4,
        (None, M),
        (D, M),
    ),
    "all_to_all": (lambda x: all_to_all(x, 1, 0, D), lambda x: lax.all_to_all(x, D, 1, 0, tiled=True), (D, None), (None, D)),
    "permute": (lambda x: permute(x, ROTATE, D), lambda x: lax.ppermute(x, D, ROTATE), (D, None), (D, None)),
    "permute, some": (lambda x: permute(x, [(0, 1)], M), lambda x: lax.ppermute(x, M, [(0, 1)]), (D, M), (D, M)),
    "axis_index": (lambda x: x + axis_index(D), lambda x: x + lax.axis_index(D), (D, None), (D, None)),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_a_collective_is_that_of_lax(case: str, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    ours, theirs, in_spec, out_spec = CASES[case]
    x = batch(8, 8)
    mapped = spmd.shard_map(ours, mesh_4x2, (in_spec,), out_spec)
    out = (spmd.compile(mapped) if compiled else mapped)(spmd.mark_sharding(x.to("jax"), mesh_4x2, (D, None)))
    assert_same(out, by_jax(theirs, mesh_4x2, (in_spec,), out_spec, x))
    assert array_of(out).sharding.is_equivalent_to(mesh.ShardingSpec(mesh_4x2, out_spec).to_jax(), 2)


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return all_reduce(torch.tanh(x) @ w, "sum", M)


@pytest.mark.optimized
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_whole_function(compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    x, w = batch(8, 16), batch(16, 4, seed=2)
    hosts = [t.clone().requires_grad_() for t in (x, w)]
    (torch.tanh(hosts[0]) @ hosts[1]).square().sum().backward()
    devices = [t.to("jax").requires_grad_() for t in (x, w)]
    mapped = spmd.shard_map(matmul, mesh_4x2, ((D, M), (M, None)), (D, None))

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        loss = mapped(x, w).square().sum()
        loss.backward()
        return loss

    loss = (spmd.compile(run, keep_grads=True) if compiled else run)(*devices)
    assert_same(loss.detach(), (torch.tanh(x) @ w).square().sum())
    for device, host in zip(devices, hosts, strict=True):
        assert_same(device.grad, host.grad)


def second(fn: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
    """Gradients of gradients, and of these."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    first = torch.autograd.grad(fn(x, w).square().sum(), (x, w), create_graph=True)
    second = torch.autograd.grad([g.square().sum() for g in first], (x, w), create_graph=True)
    return *(g.detach() for g in second), *torch.autograd.grad([g.sum() for g in second], (x, w))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_higher_derivatives_are_those_of_the_whole_function(compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    x, w = batch(8, 16).double(), batch(16, 4, seed=2).double()
    mapped = spmd.shard_map(matmul, mesh_4x2, ((D, M), (M, None)), (D, None))

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        return second(mapped, x, w)

    found = (spmd.compile(run) if compiled else run)(x.to("jax"), w.to("jax"))
    assert_same(found, second(lambda x, w: torch.tanh(x) @ w, x, w))


def test_a_hessian_is_that_of_the_whole_function(mesh_4x2: mesh.Mesh) -> None:
    mapped = spmd.shard_map(lambda x: all_reduce(x.sin().sum() ** 2, "sum", (D, M)), mesh_4x2, ((D, M),), ())
    x = batch(4, 2)
    found = spmd.compile(lambda x: torch.autograd.functional.hessian(mapped, x))(x.to("jax"))
    assert_same(found, torch.autograd.functional.hessian(lambda x: x.sin().square().sum(), x))


def test_an_argument_may_be_written_to_before_the_backward_pass(mesh_4x2: mesh.Mesh) -> None:
    x = batch(8, 4).to("jax").requires_grad_()
    h = x * 1
    out = spmd.shard_map(torch.tanh, mesh_4x2, ((D, M),), (D, M))(h)
    h.add_(1)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert_same(grad, 1 - batch(8, 4).tanh() ** 2)


def test_a_compiled_region_sends_what_it_says_and_nothing_else(mesh_4x2: mesh.Mesh) -> None:
    mapped = spmd.shard_map(matmul, mesh_4x2, ((D, M), (M, None)), (D, None))
    x = spmd.mark_sharding(batch(8, 16).to("jax"), mesh_4x2, (D, M))
    w = spmd.mark_sharding(batch(16, 4).to("jax"), mesh_4x2, (M, None))
    step = spmd.compile(lambda x, w: mapped(x, w))
    step(x, w)
    assert step.collectives().by_axis() == {("all-reduce", (M,)): 1}


def test_several_results_and_specs_in_other_forms(mesh_4x2: mesh.Mesh) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, all_reduce(x.sum(0), "sum", D)

    x = batch(8, 8)
    doubled, total = spmd.shard_map(both, mesh_4x2, ((D, None),), (mesh.PartitionSpec(D, None), (None,)))(x.to("jax"))
    assert_same((doubled, total), (x * 2, x.sum(0)))
    assert tuple(doubled.partition_spec) == (D, None)
    flat = spmd.shard_map(lambda x: x + 1, mesh_4x2, (((D, M),),), ((D, M),))(batch(8).to("jax"))
    assert_same(flat, batch(8) + 1)
    assert array_of(flat).sharding.shard_shape((8,)) == (1,)


def test_layers_with_parameters_passed_run_on_pieces(mesh_4x2: mesh.Mesh) -> None:
    def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        assert up.shape == (8, 8)
        return all_reduce(F.linear(F.gelu(F.linear(x, up)), down), "sum", M)

    x, up, down = batch(8, 8), batch(16, 8, seed=2), batch(8, 16, seed=3)
    mapped = spmd.shard_map(feed_forward, mesh_4x2, ((D, None), (M, None), (None, M)), (D, None))
    assert_same(mapped(x.to("jax"), up.to("jax"), down.to("jax")), F.linear(F.gelu(F.linear(x, up)), down))


def test_a_region_is_compiled_once_per_program_and_never_stale(mesh_4x2: mesh.Mesh) -> None:
    factor = [2.0]
    mapped = spmd.shard_map(lambda x: x * factor[0], mesh_4x2, ((D, None),), (D, None))
    x = batch(8, 8)
    for value in (2.0, 2.0, 3.0, 2.0):
        factor[0] = value
        assert_same(mapped(x.to("jax")), x * value)


def test_a_region_with_another_constant_in_a_jax_function_is_another_program(mesh_4x2: mesh.Mesh) -> None:
    tables = [torch.arange(8.0), torch.ones(8)]
    jitted = [jax.jit(lambda x, table=table: x * table) for table in map(np.asarray, tables)]
    chosen = [0]
    mapped = spmd.shard_map(lambda x: spmd.call_jax(jitted[chosen[0]], (x,)), mesh_4x2, ((D, None),), (D, None))
    x = batch(8, 8)
    for chosen[0] in (0, 1, 0):
        assert_same(mapped(x.to("jax")), x * tables[chosen[0]])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_of_one_piece_stays_on_its_device(compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    mapped = spmd.shard_map(lambda x: x * x.sum().item(), mesh_4x2, ((D, None),), (D, None))
    x = batch(8, 8)
    want = torch.cat([piece * piece.sum() for piece in x.chunk(4)])
    assert_same((spmd.compile(lambda x: mapped(x)) if compiled else mapped)(x.to("jax")), want)


def test_a_module_runs_in_a_region_while_outputs_are_checked(mesh_4x2: mesh.Mesh) -> None:
    gelu = torch.nn.GELU()
    mapped = spmd.shard_map(lambda x: gelu(x), mesh_4x2, ((D, None),), (D, None))
    x = batch(8, 8)
    assert_same(spmd.compile(lambda x: mapped(x), debug_nans=True)(x.to("jax")), gelu(x))


def count_down(x: torch.Tensor) -> torch.Tensor:
    return while_loop(lambda i, x: i > 0, lambda i, x: (i - 1, x * 2), (torch.tensor(3, device=x.device), x))[1]


# and what a device's piece becomes
CONTROL_FLOW: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a branch": (
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)),
        lambda x: x * 2 if x.sum() > 0 else x - 1,
    ),
    "a loop": (count_down, lambda x: x * 8),
    "a scan": (lambda x: spmd.scan(lambda total, row: (total + row, total * row), x[0], x)[1], lambda x: (x.cumsum(0) - x + x[0]) * x),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_in_a_region_is_each_devices_own(name: str, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    fn, in_python = CONTROL_FLOW[name]
    mapped = spmd.shard_map(fn, mesh_4x2, ((D, None),), (D, None))
    x = batch(8, 8)
    want = torch.cat([in_python(piece) for piece in x.chunk(4)])
    assert_same((spmd.compile(lambda x: mapped(x)) if compiled else mapped)(x.to("jax")), want)


def reads_outside(x: torch.Tensor) -> torch.Tensor:
    return x + _OUTSIDE[0]


_OUTSIDE: list[torch.Tensor] = []
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a tensor that was not passed": (reads_outside, ((D, None),), "reads a tensor of shape (8, 8) that is not an argument"),
    "random numbers": (lambda x: x + torch.rand_like(x), ((D, None),), "draws random numbers inside shard_map"),
    "random numbers in a branch": (
        lambda x: torch.cond(x.sum() > 0, torch.rand_like, torch.neg, (x,)),
        ((D, None),),
        "draws random numbers inside shard_map",
    ),
    "an uneven dim": (lambda x: x, ((None, (D, M)),), "dim 1 has 12 elements, but its axes split it into 8 shards"),
    "too few specs": (lambda x: x, (), "0 in_specs, but was called with 1 arguments"),
    "another result": (lambda x: (x, x), ((D, None),), "returns 2 values, but out_specs has 1 spec(s)"),
    "an unknown reduction": (lambda x: all_reduce(x, "median", D), ((D, None),), "'median' is not a reduction"),
    "a scatter of uneven dims": (lambda x: reduce_scatter(x, "sum", 0, D), ((D, None),), "dim 0 has 2 elements, the group 4 members"),
    "an axis that is not there": (
        lambda x: all_reduce(x, "sum", "dat"),
        ((D, None),),
        "runs over axis 'dat'",
    ),
    "a member that is not there": (lambda x: permute(x, [(0, 9)], D), ((D, None),), "permute over 'data' has no member for (0, 9)"),
    "a member that receives twice": (lambda x: permute(x, [(0, 1), (2, 1)], D), ((D, None),), "member 1 receives twice"),
    "a scatter of maxima": (lambda x: reduce_scatter(x, "max", 0, M), ((D, None),), "reduce_scatter does not support 'max'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_per_device_is_refused(case: str, mesh_4x2: mesh.Mesh) -> None:
    fn, in_specs, text = REFUSED[case]
    _OUTSIDE[:] = [batch(8, 8).to("jax")]
    x = torch.zeros(8, 12 if case == "an uneven dim" else 8).to("jax")
    with pytest.raises((spmd.SpmdError, mesh.SpecError)) as raised:
        spmd.shard_map(fn, mesh_4x2, in_specs, (D, None))(x)
    assert text in str(raised.value) and "fix: " in str(raised.value)


def test_pairs_may_come_from_a_generator_and_be_integers_of_numpy(mesh_4x2: mesh.Mesh) -> None:
    x, of_numpy = batch(8, 8), list[Any](np.arange(4))
    moved = spmd.shard_map(lambda x: permute(x, ((i, (i + 1) % 4) for i in of_numpy), D), mesh_4x2, ((D, None),), (D, None))
    assert_same(moved(x.to("jax")), x.roll(2, 0))


def ring_sum(x: torch.Tensor) -> torch.Tensor:
    total = x
    for _ in range(3):
        x = permute(x, ROTATE, D)
        total = total + x
    return total


# function, out_spec, axes along which it differs
DIFFERENT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any, str]] = {
    "a sum of shards": (lambda x: x.sum(), (), "axis 'data'"),
    "a branch": (lambda x: torch.cond(x.sum() > 0, torch.ones_like, torch.zeros_like, (x,)), (None, None), "axis 'data'"),
    "a loop": (count_down, (None, None), "axis 'data'"),
    "a scan": (lambda x: spmd.scan(lambda total, row: (total + row, total), torch.zeros_like(x[0]), x)[0], (None,), "axis 'data'"),
    "a reduction over another axis": (lambda x: all_reduce(x, "sum", M), (None, None), "axis 'data'"),
    "an index": (lambda x: all_reduce(x, "sum", D) + axis_index((D, M)), (None, None), "axes 'data', 'model'"),
    "shards passed around": (ring_sum, (None, None), "axis 'data'"),
}


@pytest.mark.parametrize("how", ["eager", "compiled", "with gradients"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_a_result_that_differs_along_an_axis_left_out_is_refused(case: str, how: str, mesh_4x2: mesh.Mesh) -> None:
    fn, out_spec, axes = DIFFERENT[case]
    mapped = spmd.shard_map(fn, mesh_4x2, ((D, None),), out_spec)
    x = batch(8, 8).to("jax").requires_grad_(how == "with gradients")
    with pytest.raises(mesh.SpecError) as raised:
        (spmd.compile(lambda x: mapped(x)) if how == "compiled" else mapped)(x)
    assert f"may differ between devices along {axes}, which its out_spec does not name" in str(raised.value)
    assert "fix: spmd.collectives.all_reduce(result, " in str(raised.value) and "test_shard_map.py" in str(raised.value)


def test_a_result_that_the_caller_vouches_for_is_not_checked(mesh_4x2: mesh.Mesh) -> None:
    x = batch(8, 8)
    mapped = spmd.shard_map(ring_sum, mesh_4x2, ((D, None),), (None, None), check_vma=False)
    torch.testing.assert_close(mapped(x.to("jax")).cpu(), sum(x.chunk(4)))


def test_results_that_collectives_made_equal_pass_control_flow(mesh_4x2: mesh.Mesh) -> None:
    def equal(x: torch.Tensor) -> torch.Tensor:
        total = all_reduce(x, "sum", D)
        return F.relu(torch.cond(total.sum() > 0, lambda t: t * 2, lambda t: t - 1, (count_down(total),)))

    x = batch(8, 8)
    total = sum(x.chunk(4)) * 8
    want = F.relu(total * 2 if total.sum() > 0 else total - 1)
    torch.testing.assert_close(spmd.shard_map(equal, mesh_4x2, ((D, None),), (None, None))(x.to("jax")).cpu(), want)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_result_with_fewer_dims_than_its_spec_is_refused(compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    mapped = spmd.shard_map(lambda x: x.sum(), mesh_4x2, ((D, None),), (D, None))
    with pytest.raises(mesh.SpecError, match=r"has 0 dims, but its out_spec \('data', None\) has 2 entries(?s:.*)fix: out_specs=\(\), or"):
        (spmd.compile(lambda x: mapped(x)) if compiled else mapped)(batch(8, 8).to("jax"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reduce_op", ["max", "min"])
def test_gradient_of_extremes_goes_to_the_members_that_have_them(reduce_op: str, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    def of_pieces(x: torch.Tensor) -> torch.Tensor:
        region = spmd.shard_map(lambda piece: all_reduce(piece, reduce_op, D), mesh_4x2, ((D, None),), (None, None))
        return torch.autograd.grad((region(x) * torch.arange(6.0, device="jax").reshape(2, 3)).sum(), x)[0]

    x = batch(8, 3).round().requires_grad_()  # rounded: some members have equal values
    whole = getattr(torch, f"a{reduce_op}")(x.reshape(4, 2, 3), 0)
    (want,) = torch.autograd.grad((whole * torch.arange(6.0).reshape(2, 3)).sum(), x)
    given = x.detach().to("jax").requires_grad_()
    assert_same((spmd.compile(of_pieces) if compiled else of_pieces)(given), want)


def test_a_collective_outside_a_region_is_refused() -> None:
    with pytest.raises(spmd.SpmdError, match="outside a manual region(?s:.*)spmd.shard_map"):
        all_reduce(batch(4).to("jax"), "sum", D)
