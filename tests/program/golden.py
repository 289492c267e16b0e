"""One transformer in torch and by hand in JAX, with the same shardings: whose compiled steps should communicate alike.

The JAX program is what its author would write: a pytree of parameters, `with_sharding_constraint` where the layout of an
activation or of a gathered weight is meant, `jax.value_and_grad`, donated state, pinned output shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import mesh
import spmd
from spmd.program.xla import _hlo

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 64, 32, 64, 8, 3
BATCH, SEQ = 16, 8
LR = 0.1
Spec = tuple[Any, ...]
Annotate: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    def __init__(self, split: Annotate) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.split = split

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(linear(x_BTD)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Sequence parallel by annotation: how values lie between the tensor-parallel parts, where they enter them, and inside."""

    def __init__(self, between: Annotate, inside: Annotate, split: Annotate) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(split)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.between, self.inside, self.split = between, inside, split

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.between(x_BTD + self.inside(self.attention(self.inside(self.norm1(x_BTD)))))
        return self.between(x_BTD + self.inside(self.down(F.gelu(self.split(self.up(self.inside(self.norm2(x_BTD))))))))


class Transformer(nn.Module):
    def __init__(self, between: Annotate = lambda x: x, inside: Annotate = lambda x: x, split: Annotate = lambda x: x) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(between, inside, split) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.between, self.inside = between, inside

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.between(self.tokens(ids_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.inside(self.norm(x_BTD)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQ + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step of a user."""

    def step(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


@dataclass(frozen=True)
class Hand:
    """The program by hand.

    Attributes:
        specs: of each parameter by name.
        tokens: spec of ids and targets.
        between, inside, split: specs of [B, T, ...] as in `Block`, or None: as the compiler likes.
        gathered: specs of the weights while a layer runs, or None: as they lie.
        remat_gathers: gather again in the backward.
    """

    grid: mesh.Mesh
    specs: Mapping[str, Spec]
    tokens: Spec
    between: Spec | None = None
    inside: Spec | None = None
    split: Spec | None = None
    gathered: Mapping[str, Spec] | None = None
    remat_gathers: bool = False

    def at(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.grid.to_jax(), P(*spec))

    def whole(self, w: Mapping[str, jax.Array], prefix: str) -> dict[str, jax.Array]:
        """The parameters below a prefix, gathered for use."""
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        if self.gathered is None:
            return own
        return {name: self.gather(value, prefix + name) for name, value in own.items()}

    def gather(self, value: jax.Array, name: str) -> jax.Array:
        """Whole forward; the gradient straight into pieces."""
        assert self.gathered is not None
        there, back = self.at(*self.gathered[name]), self.at(*self.specs[name])

        @jax.custom_vjp
        def gathered(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, there)

        gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (jax.lax.with_sharding_constraint(g, back),))
        return gathered(value)

    def loss(self, w: Mapping[str, jax.Array], ids: jax.Array, targets: jax.Array) -> jax.Array:
        rest = self.whole({name: value for name, value in w.items() if not name.startswith("blocks.")}, "")
        x_BTD = self.laid(jnp.take(rest["tokens.weight"], ids, axis=0), self.between)
        for layer in range(LAYERS):
            own = {name: value for name, value in w.items() if name.startswith(f"blocks.{layer}.")}
            block = lambda own, x, layer=layer: self.block(self.whole(own, f"blocks.{layer}."), x)  # noqa: E731
            if self.remat_gathers:
                block = jax.checkpoint(block, policy=save_all_but_gathers)
            x_BTD = block(own, x_BTD)
        logits = self.laid(norm(x_BTD, rest["norm.weight"], rest["norm.bias"]), self.inside) @ rest["head.weight"].T
        # as torch's cross_entropy: the mean over the targets that are not ignore_index
        counts = (targets != -100).astype(logits.dtype)
        picked = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, VOCABULARY, dtype=logits.dtype), -1)
        return -jnp.sum(picked * counts) / jnp.sum(counts)

    def laid(self, x_BTD: jax.Array, spec: Spec | None) -> jax.Array:
        return x_BTD if spec is None else jax.lax.with_sharding_constraint(x_BTD, self.at(*spec))

    def block(self, w: Mapping[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
        h_BTD = self.laid(norm(x_BTD, w["norm1.weight"], w["norm1.bias"]), self.inside)
        q, k, v = (
            self.laid(linear(h_BTD, w, f"attention.{n}"), self.split).reshape(*h_BTD.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)
            for n in "qkv"
        )
        scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        mixed_BTD = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores), v).transpose(0, 2, 1, 3).reshape(x_BTD.shape)
        x_BTD = self.laid(x_BTD + self.laid(linear(mixed_BTD, w, "attention.out"), self.inside), self.between)
        h_BTD = self.laid(norm(x_BTD, w["norm2.weight"], w["norm2.bias"]), self.inside)
        hidden = jax.nn.gelu(self.laid(linear(h_BTD, w, "up"), self.split), approximate=False)
        return self.laid(x_BTD + self.laid(linear(hidden, w, "down"), self.inside), self.between)

    def compiled(self, model: nn.Module) -> Any:
        """The step, SGD, compiled for the model's parameters."""
        ids, targets = (jnp.asarray(t.numpy().astype("int32")) for t in batch())
        weights = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
        shardings = {name: self.at(*self.specs[name]) for name in weights}

        def step(w: Any, ids: jax.Array, targets: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(self.loss)(w, ids, targets)
            return {name: value - LR * grads[name] for name, value in w.items()}, loss

        arrays = jax.device_put(weights, shardings), *jax.device_put((ids, targets), self.at(*self.tokens))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, self.at()))
        return jitted.lower(*arrays).compile()


def save_all_but_gathers(primitive: Any, *args: Any, **params: Any) -> bool:
    """Checkpoint policy: everything is kept but the gathered weights."""
    return primitive.name not in ("sharding_constraint", "custom_vjp_call")


def norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5) * weight + bias


def linear(x: jax.Array, w: Mapping[str, jax.Array], name: str) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, w[f"{name}.weight"]) + w[f"{name}.bias"]


def collectives(compiled: Any, grid: mesh.Mesh) -> dict[tuple[str, tuple[str, ...]], int]:
    """Executions by kind and axes of a compiled program."""
    return _hlo.collectives(compiled.as_text(), tuple(grid.axis_names), tuple(grid.mesh_shape)).by_axis()


def flops(compiled: Any) -> int:
    """Of one device."""
    return _hlo.flops(compiled.as_text())


def ours(model: nn.Module, grid: mesh.Mesh, tokens: Spec, steps: int = 1) -> tuple[Any, list[float]]:
    """(the compiled step after `steps` calls, their losses) of a sharded model with SGD."""
    step = spmd.compile(torch_step(model, torch.optim.SGD(model.parameters(), lr=LR)))
    ids, targets = (spmd.mark_sharding(t.to("jax"), grid, tokens) for t in batch())
    return step, [step(ids, targets).item() for _ in range(steps)]
