"""`SpmdFullyShardedDataParallel`: what it marks, what it wraps, what it constrains; on any number of devices."""

import functools
from typing import Any

import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from spmd.xla_names._fsdp_v2 import SpmdFullyShardedDataParallel as FSDPv2
from tests.grids import grid, line
from tests.oracle import MLP, assert_same, batch, train


def fsdp() -> mesh.Mesh:
    return line("fsdp")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def of_type(module: nn.Module, recurse: bool, unwrapped_params: int, kinds: tuple[type, ...]) -> bool:
    return True if recurse else isinstance(module, kinds)


POLICY = functools.partial(of_type, kinds=(MLP,))


@pytest.mark.parametrize("policy", [None, POLICY])
@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_that_of_the_bare_module(policy: Any, compiled: bool) -> None:
    host = Stack()
    device = Stack()
    device.load_state_dict(host.state_dict())
    wrapped = FSDPv2(device, fsdp(), auto_wrap_policy=policy)
    x, y = batch(8, 8), batch(8, 8, seed=2)
    optimizers = torch.optim.Adam(host.parameters()), torch.optim.Adam(wrapped.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return train(wrapped, optimizers[1], x, y)

    run = spmd.compile(step) if compiled else step
    shard = functools.partial(spmd.mark_sharding, mesh=fsdp(), partition_spec=("fsdp", None))
    for _ in range(2):
        loss = run(shard(x.to("jax")), shard(y.to("jax")))
        want = train(host, optimizers[0], x, y)
        assert_same(loss.detach(), want.detach())
    values = [p.detach() for p in wrapped.parameters()]
    assert_same(values, [p.detach() for p in host.parameters()], (2e-4, 2e-5))


def test_every_parameter_is_split_along_its_largest_dim_that_divides() -> None:
    wrapped = FSDPv2(Stack(), fsdp())
    assert wrapped.layers[0].up.weight.partition_spec == ("fsdp", None)
    assert wrapped.layers[0].down.weight.partition_spec == (None, "fsdp")
    odd = FSDPv2(nn.Linear(3, 5), fsdp())
    assert odd.weight.sharding_spec.is_replicated and odd.bias.sharding_spec.is_replicated


def test_an_output_is_split_over_the_batch() -> None:
    wrapped = FSDPv2(MLP(), fsdp())
    out = wrapped(batch(8, 8).to("jax"))
    assert spmd.wrap_if_sharded(out).partition_spec == ("fsdp", None)

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, {"aux": x}

    first, _ = FSDPv2(Pair(), fsdp())(batch(8, 8).to("jax"))
    assert spmd.wrap_if_sharded(first).partition_spec == ("fsdp", None)


def test_a_policy_wraps_inner_modules_with_every_option() -> None:
    calls: list[Any] = []

    def shard_output(output: torch.Tensor, where: mesh.Mesh) -> None:
        calls.append(where)
        spmd.mark_sharding(output, where, (("data", "fsdp"), None))

    where = grid(("data", "fsdp"))
    wrapped = FSDPv2(Stack(), where, shard_output, auto_wrap_policy=POLICY, extra_data_axis="data")
    inner = [m for m in wrapped.modules() if isinstance(m, FSDPv2)]
    assert len(inner) == 3 and all(isinstance(m.module, MLP) for m in inner[1:])
    assert all(m._extra_data_axis == "data" for m in inner)
    out = wrapped(batch(8, 8).to("jax"))
    assert calls == [where] * 3 and spmd.wrap_if_sharded(out).partition_spec == (("data", "fsdp"), None)


def test_the_extra_axis_reaches_wrapped_children_by_default() -> None:
    seen: list[Any] = []

    class Watched(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(spmd.wrap_if_sharded(x).partition_spec)
            return super().forward(x)

    inner = nn.Sequential(Watched(), Watched())
    policy = functools.partial(of_type, kinds=(Watched,))
    FSDPv2(inner, grid(("data", "fsdp")), auto_wrap_policy=policy, extra_data_axis="data")(
        spmd.mark_sharding(batch(8, 8).to("jax"), grid(("data", "fsdp")), (None, None))
    )
    assert seen[1] == (("data", "fsdp"), None)


def test_another_wrapper_and_shared_modules() -> None:
    made: list[nn.Module] = []

    def wrapper(module: nn.Module, **options: Any) -> nn.Module:
        made.append(module)
        return FSDPv2(module, **options)

    shared = MLP()
    tied = nn.Sequential(shared, nn.Tanh(), shared)
    wrapped = FSDPv2(tied, fsdp(), auto_wrap_policy=POLICY, auto_wrapper_callable=wrapper)
    assert made == [shared] and wrapped[0] is wrapped[2]


class NoForward(nn.Module):
    pass


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FSDPv2(FSDPv2(MLP(), fsdp()), fsdp()), spmd.SpmdError, "is already wrapped"),
        (lambda: FSDPv2(nn.Sequential(FSDPv2(MLP(), fsdp())), fsdp(), auto_wrap_policy=POLICY), spmd.SpmdError, "is already wrapped"),
        (lambda: FSDPv2(NoForward(), fsdp()), spmd.SpmdError, "NoForward has no forward"),
        (lambda: FSDPv2(nn.ModuleList([MLP()]), fsdp()), spmd.SpmdError, "ModuleList has no forward"),
        (lambda: FSDPv2(MLP(), line("data")), ValueError, "The provided fsdp axis is not in the mesh"),
        (lambda: FSDPv2(MLP(), fsdp(), extra_data_axis="dcn"), ValueError, "The provided dcn axis is not in the mesh"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_output_of_another_kind_wants_a_function() -> None:
    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": x}

    with pytest.raises(spmd.SpmdError, match=r"returned a dict(?s:.*)def shard_output"):
        FSDPv2(Named(), fsdp())(batch(8, 8).to("jax"))


def test_the_wrapper_shows_what_the_module_has() -> None:
    wrapped = FSDPv2(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), fsdp())
    assert isinstance(wrapped[0], nn.Linear) and wrapped.module[1] is wrapped[1]
    assert FSDPv2(MLP(), fsdp()).up.out_features == 16
    with pytest.raises(AttributeError):
        wrapped.nothing  # noqa: B018
