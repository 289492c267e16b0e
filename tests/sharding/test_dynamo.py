"""`mark_sharding` in functions compiled by `torch.compile(fullgraph=True)`: no graph break, the layouts, gradients, and refusals."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from spmd.sharding._annotate import IN_GRAPHS
from tests.oracle import assert_same, batch

pytestmark = [
    pytest.mark.multidevice(num=8),
    pytest.mark.skipif(not IN_GRAPHS, reason="torch 2.11: Dynamo takes no mesh as a constant, so mark_sharding breaks the graph"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Marked(nn.Module):
    """Two linears whose input and activation are marked; `returned`: by using what `mark_sharding` returns, or by its effect."""

    def __init__(self, grid: mesh.Mesh, returned: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.grid, self.returned = grid, returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        marked = spmd.mark_sharding(x, self.grid, ("data", None))
        hidden = F.relu(self.up(marked if self.returned else x))  # saves its result for the backward pass, which a mark must not spoil
        again = spmd.mark_sharding(hidden, self.grid, mesh.PartitionSpec("data", ("model",)))
        hidden = again if self.returned else hidden
        return self.down(hidden), hidden


class Plain(Marked):
    """The same without marks, on the host."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.up(x))
        return self.down(hidden), hidden


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_a_marked_activation_stays_in_one_graph(backend: str, returned: bool, train: bool, mesh_4x2: mesh.Mesh) -> None:
    host = Plain(mesh_4x2, returned)
    model = Marked(mesh_4x2, returned)
    model.load_state_dict(host.state_dict())
    model.to("jax")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        with torch.set_grad_enabled(train):
            (got, hidden), (want, wanted_hidden) = compiled(batch(8, 16).to("jax")), host(batch(8, 16))
        assert_same(got.detach().cpu(), want.detach())
        assert_same(hidden.detach().cpu(), wanted_hidden.detach())
        assert spmd.XLAShardedTensor(hidden.detach()).partition_spec == ("data", "model")
        if train:
            got.square().sum().backward()
            want.square().sum().backward()
            assert_same([p.grad.cpu() for p in model.parameters()], [p.grad for p in host.parameters()])
            model.zero_grad()
            host.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_traced_graph_lays_out_the_value_and_its_gradient(mesh_4x2: mesh.Mesh) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    model = Marked(mesh_4x2, returned=False).to("jax")
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    compiled(batch(8, 16).to("jax"))[0].sum().backward()
    forward, backward = graphs
    assert forward.count("laid_out.default") == 2 and backward.count("laid_out.default") == 1
    assert "copy_" not in forward and "ShardingSpec(Mesh.from_string('data=4,model=2'), PartitionSpec('data', 'model'))" in backward


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_on_the_host_a_mark_is_no_obstacle(backend: str, mesh_4x2: mesh.Mesh) -> None:
    model = Marked(mesh_4x2, returned=True)
    want = model(batch(8, 16))
    assert_same(torch.compile(model, fullgraph=True, backend=backend)(batch(8, 16)), want)


def test_another_mesh_is_another_graph_and_an_equal_one_is_not(mesh_4x2: mesh.Mesh) -> None:
    double = torch.compile(lambda x, grid: spmd.mark_sharding(x * 2, grid, ("data", None)), fullgraph=True, backend="eager")
    grids = [mesh_4x2, mesh.Mesh(range(8), (2, 4), ("data", "model")), copy.copy(mesh_4x2), mesh.Mesh(range(8), (4, 2), ("data", "model"))]
    for grid in grids:
        assert double(batch(8, 16).to("jax"), grid).sharding_spec == mesh.ShardingSpec(grid, ("data", None))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    ("spec", "uneven", "text"),
    [
        (("nope", None), "pad", "names axis 'nope'"),
        (("data",), "pad", "has rank 2, the spec has 1 entry"),
        (("data", None), "error", 'uneven="error"'),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_while_it_is_captured(spec: Any, uneven: Any, text: str, mesh_4x2: mesh.Mesh) -> None:
    compiled = torch.compile(lambda x: spmd.mark_sharding(x * 2, mesh_4x2, spec, uneven=uneven), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=text):
        compiled(batch(6, 16).to("jax"))


def test_a_mesh_of_jax_breaks_the_graph_and_a_full_graph_says_what_to_do(mesh_4x2: mesh.Mesh) -> None:
    foreign = mesh_4x2.to_jax()

    def double(x: torch.Tensor) -> torch.Tensor:
        return spmd.mark_sharding(x * 2, foreign, ("data", None)) + 1

    assert torch.compile(double, backend="eager")(batch(8, 16).to("jax")).partition_spec == ("data", None)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"m = mesh\.Mesh\.from_jax\(jax_mesh\)"):
        torch.compile(double, fullgraph=True, backend="eager")(batch(8, 16).to("jax"))


def test_importing_spmd_and_marking_import_neither_dynamo_nor_pallas() -> None:
    code = "import sys, spmd, torch; spmd.mark_sharding(torch.zeros(2).to('jax'), spmd.Mesh([0], (1,)), (0,))\n"
    code += "sys.exit(bool({'torch._dynamo', 'jax.experimental.pallas'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_meshes_and_specs_are_written_as_code_that_makes_them(mesh_4x2: mesh.Mesh) -> None:
    for value in (mesh_4x2, mesh.PartitionSpec("data", None), mesh.ShardingSpec(mesh_4x2, ("data", ("model",)))):
        text, names = value.__fx_repr__()  # pyright: ignore[reportAttributeAccessIssue]
        assert eval(text, dict(names)) == value


OF_PYTHON = [lambda x: x**2, lambda x: 1 - x, lambda x: 2 / x, lambda x: 2.0**x, lambda x: x // 2, lambda x: (x - 1) ** 2 * (1 - x)]


@pytest.mark.parametrize("backend", ["spmd", "eager"])
@pytest.mark.parametrize("fn", OF_PYTHON)
def test_operators_that_torch_writes_in_python(fn: Any, backend: str, mesh_4x2: mesh.Mesh) -> None:
    x = batch(8, 4).abs() + 0.5
    marked = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))
    assert_same(torch.compile(fn, backend=backend)(marked), torch.compile(fn, backend="eager")(x))


def test_a_compiled_step_of_a_marked_tensor_in_a_graph_break(mesh_4x2: mesh.Mesh) -> None:
    step = spmd.compile(lambda x: x * 2)
    outer = torch.compile(lambda x: step(x + 1) - x, backend="spmd")
    for k in range(3):
        x = batch(8, 4, seed=k)
        assert_same(outer(spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))), (x + 1) * 2 - x)
    assert step.num_traces == 1


def test_functions_of_marked_tensors_are_no_graphs_of_their_own(mesh_4x2: mesh.Mesh) -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = copy.deepcopy(host).to("jax")
    x = batch(8, 4)
    marked = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            for fn in (lambda m, x: m(x), lambda m, x: m(x) ** 2):
                for train in (True, False):
                    run = torch.compile(fn, backend="spmd")
                    assert_same(run(model.train(train), marked), fn(host.train(train), x))
