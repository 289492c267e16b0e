"""Every operator that is kept whole, generated from the registry: under autocast, and where it has no gradient."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.autograd import forward_ad

import spmd
from spmd.device import _autocast
from tests.lowering.against_cpu import TOLERANCE, assert_equal, normal, on_jax
from tests.lowering.whole_cases import BATCH_SIZES, CASES, Case, whole_ops
from tests.sweeps import every_other

VALUED = {name: case for name, case in CASES.items() if not case.is_random}
LOW = [torch.bfloat16, torch.float16]
# torch's decomposition rounds every value in between to 16 bits; a whole op computes in float32 and rounds its results
ROUNDED = 2e-2


def test_the_cases_are_the_operators_that_are_kept_whole() -> None:
    assert {case.op for case in CASES.values()} == whole_ops()


def name_of(case: Case) -> str:
    return case.op.name().removeprefix("aten::")


def cast(args: Any, dtype: torch.dtype | None) -> Any:
    def one(x: Any) -> Any:
        eligible = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible and dtype is not None else x

    return pytree.tree_map(one, args)


def as_torch_says(case: Case, args: Any, low: torch.dtype) -> Any:
    """What autocast means for a call: torch's lists where they name the op, else torch's decomposition of it."""
    name = name_of(case)
    for names, dtype in ((_autocast.LOW, low), (_autocast.FLOAT32, torch.float32)):
        if name in names:
            with torch.autocast("jax", enabled=False):
                return case(*cast(args, dtype))
    if name in _autocast.FLOAT32_BY_DTYPE:
        with torch.autocast("jax", enabled=False):
            given = len(args) > 2 or args[0].dtype not in LOW
            return case(*(args if given else (*args, torch.float32)))
    return case.op.decompose(*args, **case.by_name)


def with_dtypes(case: Case, choose: Callable[[int], torch.dtype], device: str = "jax") -> Any:
    """The case's arguments on a device, the i-th floating tensor in dtype `choose(i)`."""
    count = itertools.count()

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x is BATCH_SIZES:
            return x
        x_on = x.detach().to(device)
        return x_on.to(choose(next(count))).requires_grad_(x.requires_grad) if x.is_floating_point() else x_on

    return pytree.tree_map(one, case.args())


def outcome(run: Callable[..., Any], args: Any, low: torch.dtype) -> Any:
    """Results and gradients, or the exception's type."""
    try:
        with torch.autocast("jax", low):
            results = pytree.tree_leaves(run(args))
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)
    leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.requires_grad]
    outs = [x for x in results if x.requires_grad]
    cotangents = [torch.linspace(-1, 1, x.numel()).reshape(x.shape).to("jax", x.dtype) for x in outs]
    return results, torch.autograd.grad(outs, leaves, cotangents, allow_unused=True) if outs else ()


@pytest.mark.parametrize("name", [name for name in VALUED if not name.startswith(("silu_backward", "mish_backward", "_fused_rms_norm"))])
def test_under_autocast_it_is_what_torch_makes_of_it(name: str) -> None:
    """The three left out have kernels of their own on torch's devices, and no list names them: nothing is cast."""
    case, low = VALUED[name], torch.bfloat16
    choices: dict[str, Callable[[int], torch.dtype]] = {
        "float32": lambda i: torch.float32,
        "low": lambda i: low,
        "first low": lambda i: torch.float32 if i else low,
    }
    for kind, choose in choices.items():
        got = outcome(lambda args: case(*args), with_dtypes(case, choose), low)
        want = outcome(lambda args: as_torch_says(case, args, low), with_dtypes(case, choose), low)
        if isinstance(want, type) or isinstance(got, type):
            assert (isinstance(got, type), isinstance(want, type)) == (True, True), f"{kind}: {got}, expected {want}"
            continue
        values = [*pytree.tree_leaves(with_dtypes(case, choose)), *want[0]]
        has_16_bits = any(isinstance(value, torch.Tensor) and value.dtype in LOW for value in values)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            if b is None:
                assert a is None, kind
                continue
            rtol, atol = (ROUNDED, ROUNDED) if has_16_bits and b.is_floating_point() else TOLERANCE.get(b.dtype, (0, 0))
            torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol, msg=lambda m, k=kind: f"{k}: {m}")


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_cross_entropy_under_autocast_is_in_float32_as_on_the_cpu(compiled: bool, low: torch.dtype) -> None:
    weight, x, target = normal(5, 4).detach(), normal(3, 4, seed=1).detach(), torch.tensor([4, 0, 2])

    def loss(weight: torch.Tensor, x: torch.Tensor, target: torch.Tensor, device: str) -> Any:
        with torch.autocast(device, low):
            out = F.cross_entropy(F.linear(x, weight), target)
        return out, *torch.autograd.grad(out, (weight, x))

    run = spmd.compile(loss) if compiled else loss
    on_device = [t.to("jax").requires_grad_(t.is_floating_point()) for t in (weight, x, target)]
    got = run(on_device[0], on_device[1], on_device[2], "jax")
    want = loss(weight.requires_grad_(), x.requires_grad_(), target, "cpu")
    assert got[0].dtype == torch.float32
    # XLA may leave out the rounding of a product that is used in float32 next: the result is that much closer to the exact one
    rtol, atol = (torch.finfo(low).eps,) * 2 if compiled else (2e-5, 2e-5)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=rtol, atol=atol)


