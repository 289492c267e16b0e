"""The oracle of step and device tests: the same code on CPU torch and on device 'jax', and a comparison of what they give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from spmd.device._storage import load

# (rtol, atol) of two correct implementations of a few steps
TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (2e-5, 2e-6),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}
# (rtol, atol) of one float32 computation whose sums are taken in another order: on another mesh or number of processes, or fused
# otherwise by XLA. Eight units in the last place; the largest seen is 3e-7.
REORDERED = (1e-6, 1e-7)


class MLP(nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self, dim: int = 8, hidden: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.up(x))))


def twins(make: Callable[[], nn.Module] = MLP, seed: int = 0) -> tuple[Any, Any]:
    """The same module with the same weights, on the CPU and on the device."""
    torch.manual_seed(seed)
    host = make()
    return host, copy.deepcopy(host).to("jax")


def batch(*shape: int, seed: int = 1) -> torch.Tensor:
    """Normal numbers on the CPU, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_device(tree: Any) -> Any:
    """A container of CPU tensors as one of device tensors."""
    return pytree.tree_map(lambda t: t.to("jax") if isinstance(t, torch.Tensor) else t, tree)


def array_of(tensor: torch.Tensor) -> jax.Array:
    """The array that a device tensor shows, of any dtype. Not lent, as one of `spmd.to_jax` is: only to be looked at."""
    return load(tensor.detach())


def arrays_born() -> Callable[[], list[jax.Array]]:
    """What tells the jax arrays made from now on. Those alive now are held, so that none of them lends its `id` to a new one."""
    held = jax.live_arrays()
    before = {id(a) for a in held}

    def born() -> list[jax.Array]:
        assert len(held) == len(before)
        return [a for a in jax.live_arrays() if id(a) not in before]

    return born


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One training step as everybody writes it; the loss before it."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """One training step towards outputs of zero; the loss before it."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def step_in_hooks(model: nn.Module, lr: float, momentum: float) -> None:
    """Let an optimizer for each parameter step, and drop its gradient, as soon as the gradient is accumulated."""
    optimizers = {p: torch.optim.SGD([p], lr=lr, momentum=momentum) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)


def assert_same(got: Any, want: Any, tolerance: tuple[float, float] | None = None) -> None:
    """Containers of tensors and values agree: structure, dtype, shape, value."""
    got_flat, got_tree = pytree.tree_flatten(got)
    want_flat, want_tree = pytree.tree_flatten(want)
    assert got_tree == want_tree
    for a, b in zip(got_flat, want_flat, strict=True):
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b)
            assert a == b
            continue
        rtol, atol = tolerance or TOLERANCE.get(b.dtype, (0.0, 0.0))
        torch.testing.assert_close(a.detach().cpu().as_subclass(torch.Tensor), b.detach().cpu(), rtol=rtol, atol=atol)


def assert_reordered(got: Any, want: Any) -> None:
    """Losses, or tensors, of the same computation as another program, or the same program elsewhere, did it."""
    rtol, atol = REORDERED
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=rtol, atol=atol)


def assert_same_model(device: nn.Module, host: nn.Module, tolerance: tuple[float, float] | None = None) -> None:
    """Parameters and buffers agree."""
    assert_same(dict(device.state_dict()), dict(host.state_dict()), tolerance)
