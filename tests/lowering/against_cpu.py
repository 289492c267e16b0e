"""One oracle for the domain tests: the same function of the same inputs on the CPU and on device 'jax'."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

import spmd  # noqa: F401  (registers the device)

# (rtol, atol) by dtype; 16-bit floats: the CPU rounds more often on the way than we do
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float64: (1e-10, 1e-10), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}


def on_jax(value: Any) -> Any:
    """The tensors, modules and parameters of a pytree, moved; leaves keep their requires_grad."""

    def moved(x: Any) -> Any:
        return x.detach().to("jax").requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return pytree.tree_map(moved, value)


def assert_equal(actual: Any, expected: Any) -> None:
    """Same values, dtypes and shapes, leaf by leaf."""
    found, wanted = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(found) == len(wanted)
    for a, e in zip(found, wanted, strict=True):
        if isinstance(e, torch.Tensor):
            assert a.device.type == "jax"
            rtol, atol = TOLERANCE.get(e.dtype, (0, 0))
            torch.testing.assert_close(a.detach().cpu(), e.detach(), rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert a == e


def check(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """`fn` gives the same results and the same gradients of every input that requires one."""
    jax_args, jax_kwargs = on_jax((args, kwargs))
    expected, actual = fn(*args, **kwargs), fn(*jax_args, **jax_kwargs)
    assert_equal(actual, expected)
    assert_same_gradients((actual, jax_args, jax_kwargs), (expected, args, kwargs))


def assert_same_gradients(actual: Any, expected: Any) -> None:
    """Gradients of a fixed function of the outputs, with respect to all leaves among (outputs, *inputs) that require one."""
    gradients: list[Any] = []
    for outputs, *inputs in (actual, expected):
        leaves = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        outs = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not outs:
            return
        total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape).to(x.device)).sum() for x in outs)
        gradients.append(torch.autograd.grad(total, leaves, allow_unused=True))
    assert_equal(*gradients)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """A reproducible CPU tensor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)
