"""`spmd.remat`: the same gradients from less memory; what a policy keeps is not computed again."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from tests.oracle import assert_same, batch, twins

POLICIES: list[Any] = ["nothing", "dots", "everything", "dots_saveable", lambda name: name == "gelu"]


class Net(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self, depth: int = 3, dim: int = 8, p: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(p), nn.Linear(4 * dim, dim)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients(model: nn.Module, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_are_those_without_it(policy: Any, compiled: bool) -> None:
    host, device = twins(Net)
    for block in device.blocks:
        assert spmd.remat(policy)(block) is block
    assert list(device.state_dict()) == list(host.state_dict())
    fn = spmd.compile(lambda x: gradients(device, x)) if compiled else lambda x: gradients(device, x)
    assert_same(fn(batch(4, 8).to("jax")), gradients(host, batch(4, 8)))


def dots(device: nn.Module) -> int:
    step = spmd.compile(lambda x: gradients(device, x))
    step(batch(4, 8).to("jax"))
    program = step._program.captured.jaxpr
    return _live_dots(program)


def _live_dots(closed: Any) -> int:
    """Matrix products of a jaxpr that its results need."""
    from jax.interpreters import partial_eval as pe

    live, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return len(re.findall(r"= dot_general\b", str(live)))


def test_a_policy_decides_what_is_computed_again() -> None:
    counts = {}
    for policy in ("everything", "dots", "nothing"):
        _, device = twins(Net)
        for block in device.blocks:
            spmd.remat(policy)(block)
        counts[policy] = dots(device)
    # three blocks of two products each; the product that makes a block's result is needed by nobody again
    assert counts["dots"] == counts["everything"]
    assert counts["nothing"] == counts["everything"] + 3


def test_dropout_is_recomputed_with_its_mask() -> None:
    torch.manual_seed(0)
    plain = Net(p=0.5).to("jax")
    again = copy.deepcopy(plain)
    for block in again.blocks:
        spmd.remat("dots")(block)
    results = []
    for model in (plain, again):
        torch.manual_seed(7)
        step = spmd.compile(lambda x, model=model: gradients(model, x))
        results.append([t.cpu() for t in torch.utils._pytree.tree_leaves((step(batch(4, 8).to("jax")), step(batch(4, 8).to("jax"))))])
    assert_same(*results)


def test_a_function_and_a_copy_of_a_module_are_wrapped_too() -> None:
    weight = batch(8, 8).to("jax").requires_grad_()
    layer = spmd.remat()(lambda x, scale=1.0: torch.tanh(F.linear(x, weight)) * scale)
    step = spmd.compile(lambda x: torch.autograd.grad(layer(x, scale=2.0).sum(), weight)[0])
    w = weight.detach().cpu().requires_grad_()
    x = batch(4, 8, seed=3)
    assert_same(step(x.to("jax")), torch.autograd.grad((torch.tanh(F.linear(x, w)) * 2).sum(), w)[0])
    block = spmd.remat()(nn.Linear(8, 8).to("jax"))
    twin = copy.deepcopy(block)
    assert twin.forward.__self__ is twin
    with torch.no_grad():
        twin.weight.zero_()
    assert_same(twin(x.to("jax")), block.bias.detach().cpu().expand(4, 8))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(spmd.SpmdError, match=r"there is no remat policy 'dot'(?s:.*)nothing, dots, everything"):
        spmd.remat("dot")
