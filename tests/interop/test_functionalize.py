"""`functionalize`: a module under JAX's transforms beside CPU torch: values, gradients, draws, buffers, hooks, and what is refused."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import AxisType, PartitionSpec
from torch import nn

import mesh
import spmd
from tests.grids import grid
from tests.oracle import MLP, TOLERANCE, assert_same, batch, twins

RTOL, ATOL = TOLERANCE[torch.float32]
KEY = jax.random.key(0)


def as_jax(x: torch.Tensor) -> Any:
    return jnp.array(x.numpy())


def assert_close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want.detach(), rtol=RTOL, atol=ATOL)


def assert_gradients(got: dict[str, Any], model: nn.Module) -> None:
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert_close(got[name], grad)


Loss = Callable[[Any, Any], Any]
WAYS: dict[str, Callable[[Loss, Any, Any], Any]] = {
    "grad": lambda loss, p, x: jax.grad(loss)(p, x),
    "jit of grad": lambda loss, p, x: jax.jit(jax.grad(loss))(p, x),
    "grad of jit": lambda loss, p, x: jax.grad(jax.jit(loss))(p, x),
    "value_and_grad": lambda loss, p, x: jax.jit(jax.value_and_grad(loss))(p, x)[1],
    "checkpoint": lambda loss, p, x: jax.jit(jax.grad(jax.checkpoint(loss)))(p, x),
    "vmap": lambda loss, p, x: jax.tree.map(lambda g: g.sum(0), jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(p, x)),
    "grad of vmap": lambda loss, p, x: jax.jit(jax.grad(lambda p: jax.vmap(loss, in_axes=(None, 0))(p, x).sum()))(p),
    "scan": lambda loss, p, x: jax.jit(jax.grad(lambda p: jax.lax.scan(lambda c, x: (c + loss(p, x), None), 0.0, x)[0]))(p),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_under_every_transform(way: Callable[[Loss, Any, Any], Any]) -> None:
    host, model = twins()
    x = batch(4, 8)
    host(x).square().sum().backward()
    fn, params, buffers = spmd.functionalize(model)
    assert_gradients(way(lambda p, x: jnp.square(fn(p, buffers, KEY, x)).sum(), params, as_jax(x)), host)
    assert_close(jax.jit(fn)(params, buffers, KEY, as_jax(x)), host(x))


@pytest.mark.multidevice
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_gradients_under_shard_map(check: bool, place: str) -> None:
    host, model = twins()
    x = batch(2 * mesh.device_count(), 8)
    host(x).square().sum().backward()
    fn, params, buffers = spmd.functionalize(model)
    jax_mesh = jax.make_mesh((mesh.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("data")

    def loss(p: Any, x: Any) -> Any:
        return jnp.square(fn(p, buffers, KEY, x)).sum()

    def mapped(f: Any) -> Any:
        return jax.shard_map(f, mesh=jax_mesh, in_specs=(whole, split), out_specs=whole, check_vma=check)

    if place == "outside":
        got = jax.jit(jax.grad(mapped(lambda p, x: jax.lax.psum(loss(p, x), "data"))))(params, as_jax(x))
    else:

        def inside(p: Any, x: Any) -> Any:
            own = jax.tree.map(lambda a: jax.lax.pcast(a, ("data",), to="varying"), p) if check else p
            return jax.lax.psum(jax.grad(loss)(own, x), "data")

        got = jax.jit(mapped(inside))(params, as_jax(x))
    assert_gradients(got, host)


def test_layouts_over_a_mesh_are_kept_and_jit_splits_the_work() -> None:
    host, model = twins()
    m = grid()
    spmd.mark_sharding(model.up.weight, m, ("model", None))
    fn, params, buffers = spmd.functionalize(model)
    assert params["up.weight"].sharding == mesh.ShardingSpec(m, ("model", None)).to_jax()
    x = spmd.to_jax(spmd.mark_sharding(batch(8, 8).to("jax"), m, ("data", None)))
    grads = jax.jit(jax.grad(lambda p: jnp.square(fn(p, buffers, KEY, x)).sum()))(params)
    host(batch(8, 8)).square().sum().backward()
    assert_gradients(grads, host)


@pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_random_numbers_follow_from_the_key(under: Any) -> None:
    model = MLP(p=0.5).to("jax")
    fn, params, buffers = spmd.functionalize(model)
    draw = under(lambda key: fn(params, buffers, key, jnp.ones((4, 8))))
    first, again, other = draw(jax.random.key(3)), draw(jax.random.key(3)), draw(jax.random.key(4))
    assert (first == again).all() and not (first == other).all()
    torch.manual_seed(3)
    np.testing.assert_allclose(first, model(torch.ones(4, 8, device="jax")).detach().cpu(), rtol=RTOL, atol=ATOL)
    many = jax.vmap(draw)(jax.random.split(KEY, 3))
    assert len(np.unique(np.asarray(many[:, 0, 0]))) == 3
    assert (draw(jax.random.PRNGKey(3)) == first).all()
    assert draw(jax.random.key(3, impl="rbg")).shape == first.shape
    before = torch.jax.get_rng_state().tolist()  # type: ignore[attr-defined]
    draw(KEY)
    assert torch.jax.get_rng_state().tolist() == before  # type: ignore[attr-defined]


def test_the_mask_of_the_backward_pass_is_that_of_the_forward_pass() -> None:
    fn, _, _ = spmd.functionalize(lambda x: F.dropout(x, 0.5))
    x = jnp.ones(64)
    value, grad = jax.jit(jax.value_and_grad(lambda x: fn({}, {}, KEY, x).sum()))(x)
    assert (grad.sum(), set(np.unique(grad))) == (value, {0.0, 2.0})


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def test_written_buffers_come_back_and_scan_carries_them() -> None:
    host, model = twins(norm)
    fn, params, buffers = spmd.functionalize(model)
    xs = [batch(4, 8, seed=seed) for seed in (1, 2)]

    def loss(p: Any, b: Any, x: Any) -> Any:
        out, b = fn.with_buffers(p, b, None, x)
        return jnp.sin(out).sum(), b

    (_, after), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, buffers, as_jax(xs[0]))
    host(xs[0]).sin().sum().backward()
    assert_gradients(grads, host)
    assert {n: b.dtype for n, b in after.items()} == {n: b.dtype for n, b in buffers.items()}
    host(xs[1])
    carried, _ = jax.lax.scan(lambda b, x: (fn.with_buffers(params, b, None, x)[1], None), buffers, jnp.stack(list(map(as_jax, xs))))
    for name, want in host.named_buffers():
        assert_close(carried[name], want)
    assert model[1].num_batches_tracked.item() == 0
    with pytest.raises(spmd.TraceError, match=r"writes to buffer '1.running_mean'(?s:.*)fn.with_buffers"):
        fn(params, buffers, None, as_jax(xs[0]))
    assert fn.module is model.eval()
    assert_close(fn(params, carried, None, as_jax(xs[0])), host.eval()(xs[0]))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * 3 * ctx.saved_tensors[0]


def no_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().max()
    return x * scale


def clipped(x: torch.Tensor) -> torch.Tensor:
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(max=0.5))
    return y * 2


def inner_gradient(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y**3).sum(), y)[0] * x


OF_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda x: x * x * x.detach(),
    "no_grad": no_gradient,
    "custom Function": Rounded.apply,  # pyright: ignore[reportAssignmentType]
    "hook": clipped,
    "a gradient inside": inner_gradient,
    "in place": lambda x: x.clone().mul_(x).relu_(),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False),  # type: ignore[arg-type]
    "complex": lambda x: (torch.complex(x, x * x) * (1 + 2j)).abs(),
}


@pytest.mark.parametrize("fn", OF_TORCH.values(), ids=OF_TORCH)
def test_the_derivative_is_torchs_own(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = batch(5)
    want = x.clone().requires_grad_()
    fn(want).sum().backward()
    assert want.grad is not None
    of_arrays, _, _ = spmd.functionalize(fn)
    for derivative in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_close(derivative(lambda a: of_arrays({}, {}, None, a).sum())(as_jax(x)), want.grad)


@pytest.mark.parametrize("name", ["detach", "custom Function", "checkpoint", "complex"])
def test_second_derivatives_are_torchs_own(name: str) -> None:
    fn, x = OF_TORCH[name], batch(5)
    want = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(fn(want).sum(), want, create_graph=True)
    (second,) = torch.autograd.grad((first * torch.arange(5.0)).sum(), want)
    of_arrays, _, _ = spmd.functionalize(fn)
    grad = jax.grad(lambda a: of_arrays({}, {}, None, a).sum())
    assert_close(jax.jit(jax.grad(lambda a: (grad(a) * jnp.arange(5.0)).sum()))(as_jax(x)), second)


class Tied(nn.Module):
    """A tied weight, a module used twice under two names, a frozen layer, a list that is no ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.plain = [self.second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.again(torch.tanh(self.plain[0](self.first(x)))))


