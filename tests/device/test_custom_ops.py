"""Operators of a library on device 'jax': `lower` after import, made by `custom_op` and `define`, of every shape a schema has."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils import _pytree as pytree

import mesh
import spmd
from spmd.device._storage import load
from tests import launched
from tests.oracle import assert_same, batch

NAMESPACE = "spmd_tests"


def on_cpu(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A custom operator that has a kernel on the CPU alone."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", device_types="cpu", **{"mutates_args": (), **options})


@on_cpu("wave")
def wave(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.sin(x * scale)


@wave.register_fake
def _(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    torch._check(x.dim() == 2, lambda: f"wave takes matrices, got {x.dim()} dims")
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


wave.register_autograd(lambda ctx, grad: (grad * ctx.scale * torch.cos(ctx.saved_tensors[0] * ctx.scale), None), setup_context=_keep)
spmd.lowering.lower(f"{NAMESPACE}::wave")(lambda x, scale=1.0: jnp.sin(x * scale))


@on_cpu("no_formula")
def no_formula(x: torch.Tensor) -> torch.Tensor:
    return x * 2


spmd.lowering.lower(no_formula)(lambda x: x * 2)


@on_cpu("by_jax")
def by_jax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * y


spmd.lowering.lower(by_jax, whole=True)(lambda x, y: jnp.sin(x) * y)


@on_cpu("many")
def many(xs: list[torch.Tensor], bias: torch.Tensor | None, dims: list[int], flag: bool, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.stack(xs).sum(0)
    if bias is not None:
        total = total + bias
    return (total.sum(dims) if flag else total.clone()), total * len(name)


@spmd.lowering.lower(many)
def _(xs: Any, bias: Any, dims: Any, flag: bool, name: str) -> Any:
    total = sum(xs[1:], xs[0])
    total = total if bias is None else total + bias
    return (total.sum(tuple(dims)) if flag else total), total * len(name)


@on_cpu("count_", mutates_args=("x", "seen"))
def count_(x: torch.Tensor, step: torch.Tensor, seen: torch.Tensor) -> None:
    x.add_(step)
    seen.add_(1)


spmd.lowering.lower(count_)(lambda x, step, seen: (x + step, seen + 1))


@on_cpu("push", mutates_args=("queue",))
def push(queue: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    first = queue[0].clone()
    queue.copy_(torch.cat([queue[1:], x[None]]))
    return first


spmd.lowering.lower(push)(lambda queue, x: (queue[0], jnp.concatenate([queue[1:], x[None]])))


@on_cpu("pieces")
def pieces(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [p.clone() for p in x.chunk(n)]


spmd.lowering.lower(pieces)(lambda x, n: jnp.split(x, n))

torch.library.define(f"{NAMESPACE}::defined", "(Tensor x, *, Scalar k=2) -> Tensor")
torch.library.impl(f"{NAMESPACE}::defined", "cpu")(lambda x, *, k=2: x * k)
spmd.lowering.lower(f"{NAMESPACE}::defined")(lambda x, *, k=2: x * k)
library = torch.library.Library(NAMESPACE, "FRAGMENT")
library.define("half(Tensor x) -> Tensor")
library.define("half_(Tensor(a!) x) -> Tensor(a!)")
library.define("half.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
library.impl("half", lambda x: x / 2, "CPU")
library.impl("half_", lambda x: x.div_(2), "CPU")
library.impl("half.out", lambda x, *, out: out.copy_(x / 2), "CPU")
spmd.lowering.lower(f"{NAMESPACE}::half")(lambda x: x / 2)
ours = torch.ops.spmd_tests


def counted(x: torch.Tensor) -> Any:
    x, seen = x.clone(), torch.zeros(1, device=x.device)
    assert count_(x, x * 2, seen) is None
    before = x._version
    count_(x, x * 0 + 1, seen)
    assert x._version > before
    return x, seen


def pushed(x: torch.Tensor) -> Any:
    queue = x.clone()
    return push(queue, x[0] * 3), push(queue, x[1]), queue


def grad_of(fn: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        x = x.detach().clone().requires_grad_()
        out = fn(x)
        return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]

    return run


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "custom_op": lambda x: wave(x, 2.0),
    "custom_op, defaults": lambda x: wave(x),
    "custom_op, gradient": grad_of(lambda x: wave(x * 2, 0.5)),
    "jax's gradient": grad_of(lambda x: on_either(x, x * 2)),
    "jax's gradient of the gradient": lambda x: twice(x),
    "lists, optionals, flags, several results": lambda x: many([x, x * 2], None, [0], True, "ab"),
    "an optional that is there": lambda x: many([x], x[0], [0, 1], False, "abc"),
    "arguments written": counted,
    "an argument written, and a result": pushed,
    "a list of results": lambda x: pieces(x, 2),
    "define": lambda x: (ours.defined(x), ours.defined(x, k=3)),
    "define, in place and out": lambda x: (ours.half_(x.clone()), ours.half(x), ours.half.out(x, out=torch.zeros_like(x))),
    "under autocast": lambda x: autocast(x),
}


def on_either(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`by_jax` has no gradient on the CPU."""
    return by_jax(x, y) if x.device.type == "jax" else torch.sin(x) * y