# torch's CPU has no second derivative of these, or, for _weight_norm, a wrong one (v * (g / norm(v)) says so, as `gradgradcheck` does)
NO_SECOND = ("silu_backward", "mish_backward", "ctc_loss", "_weight_norm")


def second_orders(case: Case, device: str) -> dict[str, Any]:
    """By result and input: the gradient, whether it has a graph, and the gradients of its sum of squares and of its sum."""
    args = with_dtypes(case, lambda i: torch.float64, device)
    leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.requires_grad]
    found: dict[str, Any] = {}
    for k, out in enumerate(x for x in pytree.tree_leaves(case(*args)) if x.requires_grad):
        cotangent = torch.linspace(-1, 2, out.numel()).reshape(out.shape).to(device).requires_grad_()
        first: tuple[Any, ...] = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, create_graph=True, retain_graph=True)
        found[f"{k}"] = first
        for j, grad in enumerate(first):
            found[f"{k} {j} has a graph"] = grad is not None and grad.requires_grad
            if grad is None or not grad.requires_grad:
                continue
            for kind, total in (("squares", grad.square().sum()), ("sum", grad.sum())):
                found[f"{k} {j} {kind}"] = torch.autograd.grad(total, [*leaves, cotangent], allow_unused=True, retain_graph=True)
    return found


@pytest.mark.parametrize("name", every_other(name for name in VALUED if not name.startswith(NO_SECOND) and name != "argsort.stable"))
def test_gradients_of_gradients_are_none_where_torchs_are(name: str) -> None:
    case = VALUED[name]
    # torch's fused CPU attention has no second derivative: the same in products and a softmax has
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = second_orders(case, "cpu")
    got = second_orders(case, "jax")
    assert got.keys() == want.keys()
    for key in want:
        if isinstance(want[key], bool):
            assert got[key] == want[key], key
            continue
        for a, b in zip(got[key], want[key], strict=True):
            assert (a is None) == (b is None), key
            if b is not None:
                rtol, atol = TOLERANCE[torch.float64]
                torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


def test_second_gradient_of_weight_norm_is_that_of_its_definition() -> None:
    results = []
    for fn in (torch.ops.aten._weight_norm, lambda v, g: v * (g / v.norm(2, 1, keepdim=True))):
        v, g = on_jax(VALUED["_weight_norm"].args(torch.float64))
        first = torch.autograd.grad(fn(v, g).square().sum(), (v, g), create_graph=True)
        results.append(torch.autograd.grad(first[0].exp().sum() + first[1].exp().sum(), (v, g)))
    assert_equal(results[0], [x.cpu() for x in results[1]])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_weight_decay_does_not_move_what_a_gradient_penalty_does_not_reach(compiled: bool) -> None:
    def trained(device: str) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            (penalty,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty.square().sum().backward()
            optimizer.step()

        run = spmd.compile(step) if compiled and device == "jax" else step
        for _ in range(3):
            run(torch.ones(3, 4, device=device))
        return model

    assert_equal(dict(trained("jax").state_dict()), dict(trained("cpu").state_dict()))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_unused_inputs_raise_or_are_zeros_only_where_asked(device: str) -> None:
    layer = torch.nn.Linear(3, 2).to(device)
    x = torch.ones(1, 3, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    total = grad.square().sum()
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(total, layer.bias, retain_graph=True)
    assert torch.autograd.grad(total, layer.bias, allow_unused=True, retain_graph=True) == (None,)
    (zeros,) = torch.autograd.grad(total, layer.bias, materialize_grads=True, retain_graph=True)
    assert zeros.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x @ x.t(),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: F.linear(x, x, x[:, 0]),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: x.softmax(1),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2], device=x.device)),
        lambda x: F.conv1d(x, x[None, :, :2]),
    ],
    ids=["matmul", "einsum", "linear", "layer_norm", "softmax", "attention", "cross_entropy", "conv1d"],
)
def test_dual_tensors_have_tangents(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def derivative(x: torch.Tensor) -> torch.Tensor | None:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    x = normal(3, 4, grad=False)
    assert_equal(derivative(on_jax(x)), derivative(x))


def test_third_order_and_hessian_equal_the_cpus() -> None:
    results = []
    for device in ("jax", "cpu"):
        w = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).to(device).requires_grad_()
        x = torch.linspace(0, 1, 3, dtype=torch.float64).to(device).requires_grad_()
        value = F.layer_norm(F.linear(x, w).tanh(), [2]).exp().sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value, x, create_graph=True)
            value = value.square().sum()
        results.append(torch.autograd.grad(value, (w, x), allow_unused=True))
    for a, b in zip(*results, strict=True):
        assert_equal(a, b)