def test_tied_shared_and_frozen() -> None:
    host, model = twins(Tied)
    parameters = dict(model.named_parameters())
    fn, params, buffers = spmd.functionalize(model)
    assert (list(params), list(buffers)) == (["first.weight"], ["frozen.weight", "frozen.bias"])
    x = batch(3, 8)
    host(x).square().sum().backward()
    grads = jax.jit(jax.grad(lambda p: jnp.square(fn(p, buffers, None, as_jax(x))).sum()))(params)
    assert_gradients(grads, host)
    thawed = jax.grad(lambda p: fn(p, {}, None, as_jax(x)).sum())({**params, **buffers})
    assert_close(thawed["frozen.bias"], torch.full((8,), 3.0))
    assert all(dict(model.named_parameters())[name] is p and isinstance(p, nn.Parameter) for name, p in parameters.items())
    assert model.second.weight is model.first.weight and model.first.weight.grad is None
    assert_same(model.state_dict(), host.state_dict())


def test_hooks_fire() -> None:
    host, model = twins()
    heard: list[str] = []
    for net in (host, model):
        net.up.weight.register_hook(lambda g: g * 10)
        net.down.register_forward_hook(lambda m, args, out: out * 2)
        net.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        net.down.register_full_backward_hook(lambda m, given, out: heard.append("backward"))
    x = batch(3, 8)
    host(x).sum().backward()
    heard.clear()
    fn, params, buffers = spmd.functionalize(model)
    assert_gradients(jax.grad(lambda p: fn(p, buffers, KEY, as_jax(x)).sum())(params), host)
    assert heard
    model.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(spmd.SpmdError, match=r"'up.weight' has a hook on gradient accumulation"):
        fn(params, buffers, KEY, as_jax(x))