def twice(x: torch.Tensor) -> Any:
    x = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(on_either(x, x * 2).sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def autocast(x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        return wave(x, 2.0), wave(x @ x.t())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_cpu(name: str, compiled: bool) -> None:
    fn, x = CALLS[name], batch(4, 3)
    step = spmd.compile(fn) if compiled else fn
    for _ in range(2):
        assert_same(step(x.to("jax")), fn(x))
    assert not compiled or step.num_traces == 1  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["custom_op, gradient", "jax's gradient", "lists, optionals, flags, several results", "arguments written"])
def test_equals_the_cpu_on_eight_devices(name: str, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
    fn, x = CALLS[name], batch(8, 4)
    device = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", "model"))
    got = (spmd.compile(fn) if compiled else fn)(device)
    assert_same(pytree.tree_map(lambda t: t.detach(), got), fn(x))


def test_without_a_formula_backward_says_so_as_on_the_cpu() -> None:
    for device in ("cpu", "jax"):
        x = batch(3).to(device).requires_grad_()
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            no_formula(x).sum().backward()


def test_vmap_and_the_librarys_own_check() -> None:
    x = batch(5, 4, 3)
    assert_same(torch.vmap(lambda t: no_formula(t))(x.to("jax")), torch.vmap(lambda t: no_formula(t))(x))
    with pytest.raises(RuntimeError, match="wave takes matrices, got 3 dims"):
        wave(x.to("jax"))


ADD_RELU = """
import jax.numpy as jnp, torch, spmd
from spmd import ops

add_relu = torch.ops.aten._add_relu
x, y = torch.randn(3), torch.randn(3)
a, b = x.to("jax"), y.to("jax")
calls = [
    lambda a, b: add_relu.Tensor(a, b, alpha=2),
    lambda a, b: add_relu.out(a, b, alpha=2, out=torch.empty_like(a)),
    lambda a, b: torch.ops.aten._add_relu_.Tensor(a.clone(), b, alpha=2),
]
for call in calls:
    try:
        call(a, b)
    except spmd.UnsupportedOpError as error:
        assert '@spmd.lowering.lower("_add_relu' in str(error), error
    else:
        raise AssertionError("there is a lowering already")
spmd.lowering.lower("_add_relu.Tensor", pointwise=True)(lambda self, other, *, alpha=1: jnp.maximum(self + alpha * other, 0))
for call in calls:
    for fn in (call, spmd.compile(call)):
        torch.testing.assert_close(fn(a, b).cpu(), torch.relu(x + 2 * y))
(told,) = ops.coverage("^_add_relu.Tensor$")
assert (told.how, told.mechanism, told.variants) == ("rule", "rule", ("_add_relu.out", "_add_relu_.Tensor")), told
"""


class TestRegistration:
    """What `lower` does at the moment that it is called."""

    def test_an_operator_without_a_lowering_is_refused_with_line_and_a_fix_that_works(self) -> None:
        fresh = torch.library.custom_op(
            f"{NAMESPACE}::fresh", lambda x: x + 1, mutates_args=(), device_types="cpu", schema="(Tensor x) -> Tensor"
        )
        x, step = batch(3).to("jax"), spmd.compile(lambda x: fresh(x) * 2)
        for call in (lambda: fresh(x), lambda: step(x)):
            with pytest.raises(spmd.UnsupportedOpError, match=r"spmd_tests\.fresh\.default has no lowering for device 'jax'") as caught:
                call()
            assert f"called at {__file__.rpartition('/')[2]}:" in str(caught.value)
            assert "with float32[3]" in str(caught.value)
        (fix,) = re.findall(r"fix: .*?(@spmd\.lowering\.lower\(.*\))", str(caught.value))
        exec(f"{fix}\ndef fresh(x):\n    return x + 1\n", {"spmd": spmd})
        assert_same(fresh(x), batch(3) + 1)
        assert_same(step(x), (batch(3) + 1) * 2)

    def test_a_program_made_before_is_traced_again(self) -> None:
        later = torch.library.custom_op(f"{NAMESPACE}::later", lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor")
        x, step = batch(3).to("jax"), spmd.compile(lambda x: later(x))
        assert_same(step(x), batch(3).sin())
        spmd.lowering.lower(later)(jnp.cos)  # another result, to see which is used
        assert_same(step(x), batch(3).cos())
        assert_same(later(x), batch(3).cos())
        assert "number of lowerings changed" in step.retraces[0]

    def test_an_aten_overload_gets_its_forms_at_once(self) -> None:
        """In a process of its own: other tests count what ATen has."""
        done = launched.run(ADD_RELU)
        assert done.code == 0, done.err[-3000:]

    @pytest.mark.parametrize("name", [f"{NAMESPACE}::wave", "add.Tensor"])
    def test_twice_is_an_error_that_names_the_first_place(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"already has a lowering at .*\.py:\d+; a second one is at .*test_custom_ops\.py"):
            spmd.lowering.lower(name)(jnp.sin)

    @pytest.mark.parametrize("name", ["clone", "add_.Tensor"])
    def test_an_operator_that_the_device_computes_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="already has a kernel on device 'jax'"):
            spmd.lowering.lower(name)(jnp.sin)

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("add.Tenser", "add.Tensor"), ("softmaxx.int", "softmax.int"), (f"{NAMESPACE}::wav", f"{NAMESPACE}::wave")],
    )
    def test_a_wrong_name_is_an_error_with_the_nearest(self, name: str, nearest: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"the nearest name is '{nearest}'\n  fix: @spmd.lowering.lower(\"{nearest}\")")):
            spmd.lowering.lower(name)(jnp.sin)

    def test_one_wrong_name_of_several_registers_none(self) -> None:
        torch.library.define(f"{NAMESPACE}::lonely", "(Tensor x) -> Tensor")
        with pytest.raises(ValueError, match="there is no overload"):
            spmd.lowering.lower(f"{NAMESPACE}::lonely", f"{NAMESPACE}::nothing")(jnp.sin)
        assert spmd.lowering.lookup(ours.lonely.default) is None
        spmd.lowering.lower(f"{NAMESPACE}::lonely")(jnp.sin)

    def test_while_a_function_is_traced_it_is_refused_and_nothing_is_left(self) -> None:
        torch.library.define(f"{NAMESPACE}::within", "(Tensor x) -> Tensor")

        def fn(x: torch.Tensor) -> torch.Tensor:
            spmd.lowering.lower(f"{NAMESPACE}::within")(jnp.sin)
            return ours.within(x)

        with pytest.raises(spmd.TraceError, match=r"is registered while a function is traced[\s\S]*fix: move"):
            spmd.compile(fn)(batch(3).to("jax"))
        assert_same(fn(batch(3).to("jax")), batch(3).sin())  # eager there is no trace


