"""The replacements of torch.nn.Module's methods record all reads: whatever changes in a module between two calls, the next one sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd.program.reads._module_reads import REPLACEMENTS


class Scaled(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.inner = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([2.0, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x @ self.weight * self.scale)


class Counting(Scaled):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        result: Any = super()._call_impl(*args, **kwargs)
        return result + 1


def _triple(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def _tenfold(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 10


def _replace_parameter(m: Scaled) -> None:
    m.weight = nn.Parameter(torch.ones_like(m.weight))


def _replace_buffer(m: Scaled) -> None:
    m.scale = torch.tensor([7.0, 8.0]).to(m.weight)


def _replace_module(m: Scaled) -> None:
    m.inner = nn.Identity()  # type: ignore[assignment]


def _shadow_parameter(m: Scaled) -> None:
    del m.weight
    m.__dict__["weight"] = torch.full((2, 2), 5.0).to(m.scale)


def _parameters_of_another(m: Scaled) -> None:
    m.__dict__["_parameters"] = {"weight": nn.Parameter(torch.full((2, 2), -1.0).to(m.scale))}


def _hook_globally(m: Scaled) -> Callable[[], None]:
    return nn.modules.module.register_module_forward_hook(lambda _, __, out: out * 2).remove


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "parameter": _replace_parameter,
    "buffer": _replace_buffer,
    "module": _replace_module,
    "parameter under an attribute": _shadow_parameter,
    "the dict of parameters": _parameters_of_another,
    "forward hook": lambda m: m.register_forward_hook(_tenfold),
    "forward pre-hook": lambda m: m.inner.register_forward_pre_hook(lambda _, args: (args[0] * 4,)),
    "global forward hook": _hook_globally,
    "forward on the object": lambda m: setattr(m.inner, "forward", lambda x: x - 1),
    "forward on the class": lambda m: setattr(type(m), "forward", _triple),
    "_call_impl on the object": lambda m: setattr(m.inner, "_call_impl", lambda x: x * 6),
    "class of the object": lambda m: setattr(m, "__class__", Counting),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_module_is_seen_by_the_next_call(change: str) -> None:
    results: list[list[torch.Tensor]] = []
    for device in ("cpu", "jax"):
        torch.manual_seed(0)
        model = type("Changed", (Scaled,), {})().to(device, torch.float64)
        call = spmd.compile(lambda x, m=model: m(x)) if device == "jax" else model
        x = torch.tensor([[1.0, -2.0]], dtype=torch.float64, device=device)
        found = [call(x), call(x)]
        undo = CHANGES[change](model)
        try:
            found += [call(x), call(x)]
        finally:
            if callable(undo):
                undo()
        results.append([t.detach().cpu() for t in found])
    for ours, its in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-14, atol=1e-14)  # float64: last bits
    assert not torch.equal(results[0][1], results[0][2])  # the change was one


def test_a_subclass_with_a_call_of_its_own() -> None:
    torch.manual_seed(0)
    model = Counting()
    x = torch.tensor([[1.0, -2.0]])
    expected = model(x)
    model.to("jax")
    torch.testing.assert_close(spmd.compile(lambda x: model(x))(x.to("jax")).cpu(), expected)


def test_an_attribute_that_no_module_has_is_torchs_error() -> None:
    model: Any = Scaled().to("jax")

    def read(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * model.missing
        except AttributeError as error:
            assert str(error) == "'Scaled' object has no attribute 'missing'"
            return x

    compiled, x = spmd.compile(read), torch.ones(2, device="jax")
    assert torch.equal(compiled(x).cpu(), torch.ones(2))
    model.register_buffer("missing", torch.tensor(3.0, device="jax"))
    assert torch.equal(compiled(x).cpu(), torch.full((2,), 3.0))


def test_stand_ins_are_of_torchs_own_functions() -> None:
    module: Any = nn.Module
    assert set(REPLACEMENTS) == {module._call_impl.__code__, module.__call__.__code__, module.__getattr__.__code__}
    assert {f"_global{name}" for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")} <= set(
        vars(nn.modules.module)
    )


def test_modules_that_run_in_one_another_name_their_operations() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()).to("jax")
    text = spmd.compile(lambda x: model(x)).program(torch.ones(1, 2, device="jax")).compiled.as_text()
    assert "/0/0/" in text
    assert "/0/0/0/" not in text


def test_a_token_model_is_traced_once() -> None:
    """transformers asks its arguments for an attribute `jax`, which tensors have since the device is there."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8))
    model.to("jax")
    step = spmd.compile(lambda ids: model(input_ids=ids).logits)
    step(torch.zeros(1, 4, dtype=torch.int64, device="jax"))
    assert step.num_traces == 1