def test_autocast_dtypes_and_containers() -> None:
    host, model = twins()
    fn, params, buffers = spmd.functionalize(lambda x, *, scale: {"y": (x * scale, None), "n": 3})
    out = jax.jit(lambda x: fn(params, buffers, None, x, scale=2.0)["y"][0])(jnp.ones(2))
    assert out.tolist() == [2, 2] and fn({}, {}, None, jnp.ones(2), scale=2)["n"] == 3

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("jax", dtype=torch.bfloat16):
                return self.inner(x)

    fn, params, buffers = spmd.functionalize(Cast())
    got = jax.jit(fn)(params, buffers, KEY, as_jax(batch(3, 8)))
    assert got.dtype == jnp.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = host(batch(3, 8)).detach().float()
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=2**-9)  # of sums of what lies between two layers, in 8 bits
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    grads = jax.grad(lambda p: fn(p, buffers, KEY, as_jax(batch(3, 8))).astype(jnp.float32).sum())(low)
    assert {g.dtype for g in grads.values()} == {jnp.dtype(jnp.bfloat16)}


def test_64_bit_results_are_what_jax_has_and_arguments_what_torch_says() -> None:
    fn, _, _ = spmd.functionalize(lambda x: (x.argmax(), x.double().sum()))
    assert [a.dtype.name for a in fn({}, {}, None, jnp.ones(3))] == ["int32", "float32"]
    with jax.enable_x64(True):
        assert [a.dtype.name for a in fn({}, {}, None, jnp.ones(3))] == ["int64", "float64"]
        wide, params, buffers = spmd.functionalize(MLP().double().to("jax"))
        assert wide(params, buffers, KEY, jnp.ones((2, 8))).dtype == np.float64
    with pytest.raises(spmd.SpmdError, match="JAX's 64-bit types are disabled"):
        spmd.functionalize(MLP().double().to("jax"))


