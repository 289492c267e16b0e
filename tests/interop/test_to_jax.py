"""`to_jax` and `from_jax`: no copy, layouts kept, and nobody's bytes or memory change under him."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mesh
import spmd
from tests.grids import grid, line
from tests.oracle import MLP, REORDERED, TOLERANCE, assert_same, batch, twins

DTYPES = [d for d in TOLERANCE if d.itemsize < 8] + [torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ways_are_the_same_memory(dtype: torch.dtype) -> None:
    x = batch(3, 4).to(dtype)
    a = spmd.to_jax(x.to("jax"))
    assert (a.shape, str(a.dtype)) == ((3, 4), str(dtype).removeprefix("torch."))
    back = spmd.from_jax(a)
    assert torch.equal(back.cpu(), x)
    assert pointers(spmd.to_jax(back)) == pointers(a)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_layout_stays(kind: Any) -> None:
    m = grid()
    jax_mesh = jax.make_mesh(m.mesh_shape, m.axis_names, axis_types=(kind,) * 2)
    a = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(jax_mesh, PartitionSpec("data", "model")))
    x = spmd.from_jax(a)
    assert isinstance(x, spmd.XLAShardedTensor)
    assert x.sharding_spec == mesh.ShardingSpec(m, ("data", "model"))
    assert pointers(spmd.to_jax(x)) == pointers(a)
    step = spmd.compile(lambda x: x * 2)
    assert spmd.to_jax(step(x)).sharding.spec == PartitionSpec("data", "model")
    assert step.mesh == m
    marked = spmd.mark_sharding(torch.zeros(8, 8, device="jax"), m, ("data", None))
    assert spmd.to_jax(marked).sharding == mesh.ShardingSpec(m, ("data", None)).to_jax()


def test_uneven_tensors_come_without_padding_and_views_as_what_they_show() -> None:
    host = batch(2 * mesh.device_count() + 1, 3)
    x = spmd.mark_sharding(host.to("jax"), line(), ("data", None))
    np.testing.assert_array_equal(spmd.to_jax(x), host)
    np.testing.assert_array_equal(spmd.to_jax(x[1:3].t()), host[1:3].t())


def test_containers_of_either_and_other_values() -> None:
    tree = {"a": [torch.ones(2, device="jax"), 3], "b": (None, "name")}
    arrays = spmd.to_jax(tree)
    assert isinstance(arrays["a"][0], jax.Array)
    assert (arrays["a"][1], arrays["b"]) == (3, (None, "name"))
    assert_same(spmd.from_jax(arrays)["a"][0], torch.ones(2))


def test_a_write_on_one_side_is_not_seen_by_the_other() -> None:
    x = torch.arange(4.0, device="jax")
    a = spmd.to_jax(x)
    x.add_(1)
    x[1:3] = 9
    assert a.tolist() == [0, 1, 2, 3]
    y = spmd.from_jax(a)
    y.zero_()
    assert a.tolist() == [0, 1, 2, 3]


def adam_step(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("kind", ["compiled", "rolled", "lazy", "eager"])
def test_a_step_that_donates_takes_no_array_that_somebody_holds(kind: str) -> None:
    host, model = twins()
    x, steps = batch(3, 8), adam_step(model)
    run = {"compiled": spmd.compile(steps), "rolled": spmd.compile(steps, roll=True)}.get(kind, steps)
    by_hand = adam_step(host)

    def go() -> None:
        by_hand(x)
        if kind == "lazy":
            with spmd.lazy():
                run(x.to("jax"))
        else:
            run(x.to("jax"))

    go()
    held = spmd.to_jax(model.up.weight.detach())
    before = host.up.weight.detach().clone()
    bias = host.down.bias.detach().clone()
    given = jnp.array(bias.numpy())  # of a clone: jax may read it later than torch goes on
    model.down.bias.data = spmd.from_jax(given)
    for _ in range(3):
        go()
    assert_same(model.state_dict(), host.state_dict())
    assert_same(torch.from_numpy(np.array(held)), before)
    assert_same(torch.from_numpy(np.array(given)), bias)


def test_an_argument_that_a_step_updates_is_copied_while_it_is_shared() -> None:
    step = spmd.compile(lambda x: x.add_(1))
    x = torch.zeros(3, device="jax")
    a = spmd.to_jax(x)
    step(x)
    b = spmd.to_jax(x)
    step(x)
    assert (a.tolist(), b.tolist(), x.tolist()) == ([0] * 3, [1] * 3, [2] * 3)


READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "read": lambda x: x.cpu(),
    "print": repr,
    "pointwise": lambda x: x + 1,
    "view": lambda x: x.t() @ x,
    "product": lambda x: x @ x,
    "gradient": lambda x: x.requires_grad_() @ x,
    "compiled": spmd.compile(lambda x: x * 2),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_memory_that_jax_took_is_an_error_that_says_so(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(4, 4, device="jax")
    jax.jit(lambda a: a + 1, donate_argnums=0)(spmd.to_jax(x))
    with pytest.raises(spmd.SpmdError, match=r"memory of a tensor was freed.*(?s:.*)fix: pass a copy: fn\(jnp.copy\(array\)\)"):
        read(x)


def test_state_is_as_it_was_after_a_call_that_found_memory_gone() -> None:
    _, model = twins()
    step = spmd.compile(adam_step(model))
    step(batch(3, 8).to("jax"))
    x = torch.zeros(3, 8, device="jax")
    jax.jit(lambda a: a + 1, donate_argnums=0)(spmd.to_jax(x))
    before = dict(copy.deepcopy(model).state_dict())
    with pytest.raises(spmd.SpmdError, match="memory of a tensor was freed"):
        step(x)
    assert_same(dict(model.state_dict()), before)
    step(batch(3, 8).to("jax"))


def no_array_of(x: Any) -> Any:
    a = jnp.zeros(2)
    jax.jit(lambda a: a + 1, donate_argnums=0)(a)
    return a


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "requires grad": (lambda: spmd.to_jax(torch.ones(2, device="jax", requires_grad=True)), r"requires grad(?s:.*)spmd.call_jax"),
    "on the host": (lambda: spmd.to_jax(torch.ones(2)), r"on device 'cpu'(?s:.*)x.to\('jax'\)"),
    "int64": (lambda: spmd.to_jax(torch.arange(2, device="jax")), r"JAX's 64-bit types are disabled(?s:.*)x.int\(\)"),
    "float64": (lambda: spmd.to_jax({"a": torch.zeros(2, dtype=torch.float64, device="jax")}), r"(?s)64-bit types.*x.float\(\)"),
    "numpy": (lambda: spmd.from_jax(np.zeros(2)), r"a numpy array(?s:.*)torch.from_numpy"),
    "a key": (lambda: spmd.from_jax(jax.random.key(0)), "jax.random.key_data"),
    "int4": (lambda: spmd.from_jax(jnp.zeros(2, jnp.int4)), "torch has no dtype for jax's int4"),
    "deleted": (lambda: spmd.from_jax(no_array_of(None)), r"that is deleted(?s:.*)jnp.copy"),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_what_would_go_wrong_in_silence_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        call()


def test_64_bits_and_gradients_that_nobody_records_pass() -> None:
    with jax.enable_x64(True):
        assert spmd.to_jax(torch.arange(2, device="jax")).dtype == np.int64
    weight = torch.ones(2, device="jax", requires_grad=True)
    with torch.no_grad():
        assert spmd.to_jax(weight).tolist() == [1, 1]
    assert spmd.to_jax(weight.detach()).tolist() == [1, 1]
    assert not spmd.from_jax(jnp.ones(2)).requires_grad
    weak = spmd.from_jax(jnp.asarray(2.0))
    assert (weak * torch.ones(2, dtype=torch.bfloat16, device="jax")).dtype == torch.bfloat16


def test_jax_in_a_compiled_function_and_torch_in_a_jitted_one() -> None:
    x = batch(3, 4)
    step = spmd.compile(lambda x: spmd.from_jax(jnp.sin(spmd.to_jax(x))) + 1)
    for _ in range(2):
        assert_same(step(x.to("jax")), x.sin() + 1)
    jitted = jax.jit(lambda a: spmd.to_jax(F.softmax(spmd.from_jax(a), -1)))
    np.testing.assert_allclose(jitted(jnp.array(x.numpy())), F.softmax(x, -1), *REORDERED)


def of_torch(a: Any) -> Any:
    return spmd.to_jax(F.softmax(spmd.from_jax(a), -1).sum())


@pytest.mark.parametrize("derivative", [jax.grad(of_torch), jax.grad(jax.jit(of_torch)), jax.jit(jax.grad(of_torch))])
def test_jax_does_not_differentiate_through_torch_code(derivative: Any) -> None:
    with pytest.raises(spmd.SpmdError, match=r"JAX differentiates through spmd.from_jax(?s:.*)spmd.functionalize"):
        derivative(jnp.ones((2, 3)))


def test_random_numbers_and_writes_to_what_lies_outside_are_refused_in_a_jitted_function() -> None:
    with pytest.raises(spmd.TraceError, match=r"every call would use the same numbers(?s:.*)spmd.functionalize"):
        jax.jit(lambda a: spmd.to_jax(F.dropout(spmd.from_jax(a))))(jnp.ones(4))
    outside = torch.zeros(4, device="jax")
    jax.jit(lambda a: (outside.add_(spmd.from_jax(a)), a)[1])(jnp.ones(4))
    with pytest.raises(spmd.TraceError, match=r"contains a tracer of a JAX function(?s:.*)spmd.functionalize"):
        outside.cpu()
    assert outside.zero_().tolist() == [0] * 4


def test_jax_of_any_tensor_is_the_move_to_the_device_as_torch_has_it() -> None:
    model: Any = MLP()
    plain: Any = torch.zeros(8)
    marked: Any = spmd.mark_sharding(plain.to("jax"), line(), ("data",))
    assert plain.jax().device.type == model.jax().up.weight.device.type == "jax"
    assert marked.jax() is marked
