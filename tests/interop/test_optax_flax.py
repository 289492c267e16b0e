"""A torch model trained by optax, a flax.nnx layer in a torch model, and a torch module in a flax.nnx model: equal to torch alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from tests.later import nnx, optax
from tests.oracle import MLP, TOLERANCE, assert_same, batch, train, twins

RTOL, ATOL = TOLERANCE[torch.float32]


def test_optax_trains_a_torch_model_as_torch_does() -> None:
    host, model = twins(MLP)
    x, y = batch(4, 8), batch(4, 8, seed=2)
    fn, params, buffers = spmd.functionalize(model)
    optimizer = optax.adamw(1e-2, weight_decay=1e-2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(fn(p, buffers, None, x) - y).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    by_torch = torch.optim.AdamW(host.parameters(), lr=1e-2, weight_decay=1e-2)
    state, given = optimizer.init(params), [jnp.array(t.numpy()) for t in (x, y)]
    for _ in range(5):
        want = train(host, by_torch, x, y)
        params, state, loss = step(params, state, *given)
        np.testing.assert_allclose(loss, want.detach(), rtol=RTOL, atol=ATOL)
    model.load_state_dict(spmd.from_jax(params))
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(value.cpu(), host.state_dict()[name], rtol=RTOL, atol=ATOL)  # five steps of Adam


class FromFlax(nn.Module):
    """A layer of flax.nnx whose parameters are torch's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.graph, state = nnx.split(layer)
        leaves, self.tree = jax.tree.flatten(state)
        self.weights = nn.ParameterList(map(nn.Parameter, spmd.from_jax(leaves)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return spmd.call_jax(self.run, (list(self.weights), x))

    def run(self, leaves: Any, x: Any) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))(x)


def test_a_layer_of_flax_is_trained_in_a_torch_model() -> None:
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        host[1].weight.copy_(torch.from_numpy(np.array(layer.kernel[...].T)))
        host[1].bias.copy_(torch.from_numpy(np.array(layer.bias[...])))
    first = nn.Linear(8, 8)
    first.load_state_dict(host[0].state_dict())
    model = nn.Sequential(first.to("jax"), FromFlax(layer))
    x, y = batch(4, 8), batch(4, 8, seed=2)
    sides = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (host, model)]
    step = spmd.compile(lambda x, y: train(*sides[1], x, y))
    for _ in range(3):
        assert_same(step(x.to("jax"), y.to("jax")), train(*sides[0], x, y))
    shapes = {tuple(p.shape): p for p in model[1].parameters()}
    assert_same(shapes[8, 8].detach().t(), host[1].weight.detach())


def from_torch(module: nn.Module) -> Any:
    """A torch module whose parameters are flax's."""

    class FromTorch(nnx.Module):
        def __init__(self, module: nn.Module) -> None:
            self.fn, params, buffers = spmd.functionalize(module)
            self.params = nnx.Dict({name.replace(".", "/"): nnx.Param(value) for name, value in params.items()})
            self.buffers = nnx.Dict({name.replace(".", "/"): nnx.BatchStat(value) for name, value in buffers.items()})

        def __call__(self, x: Any) -> Any:
            params, buffers = ({name.replace("/", "."): v[...] for name, v in held.items()} for held in (self.params, self.buffers))
            out, buffers = self.fn.with_buffers(params, buffers, None, x)
            for name, value in buffers.items():
                self.buffers[name.replace(".", "/")][...] = value
            return out

    return FromTorch(module)


def test_a_torch_module_is_trained_in_a_flax_model() -> None:
    host, module = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    layer = from_torch(module)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    x, y = batch(4, 8), batch(4, 8, seed=2)
    by_torch = torch.optim.SGD(host.parameters(), lr=0.1)

    @nnx.jit
    def step(layer: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(x) - y).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    for _ in range(3):
        by_torch.zero_grad()
        want = F.mse_loss(host(x), y)
        want.backward()
        by_torch.step()
        np.testing.assert_allclose(step(layer, optimizer, jnp.array(x.numpy()), jnp.array(y.numpy())), want.detach(), rtol=RTOL)
    assert int(layer.buffers["1/num_batches_tracked"][...]) == 3
    np.testing.assert_allclose(layer.buffers["1/running_var"][...], host[1].running_var, rtol=RTOL)