def test_inside_a_compiled_function_and_from_threads() -> None:
    host, model = twins()
    fn, params, buffers = spmd.functionalize(model)
    x = batch(3, 8)
    step = spmd.compile(lambda x: spmd.from_jax(fn(params, buffers, KEY, spmd.to_jax(x))) + 1)
    assert_same(step(x.to("jax")), host(x).detach() + 1)
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = [fn({n: p * number for n, p in params.items()}, buffers, KEY, as_jax(x)) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (1, 2, 3):
        other = copy.deepcopy(host)
        other.load_state_dict({n: p * number for n, p in host.state_dict().items()})
        for got in found[number]:
            assert_close(got, other(x))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.layer(x)
        return self.hidden


class Overwrites(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(input)


OUTSIDE = torch.zeros(3, device="jax")


def calls(make: Callable[[], Any], *args: Any, key: Any = None, change: Callable[[Any], Any] = lambda p: p) -> Callable[[], Any]:
    def call() -> Any:
        made = make()
        fn, params, buffers = spmd.functionalize(made.to("jax") if isinstance(made, nn.Module) else made)
        return fn(change(params), buffers, key, *args)

    return call


ONES = jnp.ones((2, 8))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "on the host": (lambda: spmd.functionalize(MLP()), r"'up.weight' is on device 'cpu'(?s:.*)model.to\('jax'\)"),
    "no key": (calls(lambda: MLP(p=0.5), ONES), r"MLP draws random numbers, but was given no key"),
    "a seed for a key": (calls(MLP, ONES, key=3), r"key is a int, but the third argument must be a key of jax.random"),
    "a name less": (calls(MLP, ONES, change=lambda p: {}), r"do not match MLP\n  missing: 'up.weight', 'up.bias', 'down.weight'"),
    "a name more": (calls(MLP, ONES, change=lambda p: {**p, "x": ONES}), r"unknown: 'x'"),
    "a shape": (calls(MLP, ONES, change=lambda p: {**p, "up.bias": ONES}), r"'up.bias' of MLP has shape \(16,\).*has \(2, 8\)"),
    "a tensor": (calls(MLP, torch.ones(2, 8)), r"was given a tensor of shape \(2, 8\)(?s:.*)spmd.to_jax\(x\)"),
    "state that is no buffer": (calls(Remembers, ONES), r"stores a tensor of this call in Remembers.hidden(?s:.*)register_buffer"),
    "a written parameter": (calls(lambda: Overwrites(8, 8), ONES), r"writes to its parameter 'weight'"),
    "a write outside": (calls(lambda: lambda x: OUTSIDE.add_(1), ONES), "writes in place to a tensor from outside"),
    "a host tensor": (calls(lambda: lambda x: torch.zeros(2), ONES), r"returns a tensor of shape \(2,\) on device 'cpu'"),
    "an object": (calls(lambda: lambda x: object(), ONES), "returns a object, which is not a container of tensors"),
    "host random numbers": (calls(lambda: lambda x: x + float(torch.rand(())), ONES), "random numbers"),
    "a branch on a value": (lambda: jax.jit(calls(lambda: lambda x: x if x.sum() > 0 else -x, ONES))(), "torch.cond"),
}


def test_a_size_that_is_a_symbol_is_refused_where_nothing_is_traced_at_other_sizes() -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    with pytest.raises(
        spmd.SpmdError, match=r"an array of shape \(b, 4\), but the sizes of a tensor must be numbers(?s:.*)spmd.functionalize"
    ):
        jax.export.export(jax.jit(lambda x: spmd.to_jax(spmd.from_jax(x))))(shape)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layers(x), -1).reshape(x.shape[0], 2, 4)


def test_an_exported_program_of_torch_is_a_jax_function_for_every_size_it_was_exported_for() -> None:
    host = Classifier().eval()
    program = torch.export.export(host, (batch(3, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    fn, params, buffers = spmd.functionalize(program)
    assert params.keys() == dict(host.named_parameters()).keys()
    jitted = jax.jit(fn)
    for size in (2, 5):
        assert_close(jitted(params, buffers, None, as_jax(batch(size, 8))), host(batch(size, 8)))
    host(batch(3, 8)).square().sum().backward()
    assert_gradients(jax.grad(lambda p: jnp.square(fn(p, buffers, None, as_jax(batch(3, 8)))).sum())(params), host)


def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 16, "bos_token_id": None, "eos_token_id": None}
    host, model = twins(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval())
    ids = torch.arange(8)[None]
    fn, params, buffers = spmd.functionalize(model)
    assert "lm_head.weight" not in params and "transformer.wte.weight" in params
    loss = jax.jit(jax.value_and_grad(lambda p: jnp.sin(fn(p, buffers, None, as_jax(ids), use_cache=False)["logits"]).sum()))
    value, grads = loss(params)
    want = host(ids).logits.sin().sum()
    want.backward()
    assert_close(value, want)
    assert_gradients(grads, host)
    with pytest.raises(spmd.SpmdError, match=r"returns a DynamicCache(?s:.*)use_cache=False"):
        fn(params, buffers, None, as_jax(ids))


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_what_a_jax_function_cannot_do_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        call()


def test_a_module_is_itself_again_after_an_error() -> None:
    model = Remembers().to("jax")
    weight = model.layer.weight
    fn, params, buffers = spmd.functionalize(model)
    with pytest.raises(spmd.TraceError):
        fn(params, buffers, None, ONES)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fn(params, buffers, None, jnp.ones((2, 3)))
    assert model.layer.weight is weight and model.hidden is None
    assert model(torch.ones(2, 8, device="jax")).shape == (2, 8)


def test_forward_mode_is_refused_by_jax() -> None:
    fn, _, _ = spmd.functionalize(torch.sin)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: fn({}, {}, None, x), (jnp.ones(2),), (jnp.ones(2),))


def test_what_is_no_function_is_refused() -> None:
    value: Any = 3
    with pytest.raises(spmd.SpmdError, match="functionalize takes a module or a function of tensors, got 3"):
        spmd.functionalize(value)
