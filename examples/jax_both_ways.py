"""torch and JAX together: optax trains a torch model on a mesh; a torch model contains a flax.nnx layer and a Pallas kernel; and back.

python examples/jax_both_ways.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from jax.experimental import pallas
from torch import nn

import mesh
import spmd

mesh.virtual_devices(8)
m = mesh.Mesh(range(8), (4, 2), ("data", "model"))
torch.manual_seed(0)

# 1. A torch model with marked parameters, trained by optax.
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)).to("jax")
spmd.mark_sharding(model[0].weight, m, ("model", None))
spmd.mark_sharding(model[3].weight, m, (None, "model"))
x = spmd.mark_sharding(torch.randn(64, 32).to("jax"), m, ("data", None))

fn, params, buffers = spmd.functionalize(model)
optimizer = optax.adamw(1e-2)


@jax.jit
def step(params: Any, state: Any, key: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.square(fn(p, buffers, key, x) - x).mean())(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


state, batch = optimizer.init(params), spmd.to_jax(x)
for i in range(20):
    params, state, loss = step(params, state, jax.random.key(i), batch)
    if i % 19 == 0:
        print(f"optax, step {i}: loss {loss:.3f}, first weight {params['0.weight'].sharding.spec}")
model.load_state_dict(spmd.from_jax(params))


# 2. A flax layer in a torch model. Its leaves are torch parameters, and JAX computes its gradient.
class FromFlax(nn.Module):
    def __init__(self, layer: nnx.Module) -> None:
        super().__init__()
        self.graph, leaves = nnx.split(layer)
        values, self.tree = jax.tree.flatten(leaves)
        self.weights = nn.ParameterList(map(nn.Parameter, spmd.from_jax(values)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return spmd.call_jax(self.run, (list(self.weights), x))

    def run(self, values: Any, x: Any) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, values))(x)


# 3. A Pallas kernel in the same torch model, in interpret mode on the CPU.
def doubled(x: Any) -> Any:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + spmd.call_jax(doubled, (x.detach(),))


mixed = nn.Sequential(FromFlax(nnx.Linear(32, 64, rngs=nnx.Rngs(0))), Doubled(), nn.Linear(64, 32).to("jax"))
by_torch = torch.optim.AdamW(mixed.parameters(), lr=1e-2)


@spmd.compile
def train_step(x: torch.Tensor) -> torch.Tensor:
    by_torch.zero_grad()
    loss = (mixed(x) - x).square().mean()
    loss.backward()
    by_torch.step()
    return loss


losses = [train_step(x).item() for _ in range(20)]
print(f"flax in torch: loss {losses[0]:.3f} to {losses[-1]:.3f}")


# 4. A torch module in a flax model. Its parameters are flax parameters.
class FromTorch(nnx.Module):
    def __init__(self, module: nn.Module) -> None:
        self.fn, params, _ = spmd.functionalize(module)
        self.params = nnx.Dict({name.replace(".", "/"): nnx.Param(value) for name, value in params.items()})

    def __call__(self, x: Any, key: Any) -> Any:
        return self.fn({name.replace("/", "."): value[...] for name, value in self.params.items()}, {}, key, x)


class Autoencoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = FromTorch(model)
        self.head = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x: Any, key: Any) -> Any:
        return self.head(self.inner(x, key))


flax_model = Autoencoder(nnx.Rngs(1))
trained = nnx.Optimizer(flax_model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def flax_step(flax_model: Any, trained: Any, x: Any, key: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(x, key) - x).mean())(flax_model)
    trained.update(flax_model, grads)
    return loss


losses = [float(flax_step(flax_model, trained, batch, jax.random.key(i))) for i in range(20)]
print(f"torch in flax: loss {losses[0]:.3f} to {losses[-1]:.3f}")