class TestSharding:
    """`lower(..., sharding=...)`: rules that run on shards."""

    @staticmethod
    def scanned(name: str, sharding: str) -> tuple[Any, Any]:
        """x[t] = x[t-1] * w + x[t] along the second dim: a loop that the partitioner gathers whole."""

        def host(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            out = [x[:, 0]]
            for t in range(1, x.shape[1]):
                out.append(out[-1] * w + x[:, t])
            return torch.stack(out, 1)

        def rule(x: Any, w: Any) -> Any:
            def step(carry: Any, now: Any) -> Any:
                new = carry * w + now
                return new, new

            return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)

        op = torch.library.custom_op(
            f"{NAMESPACE}::{name}", host, mutates_args=(), device_types="cpu", schema="(Tensor x, Tensor w) -> Tensor"
        )
        spmd.lowering.lower(op, whole=True, sharding=sharding)(rule)
        return op, host

    @pytest.mark.multidevice(num=8)
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_values_gradients_and_layout(self, compiled: bool, mesh_4x2: mesh.Mesh) -> None:
        op, host = self.scanned(f"scan_{compiled}", "b . d, d -> b . d")

        def fn(call: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            out = call(x, w)
            return out.detach(), *torch.autograd.grad(out.square().sum(), (x, w))

        x, w = batch(8, 5, 4), batch(4, seed=2)
        device = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None, "model")), spmd.mark_sharding(w.to("jax"), mesh_4x2, ("model",))
        step = spmd.compile(lambda x, w: fn(op, x, w)) if compiled else lambda x, w: fn(op, x, w)
        got = step(*device)
        assert_same(got, fn(host, x, w))
        assert tuple(load(got[0]).sharding.spec) == ("data", None, "model")
        if compiled:
            kinds = {c.kind for c in step.collectives()}
            assert kinds <= {"all-reduce"}, kinds  # of the gradient of w, over the data axis

    def test_without_a_text_the_partitioner_decides_and_values_are_the_same(self) -> None:
        op, host = self.scanned("plain_scan", "")
        x, w = batch(8, 5, 4), batch(4, seed=2)
        assert_same(op(x.to("jax"), w.to("jax")), host(x, w))

    def test_a_text_that_does_not_fit_the_call_is_named(self) -> None:
        op, _ = self.scanned("misfit", "b t d, d -> b t d")
        with pytest.raises(ValueError, match=r"it describes arrays with \[3, 1\] dims, the call has arrays with \[3, 2\] dims"):
            op(batch(2, 3, 4).to("jax"), batch(2, 4).to("jax"))

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("b t, d -> b t", "'d' is not a dim of every result"),
            ("b t, b t", "has no '->' before its results"),
            ("b 2 -> b 2", "contains '2', which is not a name"),
            ("b b -> b b", "uses one name for two dims of an array"),
        ],
    )
    def test_a_text_that_says_nothing_is_refused_where_it_stands(self, text: str, error: str) -> None:
        with pytest.raises(ValueError, match=re.escape(error)):
            spmd.lowering.lower(f"{NAMESPACE}::defined", sharding=text)(jnp.sin)
