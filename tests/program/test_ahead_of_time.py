"""Programs for chips that are not here: compiled from shapes by the TPU compiler, read, and equal to those of JAX by hand."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mesh
import spmd

pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")

WIDTH, HIDDEN, BATCH = 256, 1024, 512  # the TPU compiler unrolls: eight times the batch takes eight times as long


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.fixture
def pod() -> mesh.Mesh:
    return mesh.Mesh(range(8), (4, 2), ("data", "model"), topology="v5e:2x4")


def step_over(grid: mesh.Mesh, optimizer: type[torch.optim.Optimizer]) -> tuple[spmd.Step, torch.optim.Optimizer, torch.Tensor]:
    """A training step of a model without memory, its optimizer and its batch."""
    with torch.device("meta"):
        model = MLP()
    model.to_empty(device="jax")
    spmd.mark_sharding(model.up.weight, grid, ("model", None))
    spmd.mark_sharding(model.down.weight, grid, (None, "model"))
    opt = optimizer(model.parameters(), lr=1e-3, momentum=0.9) if optimizer is torch.optim.SGD else optimizer(model.parameters())

    @spmd.compile
    def train_step(x: torch.Tensor) -> torch.Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        opt.step()
        return loss

    return train_step, opt, spmd.mark_sharding(torch.empty(BATCH, WIDTH, device="jax"), grid, ("data", None))


def by_hand(grid: mesh.Mesh) -> jax.stages.Compiled:
    """The same step with SGD and momentum, in JAX."""

    def loss_of(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        up, down = params
        return jnp.mean(jnp.square(jax.nn.gelu(x @ up.T, approximate=False) @ down.T - x))

    def step(params, momentum, x, lr):  # type: ignore[no-untyped-def]
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - lr * m, params, momentum), momentum, loss

    def shape(sizes: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=mesh.ShardingSpec(grid, spec).to_jax())

    params = shape((HIDDEN, WIDTH), "model", None), shape((WIDTH, HIDDEN), None, "model")
    outs = tuple(p.sharding for p in params)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(outs, outs, None))
    return jitted.lower(params, params, shape((BATCH, WIDTH), "data", None), shape(())).compile()


def test_program_for_a_pod_is_that_of_jax_by_hand_and_leaves_nothing_behind(pod: mesh.Mesh) -> None:
    train_step, opt, x = step_over(pod, torch.optim.SGD)
    before = spmd.metrics.counters()
    program = train_step.program(x)
    assert spmd.metrics.counters() == before
    assert not opt.state and train_step.num_traces == train_step.num_executables == 0
    hand = by_hand(pod)
    assert program.collectives().by_axis() == {("all-reduce", ("data",)): 1, ("all-reduce", ("model",)): 1}
    theirs = hand.memory_analysis()
    assert theirs is not None
    assert program.memory().argument_bytes == pytest.approx(theirs.argument_size_in_bytes, rel=0.03)
    in_all = theirs.argument_size_in_bytes + theirs.temp_size_in_bytes + theirs.output_size_in_bytes - theirs.alias_size_in_bytes
    assert program.memory().peak_bytes == pytest.approx(in_all, rel=0.03)
    assert program.flops() == 5 * 2 * BATCH * WIDTH * HIDDEN // 8  # five products: the input needs no gradient


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_compiling_for_a_pod_leaves_nothing_behind_and_running_is_refused(pod: mesh.Mesh, optimizer: type[torch.optim.Optimizer]) -> None:
    train_step, opt, x = step_over(pod, optimizer)
    state = {p: dict(s) for p, s in opt.state.items()}
    assert train_step.program(x).memory().argument_bytes > 0
    assert {p: dict(s) for p, s in opt.state.items()} == state
    assert (train_step.num_traces, train_step.num_executables, train_step.retraces) == (0, 0, [])


def test_a_program_for_a_pod_refuses_to_run(pod: mesh.Mesh) -> None:
    step, x = spmd.compile(lambda x: x + 1), spmd.mark_sharding(torch.empty(8, 4, device="jax"), pod, ("data", None))
    with pytest.raises(spmd.SpmdError, match=r"cannot run: its tensors are on Mesh\(data=4, model=2\) on v5e:2x4"):
        step(x)


def test_a_value_on_a_pod_cannot_be_read(pod: mesh.Mesh) -> None:
    x = spmd.mark_sharding(torch.empty(8, 4, device="jax"), pod, ("data", None))
    assert "v5e:2x4" in repr(x)
    with pytest.raises(spmd.SpmdError, match="is on topology 'v5e:2x4'"):
        x + 1


def test_a_program_for_chips_that_look_embeddings_up_elsewhere_can_be_read() -> None:
    pod = mesh.Mesh(range(8), (4, 2), ("data", "model"), topology="v5p:2x2x2")  # with sparse cores
    with torch.device("meta"):
        table = nn.Embedding(25152, 768)
    spmd.mark_sharding(table.weight, pod, ("model", None))
    table.to_empty(device="jax")
    tokens = spmd.mark_sharding(torch.empty(16, 1024, dtype=torch.long, device="jax"), pod, ("data", None))
    program = spmd.compile(lambda x: table(x)).program(tokens)
    assert program.collectives().counts() == {"all-reduce": 1}
    assert program.memory().peak_bytes > 25152 // 2 * 768 * 4


@pytest.mark.multidevice(num=8)
def test_program_of_devices_that_are_here_is_the_one_that_a_call_runs(mesh_4x2: mesh.Mesh) -> None:
    train_step, _, x = step_over(mesh_4x2, torch.optim.AdamW)
    program = train_step.program(x)
    assert (train_step.num_traces, train_step.num_executables) == (1, 1)
    assert train_step(x).item() == 0.0  # an empty tensor reads as zeros
    assert (train_step.num_traces, train_step.num_executables) == (1, 1)
    assert train_step.collectives() == program.collectives()


def test_an_empty_tensor_takes_no_memory_and_no_upload_until_it_is_used() -> None:
    before = spmd.metrics.counters()
    empty = torch.empty(1 << 40, 1 << 10, device="jax")  # more than any machine has
    assert spmd.metrics.counters() == before
    assert empty[:0].numel() == 0
    small = torch.empty(3, 2, device="jax")
    assert small.fill_(2.0).sum().item() == 12.0
    assert torch.empty(4, device="jax").tolist() == [0.0] * 4
