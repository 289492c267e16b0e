"""Golden plans: the compiled step communicates as the program written by hand in JAX does, kind by kind, axis by axis.

XLA:CPU leaves a reduce-scatter as an all-reduce whose result is sliced; tests/fsdp compiles for TPU, where it is one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mesh
import spmd
from tests.program import golden
from tests.program.golden import Hand, Transformer

pytestmark = pytest.mark.multidevice(num=8)
M = "model"
MEGATRON = [
    ("{q,k,v,up}.weight", (M, None)),
    ("{q,k,v,up}.bias", (M,)),
    ("{out,down}.weight", (None, M)),
    ("{out,down}.bias", None),
    ("{tokens,head}.weight", (M, None)),
    ("{norm,norm1,norm2}.*", None),
]


def twin(**annotations: Any) -> tuple[Transformer, Transformer]:
    """The same model on the host and, with annotations of activations, on the device."""
    torch.manual_seed(0)
    host = Transformer()
    torch.manual_seed(0)
    return host, Transformer(**annotations).to("jax")


def host_losses(host: Transformer, steps: int) -> list[float]:
    step = golden.torch_step(host, torch.optim.SGD(host.parameters(), lr=golden.LR))
    return [step(*golden.batch()).item() for _ in range(steps)]


def annotation(grid: mesh.Mesh, spec: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: spmd.mark_sharding(tensor, grid, spec)


SEQUENCE = {"between": ("data", M, None), "inside": ("data", None, None), "split": ("data", None, M)}
# (mesh, spec of the tokens, annotated activations, collectives by kind and axes)
# Forward and backward of 3 layers sum over "model" 6 times each, less the first layer's backward, which only the embedding
# and the norms before it need; the cross-entropy over a split vocabulary sums 3 times, the look-up in a split table once.
PLANS: dict[str, tuple[str, Any, dict[str, Any], dict[tuple[str, tuple[str, ...]], int]]] = {
    "Megatron, one axis": ("model=8", (None, None), {}, {("all-reduce", (M,)): 16}),
    "Megatron, two axes": ("data=2,model=4", ("data", None), {}, {("all-reduce", (M,)): 16, ("all-reduce", ("data",)): 2}),
    "Megatron, sequence parallel": (
        "data=2,model=4",
        ("data", None),
        SEQUENCE,
        {("all-gather", (M,)): 14, ("all-reduce", (M,)): 16, ("all-reduce", ("data",)): 2},
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallel_steps_communicate_as_jax_by_hand(plan: str) -> None:
    axes, tokens, activations, expected = PLANS[plan]
    grid = mesh.Mesh.from_string(axes)
    host, device = twin(**{name: annotation(grid, spec) for name, spec in activations.items()})
    report = spmd.shard_module(device, grid, MEGATRON)
    specs = {placement.name: tuple(placement.sharding.partition_spec) for placement in report}
    hand = Hand(grid, specs, tokens, **activations).compiled(host)
    step, losses = golden.ours(device, grid, tokens, steps=2)
    assert step.collectives().by_axis() == golden.collectives(hand, grid) == expected
    assert losses == pytest.approx(host_losses(host, 2), rel=1e-5)
    assert step.flops() == golden.flops(hand)


GATHERS, AGAIN = 52, 18  # parameters of the model; those of three blocks that a backward reads whole (six matrices each)
SHARDED: dict[str, tuple[str, Any, bool, dict[tuple[str, tuple[str, ...]], int]]] = {
    "FSDP, weights kept": ("fsdp=8", ("fsdp", None), False, {("all-gather", ("fsdp",)): GATHERS, ("all-reduce", ("fsdp",)): 2}),
    "FSDP": ("fsdp=8", ("fsdp", None), True, {("all-gather", ("fsdp",)): GATHERS + AGAIN, ("all-reduce", ("fsdp",)): 2}),
    "hybrid": (
        "replica=2,fsdp=4",
        (("replica", "fsdp"), None),
        True,
        {
            ("all-gather", ("fsdp",)): GATHERS + AGAIN,
            ("all-reduce", ("replica", "fsdp")): 2,
            ("all-reduce", ("fsdp",)): 1,
            ("all-reduce", ("replica",)): 1,
        },
    ),
}


@pytest.mark.parametrize("plan", SHARDED)
def test_fully_sharded_steps_communicate_as_jax_by_hand(plan: str) -> None:
    axes, tokens, reshard, expected = SHARDED[plan]
    grid = mesh.Mesh.from_string(axes)
    host, device = twin()
    for block in device.blocks:
        spmd.fully_shard(block, grid, reshard_after_forward=reshard)
    spmd.fully_shard(device, grid, reshard_after_forward=False)
    specs = {name: p.partition_spec for name, p in device.named_parameters()}
    gathered = {name: tuple(mesh.without_axes(spec, ("fsdp",))) for name, spec in specs.items()}
    hand = Hand(grid, {n: tuple(s) for n, s in specs.items()}, tokens, gathered=gathered, remat_gathers=reshard).compiled(host)
    step, losses = golden.ours(device, grid, tokens, steps=2)
    assert step.collectives().by_axis() == golden.collectives(hand, grid) == expected
    assert losses == pytest.approx(host_losses(host, 2), rel=1e-5)
    assert step.flops() == golden.flops(hand)
