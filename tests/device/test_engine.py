"""Backward of eager device tensors: on the caller's thread, and raising what a hook raised, each caller its own."""

import threading
from typing import Any

import pytest
import torch

import spmd  # noqa: F401
from spmd.device._engine import Engine


def leaf() -> torch.Tensor:
    return torch.ones(3, device="jax", requires_grad=True)


def raiser(error: BaseException) -> Any:
    def hook(*ignored: Any) -> None:
        raise error

    return hook


def test_the_engine_is_ours() -> None:
    assert type(torch.autograd.Variable._execution_engine) is Engine


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemError("mine"), StopIteration(3)], ids=repr)
def test_what_a_hook_raises_is_raised(error: BaseException) -> None:
    w = leaf()
    handle = w.register_hook(raiser(error))
    with pytest.raises(type(error)) as raised:
        (w * 2).sum().backward()
    assert raised.value is error
    handle.remove()
    (w * 2).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("through", ["grad", "backward"])
def test_a_hook_that_catches_the_error_of_a_backward_inside_it_goes_on(through: str) -> None:
    outer, inner, caught = leaf(), leaf(), []
    inner.register_hook(raiser(ValueError("inner")))

    def hook(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            loss = (inner * 2).sum()
        try:
            torch.autograd.grad(loss, inner) if through == "grad" else loss.backward()
        except ValueError as error:
            caught.append(str(error))
        return grad * 3

    outer.register_hook(hook)
    outer.sum().backward()
    assert caught == ["inner"]
    assert outer.grad is not None
    assert outer.grad.tolist() == [3.0] * 3


def test_threads_get_their_own_errors() -> None:
    got: dict[int, str] = {}

    def run(i: int) -> None:
        for k in range(20):
            w = leaf()
            w.register_hook(raiser(ValueError(f"{i} {k}")))
            try:
                (w * 2).sum().backward()
            except ValueError as error:
                got[i] = got.get(i, "") + ("" if str(error) == f"{i} {k}" else f"{error} in {i} {k};")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert got == dict.fromkeys(range(4), "")


def test_hooks_run_on_the_callers_thread() -> None:
    w, ran = leaf(), []
    w.register_hook(lambda g: ran.append(threading.get_ident()))
    (w * 2).sum().backward()
    assert ran == [threading.get_ident()]
    assert torch._C._is_multithreading_enabled()
